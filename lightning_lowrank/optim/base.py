"""Optimizers whose moments live in a subspace of each weight matrix, as FedSLoP's clients and GaLore use them.

For a weight matrix with gradient ``G`` and a matrix ``P`` of orthonormal columns, the optimizer sees only the
coefficients ``G P``, and turns its step ``D`` into the change ``D Pᵀ``. The arithmetic on the coefficients is torch's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lightning_lowrank.arguments import check_choice, check_integer, check_number, to_plain
from lightning_lowrank.internals.torch import without_autocast
from lightning_lowrank.optim.deferred import CHANGE, Deferred
from lightning_lowrank.optim.orthonormal import completed_basis, haar_basis
from lightning_lowrank.seeding import generator

Subspace = Literal["random", "gradient"]
Moments = Literal["keep", "zero", "rotate"]
Group = dict[str, Any]
Tensors = list[Tensor]


class ProjectedOptimizer(Optimizer, ABC):
    """Base class: subspaces, refreshes and the projected step; a subclass defines the arithmetic of the moments.

    In addition to the options, a parameter group holds plain Python values that ``state_dict()`` includes:

    - ``refresh_number``: the number of its subspaces' draw from the stream of its ``seed``;
    - ``steps_since_refresh``;
    - ``subspaces``: for each parameter the seed and the number of the subspace in which its moments are, and whether
      it is due for a new one; ``None`` if the parameter has not had a step;
    - ``stacked``: true while the parameters are stacks of clients.
    """

    _moment_names: ClassVar[tuple[str, ...]]

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        # Keyed by the parameters' indices: stacking and unstacking clients replaces the tensors.
        self._projections: dict[int, tuple[tuple[Any, ...], Tensor]] = {}
        # The last step's projection with the settings it was made for: the next step reuses it if they are the same.
        self._last_projections: dict[int, tuple[tuple[Any, ...], Tensor | None]] = {}
        # Per parameter: the buffer for the coefficients of deferred steps, and its `Deferred` weight.
        self._deferred: dict[int, tuple[Tensor, Deferred]] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._projections, self._last_projections, self._deferred = {}, {}, {}

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters, which may have its own options.

        Args:
            param_group: ``"params"`` and any of the optimizer's options; ``"rank": None`` makes the group
                dense, ``"stacked": True`` means that its parameters are stacks of clients.

        Raises:
            RuntimeError: If a parameter is complex.
            TypeError: If the group or its parameters are of a wrong kind.
            ValueError: If an option is out of range or a parameter is in another group already.
        """
        if isinstance(param_group, Mapping):
            self._check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        param_group.update({name: to_plain(value) for name, value in param_group.items() if name != "params"})
        parameters = param_group["params"]
        if any(torch.is_complex(parameter) for parameter in parameters):
            self.param_groups.pop()
            raise RuntimeError(
                f"{type(self).__name__} does not support complex parameters; hold the real and the imaginary "
                "part as parameters of their own, or use torch's optimizer for them."
            )
        param_group.update(refresh_number=0, steps_since_refresh=0, subspaces=(None,) * len(parameters))
        param_group.setdefault("stacked", False)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; training then continues bit for bit.

        Raises:
            ValueError: If the state is of another kind of optimizer, or of other groups.
        """
        if any("subspaces" not in group for group in state_dict["param_groups"]):
            raise ValueError(
                f"state_dict is of an optimizer without projections, but this is a {type(self).__name__}, "
                "whose moments have another shape; start it without a state."
            )
        lacking = sorted({name for group in state_dict["param_groups"] for name in self.defaults.keys() - group.keys()})
        if lacking:
            raise ValueError(
                f"state_dict lacks {', '.join(lacking)}, which each group of a {type(self).__name__} has; load the "
                "state of such an optimizer, or start without one."
            )
        super().load_state_dict(state_dict)

    def defer(self, parameters: Iterable[Tensor]) -> list[tuple[Tensor, Deferred]]:
        """Defer the next steps of some weights, if possible: their changes stay apart until :meth:`fold`.

        The forward pass must compute with ``W + C Pᵀ`` in place of each returned weight ``W``. When :meth:`step` is
        called, the gradient of ``C`` must be in ``C.grad``, which the step clears, and ``W.grad`` must be ``None``.
        Steps are the same up to rounding. Steps can be deferred for matrices with a random subspace and without weight
        decay, unless the next step refreshes the subspace. Earlier changes of the other ``parameters`` are folded.

        Args:
            parameters: Parameters of this optimizer. Nothing may read their values or gradients until :meth:`fold`.

        Returns:
            The weights whose steps are deferred, and for each ``P`` and ``C``.
        """
        wanted = {id(parameter) for parameter in parameters}
        found: list[tuple[Tensor, Deferred]] = []
        index = -1
        for group in self.param_groups:
            interval = group["refresh_interval"]
            possible = (
                group["subspace"] == "random"
                and group["weight_decay"] == 0
                and (interval is None or group["steps_since_refresh"] < interval)
            )
            for parameter in group["params"]:
                index += 1
                if id(parameter) not in wanted:
                    continue
                if possible and parameter.ndim - group["stacked"] == 2 and not _is_dense(group, parameter):
                    found.append((parameter, self._defer(group, index, parameter)))
                else:
                    self._fold(group, index, parameter, 0)
        return found

    def _defer(self, group: Group, index: int, parameter: Tensor) -> Deferred:
        state = self.state[parameter]
        if CHANGE not in state:
            state[CHANGE] = parameter.new_zeros(*parameter.shape[:-1], group["rank"], requires_grad=False)
        known = self._deferred.get(index)
        if known is None or known[0] is not state[CHANGE]:
            basis = self._random_projection(group, parameter, index, group["seed"], group["refresh_number"])
            leaf = state[CHANGE].detach().requires_grad_()
            known = self._deferred[index] = state[CHANGE], Deferred(basis, leaf)
        return known[1]

    @torch.no_grad()
    def fold(self, first: int = 0) -> None:
        """Add the changes of deferred steps to the weights.

        Args:
            first: If parameters are stacks, the first client whose weights get theirs.
        """
        index = -1
        for group in self.param_groups:
            for parameter in group["params"]:
                index += 1
                self._fold(group, index, parameter, first)

    @torch.no_grad()
    def _fold(self, group: Group, index: int, parameter: Tensor, first: int) -> None:
        change = self.state.get(parameter, {}).get(CHANGE)
        if change is None:
            return
        basis = self._random_projection(group, parameter, index, group["seed"], group["refresh_number"])
        if first < len(change):
            add_product(parameter[first:], change[first:], basis.mT)
            change[first:].zero_()
        if first == 0:
            self._deferred.pop(index, None)
            del self.state[parameter][CHANGE]
            if not self.state[parameter]:
                del self.state[parameter]

    def _gradient_of_change(self, index: int, parameter: Tensor) -> Tensor | None:
        """Return and clear the gradient of a weight's deferred change; ``None`` if the weight has none."""
        known = self._deferred.get(index)
        if known is None or known[0] is not self.state.get(parameter, {}).get(CHANGE):
            return None
        gradient, known[1].change.grad = known[1].change.grad, None
        if parameter.grad is not None:
            raise RuntimeError(
                "a weight whose steps are deferred has a gradient of its own: the training step used it without its"
                " deferred change."
            )
        return gradient

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, as torch's optimizers do. Parameters without a gradient stay as they are.

        Raises:
            RuntimeError: If a gradient is sparse. Nothing is changed then.
            ValueError: If stacked parameters are of different numbers of clients. Nothing is changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    raise RuntimeError(
                        f"{type(self).__name__} does not support sparse gradients; use sparse=False in the embedding,"
                        " or an optimizer such as torch.optim.SparseAdam for it."
                    )
        if any(group["stacked"] for group in self.param_groups):
            self._check_stacks()
        # Under autocast the step's matrix products would have a lower precision than torch's steps.
        with without_autocast():
            first = 0
            for group in self.param_groups:
                self._step_group(group, first)
                first += len(group["params"])
        return loss

    def refresh(self, seed: int | None = None) -> None:
        """Use new subspaces from the next step on, in every group; ``moments`` says how the moments are carried over.

        Args:
            seed: A new seed, whose stream of subspaces is used from its beginning. FedSLoP's server sends one a
                round, so that all clients share the subspaces. By default the stream in use continues.

        Raises:
            TypeError: If ``seed`` is not an integer.
        """
        if seed is not None:
            check_integer("seed", seed, least=None)
        self.fold()
        for group in self.param_groups:
            if seed is not None:
                group["seed"] = seed
            self._refresh_group(group, group["refresh_number"] + 1 if seed is None else 0)

    @torch.no_grad()
    def projection(self, parameter: Tensor) -> Tensor | None:
        """The projection ``P`` of the last step; after :meth:`refresh`, that of the next step.

        The change ``D`` of the parameter (as a matrix) by :class:`ProjectedSGD` between two refreshes is
        ``(D P) Pᵀ`` to rounding, so a client only has to send ``D P``.

        Args:
            parameter: A parameter of this optimizer.

        Returns:
            ``P`` of shape ``[in, rank]``, with the parameter's dtype and device (it is used by the next
            steps: copy it before changing it), or ``None`` if the parameter is not projected. For a stacked
            parameter, a random ``P`` is that of all clients, and one from the gradients is
            ``[clients, in, rank]``.

        Raises:
            RuntimeError: If the subspace depends on the gradient of the next step.
            ValueError: If the parameter is not one of this optimizer's.
        """
        index = 0
        for group in self.param_groups:
            for position, candidate in enumerate(group["params"]):
                if candidate is parameter:
                    return self._current_projection(group, position, index + position)
            index += len(group["params"])
        raise ValueError(
            f"parameter of shape {tuple(parameter.shape)} is in no group of this {type(self).__name__}; it must be "
            "the very tensor that the optimizer was given."
        )

    def _check_options(self, options: Mapping[str, Any]) -> None:
        lr = options["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"lr must be a number or a tensor with one element, but has shape {tuple(lr.shape)}.")
        check_number("lr", lr.item() if isinstance(lr, Tensor) else lr, least=0)
        check_number("weight_decay", options["weight_decay"], least=0)
        if options["rank"] is not None:
            check_integer("rank", options["rank"], hint="None for no projection")
        if options["refresh_interval"] is not None:
            check_integer("refresh_interval", options["refresh_interval"], hint="None for refreshes on demand only")
        check_choice("subspace", options["subspace"], Subspace)
        check_choice("moments", options["moments"], Moments)
        check_integer("seed", options["seed"], least=None)
        if options["foreach"] is not None and not isinstance(options["foreach"], bool):
            raise TypeError(f"foreach must be True, False or None, but is {options['foreach']!r}.")
        if not isinstance(options.get("stacked", False), bool):
            raise TypeError(f"stacked must be True or False, but is {options['stacked']!r}.")

    def _check_stacks(self) -> None:
        shapes = [
            p.shape for group in self.param_groups if group["stacked"] for p in group["params"] if p.grad is not None
        ]
        if len({shape[:1] for shape in shapes}) > 1 or any(not shape for shape in shapes):
            raise ValueError(
                'parameters of groups with "stacked": True must all have the clients as their first dimension, but '
                f'their shapes are {", ".join(str(tuple(shape)) for shape in shapes)}; set "stacked" to False for '
                "parameters of one client."
            )

    def _step_group(self, group: Group, first: int) -> None:
        interval = group["refresh_interval"]
        if interval is not None and group["steps_since_refresh"] >= interval:
            self.fold()
            self._refresh_group(group, group["refresh_number"] + 1)
        group["steps_since_refresh"] += 1

        dense: list[Tensor] = []
        projected: list[Tensor] = []
        projections: list[Tensor] = []
        deferred: list[tuple[Tensor, Tensor, Tensor]] = []
        for position, parameter in enumerate(group["params"]):
            gradient = self._gradient_of_change(first + position, parameter)
            if parameter.grad is None and gradient is None:
                continue
            projection = self._projection_of_step(group, position, first + position)
            if gradient is not None:
                deferred.append((parameter, self.state[parameter][CHANGE], gradient))
            elif projection is None:
                dense.append(parameter)
            else:
                projected.append(parameter)
                projections.append(projection)
        if dense:
            self._update(group, dense, dense, [p.grad for p in dense if p.grad is not None], group["weight_decay"])
        if deferred:
            parameters, targets, gradients = map(list, zip(*deferred, strict=True))
            self._update(group, parameters, targets, gradients, 0.0)
        if projected:
            self._step_projected(group, projected, projections)

    def _step_projected(self, group: Group, parameters: Tensors, projections: Tensors) -> None:
        """Step projected weights by the coefficients of their gradients."""
        coefficients = [self._project(group, p, q) for p, q in zip(parameters, projections, strict=True)]
        changes = [torch.zeros_like(gradient) for gradient in coefficients]
        self._update(group, parameters, changes, coefficients, 0.0)
        decay = self._decay(group)
        for parameter, change, projection in zip(parameters, changes, projections, strict=True):
            add_to_weight(group, parameter, change, projection, beta=decay)

    def _refresh_group(self, group: Group, number: int) -> None:
        group["refresh_number"] = number
        group["steps_since_refresh"] = 0
        group["subspaces"] = tuple(None if entry is None else (*entry[:2], True) for entry in group["subspaces"])

    def _projection_of_step(self, group: Group, position: int, index: int) -> Tensor | None:
        """The ``P`` of this step; ``None`` for a parameter that is not projected."""
        parameter = group["params"][position]

        def key() -> tuple[Any, ...]:
            of_group = tuple([group[name] for name in ("rank", "stacked", "subspace", "seed", "refresh_number")])
            return *of_group, group["subspaces"][position], parameter.shape, parameter.dtype, parameter.device

        last = self._last_projections.get(index)
        if last is not None and last[0] == key():
            return last[1]
        projection = None if _is_dense(group, parameter) else self._enter_subspace(group, position, index)
        if projection is None or group["subspace"] == "random":
            self._last_projections[index] = key(), projection
        return projection

    def _enter_subspace(self, group: Group, position: int, index: int) -> Tensor:
        """The ``P`` of this step; if a new one is due, draw it and carry the moments over."""
        if not self._is_due(group, position):
            projection = self._current_projection(group, position, index)
            assert projection is not None
            return projection
        parameter, entry = group["params"][position], group["subspaces"][position]
        from_gradient = group["subspace"] == "gradient"
        # Reading a missing key of this defaultdict would add an empty state, which torch's SGD without momentum lacks.
        state = self.state[parameter] if from_gradient else self.state.get(parameter, {})
        has_moments = any(name in state for name in self._moment_names)
        old: Tensor | None = None
        if has_moments and group["moments"] == "rotate" and entry is not None:
            old = state["projection"] if from_gradient else self._random_projection(group, parameter, index, *entry[:2])
        seed, number = group["seed"], group["refresh_number"]
        if from_gradient:
            new = state["projection"] = _gradient_basis(
                group, parameter, partial(generator, seed, "projection", index, number)
            )
        else:
            new = self._random_projection(group, parameter, index, seed, number)
        if has_moments and group["moments"] == "zero":
            for name in self._moment_names:
                state.pop(name, None)
        elif old is not None:
            working = _working_dtype(parameter)
            self._rotate(group, state, old.to(working).mT @ new.to(working))
        subspaces = group["subspaces"]
        group["subspaces"] = (*subspaces[:position], (seed, number, False), *subspaces[position + 1 :])
        return new

    def _is_due(self, group: Group, position: int) -> bool:
        entry = group["subspaces"][position]
        lost = group["subspace"] == "gradient" and "projection" not in self.state.get(group["params"][position], {})
        # Moments restored from a client's state may belong to an earlier subspace.
        left = entry is not None and entry[:2] != (group["seed"], group["refresh_number"])
        return entry is None or entry[2] or left or lost

    def _current_projection(self, group: Group, position: int, index: int) -> Tensor | None:
        parameter = group["params"][position]
        if _is_dense(group, parameter):
            return None
        if group["subspace"] == "random":
            return self._random_projection(group, parameter, index, group["seed"], group["refresh_number"])
        if self._is_due(group, position):
            raise RuntimeError(
                "the projection depends on the gradient of the next step; call projection() after step()."
            )
        projection: Tensor = self.state[parameter]["projection"]
        return projection

    def _random_projection(self, group: Group, parameter: Tensor, index: int, seed: int, number: int) -> Tensor:
        columns = _columns(group, parameter)
        key = (group["rank"], columns, seed, number, parameter.dtype, parameter.device)
        cached = self._projections.get(index)
        if cached is None or cached[0] != key:
            shape, draws = (columns, group["rank"]), generator(seed, "projection", index, number)
            # Drawn on the CPU, so the same on every device.
            basis = haar_basis(torch.randn(shape, generator=draws, dtype=_working_dtype(parameter), device="cpu"))
            cached = self._projections[index] = (key, basis.to(device=parameter.device, dtype=parameter.dtype))
        return cached[1]

    def _project(self, group: Group, parameter: Tensor, projection: Tensor) -> Tensor:
        assert parameter.grad is not None
        return matrix(group, parameter.grad) @ projection

    def _decay(self, group: Group) -> float:
        """The factor that a step multiplies a projected weight by: decoupled weight decay."""
        return 1.0

    @abstractmethod
    def _update(
        self, group: Group, parameters: Tensors, targets: Tensors, gradients: Tensors, weight_decay: float
    ) -> None:
        """Step ``targets`` by torch's own optimizer function, with the states of ``parameters``."""

    @abstractmethod
    def _rotate(self, group: Group, state: dict[str, Tensor], rotation: Tensor) -> None:
        """Rotate the moments into a new subspace; ``rotation`` is ``P_oldᵀ P_new`` (``[(clients,) rank, rank]``)."""


def _columns(group: Group, parameter: Tensor) -> int:
    """Number of columns of a parameter as a matrix; of one client's if clients are stacked."""
    return parameter.shape[2 if group["stacked"] else 1 :].numel()


def _is_dense(group: Group, parameter: Tensor) -> bool:
    rank = group["rank"]
    return rank is None or parameter.ndim - group["stacked"] < 2 or rank >= _columns(group, parameter)


def matrix(group: Group, tensor: Tensor) -> Tensor:
    """A parameter or gradient as ``[out, in]``, or ``[clients, out, in]`` if clients are stacked."""
    return tensor.flatten(2 if group["stacked"] else 1)


def add_product(target: Tensor, left: Tensor, right: Tensor, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """``beta · target + alpha · left @ right``, in ``target``'s memory if its strides allow it."""
    if right.ndim == 3:
        return target.baddbmm_(left, right, beta=beta, alpha=alpha)
    # One matrix for all clients, so the stack is one tall matrix.
    return target.flatten(0, -2).addmm_(left.flatten(0, -2), right, beta=beta, alpha=alpha)


def add_to_weight(
    group: Group, parameter: Tensor, change: Tensor, projection: Tensor, beta: float = 1.0, alpha: float = 1.0
) -> None:
    """Replace a weight ``W`` by ``beta · W + alpha · change @ Pᵀ``, in place."""
    stepped = add_product(matrix(group, parameter), change, projection.mT, beta=beta, alpha=alpha)
    if stepped.data_ptr() != parameter.data_ptr():
        # Memory formats such as channels_last have no view as a matrix, so this was a copy.
        parameter.copy_(stepped.view(parameter.shape))


def _working_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _gradient_basis(group: Group, parameter: Tensor, draws: Callable[[], torch.Generator]) -> Tensor:
    """The leading right singular vectors of each client's gradient, completed by random ones from ``draws``."""
    assert parameter.grad is not None
    rank = group["rank"]
    gradient = matrix(group, parameter.grad).to(_working_dtype(parameter))
    _, values, right = torch.linalg.svd(gradient, full_matrices=False)
    negligible = values[..., :1] * max(gradient.shape[-2:]) * torch.finfo(gradient.dtype).eps
    leading = right[..., :rank, :].mT
    ranks = (values[..., :rank] > negligible).sum(dim=-1)
    basis = gradient.new_empty(*leading.shape[:-1], rank)
    for found in ranks.unique().tolist():
        chosen = ranks == found
        vectors = leading[chosen][..., :found]
        if found < rank:
            gaussian = torch.randn(
                vectors.shape[-2], rank - found, generator=draws(), dtype=gradient.dtype, device="cpu"
            )
            gaussian = gaussian.to(vectors.device).expand(len(vectors), -1, -1)
            vectors = completed_basis(vectors, gaussian)
        basis[chosen] = vectors
    return basis.to(parameter.dtype)
