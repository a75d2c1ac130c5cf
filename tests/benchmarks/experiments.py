"""Whole experiments side by side: a loop written by hand, this library, pfl and Flower.

    python tests/benchmarks/experiments.py [--only NAME ...] [--contenders NAME ...] [--threads N] [--json FILE]

An experiment is a recipe as it stands: its partition, cohorts, batches, method, the loss logged in each step, an
evaluation on the 10,000 test images and a checkpoint in each round. Every contender gets the same initial model,
clients' samples, cohorts and batches in the same order, and a process of its own. Shown are

- start-up: seconds from the start of the interpreter to the beginning of the first round,
- the first round, all rounds with the start-up, and the median round with its quartiles (a round's checkpoint may
  count into the next),
- the ratio of a round's time to the plain loop's in the same turn: the median and the quartiles,
- the largest resident memory, where a contender has child processes with theirs added,
- the test accuracy after the last round, and by how much the final model differs from the plain loop's.

The processes live side by side and take turns: one computes a block of rounds while the others wait. Flower has
processes that never rest, so it runs alone at the end.

The experiments (`--only`):

    fedavg_m    recipes/fedslop/mnist.yaml with fedavg_m.yaml: server momentum, MLP 784-128-10, MNIST, Dirichlet 0.1, 10
                of 50 clients, batches of 32
    fedslop     recipes/fedslop/mnist.yaml: the clients' momentum in a random subspace
    fedmud      recipes/fedmud/fmnist.yaml with bkd_aad.yaml: FedMUD+BKD+AAD, CNN4, Fashion-MNIST, 10 of 100 clients,
                three local epochs
    flute       FLUTE's MNIST setting: logistic regression, 10 of 1,000 clients, batches of 10, 100 rounds

The contenders (`--contenders`): plain, stacked (a loop by hand as well, whose clients step together; for the MLPs),
default (`execution="sequential"`), auto, vectorized, compiled, pfl, flower. The last two take part in `fedavg_m` and
`flute`, if they are installed. perturbed (for `fedmud`) is the plain loop whose initial weights are larger by one
rounding. By name alone: default and vectorized without one engine of `experiments_contenders/engines.py`, such as
default-steps.

Accuracies may differ by 0.005. Where the perturbed loop's are further from the plain loop's in any round, they may
differ by as much, for rounding alone does that: batch normalisation amplifies it some tenfold in a round of `fedmud`
(tests/test_experiments_benchmark.py compares that experiment's executions in double precision).

A round of `fedmud` takes a quarter of a minute, and a third of that with
`--recipe-arguments --federated.local_epochs 1`.

The exit status is 1 if a limit is not met or accuracies differ. The machine must have nothing else to do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from json_option import add_json_option, write_json

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tests.benchmarks.experiments_contenders.trial import PERTURBED, RECIPES, Trial  # noqa: E402
from tests.benchmarks.processes import LeftOut, Process, Run, Turns  # noqa: E402

SHARED_DATA = REPOSITORY.parent / "shared" / "data"
LARGEST_DIFFERENCE = 0.005
FEWEST_REPETITIONS = 5


@dataclass(frozen=True)
class Contender:
    """A contender: its script, what its command line is given besides, and whether it can't wait for its turn."""

    script: str
    arguments: tuple[str, ...] = ()
    alone: bool = False
    only: tuple[str, ...] = tuple(RECIPES)


FEDAVG = ("fedavg_m", "flute")
CONTENDERS = {
    "plain": Contender("plain"),
    PERTURBED: Contender("plain", only=("fedmud",)),
    "stacked": Contender("stacked", only=("fedavg_m", "fedslop", "flute")),
    "default": Contender("ours"),
    "auto": Contender("ours", ("--federated.execution", "auto")),
    "vectorized": Contender("ours", ("--federated.execution", "vectorized")),
    "compiled": Contender("ours", ("--federated.execution", "auto", "--federated.compile", "true")),
    "pfl": Contender("with_pfl", only=FEDAVG),
    "flower": Contender("with_flower", alone=True, only=FEDAVG),
}
# The same without one of the engines of `engines.py` each.
OFF = ("steps", "kept", "blocks", "torch")
CONTENDERS |= {f"default-{engine}": CONTENDERS["default"] for engine in OFF}
CONTENDERS |= {f"vectorized-{engine}": CONTENDERS["vectorized"] for engine in OFF}
USUAL = [name for name in CONTENDERS if "-" not in name]
# A round's time to the plain loop's, at most.
LIMITS = {
    ("fedavg_m", "default"): 1.5,
    ("fedavg_m", "auto"): 0.9,
    ("fedavg_m", "compiled"): 0.65,
    ("fedslop", "default"): 1.4,
    ("fedslop", "auto"): 0.9,
    ("fedslop", "compiled"): 0.7,
    ("fedmud", "default"): 1.15,
    ("fedmud", "auto"): 0.9,
}


@dataclass
class Outcome:
    """One experiment.

    Attributes:
        name: Its name.
        block: Rounds in a turn.
        runs: What each contender measured.
        left_out: Why a contender did not take part.
        differences: Largest difference of each final model to the plain loop's.
    """

    name: str
    block: int
    runs: dict[str, Run] = field(default_factory=dict)
    left_out: dict[str, LeftOut] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)

    def milliseconds(self, contender: str) -> list[float]:
        """Return the milliseconds of a round, in each turn."""
        return [1000 * block / self.block for block in self.runs[contender].blocks]

    def ratios(self, contender: str) -> list[float]:
        """Return the ratio of a round's time to the plain loop's, in each turn."""
        if "plain" not in self.runs:
            return []
        pairs = zip(self.runs[contender].blocks, self.runs["plain"].blocks, strict=True)
        return [block / plain for block, plain in pairs]

    @property
    def by_rounding(self) -> float:
        """How far the perturbed loop's accuracy is from the plain loop's, in the round in which it is furthest."""
        if not {"plain", PERTURBED} <= self.runs.keys():
            return 0.0
        pairs = zip(*(self.runs[name].found["accuracies"] for name in ("plain", PERTURBED)), strict=True)
        return max(abs(one - other) for one, other in pairs)

    @property
    def tolerance(self) -> float:
        return max(LARGEST_DIFFERENCE, self.by_rounding)

    @property
    def same_accuracy(self) -> bool:
        accuracies = [run.found["accuracy"] for name, run in self.runs.items() if name != PERTURBED]
        return not accuracies or max(accuracies) - min(accuracies) <= self.tolerance

    def verdict(self, contender: str) -> str:
        limit = LIMITS.get((self.name, contender))
        if limit is None or not self.ratios(contender):
            return ""
        met = statistics.median(self.ratios(contender)) <= limit
        return f"≤ {limit:g} {'met' if met else 'NOT met'}"

    @property
    def as_agreed(self) -> bool:
        return not any(self.verdict(contender).endswith("NOT met") for contender in self.runs)


def run_experiment(name: str, chosen: list[str], options: argparse.Namespace) -> Outcome:
    """Let the contenders of an experiment take turns, in an order that turns round every time."""
    outcome, repetitions = Outcome(name, options.rounds), options.repetitions
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(
            "",
            str(options.root),
            rounds=1 + repetitions * options.rounds,
            threads=options.threads,
            experiment=name,
            quick=options.quick,
            arguments=options.recipe_arguments,
        )
        start_in(folder, "prepare", Contender("prepare"), trial).read_to_end()
        present = [each for each in chosen if name in CONTENDERS[each].only]
        with Turns(outcome.left_out) as turns:
            for contender in [each for each in present if not CONTENDERS[each].alone]:
                own = replace(trial, block=options.rounds)
                turns.begin(contender, start_in(folder, contender, CONTENDERS[contender], own))
            turns.take(repetitions)
            for contender in [each for each in present if CONTENDERS[each].alone]:
                process = start_in(folder, contender, CONTENDERS[contender], trial)
                turns.run_alone(contender, process, lambda process: run_alone(process, options.rounds))
            outcome.runs = turns.runs
        outcome.differences = differences(Path(folder), list(outcome.runs))
    return outcome


def start_in(folder: str, name: str, contender: Contender, trial: Trial) -> Process:
    own = Path(folder, name)
    own.mkdir()
    trial = replace(trial, contender=name, folder=str(own), arguments=[*trial.arguments, *contender.arguments])
    return Process(f"tests.benchmarks.experiments_contenders.{contender.script}", trial)


def run_alone(process: Process, block: int) -> None:
    """Let a process that never waits finish, and divide its rounds into the blocks of the others."""
    run = process.read_to_end()
    run.blocks = [sum(run.seconds[start : start + block]) for start in range(1, len(run.seconds), block)]


def differences(folder: Path, contenders: list[str]) -> dict[str, float]:
    """Return the largest difference of each contender's final tensors to the plain loop's."""
    if "plain" not in contenders:
        return {}
    finals = {name: torch.load(folder / name / "final.pt") for name in contenders}
    return {
        name: max(
            (one.double() - other.double()).abs().max().item()
            for one, other in zip(final, finals["plain"], strict=True)
        )
        for name, final in finals.items()
    }


# What is printed


def quartiles(values: list[float], digits: int) -> str:
    """Return the median and, of four values or more, the quartiles."""
    if not values:
        return ""
    text = f"{statistics.median(values):.{digits}f}"
    if len(values) >= 4:
        lower, _, upper = statistics.quantiles(values, n=4)
        text += f" [{lower:.{digits}f}, {upper:.{digits}f}]"
    return text


def show(outcome: Outcome) -> None:
    rounds = max((len(run.seconds) for run in outcome.runs.values()), default=0)
    heads = ("start-up s", "1st round s", f"all {rounds} s", "round ms", "× plain", "limit", "peak MiB", "accuracy")
    heads = (*heads, "weights differ by")
    print(f"\n| {outcome.name} | {' | '.join(heads)} |")
    print("|---" * (len(heads) + 1) + "|")
    for contender, run in outcome.runs.items():
        difference = outcome.differences.get(contender)
        cells = [
            contender,
            f"{run.startup:.1f}",
            f"{run.seconds[0]:.2f}",
            f"{run.total:.1f}",
            quartiles(outcome.milliseconds(contender), 0),
            quartiles(outcome.ratios(contender), 2),
            outcome.verdict(contender),
            f"{run.peak / 2**20:.0f}",
            f"{run.found['accuracy']:.4f}",
            "" if difference is None else f"{difference:.1g}",
        ]
        print(f"| {' | '.join(cells)} |")
    for contender, word in outcome.left_out.items():
        print(f"{contender} {'FAILS' if word.fails else 'is skipped'}: {word}")
    if outcome.by_rounding > LARGEST_DIFFERENCE:
        print(f"rounding alone changes the plain loop's accuracy by up to {outcome.by_rounding:.4f} in a round")
    if not outcome.same_accuracy:
        print(f"accuracies DIFFER by more than {outcome.tolerance:.4f}")


def figures(outcome: Outcome) -> dict[str, Any]:
    return {
        "experiment": outcome.name,
        "same_accuracy": outcome.same_accuracy,
        "by_rounding": outcome.by_rounding,
        "contenders": {
            name: {
                **asdict(run),
                "milliseconds": outcome.milliseconds(name),
                "ratios": outcome.ratios(name),
                "difference": outcome.differences.get(name),
                "verdict": outcome.verdict(name),
            }
            for name, run in outcome.runs.items()
        },
        "left_out": {name: str(word) for name, word in outcome.left_out.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="NAME")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=USUAL, metavar="NAME")
    default = SHARED_DATA if SHARED_DATA.exists() else Path("data")
    parser.add_argument("--root", type=Path, default=default, help=f"folder of the data sets; {default} by default")
    parser.add_argument("--threads", type=int, default=2, help="of each process; 2 by default")
    parser.add_argument("--rounds", type=int, default=4, help="in a turn; 4 by default")
    parser.add_argument(
        "--repetitions", type=int, default=7, help=f"turns; at least {FEWEST_REPETITIONS} for a verdict"
    )
    parser.add_argument("--quick", action="store_true", help="600 images and 2 rounds, to try the script; no verdict")
    parser.add_argument(
        "--recipe-arguments",
        nargs=argparse.REMAINDER,
        default=[],
        help="the last option: words for the recipe's command line; clients, partition, local epochs or seed only",
    )
    add_json_option(parser)
    options = parser.parse_args()
    options.root = options.root.resolve()
    if options.quick:
        options.rounds = options.repetitions = 1
    missing = {RECIPES[name].data for name in options.only if not (options.root / RECIPES[name].data / "raw").is_dir()}
    if missing:
        parser.error(f"--root {options.root} holds no {' and no '.join(sorted(missing))}/raw")
    total = 1 + options.repetitions * options.rounds
    print(f"{options.threads} thread(s) a process, {os.cpu_count()} cores, {options.repetitions} turns, {total} rounds")
    outcomes = []
    for name in options.only:
        outcomes.append(run_experiment(name, options.contenders, options))
        show(outcomes[-1])
        sys.stdout.flush()
    head = {key: getattr(options, key) for key in ("threads", "rounds", "repetitions", "quick", "recipe_arguments")}
    write_json(options.json, {**head, "experiments": [figures(outcome) for outcome in outcomes]})
    if any(word.fails for outcome in outcomes for word in outcome.left_out.values()):
        return 1
    if options.quick or options.repetitions < FEWEST_REPETITIONS:
        print(f"no verdict: fewer than {FEWEST_REPETITIONS} turns")
        return 0
    return 0 if all(outcome.as_agreed and outcome.same_accuracy for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
