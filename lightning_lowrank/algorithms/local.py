"""Training on each client alone, without federation: the lower bound in comparisons."""

from __future__ import annotations

from lightning_lowrank.federated.algorithm import Algorithm, Claims, detached
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server, copy_into, trained_tensors


class LocalTraining(Algorithm):
    """Every client trains its own model on its own samples; nothing is sent.

    A client starts from the initial model, and continues from its own model when it is drawn again. The global model
    does not change, so evaluate the clients' own models: ``FederatedLoop(..., personal_test=...)``. The upper bound,
    training on all samples in one place, is `FedAvg` with one client.

    Example:
        >>> from lightning_lowrank import FederatedLoop, LabelCount, LocalTraining
        >>> loop = FederatedLoop(LocalTraining(), clients=20, partition=LabelCount(2))
    """

    claims = Claims(local_part="the whole model")

    def setup(self, base: Base) -> None:
        """Keep the initial model, from which each client starts."""
        if "initial" not in base.state:
            base.state["initial"] = detached(trained_tensors(base.module))

    def broadcast(self, server: Server, client: ClientInfo) -> Message:
        return Message({})

    def begin(self, client: ClientContext, message: Message) -> None:
        copy_into(client.model, client.state.get("personal") or client.base.state["initial"])

    def end(self, client: ClientContext) -> Message:
        client.state["personal"] = detached(client.model)
        return Message({})

    def receive(self, server: Server, client: ClientInfo, message: Message, weight: float) -> None:
        """Ignore the empty message."""

    def aggregate(self, server: Server) -> None:
        """Leave the global model unchanged."""
