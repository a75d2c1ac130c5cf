"""Operators that average factors: Product-Sum and its relatives.

The mean of products is not the product of means. These operators deal with that in different ways: they accept it
(:class:`ProductSum`, :class:`RBLA`, :class:`ZeroPadding`), train one factor at a time, for which the two are
equal (:class:`FFA`, :class:`FedSVD`, :class:`RoLoRA`, :class:`LoRAA2`), or share one factor only (:class:`FedSA`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_lowrank.aggregation.aggregator import float64_device
from lightning_lowrank.arguments import check_integer
from lightning_lowrank.lora.inputs import BOTH, ONLY_A, ONLY_B, Broadcast, Factors, LayerInputs
from lightning_lowrank.lora.operator import Operator
from lightning_lowrank.lora.operators.svd import truncated_svd
from lightning_lowrank.lora.pairs import LowRankPair

__all__ = ["FFA", "RBLA", "FedSA", "FedSVD", "LoRAA2", "ProductSum", "RoLoRA", "ZeroPadding"]


class ProductSum(Operator):
    """Product-Sum (PS): the mean of ``B`` and the mean of ``A`` (Eqs. 9-10 of ABO).

    It minimises both constants of the strong convergence condition. FedIT aggregates like this. For clients of one
    rank; :class:`RBLA` and :class:`ZeroPadding` are its extensions to several.

    Example:
        >>> pairs = [LowRankPair(torch.full((3, 1), b), torch.full((1, 2), a)) for b, a in ((1.0, 0.0), (3.0, 2.0))]
        >>> ProductSum().aggregate(pairs).server.product()[0]
        tensor([2., 2.])
    """

    mixed_ranks: ClassVar[bool] = False
    linear: ClassVar[bool] = True

    @override
    def _aggregate(self, inputs: LayerInputs) -> Broadcast:
        return inputs.averaged(owned=False)


class RBLA(Operator):
    """Rank-based LoRA aggregation: each rank slot is averaged over the clients that have it (Chen et al., 2024).

    Every client receives the first slots, as many as its rank. With equal ranks this is :class:`ProductSum`.

    Example:
        >>> small = LowRankPair(torch.ones(3, 1), torch.ones(1, 2))
        >>> large = LowRankPair(torch.full((3, 2), 5.0), torch.ones(2, 2))
        >>> RBLA().aggregate([small, large]).server.B[0]
        tensor([3., 5.])
    """

    linear: ClassVar[bool] = True

    @override
    def _aggregate(self, inputs: LayerInputs) -> Broadcast:
        return inputs.averaged(owned=True)


class ZeroPadding(ProductSum):
    """HetLoRA's aggregation: the mean of factors that are padded with zeros to the largest rank (Cho et al., 2024).

    For HetLoRA's weighting by sparsity, pass such weights to :meth:`aggregate`. Its self-pruning is not included.

    Example:
        >>> small = LowRankPair(torch.ones(3, 1), torch.ones(1, 2))
        >>> large = LowRankPair(torch.full((3, 2), 5.0), torch.ones(2, 2))
        >>> ZeroPadding().aggregate([small, large]).server.B[0]
        tensor([3.0000, 2.5000])
    """

    mixed_ranks: ClassVar[bool] = True


class FFA(Operator):
    """FFA-LoRA: ``A`` is drawn once and fixed, ``B`` is trained and averaged (Sun et al., ICLR 2024).

    With a common ``A`` the mean of products is the product of means. A client of smaller rank has the first rows of
    ``A``; its missing columns of ``B`` count as zero, so that this holds for it too.

    Example:
        >>> pairs = [LowRankPair(torch.full((3, 1), b), torch.ones(1, 2)) for b in (1.0, 3.0)]
        >>> FFA().aggregate(pairs).server.product()[0]
        tensor([2., 2.])
    """

    linear: ClassVar[bool] = True

    @override
    def trained(self, round: int) -> Factors:
        return ONLY_B

    @override
    def _aggregate(self, inputs: LayerInputs) -> Broadcast:
        trained = self.trained(inputs.round)
        (name,) = trained
        return inputs.broadcast(*inputs.one_averaged(name), kept=BOTH - trained)


class FedSVD(FFA):
    r"""FedSVD: `FFA` with an ``A`` that follows the training, by an SVD at the server (Lee et al., NeurIPS 2025).

    Clients train and send ``B``. The server averages it, and takes the SVD of the product with the ``A`` that all hold:
    :math:`\bar B A = U \Sigma V^\top`. Then ``A`` is :math:`V^\top`, whose rows are orthonormal, and ``B`` is
    :math:`U \Sigma`. The product does not change. Beyond its rank, the rows of :math:`A` are drawn from the seed. A
    client of smaller rank has the leading part.

    Args:
        period: Rounds from one factorisation to the next; in the others only ``B`` changes, as in `FFA`. Default: each
            round.

    Raises:
        ValueError: If the period is below 1.

    Example:
        >>> pairs = [LowRankPair(torch.full((3, 1), b), torch.full((1, 4), 0.5)) for b in (1.0, 3.0)]
        >>> server = FedSVD().aggregate(pairs).server
        >>> server.product()[0].round(decimals=4), (server.A @ server.A.T).round(decimals=4)
        (tensor([1., 1., 1., 1.]), tensor([[1.]]))
    """

    new_basis: ClassVar[bool] = True

    def __init__(self, period: int = 1) -> None:
        check_integer("period", period)
        self.period = period

    @override
    def sent_down(self, round: int) -> Factors:
        return BOTH if self._factorises(round) else ONLY_B

    @override
    def _aggregate(self, inputs: LayerInputs) -> Broadcast:
        common = super()._aggregate(inputs)
        if not self._factorises(inputs.round):
            return common
        rank, scaling = common.server.rank, common.server.scaling
        found = truncated_svd([common.server], torch.ones(1), rank, "exact", inputs.seed, inputs.dtype)
        received = {target: found.split(target[0], "left", target[1], inputs.dtype) for target in set(inputs.targets)}
        clients = tuple(received[target] for target in inputs.targets)
        return Broadcast(clients, found.split(rank, "left", scaling, inputs.dtype))

    def _factorises(self, round: int) -> bool:
        return (round + 1) % self.period == 0


class RoLoRA(FFA):
    """RoLoRA: odd rounds train and average ``B``, even rounds ``A`` (Chen et al., 2024).

    ``B`` starts at zero, so ``A`` would have no gradient in the first round. The source counts rounds from 1; here they
    count from 0, and rounds 0, 2, … train ``B``.

    Example:
        >>> operator = RoLoRA()
        >>> [sorted(operator.trained(round)) for round in range(3)]
        [['B'], ['A'], ['B']]
    """

    @override
    def trained(self, round: int) -> Factors:
        return ONLY_A if round % 2 else ONLY_B


class LoRAA2(RoLoRA):
    r"""LoRA-A²: alternating training as in `RoLoRA`, with uploads of the most important rank slots only.

    Koo et al. (2024). A client whose budget is below its rank calls :meth:`select_ranks` on its whole model, and
    uploads these slots of the trained factor. In the other slots the aggregated pair has the values that the
    client received. For the source's separate learning rates of the factors, use the optimizer's groups.

    Example:
        >>> operator = LoRAA2()
        >>> received = {"layer": LowRankPair(torch.zeros(3, 2), torch.ones(2, 4))}
        >>> trained = {"layer": LowRankPair(torch.tensor([[1.0, 2.0]] * 3), torch.ones(2, 4))}
        >>> operator.select_ranks(trained, received, budget=1, round=0)
        {'layer': tensor([1])}
    """

    selects = True

    @torch.no_grad()
    def importance(self, pair: LowRankPair, received: LowRankPair, round: int) -> Tensor:
        r"""The change of the effective weight by each rank slot during a round's training.

        Args:
            pair: A client's, after its training.
            received: The same before it.
            round: The round, from 0.

        Returns:
            ``[rank]``: :math:`s \|\Delta B_{:,j} A_{j,:}\|_F`, or :math:`s \|B_{:,j} \Delta A_{j,:}\|_F` if ``A`` is
            trained.

        Raises:
            ValueError: If the pairs differ in shape, rank or scaling.
        """
        found, wanted = ((p.shape, p.rank, p.scaling) for p in (pair, received))
        if found != wanted:
            raise ValueError(
                f"received must be of the pair's shape, rank and scaling, {found}, but its are {wanted}; it is the "
                "pair with which the client began the round."
            )
        pair, received = (p.to(float64_device(p.B.device)) for p in (pair, received))
        left, right = pair.B.double(), pair.A.double()
        if "A" in self.trained(round):
            right = right - received.A.double()
        else:
            left = left - received.B.double()
        return pair.scaling * left.norm(dim=0) * right.norm(dim=1)

    def select_ranks(
        self, pairs: Mapping[str, LowRankPair], received: Mapping[str, LowRankPair], budget: int, round: int
    ) -> dict[str, Tensor]:
        """The slots that a client uploads: the most important ones of its whole model.

        Args:
            pairs: The client's pairs by layer, after its training.
            received: The same before it.
            budget: How many slots, over all layers (the source's budget per layer times the number of layers), 1 or
                more.
            round: The round, from 0.

        Returns:
            By layer, the selected slots in ascending order; between equally important ones, the first.

        Raises:
            TypeError: If the budget is not an integer.
            ValueError: If the budget is below 1, a layer was not received, or a pair differs from the received one in
                shape, rank or scaling.
        """
        check_integer("budget", budget)
        missing = [name for name in pairs if name not in received]
        if missing:
            raise ValueError(f"received must have all layers of pairs, but lacks {', '.join(map(repr, missing))}.")
        scores = [self.importance(pair, received[name], round).cpu() for name, pair in pairs.items()]
        order = torch.argsort(torch.cat(scores), descending=True, stable=True)
        chosen = torch.zeros(len(order), dtype=torch.bool)
        chosen[order[:budget]] = True
        parts = chosen.split([len(score) for score in scores])
        devices = [pair.B.device for pair in pairs.values()]
        return {
            name: part.nonzero().flatten().to(device) for name, part, device in zip(pairs, parts, devices, strict=True)
        }


class FedSA(Operator):
    """FedSA-LoRA: both factors are trained, ``A`` alone is averaged, and ``B`` stays with its client.

    Guo et al. (ICLR 2025): ``A`` learns the clients' common features, ``B`` those of a single client. With clients of
    different rank, each row of ``A`` is averaged over the clients that have it. The server's ``B`` is the mean of
    the given ones and is used in validation only; if clients keep ``B``, the given ones are the server's own.

    Example:
        >>> pairs = [LowRankPair(torch.full((3, 1), b), torch.full((1, 2), b)) for b in (1.0, 3.0)]
        >>> [client.product()[0] for client in FedSA().aggregate(pairs).clients]
        [tensor([2., 2.]), tensor([6., 6.])]
    """

    broadcasts: ClassVar[Literal["common", "personal"]] = "personal"
    linear: ClassVar[bool] = True

    @override
    def sent_up(self, round: int) -> Factors:
        return ONLY_A

    @override
    def _aggregate(self, inputs: LayerInputs) -> Broadcast:
        common = inputs.averaged(owned=True)
        clients = []
        for pair, received in zip(inputs.pairs, common.clients, strict=True):
            own = pair.resized(received.rank, received.scaling)
            clients.append(LowRankPair(own.B, received.A.clone(), received.scaling))
        return Broadcast(tuple(clients), common.server)
