"""Table 2 of the aggregation-broadcast paper (002) in plain PyTorch: a search of what the paper leaves open.

Ten clients with one digit of MNIST each train LoRA factors and biases of an MLP of 784-200-200-10; nothing of this
package is used. It prints the best test accuracy of each cell, for `recipes/lora_aggregation/RESULTS.md`:

    python tests/benchmarks/lora_aggregation.py --data ../shared/data --local epochs --total 60
    python tests/benchmarks/lora_aggregation.py --data ../shared/data --local steps --inputs standardised
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from json_option import add_json_option, write_json
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torchvision.datasets import MNIST

ROOT = Path(__file__).parents[2]
SHAPES = ((200, 784), (200, 200), (10, 200))
RANKS = (160, 100, 10)
CLIENTS = 10
MEAN, STD = 0.1307, 0.3081


def images(root: Path, train: bool, inputs: str) -> tuple[Tensor, Tensor]:
    split = MNIST(root, train=train)
    pixels = split.data.flatten(1).float() / 255
    return (pixels - MEAN) / STD if inputs == "standardised" else pixels, split.targets


def uniform(shape: Sequence[int], fan_in: int, generator: torch.Generator) -> Tensor:
    return (torch.rand(*shape, generator=generator) * 2 - 1) / math.sqrt(fan_in)


def truncated(matrix: Tensor, rank: int, split: str) -> tuple[Tensor, Tensor]:
    """Return B and A whose product is the best of that rank; singular values go to B or to both alike."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    kept = min(rank, len(values))
    left, values, right = left[:, :kept], values[:kept], right[:kept]
    root = values.sqrt()
    b, a = (left * values, right) if split == "left" else (left * root, root[:, None] * right)
    return pad(b, (0, rank - kept)), pad(a, (0, 0, 0, rank - kept))


def forward(
    x: Tensor, base: Sequence[Tensor], b: Sequence[Tensor], a: Sequence[Tensor], bias: Sequence[Tensor]
) -> Tensor:
    for layer, weight in enumerate(base):
        x = x @ weight.T + (x @ a[layer].mT) @ b[layer].mT + bias[layer].unsqueeze(-2)
        x = x.relu() if layer < len(base) - 1 else x
    return x


def best_accuracy(operator: str, delta: float, every: int, arguments: argparse.Namespace) -> float:
    """Return the best test accuracy over the rounds of one cell of the table.

    Args:
        operator: ``"PS"`` or ``"SP"``.
        delta: Share of the ranks.
        every: Local epochs or steps of a round (E).
        arguments: The command's.
    """
    generator = torch.Generator().manual_seed(arguments.seed)
    x, y = images(arguments.data, True, arguments.inputs)
    test_x, test_y = images(arguments.data, False, arguments.inputs)
    parts = [(y == digit).nonzero()[:, 0] for digit in range(CLIENTS)]
    ranks = [max(int(rank * delta), 1) for rank in RANKS]
    base = [uniform(shape, shape[1], generator) * (arguments.base == "default") for shape in SHAPES]
    a = [uniform((rank, shape[1]), shape[1], generator) for rank, shape in zip(ranks, SHAPES, strict=True)]
    b = [uniform((shape[0], rank), rank, generator) for rank, shape in zip(ranks, SHAPES, strict=True)]
    b = [factor * (arguments.init == "both") for factor in b]
    bias = [torch.zeros(shape[0]) for shape in SHAPES]
    longest = math.ceil(max(map(len, parts)) / arguments.batch)
    best = 0.0
    rounds = arguments.total // every
    for number in range(rounds):
        stacks = [value.repeat(CLIENTS, *(1 for _ in value.shape)).requires_grad_() for value in (*b, *a, *bias)]
        for _ in range(every):
            orders = [part[torch.randperm(len(part), generator=generator)] for part in parts]
            for step in range(1 if arguments.local == "steps" else longest):
                chosen = [order[step * arguments.batch : (step + 1) * arguments.batch] for order in orders]
                rows = torch.stack([pad(each, (0, arguments.batch - len(each))) for each in chosen])
                weights = torch.stack([pad(torch.ones(len(each)), (0, arguments.batch - len(each))) for each in chosen])
                logits = forward(x[rows], base, stacks[:3], stacks[3:6], stacks[6:])
                if arguments.softmax:
                    logits = logits.softmax(-1)
                losses = cross_entropy(logits.flatten(0, 1), y[rows].flatten(), reduction="none").view_as(weights)
                loss = ((losses * weights).sum(1) / weights.sum(1).clamp(min=1)).sum()
                with torch.no_grad():
                    for value, gradient in zip(stacks, torch.autograd.grad(loss, stacks), strict=True):
                        value -= arguments.learning_rate * gradient
        with torch.no_grad():
            bias = [value.mean(0) for value in stacks[6:]]
            if operator == "PS":
                b, a = ([value.mean(0) for value in stacks[first : first + 3]] for first in (0, 3))
            else:
                means = [torch.bmm(stacks[layer], stacks[3 + layer]).mean(0) for layer in range(3)]
                pairs = [truncated(mean, rank, arguments.split) for mean, rank in zip(means, ranks, strict=True)]
                b, a = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            if (number + 1) % arguments.evaluate_every == 0 or number + 1 == rounds:
                found = forward(test_x, base, b, a, bias).argmax(1)
                best = max(best, (found == test_y).float().mean().item())
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder that holds MNIST")
    parser.add_argument("--local", choices=["epochs", "steps"], default="epochs", help="what E counts")
    parser.add_argument("--every", type=int, nargs="+", default=[1], help="E: epochs or steps of a round")
    parser.add_argument("--total", type=int, default=300, help="epochs or steps in all")
    parser.add_argument("--delta", type=float, nargs="+", default=[1.0, 0.1])
    parser.add_argument("--operator", choices=["PS", "SP"], nargs="+", default=["SP", "PS"])
    parser.add_argument("--inputs", choices=["pixels", "standardised"], default="pixels")
    parser.add_argument("--base", choices=["default", "zero"], default="default", help="the frozen weights")
    parser.add_argument("--init", choices=["lora", "both"], default="lora", help="B zero, or both factors at random")
    parser.add_argument("--split", choices=["left", "root"], default="left", help="where SP puts singular values")
    parser.add_argument("--softmax", action="store_true", help="softmax before the loss, which takes another")
    parser.add_argument("--evaluate-every", type=int, default=1, help="rounds between two looks at the test set")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    add_json_option(parser)
    arguments = parser.parse_args()
    if not (arguments.data / "MNIST").exists():
        parser.error(f"--data {arguments.data} holds no MNIST")
    cells = []
    for operator in arguments.operator:
        for delta in arguments.delta:
            for every in arguments.every:
                accuracy = best_accuracy(operator, delta, every, arguments)
                print(f"{operator} E={every:<3d} delta={delta:<4g} best {accuracy:.4f}", flush=True)
                cells.append({"operator": operator, "every": every, "delta": delta, "best": accuracy})
    write_json(arguments.json, cells)


if __name__ == "__main__":
    main()
