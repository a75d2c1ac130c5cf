"""Runs that are killed at random moments, resumed, and compared bit for bit with runs that were not.

    python tests/benchmarks/kills.py [--kills N] [--seed N] [--folder FOLDER] [--json FILE]

Each run is a process forked from this one, which has imported everything. A third of the kills come at the end of a
random batch, a third inside a random write of a checkpoint or of a client's state (after a random share of its bytes),
and a third after a random time. The run then resumes from ``last.ckpt``, and one in four is killed again.

The run folders are in shared memory by default, so that they are on another file system than temporary files.

The exit status is 1 if weights or bytes differ, a checkpoint is torn, or anything is left behind.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import io
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from json_option import add_json_option, write_json
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from lightning_lowrank import Dirichlet, FederatedLoop, TopK  # noqa: E402
from lightning_lowrank.federated.safe_files import is_whole  # noqa: E402
from tests.algorithms.methods import LOW_RANK, METHODS, MOMENTUM  # noqa: E402
from tests.helpers import Data, Module, network, trainer, weights  # noqa: E402

KINDS = ("batch", "write", "time")
DECAY = partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.9)


@dataclass
class Setup:
    """One kind of run: a method by its name in the tests' table, and what is otherwise in it."""

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    form: str | None = None


def normed() -> nn.Module:
    return network(norm=nn.BatchNorm1d, dropout=0.3)


TOGETHER = {"execution": "vectorized"}
ERROR_FEEDBACK = [TopK(0.3, error_feedback=True)]
SETUPS = {
    "kept moments, local buffers, step-wise scheduler": Setup(
        "FedAvg",
        {"optimizer_state": "keep", "buffers": "local", "client_dropout": 0.2},
        {"net": normed, "optimizer": MOMENTUM, "scheduler": DECAY, "interval": "step"},
        {"val_check_interval": 0.5},
    ),
    "stacked, kept moments": Setup(
        "FedAvg", {**TOGETHER, "optimizer_state": "keep", "chunk_size": 2}, {"optimizer": MOMENTUM}
    ),
    "factors, accumulated batches": Setup("FedMUD", {}, {}, {"accumulate_grad_batches": 2}, "decoupled blocks"),
    "stacked factors of several ranks": Setup("FedLoRA-SumProduct", TOGETHER),
    "factors and a changed base": Setup("FedLoRA-FedEx"),
    "error feedback both ways": Setup("FedAvg", {"uplink": ERROR_FEEDBACK, "downlink": ERROR_FEEDBACK}),
    "control variates": Setup("SCAFFOLD", {"client_dropout": 0.2}),
    "personal models on disk": Setup("Ditto", {"client_memory_limit": 0}),
    "stacked, clients' states on disk": Setup("FedDyn", {**TOGETHER, "client_memory_limit": 2000}),
    "server's moments": Setup("FedAdam", TOGETHER, {"scheduler": DECAY}),
    "a common copy": Setup("EF21P"),
    "projected moments": Setup("FedSLoP", {"optimizer_state": "keep"}, {"scheduler": DECAY, "interval": "step"}),
}


class Batches(pl.Callback):
    """Counts the run's batches, and ends the process after one of them."""

    def __init__(self, last: int | None) -> None:
        self.last = last
        self.done = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.done += 1
        if self.done == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


class Writes:
    """Counts what is written, and ends the process inside one write, after a share of its bytes."""

    def __init__(self, last: int | None, share: float) -> None:
        self.last, self.share, self.done = last, share, 0
        self._save, self._write_bytes = torch.save, Path.write_bytes
        torch.save = self.save
        Path.write_bytes = lambda path, data: self.write_bytes(path, data)

    def _counted(self, write: Callable[[Any], None], file: Any) -> bool:
        self.done += 1
        if self.done != self.last:
            return False
        content = io.BytesIO()
        write(content)
        file.write(content.getvalue()[: round(self.share * len(content.getvalue()))])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        return True

    def save(self, value: Any, file: Any, **keywords: Any) -> None:
        if not self._counted(lambda content: self._save(value, content, **keywords), file):
            self._save(value, file, **keywords)

    def write_bytes(self, path: Path, data: bytes) -> int:
        with open(path, "wb") as file:
            self._counted(lambda content: content.write(data), file)
        return self._write_bytes(path, data)


def run(setup: Setup, folder: Path, checkpoint: Path | None, batches: Batches, rounds: int) -> dict[str, Any]:
    """Make a run, or the rest of one, and return what it ends with."""
    entry = METHODS[setup.method]
    form = setup.form or entry.forms[0]
    low_rank = LOW_RANK[form]
    arguments = {"net": entry.network, "optimizer": entry.optimizer, **setup.module}
    arguments["net"] = arguments["net"]()
    settings = {"clients": 6, "clients_per_round": 3, "partition": Dirichlet(0.5, min_samples=2), "summary": False}
    loop = FederatedLoop(entry.make(), **{**settings, **entry.settings, **setup.settings})
    kept = ModelCheckpoint(folder, "{step}", save_top_k=1, save_last=True, every_n_train_steps=1)
    callbacks = [*([] if low_rank is None else [low_rank()]), loop, kept, batches]
    module = Module(**arguments)
    fitted = trainer(folder, *callbacks, max_epochs=rounds, num_sanity_val_steps=0, **setup.trainer)
    fitted.fit(module, Data(batch_size=8, drop_last=True), ckpt_path=checkpoint)
    clients = {client: sorted(state) for client, state in loop.coordinator.states.items()}
    return {"weights": weights(module), "ledger": loop.ledger.state_dict(), "clients": clients}


def child(work: Callable[[], None]) -> int:
    """Run something in a process of its own, and return the process's id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        work()
        gc.collect()
        atexit._run_exitfuncs()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def attempt(setup: Setup, place: Path, temporary: Path, rounds: int, last: dict[str, Any], after: float | None) -> bool:
    """Begin or resume a run in a process; return whether it was killed.

    Args:
        setup: The kind of run.
        place: Folder of the run and its result.
        temporary: Folder of its temporary files.
        rounds: Number of rounds.
        last: Where the process ends itself: arguments of `Batches` and `Writes`.
        after: After how many seconds it is killed.
    """
    folder = place / "checkpoints"
    checkpoint = folder / "last.ckpt"

    def work() -> None:
        place.mkdir(exist_ok=True)
        tempfile.tempdir = str(temporary)
        batches, writes = Batches(last.get("batch")), Writes(last.get("write"), last.get("share", 0.0))
        began = time.perf_counter()
        result = run(setup, folder, checkpoint if checkpoint.exists() else None, batches, rounds)
        counts = {"batch": batches.done, "write": writes.done, "time": time.perf_counter() - began}
        writes.last = None
        torch.save({**result, "counts": counts}, place / "result.pt.part")
        (place / "result.pt.part").replace(place / "result.pt")

    process = child(work)
    if after is not None:
        time.sleep(after)
        os.kill(process, signal.SIGKILL)
    status = os.waitpid(process, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"signal {os.WTERMSIG(status)} in {place}"
        # If it was over by then, the resumed run has nothing left to do.
        (place / "result.pt").unlink(missing_ok=True)
        return True
    assert os.WEXITSTATUS(status) == 0, f"a run in {place} failed"
    return False


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether two runs ended with the same weights, bytes, and names of what clients keep."""
    values, others = first["weights"], second["weights"]
    equal = values.keys() == others.keys() and all(torch.equal(values[name], others[name]) for name in values)
    return equal and first["ledger"] == second["ledger"] and first["clients"] == second["clients"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    draws = random.Random(options.seed)
    found: Counter[str] = Counter()
    by_setup: dict[str, Counter[str]] = {name: Counter() for name in SETUPS}
    # The finalizer of a TemporaryDirectory would also run in the children.
    base = Path(tempfile.mkdtemp(prefix="lightning_lowrank_kills_", dir=options.folder))
    temporary = Path(tempfile.mkdtemp(prefix="lightning_lowrank_kills_"))
    whole: dict[str, dict[str, Any]] = {}
    turn = 0
    while found["kills"] < options.kills:
        name = list(SETUPS)[turn % len(SETUPS)]
        kind = KINDS[(turn // len(SETUPS) + turn) % len(KINDS)]
        turn += 1
        setup, tally = SETUPS[name], by_setup[name]
        if name not in whole:
            attempt(setup, base / "whole", temporary, options.rounds, {}, None)
            whole[name] = torch.load(base / "whole" / "result.pt", weights_only=True)
            shutil.rmtree(base / "whole")
        counts = whole[name]["counts"]
        place = base / "killed"
        killed = True
        while killed:
            last: dict[str, Any] = {}
            after = None
            if found["kills"] < options.kills and (not tally["in this run"] or draws.random() < 0.25):
                if kind == "time":
                    after = draws.uniform(0, counts["time"])
                else:
                    last = {kind: draws.randint(1, counts[kind]), "share": draws.random()}
            killed = attempt(setup, place, temporary, options.rounds, last, after)
            tally["in this run"] += killed
            found["kills"] += killed
            found[f"at a {kind}"] += killed
            torn = [each for each in place.glob("checkpoints/*.ckpt") if not is_whole(each)]
            tally["torn"] += len(torn)
            for each in torn:
                each.unlink()
        tally["kills"] += tally.pop("in this run", 0)
        tally["differ"] += not same(torch.load(place / "result.pt", weights_only=True), whole[name])
        left = [*temporary.iterdir(), *place.glob("checkpoints/.*")]
        tally["left behind"] += len(left)
        shutil.rmtree(place)
    shutil.rmtree(base)
    shutil.rmtree(temporary)
    print(f"{'':50}{'kills':>8}{'torn':>8}{'differ':>8}{'left behind':>13}")
    for name, tally in by_setup.items():
        print(f"{name:50}{tally['kills']:8}{tally['torn']:8}{tally['differ']:8}{tally['left behind']:13}")
    bad = sum(tally[what] for tally in by_setup.values() for what in ("torn", "differ", "left behind"))
    print(", ".join(f"{what}: {number}" for what, number in found.items()))
    write_json(options.json, {name: dict(tally) for name, tally in by_setup.items()})
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
