"""Measured constants in the convergence conditions of Chen et al. (ABO), for one layer in one round.

The paper proves convergence if an operator's distances to the clients' factors stay within constants times the
squared learning rate. These functions compute the distances, and the smallest ones that a common pair can have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_lowrank.aggregation.aggregator import to_float64
from lightning_lowrank.lora.inputs import Broadcast, LayerInputs, slot_weights
from lightning_lowrank.lora.pairs import LowRankPair, inner_products, padded

__all__ = ["ConvergenceConstants", "convergence_constants"]


@dataclass(frozen=True)
class ConvergenceConstants:
    r"""Measured constants of the convergence conditions; means are weighted like the aggregation.

    :math:`E_i` is the effective update that client i receives (its pair's product plus the change of the base weight),
    and :math:`M` the mean of the clients' own :math:`s B_i A_i`. Divide by the squared learning rate for the paper's
    :math:`R^2`, :math:`P^2` and :math:`Q^2`.

    A gap is the distance to the optimum among pairs that are common to all clients. It is negative if an
    operator's pairs are personal and nearer to the clients than any common one.

    Attributes:
        weak: :math:`\operatorname{mean}_i \|E_i - s B_i A_i\|_F^2` (Definition 2).
        strong_B: :math:`\operatorname{mean}_i \|P_i - B_i\|_F^2` (Definition 3), where :math:`P_i` is the ``B`` that
            client i receives. Scalings are folded into ``B``, relative to that of the client of largest rank. A slot
            that one of the two lacks counts as zero there.
        strong_A: :math:`\operatorname{mean}_i \|Q_i - A_i\|_F^2`, the same for ``A``.
        weak_gap: ``weak`` minus its smallest value, which :math:`E = M` has (Corollary 1).
        strong_B_gap: ``strong_B`` minus its smallest value, which the mean has (Corollary 2); if clients receive
            different ranks, the mean of each slot over the clients that receive it.
        strong_A_gap: The same for ``A``.
        aggregation_error: :math:`\|E - M\|_F` with the server's :math:`E`.
        broadcast_error: :math:`\sqrt{\operatorname{mean}_i \|E_i - M\|_F^2}`, the clients' root mean square error.
        effective_rank: Of the server's :math:`E`, with singular values :math:`\sigma_j`: :math:`\exp(-\sum_j p_j \log
            p_j)`, :math:`p_j = \sigma_j / \sum_k \sigma_k` (Roy and Vetterli, 2007). 0 if :math:`E` is zero.
        energy_beyond: The share of :math:`\|E\|_F^2` beyond the leading singular values, as many as the smallest
            client's rank. It tends to zero in the rank collapse of Wu et al. (2026), see `RaFLoRA`.
    """

    weak: float
    strong_B: float
    strong_A: float
    weak_gap: float
    strong_B_gap: float
    strong_A_gap: float
    aggregation_error: float
    broadcast_error: float
    effective_rank: float
    energy_beyond: float


@torch.no_grad()
def convergence_constants(
    pairs: Sequence[LowRankPair], broadcast: Broadcast, weights: Sequence[float] | Tensor | None = None
) -> ConvergenceConstants:
    """Measure the constants of the weak and the strong convergence condition, for one layer and round.

    No matrix of the weight's size is built: products enter by the Gram matrices of their factors, in float64. A
    squared distance is a difference of such inner products, so values below about 1e-15 of the products' squared norms
    (1e-8 for the two errors) are rounding errors.

    Args:
        pairs: The clients' pairs after their training.
        broadcast: The operator's result.
        weights: The weights given to the operator.

    Returns:
        The constants.

    Raises:
        TypeError: If ``pairs`` holds something else.
        ValueError: If an operator would refuse the pairs or weights, or they are not those of ``broadcast``.

    Example:
        >>> from lightning_lowrank.lora import ProductSum
        >>> pairs = [LowRankPair(torch.full((1, 1), b), torch.full((1, 1), b)) for b in (1.0, 3.0)]
        >>> found = convergence_constants(pairs, ProductSum().aggregate(pairs))
        >>> found.weak, found.weak_gap, found.strong_B, found.strong_B_gap, found.aggregation_error
        (17.0, 1.0, 1.0, 0.0, 1.0)
    """
    inputs = LayerInputs(pairs, weights)
    if len(broadcast.clients) != len(pairs) or broadcast.server.shape != inputs.shape:
        raise ValueError(
            f"broadcast must be made of pairs, but is for {len(broadcast.clients)} clients and a "
            f"{broadcast.server.shape} weight, and pairs are {len(pairs)} of a {inputs.shape} one."
        )
    broadcast = broadcast.to(inputs.pairs[0].B.device)
    weak, weak_least, aggregation, received = _of_products(inputs, broadcast)
    lefts, rights = inputs.factors()
    left = [pair.B.double() * (pair.scaling / inputs.scaling) for pair in broadcast.clients]
    right = [pair.A.double().T for pair in broadcast.clients]
    strong_left, least_left = _of_factors(lefts, left, inputs.weights)
    strong_right, least_right = _of_factors([factor.T for factor in rights], right, inputs.weights)
    return ConvergenceConstants(
        weak=weak,
        strong_B=strong_left,
        strong_A=strong_right,
        weak_gap=weak - weak_least,
        strong_B_gap=strong_left - least_left,
        strong_A_gap=strong_right - least_right,
        aggregation_error=aggregation**0.5,
        broadcast_error=received**0.5,
        **_spectrum(broadcast, min(pair.rank for pair in inputs.pairs)),
    )


def _spectrum(broadcast: Broadcast, smallest: int) -> dict[str, float]:
    """Effective rank and energy share, from the singular values of the server's effective update."""
    terms = [broadcast.server] if broadcast.change is None else [broadcast.server, broadcast.change]
    left = torch.cat([to_float64(pair.B.detach()) * pair.scaling for pair in terms], dim=1)
    right = torch.cat([to_float64(pair.A.detach()) for pair in terms])
    # The triangular factors are at most as large as the matrix, even if the factors are wider.
    cores = torch.linalg.qr(left).R, torch.linalg.qr(right.T).R
    values = torch.linalg.svdvals(cores[0] @ cores[1].T)
    total = values.sum()
    if total == 0:
        return {"effective_rank": 0.0, "energy_beyond": 0.0}
    shares = values / total
    return {
        "effective_rank": torch.special.entr(shares).sum().exp().item(),
        "energy_beyond": (values[smallest:].square().sum() / values.square().sum()).item(),
    }


def _of_products(inputs: LayerInputs, broadcast: Broadcast) -> tuple[float, float, float, float]:
    """The weak constant, its smallest value, and the squared errors of the server's pair and of the clients' pairs."""
    clients = len(inputs.pairs)
    # Clients of one rank may share a pair object, which is added once.
    terms = [*inputs.pairs, broadcast.server]
    places = {id(broadcast.server): clients}
    changes = [] if broadcast.change is None else [broadcast.change]
    for pair in [*broadcast.clients, *changes]:
        if id(pair) not in places:
            places[id(pair)] = len(terms)
            terms.append(pair)
    inner = inner_products(terms).cpu()

    def effective(pair: LowRankPair) -> Tensor:
        """A pair's effective update as coefficients of ``terms``."""
        row = torch.zeros(len(terms), dtype=torch.float64)
        for term in [pair, *changes]:
            row[places[id(term)]] += 1
        return row

    own = torch.eye(clients, len(terms), dtype=torch.float64)
    mean = inputs.weights @ own
    received = torch.stack([effective(pair) for pair in broadcast.clients])

    def squared(rows: Tensor) -> Tensor:
        return ((rows @ inner) * rows).sum(dim=-1).clamp(min=0)

    return (
        (inputs.weights @ squared(received - own)).item(),
        (inputs.weights @ squared(mean - own)).item(),
        squared(effective(broadcast.server) - mean).item(),
        (inputs.weights @ squared(received - mean)).item(),
    )


def _of_factors(own: Sequence[Tensor], received: Sequence[Tensor], weights: Tensor) -> tuple[float, float]:
    """The mean squared distance of clients' factors to the received ones, and its minimum over common factors."""
    ranks = [factor.shape[1] for factor in received]
    largest = max(*ranks, *(factor.shape[1] for factor in own))
    own = [padded(factor, largest, 1) for factor in own]
    best = torch.zeros_like(own[0])
    for factor, share in zip(own, slot_weights(ranks, weights, owned=True).to(best.device), strict=True):
        best[:, : len(share)] += factor[:, : len(share)] * share
    distance, least = 0.0, 0.0
    for weight, mine, theirs, rank in zip(weights.tolist(), own, received, ranks, strict=True):
        distance += weight * (mine - padded(theirs, largest, 1)).square().sum().item()
        least += weight * (mine - padded(best[:, :rank], largest, 1)).square().sum().item()
    return distance, least
