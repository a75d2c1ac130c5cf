"""The names of tensors that a module holds under several, such as an output layer tied to an embedding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn


def aliases(module: nn.Module) -> dict[str, list[str]]:
    """Return the further names of each parameter and buffer that has several, by the first.

    The first name is the one that ``named_parameters()`` and ``named_buffers()`` give.
    """
    found: dict[str, list[str]] = {}
    for named in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        firsts: dict[Tensor, str] = {}
        for name, value in named:
            first = firsts.setdefault(value, name)
            if first != name:
                found.setdefault(first, []).append(name)
    return found


def under_all_names(values: Mapping[str, Tensor], aliases: Mapping[str, Iterable[str]]) -> dict[str, Tensor]:
    """Return values by first names under every name, given the further ones by the first."""
    return {each: value for name, value in values.items() for each in (name, *aliases.get(name, ()))}
