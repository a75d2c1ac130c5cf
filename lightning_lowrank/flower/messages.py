"""What crosses the wire between the server and a site, as Flower's records.

Messages are bytes of this package's codecs in an ``ArrayRecord``, one array for each round that a site is told of;
everything else is plain numbers and strings in a ``ConfigRecord``. Nothing is pickled. What a site sends is held
against what the method's own `Algorithm.end` would send before anything else looks at it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_lowrank.compression import DecodingError, Dense
from lightning_lowrank.federated.failures import not_finite
from lightning_lowrank.federated.state import trained_tensors

JOIN = "query.join"
TRAIN = "train.round"
LISTEN = "query.listen"

_ENCODING = "lightning_lowrank"
_FIELDS = "fields"
_PAYLOADS = "payloads"
# Parameters, and what every side of a projected optimizer sets for itself.
_NOT_TOLD = ("params", "stacked", "seed", "subspaces", "refresh_number", "steps_since_refresh")
# A codec may send positions beside numbers, which take less than the numbers do, and headers.
_LARGEST_RATIO = 2
_HEADROOM = 65536

Fields = Mapping[str, Any]


def pack(fields: Fields, payloads: Mapping[int, bytes] | None = None) -> RecordDict:
    """Return the content of a message: numbers, strings, booleans or lists of them, and encoded payloads by round."""
    records: dict[str, Any] = {_FIELDS: ConfigRecord(dict(fields))}
    if payloads:
        arrays = {
            str(number): Array(dtype="uint8", shape=(len(data),), stype=_ENCODING, data=data)
            for number, data in payloads.items()
        }
        records[_PAYLOADS] = ArrayRecord(arrays)
    return RecordDict(records)


def unpack(message: Message) -> tuple[dict[str, Any], dict[int, bytes]]:
    """Return a message's fields, and its encoded payloads by round.

    Raises:
        DecodingError: If it has another form than `pack` gives it.
    """
    content = message.content
    fields = content.config_records.get(_FIELDS)
    if fields is None:
        raise DecodingError("the message has no fields.")
    payloads = {}
    for number, array in (content.array_records.get(_PAYLOADS) or {}).items():
        if not (number.isascii() and number.isdigit() and len(number) < 10) or array.stype != _ENCODING:
            raise DecodingError(f"the message holds the array {number[:40]!r}, which is no payload of a round.")
        payloads[int(number)] = array.data
    return dict(fields), payloads


def field_of(fields: Fields, name: str, kind: type) -> Any:
    """Return one of a message's fields.

    Raises:
        DecodingError: If it is not there, or of another type.
    """
    value = fields.get(name)
    if type(value) is not kind:
        raise DecodingError(
            f"the message's field {name!r} is {str(value)[:80]!r}, and should be of type {kind.__name__}."
        )
    return value


def check_upload(
    data: bytes,
    expected: Mapping[str, Tensor],
    decode: Callable[[bytes], Mapping[str, Tensor]],
    limits: Mapping[str, tuple[int, ...]] | None = None,
    infinite: Collection[str] = (),
) -> dict[str, Tensor]:
    """Decode what a site sent, where the method sends anything, into tensors on the CPU.

    Args:
        data: The bytes; empty where the method sends nothing.
        expected: Tensors of the names, shapes and types that are expected; meta tensors will do.
        decode: Decodes the bytes.
        limits: `Algorithm.upload_limits`: the largest shapes of tensors whose shape is the site's choice.
        infinite: Names of tensors that may hold numbers that are not finite.

    Raises:
        DecodingError: If the bytes are larger than any such message could be, cannot be decoded, or hold tensors of
            other names, shapes or types, or numbers that are not finite.

    Example:
        >>> import torch
        >>> data = Dense().encode({"weight": torch.ones(2)})
        >>> check_upload(data, {"weight": torch.zeros(2)}, Dense().decode)
        {'weight': tensor([1., 1.])}
    """
    limits = limits or {}
    largest = {
        name: torch.empty(limits.get(name, like.shape), dtype=like.dtype, device="meta")
        for name, like in expected.items()
    }
    limit = _LARGEST_RATIO * Dense().nbytes(largest) + _HEADROOM
    if len(data) > limit:
        raise DecodingError(f"{len(data):,} bytes came, and what is expected here has at most {limit:,}.")
    if not expected:
        if data:
            raise DecodingError(f"{len(data):,} bytes came, and this method sends nothing.")
        return {}
    if not data:
        raise DecodingError("nothing came, and this method sends tensors.")
    tensors = decode(data)
    astray = sorted(tensors.keys() ^ expected.keys())
    if astray:
        what = "came and is not expected" if astray[0] in tensors else "is missing"
        raise DecodingError(f"the tensor {astray[0][:80]!r} {what}.")
    for name, like in largest.items():
        value = tensors[name]
        fits = value.shape == like.shape or (
            name in limits
            and value.ndim == like.ndim
            and all(size <= most for size, most in zip(value.shape, like.shape, strict=True))
        )
        if not fits or value.dtype != like.dtype:
            raise DecodingError(
                f"the tensor {name!r} came as {value.dtype} of shape {tuple(value.shape)}, and is expected as"
                f" {like.dtype} of shape {'at most ' if name in limits else ''}{tuple(like.shape)}."
            )
    bad = not_finite(tensors, infinite)
    if bad is not None:
        raise DecodingError(f"the tensor {bad!r} holds numbers that are not finite.")
    return {name: tensors[name] for name in expected}


def options_of(optimizers: Sequence[Optimizer]) -> str:
    """Return the optimizers' numbers, such as the learning rates of this round, as JSON."""

    def plain(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return all(map(plain, value))
        return value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value))

    def told(group: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in group.items() if name not in _NOT_TOLD and plain(value)}

    return json.dumps([[told(group) for group in optimizer.param_groups] for optimizer in optimizers])


def take_options(optimizers: Sequence[Optimizer], text: str) -> None:
    """Give the optimizers the numbers that `options_of` told.

    Raises:
        DecodingError: If they are of other optimizers.
    """
    try:
        told = json.loads(text)
        for optimizer, groups in zip(optimizers, told, strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                if not values.keys() <= group.keys() - set(_NOT_TOLD):
                    raise ValueError(f"there is no option {sorted(values.keys() - group.keys())}")
                group.update({name: tuple(value) if type(value) is list else value for name, value in values.items()})
    except (ValueError, TypeError, AttributeError) as error:
        raise DecodingError(f"the round's optimizer options are of other optimizers: {error}") from error


def signature(module: nn.Module, recipe: str) -> dict[str, Any]:
    """Return by what the server recognises a site that runs something else; ``module`` is not trained yet.

    These are hashes of the recipe and of names, types and shapes of all that is trained and frozen, and the norms of
    what is frozen, which no broadcast would set right.
    """
    trained = trained_tensors(module)
    layout = [[name, str(value.dtype), list(value.shape)] for name, value in sorted(module.state_dict().items())]
    frozen = [value for name, value in sorted(module.named_parameters()) if name not in trained]
    return {
        "recipe": hashlib.sha256(recipe.encode()).hexdigest(),
        "layout": hashlib.sha256(json.dumps([layout, sorted(trained)]).encode()).hexdigest(),
        "frozen": [float(value.detach().double().norm()) for value in frozen],
    }


def difference(mine: Mapping[str, Any], fields: Fields) -> str:
    """Return what differs between the server's `signature` and a site's, in words; an empty string if nothing does."""
    if fields.get("recipe") != mine["recipe"]:
        return "it runs another recipe"
    if fields.get("layout") != mine["layout"]:
        return "its module has tensors of other names, types or shapes"
    theirs = fields.get("frozen")
    if not isinstance(theirs, list) or len(theirs) != len(mine["frozen"]):
        return "it freezes other parameters"
    if not all(
        math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-6) for one, other in zip(theirs, mine["frozen"], strict=True)
    ):
        return "its frozen parameters have other values: were other pretrained weights loaded there?"
    return ""
