"""The interface of rules that aggregate a round's arrivals, the clients' decoded messages."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from lightning_lowrank.arguments import Configured
from lightning_lowrank.internals.torch import has_float64

__all__ = ["Aggregator", "KeepsArrivals", "Peers", "check_names", "equal_tensors", "float64_device", "to_float64"]


class Peers(Protocol):
    """The processes that train a round's clients together, for collective operations."""

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""

    def gather(self, value: Any) -> list[Any]:
        """Gather ``value`` from all processes, in the order of their ranks."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over all processes."""


class Aggregator(Configured, ABC):
    """A rule that aggregates named tensors of several parties, such as a round's clients, into one tensor per name.

    A rule does not depend on the methods that use it. Its arguments are plain attributes, and `clear` resets all
    others, so that `fresh` can copy the arguments without the arrivals.

    Attributes:
        arrivals: The number of parties that were added.
        weight: The sum of their weights.
    """

    arrivals: int
    weight: float

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Remove all arrivals. A subclass initialises its own attributes here, after calling this method."""
        self.arrivals = 0
        self.weight = 0.0

    def fresh(self) -> Aggregator:
        """An empty aggregator with the same arguments."""
        fresh = copy.copy(self)
        fresh.clear()
        return fresh

    @abstractmethod
    def add(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        """Add one party's tensors.

        Args:
            tensors: The values. They may change after the call.
            weight: The party's share, zero or more.

        Raises:
            KeyError: If an earlier party's tensors have other names.
        """

    def add_change(self, change: Mapping[str, Tensor], origin: Mapping[str, Tensor], weight: float) -> None:
        """Add one party's tensors, given as changes, as if by `add` of ``origin`` plus ``change``, to rounding.

        Args:
            change: The changes. A tensor without a value in ``origin`` is a value itself.
            origin: The values that are changed, by name. They must not change before `result`.
            weight: As in `add`.
        """
        self.add(
            {name: value + origin[name].to(value) if name in origin else value for name, value in change.items()},
            weight,
        )

    def add_stacks(self, stacks: Mapping[str, Tensor], weights: Sequence[float]) -> None:
        """Add the tensors of several parties, ``[parties, …]``, with a weight for each, as if by `add`."""
        for party, weight in enumerate(weights):
            self.add({name: stack[party] for name, stack in stacks.items()}, weight)

    def prepare(self, origin: Mapping[str, Tensor], seed: int) -> None:
        """Set the round's reference values and seed; called before `result`.

        Args:
            origin: The values from which the clients started, by name. A tensor without a value here is a change
                itself.
            seed: Seed of the rule's random draws in the round.
        """

    def check_arrivals(self, arrivals: int) -> None:
        """Refuse a round of too few arrivals.

        Raises:
            ValueError: If the rule needs more arrivals.
        """

    @abstractmethod
    def result(self) -> dict[str, Tensor]:
        """The aggregated tensors, in the dtypes and on the devices of the added tensors."""

    @abstractmethod
    def pool(self, peers: Peers) -> None:
        """Replace each process's arrivals by those of all processes.

        Raises:
            KeyError: If the tensors of two processes have different names.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The arrivals as tensors and plain Python values, for a checkpoint."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Restore `state_dict`'s result, with the tensors on ``device``."""


class KeepsArrivals(Aggregator):
    """Base of rules that need all arrivals at once, such as a median. A subclass defines `result`.

    Memory grows with the number of arrivals.

    Attributes:
        kept: The tensors and the weight of each arrival, in the order of arrival.

    Example:
        >>> class Median(KeepsArrivals):
        ...     def result(self):
        ...         return {name: torch.stack(values).median(dim=0).values for name, values in self.values().items()}
        >>> median = Median()
        >>> for value in (1.0, 2.0, 90.0):
        ...     median.add({"w": torch.tensor([value])}, weight=1)
        >>> median.result()
        {'w': tensor([2.])}
    """

    kept: list[tuple[dict[str, Tensor], float]]

    @override
    def clear(self) -> None:
        super().clear()
        self.kept = []

    @override
    def add(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        if self.kept:
            check_names(tensors, self.kept[0][0])
        self.kept.append(({name: value.detach().clone() for name, value in tensors.items()}, weight))
        self.weight += weight
        self.arrivals += 1

    def values(self) -> dict[str, list[Tensor]]:
        """The tensors of all arrivals, by name."""
        return {name: [tensors[name] for tensors, _ in self.kept] for name in (self.kept[0][0] if self.kept else ())}

    @override
    def pool(self, peers: Peers) -> None:
        # Sent as CPU tensors, because another process's device may not exist in this one.
        mine = [({name: value.cpu() for name, value in tensors.items()}, weight) for tensors, weight in self.kept]
        self._replace((arrival for part in peers.gather(mine) for arrival in part), peers.root_device)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"kept": [{"tensors": dict(tensors), "weight": weight} for tensors, weight in self.kept]}

    @override
    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._replace(((arrival["tensors"], arrival["weight"]) for arrival in state["kept"]), device)

    def _replace(self, arrivals: Iterable[tuple[Mapping[str, Tensor], float]], device: torch.device) -> None:
        arrivals = list(arrivals)
        self.clear()
        for tensors, weight in arrivals:
            self.add({name: value.to(home_of(value.dtype, device)) for name, value in tensors.items()}, weight)


def check_names(tensors: Mapping[str, Any], earlier: Mapping[str, Any]) -> None:
    """Refuse tensors whose names differ from those of an earlier arrival."""
    if tensors.keys() != earlier.keys():
        raise KeyError(f"arrivals name different tensors: {sorted(tensors.keys() ^ earlier.keys())} are not in both")


def equal_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two collections of tensors are equal."""
    return one.keys() == other.keys() and all(
        value is other[name] or torch.equal(value, other[name]) for name, value in one.items()
    )


def float64_device(device: torch.device) -> torch.device:
    """The device for tensors in float64: ``device``, or the CPU if ``device`` has no float64."""
    return device if has_float64(device.type) else torch.device("cpu")


def home_of(dtype: torch.dtype, device: torch.device) -> torch.device:
    """The device for tensors of this dtype: ``device``, or the CPU for float64 if ``device`` lacks it."""
    return float64_device(device) if dtype == torch.float64 else device


def to_float64(tensor: Tensor) -> Tensor:
    """A tensor in float64, on its device or on the CPU (see `float64_device`); complex tensors are refused."""
    if tensor.is_complex():
        raise TypeError(
            f"tensors must be of real numbers, but one is of {tensor.dtype}; convert it by torch.view_as_real."
        )
    return tensor.to(float64_device(tensor.device)).double()


def working_dtype(dtype: torch.dtype, least: torch.dtype = torch.float32) -> torch.dtype:
    """The dtype to compute in: ``least``, or a wider one that holds the numbers of ``dtype`` as well."""
    # torch refuses to promote floats of one byte.
    return least if dtype.itemsize == 1 else torch.promote_types(dtype, least)


def result_dtype(dtype: torch.dtype, least: torch.dtype | None) -> torch.dtype:
    """The dtype of an aggregate of arrivals of ``dtype``: that, or a floating-point one promoted to ``least``."""
    return dtype if least is None or not dtype.is_floating_point else working_dtype(dtype, least)
