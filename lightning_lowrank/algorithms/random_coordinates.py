"""FedAvg in which a random share of the coordinates is transmitted each way, a baseline for compression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from lightning_lowrank.aggregation.aggregator import to_float64
from lightning_lowrank.algorithms._compressed import initial_parameters
from lightning_lowrank.compression import Codec, Dense, RandomK, Split
from lightning_lowrank.configuration import check_number
from lightning_lowrank.federated.algorithm import Claims, detached
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.protocols import OwnCodec
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server, copy_into
from lightning_lowrank.seeding import derive_seed

_SENT = "sent."


class RandomCoordinates(OwnCodec):
    """Federated averaging of random coordinates, "FedAvg (s.a.r.)" of TDPFed (Section VII-D).

    The paper says that parameters to transmit are selected at random, "according to the same proportion in the process
    of uploading and downloading", without further detail. Here, for every client, round and direction, coordinates are
    drawn from those of all trained parameters together. Coordinates that a client does not receive keep their values
    from its last training, or else from the initial model. The new global value of a coordinate is the weighted mean
    over the clients that sent it, or the old value if no client did. With both shares 1 it is `FedAvg`, to rounding.

    Messages hold the values and the seed of their positions. Buffers are sent whole.

    Args:
        share_down: Share of the coordinates that a client is sent, above 0 and at most 1.
        share_up: Share of the coordinates that it sends, above 0 and at most 1.

    Raises:
        MisconfigurationException: If a share is out of its range.

    Example:
        >>> from lightning_lowrank import FederatedLoop, LabelCount, RandomCoordinates
        >>> loop = FederatedLoop(RandomCoordinates(1 / 1.5, 1 / 1.5), clients=20, partition=LabelCount(2))
    """

    def __init__(self, share_down: float, share_up: float) -> None:
        check_number("share_down", share_down, above=0, most=1)
        check_number("share_up", share_up, above=0, most=1)
        self.share_down = share_down
        self.share_up = share_up

    encodes_values = True
    claims = Claims(unprotected="numbers are averaged over the clients that sent them, by masks in the messages")

    def setup(self, base: Base) -> None:
        """Keep the initial model, from which a client starts in its first round."""
        if "initial" not in base.state:
            base.state["initial"] = initial_parameters(base)

    def downlink(self, base: Base) -> Codec:
        return Split(base.initial_buffers, Dense(), RandomK(self.share_down))

    def reference(self, base: Base, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """No reference, because a client sends other coordinates than it receives."""
        return {}

    def upload_origin(
        self, base: Base, model: Mapping[str, Tensor], received: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """The whole global model, because clients send values, also of coordinates that they did not receive."""
        return model

    def broadcast(self, server: Server, client: ClientInfo) -> Message:
        return Message(server.sent_down(), self._codec(server.base, client, "down"))

    def receive(self, server: Server, client: ClientInfo, message: Message, weight: float) -> None:
        sent = self._positions(server.base, client, "up", message)
        values = {name: to_float64(value) if name in sent else value for name, value in message.tensors.items()}
        server.aggregator.add({**values, **{_SENT + name: to_float64(mask) for name, mask in sent.items()}}, weight)

    def aggregate(self, server: Server) -> None:
        mean = server.aggregator.result()
        for name, old in server.parameters().items():
            share = mean.pop(_SENT + name)
            average = torch.where(share > 0, mean[name] / share, to_float64(old))
            mean[name] = average.to(old.dtype).to(old.device)
        server.update_model(mean)

    @torch.no_grad()
    def begin(self, client: ClientContext, message: Message) -> None:
        """Install the client's last values, overwritten by the received coordinates."""
        last = client.state["model"] if "model" in client.state else client.base.state["initial"]
        mixed = {
            name: torch.where(sent, message.tensors[name], last[name])
            for name, sent in self._positions(client.base, client, "down", message).items()
        }
        copy_into(client.model, {**message.tensors, **mixed})

    def end(self, client: ClientContext) -> Message:
        client.state["model"] = detached(client.base.parameters(client.model))
        return Message(client.base.sent_up(client.model), self._codec(client.base, client, "up"))

    def _codec(self, base: Base, client: ClientInfo, direction: Literal["down", "up"]) -> Split:
        """The codec of a client's message in its round."""
        seed = derive_seed(client.seed, "coordinates", direction, client.round, client.id)
        share = self.share_down if direction == "down" else self.share_up
        return Split(base.initial_buffers, Dense(), RandomK(share, seed))

    def _positions(
        self, base: Base, client: ClientInfo, direction: Literal["down", "up"], message: Message
    ) -> dict[str, Tensor]:
        """Masks of the coordinates that a message contains, by name."""
        ones = {name: torch.ones_like(value) for name, value in base.parameters(message.tensors).items()}
        return {name: value > 0 for name, value in self._codec(base, client, direction).transmit(ones).items()}
