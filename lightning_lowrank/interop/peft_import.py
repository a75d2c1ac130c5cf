"""`import_adapter`: loads a PEFT adapter folder into low-rank layers."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from lightning_lowrank.arguments import join_names
from lightning_lowrank.configuration import misconfigured
from lightning_lowrank.extras import import_extra
from lightning_lowrank.internals.torch import own_buffers, own_parameters
from lightning_lowrank.interop.peft_layout import (
    CONFIG_FILE,
    PLAIN_STARTS,
    PREFIX,
    WEIGHTS_FILE,
    LayerOutline,
    check_folder,
    check_path_and_module,
    module_names,
    outline,
    refuse_wrapped,
    unsupported_layer,
)
from lightning_lowrank.layers import LowRankLayer, MatrixProduct, low_rank_class, low_rank_layers
from lightning_lowrank.layers.conversion import note_buffers

# Fields of LoraConfig with which an adapter is still W + scaling · B A. Any other field, also of a later PEFT, selects
# a variant of LoRA unless it has its default.
_PLAIN = """
    task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode runtime_config
    r lora_alpha lora_dropout use_rslora bias modules_to_save rank_pattern alpha_pattern target_modules exclude_modules
    fan_in_fan_out layers_to_transform layers_pattern megatron_core qalora_group_size ensure_weight_tying
    init_lora_weights loftq_config eva_config corda_config lora_ga_config
"""
_MOST_ALTERNATIVES = 20
_MOST_PATTERNS = 5000
_Matchers = list[tuple[re.Pattern[str], Any]]


@dataclass(frozen=True)
class _Adapter:
    """One layer's factors in an adapter folder, in PEFT's shapes."""

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
    converted, with the adapter's ranks, α and dropout. The network's other parameters are frozen, except those that the
    folder holds: ``modules_to_save`` and biases. A parameter of a module to save that is tied to another one is untied
    if the folder's values differ, as PEFT does. `LowRank` accepts only modules that it has converted itself: to
    continue training with it, convert first and then import::

        LowRank(MatrixProduct("channel"), rank=8, alpha=16, init="lora", freeze_rest=True).convert(module)
        import_adapter(folder, module)

    If the module has low-rank layers, they must be those of the folder, with the same ranks; they keep their own α, and
    nothing is frozen.

    Args:
        folder: Holds ``adapter_config.json`` and ``adapter_model.safetensors``. Pickles (``adapter_model.bin``) are not
            read, because they can run any code.
        module: A module that holds the pretrained network.
        prefix: Name of the network in the module; ``""``: the module itself. ``None``: the module or its one child
            that has all layers of the folder.

    Raises:
        MisconfigurationException: If the folder is not plain LoRA (DoRA, biases of adapters, other methods), or has
            layers or tensors that the module lacks or has in other shapes; nothing is changed then. Or if PEFT is not
            installed.

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
    import_extra("peft", "import_adapter")
    check_folder(Path(folder), "lightning_lowrank.pull_adapter(repository, folder) downloads an adapter from the hub")
    found, rest, config = _read(Path(folder))
    root = _root(module, list(found), prefix)
    adapters = {root + name: adapter for name, adapter in found.items()}
    existing = dict(low_rank_layers(module))
    if existing and existing.keys() != adapters.keys():
        unlike = sorted(existing.keys() ^ adapters.keys())
        raise misconfigured(
            f"the module's low-rank layers differ from those of {folder} in {join_names(unlike)}: convert the"
            " folder's layers (`include`), or none."
        )
    described = {layer.name: layer for layer in outline(module).layers}
    for name, adapter in adapters.items():
        _check_fit(name, adapter, module.get_submodule(name), described.get(name))
    _check_rest(module, root, rest, folder)
    untied = _untied(module.get_submodule(root.removesuffix(".")), rest, config)
    if existing:
        values = _assignments(existing, adapters)
        _check_ties(existing, values)
    else:
        names = module_names(module)
        twice = [name for name in adapters if len(names[module.get_submodule(name)]) > 1]
        if twice:
            raise misconfigured(f"the model holds {join_names(twice)} twice, and PEFT wraps one of them.")
        base = module.get_submodule(root.removesuffix(".")).requires_grad_(False)
        base.frozen_for_factors = frozenset(name for name, _ in base.named_parameters())  # type: ignore[assignment]
        note_buffers(base)
        layers = {name: _convert(module, name, adapter, config) for name, adapter in adapters.items()}
        values = _assignments(layers, adapters)
        if config.lora_dropout and not all(layer.training for layer in layers.values()):
            warnings.warn(
                f"lora_dropout={config.lora_dropout} of {folder} has no effect in a fit before train() is called: the"
                " network is in evaluation mode.",
                stacklevel=2,
            )
    with torch.no_grad():
        for target, value in values:
            target.copy_(value)
        for name, value in rest.items():
            part = _tensor(module, root + name)
            assert part is not None
            if name in untied:
                owner, _, last = (root + name).rpartition(".")
                part = nn.Parameter(part.clone(), part.requires_grad)
                setattr(module.get_submodule(owner), last, part)
            part.copy_(value)
            if not existing and isinstance(part, nn.Parameter) and _is_trained(name, config):
                part.requires_grad_()
    return module


def _convert(module: nn.Module, name: str, adapter: _Adapter, config: Any) -> LowRankLayer:
    """Replace a dense layer by a low-rank layer with the adapter's rank and α."""
    dense = module.get_submodule(name)
    kind = low_rank_class(dense)
    assert kind is not None
    layer = kind.from_dense(
        dense,
        MatrixProduct("channel"),
        adapter.rank,
        init="lora",
        alpha=adapter.alpha,
        rank_stabilized=bool(config.use_rslora),
        dropout=float(config.lora_dropout or 0),
    )
    # An adapter may be imported for evaluation alone.
    layer.train(dense.training)
    parent, _, child = name.rpartition(".")
    module.get_submodule(parent).add_module(child, layer)
    return layer


def _assignments(layers: Mapping[str, LowRankLayer], adapters: Mapping[str, _Adapter]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a layer's factor and its new value, for all layers."""
    values = []
    for name, layer in layers.items():
        adapter = adapters[name]
        ratio = adapter.scaling / layer.scale
        factors = [adapter.B.flatten(1), adapter.A.flatten(1).T]
        own = {**dict(layer.factors.items()), **dict(layer.fixed.items())}
        layer.unmerge()
        # The ratio goes to U in both orientations: tied layers share U, but use it on different sides.
        first, second = reversed(factors) if layer.first_is_input else factors
        values += [(own["U"], first.double() * ratio if ratio != 1 else first), (own["V"], second)]
    return values


def _check_ties(layers: Mapping[str, LowRankLayer], values: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Raise if tied layers would get different values for a shared factor."""
    wanted: dict[Tensor, Tensor] = {}
    for target, value in values:
        if not torch.equal(wanted.setdefault(target, value), value):
            names = [name for name, layer in layers.items() if any(target is own for own in layer.parameters())]
            raise misconfigured(
                f"{join_names(names)} share their factors, and the folder has different ones for them: import into a"
                " module"
                " that is not converted yet, which keeps them apart."
            )


def _is_trained(name: str, config: Any) -> bool:
    """Whether PEFT trains a non-factor tensor: a bias by ``bias``, others by name endings in ``modules_to_save``."""
    if name.rpartition(".")[2] == "bias" and config.bias != "none":
        return True
    return _is_saved(name, config)


def _is_saved(name: str, config: Any) -> bool:
    """Whether a tensor belongs to a module of ``modules_to_save``, of which PEFT trains a copy."""
    parts = name.split(".")
    above = [".".join(parts[:stop]) for stop in range(1, len(parts))]
    return any(module.endswith(tuple(config.modules_to_save or ())) for module in above)


def _untied(network: nn.Module, rest: Mapping[str, Tensor], config: Any) -> set[str]:
    """Names in ``rest`` of tied parameters of modules to save, which PEFT's copies of these modules do not share.

    A tie stays if the folder has equal values for all its names, or if PEFT ensures it.

    Raises:
        MisconfigurationException: If the network holds such a module twice.
    """
    if config.ensure_weight_tying and getattr(network, "_tied_weights_keys", None):
        return set()
    holders: dict[Tensor, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        holders.setdefault(parameter, []).append(name)
    modules, untied = module_names(network), set()
    for name, value in rest.items():
        target = _tensor(network, name)
        tied = holders[target] if isinstance(target, nn.Parameter) and _is_saved(name, config) else []
        if len(tied) < 2 or all(each in rest and torch.equal(rest[each].to(value), value) for each in tied):
            continue
        owner = name.rpartition(".")[0]
        if len(modules[network.get_submodule(owner)]) > 1:
            raise misconfigured(f"the model holds {owner} twice, and PEFT saves one of them.")
        untied.add(name)
    return untied


def _read(folder: Path) -> tuple[dict[str, _Adapter], dict[str, Tensor], Any]:
    """A folder's adapters by layer, its other tensors by name, and its configuration."""
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
            # With bias="all", PEFT writes the biases of modules_to_save twice: under the names of both copies.
            rest[name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")] = value
    if not factors:
        raise misconfigured(f"{folder / WEIGHTS_FILE} holds no LoRA factors.")
    ranks, alphas = _matchers(config.rank_pattern), _matchers(config.alpha_pattern)
    adapters = {
        name: _adapter(
            name,
            parts,
            name in embeddings,
            _by_pattern(ranks, name, config.r),
            _by_pattern(alphas, name, config.lora_alpha),
            config.use_rslora,
        )
        for name, parts in factors.items()
    }
    return adapters, rest, config


def _read_config(folder: Path) -> Any:
    """A folder's `LoraConfig`; raises if the adapter is not plain LoRA."""
    from peft import LoraConfig

    path = folder / CONFIG_FILE
    # PEFT looks on the hub for a file that is not there.
    if not path.is_file():
        raise misconfigured(f"{folder} is not a PEFT adapter folder: it holds no {CONFIG_FILE}.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise misconfigured(f"{path} is no JSON object, but {content!r:.99}: PEFT writes an object of settings.")
        fields = LoraConfig.from_json_file(str(path))
        kind = fields.get("peft_type")
        config = LoraConfig.from_peft_type(**fields) if kind == "LORA" else None
    except (AttributeError, ImportError, RecursionError, TypeError, ValueError) as error:
        raise misconfigured(f"{path} is no configuration that PEFT reads ({type(error).__name__}: {error}).") from error
    if config is None:
        raise misconfigured(f"{folder} holds an adapter of PEFT's type {kind!r}, and only 'LORA' is read.")
    for name, default in vars(LoraConfig()).items():
        value = getattr(config, name, default)
        if name not in _PLAIN.split() and value and value != default:
            raise misconfigured(
                f"{folder} has {name}={value!r:.99}, a variant of LoRA, and only plain LoRA is read: load it with PEFT,"
                " PeftModel.from_pretrained(base_model, folder)."
            )
    if config.init_lora_weights not in PLAIN_STARTS:
        raise misconfigured(
            f"{folder} has init_lora_weights={config.init_lora_weights!r:.99}, which changes the base weights: save it"
            " as plain LoRA, with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)."
        )
    _check_types(path, config)
    return config


def _check_types(path: Path, config: Any) -> None:
    """Raise if a setting's type is not the one that PEFT writes, as in ``"r": "8"``: PEFT does not check types."""

    def is_number(value: Any, kinds: Any = (int, float)) -> bool:
        return isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value < math.inf

    def are_names(value: Any) -> bool:
        return value is None or (isinstance(value, (list, set)) and all(isinstance(each, str) for each in value))

    rank = (lambda value: is_number(value, int) and value > 0, "a whole number above 0, such as 8")
    alpha = (lambda value: is_number(value) and value > 0, "a number above 0, such as 16")
    targets = (
        lambda value: isinstance(value, str) or are_names(value),
        'null, a regular expression or a list of names, such as ["q_proj", "v_proj"]',
    )
    wanted: dict[str, tuple[Callable[[Any], bool], str]] = {
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": (
            lambda value: value is None or (is_number(value) and value < 1),
            "a number of at least 0 and below 1, such as 0.1",
        ),
        "use_rslora": (lambda value: value is None or isinstance(value, bool), "true or false"),
        "bias": (lambda value: value in ("none", "all", "lora_only"), "'none', 'all' or 'lora_only'"),
        "target_modules": targets,
        "exclude_modules": targets,
        "modules_to_save": (are_names, 'null or a list of names, such as ["head"]'),
        "rank_pattern": (lambda value: not value or isinstance(value, dict), "an object of layers' names"),
        "alpha_pattern": (lambda value: not value or isinstance(value, dict), "an object of layers' names"),
    }
    for name, (fits, remedy) in wanted.items():
        if not fits(value := getattr(config, name)):
            raise misconfigured(f"{path} has {name}={value!r:.99}, and PEFT writes {remedy}.")
    for name, (fits, remedy) in (("rank_pattern", rank), ("alpha_pattern", alpha)):
        patterns = getattr(config, name) or {}
        if len(patterns) > _MOST_PATTERNS:
            raise misconfigured(
                f"{path} has {len(patterns):,} keys in {name}, and {_MOST_PATTERNS:,} are read at most: leave out those"
                " that match no layer of the folder."
            )
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
    """Why a pattern is refused: it is no valid regular expression, or may take exponential time. Empty if neither.

    With two repetitions and two groups of a few alternatives, matching a name takes at most a hundred times the square
    of its length in steps. With a repeated group it may take two to the power of the length.
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


def _adapter(
    name: str, parts: Mapping[str, Tensor], embedding: bool, rank: int, alpha: float, stabilized: bool
) -> _Adapter:
    for which in ("A", "B"):
        if which not in parts:
            raise misconfigured(f"the folder lacks lora_{which} of layer {name!r}.")
        if not _is_finite(parts[which]):
            raise misconfigured(
                f"lora_{which} of layer {name!r} in the folder holds NaN or infinity, as after a fit that diverged:"
                " save an earlier state of the adapter."
            )
    left, right = parts["B"], parts["A"]
    if left.dim() != right.dim() or left.dim() < 2 or left.shape[1] != right.shape[0] or right.shape[0] != rank:
        raise misconfigured(
            f"the factors of layer {name!r} do not fit: lora_A has shape {tuple(right.shape)}, lora_B"
            f" {tuple(left.shape)}, and the rank is {rank}."
        )
    return _Adapter(left, right, alpha, alpha / (math.sqrt(rank) if stabilized else rank), embedding)


def _is_finite(value: Tensor) -> bool:
    # torch.isfinite has no kernels for some types of 8 bits.
    return bool(torch.isfinite(value.float()).all())


def _matchers(patterns: Mapping[str, Any] | None) -> _Matchers:
    """The patterns, each compiled once, in which peft.utils.other.get_pattern_key looks for a layer's name."""
    return [(re.compile(rf"(.*\.)?({pattern})$"), value) for pattern, value in (patterns or {}).items()]


def _by_pattern(matchers: _Matchers, name: str, otherwise: Any) -> Any:
    return next((value for matcher, value in matchers if matcher.match(name)), otherwise)


def _root(module: nn.Module, names: Sequence[str], prefix: str | None) -> str:
    """The prefix of the folder's names in the module, with its trailing dot."""
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
            f" {join_names([root.removesuffix('.') for root in holding])}."
        )
    best = max(roots, key=lambda root: sum(root + name in parts for name in names))
    missing = [best + name for name in names if best + name not in parts]
    raise misconfigured(
        f"the folder has adapters for {join_names(missing)}, and the module has no such layers: they must be those of"
        " the"
        " network that the adapter was trained with; prefix says which part of the module that is."
    )


def _check_fit(name: str, adapter: _Adapter, layer: nn.Module, described: LayerOutline | None) -> None:
    """Raise if an adapter's factors do not fit its layer."""
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
    """Why a dense layer cannot take an adapter of this rank; empty if it can."""
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
    """Raise if the module has no tensor of the same name and shape for one of the folder's other tensors."""
    for name, value in rest.items():
        target = _tensor(module, root + name)
        if target is None:
            raise misconfigured(f"{folder} holds {name}, and the module has no parameter or buffer {root + name}.")
        if target.shape != value.shape:
            raise misconfigured(
                f"{folder} holds {name} of shape {tuple(value.shape)}, and the module's has {tuple(target.shape)}."
            )
        # A buffer, such as an attention's mask, may hold infinity.
        if isinstance(target, nn.Parameter) and not _is_finite(value):
            raise misconfigured(
                f"{name} in {folder} holds NaN or infinity, as after a fit that diverged: save an earlier state of the"
                " adapter."
            )


def _tensor(module: nn.Module, name: str) -> Tensor | None:
    """A parameter or buffer by name; ``weight`` of a low-rank layer means its frozen weight."""
    owner_name, _, last = name.rpartition(".")
    try:
        owner = module.get_submodule(owner_name)
    except AttributeError:
        return None
    last = "frozen_weight" if last == "weight" and isinstance(owner, LowRankLayer) else last
    return own_parameters(owner).get(last, own_buffers(owner).get(last))
