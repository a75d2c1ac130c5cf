"""Replays a recorded run with every party alone, each client and the server with only the messages that it received.

In a simulation, parties could share the module, the method's object and live tensors by mistake. Replayed parties share
none of them, as if each were a process of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowrank.compression import Codec, Packet
from lightning_lowrank.federated import FederatedLoop
from lightning_lowrank.federated.client_states import flatten_state, unflatten_state
from lightning_lowrank.federated.coordinator import Coordinator
from lightning_lowrank.federated.data.planner import RoundPlan
from lightning_lowrank.federated.exchange import Parts
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.site import SiteExchange
from lightning_lowrank.federated.state import ClientContext, ClientInfo, trained_tensors
from lightning_lowrank.internals.lightning import make_one_epoch
from lightning_lowrank.testing.experiment import Experiment
from lightning_lowrank.testing.require import require

__all__ = ["Tape", "replay_client", "replay_server"]


@dataclass
class Transfer:
    """A message as it crossed the wire: its encoding, the decoded tensors, and the message's own codec."""

    data: bytes
    received: dict[str, Tensor]
    codec: Codec | None = None

    @classmethod
    def of(cls, packet: Packet, codec: Codec | None = None) -> Transfer:
        """A copy of a packet in its present state."""
        received = {name: value.detach().clone() for name, value in packet.received.items()}
        return cls(packet.encode(), received, copy.deepcopy(codec))


@dataclass
class Tape:
    """All messages of a run.

    Args:
        plans: For each round, its plan and the number of clients that sat it out.
        down: The messages to clients, by round and client.
        up: The messages of clients, by round and client.
        heard: Encoded broadcasts to clients that sat a round out, by round.
    """

    plans: list[tuple[RoundPlan, int]] = field(default_factory=list)
    down: dict[tuple[int, int], Transfer] = field(default_factory=dict)
    up: dict[tuple[int, int], Transfer] = field(default_factory=dict)
    heard: dict[int, bytes] = field(default_factory=dict)

    def attach(self, loop: FederatedLoop) -> None:
        """Have a loop record its run."""
        loop.make_exchange = partial(_Recorder, self)


class _Recorder(Coordinator):
    def __init__(self, tape: Tape, parts: Parts) -> None:
        super().__init__(parts)
        self._tape = tape

    def begin_round(self, plan: RoundPlan, live: Mapping[str, Tensor], idle: int) -> None:
        self._tape.plans.append((plan, idle))
        super().begin_round(plan, live, idle)
        if self.broadcasts.reach_all:
            self._tape.heard[plan.round] = self.broadcasts.packet(self.any_client).encode()

    def send(self, client: ClientInfo) -> Message:
        self._tape.down[client.round, client.id] = Transfer.of(self.broadcasts.packet(client))
        return super().send(client)

    def pack(self, client: ClientContext, message: Message) -> Packet:
        packet = super().pack(client, message)
        self._tape.up[client.round, client.id] = Transfer.of(packet, message.codec)
        return packet


class _Site(SiteExchange):
    """A client that runs alone, with the broadcasts on the tape."""

    def __init__(self, tape: Tape, followed: set[int], parts: Parts) -> None:
        super().__init__(parts)
        self._tape = tape
        self._followed = followed
        self.sent: Transfer | None = None

    def begin_round(self, plan: RoundPlan, live: Mapping[str, Tensor], idle: int) -> None:
        super().begin_round(plan, live, idle)
        (client,) = plan.clients
        expected = self._tape.down[plan.round, client].received
        _require_same(self.received, expected, f"client {client} decodes a broadcast of round {plan.round}")

    def broadcasts(self, round_number: int) -> Iterator[bytes]:
        (client,) = self.server.cohort
        for number in range(round_number + 1):
            if number not in self._followed:
                self._followed.add(number)
                taped = self._tape.down.get((number, client))
                yield self._tape.heard.get(number, b"") if taped is None else taped.data

    def receive(self, client: ClientContext, packet: Packet) -> None:
        self.sent = Transfer.of(packet)


def replay_client(experiment: Experiment, tape: Tape, client: int, data: TensorDataset) -> None:
    """Train one client alone, with the messages that it was sent.

    The method's object is another one in each round, as in a process that has been started again.

    Raises:
        AssertionError: If the client sends other messages than on the tape.
    """
    module, followed = experiment.module(dtype=data.tensors[0].dtype), set[int]()
    loop = experiment.loop(participants=[[client]] * len(tape.plans))
    loop.make_exchange = partial(_Site, tape, followed)
    trainer, loader = experiment.trainer(loop), DataLoader(data, batch_size=4, shuffle=True)
    for plan, _ in tape.plans:
        if client not in plan.clients:
            continue
        loop.algorithm = experiment.make()
        make_one_epoch(trainer, plan.round)
        trainer.fit(module, loader)
        site = loop.exchange
        assert isinstance(site, _Site)
        assert site.sent is not None
        sent, expected = site.sent, tape.up[plan.round, client]
        where = f"client {client}, run on its own with nothing but its messages, sends in round {plan.round}"
        _require_same(sent.received, expected.received, where)
        lengths = f"{len(sent.data)}, {len(expected.data)}"
        require(sent.data == expected.data, f"{where} other bytes than in the simulation: {lengths}")
        site.states[client] = unflatten_state(*flatten_state(site.states[client]))


def replay_server(experiment: Experiment, tape: Tape, data: TensorDataset, expected: Mapping[str, Tensor]) -> None:
    """Run the server's half alone, with the messages that clients sent.

    Raises:
        AssertionError: If it sends other messages than on the tape, or ends with another model than ``expected``.
    """
    module, loop = experiment.module(dtype=data.tensors[0].dtype), experiment.loop()
    trainer = experiment.trainer(loop)
    # The fit makes no round: it only converts the module and sets up the method.
    make_one_epoch(trainer, -1)
    trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True))
    coordinator, live = loop.coordinator, trained_tensors(module)
    for plan, idle in tape.plans:
        coordinator.begin_round(plan, live, idle)
        for client in plan.clients:
            where = f"the server, run on its own with nothing but clients' messages, sends in round {plan.round}"
            packet, taped = coordinator.broadcasts.packet(coordinator.info(client)), tape.down[plan.round, client]
            _require_same(packet.received, taped.received, f"{where} to client {client}")
            require(packet.encode() == taped.data, f"{where} other bytes to client {client} than in the simulation")
        for client in plan.clients:
            info, taped = coordinator.info(client), tape.up[plan.round, client]
            received = tape.down[plan.round, client].received
            tensors = coordinator.wire.decode_up(coordinator.server.base, info, taped.data, received, taped.codec)
            _require_same(tensors, taped.received, f"the server decodes of client {client} in round {plan.round}")
            coordinator.receive_decoded(info, tensors)
        coordinator.aggregate()
        coordinator.show_global(live)
    _require_same(
        dict(module.state_dict()), expected, "the server, run on its own with nothing but clients' messages, ends with"
    )


def _require_same(values: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    names = f"the tensors {sorted(values)}, and in the simulation {sorted(expected)}"
    require(values.keys() == expected.keys(), f"{what} {names}")
    for name, value in values.items():
        same_form = value.dtype == expected[name].dtype and value.shape == expected[name].shape
        require(same_form, f"{what} {name!r} of another type or shape than in the simulation")
        require(
            torch.equal(value.cpu().nan_to_num(), expected[name].cpu().nan_to_num()),
            f"{what} {name!r} with other values than in the simulation. A client's half may use its ClientContext"
            " and the message alone, the server's half the Server and messages; attributes of the method carry no"
            " values between them, nor from one round to the next",
        )
