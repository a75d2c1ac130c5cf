"""One direction of the wire: the codecs of messages, their references and the error feedback."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_lowrank.compression.base import Codec, Memory, check_feedback
from lightning_lowrank.compression.chain import Chain, chained
from lightning_lowrank.compression.dense import Dense
from lightning_lowrank.compression.split import Split
from lightning_lowrank.compression.wire import FLOATING, DecodingError, Schema


@dataclass(frozen=True)
class Packet:
    """A message as a `Channel` sends it.

    Tensors that travel exactly are not copied. Encode the packet before anything changes them.

    Args:
        tensors: The encoded tensors: differences, if there is a reference.
        codec: Their codec.
        arrived: The decoded tensors, on the tensors' own devices: differences, if there is a reference.
        residual: Added to the next message; empty without error feedback.
        memory: The codecs' memory for the sender's next message; empty for most codecs.
        length: Length in bytes of the encoding; ``None``: that of the encoding of ``tensors``.
        references: The references of the differences, by name. They must not change before `received` is read.
        together: Whether other senders' messages were compressed with this one, so that it is rounded differently.
        finite: Names of tensors whose numbers are known to be finite, in the message and as they arrived.
    """

    tensors: Mapping[str, Tensor]
    codec: Codec
    arrived: dict[str, Tensor]
    residual: dict[str, Tensor]
    memory: Memory = field(default_factory=dict)
    length: int | None = None
    references: Mapping[str, Tensor] = field(default_factory=dict)
    together: bool = False
    finite: Collection[str] = ()

    @cached_property
    def received(self) -> dict[str, Tensor]:
        """The message as the receiver decodes it, on the tensors' own devices."""
        return {name: _added(tensor, self.references.get(name)) for name, tensor in self.arrived.items()}

    @cached_property
    def nbytes(self) -> int:
        """Length in bytes of the encoding."""
        if self.length is not None:
            return self.length
        return self.codec.nbytes(self.tensors) if self.tensors else 0

    def encode(self) -> bytes:
        """The encoded message; empty bytes if it has no tensors."""
        return self.codec.encode(self.tensors) if self.tensors else b""


@dataclass(frozen=True)
class Outgoing:
    """A message with its seed and reference, and the sender's residual and memory.

    Args:
        tensors: The message.
        seed: Seed of the channel's codecs; use a different one for each message.
        reference: Tensors that sender and receiver both have. A floating-point tensor of the same name and shape is
            sent as its difference to it, computed in the tensor's type, but at least in float32. Default: nothing.
        residual: The residual of the sender's last message; ``None`` before the first. A tensor whose shape has
            changed since then starts at zero. Tensors that this message does not have stay in the residual.
        memory: The memory of the sender's last packet; ``None`` before the first.
    """

    tensors: Mapping[str, Tensor]
    seed: int
    reference: Mapping[str, Tensor] | None = None
    residual: Mapping[str, Tensor] | None = None
    memory: Memory | None = None


class Channel:
    r"""The codecs of all messages in one direction, with differences to a reference and error feedback.

    With codecs, floating-point tensors are sent as differences to a reference, if sender and receiver have one. With
    error feedback, the sender keeps the compression error and adds it to its next message: from a message :math:`x`
    (the differences) and its residual :math:`e`, which is zero at first, it sends

    .. math:: c = C(x + e), \qquad e \leftarrow x + e - c,

    where :math:`C` is all codecs together (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019). Residuals
    are kept in the tensor's type, but at least in float32. A number of the residual that would not be finite becomes
    zero. Of a tensor of 16 bits, the residual includes the rounding of the received sum with the reference.

    A channel without codecs sends everything exactly, and takes no differences. A channel has no state: the
    sender keeps the residual, and the memory of a codec such as `LowRankCodec` for its next message.

    Args:
        codecs: The codecs, the first one first: none, any single one, or several that can form a `Chain`. Only the
            first may have ``error_feedback=True``.

    Raises:
        TypeError: If ``codecs`` are not codecs, or several that cannot form a `Chain`.
        ValueError: If a codec that is not the first has error feedback, or the first has it and one of them `expands`.

    Example:
        >>> import torch
        >>> from lightning_lowrank.compression import Half, TopK
        >>> channel = Channel([TopK(0.5, error_feedback=True), Half()])
        >>> reference = {"weight": torch.tensor([1.0, 1.0])}
        >>> packet = channel.send({"weight": torch.tensor([1.5, 3.0])}, reference=reference, seed=0)
        >>> packet.received, packet.residual
        ({'weight': tensor([1., 3.])}, {'weight': tensor([0.5000, 0.0000])})
        >>> channel.receive(packet.encode(), reference=reference)
        {'weight': tensor([1., 3.])}
        >>> len(packet.encode()) == packet.nbytes
        True
    """

    def __init__(self, codecs: Sequence[Codec] = ()) -> None:
        self.codecs: tuple[Any, ...] = tuple(codecs)
        for codec in self.codecs:
            if not isinstance(codec, Codec):
                raise TypeError(f"codecs must be instances of Codec, such as TopK(0.1), but one is {codec!r}.")
        self._codec: Codec | None = (
            None if not self.codecs else self.codecs[0] if len(self.codecs) == 1 else Chain(self.codecs)
        )
        if self._codec is not None:
            check_feedback(self._codec)

    @property
    def error_feedback(self) -> bool:
        """Whether the sender keeps a residual."""
        return self._codec is not None and self._codec.error_feedback

    @torch.no_grad()
    def send(
        self,
        tensors: Mapping[str, Tensor],
        *,
        reference: Mapping[str, Tensor] | None = None,
        exact: Collection[str] = (),
        seed: int,
        residual: Mapping[str, Tensor] | None = None,
        memory: Memory | None = None,
        message_codec: Codec | None = None,
    ) -> Packet:
        """Compress a message; the packet has its encoding, the decoded tensors and the new residual.

        Args:
            tensors: As in `Outgoing`.
            reference: As in `Outgoing`.
            exact: Names of tensors that the channel's codecs leave alone. Tensors that are not of floating-point
                numbers are left alone anyway. Default: none.
            seed: As in `Outgoing`.
            residual: As in `Outgoing`.
            memory: As in `Outgoing`.
            message_codec: The message's own codec. It is applied first, unchanged, then the channel's codecs to its
                floating-point values; values are not sent as differences. Default: none.

        Raises:
            TypeError: If the channel's codecs cannot follow ``message_codec``.
            ValueError: If the channel has error feedback and ``message_codec`` is given.
        """
        if message_codec is not None and self.error_feedback:
            raise ValueError(
                f"the message has its own codec, {type(message_codec).__name__}, which error feedback cannot be"
                f" combined with; construct the channel's {type(self.codecs[0]).__name__} without error_feedback=True."
            )
        if self._codec is None or message_codec is not None:
            codec = self._codec_for(exact, message_codec, seed)
            return Packet(tensors, codec, codec.transmit(tensors) if tensors else {}, {})
        return self.send_together([Outgoing(tensors, seed, reference, residual, memory)], exact=exact)[0]

    @torch.no_grad()
    def send_together(self, messages: Sequence[Outgoing], *, exact: Collection[str] = ()) -> list[Packet]:
        """The packets of several senders' messages, each equal to that of `send` to rounding.

        Args:
            messages: The messages. The channel has codecs, and the messages have none of their own.
            exact: As in `send`, for all of them.
        """
        senders = [self._codec_for(exact, None, message.seed).started(message.memory or {}) for message in messages]
        changes = [self._change(message, exact) for message in messages]
        if all(message.tensors for message in messages):
            found = type(senders[0]).transmit_together(senders, [sent for sent, *_ in changes])
        elif len(messages) == 1:
            found = [({}, messages[0].memory or {})]
        else:
            return [self.send_together([message], exact=exact)[0] for message in messages]
        packets, length = [], _common_length(senders, [sent for sent, *_ in changes])
        for message, sender, change, (arrived, kept) in zip(messages, senders, changes, found, strict=True):
            sent, references, wanted = change
            lost, finite = dict[str, Tensor](), set[str]()
            for name, wide in wanted.items():
                lost[name] = wide - _change_of(arrived[name], references.get(name)).to(wide)
                # Faster than a pass that writes. A sum on another device would have to be waited for.
                if wide.is_cpu and math.isfinite(lost[name].sum().item()):
                    finite.add(name)
                else:
                    lost[name].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            residual = {**(message.residual or {}), **lost} if self.error_feedback else {}
            packets.append(Packet(sent, sender, arrived, residual, kept, length, references, len(messages) > 1, finite))
        return packets

    def _change(
        self, message: Outgoing, exact: Collection[str]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """The tensors to encode, the references of differences, and the targets of error feedback, before rounding."""
        sent = {name: tensor.detach() for name, tensor in message.tensors.items()}
        known_to_both, residual = message.reference or {}, message.residual or {}
        references = {name: known_to_both[name] for name in _differing(sent, known_to_both, exact)}
        wanted: dict[str, Tensor] = {}
        for name, tensor in sent.items():
            known, lost = references.get(name), residual.get(name)
            feedback = self.error_feedback and tensor.dtype in FLOATING and name not in exact
            if known is None and not feedback:
                continue
            wide = _wide(tensor)
            if known is not None:
                wide = wide - known.detach().to(wide)
            if feedback:
                if lost is not None and lost.shape == wide.shape:
                    wide = wide + lost.to(wide) if known is None else wide.add_(lost.to(wide))
                wanted[name] = wide
            sent[name] = wide.to(tensor.dtype)
        return sent, references, wanted

    @torch.no_grad()
    def receive(
        self,
        data: bytes,
        *,
        reference: Mapping[str, Tensor] | None = None,
        exact: Collection[str] = (),
        message_codec: Codec | None = None,
        schema: Schema | None = None,
    ) -> dict[str, Tensor]:
        """Decode a message on the CPU; the result equals the sender's `Packet.received` bit for bit.

        Args:
            data: The bytes of `Packet.encode`.
            reference: As it was given to `send`.
            exact: As it was given to `send`.
            message_codec: As it was given to `send`, or a codec of the same arguments.
            schema: The message's names, types and shapes. Bytes of more than twice its encoding's length are refused
                unread, and no memory is allocated before the names, types and shapes in the bytes are found equal.

        Raises:
            DecodingError: If no sender with these arguments writes such bytes, or the message does not fit ``schema``.
        """
        if schema is not None:
            _check_length(len(data), self.nbytes(schema.largest, exact=exact, message_codec=message_codec))
        if not data:
            return {}
        tensors = self._codec_for(exact, message_codec).decode(data, schema)
        if self._codec is None or message_codec is not None or not reference:
            return tensors
        references = {name: reference[name] for name in _differing(tensors, reference, exact)}
        return {name: _added(tensor, references.get(name)) for name, tensor in tensors.items()}

    def nbytes(
        self, tensors: Mapping[str, Tensor], *, exact: Collection[str] = (), message_codec: Codec | None = None
    ) -> int:
        """Length in bytes of a message with these names, types and shapes; meta tensors are enough.

        The arguments are those of `send`.
        """
        return self._codec_for(exact, message_codec).nbytes(tensors) if tensors else 0

    def _codec_for(self, exact: Collection[str], message_codec: Codec | None, seed: int | None = None) -> Codec:
        if self._codec is None:
            return message_codec or Dense()
        codec = self._codec if seed is None else self._codec.seeded(seed)
        if message_codec is not None:
            codec = chained(message_codec, [codec])  # type: ignore[list-item]  # refused there if it cannot follow
        return Split(exact, Dense(), codec) if exact else codec


def _common_length(senders: Sequence[Codec], messages: Sequence[Mapping[str, Tensor]]) -> int | None:
    """The length of each of several encodings, if it follows from names, types and shapes that they have in common."""
    layouts = [[(name, each.dtype, each.shape) for name, each in tensors.items()] for tensors in messages]
    alike = len(layouts) > 1 and all(layout == layouts[0] for layout in layouts)
    return senders[0].nbytes(messages[0]) if alike and not senders[0].adaptive else None


def _check_length(length: int, expected: int) -> None:
    """Refuse bytes whose length rules out a message of ``expected`` bytes."""
    if not expected and length:
        raise DecodingError(f"{length:,} bytes were received, but this method sends nothing.")
    if expected and not length:
        raise DecodingError("nothing was received, but this method sends tensors.")
    # If the sender chooses the masks, its message may have more numbers than the receiver's codec expects.
    if length > 2 * expected:
        raise DecodingError(f"{length:,} bytes were received, but the expected message has at most {2 * expected:,}.")


def _differing(tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor], exact: Collection[str]) -> list[str]:
    """Names of the tensors that are sent as differences to the reference."""
    return [
        name
        for name, tensor in tensors.items()
        if name in reference
        and name not in exact
        and tensor.dtype in FLOATING
        and reference[name].dtype in FLOATING
        and reference[name].shape == tensor.shape
    ]


def _wide(tensor: Tensor) -> Tensor:
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _change_of(arrived: Tensor, reference: Tensor | None) -> Tensor:
    """The change that the receiver makes: of 16-bit tensors, the sum with the reference is rounded once more."""
    if reference is None or _wide(arrived) is arrived:
        return arrived
    received = _wide(_added(arrived, reference))
    return received - reference.detach().to(received)


def _added(tensor: Tensor, reference: Tensor | None) -> Tensor:
    if reference is None:
        return tensor
    wide = _wide(tensor)
    return (reference.detach().to(wide) + wide).to(tensor.dtype)
