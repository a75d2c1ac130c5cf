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
CLIENTS = 10
MEAN, STD = 0.1307, 0.3081


def images(root: Path, train: bool, inputs: str) -> tuple[Tensor, Tensor]:
    split = MNIST(root, train=train)
    pixels = split.data.flatten(1).float() / 255
    return (pixels - MEAN) / STD if inputs == "standardised" else pixels, split.targets


def uniform(shape: Sequence[int], fan_in: int, generator: torch.Generator) -> Tensor:
    return (torch.rand(*shape, generator=generator) * 2 - 1) / math.sqrt(fan_in)


def xavier(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return (torch.rand(*shape, generator=generator) * 2 - 1) * math.sqrt(6 / sum(shape))


def factors(init: str, ranks: Sequence[int], generator: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
    """Return B and A of each layer: `lora` has B zero, `output` has A zero, `both` and `xavier` neither."""
    scaled = init in ("output", "xavier")
    shapes = [((rank, shape[1]), (shape[0], rank)) for rank, shape in zip(ranks, SHAPES, strict=True)]
    a = [xavier(down, generator) if scaled else uniform(down, down[1], generator) for down, _ in shapes]
    b = [xavier(up, generator) if scaled else uniform(up, up[1], generator) for _, up in shapes]
    return [factor * (init != "lora") for factor in b], [factor * (init != "output") for factor in a]


def truncated(matrix: Tensor, rank: int, split: str) -> tuple[Tensor, Tensor]:
    """Return B and A whose product is the best of that rank; singular values go to B or to both alike."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    kept = min(rank, len(values))
    left, values, right = left[:, :kept], values[:kept], right[:kept]
    root = values.sqrt()
    b, a = (left * values, right) if split == "left" else (left * root, root[:, None] * right)
    return pad(b, (0, rank - kept)), pad(a, (0, 0, 0, rank - kept))


def forward(
    x: Tensor,
    frozen: Tensor,
    base: Sequence[Tensor],
    b: Sequence[Tensor],
    a: Sequence[Tensor],
    bias: Sequence[Tensor],
    rectified: int,
) -> Tensor:
    """Return the logits. What the first layer's frozen weights make of ``x`` is always the same, and given."""
    for layer, weight in enumerate(base):
        x = (frozen if layer == 0 else x @ weight.T) + (x @ a[layer].mT) @ b[layer].mT + bias[layer].unsqueeze(-2)
        x = x.relu() if layer < rectified else x
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
    ranks = [max(int(rank * delta), 1) for rank in arguments.ranks]
    base = [uniform(shape, shape[1], generator) * arguments.base_scale for shape in SHAPES]
    b, a = factors(arguments.init, ranks, generator)
    rectified = 1 if arguments.linear_second else 2
    frozen, test_frozen = x @ base[0].T, test_x @ base[0].T
    bias = [torch.zeros(shape[0]) for shape in SHAPES]
    longest = math.ceil(max(map(len, parts)) / arguments.batch)
    best = 0.0
    rounds = arguments.total // every
    for number in range(rounds):
        stacks = [value.repeat(CLIENTS, *(1 for _ in value.shape)).requires_grad_() for value in (*b, *a, *bias)]
        moments = [torch.zeros_like(value) for value in stacks]
        for _ in range(every):
            orders = [part[torch.randperm(len(part), generator=generator)] for part in parts]
            steps = 1 if arguments.local == "steps" else longest
            taken = steps * arguments.batch
            all_rows = torch.stack([pad(order[:taken], (0, max(taken - len(order), 0))) for order in orders])
            valid = torch.arange(taken) < torch.tensor([len(order) for order in orders])[:, None]
            for step in range(steps):
                now = slice(step * arguments.batch, (step + 1) * arguments.batch)
                rows, weights = all_rows[:, now], valid[:, now].float()
                logits = forward(x[rows], frozen[rows], base, stacks[:3], stacks[3:6], stacks[6:], rectified)
                if arguments.softmax:
                    logits = logits.softmax(-1)
                losses = cross_entropy(logits.flatten(0, 1), y[rows].flatten(), reduction="none").view_as(weights)
                loss = ((losses * weights).sum(1) / weights.sum(1).clamp(min=1)).sum()
                with torch.no_grad():
                    gradients = torch.autograd.grad(loss, stacks)
                    # A client that is through with its epoch has weights of zero, and waits for the others.
                    moving = (weights[:, 0] * arguments.learning_rate).view(-1, 1, 1)
                    for value, moment, gradient in zip(stacks, moments, gradients, strict=True):
                        if arguments.weight_decay:
                            gradient = gradient.add(value, alpha=arguments.weight_decay)
                        moved = moment.mul_(arguments.momentum).add_(gradient) if arguments.momentum else gradient
                        value -= moved * moving.view(-1, *(1 for _ in value.shape[1:]))
        with torch.no_grad():
            if not all(value.isfinite().all() for value in stacks):
                print(f"  round {number + 1}: not finite", flush=True)
                return best
            bias = [value.mean(0) for value in stacks[6:]]
            if operator == "PS":
                b, a = ([value.mean(0) for value in stacks[first : first + 3]] for first in (0, 3))
            else:
                means = [torch.bmm(stacks[layer], stacks[3 + layer]).mean(0) for layer in range(3)]
                pairs = [truncated(mean, rank, arguments.split) for mean, rank in zip(means, ranks, strict=True)]
                b, a = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            if (number + 1) % arguments.evaluate_every == 0 or number + 1 == rounds:
                found = forward(test_x, test_frozen, base, b, a, bias, rectified).argmax(1)
                accuracy = (found == test_y).float().mean().item()
                best = max(best, accuracy)
                if arguments.verbose:
                    print(f"  round {number + 1} {accuracy:.4f} best {best:.4f}", flush=True)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder that holds MNIST")
    parser.add_argument("--local", choices=["epochs", "steps"], default="epochs", help="what E counts")
    parser.add_argument("--every", type=int, nargs="+", default=[1], help="E: epochs or steps of a round")
    parser.add_argument("--total", type=int, default=300, help="epochs or steps in all")
    parser.add_argument("--ranks", type=int, nargs=3, default=[160, 100, 10], help="at a share of one")
    parser.add_argument("--delta", type=float, nargs="+", default=[1.0, 0.1])
    parser.add_argument("--operator", choices=["PS", "SP"], nargs="+", default=["SP", "PS"])
    parser.add_argument("--inputs", choices=["pixels", "standardised"], default="pixels")
    parser.add_argument("--base-scale", type=float, default=1.0, help="of the frozen weights; 0 leaves none")
    parser.add_argument(
        "--init",
        choices=["lora", "both", "output", "xavier"],
        default="lora",
        help="B zero; neither zero; A zero and B drawn by Glorot's rule; both drawn by it",
    )
    parser.add_argument("--split", choices=["left", "root"], default="left", help="where SP puts singular values")
    parser.add_argument("--softmax", action="store_true", help="softmax before the loss, which takes another")
    parser.add_argument("--linear-second", action="store_true", help="no ReLU after the second layer")
    parser.add_argument("--momentum", type=float, default=0.0, help="from zero in each round")
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--evaluate-every", type=int, default=1, help="rounds between two looks at the test set")
    parser.add_argument("--verbose", action="store_true", help="print every look at the test set")
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
