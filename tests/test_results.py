"""``recipes/results.py``: the page of published figures is what its data give, and runs are known by what they ran."""

import copy
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.grids import nightly_except

ROOT = Path(__file__).parents[1]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipes_results", ROOT / "recipes" / "results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


results = load()
KEY = "fedslop/mnist+rank_16"


@pytest.fixture(scope="module")
def data() -> tuple[dict[str, Any], dict[str, Any]]:
    return results.read()


@pytest.fixture
def papers(data) -> dict[str, Any]:
    """Return a copy of what the papers say, to be changed."""
    return copy.deepcopy(data[0])


def table_of(papers: dict[str, Any], folder: str, name: str) -> dict[str, Any]:
    paper = next(paper for paper in papers["papers"] if paper["folder"] == folder)
    return next(table for table in paper["tables"] if table["name"].startswith(name))


def run_of(*values: float) -> dict[str, Any]:
    """Return what is stored of runs with seeds 0, 1, …, whose best and last values are these."""
    rest = {"best_round": 90, "rounds": 100, "seconds": 60.0, "date": "2026-11-23", "commit": "abc1234"}
    return {str(seed): {"best": value, "last": value, "last_ten": value, **rest} for seed, value in enumerate(values)}


@pytest.mark.parametrize(
    ("theirs", "ours", "verdict"),
    [
        ("90.3 ± 0.2", "90.5", "within spread"),
        ("90.3 ± 0.2", "90.1", "within spread"),
        ("90.3 ± 0.2", "90.51", "near"),
        ("90.3 ± 0.2", "91.3", "near"),
        ("90.3 ± 0.2", "91.31", "off, above"),
        ("90.3 ± 0.2", "89.29", "off, below"),
        # Our spread counts, up to a point.
        ("90.3 ± 0.2", "90.9 ± 0.7", "within spread"),
        ("92.47 ± 0.63", "82.27 ± 13.95", "off, below"),
        ("92.47", "91.2 ± 13.95", "off, below"),
        # Where no spread is known, rounding alone is forgiven.
        ("90.3", "90.34", "within spread"),
        ("90.30", "90.34", "near"),
    ],
)
def test_verdicts(theirs, ours, verdict):
    assert results.judge(results.Figure.parse(theirs), results.Figure.parse(ours)) == verdict


@pytest.mark.slow
def test_runs_of_the_stored_part_take_the_place_of_earlier_figures(data):
    runs = run_of(88.0, 89.0, 90.0)
    page = results.page(data[0], {**data[1], KEY: runs})
    (line,) = [line for line in page.splitlines() if "| mnist+rank_16 |" in line]
    told = ["89.07 ± 1.13", "89.00 ± 1.00", "-0.07", "0 1 2", "60", "2026-11-23 (abc1234)", "within spread"]
    assert [each for each in told if each not in line.split(" | ") and f"{each} |" not in line] == []
    fewer = results.page(data[0], {**data[1], KEY: {"0": runs["0"]}})
    assert "| mnist+rank_16 | 89.07 ± 1.13 | 89.18 ± 0.17 |" in fewer
    shorter = results.page(data[0], {**data[1], KEY: {seed: {**run, "rounds": 99} for seed, run in runs.items()}})
    assert "| mnist+rank_16 | 89.07 ± 1.13 | 89.18 ± 0.17 |" in shorter


def test_a_single_earlier_run_is_one_of_the_seeds():
    key, before = (
        results.Key(("fedmud/fmnist", "fedmud/mud"), ()),
        {"best": 88.0, "round": 98, "last": 86.0, "seeds": [0]},
    )
    (run,) = run_of(90.0).values()

    def measured(stored, **changes):
        return results.measured_of(key, {str(key): stored}, {str(key): {**before, **changes}})

    found = measured({"1": run})
    assert (str(found.best), found.seeds, found.made) == ("89.00 ± 1.41", (0, 1), "2026-11-23 (abc1234), earlier")
    assert found.last_ten is None
    # The same seed again, a shortened run, and one run beside the mean of three.
    assert measured({"0": run}).seeds == (0,)
    assert str(measured({"0": run}).best) == "90.00"
    assert measured({"1": {**run, "rounds": 99}}).seeds == (0,)
    assert measured({"3": run}, seeds=[0, 1, 2]).seeds == (0, 1, 2)


def test_a_run_of_no_published_figure_is_refused(data):
    with pytest.raises(SystemExit, match=r"RESULTS\.json.*'fedslop/mnist\+carried_momentum'"):
        results.page(data[0], {**data[1], "fedslop/mnist+carried_momentum": run_of(90.0)})


@pytest.mark.slow
@pytest.mark.parametrize("varied", [None, []])
def test_a_figure_that_is_off_without_a_cause_or_what_was_varied_is_refused(data, papers, varied):
    stored = {**data[1], "fedmud/fmnist+fedlmt": run_of(80.0)}
    row = next(row for row in table_of(papers, "fedmud", "Table 1")["rows"] if row["name"] == "FedLMT")
    row.pop("why", None)
    row["varied"] = varied
    with pytest.raises(SystemExit, match=r"FedLMT.*FMNIST.*IID.*`varied`"):
        results.page(papers, stored)
    row["varied"] = ["the rate", "the seed"]
    assert re.search(r"\n\d\. Not found out\. Varied: the rate; the seed\.\n", results.page(papers, stored))
    row["why"] = "Because."
    assert re.search(r"\n\d\. Because\. Varied: the rate; the seed\.\n", results.page(papers, stored))


def test_a_figure_without_run_or_reason_is_refused(data, papers):
    del table_of(papers, "fedhm", "Table 7")["not_run"]
    with pytest.raises(SystemExit, match=r"7.*CIFAR.*IID"):
        results.page(papers, data[1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda entry: entry["recipes"].remove("quickstart"), "quickstart runs no published figure"),
        (lambda entry: entry["recipes"].append("fedslop/rank_16"), "fedslop/rank_16 runs a published figure"),
        (lambda entry: entry["recipes"].append("fedslop/rank_17"), "fedslop/rank_17 is not there"),
    ],
)
def test_every_recipe_is_of_a_published_figure_or_said_to_be_of_none(papers, change, said):
    assert results.unplaced(papers) == []
    change(papers["unpublished"][-1])
    (told,) = results.unplaced(papers)
    assert said in told


def test_the_commands_of_a_row(data, capsys, monkeypatch):
    monkeypatch.setattr(results.PAGE.__class__, "write_text", lambda *_: pytest.fail("it writes"))
    words = ["--rerun", "lora_aggregation/mnist+single_step+delta_0_1 --federated.local_steps 5*"]
    assert results.main([*words, "--commands", "--data", "images"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    configs = [f"--config recipes/lora_aggregation/{name}.yaml" for name in ("mnist", "single_step", "delta_0_1")]
    options = "--federated.local_steps 5 --trainer.max_epochs 60 --seeds 0 1 2"
    assert line.startswith(" ".join(["lightning-lowrank fit", *configs, options]))
    assert line.endswith("--data.root images")


@pytest.fixture(scope="module")
def printed() -> str:
    """Return the whole configuration of `KEY`, as a run's folder has it."""
    return results.printed_config(results.Key(("fedslop/mnist", "fedslop/rank_16")))


def write_run(folder: Path, config: str, rounds: int, began: int = 1, best: int | None = None) -> None:
    """Write a run whose accuracy rises from round to round, or is best in one of them."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(config)
    values = [0.9 if number + 1 == best else number / 200 for number in range(rounds)]
    lines = ["epoch,val_acc", *(f"{number},{values[number]}" for number in range(began - 1, rounds))]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    (folder / "run_metadata.json").write_text(
        json.dumps({"seconds": 12.5, "first_round": began, "software": {"commit": f"{20 * 'ab'} with changes"}})
    )


@nightly_except("--100-took", "seed_everything: 0-seed_everything: 7-100-took")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("replaced", "by", "rounds", "said"),
    [
        ("", "", 100, "took"),
        ("seed_everything: 0", "seed_everything: 7", 100, "took"),
        ("root: data", "root: elsewhere", 100, "took"),
        ("lr: 0.018", "lr: 0.1", 100, "optimizer.init_args.lr: 0.1 in place of 0.018"),
        ("max_epochs: 100", "max_epochs: 20", 20, "trainer.max_epochs: 20 in place of 100"),
        ("optimizer_state: reset", "optimizer_state: keep", 100, "optimizer_state: 'keep' in place of 'reset'"),
        ("", "", 99, f"99 of 100 rounds of {KEY}"),
    ],
)
def test_a_run_is_taken_if_its_configuration_is_the_recipes(data, tmp_path, printed, replaced, by, rounds, said):
    assert replaced in printed
    write_run(tmp_path, printed.replace(replaced, by) if replaced else printed, rounds)
    stored: dict[str, Any] = {}
    (told,) = results.take([tmp_path], data[0], stored)
    assert said in told
    if said != "took":
        assert stored == {}
        return
    (seed, found), *others = stored[KEY].items()
    assert others == []
    assert seed == ("7" if "7" in by else "0")
    figures = {name: found[name] for name in ("best", "best_round", "last", "last_ten", "rounds", "seconds", "commit")}
    assert figures == {
        "best": 49.5,
        "best_round": 100,
        "last": 49.5,
        "last_ten": 47.25,
        "rounds": 100,
        "seconds": 12.5,
        "commit": "abababa with changes",
    }


@pytest.mark.parametrize("folder", ["tdpfed", "lora_aggregation"])
@pytest.mark.nightly
def test_a_run_is_likely_of_its_own_recipes_whatever_its_numbers_look_like(data, folder):
    keys = list(dict.fromkeys(cell.key for cell in results.cells(data[0]) if cell.key is not None))
    for key in (key for key in keys if key.recipes[0].startswith(f"{folder}/")):
        said = {path: value for name in key.recipes for path, value in results._leaves(results.recipe(name), "")}
        said.update({results._place(path): yaml.safe_load(value) for path, value in key.options})
        settings = {path: float(value) if type(value) is int else value for path, value in said.items()}
        settings["trainer.max_epochs"] = 7
        assert key in results._likely(SimpleNamespace(settings=settings), keys)


@pytest.mark.slow
def test_shortened_runs_are_taken_if_asked_for_until_there_are_longer_ones(data, tmp_path, printed):
    short = printed.replace("max_epochs: 100", "max_epochs: 20")
    runs = {
        "cut": (printed, 30),
        "short": (short, 20),
        "whole": (printed.replace("everything: 0", "everything: 1"), 100),
    }
    for name, (config, rounds) in runs.items():
        write_run(tmp_path / name, config, rounds)
    stored: dict[str, Any] = {}

    def take(name: str, shortened: bool = True) -> str:
        (told,) = results.take([tmp_path / name], data[0], stored, shortened)
        return str(told)

    def rounds() -> dict[str, int]:
        return {seed: found["rounds"] for seed, found in stored[KEY].items()}

    assert "30 of 100 rounds" in take("cut", shortened=False)
    assert stored == {}
    assert "took" in take("short")
    assert rounds() == {"0": 20}
    assert "took" in take("cut")
    assert rounds() == {"0": 30}
    assert f"20 rounds of {KEY}, of which there are runs of 30" in take("short")
    assert "took" in take("whole", shortened=False)
    assert rounds() == {"1": 100}
    assert f"30 rounds of {KEY}, of which there are runs of 100" in take("cut")
    assert rounds() == {"1": 100}


@pytest.mark.slow
def test_a_run_that_went_on_is_put_together(data, tmp_path, printed):
    write_run(tmp_path / "first", printed, 40, best=30)
    resumed = printed.replace("ckpt_path: null", "ckpt_path: first/checkpoints/last.ckpt")
    assert resumed != printed
    write_run(tmp_path / "second", resumed, 100, began=36)
    for folder, time in (("first", 1), ("second", 2)):
        os.utime(tmp_path / folder / "metrics.csv", (time, time))
    stored: dict[str, Any] = {}
    (alone,) = results.take([tmp_path / "second"], data[0], stored)
    assert "the run whose first 35 rounds it went on from is not there" in alone
    assert stored == {}
    said = results.take([tmp_path], data[0], stored)
    assert ["40 of 100 rounds" in said[0], "took" in said[1]] == [True, True]
    found = stored[KEY]["0"]
    assert [found[name] for name in ("best", "best_round", "last", "rounds", "seconds")] == [90.0, 30, 49.5, 100, None]
