"""The contract of partitions: those of the package and one written here pass it, broken ones do not."""

import random

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import Dataset

from lightning_lowrank.federated import data
from lightning_lowrank.federated.data import ClientIndices, Dirichlet, FromIndices, LabelCount, LabelTable, Partition
from lightning_lowrank.seeding import generator
from lightning_lowrank.testing import check_partition


class Wards(Dataset):
    """Names the ward of each sample, has no labels, and cannot be read."""

    ward = ("b", "a", "c", "a", "b")

    def __len__(self):
        return 5


class Unlabelled(Dataset):
    """Has no labels, and cannot be read."""

    def __len__(self):
        return 101


def by_place(dataset):
    return ["abcd"[place * 4 // len(dataset)] for place in range(len(dataset))]


PARTITIONS = {
    "IID": [(data.IID(), {})],
    "Dirichlet": [
        (Dirichlet(0.3), {}),
        (Dirichlet(0.5, min_samples=5, capped=False), {"clients": 50}),
        (Dirichlet(0.3, groups=by_place), {"dataset": Unlabelled()}),
    ],
    "LabelCount": [
        (LabelCount(3), {}),
        (LabelCount(3, balanced=True), {"clients": 50}),
        (LabelCount(1), {"complete": False}),
        (LabelCount(2, groups=by_place), {"dataset": Unlabelled()}),
    ],
    "ByKey": [(data.ByKey("ward"), {"dataset": Wards(), "clients": clients, "draws": False}) for clients in (None, 3)],
    "LabelTable": [
        (LabelTable([[9] * 10] * 5), {"clients": None, "complete": False}),
        (LabelTable([[1, 2] * 5] * 7, proportions=True), {}),
    ],
    "FromIndices": [
        (
            FromIndices([[4, 0], [], [2]]),
            {"dataset": Wards(), "clients": clients, "draws": False, "complete": False, "ascending": False},
        )
        for clients in (None, 3)
    ],
}


def test_every_partition_is_checked():
    kinds = (getattr(data, name) for name in data.__all__)
    assert PARTITIONS.keys() == {
        kind.__name__
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, Partition) and kind is not Partition
    }


@pytest.mark.parametrize(("partition", "arguments"), [case for cases in PARTITIONS.values() for case in cases])
def test_partitions_of_the_package_keep_the_contract(partition, arguments):
    check_partition(partition, **arguments)


class Shuffled(Partition):
    """A user's own: blocks of a permutation."""

    def assign(self, size, clients, seed, labels, keys):
        order = torch.randperm(size, generator=generator(seed, "mine"))
        return ClientIndices([part.sort().values for part in order.tensor_split(clients)], size)


class SortedByLabel(Partition):
    """A user's own that reads labels: sorted by label, cut at random."""

    needs_labels = True

    def assign(self, size, clients, seed, labels, keys):
        cuts = torch.randperm(size - 1, generator=generator(seed, "cuts"))[: clients - 1].sort().values + 1
        parts = labels.argsort(stable=True).tensor_split(cuts)
        return ClientIndices([part.sort().values for part in parts], size)


@pytest.mark.parametrize("own", [Shuffled(), SortedByLabel()])
@pytest.mark.parametrize("clients", [2, 60])
def test_partitions_of_ones_own_keep_it(own, clients):
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    check_partition(own, clients=clients)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (np.random.get_state()[1].tolist(), random.getstate())


class Changed(Shuffled):
    """Broken in one way: by another division, by its arguments, or afterwards."""

    def __init__(self, change):
        self.change = change

    def assign(self, *arguments):
        return self.change(super().assign, *arguments)


def written_over(place, value):
    """Break the indices after they have been checked."""

    def change(assign, size, *rest):
        indices = assign(size, *rest)
        indices.indices[place] = value
        return indices

    return Changed(change)


def seeding(seed_globally):
    def change(assign, size, clients, seed, *rest):
        seed_globally(seed)
        return assign(size, clients, seed, *rest)

    return Changed(change)


def of_two_or_more(assign, size, clients, *rest):
    assert clients > 1, "two or more"
    return assign(size, clients, *rest)


class DigestOfItsOwn(ClientIndices):
    def digest(self):
        return str(self.indices.tolist())


class NeedsLabelsSilently(SortedByLabel):
    needs_labels = False


class Renumbering(SortedByLabel):
    def assign(self, size, clients, seed, labels, keys):
        indices = super().assign(size, clients, seed, labels, keys)
        labels += 1
        return indices


class Remembering(Shuffled):
    calls = 0

    def assign(self, size, clients, seed, labels, keys):
        self.calls += 1
        return super().assign(size, clients, seed + self.calls, labels, keys)


class AnyNumber(Shuffled):
    def split(self, dataset, clients, seed, labels=None, keys=None):
        size = dataset if isinstance(dataset, int) else len(dataset)
        return self.assign(size, max(1, clients), seed, labels, keys)


class ValueErrors(Shuffled):
    def split(self, dataset, clients, seed, labels=None, keys=None):
        if clients < 1:
            raise ValueError("clients")
        return super().split(dataset, clients, seed, labels, keys)


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (Changed(lambda assign, *given: list(assign(*given))), "Changed returns a list in place of a ClientIndices"),
        (
            Changed(lambda assign, size, clients, *rest: assign(size, max(1, clients - 1), *rest)),
            "returns 6 clients where 7 are asked for",
        ),
        (
            Changed(lambda assign, size, *rest: ClientIndices(list(assign(size // 2, *rest)), size)),
            "assigns 251 of 503 samples, but complete=True",
        ),
        (
            Changed(lambda assign, size, *rest: ClientIndices(list(assign(size, *rest)), size + 1)),
            "for 504 samples where there are 503",
        ),
        (written_over(slice(2), 3), r"assigns the samples \[3\] more than once"),
        (written_over(-1, 503), r"returns the indices \[503\] for samples 0 to 502"),
        (
            Changed(lambda assign, size, *rest: ClientIndices([part.flip(0) for part in assign(size, *rest)], size)),
            r"gives the clients \[0, 1, 2, 3, 4\] samples that do not ascend",
        ),
        (
            Changed(lambda assign, size, *rest: DigestOfItsOwn(list(assign(size, *rest)), size)),
            "digest is not that of its clients' samples",
        ),
        (
            Changed(lambda assign, size, clients, seed, *rest: assign(size, clients, 0, *rest)),
            "same division for the seeds 0, 1 and 2",
        ),
        (
            Changed(lambda assign, size, clients, seed, *rest: assign(size, clients, int(torch.rand(())), *rest)),
            "changes the global random number generators",
        ),
        (
            Changed(
                lambda assign, size, clients, seed, *rest: assign(size, clients, seed + torch.initial_seed(), *rest)
            ),
            "divides otherwise when called again with the same seed",
        ),
        (Remembering(), "divides otherwise when called again with the same seed"),
        (NeedsLabelsSilently(), "NeedsLabelsSilently fails with AttributeError.*only if needs_labels is true"),
        (
            Changed(
                lambda assign, size, clients, seed, labels, keys: assign(
                    size, clients, seed + (labels is not None), labels, keys
                )
            ),
            "where it is given labels, but needs_labels is false",
        ),
        (Renumbering(), "changes the labels that it is given"),
        (AnyNumber(), "accepts clients=-1 for 503 samples"),
        (ValueErrors(), "refuses clients=-1 for 503 samples with ValueError"),
        (Changed(of_two_or_more), "fails with AssertionError"),
    ],
)
def test_broken_partitions_do_not(partition, message):
    with pytest.raises(AssertionError, match=message):
        check_partition(partition)


@pytest.mark.parametrize("seed_globally", [torch.manual_seed, np.random.seed, random.seed])
def test_a_global_generator_seeded_as_it_was_is_noticed(seed_globally):
    with isolate_rng():
        seed_globally(0)
        with pytest.raises(AssertionError, match="changes the global random number generators"):
            check_partition(seeding(seed_globally))


def test_a_partition_that_draws_is_not_one_that_does_not():
    with pytest.raises(AssertionError, match="other divisions for other seeds, but draws=False"):
        check_partition(Shuffled(), draws=False)


def test_what_the_partition_refuses_is_raised():
    with pytest.raises(MisconfigurationException, match="needs the number of clients"):
        check_partition(Shuffled(), clients=None)
