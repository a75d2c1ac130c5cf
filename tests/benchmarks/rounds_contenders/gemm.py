"""Matrix products alone: what the arithmetic of a cohort's step costs at least.

`"rate"` multiplies large square matrices. `"own products"` multiplies what a step of the low-rank model multiplies, for
all clients at once, in the step's shapes and nothing besides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.benchmarks.rounds_contenders.experiment import Rounds, Setting, contend

SIDE, REPEATS = 1024, 20
LAYERS = ((784, 128), (128, 10))

Product = tuple[int, int, int, int]


def products(setting: Setting) -> list[Product]:
    """Matrix products of one step of all clients, each as (number, rows, inner, columns)."""
    clients, batch = setting.cohort, setting.batch_size
    found: list[Product] = []
    for number, (inputs, outputs) in enumerate(LAYERS):
        rank = 8 if setting.model == "factors" else 4
        for before, after in ((inputs, rank), (rank, outputs)):
            found += [(clients, batch, before, after), (clients, before, batch, after)]
            if number or before == rank:
                found.append((clients, batch, after, before))
        if setting.model == "update":
            found.append((1, clients * batch, inputs, outputs))
            if number:
                found.append((1, clients * batch, outputs, inputs))
    return found


def operations(chosen: list[Product]) -> int:
    return sum(2 * number * rows * inner * columns for number, rows, inner, columns in chosen)


def counted_operations(setting: Setting) -> int:
    """Operations in matrix products of one client's step of the model, as torch counts them."""
    network = setting.module()["net"]
    images = torch.randn(setting.batch_size, 784)
    with FlopCounterMode(display=False) as counter:
        network(images).sum().backward()
    return counter.get_total_flops()


def run(setting: Setting, rounds: Rounds) -> dict[str, Any]:
    chosen = [(1, SIDE, SIDE, SIDE)] * REPEATS
    if setting.contender == "own products":
        chosen = products(setting)
        counted = setting.cohort * counted_operations(setting)
        assert operations(chosen) == counted, f"the model's step multiplies otherwise: {operations(chosen)}, {counted}"
        chosen *= setting.steps_per_client
    factors = {
        shape: (torch.randn(shape[0], shape[1], shape[2]), torch.randn(shape[0], shape[2], shape[3]))
        for shape in set(chosen)
    }
    results = {shape: torch.bmm(left, right) for shape, (left, right) in factors.items()}
    rounds.begin()
    for _ in range(setting.rounds):
        for shape in chosen:
            torch.bmm(*factors[shape], out=results[shape])
        rounds.end()
    return {"operations": operations(chosen)}


if __name__ == "__main__":
    contend(run)
