"""PEFT's LoRA layers, recognised by their structure, so that PEFT need not be installed.

Changes of quantised base weights are buffers of their layers, which add them to their outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lowrank.internals.torch import own_buffers

Parts = dict[str, Tensor]

_CHANGE = "lowrank_change_"
_PREPARED = "keeps_lowrank_change"
_FOLDED = "lowrank_folded"
_PARTS = ("B", "A", "product")


def is_base_change(name: str) -> bool:
    """Whether a buffer's name is that of a quantised base weight's change, or of a factor of it."""
    return name.rpartition(".")[2].startswith(_CHANGE)


def keep_base_changes(module: nn.Module) -> None:
    """Allow changes of quantised base weights to be loaded from a state dict, in layers that PEFT wrapped.

    `FLoRA`, `FedEx` and `CoLR` keep their changes of a quantised weight in buffers of its layer,
    ``lowrank_change_B`` and ``lowrank_change_A``, or ``lowrank_change_product``. `FederatedLoop` calls this function;
    any other new module needs it before ``load_state_dict``, which refuses these names otherwise.

    Example:
        >>> model = nn.Linear(4, 4)
        >>> keep_base_changes(model)  # no quantised layer: nothing changes
    """
    for _, layer in peft_layers(module):
        base = layer.get_base_layer()
        # A forward hook would disable torch's fast path of attention; MultiheadAttention has no weight of its own
        # anyway.
        attends = isinstance(base, nn.MultiheadAttention)
        if not attends and not holds_numbers(base) and not why_no_separate_change(base):
            _prepare_for_change(base)


def _prepare_for_change(layer: nn.Module) -> None:
    if not vars(layer).get(_PREPARED, False):
        layer.register_forward_hook(_add_change)
        layer.register_load_state_dict_pre_hook(_make_room_for_change)
        vars(layer)[_PREPARED] = True


def change_in(layer: nn.Module) -> Parts:
    """A layer's change of its base weight: ``B`` and ``A``, or their ``product``; empty if there is none."""
    buffers = own_buffers(layer)
    return {name: value for name in _PARTS if (value := buffers.get(_CHANGE + name)) is not None}


def set_change(layer: nn.Module, parts: Parts) -> None:
    """Replace the change of a layer's base weight."""
    _prepare_for_change(layer)
    example = next(chain(layer.parameters(), layer.buffers()), None)
    for name in _PARTS:
        if name in parts:
            layer.register_buffer(_CHANGE + name, parts[name] if example is None else parts[name].to(example.device))
        else:
            own_buffers(layer).pop(_CHANGE + name, None)


def _add_change(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    """A forward hook that adds the change of a quantised base weight to the layer's output."""
    parts = change_in(layer)
    if not parts:
        return None
    (taken, *_) = inputs
    first = parts["product"] if "product" in parts else parts["A"]
    found = F.linear(taken.to(first.dtype), first)
    if "B" in parts:
        found = F.linear(found, parts["B"])
    return output + found.to(output.dtype)


def _make_room_for_change(layer: nn.Module, state: Mapping[str, Tensor], prefix: str, *_: Any) -> None:
    """A pre-hook of `load_state_dict` that registers buffers for a change in the state dict."""
    found = {name: value for name in _PARTS if (value := state.get(f"{prefix}{_CHANGE}{name}")) is not None}
    # A state dict with this layer but without a change removes the change.
    if found or any(key.startswith(prefix) for key in state):
        set_change(layer, {name: torch.empty_like(value) for name, value in found.items()})


def holds_numbers(layer: nn.Module) -> bool:
    """Whether a layer's weight is a plain floating-point tensor, hence not quantised."""
    weight = getattr(layer, "weight", None)
    # A quantised weight is an integer tensor (bitsandbytes), a tensor subclass (torchao), or missing.
    return isinstance(weight, Tensor) and weight.is_floating_point() and type(weight.data) is Tensor


def why_no_separate_change(base: nn.Module) -> str:
    """Why a quantised layer cannot add a change to its outputs; empty if it can."""
    if isinstance(base, (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return (
            f"it is quantised, and a change can be stored separately for linear layers only, not {type(base).__name__}"
        )
    return ""


def peft_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's layers that PEFT wrapped with LoRA, by name."""
    for name, layer in module.named_modules():
        if hasattr(layer, "lora_A") and hasattr(layer, "lora_embedding_A") and hasattr(layer, "get_base_layer"):
            yield name, layer


def mark_folded(layer: nn.Module) -> None:
    """Record on a layer that PEFT wrapped that its base weight has changed. The base layer alone has no mark."""
    vars(layer)[_FOLDED] = True


def folded_layers(module: nn.Module) -> list[str]:
    """Names of the layers that `mark_folded` marked."""
    return [name for name, layer in module.named_modules() if vars(layer).get(_FOLDED, False)]


def factor_names(module: nn.Module) -> Iterator[tuple[str, str, str]]:
    """The LoRA layers of PEFT, each with the names of its active adapters' ``B`` and ``A``."""
    for name, layer in peft_layers(module):
        for adapter in layer.active_adapters:
            if adapter in layer.lora_A:
                yield name, f"{name}.lora_B.{adapter}.weight", f"{name}.lora_A.{adapter}.weight"
            elif adapter in layer.lora_embedding_A:
                yield name, f"{name}.lora_embedding_B.{adapter}", f"{name}.lora_embedding_A.{adapter}"


def peft_parameters(module: nn.Module) -> tuple[set[Tensor], set[Tensor]]:
    """All parameters of models that PEFT wrapped and trains, and the subset that PEFT added."""
    wrapped: set[Tensor] = set()
    adapters: set[Tensor] = set()
    for part in module.modules():
        if hasattr(part, "peft_config") and any(value.requires_grad for value in part.parameters()):
            wrapped.update(part.parameters())
        if hasattr(part, "get_base_layer"):
            adapters.update(set(part.parameters()) - set(part.get_base_layer().parameters()))  # type: ignore[operator]
        for name in ("modules_to_save", "prompt_encoder"):
            if isinstance(found := getattr(part, name, None), nn.ModuleDict):
                adapters.update(found.parameters())
    return wrapped, adapters


def unlike_convolution(layer: nn.Module) -> str:
    """A setting of a convolution that PEFT's adapter does not reproduce; empty if there is none."""
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        # PEFT copies only kernel, stride and padding from the base layer.
        for setting, value, plain in (
            ("groups", layer.groups, layer.groups == 1),
            ("dilation", layer.dilation, set(layer.dilation) == {1}),
            ("padding_mode", layer.padding_mode, layer.padding_mode == "zeros"),
        ):
            if not plain:
                return f"{setting}={value!r}"
    return ""
