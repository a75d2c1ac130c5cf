"""Checks of what is written, which `.ci/run` calls: ``python -m tests.docs.check``.

They compare text with text: links, README's limits, tables and pages that are made from data. What a reader can do with
a page is tested in `tests.docs.test_pages`. Each problem is a line, and the exit status is 1 if there is one.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterator
from pathlib import Path

import jupytext
import yaml

from lightning_lowrank import algorithms, lora
from tests.docs.page import CHECKED, DOCS, FOLLOWED, LANGUAGES, PAGES, README, ROOT, blocks
from tests.zoo.registry import GALLERIES, MissingExtra, load

MADE = ("methods/", "reference/", "measured/", "changelog.md")
"""Pages, and folders of pages, that are made when the site is built, which checks links to them."""
_TEXTS = (".py", ".md", ".yaml", ".toml")


def readme() -> Iterator[str]:
    text = README.read_text(encoding="utf-8")
    lines = len(text.splitlines())
    if lines > 150:
        yield f"README.md has {lines} lines, and at most 150 are wanted"
    table = text.split("## The methods")[1].split("\n## ")[0]
    for name in algorithms.__all__:
        if f"`{name}`" not in table:
            yield f"README.md: {name} is not in the table of methods"
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        size = (ROOT / picture).stat().st_size
        if size >= 150_000:
            yield f"README.md: {picture} has {size} bytes, and less than 150,000 are wanted"
    speed = text.split("## Speed")[1].split("\n## ")[0]
    for line in speed.splitlines():
        if (
            line.startswith(("|", "python "))
            and line not in (DOCS / "speed.md").read_text(encoding="utf-8").splitlines()
        ):
            yield f"README.md's section on speed has a line that docs/speed.md has not: {line}"
    commands = [line for block in blocks(README) for line in block.text.splitlines() if " pytest" in line]
    if len(commands) != 1:
        yield f"README.md has {len(commands)} commands with pytest, and 1 is wanted"
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    for command in commands:
        for step in command.split(" && ")[2:]:
            if step not in script:
                yield f".ci/run has no line {step!r}, which README.md's test command has"


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def links() -> Iterator[str]:
    for page in [*PAGES, README]:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = link.partition("#")
            if "://" in path:
                continue
            target = (page.parent / path).resolve() if path else page
            if target.is_relative_to(DOCS) and str(target.relative_to(DOCS)).startswith(MADE):
                continue
            if not target.exists() or (anchor and anchor not in anchors(target)):
                yield f"{page.relative_to(ROOT)} links to {link}, which does not exist"


def languages() -> Iterator[str]:
    for page in [*FOLLOWED, *CHECKED]:
        for block in blocks(page):
            if block.language not in LANGUAGES:
                yield f"{page.relative_to(ROOT)}:{block.line}: a block has the language {block.language!r}"


def navigation() -> Iterator[str]:
    text = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        if f"- {page.relative_to(DOCS).as_posix()}\n" not in text:
            yield f"mkdocs.yml: {page.relative_to(DOCS)} is not in the navigation"


def paths() -> Iterator[str]:
    """Paths of the repository that pages and recipes name without a link."""
    patterns = dict.fromkeys([*PAGES, README], r"(?<![\w/.])(?:recipes|tests)/[\w/]+\.(?:yaml|py|md)")
    patterns |= dict.fromkeys((ROOT / "recipes").rglob("*.yaml"), r"recipes/[\w/]+\.yaml")
    for file, pattern in patterns.items():
        for path in re.findall(pattern, file.read_text(encoding="utf-8")):
            if not (ROOT / path).exists():
                yield f"{file.relative_to(ROOT)} names {path}, which does not exist"


def installation() -> Iterator[str]:
    """The package is on no index: whoever registers its name would run code where a text says to install it."""
    name = "lightning_lowrank"
    pattern = re.compile(rf"{name}\[\w[\w,]*\](?! @ )|pip install \S*{name}|pypi\.org/project/{name}")
    for folder in ("lightning_lowrank", "docs", "recipes", "tests", "README.md", "CHANGELOG.md"):
        top = ROOT / folder
        for file in [top] if top.is_file() else sorted(each for each in top.rglob("*") if each.suffix in _TEXTS):
            for found in pattern.findall(file.read_text(encoding="utf-8")) if file != Path(__file__) else ():
                yield f"{file.relative_to(ROOT)} has {found!r}, a package that is on no index: write pip install '.[…]'"


def notebooks() -> Iterator[str]:
    """Whoever opens a tutorial in Jupyter runs what `test_follow` has run."""
    for page in PAGES:
        if page.parent.name != "tutorials":
            continue
        wanted = [block for block in blocks(page) if block.language != "text"]
        cells = [cell.source for cell in jupytext.read(page).cells if cell.cell_type == "code"]
        if cells != [("%%bash\n" if block.language == "bash" else "") + block.text.rstrip() for block in wanted]:
            yield f"{page.relative_to(ROOT)}: its cells as a notebook are not its blocks"
        # A notebook writes no files of its own accord.
        if not {(block.language, block.title) for block in wanted} <= {("python", None), ("bash", None)}:
            yield f"{page.relative_to(ROOT)}: a block is neither Python nor bash, or has a title"


def methods() -> Iterator[str]:
    listed = yaml.safe_load((DOCS / "methods.yaml").read_text()).keys()
    kinds = [getattr(lora, name) for name in lora.__all__]
    operators = [kind for kind in kinds if isinstance(kind, ABCMeta) and issubclass(kind, lora.Operator)]
    wanted = {*algorithms.__all__, *(kind.__name__ for kind in operators)} - {"Operator"}
    for name in sorted(listed ^ wanted):
        yield f"docs/methods.yaml and the package differ in {name}"
    citations = (DOCS / "citations.md").read_text()
    for name in sorted(wanted):
        if f"`{name}`" not in citations:
            yield f"docs/citations.md does not cite {name}"
    curves = json.loads((DOCS / "curves.json").read_text())["methods"]
    for name in sorted(listed ^ curves.keys()):
        yield f"docs/methods.yaml and docs/curves.json differ in {name}: python docs/gallery.py {name}"
    for name, curve in curves.items():
        if {len(values) for values in curve.values()} != {30} or curve["bytes"] != sorted(curve["bytes"]):
            yield f"docs/curves.json: {name} has not 30 rounds with growing bytes: python docs/gallery.py {name}"


def results() -> Iterator[str]:
    script = runpy.run_path(str(ROOT / "recipes" / "results.py"))
    if script["PAGE"].read_text() != script["page"](*script["read"]()):
        yield "recipes/RESULTS.md is not what its data give: run python recipes/results.py"
    counts = re.search(r"^\d+ figures: .*$", script["PAGE"].read_text(), re.MULTILINE)
    if counts is None or counts[0] not in (DOCS / "results.md").read_text():
        yield "docs/results.md has other numbers of figures than recipes/RESULTS.md"


def modules() -> Iterator[str]:
    text = (DOCS / "modules.md").read_text()
    if len(re.findall(r"^\| (?!module )[^|]+ \|", text, re.MULTILINE)) < 40:
        yield "docs/modules.md has less than 40 modules"
    if "| **" in text:
        yield "docs/modules.md has a module that differs or fails"
    for file in GALLERIES:
        try:
            exhibits = load(file)
        except MissingExtra:
            continue
        if f"## {exhibits.kind}\n" not in text:
            yield f"docs/modules.md has no heading {exhibits.kind}"
        for each in exhibits:
            if f"\n| {each.name} | {each.about} |" not in text:
                yield f"docs/modules.md has no row of {each.name} as it is"


def templates() -> Iterator[str]:
    for path in (DOCS / "templates").glob("*.py"):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines >= 95:
            yield f"{path.relative_to(ROOT)} has {lines} lines, and less than 95 are wanted"


CHECKS: tuple[Callable[[], Iterator[str]], ...] = (
    readme,
    links,
    languages,
    navigation,
    paths,
    installation,
    notebooks,
    methods,
    results,
    modules,
    templates,
)


def main() -> None:
    """Print what each check finds."""
    problems = [problem for check in CHECKS for problem in check()]
    print(*problems, f"{len(CHECKS)} checks of what is written: {len(problems)} problems", sep="\n")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
