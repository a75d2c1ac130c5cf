"""Turns single engines of the loop off, so that `experiments.py` can measure what each is worth.

A contender ``default-log`` is this library one client after another without the engine ``log``. Where a turn is a
client, there are no ``steps``, ``log`` and ``evaluation`` to turn off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning_lowrank.federated import local, loop
from lightning_lowrank.federated.data.blocks import BlockReader
from lightning_lowrank.federated.data.whole_batches import WholeBatches
from lightning_lowrank.internals import direct_steps


class _Nothing:
    """Stands in for an engine that replaces parts of Lightning, and replaces none."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def restore(self) -> None:
        pass


def _one_by_one(self: BlockReader, requests: Iterable[Any]) -> Iterator[Any]:
    return map(self._read, requests)


def _without(name: str) -> Callable[[], None]:
    return lambda: setattr(loop, name, _Nothing)


def _torchs_own() -> None:
    for part in (direct_steps, local):
        part.run_backward = lambda loss: loss.backward()  # type: ignore[attr-defined]
        part.bare_step = lambda optimizer: optimizer.step  # type: ignore[attr-defined]
        part.drop_gradients = lambda optimizer: optimizer.zero_grad()  # type: ignore[attr-defined]


ENGINES: dict[str, Callable[[], None]] = {
    "steps": _without("DirectSteps"),
    "log": _without("DirectLog"),
    "evaluation": _without("DirectEvaluation"),
    "kept": lambda: setattr(WholeBatches, "begin", lambda self, loader: lambda: None),
    "blocks": lambda: setattr(BlockReader, "__call__", _one_by_one),
    "torch": _torchs_own,
}
"""What is turned off, by name: direct steps, log and evaluation; kept batches; blocks; bare kernels."""
