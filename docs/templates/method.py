"""FedCM: a client steps along its own gradient and the direction in which all clients moved last (template).

A method is one file in ``lightning_lowrank/algorithms``: the idea in a line, the class with paper and formula, and the
hooks of `Algorithm` in which it differs from federated averaging. All nine are here, in order; delete the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.federated import Algorithm, Base, Claims, ClientContext, ClientInfo, LocalStep, Message, Server
from lightning_lowrank.federated.algorithm import zeros_like

# No tensor of a module has such a name.
_DIRECTION, _RATES = "fedcm.direction.", "fedcm.rates"


class FedCM(Algorithm):
    r"""Federated learning with client-level momentum (Xu et al., 2021, arXiv:2106.10874, Algorithm 1).

    A client steps along :math:`\alpha g + (1 - \alpha) \Delta` with its gradient :math:`g` and the direction that it
    was sent. The server averages the models. The next :math:`\Delta` is the mean change over the mean sum of the
    clients' learning rates, 0 at first. Down go the model and :math:`\Delta`; up come the model and a number.

    Args:
        alpha: Share :math:`\alpha` of the client's own gradient, above 0 and at most 1. Default 0.5.

    Raises:
        MisconfigurationException: If ``alpha`` is out of range, or the module has several optimizers or groups.
    """

    # What the loop must know of the method: here that no codec may change the sum of rates.
    claims = Claims(exact=frozenset({_RATES}), needs_only_mean=True)

    def __init__(self, alpha: float = 0.5) -> None:
        if not 0 < alpha <= 1:
            raise MisconfigurationException(f"alpha must be above 0 and at most 1, got {alpha}")
        self.alpha = alpha

    def setup(self, base: Base) -> None:
        groups = [group for optimizer in base.optimizers for group in optimizer.param_groups]
        if len(groups) != 1:
            raise MisconfigurationException(
                f"FedCM divides a client's change by one learning rate a step, and the module has {len(groups)} groups"
                " of parameters: return one optimizer with one group from configure_optimizers()."
            )

    # The server's half: what it keeps is in server.state, which checkpoints hold.

    def begin_round(self, server: Server) -> None:
        server.state.setdefault("direction", zeros_like(server.parameters()))

    def broadcast(self, server: Server, client: ClientInfo) -> Message:
        direction = {_DIRECTION + name: value for name, value in server.state["direction"].items()}
        return Message({**server.sent_down(), **direction})

    def receive(self, server: Server, client: ClientInfo, message: Message, weight: float) -> None:
        # As in federated averaging. Without this hook `needs_only_mean` needs no claim.
        server.aggregator.add(message.tensors, weight)

    def aggregate(self, server: Server) -> None:
        mean = server.aggregated()
        rates, start = mean.pop(_RATES), server.parameters()
        # At a learning rate of 0, as in a warm-up, nothing has moved.
        if rates > 0:
            server.state["direction"] = {name: (start[name] - mean[name]) / rates for name in start}
        server.update_model(mean)

    # The client's half: it reads its context and the message, and keeps what lasts in client.state.

    def begin(self, client: ClientContext, message: Message) -> None:
        model, direction = message.split(_DIRECTION)
        super().begin(client, Message(model))
        client.round_state.update(direction=direction, rates=torch.zeros((), device=client.base.device))

    def loss(self, step: LocalStep, batch: Any, training_step: Callable[[], Any]) -> Any:
        # As in federated averaging; `objective.add_to_loss(training_step(), term)` adds a term.
        return training_step()

    @torch.no_grad()
    def before_step(self, step: LocalStep) -> None:
        # Where clients step together, each tensor has them as its first dimension.
        for name, value in step.parameters.items():
            momentum = (1 - self.alpha) * step.round_state["direction"][name]
            # A parameter that the loss does not depend on has the gradient 0.
            value.grad = momentum if value.grad is None else value.grad.mul_(self.alpha).add_(momentum)
        step.round_state["rates"] += step.base.optimizers[0].param_groups[0]["lr"]

    def end(self, client: ClientContext) -> Message:
        return Message({**super().end(client).tensors, _RATES: client.round_state["rates"]})
