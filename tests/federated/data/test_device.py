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
from lightning_lowrank.federated.data import batches, device
from lightning_lowrank.federated.data.batches import SeededBatches, read_on_device
from lightning_lowrank.federated.data.device import DeviceData
from lightning_lowrank.federated.data.loader_checks import batches_of
from lightning_lowrank.federated.data.planner import RoundPlanner
from lightning_lowrank.federated.data.round_loader import RoundLoader
from lightning_lowrank.federated.data.tensor_rows import source_of
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


@pytest.mark.parametrize("chunk_size", [1, 4])
@pytest.mark.parametrize("name", DATASETS)
def test_batches_are_those_of_the_host(name, chunk_size, monkeypatch):
    dataset, collate = DATASETS[name]
    expected = read(dataset, collate, chunk_size, False)
    assert_equal(read(dataset, collate, chunk_size, True), expected)
    assert_equal(read(dataset, collate, chunk_size, True, position=3), expected[3:])
    monkeypatch.setattr(batches, "_STEPS_SENT", 5)
    assert_equal(read(dataset, collate, chunk_size, True), expected)


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_a_rounds_indices_and_draws_are_sent_at_once(chunk_size, monkeypatch):
    sent, send = [], batches.move_to_device

    def sending(tensor: Tensor, where: torch.device) -> Tensor:
        sent.append((tensor.dtype, tensor.shape[:-1]))
        return send(tensor, where)

    monkeypatch.setattr(batches, "move_to_device", sending)
    read(*DATASETS["subset of augmented images"], chunk_size, True)
    assert sent == [(torch.int64, ()), (torch.int64, (3,))]


def test_what_is_written_is_sent_again():
    tensors, data = [VALUES.clone(), LABELS.clone()], DeviceData(NoFit("meta"), True)
    copies = [data.copy_of(tensor) for tensor in tensors]
    assert data.copy_of(tensors[0]) is copies[0]
    tensors[0][3] += 1
    assert data.copy_of(tensors[0]) is not copies[0]
    assert data.copy_of(tensors[1]) is copies[1]


def test_where_samples_are_kept(monkeypatch):
    source = source_of(*DATASETS["tensors"][:1], default_collate)
    nbytes = VALUES.nbytes + LABELS.nbytes
    for free, kept in ((4 * nbytes, True), (4 * nbytes - 1, False)):
        monkeypatch.setattr(device, "free_memory", lambda _, free=free: free)
        assert DeviceData(NoFit("meta"), "auto").keeps(source) is kept
    assert DeviceData(NoFit("meta"), True).keeps(source)
    assert not DeviceData(NoFit("meta"), False).keeps(source)
    assert DeviceData(NoFit(), True).keeps(source)
    assert not DeviceData(NoFit(), "auto").keeps(source)
    assert not DeviceData(NoFit("meta"), "auto").keeps(source_of([1, 2], default_collate))
    there, owner = DeviceData(NoFit("meta"), "auto"), NoFit("meta")
    copies = [there.copy_of(tensor) for tensor in source.rows.tensors]
    assert len(copies) == 2
    assert there.keeps(source), "what is there already needs no more memory"
    owner.lightning_module.transfer_batch_to_device = lambda *arguments: None
    assert not DeviceData(owner, "auto").keeps(source, DATASETS["tensors"][0])
    with pytest.raises(MisconfigurationException, match=r"data_on_device=True: .*transfer_batch_to_device\(\) is over"):
        DeviceData(owner, True).keeps(source, DATASETS["tensors"][0])


def test_a_round_ahead_is_no_place_for_samples():
    with pytest.raises(MisconfigurationException, match=r"data_on_device .*True.*'round'"):
        FederatedLoop(Ditto(), data_on_device="round")


def test_other_ways_to_read_are_the_loaders_own():
    class Darker(TensorImages):
        def __getitems__(self, indices):
            return super().__getitems__(indices)

    assert source_of(Darker(PIXELS, LABELS, [0.1] * 3, [0.2] * 3), collate_images) is None
    assert source_of(images(), lambda samples: samples) is None
    assert source_of(TensorDataset(VALUES.clone().requires_grad_()), default_collate) is None
    assert source_of(Subset(TensorDataset(VALUES), ["a"]), default_collate) is None


def test_a_training_set_that_cannot_be_there_is_refused(tmp_path):
    loop = FederatedLoop(Ditto(), clients=3, data_on_device=True, summary=False)
    data = Data([(sample, int(label)) for sample, label in zip(*blobs().tensors, strict=True)])
    with pytest.raises(MisconfigurationException, match=r"data_on_device=True.* list .*: its samples are"):
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
    gathered = SeededBatches.gathered

    def counting(self: SeededBatches, requests: Any, data: DeviceData | None = None) -> Any:
        made.extend([] if data is None else [self.dataset])
        return gathered(self, requests, data)

    monkeypatch.setattr(SeededBatches, "gathered", counting)
    other, also = run(True)
    assert_same(other, values)
    assert_same(also, logged)
    # In each of two rounds: the batches of training, those of clients' own validation, and two of validation.
    # At the end: those of clients' own tests.
    assert len(made) == 2 * (1 + 1 + 2) + 1


VALIDATION = {
    "images": (images(), collate_images),
    "subset of images": (Subset(images(), CHOSEN[:99].tolist()), collate_images),
    "tensors": (TensorDataset(VALUES, LABELS), None),
}


@pytest.mark.parametrize("settings", [{}, {"pin_memory": True}, {"shuffle": True}, {"drop_last": True}], ids=str)
@pytest.mark.parametrize("name", VALIDATION)
def test_a_loader_of_validation_gathers_on_the_device(name, settings, monkeypatch):
    dataset, collate = VALIDATION[name]
    loader = DataLoader(dataset, batch_size=50, collate_fn=collate, **settings)

    def all_batches() -> list[Any]:
        torch.manual_seed(3)
        return [list(loader), torch.rand(2)]

    expected = all_batches()
    restore = read_on_device(loader, DeviceData(NoFit(), True))
    assert read_on_device(loader, DeviceData(NoFit(), True)) is None
    for owner, way in ((TensorImages, "__getitems__"), (TensorDataset, "__getitem__")):
        monkeypatch.setattr(owner, way, lambda *given: pytest.fail("read sample by sample"))
    assert_equal(all_batches(), expected)
    monkeypatch.undo()
    restore()
    assert_equal(all_batches(), expected)


AS_THE_LOADER = {
    "in main memory": (False, lambda: DataLoader(images(), 50)),
    "workers": (True, lambda: DataLoader(images(), 50, num_workers=1)),
    "no batches": (True, lambda: DataLoader(TensorDataset(LABELS), None, collate_fn=default_collate)),
    "draws": (True, lambda: DataLoader(images(mirror=True), 50)),
    "a collate function": (True, lambda: DataLoader(images(), 50, collate_fn=len)),
}


@pytest.mark.parametrize("kind", AS_THE_LOADER)
def test_other_loaders_of_validation_read_as_before(kind, monkeypatch):
    wanted, make = AS_THE_LOADER[kind]
    monkeypatch.setattr(SeededBatches, "gathered", lambda *given: pytest.fail("read on the device"))
    loader = make()
    read_on_device(loader, DeviceData(NoFit(), wanted))
    assert len(list(loader)) == len(loader)
