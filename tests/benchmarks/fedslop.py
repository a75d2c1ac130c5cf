"""Wall time of FedSLoP's MNIST experiment (004) and of FedAvg-M's, from the command to the last round's validation.

100 rounds, 50 clients, 10 a round, batch 32, an evaluation on the 10,000 test images in each round. The limits are for
two cores with nothing else running:

    python tests/benchmarks/fedslop.py --data ../shared/data
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMITS = {"FedSLoP": ([], 60.0), "FedAvg-M": (["recipes/fedslop/fedavg_m.yaml"], 45.0)}


def seconds_of(overlays: list[str], data: Path, rounds: int, threads: int) -> float:
    """Return the wall time of one run in a process of its own, interpreter start included."""
    configs = ["recipes/fedslop/mnist.yaml", *overlays]
    with tempfile.TemporaryDirectory() as folder:
        words = [word for config in configs for word in ("--config", str(ROOT / config))]
        words += ["--data.root", str(data), "--trainer.max_epochs", str(rounds)]
        words += ["--federated.execution", "vectorized", "--trainer.enable_progress_bar", "false"]
        begun = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", "from lightning_lowrank.cli import main; main()", "fit", *words],
            check=True,
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)},
        )
        return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder that holds MNIST")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    if not (arguments.data / "MNIST").exists():
        parser.error(f"--data {arguments.data} holds no MNIST")
    found = {}
    for method, (overlays, limit) in LIMITS.items():
        seconds = seconds_of(overlays, arguments.data.resolve(), arguments.rounds, arguments.threads)
        verdict = "met" if seconds <= limit else "not met"
        told = f"limit {limit:.0f} s: {verdict}" if arguments.rounds == 100 else "no limit for other numbers of rounds"
        found[method] = {"seconds": seconds, "limit": limit, "rounds": arguments.rounds}
        print(f"{method:10s}{seconds:8.1f} s   {told}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
