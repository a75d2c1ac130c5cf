"""Samples that are kept on the device that trains: here the CPU, which reads by the same code if told to."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from lightning_lowrank import Dirichlet, Ditto, FederatedLoop
from lightning_lowrank.data import TensorImages, collate_images
from lightning_lowrank.federated.data import device
from lightning_lowrank.federated.data.device import DeviceData, source_of
from lightning_lowrank.federated.data.loader import RoundLoader, batches_of
from lightning_lowrank.federated.data.planner import RoundPlanner
from lightning_lowrank.federated.data.whole_batches import WholeBatches
from lightning_lowrank.federated.randomness import StepRandomness
from tests.helpers import Data, Module, assert_same, blobs, fit, trainer, weights

LABELS = torch.arange(203) % 5
PIXELS = torch.randint(256, (203, 3, 6, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
VALUES = torch.randn(203, 16, generator=torch.Generator().manual_seed(1))
CHOSEN = torch.randperm(203, generator=torch.Generator().manual_seed(2))


def images(**arguments: Any) -> TensorImages:
    return TensorImages(PIXELS, LABELS, [0.1, 0.4, 0.7], [0.2, 0.3, 0.5], **arguments)


DATASETS = {
    "tensors": (TensorDataset(VALUES, LABELS), None),
    "subset of tensors": (Subset(Subset(TensorDataset(VALUES, LABELS), CHOSEN), range(-150, 0)), None),
    "images": (images(), collate_images),
    "cropped": (images(crop_padding=2), collate_images),
    "mirrored": (images(mirror=True), None),
    "subset of augmented images": (Subset(images(crop_padding=1, mirror=True), CHOSEN[:99].tolist()), collate_images),
}


class NoFit:
    def __init__(self, where: str = "cpu") -> None:
        self.strategy = SimpleNamespace(root_device=torch.device(where))
        self.lightning_module, self.datamodule = Module(), None


def read(dataset: Any, collate: Any, chunk_size: int, wanted: Any, position: int = 0) -> list[Any]:
    size = len(dataset)
    clients = Dirichlet(0.5).split(dataset, 12, 0, LABELS[:size])
    user = DataLoader(dataset, batch_size=8, shuffle=True, collate_fn=collate)
    planner = RoundPlanner(
        0, 2 * batches_of(clients.sizes.numpy(), user), 9, samples=clients.sizes.numpy(), chunk_size=chunk_size
    )
    plan = planner.plan(0)
    randomness = StepRandomness(torch.device("cpu"))
    loader = RoundLoader(
        user,
        clients,
        seed=0,
        plan=lambda: plan,
        position=lambda: position,
        randomness=randomness,
        shuffle=True,
        stacked=chunk_size > 1,
        device_data=DeviceData(NoFit(), wanted),
        next_cohort=lambda: planner.cohort(1)[0],
    )
    found = []
    for batch in loader:
        # The draws of the step that follows.
        found.append((batch, torch.rand(2)))
    randomness.release()
    return found


def assert_equal(one: Any, two: Any) -> None:
    assert type(one) is type(two)
    if isinstance(one, Tensor):
        assert torch.equal(one, two)
        assert one.dtype == two.dtype
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two)
        for first, second in zip(one, two, strict=True):
            assert_equal(first, second)
    else:
        assert vars(one) == vars(two)


@pytest.mark.parametrize("wanted", [True, "round"])
@pytest.mark.parametrize("chunk_size", [1, 4])
@pytest.mark.parametrize("name", DATASETS)
def test_batches_are_those_of_the_host(name, chunk_size, wanted):
    dataset, collate = DATASETS[name]
    expected = read(dataset, collate, chunk_size, False)
    assert_equal(read(dataset, collate, chunk_size, wanted), expected)
    assert_equal(read(dataset, collate, chunk_size, wanted, position=3), expected[3:])


def test_several_batches_are_made_at_once_and_lie_as_on_their_own(monkeypatch):
    made = []
    block = device._Batches._end_of_block
    monkeypatch.setattr(device._Batches, "_end_of_block", lambda *given: made.append(block(*given)) or made[-1])
    batches = read(*DATASETS["tensors"], 1, True)
    assert len(made) < len(batches) / 2
    narrow = TensorDataset(VALUES[:, :5].contiguous(), LABELS)
    for chunk_size in (1, 4):
        for batch, _ in read(narrow, None, chunk_size, True):
            for inputs, _ in [batch] if chunk_size == 1 else [part for _, part in batch]:
                assert inputs.data_ptr() % 64 == 0
    monkeypatch.setattr(device, "_INDICES", 50)
    assert_equal(read(*DATASETS["tensors"], 1, True), batches)


def test_a_round_ahead_is_sent_once():
    source = source_of(*DATASETS["tensors"][:1], default_collate)
    rounds = [[torch.arange(0, 20).numpy(), torch.arange(30, 60).numpy()]]
    pools = device._Pools(source, torch.device("cpu"), lambda: rounds[0])
    first, places = pools.holding(rounds[0][0][::-1])
    assert len(first[0]) == 20
    assert torch.equal(first[0][torch.from_numpy(places)], VALUES[:20].flip(0))
    ahead = pools._next.result()
    rounds[0] = [rounds[0][1]]
    second, places = pools.holding(torch.tensor([31, 59, 31]).numpy())
    assert second is ahead.tensors
    assert torch.equal(second[0][torch.from_numpy(places)], VALUES[[31, 59, 31]])
    # Samples that nobody has announced.
    third, places = pools.holding(torch.tensor([100]).numpy())
    assert torch.equal(third[0][torch.from_numpy(places)], VALUES[[100]])


def test_what_is_written_is_sent_again():
    tensors = [VALUES.clone(), LABELS.clone()]
    data, source = DeviceData(NoFit("meta"), True), source_of(TensorDataset(*tensors), default_collate)
    copies = [data.copy_of(tensor) for tensor in tensors]
    assert data.copy_of(tensors[0]) is copies[0]
    tensors[0][3] += 1
    assert data.copy_of(tensors[0]) is not copies[0]
    assert data.copy_of(tensors[1]) is copies[1]
    pools = device._Pools(source, torch.device("cpu"), lambda: None)
    rows = torch.arange(10).numpy()
    pools.holding(rows)
    tensors[0][3] += 1
    assert torch.equal(pools.holding(rows)[0][0], tensors[0][:10])


def test_where_samples_are_kept(monkeypatch):
    source = source_of(*DATASETS["tensors"][:1], default_collate)
    nbytes = VALUES.nbytes + LABELS.nbytes
    for free, where in ((4 * nbytes, "device"), (4 * nbytes - 1, "round")):
        monkeypatch.setattr(device, "free_memory", lambda _, free=free: free)
        assert DeviceData(NoFit("meta"), "auto").where(source)[0] == where
    assert DeviceData(NoFit("meta"), True).where(source)[0] == "device"
    assert DeviceData(NoFit("meta"), "round").where(source)[0] == "round"
    assert DeviceData(NoFit("meta"), False).where(source)[0] == "host"
    assert DeviceData(NoFit(), "auto").where(source) == ("host", "it trains on the CPU")
    assert DeviceData(NoFit("meta"), "auto").where(source_of([1, 2], default_collate))[0] == "host"
    owner = NoFit("meta")
    owner.lightning_module.transfer_batch_to_device = lambda *arguments: None
    assert "transfer_batch_to_device() is overridden" in DeviceData(owner, "auto").where(source)[1]


def test_other_ways_to_read_are_the_loaders_own():
    class Darker(TensorImages):
        def __getitems__(self, indices):
            return super().__getitems__(indices)

    assert source_of(Darker(PIXELS, LABELS, [0.1] * 3, [0.2] * 3), collate_images) is None
    assert source_of(images(), lambda samples: samples) is None
    assert source_of(TensorDataset(VALUES.clone().requires_grad_()), default_collate) is None
    assert source_of(Subset(TensorDataset(VALUES), ["a"]), default_collate) is None


@pytest.mark.parametrize("wanted", [True, "round"])
def test_a_training_set_that_cannot_be_there_is_refused(tmp_path, wanted):
    loop = FederatedLoop(Ditto(), clients=3, data_on_device=wanted, summary=False)
    data = Data([(sample, int(label)) for sample, label in zip(*blobs().tensors, strict=True)])
    with pytest.raises(MisconfigurationException, match=r"data_on_device=.* list can't be kept on .*: its samples are"):
        fit(trainer(tmp_path, loop, num_sanity_val_steps=0), Module(), data)


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_fits_are_equal_bit_for_bit(tmp_path, execution, monkeypatch):
    def run(wanted: Any) -> Any:
        loop = FederatedLoop(
            Ditto(),
            clients=4,
            clients_per_round=2,
            partition=Dirichlet(1.0, min_samples=3),
            personal_test="matched_labels",
            execution=execution,
            data_on_device=wanted,
            summary=False,
        )
        train = trainer(tmp_path, loop, max_epochs=2)
        module = fit(train, Module(), Data())
        found = dict(train.callback_metrics)
        train.test(module, Data(), verbose=False)
        return weights(module), {**found, **train.callback_metrics}

    (values, logged), made = run(False), []
    batches = device.DeviceData.slices
    monkeypatch.setattr(device.DeviceData, "slices", lambda *given: made.append(1) or batches(*given))
    for wanted in (True, "round"):
        other, also = run(wanted)
        assert_same(other, values)
        assert_same(also, logged)
        # Two batches of validation in each round.
        assert len(made) == (0 if wanted == "round" else 4)
        made.clear()


def test_a_loader_with_pinned_memory_takes_what_is_on_the_device():
    dataset = images()
    loader = DataLoader(dataset, batch_size=50, collate_fn=collate_images, pin_memory=True)
    expected = [dataset.__getitems__(range(start, min(start + 50, 203))) for start in range(0, 203, 50)]
    restore = WholeBatches(DeviceData(NoFit(), True)).begin(loader)
    found = list(loader)
    restore()
    assert_equal(found, [[batch.images, batch.targets] for batch in expected])


@pytest.mark.parametrize("version", [1, 2])
def test_memory_is_free_within_the_containers_limit(tmp_path, version):
    """A group of the process, in one that has no limit, in one that has a lower one."""
    groups, base = tmp_path / "groups", tmp_path / ("memory" if version == 1 else ".")
    groups.write_text("4:memory:/outer/middle/own\n3:cpu:/\n" if version == 1 else "0::/outer/middle/own\n")
    limit, used, cached = device._CONTROL_FILES["memory" if version == 1 else ""]
    sizes = {"outer": (1000, 300, 50), "outer/middle": ("max", 300, 50), "outer/middle/own": (5000, 200, 20)}
    for path, (most, now, files) in sizes.items():
        (base / path).mkdir(parents=True, exist_ok=True)
        (base / path / limit).write_text(f"{most}\n")
        (base / path / used).write_text(f"{now}\n")
        (base / path / "memory.stat").write_text(f"anon 12\n{cached} {files}\n")
    assert list(device._free_in_containers(tmp_path, groups)) == [5000 - 200 + 20, 1000 - 300 + 50]
    assert list(device._free_in_containers(tmp_path, tmp_path / "nowhere")) == []
    assert 0 < device.free_memory(torch.device("cpu")) < 2**50
