"""The experiments with an MLP, of clients that step together, written by hand in PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.contending import Rounds, contend
from tests.benchmarks.experiments_contenders.plain import METHODS, FedSLoP
from tests.benchmarks.experiments_contenders.trial import Trial, evaluate
from tests.benchmarks.stacked_by_hand import Dense, LowRank, step


class Stacks:
    """A cohort's linear layers; those of FedSLoP hold the weights' changes in their subspaces, with momentum."""

    def __init__(self, method: Any, trial: Trial, clients: int) -> None:
        recipe = trial.recipe
        self.layers: list[Dense | LowRank] = []
        self.subspaces = isinstance(method, FedSLoP)
        linear = [layer for layer in method.network if isinstance(layer, nn.Linear)]
        for number, layer in enumerate(linear):
            if not self.subspaces:
                self.layers.append(Dense(layer.weight, layer.bias, clients, recipe.learning_rate))
                continue
            weight, basis = layer.weight.detach(), method.bases[2 * number]
            if basis is None:
                basis = torch.eye(weight.shape[1])
            change = weight.new_zeros(len(weight), basis.shape[1])
            momentum, rate = recipe.momentum, recipe.learning_rate
            self.layers.append(LowRank(change, basis, layer.bias, clients, rate, weight, momentum, trains_V=False))

    def mean(self, weights: Tensor) -> list[Tensor]:
        """Return the weighted mean of the clients' values in the order of the network's."""
        means: list[Tensor] = []
        for layer in self.layers:
            if isinstance(layer, Dense):
                means += [mean(value, weights) for value in layer.values()]
            else:
                assert layer.frozen is not None
                means += [layer.frozen + mean(layer.U, weights) @ layer.V.T, mean(layer.bias, weights)]
        return means


def mean(values: Tensor, weights: Tensor) -> Tensor:
    total = torch.tensordot(weights, values.double(), dims=1) / weights.sum()
    return total.to(values.dtype)


def run(trial: Trial, rounds: Rounds) -> dict[str, Any]:
    plan, size = trial.plan(), trial.recipe.batch_size
    images, classes = trial.images(train=True)
    images = images.flatten(1)
    tests, folder = trial.evaluation_batches(), Path(trial.folder)
    method = METHODS[trial.recipe.method](plan, trial)
    live: list[Tensor] = list(method.network.parameters())
    model = [value.detach().clone() for value in live]
    accuracies: list[float] = []
    with (folder / "metrics.csv").open("w") as log:
        log.write("round,train_loss,val_loss,val_acc\n")
        rounds.begin()
        for number, cohort in enumerate(plan.rounds):
            method.begin_round(number)
            # Whoever has most batches comes first, so that those who still step are the first of the stack.
            clients = sorted((orders for _, orders in cohort), key=lambda orders: -len(orders[0]))
            batches = [[batch for order in orders for batch in order.split(size)] for orders in clients]
            stacks, active = Stacks(method, trial, len(clients)), len(clients)
            losses, sizes = [], []
            for turn in range(len(batches[0])):
                present = [each[turn] for each in batches if turn < len(each)]
                if len(present) < active:
                    active = len(present)
                    for layer in stacks.layers:
                        layer.narrow(active)
                samples = torch.tensor([len(batch) for batch in present])
                rows = torch.zeros(active, int(samples.max()), dtype=torch.long)
                for place, batch in enumerate(present):
                    rows[place, : len(batch)] = batch
                filled = torch.arange(rows.shape[1]) < samples.unsqueeze(1)
                weights = (filled / samples.unsqueeze(1)).unsqueeze(2)
                x = F.embedding(rows, images)
                losses.append(step(stacks.layers, x, classes[rows], weights) @ samples.float())
                sizes.append(int(samples.sum()))
            shares = torch.tensor([1.0 if trial.recipe.uniform else len(orders[0]) for orders in clients])
            with torch.no_grad():
                model = method.end_round(model, stacks.mean(shares.double()))
                for value, new in zip(live, model, strict=True):
                    value.copy_(new)
            val_loss, accuracy = evaluate(method.network, tests)
            accuracies.append(accuracy)
            log.write(f"{number},{(torch.stack(losses).sum() / sum(sizes)).item()},{val_loss},{accuracy}\n")
            log.flush()
            torch.save(method.network.state_dict(), folder / "last.pt")
            rounds.end()
    return trial.finish(accuracies, list(method.network.state_dict().values()))


if __name__ == "__main__":
    contend(Trial, run)
