"""Linear and convolution layers whose weight is a few small tensors.

A low-rank layer is a point of a grid. Its *role* says what the factors are: ``"weight"``, they are the
weight, or ``"update"``, they are a change to a frozen weight. Two modifiers say what is trained, with f a
:class:`~lightning_lowrank.layers.factorization.Factorization`:

===========  =========================  ====================
modifier     composed from the factors  trained
===========  =========================  ====================
none         f(U, V)                    U, V
half-frozen  f(Ũ, V)                    V
decoupled    f(U, Ṽ) + f(Ũ, V)          U, V (Ũ, Ṽ are fixed)
===========  =========================  ====================

In FedMUD (Li et al., ICML 2025) role ``"update"`` is Eq. 3, and decoupling is AAD, Eq. 8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from lightning_lowrank.layers.factorization import Factorization
from lightning_lowrank.seeding import generator

__all__ = ["Init", "LowRankConv2d", "LowRankLayer", "LowRankLinear", "Role"]

Role = Literal["update", "weight"]
Init = Literal["auto", "uniform", "spectral"]

_Layer = TypeVar("_Layer", bound="LowRankLayer")


def check_settings(role: str, decouple: bool, half_frozen: bool, init: str, init_scale: float | None) -> None:
    """Refuse settings that no low-rank layer can have; the arguments are those of ``from_dense``."""
    if role not in ("update", "weight"):
        raise ValueError(f'role must be "update" or "weight", but is {role!r}.')
    if decouple and half_frozen:
        raise ValueError(
            "decouple=True and half_frozen=True exclude each other: decoupling trains both factors, "
            "half-freezing one. Set one of them to False."
        )
    if init not in ("auto", "uniform", "spectral"):
        raise ValueError(f'init must be "auto", "uniform" or "spectral", but is {init!r}.')
    if role == "update" and init == "spectral":
        raise ValueError(
            'init="spectral" needs role="weight": an update starts at zero, so there is no weight to '
            'decompose. Use init="auto".'
        )
    if init_scale is not None and not (init_scale > 0 and math.isfinite(init_scale)):
        raise ValueError(f"init_scale must be a finite number above 0 or None, but is {init_scale!r}.")


def why_not_low_rank(module: nn.Module, *dense_classes: type[nn.Module]) -> str:
    """Say what keeps a module from being converted, for which it must be exactly of one of these classes.

    Returns:
        The reason, or an empty string where there is none.
    """
    if type(module) not in dense_classes:
        return f"{type(module).__name__} is not exactly {' or '.join(f'nn.{c.__name__}' for c in dense_classes)}"
    if "forward" in vars(module):
        return "its forward is replaced on the instance"
    if set(module._parameters) != {"weight", "bias"} or module._buffers or module._modules:
        return "it holds other tensors than weight and bias (weight normalisation, for example)"
    if not module.get_parameter("weight").is_floating_point():
        return f"its weight is of type {module.get_parameter('weight').dtype}"
    return ""


def combine(
    factorization: Factorization,
    shape: tuple[int, ...],
    factors: Mapping[str, Tensor],
    fixed: Mapping[str, Tensor],
    decouple: bool,
) -> Tensor:
    """Compose trained and fixed factors into a dense tensor, as the table in this module's docstring says."""
    if decouple:
        return factorization.compose({"U": factors["U"], "V": fixed["V"]}, shape) + factorization.compose(
            {"U": fixed["U"], "V": factors["V"]}, shape
        )
    return factorization.compose({**fixed, **factors}, shape)


class LowRankLayer(nn.Module):
    """What low-rank layers of every kind share; built from a dense layer with :meth:`from_dense`.

    ``weight`` is a property that composes the dense weight each time it is read, so the inherited
    ``forward`` and everything in torch that reads a layer's weight see the effective one. Changing the
    tensor it returns changes nothing: the layer's numbers are in these parameters.

    - ``frozen_weight``: the weight before the update, never trained (role ``"update"`` only).
    - ``factors``: the trained factors, by name.
    - ``fixed``: the factors that are never trained: ``U`` where half is frozen, both where decoupled.
    - ``bias``: the dense layer's own.

    Attributes:
        factorization: How the factors stand for the weight.
        weight_shape: The dense weight's shape.
        rank: The factors' rank.
        role: ``"update"`` or ``"weight"``.
        decouple: Whether the layer is decoupled (AAD).
        half_frozen: Whether only ``V`` is trained.
        init_scale: The ``a`` of the uniform draws U(−a, a) of :meth:`reset_factors`.
    """

    _dense_class: ClassVar[type[nn.Module]]

    factors: nn.ParameterDict
    fixed: nn.ParameterDict
    bias: nn.Parameter | None
    frozen_weight: nn.Parameter

    factorization: Factorization
    weight_shape: tuple[int, ...]
    rank: int
    role: Role
    decouple: bool
    half_frozen: bool
    init_scale: float

    def __init__(self, *arguments: object, **keywords: object) -> None:
        raise TypeError(
            f"{type(self).__name__} is built from a dense layer: use {type(self).__name__}.from_dense(...)."
        )

    @classmethod
    def from_dense(
        cls: type[_Layer],
        module: nn.Module,
        factorization: Factorization,
        rank: int,
        *,
        role: Role = "update",
        decouple: bool = False,
        half_frozen: bool = False,
        init: Init = "auto",
        init_scale: float | None = None,
        seed: int = 0,
    ) -> _Layer:
        """Build the low-rank layer that takes a dense layer's place.

        The new layer takes over the dense layer's settings, hooks, training mode, device, dtype and its
        bias, the same :class:`~torch.nn.Parameter`. In role ``"update"`` it also takes over the weight
        Parameter and freezes it, so the dense layer should not be used further.

        Args:
            module: An ``nn.Linear`` or ``nn.Conv2d``, as the class asks; not a subclass of it.
            factorization: How the factors stand for the weight.
            rank: The rank.
            role: ``"update"`` (default) freezes the weight and adds the factors' product to it;
                ``"weight"`` puts the product in the weight's place.
            decouple: Train ``f(U, Ṽ) + f(Ũ, V)`` (AAD) in place of ``f(U, V)``. Off by default.
            half_frozen: Train ``V`` only. Off by default.
            init: How the factors start. ``"uniform"``: draws from U(−a, a). In role ``"update"`` what would
                make the update differ from zero is zero instead: ``V``, and with ``decouple`` both trained
                factors. ``"spectral"`` (role ``"weight"`` only): from the weight, by
                :meth:`Factorization.decompose`; with ``decouple`` the fixed factors are the spectral ones
                and the trained ones half of them, which makes the same weight. ``"auto"`` (default):
                ``"uniform"`` in role ``"update"``, ``"spectral"`` in role ``"weight"``.
            init_scale: The ``a`` of the uniform draws. By default, in role ``"update"``, the one for which
                the first step of SGD changes the weight, in expectation over the draws, as it would the
                dense layer's; in role ``"weight"`` the one that gives the composed weight the standard
                deviation of the dense one. (With ``decouple`` two terms add up: both are the factorization's
                defaults with that taken into account.)
            seed: Seed of the uniform draws.

        Raises:
            TypeError: If ``module`` is of another class, or its weight is not a plain floating-point
                Parameter.
            ValueError: If the weight cannot have this rank, a setting has an unknown value, both modifiers
                are on, ``init="spectral"`` in role ``"update"``, or the dense weight is constant and is to
                set the scale of uniform draws.

        Example:
            >>> from lightning_lowrank.layers import LowRankLinear, MatrixProduct
            >>> dense = nn.Linear(6, 4)
            >>> layer = LowRankLinear.from_dense(dense, MatrixProduct(), rank=2, decouple=True)
            >>> torch.equal(layer.weight, dense.weight)
            True
            >>> sorted(name for name, p in layer.named_parameters() if p.requires_grad)
            ['bias', 'factors.U', 'factors.V']
        """
        reason = why_not_low_rank(module, cls._dense_class)
        if reason:
            raise TypeError(f"module cannot become a {cls.__name__}: {reason}.")
        check_settings(role, decouple, half_frozen, init, init_scale)
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        shape = tuple(weight.shape)
        factorization.check_rank(shape, rank, half_frozen)

        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        _take_over_attributes(layer, module, hooks=True)
        layer.factorization = factorization
        layer.weight_shape = shape
        layer.rank = rank
        layer.role = role
        layer.decouple = decouple
        layer.half_frozen = half_frozen
        layer.init_scale = layer._default_init_scale(weight) if init_scale is None else float(init_scale)

        shapes = factorization.factor_shapes(shape, rank)
        trained = factorization.trained_factors(half_frozen)
        fixed = factorization.fixed_factors(decouple, half_frozen)
        if role == "update":
            layer.register_parameter("frozen_weight", weight)
        layer.register_parameter("bias", module.bias)  # type: ignore[arg-type]
        layer.factors = nn.ParameterDict({name: nn.Parameter(weight.new_zeros(shapes[name])) for name in trained})
        layer.fixed = nn.ParameterDict(
            {name: nn.Parameter(weight.new_zeros(shapes[name]), requires_grad=False) for name in fixed}
        )
        if init == "spectral" or (init == "auto" and role == "weight"):
            layer._decompose(weight)
        else:
            layer.reset_factors(seed)
        if role == "update":
            weight.requires_grad_(False)
            weight.grad = None
        return layer

    def _default_init_scale(self, weight: Tensor) -> float:
        terms = 2 if self.decouple else 1
        if self.role == "update":
            return self.factorization.default_init_scale(self.weight_shape, self.rank) / math.sqrt(terms)
        std = weight.detach().double().std(correction=0).item() / math.sqrt(terms)
        return self.factorization.init_scale_for_std(self.weight_shape, self.rank, std)

    @torch.no_grad()
    def _decompose(self, weight: Tensor) -> None:
        for name, value in self.factorization.decompose(weight, self.rank).items():
            if name in self.fixed:
                self.fixed[name].copy_(value)
            if name in self.factors:
                self.factors[name].copy_(value / 2 if self.decouple else value)

    @property
    def weight(self) -> Tensor:
        """The effective dense weight, composed anew."""
        if self.role == "update":
            return self.frozen_weight + self.update()
        return self.update()

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
        fixed = dict(self.fixed.items())
        return combine(self.factorization, self.weight_shape, factors, fixed, self.decouple)

    @torch.no_grad()
    def merge(self, factors: Mapping[str, Tensor] | None = None) -> None:
        """Add the update to the frozen weight, in place; the factors stay as they are.

        Follow it with :meth:`reset_factors` to start the next update at zero.

        Args:
            factors: As for :meth:`update`.

        Raises:
            ValueError: If the layer's role is ``"weight"`` (there is no frozen weight), or ``factors`` has
                other names than the layer's trained factors.
        """
        if self.role != "update":
            raise ValueError(
                'merge needs a layer of role="update", which has a frozen weight to add to; this one has '
                f"role={self.role!r}."
            )
        self.frozen_weight.add_(self.update(factors))

    @torch.no_grad()
    def reset_factors(self, seed: int) -> None:
        """Draw the factors anew, trained and fixed, in place, as ``init="uniform"`` does.

        Each factor has a generator of its own, derived from the seed, and is drawn on the CPU in single
        precision: the same seed gives the same factors on every device.

        Args:
            seed: The seed; give each layer its own, for example with
                :func:`~lightning_lowrank.seeding.derive_seed` from a round's seed and the layer's name.

        Raises:
            ValueError: If the scale of the draws is zero, because it came from a constant weight.
        """
        if self.init_scale == 0:
            raise ValueError(
                "init_scale is 0, for the dense weight it comes from is constant; give init_scale a value "
                "above 0 to draw factors."
            )
        for table, values in (("factors", self.factors), ("fixed", self.fixed)):
            for name, factor in values.items():
                if table == "factors" and self._starts_at_zero(name):
                    factor.zero_()
                else:
                    draw = torch.empty(factor.shape, dtype=torch.float32)
                    draw.uniform_(-self.init_scale, self.init_scale, generator=generator(seed, table, name))
                    factor.copy_(draw)

    def _starts_at_zero(self, name: str) -> bool:
        return self.role == "update" and (self.decouple or name == "V")

    def reset_parameters(self) -> None:
        """Refuse: torch's hook for global re-initialisation would change nothing here.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no weight of its own to reset; use reset_factors(seed) for the "
            "factors, or reset the parameters before conversion."
        )

    def to_dense(self, *, hooks: bool = False) -> nn.Module:
        """Return the plain layer with the effective weight, a new trainable Parameter.

        The bias is the same Parameter as this layer's.

        Args:
            hooks: Whether the dense layer takes over this layer's hooks, as it should if it takes its place.
                Off by default.
        """
        dense = self._dense_class.__new__(self._dense_class)
        nn.Module.__init__(dense)
        _take_over_attributes(dense, self, hooks)
        dense.register_parameter("weight", nn.Parameter(self.weight.detach().clone()))
        dense.register_parameter("bias", self.bias)
        return dense

    def extra_repr(self) -> str:
        """Describe the dense layer, then what is low-rank about it."""
        parts = [super().extra_repr(), f"factorization={self.factorization}", f"rank={self.rank}"]
        parts.append(f"role={self.role!r}")
        parts.extend(f"{name}=True" for name in ("decouple", "half_frozen") if getattr(self, name))
        return ", ".join(parts)


def _take_over_attributes(target: nn.Module, source: nn.Module, hooks: bool) -> None:
    """Copy what a module's tensors and children leave: its settings, its training mode and its hooks.

    Copying what is there, rather than calling the constructor again, keeps the global random state
    untouched and brings along settings this package does not know of. Hook tables are shared, so the handles
    that users hold still remove their hooks. What ``Module.compile`` left is bound to the source.
    """
    tables = set(vars(nn.Module())) - {"training"}
    left = {"_parameters", "_buffers", "_modules", "_compiled_call_impl", *LowRankLayer.__annotations__}
    for name, value in vars(source).items():
        if name not in left and (hooks or name not in tables):
            object.__setattr__(target, name, value)


class LowRankLinear(LowRankLayer, nn.Linear):  # type: ignore[misc, override]
    """An ``nn.Linear`` whose weight is composed from factors; see :class:`LowRankLayer`.

    Example:
        >>> from lightning_lowrank.layers import LowRankLinear, MatrixProduct
        >>> LowRankLinear.from_dense(nn.Linear(6, 4), MatrixProduct(), rank=2, role="weight").weight.shape
        torch.Size([4, 6])
    """

    _dense_class = nn.Linear


class LowRankConv2d(LowRankLayer, nn.Conv2d):  # type: ignore[misc, override]
    """An ``nn.Conv2d`` whose weight is composed from factors; see :class:`LowRankLayer`.

    Example:
        >>> from lightning_lowrank.layers import BlockKronecker, LowRankConv2d
        >>> layer = LowRankConv2d.from_dense(nn.Conv2d(8, 16, 3, padding="same"), BlockKronecker(), rank=4)
        >>> layer(torch.zeros(1, 8, 5, 5)).shape
        torch.Size([1, 16, 5, 5])
    """

    _dense_class = nn.Conv2d
