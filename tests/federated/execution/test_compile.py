"""Steps of clients that step together, compiled; and what decides about it."""

from functools import partial

import jsonargparse
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional

from lightning_lowrank import SCAFFOLD, FedAvg, FederatedLoop, LowRank, MatrixProduct
from lightning_lowrank.federated.execution import choice, graphs, updates
from lightning_lowrank.federated.execution.traces import Memory
from lightning_lowrank.internals import tracing
from tests.federated.execution.runs import FORMS, assert_close, run
from tests.helpers import Module, weights


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setattr(tracing, "can_compile", lambda device: "there is no C++ compiler")


@pytest.fixture
def compiled_at_once(monkeypatch):
    monkeypatch.setattr(graphs, "_WORTH_TRACING", 0)
    monkeypatch.setattr(choice, "WORTH_COMPILING", 0)


@pytest.fixture
def uncompiled(compiled_at_once, monkeypatch):
    """Graphs as they stand in place of compiled ones, which take seconds to make."""
    monkeypatch.setattr(tracing, "can_compile", lambda device: "")
    monkeypatch.setattr("torch._inductor.compile", lambda graph, inputs: graph)


@pytest.fixture
def stepped(monkeypatch):
    """The kinds of gradients that compiled steps multiply into values, by optimizer step and name."""
    found = []
    own = updates.ProductUpdate.__call__

    def noted(self, tensors, gradients, others):
        found.append({name: type(gradient) for name, gradient in gradients.items()})
        own(self, tensors, gradients, others)

    monkeypatch.setattr(updates.ProductUpdate, "__call__", noted)
    return found


def test_settings_that_cannot_be():
    with pytest.raises(MisconfigurationException, match=r"compile=True.*execution='vectorized'.*'auto'"):
        FederatedLoop(FedAvg(), clients=2, compile=True)
    with pytest.raises(MisconfigurationException, match="'always'"):
        FederatedLoop(FedAvg(), clients=2, compile="always", execution="vectorized")


@pytest.mark.slow
def test_a_machine_without_a_compiler(without_compiler, tmp_path):
    with pytest.raises(MisconfigurationException, match=r"compile=True.*there"):
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
    module.make = partial(print, jsonargparse.ArgumentParser(logger=True))
    Memory([module]).restore()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.nightly),
        pytest.param({"weight_decay": 0.1}, marks=pytest.mark.nightly),
        pytest.param({"momentum": 0.9}, marks=pytest.mark.nightly),
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        pytest.param({"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
@pytest.mark.nightly
def test_gradients_are_multiplied_into_values(uncompiled, stepped, tmp_path, options):
    # Another rate in each step, which the present one has to be read for.
    settings = {
        "module": partial(
            Module,
            optimizer=partial(torch.optim.SGD, lr=0.05, **options),
            scheduler=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.95),
            interval="step",
        ),
        "optimizer_state": "keep",
    }
    expected, *_ = run(tmp_path / "a", "vectorized", **settings)
    found, *_ = run(tmp_path / "b", "vectorized", compile=True, **settings)
    assert_close(weights(expected), weights(found))
    products = [{name for name, kind in kinds.items() if kind is tracing.Product} for kinds in stepped]
    # Those of a client alone are not stacked.
    together = [names for names in products if names]
    assert len(together) > 3
    assert all(names == {name for name, value in found.named_parameters() if value.ndim == 2} for names in together)


class Composed(nn.Module):
    """A linear layer whose weight is a product, so that the gradient of each factor is one with the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(6, 2))

    def forward(self, inputs):
        return functional.linear(inputs, functional.linear(self.left, self.right))


@pytest.mark.nightly
def test_gradients_are_made_of_values_before_the_step(uncompiled, stepped, tmp_path):
    expected, *_ = run(tmp_path / "a", "vectorized", module=lambda: Module(Composed()))
    found, *_ = run(tmp_path / "b", "vectorized", module=lambda: Module(Composed()), compile=True)
    assert any(kinds["net.right"] is tracing.Product for kinds in stepped)
    assert_close(weights(expected), weights(found))


class LooksAtGradients(Callback):
    """Is not known to be content with what compiled steps leave."""

    def on_before_stacked_step(self, module, stacks):
        self.norms = [float(stack.grad.norm()) for stack in stacks.values()]

    def on_before_optimizer_step(self, trainer, module, optimizer): ...


@pytest.mark.parametrize(
    "settings",
    [
        {"callbacks": [LooksAtGradients()]},
        pytest.param({"form": "decayed"}, marks=pytest.mark.nightly),
        pytest.param({"trainer": {"gradient_clip_val": 0.1}}, marks=pytest.mark.nightly),
        pytest.param({"algorithm": SCAFFOLD}, marks=pytest.mark.nightly),
        pytest.param(
            {"module": partial(Module, optimizer=partial(torch.optim.Adam, lr=0.01))}, marks=pytest.mark.nightly
        ),
    ],
    ids=["callback", "decay", "clipping", "method", "Adam"],
)
@pytest.mark.nightly
def test_gradients_that_are_seen_are_made(uncompiled, stepped, monkeypatch, tmp_path, settings):
    decayed = partial(LowRank, MatrixProduct(), rank=2, frobenius_decay=0.01, summary=False)
    monkeypatch.setitem(FORMS, "decayed", decayed)
    expected, *_ = run(tmp_path / "a", "vectorized", **settings)
    found, loop, _ = run(tmp_path / "b", "vectorized", compile=True, **settings)
    replays = loop.rounds.execution.graphs._replays.values()
    assert any(not replay.exact for each in replays for replay in each)
    assert not stepped
    assert_close(weights(expected), weights(found))


@pytest.mark.skipif(bool(tracing.can_compile(torch.device("cpu"))), reason=tracing.can_compile(torch.device("cpu")))
@pytest.mark.parametrize("form", [pytest.param("dense", marks=pytest.mark.nightly), "update"])
@pytest.mark.nightly
def test_compiled_steps_are_the_steps_to_rounding(compiled_at_once, stepped, tmp_path, form):
    expected, *_ = run(tmp_path / "a", "vectorized", form=form)
    module, loop, _ = run(tmp_path / "b", "vectorized", form=form, compile=True)
    graphs_made = loop.rounds.execution.graphs
    assert not graphs_made.reason
    assert any(not replay.exact for replays in graphs_made._replays.values() for replay in replays)
    assert stepped
    assert_close(weights(expected), weights(module), tolerance=1e-8)


@pytest.mark.nightly
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
