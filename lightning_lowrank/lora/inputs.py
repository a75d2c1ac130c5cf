"""Inputs of one layer's aggregation, checked and brought to a common scale, and its result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_lowrank.aggregation.aggregator import float64_device
from lightning_lowrank.arguments import check_integer, check_number
from lightning_lowrank.lora.pairs import LowRankPair, check_pairs, check_rank, normalised_weights, padded

__all__ = ["BOTH", "NEITHER", "ONLY_A", "ONLY_B", "Broadcast", "Factors", "LayerInputs", "slot_weights"]

Factors = frozenset[Literal["B", "A"]]
"""Some of a pair's two factors, by name."""

BOTH: Factors = frozenset({"B", "A"})
ONLY_B: Factors = frozenset({"B"})
ONLY_A: Factors = frozenset({"A"})
NEITHER: Factors = frozenset()


@dataclass(frozen=True, eq=False)
class Broadcast:
    """The result of one layer's aggregation; no tensor shares memory with the inputs.

    After the round, the layer's base weight is :math:`W_0` plus ``change``'s product, on the server and all clients. A
    client's effective weight is the base weight plus the product of its pair; validation uses the pair ``server``.

    Attributes:
        clients: The pair that each client receives, in the order in which they were given. Clients of one rank and
            scaling may share one.
        server: The global pair.
        change: The change of the base weight, with a scaling of its own, or ``None``. Its rank may exceed both sides
            of the weight.
    """

    clients: tuple[LowRankPair, ...]
    server: LowRankPair
    change: LowRankPair | None = None

    def to(self, device: torch.device) -> Broadcast:
        """The same result on another device; clients that share a pair object still share it."""
        moved = {id(pair): pair.to(device) for pair in self.clients}
        change = None if self.change is None else self.change.to(device)
        return Broadcast(tuple(moved[id(pair)] for pair in self.clients), self.server.to(device), change)


@dataclass(frozen=True)
class AggregatedRound:
    """Inputs and results of one round's aggregation, for observers that measure it.

    Args:
        round: Number of the round, from 0.
        pairs: For each client its pairs by layer, as the server knows them: a factor that a client does not send is
            the server's.
        weights: The clients' weights.
        broadcasts: The operator's results, by layer.
    """

    round: int
    pairs: Sequence[Mapping[str, LowRankPair]]
    weights: Sequence[float]
    broadcasts: Mapping[str, Broadcast]


class LayerInputs:
    """The checked inputs of one layer's aggregation; ``scaling`` is the common scaling of the clients' factors."""

    def __init__(
        self,
        pairs: Sequence[LowRankPair],
        weights: Sequence[float] | Tensor | None,
        ranks: Sequence[int] | None = None,
        scalings: Sequence[float] | None = None,
        round: int = 0,
        seed: int = 0,
        previous: LowRankPair | None = None,
    ) -> None:
        check_pairs(pairs)
        first = pairs[0]
        self.shape, self.dtype, self.device = first.shape, first.B.dtype, first.B.device
        working = float64_device(self.device)
        self.pairs = [pair.to(working) for pair in pairs]
        _check_alpha(self.pairs)
        self.weights = normalised_weights(weights, len(self.pairs))
        self.ranks = [pair.rank for pair in self.pairs] if ranks is None else list(ranks)
        self.scalings = [pair.scaling for pair in self.pairs] if scalings is None else list(scalings)
        for name, values in (("ranks", self.ranks), ("scalings", self.scalings)):
            if len(values) != len(self.pairs):
                raise ValueError(
                    f"{name} must be one for each of {len(self.pairs)} clients, but there are {len(values)}."
                )
        for client, (rank, scaling) in enumerate(zip(self.ranks, self.scalings, strict=True)):
            check_rank(f"ranks[{client}]", rank, self.shape)
            check_number(f"scalings[{client}]", scaling, above=0)
        check_integer("round", round, least=0)
        if previous is not None and previous.shape != self.shape:
            raise ValueError(f"previous must be of the clients' {self.shape} weight, but is of a {previous.shape} one.")
        self.round, self.seed = round, seed
        self.previous = None if previous is None else previous.to(working)
        self.largest = max(pair.rank for pair in self.pairs)
        self.scaling = next(pair.scaling for pair in self.pairs if pair.rank == self.largest)

    @property
    def targets(self) -> list[tuple[int, float]]:
        """The rank and scaling at which each client receives its pair."""
        return list(zip(self.ranks, self.scalings, strict=True))

    @property
    def largest_wanted(self) -> int:
        """The largest rank among the pairs that clients receive and the server's previous pair."""
        return max([*self.ranks, *([] if self.previous is None else [self.previous.rank])])

    def factors(self, folded: Literal["B", "A"] = "B") -> tuple[list[Tensor], list[Tensor]]:
        """The clients' ``B`` and ``A`` in float64, with one of them rescaled to the common scaling."""
        lefts = [pair.B.double() for pair in self.pairs]
        rights = [pair.A.double() for pair in self.pairs]
        changed = lefts if folded == "B" else rights
        for client, pair in enumerate(self.pairs):
            if pair.scaling != self.scaling:
                changed[client] = changed[client] * (pair.scaling / self.scaling)
        return lefts, rights

    def mean(self, tensors: Sequence[Tensor], dim: Literal[0, 1], *, owned: bool) -> Tensor:
        """Average factors slot by slot along dimension ``dim``.

        With ``owned``, a slot is averaged over the clients that have it. Otherwise it counts as zero at the others.
        """
        shares = slot_weights([tensor.shape[dim] for tensor in tensors], self.weights, owned=owned)
        total = padded(torch.zeros_like(tensors[0]), self.largest, dim)
        for tensor, share in zip(tensors, shares.to(total.device), strict=True):
            slots = share[: tensor.shape[dim]]
            total.narrow(dim, 0, len(slots)).add_(tensor * (slots if dim else slots[:, None]))
        return total

    def stacked(self, lefts: Sequence[Tensor]) -> Tensor:
        """The clients' left factors times their weights, concatenated along the rank."""
        return torch.cat([left * weight for left, weight in zip(lefts, self.weights.tolist(), strict=True)], dim=1)

    def one_averaged(self, trained: Literal["B", "A"], folded: Literal["B", "A"] = "B") -> tuple[Tensor, Tensor]:
        """``B`` and ``A``: the mean of the trained factor, and the other factor, which all clients share."""
        lefts, rights = self.factors(folded)
        if trained == "B":
            return self.mean(lefts, 1, owned=False), self.frozen("A", rights)
        return self.frozen("B", lefts), self.mean(rights, 0, owned=False)

    def averaged(self, *, owned: bool) -> Broadcast:
        """Both factors averaged as by :meth:`mean`, as a `Broadcast`."""
        lefts, rights = self.factors()
        kept = BOTH if owned else ONLY_A
        return self.broadcast(self.mean(lefts, 1, owned=owned), self.mean(rights, 0, owned=owned), kept=kept)

    def frozen(self, name: Literal["B", "A"], factors: Sequence[Tensor]) -> Tensor:
        """The factor that all clients share; raises if a client's first slots differ from it."""
        dim = 1 if name == "B" else 0
        common = next(factor for factor in factors if factor.shape[dim] == self.largest)
        for client, factor in enumerate(factors):
            expected = common.narrow(dim, 0, factor.shape[dim])
            # A copy into which another scaling was folded is exact only to the factors' precision.
            allowed = 8 * torch.finfo(self.dtype).eps * expected.abs().max()
            if (factor - expected).abs().max() > allowed:
                raise ValueError(
                    f"{name} is not trained in round {self.round}, so all clients must hold the same, but client "
                    f"{client}'s differs; give them one {name} at the start, as Operator.fresh draws it."
                )
        return common.clone()

    def broadcast(
        self, B: Tensor, A: Tensor, change: LowRankPair | None = None, *, kept: Factors = NEITHER
    ) -> Broadcast:
        """A common pair as a `Broadcast`, cut to each client's rank.

        The further slots of ``previous`` keep the values of the factors in ``kept``; the other's are zero.
        """
        if self.previous is not None and self.previous.rank > B.shape[1]:
            own, rank = B.shape[1], self.previous.rank
            old = self.previous.B.double() * (self.previous.scaling / self.scaling), self.previous.A.double()
            B = torch.cat([B, old[0][:, own:]], dim=1) if "B" in kept else padded(B, rank, 1)
            A = torch.cat([A, old[1][own:]]) if "A" in kept else padded(A, rank, 0)
        whole = LowRankPair(B, A, self.scaling)
        received = {target: self.cast(whole.resized(*target)) for target in set(self.targets)}
        return Broadcast(
            tuple(received[target] for target in self.targets), self.cast(whole.resized(whole.rank)), change
        )

    def cast(self, pair: LowRankPair) -> LowRankPair:
        """The pair in the clients' dtype."""
        return LowRankPair(pair.B.to(self.dtype), pair.A.to(self.dtype), pair.scaling)


def slot_weights(ranks: Sequence[int], weights: Tensor, *, owned: bool) -> Tensor:
    """Each client's share in the mean of each rank slot, ``[clients, largest rank]``; see `LayerInputs.mean`."""
    owns = torch.arange(max(ranks)) < torch.tensor(list(ranks))[:, None]
    shares = weights[:, None] * owns
    if not owned:
        return shares
    total = shares.sum(dim=0)
    # Clients of weight zero share a slot equally if no other client has it.
    return torch.where(total > 0, shares / total, owns / owns.sum(dim=0))


def _check_alpha(pairs: Sequence[LowRankPair]) -> None:
    """Raise if the scalings cannot result from one alpha by any of LoRA's rules."""
    rules = [
        [pair.scaling for pair in pairs],
        [pair.scaling * pair.rank for pair in pairs],
        [pair.scaling * math.sqrt(pair.rank) for pair in pairs],
    ]
    if any(max(alphas) <= min(alphas) * (1 + 1e-6) for alphas in rules):
        return
    found = ", ".join(f"{pair.scaling:g} at rank {pair.rank}" for pair in pairs)
    raise ValueError(
        "all clients must have one alpha, so that their scalings are equal, or alpha / rank, or alpha / √rank, but "
        f"they are {found}."
    )
