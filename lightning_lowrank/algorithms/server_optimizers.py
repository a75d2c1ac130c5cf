"""Server optimizers: the server steps on the mean change of the clients' models as a gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.configuration import check_number
from lightning_lowrank.federated.algorithm import Algorithm, Claims
from lightning_lowrank.federated.state import Server

Moments = dict[str, Tensor]


class ServerOptimizer(Algorithm, ABC):
    r"""Federated averaging whose server steps on the mean change (Reddi et al., ICLR 2021, Algorithm 1).

    With the weighted mean :math:`\bar x_t` of the clients' models, :math:`\Delta_t = x_t - \bar x_t` is the
    pseudo-gradient (the paper's has the other sign), and :math:`x_{t+1} = x_t - \eta\,u_t` with the update
    :math:`u_t` that a subclass computes in `direction`. Buffers, integer ones too, are averaged as in `FedAvg`. The
    messages are those of `FedAvg`. With `LowRank`, parameters are factors.

    Args:
        lr: Learning rate :math:`\eta` of the server, above 0.

    Raises:
        MisconfigurationException: If ``lr`` is not a finite number above 0.
    """

    claims = Claims(trained_set_may_change=True)

    def __init__(self, lr: float) -> None:
        check_number("lr", lr, above=0)
        self.lr = lr

    @abstractmethod
    def direction(self, moments: Moments, change: Tensor) -> Tensor:
        """Compute one parameter's update, and put its new moments into ``moments``.

        Args:
            moments: The parameter's moments by name; empty in the first round. Replace its tensors, do not change them
                in place.
            change: The pseudo-gradient, of the parameter's shape, in single precision at least.
        """

    @torch.no_grad()
    def aggregate(self, server: Server) -> None:
        mean = server.aggregated()
        kept: dict[str, Moments] = server.state.setdefault("moments", {})
        for name, value in server.base.parameters(mean).items():
            working = value.to(torch.promote_types(value.dtype, torch.float32))
            change = server.model[name].to(working.dtype) - working
            update = self.direction(kept.setdefault(name, {}), change)
            # This is x - lr * update, in a form that gives the mean bit for bit if lr * update is the change.
            mean[name] = working + (change - self.lr * update)
        server.update_model(mean)


class FedAvgM(ServerOptimizer):
    r"""Federated averaging with server momentum (Hsu et al., 2019, arXiv:1909.06335, Section 4.3).

    :math:`v \leftarrow \beta v + \Delta_t` and :math:`x \leftarrow x - \eta v`, from :math:`v = 0`; see
    `ServerOptimizer`. ``momentum=0`` with ``lr=1`` is `FedAvg`, bit for bit. (FedSLoP's release calls ``momentum=0.8``
    FedAvg-M.)

    Args:
        momentum: Share :math:`\beta` of the last round's update that is kept, in [0, 1). Default 0.9.
        lr: Learning rate :math:`\eta` of the server, above 0. Default 1.

    Raises:
        MisconfigurationException: If an argument is out of range.

    Example:
        >>> from lightning_lowrank import Dirichlet, FedAvgM, FederatedLoop
        >>> loop = FederatedLoop(FedAvgM(momentum=0.8), clients=50, clients_per_round=0.2, partition=Dirichlet(0.1))
    """

    def __init__(self, momentum: float = 0.9, lr: float = 1.0) -> None:
        super().__init__(lr)
        check_number("momentum", momentum, least=0, below=1)
        self.momentum = momentum

    def direction(self, moments: Moments, change: Tensor) -> Tensor:
        """Add the change to the momentum."""
        moments["momentum"] = change + self.momentum * moments["momentum"] if moments else change
        return moments["momentum"]


class FedAdam(ServerOptimizer):
    r"""Federated averaging with Adam on the server (Reddi et al., ICLR 2021, Algorithm 2).

    :math:`m_t = \beta_1 m_{t-1} + (1-\beta_1)\Delta_t`, :math:`v_t = \beta_2 v_{t-1} + (1-\beta_2)\Delta_t^2` and
    :math:`x_{t+1} = x_t - \eta\, m_t / (\sqrt{v_t} + \tau)`, from :math:`m_{-1} = 0` and :math:`v_{-1} = \tau^2`; see
    `ServerOptimizer`. As in the paper, and unlike in ``torch.optim.Adam``, the moments' bias towards their start is not
    corrected.

    Args:
        lr: Learning rate :math:`\eta` of the server, above 0: about how far a number moves in a round. Default 0.01.
        betas: Decay :math:`\beta_1, \beta_2` of the moments, each in [0, 1). Default (0.9, 0.99), the paper's.
        tau: Adaptivity :math:`\tau`, above 0; the larger, the nearer to plain momentum. Default 0.001, the paper's.

    Raises:
        MisconfigurationException: If an argument is out of range.

    Example:
        >>> from lightning_lowrank import Dirichlet, FedAdam, FederatedLoop
        >>> loop = FederatedLoop(FedAdam(lr=0.03), clients=100, clients_per_round=10, partition=Dirichlet(0.3))
    """

    def __init__(self, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), tau: float = 1e-3) -> None:
        super().__init__(lr)
        if len(betas) != 2:
            raise MisconfigurationException(f"betas must be two numbers, but is {betas!r}.")
        for index, beta in enumerate(betas):
            check_number(f"betas[{index}]", beta, least=0, below=1)
        check_number("tau", tau, above=0)
        self.betas = betas
        self.tau = tau

    def direction(self, moments: Moments, change: Tensor) -> Tensor:
        """The first moment over the root of the second."""
        first = moments.get("first", torch.zeros_like(change))
        second = moments.get("second", torch.full_like(change, self.tau**2))
        moments["first"] = self.betas[0] * first + (1 - self.betas[0]) * change
        moments["second"] = self.second_moment(second, change.square())
        return moments["first"] / (moments["second"].sqrt() + self.tau)

    def second_moment(self, old: Tensor, squared: Tensor) -> Tensor:
        """The moving average of the squares."""
        return self.betas[1] * old + (1 - self.betas[1]) * squared


class FedYogi(FedAdam):
    r"""Federated averaging with Yogi on the server (Reddi et al., ICLR 2021, Algorithm 2).

    As `FedAdam`, but :math:`v_t = v_{t-1} - (1-\beta_2)\Delta_t^2\,\mathrm{sign}(v_{t-1} - \Delta_t^2)`: the second
    moment moves by no more than the newest square, so that it forgets large changes slowly. The arguments are those of
    `FedAdam`.

    Example:
        >>> from lightning_lowrank import Dirichlet, FederatedLoop, FedYogi
        >>> loop = FederatedLoop(FedYogi(lr=0.03), clients=100, clients_per_round=10, partition=Dirichlet(0.3))
    """

    def second_moment(self, old: Tensor, squared: Tensor) -> Tensor:
        """The old moment, moved towards the squares by a fixed share of them."""
        return old - (1 - self.betas[1]) * squared * torch.sign(old - squared)
