"""Converting a model's layers to low-rank ones, in place, and back.

:func:`convert` chooses the layers and their ranks, :func:`recover` puts dense layers back, and
:func:`dense_state_dict` does the latter to tensors alone, with no model at hand.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from lightning_lowrank.layers.factorization import Factorization, factorization_from_dict
from lightning_lowrank.layers.modules import (
    Init,
    LowRankConv2d,
    LowRankLayer,
    LowRankLinear,
    Role,
    check_settings,
    combine,
    why_not_low_rank,
)
from lightning_lowrank.seeding import derive_seed

__all__ = [
    "BudgetRule",
    "Conversion",
    "LayerReport",
    "LayerSpec",
    "convert",
    "dense_state_dict",
    "low_rank_layers",
    "recover",
]

BudgetRule = Literal["largest", "authors"]

_LOW_RANK: dict[type[nn.Module], type[LowRankLayer]] = {nn.Linear: LowRankLinear, nn.Conv2d: LowRankConv2d}
_AUTHORS_STEP = 0.001

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class LayerReport:
    """What a conversion did with one linear or convolution layer.

    Attributes:
        name: The layer's name in the model.
        kind: The dense layer's class name.
        shape: The dense weight's shape.
        rank: The factors' rank, ``None`` where the layer was left alone.
        parameters: Numbers in the dense weight.
        trainable: Numbers that are trained in the weight's stead (the weight's own, or 0 where it is frozen,
            if the layer was left alone). The bias counts in neither.
        converted: Whether the layer is low-rank now.
        reason: Why the layer was left alone, else empty.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    rank: int | None
    parameters: int
    trainable: int
    converted: bool
    reason: str = ""


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
        half_frozen: Whether only ``V`` is trained.
        aliases: Further names of the same layer, where a model holds it more than once.
    """

    name: str
    shape: tuple[int, ...]
    factorization: dict[str, Any]
    rank: int
    role: Role
    decouple: bool
    half_frozen: bool
    aliases: tuple[str, ...] = ()

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
        layers: A report for each linear and convolution layer of the model, in registration order.
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
        header = ("layer", "kind", "shape", "rank", "parameters", "trainable", "")
        rows = [
            (
                layer.name,
                layer.kind,
                "×".join(map(str, layer.shape)),
                "" if layer.rank is None else str(layer.rank),
                f"{layer.parameters:,}",
                f"{layer.trainable:,}",
                layer.reason,
            )
            for layer in self.layers
        ]
        widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
        lines = [
            "  ".join(
                text.rjust(width) if column in (3, 4, 5) else text.ljust(width)
                for column, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (header, *rows)
        ]
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
    ratio: float | Mapping[str, float] | None = None,
    budget: float | None = None,
    budget_rule: BudgetRule = "largest",
    role: Role = "update",
    decouple: bool = False,
    half_frozen: bool = False,
    init: Init = "auto",
    init_scale: float | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    skip: Sequence[Literal["first", "last"]] = (),
    freeze_rest: bool = False,
    seed: int = 0,
) -> Conversion:
    """Replace a model's linear and 2-d convolution layers by low-rank ones, in place.

    A layer can be converted if it is exactly an ``nn.Linear`` or ``nn.Conv2d`` (torch's own subclasses have
    a use for their weight that this would break) with a floating-point weight of its own. The others, and
    layers whose trained factors would not be fewer numbers than the weight, are left alone, and the report
    says why.

    Patterns are matched case-sensitively with the wildcards of :mod:`fnmatch` against a layer's whole name
    and every run of its parts between dots: ``"encoder"`` and ``"encoder.0"`` mean all layers in these
    modules, ``"fc*"`` also ``encoder.0.fc1``.

    Args:
        model: The model. Nothing in it is changed if an error is raised.
        factorization: How factors stand for a weight.
        rank: The rank of every layer, or a mapping from patterns to ranks, of which the first that matches
            counts and layers that none matches are left alone. Give exactly one of ``rank``, ``ratio`` and
            ``budget``.
        ratio: Trained factors over the weight's numbers, in (0, 1]; for every layer, or by pattern as
            ``rank``.
        budget: All trainable parameters over all parameters of the dense model, in (0, 1]. Biases, norms and
            layers that are left alone count as well as factors.
        budget_rule: How ``budget`` becomes one ratio for all layers. ``"largest"`` (default): the largest
            whose total fits the budget. ``"authors"``: as in FedMUD's released code, start at the budget and
            go down in steps of 0.001 until the model's ratio is at most the budget + 0.001.
        role: ``"update"`` (default) trains a change to a frozen weight, ``"weight"`` the weight itself.
        decouple: Train ``f(U, Ṽ) + f(Ũ, V)`` (AAD, Eq. 8 of FedMUD). Off by default.
        half_frozen: Train ``V`` only; the same ratio then affords a higher rank. Off by default.
        init: How the factors start; see :meth:`LowRankLayer.from_dense`.
        init_scale: The ``a`` of uniform draws U(−a, a). By default chosen for each layer.
        include: Patterns of the layers to convert. All by default.
        exclude: Patterns of layers to leave alone. None by default.
        skip: ``"first"`` and ``"last"`` leave the first and the last of the layers that can be converted,
            in registration order, alone. Empty by default.
        freeze_rest: Whether to freeze every parameter but the factors, biases too. Off by default.
        seed: Seed of the factors' draws; each layer's is derived from it and its name.

    Returns:
        What became of each layer, with the model's totals.

    Raises:
        TypeError: If ``model`` is itself a linear or convolution layer, or an argument of a wrong kind.
        ValueError: If an argument is out of range, a pattern matches no layer, the model has low-rank or
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
    _check_arguments(rank, ratio, budget, budget_rule, include, exclude, skip)
    check_settings(role, decouple, half_frozen, init, init_scale)
    layers = _survey(model)
    convertible = [layer for layer in layers if not layer.reason]
    for argument, patterns in (("include", include), ("exclude", exclude), ("rank", rank), ("ratio", ratio)):
        if isinstance(patterns, (Mapping, Sequence)):
            _check_patterns(argument, patterns, convertible)
    _select(convertible, include, exclude, skip)
    selected = [layer for layer in convertible if not layer.reason]

    dense_parameters = sum(parameter.numel() for parameter in model.parameters())
    if rank is not None:
        for layer in selected:
            layer.rank = layer.first_match("rank", rank)
    elif ratio is not None:
        for layer in selected:
            share = layer.first_match("ratio", ratio)
            layer.rank = None if share is None else factorization.rank_for_ratio(layer.shape, share, half_frozen)
    elif budget is not None and selected:
        weights = {layer.module.weight for layer in selected}
        rest = sum(p.numel() for p in model.parameters() if p.requires_grad and p not in weights)
        shares = _Shares(factorization, half_frozen, 0 if freeze_rest else rest, dense_parameters)
        common = shares.ratio_for_budget([layer.shape for layer in selected], budget, budget_rule)
        for layer in selected:
            layer.rank = shares.rank(layer.shape, common)
    for layer in selected:
        if layer.rank is not None:
            _check_rank(layer, factorization, half_frozen)
    chosen_layers = [layer for layer in selected if not layer.reason]
    if not chosen_layers:
        reasons = "; ".join(f"{layer.name}: {layer.reason}" for layer in layers) or "it has no such layers"
        raise ValueError(f"no linear or 2-d convolution layer of the model can be converted ({reasons}).")
    replacements: dict[nn.Module, nn.Module] = {}
    for layer in chosen_layers:
        assert layer.rank is not None
        replacements[layer.module] = _LOW_RANK[type(layer.module)].from_dense(
            layer.module,
            factorization,
            layer.rank,
            role=role,
            decouple=decouple,
            half_frozen=half_frozen,
            init=init,
            init_scale=init_scale,
            seed=derive_seed(seed, layer.name),
        )
    _replace(model, replacements)
    if freeze_rest:
        factors = {factor for _, low_rank in low_rank_layers(model) for factor in low_rank.factors.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_(parameter in factors)

    return Conversion(
        layers=[layer.report(factorization, half_frozen, freeze_rest) for layer in layers],
        specs=[
            LayerSpec(
                layer.name,
                layer.shape,
                factorization.to_dict(),
                layer.rank,
                role,
                decouple,
                half_frozen,
                layer.aliases,
            )
            for layer in chosen_layers
            if layer.rank is not None
        ],
        dense_parameters=dense_parameters,
        trainable_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
    )


def low_rank_layers(model: nn.Module) -> Iterator[tuple[str, LowRankLayer]]:
    """Yield the name and module of each low-rank layer, once each, in registration order.

    Args:
        model: A converted model, or one that holds one.

    Example:
        >>> from lightning_lowrank.layers import MatrixProduct, convert, low_rank_layers
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> _ = convert(model, MatrixProduct(), rank=1)
        >>> [name for name, _ in low_rank_layers(model)]
        ['0', '2']
    """
    for name, module in model.named_modules():
        if isinstance(module, LowRankLayer):
            yield name, module


def recover(model: nn.Module) -> nn.Module:
    """Replace every low-rank layer by the dense layer with the same weight, in place.

    The dense weights are new, trainable parameters; biases and hooks are the layers' own. What
    ``freeze_rest`` froze stays frozen.

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
    if isinstance(model, LowRankLayer):
        raise TypeError(
            f"model is itself a {type(model).__name__}, which cannot be replaced in place; use model.to_dense()."
        )
    _replace(model, {layer: layer.to_dense(hooks=True) for _, layer in low_rank_layers(model)})
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
    weights: dict[str, Tensor] = {}
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
            weights[name] = _dense_weight(spec, name, state_dict)
            absorbed.update(dict.fromkeys(keys, name))
    dense: dict[str, Tensor] = {}
    for key, value in state_dict.items():
        layer = absorbed.get(key, key.removesuffix(".bias"))
        if layer in weights:
            dense.setdefault(f"{layer}.weight", weights[layer])
        if key not in absorbed:
            dense[key] = value
    return dense


@dataclass
class _Layer:
    """A linear or convolution layer while :func:`convert` decides what becomes of it."""

    name: str
    aliases: tuple[str, ...]
    module: nn.Module
    kind: str
    shape: tuple[int, ...]
    trainable: bool
    reason: str = ""
    rank: int | None = None

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    def matches(self, pattern: str) -> bool:
        return any(_matches(pattern, name) for name in (self.name, *self.aliases))

    def first_match(self, argument: str, setting: _Number | Mapping[str, _Number]) -> _Number | None:
        """Look up this layer's value, giving it a reason to be left alone where no pattern matches."""
        for pattern, value in _by_pattern(setting).items():
            if self.matches(pattern):
                return value
        self.reason = f"no pattern of {argument} matches"
        return None

    def report(self, factorization: Factorization, half_frozen: bool, freeze_rest: bool) -> LayerReport:
        converted = not self.reason
        if converted and self.rank is not None:
            trainable = factorization.trained_numbers(self.shape, self.rank, half_frozen)
        else:
            trainable = self.numbers if self.trainable and not freeze_rest else 0
        return LayerReport(
            name=self.name,
            kind=self.kind,
            shape=self.shape,
            rank=self.rank if converted else None,
            parameters=self.numbers,
            trainable=trainable,
            converted=converted,
            reason=self.reason,
        )


def _matches(pattern: str, name: str) -> bool:
    parts = name.split(".")
    return any(
        fnmatchcase(".".join(parts[start:stop]), pattern)
        for start in range(len(parts))
        for stop in range(start + 1, len(parts) + 1)
    )


def _check_arguments(
    rank: int | Mapping[str, int] | None,
    ratio: float | Mapping[str, float] | None,
    budget: float | None,
    budget_rule: str,
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
    skip: Sequence[str],
) -> None:
    given = [name for name, value in (("rank", rank), ("ratio", ratio), ("budget", budget)) if value is not None]
    if len(given) != 1:
        raise ValueError(
            f"exactly one of rank, ratio and budget must be given, but {' and '.join(given) or 'none'} "
            f"{'are' if len(given) > 1 else 'is'}."
        )
    for pattern, value in _by_pattern(rank).items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"rank must be an integer of at least 1, but is {value!r}{_of(pattern)}.")
    for pattern, share in (*_by_pattern(ratio).items(), *(_by_pattern(budget).items())):
        if not 0 < share <= 1:
            raise ValueError(f"{given[0]} must be above 0 and at most 1, but is {share!r}{_of(pattern)}.")
    if budget_rule not in ("largest", "authors"):
        raise ValueError(f'budget_rule must be "largest" or "authors", but is {budget_rule!r}.')
    for name, values in (("include", include), ("exclude", exclude), ("skip", skip)):
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


def _survey(model: nn.Module) -> list[_Layer]:
    """List the linear and convolution layers, with what by their nature keeps them from being converted."""
    if isinstance(model, (nn.Linear, _ConvNd)):
        raise TypeError(
            f"model is itself a {type(model).__name__}, which cannot be replaced in place; wrap it, for "
            "example in nn.Sequential, or use LowRankLinear.from_dense or LowRankConv2d.from_dense."
        )
    converted = [name for name, _ in low_rank_layers(model)]
    if converted:
        raise ValueError(f"model has low-rank layers already ({', '.join(converted)}); call recover(model) first.")
    names: dict[nn.Module, list[str]] = {}
    holders: dict[int, list[str]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (nn.Linear, _ConvNd)):
            names.setdefault(module, []).append(module_name)
    for module_name, module in model.named_modules():
        for parameter_name, parameter in module._parameters.items():
            holders.setdefault(id(parameter), []).append(f"{module_name}.{parameter_name}".lstrip("."))
    layers = []
    for module, (name, *aliases) in names.items():
        weight = module.weight
        assert isinstance(weight, Tensor)
        if is_lazy(weight):
            raise ValueError(
                f"layer {name!r} has no weight yet ({type(module).__name__}); run the model once on a batch "
                "before converting it."
            )
        reason = why_not_low_rank(module, *_LOW_RANK)
        others = [other for other in holders.get(id(weight), []) if other != f"{name}.weight"]
        if not reason and others:
            reason = f"its weight is shared with {', '.join(others)}"
        kind = type(module).__name__
        layers.append(_Layer(name, tuple(aliases), module, kind, tuple(weight.shape), weight.requires_grad, reason))
    return layers


def _check_patterns(argument: str, patterns: Iterable[str], convertible: list[_Layer]) -> None:
    names = [name for layer in convertible for name in (layer.name, *layer.aliases)]
    for pattern in patterns:
        if not any(_matches(pattern, name) for name in names):
            parts = dict.fromkeys(part for name in names for part in (name, *name.split(".")))
            close = difflib.get_close_matches(pattern, list(parts), n=5, cutoff=0.5) or names[:5]
            raise ValueError(
                f"{argument} has {pattern!r}, which matches no layer that can be converted; close to it "
                f"{'is' if len(close) == 1 else 'are'} {', '.join(close) or 'none'}."
            )


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


def _check_rank(layer: _Layer, factorization: Factorization, half_frozen: bool) -> None:
    """Leave the layer alone where the rank saves nothing; refuse one that no such layer can have."""
    assert layer.rank is not None
    largest = factorization.max_rank(layer.shape, half_frozen)
    if layer.rank > largest:
        layer.reason = f"rank {layer.rank} is more than the largest of such a weight, {largest}"
        return
    try:
        factorization.check_rank(layer.shape, layer.rank, half_frozen)
    except ValueError as error:
        raise ValueError(f"layer {layer.name!r}: {error} Exclude it or give it a rank of its own.") from None
    trained = factorization.trained_numbers(layer.shape, layer.rank, half_frozen)
    if trained >= layer.numbers:
        layer.reason = f"rank {layer.rank} would train {trained:,} numbers, not fewer than the weight has"


@dataclass(frozen=True)
class _Shares:
    """The arithmetic of a budget: what a model trains if each weight of some shapes has a common ratio."""

    factorization: Factorization
    half_frozen: bool
    rest: int
    dense: int

    def rank(self, shape: tuple[int, ...], ratio: float) -> int:
        """Return the rank for a ratio, where a ratio of 0 or less means the smallest."""
        return self.factorization.rank_for_ratio(shape, ratio, self.half_frozen) if ratio > 0 else 1

    def total(self, ranks: Mapping[tuple[int, ...], int], counts: Mapping[tuple[int, ...], int]) -> int:
        """Add up all trainables; a weight whose factors would be larger stays dense."""
        trained = (
            count * min(math.prod(shape), self.factorization.trained_numbers(shape, ranks[shape], self.half_frozen))
            for shape, count in counts.items()
        )
        return self.rest + sum(trained)

    def ratio_for_budget(self, shapes: Sequence[tuple[int, ...]], budget: float, rule: str) -> float:
        """Return the common ratio by one of the two rules, or 0 where only the smallest ranks fit."""
        counts = Counter(shapes)
        # The tolerance only absorbs rounding of the product: a total is an integer.
        allowed = (budget if rule == "largest" else budget + _AUTHORS_STEP) * self.dense + 1e-6
        floor = self.total(dict.fromkeys(counts, 1), counts)
        ratio: float | None = None
        if rule == "largest":
            ratio = self._largest(counts, allowed)
        elif floor <= allowed:
            ratio = self._authors(counts, budget, allowed)
        if ratio is None:
            needed = math.ceil(floor / self.dense * 1e4) / 1e4
            raise ValueError(
                f"budget={budget:.6g} cannot be met: it allows {int(allowed):,} of the dense model's "
                f"{self.dense:,} parameters, but {self.rest:,} ({self.rest / self.dense:.2%}) are trained "
                f"outside the {len(shapes)} layers to convert, and with rank 1 in each of those it is "
                f"{floor:,} ({floor / self.dense:.2%}). Use a budget of at least {needed}, convert more "
                "layers, or set freeze_rest=True."
            )
        return ratio

    def _largest(self, counts: Mapping[tuple[int, ...], int], allowed: float) -> float | None:
        """Go down from the bound, from one ratio at which some rank changes to the next, until it fits.

        The total need not fall with the ratio (block sizes are rounded up), so the first that fits from above
        is the largest. No ratio above the bound fits, for factors are rounded up.
        """
        numbers = sum(count * math.prod(shape) for shape, count in counts.items())
        ratio = min(1.0, (allowed - self.rest) / numbers)
        if ratio <= 0:
            return None
        ranks = {shape: self.rank(shape, ratio) for shape in counts}
        while self.total(ranks, counts) > allowed:
            steps = []
            for shape, rank in ranks.items():
                lower = self.factorization.lower_rank(shape, rank)
                if lower is not None:
                    steps.append(self.factorization.ratio_for_rank(shape, lower, self.half_frozen))
            if not steps:
                return None
            ratio = max(steps)
            ranks = {shape: self.rank(shape, ratio) for shape in counts}
        return ratio

    def _authors(self, counts: Mapping[tuple[int, ...], int], budget: float, allowed: float) -> float:
        """Go down from the budget in the authors' steps; below 0 every rank is 1, which fits."""
        step = 0
        ratio = budget
        while ratio > 0 and self.total({s: self.rank(s, ratio) for s in counts}, counts) > allowed:
            step += 1
            ratio = budget - step * _AUTHORS_STEP
        return ratio


def _replace(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Put the replacements in under every name that the modules have."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and child in replacements:
                parent.add_module(name, replacements[child])


def _tensor_keys(spec: LayerSpec, name: str) -> list[str]:
    factorization = factorization_from_dict(spec.factorization)
    keys = [f"{name}.frozen_weight"] if spec.role == "update" else []
    keys += [f"{name}.factors.{factor}" for factor in factorization.trained_factors(spec.half_frozen)]
    return keys + [f"{name}.fixed.{factor}" for factor in factorization.fixed_factors(spec.decouple, spec.half_frozen)]


def _dense_weight(spec: LayerSpec, name: str, state_dict: Mapping[str, Tensor]) -> Tensor:
    tensors = {key.removeprefix(f"{name}."): state_dict[key].detach() for key in _tensor_keys(spec, name)}
    factors = {key.removeprefix("factors."): t for key, t in tensors.items() if key.startswith("factors.")}
    fixed = {key.removeprefix("fixed."): t for key, t in tensors.items() if key.startswith("fixed.")}
    factorization = factorization_from_dict(spec.factorization)
    change = combine(factorization, spec.shape, factors, fixed, spec.decouple)
    return tensors["frozen_weight"] + change if spec.role == "update" else change
