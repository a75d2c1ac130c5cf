"""Plans of rounds, and the loader that delivers their batches."""

import itertools

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_lowrank import FedAvg, FederatedLoop, FromIndices
from lightning_lowrank.federated.data import Dirichlet
from lightning_lowrank.federated.data.labels import find_labels
from lightning_lowrank.federated.data.lengths import LengthGroupedSampler
from lightning_lowrank.federated.data.loader_checks import batches_of, check_loader
from lightning_lowrank.federated.data.planner import RoundPlanner
from lightning_lowrank.federated.data.round_loader import RoundLoader
from lightning_lowrank.federated.randomness import StepRandomness
from tests.helpers import Data, Module, trainer

DATA = TensorDataset(torch.arange(203.0), torch.arange(203) % 5)
CLIENTS = Dirichlet(0.5).split(203, 12, 0, DATA.tensors[1])


def planner(**arguments):
    batches = batches_of(np.asarray(CLIENTS.sizes), DataLoader(DATA, batch_size=8))
    return RoundPlanner(0, batches, **{"clients_per_round": 9, "samples": np.asarray(CLIENTS.sizes), **arguments})


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


def test_processes_share_the_clients_and_make_equally_many_turns():
    whole, plans = planner().plan(0), [planner(process=process, processes=3).plan(0) for process in range(3)]
    assert sorted(chunk.clients[0] for plan in plans for chunk in plan.chunks) == list(whole.clients)
    assert {plan.clients for plan in plans} == {whole.clients}
    assert {plan.turns for plan in plans} == {max(len(plan.chunks) for plan in plans)}


def test_clients_that_are_never_drawn_are_not_eligible():
    ones, batches = np.ones(12), planner().batches
    assert planner().eligible == np.count_nonzero(batches)
    first = int(np.flatnonzero(batches)[0])
    none = np.where(np.arange(12) == first, 0.0, ones).tolist()
    for name in ("sampling_weights", "availability"):
        some = planner(**{name: none, "clients_per_round": 12})
        assert some.eligible == some.clients_per_round == planner().eligible - 1 == len(some.plan(0).clients)
    assert planner(availability=lambda client, number: 0.0).eligible == planner().eligible
    assert planner(participants=[[first]]).eligible == planner().eligible
    assert planner().clients_per_round == min(9, planner().eligible)


def test_a_function_gives_chances_as_a_list_does():
    chances = np.linspace(0, 1, 12).tolist()
    drawn = {
        name: [planner(clients_per_round=12, availability=given).plan(number).clients for number in range(20)]
        for name, given in {
            "list": chances,
            "function": lambda client, number: chances[client],
            "of round": lambda client, number: np.bool_(client == number % 12 or client == 11),
        }.items()
    }
    assert drawn["function"] == drawn["list"]
    assert 0 < sum(4 in clients for clients in drawn["function"]) < 20
    assert drawn["of round"] == [tuple(sorted({number % 12, 11})) for number in range(20)]


@pytest.mark.parametrize("value", [1.5, -0.1, float("nan"), None])
def test_a_function_that_gives_no_chance_is_refused(value):
    with pytest.raises(MisconfigurationException, match=rf"availability gave {value} for client 3 in round 1"):
        planner(availability=lambda client, number: value if client == 3 else True).plan(1)


class Reversed(SequentialSampler):
    def __iter__(self):
        return reversed(range(len(self.data_source)))


class Twice(RandomSampler):
    def __iter__(self):
        return iter([0] * len(self.data_source))


@pytest.mark.parametrize(
    ("sampler", "training", "message"),
    [
        (SequentialSampler(range(20)), True, r"SequentialSampler over 20 of 203 samples"),
        (SequentialSampler(range(20)), False, r"SequentialSampler over 20 of 203 samples"),
        (RandomSampler(range(20)), True, r"RandomSampler over 20 of 203 samples"),
        (RandomSampler(DATA, num_samples=20), True, r"RandomSampler"),
        (RandomSampler(DATA, replacement=True), True, r"RandomSampler"),
        (Reversed(DATA), True, r"Reversed"),
        (Reversed(DATA), False, r"Reversed"),
        (Twice(DATA), True, r"Twice"),
        (LengthGroupedSampler(range(20), torch.ones(20), 8), True, r"LengthGroupedSampler over 20 of 203 samples"),
    ],
)
def test_loaders_that_leave_samples_out_or_draw_in_their_own_way_are_refused(sampler, training, message):
    with pytest.raises(MisconfigurationException, match=rf"draws with {message}.*torch\.utils\.data\.Subset"):
        check_loader(DataLoader(DATA, batch_size=8, sampler=sampler), training)


def test_loaders_that_draw_all_samples_pass():
    for sampler in (None, RandomSampler(range(203)), SequentialSampler(DATA), RandomSampler(DATA, num_samples=203)):
        user = DataLoader(DATA, batch_size=8, sampler=sampler)
        assert check_loader(user) is user
    # Only the dataset of such a loader is read.
    user = DataLoader(DATA, batch_size=8, sampler=RandomSampler(DATA, num_samples=20))
    assert check_loader(user, training=False) is user


class OfLists(Dataset):
    """Reads a list of samples at once, as scvi-tools' dataset of cells does."""

    targets = DATA.tensors[1]

    def __len__(self):
        return len(DATA)

    def __getitem__(self, indices):
        assert isinstance(indices, list)
        return [tensor[indices] for tensor in DATA.tensors]


def batched(sampler, dataset=None):
    batches = BatchSampler(sampler, 8, drop_last=True)
    if dataset is None:
        return DataLoader(DATA, batch_sampler=batches, num_workers=1, timeout=60)
    return DataLoader(dataset, batch_size=None, sampler=batches)


@pytest.mark.parametrize("dataset", [None, OfLists()], ids=["of samples", "of lists"])
@pytest.mark.parametrize("kind", [SequentialSampler, RandomSampler])
def test_a_batch_sampler_is_a_batch_size(kind, dataset):
    given = batched(kind(DATA if dataset is None else dataset), dataset)
    plain = check_loader(given)
    assert (plain.batch_size, plain.drop_last, type(plain.sampler)) == (8, True, kind)
    assert (plain.num_workers, plain.timeout, plain.collate_fn) == (given.num_workers, given.timeout, given.collate_fn)
    assert torch.equal(find_labels(plain.dataset), DATA.tensors[1])
    for one, other in zip(given, plain, strict=True) if kind is SequentialSampler else ():
        torch.testing.assert_close(list(one), list(other))


class OwnBatches(BatchSampler):
    pass


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, batch_sampler=[[1, 2], [5]]),
        DataLoader(DATA, batch_sampler=OwnBatches(RandomSampler(DATA), 8, drop_last=False)),
        # Its samples are batches.
        DataLoader(DATA, batch_size=None),
    ],
)
def test_batches_that_are_made_in_another_way_are_refused(loader):
    for training in (True, False):
        with pytest.raises(MisconfigurationException, match=r"batch_size.*torch\.utils\.data\.BatchSampler"):
            check_loader(loader, training)


@pytest.mark.parametrize("dataset", [None, OfLists()], ids=["of samples", "of lists"])
def test_a_batch_sampler_of_some_samples_is_refused(dataset):
    with pytest.raises(MisconfigurationException, match=r"SequentialSampler.*over.*20"):
        check_loader(batched(SequentialSampler(range(20)), dataset))


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
    assert len(steps) == plan.steps()
    expected = [int(sample) for chunk in plan.chunks for client in chunk.clients for sample in CLIENTS[client]]
    assert sorted(sample for step in steps for sample in step) == sorted(expected)
    position = 2
    assert read() == steps[2:]


def drawn_by(sampler, count=12, **arguments):
    """Return, for each round and client, the samples that a loader with this sampler reads of the client."""
    user = check_loader(DataLoader(DATA, batch_size=8, sampler=sampler), weighted=True)
    batches = batches_of(np.asarray(CLIENTS.sizes), user)
    made = RoundPlanner(0, 2 * batches, clients_per_round=count, samples=np.asarray(CLIENTS.sizes))
    read = {}
    for number in range(8):
        plan = made.plan(number)
        randomness = StepRandomness(torch.device("cpu"))
        own = {"plan": lambda plan=plan: plan, "position": lambda: 0, "shuffle": True}
        loader = RoundLoader(user, CLIENTS, seed=0, randomness=randomness, **{**own, **arguments})
        steps = iter([inputs.long() for inputs, _ in loader])
        randomness.release()
        for chunk in plan.chunks:
            (client,) = chunk.clients
            read[number, client] = torch.cat([next(steps) for _ in range(chunk.steps)])
    return read


@pytest.mark.slow
def test_a_client_draws_as_many_as_it_holds_by_its_samples_weights():
    weights = torch.where(DATA.tensors[1] == 0, 4.0, 1.0)
    weights[DATA.tensors[1] == 3] = 0.0
    found = drawn_by(WeightedRandomSampler(weights, 203))
    of_no_weight = {client for client in range(12) if not weights[CLIENTS[client]].any()}
    drawn, expected = torch.zeros(203), torch.zeros(203)
    for (_, client), samples in found.items():
        own = CLIENTS[client]
        assert len(samples) == 2 * len(own)
        assert set(samples.tolist()) <= set(own.tolist())
        drawn += torch.bincount(samples, minlength=203)
        expected[own] += len(samples) * weights[own] / weights[own].sum()
    assert not of_no_weight
    assert not drawn[weights == 0].any()
    for weight in (1.0, 4.0):
        assert float(drawn[weights == weight].sum() / expected[weights == weight].sum()) == pytest.approx(1, abs=0.05)
    # Of 5 deviations, a Poisson number's being the root of its mean.
    assert ((drawn - expected).abs() <= 5 * expected.sqrt() + 1).all()
    torch.manual_seed(99)
    again = drawn_by(WeightedRandomSampler(weights, 203))
    assert all(torch.equal(samples, again[key]) for key, samples in found.items())
    assert len({tuple(found[number, 0].tolist()) for number in range(8)}) == 8


class OwnWeights(WeightedRandomSampler):
    pass


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (WeightedRandomSampler([1.0] * 203, 20), r"draws.*20.*203"),
        (WeightedRandomSampler([1.0] * 20, 203), r"draws.*203.*203"),
        (WeightedRandomSampler([1.0] * 203, 203, replacement=False), "replacement=False"),
        (WeightedRandomSampler([1.0] * 202 + [-1.0], 203), r"WeightedRandomSampler.*-1\.0.*0"),
        (WeightedRandomSampler([1.0] * 202 + [float("nan")], 203), "WeightedRandomSampler"),
        (OwnWeights([1.0] * 203, 203), r"draws with OwnWeights"),
    ],
)
def test_weights_that_clients_cannot_draw_by_are_refused(sampler, message):
    with pytest.raises(MisconfigurationException, match=message):
        check_loader(DataLoader(DATA, batch_size=8, sampler=sampler), weighted=True)


@pytest.mark.parametrize("local_steps", [2, None])
def test_samples_of_like_length_share_a_batch_and_are_those_of_a_plain_order(local_steps):
    lengths = torch.randint(1, 60, (203,), generator=torch.Generator().manual_seed(0))
    loaders = {
        "plain": DataLoader(DATA, batch_size=4, shuffle=True),
        "grouped": DataLoader(DATA, batch_size=4, sampler=LengthGroupedSampler(DATA, lengths, 4)),
    }
    batches = batches_of(np.asarray(CLIENTS.sizes), loaders["plain"])
    steps = batches if local_steps is None else np.minimum(batches, local_steps)
    plan = RoundPlanner(0, steps, clients_per_round=12, samples=np.asarray(CLIENTS.sizes)).plan(0)
    read = {}
    for name, user in loaders.items():
        randomness = StepRandomness(torch.device("cpu"))
        loader = RoundLoader(
            check_loader(user),
            CLIENTS,
            seed=0,
            plan=lambda: plan,
            position=lambda: 0,
            randomness=randomness,
            shuffle=True,
        )
        read[name] = [inputs.long() for inputs, _ in loader]
        randomness.release()
    starts = [0, *plan.ends]
    longest = {name: sum(len(each) * lengths[each].max() for each in steps) for name, steps in read.items()}
    assert longest["grouped"] < (0.95 if local_steps else 0.8) * longest["plain"]
    orders = []
    for start, end in zip(starts, plan.ends, strict=False):
        plain, grouped = (torch.cat(read[name][start:end]) for name in ("plain", "grouped"))
        assert [len(each) for each in read["plain"][start:end]] == [len(each) for each in read["grouped"][start:end]]
        assert torch.equal(plain.sort().values, grouped.sort().values)
        whole = [lengths[each] for each in read["grouped"][start:end] if len(each) == 4]
        spans = sorted((int(each.min()), int(each.max())) for each in whole)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
        orders.append([int(each.min()) for each in whole])
    # The batches themselves come in random order.
    assert any(order != sorted(order) for order in orders)
    assert any(order != sorted(order, reverse=True) for order in orders)


def test_a_plain_loader_groups_too_and_lengths_are_of_all_samples():
    lengths = torch.arange(203).flip(0)
    sampler = LengthGroupedSampler(DATA, lengths, 10)
    torch.manual_seed(0)
    first, second = list(sampler), list(sampler)
    assert first != second
    assert sorted(first) == list(range(203))
    torch.manual_seed(0)
    assert list(sampler) == first
    batches = [lengths[batch].sort().values for batch in torch.tensor(first[:200]).split(10)]
    assert max(int(each[-1] - each[0]) for each in batches) < 20
    with pytest.raises(ValueError, match=r"lengths.*203.*202"):
        LengthGroupedSampler(DATA, lengths[1:], 10)


def test_clients_without_a_whole_batch_are_named(tmp_path):
    loop = FederatedLoop(FedAvg(), partition=FromIndices([range(20), range(20, 23)]), summary=False)
    with pytest.warns(UserWarning, match=r"batch_size=8 .* never drawn: \[1\]"):
        trainer(tmp_path, loop, max_epochs=1, limit_val_batches=0).fit(Module(), Data(drop_last=True))
