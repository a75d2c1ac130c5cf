"""``recipes/equal_bytes/table.py``: one command makes the runs of all methods, their table and picture."""

import importlib.util
import json
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_lowrank.data import FashionMNIST

FOLDER = Path(__file__).parents[1] / "recipes" / "equal_bytes"


@pytest.fixture
def table(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("equal_bytes_table", FOLDER / "table.py")
    module = importlib.util.module_from_spec(spec)
    # Its dataclass looks it up.
    monkeypatch.setitem(sys.modules, "equal_bytes_table", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PAGE", tmp_path / "RESULTS.md")
    monkeypatch.setattr(module, "PICTURE", tmp_path / "accuracy.png")
    return module


class InThisProcess:
    def __init__(self, *arguments, **keywords):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit(self, function, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future


SIZES = {"FedAvg": [1000.0, 1000.0], "top-k": [60.0, 50.0]}


@pytest.fixture
def runs(table, monkeypatch):
    """The runs that were made: rates up to 0.1 do well, 0.1 best; 1.0 diverges."""
    found = []

    def made(trial, root, rounds):
        found.append((trial, rounds))
        first, later = SIZES[trial.method]
        level = {0.01: 0.5, 0.03: 0.6, 0.1: 0.8, 0.3: 0.7, 1.0: None}[trial.rate]
        if level is None:
            return {"rounds": rounds, "took": 1.0, "curve": None}
        level += 0.01 * trial.seed if not trial.searches else 0.0
        curve = [[first + later * number, level - 0.1 / (number + 1), 2.0 * number] for number in range(rounds)]
        return {"rounds": rounds, "took": 1.0, "idle": 0.5, "curve": curve}

    monkeypatch.setattr(table, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(table, "bytes_of_a_round", lambda setting, method, root: SIZES[method])
    monkeypatch.setattr(table, "made", made)
    return found


def call(table, tmp_path, *words):
    return table.main(["--methods", *SIZES, "--into", str(tmp_path / "RESULTS.json"), *words])


def test_the_rate_is_chosen_on_held_out_images_and_runs_are_made_once(table, runs, tmp_path):
    assert call(table, tmp_path, "--budgets", "32", "128", "--seeds", "0", "1") == 0
    # R is 100,000 bytes: 3 rounds of FedAvg within R/32, and none within R/128; 62 and 15 of the other.
    searched = [(trial.method, trial.rate, rounds) for trial, rounds in runs if trial.searches]
    rates = (0.01, 0.03, 0.1, 0.3, 1.0)
    # In R/32 the best rate of R/128 and the two beside it.
    assert searched == [
        *(("top-k", rate, 15) for rate in rates),
        *(("FedAvg", rate, 3) for rate in rates),
        *(("top-k", rate, 62) for rate in rates[1:4]),
    ]
    final = [(trial.method, trial.rate, trial.seed, rounds) for trial, rounds in runs if not trial.searches]
    assert final == [(method, 0.1, seed, n) for method, n in (("FedAvg", 3), ("top-k", 62)) for seed in (0, 1)]
    lines = (tmp_path / "RESULTS.md").read_text().splitlines()
    first, second = (line for line in lines if line.startswith(("| FedAvg | none", "| top-k | top_k")))
    # The last fifth of R/32 is rounds 50 to 62 of the one, and the third of the other.
    of_top_k = 100 * (0.805 - sum(0.1 / number for number in range(50, 63)) / 13)
    assert first.startswith(
        f"| top-k | top_k | 0 | 50% | {100 * (0.805 - sum(0.1 / n for n in range(13, 16)) / 3):.1f} ±"
    )
    assert f"| {of_top_k:.1f} ± 0.7 | 0.1 |" in first
    assert f"|  |  | {100 * (0.805 - 0.1 / 3):.1f} ± 0.7 | 0.1 |" in second
    assert (tmp_path / "accuracy.png").stat().st_size > 1000
    count = len(runs)
    # A page for three seeds says that one was not run.
    call(table, tmp_path, "--budgets", "32", "128", "--seeds", "0", "1", "2", "--page")
    assert f"| {of_top_k:.1f} ± 0.7 (1 of 3 not run) | 0.1 |" in (tmp_path / "RESULTS.md").read_text()
    assert call(table, tmp_path, "--budgets", "32", "128", "--seeds", "0", "1") == 0
    assert len(runs) == count
    # A larger budget needs longer runs, and a further seed one more.
    call(table, tmp_path, "--budgets", "8", "--seeds", "0", "2", "--methods", "FedAvg")
    assert {(trial.seed, rounds) for trial, rounds in runs[count:] if not trial.searches} == {(0, 12), (2, 12)}


def test_the_largest_budget_is_for_the_first_setting(table, runs, tmp_path, capsys):
    call(table, tmp_path, "--budgets", "8", "32", "--seeds", "0", "--settings", "fmnist", "iid")
    most = {trial.setting: max(n for each, n in runs if each.setting == trial.setting) for trial, _ in runs}
    assert most == {"fmnist": 249, "iid": 62}
    with pytest.raises(SystemExit):
        call(table, tmp_path, "--budgets", "8", "--settings", "fmnist", "iid")
    assert "for fmnist alone, got iid" in capsys.readouterr().err


def test_seeds_are_compared_after_the_same_bytes(table, tmp_path):
    options = SimpleNamespace(seeds=[0, 1])
    runs = table.Table(tmp_path / "RESULTS.json")
    # The one run is evaluated in each round, and the other, which is longer, in every third.
    curves = {seed: [[n * 1e6, 0.1 * n, 2.0 * n] for n in range(step, 9, step)] for seed, step in ((0, 1), (1, 3))}
    for seed, curve in curves.items():
        runs.content["runs"][f"fmnist | top-k | 0.1 | {seed}"] = {"rounds": 1, "curve": curve}
    assert table._first_at(runs, "fmnist", "top-k", 0.55, options) == ["6.0", "12"]
    assert table._first_at(runs, "fmnist", "top-k", 0.65, options) == ["", ""]
    # The second has no figure before round 3.
    assert table._first_at(runs, "fmnist", "top-k", 0.15, options) == ["3.0", "6"]


def test_a_rate_at_the_end_of_the_grid_has_a_neighbour_tried(table, runs, monkeypatch, tmp_path):
    inner = table.made

    def made(trial, root, rounds):
        levels = {0.001: 0.01, 0.003: 0.03, 0.01: 0.1, 0.03: 0.3} if trial.method == "top-k" else {3.0: 0.3, 1.0: 0.1}
        return inner(replace(trial, rate=levels.get(trial.rate, 1.0)), root, rounds)

    monkeypatch.setattr(table, "made", made)
    call(table, tmp_path, "--budgets", "32", "--seeds", "0")
    content = json.loads((tmp_path / "RESULTS.json").read_text())["runs"]
    # One is best at 0.01 and has 0.003 tried, the other is best at 1 and has 3 tried.
    rates = {
        name: [each.split(" | ")[2] for each in content if each.startswith(f"fmnist | {name} |")] for name in SIZES
    }
    assert sorted(set(rates["top-k"])) == ["0.003", "0.01", "0.03", "0.1", "0.3", "1"]
    assert sorted(set(rates["FedAvg"])) == ["0.01", "0.03", "0.1", "0.3", "1", "3"]
    final = {name.split(" | ")[1]: name.split(" | ")[2] for name in content if "held out" not in name}
    assert final == {"top-k": "0.01", "FedAvg": "1"}


def test_commands(table, runs, tmp_path, capsys):
    call(table, tmp_path, "--budgets", "32", "--seeds", "0")
    capsys.readouterr()
    assert call(table, tmp_path, "--budgets", "32", "--seeds", "0", "--commands") == 0
    _, line = capsys.readouterr().out.splitlines()
    words = line.split()
    assert words[:2] == ["lightning-lowrank", "fit"]
    assert words[2:6] == ["--config", f"{FOLDER / 'fmnist.yaml'}", "--config", f"{FOLDER / 'top_k.yaml'}"]
    assert words[6:] == [
        *("--seed_everything", "0", "--model.init_args.optimizer.init_args.lr", "0.1"),
        *("--trainer.max_epochs", "62"),
    ]


def test_a_convolutional_network_is_evaluated_in_some_rounds(table):
    trial = table.Trial("cnn4", "top-k", 0.1, 0, False)
    assert "--trainer.check_val_every_n_epoch" not in trial.words(79)
    assert trial.words(120)[-4:] == ["--trainer.check_val_every_n_epoch", "3", "--trainer.max_epochs", "120"]


def test_seeds_that_diverged_and_that_were_not_run(table):
    assert table._spread([0.5, 0.7], 2) == "60.0 ± 14.1"
    assert table._spread([0.5, None], 2) == "50.0 (1 of 2 diverged)"
    assert table._spread([0.5, 0.7, None], 4) == "60.0 (1 of 4 diverged, 1 of 4 not run)"
    assert table._spread([0.5], 3) == "50.0 (2 of 3 not run)"
    assert table._spread([None], 1) == "(1 of 1 diverged)"
    assert table._spread([], 3) == ""


def test_a_curve_keeps_its_ends_and_its_last_point(table):
    curve = [[number, 0.5, 0.0] for number in range(1, 1001)]
    thin = table.thinned(curve)
    assert thin[0] == curve[0]
    assert thin[-1] == curve[-1]
    assert 40 <= len(thin) <= 60
    assert table.thinned(curve[:5]) == curve[:5]


def test_accuracy_within_a_budget(table):
    assert table.rounds_within(100.0, 40.0, 30.0) == 3
    assert table.rounds_within(39.0, 40.0, 30.0) == 0
    curve = [[10, 0.5], [79, 0.6], [90, 0.7], [100, 0.8], [110, 0.9]]
    assert table.accuracy_at(curve, 100) == 0.75
    assert table.accuracy_at(curve, 60) == 0.5
    assert table.accuracy_at(curve, 9) is None
    assert table.accuracy_at(None, 100) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_is_the_recipes(table, monkeypatch, tmp_path):
    def images(self, train):
        draws = torch.Generator().manual_seed(int(train))
        samples = 2000 if train else 50
        return torch.randint(256, (samples, 1, 28, 28), dtype=torch.uint8, generator=draws), torch.arange(samples) % 10

    monkeypatch.setattr(FashionMNIST, "prepare_data", lambda self: None)
    monkeypatch.setattr(FashionMNIST, "load_images", images)
    monkeypatch.setenv("PL_GLOBAL_SEED", "99")
    monkeypatch.chdir(tmp_path)
    dense, sparse = (table.bytes_of_a_round("fmnist", name, ".") for name in ("FedAvg", "top-k"))
    # 199,210 numbers of 4 bytes to and from ten clients, and 64 of them with their positions.
    assert dense[1] == pytest.approx(20 * 4 * 199_210, rel=0.01)
    assert sparse[1] == pytest.approx(dense[1] / 64 * 1.3, rel=0.1)
    entry = table.made(table.Trial("fmnist", "top-k", 0.1, 0, False), ".", 3)
    assert [point[0] for point in entry["curve"]] == pytest.approx([sparse[1] * n for n in (1, 2, 3)], rel=0.05)
    assert entry["idle"] == pytest.approx(0.5, abs=0.01)
    searched = table.made(table.Trial("fmnist", "top-k", 0.1, 0, True), ".", 1)
    assert searched["curve"][0][1] != entry["curve"][0][1]
    assert table.made(table.Trial("fmnist", "FedAvg", 1e30, 0, False), ".", 1)["curve"] is None


def test_what_was_measured_is_kept_by_lines(table, runs, tmp_path):
    call(table, tmp_path, "--budgets", "32", "--seeds", "0")
    text = (tmp_path / "RESULTS.json").read_text()
    assert json.loads(text)["runs"]["fmnist | FedAvg | 1 | 100 | held out"]["accuracy"] == {"32": None, "128": None}
    assert len(text.splitlines()) > 12


def test_a_longer_run_that_diverges_keeps_the_accuracy_at_a_smaller_budget(table, tmp_path):
    results, trial = table.Table(tmp_path / "RESULTS.json"), table.Trial("fmnist", "top-k", 0.1, 0, True)
    results.content["bytes"] = {"fmnist | FedAvg": [1000.0, 1000.0], "fmnist | top-k": [50.0, 50.0]}
    results.add(trial, {"rounds": 15, "curve": [[750, 0.5, 1.0]]})
    results.add(trial, {"rounds": 62, "curve": None})
    assert (results.accuracy(trial, 128), results.accuracy(trial, 32)) == (0.5, None)


def test_a_longer_run_keeps_the_points_of_a_shorter_one(table, tmp_path):
    results, trial = table.Table(tmp_path / "RESULTS.json"), table.Trial("cnn4", "top-k", 0.1, 0, False)
    results.content["bytes"] = {"cnn4 | FedAvg": [1000.0, 1000.0], "cnn4 | top-k": [50.0, 50.0]}
    short = [[650, 0.4, 1.0], [700, 0.6, 1.1], [750, 0.8, 1.2]]
    results.add(trial, {"rounds": 15, "curve": short})
    results.add(trial, {"rounds": 62, "curve": [[700, 0.6, 1.1], [1400, 0.9, 2.2], [3100, 1.0, 5.0]]})
    entry = results.content["runs"][trial.name]
    assert entry["curve"] == [*short, [1400, 0.9, 2.2], [3100, 1.0, 5.0]]
    assert entry["accuracy"] == {"32": 1.0, "128": pytest.approx(0.6)}
