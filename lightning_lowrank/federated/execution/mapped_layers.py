"""Faster replacements of some layers and losses for a training step mapped over stacked clients.

`ClientStack` runs the mapped training step under `StackedProducts`. As measured by
``tests/benchmarks/convolutions.py``, on a CPU torch's grouped convolution of all clients, and its batch normalisation
in several passes, take longer than the clients' own steps one after another; these replacements take less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.nn.functional as F
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from lightning_lowrank.internals.torch import (
    is_mapped,
    is_transformed,
    map_level,
    mapped,
    own_shape,
    stack_of,
    storage_key,
    values_of,
)
from lightning_lowrank.optim.deferred import Deferred, DeferredWeights, changes_in_place

_CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
_ACTIVATIONS = {
    *(F.celu, F.elu, F.hardsigmoid, F.hardswish, F.hardtanh, F.leaky_relu, F.mish, F.relu, F.relu6, F.selu, F.silu),
    *(F.threshold, Tensor.relu_, torch.relu_),
}
# Functions whose inputs autocast casts to 16 bits, but whose rules for vmap bypass autocast.
_IN_16_BITS = {
    *(F.linear, F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d),
    *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
    *(torch.addmm, torch.addbmm, torch.baddbmm, Tensor.addmm, Tensor.addbmm, Tensor.baddbmm),
}
_NORMALISING = {F.batch_norm, F.group_norm, F.instance_norm, F.layer_norm, F.rms_norm}
_NUMBERS = {Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.item, Tensor.tolist}
# Some releases of torch refuse to map functions, such as F.group_norm, over inputs with the channels last in memory.
_UNKNOWN_FORMAT = "querying is_contiguous inside of vmap"
# Positions whose numbers torch may add in turn, in float32, for the statistics of a batch normalisation.
_ROWS_AT_ONCE = 1024
_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)


class StackedProducts(TorchFunctionMode):
    """Replaces some layers and losses while a training step is mapped over clients.

    - ``F.linear`` with a weight of each client's own: as torch maps it, the gradient of the stack comes out transposed,
      and copying that into place costs as much as the products of a small model. Here it lies as the weights do.
    - ``F.conv1d``, ``F.conv2d`` and ``F.conv3d`` with a weight of each client's own, on the CPU: torch makes one
      grouped convolution of them, for which its library has no fast code. Here each client has a convolution of its
      own, with the channels last in memory; so are those of its output, which makes the following layers faster as
      well.
    - ``F.cross_entropy`` with class indices, averaged: torch moves the classes to another place in memory first. Here
      they stay where the layer above leaves them: last if all clients share its weight, else the last but one.
    - ``F.batch_norm``: torch normalises, scales and shifts in turn. On an accelerator, clients' channels are here those
      of one input, and all of it is one call; so is ``F.max_pool2d``. On the CPU, for images, each client has a call of
      its own, with the channels last.
    - ``F.relu`` and other activations in place, on an accelerator: torch changes a view of the stack, the gradient of
      which takes three copies.
    - ``F.scaled_dot_product_attention`` with a bias that is trained: torch would take a kernel that has no gradient of
      it. Here it takes the one that has. Under autocast, torch would leave queries, keys and values in different types,
      and refuse them.
    - ``F.embedding`` and ``torch.embedding`` with a ``padding_idx``, ``torch.select_scatter``, and
      ``F.linear_cross_entropy`` in chunks: as torch maps them, their gradients are wrong. Here they are those of a
      client alone.
    - Products under autocast: torch would compute most of them in single precision. Layers that normalise under
      autocast: torch would return other types than for a client alone, or refuse them.
    - ``F.dropout`` on the CPU: torch draws in the order of dimensions, here the draws lie in memory as the input does.
    - ``bool()``, ``item()`` and the like of a tensor that is the same for all clients: torch refuses them all. Here
      they give the number.
    - ``tensor.requires_grad``: torch returns false for mapped tensors. Here it is true if gradients are computed.

    Weights whose changes are kept apart are computed with as `DeferredSteps` does.

    Everything else, a weight that all clients share, other devices, and functions inside further transforms of
    `torch.func` are left to torch. The results are those of torch's own way up to rounding. Convolutions and batch
    normalisations can't be differentiated twice.

    As the channels of an output are last in memory, ``view`` cannot always join its dimensions as it would one
    client's. There it returns a copy. To change one of the two in place is refused while the other is still held.
    """

    def __init__(self, deferred: Mapping[int, Deferred] | None = None) -> None:
        super().__init__()
        self._weights = DeferredWeights(deferred or {})
        self._copies: list[tuple[ReferenceType[Tensor], ReferenceType[Tensor]]] = []

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        keywords = keywords or {}
        try:
            return self._replaced(function, arguments, keywords)
        except RuntimeError as error:
            if _UNKNOWN_FORMAT not in str(error):
                raise
            contiguous = apply_to_collection((arguments, keywords), Tensor, Tensor.contiguous)
            return self._replaced(function, *contiguous)

    def _replaced(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if function in _HOOKS:
            raise NotImplementedError("a hook is registered on a tensor")
        if function in _IN_16_BITS and _is_cast(arguments[0] if arguments else keywords["input"]):
            arguments, keywords = apply_to_collection((arguments, keywords), Tensor, _as_autocast)
        elif function in _NORMALISING:
            return _normalised(function, *arguments, **keywords)
        if function is not F.linear:
            arguments, keywords = self._weights.changed(function, arguments, keywords)
        if self._copies and changes_in_place(function, keywords):
            self._refuse_to_tear_apart(arguments[0])
        if function is F.linear:
            return self._linear(*arguments, **keywords)
        if function in _CONVOLUTIONS:
            return _convolution(function, *arguments, **keywords)
        if function in _ACTIVATIONS:
            return _activation(function, *arguments, **keywords)
        if function is Tensor.view:
            return self._view(*arguments, **keywords)
        if function in _NUMBERS:
            return function(_shared(*arguments))
        return _OTHERWISE.get(function, function)(*arguments, **keywords)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found = self._weights.apart(input, weight)
        if found is None or not _is_of_clients(input, weight):
            return _linear(input, self._weights.value(weight), self._weights.value(bias))
        return _linear(input, weight.detach(), bias, found)

    def _view(self, tensor: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        try:
            return tensor.view(*arguments, **keywords)
        except (RuntimeError, ValueError):
            if not is_mapped(tensor) or tensor.is_contiguous():
                raise
            copy = tensor.contiguous().view(*arguments, **keywords)
            self._copies.append((ref(tensor), ref(copy)))
            return copy

    def _refuse_to_tear_apart(self, changed: Tensor) -> None:
        storage = storage_key(changed)
        for pair in self._copies:
            alive = [tensor for tensor in (each() for each in pair) if tensor is not None]
            if len(alive) == 2 and storage in map(storage_key, alive):
                raise NotImplementedError("one of a tensor and its view() is changed in place, and both are used")


def _requires_grad(tensor: Tensor) -> bool:
    while is_transformed(tensor) and not tensor.requires_grad:
        tensor = values_of(tensor)
    return tensor.requires_grad


def _normalised(function: Any, input: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
    """Normalise an input; under autocast compute in single precision and return autocast's type."""
    way = _OTHERWISE.get(function, function)
    if input.dtype not in (torch.float16, torch.bfloat16) or not _is_cast(input):
        return way(input, *arguments, **keywords)
    output = way(input.float(), *arguments, **keywords)
    # On accelerators autocast returns single precision for these two.
    single = input.device.type != "cpu" and function in (F.group_norm, F.layer_norm)
    return output if single else output.to(input.dtype)


def _is_of_clients(input: Tensor, weight: Tensor) -> bool:
    return input.ndim > 1 and is_mapped(weight) and map_level() == 1 and weight.ndim == 2


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, deferred: Deferred | None = None) -> Tensor:
    # torch already computes one product for a weight that all clients share.
    if not _is_of_clients(input, weight):
        return F.linear(input, weight, bias)
    weights = stack_of(weight)
    inputs = stack_of(input) if is_mapped(input) else input.expand(len(weights), *input.shape)
    rows = (inputs.flatten(1, -2) if inputs.ndim > 3 else inputs).mT
    if bias is None:
        outputs = torch.bmm(weights, rows)
    else:
        biases = stack_of(bias) if is_mapped(bias) else bias
        outputs = torch.baddbmm(biases.unsqueeze(-1), weights, rows)
    if deferred is not None:
        # One product for the rows of all clients, because they share the subspace.
        inside = rows.mT.flatten(0, 1) @ deferred.projection
        outputs = torch.baddbmm(outputs, stack_of(deferred.change), inside.unflatten(0, rows.mT.shape[:2]).mT)
    outputs = outputs.mT
    return mapped(outputs.unflatten(1, inputs.shape[1:-1]) if inputs.ndim > 3 else outputs)


def _convolution(
    function: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    dimensions = _CONVOLUTIONS[function]
    strides, dilations = _each(stride, dimensions), _each(dilation, dimensions)
    if (
        not _stacked_on_cpu(weight)
        or input.device != weight.device
        or weight.ndim != dimensions + 2
        or input.ndim not in (dimensions + 1, dimensions + 2)
        # Leave invalid paddings to torch's own error messages.
        or (
            isinstance(padding, str) and (padding not in ("same", "valid") or (padding == "same" and {*strides} != {1}))
        )
    ):
        return function(input, weight, bias, stride, padding, dilation, groups)
    if padding == "same":
        totals = [step * (size - 1) for step, size in zip(dilations, weight.shape[2:], strict=True)]
        paddings = [total // 2 for total in totals]
        if any(total % 2 for total in totals):
            input = F.pad(input, [odd for total in reversed(totals) for odd in (0, total % 2)])
    else:
        paddings = _each(0 if isinstance(padding, str) else padding, dimensions)
    batch = input if input.ndim == weight.ndim else input.unsqueeze(0)
    output = _OverStacks.apply(_StackedConvolution.apply, batch, weight, bias, strides, paddings, dilations, groups)
    return output if input.ndim == weight.ndim else output.squeeze(0)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    running = [value for value in (running_mean, running_var) if value is not None]
    # In training each client's own running statistics are written to.
    own = all(is_mapped(value) and stack_of(value).is_contiguous() for value in running)
    if _folds(input) and input.ndim > 1 and (own or not training):
        return _folded_batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    values_per_channel = input.numel() // max(1, input.shape[1]) if input.ndim > 1 else 0
    if (
        not _stacked_on_cpu(input)
        or input.ndim not in (4, 5)
        or not input.numel()
        or (training and (values_per_channel < 2 or not all(map(is_mapped, running))))
        or (not training and len(running) < 2)
    ):
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    return _OverStacks.apply(
        _StackedBatchNorm.apply, input, weight, bias, running_mean, running_var, training, momentum, eps
    )


def _folds(input: Tensor) -> bool:
    """Whether to fold clients into the channel dimension: for mapped inputs on an accelerator."""
    return is_mapped(input) and map_level() == 1 and input.device.type != "cpu"


def _folded(stack: Tensor) -> Tensor:
    """Fold a stack ``[clients, batch, channels, …]`` to ``[batch, clients · channels, …]``, for one convolution."""
    return stack.transpose(0, 1).flatten(1, 2)


def _unfolded(outputs: Tensor, clients: int) -> Tensor:
    batch, channels, *size = outputs.shape
    # Not a view: for an in-place activation, autograd would copy a view's gradient.
    return mapped(own_shape(outputs, [batch, clients, channels // clients, *size]), 1)


def _folded_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    stack = stack_of(input)
    clients = stack.shape[0]

    def folded(value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        return stack_of(value).flatten() if is_mapped(value) else value.repeat(clients)

    statistics = folded(running_mean), folded(running_var)
    outputs = F.batch_norm(_folded(stack), *statistics, folded(weight), folded(bias), training, momentum, eps)
    return _unfolded(outputs, clients)


def _max_pool(input: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
    """Pool all clients' channels as those of one input, without torch's copies to another memory order and back."""
    if not _folds(input) or input.ndim != 4 or keywords.get("return_indices"):
        return F.max_pool2d(input, *arguments, **keywords)
    stack = stack_of(input)
    return _unfolded(F.max_pool2d(_folded(stack), *arguments, **keywords), stack.shape[0])


def _activation(function: Any, input: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
    if not _folds(input) or not changes_in_place(function, keywords):
        return function(input, *arguments, **keywords)
    # Activations are elementwise, so the order of dimensions does not matter.
    function(values_of(input), *arguments, **keywords)
    return input


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    usual = weight is None and size_average is None and reduce is None and reduction == "mean" and not label_smoothing
    if (
        not usual
        or not is_mapped(input)
        or not is_mapped(target)
        or map_level() != 1
        or input.dtype not in (torch.float32, torch.float64)
        or input.ndim != 2
        or target.ndim != 1
        or target.is_floating_point()
    ):
        return F.cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    targets, logits = stack_of(target), stack_of(input)
    if logits.is_contiguous():
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=ignore_index, reduction="none")
        losses = losses.view_as(targets)
    else:
        losses = F.cross_entropy(logits.mT, targets, ignore_index=ignore_index, reduction="none")
    return mapped(losses.sum(1) / (targets != ignore_index).sum(1))


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *arguments: Any, **keywords: Any
) -> Tensor:
    trained = attn_mask is not None and is_mapped(attn_mask) and stack_of(attn_mask).requires_grad
    if any(map(is_mapped, (query, key, value))):
        query, key, value = map(_as_autocast, (query, key, value))
        attn_mask = None if attn_mask is None else _as_autocast(attn_mask)
    with sdpa_kernel(SDPBackend.MATH) if trained else nullcontext():
        return F.scaled_dot_product_attention(query, key, value, attn_mask, *arguments, **keywords)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if inplace or not training or not 0 < p < 1 or not _stacked_on_cpu(input):
        return F.dropout(input, p, training, inplace)
    return input * torch.empty_like(input).bernoulli_(1 - p).div_(1 - p)


def _shared(tensor: Tensor) -> Tensor:
    """A mapped tensor's value if it is equal for all clients, else the mapped tensor itself."""
    if not is_mapped(tensor) or map_level() != 1:
        return tensor
    stack = stack_of(tensor)
    return stack[0].detach() if torch.equal(stack, stack[:1].expand_as(stack)) else tensor


def _embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, *arguments: Any, **keywords: Any
) -> Tensor:
    rows = F.embedding(input, weight, padding_idx, *arguments, **keywords)
    return rows if padding_idx is None else _without_padding(rows, input, weight, padding_idx % weight.shape[0])


def _native_embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, *arguments: Any, **keywords: Any
) -> Tensor:
    rows = torch.embedding(weight, indices, padding_idx, *arguments, **keywords)
    return rows if padding_idx < 0 else _without_padding(rows, indices, weight, padding_idx)


def _without_padding(rows: Tensor, indices: Tensor, weight: Tensor, padding: int) -> Tensor:
    """Rows of an embedding, without a gradient for rows of padding."""
    return torch.where((indices == padding).unsqueeze(-1), rows.detach(), rows) if is_mapped(weight) else rows


def _linear_cross_entropy(*arguments: Any, options: Any = None, **keywords: Any) -> Tensor:
    return F.linear_cross_entropy(*arguments, **keywords)


def _select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    places = torch.arange(input.shape[dim], device=input.device) == index % input.shape[dim]
    return torch.where(places.view([-1, *[1] * (input.ndim - 1 - dim % input.ndim)]), src.unsqueeze(dim), input)


def _stacked_on_cpu(tensor: Tensor) -> bool:
    return is_mapped(tensor) and tensor.device.type == "cpu" and map_level() == 1


def _each(value: int | Sequence[int], dimensions: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dimensions if len(values) == 1 else values


def _as_autocast(tensor: Tensor) -> Tensor:
    """Cast as autocast would; autocast itself acts below the functions that a `TorchFunctionMode` sees."""
    if _is_cast(tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype(tensor.device.type))
    return tensor


def _is_cast(tensor: Tensor) -> bool:
    """Whether autocast is enabled for a tensor's device."""
    device = tensor.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _channels_last(stack: Tensor) -> Tensor:
    """A copy of a stack ``[clients, batch, channels, …]`` in channels-last memory format."""
    dense = stack.movedim(2, -1).contiguous()
    # View twice to normalise strides: a dimension of size one may have any, and torch infers the memory format from
    # strides.
    return dense.view(-1).view(dense.shape).movedim(-1, 2)


def _empty_channels_last(clients: int, shape: Sequence[int], like: Tensor) -> Tensor:
    """An empty stack in channels-last memory format, and not a view, because views could not be changed in place."""
    batch, channels, *size = shape
    layout = torch.empty(clients, batch, *size, channels, device="meta").movedim(-1, 2)
    return torch.empty_strided(layout.shape, layout.stride(), dtype=like.dtype, device=like.device)


class _OverStacks(Function):
    """Runs a function on the stacks behind mapped tensors; tensors that clients share are expanded."""

    generate_vmap_rule = False

    @staticmethod
    def forward(run: Callable[..., Tensor], *arguments: Any) -> Tensor:
        raise AssertionError("no argument is mapped")

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], run: Callable[..., Tensor], *arguments: Any) -> Any:
        stacks = [
            argument
            if not isinstance(argument, Tensor)
            else argument.expand(info.batch_size, *argument.shape)
            if dimension is None
            else argument.movedim(dimension, 0)
            for argument, dimension in zip(arguments, in_dims[1:], strict=True)
        ]
        return run(*stacks), 0


class _StackedConvolution(Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weights: Tensor,
        biases: Tensor | None,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
    ) -> Tensor:
        inputs, weights = _channels_last(inputs), _channels_last(weights)
        ctx.save_for_backward(inputs, weights)
        ctx.bias_shape = None if biases is None else biases.shape
        ctx.geometry = (stride, padding, dilation, False, [0] * len(stride), groups)
        outputs: Tensor | None = None
        for client, weight in enumerate(weights):
            bias = None if biases is None else biases[client]
            output = torch.convolution(inputs[client], weight, bias, *ctx.geometry)
            if outputs is None:
                outputs = _empty_channels_last(len(weights), output.shape, output)
            outputs[client] = output
        assert outputs is not None
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weights = ctx.saved_tensors
        gradients = _channels_last(gradient)
        needed = ctx.needs_input_grad[:3]
        results = (
            _empty_channels_last(len(inputs), inputs.shape[1:], inputs) if needed[0] else None,
            weights.new_empty(weights.shape) if needed[1] else None,
            weights.new_empty(ctx.bias_shape) if needed[2] else None,
        )
        bias_size = None if ctx.bias_shape is None else list(ctx.bias_shape[1:])
        for client, weight in enumerate(weights):
            parts = torch.ops.aten.convolution_backward(
                gradients[client], inputs[client], weight, bias_size, *ctx.geometry, needed
            )
            for result, part in zip(results, parts, strict=True):
                if result is not None:
                    result[client] = part
        return (*results, None, None, None, None)


class _StackedBatchNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weights: Tensor | None,
        biases: Tensor | None,
        running_means: Tensor | None,
        running_variances: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
    ) -> Tensor:
        inputs = _channels_last(inputs)
        outputs = torch.empty_like(inputs)
        stacks = (weights, biases, running_means, running_variances)
        kept = next((stack for stack in stacks if stack is not None), inputs)
        statistics = kept.new_empty(2, len(inputs), inputs.shape[2])
        for client, values in enumerate(inputs):
            own: list[Any] = [None if stack is None else stack[client] for stack in stacks]
            out = (outputs[client], *statistics[:, client])
            rows = values.numel() // values.shape[1]
            in_parts = training and values.dtype == torch.float32 and rows > _ROWS_AT_ONCE
            if in_parts:
                mean, variance = _batch_statistics(values)
                for running, new in zip(own[2:], (mean, variance * (rows / (rows - 1))), strict=True):
                    if running is not None:
                        running.mul_(1 - momentum).add_(new.float(), alpha=momentum)
                own[2:] = mean.float(), variance.float()
                statistics[:, client] = torch.stack([mean, (variance + eps).rsqrt()])
                out = (outputs[client], *values.new_empty(2, 0))
            # The type stubs of torch lack this overload and do not allow ``None`` for its tensors.
            torch.native_batch_norm(values, *own, training and not in_parts, momentum, eps, out=out)  # type: ignore[call-arg, misc, arg-type]
        # In training the gradient depends on the batch's statistics; the running ones change with later batches.
        running = (None, None) if training else (running_means, running_variances)
        ctx.save_for_backward(inputs, weights, *running, *statistics)
        ctx.bias_like = None if biases is None else biases.new_empty(0)
        ctx.settings = (training, eps)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, *stacks = ctx.saved_tensors
        gradients = _channels_last(gradient)
        channels = (len(inputs), inputs.shape[2])
        needed = ctx.needs_input_grad[:3]
        results = (
            torch.empty_like(inputs) if needed[0] else None,
            stacks[0].new_empty(channels) if needed[1] else None,
            ctx.bias_like.new_empty(channels) if needed[2] else None,
        )
        for client, values in enumerate(inputs):
            own = (None if stack is None else stack[client] for stack in stacks)
            parts = torch.ops.aten.native_batch_norm_backward(gradients[client], values, *own, *ctx.settings, needed)
            for result, part in zip(results, parts, strict=True):
                if result is not None:
                    result[client] = part
        return (*results, None, None, None, None, None)


def _batch_statistics(values: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the biased variance of each channel of values with the channels last, in float64.

    In one call torch would add all of a channel's numbers in turn, in float32: the mean of three million numbers can be
    wrong by some hundredths of their deviation.
    """
    rows = values.movedim(1, -1).flatten(0, -2)
    parts = rows.split(_ROWS_AT_ONCE)
    found = [torch.batch_norm_update_stats(part.T[None, :, :, None], None, None, 0.0) for part in parts]
    means, variances = (torch.stack(each).double() for each in zip(*found, strict=True))
    shares = means.new_tensor([len(part) / len(rows) for part in parts])
    mean = shares @ means
    return mean, shares @ (variances + (means - mean).square())


_OTHERWISE: dict[Any, Callable[..., Any]] = {
    F.batch_norm: _batch_norm,
    F.cross_entropy: _cross_entropy,
    F.dropout: _dropout,
    F.embedding: _embedding,
    F.max_pool2d: _max_pool,
    F.scaled_dot_product_attention: _attention,
    Tensor.requires_grad.__get__: _requires_grad,  # type: ignore[attr-defined]
    torch.embedding: _native_embedding,
    torch.select_scatter: _select_scatter,
    Tensor.select_scatter: _select_scatter,
}
"""The replaced functions, with replacements of the same arguments."""
if hasattr(F, "linear_cross_entropy"):
    _OTHERWISE[F.linear_cross_entropy] = _linear_cross_entropy
