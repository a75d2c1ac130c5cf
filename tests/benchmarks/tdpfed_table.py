"""FedAvg, random upload and pFedMe in the setting of TDPFed's Table III (001, MNIST), in plain PyTorch.

    python tests/benchmarks/tdpfed_table.py --data ../shared/data
    python tests/benchmarks/tdpfed_table.py --data ../shared/data --inputs pixel --learning-rate 0.1

The defaults are those of ``recipes/tdpfed/mnist.yaml``; each option changes one thing that the paper leaves open. All
clients are one batch of matrix products, with gradients written out. Nothing of this package is used but the division,
so a figure that both give is no error of the package.

A look prints several readings of "accuracy", each in percent: ``own`` (the model sent to the clients, mean over the
clients of its accuracy on each one's test samples), ``pooled`` (the same, clients weighted by their number of test
samples), ``all`` (that model on the whole test set), and ``personal`` (each client's own model: after its local steps,
and for pFedMe the personalised model). The last line has the best and the last look of each.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchvision.datasets import MNIST

from lightning_lowrank import ClientIndices, LabelCount
from lightning_lowrank.federated.data.evaluation_samples import hold_out, matched_labels

CLIENTS, HIDDEN, CLASSES = 20, 100, 10
READINGS = ("own", "pooled", "all", "personal")


def main() -> None:
    """Run one variant and print its looks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--method", choices=["fedavg", "pfedme"], default="fedavg")
    parser.add_argument("--share", type=float, default=1.0, help="share of the coordinates that cross each way")
    parser.add_argument("--rounds", type=int, default=800)
    parser.add_argument("--every", type=int, default=10, help="rounds between looks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--division", choices=["drawn", "even", "neighbours"], default="drawn")
    parser.add_argument("--samples", type=int, help="samples of each client; default all")
    parser.add_argument("--uneven", action="store_true", help="sizes drawn as pFedMe's release does")
    parser.add_argument("--held-out", type=float, help="test on this share of a client's own samples")
    parser.add_argument("--inputs", choices=["unit", "normal", "half", "pixel"], default="unit")
    parser.add_argument("--loss", choices=["mean", "sum"], default="mean")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--decay", type=float, default=1.0, help="factor of the learning rate in each round")
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--nesterov", action="store_true")
    parser.add_argument("--steps", type=int, default=23)
    parser.add_argument("--epochs", type=int, help="whole local epochs in place of steps (equal sizes assumed)")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--replacement", action="store_true", help="batches drawn with replacement")
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--equal-weights", action="store_true")
    parser.add_argument("--init", choices=["torch", "kaiming", "xavier"], default="torch")
    parser.add_argument("--softmax", action="store_true", help="a softmax before the loss as well")
    parser.add_argument("--personal-rate", type=float, default=0.05)
    parser.add_argument("--personal-steps", type=int, default=5)
    parser.add_argument("--pull", type=float, default=15.0, help="pFedMe's lambda")
    args = parser.parse_args()
    Table(args).run()


class Table:
    """The data, the clients and the stacked weights of one variant."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.draws = torch.Generator().manual_seed(args.seed)
        train, test = (MNIST(args.data, train=flag) for flag in (True, False))
        self.train_inputs, self.test_inputs = self._scale(train.data, test.data)
        self.train_labels, self.test_labels = train.targets, test.targets
        clients = self._divide()
        if args.held_out:
            clients, self.tests = hold_out(clients, args.held_out, args.seed)
            self.pool, self.pool_labels = self.train_inputs, self.train_labels
        else:
            self.tests = matched_labels(clients, self.train_labels, self.test_labels)
            self.pool, self.pool_labels = self.test_inputs, self.test_labels
        self.clients = list(clients)
        self.sizes = torch.tensor([len(client) for client in self.clients], dtype=torch.float32)
        self.weights = torch.ones(CLIENTS) / CLIENTS if args.equal_weights else self.sizes / self.sizes.sum()
        self.model = self._initial()
        self.local = [value.expand(CLIENTS, *value.shape).clone() for value in self.model]

    def _scale(self, train: Tensor, test: Tensor) -> list[Tensor]:
        pair = [values.flatten(1).float() / 255 for values in (train, test)]
        match self.args.inputs:
            case "normal":
                pair = [(values - 0.1307) / 0.3081 for values in pair]
            case "half":
                pair = [(values - 0.5) / 0.5 for values in pair]
            case "pixel":
                every = torch.cat(pair) * 255
                mean, deviation = every.mean(0), every.std(0, correction=0)
                pair = [(values * 255 - mean) / (deviation + 0.001) for values in pair]
        if self.args.bias:
            pair = [torch.cat([values, torch.ones(len(values), 1)], 1) for values in pair]
        return pair

    def _divide(self) -> ClientIndices:
        args, labels = self.args, self.train_labels
        if args.division == "neighbours":
            held = [{client % CLASSES, (client + 1) % CLASSES} for client in range(CLIENTS)]
        else:
            division = LabelCount(2, balanced=args.division == "even")
            clients = division.split(len(labels), clients=CLIENTS, seed=args.seed, labels=labels)
            if args.samples is None and not args.uneven:
                return clients
            held = [set(labels[client].unique().tolist()) for client in clients]
        parts: list[list[Tensor]] = [[] for _ in range(CLIENTS)]
        for label in range(CLASSES):
            holders = [client for client in range(CLIENTS) if label in held[client]]
            found = (labels == label).nonzero().flatten()
            found = found[torch.randperm(len(found), generator=self.draws)]
            if args.uneven:
                left, counts = len(found), []
                for _ in holders[1:]:
                    low, high = left // (len(holders) + 1), left // 2
                    counts.append(int(torch.randint(low, max(high, low + 1), (), generator=self.draws)))
                    left -= counts[-1]
                pieces = found.split([*counts, left])
            else:
                pieces = found.tensor_split(len(holders))
            for client, piece in zip(holders, pieces, strict=True):
                parts[client].append(piece if args.samples is None else piece[: args.samples // 2])
        return ClientIndices([torch.cat(part).sort().values for part in parts], len(labels))

    def _initial(self) -> list[Tensor]:
        """Return the weights, each of shape ``[inputs, outputs]``; a bias is the last row of its layer."""
        weights = []
        for inputs, outputs in ((784, HIDDEN), (HIDDEN, CLASSES)):
            squares = {"torch": 1 / inputs, "kaiming": 6 / inputs, "xavier": 6 / (inputs + outputs)}
            bound = squares[self.args.init] ** 0.5
            rows = inputs + self.args.bias
            weights.append((torch.rand(rows, outputs, generator=self.draws) * 2 - 1) * bound)
            if self.args.bias and self.args.init != "torch":
                weights[-1][-1] = 0
        return weights

    def _forward(self, inputs: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
        hidden = (inputs @ weights[0]).relu()
        if self.args.bias:
            hidden = torch.cat([hidden, hidden.new_ones(*hidden.shape[:-1], 1)], -1)
        return hidden, hidden @ weights[1]

    def _gradients(self, inputs: Tensor, targets: Tensor, weights: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return each weight's gradient as a pair of factors: their batched product is the gradient."""
        hidden, logits = self._forward(inputs, weights)
        if self.args.softmax:
            logits = logits.detach().requires_grad_()
            losses = cross_entropy(logits.softmax(-1).flatten(0, 1), targets.flatten(), reduction="sum")
            (error,) = torch.autograd.grad(losses, logits)
        else:
            error = logits.softmax(-1)
            error.scatter_add_(-1, targets[..., None], error.new_full((*targets.shape, 1), -1.0))
        if self.args.loss == "mean":
            error /= inputs.shape[1]
        inner = (error @ weights[1][:, :HIDDEN].mT) * (hidden[..., :HIDDEN] > 0)
        return [(inputs.mT, inner), (hidden.mT, error)]

    def _batches(self, steps: int) -> Tensor:
        """Return the samples of one round, ``[steps, clients, batch]``: a fresh order for each client."""
        needed, rows = steps * self.args.batch, []
        for client in self.clients:
            if self.args.replacement:
                picked = torch.randint(len(client), (needed,), generator=self.draws)
            else:
                orders = -(-needed // len(client))
                picked = torch.cat([torch.randperm(len(client), generator=self.draws) for _ in range(orders)])[:needed]
            rows.append(client[picked].view(steps, self.args.batch))
        return torch.stack(rows, 1)

    def _received(self) -> list[Tensor]:
        """Return each client's weights at the start of its round."""
        stacked = [value.expand(CLIENTS, *value.shape).clone() for value in self.model]
        if self.args.share < 1:
            return [torch.where(self._crosses(new), new, old) for new, old in zip(stacked, self.local, strict=True)]
        return stacked

    def _crosses(self, stacked: Tensor) -> Tensor:
        """Draw which coordinates of each client cross."""
        return torch.rand(stacked.shape, generator=self.draws) < self.args.share

    def _round(self, rate: float) -> list[Tensor]:
        args = self.args
        steps = args.steps if args.epochs is None else int(args.epochs * self.sizes.mean()) // args.batch
        local = self._received()
        buffers = [torch.zeros_like(value) for value in local]
        self.personal = [value.clone() for value in local]
        for indices in self._batches(steps):
            inputs = self.train_inputs.index_select(0, indices.flatten()).view(CLIENTS, args.batch, -1)
            targets = self.train_labels[indices]
            if args.method == "pfedme":
                for _ in range(args.personal_steps):
                    gradients = self._gradients(inputs, targets, self.personal)
                    for value, anchor, (left, right) in zip(self.personal, local, gradients, strict=True):
                        value.lerp_(anchor, args.personal_rate * args.pull)
                        value.baddbmm_(left, right, alpha=-args.personal_rate)
                for value, theta in zip(local, self.personal, strict=True):
                    value.lerp_(theta, rate * args.pull)
                continue
            for value, buffer, (left, right) in zip(
                local, buffers, self._gradients(inputs, targets, local), strict=True
            ):
                if args.momentum:
                    buffer.baddbmm_(left, right, beta=args.momentum)
                    value.sub_(buffer, alpha=rate * (args.momentum if args.nesterov else 1.0))
                    if args.nesterov:
                        value.baddbmm_(left, right, alpha=-rate)
                else:
                    value.baddbmm_(left, right, alpha=-rate)
        return local

    def _average(self, local: list[Tensor]) -> None:
        old = self.model
        self.model = [torch.einsum("c,c...->...", self.weights, value) for value in local]
        if self.args.share < 1:
            self.local = local
            for place, value in enumerate(local):
                sent = self._crosses(value) * self.weights[:, None, None]
                total = sent.sum(0)
                self.model[place] = torch.where(total > 0, (sent * value).sum(0) / total, old[place])

    def _look(self, own_models: list[Tensor]) -> dict[str, float]:
        right = self._forward(self.pool, self.model)[1].argmax(1) == self.pool_labels
        whole = self._forward(self.test_inputs, self.model)[1].argmax(1) == self.test_labels
        each = torch.stack([right[samples].float().mean() for samples in self.tests])
        counts = torch.tensor([float(len(samples)) for samples in self.tests])
        personal = []
        for client, samples in enumerate(self.tests):
            logits = self._forward(self.pool[samples], [value[client] for value in own_models])[1]
            personal.append((logits.argmax(1) == self.pool_labels[samples]).float().mean())
        found = (each.mean(), (each * counts).sum() / counts.sum(), whole.float().mean(), torch.stack(personal).mean())
        return {name: 100 * float(value) for name, value in zip(READINGS, found, strict=True)}

    def run(self) -> None:
        """Make the rounds."""
        given = {name: value for name, value in vars(self.args).items() if name != "data"}
        print(given, f"sizes {self.sizes.min():.0f} to {self.sizes.max():.0f}", flush=True)
        best: dict[str, tuple[float, int]] = {}
        started, rate = time.perf_counter(), self.args.learning_rate
        for number in range(1, self.args.rounds + 1):
            local = self._round(rate)
            self._average(local)
            rate *= self.args.decay
            if number % self.args.every == 0 or number == self.args.rounds:
                look = self._look(self.personal if self.args.method == "pfedme" else local)
                for name, value in look.items():
                    best[name] = max(best.get(name, (value, number)), (value, number), key=lambda pair: pair[0])
                print(f"round {number}:", " ".join(f"{name} {value:.2f}" for name, value in look.items()), flush=True)
        print("best", " ".join(f"{name} {value:.2f} ({number})" for name, (value, number) in best.items()))
        print("last", " ".join(f"{name} {value:.2f}" for name, value in look.items()))
        print(f"{(time.perf_counter() - started) / self.args.rounds:.3f} seconds a round", flush=True)


if __name__ == "__main__":
    main()
