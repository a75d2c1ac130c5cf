"""What a client's steps leave on the module never reaches the next client without a word."""

import gc
import re
import warnings
import weakref
from collections import deque
from copy import deepcopy
from functools import partial

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection

from lightning_lowrank import FedAvg, FederatedLoop, FromIndices, LowRank, MaskAbsentClasses, MatrixProduct
from lightning_lowrank.federated import carried_values, client_optimizers, leaks, rounds
from lightning_lowrank.internals.torch import TorchDispatchMode
from lightning_lowrank.testing.experiment import blobs
from tests.helpers import SaveEachStep, lightnings_own

PARTS = [range(10), range(10, 17), range(17, 23)]


class Base(pl.LightningModule):
    """Each subclass changes something in its steps that its loss depends on."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 4)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return self.scale(batch_idx) * nn.functional.cross_entropy(self.net(inputs), targets)

    def scale(self, batch_idx):
        return 1.0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Unsaved(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(()), persistent=False)

    def scale(self, batch_idx):
        self.mean.mul_(0.7)
        return self.mean.clone()


class UnsavedAndAssigned(Unsaved):
    def scale(self, batch_idx):
        self.mean = self.mean * 0.7
        return self.mean


class Assigned(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.ones(()))

    def scale(self, batch_idx):
        self.centre = self.centre * 0.9
        return self.centre


class Unset(Base):
    """Centres inputs by those of its first batch."""

    persistent = False

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None, persistent=self.persistent)

    def training_step(self, batch, batch_idx):
        if self.mean is None:
            self.mean = batch[0].mean(0)
        return super().training_step((batch[0] - self.mean, batch[1]), batch_idx)


class UnsetAndSaved(Unset):
    persistent = True


class Registered(Base):
    """Registers a buffer in its first step."""

    persistent = False

    def training_step(self, batch, batch_idx):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", batch[0].mean(0), persistent=self.persistent)
        return super().training_step((batch[0] - self.mean, batch[1]), batch_idx)


class RegisteredAndSaved(Registered):
    persistent = True


class First(Base):
    """Divides the loss by the first one, as GradNorm does, which ``kept`` gets as ``make`` returns it."""

    make = staticmethod(Tensor.detach)

    def __init__(self):
        super().__init__()
        self.kept = {"loss": None}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.kept["loss"] is None:
            self.kept["loss"] = self.make(loss)
        return loss / float(self.kept["loss"])


class FirstNumber(First):
    make = staticmethod(Tensor.item)


class FirstArray(First):
    make = staticmethod(lambda loss: loss.detach().numpy())


class Used(Base):
    """Uses a number up in its first step."""

    def __init__(self):
        super().__init__()
        self.bonus = 2.0

    def scale(self, batch_idx):
        bonus, self.bonus = self.bonus, None
        return bonus or 1.0


class Teacher(Base):
    """Its teacher follows after each step, as BYOL's."""

    def __init__(self):
        super().__init__()
        self.teacher = deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + (self.teacher(batch[0]) - self.net(batch[0])).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for mine, own in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            self.follow(mine, own.detach())

    def follow(self, mine, own):
        mine.mul_(0.5).add_(own, alpha=0.5)


class TeacherByData(Teacher):
    def follow(self, mine, own):
        mine.data = mine.data * 0.5 + own * 0.5


class TeacherInData(Teacher):
    def follow(self, mine, own):
        mine.data.mul_(0.5).add_(own, alpha=0.5)


class EverySecond(Base):
    def scale(self, batch_idx):
        return 2.0 if batch_idx % 2 == 0 else 0.5


class ByAnotherName(Base):
    def training_step(self, batch, number):
        return (2.0 if number % 2 == 0 else 0.5) * super().training_step(batch, number)


class Starred(ByAnotherName):
    def training_step(self, *arguments):
        return super().training_step(*arguments)


class Reusing(EverySecond):
    """Validates by its training step, in two ways."""

    def validation_step(self, batch, batch_idx):
        own = EverySecond.training_step(self, batch, batch_idx)
        assert torch.equal(self.training_step(batch, batch_idx), own)
        assert torch.equal(self.training_step(batch=batch, batch_idx=batch_idx), own)
        self.validated = True


class Clamped(Base):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.1, 0.1)


class ByHand(Base):
    """Gradients of two batches are stepped together, and those of the last."""

    automatic_optimization = property(lambda self: False, lambda self, value: None)

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        if (batch_idx + 1) % 2 == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def on_train_epoch_end(self):
        self.zero_grad()


class LastBatch(Base):
    def scale(self, batch_idx):
        return 3.0 if self.trainer.is_last_batch else 1.0


class LastBatchInHooks(Base):
    def on_train_batch_start(self, batch, batch_idx):
        self.factor = 3.0 if self.trainer.is_last_batch else 1.0

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.is_last_batch:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.mul_(0.5)

    def scale(self, batch_idx):
        return self.factor


class FrozenInHook(Base):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            self.net.weight.requires_grad_(False)


class FrozenInStep(Base):
    def scale(self, batch_idx):
        if batch_idx == 1:
            self.net.weight.requires_grad_(False)
        return 1.0


class ThawedLate(Base):
    """Has too few batches for it in two of three clients."""

    def on_train_batch_start(self, batch, batch_idx):
        self.net.weight.requires_grad_(batch_idx == 2)


class Adversaries(Base):
    """Freezes its discriminator for the generator's step, and thaws it in the next batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization, self.judge = False, nn.Linear(6, 1)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for trained, optimizer in ((True, second), (False, first)):
            self.judge.requires_grad_(trained)
            loss = super().training_step(batch, batch_idx) + self.judge(batch[0]).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(each.parameters(), 0.1) for each in (self.net, self.judge)]


class RateByHand(Base):
    def scale(self, batch_idx):
        (optimizer,) = self.trainer.optimizers
        optimizer.param_groups[0]["lr"] *= 0.5
        return 1.0


class Counting(Base):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def scale(self, batch_idx):
        self.steps += 1
        return 1 / self.steps


class Bank(Base):
    def __init__(self):
        super().__init__()
        self.bank = deque(maxlen=4)

    def scale(self, batch_idx):
        self.bank.append(torch.ones(()))
        return 1 / len(self.bank)


class Weighted(Base):
    def __init__(self):
        super().__init__()
        self.table = {"weight": 1.0}

    def scale(self, batch_idx):
        self.table["weight"] *= 0.9
        return self.table["weight"]


class Normalizer:
    mean = None

    def __call__(self, batch_idx):
        now = torch.tensor(1.0 + batch_idx)
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return 1 / self.mean


class Normalized(Base):
    def __init__(self):
        super().__init__()
        self.scale = Normalizer()


class Shadow:
    def __init__(self, parameters):
        self.values = [value.detach().clone() for value in parameters]


class Shadowed(Base):
    def __init__(self):
        super().__init__()
        self.shadow = Shadow(self.parameters())

    def scale(self, batch_idx):
        for value, own in zip(self.shadow.values, self.parameters(), strict=True):
            value.data.lerp_(own.detach().to(value), 0.5)
        return 1.0


class ReplacedShadow(Shadowed):
    """Has a moving average that no step reads, as a new tensor after each batch."""

    def scale(self, batch_idx):
        return 1.0

    def on_train_batch_end(self, outputs, batch, batch_idx):
        pairs = zip(self.shadow.values, self.parameters(), strict=True)
        self.shadow.values = [(0.999 * value + 0.001 * own.detach()).clone() for value, own in pairs]


class ShadowOfOptimizerSteps(ReplacedShadow):
    on_train_batch_end = pl.LightningModule.on_train_batch_end

    def optimizer_step(self, *arguments, **keywords):
        super().optimizer_step(*arguments, **keywords)
        ReplacedShadow.on_train_batch_end(self, None, None, 0)


class MomentumByHand(Base):
    def __init__(self):
        super().__init__()
        self.momentum = torch.zeros_like(self.net.weight)

    def on_before_optimizer_step(self, optimizer):
        self.momentum = 0.9 * self.momentum + self.net.weight.grad
        self.net.weight.grad.copy_(self.momentum)


class Copying(Base):
    """Keeps copies of parameters and gradients, and the mean of a loss with the shape of a parameter."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.mean = torch.zeros(())
        self.start, self.last = torch.zeros_like(self.net.weight), torch.zeros_like(self.net.weight)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss

    def scale(self, batch_idx):
        if batch_idx == 0:
            self.start.copy_(self.net.weight.detach())
        return self.temperature

    def on_after_backward(self):
        self.gradient = self.net.weight.grad.clone()

    def on_before_zero_grad(self, optimizer):
        self.bias = self.net.bias.detach().clone()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.last = self.net.weight.detach().clone()


class Remembering(Base):
    """Keeps what is no client's: what it makes once, what is of one step, metrics, and the trainer's optimizer."""

    mask = None

    def __init__(self):
        super().__init__()
        self.register_buffer("positions", None, persistent=False)
        self.longest = 0
        self.seen = {}
        self.metric = MeanMetric()
        self.collection = MetricCollection({"mean": MeanMetric()})

    def scale(self, batch_idx):
        self.optimizer = self.optimizers()
        self.features = [self.net.weight * 2]
        self.ones = self.seen.setdefault(batch_idx, torch.ones(()))
        if self.mask is None:
            self.mask, self.array = torch.ones(3), np.ones(3)
            self.register_buffer("angles", torch.ones(3), persistent=False)
        if self.longest < 3:
            self.positions, self.longest = torch.arange(3), 3
        self.metric.update(1.0)
        self.collection.update(1.0)
        return self.ones * self.mask[0] * self.angles[0] * self.positions[1] * self.array[0]


class Totals(Base):
    """Keeps what nothing trains by: totals, a counter of plots, the last batch, and outputs for the epoch's end."""

    def __init__(self):
        super().__init__()
        self.losses, self.outputs, self.plots, self.seen = [], [], [], 0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.last, self.largest = batch, max(getattr(self, "largest", 0.0), loss.item())
        self.losses.append(loss.item())
        self.seen += len(batch[0])
        if self.seen % 2 == 0 or self.global_step % 2 == 0 or self.trainer.fit_loop.total_batch_idx % 2 == 0:
            self.plots.append(self.seen)
        self.log("seen", float(self.seen))
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.outputs.append(outputs["loss"].detach() if isinstance(outputs, dict) else outputs.detach())

    def on_train_epoch_end(self):
        self.log("mean", torch.stack(self.outputs).mean())
        assert self.global_step
        self.outputs.clear()


class TotalsByHand(ByHand):
    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.losses.append(self.global_step)


class WarmUp(Base):
    """No client of the first round reaches its end."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def scale(self, batch_idx):
        self.steps += 1
        return 0.5 if self.steps < 500 else 1.0


class OddSteps(WarmUp):
    def scale(self, batch_idx):
        self.steps += 1
        return 2.0 if self.steps % 10 == 1 else 1.0


class CountingByHand(ByHand):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        super().training_step(batch, self.steps)


class InHook(WarmUp):
    def scale(self, batch_idx):
        return self.weight

    def on_train_batch_start(self, batch, batch_idx):
        self.steps += 1
        self.weight = 1 / self.steps


class WarmUpByGlobalStep(Base):
    def scale(self, batch_idx):
        return 0.5 if self.global_step < 500 else 1.0


class WarmUpByTotalBatches(Base):
    def scale(self, batch_idx):
        return 0.5 if self.trainer.fit_loop.total_batch_idx < 500 else 1.0


class RatesByGlobalStep(Base):
    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.trainer.global_step)
        super().optimizer_step(epoch, batch_idx, optimizer, closure)


class Counted(torch.optim.SGD):
    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure)


class Around(torch.optim.SGD):
    """Steps by another optimizer."""

    def __init__(self, parameters):
        parameters = list(parameters)
        super().__init__(parameters, lr=0.1)
        self.inner = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def step(self, closure=None):
        return self.inner.step(closure)


class WithCounted(Base):
    def configure_optimizers(self):
        return Counted(self.parameters(), lr=0.1)


class WithAround(Base):
    def configure_optimizers(self):
        return Around(self.parameters())


class ByGlobalStep(Base):
    def scale(self, batch_idx):
        return 1 / (1 + self.global_step)


class ByNumberOfBatches(Base):
    def scale(self, batch_idx):
        return 2.0 if batch_idx + 1 == self.trainer.num_training_batches else 1.0


class ByLengthOfLoader(Base):
    def scale(self, batch_idx):
        return 2.0 if batch_idx + 1 == len(self.trainer.train_dataloader) else 1.0


def made(kind):
    torch.manual_seed(0)
    return kind().double()


def train(module, indices, *callbacks, val_check_interval=1.0, **settings):
    data = blobs(23, dtype=torch.float64)
    data = TensorDataset(*(tensor[list(indices)] for tensor in data.tensors))
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        callbacks=list(callbacks),
        num_sanity_val_steps=0,
        val_check_interval=val_check_interval,
    )
    trainer.fit(module, DataLoader(data, batch_size=4), DataLoader(data, batch_size=5), **settings)
    return module


def federated(kind, *callbacks, val_check_interval=1.0, **settings):
    loop = FederatedLoop(FedAvg(), partition=FromIndices(PARTS), summary=False, seed=0, **settings)
    return train(made(kind), range(23), loop, *callbacks, val_check_interval=val_check_interval)


def expected(kind):
    """The mean of clients that plain Lightning has trained, each in a module of its own."""
    states = [train(made(kind), part).state_dict() for part in PARTS]
    shares = [len(part) / 23 for part in PARTS]
    return {name: sum(share * state[name] for share, state in zip(shares, states, strict=True)) for name in states[0]}


@pytest.mark.parametrize("own", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind",
    [
        *(Unsaved, UnsavedAndAssigned, Assigned, EverySecond, ByAnotherName, Starred),
        *(Clamped, ByHand, LastBatch, LastBatchInHooks, RateByHand, ByNumberOfBatches, ByLengthOfLoader),
        *(FrozenInHook, FrozenInStep, ThawedLate, Adversaries),
    ],
)
def test_is_the_mean_of_clients_trained_alone(kind, own):
    with lightnings_own(own):
        module = federated(kind)
        torch.testing.assert_close(module.state_dict(), expected(kind))
    assert all(parameter.requires_grad for parameter in module.parameters())


class Halved(Base):
    def scale(self, batch_idx):
        return 0.5


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
@pytest.mark.parametrize(("persistent", "assigned"), [(True, True), (False, True), (False, False)])
def test_a_buffer_that_a_hook_sets_before_a_round_has_that_value_in_its_steps(persistent, assigned, execution):
    class Annealed(Base):
        def __init__(self):
            super().__init__()
            self.register_buffer("factor", torch.ones(()), persistent=persistent)

        def on_train_epoch_start(self):
            if assigned:
                self.factor = self.factor * 0.5
            else:
                self.factor.mul_(0.5)

        def scale(self, batch_idx):
            return self.factor

    annealed = federated(Annealed, execution=execution).net.state_dict()
    torch.testing.assert_close(annealed, federated(Halved).net.state_dict())


@pytest.mark.parametrize(("interval", "execution"), [(1.0, "sequential"), (2, "sequential"), (1.0, "vectorized")])
@pytest.mark.parametrize("objective", [None, MaskAbsentClasses("net", classes=4)], ids=["loss", "objective"])
def test_a_validation_may_use_the_training_step(execution, interval, objective):
    module = federated(Reusing, execution=execution, objective=objective, val_check_interval=interval)
    assert module.validated
    if objective is None:
        torch.testing.assert_close(module.state_dict(), expected(EverySecond))


@pytest.mark.parametrize("kind", [Teacher, TeacherByData, TeacherInData])
def test_a_teacher_is_averaged_where_it_is_named_and_refused_elsewhere(kind):
    with pytest.raises(MisconfigurationException, match=r"frozen parameters.*teacher\.weight.*ema_parameters"):
        federated(kind)
    module = federated(kind, ema_parameters=["teacher"])
    torch.testing.assert_close(module.state_dict(), expected(kind))
    assert not any(parameter.requires_grad for parameter in module.teacher.parameters())


def test_of_a_large_base_a_sample_is_read(monkeypatch):
    class Numbers(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.read = 0

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            if "aten.cat" in str(function):
                self.read += sum(each.numel() for each in arguments[0])
            elif "aten.clone" in str(function) or "_to_copy" in str(function):
                self.read += 10**9
            return function(*arguments, **(keywords or {}))

    tensors = {"large": torch.zeros(7, 60_000), "small": torch.zeros(3), "none": torch.zeros(0)}
    for most, least in ((10**6, 420_003), (2**15, 2**15)):
        monkeypatch.setattr(leaks, "_COMPARED_AT_MOST", most)
        with Numbers() as numbers:
            assert leaks.ChangedTensors(tensors, tensors).changed() == []
        assert least <= numbers.read / 2 <= max(most, least) + 3 + leaks._PART
    monkeypatch.setattr(leaks, "_PART", 2)
    monkeypatch.setattr(leaks, "_COMPARED_AT_MOST", 4)
    with pytest.raises(MisconfigurationException, match=r"frozen parameters.*teacher\.weight.*ema_parameters"):
        federated(TeacherInData)


@pytest.mark.parametrize(("patterns", "said"), [(["net"], "trains"), (["techer"], "teacher")])
def test_patterns_of_other_parameters_are_refused(patterns, said):
    with pytest.raises(MisconfigurationException, match=said):
        federated(Teacher, ema_parameters=patterns)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (Counting, "attributes of the module: steps"),
        (Bank, r"attributes of the module: bank\."),
        (Weighted, r"attributes of the module: table\.weight"),
        (Normalized, r"attributes of the module: scale\.mean"),
        (First, r"attributes of the module: kept\.loss.* batch_idx is 0"),
        (FirstNumber, r"attributes of the module: kept\.loss"),
        (FirstArray, r"attributes of the module: kept\.loss"),
        (Used, "attributes of the module: bonus"),
        (Unset, "attributes of the module: mean"),
        (Registered, "attributes of the module: mean"),
        (Shadowed, r"attributes of the module: shadow\.values\.0"),
        (ReplacedShadow, r"attributes of the module: shadow\.values\.0, shadow\.values\.1"),
        (ShadowOfOptimizerSteps, r"attributes of the module: shadow\.values"),
        (MomentumByHand, "attributes of the module: momentum"),
        (WarmUp, "attributes of the module: steps"),
        (OddSteps, "attributes of the module: steps"),
        (CountingByHand, "attributes of the module: steps"),
        (InHook, "attributes of the module: .*steps"),
        (ByGlobalStep, "scale of ByGlobalStep reads global_step"),
        (WarmUpByGlobalStep, "scale of WarmUpByGlobalStep reads global_step"),
        (WarmUpByTotalBatches, "scale of WarmUpByTotalBatches reads total_batch_idx, which counts clients"),
        (RatesByGlobalStep, "optimizer_step of RatesByGlobalStep reads global_step"),
    ],
)
def test_what_cannot_be_put_right_is_named_once(kind, named):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        federated(kind)
    said = [str(each.message) for each in told if re.search("training changes| reads ", str(each.message))]
    assert len(said) == 1
    assert re.search(named, said[0])


def test_what_low_rank_layers_remember_is_not_named():
    low_rank = LowRank(MatrixProduct(), rank=2, role="update", summary=False)
    loop = FederatedLoop(FedAvg(), partition=FromIndices(PARTS), summary=False)
    with pytest.warns(UserWarning, match=r"attributes of the module: steps\. "):
        train(made(Counting), range(23), low_rank, loop)


class OfTwoNames(Base):
    """Has its network in an object for the loss too."""

    def __init__(self):
        super().__init__()
        self.head = nn.ModuleDict({"model": self.net})


class TotalsOfTwoNames(Totals, OfTwoNames):
    pass


@pytest.mark.parametrize("kind", [Base, OfTwoNames, Totals, TotalsOfTwoNames])
def test_nothing_is_said_of_low_rank_layers_whatever_their_names(kind):
    low_rank = LowRank(MatrixProduct(), rank=2, role="update", summary=False)
    loop = FederatedLoop(FedAvg(), partition=FromIndices(PARTS), summary=False, on_client_error="raise")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="training changes")
        train(made(kind), range(23), low_rank, loop)


class LargeTable(Base):
    """Reads a table that its steps change in place."""

    def __init__(self):
        super().__init__()
        self.table = torch.ones(100)

    def scale(self, batch_idx):
        self.table.mul_(1.5)
        return self.table[0].item()


def test_a_large_tensor_is_not_copied_and_named_if_it_changes(monkeypatch):
    monkeypatch.setattr(carried_values, "_MOST_COPIED", 99)
    copied = []
    make = carried_values.CarriedValues.__init__

    def kept(values, *arguments):
        make(values, *arguments)
        copied.extend(values._tensors)

    monkeypatch.setattr(carried_values.CarriedValues, "__init__", kept)
    with pytest.warns(UserWarning, match=r"attributes of the module: table"):
        federated(LargeTable)
    assert not [tensor for tensor, _ in copied if len(tensor) == 100]


@pytest.mark.parametrize("kind", [Totals, TotalsByHand])
def test_attributes_that_no_step_reads_are_not_warned_of_and_stay(kind):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="training changes|.* reads (global_step|total_batch_idx)")
        module = federated(kind, on_client_error="raise")
    torch.testing.assert_close(module.state_dict(), expected(kind))
    # 3, 2 and 2 batches: what was tried has left nothing.
    assert len(module.losses) == 7
    assert getattr(module, "seen", 23) == 23


def test_nothing_is_said_of_what_no_client_leaves():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="training changes|steps change")
        federated(Remembering, on_client_error="raise")
        federated(Copying, on_client_error="raise")
        federated(WithCounted, on_client_error="raise")
        federated(WithAround, on_client_error="raise")
        federated(Base, on_client_error="raise", execution="vectorized")


def test_what_optimizers_keep_is_named_where_clients_step_together(monkeypatch):
    monkeypatch.setattr(client_optimizers, "_ELEMENTWISE", [*client_optimizers._ELEMENTWISE, Counted])
    with pytest.warns(UserWarning, match=r"outside of its state: Counted\.steps"):
        federated(WithCounted, execution="vectorized")


class Half(nn.Module):
    def forward(self, weight):
        return weight / 2


class Parametrized(Base):
    """Puts a parametrization on and off in each step, as PEFT does for parameters that are no layers' weights."""

    def __init__(self):
        super().__init__()
        self.fixed = nn.Linear(4, 4)
        self.fixed.requires_grad_(False)

    def scale(self, batch_idx):
        parametrize.register_parametrization(self.fixed, "weight", Half())
        found = 1 + self.fixed.weight.sum() * 0
        parametrize.remove_parametrizations(self.fixed, "weight", leave_parametrized=False)
        return found


def test_a_parametrization_that_is_put_on_and_off_changes_nothing():
    torch.testing.assert_close(federated(Parametrized).state_dict(), expected(Parametrized))


def test_an_exchange_of_two_numbers_is_a_change():
    tensors = {"held": torch.arange(6.0)}
    changes = leaks.ChangedTensors(tensors, tensors)
    tensors["held"].copy_(torch.arange(6.0))
    assert changes.changed() == []
    assert changes.rewritten == {"held"}
    tensors["held"].copy_(torch.tensor([1.0, 0.0, 2.0, 3.0, 4.0, 5.0]))
    assert changes.changed() == ["held"]


def test_new_and_replaced_tensors_are_changes():
    tensors = {"same": torch.zeros(2), "replaced": torch.zeros(2)}
    changes = leaks.ChangedTensors(tensors, tensors)
    assert changes.changed({**tensors, "replaced": torch.zeros(2), "new": torch.zeros(1)}) == ["replaced", "new"]
    tensors["same"].data.add_(1)
    assert changes.changed(tensors) == ["same"]


def test_clients_of_such_a_module_do_not_step_together():
    class Trained(Parametrized):
        def __init__(self):
            super().__init__()
            self.fixed.requires_grad_(True)

    with pytest.raises(MisconfigurationException, match=r"cannot map.*fixed\.weight.*parametrization"):
        federated(Trained, execution="vectorized")


def test_layers_without_a_shape_are_refused():
    class Lazy(Base):
        def __init__(self):
            super().__init__()
            self.late = nn.LazyLinear(4)

    with pytest.raises(MisconfigurationException, match=r"late\.weight"):
        federated(Lazy)


def test_a_buffer_that_changes_its_shape_is_refused():
    class Growing(Assigned):
        def scale(self, batch_idx):
            self.centre = torch.ones(batch_idx + 2)
            return 1.0

    with pytest.raises(MisconfigurationException, match=r"centre from \[\] to \[\d\]"):
        federated(Growing)


class Sized(Base):
    """Centres inputs by a buffer that its first step resizes in place, as quantisation observers do."""

    error = None

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.empty(0))

    def training_step(self, batch, batch_idx):
        if not self.mean.numel():
            self.mean.resize_(batch[0].shape[1]).copy_(batch[0].mean(0))
        if self.error is not None:
            raise self.error
        return super().training_step((batch[0] - self.mean, batch[1]), batch_idx)


class FailsAsItIsSized(Sized):
    error = RuntimeError("the step's own error")


class SizedAndUnsaved(Sized):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.empty(0), persistent=False)


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_a_buffer_that_is_resized_in_place_is_refused(execution):
    module = made(Sized)
    loop = FederatedLoop(FedAvg(), partition=FromIndices(PARTS), summary=False, seed=0, execution=execution)
    with pytest.raises(MisconfigurationException, match=r"mean from \[0\] to \[\d\].*module\(example\)"):
        train(module, range(23), loop)
    assert module.mean.shape == (0,)
    # The module is no longer the loop's: a plain fit trains what its state dict shows.
    train(module, range(4))
    assert torch.equal(module.state_dict()["net.weight"], module.net.weight)


def test_a_step_that_resizes_a_buffer_and_fails_raises_its_own_error():
    with pytest.raises(RuntimeError, match="own error"):
        federated(FailsAsItIsSized, on_client_error="raise")


def test_a_resized_buffer_outside_of_the_state_dict_begins_anew():
    torch.testing.assert_close(federated(SizedAndUnsaved).state_dict(), expected(SizedAndUnsaved))


@pytest.mark.parametrize("kind", [UnsetAndSaved, RegisteredAndSaved])
def test_a_saved_buffer_that_a_step_sets_first_is_refused(kind):
    with pytest.raises(MisconfigurationException, match=r"buffers mean .*__init__.*persistent=False"):
        federated(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Unsaved, RateByHand, Teacher, FrozenInHook])
def test_is_resumed_inside_a_client(tmp_path, kind):
    settings = {"ema_parameters": ["teacher"]} if kind is Teacher else {}
    whole = federated(kind, SaveEachStep(tmp_path), **settings).state_dict()
    for number in (2, 3, 5):
        loop = FederatedLoop(FedAvg(), partition=FromIndices(PARTS), summary=False, seed=0, **settings)
        again = train(made(kind), range(23), loop, ckpt_path=tmp_path / f"step={number}.ckpt")
        assert all(torch.equal(value, whole[name]) for name, value in again.state_dict().items()), number


def test_complex_tensors_are_refused():
    class Complex(Base):
        def __init__(self):
            super().__init__()
            self.phases = nn.Parameter(torch.zeros(3, dtype=torch.complex64))

    with pytest.raises(MisconfigurationException, match=r"torch\.view_as_real"):
        federated(Complex)


def test_the_module_is_given_back_if_its_values_cannot_be(monkeypatch):
    def fail(rounds):
        raise RuntimeError("no global model")

    monkeypatch.setattr(rounds.Rounds, "abandon", fail)
    module = made(FailsAsItIsSized)
    loop = FederatedLoop(FedAvg(), partition=FromIndices(PARTS), summary=False, on_client_error="raise")
    with pytest.raises(RuntimeError, match="no global model"):
        train(module, range(23), loop)
    assert not module._state_dict_hooks


def test_the_module_gets_its_own_methods_back():
    module = federated(partial(EverySecond))
    assert not {"training_step", "on_train_batch_start", "on_train_batch_end"} & vars(module).keys()


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_a_fit_leaves_nothing_alive(execution):
    def references():
        module, data = Base(), blobs(23)
        trainer = pl.Trainer(
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            callbacks=[FederatedLoop(FedAvg(), clients=3, execution=execution, summary=False)],
        )
        # Whatever refers to the trainer would keep every object of the fit.
        module.own = type("Own", (), {"__module__": __name__, "trainer": trainer})()
        trainer.fit(module, DataLoader(data, batch_size=5))
        return [weakref.ref(item) for item in (trainer, module, data, *trainer.callbacks)]

    def tensors():
        gc.collect()
        return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

    # Libraries keep a few from the first fit.
    references()
    before, alive, after = tensors(), references(), tensors()
    assert not [item for reference in alive if (item := reference()) is not None]
    assert after == before
