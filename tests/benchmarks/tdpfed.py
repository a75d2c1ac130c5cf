"""Seconds of one round of TDPFed's MNIST recipe (001), and of the same method written out in plain PyTorch.

    python tests/benchmarks/tdpfed.py --data ../shared/data [--before CHECKOUT] [--threads 1 2]

20 clients, 23 batches of 20 each, five personal steps and 17 factor steps a batch, by default one client after another.
Each repetition runs every contender in turn in a process of its own, whose figure is the median of its rounds but the
first; the table gives the medians over the repetitions. ``--before`` adds another checkout of this package, such as
that of ``git worktree add ../before HEAD~20``, with its own recipe, to which the limit of 0.4 applies.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from json_option import add_json_option, write_json
from torch.nn.functional import cross_entropy

ROOT = Path(__file__).parents[2]
LIMIT = 0.4
CLIENTS, BATCHES, BATCH, PERSONAL_STEPS, FACTOR_STEPS, PULL = 20, 23, 20, 5, 17, 12.0
WEIGHTS = {(100, 784): 44, (10, 100): 5}


class Clock(pl.Callback):
    """Prints when each round ends."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        print(f"clock {time.perf_counter()}", flush=True)


def plain_rounds(rounds: int) -> None:
    """Make rounds with torch's operations alone, over noise: its values do not change how long a step takes."""
    torch.manual_seed(0)
    factors = [[torch.randn(size, rank) / size**0.5 for size in shape] for shape, rank in WEIGHTS.items()]
    batches = [(torch.rand(BATCH, 784), torch.randint(0, 10, (BATCH,))) for _ in range(BATCHES)]
    clients = [[[value.clone() for value in each] for each in factors] for _ in range(CLIENTS)]
    adams = [[[torch.optim.Adam([value], lr=3e-4) for value in each] for each in own] for own in clients]
    for _ in range(rounds):
        for own, kept in zip(clients, adams, strict=True):
            for mine, received in zip(own, factors, strict=True):
                for value, start in zip(mine, received, strict=True):
                    value.copy_(start)
            plain_client(own, kept, batches)
        print(f"clock {time.perf_counter()}", flush=True)


def plain_client(factors: list[list[torch.Tensor]], adams: list[list[torch.optim.Adam]], batches: list[Any]) -> None:
    """Make one client's steps: the paper's Algorithm 1 with autograd on the personal model and torch's Adam."""
    copies = [left @ right.mT for left, right in factors]
    own = [copy.clone().requires_grad_() for copy in copies]
    personal = torch.optim.SGD(own, lr=0.08)
    for inputs, targets in batches:
        for _ in range(PERSONAL_STEPS):
            loss = cross_entropy((inputs @ own[0].mT).relu() @ own[1].mT, targets)
            personal.zero_grad()
            loss.backward()
            for value, copy in zip(own, copies, strict=True):
                assert value.grad is not None
                value.grad.add_(value.detach() - copy, alpha=PULL)
            personal.step()
        with torch.no_grad():
            for place, (value, (left, right)) in enumerate(zip(own, factors, strict=True)):
                for _ in range(FACTOR_STEPS):
                    left.grad = PULL * (left @ (right.mT @ right) - value @ right)
                    adams[place][0].step()
                    right.grad = PULL * (right @ (left.mT @ left) - value.mT @ left)
                    adams[place][1].step()
                torch.mm(left, right.mT, out=copies[place])


def seconds_of(package: Path | None, data: Path, rounds: int, threads: int, words: list[str]) -> float:
    """Return the median time of a round in a process of its own, with the package of a checkout, ``None`` for none."""
    here = Path(__file__)
    if package is None:
        code = f"import torch, {here.stem}; torch.set_num_threads({threads}); {here.stem}.plain_rounds({rounds + 1})"
        arguments: list[str] = []
    else:
        code = "from lightning_lowrank.cli import main; main()"
        configs = [str(package / "recipes" / "tdpfed" / f"{name}.yaml") for name in ("mnist", "afm")]
        arguments = ["fit", *(word for config in configs for word in ("--config", config))]
        arguments += ["--data.root", str(data), "--trainer.max_epochs", str(rounds + 1)]
        arguments += ["--trainer.callbacks+", f"{here.stem}.Clock", "--trainer.enable_progress_bar", "false", *words]
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join(map(str, [*([package] if package else []), here.parent]))
        output = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            check=True,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
        ).stdout
    ends = [float(line.split()[1]) for line in output.splitlines() if line.startswith("clock")]
    return statistics.median(end - begin for begin, end in pairwise(ends))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder that holds MNIST")
    parser.add_argument("--before", type=Path, help="another checkout, to which the limit applies")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count, of each process")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--execution", default="sequential")
    add_json_option(parser)
    arguments = parser.parse_args()
    contenders: dict[str, Path | None] = {"plain": None, "here": ROOT}
    if arguments.before is not None:
        contenders["before"] = arguments.before.resolve()
    figures: dict[int, dict[str, float]] = {}
    words = ["--federated.execution", arguments.execution]
    for threads in arguments.threads:
        found: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(arguments.repetitions):
            for name, package in contenders.items():
                found[name].append(seconds_of(package, arguments.data.resolve(), arguments.rounds, threads, words))
        figures[threads] = {name: statistics.median(seconds) for name, seconds in found.items()}
        own = figures[threads]["here"]
        told = "   ".join(
            f"{name} {seconds:6.2f} s ({own / seconds:.2f})" for name, seconds in figures[threads].items()
        )
        print(f"{threads} threads   {told}", flush=True)
    write_json(arguments.json, figures)
    met = all(each["here"] <= LIMIT * each.get("before", float("inf")) for each in figures.values())
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
