"""How many clients may step together, and how long a step takes either way."""

from functools import partial

import torch
from torch import nn

from lightning_lowrank.federated.execution import choice, trial
from tests.federated.execution.runs import OPTIMIZERS, assert_close, run
from tests.helpers import Module, weights


def test_as_many_clients_as_memory_holds(monkeypatch):
    module = nn.Linear(100, 10)
    each = 6 * 4 * 1010
    for free, fitting in ((4 * each * 7, 7), (0, 1)):
        monkeypatch.setattr(trial, "_free_memory", lambda free=free: free)
        assert trial.chunk_size_that_fits(module, torch.device("cpu")) == fitting


def test_both_ways_are_timed_without_a_trace(tmp_path, monkeypatch):
    seen = []

    def timed(fitted, module, chunk, loader):
        before = weights(module), [dict(group) for group in fitted.optimizers[0].param_groups]
        seconds = trial.time_both(fitted, module, chunk, loader)
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
