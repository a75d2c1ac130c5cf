"""The small federated runs on which `check_algorithm` tries a method."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowrank.callbacks.lowrank import LowRank
from lightning_lowrank.federated import Algorithm, FederatedLoop, FromIndices

__all__ = ["Experiment", "Norm", "Outcome", "blobs", "quiet", "small_module"]

Norm = Callable[[int], nn.Module]
"""Makes a normalization layer, given its number of features."""

GROUP_NORM: Norm = partial(nn.GroupNorm, 4)

# Samples of each client: clients with several, with many, and with a single one.
PARTS = [range(5), range(5, 18), range(18, 27), range(27, 28)]


def blobs(samples: int, seed: int = 7, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Samples of four classes, ``[samples, 6]``, each drawn around its class's centre, and their labels."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (samples,), generator=draws)
    centres = 2 * torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset((centres[labels] + torch.randn(samples, 6, generator=draws)).to(dtype), labels)


def _network(norm: Norm) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), norm(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


class _Module(pl.LightningModule):
    def __init__(self, network: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.network = network
        self._make_optimizer = optimizer

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self(inputs), targets)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        outputs = self(inputs)
        self.log("val_loss", nn.functional.cross_entropy(outputs, targets))
        self.log("val_acc", (outputs.argmax(1) == targets).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._make_optimizer(self.parameters())


def small_module(
    norm: Norm,
    network: Callable[[Norm], nn.Module] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
) -> pl.LightningModule:
    """A module for `check_algorithm`; a `functools.partial` of this function sets another network or optimizer.

    Args:
        norm: The layer of normalization to use, a function of the number of features.
        network: Makes its submodule ``network``, ``[batch, 6]`` to ``[batch, 4]``, given ``norm``. Default: linear
            layers of 16, 16 and 4 features, with ``norm`` after the first.
        optimizer: Makes its optimizer from the parameters. Default: SGD with learning rate 0.1.

    Example:
        >>> adam = partial(small_module, optimizer=torch.optim.Adam)
        >>> adam(nn.BatchNorm1d)(torch.zeros(2, 6)).shape
        torch.Size([2, 4])
    """
    return _Module((network or _network)(norm), optimizer or partial(torch.optim.SGD, lr=0.1))


@dataclass
class Outcome:
    """A finished run: its module, its trainer, and its `FederatedLoop`, if it was federated."""

    module: pl.LightningModule
    trainer: pl.Trainer
    loop: FederatedLoop | None

    @property
    def weights(self) -> dict[str, Tensor]:
        """The module's parameters and persistent buffers, by name."""
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}

    @property
    def traffic(self) -> dict[str, int]:
        """The counts of the run's `Ledger`, by name."""
        assert self.loop is not None
        return self.loop.ledger.state_dict()


@dataclass
class Experiment:
    """The method, module and settings that all runs of a check share.

    Args:
        make: Makes the method.
        make_module: Makes the module, given a layer of normalization to use.
        lowrank: Makes the `LowRank` callback, if any.
        settings: Arguments of `FederatedLoop` in addition to the check's own.
    """

    make: Callable[[], Algorithm]
    make_module: Callable[[Norm], pl.LightningModule] = small_module
    lowrank: Callable[[], LowRank] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def module(self, norm: Norm = GROUP_NORM, dtype: torch.dtype = torch.float32) -> pl.LightningModule:
        """A new module, always with the same weights, rounded to ``dtype``."""
        with isolate_rng():
            torch.manual_seed(3)
            return self.make_module(norm).to(dtype)

    def loop(self, parts: Sequence[Sequence[int]] = PARTS, **settings: Any) -> FederatedLoop:
        """A `FederatedLoop` in which each client has the samples of one of ``parts``."""
        defaults = {"partition": FromIndices(parts), "seed": 0, "summary": False, "on_client_error": "raise"}
        return FederatedLoop(self.make(), **{**defaults, **self.settings, **settings})

    def trainer(self, *callbacks: Callback, **settings: Any) -> pl.Trainer:
        """A trainer that writes and prints nothing, with the `LowRank` callback before ``callbacks``."""
        first = [] if self.lowrank is None else [self.lowrank()]
        defaults: dict[str, Any] = {
            "max_epochs": 3,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": any(isinstance(each, pl.callbacks.Checkpoint) for each in callbacks),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
        }
        return pl.Trainer(callbacks=[*first, *callbacks], **{**defaults, **settings})

    def run(
        self,
        loop: FederatedLoop | None,
        *callbacks: Callback,
        data: TensorDataset | None = None,
        norm: Norm = GROUP_NORM,
        shuffle: bool = True,
        drop_last: bool = False,
        checkpoint: Any = None,
        batch_size: int = 4,
        **settings: Any,
    ) -> Outcome:
        """Train a new module, in the dtype of ``data``, and return the finished run.

        Without a loop it is plain training. By default there are 28 samples. The run is resumed from ``checkpoint``,
        and ``settings`` are arguments of the trainer.
        """
        data = blobs(28) if data is None else data
        module = self.module(norm, data.tensors[0].dtype)
        trainer = self.trainer(*([] if loop is None else [loop]), *callbacks, **settings)
        batches = DataLoader(data, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last)
        trainer.fit(module, batches, DataLoader(blobs(40, seed=8), batch_size=40), ckpt_path=checkpoint)
        return Outcome(module, trainer, loop)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Lightning from printing and warning, and leave the global generators as they are."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with isolate_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
