"""How a server takes a hostile site: changed messages by the million, and bombs.

    python tests/benchmarks/hostile.py --messages 1000000
    python tests/benchmarks/hostile.py --bombs

Messages are real ones of every method and codec, changed in every way, before a real server's `Intake`, and answers of
sites that join. One that raises anything, or that changes the server although it was refused, ends the command. The
largest growth of the process while one server takes its messages is told. Bombs are told with the time that it takes to
refuse them, the bytes that Python allocates for it, and by how much the process grows.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.json_option import add_json_option, write_json
from tests.flower.hostile_sites import Tally, bombs, fuzz, fuzz_joins, named_targets, peak


def fuzzed(messages: int, seed: int) -> dict[str, Any]:
    """Send as many messages to each of the servers, one server after another, and return what came of them."""
    tally, draws = Tally(), random.Random(seed)
    servers = [name for name, _ in named_targets()]
    begun, grown, largest = time.perf_counter(), 0.0, 0.0
    for number, (name, make) in enumerate(named_targets()):
        target = make()
        fuzz(target, 20, draws, tally)
        before = _megabytes()
        until = messages * (number + 1) // (len(servers) + 1)
        while tally.messages < until:
            fuzz(target, min(500, until - tally.messages), draws, tally, checked_each=50)
            largest = max(largest, _megabytes())
        grown = max(grown, _megabytes() - before)
        print(f"{tally.messages:,} messages, {_megabytes():.0f} MB, {name}", file=sys.stderr, flush=True)
    joins = messages - tally.messages
    fuzz_joins(joins, draws, tally)
    return {
        "messages": tally.messages,
        "of them joins": joins,
        "servers": len(servers),
        "refused": sum(tally.refused.values()),
        "taken": tally.taken,
        "other errors": 0,
        "seconds": round(time.perf_counter() - begun, 1),
        "a server grows by MB": round(grown, 1),
        "largest MB": round(largest, 1),
    }


def _megabytes() -> float:
    """Return the memory that this process holds now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


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
            print(f"{name:>22}  {value}")
    if options.bombs:
        print(f"{'bomb':32}  {'ms':>7}  {'MB of Python':>12}  {'grown by MB':>11}")
        for name, run in bombs().items():
            seconds, allocated, grown = peak(run)
            found[name] = {"ms": 1e3 * seconds, "python_mb": allocated / 1e6, "grown_mb": grown / 1e6}
            print(f"{name:32}  {1e3 * seconds:7.2f}  {allocated / 1e6:12.2f}  {grown / 1e6:11.2f}")
    write_json(options.json, found)


if __name__ == "__main__":
    main()
