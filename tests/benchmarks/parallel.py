"""A round's clients in two processes: how much sooner they are done than in one.

    python tests/benchmarks/parallel.py [--processes N] [--clients N] [--steps N] [--repetitions N] [--json FILE]

CNN4, FedMUD's network, trains by FedAvg on images of Fashion-MNIST's shape: 10 clients of 5 batches of 64 a round. One
process with one thread and several with one thread each (`strategy="client_parallel"`) take turns; each is started
anew and makes three rounds after one that is not counted, and the ratio is the median over the turns. The limit is for
two processes.

The exit status is 1 if the limit is not met. The machine must have nothing else to do, and as many cores as processes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path

import lightning.pytorch as pl
import torch
from json_option import add_json_option, write_json
from torch.utils.data import DataLoader, TensorDataset

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from lightning_lowrank import FedAvg, FederatedLoop  # noqa: E402
from lightning_lowrank.models import CNN4, Classifier  # noqa: E402

LIMIT = 0.6
ROUNDS = 3
BATCH = 64


def work(processes: int, clients: int, steps: int, out: Path) -> None:
    """Make some rounds in this process and those that its trainer starts, and write the seconds of each."""
    marks: list[float] = []

    class Marks(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            marks.append(time.perf_counter())

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    samples = clients * steps * BATCH
    data = TensorDataset(torch.randn(samples, 1, 28, 28), torch.randint(10, (samples,)))
    trainer = pl.Trainer(
        max_epochs=ROUNDS + 1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[FederatedLoop(FedAvg(), clients=clients, summary=False), Marks()],
        devices=processes,
        strategy="client_parallel" if processes > 1 else "auto",
    )
    trainer.fit(Classifier(CNN4(), optimizer=partial(torch.optim.SGD, lr=0.1)), DataLoader(data, batch_size=BATCH))
    if trainer.is_global_zero:
        write_json(out, [end - begin for begin, end in pairwise(marks)])


def seconds(processes: int, clients: int, steps: int) -> float:
    """Return the seconds of a round in so many processes of one thread each, which are started anew."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        worker = ["--work", str(processes), "--clients", str(clients), "--steps", str(steps), "--json", str(out)]
        subprocess.run(
            [sys.executable, __file__, *worker], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=1800
        )
        return statistics.median(json.loads(out.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="batches of each client in a round")
    parser.add_argument("--repetitions", type=int, default=5)
    add_json_option(parser)
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.clients, options.steps, options.json)
        return
    turns = [
        [seconds(processes, options.clients, options.steps) for processes in (1, options.processes)]
        for _ in range(options.repetitions)
    ]
    ratio = statistics.median(together / alone for alone, together in turns)
    met = ratio <= LIMIT
    found = {
        "one process": statistics.median(alone for alone, _ in turns),
        f"{options.processes} processes": statistics.median(together for _, together in turns),
        "ratio": ratio,
    }
    print(f"CNN4, {options.clients} clients of {options.steps} batches of {BATCH} a round, one thread each")
    for name in list(found)[:2]:
        print(f"  {name:14}{found[name]:8.2f} s a round")
    print(f"  ratio         {ratio:8.3f}    limit {LIMIT:.2f}: {'met' if met else 'NOT met'}")
    write_json(options.json, {**found, "limit": LIMIT, "met": met})
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
