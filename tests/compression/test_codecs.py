"""The contract for every codec, and each codec's own formula.

A codec takes part by being exported from ``lightning_lowrank.compression`` and having a line in ``CODECS``.
"""

import inspect
import json
import math
import random
import tracemalloc

import pytest
import torch

from lightning_lowrank import compression
from lightning_lowrank.compression import (
    Chain,
    Channel,
    Codec,
    DecodingError,
    Dense,
    FloatingCodec,
    Half,
    LowRankCodec,
    Mask,
    Packet,
    Quantize,
    RandomCodec,
    RandomK,
    Schema,
    Sign,
    Split,
    TopK,
)
from lightning_lowrank.compression.wire import FLOATING, Layout
from lightning_lowrank.models import CNN4
from lightning_lowrank.testing import check_codec
from tests.grids import nightly_except, pairwise
from tests.helpers import draw


def random_masks(tensors):
    return {
        name: torch.rand(tensor.shape, generator=torch.Generator().manual_seed(5)) < 0.4
        for name, tensor in tensors.items()
        if name in ("weight", "a") and tensor.is_floating_point()
    }


CODECS = {
    "dense": lambda tensors: Dense(),
    "float16": lambda tensors: Half(),
    "bfloat16": lambda tensors: Half("bfloat16"),
    "top share": lambda tensors: TopK(share=0.2),
    "top share dense": lambda tensors: TopK(share=0.7),
    "top all": lambda tensors: TopK(share=1.0),
    "top share tensor": lambda tensors: TopK(share=0.2, scope="tensor"),
    "top count": lambda tensors: TopK(count=3),
    "top count tensor": lambda tensors: TopK(count=3, scope="tensor"),
    "random": lambda tensors: RandomK(0.3, seed=-7),
    "random unbiased": lambda tensors: RandomK(0.3, seed=2**62, unbiased=True),
    "sign": lambda tensors: Sign(),
    "mask": lambda tensors: Mask(random_masks(tensors)),
    "mask known": lambda tensors: Mask(random_masks(tensors), known=True),
    "split": lambda tensors: Split(["bias", "b", "flag", "absent"], Half(), Sign()),
    "quantize": lambda tensors: Quantize(bits=8, seed=3),
    "quantize 4": lambda tensors: Quantize(bits=4, bucket_size=5, seed=2**63 - 1),
    "quantize l2": lambda tensors: Quantize(bits=4, bucket_size=None, norm="l2"),
    "chain of one": lambda tensors: Chain([TopK(share=0.2)]),
    "top half": lambda tensors: Chain([TopK(share=0.2), Half()]),
    "mask quantize half": lambda tensors: Chain([Mask(random_masks(tensors)), Quantize(bits=4), Half("bfloat16")]),
    "random quantize": lambda tensors: Chain([RandomK(0.3, seed=4, unbiased=True), Quantize(seed=5)]),
    "sign quantize random": lambda tensors: Chain([Sign(), Quantize(bits=4), RandomK(0.5, seed=1)]),
    "rank": lambda tensors: LowRankCodec(2, seed=9),
    "rank svd": lambda tensors: LowRankCodec(1, method="svd"),
    "rank budget": lambda tensors: LowRankCodec(budget=0.2),
    "rank energy": lambda tensors: LowRankCodec(energy=0.7),
    "rank energy half": lambda tensors: Chain([LowRankCodec(energy=0.5), Half()]),
    "rank quantize": lambda tensors: Chain([LowRankCodec(2), Quantize(bits=4)]),
    "half top top": lambda tensors: Chain([Half(), TopK(share=0.5), TopK(count=2, scope="tensor")]),
}
LOSSLESS = ["dense", "top all"]
DRAWING = [
    "quantize",
    "quantize 4",
    "quantize l2",
    "random quantize",
    "mask quantize half",
    "random unbiased",
    "rank quantize",
]
# The factors of what they made are rounded again.
FACTORS = [build for build in CODECS if build.startswith("rank")]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CASES = {
    "float32": {"weight": draw(3, 4), "bias": draw(4, seed=1)},
    "bfloat16": {"weight": draw(3, 4).bfloat16()},
    "float16": {"weight": draw(3, 4).half(), "bias": draw(9).half()},
    "float64": {"weight": draw(2, 2).double()},
    "float8": {"weight": draw(6), "scaled": draw(3).to(torch.float8_e4m3fn)},
    "complex": {"weight": torch.complex(draw(3), draw(3, seed=1)).requires_grad_()},
    "integers": {"seed": torch.tensor(2**62 + 1), "mask": torch.tensor([True, False])},
    "mixed": {
        "b": torch.zeros(1, dtype=torch.int64),
        "a": draw(7).half(),
        "c": torch.zeros(0, 3),
        "flag": torch.tensor(True),
        "weight": draw(5, 3, seed=2),
        "d": draw(4, seed=3).bfloat16(),
    },
    "one number": {"weight": torch.tensor(1.5)},
    "no numbers": {"weight": torch.zeros(0, 3)},
    "nothing": {},
    "not contiguous": {"weight": draw(3, 4).T},
    "parameter": {"weight": torch.nn.Parameter(torch.ones(2))},
    "tied": dict.fromkeys(("weight", "same"), draw(2, 5)),
    "zeros": {"weight": torch.zeros(20), "bias": -torch.zeros(3)},
    "not finite": {"weight": torch.tensor([1.0, math.nan, -math.inf, 2.0, math.inf, -math.nan]), "bias": draw(3)},
    "odd names": {"": draw(2), 'a "b"\n\\ü': draw(3), "layout": draw(1), "values": draw(2)},
    "larger": {"weight": draw(40, 30), "bias": draw(301, seed=1)},
}
everywhere = pytest.mark.parametrize("case", CASES)
every_codec = pytest.mark.parametrize("build", CODECS)


def bits(tensor):
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        assert one[name].shape == other[name].shape
        assert torch.equal(bits(one[name]), bits(other[name])), name


def test_every_exported_codec_is_held_to_the_contract():
    exported = {getattr(compression, name) for name in compression.__all__}
    concrete = {kind for kind in exported if issubclass(kind, Codec) and not inspect.isabstract(kind)}
    assert {type(build({})) for build in CODECS.values()} == concrete
    assert exported - concrete == {Codec, FloatingCodec, RandomCodec, DecodingError, Channel, Packet, Schema}


@pytest.mark.slow
@nightly_except(
    "dense",
    "float16",
    "top share",
    "random",
    "sign",
    "mask",
    "split",
    "quantize",
    "top half",
    "rank",
    "rank energy half",
)
@every_codec
def test_the_contract_holds(build):
    for case, tensors in CASES.items():
        check_codec(CODECS[build](tensors), {case: tensors}, draws=15)


@everywhere
@pytest.mark.parametrize("build", LOSSLESS)
def test_lossless_codecs_lose_nothing(build, case):
    assert_same(CODECS[build](CASES[case]).transmit(CASES[case]), dict(CASES[case]))


@pairwise(strength=1)
@everywhere
@pytest.mark.parametrize(
    "build", [build for build in CODECS if build not in (*DRAWING, *FACTORS, "sign quantize random")]
)
def test_what_arrived_arrives_again_unchanged(build, case):
    codec = CODECS[build](CASES[case])
    once = codec.transmit(CASES[case])
    twice = codec.transmit(once)
    for name in once:
        assert (
            torch.equal(once[name].nan_to_num(7), twice[name].nan_to_num(7))
            if once[name].dtype in FLOATS
            else torch.equal(bits(once[name]), bits(twice[name]))
        )


@pytest.mark.parametrize("build", [build for build in CODECS if build != "dense"])
def test_each_tensor_that_arrives_has_memory_of_its_own(build):
    # Whoever keeps one tensor of a model must not keep, or save, all of it.
    codec = CODECS[build](CASES["mixed"])
    decoded = codec.decode(codec.encode(CASES["mixed"]))
    assert {name: tensor.untyped_storage().nbytes() for name, tensor in decoded.items()} == {
        name: tensor.nbytes for name, tensor in decoded.items()
    }


@pytest.mark.parametrize("build", [build for build in CODECS if build not in LOSSLESS])
def test_lossy_codecs_lose_something(build):
    tensors = CASES["larger"]
    assert not torch.equal(CODECS[build](tensors).transmit(tensors)["weight"], tensors["weight"])


def forge(parts):
    """Build a safetensors file by hand: parts of bytes."""
    header, start = {}, 0
    for name, part in parts.items():
        header[name] = {"dtype": "U8", "shape": [len(part)], "data_offsets": [start, start + len(part)]}
        start += len(part)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(parts.values())


@pairwise(strength=1)
@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not a mapping"),
        (b'{"float32":[]}', "not a mapping"),
        (b'{"float33":{}}', "'float33'"),
        (b'{"float32":{"a":[true]}}', "shape of tensor 'a'"),
        (b'{"float32":{"a":[-1]}}', "shape of tensor 'a'"),
        (b'{"float32":{"a":4}}', "shape of tensor 'a'"),
        (b'{"float32":{"a":[1.0]}}', "shape of tensor 'a'"),
        (b'{"float32":{"a":[0,%d]}}' % 10**30, "larger than any tensor"),
        (b'{"float32":{"a":[%d]}}' % 10**15, "length"),
        (b'{"float64":{"a":[%d,1024]}}' % 2**40, "length"),
        (b'{"float32":{"a":[1]},"int64":{"a":[1]}}', "'a' twice"),
        (b'{"bool":{"a":[9]}}', "length"),
    ],
)
@pytest.mark.parametrize("build", [build for build in CODECS if build not in ("dense", "split")])
def test_forged_names_and_shapes_are_named(build, layout, message):
    codec = CODECS[build]({})
    tracemalloc.start()
    if "count" in build and message == "length" and b"float" in layout:
        message = "give it a share"
    if "rank" in build and b"1024" in layout:
        message = "matrix 'a' of shape"
    with pytest.raises(DecodingError, match=message):
        codec.decode(forge({"layout": layout, "values": b"\0" * 12, "positions": b"\1"}))
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


@every_codec
def test_bytes_that_are_no_boolean_are_refused(build):
    tensors = {"flag": torch.tensor([True, True])}
    data = CODECS[build](tensors).encode(tensors)
    assert data.count(b"\1\1") == 1
    with pytest.raises(DecodingError, match=r"tensor.*'flag'"):
        CODECS[build](tensors).decode(data.replace(b"\1\1", b"\1\2"))


def test_parts_that_do_not_belong_are_refused():
    layout = b'{"float32":{"a":[8]}}'
    good = {"layout": layout, "scales": bytes(4), "signs": b"\1"}
    assert Sign().decode(forge(good)).keys() == {"a"}
    for bad in ({"signs": b"\1\1"}, {"scales": b""}, {"more": b"1"}, {"exact": b"1"}):
        with pytest.raises(DecodingError, match=f"part '{next(iter(bad))}'"):
            Sign().decode(forge({**good, **bad}))
    for entry in (b'"F32","shape":[1]', b'"U8","shape":[2,2]'):
        header = b'{"layout":{"dtype":%s,"data_offsets":[0,4]}}' % entry
        with pytest.raises(DecodingError, match="'layout'"):
            Sign().decode(len(header).to_bytes(8, "little") + header + b"{  }")
    header = b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    with pytest.raises(DecodingError, match="no safetensors file that can be read"):
        Dense().decode(len(header).to_bytes(8, "little") + header + bytes(1))


def test_split_sends_each_tensor_through_its_own_codec():
    tensors = {"a": draw(9), "mean": draw(4, seed=1), "b": draw(3, seed=2), "steps": torch.tensor(3)}
    codec = Split({"mean", "steps"}, Dense(), Sign())
    received = codec.transmit(tensors)
    assert list(received) == list(tensors)
    assert_same(
        {name: received[name] for name in ("mean", "steps")}, {name: tensors[name] for name in ("mean", "steps")}
    )
    weights = {name: tensors[name] for name in "ab"}
    assert_same({name: received[name] for name in "ab"}, Sign().transmit(weights))
    dense = {name: tensors[name] for name in ("mean", "steps")}
    assert codec.nbytes(tensors) == 8 + Dense().nbytes(dense) + Sign().nbytes(weights)
    with pytest.raises(TypeError, match=r"\['mean'\]"):
        Split("mean", Dense(), Sign())


def test_split_refuses_what_came_the_other_way():
    tensors = {"a": draw(3), "b": draw(3)}
    data = Split(["a"], Half(), Half()).encode(tensors)
    for names, astray in ((["b"], "a"), ([], "a"), (["a", "b"], "b")):
        with pytest.raises(DecodingError, match=f"'{astray}' was encoded by the wrong one"):
            Split(names, Half(), Half()).decode(data)
    with pytest.raises(DecodingError, match="should end at byte"):
        Split(["a"], Half(), Half()).decode((2**63).to_bytes(8, "little") + data[8:])


def test_tensors_without_an_encoding_are_refused():
    with pytest.raises(TypeError, match="complex128"):
        Dense().encode({"a": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(ValueError, match="__metadata__"):
        Dense().encode({"__metadata__": torch.zeros(2)})
    with pytest.raises(TypeError, match=r"'a'.*torch\.float8_e5m2fnuz"):
        Sign().nbytes({"a": torch.empty(2, dtype=torch.float8_e5m2fnuz, device="meta")})


def cnn4(like=""):
    return {name: value for name, value in CNN4().named_parameters() if like in name}


def test_cnn4_in_one_bit_per_weight():
    # One bit for each of the 390,880 numbers and a float32 for each of the 13 tensors; the rest is names and shapes.
    formula = 390_880 // 8 + 13 * 4
    assert formula == 48_912
    size = Sign().nbytes(cnn4())
    assert formula < size < formula + 610
    # FedBAT's 52,600 bytes keep the eight tensors of the batch normalisation's affine maps in float32.
    binary, affine = ({name: t for name, t in cnn4().items() if ("norm" in name) is norm} for norm in (False, True))
    assert sum(t.numel() for t in binary.values()) // 8 + 5 * 4 + 4 * sum(t.numel() for t in affine.values()) == 52_600
    assert 52_600 < Sign().nbytes(binary) + Dense().nbytes(affine) < 52_600 * 1.02


def test_cnn4_sizes_of_the_others():
    kept = round(390_880 / 32)
    names = 630
    assert 0 < Half().nbytes(cnn4()) - 2 * 390_880 < names
    assert 0 < RandomK(1 / 32).nbytes(cnn4()) - 4 * kept - 8 < names
    # Elias and Fano's code is within about half a bit per position of log2 of the number of choices.
    top = TopK(share=1 / 32).nbytes(cnn4()) - 4 * kept - names
    choices = (math.lgamma(390_881) - math.lgamma(kept + 1) - math.lgamma(390_881 - kept)) / math.log(2)
    assert choices / 8 < top + names < choices / 8 + 0.6 * kept / 8 + names
    # Half of the numbers: a bitmap.
    assert 0 < TopK(share=0.5).nbytes(cnn4()) - 4 * 195_440 - 390_880 // 8 < names


def test_dense_size_needs_no_values():
    tensors = {"weight": torch.empty(1_000_000, 1_000_000, device="meta")}
    assert 4e12 < compression.Dense().nbytes(tensors) < 4e12 + 200


@pytest.mark.parametrize("seed", range(20))
def test_dense_size_of_any_names_types_and_shapes(seed):
    choose = random.Random(seed)
    types = [*FLOATING, torch.bool, torch.uint8, torch.int16, torch.uint32, torch.complex64, torch.float8_e5m2]
    tensors = {}
    for _ in range(seed):
        name = "".join(choose.choice('aZ09._é日"\\\n\x01\x7f😀/') for _ in range(choose.randrange(9)))
        tensors[name] = torch.zeros([choose.choice([0, 1, 3, 31]) for _ in range(choose.randrange(4))]).to(
            choose.choice(types)
        )
    codec = compression.Dense()
    assert codec.nbytes(tensors) == len(codec.encode(tensors))


def test_half_rounds_as_numpy_does_and_restores_the_type():
    tensors = {"weight": torch.cat([draw(50) * 1e-4, torch.tensor([65_519.0, 65_520.0, -1e9, 2.9e-8])])}
    received = Half().transmit(tensors)["weight"]
    with pytest.warns(RuntimeWarning, match="overflow"):
        expected = tensors["weight"].numpy().astype("float16").astype("float32")
    assert received.tolist() == expected.tolist()
    assert received[-4:].tolist() == [65_504.0, math.inf, -math.inf, 0.0]
    # bfloat16 is the upper half of float32, rounded to nearest even.
    number = tensors["weight"].view(torch.int32)
    upper = (number + 0x7FFF + (number >> 16 & 1)) & -0x10000
    assert torch.equal(Half("bfloat16").transmit(tensors)["weight"], upper.view(torch.float32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_of_the_other_kind_are_not_rounded(dtype):
    tensors = {"half": (draw(9) / 3).half(), "brain": (draw(9) * 1e20).bfloat16()}
    assert_same(Half(dtype).transmit(tensors), tensors)


def brute_force(numbers, count):
    """Keep the largest magnitudes; of equal ones the first, which a stable sort leaves in front."""
    order = sorted(range(len(numbers)), key=lambda i: -math.inf if math.isnan(numbers[i]) else -abs(numbers[i]))
    return [number if i in order[:count] else 0.0 for i, number in enumerate(numbers)]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 11, 12, 13, 40])
def test_top_k_is_a_sort_over_the_whole_model(count):
    for seed in range(20):
        # Few different magnitudes, so that there are ties.
        numbers = torch.randint(-3, 4, (12,), generator=torch.Generator().manual_seed(seed)).float()
        tensors = {"a": numbers[:5].reshape(1, 5), "b": numbers[5:].bfloat16()}
        codec = TopK(count=count)
        received = codec.decode(codec.encode(tensors))
        assert received["a"].flatten().tolist() + received["b"].tolist() == brute_force(numbers.tolist(), count)
        each = TopK(count=count, scope="tensor").transmit(tensors)
        assert each["a"].flatten().tolist() == brute_force(numbers[:5].tolist(), count)
        assert each["b"].tolist() == brute_force(numbers[5:].tolist(), count)


def test_top_k_never_hides_a_nan():
    received = TopK(count=2).transmit({"a": torch.tensor([1e30, math.nan, 5.0, -math.inf, math.inf])})["a"]
    assert math.isnan(received[1])
    assert received[[0, 2, 3, 4]].tolist() == [0.0, 0.0, -math.inf, 0.0]


@pytest.mark.parametrize(("share", "kept"), [(0.001, 1), (0.1, 3), (0.29, 9), (0.5, 15), (1.0, 30)])
@pytest.mark.parametrize("build", [lambda share: TopK(share=share), RandomK])
def test_a_share_is_rounded_and_at_least_one_number(build, share, kept):
    received = build(share).transmit(
        {"a": torch.ones(4, 5), "b": torch.ones(10), "c": torch.ones(9, dtype=torch.int64)}
    )
    assert received["a"].sum() + received["b"].sum() == kept
    assert received["c"].sum() == 9


def test_a_share_of_each_tensor():
    received = TopK(share=0.1, scope="tensor").transmit({"a": 100 + draw(40), "b": draw(20), "c": draw(3)})
    assert [int((received[name] != 0).sum()) for name in "abc"] == [4, 2, 1]


def test_a_mantissa_in_double_precision_decides():
    numbers = torch.tensor([1.0, 1.0 + 1e-12, 1.0 - 1e-12], dtype=torch.float64)
    assert TopK(count=1).transmit({"a": numbers, "b": torch.ones(1)})["a"].tolist() == [0.0, 1.0 + 1e-12, 0.0]


@pytest.mark.parametrize("total", [1, 2, 7, 8, 9, 64, 1000, 4097])
def test_positions_of_any_number_survive(total):
    numbers = draw(total, seed=total)
    for count in {1, 2, total // 9, total // 3, total // 2, total - 1, total} - {0}:
        codec = TopK(count=count)
        received = codec.decode(codec.encode({"a": numbers}))["a"]
        expected = numbers * (numbers.abs() >= numbers.abs().sort(descending=True).values[min(count, total) - 1])
        assert torch.equal(received, expected)
        # Positions take no more than a bitmap, nor than k(2 + log2(d/k)) bits.
        positions = codec.lengths(Layout.of({"a": numbers}))["positions"]
        count = min(count, total)
        assert positions <= min(math.ceil(total / 8), math.ceil(count * (2 + math.log2(total / count)) / 8))


def test_positions_that_a_decoder_must_not_believe():
    # Three of 100 numbers: five low bits of each position, and 3 + (99 >> 5) places for the high ones.
    def encode(places, high=(0, 1, 2)):
        bits = sum(1 << place for place in high) + sum(place << 6 + 5 * i for i, place in enumerate(places))
        values = torch.ones(3).numpy().tobytes()
        return forge({"layout": b'{"float32":{"a":[100]}}', "values": values, "positions": bits.to_bytes(3, "little")})

    codec = TopK(count=3)
    assert codec.decode(encode([3, 4, 6]))["a"].nonzero().flatten().tolist() == [3, 4, 6]
    assert codec.decode(encode([3, 4, 3], high=(0, 1, 5)))["a"].nonzero().flatten().tolist() == [3, 4, 99]
    for places in ([4, 6, 3], [4, 4, 6]):
        with pytest.raises(DecodingError, match="do not ascend"):
            codec.decode(encode(places))
    with pytest.raises(DecodingError, match="beyond the tensors' 100 numbers"):
        codec.decode(encode([3, 4, 4], high=(0, 1, 5)))
    for high in ((0, 1), (0, 1, 2, 3)):
        with pytest.raises(DecodingError, match=f"positions are {len(high)}"):
            codec.decode(encode([3, 4, 6], high))


def test_a_count_has_a_limit_that_a_share_has_not():
    tensors = {"a": torch.empty(2**26 + 1, device="meta")}
    with pytest.raises(ValueError, match="give it a share"):
        TopK(count=5).nbytes(tensors)
    assert TopK(count=5).nbytes({"a": torch.empty(2**26, device="meta")}) < 300
    assert TopK(share=1e-6).nbytes(tensors) < 1000


@pytest.mark.slow
def test_unbiased_random_k_has_the_payload_as_its_mean():
    tensors = {"a": draw(3, 4), "b": draw(8, seed=1)}
    draws = 1000
    total = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in tensors.items()}
    for seed in range(draws):
        for name, tensor in RandomK(0.25, seed, unbiased=True).transmit(tensors).items():
            total[name] += tensor
    for name, tensor in tensors.items():
        # A number arrives as 4x with probability 1/4: its deviation is sqrt(3)|x|.
        deviations = (total[name] / draws - tensor) / (math.sqrt(3 / draws) * tensor.abs())
        assert deviations.abs().max() < 4.5


def test_random_k_sends_the_numbers_themselves_to_positions_of_the_seed():
    tensors = {"a": draw(30), "b": draw(2, 5, seed=1)}
    received = [RandomK(0.3, seed).transmit(tensors) for seed in (0, 0, 1)]
    flat = [torch.cat([part["a"], part["b"].flatten()]) for part in received]
    sent = torch.cat([tensors["a"], tensors["b"].flatten()])
    assert torch.equal(flat[0], flat[1])
    assert not torch.equal(flat[0], flat[2])
    for numbers in flat:
        assert int((numbers != 0).sum()) == 12
        assert torch.equal(numbers, sent * (numbers != 0))


def test_random_k_decodes_with_the_seed_that_was_sent():
    data = RandomK(0.3, seed=11).encode(CASES["larger"])
    assert_same(RandomK(0.3, seed=12).decode(data), RandomK(0.3, seed=11).transmit(CASES["larger"]))
    with pytest.raises(DecodingError, match="'values'"):
        RandomK(0.2, seed=11).decode(data)


def test_half_precision_random_k_scales_in_its_own_type():
    tensors = {"a": torch.full((8,), 3.0, dtype=torch.bfloat16)}
    received = RandomK(0.25, unbiased=True).transmit(tensors)["a"]
    assert sorted(received.tolist()) == [0.0] * 6 + [12.0] * 2


@pytest.mark.parametrize("dtype", FLOATS)
def test_sign_keeps_binary_tensors_exactly(dtype):
    signs = torch.where(draw(1001) < 0, -1.0, 1.0).to(dtype)
    for alpha in (0.1, 1 / 3, 5e-4, 1.0):
        tensors = {"a": signs * torch.tensor(alpha, dtype=dtype), "b": signs[:3]}
        assert_same(Sign().decode(Sign().encode(tensors)), tensors)


def test_sign_is_the_best_scaled_sign():
    numbers = draw(4, 25)
    received = Sign().transmit({"a": numbers})["a"].flatten()
    flat = numbers.flatten()
    signs = torch.sign(flat)
    best = torch.linalg.lstsq(signs[:, None].double(), flat[:, None].double()).solution.item()
    assert torch.allclose(received, (signs * best).float(), rtol=1e-6)
    assert Sign().transmit({"a": torch.tensor([0.0, -0.0, -3.0])})["a"].tolist() == [1.0, 1.0, -1.0]
    # The mean of these float16 numbers does not fit a float16 sum.
    large = torch.tensor([60_000.0, -50_016.0]).half()
    assert Sign().transmit({"a": large})["a"].tolist() == [55_008.0, -55_008.0]


def test_sign_shows_what_is_not_finite():
    tensors = {"a": torch.tensor([1.0, math.nan]), "b": torch.tensor([1.0, -math.inf]), "c": torch.tensor([2.0])}
    received = Sign().transmit(tensors)
    assert received["a"].isnan().all()
    assert received["b"].tolist() == [math.inf, -math.inf]
    assert received["c"].tolist() == [2.0]


def test_mask_sends_what_it_selects():
    tensors = {"a": draw(2, 5), "whole": draw(3, seed=1), "steps": torch.tensor(7)}
    mask = torch.tensor([[True, False, True, False, False], [False, False, False, False, True]])
    for known in (False, True):
        received = Mask({"a": mask}, known).transmit(tensors)
        assert torch.equal(received["a"], tensors["a"] * mask)
        assert torch.equal(received["whole"], tensors["whole"])
    travelling, known = Mask({"a": mask}).encode(tensors), Mask({"a": mask}, known=True).encode(tensors)
    assert_same(Mask().decode(travelling), received)
    # A travelling mask is no secret, so that another codec's masks do not matter.
    assert_same(Mask({"a": ~mask}).decode(travelling), received)
    with pytest.raises(DecodingError, match="'values'"):
        Mask({"a": ~mask}, known=True).decode(known)
    with pytest.raises(DecodingError, match="no such floating-point tensor"):
        Mask({"b": mask}, known=True).decode(known)


def test_a_mask_that_travels_costs_a_bit_per_number():
    tensors, mask = {"a": draw(80_000)}, torch.zeros(80_000, dtype=torch.bool)
    mask[:100] = True
    assert 400 < Mask({"a": mask}, known=True).nbytes(tensors) < 400 + 250
    assert 10_400 < Mask({"a": mask}).nbytes(tensors) < 10_400 + 250


def test_a_mask_is_copied():
    mask = torch.tensor([True, False])
    codec = Mask({"a": mask})
    mask.fill_(True)
    assert codec.transmit({"a": torch.ones(2)})["a"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("mask", "tensors", "message"),
    [
        (torch.ones(3, dtype=torch.bool), {"a": torch.ones(4)}, r"tensor.*4"),
        (torch.ones(3, dtype=torch.bool), {"b": torch.ones(3)}, "no such floating-point tensor"),
        (torch.ones(3, dtype=torch.bool), {"a": torch.ones(3, dtype=torch.int64)}, "no such floating-point tensor"),
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_masks_that_do_not_fit_are_refused(mask, tensors, message, known):
    codec = Mask({"a": mask}, known)
    for method in (codec.encode, codec.nbytes, codec.transmit):
        with pytest.raises(ValueError, match=message):
            method(tensors)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Half("float8"), r"dtype.*'bfloat16'.*'float8'"),
        (lambda: TopK(), "exactly one of share and count"),
        (lambda: TopK(share=0.5, count=3), "exactly one of share and count"),
        (lambda: TopK(share=0.0), r"share.*0\.0"),
        (lambda: TopK(share=1.5), r"share.*1\.5"),
        (lambda: TopK(share=math.nan), "share must be .* but is nan"),
        (lambda: TopK(count=0), "count must be .* but is 0"),
        (lambda: TopK(count=2.0), r"count must be .* but is 2\.0"),
        (lambda: TopK(count=1, scope="layer"), r"scope.*'tensor'.*'layer'"),
        (lambda: RandomK(0), r"share.*0"),
        (lambda: RandomK(0.5, seed=2**63), r"seed.*-2"),
        (lambda: RandomK(0.5, seed=1.5), r"seed.*-2"),
        (lambda: Mask({"a": torch.ones(2)}), r"'a'.*torch\.float32"),
    ],
)
def test_arguments_out_of_range_are_refused(build, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build()
