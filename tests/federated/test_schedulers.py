"""Schedulers that step once an epoch step per round, whatever else counts steps within a client."""

import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank import FedAvg, FederatedLoop, FromIndices, ProjectedSGD
from lightning_lowrank.federated import client_optimizers
from tests.helpers import Data, Module, SaveEachStep, assert_same, fit, trainer, weights


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, partial(ProjectedSGD, rank=1)])
def test_a_decay_each_round_is_kept_where_the_last_client_is_not_the_longest(tmp_path, optimizer):
    decay = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    module = Module(optimizer=partial(optimizer, lr=0.1), scheduler=decay)
    loop = FederatedLoop(FedAvg(), partition=FromIndices([range(80), range(80, 103)]), summary=False)
    run = trainer(tmp_path, loop)
    fit(run, module, Data())
    assert [group["lr"] for group in run.optimizers[0].param_groups] == [0.1 * 0.5**3]


class HalvesInPlace(Module):
    """Halves an option that is a tensor in each step."""

    def __init__(self, option):
        super().__init__(optimizer=partial(torch.optim.SGD, lr=torch.tensor(0.1), weight_decay=torch.tensor(0.25)))
        self.option = option
        self.first = []

    def training_step(self, batch, batch_idx):
        (group,) = self.optimizers().param_groups
        if batch_idx == 0:
            self.first.append(float(group[self.option]))
        group[self.option].mul_(0.5)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("execution", [{}, {"execution": "vectorized", "chunk_size": 1}], ids=["alone", "together"])
def test_options_that_steps_change_in_place_are_each_clients_own(tmp_path, execution):
    module = HalvesInPlace("lr")
    loop = FederatedLoop(FedAvg(), clients=4, summary=False, **execution)
    fit(trainer(tmp_path, loop, max_epochs=1, limit_val_batches=0), module, Data())
    assert module.first == pytest.approx([0.1] * 4)


def test_a_clients_own_options_that_steps_change_in_place_are_refused(tmp_path):
    settings = {0: {"weight_decay": torch.tensor(0.5)}}
    loop = FederatedLoop(FedAvg(), clients=4, summary=False, client_settings=settings)
    with pytest.raises(MisconfigurationException, match=r"client 0.*weight_decay=0\.5"):
        fit(trainer(tmp_path, loop, limit_val_batches=0), HalvesInPlace("weight_decay"), Data())


class Counted(torch.optim.SGD):
    """Counts steps in its groups, as schedule-free optimizers and Prodigy do, and says what it found."""

    seen = []  # noqa: RUF012 of all clients: what an optimizer holds itself is begun with each of them

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.seen.clear()
        for group in self.param_groups:
            group["k"], group["in_place"] = 0, torch.zeros(())

    def step(self, closure=None):
        loss = super().step(closure)
        group = self.param_groups[0]
        self.seen.append([group["k"], int(group["in_place"]), "late" in group])
        for group in self.param_groups:
            group["k"] += 1
            group["in_place"] += 1
            group["late"] = True
        return loss


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("policy", ["reset", "keep"])
def test_what_an_optimizer_counts_in_its_groups_is_the_clients_own(tmp_path, monkeypatch, policy, scheduled):
    monkeypatch.setattr(client_optimizers, "_ELEMENTWISE", [])
    each_step = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    module = Module(optimizer=partial(Counted, lr=0.1), scheduler=each_step if scheduled else None, interval="step")
    loop = FederatedLoop(
        FedAvg(), clients=2, local_steps=2, optimizer_state=policy, summary=False, execution="sequential"
    )
    run = trainer(tmp_path, loop)
    fit(run, module, Data())
    first = [[0, 0, False], [1, 1, True]]
    later = first if policy == "reset" else [[2, 2, True], [3, 3, True]]
    assert run.optimizers[0].seen[:8] == [*first, *first, *later, *later]
    rate = 0.1 * 0.5 ** (2 * run.current_epoch) if scheduled else 0.1
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(rate)


def exponential(optimizer, factor, **config):
    return {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, factor), **config}


class Scheduled(Module):
    """Has several schedulers, and keeps the learning rate of each step."""

    def __init__(self, *schedules):
        super().__init__()
        self.schedules, self.rates = schedules, []

    def training_step(self, batch, batch_idx):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [schedule(optimizer) for schedule in self.schedules]


# The client with the most batches is the first of a round, or the last.
ORDERS = {"first": [list(range(20)), list(range(20, 28))], "last": [list(range(20, 28)), list(range(20))]}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("own", [0, 1])
def test_a_clients_learning_rate_does_not_undo_a_decay_by_rounds(tmp_path, order, own):
    loop = FederatedLoop(
        FedAvg(), partition=FromIndices(ORDERS[order]), client_settings={own: {"lr": 0.01}}, summary=False
    )
    module = Scheduled(partial(exponential, factor=0.5))
    fit(trainer(tmp_path, loop), module, Data())
    batches = [-(-len(samples) // 8) for samples in ORDERS[order]]
    expected = [
        [0.01 if client == own else 0.1 * 0.5**round_number] * batches[client]
        for round_number in range(3)
        for client in range(2)
    ]
    assert module.rates == pytest.approx([rate for rates in expected for rate in rates])


@pytest.mark.parametrize("order", ORDERS)
def test_decays_by_steps_and_by_rounds_are_both_made(tmp_path, order):
    loop = FederatedLoop(FedAvg(), partition=FromIndices(ORDERS[order]), summary=False)
    module = Scheduled(partial(exponential, factor=0.9, interval="step"), partial(exponential, factor=0.5))
    run = trainer(tmp_path, loop)
    fit(run, module, Data())
    assert [module.rates[place] for place in (0, 4, 8)] == pytest.approx([0.1 * (0.9**3 * 0.5) ** n for n in range(3)])
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * (0.9**3 * 0.5) ** 3)
    assert "update_lr_schedulers" not in vars(run.fit_loop.epoch_loop)


class Changing(Scheduled):
    """Halves its learning rate after each step: by hand, or by a scheduler that Lightning does not know."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        # Of the number of steps, so that the rate of a client does not follow from that of the round.
        self.held = {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)}
        if self.way == "callback":
            (stepping,) = (each for each in self.trainer.callbacks if isinstance(each, Stepping))
            stepping.own, self.held = self.held["scheduler"], {}
        return optimizer

    def on_train_batch_end(self, *arguments):
        if self.way == "by hand":
            self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5
        elif self.way == "held":
            self.held["scheduler"].step()


class Stepping(Callback):
    def on_train_batch_end(self, trainer, module, *arguments):
        if module.way == "callback":
            self.own.step()


WAYS = ["by hand", "held", "callback"]


@pytest.mark.parametrize("execution", [{}, {"execution": "vectorized", "chunk_size": 1}], ids=["alone", "together"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
def test_rates_that_a_module_changes_are_those_of_lightnings_schedulers(tmp_path, way, order, execution):
    loop = FederatedLoop(FedAvg(), partition=FromIndices(ORDERS[order]), summary=False, **execution)
    module = Changing(way)
    run = trainer(tmp_path, loop, Stepping(), max_epochs=2, limit_val_batches=0)
    fit(run, module, Data())
    batches = [-(-len(samples) // 8) for samples in ORDERS[order]]
    expected = [0.1 * 0.5 ** (3 * number + step) for number in range(2) for count in batches for step in range(count)]
    assert module.rates == pytest.approx(expected)
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**6)


@pytest.mark.parametrize("way", WAYS)
def test_rates_that_a_module_changes_go_on_in_a_resumed_fit(tmp_path, way):
    def run(*callbacks, **resumed):
        torch.manual_seed(0)
        loop = FederatedLoop(FedAvg(), partition=FromIndices(ORDERS["last"]), summary=False, seed=0)
        module = Changing(way)
        made = trainer(tmp_path, loop, *callbacks, Stepping(), max_epochs=2, limit_val_batches=0)
        fit(made, module, Data(), **resumed)
        return weights(module)

    whole = run(SaveEachStep(tmp_path), ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1))
    for saved in ("step=3", "epoch=0"):
        assert_same(run(ckpt_path=tmp_path / f"{saved}.ckpt"), whole)


class Warmup(torch.optim.lr_scheduler.LRScheduler):
    """Hands over to another scheduler after a step, as warm-ups outside of torch do."""

    def __init__(self, optimizer):
        self.after = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        super().__init__(optimizer)

    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch=None):
        super().step(epoch)
        if self.last_epoch:
            self.after.step()


def test_a_scheduler_inside_a_scheduler_is_wound_back_too(tmp_path):
    loop = FederatedLoop(FedAvg(), clients=2, local_steps=2, summary=False)
    module = Scheduled(lambda optimizer: {"scheduler": Warmup(optimizer), "interval": "step"})
    fit(trainer(tmp_path, loop, max_epochs=2, limit_val_batches=0), module, Data())
    assert module.rates == pytest.approx([0.1, 0.05, 0.1, 0.05, 0.025, 0.0125, 0.025, 0.0125])


def test_of_clients_with_equally_many_steps_the_one_with_the_lowest_number_decides():
    module = Module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    own = SimpleNamespace(lightning_module=module, optimizers=[optimizer], lr_scheduler_configs=[], callbacks=[])
    made = client_optimizers.ClientOptimizers(own, FederatedLoop(FedAvg(), clients=3))
    made.begin_round()
    for client, steps, rate in ((2, 2, 0.2), (1, 3, 0.3), (0, 3, 0.4)):
        optimizer.param_groups[0]["lr"] = rate
        made.end_client(client, steps)
    made.pool([((3, -1), {}), made.end, ((2, 0), {})])
    optimizer.param_groups[0]["lr"] = 0.5
    made.end_round()
    assert optimizer.param_groups[0]["lr"] == 0.4


def test_an_own_option_that_steps_change_is_refused(tmp_path):
    loop = FederatedLoop(
        FedAvg(), partition=FromIndices(ORDERS["first"]), client_settings={1: {"momentum": 0.5}}, summary=False
    )

    class OneCycle(Module):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
            return [optimizer], [{"scheduler": cycle, "interval": "step"}]

    with pytest.raises(MisconfigurationException, match=r"1.*momentum=0\.5"):
        fit(trainer(tmp_path, loop), OneCycle(), Data())


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["ReduceLROnPlateau", "ExponentialLR"])
def test_a_resumed_fit_says_that_lightning_leaves_a_plateau_out(tmp_path, scheduler):
    def made(optimizer):
        if scheduler == "ExponentialLR":
            return exponential(optimizer, 0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"scheduler": plateau, "monitor": "val_loss"}

    def run(**resumed):
        loop, saved = FederatedLoop(FedAvg(), clients=2, summary=False), ModelCheckpoint(tmp_path)
        trainer(tmp_path, loop, saved, max_epochs=1 + len(resumed)).fit(Scheduled(made), Data(), **resumed)
        return saved.best_model_path

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(ckpt_path=run())
    said = [each for each in told if "leaves out a step of ReduceLROnPlateau" in str(each.message)]
    assert len(said) == (scheduler == "ReduceLROnPlateau")
