"""`export_adapter`: writes low-rank layers as a PEFT adapter folder."""

from __future__ import annotations

import copy
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from lightning_lowrank.arguments import join_names
from lightning_lowrank.buffers import persistent_buffers
from lightning_lowrank.configuration import misconfigured
from lightning_lowrank.extras import import_extra
from lightning_lowrank.files import replacing
from lightning_lowrank.internals.peft import folded_layers, peft_parameters
from lightning_lowrank.internals.torch import own_children
from lightning_lowrank.interop.peft_layout import (
    CONFIG_FILE,
    PLAIN_STARTS,
    PREFIX,
    WEIGHTS_FILE,
    LayerOutline,
    Outline,
    check_folder,
    check_path_and_module,
    outline,
    trained_in_fits,
    uncompiled,
)
from lightning_lowrank.layers import CoreProduct, low_rank_layers
from lightning_lowrank.lora.adapters import Adapter, find_adapters

# Parts that PEFT inserts into the names of wrapped layers.
_WRAPPING = re.compile(r"\.?(base_layer|original_module)\b")
# Initialisations of PEFT that subtract the first product from the base weight.
_TAKEN_OUT = ("pissa", "olora", "corda", "lora_ga")
_DENSE = "export dense weights instead, as `lightning-lowrank export` does by default"
_PART = (
    "so the adapters contain only a part of the training: give the original network, export_adapter(module, folder,"
    " base=pretrained_network), or to `lightning-lowrank export` the run's --config, which builds it; the changes then"
    f" become part of the adapters. Or {_DENSE}."
)


def export_adapter(
    module: nn.Module,
    folder: str | Path,
    *,
    prefix: str | None = None,
    base: nn.Module | None = None,
    adapter: str | None = None,
) -> Path:
    r"""Write a module's low-rank layers, or the adapter of a model that PEFT wrapped, as a PEFT adapter folder.

    ``PeftModel.from_pretrained(base_model, folder)`` then computes the same as the module, to rounding. Layers are
    ``nn.Linear``, transformers' ``Conv1D``, ``nn.Embedding`` and, with ``MatrixProduct("channel")`` or kernels of size
    1, ``nn.Conv1d`` to ``nn.Conv3d``, with factors of role ``"update"``: :math:`W + \text{scaling} \cdot B A` (Hu et
    al., 2022, Eq. 3). The core of a ``CoreProduct`` is multiplied into :math:`B`. Ranks and :math:`\alpha` may differ
    between layers. Trained biases of these layers become ``bias="lora_only"``; modules that own other trained
    parameters or buffers that training changes (classification heads, norms) are saved whole, as ``modules_to_save``.

    A model that PEFT wrapped, with any of its methods, is written by PEFT itself; a warning names parameters that are
    trained outside of it, which the folder does not have. If the base weights of either have changed, as after
    ``FLoRA``, ``FedEx`` or ``CoLR``, the layer's adapter becomes the truncated singular value decomposition of that
    change and :math:`\text{scaling} \cdot B A` together, of the rank that it needs, so that the adapter is whole on the
    weights that the run began with. That needs ``base``, or a quantised layer, whose change is stored separately.

    Args:
        module: A module that `LowRank` or `lightning_lowrank.convert` converted, or one that holds a model that PEFT
            wrapped, or into which ``peft.inject_adapter_in_model`` put adapters.
        folder: Where to write ``adapter_config.json`` and ``adapter_model.safetensors``; made if needed.
        prefix: Name of the pretrained network in the module, to which PEFT's names are relative; ``""``: the module
            itself. ``None``: for a LightningModule its attribute that holds all low-rank layers, else the module.
        base: The pretrained network as it was, dense, on any device. With it, all tensors that differ from it are
            written, trained or not, and if a layer's frozen weight differs, the difference is part of its adapter.
            Without it, methods that change the frozen weights (``FLoRA``, ``FedEx``, ``CoLR``, ``FedMUD``'s resets) are
            refused in the module that they changed, and not noticed in another one that has loaded its state dict. Also
            without it, a model that PEFT wrapped is refused if it has trained parameters, or running statistics, which
            training may have changed, outside the adapters and ``modules_to_save``.
        adapter: Which of PEFT's adapters; by default the active one.

    Returns:
        The folder.

    Raises:
        MisconfigurationException: If something trained cannot be expressed; it names the layers or parameters and the
            reason. Nothing is written then. Or if PEFT is not installed.

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

    import_extra("peft", "export_adapter")
    check_path_and_module("export_adapter(module, folder)", folder, module)
    check_folder(Path(folder))
    wrapped = any(hasattr(part, "get_base_layer") or hasattr(part, "peft_config") for part in module.modules())
    described = None if wrapped else outline(module)
    if described is not None:
        refuse_inexpressible(described)
    trainer = trainer_of(module)
    sums: Mapping[str, Tensor] = {}
    if trainer is not None and trainer.global_step:
        for loop in getattr(trainer, "callbacks", ()):
            if loop.state_key == "FederatedLoop":
                sums = loop.server.base.state.get("sums", {})
                if base is None:
                    refuse_changed_base(type(loop.algorithm).__name__, loop.server.base.state)
    if described is None:
        original = None if base is None else {uncompiled(name): value for name, value in _tensors(base)}
        return export_wrapped(module, Path(folder), adapter, original, sums)
    if adapter is not None:
        raise misconfigured(f"adapter={adapter!r} is for a model that PEFT wrapped, and the module holds none.")
    factors = [factor for _, layer in low_rank_layers(module) for factor in layer.factors.values()]
    told = trained_in_fits(module) or not factors or any(factor.requires_grad for factor in factors)
    if base is None and not told:
        raise misconfigured(
            "no factor requires a gradient, as after freeze(), so that the trained parameters are unknown: call"
            " unfreeze() or requires_grad_() for them, or export_adapter(module, folder,"
            " base=pretrained_network)."
        )
    return write_adapter(described, nn.Module.state_dict(module), folder, prefix, base, sums)


def refuse_changed_base(algorithm: str, state: Mapping[str, Any]) -> None:
    """Raise if an algorithm's state records changes of frozen weights."""
    if state.get("folded"):
        raise misconfigured(f"{algorithm} with this operator or setting folds updates into the frozen weights, {_PART}")


def refuse_inexpressible(described: Outline) -> None:
    """Raise if a layer has no equivalent adapter in PEFT."""
    reasons = [f"{layer.name}: {layer.reason}" for layer in described.layers if layer.reason]
    if reasons:
        raise misconfigured(f"PEFT cannot express {join_names(reasons, '; ')}. {_DENSE.capitalize()}.")


def write_adapter(
    described: Outline,
    tensors: Mapping[str, Tensor],
    folder: str | Path,
    prefix: str | None = None,
    base: nn.Module | None = None,
    sums: Mapping[str, Tensor] = {},
) -> Path:
    """Write an adapter folder from a module's `outline` and state dict; see `export_adapter`.

    ``sums`` are frozen weights of 16 bits that have changed, by layer, before they were rounded.
    """
    import peft

    described = described.uncompiled()
    tensors, sums = ({uncompiled(name): value for name, value in each.items()} for each in (tensors, sums))
    before = None if base is None else {uncompiled(name): value for name, value in nn.Module.state_dict(base).items()}
    layers = described.layers
    if not layers:
        raise misconfigured(
            "the module has no low-rank layers to export: convert it with LowRank, or load a checkpoint into a"
            " converted module."
        )
    refuse_inexpressible(described)
    dropouts = {layer.dropout for layer in layers}
    if len(dropouts) > 1:
        raise misconfigured(
            f"PEFT has one lora_dropout for all layers, and these have {sorted(dropouts)}: give them one."
        )
    folded = [layer.name for layer in layers if layer.folded]
    if folded and base is None:
        raise misconfigured(f"updates were folded into the frozen weights of {join_names(folded)}, {_PART}")
    root = root_of(described, prefix)
    outside = [layer.name for layer in layers if not layer.name.startswith(root)]
    outside += [name for name, trained in described.parameters.items() if trained and not name.startswith(root)]
    outside += [name for name in described.buffers if name.endswith(".running_mean") and not name.startswith(root)]
    if outside:
        raise misconfigured(
            f"{join_names(outside)} {'are' if len(outside) > 1 else 'is'} trained outside {root.removesuffix('.')!r},"
            " to"
            ' which names in the folder would be relative: give prefix="" to make the whole module the base model, or'
            " freeze the parameters outside."
        )
    changed = _changed(described, tensors, root, before)
    needed = {*changed, *(name for name in described.buffers if name.startswith(root))}
    needed.update(name for layer in layers for name in (layer.A, layer.B, *layer.core))
    if lacking := sorted(needed - tensors.keys()):
        raise misconfigured(
            f"the checkpoint lacks {join_names(lacking)}, which state_dict() of the run's module leaves out or renames:"
            " call lightning_lowrank.export_adapter(module, folder) with the trained module."
        )
    layers, tensors = _with_changes(described.layers, tensors, changed, root, before or {}, sums)
    changed -= {f"{layer.name}.frozen_weight" for layer in layers}
    biases = {f"{layer.name}.bias" for layer in layers} & described.parameters.keys()
    with_biases = bool(changed & biases)
    saved = _modules_to_save(described, changed - biases, root)
    named = {layer.name.removeprefix(root): layer for layer in layers}
    stabilized = all(layer.rank_stabilized for layer in layers)
    rank, rank_pattern = _most_common({name: layer.rank for name, layer in named.items()})
    alpha, alpha_pattern = _most_common({name: _alpha(layer, stabilized) for name, layer in named.items()})
    config = peft.LoraConfig(
        base_model_name_or_path=described.sources.get(root.removesuffix(".")),
        r=rank,
        lora_alpha=alpha,
        use_rslora=stabilized,
        lora_dropout=dropouts.pop(),
        modules_to_save=saved or None,
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        bias="lora_only" if with_biases else "none",
        fan_in_fan_out=any(layer.kind == "Conv1D" for layer in layers),
    )
    _name_targets(config, described, named, root)
    # get_peft_model needs a module, which a checkpoint does not have. To make one from the outline takes forty lines,
    # and its factors would be named as here.
    contents: dict[str, Tensor] = {}
    for name, layer in named.items():
        contents.update({f"{PREFIX}{name}.{key}": value for key, value in _factors(layer, tensors).items()})
        if with_biases and f"{layer.name}.bias" in biases:
            contents[f"{PREFIX}{name}.base_layer.bias"] = tensors[f"{layer.name}.bias"]
    for name, value in tensors.items():
        if name.startswith(tuple(f"{root}{module}." for module in saved)):
            contents[PREFIX + name.removeprefix(root)] = value
    return _write(Path(folder), config, contents)


def root_of(described: Outline, prefix: str | None) -> str:
    """The prefix of all names in the pretrained network, with its trailing dot."""
    if prefix is None:
        heads = {layer.name.partition(".")[0] for layer in described.layers}
        held = all("." in layer.name for layer in described.layers)
        prefix = heads.pop() if described.lightning and held and len(heads) == 1 else ""
    prefix = prefix.removesuffix(".")
    if prefix not in described.modules:
        children = [name for name in described.modules if name and "." not in name]
        raise misconfigured(f"prefix is {prefix!r}, and the module's parts are {join_names(children)}.")
    return f"{prefix}." if prefix else ""


def _changed(
    described: Outline, tensors: Mapping[str, Tensor], root: str, before: Mapping[str, Tensor] | None
) -> set[str]:
    """Names of parameters and buffers, except factors, that differ from those of the pretrained network."""
    if before is None:
        trained = {name for name, trained in described.parameters.items() if trained}
        return trained | {name for name in described.buffers if name.startswith(root)}
    layers = {f"{layer.name}.frozen_weight": f"{layer.name}.weight" for layer in described.layers}
    factors = {key for layer in described.layers for key in (layer.A, layer.B, *layer.core)}
    changed = set()
    for name, value in tensors.items():
        if not name.startswith(root) or name in factors or not isinstance(value, Tensor):
            continue
        key = layers.get(name, name).removeprefix(root)
        if key not in before or before[key].shape != value.shape:
            part = f"module.{root.removesuffix('.')}" if root else "the network"
            raise misconfigured(
                f"base has no {key} of shape {tuple(value.shape)}: it must be {part} as it was before its layers were"
                " converted."
            )
        if not torch.equal(before[key].to(value), value):
            changed.add(name)
    return changed


def _with_changes(
    layers: Sequence[LayerOutline],
    tensors: Mapping[str, Tensor],
    changed: set[str],
    root: str,
    before: Mapping[str, Tensor],
    sums: Mapping[str, Tensor],
) -> tuple[tuple[LayerOutline, ...], Mapping[str, Tensor]]:
    """Layers and tensors with changes of frozen weights folded into the factors."""
    found: list[LayerOutline] = []
    tensors = dict(tensors)
    for layer in layers:
        if f"{layer.name}.frozen_weight" in changed:
            old = before[f"{layer.name}.weight".removeprefix(root)]
            new = _before_rounding(tensors[f"{layer.name}.frozen_weight"], sums.get(layer.name))
            by_input = layer.kind in ("Embedding", "Conv1D")
            change = new.double().cpu() - old.double().cpu()
            change = change.T if by_input else change.flatten(1)
            scaling = layer.alpha / (math.sqrt(layer.rank) if layer.rank_stabilized else layer.rank)
            left, right = (tensors[name].double().cpu() for name in (layer.B, layer.A))
            product = (left @ _core(layer, tensors).double().cpu() if layer.core else left) @ right.T
            B, A = _factors_of(change + scaling * product, old, tensors[layer.B].dtype)
            tensors[layer.B], tensors[layer.A] = B, A.T
            alpha = math.sqrt(len(A)) if layer.rank_stabilized else float(len(A))
            layer = replace(layer, rank=len(A), alpha=alpha, core=())
        found.append(layer)
    return tuple(found), tensors


def _before_rounding(weight: Tensor, summed: Tensor | None) -> Tensor:
    """The sum of which a weight of 16 bits is the rounding; the weight itself if it has another value since."""
    return weight if summed is None or not torch.equal(summed.to(weight), weight) else summed


def _factors_of(total: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``B`` and ``A`` with the product ``total``, up to the rounding error of a change of ``weight``."""
    left, values, right = torch.linalg.svd(total, full_matrices=False)
    # The norm of a matrix of independent single-precision rounding errors (Davidson and Szarek, 2001, Theorem II.13).
    rounding = torch.finfo(torch.float32).eps * float(weight.abs().max()) * sum(math.sqrt(side) for side in total.shape)
    rank = max(int((values > rounding).sum()), 1)
    roots = values[:rank].sqrt()
    return (left[:, :rank] * roots).to(dtype), (roots[:, None] * right[:rank]).to(dtype)


def wrapped_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's tensors as they were before PEFT wrapped it, by their original names.

    The model has not been trained since. If PEFT took the first adapter out of the base weights, it is added again.
    """
    wrapped = _wrapped(module)
    network, name = _inner(wrapped), _chosen(wrapped, None)
    _, added = peft_parameters(network)
    found = {
        uncompiled(_WRAPPING.sub("", name)): value.detach().clone()
        for name, value in _tensors(network)
        if value not in added and ".modules_to_save." not in name
    }
    start = _moving_start(wrapped.peft_config[name])
    if start is None:
        return found
    if not str(start).lower().startswith(_TAKEN_OUT):
        raise misconfigured(
            f"init_lora_weights={start!r} changed the base weights when PEFT wrapped the model, and they cannot be"
            " recovered from the adapters: load the checkpoint into the module, and call"
            " lightning_lowrank.export_adapter(module, folder, base=pretrained_network)."
        )
    parameters = dict(network.named_parameters())
    for layer, adapter in find_adapters(network, name).items():
        pair = adapter.pair(parameters, adapter.rank, adapter.scaling)
        product = pair.scaling * pair.B.detach().double() @ pair.A.detach().double()
        weight = found[f"{uncompiled(layer)}.weight"]
        matrix = adapter.as_base_matrix(weight)
        matrix.copy_(matrix.double() + product)
    return found


def _moving_start(config: Any) -> Any:
    """The initialisation of a LoRA adapter if it changed the base weights, else ``None``."""
    start = getattr(config, "init_lora_weights", True)
    return None if str(config.peft_type.value) != "LORA" or start in PLAIN_STARTS else start


def export_wrapped(
    module: nn.Module,
    folder: Path,
    adapter: str | None = None,
    base: Mapping[str, Tensor] | None = None,
    sums: Mapping[str, Tensor] = {},
) -> Path:
    """Have PEFT write an adapter, with changes of base weights folded into its factors; see `export_adapter`.

    ``base`` are the tensors of the network as it was, by name; ``sums`` are as for `write_adapter`.
    """
    import peft

    network = _wrapped(module)
    configs: Mapping[str, Any] = network.peft_config
    adapter = _chosen(network, adapter)
    config = copy.deepcopy(configs[adapter])
    tensors = peft.get_peft_model_state_dict(network, adapter_name=adapter, save_embedding_layers=False)
    inner = _inner(network)
    inside = next(each for each, part in module.named_modules() if part is inner)
    folded = folded_layers(inner) if base is None else []
    if folded:
        raise misconfigured(f"updates were folded into the frozen weights of {join_names(folded)}, {_PART}")
    # Names of an injected adapter lack PEFT's prefix. Prompts have no prefix.
    before = "" if isinstance(network, peft.PeftModel) else PREFIX
    tensors = {uncompiled(f"{before}{key}"): value for key, value in tensors.items()}
    adapted: Collection[str] = ()
    if config.peft_type == peft.PeftType.LORA:
        moved = _moving_start(config) is not None
        if moved and base is None:
            raise misconfigured(
                f"init_lora_weights={config.init_lora_weights!r} changed the base weights when PEFT wrapped the model,"
                f" {_PART}"
            )
        # Loading the folder must not change base weights again, nor draw an initialisation that fails for its ranks.
        config.init_lora_weights = True
        adapted = _put_changes(inner, adapter, config, tensors, base, sums, f"{inside}." if inside else "")
    # Trained biases are written under their own names, modules to save under their original names.
    saved = {_unwrapped(key) for key in tensors}
    if base is None:
        _check_nothing_else(network, saved)
    else:
        _check_unchanged(inner, base, {*(f"{layer}.weight" for layer in adapted), *saved})
    if not config.base_model_name_or_path:
        config.base_model_name_or_path = getattr(getattr(inner, "config", None), "_name_or_path", None) or None
    own = {*network.parameters(), *inner.parameters()}
    outside = [name for name, value in module.named_parameters() if value.requires_grad and value not in own]
    if outside:
        warnings.warn(
            f"the folder {folder} has no {join_names(outside)}, which are trained outside of the model that PEFT"
            f" wrapped: save them as well, or {_DENSE}.",
            stacklevel=2,
        )
    return _write(folder, config, tensors)


def _wrapped(module: nn.Module) -> Any:
    """The model that PEFT wrapped, or into which PEFT injected adapters."""
    parts = [(name, part) for name, part in module.named_modules() if "_orig_mod" not in own_children(part)]
    found = [(name, part) for name, part in parts if hasattr(part, "peft_config")]
    # PEFT's outermost module has the configurations of the inner ones.
    found = [
        each
        for each in found
        if not any(each[0].startswith(f"{name}.") or not name for name, _ in found if name != each[0])
    ]
    if len(found) != 1:
        raise misconfigured(
            f"the module holds {len(found)} models that PEFT wrapped, {join_names([name for name, _ in found])}:"
            " export one"
            " of them."
        )
    return found[0][1]


def _inner(network: Any) -> nn.Module:
    """The model without PEFT's wrapper, if there is one."""
    import peft

    inner = network.get_base_model() if isinstance(network, peft.PeftModel) else network
    return own_children(inner).get("_orig_mod", inner)


def _chosen(network: Any, adapter: str | None) -> str:
    """The name of the adapter to write."""
    configs = list(network.peft_config)
    if adapter is not None:
        if adapter not in configs:
            raise misconfigured(f"adapter is {adapter!r}, and the model has {join_names(configs)}.")
        return adapter
    if len(configs) == 1:
        return configs[0]
    # On transformers' models active_adapters is a method.
    found = [getattr(part, "active_adapters", None) for part in network.modules()]
    active = {name for names in found if isinstance(names, (list, tuple)) for name in names}
    chosen = [name for name in configs if name in active]
    if len(chosen) != 1:
        raise misconfigured(f"the model has the adapters {join_names(configs)}: name one, adapter={configs[0]!r}.")
    return chosen[0]


def _put_changes(
    network: nn.Module,
    adapter: str,
    config: Any,
    tensors: dict[str, Tensor],
    base: Mapping[str, Tensor] | None,
    sums: Mapping[str, Tensor],
    inside: str,
) -> Collection[str]:
    """Fold changes of base weights into the factors in ``tensors``, and set the new ranks in ``config``.

    Returns:
        The names of the layers that have adapters.
    """
    parameters = dict(network.named_parameters())
    try:
        adapters = find_adapters(network, adapter)
    except ValueError as error:
        if base is None:
            return ()
        raise misconfigured(f"changes of the base weights are unknown: {error}") from error
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for layer, found in adapters.items():
        change, weight = _change_of(network, found, base, sums.get(f"{inside}{layer}"))
        if change is None:
            continue
        if found.unfoldable:
            raise misconfigured(
                f"the base weight of {layer} has changed, and {found.unfoldable}. {_DENSE.capitalize()}."
            )
        own = found.pair(parameters, found.rank, found.scaling)
        total = change + found.scaling * own.B.detach().double().cpu() @ own.A.detach().double().cpu()
        B, A = _factors_of(total, weight, own.B.dtype)
        for which, value in (("B", B), ("A", A)):
            key = re.sub(rf"\.{re.escape(adapter)}(?=\.weight$|$)", "", uncompiled(found.parameters[which]))  # type: ignore[index]
            assert PREFIX + key in tensors, key
            tensors[PREFIX + key] = found.value(which, value)  # type: ignore[arg-type]
        ranks[uncompiled(layer)] = len(A)
        alphas[uncompiled(layer)] = math.sqrt(len(A)) if config.use_rslora else float(len(A))
    if ranks:
        # A pattern for each layer, because PEFT uses the first that matches, and a user's pattern may match too.
        for layer, found in adapters.items():
            layer = uncompiled(layer)
            if layer not in ranks:
                ranks[layer] = found.rank
                alphas[layer] = found.scaling * (math.sqrt(found.rank) if config.use_rslora else found.rank)
        config.r, config.rank_pattern = _most_common(ranks)
        config.lora_alpha, config.alpha_pattern = _most_common(alphas)
    return [uncompiled(layer) for layer in adapters]


def _change_of(
    network: Any, found: Adapter, base: Mapping[str, Tensor] | None, summed: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """The change of a base weight as a float64 matrix, ``None`` without one; and the weight before."""
    beside = {name: value.double().cpu() for name, value in found.separate_change.items()}
    if beside:
        change = beside["product"] if "product" in beside else beside["B"] @ beside["A"]
        return change, change
    if base is None or found.quantised:
        return None, torch.zeros(1)
    layer = found.name
    own = network.get_submodule(layer).get_base_layer().weight.detach()
    weight = found.as_base_matrix(own)
    old = base.get(f"{uncompiled(layer)}.weight")
    if old is None or found.as_base_matrix(old).shape != weight.shape:
        raise misconfigured(
            f"base has no weight of {layer} of shape {tuple(weight.shape)}: it must be the network as it was before"
            " PEFT wrapped it."
        )
    before = found.as_base_matrix(old.detach()).cpu()
    if torch.equal(before.to(weight.dtype), weight.cpu()):
        return None, before
    now = found.as_base_matrix(_before_rounding(own, summed))
    return now.double().cpu() - before.double(), before


def _unwrapped(name: str) -> str:
    """The name in the original network of a tensor that has PEFT's prefix."""
    return uncompiled(_WRAPPING.sub("", name.removeprefix(PREFIX)))


def _check_nothing_else(network: nn.Module, saved: Collection[str]) -> None:
    """Raise if a model that PEFT wrapped has trained parameters or running statistics that are not in ``saved``."""
    _, added = peft_parameters(network)
    names = [name for name, value in network.named_parameters() if value.requires_grad and value not in added]
    names += [
        name
        for name in persistent_buffers(network)
        if name.endswith(("running_mean", "running_var")) and ".modules_to_save." not in name
    ]
    others = [name for name in map(_unwrapped, names) if name not in saved]
    if others:
        raise misconfigured(
            f"{join_names(others)} of the model that PEFT wrapped are trained, or statistics that training changes, and"
            " belong to no adapter: name their modules in modules_to_save, or give the original network,"
            f" export_adapter(module, folder, base=pretrained_network), if they have not changed. Or {_DENSE}."
        )


def _check_unchanged(network: nn.Module, base: Mapping[str, Tensor], held: Collection[str]) -> None:
    """Raise if tensors other than those in ``held`` differ from the original network."""
    own = {uncompiled(_WRAPPING.sub("", name)): value for name, value in _tensors(network)}
    differ = [
        name
        for name, before in base.items()
        if name not in held and name in own and not torch.equal(own[name].cpu(), before.cpu().to(own[name].dtype))
    ]
    if differ:
        raise misconfigured(
            f"{join_names(differ)} of the model that PEFT wrapped differ from those of base and belong to no adapter:"
            " base"
            " is another network, or training has changed them, as it does the statistics of batch normalisation; name"
            " their modules in modules_to_save."
        )


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's plain parameters and buffers by name, without quantised tensor subclasses."""
    for name, value in [*module.named_parameters(remove_duplicate=False), *persistent_buffers(module).items()]:
        if type(value.data) is Tensor:
            yield name, value


def _write(folder: Path, config: Any, tensors: Mapping[str, Tensor]) -> Path:
    """Write a folder as `PeftModel.save_pretrained` does, whole or not at all, and without asking the hub."""
    objects = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
    if objects:
        raise misconfigured(
            f"{join_names(objects)} of the modules to save is no tensor, as get_extra_state() may return, but an"
            " adapter"
            f" folder holds only tensors: {_DENSE}."
        )
    # A set has another order in each process.
    fields = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    fields["inference_mode"] = True
    # Copies, because safetensors refuses views and tensors that share memory, as those of tied layers do.
    contents = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    with replacing(folder / CONFIG_FILE) as config_part, replacing(folder / WEIGHTS_FILE) as weights_part:
        safetensors.torch.save_file(contents, weights_part, metadata={"format": "pt"})
        config_part.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        # A folder without configuration is refused, so that new weights are never read with an old configuration.
        (folder / CONFIG_FILE).unlink(missing_ok=True)
    return folder


def _modules_to_save(described: Outline, changed: Iterable[str], root: str) -> list[str]:
    """The modules that own changed tensors, named relative to ``root``."""
    owners: set[str] = set()
    for name in sorted(changed):
        owner = name.rpartition(".")[0]
        while owner in described.containers:
            owner = owner.rpartition(".")[0]
        adapted = any(layer.name.startswith(f"{owner}.") for layer in described.layers)
        if adapted or owner in ("", root.removesuffix(".")):
            remedy = "" if name in described.buffers else "freeze it in training (LowRank(freeze_rest=True)), or "
            raise misconfigured(
                f"{name} has changed, and PEFT saves only whole modules (modules_to_save): its module holds adapters as"
                f" well. To go on, {remedy}{_DENSE}."
            )
        owners.add(owner.removeprefix(root))
    return sorted(owner for owner in owners if not any(owner.startswith(f"{other}.") for other in owners))


def _name_targets(config: Any, described: Outline, names: Collection[str], root: str) -> None:
    """Set a `LoraConfig`'s targets: names, or a regular expression if PEFT would match other modules by them too."""
    from peft.tuners.tuners_utils import check_target_module_exists

    saved = config.modules_to_save or ()
    others = {name.removeprefix(root) for name in described.modules if name.startswith(root)} - set(names)
    config.target_modules = set(names)
    hidden = [name for name in names if not check_target_module_exists(config, name)]
    # As peft.utils.other._set_trainable matches names.
    hidden += [name for name in {*others, *names}.difference(saved, hidden) if name.endswith(tuple(saved))]
    if hidden:
        raise misconfigured(
            f"modules_to_save={saved} were trained whole, but PEFT matches modules_to_save by the ends of names and"
            f" would save {join_names(sorted(hidden))} too: rename the modules, or {_DENSE}."
        )
    if any(check_target_module_exists(config, name) for name in others):
        config.target_modules = "|".join(re.escape(name) for name in names)


def _alpha(layer: LayerOutline, stabilized: bool) -> float:
    """A layer's α, as an integer if whole; rsLoRA's is converted to plain LoRA's unless all layers use rsLoRA."""
    alpha = layer.alpha if stabilized or not layer.rank_stabilized else layer.alpha * math.sqrt(layer.rank)
    return int(alpha) if alpha == int(alpha) else alpha


def _most_common(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The most common value, and the other values by patterns that match only their layer."""
    ((common, _),) = Counter(values.values()).most_common(1)
    return common, {f"^{re.escape(name)}": value for name, value in values.items() if value != common}


def _factors(layer: LayerOutline, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A layer's factors by PEFT's names, in PEFT's shapes."""
    left, right = tensors[layer.B], tensors[layer.A].T
    if layer.core:
        wide = torch.promote_types(left.dtype, torch.float32)
        left = (left.to(wide) @ _core(layer, tensors).to(wide)).to(left.dtype)
    if layer.kind == "Embedding":
        return {"lora_embedding_A": right, "lora_embedding_B": left}
    if len(layer.shape) > 2:
        right = right.reshape(layer.rank, *layer.shape[1:])
        left = left.reshape(*left.shape, *(1 for _ in layer.shape[2:]))
    return {"lora_A.weight": right, "lora_B.weight": left}


def _core(layer: LayerOutline, tensors: Mapping[str, Tensor]) -> Tensor:
    """The matrix between a layer's two factors, oriented from output to input."""
    values = dict(zip("HS", (tensors[name] for name in layer.core), strict=False))
    core = CoreProduct(len(values["S"]) if "S" in values else 1).core(values)
    return core if layer.B.endswith(".U") else core.T
