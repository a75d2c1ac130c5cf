"""The stages of a round: what looks at the messages between the server and its clients beside the method.

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
from lightning_lowrank.federated.state import ClientContext, ClientInfo, Server

__all__ = ["Arrival", "RoundStage"]


class Way(Protocol):
    """What a stage may ask the server's half of a round, whose implementation is `Coordinator`."""

    algorithm: Algorithm
    server: Server

    @property
    def any_client(self) -> ClientInfo:
        """The cohort's first client; one that stands for it in an empty cohort."""

    def origin_of(self, client: ClientInfo) -> Mapping[str, Tensor]:
        """The values, by name, of which a client's message has the change, as the client received them."""

    def exact_origin_of(self, client: ClientInfo) -> Mapping[str, Tensor]:
        """The same values without the losses of the downlink."""

    def form_of(self, client: ClientInfo) -> Message:
        """A message of the round with the names, shapes, types and codec of a client's, without its values."""


@dataclass
class Arrival:
    """A client's message as it reaches the server.

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
        """The arrival with tensors of its own, for a stage that holds it back."""
        return replace(self, message=Message(detached(self.message.tensors), self.message.codec))

    def update(self) -> dict[str, Tensor]:
        """The client's changes in float, by name; tensors without an origin are changes themselves.

        Integer tensors are left out.
        """
        origin = self.find_origin(self.client)
        return {
            name: value - origin[name].to(value) if name in origin and origin[name].shape == value.shape else value
            for name, value in self.message.tensors.items()
            if value.is_floating_point()
        }


class RoundStage(Configured):
    """A part of each round beside the method: ``FederatedLoop(stages=[...])`` takes instances of subclasses.

    All hooks do nothing by default. In the order of a round:

    - `begin_round`: on the server, after the method's own.
    - `down`: on the server, as a broadcast is sent to a client.
    - `began`, `up`: at the client, after it has begun, and before its message is encoded. Between real sites these run
      at the site, on a copy of the stage made from the recipe, of which no other hook is called there.
    - `answered`: on the server, as a message is received. It may refuse the message.
    - `arrived`: on the server, in the order in which clients answer. It may hold the message back, or change it.
    - `release`: on the server, at the round's end, for messages that were held back.
    - `figures`: what is logged of the round.

    Later stages of the list see what earlier ones let pass. The user's come after attackers.

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
        """Begin a fit on the server, before `load_state_dict`. ``way`` is the server's half of its rounds."""

    def begin_round(self, server: Server) -> None:
        """Begin a round: reset what `figures` returns."""

    def down(self, client: ClientInfo, nbytes: int) -> None:
        """A broadcast of so many encoded bytes is sent to a client of the cohort."""

    def began(self, client: ClientContext) -> None:
        """A client has begun the round with what it received."""

    def up(self, client: ClientContext, message: Message) -> Message:
        """The message that a client sends, before codecs, in place of ``message``."""
        return message

    def answered(self, client: ClientInfo, steps: int, nbytes: int) -> Exception | None:
        """A message of so many encoded bytes is received of a client after its local steps.

        Returns:
            The reason to go on without the client; ``None`` (default) if there is none.
        """
        return None

    def absent(self, client: int) -> None:
        """A client of the cohort does not answer."""

    def arrived(self, arrival: Arrival) -> Arrival | None:
        """What the next stage, and at the end the method, receives; ``None``: nothing before `release`.

        The tensors may be the module's own, which the next client changes: hold a `Arrival.copy` back.
        """
        return arrival

    def release(self) -> Sequence[Arrival]:
        """The arrivals that were held back, in the order in which the next stage receives them."""
        return ()

    def end_round(self) -> None:
        """End a round, before `release`."""

    def figures(self) -> Mapping[str, float]:
        """What is logged of the round, by name."""
        return {}

    # Processes, failures and checkpoints

    def counted(self) -> Any:
        """The numbers, as plain Python, that `pool` needs of each of several processes that share a round."""
        return None

    def pool(self, start: Any, counts: Sequence[Any]) -> None:
        """Make the round's numbers those of all processes that share it.

        Args:
            start: The result of `counted` at the round's start, alike in all processes.
            counts: The result of `counted` at the round's end, of each process.
        """

    def checkpoint(self) -> Callable[[], None]:
        """A function that takes back what arrives from now on."""
        return lambda: None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as tensors and plain Python."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict`."""

    @property
    def state_key(self) -> str:
        """Name of the stage's state in checkpoints."""
        return self.key or type(self).__name__


def sees_messages(stage: RoundStage) -> bool:
    """Whether a stage reads or changes messages, and not their sizes alone."""
    return _overrides(stage, "began", "up", "arrived")


def counts_transfers(stage: RoundStage) -> bool:
    """Whether a stage's state changes as a client is sent its broadcast, or is dropped."""
    return _overrides(stage, "down", "absent")


def _overrides(stage: RoundStage, *hooks: str) -> bool:
    return any(getattr(type(stage), hook) is not getattr(RoundStage, hook) for hook in hooks)
