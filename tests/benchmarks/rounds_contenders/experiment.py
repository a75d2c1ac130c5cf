"""What the contenders of `rounds.py` share: the data, its partition, the model, and how they say what they measured.

Nothing here imports a federated library or Lightning, which would count into every contender's start-up.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MEAN, STD = 0.1307, 0.3081


@dataclass(frozen=True)
class Setting:
    """One contender's run of an experiment, as it travels to the contender's process.

    Attributes:
        contender: Which of a script's contenders it is.
        root: Folder with ``MNIST/raw`` in it.
        model: ``"dense"``, ``"factors"`` (weights of rank 8) or ``"update"`` (of rank 4, to a frozen base).
        clients: Number of clients.
        samples: Samples of each.
        cohort: Clients in a round.
        rounds: Rounds in all.
        block: Rounds that are computed between two waits; 0: the process never waits.
        threads: Threads of the process.
        began: When the interpreter was started, in seconds of `time.monotonic`, which processes share.
    """

    contender: str
    root: str
    model: str = "dense"
    clients: int = 1
    samples: int = 1
    cohort: int = 1
    rounds: int = 1
    block: int = 0
    threads: int = 1
    began: float = 0.0
    batch_size: int = 32
    learning_rate: float = 0.1
    seed: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def steps_per_client(self) -> int:
        return -(-self.samples // self.batch_size)

    @property
    def steps_per_round(self) -> int:
        return self.cohort * self.steps_per_client

    def client_indices(self) -> list[Tensor]:
        """Sample indices of each client; the order in them is the one in which every contender trains."""
        order = torch.randperm(60_000, generator=torch.Generator().manual_seed(self.seed))
        return list(order[: self.clients * self.samples].split(self.samples))

    def cohorts(self) -> list[list[int]]:
        """Clients of each round, ascending."""
        draws = torch.Generator().manual_seed(self.seed + 1)
        return [
            sorted(torch.randperm(self.clients, generator=draws)[: self.cohort].tolist()) for _ in range(self.rounds)
        ]

    def batches(self, indices: Tensor) -> Iterator[Tensor]:
        yield from indices.split(self.batch_size)

    def mnist(self, train: bool) -> tuple[Tensor, Tensor]:
        """Normalised images, flat, and classes."""
        folder, split = Path(self.root) / "MNIST" / "raw", "train" if train else "t10k"
        pixels = np.fromfile(folder / f"{split}-images-idx3-ubyte", dtype=np.uint8)[16:].reshape(-1, 784)
        classes = np.fromfile(folder / f"{split}-labels-idx1-ubyte", dtype=np.uint8)[8:]
        return torch.from_numpy(pixels).float().div_(255).sub_(MEAN).div_(STD), torch.from_numpy(classes).long()

    def network(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

    def low_rank(self) -> list[Any]:
        """The `LowRank` that makes the model, if it is not the dense one."""
        if self.model == "dense":
            return []
        from lightning_lowrank import LowRank, MatrixProduct

        form: dict[str, Any] = {"factors": {"role": "weight", "rank": 8}, "update": {"role": "update", "rank": 4}}
        return [LowRank(MatrixProduct(), **form[self.model], seed=self.seed, summary=False)]

    def module(self) -> nn.ModuleDict:
        """The model with the parameter names of the Lightning module, of which the factors' draws depend."""
        module = nn.ModuleDict({"net": self.network()})
        for low_rank in self.low_rank():
            low_rank.convert(module)
        return module

    @torch.no_grad()
    def accuracy(self, network: Callable[[Tensor], Tensor]) -> float:
        images, classes = self.mnist(train=False)
        return (network(images).argmax(1) == classes).float().mean().item()


class Rounds:
    """Reports a contender's rounds, and lets it wait for its turn between blocks of them.

    A round's time is that from the end of the round before it (of the wait before it) to its own end, so that nothing
    a library does between two rounds is left out. The first round is a block of its own.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._seconds: list[float] = []
        # What libraries print must not get between the messages.
        self._messages = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def send(self, **message: Any) -> None:
        self._messages.write(json.dumps(message) + "\n")
        self._messages.flush()

    def begin(self) -> None:
        """Say that the first round begins."""
        self.send(startup=time.monotonic() - self.setting.began)
        self._mark = time.perf_counter()

    def end(self) -> None:
        """Note the end of a round, and wait if it ends a block."""
        self._seconds.append(time.perf_counter() - self._mark)
        block = self.setting.block
        if block and (len(self._seconds) - 1) % block == 0:
            self.send(seconds=self._seconds[-block if len(self._seconds) > 1 else -1 :])
            self.wait()
        self._mark = time.perf_counter()

    def wait(self) -> None:
        if not sys.stdin.readline():
            raise SystemExit("the benchmark has ended")

    def finish(self, **found: Any) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.send(
            finished=True,
            seconds=self._seconds,
            peak_kib=peak // 1024 if sys.platform == "darwin" else peak,
            **found,
        )


def contend(run: Callable[[Setting, Rounds], dict[str, Any]]) -> None:
    """Run what the command line's setting says, and report what it returns or how it failed."""
    setting = Setting(**json.loads(sys.argv[1]))
    torch.set_num_threads(setting.threads)
    rounds = Rounds(setting)
    try:
        rounds.finish(**run(setting, rounds))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("lightning_lowrank"):
            raise
        rounds.send(skipped=f"{error.name} is not installed")
    except Exception as error:
        traceback.print_exc()
        rounds.send(error=f"{type(error).__name__}: {error}".strip().split("\n")[0])
        sys.exit(1)
