"""What validation between rounds takes, compared with a plain loop over the same tensors.

    python tests/benchmarks/evaluation.py [--data FOLDER] [--threads 1 2] [--json FILE]

The FedAvg-M experiment's model (784-128-10) is validated on 10,000 images in batches of 1,024 after each of a run's
rounds: under `FederatedLoop`, and by a plain loop that adds up loss and correct answers of the same batches, which it
has at hand. The plain loop runs right after each validation. Images are MNIST's
from ``--data``, or random ones. Given are medians over rounds, the first left out, for images that are normalised as
they are read and for a `TensorDataset`; "save" is one checkpoint. The limit is twice the plain loop; the exit status is
1 if that is not met.
"""

from __future__ import annotations

import argparse
import functools
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from json_option import add_json_option, write_json
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowrank import IID, FedAvgM, FederatedLoop
from lightning_lowrank.data import MNIST, VisionDataModule
from lightning_lowrank.models import MLP, Classifier

LIMIT = 2.0
ROUNDS = 8


class RandomImages(VisionDataModule):
    num_classes, image_shape, mean, std, mirror = 10, (1, 28, 28), (0.5,), (0.25,), False

    def load_images(self, train: bool) -> tuple[Tensor, Tensor]:
        draws = torch.Generator().manual_seed(int(train))
        pixels = torch.randint(256, (10_000, 1, 28, 28), generator=draws, dtype=torch.uint8)
        return pixels, torch.randint(10, (10_000,), generator=draws)


class Normalised(pl.LightningDataModule):
    """The images of another datamodule as tensors."""

    def __init__(self, images: VisionDataModule) -> None:
        super().__init__()
        self.images = images

    def setup(self, stage: str) -> None:
        self.images.setup(stage)
        batches = list(self.images.val_dataloader())
        self.tensors = TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True)))

    def train_dataloader(self) -> DataLoader:
        return self.images.train_dataloader()

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.tensors, batch_size=self.images.eval_batch_size)


class Clock(pl.Callback):
    """Times validations and checkpoints, and the plain loop after each validation."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.batches: list[list[Tensor]] = []

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            begin = time.perf_counter()
            result = function(*arguments, **keywords)
            self.seconds[name].append(time.perf_counter() - begin)
            return result

        return call

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        loop = trainer.fit_loop.epoch_loop.val_loop
        loop.run = self.timed("validation", loop.run)
        trainer.save_checkpoint = self.timed("checkpoint", trainer.save_checkpoint)
        self.batches = list(trainer.datamodule.val_dataloader())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.timed("plain", self.evaluate)(pl_module.network)

    def evaluate(self, network: torch.nn.Module) -> tuple[float, float]:
        network.eval()
        loss, correct, samples = torch.zeros(()), torch.zeros(()), 0
        with torch.inference_mode():
            for inputs, targets in self.batches:
                outputs = network(inputs)
                loss += cross_entropy(outputs, targets) * len(targets)
                correct += (outputs.argmax(1) == targets).sum()
                samples += len(targets)
        network.train()
        return loss.item() / samples, correct.item() / samples


def run(data: Any) -> dict[str, float]:
    """Return milliseconds of a validation, of a checkpoint, and of the plain loop."""
    clock = Clock()
    module = Classifier(MLP(784, hidden=[128], out_features=10), optimizer=functools.partial(torch.optim.SGD, lr=0.02))
    loop = FederatedLoop(FedAvgM(momentum=0.8), clients=50, clients_per_round=2, partition=IID(), summary=False)
    with tempfile.TemporaryDirectory() as folder:
        keep = [ModelCheckpoint(folder, "last"), ModelCheckpoint(folder, "best", monitor="val_acc", mode="max")]
        trainer = pl.Trainer(
            max_epochs=ROUNDS,
            accelerator="cpu",
            logger=False,
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[loop, clock, *keep],
        )
        trainer.fit(module, datamodule=data)
    seconds = {name: statistics.median(values[1:]) for name, values in clock.seconds.items()}
    return {name: 1000 * value for name, value in seconds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with MNIST in torchvision's layout")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    add_json_option(parser)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(0, verbose=False)

    def images() -> VisionDataModule:
        return MNIST(root=str(options.data), download=False) if options.data else RandomImages()

    kinds: dict[str, Callable[[], Any]] = {"images": images, "TensorDataset": lambda: Normalised(images())}
    found = []
    titles = ("threads", "plain", "ours", "ratio", "save")
    print(f"{'milliseconds':<18}" + "".join(f"{title:>9}" for title in titles))
    for threads in options.threads:
        torch.set_num_threads(threads)
        for kind, make in kinds.items():
            ours = run(make())
            row = {
                "kind": kind,
                "threads": threads,
                "plain_ms": ours["plain"],
                "ms": ours["validation"],
                "ratio": ours["validation"] / ours["plain"],
                "checkpoint_ms": ours["checkpoint"],
            }
            found.append(row)
            numbers = [f"{value:>9.2f}" for value in list(row.values())[2:]]
            print(f"{kind:<18}{threads:>9}" + "".join(numbers))
    met = all(row["ratio"] <= LIMIT for row in found)
    print(f"limit {LIMIT}: {'met' if met else 'NOT met'}")
    write_json(options.json, {"rows": found, "limit": LIMIT, "met": met})
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
