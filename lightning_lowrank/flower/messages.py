"""Messages between the server and a site, as Flower's records.

Payloads are bytes of this package's codecs in an ``ArrayRecord``, one array for each round; all other fields are plain
numbers and strings in a ``ConfigRecord``. Nothing is pickled. A site's answer is compared with the message that the
method's own `Algorithm.end` would send before anything of its size is allocated, and before anything else reads it.
Any fault in it is a `DecodingError`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_lowrank.compression import DecodingError, Schema
from lightning_lowrank.federated.failures import describe_error, first_non_finite
from lightning_lowrank.federated.state import trained_tensors
from lightning_lowrank.internals.torch import named_tensors

JOIN = "query.join"
TRAIN = "train.round"
LISTEN = "query.listen"

_ENCODING = "lightning_lowrank"
_FIELDS = "fields"
_PAYLOADS = "payloads"
# Not sent: parameters, and options of projected optimizers that server and sites set for themselves.
_NOT_SENT = ("params", "stacked", "seed", "subspaces", "refresh_number", "steps_since_refresh")
_KINDS = {"int": int, "str": str}
_MOST_CLIENTS = 2**20
_LONGEST_TEXT = 64
_NO_NUMBER = object()

Fields = Mapping[str, Any]


def pack(fields: Fields, payloads: Mapping[int, bytes] | None = None) -> RecordDict:
    """The content of a message: numbers, strings, booleans or lists of them, and encoded payloads by round."""
    records: dict[str, Any] = {_FIELDS: ConfigRecord(dict(fields))}
    if payloads:
        arrays = {
            str(number): Array(dtype="uint8", shape=(len(data),), stype=_ENCODING, data=data)
            for number, data in payloads.items()
        }
        records[_PAYLOADS] = ArrayRecord(arrays)
    return RecordDict(records)


def unpack(message: Message) -> tuple[dict[str, Any], dict[int, bytes]]:
    """A message's fields, and its encoded payloads by round.

    Raises:
        DecodingError: If the message does not have the form of `pack`.
    """
    content = message.content
    fields = content.config_records.get(_FIELDS)
    if fields is None:
        raise DecodingError("the message has no fields.")
    payloads: dict[int, bytes] = {}
    for number, array in (content.array_records.get(_PAYLOADS) or {}).items():
        known = number.isascii() and number.isdigit() and len(number) < 10 and int(number) not in payloads
        if not known or array.stype != _ENCODING or not isinstance(array.data, bytes):
            raise DecodingError(f"the message holds the array {number[:40]!r}, which is no payload of a round.")
        payloads[int(number)] = array.data
    return dict(fields), payloads


def field_of(fields: Fields, name: str, kind: type) -> Any:
    """One of a message's fields.

    Raises:
        DecodingError: If the field is missing, or of another type.
    """
    value = fields.get(name)
    if type(value) is not kind:
        raise DecodingError(
            f"the message's field {name!r} is {str(value)[:80]!r}, and should be of type {kind.__name__}."
        )
    return value


def read_upload(
    data: bytes,
    schema: Schema,
    decode: Callable[[bytes, Schema], Mapping[str, Tensor]],
    infinite: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Decode a site's answer into tensors on the CPU.

    Args:
        data: The bytes; empty if the method sends nothing.
        schema: Names, types and shapes of the tensors.
        decode: Decodes the bytes, such as a codec's ``decode``.
        infinite: ``allowed`` of `first_non_finite`.

    Raises:
        DecodingError: If the bytes cannot be decoded, whatever ``decode`` raises, or hold other tensors, or numbers
            that are not finite.

    Example:
        >>> import torch
        >>> from lightning_lowrank.compression import Dense
        >>> data = Dense().encode({"weight": torch.ones(2)})
        >>> read_upload(data, Schema.of({"weight": torch.zeros(2)}), Dense().decode)
        {'weight': tensor([1., 1.])}
    """
    try:
        tensors = decode(data, schema)
    except DecodingError:
        raise
    except Exception as error:  # whatever the site sent, it is the site's fault alone
        raise DecodingError(f"it cannot be decoded: {describe_error(error)}") from error
    # A user's own codec may ignore the schema.
    schema.check({name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()})
    bad = first_non_finite(tensors, infinite)
    if bad is not None:
        raise DecodingError(f"the tensor {bad!r} holds numbers that are not finite.")
    return {name: tensors[name] for name in schema.entries}


@dataclass(frozen=True)
class JoinAnswer:
    """A site's answer to ``query.join``, checked for types and ranges.

    Args:
        client: Number of its client, from 0.
        clients: Number of clients of the federation.
        samples: Number of its training samples.
        batches: Number of steps that it makes in a round.
        last_broadcast: The last round whose broadcast it has, -1 before the first.
        rank: The rank that it states for its client, 0 if it states none.
        secret: A secret that no other site has; the site keeps it from its first start on.
        classes: See `numbering`.
        features: See `numbering`.
    """

    client: int
    clients: int
    samples: int
    batches: int
    last_broadcast: int
    rank: int
    secret: str
    classes: str
    features: str

    @classmethod
    def of(cls, fields: Fields) -> JoinAnswer:
        """Read the answer from the message's fields.

        Raises:
            DecodingError: If a field is missing, of another type or out of range.
        """
        answer = cls(
            **{each.name: field_of(fields, each.name, _KINDS[str(each.type)]) for each in dataclass_fields(cls)}
        )
        if not 0 <= answer.client < answer.clients <= _MOST_CLIENTS:
            raise DecodingError(f"it is client {answer.client} of {answer.clients}, and clients are numbered from 0.")
        counts = answer.samples, answer.batches, answer.rank
        if answer.last_broadcast < -1 or min(counts) < 0 or (answer.batches and not answer.samples):
            raise DecodingError(
                f"it states {answer.samples} samples, {answer.batches} batches, rank {answer.rank} and round"
                f" {answer.last_broadcast}, which is impossible."
            )
        for name in ("secret", "classes", "features"):
            length = len(getattr(answer, name))
            if length > _LONGEST_TEXT:
                raise DecodingError(f"its {name!r} has {length:,} letters.")
        return answer


def printable(text: str, longest: int = 300) -> str:
    """A site's text as one printable line of bounded length, safe for a log or terminal."""
    line = "".join(letter if letter.isprintable() else " " for letter in text[: longest + 1])
    return line if len(text) <= longest else f"{line[:longest]} ..."


def options_of(optimizers: Sequence[Optimizer]) -> str:
    """The optimizers' numeric options, such as the learning rates of this round, as JSON.

    Raises:
        MisconfigurationException: If an option is a tensor or array of several numbers, or complex.
    """

    def sent(group: Mapping[str, Any]) -> dict[str, Any]:
        numbers = {name: _number(name, value) for name, value in group.items() if name not in _NOT_SENT}
        return {name: value for name, value in numbers.items() if value is not _NO_NUMBER}

    return json.dumps([[sent(group) for group in optimizer.param_groups] for optimizer in optimizers])


def _number(name: str, value: Any) -> Any:
    """An option as JSON has it: a number, ``None``, or a list of them; otherwise `_NO_NUMBER`."""
    if isinstance(value, (list, tuple)):
        values = [_number(name, each) for each in value]
        return _NO_NUMBER if _NO_NUMBER in values else values
    if (isinstance(value, (Tensor, np.ndarray)) and math.prod(value.shape) == 1) or isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (Tensor, np.ndarray, np.number, complex)):
        raise MisconfigurationException(
            f"the optimizer's option {name}={value!r} cannot be sent to sites, which take it from the server in each"
            " round: make it a real number or a tuple of them."
        )
    return value if value is None or isinstance(value, (bool, int, float)) else _NO_NUMBER


def apply_options(optimizers: Sequence[Optimizer], text: str) -> None:
    """Set the optimizers' options from the JSON of `options_of`; options that are tensors stay the same tensors.

    Raises:
        DecodingError: If the options are of other optimizers.
    """
    filled: dict[int, float] = {}

    def option(old: Any, value: Any) -> Any:
        if isinstance(value, list):
            olds = old if isinstance(old, (list, tuple)) and len(old) == len(value) else [None] * len(value)
            return tuple(map(option, olds, value))
        if not isinstance(old, Tensor) or value is None:
            return value
        if filled.setdefault(id(old), value) != value:
            # Groups begin with one tensor, and the server has since given them several values.
            return torch.full_like(old, value)
        old.detach().fill_(value)
        return old

    try:
        received = json.loads(text)
        for optimizer, groups in zip(optimizers, received, strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                if not values.keys() <= group.keys() - set(_NOT_SENT):
                    raise ValueError(f"there is no option {sorted(values.keys() - group.keys())}")
                group.update({name: option(group[name], value) for name, value in values.items()})
    except (ValueError, TypeError, AttributeError) as error:
        raise DecodingError(f"the round's optimizer options are of other optimizers: {error}") from error


def signature(module: nn.Module, recipe: bytes) -> dict[str, Any]:
    """Hashes and norms by which the server detects a site with another recipe or module; ``module`` is untrained.

    The hashes are of the recipe and of all tensors' names, types and shapes. The norms are of the frozen parameters,
    which no broadcast would correct.
    """
    trained = trained_tensors(module)
    layout = [[name, str(value.dtype), list(value.shape)] for name, value in sorted(named_tensors(module))]
    frozen = [value for name, value in sorted(module.named_parameters()) if name not in trained]
    return {
        "recipe": hashlib.sha256(recipe).hexdigest(),
        "layout": hashlib.sha256(json.dumps([layout, sorted(trained)]).encode()).hexdigest(),
        "frozen": [float(value.detach().double().norm()) for value in frozen],
    }


_NUMBERED = {"classes": "classes", "features": "feature_names"}
NUMBERED_OTHERWISE = {
    "classes": "the classes have other names or another order, by which they are numbered: let the recipe list the"
    " names in the order of their numbers (classes= of ImageFolder and ClientTable, labels= of TextClassification), or"
    " give the labels as numbers",
    "features": "the columns of inputs have other names or another order: let the recipe list them (features= of"
    " ClientTable)",
}
"""What `numbering` finds to be different, in words, by its key."""


def numbering(*sources: Any) -> dict[str, str]:
    """Digests of what data with names number: the classes, and the columns of inputs. Empty where there are no names.

    A model trained on sites that number them differently is wrong, and nothing else shows it.

    Args:
        sources: Objects that may have lists of names in the attributes ``classes`` and ``feature_names``, such as a
            datamodule and a dataset of torchvision. The first list counts.

    Example:
        >>> from types import SimpleNamespace
        >>> one, other = (numbering(SimpleNamespace(classes=names)) for names in (["cat", "dog"], ["dog"]))
        >>> one["classes"] == other["classes"], one["features"]
        (False, '')
    """
    found = {}
    for key, attribute in _NUMBERED.items():
        lists = [held for each in sources if isinstance(held := getattr(each, attribute, None), (list, tuple)) and held]
        names = list(map(str, lists[0])) if lists else []
        found[key] = hashlib.sha256(json.dumps(names).encode()).hexdigest() if names else ""
    return found


def difference(mine: Mapping[str, Any], fields: Fields) -> str:
    """The difference between the server's `signature` and a site's, in words; empty if there is none.

    A server that reads data also has its `numbering`.
    """
    if fields.get("recipe") != mine["recipe"]:
        return "it runs another recipe"
    if fields.get("layout") != mine["layout"]:
        return "its module has tensors of other names, types or shapes"
    theirs = fields.get("frozen")
    if (
        not isinstance(theirs, list)
        or len(theirs) != len(mine["frozen"])
        or any(type(one) is not float for one in theirs)
    ):
        return "it freezes other parameters"
    if not all(
        math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-6) for one, other in zip(theirs, mine["frozen"], strict=True)
    ):
        return "its frozen parameters have other values: were other pretrained weights loaded there?"
    other = [text for key, text in NUMBERED_OTHERWISE.items() if mine.get(key) and fields.get(key) != mine[key]]
    return f"its data and the server's differ: {other[0]}" if other else ""
