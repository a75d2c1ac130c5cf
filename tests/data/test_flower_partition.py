"""Flower Datasets' partitioners as partitions: a stand-in with their interface, and theirs where they are installed."""

import copy

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import TensorDataset

from lightning_lowrank import FedAvg, FederatedLoop
from lightning_lowrank.data import FlowerPartition
from lightning_lowrank.testing import check_partition

pytest.importorskip("datasets", reason="datasets is not installed")


class ByParity:
    """A partitioner: the last rows come first, in two partitions for each value of a column."""

    def __init__(self, partition_by, refuses=False, twice=False):
        self.by, self.refuses, self.twice, self._dataset = partition_by, refuses, twice, None

    dataset = property(lambda self: self._dataset)

    @dataset.setter
    def dataset(self, value):
        assert self._dataset is None
        self._dataset = value

    def is_dataset_assigned(self):
        return self._dataset is not None

    @property
    def num_partitions(self):
        return 2 * len(set(self.dataset[self.by]))

    def load_partition(self, partition_id):
        if self.refuses:
            raise ValueError("too few of them")
        values = sorted(set(self.dataset[self.by]))
        wanted = [row for row, value in enumerate(self.dataset[self.by]) if value == values[partition_id // 2]]
        return self.dataset.select(wanted[::-1] if self.twice else wanted[partition_id % 2 :: 2][::-1])


class Wards(TensorDataset):
    def __init__(self):
        super().__init__(torch.zeros(40, 3), torch.arange(40) % 5)
        self.ward = ["north" if row < 30 else "south" for row in range(40)]


@pytest.mark.slow
def test_it_keeps_the_contract_of_partitions():
    for clients in (None, 10):
        check_partition(FlowerPartition(ByParity("label")), dataset=Wards(), clients=clients, draws=False)
    check_partition(FlowerPartition(ByParity("w"), "w", "ward"), dataset=Wards(), clients=4, draws=False)


@pytest.mark.slow
def test_clients_are_the_partitions():
    partitioner = ByParity("label")
    indices = FlowerPartition(partitioner).split(Wards(), clients=None, seed=0)
    assert [part.tolist() for part in indices][:2] == [[0, 10, 20, 30], [5, 15, 25, 35]]
    assert not partitioner.is_dataset_assigned()
    indices = FlowerPartition(ByParity("w"), column="w", key=lambda dataset: dataset.ward).split(Wards(), None, 0)
    assert indices.sizes.tolist() == [15, 15, 5, 5]


def test_a_loop_takes_it():
    loop = FederatedLoop(FedAvg(), partition=FlowerPartition(ByParity("label")))
    assert "partition=FlowerPartition(ByParity, column='label')" in repr(loop)


def test_what_it_refuses():
    assigned = ByParity("label")
    assigned.dataset = object()
    for arguments, message in (
        ((7,), r"partitioner.*flwr_datasets\.partitioner.*7"),
        ((assigned,), "partitioner=ByParity"),
        ((ByParity("label"), None, "ward"), "column is None"),
    ):
        with pytest.raises(MisconfigurationException, match=message):
            FlowerPartition(*arguments)
    for partition, clients, message in (
        (FlowerPartition(ByParity("label")), 3, r"clients=3.*ByParity.*10"),
        (FlowerPartition(ByParity("colour")), None, r"ByParity.*40.*'label'"),
        (FlowerPartition(ByParity("label", refuses=True)), None, "ValueError"),
        (FlowerPartition(ByParity("label", twice=True)), None, "sample"),
    ):
        with pytest.raises(MisconfigurationException, match=message):
            partition.split(Wards(), clients, seed=0)
    with pytest.raises(MisconfigurationException, match="FlowerPartition"):
        FlowerPartition(ByParity("label")).split(40, clients=None, seed=0)


def test_partitioners_of_flower_datasets():
    """With ``pip install flwr-datasets``, which holds `datasets` at an older release."""
    flower = pytest.importorskip("flwr_datasets.partitioner", reason="flwr-datasets is not installed")
    for partitioner, column, key, complete in (
        (flower.IidPartitioner(7), None, None, True),
        (flower.LinearPartitioner(5), None, None, True),
        (flower.DirichletPartitioner(4, "label", 0.5, min_partition_size=2), "label", None, True),
        (flower.PathologicalPartitioner(5, "label", 2), "label", None, False),
        (flower.ShardPartitioner(4, "label", num_shards_per_partition=2), "label", None, True),
        (flower.NaturalIdPartitioner("ward"), "ward", "ward", True),
    ):
        partition = FlowerPartition(partitioner, column, key)
        check_partition(partition, dataset=Wards(), clients=None, draws=False, complete=complete)
        indices = partition.split(Wards(), None, 0)
        theirs = copy.deepcopy(partitioner)
        theirs.dataset = pytest.importorskip("datasets").Dataset.from_dict(
            {"row": list(range(40)), "label": [row % 5 for row in range(40)], "ward": Wards().ward}
        )
        assert [part.tolist() for part in indices] == [
            sorted(theirs.load_partition(each)["row"][:]) for each in range(theirs.num_partitions)
        ]
