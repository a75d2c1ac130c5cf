"""The states that clients keep between rounds, in memory or on disk.

A state is a nested dictionary of tensors and plain Python. `ClientStates` holds those of a simulation's clients and
writes the least recently used ones to disk when all of them exceed a limit. A real site keeps its own with `save` and
`load`. `flatten_state` and `unflatten_state` also serve processes that send states to each other.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from lightning_lowrank.federated.safe_files import claim, delete_stale_files, owner_mark
from lightning_lowrank.federated.state import State

_FOLDER = "lightning_lowrank_clients_"


def size(value: Any) -> int:
    """The total bytes of all tensors in nested dictionaries, lists and tuples.

    Example:
        >>> size({"a": torch.zeros(3), "b": [torch.zeros(2, dtype=torch.int64), 5]})
        28
    """
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(map(size, value.values()))
    return sum(map(size, value)) if isinstance(value, (list, tuple)) else 0


def flatten_state(value: Any) -> tuple[list[Any], list[Tensor]]:
    """Separate nested dictionaries, lists and tuples into a plain description and a list of tensors.

    Returns:
        The description, which JSON can hold as well, and the tensors in the order in which it numbers them.

    Raises:
        TypeError: If there is anything in ``value`` but dictionaries, lists, tuples, tensors and plain Python.

    Example:
        >>> flatten_state({"a": torch.zeros(1), "b": 5})
        (['dict', [[['plain', 'a'], ['tensor', 0]], [['plain', 'b'], ['plain', 5]]]], [tensor([0.])])
    """
    tensors: list[Tensor] = []

    def described(part: Any) -> list[Any]:
        if isinstance(part, Tensor):
            tensors.append(part.detach())
            return ["tensor", len(tensors) - 1]
        if isinstance(part, Mapping):
            return ["dict", [[described(key), described(entry)] for key, entry in part.items()]]
        if isinstance(part, (list, tuple)):
            return ["list" if isinstance(part, list) else "tuple", [described(entry) for entry in part]]
        if part is None or isinstance(part, (bool, int, float, str)):
            return ["plain", part]
        raise TypeError(
            f"{part!r} of type {type(part).__name__} cannot be kept in a state: only tensors and plain Python can."
        )

    return described(value), tensors


def unflatten_state(description: list[Any], tensors: Sequence[Tensor]) -> Any:
    """The nested value that `flatten_state` described, with the ``tensors`` put back into it."""
    kind, content = description
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {unflatten_state(key, tensors): unflatten_state(entry, tensors) for key, entry in content}
    if kind in ("list", "tuple"):
        entries = [unflatten_state(entry, tensors) for entry in content]
        return entries if kind == "list" else tuple(entries)
    return content


def save(value: Mapping[str, Any], path: Path, part: Path | None = None) -> None:
    """Write ``value`` to ``path`` by way of a temporary file, so that a failed write leaves the previous file intact.

    Args:
        value: Nested dictionaries, lists and tuples of tensors and plain Python.
        path: The file.
        part: The second file, in the same folder. Default: ``path`` with the suffix ``.part``.
    """
    description, tensors = flatten_state(value)
    metadata = {"structure": json.dumps(description), "devices": json.dumps([str(each.device) for each in tensors])}
    stored = {str(number): each.cpu().contiguous().clone() for number, each in enumerate(tensors)}
    unfinished = path.with_suffix(".part") if part is None else part
    # save_file() would write to a temporary file of random name, which a killed process leaves behind.
    unfinished.write_bytes(safetensors.torch.save(stored, metadata=metadata))
    unfinished.replace(path)


def load(path: Path) -> dict[str, Any]:
    """The value that `save` wrote, with tensors on their previous devices."""
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        devices = json.loads(metadata["devices"])
        tensors = [file.get_tensor(str(number)).to(torch.device(name)) for number, name in enumerate(devices)]
    return unflatten_state(json.loads(metadata["structure"]), tensors)


class ClientStates:
    """The states of a simulation's clients between rounds; an empty state takes no memory.

    Args:
        states: The clients' states, by id.
        limit: Bytes of tensors that clients may keep in memory between rounds. Beyond it, states go to a temporary
            folder, the least recently used first. ``None``: no limit. The folder's name has host and process, and the
            folder is deleted with the object; folders of killed processes are deleted when an object is made.
    """

    def __init__(self, states: Mapping[int, State] | None = None, limit: int | None = None) -> None:
        self._limit = limit
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        delete_stale_files(
            (each, each.name.removeprefix(_FOLDER).rpartition("~")[0])
            for each in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*~*")
        )
        self._on_disk: set[int] = set()
        # Ordered by last use, the least recent first.
        self._present: dict[int, State] = dict(states or {})

    def __getitem__(self, client: int) -> State:
        state = self._present.pop(client, None)
        if state is None:
            state = load(self._path(client)) if client in self._on_disk else {}
            self._on_disk.discard(client)
        self._present[client] = state
        return state

    def __setitem__(self, client: int, state: State) -> None:
        self._present.pop(client, None)
        self._on_disk.discard(client)
        self._present[client] = state

    def _path(self, client: int) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix=f"{_FOLDER}{owner_mark()}~")
            claim(Path(self._folder.name))
        return Path(self._folder.name) / f"client_{client}.safetensors"

    def items(self) -> Iterator[tuple[int, State]]:
        """Iterate over clients with a state, by ascending id; states on disk stay on disk."""
        for client in sorted(self._present.keys() | self._on_disk):
            if client in self._on_disk:
                yield client, load(self._path(client))
            elif self._present[client]:
                yield client, self._present[client]

    def offload(self) -> None:
        """Drop empty states, and write to disk the states beyond the memory limit."""
        self._present = {client: state for client, state in self._present.items() if state}
        if self._limit is None:
            return
        sizes = {client: size(state) for client, state in self._present.items()}
        total = sum(sizes.values())
        for client, nbytes in sizes.items():
            if total <= self._limit:
                break
            # A full disk leaves the state in memory.
            save(self._present[client], self._path(client))
            del self._present[client]
            self._on_disk.add(client)
            total -= nbytes
