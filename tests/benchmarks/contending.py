"""A benchmark's contender on its own side: its setting, its turns, and how it says what it measured.

Nothing here imports a federated library or Lightning, which would count into every contender's start-up.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class ProcessSetting:
    """One contender's run, as it travels to the contender's process.

    Attributes:
        contender: Which of a script's contenders it is.
        root: Folder with the data sets.
        rounds: Rounds in all.
        block: Rounds that are computed between two waits; 0: the process never waits.
        threads: Threads of the process.
        began: When the interpreter was started, in seconds of `time.monotonic`, which processes share.
    """

    contender: str
    root: str
    rounds: int = 1
    block: int = 0
    threads: int = 1
    began: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))


Setting = TypeVar("Setting", bound=ProcessSetting)


def images_of(folder: Path, train: bool, mean: float, std: float) -> tuple[Tensor, Tensor]:
    """Return the normalised images, flat, and the classes of a data set in MNIST's files."""
    split = "train" if train else "t10k"
    pixels = np.fromfile(folder / "raw" / f"{split}-images-idx3-ubyte", dtype=np.uint8)[16:].reshape(-1, 784)
    classes = np.fromfile(folder / "raw" / f"{split}-labels-idx1-ubyte", dtype=np.uint8)[8:]
    return torch.from_numpy(pixels).float().div_(255).sub_(mean).div_(std), torch.from_numpy(classes).long()


class Rounds:
    """Reports a contender's rounds, and lets it wait for its turn between blocks of them.

    A round's time is that from the end of the round before it (of the wait before it) to its own end, so that nothing
    a library does between two rounds is left out. The first round is a block of its own.
    """

    def __init__(self, setting: ProcessSetting) -> None:
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


def contend(kind: Callable[..., Setting], run: Callable[[Setting, Rounds], dict[str, Any]]) -> None:
    """Run what the command line's setting, of some kind, says, and report what it returns or how it failed."""
    setting = kind(**json.loads(sys.argv[1]))
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
