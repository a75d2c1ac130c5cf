"""The length of learning rate schedules: a client's number of steps in a whole fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.optim.lr_scheduler import OneCycleLR

from lightning_lowrank.federated.data.training_set import RoundData
from lightning_lowrank.internals.lightning import FitLength
from lightning_lowrank.internals.torch import schedule_length


class ScheduleLength:
    """Replaces Lightning's count of steps by the number that schedules need: the steps of the client with the most.

    Step-wise schedulers make the steps of the client with the most in each round, and Lightning asks for their number
    before the first round. Its own length is the mean of that client's batches in a round, rounded up, so that it
    replaces the training loader in ``len(loader)``.

    Args:
        trainer: The trainer, before its progress has been restored from a checkpoint.
        data: The training set, which is divided when a count is asked for first.
    """

    def __init__(self, trainer: Any, data: RoundData) -> None:
        self._trainer, self._data = trainer, data
        # A fit that resumes from a checkpoint builds its schedules for the whole fit, as the first one did.
        resumes = trainer.ckpt_path is not None
        self._first_round: int = 0 if resumes else trainer.current_epoch
        self._steps_before: int = 0 if resumes else trainer.global_step
        self._given: float | None = None
        self._counted_by: Any = None
        self._known: dict[tuple[Any, ...], float] = {}
        self._answers = FitLength(trainer, self, self._give)

    def install(self) -> Callable[[], None]:
        """Install these counts in the trainer; return a function that restores Lightning's own."""
        return self._answers.install()

    def settle(self) -> None:
        """Have Lightning load its data, and stop replacing its training loader."""
        self._answers.settle()

    def __len__(self) -> int:
        rounds, planner = self._rounds(), self._planner()
        if not isinstance(rounds, range):
            return int(planner.batches.max())
        return math.ceil(planner.client_steps(rounds, lambda number: 1) / len(rounds))

    def __iter__(self) -> Iterator[Any]:
        self._planner()
        return iter(self._data.training_loader or ())

    def __getattr__(self, name: str) -> Any:
        """Other attributes of the training loader, such as ``batch_size`` and ``dataset``."""
        if name.startswith("_"):
            raise AttributeError(name)
        self._planner()
        return getattr(self._data.training_loader, name)

    def _give(self) -> float:
        self._given = self._steps()
        return self._given

    def outdated(self) -> bool:
        """Whether schedules were made for another number of steps than the chosen execution takes."""
        return self._given is not None and self._given != self._steps()

    def _steps(self) -> float:
        """The number of steps of the client with the most; infinite if nothing ends the fit."""
        trainer, rounds = self._trainer, self._rounds()
        limit = None if trainer.max_steps == -1 else trainer.max_steps - self._steps_before
        if limit is None and not isinstance(rounds, range):
            return math.inf
        planner, asked = self._planner(), (trainer.max_epochs, limit)
        if planner is not self._counted_by:
            self._counted_by, self._known = planner, {}
        if asked not in self._known:
            # At least 1: a fit that continues after max_steps was reached has no step left.
            self._known[asked] = max(1, planner.client_steps(rounds, self._group_of, limit))
        return self._known[asked]

    def notes(self) -> list[str]:
        """Warnings on step-wise schedules whose length differs, or may differ, from a client's number of steps."""
        found = []
        keeps = self._data.stacked and self._data.settings.optimizer_state == "keep"
        if self._given is not None and keeps and self._trainer.max_steps != -1:
            found.append(
                "trainer.estimated_stepping_batches is a guess: max_steps counts steps of clients that step together,"
                " and with optimizer_state='keep' these depend on the ages of their moments. Set max_epochs instead."
            )
        configs = self._trainer.lr_scheduler_configs if self._trainer.lightning_module.automatic_optimization else ()
        for config in configs:
            length = schedule_length(config.scheduler) if config.interval == "step" else None
            if length is None:
                continue
            steps, fails = self._steps(), isinstance(config.scheduler, OneCycleLR)
            if length > steps + 1 or (fails and length < steps):
                found.append(
                    f"{type(config.scheduler).__name__} is made for {length} steps, and interval='step' counts those of"
                    f" one client, at most {steps} in all rounds. It will"
                    f" {'not reach its end' if length > steps else 'fail at its end'}: give it"
                    " trainer.estimated_stepping_batches, which is that number inside configure_optimizers()."
                )
        return found

    def _rounds(self) -> Iterable[int]:
        begin, end = self._first_round, self._trainer.max_epochs
        return itertools.count(begin) if end == -1 else range(begin, max(end, begin + 1))

    def _planner(self) -> Any:
        # Accessing the loader creates the planner.
        _ = self._data.loader
        return self._data.planner

    def _group_of(self, round_number: int) -> int:
        for callback in self._trainer.callbacks:
            if isinstance(callback, GradientAccumulationScheduler):
                return callback.get_accumulate_grad_batches(round_number)
        return self._trainer.accumulate_grad_batches
