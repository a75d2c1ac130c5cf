"""`export_adapter`: writes low-rank layers as a PEFT adapter folder."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from lightning_lowrank.arguments import listed
from lightning_lowrank.configuration import misconfigured
from lightning_lowrank.interop.files import replacing
from lightning_lowrank.interop.peft_layout import (
    CONFIG_FILE,
    PREFIX,
    WEIGHTS_FILE,
    WRAPPED,
    LayerOutline,
    Outline,
    outline,
    refuse_wrapped,
)
from lightning_lowrank.layers import low_rank_layers

_DENSE = "export dense weights instead, as `lightning-lowrank export` does by default"
_PART = (
    f"so the adapters are only a part of what was learnt: {_DENSE}. If nothing was folded, export_adapter(module,"
    " folder, base=pretrained_network) accepts the module."
)


def export_adapter(
    module: nn.Module, folder: str | Path, *, prefix: str | None = None, base: nn.Module | None = None
) -> Path:
    r"""Write a module's low-rank layers as a PEFT adapter folder.

    ``PeftModel.from_pretrained(base_model, folder)`` then computes what the module does, to rounding. Layers are
    ``nn.Linear``, transformers' ``Conv1D``, ``nn.Embedding`` and, with ``MatrixProduct("channel")`` or kernels of size
    1, ``nn.Conv1d`` to ``nn.Conv3d``, with factors of role ``"update"``: :math:`W + \text{scaling} \cdot B A` (Hu et
    al., 2022, Eq. 3). Ranks and :math:`\alpha` may differ between layers. Trained biases of these layers become
    ``bias="lora_only"``; modules that own other trained parameters or buffers that training changes (classification
    heads, norms) are saved whole, as ``modules_to_save``.

    Args:
        module: A module that `LowRank` or `lightning_lowrank.convert` converted.
        folder: Where to write ``adapter_config.json`` and ``adapter_model.safetensors``; made if needed.
        prefix: Name of the pretrained network in the module, to which PEFT's names are relative; ``""``: the module
            itself. ``None``: for a LightningModule its attribute that holds all low-rank layers, else the module.
        base: The pretrained network as it was, dense, on any device. With it, what differs from it is written,
            whether trained or not, and a frozen weight that differs is refused. Without it, methods that change the
            frozen weights (``FLoRA``, ``FedEx``, ``CoLR``, ``FedMUD``'s resets) are noticed in the module that they
            changed, and not in another one that has loaded its state dict.

    Returns:
        The folder.

    Raises:
        MisconfigurationException: If something trained cannot be expressed; it names the layers or parameters and the
            reason. Nothing is written then.

    Example:
        >>> import tempfile
        >>> from lightning_lowrank import MatrixProduct, convert
        >>> network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> _ = convert(network, MatrixProduct(), rank=1, alpha=2, init="lora", freeze_rest=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     config = json.loads((export_adapter(network, folder) / "adapter_config.json").read_text())
        >>> config["r"], config["lora_alpha"], config["target_modules"]
        (1, 2, ['0', '2'])
    """
    from lightning_lowrank.internals.lightning import trainer_of

    refuse_wrapped(module, WRAPPED)
    trainer = trainer_of(module)
    if base is None and trainer is not None and trainer.global_step:
        for loop in getattr(trainer, "callbacks", ()):
            if loop.state_key == "FederatedLoop":
                refuse_changed_base(type(loop.algorithm).__name__, loop.server.base.state)
    factors = [factor for _, layer in low_rank_layers(module) for factor in layer.factors.values()]
    if base is None and factors and not any(factor.requires_grad for factor in factors):
        raise misconfigured(
            "no factor requires a gradient, as after freeze(), so that what else was trained cannot be told: call"
            " unfreeze() or requires_grad_() for what was trained, or export_adapter(module, folder,"
            " base=pretrained_network)."
        )
    return write_adapter(outline(module), module.state_dict(), folder, prefix, base)


def refuse_changed_base(algorithm: str, state: Mapping[str, Any]) -> None:
    """Refuse a federated run whose algorithm, by its state, has folded changes into the frozen weights."""
    if state.get("folded"):
        raise misconfigured(f"{algorithm} with this operator or setting folds updates into the frozen weights, {_PART}")


def write_adapter(
    described: Outline,
    tensors: Mapping[str, Tensor],
    folder: str | Path,
    prefix: str | None = None,
    base: nn.Module | None = None,
) -> Path:
    """Write an adapter folder from the `outline` of a module and its state dict; see `export_adapter`."""
    layers = described.layers
    if not layers:
        raise misconfigured(
            "the module has no low-rank layers to export: convert it with LowRank, or load a checkpoint into a"
            " converted module."
        )
    reasons = [f"{layer.name}: {layer.reason}" for layer in layers if layer.reason]
    if reasons:
        raise misconfigured(f"PEFT cannot express {listed(reasons, '; ')}. {_DENSE.capitalize()}.")
    dropouts = {layer.dropout for layer in layers}
    if len(dropouts) > 1:
        raise misconfigured(
            f"PEFT has one lora_dropout for all layers, and these have {sorted(dropouts)}: give them one."
        )
    folded = [layer.name for layer in layers if layer.folded]
    if folded and base is None:
        raise misconfigured(f"updates were folded into the frozen weights of {listed(folded)}, {_PART}")
    root = _root(described, prefix)
    outside = [layer.name for layer in layers if not layer.name.startswith(root)]
    outside += [name for name, trained in described.parameters.items() if trained and not name.startswith(root)]
    outside += [name for name in described.buffers if name.endswith(".running_mean") and not name.startswith(root)]
    if outside:
        raise misconfigured(
            f"{listed(outside)} {'are' if len(outside) > 1 else 'is'} trained outside {root.removesuffix('.')!r}, to"
            ' which names in the folder would be relative: give prefix="" to make the whole module the base model, or'
            " freeze what is outside."
        )
    changed = _changed(described, tensors, root, base)
    biases = {f"{layer.name}.bias" for layer in layers} & described.parameters.keys()
    with_biases = bool(changed & biases)
    saved = _modules_to_save(described, changed - biases, root)
    named = {layer.name.removeprefix(root): layer for layer in layers}
    stabilized = all(layer.rank_stabilized for layer in layers)
    rank, rank_pattern = _most_common({name: layer.rank for name, layer in named.items()})
    alpha, alpha_pattern = _most_common({name: _alpha(layer, stabilized) for name, layer in named.items()})
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": described.sources.get(root.removesuffix(".")),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": stabilized,
        "lora_dropout": dropouts.pop(),
        "target_modules": _target_modules(described, list(named), saved, root),
        "modules_to_save": saved or None,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "bias": "lora_only" if with_biases else "none",
        "fan_in_fan_out": any(layer.kind == "Conv1D" for layer in layers),
        "init_lora_weights": True,
    }
    contents: dict[str, Tensor] = {}
    for name, layer in named.items():
        contents.update({f"{PREFIX}{name}.{key}": value for key, value in _factors(layer, tensors).items()})
        if with_biases and f"{layer.name}.bias" in biases:
            contents[f"{PREFIX}{name}.base_layer.bias"] = tensors[f"{layer.name}.bias"]
    for name, value in tensors.items():
        if name.startswith(tuple(f"{root}{module}." for module in saved)):
            contents[PREFIX + name.removeprefix(root)] = value
    # safetensors refuses views, and tensors that share memory as those of tied layers do.
    contents = {name: value.detach().cpu().contiguous().clone() for name, value in contents.items()}
    folder = Path(folder)
    with replacing(folder / CONFIG_FILE) as config_part, replacing(folder / WEIGHTS_FILE) as weights_part:
        safetensors.torch.save_file(contents, weights_part, metadata={"format": "pt"})
        config_part.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        # Without its configuration a folder is refused, so that new weights are never read with an old one.
        (folder / CONFIG_FILE).unlink(missing_ok=True)
    return folder


def _root(described: Outline, prefix: str | None) -> str:
    """Return the prefix of all names in the pretrained network, with its dot."""
    if prefix is None:
        heads = {layer.name.partition(".")[0] for layer in described.layers}
        held = all("." in layer.name for layer in described.layers)
        prefix = heads.pop() if described.lightning and held and len(heads) == 1 else ""
    prefix = prefix.removesuffix(".")
    if prefix not in described.modules:
        children = [name for name in described.modules if name and "." not in name]
        raise misconfigured(f"prefix is {prefix!r}, and the module's parts are {listed(children)}.")
    return f"{prefix}." if prefix else ""


def _changed(described: Outline, tensors: Mapping[str, Tensor], root: str, base: nn.Module | None) -> set[str]:
    """Return the names of parameters and buffers, factors aside, that differ from the pretrained network's."""
    if base is None:
        trained = {name for name, trained in described.parameters.items() if trained}
        return trained | {name for name in described.buffers if name.startswith(root)}
    before = base.state_dict()
    layers = {f"{layer.name}.frozen_weight": f"{layer.name}.weight" for layer in described.layers}
    factors = {key for layer in described.layers for key in (layer.A, layer.B)}
    changed = set()
    for name, value in tensors.items():
        if not name.startswith(root) or name in factors:
            continue
        key = layers.get(name, name).removeprefix(root)
        if key not in before or before[key].shape != value.shape:
            raise misconfigured(
                f"base has no {key} of shape {tuple(value.shape)}: it must be the network as it was before its layers"
                " were converted."
            )
        if not torch.equal(before[key].to(value), value):
            if name in layers:
                raise misconfigured(
                    f"the frozen weight {key} is not that of base: the method folded updates into it, or base is"
                    f" another network. {_DENSE.capitalize()}."
                )
            changed.add(name)
    return changed


def _modules_to_save(described: Outline, changed: Iterable[str], root: str) -> list[str]:
    """Return the modules, relative to the root, that own what has changed."""
    owners: set[str] = set()
    for name in sorted(changed):
        owner = name.rpartition(".")[0]
        while owner in described.containers:
            owner = owner.rpartition(".")[0]
        adapted = any(layer.name.startswith(f"{owner}.") for layer in described.layers)
        if adapted or owner in ("", root.removesuffix(".")):
            raise misconfigured(
                f"{name} has changed, and PEFT saves only whole modules (modules_to_save): its module holds adapters as"
                f" well. Freeze it in training (LowRank(freeze_rest=True)), or {_DENSE}."
            )
        owners.add(owner.removeprefix(root))
    return sorted(owner for owner in owners if not any(owner.startswith(f"{other}.") for other in owners))


def _target_modules(described: Outline, names: list[str], saved: list[str], root: str) -> list[str] | str:
    """Return the layers' names, or a regular expression if PEFT would match other modules by these names too."""
    others = {name.removeprefix(root) for name in described.modules if name.startswith(root)} - set(names)
    # As peft.utils.other._set_trainable and peft.tuners.tuners_utils.check_target_module_exists match names.
    for module in saved:
        taken = [name for name in others if name.endswith(module) and name not in saved]
        hidden = [name for name in names if re.match(rf"(^|.*\.){module}($|\..*)", name) or name.endswith(module)]
        if taken or hidden:
            raise misconfigured(
                f"{module} was trained whole, and PEFT, which matches modules_to_save by the ends of names, would take"
                f" {listed(taken + hidden)} for it: rename the module, or {_DENSE}."
            )
    if any(other.endswith(tuple(f".{name}" for name in names)) for other in others):
        return "|".join(re.escape(name) for name in names)
    return names


def _alpha(layer: LayerOutline, stabilized: bool) -> float:
    """Return α, an integer if it is whole; rsLoRA's as plain LoRA's unless all layers are rank-stabilised."""
    alpha = layer.alpha if stabilized or not layer.rank_stabilized else layer.alpha * math.sqrt(layer.rank)
    return int(alpha) if alpha == int(alpha) else alpha


def _most_common(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the most common value, and the others by a pattern that matches their layer alone."""
    ((common, _),) = Counter(values.values()).most_common(1)
    return common, {f"^{re.escape(name)}": value for name, value in values.items() if value != common}


def _factors(layer: LayerOutline, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a layer's factors with PEFT's names and shapes."""
    left, right = tensors[layer.B], tensors[layer.A].T
    if layer.kind == "Embedding":
        return {"lora_embedding_A": right, "lora_embedding_B": left}
    if len(layer.shape) > 2:
        right = right.reshape(layer.rank, *layer.shape[1:])
        left = left.reshape(*left.shape, *(1 for _ in layer.shape[2:]))
    return {"lora_A.weight": right, "lora_B.weight": left}
