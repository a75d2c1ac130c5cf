"""Low-rank convolutions and transposed convolutions of one, two and three dimensions.

They apply a weight's stages as a chain of torch's own convolutions, each with the stride, padding and dilation
of the dimensions that are its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lowrank.layers.factorization import Stage
from lightning_lowrank.layers.modules import LowRankLayer

__all__ = [
    "LowRankConv1d",
    "LowRankConv2d",
    "LowRankConv3d",
    "LowRankConvTranspose1d",
    "LowRankConvTranspose2d",
    "LowRankConvTranspose3d",
]


class _LowRankConvolution(LowRankLayer):
    """What convolutions share: the stages of a chain, each with the geometry of the dimensions it owns.

    A kernel dimension belongs to the stage whose kernel extends in it, or to the first stage where none
    does. Padding, stride and dilation of a dimension act at its stage: what the others do along other
    dimensions does not interfere. Groups share all stages but the one that stands with the output channels,
    so the channels' groups become part of the batch there.
    """

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...] | str
    padding_mode: str
    output_padding: tuple[int, ...]
    groups: int
    kernel_size: tuple[int, ...]
    _reversed_padding_repeated_twice: list[int]

    def _stage_shapes(self) -> tuple[Stage, ...]:
        return self.factorization.stage_shapes(self.weight_shape, self.rank) or ()

    def _can_contract(self) -> bool:
        return bool(self._stage_shapes())

    def _owners(self, stages: Sequence[Stage]) -> list[int]:
        """Return, for each kernel dimension, the position of the stage it belongs to."""
        return [
            next((index for index, stage in enumerate(stages) if stage.kernel[2 + dimension] > 1), 0)
            for dimension in range(len(self.kernel_size))
        ]

    def _batched(self, input: Tensor) -> Tensor:
        return input if input.dim() == len(self.kernel_size) + 2 else input.unsqueeze(0)

    def _split_groups(self, input: Tensor) -> Tensor:
        if self.groups == 1:
            return input
        batch, channels, *size = input.shape
        return input.reshape(batch * self.groups, channels // self.groups, *size)

    def _join_groups(self, input: Tensor) -> Tensor:
        if self.groups == 1:
            return input
        batch, channels, *size = input.shape
        return input.reshape(batch // self.groups, channels * self.groups, *size)

    def _count(
        self, input: Tensor, before: Sequence[int], after: Sequence[int], positions: int
    ) -> tuple[int, int, int]:
        """Count as ``_multiply_adds`` does, from the sizes before and after each dimension's own stage.

        A stage has its multiply-adds at each position of the side where its dimensions have been convolved, or
        have not been transposed yet.
        """
        batch = 1 if input.dim() == len(self.kernel_size) + 1 else input.shape[0]
        stages = self._stage_shapes()
        owners = self._owners(stages)
        counts = []
        for index, stage in enumerate(stages):
            own_side = before if self.first_is_input else after
            other_side = after if self.first_is_input else before
            sizes = [
                own_side[position] if owner <= index else other_side[position] for position, owner in enumerate(owners)
            ]
            copies = 1 if index == len(stages) - 1 else self.groups
            counts.append(batch * copies * math.prod(stage.kernel) * math.prod(sizes))
        first = counts[-1 if self.first_is_input else 0] if counts else 0
        return batch * math.prod(self.weight_shape) * positions, first, sum(counts) - first

    def _run(
        self,
        function: Any,
        input: Tensor,
        kernel: Tensor,
        index: int,
        owners: Sequence[int],
        bias: Tensor | None,
        groups: int,
        padding: Sequence[int],
        output_padding: Sequence[int] | None = None,
    ) -> Tensor:
        def mine(values: Sequence[int], otherwise: int) -> list[int]:
            return [value if owner == index else otherwise for value, owner in zip(values, owners, strict=True)]

        settings = {"stride": mine(self.stride, 1), "padding": mine(padding, 0), "dilation": mine(self.dilation, 1)}
        if output_padding is not None:
            settings["output_padding"] = mine(output_padding, 0)
        return function(input, kernel, bias, groups=groups, **settings)


class _LowRankConv(_LowRankConvolution):
    function: ClassVar[Any]

    def _left_to_stages(self) -> Sequence[int] | None:
        """Return the padding of each dimension that its stage applies, ``None`` where a stage cannot."""
        if self.padding_mode != "zeros":
            return None
        if not isinstance(self.padding, str):
            return self.padding
        pads = self._reversed_padding_repeated_twice
        return pads[::-2] if pads[::2] == pads[1::2] else None

    def _multiply_adds(self, input: Tensor, *geometry: Any) -> tuple[int, int, int]:
        dimensions = len(self.kernel_size)
        left = self._left_to_stages()
        pads = self._reversed_padding_repeated_twice
        both = [pads[index] + pads[index + 1] for index in range(2 * dimensions - 2, -1, -2)] if left is None else None
        before, after = [], []
        for position, size in enumerate(input.shape[-dimensions:]):
            padded = size + (both[position] if both is not None else 0)
            before.append(padded)
            padded += 2 * left[position] if left is not None else 0
            reach = self.dilation[position] * (self.kernel_size[position] - 1)
            after.append((padded - reach - 1) // self.stride[position] + 1)
        return self._count(input, before, after, math.prod(after))

    def _apply_dense(self, input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
        return self._conv_forward(input, weight, bias)  # type: ignore[operator]

    def _apply_factors(
        self, input: Tensor, factors: Mapping[str, Tensor], bias: Tensor | None, *geometry: Any
    ) -> Tensor:
        stages = self._stage_shapes()
        owners = self._owners(stages)
        output = self._batched(input)
        padding = self._left_to_stages()
        if padding is None:
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            output = F.pad(output, self._reversed_padding_repeated_twice, mode=mode)
            padding = (0,) * len(self.kernel_size)
        last = len(stages) - 1
        for index, (stage, kernel) in enumerate(
            zip(stages, self.factorization.stages(factors, self.weight_shape), strict=True)
        ):
            if index == 0:
                output = self._split_groups(output)
            if index == last:
                output = self._join_groups(output)
            groups = self.groups if index == last else stage.groups
            last_bias = bias if index == last else None
            output = self._run(type(self).function, output, kernel, index, owners, last_bias, groups, padding)
        return output if input.dim() == output.dim() else output.squeeze(0)


class _LowRankConvTranspose(_LowRankConvolution):
    """A transposed convolution is the adjoint of the convolution with the same weight: stages run backwards."""

    first_is_input = True
    function: ClassVar[Any]

    def _crop(self, input: Tensor, output_size: list[int] | None) -> list[int]:
        return self._output_padding(  # type: ignore[operator]
            input,
            output_size,
            self.stride,
            self.padding,
            self.kernel_size,
            len(self.kernel_size),
            self.dilation,
        )

    def _multiply_adds(self, input: Tensor, *geometry: Any) -> tuple[int, int, int]:
        dimensions = len(self.kernel_size)
        (output_padding,) = geometry or (self.output_padding,)
        assert not isinstance(self.padding, str)
        before = list(input.shape[-dimensions:])
        after = [
            (size - 1) * self.stride[index]
            - 2 * self.padding[index]
            + self.dilation[index] * (self.kernel_size[index] - 1)
            + output_padding[index]
            + 1
            for index, size in enumerate(before)
        ]
        return self._count(input, before, after, math.prod(before))

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Compute what the dense layer with the effective weight would.

        Args:
            input: As for the dense layer.
            output_size: As for the dense layer.
        """
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
        stages = self._stage_shapes()
        owners = self._owners(stages)
        kernels = self.factorization.stages(factors, self.weight_shape)
        assert not isinstance(self.padding, str)
        output = self._batched(input)
        last = len(stages) - 1
        for index in range(last, -1, -1):
            groups = self.groups if index == last else stages[index].groups
            last_bias = bias if index == 0 and self.groups == 1 else None
            output = self._run(
                type(self).function,
                output,
                kernels[index],
                index,
                owners,
                last_bias,
                groups,
                self.padding,
                output_padding,
            )
            if index == last:
                output = self._split_groups(output)
        output = self._join_groups(output)
        if bias is not None and self.groups > 1:
            output = output + bias.to(output.dtype).view(-1, *(1 for _ in self.kernel_size))
        return output if input.dim() == output.dim() else output.squeeze(0)


class LowRankConv1d(_LowRankConv, nn.Conv1d):  # type: ignore[misc, override]
    """An ``nn.Conv1d`` whose weight is composed from factors; see :class:`LowRankLayer`.

    Example:
        >>> import torch
        >>> from lightning_lowrank.layers import LowRankConv1d, MatrixProduct
        >>> layer = LowRankConv1d.from_dense(nn.Conv1d(8, 16, 3, padding=1), MatrixProduct(), rank=4)
        >>> layer(torch.zeros(1, 8, 5)).shape
        torch.Size([1, 16, 5])
    """

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
    """An ``nn.Conv3d`` whose weight is composed from factors; see :class:`LowRankLayer`.

    Example:
        >>> import torch
        >>> from lightning_lowrank.layers import LowRankConv3d, MatrixProduct
        >>> layer = LowRankConv3d.from_dense(nn.Conv3d(8, 16, 3, padding=1), MatrixProduct(), rank=4)
        >>> layer(torch.zeros(1, 8, 5, 5, 5)).shape
        torch.Size([1, 16, 5, 5, 5])
    """

    dense_classes = (nn.Conv3d,)
    function = staticmethod(F.conv3d)


class LowRankConvTranspose1d(_LowRankConvTranspose, nn.ConvTranspose1d):  # type: ignore[misc, override]
    """An ``nn.ConvTranspose1d`` whose weight is composed from factors; see :class:`LowRankLayer`.

    Example:
        >>> import torch
        >>> from lightning_lowrank.layers import LowRankConvTranspose1d, MatrixProduct
        >>> layer = LowRankConvTranspose1d.from_dense(nn.ConvTranspose1d(8, 16, 3, padding=1), MatrixProduct(), rank=4)
        >>> layer(torch.zeros(1, 8, 5)).shape
        torch.Size([1, 16, 5])
    """

    dense_classes = (nn.ConvTranspose1d,)
    function = staticmethod(F.conv_transpose1d)


class LowRankConvTranspose2d(_LowRankConvTranspose, nn.ConvTranspose2d):  # type: ignore[misc, override]
    """An ``nn.ConvTranspose2d`` whose weight is composed from factors; see :class:`LowRankLayer`.

    Example:
        >>> import torch
        >>> from lightning_lowrank.layers import LowRankConvTranspose2d, MatrixProduct
        >>> layer = LowRankConvTranspose2d.from_dense(nn.ConvTranspose2d(8, 16, 3, padding=1), MatrixProduct(), rank=4)
        >>> layer(torch.zeros(1, 8, 5, 5)).shape
        torch.Size([1, 16, 5, 5])
    """

    dense_classes = (nn.ConvTranspose2d,)
    function = staticmethod(F.conv_transpose2d)


class LowRankConvTranspose3d(_LowRankConvTranspose, nn.ConvTranspose3d):  # type: ignore[misc, override]
    """An ``nn.ConvTranspose3d`` whose weight is composed from factors; see :class:`LowRankLayer`.

    Example:
        >>> import torch
        >>> from lightning_lowrank.layers import LowRankConvTranspose3d, MatrixProduct
        >>> layer = LowRankConvTranspose3d.from_dense(nn.ConvTranspose3d(8, 16, 3, padding=1), MatrixProduct(), rank=4)
        >>> layer(torch.zeros(1, 8, 5, 5, 5)).shape
        torch.Size([1, 16, 5, 5, 5])
    """

    dense_classes = (nn.ConvTranspose3d,)
    function = staticmethod(F.conv_transpose3d)
