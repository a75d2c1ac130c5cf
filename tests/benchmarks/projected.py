"""Microseconds of a step of the projected optimizers, next to torch's and to the same formulas written out.

    python tests/benchmarks/projected.py [--threads 1 2] [--clients 10]

FedSLoP's MLP of 784-128-10 and rank 112, with gradients that are there already; also ten clients stacked. Each
repetition makes a block of steps with every contender in turn, and the table gives the medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from json_option import add_json_option, write_json
from torch import Tensor

from lightning_lowrank.optim import ProjectedAdamW, ProjectedSGD

SHAPES = [(128, 784), (128,), (10, 128), (10,)]
RANK, LR, MOMENTUM, BETAS, DECAY = 112, 0.018, 0.8, (0.9, 0.999), 0.01


def parameters(clients: int) -> list[Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(*([clients] if clients else []), *shape).requires_grad_() for shape in SHAPES]
    for value in made:
        value.grad = torch.randn_like(value)
    return made


def written_sgd(values: list[Tensor], clients: int) -> Callable[[], None]:
    """Return a step of FedSLoP's Algorithm 1."""
    bases = bases_of(values, clients)
    moments = [torch.zeros_like(project(value.grad, basis)) for value, basis in zip(values, bases, strict=True)]

    @torch.no_grad()
    def step() -> None:
        for value, basis, moment in zip(values, bases, moments, strict=True):
            moment.mul_(MOMENTUM).add_(project(value.grad, basis))
            subtract(value, moment, basis)

    return step


def written_adamw(values: list[Tensor], clients: int) -> Callable[[], None]:
    """Return a step of AdamW on the coefficients."""
    bases = bases_of(values, clients)
    first = [torch.zeros_like(project(value.grad, basis)) for value, basis in zip(values, bases, strict=True)]
    second = [torch.zeros_like(value) for value in first]
    count = 0

    @torch.no_grad()
    def step() -> None:
        nonlocal count
        count += 1
        for value, basis, mean, square in zip(values, bases, first, second, strict=True):
            gradient = project(value.grad, basis)
            mean.lerp_(gradient, 1 - BETAS[0])
            square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
            root = (square / (1 - BETAS[1] ** count)).sqrt_().add_(1e-8)
            value.mul_(1 - LR * DECAY)
            subtract(value, (mean / root).div_(1 - BETAS[0] ** count), basis)

    return step


def bases_of(values: list[Tensor], clients: int) -> list[Tensor | None]:
    return [
        torch.linalg.qr(torch.randn(value.shape[-1], RANK)).Q if value.ndim - bool(clients) == 2 else None
        for value in values
    ]


def project(gradient: Tensor | None, basis: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient if basis is None else gradient @ basis


def subtract(value: Tensor, change: Tensor, basis: Tensor | None) -> None:
    if basis is None:
        value.add_(change, alpha=-LR)
    else:
        value.flatten(0, -2).addmm_(change.flatten(0, -2), basis.T, alpha=-LR)


def contenders(clients: int) -> dict[str, Callable[[], object]]:
    stacked = {"stacked": bool(clients)}
    values = [parameters(clients) for _ in range(6)]
    return {
        "SGD of torch": torch.optim.SGD(values[0], lr=LR, momentum=MOMENTUM).step,
        "SGD written out": written_sgd(values[1], clients),
        "ProjectedSGD": ProjectedSGD(
            [{"params": values[2], **stacked}], lr=LR, momentum=MOMENTUM, rank=RANK, refresh_interval=None
        ).step,
        "AdamW of torch": torch.optim.AdamW(values[3], lr=LR).step,
        "AdamW written out": written_adamw(values[4], clients),
        "ProjectedAdamW": ProjectedAdamW(
            [{"params": values[5], **stacked}], lr=LR, rank=RANK, refresh_interval=None
        ).step,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--clients", type=int, nargs="+", default=[0, 10], help="0: one, not stacked")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100)
    add_json_option(parser)
    arguments = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for clients in arguments.clients:
            made = contenders(clients)
            found: dict[str, list[float]] = {name: [] for name in made}
            steps = arguments.steps // (clients or 1)
            for _ in range(arguments.repetitions + 1):
                for name, step in made.items():
                    begun = time.perf_counter()
                    for _ in range(steps):
                        step()
                    found[name].append((time.perf_counter() - begun) / steps * 1e6)
            medians = {name: statistics.median(times[1:]) for name, times in found.items()}
            figures[f"{threads} threads, {clients} clients"] = medians
            told = "   ".join(f"{name} {value:.0f}" for name, value in medians.items())
            print(f"{threads} threads, {clients} clients: {told}", flush=True)
    write_json(arguments.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
