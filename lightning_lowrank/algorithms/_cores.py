"""What methods share whose clients train the cores of `CoreProduct` layers, between factors that all sides know."""

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
    """A method whose sides all know some of the factors from which a round starts: ``base.state["bases"]``.

    They are parameters of the module as well. They are not sent down, and up only if they step.
    """

    heads: str
    """What the layers' `CoreProduct` is, in a message."""

    def __init__(self) -> None:
        self.layers: dict[str, LowRankLayer] = {}

    def suits(self, factorization: CoreProduct) -> bool:
        """Return whether the method is for cores of this number of heads."""
        raise NotImplementedError

    def start(self, base: Base) -> dict[str, Tensor]:
        """Return the factors that all sides know before the first round, by the parameters' names."""
        raise NotImplementedError

    def setup(self, base: Base) -> None:
        """Find the layers, and install what they start from.

        Raises:
            MisconfigurationException: If there are no layers for the method, or low-rank layers of another kind.
        """
        name = type(self).__name__
        self.layers = dict(low_rank_layers(base.module, tied=False))
        advice = f"put LowRank({self.heads}, rank=16, freeze_rest=True) before FederatedLoop in `callbacks`"
        if not self.layers:
            raise MisconfigurationException(
                f"{name} trains small cores in changes to frozen weights, and the module has no low-rank layer:"
                f" {advice}."
            )
        for layer_name, layer in self.layers.items():
            made = layer.factorization
            if layer.role != "update" or not isinstance(made, CoreProduct) or not self.suits(made):
                raise MisconfigurationException(
                    f"{name} needs layers of role 'update' made of {self.heads}, and {layer_name!r} has role"
                    f" {layer.role!r} and {made!r}: {advice}."
                )
            if layer.frozen_weight.requires_grad:
                raise MisconfigurationException(
                    f"{name} leaves the weights beside the cores as they are, and that of {layer_name!r} is trained:"
                    " leave train_base out."
                )
        if "bases" not in base.state:
            base.state["bases"] = detached(self.start(base))
            copy_into(dict(base.module.named_parameters()), base.state["bases"])

    def name(self, layer: str, factor: str) -> str:
        """Return the parameter that is a layer's factor."""
        return f"{layer}.factors.{factor}"

    def reference(self, base: Base, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return what training starts from: what was received, and the factors that all sides know."""
        return {**received, **base.state["bases"]}

    def broadcast(self, server: Server, client: ClientInfo) -> Message:
        """Return the global model without the factors that all sides know."""
        known = server.base.state["bases"]
        return Message({name: value for name, value in server.sent_down().items() if name not in known})

    def begin(self, client: ClientContext, message: Message) -> None:
        """Install the received values and the factors that all sides know."""
        start = self.reference(client.base, message.tensors)
        copy_into(client.model, {name: value for name, value in start.items() if name in client.model})

    def before_step(self, step: LocalStep) -> None:
        for parameter in self.unstepped(step.round):
            if parameter in step.parameters:
                step.parameters[parameter].grad = None

    def end(self, client: ClientContext) -> Message:
        """Return what was trained, and the buffers."""
        still = self.unstepped(client.round)
        sent = client.base.sent_up(client.model)
        return Message({name: value for name, value in sent.items() if name not in still})
