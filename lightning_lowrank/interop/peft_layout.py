"""The features that a PEFT adapter folder can express, and the description of a module for writing one.

An adapter folder holds ``adapter_config.json`` and ``adapter_model.safetensors``. PEFT's
``PeftModel.from_pretrained(base_model, folder)`` and serving tools load it. Both directions need the extra
``peft``; this module does not, because every run with `LowRank` describes its module.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lightning_lowrank.buffers import persistent_buffers
from lightning_lowrank.configuration import misconfigured
from lightning_lowrank.internals.peft import unlike_convolution
from lightning_lowrank.internals.torch import digest_of, own_children
from lightning_lowrank.layers import CoreProduct, LowRankLayer, MatrixProduct, low_rank_layers

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
# PEFT's prefix of the base model's names.
PREFIX = "base_model.model."
# Values of init_lora_weights with which PEFT does not change base weights.
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "mica", "orthogonal")
_KINDS = ("Linear", "Conv1D", "Embedding", "Conv1d", "Conv2d", "Conv3d")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class LayerOutline:
    """The description of a low-rank layer as a LoRA adapter.

    ``B`` and ``A`` are the names of the factors on the output's and the input's side in the state dict. ``core`` has
    those of a `CoreProduct`'s core between them, and its scales if it has any. ``reason`` says why PEFT cannot
    express the layer; it is empty if it can. ``folded`` is `LowRankLayer.folded`.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    rank: int
    alpha: float
    rank_stabilized: bool
    dropout: float
    B: str
    A: str
    reason: str
    folded: bool
    core: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outline:
    """The description of a converted module, without tensors, for writing an adapter folder.

    Attributes:
        layers: Each low-rank layer, in registration order.
        modules: Names of all modules.
        containers: Names of the lists and dictionaries among them, which PEFT cannot wrap.
        parameters: Names of all parameters except those of low-rank layers, and whether they are trained, or were at
            some time in a fit with `LowRank`.
        buffers: Names of the buffers that training may have changed: all of modules without children, and of others
            those that have other values than before the conversion.
        sources: Where pretrained models among the modules came from, by the modules' names.
        lightning: Whether the module is a LightningModule, which usually holds the pretrained network.
    """

    layers: tuple[LayerOutline, ...]
    modules: tuple[str, ...]
    containers: tuple[str, ...]
    parameters: dict[str, bool]
    buffers: tuple[str, ...]
    sources: dict[str, str]
    lightning: bool

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain Python, for a checkpoint."""
        return asdict(self)

    def uncompiled(self) -> Outline:
        """The outline of the same module without `torch.compile`."""

        def renamed(value: Any) -> Any:
            if isinstance(value, dict):
                return {renamed(key): renamed(each) for key, each in value.items()}
            if isinstance(value, tuple):
                return tuple(map(renamed, value))
            return uncompiled(value) if isinstance(value, str) else value

        return Outline.from_dict(renamed(self.to_dict()))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Outline:
        """Build an outline from the result of `to_dict`."""
        return cls(**{**fields, "layers": tuple(LayerOutline(**layer) for layer in fields["layers"])})


def outline(module: nn.Module) -> Outline:
    """Describe a module with low-rank layers, for `write_adapter`."""
    import lightning.pytorch as pl

    names, trained = module_names(module), trained_in_fits(module)
    layers = [
        _outline_layer(name, layer, names[layer], module.get_submodule(name.rpartition(".")[0]), trained)
        for name, layer in low_rank_layers(module)
    ]
    before = {
        f"{prefix}.{name}".lstrip("."): digest
        for prefix, part in module.named_modules()
        for name, digest in getattr(part, "buffers_before_training", {}).items()
    }
    own = tuple(f"{layer.name}." for layer in layers)
    return Outline(
        layers=tuple(layers),
        modules=tuple(name for same in names.values() for name in same),
        containers=tuple(name for part, same in names.items() if isinstance(part, _CONTAINERS) for name in same),
        parameters={
            name: value.requires_grad or name in trained
            for name, value in module.named_parameters(remove_duplicate=False)
            if not name.startswith(own) or name.removesuffix(".bias") + "." in own
        },
        buffers=tuple(
            name
            for name, buffer in persistent_buffers(module).items()
            if not own_children(module.get_submodule(name.rpartition(".")[0])) or digest_of(buffer) != before.get(name)
        ),
        sources={
            name: source
            for part, (name, *_) in names.items()
            if (source := getattr(getattr(part, "config", None), "_name_or_path", None)) and isinstance(source, str)
        },
        lightning=isinstance(module, pl.LightningModule),
    )


def trained_in_fits(module: nn.Module) -> Collection[str]:
    """Names of the parameters that were trained at some time in fits with `LowRank`."""
    found: Collection[str] = getattr(getattr(module, "lowrank_conversion", None), "trained", ())
    return found


def _outline_layer(
    name: str, layer: LowRankLayer, names: Sequence[str], parent: nn.Module, trained: Collection[str]
) -> LayerOutline:
    left, right = ("V", "U") if layer.first_is_input else ("U", "V")
    made = layer.factorization
    heads = made.heads if isinstance(made, CoreProduct) else 1
    # The adapter has the rank of all heads together, and the scale α / rank (or α / √rank) of a single head.
    widened = math.sqrt(heads) if layer.rank_stabilized else heads
    return LayerOutline(
        name=name,
        kind=layer.dense_class.__name__,
        shape=layer.weight_shape,
        rank=layer.rank * heads,
        # Without α the update is multiplied by 1, as with α equal to the rank.
        alpha=(float(layer.rank) if layer.alpha is None else layer.alpha) * widened,
        rank_stabilized=layer.rank_stabilized,
        dropout=layer.dropout,
        B=f"{name}.{'fixed' if left in layer.fixed else 'factors'}.{left}",
        A=f"{name}.{'fixed' if right in layer.fixed else 'factors'}.{right}",
        reason=_unsupported_adapter(layer, names, parent, trained),
        folded=layer.folded,
        core=tuple(
            f"{name}.factors.{part}" for part in ("H", "S") if isinstance(made, CoreProduct) and part in layer.factors
        ),
    )


def _unsupported_adapter(layer: LowRankLayer, names: Sequence[str], parent: nn.Module, trained: Collection[str]) -> str:
    """Why no PEFT adapter computes the same as a low-rank layer; empty if one does."""
    if layer.role != "update":
        return f"its role is {layer.role!r}: its factors are the weight, and LoRA's are a change to it"
    if not isinstance(layer.factorization, (MatrixProduct, CoreProduct)):
        return f"its factorization is {layer.factorization!r}, and LoRA's is MatrixProduct()"
    if layer.decouple:
        return "its factors are decoupled"
    if layer.frozen_weight.requires_grad or any(f"{name}.frozen_weight" in trained for name in names):
        return "its base weight is trained as well (train_base)"
    reader = _reads_weights(parent)
    if reader:
        return f"{reader} reads its weight, and PEFT's adapter of such a layer is not called"
    if len(names) > 1:
        return f"the model holds it twice, as {' and '.join(names)}, and PEFT wraps one of them"
    reason = unsupported_layer(layer, layer.dense_class.__name__)
    if not reason and math.prod(layer.weight_shape[2:]) > 1 and layer.factorization.layout != "channel":
        other = f"{type(layer.factorization).__name__}(layout='channel')"
        reason = f"its kernel is factorised in another way than PEFT's: use {other}"
    return reason


def _reads_weights(parent: nn.Module) -> str:
    """The class of a module that reads its layers' weights instead of calling the layers; empty for other modules."""
    if isinstance(parent, nn.MultiheadAttention):
        return "nn.MultiheadAttention"
    # In evaluation, a TransformerEncoderLayer may read weights. A subclass with its own forward() calls the layers.
    if isinstance(parent, nn.TransformerEncoderLayer) and type(parent).forward is nn.TransformerEncoderLayer.forward:
        return "nn.TransformerEncoderLayer"
    return ""


def unsupported_layer(layer: nn.Module, kind: str) -> str:
    """Why PEFT has no LoRA adapter for a layer of the dense class ``kind``; empty if it has one."""
    if kind not in _KINDS:
        return f"PEFT has no LoRA for {kind}"
    unlike = unlike_convolution(layer)
    return f"it has {unlike}, which PEFT's adapters of convolutions leave out" if unlike else ""


def uncompiled(name: str) -> str:
    """A module's or tensor's name without the parts that `torch.compile` adds by wrapping modules.

    Example:
        >>> uncompiled("network._orig_mod.0.weight"), uncompiled("_orig_mod.0"), uncompiled("network._orig_mod")
        ('network.0.weight', '0', 'network')
    """
    return re.sub(r"(^|\.)_orig_mod(?=\.|$)", "", name).lstrip(".")


def module_names(module: nn.Module) -> dict[nn.Module, list[str]]:
    """All names of each module; a shared module has several."""
    names: dict[nn.Module, list[str]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        names.setdefault(part, []).append(name)
    return names


def check_path_and_module(call: str, path: Any, module: Any) -> None:
    """Raise if ``path`` is no path or ``module`` no module, as when arguments are swapped.

    Args:
        call: The called function with its arguments' names, for messages.
        path: A path.
        module: A module.
    """
    swapped = " in this order" if isinstance(path, nn.Module) and isinstance(module, (str, os.PathLike)) else ""
    for value, kinds, what in ((path, (str, os.PathLike), "a path"), (module, nn.Module, "a module")):
        if not isinstance(value, kinds):
            raise misconfigured(
                f"{call} takes a path and a module{swapped}, and where {what} is wanted it was given a value of type"
                f" {type(value).__name__}."
            )


def check_folder(folder: Path, missing: str = "") -> None:
    """Raise if an adapter's folder is a file or, with ``missing`` (the advice for that case), does not exist."""
    if folder.exists() and not folder.is_dir():
        raise misconfigured(f"{folder} is a file, and an adapter is a folder: give the path of a folder.")
    if missing and not folder.exists():
        raise misconfigured(f"there is no folder {folder}: {missing}.")


def refuse_wrapped(module: nn.Module, remedy: str) -> None:
    """Raise if PEFT has wrapped layers of a module."""
    for name, part in module.named_modules():
        if hasattr(part, "lora_A") and hasattr(part, "get_base_layer"):
            raise misconfigured(f"PEFT has wrapped {name!r} already: {remedy}.")
