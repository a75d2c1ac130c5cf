"""The weighted mean of a round's arrivals, in memory that does not grow with their number."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_lowrank.aggregation.aggregator import (
    Aggregator,
    Peers,
    check_names,
    equal_tensors,
    float64_device,
    home_of,
    result_dtype,
    to_float64,
    working_dtype,
)
from lightning_lowrank.internals.torch import add_each, divide_each

__all__ = ["WeightedMean"]

_NUMBERS_AT_ONCE = 2**20
# The mean of equal integers below this is exact, even over many arrivals with sums rounded to 53 bits.
_MOST_BY_SUMS = 2**32
# In float32, the sum of so few changes is rounded less than the value that they change.
_CHANGES_AT_ONCE = 32


@dataclass
class _Changes:
    """Changes of the same values, summed in their own type, at least float32.

    Args:
        origin: The values.
        sums: The weighted sums of the changes.
        weight: The sum of the weights.
        arrivals: The number of parties.
    """

    origin: Mapping[str, Tensor]
    sums: dict[str, Tensor]
    weight: float = 0.0
    arrivals: int = 0

    def to(self, device: torch.device) -> _Changes:
        """The same with the tensors on ``device``."""
        origin, sums = (
            {name: value.to(home_of(value.dtype, device)) for name, value in tensors.items()}
            for tensors in (self.origin, self.sums)
        )
        return replace(self, origin=origin, sums=sums)


class WeightedMean(Aggregator):
    """Streaming weighted mean of named tensors, in float64 and cast once at the end.

    Changes of floating-point tensors (`add_change`) are first summed in their own type, at least float32, up to 32
    arrivals at a time. Memory does not grow with the number of arrivals. One arrival is returned exactly, and so are
    integers that are equal in all arrivals. Other integer and boolean tensors are averaged and rounded to the nearest
    value (halves to the even one). Sums are on the device of the tensors, or on the CPU if that device has no float64
    (Apple's MPS).

    Example:
        >>> import torch
        >>> mean = WeightedMean()
        >>> mean.add({"w": torch.tensor([1.0]), "batches": torch.tensor(3)}, weight=1)
        >>> mean.add({"w": torch.tensor([4.0]), "batches": torch.tensor(4)}, weight=2)
        >>> mean.result()
        {'w': tensor([3.]), 'batches': tensor(4)}
    """

    @override
    def clear(self) -> None:
        super().clear()
        self._sums: dict[str, Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._devices: dict[str, torch.device] = {}
        self._only: dict[str, Tensor] = {}
        # Integers too large for exact sums, as long as they are equal in all arrivals.
        self._alike: dict[str, Tensor] = {}
        self._changes: _Changes | None = None

    @override
    def add(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        if self.arrivals == 0:
            values = {name: tensor.detach() for name, tensor in tensors.items()}
            # Zeros instead of a product, because an arrival of weight 0 may have NaN or infinite numbers.
            self._sums = {
                name: to_float64(value) * weight if weight else torch.zeros_like(to_float64(value))
                for name, value in values.items()
            }
            self._remember(tensors)
            self._only = {name: value.clone() for name, value in values.items()}
            self._alike = {name: value for name, value in self._only.items() if _exceeds_sums(value)}
            self.weight, self.arrivals = weight, 1
        else:
            check_names(tensors, self._sums)
            self._add_another(tensors, weight)

    def _add_another(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        """Add all or some of a party's tensors to the sums, and count the party."""
        if weight:
            values = [tensor.detach() for tensor in tensors.values()]
            # On a CPU, torch adds most other floating-point types in float64, faster than their converted copies.
            converted = [value if _adds_exactly(value) else to_float64(value) for value in values]
            add_each([self._sums[name] for name in tensors], converted, alpha=weight)
        self._only = {}
        self._alike = {name: value for name, value in self._alike.items() if torch.equal(value, tensors[name])}
        self.weight += weight
        self.arrivals += 1

    @override
    def add_change(self, change: Mapping[str, Tensor], origin: Mapping[str, Tensor], weight: float) -> None:
        floating = all(value.is_floating_point() for value in origin.values())
        if not (self.arrivals and weight and floating) or type(self).add is not WeightedMean.add:
            super().add_change(change, origin, weight)
            return
        check_names(change, self._sums)
        changes = self._changes
        if changes is None or changes.arrivals == _CHANGES_AT_ONCE or not equal_tensors(changes.origin, origin):
            self._add_changes()
            changes = self._changes = _Changes(origin, {name: _zeros(change[name]) for name in origin})
        # The origin that was loaded with the sums of a resumed round is a copy.
        changes.origin = origin
        add_each([*changes.sums.values()], [change[name].detach() for name in changes.sums], alpha=weight)
        changes.weight += weight
        changes.arrivals += 1
        self._add_another({name: value for name, value in change.items() if name not in origin}, weight)

    def _add_changes(self) -> None:
        """Add the separately summed changes, and the values that they change, to the sums."""
        if self._changes is not None:
            for name, value in self._changes.origin.items():
                self._sums[name] += to_float64(value) * self._changes.weight + to_float64(self._changes.sums[name])
            self._changes = None

    @override
    def add_stacks(self, stacks: Mapping[str, Tensor], weights: Sequence[float]) -> None:
        first = next(iter(stacks.values()), None)
        if first is None or len(weights) == 1 or not any(weights):
            super().add_stacks(stacks, weights)
            return
        if not all(weights):
            weighing = [row for row, weight in enumerate(weights) if weight]
            self.add_stacks(
                {name: stack[weighing] for name, stack in stacks.items()}, [weights[row] for row in weighing]
            )
            self.arrivals += len(weights) - len(weighing)
            return
        shares = torch.tensor(weights, dtype=torch.float64, device=float64_device(first.device))
        sums = {}
        for name, stack in stacks.items():
            rows = stack.detach().reshape(len(weights), -1)
            # A few parties at a time, because in float64 all of them could take more memory than the round itself.
            at_once = max(1, _NUMBERS_AT_ONCE // max(1, rows.shape[1]))
            parts = zip(shares.split(at_once), rows.split(at_once), strict=True)
            total = functools.reduce(torch.add, (share @ to_float64(part) for share, part in parts))
            sums[name] = total.view(stack.shape[1:])
        if self.arrivals == 0:
            self._sums = sums
            self._remember(stacks)
            self._alike = {name: stack[0].clone() for name, stack in stacks.items() if _exceeds_sums(stack)}
        else:
            check_names(sums, self._sums)
            add_each([self._sums[name] for name in sums], list(sums.values()))
            self._only = {}
        self._alike = {name: value for name, value in self._alike.items() if bool((stacks[name] == value).all())}
        self.weight += sum(weights)
        self.arrivals += len(weights)

    def _remember(self, tensors: Mapping[str, Tensor]) -> None:
        self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        self._devices = {name: tensor.device for name, tensor in tensors.items()}

    @override
    def result(self, least: torch.dtype | None = None) -> dict[str, Tensor]:
        """The means, rounded to the dtypes of the added tensors; floating-point dtypes are promoted to ``least``.

        Raises:
            ValueError: If no arrival has a weight above 0.
        """
        if self.arrivals and not self.weight:
            raise ValueError(f"the weights of all {self.arrivals} arrivals are 0, but a mean needs a weight above 0.")
        self._add_changes()
        if self._only:
            return {name: value.to(result_dtype(value.dtype, least)) for name, value in self._only.items()}
        means = divide_each(list(self._sums.values()), self.weight)
        averaged = {
            # Cast before the move to the device, which may have no float64.
            name: (mean if dtype.is_floating_point else mean.round())
            .to(result_dtype(dtype, least))
            .to(self._devices[name])
            for (name, dtype), mean in zip(self._dtypes.items(), means, strict=True)
        }
        return averaged | {name: value.clone() for name, value in self._alike.items()}

    @override
    def pool(self, peers: Peers) -> None:
        self._add_changes()
        layout = {name: value.shape for name, value in self._sums.items()}
        alike = {name: value.cpu() for name, value in self._alike.items()}
        parts = peers.gather((self.arrivals, self.weight, layout, self._dtypes, alike))
        (_, _, layout, dtypes, alike), *others = [part for part in parts if part[0]]
        for _, _, other, _, its in others:
            check_names(other, layout)
            alike = {name: value for name, value in alike.items() if name in its and torch.equal(value, its[name])}
        self.arrivals = sum(arrivals for arrivals, *_ in parts)
        self.weight = sum(weight for _, weight, *_ in parts)
        # A single arrival is returned exactly.
        mine = self._only if self.arrivals == 1 else self._sums
        sizes = [shape.numel() for shape in layout.values()]
        flat = torch.zeros(sum(sizes), dtype=torch.float64, device=float64_device(peers.root_device))
        if mine:
            torch.cat([to_float64(mine[name]).flatten() for name in layout], out=flat)
        values = [part.view(shape) for part, shape in zip(peers.sum(flat).split(sizes), layout.values(), strict=True)]
        self._sums, self._dtypes, self._only = dict(zip(layout, values, strict=True)), dtypes, {}
        self._devices = {name: home_of(dtype, peers.root_device) for name, dtype in dtypes.items()}
        self._alike = {name: value.to(self._devices[name]) for name, value in alike.items()}
        if self.arrivals == 1:
            self._only = {name: value.to(dtypes[name]).to(self._devices[name]) for name, value in self._sums.items()}
            self._only |= self._alike
            self._sums = {name: value * self.weight for name, value in self._sums.items()}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            # Saved separately, because a resumed round must add the same numbers in the same order.
            "changes": None if self._changes is None else dict(vars(self._changes)),
            "sums": dict(self._sums),
            "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in self._dtypes.items()},
            "only": dict(self._only),
            "alike": dict(self._alike),
            "weight": self.weight,
            "arrivals": self.arrivals,
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._sums = {name: tensor.to(float64_device(device)) for name, tensor in state["sums"].items()}
        self._dtypes = {name: getattr(torch, dtype) for name, dtype in state["dtypes"].items()}
        self._devices = {name: home_of(dtype, device) for name, dtype in self._dtypes.items()}
        self._only = {name: tensor.to(self._devices[name]) for name, tensor in state["only"].items()}
        self._alike = {name: tensor.to(self._devices[name]) for name, tensor in state["alike"].items()}
        self._changes = None if state["changes"] is None else _Changes(**state["changes"]).to(device)
        self.weight = state["weight"]
        self.arrivals = state["arrivals"]


def _zeros(change: Tensor) -> Tensor:
    return torch.zeros_like(change, dtype=working_dtype(change.dtype))


def _adds_exactly(value: Tensor) -> bool:
    """Whether torch adds this tensor to a float64 tensor as if converted first; not so for one-byte floats."""
    return value.is_cpu and value.is_floating_point() and value.itemsize > 1


def _exceeds_sums(tensor: Tensor) -> bool:
    """Whether a tensor has integers so large that the mean of equal ones may be inexact."""
    integers = tensor.dtype.itemsize == 8 and not (tensor.is_floating_point() or tensor.is_complex())
    return integers and bool((to_float64(tensor).abs() >= _MOST_BY_SUMS).any())
