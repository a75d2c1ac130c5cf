"""FedDyn: each client's objective is regularized so that its minima agree with those of the global objective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_lowrank.configuration import check_number
from lightning_lowrank.federated.algorithm import Algorithm, LocalStep, detached
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.objective import add_to_loss
from lightning_lowrank.federated.state import ClientContext, Server


class FedDyn(Algorithm):
    r"""Federated learning with dynamic regularization (Acar et al., ICLR 2021, Algorithm 1).

    A client minimizes :math:`\ell(\theta) - \langle g_k, \theta\rangle + \frac{\alpha}{2}\|\theta - \theta_t\|^2` with
    the model :math:`\theta_t` that it received and its own :math:`g_k`, 0 at first, and then sets
    :math:`g_k \leftarrow g_k - \alpha(\theta_k - \theta_t)`. If :math:`m` clients can be drawn in all, and :math:`P`
    are the round's clients, the server computes

    .. math:: h \leftarrow h - \alpha \frac{|P|}{m} (\bar\theta - \theta_t), \qquad
        \theta \leftarrow \bar\theta - \frac{1}{\alpha} h,

    where :math:`\bar\theta` is the mean of the round's models with the loop's ``weighting``; the paper's is
    ``"uniform"``. Buffers are averaged. The messages are those of `FedAvg`. A client keeps :math:`g_k`.

    Args:
        alpha: Strength :math:`\alpha`, above 0. Default 0.1. The paper tunes it over 0.1, 0.01 and 0.001.

    Raises:
        MisconfigurationException: If ``alpha`` is out of range.

    Example:
        >>> from lightning_lowrank import Dirichlet, FedDyn, FederatedLoop
        >>> loop = FederatedLoop(FedDyn(alpha=0.01), clients=100, clients_per_round=10, partition=Dirichlet(0.3))
    """

    def __init__(self, alpha: float = 0.1) -> None:
        check_number("alpha", alpha, above=0)
        self.alpha = alpha

    def begin(self, client: ClientContext, message: Message) -> None:
        super().begin(client, message)
        received = detached(client.base.parameters(client.model))
        linear = client.state.get("linear") or {name: torch.zeros_like(value) for name, value in received.items()}
        client.round_state.update(received=received, linear=linear)

    def loss(self, step: LocalStep, batch: Any, training_step: Callable[[], Any]) -> Any:
        output = training_step()
        received, linear = step.round_state["received"], step.round_state["linear"]
        for name, value in step.parameters.items():
            pull = self.alpha / 2 * (value - received[name]).square().sum()
            output = add_to_loss(output, pull - (linear[name] * value).sum())
        return output

    @torch.no_grad()
    def end(self, client: ClientContext) -> Message:
        received, linear = client.round_state["received"], client.round_state["linear"]
        client.state["linear"] = {n: linear[n] - self.alpha * (client.model[n] - received[n]) for n in linear}
        return super().end(client)

    @torch.no_grad()
    def aggregate(self, server: Server) -> None:
        mean, share = server.aggregated(), server.aggregator.arrivals / server.clients
        terms = server.state.setdefault("h", {})
        for name, start in server.parameters().items():
            change = (mean[name] - start) * (self.alpha * share)
            terms[name] = terms[name] - change if name in terms else -change
            mean[name] = mean[name] - terms[name] / self.alpha
        server.update_model(mean)
