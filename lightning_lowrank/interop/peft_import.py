"""`import_adapter`: loads a PEFT adapter folder into low-rank layers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from lightning_lowrank.arguments import listed
from lightning_lowrank.configuration import misconfigured
from lightning_lowrank.internals.torch import own_buffers, own_parameters
from lightning_lowrank.interop.peft_layout import (
    CONFIG_FILE,
    PLAIN_STARTS,
    PREFIX,
    WEIGHTS_FILE,
    LayerOutline,
    check_path_and_module,
    module_names,
    outline,
    refuse_wrapped,
    unsupported_layer,
)
from lightning_lowrank.layers import LowRankLayer, MatrixProduct, low_rank_class, low_rank_layers
from lightning_lowrank.layers.conversion import note_buffers

# Settings with which an adapter does not compute W + scaling · B A.
_UNSUPPORTED = {
    "use_dora": "DoRA's magnitudes are not LoRA factors",
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

_MOST_ALTERNATIVES = 20


@dataclass(frozen=True)
class _Adapter:
    """A layer's factors in a folder, in PEFT's shapes."""

    B: Tensor
    A: Tensor
    alpha: float
    scaling: float
    embedding: bool

    @property
    def rank(self) -> int:
        return self.A.shape[0]


def import_adapter(folder: str | Path, module: nn.Module, *, prefix: str | None = None) -> nn.Module:
    """Load a PEFT LoRA folder into a module's low-rank layers, and return the module.

    The module then computes what ``PeftModel.from_pretrained(base_model, folder)`` does, to rounding. Dense layers are
    converted, with the adapter's ranks, α and dropout. All other parameters are frozen except those that the folder
    holds: ``modules_to_save`` and biases. `LowRank` accepts only modules that it has converted itself: to continue
    training with it, convert first and then import::

        LowRank(MatrixProduct("channel"), rank=8, alpha=16, init="lora", freeze_rest=True).convert(module)
        import_adapter(folder, module)

    If the module has low-rank layers, they must be those of the folder, with the same ranks; they keep their own α.

    Args:
        folder: Holds ``adapter_config.json`` and ``adapter_model.safetensors``. Pickles (``adapter_model.bin``) are not
            read, because they can run any code.
        module: A module that holds the pretrained network.
        prefix: Name of the network in the module; ``""``: the module itself. ``None``: the module or its one child
            that has all layers of the folder.

    Raises:
        MisconfigurationException: If the folder is not plain LoRA (DoRA, biases of adapters, other methods), or has
            layers or tensors that the module lacks or has in other shapes; nothing is changed then.

    Example:
        >>> import tempfile
        >>> from lightning_lowrank import convert, export_adapter
        >>> networks = [nn.Sequential(nn.Linear(6, 8), nn.ReLU()) for _ in range(2)]
        >>> _ = convert(networks[0], MatrixProduct(), rank=2, alpha=4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = import_adapter(export_adapter(networks[0], folder), networks[1])
        >>> networks[1][0].rank, networks[1][0].alpha
        (2, 4)
    """
    check_path_and_module("import_adapter(folder, module)", folder, module)
    refuse_wrapped(module, "call load_adapter(folder, name) of the model that PEFT wrapped")
    found, rest, config = _read(Path(folder))
    root = _root(module, list(found), prefix)
    adapters = {root + name: adapter for name, adapter in found.items()}
    existing = dict(low_rank_layers(module))
    if existing and existing.keys() != adapters.keys():
        unlike = sorted(existing.keys() ^ adapters.keys())
        raise misconfigured(
            f"the module's low-rank layers are not those of {folder}, but differ in {listed(unlike)}: convert the"
            " folder's layers (`include`), or none."
        )
    described = {layer.name: layer for layer in outline(module).layers}
    for name, adapter in adapters.items():
        _check_fit(name, adapter, module.get_submodule(name), described.get(name))
    _check_rest(module, root, rest, folder)
    if existing:
        values = _assignments(existing, adapters)
        _check_ties(existing, values)
    else:
        names = module_names(module)
        twice = [name for name in adapters if len(names[module.get_submodule(name)]) > 1]
        if twice:
            raise misconfigured(f"the model holds {listed(twice)} twice, and PEFT wraps one of them.")
        base = module.get_submodule(root.removesuffix(".")).requires_grad_(False)
        base.frozen_for_factors = frozenset(name for name, _ in base.named_parameters())  # type: ignore[assignment]
        note_buffers(base)
        layers = {name: _convert(module, name, adapter, config) for name, adapter in adapters.items()}
        values = _assignments(layers, adapters)
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


def _convert(module: nn.Module, name: str, adapter: _Adapter, config: Mapping[str, Any]) -> LowRankLayer:
    """Replace a dense layer by a low-rank one for the adapter."""
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


def _assignments(layers: Mapping[str, LowRankLayer], adapters: Mapping[str, _Adapter]) -> list[tuple[Tensor, Tensor]]:
    """Return each of the layers' factors with its new value."""
    values = []
    for name, layer in layers.items():
        adapter = adapters[name]
        ratio = adapter.scaling / layer.scale
        factors = [adapter.B.flatten(1), adapter.A.flatten(1).T]
        own = {**dict(layer.factors.items()), **dict(layer.fixed.items())}
        layer.unmerge()
        # U takes the ratio on either side: tied layers, which share U, have it on different sides.
        first, second = reversed(factors) if layer.first_is_input else factors
        values += [(own["U"], first.double() * ratio if ratio != 1 else first), (own["V"], second)]
    return values


def _check_ties(layers: Mapping[str, LowRankLayer], values: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Refuse two values for the factors that tied layers share."""
    wanted: dict[Tensor, Tensor] = {}
    for target, value in values:
        if not torch.equal(wanted.setdefault(target, value), value):
            names = [name for name, layer in layers.items() if any(target is own for own in layer.parameters())]
            raise misconfigured(
                f"{listed(names)} share their factors, and the folder has different ones for them: import into a module"
                " that is not converted yet, which keeps them apart."
            )


def _is_trained(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether PEFT trains a tensor that is not a factor: biases, and modules to save by the ends of names."""
    if name.rpartition(".")[2] == "bias" and config.get("bias", "none") != "none":
        return True
    parts = name.split(".")
    above = [".".join(parts[:stop]) for stop in range(1, len(parts))]
    return any(module.endswith(tuple(config.get("modules_to_save") or ())) for module in above)


def _read(folder: Path) -> tuple[dict[str, _Adapter], dict[str, Tensor], dict[str, Any]]:
    """Return a folder's adapters by layer, its other tensors by name, and its configuration."""
    config = _read_config(folder)
    if not (folder / WEIGHTS_FILE).is_file():
        pickled = (
            ", and adapter_model.bin is a pickle, which is not read because it can run any code: load it with PEFT if"
            " you trust it, and save it with save_pretrained(folder, safe_serialization=True)"
        )
        found = (folder / "adapter_model.bin").is_file()
        raise misconfigured(f"{folder} holds no {WEIGHTS_FILE}{pickled if found else ''}.")
    try:
        contents = safetensors.torch.load_file(folder / WEIGHTS_FILE)
    except safetensors.SafetensorError as error:
        raise misconfigured(f"{folder / WEIGHTS_FILE} is not a safetensors file: {error}.") from error
    factors: dict[str, dict[str, Tensor]] = {}
    embeddings: set[str] = set()
    rest: dict[str, Tensor] = {}
    for key, value in contents.items():
        name = key.removeprefix(PREFIX)
        match = re.fullmatch(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?", name)
        if match:
            factors.setdefault(match[1], {})[match[3]] = value
            if match[2] and match[3] == "A":
                embeddings.add(match[1])
        elif ".lora_" in name:
            raise misconfigured(f"{folder} holds {name}, which is not a factor of plain LoRA.")
        elif ".original_module." not in name:
            # With bias="all", PEFT writes the biases of modules_to_save by the names of both copies as well.
            rest[name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")] = value
    if not factors:
        raise misconfigured(f"{folder / WEIGHTS_FILE} holds no LoRA factors.")
    adapters = {name: _adapter(name, parts, name in embeddings, config) for name, parts in factors.items()}
    return adapters, rest, config


def _read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's configuration; refuse what is not plain LoRA."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise misconfigured(f"{folder} is not a PEFT adapter folder: it holds no {CONFIG_FILE}.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise misconfigured(f"{path} is not JSON: {error}.") from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise misconfigured(f"{folder} holds an adapter of PEFT's type {kind!r}, and only 'LORA' is read.")
    for setting, reason in _UNSUPPORTED.items():
        if config.get(setting):
            raise misconfigured(f"{folder} has {setting}={config[setting]!r}: {reason}.")
    start = config.get("init_lora_weights")
    if start not in PLAIN_STARTS:
        raise misconfigured(
            f"{folder} has init_lora_weights={start!r}, which changes the base weights: save it as plain LoRA, with"
            " PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)."
        )
    _check_types(path, config)
    return config


def _check_types(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse settings of other types than PEFT writes, such as ``"r": "8"``."""

    def is_number(value: Any, kinds: Any = (int, float)) -> bool:
        return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)

    def is_rank(value: Any) -> bool:
        return is_number(value, int) and value > 0

    def is_alpha(value: Any) -> bool:
        return is_number(value) and value > 0

    def is_share(value: Any) -> bool:
        return value is None or (is_number(value) and 0 <= value < 1)

    def are_names(value: Any) -> bool:
        return value is None or (isinstance(value, list) and all(isinstance(each, str) for each in value))

    rank, alpha = "a whole number above 0, such as 8", "a number above 0, such as 16"
    wanted: tuple[tuple[str, Any, Callable[[Any], bool], str], ...] = (
        ("r", 8, is_rank, rank),
        ("lora_alpha", 8, is_alpha, alpha),
        ("lora_dropout", 0.0, is_share, "a number of at least 0 and below 1, such as 0.1"),
        ("use_rslora", False, lambda value: value is None or isinstance(value, bool), "true or false"),
        ("bias", "none", lambda value: value in ("none", "all", "lora_only"), "'none', 'all' or 'lora_only'"),
        ("modules_to_save", None, are_names, 'null or a list of names, such as ["head"]'),
    )
    for name, default, fits, remedy in wanted:
        value = config.get(name, default)
        if not fits(value):
            raise misconfigured(f"{path} has {name}={value!r:.99}, and PEFT writes {remedy}.")
    for name, fits, remedy in (("rank_pattern", is_rank, rank), ("alpha_pattern", is_alpha, alpha)):
        patterns = config.get(name) or {}
        if not isinstance(patterns, dict):
            raise misconfigured(f"{path} has {name}={patterns!r:.99}, and PEFT writes an object of layers' names.")
        for pattern, value in patterns.items():
            if not fits(value):
                raise misconfigured(f"{path} has {name}[{pattern!r:.99}]={value!r:.99}, and PEFT writes {remedy}.")
            reason = _why_not_matched(pattern)
            if reason:
                raise misconfigured(
                    f"{path} has the key {pattern!r:.99} in {name}, which {reason}: name each of its layers, such as"
                    ' "layers.0.q_proj", or give the regular expression in a simpler form.'
                )


def _why_not_matched(pattern: str) -> str:
    """Return why a pattern is not matched: it is no regular expression, or one that may take for ever.

    With two repetitions and two groups of a few alternatives, the steps are a hundred times the square of a name's
    length at most. A group that is repeated may take two to the power of it.
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is no regular expression ({error})"
    plain = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "x", pattern).replace("(?:", "(")
    if re.search(r"\)[*+?{]|\(\?", plain):
        return "repeats a group or looks around"
    if len(re.findall(r"[*+?{]", plain)) > 2 or plain.count("(") > 2 or plain.count("|") > _MOST_ALTERNATIVES:
        return f"has more than 2 repetitions, 2 groups or {_MOST_ALTERNATIVES} alternatives"
    return ""


def _adapter(name: str, parts: Mapping[str, Tensor], embedding: bool, config: Mapping[str, Any]) -> _Adapter:
    for which in ("A", "B"):
        if which not in parts:
            raise misconfigured(f"the folder lacks lora_{which} of layer {name!r}.")
    left, right = parts["B"], parts["A"]
    rank = _by_pattern(config.get("rank_pattern"), name, config.get("r", 8))
    alpha = _by_pattern(config.get("alpha_pattern"), name, config.get("lora_alpha", 8))
    if left.dim() != right.dim() or left.dim() < 2 or left.shape[1] != right.shape[0] or right.shape[0] != rank:
        raise misconfigured(
            f"the factors of layer {name!r} do not fit: lora_A has shape {tuple(right.shape)}, lora_B"
            f" {tuple(left.shape)}, and the rank is {rank}."
        )
    return _Adapter(
        left, right, alpha, alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank, embedding
    )


def _by_pattern(patterns: Mapping[str, Any] | None, name: str, otherwise: Any) -> Any:
    # As peft.utils.other.get_pattern_key matches.
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return otherwise


def _root(module: nn.Module, names: Sequence[str], prefix: str | None) -> str:
    """Return the prefix of the folder's names in the module, with its dot."""
    parts = {name for name, _ in module.named_modules(remove_duplicate=False)}
    children = ["", *(name for name, _ in module.named_children())]
    candidates = children if prefix is None else [prefix.removesuffix(".")]
    roots = [f"{root}." if root else "" for root in candidates]
    holding = [root for root in roots if all(root + name in parts for name in names)]
    if len(holding) == 1 or holding[:1] == [""]:
        return holding[0]
    if holding:
        raise misconfigured(
            f"several parts of the module have the folder's layers: give as prefix one of"
            f" {listed([root.removesuffix('.') for root in holding])}."
        )
    best = max(roots, key=lambda root: sum(root + name in parts for name in names))
    missing = [best + name for name in names if best + name not in parts]
    raise misconfigured(
        f"the folder has adapters for {listed(missing)}, and the module has no such layers: they must be those of the"
        " network that the adapter was trained with; prefix says which part of the module that is."
    )


def _check_fit(name: str, adapter: _Adapter, layer: nn.Module, described: LayerOutline | None) -> None:
    """Refuse factors that do not belong to the layer."""
    kind = type(layer).__name__ if described is None else described.kind
    if described is None:
        reason = _not_convertible(layer, kind, adapter.rank)
    elif described.core and not described.reason:
        reason = "it has a core between its factors, which a folder does not hold"
    elif not described.reason and described.rank != adapter.rank:
        reason = f"its rank is {described.rank}, and the folder's {adapter.rank}"
    else:
        reason = described.reason
    if reason:
        raise misconfigured(f"the folder's adapter of layer {name!r} cannot be loaded: {reason}.")
    shape = tuple(layer.get_parameter("weight").shape) if described is None else described.shape
    outputs, *inputs = reversed(shape) if kind in ("Conv1D", "Embedding") else shape
    expected = ([adapter.rank, *inputs], [outputs, adapter.rank, *(1 for _ in inputs[1:])])
    if adapter.embedding != (kind == "Embedding") or ([*adapter.A.shape], [*adapter.B.shape]) != expected:
        raise misconfigured(
            f"the folder's factors of layer {name!r} are of shapes {tuple(adapter.A.shape)} (A) and"
            f" {tuple(adapter.B.shape)} (B), which do not fit a {kind} with a weight of shape {shape}."
        )


def _not_convertible(layer: nn.Module, kind: str, rank: int) -> str:
    """Return why a dense layer cannot take an adapter of this rank, or an empty string."""
    low_rank = low_rank_class(layer)
    if low_rank is None:
        return f"PEFT's adapters of {kind} are not read"
    reason = unsupported_layer(layer, kind) or low_rank.why_not(layer, MatrixProduct("channel"))
    if not reason:
        try:
            MatrixProduct("channel").check_rank(layer.get_parameter("weight").shape, rank)
        except ValueError as error:
            return str(error).removesuffix(".")
    return reason


def _check_rest(module: nn.Module, root: str, rest: Mapping[str, Tensor], folder: str | Path) -> None:
    """Refuse the folder's other tensors if the module has no place for them."""
    for name, value in rest.items():
        target = _tensor(module, root + name)
        if target is None:
            raise misconfigured(f"{folder} holds {name}, and the module has no parameter or buffer {root + name}.")
        if target.shape != value.shape:
            raise misconfigured(
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
    return own_parameters(owner).get(last, own_buffers(owner).get(last))
