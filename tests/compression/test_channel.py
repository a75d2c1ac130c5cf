"""Channels: differences, error feedback, exact tensors and messages with a codec of their own."""

import math

import pytest
import torch

from lightning_lowrank.compression import (
    Chain,
    Channel,
    Codec,
    DecodingError,
    Dense,
    Half,
    LowRankCodec,
    Mask,
    Quantize,
    RandomK,
    Sign,
    Split,
    TopK,
)
from lightning_lowrank.compression.channel import Outgoing
from tests.grids import pairwise
from tests.helpers import draw

MESSAGE = {
    "weight": draw(6, 5),
    "half": draw(9, seed=1).half(),
    "brain": draw(4, seed=2).bfloat16(),
    "double": draw(5, seed=3).double(),
    "empty": torch.zeros(0, 3),
    "mean": draw(5, seed=4),
    "steps": torch.tensor(3),
    "new": draw(3, seed=5),
}
REFERENCE = {name: (value * 0.9).to(value.dtype) for name, value in MESSAGE.items() if name != "new"}
CHANNELS = {
    "dense": [],
    "explicitly dense": [Dense()],
    "half": [Half()],
    "top half": [TopK(0.3), Half()],
    "top half feedback": [TopK(0.3, error_feedback=True), Half()],
    "sign feedback": [Sign(error_feedback=True)],
    "random feedback": [RandomK(0.3, error_feedback=True), Quantize(4)],
    "quantize": [Quantize()],
    "quantize feedback": [Quantize(4, error_feedback=True)],
    "half feedback": [Half("bfloat16", error_feedback=True)],
    "factors feedback": [LowRankCodec(2, error_feedback=True), Quantize(4)],
    "split": [Split(["weight"], Half(), Quantize())],
}
every_channel = pytest.mark.parametrize("codecs", CHANNELS.values(), ids=CHANNELS)


def assert_same(one, other):
    assert list(one) == list(other)
    for name in one:
        assert one[name].dtype == other[name].dtype
        assert torch.equal(one[name], other[name]), name


@pairwise()
@every_channel
@pytest.mark.parametrize("exact", [(), ("mean", "absent")])
@pytest.mark.parametrize("reference", [None, REFERENCE])
def test_the_other_side_holds_what_the_packet_says(codecs, exact, reference):
    channel, residual = Channel(codecs), None
    for seed in range(3):
        packet = channel.send(MESSAGE, reference=reference, exact=exact, seed=seed, residual=residual)
        residual = packet.residual
        data = packet.encode()
        assert packet.nbytes == len(data) == channel.nbytes(MESSAGE, exact=exact)
        meta = {name: torch.empty_like(value, device="meta") for name, value in MESSAGE.items()}
        assert channel.nbytes(meta, exact=exact) == len(data)
        assert list(packet.received) == list(MESSAGE)
        received = channel.receive(data, reference=reference, exact=exact)
        assert_same({name: received[name] for name in MESSAGE}, packet.received)
        for name in (*exact[:1], "steps", "empty"):
            assert torch.equal(packet.received[name], MESSAGE[name])
        floating = {name for name, value in MESSAGE.items() if value.is_floating_point()} - set(exact)
        assert packet.residual.keys() == (floating if channel.error_feedback else set())


def test_a_channel_without_codecs_is_the_dense_encoding():
    packet = Channel().send(MESSAGE, reference=REFERENCE, exact=["mean"], seed=0)
    assert packet.encode() == Dense().encode(MESSAGE)
    assert_same(packet.received, MESSAGE)
    assert packet.residual == {}


@every_channel
def test_an_empty_message_takes_no_bytes(codecs):
    channel = Channel(codecs)
    packet = channel.send({}, reference=REFERENCE, exact=["mean"], seed=0)
    assert (packet.encode(), packet.nbytes, packet.received, packet.residual) == (b"", 0, {}, {})
    assert channel.receive(b"", reference=REFERENCE) == {}
    assert channel.nbytes({}) == 0


def test_differences_are_taken_where_both_sides_know_the_same_tensor():
    message = {
        "a": torch.tensor([1.0, 5.0]),
        "b": torch.tensor([2.0]),
        "c": torch.tensor([3.0]),
        "d": torch.tensor([4.0]),
    }
    reference = {
        "a": torch.tensor([0.5, 1.0]),
        "b": torch.tensor([2.0, 2.0]),
        "d": torch.tensor([1.0]),
        "e": torch.ones(1),
    }
    packet = Channel([Half()]).send(message, reference=reference, exact=["d"], seed=0)
    assert {name: value.tolist() for name, value in packet.tensors.items()} == {
        "a": [0.5, 4.0],
        "b": [2.0],
        "c": [3.0],
        "d": [4.0],
    }
    assert_same(packet.received, message)


def test_top_k_sends_the_largest_differences():
    message, reference = {"a": torch.tensor([10.0, 2.0, 0.0])}, {"a": torch.tensor([10.5, 0.0, 0.0])}
    packet = Channel([TopK(count=1)]).send(message, reference=reference, seed=0)
    assert packet.received["a"].tolist() == [10.5, 2.0, 0.0]


def test_differences_of_sixteen_bits_are_taken_in_float32():
    message, reference = {"a": torch.tensor([60_000.0]).half()}, {"a": torch.tensor([-5_000.0]).half()}
    packet = Channel([Half()]).send(message, reference=reference, seed=0)
    assert packet.tensors["a"].dtype == torch.float16
    assert packet.received["a"].tolist() == [60_000.0]
    residual = (
        Channel([TopK(count=1, error_feedback=True)])
        .send({"a": torch.tensor([1.0, 4.0]).half()}, reference={"a": torch.tensor([2.0**-14, 0.0]).half()}, seed=0)
        .residual["a"]
    )
    assert (residual.dtype, residual.tolist()) == (torch.float32, [1 - 2.0**-14, 0.0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "codecs",
    [
        [TopK(0.2, error_feedback=True)],
        [RandomK(0.2, error_feedback=True)],
        [Sign(error_feedback=True)],
        [Quantize(4, error_feedback=True)],
        [Quantize(4, 40, "l2", error_feedback=True)],
        [TopK(0.2, error_feedback=True), Quantize(8), Half("bfloat16")],
    ],
)
def test_with_error_feedback_nothing_is_lost_for_good(codecs, dtype):
    channel, residual, total = Channel(codecs), None, torch.zeros(50, dtype=torch.float64)
    updates = [(draw(50, seed=step) + 0.5).to(dtype) for step in range(60)]
    largest = 0.0
    for step, update in enumerate(updates):
        packet = channel.send({"a": update}, seed=step, residual=residual)
        residual, total = packet.residual, total + packet.received["a"].double()
        largest = max(largest, float(residual["a"].abs().max()))
    # The formula, added up: what was received and the last residual are what was sent.
    sent = sum(update.double() for update in updates)
    assert torch.allclose(total + residual["a"].double(), sent, atol=1e-4)
    assert largest < 60


@pytest.mark.parametrize("codec", [Sign(error_feedback=True), LowRankCodec(1, error_feedback=True)])
def test_with_error_feedback_the_sum_with_a_reference_of_sixteen_bits_loses_nothing(codec):
    # The diagonal moves by the spacing of bfloat16 in each round, and what the codecs send is a small part of it.
    reference = torch.ones(8, 8).bfloat16()
    message = (reference + 2.0**-7 * torch.eye(8)).bfloat16()
    packet, total = None, torch.zeros(8, 8)
    for step in range(100):
        kept = {} if packet is None else {"residual": packet.residual, "memory": packet.memory}
        packet = Channel([codec]).send({"a": message}, reference={"a": reference}, seed=step, **kept)
        total += packet.received["a"].float() - reference.float()
    assert torch.equal(total + packet.residual["a"], 100 * (message.float() - reference.float()))


def test_error_feedback_is_that_of_the_whole_chain():
    channel = Channel([TopK(count=1, error_feedback=True), Half()])
    first = channel.send({"a": torch.tensor([1.0, 1 / 3, 0.2])}, seed=0)
    assert first.received["a"].tolist() == [1.0, 0.0, 0.0]
    second = channel.send({"a": torch.tensor([0.0, 1 / 3, 0.0])}, seed=1, residual=first.residual)
    rounded = torch.tensor(2 / 3).half().float()
    assert second.received["a"].tolist() == [0.0, rounded.item(), 0.0]
    assert torch.allclose(second.residual["a"], torch.tensor([0.0, 2 / 3, 0.2]) - torch.tensor([0.0, rounded, 0.0]))
    assert second.residual["a"][1] != 0


def test_residuals_are_kept_for_tensors_that_a_message_does_not_have():
    channel = Channel([TopK(count=1, error_feedback=True)])
    first = channel.send({"a": torch.tensor([1.0, 2.0])}, seed=0)
    second = channel.send({"b": torch.tensor([3.0, 4.0])}, seed=1, residual=first.residual)
    assert {name: value.tolist() for name, value in second.residual.items()} == {"a": [1.0, 0.0], "b": [3.0, 0.0]}
    third = channel.send({"a": torch.tensor([1.0, 2.0, 3.0])}, seed=2, residual=second.residual)
    assert third.residual["a"].tolist() == [1.0, 2.0, 0.0]
    # Nothing that was given is changed.
    assert first.residual["a"].tolist() == [1.0, 0.0]


def test_what_is_not_finite_is_received_once_and_leaves_no_residual():
    channel = Channel([Half(error_feedback=True)])
    packet = channel.send({"a": torch.tensor([1e6, math.nan, -math.inf, 1.0])}, seed=0)
    assert not packet.received["a"][:3].isfinite().any()
    assert packet.residual["a"].tolist() == [0.0] * 4


def test_only_finite_tensors_with_feedback_are_known_to_be_finite():
    """Numbers that the codec does not send, or overflows, count as well; those of exact tensors are not looked at."""
    rows = {"fine": [1.0, 2.0], "nan": [math.nan, 9.0], "infinite": [9.0, -math.inf], "large": [1e6, 1.0]}
    message = {name: torch.tensor(row) for name, row in rows.items()} | {"exact": torch.ones(2)}
    for codecs, expected in (
        ([RandomK(0.4, error_feedback=True)], {"fine", "large"}),
        ([TopK(1.0, error_feedback=True), Half()], {"fine"}),
        ([Half()], set()),
    ):
        packet = Channel(codecs).send(message, exact=["exact"], seed=3)
        assert set(packet.finite) == expected


@pytest.mark.parametrize("codec", [TopK(0.3), LowRankCodec(energy=0.9)], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("rows", [6, 9])
def test_equal_layouts_of_senders_together_are_measured_once(monkeypatch, codec, rows):
    calls, nbytes = [], type(codec).nbytes
    monkeypatch.setattr(type(codec), "nbytes", lambda *arguments: (calls.append(1), nbytes(*arguments))[1])
    messages = [Outgoing({"weight": draw(each, 5, seed=seed)}, seed) for seed, each in enumerate([6, 6, rows])]
    packets = Channel([codec]).send_together(messages)
    assert [packet.nbytes for packet in packets] == [len(packet.encode()) for packet in packets]
    assert len(calls) == (3 if codec.adaptive or rows == 9 else 1)


def test_the_seed_of_the_message_is_drawn_from():
    channel = Channel([RandomK(0.5), Quantize(4)])
    data = [channel.send(MESSAGE, seed=seed).encode() for seed in (1, 1, 2)]
    assert data[0] == data[1] != data[2]
    assert data[0] == Chain([RandomK(0.5), Quantize(4)]).seeded(1).encode(MESSAGE)


OWN = {
    "random": RandomK(0.4, seed=11, unbiased=True),
    "mask": Mask({"weight": draw(6, 5) > 0}, known=True),
    "split": Split(["mean"], Dense(), TopK(0.3)),
    "dense": Dense(),
}


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
def test_a_message_with_a_codec_of_its_own(own):
    packet = Channel().send(MESSAGE, reference=REFERENCE, exact=["mean"], seed=3, message_codec=own)
    assert packet.encode() == own.encode(MESSAGE)
    assert_same(packet.received, own.transmit(MESSAGE))
    channel = Channel([Quantize(8), Half()])
    packet = channel.send(MESSAGE, reference=REFERENCE, exact=["mean"], seed=3, message_codec=own)
    data = packet.encode()
    assert packet.nbytes == len(data) == channel.nbytes(MESSAGE, exact=["mean"], message_codec=own)
    received = channel.receive(data, reference=REFERENCE, exact=["mean"], message_codec=own)
    assert_same({name: received[name] for name in MESSAGE}, packet.received)
    assert torch.equal(received["mean"], MESSAGE["mean"])
    # The positions are the codec's own, whatever the message's seed.
    first = own.transmit({name: value for name, value in MESSAGE.items() if name != "mean"})
    zeros = {name: first[name] == 0 for name in ("weight", "half", "double")}
    assert all((received[name][zero] == 0).all() for name, zero in zeros.items())
    if isinstance(own, Dense):
        assert_same(packet.received, MESSAGE)


class Plain(Codec):
    """A codec that leaves no floating-point values to another one."""

    def encode(self, tensors):
        return Dense().encode(tensors)

    def decode(self, data):
        return Dense().decode(data)


def test_a_plain_codec_may_stand_alone():
    channel = Channel([Plain()])
    packet = channel.send(MESSAGE, reference=REFERENCE, exact=["mean"], seed=0)
    assert packet.nbytes == len(packet.encode()) == channel.nbytes(MESSAGE, exact=["mean"])
    with pytest.raises(TypeError, match="FloatingCodec"):
        channel.send(MESSAGE, seed=0, message_codec=TopK(0.1))
    with pytest.raises(TypeError, match="FloatingCodec"):
        Channel([Half()]).send(MESSAGE, seed=0, message_codec=Plain())


class Doubles(Plain):
    """A codec of a user's own with which error feedback would diverge."""

    error_feedback = True
    expands = "Doubles doubles; use Plain"


EXPANDING = {
    "alone": lambda: RandomK(0.3, unbiased=True, error_feedback=True),
    "in a chain": lambda: Chain([TopK(0.1, error_feedback=True), Half(), RandomK(0.3, unbiased=True)]),
    "in a channel": lambda: Channel([TopK(0.1, error_feedback=True), Quantize(4, norm="l2")]),
    "beside it": lambda: Split(["weight"], TopK(0.1, error_feedback=True), Quantize(4, None, "l2")),
    "in a split": lambda: Channel(
        [Split(["weight"], Chain([TopK(0.1, error_feedback=True)]), Chain([Half(), RandomK(0.3, unbiased=True)]))]
    ),
    "of one's own": lambda: Channel([Doubles()]),
}


@pytest.mark.parametrize("build", EXPANDING.values(), ids=EXPANDING)
def test_error_feedback_around_a_codec_that_expands_is_refused(build):
    with pytest.raises(ValueError, match="error_feedback=True"):
        build()


@pytest.mark.parametrize("codec", [RandomK(0.3), Quantize(4), Quantize(4, 48, "l2")])
def test_other_codecs_may_follow_one_with_error_feedback(codec):
    assert Channel([TopK(0.1, error_feedback=True), codec]).error_feedback


def test_what_cannot_be_a_channel_is_refused():
    with pytest.raises(TypeError, match=r"codecs.*0\.1"):
        Channel(["half"])
    with pytest.raises(TypeError, match="FloatingCodec"):
        Channel([Half(), Plain()])
    with pytest.raises(ValueError, match="error_feedback=True"):
        Channel([TopK(0.1), Half(error_feedback=True)])
    channel = Channel([TopK(0.1, error_feedback=True)])
    with pytest.raises(ValueError, match=r"RandomK.*TopK.*error_feedback=True"):
        channel.send(MESSAGE, seed=0, message_codec=RandomK(0.1))


@every_channel
def test_bytes_that_are_no_message_are_refused(codecs):
    channel = Channel(codecs)
    data = channel.send(MESSAGE, exact=["mean"], seed=0).encode()
    for length in range(1, len(data), 11):
        with pytest.raises(DecodingError):
            channel.receive(data[:length], reference=REFERENCE, exact=["mean"])
