"""Labels found in datasets of every kind."""

import random

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lightning_lowrank.federated.data import find_labels
from lightning_lowrank.federated.data.labels import find_named_labels, renumber_like
from tests.federated.data.datasets import WithAttribute


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("targets", [3, 0, 7]),
        ("labels", (3, 0, 7)),
        ("targets", np.array([3, 0, 7], dtype=np.uint8)),
        ("labels", np.array([3, 0, 7], dtype=object)),
        ("targets", torch.tensor([3, 0, 7], dtype=torch.int32)),
        ("labels", [torch.tensor(3), np.int64(0), 7]),
    ],
    ids=["list", "tuple", "numpy", "objects", "tensor", "mixed"],
)
def test_find_labels_reads_attributes_and_keeps_integers(name, values):
    labels = find_labels(WithAttribute(3, **{name: values}))
    assert labels.dtype == torch.int64
    assert labels.tolist() == [3, 0, 7]


def test_find_labels_takes_the_last_tensor():
    assert find_labels(TensorDataset(torch.randn(3, 2), torch.tensor([1, 0, 1]))).tolist() == [1, 0, 1]


def test_find_labels_looks_through_nested_wrappers():
    first, second = WithAttribute(4, targets=[0, 1, 2, 3]), WithAttribute(2, labels=np.array([8, 9]))
    nested = ConcatDataset([Subset(Subset(first, [3, 2, 0]), torch.tensor([2, 0])), second])
    assert find_labels(nested).tolist() == [0, 3, 8, 9]
    assert find_labels(Subset(nested, range(1, 3))).tolist() == [3, 8]


def test_find_labels_maps_strings_over_all_parts_of_a_concatenation():
    parts = [WithAttribute(2, targets=["dog", "cat"]), WithAttribute(1, targets=["bird"])]
    assert find_labels(ConcatDataset(parts)).tolist() == [2, 1, 0]
    with pytest.raises(MisconfigurationException, match="ConcatDataset"):
        find_labels(ConcatDataset([*parts, WithAttribute(1, targets=[0])]))


def test_names_of_labels_are_numbered_as_another_datasets():
    _, names = find_named_labels(["left", "right", "up"], labels=list)
    labels, others = find_named_labels(["up", "down", "right", "up"], labels=list)
    assert labels.tolist() == [2, 0, 1, 2]
    assert renumber_like(labels, others, names).tolist() == [2, -1, 1, 2]
    integers, none = find_named_labels([5, 3], labels=list)
    assert none is None
    assert renumber_like(integers, None, None).tolist() == [5, 3]
    for given in ((labels, others, None), (integers, None, names)):
        with pytest.raises(MisconfigurationException, match=r"FederatedLoop.*labels"):
            renumber_like(*given)


def test_find_labels_maps_booleans():
    assert find_labels(WithAttribute(2, targets=torch.tensor([True, False]))).tolist() == [1, 0]


@pytest.mark.parametrize(
    "samples",
    [
        [("x", 4), ("y", 2)],
        [["x", 4, "more"], ["y", torch.tensor(2)]],
        [{"label": 4}, {"label": 2, "target": 0}],
        [{"labels": np.int64(4)}, {"labels": 2}],
        [{"target": 4}, {"target": 2}],
    ],
)
def test_find_labels_reads_samples_where_there_is_no_attribute(samples):
    assert find_labels(samples).tolist() == [4, 2]


def test_find_labels_reads_only_the_samples_of_a_subset_once():
    class Counting(Dataset):
        seen: list[int] = []  # noqa: RUF012
        labels = ("names", "of", "classes")

        def __len__(self):
            return 10

        def __getitem__(self, index):
            self.seen.append(index)
            return torch.rand(1), index

    assert find_labels(Subset(Counting(), [7, 2])).tolist() == [7, 2]
    assert Counting.seen == [7, 2]


def test_find_labels_gives_global_generators_back():
    class Augmented(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return torch.rand(1) + np.random.rand() + random.random(), index

    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    find_labels(Augmented())
    find_labels(Augmented(), labels=lambda dataset: [dataset[i][1] for i in range(3)])
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (np.random.get_state()[1].tolist(), random.getstate())


def test_find_labels_prefers_the_users_function():
    dataset = WithAttribute(3, targets=torch.randn(3), group=["b", "a", "b"])
    assert find_labels(dataset, labels=lambda dataset: dataset.group).tolist() == [1, 0, 1]
    with pytest.raises(MisconfigurationException, match=r"labels.*2.*3"):
        find_labels(dataset, labels=lambda dataset: [0, 1])


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (WithAttribute(2, targets=torch.tensor([0.5, 1.0])), r"WithAttribute\.targets.*\[2\].*labels"),
        (WithAttribute(2, targets=torch.eye(2)), r"\[2, 2\].*labels.*FederatedLoop"),
        (TensorDataset(torch.randn(2, 3), torch.tensor([[0, 1], [1, 0]])), r"TensorDataset\.tensors.*\[2, 2\]"),
        ([(0, 0.5), (0, 1.5)], r"\[2\].*labels.*FederatedLoop"),
        ([(0, torch.tensor([0, 1])), (0, torch.tensor([1]))], "different lengths"),
        ([(0, "a"), (0, 1)], r"labels.*FederatedLoop"),
        ([1.0, 2.0], r"'label'.*'labels'"),
        ([(1,)], r"length.*1"),
        ([{"x": 1}], r"\['x'\]"),
    ],
)
def test_find_labels_refuses_what_is_no_label(dataset, message):
    with pytest.raises(MisconfigurationException, match=message):
        find_labels(dataset)
