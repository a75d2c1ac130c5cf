r"""Test accuracy at equal bytes, for every family of methods: makes the runs, the table and the picture.

    python recipes/equal_bytes/table.py --root ../shared/data --processes 2

The unit is R, the bytes of 100 rounds of FedAvg in both directions; a budget is a share of R. For each method,

1. learning rates of one grid, the same for all methods, are tried with seed 100, a tenth of the training images held
   out. The accuracy on these chooses the rate of each budget. At the smallest budget the grid's five middle rates are
   tried, and at a larger one the best rate of the budget before and the two beside it; then others, until the best rate
   has a worse one on each side;
2. one run is made for each chosen rate and each of ``--seeds``, on all training images. Its accuracy on the test images
   is in the table.

Accuracy at a budget is the mean of the rounds that end in the budget's last fifth, or of its last round. Bytes are
those of real encodings to and from the round's clients (``comm/total_bytes``); the table says by how much more they are
where clients that do not take part must receive the broadcast too. The initial model is on no axis: every method sends
it to every client once.

``RESULTS.json`` holds what was measured, and a run that it holds is not made again, so that the command goes on where
it was ended. ``--page`` makes ``RESULTS.md`` and the picture of it without a run, and ``--commands`` prints the command
of each run that is in the table. With ``--settings``, other networks and divisions take the rates of the first setting,
and all budgets but its largest.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import math
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "RESULTS.json", HERE / "RESULTS.md"
PICTURE = HERE.parents[1] / "docs" / "images" / "equal_bytes.png"

SETTINGS = {"fmnist": (), "cnn4": ("cnn4",), "iid": ("iid",), "alpha_0_1": ("alpha_0_1",)}
"""Overlays of each setting; the first one's rates are searched."""
METHODS = {
    "FedAvg": (),
    "8 bits": ("bits_8",),
    "4 bits": ("bits_4",),
    "top-k": ("top_k",),
    "top-k, 8 bits": ("top_k_8bit",),
    "rank 4, 4 bits": ("rank_4",),
    "EF21-P": ("ef21p",),
    "FedBAT": ("fedbat",),
    "FedMUD": ("fedmud",),
    "FedMUD+AAD": ("fedmud_aad",),
    "FedMUD+BKD+AAD": ("fedmud_bkd_aad",),
    "FedMUD+BKD+AAD, 8 bits": ("fedmud_bkd_aad", "bits_8"),
    "FedLMT": ("fedlmt",),
    "FedLMT, 8 bits": ("fedlmt", "bits_8"),
    "FedLMT, top-k up": ("fedlmt", "top_k_up"),
    "FedPara": ("fedpara",),
    "FedHM": ("fedhm",),
    "FedSLoP": ("fedslop",),
    "TDPFed": ("tdpfed",),
}
"""Overlays of each method."""
RATES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
FIRST_RATES = RATES[4:9]
"""Rates that are tried at the smallest budget; the others only beside the best one so far."""
BUDGETS = (8, 32, 128)
TARGETS = (0.75, 0.8)
SEARCH_SEED = 100
_CONVOLUTIONS = ("cnn4",)
"""Settings whose evaluation takes as long as a round: it is made ``_LOOKS`` times or up to twice as often."""
_LOOKS = 40
_LAST_PART = 0.8
_POINTS = 60


@dataclass(frozen=True)
class Trial:
    """A run: a method in a setting, with a rate and a seed.

    Args:
        searches: Whether a tenth of the training images is held out and judged, in place of the test images.
    """

    setting: str
    method: str
    rate: float
    seed: int
    searches: bool

    @property
    def name(self) -> str:
        """The name of its entry in ``RESULTS.json``."""
        return f"{self.setting} | {self.method} | {self.rate:g} | {self.seed}{' | held out' if self.searches else ''}"

    def words(self, rounds: int) -> list[str]:
        """The words of its command line for so many rounds."""
        overlays = ("fmnist", *SETTINGS[self.setting], *METHODS[self.method])
        words = ["fit", *(word for name in overlays for word in ("--config", f"{HERE / name}.yaml"))]
        words += ["--seed_everything", str(self.seed), "--model.init_args.optimizer.init_args.lr", f"{self.rate:g}"]
        words += ["--data.init_args.validation", "0.1"] if self.searches else []
        every = max(1, rounds // _LOOKS) if self.setting in _CONVOLUTIONS else 1
        words += ["--trainer.check_val_every_n_epoch", str(every)] if every > 1 else []
        return [*words, "--trainer.max_epochs", str(rounds)]


def bytes_of_a_round(setting: str, method: str, root: str) -> list[float]:
    """The bytes of the first round and of a later one, both ways."""
    further = ["--federated.local_steps", "1", "--trainer.limit_val_batches", "0"]
    run = _fitted(Trial(setting, method, 0.0001, 0, False), root, 3, further)
    if run is None:
        raise SystemExit(f"{method} cannot make three rounds of one step")
    first, _, third = (value for _, value in run.series("comm/total_bytes"))
    return [first, (third - first) / 2]


def made(trial: Trial, root: str, rounds: int) -> dict[str, Any]:
    """The entry of a run of so many rounds."""
    began = time.monotonic()
    run = _fitted(trial, root, rounds, [])
    entry: dict[str, Any] = {"rounds": rounds, "took": round(time.monotonic() - began, 1)}
    if run is None:
        return {**entry, "curve": None}
    sent, accuracy = run.series("comm/total_bytes"), run.series("val_acc")
    seconds = dict(run.series("system/seconds"))
    by_round = dict(sent)
    curve = [[by_round[number], round(value, 4), round(seconds[number], 1)] for number, value in accuracy]
    idle = run.last("comm/total_idle_down_bytes") or 0.0
    return {**entry, "idle": round(idle / sent[-1][1], 3), "curve": curve}


def _fitted(trial: Trial, root: str, rounds: int, further: Sequence[str]) -> Any:
    """The run's figures; ``None`` if the model did not stay finite."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from lightning_lowrank.cli import main
    from lightning_lowrank.cli.runs import read_run

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    execution = "auto" if trial.setting in _CONVOLUTIONS else "vectorized"
    words = [*trial.words(rounds), *further, "--data.init_args.root", root]
    words += ["--quiet", "--federated.execution", execution, "--trainer.logger.init_args.name", "run"]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        words += ["--trainer.logger.init_args.save_dir", folder]
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                main(words)
        except (SystemExit, torch.linalg.LinAlgError) as ended:
            # A decomposition on the server has met numbers that are not finite.
            if isinstance(ended, SystemExit) and "not finite" not in str(ended.code):
                raise RuntimeError(f"{' '.join(words)}: {ended.code}") from ended
            return None
        return read_run(Path(folder) / "run" / "version_0")


def rounds_within(budget: float, first: float, later: float) -> int:
    """How many rounds end within so many bytes, where a later round differs from the first in size.

    Example:
        >>> rounds_within(100.0, 40.0, 30.0), rounds_within(30.0, 40.0, 30.0)
        (3, 0)
    """
    return 0 if budget < first else 1 + math.floor((budget - first) / later + 1e-9)


def accuracy_at(curve: Sequence[Sequence[float]] | None, budget: float) -> float | None:
    """The mean accuracy of the rounds that end in a budget's last fifth, or of the last one; ``None`` without any.

    Example:
        >>> accuracy_at([[10, 0.5], [79, 0.6], [90, 0.7], [100, 0.8], [110, 0.9]], 100)
        0.75
    """
    within = [point for point in curve or () if point[0] <= budget]
    last = [point[1] for point in within if point[0] > _LAST_PART * budget] or [point[1] for point in within[-1:]]
    return mean(last) if last else None


def thinned(curve: list[list[float]]) -> list[list[float]]:
    """At most some points of a curve, further apart the later they are, its last point among them."""
    if len(curve) <= _POINTS:
        return curve
    places = {round(len(curve) ** (place / (_POINTS - 1))) - 1 for place in range(_POINTS)}
    return [curve[place] for place in sorted(places)]


class Table:
    """What was measured, in a file that each run is added to.

    Args:
        file: The file.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"bytes": {}, "runs": {}}

    def unit(self, setting: str) -> float | None:
        """The bytes of 100 rounds of FedAvg; ``None`` before they were measured."""
        known = self.content["bytes"].get(f"{setting} | FedAvg")
        return 100 * known[1] if known else None

    def rounds(self, setting: str, method: str, share: int) -> int:
        """How many rounds of a method end within R over ``share``."""
        unit = self.unit(setting)
        assert unit is not None
        return rounds_within(unit / share, *self.content["bytes"][f"{setting} | {method}"])

    def add(self, trial: Trial, entry: dict[str, Any]) -> None:
        """Keep a run's accuracies at the budgets, and some points of its curve."""
        unit, curve = self.unit(trial.setting), entry.pop("curve")
        assert unit is not None
        reached = [share for share in BUDGETS if entry["rounds"] >= self.rounds(trial.setting, trial.method, share)]
        # A shorter run of the trial was evaluated more often, and a longer one may diverge.
        before = self.content["runs"].get(trial.name, {})
        known = before.get("accuracy", {})
        entry["accuracy"] = {
            str(share): known[str(share)] if str(share) in known else accuracy_at(curve, unit / share)
            for share in reached
        }
        if not trial.searches and curve is not None:
            first = before.get("curve", [])
            entry["curve"] = first + [point for point in thinned(curve) if not first or point[0] > first[-1][0]]
        self.content["runs"][trial.name] = entry
        self.save()

    def save(self) -> None:
        """Write the file, a line for each run."""
        parts = [f'"{name}": {{\n{_lines(self.content[name])}\n}}' for name in ("bytes", "runs")]
        whole = self.file.with_suffix(".part")
        whole.write_text("{" + ",\n".join(parts) + "}\n")
        whole.replace(self.file)

    def lacks(self, trial: Trial, rounds: int) -> bool:
        """Whether a run of so many rounds is still to be made."""
        return bool(rounds) and self.content["runs"].get(trial.name, {"rounds": 0})["rounds"] < rounds

    def accuracy(self, trial: Trial, share: int) -> float | None:
        """A run's accuracy at a budget; ``None`` if it diverged, or no round ends within the budget."""
        found = self.content["runs"].get(trial.name, {}).get("accuracy", {}).get(str(share))
        return None if found is None else float(found)

    def ran(self, trial: Trial, share: int) -> bool:
        """Whether a run was made that is long enough for a budget."""
        return str(share) in self.content["runs"].get(trial.name, {"accuracy": ()})["accuracy"]

    def searched(self, method: str, share: int) -> dict[float, float | None]:
        """The accuracy on held-out images of each rate that was tried within a budget; ``None`` if it diverged."""
        trials = {rate: _search(method, rate) for rate in RATES if self.rounds(next(iter(SETTINGS)), method, share)}
        return {rate: self.accuracy(trial, share) for rate, trial in trials.items() if self.ran(trial, share)}

    def next_rates(self, method: str, share: int) -> list[float]:
        """The rates to try next at a budget; empty if the best one was tried with both beside it."""
        if not self.rounds(next(iter(SETTINGS)), method, share):
            return []
        found, best = self.searched(method, share), self.rate(method, share)
        if best is None:
            # Each has diverged, or none was tried.
            smaller = (self.rate(method, each) for each in sorted(BUDGETS) if each > share)
            best = min(found, default=None) or next((rate for rate in smaller if rate is not None), None)
        if best is None:
            return list(FIRST_RATES)
        place = RATES.index(best)
        return [rate for rate in RATES[max(0, place - 1) : place + 2] if rate not in found]

    def rate(self, method: str, share: int) -> float | None:
        """The rate that the held-out images choose at a budget."""
        found = {rate: value for rate, value in self.searched(method, share).items() if value is not None}
        return max(found, key=found.__getitem__) if found else None


def _search(method: str, rate: float) -> Trial:
    return Trial(next(iter(SETTINGS)), method, rate, SEARCH_SEED, True)


def _lines(entries: dict[str, Any]) -> str:
    return ",\n".join(f"{json.dumps(name)}: {json.dumps(entries[name])}" for name in sorted(entries))


class Runs:
    """Makes what the table lacks, in processes."""

    def __init__(self, table: Table, options: argparse.Namespace) -> None:
        self.table, self.options = table, options
        self.root = str(options.root)

    def make(self) -> None:
        """Measure bytes, search rates, and make the table's runs."""
        with ProcessPoolExecutor(self.options.processes, mp_context=get_context("spawn")) as pool:
            lacking = [
                (setting, method)
                for setting in self.options.settings
                for method in dict.fromkeys(("FedAvg", *self.options.methods))
                if f"{setting} | {method}" not in self.table.content["bytes"]
            ]
            found = [pool.submit(bytes_of_a_round, *each, self.root) for each in lacking]
            for (setting, method), future in zip(lacking, found, strict=True):
                self.table.content["bytes"][f"{setting} | {method}"] = future.result()
            self.table.save()
            for share in sorted(self.options.budgets, reverse=True):
                while wanted := self._searches(share):
                    self._made(pool, wanted)
            self._made(pool, self._final())

    def _searches(self, share: int) -> list[tuple[Trial, int]]:
        """The trials that the search of rates at a budget needs next, with their rounds."""
        return [
            (_search(method, rate), self.table.rounds(next(iter(SETTINGS)), method, share))
            for method in self.options.methods
            for rate in self.table.next_rates(method, share)
        ]

    def _final(self) -> list[tuple[Trial, int]]:
        rounds: dict[Trial, int] = {}
        for trial, share in final_trials(self.table, self.options):
            rounds[trial] = max(rounds.get(trial, 0), self.table.rounds(trial.setting, trial.method, share))
        return list(rounds.items())

    def _made(self, pool: ProcessPoolExecutor, wanted: Iterable[tuple[Trial, int]]) -> None:
        missing = [(trial, rounds) for trial, rounds in wanted if self.table.lacks(trial, rounds)]
        known = [entry["took"] / entry["rounds"] for entry in self.table.content["runs"].values()]
        hours = mean(known or [0.1]) * sum(rounds for _, rounds in missing) / 3600 / self.options.processes
        print(f"{len(missing)} runs are to be made, in some {hours:.1f} hours", flush=True)
        futures: dict[Future[dict[str, Any]], Trial] = {
            pool.submit(made, trial, self.root, rounds): trial for trial, rounds in missing
        }
        for future in as_completed(futures):
            trial = futures[future]
            self.table.add(trial, future.result())
            print(trial.name, self.table.content["runs"][trial.name]["accuracy"], flush=True)


def final_trials(table: Table, options: argparse.Namespace) -> Iterable[tuple[Trial, int]]:
    """The runs of the table, with the budget that each is for."""
    for setting in options.settings:
        yield from _final_of(table, setting, options)


def _budgets(setting: str, options: argparse.Namespace) -> list[int]:
    """The budgets of a setting: the largest is for the first setting alone."""
    return [share for share in options.budgets if setting == next(iter(SETTINGS)) or share > min(BUDGETS)]


def _final_of(table: Table, setting: str, options: argparse.Namespace) -> Iterable[tuple[Trial, int]]:
    for method in options.methods:
        for share in _budgets(setting, options):
            rate = table.rate(method, share)
            if rate is None:
                continue
            for seed in options.seeds:
                yield Trial(setting, method, rate, seed, False), share


# The page


def page(table: Table, options: argparse.Namespace) -> str:
    """The text of ``RESULTS.md``."""
    parts = [HEAD.replace("COMMAND", _command(options))]
    for setting in options.settings:
        unit = table.unit(setting)
        if unit is None:
            continue
        parts.append(f"## {TITLES[setting]}\n\nR is {unit / 1e6:,.0f} MB.\n")
        parts.append("\n".join(_accuracies(table, setting, options)))
    said = "Accuracy on held-out images in percent; `-` is a run that diverged, and an empty cell was not tried."
    parts.append(f"## Learning rates\n\n{said}\n")
    parts.append("\n".join(_searched(table, options)))
    return "\n".join(parts).rstrip("\n") + "\n"


def _command(options: argparse.Namespace) -> str:
    """The command line that makes the page."""
    words = ["python recipes/equal_bytes/table.py --root ../shared/data --processes 2"]
    defaults = {"settings": ["fmnist"], "budgets": list(BUDGETS), "seeds": [0, 1, 2], "methods": list(METHODS)}
    for name, every in defaults.items():
        given = getattr(options, name)
        if given != every:
            words.append(f"--{name} " + " ".join(f'"{each}"' if " " in str(each) else str(each) for each in given))
    return " \\\n    ".join(words)


def _accuracies(table: Table, setting: str, options: argparse.Namespace) -> Iterable[str]:
    measured = {share for trial, share in _final_of(table, setting, options) if table.ran(trial, share)}
    shares = sorted(measured or _budgets(setting, options), reverse=True)
    yield (
        "| method | overlays | kB a round | idle | "
        + " | ".join(f"R/{share} | rate" for share in shares)
        + " | "
        + " | ".join(f"MB to {target:g} | s" for target in TARGETS)
        + " |"
    )
    yield "|---|---|---:|---:|" + "---:|---:|" * (len(shares) + len(TARGETS))
    rows: dict[str, tuple[float, str]] = {}
    # Rows are in the order of a budget for which most methods were run, of several the middle one.
    counts = Counter(share for trial, share in _final_of(table, setting, options) if table.ran(trial, share))
    middle = shares[len(shares) // 2]
    of_order = max(shares, key=lambda share: (counts[share], share == middle))
    for method in options.methods:
        if f"{setting} | {method}" not in table.content["bytes"]:
            continue
        cells: list[str] = []
        order = 0.0
        for share in shares:
            rate = table.rate(method, share)
            seeds = () if rate is None else options.seeds
            trials = [Trial(setting, method, rate or 0.0, seed, False) for seed in seeds]
            values = [table.accuracy(trial, share) for trial in trials if table.ran(trial, share)]
            cells += [_spread(values, len(trials)), "" if rate is None else f"{rate:g}"]
            if share == of_order:
                order = mean(value or 0.0 for value in values) if values else 0.0
        for target in TARGETS:
            cells += _first_at(table, setting, method, target, options)
        runs = [entry for name, entry in table.content["runs"].items() if name.startswith(f"{setting} | {method} |")]
        idle = max((entry.get("idle", 0.0) for entry in runs), default=0.0)
        size = table.content["bytes"][f"{setting} | {method}"][1]
        overlays = ", ".join(METHODS[method]) or "none"
        rows[method] = (
            order,
            f"| {method} | {overlays} | {size / 1e3:,.0f} | {idle:.0%} | {' | '.join(cells)} |",
        )
    yield from (line for _, line in sorted(rows.values(), key=lambda row: -row[0]))
    yield ""


def _spread(values: Sequence[float | None], seeds: int) -> str:
    """The mean and deviation of the seeds that were run; how many of all diverged or were not run."""
    found = [100 * value for value in values if value is not None]
    spread = f"{mean(found):.1f}" if found else ""
    if len(found) == len(values) > 1:
        spread += f" ± {stdev(found):.1f}"
    counts = {"diverged": len(values) - len(found), "not run": seeds - len(values) if values else 0}
    said = ", ".join(f"{count} of {seeds} {what}" for what, count in counts.items() if count)
    return f"{spread} ({said})".strip() if said else spread


def _first_at(table: Table, setting: str, method: str, target: float, options: argparse.Namespace) -> list[str]:
    """The fewest bytes and seconds at which a rate's mean over seeds reaches the target."""
    best: tuple[float, float] | None = None
    for rate in RATES:
        runs = [table.content["runs"].get(Trial(setting, method, rate, seed, False).name) for seed in options.seeds]
        curves = [entry["curve"] for entry in runs if entry and "curve" in entry]
        if not curves or len(curves) < len(options.seeds):
            continue
        # A run that was made for a larger budget too is evaluated less often.
        begin, end = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
        for sent in sorted({point[0] for curve in curves for point in curve if begin <= point[0] <= end}):
            points = [_at(curve, sent) for curve in curves]
            if mean(accuracy for accuracy, _ in points) >= target:
                found = sent, mean(seconds for _, seconds in points)
                best = min(best, found) if best else found
                break
    return ["", ""] if best is None else [f"{best[0] / 1e6:.1f}", f"{best[1]:,.0f}"]


def _at(curve: Sequence[Sequence[float]], sent: float) -> tuple[float, float]:
    """The accuracy and seconds of a curve at so many bytes, on the line between its points.

    Example:
        >>> _at([[10, 0.5, 1.0], [20, 0.7, 3.0]], 15)
        (0.6, 2.0)
    """
    import numpy

    bytes_, accuracy, seconds = zip(*curve, strict=True)
    return float(numpy.interp(sent, bytes_, accuracy)), float(numpy.interp(sent, bytes_, seconds))


def _searched(table: Table, options: argparse.Namespace) -> Iterable[str]:
    for share in sorted(options.budgets, reverse=True):
        found = {method: table.searched(method, share) for method in options.methods}
        found = {method: rates for method, rates in found.items() if rates}
        columns = [rate for rate in RATES if any(rate in rates for rates in found.values())]
        yield f"| R/{share} | " + " | ".join(f"{rate:g}" for rate in columns) + " |"
        yield "|---|" + "---:|" * len(columns)
        for method, rates in found.items():
            values = [rates.get(rate) for rate in columns]
            cells = [
                f"{100 * value:.1f}" if value is not None else "-" if rate in rates else ""
                for rate, value in zip(columns, values, strict=True)
            ]
            yield f"| {method} | {' | '.join(cells)} |"
        yield ""


def draw(table: Table, options: argparse.Namespace) -> None:
    """Draw the mean accuracy by bytes of each method in the first setting."""
    from matplotlib import pyplot as plt

    first = next(iter(SETTINGS))
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    for number, method in enumerate(options.methods):
        rate = table.rate(method, sorted(options.budgets)[(len(options.budgets) - 1) // 2])
        runs = [table.content["runs"].get(Trial(first, method, rate or 0, seed, False).name) for seed in options.seeds]
        curves = [entry["curve"] for entry in runs if entry and "curve" in entry]
        if rate is None or not curves:
            continue
        means = [[mean(values) for values in zip(*points, strict=True)] for points in zip(*curves, strict=False)]
        style = ("-", "--", ":")[number // 10]
        axes.plot([each[0] / 1e6 for each in means], [each[1] for each in means], style, label=method)
    axes.set(xscale="log", xlabel="MB up and down", ylabel="test accuracy", ylim=(0.3, None))
    figure.legend(loc="outside right center")
    figure.savefig(PICTURE, dpi=110)


TITLES = {
    "fmnist": "MLP, Dirichlet(0.3)",
    "cnn4": "CNN4, Dirichlet(0.3)",
    "iid": "MLP, IID",
    "alpha_0_1": "MLP, Dirichlet(0.1)",
}
HEAD = """# Accuracy at equal bytes

Fashion-MNIST, 20,000 training images, 20 clients, 10 in a round, 10 local steps of 64 images each, plain SGD (FedSLoP:
its momentum in a subspace). Test accuracy in percent, mean and deviation over seeds, by bytes up and down; the rate at
each budget is chosen on held-out images from one grid for all methods. `idle` is what a broadcast to clients that do
not take part adds. Seconds are simulated, at 10 Mbit/s each way and 1e9 multiply-adds a second. An empty cell: not
measured, not reached, or no round ends within the budget. R/8 is for the MLP on Dirichlet(0.3) alone. Torch was 2.14
for CNN4, IID, R/8 and R/128 of Dirichlet(0.3) and some of its R/32, and 2.11 on another machine for all other runs.

```bash
COMMAND
```

`table.py --commands` prints the command of each run. A method's overlays are files of this folder.

![Test accuracy by bytes](../../docs/images/equal_bytes.png)
"""


def main(words: Sequence[str] | None = None) -> int:
    """Make what is missing of the table, its page and its picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data"), help="folder of Fashion-MNIST")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["fmnist"], metavar="NAME")
    parser.add_argument("--budgets", nargs="+", type=int, choices=BUDGETS, default=list(BUDGETS), help="R over these")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--into", type=Path, default=RESULTS, help="file of what was measured")
    parser.add_argument("--page", action="store_true", help="make the page alone")
    parser.add_argument("--commands", action="store_true", help="print the commands of the table's runs")
    options = parser.parse_args(words)
    if without := [setting for setting in options.settings if not _budgets(setting, options)]:
        parser.error(f"--budgets {min(BUDGETS)} is for {next(iter(SETTINGS))} alone, got {' '.join(without)} too")
    table = Table(options.into)
    if options.commands:
        for trial, share in final_trials(table, options):
            rounds = table.rounds(trial.setting, trial.method, share)
            print("lightning-lowrank", *trial.words(rounds))
        return 0
    if not options.page:
        Runs(table, options).make()
    PAGE.write_text(page(table, options))
    draw(table, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
