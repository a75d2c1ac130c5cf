"""Float32 for trained parameters in a model of 16 bits."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lowrank.internals.torch import own_buffers, own_parameters, remove_forward_hooks

_BEFORE = "narrow_type"


def widen(model: nn.Module, parameters: Collection[nn.Parameter]) -> None:
    """Change parameters of 16 bits to float32, in place.

    A step smaller than the spacing of 16-bit numbers would be lost. Modules with only such parameters compute in
    float32 and return their former dtype; under autocast they compute in autocast's dtype. A module that also
    has other parameters, such as a frozen weight with a trained bias, is unchanged.
    """
    narrow = widened(model, parameters)
    for module in model.modules():
        own = set(own_parameters(module).values())
        if own and own <= narrow:
            # A buffer has the former dtype, so that the dtype follows later conversions such as `model.float()`.
            module.register_buffer(_BEFORE, next(iter(own)).new_empty(0), persistent=False)
            module.register_forward_pre_hook(_as_parameters, with_kwargs=True)
            module.register_forward_hook(_as_before)
    for parameter in narrow:
        parameter.data = parameter.data.float()


def type_before(module: nn.Module) -> torch.dtype | None:
    """The dtype that a module's own parameters had before `widen`; ``None`` if they are as they were."""
    buffer = own_buffers(module).get(_BEFORE)
    return None if buffer is None else buffer.dtype


def hand_over(source: nn.Module, target: nn.Module) -> None:
    """Have `narrow` give a module the dtype that ``source`` had before `widen`."""
    if _BEFORE in own_buffers(source):
        target.register_buffer(_BEFORE, own_buffers(source)[_BEFORE], persistent=False)


def narrow(module: nn.Module) -> None:
    """Undo `widen` of a module, without its children: round its parameters, and remove hooks and buffer."""
    remove_forward_hooks(module, _as_parameters, _as_before)
    if _BEFORE in own_buffers(module):
        for parameter in own_parameters(module).values():
            if parameter is not None:
                parameter.data = parameter.data.to(module.get_buffer(_BEFORE).dtype)
        delattr(module, _BEFORE)


def widened(model: nn.Module, parameters: Collection[nn.Parameter]) -> set[nn.Parameter]:
    """The parameters that `widen` would change."""
    narrow = {parameter for parameter in parameters if parameter.is_floating_point() and parameter.itemsize < 4}
    holders = [set(own_parameters(module).values()) for module in model.modules()]
    while mixed := {parameter for own in holders if own - narrow for parameter in own & narrow}:
        narrow -= mixed
    return narrow


def _as_parameters(
    module: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not _autocasts(module):
        dtype = next(iter(own_parameters(module).values())).dtype
        arguments, keywords = _cast((arguments, keywords), dtype)
    return arguments, dict(keywords)


def _as_before(module: nn.Module, arguments: Any, output: Any) -> Any:
    return output if _autocasts(module) else _cast(output, module.get_buffer(_BEFORE).dtype)


def _autocasts(module: nn.Module) -> bool:
    device = next(module.parameters()).device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        cast = {name: _cast(each, dtype) for name, each in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return cast
        # A mapping such as ModelOutput may also have its values as attributes.
        found = copy.copy(value)
        for name, each in cast.items():
            found[name] = each
        return found
    if isinstance(value, (list, tuple)):
        each = [_cast(one, dtype) for one in value]
        # A PackedSequence is a named tuple.
        return type(value)(*each) if hasattr(value, "_fields") else type(value)(each)
    return value
