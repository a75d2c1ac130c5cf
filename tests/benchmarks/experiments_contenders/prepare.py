"""Draws what all contenders of an experiment share, as this library draws it, and writes it to a file."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from lightning_lowrank import FederatedLoop, FedMUD, FedSLoP
from lightning_lowrank.layers import low_rank_layers
from lightning_lowrank.seeding import derive_seed, generator
from tests.benchmarks.contending import Rounds, contend
from tests.benchmarks.experiments_contenders.ours import run_recipe
from tests.benchmarks.experiments_contenders.trial import Plan, Trial


class PlanIsMade(Exception):
    """Ends the fit before its first step."""


class MakePlan(pl.Callback):
    def __init__(self, trial: Trial) -> None:
        self.trial = trial

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loop = next(each for each in vars(trainer)["callbacks"] if isinstance(each, FederatedLoop))
        planner, indices = loop._data.planner, loop.indices
        assert indices is not None
        rounds = []
        for number in range(self.trial.rounds):
            cohort = []
            for client in planner.plan(number).clients:
                draws, mine = generator(planner.seed, "order", number, client), indices[client]
                orders = [mine[torch.randperm(len(mine), generator=draws)] for _ in range(loop.local_epochs)]
                cohort.append((client, orders))
            rounds.append(cohort)
        # What is drawn at a round's end is of the next.
        seeds = [seeds_of(loop, pl_module, planner.seed, number) for number in range(self.trial.rounds + 1)]
        plan = Plan(
            start=[value.clone() for value in pl_module.network.state_dict().values()],
            rounds=rounds,
            samples=[indices[client].clone() for client in range(len(indices))],
            seeds=seeds,
            init_scale={name: layer.init_scale for name, layer in low_rank_layers(pl_module)},
        )
        torch.save(tuple(plan), self.trial.plan_file)
        raise PlanIsMade


def seeds_of(loop: FederatedLoop, module: pl.LightningModule, seed: int, number: int) -> dict[str, int]:
    """Return the seeds of what is drawn at the beginning of a round."""
    if isinstance(loop.algorithm, FedSLoP):
        subspace = derive_seed(seed, "subspace", number)
        names = [name for name, _ in module.named_parameters()]
        return {name: derive_seed(subspace, "projection", index, 0) for index, name in enumerate(names)}
    if isinstance(loop.algorithm, FedMUD):
        drawn = derive_seed(seed, "factors", number)
        return {
            f"{name}.fixed.{factor}": derive_seed(derive_seed(drawn, name), "fixed", factor)
            for name, layer in low_rank_layers(module)
            for factor in layer.fixed
        }
    return {}


def run(trial: Trial, rounds: Rounds) -> dict[str, Any]:
    try:
        run_recipe(trial, [MakePlan(trial)], ["--federated.summary", "false"])
    except PlanIsMade:
        return {}
    raise AssertionError("the fit has not begun")


if __name__ == "__main__":
    contend(Trial, run)
