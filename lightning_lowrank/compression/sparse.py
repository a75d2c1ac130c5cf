"""Sparse codecs, which send some numbers and decode the others as zeros: top-k, random-k and masks.

The codecs differ in how sender and receiver agree on the positions. A position is an index into all floating-point
tensors laid end to end.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from lightning_lowrank import seeding
from lightning_lowrank.arguments import check_choice, check_integer, check_number
from lightning_lowrank.compression.base import FloatingCodec, RandomCodec, check_feedback
from lightning_lowrank.compression.wire import DecodingError, Entry, Layout, join, pack_bits, packed_length, unpack_bits

MOST_NUMBERS_FOR_COUNT = 2**26

Scope = Literal["model", "tensor"]


class _Sparse(FloatingCodec[Tensor]):
    """Base of codecs that send the numbers at some positions; the codes are the positions, ascending or as drawn."""

    sparse = True

    @abstractmethod
    def _count(self, layout: Layout) -> int:
        """Number of values that the encoder sends."""

    @abstractmethod
    def _choose(self, flat: Tensor, layout: Layout) -> Tensor:
        """Positions of the values to send, on the device of ``flat``, the vector of all tensors' numbers."""

    def _values(self, flat: Tensor, positions: Tensor) -> Tensor:
        return flat[positions]

    def entries(self, layout: Layout, parts: Mapping[str, Tensor] | None = None) -> dict[str, Entry]:
        """One entry: the values sent, in the smallest type that holds the numbers of all tensors."""
        return {"values": (layout.dtype, (self._count(layout),))}

    def compress(self, tensors: Mapping[str, Tensor], layout: Layout) -> tuple[dict[str, Tensor], Tensor]:
        flat = layout.flatten(tensors)
        positions = self._choose(flat, layout)
        return {"values": self._values(flat, positions)}, positions

    def restore(self, values: Mapping[str, Tensor], codes: Tensor, layout: Layout) -> dict[str, Tensor]:
        flat = values["values"].new_zeros(sum(layout.numbers))
        flat[codes.to(flat.device)] = values["values"]
        return layout.unflatten(flat)


class TopK(_Sparse):
    """Send the numbers of largest magnitude and their positions; the others arrive as zeros.

    Of equal magnitudes the first ones are kept. NaN counts as infinite, so that the receiver sees it. Kept numbers are
    not changed. The values are sent in the smallest type that holds those of all floating-point tensors. The
    positions take k·(2 + log₂(d/k)) bits or fewer, for k of d numbers: they are an Elias-Fano code (Elias, J. ACM
    1974), or a bitmap of d bits if that is shorter. Integers and booleans travel exactly, and do not count.

    Args:
        share: Share of the numbers that is sent, above 0 and at most 1; it comes to at least one number.
        count: Instead of a share, how many numbers are sent; all, if there are fewer. The payload may then have at most
            2²⁶ numbers, since with a count, unlike with a share, the length of the bytes does not bound the size of
            the decoded tensors.
        scope: ``"model"``: the largest of all tensors together. ``"tensor"``: ``share`` or ``count`` holds within
            each tensor.
        error_feedback: Whether a `Channel` adds the compression error to the next message. Default False.

    Raises:
        TypeError: If ``share`` is not a number, or ``count`` not an integer.
        ValueError: If not exactly one of ``share`` and ``count`` is given, or one is out of its range, or ``scope`` is
            unknown.

    Example:
        >>> import torch
        >>> codec = TopK(count=2)
        >>> codec.decode(codec.encode({"weight": torch.tensor([1.0, -5.0]), "bias": torch.tensor([0.5, 2.0])}))
        {'weight': tensor([ 0., -5.]), 'bias': tensor([0., 2.])}
    """

    def __init__(
        self,
        share: float | None = None,
        count: int | None = None,
        scope: Scope = "model",
        *,
        error_feedback: bool = False,
    ) -> None:
        if (share is None) == (count is None):
            raise ValueError(
                f"{type(self).__name__}: exactly one of share and count must be given, but they are {share!r} and"
                f" {count!r}."
            )
        if share is not None:
            check_number("share", share, above=0, most=1)
        if count is not None:
            check_integer("count", count)
        check_choice("scope", scope, Scope)
        self.share, self.count, self.scope = share, count, scope
        self.error_feedback = error_feedback

    def _counts(self, layout: Layout) -> list[tuple[int, int]]:
        """For each group that is ranked separately, the number of values sent and the total."""
        totals = layout.numbers if self.scope == "tensor" else [sum(layout.numbers)]
        if self.share is not None:
            return [(_share_of(self.share, total), total) for total in totals]
        assert self.count is not None
        if sum(totals) > MOST_NUMBERS_FOR_COUNT:
            raise ValueError(
                f"the tensors have {sum(totals):,} numbers, but a TopK of a given count takes at most "
                f"{MOST_NUMBERS_FOR_COUNT:,}; give it a share instead."
            )
        return [(min(self.count, total), total) for total in totals]

    def _count(self, layout: Layout) -> int:
        return sum(count for count, _ in self._counts(layout))

    def _choose(self, flat: Tensor, layout: Layout) -> Tensor:
        counts = self._counts(layout)
        magnitudes = flat.abs().nan_to_num_(nan=math.inf, posinf=math.inf)
        groups = magnitudes.split([total for _, total in counts]) if counts else ()
        positions, start = [torch.empty(0, dtype=torch.int64, device=flat.device)], 0
        for (count, total), group in zip(counts, groups, strict=True):
            positions.append(start + _largest(group, count))
            start += total
        return torch.cat(positions)

    def lengths(self, layout: Layout, parts: Mapping[str, Tensor] | None = None) -> dict[str, int]:
        count, total = self._count(layout), sum(layout.numbers)
        low_bits = _low_bits(count, total)
        return {"positions": packed_length(total if low_bits is None else _code_bits(count, total, low_bits))}

    def pack(self, codes: Tensor, layout: Layout) -> dict[str, Tensor]:
        """The positions as an Elias-Fano code or a bitmap, whichever is shorter."""
        positions, count, total = codes.cpu(), codes.numel(), sum(layout.numbers)
        low_bits = _low_bits(count, total)
        if low_bits is None:
            return {"positions": pack_bits(_bits_at(positions, total))}
        high = _bits_at((positions >> low_bits) + torch.arange(count), _code_bits(count, total, low_bits))
        low = (positions[:, None] >> torch.arange(low_bits)) & 1
        high[high.numel() - low.numel() :] = low.reshape(-1).bool()
        return {"positions": pack_bits(high)}

    def unpack(self, parts: Mapping[str, Tensor], layout: Layout) -> Tensor:
        count, total = self._count(layout), sum(layout.numbers)
        low_bits = _low_bits(count, total)
        if low_bits is None:
            return _places(unpack_bits(parts["positions"], total), count)
        code = unpack_bits(parts["positions"], _code_bits(count, total, low_bits))
        high, low = code.tensor_split([code.numel() - count * low_bits])
        offsets = (low.reshape(count, low_bits) << torch.arange(low_bits)).sum(1)
        positions = ((_places(high, count) - torch.arange(count)) << low_bits) + offsets
        if (positions >= total).any() or (positions.diff() <= 0).any():
            raise DecodingError(f"the positions do not ascend, or go beyond the tensors' {total} numbers.")
        return positions


class RandomK(_Sparse, RandomCodec[Tensor]):
    """Send numbers at random positions, which the receiver draws from the same seed; the others arrive as zeros.

    The positions are a uniform choice from those of all floating-point tensors together. The values are sent in the
    smallest type that holds those of all floating-point tensors. Integers and booleans travel exactly, and do not
    count.

    Args:
        share: Share of the numbers that is sent, above 0 and at most 1; it comes to at least one number.
        seed: Seed of the positions, of at most 64 bits. It is sent with the numbers, in eight bytes, so a decoder may
            have any seed.
        unbiased: Whether the numbers sent are scaled by d/k, for k of d numbers, so that the decoded tensors
            equal the encoded ones in expectation over seeds (the uplink of EF21-P). In float16, this may overflow to
            infinity.
        error_feedback: Whether a `Channel` adds the compression error to the next message. Default False. With
            ``unbiased=True``, this diverges (`Codec.expands`).

    Raises:
        TypeError: If ``share`` is not a number.
        ValueError: If ``share`` or ``seed`` is out of its range, or ``unbiased`` and ``error_feedback`` are both given.

    Example:
        >>> import torch
        >>> codec = RandomK(share=0.5, seed=1)
        >>> received = codec.decode(codec.encode({"weight": torch.ones(6)}))["weight"]
        >>> int(received.sum())
        3
        >>> torch.equal(received, RandomK(share=0.5).decode(codec.encode({"weight": torch.ones(6)}))["weight"])
        True
    """

    def __init__(self, share: float, seed: int = 0, unbiased: bool = False, *, error_feedback: bool = False) -> None:
        check_number("share", share, above=0, most=1)
        super().__init__(seed)
        self.share, self.unbiased, self.error_feedback = share, unbiased, error_feedback
        self.expands = "RandomK scales the numbers up with unbiased=True; leave it out" if unbiased else ""
        check_feedback(self)

    def _count(self, layout: Layout) -> int:
        return _share_of(self.share, sum(layout.numbers))

    def _draw(self, seed: int, layout: Layout) -> Tensor:
        order = torch.randperm(sum(layout.numbers), generator=seeding.generator(seed, "random-k"))
        return order[: self._count(layout)]

    def _choose(self, flat: Tensor, layout: Layout) -> Tensor:
        return self._draw(self.seed, layout).to(flat.device)

    def _values(self, flat: Tensor, positions: Tensor) -> Tensor:
        values = flat[positions]
        return values * (flat.numel() / positions.numel()) if self.unbiased and positions.numel() else values

    def lengths(self, layout: Layout, parts: Mapping[str, Tensor] | None = None) -> dict[str, int]:
        return {"seed": 8}

    def pack(self, codes: Tensor, layout: Layout) -> dict[str, Tensor]:
        return {"seed": join([torch.tensor([self.seed])])}

    def unpack(self, parts: Mapping[str, Tensor], layout: Layout) -> Tensor:
        return self._draw(int(parts["seed"].view(torch.int64)), layout)


class Mask(_Sparse):
    """Send the numbers that a mask selects; the others arrive as zeros.

    A floating-point tensor without a mask is sent whole. The values are sent in the smallest type that holds those of
    all floating-point tensors. Integers and booleans travel exactly.

    Args:
        masks: By the name of a floating-point tensor, a mask of its shape, true for the numbers that are sent. Masks
            are copied.
        known: Whether the receiver has the masks; a decoder then needs the same ones. Otherwise the masks are sent
            too, one bit for each number of all floating-point tensors, and a decoder needs none.

    Raises:
        ValueError: If a mask is not boolean. When encoding, if there is a mask for a tensor that is not sent, is not of
            floating-point numbers, or has another shape.

    Example:
        >>> import torch
        >>> codec = Mask({"weight": torch.tensor([True, False, True])})
        >>> Mask().decode(codec.encode({"weight": torch.tensor([1.0, 2.0, 3.0])}))
        {'weight': tensor([1., 0., 3.])}
    """

    def __init__(self, masks: Mapping[str, Tensor] | None = None, known: bool = False) -> None:
        for name, mask in (masks or {}).items():
            if mask.dtype != torch.bool:
                raise ValueError(f"the mask of {name!r} must be of booleans, but is of type {mask.dtype}.")
        self.masks = {name: mask.clone() for name, mask in (masks or {}).items()}
        self.known = self.additive = known
        self._selected = {name: int(mask.sum()) for name, mask in self.masks.items()}

    def _count(self, layout: Layout) -> int:
        for name, mask in self.masks.items():
            _, shape = layout.floating.get(name, (None, None))
            if shape != tuple(mask.shape):
                what = "no such floating-point tensor" if shape is None else f"that tensor has shape {shape}"
                raise ValueError(f"there is a mask of shape {tuple(mask.shape)} for {name!r}, but {what}.")
        return sum(self._selected.get(name, total) for name, total in zip(layout.floating, layout.numbers, strict=True))

    def _mask(self, layout: Layout) -> Tensor:
        self._count(layout)
        rows = [
            self.masks[name].reshape(-1).cpu() if name in self.masks else torch.ones(total, dtype=torch.bool)
            for name, total in zip(layout.floating, layout.numbers, strict=True)
        ]
        return torch.cat(rows) if rows else torch.empty(0, dtype=torch.bool)

    def _choose(self, flat: Tensor, layout: Layout) -> Tensor:
        return self._mask(layout).nonzero().flatten().to(flat.device)

    def entries(self, layout: Layout, parts: Mapping[str, Tensor] | None = None) -> dict[str, Entry]:
        """One entry: the values that the mask, or the received mask, selects."""
        if self.known or parts is None:
            return super().entries(layout)
        return {"values": (layout.dtype, (int(unpack_bits(parts["mask"], sum(layout.numbers)).sum()),))}

    def lengths(self, layout: Layout, parts: Mapping[str, Tensor] | None = None) -> dict[str, int]:
        return {} if self.known else {"mask": packed_length(sum(layout.numbers))}

    def pack(self, codes: Tensor, layout: Layout) -> dict[str, Tensor]:
        return {} if self.known else {"mask": pack_bits(_bits_at(codes.cpu(), sum(layout.numbers)))}

    def unpack(self, parts: Mapping[str, Tensor], layout: Layout) -> Tensor:
        mask = self._mask(layout) if self.known else unpack_bits(parts["mask"], sum(layout.numbers))
        return mask.nonzero().flatten()


def _share_of(share: float, total: int) -> int:
    return max(1, round(share * total)) if total else 0


def _largest(magnitudes: Tensor, count: int) -> Tensor:
    """Ascending positions of the ``count`` largest numbers; among equal numbers, the first are chosen."""
    if count == magnitudes.numel():
        return torch.arange(count, device=magnitudes.device)
    threshold = magnitudes.topk(count, sorted=False).values.min()
    kept = magnitudes > threshold
    tied = (magnitudes == threshold).nonzero().flatten()
    kept[tied[: count - int(kept.sum())]] = True
    return kept.nonzero().flatten()


def _low_bits(count: int, total: int) -> int | None:
    """Number of low bits that an Elias-Fano code stores per position; ``None`` if a bitmap is at most as long.

    The code of ascending positions is a bit at place h + i for the high bits h of the i-th, and then their low bits.
    """
    low_bits = (total // count).bit_length() - 1 if count else 0
    return low_bits if count and _code_bits(count, total, low_bits) < total else None


def _code_bits(count: int, total: int, low_bits: int) -> int:
    return count + ((total - 1) >> low_bits) + count * low_bits


def _bits_at(places: Tensor, total: int) -> Tensor:
    bits = torch.zeros(total, dtype=torch.bool)
    bits[places] = True
    return bits


def _places(bits: Tensor, count: int) -> Tensor:
    """Indices of the set bits; a `DecodingError` unless there are ``count`` of them."""
    places = bits.nonzero().flatten()
    if places.numel() != count:
        raise DecodingError(f"the positions are {places.numel()}, but the tensors need {count}.")
    return places
