"""HuggingFaceImages: data sets made on the spot, what is read of them, and what is refused."""

import sys

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from PIL import Image
from torch import nn

from lightning_lowrank import ByKey, FedAvg, FederatedLoop
from lightning_lowrank.cli import main
from lightning_lowrank.data import HuggingFaceImages
from lightning_lowrank.federated.data import find_labels
from tests.data.helpers import broken_png
from tests.helpers import Module, fit, trainer

datasets = pytest.importorskip("datasets")

CLASSES = ("ant", "bee", "cow")


def columns(samples=30, mode="RGB", seed=0):
    """Images of noise of three classes, by two writers, and their pixels."""
    draws = np.random.default_rng(seed)
    pixels = draws.integers(0, 256, (samples, 8, 8, 3) if mode == "RGB" else (samples, 8, 8), dtype=np.uint8)
    found = {
        "image": [Image.fromarray(each) for each in pixels],
        "label": [number % 3 for number in range(samples)],
        "writer": ["ben" if number % 5 else "ada" for number in range(samples)],
        "row": list(range(samples)),
    }
    return found, pixels


def made(given, labels=None):
    """Return a data set of columns, those of labels with names or not."""
    found = datasets.Dataset.from_dict(given)
    return found if labels is None else found.cast_column("label", labels)


LABELS = datasets.ClassLabel(names=list(CLASSES))


@pytest.fixture
def stored():
    return made(columns()[0], LABELS)


@pytest.mark.parametrize("memory_limit", [2**30, 0])
def test_a_dataset_is_divided_by_class(stored, memory_limit):
    _, pixels = columns()
    data = HuggingFaceImages(stored, test_share=0.2, validation=0.25, memory_limit=memory_limit)
    assert (data.classes, data.num_classes) == (list(CLASSES), 3)
    data.setup()
    sets = data.train_set, data.validation_set, data.test_set
    assert [each.targets.bincount().tolist() for each in sets] == [[6] * 3, [2] * 3, [2] * 3]
    assert sorted(row for each in sets for row in each["row"][:]) == list(range(30))
    for each in sets:
        rows = each["row"][:]
        assert np.array_equal(each.images.numpy(), pixels[rows].transpose(0, 3, 1, 2))
        assert each.targets.tolist() == [row % 3 for row in rows]
    assert data.image_shape == (3, 8, 8)


@pytest.mark.slow
def test_splits_are_found_by_name(stored):
    splits = datasets.DatasetDict({"train": stored, "valid": stored.select(range(5)), "held": stored.select([2, 0])})

    def rows(**arguments):
        data = HuggingFaceImages(splits, **arguments)
        data.setup()
        return [each["row"][:] for each in (data.validation_set, data.test_set)]

    assert rows() == [list(range(5))] * 2
    assert rows(test="held", validation="valid") == [list(range(5)), [2, 0]]
    assert rows(test="held") == [list(range(5)), [2, 0]]
    assert rows(test="held", validation="test") == [[2, 0]] * 2
    assert rows(test="valid") == [list(range(5))] * 2
    validation, test = rows(validation="valid")
    assert validation == list(range(5))
    assert len(test) == 6  # Of the training images.
    with pytest.raises(MisconfigurationException, match=r"dataset.*'tests'"):
        HuggingFaceImages(splits, test="tests")
    splits["validation"] = stored.select([3])
    assert rows() == [[3], list(range(5))]
    splits["TEST"] = stored.select([4])
    assert rows() == [list(range(5)), [4]]
    splits["val"] = splits.pop("TEST")
    assert rows() == [[0, 1, 2, 3, 4], [4]]


def test_images_of_any_mode_are_converted():
    given, pixels = columns(12, mode="L")
    colour = Image.new("RGB", (8, 8), (10, 20, 30))
    given["image"][3] = colour
    grey, coloured = (HuggingFaceImages(made(given), channels=channels, test_share=0.25) for channels in (1, 3))
    grey.setup()
    coloured.setup()
    for row, image in zip(grey.train_set["row"][:], grey.train_set.images, strict=True):
        assert torch.equal(image, torch.from_numpy(np.array(colour.convert("L")) if row == 3 else pixels[row])[None])
    for row, image in zip(coloured.train_set["row"][:], coloured.train_set.images, strict=True):
        if row != 3:
            assert torch.equal(image, torch.from_numpy(pixels[row]).expand(3, 8, 8))
    given["image"][5] = Image.fromarray(np.full((8, 8), 40_000, np.uint16))
    with pytest.raises(MisconfigurationException, match=r"dataset.*\['train'\].*5"):
        HuggingFaceImages(made(given), channels=1, test_share=0.25).setup()


def test_columns_of_paths_and_bytes_are_images_where_they_are_cast(tmp_path):
    given, pixels = columns(12)
    files = []
    for number, image in enumerate(given["image"]):
        files.append(str(tmp_path / f"{number}.png"))
        image.save(files[-1])
    paths = made({**given, "image": files})
    with pytest.raises(MisconfigurationException, match=r"dataset\.cast_column.*datasets\.Image\(\)"):
        HuggingFaceImages(paths)
    data = HuggingFaceImages(paths.cast_column("image", datasets.Image(decode=False)), test_share=0.25)
    data.setup()
    rows = data.train_set["row"][:]
    assert np.array_equal(data.train_set.images.numpy(), pixels[rows].transpose(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["dog", "cat", "dog", "owl"], ["cat", "dog", "owl"]),
        ([10, 9, 10, 100], ["9", "10", "100"]),
        ([True, False, True, True], ["False", "True"]),
    ],
)
def test_labels_without_names_are_sorted(labels, classes):
    given = {"image": columns(4)[0]["image"], "target": labels}
    data = HuggingFaceImages(datasets.DatasetDict({"train": made(given), "test": made(given)}))
    data.setup()
    assert data.classes == classes
    assert [classes[target] for target in data.train_set.targets] == [str(label) for label in labels]
    assert find_labels(data.train_set).tolist() == data.train_set.targets.tolist()


def test_classes_of_the_test_images_are_those_of_the_training_images(stored):
    given = {**columns(6)[0], "label": [0, 1, 0, 1, 0, 1]}
    other = made(given, datasets.ClassLabel(names=["cow", "ant"]))
    data = HuggingFaceImages(datasets.DatasetDict({"train": stored, "test": other}))
    data.setup()
    assert data.test_set.targets.tolist() == [2, 0] * 3
    unknown = made(given, datasets.ClassLabel(names=["cow", "owl"]))
    with pytest.raises(MisconfigurationException, match=r"'label'.*dataset.*\['train'\]"):
        HuggingFaceImages({"train": stored, "test": unknown})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"image": "picture"}, r"dataset.*'picture'"),
        ({"image": "row"}, r"dataset.*'row'.*'int64'"),
        ({"label": "class"}, r"'class'.*label"),
        ({"label": "image"}, r"'image'.*mode=None.*decode=True"),
        ({"train": "fit"}, r"dataset.*'fit'"),
        ({"validation": "dev"}, r"dataset.*'dev'"),
        ({"validation": 1.5}, r"validation.*1\.5"),
        ({"channels": 2}, r"channels.*3.*2"),
        ({"mean": [0.5]}, r"mean.*3.*\[0\.5\]"),
        ({"dataset": 7}, "dataset must be a name"),
        ({"dataset": {"train": [{"image": 1}]}}, r"datasets\.Dataset.*datasets\.Dataset\.from_list"),
    ],
)
def test_arguments_are_checked_at_once(stored, arguments, said):
    with pytest.raises(MisconfigurationException, match=said):
        HuggingFaceImages(**{"dataset": stored, **arguments})


def test_what_is_ambiguous_or_would_be_ignored_is_refused(stored):
    twice = stored.add_column("mask", [None] * 30).cast_column("mask", datasets.Image())
    with pytest.raises(MisconfigurationException, match=r"dataset.*2"):
        HuggingFaceImages(twice)
    fine = stored.rename_column("label", "fine").add_column("coarse", [0] * 30)
    coarse = fine.cast_column("coarse", datasets.ClassLabel(names=["all"]))
    with pytest.raises(MisconfigurationException, match=r"columns of classes.*may be fine or writer or row or coarse"):
        HuggingFaceImages(coarse)
    assert HuggingFaceImages(coarse, label="coarse").classes == ["all"]
    with pytest.raises(MisconfigurationException, match="has a transform, which would not be applied"):
        HuggingFaceImages(stored.with_transform(lambda rows: rows))
    with pytest.raises(MisconfigurationException, match="IterableDataset"):
        HuggingFaceImages(stored.to_iterable_dataset())
    with pytest.raises(MisconfigurationException, match="has no rows"):
        HuggingFaceImages(stored.select([]))


def test_rows_that_lack_something_are_named(stored):
    secret = stored.remove_columns("label").add_column("label", [0] * 29 + [-1]).cast_column("label", LABELS)
    with pytest.raises(MisconfigurationException, match=r"dataset.*\['test'\].*29"):
        HuggingFaceImages({"train": stored, "test": secret})
    empty = stored.remove_columns("label").add_column("label", ["ant", " "] * 15)
    with pytest.raises(MisconfigurationException, match=r"row 1.*'label' has ' '"):
        HuggingFaceImages(empty)
    given, _ = columns(12)
    given["image"][7] = None
    with pytest.raises(MisconfigurationException, match=r"dataset.*7"):
        HuggingFaceImages(made(given), test_share=0.25).setup()
    for content in (b"no image", broken_png(np.zeros((8, 8, 3), np.uint8))):
        given["image"] = [{"bytes": content, "path": None}] * 12
        broken = made(given).cast_column("image", datasets.Image())
        with pytest.raises(MisconfigurationException, match=r"dataset.*2"):
            HuggingFaceImages(broken, test_share=0.25).setup()


def test_a_missing_library_is_named_with_its_extra(stored, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MisconfigurationException, match=r"HuggingFaceImages needs .*\.\[datasets\]"):
        HuggingFaceImages("mnist")


def test_a_column_makes_natural_clients(stored, tmp_path):
    loop = FederatedLoop(FedAvg(), partition=ByKey("writer"), summary=False)
    module = Module(nn.Sequential(nn.Flatten(), nn.Linear(192, 3)))
    data = HuggingFaceImages(stored, batch_size=4)
    fit(trainer(tmp_path, loop, max_epochs=1), module, data)
    assert loop.indices.names == ("ada", "ben")
    assert loop.indices.sizes.tolist() == [data.train_set["writer"][:].count(name) for name in ("ada", "ben")]
    with pytest.raises(KeyError, match=r"there.*'image'"):
        data.train_set["image"]


@pytest.mark.parametrize("kind", ["Dataset", "DatasetDict"])
def test_a_folder_on_disk_is_read_when_data_are_prepared(stored, tmp_path, kind):
    (stored if kind == "Dataset" else datasets.DatasetDict({"train": stored})).save_to_disk(tmp_path / "stored")
    data = HuggingFaceImages(str(tmp_path / "stored"), label="class")
    with pytest.raises(MisconfigurationException, match=r"dataset.*'class'"):
        data.prepare_data()
    data = HuggingFaceImages(str(tmp_path / "stored"))
    data.prepare_data()
    assert data.classes == list(CLASSES)
    with pytest.raises(MisconfigurationException, match="cannot be loaded: give a name"):
        HuggingFaceImages(str(tmp_path / "nothing")).prepare_data()


@pytest.mark.slow
def test_a_recipe_names_a_folder(stored, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stored.save_to_disk("stored")
    (tmp_path / "recipe.yaml").write_text(
        """
federated: {algorithm: FedAvg, partition: {class_path: ByKey, init_args: {key: writer}}}
model:
  class_path: Classifier
  init_args: {network: {class_path: MLP, init_args: {in_features: 192, hidden: [8], out_features: 3}}}
data: {class_path: HuggingFaceImages, init_args: {dataset: stored, size: 8, validation: 0.2, batch_size: 4}}
trainer: {max_epochs: 1, logger: false, enable_checkpointing: false}
"""
    )
    main(["fit", "--config", "recipe.yaml", "--quiet"])
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", "recipe.yaml", "--quiet", "--data.init_args.label", "labels"])
    assert "has no column 'labels'; it has image, label" in str(end.value.code)
