"""Modules drawn at random, to compare clients together with the clients one by one.

    python -m tests.federated.execution.random_modules --minutes 60 [--first 1000]

A module has some of the ways in which people write training steps. A draw fails where both executions give other
weights or figures, and nothing was refused. The exit status is 1 if one did.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_lowrank import FedAvg, FederatedLoop, FromIndices
from lightning_lowrank.federated.execution import compiled
from tests.helpers import Data, Module, fit, trainer, weights

CLIENTS = {
    "even": [list(range(24)), list(range(24, 48)), list(range(48, 72))],
    "uneven": [list(range(5)), list(range(5, 47)), list(range(47, 69)), list(range(69, 103))],
    "ends": [list(range(20)), list(range(20, 41)), list(range(41, 67))],
}
TOLERANCE = 5e-4

Part = Callable[["Drawn", Tensor, Any, int], Tensor]


class Drawn(Module):
    """Adds what the chosen parts compute to its loss, or multiplies it by that."""

    def __init__(self, net: nn.Module, parts: list[str], **arguments: Any) -> None:
        super().__init__(net, **arguments)
        self.parts = parts
        self.proto = nn.Parameter(torch.zeros(6))
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.anchor = {name: value.detach().clone() for name, value in net.named_parameters()}
        self.linears = [each for each in net if isinstance(each, nn.Linear)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for name in self.parts:
            BEFORE.get(name, lambda *given: None)(self, batch)
        loss = self.loss(batch)
        for name in self.parts:
            loss = PARTS[name](self, loss, batch, batch_idx)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss


def log(**settings: Any) -> Part:
    def part(module: Drawn, loss: Tensor, batch: Any, batch_idx: int) -> Tensor:
        module.log("extra", loss.detach() * 2, on_step=False, on_epoch=True, **settings)
        return loss

    return part


@torch.no_grad()
def in_place(module: Drawn, batch: Any) -> None:
    module.proto.mul_(0.9).add_(batch[0].mean(0) * 0.1)


@torch.no_grad()
def max_norm(module: Drawn, batch: Any) -> None:
    weight = module.linears[0].weight
    weight.div_(weight.norm().clamp(min=1.0))


def moving_mean(module: Drawn, loss: Tensor, batch: Any, batch_idx: int) -> Tensor:
    module.mean.mul_(0.9).add_(0.1 * batch[0].detach().mean(0))
    module.seen += 1
    return loss + 0.1 * (module.mean * module.proto).sum()


def assigned_mean(module: Drawn, loss: Tensor, batch: Any, batch_idx: int) -> Tensor:
    module.mean = 0.9 * module.mean + 0.1 * batch[0].detach().mean(0)
    return loss + 0.1 * (module.mean * module.proto).sum()


def reversal(module: Drawn, loss: Tensor, batch: Any, batch_idx: int) -> Tensor:
    hidden = module.net[0](batch[0])
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: -gradient)
    return loss + 0.1 * hidden.square().mean()


def teacher(module: Drawn, loss: Tensor, batch: Any, batch_idx: int) -> Tensor:
    outputs = module.net(batch[0])
    with torch.no_grad():
        soft = outputs.detach().softmax(-1)
    return loss - 0.5 * (soft * outputs.log_softmax(-1)).sum(-1).mean()


def gradient_norm(module: Drawn, loss: Tensor, batch: Any, batch_idx: int) -> Tensor:
    (gradient,) = torch.autograd.grad(module.loss(batch), module.linears[0].weight, create_graph=True)
    return loss + 0.1 * gradient.square().sum()


def count(module: Drawn, loss: Tensor, batch: Any, batch_idx: int) -> Tensor:
    module.counted = getattr(module, "counted", 0) + 1
    return loss / module.counted


def remembered(module: Drawn, loss: Tensor, batch: Any, batch_idx: int) -> Tensor:
    last, module.last = getattr(module, "last", None), loss.detach()
    return loss if last is None else loss + 0.1 * loss * last


PARTS: dict[str, Part] = {
    "penalty of all": lambda m, loss, *_: loss + 0.05 * sum(p.square().sum() for p in m.parameters()),
    "penalty of the trained": lambda m, loss, *_: (
        loss + 0.05 * sum(p.square().sum() for p in m.parameters() if p.requires_grad)
    ),
    "penalty of Parameters": lambda m, loss, *_: (
        loss
        + 0.05 * sum(p.abs().sum() for p in vars(m.linears[0])["_parameters"].values() if isinstance(p, nn.Parameter))
    ),
    "penalty of the state": lambda m, loss, *_: (
        loss + 0.01 * sum(v.abs().sum() for name, v in m.state_dict().items() if name.endswith("weight"))
    ),
    "penalty by the optimizer": lambda m, loss, *_: (
        loss + 0.05 * sum(p.square().sum() for group in m.optimizers().param_groups for p in group["params"])
    ),
    "anchor": lambda m, loss, *_: (
        loss + 0.1 * sum((p - m.anchor[name]).square().sum() for name, p in m.net.named_parameters())
    ),
    "loss.requires_grad": lambda m, loss, *_: loss * (2 if loss.requires_grad else 1),
    "is_leaf": lambda m, loss, *_: loss * (2 if m.linears[0].weight.is_leaf else 1),
    "grad": lambda m, loss, *_: loss * (1 if m.linears[0].weight.grad is None else 0.5),
    "batch_idx": lambda m, loss, batch, number: loss * (1 + number % 2),
    "current_epoch": lambda m, loss, *_: loss / (1 + m.current_epoch),
    "samples": lambda m, loss, batch, number: loss * len(batch[0]) / 8,
    "a scale": lambda m, loss, *_: loss * m.scale.exp(),
    "random": lambda m, loss, *_: loss * (0.5 + random.random()),
    "numpy": lambda m, loss, *_: loss * float(0.5 + np.random.rand()),
    "a value": lambda m, loss, *_: loss * (2 if loss > 1 else 1),
    "where": lambda m, loss, *_: torch.where(loss > 1, 2 * loss, loss),
    "mask": lambda m, loss, batch, number: loss + 0.1 * m.net(batch[0])[batch[1] > 1].square().sum(),
    "in place": lambda m, loss, *_: loss + 0.1 * (m.proto - m.linears[0].weight.mean(0)).square().sum(),
    "max norm": lambda m, loss, *_: loss,
    "moving mean": moving_mean,
    "assigned mean": assigned_mean,
    "reversal": reversal,
    "teacher": teacher,
    "gradient norm": gradient_norm,
    "count": count,
    "remembered": remembered,
    "logs a sum": log(reduce_fx="sum"),
    "logs a maximum": log(reduce_fx="max"),
    "logs by a size": log(batch_size=1),
    "logs": log(),
}
BEFORE: dict[str, Callable[[Drawn, Any], None]] = {"in place": in_place, "max norm": max_norm}
NORMS: list[type[nn.Module]] = [nn.Identity, nn.BatchNorm1d, nn.LayerNorm]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda values: torch.optim.SGD(values, lr=0.05, momentum=0.9),
    "AdamW": lambda values: torch.optim.AdamW(values, lr=0.01),
    "RMSprop": lambda values: torch.optim.RMSprop(values, lr=0.003),
}
HOOKS: dict[str, Callable[[Drawn], Any]] = {
    "none": lambda module: None,
    "gradient": lambda module: module.linears[0].weight.register_hook(lambda gradient: 0.5 * gradient),
    "backward": lambda module: module.linears[0].register_full_backward_hook(lambda *given: None),
    "forward": lambda module: module.linears[1].register_forward_hook(lambda part, given, output: 2 * output),
}


def drawn(seed: int) -> tuple[str, Callable[[], Drawn], list[list[int]]]:
    """Return what a seed draws: its description, what makes the module, and the clients."""
    draws = random.Random(seed)
    parts = draws.sample(list(PARTS), draws.randint(1, 3))
    norm, optimizer, clients = draws.choice(NORMS), draws.choice(list(OPTIMIZERS)), draws.choice(list(CLIENTS))
    hook = draws.choice(list(HOOKS)) if draws.random() < 0.2 else "none"
    ties, freezes = draws.random() < 0.2, draws.random() < 0.2

    def make() -> Drawn:
        torch.manual_seed(seed)
        # Adaptive optimizers make steps of the rounding in the gradient of a bias before BatchNorm.
        first = nn.Linear(6, 16, bias=norm is not nn.BatchNorm1d)
        net = nn.Sequential(first, norm(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        net.append(nn.Linear(16, 4))
        if ties:
            net[5].weight = net[3].weight
        if freezes:
            net[6].requires_grad_(False)
        module = Drawn(
            net, parts, optimizer=lambda values: OPTIMIZERS[optimizer]([v for v in values if v.requires_grad])
        )
        HOOKS[hook](module)
        return module

    said = [*parts, norm.__name__, optimizer, clients, f"hook: {hook}", *["tied"] * ties, *["frozen"] * freezes]
    return ", ".join(said), make, CLIENTS[clients]


def trained(folder: Path, make: Callable[[], Drawn], clients: list[list[int]], execution: Any, seed: int) -> Any:
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
    module = make()
    given = {"execution": "vectorized", "compile": True} if execution == "compiled" else {"execution": execution}
    loop = FederatedLoop(FedAvg(), partition=FromIndices(clients), on_client_error="raise", summary=False, **given)
    run = trainer(folder, loop, max_epochs=2, limit_val_batches=0)
    fit(run, module, Data(shuffle=False))
    figures = {name: float(value) for name, value in run.callback_metrics.items() if "/" not in name}
    made = getattr(loop.rounds.execution, "compiled_steps", None)
    return weights(module), figures, made.reason if made is not None else loop.rounds.execution.name


def outcome(folder: Path, seed: int, execution: str = "vectorized") -> tuple[str, str]:
    """Return whether clients together are the clients one by one, and what was drawn.

    Returns:
        ``"same"``, ``"refused"`` or ``"wrong"``; ``"not compiled"`` if it is the same as it is, and could not be
        compiled; ``"none"`` if the module does not even train one by one.
    """
    description, make, clients = drawn(seed)
    try:
        expected, figures, _ = trained(folder, make, clients, "sequential", seed)
    except (MisconfigurationException, RuntimeError) as error:
        return "none", f"{description}: {error}"
    try:
        found, others, way = trained(folder, make, clients, execution, seed)
    except MisconfigurationException as error:
        return "refused", f"{description}: {str(error)[:200]}"
    except RuntimeError as error:
        return "wrong", f"{description}: {error}"
    apart = max(float((found[name].double() - value.double()).abs().max()) for name, value in expected.items())
    logged = max(abs(others.get(name, torch.inf) - value) / max(1.0, abs(value)) for name, value in figures.items())
    verdict = "same" if max(apart, logged) <= TOLERANCE else "wrong"
    if execution == "compiled" and way and verdict == "same":
        verdict = "not compiled"
    return verdict, f"{description}: weights {apart:.1g}, figures {logged:.1g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--execution", default="vectorized", choices=("vectorized", "auto", "compiled"))
    options = parser.parse_args()
    if options.execution == "compiled":
        # Traced as for inductor, which takes seconds for each module.
        compile_step = torch.compile
        compiled.torch.compile = lambda step, **_: compile_step(
            step, fullgraph=True, dynamic=False, backend="aot_eager"
        )
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    counts: dict[str, int] = {}
    end, seed = time.monotonic() + 60 * options.minutes, options.first
    while time.monotonic() < end:
        with tempfile.TemporaryDirectory() as folder:
            verdict, description = outcome(Path(folder), seed, options.execution)
        counts[verdict] = counts.get(verdict, 0) + 1
        if verdict == "wrong":
            print(seed, description, flush=True)
        seed += 1
    print(f"seeds {options.first} to {seed - 1}: {counts}")
    return int("wrong" in counts)


if __name__ == "__main__":
    sys.exit(main())
