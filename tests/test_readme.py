"""What the README promises of itself; `tests.docs` follows its commands and code, and checks its links."""

import re

import pytest

from tests.docs.page import ROOT, blocks

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 180


def test_ci_runs_the_readmes_test_command():
    commands = [line for block in blocks(README) for line in block.text.splitlines() if " pytest" in line]
    assert len(commands) == 1
    steps = commands[0].split(" && ")
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert all(step in script for step in steps[2:])


@pytest.mark.filterwarnings("ignore")
def test_a_round_of_the_python_example_runs(tmp_path, monkeypatch, capsys):
    import lightning as L

    monkeypatch.chdir(tmp_path)
    trainer = L.Trainer
    monkeypatch.setattr(L, "Trainer", lambda max_epochs, **arguments: trainer(max_epochs=1, **arguments))
    namespace: dict = {}
    exec(next(block.text for block in blocks(README) if block.language == "python"), namespace)
    assert namespace["trainer"].callback_metrics["val_acc"] > 0.1
    assert namespace["trainer"].callback_metrics["comm/ratio"] < 1 / 8


def test_every_method_stands_in_the_table():
    from lightning_lowrank import algorithms

    table = TEXT.split("## The methods")[1].split("\n## ")[0]
    assert [name for name in algorithms.__all__ if f"`{name}`" not in table] == []


def test_its_picture_is_small():
    (picture,) = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", TEXT)
    assert (ROOT / picture).stat().st_size < 150_000
