"""Secure aggregation: the server learns the sum of the sites' answers and no single one, by Flower's own SecAgg+.

`RemoteRounds` calls `secure_mean`, which runs Flower's ``SecAggPlusWorkflow`` over the sites of a round; the
``ClientApp`` has Flower's ``secaggplus_mod`` around its half. This module contains no cryptography: it writes the
sites' changes as the numbers that Flower masks, and compares answers with those that the protocol's stage expects.

It does not protect from a dishonest server: Flower folds each 256-bit key to 32 bits and seeds NumPy's Mersenne Twister
with them, so that a server can try all 2³² seeds and take the masks away. It keeps single updates out of the logs and
backups of an honest server. Nor does it protect from a site: nobody can tell which site has spoiled a masked sum, and
norm bounds and robust rules have no single answer to look at. The sum and the model of each round stay visible to the
server. ``docs/security.md`` has the whole table.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.aggregation import WeightedMean
from lightning_lowrank.compression import DecodingError, Schema
from lightning_lowrank.federated.protocols import needs_only_mean
from lightning_lowrank.federated.settings import FederatedSettings
from lightning_lowrank.federated.state import difference
from lightning_lowrank.flower.messages import Fields
from lightning_lowrank.flower.transport import Silence
from lightning_lowrank.internals import flower as internals

SECURE = "train"
"""Type of the messages: Flower's mod handles this one alone."""

_NUMBERS = "numbers"
_LEVELS = 2**22
_MODULUS = 2**32
_LONGEST_KEY = 4096
_BEFORE_NUMBERS = {"setup", "share_keys"}


def check_secure(settings: FederatedSettings, min_sites: int) -> None:
    """Refuse a recipe whose server needs more than the sum of the sites' answers.

    Raises:
        MisconfigurationException: If it does; the message has the reason.
    """
    algorithm = settings.algorithm
    operator = getattr(algorithm, "operator", None)
    name = type(algorithm).__name__ + ("" if operator is None else f"({operator!r})")
    refused = {
        f"{name} needs each site's own answer": not needs_only_mean(algorithm),
        f"aggregator={settings.aggregator!r} compares single answers": type(settings.aggregator) is not WeightedMean,
        f"uplink={settings.uplink!r} encodes single answers": bool(settings.uplink),
        f"weighting={settings.weighting!r} gives weights that are no whole numbers": callable(settings.weighting),
        "the privacy of federated.privacy clips single answers at the server (noise_at='server')": (
            settings.privacy is not None and settings.privacy.noise_at == "server"
        ),
        f"min-sites={min_sites} would let the server see the answer of a single site; it must be 2 or more": (
            min_sites < 2
        ),
    }
    reason = next((reason for reason, wrong in refused.items() if wrong), None)
    if reason is not None:
        raise MisconfigurationException(
            f"secure-aggregation shows the server only the sum of the answers, but {reason}."
        )
    if not internals.has_secure_aggregation():
        raise MisconfigurationException("secure-aggregation needs SecAgg+ of Flower 1.41, which this Flower lacks.")


@dataclass
class SecureRequest:
    """The request to one site: fields and encoded broadcasts by round, as `pack` takes them, and the site's weight."""

    fields: Fields
    payloads: Mapping[int, bytes]
    weight: int


Exchange = Callable[[Mapping[int, tuple[str, RecordDict]]], Mapping[int, Message | Silence]]


@dataclass
class SecureAnswer:
    """The result of a secure aggregation.

    Args:
        mean: The weighted mean of the sites' changes, by name, in double precision; empty if there is none.
        nodes: The sites whose changes are in it.
        nbytes: Bytes that sites have sent, by node.
        failures: The known reasons why other sites are missing. A failure that another site may have caused is passing.
    """

    mean: dict[str, Tensor] = field(default_factory=dict)
    nodes: list[int] = field(default_factory=list)
    nbytes: dict[int, int] = field(default_factory=dict)
    failures: dict[int, Silence] = field(default_factory=dict)


def secure_mean(
    requests: Mapping[int, SecureRequest],
    schema: Schema,
    threshold: int,
    largest: float,
    number: int,
    exchange: Exchange,
) -> SecureAnswer:
    """Let sites train, and compute the mean of their changes by secure aggregation.

    A site that fails before the numbers are sent is left out, and the others begin again without it: the protocol
    compensates only for the failure of sites that have exchanged their keys.

    Args:
        requests: The request to each node.
        schema: Names and shapes of the changes.
        threshold: Number of sites without which nothing can be unmasked.
        largest: Largest number in a change.
        number: The round.
        exchange: Sends messages to nodes and returns each node's answer or `Silence`.

    Returns:
        The mean; none if too few sites completed the protocol, or if one of them has spoiled it: the protocol does not
        say which.
    """
    answer, mean, nodes = SecureAnswer(), dict[str, Tensor](), list[int]()
    left = dict(requests)
    while len(left) >= threshold:
        try:
            arrays, nodes = internals.run_secure_aggregation(
                _Stages(exchange, left, schema, answer),
                {node: _instructions(request) for node, request in left.items()},
                number,
                threshold=threshold / len(left),
                max_weight=float(max(request.weight for request in left.values())),
                clipping_range=largest,
                quantization_range=_LEVELS,
                modulus_range=_MODULUS,
            )
            mean = _named(arrays, schema)
            break
        except _Incomplete:
            left = {node: request for node, request in left.items() if node not in answer.failures}
        except Exception as error:  # whatever a site sent, nobody can tell which
            for node in left:
                reason = f"secure aggregation failed, by this site or another: {error!r}"[:300]
                answer.failures.setdefault(node, Silence(reason, passing=True))
            return answer
    answer.mean, answer.nodes = mean, nodes if mean else []
    for node in requests.keys() - set(answer.nodes):
        answer.failures.setdefault(node, Silence("secure aggregation ended without it", passing=True))
    return answer


def read_request(message: Message) -> tuple[dict[str, Any], dict[int, bytes]]:
    """The fields and broadcasts of a message from `secure_mean`.

    Raises:
        DecodingError: If it has another form.
    """
    try:
        payloads, fields = internals.read_instructions(message.content)
        numbers = [int(text) for text in str(fields.pop(_NUMBERS)).split(",") if text]
        return fields, dict(zip(numbers, payloads, strict=True))
    except (KeyError, ValueError, TypeError) as error:
        raise DecodingError(f"the request for a secure sum is malformed: {error!r}") from error


def write_answer(message: Message, context: Context, changes: Mapping[str, Tensor], weight: int) -> Message:
    """A site's answer, which Flower's mod masks before it is sent.

    Raises:
        MisconfigurationException: If a number is larger than the server's announced range, which would clip it.
    """
    largest, most = internals.limits_of(context)
    # A tensor's max(), because Python's may pass over NaN.
    largest_of_each = [change.abs().max() for change in changes.values() if change.numel()]
    highest = float(torch.stack(largest_of_each).max()) if largest_of_each else 0.0
    if not highest * weight / most <= largest:
        raise MisconfigurationException(
            f"a number of the change is {highest:.3g}, but the sum takes at most {largest:g}: give the run a"
            " larger secure-range, or the site a smaller clip."
        )
    arrays = [changes[name].double().cpu().numpy() for name in sorted(changes)]
    return Message(internals.write_result(arrays, weight), reply_to=message)


def changes_of(received: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Differences of tensors from a reference of the same name and shape, in double precision."""
    return {
        name: difference(value.double(), reference[name].to(value.device).double())
        if name in reference and reference[name].shape == value.shape
        else value.double()
        for name, value in received.items()
    }


def with_changes(changes: Mapping[str, Tensor], reference: Mapping[str, Tensor], schema: Schema) -> dict[str, Tensor]:
    """Inverse of `changes_of`: tensors in their own types; integers are rounded."""
    tensors = {}
    for name, (dtype, shape) in schema.entries.items():
        known = reference.get(name)
        value = changes[name] if known is None or known.shape != shape else changes[name] + known.cpu().double()
        tensors[name] = (value if dtype.is_floating_point else value.round()).to(dtype)
    return tensors


def _instructions(request: SecureRequest) -> tuple[list[bytes], dict[str, Any]]:
    numbers = sorted(request.payloads)
    fields = {**request.fields, "weight": request.weight, _NUMBERS: ",".join(map(str, numbers))}
    return [request.payloads[number] for number in numbers], fields


def _named(arrays: Sequence[np.ndarray], schema: Schema) -> dict[str, Tensor]:
    if not arrays:
        return {}
    names = sorted(schema.entries)
    return {name: torch.from_numpy(np.array(value)) for name, value in zip(names, arrays, strict=True)}


class _Incomplete(Exception):
    """A site has failed before the numbers were sent."""


class _Stages:
    """The grid that Flower's workflow uses; an answer that a stage cannot use counts as its site's failure alone."""

    def __init__(
        self, exchange: Exchange, requests: Mapping[int, SecureRequest], schema: Schema, answer: SecureAnswer
    ) -> None:
        self._exchange = exchange
        self._requests = requests
        self._shapes = [(1,), *(schema.entries[name][1] for name in sorted(schema.entries))]
        self._answer = answer

    def send_and_receive(self, messages: Sequence[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages, and return the answers that the stage can use."""
        asked = {message.metadata.dst_node_id: message for message in messages}
        stage = {node: internals.stage_of(message.content) for node, message in asked.items()}
        replies = self._exchange({node: (SECURE, message.content) for node, message in asked.items()})
        used = []
        for node in sorted(asked):
            reply = replies[node]
            if not isinstance(reply, Message):
                self._answer.failures[node] = reply
                continue
            try:
                self._answer.nbytes[node] = self._answer.nbytes.get(node, 0) + self._check(node, stage[node], reply)
                used.append(reply)
            except (DecodingError, KeyError, TypeError, ValueError, AttributeError) as error:
                self._answer.failures[node] = Silence(f"it sent a bad answer: {error}"[:300], passing=False, bad=True)
        if len(used) < len(asked) and _BEFORE_NUMBERS.intersection(stage.values()):
            raise _Incomplete
        return used

    def _check(self, node: int, stage: str, reply: Message) -> int:
        """The size of an answer in bytes.

        Raises:
            DecodingError: If the stage cannot use it.
        """
        fields = internals.configuration_of(reply.content)
        if stage == "setup":
            keys = [fields["pk1"], fields["pk2"]]
            lengths = all(isinstance(key, bytes) and len(key) < _LONGEST_KEY for key in keys)
            _check(lengths and len(set(keys)) == 2 and all(map(internals.is_public_key, keys)), "its keys are invalid")
            return sum(map(len, keys))
        if stage == "share_keys":
            nodes, texts = fields["dsts"], fields["ctxts"]
            known = set(nodes) <= self._requests.keys() - {node} and len(set(nodes)) == len(nodes) == len(texts)
            _check(known and _are_short(texts), "its shares are not of the sites' keys")
            return sum(map(len, texts))
        if stage == "collect_masked_vectors":
            vectors = fields["masked_params"]
            _check(len(vectors) == len(self._shapes), "its numbers have other shapes")
            for data, shape in zip(vectors, self._shapes, strict=True):
                _check(_is_array(data, shape), "its numbers have other shapes")
            weight = internals.weight_of(reply.content)
            _check(weight == self._requests[node].weight, f"it has the weight {weight}")
            return sum(map(len, vectors))
        nodes, shares = fields["nids"], fields["shares"]
        known = set(nodes) <= self._requests.keys() and len(set(nodes)) == len(nodes) == len(shares)
        _check(known and _are_short(shares), "its shares are not of the sites' keys")
        return sum(map(len, shares))


def _check(holds: bool, reason: str) -> None:
    if not holds:
        raise DecodingError(f"{reason}.")


def _are_short(texts: Sequence[Any]) -> bool:
    return all(isinstance(text, bytes) and len(text) < _LONGEST_KEY for text in texts)


def _is_array(data: Any, shape: tuple[int, ...]) -> bool:
    """Whether bytes are an array of 64-bit integers of this shape; checked before anything of its size is allocated."""
    if not isinstance(data, bytes) or len(data) > 8 * int(np.prod(shape)) + 1024:
        return False
    file = io.BytesIO(data)
    if np.lib.format.read_magic(file) != (1, 0):
        return False
    found, _, kind = np.lib.format.read_array_header_1_0(file)
    return tuple(found) == tuple(shape) and kind == np.int64 and len(data) - file.tell() == 8 * int(np.prod(shape))
