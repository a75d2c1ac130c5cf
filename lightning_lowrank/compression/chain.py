"""Chains of codecs, in which each codec compresses the floating-point values of the one before."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import Self

from lightning_lowrank.compression.base import Codec, FloatingCodec, Memory, check_feedback
from lightning_lowrank.compression.dense import Dense
from lightning_lowrank.compression.split import Split
from lightning_lowrank.compression.wire import Entry, Layout
from lightning_lowrank.seeding import derive_seed


class Chain(FloatingCodec[list[tuple[Layout, Any]]]):
    """Pass each codec's floating-point values through the next codec.

    The values are a sparse codec's numbers, the vectors of `LowRankCodec`, the scales of `Sign` and `Quantize`, and the
    rounded tensors of `Half`. The last codec's values are sent, and the codes of all: positions, masks, signs and
    levels. A chain of one codec writes that codec's bytes. The chain is unbiased if all its codecs are, and sparse if
    one is.

    Args:
        codecs: The codecs, the first one first. Only the first may have error feedback.

    Raises:
        TypeError: If a codec is not a `FloatingCodec` and so leaves no values to the next one.
        ValueError: If there are no codecs, or one that is not the first has error feedback, or the first has it and
            one of them `expands`.

    Example:
        >>> import torch
        >>> from lightning_lowrank.compression import Half, TopK
        >>> codec = Chain([TopK(count=1), Half("bfloat16")])
        >>> codec.transmit({"weight": torch.tensor([1.0, -5.001, 0.5])})
        {'weight': tensor([ 0., -5.,  0.])}
    """

    def __init__(self, codecs: Sequence[FloatingCodec[Any]]) -> None:
        if not codecs:
            raise ValueError("codecs must be at least one codec, but is empty; use Dense() to compress nothing.")
        for codec in codecs:
            if not isinstance(codec, FloatingCodec):
                raise TypeError(
                    f"codecs must be instances of FloatingCodec, such as TopK or Half, but one is {codec!r}, which "
                    "leaves no floating-point values to another codec."
                )
        self.codecs: list[FloatingCodec[Any]] = [
            part for codec in codecs for part in (codec.codecs if isinstance(codec, Chain) else [codec])
        ]
        for codec in self.codecs[1:]:
            if codec.error_feedback:
                raise ValueError(
                    f"{type(codec).__name__} has error_feedback=True, but comes after "
                    f"{type(self.codecs[0]).__name__}. Give error_feedback=True to the first codec, which then keeps "
                    "the loss of all codecs."
                )
        self.error_feedback = self.codecs[0].error_feedback
        self.unbiased = all(codec.unbiased for codec in self.codecs)
        self.sparse = any(codec.sparse for codec in self.codecs)
        self.one_magnitude = any(codec.one_magnitude for codec in self.codecs)
        self.additive = all(codec.additive for codec in self.codecs)
        self.adaptive = any(codec.adaptive for codec in self.codecs)
        self.expands = next((codec.expands for codec in self.codecs if codec.expands), "")
        check_feedback(self)
        self.values_part = _part(len(self.codecs) - 1, self.codecs[-1].values_part)

    def seeded(self, seed: int) -> Self:
        """A copy whose codecs have different seeds, the first one ``seed`` itself."""
        other = copy.copy(self)
        other.codecs = [
            codec.seeded(derive_seed(seed, "chain", place) if place else seed)
            for place, codec in enumerate(self.codecs)
        ]
        return other

    def started(self, memory: Memory) -> Self:
        other = copy.copy(self)
        other.codecs = [codec.started(memory.get(str(place), {})) for place, codec in enumerate(self.codecs)]
        return other

    def kept(self, codes: list[tuple[Layout, Any]]) -> Memory:
        kept = {
            str(place): codec.kept(code)
            for place, (codec, (_, code)) in enumerate(zip(self.codecs, codes, strict=True))
        }
        return {place: memory for place, memory in kept.items() if memory}

    def entries(self, layout: Layout, parts: Mapping[str, Tensor] | None = None) -> dict[str, Entry]:
        *_, (codec, layout, codec_parts) = self._stages(layout, parts)
        return codec.entries(layout, codec_parts)

    def lengths(self, layout: Layout, parts: Mapping[str, Tensor] | None = None) -> dict[str, int]:
        return {
            _part(place, name): length
            for place, (codec, stage, codec_parts) in enumerate(self._stages(layout, parts))
            for name, length in codec.lengths(stage, codec_parts).items()
        }

    def compress(
        self, tensors: Mapping[str, Tensor], layout: Layout
    ) -> tuple[dict[str, Tensor], list[tuple[Layout, Any]]]:
        """The last codec's values, and each codec's input layout and codes."""
        values, codes = dict(tensors), []
        for codec in self.codecs:
            values, code = codec.compress({name: values[name] for name in layout.floating}, layout)
            codes.append((layout, code))
            layout = Layout.of(values)
        return values, codes

    def restore(
        self, values: Mapping[str, Tensor], codes: list[tuple[Layout, Any]], layout: Layout
    ) -> dict[str, Tensor]:
        restored = dict(values)
        for codec, (stage, code) in zip(reversed(self.codecs), reversed(codes), strict=True):
            restored = codec.restore(restored, code, stage)
        return restored

    def pack(self, codes: list[tuple[Layout, Any]], layout: Layout) -> dict[str, Tensor]:
        return {
            _part(place, name): part
            for place, (codec, (stage, code)) in enumerate(zip(self.codecs, codes, strict=True))
            for name, part in codec.pack(code, stage).items()
        }

    def unpack(self, parts: Mapping[str, Tensor], layout: Layout) -> list[tuple[Layout, Any]]:
        return [
            (stage, codec.unpack(codec_parts or {}, stage)) for codec, stage, codec_parts in self._stages(layout, parts)
        ]

    def _stages(
        self, layout: Layout, parts: Mapping[str, Tensor] | None
    ) -> Iterator[tuple[FloatingCodec[Any], Layout, dict[str, Tensor] | None]]:
        """Yield each codec, its input layout and, in a decoder, its received parts, whose lengths are checked here."""
        for place, codec in enumerate(self.codecs):
            codec_parts = None
            if parts is not None:
                codec_parts = {name: parts[_part(place, name)] for name in codec.lengths(layout)}
                codec.check_lengths(codec_parts, codec.lengths(layout, codec_parts))
            yield codec, layout, codec_parts
            layout = Layout.grouped(codec.entries(layout, codec_parts))


def chained(codec: Codec, following: Sequence[FloatingCodec[Any]]) -> Codec:
    """A codec that passes the floating-point values of ``codec`` through the ``following`` codecs.

    Tensors that `Dense` encodes stay exact, also within a `Split`.

    Raises:
        TypeError: If one of the codecs cannot be part of a `Chain`.
    """
    if not following or isinstance(codec, Dense):
        return codec
    if isinstance(codec, Split):
        return Split(codec.names, chained(codec.chosen, following), chained(codec.others, following))
    return Chain([codec, *following])  # type: ignore[list-item]  # Chain refuses other codecs


def _part(place: int, name: str) -> str:
    return f"{place}.{name}" if place else name
