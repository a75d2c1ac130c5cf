"""Float32 for trained parameters in a model of 16 bits."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, MutableMapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_lowrank.internals.torch import own_buffers, own_parameters, remove_forward_hooks

_BEFORE = "narrow_type"
_BUFFERS = "widened_buffers"


def widen_factors(factors: nn.Module) -> None:
    """Change a low-rank layer's factors of 16 bits to float32, in place. The layer itself converts what it computes."""
    for factor in factors.parameters():
        if _is_narrow(factor):
            _remember(factors, factor)
            factor.data = factor.data.float()


def widen(model: nn.Module, parameters: Collection[nn.Parameter]) -> None:
    """Change parameters of 16 bits to float32, in place, and buffers of the modules that compute with them.

    A step smaller than the spacing of 16-bit numbers would be lost. Modules with only such parameters, children's
    included, compute in float32 and return their former dtype; under autocast they compute in autocast's dtype. The
    parameters of a module that also has others, such as a frozen weight beside a trained bias, are unchanged.
    """
    narrow = widened(model, parameters)
    readers = {reader for module, reader in _readers(model).items() if _own(module) & narrow}
    inside = {part for reader in readers for part in reader.modules() if part is not reader}
    for reader in readers:
        like = next(reader.parameters()).new_empty(0)
        _remember(reader, like)
        reader.register_forward_pre_hook(_as_parameters, with_kwargs=True)
        # A reader inside of another one returns float32, in which the outer one computes.
        if reader not in inside:
            reader.register_forward_hook(_as_before)
        for part in reader.modules():
            names = [name for name, buffer in own_buffers(part).items() if name != _BEFORE and _is_narrow(buffer)]
            if names:
                setattr(part, _BUFFERS, names)
            if names or _own(part) & narrow:
                _remember(part, like)
            for name in names:
                part.get_buffer(name).data = part.get_buffer(name).float()
    for parameter in narrow:
        parameter.data = parameter.data.float()


def type_before(module: nn.Module) -> torch.dtype | None:
    """The dtype that a module's own parameters had before `widen`; ``None`` if they are as they were."""
    buffer = own_buffers(module).get(_BEFORE)
    return None if buffer is None else buffer.dtype


def types_before(model: nn.Module) -> dict[Tensor, torch.dtype]:
    """The dtypes that the tensors had that `widen` and `widen_factors` changed."""
    return {tensor: dtype for part in model.modules() if (dtype := type_before(part)) for tensor in _changed(part)}


def hand_over(source: nn.Module, target: nn.Module) -> None:
    """Have `narrow` give a module the dtype that ``source`` had before `widen`."""
    if _BEFORE in own_buffers(source):
        target.register_buffer(_BEFORE, own_buffers(source)[_BEFORE], persistent=False)


def narrow(module: nn.Module) -> None:
    """Undo `widen` of a module, without its children: round its tensors, and remove hooks and buffer."""
    remove_forward_hooks(module, _as_parameters, _as_before)
    if _BEFORE in own_buffers(module):
        for tensor in _changed(module):
            tensor.data = tensor.data.to(module.get_buffer(_BEFORE).dtype)
        delattr(module, _BEFORE)
        vars(module).pop(_BUFFERS, None)


def widened(
    model: nn.Module, parameters: Collection[nn.Parameter], replaced: Set[nn.Parameter] = frozenset()
) -> set[nn.Parameter]:
    """The parameters that `widen` would change, after factors have taken the place of ``replaced``."""
    narrow = {parameter for parameter in parameters if _is_narrow(parameter)}
    readers = [(_own(module), reader) for module, reader in _readers(model).items() if _own(module) & narrow]
    # An attention with factors reads them beside its other parameters.
    gone = {reader: set() if isinstance(reader, nn.MultiheadAttention) else replaced for _, reader in readers}
    read = {reader: _read(reader) - gone[reader] for _, reader in readers}
    while mixed := {each for own, reader in readers if read[reader] - narrow for each in own & narrow}:
        narrow -= mixed
    return narrow


def _readers(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """For each module, the one that computes with its parameters: itself, or a parent that never calls it."""
    readers = {model: model}
    for module in model.modules():
        for name, child in module.named_children():
            uncalled = (
                readers[module] is not module
                or isinstance(module, nn.MultiheadAttention)
                or isinstance(child, (nn.ParameterDict, nn.ParameterList))
                or (name == "parametrizations" and is_parametrized(module))
            )
            readers.setdefault(child, readers[module] if uncalled else child)
    return readers


def _read(reader: nn.Module) -> set[nn.Parameter]:
    # A low-rank layer converts its factors itself.
    converts = any(_BEFORE in own_buffers(child) for child in reader.children())
    return _own(reader) if converts else set(reader.parameters())


def _own(module: nn.Module) -> set[nn.Parameter]:
    return {parameter for parameter in own_parameters(module).values() if parameter is not None}


def _changed(module: nn.Module) -> list[Tensor]:
    return [*_own(module), *(module.get_buffer(name) for name in getattr(module, _BUFFERS, ()))]


def _is_narrow(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_floating_point() and tensor.itemsize < 4


def _remember(module: nn.Module, like: Tensor) -> None:
    # A buffer has the former dtype, so that the dtype follows later conversions such as `model.float()`.
    module.register_buffer(_BEFORE, like.new_empty(0), persistent=False)


def _as_parameters(
    module: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not _autocasts(module):
        dtype = next(module.parameters()).dtype
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
