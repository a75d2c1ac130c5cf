"""What a fresh interpreter imports for the package and for each command, and that every public name is there.

How long that takes is measured in ``tests/benchmarks/start.py``.
"""

import json
import os
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import get_origin

import pytest
import torch

import lightning_lowrank
from tests.cli.run_folders import rows_of, write_run
from tests.grids import nightly_except

ROOT = Path(lightning_lowrank.__file__).parents[1]
FRESH = """
import json, sys
sys.argv = ["lightning-lowrank", *sys.argv[1:]]
try:
    {statement}
finally:
    print("\\n" + json.dumps([name for name in sys.modules if "." not in name or name.startswith("lightning_lowrank")]))
"""
COMMAND = "from lightning_lowrank.cli import main; main()"
HEAVY = {
    "torch",
    "lightning",
    "torchmetrics",
    "torchvision",
    "transformers",
    "scipy",
    "sklearn",
    "flwr",
    "peft",
    "pandas",
}
DRAWING = {"numpy", "matplotlib"}
OF_OTHERS = {
    *("flwr", "peft", "sklearn", "pandas"),
    *(f"lightning_lowrank.{name}" for name in ("cli.report", "plots", "cli.runs", "flower", "testing")),
}
"""What the commands with a model section leave to others."""
PACKAGES = [
    "lightning_lowrank",
    *(
        info.name
        for info in pkgutil.walk_packages(lightning_lowrank.__path__, "lightning_lowrank.")
        if info.ispkg and info.name not in ("lightning_lowrank.flower", "lightning_lowrank.internals")
    ),
]


def fresh(statement: str, *words: str | Path, columns: int = 80) -> tuple[str, set[str]]:
    """Run a statement in a new interpreter; return what it printed, and the modules that it imported."""
    done = subprocess.run(
        [sys.executable, "-c", FRESH.format(statement=statement), *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(columns)},
    )
    assert done.returncode == 0, done.stderr
    *printed, modules = done.stdout.splitlines()
    return "\n".join(printed), set(json.loads(modules))


def test_the_package_imports_nothing_until_a_name_is_used():
    _, modules = fresh("import lightning_lowrank")
    assert not modules & (HEAVY | DRAWING)
    assert {name for name in modules if name.startswith("lightning_lowrank")} == {"lightning_lowrank"}


@pytest.mark.nightly
def test_the_first_name_imports_all_so_that_short_names_are_known():
    _, modules = fresh("from lightning_lowrank import LowRank")
    assert {f"lightning_lowrank.algorithms.{name}" for name in ("fedmud", "split_mix", "tdpfed")} <= modules
    assert not modules & {"flwr", "peft", "sklearn", "pandas"}
    assert not any(name.startswith(("lightning_lowrank.cli", "lightning_lowrank.data")) for name in modules)


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--help"], ["-h"], ["export", "--help"], ["report", "--help"], ["flower", "-h"]])
def test_help_imports_no_library_that_computes(words):
    printed, modules = fresh(COMMAND, *words)
    assert printed.startswith("usage: lightning-lowrank")
    assert not modules & (HEAVY | DRAWING)


@pytest.mark.slow
def test_report_imports_no_torch(tmp_path):
    write_run(tmp_path / "run", rows_of([0.5, 0.75], up=10, down=10))
    printed, modules = fresh(COMMAND, "report", tmp_path / "run", "--output", tmp_path / "out")
    assert "0.7500 (2)" in printed
    assert (tmp_path / "out" / "rounds.png").is_file()
    assert not modules & HEAVY


@nightly_except("peft")
@pytest.mark.slow
@pytest.mark.parametrize("form", ["safetensors", "peft"])
def test_export_imports_no_lightning(tmp_path, form):
    from lightning_lowrank import LowRank, MatrixProduct
    from lightning_lowrank.interop.peft_layout import outline
    from tests.helpers import Module, network

    module, callback = Module(network()), LowRank(MatrixProduct(), rank=2, role="update")
    callback.convert(module)
    described = {**callback.state_dict(), "outline": outline(module).to_dict()}
    saved = {"state_dict": module.state_dict(), "callbacks": {"LowRank": described}}
    torch.save(saved, tmp_path / "run.ckpt")
    printed, modules = fresh(COMMAND, "export", tmp_path / "run.ckpt", tmp_path / "out", "--format", form)
    assert "wrote" in printed
    # PEFT imports transformers, which imports most of what is installed.
    assert not modules & ({"lightning"} if form == "peft" else {*HEAVY, "matplotlib"} - {"torch"})


@pytest.mark.nightly
def test_inspect_imports_no_other_command():
    recipe = ROOT / "recipes" / "quickstart.yaml"
    printed, modules = fresh(COMMAND, "inspect", "--config", recipe)
    assert "bytes for client 0 in the first round" in printed
    assert not modules & OF_OTHERS


@pytest.mark.nightly
@pytest.mark.parametrize("columns", [60, 140])
def test_the_overview_is_the_help_of_the_whole_parser(columns):
    printed, _ = fresh(COMMAND, "--help", columns=columns)
    whole = "from lightning_lowrank.cli import commands; commands._HELP = (); commands.main()"
    expected, modules = fresh(whole, "--help", columns=columns)
    assert "lightning" in modules
    assert not modules & OF_OTHERS
    assert printed == expected


def test_every_public_name_is_there():
    for package in PACKAGES:
        module = import_module(package)
        names = getattr(module, "__all__", [])
        assert len(names) == len(set(names)), package
        for name in names:
            value = getattr(module, name)
            assert name in dir(module), name
            # In Python 3.10 also `dict[str, Tensor]` is an instance of type.
            if isinstance(value, type) and get_origin(value) is None:
                assert getattr(import_module(value.__module__), value.__name__) is value, name


def test_a_name_means_the_same_in_each_package_that_has_it():
    homes = [vars(import_module(f"lightning_lowrank.{home}")) for home in lightning_lowrank._HOMES]
    for name in lightning_lowrank.__all__:
        assert {id(home[name]) for home in homes if name in home} == {id(getattr(lightning_lowrank, name))}


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match=r"'lightning_lowrank'.*'FedMUDD'"):
        lightning_lowrank.FedMUDD  # noqa: B018
