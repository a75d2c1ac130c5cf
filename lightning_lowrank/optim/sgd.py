"""SGD whose momentum lives in a subspace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd
from typing_extensions import override

from lightning_lowrank.arguments import check_number
from lightning_lowrank.internals.torch import sgd_update, steps_singly
from lightning_lowrank.optim.base import (
    Group,
    Moments,
    ProjectedOptimizer,
    Subspace,
    Tensors,
    add_product,
    add_to_weight,
    matrix,
)


class ProjectedSGD(ProjectedOptimizer):
    """SGD whose momentum lives in a subspace of each weight matrix (FedSLoP, Algorithm 1, lines 18 and 19).

    With ``P`` (``in × rank``, orthonormal columns; Eq. 2 of FedSLoP has ``Π = P Pᵀ``) and the gradient ``G`` of
    a weight ``W`` (``out × in``), a step is ``v ← μ v + (G + λ W) P`` and ``W ← W − η v Pᵀ``. ``v`` is ``out × rank``,
    so the momentum takes exactly ``rank / in`` of what torch's takes, and between two refreshes the change of
    ``W`` stays in the span of ``P``: weight decay is inside the projection for that reason.

    A parameter of two or more dimensions is the matrix ``parameter.flatten(1)``. If ``rank`` is at least
    its number of columns, if it has fewer dimensions (biases, norms), and in groups with ``rank=None``,
    the step is that of :class:`torch.optim.SGD`, bit for bit.

    A random ``P`` is not part of the state: it is drawn again from ``seed``, the parameter's place among the
    optimizer's parameters and the number of the refresh. The optimizer holds it (``in × rank`` numbers)
    outside ``state`` while it is in use.

    In a group whose ``"stacked"`` is ``True`` (by default ``False``; set it while the parameters are swapped),
    every parameter is a stack ``[clients, …]`` and each client's slice is stepped as if it were the parameter: in the
    same random ``P`` as it would have alone, or in one from its own gradient. The clients must have made the same
    number of steps. Each tensor of the state that has dimensions has the clients as its first one (moments
    ``[clients, out, rank]``), so clients that continue after the others' last step have the state ``value[:active]``.

    Args:
        params: Parameters or parameter groups; see :func:`projected_parameter_groups`.
        lr: Learning rate ``η``, at least 0; a number or a tensor with one element. Default: 0.001.
        momentum: Momentum ``μ``, at least 0. By default 0: no momentum and no state.
        dampening: Weight of a gradient in the momentum is 1 − ``dampening``. Default: 0.
        weight_decay: ``λ``, at least 0. Default: 0.
        nesterov: Whether to use Nesterov momentum; needs momentum and no dampening. Off by default.
        rank: Number of columns of ``P``, at least 1, or ``None`` for no projection. Groups may have their own;
            this is the default.
        subspace: ``"random"`` (default): ``P`` is uniformly distributed (Haar; QR of a Gaussian with the signs
            corrected), the same on every device. ``"gradient"``: the leading right singular vectors of the
            gradient of the step at which it is made, completed at random if the gradient's rank is
            smaller (GaLore, Zhao et al. 2024); this ``P`` is in the state as ``"projection"``.
        refresh_interval: Steps from one subspace to the next, at least 1; ``None`` for new subspaces on
            :meth:`refresh` only. By default 200, as in GaLore.
        moments: How a refresh changes the moments. ``"rotate"`` (default): ``v ← v P_oldᵀ P_new``, the
            part of the momentum that the new subspace has (for random subspaces ``rank / in`` of its square,
            on average). ``"zero"``: they start again from zero, as in every round of FedSLoP's Algorithm 1.
            ``"keep"``: the coefficients stay and apply to other directions, as in GaLore.
        seed: Seed of the random subspaces. Default: 0.
        maximize: Whether to go up the gradient. Off by default.
        foreach: Whether torch's multi-tensor implementation does the arithmetic on the moments. By default
            torch decides.

    Raises:
        RuntimeError: If a parameter is complex.
        TypeError: If an argument is of a wrong kind.
        ValueError: If an argument is out of range.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_lowrank.optim import ProjectedSGD
        >>> layer = nn.Linear(64, 8)
        >>> optimizer = ProjectedSGD(layer.parameters(), lr=0.1, momentum=0.9, rank=4)
        >>> layer(torch.ones(2, 64)).sum().backward()
        >>> optimizer.step()
        >>> {name: tuple(value.shape) for name, value in optimizer.state[layer.weight].items()}
        {'momentum_buffer': (8, 4)}
        >>> tuple(optimizer.projection(layer.weight).shape)
        (64, 4)
    """

    _moment_names = ("momentum_buffer",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        rank: int | None,
        subspace: Subspace = "random",
        refresh_interval: int | None = 200,
        moments: Moments = "rotate",
        seed: int = 0,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "rank": rank,
            "subspace": subspace,
            "refresh_interval": refresh_interval,
            "moments": moments,
            "seed": seed,
            "maximize": maximize,
            "foreach": foreach,
        }
        super().__init__(params, defaults)

    @override
    def _check_options(self, options: Mapping[str, Any]) -> None:
        super()._check_options(options)
        check_number("momentum", options["momentum"], least=0)
        check_number("dampening", options["dampening"])
        if options["nesterov"] and (options["momentum"] == 0 or options["dampening"] != 0):
            raise ValueError(
                f"nesterov needs a momentum above 0 and dampening=0, but momentum={options['momentum']!r} and "
                f"dampening={options['dampening']!r}."
            )

    @override
    def _project(self, group: Group, parameter: Tensor, projection: Tensor) -> Tensor:
        coefficients = super()._project(group, parameter, projection)
        if group["weight_decay"] != 0:
            # With maximize, torch flips the sign of these gradients, but decay must still pull towards zero.
            decay = -group["weight_decay"] if group["maximize"] else group["weight_decay"]
            add_product(coefficients, matrix(group, parameter), projection, alpha=decay)
        return coefficients

    @override
    def _step_projected(self, group: Group, parameters: Tensors, projections: Tensors) -> None:
        if group["nesterov"] or not steps_singly(group):
            super()._step_projected(group, parameters, projections)
            return
        # The product is added to the momentum, and the momentum's product to the weight, without a tensor in between:
        # this saves two passes over small matrices, a tenth of a small model's step.
        momentum, fresh = group["momentum"], 1 - group["dampening"]
        for parameter, projection in zip(parameters, projections, strict=True):
            buffer = self.state[parameter].get("momentum_buffer") if momentum else None
            if buffer is None:
                buffer = self._project(group, parameter, projection)
                if momentum:
                    self.state[parameter]["momentum_buffer"] = buffer
            else:
                assert parameter.grad is not None
                add_product(buffer, matrix(group, parameter.grad), projection, beta=momentum, alpha=fresh)
                if group["weight_decay"]:
                    decay = fresh * group["weight_decay"]
                    add_product(buffer, matrix(group, parameter), projection, alpha=decay)
            add_to_weight(group, parameter, buffer, projection, alpha=-group["lr"])

    @override
    def _update(
        self, group: Group, parameters: Tensors, targets: Tensors, gradients: Tensors, weight_decay: float
    ) -> None:
        if steps_singly(group):
            for parameter, target, gradient in zip(parameters, targets, gradients, strict=True):
                sgd_update(self, group, parameter, target, gradient, weight_decay)
            return
        has_momentum = group["momentum"] != 0
        buffers = [self.state[p].get("momentum_buffer") for p in parameters] if has_momentum else []
        begins = has_momentum and any(buffer is None for buffer in buffers)
        sgd(
            targets,
            gradients,
            buffers,
            foreach=group["foreach"],
            weight_decay=weight_decay,
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        if begins:
            for parameter, buffer in zip(parameters, buffers, strict=True):
                self.state[parameter]["momentum_buffer"] = buffer

    @override
    def _rotate(self, group: Group, state: dict[str, Tensor], rotation: Tensor) -> None:
        buffer = state["momentum_buffer"]
        buffer.copy_(buffer.to(rotation.dtype) @ rotation)
