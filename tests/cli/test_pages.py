"""The page and the tables of a report: they hold everything, and nothing in them acts."""

import base64
import csv
import hashlib
import re
import statistics
from html.parser import HTMLParser

import pytest

from lightning_lowrank.arguments import printable
from lightning_lowrank.cli.pages import Column, Page, Table
from tests.cli.run_folders import configured, draw_nothing, make_report, rows_of, write_run

HOSTILE = "</title><script>alert(1)</script>\"'><img src=x onerror=alert(1)>|\\input{/etc/passwd}$&\x1b\u202e\udcff"


class Parsed(HTMLParser):
    """A page's elements, the attributes of each, and its text by element."""

    VOID = ("meta", "img", "br", "source")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.text.append((self.open[-1], data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def hostile_page() -> Page:
    columns = [Column("run", [HOSTILE, "=1+1"]), Column(HOSTILE, ["0.5", HOSTILE], {HOSTILE: [(0.5, 0.0), None]})]
    settings = [Column("run", [HOSTILE, "=1+1"]), Column("method", ["@cmd", "-1"]), Column("full-width", ["＝1", "1"])]
    folders = Table([Column("run", [HOSTILE, "b"]), Column("folders", [HOSTILE, "x\ny"])])
    tables = {"": Table(columns), "Settings": Table(settings), "Folders": folders, "Clients": Table()}
    return Page(HOSTILE, [HOSTILE], [HOSTILE], tables, {"rounds": b"\x89PNG picture"})


def test_a_page_holds_everything_and_lets_nothing_act():
    text = hostile_page().html()
    parsed = Parsed(text)
    assert {tag for tag, _ in parsed.elements} == {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "ul", "li", "div", "figure", "img", "br"),
        *("table", "thead", "tbody", "tr", "th", "td"),
    }
    assert {name for _, attributes in parsed.elements for name in attributes} == {
        *("lang", "charset", "http-equiv", "content", "name", "class", "scope", "alt", "src")
    }
    (image,) = parsed.all("img")
    assert image["src"] == "data:image/png;base64," + base64.b64encode(b"\x89PNG picture").decode()
    assert "alert(1)" in image["alt"]
    assert not re.search(r"https?:|//|url\(|@import", re.sub(r"base64,\S+|sha256-\S+", "", text))
    # A browser takes the policy from the head alone, and what stands before it is not held to it.
    assert [attributes for tag, attributes in parsed.elements[:4]][2:] == parsed.all("meta")[:2]
    policy = parsed.all("meta")[1]["content"]
    (style,) = (data for tag, data in parsed.text if tag == "style")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.split("; ")[:3] == ["default-src 'none'", "img-src data:", f"style-src 'sha256-{digest}'"]
    shown = [data for _, data in parsed.text]
    assert shown.count(printable(HOSTILE)) >= 7


def test_pictures_by_bytes_come_first_and_have_narrow_forms():
    page = hostile_page()
    names = ("rounds", "rounds_narrow", "rounds_each", "bytes", "bytes_narrow", "convergence")
    page.pictures = {name: name.encode() for name in names}
    parsed = Parsed(page.html())

    def held(attribute: str | None) -> str:
        return base64.b64decode(attribute.removeprefix("data:image/png;base64,")).decode()

    assert [held(image["src"]) for image in parsed.all("img")] == ["bytes", "rounds", "rounds_each", "convergence"]
    assert [held(each["srcset"]) for each in parsed.all("source")] == ["bytes_narrow", "rounds_narrow"]
    assert {each["media"] for each in parsed.all("source")} == {"(max-width: 40rem)"}
    assert [tag for tag, _ in parsed.elements if tag in ("figure", "picture")] == [
        *("figure", "picture", "figure", "picture", "figure", "figure")
    ]


def test_a_figure_is_not_torn_from_its_deviation():
    table = Table([Column("run", ["a"]), Column("best (round)", ["0.5000 ± 0.1000 (2.5 ± 0.7)"])])
    assert "<td>0.5000 ±&nbsp;0.1000 (2.5 ±&nbsp;0.7)</td>" in table.html()


def test_numbers_are_aligned_to_the_right_in_every_form():
    table = Table([Column("run", ["a", "long"]), Column("MB\nup", ["9.00", "10.00"], {"MB up": [(9, 0), (10, 0)]})])
    assert table.text() == ["         MB", "run      up", "───────────", "a      9.00", "long  10.00"]
    assert table.markdown().splitlines()[:3] == ["| run | MB up |", "| --- | ---: |", "| a | 9.00 |"]
    assert "{lr}" in table.latex()
    assert [attributes for tag, attributes in Parsed(table.html()).elements if tag == "td"][1] == {"class": "number"}


def test_tables_of_other_formats_hold_no_markup_of_a_folders():
    page = hostile_page()
    markdown = page.markdown()
    bars = [len(re.findall(r"(?<!\\)\|", line)) for line in markdown.splitlines() if line.startswith("|")]
    assert bars == [3] * 4 + [4] * 4 + [3] * 4
    assert not re.search(r"(?<!\\)<", markdown)
    latex = page.tables[""].latex()
    commands = set(re.findall(r"\\([A-Za-z]+)", latex.replace("% \\usepackage", "")))
    assert commands == {
        *("begin", "end", "toprule", "midrule", "bottomrule"),
        *("textless", "textgreater", "textquotedbl", "textbar", "textbackslash"),
    }
    assert not re.search(r"(?<!\\)[$#]", latex)
    rows = list(csv.DictReader(Table([*page.tables[""], *page.tables["Settings"][1:]]).csv().splitlines()))
    assert [row["run"] for row in rows][1] == "'=1+1"
    assert [row["method"] for row in rows] == ["'@cmd", "-1"]
    assert [row["full-width"] for row in rows] == ["'＝1", "1"]
    assert not any("\x1b" in cell for row in rows for cell in row.values())


def test_tables_in_full_and_for_papers(tmp_path, monkeypatch):
    draw_nothing(monkeypatch)
    accuracies = [[0.1, 0.9, 0.7], [0.3, 0.5, 0.8]]
    for seed, values in enumerate(accuracies):
        configured(tmp_path / "runs" / "low" / f"version_{seed}", seed, rows_of(values, 1_234_567, 1))
    write_run(tmp_path / "runs" / "a_b", rows_of([0.25], 1, 1))
    make_report([tmp_path / "runs"], tmp_path / "out")
    with open(tmp_path / "out" / "report.csv", newline="") as file:
        plain, low = csv.DictReader(file)
    assert (low["run"], low["seeds"]) == ("low", "2")
    assert float(low["best val_acc"]) == statistics.mean([0.9, 0.8])
    assert float(low["best val_acc deviation"]) == pytest.approx(statistics.stdev([0.9, 0.8]))
    assert float(low["round of best val_acc"]) == 2.5
    assert float(low["MB up"]) == 3 * 1_234_567 / 1e6
    assert "MB up deviation" not in low
    assert plain["best val_acc deviation"] == "0.0"
    lines = (tmp_path / "out" / "report.tex").read_text().splitlines()
    assert lines[1] == r"\begin{tabular}{lrrrrrrr}"
    assert any(line.startswith(r"a\_b & 1 & 1 & 0.2500 (1) & 0.2500 &") for line in lines)
    assert any(r"0.8500 $\pm$ 0.0707 (2.5 $\pm$ 0.7)" in line and line.endswith(r"6.25\% \\") for line in lines)


def test_the_page_says_what_runs_were_told_and_where_they_are(tmp_path, monkeypatch):
    draw_nothing(monkeypatch)
    dirichlet = {"class_path": "a.Dirichlet", "init_args": {"alpha": 0.5, "min_samples": None}}
    layers = {"init_args": {"factorization": {"class_path": "b.CP"}, "role": "update", "rank": 4, "decouple": True}}
    network = {"class_path": "m.MLP", "init_args": {"hidden": [8]}}
    sgd = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.25}}
    for number, lr in enumerate((0.1, 0.2)):
        configured(
            tmp_path / f"version_{number}",
            0,
            rows_of([0.5], 1, 1),
            federated__partition=dirichlet,
            federated__clients_per_round=2 if number else 0.5,
            federated__uplink=[{"class_path": "c.TopK", "init_args": {"fraction": 0.1}}, {"class_path": "c.Half"}],
            lowrank=layers,
            data__lr=lr,
            data__init_args__batch_size=16,
            model={"class_path": "m.Classifier", "init_args": {"network": network, "optimizer": sgd}},
        )
    make_report([tmp_path], tmp_path / "out")
    page = Parsed((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
    cells = [data for tag, data in page.text if tag == "td"]
    for cell in (
        "Dirichlet(alpha=0.5)",
        "CP(), update, rank=4, decouple",
        "2 of 4",
        "TopK(fraction=0.1), Half()",
        "Classifier(network=MLP(hidden=[8]), optimizer=SGD(lr=0.25))",
        "Digits(batch_size=16, seed=0)",
        "16",
        # Not that of the data.
        "0.25",
    ):
        assert cell in cells
    assert str((tmp_path / "version_1").resolve()) in cells
