"""pFedMe: every client trains a personal model near to a local copy of the global model, which follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lightning_lowrank.configuration import check_integer, check_number
from lightning_lowrank.federated.algorithm import LocalStep, detached
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.protocols import OwnSteps
from lightning_lowrank.federated.state import ClientContext, ClientInfo, Server


class PFedMe(OwnSteps):
    r"""Personalized federated learning with Moreau envelopes (Dinh et al., NeurIPS 2020, Algorithm 1).

    The live module is a client's personal model :math:`\theta`, which begins each round at the global model
    :math:`w`. On every batch the module's own optimizer takes ``personal_steps`` steps on
    :math:`f(\theta) + \frac{\lambda}{2}\|\theta - w_k\|^2`, from the last :math:`\theta` (plain gradient descent with
    ``torch.optim.SGD(lr)``). Then the client's copy of the global model follows,
    :math:`w_k \leftarrow w_k - \eta\lambda(w_k - \theta)`. The copies are averaged, and the global model becomes
    :math:`(1-\beta) w + \beta \bar w`. The authors' release adds :math:`0.001\,\theta` to the gradient: that is
    ``torch.optim.SGD(lr, weight_decay=0.001)``.

    The messages are those of `FedAvg`. A client keeps its personal model, its last :math:`\theta` and its buffers, and
    is evaluated with it; a client that never took part is evaluated with the global model. With `LowRank` the factors
    are :math:`\theta` and :math:`w`.

    Args:
        regularization: Pull :math:`\lambda` between the two models, above 0. Default 15.
        personal_steps: Steps on :math:`\theta` on each batch, 1 or more (the paper's :math:`K`). Default 5.
        learning_rate: That of :math:`w_k`, :math:`\eta`, above 0. Default 0.005.
        mixing: Share :math:`\beta` of the clients' mean in the new global model, above 0. Above 1, as in the paper's
            experiments, the global model moves beyond the mean. Default 1.

    Raises:
        MisconfigurationException: If an argument is out of range.

    Example:
        >>> from lightning_lowrank import FederatedLoop, LabelCount, PFedMe
        >>> loop = FederatedLoop(
        ...     PFedMe(regularization=12, learning_rate=0.05), clients=20, partition=LabelCount(2), local_steps=23
        ... )
    """

    def __init__(
        self,
        regularization: float = 15.0,
        personal_steps: int = 5,
        learning_rate: float = 0.005,
        mixing: float = 1.0,
    ) -> None:
        check_number("regularization", regularization, above=0)
        check_integer("personal_steps", personal_steps)
        check_number("learning_rate", learning_rate, above=0)
        check_number("mixing", mixing, above=0)
        self.regularization = regularization
        self.personal_steps = personal_steps
        self.learning_rate = learning_rate
        self.mixing = mixing

    def begin(self, client: ClientContext, message: Message) -> None:
        super().begin(client, message)
        received = client.base.parameters(message.tensors)
        client.round_state["global"] = {name: working_copy(value) for name, value in received.items()}

    def before_step(self, step: LocalStep) -> None:
        pull(step.parameters, step.round_state["global"], self.regularization)

    def passes(self, client: ClientInfo) -> tuple[float, float]:
        return self.personal_steps, self.personal_steps

    def local_update(self, step: LocalStep, update: Callable[[], None]) -> None:
        for _ in range(self.personal_steps):
            update()
        with torch.no_grad():
            for name, value in step.round_state["global"].items():
                value.lerp_(step.parameters[name].to(value.dtype), self.learning_rate * self.regularization)

    def end(self, client: ClientContext) -> Message:
        client.state["personal"] = detached(client.model)
        copy = {name: value.to(client.model[name].dtype) for name, value in client.round_state["global"].items()}
        return Message({**client.base.sent_up(client.model), **copy})

    @torch.no_grad()
    def aggregate(self, server: Server) -> None:
        mean = server.aggregated()
        mixed = mix(server.model, server.base.parameters(mean), self.mixing)
        server.update_model({**mean, **mixed})


def working_copy(value: Tensor) -> Tensor:
    """A copy in at least single precision, because small steps would be rounded away in a lower one."""
    return value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)


@torch.no_grad()
def pull(parameters: Mapping[str, Tensor], centre: Mapping[str, Tensor], regularization: float) -> None:
    r"""Add the gradient :math:`\lambda(\theta - w)` of :math:`\frac{\lambda}{2}\|\theta - w\|^2`."""
    for name, value in parameters.items():
        if not value.requires_grad:
            # The client's step freezes it, and the term would give it no gradient either.
            continue
        if value.grad is None:
            # The module's loss does not depend on the parameter, and the term does.
            value.grad = torch.zeros_like(value)
        value.grad.add_(value - centre[name], alpha=regularization)


def mix(old: Mapping[str, Tensor], mean: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    r""":math:`(1-\beta)` ``old`` + :math:`\beta` ``mean``, for each tensor of ``mean``."""
    return {name: old[name].to(value.dtype).lerp(value, share) for name, value in mean.items()}
