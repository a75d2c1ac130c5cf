"""Base of methods whose clients train the cores of `CoreProduct` layers, between factors that all parties know."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.federated.algorithm import LocalStep, detached
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.protocols import ChangesBase
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server, copy_into
from lightning_lowrank.layers import CoreProduct, LowRankLayer, low_rank_layers


class CoreMethod(ChangesBase):
    """A method that trains cores between factors known to server and clients, ``base.state["bases"]``.

    The known factors are parameters of the module as well. They are not sent down, and up only if they are trained.
    """

    heads: str
    """The layers' `CoreProduct` as text, for error messages."""

    def __init__(self) -> None:
        self.layers: dict[str, LowRankLayer] = {}

    def suits(self, factorization: CoreProduct) -> bool:
        """Whether the method supports the factorization's number of heads."""
        raise NotImplementedError

    def start(self, base: Base) -> dict[str, Tensor]:
        """The factors that server and clients know before the first round, by parameter name."""
        raise NotImplementedError

    def setup(self, base: Base) -> None:
        """Find the layers, and install their known factors.

        Raises:
            MisconfigurationException: If there are no layers for the method, or low-rank layers of another kind.
        """
        name = type(self).__name__
        self.layers = dict(low_rank_layers(base.module, tied=False))
        advice = f"put LowRank({self.heads}, rank=16, freeze_rest=True) before FederatedLoop in `callbacks`"
        if not self.layers:
            raise MisconfigurationException(
                f"{name} trains small cores in changes to frozen weights, but the module has no low-rank layer:"
                f" {advice}."
            )
        for layer_name, layer in self.layers.items():
            made = layer.factorization
            if layer.role != "update" or not isinstance(made, CoreProduct) or not self.suits(made):
                raise MisconfigurationException(
                    f"{name} needs layers of role 'update' made of {self.heads}, but {layer_name!r} has role"
                    f" {layer.role!r} and {made!r}: {advice}."
                )
            if layer.frozen_weight.requires_grad:
                raise MisconfigurationException(
                    f"{name} needs frozen weights in the cores' layers, but that of {layer_name!r} is trained:"
                    " leave train_base out."
                )
        if "bases" not in base.state:
            base.state["bases"] = detached(self.start(base))
            copy_into(dict(base.module.named_parameters()), base.state["bases"])

    def name(self, layer: str, factor: str) -> str:
        """Name of the parameter of a layer's factor."""
        return f"{layer}.factors.{factor}"

    def reference(self, base: Base, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The values that training starts from: the received tensors and the known factors."""
        return {**received, **base.state["bases"]}

    def broadcast(self, server: Server, client: ClientInfo) -> Message:
        """The global model without the factors that clients already know."""
        known = server.base.state["bases"]
        return Message({name: value for name, value in server.sent_down().items() if name not in known})

    def begin(self, client: ClientContext, message: Message) -> None:
        """Install the received tensors and the known factors."""
        start = self.reference(client.base, message.tensors)
        copy_into(client.model, {name: value for name, value in start.items() if name in client.model})

    def before_step(self, step: LocalStep) -> None:
        for parameter in self.fixed_in_round(step.round):
            if parameter in step.parameters:
                step.parameters[parameter].grad = None

    def end(self, client: ClientContext) -> Message:
        """The trained parameters and the buffers."""
        still = self.fixed_in_round(client.round)
        sent = client.base.sent_up(client.model)
        return Message({name: value for name, value in sent.items() if name not in still})
