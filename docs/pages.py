"""Makes those pages of the site that come from the code: the reference, the gallery of methods, and what was measured.

mkdocs calls the hooks ``on_config``, ``on_files`` and ``on_page_markdown`` (``hooks`` in ``mkdocs.yml``). mkdocstrings has
docstrings changed by `DocstringsAsMarkdown`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert as to_mathml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "federated": "Rounds, clients and partitions",
    "algorithms": "Methods",
    "layers": "Low-rank layers",
    "compression": "Codecs and channels",
    "aggregation": "Aggregators and LoRA operators",
    "callbacks": "Callbacks",
    "optim": "Optimizers",
    "interop": "PEFT and checkpoints",
    "data": "Data",
    "models": "Models",
    "testing": "Contract checks",
}
# What is public by its arguments, under another name.
BESIDE = {
    "federated": ("federated.settings.FederatedSettings",),
    "algorithms": ("algorithms.split_mix.Ensemble",),
}


@cache
def public_names() -> dict[str, str]:
    """Return the path of every public name, as the reference has it, by the name alone."""
    names = {}
    for package in PACKAGES:
        home = f"lightning_lowrank.{package}"
        names.update({name: f"{home}.{name}" for name in import_module(home).__all__})
        names.update({path.split(".")[-1]: f"lightning_lowrank.{path}" for path in BESIDE.get(package, ())})
    return names


# Docstrings

_SPANS = re.compile(
    r"(?P<code>``.+?``)"
    r"|:math:`(?P<math>[^`]+)`"
    r"|`(?P<text>[^`<]+?)\s*<(?P<url>https?:[^>`]+)>`__?"
    r"|(?::\w+:)?`~?(?P<name>[^`]+)`",
    re.DOTALL,
)
_FORMULA = re.compile(
    r"^(?P<indent> *)\.\. math::(?P<tex>(?: .*)?(?:\n(?:(?P=indent) +.*|\s*(?=\n(?P=indent)  )))*)", re.MULTILINE
)
_EXAMPLE = re.compile(r"((?:^ *>>>.*\n(?:^ *\S.*\n?)*)+)", re.MULTILINE)


def formula(tex: str, display: bool = False) -> str:
    """Return a formula as MathML, which browsers draw without a script, in one line."""
    tex = " ".join(tex.split())
    if "&" in tex or "\\\\" in tex:
        tex = rf"\begin{{aligned}}{tex}\end{{aligned}}"
    written = to_mathml(tex, display="block" if display else "inline")
    for sign in "*_`|[]":
        written = written.replace(sign, f"&#{ord(sign)};")
    # A line that begins with <math> would be a paragraph of its own.
    return f"<span>{written}</span>"


def _span(found: re.Match[str]) -> str:
    if found["code"]:
        return found["code"]
    if found["math"]:
        return formula(found["math"])
    if found["url"]:
        return f"[{' '.join(found['text'].split())}]({found['url']})"
    name = found["name"]
    first, _, member = name.removeprefix("lightning_lowrank.").rpartition("lightning_lowrank.")[2].partition(".")
    path = public_names().get(first)
    if path is None or not re.fullmatch(r"[\w.]+", name):
        return f"`{name}`"
    identifier = f"{path}.{member}" if member else path
    return f'<autoref identifier="{identifier}" optional><code>{name}</code></autoref>'


def markdown_of(text: str) -> str:
    """Return a docstring's text as Markdown: formulas, links and names of this package, outside of examples."""
    parts = _EXAMPLE.split(text)
    for index in range(0, len(parts), 2):
        with_formulas = _FORMULA.sub(
            lambda found: f"{found['indent']}{formula(found['tex'], display=True)}", parts[index]
        )
        parts[index] = _SPANS.sub(_span, with_formulas)
    return "".join(parts)


class DocstringsAsMarkdown(griffe.Extension):
    """Rewrites docstrings, which have a few of reStructuredText's roles, as Markdown."""

    def on_object(self, *, obj: griffe.Object, **others: Any) -> None:
        """Change the object's docstring in place."""
        if obj.docstring is not None:
            text = markdown_of(obj.docstring.value)
            # mkdocstrings knows sections by the plural.
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)


# The reference


def reference() -> Iterator[tuple[str, str]]:
    """Return path and text of the pages of all public names, with one of all of them first."""
    overview = ["# Reference\n", "Every public name.\n"]
    for package, title in PACKAGES.items():
        module = import_module(f"lightning_lowrank.{package}")
        paths = [*(f"{package}.{name}" for name in sorted(module.__all__, key=str.lower)), *BESIDE.get(package, ())]
        overview.append(f"## [{title}]({package}.md)\n\n`lightning_lowrank.{package}`\n")
        overview.append(", ".join(f"[`{path.split('.')[-1]}`][lightning_lowrank.{path}]" for path in paths) + "\n")
        about = markdown_of(inspect.getdoc(module) or "")
        # What hooks do, `Algorithm` says.
        options = "    options: {members: false}\n" if package == "algorithms" else ""
        directives = "\n".join(f"::: lightning_lowrank.{path}\n{options}" for path in paths)
        yield f"reference/{package}.md", f"# {title}\n\n{about}\n\n{directives}"
    yield "reference/index.md", "\n".join(overview)


# What was measured


def measured() -> Iterator[tuple[str, str]]:
    """Return path and text of the pages that stand beside the recipes."""
    for path in sorted((ROOT / "recipes").glob("*/RESULTS.md")):
        yield f"measured/{path.parent.name}.md", path.read_text(encoding="utf-8")


# Hooks of mkdocs

_PAGES: dict[str, str] = {}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the pages, and name them in the navigation."""
    _PAGES.clear()
    for make in (reference, measured):
        _PAGES.update(make())
    for entry in config.nav:
        if isinstance(entry, dict):
            for title, pages in entry.items():
                found = [page for page in _PAGES if page.startswith(f"{title.lower()}/")]
                pages += sorted(found, key=lambda page: (not page.endswith("index.md"), page))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for path, text in _PAGES.items():
        files.append(File.generated(config, path, content=text))
    return files


_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<path>(?:\.\./)+[^)#\s]+)\)")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository into links to their pages, or into their paths where they have none."""
    folder = (Path(config.docs_dir) / page.file.src_uri).parent

    def link(found: re.Match[str]) -> str:
        target = (folder / found["path"]).resolve()
        if not target.is_relative_to(ROOT) or target.is_relative_to(config.docs_dir):
            return found[0]
        path = target.relative_to(ROOT)
        if not target.exists():
            raise PluginError(f"{page.file.src_uri} links to {path}, which is not there.")
        if path.name == "RESULTS.md":
            up = "../" * page.file.src_uri.count("/")
            return f"[{found['text']}]({up}measured/{path.parent.name}.md)"
        return found["text"] if f"`{path}`" in found["text"] else f"{found['text']} (`{path}`)"

    return _LINK.sub(link, markdown)
