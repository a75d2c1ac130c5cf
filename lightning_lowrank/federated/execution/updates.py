"""An optimizer's step on stacks of clients' values, made of tensors alone, so that a captured step ends with it.

`ClientStack` has one where nothing sees gradients before the optimizer does. What changes from step to step stands in
tensors that stay in one place: the learning rate, which a schedule may change, and moments.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_lowrank.federated.execution.captures import Captures
from lightning_lowrank.internals.torch import fused_sgd, is_heard

_OPTIONS = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
_BUFFER = "momentum_buffer"


class SGDUpdate:
    """A step of torch's SGD.

    Args:
        optimizer: Has the leaves as parameters.
        leaves: The stacks by name that it steps.
        places: The place of each of them among what a step of clients takes.
        captures: Gives the memory in which tensors stay.

    Attributes:
        made: Whether a captured step has made it. Whoever asks sets it back.
        tensors: What it takes beside values and gradients, for the next step.
    """

    def __init__(
        self, optimizer: SGD, leaves: Mapping[str, Tensor], places: Mapping[str, int], captures: Captures
    ) -> None:
        self.made = False
        self._optimizer, self._captures, self._places = optimizer, captures, places
        name_of = {leaf: name for name, leaf in leaves.items()}
        self._names = tuple(
            tuple(name_of[leaf] for leaf in group["params"] if leaf in name_of) for group in optimizer.param_groups
        )
        device = next(iter(leaves.values())).device
        self._rates = [
            captures.place(f"learning rate {number}", torch.zeros((), device=device), 1)[0]
            for number in range(len(self._names))
        ]
        self._held: list[float] = []
        self._options: list[dict[str, Any]] = []
        self._leaves: Mapping[str, Tensor] = {}
        self.tensors: list[Tensor] = []

    @staticmethod
    def unsupported_reason(optimizer: Optimizer, leaves: Mapping[str, Tensor]) -> str:
        """Say why a captured step can't end with an optimizer's, or return an empty string."""
        if type(optimizer) is not SGD or is_heard(optimizer):
            return f"{type(optimizer).__name__} is not torch's SGD, or has hooks"
        if not hasattr(torch, "_fused_sgd_"):
            return f"torch {torch.__version__} has no such step by a tensor as learning rate"
        if any(leaf.dtype != torch.float32 for leaf in leaves.values()):
            # The kernel reads the learning rate in single precision.
            return "weights are not of type float32"
        own = {id(leaf) for leaf in leaves.values()}
        for group in optimizer.param_groups:
            if any(id(parameter) not in own for parameter in group["params"] if parameter.requires_grad):
                return "it has parameters that clients do not train together"
            if any(isinstance(group[name], Tensor) for name in ("lr", *_OPTIONS)):
                return "its options are tensors"
            if group["dampening"] and group["momentum"]:
                return "its first step is without dampening"
            if group.get("differentiable"):
                return "its steps are differentiated"
        return ""

    def prepare(self, leaves: Mapping[str, Tensor]) -> None:
        """Take options and moments as they are before a step, given the leaves by name."""
        self.made, self._leaves = False, leaves
        groups = self._optimizer.param_groups
        self._options = [{name: group[name] for name in _OPTIONS} for group in groups]
        rates = [float(group["lr"]) for group in groups]
        if rates != self._held:
            for tensor, rate in zip(self._rates, rates, strict=True):
                tensor.fill_(rate)
            self._held = rates
        self.tensors = list(self._rates)
        for options, names in zip(self._options, self._names, strict=True):
            if options["momentum"]:
                self.tensors += [self._buffer(name, leaves[name]) for name in names]

    @property
    def key(self) -> Hashable:
        """What it depends on that is no tensor."""
        return self._names, tuple(tuple(options.values()) for options in self._options)

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether a step of clients takes the leaves themselves, not copies."""
        name = next(iter(self._leaves))
        return tensors[self._places[name]].data_ptr() == self._leaves[name].data_ptr()

    def _buffer(self, name: str, leaf: Tensor) -> Tensor:
        state = self._optimizer.state[leaf]
        buffer: Tensor | None = state.get(_BUFFER)
        if buffer is None or not self._captures.lends(buffer):
            placed = self._captures.place(f"{_BUFFER} {name}", leaf.new_zeros(leaf.shape[1:]), len(leaf))
            if buffer is not None:
                placed.copy_(buffer)
            buffer = state[_BUFFER] = placed
        return buffer

    def __call__(self, tensors: Sequence[Tensor], gradients: Mapping[str, Tensor], own: Sequence[Tensor]) -> None:
        """Step values in place.

        Args:
            tensors: What a step of clients takes.
            gradients: Its gradients by the names of the values.
            own: Such tensors as `tensors`.
        """
        rates, moments = own[: len(self._names)], iter(own[len(self._names) :])
        for rate, options, names in zip(rates, self._options, self._names, strict=True):
            buffers = {name: next(moments) for name in names} if options["momentum"] else {}
            used = [name for name in names if name in gradients]
            fused_sgd(
                [tensors[self._places[name]].detach() for name in used],
                [gradients[name] for name in used],
                [buffers[name] for name in used if buffers],
                rate,
                **options,
            )
