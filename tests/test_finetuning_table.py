"""``recipes/finetuning/table.py``: one command makes the runs of all operators, and their tables."""

import csv
import importlib.util
from abc import ABCMeta
from argparse import Namespace
from pathlib import Path

import pytest

from lightning_lowrank import lora
from lightning_lowrank.cli.runs import read_run
from lightning_lowrank.lora import Operator
from tests import texts
from tests.cli.run_folders import rows_of, write_run

SCRIPT = Path(__file__).parents[1] / "recipes" / "finetuning" / "table.py"


@pytest.fixture
def table(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("finetuning_table", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look it up.
    monkeypatch.setitem(__import__("sys").modules, "finetuning_table", module)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    return module


def test_every_operator_has_a_row(table):
    exported = {each for each in vars(lora).values() if isinstance(each, ABCMeta) and issubclass(each, Operator)}
    names = [*table.operators(), *table.CORES]
    assert {each.__name__ for each in exported - {Operator}} | {"FedSB", "Ravan"} == set(names)
    ten, seven = (table.rows(names, division) for division in table.FIRST)
    assert len(ten) == len(names)
    assert ten[0].name == "ProductSum"
    assert seven[0].name == "ZeroPadding"
    assert {row.name for row in ten} - {row.name for row in seven} >= {"ProductSum", "FedRPCA", "FedSB", "Ravan"}
    assert {row.name for row in ten if row.personal} >= {"FedSA", "FedInc"}


def figures(folder):
    with open(folder / "report.csv", newline="") as file:
        return {row["run"]: row for row in csv.DictReader(file)}


@pytest.mark.parametrize(
    ("accuracies", "losses", "chosen"),
    [
        ((0.5, 0.6), (0.6, 0.7), 0.01),
        ((0.6, 0.5), (0.7, 0.6), 0.001),
        ((0.5, 0.5), (0.7, 0.6), 0.01),
        ((0.5, 0.5), (0.6, 0.7), 0.001),
    ],
)
def test_a_rate_is_chosen_by_accuracy_and_then_by_loss(table, monkeypatch, accuracies, losses, chosen):
    runs = {}
    for rate, accuracy, loss in zip((0.001, 0.01), accuracies, losses, strict=True):
        rows = rows_of([accuracy], 10, 20)
        rows[0]["val_loss"] = loss
        runs[rate] = read_run(write_run(Path(str(rate)), rows))
    monkeypatch.setattr(table.Table, "run", lambda self, row, folder, rate, *others: runs[rate])
    options = Namespace(into=Path(), rates=list(runs), search_seed=0, search_rounds=1)
    assert table.Table(options, []).search(table.Row("FFA", "ten")) == (chosen, 30)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_tiny_table_and_going_on_with_it(table, capsys):
    pytest.importorskip("transformers")
    texts.save_files(Path("data/SST2"), train=800)
    texts.save_tokenizer(texts.save_model(Path("tiny")))
    further = ["--", "--model.init_args.model", "tiny", "--data.init_args.tokenizer", "tiny", "--trainer.callbacks"]
    further += ["null", "--trainer.enable_checkpointing", "false", "--federated.local_steps", "1"]

    def make(division, *words):
        given = ["--divisions", division, *words, "--rounds", "2", "--search-rounds", "1", *further]
        assert table.main(given) == 0
        return capsys.readouterr().out.count("lightning-lowrank fit")

    ten = ("ten", "--operators", "FFA", "ProductSum", "FedSA", "--seeds", "0", "1", "--rates", "0.003")
    assert make(*ten) == 3 * (1 + 2)
    into = Path("runs/finetuning_table")
    runs = {name: read_run(into / "ten" / name / "seed_1") for name in ("ProductSum", "FFA", "FedSA")}
    spent = {name: run.last("comm/total_bytes") for name, run in runs.items()}
    assert runs["ProductSum"].count == 2
    # It sends half of the factors, but all of the head, and begins no round that it cannot pay for.
    assert runs["FFA"].count > 2
    assert spent["FFA"] <= spent["ProductSum"] < spent["FFA"] * (1 + 1 / runs["FFA"].count)
    report = into / "report" / "ten"
    rounds, volumes = (figures(report / "common" / kind) for kind in ("equal_rounds", "equal_bytes"))
    assert len(rounds) == len(volumes) == 2
    assert {float(row["rounds"]) for row in rounds.values()} == {2.0}
    assert {row["seeds"] for row in volumes.values()} == {"2"}
    assert (report / "common" / "equal_bytes" / "bytes.png").is_file()
    assert len(figures(report / "personal" / "equal_rounds")) == 1
    assert "FFA: rate 0.003" in (report / "common" / "rates.txt").read_text()

    # Of two rates the one with the better accuracy is taken, or else with the lower loss.
    assert make("seven", "--operators", "ZeroPadding", "--seeds", "0", "--rates", "1e-9", "0.01") == 2 + 1
    tried = {rate: read_run(into / f"search/seven/ZeroPadding/rate_{rate}") for rate in ("1e-09", "0.01")}
    best = max(tried, key=lambda rate: (tried[rate].last("val_acc"), -tried[rate].last("val_loss")))
    assert f"rate {best}," in (into / "report/seven/common/rates.txt").read_text()

    # What is whole is not made again.
    (into / "ten" / "FFA" / "seed_0" / "metrics.csv").unlink()
    assert make(*ten) == 1

    # Nor is a run of other arguments taken for one of these.
    further[-1] = "2"
    with pytest.raises(SystemExit, match=r"bytes holds a run that was made with other arguments(.|\n)*steps 1"):
        make(*ten)
