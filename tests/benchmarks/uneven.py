"""Clients of very unequal size, one after another and together: who waits for whom.

    python tests/benchmarks/uneven.py [--threads N] [--repetitions N] [--json FILE]

An MLP of 784-128-10 trains on MNIST, divided among 100 clients by Dirichlet 0.1 of the labels, 10 of them a round,
batches of 32. Both modes train the same clients on the same batches; they take turns, a block of rounds each, and the
ratio is the median over the turns. The limits are those of low-rank models; that `execution="auto"` keeps the dense
model's clients apart where together they lose is what it is asked for besides.

The exit status is 1 if a limit is not met. The machine must have nothing else to do.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from json_option import add_json_option, write_json
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from lightning_lowrank import Dirichlet, FedAvg, FederatedLoop, LowRank, MatrixProduct  # noqa: E402
from tests.benchmarks.rounds_contenders.experiment import Setting  # noqa: E402
from tests.benchmarks.rounds_contenders.with_lightning import TimedModule  # noqa: E402

MODELS: dict[str, dict[str, Any] | None] = {
    "every weight of rank 8": {"rank": 8, "role": "weight"},
    "rank 4 on a frozen base": {"rank": 4, "role": "update"},
    "dense": None,
}
LIMIT = 0.95
ROUNDS = 12


def seconds(low_rank: dict[str, Any] | None, execution: str, data: TensorDataset) -> tuple[float, FederatedLoop]:
    """Return the seconds of some rounds after the first, and the loop that ran them."""
    marks: list[float] = []

    class Marks(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            marks.append(time.perf_counter())

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    loop = FederatedLoop(
        FedAvg(),
        clients=100,
        clients_per_round=10,
        partition=Dirichlet(0.1),
        execution=execution,  # type: ignore[arg-type]
        summary=False,
    )
    converted = [] if low_rank is None else [LowRank(MatrixProduct(), summary=False, **low_rank)]
    trainer = pl.Trainer(
        max_epochs=ROUNDS + 1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*converted, loop, Marks()],
    )
    trainer.fit(TimedModule(network, 0.05), DataLoader(data, batch_size=32))
    return marks[-1] - marks[0], loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--root", default=str(REPOSITORY.parent / "shared" / "data"), help="folder with MNIST/raw")
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    data = TensorDataset(*Setting("", options.root).mnist(train=True))
    found: dict[str, dict[str, Any]] = {}
    met = True
    for name, low_rank in MODELS.items():
        turns = [
            [seconds(low_rank, execution, data)[0] for execution in ("sequential", "vectorized")]
            for _ in range(options.repetitions)
        ]
        ratio = statistics.median(alone / together for alone, together in turns)
        _, loop = seconds(low_rank, "auto", data)
        vectorized = loop.rounds.execution.name == "vectorized"
        chosen = "together" if vectorized else "one after another"
        limit = LIMIT if low_rank else None
        kept = ratio >= LIMIT if low_rank else ratio >= LIMIT or not vectorized
        met = met and kept
        alone, together = (seconds_of_a_turn / ROUNDS for seconds_of_a_turn in turns[0])
        found[name] = {"sequential": alone, "vectorized": together, "ratio": ratio}
        found[name] |= {"auto": chosen, "limit": limit, "met": kept}
        verdict = f"limit ≥ {limit}: " if limit else "auto must not lose: "
        print(
            f"{name:26} {1000 * alone:8.1f} ms a round alone, together {ratio:5.2f} times as fast;"
            f" auto: {chosen}; {verdict}{'met' if kept else 'NOT met'}"
        )
    write_json(options.json, found)
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
