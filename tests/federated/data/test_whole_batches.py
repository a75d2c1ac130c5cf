"""Batches read in one piece are those of the loader, bit for bit."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, SequentialSampler, Subset, TensorDataset, default_collate

from lightning_lowrank.data.images import TensorImages, collate_images
from lightning_lowrank.federated.data import whole_batches
from lightning_lowrank.federated.data.whole_batches import WholeBatches
from tests.helpers import draw


class Squares(Dataset):
    """Counts what is read of it."""

    deterministic = True

    def __init__(self, make: Any = lambda index: torch.tensor([float(index), index**2])) -> None:
        self.make = make
        self.read: list[int] = []

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.make(index)


class Shifted(TensorDataset):
    def __getitem__(self, index):
        return tuple(tensor + 1 for tensor in super().__getitem__(index))


def of_tensors() -> TensorDataset:
    return TensorDataset(draw(11, 2, 3), torch.arange(11), draw(11) > 0, draw(11, 2, seed=1).to(torch.bfloat16))


def of_images(**arguments: Any) -> TensorImages:
    pixels = (255 * torch.rand(11, 1, 4, 4, generator=torch.Generator().manual_seed(2))).to(torch.uint8)
    return TensorImages(pixels, torch.arange(11), mean=[0.3], std=[0.2], **arguments)


def reversed_collate(samples: list[Any]) -> Any:
    return default_collate(samples[::-1])


WHOLE = {
    "tensors": lambda: DataLoader(of_tensors(), batch_size=4),
    "one batch": lambda: DataLoader(of_tensors(), batch_size=20),
    "dropped": lambda: DataLoader(of_tensors(), batch_size=4, drop_last=True),
    "subset": lambda: DataLoader(Subset(of_tensors(), [9, 1, 1, 4, 3]), batch_size=2),
    "subset of a subset": lambda: DataLoader(Subset(Subset(of_tensors(), torch.arange(10, 0, -1)), range(3, 8)), 3),
    "images": lambda: DataLoader(of_images(), batch_size=4, collate_fn=collate_images),
    "subset of images": lambda: DataLoader(Subset(of_images(), [9, 1, 1, 4, 3]), 2, collate_fn=collate_images),
    "deterministic": lambda: DataLoader(Squares(), batch_size=4),
    "dictionaries": lambda: DataLoader(Squares(lambda index: {"a": draw(3, seed=index), "b": index}), batch_size=4),
    "numbers": lambda: DataLoader(Squares(float), batch_size=4),
    "texts as well": lambda: DataLoader(Squares(lambda index: (draw(3, seed=index), str(index))), batch_size=4),
}
AS_THE_LOADER = {
    "shuffled": lambda: DataLoader(of_tensors(), batch_size=4, shuffle=True),
    "workers": lambda: DataLoader(of_tensors(), batch_size=4, num_workers=1),
    "a collate function": lambda: DataLoader(of_tensors(), batch_size=4, collate_fn=reversed_collate),
    "a sampler": lambda: DataLoader(of_tensors(), batch_size=4, sampler=SequentialSampler(range(5))),
    "a batch sampler": lambda: DataLoader(of_tensors(), batch_sampler=[[3, 1], [2]]),
    "no batches": lambda: DataLoader(of_tensors(), batch_size=None),
    "a kind of tensors": lambda: DataLoader(Shifted(*of_tensors().tensors), batch_size=4),
    "channels last": lambda: DataLoader(TensorDataset(draw(11, 3, 2, 2).to(memory_format=torch.channels_last)), 4),
    "gradients": lambda: DataLoader(TensorDataset(draw(11, 3).requires_grad_()), 4),
    "augmented": lambda: DataLoader(of_images(crop_padding=1), batch_size=4, collate_fn=collate_images),
    "a list": lambda: [1, 2],
}


def form(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist(), batch.dtype, batch.stride(), batch.is_inference()
    if isinstance(batch, dict):
        return {name: form(part) for name, part in batch.items()}
    return type(batch), [form(part) for part in batch] if isinstance(batch, list) else batch


def read(loader: Any, spoil: bool = False) -> list[Any]:
    found = []
    torch.manual_seed(1)
    with torch.inference_mode():
        for batch in loader:
            found.append(form(batch))
            for part in (batch.values() if isinstance(batch, dict) else batch) if spoil else ():
                if isinstance(part, torch.Tensor):
                    part.zero_()
    return [*found, torch.rand(()).item()]


@pytest.mark.parametrize("kind", WHOLE)
def test_batches_are_those_of_the_loader(kind):
    loader, whole = WHOLE[kind](), WholeBatches()
    expected = read(WHOLE[kind]())
    for _ in range(3):
        restore = whole.begin(loader)
        assert "_get_iterator" in vars(loader)
        assert read(loader, spoil=True) == expected
        restore()
        assert "_get_iterator" not in vars(loader)
    assert read(loader) == expected


@pytest.mark.parametrize("kind", AS_THE_LOADER)
def test_other_loaders_stay_as_they_are(kind):
    loader = AS_THE_LOADER[kind]()
    restore = WholeBatches().begin(loader)
    assert "_get_iterator" not in getattr(loader, "__dict__", {})
    restore()


def test_deterministic_batches_are_read_once():
    dataset = Squares()
    loader, whole = DataLoader(dataset, batch_size=4), WholeBatches()
    for _ in range(3):
        restore = whole.begin(loader)
        read(loader)
        restore()
    assert dataset.read == list(range(11))
    dataset.make = lambda index: torch.tensor([index])
    whole.begin(loader)
    assert read(loader) == read(DataLoader(Squares(dataset.make), batch_size=4))


def test_no_more_is_kept_than_the_limit(monkeypatch):
    monkeypatch.setattr(whole_batches, "_KEPT_BYTES", 2 * 4 * 8)
    dataset = Squares()
    loader = DataLoader(dataset, batch_size=4)
    WholeBatches().begin(loader)
    read(loader)
    read(loader)
    assert dataset.read == [*range(11), *range(8, 11)]


def test_batches_of_tensors_in_one_memory_are_not_kept():
    def twice(samples: list[Any]) -> Any:
        batch = default_collate(samples)
        return [batch, batch[:, :1]]

    twice.deterministic = True
    dataset = Squares()
    loader = DataLoader(dataset, batch_size=11, collate_fn=twice)
    WholeBatches().begin(loader)
    read(loader)
    read(loader)
    assert dataset.read == 2 * list(range(11))


def test_what_is_kept_goes_with_the_loader():
    whole = WholeBatches()
    loader = DataLoader(Squares(), batch_size=4)
    restore = whole.begin(loader)
    read(loader)
    restore()
    gone = weakref.ref(loader)
    del loader, restore
    gc.collect()
    assert gone() is None
