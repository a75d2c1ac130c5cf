"""SCAFFOLD: every gradient is corrected by the difference between the client's own and all clients' gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.aggregation.aggregator import to_float64
from lightning_lowrank.algorithms._sgd import parameter_groups
from lightning_lowrank.configuration import check_number
from lightning_lowrank.federated.algorithm import Algorithm, LocalStep
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server

# No module has tensors of both names.
_PREFIX = "scaffold."


class SCAFFOLD(Algorithm):
    r"""Stochastic controlled averaging (Karimireddy et al., ICML 2020, Algorithm 1, option II).

    A client's control variate :math:`c_i` is its mean gradient in its last round, the server's :math:`c` the mean of
    all. Both are 0 at first, and their difference is the client's drift. A client steps with
    :math:`y \leftarrow y - \eta(g_i(y) - c_i + c)`, clipped afterwards where the trainer clips. After its last step,

    .. math:: c_i^+ = c_i - c + \frac{x - y}{K\eta}, \qquad
        x \leftarrow x + \eta_g\,\overline{(y - x)}, \qquad
        c \leftarrow c + \frac{1}{N} \sum_{i \in S} (c_i^+ - c_i),

    where :math:`K\eta` is the sum of the learning rates that were used, so that schedules, groups and
    ``client_settings`` have their own, and :math:`N` is the number of all clients that can be drawn. As in the paper
    every client counts alike in :math:`c`; the mean of the models has the loop's ``weighting`` (the paper's is
    ``"uniform"``). Buffers are averaged as in `FedAvg`.

    Model and control variate are sent in both directions: twice the bytes of `FedAvg`. A client keeps its control
    variate. With `LowRank`, gradients and control variates are those of the factors.

    Args:
        lr_server: The server's step :math:`\eta_g` on the mean change, above 0. Default 1: the mean itself.

    Raises:
        MisconfigurationException: If ``lr_server`` is out of range, or clients do not step with one
            ``torch.optim.SGD`` without momentum, for which alone :math:`(x - y)/(K\eta)` is the mean of the gradients.

    Example:
        >>> from lightning_lowrank import SCAFFOLD, Dirichlet, FederatedLoop
        >>> loop = FederatedLoop(SCAFFOLD(), clients=100, clients_per_round=10, partition=Dirichlet(0.3))
    """

    unprotected = "changes of control variates are summed as they arrive"

    def __init__(self, lr_server: float = 1.0) -> None:
        check_number("lr_server", lr_server, above=0)
        self.lr_server = lr_server
        self._groups: dict[str, int] = {}

    @property
    def needs_only_mean(self) -> bool:
        """True: the sum of the control variates' changes is their mean times the number of messages."""
        return True

    def setup_optimizers(self, base: Base) -> None:
        self._groups = parameter_groups(base, "SCAFFOLD")
        for group in base.optimizers[0].param_groups:
            _check_plain(group)

    def reference(self, base: Base, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the model only: the client sends the change of its control variate."""
        return _split(received)[0]

    def begin_round(self, server: Server) -> None:
        if "control" not in server.state:
            # Of 16 bits, it would lose what a small cohort adds.
            zeros = _zeros(server.parameters())
            server.state["control"] = {name: value.to(_precise(value)) for name, value in zeros.items()}

    def broadcast(self, server: Server, client: ClientInfo) -> Message:
        sent = {name: value.to(server.model[name].dtype) for name, value in server.state["control"].items()}
        return Message({**server.sent_down(), **_prefixed(sent)})

    def begin(self, client: ClientContext, message: Message) -> None:
        """Install the model, and prepare the correction that all of the client's steps share."""
        received, control = _split(message.tensors)
        super().begin(client, Message(received))
        parameters = client.base.parameters(received)
        own = client.state.get("control", _zeros(parameters))
        groups = client.base.optimizers[0].param_groups
        client.round_state.update(
            {
                "received": parameters,
                "correction": {name: value - own[name] for name, value in control.items()},
                # On the CPU, so that no step waits for a device.
                "lr": torch.zeros(len(groups), dtype=torch.float64),
            }
        )

    @torch.no_grad()
    def before_step(self, step: LocalStep) -> None:
        for number, group in enumerate(step.base.optimizers[0].param_groups):
            _check_plain(group)
            step.round_state["lr"][..., number] += group["lr"]
        for name, value in step.parameters.items():
            correction = step.round_state["correction"][name]
            # A parameter that the loss does not depend on has the gradient 0, and is corrected too.
            value.grad = correction.clone() if value.grad is None else value.grad.add_(correction)

    @torch.no_grad()
    def end(self, client: ClientContext) -> Message:
        """Update the client's control variate, and return the model and the control variate's change."""
        parameters = client.base.parameters(client.model)
        old = client.state.get("control", _zeros(parameters))
        new = {}
        for name, value in parameters.items():
            lr = float(client.round_state["lr"][self._groups[name]])
            # Without a step, or with learning rate 0 as in a warm-up, the gradient is unknown.
            new[name] = old[name]
            if lr > 0:
                change = client.round_state["received"][name] - value
                new[name] = change / lr - client.round_state["correction"][name]
        client.state["control"] = new
        return Message(
            {**client.base.sent_up(client.model), **_prefixed({name: new[name] - old[name] for name in new})}
        )

    def receive(self, server: Server, client: ClientInfo, message: Message, weight: float) -> None:
        """Add the model with its weight, and the change of the client's control variate without weight."""
        model, changes = _split(message.tensors)
        server.aggregator.add(model, weight)
        sums = server.state.get("changes", {})
        if client.id in server.state.get("forgotten", ()):
            # Its change is one from 0, and the sum of all holds the variate that it had.
            server.state["forgotten"] = [each for each in server.state["forgotten"] if each != client.id]
            changes = _zeros(changes)
        wide = {name: to_float64(change) for name, change in changes.items()}
        server.state["changes"] = {name: change + sums[name] if sums else change for name, change in wide.items()}

    def forget(self, server: Server, client: ClientInfo) -> None:
        """Leave the client's part of the control variate as it is until its next but one answer."""
        server.state["forgotten"] = [*server.state.get("forgotten", []), client.id]

    @torch.no_grad()
    def aggregate(self, server: Server) -> None:
        mean = server.aggregated()
        for name, value in server.base.parameters(mean).items():
            mean[name] = value.lerp(server.model[name].to(value.dtype), 1 - self.lr_server)
        server.take(mean)
        server.state["control"] = {
            name: (to_float64(server.state["control"][name]) + change / server.clients)
            .to(_precise(mean[name]))
            .to(mean[name].device)
            for name, change in server.state.pop("changes").items()
        }


def _check_plain(group: Mapping[str, Any]) -> None:
    for option in ("momentum", "maximize"):
        if group[option]:
            raise MisconfigurationException(
                f"SCAFFOLD takes a client's change over its learning rates for its mean gradient, which it is not with"
                f" {option}={group[option]}: use torch.optim.SGD without it."
            )


def _precise(value: Tensor) -> torch.dtype:
    return torch.promote_types(value.dtype, torch.float32)


def _zeros(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value, requires_grad=False) for name, value in parameters.items()}


def _prefixed(control: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {_PREFIX + name: value for name, value in control.items()}


def _split(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the model and the control variate in a message."""
    model, control = {}, {}
    for name, value in tensors.items():
        if name.startswith(_PREFIX):
            control[name.removeprefix(_PREFIX)] = value
        else:
            model[name] = value
    return model, control
