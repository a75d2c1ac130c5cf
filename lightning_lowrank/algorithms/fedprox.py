"""FedProx: a proximal term keeps clients near to the model that they received."""

from __future__ import annotations

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.algorithms.pfedme import pull
from lightning_lowrank.configuration import check_number
from lightning_lowrank.federated.algorithm import Algorithm, Claims, LocalStep
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.state import Base, ClientContext


class FedProx(Algorithm):
    r"""Federated optimization in heterogeneous networks (Li et al., MLSys 2020, Algorithm 2).

    Each client minimizes :math:`F_k(w) + \frac{\mu}{2}\|w - w_t\|^2` (Eq. 2) with the model :math:`w_t` that it was
    sent: :math:`\mu(w - w_t)` is added to every gradient, before it is clipped. Everything else is as in `FedAvg`;
    ``mu=0`` is `FedAvg` bit for bit. (The paper draws clients by their numbers of samples and averages them
    evenly: ``FederatedLoop(..., sampling_weights=..., weighting="uniform")``.) With `LowRank` the proximal term is that
    of the factors.

    Args:
        mu: Strength :math:`\mu` of the proximal term, 0 or more. The paper chooses among 0.001, 0.01, 0.1 and 1.

    Raises:
        MisconfigurationException: If ``mu`` is out of range, or there are several optimizers.

    Example:
        >>> from lightning_lowrank import Dirichlet, FederatedLoop, FedProx
        >>> loop = FederatedLoop(FedProx(mu=0.01), clients=100, clients_per_round=10, partition=Dirichlet(0.3))
    """

    claims = Claims(trained_set_may_change=True)

    def __init__(self, mu: float) -> None:
        check_number("mu", mu, least=0)
        self.mu = mu

    def setup(self, base: Base) -> None:
        if len(base.optimizers) > 1:
            raise MisconfigurationException(
                f"FedProx adds its term to all gradients at each step, and the {len(base.optimizers)} optimizers of"
                " configure_optimizers() would each add it: use one."
            )

    def begin(self, client: ClientContext, message: Message) -> None:
        super().begin(client, message)
        client.round_state["received"] = client.base.parameters(message.tensors)

    def before_step(self, step: LocalStep) -> None:
        if self.mu:
            pull(step.parameters, step.round_state["received"], self.mu)
