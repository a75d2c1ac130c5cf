"""The parties of a round: what every side holds, what the server holds, and what a client may read.

`FederatedLoop` makes them and saves them in checkpoints. The two halves of an `Algorithm` read and write them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_lowrank.aggregation import Aggregator, RobustRule, WeightedMean
from lightning_lowrank.buffers import persistent_buffers
from lightning_lowrank.internals.torch import copy_each

BufferPolicy = Literal["average", "local", "reset"]

State = dict[str, Any]
"""What is kept, by purpose: tensors and plain Python in nested dictionaries, so that checkpoints can hold it."""


def trained_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's trained parameters and persistent buffers by name: what a client's copy of it is."""
    trained = {name: value for name, value in module.named_parameters() if value.requires_grad}
    return {**trained, **persistent_buffers(module)}


@torch.no_grad()
def copy_into(live: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy ``values`` into the live tensors of the same names, in place."""
    if values:
        copy_each([live[name] for name in values], list(values.values()))


@dataclass
class Base:
    """One copy of the module, with what every side of the federation holds beside it.

    In a simulation there is one, which the server and all clients share. Between real sites the server and each site
    have their own. Frozen parameters and ``state`` are the same everywhere: `ChangesBase.update_base` changes them, on
    every side by the same message.

    Args:
        module: The live module. Its trained parameters hold some client's values while a round runs.
        seed: Seed of the experiment, from which a method derives its own.
        buffer_policy: What happens to the module's persistent buffers.
        optimizers: The trainer's optimizers, with which clients step.
        initial_buffers: The persistent buffers' values before the first round, by name.
        clients: Number of clients of the experiment, also of such that cannot be drawn.
        state: What the method keeps on every side between rounds. ``state["folded"]`` says that frozen weights have
            changed: what is trained is then a part of what was learnt.
    """

    module: nn.Module
    seed: int
    buffer_policy: BufferPolicy = "average"
    optimizers: Sequence[torch.optim.Optimizer] = ()
    initial_buffers: dict[str, Tensor] = field(default_factory=dict)
    clients: int = 0
    state: State = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where the module's parameters are."""
        return next(self.module.parameters()).device

    def remember_buffers(self) -> None:
        """Keep the persistent buffers' present values as the initial ones, unless that has been done."""
        if not self.initial_buffers:
            self.initial_buffers = {name: value.clone() for name, value in persistent_buffers(self.module).items()}

    @torch.no_grad()
    def fold(self, name: str, weight: Tensor, change: Tensor) -> None:
        """Add a change to a frozen weight, and say so in ``state``; for use in `Algorithm.setup` and ``update_base``.

        The sum of all changes to a weight of 16 bits is kept beside it in single precision, as part of ``state``, and
        the weight is that sum rounded once. Otherwise each rounding would lose what changes by less than the weight's
        spacing. It takes 4 bytes for each number of the weight, in memory and in checkpoints, beside the weight's 2.

        Args:
            name: What the sum is called: the layer's name.
            weight: The weight, which is changed in place.
            change: Of the weight's shape, in single precision at least.
        """
        self.state["folded"] = True
        if weight.dtype == torch.promote_types(weight.dtype, torch.float32):
            weight.add_(change)
            return
        sums = self.state.setdefault("sums", {})
        # Something else may have changed the weight, such as a state dict that was loaded.
        known = name in sums and torch.equal(sums[name].to(weight), weight)
        sums[name] = (sums[name].to(weight.device) if known else weight.float()) + change
        weight.copy_(sums[name])

    def parameters(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those of ``tensors`` that are not persistent buffers."""
        return {name: value for name, value in tensors.items() if name not in self.initial_buffers}

    @property
    def fresh_buffers(self) -> Mapping[str, Tensor]:
        """The buffers with which a client begins each round, by name; none where it begins with others."""
        return self.initial_buffers if self.buffer_policy == "reset" else {}

    def sent_down(self, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those of the global values that clients are sent: without the buffers unless they are averaged."""
        return dict(model) if self.buffer_policy == "average" else self.parameters(model)

    def sent_up(self, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those of a client's values that it sends: without the buffers where they stay local."""
        return self.parameters(model) if self.buffer_policy == "local" else dict(model)


@dataclass(frozen=True)
class ClientInfo:
    """What the server knows of a client in a round.

    Args:
        id: Position in the partition, from 0.
        samples: Number of training samples that the client holds.
        round: Number of the round, from 0.
        seed: Seed of the experiment.
    """

    id: int
    samples: int
    round: int
    seed: int


@dataclass(frozen=True)
class ClientContext(ClientInfo):
    """What the client's half of a method may read, and nothing else.

    Args:
        base: The client's copy of the module, its optimizers, and what every side holds.
        model: The client's live values: trained parameters and persistent buffers by name, to be written in place.
        state: What the client keeps between rounds.
        round_state: What the client needs in this round alone: tensors by name, and dictionaries of such. Clients that
            step together have it stacked, see `LocalStep`.
        steps: Number of steps that the client makes in this round; when it ends, that it has made.
        find_labels: Returns the labels of the client's training samples, ``None`` where the data has none.
    """

    base: Base
    model: Mapping[str, Tensor]
    state: State = field(default_factory=dict)
    round_state: State = field(default_factory=dict)
    steps: int = 0
    find_labels: Callable[[], Tensor | None] = lambda: None

    @property
    def labels(self) -> Tensor | None:
        """Label of each of the client's training samples, or ``None`` where the data has no labels."""
        return self.find_labels()


@dataclass
class Server:
    """What the server holds: the global model, and what the method keeps there.

    Args:
        base: The server's copy of the module.
        clients: Number of clients that can be drawn; without those that have no batch, or a sampling weight of 0.
        round: Number of the round, from 0.
        cohort: Ids of the clients drawn for the round, ascending.
        model: Global values of the trained parameters and persistent buffers, by name.
        state: What the method keeps on the server between rounds. ``state["lost"]`` is what `take` keeps there.
        aggregator: The round's arrivals so far.
        announcement: What every side hears with the round's broadcast, clients that sit the round out included. Set by
            `announce`.
        encoded: Its encoding, of which all clients get the same bytes, where the downlink is lossy.
        transmit: Returns an announcement as every side receives it: with the losses of a lossy downlink.
    """

    base: Base
    clients: int = 0
    round: int = 0
    cohort: tuple[int, ...] = ()
    model: dict[str, Tensor] = field(default_factory=dict)
    state: State = field(default_factory=dict)
    aggregator: Aggregator = field(default_factory=WeightedMean)
    announcement: dict[str, Tensor] = field(default_factory=dict)
    encoded: bytes = b""
    transmit: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict

    @property
    def seed(self) -> int:
        """Seed of the experiment."""
        return self.base.seed

    def adopt(self, live: Mapping[str, Tensor], shown: Mapping[str, Tensor]) -> None:
        """Take into ``model`` what the live module holds between rounds, whoever put it there.

        Args:
            live: The live trained parameters and persistent buffers, by name.
            shown: What the method last put into the module. Where the module holds just that, ``model`` stays.
        """
        self.base.remember_buffers()
        found = changed(live, shown)
        self.model.update({name: value.detach().clone() for name, value in live.items() if name in found})

    def parameters(self) -> dict[str, Tensor]:
        """Return the global values of the trained parameters."""
        return self.base.parameters(self.model)

    def sent_down(self) -> dict[str, Tensor]:
        """Return the global values that clients are sent: without the buffers unless they are averaged."""
        return self.base.sent_down(self.model)

    def aggregated(self) -> dict[str, Tensor]:
        """Return what the aggregator makes of the round's arrivals, in single precision at least; see `take`."""
        rule = self.aggregator
        return rule.result(least=torch.float32) if isinstance(rule, (WeightedMean, RobustRule)) else rule.result()

    @torch.no_grad()
    def take(self, values: Mapping[str, Tensor]) -> None:
        """Put new values into ``model``, rounded to its types.

        What rounding to 16 bits takes away is kept in ``state``, in single precision, and added to the next values:
        changes by less than a weight's spacing would otherwise never add up. It takes 4 bytes for each number.
        """
        for name, value in values.items():
            dtype = self.model[name].dtype if name in self.model else value.dtype
            if dtype.is_floating_point and dtype.itemsize < value.dtype.itemsize and dtype.itemsize < 4:
                lost = self.state.setdefault("lost", {})
                exact = value.float() + lost[name].to(value.device) if name in lost else value.float()
                value = exact.to(dtype)
                lost[name] = exact - value.float()
            self.model[name] = value.to(dtype)

    def checkpoint(self) -> Callable[[], None]:
        """A function that puts back what is replaced from now on; announcements and changes in place stay."""
        model, aggregator = dict(self.model), self.aggregator
        state, base_state = copied_state(self.state), copied_state(self.base.state)

        def undo() -> None:
            self.model, self.aggregator = model, aggregator
            self.state, self.base.state = state, base_state

        return undo

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the global model, as tensors and plain Python."""
        return {
            "round": self.round,
            "cohort": list(self.cohort),
            "state": self.state,
            "announcement": self.announcement,
            "encoded": torch.frombuffer(bytearray(self.encoded), dtype=torch.uint8) if self.encoded else None,
            "aggregator": self.aggregator.state_dict(),
            "initial_buffers": self.base.initial_buffers,
            "base": self.base.state,
        }

    def load_state_dict(self, state: Mapping[str, Any], to_device: Callable[[Any], Any]) -> None:
        """Continue from the result of `state_dict`."""
        self.round, self.cohort = state["round"], tuple(state["cohort"])
        # The module's own state dict has it.
        self.model = {}
        self.state = to_device(state["state"])
        self.announcement = to_device(state["announcement"])
        encoded = state.get("encoded")
        self.encoded = b"" if encoded is None else encoded.cpu().numpy().tobytes()
        self.aggregator.load_state_dict(state["aggregator"], self.base.device)
        self.base.initial_buffers = to_device(state["initial_buffers"])
        self.base.state = to_device(state["base"])


@torch.no_grad()
def changed(live: Mapping[str, Tensor], shown: Mapping[str, Tensor]) -> set[str]:
    """Return the names under which two models differ. A device is waited for once, not once for each tensor."""
    found, comparisons = set(), {}
    for name, value in live.items():
        other = shown.get(name)
        if other is None or other.shape != value.shape or other.dtype != value.dtype or other.device != value.device:
            found.add(name)
        elif value.device.type == "cpu":
            found.update({name} if not torch.equal(other, value) else ())
        elif value.numel():
            comparisons[name] = (other != value).any()
    if comparisons:
        differs = torch.stack(list(comparisons.values())).tolist()
        found.update(name for name, differ in zip(comparisons, differs, strict=True) if differ)
    return found


def copied_state(state: State) -> State:
    """Return a state of the same tensors in dictionaries and lists of its own, which stays as ``state`` is now."""

    def copied(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: copied(entry) for name, entry in value.items()}
        return [copied(entry) for entry in value] if isinstance(value, list) else value

    return copied(state)


def stack_trees(trees: Sequence[State]) -> State:
    """Stack what clients have under the same names; what is one tensor for all of them is not copied.

    Raises:
        KeyError: If the names differ.
    """
    first = trees[0]
    for tree in trees:
        if tree.keys() != first.keys():
            raise KeyError(f"clients that step together have different round states: {first.keys() ^ tree.keys()}")
    stacked: State = {}
    for name, value in first.items():
        values = [tree[name] for tree in trees]
        if isinstance(value, Mapping):
            stacked[name] = stack_trees(values)
        elif all(other is value for other in values):
            stacked[name] = value.detach().unsqueeze(0).expand(len(values), *value.shape)
        else:
            stacked[name] = torch.stack(values)
    return stacked


def slice_tree(stacked: Mapping[str, Any], index: int | slice) -> State:
    """Return one client's part of a stacked tree, or that of several, as views."""
    return apply_to_collection(stacked, Tensor, lambda value: value[index])
