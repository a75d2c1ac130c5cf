"""LoRA adapters of a module as pairs of factors, for `FedLoRA` and the PEFT formats.

An adapter is a low-rank layer of this package or a layer that PEFT wrapped. Either way its factors are parameters of
the module; here they become `LowRankPair`s of one orientation, ``[outputs, inputs]``, and back.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_lowrank.aggregation.aggregator import working_dtype
from lightning_lowrank.internals.peft import (
    Parts,
    change_in,
    holds_numbers,
    mark_folded,
    peft_layers,
    set_change,
    unlike_convolution,
    why_no_separate_change,
)
from lightning_lowrank.layers import LowRankLayer, MatrixProduct, low_rank_layers
from lightning_lowrank.layers.settings import update_scale
from lightning_lowrank.lora.pairs import LowRankPair

__all__ = ["FACTORS", "Adapter", "Adapters", "Name", "find_adapters"]

Name = Literal["B", "A"]
FACTORS: tuple[Name, Name] = ("B", "A")
Add = Callable[[Tensor, Tensor], object]


class Adapter(ABC):
    """One layer's LoRA factors in a module.

    Args:
        name: The layer's name in the module.
        parameters: The names of the module's parameters that hold ``B`` and ``A``.
        rank: Their rank.
        shape: ``(m, n)``, outputs and inputs of the weight as a matrix.
        unfoldable: Why the base weight cannot take a change: it would change more than this layer, or there is nowhere
            to keep it. Empty if it can.
    """

    quantised = False
    """Whether the base weight is quantised: nothing can be added to it, and its changes are stored separately."""

    def __init__(
        self, name: str, parameters: Mapping[Name, str], rank: int, shape: tuple[int, int], unfoldable: str = ""
    ) -> None:
        self.name = name
        self.parameters = dict(parameters)
        self.rank = rank
        self.shape = shape
        self.unfoldable = unfoldable

    @property
    @abstractmethod
    def scaling(self) -> float:
        """The factor by which the layer multiplies the product ``B A``; may be set."""

    @scaling.setter
    @abstractmethod
    def scaling(self, value: float) -> None: ...

    @abstractmethod
    def scaling_at(self, rank: int) -> float:
        """The scaling of an adapter of another rank with the same α."""

    @abstractmethod
    def matrix(self, name: Name, value: Tensor) -> Tensor:
        """A factor in the orientation of `LowRankPair`, as a view of the parameter's value or a part of it."""

    @abstractmethod
    def value(self, name: Name, matrix: Tensor) -> Tensor:
        """A factor in the parameter's own shape; the inverse of `matrix`."""

    @torch.no_grad()
    def fold(self, change: LowRankPair | Tensor, add: Add = Tensor.add_) -> None:
        """Add a change to the base weight.

        Args:
            change: A pair of any rank, whose product is computed in single precision at least; or the whole matrix,
                ``[outputs, inputs]``.
            add: Adds its second argument, the product, to its first, the base weight, in place.

        Raises:
            ValueError: If the adapter is ``unfoldable``.
        """
        if self.unfoldable:
            raise ValueError(f"layer {self.name!r} cannot take a change of its base weight: {self.unfoldable}.")
        matrix = change.in_working_dtype().product() if isinstance(change, LowRankPair) else change
        self._fold(matrix.to(working_dtype(matrix.dtype)), add)

    @abstractmethod
    def _fold(self, matrix: Tensor, add: Add) -> None: ...

    @abstractmethod
    def mark_folded(self) -> None:
        """Record on the layer that its base weight has changed, so that the factors are not all that was learnt."""

    @property
    def separate_change(self) -> Parts:
        """The change of a quantised base weight, in buffers; the layer adds its product to the outputs; may be set.

        Either ``B`` and ``A``, whose product it is, or the ``product`` itself, in single precision. Empty: none.
        """
        return {}

    @separate_change.setter
    def separate_change(self, parts: Parts) -> None:
        raise ValueError(f"layer {self.name!r} is not quantised: changes are added to its base weight itself.")

    @torch.no_grad()
    def summed_change(self, parts: Parts, change: LowRankPair | Tensor) -> Parts:
        """The sum of two changes of a quantised base weight, kept as factors or as a matrix.

        The factors are concatenated, until the matrix has fewer numbers.
        """
        if isinstance(change, LowRankPair) and "product" not in parts:
            left, right = change.scaling * change.B.float(), change.A.float()
            if parts:
                left, right = torch.cat([parts["B"], left], dim=1), torch.cat([parts["A"], right])
            if len(right) * sum(self.shape) <= self.shape[0] * self.shape[1]:
                return {"B": left, "A": right}
            return {"product": left @ right}
        matrix = change.in_working_dtype().product() if isinstance(change, LowRankPair) else change
        matrix = matrix.float()
        if parts:
            matrix = matrix + (parts["product"] if "product" in parts else parts["B"] @ parts["A"])
        return {"product": matrix}

    @abstractmethod
    def as_base_matrix(self, weight: Tensor) -> Tensor:
        """A tensor of the base weight's shape as a matrix, ``[outputs, inputs]``."""

    def slots(self, name: Name, value: Tensor, rank: int) -> Tensor:
        """The first ``rank`` rank slots of a factor, in the parameter's own orientation."""
        if rank == self.rank:
            return value
        return self.value(name, self.matrix(name, value).narrow(1 if name == "B" else 0, 0, rank))

    def pair(self, tensors: Mapping[str, Tensor], rank: int, scaling: float) -> LowRankPair:
        """The pair of the first ``rank`` slots, from tensors by the parameters' names."""
        left, right = (self.matrix(name, tensors[self.parameters[name]]) for name in ("B", "A"))
        return LowRankPair(left[:, :rank], right[:rank], scaling)

    def tensors(self, pair: LowRankPair, scaling: float, folded: Collection[Name]) -> dict[str, Tensor]:
        """A pair's factors by the parameters' names, for ``scaling``, padded with zeros to the adapter's rank."""
        full = pair.resized(self.rank, scaling, folded)
        return {self.parameters[name]: self.value(name, getattr(full, name)).contiguous() for name in ("B", "A")}


class Adapters:
    """A module's adapters, with their scalings when this object was made.

    Args:
        layers: The adapters by the names of their layers.
    """

    def __init__(self, layers: Mapping[str, Adapter]) -> None:
        self.layers = dict(layers)
        self.scalings = {layer: adapter.scaling for layer, adapter in layers.items()}
        self.factors: dict[str, tuple[Adapter, Name]] = {
            adapter.parameters[name]: (adapter, name) for adapter in layers.values() for name in FACTORS
        }

    def __iter__(self) -> Iterator[tuple[str, Adapter, float]]:
        """Iterate over layer names, adapters and scalings."""
        return ((layer, adapter, self.scalings[layer]) for layer, adapter in self.layers.items())


class _LayerAdapter(Adapter):
    """The adapter of a low-rank layer of this package."""

    def __init__(self, name: str, layers: list[LowRankLayer], unfoldable: str) -> None:
        first = layers[0]
        self._layers = layers
        self._factors: dict[Name, str] = {"B": "V", "A": "U"} if first.first_is_input else {"B": "U", "A": "V"}
        rows = {factor: len(value) for factor, value in first.factors.items()}
        super().__init__(
            name,
            {which: f"{name}.factors.{factor}" for which, factor in self._factors.items()},
            first.rank,
            (rows[self._factors["B"]], rows[self._factors["A"]]),
            unfoldable,
        )

    @property
    def scaling(self) -> float:
        return self._layers[0].scale

    @scaling.setter
    def scaling(self, value: float) -> None:
        for layer in self._layers:
            layer.scale = value

    def scaling_at(self, rank: int) -> float:
        return self._layers[0].scale_at(rank)

    def matrix(self, name: Name, value: Tensor) -> Tensor:
        return value if name == "B" else value.T

    def value(self, name: Name, matrix: Tensor) -> Tensor:
        return matrix if name == "B" else matrix.T

    def as_base_matrix(self, weight: Tensor) -> Tensor:
        layer = self._layers[0]
        assert isinstance(layer.factorization, MatrixProduct)
        matrix = layer.factorization.as_matrix(weight)
        return matrix.T if layer.first_is_input else matrix

    def tensors(self, pair: LowRankPair, scaling: float, folded: Collection[Name]) -> dict[str, Tensor]:
        """See `Adapter.tensors`; the row of an embedding's padding is zero."""
        found = super().tensors(pair, scaling, folded)
        return {
            self.parameters[which]: self._without_padding(factor, found[self.parameters[which]])
            for which, factor in self._factors.items()
        }

    def _fold(self, matrix: Tensor, add: Add) -> None:
        layer = self._layers[0]
        assert isinstance(layer.factorization, MatrixProduct)
        weight = layer.factorization.as_weight(matrix.T if layer.first_is_input else matrix, layer.weight_shape)
        layer.add_to_frozen(self._without_padding("U", weight), add)

    def mark_folded(self) -> None:
        self._layers[0].folded = True

    def _without_padding(self, factor: str, value: Tensor) -> Tensor:
        # A tied layer of the same factors without padding, such as an output layer, trains this row.
        alike = len({getattr(layer, "padding_idx", None) for layer in self._layers}) == 1
        return self._layers[0].without_padding(factor, value) if alike else value


class _PeftAdapter(Adapter):
    """The adapter of a layer that PEFT wrapped, with ``lora_A`` and ``lora_B``: linear, convolution or embedding."""

    def __init__(self, name: str, layer: Any, adapter: str, unfoldable: str) -> None:
        self._layer, self._adapter = layer, adapter
        self._embedding = adapter in layer.lora_embedding_A
        prefix = "lora_embedding_" if self._embedding else "lora_"
        suffix = adapter if self._embedding else f"{adapter}.weight"
        factors = {which: getattr(layer, f"{prefix}{which}")[adapter] for which in ("B", "A")}
        tensors = {which: value if self._embedding else value.weight for which, value in factors.items()}
        self._shapes = {which: tuple(value.shape) for which, value in tensors.items()}
        self.quantised = not holds_numbers(layer.get_base_layer())
        super().__init__(
            name,
            {"B": f"{name}.{prefix}B.{suffix}", "A": f"{name}.{prefix}A.{suffix}"},
            layer.r[adapter],
            (self._shapes["B"][0], tensors["A"][0].numel()),
            unfoldable,
        )

    @property
    def scaling(self) -> float:
        return self._layer.scaling[self._adapter]

    @scaling.setter
    def scaling(self, value: float) -> None:
        self._layer.scaling[self._adapter] = value

    def scaling_at(self, rank: int) -> float:
        stabilized = self._layer.use_rslora[self._adapter]
        return update_scale(rank, self._layer.lora_alpha[self._adapter], stabilized)

    def matrix(self, name: Name, value: Tensor) -> Tensor:
        return value.flatten(1)

    def value(self, name: Name, matrix: Tensor) -> Tensor:
        kernel = self._shapes[name][2:]
        # An explicit size: -1 is ambiguous for matrices without rows.
        return matrix.reshape(len(matrix), matrix.shape[1] // math.prod(kernel), *kernel)

    @property
    def separate_change(self) -> Parts:
        return change_in(self._layer.get_base_layer())

    @separate_change.setter
    def separate_change(self, parts: Parts) -> None:
        if not self.quantised:
            raise ValueError(f"layer {self.name!r} is not quantised: changes are added to its base weight itself.")
        base = self._layer.get_base_layer()
        if parts or change_in(base):
            set_change(base, parts)

    def as_base_matrix(self, weight: Tensor) -> Tensor:
        return weight.T if self._stored_by_input else weight.flatten(1)

    @property
    def _stored_by_input(self) -> bool:
        return self._embedding or getattr(self._layer, "fan_in_fan_out", False)

    def tensors(self, pair: LowRankPair, scaling: float, folded: Collection[Name]) -> dict[str, Tensor]:
        """See `Adapter.tensors`; the column of an embedding's padding is zero."""
        found = super().tensors(pair, scaling, folded)
        return {**found, self.parameters["A"]: self._without_padding(found[self.parameters["A"]])}

    def _without_padding(self, matrix: Tensor) -> Tensor:
        padding = getattr(self._layer.get_base_layer(), "padding_idx", None) if self._embedding else None
        # The row of a weight that is shared with an output layer is trained there.
        if padding is None or self.unfoldable:
            return matrix
        return matrix.index_fill(1, torch.tensor([padding], device=matrix.device), 0)

    def _fold(self, matrix: Tensor, add: Add) -> None:
        if self.quantised:
            raise ValueError(
                f"layer {self.name!r} is quantised: changes of its base weight are stored separately, in"
                " `separate_change`."
            )
        weight = self._layer.get_base_layer().weight
        matrix = self._without_padding(matrix.to(working_dtype(weight.dtype)))
        add(weight, (matrix.T if self._stored_by_input else matrix).reshape(weight.shape))
        self.mark_folded()

    def mark_folded(self) -> None:
        mark_folded(self._layer)


def find_adapters(module: nn.Module, adapter: str | None = None) -> dict[str, Adapter]:
    """A module's LoRA adapters, by the names of their layers.

    Args:
        module: A module with low-rank layers of role ``"update"`` and a `MatrixProduct`, or one that holds a model that
            PEFT wrapped with LoRA.
        adapter: The name of PEFT's adapter. By default the active one.

    Raises:
        ValueError: If a layer's factors are no LoRA pair (another role or factorization, decoupled or half frozen
            factors, a trained base; a variant of LoRA other than DoRA, a bias of its own, several active adapters, a
            grouped base), or there is no adapter of that name.

    Example:
        >>> from lightning_lowrank.layers import MatrixProduct, convert
        >>> model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
        >>> _ = convert(model, MatrixProduct(), rank=1, init="lora", allow_larger=True)
        >>> {name: (found.shape, found.parameters["B"]) for name, found in find_adapters(model).items()}
        {'0': ((4, 6), '0.factors.U'), '2': ((3, 4), '2.factors.U')}
    """
    _refuse_other_methods(module, adapter)
    found: dict[str, Adapter] = {}
    holders: dict[Tensor, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        holders.setdefault(parameter, []).append(name)
    for name, layer in low_rank_layers(module, tied=False):
        reason = _why_no_pair(layer)
        if reason:
            raise ValueError(f"layer {name!r} holds no LoRA factors: {reason}.")
        tied = [each for _, each in low_rank_layers(module) if each.factors is layer.factors]
        shared = _shared_with(module, holders[layer.frozen_weight], tied)
        found[name] = _LayerAdapter(name, tied, shared)
    wrapped = {name: (layer, [*layer.lora_A, *layer.lora_embedding_A]) for name, layer in peft_layers(module)}
    names = dict.fromkeys(name for _, existing in wrapped.values() for name in existing)
    if adapter is not None and adapter not in names:
        has = f"PEFT's adapters {', '.join(map(repr, names))}" if names else "no model that PEFT wrapped"
        raise ValueError(f"adapter is {adapter!r}, and the module holds {has}.")
    for name, (layer, existing) in wrapped.items():
        chosen = [one for one in (layer.active_adapters if adapter is None else [adapter]) if one in existing]
        if not chosen:
            # The layer belongs to another adapter.
            continue
        reason = _why_not_plain(layer, chosen)
        if reason:
            raise ValueError(f"PEFT's layer {name!r} cannot be aggregated: {reason}.")
        base = layer.get_base_layer()
        found[name] = _PeftAdapter(name, layer, chosen[0], _why_unfoldable(module, layer, base, chosen[0], holders))
    if wrapped and not wrapped.keys() & found.keys():
        raise ValueError(f"none of PEFT's adapters is active: set one active, or name one of {', '.join(names)}.")
    return found


def _why_unfoldable(
    module: nn.Module, layer: Any, base: nn.Module, adapter: str, holders: Mapping[Tensor, Sequence[str]]
) -> str:
    """Why a layer that PEFT wrapped cannot take a change of its base weight; empty if it can."""
    unlike = unlike_convolution(base)
    if unlike:
        return f"its convolution has {unlike}, and PEFT's adapter of it has not"
    if holds_numbers(base):
        assert isinstance(base.weight, Tensor)
        return _shared_with(module, holders.get(base.weight, []), [base])
    if getattr(layer, "use_dora", {}).get(adapter):
        return "it is quantised, and DoRA's norms would leave out its separate change"
    return why_no_separate_change(base)


def _refuse_other_methods(module: nn.Module, adapter: str | None) -> None:
    """Raise if PEFT's adapters are all of other methods than LoRA, such as IA3, LoHa or AdaLoRA."""
    configs = [config for part in module.modules() for config in [getattr(part, "peft_config", None)]]
    methods = {
        str(getattr(each.peft_type, "value", each.peft_type))
        for config in configs
        if isinstance(config, Mapping)
        for name, each in config.items()
        if adapter in (None, name)
    }
    if methods and "LORA" not in methods:
        raise ValueError(
            f"PEFT's adapters in the module are of the method {', '.join(sorted(methods))}, whose parameters are no"
            " LoRA pairs: wrap the model with peft.LoraConfig, or average whatever is trained by FedAvg."
        )


def _shared_with(module: nn.Module, holders: Sequence[str], layers: Sequence[nn.Module]) -> str:
    """A note on parameters that are tied to the weight of these layers; empty if there are none."""
    others = [name for name in holders if all(module.get_submodule(name.rpartition(".")[0]) is not i for i in layers)]
    return f"it is shared with {', '.join(others)}" if others else ""


def _why_no_pair(layer: LowRankLayer) -> str:
    if layer.role != "update":
        return f"its role is {layer.role!r}, and LoRA's is 'update'"
    if not isinstance(layer.factorization, MatrixProduct):
        return f"its factorization is {layer.factorization!r}, and LoRA's is MatrixProduct()"
    if layer.decouple or layer.half_frozen:
        return "its factors are decoupled or half frozen; leave decouple and half_frozen out"
    if layer.frozen_weight.requires_grad:
        return "its weight is trained as well; leave train_base out"
    return ""


def _why_not_plain(layer: Any, chosen: list[str]) -> str:
    if len(chosen) > 1:
        return f"its active adapters are {chosen}; set one active, or name one"
    (adapter,) = chosen
    if hasattr(layer, "parameter_name"):
        return "it adapts a parameter that is no layer's weight (target_parameters)"
    # DoRA is allowed: its magnitudes are parameters of their own.
    if getattr(layer, "lora_variant", {}).get(adapter) and not getattr(layer, "use_dora", {}).get(adapter):
        return f"it is the variant {type(layer.lora_variant[adapter]).__name__} of LoRA"
    if getattr(layer, "lora_bias", {}).get(adapter):
        return "its adapter has a bias of its own"
    if layer.merged:
        return "its adapter is merged into the base weight; call unmerge_adapter()"
    base = layer.get_base_layer()
    if isinstance(base, nn.MultiheadAttention):
        return "it wraps nn.MultiheadAttention; use LowRank, which converts the projections one by one"
    if getattr(base, "groups", 1) != 1:
        return "it is a convolution with groups"
    return ""
