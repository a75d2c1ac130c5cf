"""The interface of codecs, and the base class of compressing codecs."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self, override

from lightning_lowrank.arguments import Configured
from lightning_lowrank.compression.wire import (
    DecodingError,
    Entry,
    Layout,
    Schema,
    encoded_length,
    entry_bytes,
    join,
    read,
    split,
    write,
)

Codes = TypeVar("Codes")

Memory = Mapping[str, Any]
"""A codec's memory, which a sender keeps for its next message: tensors by name, in dictionaries."""


class Codec(Configured, ABC):
    """An encoding of named tensors as bytes, exact or lossy.

    Names, types and shapes travel with the numbers. A decoder is a codec that was built with the same arguments. It
    needs nothing else but the bytes, not even the seed of a codec that draws random numbers. A decoder of untrusted
    bytes is given a `Schema` as well.

    Attributes:
        unbiased: Whether the decoded tensors equal the encoded ones in expectation over seeds. Default False.
        error_feedback: Whether a `Channel` that starts with this codec keeps the compression error and adds it to the
            next message. The codec by itself ignores it. Default False.
        sparse: Whether the numbers or directions that are not sent arrive as zeros. Default False.
        one_magnitude: Whether all numbers of a tensor arrive with one magnitude. Default False.
        additive: Whether the decoded sum of messages is the sum of the decoded messages. This holds if each number
            arrives exactly, or as zero at positions that sender and receiver both know. Default False.
        expands: Why the compression error may exceed the message, so that error feedback would diverge, and what to use
            instead. Default: empty, because the error is never larger.
        adaptive: Whether the length of the encoding depends on the numbers. `nbytes` of meta tensors is then about the
            largest length, and at least half of any. Default False.
    """

    unbiased: bool = False
    error_feedback: bool = False
    sparse: bool = False
    one_magnitude: bool = False
    additive: bool = False
    expands: str = ""
    adaptive: bool = False

    @abstractmethod
    def encode(self, tensors: Mapping[str, Tensor]) -> bytes:
        """The bytes that cross the wire for ``tensors``."""

    @abstractmethod
    def decode(self, data: bytes, schema: Schema | None = None) -> dict[str, Tensor]:
        """The named tensors, on the CPU, that ``data`` encodes.

        Args:
            data: The bytes.
            schema: Names, types and shapes of the tensors, which are compared with those that the bytes claim
                before memory of that size is allocated. Default: all are accepted.

        Raises:
            DecodingError: If no codec of these arguments writes such bytes, or the tensors do not fit ``schema``.
        """

    def nbytes(self, tensors: Mapping[str, Tensor]) -> int:
        """Length in bytes of ``encode(tensors)``.

        It follows from names, types and shapes, so that meta tensors will do, unless the codec is `adaptive`.
        """
        zeros = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
        return len(self.encode(zeros))

    def transmit(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The result of ``decode(encode(tensors))``, bit for bit, on the tensors' own devices.

        No gradient flows through the result. Tensors that a codec leaves unchanged may share memory with the given
        ones.
        """
        decoded = self.decode(self.encode(tensors))
        return {name: decoded[name].to(tensor.device) for name, tensor in tensors.items()}

    def transmit_and_keep(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Memory]:
        """The result of `transmit`, and the memory to pass to `started` for the sender's next message."""
        return self.transmit(tensors), {}

    @classmethod
    def transmit_together(
        cls, senders: Sequence[Self], messages: Sequence[Mapping[str, Tensor]]
    ) -> list[tuple[dict[str, Tensor], Memory]]:
        """The results of `transmit_and_keep` for several senders' messages, each equal to its own to rounding.

        Args:
            senders: The codec of each sender, `seeded` and `started`. They have the same arguments otherwise.
            messages: The tensors of each sender.
        """
        return [sender.transmit_and_keep(tensors) for sender, tensors in zip(senders, messages, strict=True)]

    def started(self, memory: Memory) -> Self:
        """A copy for the sender's next message, which continues from ``memory``; the codec itself if it has no memory.

        A decoder needs no memory. A codec that was not started encodes a sender's first message.
        """
        return self

    def seeded(self, seed: int) -> Self:
        """A copy that draws its random numbers from ``seed``; the codec itself if it draws none.

        Args:
            seed: A whole number from -2**63 to 2**63 - 1.

        Raises:
            ValueError: If the codec draws and ``seed`` is out of range.
        """
        return self


def check_feedback(codec: Codec) -> None:
    """Raise a ``ValueError`` for error feedback around a codec whose compression error may exceed the message."""
    if codec.error_feedback and codec.expands:
        raise ValueError(f"error_feedback=True diverges if the loss may exceed the message: {codec.expands}.")


class FloatingCodec(Codec, Generic[Codes]):
    """Base class of codecs that compress tensors of 16-, 32- or 64-bit floating-point numbers.

    Such tensors become floating-point values, which another codec may compress further, and codes (positions, signs,
    levels), which are final. Integers, booleans and every other type travel exactly. A subclass implements `compress`
    and `restore`, and states in `entries` which floating-point values `compress` returns. If it also returns codes, it
    implements `lengths`, `pack` and `unpack`. Encoding, decoding, sizes and chains (`Chain`) follow from these.

    A decoder compares the length of every received part with `lengths` and `entries` before it allocates anything.
    The decoded tensors are therefore no larger than the bytes and the codec's arguments allow.

    Attributes:
        values_part: The name of the values in the encoding. Default ``"values"``.

    Example:
        >>> class EverySecond(FloatingCodec[None]):  # each number also replaces the next one
        ...     def entries(self, layout, parts=None):
        ...         sizes = zip(layout.floating.items(), layout.numbers)
        ...         return {name: (dtype, ((count + 1) // 2,)) for (name, (dtype, _)), count in sizes}
        ...     def compress(self, tensors, layout):
        ...         return {name: tensor.flatten()[::2] for name, tensor in tensors.items()}, None
        ...     def restore(self, values, codes, layout):
        ...         return {
        ...             name: values[name].repeat_interleave(2)[:count].reshape(shape)
        ...             for (name, (_, shape)), count in zip(layout.floating.items(), layout.numbers)
        ...         }
        >>> codec = EverySecond()
        >>> codec.decode(codec.encode({"weight": torch.tensor([1.0, 1.1, 3.0])}))
        {'weight': tensor([1., 1., 3.])}
    """

    values_part: str = "values"

    @abstractmethod
    def entries(self, layout: Layout, parts: Mapping[str, Tensor] | None = None) -> dict[str, Entry]:
        """Types and shapes of the floating-point values that `compress` returns, under names of the codec's choice.

        Args:
            layout: Types and shapes of the tensors.
            parts: In a decoder, the received codes, whose lengths have been checked.

        Raises:
            ValueError: If the codec cannot compress tensors of this layout.
        """

    @abstractmethod
    def compress(self, tensors: Mapping[str, Tensor], layout: Layout) -> tuple[dict[str, Tensor], Codes]:
        """The values, in the order of `entries`, and the codes of the floating-point ``tensors``."""

    @abstractmethod
    def restore(self, values: Mapping[str, Tensor], codes: Codes, layout: Layout) -> dict[str, Tensor]:
        """Rebuild the floating-point tensors from values and codes, on the device of the values."""

    def lengths(self, layout: Layout, parts: Mapping[str, Tensor] | None = None) -> dict[str, int]:
        """Length in bytes of every part that `pack` returns.

        Args:
            layout: Types and shapes of the tensors.
            parts: In a decoder, the received parts, whose lengths have not been checked.

        Raises:
            ValueError: If the codec cannot compress tensors of this layout.
        """
        return {}

    def pack(self, codes: Codes, layout: Layout) -> dict[str, Tensor]:
        """The codes as named parts, each a flat tensor of bytes on the CPU."""
        return {}

    def unpack(self, parts: Mapping[str, Tensor], layout: Layout) -> Codes:
        """Inverse of `pack`, for parts whose lengths have been checked.

        Raises:
            DecodingError: If `pack` never returns such parts.
        """
        return None  # type: ignore[return-value]  # a codec without codes

    def kept(self, codes: Codes) -> Memory:
        """The memory to pass to `started` for the sender's next message."""
        return {}

    @override
    def encode(self, tensors: Mapping[str, Tensor]) -> bytes:
        layout = Layout.of(tensors)
        values, codes = self.compress(_floating(tensors, layout), layout)
        exact = join([tensors[name] for name in layout.exact])
        packed = {self.values_part: join(list(values.values())), **self.pack(codes, layout)}
        return write(layout, {"exact": exact, **packed})

    @override
    def decode(self, data: bytes, schema: Schema | None = None) -> dict[str, Tensor]:
        layout, parts = read(data, schema)
        try:
            lengths = {"exact": entry_bytes(layout.exact), **self.lengths(layout, parts)}
            self.check_lengths(parts, lengths)
            entries = self.entries(layout, parts)
        except DecodingError:
            raise
        except ValueError as error:
            raise DecodingError(f"the bytes do not fit this {type(self).__name__}: {error}") from error
        lengths[self.values_part] = entry_bytes(entries)
        self.check_lengths(parts, {**dict.fromkeys(parts, 0), **lengths})
        exact = split(parts["exact"], layout.exact)
        values = split(parts[self.values_part], entries)
        floating = self.restore(values, self.unpack(parts, layout), layout)
        return {name: floating[name] if name in floating else exact[name] for name in layout.entries}

    @override
    def nbytes(self, tensors: Mapping[str, Tensor]) -> int:
        layout, parts = Layout.of(tensors), None
        if self.adaptive and not any(tensor.is_meta for tensor in tensors.values()):
            parts = self.pack(self.compress(_floating(tensors, layout), layout)[1], layout)
        lengths = {self.values_part: entry_bytes(self.entries(layout, parts)), **self.lengths(layout, parts)}
        return encoded_length(layout, {"exact": entry_bytes(layout.exact), **lengths})

    @override
    def transmit(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.transmit_and_keep(tensors)[0]

    @override
    def transmit_and_keep(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Memory]:
        layout = Layout.of(tensors)
        values, codes = self.compress(_floating(tensors, layout), layout)
        received = self.restore(values, codes, layout)
        arrived = {name: received.get(name, tensor.detach()).to(tensor.device) for name, tensor in tensors.items()}
        return arrived, self.kept(codes)

    def check_lengths(self, parts: Mapping[str, Tensor], lengths: Mapping[str, int]) -> None:
        """Raise a `DecodingError` for a received part of a wrong length."""
        for name in sorted(lengths):
            if parts[name].numel() != lengths[name]:
                raise DecodingError(
                    f"the part {name!r} of the bytes has length {parts[name].numel()}, but the tensors they name "
                    f"need {lengths[name]} in this {type(self).__name__}."
                )


class RandomCodec(FloatingCodec[Codes]):
    """Base class of compressing codecs that draw random numbers.

    Args:
        seed: Seed of the draws, from -2**63 to 2**63 - 1.

    Raises:
        ValueError: If ``seed`` is out of its range.
    """

    def __init__(self, seed: int = 0) -> None:
        if not (isinstance(seed, Integral) and not isinstance(seed, bool) and -(2**63) <= seed < 2**63):
            raise ValueError(f"seed must be a whole number from -2**63 to 2**63 - 1, but is {seed!r}.")
        self.seed: int = seed

    @override
    def seeded(self, seed: int) -> Self:
        other = copy.copy(self)
        RandomCodec.__init__(other, seed)
        return other


def _floating(tensors: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    return {name: tensors[name].detach() for name in layout.floating}
