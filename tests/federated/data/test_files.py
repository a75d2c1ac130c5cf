"""Divisions, tables of labels and keys that other projects' files hold, and their evaluation samples."""

import io
import json
import os
import pickle
import random

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import Subset

from lightning_lowrank import ByKey, Dirichlet, FromIndices, LabelTable
from lightning_lowrank.federated.data.rows import Rows
from tests.federated.data.datasets import WithAttribute

OWNED = {0: [4, 0], 1: [1, 5, 2], 2: [3]}
OWNERS = [0, 1, 1, 2, 0, 1]
DATA = WithAttribute(6)


def parts(partition, dataset=DATA):
    found = partition.split(dataset, None, 0)
    return {name: sorted(part.tolist()) for name, part in zip(found.names or range(len(found)), found, strict=True)}


WANTED = {client: sorted(samples) for client, samples in OWNED.items()}


# Divisions


def write_json(path, content):
    path.write_text(json.dumps(content))


def write_pickle(protocol):
    return lambda path, content: path.write_bytes(pickle.dumps(content, protocol))


def write_literal(path, content):
    path.write_text("{\n" + ",\n".join(f"{name}: [\n{str(each)[1:-1]}]" for name, each in content.items()) + "\n}\n")


def arrays(content):
    return {name: np.array(samples, np.uint16) for name, samples in content.items()}


FILES = {
    "json.json": (write_json, OWNED),
    "owners.json": (write_json, OWNERS),
    "tensors.pt": (lambda path, content: torch.save(content, path), {k: torch.tensor(v) for k, v in OWNED.items()}),
    "arrays.pt": (lambda path, content: torch.save(content, path), arrays(OWNED)),
    "literal.txt": (write_literal, OWNED),
    "clients.npz": (lambda path, content: np.savez(path, **{str(k): v for k, v in content.items()}), arrays(OWNED)),
    "owners.npz": (lambda path, content: np.savez(path, owners=content), OWNERS),
    "objects.npz": (lambda path, content: np.savez(path, data=np.array(content, dtype=object)), arrays(OWNED)),
    "owners.npy": (np.save, OWNERS),
    "objects.npy": (lambda path, content: np.save(path, np.array(content, dtype=object)), arrays(OWNED)),
    **{f"{n}.pkl": (write_pickle(n), arrays(OWNED)) for n in range(pickle.HIGHEST_PROTOCOL + 1)},
    **{f"sets{n}.pickle": (write_pickle(n), {k: set(v) for k, v in OWNED.items()}) for n in (0, 2, 5)},
    "no_suffix": (write_pickle(2), {k: [np.int64(each) for each in v] for k, v in OWNED.items()}),
}


@pytest.mark.parametrize("name", FILES)
def test_a_division_of_any_file_is_repeated(name, tmp_path):
    write, content = FILES[name]
    write(tmp_path / name, content)
    assert parts(FromIndices(tmp_path / name)) == WANTED
    assert parts(FromIndices(str(tmp_path / name))) == WANTED


@pytest.mark.parametrize(
    "given",
    [
        OWNED,
        list(OWNED.values()),
        [set(samples) for samples in OWNED.values()],
        [Subset(DATA, samples) for samples in OWNED.values()],
        arrays(OWNED),
        OWNERS,
        np.array(OWNERS),
        torch.tensor(OWNERS),
        {"train": OWNED, "test": [[0]]},
        [{"train": samples, "test": [], "val": []} for samples in OWNED.values()],
        {client: {"train": samples, "test": []} for client, samples in OWNED.items()},
    ],
    ids=["names", "lists", "sets", "subsets", "arrays", "owners", "array", "tensor", "splits", "list of", "by client"],
)
def test_python_says_it_as_well(given):
    assert parts(FromIndices(given)) == WANTED


@pytest.mark.parametrize("columns", ["client", "client_id", "ward"])
@pytest.mark.parametrize("index", [None, "sample", "row"])
def test_csv_with_and_without_an_index(columns, index, tmp_path):
    places = [3, 0, 5, 1, 4, 2] if index else range(6)
    lines = [f"{OWNERS[place]},x,{place}" for place in places]
    (tmp_path / "all.csv").write_text("\n".join([f"{columns},data_path,{index or 'size'}", *lines]) + "\n")
    client = "ward" if columns == "ward" else None
    given = FromIndices(tmp_path / "all.csv", client=client, index=index if index == "row" else None)
    assert parts(given) == WANTED
    keyed = parts(ByKey(columns, file=str(tmp_path / "all.csv"), index=index if index == "row" else None))
    assert {int(name): samples for name, samples in keyed.items()} == WANTED


def test_a_file_of_keys_goes_by_rows(tmp_path):
    (tmp_path / "all.csv").write_text("ward\n" + "\n".join(map(str, OWNERS)))
    kept = WithAttribute(3)
    kept.rows = Rows(torch.tensor([5, 3, 4]), 6)
    assert parts(ByKey("ward", file=str(tmp_path / "all.csv")), kept) == {"0": [2], "1": [0], "2": [1]}
    assert parts(FromIndices(OWNERS), kept) == {0: [2], 1: [0], 2: [1]}
    with pytest.raises(MisconfigurationException, match=r"file=.*6.*7|file=.*7.*6"):
        ByKey("ward", file=str(tmp_path / "all.csv")).split(WithAttribute(7), None, 0)
    (tmp_path / "index.csv").write_text("ward,index\na,0\nb,0\n")
    with pytest.raises(MisconfigurationException, match="file="):
        ByKey("ward", file=str(tmp_path / "index.csv")).split(WithAttribute(2), None, 0)


@pytest.mark.parametrize("cell", ["", '" "'])
def test_an_empty_cell_is_no_client(cell, tmp_path):
    (tmp_path / "all.csv").write_text(f"ward,size\na,1\n{cell},1\n")
    with pytest.raises(MisconfigurationException, match=r"all\.csv.*'ward'.*number 1"):
        ByKey("ward", file=str(tmp_path / "all.csv")).split(WithAttribute(2), None, 0)
    table = FEDLAB.replace("Client   1", cell.strip('"'))
    (tmp_path / "report.csv").write_text(table)
    with pytest.raises(MisconfigurationException, match=r"report\.csv.*number 1"):
        LabelTable(tmp_path / "report.csv")


def test_a_column_of_no_label_is_refused(tmp_path):
    (tmp_path / "report.csv").write_text(FEDLAB.replace("class2", "class two"))
    with pytest.raises(MisconfigurationException, match=r"class0.*'class two'"):
        LabelTable(tmp_path / "report.csv")


class Code:
    def __reduce__(self):
        return (os.system, ("touch marker",))


JUNK = random.Random(0).randbytes(200)
FRAME_OF_MANY_BYTES = b"\x80\x04\x95" + b"\xff" * 8 + b"."
TEXT_OF_MANY_BYTES = b"\x80\x04\x8d" + b"\xff" * 8 + b"."


def damaged_archive() -> bytes:
    """A compressed ``.npz`` whose data cannot be decompressed."""
    file = io.BytesIO()
    np.savez_compressed(file, client=np.arange(1000))
    data = bytearray(file.getvalue())
    start = data.index(b"client.npy") + len(b"client.npy") + 30
    data[start : start + 40] = bytes(40)
    return bytes(data)


class OtherFlags:
    """A type of integers that says to NumPy that it holds objects, whose addresses the data then are."""

    def __reduce__(self):
        return (np.dtype, ("i8", False, True), (3, "<", None, None, None, 8, 8, 63))


class OfOtherFlags:
    def __reduce__(self):
        build, arguments, (version, _, _, order, data) = np.arange(3).__reduce__()
        return build, arguments, (version, (3,), OtherFlags(), order, data)


def test_a_type_whose_flags_are_a_lie_is_read_by_its_name(tmp_path):
    (tmp_path / "owners.pkl").write_bytes(pickle.dumps(OfOtherFlags()))
    assert FromIndices(tmp_path / "owners.pkl").split(3, None, 0).sizes.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("record.pkl", pickle.dumps(np.zeros(2, [("a", "i4")])), "record"),
        ("type.pkl", pickle.dumps(OfOtherFlags()).replace(b"i8", b"V8"), "type"),
        ("junk.pkl", JUNK, "junk"),
        ("frame.pkl", FRAME_OF_MANY_BYTES, "frame"),
        ("text.pkl", TEXT_OF_MANY_BYTES, "text"),
        ("cut.pkl", pickle.dumps(OWNED)[:-3], "cut"),
        ("code.pkl", pickle.dumps([Code()]), r"posix\.system|nt\.system"),
        ("objects.pkl", pickle.dumps(DATA), "WithAttribute"),
        ("code", pickle.dumps({0: Code()}), r"posix\.system|nt\.system"),
        ("junk.npz", JUNK, "junk"),
        ("data.npz", damaged_archive(), "data"),
        ("junk.npy", b"\x93NUMPY" + JUNK, "junk"),
        ("header.npy", b"\x93NUMPY\x01\x00\x08\x00{'descr'", "header"),
        ("junk.pt", JUNK, "junk"),
        ("deep.json", b"[" * 100_000 + b"]" * 100_000, "deep"),
        ("deep.txt", b"[" * 100_000 + b"]" * 100_000, "deep"),
        ("call.txt", b"__import__('os').system('touch marker')", "call"),
        ("junk.csv", b"\xff\xfe\x00", "junk"),
        ("cells.csv", b"client,index\na,1\nb\n", "row 2"),
        ("quote.csv", b'client,index\n"a,1\n"b",0\n', "line 2"),
        ("words.csv", b"client,index\na,one\n", "'index'.*one"),
        ("columns.csv", b"ward,row\na,1\n", r"client=.*\['ward', 'row'\]"),
        ("empty.csv", b"user,index\na,0\n,1\n", r"empty\.csv.*'user'.*number 1"),
        ("empty.json", b'["a", " ", "a"]', "number 1"),
        ("sheet.xlsx", b"", r"\.xlsx"),
        ("minus.json", b"[0, -1, 0]", "sample 1.*-1"),
        ("some.json", b'{"a": {"train": [0], "test": []}, "b": [1]}', "'train' and 'test'"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)
def test_other_files_are_refused_by_name(name, content, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MisconfigurationException, match=message):
        FromIndices(name)
    assert not (tmp_path / "marker").exists()


def test_torch_files_with_code_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({0: Code()}, "code.pt")
    with pytest.raises(MisconfigurationException, match=r"code\.pt"):
        FromIndices("code.pt")
    assert not (tmp_path / "marker").exists()


def test_as_many_owners_as_samples():
    with pytest.raises(MisconfigurationException, match=r"6 samples.*7"):
        FromIndices(OWNERS).split(7, None, 0)


# Evaluation samples


def test_divisions_of_the_evaluation_set():
    partition = FromIndices({"train": {"b": [0, 1], "a": [2]}, "test": {"a": [1, 3], "c": [0]}})
    indices = partition.split(6, None, 0)
    assert indices.names == ("a", "b")
    assert [part.tolist() for part in partition.divide_evaluation(WithAttribute(4), indices)] == [[1, 3], []]
    held_out = WithAttribute(2)
    held_out.rows = Rows(torch.tensor([3, 9]), 10)
    assert [part.tolist() for part in partition.divide_evaluation(held_out, indices)] == [[0], []]


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ({"08": [0], "10": [1]}, {"10": [3]}),
        ({"1": [0], "2": [1]}, {"2": [3], "server": [0]}),
        ([[0], [1]], {"1": [3], "x": [0]}),
    ],
)
def test_names_are_integers_in_one_of_the_divisions_alone(train, test):
    partition = FromIndices({"train": train, "test": test})
    found = partition.divide_evaluation(WithAttribute(4), partition.split(2, None, 0))
    assert [part.tolist() for part in found] == [[], [3]]


@pytest.mark.parametrize("number", ["{}", "{}.0"])
@pytest.mark.parametrize("index", [None, "index"])
def test_a_negative_number_as_client_is_refused_as_text_too(tmp_path, index, number):
    lines = [f"{number.format(client)},{10 + place}" for place, client in enumerate([0, 1, -1, 2])]
    (tmp_path / "owners.csv").write_text("\n".join([f"client,{index or 'size'}", *lines]))
    with pytest.raises(MisconfigurationException, match=rf"sample {12 if index else 2} has the client -1"):
        FromIndices(tmp_path / "owners.csv")
    assert FromIndices(["-1", "b"]).split(2, None, 0).names == ("-1", "b")


def test_keys_of_the_evaluation_set():
    train, test = (
        WithAttribute(4, ward=["u10", "u2", "u2", "u7"]),
        WithAttribute(5, ward=["u2", "x", "u10", "u2", "u2"]),
    )
    partition = ByKey("ward")
    indices = partition.split(train, None, 0)
    assert [part.tolist() for part in partition.divide_evaluation(test, indices)] == [[0, 3, 4], [], [2]]
    with pytest.raises(MisconfigurationException, match=r"'ward'.*'u2'.*1"):
        partition.divide_evaluation(WithAttribute(2, ward=[1, 2]), indices)


@pytest.mark.parametrize(
    "partition", [Dirichlet(0.5), FromIndices([[0]]), LabelTable([[1]])], ids=["Dirichlet", "FromIndices", "LabelTable"]
)
def test_partitions_that_say_nothing_of_evaluation_samples(partition):
    with pytest.raises(MisconfigurationException, match="personal_test='by_client'"):
        partition.divide_evaluation(DATA, FromIndices([[0]]).split(DATA, None, 0))


# Tables of labels

LABELS = torch.arange(60) % 3
TABLE = [{0: 5, 2: 1}, {1: 20}, {0: 15, 1: 0}]


def counts(partition, labels=LABELS):
    return partition.split(len(labels), None, 0, labels).label_counts(labels).tolist()


FEDLAB = "Class frequencies:\nclient,class0,class1,class2,Amount\n" + "".join(
    f"Client {client:3d},{','.join(f'{share:.3f}' for share in shares)},{amount}\n"
    for client, (shares, amount) in enumerate((((5 / 6, 0, 1 / 6), 6), ((0, 1, 0), 20), ((1, 0, 0), 15)))
)
TABLES = {
    "table.json": lambda path: write_json(path, {str(client): row for client, row in enumerate(TABLE)}),
    "config.json": lambda path: write_json(
        path, {"num_clients": 3, "Size of samples for labels in clients": [list(row.items()) for row in TABLE]}
    ),
    "report.csv": lambda path: path.write_text(FEDLAB),
    "distribution.txt": lambda path: path.write_text(str(dict(enumerate(TABLE)))),
    "table.npy": lambda path: np.save(path, [[5, 0, 1], [0, 20, 0], [15, 0, 0]]),
}


@pytest.mark.parametrize("name", [None, *TABLES])
def test_a_table_of_labels_is_repeated(name, tmp_path):
    given = TABLE
    if name is not None:
        given = tmp_path / name
        TABLES[name](given)
    assert counts(LabelTable(given)) == [[5, 0, 1], [0, 20, 0], [15, 0, 0]]


def test_a_table_of_another_data_set_says_proportions():
    labels = torch.tensor([0] * 7 + [1] * 40 + [2] * 3)
    assert counts(LabelTable(TABLE, proportions=True), labels) == [[2, 0, 3], [0, 40, 0], [5, 0, 0]]
    assert sum(map(sum, counts(LabelTable([[1, 1, 1]] * 7, proportions=True), labels))) == 50
    with pytest.raises(MisconfigurationException, match=r"20 .*label 0.*7.*proportions=True"):
        counts(LabelTable(TABLE), labels)
    with pytest.raises(MisconfigurationException, match=r"labels \[2\]"):
        counts(LabelTable([[1, 1]], proportions=True))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], r"\[\]"),
        ([[1, -2]], r"client 0.*-2"),
        ([[1], 3], "client 1.*3"),
        ([[0.5]], r"client 0.*0\.5"),
        ({"a": {"x": 1}}, "client 0.*x"),
    ],
)
def test_tables_that_are_none_are_refused(given, message):
    with pytest.raises(MisconfigurationException, match=message):
        LabelTable(given)


def test_labels_that_nobody_has_are_refused():
    with pytest.raises(MisconfigurationException, match=r"label 7.*client 0"):
        counts(LabelTable([{7: 1}]))
