"""The exchange of a round's messages between clients and server.

Executions and `Rounds` know the server by an `Exchange` alone. There are three:

- `Coordinator`: a simulation, with the server's half in the clients' process.
- `SharedCoordinator`: several processes that share a round, with the server's half in each of them.
- `SiteExchange`: a real site, with the server elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from lightning_lowrank.compression import Packet
from lightning_lowrank.federated.checks import check_buffers, check_rule
from lightning_lowrank.federated.client_optimizers import ClientOptimizers
from lightning_lowrank.federated.client_states import ClientStates
from lightning_lowrank.federated.clock import Clock
from lightning_lowrank.federated.data.planner import RoundPlan
from lightning_lowrank.federated.failures import Answers, NotFiniteError, first_non_finite
from lightning_lowrank.federated.ledger import Ledger, dense_bytes
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.privacy.mean import Drawing, PrivateMean
from lightning_lowrank.federated.protocols import UnequalClients
from lightning_lowrank.federated.settings import FederatedSettings
from lightning_lowrank.federated.stages import RoundStage
from lightning_lowrank.federated.state import PRIVACY_ACCOUNT, ClientContext, ClientInfo, Server, State
from lightning_lowrank.federated.wire import Answer, Wire

Stage = TypeVar("Stage", bound=RoundStage)


@dataclass(frozen=True)
class Parts:
    """The objects that an exchange connects.

    Args:
        settings: The experiment's settings.
        server: The server; at a real site its base alone.
        samples: Number of training samples of each client.
        states: The clients' states between rounds.
        ledger: The stage that adds up bytes.
        drawing: How many clients rounds draw. ``None``: no round is averaged, and ``settings.privacy`` has no stage.
        clock: The stage of ``settings.system``, if there is one.
        labels: Returns the labels of a client's training samples.
    """

    settings: FederatedSettings
    server: Server
    samples: Sequence[int]
    states: ClientStates
    ledger: Ledger
    drawing: Drawing | None = None
    clock: Clock | None = None
    labels: Callable[[int], Tensor | None] = lambda client: None


class Exchange(ABC):
    """The clients' interface to the server: five methods, by which they exchange a round's messages.

    - `begin_round`: the server begins a round.
    - `send`: the server sends a client its broadcast.
    - `receive`: the server receives a client's packet.
    - `show_global`: the module gets the global model.
    - `end_round`: the server aggregates.

    Args:
        parts: The objects that it connects.
    """

    def __init__(self, parts: Parts) -> None:
        self.settings = parts.settings
        self.algorithm = parts.settings.algorithm
        self.server = parts.server
        self.samples = parts.samples
        self.server.base.clients = len(parts.samples)
        self.states = parts.states
        self.ledger = parts.ledger
        self._labels = parts.labels
        self.wire = Wire(self.algorithm, self.settings.uplink, self.settings.downlink)
        self.answers = Answers(self.server, self.settings.least_answers)
        self.infinite: dict[str, Tensor] = {}
        """The initial values of buffers that hold numbers that are not finite, such as a mask of -inf."""
        self._received: dict[int, Mapping[str, Tensor]] = {}
        self.stages: Sequence[RoundStage] = self._make_stages(parts)
        """In the order in which they see messages."""

    @abstractmethod
    def _make_stages(self, parts: Parts) -> list[RoundStage]:
        """The stages that the settings ask for, in order of processing."""

    def find(self, kind: type[Stage]) -> Stage | None:
        """The first stage that is an instance of ``kind``, if any."""
        return next((stage for stage in self.stages if isinstance(stage, kind)), None)

    @property
    def private(self) -> PrivateMean | None:
        """The stage of ``settings.privacy``, if any."""
        return self.find(PrivateMean)

    def setup(self, continues: bool = False) -> None:
        """Set up the method and the wire for the module and its optimizers, before a fit's first round.

        Args:
            continues: Whether the method, as an object, has looked at the module in an earlier fit of the experiment.
        """
        base = self.server.base
        if continues:
            UnequalClients.of(self.algorithm).configure(base, None)
        saved = dict(base.state)
        self.algorithm.setup(base)
        base.state.update(saved)
        check_rule(self.algorithm, self.server.aggregator)
        self.wire.setup(base)
        buffers = base.initial_buffers
        self.infinite = {name: value for name, value in buffers.items() if first_non_finite({name: value})}

    def notes(self, trainer: Any) -> list[str]:
        """Notes for the user on the global model's behaviour with this method, one sentence each."""
        return []

    def follow_buffers(self, live: Mapping[str, Tensor]) -> None:
        """Count as buffers those that hooks have registered since the setup; call it first in a round.

        Args:
            live: The live trained parameters and persistent buffers.

        Raises:
            MisconfigurationException: If a buffer of earlier rounds is gone or has another shape.
        """
        base = self.server.base
        check_buffers(base, self.server.round, live)
        new = base.remember_buffers()
        if new:
            self.infinite |= {name: value for name, value in new.items() if first_non_finite({name: value})}
            self.ledger.dense_bytes = dense_bytes(base.module)

    # Methods that reach the server

    @abstractmethod
    def begin_round(self, plan: RoundPlan, live: Mapping[str, Tensor], idle: int) -> None:
        """Begin a round.

        Args:
            plan: The round's clients.
            live: The live trained parameters and persistent buffers.
            idle: Number of clients that could take part and sit the round out.
        """

    @abstractmethod
    def send(self, client: ClientInfo) -> Message:
        """Send a client its broadcast, and return the message as the client receives it."""

    @abstractmethod
    def receive(self, client: ClientContext, packet: Packet) -> Exception | None:
        """Pass a client's packet to the server.

        Returns:
            The reason for which it is refused, such as its lateness; ``None`` if it is not.
        """

    @abstractmethod
    def show_global(self, live: Mapping[str, Tensor]) -> None:
        """Load the global model into ``live``, the module's own tensors by name."""

    @abstractmethod
    def end_round(self, optimizers: ClientOptimizers, steps: int) -> int:
        """Have the server aggregate the round's answers into a new global model.

        Args:
            optimizers: The clients' optimizers, whose schedules continue from the client with the most steps.
            steps: Number of batches that this process has trained clients on in the round.

        Returns:
            That number in all processes that share the round.
        """

    # Methods of the clients' end

    def info(self, client: int, round_number: int | None = None) -> ClientInfo:
        """A client's `ClientInfo`, by default for the present round."""
        number = self.server.round if round_number is None else round_number
        return ClientInfo(client, int(self.samples[client]), number, self.server.seed)

    def context(self, client: int, model: Mapping[str, Tensor], steps: int = 0) -> ClientContext:
        """A client's `ClientContext`, given its live values and its number of steps in the round."""
        return ClientContext(
            **vars(self.info(client)),
            base=self.server.base,
            model=model,
            state=self.states[client],
            steps=steps,
            find_labels=lambda: self._labels(client),
        )

    def note_begun(self, client: ClientContext) -> None:
        """Notify the stages that a client has begun the round."""
        for stage in self.stages:
            stage.began(client)

    def pack(self, client: ClientContext, message: Message) -> Packet:
        """Encode a client's message for the uplink.

        Raises:
            NotFiniteError: If it holds numbers that are not finite, before the codecs or after them.
        """
        answer = self.answer(client, message)
        return self.checked(answer[1], self.wire.up(*answer))

    def answer(self, client: ClientContext, message: Message) -> Answer:
        """The arguments of `Wire.up` for a client's message, after the stages have seen it."""
        for stage in self.stages:
            message = stage.up(client, message)
        return client, message, self._received.pop(client.id, {})

    def checked(self, message: Message, packet: Packet) -> Packet:
        """The packet of a message, if both have finite numbers.

        Raises:
            NotFiniteError: If not.
        """
        tensors, allowed = _without(message.tensors, packet.finite), dict(self.infinite)
        if self.settings.uplink or message.codec is not None:
            sends = f"as {type(packet.codec).__name__} sends it"
            changes = self.takes_changes(packet)
            decoded = _without(packet.arrived, packet.finite) if changes else packet.received
            tensors |= {f"{name} {sends}": value for name, value in decoded.items()}
            allowed |= {f"{name} {sends}": value for name, value in self.infinite.items()}
        name = first_non_finite(tensors, allowed)
        if name is not None:
            raise NotFiniteError(f"its {name} holds numbers that are not finite")
        return packet

    def takes_changes(self, packet: Packet) -> bool:
        """Whether a packet's changes are averaged, so that its values need not be computed."""
        return False

    def drop(self, client: int, state: State, error: Exception) -> None:
        """Continue without a client that failed, and restore its ``state`` of before the round.

        Its privacy account stays, because the server may have its message.

        Raises:
            MisconfigurationException: If too few clients are left.
        """
        account = self.states[client].get(PRIVACY_ACCOUNT)
        self.states[client] = state if account is None else {**state, PRIVACY_ACCOUNT: account}
        self._received.pop(client, None)
        self.answers.fail(client, error)

    def figures(self) -> dict[str, float]:
        """The round's logged figures of all stages."""
        return {}

    def state_of_transfers(self) -> dict[str, Any]:
        """The part of `state_dict` that changes when clients are sent their broadcasts or fail."""
        return {"received": dict(self._received), "failed": dict(self.answers.failed)}

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run, as tensors and plain Python."""
        return {
            **self.state_of_transfers(),
            "clients": dict(self.states.items()),
            # Sorted, because the order differs between processes that share a round.
            "answered": sorted(self.answers.answered),
        }

    def load_state_dict(self, state: Mapping[str, Any], to_device: Callable[[Any], Any]) -> None:
        """Restore the result of `state_dict`; the caller has loaded the clients' states into `states`."""
        self._received = to_device(state["received"])
        self.answers.failed, self.answers.answered = dict(state["failed"]), list(state["answered"])
        for _, kept in self.states.items():
            kept.update(to_device(kept))


def _without(tensors: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if name not in names}
