"""The state of server and clients in a round, and the part of it that a client may read.

`FederatedLoop` makes them and saves them in checkpoints. The two halves of an `Algorithm` read and write them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
"""Further state, by purpose: tensors and plain Python in nested dictionaries, so that checkpoints can hold it."""
PRIVACY_ACCOUNT = "privacy"
"""Name of the entry of a client's state that counts its private steps, which a dropped answer does not undo."""


def trained_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's trained parameters and persistent buffers by name; these make up a client's model."""
    trained = {name: value for name, value in module.named_parameters() if value.requires_grad}
    return {**trained, **persistent_buffers(module)}


@torch.no_grad()
def copy_into(live: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy ``values`` into the live tensors of the same names, in place."""
    if values:
        copy_each([live[name] for name in values], list(values.values()))


@contextmanager
def substituted_data(live: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which the live tensors have the data of ``values``. A gradient through them can still be taken."""
    before = {name: live[name].data for name in values if name in live}
    try:
        for name in before:
            live[name].data = values[name]
        yield
    finally:
        for name, data in before.items():
            live[name].data = data


def difference(value: Tensor, reference: Tensor) -> Tensor:
    """``value - reference``, and 0 where both are infinite alike, as the numbers of a mask of -inf."""
    return (value - reference).masked_fill(value == reference, 0)


def changed_integers(tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors of integers that differ from those of a reference, or that it lacks."""
    return [
        name
        for name, value in tensors.items()
        if not (value.is_floating_point() or (name in reference and torch.equal(reference[name].to(value), value)))
    ]


@dataclass
class Base:
    """A copy of the module, with the state that server and clients share.

    In a simulation there is one, which the server and all clients share. Between real sites the server and each site
    have their own. Frozen parameters and ``state`` are the same everywhere: `ChangesBase.update_base` changes them, on
    server and clients by the same message.

    Args:
        module: The live module. Its trained parameters hold some client's values while a round runs.
        seed: Seed of the experiment, from which a method derives its own.
        buffer_policy: The treatment of the module's persistent buffers.
        optimizers: The trainer's optimizers, with which clients step.
        initial_buffers: The persistent buffers' values before their first round, by name.
        clients: Number of clients of the experiment, including clients that cannot be drawn.
        state: The method's state on the server and on all clients between rounds. ``state["folded"]`` has the
            names of frozen weights that have changed, by layer: the trained tensors are then only a part of the learnt
            ones.
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
        """The device of the module's parameters."""
        return next(self.module.parameters()).device

    def remember_buffers(self) -> dict[str, Tensor]:
        """Save the values of persistent buffers that are new as their initial ones, and return them by name."""
        present = persistent_buffers(self.module).items()
        new = {name: value.clone() for name, value in present if name not in self.initial_buffers}
        self.initial_buffers.update(new)
        return new

    @torch.no_grad()
    def fold(self, name: str, weight: Tensor, change: Tensor) -> None:
        """Add a change to a frozen weight, and record that in ``state``; for `Algorithm.setup` and ``update_base``.

        The sum of all changes to a weight of 16 bits is also kept in single precision, as part of ``state``, and
        the weight is that sum rounded once. Otherwise each rounding would lose what changes by less than the weight's
        spacing. It takes 4 bytes for each number of the weight, in memory and in checkpoints, in addition to the
        weight's 2.

        Args:
            name: The sum's name: the layer's name.
            weight: The weight, which is changed in place.
            change: Of the weight's shape, in single precision at least.
        """
        if name not in (folded := self.state.setdefault("folded", {})):
            # The weight may be a view of a parameter, such as one projection of an attention.
            memory = weight.untyped_storage().data_ptr()
            named = self.module.named_parameters()
            folded[name] = next((each for each, value in named if value.untyped_storage().data_ptr() == memory), name)
        if weight.dtype == torch.promote_types(weight.dtype, torch.float32):
            weight.add_(change)
            return
        sums = self.state.setdefault("sums", {})
        # The weight may have been changed elsewhere, such as by load_state_dict().
        known = name in sums and torch.equal(sums[name].to(weight), weight)
        sums[name] = (sums[name].to(weight.device) if known else weight.float()) + change
        weight.copy_(sums[name])

    def parameters(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The entries of ``tensors`` that are no persistent buffers."""
        return {name: value for name, value in tensors.items() if name not in self.initial_buffers}

    @property
    def fresh_buffers(self) -> Mapping[str, Tensor]:
        """The initial buffers, by name, if each client begins each round with them; else empty."""
        return self.initial_buffers if self.buffer_policy == "reset" else {}

    def sent_down(self, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The part of the global model for clients: all of it if buffers are averaged, else its parameters."""
        return dict(model) if self.buffer_policy == "average" else self.parameters(model)

    def sent_up(self, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The part of a client's model that it sends: its parameters if buffers stay local, else all of it."""
        return self.parameters(model) if self.buffer_policy == "local" else dict(model)


@dataclass(frozen=True)
class ClientInfo:
    """The information on a client that the server has in a round.

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
    """The information that the client's half of a method may read.

    Args:
        base: The client's copy of the module, its optimizers, and the state that server and clients share.
        model: The client's live values: trained parameters and persistent buffers by name, to be written in place.
        state: The client's state between rounds.
        round_state: The client's values of this round alone: tensors by name, and dictionaries of such. Clients that
            step together have it stacked, see `LocalStep`.
        steps: Number of steps that the client makes in this round; when it ends, that it has made.
        find_labels: Returns the labels of the client's training samples, ``None`` if the data has none.
    """

    base: Base
    model: Mapping[str, Tensor]
    state: State = field(default_factory=dict)
    round_state: State = field(default_factory=dict)
    steps: int = 0
    find_labels: Callable[[], Tensor | None] = lambda: None

    @property
    def labels(self) -> Tensor | None:
        """The label of each of the client's training samples; ``None`` if the data has none."""
        return self.find_labels()


@dataclass
class Server:
    """The server's state: the global model, and entries of the method.

    Args:
        base: The server's copy of the module.
        clients: Number of clients that can be drawn, which have a batch, and no sampling weight or availability of 0.
        round: Number of the round, from 0.
        cohort: Ids of the clients drawn for the round, ascending.
        model: Global values of the trained parameters and persistent buffers, by name.
        state: The method's state on the server between rounds. ``state["lost"]`` is what `update_model` keeps there.
        aggregator: The round's arrivals so far.
        announcement: The tensors that all clients, idle ones included, receive with the round's broadcast. Set by
            `ChangesBase.announce`.
        encoded: Its encoding, of which all clients get the same bytes, if the downlink is lossy.
        transmit: Returns an announcement as server and clients receive it: with the losses of a lossy downlink.
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
        """The experiment's seed."""
        return self.base.seed

    def sync_with_module(self, live: Mapping[str, Tensor], shown: Mapping[str, Tensor]) -> None:
        """Update ``model`` by changes that something else made to the live module between rounds.

        Args:
            live: The live trained parameters and persistent buffers, by name.
            shown: The values that the method last put into the module. If the module holds just that, ``model``
                stays.
        """
        found = changed_names(live, shown)
        self.model.update({name: value.detach().clone() for name, value in live.items() if name in found})

    def parameters(self) -> dict[str, Tensor]:
        """The global values of the trained parameters."""
        return self.base.parameters(self.model)

    def sent_down(self) -> dict[str, Tensor]:
        """The part of the global model that clients are sent."""
        return self.base.sent_down(self.model)

    def aggregated(self) -> dict[str, Tensor]:
        """The aggregate of the round's arrivals, in single precision or higher; see `update_model`."""
        rule = self.aggregator
        return rule.result(least=torch.float32) if isinstance(rule, (WeightedMean, RobustRule)) else rule.result()

    @torch.no_grad()
    def update_model(self, values: Mapping[str, Tensor]) -> None:
        """Store new values in ``model``, rounded to its types.

        The rounding error of 16 bits is kept in ``state``, in single precision, and added to the next values:
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
        """A function that restores the present values. It does not undo announcements and in-place changes."""
        model, aggregator = dict(self.model), self.aggregator
        state, base_state = copied_state(self.state), copied_state(self.base.state)

        def undo() -> None:
            self.model, self.aggregator = model, aggregator
            self.state, self.base.state = state, base_state

        return undo

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run except for the global model, as tensors and plain Python."""
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
        """Restore the result of `state_dict`."""
        self.round, self.cohort = state["round"], tuple(state["cohort"])
        # Lightning restores the global model with the module.
        self.model = {}
        self.state = to_device(state["state"])
        self.announcement = to_device(state["announcement"])
        encoded = state.get("encoded")
        self.encoded = b"" if encoded is None else encoded.cpu().numpy().tobytes()
        self.aggregator.load_state_dict(state["aggregator"], self.base.device)
        self.base.initial_buffers = to_device(state["initial_buffers"])
        self.base.state = to_device(state["base"])


@torch.no_grad()
def changed_names(live: Mapping[str, Tensor], shown: Mapping[str, Tensor]) -> set[str]:
    """Names of the tensors that differ between two models; waits for each device once only."""
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
    """A copy of a state's dictionaries and lists that shares the tensors."""

    def copied(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: copied(entry) for name, entry in value.items()}
        return [copied(entry) for entry in value] if isinstance(value, list) else value

    return copied(state)


def stack_trees(trees: Sequence[State]) -> State:
    """Stack clients' entries of the same name; a tensor that is one object for all clients is expanded, not copied.

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
    """The rows of one client, or of several, of a stacked tree, as views."""
    return apply_to_collection(stacked, Tensor, lambda value: value[index])
