"""MOON: a contrastive loss pulls features to the global model's, away from those of the client's last model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank.configuration import check_number
from lightning_lowrank.federated.algorithm import LocalStep, detached
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.objective import add_to_loss, part_of, recorded, tensor_of, with_weights
from lightning_lowrank.federated.protocols import OwnSteps
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo


class MOON(OwnSteps):
    r"""Model-contrastive federated learning (Li et al., CVPR 2021, Eqs. 3 and 4, Algorithm 1).

    With the features :math:`z` of a batch under the client's model, :math:`z_g` under the model that it received, and
    :math:`z_p` under its own model at the end of the last round in which it took part, the loss is

    .. math:: \ell + \mu\,\ell_\mathrm{con}, \qquad
        \ell_\mathrm{con} = -\log\frac{\exp(\cos(z, z_g)/\tau)}{\exp(\cos(z, z_g)/\tau) + \exp(\cos(z, z_p)/\tau)},

    averaged over the batch. In a client's first round :math:`z_p` is :math:`z_g`. The messages are those of `FedAvg`. A
    client keeps its last model.

    Args:
        features: Name of the submodule whose output, flattened, is :math:`z`. The module's direct child that holds it,
            such as ``network`` of ``network.hidden.1``, has to be called once in ``training_step``, with the batch's
            inputs.
        mu: Weight :math:`\mu` of the contrastive loss, 0 or more. Default 1. The paper tunes it over 0.1, 1, 5, 10.
        temperature: :math:`\tau`, above 0. Default 0.5, the paper's.

    Raises:
        MisconfigurationException: If an argument is out of range, the module has no such submodule, or the submodule is
            a list or dictionary of modules. In a step: if it is not called once, or its output is no tensor.

    Example:
        >>> from lightning_lowrank import MOON, Dirichlet, FederatedLoop
        >>> loop = FederatedLoop(MOON(features="network.hidden.1"), clients=10, partition=Dirichlet(0.5))
    """

    def __init__(self, features: str, mu: float = 1.0, temperature: float = 0.5) -> None:
        check_number("mu", mu, least=0)
        check_number("temperature", temperature, above=0)
        self.features, self.mu, self.temperature = features, mu, temperature

    def setup(self, base: Base) -> None:
        part = part_of(base.module, self.features)
        if type(part) in (nn.ModuleList, nn.ModuleDict):
            inside = [f"{self.features}.{name}" for name, _ in part.named_children()]
            raise MisconfigurationException(
                f"MOON(features={self.features!r}) names a {type(part).__name__}, which is never called and has no"
                f" output; name a layer of it: {inside}."
            )

    def begin(self, client: ClientContext, message: Message) -> None:
        super().begin(client, message)
        received = detached(client.model)
        client.round_state.update(received=received, last=client.state.get("last", received))

    def passes(self, client: ClientInfo) -> tuple[float, float]:
        """Three forward passes and one backward: the received and the client's last model compute features too."""
        return 3, 1

    def loss(self, step: LocalStep, batch: Any, training_step: Callable[[], Any]) -> Any:
        """Add the contrastive loss."""
        module, network = step.base.module, self.features.split(".")[0]
        with recorded(module, network) as calls, recorded(module, self.features) as own:
            output = training_step()
        if output is None:
            return None
        if len(calls) != 1 or len(own) != 1:
            raise MisconfigurationException(
                f"MOON(features={self.features!r}) needs training_step to call {network!r} and {self.features!r} once,"
                f" and it called them {len(calls)} and {len(own)} times; name another submodule."
            )
        (call,) = calls
        features = tensor_of(own[0].output, module, self.features, f"MOON(features={self.features!r})").flatten(1)
        similarities = []
        for model in (step.round_state["received"], step.round_state["last"]):
            with recorded(module, self.features) as other:
                with_weights(module, network, model, call)
            similarities.append(F.cosine_similarity(features, other[0].output.flatten(1)))
        logits = torch.stack(similarities, dim=1) / self.temperature
        return add_to_loss(output, -self.mu * F.log_softmax(logits, dim=1)[:, 0].mean())

    def end(self, client: ClientContext) -> Message:
        client.state["last"] = detached(client.model)
        return super().end(client)
