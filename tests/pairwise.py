"""Covering sets of test cases, where the full grid would guard the same thing many times."""

import itertools
from collections.abc import Iterable
from typing import Any


def pairwise(*values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return few rows in which any two values of different lists occur together.

    The rows are chosen greedily and are the same on every run. Two lists give their full product.

    Args:
        values: One list of values for each parameter of the test.

    Returns:
        Rows with one value of each list, in the order of the lists.

    Example:
        >>> pairwise("ab", [1, 2], [False, True])
        [('a', 1, False), ('a', 2, True), ('b', 1, True), ('b', 2, False)]
    """
    lists = [list(each) for each in values]
    pairs = list(itertools.combinations(range(len(lists)), 2))
    missing = {((a, i), (b, j)): None for a, b in pairs for i in range(len(lists[a])) for j in range(len(lists[b]))}
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for column in sorted(set(range(len(lists))) - set(row)):
            row[column] = max(
                range(len(lists[column])), key=lambda i, c=column: len(missing.keys() & _pairs(row, c, i))
            )
        for column, i in row.items():
            for pair in _pairs(row, column, i):
                missing.pop(pair, None)
        rows.append([row[column] for column in range(len(lists))])
    return [tuple(each[i] for each, i in zip(lists, row, strict=True)) for row in sorted(rows)]


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


def _pairs(row: dict[int, int], column: int, i: int) -> set[tuple[tuple[int, int], ...]]:
    """Return the pairs that value `i` of `column` makes with the values of the row's other columns."""
    return {tuple(sorted([(column, i), (other, j)])) for other, j in row.items() if other != column}
