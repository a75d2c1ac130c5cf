"""Small modules and data that know nothing of this package, and a FedAvg written without it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowrank.federated import loop
from lightning_lowrank.federated.local import LocalTraining
from lightning_lowrank.layers import CP, BlockKronecker, Hadamard, MatrixProduct
from tests.seeding import seed_torch

SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"


def needs_shared_data(name: str) -> pytest.MarkDecorator:
    folder = SHARED_DATA / name
    return pytest.mark.skipif(not folder.exists(), reason=f"the real {name} is not beside the repository")


def blobs(samples: int = 103, classes: int = 4, features: int = 6, seed: int = 7) -> TensorDataset:
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (samples,), generator=draws)
    centres = 2 * torch.randn(classes, features, generator=torch.Generator().manual_seed(1))
    return TensorDataset(centres[labels] + torch.randn(samples, features, generator=draws), labels)


FACTORIZATIONS = [
    MatrixProduct(),
    MatrixProduct("raw"),
    MatrixProduct("channel"),
    BlockKronecker(),
    BlockKronecker(grid=True),
    CP(),
    Hadamard(),
]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def network(
    features: int = 6, classes: int = 4, norm: type[nn.Module] | None = None, dropout: float = 0.0
) -> nn.Module:
    seed_torch(3)
    layers: list[nn.Module] = [nn.Linear(features, 16)]
    if norm is not None:
        layers.append(norm(16))
    layers += [nn.ReLU(), nn.Linear(16, 16), nn.ReLU()]
    if dropout:
        layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(16, classes))


class Module(pl.LightningModule):
    def __init__(
        self,
        net: nn.Module | None = None,
        optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1),
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        interval: str = "epoch",
    ) -> None:
        super().__init__()
        self.net = network() if net is None else net
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.interval = interval

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.net(inputs), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        outputs = self.net(inputs)
        self.log("val_loss", nn.functional.cross_entropy(outputs, targets))
        self.log("val_acc", (outputs.argmax(1) == targets).float().mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.make_scheduler(optimizer), "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Data(pl.LightningDataModule):
    def __init__(self, train: Any = None, shuffle: bool = True, **loader: Any) -> None:
        super().__init__()
        self.train = blobs() if train is None else train
        self.loader = {"batch_size": 8, "shuffle": shuffle, **loader}
        self.validation_loaders_made = 0

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, **self.loader)

    def val_dataloader(self) -> DataLoader:
        self.validation_loaders_made += 1
        return DataLoader(blobs(40, seed=8), batch_size=20)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(blobs(40, seed=9), batch_size=20)


def trainer(tmp_path: Path, *callbacks: pl.Callback, **arguments: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "max_epochs": 3,
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "default_root_dir": tmp_path,
        "callbacks": list(callbacks),
    }
    return pl.Trainer(**{**defaults, **arguments})


def fit(trainer: pl.Trainer, module: pl.LightningModule, *data: Any, **arguments: Any) -> pl.LightningModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, *data, **arguments)
    return module


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def seen(value: Any) -> Any:
    """Return what can be compared of what a hook is given."""
    if isinstance(value, Tensor):
        return value.detach().double().sum().item()
    if isinstance(value, dict):
        return {name: seen(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [seen(entry) for entry in value]
    return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name].cpu(), second[name].cpu()), name


def plain_fedavg(
    net: nn.Module,
    rounds: list[dict[int, list[tuple[Tensor, ...]]]],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    sizes: list[int],
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    clip: float | None = None,
    accumulate: int = 1,
) -> dict[str, Tensor]:
    """FedAvg in plain PyTorch: ``rounds`` holds for each round each client's batches."""
    optimizer = make_optimizer(net.parameters())
    schedule = None if scheduler is None else scheduler(optimizer)
    for clients in rounds:
        start = {name: value.clone() for name, value in net.state_dict().items()}
        sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in start.items()}
        total = 0
        for client in sorted(clients):
            net.load_state_dict(start)
            optimizer.state.clear()
            optimizer.zero_grad()
            batches = clients[client]
            for number, (inputs, targets) in enumerate(batches):
                (nn.functional.cross_entropy(net(inputs), targets) / accumulate).backward()
                if (number + 1) % accumulate == 0 or number + 1 == len(batches):
                    if clip is not None:
                        nn.utils.clip_grad_norm_(net.parameters(), clip)
                    optimizer.step()
                    optimizer.zero_grad()
            for name, value in net.state_dict().items():
                sums[name] += sizes[client] * value.double()
            total += sizes[client]
        net.load_state_dict(
            {
                name: (value / total if start[name].is_floating_point() else (value / total).round()).to(
                    start[name].dtype
                )
                for name, value in sums.items()
            }
        )
        if schedule is not None:
            schedule.step()
    return weights(net)


class Thaw(pl.callbacks.BaseFinetuning):
    """Thaws a module's first layer in one epoch."""

    def __init__(self, epoch: int = 1, **arguments: Any) -> None:
        super().__init__()
        self.epoch, self.arguments = epoch, arguments

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == self.epoch:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, **self.arguments)


class SaveEachStep(pl.Callback):
    """Saves a checkpoint after each local batch, most of them inside a client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        trainer.save_checkpoint(self.folder / f"step={trainer.global_step}.ckpt")


@contextmanager
def lightnings_own(active: bool = True) -> Iterator[None]:
    """Have local steps and the reading of validation batches be Lightning's own, with the same results."""
    with pytest.MonkeyPatch.context() as patch:
        if active:
            patch.setattr(LocalTraining, "_is_plain", lambda self: False)
            patch.setattr(loop, "read_on_device", lambda loader, data: None)
        yield


def warmed_up(
    tmp_path: Path, algorithm: Any, execution: str, *callbacks: pl.Callback, **arguments: Any
) -> tuple[dict[str, Tensor], loop.FederatedLoop]:
    """Fit a module with unused parameters, whose learning rate is 0 in the first of three rounds.

    Returns:
        The weights at the end, and the loop.
    """
    module = Module(
        **{"scheduler": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: min(epoch, 1)), **arguments}
    )
    module.unused = nn.BatchNorm1d(3)
    federated = loop.FederatedLoop(algorithm, clients=3, execution=execution, summary=False)
    fit(trainer(tmp_path, *callbacks, federated), module, Data())
    return weights(module), federated
