"""The settings of low-rank layers and of a conversion, each declared, documented and checked once.

:class:`LayerSettings` holds the keywords of :meth:`~lightning_lowrank.layers.LowRankLayer.from_dense`.
:class:`LowRankSettings` adds which layers of a model are converted and to which rank: the keywords of
:func:`~lightning_lowrank.layers.convert`, of the callback ``LowRank`` and of ``lowrank:`` in a YAML file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from lightning_lowrank.arguments import check_choice, check_integer, check_number, to_plain
from lightning_lowrank.layers.factorization import Factorization, HalfFrozen, MatrixProduct

Role = Literal["update", "weight"]
Init = Literal["auto", "uniform", "lora", "spectral"]
Compute = Literal["auto", "dense", "contracted"]
Allocation = Literal["uniform", "singular_values"]
BudgetRule = Literal["largest", "authors"]
BudgetUnit = Literal["share", "parameters", "bytes"]

_Number = TypeVar("_Number", int, float)


def update_scale(rank: int, alpha: float | None, rank_stabilized: bool) -> float:
    """The scale of an update: 1, α / rank or, rank-stabilized, α / √rank."""
    if alpha is None:
        return 1.0
    return alpha / math.sqrt(rank) if rank_stabilized else alpha / rank


def by_pattern(setting: _Number | Mapping[str, _Number]) -> Mapping[str, _Number]:
    """A setting as a mapping from name patterns to values; a number applies to all names."""
    return setting if isinstance(setting, Mapping) else {"*": setting}


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    r"""How a weight is factorized: the settings of one low-rank layer.

    Args:
        factorization: How a weight is factorized: ``MatrixProduct``, ``CoreProduct``, ``BlockKronecker``, ``CP``,
            ``Hadamard`` or a class of your own.
        role: ``"update"`` (default): the factors are a change to a frozen weight, :math:`W + f(U, V)`.
            ``"weight"``: they are the weight, :math:`f(U, V)`.
        decouple: Aggregation-aware decomposition, :math:`f(U, \tilde V) + f(\tilde U, V)` with fixed random
            :math:`\tilde U, \tilde V` (FedMUD, Eq. 8). The mean of the clients' weights is then the weight of
            their mean factors. Off by default.
        half_frozen: Train only :math:`V` and leave :math:`\tilde U` as it is drawn (``True`` or ``"U"``), or train
            only :math:`U` (``"V"``). The same ratio then affords a higher rank. Off by default.
        init: How the factors start. ``"uniform"``: draws from :math:`U(-a, a)`. In role ``"update"`` the update
            starts at zero: the trained factors are zero if the layer is half-frozen or decoupled, otherwise
            the factorization's ``zero_factor``. ``"lora"`` (role ``"update"``, two factors): the factor on the
            input's side is drawn as torch draws a linear layer's weight, with a = 1/√(its rows), and the other is
            zero. ``"spectral"`` (role ``"weight"``): the factorization's ``decompose`` of the weight; if
            decoupled, the fixed factors are these and the trained ones half of them, which makes the same
            weight. ``"auto"`` (default): ``"uniform"`` in role ``"update"``, ``"spectral"`` in role ``"weight"``.
        init_scale: Bound :math:`a` of the uniform draws. By default, in role ``"update"``, the one for which the
            first step of SGD changes the weight, in expectation over the draws, as it would change the dense
            layer's; in role ``"weight"``, the one for which the composed weight has the standard deviation of
            the dense one.
        alpha: LoRA's :math:`\alpha`: an update is multiplied by :math:`\alpha / \text{rank}`. ``None`` (default):
            by 1.
        rank_stabilized: Multiply by :math:`\alpha / \sqrt{\text{rank}}` instead (rsLoRA, Kalajdzievski 2023).
            Off by default.
        dropout: Probability with which numbers of a layer's input are left out of its update in training. 0 by
            default. It acts when the layer is called, not when a model reads its weight, as torchvision's Swin
            does. It has no effect on an embedding, whose input is indices. A converted layer is in training mode if
            it has dropout, also in a model in evaluation mode.
        compute: ``"dense"`` composes the weight for each batch, ``"contracted"`` applies the factors to the input
            one after another, ``"auto"`` (default) takes whichever needs fewer multiply-adds.
        train_base: Train the weight in addition to the update, in role ``"update"``, for ``FedHM``: some of its
            clients train the weight and others the factors. Off by default.

    Raises:
        TypeError: If a setting that must be a number is not one.
        ValueError: If a setting has an unknown value, or two settings exclude each other.

    Example:
        >>> LayerSettings(MatrixProduct(), decouple=True, half_frozen=True)
        Traceback (most recent call last):
            ...
        ValueError: decouple=True and half_frozen=True exclude each other: decoupling trains both factors, ...
    """

    # Not a field `_: KW_ONLY`: Python 3.10's `get_type_hints` refuses it, and the command line needs that.
    factorization: Factorization = field(kw_only=False)
    role: Role = "update"
    decouple: bool = False
    half_frozen: HalfFrozen = False
    init: Init = "auto"
    init_scale: float | None = None
    alpha: float | None = None
    rank_stabilized: bool = False
    dropout: float = 0.0
    compute: Compute = "auto"
    train_base: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, to_plain(value))
        check_choice("role", self.role, Role)
        check_choice("half_frozen", self.half_frozen, Literal[False, True, "U", "V"])
        check_choice("init", self.init, Init)
        check_choice("compute", self.compute, Compute)
        if self.decouple and self.half_frozen:
            raise ValueError(
                f"decouple=True and half_frozen={self.half_frozen!r} exclude each other: decoupling trains both "
                "factors, half-freezing one. Set one of them to False."
            )
        if self.role == "update" and self.init == "spectral":
            raise ValueError(
                'init="spectral" needs role="weight": an update starts at zero, so there is no weight to '
                'decompose. Use init="auto".'
            )
        if self.init == "lora" and (self.role == "weight" or self.decouple):
            raise ValueError(
                'init="lora" is for role="update" without decouple: it starts one factor at zero and the other at '
                'random. Use init="auto".'
            )
        for name in ("init_scale", "alpha"):
            value = getattr(self, name)
            if value is not None:
                check_number(name, value, above=0)
        if self.init_scale is not None and self.decomposes:
            raise ValueError(
                f"init_scale={self.init_scale!r} is the bound of uniform draws, and the factors start as the weight's"
                ' decomposition: set init="uniform", or leave it out.'
            )
        if self.rank_stabilized and self.alpha is None:
            raise ValueError("rank_stabilized=True divides alpha by √rank, but alpha is None; give alpha.")
        check_number("dropout", self.dropout, least=0, below=1)
        if self.role == "weight" and self.train_base:
            raise ValueError(
                'train_base=True trains the weight in addition to the update, but role is "weight", which has no'
                ' update: use role="update" or leave train_base out.'
            )
        if (self.alpha is not None or self.dropout) and (self.train_base or self.role == "weight"):
            reason = "train_base=True trains the weight too" if self.train_base else 'role is "weight"'
            raise ValueError(
                f"alpha={self.alpha!r} and dropout={self.dropout!r} act on the update of a frozen weight, "
                f'but {reason}: leave them out, or use role="update" without train_base.'
            )

    @property
    def decomposes(self) -> bool:
        """Whether the factors start as the decomposition of the weight."""
        return self.init == "spectral" or (self.init == "auto" and self.role == "weight")


@dataclass(frozen=True, kw_only=True)
class LowRankSettings(LayerSettings):
    """Which layers of a model become low-rank, at which rank, and how: the settings of a conversion.

    Give exactly one of ``budget``, ``ratio``, ``rank`` and ``rank_ratio``.

    Patterns of layers are matched case-sensitively with the wildcards of :mod:`fnmatch` against a layer's whole
    name and every run of its parts between dots: ``"encoder"`` and ``"encoder.0"`` mean all layers in these
    modules, ``"fc*"`` also ``encoder.0.fc1``. If a setting is a dictionary from patterns to values, the first
    matching pattern applies, and layers without a match stay dense.

    The settings of :class:`LayerSettings` are settings here too.

    Args:
        budget: Share of the whole model, in (0, 1]: all trained parameters after the conversion over all parameters
            before. Biases, norms and dense layers count as well as factors; parameters that were frozen before count
            with ``convert_frozen`` only.
        ratio: Share of each weight's numbers that its factors train, in (0, 1], or a dictionary from patterns.
        rank: Rank of each weight (number of blocks for ``BlockKronecker``), or a dictionary from patterns.
        rank_ratio: Rank over output channels, γ in (0, 1], or a dictionary from patterns. The rank is γ·channels,
            rounded to the nearest integer and at least 1 (FedHM, Yao et al. 2021). A layer with many more outputs than
            inputs, such as 512×24, may have no such rank and stays dense: give it a smaller γ, or use ``ratio``.
        budget_unit: ``"share"`` (default), or ``budget`` is a number of ``"parameters"`` or ``"bytes"``.
        budget_rule: How ``budget`` becomes one ratio for all layers. ``"largest"`` (default): the largest whose
            total fits the budget. ``"authors"``: start at the budget and lower the ratio in steps of 0.001 until
            the model's share is at most the budget + 0.001, as in FedMUD's released code.
        allocation: How ``budget`` is divided. ``"uniform"`` (default): one ratio for all layers.
            ``"singular_values"`` (``MatrixProduct`` only): one rank after another goes to the layer where the next
            singular value explains most per parameter: its square, as a share of the layer's sum of squares.
        include: Patterns of the layers to convert. All by default.
        exclude: Patterns of layers that stay dense. None by default.
        skip: ``"first"`` and ``"last"``: the first and the last convertible layer, in registration order, stay
            dense. Empty by default.
        allow_larger: Convert also layers whose factors are no fewer numbers than their weight, in role ``"update"``
            with a matrix product even at a rank that no such weight has. Off by default. Layers that ``freeze_rest``
            would freeze are converted all the same; a rank above the largest possible one becomes the largest.
        convert_frozen: Convert also layers whose weight is frozen (``requires_grad=False``), as for LoRA on a base that
            was frozen by hand. Off by default: frozen layers stay dense and frozen.
        freeze_rest: Freeze every parameter except the factors and, with ``train_base``, the weights that they
            update. Biases are frozen too. No layer stays dense for its size, see ``allow_larger``. Off by default.
        keep_trained: Patterns of parameter names that ``freeze_rest`` leaves trained, such as ``["classifier"]`` for
            the new head of a pretrained model. None by default. The weight of a converted layer is frozen all the
            same; name the layer in ``exclude`` to train it whole. In a model of 16 bits, modules whose parameters are
            all kept, children's included, become float32 with their buffers, as the factors are. Other kept parameters
            keep their type.

    Raises:
        TypeError: If a setting is of another type, such as a string for a list of patterns.
        ValueError: If a setting is out of range, or settings exclude each other.

    Example:
        >>> LowRankSettings(MatrixProduct(), rank=2, ratio=0.5)
        Traceback (most recent call last):
            ...
        ValueError: exactly one of rank, rank_ratio, ratio and budget must be given, but rank and ratio are.
    """

    budget: float | None = None
    ratio: float | dict[str, float] | None = None
    rank: int | dict[str, int] | None = None
    rank_ratio: float | dict[str, float] | None = None
    budget_unit: BudgetUnit = "share"
    budget_rule: BudgetRule = "largest"
    allocation: Allocation = "uniform"
    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    skip: Sequence[Literal["first", "last"]] | None = None
    allow_larger: bool = False
    convert_frozen: bool = False
    freeze_rest: bool = False
    keep_trained: Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_size()
        for name in ("include", "exclude", "skip", "keep_trained"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise TypeError(f"{name} must be a list of strings, such as [{value!r}], but is {value!r}.")
            if value is not None:
                object.__setattr__(self, name, list(value))
        unknown = sorted(set(self.skip or ()) - {"first", "last"})
        if unknown:
            raise ValueError(f'skip may hold "first" and "last", but holds {unknown}; name other layers in exclude.')
        if self.keep_trained and not self.freeze_rest:
            raise ValueError(
                f"keep_trained={self.keep_trained!r} lists exceptions from freeze_rest: set freeze_rest=True, or leave"
                " keep_trained out to train everything."
            )

    def _check_size(self) -> None:
        sizes = {name: getattr(self, name) for name in ("rank", "rank_ratio", "ratio", "budget")}
        given = [name for name, value in sizes.items() if value is not None]
        if len(given) != 1:
            raise ValueError(
                f"exactly one of rank, rank_ratio, ratio and budget must be given, but {' and '.join(given) or 'none'} "
                f"{'are' if len(given) > 1 else 'is'}."
            )
        (name,) = given
        check_choice("budget_unit", self.budget_unit, BudgetUnit)
        check_choice("budget_rule", self.budget_rule, BudgetRule)
        check_choice("allocation", self.allocation, Allocation)
        plain = (self.budget_unit, self.allocation) == ("share", "uniform")
        if name != "budget" and not (plain and self.budget_rule == "largest"):
            raise ValueError(
                f"budget_unit={self.budget_unit!r}, budget_rule={self.budget_rule!r} and"
                f" allocation={self.allocation!r} divide a budget, but {name} is given instead; give budget, or leave"
                " them out."
            )
        if name == "budget" and self.train_base:
            raise ValueError(
                f"budget={self.budget} bounds all trained parameters, and train_base=True trains the weights in"
                " addition to their factors: give rank, rank_ratio or ratio instead, or leave train_base out."
            )
        if self.allocation == "singular_values" and not isinstance(self.factorization, MatrixProduct):
            raise ValueError(
                'allocation="singular_values" needs a MatrixProduct, whose rank is a number of singular values, but '
                f"factorization is {self.factorization!r}."
            )
        if self.budget_rule == "authors" and not plain:
            raise ValueError(
                'budget_rule="authors" lowers one ratio for all layers: it needs budget_unit="share" and '
                'allocation="uniform".'
            )
        for pattern, value in by_pattern(sizes[name]).items():
            place = "" if pattern == "*" else f"[{pattern!r}]"
            if name == "rank":
                check_integer(f"rank{place}", value)
            elif name == "budget" and self.budget_unit != "share":
                check_number(f"budget in {self.budget_unit}", value, least=1)
            else:
                check_number(f"{name}{place}", value, above=0, most=1)
