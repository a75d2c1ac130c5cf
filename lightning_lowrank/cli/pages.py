"""Tables in text, HTML, Markdown, CSV and LaTeX, and the page of a report.

Run folders may come from anyone: every text is written as the format's own text, never as markup or a formula.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import html
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import rich.table
from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.text import Text

from lightning_lowrank.arguments import escape_formula, printable

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; }
body { margin: 0 auto; max-width: 96rem; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
.answers { background: #eef4fb; border-left: .3rem solid #1f77b4; padding: .6rem 1rem .6rem 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .45rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
th { vertical-align: bottom; border-bottom: 2px solid #888; }
td { overflow-wrap: anywhere; } .number { text-align: right; overflow-wrap: normal; }
th:first-child, td:first-child { position: sticky; left: 0; background: #fff; min-width: 6rem; }
figure { margin: 1rem 0; } img { display: block; width: 100%; max-width: 54rem; height: auto; }
"""
_PICTURES = {
    "bytes": "by bytes sent up and down",
    "rounds": "by round",
    "seconds": "by simulated seconds",
    "convergence": "constants of the operators' convergence",
}
"""Captions, in the order of the page."""
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


@dataclass
class Column:
    """A column of a table.

    Args:
        title: Its title, in one or two lines.
        texts: A cell for each row.
        figures: The numbers of the cells by name, with all digits: mean and sample standard deviation of each row,
            ``None`` for none. Empty for a column of words.
    """

    title: str
    texts: list[str]
    figures: dict[str, list[tuple[float, float] | None]] = field(default_factory=dict)


class Table(list[Column]):
    """Columns of equal length. Columns of numbers are aligned to the right."""

    def _rows(self) -> list[list[str]]:
        return [[column.title for column in self], *map(list, zip(*(column.texts for column in self), strict=True))]

    def text(self) -> list[str]:
        """Lines of text, of any width: a narrow console does not shorten them."""
        table = rich.table.Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for column in self:
            side: JustifyMethod = "right" if column.figures else "left"
            table.add_column(Text(column.title), justify=side, vertical="bottom", no_wrap=True)
        for row in self._rows()[1:]:
            table.add_row(*map(Text, row))
        file = io.StringIO()
        Console(file=file, width=10**6, color_system=None).print(table)
        return file.getvalue().removesuffix("\n").split("\n")

    def html(self) -> str:
        """An HTML table that scrolls if it is wider than the page."""
        kinds = [' class="number"' if column.figures else "" for column in self]
        head, *rows = ([_html(cell).replace("\n", "<br>") for cell in row] for row in self._rows())
        titles = "".join(f'<th scope="col"{kind}>{cell}</th>' for kind, cell in zip(kinds, head, strict=True))
        body = "\n".join(
            # Let a narrow column break between a figure and its deviation or bracket only, so that wide tables fit the
            # page.
            f"<tr>{''.join(f'<td{kind}>{cell}</td>' for kind, cell in zip(kinds, row, strict=True))}</tr>".replace(
                " ± ", " ±&nbsp;"
            )
            for row in rows
        )
        table = f"<table><thead><tr>{titles}</tr></thead><tbody>\n{body}\n</tbody></table>"
        return f'<div class="scroll">{table}</div>'

    def markdown(self) -> str:
        """A table in GitHub's Markdown."""
        rows = [list(map(_markdown, row)) for row in self._rows()]
        rows.insert(1, ["---:" if column.figures else "---" for column in self])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    def csv(self) -> str:
        """The figures as CSV with all their digits; deviations have columns of their own."""
        table: dict[str, list[str]] = {}
        for column in self:
            if not column.figures:
                table[_cell(column.title)] = [_cell(text) for text in column.texts]
            for name, figures in column.figures.items():
                table[_cell(name)] = ["" if each is None else repr(each[0]) for each in figures]
                if any(each is not None and each[1] for each in figures):
                    table[_cell(f"{name} deviation")] = ["" if each is None else repr(each[1]) for each in figures]
        file = io.StringIO(newline="")
        csv.writer(file).writerows([table, *zip(*table.values(), strict=True)])
        return file.getvalue()

    def latex(self) -> str:
        """A LaTeX table for the package booktabs."""
        head, *rows = (f"{' & '.join(map(_latex, row))} \\\\" for row in self._rows())
        alignment = "".join("r" if column.figures else "l" for column in self)
        about = "% \\usepackage{booktabs}, and [T1]{fontenc} for quotation marks in names"
        begin, end = f"\\begin{{tabular}}{{{alignment}}}", "\\end{tabular}"
        return "\n".join([about, begin, "\\toprule", head, "\\midrule", *rows, "\\bottomrule", end, ""])


def _html(text: str) -> str:
    return html.escape(printable(text))


def _markdown(text: str) -> str:
    # These characters start links, HTML, code and tables.
    return re.sub(r"([\\`<>|\[\]])", r"\\\1", printable(text.replace("\n", " ")))


def _cell(text: str) -> str:
    return escape_formula(printable(text.replace("\n", " ")))


def _latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in printable(text.replace("\n", " ")))


@dataclass
class Page:
    """The contents of a report's page.

    Args:
        title: The subject of the comparison.
        answers: Sentences that say which run is best.
        notes: Sentences on the runs that are left out, with reasons.
        tables: The tables by their titles: the figures first, without a title.
        pictures: PNG files by name. A picture called ``…_narrow`` takes the place of another one on narrow screens.
    """

    title: str
    answers: Sequence[str]
    notes: Sequence[str]
    tables: Mapping[str, Table]
    pictures: Mapping[str, bytes]

    def html(self) -> str:
        """An HTML page that contains its pictures and needs no other file, server or network.

        It has no script, and its Content-Security-Policy lets a browser load only the page's own content.
        """
        digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
        policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
        figures, *others = ((f"<h2>{_html(title)}</h2>" if title else "", each) for title, each in self.tables.items())
        parts = [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_html(self.title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{_html(self.title)}</h1>",
            _list(self.answers, "answers"),
            figures[1].html(),
        ]
        for stem, caption in _PICTURES.items():
            for name, more in ((stem, ""), (f"{stem}_each", ", each run by itself")):
                if name in self.pictures:
                    heading = f"{caption[0].upper()}{caption[1:]}{more}"
                    image = f'<img alt="{_html(f"{self.title}: {heading}")}" src="{_data(self.pictures[name])}">'
                    if narrow := self.pictures.get(f"{name}_narrow"):
                        source = f'<source media="(max-width: 40rem)" srcset="{_data(narrow)}">'
                        image = f"<picture>{source}{image}</picture>"
                    parts.append(f"<h2>{_html(heading)}</h2><figure>{image}</figure>")
        parts += [f"{title}{table.html()}" for title, table in others if table]
        parts += ["<h2>Notes</h2>" * bool(self.notes), _list(self.notes, "notes"), "</body></html>\n"]
        return "\n".join(part for part in parts if part)

    def markdown(self) -> str:
        """The report's sentences and tables in GitHub's Markdown."""
        parts = [f"# {_markdown(self.title)}", "\n".join(f"- {_markdown(each)}" for each in self.answers)]
        for title, table in self.tables.items():
            parts += [f"## {title}"] * bool(title and table) + [table.markdown()] * bool(table)
        parts.append("\n".join(f"- {_markdown(each)}" for each in self.notes))
        return "\n\n".join(part for part in parts if part) + "\n"


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _list(sentences: Sequence[str], kind: str) -> str:
    items = "".join(f"<li>{_html(each)}</li>" for each in sentences)
    return f'<ul class="{kind}">{items}</ul>' if items else ""
