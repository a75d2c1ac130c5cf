"""The client's end of a real site, whose server is on another machine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_lowrank.federated.client_optimizers import ClientOptimizers
from lightning_lowrank.federated.data.planner import RoundPlan
from lightning_lowrank.federated.exchange import Exchange, Parts
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.privacy.mean import private_mean
from lightning_lowrank.federated.protocols import ChangesBase, UnequalClients
from lightning_lowrank.federated.stages import RoundStage
from lightning_lowrank.federated.state import ClientInfo

SEED_IS_KNOWN = (
    "draws its noise from the recipe's seed, which the server and all sites know, so that they could subtract the"
    " noise: set secure=True."
)


class SiteExchange(Exchange):
    """The exchange of a real site, without a server: decodes broadcasts. A subclass sends the client's answers.

    Args:
        parts: The objects that it connects. The server has a base, and nothing else.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.received: dict[str, Tensor] = {}
        """The round's broadcast as the client receives it."""

    @override
    def _make_stages(self, parts: Parts) -> list[RoundStage]:
        privacy, drawing = parts.settings.privacy, parts.drawing
        if privacy is None or privacy.noise_at == "server" or drawing is None:
            return [*parts.settings.stages]
        if not privacy.secure:
            raise MisconfigurationException(f"{privacy!r} {SEED_IS_KNOWN}")
        return [*parts.settings.stages, private_mean(parts.settings, parts.server, drawing)]

    @abstractmethod
    def broadcasts(self, round_number: int) -> Iterable[bytes]:
        """Encoded broadcasts that the site has not applied yet, in order of rounds; the last is this round's.

        An empty one means a round in which nothing was sent.
        """

    def check_received(self, received: Mapping[str, Tensor]) -> None:
        """Raise an error if a decoded broadcast must not be applied."""

    @override
    def begin_round(self, plan: RoundPlan, live: Mapping[str, Tensor], idle: int) -> None:
        base = self.server.base
        self.server.round, self.server.cohort = plan.round, plan.clients
        self.follow_buffers(live)
        for data in self.broadcasts(plan.round):
            decoded = move_data_to_device(self.wire.decode_down(base, data), base.device)
            # Sort names in the module's order, because methods may draw random numbers tensor by tensor.
            self.received = {name: decoded[name] for name in [*live, *decoded] if name in decoded}
            self.check_received(self.received)
            self.wire.keep_copy(base, self.received)
            if self.received:
                ChangesBase.of(self.algorithm).update_base(base, self.received)

    @override
    def send(self, client: ClientInfo) -> Message:
        self._received[client.id] = self.received
        return Message(self.received)

    @override
    def show_global(self, live: Mapping[str, Tensor]) -> None:
        UnequalClients.of(self.algorithm).configure(self.server.base, None)

    @override
    def end_round(self, optimizers: ClientOptimizers, steps: int) -> int:
        return steps
