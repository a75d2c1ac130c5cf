"""The server's half of the rounds, as an execution sees it.

An execution asks a `Coordinator` for the message that a client is sent, and hands over the message that the client
sends back. In a simulation the coordinator runs the server's half of the method. Processes that share a round have one
that exchanges what arrives; a real site has one that stands for the wire.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_lowrank.aggregation import RobustRule
from lightning_lowrank.arguments import listed
from lightning_lowrank.buffers import aliases
from lightning_lowrank.compression import Packet
from lightning_lowrank.federated.algorithm import detached, inherits
from lightning_lowrank.federated.attacks import Attackers
from lightning_lowrank.federated.checks import (
    check_trained,
    goes_on_from,
    local_part_advice,
    static_batch_norm_advice,
)
from lightning_lowrank.federated.client_states import ClientStates
from lightning_lowrank.federated.data.planner import RoundPlan
from lightning_lowrank.federated.failures import NotFiniteError, described, named, not_finite, rows_not_finite
from lightning_lowrank.federated.ledger import Ledger, dense_bytes
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.privacy.mean import PrivateMean, private_mean
from lightning_lowrank.federated.settings import FederatedSettings
from lightning_lowrank.federated.stages import Arrival, RoundStage, counts_transfers, sees_messages
from lightning_lowrank.federated.state import (
    ClientContext,
    ClientInfo,
    Server,
    State,
    copied_state,
    copy_into,
    trained_tensors,
)
from lightning_lowrank.federated.system import Clock
from lightning_lowrank.federated.wire import Wire
from lightning_lowrank.internals.torch import is_unchanged, version_of
from lightning_lowrank.seeding import derive_seed


class Coordinator:
    """Runs the server's half of the method in a simulation.

    Args:
        settings: The experiment's settings.
        server: The server.
        samples: Number of training samples of each client.
        states: What clients keep between rounds.
        ledger: The stage that adds up bytes.
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
        if self.wire.splits:
            server.transmit = self._transmit
        self._received: dict[int, dict[str, Tensor]] = {}
        self._copies: dict[str, tuple[Tensor, int, Tensor]] = {}
        self._sent: dict[int, Packet] = {}
        self.failed: dict[int, str] = {}
        """Clients of the round that failed while they trained, and why."""
        self.answered: list[int] = []
        """Clients of the round whose answers count, as far as they have arrived."""
        self._first_error: Exception | None = None
        self.infinite: frozenset[str] = frozenset()
        """Names of buffers that hold numbers that are not finite, such as a mask of -inf."""
        self._trained: dict[str, Tensor] | None = None
        attackers = None if settings.attackers is None else Attackers(settings.attackers, samples, server.seed)
        self.attackers: frozenset[int] = frozenset() if attackers is None else attackers.members
        """Ids of the clients that attack."""
        self.private: PrivateMean | None = None
        """The stage of `ClientPrivacy`; see `protect`."""
        self.clock: Clock | None = None
        """The stage that counts simulated seconds; see `count_seconds`."""
        self.stages: list[RoundStage] = []
        """In the order in which they see messages."""
        # Attackers forge what the user's stages and privacy see.
        for stage in (attackers, *settings.stages, ledger):
            if stage is not None:
                self._add(stage, len(self.stages))

    def _add(self, stage: RoundStage, place: int) -> None:
        self.stages.insert(place, stage)
        stage.setup(self)

    def protect(self, sampled: int, population: int, rounds: int | None) -> None:
        """Have the method see the clients' private mean alone, if the settings ask for it.

        Args:
            sampled: Number of clients that a round draws, on average or exactly.
            population: Number of clients that can be drawn.
            rounds: Number of rounds of the run; ``None`` if it has no end.

        Raises:
            MisconfigurationException: If the method needs more than the mean, or exact numbers; for BatchNorm.
        """
        if self.settings.privacy is not None:
            self.private = private_mean(self.settings, self.server, sampled, population, rounds)
            self._add(self.private, len(self.stages) - 1)

    def count_seconds(self, clock: Clock) -> None:
        """Have a clock refuse late messages, before any other stage sees them."""
        self.clock = clock
        self._add(clock, 0)

    @property
    def server_stages(self) -> Sequence[RoundStage]:
        """The stages whose hooks of the server run in this process."""
        return self.stages

    @property
    def _sees_messages(self) -> bool:
        """Whether a stage reads or changes messages, so that none may be left out."""
        return any(map(sees_messages, self.stages))

    def setup(self, continues: bool = False) -> None:
        """Let the method and the wire look at the module and its optimizers, before the first round of a fit.

        Args:
            continues: Whether the method, as an object, has looked at the module in an earlier fit of the experiment.
        """
        base = self.server.base
        if not continues:
            saved = dict(base.state)
            self.algorithm.setup(base)
            base.state.update(saved)
            self.algorithm.check_clients(len(self.samples))
            self.algorithm.check_aggregator(self.server.aggregator)
        self.algorithm.setup_optimizers(base)
        self.wire.setup(base)
        buffers = base.initial_buffers
        self.infinite = frozenset(name for name, value in buffers.items() if not_finite({name: value}))

    def notes(self, trainer: Any) -> list[str]:
        """Return what a user should know of how the global model will behave with this method, one sentence each."""
        module, settings = trainer.lightning_module, self.settings
        advice = static_batch_norm_advice(self.algorithm, trainer, module, settings.buffers)
        return advice + (local_part_advice(self.algorithm) if settings.personal_test is None else [])

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
        self.failed, self.answered, self._first_error = {}, [], None
        self._copies, self._sent = {}, {}
        self.algorithm.begin_round(server)
        if self.wire.holds_copy:
            first = self.any_client
            self._broadcast_to_all = self._down(self.message(first), first)
            self.wire.hold(server.base, self._broadcast_to_all.received)
        for stage in self.server_stages:
            stage.begin_round(server)
        for client in plan.failed:
            info = self.info(client)
            self._tell_down(info, self.broadcast(info).nbytes)
            self._tell_absent(client)
        if self.broadcasts_to_all:
            self.ledger.add_idle(idle * self.broadcast(self.any_client).nbytes)

    def _tell_down(self, client: ClientInfo, nbytes: int) -> None:
        for stage in self.server_stages:
            stage.down(client, nbytes)

    def _tell_absent(self, client: int) -> None:
        for stage in self.server_stages:
            stage.absent(client)

    @property
    def any_client(self) -> ClientInfo:
        """The cohort's first client, or one that stands for it where nobody was drawn."""
        return self.info(self.server.cohort[0] if self.server.cohort else 0)

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

    def _transmit(self, update: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Encode an announcement for all clients, and return it as they, and the server, receive it."""
        packet = self.wire.announce(self.server.base, update, self.server.round)
        self.server.encoded = packet.encode()
        return packet.received

    def _down(self, message: Message, client: ClientInfo) -> Packet:
        return self.wire.down(self.server.base, message, client, self.server.announcement, self.server.encoded)

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
        if client.id in self._sent:
            return self._sent[client.id]
        message = self.message(client)
        if not self.wire.holds_copy:
            return self._down(message, client)
        first_client = self.any_client
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
            packet = self._down(first, first_client)
            self._broadcast_to_all = self.wire.held(self.server.base, packet)
        return self._broadcast_to_all

    @property
    def sends_global_model(self) -> bool:
        """Whether every client is sent the global model as it is, so that clients may be given it without a message."""
        own = inherits(self.algorithm, "broadcast", "global_model") and not self.server.announcement
        return own and not self.settings.downlink and not self.settings.uplink and not self._sees_messages

    @property
    def averages_models(self) -> bool:
        """Whether stacks of clients' values may be handed over in place of their messages."""
        own = inherits(self.algorithm, "end", "receive") and not self._sees_messages
        return own and not self.settings.uplink and not self._puts_on_own

    @property
    def _puts_on_own(self) -> bool:
        """Whether what arrives is put onto the server's own broadcast, of which the clients hold a lossy copy."""
        robust = isinstance(self.settings.aggregator, RobustRule)
        return self.wire.holds_copy or (robust and bool(self.settings.downlink))

    def send(self, client: ClientInfo) -> Message:
        """Send a client its broadcast, and return the message as the client receives it."""
        packet = self.broadcast(client)
        self._tell_down(client, packet.nbytes)
        if self.settings.uplink:
            self._received[client.id] = self._copied(packet.received)
        if self._puts_on_own or self._sees_messages:
            self._keep(client, packet)
        return Message(packet.received)

    def _keep(self, client: ClientInfo, packet: Packet) -> None:
        """Keep a packet until the client's message is received, which is measured by it."""
        self._sent[client.id] = packet

    def _copied(self, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of a broadcast, the same ones as long as clients are sent the same values."""
        if self.settings.downlink:
            return detached(received)
        for name, value in received.items():
            before = self._copies.get(name)
            if before is None or not is_unchanged(*before[:2], value):
                self._copies[name] = value, version_of(value), value.detach().clone()
        return {name: self._copies[name][2] for name in received}

    def state_of_transfers(self) -> dict[str, Any]:
        """The part of `state_dict` that changes as clients are sent their broadcasts, or are dropped."""
        return {
            "stages": _states(stage for stage in self.server_stages if counts_transfers(stage)),
            "received": dict(self._received),
            "failed": dict(self.failed),
        }

    def send_global_model(self, clients: Sequence[ClientInfo]) -> None:
        """Send clients the global model, which they are given by the caller; see `sends_global_model`."""
        nbytes = self.broadcast(clients[0]).nbytes
        for client in clients:
            self._tell_down(client, nbytes)

    def began(self, client: ClientContext) -> None:
        """Tell the stages that a client has begun the round."""
        for stage in self.stages:
            stage.began(client)

    def pack(self, client: ClientContext, message: Message) -> Packet:
        """Return what a client sends as it crosses the wire.

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

    def refused(self, client: ClientContext, nbytes: int) -> Exception | None:
        """The reason not to receive a message of so many bytes, such as its lateness; ``None`` if there is none."""
        info = self.info(client.id)
        for stage in self.server_stages:
            error = stage.answered(info, client.steps, nbytes)
            if error is not None:
                return error
        return None

    def receive(self, client: ClientContext, packet: Packet) -> None:
        """Take in the message that a client sends, which no stage has `refused`."""
        self.take(self.info(client.id), packet.received)

    def drop(self, client: int, state: State, error: Exception) -> None:
        """Go on without a client that failed, which keeps its ``state`` of before the round.

        Raises:
            MisconfigurationException: If too few clients are left.
        """
        self.states[client] = state
        self._received.pop(client, None)
        self._sent.pop(client, None)
        self.failed[client] = described(error)
        self._tell_absent(client)
        self._first_error = self._first_error or error
        self.check_answers(len(self.server.cohort) - len(self.failed))

    def check_answers(self, answers: int) -> None:
        """Refuse a round with fewer answers than it needs.

        Raises:
            MisconfigurationException: If there are fewer. Its cause is the first client's error.
        """
        needed, cohort = self.settings.least_answers, self.server.cohort
        if answers < needed:
            raise MisconfigurationException(
                f"round {self.server.round} has answers of {answers} of {len(cohort)} clients and needs"
                f" min_clients={needed}{self._reasons()}"
            ) from self._first_error

    def _reasons(self) -> str:
        """Say why clients of the round failed, each reason once."""
        alike: dict[str, list[int]] = {}
        for client, reason in self.failed.items():
            alike.setdefault(reason, []).append(client)
        if len(alike) == 1 and len(self.failed) == len(self.server.cohort):
            return f": all of them failed alike: {next(iter(alike))}"
        return "." + "".join(f"\n  {named(clients)}: {reason}" for reason, clients in alike.items())

    def checkpoint(self) -> Callable[[], None]:
        """Return what puts the server back to where it is now.

        That holds for what is replaced: tensors that were changed in place, and announcements, stay.
        """
        server, answered = self.server, list(self.answered)
        model, state, base, aggregator = dict(server.model), server.state, server.base.state, server.aggregator
        kept, kept_base = copied_state(state), copied_state(base)
        undo_stages = [stage.checkpoint() for stage in self.server_stages]

        def undo() -> None:
            server.model, server.aggregator, self.answered = model, aggregator, answered
            server.state, server.base.state = kept, kept_base
            for undo_stage in undo_stages:
                undo_stage()

        return undo

    def take(self, client: ClientInfo, tensors: Mapping[str, Tensor]) -> None:
        """Let the method take in what arrived from a client."""
        self.answered.append(client.id)
        if self._puts_on_own:
            own, held = self.message(client).tensors, self.broadcast(client).received
            tensors = self.wire.onto_own(self.server.base, tensors, self.origin(own), self.origin(held))
        self._take(Arrival(client, Message(tensors), self.settings.weight_of(client), self.origin_of))
        # A lossy downlink's packets take the memory of a model each.
        self._sent.pop(client.id, None)

    def _take(self, arrival: Arrival) -> None:
        """Take in an arrival, now or at the round's end."""
        self._pass_on(arrival)

    def _pass_on(self, arrival: Arrival, first: int = 0) -> None:
        """Hand an arrival to the stages from place ``first`` on, and then to the method."""
        found: Arrival | None = arrival
        for stage in self.server_stages[first:]:
            found = stage.arrived(arrival)
            if found is None:
                return
            arrival = found
        self.algorithm.receive(self.server, arrival.client, arrival.message, arrival.weight)

    def _release(self) -> None:
        """Hand on the arrivals that stages have held back."""
        for place, stage in enumerate(self.server_stages, start=1):
            for arrival in stage.release():
                self._pass_on(arrival, place)

    def origin_of(self, client: ClientInfo) -> Mapping[str, Tensor]:
        """The values, by name, of which a client's message has the change, as the client received them."""
        return self.origin(self._reached(client))

    def exact_origin_of(self, client: ClientInfo) -> Mapping[str, Tensor]:
        """The same values without the losses of the downlink."""
        return self.origin(self.message(client).tensors)

    def _reached(self, client: ClientInfo) -> Mapping[str, Tensor]:
        """Return the broadcast by which what arrives from a client is measured."""
        return self.message(client).tensors if self._puts_on_own else self.broadcast(client).received

    def origin(self, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the values, by name, of which a client's message that ``received`` these has the change."""
        base = self.server.base
        # A client may have been sent some of the global model's values in earlier rounds alone.
        origin = self.algorithm.upload_origin(base, self.server.sent_down(), received)
        return {**origin, **base.fresh_buffers}

    def form_of(self, info: ClientInfo) -> Message:
        """A message of the round with the names, shapes, types and codec of a client's, without its values."""
        base, algorithm = self.server.base, self.algorithm
        copied = dataclasses.replace(base, state=dict(base.state))
        # Copies, for the module may hold a client's values, or the global model for stacked clients.
        model = detached(trained_tensors(base.module))
        state = algorithm.stand_in(self.server, info)
        context = ClientContext(**vars(info), base=copied, model=model, state=state, steps=1)
        algorithm.begin(context, Message(self.broadcast(info).received))
        return algorithm.end(context)

    def receive_stacks(
        self, clients: Sequence[ClientContext], stacks: Mapping[str, Tensor], message: Message
    ) -> dict[int, Exception]:
        """Take in what several clients send, stacked ``[clients, …]``, of whom the first sends ``message``.

        Returns:
            For clients of whom nothing is taken in, the reason.
        """
        found: dict[int, Exception] = {
            place: NotFiniteError(f"its {name} holds numbers that are not finite")
            for place, name in rows_not_finite(stacks, self.infinite).items()
        }
        nbytes = self.wire.uplink.nbytes(message.tensors, own=message.codec)
        for place, client in enumerate(clients):
            if place not in found and (reason := self.refused(client, nbytes)) is not None:
                found[place] = reason
        kept = [place for place in range(len(clients)) if place not in found]
        if kept and found:
            rows = torch.tensor(kept, device=self.server.base.device)
            stacks = {name: stack.index_select(0, rows) for name, stack in stacks.items()}
        if kept:
            self.answered += [clients[place].id for place in kept]
            weights = [self.settings.weight_of(self.info(clients[place].id)) for place in kept]
            self.server.aggregator.add_stacks(stacks, weights)
        return {clients[place].id: found[place] for place in sorted(found)}

    def aggregate(self) -> None:
        """Fold the round's arrivals into the global model.

        Raises:
            MisconfigurationException: If there are too few, or the result is not finite.
        """
        self.check_answers(len(self.answered))
        self.check_cohort(len(self.answered))
        for stage in self.server_stages:
            stage.end_round()
        server = self.server
        if isinstance(server.aggregator, RobustRule):
            origin = self.algorithm.origin(server, self.info(server.cohort[0]))
            origin = {**origin, **server.base.fresh_buffers}
            server.aggregator.prepare(origin, derive_seed(server.seed, "aggregator", server.round))
        before = dict(server.model)
        self._release()
        server.announcement, server.encoded = {}, b""
        self.algorithm.aggregate(server)
        name = not_finite(self.algorithm.global_model(server), self.infinite)
        if name is not None:
            server.model = before
            raise MisconfigurationException(
                f"the global model of round {server.round} has numbers in {name!r} that are not finite, although those"
                f" of all {len(self.answered)} answers are: they come from {type(self.algorithm).__name__}. If they"
                " overflow there, lower the learning rates or clip gradients."
            )
        self._forget_round()

    def pass_over(self) -> None:
        """End the round without an answer: what it was to begin with stays."""
        self.server.announcement, self.server.encoded = {}, b""
        self._forget_round()

    def _forget_round(self) -> None:
        """Let go of the arrivals and packets of a round that is over."""
        self.server.aggregator = self.server.aggregator.fresh()
        self._broadcast_to_all = None
        self._copies, self._sent = {}, {}
        # Its traceback holds on to the step that failed.
        self._first_error = None

    def figures(self) -> dict[str, float]:
        """What the stages log of the round."""
        return {name: value for stage in self.server_stages for name, value in stage.figures().items()}

    def show_global(self, live: Mapping[str, Tensor]) -> None:
        """Put the global model into the module's live values."""
        self.algorithm.configure(self.server.base, None)
        model = self.algorithm.global_model(self.server)
        copy_into(live, {name: model[name] for name in live})

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as tensors and plain Python."""
        server, states = self.server, dict(self.states.items())
        shown = self.algorithm.global_model(server)
        return {
            "round": server.round,
            "cohort": list(server.cohort),
            # What the module's own state holds is not saved twice.
            "model": {name: value for name, value in server.model.items() if shown.get(name) is not value},
            "state": server.state,
            "trained": list(self._trained or ()),
            # Not every way to write a checkpoint keeps which tensors are one.
            "aliases": aliases(server.base.module),
            "announcement": server.announcement,
            "encoded": torch.frombuffer(bytearray(server.encoded), dtype=torch.uint8) if server.encoded else None,
            "aggregator": server.aggregator.state_dict(),
            "initial_buffers": server.base.initial_buffers,
            "base": server.base.state,
            **self.state_of_transfers(),
            "stages": _states(self.server_stages),
            "clients": states,
            # Of others, a client's own tensors make its model. Some clients' tensors the server alone keeps.
            "unlike": [
                client
                for client in sorted({*states, *server.state.get("pairs", {})})
                if not self.algorithm.has_whole_model(server, self.info(client), states.get(client, {}))
            ],
            # Those who share a round have them in another order.
            "answered": sorted(self.answered),
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
        encoded = state.get("encoded")
        server.encoded = b"" if encoded is None else encoded.cpu().numpy().tobytes()
        server.aggregator.load_state_dict(state["aggregator"], server.base.device)
        server.base.initial_buffers = to_device(state["initial_buffers"])
        server.base.state = to_device(state["base"])
        self._received = to_device(state["received"])
        for stage in self.server_stages:
            # An older checkpoint, or a changed list of stages, has none of it.
            if stage.state_key in state["stages"]:
                stage.load_state_dict(to_device(state["stages"][stage.state_key]))
        self.failed, self.answered = dict(state["failed"]), list(state["answered"])
        for _, kept in self.states.items():
            kept.update(to_device(kept))


def _states(stages: Iterable[RoundStage]) -> dict[str, Any]:
    return {stage.state_key: stage.state_dict() for stage in stages}


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
