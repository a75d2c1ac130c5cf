"""One bit per number: the uplink of FedBAT (Li et al., ICML 2024) and of sign methods in general."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_lowrank.compression.base import FloatingCodec
from lightning_lowrank.compression.wire import Entry, Layout, concatenate, pack_bits, packed_length, unpack_bits


class Sign(FloatingCodec[Tensor]):
    """Send each floating-point tensor as its signs, a bit each, and one scale in the tensor's own type.

    A tensor whose magnitudes are all equal to α arrives exactly, such as FedBAT's updates. Any other is quantised to
    scale·sign(x), with the mean magnitude as scale, which is the best one in least squares, and sign(0) = +: the
    quantiser of signSGD with error feedback (Karimireddy et al., ICML 2019). A tensor with a NaN arrives as NaN
    throughout, one with an infinity as infinities: the receiver sees that something went wrong. Integers and booleans
    travel exactly.

    Args:
        error_feedback: Whether a `Channel` adds the compression error to the next message. Default False.

    Example:
        >>> import torch
        >>> codec = Sign()
        >>> codec.decode(codec.encode({"binary": torch.tensor([0.1, -0.1]), "other": torch.tensor([3.0, 0.0, -1.5])}))
        {'binary': tensor([ 0.1000, -0.1000]), 'other': tensor([ 1.5000,  1.5000, -1.5000])}
    """

    one_magnitude = True
    values_part = "scales"

    def __init__(self, *, error_feedback: bool = False) -> None:
        self.error_feedback = error_feedback

    def entries(self, layout: Layout, parts: Mapping[str, Tensor] | None = None) -> dict[str, Entry]:
        """Types and shapes of the scales: one for each tensor that is not empty."""
        return {
            name: (dtype, (min(count, 1),))
            for (name, (dtype, _)), count in zip(layout.floating.items(), layout.numbers, strict=True)
        }

    def compress(self, tensors: Mapping[str, Tensor], layout: Layout) -> tuple[dict[str, Tensor], Tensor]:
        scales = {name: _scale(tensor) for name, tensor in tensors.items()}
        return scales, concatenate([(tensor < 0).reshape(-1) for tensor in tensors.values()], torch.bool)

    def restore(self, values: Mapping[str, Tensor], codes: Tensor, layout: Layout) -> dict[str, Tensor]:
        return {
            name: (values[name] * (1 - 2 * negative.to(values[name]))).reshape(shape)
            for name, (_, shape), negative in layout.parts(codes)
        }

    def lengths(self, layout: Layout, parts: Mapping[str, Tensor] | None = None) -> dict[str, int]:
        return {"signs": packed_length(sum(layout.numbers))}

    def pack(self, codes: Tensor, layout: Layout) -> dict[str, Tensor]:
        """The signs, eight to a byte."""
        return {"signs": pack_bits(codes)}

    def unpack(self, parts: Mapping[str, Tensor], layout: Layout) -> Tensor:
        return unpack_bits(parts["signs"], sum(layout.numbers))


def _scale(tensor: Tensor) -> Tensor:
    """The scale, a tensor of one number; empty if the tensor is empty."""
    magnitude = tensor.abs().reshape(-1)
    if not magnitude.numel():
        return magnitude
    smallest, largest = magnitude.aminmax()
    # In floating point, the mean of equal magnitudes may differ from them by rounding.
    return torch.where(smallest == largest, largest, magnitude.mean()).reshape(1)
