"""Real messages of every codec and method, changed in every way, before a real server's `Intake`.

The tests send it a few thousand; `tests/benchmarks/hostile.py` as many as one likes.
"""

from __future__ import annotations

import gc
import hashlib
import json
import random
import timeit
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch.utils.data import DataLoader

from lightning_lowrank.compression import (
    Chain,
    Channel,
    Codec,
    DecodingError,
    Dense,
    Half,
    LowRankCodec,
    Quantize,
    RandomK,
    Schema,
    Sign,
    Split,
    TopK,
)
from lightning_lowrank.federated.client_states import flatten_state
from lightning_lowrank.federated.state import trained_tensors
from lightning_lowrank.flower.intake import Expected, Intake, expect
from lightning_lowrank.flower.members import Members
from lightning_lowrank.flower.messages import pack, read_upload, unpack
from lightning_lowrank.internals.flower import bounded_arrays
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
    "factors": [LowRankCodec(2, error_feedback=True), Quantize(bits=4)],
    "factors of an energy": [LowRankCodec(energy=0.8), Half()],
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
        packets = {client: self.coordinator.broadcasts.packet(self.coordinator.info(client)) for client in plan.clients}
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


def named_targets(names: Sequence[str] = (), every: bool = False) -> Iterator[tuple[str, Callable[[], Target]]]:
    """Name servers of methods: each with exact messages, and one, or ``every`` method that can, with each codec."""
    for name in names or METHODS:
        form = METHODS[name].forms[0]
        for uplink in UPLINKS:
            if uplink == "exact" or (name not in OWN_CODECS and (every or name == "FedAvg")):
                yield f"{name} {form} {uplink}", partial(Target, name, form, uplink)


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
            (
                b"\xff" * width,
                b"\x00\x00\x80\x7f" * 2,
                b"\xff\xff\x7f\x7f" * 2,
                b"\x00\x00\xc0\x7f" * 2,
                b"\x80" * width,
            )
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
        refused = intake.accept({client: reply}, {client: target.expected[client]}, target.steps)
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
            if number % checked_each == 0:
                assert target.digest() == before, f"{target.name}: taking in cannot be undone"


RECIPE = {"recipe": "r", "layout": "l", "frozen": [1.0, 2.0]}


def join(**changes: Any) -> RecordDict:
    """Return what a site of three answers when it is asked to join."""
    secret = f"secret of {changes.get('client')}"
    honest = {"client": 0, "clients": 3, "samples": 5, "batches": 1, "last_broadcast": -1, "rank": 0, "secret": secret}
    honest.update(classes="", features="")
    return pack({**honest, **RECIPE, **changes})


ODD = (
    None,
    "",
    "0",
    "x" * 9999,
    0,
    1,
    2,
    3,
    -1,
    2**31,
    2**62,
    10**6,
    True,
    0.5,
    1e300,
    b"\xff",
    [],
    [1.0],
    [1, 2],
    ["x"],
)


def fuzz_joins(count: int, draws: random.Random, tally: Tally) -> None:
    """Have a hostile node join with changed answers, before and after two honest ones have, and the run has begun.

    Raises:
        AssertionError: If an honest site's place has changed, or the server keeps more than a place for each client.
        Exception: What escapes.
    """
    for number in range(count):
        stage = number * 4 // count
        if number == 0 or stage != (number - 1) * 4 // count:
            # Nobody is there; the others have joined; they have, and the recipe tells the number; the run has begun.
            members = Members(RECIPE, clients=3 if stage == 2 else None)
            for client in (1, 2) if stage else ():
                members.admit(client, unpack(answer(join(client=client)))[0])
            if stage == 3:
                members.admit(3, unpack(answer(join()))[0])
                members.begin(3)
        names = [
            "client",
            "clients",
            "samples",
            "batches",
            "last_broadcast",
            "rank",
            "secret",
            "classes",
            "features",
            "recipe",
            "layout",
            "frozen",
            "more",
        ]
        changes = {name: draws.choice(ODD) for name in draws.sample(names, draws.choice((0, 1, 1, 1, 2, 3)))}
        client = draws.choice((0, 0, 1, 2, draws.randrange(1000)))
        content = answer(odd_content(b"x", draws))
        # What a message cannot hold, a site cannot send.
        with suppress(TypeError, ValueError):
            own = {"client": client, "clients": draws.choice((3, 3, 1000)), "secret": "of the hostile one"}
            content = answer(join(**{**own, **changes}))
        tally.messages += 1
        try:
            members.admit(draws.choice((7, 7, 8)), unpack(content)[0])
            tally.taken += 1
        except DecodingError as error:
            tally.refused[" ".join(str(error).split()[:3])] += 1
        if stage:
            assert (members.connected[1], members.connected[2]) == (1, 2)
        assert len(members.last_broadcast) <= 5
        assert len(members.state_dict()["owners"]) <= 5


def forged(parts: Mapping[str, bytes], header: str | None = None) -> bytes:
    """Return a safetensors file of rows of bytes, or with a header of one's own."""
    if header is None:
        entries, start = {}, 0
        for name, part in parts.items():
            entries[name] = {"dtype": "U8", "shape": [len(part)], "data_offsets": [start, start + len(part)]}
            start += len(part)
        header = json.dumps(entries)
    return len(header.encode()).to_bytes(8, "little") + header.encode() + b"".join(parts.values())


def with_body(content: bytes, body: bytes) -> bytes:
    """Return an object that Flower has written, with another body."""
    head, _, _ = content.partition(b"\x00")
    return head.rpartition(b" ")[0] + b" %d\x00" % len(body) + body


def repeated(array: Array, times: int) -> tuple[bytes, dict[str, Any]]:
    """Return what Flower sends for an array, and its chunks, of which the first is named so many times."""
    content = array.deflate()
    said = json.loads(content.partition(b"\x00")[2])
    return with_body(content, json.dumps({**said, "arraychunk_ids": [0] * times}).encode()), dict(array.children)


def entry(shape: str, dtype: str = "F32", end: int = 0) -> str:
    """Return what a safetensors header says of a tensor."""
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{end}]}}'


NUMBERS = 2_000_000
EXPECTED = Schema.of({"weight": torch.empty(NUMBERS, device="meta"), "bias": torch.empty(8, device="meta")})


@lru_cache
def bombs() -> dict[str, Callable[[], str]]:
    """Return messages that are made to take time or memory, each as a function that returns why it was refused.

    The server expects a tensor of two million numbers and one of eight.
    """

    def refused(read: Callable[[], Any], kind: type[ValueError] = DecodingError) -> Callable[[], str]:
        def reason() -> str:
            with pytest.raises(kind) as raised:
                read()
            return str(raised.value)

        return reason

    def decoded(codec: Codec | None, data: bytes) -> Callable[[], str]:
        channel = Channel([codec] if codec else [])
        return refused(lambda: read_upload(data, EXPECTED, lambda data, schema: channel.receive(data, schema=schema)))

    def joined(**changes: Any) -> Callable[[], str]:
        message, members = answer(join(**changes)), Members(RECIPE)
        return refused(lambda: members.admit(1, unpack(message)[0]))

    def payloads(count: int) -> Callable[[], str]:
        arrays = {f"{number:x}": Array("uint8", (1,), "lightning_lowrank", b"x") for number in range(count)}
        message = answer(RecordDict({"fields": ConfigRecord({"round": 0}), "payloads": ArrayRecord(arrays)}))
        return refused(lambda: unpack(message))

    def joined_chunks(times: int) -> Callable[[], str]:
        content, chunks = repeated(Array("uint8", (10**6,), "lightning_lowrank", bytes(10**6)), times)

        def read() -> None:
            with bounded_arrays(10**6):
                Array.inflate(content, dict(chunks))

        return refused(read, ValueError)

    def claim(shape: str, kind: str = "float32", **parts: bytes) -> bytes:
        text = f'{{"{kind}":{{"weight":{shape},"bias":[8]}}}}'
        return forged({"layout": text.encode(), **parts})

    def header(*entries: str) -> bytes:
        return forged({}, f"{{{','.join(entries)}}}")

    def tensor(shape: str) -> str:
        return f'"weight":{entry(shape)}'

    return {
        "65 dimensions": decoded(None, header(tensor(str([1] * 65)))),
        "65 dimensions in a layout": decoded(Half(), claim(str([1] * 65), values=bytes(4))),
        "2**40 numbers": decoded(None, header(tensor("[1099511627776]"))),
        "2**40 numbers in a layout": decoded(Half(), claim("[1099511627776]")),
        "five times the numbers": decoded(None, header(tensor("[9999999]"))),
        "five times the numbers in halves": decoded(Half(), claim("[9999999]", values=bytes(7_000_000))),
        "five times the random numbers": decoded(RandomK(0.5), claim("[9999999]", values=bytes(7_000_000))),
        "five times the largest numbers": decoded(TopK(0.5), claim("[9999999]", values=bytes(7_000_000))),
        "five times the signs": decoded(Sign(), claim("[9999999]", signs=bytes(400_000))),
        "no length of the header": decoded(None, b"\xff" * 5000),
        "100,000 tensors": decoded(None, header(*(f'"{number}":{entry("[0]")}' for number in range(100_000)))),
        "a deep header": decoded(None, forged({}, "[" * 4000)),
        "a header that is just as deep": decoded(None, forged({}, "[" * 300)),
        "a deep layout": decoded(Half(), forged({"layout": b'{"a":' * 60})),
        "a layout of other places": decoded(
            Half(), forged({}, '{"layout":{"dtype":"U8","shape":[9],"data_offsets":[0,8000000]}}') + bytes(8_000_000)
        ),
        "places of other types": decoded(Half(), forged({}, '{"layout":{"dtype":"U8","shape":[9],"data_offsets":9}}')),
        "a number of 4,000 digits": decoded(None, header(tensor(f"[{'9' * 4000}]"))),
        "a number of 200 digits": decoded(None, header(tensor(f"[{'9' * 200}]"))),
        "a number of 4,301 digits": decoded(Half(), claim(f"[{'9' * 4301}]")),
        "a name of a megabyte": decoded(None, header(f'"{"x" * 2**20}":{entry("[0]")}')),
        "40 dimensions of 2": decoded(Half(), claim(str([2] * 40))),
        "more bytes than twice": decoded(RandomK(0.001), bytes(8_000_000)),
        "200 million at random": decoded(RandomK(0.001), claim("[200000000]", seed=bytes(8), values=bytes(7_000))),
        "a count of 2**26": decoded(TopK(count=100), claim("[67108864]", values=bytes(400))),
        "levels of none": decoded(Quantize(bits=4), claim("[999999999999]", levels=bytes(8))),
        "a part of 2**62": decoded(Split(["bias"], Dense(), Half()), (2**62).to_bytes(8, "little") + bytes(90)),
        "10,000 payloads": payloads(10_000),
        "a chunk 10,000 times": joined_chunks(10_000),
        "2**33 clients": joined(clients=2**33),
        "a client of 2**62": joined(client=2**62, clients=2**62 + 1),
        "samples in words": joined(samples="many"),
        "no samples, but batches": joined(samples=0),
        "negative samples": joined(samples=-5),
        "norms in words": joined(frozen=["one"]),
        "a million norms": joined(frozen=[1.0] * 1_000_000),
        "a rank of 2**62": joined(rank=2**62),
        "a negative rank": joined(rank=-1),
        "a secret of a megabyte": joined(secret="s" * 2**20),
        "a client in words": joined(client="0"),
        "true clients": joined(clients=True),
    }


def peak(run: Callable[[], Any]) -> tuple[float, int, int]:
    """Return the least seconds of five calls, the bytes that Python allocates, and by how much the process grows."""

    def status(name: str) -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024

    run()
    gc.collect()
    seconds = min(timeit.repeat(run, number=1, repeat=5))
    grown = 0
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        run()
        grown = status("VmHWM") - before
    return seconds, allocated(run), grown


def allocated(run: Callable[[], Any]) -> int:
    """Return the most bytes that Python holds for a call at one time."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
