import pickle
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
import torchvision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torchvision import transforms

from lightning_lowrank.data import CIFAR10, CIFAR100, MNIST, SVHN, FashionMNIST, TinyImageNet
from tests.data.helpers import write_tiny_imagenet

REAL_DATA = Path(__file__).parents[3] / "shared" / "data"
TRAIN_SAMPLES, TEST_SAMPLES = 40, 20


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
    with pytest.raises(MisconfigurationException, match="download=True") as caught:
        data.setup("fit")
    assert not no_network
    assert str(tmp_path) in str(caught.value)
    assert "set download=True" in str(caught.value)
    with pytest.raises(MisconfigurationException, match="no route to host") as caught:
        datamodule_class(root=str(tmp_path)).prepare_data()
    assert no_network
    assert "network connection" in str(caught.value)


@pytest.mark.parametrize("datamodule_class", [MNIST, FashionMNIST])
@pytest.mark.slow
@pytest.mark.nightly
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
