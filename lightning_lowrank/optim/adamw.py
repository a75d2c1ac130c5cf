"""AdamW whose moments live in a subspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from lightning_lowrank.arguments import check_number
from lightning_lowrank.optim.base import Group, Moments, ProjectedOptimizer, Subspace, Tensors


class ProjectedAdamW(ProjectedOptimizer):
    """AdamW whose moments live in a subspace of each weight matrix.

    Both moments are of the coefficients ``G P`` (``out × rank``), and the change of a weight ``W`` is
    ``−η (m̂ / (√v̂ + ε)) Pᵀ``. Weight decay is decoupled as in AdamW, ``W ← (1 − η λ) W``, and acts on all of
    ``W``: with it, the change of ``W`` is not in the span of ``P``. Projecting the coefficients is not the same as
    projecting AdamW's step, because the second moment depends on the basis.

    Which parameters are matrices, which are dense (and step exactly as in :class:`torch.optim.AdamW`), where ``P`` is
    stored, how subspaces are refreshed and how clients are stacked is as for :class:`ProjectedSGD`.

    Args:
        params: Parameters or parameter groups; see :func:`projected_parameter_groups`.
        lr: Learning rate ``η``, at least 0; a number or a tensor with one element (not with
            ``foreach=True``). Default: 0.001.
        betas: Decay rates of the first and the second moment, each at least 0 and below 1. Default: 0.9 and
            0.999.
        eps: ``ε``, at least 0. Default: 1e-8.
        weight_decay: ``λ``, at least 0. Default: 0.01.
        rank: Number of columns of ``P``, at least 1, or ``None`` for no projection. Groups may have their own;
            this is the default.
        subspace: ``"random"`` (default) or ``"gradient"``, as for :class:`ProjectedSGD`.
        refresh_interval: Steps from one subspace to the next, at least 1; ``None`` for new subspaces on
            :meth:`refresh` only. By default 200, as in GaLore.
        moments: How a refresh changes the moments. ``"rotate"`` (default): with ``Q = P_oldᵀ P_new``,
            ``m̂ ← m̂ Q`` and ``v̂ ← (v̂ − m̂²)(Q∘Q) + (m̂ Q)²``, the coefficients' means and variances in the new basis
            if they are independent (LDAdam, Robert et al. 2024); the variance ``v̂ − m̂²`` is taken as 0 if its
            estimate is negative, so ``|m̂| ≤ √v̂`` afterwards. ``"zero"``: both moments and the count of steps start
            again from zero, so that the bias correction is right. ``"keep"``: the coefficients stay and apply to other
            directions, as in GaLore.
        seed: Seed of the random subspaces. Default: 0.
        maximize: Whether to go up the gradient. Off by default.
        foreach: Whether torch's multi-tensor implementation does the arithmetic on the moments. By default
            torch decides.

    Raises:
        RuntimeError: If a parameter is complex.
        TypeError: If an argument is of a wrong kind.
        ValueError: If an argument is out of range.

    Example:
        >>> from torch import nn
        >>> from lightning_lowrank.optim import ProjectedAdamW
        >>> layer = nn.Linear(64, 8)
        >>> optimizer = ProjectedAdamW(layer.parameters(), rank=4, subspace="gradient")
        >>> layer(torch.ones(2, 64)).sum().backward()
        >>> optimizer.step()
        >>> {name: tuple(value.shape) for name, value in optimizer.state[layer.weight].items()}
        {'projection': (64, 4), 'step': (), 'exp_avg': (8, 4), 'exp_avg_sq': (8, 4)}
    """

    _moment_names = ("step", "exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
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
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
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
        betas = options["betas"]
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise ValueError(f"betas must be two numbers, such as (0.9, 0.999), but is {betas!r}.")
        for index, beta in enumerate(betas):
            check_number(f"betas[{index}]", beta, least=0, below=1)
        check_number("eps", options["eps"], least=0)
        if isinstance(options["lr"], Tensor) and options["foreach"]:
            raise ValueError("lr must be a number with foreach=True, but is a tensor; give float(lr) or foreach=False.")

    @override
    def _decay(self, group: Group) -> float:
        return float(1 - group["lr"] * group["weight_decay"])

    @override
    def _update(
        self, group: Group, parameters: Tensors, targets: Tensors, gradients: Tensors, weight_decay: float
    ) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for state, target in zip(states, targets, strict=True):
            if "step" not in state:
                # The count of steps is on the CPU as in torch, and at least float32, because 16 bits stop counting
                # early.
                precise = torch.promote_types(torch.get_default_dtype(), torch.float32)
                state["step"] = torch.zeros((), dtype=precise, device="cpu")
                state["exp_avg"] = torch.zeros_like(target)
                state["exp_avg_sq"] = torch.zeros_like(target)
        adamw(
            targets,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=group["foreach"],
            # Fused steps take one pass over the coefficients. Dense parameters step as by torch's AdamW, bit for bit.
            fused=targets is not parameters and group["foreach"] is None and all(target.is_cpu for target in targets),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=weight_decay,
            eps=group["eps"],
            maximize=group["maximize"],
        )

    @override
    def _rotate(self, group: Group, state: dict[str, Tensor], rotation: Tensor) -> None:
        first_correction, second_correction = (1 - beta ** state["step"].item() for beta in group["betas"])
        mean = state["exp_avg"].to(rotation.dtype) / first_correction
        variance = (state["exp_avg_sq"].to(rotation.dtype) / second_correction - mean**2).clamp(min=0)
        mean = mean @ rotation
        state["exp_avg"].copy_(mean * first_correction)
        state["exp_avg_sq"].copy_((variance @ rotation**2 + mean**2) * second_correction)
