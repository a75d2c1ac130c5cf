"""`Quantize` against the formula of QSGD."""

import math

import pytest
import torch

from lightning_lowrank.compression import DecodingError, Quantize
from lightning_lowrank.compression.wire import Layout
from tests.grids import nightly_except
from tests.helpers import draw


def norm_of(bucket, norm):
    return bucket.abs().max() if norm == "max" else bucket.double().norm().float()


@nightly_except("4-7-1-l2", "8-127-None-l2")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "levels", "bucket_size", "norm"),
    [
        (8, 127, 7, "max"),
        (8, 127, None, "l2"),
        (4, 7, 7, "l2"),
        (4, 7, None, "max"),
        (4, 7, 1, "l2"),
        (8, 127, 1, "max"),
    ],
)
def test_each_number_arrives_at_one_of_its_two_levels_with_their_probabilities(bits, levels, bucket_size, norm):
    numbers = draw(4, 5)
    draws = 800
    total = torch.zeros(20, dtype=torch.float64)
    buckets = numbers.flatten().split(bucket_size or 20)
    scale = torch.cat([norm_of(bucket, norm).expand(len(bucket)) for bucket in buckets]).double()
    place = numbers.flatten().double().abs() / scale * levels
    lower = (place + 1e-5).floor()
    for seed in range(draws):
        received = Quantize(bits, bucket_size, norm, seed).transmit({"a": numbers})["a"].flatten().double()
        level = received.abs() / scale * levels
        assert (level - level.round()).abs().max() < 1e-3
        assert ((level.round() - lower) * (lower + 1 - level.round()) >= 0).all()
        assert ((received == 0) | (received.sign() == numbers.flatten().sign())).all()
        total += level - lower
    probability = place - lower
    spread = (probability * (1 - probability)).clamp(min=1e-6).sqrt()
    assert ((total / draws - probability).abs() < 4.5 * spread / math.sqrt(draws) + 1e-5).all()


def test_the_sizes_are_the_papers():
    tensors = {"weight": torch.empty(1000, 100, device="meta"), "bias": torch.empty(10, device="meta")}
    for bits, bucket_size, scales in ((8, 512, 196 + 1), (4, 512, 196 + 1), (4, 64, 1563 + 1), (8, None, 2)):
        names = Quantize(bits, bucket_size).nbytes(tensors) - 100_010 * bits // 8 - 4 * scales
        assert 0 < names < 300


def test_a_default_device_changes_no_draw():
    numbers = torch.randn(10)
    expected = Quantize(4, None).transmit({"a": numbers})["a"]
    with torch.device("meta"):
        assert torch.equal(Quantize(4, None).transmit({"a": numbers})["a"], expected)


def test_an_odd_number_of_levels_shares_no_byte_with_another_part():
    for count in range(6):
        tensors = {"a": draw(count), "b": draw(3, seed=1)}
        codec = Quantize(bits=4, bucket_size=2)
        received = codec.decode(codec.encode(tensors))
        assert all(torch.equal(received[name], value) for name, value in codec.transmit(tensors).items())


def test_numbers_on_a_level_arrive_as_they_are():
    for bits, levels in ((8, 127), (4, 7)):
        numbers = torch.arange(-levels, levels + 1.0)
        for seed in range(5):
            assert torch.equal(Quantize(bits, None, seed=seed).transmit({"a": numbers})["a"], numbers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_the_largest_and_the_smallest_numbers_of_a_type_stay_finite(dtype, norm):
    for number in (torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal):
        tensors = {"a": torch.tensor([number, -number, number / 3, 0.0], dtype=dtype)}
        received = Quantize(8, norm=norm).transmit(tensors)["a"]
        assert received.isfinite().all()
        assert received[3] == 0
        if norm == "max":
            assert torch.equal(received[:2], tensors["a"][:2])


@pytest.mark.parametrize("bits", [4, 8])
def test_a_number_that_is_not_finite_is_seen_in_its_bucket(bits):
    numbers = torch.tensor([1.0, math.nan, 2.0, 3.0, -math.inf, 0.0, 5.0, 6.0])
    received = Quantize(bits, bucket_size=3).transmit({"a": numbers})["a"]
    assert received[:3].isnan().all()
    assert received[3:6].tolist() == [math.inf, -math.inf, math.inf]
    assert received[6:].isfinite().all()


def test_the_decoder_needs_no_seed_and_seeds_differ():
    tensors = {"a": draw(50)}
    data = [
        Quantize(4, seed=1).encode(tensors),
        Quantize(4).seeded(1).encode(tensors),
        Quantize(4, seed=2).encode(tensors),
    ]
    assert data[0] == data[1] != data[2]
    assert torch.equal(Quantize(4, seed=9).decode(data[0])["a"], Quantize(4, seed=1).transmit(tensors)["a"])


@pytest.mark.parametrize(("bits", "level"), [(8, 0x80), (4, 0x08), (4, 0x80)])
def test_a_level_beyond_the_scale_is_refused(bits, level):
    layout = Layout.of({"a": torch.zeros(8)})
    levels = torch.zeros(bits, dtype=torch.uint8)
    assert Quantize(bits).unpack({"levels": levels}, layout).tolist() == [0] * 8
    levels[-1] = level
    with pytest.raises(DecodingError, match="a level is -"):
        Quantize(bits).unpack({"levels": levels}, layout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 2}, r"bits.*4.*2"),
        ({"bits": 8.0}, r"bits.*4.*8\.0"),
        ({"bucket_size": 0}, r"bucket_size.*0"),
        ({"bucket_size": 2.0}, r"bucket_size.*2\.0"),
        ({"norm": "l1"}, "norm must be one of 'max', 'l2', but is 'l1'"),
        ({"seed": 2**63}, r"seed.*-2"),
        ({"bits": 4, "bucket_size": 49, "norm": "l2", "error_feedback": True}, r"bucket_size.*49"),
        ({"bucket_size": None, "norm": "l2", "error_feedback": True}, "bucket_size"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Quantize(**arguments)
    with pytest.raises(ValueError, match=r"seed.*-2"):
        Quantize().seeded(-(2**63) - 1)
