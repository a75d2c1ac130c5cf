"""Base of aggregation-broadcast operators (ABO), which map clients' factors to the factors that clients receive."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_lowrank.arguments import Configured, recorded_arguments
from lightning_lowrank.lora.inputs import BOTH, NEITHER, ONLY_B, Broadcast, Factors, LayerInputs
from lightning_lowrank.lora.pairs import LowRankPair, check_rank
from lightning_lowrank.seeding import derive_seed, generator

__all__ = ["Operator"]


class Operator(Configured, ABC):
    """An aggregation-broadcast operator; :meth:`aggregate` describes its work on one layer.

    It is a pure function of one layer's factors (Chen et al., "Convergence Analysis of Aggregation-Broadcast in
    LoRA-enabled Distributed Fine-Tuning", Definition 1). A subclass has the arithmetic, and chooses which factors are
    trained and sent. A federated algorithm calls :meth:`aggregate_model` once a round.

    Rounds count from 0. By default both factors are trained, sent up and sent down, clients of one rank receive the
    same pair, and the base weight does not change.

    Attributes:
        broadcasts: ``"common"``: clients of one rank and scaling receive the same pair, and one outside the
            cohort receives ``server.resized(rank, scaling, absorbing(round))``. ``"personal"``: each client has its
            own pair.
        redraws: Whether the pairs that clients receive are drawn by :meth:`fresh`, and need not be sent.
        new_basis: Whether the pairs that clients receive are those of an SVD, whose basis differs from the last one's.
        changes_base: Whether there is a change of the base weight, which every client needs, also outside the cohort.
        mixed_ranks: Whether clients of different ranks can be aggregated.
        linear: Whether for clients of one rank the result depends on the mean of each sent factor alone.
        selects: Whether clients can upload some of their slots, which :meth:`select_ranks` chooses.
    """

    broadcasts: ClassVar[Literal["common", "personal"]] = "common"
    redraws: ClassVar[bool] = False
    new_basis: ClassVar[bool] = False
    changes_base: ClassVar[bool] = False
    mixed_ranks: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    selects: ClassVar[bool] = False

    def trained(self, round: int) -> Factors:
        """The factors that clients train in a round; the other factor is frozen."""
        return BOTH

    def sent_up(self, round: int) -> Factors:
        """The factors that a client sends after a round; by default those that it trained."""
        return self.trained(round)

    def sent_down(self, round: int) -> Factors:
        """The factors of a client's new pair that the server sends after a round.

        The client has the others, or draws them from the seed. By default those that were sent up.
        """
        return self.sent_up(round)

    def sent_down_of_change(self, round: int) -> Factors:
        """The factors of the base weight's change that the server sends after a round; by default none."""
        return NEITHER

    def absorbing(self, round: int) -> Factors:
        """The factors that absorb differences between clients' scalings, in equal shares; by default ``B``."""
        return ONLY_B

    @torch.no_grad()
    def aggregate(
        self,
        pairs: Sequence[LowRankPair],
        weights: Sequence[float] | Tensor | None = None,
        *,
        ranks: Sequence[int] | None = None,
        scalings: Sequence[float] | None = None,
        round: int = 0,
        seed: int = 0,
        previous: LowRankPair | None = None,
    ) -> Broadcast:
        """Aggregate one layer; the arguments are not modified.

        Clients of different rank have different scalings if these are ``alpha / rank`` (or ``alpha / √rank``). The
        effective updates ``scaling · B @ A`` are aggregated, and the factors of :meth:`absorbing` absorb a difference:
        ``B``, but with `CoLR` the trained factor, and with ``split="balanced"`` both.

        Args:
            pairs: The clients' pairs after their training, of one weight, in one dtype and on one device. A factor
                that is not sent up has the value that the server holds.
            weights: The clients' weights, such as their numbers of samples; ``None`` (default): equal weights.
            ranks: The rank at which each client receives its pair. By default that of its own pair.
            scalings: The scaling at which each client receives its pair. By default that of its own pair.
            round: The round that ends, from 0.
            seed: The seed of the layer's draws, the same in every round. Default: 0.
            previous: The server's pair from before the round. With it, slots that none of this round's clients has keep
                their values. Default: none.

        Returns:
            The pairs for the clients and the server, and the change of the base weight, in the clients' dtype.

        Raises:
            TypeError: If an argument is of a wrong type.
            ValueError: If there are no pairs or one is ``None``, of another weight, dtype or device, or not finite; if
                a rank exceeds a side of the weight; if the scalings are not those of one ``alpha``; if weights,
                ranks, scalings or the round are out of range; if ranks differ although they must be equal, or clients
                have different values of a factor that was not trained.
        """
        inputs = LayerInputs(pairs, weights, ranks, scalings, round, seed, previous)
        self._check(inputs)
        return self._on_their_devices({"": inputs})[""]

    @torch.no_grad()
    def aggregate_model(
        self,
        clients: Sequence[Mapping[str, LowRankPair]],
        weights: Sequence[float] | Tensor | None = None,
        *,
        ranks: Sequence[Mapping[str, int]] | None = None,
        scalings: Sequence[Mapping[str, float]] | None = None,
        round: int = 0,
        seed: int = 0,
        previous: Mapping[str, LowRankPair] | None = None,
    ) -> dict[str, Broadcast]:
        """Aggregate all layers of a model, as :meth:`aggregate` does one.

        Args:
            clients: For each client its pairs by layer.
            weights: The clients' weights.
            ranks: For each client the rank by layer.
            scalings: For each client the scaling by layer.
            round: The round that ends, from 0.
            seed: A seed from which each layer's is derived, by the layer's name.
            previous: The server's pairs by layer.

        Returns:
            The results by layer.

        Raises:
            ValueError: Naming the layer, or if a client lacks a layer that another has.
        """
        if not len(clients):
            raise ValueError("clients must hold at least one client's layers, but is empty.")
        names = list(clients[0])
        for client, layers in enumerate(clients):
            for has, lacks, of in ((names, layers, client), (layers, clients[0], 0)):
                missing = [name for name in has if name not in lacks]
                if missing:
                    raise ValueError(
                        f"all clients must have the same layers, but client {of} lacks {', '.join(map(repr, missing))}."
                    )
        by_layer = {}
        for name in names:
            try:
                by_layer[name] = LayerInputs(
                    [layers[name] for layers in clients],
                    weights,
                    None if ranks is None else [layers[name] for layers in ranks],
                    None if scalings is None else [layers[name] for layers in scalings],
                    round,
                    derive_seed(seed, name),
                    None if previous is None else previous[name],
                )
                self._check(by_layer[name])
            except ValueError as error:
                raise ValueError(f"layer {name!r}: {error}") from error
        return self._on_their_devices(by_layer)

    def _on_their_devices(self, by_layer: Mapping[str, LayerInputs]) -> dict[str, Broadcast]:
        return {name: found.to(by_layer[name].device) for name, found in self._aggregate_layers(by_layer).items()}

    @torch.no_grad()
    def fresh(
        self,
        shape: tuple[int, int],
        rank: int,
        *,
        scaling: float = 1.0,
        round: int = 0,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> LowRankPair:
        """The initial pair of a round, for operators that redraw pairs; its product is zero.

        Args:
            shape: ``(m, n)``, the weight's.
            rank: At most ``min(m, n)``. The pair of a smaller rank has the first slots of that of a larger one.
            scaling: The pair's. Default: 1.
            round: The round that starts, from 0.
            seed: The layer's seed; the same seed gives the same pair on the server and all clients.
            dtype: Of the factors.
            device: Of the factors.

        Returns:
            The pair. An operator may draw its own; by default it is LoRA's as PEFT starts it: ``B = 0``, and ``A``
            uniform in ±1/√n (Kaiming, a = √5).

        Raises:
            TypeError: If the rank is not an integer.
            ValueError: If the rank is below 1 or above a side of the weight.

        Example:
            >>> from lightning_lowrank.lora import FLoRA
            >>> pair = FLoRA().fresh((6, 4), rank=2, seed=1)
            >>> pair.A.shape, pair.product().abs().max().item()
            (torch.Size([2, 4]), 0.0)
        """
        check_rank("rank", rank, shape)
        factors = self._draw(shape, rank, generator(seed, "fresh", round))
        # Convert the dtype first, because the device may lack float64.
        B, A = (factor.to(dtype).to(device) for factor in factors)
        return LowRankPair(B, A.contiguous(), scaling)

    def _draw(self, shape: tuple[int, int], rank: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        """``B`` and ``A`` for :meth:`fresh`, in float64 on the CPU."""
        # Row by row, so that the first rows do not depend on the number of rows.
        rows = [torch.rand(shape[1], generator=draws, dtype=torch.float64, device="cpu") for _ in range(rank)]
        right = (2 * torch.stack(rows) - 1) / math.sqrt(shape[1])
        return right.new_zeros(shape[0], rank), right

    def select_ranks(
        self, pairs: Mapping[str, LowRankPair], received: Mapping[str, LowRankPair], budget: int, round: int
    ) -> dict[str, Tensor]:
        """The slots that a client uploads, by layer, ``budget`` slots in total; see :class:`LoRAA2`."""
        raise NotImplementedError(f"{self!r} chooses no slots.")

    def _check(self, inputs: LayerInputs) -> None:
        ranks = [pair.rank for pair in inputs.pairs]
        if not self.mixed_ranks and (min(ranks) < inputs.largest or set(inputs.ranks) != {inputs.largest}):
            raise ValueError(
                f"{type(self).__name__} needs clients of one rank, but the clients' ranks are {ranks} and those to be "
                f"received {inputs.ranks}; use RBLA or ZeroPadding."
            )

    def _aggregate_layers(self, by_layer: Mapping[str, LayerInputs]) -> dict[str, Broadcast]:
        """Aggregate layer by layer; override this to decide for all layers together."""
        return {name: self._aggregate(inputs) for name, inputs in by_layer.items()}

    @abstractmethod
    def _aggregate(self, inputs: LayerInputs) -> Broadcast:
        """Aggregate one layer of checked inputs."""

    def _redrawn(self, inputs: LayerInputs, change: LowRankPair) -> Broadcast:
        """Fresh pairs for the next round, together with the change of the base weight."""
        drawn = functools.partial(
            self.fresh, inputs.shape, round=inputs.round + 1, seed=inputs.seed, dtype=inputs.dtype, device=inputs.device
        )
        received = {target: drawn(target[0], scaling=target[1]) for target in set(inputs.targets)}
        clients = tuple(received[target] for target in inputs.targets)
        return Broadcast(clients, drawn(inputs.largest_wanted, scaling=inputs.scaling), inputs.cast(change))

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in recorded_arguments(self).items())
        return f"{type(self).__name__}({arguments})"
