"""Flower's simulation, its clients in Ray's workers: one for each core, each with the given threads."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from tests.benchmarks.contending import Rounds, contend
from tests.benchmarks.rounds_contenders.experiment import Setting


def run(setting: Setting, rounds: Rounds) -> dict[str, Any]:
    os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")
    import ray  # noqa: F401
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from tests.benchmarks.rounds_contenders import flower_client

    cohorts = setting.cohorts()

    class SameCohorts(FedAvg):
        """FedAvg whose messages say which client a node is, because nodes come in a random order."""

        def configure_train(
            self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
        ) -> Iterable[Message]:
            messages = list(super().configure_train(server_round, arrays, config, grid))
            for message, client in zip(messages, cohorts[server_round - 1], strict=True):
                chosen = ConfigRecord({"client": client, "setting": setting.to_json()})
                message.content = RecordDict({"arrays": arrays, "config": chosen})
            if server_round == 1:
                rounds.begin()
            return messages

        def aggregate_train(
            self, server_round: int, replies: Iterable[Message]
        ) -> tuple[ArrayRecord | None, MetricRecord | None]:
            aggregated = super().aggregate_train(server_round, replies)
            rounds.end()
            return aggregated

    found: list[ArrayRecord] = []
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = SameCohorts(
            fraction_train=setting.cohort / setting.clients,
            fraction_evaluate=0.0,
            min_train_nodes=setting.cohort,
            min_available_nodes=setting.clients,
        )
        network = setting.module()["net"]
        result = strategy.start(grid, ArrayRecord(network.state_dict()), num_rounds=setting.rounds)
        found.append(result.arrays)

    run_simulation(
        server,
        flower_client.app,
        num_supernodes=setting.clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    network = setting.module()["net"]
    network.load_state_dict(found[0].to_torch_state_dict())
    return {"accuracy": setting.accuracy(network)}


if __name__ == "__main__":
    contend(Setting, run)
