"""Start-up: wall time of the imports and of the commands, each in a new interpreter; interpreter start included.

The limit is that of what every user of the package waits for, its public names beside Lightning:

    python tests/benchmarks/start.py --repetitions 5
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from json_option import add_json_option, write_json

ROOT = Path(__file__).parents[2]
COMMAND = "from lightning_lowrank.cli import main; main()"
BASE = "import lightning.pytorch"
NAMES = "from lightning_lowrank import *"
LIMIT = 0.5
"""How many seconds the package may add to Lightning."""

MAKE_CHECKPOINT = """
import sys
import torch
from lightning_lowrank import LowRank, MatrixProduct
from lightning_lowrank.models import MLP, Classifier

module, callback = Classifier(MLP(64, [32], 10)), LowRank(MatrixProduct(), rank=2)
callback.convert(module)
torch.save({"state_dict": module.state_dict(), "callbacks": {"LowRank": callback.state_dict()}}, sys.argv[1])
"""


def seconds_of(statement: str, words: list[str]) -> float:
    """Return the wall time of one new interpreter."""
    begun = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", statement, *words],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    return time.perf_counter() - begun


def cases(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """Return what is timed: a statement and the words of its command line."""
    checkpoint, run = folder / "run.ckpt", folder / "run"
    seconds_of(MAKE_CHECKPOINT, [str(checkpoint)])
    run.mkdir()
    rows = [f"{epoch},{0.5 + epoch / 1000},{1000 * epoch}" for epoch in range(100)]
    (run / "metrics.csv").write_text("\n".join(["epoch,val_acc,comm/total_bytes", *rows]) + "\n")
    imports = ("import torch", "import lightning", BASE, "import lightning_lowrank", NAMES)
    commands = {
        "--help": ["--help"],
        "report --help": ["report", "--help"],
        "report": ["report", str(run), "--output", str(folder / "report")],
        "export": ["export", str(checkpoint), str(folder / "out.safetensors")],
        "inspect": ["inspect", "--config", str(ROOT / "recipes" / "quickstart.yaml")],
    }
    return {
        **{statement: (statement, []) for statement in imports},
        **{f"lightning-lowrank {name}": (COMMAND, words) for name, words in commands.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="new interpreters for each line (default: 5)")
    parser.add_argument("--only", nargs="+", help="only the lines that hold one of these words")
    add_json_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        chosen = {
            name: case
            for name, case in cases(Path(folder)).items()
            if not options.only or any(word in name for word in options.only)
        }
        times: dict[str, list[float]] = {name: [] for name in chosen}
        # All in turn, so that what the machine does meanwhile falls on all of them.
        for _ in range(options.repetitions):
            for name, case in chosen.items():
                times[name].append(seconds_of(*case))
    medians = {name: statistics.median(each) for name, each in times.items()}
    print(f"{'':32} median s   least s")
    for name, each in times.items():
        print(f"{name:32} {medians[name]:8.2f} {min(each):9.2f}")
    if {BASE, NAMES} <= medians.keys():
        beyond = medians[NAMES] - medians[BASE]
        print(f"the package adds {beyond:.2f} s to Lightning (limit {LIMIT} s)")
    write_json(options.json, times)


if __name__ == "__main__":
    main()
