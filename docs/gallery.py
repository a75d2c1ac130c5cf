"""The recipes of the gallery of methods, what they send and what they learn. Needs no mkdocs: tests run them too.

``python docs/gallery.py`` runs each recipe and writes ``docs/curves.json``; names after it run these alone.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

import lightning_lowrank.algorithms
import lightning_lowrank.lora
import lightning_lowrank.models
import lightning_lowrank.optim
from lightning_lowrank import FederatedLoop, LowRank
from lightning_lowrank.cli import main
from lightning_lowrank.cli.inspection import inspect_run
from lightning_lowrank.cli.runs import read_run
from lightning_lowrank.models import Classifier

METHODS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("methods.yaml").read_text("utf-8"))
CURVES = Path(__file__).with_name("curves.json")
LORA = {"factorization": "MatrixProduct", "rank": 8, "alpha": 16, "init": "lora", "freeze_rest": True}


def recipe(name: str) -> dict[str, Any]:
    """Return a whole recipe: the quickstart's network, data and clients with a method, or with an operator of LoRA."""
    entry = METHODS[name]
    is_operator = name not in lightning_lowrank.algorithms.__all__
    algorithm: Any = {"class_path": name, "init_args": entry["algorithm"]} if "algorithm" in entry else name
    if is_operator:
        algorithm = {"class_path": "FedLoRA", "init_args": {"operator": name, **entry.get("ranks", {})}}
    lora = {**LORA, "alpha": entry.get("alpha", LORA["alpha"]), "allow_larger": True}
    lowrank = lora if entry.get("lora") else entry.get("lowrank")
    sizes = {"in_features": 64, "hidden": [256, 256]}
    network: dict[str, Any] = entry.get("network", {"class_path": "lightning_lowrank.models.MLP", "init_args": sizes})
    if "ensemble" in entry:
        arguments = {"base": network, "bases": entry["ensemble"]}
        network = {"class_path": "lightning_lowrank.Ensemble", "init_args": arguments}
    optimizer = entry.get("optimizer", {"class_path": "torch.optim.SGD", "init_args": {"lr": entry.get("lr", 0.1)}})
    return {
        "seed_everything": 0,
        "federated": {
            "algorithm": algorithm,
            "clients": 20,
            "clients_per_round": 10,
            "partition": {"class_path": "Dirichlet", "init_args": {"alpha": 0.5, "min_samples": 5}},
            "local_epochs": 2,
            **entry.get("federated", {}),
        },
        **({"lowrank": lowrank} if lowrank else {}),
        "model": {"class_path": "Classifier", "init_args": {"network": network, "optimizer": optimizer}},
        "data": {"class_path": "Digits", "init_args": {"batch_size": 16}},
        "trainer": {"max_epochs": 30},
    }


@cache
def traffic(name: str) -> dict[str, dict[str, int]]:
    """Return ``bytes`` and ``numbers`` of the first round's messages, ``up`` and ``down``, of a method's recipe."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--federated", type=FederatedLoop)
    parser.add_argument("--lowrank", type=LowRank | None, default=None)
    parser.add_argument("--model", type=Classifier)
    given = {key: value for key, value in recipe(name).items() if key in ("federated", "lowrank", "model")}
    made = parser.instantiate(parser.parse_object(given))
    figures = inspect_run(made.model, made.lowrank, made.federated)
    if figures["problems"]:
        raise ValueError(f"{name}: {figures['problems']}")
    return figures["traffic"]


def metric(name: str) -> str:
    """Return the figure by which a method is judged: that of clients' own models, where they have such."""
    return "personal/val_acc" if "personal_test" in METHODS[name].get("federated", {}) else "val_acc"


def measure(name: str, rounds: int = 30) -> dict[str, list[float]]:
    """Run a method's recipe, and return what it logged in each round: bytes up and down so far, and accuracies."""
    entry = recipe(name)
    # What personal models are compared with: the global model, judged by the clients' own classes.
    entry["federated"].setdefault("personal_test", "matched_labels")
    with tempfile.TemporaryDirectory() as folder:
        logger = {"class_path": "CSVLogger", "init_args": {"save_dir": folder, "name": "run", "version": ""}}
        entry["trainer"] = {"max_epochs": rounds, "logger": logger, "enable_checkpointing": False}
        file = Path(folder) / "recipe.yaml"
        file.write_text(yaml.safe_dump(entry))
        main(["fit", "--config", str(file), "--quiet"])
        run = read_run(Path(folder) / "run")
    accuracies = {name: [round(value, 4) for _, value in run.series(name)] for name in ("val_acc", "personal/val_acc")}
    return {"bytes": [int(value) for _, value in run.series("comm/total_bytes")], **accuracies}


def write(names: list[str]) -> None:
    """Measure methods, and enter them into the file."""
    known = json.loads(CURVES.read_text("utf-8"))["methods"] if CURVES.exists() else {}
    for name in names:
        known[name] = measure(name)
        print(f"{name}: {known[name][metric(name)][-1]:.3f}", flush=True)
        ordered = ",\n".join(f"  {json.dumps(each)}: {json.dumps(known[each])}" for each in METHODS if each in known)
        made = f'{{"torch": "{version("torch")}", "methods": {{\n{ordered}\n}}}}\n'
        CURVES.write_text(made, "utf-8")


if __name__ == "__main__":
    chosen, sys.argv[1:] = sys.argv[1:], []  # Lightning's command line would read them too
    write(chosen or list(METHODS))
