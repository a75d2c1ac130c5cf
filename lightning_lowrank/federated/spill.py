"""What clients keep between rounds, on disk: nested dictionaries of tensors and plain Python as one safetensors file.

`Clients` uses it for those that have not been at work for longest, when all that clients keep exceeds a limit.
`take_apart` and `put_together` also serve `client_parallel`, which sends such dictionaries from process to process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

__all__ = ["load", "put_together", "save", "size", "take_apart"]


def size(value: Any) -> int:
    """Return the bytes of all tensors in nested dictionaries, lists and tuples.

    Example:
        >>> size({"a": torch.zeros(3), "b": [torch.zeros(2, dtype=torch.int64), 5]})
        28
    """
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(map(size, value.values()))
    return sum(map(size, value)) if isinstance(value, (list, tuple)) else 0


def take_apart(value: Any) -> tuple[list[Any], list[Tensor]]:
    """Describe nested dictionaries, lists and tuples in plain lists, with their tensors apart.

    Returns:
        The description, which JSON can hold as well, and the tensors in the order in which it numbers them.

    Raises:
        TypeError: If there is anything in ``value`` but dictionaries, lists, tuples, tensors and plain Python.

    Example:
        >>> take_apart({"a": torch.zeros(1), "b": 5})
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
        raise TypeError(f"{part!r} of type {type(part).__name__} is kept; only tensors and plain Python may be.")

    return described(value), tensors


def put_together(description: list[Any], tensors: Sequence[Tensor]) -> Any:
    """Return what `take_apart` was given, with these tensors."""
    kind, content = description
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {put_together(key, tensors): put_together(entry, tensors) for key, entry in content}
    if kind in ("list", "tuple"):
        entries = [put_together(entry, tensors) for entry in content]
        return entries if kind == "list" else tuple(entries)
    return content


def save(value: Mapping[str, Any], path: Path) -> None:
    """Write ``value`` to ``path``, by way of a second file, so that a write that fails leaves the first one whole.

    Raises:
        TypeError: If there is anything in it but dictionaries, lists, tuples, tensors and plain Python.
    """
    description, tensors = take_apart(value)
    metadata = {"structure": json.dumps(description), "devices": json.dumps([str(each.device) for each in tensors])}
    stored = {str(number): each.cpu().contiguous().clone() for number, each in enumerate(tensors)}
    unfinished = path.with_suffix(".part")
    safetensors.torch.save_file(stored, unfinished, metadata=metadata)
    unfinished.replace(path)


def load(path: Path) -> dict[str, Any]:
    """Return what `save` wrote, the tensors on the devices that they were on."""
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        devices = json.loads(metadata["devices"])
        tensors = [file.get_tensor(str(number)).to(torch.device(name)) for number, name in enumerate(devices)]
    return put_together(json.loads(metadata["structure"]), tensors)
