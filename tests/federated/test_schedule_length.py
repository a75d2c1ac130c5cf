"""Schedules that are given the length of a fit end with it, however a client's steps come about."""

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR
from transformers import get_linear_schedule_with_warmup

from lightning_lowrank import FedAvg, FederatedLoop, FromIndices
from tests.grids import pairwise
from tests.helpers import Data, Module, fit, trainer

RATE = 0.01
EVEN = [range(start, start + 24) for start in range(0, 96, 24)]
UNEVEN = [range(40), range(40, 47), range(47, 103)]


class Scheduled(Module):
    """A module whose schedule is given a length that it asks the trainer for."""

    def __init__(self, length: Any = lambda trainer: trainer.estimated_stepping_batches, schedule: Any = None) -> None:
        super().__init__(interval="step")
        self.length = length
        self.schedule = schedule or (lambda optimizer, steps: LambdaLR(optimizer, lambda step: 1 - step / steps))
        self.given: list[float] = []

    def configure_optimizers(self) -> Any:
        self.given.append(self.length(self.trainer))
        self.make_optimizer = partial(torch.optim.SGD, lr=RATE)
        self.make_scheduler = lambda optimizer: self.schedule(optimizer, self.given[-1])
        return super().configure_optimizers()


def federated(clients: Any = UNEVEN, **arguments: Any) -> FederatedLoop:
    return FederatedLoop(FedAvg(), partition=FromIndices(clients), summary=False, **arguments)


def length_of_epochs(trainer: Any) -> int:
    trainer.fit_loop.setup_data()
    return length_once_loaded(trainer)


def length_after_steps(trainer: Any) -> int:
    # In Lightning this loads the data.
    assert trainer.estimated_stepping_batches
    return length_once_loaded(trainer)


def length_once_loaded(trainer: Any) -> int:
    loader = trainer.train_dataloader
    assert trainer.num_training_batches == len(loader)
    assert len(loader.dataset) == len(Data().train_dataloader().dataset)
    assert loader.batch_size == 8
    return len(loader) * trainer.max_epochs // trainer.accumulate_grad_batches


def last_rate(run: Any) -> float:
    return run.optimizers[0].param_groups[0]["lr"]


LIMITS: dict[str, dict[str, Any]] = {
    "epochs": {"max_epochs": 3},
    "steps": {"max_epochs": -1, "max_steps": 21},
    "both": {"max_epochs": 3, "max_steps": 16},
    "batches": {"max_epochs": 3, "limit_train_batches": 2},
}
COHORTS: dict[str, dict[str, Any]] = {
    "all": {},
    "some": {"clients_per_round": 2},
    "few": {"clients_per_round": 1},
    "failing": {"client_dropout": 0.4},
    "steps": {"local_steps": 3},
    "own": {"client_settings": {1: {"local_epochs": 9}}},
    "named": {"participants": [[1], [0, 1], [2], [1], [0], [0, 1], [1]]},
}
EXECUTIONS: dict[str, dict[str, Any]] = {
    "sequential": {},
    "vectorized": {"execution": "vectorized"},
    "pairs": {"execution": "vectorized", "chunk_size": 2},
    "auto": {"execution": "auto"},
}


@pairwise(strength=1)
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("cohort", COHORTS)
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_decay_to_zero_ends_at_zero(tmp_path, limit, cohort, execution):
    module, run = Scheduled(), trainer(tmp_path, federated(**COHORTS[cohort], **EXECUTIONS[execution]), **LIMITS[limit])
    fit(run, module, Data())
    assert last_rate(run) == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("grouped", ["accumulate_grad_batches", "scheduler"])
def test_a_decay_counts_groups_of_accumulated_batches(tmp_path, grouped):
    module, arguments, callbacks = Scheduled(), {}, []
    if grouped == "scheduler":
        callbacks = [GradientAccumulationScheduler({0: 1, 1: 3})]
    else:
        arguments = {"accumulate_grad_batches": 2}
    run = trainer(tmp_path, federated(), *callbacks, **arguments)
    fit(run, module, Data())
    assert last_rate(run) == pytest.approx(0, abs=1e-9)
    assert module.given == [3 * 4 if grouped == "accumulate_grad_batches" else 7 + 2 * 3]


SCHEDULES: dict[str, Any] = {
    "one cycle": lambda optimizer, steps: OneCycleLR(optimizer, max_lr=RATE, total_steps=steps),
    "transformers": lambda optimizer, steps: get_linear_schedule_with_warmup(optimizer, 2, steps),
    "cosine": lambda optimizer, steps: CosineAnnealingLR(optimizer, T_max=steps),
}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_usual_schedules_end(tmp_path, schedule, recwarn):
    run = trainer(tmp_path, federated(execution="auto"))
    run.fit(Scheduled(schedule=SCHEDULES[schedule]), Data())
    # A cycle's last step is one beyond its end.
    assert last_rate(run) < (RATE / 50 if schedule == "one cycle" else 1e-9)
    assert not [warning for warning in recwarn if "is made for" in str(warning.message)]


@pytest.mark.parametrize("length", [length_of_epochs, length_after_steps])
@pytest.mark.parametrize("execution", ["sequential", "vectorized", "pairs"])
def test_the_length_of_the_loader_is_that_of_a_client(tmp_path, execution, length):
    module = Scheduled(length)
    run = trainer(tmp_path, federated(EVEN, **EXECUTIONS[execution]))
    fit(run, module, Data())
    assert module.given == [3 * 3]
    assert last_rate(run) == pytest.approx(0, abs=1e-9)
    # A turn is a client, or clients that step together.
    assert run.num_training_batches == {"vectorized": 1, "pairs": 2, "sequential": 4}[execution]


def test_answers_are_lightnings_own_outside_of_schedules(tmp_path):
    loop = federated()
    run = trainer(tmp_path, loop)
    fit(run, Scheduled(), Data())
    assert type(run) is type(trainer(tmp_path))
    # Lightning counts turns.
    assert run.estimated_stepping_batches == 3 * 3


def test_a_length_asked_for_in_setup(tmp_path):
    class AsksEarly(Scheduled):
        def setup(self, stage: str) -> None:
            self.steps = self.trainer.estimated_stepping_batches

    module = AsksEarly(lambda trainer: trainer.lightning_module.steps)
    run = trainer(tmp_path, federated())
    fit(run, module, Data())
    assert last_rate(run) == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
def test_a_resumed_decay_goes_on_to_zero(tmp_path):
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=16, filename="inside")
    fit(trainer(tmp_path, federated(), saves), Scheduled(), Data())
    module, run = Scheduled(), trainer(tmp_path, federated())
    fit(run, module, Data(), ckpt_path=tmp_path / "inside.ckpt")
    assert module.given == [21]
    assert last_rate(run) == pytest.approx(0, abs=1e-9)


def test_a_fit_without_steps_left(tmp_path):
    loop = federated()
    run = trainer(tmp_path, loop, max_steps=4)
    module = fit(run, Scheduled(), Data())
    fit(run, module, Data())
    assert module.given == [4, 1]


@pytest.mark.slow
def test_a_second_fit_has_a_decay_of_its_own(tmp_path):
    loop = federated()
    run = trainer(tmp_path, loop)
    module = fit(run, Scheduled(), Data())
    run.fit_loop.max_epochs = 5
    fit(run, module, Data())
    assert module.given == [21, 14]
    assert last_rate(run) == pytest.approx(0, abs=1e-9)


LENGTHS: dict[str, Any] = {
    "max_steps": (lambda trainer: 39, SCHEDULES["cosine"], "CosineAnnealingLR is made for 39 steps.*not reach its end"),
    "bound": (lambda trainer: 39, SCHEDULES["transformers"], "LambdaLR is made for 39 .* 21 in all rounds"),
    "short cycle": (lambda trainer: 19, SCHEDULES["one cycle"], "OneCycleLR is made for 19 .*fail at its end"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LENGTHS)
def test_a_schedule_of_another_length_is_warned_of(tmp_path, case):
    length, schedule, said = LENGTHS[case]
    run = trainer(tmp_path, federated())
    # torch refuses to step a cycle beyond its end.
    with pytest.warns(UserWarning, match=said), suppress(ValueError):
        run.fit(Scheduled(length, schedule), Data())


@pytest.mark.slow
def test_groups_by_kept_moments_are_warned_of(tmp_path):
    loop = federated(execution="vectorized", optimizer_state="keep", clients_per_round=2)
    with pytest.warns(UserWarning, match="is a guess.*Set max_epochs"):
        trainer(tmp_path, loop, max_steps=9).fit(Scheduled(), Data())


def test_a_frequency_of_steps_is_refused(tmp_path):
    class EveryThird(Scheduled):
        def configure_optimizers(self) -> Any:
            configured = super().configure_optimizers()
            configured["lr_scheduler"]["frequency"] = 3
            return configured

    module = EveryThird(schedule=lambda optimizer, steps: StepLR(optimizer, 1))
    with pytest.raises(MisconfigurationException, match=r"frequency=3.*frequency=1"):
        fit(trainer(tmp_path, federated()), module, Data())


@pytest.mark.slow
def test_rounds_shorter_than_the_logging_interval_are_told_of_once(tmp_path, recwarn):
    run = trainer(tmp_path, federated(clients_per_round=1), max_epochs=8, logger=CSVLogger(tmp_path))
    run.fit(Module(), Data())
    told = [str(warning.message) for warning in recwarn if "smaller than the logging interval" in str(warning.message)]
    assert len(told) == 1
    assert run.log_every_n_steps == 50
