"""A client that is on its own: what stands at a site for the server, which is elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.compression import Packet
from lightning_lowrank.federated.coordinator import Coordinator
from lightning_lowrank.federated.data.planner import RoundPlan
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.stages import RoundStage
from lightning_lowrank.federated.state import ClientContext, ClientInfo

SEED_IS_KNOWN = (
    "draws its noise by the recipe's seed, which server and sites all have, and could take away: set secure=True."
)


class SiteCoordinator(Coordinator, ABC):
    """Stands at a site for the server: what it sends comes from the wire, and what it is sent goes there.

    Its `Server` is empty. It is there because `FederatedLoop` has one; the client's half reads the base.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.received: dict[str, Tensor] = {}

    @abstractmethod
    def broadcasts(self, round_number: int) -> Iterable[bytes]:
        """Return the encoded broadcasts that the site has not followed yet, in the order of rounds, this round's last.

        One that is empty stands for a round in which nothing was sent.
        """

    @abstractmethod
    def upload(self, packet: Packet) -> None:
        """Take what the client sends to the server."""

    def check_received(self, received: Mapping[str, Tensor]) -> None:
        """Raise an error if a broadcast must not be applied; each one is held against this before it is."""

    def protect(self, sampled: int, population: int, rounds: int | None) -> None:
        """Clip and add noise where clients do it; elsewhere that is the server's work."""
        privacy = self.settings.privacy
        if privacy is not None and privacy.noise_at == "clients":
            if not privacy.secure:
                raise MisconfigurationException(f"{privacy!r} {SEED_IS_KNOWN}")
            super().protect(sampled, population, rounds)

    @property
    def server_stages(self) -> Sequence[RoundStage]:
        """The empty ledger and the client's own privacy. The server hooks of other stages run on the server."""
        return [stage for stage in (self.private, self.ledger) if stage is not None]

    def refused(self, client: ClientContext, nbytes: int) -> None:
        """Leave it to the server."""

    def begin_round(self, plan: RoundPlan, live: Mapping[str, Tensor], idle: int) -> None:
        """Apply what has been broadcast since the client's last round."""
        base = self.server.base
        self.server.round, self.server.cohort = plan.round, plan.clients
        self.ledger.begin_round()
        for data in self.broadcasts(plan.round):
            decoded = move_data_to_device(self.wire.decode_down(base, data), base.device)
            # An encoding has its own order of names. Methods that draw for one tensor after another need the module's.
            self.received = {name: decoded[name] for name in [*live, *decoded] if name in decoded}
            self.check_received(self.received)
            self.wire.hold(base, self.received)
            if self.received:
                self.algorithm.update_base(base, self.received)

    def notes(self, trainer: Any) -> list[str]:
        """Leave it to the server, which has the global model."""
        return []

    def check_cohort(self, clients: int) -> None:
        """Leave it to the server, which knows the cohorts."""

    def send(self, client: ClientInfo) -> Message:
        """Return what the server sent."""
        self._received[client.id] = self.received
        return Message(self.received)

    def receive(self, client: ClientContext, packet: Packet) -> None:
        """Take what the client sends to the server."""
        self.upload(packet)

    def aggregate(self) -> None:
        """Do nothing: the server aggregates."""

    def show_global(self, live: Mapping[str, Tensor]) -> None:
        """Leave the client's values in the module: a site has no global model."""
        self.algorithm.configure(self.server.base, None)
