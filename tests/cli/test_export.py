"""``lightning-lowrank export``: what it refuses to read and to write."""

import errno
import os
import pickle
from argparse import Namespace
from pathlib import Path, PurePosixPath

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from lightning_lowrank import MatrixProduct, convert, export_adapter
from lightning_lowrank.cli import main
from tests.cli.run_folders import configured, rows_of


@pytest.mark.parametrize("kept", [0, 100, 0.5, 0.999])
@pytest.mark.parametrize("form", ["safetensors", "peft"])
def test_export_refuses_a_checkpoint_that_is_cut_short(tmp_path, form, kept):
    whole = tmp_path / "whole.ckpt"
    torch.save({"state_dict": {"weight": torch.randn(99, 99)}}, whole)
    data = whole.read_bytes()
    (tmp_path / "torn.ckpt").write_bytes(data[: kept if isinstance(kept, int) else int(kept * len(data))])
    with pytest.raises(SystemExit, match=r"torn\.ckpt"):
        main(["export", str(tmp_path / "torn.ckpt"), str(tmp_path / "out"), "--format", form])
    torch.save([1, 2], whole)
    with pytest.raises(SystemExit, match=r"whole\.ckpt"):
        main(["export", str(whole), str(tmp_path / "out"), "--format", form])
    assert not (tmp_path / "out").exists()


def test_export_writes_to_files_only(tmp_path):
    checkpoint, fifo = tmp_path / "run.ckpt", tmp_path / "fifo"
    torch.save({"state_dict": {"weight": torch.ones(3)}}, checkpoint)
    os.mkfifo(fifo)
    (tmp_path / "file").write_text("kept")
    before = checkpoint.read_bytes()
    for target, said in (
        (tmp_path, "because it is a folder"),
        ("/dev/null", "because it is no regular file"),
        (fifo, "because it is no regular file"),
        (tmp_path / "file" / "out.safetensors", r"out\.safetensors"),
        (checkpoint, r"run\.ckpt"),
    ):
        with pytest.raises(SystemExit, match=said):
            main(["export", str(checkpoint), str(target)])
    assert checkpoint.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "file", "run.ckpt"]


@pytest.mark.parametrize("prefix", ["network", "network."])
def test_a_prefix_is_an_attribute_with_or_without_its_dot(tmp_path, prefix):
    tensors = {"network.body.weight": torch.ones(3), "networks.weight": torch.ones(2)}
    torch.save({"state_dict": tensors}, tmp_path / "run.ckpt")
    main(["export", str(tmp_path / "run.ckpt"), str(tmp_path / "out"), "--prefix", prefix])
    assert list(load_file(tmp_path / "out")) == ["body.weight"]
    with pytest.raises(SystemExit, match=r"--prefix.*'net'.*network\.body\.weight, networks\.weight"):
        main(["export", str(tmp_path / "run.ckpt"), str(tmp_path / "other"), "--prefix", "net"])


def test_what_is_no_tensor_is_left_out_and_named(tmp_path, capsys):
    state = {"weight": torch.ones(3), "body._extra_state": {"steps": 3}}
    torch.save({"state_dict": state}, tmp_path / "run.ckpt")
    main(["export", str(tmp_path / "run.ckpt"), str(tmp_path / "out")])
    assert list(load_file(tmp_path / "out")) == ["weight"]
    assert "wrote 1 tensors" in (printed := capsys.readouterr().out)
    assert "tensors alone: body._extra_state" in printed


def test_export_names_objects_that_torch_does_not_read(tmp_path):
    hyperparameters = {"folder": PurePosixPath("data"), "options": Namespace(width=3)}
    path = tmp_path / "run.ckpt"
    torch.save({"state_dict": {"weight": torch.ones(3)}, "hyper_parameters": hyperparameters}, path)
    with pytest.raises(SystemExit, match=r"argparse\.Namespace.*pathlib\.(_local\.)?PurePosixPath") as refused:
        main(["export", str(path), str(tmp_path / "out")])
    assert "\x1b" not in str(refused.value)
    with torch.serialization.safe_globals([Namespace, PurePosixPath]):
        main(["export", str(path), str(tmp_path / "out")])
    path.write_bytes(b"no checkpoint")
    with pytest.raises(SystemExit, match=r"run\.ckpt") as refused:
        main(["export", str(path), str(tmp_path / "other")])
    assert "\x1b" not in str(refused.value)
    assert "weights_only" not in str(refused.value)


def test_export_of_a_module_that_was_converted_by_hand_says_so(tmp_path):
    torch.save({"state_dict": {"0.factors.U": torch.ones(3, 1)}}, tmp_path / "run.ckpt")
    for form, said in (("safetensors", "converted without LowRank"), ("peft", "save_weights_only=True")):
        with pytest.raises(SystemExit, match=said):
            main(["export", str(tmp_path / "run.ckpt"), str(tmp_path / "out"), "--format", form])


WEIGHTS = {"weight": torch.ones(3)}


def saved(content):
    return lambda path: torch.save(content, path)


@pytest.mark.parametrize("form", ["safetensors", "peft"])
@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.mkdir(), "a folder: give the"),
        (os.mkfifo, "no such file"),
        (lambda path: path.write_text("a: 1"), "no checkpoint: torch.save has not written it"),
        (lambda path: path.write_text("hello"), "no checkpoint: torch.save has not written it"),
        (lambda path: path.touch(), "no checkpoint: it is empty"),
        (lambda path: path.write_bytes(bytes(range(256))), "no checkpoint: torch.save has not written it"),
        (lambda path: path.write_bytes(pickle.dumps({"state_dict": WEIGHTS})), "cannot be read"),
        (saved(WEIGHTS), r"no state_dict.*load_state_dict"),
        (saved({"epoch": 3}), "no state_dict"),
        (saved({"state_dict": None}), "its state_dict"),
        (saved({"state_dict": [1]}), "its state_dict"),
        (saved({"state_dict": {1: torch.ones(2)}}), "its state_dict"),
        (saved({"state_dict": {"steps": 3}}), "holds no weights: its state_dict holds only steps=3"),
        (saved({"state_dict": {}}), "holds no weights: its state_dict holds nothing"),
        (saved({"state_dict": WEIGHTS, "callbacks": [1]}), "its callbacks"),
        (saved({"state_dict": WEIGHTS, "callbacks": {"LowRank": 3}}), "state of LowRank.*3"),
        (saved({"state_dict": WEIGHTS, "callbacks": {"LowRank": {"layers": [{}], "outline": {}}}}), "state of LowRank"),
        (saved({"state_dict": WEIGHTS, "callbacks": {"TrainedCheckpoints": {"base": [1]}}}), "TrainedCheckpoints"),
    ],
)
def test_what_is_no_checkpoint_of_a_run_is_refused_in_one_sentence(tmp_path, form, write, said):
    path = tmp_path / "odd.ckpt"
    write(path)
    with pytest.raises(SystemExit, match=rf"odd\.ckpt.*{said}"):
        main(["export", str(path), str(tmp_path / "out"), "--format", form])
    assert not (tmp_path / "out").exists()


def test_a_folder_of_checkpoints_is_not_one(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    torch.save({"state_dict": WEIGHTS}, tmp_path / "checkpoints" / "last.ckpt")
    with pytest.raises(SystemExit, match=r"give one of .*last\.ckpt"):
        main(["export", str(tmp_path), str(tmp_path / "out")])


@pytest.mark.parametrize("arguments", [["--client", "0"], ["--format", "peft"]])
def test_a_federated_state_of_another_version_is_named(tmp_path, arguments):
    content = {"state_dict": WEIGHTS, "callbacks": {"FederatedLoop": {"server": None}}}
    torch.save(content, tmp_path / "run.ckpt")
    with pytest.raises(SystemExit, match=r"run\.ckpt.*state of FederatedLoop"):
        main(["export", str(tmp_path / "run.ckpt"), str(tmp_path / "out"), *arguments])


@pytest.mark.parametrize(
    ("tensor", "said"),
    [(torch.eye(3).to_sparse(), r"odd \(sparse or nested\)"), (torch.ones(3, device="meta"), r"odd \(without data\)")],
)
def test_tensors_that_safetensors_cannot_hold_are_named(tmp_path, tensor, said):
    torch.save({"state_dict": {"odd": tensor}}, tmp_path / "run.ckpt")
    with pytest.raises(SystemExit, match=said):
        main(["export", str(tmp_path / "run.ckpt"), str(tmp_path / "out")])


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), None])
def test_a_full_disk_is_named_with_its_path_and_leaves_nothing(tmp_path, monkeypatch, error):
    def save_file(tensors, path, metadata=None):
        Path(path).write_bytes(b"a part")
        raise error or SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", save_file)
    torch.save({"state_dict": WEIGHTS}, tmp_path / "run.ckpt")
    target = tmp_path / "out" / "dense.safetensors"
    with pytest.raises(SystemExit, match=rf"{target}.*No space left.*Free space on the disk of {target.parent}"):
        main(["export", str(tmp_path / "run.ckpt"), str(target)])
    assert not list(target.parent.iterdir())
    network = nn.Sequential(nn.Linear(6, 5))
    convert(network, MatrixProduct(), rank=2)
    with pytest.raises(MisconfigurationException, match=rf"{target.parent}/adapter_model.*No space left.*Free space"):
        export_adapter(network, target.parent)
    assert not list(target.parent.iterdir())


RED = "\x1b[31mred"


@pytest.mark.parametrize(
    "words",
    [
        ["fit", RED],
        ["fit", "--config", f"{RED}.yaml"],
        ["fit", "--config", "quickstart", "--model.network", RED],
        ["fit", "--config", "quickstart", "--trainer.max_epochs", RED],
        ["inspect", "--config", "quickstart", "--federated.algorithm", RED],
        ["report", RED],
        ["export", RED, "out"],
        ["export", "run.ckpt", "out", f"--{RED}"],
        [RED],
    ],
    ids=str,
)
def test_a_message_holds_nothing_that_a_terminal_obeys(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    printed = capsys.readouterr()
    said = f"{ended.value}{printed.err}{printed.out}"
    assert "\x1b" not in said
    assert "\\x1b[31mred" in said or "x001b" in said


def test_report_shows_a_metric_as_text(tmp_path):
    run = configured(tmp_path / "version_0", 0, rows_of([0.5, 0.75], up=100, down=200))
    with pytest.raises(SystemExit, match=r"\\x1b\[31mred") as ended:
        main(["report", str(run), "--metric", RED, "--output", str(tmp_path / "page")])
    assert "\x1b" not in str(ended.value)
