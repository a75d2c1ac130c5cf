"""Batches that are read in one go are those that are read one by one."""

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from lightning_lowrank import FedAvg, FederatedLoop, FromIndices
from lightning_lowrank.data import Digits
from lightning_lowrank.data.images import TensorImages, collate_images
from lightning_lowrank.federated.data import blocks
from lightning_lowrank.federated.data.blocks import BlockReader, Request
from lightning_lowrank.federated.data.loader import Requests, SeededBatches, batch_reader
from lightning_lowrank.federated.randomness import seed_process
from tests.helpers import Module, trainer

IMAGES = torch.randn(100, 2, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(100)
SIZES = [8, 8, 8, 3, 3, 8, 8, 8, 8, 8, 1, 16]
KINDS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda rows: IMAGES[rows],
    "list": lambda rows: [IMAGES[rows], LABELS[rows]],
    "tuple": lambda rows: (IMAGES[rows], LABELS[rows]),
    "dictionary": lambda rows: {"image": IMAGES[rows], "label": LABELS[rows]},
}


def requests() -> list[Request]:
    draws = np.random.default_rng(0)
    return [Request(draws.choice(100, size, replace=False), seed=number) for number, size in enumerate(SIZES)]


def read(kind: str, calls: list[int]) -> Callable[[Request], Any]:
    def read_one(request: Request) -> Any:
        calls.append(len(request.indices))
        return KINDS[kind](torch.from_numpy(request.indices))

    return read_one


def assert_same(first: Any, second: Any) -> None:
    assert type(first) is type(second)
    if isinstance(first, Tensor):
        assert torch.equal(first, second)
        assert first.stride() == second.stride()
        assert first.data_ptr() % 64 == 0 or not first.is_floating_point()
    else:
        keys = first if isinstance(first, dict) else range(len(first))
        assert len(first) == len(second)
        for key in keys:
            assert_same(first[key], second[key])


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_hold_the_batches_that_are_read_one_by_one(kind):
    calls: list[int] = []
    found = list(BlockReader(read(kind, calls))(requests()))
    assert len(calls) < len(SIZES)
    assert sum(calls) == sum(SIZES)
    for batch, expected in zip(found, map(read(kind, []), requests()), strict=True):
        assert_same(batch, expected)


def test_a_block_is_no_larger_than_its_limit(monkeypatch):
    calls: list[int] = []
    monkeypatch.setattr(blocks, "_BYTES", 3 * 8 * IMAGES[0].nbytes)
    list(BlockReader(read("tensor", calls))([Request(np.arange(8), 0)] * 8))
    assert calls == [8, 24, 24, 8]


def test_batches_of_a_block_are_changed_in_place_each_for_itself():
    first, second, third = BlockReader(read("tensor", []))([Request(np.arange(8), 0)] * 3)
    weight = torch.ones(8, requires_grad=True)
    product = (second * weight).sum()
    third.add_(1)
    product.backward()
    assert torch.equal(first, second)
    assert torch.equal(third, first + 1)


UNSUITABLE: dict[str, Callable[[Tensor], Any]] = {
    "parts that begin elsewhere than memory of their own": lambda rows: IMAGES[rows, :, :5],
    "no tensor in the batch": lambda rows: [IMAGES[rows], "text"],
    "a number for all": lambda rows: [IMAGES[rows], torch.tensor(3)],
    "gradients": lambda rows: IMAGES.clone().requires_grad_()[rows],
}


@pytest.mark.parametrize("why", UNSUITABLE)
def test_what_cannot_be_cut_is_read_one_by_one(why):
    read_one = lambda request: UNSUITABLE[why](torch.from_numpy(request.indices))  # noqa: E731
    wanted = [Request(np.arange(start, start + 7), 0) for start in range(0, 70, 7)]
    for batch, expected in zip(BlockReader(read_one)(wanted), map(read_one, wanted), strict=True):
        for part, other in zip(batch, expected, strict=True):
            assert type(part) is type(other)
            assert torch.equal(part, other) if isinstance(part, Tensor) else part == other


def test_a_batch_that_cannot_be_read_fails_in_its_place():
    def read_one(request: Request) -> Tensor:
        if 50 in request.indices:
            raise OSError("no such sample")
        return IMAGES[torch.from_numpy(request.indices)]

    found = BlockReader(read_one)(Request(np.arange(start, start + 8), 0) for start in range(0, 80, 8))
    for start in range(0, 48, 8):
        assert torch.equal(next(found), IMAGES[start : start + 8])
    with pytest.raises(OSError, match="no such sample"):
        next(found)


def through_loader(dataset: Any, collate: Any = None) -> tuple[list[Any], list[Any]]:
    loader = DataLoader(dataset, batch_size=8, collate_fn=collate)
    batches = SeededBatches(dataset, loader.collate_fn)
    return list(batch_reader(loader, batches, requests())()), list(map(batches.__getitems__, requests()))


def test_tensors_in_memory_and_images_are_read_in_blocks(monkeypatch):
    made = []
    monkeypatch.setattr(blocks, "_cut", lambda *arguments: made.append(1) or _CUT(*arguments))
    pixels = torch.randint(256, (100, 1, 8, 8), dtype=torch.uint8)
    for dataset, collate in (
        (TensorDataset(IMAGES, LABELS), None),
        (TensorImages(pixels, LABELS, [0.5], [0.25]), collate_images),
    ):
        made.clear()
        for batch, expected in zip(*through_loader(dataset, collate), strict=True):
            assert_same(batch, expected)
        assert made


_CUT = blocks._cut


def test_what_draws_or_pads_is_never_read_in_blocks(monkeypatch):
    class Padded(TensorDataset):
        deterministic = True

    monkeypatch.setattr(blocks, "_cut", lambda *arguments: pytest.fail("a block"))
    pads = lambda samples: torch.stack([image for image, _ in samples])[..., : int(max(y for _, y in samples))]  # noqa: E731
    pads.deterministic = True  # type: ignore[attr-defined]
    augmented = Digits(augment=True)
    augmented.setup("fit")
    for dataset, collate in ((Padded(IMAGES, LABELS), pads), (augmented.train_set, collate_images)):
        for batch, expected in zip(*through_loader(dataset, collate), strict=True):
            assert torch.equal(batch, expected) if isinstance(batch, Tensor) else torch.equal(batch[0], expected[0])


def test_rows_of_tensors_are_gathered_through_subsets_as_the_dataset_gives_them():
    pixels = torch.randint(256, (100, 1, 8, 8), dtype=torch.uint8)
    images = TensorImages(pixels, LABELS, [0.5], [0.25])
    augmented = TensorImages(pixels, LABELS, [0.5], [0.25], crop_padding=2, mirror=True)
    for dataset, collate in (
        (Subset(TensorDataset(IMAGES, LABELS), range(99, 9, -1)), default_collate),
        (Subset(images, range(10, 100)), default_collate),
        (Subset(Subset(images, range(5, 100)), range(90)), collate_images),
        (Subset(augmented, range(10, 100)), collate_images),
    ):
        for request in (Request(np.array([3, 80, 3, 0, 41]), seed=7), Request(np.array([5]), seed=8)):
            found = SeededBatches(dataset, collate).__getitems__(request)
            seed_process(request.seed)
            expected = collate(dataset.__getitems__(request.indices.tolist()))
            assert_same(found, expected)


@pytest.mark.parametrize("wanted", ["auto", True, "round"])
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


def test_images_of_a_subset_are_read_in_blocks():
    images = TensorImages(torch.randint(256, (100, 1, 8, 8), dtype=torch.uint8), LABELS, [0.5], [0.25])
    assert SeededBatches(Subset(images, range(90)), collate_images)._in_blocks


@pytest.mark.parametrize("of", ["tensors", "images", "own numbers"])
def test_clients_that_step_together_read_in_blocks_what_they_read_step_by_step(of, monkeypatch):
    def numbered(samples: Any) -> Any:
        return [*collate_images(samples), "no rows"]

    numbered.deterministic = numbered.sample_by_sample = True  # type: ignore[attr-defined]
    images = TensorImages(torch.randint(256, (100, 1, 8, 8), dtype=torch.uint8), LABELS, [0.5], [0.25])
    dataset = TensorDataset(IMAGES, LABELS) if of == "tensors" else images
    collate = {"tensors": default_collate, "images": collate_images, "own numbers": numbered}[of]
    batches = SeededBatches(dataset, collate)
    draws = np.random.default_rng(0)
    uneven = [[8, 8, 8], [8, 8, 8], [8, 3, 8], [8, 8], [8, 8], [3, 8], [8], [8], [8], [8], [1]]
    steps = [Requests(Request(draws.choice(100, size), seed=0) for size in sizes) for sizes in uneven]
    expected = [batches.__getitems__(step) for step in steps]
    reads = []
    one = batches._read
    monkeypatch.setattr(batches, "_read", lambda request: reads.append(1) or one(request))
    found = list(batches.read_stacked(steps))
    assert len(found) == len(expected)
    assert of == "own numbers" or len(reads) < sum(len(set(sizes)) for sizes in uneven)
    for parts, alone in zip(found, expected, strict=True):
        assert [places.numbers for places, _ in parts] == [places.numbers for places, _ in alone]
        for (_, batch), (_, same) in zip(parts, alone, strict=True):
            assert all(map(torch.equal, batch[:2], same[:2]))


def digits(samples: int = 40, **arguments: int) -> TensorImages:
    pixels = torch.randint(256, (samples, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return TensorImages(pixels, torch.arange(samples) % 10, [0.3], [0.7], **arguments)


def read_all(images: TensorImages, times: int = 3) -> Tensor:
    """Read all samples several times; return those of the last time."""
    batches = SeededBatches(images, collate_images)
    for _ in range(times):
        batches.begin()
        found = batches.__getitems__(Request(np.arange(len(images))[::-1].copy(), seed=0))[0]
    return found.flip(0)


def as_fetched(images: TensorImages) -> Tensor:
    return images.images.float().div(images.pixel_max).sub(images.mean).div(images.std)


def keeps(images: TensorImages) -> bool:
    return images.normalised.of(images, 0) is not None


def test_a_loader_reads_what_is_kept():
    images = digits()
    loader = DataLoader(images, 16, collate_fn=collate_images)
    for kept in (False, True, True):
        batches = list(loader)
        assert torch.equal(torch.cat([inputs for inputs, _ in batches]), as_fetched(images))
        assert keeps(images) is kept
        # A step may write into its batch.
        for inputs, _ in batches:
            inputs.zero_()
    images.images[3] = 255 - images.images[3]
    assert torch.equal(next(iter(loader))[0], as_fetched(images)[:16])


def test_images_are_kept_normalised_once_as_many_have_been_read_as_there_are():
    images = digits()
    expected = as_fetched(images)
    assert torch.equal(read_all(images, times=1), expected)
    assert not keeps(images)
    assert torch.equal(read_all(images, times=1), expected)
    assert keeps(images)
    found = read_all(images, times=1)
    assert torch.equal(found, expected)
    # A step may write into its batch.
    found.zero_()
    assert torch.equal(read_all(images), expected)
    assert not keeps(copy.deepcopy(images))


@pytest.mark.parametrize("change", ["pixels", "other pixels", "mean", "other std", "pixel_max"])
def test_kept_images_are_those_of_the_pixels_and_constants_that_they_are_read_with(change):
    images = digits()
    before = read_all(images)
    assert keeps(images)
    if change == "pixels":
        images.images[3] = 255 - images.images[3]
    elif change == "other pixels":
        images.images = 255 - images.images
    elif change == "mean":
        images.mean += 0.1
    elif change == "other std":
        images.std = images.std * 2
    else:
        images.pixel_max = 128
    expected = as_fetched(images)
    assert not torch.equal(expected, before)
    assert torch.equal(read_all(images), expected)


def test_images_are_not_kept_where_they_are_drawn_or_take_too_much_memory(monkeypatch):
    drawn = digits(mirror=True)
    read_all(drawn)
    assert not keeps(drawn)
    images = digits()
    monkeypatch.setattr("lightning_lowrank.data.images._MOST_KEPT", 4 * images.images.numel() - 1)
    expected = as_fetched(images)
    assert torch.equal(read_all(images), expected)
    assert not keeps(images)
