"""Which execution a run takes, what it says of that, and how it finds out."""

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import (
    FedAvg,
    FederatedLoop,
)
from lightning_lowrank.federated.execution import choice
from tests.federated.execution.runs import OPTIMIZERS, Double, Item, Kept, Reader, assert_close, run
from tests.grids import daily
from tests.helpers import Module, network, weights


def test_a_checkpoint_of_the_other_execution_is_refused(tmp_path):
    last = ModelCheckpoint(tmp_path, "last", save_top_k=-1, every_n_epochs=1)
    run(tmp_path, "sequential", callbacks=[last], trainer={"max_epochs": 1})
    with pytest.raises(MisconfigurationException, match="execution"):
        run(tmp_path, "vectorized", ckpt_path=next(tmp_path.glob("last*.ckpt")))


@pytest.mark.parametrize(
    "arguments", [{"execution": "fast"}, {"chunk_size": 2}, {"execution": "vectorized", "chunk_size": 0}]
)
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(MisconfigurationException, match=r"execution|chunk_size"):
        FederatedLoop(FedAvg(), clients=2, **arguments)


def normed():
    return Module(network(norm=nn.BatchNorm1d), optimizer=partial(torch.optim.Adam, lr=0.01))


time_both = choice.time_both


@daily()
@pytest.mark.parametrize(
    ("faster", "times", "said"),
    [("vectorized", (2.0, 1.0), "step together"), ("sequential", (1.0, 2.0), "one after another")],
)
def test_auto_says_what_it_chose_and_leaves_no_trace(tmp_path, capsys, monkeypatch, faster, times, said):
    tried = []

    def timed(*arguments):
        tried.extend(time_both(*arguments))
        return times

    monkeypatch.setattr(choice, "time_both", timed)
    settings = {"module": normed, "data": Double(drop_last=True, batch_size=4)}
    module, loop, _ = run(tmp_path, "auto", **settings)
    assert len(tried) == 2
    assert min(tried) > 0
    printed = capsys.readouterr().out
    assert said in printed
    assert "ms alone and" in printed
    assert loop.rounds.execution.name == faster
    expected, _, _ = run(tmp_path, faster, **settings)
    assert_close(weights(expected), weights(module), tolerance=0)


@daily()
@pytest.mark.parametrize(("module", "cause"), [(Item, "takes a number out of a tensor"), (Kept, "Take it from the")])
def test_auto_falls_back_and_says_why(tmp_path, capsys, module, cause):
    fallen, loop, _ = run(tmp_path, "auto", module=module)
    assert "one after another" in (printed := capsys.readouterr().out)
    assert cause in printed
    assert loop.rounds.execution.name == "sequential"
    expected, _, _ = run(tmp_path, "sequential", module=module)
    assert_close(weights(expected), weights(fallen), tolerance=0)
    run(tmp_path, "auto", callbacks=[Reader()])
    assert "Reader.on_before_optimizer_step" in capsys.readouterr().out


def test_a_resumed_run_keeps_the_choice(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "time_both", lambda *a: (2.0, 1.0))
    every = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    whole, _, _ = run(tmp_path, "auto", callbacks=[every], trainer={"max_epochs": 2})
    monkeypatch.setattr(choice, "time_both", lambda *a: pytest.fail("tried again"))
    module, loop, _ = run(tmp_path, "auto", ckpt_path=tmp_path / "step=4.ckpt", trainer={"max_epochs": 2})
    assert loop.rounds.execution.name == "vectorized"
    assert_close(weights(whole), weights(module), tolerance=0)


def test_both_ways_are_timed_without_a_trace(tmp_path, monkeypatch):
    seen = []

    def timed(fitted, module, chunk, loader):
        before = weights(module), [dict(group) for group in fitted.optimizers[0].param_groups]
        seconds = time_both(fitted, module, chunk, loader)
        after = weights(module), [dict(group) for group in fitted.optimizers[0].param_groups]
        assert_close(before[0], after[0], tolerance=0)
        assert all(one["params"] == two["params"] for one, two in zip(before[1], after[1], strict=True))
        assert not fitted.optimizers[0].state
        assert not {"training_step", "configure_gradient_clipping", "log"} & vars(module).keys()
        seen.append(seconds)
        return seconds

    monkeypatch.setattr(choice, "time_both", timed)
    run(tmp_path, "auto", module=partial(Module, optimizer=OPTIMIZERS["AdamW"]), trainer={"max_epochs": 1})
    assert min(seen[0]) > 0
