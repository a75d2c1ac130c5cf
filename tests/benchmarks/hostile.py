"""How a server takes a hostile site: changed messages by the million, and bombs.

    python tests/benchmarks/hostile.py --messages 1000000
    python tests/benchmarks/hostile.py --bombs

Messages are real ones of every method and codec, changed in every way, before a real server's `Intake`. One that raises
anything, or that changes the server although it was refused, ends the command. Bombs are told with the time that it
takes to refuse them, the bytes that Python allocates for it, and by how much the process grows.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.json_option import add_json_option, write_json
from tests.flower.hostile_sites import Tally, bombs, fuzz, peak, targets


def fuzzed(messages: int, seed: int) -> dict[str, Any]:
    """Send so many messages, in turns to all servers, and return what came of them."""
    tally, draws = Tally(), random.Random(seed)
    made = list(targets())
    for target in made:
        fuzz(target, 20, draws, tally)
    before = _megabytes()
    begun = time.perf_counter()
    while tally.messages < messages:
        for target in made:
            fuzz(target, min(500, messages - tally.messages), draws, tally, checked_each=50)
        print(f"{tally.messages:,} messages, {tally.taken:,} taken, {_megabytes():.0f} MB", file=sys.stderr, flush=True)
    grown = _megabytes() - before
    return {
        "messages": tally.messages,
        "servers": len(made),
        "refused": sum(tally.refused.values()),
        "taken": tally.taken,
        "other errors": 0,
        "seconds": round(time.perf_counter() - begun, 1),
        "grown by MB": round(grown, 1),
        "largest MB": round(_megabytes(), 1),
    }


def _megabytes() -> float:
    """Return the most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=0, help="how many changed messages are sent")
    parser.add_argument("--bombs", action="store_true", help="send the bombs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the changes")
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if options.messages:
        found["messages"] = fuzzed(options.messages, options.seed)
        for name, value in found["messages"].items():
            print(f"{name:>12}  {value}")
    if options.bombs:
        print(f"{'bomb':32}  {'ms':>7}  {'MB of Python':>12}  {'grown by MB':>11}")
        for name, run in bombs().items():
            seconds, allocated, grown = peak(run)
            found[name] = {"ms": 1e3 * seconds, "python_mb": allocated / 1e6, "grown_mb": grown / 1e6}
            print(f"{name:32}  {1e3 * seconds:7.2f}  {allocated / 1e6:12.2f}  {grown / 1e6:11.2f}")
    write_json(options.json, found)


if __name__ == "__main__":
    main()
