"""Clients train everything and upload a few coordinates, the same ones for all: three ways to choose them.

FedSLoP's paper compares with these, under the names of FedMef, NeuLite and Federated Select. They keep only those
methods' choice of coordinates, without their memory savings, pruning or progressive training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.compression import Mask
from lightning_lowrank.compression.wire import pack_bits, unpack_bits
from lightning_lowrank.configuration import check_number
from lightning_lowrank.federated.algorithm import Claims, LocalStep
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.protocols import OwnCodec
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server, copy_into
from lightning_lowrank.seeding import derive_seed, generator

_SEED = "mask.seed"
_WINDOW = "mask.window"
_BITS = "mask.bits"
_CHOOSER = "mask.chooser"
_CHOICE = "mask.choice"
_WAITS = "mask.waits"


class UploadMask(OwnCodec, ABC):
    """Base class of methods that upload, in a round, the same share of the coordinates from every client.

    The coordinates are those of all trained parameters laid end to end. The server takes the weighted mean of the
    uploaded ones, and keeps its own values of the others. Buffers are sent whole.

    Args:
        share: Share of the coordinates that is uploaded, above 0 and at most 1; it comes to at least one. Default
            0.15, the paper's. At 1, the method is `FedAvg`.

    Raises:
        MisconfigurationException: If the share is out of its range.
    """

    encodes_values = True

    described_by: ClassVar[str]
    """Name of the tensor of `describe` that determines the positions."""

    def __init__(self, share: float = 0.15) -> None:
        check_number("share", share, above=0, most=1)
        self.share = share
        # A cache of the round's masks: the cohort shares them, and drawing them takes 8 bytes for each coordinate.
        self._known: tuple[Tensor | None, object, dict[str, Tensor]] = (None, None, {})

    @abstractmethod
    def describe(self, server: Server) -> dict[str, Tensor]:
        """Tensors that describe the round's positions; they are sent with the model."""

    @abstractmethod
    def positions(self, description: Mapping[str, Tensor], count: int, total: int) -> Tensor:
        """The positions that the tensors of `describe` define, usually ``count`` of ``total``."""

    def upload_origin(
        self, base: Base, model: Mapping[str, Tensor], received: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """The received model at the uploaded coordinates, zero elsewhere."""
        began = {name: received.get(name, value) for name, value in model.items()}
        description = {name: value for name, value in received.items() if name not in model}
        masks = self._masks(description, base.parameters(began))
        return {name: torch.where(masks[name], value, 0) if name in masks else value for name, value in began.items()}

    def broadcast(self, server: Server, client: ClientInfo) -> Message:
        return Message({**server.sent_down(), **self.describe(server)})

    def aggregate(self, server: Server) -> None:
        masks = self._masks(self.describe(server), server.parameters())
        for name, mean in server.aggregated().items():
            server.update_model({name: torch.where(masks[name], mean, server.model[name]) if name in masks else mean})

    def begin(self, client: ClientContext, message: Message) -> None:
        received = dict(message.tensors)
        client.round_state.update({name: received.pop(name) for name in message.tensors if name not in client.model})
        copy_into(client.model, received)

    def end(self, client: ClientContext) -> Message:
        masks = self._masks(client.round_state, client.base.parameters(client.model))
        return Message(client.base.sent_up(client.model), Mask(masks, known=True))

    def _sizes(self, parameters: Iterable[Tensor]) -> tuple[int, int]:
        """Number of uploaded coordinates, and number of all coordinates."""
        total = sum(value.numel() for value in parameters)
        return max(1, round(self.share * total)), total

    def _masks(self, description: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Masks of the uploaded coordinates, by name. The masks are shared, and must not be changed."""
        count, total = self._sizes(parameters.values())
        layout = (count, [(name, value.shape, value.device) for name, value in parameters.items()])
        about = description.get(self.described_by)
        known, known_layout, masks = self._known
        if layout == known_layout and (about is known or _same(about, known)):
            return masks
        chosen = torch.zeros(total, dtype=torch.bool)
        chosen[self.positions(description, count, total)] = True
        parts = chosen.split([value.numel() for value in parameters.values()])
        masks = {
            name: part.view(value.shape).to(value.device)
            for (name, value), part in zip(parameters.items(), parts, strict=True)
        }
        self._known = (None if about is None else about.clone(), layout, masks)
        return masks


def _same(about: Tensor | None, known: Tensor | None) -> bool:
    return about is not None and known is not None and torch.equal(about.cpu(), known.cpu())


class GradientMask(UploadMask):
    """Upload the coordinates with the largest gradients: FedSLoP's "FedMef" (He et al., 2026, Section 5.1).

    One client's gradient at its first step, at the global model, chooses the coordinates that all clients upload in the
    next round. That client is the one of lowest id in the cohort. In the first round everything is uploaded. The paper
    does not specify the client. In its release the client drawn first chooses the coordinates of the same round, which
    takes a second exchange within the round.

    That client's upload and the next broadcast contain the choice, a bit for each coordinate. The original FedMef
    (Huang et al., CVPR 2024) is federated dynamic pruning that grows the weights of largest gradient. For ``share`` see
    `UploadMask`.

    Raises:
        MisconfigurationException: If the share is out of its range, or the module has several optimizers, each of
            which sees only some of the gradients.

    Example:
        >>> from lightning_lowrank import Dirichlet, FederatedLoop, GradientMask
        >>> loop = FederatedLoop(GradientMask(0.15), clients=50, clients_per_round=10, partition=Dirichlet(0.1))
    """

    described_by = _BITS
    claims = Claims(unprotected="one client chooses the coordinates that all of them send")

    def setup(self, base: Base) -> None:
        if len(base.optimizers) > 1:
            raise MisconfigurationException(
                f"GradientMask ranks the gradients of all parameters at a client's first step, and the module has"
                f" {len(base.optimizers)} optimizers, which step at different times: use one."
            )

    def describe(self, server: Server) -> dict[str, Tensor]:
        """The last choice, a bit for each coordinate; empty before the first choice."""
        return {_BITS: server.state[_BITS]} if _BITS in server.state else {}

    def positions(self, description: Mapping[str, Tensor], count: int, total: int) -> Tensor:
        """The chosen positions; all before the first choice."""
        if _BITS not in description:
            return torch.arange(total)
        return unpack_bits(description[_BITS].cpu(), total).nonzero().flatten()

    def broadcast(self, server: Server, client: ClientInfo) -> Message:
        message = super().broadcast(server, client)
        return Message({**message.tensors, _CHOOSER: torch.tensor(min(server.cohort))})

    def receive(self, server: Server, client: ClientInfo, message: Message, weight: float) -> None:
        tensors = dict(message.tensors)
        if _CHOICE in tensors:
            server.state[_CHOICE] = tensors.pop(_CHOICE).clone()
        super().receive(server, client, Message(tensors), weight)

    def aggregate(self, server: Server) -> None:
        super().aggregate(server)
        if _CHOICE in server.state:
            server.state[_BITS] = server.state.pop(_CHOICE)

    def begin(self, client: ClientContext, message: Message) -> None:
        """Install the global model; if the client makes no step, its choice is the first coordinates."""
        super().begin(client, message)
        count, total = self._sizes(client.base.parameters(client.model).values())
        client.round_state[_CHOICE] = pack_bits(torch.arange(total) < count)
        client.round_state[_WAITS] = torch.tensor(self._chooses(client))

    @torch.no_grad()
    def before_step(self, step: LocalStep) -> None:
        """At the choosing client's first step, find the coordinates with the largest gradients."""
        waits = step.round_state[_WAITS]
        for place in waits.reshape(-1).nonzero().flatten().tolist():
            magnitudes = []
            for parameter in step.parameters.values():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                magnitudes.append((gradient[place] if step.stacked else gradient).abs().reshape(-1))
            count, total = self._sizes(magnitudes)
            # A stable sort: of equal gradients, such as zeros, the first are chosen on every machine.
            order = torch.cat(magnitudes).sort(descending=True, stable=True).indices
            bits = torch.zeros(total, dtype=torch.bool).index_fill_(0, order[:count].cpu(), True)
            choice = step.round_state[_CHOICE]
            (choice[place] if step.stacked else choice).copy_(pack_bits(bits))
        waits.zero_()

    def end(self, client: ClientContext) -> Message:
        message = super().end(client)
        if not self._chooses(client):
            return message
        return Message({**message.tensors, _CHOICE: client.round_state[_CHOICE]}, message.codec)

    @staticmethod
    def _chooses(client: ClientContext) -> bool:
        return int(client.round_state[_CHOOSER]) == client.id


class SlidingWindowMask(UploadMask):
    """Upload a window of the coordinates that slides on each round: FedSLoP's "NeuLite" (He et al., 2026, Section 5.1).

    In round ``t``, from 0, the window of ``k`` of ``d`` coordinates begins at ``t·k mod d`` and wraps around. So
    ``d/k`` rounds visit every coordinate, layer by layer. Its two bounds are sent with the model; uploads hold values
    only. The original NeuLite (Wu et al., 2024) trains a model block by block. For ``share`` see `UploadMask`.

    Example:
        >>> from lightning_lowrank import Dirichlet, FederatedLoop, SlidingWindowMask
        >>> loop = FederatedLoop(SlidingWindowMask(0.15), clients=50, clients_per_round=10, partition=Dirichlet(0.1))
    """

    described_by = _WINDOW

    def describe(self, server: Server) -> dict[str, Tensor]:
        """The window's first position and its length."""
        count, total = self._sizes(server.parameters().values())
        return {_WINDOW: torch.tensor([server.round * count % total, count])}

    def positions(self, description: Mapping[str, Tensor], count: int, total: int) -> Tensor:
        """The positions in the window."""
        begin, length = description[_WINDOW].tolist()
        return torch.arange(begin, begin + length) % total


class RandomMask(UploadMask):
    """Upload a random share of the coordinates: FedSLoP's "FederatedSelect" (He et al., 2026, Section 5.1).

    They are drawn in each round, for all clients together, from a seed that is sent with the model; uploads hold values
    only. (`RandomCoordinates` draws for each client, and compresses the broadcast too.) In the original Federated
    Select (Charles et al., 2022) clients choose what they are sent. For ``share`` see `UploadMask`.

    Example:
        >>> from lightning_lowrank import Dirichlet, FederatedLoop, RandomMask
        >>> loop = FederatedLoop(RandomMask(0.15), clients=50, clients_per_round=10, partition=Dirichlet(0.1))
    """

    described_by = _SEED

    def describe(self, server: Server) -> dict[str, Tensor]:
        """The seed of the positions."""
        return {_SEED: torch.tensor(derive_seed(server.seed, "upload", server.round))}

    def positions(self, description: Mapping[str, Tensor], count: int, total: int) -> Tensor:
        """The positions, drawn from the seed."""
        return torch.randperm(total, generator=generator(int(description[_SEED]), "positions"))[:count]
