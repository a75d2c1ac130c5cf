"""Two codecs for one payload: one for tensors chosen by name, one for all others."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor
from typing_extensions import Self, override

from lightning_lowrank.compression.base import Codec, Memory, check_feedback
from lightning_lowrank.compression.wire import DecodingError, Schema
from lightning_lowrank.seeding import derive_seed


class Split(Codec):
    """Send the tensors of some names through one codec, and all others through another.

    Methods that compress weights use it for numbers that must arrive exactly, such as batch normalisation's statistics.
    The encoding is the length of the first part in eight bytes, the first codec's bytes and the second's.

    Args:
        names: Names of the tensors that go through ``chosen``. A payload may lack some of them.
        chosen: Their codec.
        others: The codec of all other tensors.

    Raises:
        TypeError: If ``names`` is a single string.
        ValueError: If one of the two codecs has error feedback and one of them `expands`.

    Example:
        >>> import torch
        >>> from lightning_lowrank.compression import Dense, Sign
        >>> codec = Split(["mean"], Dense(), Sign())
        >>> tensors = {"weight": torch.tensor([0.5, -1.5]), "mean": torch.tensor([0.5, -1.5])}
        >>> codec.transmit(tensors)
        {'weight': tensor([ 1., -1.]), 'mean': tensor([ 0.5000, -1.5000])}
        >>> codec.nbytes(tensors) == len(codec.encode(tensors))
        True
    """

    def __init__(self, names: Collection[str], chosen: Codec, others: Codec) -> None:
        if isinstance(names, str):
            raise TypeError(f"names must be a collection of names, but is the string {names!r}; write [{names!r}].")
        self.names = frozenset(names)
        self.chosen = chosen
        self.others = others
        self.unbiased = chosen.unbiased and others.unbiased
        self.error_feedback = chosen.error_feedback or others.error_feedback
        self.sparse = chosen.sparse or others.sparse
        self.one_magnitude = chosen.one_magnitude or others.one_magnitude
        self.additive = chosen.additive and others.additive
        self.adaptive = chosen.adaptive or others.adaptive
        self.expands = chosen.expands or others.expands
        check_feedback(self)

    def seeded(self, seed: int) -> Self:
        """A copy whose codecs have different seeds; the seed of ``others`` is ``seed`` itself."""
        other = copy.copy(self)
        other.chosen, other.others = self.chosen.seeded(derive_seed(seed, "chosen")), self.others.seeded(seed)
        return other

    def started(self, memory: Memory) -> Self:
        other = copy.copy(self)
        other.chosen = self.chosen.started(memory.get("chosen", {}))
        other.others = self.others.started(memory.get("others", {}))
        return other

    def _split(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return (
            {name: tensor for name, tensor in tensors.items() if name in self.names},
            {name: tensor for name, tensor in tensors.items() if name not in self.names},
        )

    @override
    def encode(self, tensors: Mapping[str, Tensor]) -> bytes:
        chosen, others = self._split(tensors)
        data = self.chosen.encode(chosen)
        return len(data).to_bytes(8, "little") + data + self.others.encode(others)

    @override
    def decode(self, data: bytes, schema: Schema | None = None) -> dict[str, Tensor]:
        end = 8 + int.from_bytes(data[:8], "little")
        if len(data) < max(end, 8):
            raise DecodingError(f"the first part should end at byte {end}, but there are {len(data)} bytes.")
        first = None if schema is None else schema.part(self.names.__contains__)
        second = None if schema is None else schema.part(lambda name: name not in self.names)
        chosen, others = self.chosen.decode(data[8:end], first), self.others.decode(data[end:], second)
        astray = sorted((chosen.keys() - self.names) | (others.keys() & self.names))
        if astray:
            raise DecodingError(f"the tensor {astray[0]!r} was encoded by the wrong one of this Split's two codecs.")
        return {**chosen, **others}

    @override
    def nbytes(self, tensors: Mapping[str, Tensor]) -> int:
        chosen, others = self._split(tensors)
        return 8 + self.chosen.nbytes(chosen) + self.others.nbytes(others)

    @override
    def transmit(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.transmit_and_keep(tensors)[0]

    @override
    def transmit_and_keep(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Memory]:
        return self.transmit_together([self], [tensors])[0]

    @override
    @classmethod
    def transmit_together(
        cls, senders: Sequence[Self], messages: Sequence[Mapping[str, Tensor]]
    ) -> list[tuple[dict[str, Tensor], Memory]]:
        parts = zip(*(sender._split(tensors) for sender, tensors in zip(senders, messages, strict=True)), strict=True)
        codecs = [sender.chosen for sender in senders], [sender.others for sender in senders]
        found = [type(each[0]).transmit_together(each, part) for each, part in zip(codecs, parts, strict=True)]
        return [_joined(tensors, *both) for tensors, *both in zip(messages, *found, strict=True)]


def _joined(
    tensors: Mapping[str, Tensor], chosen: tuple[dict[str, Tensor], Memory], others: tuple[dict[str, Tensor], Memory]
) -> tuple[dict[str, Tensor], Memory]:
    """The results of a `Split`'s two codecs as its own."""
    received, memory = {**chosen[0], **others[0]}, {"chosen": chosen[1], "others": others[1]}
    return {name: received[name] for name in tensors}, {part: each for part, each in memory.items() if each}
