"""PEFT's adapter folders, both ways: `export_adapter` writes one from low-rank layers, `import_adapter` reads one.

Such a folder, ``adapter_config.json`` and ``adapter_model.safetensors``, is how Hugging Face's PEFT and the serving
tools around it exchange LoRA adapters: PEFT's ``PeftModel.from_pretrained(base_model, folder)`` loads it. PEFT need not
be installed for either direction.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import safetensors
import safetensors.torch
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_lowrank.aggregation.adapters import unlike_convolution
from lightning_lowrank.federated.client import persistent_buffers
from lightning_lowrank.federated.loop import FederatedLoop
from lightning_lowrank.layers import (
    LowRankLayer,
    MatrixProduct,
    low_rank_class,
    low_rank_layers,
)

__all__ = ["Outline", "changed_base", "export_adapter", "import_adapter", "outline", "write_adapter"]

_CONFIG, _WEIGHTS, _PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_KINDS = ("Linear", "Conv1D", "Embedding", "Conv1d", "Conv2d", "Conv3d")
_DENSE = "export dense weights instead, as `lightning-lowrank export` does by default"
_ROOT = "base_model.model."
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

# What makes an adapter another function than W + scaling · B A.
_UNSUPPORTED = {
    "use_dora": "DoRA's magnitudes are no LoRA factors",
    "lora_bias": "its adapters have biases of their own",
    "use_bdlora": "BD-LoRA's factors are block-diagonal",
    "use_qalora": "QA-LoRA pools its input",
    "alora_invocation_tokens": "aLoRA acts on some tokens only",
    "arrow_config": "Arrow routes between adapters",
    "kasa_config": "KaSA changes the base weights",
    "monteclora_config": "MonteCLoRA draws its weights",
    "velora_config": "VeLoRA is another layer",
    "layer_replication": "it repeats layers of the base model",
    "target_parameters": "it adapts parameters that belong to no layer",
    "trainable_token_indices": "it trains single rows of an embedding",
    "megatron_config": "it is for Megatron's layers",
}
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class _Layer:
    """What a low-rank layer is as a LoRA adapter, or the reason why it is none that PEFT knows."""

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


@dataclass(frozen=True)
class Outline:
    """What must be known of a converted module, beside its tensors, for an adapter folder to be written.

    Attributes:
        layers: Each low-rank layer, in registration order.
        modules: Names of all modules.
        containers: Names of those that are lists and dictionaries, which PEFT cannot wrap.
        parameters: Names of all parameters but those of low-rank layers, and whether they are trained.
        buffers: Names of the buffers of modules without children, which training may change.
        sources: Where pretrained models among the modules came from, by the modules' names.
        lightning: Whether the module is a LightningModule, which holds the pretrained network and is none itself.
    """

    layers: tuple[_Layer, ...]
    modules: tuple[str, ...]
    containers: tuple[str, ...]
    parameters: dict[str, bool]
    buffers: tuple[str, ...]
    sources: dict[str, str]
    lightning: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the fields in plain Python, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Outline:
        """Build the outline that `to_dict` described."""
        return cls(**{**fields, "layers": tuple(_Layer(**layer) for layer in fields["layers"])})


def outline(module: nn.Module) -> Outline:
    """Describe a module for `write_adapter`.

    Args:
        module: A module with low-rank layers.
    """
    names: dict[nn.Module, list[str]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        names.setdefault(part, []).append(name)
    layers = [
        _describe(name, layer, names[layer], module.get_submodule(name.rpartition(".")[0]))
        for name, layer in low_rank_layers(module)
    ]
    own = tuple(f"{layer.name}." for layer in layers)
    return Outline(
        layers=tuple(layers),
        modules=tuple(name for same in names.values() for name in same),
        containers=tuple(name for part, same in names.items() if isinstance(part, _CONTAINERS) for name in same),
        parameters={
            name: value.requires_grad
            for name, value in module.named_parameters(remove_duplicate=False)
            if not name.startswith(own) or name.removesuffix(".bias") + "." in own
        },
        buffers=tuple(
            name
            for name in persistent_buffers(module)
            if not any(True for _ in module.get_submodule(name.rpartition(".")[0]).children())
        ),
        sources={
            name: source
            for part, (name, *_) in names.items()
            if (source := getattr(getattr(part, "config", None), "_name_or_path", None)) and isinstance(source, str)
        },
        lightning=isinstance(module, pl.LightningModule),
    )


def _describe(name: str, layer: LowRankLayer, names: Sequence[str], parent: nn.Module) -> _Layer:
    left, right = ("V", "U") if layer.first_is_input else ("U", "V")
    return _Layer(
        name=name,
        kind=layer.dense_class.__name__,
        shape=layer.weight_shape,
        rank=layer.rank,
        # An update that is multiplied by nothing.
        alpha=float(layer.rank) if layer.alpha is None else layer.alpha,
        rank_stabilized=layer.rank_stabilized,
        dropout=layer.dropout,
        B=f"{name}.{'fixed' if left in layer.fixed else 'factors'}.{left}",
        A=f"{name}.{'fixed' if right in layer.fixed else 'factors'}.{right}",
        reason=_why_not(layer, names, parent),
    )


def _why_not(layer: LowRankLayer, names: Sequence[str], parent: nn.Module) -> str:
    """Say why PEFT has no adapter that computes what the layer does, or return an empty string."""
    if layer.role != "update":
        return f"its role is {layer.role!r}: its factors are the weight, and LoRA's are a change to it"
    if not isinstance(layer.factorization, MatrixProduct):
        return f"its factorization is {layer.factorization!r}, and LoRA's is MatrixProduct()"
    if layer.decouple:
        return "its factors are decoupled"
    if layer.frozen_weight.requires_grad:
        return "its base weight is trained as well (train_base)"
    if isinstance(parent, nn.MultiheadAttention):
        return "nn.MultiheadAttention reads its weight, where PEFT's adapter of such a layer is not called"
    if len(names) > 1:
        return f"the model holds it twice, as {' and '.join(names)}, and PEFT wraps one of them"
    reason = _why_no_wrapper(layer, layer.dense_class.__name__)
    kernel = math.prod(layer.weight_shape[2:])
    if not reason and kernel > 1 and layer.factorization.layout != "channel":
        reason = f"its kernel is factorised in another way than PEFT's, for which use {MatrixProduct('channel')!r}"
    return reason


def _why_no_wrapper(layer: nn.Module, kind: str) -> str:
    """Say why PEFT's adapter of a layer would be none of its weight."""
    if kind not in _KINDS:
        return f"PEFT has no LoRA for {kind}"
    unlike = unlike_convolution(layer)
    return f"it has {unlike}, which PEFT's adapters of convolutions leave out" if unlike else ""


def changed_base(algorithm: str, memory: Mapping[str, Any]) -> bool:
    """Say whether a federated run may have changed the frozen weights.

    Args:
        algorithm: The algorithm's class name.
        memory: What its server keeps.
    """
    return bool(memory.get("change")) or algorithm == "FedMUD"


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
            frozen weights (``FLoRA``, ``FedEx``, ``CoLR``, ``FedMUD``'s resets) are only noticed while the module
            still has the trainer that ran them.

    Returns:
        The folder.

    Raises:
        MisconfigurationException: If something trained cannot be expressed; it names the layers or parameters and the
            reason. Nothing is written then.

    Example:
        >>> import json, tempfile
        >>> from lightning_lowrank.layers import convert
        >>> network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> _ = convert(network, MatrixProduct(), rank=1, alpha=2, init="lora", freeze_rest=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     config = json.loads((export_adapter(network, folder) / "adapter_config.json").read_text())
        >>> config["r"], config["lora_alpha"], config["target_modules"]
        (1, 2, ['0', '2'])
    """
    _refuse_wrapped(module, "call save_pretrained(folder) of the model that PEFT wrapped")
    trainer = getattr(module, "_trainer", None)
    loops = [loop for loop in getattr(trainer, "callbacks", ()) if isinstance(loop, FederatedLoop)]
    if base is None and trainer is not None and trainer.global_step:
        for loop in loops:
            refuse_changed_base(type(loop.algorithm).__name__, loop.server.memory)
    return write_adapter(outline(module), module.state_dict(), folder, prefix, base)


def refuse_changed_base(algorithm: str, memory: Mapping[str, Any]) -> None:
    """Refuse a run whose frozen weights are not those of the pretrained network; the arguments are `changed_base`'s."""
    if changed_base(algorithm, memory):
        raise MisconfigurationException(
            f"{algorithm} with this operator or setting folds updates into the frozen weights, so that the adapters are"
            f" only a part of what was learnt: {_DENSE}. Where it did not fold, export_adapter(module, folder,"
            " base=pretrained_network) sees that."
        )


def write_adapter(
    described: Outline,
    tensors: Mapping[str, Tensor],
    folder: str | Path,
    prefix: str | None = None,
    base: nn.Module | None = None,
) -> Path:
    """Write an adapter folder; see `export_adapter`.

    Args:
        described: The `outline` of the module.
        tensors: Its state dict.
        folder: Where to write.
        prefix: As for `export_adapter`.
        base: As for `export_adapter`.
    """
    layers = described.layers
    if not layers:
        raise MisconfigurationException(
            "the module has no low-rank layers, and an adapter is what they hold: convert it with LowRank, or load a"
            " checkpoint into a module that is converted."
        )
    reasons = [f"{layer.name}: {layer.reason}" for layer in layers if layer.reason]
    if reasons:
        raise MisconfigurationException(f"PEFT cannot express {_some(reasons, '; ')}. {_DENSE.capitalize()}.")
    dropouts = {layer.dropout for layer in layers}
    if len(dropouts) > 1:
        raise MisconfigurationException(
            f"PEFT has one lora_dropout for all layers, and these have {sorted(dropouts)}: give them one."
        )
    root = _root(described, prefix)
    outside = [layer.name for layer in layers if not layer.name.startswith(root)]
    outside += [name for name, trained in described.parameters.items() if trained and not name.startswith(root)]
    if outside:
        raise MisconfigurationException(
            f"{_some(outside)} {'are' if len(outside) > 1 else 'is'} trained outside {root.removesuffix('.')!r}, to"
            ' which names in the folder would be relative: give prefix="" to make the whole module the base model, or'
            " freeze what is outside."
        )
    changed = _changed(described, tensors, root, base)
    biases = {f"{layer.name}.bias" for layer in layers} & described.parameters.keys()
    saved = _modules_to_save(described, changed - biases, root)
    names = [layer.name.removeprefix(root) for layer in layers]
    stabilized = all(layer.rank_stabilized for layer in layers)
    ranks = {name: layer.rank for name, layer in zip(names, layers, strict=True)}
    alphas = {name: _alpha(layer, stabilized) for name, layer in zip(names, layers, strict=True)}
    rank, rank_pattern = _common(ranks)
    alpha, alpha_pattern = _common(alphas)
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": described.sources.get(root.removesuffix(".")),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": stabilized,
        "lora_dropout": dropouts.pop(),
        "target_modules": _target_modules(described, names, saved, root),
        "modules_to_save": saved or None,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "bias": "lora_only" if changed & biases else "none",
        "fan_in_fan_out": any(layer.kind == "Conv1D" for layer in layers),
        "init_lora_weights": True,
    }
    contents: dict[str, Tensor] = {}
    for name, layer in zip(names, layers, strict=True):
        contents.update({f"{_ROOT}{name}.{key}": value for key, value in _factors(layer, tensors).items()})
        if changed & biases and f"{layer.name}.bias" in biases:
            contents[f"{_ROOT}{name}.base_layer.bias"] = tensors[f"{layer.name}.bias"]
    for name, value in tensors.items():
        if name.startswith(tuple(f"{root}{one}." for one in saved)):
            contents[_ROOT + name.removeprefix(root)] = value
    # safetensors refuses views and tensors that share memory, as tied layers do.
    contents = {name: value.detach().cpu().contiguous().clone() for name, value in contents.items()}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(contents, folder / _WEIGHTS, metadata={"format": "pt"})
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def _root(described: Outline, prefix: str | None) -> str:
    """Return what the names of the pretrained network's parts begin with."""
    if prefix is None:
        heads = {layer.name.partition(".")[0] for layer in described.layers}
        held = all("." in layer.name for layer in described.layers)
        prefix = heads.pop() if described.lightning and held and len(heads) == 1 else ""
    prefix = prefix.removesuffix(".")
    if prefix not in described.modules:
        children = [name for name in described.modules if name and "." not in name]
        raise MisconfigurationException(f"prefix is {prefix!r}, and the module's parts are {_some(children)}.")
    return f"{prefix}." if prefix else ""


def _changed(described: Outline, tensors: Mapping[str, Tensor], root: str, base: nn.Module | None) -> set[str]:
    """Return the names of parameters and buffers beside the factors that are not the pretrained network's."""
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
            raise MisconfigurationException(
                f"base has no {key} of shape {tuple(value.shape)}: it must be the network as it was before its layers"
                " were converted."
            )
        if not torch.equal(before[key].to(value), value):
            if name in layers:
                raise MisconfigurationException(
                    f"the frozen weight {key} is not that of base: the method folded updates into it, or base is"
                    f" another network. {_DENSE.capitalize()}."
                )
            changed.add(name)
    return changed


def _modules_to_save(described: Outline, changed: Iterable[str], root: str) -> list[str]:
    """Return the modules, relative to the root, that own what has changed."""
    layers = [layer.name for layer in described.layers]
    containers = set(described.containers)
    owners: set[str] = set()
    for name in sorted(changed):
        owner = name.rpartition(".")[0]
        while owner in containers:
            owner = owner.rpartition(".")[0]
        if f"{owner}." == root or not owner or any(layer.startswith(f"{owner}.") for layer in layers):
            raise MisconfigurationException(
                f"{name} has changed, and PEFT saves only whole modules (modules_to_save): that which owns it holds"
                f" adapters as well. Freeze it in training (LowRank(freeze_rest=True)), or {_DENSE}."
            )
        owners.add(owner.removeprefix(root))
    return sorted(one for one in owners if not any(one.startswith(f"{other}.") for other in owners))


def _target_modules(described: Outline, names: list[str], saved: list[str], root: str) -> list[str] | str:
    """Return what makes PEFT wrap exactly these layers: their names, or an expression where names would mean others."""
    others = {name.removeprefix(root) for name in described.modules if name.startswith(root)} - set(names)
    # As peft.utils.other._set_trainable and peft.tuners.tuners_utils.check_target_module_exists match names.
    for one in saved:
        taken = [name for name in others if name.endswith(one) and name not in saved]
        hidden = [name for name in names if re.match(rf"(^|.*\.){one}($|\..*)", name) or name.endswith(one)]
        if taken or hidden:
            raise MisconfigurationException(
                f"{one} was trained whole, and PEFT, which matches modules_to_save by the ends of names, would take"
                f" {_some(taken + hidden)} for it: rename the module, or {_DENSE}."
            )
    if any(other.endswith(tuple(f".{name}" for name in names)) for other in others):
        return "|".join(re.escape(name) for name in names)
    return names


def _alpha(layer: _Layer, stabilized: bool) -> float:
    """Return α as an integer where it is one; rsLoRA's as plain LoRA's where not all layers are rank-stabilised."""
    plain = layer.alpha if stabilized or not layer.rank_stabilized else layer.alpha * math.sqrt(layer.rank)
    return int(plain) if plain == int(plain) else plain


def _common(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the most common value, and those of the others by a pattern that means them alone."""
    ((common, _),) = Counter(values.values()).most_common(1)
    return common, {f"^{re.escape(name)}": value for name, value in values.items() if value != common}


def _factors(layer: _Layer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a layer's factors as PEFT names and shapes them."""
    left, right = tensors[layer.B], tensors[layer.A].T
    if layer.kind == "Embedding":
        return {"lora_embedding_A": right, "lora_embedding_B": left}
    if len(layer.shape) > 2:
        right = right.reshape(layer.rank, *layer.shape[1:])
        left = left.reshape(*left.shape, *(1 for _ in layer.shape[2:]))
    return {"lora_A.weight": right, "lora_B.weight": left}


def import_adapter(folder: str | Path, module: nn.Module, *, prefix: str | None = None) -> nn.Module:
    """Load a PEFT LoRA folder into a module's low-rank layers, and return the module.

    The module then computes what ``PeftModel.from_pretrained(base_model, folder)`` does, to rounding. Layers that are
    dense yet are converted, with the adapter's ranks, α and dropout, and all other parameters are frozen but those that
    the folder brings: ``modules_to_save`` and biases. To go on training under `LowRank`, which knows only modules that
    it has converted itself, convert first and import then::

        LowRank(MatrixProduct("channel"), rank=8, alpha=16, init="lora", freeze_rest=True).convert(module)
        import_adapter(folder, module)

    Layers that are low-rank already must be those of the folder, with the same ranks; they keep their own α.

    Args:
        folder: Holds ``adapter_config.json`` and ``adapter_model.safetensors``. Pickles (``adapter_model.bin``) are not
            read, for they can run any code.
        module: A module that holds the pretrained network.
        prefix: Name of the network in the module; ``""``: the module itself. ``None``: the module, or that one of its
            children that has all layers of the folder.

    Raises:
        MisconfigurationException: If the folder holds something else than plain LoRA (DoRA, biases of adapters, other
            methods), or layers or tensors that the module has not or has in other shapes; nothing is changed then.

    Example:
        >>> import tempfile
        >>> from lightning_lowrank.layers import convert
        >>> networks = [nn.Sequential(nn.Linear(6, 8), nn.ReLU()) for _ in range(2)]
        >>> _ = convert(networks[0], MatrixProduct(), rank=2, alpha=4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = import_adapter(export_adapter(networks[0], folder), networks[1])
        >>> networks[1][0].rank, networks[1][0].alpha
        (2, 4)
    """
    _refuse_wrapped(module, "call load_adapter(folder, name) of the model that PEFT wrapped")
    found, rest, config = _read(Path(folder))
    root = _where(module, list(found), prefix)
    layers = {root + name: adapter for name, adapter in found.items()}
    existing = dict(low_rank_layers(module))
    if existing and existing.keys() != layers.keys():
        unlike = sorted(existing.keys() ^ layers.keys())
        raise MisconfigurationException(
            f"the module's low-rank layers are not those of {folder}, but differ in {_some(unlike)}: convert the"
            " folder's layers (`include`), or none."
        )
    described = {layer.name: layer for layer in outline(module).layers}
    for name, adapter in layers.items():
        _check_fit(name, adapter, module.get_submodule(name), described.get(name))
    _check_rest(module, root, rest, folder)
    values = [value for name, layer in existing.items() for value in _assignments(layer, layers[name])]
    _check_ties(existing, values)
    if not existing:
        _refuse_held_twice(module, layers)
        module.get_submodule(root.removesuffix(".")).requires_grad_(False)
        converted = {name: _convert(module, name, adapter, config) for name, adapter in layers.items()}
        values = [value for name, layer in converted.items() for value in _assignments(layer, layers[name])]
    with torch.no_grad():
        for target, value in values:
            target.copy_(value)
        for name, value in rest.items():
            part = _tensor(module, root + name)
            assert part is not None
            part.copy_(value)
            if not existing and isinstance(part, nn.Parameter) and _is_trained(name, config):
                part.requires_grad_()
    return module


def _convert(module: nn.Module, name: str, adapter: _Found, config: Mapping[str, Any]) -> LowRankLayer:
    """Put a low-rank layer for the adapter in a dense one's place."""
    dense = module.get_submodule(name)
    kind = low_rank_class(dense)
    assert kind is not None
    layer = kind.from_dense(
        dense,
        MatrixProduct("channel"),
        adapter.rank,
        init="lora",
        alpha=adapter.alpha,
        rank_stabilized=bool(config.get("use_rslora")),
        dropout=float(config.get("lora_dropout") or 0.0),
    )
    parent, _, child = name.rpartition(".")
    module.get_submodule(parent).add_module(child, layer)
    return layer


def _assignments(layer: LowRankLayer, adapter: _Found) -> list[tuple[Tensor, Tensor]]:
    """Return the layer's factors and what they become."""
    ratio = adapter.scaling / layer.scale
    factors = [adapter.B.flatten(1), adapter.A.flatten(1).T]
    own = {**dict(layer.factors.items()), **dict(layer.fixed.items())}
    layer.unmerge()
    # U takes the ratio whatever it stands with: layers that share factors have it on different sides.
    first, second = reversed(factors) if layer.first_is_input else factors
    return [(own["U"], first.double() * ratio if ratio != 1 else first), (own["V"], second)]


def _check_ties(existing: Mapping[str, LowRankLayer], values: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Refuse two values for the factors that tied layers share."""
    wanted: dict[Tensor, Tensor] = {}
    for target, value in values:
        if not torch.equal(wanted.setdefault(target, value), value):
            names = [name for name, layer in existing.items() if any(target is own for own in layer.parameters())]
            raise MisconfigurationException(
                f"{_some(names)} share their factors, and the folder has different ones for them: import into a module"
                " that is not converted yet, which keeps them apart."
            )


def _refuse_held_twice(module: nn.Module, layers: Mapping[str, _Found]) -> None:
    names: dict[nn.Module, list[str]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        names.setdefault(part, []).append(name)
    twice = [name for name in layers if len(names[module.get_submodule(name)]) > 1]
    if twice:
        raise MisconfigurationException(f"the model holds {_some(twice)} twice, and PEFT wraps one of them.")


def _is_trained(name: str, config: Mapping[str, Any]) -> bool:
    """Say whether PEFT trains what is no factor: biases, and the modules to save, found by the ends of names."""
    if name.rpartition(".")[2] == "bias" and config.get("bias", "none") != "none":
        return True
    parts = name.split(".")
    above = [".".join(parts[:stop]) for stop in range(1, len(parts))]
    return any(one.endswith(tuple(config.get("modules_to_save") or ())) for one in above)


@dataclass(frozen=True)
class _Found:
    """A layer's factors in a folder, in PEFT's shapes."""

    B: Tensor
    A: Tensor
    alpha: float
    scaling: float
    embedding: bool

    @property
    def rank(self) -> int:
        return self.A.shape[0]


def _read(folder: Path) -> tuple[dict[str, _Found], dict[str, Tensor], dict[str, Any]]:
    """Return a folder's adapters by layer, its other tensors by name, and its configuration."""
    if not (folder / _CONFIG).is_file():
        raise MisconfigurationException(f"{folder} is no PEFT adapter folder: it holds no {_CONFIG}.")
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise MisconfigurationException(f"{folder / _CONFIG} is no JSON: {error}.") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise MisconfigurationException(f"{folder} holds an adapter of PEFT's type {kind!r}, and only 'LORA' is read.")
    for setting, reason in _UNSUPPORTED.items():
        if config.get(setting):
            raise MisconfigurationException(f"{folder} has {setting}={config[setting]!r}: {reason}.")
    start = config.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        raise MisconfigurationException(
            f"{folder} has init_lora_weights={start!r}, which changes the base weights: save it as plain LoRA, with"
            " PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)."
        )
    if not (folder / _WEIGHTS).is_file():
        pickled = (folder / _PICKLE).is_file()
        raise MisconfigurationException(
            f"{folder} holds no {_WEIGHTS}"
            + (
                f", and {_PICKLE} is a pickle, which is not read, for it can run any code: load it with PEFT where you"
                " trust it, and save it anew with save_pretrained(folder, safe_serialization=True)."
                if pickled
                else "."
            )
        )
    try:
        contents = safetensors.torch.load_file(folder / _WEIGHTS)
    except safetensors.SafetensorError as error:
        raise MisconfigurationException(f"{folder / _WEIGHTS} is no safetensors file: {error}.") from error
    factors: dict[str, dict[str, Tensor]] = {}
    rest: dict[str, Tensor] = {}
    for key, value in contents.items():
        name = key.removeprefix(_ROOT)
        match = re.fullmatch(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?", name)
        if match:
            factors.setdefault(match[1], {})[match[3]] = value
            factors[match[1]][f"embedding {match[3]}"] = torch.tensor(bool(match[2]))
        elif ".lora_" in name:
            raise MisconfigurationException(f"{folder} holds {name}, which is no factor of plain LoRA.")
        else:
            rest[name.replace(".base_layer.", ".")] = value
    if not factors:
        raise MisconfigurationException(f"{folder / _WEIGHTS} holds no LoRA factors.")
    return {name: _found(name, parts, config) for name, parts in factors.items()}, rest, config


def _found(name: str, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> _Found:
    missing = [which for which in ("A", "B") if which not in parts]
    if missing:
        raise MisconfigurationException(f"the folder lacks lora_{missing[0]} of layer {name!r}.")
    left, right = parts["B"], parts["A"]
    rank = _by_pattern(config.get("rank_pattern"), name, config.get("r", 8))
    alpha = _by_pattern(config.get("alpha_pattern"), name, config.get("lora_alpha", 8))
    if left.dim() != right.dim() or left.dim() < 2 or left.shape[1] != right.shape[0] or right.shape[0] != rank:
        raise MisconfigurationException(
            f"the factors of layer {name!r} do not fit: lora_A has shape {tuple(right.shape)}, lora_B"
            f" {tuple(left.shape)}, and the rank is {rank}."
        )
    if not alpha > 0:
        raise MisconfigurationException(f"lora_alpha of layer {name!r} must be above 0, but is {alpha!r}.")
    scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return _Found(left, right, alpha, scaling, bool(parts["embedding A"]))


def _by_pattern(patterns: Mapping[str, Any] | None, name: str, otherwise: Any) -> Any:
    # As peft.utils.other.get_pattern_key matches.
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return otherwise


def _where(module: nn.Module, names: Sequence[str], prefix: str | None) -> str:
    """Return what the folder's names are relative to."""
    parts = {name for name, _ in module.named_modules(remove_duplicate=False)}
    if prefix is not None:
        roots = [prefix.removesuffix(".")]
    else:
        roots = ["", *(name for name, _ in module.named_children())]
    roots = [f"{root}." if root else "" for root in roots]
    holding = [root for root in roots if all(root + name in parts for name in names)]
    if len(holding) == 1 or holding[:1] == [""]:
        return holding[0]
    if holding:
        raise MisconfigurationException(
            f"several parts of the module have the folder's layers: give as prefix one of"
            f" {_some([root.removesuffix('.') for root in holding])}."
        )
    best = max(roots, key=lambda root: sum(root + name in parts for name in names))
    missing = [best + name for name in names if best + name not in parts]
    raise MisconfigurationException(
        f"the folder has adapters for {_some(missing)}, and the module has no such layers: they must be those of the"
        " network that the adapter was trained with; prefix says which part of the module that is."
    )


def _check_fit(name: str, adapter: _Found, layer: nn.Module, described: _Layer | None) -> None:
    """Refuse factors that are none of the layer."""
    if described is not None:
        kind, shape, reason = described.kind, described.shape, described.reason
        if not reason and described.rank != adapter.rank:
            reason = f"its rank is {described.rank}, and the folder's {adapter.rank}"
    else:
        kind = type(layer).__name__
        low_rank = low_rank_class(layer)
        reason = f"PEFT's adapters of {kind} are not read" if low_rank is None or kind not in _KINDS else ""
        reason = reason or _why_no_wrapper(layer, kind)
        if low_rank is not None and not reason:
            reason = low_rank.why_not(layer, MatrixProduct("channel"))
        shape = tuple(getattr(layer, "weight", torch.empty(0)).shape) if not reason else ()
        if not reason:
            try:
                MatrixProduct("channel").check_rank(shape, adapter.rank)
            except ValueError as error:
                reason = str(error).removesuffix(".")
    if reason:
        raise MisconfigurationException(f"the folder's adapter of layer {name!r} cannot be loaded: {reason}.")
    outputs_first = kind not in ("Conv1D", "Embedding")
    outputs, inputs = (shape[0], shape[1:]) if outputs_first else (shape[1], (shape[0],))
    fits = (
        adapter.embedding == (kind == "Embedding")
        and tuple(adapter.A.shape[1:]) == tuple(inputs)
        and tuple(adapter.B.shape) == (outputs, adapter.rank, *(1 for _ in inputs[1:]))
    )
    if not fits:
        raise MisconfigurationException(
            f"the folder's factors of layer {name!r} are of shapes {tuple(adapter.A.shape)} (A) and"
            f" {tuple(adapter.B.shape)} (B), which do not fit a {kind} with a weight of shape {shape}."
        )


def _check_rest(module: nn.Module, root: str, rest: Mapping[str, Tensor], folder: str | Path) -> None:
    """Refuse what else the folder brings where the module has no place for it."""
    for name, value in rest.items():
        target = _tensor(module, root + name)
        if target is None:
            raise MisconfigurationException(
                f"{folder} holds {name}, and the module has no parameter or buffer {root + name}."
            )
        if target.shape != value.shape:
            raise MisconfigurationException(
                f"{folder} holds {name} of shape {tuple(value.shape)}, and the module's has {tuple(target.shape)}."
            )


def _tensor(module: nn.Module, name: str) -> Tensor | None:
    """Return a parameter or buffer by name; the weight of a low-rank layer is its frozen one."""
    owner_name, _, last = name.rpartition(".")
    try:
        owner = module.get_submodule(owner_name)
    except AttributeError:
        return None
    last = "frozen_weight" if last == "weight" and isinstance(owner, LowRankLayer) else last
    return owner._parameters.get(last, owner._buffers.get(last))


def _refuse_wrapped(module: nn.Module, remedy: str) -> None:
    wrapped: Iterator[str] = (
        name for name, part in module.named_modules() if hasattr(part, "lora_A") and hasattr(part, "get_base_layer")
    )
    name = next(wrapped, None)
    if name is not None:
        raise MisconfigurationException(f"PEFT has wrapped {name!r} already: {remedy}.")


def _some(names: Sequence[str], separator: str = ", ") -> str:
    shown = separator.join(names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
