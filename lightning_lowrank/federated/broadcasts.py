"""The broadcasts of a round on the server, and the reference values of clients' answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.aggregation.aggregator import equal_tensors
from lightning_lowrank.compression import Packet
from lightning_lowrank.federated.algorithm import Algorithm, detached
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.protocols import upload_origin
from lightning_lowrank.federated.state import ClientInfo, Server
from lightning_lowrank.federated.wire import Wire
from lightning_lowrank.internals.torch import is_unchanged, version_of


class Broadcasts:
    """Makes the packet of each client's broadcast: the method's message and the announcement, encoded by the downlink.

    A downlink with error feedback has one packet for all, which does not change in the round, whatever the method's
    message becomes. An announcement passes a lossy downlink once.

    Args:
        algorithm: The method.
        server: The server.
        wire: The channels.
        info: Returns the server's `ClientInfo` of a client in the present round.
        robust: Whether answers are averaged by a robust rule, which would take the downlink's losses for changes.
    """

    def __init__(
        self, algorithm: Algorithm, server: Server, wire: Wire, info: Callable[[int], ClientInfo], robust: bool
    ) -> None:
        self._algorithm, self._server, self._wire, self._info = algorithm, server, wire, info
        self.rebases = wire.shares_copy or (robust and bool(wire.downlink.codecs))
        """Whether answers are made relative to the server's own values, of which clients have a lossy copy."""
        self._for_all: Packet | None = None
        self._kept: dict[int, Packet] = {}
        self._copies: dict[str, tuple[Tensor, int, Tensor]] = {}
        self._shifts: dict[str, tuple[tuple[tuple[Tensor, int], ...], Tensor]] = {}
        """The exact values and those of a broadcast with their versions, and their difference, by name."""
        if wire.splits:
            server.transmit = self._announce

    def _announce(self, update: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Encode an announcement; the result is its decoded values, the same for all clients and the server."""
        packet = self._wire.announce(self._server.base, update, self._server.round)
        self._server.encoded = packet.encode()
        return packet.received

    def begin_round(self) -> None:
        """After the method's `begin_round`: encode the round's broadcast, if all clients share one."""
        self.end_round()
        if self._wire.shares_copy:
            self._for_all = self._encoded(self.message(self.any_client), self.any_client)
            self._wire.keep_copy(self._server.base, self._for_all.received, self._for_all)

    def end_round(self) -> None:
        """Drop the round's packets."""
        self._for_all, self._kept, self._copies, self._shifts = None, {}, {}, {}

    @property
    def shared(self) -> Mapping[str, Tensor] | None:
        """The round's broadcast as all clients receive it; ``None`` if it is not encoded once for all."""
        return None if self._for_all is None else self._for_all.received

    @property
    def any_client(self) -> ClientInfo:
        """The cohort's first client; client 0 for an empty cohort."""
        return self._info(self._server.cohort[0] if self._server.cohort else 0)

    @property
    def reach_all(self) -> bool:
        """Whether clients outside the cohort must receive the broadcast as well."""
        return bool(self._server.announcement) or self._wire.shares_copy

    def message(self, client: ClientInfo) -> Message:
        """The method's message to a client, with the server's announcement."""
        message = self._algorithm.broadcast(self._server, client)
        if not self._server.announcement:
            return message
        return Message({**message.tensors, **self._server.announcement}, message.codec)

    def _encoded(self, message: Message, client: ClientInfo) -> Packet:
        return self._wire.down(self._server.base, message, client, self._server.announcement, self._server.encoded)

    def packet(self, client: ClientInfo) -> Packet:
        """The encoded broadcast to a client.

        Raises:
            MisconfigurationException: If the method sends clients different values, and all must share one copy.
        """
        if client.id in self._kept:
            return self._kept[client.id]
        message = self.message(client)
        if not self._wire.shares_copy:
            return self._encoded(message, client)
        first = self.message(self.any_client)
        if not equal_tensors(message.tensors, first.tensors):
            raise MisconfigurationException(
                f"{type(self._algorithm).__name__} sends clients different values, and a downlink with error feedback"
                " needs one broadcast for all: leave out error_feedback."
            )
        if self._for_all is None:
            # The run was resumed inside the round, after `begin_round` had run.
            packet = self._encoded(first, self.any_client)
            self._for_all = self._wire.with_copy(self._server.base, packet)
        return self._for_all

    def keep(self, client: ClientInfo, packet: Packet) -> None:
        """Keep a packet until `forget`, so that it is not encoded a second time when the client answers."""
        self._kept[client.id] = packet

    def forget(self, client: int) -> None:
        """Drop a client's packet: with a lossy downlink it takes the memory of a model."""
        self._kept.pop(client, None)

    def copies(self, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of a received broadcast, the same tensors for all clients while the values are the same."""
        if self._wire.downlink.codecs and not self._wire.shares_copy:
            return detached(received)
        for name, value in received.items():
            before = self._copies.get(name)
            if before is None or not is_unchanged(*before[:2], value):
                self._copies[name] = value, version_of(value), value.detach().clone()
        return {name: self._copies[name][2] for name in received}

    # Clients' answers

    def rebased(self, client: ClientInfo, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A client's answer; converted to changes of the server's exact values if `rebases` is set."""
        if not self.rebases:
            return tensors
        own, received = self.exact_origin_of(client), self.origin(client, self.packet(client).received)

        def shift(name: str) -> Tensor:
            ends = own[name], received[name]
            before = self._shifts.get(name)
            if before is None or not all(is_unchanged(*known, end) for known, end in zip(before[0], ends, strict=True)):
                before = tuple((end, version_of(end)) for end in ends), ends[0] - ends[1]
                self._shifts[name] = before
            return before[1]

        return self._wire.rebased(self._server.base, tensors, own, shift)

    def origin(self, client: ClientInfo, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The reference values, by name, for the change in a client's answer, if it ``received`` this broadcast."""
        base = self._server.base
        # Parts of the global model may have been sent in earlier rounds only, so start from all of it.
        origin = upload_origin(self._algorithm, base, client, self._server.sent_down(), received)
        return {**origin, **base.fresh_buffers}

    def origin_of(self, client: ClientInfo) -> Mapping[str, Tensor]:
        """The reference values, by name, for the change in a client's answer after `rebased`."""
        return self.exact_origin_of(client) if self.rebases else self.origin(client, self.packet(client).received)

    def exact_origin_of(self, client: ClientInfo) -> Mapping[str, Tensor]:
        """The reference values as the server has them, without the losses of the downlink."""
        return self.origin(client, self.message(client).tensors)
