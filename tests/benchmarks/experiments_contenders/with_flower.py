"""Flower's simulation, its clients in Ray's workers: as many as the others have threads, each with one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.contending import Rounds, contend
from tests.benchmarks.experiments_contenders.trial import Trial, evaluate, mlp


def run(trial: Trial, rounds: Rounds) -> dict[str, Any]:
    os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")
    import ray  # noqa: F401
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvgM
    from flwr.simulation import run_simulation

    from tests.benchmarks.experiments_contenders import flower_client

    plan, accuracies = trial.plan(), []
    network, tests = mlp(plan), trial.evaluation_batches()
    in_worker = replace(trial, threads=1).to_json()

    class SameCohorts(FedAvgM):
        """FedAvgM whose messages say which client a node is, because nodes come in a random order."""

        def configure_train(
            self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
        ) -> Iterable[Message]:
            messages = list(super().configure_train(server_round, arrays, config, grid))
            for place, message in enumerate(messages):
                chosen = ConfigRecord({"round": server_round - 1, "place": place, "trial": in_worker})
                message.content = RecordDict({"arrays": arrays, "config": chosen})
            if server_round == 1:
                rounds.begin()
            return messages

    def evaluate_global(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if not server_round:
            return None
        network.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = evaluate(network, tests)
        accuracies.append(accuracy)
        torch.save(network.state_dict(), Path(trial.folder) / "last.pt")
        rounds.end()
        return MetricRecord({"val_loss": loss, "val_acc": accuracy})

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        cohort, clients = len(plan.rounds[0]), len(plan.samples)
        strategy = SameCohorts(
            fraction_train=cohort / clients,
            fraction_evaluate=0.0,
            min_train_nodes=cohort,
            min_available_nodes=clients,
            server_momentum=trial.recipe.momentum,
        )
        start = ArrayRecord(network.state_dict())
        strategy.start(grid, start, num_rounds=trial.rounds, evaluate_fn=evaluate_global)

    run_simulation(
        server,
        flower_client.app,
        num_supernodes=len(plan.samples),
        backend_config={
            "init_args": {"num_cpus": trial.threads},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    return trial.finish(accuracies, list(network.state_dict().values()))


if __name__ == "__main__":
    contend(Trial, run)
