"""Batches are those of their samples and seeds, read one by one, together, and through workers."""

import multiprocessing
import traceback
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from lightning_lowrank import DifferentialPrivacy, FedAvg, FederatedLoop, FromIndices
from lightning_lowrank.data.images import TensorImages, collate_images
from lightning_lowrank.federated.data.batches import BatchReader, Request, Requests, SeededBatches, batch_of
from lightning_lowrank.federated.randomness import seed_process
from tests.grids import daily
from tests.helpers import Module, trainer

IMAGES = torch.randn(100, 2, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(100)
PIXELS = torch.randint(256, (100, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
UNEVEN = [[8, 8, 8], [8, 8, 8], [8, 3, 8], [8, 8], [3, 8], [8], [1]]


def images(**arguments: Any) -> TensorImages:
    return TensorImages(PIXELS, LABELS, [0.5], [0.25], **arguments)


class Padded(Dataset):
    """Texts of several lengths."""

    deterministic = True

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((1 + index % 5,), index)


def pad(samples: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def pad_alike(samples: list[Tensor]) -> Tensor:
    return pad(samples)


pad_alike.deterministic = True  # type: ignore[attr-defined]


def numbered(samples: Any) -> list[Any]:
    return [*collate_images(samples), "no rows"]


numbered.deterministic = True  # type: ignore[attr-defined]
KINDS = {
    "tensors": (TensorDataset(IMAGES, LABELS), default_collate),
    "subset of tensors": (Subset(TensorDataset(IMAGES, LABELS), range(99, 9, -1)), default_collate),
    "images": (images(), collate_images),
    "augmented images": (images(crop_padding=2, mirror=True), collate_images),
    "a text in each batch": (images(), numbered),
    "padded": (Padded(), pad),
}


def assert_same(first: Any, second: Any) -> None:
    assert type(first) is type(second)
    if isinstance(first, Tensor):
        assert torch.equal(first, second)
        assert first.stride() == second.stride()
    elif isinstance(first, (list, tuple)):
        for one, other in zip(first, second, strict=True):
            assert_same(one, other)
    else:
        assert first == second


def steps(samples: int) -> list[Requests]:
    draws = np.random.default_rng(0)
    return [
        Requests(Request(draws.choice(samples, size), seed=97 * number + place) for place, size in enumerate(sizes))
        for number, sizes in enumerate(UNEVEN)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_clients_that_step_together_read_what_each_reads_alone(kind):
    dataset, collate = KINDS[kind]
    batches = SeededBatches(dataset, collate)
    for step in steps(len(dataset)):
        found: dict[int, Any] = {}
        for places, stacked in batches.__getitems__(step):
            for row, place in enumerate(places.numbers):
                found[place] = batch_of(stacked, row)
        assert sorted(found) == list(range(len(step)))
        for place, request in enumerate(step):
            assert_same(found[place], batches.__getitems__(request))


@pytest.mark.parametrize("kind", ["tensors", "augmented images"])
def test_a_batch_is_one_gather_of_each_tensor_also_for_clients_together(kind):
    gathered: list[int] = []

    class Counting(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            if function is Tensor.index_select:
                gathered.append(len(arguments[2]))
            return function(*arguments, **(keywords or {}))

    batches = SeededBatches(*KINDS[kind])
    with Counting():
        batches.__getitems__(Request(np.arange(5), seed=0))
        assert gathered == [5, 5]
        gathered.clear()
        batches.__getitems__(steps(100)[2])
        assert gathered == [16, 16, 3, 3]


def test_deterministic_texts_of_clients_together_are_padded_to_one_length():
    (step,) = [Requests([Request(np.array([0, 5]), 0), Request(np.array([4, 9]), 0)])]
    ((places, together),) = SeededBatches(Padded(), pad_alike).__getitems__(step)
    assert places.numbers == [0, 1]
    assert together.shape == (2, 2, 5)
    apart = SeededBatches(Padded(), pad).__getitems__(step)
    assert [(places.numbers, stacked.shape) for places, stacked in apart] == [([0], (1, 2, 1)), ([1], (1, 2, 5))]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("kind", ["tensors", "augmented images", "padded"])
def test_workers_and_the_process_itself_read_the_same_again_and_again(kind, stacked):
    dataset, collate = KINDS[kind]
    wanted = steps(len(dataset)) if stacked else [request for step in steps(len(dataset)) for request in step]
    found = []
    for workers in (0, 1):
        loader = DataLoader(dataset, batch_size=8, collate_fn=collate, num_workers=workers)
        reader = BatchReader(loader, lambda: wanted)
        for _ in range(2):
            read = list(reader.read())
            # Places have no equality.
            found.append([[part for _, part in batch] for batch in read] if stacked else read)
    for other in found[1:]:
        assert_same(other, found[0])


@pytest.mark.parametrize("crossing", [False, True])
def test_a_batch_that_cannot_be_read_fails_in_its_place(crossing):
    class Broken(Padded):
        def __getitem__(self, index: int) -> Tensor:
            if index == 50:
                raise OSError("no such sample")
            return torch.tensor(index)

    requests = [Request(np.arange(start, start + 8), 0) for start in range(0, 80, 8)]
    loader = DataLoader(Broken(), batch_size=8, num_workers=int(crossing))
    found = BatchReader(loader, lambda: requests).read()
    for start in range(0, 48, 8):
        assert torch.equal(next(found), torch.arange(start, start + 8))
    with pytest.raises(OSError, match="no such sample") as caught:
        next(found)
    # The worker ends at once if nothing refers to the iterator; a later test would wait for it.
    traceback.clear_frames(caught.tb)
    del found, caught


def test_rows_of_tensors_are_gathered_through_subsets_as_the_dataset_gives_them():
    plain, augmented = images(), images(crop_padding=2, mirror=True)
    for dataset, collate in (
        (Subset(TensorDataset(IMAGES, LABELS), range(99, 9, -1)), default_collate),
        (Subset(plain, range(10, 100)), default_collate),
        (Subset(Subset(plain, range(5, 100)), range(90)), collate_images),
        (Subset(augmented, range(10, 100)), collate_images),
    ):
        for request in (Request(np.array([3, 80, 3, 0, 41]), seed=7), Request(np.array([5]), seed=8)):
            found = SeededBatches(dataset, collate).__getitems__(request)
            seed_process(request.seed)
            expected = collate(dataset.__getitems__(request.indices.tolist()))
            assert_same(found, expected)


@pytest.mark.parametrize("wanted", ["auto", True])
def test_indices_of_a_subset_that_change_between_rounds_are_followed(tmp_path, wanted):
    seen: list[int] = []

    class Seeing(Module):
        def training_step(self, batch, batch_idx):
            seen.extend(batch[1].tolist())
            return super().training_step([batch[0], batch[1] % 3], batch_idx)

    class Swapping(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            subset.indices[:] = range(8, 16)

    subset = Subset(TensorDataset(torch.randn(16, 6), torch.arange(16)), list(range(8)))
    loop = FederatedLoop(FedAvg(), partition=FromIndices([range(4), range(4, 8)]), data_on_device=wanted, summary=False)
    module, loader = Seeing(), DataLoader(subset, batch_size=4)
    trainer(tmp_path, loop, Swapping(), max_epochs=2, limit_val_batches=0).fit(module, loader)
    assert sorted(seen[:8]) == list(range(8))
    assert sorted(seen[8:]) == list(range(8, 16))


class Failing(Module):
    def training_step(self, batch, batch_idx):
        if self.current_epoch:
            raise ValueError("the second round")
        return super().training_step(batch, batch_idx)


class Unreadable(TensorDataset):
    def __getitem__(self, index):
        if index == 9:
            raise OSError("no such sample")
        return super().__getitem__(index)

    __getitems__ = None


WITH_WORKERS: dict[str, Any] = {
    "alone": {},
    "together": {"execution": "vectorized"},
    "personal": {"personal_test": 0.2},
    "failing": {"on_client_error": "raise"},
    "unreadable": {},
    "private": {},
    "without rounds": None,
}


@daily("together-True", "alone-False", "unreadable-False", "failing-True")
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", WITH_WORKERS)
def test_a_fit_leaves_no_worker(tmp_path, kind, persistent):
    # A worker that the garbage collector has to stop takes it five seconds.
    before, settings = set(multiprocessing.active_children()), WITH_WORKERS[kind]
    common = {"clients": 4, "data_on_device": False, "summary": False}
    loop = [] if settings is None else [FederatedLoop(FedAvg(), **common, **settings)]
    private = [DifferentialPrivacy(noise_multiplier=1.0)] if kind in ("private", "without rounds") else []
    data = (Unreadable if kind == "unreadable" else TensorDataset)(torch.randn(32, 6), torch.arange(32) % 4)
    train, val = (DataLoader(data, batch_size=4, num_workers=1, persistent_workers=persistent) for _ in range(2))
    seen: list[Any] = []
    look = LambdaCallback(on_train_epoch_end=lambda *_: seen.extend(set(multiprocessing.active_children()) - before))
    fitted = trainer(tmp_path, *loop, *private, look, max_epochs=2)
    with pytest.raises(ValueError, match="the second round") if kind == "failing" else nullcontext():
        fitted.fit((Failing if kind == "failing" else Module)(), train, val if kind == "personal" else None)
    assert seen or kind == "unreadable"
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.slow
def test_a_reloaded_loader_leaves_no_worker(tmp_path):
    data = TensorDataset(torch.randn(32, 6), torch.arange(32) % 4)

    class Reloading(Module):
        def train_dataloader(self):
            return DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)

        def val_dataloader(self):
            return DataLoader(data, batch_size=4)

    before, counts = set(multiprocessing.active_children()), list[int]()
    children = multiprocessing.active_children
    look = LambdaCallback(on_train_epoch_end=lambda *_: counts.append(len({*children()} - before)))
    loop = FederatedLoop(FedAvg(), clients=4, personal_test=0.2, data_on_device=False, summary=False)
    trainer(tmp_path, loop, look, max_epochs=4, reload_dataloaders_every_n_epochs=1).fit(Reloading())
    # One reads training batches, and one the clients' test samples.
    assert counts == [2] * 4
    assert set(multiprocessing.active_children()) <= before
