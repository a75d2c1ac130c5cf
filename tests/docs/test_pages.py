"""Readers who follow the pages word for word get where the pages say; links lead somewhere."""

import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs.page import LANGUAGES, ROOT, Reader, blocks

DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md"))
# Commands for who works on the package itself, and a table that its own command writes.
NOT_FOLLOWED = {"CONTRIBUTING.md", "modules.md"}
FOLLOWED = [page for page in PAGES if page.name not in NOT_FOLLOWED and blocks(page)]
MADE = ("methods/", "reference/", "measured/")
"""Folders of pages that are made when the site is built, which checks links to them."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def stand_in(monkeypatch, name):
    """Have a logger of Lightning, whose package or server is not here, take its arguments and write a table."""
    from lightning.pytorch import loggers

    signature = inspect.signature(getattr(loggers, name))

    def make(**arguments):
        signature.bind(**arguments)
        return loggers.CSVLogger("logged", name=name)

    monkeypatch.setattr(loggers, name, make)


@pytest.mark.slow
@pytest.mark.parametrize("page", FOLLOWED, ids=lambda page: str(page.relative_to(DOCS)))
def test_follow(page, folder, monkeypatch):
    if any("flower" in block.text for block in blocks(page) if block.language == "bash"):
        pytest.importorskip("flwr", reason="Flower needs Python 3.11")
    reader = Reader(folder)
    monkeypatch.setitem(sys.modules, "page", reader.module)
    for name in ("WandbLogger", "MLFlowLogger"):
        stand_in(monkeypatch, name)
    reader.follow(page)


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = (page.parent / path).resolve() if path else page
        if target.is_relative_to(DOCS) and str(target.relative_to(DOCS)).startswith(MADE):
            continue
        assert target.exists(), f"{page.name} links to {path}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}"


def test_every_block_has_a_language():
    unknown = {
        f"{page.name}:{block.line}": block.language
        for page in FOLLOWED
        for block in blocks(page)
        if block.language not in LANGUAGES
    }
    assert not unknown


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [page for page in PAGES if f"- {page.relative_to(DOCS).as_posix()}\n" not in navigation] == []


METHODS = yaml.safe_load((DOCS / "methods.yaml").read_text())


def test_every_method_and_operator_has_a_page_and_its_paper():
    from lightning_lowrank import aggregation, algorithms

    kinds = {name: value for name, value in vars(aggregation).items() if name in aggregation.__all__}
    operators = {
        name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, aggregation.Operator)
    }
    wanted = {*algorithms.__all__, *operators} - {"Operator"}
    assert METHODS.keys() == wanted
    citations = (DOCS / "citations.md").read_text()
    assert [name for name in wanted if f"`{name}`" not in citations] == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_recipes_of_the_gallery(part, folder, monkeypatch):
    """Two batches of each, as `fast_dev_run` has it; the methods' own tests say what they learn."""
    from lightning_lowrank.cli import main

    monkeypatch.syspath_prepend(DOCS)
    gallery = importlib.import_module("gallery")
    for name in list(METHODS)[part::4]:
        recipe = folder / f"{name}.yaml"
        recipe.write_text(yaml.safe_dump(gallery.recipe(name)))
        main(["fit", "--config", str(recipe), "--trainer.fast_dev_run", "2", "--quiet"])
