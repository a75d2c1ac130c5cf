"""The server's half of the rounds, as an execution sees it.

An execution asks a `Coordinator` for the message that a client is sent, and hands over the message that the client
sends back. In a simulation the coordinator runs the server's half of the method. Processes that share a round have one
that exchanges what arrives; a real site has one that stands for the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_lowrank.aggregation import RobustRule
from lightning_lowrank.arguments import listed
from lightning_lowrank.compression import Packet
from lightning_lowrank.federated.algorithm import detached, inherits
from lightning_lowrank.federated.attacks import Arrival, attack_seed
from lightning_lowrank.federated.checks import check_trained, goes_on_from
from lightning_lowrank.federated.data.planner import RoundPlan
from lightning_lowrank.federated.failures import NotFiniteError, described, not_finite, rows_not_finite
from lightning_lowrank.federated.messages import Ledger, Message, dense_bytes
from lightning_lowrank.federated.offload import ClientStates
from lightning_lowrank.federated.settings import FederatedSettings
from lightning_lowrank.federated.state import ClientContext, ClientInfo, Server, State, copy_into, trained_tensors
from lightning_lowrank.federated.wire import Wire
from lightning_lowrank.seeding import derive_seed


class Coordinator:
    """Runs the server's half of the method in a simulation.

    Args:
        settings: The experiment's settings.
        server: The server.
        samples: Number of training samples of each client.
        states: What clients keep between rounds.
        ledger: Where the sizes of messages are entered.
        labels: Returns the labels of a client's training samples.
    """

    def __init__(
        self,
        settings: FederatedSettings,
        server: Server,
        samples: Sequence[int],
        states: ClientStates,
        ledger: Ledger,
        labels: Callable[[int], Tensor | None] = lambda client: None,
    ) -> None:
        self.settings = settings
        self.algorithm = settings.algorithm
        self.server = server
        self.samples = samples
        self.states = states
        self.ledger = ledger
        self.wire = Wire(self.algorithm, settings.uplink, settings.downlink)
        self._labels = labels
        self._broadcast_to_all: Packet | None = None
        self._received: dict[int, dict[str, Tensor]] = {}
        self.failed: dict[int, str] = {}
        """Clients of the round that failed while they trained, and why."""
        self._answers = 0
        self._first_error: Exception | None = None
        self.attackers: frozenset[int] = frozenset()
        """Ids of the clients that attack."""
        self._held: list[Arrival] = []
        self.infinite: frozenset[str] = frozenset()
        """Names of buffers that hold numbers that are not finite, such as a mask of -inf."""
        self._trained: dict[str, Tensor] | None = None

    def setup(self) -> None:
        """Let the method and the wire look at the module, before the first round."""
        self.algorithm.setup(self.server.base)
        self.algorithm.check_aggregator(self.server.aggregator)
        self.wire.setup(self.server.base)
        if self.settings.attackers is not None:
            self.attackers = frozenset(self.settings.attackers.members(len(self.samples), self.server.seed))
        buffers = self.server.base.initial_buffers
        self.infinite = frozenset(name for name, value in buffers.items() if not_finite({name: value}))

    def check_cohort(self, clients: int) -> None:
        """Refuse cohorts of so many clients if they are too small for the aggregator.

        Raises:
            MisconfigurationException: If they are.
        """
        try:
            self.server.aggregator.check_arrivals(clients)
        except ValueError as error:
            raise MisconfigurationException(f"aggregator: {error}") from error

    def info(self, client: int, round_number: int | None = None) -> ClientInfo:
        """Return what the server knows of a client, by default in the present round."""
        number = self.server.round if round_number is None else round_number
        return ClientInfo(client, int(self.samples[client]), number, self.server.seed)

    def context(self, client: int, model: Mapping[str, Tensor], steps: int = 0) -> ClientContext:
        """Return what a client's half may read, given its live values and its number of steps in the round."""
        return ClientContext(
            **vars(self.info(client)),
            base=self.server.base,
            model=model,
            state=self.states[client],
            steps=steps,
            find_labels=lambda: self._labels(client),
        )

    def begin_round(self, plan: RoundPlan, live: Mapping[str, Tensor], idle: int) -> None:
        """Begin a round on the server, which as many as ``idle`` clients sit out that could take part."""
        server = self.server
        server.round, server.cohort = plan.round, plan.clients
        self._follow(server.base.parameters(live))
        server.adopt(live, shown=self.algorithm.global_model(server))
        self.ledger.begin_round()
        self.failed, self._answers, self._first_error = {}, 0, None
        self.algorithm.begin_round(server)
        if self.wire.holds_copy:
            first = self.info(plan.clients[0])
            self._broadcast_to_all = self.wire.down(server.base, self.message(first), first)
            self.wire.hold(server.base, self._broadcast_to_all.received)
        for client in plan.failed:
            self.ledger.down(self.broadcast(self.info(client)).nbytes)
        if self.broadcasts_to_all:
            self.ledger.idle(idle * self.broadcast(self.info(plan.clients[0])).nbytes)

    def _follow(self, trained: dict[str, Tensor]) -> None:
        """Take note of the parameters that are trained from this round on, which a callback may have changed.

        Raises:
            MisconfigurationException: If nothing is trained, a parameter is gone, no optimizer has it, or what is kept
                from round to round does not suit it.
        """
        base, before = self.server.base, self._trained
        objects, earlier = ({name: id(value) for name, value in each.items()} for each in (trained, before or {}))
        if objects == earlier and before is not None:
            return
        self._trained, self.ledger.dense_bytes = trained, dense_bytes(base.module)
        if not trained:
            raise MisconfigurationException(
                f"in round {self.server.round} no parameter of the module is trained: all are frozen."
            )
        if base.optimizers:
            check_trained(base.module, base.optimizers)
        if before is None:
            return
        gone = sorted(before.keys() - dict(base.module.named_parameters(remove_duplicate=False)).keys())
        if gone:
            raise MisconfigurationException(
                f"the rounds before round {self.server.round} trained {listed(gone)}, which the module no longer has:"
                " something has replaced parameters, as pruning and parametrizations do. Do that before or after the"
                " fit."
            )
        changed = listed(sorted(trained.keys() ^ before.keys()))
        keeping = goes_on_from(self.settings)
        if changed and keeping:
            raise MisconfigurationException(
                f"from round {self.server.round} on other parameters are trained than before ({changed}), and"
                f" {keeping}: train the same parameters in all rounds."
            )
        self.server.model = {
            name: value for name, value in self.server.model.items() if name in trained or name not in before
        }

    @property
    def broadcasts_to_all(self) -> bool:
        """Whether clients that sit the round out must hear its broadcast as well."""
        return bool(self.server.announcement) or self.wire.holds_copy

    def message(self, client: ClientInfo) -> Message:
        """Return what the method sends to a client, with what the server has announced."""
        message = self.algorithm.broadcast(self.server, client)
        if not self.server.announcement:
            return message
        return Message({**message.tensors, **self.server.announcement}, message.codec)

    def broadcast(self, client: ClientInfo) -> Packet:
        """Return the round's broadcast as it is sent to a client.

        Raises:
            MisconfigurationException: If the method sends clients different values, and all are to hold one copy.
        """
        message = self.message(client)
        if not self.wire.holds_copy:
            return self.wire.down(self.server.base, message, client)
        first_client = self.info(self.server.cohort[0])
        first = self.message(first_client)
        if message.tensors.keys() != first.tensors.keys() or any(
            value is not first.tensors[name] and not torch.equal(value, first.tensors[name])
            for name, value in message.tensors.items()
        ):
            raise MisconfigurationException(
                f"{type(self.algorithm).__name__} sends clients different values, and a downlink with error feedback"
                " needs one broadcast for all: leave out error_feedback."
            )
        if self._broadcast_to_all is None:
            # The run was resumed inside the round.
            packet = self.wire.down(self.server.base, first, first_client)
            self._broadcast_to_all = self.wire.held(self.server.base, packet)
        return self._broadcast_to_all

    @property
    def sends_global_model(self) -> bool:
        """Whether every client is sent the global model as it is, so that clients may be given it without a message."""
        own = inherits(self.algorithm, "broadcast", "global_model") and not self.server.announcement
        return own and not self.settings.downlink and not self.settings.uplink

    @property
    def averages_models(self) -> bool:
        """Whether stacks of clients' values may be handed over in place of their messages."""
        own = inherits(self.algorithm, "end", "receive") and self.settings.attackers is None
        return own and not self.settings.uplink and not self.wire.holds_copy

    def send(self, client: ClientInfo) -> Message:
        """Send a client its broadcast, and return the message as the client receives it."""
        packet = self.broadcast(client)
        self.ledger.down(packet.nbytes)
        if self.settings.uplink:
            self._received[client.id] = detached(packet.received)
        return Message(packet.received)

    def send_global_model(self, clients: Sequence[ClientInfo]) -> None:
        """Send clients the global model, which they are given by the caller; see `sends_global_model`."""
        self.ledger.down(self.broadcast(clients[0]).nbytes, len(clients))

    def pack(self, client: ClientContext, message: Message) -> Packet:
        """Return what a client sends as it crosses the wire.

        Raises:
            NotFiniteError: If it holds numbers that are not finite, before the codecs or after them.
        """
        packet = self.wire.up(client, message, self._received.pop(client.id, {}))
        tensors = dict(message.tensors)
        if self.settings.uplink or message.codec is not None:
            codec = type(packet.codec).__name__
            tensors |= {f"{name} as {codec} sends it": value for name, value in packet.received.items()}
        name = not_finite(tensors, self.infinite)
        if name is not None:
            raise NotFiniteError(f"its {name} holds numbers that are not finite")
        return packet

    def receive(self, client: ClientContext, packet: Packet) -> None:
        """Take in what a client sends."""
        self.ledger.up(packet.nbytes)
        self.take(self.info(client.id), packet.received)

    def drop(self, client: int, state: State, error: Exception) -> None:
        """Go on without a client that failed, which keeps its ``state`` of before the round.

        Raises:
            MisconfigurationException: If too few clients are left.
        """
        self.states[client] = state
        self._received.pop(client, None)
        self.failed[client] = described(error)
        self._first_error = self._first_error or error
        self.check_answers(len(self.server.cohort) - len(self.failed))

    def check_answers(self, answers: int) -> None:
        """Refuse a round with fewer answers than it needs.

        Raises:
            MisconfigurationException: If there are fewer. Its cause is the first client's error.
        """
        needed, cohort = self.settings.min_clients, self.server.cohort
        if answers < needed:
            reasons = "".join(f"\n  client {client}: {reason}" for client, reason in self.failed.items())
            raise MisconfigurationException(
                f"round {self.server.round} has answers of {answers} of {len(cohort)} clients and needs"
                f" min_clients={needed}.{reasons}"
            ) from self._first_error

    def take(self, client: ClientInfo, tensors: Mapping[str, Tensor]) -> None:
        """Let the method take in what arrived from a client."""
        self._answers += 1
        if self.wire.holds_copy:
            tensors = self.wire.onto_own(self.server.base, tensors, self.message(client).tensors)
        self._take(client, Message(tensors), self.settings.weight_of(client))

    def _take(self, client: ClientInfo, message: Message, weight: float) -> None:
        if self.settings.attackers is None:
            self._hand_over(client, message, weight)
        else:
            # Attackers know what all others send.
            self._held.append(Arrival(client, Message(detached(message.tensors), message.codec), weight))

    def _hand_over(self, client: ClientInfo, message: Message, weight: float) -> None:
        """Let the method take in a client's message."""
        self.algorithm.receive(self.server, client, message, weight)

    def _release(self) -> None:
        """Let the method take in what was held back, with the attackers' messages forged."""
        held, self._held = sorted(self._held, key=lambda arrival: arrival.client.id), []
        if not held or self.settings.attackers is None:
            return
        base, server = self.server.base, self.server
        origins = {
            arrival.client.id: self.algorithm.reference(base, self.message(arrival.client).tensors) for arrival in held
        }
        seed = attack_seed(server.seed, server.round)
        for arrival in self.settings.attackers.forged(held, sorted(self.attackers), origins, seed):
            self._hand_over(arrival.client, arrival.message, arrival.weight)

    def receive_stacks(
        self, clients: Sequence[ClientContext], stacks: Mapping[str, Tensor], message: Message
    ) -> dict[int, Exception]:
        """Take in what several clients send, stacked ``[clients, …]``, of whom the first sends ``message``.

        Returns:
            For clients of whom nothing is taken in, the reason.
        """
        found = rows_not_finite(stacks, self.infinite)
        kept = [place for place in range(len(clients)) if place not in found]
        if found:
            rows = torch.tensor(kept, device=self.server.base.device)
            stacks = {name: stack.index_select(0, rows) for name, stack in stacks.items()}
        if kept:
            self._answers += len(kept)
            nbytes = self.wire.uplink.nbytes(message.tensors, own=message.codec)
            self.ledger.up(nbytes, len(kept))
            weights = [self.settings.weight_of(self.info(clients[place].id)) for place in kept]
            self.server.aggregator.add_stacks(stacks, weights)
        return {
            clients[place].id: NotFiniteError(f"its {name} holds numbers that are not finite")
            for place, name in found.items()
        }

    def aggregate(self) -> None:
        """Fold the round's arrivals into the global model.

        Raises:
            MisconfigurationException: If there are too few, or the result is not finite.
        """
        self.check_answers(self._answers)
        self.check_cohort(self._answers)
        self._release()
        server = self.server
        if isinstance(server.aggregator, RobustRule):
            origin = self.algorithm.origin(server, self.info(server.cohort[0]))
            server.aggregator.prepare(origin, derive_seed(server.seed, "aggregator", server.round))
        server.announcement = {}
        before = dict(server.model)
        self.algorithm.aggregate(server)
        name = not_finite(self.algorithm.global_model(server), self.infinite)
        if name is not None:
            server.model = before
            raise MisconfigurationException(
                f"the global model of round {server.round} has numbers in {name!r} that are not finite, although those"
                f" of all {self._answers} answers are: they come from {type(self.algorithm).__name__}. If they overflow"
                " there, lower the learning rates or clip gradients."
            )
        server.aggregator = server.aggregator.fresh()
        self._broadcast_to_all = None
        # Its traceback holds on to the step that failed.
        self._first_error = None

    def show_global(self, live: Mapping[str, Tensor]) -> None:
        """Put the global model into the module's live values."""
        self.algorithm.configure(self.server.base, None)
        model = self.algorithm.global_model(self.server)
        copy_into(live, {name: model[name] for name in live})

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as tensors and plain Python."""
        server = self.server
        shown = self.algorithm.global_model(server)
        return {
            "round": server.round,
            "cohort": list(server.cohort),
            # What the module's own state holds is not saved twice.
            "model": {name: value for name, value in server.model.items() if shown.get(name) is not value},
            "state": server.state,
            "trained": list(self._trained or ()),
            "announcement": server.announcement,
            "aggregator": server.aggregator.state_dict(),
            "initial_buffers": server.base.initial_buffers,
            "base": server.base.state,
            "received": self._received,
            "clients": dict(self.states.items()),
            "ledger": self.ledger.state_dict(),
            "failed": self.failed,
            "answers": self._answers,
            "held": [
                {"client": each.client.id, "tensors": dict(each.message.tensors), "weight": each.weight}
                for each in self._held
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any], to_device: Callable[[Any], Any]) -> None:
        """Go on from `state_dict`'s result, but for what clients keep, with which the caller makes ``states``."""
        server = self.server
        server.round, server.cohort = state["round"], tuple(state["cohort"])
        server.model = to_device(state["model"])
        server.state = to_device(state["state"])
        for name, parameter in server.base.module.named_parameters():
            # Callbacks that thaw parameters in an epoch do not thaw them again in a run that is resumed later.
            if name in state["trained"]:
                parameter.requires_grad_(True)
        server.announcement = to_device(state["announcement"])
        server.aggregator.load_state_dict(state["aggregator"], server.base.device)
        server.base.initial_buffers = to_device(state["initial_buffers"])
        server.base.state = to_device(state["base"])
        self._received = to_device(state["received"])
        self.ledger.load_state_dict(state["ledger"])
        self.failed, self._answers = dict(state["failed"]), state["answers"]
        self._held = [
            Arrival(self.info(each["client"]), Message(to_device(each["tensors"])), each["weight"])
            for each in state["held"]
        ]
        for _, kept in self.states.items():
            kept.update(to_device(kept))


def first_transfers(
    settings: FederatedSettings, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Packet]:
    """Return what client 0 is sent (``"down"``) and sends (``"up"``) in the first round if it makes no step.

    The method's `Algorithm.setup` and the client's `Algorithm.begin` change the module: use it for nothing else
    afterwards.
    """
    server = settings.make_server(module, optimizers, settings.clients or 1)
    base = server.base
    coordinator = Coordinator(settings, server, [1] * server.clients, ClientStates(), Ledger(0))
    coordinator.setup()
    live = trained_tensors(module)
    coordinator.begin_round(RoundPlan(0, (0,), (1,), (), ()), live, idle=0)
    info, client = coordinator.info(0), coordinator.context(0, live, steps=1)
    settings.algorithm.configure(base, info)
    down = coordinator.broadcast(info)
    settings.algorithm.begin(client, Message(down.received))
    up = coordinator.wire.up(client, settings.algorithm.end(client), down.received)
    settings.algorithm.configure(base, None)
    return {"up": up, "down": down}
