"""`LowRankCodec` against PowerSGD and the truncated decomposition, written with NumPy."""

import json
import math
import random

import numpy as np
import pytest
import torch

from lightning_lowrank.compression import (
    Chain,
    Channel,
    DecodingError,
    Half,
    LowRankCodec,
    Quantize,
    Schema,
    Split,
    low_rank,
)
from lightning_lowrank.compression.low_rank import MOST_NUMBERS_OF_A_MATRIX
from lightning_lowrank.seeding import generator
from lightning_lowrank.testing import check_codec
from tests.helpers import draw

MESSAGE = {"conv": draw(6, 4, 3, 3), "linear": draw(30, 20, seed=1), "bias": draw(20, seed=2), "steps": torch.tensor(3)}


def as_matrix(weight):
    """A kernel's height stands with the output channels, its width with the input channels."""
    return weight.transpose(0, 2, 1, 3).reshape(weight.shape[0] * weight.shape[2], -1) if weight.ndim == 4 else weight


def orthonormal(columns):
    """Gram and Schmidt's columns, one after another."""
    found = []
    for column in columns.T:
        for _ in range(2):
            column = column - sum((earlier @ column) * earlier for earlier in found)
        found.append(column / np.sqrt(column @ column))
    return np.stack(found, axis=1)


@pytest.mark.parametrize("shape", [(30, 20), (8, 4, 5, 3)])
def test_it_is_powersgd_with_error_feedback_over_five_rounds(shape):
    channel, rank, packet = Channel([LowRankCodec(3, error_feedback=True)]), 3, None
    lost, right = 0.0, None
    for number in range(5):
        change = draw(*shape, seed=number).double()
        memory, residual = (packet.memory, packet.residual) if packet else (None, None)
        packet = channel.send({"weight": change}, seed=number + 7, residual=residual, memory=memory)
        matrix = as_matrix(change.numpy()) + lost
        if right is None:
            right = torch.randn(rank, matrix.shape[1], generator=generator(7, "low-rank", "weight")).double().numpy().T
        left = orthonormal(matrix @ right)
        right = matrix.T @ left
        lost = matrix - left @ right.T
        assert np.abs(as_matrix(packet.received["weight"].numpy()) - left @ right.T).max() < 1e-6
        assert np.abs(as_matrix(packet.residual["weight"].numpy()) - lost).max() < 1e-6
        assert torch.equal(channel.receive(packet.encode())["weight"], packet.received["weight"])
        assert packet.memory["weight"].shape == (rank, matrix.shape[1])


@pytest.mark.parametrize("rank", [1, 3, 7, 11])
@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (8, 6, 5, 5)])
def test_what_the_decomposition_loses_is_the_tail_of_the_singular_values(shape, rank):
    weight = draw(*shape).double()
    received = LowRankCodec(rank, method="svd").transmit({"a": weight})["a"]
    values = np.linalg.svd(as_matrix(weight.numpy()), compute_uv=False)
    assert math.isclose(float((weight - received).square().sum()), (values[rank:] ** 2).sum(), rel_tol=1e-9)
    assert np.linalg.matrix_rank(as_matrix(received.numpy())) == rank


@pytest.mark.parametrize("energy", [0.3, 0.9, 0.999])
def test_an_energy_keeps_the_fewest_vectors_that_have_it(energy):
    weight = (draw(40, 30) * 0.7 ** torch.arange(30)).double()
    received = LowRankCodec(energy=energy).transmit({"a": weight})["a"]
    values = np.linalg.svd(weight.numpy(), compute_uv=False) ** 2
    shares = values.cumsum() / values.sum()
    rank = int(np.argmax(shares >= energy)) + 1
    assert np.linalg.matrix_rank(received.numpy(), tol=1e-9) == rank
    assert math.isclose(float(received.square().sum() / weight.square().sum()), shares[rank - 1], rel_tol=1e-9)


def test_an_energy_that_needs_more_than_the_matrix_sends_it_dense():
    tensors = {"a": draw(10, 10)}
    assert torch.equal(LowRankCodec(energy=0.999).transmit(tensors)["a"], tensors["a"])


@pytest.mark.parametrize("budget", [1 / 8, 1 / 4, 1 / 2])
def test_a_budget_is_that_of_all_numbers_and_one_share_of_each_matrix(budget):
    tensors = {"a": draw(64, 48), "b": draw(32, 16, 3, 3, seed=1), "c": draw(100, seed=2)}
    sizes = {
        name: tensor.numel()
        for name, tensor in LowRankCodec(budget=budget).compress(tensors, layout(tensors))[0].items()
    }
    total = sum(tensor.numel() for tensor in tensors.values())
    assert budget - 0.06 < sum(sizes.values()) / total <= budget
    shares = [(sizes[f"left {name}"] + sizes[f"right {name}"]) / tensors[name].numel() for name in "ab"]
    # To a rank of either matrix.
    assert abs(shares[0] - shares[1]) < 112 / (64 * 48) + 144 / (96 * 48)


def test_a_budget_that_is_too_small_is_rank_one_and_a_whole_one_dense():
    tensors = {"a": draw(64, 48), "b": draw(8, 9, seed=1)}
    received = LowRankCodec(budget=1e-4, method="svd").transmit(tensors)
    assert [int(torch.linalg.matrix_rank(received[name])) for name in "ab"] == [1, 1]
    assert all(torch.equal(tensors[name], each) for name, each in LowRankCodec(budget=1.0).transmit(tensors).items())


def layout(tensors):
    from lightning_lowrank.compression.wire import Layout

    return Layout.of(tensors)


def parts_of(data):
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items()}


def test_the_bytes_are_vectors_and_singular_values():
    sizes = parts_of(LowRankCodec(2).encode(MESSAGE))
    sizes.pop("layout")
    assert sizes == {"exact": 8, "scales": 4 * 2 * 2, "values": 4 * (2 * (18 + 12) + 2 * 50 + 20)}
    sizes = parts_of(Chain([LowRankCodec(2), Quantize(4, bucket_size=None), Half()]).encode(MESSAGE))
    # Four tensors of vectors and one dense have a scale each.
    assert (sizes["scales"], sizes["1.levels"], sizes["2.values"]) == (16, (60 + 100 + 20) // 2, 2 * 5)


def test_matrices_that_get_no_smaller_are_dense():
    tensors = {
        "square": draw(4, 4),
        "tall": draw(50, 2),
        "row": draw(1, 30),
        "vector": draw(30),
        "none": torch.zeros(0, 9),
    }
    received = LowRankCodec(2).transmit(tensors)
    assert all(torch.equal(received[name], tensors[name]) for name in tensors)
    assert not torch.equal(LowRankCodec(2).transmit({"a": draw(12, 9)})["a"], draw(12, 9))


@pytest.mark.parametrize("method", ["power", "svd"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_matrix_of_that_rank_arrives_to_rounding(method, dtype):
    factors = draw(30, 2).double(), draw(2, 40, seed=1).double()
    weight = (factors[0] @ factors[1]).to(dtype).T
    received = LowRankCodec(4, method=method).transmit({"a": weight})["a"]
    assert received.dtype == dtype
    assert (received - weight).abs().max() < 8 * torch.finfo(dtype).eps * weight.abs().max()


@pytest.mark.parametrize("method", ["power", "svd"])
@pytest.mark.parametrize("scale", [1e-35, 1e35])
def test_small_and_large_numbers_neither_vanish_nor_overflow(method, scale):
    weight = draw(30, 1) * draw(1, 40, seed=1)
    received = LowRankCodec(1, method=method).transmit({"a": weight * scale})["a"]
    assert torch.allclose(received / scale, weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("codec", [LowRankCodec(2), LowRankCodec(2, method="svd"), LowRankCodec(energy=0.5)], ids=repr)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_makes_its_matrix_nan_and_no_other(codec, number):
    tensors = {"a": draw(30, 20), "b": draw(30, 20, seed=1)}
    tensors["a"][3, 4] = number
    received = codec.transmit(tensors)
    assert received["a"].isnan().all()
    assert received["b"].isfinite().all()
    assert codec.decode(codec.encode(tensors))["a"].isnan().all()


def test_vectors_of_half_precision_keep_small_changes():
    change = draw(40, 30) * 1e-9
    received = Chain([LowRankCodec(4, method="svd"), Half()]).transmit({"a": change})["a"]
    exact = LowRankCodec(4, method="svd").transmit({"a": change})["a"]
    assert (received - exact).norm() < 1e-3 * exact.norm()


def test_the_last_vectors_are_the_next_start_and_come_near_the_largest():
    message, packet, channel = {"a": draw(60, 40)}, None, Channel([LowRankCodec(4), Half()])
    best = float((LowRankCodec(4, method="svd").transmit(message)["a"] - message["a"]).norm())
    losses = []
    for seed in range(30):
        packet = channel.send(message, seed=seed, memory=packet and packet.memory)
        losses.append(float((packet.received["a"] - message["a"]).norm()))
    assert losses[0] > 1.05 * best
    assert losses[-1] < 1.005 * best
    # Without memory each message begins with vectors of its own seed.
    fresh = channel.send(message, seed=0)
    assert float((fresh.received["a"] - message["a"]).norm()) == losses[0]


def test_the_memory_passes_through_chains_and_splits():
    message = {"a": draw(60, 40), "b": draw(60, 40, seed=1)}
    codec = Split(["a"], Chain([LowRankCodec(2), Half()]), LowRankCodec(3))
    packet = Channel([codec]).send(message, exact=["c"], seed=1)
    memory = packet.memory["others"]
    assert {name: part["0"]["a"].shape if name == "chosen" else part["b"].shape for name, part in memory.items()} == {
        "chosen": (2, 40),
        "others": (3, 40),
    }
    again = Channel([codec]).send(message, exact=["c"], seed=2, memory=packet.memory)
    for name, rank in (("a", 2), ("b", 3)):
        alone = LowRankCodec(rank).started(memory["chosen"]["0"] if name == "a" else memory["others"])
        expected = Chain([alone, Half()]) if name == "a" else alone
        assert torch.equal(again.received[name], expected.transmit({name: message[name]})[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "build", [lambda codec: codec, lambda codec: Split(["bias"], Half(), codec)], ids=["", "split"]
)
def test_senders_together_are_senders_alone_to_rounding(monkeypatch, build, dtype):
    codec, counts = build(LowRankCodec(3)), []
    iterated = low_rank._iterated
    monkeypatch.setattr(low_rank, "_iterated", lambda *stacks: (counts.append(len(stacks[0])), iterated(*stacks))[1])
    memories, messages = [{}] * 4, []
    for number in range(3):
        messages = [
            {name: value.to(dtype) * (number + 1) for name, value in MESSAGE.items()}
            | {"linear": draw(30, 20, seed=one)}
            for one in range(4)
        ]
        senders = [codec.seeded(one).started(memory) for one, memory in enumerate(memories)]
        alone = [sender.transmit_and_keep(tensors) for sender, tensors in zip(senders, messages, strict=True)]
        counts.clear()
        together = type(codec).transmit_together(senders, messages)
        assert counts == [4, 4]
        for (received, kept), (expected, memory), tensors in zip(together, alone, messages, strict=True):
            assert received.keys() == tensors.keys()
            torch.testing.assert_close(received, expected)
            torch.testing.assert_close(kept, memory, rtol=1e-5, atol=1e-6)
        memories = [memory for _, memory in alone]


def test_a_sender_that_is_not_finite_leaves_the_others_alone():
    messages = [{"weight": draw(30, 20, seed=one)} for one in range(3)]
    messages[1]["weight"][2, 3] = math.nan
    found = [received["weight"] for received, _ in LowRankCodec.transmit_together([LowRankCodec(2)] * 3, messages)]
    assert [bool(each.isfinite().all()) for each in found] == [True, False, True]
    assert found[1].isnan().all()


def test_senders_of_different_shapes_are_alone():
    messages = [{"weight": draw(30, 20)}, {"weight": draw(20, 30)}]
    together = LowRankCodec.transmit_together([LowRankCodec(2)] * 2, messages)
    for (received, _), message in zip(together, messages, strict=True):
        assert torch.equal(received["weight"], LowRankCodec(2).transmit(message)["weight"])


def test_a_start_without_directions_is_drawn():
    """A sender whose matrix was zero, or not finite, is not left with vectors that send nothing for ever."""
    channel = Channel([LowRankCodec(2, error_feedback=True)])
    change = draw(30, 20)
    change[:5] = 0
    for first in (torch.zeros(30, 20), torch.full((30, 20), math.nan)):
        packet = channel.send({"a": first}, seed=0)
        after = channel.send({"a": change}, seed=1, memory=packet.memory)
        fresh = channel.send({"a": change}, seed=1)
        assert torch.equal(after.received["a"], fresh.received["a"])
        assert after.received["a"].norm() > 0.2 * change.norm()
    # Of rank 1: one direction is kept, and one drawn.
    packet = channel.send({"a": draw(30, 1) * draw(1, 20, seed=1)}, seed=0)
    after = channel.send({"a": change}, seed=1, memory=packet.memory)
    assert np.linalg.matrix_rank(after.received["a"].numpy()) == 2


def test_a_memory_of_another_shape_is_none():
    message, channel = {"a": draw(30, 20)}, Channel([LowRankCodec(2)])
    other = channel.send({"a": draw(20, 30)}, seed=5).memory
    assert torch.equal(
        channel.send(message, seed=1, memory=other).received["a"], channel.send(message, seed=1).received["a"]
    )


def test_the_length_of_an_energy_is_that_of_the_encoding_and_a_schema_takes_it():
    codec = LowRankCodec(energy=0.9)
    for decay in (1.0, 0.8, 0.3):
        tensors = {"a": draw(40, 30) * decay ** torch.arange(30), "b": draw(7)}
        packet = Channel([codec, Half()]).send(tensors, seed=0)
        data = packet.encode()
        assert packet.nbytes == len(data)
        received = Channel([codec, Half()]).receive(data, schema=Schema.of(tensors))
        assert torch.equal(received["a"], packet.received["a"])
    check_codec(codec, {"of low rank": tensors})


def test_a_rank_that_no_encoder_writes_is_refused():
    codec, tensors = LowRankCodec(energy=0.9), {"a": draw(40, 30) * 0.3 ** torch.arange(30)}
    data = codec.encode(tensors)
    rank = int(codec.compress(tensors, layout(tensors))[1].ranks["a"]).to_bytes(4, "little")
    # The ranks end the parts before the singular values and vectors.
    assert data.count(rank) >= 1
    place = data.index(rank, 8 + int.from_bytes(data[:8], "little"))
    for wrong in (-1, 18, 2**31 - 1, 0):
        with pytest.raises(DecodingError, match=r"rank|length"):
            codec.decode(data[:place] + wrong.to_bytes(4, "little", signed=True) + data[place + 4 :])


def test_a_matrix_whose_bytes_would_not_bound_a_decoder_is_refused():
    side = math.isqrt(MOST_NUMBERS_OF_A_MATRIX)
    assert LowRankCodec(1).nbytes({"a": torch.empty(side, side, device="meta")}) < 9 * side
    with pytest.raises(ValueError, match=r"'a'.*16385.*Split"):
        LowRankCodec(1).nbytes({"a": torch.empty(side, side + 1, device="meta")})


@pytest.mark.parametrize("changes", [2_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.nightly])])
@pytest.mark.parametrize(
    "codec",
    [LowRankCodec(2), LowRankCodec(energy=0.6), Chain([LowRankCodec(energy=0.6), Quantize(4), Half()])],
    ids=repr,
)
def test_changed_messages_are_refused_or_small(codec, changes):
    rng, data = random.Random(0), codec.encode(MESSAGE)
    schema, refused = Schema.of(MESSAGE), 0
    for number in range(changes):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            changed[rng.randrange(len(data) if rng.random() < 0.3 else 400)] ^= 1 << rng.randrange(8)
        del changed[rng.randrange(1, len(data)) if rng.random() < 0.1 else len(data) :]
        try:
            decoded = codec.decode(bytes(changed), schema if number % 2 else None)
        except DecodingError:
            refused += 1
        else:
            assert sum(tensor.nbytes for tensor in decoded.values()) < 1e6
    assert refused > changes / 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "LowRankCodec: exactly one of rank, budget and energy"),
        ({"rank": 2, "energy": 0.5}, r"exactly one .*2.*0\.5"),
        ({"rank": 0}, "rank.*0"),
        ({"rank": 1.5}, r"rank.*1\.5"),
        ({"budget": 0.0}, r"budget.*0\.0"),
        ({"budget": 1.5}, r"budget.*1\.5"),
        ({"energy": math.nan}, "energy.*nan"),
        ({"rank": 2, "method": "qr"}, "method.*'qr'"),
        ({"energy": 0.5, "method": "power"}, r"energy=0\.5.*svd.*'power'"),
        ({"rank": 2, "seed": 2**63}, "seed.*9223372036854775808"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        LowRankCodec(**arguments)
