"""A run that is killed leaves no torn checkpoint, and a torn one is recognised."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank import FedAvg, FederatedLoop, WholeCheckpoints
from lightning_lowrank.cli import main
from lightning_lowrank.federated import safe_files
from lightning_lowrank.run_metadata import read_metadata, write_metadata
from tests.helpers import Data, Module, fit, trainer


def make_run(folder, **arguments):
    loop = FederatedLoop(FedAvg(), clients=3, summary=False)
    kept = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_last=True)
    settings = {name: arguments.pop(name) for name in ("logger",) if name in arguments}
    fit(trainer(folder, loop, kept, max_epochs=2, **settings), Module(), Data(), **arguments)


@pytest.fixture
def across_file_systems(monkeypatch):
    """Let the process die in the middle of each move from one folder to another, as on another file system."""
    rename, replace = os.rename, os.replace

    def crossing(move):
        def moved(source, target, **keywords):
            if Path(source).resolve().parent == Path(target).resolve().parent:
                return move(source, target, **keywords)
            Path(target).write_bytes(Path(source).read_bytes()[:1000])
            os.kill(os.getpid(), signal.SIGKILL)

        return moved

    monkeypatch.setattr(os, "rename", crossing(rename))
    monkeypatch.setattr(os, "replace", crossing(replace))


def in_a_child(work):
    """Run something in a process of its own, and return the signal that ended it, if any."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


@pytest.mark.slow
def test_the_loop_writes_beside_the_target(tmp_path, across_file_systems):
    ended = []

    class Saves(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            ended.append(in_a_child(lambda: trainer.save_checkpoint(tmp_path / "last.ckpt")))

    run = trainer(tmp_path, FederatedLoop(FedAvg(), clients=3, summary=False), Saves(), max_epochs=1)
    fit(run, Module(), Data())
    assert ended == [0]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["epoch"] == 1
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


class KillsItself:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)


def test_killed_inside_a_write(tmp_path):
    plugin, path = WholeCheckpoints(), tmp_path / "last.ckpt"
    plugin.save_checkpoint({"a": torch.ones(5)}, path)
    assert in_a_child(lambda: plugin.save_checkpoint({"a": torch.zeros(9), "b": KillsItself()}, path)) == signal.SIGKILL
    assert len(list(tmp_path.glob(".last.ckpt.*.part"))) == 1
    assert torch.equal(plugin.load_checkpoint(path)["a"], torch.ones(5))
    plugin.save_checkpoint({"a": torch.zeros(5)}, path)
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(AttributeError, match="local object"):
        WholeCheckpoints().save_checkpoint({"a": lambda: 1}, tmp_path / "last.ckpt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("as_text", [False, True])
def test_a_full_disk_is_named(tmp_path, monkeypatch, as_text):
    def save(checkpoint, file):
        file.write(b"a part")
        raise RuntimeError("write failed") if as_text else OSError(errno.ENOSPC, "No space left on device")

    WholeCheckpoints().save_checkpoint({"a": 1}, tmp_path / "last.ckpt")
    before = (tmp_path / "last.ckpt").read_bytes()
    monkeypatch.setattr(torch, "save", save)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    with pytest.raises(MisconfigurationException, match=rf"{tmp_path}/last\.ckpt.*full.*dirpath"):
        WholeCheckpoints().save_checkpoint({"a": 2}, tmp_path / "last.ckpt")
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]
    assert (tmp_path / "last.ckpt").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "empty", "changed"])
def test_a_torn_checkpoint_is_named_with_the_newest_whole_one(tmp_path, damage):
    make_run(tmp_path)
    path = tmp_path / "last.ckpt"
    content = bytearray(path.read_bytes())
    if damage == "changed":
        content[len(content) // 2] ^= 1
    path.write_bytes({"cut": content[:-500], "empty": b"", "changed": content}[damage])
    shutil.copy(path, tmp_path / "epoch=7.ckpt")
    with pytest.raises(MisconfigurationException, match=r"last\.ckpt.*run.*epoch=1\.ckpt"):
        make_run(tmp_path, ckpt_path=path)
    for each in tmp_path.glob("epoch=[01].ckpt"):
        each.unlink()
    with pytest.raises(MisconfigurationException, match="no complete one next to it"):
        make_run(tmp_path, ckpt_path=path)


@pytest.mark.parametrize(("place", "number"), [(8, 1), (10, 99)], ids=["encrypted", "unknown compression"])
def test_a_damaged_archive_is_not_whole(place, number, tmp_path):
    path = tmp_path / "last.ckpt"
    torch.save({"a": torch.ones(5)}, path)
    assert safe_files.is_whole(path)
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + place] = number
    path.write_bytes(content)
    assert not safe_files.is_whole(path)


@pytest.mark.slow
def test_the_command_recognises_a_torn_checkpoint(tmp_path):
    (tmp_path / "last.ckpt").write_bytes(b"PK")
    with pytest.raises(SystemExit, match=r"last\.ckpt"):
        main(["fit", "--config", "recipes/quickstart.yaml", "--ckpt_path", str(tmp_path / "last.ckpt")])


def test_checkpoints_in_the_old_format_are_loaded(tmp_path):
    torch.save({"a": 1}, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    assert WholeCheckpoints().load_checkpoint(tmp_path / "old.ckpt") == {"a": 1}


def test_a_plugin_of_the_users_stays(tmp_path):
    class Own(TorchCheckpointIO):
        pass

    run = trainer(tmp_path, FederatedLoop(FedAvg(), clients=3, summary=False), plugins=[Own()], max_epochs=1)
    fit(run, Module(), Data())
    assert type(run.strategy.checkpoint_io) is Own


def test_what_is_cleared(tmp_path):
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    here = safe_files.process_scope()
    marks = {
        "ended": f"{here}@{int(ended.stdout)}",
        "of a process before this one": safe_files.owner_mark(),
        "in use": safe_files.owner_mark(),
        "running": f"{here}@1",
        "elsewhere": "other-1@5",
        "old elsewhere": "other-2@5",
        "no mark": "file",
    }
    for name in marks:
        (tmp_path / name).mkdir()
    os.utime(tmp_path / "old elsewhere", (0, 0))
    safe_files.claim(tmp_path / "in use")
    with pytest.warns(UserWarning, match=r"old elsewhere: left by runs on other hosts"):
        safe_files.delete_stale_files((tmp_path / name, mark) for name, mark in marks.items())
    kept = {"in use", "running", "elsewhere", "old elsewhere", "no mark"}
    assert {each.name for each in tmp_path.iterdir()} == kept


@pytest.mark.parametrize("call", [0, 1])
def test_a_full_disk_under_a_logger_is_named_once(tmp_path, monkeypatch, call):
    """The folder and what helps; the logger's `finalize`, which fails too, does not take the error's place."""
    logger = CSVLogger(tmp_path / "runs", flush_logs_every_n_steps=1)
    writes = []

    def save(self):
        writes.append(call)
        if len(writes) > call:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lightning.fabric.loggers.csv_logs._ExperimentWriter.save", save)
    with pytest.raises(OSError, match=rf"{tmp_path}/runs/.*default_root_dir") as error:
        make_run(tmp_path, logger=logger)
    assert error.value.errno == errno.ENOSPC
    assert error.value.__context__ is None
    assert "finalize" not in vars(logger)
    assert len(writes) > call + 1


def test_a_full_disk_under_tensorboard_is_named_as_such(tmp_path, monkeypatch):
    """Lightning's logger takes the error for one of an unsupported type."""
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter

    def add_scalar(self, *arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "add_scalar", add_scalar)
    with pytest.raises(ValueError, match=rf"No space left.*{tmp_path}/runs/.*default_root_dir") as error:
        make_run(tmp_path, logger=TensorBoardLogger(tmp_path / "runs"))
    assert "supported" not in str(error.value)


def test_metadata_that_cannot_be_written_leaves_no_part(tmp_path, monkeypatch):
    write_metadata(tmp_path, {"seconds": 1.0})
    monkeypatch.setattr(Path, "replace", fail_to_replace)
    with pytest.raises(OSError, match="No space"):
        write_metadata(tmp_path, {"seconds": 2.0})
    assert [each.name for each in tmp_path.iterdir()] == ["run_metadata.json"]
    assert read_metadata(tmp_path) == {"seconds": [1.0]}


def fail_to_replace(self, target):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_another_error_of_a_logger_is_as_it_was(tmp_path, monkeypatch):
    def save(self):
        raise PermissionError(errno.EACCES, "Permission denied", "metrics.csv")

    monkeypatch.setattr("lightning.fabric.loggers.csv_logs._ExperimentWriter.save", save)
    with pytest.raises(PermissionError) as error:
        make_run(tmp_path, logger=CSVLogger(tmp_path / "runs"))
    assert str(error.value) == "[Errno 13] Permission denied: 'metrics.csv'"
