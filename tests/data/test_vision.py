import hashlib
import io
import pickle
import shutil
from itertools import product
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import scipy.io
import torch
import torch.nn.functional as F
import torchvision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision import transforms

from lightning_lowrank.data import (
    CIFAR10,
    CIFAR100,
    MNIST,
    SVHN,
    Digits,
    FashionMNIST,
    ImageBatch,
    TensorImages,
    TinyImageNet,
    VisionDataModule,
    collate_images,
    vision,
)

REAL_DATA = Path(__file__).parents[3] / "shared" / "data"
TRAIN_SAMPLES, TEST_SAMPLES = 40, 20


def random_images(samples=50, shape=(3, 6, 10), **kwargs):
    generator = torch.Generator().manual_seed(7)
    images = torch.randint(256, (samples, *shape), dtype=torch.uint8, generator=generator)
    targets = torch.randint(10, (samples,), generator=generator)
    mean, std = [0.1, 0.4, 0.7][: shape[0]], [0.2, 0.3, 0.5][: shape[0]]
    return TensorImages(images, targets, mean, std, **kwargs)


def all_samples(loader):
    batches = list(loader)
    return torch.cat([images for images, _ in batches]), torch.cat([targets for _, targets in batches])


def idx_file(values):
    header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    return header + values.tobytes()


def write_mnist(root, name, images, targets):
    folder = root / name / "raw"
    folder.mkdir(parents=True)
    for prefix, split in (("train", "train"), ("t10k", "test")):
        pixels = images[split].squeeze(1)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx_file(pixels))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx_file(targets[split].astype(np.uint8)))


def write_cifar(root, folder, label_key, meta, train_files, test_file, images, targets):
    def write(name, content):
        with open(root / folder / name, "wb") as file:
            pickle.dump(content, file)

    (root / folder).mkdir()
    pieces = np.array_split(np.arange(TRAIN_SAMPLES), len(train_files))
    for name, rows in zip(train_files, pieces, strict=True):
        pixels, labels = images["train"][rows], targets["train"][rows]
        write(name, {"data": pixels.reshape(len(rows), -1), label_key: labels.tolist()})
    write(test_file, {"data": images["test"].reshape(TEST_SAMPLES, -1), label_key: targets["test"].tolist()})
    write(meta[0], {meta[1]: [str(label) for label in range(100)]})


def write_svhn(root, images, targets):
    for split in ("train", "test"):
        labels = np.where(targets[split] == 0, 10, targets[split]).astype(np.uint8)[:, None]
        pixels = images[split].transpose(2, 3, 1, 0)
        scipy.io.savemat(root / f"{split}_32x32.mat", {"X": pixels, "y": labels})


def jpeg(pixels):
    """The bytes of a JPEG file of ``(height, width[, channels])``, and the pixels that they decode to."""
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "jpeg", quality=90)
    decoded = np.asarray(Image.open(content))
    return content.getvalue(), (decoded[None].repeat(3, 0) if decoded.ndim == 2 else decoded.transpose(2, 0, 1))


def write_tiny_imagenet(root, test_images=30):
    """Write the archive's folder, of each class one image in colour and a grey one; return pixels and targets."""
    generator = np.random.default_rng(5)
    folder = root / "tiny-imagenet-200"
    names = [f"n{number:08d}" for number in generator.permutation(10**6)[: TinyImageNet.num_classes]]
    (folder / "val" / "images").mkdir(parents=True)
    (folder / "wnids.txt").write_text("\n".join(names))
    pixels, targets = {"train": [], "test": []}, {"train": [], "test": []}

    def image(path, name, split, *channels):
        content, decoded = jpeg(generator.integers(0, 256, (64, 64, *channels), dtype=np.uint8))
        path.write_bytes(content)
        pixels[split].append(decoded)
        targets[split].append(sorted(names).index(name))

    for name in sorted(names):
        (folder / "train" / name / "images").mkdir(parents=True)
        (folder / "train" / name / f"{name}_boxes.txt").write_text(f"{name}_0.JPEG\t0\t0\t63\t63\n")
        image(folder / "train" / name / "images" / f"{name}_0.JPEG", name, "train", 3)
        image(folder / "train" / name / "images" / f"{name}_1.JPEG", name, "train")
    annotations = ""
    for number in range(test_images):
        name = names[-number % 7]
        image(folder / "val" / "images" / f"val_{number}.JPEG", name, "test", 3)
        annotations += f"val_{number}.JPEG\t{name}\t0\t32\t44\t62\n"
    (folder / "val" / "val_annotations.txt").write_text(annotations)
    return {split: np.stack(pixels[split]) for split in pixels}, targets


@pytest.fixture
def fake_root(tmp_path, monkeypatch):
    """Small files in torchvision's five on-disk formats, whose checksums are therefore not torchvision's."""

    def write(datamodule_class):
        generator = np.random.default_rng(3)
        channels, height, width = datamodule_class.image_shape
        sizes = {"train": TRAIN_SAMPLES, "test": TEST_SAMPLES}
        images = {
            split: generator.integers(0, 256, (size, channels, height, width), dtype=np.uint8)
            for split, size in sizes.items()
        }
        targets = {split: np.arange(size) % 10 * (datamodule_class.num_classes // 10) for split, size in sizes.items()}
        if datamodule_class in (MNIST, FashionMNIST):
            write_mnist(tmp_path, datamodule_class.__name__, images, targets)
        elif datamodule_class is CIFAR10:
            names = [f"data_batch_{number}" for number in range(1, 6)]
            meta = ("batches.meta", "label_names")
            write_cifar(tmp_path, "cifar-10-batches-py", "labels", meta, names, "test_batch", images, targets)
        elif datamodule_class is CIFAR100:
            meta = ("meta", "fine_label_names")
            write_cifar(tmp_path, "cifar-100-python", "fine_labels", meta, ["train"], "test", images, targets)
        elif datamodule_class is TinyImageNet:
            monkeypatch.setattr(TinyImageNet, "num_classes", 8)
            write_tiny_imagenet(tmp_path)
        else:
            write_svhn(tmp_path, images, targets)
        for module in (torchvision.datasets.cifar, torchvision.datasets.svhn, torchvision.datasets.utils):
            monkeypatch.setattr(module, "check_integrity", lambda path, md5=None: True)
        return str(tmp_path), images, targets

    return write


@pytest.fixture
def no_network(monkeypatch):
    attempts = []

    def refuse(*args, **kwargs):
        attempts.append(args)
        raise URLError("no route to host")

    for name in ("_get_redirect_url", "_urlretrieve"):
        monkeypatch.setattr(torchvision.datasets.utils, name, refuse)
    return attempts


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


def test_digits_splits_are_disjoint_complete_and_stratified():
    data = Digits(seed=3)
    data.setup()
    sets = [data.train_set, data.validation_set, data.test_set]
    assert sum(len(dataset) for dataset in sets) == 1797
    shares = torch.stack([dataset.targets.bincount(minlength=10) / len(dataset) for dataset in sets])
    assert (shares - shares.mean(0)).abs().max() < 0.005
    assert len(data.test_set) == pytest.approx(0.2 * 1797, abs=5)
    assert len(data.validation_set) == pytest.approx(0.15 * 0.8 * 1797, abs=5)

    from sklearn.datasets import load_digits

    original = torch.from_numpy(load_digits().images).flatten(1)
    merged = torch.cat([dataset.images for dataset in sets]).flatten(1).double()
    assert torch.equal(original.unique(dim=0), merged.unique(dim=0))
    assert torch.equal(original.sum(0), merged.sum(0))


def test_splits_depend_on_the_seed_and_nothing_else():
    first, second, other = Digits(seed=1), Digits(seed=1, batch_size=10), Digits(seed=2)
    for number, data in enumerate((first, second, other)):
        torch.manual_seed(number)
        data.setup()
    for name in ("train_set", "validation_set", "test_set"):
        assert torch.equal(getattr(first, name).images, getattr(second, name).images)
        assert not torch.equal(getattr(first, name).images, getattr(other, name).images)


def test_without_normalisation_pixels_are_from_0_to_1():
    data = Digits(normalize=False)
    data.setup()
    images = data.train_set.__getitems__(range(len(data.train_set))).images
    assert images.min() == 0
    assert images.max() == 1


def test_loaders_of_digits():
    data = Digits(batch_size=50, eval_batch_size=100, augment=True)
    data.setup()
    torch.manual_seed(0)
    train_batches = [targets for _, targets in data.train_dataloader()]
    assert {len(targets) for targets in train_batches[:-1]} == {50}
    assert not torch.equal(torch.cat(train_batches), data.train_set.targets)
    assert torch.equal(torch.cat(train_batches).bincount(), data.train_set.targets.bincount())
    for loader, dataset in (
        (data.val_dataloader(), data.validation_set),
        (data.test_dataloader(), data.test_set),
        (data.predict_dataloader(), data.test_set),
    ):
        images, targets = all_samples(loader)
        assert torch.equal(images, dataset.__getitems__(range(len(dataset))).images)
        assert torch.equal(targets, dataset.targets)
        assert loader.batch_size == 100
        assert not dataset.crop_padding
    assert data.train_set.crop_padding == 1
    assert not data.train_set.mirror


def test_worker_processes_serve_the_same_batches():
    here, workers = Digits(eval_batch_size=100), Digits(eval_batch_size=100, num_workers=2)
    for data in (here, workers):
        data.setup("test")
    expected, found = all_samples(here.test_dataloader()), all_samples(workers.test_dataloader())
    assert torch.equal(expected[0], found[0])
    assert torch.equal(expected[1], found[1])


class CountingDigits(Digits):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.loaded = []

    def load_images(self, train):
        self.loaded.append(train)
        return super().load_images(train)


@pytest.mark.parametrize(
    ("validation", "stage", "loaded"),
    [
        ("test", "fit", {True, False}),
        ("test", "validate", {False}),
        ("test", "test", {False}),
        ("test", None, {True, False}),
        (0.1, "fit", {True}),
        (0.1, "validate", {True}),
        (0.1, "predict", {False}),
        (0.1, None, {True, False}),
    ],
)
def test_setup_loads_what_the_stage_reads_once(validation, stage, loaded):
    data = CountingDigits(validation=validation)
    for _ in range(2):
        data.setup(stage)
    assert sorted(data.loaded) == sorted(loaded)
    loaders = {"fit": ["train", "val"], "validate": ["val"], "test": ["test"], "predict": ["predict"]}
    for name in loaders.get(stage, ["train", "val", "test", "predict"]):
        assert len(getattr(data, f"{name}_dataloader")()) > 0
    assert (data.validation_set is data.test_set) == (validation == "test")


def test_loader_before_setup_is_refused():
    with pytest.raises(MisconfigurationException, match=r"setup\('fit'\)"):
        Digits().train_dataloader()


def test_limit_samples_keeps_a_random_part_of_each_split():
    whole, part, again = Digits(), Digits(limit_samples=100), Digits(limit_samples=100)
    for data in (whole, part, again):
        data.setup()
    for name in ("train_set", "validation_set", "test_set"):
        kept = getattr(part, name)
        assert len(kept) == 100
        assert torch.equal(kept.images, getattr(again, name).images)
        assert len(kept.targets.unique()) == 10
        originals = {image.numpy().tobytes() for image in getattr(whole, name).images}
        assert all(image.numpy().tobytes() in originals for image in kept.images)
        assert not torch.equal(kept.images, getattr(whole, name).images[:100])
    unlimited = Digits(limit_samples=10_000)
    unlimited.setup("test")
    assert len(unlimited.test_set) == len(whole.test_set)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("batch_size", 0),
        ("eval_batch_size", -1),
        ("num_workers", -1),
        ("limit_samples", 0),
        ("validation", 0.0),
        ("validation", 1.0),
        ("validation", True),
        ("validation", "train"),
        ("validation", float("nan")),
        ("test_share", 1.5),
    ],
)
def test_arguments_out_of_range_are_refused(argument, value):
    with pytest.raises(MisconfigurationException, match=f"{argument} must be.*{value}"):
        Digits(**{argument: value})


@pytest.mark.parametrize("share", [1e-4, 1 - 1e-4])
def test_empty_splits_are_refused(share):
    with pytest.raises(MisconfigurationException, match="validation="):
        Digits(validation=share).setup("fit")
    with pytest.raises(MisconfigurationException, match="test_share="):
        Digits(test_share=share).setup("test" if share < 0.5 else "fit")


@pytest.mark.parametrize("datamodule_class", [MNIST, FashionMNIST, CIFAR10, CIFAR100, SVHN])
def test_torchvision_formats(datamodule_class, fake_root, no_network):
    root, images, targets = fake_root(datamodule_class)
    data = datamodule_class(root=root, augment=False)
    data.prepare_data()
    data.setup()
    assert not no_network
    for dataset, split in ((data.train_set, "train"), (data.test_set, "test")):
        assert dataset.images.shape[1:] == data.image_shape
        assert torch.equal(dataset.images, torch.from_numpy(images[split]))
        assert torch.equal(dataset.targets, torch.from_numpy(targets[split]))
        normalise = transforms.Normalize(data.mean, data.std)
        image, target = dataset[5]
        channels_last = images[split][5].transpose(1, 2, 0)
        assert torch.equal(image, normalise(transforms.functional.to_tensor(channels_last)))
        assert target == targets[split][5]


@pytest.mark.parametrize(
    ("datamodule_class", "augment", "crop_padding", "mirror"),
    [
        (CIFAR10, None, 4, True),
        (CIFAR100, None, 4, True),
        (CIFAR10, False, 0, False),
        (TinyImageNet, None, 4, True),
        (TinyImageNet, False, 0, False),
        (FashionMNIST, None, 0, False),
        (FashionMNIST, True, 4, True),
        (MNIST, True, 4, False),
        (SVHN, None, 0, False),
        (SVHN, True, 4, False),
    ],
)
def test_augmentation_of_each_data_set(datamodule_class, augment, crop_padding, mirror, fake_root):
    root, _, _ = fake_root(datamodule_class)
    arguments = {} if augment is None else {"augment": augment}
    data = datamodule_class(root=root, download=False, validation=0.5, **arguments)
    data.setup()
    assert (data.train_set.crop_padding, data.train_set.mirror) == (crop_padding, mirror)
    for dataset in (data.validation_set, data.test_set):
        assert (dataset.crop_padding, dataset.mirror) == (0, False)


@pytest.mark.parametrize("datamodule_class", [MNIST, FashionMNIST, CIFAR10, CIFAR100, SVHN, TinyImageNet])
def test_missing_files_name_the_folder_and_the_remedy(datamodule_class, tmp_path, no_network):
    data = datamodule_class(root=str(tmp_path), download=False)
    data.prepare_data()
    with pytest.raises(MisconfigurationException, match="not found") as caught:
        data.setup("fit")
    assert not no_network
    assert str(tmp_path) in str(caught.value)
    assert "set download=True" in str(caught.value)
    with pytest.raises(MisconfigurationException, match="no route to host") as caught:
        datamodule_class(root=str(tmp_path)).prepare_data()
    assert no_network
    assert "network connection" in str(caught.value)


@pytest.fixture
def few_classes(monkeypatch):
    monkeypatch.setattr(TinyImageNet, "num_classes", 8)


def test_tiny_imagenet_is_decoded_once(few_classes, tmp_path, no_network):
    images, targets = write_tiny_imagenet(tmp_path)
    TinyImageNet(str(tmp_path)).prepare_data()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny-imagenet-200", "tiny-imagenet-200.safetensors"]
    shutil.rmtree(tmp_path / "tiny-imagenet-200")
    data = TinyImageNet(str(tmp_path), augment=False)
    data.prepare_data()
    data.setup()
    assert not no_network
    for dataset, split in ((data.train_set, "train"), (data.test_set, "test")):
        assert torch.equal(dataset.images, torch.from_numpy(images[split]))
        assert dataset.targets.tolist() == targets[split]
    assert data.validation_set is data.test_set
    image, target = data.train_set[9]
    normalise = transforms.Normalize(data.mean, data.std)
    assert torch.equal(image, normalise(transforms.functional.to_tensor(images["train"][9].transpose(1, 2, 0))))
    assert target == 4


def test_tiny_imagenet_is_decoded_in_setup_where_nobody_prepared(few_classes, tmp_path, no_network):
    images, _ = write_tiny_imagenet(tmp_path)
    data = TinyImageNet(str(tmp_path), download=False)
    data.setup("validate")
    assert torch.equal(data.validation_set.images, torch.from_numpy(images["test"]))
    assert data.train_set is None
    assert (tmp_path / "tiny-imagenet-200.safetensors").is_file()


def test_tiny_imagenet_is_prepared_without_download_where_the_folder_is(few_classes, tmp_path, no_network):
    write_tiny_imagenet(tmp_path)
    TinyImageNet(str(tmp_path), download=False).prepare_data()
    assert (tmp_path / "tiny-imagenet-200.safetensors").is_file()


@pytest.fixture
def tiny_imagenet_archive(few_classes, tmp_path, monkeypatch):
    """The archive in a folder of its own, with the checksum that is looked for: as if it had been downloaded."""
    made = tmp_path / "made"
    images, _ = write_tiny_imagenet(made)
    root = tmp_path / "root"
    archive = Path(shutil.make_archive(str(root / "tiny-imagenet-200"), "zip", made, "tiny-imagenet-200"))
    monkeypatch.setattr(TinyImageNet, "md5", hashlib.md5(archive.read_bytes()).hexdigest())
    return root, images


def test_tiny_imagenet_is_unpacked(tiny_imagenet_archive, no_network):
    root, images = tiny_imagenet_archive
    data = TinyImageNet(str(root), augment=False)
    data.prepare_data()
    data.setup()
    assert not no_network
    assert torch.equal(data.train_set.images, torch.from_numpy(images["train"]))
    names = ["tiny-imagenet-200", "tiny-imagenet-200.safetensors", "tiny-imagenet-200.zip"]
    assert sorted(path.name for path in root.iterdir()) == names


def test_an_archive_with_another_checksum_is_not_unpacked(tiny_imagenet_archive, no_network, monkeypatch):
    root, _ = tiny_imagenet_archive
    monkeypatch.setattr(TinyImageNet, "md5", "0" * 32)
    with pytest.raises(MisconfigurationException, match="no route to host"):
        TinyImageNet(str(root)).prepare_data()
    assert no_network[0][0] == "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
    assert [path.name for path in root.iterdir()] == ["tiny-imagenet-200.zip"]


def test_an_unpacking_that_fails_leaves_nothing(tiny_imagenet_archive, monkeypatch):
    def fail(archive, folder, *arguments):
        write_tiny_imagenet(Path(folder))
        raise OSError("no space left on device")

    root, images = tiny_imagenet_archive
    with monkeypatch.context() as patch:
        patch.setattr(torchvision.datasets.utils, "extract_archive", fail)
        with pytest.raises(MisconfigurationException, match="no space left"):
            TinyImageNet(str(root)).prepare_data()
    assert [path.name for path in root.iterdir()] == ["tiny-imagenet-200.zip"]
    data = TinyImageNet(str(root))
    data.prepare_data()
    data.setup("test")
    assert torch.equal(data.test_set.images, torch.from_numpy(images["test"]))


def test_a_decoding_that_fails_leaves_nothing(few_classes, tmp_path, monkeypatch):
    def fail(tensors, path):
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    write_tiny_imagenet(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(vision, "save_file", fail)
        with pytest.raises(MisconfigurationException, match="no space left"):
            TinyImageNet(str(tmp_path)).prepare_data()
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-imagenet-200"]


def test_missing_tiny_imagenet_says_where_to_get_it(tmp_path):
    with pytest.raises(MisconfigurationException) as caught:
        TinyImageNet(str(tmp_path), download=False).setup("fit")
    assert "http://cs231n.stanford.edu/tiny-imagenet-200.zip" in str(caught.value)
    assert f"unpacked in {tmp_path}." in str(caught.value)


def class_folder(folder):
    return min((folder / "train").iterdir()) / "images"


def edit_annotations(folder, edit):
    path = folder / "val" / "val_annotations.txt"
    path.write_text(edit(path.read_text()))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "wnids.txt").unlink(), r"wnids\.txt"),
        (lambda folder: (folder / "wnids.txt").write_text("n01\nn02\n"), r"wnids\.txt.* names 2 classes, and not 8"),
        (lambda folder: shutil.rmtree(class_folder(folder)), r"train/n\d+/images holds no image"),
        (lambda folder: (folder / "val" / "val_annotations.txt").unlink(), r"val_annotations\.txt"),
        (lambda folder: edit_annotations(folder, lambda text: ""), r"val_annotations\.txt names no image"),
        (
            lambda folder: edit_annotations(folder, lambda text: text.replace("val_1.JPEG\tn", "val_1.JPEG\tm")),
            r"val_annotations\.txt, line 2: .*val_1\.JPEG.tm",
        ),
        (lambda folder: edit_annotations(folder, lambda text: text + "\n"), "line 31"),
        (lambda folder: (folder / "val" / "images" / "val_3.JPEG").unlink(), r"val_3\.JPEG"),
        (lambda folder: (folder / "val" / "images" / "val_3.JPEG").write_bytes(b"text"), r"val_3\.JPEG"),
        (
            lambda folder: next(class_folder(folder).iterdir()).write_bytes(
                next(class_folder(folder).iterdir()).read_bytes()[:-900]
            ),
            r"n\d+_\d\.JPEG: .*truncated",
        ),
        (
            lambda folder: (folder / "val" / "images" / "val_3.JPEG").write_bytes(
                jpeg(np.zeros((48, 60, 3), dtype=np.uint8))[0]
            ),
            r"val_3\.JPEG has 60×48 pixels, and not 64×64",
        ),
    ],
)
def test_incomplete_tiny_imagenet_is_refused(few_classes, spoil, message, tmp_path, no_network):
    write_tiny_imagenet(tmp_path)
    spoil(tmp_path / "tiny-imagenet-200")
    with pytest.raises(MisconfigurationException, match=message):
        TinyImageNet(str(tmp_path)).prepare_data()
    assert not no_network
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-imagenet-200"]


def test_damaged_file_of_decoded_images_is_refused(tmp_path):
    (tmp_path / "tiny-imagenet-200.safetensors").write_bytes(b"half")
    with pytest.raises(MisconfigurationException, match=r"tiny-imagenet-200\.safetensors is damaged, delete it"):
        TinyImageNet(str(tmp_path)).setup("test")


@pytest.mark.parametrize("datamodule_class", [MNIST, FashionMNIST])
def test_real_images(datamodule_class, no_network):
    if not (REAL_DATA / datamodule_class.__name__ / "raw").is_dir():
        pytest.skip(f"no {datamodule_class.__name__} files beside the repository")
    data = datamodule_class(root=str(REAL_DATA))
    data.prepare_data()
    data.setup()
    assert not no_network
    assert (len(data.train_set), len(data.test_set)) == (60_000, 10_000)
    assert data.train_set.targets.bincount().max() < 7_000
    pixels = data.train_set.images.double() / 255
    assert pixels.mean() == pytest.approx(data.mean[0], abs=1e-4)
    assert pixels.std() == pytest.approx(data.std[0], abs=1e-4)

    original = getattr(torchvision.datasets, datamodule_class.__name__)(
        str(REAL_DATA),
        train=False,
        transform=transforms.Compose([transforms.ToTensor(), transforms.Normalize(data.mean, data.std)]),
    )
    images, targets = next(iter(data.test_dataloader()))
    assert len(images) == 1024
    for index in range(0, 1024, 50):
        image, target = original[index]
        assert torch.equal(images[index], image)
        assert targets[index] == target


def test_constants_of_digits():
    data = Digits()
    pixels = torch.cat([data.load_images(train)[0] for train in (True, False)]).double() / 16
    assert pixels.mean() == pytest.approx(data.mean[0], abs=1e-4)
    assert pixels.std() == pytest.approx(data.std[0], abs=1e-4)


def test_a_new_data_set_needs_only_its_images():
    class Stripes(VisionDataModule):
        num_classes = 2
        image_shape = (1, 4, 4)
        mean = (0.5,)
        std = (0.5,)

        def load_images(self, train):
            targets = torch.arange(12 if train else 6) % 2
            return (targets * 255).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 4, 4), targets

    data = Stripes(validation=0.5, batch_size=6)
    data.setup()
    images, targets = next(iter(data.train_dataloader()))
    assert torch.equal(images.mean((1, 2, 3)), targets * 2.0 - 1)
    assert data.validation_set.targets.bincount().tolist() == [3, 3]
