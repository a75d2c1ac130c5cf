"""Matrix products alone: what the arithmetic of a cohort's step costs at least.

`"rate"` multiplies large square matrices. `"own products"` multiplies what a step of the low-rank model multiplies, for
all clients at once, in the step's shapes and nothing besides: weights times batches, as the step does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.benchmarks.contending import Rounds, contend
from tests.benchmarks.rounds_contenders.experiment import Setting

SIDE, REPEATS = 1024, 20
LAYERS = ((784, 128), (128, 10))


class Product(NamedTuple):
    """So many products ``[rows, inner] @ [inner, columns]``, of which either side may lie transposed in memory."""

    number: int
    rows: int
    inner: int
    columns: int
    left_transposed: bool = False
    right_transposed: bool = False

    def factors(self) -> tuple[Tensor, Tensor]:
        left = (self.number, self.rows, self.inner)
        right = (self.number, self.inner, self.columns)
        return _matrices(left, self.left_transposed), _matrices(right, self.right_transposed)


def _matrices(shape: tuple[int, int, int], transposed: bool) -> Tensor:
    number, rows, columns = shape
    return torch.randn(number, columns, rows).mT if transposed else torch.randn(shape)


def products(setting: Setting) -> list[Product]:
    """Matrix products of one step of all clients."""
    clients, batch = setting.cohort, setting.batch_size
    found: list[Product] = []
    for number, (inputs, outputs) in enumerate(LAYERS):
        rank = 8 if setting.model == "factors" else 4
        for before, after in ((inputs, rank), (rank, outputs)):
            # Only the images lie sample by sample.
            images = not number and before == inputs
            found.append(Product(clients, after, before, batch, right_transposed=images))
            found.append(Product(clients, after, batch, before, right_transposed=not images))
            if number or before == rank:
                found.append(Product(clients, before, after, batch, left_transposed=True))
        if setting.model == "update":
            found.append(Product(1, clients * batch, inputs, outputs))
            if number:
                found.append(Product(1, clients * batch, outputs, inputs))
    return found


def operations(chosen: list[Product]) -> int:
    return sum(2 * each.number * each.rows * each.inner * each.columns for each in chosen)


def counted_operations(setting: Setting) -> int:
    """Operations in matrix products of one client's step of the model, as torch counts them."""
    network = setting.module()["net"]
    images = torch.randn(setting.batch_size, 784)
    with FlopCounterMode(display=False) as counter:
        network(images).sum().backward()
    return counter.get_total_flops()


def run(setting: Setting, rounds: Rounds) -> dict[str, Any]:
    chosen = [Product(1, SIDE, SIDE, SIDE)] * REPEATS
    if setting.contender == "own products":
        chosen = products(setting)
        counted = setting.cohort * counted_operations(setting)
        assert operations(chosen) == counted, f"the model's step multiplies otherwise: {operations(chosen)}, {counted}"
        chosen *= setting.steps_per_client
    factors = {product: product.factors() for product in set(chosen)}
    results = {product: torch.bmm(left, right) for product, (left, right) in factors.items()}
    rounds.begin()
    for _ in range(setting.rounds):
        for product in chosen:
            torch.bmm(*factors[product], out=results[product])
        rounds.end()
    return {"operations": operations(chosen)}


if __name__ == "__main__":
    contend(Setting, run)
