"""The plain encoding: every number of every tensor, as safetensors."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from typing_extensions import override

from lightning_lowrank.compression.base import Codec
from lightning_lowrank.compression.wire import Schema, load, save, saved_length


class Dense(Codec):
    """Encode named tensors as one safetensors file.

    Example:
        >>> import torch
        >>> codec = Dense()
        >>> data = codec.encode({"weight": torch.arange(3.0)})
        >>> len(data) == codec.nbytes({"weight": torch.arange(3.0)})
        True
        >>> codec.decode(data)
        {'weight': tensor([0., 1., 2.])}
    """

    unbiased = True
    additive = True

    @override
    def encode(self, tensors: Mapping[str, Tensor]) -> bytes:
        return save(tensors)

    @override
    def decode(self, data: bytes, schema: Schema | None = None) -> dict[str, Tensor]:
        return load(data, schema)

    @override
    def nbytes(self, tensors: Mapping[str, Tensor]) -> int:
        return saved_length({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})

    @override
    def transmit(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in tensors.items()}
