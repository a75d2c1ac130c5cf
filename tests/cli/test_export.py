"""``lightning-lowrank export``: what it refuses to read and to write."""

import os
from argparse import Namespace
from pathlib import PurePosixPath

import pytest
import torch
from safetensors.torch import load_file

from lightning_lowrank.cli import main


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
    with pytest.raises(SystemExit, match=r"--prefix.*'net'"):
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
    with pytest.raises(SystemExit, match=r"argparse\.Namespace.*pathlib\.PurePosixPath") as refused:
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
    for form, said in (
        ("safetensors", "converted without LowRank"),
        ("peft", "save_weights_only=True"),
    ):
        with pytest.raises(SystemExit, match=said):
            main(["export", str(tmp_path / "run.ckpt"), str(tmp_path / "out"), "--format", form])
