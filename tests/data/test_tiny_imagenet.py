import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torchvision import transforms

from lightning_lowrank.data import TinyImageNet, tiny_imagenet
from tests.data.helpers import jpeg, write_tiny_imagenet


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


@pytest.mark.slow
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
    with pytest.raises(MisconfigurationException, match="TinyImageNet"):
        TinyImageNet(str(root)).prepare_data()
    assert no_network[0][0] == "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
    assert [path.name for path in root.iterdir()] == ["tiny-imagenet-200.zip"]


@pytest.mark.slow
def test_an_unpacking_that_fails_leaves_nothing(tiny_imagenet_archive, monkeypatch):
    def fail(archive, folder, *arguments):
        write_tiny_imagenet(Path(folder))
        raise OSError("no space left on device")

    root, images = tiny_imagenet_archive
    with monkeypatch.context() as patch:
        patch.setattr(torchvision.datasets.utils, "extract_archive", fail)
        with pytest.raises(MisconfigurationException, match="TinyImageNet"):
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
        patch.setattr(tiny_imagenet, "save_file", fail)
        with pytest.raises(MisconfigurationException, match="TinyImageNet"):
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
        (lambda folder: (folder / "wnids.txt").write_text("n01\nn02\n"), r"wnids\.txt.*2.*8"),
        (lambda folder: shutil.rmtree(class_folder(folder)), r"no valid file for the classes n\d+\."),
        (lambda folder: (folder / "val" / "val_annotations.txt").unlink(), r"val_annotations\.txt"),
        (lambda folder: edit_annotations(folder, lambda text: ""), r"val_annotations\.txt"),
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
            r"n00052113_0\.JPEG.*2",
        ),
        (
            lambda folder: (folder / "val" / "images" / "val_3.JPEG").write_bytes(
                jpeg(np.zeros((48, 60, 3), dtype=np.uint8))[0]
            ),
            r"val_3\.JPEG.*60.*48",
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
