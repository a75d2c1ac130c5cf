"""Stages of a round, which process the messages between server and clients in addition to the method.

An `Exchange` has a list of them: bytes (`Ledger`), simulated time (`Clock`), attackers (`Attackers`), client-level
privacy (`PrivateMean`), and a user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from torch import Tensor

from lightning_lowrank.arguments import Configured
from lightning_lowrank.federated.algorithm import Algorithm, detached
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.state import ClientContext, ClientInfo, Server, difference

__all__ = ["Arrival", "RoundStage"]


class Way(Protocol):
    """The interface to the server's half of rounds that stages may use; `Coordinator` implements it."""

    algorithm: Algorithm
    server: Server

    @property
    def any_client(self) -> ClientInfo:
        """The cohort's first client; client 0 for an empty cohort."""

    def origin_of(self, client: ClientInfo) -> Mapping[str, Tensor]:
        """The reference values, by name, for the change in a client's message, as the client received them."""

    def exact_origin_of(self, client: ClientInfo) -> Mapping[str, Tensor]:
        """The reference values without the losses of the downlink."""

    def form_of(self, client: ClientInfo) -> Message:
        """A template of the client's message: the same names, shapes, types and codec, without its values."""


@dataclass
class Arrival:
    """A client's message at the server.

    Args:
        client: The client.
        message: Its tensors, decoded.
        weight: The client's weight in the mean.
        find_origin: Returns the values, by name, of which the message has the change.
    """

    client: ClientInfo
    message: Message
    weight: float
    find_origin: Callable[[ClientInfo], Mapping[str, Tensor]]

    def copy(self) -> Arrival:
        """A copy with tensors of its own, for a stage that delays the arrival."""
        return replace(self, message=Message(detached(self.message.tensors), self.message.codec))

    def update(self) -> dict[str, Tensor]:
        """The client's change by name, floating-point tensors only. Tensors without reference values are changes.

        Integer tensors are left out. A number that stays infinite, as in a mask, has the change 0.
        """
        origin = self.find_origin(self.client)
        found = {name: value for name, value in self.message.tensors.items() if value.is_floating_point()}
        alike = [name for name, value in found.items() if name in origin and origin[name].shape == value.shape]
        return found | {name: difference(found[name], origin[name].to(found[name])) for name in alike}


class RoundStage(Configured):
    """A part of each round in addition to the method; ``FederatedLoop(stages=[...])`` takes instances of subclasses.

    All hooks do nothing by default. In the order of a round:

    - `begin_round`: on the server, after the method's own.
    - `down`: on the server, as a broadcast is sent to a client.
    - `began`, `up`: at the client, after it has begun, and before its message is encoded. Between real sites these run
      at the site, on a copy of the stage made from the recipe, of which no other hook is called there.
    - `answered`: on the server, as a message is received. It may refuse the message.
    - `arrived`: on the server, in the order in which clients answer. It may hold the message back, or change it.
    - `release`: on the server, at the round's end, for messages that were held back.
    - `figures`: the round's logged figures.

    Later stages of the list see the messages that earlier stages pass on. The user's stages come after attackers.

    Example:
        >>> class Counts(RoundStage):
        ...     def begin_round(self, server):
        ...         self.count = 0
        ...     def arrived(self, arrival):
        ...         self.count += 1
        ...         return arrival
        ...     def figures(self):
        ...         return {"answers": float(self.count)}
    """

    key: ClassVar[str] = ""
    """Name of the stage's state in checkpoints; by default the class's."""

    def setup(self, way: Way) -> None:
        """Begin a fit on the server, before `load_state_dict`; ``way`` is the server's half of its rounds."""

    def begin_round(self, server: Server) -> None:
        """Begin a round: reset the values that `figures` returns."""

    def down(self, client: ClientInfo, nbytes: int) -> None:
        """Called when a broadcast of ``nbytes`` encoded bytes is sent to a client of the cohort."""

    def began(self, client: ClientContext) -> None:
        """Called when a client has begun the round with its broadcast."""

    def up(self, client: ClientContext, message: Message) -> Message:
        """The message to send in place of ``message``, before the uplink's codecs."""
        return message

    def answered(self, client: ClientInfo, steps: int, nbytes: int) -> Exception | None:
        """Called when a client's message of ``nbytes`` encoded bytes is received, after its local steps.

        Returns:
            The reason to continue without the client; ``None`` (default) if there is none.
        """
        return None

    def absent(self, client: int) -> None:
        """Called when a client of the cohort does not answer."""

    def arrived(self, arrival: Arrival) -> Arrival | None:
        """The arrival for the next stage, and finally the method; ``None`` delays it until `release`.

        The tensors may be the module's own, which the next client changes: hold a `Arrival.copy` back.
        """
        return arrival

    def release(self) -> Sequence[Arrival]:
        """Delayed arrivals, in the order in which the next stage receives them."""
        return ()

    def end_round(self) -> None:
        """End a round, before `release`."""

    def figures(self) -> Mapping[str, float]:
        """The round's logged figures, by name."""
        return {}

    # Processes, failures and checkpoints

    def counted(self) -> Any:
        """This process's numbers for `pool`, as plain Python; processes that share a round exchange them."""
        return None

    def pool(self, start: Any, counts: Sequence[Any]) -> None:
        """Combine the round's numbers of all processes that share it.

        Args:
            start: The result of `counted` at the round's start, alike in all processes.
            counts: The result of `counted` at the round's end, of each process.
        """

    def checkpoint(self) -> Callable[[], None]:
        """A function that undoes all arrivals from now on."""
        return lambda: None

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run, as tensors and plain Python."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""

    @property
    def state_key(self) -> str:
        """Name of the stage's state in checkpoints."""
        return self.key or type(self).__name__


def sees_messages(stage: RoundStage) -> bool:
    """Whether a stage reads or changes messages, rather than their sizes only."""
    return _overrides(stage, "began", "up", "arrived")


def counts_transfers(stage: RoundStage) -> bool:
    """Whether a stage's state changes when a client is sent its broadcast or fails."""
    return _overrides(stage, "down", "absent")


def _overrides(stage: RoundStage, *hooks: str) -> bool:
    return any(getattr(type(stage), hook) is not getattr(RoundStage, hook) for hook in hooks)
