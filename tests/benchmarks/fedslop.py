"""Wall time of FedSLoP's MNIST experiment (004) and of FedAvg-M's, from the command to the last round's validation.

100 rounds, 50 clients, 10 a round, batch 32, an evaluation on the 10,000 test images in each round. The limits are for
two cores with nothing else running:

    python tests/benchmarks/fedslop.py --data ../shared/data

With ``--plain SEED`` it trains nothing of this package's: a loop of plain PyTorch over the same partition prints the
accuracies that ``recipes/fedslop/RESULTS.md`` holds the recipes' against. ``--clients`` is the number of clients of the
partition, of whose non-empty ones a fifth are drawn in each round, and ``--carried`` keeps each client's momentum
between rounds at full size, both as the authors' release has it:

    python tests/benchmarks/fedslop.py --plain 0 --methods FedSLoP --clients 100 --carried --threads 1
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from json_option import add_json_option, write_json
from torch.nn.functional import cross_entropy
from torchvision.datasets import MNIST

ROOT = Path(__file__).parents[2]
# Momentum of the server and of the clients, and the projection's rank.
PLAIN = {"FedAvg-M": (0.8, 0.0, None), "client momentum": (0.0, 0.8, None), "FedSLoP": (0.0, 0.8, 112)}
LIMITS = {"FedSLoP": ([], 60.0), "FedAvg-M": (["recipes/fedslop/fedavg_m.yaml"], 45.0)}


def seconds_of(overlays: list[str], data: Path, rounds: int, threads: int) -> float:
    """Return the wall time of one run in a process of its own, interpreter start included."""
    configs = ["recipes/fedslop/mnist.yaml", *overlays]
    with tempfile.TemporaryDirectory() as folder:
        words = [word for config in configs for word in ("--config", str(ROOT / config))]
        words += ["--data.root", str(data), "--trainer.max_epochs", str(rounds)]
        words += ["--federated.execution", "vectorized", "--trainer.enable_progress_bar", "false"]
        begun = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", "from lightning_lowrank.cli import main; main()", "fit", *words],
            check=True,
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)},
        )
        return time.perf_counter() - begun


def plain_accuracies(
    data: Path,
    seed: int,
    rounds: int,
    server: float,
    client: float,
    rank: int | None,
    clients: int = 50,
    carried: bool = False,
) -> list[float]:
    """Return the test accuracy after each round of a loop that uses this package for its partition alone.

    Args:
        data: Folder that holds MNIST.
        seed: Seed of the weights, the partition, the draws of clients and the order of samples.
        rounds: Number of rounds.
        server: The server's momentum.
        client: The clients' momentum, zero at the start of each round.
        rank: Columns of the projection of 004's Algorithm 1; ``None``: none.
        clients: Clients of the partition; a fifth of those that have samples are drawn in each round.
        carried: Each client begins a round with the momentum that it had at the end of its last one. It is of full size
            then, as in the authors' release: what it holds from other rounds lies outside the projection of this one.
    """
    from lightning_lowrank import Dirichlet

    splits = [MNIST(data, train=train) for train in (True, False)]
    images, test_images = (((split.data.float() / 255 - 0.1307) / 0.3081).flatten(1) for split in splits)
    targets, test_targets = (split.targets for split in splits)
    parts = list(Dirichlet(alpha=0.1, capped=False).split(range(len(targets)), clients, seed, targets))
    filled = [number for number, part in enumerate(parts) if len(part)]
    torch.manual_seed(seed)
    draw = np.random.default_rng(seed)
    network = torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    live = list(network.parameters())
    weights = [value.detach().clone() for value in live]
    velocity = [torch.zeros_like(value) for value in weights]
    accuracies = []
    drawn = max(1, int(0.2 * len(filled)))
    kept: dict[int, list[torch.Tensor | float]] = {}
    for _ in range(rounds):
        projections = [
            torch.linalg.qr(torch.randn(value.shape[1], rank)).Q
            if rank is not None and value.dim() == 2 and rank < value.shape[1]
            else None
            for value in weights
        ]
        mean = [torch.zeros_like(value) for value in weights]
        for number in draw.choice(filled, drawn, replace=False):
            with torch.no_grad():
                torch._foreach_copy_(live, weights)
            momentum: list[torch.Tensor | float] = kept.get(number) or [0.0] * len(live)
            for batch in parts[number][torch.randperm(len(parts[number]))].split(32):
                gradients = torch.autograd.grad(cross_entropy(network(images[batch]), targets[batch]), live)
                with torch.no_grad():
                    for place, (value, gradient, basis) in enumerate(zip(live, gradients, projections, strict=True)):
                        step = gradient if basis is None else gradient @ basis
                        if carried and basis is not None:
                            step = step @ basis.T
                        momentum[place] = client * momentum[place] + step
                        value -= 0.018 * (momentum[place] if basis is None or carried else momentum[place] @ basis.T)
            if carried:
                kept[number] = momentum
            torch._foreach_add_(mean, [value.detach() for value in live], alpha=1 / drawn)
        with torch.no_grad():
            for speed, value, average in zip(velocity, weights, mean, strict=True):
                speed.mul_(server).add_(average - value)
                value.add_(speed)
            torch._foreach_copy_(live, weights)
            accuracies.append((network(test_images).argmax(1) == test_targets).float().mean().item())
    return accuracies


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder that holds MNIST")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plain", type=int, metavar="SEED", help="accuracies of a loop of plain PyTorch, and no times")
    parser.add_argument("--methods", nargs="+", choices=PLAIN, default=list(PLAIN), help="of --plain")
    parser.add_argument("--clients", type=int, default=50, help="of --plain: clients of the partition")
    parser.add_argument("--momentum", type=float, help="of --plain: the clients' momentum in place of a method's own")
    parser.add_argument("--carried", action="store_true", help="of --plain: clients keep their momentum")
    add_json_option(parser)
    arguments = parser.parse_args()
    if not (arguments.data / "MNIST").exists():
        parser.error(f"--data {arguments.data} holds no MNIST")
    if arguments.plain is not None:
        torch.set_num_threads(arguments.threads)
        plain = {}
        for method in arguments.methods:
            server, client, rank = PLAIN[method]
            momenta = (server, client if arguments.momentum is None else arguments.momentum)
            settings = (*momenta, rank, arguments.clients, arguments.carried)
            got = plain_accuracies(arguments.data, arguments.plain, arguments.rounds, *settings)
            plain[method] = {"last": got[-1], "best": max(got), "last ten": float(np.mean(got[-10:]))}
            told = "   ".join(f"{name} {value:.4f}" for name, value in plain[method].items())
            print(f"{method:16s} seed {arguments.plain}   {told}", flush=True)
        write_json(arguments.json, plain)
        return 0
    found, all_met = {}, True
    for method, (overlays, limit) in LIMITS.items():
        seconds = seconds_of(overlays, arguments.data.resolve(), arguments.rounds, arguments.threads)
        verdict = "met" if seconds <= limit else "not met"
        all_met &= seconds <= limit or arguments.rounds != 100
        told = f"limit {limit:.0f} s: {verdict}" if arguments.rounds == 100 else "no limit for other numbers of rounds"
        found[method] = {"seconds": seconds, "limit": limit, "rounds": arguments.rounds}
        print(f"{method:10s}{seconds:8.1f} s   {told}", flush=True)
    write_json(arguments.json, found)
    return 0 if all_met else 1


if __name__ == "__main__":
    sys.exit(main())
