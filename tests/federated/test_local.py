"""A client's local training, against a plain fit: one client that holds all samples, in whose round is one epoch."""

import csv
import functools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch import nn
from torch.utils.data import default_collate
from torchmetrics import MeanMetric

from lightning_lowrank import (
    MOON,
    DifferentialPrivacy,
    FedAvg,
    FederatedLoop,
    FedProx,
    FromIndices,
    Half,
    LowRank,
    MaskAbsentClasses,
    MatrixProduct,
    PFedMe,
)
from lightning_lowrank.federated import fingerprint, local, logbook, safe_files
from lightning_lowrank.federated import loop as loop_module
from lightning_lowrank.federated.execution import auto
from lightning_lowrank.federated.local import LocalTraining
from lightning_lowrank.federated.safe_files import WholeCheckpoints
from lightning_lowrank.internals import advance, lightning
from lightning_lowrank.internals import torch as internals_of_torch
from tests.federated.execution.runs import Manual
from tests.grids import daily, in_turn, nightly_except
from tests.helpers import (
    Data,
    Module,
    SaveEachStep,
    assert_same,
    blobs,
    fit,
    lightnings_own,
    network,
    seen,
    trainer,
    weights,
)

SAMPLES = 103
BATCHES = 13
CLIENTS = [list(range(5)), list(range(5, 47)), list(range(47, 69)), list(range(69, 103))]


class Listens(pl.Callback):
    """Writes down each hook of a local batch, with what the trainer says then."""

    def __init__(self, hooks: tuple[str, ...]) -> None:
        self.events: list[Any] = []
        for hook in hooks:
            setattr(self, hook, functools.partial(self.note, hook))

    def note(self, hook: str, trainer: pl.Trainer, module: pl.LightningModule, *arguments: Any) -> None:
        stepped = trainer.fit_loop.epoch_loop._batches_that_stepped
        said = (trainer.global_step, stepped, trainer.is_last_batch, trainer.num_training_batches)
        self.events.append((hook, module._current_fx_name, seen(arguments), said))
        if hook.startswith("on_train_batch"):
            size = 0 if arguments[-2] is None else len(arguments[-2][0])
            module.log(f"callback/{hook}", float(size), on_epoch=True, batch_size=8)
            if size:
                self.log(f"weighted/{hook}", float(size), on_epoch=True, on_step=False)


AROUND = ("on_train_batch_start", "on_train_batch_end", "on_before_optimizer_step")
EVERY = (*AROUND, "on_before_zero_grad", "on_before_backward", "on_after_backward")


class Logs(Module):
    """Logs in each of the ways that there are."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("of_epoch", loss.detach(), on_step=False, on_epoch=True, batch_size=len(batch[0]))
        self.log("number", batch_idx, on_step=False, on_epoch=True, sync_dist=True)
        self.log_dict({"a": loss * 2, "b": torch.tensor(batch_idx)}, on_step=False, on_epoch=True)
        for reduction in ("sum", "max", "min", torch.mean):
            name = reduction if isinstance(reduction, str) else "torch"
            self.log(f"reduced/{name}", loss, on_step=False, on_epoch=True, reduce_fx=reduction)
        self.mean.update(loss.detach(), len(batch[0]))
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("of_epoch", 1.0, on_step=False, on_epoch=True, batch_size=1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("validated", self.loss(batch), on_step=True, on_epoch=True)
        self.log("number_of_batches", 1, reduce_fx="sum")


class OwnLog(Logs):
    """Logs by a method of its own."""

    def log(self, name: str, value: Any, **settings: Any) -> None:
        settings.setdefault("sync_dist", True)
        super().log(f"{name}/own", value, **settings)

    def log_dict(self, values: Any, **settings: Any) -> None:
        for name, value in values.items():
            self.log(name, value, **settings)


class Extras(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "inputs": batch[0]}


class LeavesOut(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 3 else self.loss(batch)


class WithoutIndex(Module):
    def training_step(self, batch: Any) -> Any:
        return self.loss(batch)


class OwnClipping(Module):
    def configure_gradient_clipping(self, optimizer: Any, **settings: Any) -> None:
        self.clip_gradients(optimizer, 0.1, "value")


class OwnSteps(Module):
    """Takes each of Lightning's steps in its own hands."""

    def backward(self, loss: Any) -> None:
        (2 * loss).backward()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure=closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]


class Adversarial(Module):
    """Two optimizers that the module steps itself, each every second batch."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.automatic_optimization = False
        self.other = network(norm=nn.BatchNorm1d)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        chosen, net = (first, self.net) if batch_idx % 2 else (second, self.other)
        self.toggle_optimizer(chosen)
        loss = nn.functional.cross_entropy(net(batch[0]), batch[1])
        chosen.zero_grad()
        self.manual_backward(loss)
        chosen.step()
        self.untoggle_optimizer(chosen)
        self.log("loss", loss, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.net, self.other)]


UNREADABLE = blobs(SAMPLES).tensors[0][[*range(24, 32), *range(96, 103)]]


def readable(samples: list[Any]) -> Any:
    """Collate as is usual for unreadable samples; batch 3 and the last one have no others."""
    kept = [sample for sample in samples if not (sample[0] == UNREADABLE).all(1).any()]
    return default_collate(kept) if kept else None


def decay(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)


ADAM = functools.partial(torch.optim.Adam, lr=0.01)
LBFGS = functools.partial(torch.optim.LBFGS, lr=0.01, max_iter=3)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "logs": {"module": Logs},
    "logs in its own way": {"module": OwnLog},
    "extras": {"module": Extras},
    "a step left out": {"module": LeavesOut},
    "no index": {"module": WithoutIndex},
    "Adam": {"arguments": {"optimizer": ADAM}},
    "LBFGS": {"arguments": {"optimizer": LBFGS}},
    "steps of a schedule": {"arguments": {"scheduler": decay, "interval": "step"}},
    "epochs of a schedule": {"arguments": {"scheduler": decay}},
    "clipped by norm": {"trainer": {"gradient_clip_val": 0.1}},
    "clipped by value": {"trainer": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}},
    "clipped in its own way": {"module": OwnClipping},
    "accumulated": {"trainer": {"accumulate_grad_batches": 4}},
    "accumulated from an epoch on": {"callbacks": lambda: [GradientAccumulationScheduler({0: 2, 1: 3})]},
    "steps of its own": {"module": OwnSteps, "arguments": {"scheduler": decay, "interval": "step"}},
    "by hand": {"module": Adversarial},
    "64-true": {"trainer": {"precision": "64-true"}},
    "bf16-true": {"trainer": {"precision": "bf16-true"}},
    "bf16-mixed": {"trainer": {"precision": "bf16-mixed"}},
    "16-mixed": {"scaler": True, "trainer": {"gradient_clip_val": 0.1}},
    "stopped by steps": {"trainer": {"max_steps": 17, "max_epochs": -1}},
    "profiled": {"trainer": {"profiler": "simple"}},
    "no batch": {"module": Logs, "data": {"collate_fn": readable}},
    "no batch, accumulated": {
        "arguments": {"scheduler": decay, "interval": "step"},
        "trainer": {"accumulate_grad_batches": 4},
        "data": {"collate_fn": readable},
    },
}


def run(folder: Any, case: dict[str, Any], federated: FederatedLoop | None, hooks: tuple[str, ...]) -> Any:
    torch.manual_seed(0)
    module = case.get("module", Module)(network(), **case.get("arguments", {}))
    listens = Listens(hooks)
    callbacks = [listens, *case.get("callbacks", list)()]
    settings = {"max_epochs": 2, "log_every_n_steps": 5, "logger": CSVLogger(folder, name="", version=0)}
    if case.get("scaler"):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
        settings["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    fitted = trainer(folder, *([federated] if federated else []), *callbacks, **{**settings, **case.get("trainer", {})})
    fit(fitted, module, Data(shuffle=False, **case.get("data", {})))
    fitted.logger.save()
    return module, fitted, listens.events


def one_client(**arguments: Any) -> FederatedLoop:
    return FederatedLoop(
        FedAvg(), partition=FromIndices([list(range(SAMPLES))]), optimizer_state="keep", summary=False, **arguments
    )


def figures(fitted: pl.Trainer) -> dict[str, float]:
    ours = ("comm/", "federated/")
    return {name: float(value) for name, value in fitted.callback_metrics.items() if not name.startswith(ours)}


@daily("plain-fast-around", "logs-slow-every", "by hand-slow-around", "64-true-fast-around")
@nightly_except(*map("-".join, in_turn(CASES, ("fast-around", "slow-every", "slow-around", "fast-every"))))
@pytest.mark.parametrize("hooks", [AROUND, EVERY], ids=["around", "every"])
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize("case", CASES)
def test_a_round_of_one_client_is_an_epoch(tmp_path, case, fast, hooks):
    with lightnings_own(not fast):
        module, fitted, events = run(tmp_path / "rounds", CASES[case], one_client(), hooks)
    expected, plain, told = run(tmp_path / "epochs", CASES[case], None, hooks)
    assert_same(weights(module), weights(expected))
    assert events == told
    assert fitted.global_step == plain.global_step
    once_a_client = ("both", "both_step", *(f"callback/{hook}_step" for hook in AROUND), "callback/")
    found, wanted = figures(fitted), figures(plain)
    # Lightning rounds each step's product to the values' type.
    tolerance = 1e-2 if case == "bf16-true" else 1e-6
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if not name.startswith(once_a_client) or name.endswith("_epoch"):
            assert found[name] == pytest.approx(value, rel=tolerance, abs=1e-7), name
    for optimizer, twin in zip(fitted.optimizers, plain.optimizers, strict=True):
        assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in twin.param_groups]
    scalers = [getattr(each.precision_plugin, "scaler", None) for each in (fitted, plain)]
    assert len({scaler.get_scale() for scaler in scalers if scaler is not None}) <= 1


def test_a_batch_that_is_none_is_skipped_by_its_client_alone(tmp_path):
    """The last client's first batch is the one; it is read, so that ``federated/client_steps`` counts it."""
    torch.manual_seed(0)
    module, looked = Module(network()), []
    clients = [range(8), range(32, 48), range(96, 103)]
    loop = FederatedLoop(FedAvg(), partition=FromIndices(clients), summary=False, execution="sequential")
    look = LambdaCallback(on_train_start=lambda *_: setattr(loop.rounds._local, "look", looked.append))
    fitted = trainer(tmp_path, loop, look, max_epochs=1)
    with pytest.warns(UserWarning, match="yielded None"):
        fitted.fit(module, Data(shuffle=False, collate_fn=readable))
    assert fitted.global_step == 3
    logged = {
        name: float(fitted.callback_metrics[f"federated/{name}"]) for name in ("clients", "failed", "client_steps")
    }
    assert logged == {"clients": 3, "failed": 0, "client_steps": 4}
    assert len(looked) == 2


def is_plain(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    plain = LocalTraining._plain_step
    monkeypatch.setattr(LocalTraining, "_plain_step", lambda self, *batch: found.append(1) or plain(self, *batch))
    return found


class HookedSGD(torch.optim.SGD):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.register_step_pre_hook(lambda *arguments: None)


class OtherStrategy(SingleDeviceStrategy):
    def backward(self, loss: Any, optimizer: Any, *arguments: Any, **keywords: Any) -> None:
        super().backward(2 * loss, optimizer, *arguments, **keywords)


SEEN: dict[str, dict[str, Any]] = {
    "accumulation": CASES["accumulated"],
    "a closure that is called again": CASES["LBFGS"],
    "own steps": CASES["steps of its own"],
    "optimizers by hand": CASES["by hand"],
    "a scaler": CASES["16-mixed"],
    "a profiler": CASES["profiled"],
    "a strategy": {"trainer": {"strategy": OtherStrategy("cpu")}},
    "a hook of the optimizer": {"arguments": {"optimizer": functools.partial(HookedSGD, lr=0.1)}},
    "a hook between": {"callbacks": lambda: [LambdaCallback(on_after_backward=lambda *arguments: None)]},
}


@pytest.mark.parametrize("case", [*SEEN, "plain", "bf16-mixed", "64-true", "clipped by norm", "steps of a schedule"])
def test_a_step_is_the_plain_one_where_nothing_sees_it(tmp_path, monkeypatch, case):
    found = is_plain(monkeypatch)
    run(tmp_path, SEEN.get(case, CASES.get(case, {})), one_client(), AROUND)
    assert bool(found) is (case not in SEEN)


@pytest.mark.parametrize("method", [functools.partial(FedProx, 0.3), functools.partial(PFedMe, personal_steps=2)])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_method_has_its_part_in_either_step(tmp_path, monkeypatch, method, precision):
    found, ends = is_plain(monkeypatch), []
    for fast in (True, False):
        module = Module(network())
        loop = FederatedLoop(method(), partition=FromIndices(CLIENTS), summary=False)
        with lightnings_own(not fast):
            fit(trainer(tmp_path, loop, precision=precision), module, Data())
        ends.append(weights(module))
        assert bool(found) is fast
        found.clear()
    assert_same(*ends)


class CountedSGD(torch.optim.SGD):
    made = 0

    def step(self, *arguments: Any, **settings: Any) -> Any:
        CountedSGD.made += 1
        return super().step(*arguments, **settings)


class CountsSteps(FedAvg):
    """Counts the steps in which the method has a part."""

    seen = 0

    def before_step(self, step: Any) -> None:
        self.seen += 1


def test_a_method_has_no_part_in_a_step_that_a_scaler_skips(tmp_path, monkeypatch):
    monkeypatch.setattr(CountedSGD, "made", 0)
    # The factor is too large for 16 bits at first.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, backoff_factor=2.0**-8, growth_interval=10**6)
    loop = FederatedLoop(CountsSteps(), partition=FromIndices([list(range(SAMPLES))]), summary=False)
    settings = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)], "max_epochs": 1, "limit_val_batches": 0}
    module = Module(optimizer=functools.partial(CountedSGD, lr=0.1))
    fit(trainer(tmp_path, loop, **settings), module, Data())
    assert loop.algorithm.seen == CountedSGD.made
    assert 0 < CountedSGD.made < BATCHES


@pytest.mark.parametrize("fast", [True, False])
def test_a_method_has_no_part_in_a_step_without_gradients(tmp_path, fast):
    loop = FederatedLoop(CountsSteps(), partition=FromIndices([list(range(SAMPLES))]), summary=False)
    with lightnings_own(not fast):
        fit(trainer(tmp_path, loop, max_epochs=1, limit_val_batches=0), LeavesOut(), Data())
    assert loop.algorithm.seen == BATCHES - 1


# What is called when


class Counts(pl.Callback):
    def __init__(self) -> None:
        self.numbers: list[tuple[int, int]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        assert len(batch[0]) <= 8

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.numbers.append((batch_idx, trainer.num_training_batches))
        assert outputs["loss"].ndim == 0


class Bar(TQDMProgressBar):
    """Has no hook of its own on a batch, as most users' have not."""


def test_hooks_of_a_batch_and_of_a_turn(tmp_path):
    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), summary=False)
    counts, bar, alone = Counts(), Bar(), []
    each = LambdaCallback(on_train_batch_start=lambda trainer, module, batch, number: alone.append(number))
    monitors = [
        Timer(),
        DeviceStatsMonitor(),
        LearningRateMonitor("step"),
        ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2),
    ]
    settings = {"logger": CSVLogger(tmp_path, name="", version=0), "log_every_n_steps": 2, "max_epochs": 1}
    run = trainer(tmp_path, loop, counts, bar, each, *monitors, enable_progress_bar=True, **settings)
    fit(run, Module(), Data())
    steps = [-(-len(indices) // 8) for indices in CLIENTS]
    assert counts.numbers == [(number, count) for count in steps for number in range(count)]
    assert alone == [number for number, _ in counts.numbers]
    assert bar.total_train_batches == len(CLIENTS) == run.num_training_batches
    assert bar.train_progress_bar.n == len(CLIENTS)
    run.logger.save()
    with open(tmp_path / "version_0" / "metrics.csv", newline="") as file:
        rates = [int(row["step"]) for row in csv.DictReader(file) if row.get("lr-SGD")]
    # As in a plain fit: after each second step.
    assert rates == list(range(1, sum(steps), 2))


def test_what_the_training_loader_shows(tmp_path):
    shown = []

    class Looks(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            loader = trainer.train_dataloader
            shown.append((len(loader), list(loader), loader.batch_size, len(loader.dataset)))

        def on_train_epoch_end(self, trainer, pl_module):
            shown.append(len(trainer.train_dataloader))

    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), participants=[[0, 1], [2], [3, 1, 0]], summary=False)
    fit(trainer(tmp_path, loop, Looks()), Module(), Data())
    # A client's own batches while it trains, and between clients those.
    steps = [-(-len(indices) // 8) for indices in CLIENTS]
    assert list(dict.fromkeys(map(str, shown))) == [
        str(each)
        for clients in ([0, 1], [2], [0, 1, 3])
        for each in [*((steps[client], list(range(len(clients))), 8, SAMPLES) for client in clients), len(clients)]
    ]


# Ends of a client's training


class Terminated(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 8:
            self.trainer._signal_connector.received_sigterm = True
        return super().training_step(batch, batch_idx)


def test_a_signal_ends_the_fit_after_the_step(tmp_path):
    module, seen = Terminated(network()), []
    start = weights(module)
    counts = Counts()
    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), summary=False)
    run = trainer(tmp_path, loop, counts, max_epochs=1)
    with pytest.raises(SIGTERMException):
        run.fit(module, Data())
    assert len(counts.numbers) == 9, seen
    assert_same(weights(module), start)


@daily()
@pytest.mark.parametrize("method", ["FedAvg", "keep"])
def test_a_checkpoint_inside_a_client_is_of_its_start(tmp_path, method):
    settings = {"optimizer_state": "keep", "uplink": [Half()]} if method == "keep" else {}

    def run(*callbacks: pl.Callback, **arguments: Any) -> tuple[Any, FederatedLoop]:
        torch.manual_seed(0)
        optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        module = Module(network(), optimizer=optimizer, scheduler=decay, interval="step")
        loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), summary=False, **settings)
        fit(trainer(tmp_path, loop, *callbacks, max_epochs=2), module, Data(), **arguments)
        return module, loop

    between = ModelCheckpoint(tmp_path / "between", "{step}", save_top_k=-1, every_n_train_steps=1)
    whole, loop = run(SaveEachStep(tmp_path / "inside"), between)
    starts = [0, 1, 7, 10, 15, 16, 22, 25]
    for step in range(1, 31):
        inside = torch.load(tmp_path / "inside" / f"step={step}.ckpt", weights_only=True)
        start = max(each for each in starts if each < step)
        assert inside["global_step"] == start
        if start not in (0, 15):
            # What Lightning counts there is complete here: it is saved before its own last count.
            other = torch.load(tmp_path / "between" / f"step={start}.ckpt", weights_only=True)
            assert_same(inside["state_dict"], other["state_dict"])
            for name in ("epoch_loop.automatic_optimization.optim_progress", "epoch_loop.scheduler_progress"):
                assert inside["loops"]["fit_loop"][name] == other["loops"]["fit_loop"][name]
            mine, its = (each["callbacks"]["FederatedLoop"] for each in (inside, other))
            assert {**mine, "inside": False}.keys() == its.keys()
            for name in ("progress", "chunks", "algorithm"):
                assert mine[name] == its[name], name
            for name in ("stages", "answered", "failed", "round", "cohort"):
                assert mine["server"][name] == its["server"][name], name
    for step in (1, 3, 10, 12, 15, 16, 24, 29):
        again, resumed = run(ckpt_path=tmp_path / "inside" / f"step={step}.ckpt")
        assert_same(weights(again), weights(whole))
        assert resumed.ledger.state_dict() == loop.ledger.state_dict()


@pytest.mark.slow
def test_a_run_is_resumed_again_and_again(tmp_path):
    class Validated(pl.Callback):
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def on_validation_end(self, trainer, pl_module):
            self.epochs.append(trainer.current_epoch)

    def run(folder: Any, ckpt_path: Any = None) -> Any:
        loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), summary=False)
        kept = ModelCheckpoint(tmp_path / folder, "{epoch}-{step}", save_top_k=-1, every_n_train_steps=1)
        module, validated = Module(network(), scheduler=decay, interval="step"), Validated()
        run = trainer(tmp_path, loop, kept, validated, max_epochs=3, num_sanity_val_steps=0)
        fit(run, module, Data(), ckpt_path=ckpt_path)
        if ckpt_path is not None:
            epoch, step = (int(part.split("=")[1]) for part in ckpt_path.stem.split("-"))
            # Lightning leaves out the validation that follows a round's last turn.
            assert validated.epochs == list(range(epoch + (step == 15 * (epoch + 1)), 3))
        return module, sorted((tmp_path / folder).glob("*.ckpt"), key=lambda file: file.stat().st_mtime_ns)

    whole, files = run("whole")
    # In the midst of a round, and at its last client.
    for number in (1, 3, 5, 7):
        again, later = run(f"from {number}", files[number])
        assert_same(weights(again), weights(whole))
        for file in later[:5]:
            assert_same(weights(run(f"from {number} and {file.stem}", file)[0]), weights(whole))


@pytest.mark.parametrize("steps", [9, 13, 23])
def test_a_fit_that_is_stopped_inside_a_client_goes_on_as_if_it_were_not(tmp_path, steps):
    def run(*callbacks: pl.Callback, max_steps: int = -1, **arguments: Any) -> tuple[Any, FederatedLoop]:
        loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), summary=False)
        module = Module(network(), scheduler=decay, interval="step")
        fit(trainer(tmp_path, loop, *callbacks, max_epochs=2, max_steps=max_steps), module, Data(), **arguments)
        return module, loop

    whole, loop = run()
    kept = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    cut, _ = run(kept, max_steps=steps)
    assert not torch.equal(cut.net[0].weight, whole.net[0].weight)
    again, resumed = run(ckpt_path=tmp_path / f"step={steps}.ckpt")
    assert_same(weights(again), weights(whole))
    assert resumed.ledger.state_dict() == loop.ledger.state_dict()


@pytest.mark.parametrize("every", [1, 3, 4, 100])
def test_checkpoints_are_saved_at_the_first_turn_past_a_multiple(tmp_path, every):
    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), summary=False)
    kept = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=every)
    key = kept.state_key
    fit(trainer(tmp_path, loop, kept, max_epochs=2), Module(), Data())
    ends = [1, 7, 10, 15, 16, 22, 25, 30]
    wanted = [end for before, end in zip([0, *ends], ends, strict=False) if end // every > before // every]
    assert sorted(int(file.stem.split("=")[1]) for file in tmp_path.glob("*.ckpt")) == wanted
    for file in tmp_path.glob("*.ckpt"):
        assert key in torch.load(file, weights_only=True)["callbacks"]


# What is logged


def test_figures_are_those_of_all_steps(tmp_path):
    class Sizes(Module):
        def training_step(self, batch, batch_idx):
            self.log("batches", 1, on_step=False, on_epoch=True, reduce_fx="sum")
            self.log("largest", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="max")
            self.log("squares", float(len(batch[0])), on_step=False, on_epoch=True)
            for reduction in ("max", "min"):
                value = float("nan") if batch_idx == 1 else 1.0
                self.log(f"no number/{reduction}", value, on_step=False, on_epoch=True, reduce_fx=reduction)
            return self.loss(batch)

    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), summary=False)
    run = trainer(tmp_path, loop, max_epochs=2)
    fit(run, Sizes(), Data())
    sizes = [len(part) for indices in CLIENTS for part in torch.tensor(indices).split(8)]
    assert run.callback_metrics["batches"] == len(sizes)
    assert run.callback_metrics["largest"] == 8
    assert run.callback_metrics["squares"] == pytest.approx(sum(size * size for size in sizes) / sum(sizes))
    assert run.callback_metrics["no number/max"].isnan()
    assert run.callback_metrics["no number/min"].isnan()


class Twice(Module):
    def training_step(self, batch, batch_idx):
        self.log("twice", 1.0, prog_bar=batch_idx == 1)
        return self.loss(batch)


class Vector(Module):
    def training_step(self, batch, batch_idx):
        self.log("vector", torch.ones(1 + batch_idx))
        return self.loss(batch)


class Nested(Module):
    def training_step(self, batch, batch_idx):
        self.log("nested", {"a": {"b": 1.0}} if batch_idx == 2 else 1.0)
        return self.loss(batch)


class Custom(Module):
    def training_step(self, batch, batch_idx):
        self.log("custom", 1.0, on_step=False, on_epoch=True, reduce_fx=lambda values: values[0])
        return self.loss(batch)


@pytest.mark.parametrize("kind", [Twice, Vector, Nested, Custom])
def test_what_lightning_refuses_to_log_is_refused_in_the_step(tmp_path, kind):
    raised = []
    for loops in ([one_client(on_client_error="raise")], []):
        with pytest.raises((MisconfigurationException, ValueError)) as error:
            fit(trainer(tmp_path, *loops, max_epochs=1), kind(), Data())
        raised.append((type(error.value), str(error.value).partition(" at 0x")[0]))
        assert "training_step" in [entry.name for entry in error.traceback]
    assert raised[0] == raised[1]


def test_what_is_logged_elsewhere_is_lightnings(tmp_path):
    class Elsewhere(Module):
        def on_train_start(self):
            self.log("start", 3.0)

        def on_train_epoch_end(self):
            self.log("end", float(self.trainer.global_step))

    run = trainer(tmp_path, one_client(), max_epochs=1)
    module = fit(run, Elsewhere(), Data())
    assert run.callback_metrics["start"] == 3
    assert run.callback_metrics["end"] == BATCHES
    assert "log" not in vars(module)


# What is replaced and refused


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({}, 8),
        ({"trainer": {"accumulate_grad_batches": 2}}, 9),
        ({"algorithm": FedProx(0.3)}, 9),
        ({"algorithm": PFedMe(personal_steps=2)}, 9),
    ],
)
def test_few_attributes_are_replaced(tmp_path, monkeypatch, settings, most):
    names = []
    replaced = advance.replaced

    def noting(owner, **attributes):
        names.extend(f"{type(owner).__name__}.{name}" for name in attributes)
        return replaced(owner, **attributes)

    for part in (advance, fingerprint, local, loop_module, internals_of_torch, safe_files):
        monkeypatch.setattr(part, "replaced", noting)
    logging_by = logbook.logging_by
    monkeypatch.setattr(logbook, "logging_by", lambda *given: names.append("log") or logging_by(*given))
    install, source = lightning.FitLength.install, lightning.TrainLoaderSource.replaced_by
    monkeypatch.setattr(lightning.FitLength, "install", lambda self: names.append("Trainer") or install(self))
    monkeypatch.setattr(
        lightning.TrainLoaderSource, "replaced_by", lambda self, loader: names.append("source") or source(self, loader)
    )
    algorithm = settings.get("algorithm", FedAvg())
    loop = FederatedLoop(algorithm, partition=FromIndices(CLIENTS), summary=False)
    run = trainer(tmp_path, loop, max_epochs=2, **settings.get("trainer", {}))
    fit(run, Module(), Data())
    assert "_TrainingEpochLoop.advance" in names
    assert len(names) <= most, names


@pytest.mark.parametrize("fails", [False, True])
def test_all_is_put_back(tmp_path, fails):
    class Failing(Module):
        def on_train_epoch_end(self):
            if fails:
                raise RuntimeError("out of luck")

    module, data = Failing(), Data()
    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), summary=False)
    run = trainer(tmp_path, loop, max_epochs=2, limit_train_batches=3, accumulate_grad_batches=2)
    parts = [run.fit_loop, run.fit_loop.epoch_loop, run.fit_loop.epoch_loop.automatic_optimization, run.strategy]
    before = [set(vars(part)) for part in parts]
    if fails:
        with pytest.raises(RuntimeError, match="out of luck"):
            run.fit(module, data)
    else:
        run.fit(module, data)
    assert [set(vars(part)) for part in parts] == before
    assert not {"log", "optimizer_step", "training_step", "on_load_checkpoint"} & vars(module).keys()
    assert (run.limit_train_batches, run.reload_dataloaders_every_n_epochs) == (3, 0)
    assert "val_dataloader" not in vars(data)
    assert run.fit_loop._data_source.instance is data
    assert not module._state_dict_hooks
    assert data.validation_loaders_made <= 2
    assert type(run) is pl.Trainer
    # After an error, OnExceptionCheckpoint may still save.
    assert type(run.strategy.checkpoint_io) is (WholeCheckpoints if fails else TorchCheckpointIO)
    assert not any(optimizer._optimizer_step_pre_hooks for optimizer in run.optimizers)


@pytest.mark.parametrize("callback", ["loop", "LowRank"])
def test_optimizers_have_no_hook_after_a_fit(tmp_path, callback):
    given = [FederatedLoop(FedProx(0.3) if callback == "loop" else FedAvg(), partition=FromIndices(CLIENTS))]
    if callback == "LowRank":
        given = [LowRank(MatrixProduct(), rank=2, frobenius_decay=0.1, summary=False), *given]
    hooks = []

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            hooks.append(len(trainer.optimizers[0]._optimizer_step_pre_hooks))

    run = trainer(tmp_path, *given, Looks(), max_epochs=1)
    fit(run, Manual(), Data())
    assert set(hooks) == {1}
    assert not run.optimizers[0]._optimizer_step_pre_hooks


OWN: dict[str, dict[str, Any]] = {
    "default": {},
    "a method's loss": {"algorithm": MOON("net.0", mu=0.1, temperature=0.5)},
    "a method's update": {"algorithm": PFedMe(personal_steps=2)},
    "objective": {"objective": MaskAbsentClasses("net", classes=4)},
    "auto": {"execution": "auto"},
    "channels last": {"execution": "auto"},
    "vectorized": {"execution": "vectorized"},
    "vectorized, a method's loss": {"algorithm": MOON("net.0", mu=0.1, temperature=0.5), "execution": "vectorized"},
    "private": {},
    "private alone": {},
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", OWN)
def test_what_a_user_has_set_on_the_module_is_put_back(tmp_path, monkeypatch, name, fails):
    if name == "channels last":
        monkeypatch.setattr(auto, "_fastest", lambda *arguments: ("sequential", True, "images are faster so"))
    module, called = Module(), []

    def wrapped(hook):
        own = getattr(module, hook)

        @functools.wraps(own)
        def wrapper(*arguments, **keywords):
            called.append(hook)
            if fails and hook == "on_train_epoch_end":
                raise RuntimeError("out of luck")
            return own(*arguments, **keywords)

        return wrapper

    hooks = {"training_step", "optimizer_step", "on_load_checkpoint", "on_train_epoch_end", "log"}
    if OWN[name].get("execution") == "vectorized":
        # With an optimizer_step of its own clients cannot step together.
        hooks.remove("optimizer_step")
    given = {hook: wrapped(hook) for hook in hooks}
    for hook, wrapper in given.items():
        setattr(module, hook, wrapper)
    callbacks: list[Any] = [DifferentialPrivacy(noise_multiplier=1.0)] if name.startswith("private") else []
    if name != "private alone":
        settings = {"algorithm": FedAvg(), **OWN[name]}
        callbacks.insert(0, FederatedLoop(partition=FromIndices(CLIENTS), summary=False, **settings))
    run = trainer(tmp_path, *callbacks, max_epochs=1)
    if fails:
        with pytest.raises(RuntimeError, match="out of luck"):
            fit(run, module, Data())
    else:
        fit(run, module, Data())
    assert {"training_step", "on_train_epoch_end"} <= {*called}
    assert {hook: vars(module).get(hook) for hook in given} == given


def test_a_module_that_reads_its_batches_itself_is_refused(tmp_path):
    class Reads(Module):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

    with pytest.raises(MisconfigurationException, match=r"Reads\.training_step\(dataloader_iter\)"):
        fit(trainer(tmp_path, one_client()), Reads(), Data())


def test_a_default_device_is_refused(tmp_path):
    module, data, run = Module(), Data(), trainer(tmp_path, one_client())
    with torch.device("meta"), pytest.raises(MisconfigurationException, match="default device is meta"):
        fit(run, module, data)


def test_a_plateau_of_steps_is_refused(tmp_path):
    class Plateau(Module):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return [optimizer], [{"scheduler": scheduler, "interval": "step", "monitor": "train_loss"}]

    with pytest.raises(MisconfigurationException, match=r"ReduceLROnPlateau.*interval='step'.*'epoch'"):
        fit(trainer(tmp_path, one_client()), Plateau(), Data())
