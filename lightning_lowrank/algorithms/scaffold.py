"""SCAFFOLD: every gradient is corrected by how the client's own gradients differ from those of all.

Clients with unlike data drift towards their own optima between averages. Each client keeps a control variate, its mean
gradient of the last time that it took part; the server keeps the mean of all. Their difference is the drift.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.algorithms._sgd import parameter_groups
from lightning_lowrank.federated.algorithm import Algorithm, LocalStep
from lightning_lowrank.federated.client import Client, Server
from lightning_lowrank.federated.payload import Payload

# No module has tensors of these names beside those that they stand for.
_PREFIX = "scaffold."


class SCAFFOLD(Algorithm):
    r"""Stochastic controlled averaging (Karimireddy et al., ICML 2020, Algorithm 1, option II).

    With the server's control variate :math:`c` and the client's :math:`c_i`, both 0 at first, a client steps with
    :math:`y \leftarrow y - \eta(g_i(y) - c_i + c)`, clipped afterwards where the trainer clips. After its last step,

    .. math:: c_i^+ = c_i - c + \frac{x - y}{K\eta}, \qquad
        x \leftarrow x + \eta_g\,\overline{(y - x)}, \qquad
        c \leftarrow c + \frac{1}{N} \sum_{i \in S} (c_i^+ - c_i),

    where :math:`K\eta` is the sum of the learning rates that were used, so that schedules, groups and
    ``client_settings`` have their own, and :math:`N` is the number of all clients. As in the paper every client counts
    alike in :math:`c`; the mean of the models has the loop's ``weighting`` (the paper's is ``"uniform"``). Buffers are
    averaged as in `FedAvg`.

    Model and control variate cross the wire in both directions: twice the bytes of `FedAvg`. A client keeps its
    control variate. With `LowRank`, gradients and control variates are those of the factors.

    Args:
        lr_server: The server's step :math:`\eta_g` on the mean change, above 0. Default 1: the mean itself.

    Raises:
        MisconfigurationException: If ``lr_server`` is out of range, or clients do not step with one
            ``torch.optim.SGD`` without momentum: option II takes :math:`(x - y)/(K\eta)` for the mean of the
            gradients, which it is for no other.

    Example:
        >>> from lightning_lowrank import SCAFFOLD, Dirichlet, FederatedLoop
        >>> loop = FederatedLoop(SCAFFOLD(), clients=100, clients_per_round=10, partition=Dirichlet(0.3))
    """

    def __init__(self, lr_server: float = 1.0) -> None:
        if not 0 < lr_server < float("inf"):
            raise MisconfigurationException(f"lr_server must be a finite number above 0, got {lr_server}")
        self.lr_server = lr_server
        self._groups: dict[str, int] = {}

    def setup(self, server: Server) -> None:
        """Check the clients' optimizer."""
        self._groups = parameter_groups(server, "SCAFFOLD")
        for group in server.optimizers[0].param_groups:
            _check_plain(group)

    def begin_round(self, server: Server) -> None:
        """Make the server's control variate, in the first round."""
        if "control" not in server.memory:
            server.memory["control"] = _zeros(server.parameters(server.state))

    def broadcast(self, server: Server, client: Client) -> Payload:
        """Return the global model and the server's control variate."""
        return Payload({**server.sent_down(), **_prefixed(server.memory["control"])})

    def begin(self, server: Server, client: Client, payload: Payload, model: Mapping[str, Tensor]) -> None:
        """Install the model, and prepare the correction that all of the client's steps share."""
        received, control = _split(payload)
        super().begin(server, client, Payload(received), model)
        parameters = server.parameters(received)
        own = client.memory.get("control", _zeros(parameters))
        client.workspace = {
            "received": parameters,
            "correction": {name: value - own[name] for name, value in control.items()},
            "lr": torch.zeros(len(server.optimizers[0].param_groups), dtype=torch.float64, device=server.device),
        }

    @torch.no_grad()
    def before_step(self, server: Server, step: LocalStep) -> None:
        """Correct the gradients, and count the learning rates."""
        for number, group in enumerate(server.optimizers[0].param_groups):
            _check_plain(group)
            step.workspace["lr"][..., number] += group["lr"]
        for name, value in step.parameters.items():
            correction = step.workspace["correction"][name]
            # What the batch does not depend on has the gradient 0, and is corrected as well.
            value.grad = correction.clone() if value.grad is None else value.grad.add_(correction)

    @torch.no_grad()
    def end(self, server: Server, client: Client, model: Mapping[str, Tensor]) -> Payload:
        """Renew the client's control variate, and return the model and the control variate's change."""
        parameters = server.parameters(model)
        old = client.memory.get("control", _zeros(parameters))
        new = {}
        for name, value in parameters.items():
            lr = client.workspace["lr"][self._groups[name]]
            gradient = (client.workspace["received"][name] - value) / lr - client.workspace["correction"][name]
            # Without a step, or with learning rate 0 as in a warm-up, nothing is known of the gradient.
            new[name] = torch.where(lr > 0, gradient, old[name])
        client.memory["control"] = new
        return Payload({**server.sent_up(model), **_prefixed({name: new[name] - old[name] for name in new})})

    def receive(self, server: Server, client: Client, payload: Payload, weight: float) -> None:
        """Take in the model by its weight, and the change of the client's control variate without."""
        model, changes = _split(payload)
        server.mean.add(model, weight)
        sums = server.memory.get("changes", {})
        server.memory["changes"] = {
            name: change.double() + sums[name] if sums else change.double() for name, change in changes.items()
        }

    @torch.no_grad()
    def aggregate(self, server: Server) -> None:
        """Step on the mean change of the models, and bring the control variate up to date."""
        mean = server.mean.result()
        for name, value in server.parameters(mean).items():
            mean[name] = value.lerp(server.state[name], 1 - self.lr_server)
        server.state.update(mean)
        server.memory["control"] = {
            name: (server.memory["control"][name].double() + change / server.clients).to(mean[name].dtype)
            for name, change in server.memory.pop("changes").items()
        }


def _check_plain(group: Mapping[str, Any]) -> None:
    for option in ("momentum", "maximize"):
        if group[option]:
            raise MisconfigurationException(
                f"SCAFFOLD takes a client's change over its learning rates for its mean gradient, which it is not with"
                f" {option}={group[option]}: use torch.optim.SGD without it."
            )


def _zeros(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value, requires_grad=False) for name, value in parameters.items()}


def _prefixed(control: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {_PREFIX + name: value for name, value in control.items()}


def _split(payload: Payload) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a payload's model, and what it holds for control variates."""
    model, control = {}, {}
    for name, value in payload.tensors.items():
        if name.startswith(_PREFIX):
            control[name.removeprefix(_PREFIX)] = value
        else:
            model[name] = value
    return model, control
