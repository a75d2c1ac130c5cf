"""Data of one's own: a folder of images, and arrays."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from PIL import Image
from torch import nn

from lightning_lowrank import ByKey, FedAvg, FederatedLoop
from lightning_lowrank.data import Arrays, ImageFolder
from tests.data.helpers import all_samples, broken_png
from tests.helpers import Module, fit, trainer


def write(folder, name, pixels):
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(folder / name)


@pytest.fixture
def images(tmp_path):
    """Ten images in colour of each of three classes; return the folder and the pixels by file."""
    draws = np.random.default_rng(0)
    found = {}
    for label in ("ant", "bee", "cow"):
        for number in range(10):
            pixels = draws.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            name = f"{'ada' if number < 4 else 'ben'}_{number}.png"
            write(tmp_path / "own" / label, name, pixels)
            found[f"{label}/{name}"] = pixels
    return tmp_path / "own", found


def assert_holds(dataset, pixels, classes=("ant", "bee", "cow")):
    for row, file in enumerate(dataset.files):
        assert np.array_equal(dataset.images[row].numpy(), pixels[file].transpose(2, 0, 1))
        assert classes[dataset.targets[row]] == Path(file).parts[-2]


@pytest.mark.parametrize("memory_limit", [2**30, 0])
def test_a_folder_of_classes_is_divided_by_class(images, memory_limit):
    folder, pixels = images
    data = ImageFolder(str(folder), test_share=0.2, validation=0.25, memory_limit=memory_limit)
    data.setup()
    sets = data.train_set, data.validation_set, data.test_set
    assert [each.targets.bincount().tolist() for each in sets] == [[6] * 3, [2] * 3, [2] * 3]
    assert sorted(name for each in sets for name in each.files) == sorted(pixels)
    for each in sets:
        assert_holds(each, pixels)
    inputs, _ = all_samples(data.train_dataloader())
    assert inputs.mean((0, 2, 3)).abs().max() < 1e-5
    assert (inputs.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-5
    assert (data.num_classes, data.image_shape) == (3, (3, 8, 8))


def test_what_is_on_disk_goes_with_the_datamodule(images, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    data = ImageFolder(str(images[0]), memory_limit=0)
    data.setup()
    assert len(list(tmp_path.glob("lightning_lowrank_*"))) == 2
    del data
    gc.collect()
    assert not list(tmp_path.glob("lightning_lowrank_*"))


def test_folders_of_splits(images):
    folder, _ = images
    (folder / "train").mkdir()
    for label in ("ant", "bee", "cow"):
        (folder / label).rename(folder / "train" / label)
    write(folder / "val" / "bee", "new.png", np.full((8, 8, 3), 7, np.uint8))
    data = ImageFolder(str(folder))
    data.setup()
    assert len(data.train_set) == 30
    assert data.test_set.files == ["val/bee/new.png"]
    assert data.test_set.targets.tolist() == [1]
    assert data.validation_set is data.test_set
    write(folder / "val" / "dog", "new.png", np.full((8, 8, 3), 7, np.uint8))
    with pytest.raises(MisconfigurationException, match="does not have: dog"):
        ImageFolder(str(folder)).setup()


GREY = np.full((8, 8, 3), 7, np.uint8)


def splits(root, **files):
    """Write so many images of two classes into each folder."""
    for name, count in files.items():
        for number in range(count):
            for label in ("ant", "bee"):
                write(root / name / label, f"{number}.png", GREY)
    return str(root)


@pytest.mark.parametrize(
    ("files", "arguments", "sizes"),
    [
        ({"train": 5, "val": 3, "test": 2}, {}, (10, 6, 4)),
        ({"train": 5, "validation": 3, "test": 2}, {}, (10, 6, 4)),
        ({"train": 5, "val": 3, "test": 2}, {"validation": "test"}, (10, 4, 4)),
        ({"train": 5, "val": 3, "test": 2}, {"validation": 0.2}, (8, 2, 4)),
        ({"train": 5, "val": 3}, {}, (10, 6, 6)),
        ({"train": 5, "val": 3, "validation": 2}, {}, (10, 4, 6)),
        ({"train": 5, "val": 3}, {"validation": "val", "test_share": 0.2}, (8, 6, 2)),
        ({"train": 5, "dev": 3, "test": 2}, {"validation": "dev"}, (10, 6, 4)),
        ({"Train": 5, "Valid": 3, "TEST": 2}, {}, (10, 6, 4)),
        ({"training": 5, "testing": 2}, {}, (10, 4, 4)),
    ],
)
def test_folders_of_splits_are_told_by_their_names(tmp_path, files, arguments, sizes):
    data = ImageFolder(splits(tmp_path, **files), **arguments)
    data.setup()
    assert tuple(map(len, (data.train_set, data.validation_set, data.test_set))) == sizes
    assert data.classes == ["ant", "bee"]


def test_names_of_splits_may_be_classes(tmp_path):
    for number in range(5):
        for label in ("train", "valid", "test"):
            write(tmp_path / label, f"{number}.png", GREY)
    data = ImageFolder(str(tmp_path))
    data.setup()
    assert data.classes == ["test", "train", "valid"]
    assert (len(data.train_set), len(data.test_set)) == (12, 3)


def test_hidden_files_and_folders_are_no_images(images):
    folder, pixels = images
    for label in (".ipynb_checkpoints", "__MACOSX", "ant/.ipynb_checkpoints"):
        write(folder / label, "0.png", GREY)
    (folder / "bee" / "._0.png").write_bytes(b"a resource fork")
    data = ImageFolder(str(folder))
    assert data.num_classes == 3
    data.setup()
    assert sorted(data.train_set.files + data.test_set.files) == sorted(pixels)


@pytest.mark.parametrize(
    ("files", "arguments", "said"),
    [
        ({"train": 1, "Training": 1}, {}, "must hold one folder to train on, not Training, train"),
        ({"train": 1, "test": 1}, {"validation": "val"}, "validation='val' must be 'test', a share, .* test, train"),
        ({"a": 1, "val": 1}, {"validation": "val"}, r"validation='val'.*'test'"),
        ({"train": 1, "train/cow": 0}, {}, "folders without an image, which would be classes: cow; remove them"),
        ({"train": 1, "test": 0}, {}, "test holds no image"),
    ],
)
def test_folders_of_splits_are_checked(tmp_path, files, arguments, said):
    splits(tmp_path, **files)
    for name in files:
        (tmp_path / name).mkdir(exist_ok=True)
    with pytest.raises(MisconfigurationException, match=said):
        ImageFolder(str(tmp_path), **arguments).setup()


def test_given_classes_number_the_folders(tmp_path):
    root = splits(tmp_path, train=2, test=1)
    (tmp_path / "train" / "cow").mkdir()
    write(tmp_path / "test" / "cow", "0.png", GREY)
    data = ImageFolder(root, classes=["dog", "cow", "bee", "ant"])
    data.setup()
    assert (data.classes, data.num_classes) == (["dog", "cow", "bee", "ant"], 4)
    assert sorted(data.train_set.targets.tolist()) == [2, 2, 3, 3]
    assert sorted(data.test_set.targets.tolist()) == [1, 2, 3]
    with pytest.raises(MisconfigurationException, match=r"train.*classes=\['ant', 'cow'\].*bee"):
        ImageFolder(root, classes=["ant", "cow"])
    data = ImageFolder(root, classes=["ant", "bee", "cow"])
    write(tmp_path / "test" / "eel", "0.png", GREY)
    with pytest.raises(MisconfigurationException, match=r"test has classes.*classes=.*eel"):
        data.setup()


def test_images_of_other_sizes_are_scaled_where_that_is_asked_for(images):
    folder, _ = images
    write(folder / "cow", "wide.jpg", np.full((10, 30), 200, np.uint8))
    with pytest.raises(MisconfigurationException, match=r"30×10 pixels .* give size=8"):
        ImageFolder(str(folder), test_share=0.1).setup()
    data = ImageFolder(str(folder), size=[6, 4], channels=1, test_share=0.1)
    data.setup()
    assert data.train_set.images.shape[1:] == (1, 6, 4)
    sets = (data.train_set, data.test_set)
    (grey,) = (each.images[each.files.index("cow/wide.jpg")] for each in sets if "cow/wide.jpg" in each.files)
    assert (grey == 200).all()


def test_constants_may_be_given(images):
    data = ImageFolder(str(images[0]), mean=[0.5] * 3, std=[0.25] * 3)
    data.setup("test")
    assert data.train_set is None
    assert torch.equal(data.test_set[0][0], (data.test_set.images[0] / 255 - 0.5) / 0.25)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"root": "nowhere"}, "root='nowhere'"),
        ({"channels": 2}, r"channels.*3.*2"),
        ({"size": [1, 2, 3]}, r"size.*\[1, 2, 3\]"),
        ({"size": 0}, r"size.*0"),
        ({"mean": [0.5]}, r"mean.*3.*\[0\.5\]"),
        ({"test_share": 1.0}, "test_share must be"),
        ({"classes": ["ant"]}, r"classes.*\['ant'\]"),
    ],
)
def test_folders_are_checked(images, arguments, said):
    with pytest.raises(MisconfigurationException, match=said):
        ImageFolder(**{"root": str(images[0]), **arguments})


@pytest.mark.parametrize("content", [b"no image", broken_png(np.zeros((8, 8, 3), np.uint8))], ids=["text", "chunk"])
def test_damaged_images_are_named(images, content):
    (images[0] / "ant" / "broken.png").write_bytes(content)
    with pytest.raises(MisconfigurationException, match=r"broken\.png"):
        ImageFolder(str(images[0])).setup()


def test_an_image_beyond_pillows_limit_is_named(images, monkeypatch):
    write(images[0] / "ant", "huge.png", np.zeros((40, 40, 3), np.uint8))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(MisconfigurationException, match=r"huge\.png.*1600 pixels"):
        ImageFolder(str(images[0]), size=8).setup()


def test_files_make_natural_clients(images, tmp_path):
    key = ByKey(lambda dataset: [Path(name).name.split("_")[0] for name in dataset.files])
    loop = FederatedLoop(FedAvg(), partition=key, summary=False)
    module = Module(nn.Sequential(nn.Flatten(), nn.Linear(192, 3)))
    fit(trainer(tmp_path, loop, max_epochs=1), module, ImageFolder(str(images[0]), batch_size=4))
    assert loop.indices.names == ("ada", "ben")


def test_arrays_are_divided_by_class():
    inputs, targets = torch.arange(300.0).view(100, 3), torch.arange(100) % 4
    data = Arrays((inputs, targets), test_share=0.2, validation=0.25)
    data.setup()
    sets = data.train_set, data.validation_set, data.test_set
    assert [each.tensors[1].bincount().tolist() for each in sets] == [[15] * 4, [5] * 4, [5] * 4]
    assert sorted(row for each in sets for row in each.tensors[0][:, 0].tolist()) == inputs[:, 0].tolist()


@pytest.mark.parametrize(
    "targets",
    [
        torch.randint(0, 2000, (1000,), generator=torch.Generator().manual_seed(0)),
        torch.arange(100).repeat_interleave(2),
        torch.arange(3).repeat(41),
        torch.cat([torch.zeros(97), torch.arange(1, 8)]).long(),
    ],
)
@pytest.mark.parametrize("share", [0.2, 0.5, 0.85])
def test_the_share_is_that_of_all_whatever_the_classes(targets, share):
    data = Arrays((torch.zeros(len(targets), 1), targets), test_share=share)
    data.setup()
    held_out = data.test_set.tensors[1]
    assert len(held_out) == round(share * len(targets))
    assert len(data.train_set) == len(targets) - len(held_out)
    for label, count in zip(*targets.unique(return_counts=True), strict=True):
        assert abs((held_out == label).sum() - share * count) < 1


def test_numbers_to_predict_are_held_out_from_everywhere():
    data = Arrays((torch.zeros(1000, 1), torch.arange(1000)))
    data.setup()
    assert abs(data.test_set.tensors[1].double().mean() - 499.5) < 60


def test_arrays_of_numbers_and_files(tmp_path):
    draws = np.random.default_rng(0)
    np.savez(tmp_path / "train.npz", x=draws.random((40, 6)), y=draws.random((40, 2)))
    np.savez(tmp_path / "test.npz", x=draws.random((10, 6)), y=draws.random((10, 2)))
    data = Arrays(str(tmp_path / "train.npz"), str(tmp_path / "test.npz"))
    data.setup()
    assert len(data.train_set) == 40
    assert data.test_set is data.validation_set
    assert data.test_set.tensors[1].dtype == torch.float32


def test_an_archive_whose_data_cannot_be_decompressed_is_refused_by_name(tmp_path):
    np.savez_compressed(tmp_path / "train.npz", x=np.arange(1000.0), y=np.arange(1000))
    damaged = bytearray((tmp_path / "train.npz").read_bytes())
    damaged[60:100] = bytes(40)
    (tmp_path / "train.npz").write_bytes(damaged)
    with pytest.raises(MisconfigurationException, match=r"train='.*train\.npz'"):
        Arrays(str(tmp_path / "train.npz")).setup()


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "int32", ">i4", "uint16", "int64"])
def test_class_indices_are_of_64_bits(dtype):
    classes = (np.arange(20) % 2).astype(dtype)
    data = Arrays((np.zeros((20, 3), dtype="int16"), classes))
    data.setup()
    assert data.train_set.tensors[1].dtype == torch.int64
    assert data.train_set.tensors[0].dtype == torch.int16
    data = Arrays((torch.zeros(20, 3), torch.from_numpy(np.stack([classes.astype("uint8")] * 2, 1))))
    data.setup()
    assert data.train_set.tensors[1].dtype == torch.uint8


class Frame:
    """What NumPy makes an array of, but torch does not."""

    def __array__(self, dtype=None, copy=None):
        return np.arange(40.0).reshape(20, 2)[::-1]


def test_what_numpy_makes_an_array_of_is_one():
    data = Arrays((Frame(), np.broadcast_to(np.int64(1), 20)), test_share=0.25)
    data.setup()
    assert data.train_set.tensors[0].sum() + data.test_set.tensors[0].sum() == np.arange(40).sum()


@pytest.mark.parametrize(
    ("write_to", "said"),
    [
        (lambda path: np.save(path, np.zeros((3, 3))), "it holds one array without a name"),
        (lambda path: np.savez(path, X=np.zeros(3), y=np.zeros(3)), r"\['X', 'y'\]"),
        (lambda path: path.write(b""), "No data left"),
        (lambda path: path.write(b"PK\x03\x04nothing"), "not a zip file"),
    ],
)
def test_files_of_other_kinds_are_refused(tmp_path, write_to, said):
    with open(tmp_path / "train.npz", "wb") as file:
        write_to(file)
    with pytest.raises(MisconfigurationException, match=rf"must be an \.npz file with the arrays x and y: .*{said}"):
        Arrays(str(tmp_path / "train.npz")).setup()


def test_a_test_set_without_samples_is_refused():
    with pytest.raises(MisconfigurationException, match=r"test.*0.*2"):
        Arrays((np.zeros((4, 2)), np.arange(4)), (np.zeros((0, 2)), np.zeros(0))).setup()


def test_arrays_are_federated(tmp_path):
    inputs, targets = np.random.default_rng(0).random((40, 6)), np.arange(40) % 4
    loop = FederatedLoop(FedAvg(), clients=3, summary=False)
    fitted = trainer(tmp_path, loop, max_epochs=1)
    fit(fitted, Module(), Arrays((inputs, targets), batch_size=5))
    assert "val_acc" in fitted.callback_metrics


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ("nowhere.npz", r"train='nowhere\.npz'"),
        (np.zeros(3), "must be \\(inputs, targets\\)"),
        ((np.zeros((3, 2)), np.zeros(4)), r"train.*3"),
        ((np.array(["a"]), np.zeros(1)), "arrays of numbers"),
        ((np.zeros((0, 2)), np.zeros(0)), "train holds no sample"),
        ((np.zeros((1, 2)), np.zeros(1)), "use another share"),
    ],
)
def test_arrays_are_checked(train, said):
    with pytest.raises(MisconfigurationException, match=said):
        Arrays(train).setup()
