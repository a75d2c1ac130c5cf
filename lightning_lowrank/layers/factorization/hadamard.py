"""The weight as the element-wise product of two low-rank weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_lowrank.arguments import check_number
from lightning_lowrank.layers.factorization.base import (
    Factorization,
    HalfFrozen,
    Stage,
    ceil,
    check_two_dimensions,
    working_precision,
)
from lightning_lowrank.layers.factorization.matrix_product import MatrixProduct
from lightning_lowrank.seeding import generator


class Hadamard(Factorization):
    r"""The element-wise product of two low-rank weights, of rank up to ``rank²`` (FedPara).

    A linear weight is ``(U1 V1ᵀ) ∘ (U2 V2ᵀ)``. With a kernel each of the two is in Tucker-2 form, with a core
    ``T1`` or ``T2`` of shape (rank, rank, \*kernel) between ``U`` and ``V``:

    .. math:: W = A^1 ∘ A^2, \quad A^n_{o i \kappa} = \sum_{a c} U^n_{o a} T^n_{a c \kappa} V^n_{i c}

    From Hyeon-Woo et al., FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated Learning,
    ICLR 2022, Propositions 1 and 3. The rank for a ratio is the smallest whose factors hold that share of the
    weight's numbers, in place of that paper's rule, which interpolates between two ranks.

    Example:
        >>> hadamard = Hadamard()
        >>> hadamard.factor_shapes((8, 6), rank=2)
        {'U1': (8, 2), 'V1': (6, 2), 'U2': (8, 2), 'V2': (6, 2)}
        >>> hadamard.factor_shapes((8, 6, 3, 3), rank=2)["T1"]
        (2, 2, 3, 3)
        >>> factors = {name: torch.ones(shape) for name, shape in hadamard.factor_shapes((8, 6), rank=2).items()}
        >>> hadamard.compose(factors, (8, 6)).unique()
        tensor([4.])
    """

    @override
    def rank_for_ratio(self, shape: Sequence[int], ratio: float, half_frozen: HalfFrozen = False) -> int:
        check_number("ratio", ratio, above=0)
        self.trained_factors(shape, half_frozen)
        # 2R(dim0 + dim1) + 2R²k, with k kernel positions; without the second term if the weight has no kernel.
        linear, square = shape[0] + shape[1], math.prod(shape[2:]) if len(shape) > 2 else 0
        half = ratio * math.prod(shape) / 2
        rank = max(1, ceil(2 * half / (linear + math.sqrt(linear**2 + 4 * square * half))))
        return self._rank_within_max(shape, rank, ratio, half_frozen)

    def max_rank(self, shape: Sequence[int], half_frozen: HalfFrozen = False) -> int:
        """The rank at which one of the two weights can be any weight, the other being all ones.

        That is the smaller dimension of a linear weight. In the Tucker-2 form ``U`` must span the weight's
        columns in dim0, of which there are at most dim1 times the kernel positions, and ``V`` likewise.
        """
        self.trained_factors(shape, half_frozen)
        positions = math.prod(shape[2:])
        return max(min(shape[0], shape[1] * positions), min(shape[1], shape[0] * positions))

    @override
    def factor_shapes(self, shape: Sequence[int], rank: int) -> dict[str, tuple[int, ...]]:
        check_two_dimensions(shape)
        shapes: dict[str, tuple[int, ...]] = {}
        for number in (1, 2):
            shapes |= {f"U{number}": (shape[0], rank), f"V{number}": (shape[1], rank)}
            if len(shape) > 2:
                shapes[f"T{number}"] = (rank, rank, *shape[2:])
        return shapes

    @override
    def zero_factor(self, shape: Sequence[int]) -> str:
        return "V2"

    @override
    def compose(self, factors: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        return self._term(factors, 1, shape) * self._term(factors, 2, shape)

    def _term(self, factors: Mapping[str, Tensor], number: int, shape: Sequence[int]) -> Tensor:
        """One of the two low-rank weights whose element-wise product is taken."""
        left, right = factors[f"U{number}"], factors[f"V{number}"]
        if len(shape) == 2:
            return left @ right.mT
        core = factors[f"T{number}"]
        rank = core.shape[0]
        half = (left @ core.reshape(rank, -1)).reshape(shape[0], rank, -1)
        # bmm, because matmul folds the batch depending on requires_grad, and then rounds differently.
        return right.unsqueeze(0).expand(shape[0], -1, -1).bmm(half).reshape(tuple(shape))

    @override
    def compose_multiply_adds(self, shape: Sequence[int], rank: int) -> int:
        check_two_dimensions(shape)
        numbers = math.prod(shape)
        core = 0 if len(shape) == 2 else shape[0] * rank**2 * math.prod(shape[2:])
        return 2 * (core + rank * numbers) + numbers

    def stage_shapes(self, shape: Sequence[int], rank: int) -> tuple[Stage, ...]:
        """The stages of the same weight as a plain product of rank ``rank²``.

        Its factors' rows are the Kronecker products of the two factors' rows, its core is the Kronecker
        product of the two cores.
        """
        check_two_dimensions(shape)
        ones = [1] * (len(shape) - 2)
        core = [Stage((rank**2, rank**2, *shape[2:]), 1)] if ones else []
        return Stage((rank**2, shape[1], *ones), 1), *core, Stage((shape[0], rank**2, *ones), 1)

    @override
    def stages(self, factors: Mapping[str, Tensor], shape: Sequence[int]) -> list[Tensor]:
        left, right = (_columns_product(factors[f"{side}1"], factors[f"{side}2"]) for side in ("U", "V"))
        stages = self.stage_shapes(shape, factors["U1"].shape[-1])
        kernels = [right.mT.reshape(stages[0].kernel), left.reshape(stages[-1].kernel)]
        if len(shape) > 2:
            kernels.insert(1, self._core(factors).reshape(stages[1].kernel))
        return kernels

    @staticmethod
    def _core(factors: Mapping[str, Tensor]) -> Tensor:
        """The Kronecker product of the cores, (rank², rank², kernel positions)."""
        blocks = torch.einsum("acx,bdx->abcdx", factors["T1"].flatten(2), factors["T2"].flatten(2))
        return blocks.flatten(2, 3).flatten(0, 1)

    def inner(self, left: Mapping[str, Tensor], right: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        """The inner product by Gram matrices of the factors of rank ``rank²``.

        If these Gram matrices, ``rank⁴`` numbers, would be larger than the weight, composing the weights is
        cheaper and is done.
        """
        if (left["U1"].shape[-1] * right["U1"].shape[-1]) ** 2 > math.prod(shape):
            return super().inner(left, right, shape)
        rows, columns = (
            _columns_product(left[f"{side}1"], left[f"{side}2"]).mT
            @ _columns_product(right[f"{side}1"], right[f"{side}2"])
            for side in ("U", "V")
        )
        if len(shape) == 2:
            return (rows * columns).sum()
        # ⟨P C Qᵀ, P' C' Q'ᵀ⟩ = ⟨C, (PᵀP') C' (QᵀQ')ᵀ⟩ at each kernel position.
        return torch.einsum("acx,ab,bdx,cd->", self._core(left), rows, self._core(right), columns)

    def decompose(self, weight: Tensor, rank: int) -> dict[str, Tensor]:
        """The factors that L-BFGS finds, starting from the best weight of ``rank`` times all ones.

        There is no closed form. The first of the two weights starts as the truncated singular value
        decomposition (with a kernel: the truncated higher-order one), the second near all ones. At most 100
        steps on the squared error follow. The start, with the second exactly all ones, is returned at
        :meth:`max_rank` and wherever else it is exact, and if the steps do not improve on it.
        """
        self.check_rank(weight.shape, rank)
        target = working_precision(weight)
        size = _root_mean_square(target)
        factors = self._start(target / size, rank)
        if rank < self.max_rank(weight.shape):
            factors = self._fit(target / size, factors)
        root = size ** (1 / len(factors))
        return {name: (factor * root).to(weight.dtype) for name, factor in factors.items()}

    def _start(self, weight: Tensor, rank: int) -> dict[str, Tensor]:
        """Start of the fit: the best (with a kernel, a nearly best) weight of this rank, times a weight of ones."""
        if weight.dim() == 2:
            first = MatrixProduct().decompose(weight, rank)
        else:
            sides = []
            for dimension in (0, 1):
                unfolded = weight.movedim(dimension, 0).flatten(1)
                columns = torch.linalg.svd(unfolded, full_matrices=False)[0][:, :rank]
                sides.append(F.pad(columns, (0, rank - columns.shape[1])))
            core = torch.einsum("oi...,oa,ic->ac...", weight, *sides)
            first = {"U": sides[0], "V": sides[1], "T": core}
            sizes = {name: _root_mean_square(factor) for name, factor in first.items()}
            common = math.prod(sizes.values()) ** (1 / 3)
            first = {name: (factor * (common / sizes[name])).contiguous() for name, factor in first.items()}
        one = rank ** (-1 / 2 if weight.dim() == 2 else -2 / 3)
        shapes = self.factor_shapes(weight.shape, rank)
        return {
            name: first[name[0]] if name[1] == "1" else weight.new_full(shape, one) for name, shape in shapes.items()
        }

    def _fit(self, weight: Tensor, start: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Improve the start by L-BFGS, after noise has separated the equal columns of the second weight."""

        def error(factors: Mapping[str, Tensor]) -> Tensor:
            return (self.compose(factors, weight.shape) - weight).square().sum() / 2

        if error(start) <= weight.numel() * (10 * torch.finfo(weight.dtype).eps) ** 2:
            return dict(start)
        factors = {name: factor.clone() for name, factor in start.items()}
        for name, factor in factors.items():
            if name[1] == "2":
                draws = generator("Hadamard", "decompose", name)
                noise = torch.randn(factor.shape, generator=draws, device="cpu")
                factor.mul_(1 + 0.3 * noise.to(factor))
            factor.requires_grad_()
        optimizer = torch.optim.LBFGS(
            list(factors.values()),
            max_iter=100,
            tolerance_grad=1e-7,
            tolerance_change=1e-9,
            history_size=10,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = error(factors)
            loss.backward()
            return loss

        with torch.enable_grad():
            optimizer.step(closure)
        fitted = {name: factor.detach() for name, factor in factors.items()}
        return fitted if error(fitted) < error(start) else dict(start)

    def default_init_scale(self, shape: Sequence[int], rank: int) -> float:
        """The ``a`` of U(−a, a), with s = a²/3: ``rank²s³ = 1``, with a core ``rank⁴s⁵ = 1``.

        The step changes the second weight by its factors' squares, ``rank·s`` (``rank²s²``) times its
        gradient in expectation; that gradient and the composed weight each bring the first weight once,
        whose square is ``rank·s²`` (``rank²s³``) in expectation.
        """
        return math.sqrt(3 * (rank ** (-2 / 3) if len(shape) == 2 else rank ** (-4 / 5)))

    def init_scale_for_std(self, shape: Sequence[int], rank: int, std: float) -> float:
        """The ``a``, with s = a²/3, for which ``rank²s⁴ = std²``, with a core ``rank⁴s⁶ = std²``."""
        variance = math.sqrt(std / rank) if len(shape) == 2 else (std / rank**2) ** (1 / 3)
        return math.sqrt(3 * variance)


def _columns_product(left: Tensor, right: Tensor) -> Tensor:
    """Make each row the Kronecker product of the two factors' rows (face-splitting product)."""
    return (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2)


def _root_mean_square(numbers: Tensor) -> Tensor:
    """The root mean square; the smallest positive number if all values are zero, for a division."""
    return numbers.square().mean().sqrt().clamp_min(torch.finfo(numbers.dtype).tiny)
