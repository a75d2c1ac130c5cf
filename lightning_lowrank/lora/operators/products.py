"""Operators that aggregate products: Sum-Product, and operators that correct Product-Sum towards it.

The ideal update is the mean of the clients' products (Eq. 3 of ABO), whose rank is the sum of theirs.
:class:`SumProduct` truncates it, and :class:`RaFLoRA` weighs it by ranks. :class:`FLoRA` puts it into the base weight,
:class:`FLoRIST` its leading part, :class:`FedEx` its difference from Product-Sum. :class:`LoRAFair` approximates it by
a change of ``B``, and :class:`CoLR` trains one factor so that it fits a pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_lowrank.arguments import check_choice, check_integer, check_number
from lightning_lowrank.lora.inputs import (
    BOTH,
    NEITHER,
    ONLY_A,
    ONLY_B,
    Broadcast,
    Factors,
    LayerInputs,
    slot_weights,
)
from lightning_lowrank.lora.operator import Operator
from lightning_lowrank.lora.operators.svd import Method, Split, truncated_svd
from lightning_lowrank.lora.pairs import LowRankPair, padded
from lightning_lowrank.optim.orthonormal import haar_basis

__all__ = ["CoLR", "FLoRA", "FLoRIST", "FedEx", "LoRAFair", "RaFLoRA", "SumProduct"]


class SumProduct(Operator):
    """Sum-Product (SP): the mean of the products, truncated to each client's rank by an SVD (Eqs. 3, 7-8 of ABO).

    FlexLoRA (Bai et al., 2024). The mean minimises the constant of the weak convergence condition; the truncation,
    the best approximation of that rank, adds its own error. The largest entry of each row of ``Vᵀ`` in absolute value
    is positive. Float16 and bfloat16 factors are computed with in float32.

    Args:
        split: ``"left"`` (default, the ABO paper's): ``B = U Σ``, ``A = Vᵀ``; ``"balanced"``: ``√Σ`` on both. Beyond
            the rank of the mean, the columns of ``B`` are zero, and the rows of ``A`` zero, or with ``"left"``
            orthonormal and drawn from the seed. Singular values of rounding noise do not count.
        method: ``"exact"`` (default) takes the cheaper of two exact ways: QR of the stacked factors if they are
            not wider than the matrix, else one dense mean (one matrix, whatever the number of clients). ``"iterative"``
            is randomised subspace iteration with the stacked factors (Halko et al., 2011): no matrix of the weight's
            size, and an error that decays with the ratio of the first singular value that is left out to the last
            that is kept.

    Raises:
        ValueError: If ``split`` or ``method`` is something else.

    Example:
        >>> first = LowRankPair(torch.tensor([[1.0], [0.0]]), torch.tensor([[1.0, 0.0]]))
        >>> second = LowRankPair(torch.tensor([[0.0], [3.0]]), torch.tensor([[0.0, 1.0]]))
        >>> SumProduct().aggregate([first, second]).server.product().round(decimals=4).abs()
        tensor([[0.0000, 0.0000],
                [0.0000, 1.5000]])
    """

    new_basis: ClassVar[bool] = True

    def __init__(self, split: Split = "left", method: Method = "exact") -> None:
        check_choice("split", split, Split)
        check_choice("method", method, Method)
        self.split: Split = split
        self.method: Method = method

    @override
    def _aggregate(self, inputs: LayerInputs) -> Broadcast:
        largest = inputs.largest_wanted
        found = truncated_svd(*self._terms(inputs), largest, self.method, inputs.seed, inputs.dtype)
        received = {
            (rank, scaling): found.split(rank, self.split, scaling, inputs.dtype)
            for rank, scaling in set(inputs.targets)
        }
        clients = tuple(received[target] for target in inputs.targets)
        return Broadcast(clients, found.split(largest, self.split, inputs.scaling, inputs.dtype))

    @override
    def absorbing(self, round: int) -> Factors:
        return BOTH if self.split == "balanced" else ONLY_B

    def _terms(self, inputs: LayerInputs) -> tuple[Sequence[LowRankPair], Tensor]:
        """The pairs and weights whose weighted sum of products is decomposed."""
        return inputs.pairs, inputs.weights


class RaFLoRA(SumProduct):
    r"""raFLoRA: Sum-Product with the mean taken separately for each range of ranks (Wu et al., 2026, Eq. 8).

    In the mean of clients of different rank, what only clients of large rank have counts as zero at the others.
    :class:`SumProduct` orders directions by their singular values, so those that are averaged down become the last,
    which the small clients do not receive, and shrink again in the next round: the paper's rank collapse. Here the part
    of the products between two neighbouring ranks is averaged over the clients that have it:

    .. math:: \sum_h \sum_{i:\, r_i \ge r_h} \frac{n_i}{\sum_{j:\, r_j \ge r_h} n_j}\,
        s_i\, B_i[:, r_{h-1}{:}r_h]\; A_i[r_{h-1}{:}r_h, :].

    The sum is decomposed and truncated to each client's rank as in :class:`SumProduct`, which this is for clients of
    one rank. A part that none of a round's clients has keeps the product that the server had, which is our choice: the
    paper does not describe a round without large clients. `ConvergenceMonitor` logs the effective rank.

    Its arguments are those of :class:`SumProduct`.

    Example:
        >>> small = LowRankPair(torch.tensor([[2.0], [0.0]]), torch.tensor([[1.0, 0.0]]))
        >>> large = LowRankPair(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.eye(2))
        >>> [operator.aggregate([small, large]).server.B[1, 1].item() for operator in (SumProduct(), RaFLoRA())]
        [0.5, 1.0]
    """

    @override
    def _terms(self, inputs: LayerInputs) -> tuple[Sequence[LowRankPair], Tensor]:
        lefts, rights = inputs.factors()
        shares = slot_weights([pair.rank for pair in inputs.pairs], inputs.weights, owned=True)
        terms = [
            LowRankPair(left * share[: left.shape[1]].to(left.device), right, inputs.scaling)
            for left, right, share in zip(lefts, rights, shares, strict=True)
        ]
        before, own = inputs.previous, inputs.largest
        if before is not None and before.rank > own:
            terms.append(LowRankPair(before.B[:, own:].double(), before.A[own:].double(), before.scaling))
        return terms, torch.ones(len(terms), dtype=torch.float64)


class FLoRA(Operator):
    """FLoRA: the clients' factors are stacked, and their exact mean goes into the base weight (Wang et al., 2024).

    ``B = [p₁B₁ … p_cB_c]``, ``A = [A₁; …; A_c]``. Each round starts from fresh adapters.

    Example:
        >>> pairs = [LowRankPair(torch.full((3, 1), b), torch.full((1, 2), b)) for b in (1.0, 3.0)]
        >>> change = FLoRA().aggregate(pairs).change
        >>> change.rank, change.product()[0]
        (2, tensor([5., 5.]))
    """

    redraws: ClassVar[bool] = True
    changes_base: ClassVar[bool] = True

    @override
    def sent_down(self, round: int) -> Factors:
        return NEITHER

    @override
    def sent_down_of_change(self, round: int) -> Factors:
        return BOTH

    @override
    def _aggregate(self, inputs: LayerInputs) -> Broadcast:
        lefts, rights = inputs.factors()
        return self._redrawn(inputs, LowRankPair(inputs.stacked(lefts), torch.cat(rights), inputs.scaling))


class FLoRIST(FLoRA):
    r"""FLoRIST: `FLoRA` with the stack truncated to its leading singular values (Ramesh and Dass, MLSys 2026).

    The mean of the clients' products is decomposed from the stacked factors, without a matrix of the weight's size.
    The change of the base weight is :math:`B_g = U_{:p} \Sigma_{:p}`, :math:`A_g = V^\top_{:p}` with the smallest
    :math:`p` for which

    .. math:: \sum_{i \le p} \sigma_i^2 \ge \tau \sum_i \sigma_i^2,

    so that each layer has a rank of its own, and the server sends :math:`p` columns and rows in place of the sum of the
    clients' ranks. As in the paper's Algorithm 1 each round starts from fresh adapters and the changed weight.

    Args:
        threshold: :math:`\tau`, above 0 and at most 1, with which it is `FLoRA`. Default: 0.9, the authors' advice.

    Raises:
        ValueError: If the threshold is out of range.

    Example:
        >>> pairs = [LowRankPair(torch.eye(3, 2), torch.eye(2) * torch.tensor([[3.0], [1.0]]))]
        >>> [FLoRIST(threshold).aggregate(pairs).change.rank for threshold in (0.9, 0.95)]
        [1, 2]
    """

    def __init__(self, threshold: float = 0.9) -> None:
        check_number("threshold", threshold, above=0, most=1)
        self.threshold = threshold

    @override
    def _aggregate(self, inputs: LayerInputs) -> Broadcast:
        pairs = [LowRankPair(left, right, inputs.scaling) for left, right in zip(*inputs.factors(), strict=True)]
        largest = min(sum(pair.rank for pair in pairs), *inputs.shape)
        found = truncated_svd(pairs, inputs.weights, largest, "exact", inputs.seed, inputs.dtype)
        energy = found.S.square().cumsum(0)
        rank = int((energy < self.threshold * energy[-1]).sum()) + 1
        return self._redrawn(inputs, found.split(rank, "left", inputs.scaling, found.S.dtype))


class FedEx(Operator):
    r"""FedEx-LoRA: Product-Sum, with its difference from the mean of the products folded into the base weight.

    Singhal et al. (2024). The residual :math:`\overline{BA} - \bar B \bar A = \sum_i p_i (B_i - \bar B)(A_i - \bar A)`
    is returned as factors that are small if clients agree, one client after another as a covariance is updated (Chan
    et al., 1983, Eq. 2.1): :math:`\sum_k \frac{p_k P_{k-1}}{P_k} (B_k - \bar B_{k-1})(A_k - \bar A_{k-1})`, where
    :math:`P_k` is the sum of the first :math:`k` weights and the means are over these clients. For :math:`c` clients of
    rank :math:`r` its rank is :math:`(c - 1) r`; for clients of different rank, the sum of their ranks less the
    smallest. With clients of different rank, the means are over factors filled with zeros; a client of smaller rank
    lacks the slots beyond its rank, while the server, and every client of the largest rank, is exact.

    Example:
        >>> pairs = [LowRankPair(torch.full((3, 1), b), torch.full((1, 2), b)) for b in (1.0, 3.0)]
        >>> found = FedEx().aggregate(pairs)
        >>> (found.server.product() + found.change.product())[0]
        tensor([5., 5.])
    """

    changes_base: ClassVar[bool] = True

    @override
    def sent_down_of_change(self, round: int) -> Factors:
        return BOTH

    @override
    def _aggregate(self, inputs: LayerInputs) -> Broadcast:
        lefts, rights = inputs.factors()
        # Clients without a slot count as one zero entry, which comes first.
        ranks = torch.tensor([pair.rank for pair in inputs.pairs])
        owns = torch.arange(inputs.largest) < ranks[:, None]
        total = (inputs.weights[:, None] * ~owns).sum(dim=0)
        B = padded(torch.zeros_like(lefts[0]), inputs.largest, 1)
        A = padded(torch.zeros_like(rights[0]), inputs.largest, 0)
        # At least one slot: a zero one, if there is a single client.
        away = [B.new_zeros(len(B), 1)], [A.new_zeros(1, A.shape[1])]
        for left, right, weight in zip(lefts, rights, inputs.weights.tolist(), strict=True):
            slots = slice(left.shape[1])
            before = total[slots].clone()
            total[slots] += weight
            share = torch.where(total[slots] > 0, weight / total[slots], 0.0).to(B.device)
            left, right = left - B[:, slots], right - A[slots]
            moved = before.nonzero().flatten().to(B.device)
            away[0].append((left * (before.to(B.device) * share)).index_select(1, moved))
            away[1].append(right.index_select(0, moved))
            B[:, slots] += left * share
            A[slots] += right * share[:, None]
        first = 1 if any(each.numel() for each in away[1][1:]) else 0
        residual = LowRankPair(torch.cat(away[0][first:], dim=1), torch.cat(away[1][first:]), inputs.scaling)
        return inputs.broadcast(B, A, inputs.cast(residual), kept=ONLY_A)


class LoRAFair(Operator):
    r"""LoRA-FAIR: Product-Sum with a correction of ``B`` towards the mean of the products (Bian et al., 2024).

    A small correction :math:`\Delta B` moves :math:`(\bar B + \Delta B) \bar A` towards the mean of the products
    :math:`M`. Two forms:

    - ``"ridge"`` (default) minimises :math:`\|M - (\bar B + \Delta B) \bar A\|_F^2 + \lambda \|\Delta B\|_F^2`, whose
      solution is :math:`(M - \bar B \bar A) \bar A^\top (\bar A \bar A^\top + \lambda I)^{-1}`. It is our reading.
    - ``"cosine"`` is the source's: gradient descent (SGD without sampling) from zero on one minus the cosine similarity
      of the two as vectors, plus :math:`\lambda \|\Delta B\|_F^2`. The learning rate and the number of steps are our
      choice. We divide the learning rate by :math:`\|\bar B\|_F^{-2} + 2 \lambda`, about the curvature, so that it does
      not depend on the norms of the factors. The best iterate is taken.

    With clients of different rank, the means are over factors filled with zeros.

    Args:
        correction: ``"ridge"`` or ``"cosine"``.
        regularization: λ, positive. Default: 0.01.
        learning_rate: Of ``"cosine"``, positive. Default: 0.1.
        steps: Of ``"cosine"``, at least 1. Default: 100.

    Raises:
        ValueError: If an argument is out of range; in a round, if :math:`\bar A` is too large for ``"ridge"``.

    Example:
        >>> pairs = [LowRankPair(torch.full((3, 1), b), torch.full((1, 2), b)) for b in (1.0, 3.0)]
        >>> LoRAFair(regularization=1e-6).aggregate(pairs).server.product()[0]
        tensor([5., 5.])
    """

    def __init__(
        self,
        correction: Literal["ridge", "cosine"] = "ridge",
        regularization: float = 0.01,
        learning_rate: float = 0.1,
        steps: int = 100,
    ) -> None:
        check_choice("correction", correction, Literal["ridge", "cosine"])
        check_number("regularization", regularization, above=0)
        check_number("learning_rate", learning_rate, above=0)
        check_integer("steps", steps)
        self.correction = correction
        self.regularization = regularization
        self.learning_rate = learning_rate
        self.steps = steps

    @override
    def _aggregate(self, inputs: LayerInputs) -> Broadcast:
        lefts, rights, B, A = _zero_padded(inputs)
        stacked = inputs.stacked(lefts)
        if self.correction == "ridge":
            residual = torch.cat([right - A for right in rights]) @ A.T
            centred = stacked - inputs.stacked([B] * len(lefts))
            gram = A @ A.T
            gram.diagonal().add_(self.regularization)
            root, failed = torch.linalg.cholesky_ex(gram)
            # On some processors the Cholesky pivot of a singular matrix is positive rounding noise.
            rounding = len(gram) * torch.finfo(gram.dtype).eps
            if failed or bool((root.diagonal() ** 2 <= rounding * gram.diagonal()).any()):
                raise ValueError(
                    f"LoRAFair cannot solve for its correction: the mean of the factors A has the norm {A.norm():.1e},"
                    f" too large for regularization={self.regularization} in {gram.dtype}; training may have diverged."
                )
            correction = torch.cholesky_solve((centred @ residual).T, root).T
        else:
            correction = self._descend(stacked, torch.cat(rights), B, A)
        return inputs.broadcast(B + correction, A, kept=ONLY_A)

    def _descend(self, lefts: Tensor, rights: Tensor, B: Tensor, A: Tensor) -> Tensor:
        gram, towards = A @ A.T, lefts @ (rights @ A.T)
        norm = ((lefts.T @ lefts) * (rights @ rights.T)).sum().clamp(min=0).sqrt()
        rate = self.learning_rate / (1 / B.square().sum() + 2 * self.regularization)
        correction = best = torch.zeros_like(B)
        lowest = math.inf
        for _ in range(self.steps + 1):
            current = B + correction
            image = current @ gram
            length = (current * image).sum().clamp(min=0).sqrt()
            if norm == 0 or length == 0:
                break
            similarity = (current * towards).sum() / (norm * length)
            loss = (1 - similarity + self.regularization * correction.square().sum()).item()
            if loss < lowest:
                lowest, best = loss, correction
            slope = similarity * image / length**2 - towards / (norm * length) + 2 * self.regularization * correction
            correction = correction - rate * slope
        return best


class CoLR(Operator):
    """CoLR: one factor is trained from zero and averaged, the other drawn orthonormal from a seed each round.

    Nguyen et al. (WWW 2024). As all clients share the drawn factor, the mean of the products is the product of the
    averaged factor with it; it goes into the base weight each round. Clients start from :meth:`fresh`.

    Args:
        trained_factor: ``"B"`` (default) or ``"A"``; the other one is drawn.

    Raises:
        ValueError: If it is something else.

    Example:
        >>> operator = CoLR()
        >>> start = operator.fresh((3, 4), rank=2, round=0, seed=1)
        >>> torch.allclose(start.A @ start.A.T, torch.eye(2), atol=1e-6)
        True
        >>> pairs = [LowRankPair(torch.full((3, 2), value), start.A) for value in (1.0, 3.0)]
        >>> operator.aggregate(pairs, round=0, seed=1).change.B[0]
        tensor([2., 2.])
    """

    redraws: ClassVar[bool] = True
    changes_base: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def __init__(self, trained_factor: Literal["B", "A"] = "B") -> None:
        check_choice("trained_factor", trained_factor, Literal["B", "A"])
        self.trained_factor: Literal["B", "A"] = trained_factor

    @override
    def trained(self, round: int) -> Factors:
        return ONLY_B if self.trained_factor == "B" else ONLY_A

    @override
    def sent_down(self, round: int) -> Factors:
        return NEITHER

    @override
    def sent_down_of_change(self, round: int) -> Factors:
        return self.trained(round)

    @override
    def absorbing(self, round: int) -> Factors:
        return self.trained(round)

    @override
    def _draw(self, shape: tuple[int, int], rank: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        rows, length = shape
        side = length if self.trained_factor == "B" else rows
        # Column by column, so that the first columns do not depend on the number of columns.
        columns = [torch.randn(side, generator=draws, dtype=torch.float64, device="cpu") for _ in range(rank)]
        basis = haar_basis(torch.stack(columns, dim=1))
        if self.trained_factor == "B":
            return basis.new_zeros(rows, rank), basis.T
        return basis, basis.new_zeros(rank, length)

    @override
    def _aggregate(self, inputs: LayerInputs) -> Broadcast:
        # The drawn factor is the same at every scaling, so the trained factor absorbs differences.
        B, A = inputs.one_averaged(self.trained_factor, folded=self.trained_factor)
        return self._redrawn(inputs, LowRankPair(B, A, inputs.scaling))


def _zero_padded(inputs: LayerInputs) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """The clients' factors padded with zeros to the largest rank, and their means."""
    lefts, rights = inputs.factors()
    lefts = [padded(left, inputs.largest, 1) for left in lefts]
    rights = [padded(right, inputs.largest, 0) for right in rights]
    return lefts, rights, inputs.mean(lefts, 1, owned=False), inputs.mean(rights, 0, owned=False)
