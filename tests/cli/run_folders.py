"""Run folders whose numbers are known, for the tests of what reads them."""

import csv
import io
import sys
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from lightning_lowrank.cli.report import report
from lightning_lowrank.cli.runs import Run


def write_run(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    columns = sorted({name for row in rows for name in row})
    with open(folder / "metrics.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return folder


def rows_of(accuracies: list[float], up: int, down: int, first: int = 0, **more: float) -> list[dict[str, Any]]:
    """A round's figures come in two rows, as CSVLogger writes them."""
    rows: list[dict[str, Any]] = []
    for number, accuracy in enumerate(accuracies, start=first):
        rows.append({"epoch": number, "step": 10 * number, "val_acc": accuracy, "val_loss": 1 - accuracy})
        rows.append(
            {
                "epoch": number,
                "step": 10 * number,
                "comm/total_up_bytes": up * (number + 1),
                "comm/total_down_bytes": down * (number + 1),
                "comm/total_bytes": (up + down) * (number + 1),
                "comm/ratio": 0.0625,
                **more,
            }
        )
    return rows


def configured(folder: Path, seed: Any, rows: list[dict[str, Any]], **more: Any) -> Path:
    """Write a run with such a ``config.yaml`` as the command saves: the data have a seed that does not follow."""
    config = {
        "seed_everything": seed,
        "federated": {"clients": 4, "seed": None},
        "data": {"class_path": "Digits", "init_args": {"seed": 0}},
        "trainer": {
            "max_epochs": len(rows) // 2,
            "default_root_dir": str(folder),
            "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": str(folder.parent), "name": folder.name}},
            "callbacks": [{"class_path": "ModelCheckpoint", "init_args": {"dirpath": str(folder / "saved")}}],
        },
    }
    for path, value in more.items():
        place: Any = config
        *inner, last = path.split("__")
        for key in inner:
            place = place[key]
        place[last] = value
    write_run(folder, rows)
    (folder / "config.yaml").write_text("# lightning.pytorch==2.6.0\n" + yaml.safe_dump(config))
    return folder


def rounds_of(run: Run) -> dict[int, dict[str, float]]:
    """The figures of a run's rounds, from 0."""
    found: dict[int, dict[str, float]] = {int(number): {} for number in run.made}
    for name in run.figures:
        for number, value in run.series(name):
            found.setdefault(number - 1, {})[name] = value
    return found


def table_of(output: Path) -> list[dict[str, str]]:
    """The rows of ``report.md``'s table of figures by their columns' titles."""
    figures, _, _ = (output / "report.md").read_text().partition("\n## ")
    header, _, *rows = (
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in figures.splitlines()
        if line.startswith("|")
    )
    return [dict(zip(header, row, strict=True)) for row in rows]


def draw_nothing(monkeypatch: Any) -> None:
    """Leave out pictures, which take far longer than a table does: empty files stand for them."""

    def draw(curves: Any, metric: str, *more: Any, **named: Any) -> dict[str, bytes]:
        places = {"rounds": None, "bytes": "comm/total_bytes", "seconds": "system/seconds"}
        return {name: b"" for name, against in places.items() if any(map(len, curves(metric, against).values()))}

    monkeypatch.setattr(sys.modules[report.__module__], "draw", draw)


def make_report(paths: list[Path], output: Path, **arguments: Any) -> tuple[list[dict[str, str]], str]:
    text = io.StringIO()
    report(paths, output=output, console=Console(file=text, width=80), **arguments)
    return table_of(output), text.getvalue()
