"""What each partition draws; tests/testing has what all have in common."""

import json
import math

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

from lightning_lowrank.federated.data import IID, ByKey, Dirichlet, FromIndices, LabelCount, find_labels
from lightning_lowrank.seeding import generator
from tests.federated.data.datasets import WithAttribute
from tests.grids import nightly_except
from tests.helpers import SHARED_DATA

LABELS = torch.arange(1003) % 10


def name_of(partition):
    return type(partition).__name__


@pytest.fixture(scope="module")
def fashion_labels():
    path = SHARED_DATA / "FashionMNIST" / "raw" / "train-labels-idx1-ubyte"
    if not path.is_file():
        pytest.skip(f"FashionMNIST's labels are not at {path}")
    return torch.tensor(np.frombuffer(path.read_bytes(), np.uint8, offset=8).astype(np.int64))


def test_other_groups_are_divided_as_labels_are():
    names = ["a", "b", "c"]
    labels = torch.arange(90) % 3
    unlabelled = WithAttribute(90)

    def by_name(dataset):
        return [names[int(label)] for label in labels]

    for kind, arguments in ((Dirichlet, (0.3,)), (LabelCount, (2,))):
        expected = kind(*arguments).split(90, 5, 1, labels)
        assert kind(*arguments, groups=by_name).split(unlabelled, 5, 1).digest() == expected.digest()
    with pytest.raises(MisconfigurationException, match=r"Dirichlet\(groups=...\) needs the group of each sample"):
        Dirichlet(0.3, groups=by_name).split(90, 5, 1)
    with pytest.raises(MisconfigurationException, match=r"groups.*1.*90"):
        Dirichlet(0.3, groups=lambda dataset: [1]).split(unlabelled, 5, 1)
    with pytest.raises(MisconfigurationException, match=r"groups.*LengthGroups\(\).*3"):
        LabelCount(2, groups=3)


# What all partitions have in common


@pytest.mark.parametrize("partition", [IID(), Dirichlet(0.3), LabelCount(10)], ids=name_of)
def test_one_client_holds_everything(partition):
    assert partition.split(1003, 1, 0, LABELS)[0].equal(torch.arange(1003))


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        (0, "clients must be an integer of 1 or more, got 0"),
        (-2, "got -2"),
        (1004, r"clients=1004.*1003"),
        (None, "needs the number of clients"),
        (2.0, "clients must be an integer"),
    ],
)
def test_impossible_numbers_of_clients_are_refused(clients, message):
    with pytest.raises(MisconfigurationException, match=message):
        IID().split(1003, clients, 0)


def test_an_empty_training_set_is_refused():
    with pytest.raises(MisconfigurationException, match=r"size.*1.*0"):
        IID().split(0, 1, 0)
    with pytest.raises(MisconfigurationException, match=r"dataset.*0"):
        IID().split([], 1, 0)


def test_a_dataset_without_length_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    with pytest.raises(MisconfigurationException, match=r"__getitem__.*__len__"):
        IID().split(Stream(), 1, 0)


def test_labels_that_are_missing_or_do_not_fit_are_refused():
    with pytest.raises(MisconfigurationException, match=r"Dirichlet.*labels is needed"):
        Dirichlet(1.0).split(1003, 5, 0)
    with pytest.raises(MisconfigurationException, match=r"\[1003\].*torch\.int64.*\[1002\]"):
        Dirichlet(1.0).split(1003, 5, 0, LABELS[1:])


def test_given_labels_go_before_the_datasets():
    given = LabelCount(2).split(WithAttribute(1003, targets=LABELS // 2), 5, 0, LABELS)
    assert given.digest() == LabelCount(2).split(1003, 5, 0, LABELS).digest()


@pytest.mark.parametrize("partition", [Dirichlet(0.3), LabelCount(2)], ids=name_of)
def test_label_values_do_not_matter(partition):
    renamed = 7 * LABELS - 20
    assert partition.split(1003, 9, 0, renamed).digest() == partition.split(1003, 9, 0, LABELS).digest()


# IID


@pytest.mark.parametrize("clients", [1, 3, 10, 1003])
def test_iid_sizes_differ_by_at_most_one(clients):
    sizes = IID().split(1003, clients, 0).sizes
    assert int(sizes.max() - sizes.min()) <= 1
    assert int(sizes.sum()) == 1003


@pytest.mark.slow
def test_iid_is_uniform():
    owners = torch.zeros(20, 4)
    for seed in range(600):
        for client, part in enumerate(IID().split(20, 4, seed)):
            owners[part, client] += 1
    expected = 600 / 4
    chi_squared = ((owners - expected) ** 2 / expected).sum(1)
    # 20 samples, 3 degrees of freedom each: 99.99 % of such maxima are below 27.
    assert float(chi_squared.max()) < 27


# Dirichlet


@nightly_except("0.1-10")
@pytest.mark.slow
@pytest.mark.parametrize(("alpha", "clients"), [(0.1, 2), (0.1, 10), (1.0, 10), (10.0, 2)])
def test_dirichlet_shares_have_the_moments_of_the_distribution(alpha, clients):
    labels = torch.zeros(10_000, dtype=torch.int64)
    shares = np.stack(
        [Dirichlet(alpha, capped=False).split(10_000, clients, seed, labels).sizes / 10_000 for seed in range(200)]
    )
    reference = np.random.default_rng(0).dirichlet([alpha] * clients, size=100_000)
    # Each Dirichlet mean has variance (1/C)(1 - 1/C)/(C alpha + 1), here over 200 draws.
    deviation = math.sqrt((1 / clients) * (1 - 1 / clients) / (clients * alpha + 1))
    assert shares.mean(0) == pytest.approx(1 / clients, abs=5 * deviation / math.sqrt(200))
    assert shares.std() == pytest.approx(deviation, rel=0.1)
    for quantile in (0.1, 0.5, 0.9):
        ours, theirs = np.quantile(shares, quantile), np.quantile(reference, quantile)
        assert ours == pytest.approx(theirs, abs=0.02 + 0.1 * theirs)


def test_dirichlet_draws_each_label_separately():
    counts = Dirichlet(1.0, capped=False).split(1003, 5, 0, LABELS).label_counts(LABELS)
    assert len({tuple(column) for column in counts.T.tolist()}) == 10


@pytest.mark.parametrize(("alpha", "capped"), [(1e-200, True), (1e-12, False)])
def test_tiny_alpha_gives_each_label_to_one_client(alpha, capped):
    counts = Dirichlet(alpha, capped=capped).split(1003, 20, 0, LABELS).label_counts(LABELS)
    assert (counts > 0).sum(0).tolist() == [1] * 10
    assert counts.sum(0).tolist() == torch.bincount(LABELS).tolist()


def test_huge_alpha_divides_each_label_equally():
    counts = Dirichlet(1e12, capped=False).split(1003, 20, 0, LABELS).label_counts(LABELS)
    assert int((counts - torch.bincount(LABELS) / 20).abs().max()) <= 1


@pytest.mark.slow
def test_dirichlet_of_tiny_alpha_draws_its_one_holder_uniformly():
    labels = torch.zeros(10, dtype=torch.int64)
    holders = [int(Dirichlet(1e-5).split(10, 4, seed, labels).sizes.argmax()) for seed in range(400)]
    counts = np.bincount(holders, minlength=4)
    assert ((counts - 100) ** 2 / 100).sum() < 21.1  # 99.99 % at 3 degrees of freedom


def capped_by_the_textbook(gammas, labels, clients):
    """The published implementations' loop, from the Gamma variables; the last open client takes the rest."""
    held = np.zeros(clients, dtype=int)
    table = []
    for label, gamma in enumerate(gammas):
        number = int((labels == label).sum())
        shares = gamma / gamma.sum() * (held < len(labels) / clients)
        shares /= shares.sum()
        cuts = (np.cumsum(shares) * number).astype(int)
        cuts[np.flatnonzero(shares)[-1] :] = number
        table.append(np.diff(cuts, prepend=0))
        held += table[-1]
    return np.stack(table, 1)


@pytest.mark.parametrize("seed", range(5))
def test_capped_dirichlet_equals_the_textbook_loop(seed):
    alpha, clients = 0.2, 12
    draws = generator(seed, "partition", "shares")
    boosted = torch._standard_gamma(torch.full((10, clients), alpha + 1, dtype=torch.float64), generator=draws)
    exponential = torch.empty(10, clients, dtype=torch.float64).exponential_(generator=draws)
    gammas = (boosted * torch.exp(-exponential / alpha)).numpy()
    expected = torch.from_numpy(capped_by_the_textbook(gammas, LABELS.numpy(), clients))
    counts = Dirichlet(alpha).split(1003, clients, seed, LABELS).label_counts(LABELS)
    # A cut that rounding moves to the other side of an integer changes two neighbours by one.
    assert int((counts - expected).abs().max()) <= 1
    assert int((counts != expected).sum()) <= 2


def test_a_client_with_exactly_the_mean_is_full():
    counts = Dirichlet(1e-9).split(1000, 10, 0, LABELS[:1000]).label_counts(LABELS[:1000])
    assert ((counts == 100).sum(0) == 1).all()
    assert ((counts == 100).sum(1) == 1).all()


def test_without_cap_full_clients_still_get_samples():
    counts = Dirichlet(0.3, capped=False).split(1003, 25, 0, LABELS).label_counts(LABELS)
    full = (counts.cumsum(1) - counts) * 25 >= 1003
    assert (counts[full] > 0).any()


def test_min_samples_redraws_until_it_holds():
    without = [int(Dirichlet(0.2).split(1003, 20, seed, LABELS).sizes.min()) for seed in range(10)]
    assert min(without) < 15
    for seed in range(10):
        indices = Dirichlet(0.2, min_samples=15).split(1003, 20, seed, LABELS)
        assert int(indices.sizes.min()) >= 15
        if without[seed] >= 15:
            assert indices.digest() == Dirichlet(0.2).split(1003, 20, seed, LABELS).digest()


@pytest.mark.slow
def test_min_samples_that_no_draw_reaches_is_an_error_that_names_everything():
    with pytest.raises(MisconfigurationException, match=r"alpha=1e-06.*clients=30.*min_samples=3"):
        Dirichlet(1e-6, min_samples=3).split(1003, 30, 0, LABELS)


def test_min_samples_beyond_the_training_set_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(Dirichlet, "_draw_counts", lambda *_: pytest.fail("a draw was made"))
    with pytest.raises(MisconfigurationException, match=r"min_samples=11.*clients=100.*1100"):
        Dirichlet(0.3, min_samples=11).split(1003, 100, 0, LABELS)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        *((Dirichlet, [alpha], f"alpha must be .*{alpha!r}") for alpha in (0, -0.3, math.nan, math.inf, "0.1")),
        *((Dirichlet, [0.3, least], r"min_samples.*0") for least in (-1, 2.5, True)),
        *((LabelCount, [count], r"labels_per_client.*1") for count in (0, -1, 1.5)),
        (ByKey, [3], "key must be a name or a function of the dataset, got 3"),
    ],
)
def test_arguments_out_of_range_are_refused_at_once(kind, given, message):
    with pytest.raises(MisconfigurationException, match=message):
        kind(*given)


# LabelCount


@pytest.mark.parametrize(
    ("clients", "labels_per_client", "balanced"),
    [(10, 1, False), (5, 2, True), (4, 3, False), (4, 3, True), (20, 2, False), (30, 10, True)],
)
def test_label_count_gives_each_client_its_labels_and_each_label_a_holder(clients, labels_per_client, balanced):
    for seed in range(5):
        counts = LabelCount(labels_per_client, balanced).split(1003, clients, seed, LABELS).label_counts(LABELS)
        assert ((counts > 0).sum(1) == labels_per_client).all()
        assert counts.sum(0).tolist() == torch.bincount(LABELS).tolist()
        for column in counts.T:
            shares = column[column > 0]
            assert int(shares.max() - shares.min()) <= 1


@pytest.mark.slow
def test_label_count_draws_labels_uniformly():
    held = torch.zeros(6, 10)
    for seed in range(200):
        held += LabelCount(3).split(1003, 6, seed, LABELS).label_counts(LABELS) > 0
    # Each entry is binomial: 200 draws with chance 3/10.
    assert float((held / 200 - 0.3).abs().max()) < 4.5 * math.sqrt(0.3 * 0.7 / 200)


def test_label_count_draws_who_gets_odd_samples():
    labels = torch.zeros(5, dtype=torch.int64)
    larger = {int(LabelCount(1).split(5, 2, seed, labels).sizes.argmax()) for seed in range(20)}
    assert larger == {0, 1}


def test_balanced_labels_are_the_least_used_whatever_the_seed():
    clients, times, expected = 7, np.zeros(10), np.zeros((7, 10), bool)
    for client in range(clients):
        taken = np.argsort(times / (client + 1), kind="stable")[:3]
        expected[client, taken] = True
        times[taken] += 1
    for seed in range(3):
        counts = LabelCount(3, balanced=True).split(1003, clients, seed, LABELS).label_counts(LABELS)
        assert (counts > 0).tolist() == expected.tolist()


def test_samples_of_a_label_are_shuffled():
    labels = torch.arange(100) % 2
    parts = [LabelCount(1, balanced=True).split(100, 4, seed, labels) for seed in range(2)]
    assert parts[0].label_counts(labels).equal(parts[1].label_counts(labels))
    assert parts[0].digest() != parts[1].digest()


@pytest.mark.parametrize("balanced", [False, True])
def test_labels_without_holder_are_unused_and_named(balanced):
    with pytest.warns(UserWarning, match="below the number of labels") as record:
        indices = LabelCount(2, balanced).split(1003, 3, 0, LABELS)
    held = (indices.label_counts(LABELS) > 0).sum(0)
    assert int(held.max()) == 1
    missing = (held == 0).nonzero().flatten().tolist()
    assert len(missing) == 4
    assert f"{1003 - len(indices.indices)} samples of the labels {missing}" in str(record[0].message)


def test_labels_with_fewer_samples_than_holders_are_named():
    labels = torch.tensor([0] * 20 + [4])
    with pytest.warns(UserWarning, match=r"labels \[4\] have fewer samples than clients"):
        indices = LabelCount(2).split(21, 3, 0, labels)
    assert sorted(indices.sizes.tolist()) in ([6, 7, 8], [7, 7, 7])


def test_more_labels_per_client_than_labels_are_refused():
    with pytest.raises(MisconfigurationException, match=r"labels_per_client=11.*10"):
        LabelCount(11).split(1003, 5, 0, LABELS)


# ByKey

WRITERS = ["zoe", "ada", "zoe", "ben"]


@pytest.mark.parametrize(
    ("partition", "dataset"),
    [
        (ByKey("writer"), WithAttribute(4, writer=WRITERS)),
        (ByKey("writer"), WithAttribute(4, writer=np.array(WRITERS, dtype=object))),
        (ByKey("writer"), [{"writer": name} for name in WRITERS]),
        (ByKey("writer"), Subset(WithAttribute(5, writer=["eve", *WRITERS]), [1, 2, 3, 4])),
        (ByKey("writer"), ConcatDataset([WithAttribute(1, writer=["zoe"]), WithAttribute(3, writer=WRITERS[1:])])),
        (ByKey(lambda dataset: [sample[0] for sample in dataset]), [(name, 0) for name in WRITERS]),
    ],
    ids=["attribute", "objects", "field", "subset", "concatenation", "function"],
)
def test_by_key_makes_a_client_of_each_key(partition, dataset):
    indices = partition.split(dataset, None, 0)
    assert indices.names == ("ada", "ben", "zoe")
    assert [part.tolist() for part in indices] == [[1], [3], [0, 2]]


def test_by_key_sorts_integers_as_numbers_and_takes_keys_directly():
    indices = ByKey("hospital").split(4, 3, 0, keys=torch.tensor([10, 2, 10, -1]))
    assert indices.names == (-1, 2, 10)
    assert [part.tolist() for part in indices] == [[3], [1], [0, 2]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": 4, "clients": 2, "keys": WRITERS}, r"clients=2.*key='writer'.*3"),
        ({"dataset": 4, "clients": None}, "needs the key of each sample"),
        ({"dataset": 5, "clients": None, "keys": WRITERS}, "keys has 4 entries for 5 samples"),
        ({"dataset": 2, "clients": None, "keys": ["a", 1]}, "keys mixes strings with other types"),
        ({"dataset": 2, "clients": None, "keys": [0.5, 1.0]}, "keys holds float64"),
        ({"dataset": 3, "clients": None, "keys": ["a", None, "b"]}, "1 of 3 entries of keys.*number 1"),
        ({"dataset": 3, "clients": None, "keys": [1.0, math.nan, math.nan]}, "2 of 3 entries of keys.*number 1"),
        ({"dataset": 3, "clients": None, "keys": torch.tensor([math.nan, 2, 2])}, "1 of 3 entries of keys.*number 0"),
        ({"dataset": [{"writer": "a"}, {"writer": ""}], "clients": None}, r"1 of 2.*'writer'.*number 1"),
        ({"dataset": [{"speaker": 1}], "clients": None}, r"key='writer'.*\['speaker'\]"),
        ({"dataset": [(1, 2)], "clients": None}, r"length.*2"),
    ],
)
def test_by_key_refuses_what_is_no_key(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        ByKey("writer").split(seed=0, **arguments)


def test_by_key_refuses_a_function_that_returns_too_few():
    with pytest.raises(MisconfigurationException, match=r"key\(dataset\) returned 1 entries for 4 samples"):
        ByKey(lambda dataset: ["a"]).split(WithAttribute(4), None, 0)


@pytest.mark.parametrize("attribute", [True, False])
def test_a_misspelt_key_gets_the_similar_one(attribute):
    dataset = TensorDataset(torch.arange(4)) if attribute else [{"writer": name} for name in WRITERS]
    if attribute:
        dataset.writer = WRITERS
    with pytest.raises(MisconfigurationException, match="give 'writer'"):
        ByKey("writr").split(dataset, None, 0)


# FromIndices


@pytest.mark.parametrize(("form", "clients"), [("lists", 2), ("tensors", None), ("json", None), ("pt", 2)])
def test_from_indices_takes_lists_and_files(form, clients, tmp_path):
    lists = [[3, 0], [1]]
    tensors = [torch.tensor(part) for part in lists]
    (tmp_path / "a.json").write_text(json.dumps(lists))
    torch.save(tensors, tmp_path / "a.pt")
    given = {"lists": lists, "tensors": tensors, "json": str(tmp_path / "a.json"), "pt": tmp_path / "a.pt"}[form]
    indices = FromIndices(given).split(4, clients, 0)
    assert [part.tolist() for part in indices] == lists
    assert indices.names is None


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"10": [1], "9": [3, 0]}, (9, 10)),
        ({10: [1], 9: [3, 0]}, (9, 10)),
        ({"b": [1], "a": [3, 0]}, ("a", "b")),
        ({"1": [1], "01": [3, 0]}, ("01", "1")),
        ({"010": [1], "007": [3, 0]}, ("007", "010")),
        ({"10": [1], "0": [3, 0]}, (0, 10)),
    ],
)
def test_from_indices_numbers_named_clients_in_order(given, names):
    indices = FromIndices(given).split(4, None, 0)
    assert indices.names == names
    assert [part.tolist() for part in indices] == [[3, 0], [1]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "at least one client"),
        ({}, "at least one client"),
        (7, "got int"),
        ({1: [0], "1": [1]}, "twice"),
        ({None: [0]}, "NoneType"),
        ([[0], [[1]]], r"client 1.*torch\.int64"),
        ("nowhere.json", r"indices.*'nowhere\.json'"),
    ],
)
def test_from_indices_refuses_wrong_input_at_once(given, message):
    with pytest.raises(MisconfigurationException, match=message):
        FromIndices(given)


@pytest.mark.parametrize(
    ("name", "message"), [("a.json", "no valid JSON"), ("a.txt", "no literal"), ("a.xlsx", r"\.json, .*\.csv")]
)
def test_from_indices_refuses_wrong_files(name, message, tmp_path):
    (tmp_path / name).write_text("{")
    with pytest.raises(MisconfigurationException, match=message):
        FromIndices(tmp_path / name)


def test_from_indices_refuses_another_number_of_clients_and_wrong_indices():
    with pytest.raises(MisconfigurationException, match=r"clients=3.*indices.*2"):
        FromIndices([[0], [1]]).split(4, 3, 0)
    with pytest.raises(MisconfigurationException, match=r"index.*4.*4"):
        FromIndices([[0], [4]]).split(4, 2, 0)
    with pytest.raises(MisconfigurationException, match=r"index.*1.*0"):
        FromIndices([[1], [1]]).split(4, 2, 0)


# Real data


@pytest.mark.slow
def test_fashion_mnist_through_torchvision(fashion_labels):
    from torchvision.datasets import FashionMNIST

    assert find_labels(FashionMNIST(SHARED_DATA)).equal(fashion_labels)
