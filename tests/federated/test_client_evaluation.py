"""Clients' own models on their own test data, against evaluations written out by hand and Lightning's own."""

import functools
import random
import re

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)
from torchmetrics import MaxMetric, MeanMetric, Metric, MetricCollection, MetricTracker, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score

from lightning_lowrank.federated import client_evaluation
from lightning_lowrank.federated.client_evaluation import ClientEvaluation, figures
from lightning_lowrank.federated.state import copy_into, trained_tensors
from tests.grids import in_turn
from tests.helpers import Module, blobs, network, trainer, weights

CLIENTS = [[0, 3, 5, 7, 9, 11, 12], [], [1, 2, 3, 30], [39]]


def states_of(module):
    """Random values of each client, away from the module's; buffers as well."""
    draws = torch.Generator().manual_seed(5)

    def other(value):
        if not value.is_floating_point():
            return value + 1
        return (value.detach() + torch.rand(value.shape, generator=draws)).to(value.dtype)

    return [{name: other(value) for name, value in trained_tensors(module).items()} for _ in CLIENTS]


class Personal(pl.Callback):
    """Runs an evaluation when validation or a test ends, as FederatedLoop does."""

    def __init__(self, indices, states=None, before=None, after=None, **arguments):
        self.indices, self.states, self.arguments = indices, states, arguments
        self.before, self.after = before, after
        self.results = {}

    def run(self, trainer, module, loader, stage):
        judge = ClientEvaluation(loader, self.indices, **self.arguments)
        states = self.states or [trained_copy(module)] * len(self.indices)
        seen = self.before(module) if self.before else None
        try:
            self.results = judge.run(trainer, module, stage, states.__getitem__)
        finally:
            if self.after:
                self.after(module, seen)

    def on_validation_end(self, trainer, module):
        self.run(trainer, module, trainer.val_dataloaders, "validate")

    def on_test_end(self, trainer, module):
        self.run(trainer, module, trainer.test_dataloaders, "test")


def trained_copy(module):
    return {name: value.detach().clone() for name, value in trained_tensors(module).items()}


def evaluate(tmp_path, module, personal, loader, stage="validate", **arguments):
    """Validate or test, and return the clients' values and Lightning's own."""
    (own,) = getattr(trainer(tmp_path, personal, **arguments), stage)(module, loader, verbose=False)
    return personal.results, own


def plain_outputs(module, states, client, data):
    """Return the outputs of one client's model on its samples, and their labels."""
    net = network(norm=nn.BatchNorm1d if any("running" in name for name in states[client]) else None)
    net.load_state_dict({name.removeprefix("net."): value for name, value in states[client].items()})
    inputs, targets = (tensor[CLIENTS[client]] for tensor in data.tensors)
    with torch.no_grad():
        return net.eval()(inputs), targets


@pytest.mark.parametrize("norm", [None, nn.BatchNorm1d])
@pytest.mark.parametrize("size", [3, 40])
def test_every_client_is_judged_with_its_own_state_on_its_own_samples(tmp_path, size, norm):
    data, module = blobs(40), Module(network(norm=norm))
    states = states_of(module)
    results, _ = evaluate(tmp_path, module, Personal(CLIENTS, states), DataLoader(data, batch_size=size))
    assert results.keys() == {"val_loss", "val_acc"}
    assert list(results["val_acc"]) == list(results["val_loss"]) == [0, 2, 3]
    for client in (0, 2, 3):
        outputs, targets = plain_outputs(module, states, client, data)
        right = sum(int(row.argmax()) == int(label) for row, label in zip(outputs, targets, strict=True))
        assert results["val_acc"][client] == pytest.approx(right / len(targets))
        loss = nn.functional.cross_entropy(outputs, targets)
        assert results["val_loss"][client] == pytest.approx(loss.item(), rel=1e-5)
    assert len(set(results["val_loss"].values())) == 3


class Measured(Module):
    """Logs metric objects, in each of the ways a module may hold them."""

    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(4, average="micro")
        self.held = nn.ModuleList([nn.ModuleDict({"f1": MulticlassF1Score(4)})])
        several = {"acc": MulticlassAccuracy(4, average="macro"), "f1": MulticlassF1Score(4, average="macro")}
        self.several = MetricCollection(several, prefix="several_")
        self.called = {"mean": MeanMetric()}
        self.registered = self.called["mean"]
        self.summed = SumMetric()
        self.best = MaxMetric()

    def validation_step(self, batch):
        inputs, targets = batch
        outputs = self.net(inputs)
        self.accuracy(outputs, targets)
        self.log("acc", self.accuracy)
        f1 = self.held[0]["f1"]
        f1.update(outputs, targets)
        self.log("f1", f1, on_step=False, on_epoch=True)
        self.several.update(outputs, targets)
        self.log_dict(self.several)
        self.called["mean"].update(outputs[:, 0])
        self.log("mean", self.called["mean"])
        self.summed.update(targets)

    def on_validation_epoch_end(self):
        self.best.update(self.accuracy.compute())
        self.log("best", self.best.compute())
        self.log("summed", self.summed.compute())
        self.summed.reset()


@pytest.mark.slow
def test_metric_objects_see_the_clients_own_samples_alone(tmp_path):
    data, module = blobs(40), Measured()
    states = states_of(module)
    results, _ = evaluate(tmp_path, module, Personal(CLIENTS, states), DataLoader(data, batch_size=3))
    assert results.keys() == {"acc", "f1", "several_acc", "several_f1", "mean", "best", "summed"}
    for client in (0, 2, 3):
        outputs, targets = plain_outputs(module, states, client, data)
        right = (outputs.argmax(1) == targets).float().mean().item()
        expected = {
            "acc": right,
            "best": right,
            "f1": MulticlassF1Score(4)(outputs, targets).item(),
            "several_acc": MulticlassAccuracy(4, average="macro")(outputs, targets).item(),
            "several_f1": MulticlassF1Score(4, average="macro")(outputs, targets).item(),
            "mean": outputs[:, 0].mean().item(),
            "summed": targets.sum().item(),
        }
        for name, value in expected.items():
            assert results[name][client] == pytest.approx(value, rel=1e-5), name


class Tracked(Module):
    """Has the least value so far, of the epochs that its tracker has seen."""

    def __init__(self):
        super().__init__()
        self.tracker = MetricTracker(MeanMetric(), maximize=False)

    def on_validation_epoch_start(self):
        self.tracker.increment()

    def validation_step(self, batch):
        self.tracker.update(batch[0].mean())

    def on_validation_epoch_end(self):
        self.log("least", self.tracker.best_metric())


def test_a_tracker_has_the_steps_of_the_modules_own_evaluations(tmp_path):
    data, module = TensorDataset(torch.tensor([3.0, 1.0, 2.0])), Tracked()
    module.tracker.increment()
    module.tracker.update(-5.0)
    results, own = evaluate(tmp_path, module, Personal([[0], [1], [2]]), DataLoader(data))
    assert results == {"least": {0: 3.0, 1: 1.0, 2: 2.0}}
    assert own == {"least": -5.0}
    assert module.tracker.compute_all().tolist() == [-5.0, 2.0]


class Scaled(MeanMetric):
    """Has a persistent buffer, which is part of each client's state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def compute(self):
        return self.scale * super().compute()


class Sometimes(Module):
    def __init__(self):
        super().__init__()
        self.scaled = Scaled()

    def validation_step(self, batch):
        if batch[1][0] == 0:
            self.scaled.update(2.0)
            self.log("scaled", self.scaled)


def test_a_metrics_own_buffer_is_the_clients_and_one_that_logs_nothing_has_no_value(tmp_path):
    data = TensorDataset(torch.zeros(3, 6), torch.tensor([0, 1, 0]))
    states = [{"scaled.scale": torch.tensor(10.0 * (client + 1))} for client in range(3)]
    module = Sometimes()
    results, _ = evaluate(tmp_path, module, Personal([[0], [1], [2]], states), DataLoader(data))
    assert results == {"scaled": {0: 20.0, 2: 60.0}}
    assert module.scaled.scale == 1


class Everything(Measured):
    """Logs numbers as well, reduced in every way."""

    def validation_step(self, batch, batch_idx=0):
        super().validation_step(batch)
        targets = batch[1]
        loss = self.loss(batch)
        self.log("loss", loss)
        self.log("weighted", loss, batch_size=2 + batch_idx)
        self.log("number", 0.1 * batch_idx)
        self.log("sum", targets.sum(), reduce_fx="sum")
        self.log("max", loss, reduce_fx=torch.max)
        self.log("min", loss, reduce_fx=min)
        self.log("one", loss.unsqueeze(0), False, True, False, True)
        self.log("avg", loss, reduce_fx="avg")
        self.log("half", loss.bfloat16())
        self.log("count", torch.tensor(batch_idx))
        self.log("step", loss, on_step=True, on_epoch=False)

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self):
        self.on_validation_epoch_end()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You called `self.log")
@pytest.mark.parametrize(
    ("precision", "stage"), in_turn(["32-true", "bf16-mixed", "bf16-true", "64-true"], ["validate", "test"])
)
def test_one_client_with_everything_has_lightnings_own_result(tmp_path, stage, precision):
    data, module = blobs(40), Everything()
    personal = Personal([range(40)])
    results, own = evaluate(tmp_path, module, personal, DataLoader(data, batch_size=7), stage, precision=precision)
    assert {name: values[0] for name, values in results.items()} == own
    assert results.keys() >= {"acc", "sum", "max", "several_f1", "half", "best"}


class LeavesOut(Module):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [tensor[1:] for tensor in batch]


@pytest.mark.parametrize("kind", [Module, LeavesOut])
def test_values_are_weighted_by_the_samples_that_are_left_in_a_batch(tmp_path, kind):
    data, size = blobs(20), 6
    left_out = data.tensors[0][1:4]

    def readable(samples):
        return default_collate([sample for sample in samples if not (sample[0] == left_out).all(1).any()])

    loader = DataLoader(data, batch_size=size, collate_fn=readable)
    results, own = evaluate(tmp_path, kind(), Personal([range(20)]), loader)
    assert {name: values[0] for name, values in results.items()} == own


@pytest.mark.slow
def test_within_a_fit_lightnings_figures_are_the_same_with_it(tmp_path):
    def figures_of(*callbacks):
        module = Everything()
        run = trainer(tmp_path, *callbacks, max_epochs=2)
        run.fit(module, DataLoader(blobs(40), batch_size=8), DataLoader(blobs(40, seed=8), batch_size=20))
        return {name: float(value) for name, value in run.callback_metrics.items()}, weights(module)

    personal = Personal(CLIENTS, states_of(Everything()))
    with pytest.warns(UserWarning, match="log"):
        alone, (with_it, trained) = figures_of(), figures_of(personal)
    assert alone[0] == with_it
    for name, value in trained.items():
        assert torch.equal(alone[1][name], value), name
    assert personal.results["acc"].keys() == {0, 2, 3}


def everything_in(value, seen):
    """Spell out what a metric or module keeps, as far as comparing it by value needs."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().double().tolist()
    if isinstance(value, (list, tuple, set)):
        return [everything_in(item, seen) for item in value]
    if isinstance(value, dict):
        return {key: everything_in(item, seen) for key, item in value.items()}
    if isinstance(value, (nn.Module, Metric)):
        if id(value) in seen:
            return id(value)
        seen.add(id(value))
        return id(value), everything_in({k: v for k, v in vars(value).items() if k != "_trainer"}, seen)
    return id(value)


class Careless(Everything):
    """Keeps things of its own, some cleared by nobody, and draws from every generator."""

    def __init__(self):
        super().__init__()
        self.outputs = []
        self.same_outputs = self.outputs
        self.nested = {"seen": {"all": [[]]}, "labels": set()}
        self.steps = 0
        self.ranked = BinaryAUROC()
        self.zeroed = ResetInPlace()
        self.net.append(nn.Dropout(0.5))
        self.net[0].eval()

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        inputs, targets = batch
        self.outputs.append(self.net(inputs))
        assert self.same_outputs is self.outputs
        self.nested["seen"]["all"][0].append(batch_idx)
        self.nested["labels"].update(targets.tolist())
        self.steps += 1
        self.ranked.update(self.net(inputs)[:, 0].sigmoid(), (targets == 0).long())
        self.zeroed.update(1.0)
        torch.rand(1), random.random(), np.random.rand()


class ResetInPlace(Metric):
    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(()))

    def update(self, value):
        self.total += value

    def compute(self):
        return self.total

    def reset(self):
        self.total.zero_()


def generators():
    return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())


def all_of(module):
    return everything_in(module, set()), [part.training for part in module.modules()], generators(), weights(module)


def is_as_before(module, seen):
    now = all_of(module)
    assert now[:3] == seen[:3]
    for name, value in seen[3].items():
        assert torch.equal(now[3][name], value), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You called `self.log")
@pytest.mark.parametrize("fails_at", [None, 0, 2])
def test_what_the_module_holds_is_left_as_it_was(tmp_path, fails_at):
    module = Careless()
    # What training has left: a list state whose entries have a gradient, which a metric's clone() refuses.
    hot = torch.rand(4, requires_grad=True)
    module.ranked.preds.append(hot * 2)
    judged = []

    class Failing(Personal):
        def on_validation_end(self, trainer, module):
            def step(batch, batch_idx):
                judged.append(batch_idx)
                Careless.validation_step(module, batch, batch_idx)
                if fails_at is not None and batch_idx == fails_at:
                    raise KeyError("the step's own")

            vars(module)["validation_step"] = step
            super().on_validation_end(trainer, module)

    personal = Failing(CLIENTS, states_of(module), before=all_of, after=is_as_before)
    loader = DataLoader(blobs(40), batch_size=3)
    if fails_at is None:
        evaluate(tmp_path, module, personal, loader)
        assert set(personal.results["acc"]) == {0, 2, 3}
    else:
        with pytest.raises(KeyError, match="the step's own"):
            evaluate(tmp_path, module, personal, loader)
    assert judged == {None: [0, 1, 2, 0, 1, 0], 0: [0], 2: [0, 1, 2]}[fails_at]
    assert module.steps == 14
    assert module.zeroed.total == 14
    assert "log" not in vars(module)


def test_a_log_that_someone_else_has_put_there_stays(tmp_path):
    module = Module()
    vars(module)["log"] = mine = functools.partial(pl.LightningModule.log, module)
    results, _ = evaluate(tmp_path, module, Personal(CLIENTS), DataLoader(blobs(40), batch_size=5))
    assert vars(module)["log"] is mine
    assert results["val_acc"].keys() == {0, 2, 3}


class Modes(Module):
    def validation_step(self, batch, batch_idx):
        self.log("training", float(any(part.training for part in self.modules())))
        self.log("grad", float(torch.is_grad_enabled()))


class Dropping(Modes):
    def on_validation_model_eval(self):
        super().on_validation_model_eval()
        self.net.train()


def test_the_step_runs_in_evaluation_mode_without_gradients(tmp_path):
    for module, training in ((Modes(), 0.0), (Dropping(), 1.0)):
        personal = Personal([[0]])

        def run(trainer, module, loader, stage, personal=personal):
            module.train()
            with torch.enable_grad(), torch.inference_mode(False):
                Personal.run(personal, trainer, module, loader, stage)
            assert all(part.training for part in module.modules())

        personal.run = run
        results, _ = evaluate(tmp_path, module, personal, DataLoader(blobs(4)))
        assert results == {"training": {0: training}, "grad": {0: 0.0}}


class Hooked(Module):
    """Has all of the hooks that an epoch of validation calls, and says what it saw."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_validation_epoch_start(self):
        self.calls.clear()
        self.calls.append("epoch_start")

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + 1, batch[1]]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] * 2, batch[1]]

    def on_validation_batch_start(self, batch, batch_idx):
        self.calls.append(f"start {batch_idx}")

    def validation_step(self, batch, batch_idx):
        self.calls.append(f"step {batch_idx}")
        self.log("inputs", batch[0].mean())
        return batch_idx + 10

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.calls.append(f"end {outputs}")

    def on_validation_epoch_end(self):
        said.append(list(self.calls))
        self.log("steps", float(len(self.calls)))


said = []


def test_the_modules_own_hooks_run_for_each_client(tmp_path):
    module, data = Hooked(), blobs(40)
    said.clear()
    results, own = evaluate(tmp_path, module, Personal([[0, 1, 2], [5]]), DataLoader(data, batch_size=2))
    first, second = said[-2:]
    assert first == ["epoch_start", "start 0", "step 0", "end 10", "start 1", "step 1", "end 11"]
    assert second == ["epoch_start", "start 0", "step 0", "end 10"]
    assert results["steps"] == {0: 7.0, 1: 4.0}
    assert own["steps"] == 61.0
    assert results["inputs"][1] == pytest.approx((2 * (data.tensors[0][5] + 1)).mean().item(), rel=1e-5)


def test_a_datamodules_transfer_hook_goes_before_the_modules(tmp_path):
    class Given(pl.LightningDataModule):
        def val_dataloader(self):
            return DataLoader(blobs(40), batch_size=40)

        def on_before_batch_transfer(self, batch, dataloader_idx):
            return [batch[0] + 100, batch[1]]

    personal = Personal([range(40)])
    with pytest.warns(UserWarning, match="both"):
        results, own = evaluate(tmp_path, Hooked(), personal, Given())
    assert results["inputs"][0] == own["inputs"] > 190


@pytest.mark.parametrize("signature", ["batch", "batch, batch_idx", "batch, batch_idx, dataloader_idx=0", "*rest"])
def test_signatures_of_the_step(tmp_path, signature):
    given = []
    namespace = {"given": given}
    passed = signature.replace("=0", "")
    exec(f"def validation_step(self, {signature}): given.append([{passed}]); self.log('x', 1.0)", namespace)
    module = type("Signed", (Module,), {"validation_step": namespace["validation_step"]})()
    results, _ = evaluate(tmp_path, module, Personal([[0, 1]]), DataLoader(blobs(3), batch_size=1))
    assert results == {"x": {0: 1.0}}
    expected = {"batch": [[], []], "batch, batch_idx": [[0], [1]], "*rest": [[0], [1]]}
    assert [call[1:] for call in given[-2:]] == expected.get(signature, [[0, 0], [1, 0]])


@pytest.mark.slow
def test_a_state_for_all_is_installed_once_and_missing_names_are_the_modules(tmp_path, monkeypatch):
    installed = []
    monkeypatch.setattr(client_evaluation, "copy_into", lambda *given: (installed.append(given), copy_into(*given)))
    module, data = Module(), blobs(40)
    whole, bias = states_of(module)[0], {"net.0.bias": torch.full((16,), 3.0)}
    four = [[index] for index in range(4)]
    states = [whole, whole, bias, {**bias, "of_another": torch.ones(1)}]
    results, _ = evaluate(tmp_path, module, Personal(four, states), DataLoader(data))
    assert len(installed) == 4  # whole, bias twice, and what was in the module
    for client, state in enumerate(states):
        net = network()
        net.load_state_dict(
            {name: state.get(f"net.{name}", value) for name, value in module.net.state_dict().items()}, strict=True
        )
        inputs, targets = (tensor[[client]] for tensor in data.tensors)
        loss = nn.functional.cross_entropy(net(inputs), targets)
        assert results["val_loss"][client] == pytest.approx(loss.item(), rel=1e-5)


class Noisy(Dataset):
    """Adds noise from the global generators, as augmentations do."""

    def __init__(self, size=40):
        self.samples = blobs(size)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        inputs, targets = self.samples[index]
        return inputs + torch.randn(6) + random.random() + np.random.rand(), targets


class Drawing(Module):
    def validation_step(self, batch, batch_idx):
        self.log("inputs", batch[0].mean())
        self.log("drawn", torch.rand(()) + random.random() + np.random.rand())
        self.log("read", batch[0][0, 0])


@pytest.mark.slow
def test_draws_depend_on_the_seed_the_client_and_the_batch_alone(tmp_path):
    def results(indices, noise, **arguments):
        torch.manual_seed(noise), random.seed(noise), np.random.seed(noise)
        loader = DataLoader(Noisy(), batch_size=2, num_workers=arguments.pop("workers", 0))
        return evaluate(tmp_path, Drawing(), Personal(indices, **arguments), loader)[0]

    both = results([[0, 1], [4, 5, 6]], noise=1)
    assert both == results([[0, 1], [4, 5, 6]], noise=2)
    assert both == results([[0, 1], [4, 5, 6]], noise=3, workers=1)
    second = results([[], [4, 5, 6]], noise=2)
    assert second == {name: {1: values[1]} for name, values in both.items()}
    other = results([[0, 1], [4, 5, 6]], noise=1, seed=1)
    assert all(both[name][client] != other[name][client] for name in both for client in (0, 1))
    twice = results([[0], [0], [0, 1, 0]], noise=1)
    assert twice["drawn"][0] != twice["drawn"][1]
    assert twice["read"][0] != twice["read"][1]


class Noise(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand(1), torch.utils.data.get_worker_info() is not None


def test_no_two_draws_are_the_same(tmp_path):
    class Repeating(Module):
        def validation_step(self, batch):
            self.log("least read", batch[0][0, 0], reduce_fx="min")
            self.log("most read", batch[0][0, 0], reduce_fx="max")
            drawn = torch.rand(())
            self.log("least drawn", drawn, reduce_fx="min")
            self.log("most drawn", drawn, reduce_fx="max")

    results, _ = evaluate(tmp_path, Repeating(), Personal([[0], [0, 0]]), DataLoader(Noise()))
    assert results["least read"][0] != results["least drawn"][0]
    assert results["least read"][1] < results["most read"][1]
    assert results["least drawn"][1] < results["most drawn"][1]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_the_loaders_workers_read(tmp_path, workers):
    class Worked(Module):
        def validation_step(self, batch):
            self.log("in worker", batch[1].float().mean())

    results, _ = evaluate(tmp_path, Worked(), Personal([[0], [1, 2, 3]]), DataLoader(Noise(), num_workers=workers))
    assert results == {"in worker": {0: workers, 1: workers}}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled")
def test_the_loaders_order_and_drop_last_do_not_matter(tmp_path):
    def results(data, **arguments):
        return evaluate(tmp_path, Module(), Personal(CLIENTS), DataLoader(data, batch_size=3, **arguments))[0]

    expected = results(blobs(40))
    assert expected["val_acc"].keys() == {0, 2, 3}
    assert expected == results(blobs(40), drop_last=True, shuffle=True)
    assert expected == results(Subset(blobs(40), range(40)), drop_last=True)


def test_tensors_in_memory_are_read_a_batch_at_a_time(tmp_path, monkeypatch):
    data = blobs(40)
    reader = ClientEvaluation(DataLoader(data, batch_size=3), CLIENTS)
    assert reader.clients == (0, 2, 3)
    # Lightning itself reads sample by sample, so that only the clients' batches are asked for here.
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda *_: pytest.fail("read sample by sample"))
    read = list(reader._read({0: 3, 2: 2, 3: 1}))
    assert [len(targets) for _, targets in read] == [3, 3, 1, 3, 1, 1]
    assert torch.equal(read[3][0], data.tensors[0][[1, 2, 3]])
    ((again, _),) = reader._read({3: 1})
    assert torch.equal(again, data.tensors[0][[39]])


@pytest.mark.parametrize(
    ("limit", "steps"), [(1.0, [3, 2, 1]), (1, [1, 1, 1]), (2, [2, 2, 1]), (0.7, [2, 1, 1]), (0.05, [1, 1, 1])]
)
def test_limits_count_for_each_client(tmp_path, limit, steps):
    class Counting(Module):
        def validation_step(self, batch, batch_idx):
            self.log("steps", 1.0, reduce_fx="sum")

        def test_step(self, batch, batch_idx):
            self.log("steps", 1.0, reduce_fx="sum")

    for stage, name in (("validate", "limit_val_batches"), ("test", "limit_test_batches")):
        loader = DataLoader(Subset(blobs(100), range(100)), batch_size=3)
        results, _ = evaluate(tmp_path, Counting(), Personal(CLIENTS), loader, stage, **{name: limit})
        assert list(results["steps"].values()) == steps


def test_what_cannot_be_done_is_refused(tmp_path):
    loader = DataLoader(blobs(40), batch_size=4)

    def refuses(module, message):
        run = trainer(tmp_path)
        run.strategy.connect(module)
        with pytest.raises(MisconfigurationException, match=re.escape(message)):
            ClientEvaluation(loader, [[0]]).run(run, module, "validate", lambda client: {})

    class Silent(pl.LightningModule):
        pass

    refuses(Silent(), "Silent has no validation_step()")

    class Own(Module):
        def validation_step(self, dataloader_iter):
            pass

    refuses(Own(), "Own.validation_step(dataloader_iter)")


def test_logs_that_cannot_be_kept_apart_are_refused(tmp_path):
    # Lightning refuses these as well, so that they are logged only where its own log has been replaced.
    class Outside(Module):
        def validation_step(self, batch):
            if "log" in vars(self):
                self.log("acc", MeanMetric())

    class Odd(Module):
        def validation_step(self, batch):
            if "log" in vars(self):
                self.log("acc", 1.0, reduce_fx=torch.median)

    for module, message in ((Outside(), r"setting an attribute for the metric"), (Odd(), r"min,max,mean,sum.*median")):
        with pytest.raises(MisconfigurationException, match=message):
            evaluate(tmp_path, module, Personal([[0]]), DataLoader(blobs(4)))
        assert "log" not in vars(module)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Twice(DataLoader):
    def __iter__(self):
        yield from super().__iter__()


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([DataLoader(blobs(4)), DataLoader(blobs(4))], "got list of 2 loaders"),
        ({"a": DataLoader(blobs(4))}, "got dict of 1 loaders"),
        (None, "got NoneType"),
        (DataLoader(Stream()), "one of Stream, an IterableDataset"),
        (DataLoader(blobs(4), batch_size=None), "batch_size=None"),
        (DataLoader(blobs(4), sampler=SubsetRandomSampler([1, 2])), "draws with SubsetRandomSampler"),
        (Twice(blobs(4)), "Twice has its own __iter__"),
    ],
)
def test_loaders_that_cannot_be_read_by_index_are_refused(loader, message):
    with pytest.raises(MisconfigurationException, match=re.escape(message)):
        ClientEvaluation(loader, [[0]])


@pytest.mark.parametrize("indices", [[[], []], []])
def test_clients_without_a_test_sample_are_refused(indices):
    with pytest.raises(MisconfigurationException, match="no client has a test sample"):
        ClientEvaluation([DataLoader(blobs(4))], indices)


@pytest.mark.parametrize("count", [1, 9, 10, 19, 20, 105])
@pytest.mark.parametrize("higher", [True, False])
def test_figures_over_clients(higher, count):
    name = "val_x"
    values = torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    found = figures({3 * client: float(value) for client, value in enumerate(values)}, name, higher)
    worst = max(1, count // 10)
    ordered = sorted(values.tolist(), reverse=not higher)
    deviation = {f"personal/{name}_std"} if count > 1 else set()
    assert found.keys() == {f"personal/{name}", f"personal/{name}_worst10", *deviation}
    assert found[f"personal/{name}"] == pytest.approx(sum(ordered) / count)
    assert found[f"personal/{name}_worst10"] == pytest.approx(sum(ordered[:worst]) / worst)
    if deviation:
        assert found[f"personal/{name}_std"] == pytest.approx(values.var(correction=1).sqrt().item())
    assert all(type(value) is float for value in found.values())


def test_no_worst_tenth_without_a_direction():
    assert figures({0: 1.0, 1: 3.0}, "x", None) == {"personal/x": 2.0, "personal/x_std": 2**0.5}
    assert figures({0: 1.0}, "x", None) == {"personal/x": 1.0}


@pytest.mark.parametrize("higher", [True, False])
def test_a_client_without_a_number_is_the_worst(higher, recwarn):
    values = {client: float(client) for client in range(20)}
    assert np.isnan(figures({**values, 7: float("nan")}, "x", higher)["personal/x_worst10"])
    infinite = figures({**values, 7: float("inf")}, "x", higher)
    assert np.isnan(infinite["personal/x_std"])
    assert infinite["personal/x"] == float("inf")
    assert not recwarn.list
