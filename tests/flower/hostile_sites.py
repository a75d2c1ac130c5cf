"""Real messages of every codec and method, changed in every way, before a real server's `Intake`.

The tests send it a few thousand; `tests/benchmarks/hostile.py` as many as one likes.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_lowrank.compression import Chain, Codec, Half, Quantize, RandomK, Sign, TopK
from lightning_lowrank.federated.offload import flatten_state
from lightning_lowrank.federated.state import trained_tensors
from lightning_lowrank.flower.intake import Expected, Intake, expect
from lightning_lowrank.flower.messages import pack
from lightning_lowrank.internals.lightning import make_one_epoch
from lightning_lowrank.testing.experiment import Experiment, blobs, quiet
from lightning_lowrank.testing.sites import Tape
from tests.algorithms.methods import LOW_RANK, METHODS
from tests.algorithms.test_contract import module as contract_module

UPLINKS: dict[str, list[Codec]] = {
    "exact": [],
    "half": [Half()],
    "top": [TopK(0.3, error_feedback=True), Half()],
    "top count": [TopK(count=9)],
    "random": [RandomK(0.3)],
    "sign": [Sign(error_feedback=True)],
    "quantize": [Quantize(bits=4)],
    "chain": [Chain([TopK(0.5), Quantize(bits=8)])],
}
# By `check_algorithm`, methods with codecs of their own take no lossy uplink.
OWN_CODECS = {"EF21P", "FedBAT", "GradientMask", "RandomCoordinates", "RandomMask", "SlidingWindowMask"}


class Target:
    """A server in the middle of a round, and what its sites would send it."""

    def __init__(self, name: str, form: str, uplink: str = "exact") -> None:
        method, tape = METHODS[name], Tape()
        self.name = f"{name} {form} {uplink}"
        settings: dict[str, Any] = {**method.settings, "uplink": UPLINKS[uplink]}
        settings.pop("execution", None)
        experiment = Experiment(method.make, partial(contract_module, method), LOW_RANK[form], settings)
        data = blobs(28)
        with quiet():
            recorded = experiment.loop()
            tape.attach(recorded)
            experiment.run(recorded, max_epochs=1)
            module, loop = experiment.module(), experiment.loop()
            trainer = experiment.trainer(loop)
            make_one_epoch(trainer, -1)
            trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True))
        self.coordinator = loop.coordinator
        plan, idle = tape.plans[0]
        live = trained_tensors(module)
        self.coordinator.begin_round(plan, live, idle)
        self.clients = plan.clients
        packets = {client: self.coordinator.broadcast(self.coordinator.info(client)) for client in plan.clients}
        self.expected: dict[int, Expected] = expect(self.coordinator, packets, live)
        self.uploads = {client: tape.up[0, client].data for client in plan.clients}
        self.steps = [1] * len(self.coordinator.samples)
        self._fresh = self.coordinator.checkpoint()

    def intake(self) -> Intake:
        """Return an intake at the beginning of the round."""
        self._fresh()
        self._fresh = self.coordinator.checkpoint()
        server = self.coordinator.server
        server.aggregator = server.aggregator.fresh()
        intake = Intake(self.coordinator)
        intake.begin_round()
        return intake

    def reply(self, client: int, data: bytes) -> Message:
        """Return an honest answer with these bytes."""
        return answer(pack({"round": 0}, {0: data} if data else None))

    def digest(self) -> str:
        """Return a digest of all that a refused message must leave as it was."""
        server, found = self.coordinator.server, hashlib.sha256()
        state = {"model": server.model, "state": server.state, "base": server.base.state}
        description, tensors = flatten_state({**state, "aggregator": server.aggregator.state_dict()})
        found.update(json.dumps(description).encode())
        for tensor in [*tensors, *server.base.module.parameters()]:
            found.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def answer(content: RecordDict) -> Message:
    """Return a message of a site's."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    return Message(content, dst_node_id=1, message_type="train.round")


def targets(names: Sequence[str] = (), every: bool = False) -> Iterator[Target]:
    """Make servers of methods: each with exact messages, and one, or ``every`` method that can, with each codec."""
    for name in names or METHODS:
        form = METHODS[name].forms[0]
        for uplink in UPLINKS:
            if uplink == "exact" or (name not in OWN_CODECS and (every or name == "FedAvg")):
                yield Target(name, form, uplink)


def changed(data: bytes, draws: random.Random) -> bytes:
    """Return the bytes of a message, changed in one of many ways."""
    kind = draws.randrange(10)
    cut = draws.randrange(len(data) + 1)
    header = min(int.from_bytes(data[:8], "little"), len(data) - 8) if len(data) > 8 else 0
    if kind == 0:
        return data[:cut]
    if kind == 1:
        return data[:cut] + draws.randbytes(draws.choice((1, 8, 100))) + data[cut:]
    if kind == 2:
        return draws.randbytes(draws.randrange(200))
    new = bytearray(data)
    if not new:
        return draws.randbytes(9)
    if kind in (3, 4):
        for _ in range(draws.choice((1, 2, 8, 64))):
            new[draws.randrange(len(new))] ^= 1 << draws.randrange(8)
    elif kind in (5, 6) and header > 0:
        # Inside the header: letters that JSON knows.
        for _ in range(draws.choice((1, 1, 2, 5))):
            new[8 + draws.randrange(header)] = draws.choice(b'0123456789"{}[],:-eE.\\u')
    elif kind == 7:
        # A number in the header becomes another one.
        places = [place for place in range(8, 8 + header) if 48 <= new[place] < 58]
        if places:
            place = draws.choice(places)
            text = draws.choice((b"0", b"-1", b"9" * 18, b"1e9", b"4294967296", b"null", b'""', b"[]", b"1,1"))
            new[place : place + 1] = text
            if draws.random() < 0.7:
                new[:8] = (int.from_bytes(data[:8], "little") + len(text) - 1).to_bytes(8, "little")
    elif kind == 8:
        new[:8] = draws.choice((0, 1, 2**31, 2**63, 2**64 - 1, len(data), draws.randrange(2 * len(data)))).to_bytes(
            8, "little"
        )
    else:
        # Numbers of any size: the last bytes are some tensor's.
        width = draws.choice((4, 8))
        place = draws.randrange(8 + header, len(new) + 1) if 8 + header <= len(new) else 0
        new[place : place + width] = draws.choice(
            (b"\xff" * width, b"\x00\x00\x80\x7f" * 2, b"\xff\xff\x7f\x7f" * 2, b"\x00\x00\xc0\x7f" * 2, b"\x80" * width)
        )[: len(new[place : place + width])]
    return bytes(new)


def odd_content(data: bytes, draws: random.Random) -> RecordDict:
    """Return a message whose records are not those of an answer."""
    value = draws.choice((None, "0", 0.0, True, -1, 2**62, [], [0], b"", "x" * 1000))
    fields = ConfigRecord({} if value is None else {"round": value})  # type: ignore[dict-item]
    name = draws.choice(("0", "00", "1", "-1", "x", "²", "9" * 30, ""))
    stype = draws.choice(("lightning_lowrank", "numpy", ""))
    arrays = ArrayRecord({name: Array("uint8", draws.choice(((len(data),), (2**62,), ())), stype, data)})
    return draws.choice(
        (
            RecordDict(),
            RecordDict({"fields": fields}),
            RecordDict({"fields": fields, "payloads": arrays}),
            RecordDict({"fields": arrays, "payloads": fields}),
            RecordDict({"fields": ConfigRecord({"round": 0}), "payloads": arrays}),
            RecordDict({"fields": ConfigRecord({"round": 0}), "payloads": arrays, "more": arrays}),
        )
    )


@dataclass
class Tally:
    """What came of messages: how many were refused, by the beginning of the reason, and how many taken."""

    messages: int = 0
    taken: int = 0
    refused: Counter[str] = field(default_factory=Counter)


def fuzz(target: Target, count: int, draws: random.Random, tally: Tally, checked_each: int = 1) -> None:
    """Send a server changed messages.

    Raises:
        AssertionError: If a refused message has changed the server.
        Exception: What escapes.
    """
    intake = target.intake()
    before = target.digest()
    for number in range(count):
        client = draws.choice(target.clients)
        data = target.uploads[client]
        if draws.random() < 0.05:
            reply = answer(odd_content(data, draws))
        else:
            reply = target.reply(client, changed(data, draws))
        refused = intake.take({client: reply}, {client: target.expected[client]}, target.steps)
        tally.messages += 1
        if refused:
            (reason,) = refused.values()
            assert len(reason) < 400
            assert reason.isprintable()
            tally.refused[" ".join(reason.split()[:3])] += 1
            if number % checked_each == 0:
                assert target.digest() == before, f"{target.name}: {reason}"
        else:
            tally.taken += 1
        if not refused or number % 100 == 99:
            intake = target.intake()
            assert target.digest() == before, f"{target.name}: taking in cannot be undone"
