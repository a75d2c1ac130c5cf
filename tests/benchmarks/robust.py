"""A table of methods, attacks and aggregators: what a fifth of attackers leave of the quickstart's accuracy.

    python tests/benchmarks/robust.py [--methods NAME ...] [--attacks NAME ...] [--aggregators NAME ...]
        [--divisions dirichlet iid] [--seeds N ...] [--rounds N] [--processes N] [--json FILE]

Each run is `recipes/quickstart.yaml` with the overlays of its row and column from `recipes/robust`, as a user would run
it. An aggregator that begins with `nnm_` has `mixing.yaml` over its own overlay. Shown is the validation accuracy in
percent, the mean of the last five rounds and of the seeds; in brackets how far that is below the same method's honest
accuracy with the plain mean. `diverged` is a fit that ended because the model was no longer finite.

The exit status is 1 if there is a method for which no aggregator stays within --points of the honest accuracy for every
attack (3 by default), or the plain mean does so as well.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import logging
import os
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from json_option import add_json_option, write_json

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
RECIPES = REPOSITORY / "recipes"

METHODS = {"fedmud": [], "fedavg": ["quickstart_dense"], "fedlora": ["robust/fedlora"]}
ATTACKS = ("none", "sign_flip", "gaussian_noise", "inner_product", "alie", "alie_1_5", "label_flip", "scaled")
OF_COORDINATES = ("coordinate_median", "trimmed_mean")
RULES = (
    "coordinate_median",
    "trimmed_mean",
    "krum",
    "multi_krum",
    "geometric_median",
    "centered_clipping",
    "norm_bound",
)
MIXED = ("coordinate_median", "trimmed_mean", "geometric_median", "centered_clipping")
AGGREGATORS = ("mean", *RULES, *(f"nnm_{rule}" for rule in MIXED))
LAST = 5


class Setting(NamedTuple):
    method: str
    attack: str
    aggregator: str
    division: str
    seed: int

    def overlays(self) -> list[str]:
        rule = self.aggregator.removeprefix("nnm_")
        return [
            "quickstart",
            *METHODS[self.method],
            *(["robust/iid"] if self.division == "iid" else []),
            *([] if rule == "mean" else [f"robust/{rule}"]),
            *(["robust/mixing"] if self.aggregator.startswith("nnm_") else []),
            *([] if self.attack == "none" else [f"robust/{self.attack}"]),
        ]


def run(setting: Setting, rounds: int | None) -> list[float] | None:
    """Return the validation accuracies of a run's rounds; ``None`` if the model did not stay finite."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from lightning_lowrank.cli import main
    from lightning_lowrank.cli.runs import read_run

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    words = [word for name in setting.overlays() for word in ("--config", str(RECIPES / f"{name}.yaml"))]
    words += ["--seed_everything", str(setting.seed), "--trainer.enable_progress_bar", "false"]
    words += ["--trainer.logger.init_args.name", "run", "--federated.execution", "vectorized"]
    words += [] if rounds is None else ["--trainer.max_epochs", str(rounds)]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        words += ["--trainer.logger.init_args.save_dir", folder]
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                main(["fit", *words])
        except torch.linalg.LinAlgError:
            # A decomposition on the server has met numbers that are not finite.
            return None
        except SystemExit as ended:
            if "not finite" not in str(ended.code):
                raise RuntimeError(f"{setting}: {ended.code}") from ended
            return None
        return [accuracy for _, accuracy in read_run(Path(folder) / "run" / "version_0").series("val_acc")]


def applies(method: str, aggregator: str) -> bool:
    """Return whether a rule can aggregate what a method sends: products of factors have no single numbers."""
    return method != "fedlora" or aggregator.removeprefix("nnm_") not in OF_COORDINATES


def accuracy(runs: list[list[float] | None]) -> float | None:
    """Return the accuracy of several seeds in percent; ``None`` if one diverged."""
    return 100 * mean(mean(each[-LAST:]) for each in runs if each) if all(runs) else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["fedmud"])
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS[1:], default=ATTACKS[1:])
    parser.add_argument("--aggregators", nargs="+", choices=AGGREGATORS, default=AGGREGATORS)
    parser.add_argument("--divisions", nargs="+", choices=("dirichlet", "iid"), default=["dirichlet"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--rounds", type=int, help="rounds of a run, by default the recipe's 30")
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time")
    parser.add_argument("--points", type=float, default=3.0)
    add_json_option(parser)
    chosen = parser.parse_args()
    figures: dict[str, Any] = {}
    met = True
    with ProcessPoolExecutor(chosen.processes, mp_context=get_context("spawn")) as pool:
        for method, division in itertools.product(chosen.methods, chosen.divisions):
            rows = [rule for rule in dict.fromkeys(["mean", *chosen.aggregators]) if applies(method, rule)]
            columns = ["none", *chosen.attacks]
            runs = {
                (rule, attack): [
                    pool.submit(run, Setting(method, attack, rule, division, seed), chosen.rounds)
                    for seed in chosen.seeds
                ]
                for rule in rows
                for attack in columns
            }
            print(f"\n{method}, {division}\n\n| aggregator | {' | '.join(columns)} |", flush=True)
            print(f"|---|{'---:|' * len(columns)}")
            honest, within = 0.0, set()
            for rule in rows:
                found = {attack: accuracy([each.result() for each in runs[rule, attack]]) for attack in columns}
                honest = honest or found["none"] or 0.0
                cells = [
                    "diverged" if each is None else f"{each:.1f} ({each - honest:+.1f})" for each in found.values()
                ]
                print(f"| {rule} | {' | '.join(cells)} |", flush=True)
                figures[f"{method} {division} {rule}"] = found
                if all(each is not None and each >= honest - chosen.points for each in found.values()):
                    within.add(rule)
            print(
                f"\nwithin {chosen.points:g} points for every attack: {', '.join(sorted(within)) or 'none'}", flush=True
            )
            met = met and "mean" not in within and bool(within)
    write_json(chosen.json, figures)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
