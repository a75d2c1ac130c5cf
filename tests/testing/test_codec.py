"""`check_codec` takes codecs that it does not know, and refuses those that break the contract."""

import copy
import math
import zlib

import pytest
import torch

from lightning_lowrank.compression import Codec, DecodingError, Dense, FloatingCodec, Half, RandomCodec, TopK
from lightning_lowrank.seeding import generator
from lightning_lowrank.testing import check_codec


class TernGrad(Codec):
    """Each number as -m, 0 or m, with the largest magnitude m: unbiased. Written on `Codec` alone."""

    unbiased = True

    def __init__(self, seed=0):
        self.seed = seed

    def seeded(self, seed):
        return type(self)(seed)

    def encode(self, tensors):
        draws, sent = generator(self.seed, "terngrad"), {}
        for name, tensor in tensors.items():
            sent["=" + name] = tensor
            if tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64) and tensor.numel():
                numbers = tensor.detach().cpu().double()
                scale = numbers.abs().max()
                kept = torch.rand(numbers.shape, generator=draws, dtype=torch.float64) < self.chance(
                    numbers.abs() / scale
                )
                kept = kept | ~scale.isfinite()
                sent["=" + name] = scale.to(tensor.dtype)
                sent["±" + name] = (torch.where(numbers < 0, -1, 1) * kept).to(torch.int8)
        return Dense().encode(sent)

    def chance(self, share):
        return share

    def decode(self, data):
        sent = Dense().decode(data)
        tensors = {}
        for name, tensor in sent.items():
            if name[:1] not in ("=", "±") or (name[:1] == "±" and "=" + name[1:] not in sent):
                raise DecodingError(f"{name!r} is no name that this codec writes.")
            if name[0] == "=":
                signs = sent.get("±" + name[1:])
                if signs is not None and (signs.dtype != torch.int8 or tensor.dim()):
                    raise DecodingError(f"{name!r} has no scale or no signs.")
                tensors[name[1:]] = tensor if signs is None else torch.where(signs == 0, 0, signs.to(tensor) * tensor)
        return tensors


class Checksum(Codec):
    """Dense, with a checksum: nothing but bytes in and bytes out."""

    unbiased = True

    def encode(self, tensors):
        data = Dense().encode(tensors)
        return zlib.crc32(data).to_bytes(4, "little") + data

    def decode(self, data):
        if zlib.crc32(data[4:]).to_bytes(4, "little") != data[:4]:
            raise DecodingError("the checksum is wrong.")
        return Dense().decode(data[4:])


class Dither(RandomCodec):
    """Round to 16 bits after adding noise: not unbiased, drawn, and a `FloatingCodec` without codes."""

    def entries(self, layout, parts=None):
        return {name: (torch.bfloat16, shape) for name, (_, shape) in layout.floating.items()}

    def compress(self, tensors, layout):
        draws = generator(self.seed, "dither")
        return {
            name: (tensor * (1 + 0.01 * torch.rand(tensor.shape, generator=draws).to(tensor))).bfloat16()
            for name, tensor in tensors.items()
        }, None

    def restore(self, values, codes, layout):
        return {name: values[name].to(dtype) for name, (dtype, _) in layout.floating.items()}


@pytest.mark.slow
@pytest.mark.parametrize("codec", [TernGrad(), Checksum(), Dither()])
def test_codecs_of_ones_own_pass(codec):
    check_codec(codec, draws=30)


class Longer(Checksum):
    def nbytes(self, tensors):
        return super().nbytes(tensors) + 1


class NeedsValues(Checksum):
    def nbytes(self, tensors):
        return len(self.encode(tensors))


class SendsMore(Half):
    def transmit(self, tensors):
        return {name: tensor.detach() for name, tensor in tensors.items()}


class RoundsIntegers(Checksum):
    def encode(self, tensors):
        return super().encode({name: self.rounded(tensor) for name, tensor in tensors.items()})

    def rounded(self, tensor):
        return tensor.double().to(torch.int64) if tensor.dtype == torch.int64 else tensor


class ForgetsTypes(Checksum):
    def decode(self, data):
        return {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in super().decode(data).items()
        }


class Flattens(Checksum):
    def decode(self, data):
        return {name: tensor.flatten() for name, tensor in super().decode(data).items()}


class Reorders(Checksum):
    def transmit(self, tensors):
        return dict(reversed(super().transmit(tensors).items()))


class LosesATensor(Checksum):
    def decode(self, data):
        return {name: tensor for name, tensor in super().decode(data).items() if tensor.numel()}


class WritesIntoTheMessage(Half):
    def compress(self, tensors, layout):
        for tensor in tensors.values():
            tensor.mul_(0.5)
        return super().compress(tensors, layout)


class KeepsGradients(Checksum):
    def transmit(self, tensors):
        return dict(tensors)


class Hides(Half):
    def compress(self, tensors, layout):
        return super().compress({name: tensor.nan_to_num(0, 0, 0) for name, tensor in tensors.items()}, layout)


class RaisesKeyErrors(Checksum):
    def decode(self, data):
        return Dense().decode(data[4:]) if data[4:5] else {}["nothing"]


class TakesMore(Checksum):
    def decode(self, data):
        return super().decode(data[:-1] if data[-1:] == b"\0" and self.longer(data) else data)

    def longer(self, data):
        return zlib.crc32(data[4:-1]).to_bytes(4, "little") == data[:4]


class DrawsGlobally(Dither):
    def compress(self, tensors, layout):
        return {name: (tensor + torch.rand_like(tensor)).bfloat16() for name, tensor in tensors.items()}, None


class SeedsItself(Dither):
    def seeded(self, seed):
        self.seed = seed
        return self


class DecoderDraws(Dither):
    def restore(self, values, codes, layout):
        draws = generator(self.seed, "decoder")
        return {
            name: (values[name] + torch.rand(values[name].shape, generator=draws)).to(dtype)
            for name, (dtype, _) in layout.floating.items()
        }


class ClaimsTooMuch(TopK):
    unbiased = True


class RoundsDown(Half):
    """A bias of a thousandth of each number."""

    unbiased = True

    def compress(self, tensors, layout):
        return super().compress({name: tensor * 0.998 for name, tensor in tensors.items()}, layout)


class TwicesTheChance(TernGrad):
    def chance(self, share):
        return 1.3 * share


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (Longer(), "nbytes is .*, but the encoding has"),
        (NeedsValues(), "nbytes of meta tensors raises"),
        (SendsMore(), "transmit and decode.* differ in 'weight'"),
        (RoundsIntegers(), "'steps', which is of torch.int64 and must arrive exactly"),
        (ForgetsTypes(), "gives 'weight' as torch.float32, not torch.float16"),
        (Flattens(), r"'weight' in shape \(1200,\), not \(40, 30\)"),
        (Reorders(), "transmit gives .*'bias', 'weight'"),
        (LosesATensor(), "decode gives .*, not .*'empty'"),
        (WritesIntoTheMessage(), "changes the tensors that it is given"),
        (KeepsGradients(), "gives 'parameter' with a gradient"),
        (Hides(), "is nan throughout, but arrives as finite numbers"),
        (RaisesKeyErrors(), "decode raises KeyError"),
        (TakesMore(), "bytes and one more"),
        (DrawsGlobally(), "transmit and decode.* differ|encoding twice"),
        (SeedsItself(), "seeded changes the codec itself"),
        (DecoderDraws(), "depends on the decoder's seed"),
        (ClaimsTooMuch(0.3), "claims to be unbiased"),
        (RoundsDown(), "claims to be unbiased"),
        (TwicesTheChance(), "claims to be unbiased"),
    ],
)
def test_broken_codecs_are_found(codec, message):
    with pytest.raises(AssertionError, match=message):
        check_codec(codec)


def test_an_error_names_the_message():
    codec = copy.copy(Half())
    messages = {"mine": {"a": torch.tensor([1.0, math.nan])}}
    check_codec(codec, messages)
    with pytest.raises(AssertionError, match="message 'mine'"):
        check_codec(Hides(), messages)
    assert issubclass(Hides, FloatingCodec)
