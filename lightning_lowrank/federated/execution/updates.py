"""An optimizer's step on stacks of clients' values, so that a captured or compiled step ends with it.

`ClientStack` has one where nothing sees gradients before the optimizer does. In captured steps, what changes from step
to step stands in tensors that stay in one place: the learning rate, which a schedule may change, and moments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_lowrank.federated.execution.captures import Captures
from lightning_lowrank.internals.torch import fused_adam, fused_sgd, is_heard, sgd_update, steps_singly, storage_key
from lightning_lowrank.internals.tracing import Product


class OptimizerUpdate(ABC):
    """A step of one of torch's optimizers, made of tensors alone, for captured steps.

    Args:
        optimizer: Has the leaves as parameters.
        leaves: The stacks by name that it steps.
        places: The place of each of them among what a step of clients takes.
        captures: Gives the memory in which tensors stay.

    Attributes:
        made: Whether a captured step has made it. Whoever asks sets it back.
        tensors: What it takes beside values and gradients, for the next step.
    """

    options: ClassVar[tuple[str, ...]]
    """Options of a group that are no tensors, beside the learning rate."""
    kernel: ClassVar[str]
    """What torch must have for it."""

    def __init__(
        self, optimizer: Optimizer, leaves: Mapping[str, Tensor], places: Mapping[str, int], captures: Captures
    ) -> None:
        self.made = False
        self._optimizer, self._captures, self._places = optimizer, captures, places
        name_of = {leaf: name for name, leaf in leaves.items()}
        self._names = tuple(
            tuple(name_of[leaf] for leaf in group["params"] if leaf in name_of) for group in optimizer.param_groups
        )
        self._device = next(iter(leaves.values())).device
        self._rates = [self._scalar(f"learning rate {number}") for number in range(len(self._names))]
        self._held: list[float] = []
        self._options: list[dict[str, Any]] = []
        self._leaves: Mapping[str, Tensor] = {}
        self._fresh: dict[str, dict[str, Tensor]] = {}
        self.tensors: list[Tensor] = []

    @classmethod
    def unsupported_reason(cls, optimizer: Optimizer, leaves: Mapping[str, Tensor]) -> str:
        """Say why a captured step can't end with the optimizer's, or return an empty string."""
        if not hasattr(torch, cls.kernel):
            return f"torch {torch.__version__} has no such step by a tensor as learning rate"
        if any(leaf.dtype != torch.float32 for leaf in leaves.values()):
            # The kernel reads the learning rate in single precision.
            return "weights are not of type float32"
        own = {id(leaf) for leaf in leaves.values()}
        for group in optimizer.param_groups:
            if any(id(parameter) not in own for parameter in group["params"] if parameter.requires_grad):
                return "it has parameters that clients do not train together"
            if any(isinstance(each, Tensor) for name in ("lr", *cls.options) for each in _each(group[name])):
                return "its options are tensors"
            if group.get("differentiable"):
                return "its steps are differentiated"
            reason = cls._refused(group)
            if reason:
                return reason
        return ""

    @classmethod
    @abstractmethod
    def _refused(cls, group: Mapping[str, Any]) -> str:
        """Say why a group's options can't be used, or return an empty string."""

    def prepare(self, leaves: Mapping[str, Tensor]) -> None:
        """Take options and moments as they are before a step, given the leaves by name."""
        self.made, self._leaves, self._fresh = False, leaves, {}
        groups = self._optimizer.param_groups
        self._options = [{name: group[name] for name in self.options} for group in groups]
        rates = [float(group["lr"]) for group in groups]
        if rates != self._held:
            for tensor, rate in zip(self._rates, rates, strict=True):
                tensor.fill_(rate)
            self._held = rates
        self.tensors = list(self._rates)
        for options, names in zip(self._options, self._names, strict=True):
            for name in names:
                self.tensors += self._of_parameter(name, options)

    @abstractmethod
    def _of_parameter(self, name: str, options: Mapping[str, Any]) -> list[Tensor]:
        """Return what a step takes for a parameter, beside its value and gradient."""

    def finish(self, names: Sequence[str]) -> None:
        """Note that a captured step has been made of the parameters of these names, which alone have moments then."""
        for name in names:
            self._optimizer.state[self._leaves[name]].update(self._fresh.get(name, {}))

    @property
    def key(self) -> Hashable:
        """What it depends on that is no tensor."""
        return self._names, tuple(tuple(options.values()) for options in self._options)

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether a step of clients takes the leaves themselves, not copies."""
        name = next(iter(self._leaves))
        return tensors[self._places[name]].data_ptr() == self._leaves[name].data_ptr()

    def _scalar(self, name: str) -> Tensor:
        return self._captures.place(name, torch.zeros((), device=self._device), 1)[0]

    def _moment(self, kind: str, name: str) -> Tensor:
        """Return a parameter's moment in memory that stays where it is."""
        leaf = self._leaves[name]
        moment: Tensor | None = self._state(name).get(kind)
        if moment is None or not self._captures.lends(moment):
            placed = self._captures.place(f"{kind} {name}", leaf.new_zeros(leaf.shape[1:]), len(leaf))
            if moment is not None:
                placed.copy_(moment)
            moment = self._fresh.setdefault(name, {})[kind] = placed
        return moment

    def _state(self, name: str) -> Mapping[str, Any]:
        # Asking the optimizer's table for one that is missing would make it.
        found: Mapping[str, Any] = self._optimizer.state.get(self._leaves[name], {})
        return found

    def __call__(self, tensors: Sequence[Tensor], gradients: Mapping[str, Tensor], own: Sequence[Tensor]) -> None:
        """Step values in place.

        Args:
            tensors: What a step of clients takes.
            gradients: Its gradients by the names of the values.
            own: Such tensors as `tensors`.
        """
        rates, rest = own[: len(self._names)], list(own[len(self._names) :])
        for rate, options, names in zip(rates, self._options, self._names, strict=True):
            count = len(self._of_kind(options))
            each = {name: [rest.pop(0) for _ in range(count)] for name in names}
            used = [name for name in names if name in gradients]
            self._step(
                [tensors[self._places[name]].detach() for name in used],
                [gradients[name] for name in used],
                [[each[name][place] for name in used] for place in range(count)],
                rate,
                options,
            )

    @abstractmethod
    def _of_kind(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Name what a step takes for each parameter."""

    @abstractmethod
    def _step(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Tensor],
        own: Sequence[Sequence[Tensor]],
        rate: Tensor,
        options: Mapping[str, Any],
    ) -> None:
        """Step one group's values, given by kind what is taken for each of them."""


class SGDUpdate(OptimizerUpdate):
    """A step of torch's SGD."""

    options = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
    kernel = "_fused_sgd_"

    @classmethod
    def _refused(cls, group: Mapping[str, Any]) -> str:
        return "its first step is without dampening" if group["dampening"] and group["momentum"] else ""

    def _of_kind(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if options["momentum"] else ()

    def _of_parameter(self, name: str, options: Mapping[str, Any]) -> list[Tensor]:
        return [self._moment(kind, name) for kind in self._of_kind(options)]

    def _step(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Tensor],
        own: Sequence[Sequence[Tensor]],
        rate: Tensor,
        options: Mapping[str, Any],
    ) -> None:
        fused_sgd(values, gradients, own[0] if own else [], rate, **options)


class AdamUpdate(OptimizerUpdate):
    """A step of torch's Adam or AdamW. Steps are counted on the device, and in the optimizer's state as torch does."""

    options = ("betas", "eps", "weight_decay", "maximize")
    kernel = "_fused_adam_"

    def __init__(
        self, optimizer: Optimizer, leaves: Mapping[str, Tensor], places: Mapping[str, int], captures: Captures
    ) -> None:
        super().__init__(optimizer, leaves, places, captures)
        self._counts = {name: self._scalar(f"step {name}") for names in self._names for name in names}
        self._counted = dict.fromkeys(self._counts, 0.0)
        # Later releases have it as an option of Adam's, which AdamW sets.
        flags = (group.get("decoupled_weight_decay", False) for group in optimizer.param_groups)
        self._decoupled = isinstance(optimizer, AdamW) or any(flags)

    @classmethod
    def _refused(cls, group: Mapping[str, Any]) -> str:
        found = [name for name in ("amsgrad", "capturable", "fused") if group.get(name)]
        return f"it has {found[0]}=True" if found else ""

    def _of_kind(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "step")

    def _of_parameter(self, name: str, options: Mapping[str, Any]) -> list[Tensor]:
        count, steps = self._counts[name], float(self._state(name).get("step", 0.0))
        if steps != self._counted[name]:
            count.fill_(steps)
            self._counted[name] = steps
        return [self._moment("exp_avg", name), self._moment("exp_avg_sq", name), count]

    def finish(self, names: Sequence[str]) -> None:
        """Count the step in the optimizer's state as well."""
        super().finish(names)
        for name in names:
            state = self._optimizer.state[self._leaves[name]]
            state["step"] = state.get("step", torch.zeros(())) + 1
            self._counted[name] += 1

    def _step(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Tensor],
        own: Sequence[Sequence[Tensor]],
        rate: Tensor,
        options: Mapping[str, Any],
    ) -> None:
        first, second, counts = own
        beta1, beta2 = options["betas"]
        rest = {name: options[name] for name in ("eps", "weight_decay", "maximize")}
        fused_adam(values, gradients, first, second, counts, rate, self._decoupled, beta1=beta1, beta2=beta2, **rest)


class ProductUpdate:
    """A step of torch's SGD on a CPU, for compiled steps, which leave gradients as products.

    A gradient is multiplied right into the value, or into its momentum, so that it is not written and read again.
    Results are those of SGD up to rounding.

    Args:
        optimizer: Has the leaves as parameters.
        leaves: The stacks by name that it steps.
        places: The place of each of them among what a step of clients takes.

    Attributes:
        made: Whether a compiled step has made it. Whoever asks sets it back.
        tensors: Nothing: what changes from step to step is read from the optimizer.
    """

    def __init__(self, optimizer: Optimizer, leaves: Mapping[str, Tensor], places: Mapping[str, int]) -> None:
        self.made = False
        self.tensors: list[Tensor] = []
        self._optimizer, self._leaves = optimizer, leaves
        self._first = places[next(iter(leaves))]
        self._storages = {storage_key(leaf) for leaf in leaves.values()}
        name_of = {leaf: name for name, leaf in leaves.items()}
        self._groups = [
            (group, [name_of[leaf] for leaf in group["params"] if leaf in name_of]) for group in optimizer.param_groups
        ]

    def prepare(self, leaves: Mapping[str, Tensor]) -> None:
        """Take the leaves by name as they are before a step."""
        self.made, self._leaves = False, leaves

    def finish(self, names: Sequence[str]) -> None:
        """Do nothing: the optimizer has its moments."""

    @property
    def key(self) -> Hashable:
        """What it depends on that is no tensor."""
        return None

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether a step of clients takes the leaves themselves, not copies."""
        return tensors[self._first].data_ptr() == next(iter(self._leaves.values())).data_ptr()

    @torch.no_grad()
    def __call__(
        self, tensors: Sequence[Tensor], gradients: Mapping[str, Tensor | Product], own: Sequence[Tensor]
    ) -> None:
        """Step values in place.

        Args:
            tensors: What a step of clients takes.
            gradients: Its gradients by the names of the values.
            own: Nothing.
        """
        ready = {name: self._before_values_change(gradient) for name, gradient in gradients.items()}
        for group, names in self._groups:
            for name in names:
                if name in ready:
                    self._step(group, self._leaves[name], ready[name])

    def _before_values_change(self, gradient: Tensor | Product) -> Tensor | Product:
        """Make a product with a value, which would be another one after that value's own step."""
        reads_a_value = isinstance(gradient, Product) and any(storage_key(each) in self._storages for each in gradient)
        return torch.bmm(*gradient) if reads_a_value else gradient

    def _step(self, group: Mapping[str, Any], leaf: Tensor, gradient: Tensor | Product) -> None:
        rate, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
        if isinstance(gradient, Product):
            if not momentum:
                leaf.baddbmm_(*gradient, beta=1 - rate * decay, alpha=-rate)
                return
            buffer = self._optimizer.state.get(leaf, {}).get("momentum_buffer")
            if buffer is not None and not group["nesterov"]:
                share = 1 - group["dampening"]
                buffer.baddbmm_(*gradient, beta=momentum, alpha=share)
                if decay:
                    buffer.add_(leaf, alpha=share * decay)
                leaf.add_(buffer, alpha=-rate)
                return
            gradient = torch.bmm(*gradient)
        sgd_update(self._optimizer, group, leaf, leaf, gradient, decay)


_KINDS: dict[type[Optimizer], type[OptimizerUpdate]] = {SGD: SGDUpdate, Adam: AdamUpdate, AdamW: AdamUpdate}


def update_of(
    optimizer: Optimizer, leaves: Mapping[str, Tensor], places: Mapping[str, int], captures: Captures
) -> OptimizerUpdate | ProductUpdate | None:
    """Return the optimizer's step as captured or compiled steps may end with it; ``None`` where they can't.

    Args:
        optimizer: Has the leaves as parameters.
        leaves: The stacks by name that it steps.
        places: The place of each of them among what a step of clients takes.
        captures: Those of the fit. Where they record nothing, steps are compiled.
    """
    if is_heard(optimizer):
        return None
    if captures.recorder is None:
        singly = type(optimizer) is SGD and all(map(steps_singly, optimizer.param_groups))
        return ProductUpdate(optimizer, leaves, places) if singly else None
    kind = _KINDS.get(type(optimizer))
    if kind is None or kind.unsupported_reason(optimizer, leaves):
        return None
    return kind(optimizer, leaves, places, captures)


def _each(option: Any) -> tuple[Any, ...]:
    return option if isinstance(option, tuple) else (option,)
