"""Turns single engines of the loop off, so that `experiments.py` can measure what each is worth.

A contender ``default-kept`` is this library one client after another without the engine ``kept``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning_lowrank.federated import local
from lightning_lowrank.federated.data.blocks import BlockReader
from lightning_lowrank.federated.data.whole_batches import WholeBatches


def _one_by_one(self: BlockReader, requests: Iterable[Any]) -> Iterator[Any]:
    return map(self._read, requests)


def _torchs_own() -> None:
    local.run_backward = lambda loss: loss.backward()
    local.bare_step = lambda optimizer: optimizer.step
    local.drop_gradients = lambda optimizer: optimizer.zero_grad()


ENGINES: dict[str, Callable[[], None]] = {
    "steps": lambda: setattr(local.LocalTraining, "_is_plain", lambda self: False),
    "kept": lambda: setattr(WholeBatches, "begin", lambda self, loader: lambda: None),
    "blocks": lambda: setattr(BlockReader, "__call__", _one_by_one),
    "torch": _torchs_own,
}
"""What is turned off, by name: plain steps, batches of validation that are kept, blocks, bare kernels."""
