"""The import graph of the package has no cycle, and imports point one way.

The graph is read from the source. An import inside a function counts, one under ``if TYPE_CHECKING`` does not.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "lightning_lowrank"
ROOT = Path(__file__).parents[1] / PACKAGE

TORCH_ONLY = (
    "patterns",
    "seeding",
    "registry",
    "arguments",
    "metric_direction",
    "run_metadata",
    "plots",
    "units",
    "layers",
    "optim",
    "compression",
    "aggregation",
)
LAYOUT = (
    "internals",
    *TORCH_ONLY,
    "configuration",
    "extras",
    "files",
    "pytorch_lightning_alias",
    "buffers",
    "multiply_adds",
    "federated",
    "lora",
    "algorithms",
    "interop",
    "callbacks",
    "data",
    "models",
    "cli",
    "flower",
    "testing",
    "",
)
"""What stands right below the package. Each may import itself and what stands before it; "" is ``__init__.py``."""

INTERNALS_OF_TORCH = {f"{PACKAGE}.internals.{name}" for name in ("__init__", "peft", "replaced", "torch")}
"""What of ``internals`` the torch-only areas may import."""

LIGHTNING = {"lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics"}


def sources(root: Path) -> dict[str, Path]:
    """Return the files of a package by their modules' names; a package is ``name.__init__``."""
    return {".".join(path.relative_to(root.parent).with_suffix("").parts): path for path in sorted(root.rglob("*.py"))}


def statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the import statements that can run, wherever they are."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING":
            yield from statements(ast.Module(node.orelse, []))
        else:
            yield from statements(node)


def imported_names(source: str, module: str) -> set[str]:
    """Return the dotted names that ``source`` imports; the last part may be a module or something in one."""
    names: set[str] = set()
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            around = module.split(".")[: -node.level] if node.level else []
            start = ".".join([*around, *([node.module] if node.module else [])])
            names |= {f"{start}.{alias.name}" for alias in node.names}
    return names


def import_graph(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return for each module the modules of the package that its imports run.

    To import a module runs the packages around it first. Those around the importing module are running already.
    """
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        graph[module] = set()
        for name in imported_names(path.read_text(), module):
            parts = name.split(".")
            prefixes = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
            run = [one for prefix in prefixes for one in (prefix, f"{prefix}.__init__") if one in files]
            graph[module] |= {
                one for one in run if one == run[-1] or not module.startswith(one.removesuffix("__init__"))
            }
    return graph


FILES = sources(ROOT)


@cache
def graph() -> dict[str, set[str]]:
    return import_graph(FILES)


def area(module: str) -> str:
    """Return what a module belongs to right below the package."""
    return module.split(".")[1].removesuffix("__init__")


def first_cycle(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []


def upward(graph: Mapping[str, set[str]]) -> list[str]:
    place = {name: number for number, name in enumerate(LAYOUT)}
    return [
        f"{module} imports {name}"
        for module, imported in graph.items()
        for name in sorted(imported)
        if place[area(name)] > place[area(module)]
    ]


def test_every_module_has_a_place_in_the_layout():
    assert {area(module) for module in FILES} <= set(LAYOUT)


@pytest.mark.slow
def test_no_import_cycle():
    assert not first_cycle(graph())


@pytest.mark.slow
def test_imports_point_up_the_layout():
    assert not upward(graph())


@pytest.mark.parametrize(
    "module", sorted(INTERNALS_OF_TORCH | {module for module in FILES if area(module) in TORCH_ONLY})
)
def test_torch_only_modules_import_no_lightning(module):
    names = imported_names(FILES[module].read_text(), module)
    assert not LIGHTNING & {name.split(".")[0] for name in names}
    assert {name for name in graph()[module] if area(name) == "internals"} <= INTERNALS_OF_TORCH


@pytest.mark.parametrize(
    ("statement", "counts"),
    [
        ("from lightning_lowrank.federated.loop import Loop", True),
        ("from lightning_lowrank.federated import loop", True),
        ("from lightning_lowrank.federated import Loop", True),
        ("from lightning_lowrank import Loop", True),
        ("import lightning_lowrank.federated.loop as loop", True),
        ("from ..federated.loop import Loop", True),
        ("from .. import federated", True),
        ("def function():\n    from lightning_lowrank.federated.loop import Loop", True),
        ("try:\n    import lightning_lowrank.federated\nexcept ImportError:\n    pass", True),
        ("if TYPE_CHECKING:\n    from lightning_lowrank.federated.loop import Loop", False),
        ("if typing.TYPE_CHECKING:\n    pass\nelse:\n    from lightning_lowrank.federated.loop import Loop", True),
        ("from lightning_lowrank.layers import other", False),
        ("from .other import name", False),
        ("import lightning", False),
    ],
)
def test_what_counts_as_an_import(tmp_path, statement, counts):
    files = {
        "__init__": "from lightning_lowrank.federated import Loop",
        "layers/__init__": "from lightning_lowrank.layers.base import Layer",
        "layers/base": statement,
        "layers/other": "",
        "federated/__init__": "from lightning_lowrank.federated.loop import Loop",
        "federated/loop": "from lightning_lowrank.layers.base import Layer",
    }
    for name, source in files.items():
        path = tmp_path / PACKAGE / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    imports = import_graph(sources(tmp_path / PACKAGE))
    assert bool(upward(imports)) == counts
    assert bool(first_cycle(imports)) == counts
