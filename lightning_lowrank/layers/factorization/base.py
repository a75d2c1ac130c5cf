r"""Base class of factorizations, which compose a weight from a few small tensors.

A :class:`Factorization` has no tensors, only the choice of a form. It computes, for a weight of a given
shape: which factors belong to a rank, which rank a share of trainable numbers allows, what dense weight the
factors make (`compose`), which factors come nearest to a given weight (`decompose`), and how to apply the
weight to an input without building it (`multiply`, `stages`).

A weight's shape is (dim0, dim1, \*kernel), as it is stored: output then input channels for linear layers and
convolutions, the other way round for transposed convolutions. Either way ``U`` belongs to dim0 and ``V``
to dim1.

The two modifiers of a low-rank layer need a form that is *bilinear*: two factors ``U`` and ``V``, and a weight
``f(U, V)`` that is linear in each. A *half-frozen* layer trains one of them, and a *decoupled* layer trains
``f(U, Ṽ) + f(Ũ, V)`` with fixed ``Ũ`` and ``Ṽ``. Both are linear in the trained factors, so that the mean of the
clients' factors composes the mean of their weights.

"FedMUD" throughout is Li et al., The Panaceas for Improving Low-Rank Decomposition in
Communication-Efficient Federated Learning, ICML 2025.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowrank.registry import subclasses_by_name

HalfFrozen = bool | Literal["U", "V"]
"""Which of the factors ``U`` and ``V`` is drawn and never trained; ``True`` means ``"U"``."""


class Stage(NamedTuple):
    r"""One convolution (or matrix product) of the chain that applies a weight factor by factor.

    Attributes:
        kernel: The kernel's shape, (output channels, input channels per group, \*kernel size).
        groups: The number of groups the channels are split into.
    """

    kernel: tuple[int, ...]
    groups: int


def frozen_factor(half_frozen: HalfFrozen) -> Literal["U", "V"] | None:
    """Name of the factor that ``half_frozen`` freezes, or ``None``; any other value is refused."""
    if isinstance(half_frozen, bool):
        return "U" if half_frozen else None
    if half_frozen not in ("U", "V"):
        raise ValueError(f'half_frozen must be False, True, "U" or "V", but is {half_frozen!r}.')
    return half_frozen


def ceil(value: float) -> int:
    """Round up, except if the value exceeds an integer by rounding noise only."""
    nearest = round(value)
    return nearest if math.isclose(value, nearest, rel_tol=1e-12) else math.ceil(value)


def working_precision(weight: Tensor) -> Tensor:
    """The weight's values, detached, in single precision or higher."""
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32))


def check_two_dimensions(shape: Sequence[int]) -> None:
    """Raise if the shape has fewer than two dimensions."""
    if len(shape) < 2:
        raise ValueError(
            f"shape must have at least two dimensions, but is {tuple(shape)}; BlockKronecker takes any shape."
        )


class Factorization(ABC):
    """A factorization represents one weight by a few factors, mostly ``U`` and ``V``.

    A subclass is a plain class whose ``__init__`` takes simple arguments and keeps each one under its own
    name. It is registered by being defined, compares and prints by its arguments, and can be written
    to a checkpoint with :meth:`to_dict`. :func:`lightning_lowrank.testing.check_factorization` checks whether
    it keeps the contract that the layers rely on.

    The search for a budget relies on this: the numbers trained at ``rank_for_ratio(shape, ratio)``, together
    with those of one more factorization of rank 1 (``trained_numbers(shape, 1)``), are at least ``ratio``
    times the weight's numbers.

    Arguments have the same meaning in all methods:

    - ``shape``: the weight's shape.
    - ``rank``: an integer that :meth:`check_rank` accepts.
    - ``ratio``: trained numbers over the weight's numbers, above 0.
    - ``half_frozen``: which factor is drawn and never trained, if any. The same ratio then affords a higher
      rank. It needs a :meth:`bilinear` form; elsewhere it is a ``ValueError``, and so is ``decouple``.
    - ``factors``: all factors by name, shaped as :meth:`factor_shapes` says.
    - ``std``: the standard deviation of the dense weight's numbers.
    """

    any_rank: ClassVar[bool] = False
    """Whether there are factors of ranks above :meth:`max_rank` too, for an update. They express nothing more."""

    @abstractmethod
    def rank_for_ratio(self, shape: Sequence[int], ratio: float, half_frozen: HalfFrozen = False) -> int:
        """The rank at which the trained factors are about a share ``ratio`` of the weight.

        Returns:
            A rank between 1 and :meth:`max_rank`.

        Raises:
            ValueError: If ``ratio`` is not positive, or needs more than :meth:`max_rank`.
        """

    @abstractmethod
    def max_rank(self, shape: Sequence[int], half_frozen: HalfFrozen = False) -> int:
        """The rank at which the factors can express every weight."""

    @abstractmethod
    def factor_shapes(self, shape: Sequence[int], rank: int) -> dict[str, tuple[int, ...]]:
        """The factors' shapes by name, in a fixed order."""

    @abstractmethod
    def compose(self, factors: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        """The dense weight that the factors represent.

        It is made of tensor operations only, so that it can be differentiated and mapped over a leading
        dimension with :func:`torch.func.vmap`.

        Returns:
            A tensor of shape ``shape`` with the factors' dtype and device.
        """

    def compose_sum(self, terms: Sequence[Mapping[str, Tensor]], shape: Sequence[int]) -> Tensor:
        """The sum of the dense weights of several sets of factors, as a decoupled update has two."""
        first, *others = (self.compose(factors, shape) for factors in terms)
        return sum(others, start=first)

    @abstractmethod
    def compose_multiply_adds(self, shape: Sequence[int], rank: int) -> int:
        """Number of multiplications (with or without an addition) in :meth:`compose`."""

    @abstractmethod
    def decompose(self, weight: Tensor, rank: int) -> dict[str, Tensor]:
        """Factors whose dense weight is close to ``weight`` (spectral initialisation).

        Computed in single precision at least and returned in the weight's dtype. The same weight gives the
        same factors.

        Raises:
            ValueError: If the weight cannot have this rank.
        """

    @abstractmethod
    def default_init_scale(self, shape: Sequence[int], rank: int) -> float:
        """The ``a`` of U(−a, a) for which the first step of a factored update has the size of a dense step.

        With every factor drawn from U(−a, a) but :meth:`zero_factor`, which is zero, the first step of
        gradient descent on that factor changes the composed weight, in expectation over the draws, as much as the same
        step on the dense weight would.
        """

    @abstractmethod
    def init_scale_for_std(self, shape: Sequence[int], rank: int, std: float) -> float:
        """The ``a`` for which the weight of factors U(−a, a) has standard deviation ``std``."""

    def ratio_for_rank(self, shape: Sequence[int], rank: int, half_frozen: HalfFrozen = False) -> float:
        """The largest ratio for which :meth:`rank_for_ratio` gives ``rank`` (to rounding).

        By default the share of the trained factors, which is right if :meth:`rank_for_ratio` gives the
        smallest rank that holds the ratio.

        Raises:
            ValueError: If the weight cannot have this rank.
        """
        self.check_rank(shape, rank, half_frozen)
        return self.trained_numbers(shape, rank, half_frozen) / math.prod(shape)

    def factor_names(self, shape: Sequence[int]) -> tuple[str, ...]:
        """The names of the factors, in the order of :meth:`factor_shapes`."""
        return tuple(self.factor_shapes(shape, 1))

    def zero_factor(self, shape: Sequence[int]) -> str:
        """Name of the factor that starts at zero in an update."""
        return "V"

    def bilinear(self, shape: Sequence[int]) -> bool:
        """Whether the factors are exactly ``U`` and ``V``, and the weight is linear in each."""
        return self.factor_names(shape) == ("U", "V")

    def trained_factors(self, shape: Sequence[int], half_frozen: HalfFrozen = False) -> tuple[str, ...]:
        """The names of the trained factors: all, or the one that is not frozen."""
        fixed = self.fixed_factors(shape, half_frozen=half_frozen)
        return tuple(name for name in self.factor_names(shape) if name not in fixed)

    def fixed_factors(
        self, shape: Sequence[int], decouple: bool = False, half_frozen: HalfFrozen = False
    ) -> tuple[str, ...]:
        """The names of the factors that are never trained: none, both (decoupled) or the frozen one."""
        frozen = frozen_factor(half_frozen)
        if (decouple or frozen is not None) and not self.bilinear(shape):
            raise ValueError(
                f"{self!r} gives a weight of shape {tuple(shape)} the factors {', '.join(self.factor_names(shape))}; "
                f"{'half_frozen' if frozen else 'decouple'} needs two, U and V. Use MatrixProduct() or "
                "BlockKronecker()."
            )
        if decouple:
            return ("U", "V")
        return () if frozen is None else (frozen,)

    def trained_numbers(self, shape: Sequence[int], rank: int, half_frozen: HalfFrozen = False) -> int:
        """Number of numbers in the trained factors."""
        shapes = self.factor_shapes(shape, rank)
        return sum(math.prod(shapes[name]) for name in self.trained_factors(shape, half_frozen))

    def lower_rank(self, shape: Sequence[int], rank: int) -> int | None:
        """The next smaller valid rank, or ``None`` if ``rank`` is the smallest."""
        return rank - 1 if rank > 1 else None

    def check_rank(self, shape: Sequence[int], rank: int, half_frozen: HalfFrozen = False) -> None:
        """Raise if a weight of this shape cannot have this rank.

        Raises:
            ValueError: If ``rank`` is not an integer from 1 to :meth:`max_rank`.
        """
        largest = self.max_rank(shape, half_frozen)
        if isinstance(rank, bool) or not isinstance(rank, Integral) or not 1 <= rank <= largest:
            raise ValueError(
                f"rank must be an integer from 1 to {largest} for {self!r} and a weight of shape "
                f"{tuple(shape)}, but is {rank!r}."
            )

    def stage_shapes(self, shape: Sequence[int], rank: int) -> tuple[Stage, ...] | None:
        """The stages of a chain of convolutions that equals the convolution with the composed weight.

        Applied one after another, the first to the input, they give the result of the convolution with the composed
        weight. For a weight of two dimensions they are matrix products, with kernels (out, in). Each kernel dimension
        is larger than 1 in at most one of the stages, which is the one that takes the layer's stride, padding and
        dilation in that dimension.

        Returns:
            The stages in the order of application, or ``None`` if this form has no such chain.
        """
        return None

    def stages(self, factors: Mapping[str, Tensor], shape: Sequence[int]) -> list[Tensor]:
        """The stages' kernels, in the shapes of :meth:`stage_shapes`.

        Like :meth:`compose` it can be differentiated and mapped with :func:`torch.func.vmap`.

        Raises:
            ValueError: If this form has no such chain for the shape.
        """
        raise ValueError(f"{self!r} has no chain of convolutions for a weight of shape {tuple(shape)}; use compose.")

    def multiply(
        self,
        input: Tensor,
        factors: Mapping[str, Tensor],
        shape: Sequence[int],
        transposed: bool = False,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Multiply by the composed weight ``W`` of two dimensions without building it.

        Args:
            input: A tensor (…, dim1), or (…, dim0) if ``transposed``.
            factors: All factors by name.
            shape: The weight's shape, (dim0, dim1).
            transposed: Return ``input @ W``, (…, dim1), instead of ``input @ Wᵀ``, (…, dim0). Off by default.
            bias: Added to the result. None by default.

        Raises:
            ValueError: If the shape does not have two dimensions, or :meth:`multiply_adds` is ``None`` for it.
        """
        if len(shape) != 2:
            raise ValueError(f"multiply needs a weight of two dimensions, but its shape is {tuple(shape)}.")
        *others, last = self.stages(factors, shape)
        if transposed:
            *others, last = (matrix.mT for matrix in reversed((*others, last)))
        for matrix in others:
            input = F.linear(input, matrix)
        return F.linear(input, last, bias)

    def multiply_adds(self, shape: Sequence[int], rank: int) -> int | None:
        """Multiply-adds of :meth:`multiply` or :meth:`stages` for each position.

        For :meth:`stages` that is one position of each stage's output; what building the kernels takes is
        left out.

        Returns:
            The number, or ``None`` if this form has no way but to compose the dense weight.
        """
        stages = self.stage_shapes(shape, rank)
        return None if stages is None else sum(math.prod(stage.kernel) for stage in stages)

    def inner(self, left: Mapping[str, Tensor], right: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        """The Frobenius inner product of two composed weights, ``⟨f(left), f(right)⟩``.

        The forms of this package do it without building the weights if that is cheaper.

        Returns:
            A scalar tensor.
        """
        return (self.compose(left, shape) * self.compose(right, shape)).sum()

    def to_dict(self) -> dict[str, Any]:
        """``{"name": …, "arguments": {…}}`` in plain Python, for :func:`factorization_from_dict`.

        Example:
            >>> from lightning_lowrank.layers import MatrixProduct
            >>> MatrixProduct(layout="raw").to_dict()
            {'name': 'MatrixProduct', 'arguments': {'layout': 'raw'}}
        """
        return {"name": type(self).__name__, "arguments": self._arguments()}

    def _arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def _rank_within_max(self, shape: Sequence[int], rank: int, ratio: float, half_frozen: HalfFrozen) -> int:
        largest = self.max_rank(shape, half_frozen)
        if rank > largest:
            raise ValueError(
                f"ratio={ratio} asks for rank {rank}, but {self!r} gives a weight of shape {tuple(shape)} at "
                f"most rank {largest}; use a ratio up to {self.ratio_for_rank(shape, largest, half_frozen)}."
            )
        return rank

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self._arguments().items())
        return f"{type(self).__name__}({arguments})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Factorization):
            return NotImplemented
        return type(self) is type(other) and self._arguments() == other._arguments()

    def __hash__(self) -> int:
        return hash(repr(self))


def factorization_from_dict(description: Mapping[str, Any]) -> Factorization:
    """Build the factorization that :meth:`Factorization.to_dict` described.

    Args:
        description: ``{"name": class name, "arguments": keyword arguments}``.

    Raises:
        ValueError: If no factorization of that name is defined, or the description has other keys.

    Example:
        >>> factorization_from_dict({"name": "BlockKronecker", "arguments": {"grid": True}})
        BlockKronecker(grid=True)
    """
    if set(description) != {"name", "arguments"}:
        raise ValueError(
            f'a factorization\'s description must have the keys "name" and "arguments", but has {sorted(description)}.'
        )
    defined = subclasses_by_name(Factorization)
    if description["name"] not in defined:
        raise ValueError(
            f"no factorization is named {description['name']!r}; defined are "
            f"{', '.join(sorted(defined))}. Import the module that defines it first."
        )
    return defined[description["name"]](**description["arguments"])
