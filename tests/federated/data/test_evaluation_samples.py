"""Which samples clients' own models are evaluated on, against loops over the clients."""

import pytest
import torch

from lightning_lowrank.federated.data import ClientIndices
from lightning_lowrank.federated.data.evaluation_samples import hold_out, matched_labels


def test_matched_labels_are_those_of_the_training_samples():
    draws = torch.Generator().manual_seed(3)
    train, test = (torch.randint(-2, 9, (size,), generator=draws) for size in (200, 90))
    test[test == 4] = 5  # trained on, never tested
    train[train == 7] = 6  # tested, never trained on
    order = torch.randperm(200, generator=draws)
    parts = [order[:3], order[3:3], order[3:4], order[4:150], (train == 4).nonzero().flatten()[:0]]
    rest = [index for index in order[150:].tolist() if train[index] == 4]
    clients = ClientIndices([*parts, rest], size=200)
    matched = matched_labels(clients, train, test)
    assert rest
    for indices, found in zip(clients, matched, strict=True):
        held = {int(train[index]) for index in indices}
        assert found.dtype == torch.int64
        assert found.tolist() == [index for index in range(90) if int(test[index]) in held]
    assert [len(found) for found in matched][1] == [len(found) for found in matched][5] == 0
    assert 0 < len(matched[0]) < len(matched[3]) < 90


def test_clients_with_the_same_labels_share_their_matched_samples():
    clients = ClientIndices(torch.arange(6000), size=6000, sizes=torch.full((3000,), 2))
    train = torch.arange(6000) // 2 % 10
    matched = matched_labels(clients, train, torch.arange(10_000) % 10)
    assert len({found.data_ptr() for found in matched}) == 10
    assert matched[13].tolist() == list(range(3, 10_000, 10))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.75, 0.99])
def test_a_share_of_each_client_is_held_out(share):
    sizes = [0, 1, 2, 5, 40]
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    indices = ClientIndices(list(order[:48].split(sizes)), size=60, names=[f"n{n}" for n in sizes])
    train, test = hold_out(indices, share, seed=4)
    assert train.names == indices.names
    assert (train.size, len(train), len(test)) == (60, 5, 5)
    for size, whole, kept, held in zip(sizes, indices, train, test, strict=True):
        assert len(held) == min(round(share * size), max(0, size - 1))
        for part in (kept.tolist(), held.tolist()):
            assert part == [index for index in whole.tolist() if index in part]
        assert sorted([*kept.tolist(), *held.tolist()]) == sorted(whole.tolist())


def test_what_is_held_out_is_drawn_by_seed_and_client():
    indices = ClientIndices(torch.arange(80), size=80, sizes=torch.tensor([40, 40]))
    state = torch.get_rng_state()
    _, (first, second) = hold_out(indices, 0.25, seed=4)
    assert torch.equal(state, torch.get_rng_state())
    again = hold_out(ClientIndices([range(40)], size=80), 0.25, seed=4)[1]
    assert torch.equal(first, again[0])
    assert first.tolist() != (second - 40).tolist()
    assert first.tolist() != hold_out(indices, 0.25, seed=5)[1][0].tolist()
    assert first.tolist() != list(range(10))
