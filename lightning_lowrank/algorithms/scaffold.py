"""SCAFFOLD: every gradient is corrected by the difference between the client's own and all clients' gradients."""

from __future__ import annotations

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.aggregation.aggregator import to_float64, working_dtype
from lightning_lowrank.algorithms._sgd import check_plain, parameter_groups
from lightning_lowrank.configuration import check_number
from lightning_lowrank.federated import Base, Claims, ClientContext, ClientInfo, LocalStep, Message, Personal, Server
from lightning_lowrank.federated.algorithm import zeros_like

# Prefixes of tensors in messages: the server's control variate, and the change of a client's control variate.
_ALL, _OWN = "scaf.all.", "scaf.own."


class SCAFFOLD(Personal):
    r"""Stochastic controlled averaging (Karimireddy et al., ICML 2020, Algorithm 1, option II).

    A client's control variate :math:`c_i` is its mean gradient in its last round, the server's :math:`c` the mean of
    all. Both are 0 at first, and their difference is the client's drift. A client steps with
    :math:`y \leftarrow y - \eta(g_i(y) - c_i + c)`, clipped afterwards if the trainer clips. After its last step,

    .. math:: c_i^+ = c_i - c + \frac{x - y}{K\eta}, \qquad
        x \leftarrow x + \eta_g\,\overline{(y - x)}, \qquad
        c \leftarrow c + \frac{1}{N} \sum_{i \in S} (c_i^+ - c_i),

    where :math:`K\eta` is the sum of the learning rates that were used, so that schedules, groups and
    ``client_settings`` have their own, and :math:`N` is the number of all clients that can be drawn. As in the paper,
    all clients have the same weight in :math:`c`; the mean of the models has the loop's ``weighting`` (the paper's is
    ``"uniform"``). Buffers are averaged as in `FedAvg`. Model and control variate are sent in both directions: twice
    the bytes of `FedAvg`. With `LowRank`, gradients and control variates are those of the factors.

    Args:
        lr_server: The server's step :math:`\eta_g` on the mean change, above 0. Default 1: the mean itself.

    Raises:
        MisconfigurationException: If ``lr_server`` is out of range, a step freezes a parameter, or clients do not step
            with one ``torch.optim.SGD`` without momentum, for which alone :math:`(x - y)/(K\eta)` is the mean of the
            gradients.

    Example:
        >>> from lightning_lowrank import SCAFFOLD, Dirichlet, FederatedLoop
        >>> loop = FederatedLoop(SCAFFOLD(), clients=100, clients_per_round=10, partition=Dirichlet(0.3))
    """

    claims = Claims(needs_only_mean=True, unprotected="changes of control variates are summed as they arrive")

    def __init__(self, lr_server: float = 1.0) -> None:
        check_number("lr_server", lr_server, above=0)
        self.lr_server = lr_server
        self._groups: dict[str, int] = {}

    def setup(self, base: Base) -> None:
        self._groups = parameter_groups(base, "SCAFFOLD", plain=True)

    def begin_round(self, server: Server) -> None:
        # In at least float32, because in 16 bits the changes by a small cohort would be rounded away.
        server.state.setdefault(
            "control", {n: v.to(working_dtype(v.dtype)) for n, v in zeros_like(server.parameters()).items()}
        )

    def broadcast(self, server: Server, client: ClientInfo) -> Message:
        control = {_ALL + name: value.to(server.model[name].dtype) for name, value in server.state["control"].items()}
        return Message({**server.sent_down(), **control})

    def begin(self, client: ClientContext, message: Message) -> None:
        received, control = message.split(_ALL)
        super().begin(client, Message(received))
        parameters = client.base.parameters(received)
        own = client.state.get("control", zeros_like(parameters))
        correction = {name: value - own[name] for name, value in control.items()}
        # Summed on the CPU, so that no step waits for a device.
        rates = torch.zeros(len(client.base.optimizers[0].param_groups), dtype=torch.float64)
        client.round_state.update(received=parameters, correction=correction, lr=rates)

    @torch.no_grad()
    def before_step(self, step: LocalStep) -> None:
        for number, group in enumerate(step.base.optimizers[0].param_groups):
            check_plain(group, "SCAFFOLD")
            step.round_state["lr"][..., number] += group["lr"]
        for name, value in step.parameters.items():
            if not value.requires_grad:
                raise MisconfigurationException(
                    f"SCAFFOLD corrects all trained parameters in each step, and a step has set requires_grad=False"
                    f" for {name}, which the correction would move: freeze it before the fit, or use FedAvg."
                )
            correction = step.round_state["correction"][name]
            # A parameter that the loss does not depend on has gradient 0, and is corrected too.
            value.grad = correction.clone() if value.grad is None else value.grad.add_(correction)

    @torch.no_grad()
    def end(self, client: ClientContext) -> Message:
        parameters, started = client.base.parameters(client.model), client.round_state
        old = client.state.get("control", zeros_like(parameters))
        new = client.state["control"] = dict(old)
        for name, value in parameters.items():
            # Without a step, or with learning rate 0 as in a warm-up, the gradient is unknown.
            if (lr := float(started["lr"][self._groups[name]])) > 0:
                new[name] = (started["received"][name] - value) / lr - started["correction"][name]
        change = {_OWN + name: new[name] - old[name] for name in parameters}
        return Message({**client.base.sent_up(client.model), **change})

    def receive(self, server: Server, client: ClientInfo, message: Message, weight: float) -> None:
        """Add the model with its weight, and the change of the client's control variate without weight."""
        model, changes = message.split(_OWN)
        server.aggregator.add(model, weight)
        if client.id in server.state.get("forgotten", ()):
            # A client that lost its variate sends a change from 0, but the server's mean still contains the lost
            # variate.
            server.state["forgotten"] = [each for each in server.state["forgotten"] if each != client.id]
            changes = zeros_like(changes)
        sums = server.state.get("changes", {})
        server.state["changes"] = {name: to_float64(value) + sums.get(name, 0) for name, value in changes.items()}

    def forget(self, server: Server, client: ClientInfo) -> None:
        server.state["forgotten"] = [*server.state.get("forgotten", []), client.id]

    @torch.no_grad()
    def aggregate(self, server: Server) -> None:
        mean, changes = server.aggregated(), server.state.pop("changes")
        control = server.state["control"] = dict(server.state["control"])
        for name, value in server.base.parameters(mean).items():
            mean[name] = value.lerp(server.model[name].to(value.dtype), 1 - self.lr_server)
            total = to_float64(control[name]) + changes[name] / server.clients
            control[name] = total.to(working_dtype(value.dtype)).to(value.device)
        server.update_model(mean)
