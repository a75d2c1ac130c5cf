"""The recipes of the gallery of methods, and what they send. Needs no mkdocs, so that tests run the same recipes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

import lightning_lowrank.aggregation
import lightning_lowrank.algorithms
import lightning_lowrank.models
import lightning_lowrank.optim
from lightning_lowrank import FederatedLoop, LowRank
from lightning_lowrank.cli.inspection import inspect_run
from lightning_lowrank.models import Classifier

METHODS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("methods.yaml").read_text("utf-8"))
LORA = {"factorization": "MatrixProduct", "rank": 8, "alpha": 16, "init": "lora", "freeze_rest": True}


def recipe(name: str) -> dict[str, Any]:
    """Return a whole recipe: the quickstart's network, data and clients with a method, or with an operator of LoRA."""
    entry = METHODS[name]
    is_operator = name not in lightning_lowrank.algorithms.__all__
    algorithm: Any = {"class_path": name, "init_args": entry["algorithm"]} if "algorithm" in entry else name
    if is_operator:
        algorithm = {"class_path": "FedLoRA", "init_args": {"operator": name}}
    lowrank = {**LORA, "allow_larger": True} if entry.get("lora") else entry.get("lowrank")
    sizes = {"in_features": 64, "hidden": [256, 256]}
    network: dict[str, Any] = entry.get("network", {"class_path": "lightning_lowrank.models.MLP", "init_args": sizes})
    if "ensemble" in entry:
        arguments = {"base": network, "bases": entry["ensemble"]}
        network = {"class_path": "lightning_lowrank.Ensemble", "init_args": arguments}
    optimizer = entry.get("optimizer", {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}})
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
    made = parser.instantiate_classes(parser.parse_object(given))
    figures = inspect_run(made.model, made.lowrank, made.federated)
    if figures["problems"]:
        raise ValueError(f"{name}: {figures['problems']}")
    return figures["traffic"]
