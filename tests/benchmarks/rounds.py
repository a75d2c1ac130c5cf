"""Rounds of the same federated experiment: by hand, in a plain fit, in this library, in pfl and in Flower.

    python tests/benchmarks/rounds.py [--only NAME ...] [--json FILE]

An MLP of 784-128-10 trains on MNIST in batches of 32 with plain SGD. Every contender gets the same images in memory,
the same partition, cohorts and batches in the same order, and a process of its own with one thread. For each are shown

- start-up: seconds from the start of the interpreter to the beginning of the first round,
- the first round, and the median round after it (everything between two rounds belongs to the later one),
- client-steps (batches of a client) per second, and how many times the hand-written loop's of the same model that is,
- the largest resident memory, where a contender has child processes with theirs added (shared pages count in each),
- the test accuracy of the final global model, which must be that of the others with the same model.

In most experiments the processes live side by side and take turns: one computes a block of rounds while the others
wait. A ratio is the median over the turns of one contender's seconds to the other's in the same turn. Flower has
processes that never rest, so there whole runs take turns.

The experiments (`--only`):

    factors     every layer's weight of rank 8; 10 clients, then 50, all in every round, as in a run of 200 rounds
    update      an update of rank 4 on a frozen base, the same clients
    dense       the dense model, the same clients
    sequential  `FederatedLoop` to a plain `Trainer.fit` over the same batches, 10 of 100 clients
    pfl         10 of 100 clients with 50 samples each; the vectorised model is that of `factors`, pfl's is dense; for
                information also a plain `Trainer.fit`, whose step bounds what the sequential mode can reach
    flower      20 rounds, 10 of 100 clients with 600 samples each
    data        one epoch of MNIST in batches without training, to torchvision's dataset in a DataLoader
    many        100,000 clients: seconds, and the memory that they take beyond that of 100; a cohort of 1,000
    limit       a cohort's step in both low-rank models to its operations in matrix products at the rate of large ones;
                for information also to these products alone, in their own shapes

The exit status is 1 if a limit is not met or accuracies differ. pfl and Flower are those of `pip install
".[bench]"`; one that is not installed is skipped. The machine must have nothing else to do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from json_option import add_json_option, write_json

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tests.benchmarks.processes import LeftOut, Process, Run, Turns, watched  # noqa: E402
from tests.benchmarks.rounds_contenders.experiment import Setting  # noqa: E402

SHARED_DATA = REPOSITORY.parent / "shared" / "data"
PEERS = ("lightning", "pfl", "flwr", "ray")
FEWEST_REPETITIONS = 5
LARGEST_DIFFERENCE = 0.005
LARGEST_SPREAD = 1.3
MEMORY_NOISE = 8 * 2**20
SECONDS_FOR_MANY = 5
SECONDS_FOR_LARGE_COHORT = 60
LEARNING_RATES = {"dense": 0.1, "factors": 0.1, "update": 0.03}
SCRIPTS = {
    "bare": "bare",
    "stacked": "stacked",
    "fit": "with_lightning",
    "sequential": "with_lightning",
    "vectorized": "with_lightning",
    "compiled": "with_lightning",
    "pfl": "with_pfl",
    "flower": "with_flower",
}


# Experiments


@dataclass(frozen=True)
class Contender:
    """A contender, by the name of what runs and the model that it trains."""

    way: str
    model: str = "dense"
    script: str = ""

    def __str__(self) -> str:
        return self.way if self.model == "dense" else f"{self.way}, {self.model}"


@dataclass
class Row:
    """A limit, and what was found.

    Attributes:
        what: What is compared.
        limit: The limit; ``None`` for a figure that is only shown.
        found: What was measured; ``None`` if it could not be.
        at_most: Whether the limit is an upper one.
        unit: Unit of both.
        word: What else is to be said of it.
        skipped: Whether what is missing is not installed, so that nothing can be said.
    """

    what: str
    limit: float | None
    found: float | None
    at_most: bool = False
    unit: str = "×"
    word: str = ""
    skipped: bool = False

    @property
    def met(self) -> bool:
        if self.limit is None or self.skipped:
            return True
        if self.found is None:
            return False
        return self.found <= self.limit if self.at_most else self.found >= self.limit

    def cells(self) -> tuple[str, str, str, str]:
        bound = "" if self.limit is None else f"{'≤' if self.at_most else '≥'} {self.limit:g} {self.unit}"
        found = "–" if self.found is None else f"{self.found:.2f} {self.unit}"
        verdict = "shown" if self.limit is None else "met" if self.met else "NOT met"
        return self.what, bound, found, "skipped" if self.skipped else verdict


@dataclass
class Outcome:
    """One experiment.

    Attributes:
        name: Its name.
        setting: What all contenders share.
        runs: The processes of each contender, in the order of the repetitions.
        left_out: Why a contender did not take part.
        rows: The limits that it decides.
    """

    name: str
    setting: Setting
    runs: dict[Contender, list[Run]] = field(default_factory=dict)
    left_out: dict[Contender, LeftOut] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def blocks(self, contender: Contender) -> list[float]:
        return [block for run in self.runs[contender] for block in run.blocks]

    def ratio(
        self,
        what: str,
        limit: float | None,
        slow: Contender,
        fast: Contender,
        measure: Callable[[Run], float] | None = None,
        at_most: bool = False,
        scale: float = 1.0,
    ) -> None:
        """Add a row of the median ratio of ``slow``'s time to ``fast``'s, by turns or by whole runs' ``measure``."""
        missing = [contender for contender in (slow, fast) if contender in self.left_out]
        if missing:
            gravest = max(missing, key=lambda contender: self.left_out[contender].fails)
            reason = self.left_out[gravest]
            word = f"{gravest}: {reason}"
            self.rows.append(Row(what, limit, None, at_most=at_most, word=word, skipped=not reason.fails))
            return
        times = [
            self.blocks(contender) if measure is None else [measure(run) for run in self.runs[contender]]
            for contender in (slow, fast)
        ]
        ratios = [scale * one / other for one, other in zip(*times, strict=True)]
        word = ""
        if len(ratios) >= FEWEST_REPETITIONS:
            lower, _, upper = statistics.quantiles(ratios, n=4)
            if upper / lower > LARGEST_SPREAD:
                word = f"not to be relied on: its quartiles are a factor of {upper / lower:.1f} apart"
        self.rows.append(Row(what, limit, statistics.median(ratios), at_most=at_most, word=word))

    @property
    def accuracies(self) -> dict[str, list[float]]:
        """The final accuracies of all runs, by model."""
        found: dict[str, list[float]] = {}
        for contender, runs in self.runs.items():
            values = [run.found["accuracy"] for run in runs if "accuracy" in run.found]
            found.setdefault(contender.model, []).extend(values)
        return {model: values for model, values in found.items() if len(values) > 1}

    @property
    def same_accuracy(self) -> bool:
        return all(max(values) - min(values) <= LARGEST_DIFFERENCE for values in self.accuracies.values())


@dataclass(frozen=True)
class Options:
    root: str
    threads: int
    repetitions: int

    def setting(self, **arguments: Any) -> Setting:
        return Setting("", self.root, threads=self.threads, **arguments)


def setting_of(contender: Contender, shared: Setting) -> Setting:
    rate = LEARNING_RATES[contender.model]
    return replace(shared, contender=contender.way, model=contender.model, learning_rate=rate)


def script_of(contender: Contender) -> str:
    return f"tests.benchmarks.rounds_contenders.{contender.script or SCRIPTS[contender.way]}"


def in_turns(
    name: str, shared: Setting, contenders: list[Contender], repetitions: int, rounds_a_turn: dict[str, int]
) -> Outcome:
    """Run the contenders' processes side by side, block by block, in an order that turns round every time."""
    outcome = Outcome(name, shared)
    with Turns(outcome.left_out) as turns:
        for contender in contenders:
            block = rounds_a_turn.get(contender.way, rounds_a_turn[""])
            own = replace(setting_of(contender, shared), block=block, rounds=1 + repetitions * block)
            turns.begin(contender, Process(script_of(contender), own))
        turns.take(repetitions)
        outcome.runs = {contender: [run] for contender, run in turns.runs.items()}
    return outcome


def in_whole_runs(name: str, shared: Setting, contenders: list[Contender], repetitions: int) -> Outcome:
    """Run the contenders one after another, each alone from start to end, in turns."""
    outcome = Outcome(name, shared)
    for _ in range(repetitions):
        for contender in contenders:
            if contender in outcome.left_out:
                continue
            process = Process(script_of(contender), setting_of(contender, shared))
            with watched(process):
                try:
                    outcome.runs.setdefault(contender, []).append(process.read_to_end())
                except LeftOut as word:
                    outcome.left_out[contender] = word
                    outcome.runs.pop(contender, None)
                finally:
                    process.close()
    return outcome


def all_of(clients: int, model: str, replayed: float, compiled: float, options: Options) -> Outcome:
    bare, by_hand, fit, sequential, ours, fastest = (
        Contender(way, model) for way in ("bare", "stacked", "fit", "sequential", "vectorized", "compiled")
    )
    shared = options.setting(clients=clients, samples=1200, cohort=clients, planned=200)
    contenders = [bare, by_hand, fit, sequential, ours, fastest]
    name = f"{model}, {clients} clients"
    outcome = in_turns(name, shared, contenders, options.repetitions, {"": max(1, 20 // clients)})
    outcome.ratio(f"{name}: vectorised to the bare loop", replayed, bare, ours)
    outcome.ratio(f"{name}: vectorised and compiled to the bare loop", compiled, bare, fastest)
    outcome.ratio(f"{name}: stacked by hand to the bare loop", None, bare, by_hand)
    outcome.ratio(f"{name}: sequential to the bare loop", None, bare, sequential)
    return outcome


def factors(options: Options) -> list[Outcome]:
    return [all_of(10, "factors", 3.2, 6, options), all_of(50, "factors", 4.5, 7.5, options)]


def update(options: Options) -> list[Outcome]:
    return [all_of(10, "update", 3.2, 5, options), all_of(50, "update", 3.5, 5.5, options)]


def dense(options: Options) -> list[Outcome]:
    return [all_of(10, "dense", 1.8, 3, options), all_of(50, "dense", 1.4, 3.3, options)]


def sequential(options: Options) -> list[Outcome]:
    shared = options.setting(clients=100, samples=600, cohort=10)
    bare, fit, ours = Contender("bare"), Contender("fit"), Contender("sequential")
    outcome = in_turns("sequential", shared, [bare, fit, ours], options.repetitions, {"": 4})
    outcome.ratio("sequential to plain Trainer.fit over the same batches", 0.87, fit, ours)
    return [outcome]


def pfl(options: Options) -> list[Outcome]:
    shared = options.setting(clients=100, samples=50, cohort=10)
    peer, ours, low_rank = Contender("pfl"), Contender("sequential"), Contender("vectorized", "factors")
    others = [Contender("fit"), Contender("vectorized"), Contender("bare"), Contender("bare", "factors")]
    outcome = in_turns("pfl", shared, [peer, ours, low_rank, *others], options.repetitions, {"": 50})
    outcome.ratio("pfl: sequential to pfl, both dense", 1.1, peer, ours)
    outcome.ratio("pfl: vectorised low-rank to pfl dense", 4.5, peer, low_rank)
    outcome.ratio("pfl: vectorised to pfl, both dense", None, peer, others[1])
    outcome.ratio("pfl: plain Trainer.fit over the same batches, without rounds, to pfl", None, peer, others[0])
    return [outcome]


def flower(options: Options) -> list[Outcome]:
    shared = options.setting(clients=100, samples=600, cohort=10, rounds=20)
    peer, slow, fast = Contender("flower"), Contender("sequential"), Contender("vectorized")
    contenders = [peer, slow, fast, Contender("bare")]
    outcome = in_whole_runs("flower", shared, contenders, min(FEWEST_REPETITIONS, options.repetitions))
    for way, mode in ((slow, "sequential"), (fast, "vectorised")):
        # One of our modes has to be faster than Flower; which one is the user's or `auto`'s choice.
        outcome.ratio(f"flower: {mode}, 20 rounds and interpreter start", None, peer, way, lambda run: run.total)
        outcome.ratio(f"flower: {mode}, steady state", None, peer, way, lambda run: run.steady)
    for what, limit, offset in (
        ("flower: 20 rounds and interpreter start, better mode", 3.0, 0),
        ("flower: steady state, better mode", 1.5, 1),
    ):
        rows = [outcome.rows[offset], outcome.rows[offset + 2]]
        best = max(rows, key=lambda row: row.found or 0.0)
        outcome.rows.append(replace(best, what=what, limit=limit))
    return [outcome]


def data(options: Options) -> list[Outcome]:
    theirs, *ours = (Contender(way, script="data_path") for way in ("torchvision", "sequential", "vectorized"))
    shared = options.setting(clients=75, samples=800, cohort=75)
    outcome = in_turns("data", shared, [theirs, *ours], options.repetitions, {"": 5, "torchvision": 1})
    for way in ours:
        word = f"data: an epoch of MNIST, {way} loop's loader, to torchvision's"
        outcome.ratio(word, 15.0, theirs, way, scale=5.0)
    return [outcome]


def many(options: Options) -> list[Outcome]:
    modes = [Contender(way, script="many") for way in ("sequential", "vectorized")]
    sizes = {"100 clients": (100, 50), "100,000 clients": (100_000, 50), "a cohort of 1,000": (100_000, 1000)}
    outcomes = {
        name: in_whole_runs(
            f"many, {name}",
            options.setting(clients=clients, samples=5, cohort=cohort, rounds=8),
            modes,
            # The smallest of some peaks is free of what the allocator happened to do.
            1 if cohort == 1000 else 3,
        )
        for name, (clients, cohort) in sizes.items()
    }
    few, lots, large = outcomes.values()
    for mode in modes:
        absent = lots.left_out.get(mode) or few.left_out.get(mode)
        if absent:
            label = f"many: {mode}, 100,000 clients"
            lots.rows.append(Row(label, SECONDS_FOR_MANY, None, at_most=True, unit="s", word=f"{mode}: {absent}"))
            continue
        for what in ("partition", "first_round", "checkpoint"):
            seconds = statistics.median(run.found[what] for run in lots.runs[mode])
            label = f"many: {mode}, 100,000 clients, {what.replace('_', ' ')}"
            lots.rows.append(Row(label, SECONDS_FOR_MANY, seconds, at_most=True, unit="s"))
        added = min(run.peak for run in lots.runs[mode]) - min(run.peak for run in few.runs[mode])
        limit = (lots.runs[mode][0].found["index_bytes"] + MEMORY_NOISE) / 2**20
        label = f"many: {mode}, memory of 100,000 clients beyond that of 100"
        lots.rows.append(Row(label, round(limit, 1), added / 2**20, at_most=True, unit="MiB"))
    for mode in modes:
        seconds = large.runs[mode][0].steady if mode in large.runs else None
        word = "" if seconds else f"{mode}: {large.left_out[mode]}"
        label = f"many: {mode}, a round with a cohort of 1,000"
        large.rows.append(Row(label, SECONDS_FOR_LARGE_COHORT, seconds, at_most=True, unit="s", word=word))
    return list(outcomes.values())


def limit(options: Options) -> list[Outcome]:
    outcomes = []
    for model, what, bound in (("update", "on a frozen base", 2.0), ("factors", "of factors only", 3.0)):
        rate, own = (Contender(way, model, "gemm") for way in ("rate", "own products"))
        ours = Contender("vectorized", model)
        # Batches of equal size, so that every step has the products that are counted.
        shared = options.setting(clients=50, samples=1184, cohort=50)
        outcome = in_turns(f"limit, {model}", shared, [rate, own, ours], options.repetitions, {"": 1})
        scale = 1.0
        if rate in outcome.runs and own in outcome.runs:
            scale = outcome.runs[rate][0].found["operations"] / outcome.runs[own][0].found["operations"]
        outcome.ratio(f"limit: vectorised step {what}, to its operations", bound, ours, rate, None, True, scale)
        outcome.ratio(f"limit: vectorised step {what}, to its products alone", None, ours, own)
        outcomes.append(outcome)
    return outcomes


EXPERIMENTS: dict[str, Callable[[Options], list[Outcome]]] = {
    function.__name__: function for function in (factors, update, dense, sequential, pfl, flower, data, many, limit)
}


# What is printed


def show(outcome: Outcome) -> None:
    setting = outcome.setting
    print(
        f"\n{outcome.name}: {setting.cohort} of {setting.clients} clients in a round, {setting.samples} samples and"
        f" {setting.steps_per_client} steps each"
    )
    steps = setting.steps_per_round
    heads = ("start-up s", "1st round s", "round ms", "steps/s", "× bare", "peak MiB", "accuracy")
    print(f"  {'':<24}{''.join(f'{head:>13}' for head in heads)}")
    for contender, runs in outcome.runs.items():
        middle = statistics.median
        steady = middle(run.steady for run in runs)
        bare = outcome.runs.get(Contender("bare", contender.model))
        accuracy = [run.found["accuracy"] for run in runs if "accuracy" in run.found]
        trains = contender.script != "gemm" and contender.script != "data_path"
        cells = [
            f"{middle(run.startup for run in runs):.2f}",
            f"{middle(run.seconds[0] for run in runs):.3f}",
            f"{1000 * steady:.2f}",
            f"{steps / steady:.0f}" if trains else "",
            f"{relative(outcome, contender):.2f}" if bare else "",
            f"{max(run.peak for run in runs) / 2**20:.0f}",
            f"{statistics.median(accuracy):.4f}" if accuracy else "",
        ]
        print(f"  {contender!s:<24}{''.join(f'{cell:>13}' for cell in cells)}")
    for contender, word in outcome.left_out.items():
        print(f"  {contender!s:<24}{'FAILS' if word.fails else 'skipped'}: {word}")
    for model, values in outcome.accuracies.items():
        spread = max(values) - min(values)
        if spread > LARGEST_DIFFERENCE:
            print(f"  accuracies of the {model} model DIFFER by {spread:.4f}, and may by {LARGEST_DIFFERENCE}")
    for row in outcome.rows:
        what, bound, found, verdict = row.cells()
        print(f"  {what}: {found} {f'(limit {bound})' if bound else ''} {verdict} {row.word}".rstrip())


def relative(outcome: Outcome, contender: Contender) -> float:
    """The contender's speed to the bare loop's of the same model: the median of turns, or of whole runs."""
    bare = Contender("bare", contender.model)
    if outcome.blocks(bare):
        pairs = zip(outcome.blocks(bare), outcome.blocks(contender), strict=True)
        return statistics.median(slow / fast for slow, fast in pairs)
    runs = zip(outcome.runs[bare], outcome.runs[contender], strict=True)
    return statistics.median(slow.steady / fast.steady for slow, fast in runs)


def figures(outcome: Outcome) -> dict[str, Any]:
    return {
        "experiment": outcome.name,
        "setting": asdict(outcome.setting),
        "same_accuracy": outcome.same_accuracy,
        "contenders": {
            str(contender): {
                "script": script_of(contender),
                "runs": [asdict(run) for run in runs],
                "steps_per_second": outcome.setting.steps_per_round / statistics.median(run.steady for run in runs),
            }
            for contender, runs in outcome.runs.items()
        },
        "left_out": {str(contender): str(word) for contender, word in outcome.left_out.items()},
        "rows": [{**asdict(row), "met": row.met} for row in outcome.rows],
    }


def installed_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS), metavar="NAME")
    default = SHARED_DATA if SHARED_DATA.exists() else Path("data")
    parser.add_argument("--root", type=Path, default=default, help=f"folder with MNIST/raw in it; {default} by default")
    parser.add_argument("--threads", type=int, default=1, help="of each process; 1 by default")
    parser.add_argument(
        "--repetitions", type=int, default=7, help=f"turns; at least {FEWEST_REPETITIONS} for a verdict"
    )
    add_json_option(parser)
    options = parser.parse_args()
    root = options.root.resolve()
    if not (root / "MNIST" / "raw" / "train-images-idx3-ubyte").is_file():
        parser.error(f"--root {root} holds no MNIST/raw/train-images-idx3-ubyte")
    versions = {name: installed_version(name) for name in ("torch", *PEERS)}
    print(", ".join(f"{name} {number}" for name, number in versions.items()))
    print(f"{options.threads} thread(s) a process, {os.cpu_count()} cores, {options.repetitions} turns")
    outcomes: list[Outcome] = []
    for name in options.only:
        for outcome in EXPERIMENTS[name](Options(str(root), options.threads, options.repetitions)):
            show(outcome)
            sys.stdout.flush()
            outcomes.append(outcome)

    lines = [row.cells() for outcome in outcomes for row in outcome.rows if row.limit is not None]
    print()
    for line in [("what", "limit", "found", ""), ("---",) * 4, *lines]:
        print(f"| {' | '.join(line)} |")
    if options.repetitions < FEWEST_REPETITIONS:
        print(f"not to be relied on: fewer than {FEWEST_REPETITIONS} turns")
    as_agreed = all(row.met for outcome in outcomes for row in outcome.rows)
    same = all(outcome.same_accuracy for outcome in outcomes)
    print(f"{'all' if as_agreed else 'NOT all'} limits met; accuracies {'agree' if same else 'DIFFER'}")
    head = {"versions": versions, "threads": options.threads, "repetitions": options.repetitions}
    write_json(options.json, {**head, "experiments": [figures(outcome) for outcome in outcomes]})
    return 0 if as_agreed and same else 1


if __name__ == "__main__":
    sys.exit(main())
