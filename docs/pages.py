"""Makes what of the site comes from elsewhere: reference, gallery of methods, what was measured, tutorials' notebooks.

mkdocs calls the hooks ``on_config``, ``on_files`` and ``on_page_markdown`` (``hooks`` in ``mkdocs.yml``). mkdocstrings
has docstrings changed by `DocstringsAsMarkdown`.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, get_origin

import griffe
import jupytext
import yaml
from latex2mathml.converter import convert as to_mathml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))
gallery = import_module("gallery")
PACKAGES = {
    "federated": "Rounds, clients and partitions",
    "algorithms": "Methods",
    "layers": "Low-rank layers",
    "compression": "Codecs and channels",
    "aggregation": "Aggregators",
    "lora": "LoRA operators",
    "callbacks": "Callbacks",
    "optim": "Optimizers",
    "interop": "PEFT and checkpoints",
    "data": "Data",
    "models": "Models",
    "testing": "Contract checks",
    "flower": "Real sites",
}
# What is public by its arguments, under another name.
BESIDE = {
    "federated": ("federated.settings.FederatedSettings",),
    "algorithms": ("algorithms.split_mix.Ensemble",),
}


@cache
def _source() -> griffe.Object:
    """Return the package as its source has it: the bridge to Flower could not be imported without Flower."""
    # Loading one subpackage reads all of them: once is enough.
    return griffe.load("lightning_lowrank", search_paths=[ROOT])


def _package(name: str) -> griffe.Object:
    return _source()[name]


@cache
def public_names() -> dict[str, str]:
    """Return the path of every public name, as the reference has it, by the name alone."""
    names = {}
    for package in PACKAGES:
        home = f"lightning_lowrank.{package}"
        names.update({name: f"{home}.{name}" for name in _package(package).exports})
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
        tex = rf"\begin{{align*}}{tex}\end{{align*}}"
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
    parts = name.removeprefix("lightning_lowrank.").split(".")
    first, *members = parts[1:] if parts[0] in PACKAGES and len(parts) > 1 else parts
    if first not in public_names():
        return f"`{name}`"
    identifier = ".".join([public_names()[first], *members])
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
    overview = [
        "# Reference\n",
        "Every public name. [YAML keys](yaml.md) has the same by the keys of a recipe, [Commands](commands.md) the"
        " command line.\n",
    ]
    for package, title in PACKAGES.items():
        names = sorted(_package(package).exports, key=str.lower)
        paths = [*(f"{package}.{name}" for name in names), *BESIDE.get(package, ())]
        overview.append(f"## [{title}]({package}.md)\n\n`lightning_lowrank.{package}`\n")
        overview.append(", ".join(f"[`{path.split('.')[-1]}`][lightning_lowrank.{path}]" for path in paths) + "\n")
        about = markdown_of(_package(package).docstring.value)
        # What hooks do, `Algorithm` says.
        options = "    options: {members: false}\n" if package == "algorithms" else ""
        directives = "\n".join(f"::: lightning_lowrank.{path}\n{options}" for path in paths)
        yield f"reference/{package}.md", f"# {title}\n\n{about}\n\n{directives}"
    yield "reference/index.md", "\n".join(overview)


# The keys of a recipe

KEYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "`federated:`": (
        "The arguments of `FederatedLoop`. Leave the section out for plain training.",
        ("federated.settings.FederatedSettings",),
    ),
    "`lowrank:`": (
        "The arguments of `LowRank`. Leave the section out for dense weights.",
        ("layers.LowRankSettings", "callbacks.LowRank"),
    ),
}
CLASSES = {
    "`federated.algorithm:`": ("federated", "Algorithm"),
    "`federated.algorithm.operator:` of `FedLoRA`": ("lora", "Operator"),
    "`federated.partition:`": ("federated", "Partition"),
    "`federated.uplink:` and `downlink:`, lists": ("compression", "Codec"),
    "`federated.aggregator:`": ("aggregation", "Aggregator"),
    "`before` of robust rules": ("aggregation", "PreAggregation"),
    "`federated.attackers:`": ("federated", "Attack"),
    "`federated.objective:`": ("federated", "Objective"),
    "`federated.privacy:`": ("federated", "ClientPrivacy"),
    "`federated.system:`": ("federated", "SystemModel"),
    "numbers of `SystemModel`, for each client": ("federated", "Distribution"),
    "`lowrank.factorization:`": ("layers", "Factorization"),
}


def yaml_keys() -> Iterator[tuple[str, str]]:
    """Return path and text of the page of all keys of a recipe."""
    page = [
        "# YAML keys\n",
        "A recipe is a file of LightningCLI with two more sections, `federated:` and `lowrank:`. `model:`, `data:`,"
        " `trainer:`, `optimizer:`, `lr_scheduler:`, `seed_everything:`, `ckpt_path:`"
        " are [Lightning's own](https://lightning.ai/docs/pytorch/stable/cli/lightning_cli.html). Classes are named by"
        " `class_path` and get `init_args`. Those of this package need no more than their name, yours their import"
        " path. On the command line the same keys are options: `--federated.local_epochs 2`.\n",
    ]
    for title, (about, paths) in KEYS.items():
        page += [f"## {title}\n", f"{markdown_of(about)}\n"]
        for path in paths:
            page.append(_arguments(_find(path)))
    page += [
        "## `seeds:` and `quiet:`\n",
        "`seeds` makes `fit` run once for each of these values of `seed_everything`. `quiet` shows no bars, tables and"
        " notes. [Commands](commands.md) has the options that are no keys.\n",
    ]
    for title, (package, base) in CLASSES.items():
        found = [kind for kind in _public_classes() if issubclass(kind, _find(f"{package}.{base}"))]
        page.append(f"## {title}\n")
        page += [_class(kind) for kind in found if not inspect.isabstract(kind) and kind.__name__ not in _BASES]
    for title, package in SECTIONS.items():
        page.append(f"## {title}\n")
        home = import_module(f"lightning_lowrank.{package}")
        kinds = (vars(home)[name] for name in sorted(home.__all__) if name not in _BASES)
        page += [_class(kind) for kind in kinds if isinstance(kind, type) and not inspect.isabstract(kind)]
    yield "reference/yaml.md", "\n".join(page)


SECTIONS = {
    "`model:`, and `network:` of `Classifier`": "models",
    "`data:`": "data",
    "`trainer.callbacks:`, a list": "callbacks",
    "`optimizer:`": "optim",
}
_BASES = ("Algorithm", "Attack", "RobustRule", "CoordinateRule", "DistanceRule", "ProjectedOptimizer", "LowRank")


# The command


class _Declared(Exception):
    """A command has named its options."""


class _Declaring(argparse.ArgumentParser):
    def parse_args(self, *words: Any, **others: Any) -> Any:
        raise _Declared

    parse_known_args = parse_args


def commands() -> Iterator[tuple[str, str]]:
    """Return path and text of the page of the command line, from its own parsers."""
    from lightning_lowrank.cli.commands import _WITHOUT_MODEL

    page = [
        "# Commands\n",
        "`lightning-lowrank COMMAND --help` prints the same. In Python, `lightning_lowrank.cli.main(words)` runs a"
        " command with a list of words.\n",
        "## With a recipe\n",
        "These take `--config`, as often as needed, where a later file changes an earlier one, and every"
        " [YAML key](yaml.md) as an option. A name that is no file means a recipe of the package.\n",
        "- **`fit`** trains. `--seeds 0 1 2` makes one run for each of these seeds.\n"
        "- **`validate`** and **`test`** judge the model of `--ckpt_path` on the validation or the test data.\n"
        "- **`predict`** gives what the model of `--ckpt_path` puts out for the data.\n"
        "- **`inspect`** says what a run would cost and whether the module would work, without reading data. `--json`"
        " prints JSON instead of tables.\n\n"
        "`--quiet` shows no bars, tables and notes; `inspect` does not use it. All commands take a recipe with `seeds`,"
        " of which all but `fit` use the first.\n",
    ]
    for name, (run, summary) in sorted(_WITHOUT_MODEL.items()):
        parser = _Declaring(prog=name)
        try:
            run(parser, [])
        except _Declared:
            page += [f"## {name}\n", f"{summary}\n", *map(_option, parser._actions[1:]), ""]
        else:
            raise PluginError(f"lightning-lowrank {name} parses no words")
    yield "reference/commands.md", "\n".join(page)


def _option(action: argparse.Action) -> str:
    name = action.option_strings[-1] if action.option_strings else action.dest
    choices = f" ({', '.join(f'`{each}`' for each in action.choices)})" if action.choices else ""
    return f"- **`{name}`**{choices}: {action.help}"


def _find(path: str) -> Any:
    home, _, name = path.rpartition(".")
    return getattr(import_module(f"lightning_lowrank.{home}"), name)


@cache
def _public_classes() -> tuple[type, ...]:
    paths = (path.removeprefix("lightning_lowrank.") for path in public_names().values())
    found = {_find(path) for path in paths if not path.startswith("flower.")}
    # In Python 3.10 also `dict[str, Tensor]` is an instance of type.
    classes = (each for each in found if isinstance(each, type) and get_origin(each) is None)
    return tuple(sorted(classes, key=lambda kind: kind.__name__.lower()))


def _class(kind: type) -> str:
    return f"### {kind.__name__}\n\n{_linked(kind.__name__)}\n\n{_arguments(kind)}"


def _linked(name: str) -> str:
    return f"[`{name}`][{public_names()[name]}]"


def _arguments(kind: type) -> str:
    """Return the list of a class's arguments: name, type, default and description."""
    # A class says of its own arguments; those that it inherits, its bases describe.
    described: dict[str, str] = {}
    for each in reversed(inspect.getmro(kind) if inspect.isclass(kind) else (kind,)):
        for section in griffe.Docstring(each.__doc__ or "", parser="google").parse(warnings=False):
            if section.kind is griffe.DocstringSectionKind.parameters:
                described.update({argument.name: argument.description for argument in section.value})
    lines = []
    for argument in inspect.signature(kind).parameters.values():
        if argument.kind in (argument.VAR_KEYWORD, argument.VAR_POSITIONAL):
            continue
        default = "" if argument.default is argument.empty else f", default `{_shown(argument.default)}`"
        hint = argument.annotation if isinstance(argument.annotation, str) else _hint(argument.annotation)
        about = " ".join(markdown_of(described.get(argument.name, "")).split())
        lines.append(f"- **`{argument.name}`**{f' (`{hint}`{default})' if hint else default}: {about}".rstrip(": "))
    return "\n".join(lines) + "\n"


def _hint(annotation: Any) -> str:
    return "" if annotation is inspect.Parameter.empty else inspect.formatannotation(annotation)


def _shown(default: Any) -> str:
    """Return a default as a recipe would have it; a function by what it is."""
    if callable(default):
        return "a function"
    return "[]" if type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS" else repr(default)


# The gallery of methods


def methods() -> Iterator[tuple[str, str]]:
    """Return path and text of the gallery: an overview, and a page for each method and operator."""
    dense = gallery.traffic("FedAvg")
    curves = json.loads(gallery.CURVES.read_text("utf-8"))["methods"]
    groups: dict[str, list[str]] = {}
    for name, entry in gallery.METHODS.items():
        groups.setdefault(entry["group"], []).append(name)
        figures = gallery.traffic(name)
        yield f"methods/{name}.md", _method(name, entry, figures, dense, _measured(name, curves))
    rows = ["# Methods\n", _ABOUT_METHODS]
    for group, names in groups.items():
        rows += [
            f"## {group}\n",
            "| method | when | bytes up | bytes down | MB | accuracy |",
            "|---|---|--:|--:|--:|--:|",
        ]
        for name in names:
            figures = gallery.traffic(name)
            sizes = " | ".join(f"{figures[way]['bytes']:,}" for way in ("up", "down"))
            moved, reached = curves[name]["bytes"][-1] / 1e6, curves[name][gallery.metric(name)][-1]
            about = f"[{name}]({name}.md) | {gallery.METHODS[name]['when']}"
            rows.append(f"| {about} | {sizes} | {moved:,.1f} | {reached:.3f} |")
        rows.append("")
    yield "methods/index.md", "\n".join(rows)


_ABOUT_METHODS = """A page for each published method, and for each operator by which `FedLoRA` combines adapters. Bytes
are those of one client in the first round of the page's recipe: a network 64-256-256-10 (for `FedBN` a small ResNet).
Later rounds may send more, such as what the server has folded or stacked. Where clients differ in capacity, it is one
with the whole model.

The last two columns were measured: megabytes up and down of all clients in the 30 rounds of the page's recipe, and the
validation accuracy after them, on the digits, with seed 0. Of personal models it is the mean over clients, each on the
classes that it has.

```bash
python docs/gallery.py
```

It is one run of each, on a small problem, and says what a method costs, not which one is best:
[Which method?](../which_method.md) helps to choose. Settings are not tuned, except that LoRA's operators have the best
learning rate of 0.05, 0.1, 0.2 and 0.5, and Ravan that of 0.1, 0.5, 1 and 2. On your own clients they may rank
otherwise: [Your federated files](../howto/files.md) reads and judges those.

Clients of `RBLA`, `ZeroPadding` and `RaFLoRA` have ranks 8, 4 and 2 in turn, and `alpha` is 4 in place of 16, because
the scale α/r grows as the rank falls; with equal ranks the first two are `ProductSum` and the third is `SumProduct`.
Clients of `LoRAA2` upload 24, 12 or 6 of 24 ranks; with all of them it is `RoLoRA`.
"""

_WIDTH, _HEIGHT = 600, 260
"""Of the axes; names and ticks stand around them."""


def _measured(name: str, curves: dict[str, dict[str, list[float]]]) -> str:
    """Return what a method's recipe learned by the bytes that it sent, beside dense FedAvg."""
    metric = gallery.metric(name)
    said = f"The recipe below, with seed 0, by `python docs/gallery.py {name}`."
    if name == "LocalTraining":
        return f"{said} It sends nothing, and ends with a {metric} of {curves[name][metric][-1]:.3f}.\n"
    drawn = {name: curves[name]}
    if name != "FedAvg" and "network" not in gallery.METHODS[name]:
        said += " `FedAvg` is the same network, trained and sent whole."
        drawn["FedAvg"] = curves["FedAvg"]
    floor = curves["LocalTraining"][metric][-1] if metric.startswith("personal/") else None
    if floor is not None:
        said += " Each client is judged on the classes that it has. The dashed line is where `LocalTraining` ends."
    return f"{said}\n\n{picture(drawn, metric, floor)}\n"


def picture(curves: dict[str, dict[str, list[float]]], metric: str, level: float | None = None) -> str:
    """Return curves of a metric between 0 and 1 by bytes as SVG, which takes the page's colours."""
    spent = [math.log10(moved) for curve in curves.values() for moved in curve["bytes"]]
    low, high = math.floor(min(spent)), math.ceil(max(spent))

    def place(moved: float, value: float) -> tuple[float, float]:
        return _WIDTH * (math.log10(moved) - low) / max(high - low, 1), _HEIGHT * (1 - value)

    parts = []
    for value in (0, 0.2, 0.4, 0.6, 0.8, 1):
        y = _HEIGHT * (1 - value)
        parts.append(
            f'<path d="M0 {y:.0f}H{_WIDTH}" opacity=".2"/><text x="-6" y="{y + 4:.0f}" text-anchor="end">{value}</text>'
        )
    for power in range(low, high + 1):
        x = place(10**power, 0)[0]
        label = f"{10 ** (power % 3)} {('B', 'kB', 'MB', 'GB', 'TB')[power // 3]}"
        parts.append(f'<path d="M{x:.0f} 0V{_HEIGHT}" opacity=".2"/>')
        parts.append(f'<text x="{x:.0f}" y="{_HEIGHT + 18}" text-anchor="middle">{label}</text>')
    if level is not None:
        parts.append(f'<path d="M0 {_HEIGHT * (1 - level):.0f}H{_WIDTH}" stroke-dasharray="4 3"/>')
    for number, (name, curve) in enumerate(curves.items()):
        points = [place(moved, value) for moved, value in zip(curve["bytes"], curve[metric], strict=True)]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        x, y = points[-1]
        parts.append(f'<g class="curve-{number}"><path d="M{line}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 6:.0f}" y="{y + (18 if number else -4):.0f}">{name}</text></g>')
    return (
        f'<svg class="curves" role="img" viewBox="-70 -20 {_WIDTH + 190} {_HEIGHT + 65}">'
        f"<title>{metric} of {' and '.join(curves)} by bytes up and down</title>{''.join(parts)}"
        f'<text x="0" y="-8">{metric}</text>'
        f'<text x="{_WIDTH / 2:.0f}" y="{_HEIGHT + 38}" text-anchor="middle">bytes up and down, all clients</text>'
        "</svg>"
    )


def _method(name: str, entry: dict[str, Any], figures: dict[str, Any], dense: dict[str, Any], measured: str) -> str:
    path = public_names()[name].removeprefix("lightning_lowrank.")
    rows = [
        f"| {way} | {figures[way]['numbers']:,} | {figures[way]['bytes']:,} |"
        f" {figures[way]['bytes'] / dense[way]['bytes']:.1%} |"
        for way in ("up", "down")
    ]
    text = yaml.safe_dump(gallery.recipe(name), sort_keys=False, default_flow_style=None, width=100)
    used = sorted(
        str(file.relative_to(ROOT))
        for file in (ROOT / "recipes").rglob("*.yaml")
        if file.name != "RESULTS.yaml"
        and re.search(rf"\b{name}\b", re.sub(r"#.*", "", file.read_text(encoding="utf-8")))
    )
    here = "\n".join(f"- `{file}`" for file in used)
    return "\n".join(
        [
            f"# {name}\n",
            f"**When to use it.** {entry['when']}\n",
            "## What it sends\n",
            "One client, first round of the recipe below; the last column is the share of what dense `FedAvg` sends for"
            " the network 64-256-256-10.\n",
            "| | numbers | bytes | of dense FedAvg |",
            "|---|--:|--:|--:|",
            *rows,
            "",
            f"## Measured here\n\n{measured}",
            "## What it does\n",
            f"::: lightning_lowrank.{path}\n    options: {{members: false, show_root_heading: false, heading_level: 3,"
            " show_root_toc_entry: false}\n",
            f"[Reference]({'../reference/' + path.split('.')[0]}.md) · [Paper](../citations.md)\n",
            "## In a recipe\n",
            f'```yaml title="{name.lower()}.yaml"\n{text}```\n',
            f"```bash\nlightning-lowrank fit --config {name.lower()}.yaml\n```\n",
            *([f"## In the repository\n\n{here}\n"] if used else []),
        ]
    )


# What was measured


def measured() -> Iterator[tuple[str, str]]:
    """Return path and text of the pages that stand beside the recipes, and of the one of all published figures."""
    for path in sorted((ROOT / "recipes").glob("*/RESULTS.md")):
        yield f"measured/{path.parent.name}.md", path.read_text(encoding="utf-8")
    everything = (ROOT / "recipes" / "RESULTS.md").read_text(encoding="utf-8")
    yield "measured/recipes.md", re.sub(r"\]\((\w+)/RESULTS\.md\)", r"](\1.md)", everything)


def changelog() -> Iterator[tuple[str, str]]:
    """Path and text of the repository's changelog, whose links begin at the repository's root."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    yield "changelog.md", re.sub(r"\]\(docs/", "](", text)


# Hooks of mkdocs

_PAGES: dict[str, str] = {}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the pages, and name them in the navigation."""
    _PAGES.clear()
    for make in (methods, reference, yaml_keys, commands, measured, changelog):
        _PAGES.update(make())
    for entry in config.nav:
        if isinstance(entry, dict):
            for title, pages in entry.items():
                found = [page for page in _PAGES if page.startswith(f"{title.lower()}/")]
                pages += sorted(found, key=lambda page: (not page.endswith("index.md"), page))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and the tutorials as notebooks."""
    for path, text in _PAGES.items():
        files.append(File.generated(config, path, content=text))
    for page in list(files.documentation_pages()):
        if _is_tutorial(page):
            path = str(Path(page.src_uri).with_suffix(".ipynb"))
            files.append(File.generated(config, path, content=notebook(page.content_string)))
    return files


def _is_tutorial(file: File) -> bool:
    return file.src_uri.startswith("tutorials/")


def notebook(text: str) -> str:
    """Return a page as a notebook: its blocks of Python and of commands are cells."""
    made = jupytext.reads(text, fmt="md")
    for number, cell in enumerate(made.cells):
        # Else the site would differ from build to build.
        cell["id"] = str(number)
    return jupytext.writes(made, fmt="ipynb")


_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<path>(?:\.\./)+[^)#\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository into links to their pages, or into their paths where they have none."""
    folder = (Path(config.docs_dir) / page.file.src_uri).parent

    def link(found: re.Match[str]) -> str:
        target = (folder / found["path"]).resolve()
        if not target.is_relative_to(ROOT):
            return found[0]
        if target.is_relative_to(config.docs_dir):
            # Pages of what was measured stand elsewhere than in the site.
            return found[0].replace(found["path"], Path(os.path.relpath(target, folder)).as_posix())
        path = target.relative_to(ROOT)
        if not target.exists():
            raise PluginError(f"{page.file.src_uri} links to {path}, which is not there.")
        if path.name == "RESULTS.md":
            up = "../" * page.file.src_uri.count("/")
            return f"[{found['text']}]({up}measured/{path.parent.name}.md)"
        return found["text"] if f"`{path}`" in found["text"] else f"{found['text']} (`{path}`)"

    if _is_tutorial(page.file):
        name = Path(page.file.src_uri).with_suffix(".ipynb").name
        title, rest = markdown.split("\n", 1)
        markdown = f"{title}\n\n[This page as a notebook]({name}){{download}}\n{rest}"
    return _LINK.sub(link, markdown)


_VERBATIM = re.compile(r"(<(?P<tag>pre|textarea|script)\b.*?</(?P=tag)>)", re.DOTALL)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """A page without the indentation and empty lines of the theme's templates: a fifth of its size."""
    shortened, last = [], 0
    for found in _VERBATIM.finditer(output):
        shortened += [re.sub(r"\s*\n\s*", "\n", output[last : found.start()]), found[0]]
        last = found.end()
    return "".join([*shortened, re.sub(r"\s*\n\s*", "\n", output[last:])])


def on_post_build(config: MkDocsConfig) -> None:
    """Remove what the theme has for its own debugging and for search in other languages: a fifth of the site."""
    scripts = Path(config.site_dir) / "assets"
    for file in (*scripts.rglob("*.map"), *(scripts / "javascripts" / "lunr").rglob("*.js")):
        file.unlink()
