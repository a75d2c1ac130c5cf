"""A small recipe, its simulation, and its run across sites within this process."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from lightning_lowrank.federated import Arrival, ClientInfo, RoundStage, Server
from lightning_lowrank.flower.approval import Approvals
from lightning_lowrank.flower.client import client_app
from lightning_lowrank.flower.recipe import build
from lightning_lowrank.flower.server import serve
from lightning_lowrank.models import Classifier
from tests.flower.local_grid import LocalGrid

BASE: dict[str, Any] = {
    "seed_everything": 3,
    "federated": {
        "algorithm": "FedAvg",
        "clients": 3,
        "clients_per_round": 2,
        "partition": {"class_path": "Dirichlet", "init_args": {"alpha": 0.5, "min_samples": 5}},
        "local_epochs": 2,
        "summary": False,
    },
    "model": {
        "class_path": "Classifier",
        "init_args": {
            "network": {"class_path": "MLP", "init_args": {"in_features": 64, "hidden": [16, 16], "out_features": 10}},
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
        },
    },
    "data": {"class_path": "Digits", "init_args": {"batch_size": 16, "limit_samples": 160}},
    "trainer": {
        "max_epochs": 4,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    },
}
SMALL = {
    "federated": {"clients_per_round": None, "local_epochs": 1},
    "data": {"init_args": {"limit_samples": 60}},
    "trainer": {"max_epochs": 2, "limit_val_batches": 0},
}
MUD = {"factorization": "BlockKronecker", "rank": 2, "role": "update", "decouple": True, "summary": False}
LORA = {
    "factorization": "MatrixProduct",
    "rank": 2,
    "alpha": 4,
    "role": "update",
    "init": "lora",
    "freeze_rest": True,
    "summary": False,
}

NORMALISED = {"init_args": {"network": {"class_path": "tests.flower.helpers.Normalised"}}}


class Decaying(Classifier):
    """Sets the learning rate of each round in a hook of its own."""

    def on_train_epoch_start(self) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.2 / (1 + self.current_epoch)


class Weighted(Classifier):
    """Registers class weights in a hook of its own."""

    def on_fit_start(self) -> None:
        if not hasattr(self, "rates"):
            self.register_buffer("rates", torch.linspace(0.5, 1.5, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1], weight=self.rates)


class Normalised(nn.Sequential):
    def __init__(self) -> None:
        norm = nn.BatchNorm1d(16)
        super().__init__(nn.Flatten(), nn.Linear(64, 16), norm, nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 10))


class Masked(nn.Module):
    """A network with a causal mask of -inf in its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 16), nn.Linear(16, 10)])
        self.register_buffer("mask", torch.full((16, 16), -torch.inf).triu(1))

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.layers[0](inputs.flatten(1)).relu()
        return self.layers[1](features @ self.mask.softmax(1).T)


class Counts(nn.Linear):
    """A network with a buffer that counts the samples in which each input is above 0."""

    def __init__(self) -> None:
        super().__init__(64, 10)
        self.register_buffer("usage", torch.zeros(64, dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.usage += (inputs.flatten(1) > 0).sum(0)
        return super().forward(inputs.flatten(1))


COUNTING = {"init_args": {"network": {"class_path": "tests.flower.helpers.Counts"}}}


class Counting(RoundStage):
    """Logs what the server sends and receives, and refuses client 2."""

    def begin_round(self, server: Server) -> None:
        self.counts = dict.fromkeys(("sent", "received", "steps", "passed", "absent"), 0.0)

    def down(self, client: ClientInfo, nbytes: int) -> None:
        self.counts["sent"] += nbytes

    def answered(self, client: ClientInfo, steps: int, nbytes: int) -> Exception | None:
        self.counts["received"] += nbytes
        self.counts["steps"] += steps
        return ValueError("not today") if client.id == 2 else None

    def absent(self, client: int) -> None:
        self.counts["absent"] += 1

    def arrived(self, arrival: Arrival) -> Arrival:
        self.counts["passed"] += 1
        return arrival

    def figures(self) -> dict[str, float]:
        return dict(self.counts)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self.counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts = dict(state["counts"])


def method(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": name, "init_args": arguments}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a nested dictionary with some entries changed; one that names a class replaces the old one."""
    whole = dict(base)
    for key, value in changes.items():
        old = whole.get(key)
        replaces = not isinstance(value, dict) or not isinstance(old, dict) or "class_path" in value
        whole[key] = value if replaces else merged(old, value)
    return whole


def write_recipe(folder: Path, changes: dict[str, Any], name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(merged(BASE, changes)))
    return path


def simulate(recipe: Path) -> Any:
    with _quiet():
        built = build([recipe])
        built.trainer.fit(built.module, datamodule=built.datamodule)
    return built.trainer


def approve(folder: Path, recipe: Path, policy: str = "min_clients: 1\n") -> str:
    """Write a site's policy, approve a recipe beside it, and return the policy's path."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "policy.yaml"
    file.write_text(policy)
    Approvals(folder / "approved").keep(recipe.read_bytes())
    return str(file)


def entries_of(log: Path) -> list[dict[str, Any]]:
    """The entries of an audit log."""
    return [json.loads(line) for line in log.read_text().splitlines()]


def reasons(folder: Path) -> list[str]:
    """The errors in the audit logs of a folder, which servers do not hear."""
    logs = sorted(folder.rglob("audit_client_*.jsonl"))
    return [entry["reason"] for log in logs for entry in entries_of(log) if "reason" in entry]


def run_on_sites(
    recipe: Path,
    folder: Path,
    fresh: bool = False,
    prepare: Callable[[LocalGrid], None] = lambda grid: None,
    node_config: Callable[[int], dict[str, Any]] = lambda client: {},
    clients: int = 3,
    **settings: Any,
) -> tuple[Any, LocalGrid]:
    """Run a recipe across sites; ``fresh``: each message finds a process of its own, as with Flower."""
    grid = LocalGrid()
    apps = [client_app(recipe) for _ in range(clients)]
    for client, app in enumerate(apps):
        grid.start(app, partition_id=client, state_dir=str(folder / "state"), **node_config(client))
    if fresh:
        grid.before = lambda node, message: _restart(grid, node, recipe)
    prepare(grid)
    with _quiet():
        trainer = serve(recipe, grid, **{"start_timeout": 1.0, "poll": 0.001, **settings})
    return trainer, grid


def _restart(grid: LocalGrid, node: int, recipe: Path) -> None:
    if node in grid.nodes:
        grid.nodes[node] = client_app(recipe), grid.nodes[node][1]


class _quiet(warnings.catch_warnings):
    def __enter__(self) -> Any:
        self.logger = logging.getLogger("lightning.pytorch")
        self.level = self.logger.level
        self.logger.setLevel(logging.ERROR)
        entered = super().__enter__()
        warnings.simplefilter("ignore")
        return entered

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.logger.setLevel(self.level)


def assert_equal_runs(simulated: Any, served: Any, ledger: bool = True) -> None:
    """Compare global models, metrics and, unless something was sent twice, the ledger."""
    one, other = simulated.lightning_module.state_dict(), served.lightning_module.state_dict()
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-6, atol=1e-7)
    left_out = ("train",) if ledger else ("train", "comm/")
    figures = {name for name in simulated.callback_metrics if not name.startswith(left_out)}
    for name in figures:
        torch.testing.assert_close(
            served.callback_metrics[name].double(), simulated.callback_metrics[name].double(), rtol=1e-5, atol=1e-6
        )
    assert {
        "federated/client_steps",
        *(("val_acc", "comm/up_bytes", "comm/idle_down_bytes") if ledger else ()),
    } <= figures
