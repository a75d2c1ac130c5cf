"""Plans of rounds, and the loader that delivers their batches."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowrank.federated.data import Dirichlet
from lightning_lowrank.federated.data.loader import RoundLoader, batches_of
from lightning_lowrank.federated.data.planner import RoundPlanner
from lightning_lowrank.federated.randomness import StepRandomness

DATA = TensorDataset(torch.arange(203.0), torch.arange(203) % 5)
CLIENTS = Dirichlet(0.5).split(203, 12, 0, DATA.tensors[1])


def planner(**arguments):
    batches = batches_of(np.asarray(CLIENTS.sizes), DataLoader(DATA, batch_size=8))
    return RoundPlanner(0, batches, **{"per_round": 9, "samples": np.asarray(CLIENTS.sizes), **arguments})


def test_chunks_are_of_one_kind_with_the_longest_first():
    plan = planner(chunk_size=3, group_key=lambda client, round_number: (client + round_number) % 2).plan(1)
    assert plan == planner(chunk_size=3).plan(1, [chunk.clients for chunk in plan.chunks])
    assert sorted(client for chunk in plan.chunks for client in chunk.clients) == list(plan.clients)
    count = dict(zip(plan.clients, plan.batches, strict=True))
    for chunk in plan.chunks:
        assert len(chunk.clients) <= 3
        assert len({client % 2 for client in chunk.clients}) == 1
        assert chunk.batches == tuple(sorted((count[client] for client in chunk.clients), reverse=True))
        assert chunk.steps == max(chunk.batches)
    assert plan.ends == tuple(np.cumsum([chunk.steps for chunk in plan.chunks]))


def test_processes_share_the_clients_and_end_together():
    whole, plans = planner().plan(0), [planner(process=process, processes=3).plan(0) for process in range(3)]
    assert sorted(chunk.clients[0] for plan in plans for chunk in plan.chunks) == list(whole.clients)
    assert {plan.clients for plan in plans} == {whole.clients}
    assert {plan.total for plan in plans} == {max(plan.trained for plan in plans)}


@pytest.mark.parametrize(("chunk_size", "workers"), [(1, 0), (4, 0), (4, 1)])
def test_a_loader_delivers_each_sample_once_and_goes_on_where_it_was(chunk_size, workers):
    plan, position = planner(chunk_size=chunk_size, processes=2).plan(0), 0
    stacked = chunk_size > 1
    user = DataLoader(DATA, batch_size=8, shuffle=True, num_workers=workers)
    randomness = StepRandomness(torch.device("cpu"))
    loader = RoundLoader(
        user,
        CLIENTS,
        seed=0,
        plan=lambda: plan,
        position=lambda: position,
        skips=lambda: False,
        randomness=randomness,
        shuffle=True,
        stacked=stacked,
    )

    def read():
        steps = []
        for batch in loader:
            parts = [] if batch is None else [part for _, part in batch] if stacked else [batch]
            steps.append([int(sample) for inputs, _ in parts for sample in inputs.flatten()])
        randomness.release()
        return steps

    steps = read()
    assert len(steps) == len(loader) == plan.total
    expected = [int(sample) for chunk in plan.chunks for client in chunk.clients for sample in CLIENTS[client]]
    assert sorted(sample for step in steps for sample in step) == sorted(expected)
    position = 2
    assert read() == steps[2:]
