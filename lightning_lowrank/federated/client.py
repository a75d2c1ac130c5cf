"""The two parties of a round: what the server holds, and what one client is.

`FederatedLoop` makes them and saves them in checkpoints; algorithms read and write them.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, overload

import torch
from torch import Tensor, nn

from lightning_lowrank.federated import spill

BufferPolicy = Literal["average", "local", "reset"]

_NUMBERS_AT_ONCE = 2**20


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's buffers that are part of its state dict, by name."""
    kept = module.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}


def trained_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's trained parameters and persistent buffers by name: what a client's copy of it is."""
    trained = {name: value for name, value in module.named_parameters() if value.requires_grad}
    return {**trained, **persistent_buffers(module)}


Workspace = dict[str, Any]
"""Tensors by name, and dictionaries of such."""


@dataclass(slots=True)
class Client:
    """One client of the federation.

    Args:
        id: Position in the partition, from 0.
        samples: Number of training samples it holds.
        memory: What it keeps between rounds, by purpose: tensors and plain Python only, so that a checkpoint that
            holds it loads with ``weights_only=True``.
        steps: Number of steps that it makes in the round that is running.
        workspace: What it needs in this round alone, such as the model that it received: tensors by name, and
            dictionaries of such. Where clients step together, it is stacked; see `LocalStep`.
    """

    id: int
    samples: int
    memory: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    workspace: Workspace = field(default_factory=dict)


class Clients(Sequence[Client]):
    """All clients of a federation, of whom only those exist that are at work or keep something between rounds.

    Args:
        samples: Number of training samples of each.
        memories: What clients keep, by their ids.
        memory_limit: Bytes of tensors that clients may keep in memory between rounds; what is beyond goes to a
            temporary folder, that of the clients first which have not been at work for longest. ``None``: no limit.
    """

    def __init__(
        self,
        samples: Sequence[int],
        memories: Mapping[int, dict[str, Any]] | None = None,
        memory_limit: int | None = None,
    ) -> None:
        self._samples = samples
        self._limit = memory_limit
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._on_disk: set[int] = set()
        self._present = {number: self._make(number, memory) for number, memory in (memories or {}).items()}

    def _make(self, number: int, memory: dict[str, Any]) -> Client:
        return Client(number, int(self._samples[number]), memory)

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, index: int) -> Client: ...

    @overload
    def __getitem__(self, index: slice) -> list[Client]: ...

    def __getitem__(self, index: int | slice) -> Client | list[Client]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        # The order of the dictionary is that of last use.
        client = self._present.pop(number, None)
        if client is None:
            client = self._make(number, spill.load(self._path(number)) if number in self._on_disk else {})
            self._on_disk.discard(number)
        self._present[number] = client
        return client

    def _path(self, number: int) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="lightning_lowrank_clients_")
        return Path(self._folder.name) / f"client_{number}.safetensors"

    def keeping(self) -> Iterator[Client]:
        """Iterate over the clients that keep something, in ascending id; what is on disk stays there."""
        for number in sorted(self._present.keys() | self._on_disk):
            if number in self._on_disk:
                yield self._make(number, spill.load(self._path(number)))
            elif self._present[number].memory:
                yield self._present[number]

    def forget_idle(self) -> None:
        """Let go of clients that are not at work and keep nothing, and put on disk what is beyond the limit."""
        self._present = {number: client for number, client in self._present.items() if client.memory}
        if self._limit is None:
            return
        sizes = {number: spill.size(client.memory) for number, client in self._present.items()}
        total = sum(sizes.values())
        for number, nbytes in sizes.items():
            if total <= self._limit:
                break
            spill.save(self._present.pop(number).memory, self._path(number))
            self._on_disk.add(number)
            total -= nbytes


def stack_workspaces(workspaces: Sequence[Workspace]) -> Workspace:
    """Stack what clients have under the same names; what is one tensor for all of them is not copied."""
    first = workspaces[0]
    for workspace in workspaces:
        if workspace.keys() != first.keys():
            raise KeyError(f"clients that step together have different workspaces: {first.keys() ^ workspace.keys()}")
    stacked: Workspace = {}
    for name, value in first.items():
        values = [workspace[name] for workspace in workspaces]
        if isinstance(value, Mapping):
            stacked[name] = stack_workspaces(values)
        elif all(other is value for other in values):
            stacked[name] = value.detach().unsqueeze(0).expand(len(values), *value.shape)
        else:
            stacked[name] = torch.stack(values)
    return stacked


def part_of(stacked: Mapping[str, Any], index: int | slice) -> Workspace:
    """Return one client's part of stacked workspaces, or that of several, as views."""
    return {
        name: part_of(value, index) if isinstance(value, Mapping) else value[index] for name, value in stacked.items()
    }


class Peers(Protocol):
    """The processes that share a round: see `ClientParallelStrategy`."""

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""

    def gather(self, value: Any) -> list[Any]:
        """Return every process's ``value``."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of every process's ``tensor``."""


class WeightedMean:
    """Streaming weighted mean of named tensors, in float64 and cast once at the end.

    Memory does not grow with the number of arrivals. One arrival is given back exactly. Integer and boolean tensors
    are averaged likewise and rounded to the nearest value (halves to the even one).

    Example:
        >>> import torch
        >>> mean = WeightedMean()
        >>> mean.add({"w": torch.tensor([1.0]), "batches": torch.tensor(3)}, weight=1)
        >>> mean.add({"w": torch.tensor([4.0]), "batches": torch.tensor(4)}, weight=2)
        >>> mean.result()
        {'w': tensor([3.]), 'batches': tensor(4)}
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._only: dict[str, Tensor] = {}
        self.weight = 0.0
        self.arrivals = 0

    def add(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        """Take in one party's tensors.

        Args:
            tensors: The values; they are read here and now, not kept.
            weight: Their share in the mean, zero or more.
        """
        values = [tensor.detach() for tensor in tensors.values()]
        if self.arrivals == 0:
            self._sums = {name: value.double() * weight for name, value in zip(tensors, values, strict=True)}
            self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
            self._only = {name: value.clone() for name, value in zip(tensors, values, strict=True)}
        else:
            self._check_names(tensors)
            sums = [self._sums[name] for name in tensors]
            torch._foreach_add_(sums, [value.double() for value in values], alpha=weight)
            self._only = {}
        self.weight += weight
        self.arrivals += 1

    def add_stacks(self, stacks: Mapping[str, Tensor], weights: Sequence[float]) -> None:
        """Take in the tensors of several parties, stacked, as `add` takes in those of each.

        Args:
            stacks: The values, ``[parties, …]``; they are read here and now, not kept.
            weights: The share of each party in the mean, zero or more.
        """
        first = next(iter(stacks.values()), None)
        if first is None or len(weights) == 1:
            for party, weight in enumerate(weights):
                self.add({name: stack[party] for name, stack in stacks.items()}, weight)
            return
        shares = torch.tensor(weights, dtype=torch.float64, device=first.device)
        sums = {}
        for name, stack in stacks.items():
            rows = stack.detach().reshape(len(weights), -1)
            # A few parties at a time, for in float64 all of them could take more memory than the round itself.
            at_once = max(1, _NUMBERS_AT_ONCE // max(1, rows.shape[1]))
            parts = zip(shares.split(at_once), rows.split(at_once), strict=True)
            total = functools.reduce(torch.add, (share @ part.double() for share, part in parts))
            sums[name] = total.view(stack.shape[1:])
        if self.arrivals == 0:
            self._sums, self._dtypes = sums, {name: stack.dtype for name, stack in stacks.items()}
        else:
            self._check_names(sums)
            torch._foreach_add_([self._sums[name] for name in sums], list(sums.values()))
            self._only = {}
        self.weight += sum(weights)
        self.arrivals += len(weights)

    def _check_names(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors.keys() != self._sums.keys():
            raise KeyError(
                f"arrivals name different tensors: {sorted(tensors.keys() ^ self._sums.keys())} are not in both"
            )

    def result(self) -> dict[str, Tensor]:
        """Return the mean, in the tensors' own types."""
        if self._only:
            return dict(self._only)
        means = torch._foreach_div(list(self._sums.values()), self.weight)
        return {
            name: (mean if self._dtypes[name].is_floating_point else mean.round()).to(self._dtypes[name])
            for name, mean in zip(self._sums, means, strict=True)
        }

    def pool(self, peers: Peers) -> None:
        """Make it, in every process, the mean of what arrived in all of them: one sum over all numbers.

        Raises:
            KeyError: If arrivals in different processes name different tensors.
        """
        layout = {name: value.shape for name, value in self._sums.items()}
        parts = peers.gather((self.arrivals, self.weight, layout, self._dtypes))
        (_, _, layout, dtypes), *others = [part for part in parts if part[0]]
        for _, _, other, _ in others:
            if other.keys() != layout.keys():
                raise KeyError(
                    f"arrivals name different tensors: {sorted(other.keys() ^ layout.keys())} are not in both"
                )
        self.arrivals = sum(arrivals for arrivals, _, _, _ in parts)
        self.weight = sum(weight for _, weight, _, _ in parts)
        # A single arrival is given back as it is.
        mine = self._only if self.arrivals == 1 else self._sums
        sizes = [shape.numel() for shape in layout.values()]
        flat = torch.zeros(sum(sizes), dtype=torch.float64, device=peers.root_device)
        if mine:
            torch.cat([mine[name].double().flatten() for name in layout], out=flat)
        values = [part.view(shape) for part, shape in zip(peers.sum(flat).split(sizes), layout.values(), strict=True)]
        self._sums, self._dtypes, self._only = dict(zip(layout, values, strict=True)), dtypes, {}
        if self.arrivals == 1:
            self._only = {name: value.to(dtypes[name]) for name, value in self._sums.items()}
            self._sums = {name: value * self.weight for name, value in self._sums.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs to go on."""
        return {
            "sums": dict(self._sums),
            "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in self._dtypes.items()},
            "only": dict(self._only),
            "weight": self.weight,
            "arrivals": self.arrivals,
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from `state_dict`'s result."""
        self._sums = {name: tensor.to(device) for name, tensor in state["sums"].items()}
        self._dtypes = {name: getattr(torch, dtype) for name, dtype in state["dtypes"].items()}
        self._only = {name: tensor.to(device) for name, tensor in state["only"].items()}
        self.weight = state["weight"]
        self.arrivals = state["arrivals"]


@dataclass
class Server:
    """What the server holds: the global model and the algorithm's memory.

    Args:
        module: The live module. Its frozen parameters are the same on every side; a method that changes them does so
            here, between rounds. Its trained parameters hold some client's values while a round runs.
        seed: Seed of the experiment, from which a method derives its own.
        buffer_policy: What happens to the module's persistent buffers.
        round: Number of the round, from 0.
        state: Global values of the trained parameters and persistent buffers, by name.
        initial_buffers: The buffers' values before the first round.
        memory: What the algorithm keeps between rounds: tensors and plain Python only.
        mean: The round's arrivals so far.
        optimizers: The trainer's optimizers, with which clients step.
        clients: Number of clients of the federation.
    """

    module: nn.Module
    seed: int
    buffer_policy: BufferPolicy = "average"
    round: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)
    initial_buffers: dict[str, Tensor] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    mean: WeightedMean = field(default_factory=WeightedMean)
    optimizers: Sequence[torch.optim.Optimizer] = ()
    clients: int = 0

    def adopt(self, model: Mapping[str, Tensor], shown: Mapping[str, Tensor]) -> None:
        """Take into ``state`` what the live module holds between rounds, whoever put it there.

        Args:
            model: The live trained parameters and persistent buffers, by name.
            shown: What the algorithm last put into the module; where the module holds just that, ``state`` stays.
        """
        if not self.initial_buffers:
            self.initial_buffers = {name: value.clone() for name, value in model.items() if not value.requires_grad}
        for name, value in model.items():
            if name not in shown or not torch.equal(shown[name], value):
                self.state[name] = value.detach().clone()

    @property
    def device(self) -> torch.device:
        """Where the module's parameters are."""
        return next(self.module.parameters()).device

    def parameters(self, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those of ``model``'s values that are trained parameters, without the buffers."""
        return {name: value for name, value in model.items() if name not in self.initial_buffers}

    def sent_down(self) -> dict[str, Tensor]:
        """Return the global values that a client is sent: without the buffers unless they are averaged."""
        if self.buffer_policy == "average":
            return self.state
        return self.parameters(self.state)

    def sent_up(self, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those of a client's ``model`` values that it sends: without the buffers where they stay local."""
        if self.buffer_policy != "local":
            return dict(model)
        return self.parameters(model)
