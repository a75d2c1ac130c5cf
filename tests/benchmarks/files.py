"""Files of many clients: how long they take from the file to the first round, and how much memory.

    python tests/benchmarks/files.py [--json FILE]

Shown are

- a LEAF file of 3,400 users with 25 images of 784 numbers each, some 430 MB: seconds until it is read and until the
  first training step, and the peak of memory while it is read, over that of the samples (at most 30 s, and 1.5 times),
- the division of 500,000 samples among 100,000 clients by `ByKey`, and by `FromIndices` from owners, CSV and JSON (at
  most 5 s each),
- three rounds of 100,000 clients with ``personal_test="by_client"``, of whom ``personal_clients=1000`` are judged.

The exit status is 1 if a limit is not met. The machine must have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import psutil
import torch
from json_option import add_json_option, write_json
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowrank import ByKey, FedAvg, FederatedLoop, FromIndices
from lightning_lowrank.data import LEAF
from lightning_lowrank.models import MLP, Classifier

USERS, IMAGES, PIXELS = 3_400, 25, 784
KEYS, SAMPLES = 100_000, 500_000
LIMITS = {"first step s": 30.0, "peak over samples": 1.5, "by key s": 5.0, "owners s": 5.0, "csv s": 5.0, "json s": 5.0}


def write_leaf(file: Path) -> None:
    draws = np.random.default_rng(0)
    texts = [f"{value:.4f}" if value < 0.5 else "1.0" for value in draws.random(100_000)]
    names = [f"f{user:04d}_{user % 50:02d}" for user in range(USERS)]
    with open(file, "w") as out:
        out.write(json.dumps({"users": names, "num_samples": [IMAGES] * USERS})[:-1] + ', "user_data": {')
        for user, name in enumerate(names):
            starts = draws.integers(0, len(texts) - PIXELS, IMAGES)
            images = ", ".join(f"[{', '.join(texts[start : start + PIXELS])}]" for start in starts)
            labels = draws.integers(0, 62, IMAGES).tolist()
            out.write(f'{", " * bool(user)}"{name}": {{"x": [{images}], "y": {labels}}}')
        out.write("}}")


class FirstStep(pl.Callback):
    def on_train_batch_end(self, *arguments: Any) -> None:
        self.time = vars(self).get("time", time.perf_counter())


def trainer(*callbacks: pl.Callback, rounds: int = 1) -> pl.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(max_epochs=rounds, callbacks=list(callbacks), accelerator="cpu", num_sanity_val_steps=0, **quiet)


def measure_leaf(folder: Path) -> dict[str, float]:
    write_leaf(folder / "all.json")
    process, ended = psutil.Process(), threading.Event()
    before = process.memory_info().rss
    peaks = [before]

    def watch() -> None:
        while not ended.wait(0.01):
            peaks[0] = max(peaks[0], process.memory_info().rss)

    watching = threading.Thread(target=watch)
    watching.start()
    began = time.perf_counter()
    data = LEAF(str(folder / "all.json"))
    data.setup()
    read = time.perf_counter() - began
    ended.set()
    watching.join()
    assert data.train_set is not None
    tensors = data.train_set.dataset.tensors  # type: ignore[attr-defined]
    loop = FederatedLoop(FedAvg(), clients_per_round=10, partition=ByKey("client"), summary=False)
    first = FirstStep()
    trainer(loop, first).fit(Classifier(MLP(in_features=PIXELS, hidden=[64], out_features=62)), data)
    return {
        "read s": read,
        "first step s": first.time - began,
        "peak over samples": (peaks[0] - before) / sum(tensor.nbytes for tensor in tensors),
    }


class Keyed(TensorDataset):
    """Has the name of each sample's client."""

    def __init__(self, names: np.ndarray) -> None:
        draws = torch.Generator().manual_seed(0)
        super().__init__(torch.randn(len(names), 8, generator=draws), torch.randint(4, (len(names),), generator=draws))
        self.client = names


def measure_divisions(folder: Path) -> dict[str, float]:
    names = np.array([f"client_{key}" for key in np.random.default_rng(0).integers(0, KEYS, SAMPLES)])
    data = Keyed(names)
    with open(folder / "owners.csv", "w") as out:
        out.write("client_id,sample\n")
        out.writelines(f"{name},{sample}\n" for sample, name in enumerate(names))
    order, (found, counts) = np.argsort(names, kind="stable"), np.unique(names, return_counts=True)
    parts = np.split(order, np.cumsum(counts)[:-1])
    lists = {name: part.tolist() for name, part in zip(found.tolist(), parts, strict=True)}
    (folder / "lists.json").write_text(json.dumps(lists))
    makes: dict[str, Callable[[], Any]] = {
        "by key s": lambda: ByKey("client"),
        "owners s": lambda: FromIndices(names.tolist()),
        "csv s": lambda: FromIndices(folder / "owners.csv"),
        "json s": lambda: FromIndices(folder / "lists.json"),
    }
    seconds = {}
    for name, make in makes.items():
        began = time.perf_counter()
        divided = make().split(data, None, 0)
        seconds[name] = time.perf_counter() - began
        assert len(divided) == len(found)
    return seconds


def measure_judging() -> dict[str, float]:
    names = np.array([f"client_{sample % KEYS}" for sample in range(SAMPLES)])
    train = DataLoader(Keyed(names), batch_size=32, shuffle=True)
    test = DataLoader(Keyed(names[: 2 * KEYS]), batch_size=4096)
    began = time.perf_counter()
    loop = FederatedLoop(
        FedAvg(), clients_per_round=10, partition=ByKey("client"), personal_test="by_client", personal_clients=1000,
        summary=False,
    )  # fmt: skip
    trainer(loop, rounds=3).fit(Classifier(MLP(in_features=8, hidden=[8], out_features=4)), train, test)
    return {"three judged rounds s": time.perf_counter() - began}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = {**measure_leaf(Path(folder)), **measure_divisions(Path(folder)), **measure_judging()}
    for name, value in found.items():
        limit = LIMITS.get(name)
        verdict = "" if limit is None else f"≤ {limit:g} {'met' if value <= limit else 'NOT met'}"
        print(f"{name:22} {value:7.2f}  {verdict}")
    write_json(options.json, found)
    return int(any(found[name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
