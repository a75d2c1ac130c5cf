"""EF21-P: compression in both directions, with error feedback at the server."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_lowrank.algorithms._compressed import (
    add_changes,
    add_to_shared,
    difference_to_shared,
    initial_parameters,
)
from lightning_lowrank.compression import Codec, Dense, RandomK, Split, TopK
from lightning_lowrank.configuration import check_number
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.protocols import ChangesBase, OwnCodec
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server, copy_into
from lightning_lowrank.seeding import derive_seed


class EF21P(ChangesBase, OwnCodec):
    r"""Error feedback from the server, unbiased random coordinates from the clients (Gruntkowska et al., ICML 2023).

    All clients have the same copy :math:`w` of the server's model :math:`x`; before the first round, both are the
    initial model. In each round

    .. math::
        w &\leftarrow w + \operatorname{Top}_k(x - w) && \text{on server and clients} \\
        x &\leftarrow x + \textstyle\sum_i p_i \operatorname{Rand}_k(w_i - w) && \text{on the server},

    where client :math:`i` trains from :math:`w` to :math:`w_i`, and :math:`\operatorname{Rand}_k` keeps :math:`k` of
    :math:`d` coordinates, scaled by :math:`d/k`, so that its expectation is its argument. This is EF21-P with
    DCGD (Algorithm 1 with unbiased compressors of the clients), with the change of local training in place of a
    gradient, as in the comparison of FedMUD (Li et al., ICML 2025, Section 4.1). With both shares 1 it is `FedAvg`, to
    rounding. The scaling by :math:`d/k` also scales the noise of the clients' coordinates: small shares call for
    smaller learning rates.

    The server sends the :math:`k` largest differences, among all trained parameters together, and their positions; a
    client sends :math:`k` values and the seed of their positions, which differs by client and round. Buffers are sent
    whole in both directions. Clients outside the cohort need the broadcast too, to update their copies:
    ``comm/idle_down_bytes``. Validation and checkpoints use :math:`x`.

    Args:
        share_down: Share of the coordinates that the server sends, above 0 and at most 1.
        share_up: Share of the coordinates that each client sends, above 0 and at most 1.

    Raises:
        MisconfigurationException: If a share is out of its range.

    Example:
        >>> from lightning_lowrank import EF21P, FederatedLoop, IID
        >>> loop = FederatedLoop(EF21P(share_down=1 / 32, share_up=1 / 32), clients=100, clients_per_round=10)
    """

    def __init__(self, share_down: float, share_up: float) -> None:
        check_number("share_down", share_down, above=0, most=1)
        check_number("share_up", share_up, above=0, most=1)
        self.share_down = share_down
        self.share_up = share_up
        self._top_k = TopK(share=share_down)

    def setup(self, base: Base) -> None:
        """Create the copy that all parties share, initially the initial model."""
        if "shared" not in base.state:
            base.state["shared"] = initial_parameters(base)

    def update_base(self, base: Base, message: Mapping[str, Tensor]) -> None:
        add_to_shared(base, message)

    def downlink(self, base: Base) -> Codec:
        return Split(base.initial_buffers, Dense(), self._top_k)

    def reference(self, base: Base, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The reference of an upload: the received buffers; parameters are sent as changes and have none."""
        return {name: value for name, value in received.items() if name in base.initial_buffers}

    def begin_round(self, server: Server) -> None:
        self.announce(server, difference_to_shared(server, self._top_k.transmit))

    def broadcast(self, server: Server, client: ClientInfo) -> Message:
        """The model, with a codec that sends the announced difference in place of the parameters."""
        return Message(server.sent_down(), self.downlink(server.base))

    def aggregate(self, server: Server) -> None:
        """Add the mean change to the model; average the buffers."""
        add_changes(server, server.base.state["shared"])

    def begin(self, client: ClientContext, message: Message) -> None:
        """Install the received buffers and the shared copy, which includes the broadcast difference."""
        copy_into(client.model, {**message.tensors, **client.base.state["shared"]})

    @torch.no_grad()
    def end(self, client: ClientContext) -> Message:
        base, shared = client.base, client.base.state["shared"]
        sent = {
            name: value - shared[name] if name in shared else value
            for name, value in base.sent_up(client.model).items()
        }
        codec = RandomK(self.share_up, derive_seed(client.seed, "random-k", client.round, client.id), unbiased=True)
        return Message(sent, Split(base.initial_buffers, Dense(), codec))
