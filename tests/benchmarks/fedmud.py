"""FashionMNIST of FedMUD's comparison (000) in plain PyTorch: FedPara, EF21-P and FedBAT, and what is open of them.

The division, the cohorts, the orders of the samples and the seeds of the draws are this package's; nothing else is. It
prints the test accuracy of the server's model and, where they differ, of the copy that the clients have, for
``recipes/fedmud/RESULTS.md``:

    python tests/benchmarks/fedmud.py --data ../shared/data --method EF21-P --positions round --rounds 10

``--against`` trains the package's recipe from the same initial weights instead, and prints the largest difference
between the weights of the two after the rounds:

    python tests/benchmarks/fedmud.py --data ../shared/data --method FedBAT --against --rounds 1 --cohort 3
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from json_option import add_json_option, write_json
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets import FashionMNIST

from lightning_lowrank.federated.data import IID, Dirichlet
from lightning_lowrank.seeding import derive_seed, generator

ROOT = Path(__file__).parents[2]
CLIENTS, EPOCHS, BATCH = 100, 3, 64
MEAN, STD = 0.2860, 0.3530
CHANNELS = (1, 32, 64, 128, 256)
CONVERTED = tuple(f"blocks.{block}.conv.weight" for block in (1, 2, 3))
RHO, MAGNITUDES = 6.0, (5e-4, 5e-2)
Tensors = dict[str, Tensor]


def images(root: Path, train: bool) -> tuple[Tensor, Tensor]:
    split = FashionMNIST(root, train=train)
    pixels = ((split.data.float() / 255 - MEAN) / STD).unsqueeze(1)
    return pixels.contiguous(memory_format=torch.channels_last), split.targets


def initial(seed: int) -> tuple[Tensors, Tensors]:
    """Return the trained tensors and the statistics of the network of four convolutions."""
    draws = torch.Generator().manual_seed(seed)
    trained, statistics = Tensors(), Tensors()
    for block, (inputs, outputs) in enumerate(pairwise(CHANNELS)):
        trained[f"blocks.{block}.conv.weight"] = 0.01 * torch.randn(outputs, inputs, 3, 3, generator=draws)
        trained[f"blocks.{block}.norm.weight"] = torch.ones(outputs)
        trained[f"blocks.{block}.norm.bias"] = torch.zeros(outputs)
        statistics[f"blocks.{block}.norm.running_mean"] = torch.zeros(outputs)
        statistics[f"blocks.{block}.norm.running_var"] = torch.ones(outputs)
    trained["classifier.weight"] = 0.01 * torch.randn(10, CHANNELS[-1], generator=draws)
    return trained, statistics


def forward(x: Tensor, weights: Tensors, statistics: Tensors, training: bool) -> Tensor:
    for block in range(4):
        name = f"blocks.{block}"
        kernel = weights[f"{name}.conv.weight"].contiguous(memory_format=torch.channels_last)
        x = F.conv2d(x, kernel, padding=1)
        mean, variance = (statistics[f"{name}.norm.running_{each}"] for each in ("mean", "var"))
        x = F.batch_norm(x, mean, variance, weights[f"{name}.norm.weight"], weights[f"{name}.norm.bias"], training)
        x = F.max_pool2d(F.relu(x), 2)
    return F.linear(x.flatten(1), weights["classifier.weight"])


class Factors:
    """FedPara's weights: products of two, in Tucker's form or as matrices of (out · 3) × (in · 3) numbers."""

    def __init__(self, form: str, ranks: list[int], bound: float | None, seed: int) -> None:
        self.form, self.ranks, self.bound, self.seed = form, dict(zip(CONVERTED, ranks, strict=True)), bound, seed

    def start(self, trained: Tensors) -> Tensors:
        """Put uniform factors in the place of the three convolutions, whose weights have their bound or deviation."""
        draws = torch.Generator().manual_seed(self.seed + 1)
        found = Tensors()
        for name, value in trained.items():
            if name not in self.ranks:
                found[name] = value
                continue
            rank = self.ranks[name]
            outputs, inputs = value.shape[:2]
            shapes = {"U": (outputs, rank), "V": (inputs, rank), "T": (rank, rank, 3, 3)}
            if self.form == "matrix":
                shapes = {"U": (outputs * 3, rank), "V": (inputs * 3, rank)}
            # The variance s of each factor for which the product of the two has the deviation 0.01.
            terms = rank**2 if self.form == "tucker" else rank
            variance = (0.01 / terms) ** (1 / len(shapes))
            bound = math.sqrt(3 * variance) if self.bound is None else self.bound
            for number in (1, 2):
                for factor, shape in shapes.items():
                    drawn = torch.rand(shape, generator=draws) * 2 - 1
                    found[f"{name.removesuffix('weight')}factors.{factor}{number}"] = bound * drawn
        return found

    def composed(self, live: Tensors) -> Tensors:
        """Return the weights that the factors make."""
        found = {name: value for name, value in live.items() if ".factors." not in name}
        for name in self.ranks:
            terms = []
            for number in (1, 2):
                prefix = name.removesuffix("weight")
                left, right = (live[f"{prefix}factors.{side}{number}"] for side in "UV")
                if self.form == "tucker":
                    terms.append(torch.einsum("oa,acxy,ic->oixy", left, live[f"{prefix}factors.T{number}"], right))
                else:
                    terms.append((left @ right.T).view(left.shape[0] // 3, right.shape[0] // 3, 3, 3))
            found[name] = terms[0] * terms[1]
        return found


def signed(x: Tensor, alpha: Tensor, uniform: Tensor) -> Tensor:
    """Return plus or minus alpha, with the derivatives of FedBAT: straight through within ±alpha."""
    sign = torch.where(uniform < (x / alpha + 1) / 2, 1.0, -1.0)
    smooth = (x / alpha).clamp(-1, 1)
    return alpha * (smooth + (sign - smooth).detach())


def uniform_like(x: Tensor, draws: torch.Generator) -> Tensor:
    return torch.rand(x.shape, generator=draws, dtype=torch.float32)


class Loop:
    """The rounds of one method."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.seed = arguments, arguments.seed
        self.x, self.y = (part[: arguments.samples] for part in images(arguments.data, True))
        self.test = tuple(part[: arguments.test_samples] for part in images(arguments.data, False))
        division = IID() if arguments.division == "iid" else Dirichlet(0.3, min_samples=10, capped=True)
        self.parts = division.split(len(self.y), CLIENTS, self.seed, self.y)
        self.factors = None
        self.trained, self.statistics = initial(self.seed)
        if arguments.method == "FedPara":
            self.factors = Factors(arguments.form, arguments.ranks, arguments.bound, self.seed)
            self.trained = self.factors.start(self.trained)
        self.copy = {name: value.clone() for name, value in self.trained.items()}
        # What FedBAT binarises.
        self.binary = [name for name in self.trained if "norm" not in name]

    def cohort(self, number: int) -> list[int]:
        draws = generator(self.seed, "sampling", number)
        drawn = torch.multinomial(torch.ones(CLIENTS, dtype=torch.float64), 10, generator=draws)
        return sorted(drawn.tolist())[: self.arguments.cohort]

    def batches(self, number: int, client: int) -> Iterator[Tensor]:
        samples, draws = self.parts[client], generator(self.seed, "order", number, client)
        for _ in range(EPOCHS):
            yield from samples[torch.randperm(len(samples), generator=draws)].split(BATCH)

    def compressed(self, change: Tensors, number: int, client: int | None) -> Tensors:
        """Compress what a client sends or, without one, what the server sends."""
        arguments = self.arguments
        if arguments.method == "FedBAT":
            draws = generator(self.seed, "binarise", number, "down")
            # The smallest number is for the first round, in which nothing has changed.
            magnitudes = {name: x.abs().mean() + torch.finfo(x.dtype).tiny for name, x in change.items()}
            return {
                name: signed(x, magnitudes[name], uniform_like(x, draws)) if name in self.binary else x
                for name, x in change.items()
            }
        if arguments.method != "EF21-P":
            return change
        groups = [[name] for name in change] if arguments.per_tensor else [list(change)]
        found = Tensors()
        for group in groups:
            flat = torch.cat([change[name].reshape(-1) for name in group])
            count = max(1, round(arguments.share * len(flat)))
            if client is None:
                kept = flat.abs().topk(count).indices
            else:
                parts = (number, client) if arguments.positions == "client" else (number,)
                # The package's codec draws from the seed of its packet.
                seed = derive_seed(self.seed, "random-k", *parts, *group[: arguments.per_tensor])
                kept = torch.randperm(len(flat), generator=generator(seed, "random-k"))[:count]
            sparse = torch.zeros_like(flat)
            scale = len(flat) / count if client is not None and not arguments.unscaled else 1.0
            sparse[kept] = scale * flat[kept]
            sizes = [change[name].numel() for name in group]
            for name, part in zip(group, sparse.split(sizes), strict=True):
                found[name] = part.view_as(change[name])
        return found

    def client(self, number: int, client: int) -> tuple[Tensors, Tensors]:
        """Return what a client's change arrives as, and its statistics."""
        arguments, binarises = self.arguments, self.arguments.method == "FedBAT"
        live = {name: value.clone().requires_grad_() for name, value in self.copy.items()}
        statistics = {name: value.clone() for name, value in self.statistics.items()}
        exponents = {name: torch.zeros((), requires_grad=True) for name in self.binary if binarises}
        first = Tensors()
        batches = list(self.batches(number, client))
        for step, batch in enumerate(batches):
            used = dict(live)
            if binarises and step >= 0.5 * len(batches):
                draws = generator(self.seed, "binarise", number, client, step)
                for name in self.binary:
                    x = live[name] - self.copy[name]
                    first.setdefault(name, x.detach().abs().mean())
                    alpha = (first[name] * torch.exp(RHO * exponents[name])).clamp(*MAGNITUDES)
                    used[name] = self.copy[name] + signed(x, alpha, uniform_like(x, draws))
            if self.factors is not None:
                used = self.factors.composed(used)
            with torch.autocast("cpu", torch.bfloat16, enabled=arguments.bf16):
                logits = forward(self.x[batch], used, statistics, training=True)
            leaves = [*live.values(), *(exponents.values() if first else ())]
            loss = F.cross_entropy(logits.to(self.trained["classifier.weight"]), self.y[batch])
            gradients = torch.autograd.grad(loss, leaves)
            with torch.no_grad():
                torch._foreach_add_(leaves, gradients, alpha=-arguments.learning_rate)
        with torch.no_grad():
            change = {name: value - self.copy[name] for name, value in live.items()}
            if not binarises:
                return self.compressed(change, number, client), statistics
            draws = generator(self.seed, "binarise", number, client, "up")
            for name in self.binary:
                alpha = (first[name] * torch.exp(RHO * exponents[name])).clamp(*MAGNITUDES)
                change[name] = signed(change[name], alpha, uniform_like(change[name], draws))
            return change, statistics

    def round(self, number: int) -> None:
        """Send the model, train the cohort, and add the mean change."""
        if self.arguments.memory == "server":
            self.copy = self.next_copy(number)
        else:
            self.copy = self.trained
        cohort = self.cohort(number)
        arrived = [self.client(number, client) for client in cohort]
        weights = [1.0] * len(cohort)
        if self.arguments.weights == "batches":
            weights = [math.ceil(len(self.parts[client]) / BATCH) for client in cohort]
        shares = [weight / sum(weights) for weight in weights]
        changes, statistics = (
            {
                name: torch.stack([share * each[part][name] for share, each in zip(shares, arrived, strict=True)]).sum(
                    0
                )
                for name in arrived[0][part]
            }
            for part in (0, 1)
        )
        self.statistics = statistics
        if self.arguments.memory == "none":
            changes = self.compressed(changes, number + 1, None)
        base = self.trained if self.arguments.memory == "server" else self.copy
        self.trained = {name: value + changes[name] for name, value in base.items()}

    def next_copy(self, number: int) -> Tensors:
        """Return the copy that the clients have in a round."""
        if self.arguments.method not in ("EF21-P", "FedBAT") or (
            self.arguments.method == "FedBAT" and self.arguments.dense_down
        ):
            return self.trained
        difference = {name: value - self.copy[name] for name, value in self.trained.items()}
        sent = self.compressed(difference, number, None)
        return {name: value + sent[name] for name, value in self.copy.items()}

    @torch.no_grad()
    def accuracy(self, trained: Tensors) -> float:
        weights = trained if self.factors is None else self.factors.composed(trained)
        right = 0
        for x, y in zip(*(each.split(1000) for each in self.test), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.arguments.bf16):
                right += int((forward(x, weights, self.statistics, False).argmax(1) == y).sum())
        return right / len(self.test[1])

    def run(self) -> list[dict[str, float]]:
        """Take the rounds, and return the looks."""
        looks = []
        for number in range(self.arguments.rounds):
            self.round(number)
            if number + 1 < self.arguments.look_from:
                continue
            look = {"round": number + 1, "server": self.accuracy(self.trained)}
            if self.arguments.memory == "server" and self.arguments.method in ("EF21-P", "FedBAT"):
                look["copy"] = self.accuracy(self.next_copy(number + 1))
            looks.append(look)
            print(" ".join(f"{name} {value:g}" for name, value in look.items()), flush=True)
        return looks


def against(loop: Loop, arguments: argparse.Namespace) -> float:
    """Return the largest difference between this loop's tensors and the package's after the rounds."""
    import lightning as L

    from lightning_lowrank import EF21P, FedAvg, FedBAT, FederatedLoop, FromIndices, LowRank
    from lightning_lowrank.layers import Hadamard
    from lightning_lowrank.models import CNN4, Classifier

    algorithm = {
        "EF21-P": lambda: EF21P(arguments.share, arguments.share),
        "FedBAT": lambda: FedBAT(compress_down=not arguments.dense_down),
    }.get(arguments.method, FedAvg)()
    callbacks: list[L.Callback] = []
    if arguments.method == "FedPara":
        low_rank = LowRank(
            Hadamard(), budget=1 / 32, budget_rule="largest", role="weight", init="uniform", skip=["first", "last"]
        )
        callbacks.append(low_rank)
    federated = FederatedLoop(
        algorithm,
        clients=CLIENTS,
        participants=[[*loop.cohort(number)] for number in range(arguments.rounds)],
        partition=FromIndices([part.tolist() for part in loop.parts]),
        local_epochs=EPOCHS,
        weighting="uniform",
        seed=arguments.seed,
        summary=False,
    )
    found: Tensors = {}

    class Start(L.Callback):
        """Takes the initial weights over."""

        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            found.update({name: value.clone() for name, value in network.state_dict().items()})

    torch.manual_seed(arguments.seed)
    network = CNN4()
    module = Classifier(network, optimizer=partial(torch.optim.SGD, lr=arguments.learning_rate))
    trainer = L.Trainer(
        max_epochs=arguments.rounds,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[*callbacks, federated, Start()],
    )
    # In double precision: rounding errors of single precision grow tenfold in a few steps.
    loop.x = loop.x.double()
    trainer.fit(module.double(), DataLoader(TensorDataset(loop.x, loop.y), batch_size=BATCH, shuffle=True))
    loop.trained = {name: found[name] for name in loop.trained}
    loop.copy = dict(loop.trained)
    loop.statistics = {name: found[name] for name in loop.statistics}
    for number in range(arguments.rounds):
        loop.round(number)
    ours = network.state_dict()
    worst = {
        name: (ours[name] - value).abs().max().item() for name, value in {**loop.trained, **loop.statistics}.items()
    }
    for name, difference in worst.items():
        print(f"{name}: {difference:.1e} of {(ours[name] - found[name]).abs().max().item():.1e}")
    return max(worst.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--method", choices=["FedAvg", "FedPara", "EF21-P", "FedBAT"], required=True)
    parser.add_argument("--division", choices=["dirichlet", "iid"], default="dirichlet")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=0.03)
    parser.add_argument("--cohort", type=int, default=10, help="take the first of the ten clients of a round")
    parser.add_argument("--weights", choices=["uniform", "batches"], default="uniform")
    parser.add_argument("--share", type=float, default=1 / 32, help="EF21-P: of the numbers, in each direction")
    parser.add_argument(
        "--positions", choices=["client", "round"], default="client", help="EF21-P: what random positions are drawn for"
    )
    parser.add_argument("--per-tensor", action="store_true", help="EF21-P: choose positions in each tensor")
    parser.add_argument("--unscaled", action="store_true", help="EF21-P: send values as they are")
    parser.add_argument(
        "--memory",
        choices=["server", "none"],
        default="server",
        help="whether the server keeps what it has not sent, or its model is what the clients have",
    )
    parser.add_argument("--dense-down", action="store_true", help="FedBAT: send the model in full precision")
    parser.add_argument("--form", choices=["tucker", "matrix"], default="tucker", help="FedPara: of convolutions")
    parser.add_argument("--ranks", type=int, nargs=3, default=[2, 3, 6], help="FedPara: of the second to the fourth")
    parser.add_argument("--bound", type=float, help="FedPara: a of U(-a, a); by default a deviation of 0.01")
    parser.add_argument("--samples", type=int, help="first training images that are divided; by default all")
    parser.add_argument("--test-samples", type=int, help="first test images that are looked at; by default all")
    parser.add_argument("--bf16", action="store_true", help="convolutions in bfloat16")
    parser.add_argument("--look-from", type=int, default=1, help="first round that is judged")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--against", action="store_true")
    add_json_option(parser)
    arguments = parser.parse_args()
    loop = Loop(arguments)
    if arguments.against:
        print(f"largest difference {against(loop, arguments):.1e}")
        return
    looks = loop.run()
    for judged in [name for name in looks[-1] if name != "round"]:
        values = [look[judged] for look in looks]
        mean = sum(values[-5:]) / len(values[-5:])
        print(f"{judged}: best {100 * max(values):.2f}, mean of the last five {100 * mean:.2f}")
    write_json(arguments.json, looks)


if __name__ == "__main__":
    main()
