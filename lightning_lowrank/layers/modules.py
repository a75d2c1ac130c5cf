"""Layers whose weight is a few small tensors.

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

In FedMUD (Li et al., ICML 2025) role ``"update"`` is Eq. 3, and decoupling is AAD, Eq. 8. LoRA (Hu et al.,
2022) is role ``"update"`` with a matrix product, ``init="lora"`` and ``alpha``; FFA-LoRA freezes the factor on
the input's side besides.

Each layer computes in one of two ways, equal to rounding: the *dense* way composes the weight and calls
torch's function with it; the *contracted* way applies one factor after another to the input and never builds
the weight. ``compute="auto"`` counts the multiply-adds of both for the input at hand and takes the fewer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_lowrank.layers.factorization import Factorization, HalfFrozen
from lightning_lowrank.seeding import generator

__all__ = [
    "Compute",
    "Init",
    "LowRankEmbedding",
    "LowRankLayer",
    "LowRankLinear",
    "Role",
]

Role = Literal["update", "weight"]
Init = Literal["auto", "uniform", "lora", "spectral"]
Compute = Literal["auto", "dense", "contracted"]
Active = Literal["both", "base", "factors"]

_REMEMBERED_CASES = 256

_Layer = TypeVar("_Layer", bound="LowRankLayer")


def check_settings(
    role: str = "update",
    decouple: bool = False,
    half_frozen: HalfFrozen = False,
    init: str = "auto",
    init_scale: float | None = None,
    alpha: float | None = None,
    rank_stabilized: bool = False,
    dropout: float = 0.0,
    compute: str = "auto",
    train_base: bool = False,
) -> None:
    """Refuse settings that no low-rank layer can have; the arguments are those of ``from_dense``."""
    for name, value, allowed in (
        ("role", role, ("update", "weight")),
        ("half_frozen", half_frozen, (False, True, "U", "V")),
        ("init", init, ("auto", "uniform", "lora", "spectral")),
        ("compute", compute, ("auto", "dense", "contracted")),
    ):
        if value not in allowed:
            *others, last = (f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in allowed)
            raise ValueError(f"{name} must be {', '.join(others)} or {last}, but is {value!r}.")
    if decouple and half_frozen:
        raise ValueError(
            f"decouple=True and half_frozen={half_frozen!r} exclude each other: decoupling trains both factors, "
            "half-freezing one. Set one of them to False."
        )
    if role == "update" and init == "spectral":
        raise ValueError(
            'init="spectral" needs role="weight": an update starts at zero, so there is no weight to '
            'decompose. Use init="auto".'
        )
    if init == "lora" and (role == "weight" or decouple):
        raise ValueError(
            'init="lora" is for role="update" without decouple: it starts one factor at zero and the other at '
            'random. Use init="auto".'
        )
    if init_scale is not None and not (init_scale > 0 and math.isfinite(init_scale)):
        raise ValueError(f"init_scale must be a finite number above 0 or None, but is {init_scale!r}.")
    if alpha is not None and not (alpha > 0 and math.isfinite(alpha)):
        raise ValueError(f"alpha must be a finite number above 0 or None, but is {alpha!r}.")
    if rank_stabilized and alpha is None:
        raise ValueError("rank_stabilized=True divides alpha by √rank, but alpha is None; give alpha.")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, but is {dropout!r}.")
    if role == "weight" and train_base:
        raise ValueError(
            'train_base=True trains the weight beside the update, and role is "weight", without any: use '
            'role="update" or leave it out.'
        )
    if train_base and (alpha is not None or dropout):
        raise ValueError(
            f"train_base=True trains the weight or the update, and alpha={alpha!r} and dropout={dropout!r} act on the "
            "update alone; leave them out."
        )
    if role == "weight" and (alpha is not None or dropout):
        raise ValueError(
            f'alpha={alpha!r} and dropout={dropout!r} act on the change to a frozen weight, and role is "weight"; '
            'leave them out or use role="update".'
        )


def update_scale(rank: int, alpha: float | None, rank_stabilized: bool) -> float:
    """Return what an update is multiplied by: 1, α / rank or, rank-stabilised, α / √rank."""
    if alpha is None:
        return 1.0
    return alpha / math.sqrt(rank) if rank_stabilized else alpha / rank


def combine(
    factorization: Factorization,
    shape: tuple[int, ...],
    factors: Mapping[str, Tensor],
    fixed: Mapping[str, Tensor],
    decouple: bool,
) -> Tensor:
    """Compose trained and fixed factors into a dense tensor, as the table in this module's docstring says."""
    first, *others = terms(factors, fixed, decouple)
    composed = factorization.compose(first, shape)
    for term in others:
        composed = composed + factorization.compose(term, shape)
    return composed


def terms(
    factors: Mapping[str, Tensor] | nn.ParameterDict, fixed: Mapping[str, Tensor] | nn.ParameterDict, decouple: bool
) -> list[dict[str, Tensor]]:
    """Return the complete sets of factors whose composed weights add up: one, or two where decoupled."""
    if decouple:
        return [{"U": factors["U"], "V": fixed["V"]}, {"U": fixed["U"], "V": factors["V"]}]
    return [{**fixed, **factors}]


class LowRankLayer(nn.Module):
    """What low-rank layers of every kind share; built from a dense layer with :meth:`from_dense`.

    ``weight`` is a property that composes the dense weight each time it is read, so everything in torch that
    reads a layer's weight sees the effective one. Changing the tensor it returns changes nothing: the layer's
    numbers are in these parameters.

    - ``frozen_weight``: the weight before the update (role ``"update"`` only), not trained unless ``train_base``
      is set.
    - ``factors``: the trained factors, by name.
    - ``fixed``: the factors that are never trained: the frozen one where half is, both where decoupled.
    - ``bias``: the dense layer's own.

    ``U`` stands with the first dimension of the dense layer's weight and ``V`` with the second. In a linear
    layer and a convolution these are output and input; a transposed convolution, an embedding and
    transformers' ``Conv1D`` hold their weight the other way around.

    Attributes:
        factorization: How the factors stand for the weight.
        weight_shape: The dense weight's shape.
        rank: The factors' rank.
        role: ``"update"`` or ``"weight"``.
        decouple: Whether the layer is decoupled (AAD).
        half_frozen: Which factor is frozen; ``True`` means ``"U"``.
        init_scale: The ``a`` of the uniform draws U(−a, a) of :meth:`reset_factors`.
        zero_factors: The factors that :meth:`reset_factors` sets to zero.
        alpha: LoRA's α, if there is one.
        rank_stabilized: Whether α is divided by √rank.
        scale: What the update is multiplied by.
        dropout: Probability with which an input number is left out of the update in training.
        compute: ``"auto"``, ``"dense"`` or ``"contracted"``.
        active: What the layer computes with: the update and the weight before it (``"both"``), or one of them, as
            if the other were zero; only where the other *is* zero does the layer compute what ``weight`` says.
        trainable: Whether the dense layer's weight was trainable, as it is again in :meth:`to_dense`.
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
    active: Active
    trainable: bool
    _contracted: dict[tuple[Any, ...], bool]

    def __init__(self, *arguments: object, **keywords: object) -> None:
        raise TypeError(
            f"{type(self).__name__} is built from a dense layer: use {type(self).__name__}.from_dense(...)."
        )

    @classmethod
    def why_not(cls, module: nn.Module, factorization: Factorization) -> str:
        """Say what keeps a module from becoming a layer of this class, or return an empty string.

        Args:
            module: Any module.
            factorization: How factors are to stand for its weight.
        """
        if type(module) not in cls.dense_classes:
            names = " or ".join(f"nn.{kind.__name__}" for kind in cls.dense_classes[:1])
            return f"{type(module).__name__} is not exactly {names}"
        if "forward" in vars(module):
            return "its forward is replaced on the instance"
        if set(module._parameters) - {"bias"} != {"weight"} or module._buffers or module._modules:
            return "it holds other tensors than weight and bias (weight normalisation, for example)"
        if not module.get_parameter("weight").is_floating_point():
            return f"its weight is of type {module.get_parameter('weight').dtype}"
        return ""

    @classmethod
    def from_dense(
        cls: type[_Layer],
        module: nn.Module,
        factorization: Factorization,
        rank: int,
        *,
        role: Role = "update",
        decouple: bool = False,
        half_frozen: HalfFrozen = False,
        init: Init = "auto",
        init_scale: float | None = None,
        alpha: float | None = None,
        rank_stabilized: bool = False,
        dropout: float = 0.0,
        compute: Compute = "auto",
        train_base: bool = False,
        seed: int = 0,
    ) -> _Layer:
        """Build the low-rank layer that takes a dense layer's place.

        The new layer takes over the dense layer's settings, hooks, training mode, device, dtype and its
        bias, the same :class:`~torch.nn.Parameter`. In role ``"update"`` it also takes over the weight
        Parameter and freezes it, so the dense layer should not be used further.

        Args:
            module: A layer of the kind that the class is for; not a subclass of it.
            factorization: How the factors stand for the weight.
            rank: The rank.
            role: ``"update"`` (default) freezes the weight and adds the factors' product to it;
                ``"weight"`` puts the product in the weight's place.
            decouple: Train ``f(U, Ṽ) + f(Ũ, V)`` (AAD) in place of ``f(U, V)``. Off by default.
            half_frozen: Which factor stays as it is drawn: ``"U"`` or ``True``, or ``"V"``. None by default.
            init: How the factors start. ``"uniform"``: draws from U(−a, a). In role ``"update"`` what would
                make the update differ from zero is zero instead: the trained factor where half is frozen, both
                with ``decouple``, else the factorization's own choice, ``V``. ``"lora"`` (role ``"update"``,
                two factors): the factor on the input's side as torch draws a linear layer's weight, U(−a, a)
                with a = 1/√(its rows), the other zero. ``"spectral"`` (role ``"weight"`` only): from the
                weight, by :meth:`Factorization.decompose`; with ``decouple`` the fixed factors are the spectral
                ones and the trained ones half of them, which makes the same weight. ``"auto"`` (default):
                ``"uniform"`` in role ``"update"``, ``"spectral"`` in role ``"weight"``.
            init_scale: The ``a`` of the uniform draws. By default, in role ``"update"``, the one for which
                the first step of SGD changes the weight, in expectation over the draws, as it would the
                dense layer's; in role ``"weight"`` the one that gives the composed weight the standard
                deviation of the dense one. (With ``decouple`` two terms add up: both are the factorization's
                defaults with that taken into account.)
            alpha: LoRA's α: the update is multiplied by α / rank. ``None`` (default) leaves it as it is.
            rank_stabilized: Multiply by α / √rank in place of α / rank (rsLoRA, Kalajdzievski 2023). Off by
                default.
            dropout: Probability with which numbers of the input are left out of the update, and of nothing
                else, in training. 0 by default. It acts where the layer is called, not where a model reads
                its weight, as torchvision's Swin does.
            compute: ``"dense"`` composes the weight for each batch, ``"contracted"`` applies the factors to
                the input one after another, ``"auto"`` (default) takes what needs fewer multiply-adds.
            train_base: Train the weight beside the update, in role ``"update"``: what methods need whose clients
                train one or the other. Off by default.
            seed: Seed of the uniform draws.

        Raises:
            TypeError: If ``module`` is of another class, or its weight is not a plain floating-point
                Parameter.
            ValueError: If the weight cannot have this rank, a setting has an unknown value or does not go
                with another one, ``compute="contracted"`` where the factorization has no such form, or the
                dense weight is constant and is to set the scale of uniform draws.

        Example:
            >>> from lightning_lowrank.layers import LowRankLinear, MatrixProduct
            >>> dense = nn.Linear(6, 4)
            >>> layer = LowRankLinear.from_dense(dense, MatrixProduct(), rank=2, decouple=True)
            >>> torch.equal(layer.weight, dense.weight)
            True
            >>> sorted(name for name, p in layer.named_parameters() if p.requires_grad)
            ['bias', 'factors.U', 'factors.V']
        """
        reason = cls.why_not(module, factorization)
        if reason:
            raise TypeError(f"module cannot become a {cls.__name__}: {reason}.")
        check_settings(
            role, decouple, half_frozen, init, init_scale, alpha, rank_stabilized, dropout, compute, train_base
        )
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        shape = tuple(weight.shape)
        factorization.check_rank(shape, rank, half_frozen)
        shapes = factorization.factor_shapes(shape, rank)
        trained = factorization.trained_factors(shape, half_frozen)
        fixed = factorization.fixed_factors(shape, decouple, half_frozen)
        if init == "lora" and not factorization.bilinear(shape):
            raise ValueError(f'init="lora" needs two factors, and {factorization!r} has {", ".join(shapes)}.')

        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        take_over_attributes(layer, module, hooks=True)
        layer.dense_class = type(module)
        layer.factorization = factorization
        layer.weight_shape = shape
        layer.rank = rank
        layer.role = role
        layer.decouple = decouple
        layer.half_frozen = half_frozen
        layer.alpha, layer.rank_stabilized = alpha, rank_stabilized
        layer.scale = layer.scale_at(rank)
        layer.dropout = dropout
        layer.compute = compute
        layer.active = "both"
        layer.trainable = weight.requires_grad
        layer._contracted = {}
        if compute == "contracted" and not layer._can_contract():
            raise ValueError(
                f'compute="contracted" is not possible: {factorization!r} has no contracted form for a '
                f'{layer.dense_class.__name__} with a weight of shape {shape}. Use compute="auto".'
            )
        layer.zero_factors = layer._choose_zero_factors(init, trained)
        if init_scale is not None:
            layer.init_scale = float(init_scale)
        elif init == "lora":
            layer.init_scale = 1 / math.sqrt(
                next(rows for name, (rows, *_) in shapes.items() if name not in layer.zero_factors)
            )
        else:
            layer.init_scale = layer._default_init_scale(weight)

        if role == "update":
            layer.register_parameter("frozen_weight", weight)
        if "bias" in module._parameters:
            layer.register_parameter("bias", module._parameters["bias"])
        layer.register_buffer("merged_weight", None, persistent=False)
        layer.factors = nn.ParameterDict({name: nn.Parameter(weight.new_zeros(shapes[name])) for name in trained})
        layer.fixed = nn.ParameterDict(
            {name: nn.Parameter(weight.new_zeros(shapes[name]), requires_grad=False) for name in fixed}
        )
        if init == "spectral" or (init == "auto" and role == "weight"):
            layer._decompose(weight)
        else:
            layer.reset_factors(seed)
        if role == "update" and not train_base:
            weight.requires_grad_(False)
            weight.grad = None
        return layer

    def _choose_zero_factors(self, init: Init, trained: tuple[str, ...]) -> tuple[str, ...]:
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

    @torch.no_grad()
    def _decompose(self, weight: Tensor) -> None:
        for name, value in self.factorization.decompose(weight, self.rank).items():
            if name in self.fixed:
                self.fixed[name].copy_(value)
            if name in self.factors:
                self.factors[name].copy_(value / 2 if self.decouple else value)

    @property
    def weight(self) -> Tensor:
        """The effective dense weight, composed anew unless the layer is merged."""
        if self.merged_weight is not None:
            return self.merged_weight
        if self.role == "update":
            return self.frozen_weight + self.update()
        return self.update()

    def scale_at(self, rank: int) -> float:
        """Return what the update would be multiplied by if its factors had another rank.

        Args:
            rank: The rank.
        """
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
        composed = combine(self.factorization, self.weight_shape, factors, dict(self.fixed.items()), self.decouple)
        return composed if self.scale == 1 else composed * self.scale

    @torch.no_grad()
    def fold(self, factors: Mapping[str, Tensor] | None = None) -> None:
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
                'fold needs a layer of role="update", which has a frozen weight to add to; this one has '
                f"role={self.role!r}."
            )
        self.unmerge()
        self.frozen_weight.add_(self.update(factors))

    @torch.no_grad()
    def merge(self) -> None:
        """Compose the weight once and keep it, so that the layer costs what the dense one does.

        The factors and the frozen weight stay as they are, so :meth:`unmerge` restores the layer bit for bit
        and state dicts are the same as before. A merged layer does not train: ``train()``, loading a state dict,
        :meth:`fold` and :meth:`reset_factors` unmerge it.
        """
        self.unmerge()
        self.merged_weight = self.weight.detach().clone()

    def unmerge(self) -> None:
        """Compose the weight anew at each use again."""
        self.merged_weight = None

    def train(self: _Layer, mode: bool = True) -> _Layer:
        """Set the training mode; training unmerges the layer.

        Args:
            mode: Whether to train.
        """
        if mode:
            self.unmerge()
        return super().train(mode)

    def _load_from_state_dict(self, *arguments: Any, **keywords: Any) -> None:
        self.unmerge()
        super()._load_from_state_dict(*arguments, **keywords)

    @torch.no_grad()
    def reset_factors(self, seed: int) -> None:
        """Draw the factors anew, trained and fixed, in place, as ``init="uniform"`` and ``"lora"`` do.

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
        self.unmerge()
        for table, values in (("factors", self.factors), ("fixed", self.fixed)):
            for name, factor in values.items():
                if table == "factors" and name in self.zero_factors:
                    factor.zero_()
                else:
                    draw = torch.empty(factor.shape, dtype=torch.float32)
                    draw.uniform_(-self.init_scale, self.init_scale, generator=generator(seed, table, name))
                    factor.copy_(draw)

    def reset_parameters(self) -> None:
        """Refuse: torch's hook for global re-initialisation would change nothing here.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no weight of its own to reset; use reset_factors(seed) for the "
            "factors, or reset the parameters before conversion."
        )

    @torch.no_grad()
    def to_dense(self, *, hooks: bool = False) -> nn.Module:
        """Return the plain layer with the effective weight, a new Parameter, trainable if the dense one was.

        The bias is the same Parameter as this layer's.

        Args:
            hooks: Whether the dense layer takes over this layer's hooks, as it should if it takes its place.
                Off by default.
        """
        dense = self.dense_class.__new__(self.dense_class)
        nn.Module.__init__(dense)
        take_over_attributes(dense, self, hooks)
        dense.register_parameter("weight", nn.Parameter(self.weight.clone(), self.trainable))
        if "bias" in self._parameters:
            dense.register_parameter("bias", self._parameters["bias"])
        return dense

    def forward(self, input: Tensor, *geometry: Any) -> Tensor:
        """Compute what the dense layer with the effective weight would.

        Args:
            input: As for the dense layer.
            *geometry: Further arguments of the dense layer's forward (``output_size`` of a transposed
                convolution).
        """
        bias = self._parameters.get("bias")
        if self.merged_weight is not None:
            return self._apply_dense(input, self.merged_weight, bias, *geometry)
        if self.active == "base":
            return self._apply_dense(input, self.frozen_weight, bias, *geometry)
        contracts = self.contracts(input, *geometry)
        dropout = self.dropout if self.training else 0.0
        if not contracts and not dropout:
            weight = self.weight if self._adds_to_base else self.update()
            return self._apply_dense(input, weight, bias, *geometry)
        dropped = F.dropout(input, dropout) if dropout else input
        own_bias = None if self._adds_to_base else bias
        if contracts:
            first, *others = terms(self.factors, self.fixed, self.decouple)
            change = self._apply_factors(dropped, first, own_bias, *geometry)
            for term in others:
                change = change + self._apply_factors(dropped, term, None, *geometry)
        else:
            change = self._apply_dense(dropped, self.update(), own_bias, *geometry)
        if not self._adds_to_base:
            return change
        base = self._apply_dense(input, self.frozen_weight, bias, *geometry)
        return torch.add(base, change, alpha=self.scale if contracts else 1)

    @property
    def _adds_to_base(self) -> bool:
        return self.role == "update" and self.active == "both"

    def contracts(self, input: Tensor, *geometry: Any) -> bool:
        """Say whether the layer computes the contracted way for this input.

        With ``compute="auto"`` the multiply-adds of the forward pass are compared and, where gradients are
        recorded, those of the backward pass besides: a gradient of the composed weight, which the contracted
        way does not need, costs as much as the layer itself.

        Args:
            input: An input of the layer.
            *geometry: Further arguments of ``forward``.
        """
        if self.compute != "auto":
            return self.compute == "contracted"
        # Counting takes as long as the products of a small layer.
        case = (input.shape, torch.is_grad_enabled(), input.requires_grad, self.rank, self.active, repr(geometry))
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
        sets = 2 if self.decouple else 1
        if not torch.is_grad_enabled():
            return sets * (first + rest) + base < product + sets * composing
        through_input = int(input.requires_grad)
        dense = (2 + through_input) * product + sets * 3 * composing
        contracted = sets * ((2 + through_input) * first + 3 * rest) + (1 + through_input) * base
        return contracted < dense

    def multiply_adds(self, input: Tensor, *geometry: Any) -> int:
        """Return the multiply-adds of the forward pass for this input, the way the layer computes it.

        Composing the weight, which happens once a batch, is not among them.

        Args:
            input: An input of the layer.
            *geometry: Further arguments of ``forward``.
        """
        product, first, rest = self._multiply_adds(input, *geometry)
        if self.merged_weight is not None or self.active == "base" or not self.contracts(input, *geometry):
            return product
        return (first + rest) * (2 if self.decouple else 1) + (product if self._adds_to_base else 0)

    def _can_contract(self) -> bool:
        raise NotImplementedError

    def _multiply_adds(self, input: Tensor, *geometry: Any) -> tuple[int, int, int]:
        """Count multiply-adds: of the dense product, and of one set of factors' first product and the others.

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
        """Describe the dense layer, then what is low-rank about it."""
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


def take_over_attributes(target: nn.Module, source: nn.Module, hooks: bool) -> None:
    """Copy what a module's tensors and children leave: its settings, its training mode and its hooks.

    Copying what is there, rather than calling the constructor again, keeps the global random state
    untouched and brings along settings this package does not know of. Hook tables are shared, so the handles
    that users hold still remove their hooks. What ``Module.compile`` left is bound to the source.
    """
    tables = set(vars(nn.Module())) - {"training"}
    left = {"_parameters", "_buffers", "_non_persistent_buffers_set", "_modules", "_compiled_call_impl"}
    if isinstance(source, LowRankLayer):
        left |= LowRankLayer.__annotations__.keys()
    for name, value in vars(source).items():
        if name not in left and (hooks or name not in tables):
            object.__setattr__(target, name, value)


class _LowRankProjection(LowRankLayer):
    """What layers share that multiply the last dimension by a matrix."""

    def _can_contract(self) -> bool:
        return self.factorization.multiply_adds(self.weight_shape, self.rank) is not None

    def _multiply_adds(self, input: Tensor, *geometry: Any) -> tuple[int, int, int]:
        positions = math.prod(input.shape[:-1])
        each = self.factorization.multiply_adds(self.weight_shape, self.rank) or 0
        stages = self.factorization.stage_shapes(self.weight_shape, self.rank)
        first = math.prod(stages[-1 if self.first_is_input else 0].kernel) if stages else 0
        return positions * math.prod(self.weight_shape), positions * first, positions * (each - first)

    def _apply_dense(self, input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
        return F.linear(input, weight.mT if self.first_is_input else weight, bias)

    def _apply_factors(
        self, input: Tensor, factors: Mapping[str, Tensor], bias: Tensor | None, *geometry: Any
    ) -> Tensor:
        return self.factorization.multiply(input, factors, self.weight_shape, self.first_is_input, bias)


class LowRankLinear(_LowRankProjection, nn.Linear):  # type: ignore[misc, override]
    """An ``nn.Linear`` whose weight is composed from factors; see :class:`LowRankLayer`.

    Example:
        >>> from lightning_lowrank.layers import LowRankLinear, MatrixProduct
        >>> LowRankLinear.from_dense(nn.Linear(6, 4), MatrixProduct(), rank=2, role="weight").weight.shape
        torch.Size([4, 6])
    """

    dense_classes = (nn.Linear, NonDynamicallyQuantizableLinear)


class LowRankEmbedding(LowRankLayer, nn.Embedding):  # type: ignore[override]
    """An ``nn.Embedding`` whose table is composed from factors; see :class:`LowRankLayer`.

    The contracted way looks up rows of ``U`` and multiplies only these. ``U`` stands with the rows. Its row for
    ``padding_idx`` is zero and stays so: an update leaves the padding as it is, and a weight has zeros there.

    Example:
        >>> from lightning_lowrank.layers import LowRankEmbedding, MatrixProduct
        >>> table = LowRankEmbedding.from_dense(nn.Embedding(1000, 16), MatrixProduct(), rank=4)
        >>> table(torch.tensor([[1, 2, 999]])).shape
        torch.Size([1, 3, 16])
    """

    dense_classes = (nn.Embedding,)
    first_is_input = True

    @classmethod
    def why_not(cls, module: nn.Module, factorization: Factorization) -> str:
        """Say what keeps a module from becoming a layer of this class, or return an empty string.

        Args:
            module: Any module.
            factorization: How factors are to stand for its weight.
        """
        reason = super().why_not(module, factorization)
        if reason:
            return reason
        assert isinstance(module, nn.Embedding)
        if module.max_norm is not None:
            return "max_norm changes its weight in the forward pass"
        if module.sparse or module.scale_grad_by_freq:
            return "its gradient is of a special kind (sparse or scale_grad_by_freq)"
        if module.padding_idx is not None and factorization.stage_shapes(tuple(module.weight.shape), 1) is None:
            return f"{factorization!r} has no factor with a row for padding_idx={module.padding_idx}"
        return ""

    def _decompose(self, weight: Tensor) -> None:
        super()._decompose(weight)
        self._clear_padding()

    def reset_factors(self, seed: int) -> None:
        """Draw the factors anew, as every low-rank layer does; the padding's row of the product is zero.

        Args:
            seed: The seed.
        """
        super().reset_factors(seed)
        self._clear_padding()

    @torch.no_grad()
    def _clear_padding(self) -> None:
        """Zero the rows of ``U`` (or ``U1`` and ``U2``) that stand for the padding, which gradients never reach."""
        if self.padding_idx is not None:
            for name, factor in (*self.factors.items(), *self.fixed.items()):
                if name.startswith("U"):
                    factor[self.padding_idx] = 0

    def _can_contract(self) -> bool:
        return self.factorization.stage_shapes(self.weight_shape, self.rank) is not None

    def _multiply_adds(self, input: Tensor, *geometry: Any) -> tuple[int, int, int]:
        stages = self.factorization.stage_shapes(self.weight_shape, self.rank) or ()
        return 0, 0, input.numel() * sum(math.prod(stage.kernel) for stage in stages[:-1])

    def _apply_dense(self, input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
        # Autocast composes in half precision, and torch's embedding gives its table's own.
        return F.embedding(input, weight, self.padding_idx).to(self._dtype)

    def _apply_factors(
        self, input: Tensor, factors: Mapping[str, Tensor], bias: Tensor | None, *geometry: Any
    ) -> Tensor:
        *others, rows = self.factorization.stages(factors, self.weight_shape)
        output = F.embedding(input, rows)
        for kernel in reversed(others):
            output = output @ kernel
        if self.padding_idx is not None:
            output = torch.where((input == self.padding_idx).unsqueeze(-1), output.detach(), output)
        return output.to(self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return next(iter(self.factors.values())).dtype
