"""The experiments written by hand in PyTorch: no library, tensors in memory, a CSV line and a checkpoint each round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.contending import Rounds, contend
from tests.benchmarks.experiments_contenders.trial import Plan, Trial, evaluate, load, mlp

Step = Callable[[tuple[Tensor, ...]], None]


def sgd(parameters: list[Tensor], learning_rate: float) -> Step:
    """Return a step in place, which takes a fifth less time than `backward` and an optimizer of torch."""

    def step(gradients: tuple[Tensor, ...]) -> None:
        for value, gradient in zip(parameters, gradients, strict=True):
            value.sub_(gradient, alpha=learning_rate)

    return step


class FedAvgM:
    """The server steps on the mean change of the clients with momentum; plain FedAvg where the momentum is 0."""

    def __init__(self, plan: Plan, trial: Trial) -> None:
        self.network = mlp(plan)
        self.step = sgd(list(self.network.parameters()), trial.recipe.learning_rate)
        self.momentum = trial.recipe.momentum
        self.velocity = [torch.zeros_like(value) for value in self.network.parameters()]

    def begin_round(self, number: int) -> None: ...

    def begin_client(self) -> Step:
        return self.step

    def end_round(self, start: list[Tensor], mean: list[Tensor]) -> list[Tensor]:
        new = []
        for place, (old, value) in enumerate(zip(start, mean, strict=True)):
            change = old - value
            self.velocity[place] = change + self.momentum * self.velocity[place]
            # That is old - velocity, rounded so that without momentum it is the mean.
            new.append(value + (change - self.velocity[place]))
        return new


class FedSLoP:
    """The clients' momentum is that of gradients projected to a random subspace, which is drawn in each round."""

    def __init__(self, plan: Plan, trial: Trial) -> None:
        self.network, self.plan, self.recipe = mlp(plan), plan, trial.recipe
        self.parameters = list(self.network.parameters())

    def begin_round(self, number: int) -> None:
        self.bases: list[Tensor | None] = []
        for value, seed in zip(self.parameters, self.plan.seeds[number].values(), strict=True):
            self.bases.append(None)
            if value.ndim == 2 and self.recipe.rank < value.shape[1]:
                draws = torch.Generator().manual_seed(seed)
                basis, triangle = torch.linalg.qr(torch.randn(value.shape[1], self.recipe.rank, generator=draws))
                self.bases[-1] = basis * triangle.diagonal().sign()

    def begin_client(self) -> Step:
        velocity = [
            torch.zeros_like(value) if basis is None else value.new_zeros(len(value), self.recipe.rank)
            for value, basis in zip(self.parameters, self.bases, strict=True)
        ]

        def step(gradients: tuple[Tensor, ...]) -> None:
            momentum, rate = self.recipe.momentum, self.recipe.learning_rate
            together = zip(self.parameters, self.bases, velocity, gradients, strict=True)
            for value, basis, speed, gradient in together:
                if basis is None:
                    value.sub_(speed.mul_(momentum).add_(gradient), alpha=rate)
                else:
                    value.addmm_(speed.addmm_(gradient, basis, beta=momentum), basis.T, alpha=-rate)

        return step

    def end_round(self, start: list[Tensor], mean: list[Tensor]) -> list[Tensor]:
        return mean


class UpdatedConv(nn.Module):
    """A convolution by a frozen weight and the two decoupled changes U ⊗ V~ + U~ ⊗ V, of which U and V are trained."""

    def __init__(self, frozen: Tensor, factors: list[Tensor]) -> None:
        super().__init__()
        self.frozen = nn.Parameter(frozen, requires_grad=False)
        self.U, self.V = nn.Parameter(factors[0]), nn.Parameter(factors[1])
        self.fixed_U, self.fixed_V = (nn.Parameter(factor, requires_grad=False) for factor in factors[2:])

    def change(self) -> Tensor:
        both = [self.kronecker(self.U, self.fixed_V), self.kronecker(self.fixed_U, self.V)]
        return both[0] + both[1]

    def kronecker(self, left: Tensor, right: Tensor) -> Tensor:
        blocks = torch.einsum("kij,kpq->kipjq", left, right)
        return blocks.reshape(-1)[: self.frozen.numel()].view(self.frozen.shape)

    def forward(self, images: Tensor) -> Tensor:
        return F.conv2d(images, self.frozen + self.change(), padding=1)


class Block(nn.Module):
    def __init__(self, conv: nn.Module, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = conv, nn.BatchNorm2d(channels)

    def forward(self, images: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.norm(self.conv(images))), 2)


class FedMUD:
    """Dense first and last layers; Kronecker factors of an update in between, folded in and redrawn each round."""

    def __init__(self, plan: Plan, trial: Trial) -> None:
        self.plan, self.scale = plan, next(iter(plan.init_scale.values()))
        values = iter(plan.start)
        blocks: list[nn.Module] = []
        for number in range(4):
            weight = next(values)
            if number == 0:
                conv: nn.Module = nn.Conv2d(1, weight.shape[0], 3, padding=1, bias=False)
            else:
                conv = UpdatedConv(weight, [next(values) for _ in range(4)])
            blocks.append(Block(conv, weight.shape[0]))
            # Those of batch normalisation.
            for _ in range(5):
                next(values)
        last = nn.Linear(*reversed(plan.start[-1].shape), bias=False)
        self.network = load(nn.Sequential(*blocks, nn.Flatten(), last), plan.start)
        self.updated = [module for module in self.network.modules() if isinstance(module, UpdatedConv)]
        trained = [value for value in self.network.parameters() if value.requires_grad]
        self.step = sgd(trained, trial.recipe.learning_rate)
        self.number = 0

    def begin_round(self, number: int) -> None:
        self.number = number

    def begin_client(self) -> Step:
        return self.step

    @torch.no_grad()
    def end_round(self, start: list[Tensor], mean: list[Tensor]) -> list[Tensor]:
        """Fold the averaged changes into the frozen weights, and draw the factors of the next round."""
        for live, value in zip(averaged(self.network), mean, strict=True):
            live.copy_(value)
        fixed = [factor for conv in self.updated for factor in (conv.fixed_U, conv.fixed_V)]
        for conv in self.updated:
            conv.frozen += conv.change()
            conv.U.zero_()
            conv.V.zero_()
        for factor, seed in zip(fixed, self.plan.seeds[self.number + 1].values(), strict=True):
            factor.uniform_(-self.scale, self.scale, generator=torch.Generator().manual_seed(seed))
        return [value.detach().clone() for value in averaged(self.network)]


METHODS: dict[str, Callable[[Plan, Trial], Any]] = {each.__name__: each for each in (FedAvgM, FedSLoP, FedMUD)}


def averaged(network: nn.Module) -> list[Tensor]:
    """Return what clients send: trained parameters and buffers."""
    return [value for value in network.parameters() if value.requires_grad] + list(network.buffers())


def batches(orders: list[Tensor], size: int) -> Iterator[Tensor]:
    for order in orders:
        yield from order.split(size)


def run(trial: Trial, rounds: Rounds) -> dict[str, Any]:
    plan = trial.plan()
    images, classes = trial.images(train=True)
    tests, folder = trial.evaluation_batches(), Path(trial.folder)
    method = METHODS[trial.recipe.method](plan, trial)
    network: nn.Module = method.network
    trained = [value for value in network.parameters() if value.requires_grad]
    live, accuracies = averaged(network), []
    model = [value.detach().clone() for value in live]
    with (folder / "metrics.csv").open("w") as log:
        log.write("round,train_loss,val_loss,val_acc\n")
        rounds.begin()
        for number, cohort in enumerate(plan.rounds):
            method.begin_round(number)
            sums = [torch.zeros_like(value, dtype=torch.float64) for value in live]
            losses: list[Tensor] = []
            sizes: list[int] = []
            total_weight = 0
            for _, orders in cohort:
                with torch.no_grad():
                    for value, old in zip(live, model, strict=True):
                        value.copy_(old)
                step = method.begin_client()
                for batch in batches(orders, trial.recipe.batch_size):
                    loss = F.cross_entropy(network(images[batch]), classes[batch])
                    gradients = torch.autograd.grad(loss, trained)
                    with torch.no_grad():
                        step(gradients)
                    losses.append(loss.detach())
                    sizes.append(len(batch))
                weight = 1 if trial.recipe.uniform else len(orders[0])
                total_weight += weight
                for total, value in zip(sums, live, strict=True):
                    total.add_(value.detach(), alpha=weight)
            mean = [mean_of(total / total_weight, value) for total, value in zip(sums, live, strict=True)]
            model = method.end_round(model, mean)
            with torch.no_grad():
                for value, new in zip(live, model, strict=True):
                    value.copy_(new)
            val_loss, accuracy = evaluate(network, tests)
            accuracies.append(accuracy)
            weights = torch.tensor(sizes, dtype=torch.float32)
            train_loss = (torch.stack(losses) @ weights / weights.sum()).item()
            log.write(f"{number},{train_loss},{val_loss},{accuracy}\n")
            log.flush()
            torch.save(network.state_dict(), folder / "last.pt")
            rounds.end()
    return trial.finish(accuracies, list(network.state_dict().values()))


def mean_of(mean: Tensor, like: Tensor) -> Tensor:
    return (mean if like.is_floating_point() else mean.round()).to(like.dtype)


if __name__ == "__main__":
    contend(Trial, run)
