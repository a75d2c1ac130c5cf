"""Covering sets of test cases, where the full grid would guard the same thing many times.

Most faults need one value or two together, not one of each axis. :func:`all_pairs` and :func:`in_turn` return the cases
of a test; :func:`pairwise`, :func:`each_of` and :func:`nightly_except` mark the cases that are not needed as nightly,
so that the full grid is still run before a release. :func:`daily` marks cases as slow, which a change's check still
runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def covering(sizes: Sequence[int], strength: int = 2) -> list[tuple[int, ...]]:
    """Return rows of a grid in which every combination of values of so many axes occurs.

    Rows are chosen greedily and in order, so that the same grid has the same rows.

    Args:
        sizes: Number of values of each axis.
        strength: 2 for all pairs, 1 for each value.

    Example:
        >>> covering([2, 2, 2])
        [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)]
        >>> covering([2, 3], strength=1)
        [(0, 0), (1, 1), (0, 2)]
    """
    chosen_axes = list(itertools.combinations(range(len(sizes)), min(strength, len(sizes))))
    met = {
        row: {(axes, tuple(row[axis] for axis in axes)) for axes in chosen_axes}
        for row in itertools.product(*map(range, sizes))
    }
    missing, rows = set().union(*met.values()), []
    while missing:
        rows.append(max(met, key=lambda row: len(met[row] & missing)))
        missing -= met[rows[-1]]
    return rows


def all_pairs(*values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return few rows in which any two values of different lists occur together.

    Two lists give their full product.

    Args:
        values: One list of values for each parameter of the test.

    Returns:
        Rows with one value of each list, in the order of the lists.

    Example:
        >>> all_pairs("ab", [1, 2], [False, True])
        [('a', 1, False), ('a', 2, True), ('b', 1, True), ('b', 2, False)]
    """
    lists = [list(each) for each in values]
    rows = sorted(covering([len(each) for each in lists]))
    return [tuple(each[i] for each, i in zip(lists, row, strict=True)) for row in rows]


def in_turn(*values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return as many rows as the longest list has values; each value of each list occurs.

    The shorter lists start over. A list whose length is a multiple of another's would always meet the same value of it,
    so each pass through the shorter list starts one value later.

    Args:
        values: One list of values for each parameter of the test.

    Returns:
        Rows with one value of each list, in the order of the lists.

    Example:
        >>> in_turn("abcd", [1, 2])
        [('a', 1), ('b', 2), ('c', 2), ('d', 1)]
    """
    lists = [list(each) for each in values]
    count = max(map(len, lists))
    return [tuple(each[(i + i // len(each)) % len(each)] for each in lists) for i in range(count)]


def pairwise(strength: int = 2) -> Callable[[Any], Any]:
    """Mark those cases of a test as nightly that are not needed to meet each pair of its parameters' values.

    It stands above the ``parametrize`` decorators, each of which is an axis. With ``strength=1``, for two axes that
    have little to do with each other, each value is met once.
    """

    def decorate(test: Any) -> Any:
        rows = _rows(test)
        often = set(covering([1 + max(axis) for axis in zip(*rows, strict=True)], strength))
        return _parametrize(test, rows, often, pytest.mark.nightly)

    return decorate


def daily(*ids: str) -> Callable[[Any], Any]:
    """Mark the cases of a test as slow but for those with these ids.

    It stands above the ``parametrize`` decorators. Without ids, the first case is the one that is not slow.
    """
    return lambda test: _but_for(ids, test, pytest.mark.slow)


def nightly_except(*ids: str) -> Callable[[Any], Any]:
    """Mark the cases of a test as nightly but for those with these ids, or the first one. See :func:`daily`."""
    return lambda test: _but_for(ids, test, pytest.mark.nightly)


def each_of(step: int) -> Callable[[Any], Any]:
    """Mark the cases of a test as nightly but for the first one and each that comes ``step`` cases later.

    It stands above the ``parametrize`` decorators. A step that has no divisor in common with the lengths of the axes
    meets each of their values.
    """

    def decorate(test: Any) -> Any:
        rows = _rows(test)
        return _parametrize(test, rows, set(list(rows)[::step]), pytest.mark.nightly)

    return decorate


def _but_for(ids: Sequence[str], test: Any, mark: pytest.MarkDecorator) -> Any:
    rows = _rows(test)
    numbers = {_id(parts): row for row, parts in reversed(rows.items())}
    return _parametrize(test, rows, {numbers[each] for each in ids} if ids else {next(iter(rows))}, mark)


def _rows(test: Any) -> dict[tuple[int, ...], list[_Value]]:
    """Return what each case of a test's ``parametrize`` decorators takes of them, by its place on each axis."""
    axes = []
    for mark in test.pytestmark:
        if mark.name == "parametrize":
            width, ids = len(_names(mark.args[0])), mark.kwargs.get("ids")
            axes.append([_Value(entry, number, ids, width) for number, entry in enumerate(mark.args[1])])
    return {
        row: [axis[number] for axis, number in zip(axes, row, strict=True)]
        for row in itertools.product(*(range(len(axis)) for axis in axes))
    }


def _parametrize(
    test: Any, rows: dict[tuple[int, ...], list[_Value]], often: set[tuple[int, ...]], mark: pytest.MarkDecorator
) -> Any:
    """Give a test these rows in place of its ``parametrize`` decorators; those that are not run often are marked."""
    names = [name for each in test.pytestmark if each.name == "parametrize" for name in _names(each.args[0])]
    cases = [
        pytest.param(
            *(value for part in parts for value in part.values),
            id=_id(parts),
            marks=[*([] if row in often else [mark]), *(own for part in parts for own in part.marks)],
        )
        for row, parts in rows.items()
    ]
    test.pytestmark = [each for each in test.pytestmark if each.name != "parametrize"]
    return pytest.mark.parametrize(names, cases)(test)


def _id(parts: list[_Value]) -> str:
    return "-".join(part.id for part in parts)


def _names(given: str | Sequence[str]) -> list[str]:
    return [name.strip() for name in (given.split(",") if isinstance(given, str) else given)]


class _Value:
    """One entry of a ``parametrize`` decorator: its values, marks and id."""

    def __init__(self, entry: Any, number: int, given: Any, width: int) -> None:
        own = None
        if all(hasattr(entry, name) for name in ("values", "marks", "id")):
            self.values, self.marks, own = tuple(entry.values), list(entry.marks), entry.id
        else:
            self.values, self.marks = (tuple(entry) if width > 1 else (entry,)), []
        if own is None and given is not None and not callable(given):
            own = list(given)[number]
        made = [(given(value) if callable(given) else None) or _label(value, number) for value in self.values]
        self.id = "-".join(map(str, made)) if own is None else str(own)


def _label(value: Any, number: int) -> str:
    if isinstance(value, (str, int, float, bool)) or value is None:
        return str(value)
    return getattr(value, "__name__", None) or f"case{number}"
