"""The survey of a model before a conversion: its layers with a weight, and why some stay dense."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_lowrank.arguments import join_names
from lightning_lowrank.internals.torch import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS, own_buffers, own_parameters
from lightning_lowrank.layers.attention import LowRankMultiheadAttention
from lightning_lowrank.layers.convolution import (
    LowRankConv1d,
    LowRankConv2d,
    LowRankConv3d,
    LowRankConvTranspose1d,
    LowRankConvTranspose2d,
    LowRankConvTranspose3d,
)
from lightning_lowrank.layers.factorization import Factorization
from lightning_lowrank.layers.layer import LowRankLayer, low_rank_layers
from lightning_lowrank.layers.linear import LowRankEmbedding, LowRankLinear
from lightning_lowrank.layers.settings import LowRankSettings, by_pattern
from lightning_lowrank.patterns import check_patterns, matches

_Number = TypeVar("_Number", int, float)

_BY_NAME = ("rank", "rank_ratio", "ratio")
"""Settings that may be given by patterns of layers' names."""
_SHARED = "its weight is shared with"

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


RECURRENT = (nn.RNNBase, nn.RNNCellBase)
"""Layers whose weights are reported but never converted, because torch reads all of them in one call."""


UNCONVERTED = (nn.Bilinear, nn.EmbeddingBag)
"""Other layers with a weight that are reported but never converted."""


def low_rank_class(module: nn.Module) -> type[LowRankLayer] | None:
    """The low-rank class for a layer or a subclass of one, or ``None`` for any other module.

    A subclass may still not be convertible; see :meth:`LowRankLayer.why_not`.
    """
    kind = type(module)
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        from lightning_lowrank.layers.transformers import LowRankConv1D

        return LowRankConv1D
    for candidate in _CLASSES:
        if isinstance(module, candidate.dense_classes):
            return candidate
    return None


def weight_shape(module: nn.Module) -> tuple[int, ...] | None:
    """The shape of a layer's weight, ``None`` if it has no weight.

    A weight that is computed at each reading is not read: spectral normalisation, for one, then changes its buffers.
    """
    if isinstance(module, LowRankLayer):
        return module.weight_shape
    for table in (own_parameters(module), own_buffers(module), vars(module)):
        if isinstance(weight := table.get("weight"), Tensor):
            return tuple(weight.shape)
    if not hasattr(type(module), "weight"):
        return None
    layer: Any = module
    if isinstance(module, CONVOLUTIONS):
        channels = (layer.out_channels, layer.in_channels)
        first, second = reversed(channels) if isinstance(module, TRANSPOSED_CONVOLUTIONS) else channels
        return (first, second // layer.groups, *layer.kernel_size)
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return (layer.num_embeddings, layer.embedding_dim)
    if isinstance(module, nn.Bilinear):
        return (layer.out_features, layer.in1_features, layer.in2_features)
    # Transformers' Conv1D has other names.
    return (layer.out_features, layer.in_features) if isinstance(module, nn.Linear) else (layer.nx, layer.nf)


@dataclass
class Candidate:
    """A layer's weight that may be converted.

    Attributes:
        projection: The weight's name if it is one of several, without ``_weight`` in an attention. Empty otherwise.
        reason: Why the layer stays dense; empty if it is converted.
        note: A remark on the layer's factors; empty if there is none.
        tied_to: The earlier layer whose factors this one shares.
        error: The relative error of the decomposition, if there is one.
        sources: The parameters that the weight is, or is computed from.
    """

    name: str
    aliases: tuple[str, ...]
    module: nn.Module
    projection: str
    weight: nn.Parameter
    reason: str = ""
    note: str = ""
    rank: int | None = None
    tied_to: Candidate | None = None
    error: float | None = None

    def __post_init__(self) -> None:
        self.kind = type(self.module).__name__
        self.shape = tuple(self.weight.shape)
        self.numbers = self.weight.numel()
        # A computed weight, as with weight normalisation, is not a parameter.
        computed = not self.projection and own_parameters(self.module).get("weight") is None
        named = self.module.named_parameters() if self.numbers else ()
        self.sources = [value for name, value in named if not name.endswith("bias")] if computed else [self.weight]
        self.trainable = any(source.requires_grad for source in self.sources)
        self.suffix = "" if isinstance(self.module, RECURRENT) else "_weight" if self.projection else ".weight"

    @property
    def output_channels(self) -> int:
        """Number of channels of the layer's output."""
        kind = None if self.projection else low_rank_class(self.module)
        first_is_input = kind is not None and kind.first_is_input
        return self.shape[1] * getattr(self.module, "groups", 1) if first_is_input else self.shape[0]

    @property
    def chosen_rank(self) -> int:
        """The rank; tied layers have the same one."""
        rank = self.rank if self.tied_to is None else self.tied_to.rank
        assert rank is not None
        return rank

    def matches(self, pattern: str) -> bool:
        """Whether a pattern matches one of the layer's names."""
        return any(matches(pattern, name) for name in (self.name, *self.aliases))

    def first_match(self, argument: str, setting: _Number | Mapping[str, _Number]) -> _Number | None:
        """The value of the first pattern that matches; if none does, the layer's reason to stay dense is set."""
        for pattern, value in by_pattern(setting).items():
            if self.matches(pattern):
                return value
        self.reason = f"no pattern of {argument} matches"
        return None


def survey(model: nn.Module, factorization: Factorization) -> list[Candidate]:
    """The layers that have a weight, with the reasons why some cannot be converted."""
    if low_rank_class(model) is not None or isinstance(model, nn.MultiheadAttention):
        raise TypeError(
            f"model is itself a {type(model).__name__}, which cannot be replaced in place; wrap it, for "
            "example in nn.Sequential."
        )
    converted = [name for name, _ in low_rank_layers(model)]
    if converted:
        raise ValueError(f"model has low-rank layers already ({', '.join(converted)}); call recover(model) first.")
    return _candidates(model, factorization)


def still_convertible(model: nn.Module, settings: LowRankSettings) -> list[str]:
    """Names of the dense layers in a converted model that the name patterns and freezing settings would convert."""
    layers = _candidates(model, settings.factorization)
    for layer in layers:
        if not layer.reason and not (layer.trainable or settings.convert_frozen):
            layer.reason = "its weight is frozen"
        _select_by_name(layer, settings)
        for argument in _BY_NAME:
            setting: float | Mapping[str, float] | None = getattr(settings, argument)
            if not layer.reason and isinstance(setting, Mapping):
                layer.first_match(argument, setting)
    keep_ties(layers)
    return [layer.name for layer in layers if not layer.reason]


def _candidates(model: nn.Module, factorization: Factorization) -> list[Candidate]:
    names: dict[tuple[nn.Module, str], list[str]] = {}
    holders: dict[int, list[str]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.MultiheadAttention):
            for projection in LowRankMultiheadAttention.PROJECTIONS:
                if own_parameters(module).get(f"{projection}_weight") is not None:
                    names.setdefault((module, projection), []).append(f"{module_name}.{projection}")
        if isinstance(module, RECURRENT):
            for parameter_name, parameter in own_parameters(module).items():
                if parameter is not None and parameter.ndim > 1:
                    names.setdefault((module, parameter_name), []).append(f"{module_name}.{parameter_name}".lstrip("."))
        if isinstance(module, UNCONVERTED) or (
            low_rank_class(module) is not None and not isinstance(module, LowRankLayer)
        ):
            names.setdefault((module, ""), []).append(module_name)
    for module_name, module in model.named_modules():
        for parameter_name, parameter in own_parameters(module).items():
            holders.setdefault(id(parameter), []).append(f"{module_name}.{parameter_name}".lstrip("."))
    layers = []
    for (module, projection), (name, *aliases) in names.items():
        recurrent = isinstance(module, RECURRENT)
        weight = own_parameters(module).get(projection if recurrent else f"{projection}_weight".lstrip("_"))
        if weight is not None and is_lazy(weight):
            raise ValueError(
                f"layer {name!r} has no weight yet ({type(module).__name__}); run the model once on a batch "
                "before converting it."
            )
        reason = _why_not(module, projection, factorization)
        if weight is None:
            shape = weight_shape(module)
            reason = reason or ("it has no weight" if shape is None else "its weight is computed from other tensors")
            weight = nn.Parameter(torch.empty(shape or 0, device="meta"), requires_grad=False)
        layers.append(Candidate(name, tuple(aliases), module, projection, weight, reason))
    surveyed = {f"{layer.name}{layer.suffix}" for layer in layers}
    for layer in layers:
        others = [other for other in holders.get(id(layer.weight), []) if other != f"{layer.name}{layer.suffix}"]
        if not surveyed.issuperset(others):
            layer.reason = layer.reason or f"{_SHARED} {', '.join(others)}"
        first = next(other for other in layers if other.weight is layer.weight)
        layer.tied_to = None if first is layer else first
    keep_ties(layers)
    return layers


def keep_ties(layers: Sequence[Candidate]) -> None:
    """Keep layers dense that share a weight with a layer that stays dense."""
    for layer in layers:
        for other in layers:
            if other.weight is layer.weight and other.reason and not layer.reason:
                layer.reason = f"{_SHARED} {other.name}, which stays dense"


def _why_not(module: nn.Module, projection: str, factorization: Factorization) -> str:
    if isinstance(module, RECURRENT):
        return "weights of recurrent layers are not converted"
    if isinstance(module, UNCONVERTED):
        return f"layers of class {type(module).__name__} are not converted"
    if not projection:
        kind = low_rank_class(module)
        return "" if kind is None else kind.why_not(module, factorization)
    if type(module) is not nn.MultiheadAttention:
        return f"{type(module).__name__} is not exactly nn.MultiheadAttention"
    return "its forward is replaced on the instance" if "forward" in vars(module) else ""


def select(layers: Sequence[Candidate], settings: LowRankSettings) -> None:
    """Set the reason of each layer that the settings keep dense because of its name, position or weight."""
    convertible = [layer for layer in layers if not layer.reason]
    names = [name for layer in convertible for name in (layer.name, *layer.aliases)]
    for argument in ("include", "exclude", *_BY_NAME):
        patterns = getattr(settings, argument)
        if isinstance(patterns, (Mapping, Sequence)):
            _refuse_left_alone(argument, patterns, layers)
            check_patterns(argument, patterns, names, "layer that can be converted")
    if not settings.convert_frozen:
        for layer in convertible:
            layer.reason = _why_dense_if_frozen(layer, layers, settings)
    convertible = [layer for layer in convertible if not layer.reason]
    for position, index in (("first", 0), ("last", -1)):
        if position in (settings.skip or ()) and convertible:
            convertible[index].reason = f"{position} layer that can be converted (skip)"
    for layer in convertible:
        _select_by_name(layer, settings)
        if not layer.reason and settings.role == "weight":
            layer.reason = _no_start(layer.weight, settings)
    keep_ties(layers)


def refuse_halves_of_ties(layers: Sequence[Candidate], settings: LowRankSettings) -> None:
    """Refuse a pattern that asks only for layers that stay dense because of the other layer with their weight."""
    for argument in ("include", *_BY_NAME):
        patterns = getattr(settings, argument)
        for pattern in patterns if isinstance(patterns, (Mapping, Sequence)) else ():
            meant = [layer for layer in layers if layer.matches(pattern)]
            if all(layer.reason.startswith(_SHARED) for layer in meant):
                _refuse_left_alone(argument, [pattern], meant)


def _select_by_name(layer: Candidate, settings: LowRankSettings) -> None:
    if not layer.reason and settings.include is not None and not any(map(layer.matches, settings.include)):
        layer.reason = "not in include"
    if not layer.reason and settings.exclude is not None and any(map(layer.matches, settings.exclude)):
        layer.reason = "in exclude"


def _refuse_left_alone(argument: str, patterns: Iterable[str], layers: Sequence[Candidate]) -> None:
    """Refuse a pattern that matches only layers that cannot be converted, with their reasons."""
    for pattern in patterns:
        meant = [layer for layer in layers if layer.matches(pattern)]
        if meant and all(layer.reason for layer in meant):
            reasons = [f"{layer.name}: {layer.reason}" for layer in meant]
            raise ValueError(
                f"{argument} has {pattern!r}, which matches no layer that can be converted"
                f" ({join_names(reasons, '; ')}). Leave it out."
            )


def _why_dense_if_frozen(layer: Candidate, layers: Sequence[Candidate], settings: LowRankSettings) -> str:
    """The reason why a layer that is frozen, or has a frozen copy, stays dense."""
    if not layer.trainable:
        return "its weight is frozen (set convert_frozen=True to convert it)"
    if settings.include is not None and any(map(layer.matches, settings.include)):
        return ""
    for other in layers:
        alike = not other.trainable and other.shape == layer.shape and not other.weight.is_meta
        # Two layers of zeros are equal but not copies.
        if alike and not layer.weight.is_meta and torch.equal(other.weight, layer.weight) and layer.weight.any():
            return (
                f"{other.name} is a frozen copy, which may follow it parameter by parameter (set convert_frozen=True to"
                " convert both, or name it in include)"
            )
    return ""


def _no_start(weight: nn.Parameter, settings: LowRankSettings) -> str:
    """The reason why factors cannot start from a weight, or an empty string."""
    scaled_by_it = settings.init == "uniform" and settings.init_scale is None
    if weight.is_meta and (settings.decomposes or scaled_by_it):
        return "its weight is on the meta device, and the factors start from its numbers: load it first"
    if settings.decomposes and not weight.any():
        return "its weight is zero, and factors that start there do not train"
    if scaled_by_it:
        lowest, highest = weight.detach().aminmax()
        if lowest == highest:
            return "its weight is constant, which gives the factors no scale (init_scale)"
    return ""
