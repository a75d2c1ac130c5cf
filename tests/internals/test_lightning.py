"""What `internals.lightning` and `internals.advance` take from Lightning exists, and does what they expect of it."""

import operator
import sys
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAUROC

from lightning_lowrank import (
    ConvergenceMonitor,
    FedAvg,
    FederatedLoop,
    FromIndices,
    LowRank,
    MatrixProduct,
    StaticBatchNorm,
)
from lightning_lowrank.internals import lightning as internals
from tests.helpers import Data, Module, fit, trainer


def loop(**arguments: Any) -> FederatedLoop:
    clients = [list(range(5)), list(range(5, 47)), list(range(47, 103))]
    return FederatedLoop(FedAvg(), partition=FromIndices(clients), summary=False, **arguments)


@pytest.fixture
def fitting(tmp_path):
    """A trainer and its module, as they are when a callback is set up."""
    run, module = trainer(tmp_path), Module()
    run.strategy.connect(module)
    module.trainer = run
    return run


def test_the_loop_has_what_is_used_of_it(fitting):
    names = """_batches_that_stepped _broadcast_sigterm_tensor _build_kwargs _num_ready_batches_reached _results
        _should_accumulate _should_check_val_fx _skip_next_val advance automatic_optimization.run batch_idx
        automatic_optimization.optim_progress.optimizer.step.increment_completed batch_progress.is_last_batch
        batch_progress.current.ready manual_optimization.run manual_optimization.optim_step_progress.total.completed
        restarted_on_last restarting scheduler_progress update_lr_schedulers val_loop.restarting
        val_loop._module_mode.mode val_loop.restarted_mid_evaluation val_loop.increment_progress_to_evaluation_end"""
    lacking = [name for name in names.split() if not _has(fitting.fit_loop.epoch_loop, name)]
    names = """_accelerator_connector.use_distributed_sampler _logger_connector.log_metrics
        _logger_connector.on_batch_end _logger_connector.on_batch_start _logger_connector.update_train_step_metrics
        _val_check_time_interval fit_loop._combined_loader fit_loop._data_fetcher fit_loop._data_source.instance
        fit_loop.max_batches fit_loop.setup_data"""
    assert not lacking + [name for name in names.split() if not _has(fitting, name)]


def _has(owner, path):
    try:
        operator.attrgetter(path)(owner)
    except AttributeError:
        return False
    return True


def test_the_training_loader_can_be_replaced(tmp_path):
    source = internals.TrainLoaderSource(trainer(tmp_path))
    assert not source.is_defined()
    given, other = object(), [1, 2]
    run = trainer(tmp_path)
    run.fit_loop._data_source.instance = given
    source = internals.TrainLoaderSource(run)
    with source.replaced_by(other):
        assert source.is_defined()
        assert source.user_loader() is given
        assert run.fit_loop._data_source.dataloader() is other
    assert run.fit_loop._data_source.dataloader() is given


def test_the_length_of_a_fit_is_answered(tmp_path, fitting):
    source, kind = internals.TrainLoaderSource(fitting), type(fitting)
    fitting.fit_loop._data_source.instance = range(9)
    replaced = source.replaced_by(range(9))
    replaced.__enter__()
    length = internals.FitLength(fitting, [1, 2], lambda: 17)
    end = length.install()
    assert isinstance(fitting, kind)
    assert fitting.estimated_stepping_batches == 17
    fitting.fit_loop.setup_data()
    assert fitting.train_dataloader == [1, 2]
    assert fitting.num_training_batches == 2
    length.settle()
    assert fitting.train_dataloader == [1, 2]
    fitting.fit_loop.setup_data()
    assert fitting.train_dataloader == range(9)
    assert fitting.num_training_batches == 9
    assert fitting.estimated_stepping_batches == 17
    end()
    assert type(fitting) is kind
    assert fitting.estimated_stepping_batches == 3 * 9


def test_counts_of_steps(fitting):
    counts = internals.StepCounts(fitting)
    counts.set(5, 5)
    assert fitting.global_step == counts.optimizer_steps() == 5
    internals.count_steps(fitting, 2)
    assert fitting.global_step == 7


def test_a_step_that_fails_leaves_nothing_in_the_trainer(fitting):
    scaler = torch.amp.GradScaler("cpu")
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    fitting.precision_plugin.scaler = scaler
    fitting.lightning_module._current_fx_name = "training_step"
    internals.leave_step(fitting)
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    scale = scaler.get_scale()
    internals.leave_step(fitting)
    scaler.unscale_(optimizer)
    assert scaler.get_scale() == scale
    assert fitting.lightning_module._current_fx_name is None


def test_a_step_that_is_about_to_be_made(fitting):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    assert not internals.makes_step(fitting, optimizer)
    for enabled in (True, False):
        scaler = fitting.precision_plugin.scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        for gradient in (1.0, float("inf")):
            before = parameter.detach().clone()
            parameter.grad = torch.full_like(parameter, gradient)
            # Lightning does not unscale where training_step returned None.
            assert internals.makes_step(fitting, optimizer) is not enabled
            scaler.scale(torch.ones(()))
            scaler.unscale_(optimizer)
            parameter.grad.nan_to_num_()
            makes = internals.makes_step(fitting, optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert makes is not torch.equal(parameter, before)
            assert makes is (not enabled or gradient == 1)


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_that_a_fused_optimizer_unscales_are_refused(fitting, fused):
    fitting.strategy.optimizers = [torch.optim.SGD(fitting.lightning_module.parameters(), lr=0.1, fused=fused)]
    internals.refuse_unseen_steps(fitting, "SCAFFOLD")()
    fitting.precision_plugin.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(MisconfigurationException, match=r"SGD.*fused=True.*SCAFFOLD") if fused else nullcontext():
        internals.refuse_unseen_steps(fitting, "SCAFFOLD")()


def test_results_of_an_epoch_are_pooled(fitting):
    results = fitting.fit_loop.epoch_loop._results
    results.log("training_step", "loss", torch.tensor(2.0), on_step=False, on_epoch=True, batch_size=4)

    def gather(mine):
        ((name, (settings, (value, size))),) = mine.items()
        return [mine, {name: (settings, (3 * value, 3 * size))}]

    internals.pool_training_results(fitting, gather)
    assert results.metrics(on_step=False)["callback"]["loss"] == (4 * 2.0 + 3 * 8.0) / 16


def test_a_pooled_metric_is_not_gathered_again_when_it_computes(monkeypatch):
    metric = SumMetric()
    metric.update(4.0)
    asked = []
    monkeypatch.setattr(metric, "sync", lambda **keywords: asked.append(keywords.get("should_sync", True)))
    internals._pool_metric(metric, lambda mine: [mine])
    assert metric.compute() == 4.0
    assert asked == [True, False]


@pytest.mark.parametrize("mine", [[], [0, 1]])
def test_a_pooled_metric_of_lists_is_gathered_and_reset(mine):
    metric, other = MulticlassAUROC(2), MulticlassAUROC(2)
    if mine:
        metric.update(torch.tensor([[0.4, 0.6], [0.3, 0.7]]), torch.tensor(mine))
    other.update(torch.tensor([[0.1, 0.9], [0.45, 0.55]]), torch.tensor([0, 1]))
    theirs = {"preds": other.preds, "target": other.target}
    internals._pool_metric(metric, lambda states: [states, theirs])
    targets = torch.cat(metric.target)
    assert (targets.tolist(), targets.dtype) == ([*mine, 0, 1], torch.int64)
    assert metric.compute() == (0.25 if mine else 0.0)
    metric.reset()
    assert metric.target == []


def test_evaluation_loaders_are_left_whole(fitting):
    with internals.evaluating_everything(fitting):
        assert fitting._accelerator_connector.use_distributed_sampler is False
    assert fitting._accelerator_connector.use_distributed_sampler is True


def test_figures_are_logged(tmp_path):
    class Figures(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            internals.log_figures(trainer, {"bytes": 2.0**30 + trainer.current_epoch})

    run = trainer(tmp_path, Figures(), logger=CSVLogger(tmp_path, name="", version=0), max_epochs=2)
    fit(run, Module(), Data())
    assert int(run.callback_metrics["bytes"]) == 2**30 + 1
    text = (tmp_path / "version_0" / "metrics.csv").read_text()
    head, *lines = [line.split(",") for line in text.splitlines()]
    logged = [dict(zip(head, line, strict=True)) for line in lines]
    logged = [(float(row["bytes"]), int(row["epoch"]), int(row["step"])) for row in logged if row["bytes"]]
    assert logged == [(2.0**30, 0, 13), (2.0**30 + 1, 1, 26)]


def test_when_a_fit_stops(fitting):
    assert not internals.stops_now(fitting)
    fitting.should_stop = True
    assert internals.stops_now(fitting)
    fitting.fit_loop.min_epochs = 1
    assert not internals.stops_now(fitting)
    assert fitting.fit_loop._can_stop_early is False
    fitting.fit_loop.epoch_loop.max_steps = 0
    assert internals.stops_now(fitting)


def test_one_epoch_alone(fitting):
    internals.make_one_epoch(fitting, 4)
    assert fitting.current_epoch == 4
    assert fitting.max_epochs == 5
    assert fitting.fit_loop._combined_loader is None


def test_the_trainer_of_a_module(fitting):
    assert internals.trainer_of(fitting.lightning_module) is fitting
    assert internals.trainer_of(Module()) is None
    assert internals.trainer_of(nn.Linear(1, 1)) is None


def test_the_schedule_of_checkpoints():
    assert internals.checkpoint_schedule(ModelCheckpoint()) == (0, None, None)
    assert internals.checkpoint_schedule(ModelCheckpoint(every_n_train_steps=3))[0] == 3
    assert internals.checkpoint_schedule(ModelCheckpoint(train_time_interval=timedelta(1)))[1] == timedelta(1)
    assert internals.checkpoint_schedule(ModelCheckpoint(save_on_train_epoch_end=True))[2] is True


def test_seconds_between_validations(tmp_path):
    assert internals.validation_seconds(trainer(tmp_path)) is None
    assert internals.validation_seconds(trainer(tmp_path, val_check_interval=timedelta(seconds=5))) == 5


def test_synchronous_layers(tmp_path):
    for synchronous in (False, True):
        run = trainer(tmp_path, devices=2, strategy="ddp", sync_batchnorm=synchronous)
        assert isinstance(run.strategy, DDPStrategy)
        assert internals.synchronizes_layers(run.strategy) is synchronous


@pytest.fixture
def other(monkeypatch):
    """The package `pytorch_lightning` itself, also where `alias_pytorch_lightning` has been called."""

    def forget():
        for name in [
            name for name in sys.modules if name.partition(".")[0] in ("pytorch_lightning", "lightning_fabric")
        ]:
            del sys.modules[name]

    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if type(finder).__name__ != "_Aliases"])
    forget()
    yield pytest.importorskip("pytorch_lightning")
    forget()


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [lambda: LowRank(MatrixProduct(), rank=2, summary=False), loop, StaticBatchNorm, ConvergenceMonitor],
    ids=["LowRank", "FederatedLoop", "StaticBatchNorm", "ConvergenceMonitor"],
)
def test_the_trainer_of_another_package_is_refused_by_each_callback(make, tmp_path, other):
    run = other.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", default_root_dir=tmp_path)
    with pytest.raises(MisconfigurationException, match=r"pytorch_lightning.*lightning_lowrank.*lightning\.pytorch"):
        make().setup(run, Module(), "fit")


@pytest.mark.slow
def test_pytorch_lightning_trains_not_nothing(tmp_path, other):
    class Other(other.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(6, 4)

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    settings = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu", "default_root_dir": tmp_path}
    run = other.Trainer(**settings, callbacks=[loop()], max_epochs=1)
    with pytest.raises(MisconfigurationException, match=r"lightning\.pytorch.*`import lightning\.pytorch as pl`"):
        run.fit(Other(), Data().train_dataloader())


@pytest.mark.parametrize("base", [pl.LightningModule, pl.LightningDataModule, pl.Callback])
def test_parts_of_another_package_are_refused(fitting, base):
    part = type("Part", (type("Base", (base,), {"__module__": "pytorch_lightning.core"}),), {})()
    module = fitting.lightning_module
    if base is pl.Callback:
        fitting.callbacks.append(part)
    elif base is pl.LightningModule:
        module = part
    else:
        fitting.datamodule = part
    with pytest.raises(MisconfigurationException, match="pytorch_lightning"):
        internals.check_namespace(fitting, module)
