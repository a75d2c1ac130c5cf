"""Floating-point numbers rounded to 16 bits: half of float32's bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from lightning_lowrank.arguments import check_choice
from lightning_lowrank.compression.base import FloatingCodec
from lightning_lowrank.compression.wire import Entry, Layout

HalfType = Literal["float16", "bfloat16"]


class Half(FloatingCodec[None]):
    """Round floating-point numbers to 16 bits; the decoder restores their type.

    Tensors that have 16 bits already, of either kind, travel as they are. So do integers and booleans.

    Args:
        dtype: ``"float16"`` (11 significant bits; magnitudes from 65,520 on become infinite, below 3e-8 zero) or
            ``"bfloat16"`` (8 significant bits, float32's range).
        error_feedback: Whether a `Channel` adds the compression error to the next message. Default False.

    Raises:
        ValueError: If ``dtype`` is neither.

    Example:
        >>> import torch
        >>> codec = Half("bfloat16")
        >>> codec.decode(codec.encode({"weight": torch.tensor([1.0, 1.001, -3.0])}))
        {'weight': tensor([ 1.,  1., -3.])}
    """

    def __init__(self, dtype: HalfType = "float16", *, error_feedback: bool = False) -> None:
        check_choice("dtype", dtype, HalfType)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.error_feedback = error_feedback

    def _sent(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if dtype.itemsize == 2 else self.dtype

    def entries(self, layout: Layout, parts: Mapping[str, Tensor] | None = None) -> dict[str, Entry]:
        return {name: (self._sent(dtype), shape) for name, (dtype, shape) in layout.floating.items()}

    def compress(self, tensors: Mapping[str, Tensor], layout: Layout) -> tuple[dict[str, Tensor], None]:
        return {name: tensor.to(self._sent(tensor.dtype)) for name, tensor in tensors.items()}, None

    def restore(self, values: Mapping[str, Tensor], codes: None, layout: Layout) -> dict[str, Tensor]:
        return {name: values[name].to(dtype) for name, (dtype, _) in layout.floating.items()}
