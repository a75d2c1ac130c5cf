"""The server's half of rounds, and the in-process exchange of a simulation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_lowrank.aggregation import RobustRule
from lightning_lowrank.buffers import aliases
from lightning_lowrank.compression import Packet
from lightning_lowrank.federated.algorithm import detached
from lightning_lowrank.federated.attacks import Attackers
from lightning_lowrank.federated.broadcasts import Broadcasts
from lightning_lowrank.federated.checks import (
    check_followed,
    local_part_advice,
    new_basis_advice,
    static_batch_norm_advice,
)
from lightning_lowrank.federated.client_optimizers import ClientOptimizers
from lightning_lowrank.federated.data.planner import RoundPlan
from lightning_lowrank.federated.exchange import Exchange, Parts
from lightning_lowrank.federated.failures import NotFiniteError, first_non_finite, non_finite_rows
from lightning_lowrank.federated.ledger import dense_bytes
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.privacy.mean import private_mean
from lightning_lowrank.federated.protocols import Personal, UnequalClients, inherits
from lightning_lowrank.federated.stages import Arrival, RoundStage, counts_transfers, sees_messages
from lightning_lowrank.federated.state import (
    ClientContext,
    ClientInfo,
    State,
    copy_into,
    trained_tensors,
)
from lightning_lowrank.seeding import derive_seed


class Coordinator(Exchange):
    """Runs the method's server hooks and the stages, in the same process as a simulation's clients.

    Between real sites the server has one too, of which it uses the server's half alone.

    Args:
        parts: The objects that it connects.
    """

    has_all_answers = True
    """Whether the answers of this process are those of the round."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        robust = isinstance(self.settings.aggregator, RobustRule)
        self.broadcasts = Broadcasts(self.algorithm, self.server, self.wire, self.info, robust)
        self._drawing = parts.drawing
        self._trained: dict[str, Tensor] | None = None
        for stage in self.stages:
            stage.setup(self)

    @override
    def _make_stages(self, parts: Parts) -> list[RoundStage]:
        settings, server, drawing = parts.settings, parts.server, parts.drawing
        attackers = Attackers(settings.attackers, parts.samples, server.seed) if settings.attackers else None
        private = private_mean(settings, server, drawing) if settings.privacy and drawing else None
        # The clock first refuses late messages. Attackers are next, so that all later stages receive forged messages.
        stages = (parts.clock, attackers, *settings.stages, private, parts.ledger)
        return [stage for stage in stages if stage is not None]

    @property
    def _sees_messages(self) -> bool:
        """Whether a stage reads or changes messages, so that each message must be made."""
        return any(map(sees_messages, self.stages))

    @override
    def setup(self, continues: bool = False) -> None:
        super().setup(continues)
        if self._drawing is not None:
            self._check_cohort(self._drawing.least)

    def _check_cohort(self, clients: int) -> None:
        """Refuse a cohort of ``clients`` that is too small for the aggregator.

        Raises:
            MisconfigurationException: If it is too small.
        """
        try:
            self.server.aggregator.check_arrivals(clients)
        except ValueError as error:
            raise MisconfigurationException(f"aggregator: {error}") from error

    @override
    def notes(self, trainer: Any) -> list[str]:
        module, settings = trainer.lightning_module, self.settings
        advice = static_batch_norm_advice(self.algorithm, trainer, module, settings.buffers)
        advice += new_basis_advice(settings)
        return advice + (local_part_advice(self.algorithm) if settings.personal_test is None else [])

    # Begin of a round

    @override
    def begin_round(self, plan: RoundPlan, live: Mapping[str, Tensor], idle: int) -> None:
        server = self.server
        server.round, server.cohort = plan.round, plan.clients
        self.follow_buffers(live)
        self._follow(server.base.parameters(live))
        server.sync_with_module(live, shown=server.model)
        self.answers.begin_round()
        self.algorithm.begin_round(server)
        self.broadcasts.begin_round()
        for stage in self.stages:
            stage.begin_round(server)
        for client in plan.failed:
            info = self.info(client)
            self.note_sent(info, self.broadcasts.packet(info).nbytes)
            self.note_absent(client)
        if self.broadcasts.reach_all:
            self.ledger.add_idle(idle * self.broadcasts.packet(self.any_client).nbytes)

    def _follow(self, trained: dict[str, Tensor]) -> None:
        """Follow a change of the trained parameters, such as by a callback that unfreezes layers."""
        server, before = self.server, self._trained
        objects, earlier = ({name: id(value) for name, value in each.items()} for each in (trained, before or {}))
        if objects == earlier and before is not None:
            return
        self._trained, self.ledger.dense_bytes = trained, dense_bytes(server.base.module)
        check_followed(self.settings, server.base, server.round, trained, before)
        gone = server.parameters().keys() - trained.keys()
        server.model = {name: value for name, value in server.model.items() if name not in gone}

    def note_sent(self, client: ClientInfo, nbytes: int) -> None:
        """Notify the stages of a broadcast of ``nbytes`` to a client."""
        for stage in self.stages:
            stage.down(client, nbytes)

    def note_absent(self, client: int) -> None:
        """Notify the stages that a client of the cohort does not answer."""
        for stage in self.stages:
            stage.absent(client)

    # Downlink

    @property
    def any_client(self) -> ClientInfo:
        """The cohort's first client; client 0 for an empty cohort."""
        return self.broadcasts.any_client

    @override
    def send(self, client: ClientInfo) -> Message:
        packet = self.broadcasts.packet(client)
        self.note_sent(client, packet.nbytes)
        if self.settings.uplink:
            self._received[client.id] = self.broadcasts.copies(packet.received)
        if self.broadcasts.rebases or self._sees_messages:
            self.broadcasts.keep(client, packet)
        return Message(packet.received)

    @property
    def sends_global_model(self) -> bool:
        """Whether every client receives the unchanged global model, so that no message needs to be made."""
        own = inherits(self.algorithm, "broadcast") and not self.server.announcement
        return own and not self.settings.downlink and not self.settings.uplink and not self._sees_messages

    @property
    def common_start(self) -> Mapping[str, Tensor]:
        """The values with which all clients begin the round, if the method's `begin` would only copy them."""
        return (self.broadcasts.shared if inherits(self.algorithm, "begin") else None) or {}

    def send_global_model(self, clients: Sequence[ClientInfo]) -> None:
        """Record that clients received the global model, which the caller loads; see `sends_global_model`."""
        nbytes = self.broadcasts.packet(clients[0]).nbytes
        for client in clients:
            self.note_sent(client, nbytes)

    # Uplink

    @override
    def receive(self, client: ClientContext, packet: Packet) -> Exception | None:
        info = self.info(client.id)
        refused = self.refused(info, client.steps, packet.nbytes)
        if refused is None and self.takes_changes(packet):
            self._receive_changes(info, packet)
        elif refused is None:
            self.receive_decoded(info, packet.received)
        return refused

    @override
    def takes_changes(self, packet: Packet) -> bool:
        # A packet sent alone is received in one way only, because its result is the same to the bit everywhere.
        own = packet.together and inherits(self.algorithm, "receive", "note_answer") and not self._sees_messages
        # The values of 16 bits are rounded, and the sender's residual includes that.
        return own and self.has_all_answers and all(packet.arrived[name].itemsize >= 4 for name in packet.references)

    def _receive_changes(self, client: ClientInfo, packet: Packet) -> None:
        """Pass a client's changes to the aggregator, which adds the server's values once for all clients."""
        self.answers.answered.append(client.id)
        origin = packet.references
        if self.broadcasts.rebases:
            own = self.exact_origin_of(client)
            origin = {name: own[name] for name in origin}
        self.server.aggregator.add_change(packet.arrived, origin, self.settings.weight_of(client))
        self.broadcasts.forget(client.id)

    def refused(self, client: ClientInfo, steps: int, nbytes: int) -> Exception | None:
        """The first stage's reason to refuse a message of ``nbytes``; ``None`` if no stage refuses."""
        answers = (stage.answered(client, steps, nbytes) for stage in self.stages)
        return next((reason for reason in answers if reason is not None), None)

    def receive_decoded(self, client: ClientInfo, tensors: Mapping[str, Tensor]) -> None:
        """Pass a client's decoded message to the stages and the method."""
        self.answers.answered.append(client.id)
        message = Message(self.broadcasts.rebased(client, tensors))
        self._receive_arrival(Arrival(client, message, self.settings.weight_of(client), self.origin_of))
        self.broadcasts.forget(client.id)

    def _receive_arrival(self, arrival: Arrival) -> None:
        """Receive an arrival; a subclass may postpone that to the round's end."""
        self._pass_on(arrival)

    def _pass_on(self, arrival: Arrival, first: int = 0) -> None:
        """Pass an arrival to the stages from position ``first`` on, then to the method."""
        client = arrival.client
        for stage in self.stages[first:]:
            found = stage.arrived(arrival)
            if found is None:
                break
            arrival = found
        else:
            self.algorithm.receive(self.server, arrival.client, arrival.message, arrival.weight)
        if not first:
            Personal.of(self.algorithm).note_answer(self.server, client)

    def origin_of(self, client: ClientInfo) -> Mapping[str, Tensor]:
        """The reference values, by name, for the change in a client's message, as the client received them."""
        return self.broadcasts.origin_of(client)

    def exact_origin_of(self, client: ClientInfo) -> Mapping[str, Tensor]:
        """The reference values without the losses of the downlink."""
        return self.broadcasts.exact_origin_of(client)

    def form_of(self, client: ClientInfo) -> Message:
        """A template of the client's message: the same names, shapes, types and codec, without its values."""
        # Copies, because the module may hold a client's values, or the global model while clients step together.
        model = detached(trained_tensors(self.server.base.module))
        return self.untrained_message(client, self.broadcasts.packet(client).received, model)

    def untrained_message(
        self, client: ClientInfo, received: Mapping[str, Tensor], model: Mapping[str, Tensor]
    ) -> Message:
        """The message that a client would send without a training step.

        Args:
            client: The client.
            received: Its broadcast.
            model: The values that the method's `Algorithm.begin` changes.
        """
        # A copy of the state, because the method's `begin` may change it.
        base = dataclasses.replace(self.server.base, state=dict(self.server.base.state))
        state = Personal.of(self.algorithm).state_template(self.server, client)
        context = ClientContext(**vars(client), base=base, model=model, state=state, steps=1)
        self.algorithm.begin(context, Message(received))
        return self.algorithm.end(context)

    @property
    def averages_models(self) -> bool:
        """Whether stacks of clients' values may be averaged directly, without a message for each client."""
        own = inherits(self.algorithm, "end", "receive", "note_answer") and not self._sees_messages
        return own and not self.settings.uplink and not self.broadcasts.rebases

    def receive_stacks(
        self, clients: Sequence[ClientContext], stacks: Mapping[str, Tensor], message: Message
    ) -> dict[int, Exception]:
        """Receive the values of several clients, stacked ``[clients, …]``; ``message`` is the first client's message.

        Returns:
            For clients of whom nothing is received, the reason.
        """
        found: dict[int, Exception] = {
            place: NotFiniteError(f"its {name} holds numbers that are not finite")
            for place, name in non_finite_rows(stacks, self.infinite).items()
        }
        nbytes = self.wire.uplink.nbytes(message.tensors, message_codec=message.codec)
        infos = [self.info(client.id) for client in clients]
        for place, client in enumerate(clients):
            if place not in found and (reason := self.refused(infos[place], client.steps, nbytes)) is not None:
                found[place] = reason
        kept = [place for place in range(len(clients)) if place not in found]
        if kept and found:
            rows = torch.tensor(kept, device=self.server.base.device)
            stacks = {name: stack.index_select(0, rows) for name, stack in stacks.items()}
        if kept:
            self.answers.answered += [infos[place].id for place in kept]
            weights = [self.settings.weight_of(infos[place]) for place in kept]
            self.server.aggregator.add_stacks(stacks, weights)
        return {infos[place].id: found[place] for place in sorted(found)}

    @override
    def drop(self, client: int, state: State, error: Exception) -> None:
        super().drop(client, state, error)
        self.broadcasts.forget(client)
        self.note_absent(client)
        if self.has_all_answers:
            self.answers.check_rest()

    def checkpoint(self) -> Callable[[], None]:
        """A function that restores the server's present state.

        That holds for replaced values only: tensors that were changed in place, and announcements, stay.
        """
        answered = list(self.answers.answered)
        undo_parts = [self.server.checkpoint(), *(stage.checkpoint() for stage in self.stages)]

        def undo() -> None:
            self.answers.answered = answered
            for undo_part in undo_parts:
                undo_part()

        return undo

    # End of a round

    @override
    def end_round(self, optimizers: ClientOptimizers, steps: int) -> int:
        self.aggregate()
        return steps

    def aggregate(self) -> None:
        """Aggregate the round's arrivals into the global model.

        Raises:
            MisconfigurationException: If there are too few, or the result is not finite.
        """
        server, answers = self.server, len(self.answers.answered)
        self.answers.check(answers)
        self._check_cohort(answers)
        for stage in self.stages:
            stage.end_round()
        if isinstance(server.aggregator, RobustRule):
            origin = self.exact_origin_of(self.info(server.cohort[0]))
            server.aggregator.prepare(origin, derive_seed(server.seed, "aggregator", server.round))
        before = dict(server.model)
        for place, stage in enumerate(self.stages, start=1):
            for arrival in stage.release():
                self._pass_on(arrival, place)
        server.announcement, server.encoded = {}, b""
        self.algorithm.aggregate(server)
        name = first_non_finite(server.model, self.infinite)
        if name is not None:
            server.model = before
            raise MisconfigurationException(
                f"the global model of round {server.round} has non-finite numbers in {name!r}, although all {answers}"
                f" answers are finite: they arose in {type(self.algorithm).__name__}. If they overflowed, lower the"
                " learning rates or clip gradients."
            )
        self._forget_round()

    def skip_round(self) -> None:
        """End a round without answers; the global model stays as it was."""
        self.server.announcement, self.server.encoded = {}, b""
        self._forget_round()

    def _forget_round(self) -> None:
        """Drop the arrivals and packets of a finished round."""
        self.server.aggregator = self.server.aggregator.fresh()
        self.broadcasts.end_round()
        self.answers.end_round()

    def _has_full_model(self, client: int, state: State) -> bool:
        """Whether a client's personal model is the global model with some tensors replaced by the client's own."""
        if isinstance(self.algorithm, UnequalClients):
            return self.algorithm.has_full_model(self.server, self.info(client), state)
        return inherits(self.algorithm, "personal_model")

    @override
    def show_global(self, live: Mapping[str, Tensor]) -> None:
        UnequalClients.of(self.algorithm).configure(self.server.base, None)
        model = self.server.model
        copy_into(live, {name: model[name] for name in live})

    @override
    def figures(self) -> dict[str, float]:
        return {name: value for stage in self.stages for name, value in stage.figures().items()}

    # Checkpoints

    @override
    def state_of_transfers(self) -> dict[str, Any]:
        changing = (stage for stage in self.stages if counts_transfers(stage))
        return {**super().state_of_transfers(), "stages": _states(changing)}

    @override
    def state_dict(self) -> dict[str, Any]:
        server, states = self.server, dict(self.states.items())
        return {
            **super().state_dict(),
            **server.state_dict(),
            "trained": list(self._trained or ()),
            # Some checkpoint formats lose which tensors are shared, so list the aliases.
            "aliases": aliases(server.base.module),
            "stages": _states(self.stages),
            # Clients whose personal model cannot be built from the global one. The server alone keeps some clients'
            # tensors ("pairs").
            "unlike": [
                client
                for client in sorted({*states, *server.state.get("pairs", {})})
                if not self._has_full_model(client, states.get(client, {}))
            ],
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any], to_device: Callable[[Any], Any]) -> None:
        super().load_state_dict(state, to_device)
        self.server.load_state_dict(state, to_device)
        named = dict(self.server.base.module.named_parameters())
        trained = {name: named[name] for name in state["trained"] if name in named}
        for parameter in trained.values():
            # A callback that unfroze parameters in an earlier epoch does not run again in a resumed fit.
            parameter.requires_grad_(True)
        # Other objects than the parameters, so that the first round is checked.
        self._trained = {name: parameter.detach() for name, parameter in trained.items()} or None
        for stage in self.stages:
            # Absent in an older checkpoint, or after a change of the list of stages.
            if stage.state_key in state["stages"]:
                stage.load_state_dict(to_device(state["stages"][stage.state_key]))


def _states(stages: Iterable[RoundStage]) -> dict[str, Any]:
    return {stage.state_key: stage.state_dict() for stage in stages}
