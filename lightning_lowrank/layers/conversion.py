"""Converting a model's layers to low-rank ones, in place, and back.

:func:`convert` chooses the layers and their ranks, :func:`recover` puts dense layers back, and
:func:`dense_state_dict` does the latter to tensors alone, with no model at hand.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_lowrank.layers.attention import LowRankMultiheadAttention
from lightning_lowrank.layers.budget import Budget, BudgetRule, BudgetUnit
from lightning_lowrank.layers.convolution import (
    LowRankConv1d,
    LowRankConv2d,
    LowRankConv3d,
    LowRankConvTranspose1d,
    LowRankConvTranspose2d,
    LowRankConvTranspose3d,
)
from lightning_lowrank.layers.factorization import (
    Factorization,
    HalfFrozen,
    MatrixProduct,
    factorization_from_dict,
)
from lightning_lowrank.layers.modules import (
    Compute,
    Init,
    LowRankEmbedding,
    LowRankLayer,
    LowRankLinear,
    Role,
    check_settings,
    combine,
    update_scale,
)
from lightning_lowrank.patterns import check_patterns, matches
from lightning_lowrank.seeding import derive_seed

__all__ = [
    "Allocation",
    "Conversion",
    "LayerReport",
    "LayerSpec",
    "convert",
    "dense_state_dict",
    "low_rank_class",
    "low_rank_layers",
    "merge",
    "recover",
    "unmerge",
]

Allocation = Literal["uniform", "singular_values"]

_Number = TypeVar("_Number", int, float)

_CLASSES: tuple[type[LowRankLayer], ...] = (
    LowRankLinear,
    LowRankConv1d,
    LowRankConv2d,
    LowRankConv3d,
    LowRankConvTranspose1d,
    LowRankConvTranspose2d,
    LowRankConvTranspose3d,
    LowRankEmbedding,
)


def low_rank_class(module: nn.Module) -> type[LowRankLayer] | None:
    """Return the low-rank class for a layer or a subclass of one, or ``None`` for any other module.

    A subclass may still not be convertible: :meth:`LowRankLayer.why_not` says so.

    Args:
        module: Any module.
    """
    kind = type(module)
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        from lightning_lowrank.layers.transformers import LowRankConv1D

        return LowRankConv1D
    for candidate in _CLASSES:
        if isinstance(module, candidate.dense_classes):
            return candidate
    return None


@dataclass(frozen=True)
class LayerReport:
    """What a conversion did with one layer that has a weight.

    Attributes:
        name: The layer's name in the model.
        kind: The dense layer's class name.
        shape: The dense weight's shape.
        rank: The factors' rank, ``None`` where the layer was left alone.
        parameters: Numbers in the dense weight.
        trainable: Numbers that are trained in the weight's stead (the weight's own, or 0 where it is frozen,
            if the layer was left alone). The bias counts in neither.
        converted: Whether the layer is low-rank now.
        reason: Why the layer was left alone, or whose factors it shares; else empty.
        error: The relative error ‖W − f‖ / ‖W‖ (Frobenius norms) of a weight that started from the dense one's
            decomposition, else ``None``.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    rank: int | None
    parameters: int
    trainable: int
    converted: bool
    reason: str = ""
    error: float | None = None


@dataclass(frozen=True)
class LayerSpec:
    """What a checkpoint must say about a low-rank layer for its dense weight to be composed from tensors.

    Attributes:
        name: The layer's name in the converted model.
        shape: The dense weight's shape.
        factorization: :meth:`Factorization.to_dict` of the factorization.
        rank: The factors' rank.
        role: ``"update"`` or ``"weight"``.
        decouple: Whether the layer is decoupled.
        half_frozen: Which factor is frozen; ``True`` means ``"U"``.
        aliases: Further names of the same layer, where a model holds it more than once.
        scale: What an update is multiplied by.
        suffix: What follows the layer's name in the dense weight's: ``".weight"``, or ``"_weight"`` for the
            projections of ``nn.MultiheadAttention``.
    """

    name: str
    shape: tuple[int, ...]
    factorization: dict[str, Any]
    rank: int
    role: Role
    decouple: bool
    half_frozen: HalfFrozen
    aliases: tuple[str, ...] = ()
    scale: float = 1.0
    suffix: str = ".weight"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields in plain Python (lists for tuples), for a checkpoint or JSON."""
        return {**asdict(self), "shape": list(self.shape), "aliases": list(self.aliases)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> LayerSpec:
        """Build the spec that :meth:`to_dict` described.

        Args:
            fields: The fields by name.

        Raises:
            TypeError: If a field is missing or unknown.
        """
        spec = cls(**fields)
        return cls(**{**asdict(spec), "shape": tuple(spec.shape), "aliases": tuple(spec.aliases)})


@dataclass(frozen=True)
class Conversion:
    """The outcome of :func:`convert`; printing it gives a table.

    Attributes:
        layers: A report for each layer of the model that has a weight, in registration order.
        specs: What is needed to compose each converted layer's dense weight, in the same order.
        dense_parameters: Numbers in all parameters of the model before conversion.
        trainable_parameters: Numbers in all trainable parameters of the model after it.
    """

    layers: list[LayerReport] = field(default_factory=list)
    specs: list[LayerSpec] = field(default_factory=list)
    dense_parameters: int = 0
    trainable_parameters: int = 0

    @property
    def ratio(self) -> float:
        """Trainable parameters now over all parameters of the dense model."""
        return self.trainable_parameters / self.dense_parameters

    def __str__(self) -> str:
        columns: dict[str, list[str]] = {
            "layer": [layer.name for layer in self.layers],
            "kind": [layer.kind for layer in self.layers],
            "shape": ["×".join(map(str, layer.shape)) for layer in self.layers],
            "rank": ["" if layer.rank is None else str(layer.rank) for layer in self.layers],
            "parameters": [f"{layer.parameters:,}" for layer in self.layers],
            "trainable": [f"{layer.trainable:,}" for layer in self.layers],
        }
        if any(layer.error is not None for layer in self.layers):
            columns["error"] = ["" if layer.error is None else f"{layer.error:.4f}" for layer in self.layers]
        columns[""] = [layer.reason for layer in self.layers]
        left = ("layer", "kind", "shape", "")
        padded = []
        for header, cells in columns.items():
            width = max(map(len, (header, *cells)))
            padded.append([f"{cell:{'<' if header in left else '>'}{width}}" for cell in (header, *cells)])
        lines = ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]
        lines.append(
            f"{self.trainable_parameters:,} of {self.dense_parameters:,} parameters are trained "
            f"({self.ratio:.2%}), other parameters of the model included."
        )
        return "\n".join(lines)


def convert(
    model: nn.Module,
    factorization: Factorization,
    *,
    rank: int | Mapping[str, int] | None = None,
    rank_ratio: float | Mapping[str, float] | None = None,
    ratio: float | Mapping[str, float] | None = None,
    budget: float | None = None,
    budget_unit: BudgetUnit = "share",
    budget_rule: BudgetRule = "largest",
    allocation: Allocation = "uniform",
    role: Role = "update",
    decouple: bool = False,
    half_frozen: HalfFrozen = False,
    init: Init = "auto",
    init_scale: float | None = None,
    alpha: float | None = None,
    rank_stabilized: bool = False,
    dropout: float = 0.0,
    compute: Compute = "auto",
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    skip: Sequence[Literal["first", "last"]] = (),
    allow_larger: bool = False,
    freeze_rest: bool = False,
    keep_trained: Sequence[str] | None = None,
    train_base: bool = False,
    seed: int = 0,
) -> Conversion:
    """Replace a model's layers by low-rank ones, in place.

    A layer can be converted if it is exactly an ``nn.Linear``, ``nn.Conv1d`` to ``3d``, ``nn.ConvTranspose1d``
    to ``3d``, ``nn.Embedding`` or transformers' ``Conv1D`` with a plain floating-point weight; so can the
    projections of an ``nn.MultiheadAttention``, each under its weight's name without ``_weight``
    (``attention.in_proj``). Subclasses have a use for their weight that this could break. Layers that share
    one weight share the factors afterwards; they are converted all or none. The others, layers whose trained
    factors would not be fewer numbers than the weight, and in role ``"weight"`` those whose weight is constant and
    gives the factors no start, are left alone, and the report says why.

    Patterns are matched case-sensitively with the wildcards of :mod:`fnmatch` against a layer's whole name
    and every run of its parts between dots: ``"encoder"`` and ``"encoder.0"`` mean all layers in these
    modules, ``"fc*"`` also ``encoder.0.fc1``.

    Args:
        model: The model. Nothing in it is changed if an error is raised.
        factorization: How factors stand for a weight.
        rank: The rank of every layer, or a mapping from patterns to ranks, of which the first that matches
            counts and layers that none matches are left alone. Give exactly one of ``rank``, ``rank_ratio``,
            ``ratio`` and ``budget``.
        rank_ratio: Rank over output channels, γ in (0, 1]: the rank is γ·channels, rounded to the nearest
            integer and at least 1 (FedHM, Yao et al. 2021); for every layer, or by pattern as ``rank``.
        ratio: Trained factors over the weight's numbers, in (0, 1]; for every layer, or by pattern as
            ``rank``.
        budget: All trainable parameters over all parameters of the dense model, in (0, 1], or what else
            ``budget_unit`` says. Biases, norms and layers that are left alone count as well as factors.
        budget_unit: ``"share"`` (default) of the dense model's parameters, or a number of trainable
            ``"parameters"``, or their size in ``"bytes"``.
        budget_rule: How ``budget`` becomes one ratio for all layers. ``"largest"`` (default): the largest
            whose total fits the budget. ``"authors"``: as in FedMUD's released code, start at the budget and
            go down in steps of 0.001 until the model's ratio is at most the budget + 0.001.
        allocation: How ``budget`` is divided. ``"uniform"`` (default): one ratio for all layers.
            ``"singular_values"`` (matrix product only): one rank after another goes to the layer where the
            next singular value explains most of its weight per parameter, until the budget is used up:
            its square, as a share of the layer's sum of squares.
        role: ``"update"`` (default) trains a change to a frozen weight, ``"weight"`` the weight itself.
        decouple: Train ``f(U, Ṽ) + f(Ũ, V)`` (AAD, Eq. 8 of FedMUD). Off by default.
        half_frozen: Freeze the factor ``"U"`` (or ``True``) or ``"V"``; the same ratio then affords a higher
            rank. Off by default.
        init: How the factors start; see :meth:`LowRankLayer.from_dense`.
        init_scale: The ``a`` of uniform draws U(−a, a). By default chosen for each layer.
        alpha: LoRA's α, which multiplies updates by α / rank; see :meth:`LowRankLayer.from_dense`.
        rank_stabilized: Multiply by α / √rank instead. Off by default.
        dropout: Probability with which numbers of a layer's input are left out of its update in training.
        compute: ``"dense"``, ``"contracted"`` or, whichever needs fewer multiply-adds, ``"auto"`` (default).
        include: Patterns of the layers to convert. All by default.
        exclude: Patterns of layers to leave alone. None by default.
        skip: ``"first"`` and ``"last"`` leave the first and the last of the layers that can be converted,
            in registration order, alone. Empty by default.
        allow_larger: Whether to convert layers whose factors are no fewer numbers than their weight. Off by
            default.
        freeze_rest: Whether to freeze every parameter but the factors (and, with ``train_base``, the weights that they
            update), biases too. Off by default.
        keep_trained: Patterns of the parameters that ``freeze_rest`` spares, matched against their names as those of
            layers are: ``["classifier"]`` for the new head of a pretrained model. None by default. The weight of a
            layer that is converted is not spared; name the layer in ``exclude`` to train it whole.
        train_base: Train the weight beside the update, in role ``"update"``. Off by default.
        seed: Seed of the factors' draws; each layer's is derived from it and its name.

    Returns:
        What became of each layer, with the model's totals.

    Raises:
        TypeError: If ``model`` is itself a layer to convert, or an argument of a wrong kind.
        ValueError: If an argument is out of range, a pattern matches nothing, the model has low-rank or
            uninitialised layers, the budget is below what the smallest ranks need, or there is nothing to
            convert.

    Example:
        >>> from lightning_lowrank.layers import MatrixProduct, convert
        >>> model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4))
        >>> print(convert(model, MatrixProduct(), rank=4, skip=["first", "last"]))
        layer  kind    shape  rank  parameters  trainable
        0      Linear  32×16               512        512  first layer that can be converted (skip)
        1      Linear  32×32     4       1,024        256
        2      Linear  4×32                128        128  last layer that can be converted (skip)
        964 of 1,732 parameters are trained (55.66%), other parameters of the model included.
    """
    sizes = {"rank": rank, "rank_ratio": rank_ratio, "ratio": ratio, "budget": budget}
    _check_size(sizes, budget_unit, budget_rule, allocation, factorization)
    _check_patterns_given(include, exclude, skip, keep_trained)
    if keep_trained and not freeze_rest:
        raise ValueError(
            f"keep_trained={list(keep_trained)!r} says what freeze_rest leaves trained: set freeze_rest=True, or leave"
            " it out to train everything."
        )
    settings: dict[str, Any] = {
        "role": role,
        "decouple": decouple,
        "half_frozen": half_frozen,
        "init": init,
        "init_scale": init_scale,
        "alpha": alpha,
        "rank_stabilized": rank_stabilized,
        "dropout": dropout,
        "compute": compute,
        "train_base": train_base,
    }
    check_settings(**settings)
    layers = _survey(model, factorization)
    convertible = [layer for layer in layers if not layer.reason]
    names = [name for layer in convertible for name in (layer.name, *layer.aliases)]
    for argument, patterns in {"include": include, "exclude": exclude, **sizes}.items():
        if isinstance(patterns, (Mapping, Sequence)):
            check_patterns(argument, patterns, names, "layer that can be converted")
    _select(convertible, include, exclude, skip)
    if role == "weight":
        _leave_constant_weights(convertible, init, init_scale)
    _keep_ties(layers)
    selected = [layer for layer in convertible if not layer.reason and layer.tied_to is None]

    dense_parameters = sum(parameter.numel() for parameter in model.parameters())
    spared = {
        parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and any(matches(pattern, name) for pattern in keep_trained or ())
    }
    for layer in selected:
        if rank is not None:
            layer.rank = layer.first_match("rank", rank)
        elif rank_ratio is not None:
            share = layer.first_match("rank_ratio", rank_ratio)
            layer.rank = None if share is None else max(round(share * layer.output_channels), 1)
        elif ratio is not None:
            share = layer.first_match("ratio", ratio)
            if share is not None:
                with _naming(layer):
                    layer.rank = factorization.rank_for_ratio(layer.shape, share, half_frozen)
    if budget is not None and selected:
        whole = Budget.of(
            model, [layer.weight for layer in selected], factorization, half_frozen, freeze_rest, budget, budget_unit
        )
        outside = spared.difference(layer.weight for layer in selected)
        spared_cost = sum(p.numel() * (p.element_size() if budget_unit == "bytes" else 1) for p in outside)
        whole = replace(whole, rest=whole.rest + spared_cost)
        ranks = whole.uniform(budget_rule) if allocation == "uniform" else whole.by_singular_values()
        for layer, chosen_rank in zip(selected, ranks, strict=True):
            layer.rank = chosen_rank
    for layer in selected:
        if layer.rank is not None:
            _check_rank(layer, factorization, decouple, half_frozen, allow_larger)
    _keep_ties(layers)
    chosen = [layer for layer in layers if not layer.reason]
    if not chosen:
        reasons = "; ".join(f"{layer.name}: {layer.reason}" for layer in layers) or "it has no such layers"
        raise ValueError(f"no layer of the model can be converted ({reasons}).")
    if dropout or compute == "contracted":
        _refuse_for_attention(chosen, dropout)
    replaced = {layer.weight for layer in chosen}
    if keep_trained:
        named = model.named_parameters(remove_duplicate=False)
        left = [name for name, p in named if p.requires_grad and p not in replaced]
        check_patterns("keep_trained", keep_trained, left, "trained parameter that is not converted")
        spared -= replaced
    _make_low_rank(model, chosen, factorization, settings, seed)
    if freeze_rest:
        for _, low_rank in low_rank_layers(model):
            spared.update(low_rank.factors.parameters())
            if train_base and low_rank.frozen_weight.requires_grad:
                spared.add(low_rank.frozen_weight)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter in spared)

    return Conversion(
        layers=[
            layer.report(factorization, half_frozen, train_base, freeze_rest and layer.weight not in spared)
            for layer in layers
        ],
        specs=[
            LayerSpec(
                layer.name,
                layer.shape,
                factorization.to_dict(),
                layer.chosen_rank,
                role,
                decouple,
                half_frozen,
                layer.aliases,
                update_scale(layer.chosen_rank, alpha, rank_stabilized),
                layer.suffix,
            )
            for layer in chosen
        ],
        dense_parameters=dense_parameters,
        trainable_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
    )


def _make_low_rank(
    model: nn.Module, chosen: Sequence[_Layer], factorization: Factorization, settings: dict[str, Any], seed: int
) -> None:
    """Build the chosen layers and put them into the model; on an error, leave the model as it was."""
    trained = [(layer.weight, layer.weight.requires_grad) for layer in chosen]
    built: dict[str, LowRankLayer] = {}
    try:
        for layer in chosen:
            built[layer.name] = layer.build(factorization, settings, derive_seed(seed, layer.name), built)
    except ValueError as error:
        for weight, requires_grad in trained:
            weight.requires_grad_(requires_grad)
        raise ValueError(f"layer {layer.name!r}: {error}") from None
    _replace(model, {layer.module: built[layer.name] for layer in chosen if not layer.projection})
    attentions: dict[nn.Module, dict[str, LowRankLinear]] = {}
    for layer in chosen:
        if layer.projection:
            projection = built[layer.name]
            assert isinstance(projection, LowRankLinear)
            attentions.setdefault(layer.module, {})[layer.projection] = projection
    _replace(
        model,
        {
            attention: LowRankMultiheadAttention.from_dense(attention, projections)
            for attention, projections in attentions.items()
            if isinstance(attention, nn.MultiheadAttention)
        },
    )


def low_rank_layers(model: nn.Module, tied: bool = True) -> Iterator[tuple[str, LowRankLayer]]:
    """Yield the name and module of each low-rank layer, once each, in registration order.

    Args:
        model: A converted model, or one that holds one.
        tied: Whether to yield layers that share the factors of an earlier one as well. On by default.

    Example:
        >>> from lightning_lowrank.layers import MatrixProduct, convert, low_rank_layers
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> _ = convert(model, MatrixProduct(), rank=1)
        >>> [name for name, _ in low_rank_layers(model)]
        ['0', '2']
    """
    seen: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, LowRankLayer) and (tied or module.factors not in seen):
            seen.add(module.factors)
            yield name, module


def merge(model: nn.Module) -> nn.Module:
    """Compose every low-rank layer's weight once and keep it, so that inference costs what the dense model does.

    Factors, frozen weights and the state dict stay as they are; :func:`unmerge`, ``model.train()`` and loading
    a state dict undo it, bit for bit.

    Args:
        model: A converted model.

    Returns:
        The model.

    Example:
        >>> from lightning_lowrank.layers import MatrixProduct, convert, merge
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
        >>> _ = convert(model, MatrixProduct(), rank=1)
        >>> merge(model)[0].merged_weight.shape
        torch.Size([8, 8])
    """
    for _, layer in low_rank_layers(model):
        layer.merge()
    return model


def unmerge(model: nn.Module) -> nn.Module:
    """Undo :func:`merge`.

    Args:
        model: A converted model.

    Returns:
        The model.
    """
    for _, layer in low_rank_layers(model):
        layer.unmerge()
    return model


def recover(model: nn.Module) -> nn.Module:
    """Replace every low-rank layer by the dense layer with the same weight, in place.

    The dense weights are new parameters, trainable where the weights were before the conversion; biases and
    hooks are the layers' own. What else ``freeze_rest`` froze stays frozen.

    Args:
        model: A converted model. One without low-rank layers is returned as it is.

    Returns:
        The model.

    Raises:
        TypeError: If ``model`` is itself a low-rank layer: use its ``to_dense``.

    Example:
        >>> from lightning_lowrank.layers import MatrixProduct, convert, recover
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        >>> _ = convert(model, MatrixProduct(), rank=1)
        >>> recover(model)
        Sequential(
          (0): Linear(in_features=8, out_features=8, bias=True)
          (1): ReLU()
        )
    """
    if isinstance(model, (LowRankLayer, LowRankMultiheadAttention)):
        raise TypeError(
            f"model is itself a {type(model).__name__}, which cannot be replaced in place; use model.to_dense()."
        )
    tied: dict[nn.Module, nn.Parameter] = {}
    attentions: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, LowRankMultiheadAttention):
            attentions[module] = dense = module.to_dense()
            for name in module.PROJECTIONS:
                projection = module._modules.get(name)
                if isinstance(projection, LowRankLayer):
                    weight = dense.get_parameter(f"{name}_weight")
                    setattr(dense, f"{name}_weight", tied.setdefault(projection.factors, weight))
    _replace(model, attentions)
    layers: dict[nn.Module, nn.Module] = {}
    for _, layer in low_rank_layers(model):
        layers[layer] = plain = layer.to_dense(hooks=True)
        plain.weight = tied.setdefault(layer.factors, plain.get_parameter("weight"))
    _replace(model, layers)
    return model


def dense_state_dict(state_dict: Mapping[str, Tensor], specs: Sequence[LayerSpec]) -> dict[str, Tensor]:
    """Turn a converted model's state dict into one that loads into the unconverted model.

    Args:
        state_dict: Of the converted model; may be on any device.
        specs: :attr:`Conversion.specs`. The names must be relative to the same module as the state dict's.

    Returns:
        The state dict with a dense ``weight`` for each low-rank layer in place of its tensors; other entries
        are the same tensors as before.

    Raises:
        ValueError: If a tensor of a layer is missing.

    Example:
        >>> from lightning_lowrank.layers import MatrixProduct, convert, dense_state_dict
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        >>> conversion = convert(model, MatrixProduct(), rank=1)
        >>> list(dense_state_dict(model.state_dict(), conversion.specs))
        ['0.weight', '0.bias']
    """
    weights: dict[str, tuple[str, Tensor]] = {}
    absorbed: dict[str, str] = {}
    for spec in specs:
        for name in (spec.name, *spec.aliases):
            keys = _tensor_keys(spec, name)
            missing = [key for key in keys if key not in state_dict]
            if missing:
                raise ValueError(
                    f"state_dict lacks {missing} of the low-rank layer {name!r}; it must be the state dict "
                    "of the module whose conversion gave the specs."
                )
            weights[name] = (f"{name}{spec.suffix}", _dense_weight(spec, name, state_dict))
            absorbed.update(dict.fromkeys(keys, name))
    dense: OrderedDict[str, Tensor] = OrderedDict()
    if hasattr(state_dict, "_metadata"):
        # The versions of modules, without which some of torch's refuse to load.
        dense._metadata = state_dict._metadata  # type: ignore[attr-defined]
    for key, value in state_dict.items():
        layer = absorbed.get(key, key.removesuffix(".bias"))
        if layer in weights:
            dense.setdefault(*weights[layer])
        if key not in absorbed:
            dense[key] = value
    return dense


@dataclass
class _Layer:
    """A weight of the model while :func:`convert` decides what becomes of it.

    ``projection`` is the weight's name without ``_weight`` where it is one of several of an attention.
    """

    name: str
    aliases: tuple[str, ...]
    module: nn.Module
    projection: str
    weight: nn.Parameter
    shared_with: list[str]
    reason: str = ""
    rank: int | None = None
    tied_to: _Layer | None = None
    error: float | None = None

    def __post_init__(self) -> None:
        self.kind = type(self.module).__name__
        self.shape = tuple(self.weight.shape)
        self.trainable = self.weight.requires_grad

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    @property
    def suffix(self) -> str:
        return "_weight" if self.projection else ".weight"

    @property
    def output_channels(self) -> int:
        kind = None if self.projection else low_rank_class(self.module)
        first_is_input = kind is not None and kind.first_is_input
        return self.shape[1] * getattr(self.module, "groups", 1) if first_is_input else self.shape[0]

    @property
    def chosen_rank(self) -> int:
        rank = self.rank if self.tied_to is None else self.tied_to.rank
        assert rank is not None
        return rank

    def matches(self, pattern: str) -> bool:
        return any(matches(pattern, name) for name in (self.name, *self.aliases))

    def first_match(self, argument: str, setting: _Number | Mapping[str, _Number]) -> _Number | None:
        """Look up this layer's value, giving it a reason to be left alone where no pattern matches."""
        for pattern, value in _by_pattern(setting).items():
            if self.matches(pattern):
                return value
        self.reason = f"no pattern of {argument} matches"
        return None

    def build(
        self, factorization: Factorization, settings: dict[str, Any], seed: int, built: Mapping[str, LowRankLayer]
    ) -> LowRankLayer:
        """Make the low-rank layer, with the factors of the one it is tied to where there is one."""
        module, kind = self.module, low_rank_class(self.module)
        if self.projection:
            module, kind = _as_linear(self.weight, self.module.training), LowRankLinear
            settings = {**settings, "compute": "dense"}
        assert kind is not None
        if self.tied_to is not None:
            settings = {**settings, "init": "uniform"}
        layer = kind.from_dense(module, factorization, self.chosen_rank, seed=seed, **settings)
        if self.tied_to is not None:
            first = built[self.tied_to.name]
            layer.factors, layer.fixed = first.factors, first.fixed
            layer.init_scale, layer.zero_factors = first.init_scale, first.zero_factors
        elif settings["role"] == "weight" and settings["init"] in ("auto", "spectral"):
            with torch.no_grad():
                difference = (layer.weight - self.weight).norm() / self.weight.norm()
            self.error = difference.item()
        return layer

    def report(
        self, factorization: Factorization, half_frozen: HalfFrozen, train_base: bool, frozen: bool
    ) -> LayerReport:
        converted = not self.reason
        if not converted:
            trainable = self.numbers if self.trainable and not frozen else 0
        elif self.tied_to is not None:
            trainable = 0
        else:
            factors = factorization.trained_numbers(self.shape, self.chosen_rank, half_frozen)
            trainable = factors + (self.numbers if train_base and self.trainable else 0)
        shares = f"shares the factors of {self.tied_to.name}" if converted and self.tied_to is not None else ""
        return LayerReport(
            name=self.name,
            kind=self.kind,
            shape=self.shape,
            rank=self.chosen_rank if converted else None,
            parameters=self.numbers,
            trainable=trainable,
            converted=converted,
            reason=self.reason or shares,
            error=self.error,
        )


def _as_linear(weight: nn.Parameter, training: bool) -> nn.Linear:
    """Dress a weight of an attention as the linear layer it stands for, without drawing another one."""
    linear = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(linear)
    linear.out_features, linear.in_features = weight.shape
    linear.register_parameter("weight", weight)
    linear.register_parameter("bias", None)
    linear.training = training
    return linear


def _check_size(
    sizes: Mapping[str, Any],
    budget_unit: str,
    budget_rule: str,
    allocation: str,
    factorization: Factorization,
) -> None:
    given = [name for name, value in sizes.items() if value is not None]
    if len(given) != 1:
        raise ValueError(
            f"exactly one of rank, rank_ratio, ratio and budget must be given, but {' and '.join(given) or 'none'} "
            f"{'are' if len(given) > 1 else 'is'}."
        )
    (name,) = given
    for setting, value, allowed in (
        ("budget_unit", budget_unit, ("share", "parameters", "bytes")),
        ("budget_rule", budget_rule, ("largest", "authors")),
        ("allocation", allocation, ("uniform", "singular_values")),
    ):
        if value not in allowed:
            *others, last = (f'"{choice}"' for choice in allowed)
            raise ValueError(f"{setting} must be {', '.join(others)} or {last}, but is {value!r}.")
    if name != "budget" and (budget_unit, allocation) != ("share", "uniform"):
        raise ValueError(
            f"budget_unit={budget_unit!r} and allocation={allocation!r} divide a budget, but {name} is given in its "
            "stead; give budget, or leave them out."
        )
    if allocation == "singular_values" and not isinstance(factorization, MatrixProduct):
        raise ValueError(
            f'allocation="singular_values" needs a MatrixProduct, whose rank is a number of singular values, but '
            f"factorization is {factorization!r}."
        )
    if budget_rule == "authors" and (budget_unit, allocation) != ("share", "uniform"):
        raise ValueError(
            'budget_rule="authors" lowers one ratio for all layers: it needs budget_unit="share" and '
            'allocation="uniform".'
        )
    for pattern, value in _by_pattern(sizes[name]).items():
        if name == "rank":
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"rank must be an integer of at least 1, but is {value!r}{_of(pattern)}.")
        elif name == "budget" and budget_unit != "share":
            if not value >= 1:
                raise ValueError(f"budget must be at least 1 in {budget_unit}, but is {value!r}.")
        elif not 0 < value <= 1:
            raise ValueError(f"{name} must be above 0 and at most 1, but is {value!r}{_of(pattern)}.")


def _check_patterns_given(
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
    skip: Sequence[str],
    keep_trained: Sequence[str] | None,
) -> None:
    given = {"include": include, "exclude": exclude, "skip": skip, "keep_trained": keep_trained}
    for name, values in given.items():
        if isinstance(values, str):
            raise TypeError(f"{name} must be a list of strings, such as [{values!r}], but is {values!r}.")
    unknown = sorted(set(skip) - {"first", "last"})
    if unknown:
        raise ValueError(f'skip may hold "first" and "last", but holds {unknown}; name other layers in exclude.')


def _by_pattern(setting: _Number | Mapping[str, _Number] | None) -> Mapping[str, _Number]:
    if setting is None:
        return {}
    return setting if isinstance(setting, Mapping) else {"*": setting}


def _of(pattern: str) -> str:
    return "" if pattern == "*" else f" for {pattern!r}"


def _survey(model: nn.Module, factorization: Factorization) -> list[_Layer]:
    """List the layers that have a weight, with what by their nature keeps them from being converted."""
    if low_rank_class(model) is not None or isinstance(model, nn.MultiheadAttention):
        raise TypeError(
            f"model is itself a {type(model).__name__}, which cannot be replaced in place; wrap it, for "
            "example in nn.Sequential."
        )
    converted = [name for name, _ in low_rank_layers(model)]
    if converted:
        raise ValueError(f"model has low-rank layers already ({', '.join(converted)}); call recover(model) first.")
    names: dict[tuple[nn.Module, str], list[str]] = {}
    holders: dict[int, list[str]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.MultiheadAttention):
            for projection in LowRankMultiheadAttention.PROJECTIONS:
                if module._parameters.get(f"{projection}_weight") is not None:
                    names.setdefault((module, projection), []).append(f"{module_name}.{projection}")
        if low_rank_class(module) is not None:
            names.setdefault((module, ""), []).append(module_name)
    for module_name, module in model.named_modules():
        for parameter_name, parameter in module._parameters.items():
            holders.setdefault(id(parameter), []).append(f"{module_name}.{parameter_name}".lstrip("."))
    layers = []
    for (module, projection), (name, *aliases) in names.items():
        suffix = "_weight" if projection else ".weight"
        weight = module._parameters.get(f"{projection}_weight".lstrip("_"))
        if weight is not None and is_lazy(weight):
            raise ValueError(
                f"layer {name!r} has no weight yet ({type(module).__name__}); run the model once on a batch "
                "before converting it."
            )
        reason = _why_not(module, projection, factorization)
        if weight is None:
            reason = reason or "its weight is computed from other tensors"
            weight = nn.Parameter(torch.as_tensor(module.weight).detach(), requires_grad=False)
        others = [other for other in holders.get(id(weight), []) if other != f"{name}{suffix}"]
        layers.append(_Layer(name, tuple(aliases), module, projection, weight, others, reason))
    by_weight = {f"{layer.name}{layer.suffix}": layer for layer in layers}
    for layer in layers:
        if not all(other in by_weight for other in layer.shared_with):
            layer.reason = layer.reason or f"its weight is shared with {', '.join(layer.shared_with)}"
        first = next(other for other in layers if other.weight is layer.weight)
        layer.tied_to = None if first is layer else first
    _keep_ties(layers)
    return layers


def _keep_ties(layers: Sequence[_Layer]) -> None:
    """Leave layers alone that share a weight with one that is left alone."""
    for layer in layers:
        for other in layers:
            if other.weight is layer.weight and other.reason and not layer.reason:
                layer.reason = f"its weight is shared with {other.name}, which is left alone"


def _why_not(module: nn.Module, projection: str, factorization: Factorization) -> str:
    if not projection:
        kind = low_rank_class(module)
        return "" if kind is None else kind.why_not(module, factorization)
    if type(module) is not nn.MultiheadAttention:
        return f"{type(module).__name__} is not exactly nn.MultiheadAttention"
    return "its forward is replaced on the instance" if "forward" in vars(module) else ""


def _select(
    convertible: list[_Layer],
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
    skip: Sequence[str],
) -> None:
    """Give a reason to each layer that the arguments leave alone."""
    for position, index in (("first", 0), ("last", -1)):
        if position in skip and convertible:
            convertible[index].reason = f"{position} layer that can be converted (skip)"
    for layer in convertible:
        if not layer.reason and include is not None and not any(map(layer.matches, include)):
            layer.reason = "not in include"
        if not layer.reason and exclude is not None and any(map(layer.matches, exclude)):
            layer.reason = "in exclude"


def _check_rank(
    layer: _Layer, factorization: Factorization, decouple: bool, half_frozen: HalfFrozen, allow_larger: bool
) -> None:
    """Leave the layer alone where the rank saves nothing; refuse one that no such layer can have."""
    assert layer.rank is not None
    with _naming(layer):
        largest = factorization.max_rank(layer.shape, half_frozen)
        if layer.rank > largest:
            layer.reason = f"rank {layer.rank} is more than the largest of such a weight, {largest}"
            return
        factorization.check_rank(layer.shape, layer.rank, half_frozen)
        factorization.fixed_factors(layer.shape, decouple, half_frozen)
        trained = factorization.trained_numbers(layer.shape, layer.rank, half_frozen)
    if trained >= layer.numbers and not allow_larger:
        layer.reason = f"rank {layer.rank} would train {trained:,} numbers, not fewer than the weight has"


@contextmanager
def _naming(layer: _Layer) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"layer {layer.name!r}: {error} Exclude it or give it settings of its own.") from None


def _leave_constant_weights(layers: Sequence[_Layer], init: str, init_scale: float | None) -> None:
    """Leave weights alone that give factors no start: factors of zeros have gradients of zeros."""
    for layer in layers:
        if init in ("auto", "spectral") and not layer.reason and not layer.weight.any():
            layer.reason = "its weight is zero, and factors that start there do not train"
        if init == "uniform" and init_scale is None and not layer.reason:
            lowest, highest = layer.weight.detach().aminmax()
            if lowest == highest:
                layer.reason = "its weight is constant, which gives the factors no scale (init_scale)"


def _refuse_for_attention(chosen: Sequence[_Layer], dropout: float) -> None:
    """Refuse what needs a layer to be called, for an attention reads its layers' weights."""
    read = [layer.name for layer in chosen if layer.projection or layer.kind == "NonDynamicallyQuantizableLinear"]
    if read:
        setting = f"dropout={dropout}" if dropout else 'compute="contracted"'
        raise ValueError(
            f"{setting} has no effect on {', '.join(read)}: nn.MultiheadAttention reads their weights and does not "
            "call them. Exclude them, or leave the setting out."
        )


def _replace(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Put the replacements in under every name that the modules have."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and child in replacements:
                parent.add_module(name, replacements[child])


def _tensor_keys(spec: LayerSpec, name: str) -> list[str]:
    factorization = factorization_from_dict(spec.factorization)
    keys = [f"{name}.frozen_weight"] if spec.role == "update" else []
    keys += [f"{name}.factors.{factor}" for factor in factorization.trained_factors(spec.shape, spec.half_frozen)]
    fixed = factorization.fixed_factors(spec.shape, spec.decouple, spec.half_frozen)
    return keys + [f"{name}.fixed.{factor}" for factor in fixed]


def _dense_weight(spec: LayerSpec, name: str, state_dict: Mapping[str, Tensor]) -> Tensor:
    tensors = {key.removeprefix(f"{name}."): state_dict[key].detach() for key in _tensor_keys(spec, name)}
    factors = {key.removeprefix("factors."): t for key, t in tensors.items() if key.startswith("factors.")}
    fixed = {key.removeprefix("fixed."): t for key, t in tensors.items() if key.startswith("fixed.")}
    factorization = factorization_from_dict(spec.factorization)
    change = combine(factorization, spec.shape, factors, fixed, spec.decouple)
    change = change if spec.scale == 1 else change * spec.scale
    return tensors["frozen_weight"] + change if spec.role == "update" else change
