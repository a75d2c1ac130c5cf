"""FedNova: each client's change is divided by its amount of local work before the mean is taken."""

from __future__ import annotations

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.aggregation.aggregator import home_of
from lightning_lowrank.algorithms._sgd import parameter_groups
from lightning_lowrank.federated.algorithm import Algorithm, Claims, LocalStep
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.state import Base, ClientContext, Server

_NORMS = "fednova.norms"


class FedNova(Algorithm):
    r"""Normalized averaging (Wang et al., NeurIPS 2020, Algorithm 1, Eqs. 4-6).

    Clients that make more steps pull an ordinary average towards their own optima. A client's change is a weighted sum
    of its gradients, :math:`x - y_i = \sum_k a_{i,k}\, g_{i,k}`. The new model is

    .. math:: x \leftarrow x - \tau_\mathrm{eff} \sum_i p_i d_i, \qquad d_i = \frac{x - y_i}{\|a_i\|_1}, \qquad
        \tau_\mathrm{eff} = \sum_i p_i \|a_i\|_1,

    with the loop's weights :math:`p_i` (by default the shares of samples, as in the paper). If clients make equally
    many steps this is `FedAvg`, to rounding.

    :math:`\|a_i\|_1` is counted step by step from the optimizer's update rule. It is the number of steps :math:`\tau_i`
    for plain SGD and :math:`(\tau_i - \rho(1-\rho^{\tau_i})/(1-\rho))/(1-\rho)` for momentum :math:`\rho`, both times
    the learning rate; it includes dampening, Nesterov's form, schedules and ``client_settings``, and every parameter
    group has its own. Buffers are averaged as in `FedAvg`.

    The server sends the global model; a client sends :math:`d_i`, the buffers and :math:`\|a_i\|_1`, 8 bytes for each
    group, which no codec changes. `ClientPrivacy`, whose noise would change it, and robust rules, which would not
    protect it, are refused.

    Raises:
        MisconfigurationException: If clients do not step with one ``torch.optim.SGD``, or keep their momentum from
            round to round: then a change is not a sum of the round's own gradients.

    Example:
        >>> from lightning_lowrank import Dirichlet, FederatedLoop, FedNova
        >>> loop = FederatedLoop(FedNova(), clients=100, clients_per_round=10, partition=Dirichlet(0.3), local_epochs=3)
    """

    claims = Claims(
        exact=frozenset({_NORMS}),
        sends_changes=True,
        unprotected="a client's amount of work, which it states itself, scales the change of the whole model",
    )

    def __init__(self) -> None:
        self._groups: dict[str, int] = {}

    def setup(self, base: Base) -> None:
        self._groups = parameter_groups(base, "FedNova")

    def begin(self, client: ClientContext, message: Message) -> None:
        """Install the received model, and start counting the client's work."""
        super().begin(client, message)
        groups = client.base.optimizers[0].param_groups
        if "optimizers" in client.state and any(group["momentum"] for group in groups):
            raise MisconfigurationException(
                f"FedNova assumes that a client's change contains gradients of the round alone, but client {client.id}"
                " has momentum from earlier rounds: set optimizer_state='reset'."
            )
        received = client.base.parameters(message.tensors)
        # Counted on the CPU, so that no step waits for a device.
        zeros = torch.zeros(len(groups), dtype=torch.float64)
        client.round_state.update({"received": received, "momentum": zeros, "norms": zeros.clone()})

    def before_step(self, step: LocalStep) -> None:
        """Add the step to the client's amount of work: the length of the step if all gradients were 1."""
        for number, group in enumerate(step.base.optimizers[0].param_groups):
            momentum, norm = (step.round_state[name][..., number] for name in ("momentum", "norms"))
            inflow = 1 - group["dampening"] if group["momentum"] else 1.0
            # As in torch, the momentum starts with the first gradient without dampening.
            momentum.copy_(torch.where(momentum == 0, 1.0, group["momentum"] * momentum + inflow))
            norm += group["lr"] * (1 + group["momentum"] * momentum if group["nesterov"] else momentum)

    @torch.no_grad()
    def end(self, client: ClientContext) -> Message:
        norms = client.round_state["norms"]
        # If all learning rates were 0, the change is 0 with any divisor.
        divisors = torch.where(norms > 0, norms, 1.0).tolist()
        units = {name: divisors[group] for name, group in self._groups.items()}
        changes = {
            name: (client.round_state["received"][name] - value) / units[name]
            for name, value in client.base.parameters(client.model).items()
        }
        norms = norms.to(home_of(norms.dtype, client.base.device))
        return Message({**client.base.sent_up(client.model), **changes, _NORMS: norms}, units=units)

    @torch.no_grad()
    def aggregate(self, server: Server) -> None:
        """Subtract the mean change per unit of work, times the mean amount of work, from the model."""
        mean = server.aggregated()
        norms = mean.pop(_NORMS)
        for name, value in server.base.parameters(mean).items():
            mean[name] = server.model[name] - norms[self._groups[name]] * value
        server.update_model(mean)
