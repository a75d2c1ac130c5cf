"""The exchange of a round's messages between the clients and the server.

Executions and `Rounds` know the server by an `Exchange` alone. There are three:

- `Coordinator`: a simulation, with the server's half in the clients' process.
- `SharedCoordinator`: several processes that share a round, with the server's half in each of them.
- `SiteExchange`: a real site, with the server elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from lightning_lowrank.compression import Packet
from lightning_lowrank.federated.checks import check_rule
from lightning_lowrank.federated.client_optimizers import ClientOptimizers
from lightning_lowrank.federated.client_states import ClientStates
from lightning_lowrank.federated.data.planner import RoundPlan
from lightning_lowrank.federated.failures import Answers, NotFiniteError, not_finite
from lightning_lowrank.federated.ledger import Ledger
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.privacy.mean import Drawing, PrivateMean
from lightning_lowrank.federated.protocols import UnequalClients
from lightning_lowrank.federated.settings import FederatedSettings
from lightning_lowrank.federated.stages import RoundStage
from lightning_lowrank.federated.state import ClientContext, ClientInfo, Server, State
from lightning_lowrank.federated.system import Clock
from lightning_lowrank.federated.wire import Wire

Stage = TypeVar("Stage", bound=RoundStage)


@dataclass(frozen=True)
class Parts:
    """The parts of an experiment that an exchange connects.

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
    """The clients' end of a round's messages, and five methods by which it reaches the server.

    - `begin_round`: the server begins a round.
    - `send`: the server sends a client its broadcast.
    - `receive`: the server receives a client's packet.
    - `show_global`: the module gets the global model.
    - `end_round`: the server aggregates.

    Args:
        parts: What it connects.
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
        self.infinite: frozenset[str] = frozenset()
        """Names of buffers that hold numbers that are not finite, such as a mask of -inf."""
        self._received: dict[int, Mapping[str, Tensor]] = {}
        self.stages: Sequence[RoundStage] = self._make_stages(parts)
        """In the order in which they see messages."""

    @abstractmethod
    def _make_stages(self, parts: Parts) -> list[RoundStage]:
        """The stages that the settings ask for, in the order in which they see messages."""

    def find(self, kind: type[Stage]) -> Stage | None:
        """The stage of a class, if there is one."""
        return next((stage for stage in self.stages if isinstance(stage, kind)), None)

    @property
    def private(self) -> PrivateMean | None:
        """The stage of ``settings.privacy``, if this process has one."""
        return self.find(PrivateMean)

    def setup(self, continues: bool = False) -> None:
        """Let the method and the wire look at the module and its optimizers, before the first round of a fit.

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
        self.infinite = frozenset(name for name, value in buffers.items() if not_finite({name: value}))

    def notes(self, trainer: Any) -> list[str]:
        """What a user should know of how the global model will behave with this method, one sentence each."""
        return []

    # The five methods

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
        """Send a client its broadcast: the message as the client receives it."""

    @abstractmethod
    def receive(self, client: ClientContext, packet: Packet) -> Exception | None:
        """Have the server receive what a client sends.

        Returns:
            The reason for which it is refused, such as its lateness; ``None`` if it is not.
        """

    @abstractmethod
    def show_global(self, live: Mapping[str, Tensor]) -> None:
        """Put the global model into the module's live values."""

    @abstractmethod
    def end_round(self, optimizers: ClientOptimizers, steps: int) -> int:
        """Have the server make the round's answers the new global model.

        Args:
            optimizers: The clients' optimizers, whose schedules continue from the client with the most steps.
            steps: Number of batches that this process has trained clients on in the round.

        Returns:
            That number in all processes that share the round.
        """

    # The clients' end

    def info(self, client: int, round_number: int | None = None) -> ClientInfo:
        """What the server knows of a client, by default in the present round."""
        number = self.server.round if round_number is None else round_number
        return ClientInfo(client, int(self.samples[client]), number, self.server.seed)

    def context(self, client: int, model: Mapping[str, Tensor], steps: int = 0) -> ClientContext:
        """What a client's half may read, given its live values and its number of steps in the round."""
        return ClientContext(
            **vars(self.info(client)),
            base=self.server.base,
            model=model,
            state=self.states[client],
            steps=steps,
            find_labels=lambda: self._labels(client),
        )

    def began(self, client: ClientContext) -> None:
        """Let the stages see a client that has begun the round."""
        for stage in self.stages:
            stage.began(client)

    def pack(self, client: ClientContext, message: Message) -> Packet:
        """A client's message as it crosses the wire.

        Raises:
            NotFiniteError: If it holds numbers that are not finite, before the codecs or after them.
        """
        received = self._received.pop(client.id, {})
        for stage in self.stages:
            message = stage.up(client, message)
        packet = self.wire.up(client, message, received)
        tensors, allowed = dict(message.tensors), set(self.infinite)
        if self.settings.uplink or message.codec is not None:
            sends = f"as {type(packet.codec).__name__} sends it"
            tensors |= {f"{name} {sends}": value for name, value in packet.received.items()}
            allowed |= {f"{name} {sends}" for name in self.infinite}
        name = not_finite(tensors, allowed)
        if name is not None:
            raise NotFiniteError(f"its {name} holds numbers that are not finite")
        return packet

    def drop(self, client: int, state: State, error: Exception) -> None:
        """Continue without a client that failed, which keeps its ``state`` of before the round.

        Raises:
            MisconfigurationException: If too few clients are left.
        """
        self.states[client] = state
        self._received.pop(client, None)
        self.answers.fail(client, error)

    def figures(self) -> dict[str, float]:
        """What the stages log of the round."""
        return {}

    def state_of_transfers(self) -> dict[str, Any]:
        """The part of `state_dict` that changes as clients are sent their broadcasts, or are dropped."""
        return {"received": dict(self._received), "failed": dict(self.answers.failed)}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as tensors and plain Python."""
        return {
            **self.state_of_transfers(),
            "clients": dict(self.states.items()),
            # Processes that share a round have them in another order.
            "answered": sorted(self.answers.answered),
        }

    def load_state_dict(self, state: Mapping[str, Any], to_device: Callable[[Any], Any]) -> None:
        """Continue from the result of `state_dict`, of which the caller gives `states` the clients' states."""
        self._received = to_device(state["received"])
        self.answers.failed, self.answers.answered = dict(state["failed"]), list(state["answered"])
        for _, kept in self.states.items():
            kept.update(to_device(kept))
