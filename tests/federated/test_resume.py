"""A run that was killed and resumed ends as the run that was not."""

import re
import signal
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import (
    SCAFFOLD,
    BlockKronecker,
    Dirichlet,
    FedAvg,
    FederatedLoop,
    FedMUD,
    FedProx,
    LowRank,
    MatrixProduct,
    TopK,
    load_dense,
    recover,
)
from lightning_lowrank.federated.checks import resume_notes
from lightning_lowrank.federated.coordinator import Coordinator
from tests.helpers import Data, Module, SaveEachStep, assert_same, fit, network, trainer, weights

ROOT = Path(__file__).parents[2]


class Figures(pl.Callback):
    """Keeps what was logged after each round."""

    def __init__(self):
        self.rounds = {}

    def on_train_epoch_end(self, trainer, pl_module):
        self.rounds[trainer.current_epoch] = dict(trainer.callback_metrics)


def experiment(folder, low_rank, **arguments):
    """One run with everything in it that a checkpoint has to carry."""
    momentum = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    decay = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.9)
    module = Module(network(norm=nn.BatchNorm1d, dropout=0.3), optimizer=momentum, scheduler=decay, interval="step")
    callbacks = []
    if low_rank:
        callbacks.append(LowRank(MatrixProduct(), rank=2, decouple=True, summary=False))
    loop = FederatedLoop(
        FedMUD(reset_interval=2) if low_rank else FedAvg(),
        clients=7,
        clients_per_round=3,
        partition=Dirichlet(0.5, min_samples=2),
        buffers="average" if low_rank else "local",
        optimizer_state="keep",
        client_dropout=0.2,
        summary=False,
    )
    figures = Figures()
    checkpoints = ModelCheckpoint(folder, "{step}-{epoch}", save_top_k=-1, every_n_train_steps=1)
    at_validation = ModelCheckpoint(folder, "validated-{step}-{epoch}", save_top_k=-1, save_on_train_epoch_end=False)
    at_round_end = ModelCheckpoint(
        folder, "ended-{step}-{epoch}", save_top_k=-1, save_on_train_epoch_end=True, mode="max"
    )
    kept = [checkpoints, at_validation, at_round_end] if arguments.pop("save", True) else []
    run = trainer(folder, *callbacks, loop, figures, *kept, max_epochs=4, num_sanity_val_steps=2, **arguments)
    return run, module, loop, figures


@pytest.fixture
def interrupts():
    """Python's own handler of interrupts, which a process that a shell has started in the background lacks."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("place", ["begin_round", "note_begun", "receive", "end_round"])
def test_an_interrupt_waits_until_a_message_is_counted(tmp_path, monkeypatch, place):
    def run(*callbacks):
        loop = FederatedLoop(SCAFFOLD(), clients=5, clients_per_round=3, summary=False)
        return trainer(tmp_path, loop, *callbacks, max_epochs=3, limit_val_batches=0)

    whole = fit(run(), Module(), Data())
    own, calls = getattr(Coordinator, place), []

    def interrupted(self, *arguments):
        found = own(self, *arguments)
        calls.append(place)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, place, interrupted)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            fit(run(OnExceptionCheckpoint(tmp_path, "stopped")), Module(), Data())
    resumed = fit(run(), Module(), Data(), ckpt_path=tmp_path / "stopped.ckpt")
    assert_same(weights(resumed), weights(whole))


@pytest.mark.slow
@pytest.mark.parametrize("low_rank", [False, True])
def test_a_module_that_the_trainer_makes_double_is_not_rounded(tmp_path, low_rank):
    def run(**arguments):
        callbacks = [LowRank(MatrixProduct(), rank=2, summary=False)] if low_rank else []
        loop = FederatedLoop(FedAvg(), clients=3, local_steps=2, optimizer_state="keep", summary=False)
        optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
        made = trainer(tmp_path, *callbacks, loop, max_epochs=2, precision="64-true", **arguments)
        return made, Module(optimizer=optimizer)

    save = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    first, module = run()
    first.callbacks.append(save)
    fit(first, module, Data())
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) == 6
    for file in files[::2]:
        again, resumed = run()
        fit(again, resumed, Data(), ckpt_path=file)
        assert_same(weights(module), weights(resumed))


@pytest.mark.parametrize(
    ("low_rank", "arguments"), [(False, {"val_check_interval": 0.5}), (True, {"accumulate_grad_batches": 2})]
)
@pytest.mark.slow
@pytest.mark.nightly
def test_resume_from_every_checkpoint(tmp_path, low_rank, arguments):
    run, module, loop, figures = experiment(tmp_path, low_rank, **arguments)
    fit(run, module, Data(drop_last=True, batch_size=4))
    files = sorted(tmp_path.glob("*.ckpt"))
    by_kind = [[file for file in files if file.name.startswith(kind)] for kind in ("step", "validated", "ended")]
    assert len(by_kind[0]) >= 8
    assert len(by_kind[1]) >= 4
    assert len(by_kind[2]) == 4
    for file in by_kind[0][::2] + by_kind[1] + by_kind[2]:
        resumed, again, loop_again, figures_again = experiment(tmp_path, low_rank, save=False, **arguments)
        fit(resumed, again, Data(drop_last=True, batch_size=4), ckpt_path=file)
        assert_same(weights(module), weights(again))
        assert loop.ledger.state_dict() == loop_again.ledger.state_dict()
        for client in range(7):
            assert loop.coordinator.states[client].keys() == loop_again.coordinator.states[client].keys()
        resumed_round = min(figures_again.rounds, default=0)
        for number, logged in figures_again.rounds.items():
            expected = figures.rounds[number]
            # The resumed round's training mean is of its remaining batches; Lightning repeats no validation.
            names = logged.keys() - {"train_loss"} if number == resumed_round else expected.keys()
            for name in names:
                assert torch.equal(logged[name], expected[name]), (file.name, number, name)


class SaveEachBatch(pl.Callback):
    """Saves after batches that only accumulate as well, as a callback does that goes by time."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.save_checkpoint(f"{trainer.default_root_dir}/{trainer.current_epoch}-{batch_idx}.ckpt")


class Manual(Module):
    """Steps with the gradients of two batches, but for the last."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class Starts(Module):
    def on_train_epoch_start(self):
        self.rate = 0.5


@pytest.mark.slow
def test_a_hook_that_lightning_leaves_out_is_named(tmp_path):
    """From a checkpoint after an optimizer step, Lightning does not call on_train_epoch_start in the next round."""

    def run(module, folder, **arguments):
        by_step = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
        by_round = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True, mode="max")
        before_the_end = ModelCheckpoint(folder, "validated-{epoch}", save_top_k=-1, save_on_train_epoch_end=False)
        loop = FederatedLoop(FedAvg(), clients=2, local_steps=2, summary=False)
        kept = [] if arguments else [by_step, by_round, before_the_end]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer(tmp_path, loop, *kept, max_epochs=2).fit(module(), Data(), **arguments)
        return [str(each.message) for each in told if "on_train_epoch_start" in str(each.message)]

    found = {}
    for module in (Starts, Module):
        assert not run(module, tmp_path / module.__name__)
        files = sorted((tmp_path / module.__name__).glob("*.ckpt"))
        found[module] = {file.stem: run(module, tmp_path, ckpt_path=file) for file in files}
    assert len(found[Module]) == 8
    assert not any(found[Module].values())
    assert {name for name, said in found[Starts].items() if said} == {"step=2", "step=4", "step=6"}
    assert all(re.search(r"\(of Starts\) in round 1", found[Starts][name][0]) for name in ("step=4", "step=6"))


@pytest.mark.parametrize(("limits", "rounds"), [({"max_steps": 10, "max_epochs": 3}, 2), ({"max_steps": 10}, 3)])
def test_an_epoch_that_lightning_counts_again_is_told(tmp_path, limits, rounds):
    def run(**arguments):
        saved = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        loop = FederatedLoop(FedAvg(), clients=2, local_steps=2, summary=False)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            made = trainer(tmp_path, loop, *([] if arguments else [saved]), **{"max_epochs": -1, **limits})
            made.fit(Module(), Data(), **arguments)
        assert loop.server.round == (2 if not arguments else rounds - 1)
        return [str(each.message) for each in told if "counts an epoch again" in str(each.message)]

    assert not run()
    assert len(run(ckpt_path=tmp_path / "epoch=0.ckpt")) == ("max_epochs" in limits)


@pytest.mark.parametrize("is_open", [False, True])
def test_callbacks_of_lightning_that_it_leaves_out_are_named(is_open):
    callbacks = [BackboneFinetuning(), GradientAccumulationScheduler({0: 2}), StochasticWeightAveraging(0.1)]
    resumed = SimpleNamespace(
        fit_loop=SimpleNamespace(restarted_mid_epoch=True),
        lightning_module=Module(),
        callbacks=callbacks,
        lr_scheduler_configs=[],
        current_epoch=1,
        max_epochs=3,
        max_steps=-1,
    )
    (said,) = resume_notes(resumed, 1 if is_open else 0, is_open)
    named = ["StochasticWeightAveraging"] if is_open else ["BackboneFinetuning", "StochasticWeightAveraging"]
    assert f"(of {', '.join(named)}) in round 1" in said


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "group"), [(Module, 3), (Module, {0: 3}), (Manual, 1)])
def test_gradients_that_are_being_accumulated_are_kept(tmp_path, kind, group):
    def run(*callbacks, **arguments):
        loop = FederatedLoop(FedAvg(), clients=2, local_steps=4, summary=False)
        module, settings = kind(), {} if isinstance(group, dict) else {"accumulate_grad_batches": group}
        callbacks += (GradientAccumulationScheduler(group),) if isinstance(group, dict) else ()
        fitted = trainer(tmp_path, loop, *callbacks, max_epochs=1, **settings)
        fit(fitted, module, Data(), **arguments)
        return weights(module)

    expected = run(SaveEachBatch())
    for batch in range(3):
        assert_same(expected, run(ckpt_path=tmp_path / f"0-{batch}.ckpt"))


def shared_layer():
    first, norm, activation, second, _, last = network(norm=nn.BatchNorm1d)
    return nn.Sequential(first, norm, activation, second, norm, activation, second, last)


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: network(norm=nn.BatchNorm1d), shared_layer], ids=["plain", "shared_layer"])
def test_checkpoints_hold_the_global_model(tmp_path, make):
    class Rounds(pl.Callback):
        def __init__(self):
            self.begun = {}

        def on_train_epoch_start(self, trainer, pl_module):
            self.begun[trainer.current_epoch] = weights(pl_module)

    rounds = Rounds()
    kept = ModelCheckpoint(tmp_path, "{step}-{epoch}", save_top_k=-1, every_n_train_steps=1, save_weights_only=True)
    module = Module(make())
    loop = FederatedLoop(FedAvg(), clients=3, summary=False)
    fit(trainer(tmp_path, loop, rounds, kept, max_epochs=2), module, Data(drop_last=True))
    for file in tmp_path.glob("*epoch=1.ckpt"):
        saved = torch.load(file, weights_only=True)
        last = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"]
        assert_same(saved["state_dict"], weights(module) if last else rounds.begun[1])


@pytest.mark.slow
def test_a_state_dict_of_the_modules_own_holds_the_global_model_inside_a_client(tmp_path):
    class Inner(Module):
        def state_dict(self):
            return {f"net.{name}": value.clone() for name, value in self.net.state_dict().items()}

    def run(*callbacks, **arguments):
        loop = FederatedLoop(FedAvg(), clients=3, summary=False)
        module = Inner(network(norm=nn.BatchNorm1d))
        fit(trainer(tmp_path, loop, *callbacks, max_epochs=1), module, Data(drop_last=True), **arguments)
        return module.state_dict()

    begun = Inner(network(norm=nn.BatchNorm1d)).state_dict()
    expected = run(SaveEachStep(tmp_path))
    saved = tmp_path / "step=6.ckpt"
    assert_same(torch.load(saved, weights_only=True)["state_dict"], begun)
    assert_same(run(ckpt_path=saved), expected)


@pytest.mark.slow
def test_the_checkpoint_of_an_error_at_a_clients_end_repeats_the_client(tmp_path, monkeypatch):
    def run(*callbacks, **arguments):
        uplink = [TopK(0.3, error_feedback=True)]
        loop = FederatedLoop(FedAvg(), clients=3, uplink=uplink, on_client_error="raise", summary=False)
        module = Module()
        fit(trainer(tmp_path, loop, *callbacks, max_epochs=2), module, Data(), **arguments)
        return weights(module), loop._progress.client_steps

    def fail(self, message, packet):
        # The client's residual has changed already.
        ended.append(packet)
        if len(ended) == 5:
            raise ValueError("broken")
        return packet

    ended = []
    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "checked", fail)
        with pytest.raises(ValueError, match="broken"):
            run(OnExceptionCheckpoint(tmp_path, "stopped"))
    (expected, steps), (resumed, steps_then) = run(), run(ckpt_path=tmp_path / "stopped.ckpt")
    assert_same(resumed, expected)
    assert steps_then == steps


@pytest.mark.parametrize("hook", ["receive", "aggregate"])
def test_the_checkpoint_of_an_error_in_the_server_is_refused(tmp_path, hook):
    class Broken(FedAvg):
        pass

    def fail(self, server, *arguments):
        getattr(FedAvg, hook)(self, server, *arguments)
        raise ValueError("broken")

    setattr(Broken, hook, fail)
    loop = FederatedLoop(Broken(), clients=3, summary=False)
    with pytest.raises(ValueError, match="broken"):
        fit(trainer(tmp_path, loop, OnExceptionCheckpoint(tmp_path, "stopped")), Module(), Data())
    resumed = trainer(tmp_path, FederatedLoop(Broken(), clients=3, summary=False))
    with pytest.raises(MisconfigurationException, match="an error ended round 0"):
        fit(resumed, Module(), Data(), ckpt_path=tmp_path / "stopped.ckpt")


@pytest.mark.slow
def test_a_checkpoint_before_the_first_client_of_a_resumed_round_can_be_resumed(tmp_path):
    def run(*callbacks, **arguments):
        module = Module()
        loop = FederatedLoop(FedAvg(), clients=3, summary=False)
        fit(trainer(tmp_path, loop, *callbacks, max_epochs=1), module, Data(), **arguments)
        return weights(module)

    class SaveAtStart(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / "start.ckpt")

    expected = run(SaveEachStep(tmp_path))
    assert_same(run(SaveAtStart(), ckpt_path=tmp_path / "step=6.ckpt"), expected)
    assert_same(run(ckpt_path=tmp_path / "start.ckpt"), expected)


@pytest.mark.slow
def test_every_road_to_a_checkpoint(tmp_path):
    def callbacks():
        return [
            LowRank(BlockKronecker(), rank=1, decouple=True, skip=["first"], summary=False),
            FederatedLoop(FedMUD(), clients=4, summary=False),
        ]

    module = Module()
    checkpoint = ModelCheckpoint(tmp_path, "last")
    fit(trainer(tmp_path, *callbacks(), checkpoint), module, Data())
    path = tmp_path / "last.ckpt"

    checking = trainer(tmp_path, *callbacks())
    fresh = Module()
    metrics = checking.validate(fresh, Data(), ckpt_path=path, verbose=False)[0]
    assert_same(weights(module), weights(fresh))

    with pytest.raises(RuntimeError, match=r"net\.2\.factors"):
        Module.load_from_checkpoint(path)

    dense = load_dense(path, Module())
    assert type(dense.net[2]) is nn.Linear
    assert dense.net[2].weight.requires_grad
    assert trainer(tmp_path).validate(dense, Data(), verbose=False)[0] == pytest.approx(metrics, rel=1e-5)
    inputs = torch.randn(5, 6)
    torch.testing.assert_close(dense.net(inputs), module.net(inputs))
    torch.testing.assert_close(recover(module).net(inputs), dense.net(inputs))


@pytest.mark.slow
def test_load_dense_says_what_is_missing(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, "weights", save_weights_only=True)
    converted = LowRank(MatrixProduct(), rank=1, summary=False)
    fit(trainer(tmp_path, converted, FederatedLoop(FedAvg(), clients=2, summary=False), checkpoint), Module(), Data())
    with pytest.raises(MisconfigurationException, match="save_weights_only=True"):
        load_dense(tmp_path / "weights.ckpt", Module())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"algorithm": FedProx(mu=0.1)}, r"'FedAvg'.*'FedProx'"),
        ({"seed": 5}, "seed: 0 in the checkpoint, 5 now"),
        ({"clients": 5}, "clients: 4 in the checkpoint, 5 now"),
        ({"partition": Dirichlet(0.5)}, r"'IID'.*'Dirichlet'"),
    ],
)
def test_refuses_to_resume_another_experiment(tmp_path, other, message):
    checkpoint = ModelCheckpoint(tmp_path, "last")
    fit(trainer(tmp_path, FederatedLoop(FedAvg(), clients=4, summary=False), checkpoint), Module(), Data())
    changed = FederatedLoop(**{"algorithm": FedAvg(), "clients": 4, "summary": False, **other})
    with pytest.raises(MisconfigurationException, match=message):
        fit(trainer(tmp_path, changed, max_epochs=5), Module(), Data(), ckpt_path=tmp_path / "last.ckpt")


@pytest.mark.nightly
def test_kills_at_random_moments(tmp_path):
    command = [sys.executable, ROOT / "tests/benchmarks/kills.py", "--kills", "6", "--seed", "1", "--rounds", "2"]
    done = subprocess.run([*command, "--folder", tmp_path], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
