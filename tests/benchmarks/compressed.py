"""Accuracy at equal bytes: changes compressed by several channels, both ways, beside low-rank training.

    python tests/benchmarks/compressed.py --data ../shared/data [--settings fmnist quickstart] [--channels NAME ...]
        [--seeds N ...] [--megabytes X ...] [--every N] [--json FILE]
    python tests/benchmarks/compressed.py --data ../shared/data --time [--channels dense rank_8]

``fmnist`` is 20,000 images of Fashion-MNIST on an MLP 784-200-200-10: 20 clients, all in each round, Dirichlet 0.3, 10
steps of 32 images, learning rate 0.1. ``quickstart`` is `recipes/quickstart.yaml`, dense. Every channel compresses both
ways, with error feedback; ``low_rank_training`` is the quickstart's method. Bytes are those of the ledger in both
directions, without the first broadcast. Shown is the mean over the seeds of the test accuracy (of validation in the
quickstart) after the last validated round that fits the bytes.

``--time`` prints the median seconds of a round of ``fmnist``, without validation, for each channel in turns: those on
the wall and those of the processor, and their ratio to the first channel's.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import lightning as L
import torch
from json_option import add_json_option, write_json
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets import FashionMNIST

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from lightning_lowrank import (  # noqa: E402
    BlockKronecker,
    Dirichlet,
    FedAvg,
    FederatedLoop,
    FedMUD,
    Half,
    LowRank,
    LowRankCodec,
    Quantize,
    TopK,
)
from lightning_lowrank.data import Digits  # noqa: E402
from lightning_lowrank.models import MLP, Classifier  # noqa: E402

FEEDBACK = {"error_feedback": True}
CHANNELS: dict[str, Callable[[], list[Any]]] = {
    "dense": list,
    "low_rank_training": list,
    "quantize_8": lambda: [Quantize(8, **FEEDBACK)],
    "quantize_4": lambda: [Quantize(4, **FEEDBACK)],
    "top_64_8": lambda: [TopK(1 / 64, **FEEDBACK), Quantize(8)],
    "top_64_4": lambda: [TopK(1 / 64, **FEEDBACK), Quantize(4)],
    "rank_4": lambda: [LowRankCodec(4, **FEEDBACK)],
    "rank_8": lambda: [LowRankCodec(8, **FEEDBACK)],
    "rank_8_8": lambda: [LowRankCodec(8, **FEEDBACK), Quantize(8)],
    "rank_4_8": lambda: [LowRankCodec(4, **FEEDBACK), Quantize(8)],
    "rank_4_4": lambda: [LowRankCodec(4, **FEEDBACK), Quantize(4)],
    "rank_4_4_64": lambda: [LowRankCodec(4, **FEEDBACK), Quantize(4, bucket_size=64), Half()],
    "rank_4_4_tensor": lambda: [LowRankCodec(4, **FEEDBACK), Quantize(4, bucket_size=None)],
    "rank_2_4": lambda: [LowRankCodec(2, **FEEDBACK), Quantize(4)],
    "svd_4_8": lambda: [LowRankCodec(4, method="svd", **FEEDBACK), Quantize(8)],
}
"""Names: the rank, or the share of a TopK, and the bits of what is left; the last number is a bucket's size."""


def clocks() -> torch.Tensor:
    """The seconds on the wall's clock and those of the processor."""
    return torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)


class Images(L.LightningDataModule):
    """The first 20,000 training images of Fashion-MNIST, and its test images to validate on."""

    def __init__(self, root: Path, eval_batch_size: int = 10_000) -> None:
        super().__init__()
        train, test = (FashionMNIST(root, train=flag) for flag in (True, False))
        self.train, self.test = (
            TensorDataset((data.data.float() / 255 - 0.286).div(0.353)[:, None], data.targets) for data in (train, test)
        )
        self.train = TensorDataset(*(tensor[:20_000] for tensor in self.train.tensors))
        self.eval_batch_size = eval_batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, batch_size=32, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.test, batch_size=self.eval_batch_size)


class Curve(L.Callback):
    """Bytes, accuracies and seconds of rounds; ends the fit once the bytes are sent."""

    def __init__(self, most: float, every: int) -> None:
        self.most, self.every, self.a_round, self.points, self.first = (
            most,
            every,
            0.0,
            list[tuple[float, float]](),
            0.0,
        )
        self.seconds: list[torch.Tensor] = []

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.begun = clocks()

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.seconds.append(clocks() - self.begun)
        figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if not trainer.current_epoch:
            self.first = figures["comm/down_bytes"]
        sent = (figures["comm/total_bytes"] - self.first) / 1e6
        if "val_acc" in figures and (trainer.current_epoch + 1) % self.every == 0:
            self.points.append((sent, figures["val_acc"]))
        self.a_round = sent / (trainer.current_epoch + 1)
        trainer.should_stop = sent > self.most

    def at(self, megabytes: float) -> float | None:
        """The accuracy after the last round within so many megabytes."""
        found = [accuracy for sent, accuracy in self.points if sent <= megabytes]
        return found[-1] if found else None


def fit(setting: str, channel: str, seed: int, data: Path, most: float, every: int, rounds: int = 100_000) -> Curve:
    """Run one experiment until its bytes are sent."""
    L.seed_everything(seed, verbose=False)
    low_rank = channel == "low_rank_training"
    if setting == "fmnist":
        network, images = MLP(784, [200, 200], 10), Images(data)
        settings: dict[str, Any] = {"clients": 20, "local_steps": 10, "partition": Dirichlet(0.3, min_samples=10)}
    else:
        network, images = MLP(64, [256, 256], 10), Digits(batch_size=16)
        settings = {"clients": 20, "clients_per_round": 10, "local_epochs": 2}
        settings["partition"] = Dirichlet(0.5, min_samples=5)
    module = Classifier(network, optimizer=partial(torch.optim.SGD, lr=0.1))
    make = CHANNELS[channel]
    settings |= {"uplink": make(), "downlink": make(), "seed": seed, "summary": False, "execution": "vectorized"}
    loop = FederatedLoop(FedMUD(reset_interval=1) if low_rank else FedAvg(), **settings)
    curve = Curve(most, every)
    converted = LowRank(BlockKronecker(), budget=1 / 16, role="update", decouple=True, skip=["last"], summary=False)
    L.Trainer(
        max_epochs=rounds,
        check_val_every_n_epoch=every,
        callbacks=[*([converted] if low_rank else []), loop, curve],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        accelerator="cpu",
    ).fit(module, images)
    return curve


def table(args: argparse.Namespace) -> None:
    """Print accuracies by channel and bytes."""
    figures = []
    for setting in args.settings:
        sizes = args.megabytes or ([10, 25, 50] if setting == "fmnist" else [0.5, 1, 2, 4])
        print(f"{setting:<18}{'KB a round':>11}" + "".join(f"{size:>14} MB" for size in sizes), flush=True)
        for channel in args.channels or CHANNELS:
            curves = [fit(setting, channel, seed, args.data, max(sizes), args.every) for seed in args.seeds]
            cells = []
            for size in sizes:
                found = [value for curve in curves if (value := curve.at(size)) is not None]
                whole = len(found) == len(curves)
                spread = stdev(found) if len(found) > 1 else 0.0
                cells.append(f"{mean(found):.3f} ± {spread:.3f}" if whole else "–")
                figures.append({"setting": setting, "channel": channel, "megabytes": size, "accuracies": found})
            print(
                f"{channel:<18}{1e3 * curves[0].a_round:>11.1f}" + "".join(f"{cell:>17}" for cell in cells), flush=True
            )
    write_json(args.json, figures)


def times(args: argparse.Namespace) -> None:
    """Print the seconds of a round by channel."""
    channels = args.channels or ["dense", "rank_8"]
    seconds: dict[str, list[torch.Tensor]] = {channel: [] for channel in channels}
    for turn in range(args.turns):
        for channel in channels:
            seconds[channel] += fit("fmnist", channel, turn, args.data, 1e9, args.rounds + 1, args.rounds).seconds[2:]
    medians = {channel: torch.stack(found).median(0).values.tolist() for channel, found in seconds.items()}
    print(f"{'':<18}{'wall':>9}   ratio{'processor':>15}   ratio")
    for channel, found in medians.items():
        cells = [
            f"{1e3 * one:9.1f} ms {one / first:5.2f}" for one, first in zip(found, medians[channels[0]], strict=True)
        ]
        print(f"{channel:<18}" + "   ".join(cells))
    write_json(args.json, medians)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with FashionMNIST")
    parser.add_argument("--settings", nargs="+", default=["fmnist", "quickstart"], choices=["fmnist", "quickstart"])
    parser.add_argument("--channels", nargs="+", choices=CHANNELS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--megabytes", type=float, nargs="+")
    parser.add_argument("--every", type=int, default=1, help="rounds between validations")
    parser.add_argument("--time", action="store_true", help="seconds of a round in place of accuracies")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of each run of --time")
    parser.add_argument("--turns", type=int, default=3, help="runs of each channel of --time")
    add_json_option(parser)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    times(args) if args.time else table(args)


if __name__ == "__main__":
    main()
