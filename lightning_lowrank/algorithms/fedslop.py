"""FedSLoP: clients train every weight, and a round changes each matrix within one random subspace."""

from __future__ import annotations

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.protocols import ChangesBase
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server, copy_into
from lightning_lowrank.optim import ProjectedSGD
from lightning_lowrank.seeding import derive_seed

_SEED = "subspace.seed"
_COEFFICIENTS = "coefficients."


class FedSLoP(ChangesBase):
    r"""Federated learning with low-rank gradient projection (He et al., 2026, Algorithm 1).

    The module's optimizer must be `ProjectedSGD` with ``refresh_interval=None``: its ``rank`` and ``momentum`` are the
    paper's :math:`r` and :math:`\mu`. In each round the server draws a seed, and with it an orthonormal :math:`P`
    (``in × r``) for each weight matrix (``out × in``, a convolution as ``out × cin·k·k``), the same for all clients.
    A client steps :math:`v \leftarrow \mu v + G P`, :math:`W \leftarrow W - \eta v P^\top` and keeps :math:`v` as
    ``out × r``. Weight decay is inside the projection.

    The server sends the dense model and the seed of :math:`P`. A client sends ``out × r`` numbers for each matrix, the
    coefficients :math:`(W_\text{end} - W_\text{start}) P`, and the values of all other parameters: biases and norms,
    groups with ``rank=None``, and matrices with at most ``r`` columns. If no matrix has more columns, FedSLoP is bit
    for bit `FedAvg` with `torch.optim.SGD`'s momentum.

    With `LowRank` before the loop, the factors are projected. The momentum starts at zero in each round, as in
    Algorithm 1. With ``FederatedLoop(optimizer_state="keep")`` clients keep it, and the optimizer's ``moments`` sets
    how it enters the new subspace; ``"rotate"``, its default, takes :math:`v P_\text{old}^\top P_\text{new}`. (The
    authors' release keeps it in full size, so that a change leaves the span of :math:`P` and costs a dense uplink.)
    The paper averages clients with equal weights: ``FederatedLoop(weighting="uniform")``.

    Raises:
        MisconfigurationException: If an optimizer is not `ProjectedSGD`, draws subspaces within a round or takes them
            from the gradient, which the server could not draw again.

    Example:
        >>> from lightning_lowrank import Dirichlet, FederatedLoop, FedSLoP, ProjectedSGD
        >>> def configure_optimizers(self):
        ...     return ProjectedSGD(self.parameters(), lr=0.018, momentum=0.8, rank=112, refresh_interval=None)
        >>> loop = FederatedLoop(
        ...     FedSLoP(), clients=50, clients_per_round=0.2, partition=Dirichlet(0.1), weighting="uniform"
        ... )
    """

    def __init__(self) -> None:
        self._places: dict[str, tuple[int, int, int]] = {}

    def setup(self, base: Base) -> None:
        """Check the optimizers, and find each parameter's position in their groups."""
        self._places = {}
        names = {value: name for name, value in base.module.named_parameters() if value.requires_grad}
        for number, optimizer in enumerate(base.optimizers):
            if type(optimizer) is not ProjectedSGD:
                raise MisconfigurationException(
                    f"FedSLoP's clients step in subspaces, which {type(optimizer).__name__} does not have:"
                    " return ProjectedSGD(self.parameters(), rank=..., refresh_interval=None) from"
                    " configure_optimizers()."
                )
            for index, group in enumerate(optimizer.param_groups):
                if group["refresh_interval"] is not None and group["rank"] is not None:
                    raise MisconfigurationException(
                        f"FedSLoP has one subspace a round, but ProjectedSGD has refresh_interval="
                        f"{group['refresh_interval']}, which would draw others within it: set refresh_interval=None."
                    )
                if group["subspace"] != "random" and group["rank"] is not None:
                    raise MisconfigurationException(
                        f"FedSLoP's subspaces are drawn from a seed, but ProjectedSGD has subspace="
                        f"{group['subspace']!r}, which the server could not draw again: set subspace='random'."
                    )
                for position, parameter in enumerate(group["params"]):
                    if parameter in names:
                        self._places[names[parameter]] = number, index, position

    def begin_round(self, server: Server) -> None:
        _enter(server.base, self._seed(server))

    def broadcast(self, server: Server, client: ClientInfo) -> Message:
        return Message({**server.sent_down(), _SEED: torch.tensor(self._seed(server))})

    @torch.no_grad()
    def aggregate(self, server: Server) -> None:
        """Average the values, and compose the mean of the changes from the mean of the coefficients."""
        for name, value in server.aggregated().items():
            if name.startswith(_COEFFICIENTS):
                name = name.removeprefix(_COEFFICIENTS)
                projection = self._projection(server.base, name)
                assert projection is not None
                start = server.model[name]
                value = start + (value @ projection.to(value.dtype).mT).view(start.shape)
            server.update_model({name: value})

    def begin(self, client: ClientContext, message: Message) -> None:
        received = dict(message.tensors)
        _enter(client.base, int(received.pop(_SEED)))
        copy_into(client.model, received)
        client.round_state["received"] = {
            name: value for name, value in received.items() if self._projection(client.base, name) is not None
        }

    @torch.no_grad()
    def end(self, client: ClientContext) -> Message:
        sent: dict[str, Tensor] = {}
        for name, value in client.base.sent_up(client.model).items():
            projection = self._projection(client.base, name)
            if projection is None:
                sent[name] = value
            else:
                change = (value - client.round_state["received"][name]).flatten(1)
                sent[_COEFFICIENTS + name] = change @ projection
        return Message(sent)

    def drawn_in(self, name: str, round_number: int) -> int:
        """For coefficients, the current round, because each round has new subspaces; 0 for all other tensors."""
        return round_number if name.startswith(_COEFFICIENTS) else 0

    @staticmethod
    def _seed(server: Server) -> int:
        return derive_seed(server.seed, "subspace", server.round)

    def _projection(self, base: Base, name: str) -> Tensor | None:
        """The round's ``P`` of a parameter; ``None`` for a parameter that is not projected."""
        if name not in self._places:
            return None
        number, index, position = self._places[name]
        optimizer = base.optimizers[number]
        assert isinstance(optimizer, ProjectedSGD)
        # Looked up by position, because while clients step together, the optimizer has stacks of their parameters.
        return optimizer.projection(optimizer.param_groups[index]["params"][position])


def _enter(base: Base, seed: int) -> None:
    """Set the seed of the optimizers' subspaces; in a simulation, server and clients share the optimizers."""
    for optimizer in base.optimizers:
        assert isinstance(optimizer, ProjectedSGD)
        if any(group["seed"] != seed for group in optimizer.param_groups):
            optimizer.refresh(seed)
