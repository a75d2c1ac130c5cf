"""Checks a round's answers, each alone and against the others, and passes them to the method wholly or not at all.

`RemoteRounds` gives the sites' answers to an `Intake`. If an answer is bad, or the method fails on it, its site is left
out of the round, and the server's state is as if that site had not answered.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import Message
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lightning_lowrank.aggregation import KeepsArrivals
from lightning_lowrank.aggregation.aggregator import working_dtype
from lightning_lowrank.compression import Codec, DecodingError, Packet, Schema
from lightning_lowrank.federated.coordinator import Coordinator
from lightning_lowrank.federated.failures import describe_error
from lightning_lowrank.federated.protocols import UnequalClients
from lightning_lowrank.federated.state import ClientInfo
from lightning_lowrank.flower.messages import field_of, printable, read_upload, unpack

__all__ = ["Expected", "Intake", "expect", "limit_claims"]

# Products of two numbers up to this, and the squares of these products, are finite in single precision.
_LARGEST_NORM = 1e9
# A change of up to this share of the changed tensors' norm, times the bound, is accepted in any case.
_LEAST_SHARE = 1e-3
# A site that makes more steps than the median site may change the model more, up to this factor.
_MOST_FOR_STEPS = 5.0
# With fewer answers, no majority shows which one is the outlier.
_ENOUGH = 3


@dataclass(frozen=True)
class Expected:
    """A client's expected message: its schema, its codec, and the broadcast that the client received."""

    schema: Schema
    codec: Codec | None
    received: Mapping[str, Tensor]


def expect(coordinator: Coordinator, packets: Mapping[int, Packet], live: Mapping[str, Tensor]) -> dict[int, Expected]:
    """Each client's expected message, found by running the client's half of the method without steps.

    Args:
        coordinator: The server's half of the rounds.
        packets: Each client's broadcast.
        live: The live trained parameters and persistent buffers, which hold the global model afterwards.
    """
    algorithm, base = coordinator.algorithm, coordinator.server.base
    expected = {}
    try:
        for client, packet in packets.items():
            info = coordinator.info(client)
            UnequalClients.of(algorithm).configure(base, info)
            sent = coordinator.untrained_message(info, packet.received, live)
            schema = Schema.of(sent.tensors, sent.limits)
            expected[client] = Expected(schema, sent.codec, packet.received)
    finally:
        coordinator.show_global(live)
    return expected


def limit_claims(claims: Sequence[int], bound: float) -> list[int]:
    """Numbers of samples that count as the sites' weights, from the numbers that the sites claim.

    A claim of more than ``bound`` times the upper median of all claims above 0 counts as that median. So a minority
    can neither raise its own weight implausibly nor lower the weight of others.

    Example:
        >>> limit_claims([100, 0, 2**62, 80], bound=10)
        [100, 0, 100, 80]
    """
    middle = _upper_median([claim for claim in claims if claim > 0])
    return [int(middle) if claim > bound * middle else claim for claim in claims]


class Intake:
    """Receives the sites' answers of a round.

    An answer is left out if it cannot be decoded into the expected tensors, if a stage refuses it, if the method raises
    an error on it, or if its change of the broadcast is implausibly large: with a norm above ``norm_bound`` times the
    upper median of the round's answers, separately for parameters, buffers, counters and other tensors. A site that
    makes more steps than the median site may change as many times more, up to five. A change of up to ``norm_bound``
    thousandths of the changed tensors' norm is never too large. With fewer than three answers the largest median of
    earlier rounds takes the place of the round's own, if there is one; if all answers exceed the limit, it is
    multiplied by the bound once more. No answer's norm may exceed 10⁹, or the bound times the norm of the broadcast if
    that is more. So a minority's answers never cause a majority of honest sites to be left out.

    Args:
        coordinator: The server's half of the rounds.
        norm_bound: See above; ``math.inf``: norms are not compared.
    """

    def __init__(self, coordinator: Coordinator, norm_bound: float = 10.0) -> None:
        self.coordinator = coordinator
        self.norm_bound = norm_bound
        self._medians: dict[str, float] = {}
        self._accepted: dict[int, tuple[bytes, Expected | None]] = {}
        self._excess: dict[int, float] = {}
        self._changed: dict[int, dict[str, _Change]] = {}
        self._undo: Callable[[], None] = lambda: None

    def state_dict(self) -> dict[str, Any]:
        """Medians of earlier rounds."""
        return {"medians": dict(self._medians)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`'s result."""
        self._medians = dict(state["medians"])

    def begin_round(self) -> None:
        """Forget the last round's answers; called after the method has begun the round."""
        self._accepted, self._excess, self._changed = {}, {}, {}

    def accept(
        self, replies: Mapping[int, Message], expected: Mapping[int, Expected], steps: Sequence[int]
    ) -> dict[int, str]:
        """Check answers and pass them to the method; may be called several times in a round.

        Args:
            replies: The sites' answers, by client.
            expected: The expected message of each of these clients.
            steps: Number of steps that each client of the federation makes in a round.

        Returns:
            The reason, for each client whose answer was refused.
        """
        refused: dict[int, str] = {}
        data: dict[int, bytes] = {}
        if not self._accepted:
            self._undo = self.coordinator.checkpoint()
        for client in sorted(replies):
            try:
                data[client] = self._payload(replies[client])
                info = self.coordinator.info(client)
                refusal = self.coordinator.refused(info, steps[client], len(data[client]))
                if refusal is not None:
                    refused[client] = printable(f"a stage refuses it: {refusal}")
                    continue
                # Decoded again when passed to the method, so that at most one site's tensors are in memory.
                tensors = self._decode(info, data[client], expected[client])
                self._changed[client] = self._changes(info, tensors, expected[client])
            except DecodingError as error:
                refused[client] = printable(str(error))
        # Only answers of this call are refused: the method already has those of earlier calls.
        implausible = self._implausible(steps)
        refused |= {client: reason for client, reason in implausible.items() if client in replies}
        for client in sorted(replies.keys() - refused.keys()):
            reason = self._fold(client, data[client], expected[client])
            if reason is None:
                self._accepted[client] = data[client], expected[client]
            else:
                refused[client] = reason
        return refused

    def accept_mean(self, clients: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        """Pass the mean to the method as each client's answer; see `secure_mean`."""
        coordinator = self.coordinator
        self._undo = coordinator.checkpoint()
        on_device = move_data_to_device(dict(tensors), coordinator.server.base.device)
        for client in sorted(clients):
            coordinator.receive_decoded(coordinator.info(client), on_device)
            self._accepted[client] = b"", None

    def aggregate(self, least: int = 1) -> dict[int, str]:
        """Let the method aggregate the accepted answers.

        If it fails, the clients whose answers make it fail are left out, at most a minority.

        Args:
            least: Number of answers that must remain.

        Returns:
            For clients that were left out, the reason.

        Raises:
            Exception: The method's own error, if leaving out a minority does not help.
        """
        coordinator = self.coordinator
        coordinator.answers.check(len(self._accepted))
        self._remember()
        try:
            coordinator.aggregate()
            return {}
        except Exception as error:
            suspects = sorted(self._accepted, key=lambda client: -self._excess.get(client, 0.0))
            few = min((len(suspects) - 1) // 2, len(suspects) - least)
            if coordinator.private is not None:
                # Each attempt would spend privacy budget, and clipped answers do not overflow anyway.
                raise
            for left_out in [*((client,) for client in suspects if few), *(suspects[:n] for n in range(2, few + 1))]:
                if coordinator.server.announcement:
                    # An announcement has changed the frozen weights, which cannot be undone.
                    break
                self._undo()
                coordinator.server.aggregator = coordinator.server.aggregator.fresh()
                self._undo = coordinator.checkpoint()
                rest = {client: sent for client, sent in self._accepted.items() if client not in left_out}
                if any(self._fold(client, *sent) for client, sent in rest.items()):
                    continue
                try:
                    coordinator.aggregate()
                except Exception:
                    continue
                reason = f"the method fails on its answer: {printable(describe_error(error))}"
                return dict.fromkeys(left_out, reason)
            raise

    def skip_round(self) -> None:
        """End the round as if no site had answered."""
        if self._accepted:
            self._undo()
        self.coordinator.skip_round()

    def _payload(self, reply: Message) -> bytes:
        fields, payloads = unpack(reply)
        number = self.coordinator.server.round
        if field_of(fields, "round", int) != number or payloads.keys() - {number}:
            raise DecodingError(f"it answers for another round: {fields.get('round')}.")
        return payloads.get(number, b"")

    def _decode(self, client: ClientInfo, data: bytes, expected: Expected) -> dict[str, Tensor]:
        coordinator = self.coordinator

        def decode(data: bytes, schema: Schema) -> Mapping[str, Tensor]:
            received = expected.received
            return coordinator.wire.decode_up(coordinator.server.base, client, data, received, expected.codec, schema)

        return read_upload(data, expected.schema, decode, coordinator.infinite)

    def _fold(self, client: int, data: bytes, expected: Expected | None) -> str | None:
        """Pass one answer to the method; if that fails, restore the server's state and return the reason."""
        if expected is None:
            return "nobody knows what it sent."
        coordinator = self.coordinator
        server, aggregator = coordinator.server, coordinator.server.aggregator
        undo, staged = coordinator.checkpoint(), _Staged()
        server.aggregator = staged
        try:
            info = coordinator.info(client)
            tensors = self._decode(info, data, expected)
            coordinator.receive_decoded(info, move_data_to_device(tensors, server.base.device))
            for added, weight in staged.kept:
                aggregator.add(added, weight)
        except Exception as error:  # the method's or the aggregator's, over this answer alone
            undo()
            return printable(str(error) if isinstance(error, ValueError) else describe_error(error))
        finally:
            server.aggregator = aggregator
        return None

    def _changes(self, client: ClientInfo, tensors: Mapping[str, Tensor], expected: Expected) -> dict[str, _Change]:
        """The norms of an answer's changes relative to the broadcast, by kind of tensor.

        Raises:
            DecodingError: If a norm is too large to compute with.
        """
        base, model = self.coordinator.server.base, self.coordinator.server.model
        known = {**model, **base.fresh_buffers, **expected.received}
        origin = self.coordinator.broadcasts.origin(client, expected.received)
        sparse = expected.codec is not None and expected.codec.sparse
        squares: dict[str, tuple[list[float], list[float]]] = {}
        names: dict[str, list[str]] = {}
        for name, value in tensors.items():
            kind = _kind(name, value, base.initial_buffers, model)
            infinite = self.coordinator.infinite.get(name)
            if kind is None or (infinite is not None and infinite.shape != value.shape):
                continue
            # A tensor that already is a change has no origin, and is compared with the model's tensor.
            reference = origin.get(name, known.get(name))
            if infinite is not None and reference is not None:
                # What began as an infinite number has no distance from a finite one.
                endless = infinite.cpu().isfinite().logical_not()
                value, reference = value.masked_fill(endless, 0), reference.cpu().masked_fill(endless, 0)
            before, after = squares.setdefault(kind, ([], []))
            names.setdefault(kind, []).append(name)
            if reference is not None and reference.shape == value.shape:
                before.append(_norm(reference.cpu()))
                if name in origin:
                    difference = value.to(_wide(value)) - reference.to("cpu", _wide(value))
                    # A zero is a number that the method's sparse codec left out, and so no change.
                    value = difference.masked_fill(value == 0, 0) if sparse else difference
            after.append(_norm(value))
        found = {}
        for kind, (before, after) in squares.items():
            change = _Change(math.hypot(*after), math.hypot(*before), f"{kind} {_digest(names[kind])}")
            # Negated, so that NaN is refused too.
            if not change.norm <= max(_LARGEST_NORM, self.norm_bound * change.of):
                raise DecodingError(f"it changes {kind} by a norm of {change.norm:.3g}.")
            found[kind] = change
        return found

    def _implausible(self, steps: Sequence[int]) -> dict[int, str]:
        """The clients whose changes are too large compared with the other clients', each with the reason."""
        refused: dict[int, str] = {}
        changes = self._changed
        for kind in dict.fromkeys(kind for each in changes.values() for kind in each):
            found = {client: each[kind] for client, each in changes.items() if kind in each}
            middle = _upper_median([change.norm for change in found.values()])
            usual = max(_upper_median([steps[client] for client in found]), 1)
            enough = len(found) >= _ENOUGH
            allowed = {}
            for client, change in found.items():
                limit = middle if enough else self._medians.get(change.key, math.inf)
                more = min(max(steps[client] / usual, 1.0), _MOST_FOR_STEPS)
                allowed[client] = self.norm_bound * max(limit * more, _LEAST_SHARE * change.of)
            if not enough and all(change.norm > allowed[client] for client, change in found.items()):
                allowed = {client: self.norm_bound * limit for client, limit in allowed.items()}
            for client, change in found.items():
                self._excess[client] = max(self._excess.get(client, 0.0), change.norm / max(allowed[client], 1e-30))
                if change.norm > allowed[client]:
                    refused[client] = (
                        f"it changes {kind} by a norm of {change.norm:.3g}, but the other sites' answers allow"
                        f" {allowed[client]:.3g}; see norm-bound."
                    )
        return refused

    def _remember(self) -> None:
        """Record the medians of a round with enough answers, for later rounds with too few."""
        for kind in dict.fromkeys(kind for each in self._changed.values() for kind in each):
            found = [each[kind] for each in self._changed.values() if kind in each]
            middle = _upper_median([change.norm for change in found])
            for key in {change.key for change in found} if len(found) >= _ENOUGH else ():
                median = _upper_median([change.norm for change in found if change.key == key])
                self._medians[key] = max(self._medians.get(key, 0.0), min(middle, median))


@dataclass(frozen=True)
class _Change:
    """The norm of a change, the norm of the changed tensors, and a key for the set of these tensors."""

    norm: float
    of: float
    key: str


class _Staged(KeepsArrivals):
    """Keeps the tensors that a method adds for one answer, until the method is done with the answer."""

    def result(self) -> dict[str, Tensor]:
        raise NotImplementedError("a method cannot use the mean while it receives a client's answer.")


def _upper_median(values: Sequence[float]) -> float:
    """The median, or the larger of two middle values; 0 without values."""
    return statistics.median_high(values) if values else 0.0


def _kind(name: str, value: Tensor, buffers: Collection[str], model: Collection[str]) -> str | None:
    """The kind of tensors among which a tensor's change is compared; ``None`` for integers that are no counters."""
    if value.is_floating_point() or value.is_complex():
        return (
            "buffers" if name in buffers else "parameters" if name in model else "its tensors in addition to the model"
        )
    return "counters" if name in buffers and value.dtype != torch.bool else None


def _wide(value: Tensor) -> torch.dtype:
    if value.is_complex():
        return value.dtype
    return working_dtype(value.dtype) if value.is_floating_point() else torch.float64


def _norm(value: Tensor) -> float:
    value = value.to(_wide(value))
    return float(
        torch.linalg.vector_norm(torch.view_as_real(value) if value.is_complex() else value, dtype=torch.float64)
    )


def _digest(names: Sequence[str]) -> int:
    return zlib.crc32("\n".join(sorted(names)).encode())
