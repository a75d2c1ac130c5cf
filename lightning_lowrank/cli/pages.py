"""What `report` found, written as a page for browsers, as Markdown, as CSV and as LaTeX.

Run folders may come from anyone: every text is written as the format's own text, never as markup or a formula.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_lowrank.cli.runs import printable

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
.answers { background: #eef4fb; border-left: .3rem solid #1f77b4; padding: .6rem 1rem .6rem 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .5rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th { vertical-align: bottom; border-bottom: 2px solid #888; white-space: pre; }
th:first-child, td:first-child { position: sticky; left: 0; background: #fff; }
th:first-child, td:first-child, .words th, .words td { text-align: left; }
.words td { vertical-align: top; }
.figures td:not(:first-child), .words td { white-space: normal; }
.paths td:last-child { overflow-wrap: anywhere; }
@media (max-width: 40rem) { td:first-child { white-space: normal; } }
figure { margin: 1rem 0; } img { display: block; width: 100%; max-width: 54rem; height: auto; }
"""
_PICTURES = {
    "bytes": "by bytes sent up and down",
    "rounds": "by round",
    "seconds": "by simulated seconds",
    "convergence": "Constants of the operators' convergence",
}
"""Captions, in the order of the page."""


@dataclass
class Column:
    """A column of a table.

    Args:
        title: Its title, in one or two lines.
        texts: A cell for each row.
        figures: What the cells say in full, by name: mean and sample standard deviation of each row, ``None`` where
            there is none. Empty for a column of words.
    """

    title: str
    texts: list[str]
    figures: dict[str, list[tuple[float, float] | None]] = field(default_factory=dict)


@dataclass
class Page:
    """All that a report says.

    Args:
        title: What was compared.
        answers: Sentences that say which run is best.
        notes: Sentences on what is left out, and why.
        results: The table of figures.
        settings: The table of what runs were told; may be empty.
        folders: The folders of each row.
        pictures: Files of pictures.
        narrow: PNG files of some of them for narrow screens, by the others' names without an ending.
        clients: The table of the clients that were judged; may be empty.
    """

    title: str
    answers: Sequence[str]
    notes: Sequence[str]
    results: Sequence[Column]
    settings: Sequence[Column]
    folders: Mapping[str, Sequence[str]]
    pictures: Sequence[Path]
    narrow: Mapping[str, bytes] = field(default_factory=dict)
    clients: Sequence[Column] = ()


def write_html(page: Page, path: Path) -> Path:
    """Write a page that holds its pictures and needs no other file, no server and no network.

    It has no script, and its Content-Security-Policy lets a browser load nothing but what it holds.
    """
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(page.title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_text(page.title)}</h1>",
    ]
    if page.answers:
        parts.append(_list(page.answers, "answers"))
    parts.append(_table(page.results, "figures"))
    order = {stem: place for place, stem in enumerate(_PICTURES)}
    for picture in sorted(page.pictures, key=lambda path: order.get(path.stem.removesuffix("_each"), len(order))):
        stem = picture.stem.removesuffix("_each")
        caption = _PICTURES.get(stem, stem) + ", each run by itself" * picture.stem.endswith("_each")
        image = f'<img alt="{_text(f"{page.title}: {caption}")}" src="{_data(picture.read_bytes())}">'
        if picture.stem in page.narrow:
            narrow = f'<source media="(max-width: 40rem)" srcset="{_data(page.narrow[picture.stem])}">'
            image = f"<picture>{narrow}{image}</picture>"
        parts += [f"<h2>{_text(caption[0].upper() + caption[1:])}</h2>", f"<figure>{image}</figure>"]
    for title, table in (("Settings", page.settings), ("Clients", page.clients)):
        if table:
            parts += [f"<h2>{title}</h2>", _table(table, "words")]
    folders = [Column("run", [*page.folders]), Column("folders", ["\n".join(each) for each in page.folders.values()])]
    parts += ["<h2>Folders</h2>", _table(folders, "words paths")]
    if page.notes:
        parts += ["<h2>Notes</h2>", _list(page.notes, "notes")]
    path.write_text("\n".join([*parts, "</body></html>", ""]), encoding="utf-8")
    return path


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _text(text: str) -> str:
    return html.escape("\n".join(map(printable, text.split("\n"))))


def _list(sentences: Sequence[str], kind: str) -> str:
    return f'<ul class="{kind}">{"".join(f"<li>{_text(each)}</li>" for each in sentences)}</ul>'


def _table(columns: Sequence[Column], kind: str) -> str:
    head = "".join(f'<th scope="col">{_text(column.title)}</th>' for column in columns)
    rows = zip(*(column.texts for column in columns), strict=True)
    body = "\n".join(f"<tr>{''.join(f'<td>{_cell_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    table = f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _cell_text(cell: str) -> str:
    # A narrow column breaks a figure before its brackets alone.
    return _text(cell).replace("\n", "<br>").replace(" ± ", "&nbsp;±&nbsp;")


def write_markdown(page: Page, path: Path) -> Path:
    """Write the tables as GitHub's Markdown."""
    parts = [f"# {_markdown(page.title)}", ""]
    parts += [f"- {_markdown(each)}" for each in page.answers] + [""] * bool(page.answers)
    parts += [*_markdown_table(page.results), ""]
    for title, table in (("Settings", page.settings), ("Clients", page.clients)):
        if table:
            parts += [f"## {title}", "", *_markdown_table(table, words=True), ""]
    parts += [f"- {_markdown(each)}" for each in page.notes]
    path.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")
    return path


def _markdown_table(columns: Sequence[Column], words: bool = False) -> list[str]:
    rules = ["---" if words or not number else "---:" for number in range(len(columns))]
    rows = [[column.title for column in columns], rules, *zip(*(column.texts for column in columns), strict=True)]
    return [f"| {' | '.join(row if number == 1 else map(_markdown, row))} |" for number, row in enumerate(rows)]


def _markdown(text: str) -> str:
    # Links, HTML, code and tables begin with these.
    return re.sub(r"([\\`<>|\[\]])", r"\\\1", printable(text.replace("\n", " ")))


def write_csv(page: Page, path: Path) -> Path:
    """Write the figures with all their digits; deviations have columns of their own."""
    table: dict[str, list[str]] = {}
    for column in [*page.results, *page.settings[1:]]:
        if not column.figures:
            table[_cell(column.title)] = [_cell(text) for text in column.texts]
        for name, figures in column.figures.items():
            table[_cell(name)] = ["" if each is None else repr(each[0]) for each in figures]
            if any(each is not None and each[1] for each in figures):
                table[_cell(f"{name} deviation")] = ["" if each is None else repr(each[1]) for each in figures]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))
    return path


def _cell(text: str) -> str:
    text = printable(text.replace("\n", " "))
    # A spreadsheet would compute it.
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


_LATEX = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "<": "\\textless{}",
    ">": "\\textgreater{}",
    "|": "\\textbar{}",
    '"': "\\textquotedbl{}",
    "±": "$\\pm$",
    "–": "--",
    "…": "\\dots{}",
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in printable(text.replace("\n", " ")))


def write_latex(page: Page, path: Path) -> Path:
    """Write the table of figures for a paper that uses the package booktabs."""
    rows = zip(*(column.texts for column in page.results), strict=True)
    lines = [
        "% \\usepackage{booktabs}, and [T1]{fontenc} for quotation marks in names",
        f"\\begin{{tabular}}{{l{'r' * (len(page.results) - 1)}}}",
        "\\toprule",
        " & ".join(_latex(column.title) for column in page.results) + " \\\\",
        "\\midrule",
        *(" & ".join(map(_latex, row)) + " \\\\" for row in rows),
        "\\bottomrule",
        "\\end{tabular}",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
