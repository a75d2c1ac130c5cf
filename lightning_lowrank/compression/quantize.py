"""Unbiased quantization of each number to a few levels: QSGD (Alistarh et al., NeurIPS 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from lightning_lowrank import seeding
from lightning_lowrank.arguments import check_choice, check_integer
from lightning_lowrank.compression.base import RandomCodec, check_feedback
from lightning_lowrank.compression.wire import DecodingError, Entry, Layout, concatenate

Bits = Literal[8, 4]
Norm = Literal["max", "l2"]


class Quantize(RandomCodec[Tensor]):
    r"""Send each number as a sign and one of a few levels, rounded at random so that the result is unbiased.

    Each tensor is cut into buckets of consecutive numbers. A number :math:`v_i` of a bucket :math:`v` arrives as

    .. math::
        Q(v_i) = \lVert v \rVert \, \operatorname{sign}(v_i) \, \xi_i, \qquad
        \xi_i = \begin{cases} (\ell + 1) / s & \text{with probability } s |v_i| / \lVert v \rVert - \ell \\
                              \ell / s & \text{otherwise,} \end{cases}

    where :math:`\ell = \lfloor s |v_i| / \lVert v \rVert \rfloor`, with :math:`s = 127` levels in 8 bits and
    :math:`s = 7` in 4 bits (QSGD, Alistarh et al., NeurIPS 2017, Section 3.1). The expectation of :math:`Q(v)` is
    :math:`v`, up to rounding in the tensor's type. Each bucket also sends one scale: a float32, or a float64 for
    tensors of float64. The decoder draws nothing. A bucket with a NaN arrives as NaN throughout, one with an infinity
    as infinities, so that the receiver sees it. Integers and booleans travel exactly.

    Args:
        bits: Bits of each number, its sign included: 8 or 4. Default 8.
        bucket_size: How many numbers share a scale. ``None``: all numbers of a tensor. Default 512.
        norm: The scale of a bucket. ``"max"``: its largest magnitude, which gives less variance. ``"l2"``: its
            Euclidean norm, as in the paper's analysis. Default ``"max"``.
        seed: Seed of the random rounding, from -2**63 to 2**63 - 1. Default 0.
        error_feedback: Whether a `Channel` adds the compression error to the next message. Default False.

    Raises:
        TypeError: If ``bucket_size`` is not an integer.
        ValueError: If an argument is out of its range. With error feedback and ``norm="l2"``, if ``bucket_size`` is
            not below :math:`s^2`: then the compression error may exceed the message, and error feedback diverges.

    Example:
        >>> import torch
        >>> codec = Quantize(bits=4, seed=1)
        >>> tensors = {"weight": torch.tensor([7.0, -2.0, 0.0, 3.5])}
        >>> received = codec.decode(codec.encode(tensors))["weight"]
        >>> received[:3]
        tensor([ 7., -2.,  0.])
        >>> received[3].item() in (3.0, 4.0)
        True
    """

    unbiased = True
    values_part = "scales"

    def __init__(
        self,
        bits: Bits = 8,
        bucket_size: int | None = 512,
        norm: Norm = "max",
        seed: int = 0,
        *,
        error_feedback: bool = False,
    ) -> None:
        super().__init__(seed)
        check_choice("bits", bits, Bits)
        if bucket_size is not None:
            check_integer("bucket_size", bucket_size)
        check_choice("norm", norm, Norm)
        self.bits, self.bucket_size, self.norm, self.error_feedback = bits, bucket_size, norm, error_feedback
        self.levels = 2 ** (bits - 1) - 1
        if norm == "l2" and (bucket_size is None or bucket_size >= self.levels**2):
            self.expands = (
                f"Quantize with norm='l2' and bits={bits} needs a bucket_size below {self.levels**2}, but it is "
                f"{bucket_size!r}; choose a smaller one, or norm='max'"
            )
        check_feedback(self)

    def entries(self, layout: Layout, parts: Mapping[str, Tensor] | None = None) -> dict[str, Entry]:
        """Types and shapes of the scales: for each tensor, one scale for each bucket."""
        return {
            name: (torch.promote_types(dtype, torch.float32), (-(-count // self._size(count)),))
            for (name, (dtype, _)), count in zip(layout.floating.items(), layout.numbers, strict=True)
        }

    def compress(self, tensors: Mapping[str, Tensor], layout: Layout) -> tuple[dict[str, Tensor], Tensor]:
        """The scales, and the signed levels as 8-bit integers."""
        generator = seeding.generator(self.seed, "quantize")
        scales, levels = {}, []
        for name, (dtype, _) in self.entries(layout).items():
            numbers = tensors[name].reshape(-1).to(dtype)
            draws = torch.rand(numbers.numel(), generator=generator, dtype=dtype, device="cpu").to(numbers.device)
            rows = self._buckets(numbers)
            scales[name] = scale = self._scale(rows)
            ratio = torch.where((scale > 0)[:, None], rows.abs() / scale[:, None] * self.levels, 0.0)
            lower = ratio.floor()
            magnitude = (lower + (self._buckets(draws) < ratio - lower)).clamp(max=self.levels)
            # If the scale is not finite, all levels are 1, so that no decoded number is finite.
            magnitude = torch.where(scale.isfinite()[:, None], magnitude, 1.0)
            levels.append(torch.where(rows < 0, -magnitude, magnitude).to(torch.int8).flatten()[: numbers.numel()])
        return scales, concatenate(levels, torch.int8)

    def restore(self, values: Mapping[str, Tensor], codes: Tensor, layout: Layout) -> dict[str, Tensor]:
        tensors = {}
        for name, (dtype, shape), levels in layout.parts(codes):
            numbers = self._buckets(levels.to(values[name])) / self.levels * values[name][:, None]
            tensors[name] = numbers.flatten()[: levels.numel()].to(dtype, copy=True).reshape(shape)
        return tensors

    def lengths(self, layout: Layout, parts: Mapping[str, Tensor] | None = None) -> dict[str, int]:
        return {"levels": -(-sum(layout.numbers) * self.bits // 8)}

    def pack(self, codes: Tensor, layout: Layout) -> dict[str, Tensor]:
        """The levels in two's complement; with 4 bits, two share a byte, the first in its lower half."""
        levels = codes.cpu().view(torch.uint8)
        if self.bits == 4:
            levels = torch.cat([levels, levels.new_zeros(levels.numel() % 2)]) & 15
            levels = levels[::2] | levels[1::2] << 4
        return {"levels": levels}

    def unpack(self, parts: Mapping[str, Tensor], layout: Layout) -> Tensor:
        levels = parts["levels"]
        if self.bits == 4:
            # Each half is moved to the upper half of a byte; the signed division by 16 below then keeps its sign.
            levels = torch.stack([levels << 4, levels & 0xF0], dim=1).flatten()[: sum(layout.numbers)]
        signed = levels.view(torch.int8)
        signed = signed if self.bits == 8 else signed // 16
        if (signed < -self.levels).any():
            raise DecodingError(f"a level is {-self.levels - 1}, but they are from {-self.levels} to {self.levels}.")
        return signed

    def _size(self, count: int) -> int:
        return max(1, count if self.bucket_size is None else min(count, self.bucket_size))

    def _buckets(self, numbers: Tensor) -> Tensor:
        """The numbers in rows of one bucket each; zeros fill up the last row."""
        size = self._size(numbers.numel())
        rows = -(-numbers.numel() // size)
        padding = numbers.new_zeros(rows * size - numbers.numel())
        return torch.cat([numbers, padding]).reshape(rows, size)

    def _scale(self, rows: Tensor) -> Tensor:
        largest = rows.abs().amax(1)
        if self.norm == "max":
            return largest
        # Numbers are divided by the largest, so that squares neither overflow nor vanish. The norm is at least the
        # largest.
        norm = largest * torch.linalg.vector_norm(rows / largest[:, None], dim=1)
        largest_number = torch.finfo(rows.dtype).max
        scale = torch.where(largest > 0, norm.clamp(max=largest_number), largest)
        return torch.where(largest.isfinite(), scale, largest)
