"""Which execution a run takes, what it says of that, and how it finds out."""

import copy
import math
import random
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    DeviceStatsMonitor,
    LambdaCallback,
    ModelCheckpoint,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info
from torchmetrics import MeanMetric

from lightning_lowrank import ClientPrivacy, DifferentialPrivacy, FedAvg, FederatedLoop, FedPer, FromIndices
from lightning_lowrank.federated import rounds
from lightning_lowrank.federated.data.planner import RoundPlanner
from lightning_lowrank.federated.execution import auto, memory, stack
from lightning_lowrank.federated.execution.channels_last import ChannelsLast
from tests.federated.execution.runs import OPTIMIZERS, UNEVEN, Double, Item, Kept, Reader, assert_close, both, run
from tests.helpers import Data, Module, blobs, draw, fit, network, trainer, weights


@pytest.mark.slow
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


time_both = auto.time_both


def test_steps_are_tried_on_a_list_of_samples(tmp_path, capsys):
    loop = FederatedLoop(FedAvg(), partition=FromIndices(UNEVEN), execution="auto", summary=False)
    loader = DataLoader([blobs()[index] for index in range(103)], batch_size=8)
    trainer(tmp_path, loop, max_epochs=1, limit_val_batches=0).fit(Module(), loader)
    said = capsys.readouterr().out
    assert "ms together" in said
    assert "trial" not in said


class OfWorkers(Dataset):
    def __len__(self):
        return 103

    def __getitem__(self, index):
        if get_worker_info() is None:
            raise OSError("a file that only workers open")
        return tuple(tensor[index] for tensor in blobs().tensors)


@pytest.mark.slow
def test_steps_are_tried_on_a_dataset_that_only_workers_can_read(tmp_path, capsys):
    loop = FederatedLoop(FedAvg(), partition=FromIndices(UNEVEN), execution="auto", summary=False)
    loader = DataLoader(OfWorkers(), batch_size=8, num_workers=1)
    trainer(tmp_path, loop, max_epochs=1, limit_val_batches=0).fit(Module(), loader)
    said = capsys.readouterr().out
    assert "execution='auto'" in said
    assert "trial" not in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faster", "times", "said"),
    [("vectorized", (2.0, 1.0), "step together"), ("sequential", (1.0, 2.0), "one after another")],
)
def test_auto_says_what_it_chose_and_leaves_no_trace(tmp_path, capsys, monkeypatch, faster, times, said):
    tried = []

    def timed(*arguments):
        tried.extend(time_both(*arguments))
        return times

    monkeypatch.setattr(auto, "time_both", timed)
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


@pytest.mark.slow
@pytest.mark.parametrize(("module", "cause"), [(Item, "takes a number out of a tensor"), (Kept, "Read it from")])
def test_auto_falls_back_and_says_why(tmp_path, capsys, module, cause):
    fallen, loop, _ = run(tmp_path, "auto", module=module)
    assert "one after another" in (printed := capsys.readouterr().out)
    assert cause in printed
    assert "falls back" not in printed
    assert loop.rounds.execution.name == "sequential"
    expected, _, _ = run(tmp_path, "sequential", module=module)
    assert_close(weights(expected), weights(fallen), tolerance=0)
    run(tmp_path, "auto", callbacks=[Reader()])
    assert "Reader.on_before_optimizer_step" in capsys.readouterr().out


def _by_step(folder):
    return sorted(folder.glob("step=*.ckpt"), key=lambda file: int(file.stem.split("=")[1]))


@pytest.mark.slow
def test_a_resumed_run_keeps_the_choice(tmp_path, monkeypatch):
    monkeypatch.setattr(auto, "time_both", lambda *a: (2.0, 1.0))
    every = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    settings = {"chunk_size": 2, "trainer": {"max_epochs": 2}}
    whole, _, _ = run(tmp_path, "auto", callbacks=[every], **settings)
    monkeypatch.setattr(auto, "time_both", lambda *a: pytest.fail("tried again"))
    # Inside the first round.
    module, loop, _ = run(tmp_path, "auto", ckpt_path=_by_step(tmp_path)[1], **settings)
    assert loop.rounds.execution.name == "vectorized"
    assert_close(weights(whole), weights(module), tolerance=0)


@pytest.mark.parametrize("faster", ["sequential", "vectorized"])
def test_a_fit_goes_on_with_the_choice(tmp_path, monkeypatch, faster):
    monkeypatch.setattr(auto, "time_both", lambda *given: (1.0, 2.0) if faster == "sequential" else (2.0, 1.0))
    _, loop, fitted = run(tmp_path, "auto", trainer={"max_epochs": 1})
    monkeypatch.setattr(auto, "time_both", lambda *given: pytest.fail("tried again"))
    fitted.fit_loop.max_epochs = 2
    fit(fitted, fitted.lightning_module, Double())
    assert loop.rounds.execution.name == faster


def test_a_fit_goes_on_where_memory_has_room_for_one_client(tmp_path, monkeypatch):
    monkeypatch.setattr(auto, "time_both", lambda *given: (2.0, 1.0))
    monkeypatch.setattr(auto, "chunk_size_that_fits", lambda *given: 1)
    _, loop, fitted = run(tmp_path, "auto", trainer={"max_epochs": 1})
    fitted.fit_loop.max_epochs = 2
    fit(fitted, fitted.lightning_module, Double())
    assert (loop.rounds.execution.name, loop.data.chunk_size) == ("vectorized", 1)


@pytest.mark.slow
def test_both_ways_are_timed_without_a_trace(tmp_path, monkeypatch):
    seen = []

    def timed(fitted, module, chunk, loader, defers):
        before = weights(module), [dict(group) for group in fitted.optimizers[0].param_groups]
        log = vars(module).get("log")
        seconds = time_both(fitted, module, chunk, loader, defers)
        after = weights(module), [dict(group) for group in fitted.optimizers[0].param_groups]
        assert_close(before[0], after[0], tolerance=0)
        assert all(one["params"] == two["params"] for one, two in zip(before[1], after[1], strict=True))
        assert not fitted.optimizers[0].state
        assert not {"training_step", "configure_gradient_clipping"} & vars(module).keys()
        assert vars(module).get("log") is log
        seen.append(seconds)
        return seconds

    monkeypatch.setattr(auto, "time_both", timed)
    run(tmp_path, "auto", module=partial(Module, optimizer=OPTIMIZERS["AdamW"]), trainer={"max_epochs": 1})
    assert min(seen[0]) > 0


@pytest.mark.parametrize(("batch_size", "client_steps"), [(8, 1 + 6 + 3 + 5 + 1), (4, 2 + 6 + 4 + 5 + 1)])
def test_the_trial_counts_a_step_once_for_each_client_that_makes_it(tmp_path, monkeypatch, batch_size, client_steps):
    seen = []
    monkeypatch.setattr(auto, "_seconds", lambda trainer, module, batches, *given: [1.0] * len(batches))
    monkeypatch.setattr(auto, "time_both", lambda *arguments: seen.append(time_both(*arguments)) or seen[-1])
    # With batches of 4 samples, clients have 2, 11, 6, 9 and 1 batches, and the trial six elevenths of them.
    run(tmp_path, "auto", data=Double(batch_size=batch_size), trainer={"max_epochs": 1})
    assert seen == [(1.0, pytest.approx(6 / client_steps))]


class Recording(Module):
    """Leaves whatever a training step can leave on a module."""

    def __init__(self):
        super().__init__()
        self.metric, self.losses, self.steps, self.last = MeanMetric(), [], 0, None
        self.stats = {"seen": torch.zeros(()), "array": np.zeros(2)}
        self.draws, self.luck = torch.Generator(), random.Random(0)
        self.register_buffer("unsaved", torch.zeros(6), persistent=False)
        self.teacher = network().requires_grad_(False)
        call = self.net[1].forward
        self.net[1].forward = lambda inputs: self.losses.append(0.0) or call(inputs)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.steps += 1
        self.last = torch.rand((), generator=self.draws) + self.luck.random()
        self.metric.update(1.0)
        self.stats["seen"] += 1
        self.stats["array"] += 1
        self.unsaved.add_(1)
        self.logger.experiment.add_scalar("loss", 0.0)
        for weight in self.teacher.parameters():
            weight.data.mul_(0.9)
        return loss


def everything(module):
    kept = copy.deepcopy({name: value for name, value in vars(module).items() if name in RECORDED})
    return kept, {name: value.clone() for name, value in (*module.named_parameters(), *module.named_buffers())}


RECORDED = ("losses", "steps", "last", "stats")


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_the_trial_leaves_no_trace(tmp_path, monkeypatch, fails):
    drawn = []

    def timed(fitted, module, chunk, loader, defers):
        before, draws = everything(module), (module.draws.get_state(), module.luck.getstate())
        written = []
        monkeypatch.setattr(fitted.logger.experiment, "add_scalar", lambda *_: written.append(1))
        optimizers = [dict(vars(each)) for each in fitted.optimizers]
        if fails:
            monkeypatch.setattr(auto, "_seconds", raises_at_the_end(auto._seconds))
        try:
            return time_both(fitted, module, chunk, loader, defers)
        finally:
            after = everything(module)
            assert repr(before[0]) == repr(after[0])
            assert_close(before[1], after[1], tolerance=0)
            assert torch.equal(draws[0], module.draws.get_state())
            assert draws[1] == module.luck.getstate()
            assert module.metric.update_count == 0
            assert module.metric.mean_value == 0
            assert [dict(vars(each)) for each in fitted.optimizers] == optimizers
            assert not written
            drawn.append(1)

    class Writer(DummyLogger):
        experiment = SimpleNamespace(add_scalar=lambda *_: None)

    monkeypatch.setattr(auto, "time_both", timed)
    _, loop, _ = run(
        tmp_path, "auto", module=Recording, ema_parameters=["teacher"], trainer={"max_epochs": 1, "logger": Writer()}
    )
    assert loop.rounds.execution.name == "sequential"
    assert drawn


def raises_at_the_end(function):
    def raises(*arguments):
        function(*arguments)
        raise KeyError("a user's own")

    return raises


class Updating(Module):
    def __init__(self):
        super().__init__()
        self.metric = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.metric(loss)
        self.log("mean", self.metric)
        return loss


class Iterating(Module):
    def __init__(self):
        super().__init__()
        self.factors = iter([1.0, 0.5] * 1000)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * next(self.factors)


class Hooked(Module):
    def on_train_batch_end(self, *_):
        with torch.no_grad():
            self.net[0].weight.clamp_(-0.1, 0.1)


class Files(torch.utils.data.Dataset):
    """Sequences of different length, with their files' names."""

    def __len__(self):
        return 103

    def __getitem__(self, index):
        draws = torch.Generator().manual_seed(index)
        length = int(torch.randint(2, 12, (), generator=draws))
        return torch.randn(length, 6, generator=draws, dtype=torch.float64), index % 4, f"{index}.txt"


def pad(samples):
    inputs = nn.utils.rnn.pad_sequence([inputs for inputs, _, _ in samples], batch_first=True)
    return {"inputs": inputs, "labels": torch.tensor([label for _, label, _ in samples])}


def pad_and_name(samples):
    return {**pad(samples), "names": [name for _, _, name in samples]}


class Boxes:
    """A batch of a class of its own."""

    def __init__(self, samples):
        self.inputs, self.labels = pad(samples).values()


class Sequences(Module):
    def training_step(self, batch, batch_idx):
        inputs, labels, *names = (batch if isinstance(batch, dict) else vars(batch)).values()
        assert not names or [name.endswith(".txt") for name in names[0]] == [True] * len(inputs)
        return nn.functional.cross_entropy(self.net(inputs).mean(1), labels)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Updating, "metric"),
        (Iterating, r"self\.factors is of list_iterator"),
        (Hooked, r"Hooked.on_train_batch_end\(\) would see the global model"),
    ],
)
def test_auto_raises_nothing_that_sequential_does_not(tmp_path, capsys, module, said):
    settings = {"module": module, "trainer": {"max_epochs": 2}}
    fallen, loop, _ = run(tmp_path, "auto", **settings)
    assert loop.rounds.execution.name == "sequential"
    assert re.search(said, capsys.readouterr().out)
    expected, _, _ = run(tmp_path, "sequential", **settings)
    assert_close(weights(expected), weights(fallen), tolerance=0)


def sizes_of(hook, sizes):
    """Return a callback that looks at each batch, or else counts."""

    def own(trainer, module, *given):
        sizes.append(len(given[-2][0]) if hook.startswith("on_train_batch") else 1)

    return own


def with_hook(hook, sizes, kind=Callback):
    return type("Own", (kind,), {hook: staticmethod(sizes_of(hook, sizes))})()


@pytest.mark.slow
@pytest.mark.parametrize(
    "hook", ["on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_train_batch_end"]
)
@pytest.mark.nightly
def test_callbacks_of_users_see_each_clients_steps(tmp_path, monkeypatch, capsys, hook):
    monkeypatch.setattr(auto, "time_both", lambda *given: (2.0, 1.0))
    alone, fallen, lambdas, together = [], [], [], []
    run(tmp_path, "sequential", callbacks=[with_hook(hook, alone)])
    for callback in (with_hook(hook, fallen, Timer), LambdaCallback(**{hook: sizes_of(hook, lambdas)})):
        _, loop, _ = run(tmp_path, "auto", callbacks=[callback])
        assert loop.rounds.execution.name == "sequential"
        said = rf"{type(callback).__name__}\.{hook}\(\) would see the global model and batches of several clients"
        assert re.search(said, capsys.readouterr().out)
    assert alone == fallen == lambdas
    counting = LambdaCallback(**{hook: lambda *given: together.append(1)})
    run(tmp_path, "vectorized", callbacks=[counting])
    assert 0 < len(together) < len(alone)


def test_callbacks_of_lightning_look_at_no_clients_step(tmp_path, monkeypatch):
    monkeypatch.setattr(auto, "time_both", lambda *given: (2.0, 1.0))
    settings = {"trainer": {"logger": CSVLogger(tmp_path), "max_epochs": 1}}
    _, loop, _ = run(tmp_path, "auto", callbacks=[Timer(), DeviceStatsMonitor()], **settings)
    assert loop.rounds.execution.name == "vectorized"
    sizes = []
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: sizes.append(len(batch[0])) or sizes[-1])
    _, loop, _ = run(tmp_path, "auto", callbacks=[monitor], **settings)
    assert loop.rounds.execution.name == "sequential"
    assert sizes
    with pytest.raises(MisconfigurationException, match=r"ThroughputMonitor.*batch_size_fn"):
        run(tmp_path, "vectorized", callbacks=[monitor], **settings)


@pytest.mark.slow
@pytest.mark.parametrize("collate", [pad, pad_and_name, Boxes])
def test_batches_of_unequal_form_are_those_of_sequential_clients(tmp_path, monkeypatch, collate):
    warned = []
    monkeypatch.setattr(stack, "rank_zero_warn", warned.append)
    both(tmp_path, module=Sequences, data=Data(Files(), collate_fn=collate), trainer={"max_epochs": 1})
    form = (
        "in entries that are no tensors"
        if collate is Boxes
        else r"batch\.inputs of shapes \(\d, \d+, 6\) and \(\d, \d+, 6\)"
    )
    said = [rf"batches of \d samples differ in form \({form}\)"]
    said += [r"it reads batch\['names'\]"] if collate is pad_and_name else []
    assert len(warned) == len(said)
    assert all(any(re.search(each, warning) for warning in warned) for each in said)
    monkeypatch.setattr(auto, "time_both", lambda *given: time_both(*given) and (2.0, 1.0))
    _, loop, _ = run(
        tmp_path, "auto", module=Sequences, data=Data(Files(), collate_fn=collate), trainer={"max_epochs": 1}
    )
    assert loop.rounds.execution.name == "vectorized"


class Later(Module):
    """Decides by a tensor's value from the second round on."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return 2 * loss if self.current_epoch and batch[0].sum() > 0 else loss


@pytest.mark.slow
@pytest.mark.parametrize("norm", [None, nn.BatchNorm1d])
def test_auto_goes_on_where_later_steps_cannot_be_mapped(tmp_path, monkeypatch, norm):
    monkeypatch.setattr(auto, "time_both", lambda *given: (2.0, 1.0))
    settings = {
        "module": lambda: Later(network(norm=norm)),
        "data": Double(drop_last=True, batch_size=4),
        "trainer": {"max_epochs": 3},
    }
    warned = []
    monkeypatch.setattr(stack, "rank_zero_warn", warned.append)
    module, loop, fitted = run(tmp_path, "auto", **settings)
    (warning,) = warned
    assert "can no longer be mapped over clients: it decides by a tensor's value" in warning
    assert loop.rounds.execution.name == "vectorized"
    expected, _, plain = run(tmp_path, "sequential", **settings)
    assert_close(weights(expected), weights(module))
    torch.testing.assert_close(fitted.callback_metrics["train_loss"], plain.callback_metrics["train_loss"])


class Pictures(Data):
    """Pictures of one channel."""

    def __init__(self):
        labels = torch.randint(4, (103,), generator=torch.Generator().manual_seed(2))
        super().__init__(TensorDataset(draw(103, 1, 6, 6).double(), labels), batch_size=16)

    def val_dataloader(self):
        return DataLoader(self.train, batch_size=50)


FORMATS = []


class Convolving(Module):
    """Notes in what format its convolutions get images and hand them on; may take views from the third step on."""

    def __init__(self, view=False):
        torch.manual_seed(4)
        super().__init__(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.ReLU()))
        self.head, self.view = nn.Linear(16, 4), view

    def on_train_start(self):
        FORMATS.clear()

    def loss(self, batch):
        inputs, targets = batch
        features = self.net(inputs)
        FORMATS.append((self.training, *(each.stride(1) == 1 for each in (inputs, features))))
        flat = features.view(len(features), -1) if self.view and len(FORMATS) > 2 else features.flatten(1)
        return nn.functional.cross_entropy(self.head(flat), targets)

    def training_step(self, batch, batch_idx):
        self.log("loss", loss := self.loss(batch), on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))


PICTURES = {"module": Convolving, "data": Pictures(), "partition": FromIndices([range(40), range(40, 103)])}


def timed_as(monkeypatch, last, together=9.0):
    """Have clients' steps take 4 seconds alone, ``last`` with channels last, and ``together``."""
    monkeypatch.setattr(auto, "time_both", lambda *arguments: (4.0, together))
    monkeypatch.setattr(auto, "time_alone", lambda *arguments, channels_last=False: last if channels_last else 4.0)


class Turned(Pictures):
    """Has hooks without which its batches are none for the module."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        assert len(batch) == 2
        return {"images": batch[0], "targets": batch[1]}

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch["images"].flip(-1), batch["targets"]]


def test_a_trial_has_batches_as_the_datamodules_hooks_make_them(tmp_path, capsys):
    run(tmp_path, "auto", **{**PICTURES, "data": Turned()}, trainer={"max_epochs": 0})
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"Turned\.\w+\(\) expects one client's batch; .* alone with channels last", printed)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_a_trial_has_batches_in_the_precision_of_the_fit(tmp_path, capsys, precision):
    settings = {"max_epochs": 0, "precision": precision}
    run(tmp_path, "auto", data=Data(), dtype=torch.float32, trainer=settings)
    assert "ms together" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("last", "together", "name", "channels_last"),
    [
        (2.0, 3.0, "sequential", True),
        (2.0, 1.0, "vectorized", True),
        (3.9, 3.9, "vectorized", False),
        (3.9, 5.0, "sequential", False),
        (4.0, 4.0, "sequential", False),
        (None, 4.0, "sequential", False),
    ],
)
def test_the_fastest_of_three_is_chosen(tmp_path, capsys, monkeypatch, last, together, name, channels_last):
    timed_as(monkeypatch, last, together)
    _, loop, _ = run(tmp_path, "auto", **PICTURES, trainer={"max_epochs": 0})
    assert (loop.rounds.execution.name, loop.rounds.execution.channels_last) == (name, channels_last)
    printed = capsys.readouterr().out
    assert ("of images last in memory" in printed, "step together" in printed) == (
        channels_last,
        name == "vectorized",
    )
    known = [f"{1000 * last:.3g} ms alone with channels last"] if last else []
    assert ", ".join(["4e+03 ms alone", *known]) + f" and {1000 * together:.3g} ms together" in printed


@pytest.mark.slow
@pytest.mark.parametrize("together", [9.0, 1.0])
def test_channels_last_give_the_sequential_result_in_steps_and_evaluations(tmp_path, monkeypatch, together):
    timed_as(monkeypatch, 2.0, together)
    ends = []
    for execution in ("sequential", "auto"):
        settings = {"partition": PICTURES["partition"], "personal_test": 0.2, "execution": execution}
        loop = FederatedLoop(FedPer(["net.0.*"]), summary=False, **settings)
        module = Convolving().double()
        fitted = trainer(tmp_path, loop, max_epochs=2)
        fit(fitted, module, Pictures())
        last = execution == "auto"
        assert loop.rounds.execution.stacked == (last and together < 2)
        if loop.rounds.execution.stacked:
            assert {form for form in FORMATS if not form[0]} == {(False, last, last)}
        else:
            assert set(FORMATS) == {(True, last, last), (False, last, last)}
        assert "training_step" not in vars(module)
        assert not {"training_step", "validation_step"} & vars(fitted.strategy).keys()
        FORMATS.clear()
        fitted.validate(module, Pictures(), verbose=False)
        assert set(FORMATS) == {(False, False, False)}
        ends.append((weights(module), dict(fitted.callback_metrics)))
    assert_close(ends[0][0], ends[1][0])
    assert_close(ends[0][1], ends[1][1])


def test_they_are_tried_where_clients_cannot_step_together(tmp_path, capsys, monkeypatch):
    class Deciding(Convolving):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * (1 if loss.item() > 0 else 2)

    monkeypatch.setattr(auto, "_WORTH_CHANNELS_LAST", math.inf)
    _, loop, _ = run(tmp_path, "auto", **{**PICTURES, "module": Deciding}, trainer={"max_epochs": 0})
    assert loop.rounds.execution.channels_last
    printed = capsys.readouterr().out
    assert re.search(r"takes a number out of a tensor.*takes \S+ ms alone and \S+ ms alone with channels last", printed)


def test_a_step_that_takes_views_keeps_its_format_without_a_trace(tmp_path, capsys, monkeypatch):
    tried, time_alone = [], auto.time_alone

    def timed(fitted, module, *arguments, **keywords):
        before, log = everything(module), vars(module).get("log")
        FORMATS.clear()
        try:
            return time_alone(fitted, module, *arguments, **keywords)
        finally:
            tried.append(list(FORMATS))
            assert_close(before[1], everything(module)[1], tolerance=0)
            assert all(value.grad is None for value in module.parameters())
            assert "training_step" not in vars(module)
            assert vars(module).get("log") is log
            assert not fitted.callback_metrics

    monkeypatch.setattr(auto, "time_both", lambda *arguments: (1.0, 2.0))
    monkeypatch.setattr(auto, "time_alone", timed)
    settings = {**PICTURES, "module": partial(Convolving, view=True), "trainer": {"max_epochs": 2}}
    fallen, loop, _ = run(tmp_path, "auto", **settings)
    assert tried == [[(True, True, True)] * 3]
    assert (loop.rounds.execution.name, loop.rounds.execution.channels_last) == ("sequential", False)
    assert "; with channels last, the trial ended with RuntimeError: view size is not" in capsys.readouterr().out
    expected, _, _ = run(tmp_path, "sequential", **settings)
    assert_close(weights(expected), weights(fallen), tolerance=0)


@pytest.mark.slow
def test_a_resumed_or_continued_run_keeps_the_format(tmp_path, monkeypatch):
    timed_as(monkeypatch, 2.0)
    every = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    whole, _, _ = run(tmp_path, "auto", **PICTURES, callbacks=[every], trainer={"max_epochs": 2})
    _, continued, fitted = run(tmp_path, "auto", **PICTURES, trainer={"max_epochs": 1})
    for name in ("time_both", "time_alone"):
        monkeypatch.setattr(auto, name, lambda *a, **k: pytest.fail("tried again"))
    # Inside the first round.
    checkpoint = _by_step(tmp_path)[1]
    module, loop, _ = run(tmp_path, "auto", **PICTURES, ckpt_path=checkpoint, trainer={"max_epochs": 2})
    fitted.fit_loop.max_epochs = 2
    fit(fitted, fitted.lightning_module, Pictures())
    for each in (loop, continued):
        assert each.rounds.execution.channels_last
    for each in (module, fitted.lightning_module):
        assert_close(weights(whole), weights(each), tolerance=0)
    _, plain, _ = run(tmp_path, "sequential", **PICTURES, ckpt_path=_by_step(tmp_path)[-1], trainer={"max_epochs": 3})
    assert not plain.rounds.execution.channels_last


@pytest.mark.slow
def test_a_later_step_that_takes_views_says_what_would_do(tmp_path, monkeypatch):
    class Later(Convolving):
        def on_train_epoch_start(self):
            self.view = self.current_epoch > 0

    timed_as(monkeypatch, 2.0)
    with pytest.raises(MisconfigurationException, match=r"Later\.training_step\(\).*view\(\).*execution='auto'"):
        run(tmp_path, "auto", **{**PICTURES, "module": Later}, trainer={"max_epochs": 2})

    class Failing(Convolving):
        def loss(self, batch):
            return super().loss(batch) + batch[0][:, 0].view(7, 7).sum()

    class Evaluating(Convolving):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.net(batch[0]).view(len(batch[0]), -1).mean())

    def evaluating(rounds=1, ckpt_path=None, **settings):
        loop = FederatedLoop(FedAvg(), partition=PICTURES["partition"], execution="auto", summary=False)
        fitted = trainer(tmp_path, loop, max_epochs=rounds, **settings)
        fit(fitted, Evaluating().double(), Pictures(), ckpt_path=ckpt_path)
        return fitted

    with pytest.raises(MisconfigurationException, match=r"Evaluating\.validation_step\(\).*view\(\).*sequential"):
        evaluating(num_sanity_val_steps=0)
    # A sanity check tells before, for resumed and continued fits too.
    fitted = evaluating(num_sanity_val_steps=1)
    assert fitted.callback_metrics["val_loss"].isfinite()
    fitted.save_checkpoint(tmp_path / "one.ckpt")
    resumed = evaluating(2, tmp_path / "one.ckpt", num_sanity_val_steps=0)
    assert resumed.callback_metrics["val_loss"].isfinite()
    fitted.fit_loop.max_epochs, fitted.num_sanity_val_steps = 2, 0
    fit(fitted, fitted.lightning_module, Pictures())
    assert fitted.current_epoch == 2

    # Of a client whose step fails anyhow, only its own error is told.
    with pytest.raises(RuntimeError, match=r"'\[7, 7\]'"):
        run(tmp_path, "auto", **{**PICTURES, "module": Failing}, on_client_error="raise", trainer={"max_epochs": 1})


def test_all_processes_take_the_format_of_the_first(tmp_path, monkeypatch):
    timed_as(monkeypatch, None)
    found, choose = [], auto.choose_execution
    processes = SimpleNamespace(broadcast=lambda mine: found.append(mine) or ("sequential", True, "the first's"))
    monkeypatch.setattr(
        rounds,
        "choose_execution",
        lambda trainer, coordinator, data, alone, *others: choose(trainer, coordinator, data, processes, *others),
    )
    _, loop, _ = run(tmp_path, "auto", **PICTURES, trainer={"max_epochs": 0})
    assert loop.rounds.execution.channels_last
    assert not found[0][1]


def unnormed():
    torch.manual_seed(4)
    return Module(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(64, 4)))


@pytest.mark.slow
def test_single_samples_keep_their_format(tmp_path, capsys, monkeypatch):
    ends = []
    for execution, last in (("sequential", False), ("auto", False), ("auto", True)):
        if last:
            monkeypatch.setattr(auto, "_fastest", lambda *arguments: ("sequential", True, ""))
        settings = {**PICTURES, "module": unnormed, "callbacks": [DifferentialPrivacy(noise_multiplier=1.0)]}
        module, loop, _ = run(tmp_path, execution, **settings, trainer={"max_epochs": 1})
        ends.append(weights(module))
        assert loop.rounds.execution.channels_last is last
    assert "alone" not in capsys.readouterr().out
    for end in ends[1:]:
        assert_close(ends[0], end, tolerance=0)


EMPTY = {"privacy": ClientPrivacy(noise_multiplier=1.0), "weighting": "uniform", "clients_per_round": 2}


# A seed with which the first rounds have so many clients.
SEEDS = {(0, 2): 21, (0, 0, 0, 2): 1376, (1, 0, 3): 260, (0, 0, 2): 295}


def seed_of(cohorts):
    seed = SEEDS[cohorts]
    loop = FederatedLoop(FedAvg(), partition=FromIndices(UNEVEN), seed=seed, **EMPTY)
    planner = RoundPlanner(**loop.drawing(), batches=np.array([1, 6, 3, 5, 1]), clients_per_round=2)
    assert tuple(len(planner.plan(number).clients) for number in range(len(cohorts))) == cohorts
    return seed


@pytest.mark.parametrize("cohorts", [(0, 2), (0, 0, 0, 2), (1, 0, 3)])
@pytest.mark.parametrize("execution", ["auto", "vectorized"])
def test_empty_first_cohorts_change_no_choice(tmp_path, capsys, monkeypatch, execution, cohorts):
    tried, room = [], []

    def timed(trainer, module, chunk, *others):
        tried.append(chunk.clients)
        time_both(trainer, module, chunk, *others)
        return 2.0, 1.0

    def fits(*given):
        room.append(memory.chunk_size_that_fits(*given))
        return room[-1]

    monkeypatch.setattr(auto, "time_both", timed)
    monkeypatch.setattr(auto, "chunk_size_that_fits", fits)
    monkeypatch.setattr(memory, "free_memory", lambda device: 10**6)
    settings = {"trainer": {"max_epochs": len(cohorts)}, **EMPTY}
    _, loop, _ = run(tmp_path, execution, seed=seed_of(cohorts), **settings)
    assert loop.rounds.execution.name == "vectorized"
    # The two clients with most samples; with these, memory has as much room as if they had been drawn.
    assert tried == ([(1, 3)] if execution == "auto" else [])
    run(tmp_path, execution, participants=[[1, 3]] * len(cohorts), trainer=settings["trainer"])
    assert room[0] == room[-1] > 1
    assert "ended with" not in capsys.readouterr().out


@pytest.mark.parametrize("execution", ["auto", "sequential"])
def test_empty_first_cohorts_of_private_samples(tmp_path, execution):
    _, loop, _ = run(
        tmp_path,
        execution,
        seed=seed_of((0, 0, 2)),
        callbacks=[DifferentialPrivacy(noise_multiplier=1.0)],
        trainer={"max_epochs": 3},
        **EMPTY,
    )
    assert loop.rounds.execution.name == "sequential"
    assert loop.rounds.figures()["federated/clients"] == 2


def test_images_anywhere_in_a_batch_have_their_channels_last():
    batch = {
        "pair": [draw(2, 1, 3, 3), (draw(2, 3, 4, 4).half(), "name")],
        "mask": torch.ones(2, 3, 4, 4, dtype=torch.int64),
        "clip": draw(2, 3, 2, 4, 4),
        "row": draw(2, 3),
    }
    flat = ChannelsLast(nn.Sequential(nn.Conv2d(1, 1, 1)))
    assert flat.changes(batch)
    changed = flat.batch(batch)
    assert [each.stride() for each in (changed["pair"][0], changed["pair"][1][0])] == [(9, 1, 3, 1), (48, 1, 12, 3)]
    assert changed["pair"][1][1] == "name"
    assert all(changed[name] is batch[name] for name in ("mask", "clip", "row"))
    assert not flat.changes(changed)
    assert ChannelsLast(nn.ConvTranspose3d(1, 1, 1)).batch(batch)["clip"].stride() == (96, 1, 48, 12, 3)
    assert not ChannelsLast(nn.Conv1d(1, 1, 1)).applies
