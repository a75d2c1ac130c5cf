"""What Sum-Product costs from the factors, beside the dense way: time and peak memory.

    python tests/benchmarks/aggregation.py [--json FILE] [--threads 2] [--repetitions 9]

The setting is 10 clients with 48 layers of 768×768 at rank 8, in single precision. The dense way adds up the clients'
products in one matrix and truncates its SVD, `torch.linalg.svd`. A repetition runs both, one after the other, each on
as many layers as take 50 ms and at least one, and starts at another layer than the one before; a ratio is the median
over the repetitions of the paired ratios. Ours is `SumProduct().aggregate` with all its checks. The dense way is not
run on all layers: its time for the model is the median times 48, and so says the table; ours is measured.

The second row has 100 clients, whose stacked factors are wider than the matrix, and has no limit: it compares the exact
way that is taken then, and the iterative one.

Peak memory is by how much a process of its own exceeds, over all layers, what it held before (the factors, and what
a small run of the same kind had loaded); a matrix is 768×768. It is read from `/proc`, so this needs Linux. The dense
way is run on 4 layers there.

Limits: the time is at most a twentieth of the dense way's, and the memory at most two matrices, where one per client
would be ten. The exit status is 1 if one is not met.

The machine should have nothing else to do; where the dense way's quartiles are far apart, the row says so. With
other processes at work, `--threads 1` still gives a sound ratio.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from json_option import add_json_option, write_json

from lightning_lowrank.lora import LowRankPair, SumProduct

CLIENTS, LAYERS, SIDE, RANK = 10, 48, 768, 8
MANY_CLIENTS = 100
TIME_LIMIT = 1 / 20
MEMORY_LIMIT = 2
LARGEST_SPREAD = 1.3
MILLISECONDS_PER_MEASUREMENT = 50
MATRIX_BYTES = SIDE * SIDE * 4
DENSE_LAYERS_FOR_MEMORY = 4

Layer = list[LowRankPair]
Way = Callable[[Layer], LowRankPair]


def drawn(clients: int, layers: int, side: int = SIDE) -> list[Layer]:
    draws = torch.Generator().manual_seed(0)
    return [
        [
            LowRankPair(torch.randn(side, RANK, generator=draws), torch.randn(RANK, side, generator=draws), 2.0)
            for _ in range(clients)
        ]
        for _ in range(layers)
    ]


def ours(layer: Layer) -> LowRankPair:
    return SumProduct().aggregate(layer).server


def iterative(layer: Layer) -> LowRankPair:
    return SumProduct(method="iterative").aggregate(layer).server


def dense(layer: Layer) -> LowRankPair:
    mean = torch.zeros(layer[0].shape)
    for pair in layer:
        mean.addmm_(pair.B, pair.A, alpha=pair.scaling / len(layer))
    left, values, right = torch.linalg.svd(mean, full_matrices=False)
    scaling = layer[0].scaling
    return LowRankPair(left[:, :RANK] * (values[:RANK] / scaling), right[:RANK].clone(), scaling)


WAYS: dict[str, Way] = {"dense": dense, "lightning_lowrank": ours, "lightning_lowrank, iterative": iterative}


def milliseconds(way: Way, layers: list[Layer]) -> float:
    """Return the mean time of a layer."""
    begin = time.perf_counter()
    for layer in layers:
        way(layer)
    return 1000 * (time.perf_counter() - begin) / len(layers)


def measure(names: list[str], model: list[Layer], repetitions: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in names}
    counts = {}
    for name in names:
        milliseconds(WAYS[name], model[:1])
        counts[name] = max(1, round(MILLISECONDS_PER_MEASUREMENT / milliseconds(WAYS[name], model[:1])))
    for repetition in range(repetitions):
        for name in names:
            layers = [model[(repetition + step) % len(model)] for step in range(counts[name])]
            times[name].append(milliseconds(WAYS[name], layers))
    return times


def ratio(times: dict[str, list[float]], name: str) -> float:
    return statistics.median(time / base for time, base in zip(times[name], times["dense"], strict=True))


def print_times(title: str, times: dict[str, list[float]], limited: str | None) -> None:
    print(f"\n{title}")
    for name, values in times.items():
        line = f"  {name:<30}{statistics.median(values):>10.2f} ms a layer{ratio(times, name):>9.4f}"
        if name == limited:
            line += f"   limit {TIME_LIMIT:.2f}: {'met' if ratio(times, name) <= TIME_LIMIT else 'NOT met'}"
        print(line)
    lower, _, upper = statistics.quantiles(times["dense"], n=4)
    if upper / lower > LARGEST_SPREAD:
        print(f"  not to be relied on: the dense way's quartiles are a factor of {upper / lower:.1f} apart")


def check_agreement(model: list[Layer]) -> None:
    """Both ways must give the same matrix, or the comparison is of nothing."""
    found, wanted = ours(model[0]).product(), dense(model[0]).product()
    difference = ((found - wanted).norm() / wanted.norm()).item()
    assert difference < 1e-4, f"ours differs from the dense way by {difference:.2g} of its norm"


def peak(name: str, threads: int) -> int:
    """Run one way in a process of its own, and return by how many bytes it exceeds what it held before."""
    command = [sys.executable, __file__, "--peak", name, "--threads", str(threads)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def report_peak(name: str) -> int:
    layers = DENSE_LAYERS_FOR_MEMORY if name == "dense" else LAYERS
    model = drawn(CLIENTS, layers)
    # What the linear algebra loads and reserves at its first call is not the operator's.
    WAYS[name](drawn(CLIENTS, 1, side=128)[0])
    # Importing torch has had a higher peak than what is to be measured: start the count anew (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_resident()
    for layer in model:
        WAYS[name](layer)
    print(peak_resident() - before)
    return 0


def peak_resident() -> int:
    """Return the most bytes that this process has held since the count was started."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9, help="at least 5; 9 by default")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads; 2 by default")
    add_json_option(parser)
    parser.add_argument("--peak", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        return report_peak(options.peak)
    if options.repetitions < 5:
        parser.error("--repetitions must be at least 5")

    print(f"torch {torch.__version__}, {options.threads} threads, {options.repetitions} repetitions; medians")
    model = drawn(CLIENTS, LAYERS)
    check_agreement(model)
    times = measure(["dense", "lightning_lowrank"], model, options.repetitions)
    print_times(f"Sum-Product, {CLIENTS} clients, {SIDE}×{SIDE}, rank {RANK}", times, "lightning_lowrank")
    begin = time.perf_counter()
    for layer in model:
        ours(layer)
    whole = 1000 * (time.perf_counter() - begin)
    extrapolated = LAYERS * statistics.median(times["dense"])
    print(f"  all {LAYERS} layers: ours {whole:.0f} ms (measured), dense {extrapolated:.0f} ms ({LAYERS} × its median)")

    many = measure(list(WAYS), drawn(MANY_CLIENTS, 3), options.repetitions)
    print_times(f"Sum-Product, {MANY_CLIENTS} clients: stacked factors wider than the matrix", many, None)

    peaks = {name: peak(name, options.threads) for name in ("dense", "lightning_lowrank")}
    print(f"\nPeak memory over what was held before, {CLIENTS} clients")
    for name, amount in peaks.items():
        line = f"  {name:<30}{amount / 2**20:>10.1f} MiB{amount / MATRIX_BYTES:>9.1f} matrices"
        if name == "lightning_lowrank":
            line += f"   limit {MEMORY_LIMIT}: {'met' if amount <= MEMORY_LIMIT * MATRIX_BYTES else 'NOT met'}"
        print(line)

    time_met = ratio(times, "lightning_lowrank") <= TIME_LIMIT
    memory_met = peaks["lightning_lowrank"] <= MEMORY_LIMIT * MATRIX_BYTES
    print(f"\n{time_met + memory_met} of 2 limits met")
    write_json(
        options.json,
        {
            "torch": torch.__version__,
            "threads": options.threads,
            "repetitions": options.repetitions,
            "milliseconds": {name: statistics.median(values) for name, values in times.items()},
            "ratio": ratio(times, "lightning_lowrank"),
            "limit": TIME_LIMIT,
            "milliseconds_of_all_layers": {"lightning_lowrank": whole, "dense, extrapolated": extrapolated},
            "wide": {
                "milliseconds": {name: statistics.median(values) for name, values in many.items()},
                "ratio": {name: ratio(many, name) for name in many},
            },
            "peak_bytes": peaks,
            "met": {"time": time_met, "memory": memory_met},
        },
    )
    return 0 if time_met and memory_met else 1


if __name__ == "__main__":
    sys.exit(main())
