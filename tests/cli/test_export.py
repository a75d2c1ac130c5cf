"""``lightning-lowrank export``: what it refuses to read and to write."""

import os

import pytest
import torch

from lightning_lowrank.cli import main


@pytest.mark.parametrize("kept", [0, 100, 0.5, 0.999])
@pytest.mark.parametrize("form", ["safetensors", "peft"])
def test_export_refuses_a_checkpoint_that_is_cut_short(tmp_path, form, kept):
    whole = tmp_path / "whole.ckpt"
    torch.save({"state_dict": {"weight": torch.randn(99, 99)}}, whole)
    data = whole.read_bytes()
    (tmp_path / "torn.ckpt").write_bytes(data[: kept if isinstance(kept, int) else int(kept * len(data))])
    with pytest.raises(SystemExit, match=r"^lightning-lowrank: \S*torn\.ckpt cannot be read: it is cut short"):
        main(["export", str(tmp_path / "torn.ckpt"), str(tmp_path / "out"), "--format", form])
    torch.save([1, 2], whole)
    with pytest.raises(SystemExit, match=r"whole\.ckpt is no checkpoint of a Lightning trainer"):
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
        (tmp_path / "file" / "out.safetensors", "cannot be written"),
        (checkpoint, "is the checkpoint itself"),
    ):
        with pytest.raises(SystemExit, match=said):
            main(["export", str(checkpoint), str(target)])
    assert checkpoint.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "file", "run.ckpt"]
