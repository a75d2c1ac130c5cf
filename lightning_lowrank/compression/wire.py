"""The file format of compressing codecs: a few flat parts of bytes, and a part that lists the tensors.

The file is a safetensors file. One entry for each tensor would cost some 85 bytes of header, more than a small
tensor's compressed numbers; here the names, types and shapes of all of them are one part, a line of JSON.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_EXACT = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATING + _EXACT}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MOST_DIMENSIONS = 64
# Enough for compressing codecs, whose header has an entry for each part of each codec, and none for tensors.
_LONGEST_HEADER = 4096
_OF_A_TENSOR = ("dtype", "shape", "data_offsets")


class DecodingError(ValueError):
    """The bytes are cut, changed, or written by a codec of other arguments."""


Entry = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Schema:
    """The names, types and shapes that decoded tensors must have.

    A decoder compares its schema with the names, types and shapes that the bytes claim before it allocates anything.

    Args:
        entries: Type and shape of each tensor.
        flexible: Names of tensors whose shape is the sender's choice: they have as many dimensions as their entry, and
            none that is larger.

    Example:
        >>> schema = Schema.of({"weight": torch.zeros(2, 3)})
        >>> schema.check({"bias": (torch.float32, (2,))})
        Traceback (most recent call last):
        lightning_lowrank.compression.wire.DecodingError: the tensor 'bias' was received but is not expected.
    """

    entries: dict[str, Entry]
    flexible: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], limits: Mapping[str, tuple[int, ...]] | None = None) -> Schema:
        """The schema of ``tensors``, which may be on the meta device.

        Args:
            tensors: The tensors.
            limits: The largest shapes of tensors whose shape is the sender's choice, by name; other names are ignored.
        """
        limits = {name: shape for name, shape in (limits or {}).items() if name in tensors}
        entries = {name: (value.dtype, tuple(limits.get(name, value.shape))) for name, value in tensors.items()}
        return cls(entries, frozenset(limits))

    @cached_property
    def largest(self) -> dict[str, Tensor]:
        """Meta tensors of the largest shapes that the schema allows."""
        return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in self.entries.items()}

    def part(self, keep: Callable[[str], bool]) -> Schema:
        """The schema of the tensors for whose names ``keep`` is true."""
        kept = {name: entry for name, entry in self.entries.items() if keep(name)}
        return Schema(kept, self.flexible & kept.keys())

    def check(self, claimed: Mapping[str, Entry]) -> None:
        """Compare names, types and shapes with those that are expected.

        Raises:
            DecodingError: If they differ.
        """
        for name in claimed:
            if name not in self.entries:
                raise DecodingError(f"the tensor {name[:80]!r} was received but is not expected.")
        for name, (dtype, shape) in self.entries.items():
            if name not in claimed:
                raise DecodingError(f"the tensor {name!r} is missing.")
            came, size = claimed[name]
            fits = size == shape or (
                name in self.flexible
                and len(size) == len(shape)
                and all(one <= most for one, most in zip(size, shape, strict=True))
            )
            if came != dtype or not fits:
                raise DecodingError(
                    f"the tensor {name!r} was received as {came} of shape {_shortened(size)}, but is expected as"
                    f" {dtype} of shape {'at most ' if name in self.flexible else ''}{shape}."
                )


@dataclass(frozen=True)
class Layout:
    """Types and shapes of a payload's tensors by name, in the order in which their numbers are encoded.

    Tensors of one type are grouped; otherwise the payload's order is kept.
    """

    entries: dict[str, Entry]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """The layout of ``tensors``, which may be on the meta device."""
        for name, tensor in tensors.items():
            if tensor.dtype not in _DTYPE_NAMES:
                raise TypeError(
                    f"tensor {name!r} is of type {tensor.dtype}, which has no encoding; the types that have one are "
                    f"{', '.join(_DTYPES)}."
                )
        return cls.grouped({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})

    @classmethod
    def grouped(cls, entries: Mapping[str, Entry]) -> Layout:
        """The layout of tensors with these types and shapes, grouped by type."""
        groups: dict[torch.dtype, dict[str, Entry]] = defaultdict(dict)
        for name, entry in entries.items():
            groups[entry[0]][name] = entry
        return cls({name: entry for group in groups.values() for name, entry in group.items()})

    @classmethod
    def parse(cls, text: bytes) -> Layout:
        """The layout from the JSON of `Layout.text`; anything else is a `DecodingError`."""
        try:
            groups = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DecodingError(f"the names and shapes of the tensors are not JSON: {error}") from error
        entries: dict[str, Entry] = {}
        for kind, group in _object(groups).items():
            if kind not in _DTYPES:
                raise DecodingError(f"the bytes name the unknown type {kind!r}; known are {', '.join(_DTYPES)}.")
            for name, shape in _object(group).items():
                if name in entries:
                    raise DecodingError(f"the bytes name the tensor {name!r} twice.")
                if not (isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)):
                    raise DecodingError(f"the shape of tensor {name!r} is {str(shape)[:80]}, not a list of sizes.")
                if len(shape) > _MOST_DIMENSIONS or math.prod(max(size, 1) for size in shape) >= 2**59:
                    raise DecodingError(f"the shape of tensor {name!r} is {_shortened(shape)}, larger than any tensor.")
                entries[name] = (_DTYPES[kind], tuple(shape))
        return cls(entries)

    @cached_property
    def text(self) -> bytes:
        """The layout as JSON: for each type, the tensors' names and shapes."""
        groups: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
        for name, (dtype, shape) in self.entries.items():
            groups[_DTYPE_NAMES[dtype]][name] = shape
        return json.dumps(groups, separators=(",", ":")).encode()

    @cached_property
    def floating(self) -> dict[str, Entry]:
        """Types and shapes of the floating-point tensors, which codecs compress."""
        return {name: entry for name, entry in self.entries.items() if entry[0] in FLOATING}

    @cached_property
    def exact(self) -> dict[str, Entry]:
        """Types and shapes of all other tensors, such as integers and booleans, which travel exactly."""
        return {name: entry for name, entry in self.entries.items() if entry[0] not in FLOATING}

    @cached_property
    def numbers(self) -> list[int]:
        """Number of elements of each floating-point tensor."""
        return [math.prod(shape) for _, shape in self.floating.values()]

    @cached_property
    def dtype(self) -> torch.dtype:
        """The smallest floating-point type that holds every floating-point tensor's numbers exactly."""
        dtypes = [dtype for dtype, _ in self.floating.values()]
        return reduce(torch.promote_types, dtypes) if dtypes else torch.float32

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """All floating-point tensors as one vector of type `dtype`."""
        return concatenate([tensors[name].reshape(-1) for name in self.floating], self.dtype)

    def parts(self, flat: Tensor) -> Iterator[tuple[str, Entry, Tensor]]:
        """Yield each floating-point tensor's name, its type and shape, and its part of `flatten`'s vector."""
        rows = flat.split(self.numbers) if self.numbers else ()
        for (name, entry), row in zip(self.floating.items(), rows, strict=True):
            yield name, entry, row

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Inverse of `flatten`: the floating-point tensors, each in memory of its own."""
        return {name: row.to(dtype, copy=True).reshape(shape) for name, (dtype, shape), row in self.parts(flat)}


def entry_bytes(entries: Mapping[str, Entry]) -> int:
    """Number of bytes that tensors of these types and shapes take."""
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in entries.values())


def _shortened(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})" if len(shape) < 9 else f"of {len(shape)} dimensions"


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DecodingError(f"the names and shapes of the tensors are {str(value)[:80]}, not a mapping.")
    return value


def write(layout: Layout, parts: Mapping[str, Tensor]) -> bytes:
    """The file with a layout and ``parts``, flat tensors of bytes; empty parts are left out."""
    filled = {name: part for name, part in parts.items() if part.numel()}
    return save({"layout": torch.frombuffer(bytearray(layout.text), dtype=torch.uint8), **filled})


def read(data: bytes, schema: Schema | None = None) -> tuple[Layout, dict[str, Tensor]]:
    """The layout and the parts of a file; a missing part is empty.

    With a schema, names, types and shapes are compared with it before anything of their size is allocated.
    """
    if schema is not None:
        longest = len(Layout.grouped(schema.entries).text)
        claimed = claimed_entries(data, _LONGEST_HEADER)
        for name, (dtype, shape, _) in claimed.items():
            if dtype != "U8" or len(shape) != 1 or (name == "layout" and shape[0] > longest):
                raise DecodingError(f"the part {name[:80]!r} of the bytes is {dtype[:80]!r} of shape {shape[:4]}.")
        if "layout" in claimed:
            # Checked before the other parts are read, and again below: a header may have two entries of one name.
            place = claimed["layout"][2]
            schema.check(Layout.parse(data[place.start : min(place.stop, place.start + longest)]).entries)
    parts: dict[str, Tensor] = defaultdict(lambda: torch.empty(0, dtype=torch.uint8))
    parts.update(load(data))
    for name, part in parts.items():
        if part.dtype != torch.uint8 or part.dim() != 1:
            raise DecodingError(f"the part {name!r} of the bytes is not one row of bytes.")
    layout = Layout.parse(parts.pop("layout").numpy().tobytes() if "layout" in parts else b"")
    if schema is not None:
        schema.check(layout.entries)
    return layout, parts


def claimed_entries(data: bytes, longest: int) -> dict[str, tuple[str, list[int], slice]]:
    """Each tensor's type (safetensors' name), shape and byte range by name, from a safetensors file's header.

    Args:
        data: The file.
        longest: The most bytes that the header may have.

    Raises:
        DecodingError: If the header is longer, cut, or not of the form that `save` writes.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 + length:
        raise DecodingError(f"the {len(data):,} bytes are no safetensors file: they are cut or changed.")
    if length > longest:
        raise DecodingError(f"the header has {length:,} bytes, and at most {longest:,} are expected.")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise DecodingError(f"the bytes are no safetensors file: {str(error)[:80]}") from error
    claimed: dict[str, tuple[str, list[int], slice]] = {}
    dtype: Any
    shape: Any
    place: Any
    for name, entry in _object(header).items():
        dtype, shape, place = map(entry.get, _OF_A_TENSOR) if isinstance(entry, dict) else (None, None, None)
        fits = isinstance(dtype, str) and isinstance(shape, list) and isinstance(place, list) and len(place) == 2
        if not fits or any(type(one) is not int or one < 0 for one in [*shape, *place]):
            raise DecodingError(f"the header's entry {name[:80]!r} is {str(entry)[:80]}, no tensor.")
        claimed[name] = dtype, shape, slice(8 + length + place[0], 8 + length + place[1])
    return claimed


def encoded_length(layout: Layout, lengths: Mapping[str, int]) -> int:
    """Length in bytes of the file that `write` makes of a layout and parts of these lengths."""
    lengths = {"layout": len(layout.text), **{name: length for name, length in lengths.items() if length}}
    return saved_length({name: (torch.uint8, (length,)) for name, length in lengths.items()})


def saved_length(entries: Mapping[str, Entry]) -> int:
    """Length in bytes of `save`'s file for tensors of these types and shapes, computed without tensors."""
    return _saved_length(tuple(entries.items()))


@lru_cache(maxsize=256)
def _saved_length(signature: tuple[tuple[str, Entry], ...]) -> int:
    entries = dict(signature)
    _check_names(entries)
    order = _types_in_order(frozenset(dtype for dtype, _ in entries.values()))
    header, start = {}, 0
    for name in sorted(entries, key=lambda name: (order[entries[name][0]], name)):
        dtype, shape = entries[name]
        end = start + math.prod(shape) * dtype.itemsize
        kind = order[dtype][1]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    # A safetensors file is the header's length in eight bytes, the header, padded to eight bytes, and the numbers.
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return 8 + -(-len(text) // 8) * 8 + start


@lru_cache(maxsize=256)
def _types_in_order(dtypes: frozenset[torch.dtype]) -> dict[torch.dtype, tuple[int, str]]:
    """Each type's place in the order in which safetensors stores tensors, and safetensors' name for the type."""
    data = save({str(dtype): torch.zeros(1, dtype=dtype) for dtype in dtypes})
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return {dtype: (header[str(dtype)]["data_offsets"][0], header[str(dtype)]["dtype"]) for dtype in dtypes}


def save(tensors: Mapping[str, Tensor]) -> bytes:
    """The safetensors file of ``tensors``, which may share memory."""
    own: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    _check_names(own)
    try:
        return safetensors.torch.save(own)
    except KeyError as error:
        raise TypeError(f"a tensor is of type {error}, which safetensors does not have; convert it.") from error


def _check_names(tensors: Mapping[str, Any]) -> None:
    if "__metadata__" in tensors:
        raise ValueError("a tensor is named '__metadata__', which safetensors keeps for itself; rename it.")


def load(data: bytes, schema: Schema | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file; anything else is a `DecodingError`.

    With a schema, the header is compared with it before anything else is read.
    """
    if schema is not None:
        # Apart from name and shape, a header's entry has some eighty characters; two file offsets take up to forty.
        names = sum(len(json.dumps(name)) + len(str(shape)) + 120 for name, (_, shape) in schema.entries.items())
        claimed = claimed_entries(data, 64 + names)
        words = _saved_dtypes()
        unknown = sorted({word for word, _, _ in claimed.values()} - words.keys())
        if unknown:
            raise DecodingError(f"the bytes name the unknown type {unknown[0][:80]!r}.")
        schema.check({name: (words[word], tuple(shape)) for name, (word, shape, _) in claimed.items()})
    try:
        tensors = safetensors.torch.load(data)
    except Exception as error:  # its parser raises whatever it stumbles over, KeyError and TypeError among them
        raise DecodingError(f"the {len(data):,} bytes are no safetensors file that can be read: {error}") from error
    if schema is not None:
        # A header may have two entries of one name that differ.
        schema.check({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        _check_booleans(name, tensor)
    return tensors


@lru_cache
def _saved_dtypes() -> dict[str, torch.dtype]:
    """The types that `save` supports, by safetensors' names for them."""
    words = {}
    for dtype in _DTYPES.values():
        # safetensors has no complex128.
        with suppress(TypeError):
            data = save({"one": torch.empty(0, dtype=dtype)})
            words[claimed_entries(data, _LONGEST_HEADER)["one"][0]] = dtype
    return words


def join(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all tensors, one after another."""
    rows = [tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8) for tensor in tensors]
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8)


def concatenate(rows: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Concatenate flat tensors, converted to ``dtype``, on the device of the first."""
    return torch.cat([row.to(rows[0].device, dtype) for row in rows]) if rows else torch.empty(0, dtype=dtype)


def split(data: Tensor, entries: Mapping[str, Entry]) -> dict[str, Tensor]:
    """Inverse of `join`: tensors of these types and shapes, from ``data`` of the right length."""
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in entries.values()]
    tensors = {}
    for (name, (dtype, shape)), row in zip(entries.items(), data.split(sizes) if sizes else (), strict=True):
        tensors[name] = row.clone().view(dtype).reshape(shape)
        _check_booleans(name, tensors[name])
    return tensors


def _check_booleans(name: str, tensor: Tensor) -> None:
    if tensor.dtype == torch.bool and (tensor.view(torch.uint8) > 1).any():
        raise DecodingError(f"tensor {name!r} is of booleans, but has a byte that is neither 0 nor 1.")


def pack_bits(bits: Tensor) -> Tensor:
    """A flat boolean tensor as bytes, eight booleans in each, the first in the lowest bit."""
    return torch.from_numpy(np.packbits(bits.cpu().numpy(), bitorder="little"))


def unpack_bits(data: Tensor, count: int) -> Tensor:
    """Inverse of `pack_bits`: the first ``count`` booleans."""
    return torch.from_numpy(np.unpackbits(data.numpy(), count=count, bitorder="little")).bool()


def packed_length(count: int) -> int:
    """Number of bytes that ``count`` bits take."""
    return -(-count // 8)
