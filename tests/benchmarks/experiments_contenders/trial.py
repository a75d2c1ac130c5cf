"""What the contenders of `experiments.py` share: the recipe, its data, and the plan that all of them follow.

Nothing here imports a federated library or Lightning, which would count into every contender's start-up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.contending import ProcessSetting, images_of

ROWS_OF_EVALUATION = 1024
PERTURBED = "perturbed"
"""The contender whose initial model is another by one rounding."""


class Recipe(NamedTuple):
    """An experiment: what the library's command line is given, and what the loops written by hand have to know of it.

    Args:
        configs: Files below the repository, the later over the earlier.
        method: The loop's.
        data: Folder of the data set.
        mean: Its mean.
        std: Its standard deviation.
        batch_size: Samples of a training batch.
        learning_rate: The clients'.
        momentum: The method's, of the server or of the clients.
        rank: Of the subspaces, where there are any.
        uniform: Whether clients count equally, and not by their samples.
    """

    configs: tuple[str, ...]
    method: str
    data: str = "MNIST"
    mean: float = 0.1307
    std: float = 0.3081
    batch_size: int = 32
    learning_rate: float = 0.018
    momentum: float = 0.8
    rank: int = 0
    uniform: bool = True


MNIST = "recipes/fedslop/mnist.yaml"
RECIPES = {
    "fedavg_m": Recipe((MNIST, "recipes/fedslop/fedavg_m.yaml"), "FedAvgM"),
    "fedslop": Recipe((MNIST,), "FedSLoP", rank=112),
    "fedmud": Recipe(
        ("recipes/fedmud/fmnist.yaml", "recipes/fedmud/bkd_aad.yaml"),
        "FedMUD",
        data="FashionMNIST",
        mean=0.2860,
        std=0.3530,
        batch_size=64,
        learning_rate=0.01,
        momentum=0.0,
    ),
    "flute": Recipe(
        (MNIST, "tests/benchmarks/experiments_contenders/flute.yaml"),
        "FedAvgM",
        batch_size=10,
        learning_rate=0.03,
        momentum=0.0,
        uniform=False,
    ),
}


class Plan(NamedTuple):
    """What the library drew for an experiment.

    Args:
        start: The global model's tensors, in the order of its state dict.
        rounds: For each round its clients' ids, ascending, and for each local epoch the order of the client's samples.
        samples: Sample indices of all clients, whether drawn or not.
        seeds: For each round, and one more, the seed of each tensor that a method draws, by name.
        init_scale: Largest number of a factor that is drawn, by the layer's name.
    """

    start: list[Tensor]
    rounds: list[list[tuple[int, list[Tensor]]]]
    samples: list[Tensor]
    seeds: list[dict[str, int]]
    init_scale: dict[str, float]


@dataclass(frozen=True)
class Trial(ProcessSetting):
    """One contender's run of an experiment.

    Attributes:
        experiment: Name of the recipe.
        folder: Where the contender writes, and what all contenders share lies one above.
        arguments: Further words for the library's command line.
        quick: Whether only few images are kept, to try the benchmark itself.
    """

    experiment: str = ""
    folder: str = ""
    arguments: list[str] = field(default_factory=list)
    quick: bool = False

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.experiment]

    @property
    def plan_file(self) -> Path:
        return Path(self.folder).parent / "plan.pt"

    def plan(self) -> Plan:
        plan = Plan(*torch.load(self.plan_file))
        if self.contender == PERTURBED:
            return plan._replace(start=[rounded_up(each) for each in plan.start])
        return plan

    def images(self, train: bool) -> tuple[Tensor, Tensor]:
        """Normalised images, ``[samples, 1, 28, 28]``, and classes."""
        recipe = self.recipe
        images, classes = images_of(Path(self.root) / recipe.data, train, recipe.mean, recipe.std)
        images = images.view(-1, 1, 28, 28)
        kept = kept_when_quick(len(images)) if self.quick else slice(None)
        return images[kept], classes[kept]

    def evaluation_batches(self) -> list[tuple[Tensor, Tensor]]:
        images, classes = self.images(train=False)
        return list(zip(images.split(ROWS_OF_EVALUATION), classes.split(ROWS_OF_EVALUATION), strict=True))

    def finish(self, accuracies: list[float], tensors: list[Tensor]) -> dict[str, Any]:
        """Keep the final model, and return what the contender reports."""
        torch.save([tensor.detach().clone() for tensor in tensors], Path(self.folder) / "final.pt")
        return {"accuracy": accuracies[-1], "accuracies": accuracies}


def rounded_up(value: Tensor) -> Tensor:
    """Return numbers that are larger by one rounding; whole numbers stay."""
    return value * (1 + torch.finfo(value.dtype).eps) if value.is_floating_point() else value


def kept_when_quick(size: int, kept: int = 600) -> Tensor:
    """Return the images that the datamodule's ``limit_samples`` keeps."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(0))[:kept].sort().values


def load(network: nn.Module, values: list[Tensor]) -> nn.Module:
    network.load_state_dict(dict(zip(network.state_dict(), values, strict=True)))
    return network


def mlp(plan: Plan) -> nn.Module:
    weights = [value for value in plan.start if value.ndim == 2]
    layers: list[nn.Module] = [nn.Flatten()]
    for weight in weights:
        layers += [nn.Linear(weight.shape[1], weight.shape[0]), nn.ReLU()]
    return load(nn.Sequential(*layers[:-1]), plan.start)


@torch.no_grad()
def evaluate(network: nn.Module, tests: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Return mean loss and accuracy."""
    network.eval()
    loss, right, samples = torch.zeros(()), torch.zeros((), dtype=torch.long), 0
    for images, classes in tests:
        logits = network(images)
        loss += F.cross_entropy(logits, classes, reduction="sum")
        right += (logits.argmax(1) == classes).sum()
        samples += len(classes)
    network.train()
    return loss.item() / samples, right.item() / samples
