"""Steps of clients that step together, compiled by `torch.compile`; and what is left as it is."""

import itertools
import shutil
from functools import partial

import jsonargparse
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import SCAFFOLD, FedAvg, FederatedLoop, FedMUD, FedProx, FromIndices
from lightning_lowrank.federated.execution import auto, compiled
from lightning_lowrank.federated.execution.compiled import CompiledSteps, stack_sizes
from lightning_lowrank.federated.execution.snapshot import Snapshot
from tests.federated.execution.runs import OPTIMIZERS, UNEVEN, Double, assert_close, run
from tests.grids import nightly_except
from tests.helpers import Module, network, weights

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="there is no C++ compiler")


@pytest.fixture
def traced(monkeypatch):
    """Steps as Dynamo and AOTAutograd trace them, without the seconds that inductor takes."""
    compile_step = torch.compile
    options = {"fullgraph": True, "dynamic": False, "backend": "aot_eager"}
    monkeypatch.setattr(compiled.torch, "compile", lambda step, **given: compile_step(step, **options))


@pytest.fixture
def used(monkeypatch):
    """How many clients the compiled steps that count had, and the stacks' sizes."""
    found, step = [], CompiledSteps.step

    def noted(self, training_step, takes_index, inputs, number):
        results = step(self, training_step, takes_index, inputs, number)
        found.append(None if results is None else len(results.losses))
        return results

    monkeypatch.setattr(CompiledSteps, "step", noted)
    return found


def both(tmp_path, tolerance=1e-10, **settings):
    expected, loop, fitted = run(tmp_path / "a", "vectorized", **settings)
    module, other, also = run(tmp_path / "b", "vectorized", compile=True, **settings)
    assert_close(weights(expected), weights(module), tolerance)
    assert loop.ledger.state_dict() == other.ledger.state_dict()
    for name, value in fitted.callback_metrics.items():
        torch.testing.assert_close(also.callback_metrics[name], value)
    return other.rounds.execution.compiled_steps


def test_sizes_of_stacks():
    assert stack_sizes(10) == (1, 2, 5, 10)
    assert stack_sizes(50) == (1, 10, 25, 50)
    assert stack_sizes(1) == (1,)
    assert all(len(stack_sizes(clients)) <= 4 for clients in range(1, 100))


def test_settings_that_cannot_be():
    with pytest.raises(MisconfigurationException, match=r"compile=True.*execution='vectorized'.*'auto'"):
        FederatedLoop(FedAvg(), clients=2, compile=True)
    with pytest.raises(MisconfigurationException, match="'auto'"):
        FederatedLoop(FedAvg(), clients=2, compile="auto", execution="vectorized")


def test_objects_of_a_command_line_do_not_keep_a_step_from_being_tried():
    module = Module()
    module.make = partial(print, jsonargparse.ArgumentParser(logger=True))
    Snapshot(module).restore()


@needs_compiler
@pytest.mark.nightly
def test_steps_are_compiled_for_four_sizes_at_most(tmp_path, used):
    made = both(tmp_path, trainer={"max_epochs": 4})
    assert not made.reason
    assert made.sizes == (1, 3, 5)
    # Of five clients three have two full batches, and one has more.
    assert set(made._steps) == set(filter(None, used)) == {1, 3}


class UsesScale(Module):
    """Uses a parameter in full batches alone, the momentum of which goes on in shorter ones."""

    def __init__(self):
        super().__init__(optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
        self.scale = nn.Parameter(torch.ones(()))

    def loss(self, batch):
        return super().loss(batch) * (self.scale if len(batch[0]) == 8 else 1)


@pytest.mark.slow
def test_parameters_that_some_of_the_clients_use_are_refused(tmp_path, used, traced):
    clients = FromIndices([range(30), range(30, 62), range(62, 96)])
    with pytest.raises(MisconfigurationException, match="some clients of a step do not use scale"):
        run(tmp_path, "vectorized", module=UsesScale, compile=True, partition=clients)
    assert used.count(3) == 1


class UsesNumber(Module):
    """Computes by the number of the step."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + batch_idx % 3)


class UsesEpoch(Module):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + self.current_epoch)


class Breaks(Module):
    """Leaves what Dynamo cannot trace in one piece."""

    def training_step(self, batch, batch_idx):
        torch._dynamo.graph_break()
        return self.loss(batch)


class Adds(Module):
    """Changes a parameter in place."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.net[0].weight.mul_(0.99)
        return self.loss(batch)


class OneLayer(Module):
    """Has layers without a gradient."""

    def training_step(self, batch, batch_idx):
        hidden = self.net[:2](batch[0])
        return nn.functional.cross_entropy(self.net[2:](hidden.detach()), batch[1])


def shared():
    """A layer under two names, before another one."""
    torch.manual_seed(1)
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(6, 4))


# Stacks have rows of clients that have finished, whose statistics are to stay.
STAIRS = [list(range(24)), list(range(24, 48)), list(range(48, 64)), list(range(64, 80)), list(range(80, 88))]
CASES = {
    "update": {"form": "update"},
    "blocks": {"form": "decoupled blocks", "algorithm": partial(FedMUD, reset_interval=2)},
    "projected": {
        "module": partial(Module, optimizer=OPTIMIZERS["ProjectedSGD"]),
        "trainer": {"gradient_clip_val": 1e6, "max_epochs": 2},
    },
    "momentum": {"module": partial(Module, optimizer=OPTIMIZERS["momentum"]), "optimizer_state": "keep"},
    "clipping": {"trainer": {"gradient_clip_val": 0.1, "max_epochs": 3}},
    "control": {"algorithm": SCAFFOLD},
    "shared": {"module": lambda: Module(shared())},
    "unused": {"module": partial(OneLayer, optimizer=OPTIMIZERS["momentum"])},
    "objective": {"algorithm": partial(FedProx, 0.1)},
    "statistics": {
        "module": lambda: Module(network(norm=nn.BatchNorm1d)),
        "data": Double(drop_last=True),
        "partition": FromIndices(STAIRS),
        "tolerance": 1e-9,
    },
}


@nightly_except("blocks", "momentum", "statistics")
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_compiled_steps_are_the_steps(tmp_path, traced, used, case):
    made = both(tmp_path, **CASES[case])
    assert not made.reason
    assert any(used)


@pytest.mark.slow
def test_compiled_dropout_draws_other_numbers_that_repeat(tmp_path, traced, used):
    settings = {"module": lambda: Module(network(dropout=0.5)), "trainer": {"max_epochs": 8}}
    plain, *_ = run(tmp_path / "a", "vectorized", **settings)
    ends = [weights(run(tmp_path / way, "vectorized", compile=True, **settings)[0]) for way in "bc"]
    assert any(used)
    assert_close(*ends, tolerance=0)
    assert not torch.equal(ends[0]["net.0.weight"], weights(plain)["net.0.weight"])


class LooksAtGradients(Callback):
    def on_before_stacked_step(self, module, stacks):
        self.norms = [float(stack.grad.norm()) for stack in stacks.values()]

    def on_before_optimizer_step(self, trainer, module, optimizer): ...


@pytest.mark.slow
def test_gradients_are_seen(tmp_path, traced, used):
    ends = []
    for compile in (False, True):
        looks = LooksAtGradients()
        run(tmp_path, "vectorized", compile=compile, callbacks=[looks])
        ends.append(looks.norms)
    assert any(used)
    assert ends[0] == pytest.approx(ends[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "cause"),
    [(UsesNumber, "recompil"), (UsesEpoch, "recompil"), (Breaks, "graph_break|graph break"), (Adds, "changes net.0")],
)
def test_what_cannot_be_compiled_is_made_as_it_is_and_said_once(tmp_path, monkeypatch, traced, module, cause):
    warned = []
    monkeypatch.setattr(compiled, "rank_zero_warn", warned.append)
    momentum = partial(module, optimizer=OPTIMIZERS["momentum"])
    both(tmp_path, module=momentum)
    (warning,) = warned
    assert "compile=True" in warning
    assert torch.tensor([part in warning.lower() for part in cause.lower().split("|")]).any(), warning


@pytest.mark.parametrize("error", [RuntimeError("no g++"), FileNotFoundError("Python.h"), PermissionError("/cache")])
def test_a_backend_that_fails(tmp_path, monkeypatch, error):
    def fails(step, **options):
        raise error

    warned = []
    monkeypatch.setattr(compiled.torch, "compile", fails)
    monkeypatch.setattr(compiled, "rank_zero_warn", warned.append)
    made = both(tmp_path, trainer={"max_epochs": 1})
    (warning,) = warned
    assert str(error) in made.reason
    assert made.reason in warning


def test_a_compiled_step_that_differs_is_not_taken(tmp_path, monkeypatch):
    def wrong(step, **options):
        def run(*arguments):
            gradients, others = step(*arguments)
            return {name: 1.1 * value for name, value in gradients.items()}, others

        return run

    warned = []
    monkeypatch.setattr(compiled.torch, "compile", wrong)
    monkeypatch.setattr(compiled, "rank_zero_warn", warned.append)
    both(tmp_path, trainer={"max_epochs": 1})
    (warning,) = warned
    assert "its gradients" in warning


@pytest.mark.slow
def test_other_forms_of_batches_are_made_as_they_are(tmp_path, traced, used):
    # A client of six samples has no full batch, and one of 40 has five.
    sizes = [40, 40, 16, 6]
    ends = [sum(sizes[:number]) for number in range(5)]
    parts = [list(range(begin, end)) for begin, end in itertools.pairwise(ends)]
    made = both(tmp_path, partition=FromIndices(parts), data=Double(drop_last=False), trainer={"max_epochs": 2})
    assert made.samples == 8
    assert set(used) == {2, 4}


@pytest.mark.slow
def test_a_resumed_run_ends_where_the_first_did(tmp_path, traced):
    saver = ModelCheckpoint(tmp_path / "saved", every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    whole, *_ = run(tmp_path / "a", "vectorized", compile=True, callbacks=[saver])
    path = tmp_path / "saved" / "epoch=1.ckpt"
    resumed, *_ = run(tmp_path / "b", "vectorized", compile=True, ckpt_path=path, callbacks=[saver])
    assert_close(weights(whole), weights(resumed), tolerance=1e-12)


@pytest.mark.slow
def test_compiling_may_turn_the_scale(tmp_path, monkeypatch, traced):
    tried = []
    monkeypatch.setattr(auto, "time_both", lambda *arguments: tried.append(arguments) or (2.0, 4.0 - len(tried) ** 2))
    _, loop, _ = run(tmp_path, "auto", compile=True, trainer={"max_epochs": 1}, partition=FromIndices(UNEVEN))
    assert loop.rounds.execution.name == "vectorized"
    assert [arguments[5:] for arguments in tried] == [(), (True,)]


@pytest.mark.slow
def test_steps_that_are_deferred_are_not_compiled(tmp_path, monkeypatch, traced, used):
    warned = []
    monkeypatch.setattr(compiled, "rank_zero_warn", warned.append)
    both(tmp_path, module=partial(Module, optimizer=OPTIMIZERS["ProjectedSGD"]))
    assert len(warned) == 1
    assert not used
