"""Whose samples: data modules with partitions, with hold-outs and dropped samples, against the rows of the file."""

import hashlib

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from PIL import Image
from torch.utils.data import DataLoader, Subset

from lightning_lowrank import IID, ByKey, Dirichlet, FromIndices, LabelCount
from lightning_lowrank.data import Arrays, Digits, HuggingFaceImages, ImageFolder, Instructions
from lightning_lowrank.data.vision import VisionDataModule
from lightning_lowrank.federated.data.rows import Rows, rows_of
from tests import texts

pytestmark = pytest.mark.filterwarnings("ignore:.*are dropped")
SAMPLES = 60
LABELS = [row % 3 for row in range(SAMPLES)]
# As files are sorted by client, and as they are not.
CLIENTS = [f"u{row // 6 + 1}" for row in range(SAMPLES)]
SCATTERED = [f"u{row * 7 % 11}" for row in range(SAMPLES)]


def hashed(value):
    return hashlib.blake2b(np.ascontiguousarray(value).tobytes()).hexdigest()


def pixels():
    return np.random.default_rng(1).integers(0, 256, (SAMPLES, 4, 4), dtype=np.uint8)


class Images(VisionDataModule):
    num_classes, image_shape, mean, std = 3, (1, 4, 4), (0.5,), (0.5,)

    def load_images(self, train):
        return torch.from_numpy(pixels())[:, None], torch.tensor(LABELS)


def plain_images(dataset, row):
    return hashed(dataset.images[row].numpy())


def arrays(folder, **settings):
    inputs = np.random.default_rng(0).normal(size=(SAMPLES, 5)).astype(np.float32)
    columns = {"client": CLIENTS, "scattered": np.array(SCATTERED)}
    data = Arrays({"x": inputs, "y": np.array(LABELS), **columns}, test_share=0.25, **settings)
    return data, lambda row: hashed(inputs[row]), lambda dataset, sample: hashed(dataset[sample][0].numpy())


def file_of_arrays(folder):
    inputs = np.random.default_rng(0).normal(size=(SAMPLES, 5)).astype(np.float32)
    np.savez(folder / "data.npz", x=inputs, y=np.array(LABELS), client=CLIENTS, scattered=SCATTERED)
    data = Arrays(str(folder / "data.npz"), validation=0.2)
    return data, lambda row: hashed(inputs[row]), lambda dataset, sample: hashed(dataset[sample][0].numpy())


def images(folder):
    data = Images(validation=0.2, limit_samples=35, normalize=False)
    return data, lambda row: hashed(pixels()[row][None]), plain_images


def hugging_face(folder):
    datasets = pytest.importorskip("datasets")
    columns = {"image": [Image.fromarray(each) for each in pixels()], "label": LABELS}
    columns |= {"client": CLIENTS, "scattered": SCATTERED}
    data = HuggingFaceImages(datasets.Dataset.from_dict(columns), channels=1, validation=0.1, test_share=0.2)
    return data, lambda row: hashed(pixels()[row][None]), plain_images


def folders(folder):
    order = sorted(range(SAMPLES), key=lambda row: (CLIENTS[row], LABELS[row], f"{row}.png"))
    for row, image in enumerate(pixels()):
        place = folder / CLIENTS[row] / f"class{LABELS[row]}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{row}.png")
    data = ImageFolder(str(folder), clients=True, channels=1, validation=0.2)
    return data, lambda row: hashed(pixels()[order[row]][None]), plain_images


def instructions(folder):
    pytest.importorskip("transformers")
    said = texts.sentences(SAMPLES, 0, longest=6)
    # Every fifth has a prompt that leaves no place for its answer.
    rows = [
        {"instruction": "film " * (40 if row % 5 == 0 else 1), "output": text, "client": CLIENTS[row], "n": str(row)}
        for row, (text, _) in enumerate(said)
    ]
    tokenizer = str(texts.save_language_model(folder))
    data = Instructions(
        tokenizer=tokenizer, dataset={"train": rows}, prompt="is {instruction}", max_length=30, validation=0.2
    )
    return data, lambda row: str(row), lambda dataset, sample: dataset["n"][sample]


MAKE = [arrays, file_of_arrays, images, hugging_face, folders, instructions]


@pytest.fixture(params=MAKE, ids=lambda make: make.__name__)
def made(request, tmp_path):
    data, of_row, of_sample = request.param(tmp_path)
    data.setup()
    return data, of_row, of_sample, request.param


def test_clients_by_index_have_the_rows_that_they_name(made):
    data, of_row, of_sample, _ = made
    dataset = data.train_set
    held = {"a": list(range(10)), "b": list(range(12, 40)), "c": [59, 41, 50], "none": []}
    indices = FromIndices(held).split(dataset, clients=None, seed=0)
    assert indices.names == ("a", "b", "c", "none")
    trained = {of_sample(dataset, sample) for sample in range(len(dataset))}
    for client, name in enumerate(indices.names):
        found = [of_sample(dataset, sample) for sample in indices[client].tolist()]
        # In the order that was given.
        assert found == [of_row(row) for row in held[name] if of_row(row) in trained]
    assert 0 < len(indices.indices) < sum(map(len, held.values()))
    with pytest.raises(MisconfigurationException, match=str(SAMPLES)):
        FromIndices([[SAMPLES]]).split(dataset, clients=None, seed=0)


def test_natural_clients_have_the_rows_of_their_name(made):
    data, of_row, of_sample, make = made
    if make is images:
        pytest.skip("its file has no clients")
    dataset = data.train_set
    for column, names in (("client", CLIENTS), ("scattered", SCATTERED)):
        if column == "scattered" and make in (folders, instructions):
            continue
        if make is folders:
            names = [CLIENTS[row] for row in sorted(range(SAMPLES), key=lambda row: (CLIENTS[row], LABELS[row]))]
        name_of = {of_row(row): name for row, name in enumerate(names)}
        indices = ByKey(column).split(dataset, clients=None, seed=0)
        for client, name in enumerate(indices.names):
            assert {name_of[of_sample(dataset, sample)] for sample in indices[client].tolist()} == {name}
        assert list(indices.names) == sorted(indices.names, key=lambda name: int(name[1:]))
        assert len(indices.indices) == len(dataset)


@pytest.mark.parametrize("partition", [IID(), Dirichlet(0.5), LabelCount(2)], ids=repr)
def test_drawn_clients_have_rows_of_the_training_set_once(made, partition):
    data, of_row, of_sample, make = made
    if make is instructions and not isinstance(partition, IID):
        pytest.skip("its samples have no class")
    dataset = data.train_set
    indices = partition.split(dataset, clients=4, seed=0)
    found = [of_sample(dataset, sample) for sample in indices.indices.tolist()]
    assert len(set(found)) == len(found) == len(dataset)
    assert set(found) <= {of_row(row) for row in range(SAMPLES)}


def test_no_row_is_trained_on_and_tested(made):
    data, _, of_sample, make = made
    sets = [data.train_set, data.validation_set]
    if make in (arrays, file_of_arrays, hugging_face, folders):
        sets.append(data.test_set)
    if sets[1] is sets[-1]:
        sets = sets[:-1]
    if make is images:
        sets = sets[:2]
    found = [of_sample(each, sample) for each in sets for sample in range(len(each))]
    assert len(set(found)) == len(found)
    numbers = torch.cat([rows_of(each).numbers for each in sets])
    assert len(numbers.unique()) == len(numbers)


def test_digits_have_their_row_among_all():
    from sklearn.datasets import load_digits

    data = Digits()
    data.setup()
    images_of_all = torch.from_numpy(load_digits().images).to(torch.uint8)[:, None]
    for dataset in (data.train_set, data.validation_set, data.test_set):
        assert torch.equal(dataset.images, images_of_all[dataset.rows.numbers])


def test_a_subset_has_the_rows_of_its_samples():
    data, _, _ = arrays(None)
    data.setup()
    subset = Subset(data.train_set, [3, 0])
    assert rows_of(subset).numbers.tolist() == data.train_set.rows.numbers[[3, 0]].tolist()
    assert rows_of(Subset([1.0, 2.0], [1])) is None


def test_rows_of_another_number_of_samples_are_refused():
    data, _, _ = arrays(None)
    data.setup()
    data.train_set.rows = Rows.all(3)
    with pytest.raises(MisconfigurationException, match=f"3.*{len(data.train_set)}"):
        FromIndices([[0]]).split(data.train_set, clients=None, seed=0)


def test_what_is_held_out_of_conversations_is_drawn_of_all_clients(tmp_path):
    data, _, _ = instructions(tmp_path)
    data.setup()
    # The last fifth of the file would be all rows of two clients.
    assert len(set(data.validation_set["client"])) > 3
    again, _, _ = instructions(tmp_path)
    again.setup()
    assert again.validation_set["n"] == data.validation_set["n"]
    data, _, _ = instructions(tmp_path)
    data.stratify, data.share = "client", 0.5
    data.setup()
    held = data.read("validate")
    assert {name: held["client"].count(name) for name in set(CLIENTS)} == dict.fromkeys(set(CLIENTS), 3)


def test_a_class_of_columns_is_named():
    datasets = pytest.importorskip("datasets")
    kinds = datasets.ClassLabel(names=["mercy", "general"])
    columns = {"image": [Image.fromarray(each) for each in pixels()], "label": LABELS}
    stored = datasets.Dataset.from_dict({**columns, "ward": [row % 2 for row in range(SAMPLES)]})
    stored = stored.cast_column("ward", kinds)
    data = HuggingFaceImages(stored, channels=1, test_share=0.2)
    data.setup()
    indices = ByKey("ward").split(data.train_set, clients=None, seed=0)
    assert indices.names == ("general", "mercy")
    assert {row % 2 for row in data.train_set.rows.numbers[indices[0]].tolist()} == {1}
    assert ByKey("ward").split(Subset(stored, [0, 1, 2]), clients=None, seed=0).names == ("general", "mercy")


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        ({"client": CLIENTS[1:]}, r"client.*59.*60"),
        ({"tensors": CLIENTS}, "'tensors'"),
        ({"a b": CLIENTS}, "'a b'"),
        ({"client": [[1]] * SAMPLES}, "client"),
    ],
)
def test_columns_of_arrays_that_cannot_be(columns, names):
    data = Arrays({"x": np.zeros((SAMPLES, 2)), "y": np.array(LABELS), **columns})
    with pytest.raises(MisconfigurationException, match=names):
        data.setup()


def test_an_image_below_a_class_is_refused(tmp_path):
    folders(tmp_path)
    data = ImageFolder(str(tmp_path), channels=1)
    with pytest.raises(MisconfigurationException, match=r"u1/class0/.*clients=True"):
        data.setup()


def test_users_functions_get_the_users_dataset():
    from torch.utils.data import BatchSampler, SequentialSampler

    from lightning_lowrank.federated.data.loader_checks import check_loader

    class ReadsLists(torch.utils.data.Dataset):
        ward = ["north", "south"] * 5

        def __len__(self):
            return 10

        def __getitem__(self, indices):
            return torch.zeros(len(indices), 2), torch.zeros(len(indices), dtype=torch.int64)

    own = ReadsLists()
    loader = DataLoader(own, batch_size=None, sampler=BatchSampler(SequentialSampler(own), 2, drop_last=False))
    seen = []

    def key(dataset):
        seen.append(dataset)
        return dataset.ward

    assert ByKey(key).split(check_loader(loader).dataset, clients=None, seed=0).names == ("north", "south")
    assert seen == [own]


def test_rows_that_are_all_held_out_are_refused():
    data, _, _ = arrays(None)
    data.setup()
    held_out = sorted(set(range(SAMPLES)) - set(data.train_set.rows.numbers.tolist()))
    with pytest.raises(MisconfigurationException, match=rf"indices.*{len(held_out)}"):
        FromIndices([held_out]).split(data.train_set, clients=None, seed=0)
