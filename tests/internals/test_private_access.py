"""Private names of other libraries are used in ``internals`` alone."""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

import lightning_lowrank

ROOT = Path(lightning_lowrank.__file__).parent
FILES = [path for path in sorted(ROOT.rglob("*.py")) if "internals" not in path.parts]

EXTENSION_POINTS = {"_load_from_state_dict", "_save_to_state_dict"}
"""Methods that torch documents as ones to override, in the comments of ``nn.Module``."""

OF_METACLASSES = ("_abc_", "_backward_cls")
"""What Python and torch give to every class of a kind."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


@cache
def trees() -> list[tuple[str, ast.AST]]:
    return [(str(path.relative_to(ROOT)), ast.parse(path.read_text())) for path in FILES]


def own_names() -> set[str]:
    """Return the private names that the package itself defines."""
    names: set[str] = set()
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and is_private(node.attr)
                and ast.unparse(node.value) in ("self", "layer", "twin")
            ):
                names.add(node.attr)
    return names


def names_of_others() -> set[str]:
    """Return the private names of the objects that the package meets most."""
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    owners = (nn.Linear(1, 1), pl.LightningModule(), pl.LightningDataModule(), trainer, trainer.fit_loop)
    owners += (trainer.fit_loop.epoch_loop, optimizer, LightningCLI, DDPStrategy, torch)
    return {name for owner in owners for name in dir(owner) if is_private(name)}


@pytest.mark.slow
def test_no_import_of_private_names():
    found = []
    for file, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [part for alias in node.names for part in alias.name.split(".")]
            else:
                continue
            ours = isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_lowrank")
            found += [f"{file}:{node.lineno} imports {name}" for name in names if is_private(name) and not ours]
    assert not found


@pytest.mark.slow
def test_no_use_of_private_names():
    own, others = own_names(), names_of_others()
    found = [
        f"{file}:{node.lineno} uses {ast.unparse(node)}"
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and is_private(node.attr)
        and (node.attr not in own or (node.attr in others and ast.unparse(node.value) != "self"))
        and ast.unparse(node.value) != "super()"
    ]
    assert not found


def modules() -> Iterator[object]:
    for info in pkgutil.walk_packages([str(ROOT)], "lightning_lowrank."):
        if "internals" in info.name.split("."):
            continue
        try:
            yield importlib.import_module(info.name)
        except ImportError:
            assert info.name.split(".")[1] == "flower", info.name


def test_no_private_method_is_overridden():
    found = {
        f"{kind.__module__}.{kind.__qualname__} overrides {base.__name__}.{name}"
        for module in modules()
        for kind in vars(module).values()
        if inspect.isclass(kind) and kind.__module__.startswith("lightning_lowrank.")
        if ".internals." not in kind.__module__
        for base in kind.__mro__
        if base.__module__.split(".")[0] in ("torch", "lightning", "torchmetrics", "jsonargparse", "flwr", "argparse")
        for name in vars(kind).keys() & vars(base).keys()
        if is_private(name) and name not in EXTENSION_POINTS and not name.startswith(OF_METACLASSES)
    }
    assert not found


@pytest.mark.parametrize("name", ["_parameters", "_foreach_add_", "_logger_connector", "_get"])
def test_what_counts_as_the_name_of_another(name):
    assert name in names_of_others()
