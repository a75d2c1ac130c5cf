"""What another commit's package does otherwise: weights, bytes and logged figures, on this machine and its torch.

    python tests/benchmarks/against.py --base COMMIT [--only WORD ...] [--json FILE]

Runs every method with every form of layers that its contract knows, with clients one after another and together, and
two rounds of every recipe's base, with the package and the recipes of ``COMMIT`` and with those of this checkout, each
in a process of its own. The tests' tables of methods, networks and made-up data are this checkout's for both. A line
for each run that differs says in what and by how much; one that only one of the two can make is named too.

The exit status is 1 if anything differs. ``--only`` takes runs whose names have one of these words, such as ``FedMUD``,
``vectorized`` or ``recipe``.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
EXECUTIONS: dict[str, dict[str, Any]] = {
    "sequential": {},
    "vectorized": {"execution": "vectorized"},
    "vectorized in pairs": {"execution": "vectorized", "chunk_size": 2},
}
ROUNDS = 3


def differences(base: Any, here: Any, place: str = "") -> Iterator[str]:
    """Yield where two nested results differ, and by how much."""
    import torch

    if isinstance(base, Mapping) and isinstance(here, Mapping):
        for name in [*base, *(name for name in here if name not in base)]:
            where = f"{place}.{name}" if place else str(name)
            if name not in here or name not in base:
                yield f"{where} is {'not here' if name in base else 'not in the base'}"
            else:
                yield from differences(base[name], here[name], where)
    elif isinstance(base, (list, tuple)) and isinstance(here, (list, tuple)) and len(base) == len(here):
        for number, (first, second) in enumerate(zip(base, here, strict=True)):
            yield from differences(first, second, f"{place}[{number}]")
    elif isinstance(base, torch.Tensor) and isinstance(here, torch.Tensor):
        if base.shape != here.shape or base.dtype != here.dtype:
            yield f"{place}: {base.dtype} {tuple(base.shape)} and {here.dtype} {tuple(here.shape)}"
        elif not torch.equal(base.nan_to_num(), here.nan_to_num()) or not torch.equal(base.isnan(), here.isnan()):
            apart = (base.double() - here.double()).abs().max().item()
            yield f"{place}: by {apart:.3g} of {base.double().abs().max().item():.3g}"
    elif base != here and not (base != base and here != here):
        by = f", by {abs(base - here):.3g}" if isinstance(base, float) and isinstance(here, float) else ""
        yield f"{place}: {base!r} and {here!r}{by}"


def method_run(name: str, form: str, settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Make a run of a method with clients of several, many and single samples, and return what is to be compared."""
    import lightning.pytorch as pl
    import torch

    from lightning_lowrank import FederatedLoop, FromIndices
    from tests.algorithms.methods import LOW_RANK, METHODS
    from tests.helpers import Data, Module, fit, trainer, weights

    class Logged(pl.Callback):
        def __init__(self) -> None:
            self.rounds: list[dict[str, float]] = []

        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.rounds.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    method, logged = METHODS[name], Logged()
    network = method.network(dropout=0.2) if method.norm is None else method.network(norm=method.norm, dropout=0.2)
    decay = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.9)
    module = Module(network, optimizer=method.optimizer, scheduler=decay)
    low_rank = LOW_RANK[form]
    parts = FromIndices([range(23), range(23, 60), range(60, 102), [102]])
    loop = FederatedLoop(
        method.make(),
        **{
            "partition": parts,
            "participants": [[0, 1, 3], [1, 2], [0, 2, 3]],
            "local_epochs": 2,
            "seed": 0,
            "summary": False,
            **method.settings,
            **settings,
        },
    )
    callbacks = [*([] if low_rank is None else [low_rank()]), loop, logged]
    fit(trainer(folder, *callbacks, max_epochs=ROUNDS), module, Data())
    return {"weights": weights(module), "bytes": loop.ledger.state_dict(), "logged": logged.rounds}


def recipe_run(base: str, tree: Path, folder: Path) -> dict[str, Any]:
    """Make two rounds of a recipe of the checkout ``tree``, and return all that is to be compared."""
    import pytest

    from lightning_lowrank import FederatedLoop
    from tests import test_recipes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_recipes, "RECIPES", tree / "recipes")
        execute = test_recipes.commands(folder, patch)
        options = test_recipes.made_small((base,), patch)
        limits = {"max_epochs": 2, "limit_train_batches": 2, "limit_val_batches": 2, "logger": "false"}
        options += [word for name, value in limits.items() for word in (f"--trainer.{name}", str(value))]
        options += ["--federated.clients_per_round", "3", "--trainer.callbacks", "null", "--quiet"]
        run = execute("fit", *test_recipes.configs((base,)), *options)
    loop = next(each for each in run.trainer.callbacks if isinstance(each, FederatedLoop))
    return {
        "weights": {name: value.clone() for name, value in run.model.state_dict().items()},
        "bytes": loop.ledger.state_dict(),
        "logged": {name: float(value) for name, value in run.trainer.callback_metrics.items()},
    }


def runs(tree: Path) -> dict[str, Callable[[Path], dict[str, Any]]]:
    """All runs by their names, each a function of an empty folder."""
    from tests import test_recipes
    from tests.algorithms.methods import METHODS

    found: dict[str, Callable[[Path], dict[str, Any]]] = {}
    for name, method in METHODS.items():
        for form in method.forms:
            for execution, settings in EXECUTIONS.items():
                found[f"{name}, {form}, {execution}"] = partial(method_run, name, form, settings)
    for base in dict.fromkeys(names[0] for names in test_recipes.COMBINATIONS):
        found[f"recipe {base}"] = partial(recipe_run, base, tree)
    return found


def make(tree: Path, only: list[str], output: Path) -> None:
    """Make the runs with the package of ``tree``, and save what they end with."""
    import lightning.pytorch  # noqa: F401 sets its logger's level
    import torch

    import lightning_lowrank

    assert Path(lightning_lowrank.__file__).is_relative_to(tree), lightning_lowrank.__file__
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    chosen = {name: run for name, run in runs(tree).items() if not only or any(word in name for word in only)}
    results: dict[str, Any] = {}
    for number, (name, run) in enumerate(chosen.items()):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, io.StringIO() as said:
            try:
                torch.manual_seed(0)
                with redirect_stdout(said), redirect_stderr(said):
                    results[name] = run(Path(folder))
            except (Exception, SystemExit) as error:
                results[name] = {"refused": f"{type(error).__name__}: {error}"}
        print(f"{number + 1}/{len(chosen)} {name}, {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    torch.save(results, output)


def extracted(commit: str, folder: Path) -> Path:
    """Write the package and the recipes of a commit into a folder."""
    archive = subprocess.run(
        ["git", "archive", commit, "lightning_lowrank", "recipes"], cwd=REPOSITORY, capture_output=True, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="the commit to compare with, such as HEAD~3")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="runs whose names have one of these words"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the differences to this file")
    parser.add_argument("--make", nargs=2, type=Path, metavar=("TREE", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make(*options.make[:1], options.only, options.make[1])
        return
    if options.base is None:
        parser.error("--base is missing: the commit to compare with")
    import torch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "base").mkdir()
        trees = {"base": extracted(options.base, folder / "base"), "here": REPOSITORY}
        results = {}
        for side, tree in trees.items():
            # The package is the tree's, and the tests are this checkout's.
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(REPOSITORY)])}
            command = [sys.executable, __file__, "--make", str(tree), str(folder / f"{side}.pt")]
            words = ["--only", *options.only] if options.only else []
            subprocess.run([*command, *words], env=environment, check=True)
            results[side] = torch.load(folder / f"{side}.pt", weights_only=False)
    found = {name: list(differences(results["base"][name], results["here"][name])) for name in results["here"]}
    differing = {name: said for name, said in found.items() if said}
    for name, said in differing.items():
        print(name, *(f"    {each}" for each in said), sep="\n")
    refused = sum("refused" in result for result in results["here"].values())
    print(f"{len(found)} runs, of which {refused} are refused: {len(differing)} differ")
    if options.json is not None:
        options.json.write_text(json.dumps(differing, indent=1) + "\n")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
