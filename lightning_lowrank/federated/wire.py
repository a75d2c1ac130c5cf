"""The channels between server and clients: encoding of messages, error feedback, and decoding.

In a real federation server and sites build the same `Wire` from the recipe. In a simulation one serves both.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.compression import Channel, Codec, Packet, Schema
from lightning_lowrank.compression.channel import Outgoing
from lightning_lowrank.compression.wire import DecodingError
from lightning_lowrank.federated.algorithm import Algorithm, detached
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.protocols import ChangesBase, OwnCodec, reference
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, trained_tensors
from lightning_lowrank.seeding import derive_seed

_LENGTH = struct.Struct("<Q")
_COPY = "wire.copy"
_RESIDUAL = "wire.residual"
_LAST = "wire.last"
_MEMORY = "wire.memory"
_BYTES = "wire.bytes"
_LATE = 10**6
"""A round that comes after all beginnings of a method."""

Answer = tuple[ClientContext, Message, Mapping[str, Tensor]]
"""A client, its message, and what it received in the round."""


@dataclass(frozen=True)
class SplitPacket(Packet):
    """A broadcast in two parts: one for a single client, and the announcement, encoded once for all clients.

    Its encoding is the length of the client's own part in 8 bytes, that part, and the announcement.

    Args:
        announced: The encoded announcement.
    """

    announced: bytes = b""

    @classmethod
    def of(cls, packet: Packet, announced: Mapping[str, Tensor], encoded: bytes) -> SplitPacket:
        """A packet made of a client's own part and an encoded announcement."""
        received = {**packet.received, **announced}
        return cls(packet.tensors, packet.codec, received, packet.residual, announced=encoded)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the result of `encode`."""
        return _LENGTH.size + super().nbytes + len(self.announced)

    def encode(self) -> bytes:
        """The bytes that cross the wire."""
        own = super().encode()
        return _LENGTH.pack(len(own)) + own + self.announced

    @staticmethod
    def parts(data: bytes) -> tuple[bytes, bytes]:
        """Split an encoded broadcast into the encodings of its two parts.

        Raises:
            DecodingError: If the bytes are no such packet.
        """
        if len(data) < _LENGTH.size:
            raise DecodingError(f"{len(data)} bytes are too few for the length of a broadcast's first part.")
        end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        if end > len(data):
            raise DecodingError(f"a broadcast of {len(data):,} bytes claims a first part of {end - _LENGTH.size:,}.")
        return data[_LENGTH.size : end], data[end:]


def _multiplied(tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> dict[str, Tensor]:
    return {name: value * numbers[name] if name in numbers else value for name, value in tensors.items()}


def _coarse(codecs: Sequence[Codec]) -> list[str]:
    """The names of the codecs that suit only changes, because they leave out numbers, directions or magnitudes."""
    return [type(codec).__name__ for codec in codecs if codec.sparse or codec.one_magnitude]


class Wire:
    """The uplink and downlink channels of an experiment, applied to its method's messages.

    An uplink with codecs sends differences from `reference`. With error feedback each client keeps its own residual,
    and forgets that of factors or subspaces that have been redrawn (`ChangesBase.drawn_in`). A downlink with error
    feedback sends the difference between the broadcast and a copy of it that all clients share, which idle clients must
    receive as well; the server adds clients' changes to its own values, so that losses of the copy are sent later
    (EF21-P). Without error feedback, the downlink sends the values. Clients' changes are then added to the server's own
    values only for a robust rule, which would take the downlink's loss for a change.

    The memory of a codec such as `LowRankCodec` is kept by each client for the uplink, and by the server for a downlink
    with error feedback.

    A change of frozen weights that a method announces passes a lossy downlink once for all clients, and the server
    takes up the decoded change as they do, so that all copies of the weights stay equal.

    Args:
        algorithm: The method.
        uplink: Codecs that clients' messages pass.
        downlink: Codecs that broadcasts pass.

    Raises:
        MisconfigurationException: If the codecs do not go together, with each other or with the method.
    """

    def __init__(self, algorithm: Algorithm, uplink: Sequence[Codec] = (), downlink: Sequence[Codec] = ()) -> None:
        self._algorithm = algorithm
        self._warned = False
        try:
            self.uplink, self.downlink = Channel(uplink), Channel(downlink)
        except (TypeError, ValueError) as error:
            raise MisconfigurationException(f"uplink={uplink!r}, downlink={downlink!r}: {error}") from error
        name = type(algorithm).__name__
        self._coarse = _coarse(uplink)
        if OwnCodec.of(algorithm).encodes_values:
            self._refuse_coarse("sends the values of selected coordinates")
        if not downlink:
            return
        if self.splits and self.downlink.error_feedback:
            raise MisconfigurationException(
                f"downlink={downlink!r}: {name} announces changes of frozen weights, each once and in one encoding for"
                " all copies, and error feedback has no later message to add their losses to: leave out"
                " error_feedback, and use Half() or Quantize()."
            )
        if self.splits and isinstance(algorithm, OwnCodec):
            raise MisconfigurationException(
                f"downlink={downlink!r}: {name} compresses its broadcasts itself: leave out downlink."
            )
        coarse = _coarse(downlink)
        if coarse and not self.downlink.error_feedback:
            zero = any(codec.sparse for codec in downlink)
            raise MisconfigurationException(
                f"downlink={downlink!r}: {coarse[0]} would set"
                f" {'the numbers of the model that it does not send to zero' if zero else 'weights to one magnitude'}."
                " Give the first codec error_feedback=True, so that differences are sent, or use Half() or Quantize()"
                " alone."
            )

    def _refuse_coarse(self, reason: str) -> None:
        """Refuse codecs of the uplink that leave numbers out, for a method that ``reason`` says sends values."""
        if self._coarse:
            raise MisconfigurationException(
                f"{type(self._algorithm).__name__} {reason}, which cannot be averaged after {self._coarse[0]}: give"
                f" uplink=[Half()] or [Quantize()], or leave it out; it is {list(self.uplink.codecs)!r}."
            )

    @property
    def splits(self) -> bool:
        """Whether broadcasts have a separate part for the method's announcement, encoded once for all clients."""
        return bool(self.downlink.codecs) and ChangesBase.of(self._algorithm).announces

    def announce(self, base: Base, update: Mapping[str, Tensor], round_number: int) -> Packet:
        """Encode an announcement; the packet's ``received`` values are those of all clients and the server."""
        seed = derive_seed(base.seed, "announcement", round_number)
        return self._send(self.downlink, Message(update), exact=self._exact(base), seed=seed)

    @property
    def shares_copy(self) -> bool:
        """Whether all clients share a copy of the broadcast, to which each broadcast is a difference."""
        return self.downlink.error_feedback

    def setup(self, base: Base) -> None:
        """Initialise the shared copy by the initial model. Called by server and sites before the first round.

        Raises:
            MisconfigurationException: If codecs of the uplink leave numbers out that have no reference, or keep a
                residual of numbers that are at other places in other messages.
        """
        claims = self._algorithm.claims
        if claims.without_reference:
            self._refuse_coarse(claims.without_reference)
        if claims.moving_numbers and self.uplink.error_feedback:
            raise MisconfigurationException(
                f"uplink={list(self.uplink.codecs)!r}: {type(self._algorithm).__name__} {claims.moving_numbers}, and"
                " error feedback would add the residual of some numbers to others: leave out error_feedback."
            )
        if self.shares_copy and _COPY not in base.state:
            base.state[_COPY] = detached(base.sent_down(trained_tensors(base.module)))

    def _exact(self, base: Base) -> frozenset[str]:
        return self._algorithm.claims.exact | base.initial_buffers.keys()

    def down(
        self, base: Base, message: Message, client: ClientInfo, announced: Mapping[str, Tensor], encoded: bytes
    ) -> Packet:
        """Encode a broadcast to a client.

        Args:
            base: The server's.
            message: The method's message, with the announcement.
            client: The client.
            announced: The announcement as it is received.
            encoded: Its encoding, if the downlink `splits` broadcasts.
        """
        if self.splits:
            rest = {name: value for name, value in message.tensors.items() if name not in announced}
            return SplitPacket.of(self._down(base, Message(rest, message.codec), client), announced, encoded)
        return self._down(base, message, client)

    def _down(self, base: Base, message: Message, client: ClientInfo) -> Packet:
        if not self.downlink.codecs:
            return self._send(self.downlink, message, seed=0)
        if self.shares_copy:
            self._check_known(base, message)
        # One encoding for all clients if they share a copy.
        seed = derive_seed(client.seed, "downlink", client.round, *(() if self.shares_copy else (client.id,)))
        return self._send(
            self.downlink,
            message,
            reference=base.state.get(_COPY),
            exact=self._exact(base),
            seed=seed,
            memory=base.state.get(_MEMORY),
        )

    def _check_known(self, base: Base, message: Message) -> None:
        """Refuse tensors that are not zero and not in the clients' copy, if a codec suits only changes."""
        coarse = _coarse(self.downlink.codecs)
        if not coarse:
            return
        unknown = message.tensors.keys() - base.state[_COPY].keys() - self._exact(base)
        for name in sorted(unknown):
            value = message.tensors[name]
            if value.is_floating_point() and value.any():
                raise MisconfigurationException(
                    f"{type(self._algorithm).__name__} broadcasts {name!r}, of which clients have no copy, and"
                    f" downlink={list(self.downlink.codecs)!r}: {coarse[0]} suits only changes."
                    " Use Half() or Quantize() alone."
                )

    def _send(self, channel: Channel, message: Message, **arguments: Any) -> Packet:
        with self._going_through(channel):
            return channel.send(message.tensors, message_codec=message.codec, **arguments)

    @contextmanager
    def _going_through(self, channel: Channel) -> Iterator[None]:
        """Convert an error of a channel's codecs to one that names them."""
        try:
            yield
        except (TypeError, ValueError) as error:
            way = "uplink" if channel is self.uplink else "downlink"
            raise MisconfigurationException(
                f"{type(self._algorithm).__name__} and {way}={list(channel.codecs)} do not go together: {error}"
            ) from error

    def keep_copy(self, base: Base, received: Mapping[str, Tensor], sent: Packet | None = None) -> None:
        """Save a broadcast's decoded values as the clients' shared copy. Called once for each copy of the base.

        Args:
            base: The copy of the base.
            received: The broadcast.
            sent: On the server, its packet.
        """
        if not self.shares_copy:
            return
        base.state[_COPY] = detached(received)
        if sent is not None and sent.memory:
            base.state[_MEMORY] = sent.memory
        if sent is not None and sent.codec.adaptive:
            base.state[_BYTES] = sent.nbytes

    def with_copy(self, base: Base, packet: Packet) -> Packet:
        """The round's broadcast with the values and length that `keep_copy` saved."""
        return replace(packet, arrived=base.state[_COPY], references={}, length=base.state.get(_BYTES))

    def rebased(
        self, base: Base, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], shift: Callable[[str], Tensor]
    ) -> Mapping[str, Tensor]:
        """Convert a message of changes of the broadcast to changes of the server's exact values, ``own``.

        ``shift`` returns the exact value minus the broadcast's, by name.
        """
        shifted = {
            name: value + shift(name)
            for name, value in tensors.items()
            if name in own
            and name not in self._exact(base)
            and value.is_floating_point()
            and own[name].shape == value.shape
        }
        return {**tensors, **shifted}

    def decode_down(self, base: Base, data: bytes) -> dict[str, Tensor]:
        """Decode a broadcast on the CPU."""
        known = {name: value.cpu() for name, value in base.state.get(_COPY, {}).items()}
        arguments: dict[str, Any] = {
            "exact": self._exact(base),
            "message_codec": OwnCodec.of(self._algorithm).downlink(base),
        }
        if self.splits and data:
            data, announced = SplitPacket.parts(data)
            found = self.downlink.receive(data, **arguments)
            return {**found, **self.downlink.receive(announced, **arguments)}
        return self.downlink.receive(data, reference=known, **arguments)

    def up(self, client: ClientContext, message: Message, received: Mapping[str, Tensor]) -> Packet:
        """Encode a client's message, and save the residual of error feedback for the next one.

        ``received`` are the tensors that the client received in this round.
        """
        if not self.uplink.codecs or message.codec is not None:
            seed = derive_seed(client.seed, "uplink", client.round, client.id)
            return self._send(self.uplink, message, exact=self._exact(client.base), seed=seed)
        return self.up_together([(client, message, received)])[0]

    def up_together(self, answers: Sequence[Answer]) -> list[Packet]:
        """The packets of several clients, as by `up` to rounding; the arguments of `up` for each."""
        if not self.uplink.codecs or any(message.codec is not None for _, message, _ in answers):
            return [self.up(*answer) for answer in answers]
        outgoing, exact = [self._outgoing(*answer) for answer in answers], self._exact(answers[0][0].base)
        with self._going_through(self.uplink):
            packets = self.uplink.send_together(outgoing, exact=exact)
        for (client, message, _), packet in zip(answers, packets, strict=True):
            if packet.memory:
                client.state[_MEMORY] = packet.memory
            if self.uplink.error_feedback:
                residual = _multiplied(packet.residual, message.units)
                client.state.update({_RESIDUAL: residual, _LAST: client.round})
                self._warn_of_no_effect(packet.residual)
        return packets

    def _outgoing(self, client: ClientContext, message: Message, received: Mapping[str, Tensor]) -> Outgoing:
        last = client.state.get(_LAST, -1)
        drawn_in = ChangesBase.of(self._algorithm).drawn_in
        residual = {
            name: value
            for name, value in client.state.get(_RESIDUAL, {}).items()
            if drawn_in(name, client.round) <= last
        }
        known = reference(self._algorithm, client.base, client, received)
        self._check_shapes(client.base, message, known)
        return Outgoing(
            message.tensors,
            derive_seed(client.seed, "uplink", client.round, client.id),
            known,
            _multiplied(residual, {name: 1 / unit for name, unit in message.units.items()}),
            client.state.get(_MEMORY),
        )

    def _check_shapes(self, base: Base, message: Message, known: Mapping[str, Tensor]) -> None:
        """Refuse tensors that the channel would send as values although they have a reference, of another shape."""
        for name in sorted(message.tensors.keys() & known.keys() - self._exact(base)) if self._coarse else ():
            value, other = message.tensors[name], known[name]
            if value.is_floating_point() and value.shape != other.shape:
                shapes = f"{tuple(value.shape)}, and its reference {tuple(other.shape)}"
                self._refuse_coarse(f"sends the values of {name!r}, as it has the shape {shapes}")

    def _warn_of_no_effect(self, residual: Mapping[str, Tensor]) -> None:
        """Warn once if error feedback has no effect: the factors of some tensors are redrawn in each round."""
        if self._warned:
            return
        self._warned = True
        drawn_in = ChangesBase.of(self._algorithm).drawn_in
        new = [name for name in residual if all(drawn_in(name, _LATE + n) == _LATE + n for n in (0, 1))]
        if new:
            rank_zero_warn(
                f"error_feedback=True of the uplink has no effect on {len(new)} of {len(residual)} tensors, such as"
                f" {new[0]}: {type(self._algorithm).__name__} redraws the factors that multiply them in each round,"
                " and drops the residuals of earlier rounds."
            )

    def up_bytes(self, base: Base, schema: Schema, codec: Codec | None) -> int:
        """The number of bytes of `up`'s encoding for such a message; the arguments are those of `decode_up`."""
        return self.uplink.nbytes(schema.largest, exact=self._exact(base), message_codec=codec)

    def decode_up(
        self,
        base: Base,
        client: ClientInfo,
        data: bytes,
        received: Mapping[str, Tensor],
        codec: Codec | None,
        schema: Schema | None = None,
    ) -> dict[str, Tensor]:
        """Decode a client's message on the CPU.

        Args:
            base: The server's.
            client: The client.
            data: The bytes.
            received: The tensors that the client received.
            codec: The method's own, if any.
            schema: The message's schema; see `Channel.receive`.
        """
        if not self.uplink.codecs:
            return self.uplink.receive(data, message_codec=codec, schema=schema)
        reference_values = reference(self._algorithm, base, client, received)
        known = {name: value.cpu() for name, value in reference_values.items()}
        return self.uplink.receive(data, reference=known, exact=self._exact(base), message_codec=codec, schema=schema)
