"""Low-rank convolutions and transposed convolutions of one, two and three dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_lowrank.layers.factorization import Stage
from lightning_lowrank.layers.layer import LowRankLayer


class _LowRankConvolution(LowRankLayer):
    """Base of low-rank convolutions: a chain of torch convolutions, one for each stage.

    A kernel dimension belongs to the stage whose kernel extends in it, or to the first stage if none
    does. Padding, stride and dilation of a dimension act at its stage: the other stages act along other dimensions and
    do not interfere. Groups share all stages but the one with the output channels, so the channels' groups become part
    of the batch there.
    """

    function: ClassVar[Any]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...] | str
    padding_mode: str
    output_padding: tuple[int, ...]
    groups: int
    kernel_size: tuple[int, ...]

    def _stage_shapes(self) -> tuple[Stage, ...]:
        return self.factorization.stage_shapes(self.weight_shape, self.rank) or ()

    def _owners(self, stages: Sequence[Stage]) -> list[int]:
        """For each kernel dimension, the index of the stage that has it."""
        owners = [0] * len(self.kernel_size)
        for dimension in range(len(owners)):
            # torch before 2.9 compiles no next() with a default.
            for index, stage in enumerate(stages):
                if stage.kernel[2 + dimension] > 1:
                    owners[dimension] = index
                    break
        return owners

    def _batched(self, input: Tensor) -> Tensor:
        return input if input.dim() == len(self.kernel_size) + 2 else input.unsqueeze(0)

    def _split_groups(self, input: Tensor) -> Tensor:
        return input if self.groups == 1 else input.unflatten(1, (self.groups, -1)).flatten(0, 1)

    def _join_groups(self, input: Tensor) -> Tensor:
        return input if self.groups == 1 else input.unflatten(0, (-1, self.groups)).flatten(1, 2)

    def _count(
        self, input: Tensor, before: Sequence[int], after: Sequence[int], positions: int
    ) -> tuple[int, int, int]:
        """Multiply-adds as in ``_multiply_adds``, from the sizes before and after each dimension's stage."""
        batch = 1 if input.dim() == len(self.kernel_size) + 1 else input.shape[0]
        stages = self._stage_shapes()
        owners = self._owners(stages)
        done, left = (before, after) if self.first_is_input else (after, before)
        counts = []
        for index, stage in enumerate(stages):
            sizes = [done[position] if owner <= index else left[position] for position, owner in enumerate(owners)]
            copies = 1 if index == len(stages) - 1 else self.groups
            counts.append(batch * copies * math.prod(stage.kernel) * math.prod(sizes))
        first = counts[-1 if self.first_is_input else 0] if counts else 0
        return batch * math.prod(self.weight_shape) * positions, first, sum(counts) - first

    def _run(
        self,
        stages: Sequence[Stage],
        index: int,
        input: Tensor,
        kernel: Tensor,
        bias: Tensor | None,
        padding: Sequence[int],
        output_padding: Sequence[int] | None = None,
    ) -> Tensor:
        """Apply one stage, with the stride, padding and dilation of its own kernel dimensions."""
        owners = self._owners(stages)

        def mine(values: Sequence[int], otherwise: int) -> list[int]:
            return [value if owner == index else otherwise for value, owner in zip(values, owners, strict=True)]

        settings = {"stride": mine(self.stride, 1), "padding": mine(padding, 0), "dilation": mine(self.dilation, 1)}
        if output_padding is not None:
            settings["output_padding"] = mine(output_padding, 0)
        groups = self.groups if index == len(stages) - 1 else stages[index].groups
        return type(self).function(input, kernel, bias, groups=groups, **settings)


class _LowRankConv(_LowRankConvolution):
    def _pads(self) -> list[int]:
        """The padding before and after each dimension, the last one first, as ``F.pad`` takes it."""
        if not isinstance(self.padding, str):
            return [size for size in reversed(self.padding) for _ in range(2)]
        reaches = zip(reversed(self.dilation), reversed(self.kernel_size), strict=True)
        totals = [step * (size - 1) if self.padding == "same" else 0 for step, size in reaches]
        return [part for total in totals for part in (total // 2, total - total // 2)]

    def _split_padding(self) -> tuple[list[int], list[int]]:
        """The padding to apply before all stages, as ``F.pad`` takes it, and the padding that each stage applies."""
        pads = self._pads()
        if self.padding_mode == "zeros" and pads[::2] == pads[1::2]:
            return [0] * len(pads), pads[::-2]
        return pads, [0] * len(self.kernel_size)

    def _multiply_adds(self, input: Tensor, *geometry: Any) -> tuple[int, int, int]:
        pads, by_stages = self._split_padding()
        before, after = [], []
        for position, size in enumerate(input.shape[-len(self.kernel_size) :]):
            before.append(size + pads[-2 * position - 2] + pads[-2 * position - 1])
            reach = self.dilation[position] * (self.kernel_size[position] - 1)
            after.append((before[-1] + 2 * by_stages[position] - reach - 1) // self.stride[position] + 1)
        return self._count(input, before, after, math.prod(after))

    def _apply_dense(self, input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            input, padding = F.pad(input, self._pads(), mode=self.padding_mode), 0
        return type(self).function(input, weight, bias, self.stride, padding, self.dilation, self.groups)

    def _apply_factors(
        self, input: Tensor, factors: Mapping[str, Tensor], bias: Tensor | None, *geometry: Any
    ) -> Tensor:
        output = self._batched(input)
        pads, padding = self._split_padding()
        if any(pads):
            output = F.pad(output, pads, mode="constant" if self.padding_mode == "zeros" else self.padding_mode)
        stages = self._stage_shapes()
        *kernels, last = self.factorization.stages(factors, self.weight_shape)
        output = self._split_groups(output)
        for index, kernel in enumerate(kernels):
            output = self._run(stages, index, output, kernel, None, padding)
        output = self._run(stages, len(kernels), self._join_groups(output), last, bias, padding)
        return output if input.dim() == output.dim() else output.squeeze(0)


class _LowRankConvTranspose(_LowRankConvolution):
    """Base of low-rank transposed convolutions: the stages run backwards, for the adjoint of the convolution."""

    first_is_input = True

    def _crop(self, input: Tensor, output_size: list[int] | None) -> list[int]:
        if output_size is None:
            return list(self.output_padding)
        dimensions = len(self.kernel_size)
        smallest = self._sizes(input, [0] * dimensions)
        largest = [size + step - 1 for size, step in zip(smallest, self.stride, strict=True)]
        asked = list(output_size)[-dimensions:]
        fits = all(low <= size <= high for low, size, high in zip(smallest, asked, largest, strict=False))
        if len(output_size) not in (dimensions, input.dim()) or not fits:
            raise ValueError(
                f"output_size={list(output_size)} is not possible for an input of shape {tuple(input.shape)}: it can be"
                f" from {smallest} to {largest}."
            )
        return [size - low for size, low in zip(asked, smallest, strict=True)]

    def _sizes(self, input: Tensor, output_padding: Sequence[int]) -> list[int]:
        """The output's spatial sizes."""
        assert not isinstance(self.padding, str)
        return [
            (size - 1) * self.stride[index]
            - 2 * self.padding[index]
            + self.dilation[index] * (self.kernel_size[index] - 1)
            + output_padding[index]
            + 1
            for index, size in enumerate(input.shape[-len(self.kernel_size) :])
        ]

    def _multiply_adds(self, input: Tensor, *geometry: Any) -> tuple[int, int, int]:
        (output_padding,) = geometry or (self.output_padding,)
        before = list(input.shape[-len(self.kernel_size) :])
        return self._count(input, before, self._sizes(input, output_padding), math.prod(before))

    @override
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return super().forward(input, self._crop(input, output_size))

    def _apply_dense(self, input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
        (output_padding,) = geometry
        return type(self).function(
            input, weight, bias, self.stride, self.padding, output_padding, self.groups, self.dilation
        )

    def _apply_factors(
        self, input: Tensor, factors: Mapping[str, Tensor], bias: Tensor | None, *geometry: Any
    ) -> Tensor:
        (output_padding,) = geometry
        assert not isinstance(self.padding, str)
        stages = self._stage_shapes()
        kernels = self.factorization.stages(factors, self.weight_shape)
        output = self._batched(input)
        for index in reversed(range(len(kernels))):
            added = bias if index == 0 and self.groups == 1 else None
            output = self._run(stages, index, output, kernels[index], added, self.padding, output_padding)
            if index == len(kernels) - 1:
                output = self._split_groups(output)
        output = self._join_groups(output)
        if bias is not None and self.groups > 1:
            output = output + bias.to(output.dtype).view(-1, *(1 for _ in self.kernel_size))
        return output if input.dim() == output.dim() else output.squeeze(0)


class LowRankConv1d(_LowRankConv, nn.Conv1d):  # type: ignore[misc, override]
    """An ``nn.Conv1d`` whose weight is composed from factors; see :class:`LowRankLayer`."""

    dense_classes = (nn.Conv1d,)
    function = staticmethod(F.conv1d)


class LowRankConv2d(_LowRankConv, nn.Conv2d):  # type: ignore[misc, override]
    """An ``nn.Conv2d`` whose weight is composed from factors; see :class:`LowRankLayer`.

    Example:
        >>> import torch
        >>> from lightning_lowrank.layers import LowRankConv2d, MatrixProduct
        >>> layer = LowRankConv2d.from_dense(nn.Conv2d(8, 16, 3, padding=1), MatrixProduct(), rank=4)
        >>> layer(torch.zeros(1, 8, 5, 5)).shape
        torch.Size([1, 16, 5, 5])
    """

    dense_classes = (nn.Conv2d,)
    function = staticmethod(F.conv2d)


class LowRankConv3d(_LowRankConv, nn.Conv3d):  # type: ignore[misc, override]
    """An ``nn.Conv3d`` whose weight is composed from factors; see :class:`LowRankLayer`."""

    dense_classes = (nn.Conv3d,)
    function = staticmethod(F.conv3d)


class LowRankConvTranspose1d(_LowRankConvTranspose, nn.ConvTranspose1d):  # type: ignore[misc, override]
    """An ``nn.ConvTranspose1d`` whose weight is composed from factors; see :class:`LowRankLayer`."""

    dense_classes = (nn.ConvTranspose1d,)
    function = staticmethod(F.conv_transpose1d)


class LowRankConvTranspose2d(_LowRankConvTranspose, nn.ConvTranspose2d):  # type: ignore[misc, override]
    """An ``nn.ConvTranspose2d`` whose weight is composed from factors; see :class:`LowRankLayer`."""

    dense_classes = (nn.ConvTranspose2d,)
    function = staticmethod(F.conv_transpose2d)


class LowRankConvTranspose3d(_LowRankConvTranspose, nn.ConvTranspose3d):  # type: ignore[misc, override]
    """An ``nn.ConvTranspose3d`` whose weight is composed from factors; see :class:`LowRankLayer`."""

    dense_classes = (nn.ConvTranspose3d,)
    function = staticmethod(F.conv_transpose3d)
