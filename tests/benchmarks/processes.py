"""The contenders of a benchmark as processes: they run side by side, wait for their turn, and say what they measured.

A contender's own side of this is `contending.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from tests.benchmarks.contending import ProcessSetting

Name = TypeVar("Name", bound=Hashable)

REPOSITORY = Path(__file__).resolve().parents[2]
SECONDS_TO_HANG = 1800


class LeftOut(Exception):
    """A contender that can't take part; says why."""

    def __init__(self, word: str, fails: bool) -> None:
        super().__init__(word)
        self.fails = fails


@dataclass
class Run:
    """What one process of a contender measured.

    Attributes:
        startup: Seconds before the first round.
        seconds: Those of each round.
        blocks: Those of each block after the first round.
        peak: Largest resident memory in bytes.
        found: Whatever else it reported.
    """

    startup: float = 0.0
    seconds: list[float] = field(default_factory=list)
    blocks: list[float] = field(default_factory=list)
    peak: int = 0
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return self.startup + sum(self.seconds)

    @property
    def steady(self) -> float:
        return statistics.median(self.seconds[1:] or self.seconds)


class Process:
    """One contender at work.

    Args:
        script: Its script, a module's name.
        setting: Its setting.
        env: Environment variables besides those of this process.
    """

    def __init__(self, script: str, setting: ProcessSetting, env: Mapping[str, str] = MappingProxyType({})) -> None:
        self.run = Run()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        threads = str(setting.threads)
        environment = {**os.environ, **env, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        began = replace(setting, began=time.monotonic())
        self._process = subprocess.Popen(
            [sys.executable, "-m", script, began.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=REPOSITORY,
            env=environment,
            start_new_session=True,
        )
        self._watchdog = threading.Timer(SECONDS_TO_HANG, self._kill)
        self._watchdog.daemon = True
        self._watchdog.start()

    def read(self) -> dict[str, Any]:
        """Return the process's next message.

        Raises:
            LeftOut: If it reports that it can't go on, or ends without a word.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        message: dict[str, Any] = json.loads(line) if line else {"error": f"ends without a word: {self._last_words()}"}
        for key in ("skipped", "error"):
            if key in message:
                self.close()
                raise LeftOut(message[key], fails=key == "error")
        return message

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self._log.seek(0)
        return " ".join(self._log.read().split("\n")[-3:]).strip() or "no output"

    def read_to_first_block(self) -> None:
        self.run.startup = self.read()["startup"]
        self.read()

    def compute_block(self) -> None:
        self._go()
        self.run.blocks.append(sum(self.read()["seconds"]))

    def read_to_end(self) -> Run:
        """Let the process finish and return what it measured."""
        self._go()
        while not (message := self.read()).get("finished"):
            self.run.startup = message.get("startup", self.run.startup)
        self.run.seconds = message.pop("seconds")
        self.run.peak = max(self.run.peak, 1024 * message.pop("peak_kib"))
        self.run.found = message
        self._process.wait()
        self.close()
        return self.run

    def watch_memory(self) -> None:
        """Sample the memory of the process and all its descendants until it ends."""
        while self._process.poll() is None:
            self.run.peak = max(self.run.peak, sum(map(resident, descendants(self._process.pid))))
            time.sleep(0.2)

    def _go(self) -> None:
        assert self._process.stdin is not None
        # A process that has failed says so in its next message.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self._watchdog.cancel()
        if self._process.poll() is None:
            self._kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]


class Turns(Generic[Name]):
    """Contenders' processes that live side by side and take turns. At the end of the context all are closed.

    Args:
        left_out: Takes the contenders that can't go on, with their reasons.
    """

    def __init__(self, left_out: dict[Name, LeftOut]) -> None:
        self._left_out = left_out
        self._processes: dict[Name, Process] = {}

    def __enter__(self) -> Turns[Name]:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes.values():
            process.close()

    def begin(self, contender: Name, process: Process) -> None:
        """Add a contender, and read what it says until its first block."""
        self._processes[contender] = process
        self.attempt(contender, Process.read_to_first_block)

    def take(self, repetitions: int) -> None:
        """Let each compute its blocks, in an order that turns round every time, and finish."""
        for repetition in range(repetitions):
            for contender in list(self._processes)[:: -1 if repetition % 2 else 1]:
                self.attempt(contender, Process.compute_block)
        for contender in list(self._processes):
            self.attempt(contender, Process.read_to_end)

    def run_alone(self, contender: Name, process: Process, action: Callable[[Process], object]) -> None:
        """Add a contender that runs from start to end while the memory of its descendants is watched."""
        self._processes[contender] = process
        with watched(process):
            self.attempt(contender, action)

    def attempt(self, contender: Name, action: Callable[[Process], object]) -> None:
        """Do something with a contender's process, and leave it out if it can't."""
        try:
            action(self._processes[contender])
        except LeftOut as word:
            self._left_out[contender] = word
            del self._processes[contender]

    @property
    def runs(self) -> dict[Name, Run]:
        """What the contenders measured that have gone on."""
        return {contender: process.run for contender, process in self._processes.items()}


@contextlib.contextmanager
def watched(process: Process) -> Iterator[None]:
    """Sample the memory of a process and all its descendants. It must have ended by the end of the context."""
    watcher = threading.Thread(target=process.watch_memory, daemon=True)
    watcher.start()
    yield
    watcher.join()


def descendants(process: int) -> Iterator[int]:
    """The process and all that it started, where the system tells."""
    yield process
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                yield from descendants(int(child))


def resident(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
