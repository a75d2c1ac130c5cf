"""Each client's samples are its own, whatever files they come from."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import IterableDataset

from lightning_lowrank import ByKey, FedAvg, FederatedLoop, FromIndices
from lightning_lowrank.data import LEAF, ClientDatasets, ClientFiles, ClientTable, FederatedHDF5
from tests.data.federated_files import (
    FORMS,
    NAMES,
    SIZES,
    dump,
    joined,
    mixed,
    read,
    samples_of,
    write_csv,
    write_jsonl,
    write_parquet,
    written,
)

each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def made(form, folder):
    for name in ("h5py", "ijson", "pyarrow"):
        pytest.importorskip(name)
    return form.make(folder)


@each_form
def test_samples_are_the_clients_own(form, tmp_path):
    data = made(form, tmp_path)()
    data.setup()
    assert data.train_set.client.names == form.order
    assert read(data.train_set) == written()["train"]
    assert read(data.test_set) == written()["test"]


@each_form
def test_after_hold_outs_too(form, tmp_path):
    data = made(form, tmp_path)(validation=0.34)
    data.setup()
    train, validation = read(data.train_set), read(data.validation_set)
    assert joined(train, validation) == written()["train"]
    assert {name: len(part) for name, part in validation.items()} == {"w10": 2, "w2": 3, "w7": 2}
    assert read(data.test_set) == written()["test"]


@each_form
def test_by_key_divides_them_and_their_evaluation(form, tmp_path):
    data = made(form, tmp_path)()
    data.setup()
    partition = ByKey("client")
    indices = partition.split(data.train_set, None, 0)
    assert indices.names == form.order
    judged = partition.divide_evaluation(data.test_set, indices)
    for dataset, parts, split in ((data.train_set, indices, "train"), (data.test_set, judged, "test")):
        owners = np.asarray(dataset.client)
        for name, part in zip(form.order, parts, strict=True):
            assert set(owners[part.numpy()]) == {name}
            assert len(part) == SIZES[name][split == "test"]


def test_rows_of_a_table_are_those_of_its_file(tmp_path):
    lines = list(mixed("train"))
    write_csv(tmp_path / "all.csv", lines)
    data = ClientTable(str(tmp_path / "all.csv"), client="hospital", test_share=0.3, features=["a"])
    data.setup()
    odd = [row for row in range(len(lines)) if row % 2]
    indices = FromIndices({"odd": odd}).split(data.train_set, None, 0)
    assert 0 < len(indices[0]) < len(odd)
    values = {float(data.train_set[int(sample)][0]) for sample in indices[0]}
    assert values <= {np.float32(lines[row]["a"]) for row in odd}


def test_without_test_data_a_share_of_each_clients_is_held_out(tmp_path):
    parts = {name: samples_of(name, "train") for name in NAMES}
    data = ClientDatasets({**parts, "none": ([], []), "one": (np.ones((1, 4), np.float32), [0])}, test_share=0.5)
    data.setup()
    sizes = {name: len(part) for name, part in read(data.test_set).items()}
    assert sizes == {"w10": 3, "w2": 4, "w7": 2, "none": 0, "one": 0}
    assert joined(read(data.train_set), read(data.test_set)).items() >= written()["train"].items()
    again = ClientDatasets({**parts, "none": ([], []), "one": (np.ones((1, 4), np.float32), [0])}, test_share=0.5)
    again.setup()
    assert read(again.test_set) == read(data.test_set)


def test_clients_without_samples_keep_their_place(tmp_path):
    pytest.importorskip("ijson")
    users = {"b": {"x": [[1.0]] * 4, "y": [0] * 4}, "none": {"x": [], "y": []}, "a": {"x": [[2]] * 4, "y": [1] * 4}}
    content = {"users": ["a", "none", "b", "absent"], "num_samples": [4, 0, 4, 0], "user_data": users}
    (tmp_path / "all.json").write_text(json.dumps(content))
    data = LEAF(str(tmp_path))
    data.setup()
    indices = ByKey("client").split(data.train_set, None, 0)
    assert indices.names == ("a", "none", "b", "absent")
    assert indices.sizes.tolist() == [3, 0, 3, 0]
    assert {float(data.train_set[int(sample)][0]) for sample in indices[0]} == {2.0}


def test_texts_are_encoded_and_strings_numbered(tmp_path):
    pytest.importorskip("ijson")
    users = {"b": {"x": ["ab", "ba"], "y": ["z", "a"]}, "a": {"x": ["aa"] * 3, "y": ["z", "z", "m"]}}
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "0.json").write_text(json.dumps({"users": list(users), "user_data": users}))
    data = LEAF(str(tmp_path), encode=lambda texts: np.array([[ord(letter) for letter in text] for text in texts]))
    data.setup()
    assert data.classes == ["a", "m", "z"]
    assert data.train_set.tensors[1].tolist() == [2, 0, 2, 2, 1]
    assert data.train_set.tensors[0].tolist() == [[97, 98], [98, 97], [97, 97], [97, 97], [97, 97]]
    with pytest.raises(MisconfigurationException, match=r"'b'.*encode="):
        LEAF(str(tmp_path)).setup()
    (tmp_path / "test" / "0.json").write_text(
        json.dumps({"users": ["b"], "user_data": {"b": {"x": ["q"], "y": ["q"]}}})
    )
    with pytest.raises(MisconfigurationException, match="q"):
        LEAF(str(tmp_path), encode=lambda texts: np.zeros((len(texts), 2))).setup()


@pytest.mark.parametrize(
    ("classes", "cells", "targets"),
    [
        (["well", "ill", "dead"], ["ill", "well"], [1, 0]),
        (["well", "ill"], ["1", "0"], [1, 0]),
        (["2", "1"], ["1", "2"], [1, 0]),
        (["01", "1"], ["1", "01"], [1, 0]),
        (["9", "9" * 20], ["9" * 20, "9"], [1, 0]),
        (["2", "1"], ["x", "2"], "client 'c'.*'x'.*classes="),
        (["well", "ill"], ["0", "2"], "client 'c'.*'2'.*0 to 1"),
        (["well", "ill"], ["0", "-1"], "client 'c'.*'-1'.*0 to 1"),
        (["well", "ill"], ["well", "dead"], "client 'c'.*'dead'.*classes="),
        (["well", "ill"], ["0", "0.5"], "classes=.*client 'c'.*float"),
        (["well"], ["well", "well"], r"classes.*\['well'\]"),
        (["ill", "ill"], ["ill", "ill"], r"classes.*\['ill', 'ill'\]"),
    ],
)
def test_given_classes_number_the_targets(classes, cells, targets, tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "c.csv").write_text("age,label\n" + "".join(f"1,{cell}\n" for cell in cells))
    if isinstance(targets, str):
        with pytest.raises(MisconfigurationException, match=targets):
            ClientFiles(str(tmp_path), classes=classes).setup()
        return
    data = ClientFiles(str(tmp_path), classes=classes)
    data.setup()
    assert [part.tensors[1].tolist() for part in (data.train_set, data.test_set)] == [targets, targets]
    assert data.classes == classes


@pytest.mark.parametrize(
    ("cells", "classes", "targets"),
    [
        (["01", "1", "10"], ["01", "1", "10"], [0, 1, 2]),
        (["9" * 20, "9"], ["9", "9" * 20], [1, 0]),
        (["1_0", "10"], ["10", "1_0"], [1, 0]),
        ([" 0", "-1", "+12"], None, [0, -1, 12]),
        (["007.5", "1e2"], None, [7.5, 100.0]),
    ],
)
def test_codes_of_digits_are_classes_and_numbers_are_none(cells, classes, targets, tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "c.csv").write_text("age,label\n" + "".join(f"01,{cell}\n" for cell in cells))
    data = ClientFiles(str(tmp_path))
    data.setup()
    assert data.classes == classes
    for part in (data.train_set, data.test_set):
        assert part.tensors[1].tolist() == targets
        assert part.tensors[0].tolist() == [[1.0]] * len(cells)


def test_classes_that_only_the_tests_have_and_clients_without_samples(tmp_path):
    pytest.importorskip("ijson")
    for split, label in (("train", "b"), ("test", "a")):
        (tmp_path / split).mkdir()
        users = {"u": {"x": [[1.0]], "y": [label]}, "none": {"x": [], "y": []}}
        (tmp_path / split / "0.json").write_text(json.dumps({"users": list(users), "user_data": users}))
    data = LEAF(str(tmp_path), classes=["a", "b", "c"])
    data.setup()
    assert [int(part[0][1]) for part in (data.train_set, data.test_set)] == [1, 0]
    assert data.feature_names is None


def test_readers_of_tables_name_their_inputs(tmp_path):
    (tmp_path / "all.csv").write_text("sex,client,label,age\n" + "1,a,0,2\n" * 5)
    data = ClientTable(str(tmp_path / "all.csv"))
    assert data.feature_names is None
    data.setup()
    assert data.feature_names == ["sex", "age"]
    files = ClientFiles(str(tmp_path), features=["age", "sex"])
    files.setup()
    assert files.feature_names == ["age", "sex"]


def test_a_list_of_numbers_is_the_inputs_of_a_table(tmp_path):
    lines = [{"client": "ab"[row % 2], "x": [row, 0.5], "label": row} for row in range(6)]
    write_jsonl(tmp_path / "all.jsonl", lines)
    data = ClientTable(str(tmp_path / "all.jsonl"), test_share=0.34)
    data.setup()
    found = sorted(x.tolist() for part in (data.train_set, data.test_set) for x, _ in part)
    assert found == [[float(row), 0.5] for row in range(6)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: ClientDatasets({"a": Stream()}), r"'a'.*Stream.*list\(dataset\)"),
        (lambda folder: ClientDatasets([1]), "train must be a dictionary"),
        (lambda folder: ClientDatasets({1.5: ([1], [1])}), r"1\.5.*float"),
        (lambda folder: ClientDatasets({7: ([1], [1]), "7": ([1], [1])}), "client 7 twice"),
        (lambda folder: ClientDatasets({"a": ([1], [1, 2])}), "'a'.*1 .* 2"),
        (lambda folder: ClientDatasets({"a": ([1.0], [1]), "b": ([[1.0]], [1])}), r"'b'.*\[1\].*\[\]"),
        (lambda folder: ClientDatasets({"a": ([1.0], [1])}), "test_share=0.2"),
        (lambda folder: ClientDatasets({"a": ([1.0], [1])}, {"a": ([], [])}), "'test'"),
        (lambda folder: ClientFiles(str(folder / "none")), "root=.*none"),
        (lambda folder: ClientFiles(str(folder)), "holds no file"),
        (lambda folder: ClientTable("none.csv"), f"none.csv.*{re.escape(str(Path.cwd()))}"),
        (lambda folder: LEAF(str(folder)), "root="),
        (lambda folder: FederatedHDF5(str(folder / "none.h5")), "train=.*none.h5"),
    ],
)
def test_what_is_no_data_of_clients_is_refused(make, message, tmp_path):
    pytest.importorskip("h5py")
    with pytest.raises(MisconfigurationException, match=message):
        make(tmp_path).setup()


@pytest.mark.parametrize(
    ("cells", "keywords", "message"),
    [
        ("c,age,label\na,1,0\nb,,1\n", {}, r"row 1.*'age'.*''"),
        ("c,age,label\na,1,0\n", {"target": "ill"}, "target='ill'"),
        ("c,age,label\na,1,0\n", {"features": ["sex"]}, "features=.*sex"),
        ("c,age,label\na,1,0\n", {"split": "fold"}, "split='fold'"),
        ("ward,age,label\na,1,0\n", {}, "client='c'"),
        ("c,label\na,1\n", {}, "no column of inputs"),
        ("c,age,label\na,nan,0\n", {}, r"row 0.*'age'.*'nan'"),
        ("c,age,label\na,1,0\nb,1,\n", {}, r"row 1.*'label'"),
        ("c,age,label\na,1,0\nb,1,  \n", {}, r"row 1.*'label'"),
        ("c,age,label\na,1,0.5\nb,1,nan\n", {}, r"row 1.*'label'.*'nan'"),
        ("c,age,label\na,1,-inf\nb,1,1\n", {}, r"row 0.*'label'.*'-inf'"),
        ("c,age,label\na,1,0\n,1,1\n", {}, r"1 of 2.*c.*number 1"),
        ("c,age,label\n ,1,0\nb,1,1\n", {}, r"1 of 2.*c.*number 0"),
    ],
)
def test_tables_that_lack_something_are_refused(cells, keywords, message, tmp_path):
    (tmp_path / "all.csv").write_text(cells)
    with pytest.raises(MisconfigurationException, match=message):
        ClientTable(str(tmp_path / "all.csv"), client="c", **keywords).setup()


def test_columns_are_found_by_name_in_each_clients_table(tmp_path):
    (tmp_path / "a.csv").write_text("age,label,weight\n" + "1,0,50\n" * 3)
    (tmp_path / "b.csv").write_text("weight,label,age\n" + "60,1,2\n" * 3)
    data = ClientFiles(str(tmp_path))
    data.setup()
    found = {tuple(x.tolist()) for x, _ in data.train_set}
    assert found == {(1.0, 50.0), (2.0, 60.0)}
    (tmp_path / "c.csv").write_text("age,label,weight,sex\n1,0,50,1\n")
    with pytest.raises(MisconfigurationException, match=r"c\.csv.*sex"):
        ClientFiles(str(tmp_path)).setup()
    ClientFiles(str(tmp_path), features=["age", "weight"]).setup()
    (tmp_path / "c.csv").write_text("age,label\n1,0\n")
    with pytest.raises(MisconfigurationException, match=r"c\.csv.*weight"):
        ClientFiles(str(tmp_path)).setup()


def test_targets_of_two_kinds_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("age,label\n1,0\n")
    (tmp_path / "b.csv").write_text("age,label\n1,ill\n")
    with pytest.raises(MisconfigurationException, match=r"client 'b'.*'ill'"):
        ClientFiles(str(tmp_path)).setup()
    (tmp_path / "b.csv").write_text("age,label\n1,0.5\n1,2\n")
    data = ClientFiles(str(tmp_path), test_share=0.5)
    data.setup()
    assert data.train_set.dataset.tensors[1].dtype is torch.float32
    (tmp_path / "0.csv").write_text("age,label\n1,well\n")
    with pytest.raises(MisconfigurationException, match="client 'a'"):
        ClientFiles(str(tmp_path)).setup()


def test_files_of_one_client_are_joined(tmp_path):
    (tmp_path / "a").mkdir()
    for number in range(2):
        np.savez(tmp_path / "a" / f"{number}.npz", x=np.full((3, 2), number), y=np.full(3, number))
    data = ClientFiles(str(tmp_path), test_share=0.4)
    data.setup()
    assert sorted(int(y) for part in (data.train_set, data.test_set) for _, y in part) == [0, 0, 0, 1, 1, 1]
    np.savez(tmp_path / "a" / "2.npz", x=np.zeros((3, 5)), y=np.zeros(3))
    with pytest.raises(MisconfigurationException, match="client 'a'"):
        ClientFiles(str(tmp_path)).setup()
    with pytest.raises(MisconfigurationException, match=r"shape=\[3, 3\].*9.*client 'w2'.*\[4\]"):
        made(FORMS["PFLlib"], tmp_path)(shape=[3, 3]).setup()


TABLE = "age,label\n" + "1,0\n2,1\n" * 5


@pytest.mark.parametrize(
    ("files", "clients", "sizes"),
    [
        (["north.csv", "SOUTH.CSV"], ("SOUTH", "north"), (16, 4)),
        (["north/Train.csv", "north/Test.csv"], ("north",), (10, 10)),
        (["Train/north.csv", "TEST/north.Csv"], ("north",), (10, 10)),
        (["TRAIN/north.csv"], ("north",), (8, 2)),
    ],
)
def test_names_of_files_and_folders_are_in_capitals_or_not(files, clients, sizes, tmp_path):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(TABLE)
    data = ClientFiles(str(tmp_path))
    data.setup()
    assert data.train_set.client.names == clients
    assert (len(data.train_set), len(data.test_set)) == sizes


def test_suffixes_in_capitals_say_the_format(tmp_path):
    pytest.importorskip("ijson")
    np.savez(tmp_path / "a.npz", x=np.ones((5, 1)), y=np.arange(5))
    (tmp_path / "a.npz").rename(tmp_path / "A.NPZ")
    data = ClientFiles(str(tmp_path))
    data.setup()
    assert (data.train_set.client.names, len(data.train_set)) == (("A",), 4)
    (tmp_path / "leaf" / "Train").mkdir(parents=True)
    users = {"u": {"x": [[1.0]] * 5, "y": [0] * 5}}
    (tmp_path / "leaf" / "Train" / "0.JSON").write_text(json.dumps({"users": ["u"], "user_data": users}))
    data = LEAF(str(tmp_path / "leaf"))
    data.setup()
    assert len(data.train_set) == 4
    (tmp_path / "owners.CSV").write_text("client\nb\na\n")
    assert FromIndices(tmp_path / "owners.CSV").split(2, None, 0).names == ("a", "b")


def test_two_folders_of_a_split_are_refused(tmp_path):
    for name in ("train", "Train"):
        (tmp_path / name).mkdir(exist_ok=True)
    if len(list(tmp_path.iterdir())) == 1:
        pytest.skip("file names are in capitals or not")
    with pytest.raises(MisconfigurationException, match=r"root=.*one folder train, not Train and train"):
        ClientFiles(str(tmp_path)).setup()


def test_what_is_missing_in_other_tables_is_refused(tmp_path):
    pytest.importorskip("pyarrow")
    row = {"client": "a", "age": 1.0, "label": 0}
    for wrong, message in (({"age": None}, "row 1.*'age'.*None"), ({"label": None}, "row 1.*'label'")):
        write_parquet(tmp_path / "all.parquet", [row, {**row, **wrong}])
        with pytest.raises(MisconfigurationException, match=message):
            ClientTable(str(tmp_path / "all.parquet")).setup()
    write_jsonl(tmp_path / "all.jsonl", [{**row, "age": [1, 2]}, {**row, "age": [1]}])
    with pytest.raises(MisconfigurationException, match=r"'age'.*lists"):
        ClientTable(str(tmp_path / "all.jsonl")).setup()


@pytest.mark.parametrize("target", [None, "", " "])
def test_a_target_that_is_missing_is_no_class(target, tmp_path):
    pytest.importorskip("ijson")
    content = {"users": ["u", "v"], "user_data": {name: {"x": [[1], [2]], "y": ["a", "b"]} for name in "uv"}}
    content["user_data"]["v"]["y"][1] = target
    (tmp_path / "all.json").write_text(json.dumps(content))
    for classes in (None, ["a", "b", str(target)]):
        with pytest.raises(MisconfigurationException, match=r"client 'v'.*None"):
            LEAF(str(tmp_path), classes=classes).setup()


@pytest.mark.parametrize(
    "text", ["{", '{"users": ["a"], "user_data": {"a": 3}}', '{"users": 3}', "[" * 100_000, "\x00"]
)
def test_damaged_json_is_refused(text, tmp_path):
    pytest.importorskip("ijson")
    (tmp_path / "all.json").write_text(text)
    with pytest.raises(MisconfigurationException, match=r"all\.json"):
        LEAF(str(tmp_path)).setup()


class Code:
    def __reduce__(self):
        return (Path.touch, (Path("marker"),))


def test_a_pickle_with_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").mkdir()
    np.savez(tmp_path / "train" / "0.npz", data=np.array({"x": Code(), "y": [1]}, dtype=object))
    with pytest.raises(MisconfigurationException, match=r"0\.npz.*it holds (pathlib|builtins\.getattr)"):
        ClientFiles(str(tmp_path)).setup()
    assert not Path("marker").exists()
    dump(tmp_path / "clients.pkl", {0: [1], 1: Code()})
    with pytest.raises(MisconfigurationException, match=r"clients\.pkl.*pathlib"):
        FromIndices(tmp_path / "clients.pkl")
    assert not Path("marker").exists()


def test_a_recipe_names_a_reader(tmp_path):
    import lightning.pytorch as pl

    from lightning_lowrank.models import MLP, Classifier

    data = made(FORMS["LEAF"], tmp_path)(shape=[2, 2])
    loop = FederatedLoop(FedAvg(), partition=ByKey("client"), personal_test="by_client")
    trainer = pl.Trainer(
        max_epochs=1, callbacks=[loop], logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Classifier(MLP(in_features=4, hidden=[4], out_features=3)), data)
    assert loop.indices.names == tuple(NAMES)
    assert trainer.callback_metrics["personal/val_acc"] == trainer.callback_metrics["global/val_acc"]
    assert torch.isfinite(trainer.callback_metrics["val_loss"])
