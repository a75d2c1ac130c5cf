"""Steps of clients that step together, compiled; and what decides about it."""

import functools

import jsonargparse
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank import FedAvg, FederatedLoop
from lightning_lowrank.federated.execution import choice, graphs
from lightning_lowrank.federated.execution.traces import Memory
from lightning_lowrank.internals import tracing
from tests.federated.execution.runs import assert_close, run
from tests.helpers import Module, weights


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setattr(tracing, "can_compile", lambda device: "there is no C++ compiler")


@pytest.fixture
def compiled_at_once(monkeypatch):
    monkeypatch.setattr(graphs, "_WORTH_TRACING", 0)
    monkeypatch.setattr(choice, "WORTH_COMPILING", 0)


def test_settings_that_cannot_be():
    with pytest.raises(MisconfigurationException, match="compile=True goes with execution='vectorized' or 'auto'"):
        FederatedLoop(FedAvg(), clients=2, compile=True)
    with pytest.raises(MisconfigurationException, match="compile must be one of"):
        FederatedLoop(FedAvg(), clients=2, compile="always", execution="vectorized")


def test_a_machine_without_a_compiler(without_compiler, tmp_path):
    with pytest.raises(MisconfigurationException, match=r"compile=True is not possible: there is no C\+\+ compiler"):
        run(tmp_path, "vectorized", compile=True)
    _, loop, _ = run(tmp_path, "vectorized", compile="auto", trainer={"max_epochs": 1})
    assert not loop.rounds.execution.compiled


def test_a_short_run_is_not_compiled(tmp_path):
    _, loop, _ = run(tmp_path, "vectorized", compile="auto", trainer={"max_epochs": 1})
    assert not loop.rounds.execution.compiled


def test_devices_without_inductor():
    assert "does not compile for mps" in tracing.can_compile(torch.device("mps"))


def test_objects_of_a_command_line_do_not_keep_a_step_from_being_tried():
    module = Module()
    module.make = functools.partial(print, jsonargparse.ArgumentParser(logger=True))
    Memory([module]).restore()


@pytest.mark.slow
@pytest.mark.skipif(bool(tracing.can_compile(torch.device("cpu"))), reason=tracing.can_compile(torch.device("cpu")))
@pytest.mark.parametrize("form", ["dense", "update"])
def test_compiled_steps_are_the_steps_to_rounding(compiled_at_once, tmp_path, form):
    expected, *_ = run(tmp_path / "a", "vectorized", form=form)
    module, loop, _ = run(tmp_path / "b", "vectorized", form=form, compile=True)
    graphs_made = loop.rounds.execution.graphs
    assert not graphs_made.reason
    assert any(not replay.exact for replays in graphs_made._replays.values() for replay in replays)
    assert_close(weights(expected), weights(module), tolerance=1e-8)


@pytest.mark.slow
@pytest.mark.skipif(bool(tracing.can_compile(torch.device("cpu"))), reason=tracing.can_compile(torch.device("cpu")))
def test_a_resumed_run_is_compiled_as_the_first_was(compiled_at_once, monkeypatch, tmp_path):
    saver = ModelCheckpoint(tmp_path / "saved", every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    whole, *_ = run(tmp_path / "a", "vectorized", compile="auto", callbacks=[saver])
    monkeypatch.setattr(choice, "WORTH_COMPILING", 1e9)
    resumed, loop, _ = run(
        tmp_path / "b", "vectorized", compile="auto", ckpt_path=tmp_path / "saved" / "epoch=1.ckpt", callbacks=[saver]
    )
    assert loop.rounds.execution.compiled
    assert_close(weights(whole), weights(resumed), tolerance=1e-12)
