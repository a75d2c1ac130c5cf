"""Chains: what one codec leaves passes the next."""

import json
import math

import pytest
import torch

from lightning_lowrank.compression import Chain, DecodingError, Dense, Half, Mask, Quantize, RandomK, Sign, Split, TopK
from lightning_lowrank.compression.chain import chained
from lightning_lowrank.seeding import derive_seed
from tests.helpers import draw

TENSORS = {"weight": draw(30, 10), "bias": draw(10, seed=1).double(), "half": draw(7).half(), "steps": torch.tensor(3)}
MASK = {"weight": draw(30, 10, seed=2) < 0}


@pytest.mark.parametrize(
    "codec",
    [Half(), TopK(0.1), TopK(count=4), RandomK(0.2, 5, True), Sign(), Mask(MASK), Mask(MASK, True), Quantize(4)],
)
def test_a_chain_of_one_writes_its_bytes(codec):
    assert Chain([codec]).encode(TENSORS) == codec.encode(TENSORS)
    assert Chain([codec]).seeded(3).encode(TENSORS) == codec.seeded(3).encode(TENSORS)
    assert Chain([codec]).unbiased == codec.unbiased


def parts_of(data):
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items()}


def test_the_parts_of_each_codec_travel():
    tensors = {"weight": draw(40, 25)}
    sizes = parts_of(Chain([TopK(0.1), Quantize(4, bucket_size=10), Half()]).encode(tensors))
    alone = parts_of(TopK(0.1).encode(tensors))
    assert sizes.pop("layout") == alone["layout"]
    # 100 values in 4 bits each, and ten scales in 16 bits.
    assert sizes == {"positions": alone["positions"], "1.levels": 50, "2.values": 20}


def test_a_chain_is_its_codecs_one_after_another():
    tensors = {"weight": draw(40, 25)}
    kept = TopK(0.1).transmit(tensors)["weight"]
    assert torch.equal(Chain([TopK(0.1), Half()]).transmit(tensors)["weight"], kept.half().float())
    # The scale of each tensor's signs, rounded.
    signs = Sign().transmit(tensors)["weight"]
    assert torch.equal(Chain([Sign(), Half()]).transmit(tensors)["weight"], signs.half().float())
    # Sign on the 100 values that top-k leaves.
    scale = kept[kept != 0].abs().mean()
    assert torch.allclose(Chain([TopK(0.1), Sign()]).transmit(tensors)["weight"], kept.sign() * scale)


def test_a_mask_that_travels_tells_the_decoder_how_many_values_follow():
    data = Chain([Mask(MASK), TopK(0.5), Half()]).encode(TENSORS)
    expected = Chain([Mask(MASK), TopK(0.5), Half()]).transmit(TENSORS)
    for name, tensor in Chain([Mask(), TopK(0.5), Half()]).decode(data).items():
        assert torch.equal(tensor, expected[name])
    with pytest.raises(DecodingError, match="'positions'"):
        Chain([Mask(), TopK(0.1), Half()]).decode(data)


def test_codecs_draw_from_seeds_of_their_own():
    chain = Chain([RandomK(0.5), Quantize(), RandomK(0.5)]).seeded(7)
    assert [codec.seed for codec in chain.codecs] == [7, derive_seed(7, "chain", 1), derive_seed(7, "chain", 2)]
    split = Split(["weight"], Quantize(), RandomK(0.5)).seeded(7)
    assert (split.chosen.seed, split.others.seed) == (derive_seed(7, "chosen"), 7)
    assert Half().seeded(7).encode(TENSORS) == Half().encode(TENSORS)


def test_chains_in_chains_are_one_chain():
    nested, flat = Chain([Chain([TopK(0.5), Half()]), Sign()]), Chain([TopK(0.5), Half(), Sign()])
    assert nested.encode(TENSORS) == flat.encode(TENSORS)


@pytest.mark.slow
def test_a_chain_of_unbiased_codecs_is_unbiased():
    assert Chain([RandomK(0.5, unbiased=True), Quantize()]).unbiased
    assert not Chain([RandomK(0.5), Quantize()]).unbiased
    tensors, draws = {"a": draw(12)}, 500
    chain = Chain([RandomK(0.5, unbiased=True), Quantize(4)])
    total = sum(chain.seeded(seed).transmit(tensors)["a"].double() for seed in range(draws))
    assert (total / draws - tensors["a"]).abs().max() < 4.5 * tensors["a"].abs().max() * math.sqrt(1.1 / draws)


def test_a_chain_or_a_split_is_sparse_if_one_codec_is():
    for sparse in (TopK(0.1), RandomK(0.1), Mask(MASK)):
        for one, other in ((sparse, Half()), (Half(), sparse)):
            assert Chain([one, other]).sparse
            assert Split(["bias"], one, other).sparse
    assert not Chain([Half(), Quantize()]).sparse
    assert not Split(["bias"], Dense(), Sign()).sparse


def test_a_decoder_reserves_no_memory_for_lengths_that_it_does_not_believe():
    layout = b'{"float32":{"a":[%d]}}' % 2**50
    parts = {"layout": layout, "seed": bytes(8), "1.levels": bytes(4), "1.scales": bytes(4)}
    header, start = {}, 0
    for name, part in parts.items():
        header[name] = {"dtype": "U8", "shape": [len(part)], "data_offsets": [start, start + len(part)]}
        start += len(part)
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + b"".join(parts.values())
    with pytest.raises(DecodingError, match=r"'levels'.*length.*4"):
        Chain([RandomK(0.5), Quantize()]).decode(data)


def test_what_cannot_be_a_chain_is_refused():
    with pytest.raises(ValueError, match="at least one codec"):
        Chain([])
    with pytest.raises(TypeError, match="FloatingCodec"):
        Chain([Half(), Dense()])
    with pytest.raises(ValueError, match=r"error_feedback=True.*TopK"):
        Chain([TopK(0.1), Half(error_feedback=True)])
    assert Chain([TopK(0.1, error_feedback=True), Half()]).error_feedback


def test_what_a_split_sends_exactly_stays_exact():
    own = Split(["bias"], Dense(), TopK(0.2))
    codec = chained(own, [Half()])
    assert codec.encode(TENSORS) == Split(["bias"], Dense(), Chain([TopK(0.2), Half()])).encode(TENSORS)
    assert chained(own, []) is own
    assert chained(Dense(), [Half()]).encode(TENSORS) == Dense().encode(TENSORS)
