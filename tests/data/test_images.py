import copy
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision import transforms

from lightning_lowrank.data import ImageBatch, TensorImages, collate_images
from lightning_lowrank.federated.data.batches import Request, SeededBatches
from tests.data.helpers import all_samples
from tests.grids import daily, nightly_except


def random_images(samples=50, shape=(3, 6, 10), **kwargs):
    generator = torch.Generator().manual_seed(7)
    images = torch.randint(256, (samples, *shape), dtype=torch.uint8, generator=generator)
    targets = torch.randint(10, (samples,), generator=generator)
    mean, std = [0.1, 0.4, 0.7][: shape[0]], [0.2, 0.3, 0.5][: shape[0]]
    return TensorImages(images, targets, mean, std, **kwargs)


def test_samples_equal_to_tensor_and_normalize_on_pil_images():
    dataset = random_images()
    pipeline = transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.1, 0.4, 0.7], [0.2, 0.3, 0.5])])
    for index in range(len(dataset)):
        image, target = dataset[index]
        pil_image = transforms.functional.to_pil_image(dataset.images[index])
        assert torch.equal(image, pipeline(pil_image))
        assert image.dtype == torch.float32
        assert target == dataset.targets[index]
        assert isinstance(target, int)


def test_pixel_max_is_full_intensity():
    pixels = torch.tensor([0, 8, 16], dtype=torch.uint8).view(1, 1, 1, 3)
    image, _ = TensorImages(pixels, torch.tensor([0]), [0.5], [0.25], pixel_max=16)[0]
    assert image.flatten().tolist() == [-2.0, 0.0, 2.0]


@nightly_except(
    "1-collate_images-0",
    "1-default_collate-0",
    "50-collate_images-2",
    "64-collate_images-0",
    "64-default_collate-2",
    "7-default_collate-2",
)
@daily()
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("collate_fn", [None, collate_images], ids=["default_collate", "collate_images"])
@pytest.mark.parametrize("batch_size", [1, 7, 50, 64])
def test_loaders_agree_with_single_samples(batch_size, collate_fn, num_workers):
    dataset = random_images()
    loader = DataLoader(dataset, batch_size, collate_fn=collate_fn, num_workers=num_workers)
    images, targets = all_samples(loader)
    assert torch.equal(images, torch.stack([dataset[index][0] for index in range(50)]))
    assert torch.equal(targets, torch.tensor([dataset[index][1] for index in range(50)]))
    assert targets.dtype == torch.long
    sizes = [len(targets) for _, targets in loader]
    assert sum(sizes) == 50
    assert all(size == batch_size for size in sizes[:-1])


def test_batches_are_lists_under_either_collate_function():
    dataset = random_images()
    ours = next(iter(DataLoader(dataset, 4, collate_fn=collate_images)))
    pytorchs = next(iter(DataLoader(dataset, 4)))
    assert type(ours) is type(pytorchs) is list


@pytest.mark.parametrize("collate_fn", [None, collate_images], ids=["default_collate", "collate_images"])
@pytest.mark.parametrize("as_type", [list, np.array, torch.tensor], ids=["list", "numpy", "tensor"])
def test_subsets_of_subsets(as_type, collate_fn):
    dataset = random_images()
    outer, inner = [40, 3, 17, 29, 8], [4, 0, 2]
    subset = Subset(Subset(dataset, as_type(outer)), as_type(inner))
    images, targets = all_samples(DataLoader(subset, 2, collate_fn=collate_fn))
    expected = [8, 40, 17]
    assert torch.equal(images, torch.stack([dataset[index][0] for index in expected]))
    assert torch.equal(targets, dataset.targets[expected])


def test_batched_gather_reaches_the_collate_function_whole():
    received = []

    def collate(samples):
        received.append(samples)
        return collate_images(samples)

    images, _ = next(iter(DataLoader(Subset(random_images(), range(10)), 5, collate_fn=collate)))
    assert isinstance(received[0], ImageBatch)
    assert images is received[0].images


def test_data_sets_without_batched_gather_still_collate():
    dataset = random_images(5)
    images, targets = all_samples(DataLoader(ConcatDataset([dataset, dataset]), 4, collate_fn=collate_images))
    assert torch.equal(images[5:], images[:5])
    assert torch.equal(targets, dataset.targets.repeat(2))


def test_indexing_from_the_end_and_out_of_range():
    dataset = random_images(5)
    assert torch.equal(dataset[-1][0], dataset[4][0])
    for index in (5, -6):
        with pytest.raises(IndexError):
            dataset[index]


def test_fetching_leaves_the_stored_images_alone():
    dataset = random_images(crop_padding=2, mirror=True)
    before = dataset.images.clone()
    dataset.__getitems__(list(range(50)))
    assert torch.equal(dataset.images, before)


def crops_of(image, padding):
    """Every crop of one raw image, by (rows skipped, columns skipped, mirrored)."""
    _, height, width = image.shape
    padded = F.pad(image, (padding,) * 4)
    for top, left in product(range(2 * padding + 1), repeat=2):
        crop = padded[:, top : top + height, left : left + width]
        yield (top, left, False), crop
        yield (top, left, True), crop.flip(-1)


def test_every_augmented_image_is_a_padded_crop_and_all_crops_occur():
    dataset = random_images(10, crop_padding=2, mirror=True)
    plain = random_images(10)
    crops = {}
    for index in range(10):
        for place, crop in crops_of(dataset.images[index], 2):
            sample = TensorImages(crop[None], torch.tensor([0]), [0.1, 0.4, 0.7], [0.2, 0.3, 0.5])[0][0]
            crops[index, sample.numpy().tobytes()] = place
    torch.manual_seed(0)
    drawn = [
        crops[index, image.contiguous().numpy().tobytes()]
        for _ in range(200)
        for index, (image, _) in enumerate(dataset.__getitems__(list(range(10))))
    ]
    assert set(drawn) == set(product(range(5), range(5), (False, True)))
    places = torch.tensor([[top, left, mirrored] for top, left, mirrored in drawn], dtype=torch.float)
    expected = torch.tensor([2.0, 2.0, 0.5])
    deviation = torch.tensor([2.0, 2.0, 0.25]).sqrt() / len(drawn) ** 0.5
    assert ((places.mean(0) - expected).abs() < 4 * deviation).all()
    assert torch.corrcoef(places.T).triu(1).abs().max() < 0.1
    assert torch.equal(dataset.targets, plain.targets)


@pytest.mark.parametrize(("crop_padding", "mirror"), [(3, False), (0, True)])
def test_crop_and_mirror_are_independent_options(crop_padding, mirror):
    dataset = random_images(20, crop_padding=crop_padding, mirror=mirror)
    torch.manual_seed(1)
    drawn = set()
    for index, (image, _) in enumerate(dataset.__getitems__(list(range(20)))):
        places = [
            place
            for place, crop in crops_of(dataset.images[index], crop_padding)
            if (mirror or not place[2])
            and torch.equal(TensorImages(crop[None], torch.tensor([0]), [0.1, 0.4, 0.7], [0.2, 0.3, 0.5])[0][0], image)
        ]
        assert len(places) == 1
        drawn.add(places[0])
    assert len(drawn) > 1


def test_augmentation_follows_the_global_generator():
    dataset = random_images(crop_padding=2, mirror=True)
    rows = list(range(50))
    torch.manual_seed(5)
    first, second = dataset.__getitems__(rows).images, dataset.__getitems__(rows).images
    torch.manual_seed(5)
    again = dataset.__getitems__(rows).images
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_without_augmentation_no_random_number_is_drawn():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    random_images().__getitems__([1, 2])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": torch.zeros(4, 1, 8, 8)}, "uint8"),
        ({"images": torch.zeros(4, 8, 8, dtype=torch.uint8)}, "uint8"),
        ({"targets": torch.zeros(3)}, r"shape \(4,\)"),
        ({"mean": [0.1, 0.2]}, "1 values"),
        ({"std": [0.0]}, "positive"),
        ({"pixel_max": 0}, "positive"),
        ({"crop_padding": -1}, "crop_padding"),
    ],
)
def test_tensor_images_refuses_what_does_not_fit(change, message):
    arguments = {
        "images": torch.zeros(4, 1, 8, 8, dtype=torch.uint8),
        "targets": torch.zeros(4),
        "mean": [0.1],
        "std": [0.2],
    }
    with pytest.raises(ValueError, match=message):
        TensorImages(**{**arguments, **change})


def digits(samples: int = 40, **arguments: int) -> TensorImages:
    pixels = torch.randint(256, (samples, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return TensorImages(pixels, torch.arange(samples) % 10, [0.3], [0.7], **arguments)


def read_all(images: TensorImages, times: int = 3) -> torch.Tensor:
    """Read all samples several times; return those of the last time."""
    batches = SeededBatches(images, collate_images)
    for _ in range(times):
        batches.begin()
        found = batches.__getitems__(Request(np.arange(len(images))[::-1].copy(), seed=0))[0]
    return found.flip(0)


def as_fetched(images: TensorImages) -> torch.Tensor:
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


@pytest.mark.parametrize("change", ["mean in place", "other std", "pixel_max", "nothing"])
def test_constants_on_a_device_are_those_of_the_images(change):
    images, place = digits(), torch.device("cpu")
    before = images.normalised.constants(images, place)
    if change == "mean in place":
        images.mean += 0.1
    elif change == "other std":
        images.std = images.std * 2
    elif change == "pixel_max":
        images.pixel_max = 128
    after = images.normalised.constants(images, place)
    assert [float(value) for value in after] == [float(images.pixel_max), float(images.mean), float(images.std)]
    assert (after is before) == (change == "nothing")
