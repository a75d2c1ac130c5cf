"""FedHM: clients of different capacity train models of different rank; the server averages the composed weights."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.aggregation.aggregator import working_dtype
from lightning_lowrank.algorithms._capacity import copy_blocks_into
from lightning_lowrank.configuration import check_choice, check_number
from lightning_lowrank.federated.algorithm import Claims, LocalStep
from lightning_lowrank.federated.capacities import Capacities, Capacity, refuse_kept_moments
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.protocols import UnequalClients
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server, State
from lightning_lowrank.layers import LowRankLayer, MatrixProduct, low_rank_layers
from lightning_lowrank.optim.orthonormal import rank_above_noise

Score = Literal["level", "inverse"]

_LARGEST_EXPONENT = 500.0


class FedHM(UnequalClients):
    r"""Federated low-rank models of heterogeneous rank (Yao et al., 2021, arXiv:2111.14655, Algorithm 1).

    A level :math:`\gamma` is a rank ratio: a client of level :math:`\gamma < 1` trains factors of rank
    :math:`\max(\mathrm{round}(\gamma c_\text{out}), 1)` of each converted layer, which start from the truncated
    decomposition :math:`U\sqrt\Sigma, V\sqrt\Sigma` of the global weight (spectral initialisation); a client of level
    1 trains the weight itself. The server recovers :math:`U V^\top` (Eq. 1) and averages (Eq. 2) with weights
    :math:`\alpha_p \propto \exp(\gamma_p / \tau)` over the round's clients. The loop's ``weighting`` is not used.
    Biases, normalisation, its statistics and the layers that stay dense (the *hybrid* network) are averaged with the
    same weights.

    Put ``LowRank(MatrixProduct(), rank_ratio=..., train_base=True)`` before the loop, with the largest level below 1 as
    ``rank_ratio``, and the layers that stay dense in ``exclude``. The paper's Frobenius decay is its
    ``frobenius_decay``, static BatchNorm is `StaticBatchNorm`, and masked cross-entropy is
    ``FederatedLoop(objective=MaskAbsentClasses())``.

    Messages in both directions contain the tensors that the client trains: factors of its own rank or the weight, and
    the rest of the model. After each round the module is the dense global model; the low-rank ones are evaluated too.

    Args:
        levels: Rank ratios, in (0, 1], at least one below 1. The paper's by default.
        capacity: ``"fixed"``: a client always has the same level; levels are assigned in turns, in the order of ids.
            ``"dynamic"``: each client's level is drawn in each round.
        shares: Relative number of clients of each level, or its chance to be drawn; equal by default. ``[2, 1, 1]``
            with levels .5, .25 and .125 is the paper's FedHM-V2.
        temperature: :math:`\tau`; the paper has 5 in the dynamic setting. ``None`` (default), its choice in the fixed
            one, is infinity: all clients have the same weight.
        score: Argument of the softmax: the ``"level"`` :math:`\gamma`, or, as in the authors' code, ``"inverse"``,
            :math:`-1/\gamma`.
        server_model: In the dynamic setting, average the server's own model in, as a client of level 1, in rounds
            without such a client, as the authors' code does. Off by default.

    Raises:
        MisconfigurationException: If an argument is out of range, or the module was not converted as above; or, when
            a client is drawn again, if it kept an optimizer's state, which is of other factors.

    Example:
        >>> from lightning_lowrank import Dirichlet, FederatedLoop, FedHM, LowRank, MatrixProduct
        >>> callbacks = [
        ...     LowRank(
        ...         MatrixProduct(), rank_ratio=0.5, train_base=True, frobenius_decay=1e-4,
        ...         exclude=["conv1", "layer1.0", "downsample", "fc"],
        ...     ),
        ...     FederatedLoop(FedHM(), clients=20, clients_per_round=10, partition=Dirichlet(0.5), local_epochs=10),
        ... ]
    """

    claims = Claims(new_basis="the factors of each weight", static_batch_norm=True)

    def __init__(
        self,
        levels: Sequence[float] = (1.0, 0.5, 0.25, 0.125),
        capacity: Capacity = "fixed",
        shares: Sequence[float] | None = None,
        temperature: float | None = None,
        score: Score = "level",
        server_model: bool = False,
    ) -> None:
        self._capacities = Capacities("levels", levels, capacity, shares)
        if not all(0 < level <= 1 for level in levels) or min(levels) == 1:
            raise MisconfigurationException(
                f"levels must be rank ratios above 0 and at most 1, one of them below 1, but is {list(levels)}; if all"
                " clients train the dense model, that is FedAvg."
            )
        check_choice("score", score, Score)
        if temperature is not None:
            check_number("temperature", temperature, above=0, hint="None for infinity")
        if server_model and capacity == "fixed":
            raise MisconfigurationException(
                "server_model=True is for capacity='dynamic', where a round may have no client of level 1 by chance."
            )
        self.levels, self.capacity, self.shares = tuple(levels), capacity, shares
        self.temperature = temperature
        self.score = score
        self.server_model = server_model
        spread = self._exponent(1.0) - self._exponent(min(levels))
        if spread > _LARGEST_EXPONENT:
            raise MisconfigurationException(
                f"temperature={temperature} makes the weight of level {min(levels)} vanish next to that of level 1:"
                f" use at least {spread * (temperature or 1) / _LARGEST_EXPONENT:.3g}."
            )
        self._layers: dict[str, LowRankLayer] = {}
        self._absent: frozenset[str] = frozenset()
        self._source: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}
        self._variants: dict[float, Mapping[str, Tensor]] = {}

    def setup(self, base: Base) -> None:
        """Check the conversion, and fold the factors into the weights, which then are the whole model."""
        self._layers = dict(low_rank_layers(base.module, tied=False))
        largest = max(level for level in self.levels if level < 1)
        wanted = f"put LowRank(MatrixProduct(), rank_ratio={largest:g}, train_base=True) before FederatedLoop"
        if not self._layers:
            raise MisconfigurationException(
                f"FedHM trains factors of weights, and the module has no low-rank layer: {wanted}."
            )
        for name, layer in self._layers.items():
            plain = isinstance(layer.factorization, MatrixProduct) and not (layer.decouple or layer.half_frozen)
            if layer.role != "update" or not layer.frozen_weight.requires_grad or not plain:
                raise MisconfigurationException(
                    f"FedHM needs layers that can train a weight or its two factors, and {name!r} is not one of them:"
                    f" {wanted}, with the weight trainable and without decouple and half_frozen."
                )
            if layer.rank != self._rank(layer, largest):
                raise MisconfigurationException(
                    f"layer {name!r} has rank {layer.rank}, and FedHM's largest level below 1, {largest:g}, is rank"
                    f" {self._rank(layer, largest)}: {wanted}."
                )
        self.configure(base, None)
        for layer in self._layers.values():
            layer.fold()
            with torch.no_grad():
                for factor in layer.factors.values():
                    factor.zero_()

    def group_key(self, client: ClientInfo) -> Hashable:
        """Whether the client trains weights instead of factors; only clients with equal keys step together."""
        return self._capacities.level(client) == 1

    def computed(self, base: Base, client: ClientInfo) -> Mapping[str, float]:
        """For a client below level 1, the shares of the factors' columns that take part in its computation."""
        level = self._capacities.level(client)
        if level == 1:
            return {}
        shares = {prefix: self._rank(layer, level) / layer.rank for prefix, layer in self._layers.items()}
        return {
            name: share
            for prefix, share in shares.items()
            for name in (f"{prefix}.frozen_weight", *_factor_names(prefix, self._layers[prefix]))
        }

    def configure(self, base: Base, client: ClientInfo | None) -> None:
        dense = client is None or self._capacities.level(client) == 1
        for _, layer in low_rank_layers(base.module):
            layer.active = "base" if dense else "factors"
        self._absent = frozenset(
            name
            for prefix, layer in self._layers.items()
            for name in (_factor_names(prefix, layer) if dense else (f"{prefix}.frozen_weight",))
        )

    def broadcast(self, server: Server, client: ClientInfo) -> Message:
        level = self._capacities.level(client)
        factors = {} if level == 1 else self._spectral_factors(server)
        return Message(self._sent({**server.sent_down(), **factors}, level))

    def begin(self, client: ClientContext, message: Message) -> None:
        """Install the message; columns beyond the client's rank, and tensors that it does not train, become zero."""
        refuse_kept_moments(client, "the factors that FedHM gives a client are new in each round")
        with torch.no_grad():
            for name in client.model.keys() & self._absent:
                client.model[name].zero_()
        copy_blocks_into(client.model, message.tensors)

    def before_step(self, step: LocalStep) -> None:
        """Drop gradients of tensors that the client does not have; they arise if a model reads a layer's weight."""
        for name in self._absent:
            step.parameters[name].grad = None

    def end(self, client: ClientContext) -> Message:
        return Message(self._sent(client.base.sent_up(client.model), self._capacities.level(client)))

    def receive(self, server: Server, client: ClientInfo, message: Message, weight: float) -> None:
        level = self._capacities.level(client)
        tensors = dict(message.tensors)
        if level == 1:
            server.state["full_model"] = True
        else:
            for name, layer in self._layers.items():
                factors = {factor: tensors.pop(f"{name}.factors.{factor}") for factor in layer.factors}
                tensors[f"{name}.frozen_weight"] = layer.factorization.compose(factors, layer.weight_shape)
        server.aggregator.add(tensors, self._weight(level))

    def aggregate(self, server: Server) -> None:
        if not server.state.pop("full_model", False) and self.server_model:
            server.aggregator.add(self._sent(server.base.sent_up(server.model), 1.0), self._weight(1.0))
        super().aggregate(server)

    def variants(self, server: Server) -> dict[str, Mapping[str, Tensor]]:
        """For each level below 1, the global model with its weights truncated to the level's ranks.

        These models have no BatchNorm statistics of their own: `StaticBatchNorm` computes them, and without it those of
        the global model are used.
        """
        return {f"{level:g}": self._variant(server, level) for level in self.levels if level < 1}

    def model_for(self, server: Server, client: ClientInfo) -> Mapping[str, Tensor]:
        return self._variant(server, self._capacities.level(client))

    def has_full_model(self, server: Server, client: ClientInfo, state: State) -> bool:
        return self._capacities.always(client, 1)

    def _variant(self, server: Server, level: float) -> Mapping[str, Tensor]:
        if level == 1:
            return server.parameters()
        factors = self._spectral_factors(server)
        if level not in self._variants:
            weights = {}
            for name, layer in self._layers.items():
                truncated = {
                    factor: factors[f"{name}.factors.{factor}"][:, : self._rank(layer, level)]
                    for factor in layer.factors
                }
                weights[f"{name}.frozen_weight"] = layer.factorization.compose(truncated, layer.weight_shape)
            self._variants[level] = weights
        return {**server.parameters(), **self._variants[level]}

    def _spectral_factors(self, server: Server) -> dict[str, Tensor]:
        """The factors of all global weights at the largest rank; those of a lower rank are their first columns."""
        weights = {name: server.model[f"{name}.frozen_weight"] for name in self._layers}
        if any(self._source.get(name) is not weight for name, weight in weights.items()):
            self._source, self._variants, self._factors = weights, {}, {}
            for name, layer in self._layers.items():
                factors = layer.factorization.decompose(weights[name], layer.rank)
                # Both columns of a value of zero are zero; Adam would train those of rounding noise like any others.
                values = factors["U"].square().sum(dim=0)
                for factor in factors.values():
                    factor[:, rank_above_noise(values, working_dtype(values.dtype)) :] = 0
                self._factors.update({f"{name}.factors.{factor}": value for factor, value in factors.items()})
        return self._factors

    def _sent(self, model: Mapping[str, Tensor], level: float) -> dict[str, Tensor]:
        """The part of a model that clients of a level have."""
        sent = dict(model)
        for name, layer in self._layers.items():
            if level < 1:
                del sent[f"{name}.frozen_weight"]
            for factor in _factor_names(name, layer):
                if level == 1:
                    del sent[factor]
                else:
                    sent[factor] = sent[factor][:, : self._rank(layer, level)]
        return sent

    @staticmethod
    def _rank(layer: LowRankLayer, level: float) -> int:
        shape = layer.weight_shape
        channels = shape[1] * getattr(layer, "groups", 1) if layer.first_is_input else shape[0]
        return max(round(level * channels), 1)

    def _exponent(self, level: float) -> float:
        if self.temperature is None:
            return 0.0
        return (level if self.score == "level" else -1 / level) / self.temperature

    def _weight(self, level: float) -> float:
        return math.exp(self._exponent(level) - self._exponent(1.0))


def _factor_names(prefix: str, layer: LowRankLayer) -> list[str]:
    return [f"{prefix}.factors.{factor}" for factor in layer.factors]
