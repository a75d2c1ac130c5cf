"""How a few small tensors stand for one weight.

A :class:`Factorization` holds no tensors, only the choice of a form. It answers, for a weight of a given
shape: which factors a rank asks for, which rank a share of trainable numbers allows, what dense weight the
factors make (`compose`), and which factors come nearest to a given weight (`decompose`).

Both forms here are products of two factors ``U`` and ``V``, linear in each of them. That is what the two
modifiers of a low-rank layer rest on: a *half-frozen* layer trains ``V`` only, and a *decoupled* layer trains
``f(U, Ṽ) + f(Ũ, V)`` with fixed ``Ũ`` and ``Ṽ``. Both are linear in what is trained, so that the mean of the
clients' factors stands for the mean of their weights.

"FedMUD" throughout is Li et al., The Panaceas for Improving Low-Rank Decomposition in
Communication-Efficient Federated Learning, ICML 2025.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

__all__ = [
    "BlockKronecker",
    "Factorization",
    "MatrixProduct",
    "factorization_from_dict",
    "registered_factorizations",
]


def _ceil(value: float) -> int:
    """Round up, but not past an integer that only rounding noise separates from the value."""
    nearest = round(value)
    return nearest if math.isclose(value, nearest, rel_tol=1e-12) else math.ceil(value)


def _working_precision(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32))


class Factorization(ABC):
    """Two factors ``U`` and ``V`` that stand for one weight, bilinearly.

    A subclass is a plain class whose ``__init__`` takes simple arguments and keeps each one under its own
    name; it is then registered by being defined, compares and prints by its arguments, and can be written
    to a checkpoint with :meth:`to_dict`.

    A subclass keeps one promise that the search for a budget relies on: the trained factors at
    ``rank_for_ratio(shape, ratio)`` hold at least ``ratio`` times the weight's numbers, for they are rounded
    up.
    """

    @abstractmethod
    def rank_for_ratio(self, shape: Sequence[int], ratio: float, half_frozen: bool = False) -> int:
        """Return the rank at which the trained factors are about a share ``ratio`` of the weight.

        Args:
            shape: The weight's shape.
            ratio: Trained numbers over the weight's numbers, above 0.
            half_frozen: Whether only ``V`` is trained, which affords a higher rank for the same share.

        Returns:
            A rank between 1 and :meth:`max_rank`.

        Raises:
            ValueError: If ``ratio`` is not positive, or asks for more than :meth:`max_rank`.
        """

    @abstractmethod
    def ratio_for_rank(self, shape: Sequence[int], rank: int, half_frozen: bool = False) -> float:
        """Return the largest ratio for which :meth:`rank_for_ratio` gives ``rank`` (to rounding).

        Args:
            shape: The weight's shape.
            rank: A rank that :meth:`check_rank` accepts.
            half_frozen: Whether only ``V`` is trained.

        Raises:
            ValueError: If the weight cannot have this rank.
        """

    @abstractmethod
    def max_rank(self, shape: Sequence[int], half_frozen: bool = False) -> int:
        """Return the rank above which more would add nothing to what the factors can express.

        Args:
            shape: The weight's shape.
            half_frozen: Whether only ``V`` is trained.
        """

    @abstractmethod
    def factor_shapes(self, shape: Sequence[int], rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of ``"U"`` and ``"V"``.

        Args:
            shape: The weight's shape.
            rank: The rank, at least 1.
        """

    @abstractmethod
    def compose(self, factors: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        """Return the dense weight that the factors stand for.

        It is linear in ``U`` and in ``V``, and made of tensor operations only, so that it can be
        differentiated and mapped over a leading dimension with :func:`torch.func.vmap`.

        Args:
            factors: ``"U"`` and ``"V"``, shaped as :meth:`factor_shapes` says.
            shape: The weight's shape.

        Returns:
            A tensor of shape ``shape`` with the factors' dtype and device.
        """

    @abstractmethod
    def decompose(self, weight: Tensor, rank: int) -> dict[str, Tensor]:
        """Return the factors whose dense weight is nearest to ``weight`` (spectral initialisation).

        The singular values are split evenly, a square root to each factor. Computed in single precision at
        least and returned in the weight's dtype.

        Args:
            weight: The weight, of any layout and device.
            rank: A rank that :meth:`check_rank` accepts.

        Raises:
            ValueError: If the weight cannot have this rank.
        """

    @abstractmethod
    def default_init_scale(self, shape: Sequence[int], rank: int) -> float:
        """Return the ``a`` of U(−a, a) for which a factored update starts off like a dense one.

        With ``Ũ`` drawn from U(−a, a) and ``V = 0``, the first step of gradient descent on ``V`` changes
        ``f(Ũ, V)``, in expectation over ``Ũ``, by what the same step on the dense weight would.

        Args:
            shape: The weight's shape.
            rank: The rank.
        """

    @abstractmethod
    def init_scale_for_std(self, shape: Sequence[int], rank: int, std: float) -> float:
        """Return the ``a`` for which ``f(U, V)``, both factors U(−a, a), has standard deviation ``std``.

        Args:
            shape: The weight's shape.
            rank: The rank.
            std: The standard deviation of the dense weight's numbers.
        """

    def trained_factors(self, half_frozen: bool = False) -> tuple[str, ...]:
        """Return the names of the trained factors: both, or ``"V"`` alone where half is frozen.

        Args:
            half_frozen: Whether only ``V`` is trained.
        """
        return ("V",) if half_frozen else ("U", "V")

    def fixed_factors(self, decouple: bool = False, half_frozen: bool = False) -> tuple[str, ...]:
        """Return the names of the factors that are never trained: none, both (decoupled) or ``"U"``.

        Args:
            decouple: Whether a fixed pair stands beside the trained one.
            half_frozen: Whether only ``V`` is trained.
        """
        if decouple:
            return ("U", "V")
        return ("U",) if half_frozen else ()

    def trained_numbers(self, shape: Sequence[int], rank: int, half_frozen: bool = False) -> int:
        """Return how many numbers the trained factors hold.

        Args:
            shape: The weight's shape.
            rank: The rank.
            half_frozen: Whether only ``V`` is trained.
        """
        shapes = self.factor_shapes(shape, rank)
        return sum(math.prod(shapes[name]) for name in self.trained_factors(half_frozen))

    def lower_rank(self, shape: Sequence[int], rank: int) -> int | None:
        """Return the next smaller rank this form can have, or ``None`` where ``rank`` is the smallest.

        Args:
            shape: The weight's shape.
            rank: A rank that :meth:`check_rank` accepts.
        """
        return rank - 1 if rank > 1 else None

    def check_rank(self, shape: Sequence[int], rank: int, half_frozen: bool = False) -> None:
        """Refuse a rank that a weight of this shape cannot have.

        Args:
            shape: The weight's shape.
            rank: The rank to look at.
            half_frozen: Whether only ``V`` is trained.

        Raises:
            ValueError: If ``rank`` is not an integer from 1 to :meth:`max_rank`.
        """
        largest = self.max_rank(shape, half_frozen)
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= largest:
            raise ValueError(
                f"rank must be an integer from 1 to {largest} for {self!r} and a weight of shape "
                f"{tuple(shape)}, but is {rank!r}."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"name": …, "arguments": {…}}`` in plain Python, as :func:`factorization_from_dict` reads.

        Example:
            >>> MatrixProduct(layout="raw").to_dict()
            {'name': 'MatrixProduct', 'arguments': {'layout': 'raw'}}
        """
        return {"name": type(self).__name__, "arguments": self._arguments()}

    def _arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def _rank_within_max(self, shape: Sequence[int], rank: int, ratio: float, half_frozen: bool) -> int:
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


def _check_ratio(ratio: float) -> None:
    if not (ratio > 0 and math.isfinite(ratio)):
        raise ValueError(f"ratio must be a finite number above 0, but is {ratio!r}.")


class MatrixProduct(Factorization):
    """The weight as a matrix ``U Vᵀ``, with ``U`` (rows × rank) and ``V`` (columns × rank).

    A linear weight is its own matrix. A convolution's kernel is split: half of its modes (the larger half
    where their number is odd) stand with the output channels in the rows, the others with the input channels
    in the columns. So (cout, cin, kh, kw) has cout·kh rows and cin·kw columns, (cout, cin, k) has cout·k
    rows and cin columns, and (cout, cin, kd, kh, kw) has cout·kd·kh rows and cin·kw columns.

    The rank for a ratio ρ of N = rows × columns is max(1, ⌈ρN / (rows + columns)⌉), and ⌈ρN / columns⌉ where
    only ``V`` is trained. (Section 3.2 of FedMUD gives the ratio as 2(m + n)r / mn, which counts each factor
    twice.)

    Args:
        layout: ``"permuted"`` (default) brings the kernel's modes next to their channels, so that
            ``U Vᵀ`` is a 1×kw convolution followed by a kh×1 convolution (FedHM). ``"raw"`` reshapes the
            weight row-major as it lies in memory, which mixes channels and kernel positions and is what the
            authors of FedMUD ran. A linear weight is the same either way.

    Raises:
        ValueError: If ``layout`` is neither.

    Example:
        >>> product = MatrixProduct()
        >>> product.rank_for_ratio((64, 32, 3, 3), 1 / 32)
        2
        >>> product.factor_shapes((64, 32, 3, 3), rank=2)
        {'U': (192, 2), 'V': (96, 2)}
        >>> weight = torch.ones(4, 3, 2, 2)
        >>> torch.allclose(product.compose(product.decompose(weight, rank=1), weight.shape), weight)
        True
    """

    def __init__(self, layout: Literal["permuted", "raw"] = "permuted") -> None:
        if layout not in ("permuted", "raw"):
            raise ValueError(f'layout must be "permuted" or "raw", but is {layout!r}.')
        self.layout = layout

    def matrix_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the rows and columns of the matrix that a weight of this shape is read as.

        Args:
            shape: The weight's shape, of at least two dimensions.

        Raises:
            ValueError: If the shape has fewer than two dimensions.
        """
        if len(shape) < 2:
            raise ValueError(
                f"shape must have at least two dimensions to be read as a matrix, but is {tuple(shape)}; "
                "BlockKronecker takes any shape."
            )
        split = self._input_position(shape) + 1
        return shape[0] * math.prod(shape[2:split]), shape[1] * math.prod(shape[split:])

    @staticmethod
    def _input_position(shape: Sequence[int]) -> int:
        """Return where the input channels stand once the rows' kernel modes have moved before them."""
        return 1 + (len(shape) - 1) // 2

    def as_matrix(self, weight: Tensor) -> Tensor:
        """Read a weight as a matrix of :meth:`matrix_shape`.

        Args:
            weight: The weight.
        """
        matrix_shape = self.matrix_shape(weight.shape)
        if self.layout == "permuted":
            weight = weight.movedim(1, self._input_position(weight.shape))
        return weight.reshape(matrix_shape)

    def as_weight(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        """Undo :meth:`as_matrix`.

        Args:
            matrix: A matrix of :meth:`matrix_shape`.
            shape: The weight's shape.
        """
        if self.layout == "raw":
            return matrix.reshape(tuple(shape))
        position = self._input_position(shape)
        unfolded = matrix.reshape(shape[0], *shape[2 : position + 1], shape[1], *shape[position + 1 :])
        return unfolded.movedim(position, 1).contiguous()

    @override
    def rank_for_ratio(self, shape: Sequence[int], ratio: float, half_frozen: bool = False) -> int:
        _check_ratio(ratio)
        rows, columns = self.matrix_shape(shape)
        rank = max(1, _ceil(ratio * rows * columns / (columns if half_frozen else rows + columns)))
        return self._rank_within_max(shape, rank, ratio, half_frozen)

    @override
    def ratio_for_rank(self, shape: Sequence[int], rank: int, half_frozen: bool = False) -> float:
        self.check_rank(shape, rank, half_frozen)
        return self.trained_numbers(shape, rank, half_frozen) / math.prod(shape)

    def max_rank(self, shape: Sequence[int], half_frozen: bool = False) -> int:
        """Return the smaller side of the matrix, or its rows where half is frozen.

        With ``Ũ`` fixed, ``Ũ Vᵀ`` reaches every matrix only once ``Ũ`` spans all rows.

        Args:
            shape: The weight's shape.
            half_frozen: Whether only ``V`` is trained.
        """
        rows, columns = self.matrix_shape(shape)
        return rows if half_frozen else min(rows, columns)

    @override
    def factor_shapes(self, shape: Sequence[int], rank: int) -> dict[str, tuple[int, ...]]:
        rows, columns = self.matrix_shape(shape)
        return {"U": (rows, rank), "V": (columns, rank)}

    @override
    def compose(self, factors: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        return self.as_weight(factors["U"] @ factors["V"].mT, shape)

    def decompose(self, weight: Tensor, rank: int) -> dict[str, Tensor]:
        """Return the truncated singular value decomposition, ``U √Σ`` and ``V √Σ``.

        Args:
            weight: The weight.
            rank: The rank, at most the smaller side of the matrix.

        Raises:
            ValueError: If ``rank`` is out of range.
        """
        self.check_rank(weight.shape, rank)
        left, values, right = torch.linalg.svd(self.as_matrix(_working_precision(weight)), full_matrices=False)
        roots = values[:rank].sqrt()
        factors = {"U": left[:, :rank] * roots, "V": right[:rank].mT * roots}
        return {name: factor.to(weight.dtype).contiguous() for name, factor in factors.items()}

    def default_init_scale(self, shape: Sequence[int], rank: int) -> float:
        """Return √(3 / rank): the step is ``Ũ Ũᵀ G``, and ``E[Ũ Ũᵀ] = rank · a²/3 · I``.

        Args:
            shape: The weight's shape.
            rank: The rank.
        """
        return math.sqrt(3 / rank)

    def init_scale_for_std(self, shape: Sequence[int], rank: int, std: float) -> float:
        """Return the ``a`` with ``rank · (a²/3)² = std²``.

        Args:
            shape: The weight's shape.
            rank: The rank.
            std: The standard deviation of the dense weight's numbers.
        """
        return math.sqrt(3 * std / math.sqrt(rank))


class BlockKronecker(Factorization):
    """The weight as K blocks, each a Kronecker product of two z×z matrices (FedMUD's BKD, section 3.2).

    ``U`` and ``V`` have shape (K, z, z). Block k is ``U[k] ⊗ V[k]``, z²×z². The blocks are flattened one
    after another, cropped to the weight's N numbers and reshaped, so any weight shape works. The rank is the
    number of blocks K, and z the smallest integer with K·z⁴ ≥ N.

    The number of blocks for a ratio ρ is max(1, ⌈ρ²N / 4⌉), with 2ρ in place of ρ where only ``V`` is
    trained; 2Kz² numbers are then trained, ρN before rounding.

    Args:
        grid: Whether to lay the blocks out as the paper describes (section 3.2), a √K × √K grid that is a
            √K·z² × √K·z² matrix, flattened row-major and cropped. K is then a perfect square, rounded up
            where it comes from a ratio. Off by default: the authors' code flattens block after block.

    Example:
        >>> kronecker = BlockKronecker()
        >>> kronecker.rank_for_ratio((64, 32, 3, 3), 1 / 32)
        5
        >>> kronecker.factor_shapes((64, 32, 3, 3), rank=5)
        {'U': (5, 8, 8), 'V': (5, 8, 8)}
    """

    def __init__(self, grid: bool = False) -> None:
        self.grid = grid

    def block_size(self, shape: Sequence[int], rank: int) -> int:
        """Return z, the side of the factors of each block.

        Args:
            shape: The weight's shape.
            rank: The number of blocks K, at least 1.
        """
        return math.isqrt(math.isqrt((math.prod(shape) - 1) // rank)) + 1

    @override
    def rank_for_ratio(self, shape: Sequence[int], ratio: float, half_frozen: bool = False) -> int:
        _check_ratio(ratio)
        share = 2 * ratio if half_frozen else ratio
        rank = max(1, _ceil(share**2 * math.prod(shape) / 4))
        if self.grid:
            rank = (math.isqrt(rank - 1) + 1) ** 2
        return self._rank_within_max(shape, rank, ratio, half_frozen)

    @override
    def ratio_for_rank(self, shape: Sequence[int], rank: int, half_frozen: bool = False) -> float:
        self.check_rank(shape, rank, half_frozen)
        ratio = 2 * math.sqrt(rank / math.prod(shape))
        return ratio / 2 if half_frozen else ratio

    def max_rank(self, shape: Sequence[int], half_frozen: bool = False) -> int:
        """Return the number of blocks at which each is a single number.

        Args:
            shape: The weight's shape.
            half_frozen: Makes no difference here.
        """
        numbers = math.prod(shape)
        return (math.isqrt(numbers - 1) + 1) ** 2 if self.grid else numbers

    @override
    def lower_rank(self, shape: Sequence[int], rank: int) -> int | None:
        if not self.grid:
            return super().lower_rank(shape, rank)
        return (math.isqrt(rank) - 1) ** 2 if rank > 1 else None

    def check_rank(self, shape: Sequence[int], rank: int, half_frozen: bool = False) -> None:
        """Refuse a number of blocks that is out of range or, in a grid, not a perfect square.

        Args:
            shape: The weight's shape.
            rank: The number of blocks.
            half_frozen: Makes no difference here.

        Raises:
            ValueError: If a weight of this shape cannot have ``rank`` blocks.
        """
        super().check_rank(shape, rank, half_frozen)
        if self.grid and math.isqrt(rank) ** 2 != rank:
            raise ValueError(
                f"rank must be a perfect square for {self!r}, such as {math.isqrt(rank) ** 2}, but is {rank}."
            )

    @override
    def factor_shapes(self, shape: Sequence[int], rank: int) -> dict[str, tuple[int, ...]]:
        size = self.block_size(shape, rank)
        return {"U": (rank, size, size), "V": (rank, size, size)}

    @override
    def compose(self, factors: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        rank, size, _ = factors["U"].shape
        products = torch.einsum("kij,kpq->kipjq", factors["U"], factors["V"])
        if self.grid:
            side = math.isqrt(rank)
            products = products.reshape(side, side, size**2, size**2).transpose(1, 2)
        return products.reshape(-1)[: math.prod(shape)].reshape(tuple(shape))

    def decompose(self, weight: Tensor, rank: int) -> dict[str, Tensor]:
        """Return the nearest Kronecker product of each block.

        Rearranging a block so that each z×z tile of it becomes a row turns the nearest Kronecker product
        into the best approximation of rank one (Van Loan and Pitsianis, 1993). Numbers beyond the weight's
        end count as zeros.

        Args:
            weight: The weight.
            rank: The number of blocks.

        Raises:
            ValueError: If the weight cannot have ``rank`` blocks.
        """
        self.check_rank(weight.shape, rank)
        size = self.block_size(weight.shape, rank)
        flat = _working_precision(weight).reshape(-1)
        padded = torch.nn.functional.pad(flat, (0, rank * size**4 - flat.numel()))
        if self.grid:
            side = math.isqrt(rank)
            padded = padded.reshape(side, size**2, side, size**2).transpose(1, 2)
        tiles = padded.reshape(rank, size, size, size, size).transpose(2, 3)
        left, values, right = torch.linalg.svd(tiles.reshape(rank, size**2, size**2), full_matrices=False)
        roots = values[:, :1].sqrt()
        factors = {"U": left[:, :, 0] * roots, "V": right[:, 0] * roots}
        return {name: f.reshape(rank, size, size).to(weight.dtype) for name, f in factors.items()}

    def default_init_scale(self, shape: Sequence[int], rank: int) -> float:
        """Return √3: a block's step is ``Ũ ⊗ (Σ Ũᵢⱼ Gᵢⱼ)``, whose mean is a²/3 times the dense step.

        Args:
            shape: The weight's shape.
            rank: The number of blocks.
        """
        return math.sqrt(3)

    def init_scale_for_std(self, shape: Sequence[int], rank: int, std: float) -> float:
        """Return the ``a`` with ``(a²/3)² = std²``: each number of the weight is one product.

        Args:
            shape: The weight's shape.
            rank: The number of blocks.
            std: The standard deviation of the dense weight's numbers.
        """
        return math.sqrt(3 * std)


def registered_factorizations() -> dict[str, type[Factorization]]:
    """Return every factorization that has been defined, by class name.

    Example:
        >>> sorted(registered_factorizations())[0]
        'BlockKronecker'
    """
    found: dict[str, type[Factorization]] = {}
    pending = Factorization.__subclasses__()
    while pending:
        kind = pending.pop(0)
        pending.extend(kind.__subclasses__())
        if not inspect.isabstract(kind):
            found[kind.__name__] = kind
    return found


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
    registered = registered_factorizations()
    if description["name"] not in registered:
        raise ValueError(
            f"no factorization is named {description['name']!r}; defined are "
            f"{', '.join(sorted(registered))}. Import the module that defines it first."
        )
    return registered[description["name"]](**description["arguments"])
