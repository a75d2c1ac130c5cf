"""The base class of low-rank layers, whose weight is composed from a few small tensors.

A low-rank layer has a *role*: the factors are the weight (``"weight"``), or a change to a frozen weight
(``"update"``). Two modifiers set which factors are trained, with f a
:class:`~lightning_lowrank.layers.factorization.Factorization`:

===========  =========================  ====================
modifier     composed from the factors  trained
===========  =========================  ====================
none         f(U, V)                    U, V
half-frozen  f(Ũ, V)                    V
decoupled    f(U, Ṽ) + f(Ũ, V)          U, V (Ũ, Ṽ are fixed)
===========  =========================  ====================

In FedMUD (Li et al., ICML 2025) role ``"update"`` is Eq. 3, and decoupling is AAD, Eq. 8. LoRA (Hu et al.,
2022) is role ``"update"`` with a matrix product, ``init="lora"`` and ``alpha``; FFA-LoRA also freezes the factor
on the input's side.

Each layer computes in one of two ways, equal to rounding: the *dense* way composes the weight and calls torch's
function with it; the *contracted* way applies one factor after another to the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeVar
from weakref import finalize, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.utils.parametrize import is_parametrized

from lightning_lowrank.arguments import join_names
from lightning_lowrank.internals.torch import (
    COMPILED,
    TABLES,
    has_hooks,
    is_transformed,
    own_buffers,
    own_children,
    own_parameters,
    version_of,
    without_autocast,
)
from lightning_lowrank.layers.factorization import Factorization, HalfFrozen
from lightning_lowrank.layers.factorization.base import working_precision
from lightning_lowrank.layers.precision import type_before
from lightning_lowrank.layers.settings import Compute, LayerSettings, Role, update_scale
from lightning_lowrank.seeding import generator

_REMEMBERED_CASES = 256
_COMPARED_READS = 8

_Layer = TypeVar("_Layer", bound="LowRankLayer")


def combine(
    factorization: Factorization,
    shape: tuple[int, ...],
    factors: Mapping[str, Tensor],
    fixed: Mapping[str, Tensor] | nn.ParameterDict,
    decouple: bool,
    scale: float = 1,
) -> Tensor:
    """Compose trained and fixed factors into a dense tensor, by the table in this module's docstring."""
    composed = factorization.compose_sum(terms(factors, fixed, decouple), shape)
    return composed if scale == 1 else composed * scale


def terms(
    factors: Mapping[str, Tensor] | nn.ParameterDict, fixed: Mapping[str, Tensor] | nn.ParameterDict, decouple: bool
) -> list[dict[str, Tensor]]:
    """The sets of factors whose composed weights are added, in the trained factors' dtype: one, or two if decoupled."""
    dtype = next(iter(factors.values())).dtype
    fixed = {name: value.to(dtype) for name, value in fixed.items()}
    if decouple:
        return [{"U": factors["U"], "V": fixed["V"]}, {"U": fixed["U"], "V": factors["V"]}]
    # torch before 2.10 compiles no unpacking of a ParameterDict.
    return [{**fixed, **dict(factors.items())}]


class LowRankLayer(nn.Module):
    """The base class of low-rank layers; build one from a dense layer with :meth:`from_dense`.

    ``weight`` is a property that composes the dense weight each time it is read, so everything in torch that
    reads a layer's weight gets the effective one. Changing the returned tensor does not change the layer, whose
    numbers are in these parameters.

    - ``frozen_weight``: the weight before the update (role ``"update"`` only), not trained unless ``train_base``
      is set.
    - ``factors``: the trained factors, by name; float32 if a weight of 16 bits is frozen.
    - ``fixed``: the factors that are never trained: the frozen one of a half-frozen layer, both of a decoupled one.
    - ``bias``: the dense layer's own.

    ``U`` belongs to the first dimension of the dense layer's weight and ``V`` to the second. In a linear
    layer and a convolution these are output and input; a transposed convolution, an embedding and
    transformers' ``Conv1D`` hold their weight the other way around.

    Attributes:
        factorization: The factorization of the weight. This and ``role``, ``decouple``, ``half_frozen``, ``alpha``,
            ``rank_stabilized``, ``dropout`` and ``compute`` are described in :class:`LayerSettings`.
        weight_shape: The dense weight's shape.
        rank: The factors' rank.
        init_scale: The ``a`` of the uniform draws U(−a, a) of :meth:`reset_factors`.
        zero_factors: The factors that :meth:`reset_factors` sets to zero.
        scale: The factor that the update is multiplied by.
        active: The computation: the update and the weight before it (``"both"``), or one of them, as
            if the other were zero (``"base"``, ``"factors"``). ``weight`` is always made of both.
        trainable: Whether the dense layer's weight was trainable, as it is again in :meth:`to_dense`.
        folded: Whether :meth:`fold` has changed the frozen weight, so that the factors are not all that was learnt.
        train_base: Whether the weight before the update may be trained.
    """

    dense_classes: ClassVar[tuple[type[nn.Module], ...]]
    first_is_input: ClassVar[bool] = False

    factors: nn.ParameterDict
    fixed: nn.ParameterDict
    bias: nn.Parameter | None
    frozen_weight: nn.Parameter
    merged_weight: Tensor | None

    dense_class: type[nn.Module]
    factorization: Factorization
    weight_shape: tuple[int, ...]
    rank: int
    role: Role
    decouple: bool
    half_frozen: HalfFrozen
    init_scale: float
    zero_factors: tuple[str, ...]
    alpha: float | None
    rank_stabilized: bool
    scale: float
    dropout: float
    compute: Compute
    active: Literal["both", "base", "factors"]
    trainable: bool
    folded: bool
    train_base: bool
    _contracted: dict[tuple[Any, ...], bool]
    _written: bool = False
    _watched_reads: list[None]
    _merged_of: dict[int, int]

    def __init__(self, *arguments: object, **keywords: object) -> None:
        raise TypeError(
            f"{type(self).__name__} is built from a dense layer: use {type(self).__name__}.from_dense(...)."
        )

    @classmethod
    def why_not(cls, module: nn.Module, factorization: Factorization) -> str:
        """The reason why a module cannot become a layer of this class, or an empty string."""
        if is_parametrized(module):
            return "it is parametrized (torch.nn.utils.parametrize)"
        if type(module) not in cls.dense_classes:
            return f"{type(module).__name__} is not exactly nn.{cls.dense_classes[0].__name__}"
        if "forward" in vars(module):
            return "its forward is replaced on the instance"
        if set(own_parameters(module)) - {"bias"} != {"weight"} or own_buffers(module) or own_children(module):
            return _why_other_tensors({*own_parameters(module), *own_buffers(module), *own_children(module)})
        if own_parameters(module)["weight"] is None:
            return "it has no weight"
        dtype = module.get_parameter("weight").dtype
        if not dtype.is_floating_point or dtype.itemsize < 2:
            return f"its weight is of type {dtype}"
        if has_hooks(module.get_parameter("weight")):
            return "its weight has a hook (Tensor.register_hook)"
        return ""

    @classmethod
    def from_dense(
        cls: type[_Layer], module: nn.Module, factorization: Factorization, rank: int, *, seed: int = 0, **settings: Any
    ) -> _Layer:
        """Build the low-rank layer of a dense layer.

        The new layer takes over the dense layer's settings, hooks, training mode, device, dtype and its
        bias, the same :class:`~torch.nn.Parameter`. In role ``"update"`` it also takes over the weight
        Parameter and freezes it (unless ``train_base`` is set), so the dense layer should not be used further. The
        factors of a frozen weight of 16 bits are of float32, because 16 bits would lose small steps. The layer computes
        in its input's type.

        Args:
            module: A layer of the kind that the class is for; not a subclass of it.
            factorization: The factorization of the weight.
            rank: The rank.
            seed: Seed of the uniform draws. 0 by default.
            **settings: ``role``, ``decouple``, ``init`` and the other settings of :class:`LayerSettings`.

        Raises:
            TypeError: If ``module`` is of another class, its weight is not a plain floating-point Parameter, or
                a setting has an unknown name.
            ValueError: If the weight cannot have this rank (a matrix product may have more than it needs in role
                ``"update"``), :class:`LayerSettings` refuses a setting, ``compute="contracted"`` if the
                factorization has no such form, or the dense weight is constant and is to set the scale of uniform
                draws.

        Example:
            >>> from lightning_lowrank.layers import LowRankLinear, MatrixProduct
            >>> dense = nn.Linear(6, 4)
            >>> layer = LowRankLinear.from_dense(dense, MatrixProduct(), rank=2, decouple=True)
            >>> torch.equal(layer.weight, dense.weight)
            True
            >>> sorted(name for name, p in layer.named_parameters() if p.requires_grad)
            ['bias', 'factors.U', 'factors.V']
        """
        return cls.from_settings(module, LayerSettings(factorization, **settings), rank, seed)

    @classmethod
    @without_autocast()
    def from_settings(cls: type[_Layer], module: nn.Module, settings: LayerSettings, rank: int, seed: int) -> _Layer:
        """Build the layer from a settings object; see :meth:`from_dense`."""
        factorization, init = settings.factorization, settings.init
        reason = cls.why_not(module, factorization)
        if reason:
            raise TypeError(f"module cannot become a {cls.__name__}: {reason}.")
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        shape = tuple(weight.shape)
        redundant = settings.role == "update" and factorization.any_rank and type(rank) is int
        if not redundant or rank <= factorization.max_rank(shape, settings.half_frozen):
            factorization.check_rank(shape, rank, settings.half_frozen)
        shapes = factorization.factor_shapes(shape, rank)
        trained = factorization.trained_factors(shape, settings.half_frozen)
        fixed = factorization.fixed_factors(shape, settings.decouple, settings.half_frozen)
        if init == "lora" and not factorization.bilinear(shape):
            raise ValueError(f'init="lora" needs two factors, and {factorization!r} has {", ".join(shapes)}.')

        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        take_over_attributes(layer, module, hooks=True)
        layer.dense_class = type(module)
        layer.factorization, layer.weight_shape, layer.rank = factorization, shape, int(rank)
        layer.role, layer.decouple, layer.half_frozen = settings.role, settings.decouple, settings.half_frozen
        layer.alpha, layer.rank_stabilized = settings.alpha, settings.rank_stabilized
        layer.dropout, layer.compute = settings.dropout, settings.compute
        # As PEFT's dropout layer: from_pretrained() returns models in evaluation mode, and a fit leaves them in it.
        layer.training = layer.training or layer.dropout > 0
        layer.scale = layer.scale_at(rank)
        layer.active = "both"
        layer.trainable, layer.train_base = weight.requires_grad, settings.train_base
        layer.folded = False
        layer._contracted, layer._merged_of = {}, {}
        # Not a number, which steps of clients together may not change, and no iterator, which no trial can restore.
        layer._watched_reads = [None] * _COMPARED_READS
        if layer.compute == "contracted" and not layer._can_contract():
            raise ValueError(
                f'compute="contracted" is not possible: {factorization!r} has no contracted form for a '
                f'{layer.dense_class.__name__} with a weight of shape {shape}. Use compute="auto".'
            )
        layer.zero_factors = layer._choose_zero_factors(init, trained)
        if settings.init_scale is not None:
            layer.init_scale = float(settings.init_scale)
        elif init == "lora":
            layer.init_scale = 1 / math.sqrt(
                next(rows for name, (rows, *_) in shapes.items() if name not in layer.zero_factors)
            )
        else:
            layer.init_scale = layer._default_init_scale(weight)

        if layer.role == "update":
            layer.register_parameter("frozen_weight", weight)
        if "bias" in own_parameters(module):
            layer.register_parameter("bias", own_parameters(module)["bias"])
        layer.register_buffer("merged_weight", None, persistent=False)
        separate = layer.role == "update" and not settings.train_base
        dtype = torch.promote_types(weight.dtype, torch.float32) if separate else weight.dtype

        def zeros(name: str, trained: bool) -> nn.Parameter:
            return nn.Parameter(weight.new_zeros(shapes[name], dtype=dtype), requires_grad=trained)

        layer.factors = nn.ParameterDict({name: zeros(name, True) for name in trained})
        layer.fixed = nn.ParameterDict({name: zeros(name, False) for name in fixed})
        if settings.decomposes:
            layer._install(layer._decompose(weight))
        else:
            layer.reset_factors(seed)
        if layer.role == "update" and not settings.train_base:
            weight.requires_grad_(False)
            weight.grad = None
        return layer

    def _choose_zero_factors(self, init: str, trained: tuple[str, ...]) -> tuple[str, ...]:
        if self.role == "weight":
            return ()
        if self.decouple or self.half_frozen:
            return trained
        if init == "lora":
            return ("V",) if self.first_is_input else ("U",)
        return (self.factorization.zero_factor(self.weight_shape),)

    def _default_init_scale(self, weight: Tensor) -> float:
        count = 2 if self.decouple else 1
        if self.role == "update":
            return self.factorization.default_init_scale(self.weight_shape, self.rank) / math.sqrt(count)
        std = weight.detach().double().std(correction=0).item() / math.sqrt(count)
        return self.factorization.init_scale_for_std(self.weight_shape, self.rank, std)

    def _decompose(self, weight: Tensor) -> dict[str, Tensor]:
        """Values of ``factors.*`` and ``fixed.*`` that approximate a weight."""
        found = self.factorization.decompose(weight, self.rank)
        trained = {f"factors.{name}": found[name] / 2 if self.decouple else found[name] for name in self.factors}
        return trained | {f"fixed.{name}": found[name] for name in self.fixed}

    @torch.no_grad()
    def _install(self, values: Mapping[str, Tensor]) -> None:
        """Copy values into the parameters of these names."""
        for name, value in values.items():
            self.get_parameter(name).copy_(value)

    @property
    def weight(self) -> Tensor:
        """The effective dense weight, composed at each use unless the layer is merged.

        Read-only: an in-place write is lost, and the next reading or call of `forward` raises. Torch does not count
        writes into ``weight.data``: they are found only if one of the first reads returned that tensor, and an
        assignment to ``weight.data`` is never found.
        """
        if not torch.compiler.is_compiling():
            self._refuse_if_written()
        if self._is_merged():
            assert self.merged_weight is not None
            return self.merged_weight
        found = self._composed()
        if not torch.compiler.is_compiling() and type(found) is Tensor:
            values = None
            compares = not is_transformed(found) and not found.is_meta
            if compares and self._watched_reads:
                self._watched_reads.pop()
                values = found.detach().clone()
            # A view shares the version counter, and keeps it readable after the tensor is freed.
            finalize(found, _note_writing, ref(self), found.detach(), version_of(found), values)
        return found

    def _refuse_if_written(self) -> None:
        if self._written:
            raise RuntimeError(
                f"a {type(self).__name__} had its weight of shape {list(self.weight_shape)} changed in place, as by"
                " weight.copy_(). The weight is composed of the factors at"
                " each use, so that the change is lost: change the factors, or leave the layer out by exclude."
            )

    def _composed(self) -> Tensor:
        if self.role == "update":
            return (self.frozen_weight + self.update()).to(self.frozen_weight.dtype)
        return self.update().to(self.weight_dtype)

    def scale_at(self, rank: int) -> float:
        """The scale of the update if its factors had another rank."""
        return update_scale(rank, self.alpha, self.rank_stabilized)

    def update(self, factors: Mapping[str, Tensor] | None = None) -> Tensor:
        """Compose the factors into a dense tensor of the weight's shape, without the frozen weight.

        Args:
            factors: Values for all trained factors, by name, such as an average over clients. By default
                the layer's own.

        Raises:
            ValueError: If ``factors`` has other names than the layer's trained factors.
        """
        if factors is None:
            factors = dict(self.factors.items())
        elif set(factors) != set(self.factors):
            raise ValueError(
                f"factors must have exactly the names of the trained factors, {sorted(self.factors)}, "
                f"but has {sorted(factors)}."
            )
        return combine(self.factorization, self.weight_shape, factors, self.fixed, self.decouple, self.scale)

    @torch.no_grad()
    @without_autocast()
    def fold(
        self, factors: Mapping[str, Tensor] | None = None, add: Callable[[Tensor, Tensor], object] = Tensor.add_
    ) -> None:
        """Add the update to the frozen weight, in place; the factors stay as they are.

        Follow it with :meth:`reset_factors` to start the next update at zero. The update is composed in single
        precision at least. A weight of 16 bits is rounded at each fold, which loses most of small updates.

        Args:
            factors: As for :meth:`update`.
            add: Adds its second argument, the update, to its first, the frozen weight, in place. For repeated folds
                into 16 bits, give a function that keeps the unrounded sum.

        Raises:
            ValueError: If the layer's role is ``"weight"`` (there is no frozen weight), or ``factors`` has
                other names than the layer's trained factors.
        """
        if self.role != "update":
            raise ValueError(
                'fold needs a layer of role="update", which has a frozen weight to add to; this one has '
                f"role={self.role!r}."
            )
        values = self.factors if factors is None else factors
        self.add_to_frozen(self.update({name: working_precision(value) for name, value in values.items()}), add)

    @torch.no_grad()
    def add_to_frozen(self, change: Tensor, add: Callable[[Tensor, Tensor], object] = Tensor.add_) -> None:
        """Add a tensor of the weight's shape to the frozen weight, in place, and note that it has changed.

        Args:
            change: The tensor to add.
            add: As for :meth:`fold`.
        """
        self.unmerge()
        add(self.frozen_weight, change)
        self.folded = True

    @torch.inference_mode(False)
    @torch.no_grad()
    @without_autocast()
    def merge(self) -> None:
        """Compose the weight once and keep it, so that the layer costs as much as the dense layer.

        The factors and the frozen weight stay as they are, so :meth:`unmerge` restores the layer bit for bit
        and state dicts are the same as before. A merged layer does not train: ``train()``, loading a state dict,
        :meth:`fold`, :meth:`reset_factors`, a fit with `LowRank` or `FederatedLoop`, other tensors as its factors, and
        any change of these in place unmerge it. Torch does not count changes through ``data``, such as those of
        ``vector_to_parameters``: call :meth:`unmerge` after these. Code of `torch.compile` does not see any
        change in place: call :meth:`unmerge` after it.
        """
        self.unmerge()
        self.merged_weight = self.weight.detach().clone()
        self._merged_of = self._versions()

    def _versions(self) -> dict[int, int]:
        """Version counters of the tensors that compose the weight."""
        return {id(value): version_of(value) for name, value in self.named_parameters() if name != "bias"}

    def _is_merged(self) -> bool:
        """Whether the layer is merged, and its factors have not changed since."""
        if self.merged_weight is None:
            return False
        if not torch.compiler.is_compiling() and self._versions() != self._merged_of:
            self.unmerge()
        return self.merged_weight is not None

    def __getstate__(self) -> dict[str, Any]:
        # Versions tell of changes in this layer's tensors, and not in those of a copy.
        self._is_merged()
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._merged_of = self._versions()

    def unmerge(self) -> None:
        """Undo :meth:`merge`: compose the weight at each use again."""
        self.merged_weight = None

    def train(self: _Layer, mode: bool = True) -> _Layer:
        """Set the training mode; training unmerges the layer."""
        if mode:
            self.unmerge()
        return super().train(mode)

    def _load_from_state_dict(self, *arguments: Any, **keywords: Any) -> None:
        self.unmerge()
        super()._load_from_state_dict(*arguments, **keywords)

    def reset_factors(self, seed: int) -> None:
        """Set the factors, trained and fixed, to the values of :meth:`draw_factors`, in place.

        Args:
            seed: As for :meth:`draw_factors`.

        Raises:
            ValueError: If the scale of the draws is zero, because it came from a constant weight.
        """
        values = self.draw_factors(seed)
        self.unmerge()
        self._install(values)

    @torch.no_grad()
    def draw_factors(self, seed: int) -> dict[str, Tensor]:
        """New values of the factors, drawn as for ``init="uniform"`` or ``"lora"``; the layer is unchanged.

        Each factor has a generator of its own, derived from the seed, and is drawn on the CPU in single
        precision: the same seed gives the same factors on every device.

        Args:
            seed: The seed; give each layer its own, for example with
                :func:`~lightning_lowrank.seeding.derive_seed` from a round's seed and the layer's name.

        Returns:
            Values for ``factors.*`` and ``fixed.*`` by these names, with the factors' dtype and device.

        Raises:
            ValueError: If the scale of the draws is zero, because it came from a constant weight.

        Example:
            >>> from lightning_lowrank.layers import LowRankLinear, MatrixProduct
            >>> layer = LowRankLinear.from_dense(nn.Linear(6, 4), MatrixProduct(), rank=2, half_frozen=True)
            >>> {name: tuple(value.shape) for name, value in layer.draw_factors(seed=1).items()}
            {'factors.V': (6, 2), 'fixed.U': (4, 2)}
        """
        if self.init_scale == 0:
            raise ValueError(
                "init_scale is 0, because the dense weight that it comes from is constant; give init_scale a value "
                "above 0 to draw factors."
            )
        values: dict[str, Tensor] = {}
        for table, factors in (("factors", self.factors), ("fixed", self.fixed)):
            for name, factor in factors.items():
                if table == "factors" and name in self.zero_factors:
                    values[f"{table}.{name}"] = torch.zeros_like(factor)
                else:
                    draw = torch.empty(factor.shape, dtype=torch.float32, device="cpu")
                    draw.uniform_(-self.init_scale, self.init_scale, generator=generator(seed, table, name))
                    values[f"{table}.{name}"] = draw.to(factor)
        return values

    def without_padding(self, factor: str, value: Tensor) -> Tensor:
        """A factor's value, with zeros in the row of an embedding's padding.

        A tensor of the weight's shape has the rows of ``U``.
        """
        return value

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; refuse one that would replace the weight, as `torch.nn.utils.prune` does.

        Raises:
            RuntimeError: If the name is ``weight``, or begins with ``weight_``.
        """
        if name == "weight" or name.startswith("weight_"):
            raise RuntimeError(
                f"{type(self).__name__} takes no parameter {name!r}, such as torch.nn.utils.prune makes: its weight is"
                " composed from factors. Call lightning_lowrank.recover(model) first, or leave the layer out by"
                " exclude."
            )
        super().register_parameter(name, param)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "qconfig":
            raise RuntimeError(
                f"torch.ao.quantization would leave a {type(self).__name__} as it is, which is composed from factors:"
                " call lightning_lowrank.recover(model) first, and quantize what it returns."
            )
        super().__setattr__(name, value)

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse `torch.jit.script`.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"torch.jit.script compiles no {type(self).__name__}: use torch.jit.trace or torch.export, or call"
            " lightning_lowrank.recover(model) first."
        )

    def reset_parameters(self) -> None:
        """Refuse torch's hook for global re-initialisation, which would change nothing here.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no weight of its own to reset; use reset_factors(seed) for the "
            "factors, or reset the parameters before conversion."
        )

    @torch.no_grad()
    @without_autocast()
    def to_dense(self, *, hooks: bool = False) -> nn.Module:
        """A plain layer with the effective weight as a new Parameter, trainable if the dense one was.

        The bias is the same Parameter as this layer's.

        Args:
            hooks: Whether the dense layer takes over this layer's hooks, as it should if it takes its place.
                Off by default.
        """
        dense = self.dense_class.__new__(self.dense_class)
        nn.Module.__init__(dense)
        take_over_attributes(dense, self, hooks)
        dense.register_parameter("weight", nn.Parameter(self.weight.clone(), self.trainable))
        if "bias" in own_parameters(self):
            dense.register_parameter("bias", own_parameters(self)["bias"])
        return dense

    def forward(self, input: Tensor, *geometry: Any) -> Tensor:
        """Compute the output of the dense layer with the effective weight.

        Args:
            input: As for the dense layer.
            *geometry: Further arguments of the dense layer's forward (``output_size`` of a transposed
                convolution).
        """
        self._refuse_if_written()
        bias = own_parameters(self).get("bias")
        if self._is_merged():
            assert self.merged_weight is not None
            return self._apply_dense(input, self.merged_weight, bias, *geometry)
        if self.active == "base":
            return self._apply_dense(input, self.frozen_weight, bias, *geometry)
        contracts = self.contracts(input, *geometry)
        dropout = self.dropout if self.training and input.is_floating_point() else 0.0
        apart = self._factors_are_wider
        # The sum, rounded to the frozen weight's type, would lose most of a small update.
        if not contracts and not dropout and not (apart and self._adds_to_base):
            weight = self._composed() if self._adds_to_base else self.update()
            return self._apply_dense(input, self._as_input(weight, input) if apart else weight, bias, *geometry)
        dropped = F.dropout(input, dropout) if dropout else input
        own_bias = None if self._adds_to_base else bias
        if contracts:
            sets = terms(self.factors, self.fixed, self.decouple)
            if apart:
                sets = [{name: self._as_input(factor, input) for name, factor in each.items()} for each in sets]
            if self.scale != 1 and not self._adds_to_base:
                # The product is linear in each factor, so scaling one factor scales it.
                name = next(iter(sets[0]))
                sets = [{**each, name: each[name] * self.scale} for each in sets]
            first, *others = sets
            change = self._apply_factors(dropped, first, own_bias, *geometry)
            for term in others:
                change = change + self._apply_factors(dropped, term, None, *geometry)
        else:
            update = self.update()
            change = self._apply_dense(dropped, self._as_input(update, input) if apart else update, own_bias, *geometry)
        if not self._adds_to_base:
            return change
        base = self._apply_dense(input, self.frozen_weight, bias, *geometry)
        return torch.add(base, change, alpha=self.scale if contracts else 1)

    @property
    def _factors_are_wider(self) -> bool:
        return self.weight_dtype != self._factor_dtype

    @property
    def _factor_dtype(self) -> torch.dtype:
        return next(iter(self.factors.values())).dtype

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype of ``weight``: the dense layer's, also where the factors are float32."""
        if self.role == "update":
            return self.frozen_weight.dtype
        return type_before(self.factors) or self._factor_dtype

    def _as_input(self, value: Tensor, input: Tensor) -> Tensor:
        """A factor or weight in the dtype that the layer computes in: the input's, as under autocast."""
        return value.to(input.dtype if input.is_floating_point() else self.weight_dtype)

    @property
    def _adds_to_base(self) -> bool:
        return self.role == "update" and self.active == "both"

    def _multiplies_twice(self, input: Tensor) -> bool:
        """Whether the dense way multiplies the input by the frozen weight and by the update, instead of their sum."""
        dropped = self.training and self.dropout > 0 and input.is_floating_point()
        return self._adds_to_base and (dropped or self._factors_are_wider)

    def contracts(self, input: Tensor, *geometry: Any) -> bool:
        """Whether the layer computes the contracted way for these arguments of :meth:`forward`.

        With ``compute="auto"`` the multiply-adds of the forward pass are compared and, if gradients are
        recorded, also those of the backward pass: a gradient of the composed weight, which the contracted
        way does not need, costs as much as the layer itself. If torch compiles, exports or traces the layer, the
        answer goes by the weight's shape alone, so that it holds for inputs of every size.
        """
        if self.compute != "auto":
            return self.compute == "contracted"
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            each = self.factorization.multiply_adds(self.weight_shape, self.rank) if self._can_contract() else None
            sets = 2 if self.decouple else 1
            return each is not None and sets * each < math.prod(self.weight_shape)
        if isinstance(input, Proxy):
            raise RuntimeError(
                f"torch.fx.symbolic_trace cannot trace a {type(self).__name__}: use torch.export.export, or call"
                " lightning_lowrank.recover(model) first."
            )
        if any(isinstance(size, torch.SymInt) for size in input.shape):
            # Not cached: in a trace with dynamic sizes, this comparison adds a guard on them.
            return bool(self._takes_less_contracted(input, *geometry))
        # Cached: counting takes as long as the products of a small layer.
        kind = (input.shape, torch.is_grad_enabled(), input.requires_grad, self._multiplies_twice(input))
        case = (*kind, self.rank, self.active, repr(geometry))
        if case not in self._contracted:
            if len(self._contracted) == _REMEMBERED_CASES:
                self._contracted.clear()
            self._contracted[case] = self._takes_less_contracted(input, *geometry)
        return self._contracted[case]

    def _takes_less_contracted(self, input: Tensor, *geometry: Any) -> bool:
        if not self._can_contract():
            return False
        product, first, rest = self._multiply_adds(input, *geometry)
        composing = self.factorization.compose_multiply_adds(self.weight_shape, self.rank)
        base = product if self._adds_to_base else 0
        also = product if self._multiplies_twice(input) else 0
        sets = 2 if self.decouple else 1
        if not torch.is_grad_enabled():
            return sets * (first + rest) + base < product + also + sets * composing
        through_input = int(input.requires_grad)
        dense = (2 + through_input) * product + (1 + through_input) * also + sets * 3 * composing
        contracted = sets * ((2 + through_input) * first + 3 * rest) + (1 + through_input) * base
        return contracted < dense

    def multiply_adds(self, input: Tensor, *geometry: Any) -> int:
        """Multiply-adds of :meth:`forward` with these arguments, computed densely or contracted as the layer would.

        Composing the weight, which happens once a batch, is not among them.
        """
        product, first, rest = self._multiply_adds(input, *geometry)
        if self.merged_weight is not None or self.active == "base":
            return product
        if not self.contracts(input, *geometry):
            return product * (2 if self._multiplies_twice(input) else 1)
        return (first + rest) * (2 if self.decouple else 1) + (product if self._adds_to_base else 0)

    def _can_contract(self) -> bool:
        return self.factorization.stage_shapes(self.weight_shape, self.rank) is not None

    def _multiply_adds(self, input: Tensor, *geometry: Any) -> tuple[int, int, int]:
        """Multiply-adds of the dense product, of the first contracted product, and of the other contracted products.

        The first is the one whose input may need no gradient. Both are 0 without a contracted form.
        """
        raise NotImplementedError

    def _apply_dense(self, input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
        raise NotImplementedError

    def _apply_factors(
        self, input: Tensor, factors: Mapping[str, Tensor], bias: Tensor | None, *geometry: Any
    ) -> Tensor:
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Describe the dense layer and the low-rank settings."""
        parts = [super().extra_repr(), f"factorization={self.factorization}", f"rank={self.rank}"]
        parts.append(f"role={self.role!r}")
        if self.decouple:
            parts.append("decouple=True")
        if self.half_frozen:
            parts.append(f"half_frozen={self.half_frozen!r}")
        if self.scale != 1:
            parts.append(f"scale={self.scale:.6g}")
        if self.dropout:
            parts.append(f"dropout={self.dropout}")
        if self.compute != "auto":
            parts.append(f"compute={self.compute!r}")
        return ", ".join(part for part in parts if part)


def _why_other_tensors(names: set[str]) -> str:
    """The reason why a layer whose tensors have other names than its class's cannot be converted."""
    for made_by, signs in (
        ("weight_norm", {"weight_g", "weight_v"}),
        ("spectral_norm", {"weight_orig", "weight_u"}),
        ("prune", {"weight_orig", "weight_mask"}),
    ):
        if signs <= names:
            return f"torch.nn.utils.{made_by} computes its weight from {' and '.join(sorted(signs))}"
    return f"it holds other tensors than weight and bias: {join_names(sorted(names - {'weight', 'bias'})) or 'none'}"


def take_over_attributes(target: nn.Module, source: nn.Module, hooks: bool) -> None:
    """Copy a module's settings, training mode and hooks, but not its tensors and children.

    Copying attributes, unlike calling the constructor, does not use the global random state and includes
    settings of unknown subclasses. Hook tables are shared, so the handles that users hold still remove their
    hooks. The result of ``Module.compile`` is bound to the source and not copied.
    """
    tables = set(vars(nn.Module())) - {"training"}
    left = {*TABLES, COMPILED}
    if isinstance(source, LowRankLayer):
        left |= LowRankLayer.__annotations__.keys()
    for name, value in vars(source).items():
        if name not in left and (hooks or name not in tables):
            object.__setattr__(target, name, value)


def low_rank_layers(model: nn.Module, tied: bool = True) -> Iterator[tuple[str, LowRankLayer]]:
    """Yield the name and module of each low-rank layer, once each, in registration order.

    Args:
        model: A converted model, or one that holds one.
        tied: Whether to also yield layers that share the factors of an earlier one. On by default.

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


def caches(model: nn.Module) -> list[Any]:
    """The containers in which a model's low-rank layers remember what a later result does not depend on."""
    layers = [layer for _, layer in low_rank_layers(model)]
    return [each for layer in layers for each in (layer._contracted, layer._merged_of, layer._watched_reads)]


def keep_frozen(model: nn.Module) -> None:
    """Freeze the fixed tensors of low-rank layers again, after a callback unfroze all parameters of a model.

    Lightning's ``BaseFinetuning``, for example, thaws every parameter of the modules that it is given.
    """
    for _, layer in low_rank_layers(model):
        layer.fixed.requires_grad_(False)
        if layer.role == "update" and not layer.train_base:
            layer.frozen_weight.requires_grad_(False)


def _note_writing(layer: ref[LowRankLayer], alias: Tensor, version: int, values: Tensor | None) -> None:
    """Make a layer refuse its next call if its composed weight was written into, because the write is lost."""
    found = layer()
    if found is None:
        return
    if version_of(alias) != version or not (values is None or torch.allclose(alias, values, 0.0, 0.0, equal_nan=True)):
        found._written = True
