"""`check_codec`: the contract that every codec must keep."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_lowrank.compression import Codec, DecodingError
from lightning_lowrank.testing.require import require

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LARGEST_DECODED = 2**26


def check_codec(codec: Codec, messages: Mapping[str, Mapping[str, Tensor]] | None = None, *, draws: int = 200) -> None:
    """Raise an `AssertionError` if a codec breaks the contract of `Codec`.

    The contract, for every message:

    - ``decode`` gives the names, types and shapes that ``encode`` was given, in any order, without gradients.
    - ``transmit`` gives the same bit for bit, in the message's order, on the tensors' own devices. Only NaNs may have
      other bits, as they do on another device.
    - ``nbytes`` is the length of the encoding. It needs no values: tensors on the meta device have the same, or at
      least half of it if ``adaptive`` is True.
    - Tensors that are not of 16-, 32- or 64-bit floating-point numbers arrive exactly.
    - The message is left unchanged.
    - A codec encodes a message to the same bytes each time, and so does a copy of it with the same seed. ``seeded``
      leaves the codec itself unchanged. A codec of any seed decodes the bytes.
    - A tensor of NaN or infinities does not arrive as finite numbers, unless a tensor of ones arrives as zeros.
    - Truncated and extended bytes are refused with a `DecodingError`. Other bytes that are no encoding are refused in
      the same way, or decode to tensors that are not large.
    - If ``unbiased`` is True, the decoded tensors' mean over seeds is the message.
    - If ``additive`` is True, the decoded sum of two messages is the sum of the decoded messages.

    Args:
        codec: The codec.
        messages: Messages by a name that errors mention. Default: a set with all kinds of types and shapes. A codec
            that suits certain tensors only is given messages of these.
        draws: How many seeds the check of unbiasedness takes. Default 200.

    Raises:
        AssertionError: If the codec breaks the contract. The error names the message and the fault.

    Example:
        >>> from lightning_lowrank.compression import Half
        >>> check_codec(Half())
    """
    for name, tensors in (_messages() if messages is None else messages).items():
        where = f"message {name!r}"
        try:
            _check_arrival(codec, tensors)
            _check_size(codec, tensors)
            _check_seeds(codec, tensors)
            _check_finiteness(codec, tensors)
            _check_robustness(codec, tensors, random.Random(where))
            if codec.unbiased:
                _check_mean(codec, tensors, draws)
            if codec.additive:
                _check_sum(codec, tensors)
            if torch.cuda.is_available():
                where += " on cuda"
                _check_arrival(codec, {name: tensor.cuda() for name, tensor in tensors.items()})
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from error


def _check_arrival(codec: Codec, tensors: Mapping[str, Tensor]) -> None:
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    decoded = codec.decode(codec.encode(tensors))
    require(decoded.keys() == tensors.keys(), f"decode gives {sorted(decoded)}, not {sorted(tensors)}")
    received = codec.transmit(tensors)
    require(_same(tensors, before), "encode or transmit changes the tensors that it is given")
    require(list(received) == list(tensors), f"transmit gives {list(received)}, not {list(tensors)}")
    for name, tensor in tensors.items():
        for what, got, device in (
            ("decode", decoded[name], torch.device("cpu")),
            ("transmit", received[name], tensor.device),
        ):
            require(got.dtype == tensor.dtype, f"{what} gives {name!r} as {got.dtype}, not {tensor.dtype}")
            require(
                got.shape == tensor.shape,
                f"{what} gives {name!r} in shape {tuple(got.shape)}, not {tuple(tensor.shape)}",
            )
            require(got.device == device, f"{what} gives {name!r} on {got.device}, not {device}")
            require(not got.requires_grad, f"{what} gives {name!r} with a gradient")
            require(
                tensor.dtype in _FLOATING or _equal(got, tensor),
                f"{what} changes {name!r}, which is of {tensor.dtype} and must arrive exactly",
            )
        require(_equal(received[name], decoded[name]), f"transmit and decode(encode(...)) differ in {name!r}")


def _check_size(codec: Codec, tensors: Mapping[str, Tensor]) -> None:
    length = len(codec.encode(tensors))
    meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    for what, given in (("nbytes", tensors), ("nbytes of meta tensors", meta)):
        try:
            claimed = codec.nbytes(given)
        except Exception as error:
            raise AssertionError(f"{what} raises {error!r}") from error
        fits = claimed == length or (codec.adaptive and given is meta and 2 * claimed >= length)
        require(fits, f"{what} is {claimed}, but the encoding has {length} bytes")


def _check_seeds(codec: Codec, tensors: Mapping[str, Tensor]) -> None:
    data = codec.encode(tensors)
    require(codec.encode(tensors) == data, "encoding twice gives different bytes")
    first, second, other = codec.seeded(1), codec.seeded(1), codec.seeded(2)
    seeded = first.encode(tensors)
    require(seeded == second.encode(tensors), "two copies of one seed give different bytes")
    require(codec.encode(tensors) == data, "seeded changes the codec itself")
    received = first.transmit(tensors)
    for decoder in (codec, other):
        require(_same(decoder.decode(seeded), received), "decoding depends on the decoder's seed")


def _check_finiteness(codec: Codec, tensors: Mapping[str, Tensor]) -> None:
    ones = codec.transmit(_filled(tensors, 1.0))
    arrives = [name for name, tensor in ones.items() if tensor.dtype in _FLOATING and tensor.any()]
    for value in (math.nan, math.inf, -math.inf):
        received = codec.transmit(_filled(tensors, value))
        for name in arrives:
            require(
                not bool(received[name].isfinite().all()),
                f"{name!r} is {value} throughout, but arrives as finite numbers",
            )


def _check_robustness(codec: Codec, tensors: Mapping[str, Tensor], rng: random.Random) -> None:
    data = codec.encode(tensors)
    lengths = {0, 1, 7, 8, 9, len(data) - 8, len(data) - 1, *(rng.randrange(len(data)) for _ in range(9) if data)}
    for length in sorted(length for length in lengths if 0 <= length < len(data)):
        require(not _decodes(codec, data[:length]), f"decode accepts {length} of {len(data)} bytes")
    require(not _decodes(codec, data + b"\0"), f"decode accepts {len(data)} bytes and one more")
    for _ in range(100):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8)) if data else 0):
            # Mostly in the first bytes, where codecs write names and shapes.
            end = len(data) if rng.random() < 0.3 else min(400, len(data))
            changed[rng.randrange(end)] ^= 1 << rng.randrange(8)
        _decodes(codec, bytes(changed))
        _decodes(codec, rng.randbytes(rng.randrange(64)))


def _decodes(codec: Codec, data: bytes) -> bool:
    """Whether the bytes can be decoded; any outcome but tensors or a `DecodingError` breaks the contract."""
    try:
        decoded = codec.decode(data)
    except DecodingError:
        return False
    except Exception as error:
        raise AssertionError(f"decode raises {error!r} for bytes that are no encoding") from error
    require(
        all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in decoded.items()),
        "decode returns something else than named tensors for bytes that are no encoding",
    )
    size = sum(tensor.nbytes for tensor in decoded.values())
    require(size <= _LARGEST_DECODED, f"{len(data)} bytes that are no encoding decode to {size} bytes")
    return True


def _check_mean(codec: Codec, tensors: Mapping[str, Tensor], draws: int) -> None:
    """Compare means of random sums of all numbers, which are about normal even if few numbers are sent at a time."""
    sent = _numbers(tensors)
    if not (sent.numel() and sent.isfinite().all()):
        return
    signs = torch.randint(0, 2, (8, sent.numel()), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    directions = torch.cat([signs.double(), torch.ones(1, sent.numel(), dtype=torch.float64), sent.sign()[None]])
    precision = torch.cat(
        [torch.full((tensor.numel(),), torch.finfo(tensor.dtype).eps) for tensor in _floating(tensors)]
    ).double()
    errors, magnitude = [], sent.abs()
    for seed in range(draws):
        received = _numbers(codec.seeded(seed).transmit(tensors))
        magnitude = magnitude + received.abs() / draws
        errors.append(directions @ (received - sent))
    spread, mean = torch.std_mean(torch.stack(errors), dim=0)
    # Six standard errors, and the error of rounding to the tensors' own types.
    allowed = 6 * spread / math.sqrt(draws) + (precision * magnitude).sum()
    require(
        bool((mean.abs() <= allowed).all()),
        f"the codec claims to be unbiased, but the mean over {draws} seeds is not what was sent: a "
        f"combination of its numbers is off by {float((mean.abs() - allowed).max()):.3g} more than chance allows",
    )


def _check_sum(codec: Codec, tensors: Mapping[str, Tensor]) -> None:
    ones = {name: tensor for name, tensor in tensors.items() if tensor.dtype in _FLOATING}
    others = {name: tensor.detach().reshape(-1).roll(1).reshape(tensor.shape) for name, tensor in ones.items()}
    first, second = codec.transmit(ones), codec.transmit(others)
    together = codec.transmit({name: tensor.detach() + others[name] for name, tensor in ones.items()})
    require(
        _same(together, {name: tensor + second[name] for name, tensor in first.items()}),
        "the codec claims to be additive, but the decoded sum is not the sum of the decoded messages",
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, on any devices; all NaNs count as equal."""
    return one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    numbers = tensor.detach().cpu().reshape(-1).contiguous()
    if numbers.dtype in _FLOATING:
        numbers = numbers.masked_fill(numbers.isnan(), math.nan)
    return numbers.view(torch.uint8)


def _same(ones: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return ones.keys() == others.keys() and all(_equal(ones[name], others[name]) for name in ones)


def _floating(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return [tensor.detach() for tensor in tensors.values() if tensor.dtype in _FLOATING]


def _numbers(tensors: Mapping[str, Tensor]) -> Tensor:
    rows = [tensor.cpu().double().reshape(-1) for tensor in _floating(tensors)]
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.float64)


def _filled(tensors: Mapping[str, Tensor], value: float) -> dict[str, Tensor]:
    return {
        name: torch.full_like(tensor, value, requires_grad=False) if tensor.dtype in _FLOATING else tensor
        for name, tensor in tensors.items()
    }


def _messages() -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "float32": {"weight": draw(40, 30), "bias": draw(301)},
        "float16": {"weight": draw(3, 4).half(), "bias": draw(9).half()},
        "bfloat16": {"weight": draw(3, 4).bfloat16()},
        "float64": {"weight": draw(5, 2).double()},
        "mixed": {
            "steps": torch.tensor(2**62 + 1),
            "half": draw(7).half(),
            "empty": torch.zeros(0, 3),
            "flag": torch.tensor([True, False, True]),
            "weight": draw(5, 3),
            "brain": draw(4).bfloat16(),
            "bytes": torch.arange(5, dtype=torch.uint8),
        },
        "one number": {"weight": torch.tensor(1.5)},
        "no numbers": {"weight": torch.zeros(0, 3)},
        "nothing": {},
        "zeros": {"weight": torch.zeros(20)},
        "views": {"transposed": draw(3, 4).T, "parameter": torch.nn.Parameter(draw(3))},
        "tied": dict.fromkeys(("weight", "same"), draw(2, 5)),
        "odd names": {"": draw(2), 'a "b"\n\\ü': draw(3), "values": draw(2), "0.weight": draw(2)},
        "not finite": {"weight": torch.tensor([1.0, math.nan, -math.inf, 2.0, math.inf]), "bias": draw(3)},
    }
