"""Federated averaging: every client trains the global model on its own data, the server averages the results."""

from __future__ import annotations

from lightning_lowrank.federated.algorithm import Algorithm, Claims


class FedAvg(Algorithm):
    """Federated averaging (McMahan et al., 2017, Algorithm 1).

    The server sends the global model, clients send their trained models, and the new global model is the weighted mean
    of these. With `LowRank` before the loop, the factors are trained, sent and averaged.

    Example:
        >>> from lightning_lowrank import FedAvg, FederatedLoop, IID
        >>> loop = FederatedLoop(FedAvg(), clients=10, clients_per_round=5, partition=IID())
    """

    claims = Claims(trained_set_may_change=True)
