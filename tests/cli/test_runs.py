"""Runs read from folders whose numbers are known."""

import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.cli.runs import find_runs, group_by_seed, monitors, read_run, run_figures, short_names
from lightning_lowrank.run_metadata import write_metadata
from tests.cli.run_folders import configured, make_report, rounds_of, rows_of, write_run


def grouped(root: Path) -> list[list[str]]:
    runs = find_runs([root])
    return [[str(run.folder.relative_to(root.resolve())) for run in group] for group in group_by_seed(runs)]


@pytest.mark.parametrize(
    ("changes", "together"),
    [
        ([{}, {}], True),
        ([{}, {"federated__clients": 5}], False),
        ([{}, {"federated__momentum": 0.9}], False),
        ([{}, {"trainer__max_epochs": 9}], False),
        # Seeds that follow seed_everything, whose values are 0 and 1, in both runs or in neither.
        ([{"federated__seed": 0}, {"federated__seed": 1}], True),
        ([{}, {"federated__seed": 1}], True),
        ([{"federated__seed": 7}, {"federated__seed": 7}], True),
        ([{"federated__seed": 7}, {"federated__seed": 8}], False),
        ([{}, {"federated__seed": 7}], False),
        ([{}, {"data__init_args__seed": 1}], True),
        ([{}, {"data__init_args__seed": 2}], False),
        ([{}, {"data__init_args__split_seed": 2}], False),
        ([{"data__init_args__split_seed": 0}, {"data__init_args__split_seed": 1}], True),
        ([{"data__init_args__split_seed": 5}, {"data__init_args__split_seed": 6}], False),
        # What a seed is called is more than how it ends, and a list's items are told apart.
        ([{"data__init_args__unseed": 0}, {"data__init_args__unseed": 1}], False),
        ([{"data__parts": [{"seed": 2}, {"seed": 9}]}, {"data__parts": [{"seed": 3}, {"seed": 9}]}], False),
        ([{"data__parts": [{"seed": 0}, {"seed": 3}]}, {"data__parts": [{"seed": 1}, {"seed": 3}]}], True),
        # Only where a run writes to may differ otherwise.
        ([{"trainer__logger": True}, {"trainer__logger": [{"class_path": "CSVLogger"}]}], True),
        ([{"data__init_args__dirpath": "a"}, {"data__init_args__dirpath": "b"}], False),
        ([{"ckpt_path": "a"}, {"ckpt_path": None, "weights_only": False}], True),
        ([{"data__init_args__ckpt_path": "a"}, {"data__init_args__ckpt_path": "b"}], False),
        ([{"federated__share": float("nan")}, {"federated__share": float("nan")}], True),
    ],
)
def test_which_runs_differ_only_in_their_seed(tmp_path, changes, together):
    for seed, change in enumerate(changes):
        configured(tmp_path / f"version_{seed}", seed, rows_of([0.1], 1, 1), **change)
    expected = [["version_0", "version_1"]] if together else [["version_0"], ["version_1"]]
    assert grouped(tmp_path) == expected


def test_a_seed_counts_once_and_by_its_longest_run(tmp_path):
    for number, (seed, rounds) in enumerate([(1, 3), (0, 1), (0, 3), (2, 3), (0, 3), (1, 2)]):
        configured(tmp_path / f"version_{number}", seed, rows_of([0.5] * rounds, 1, 1), trainer__max_epochs=3)
    assert grouped(tmp_path) == [["version_4", "version_0", "version_3"], ["version_1"], ["version_2", "version_5"]]


def test_a_run_that_continues_a_killed_one_takes_its_seeds_place(tmp_path):
    for number, (seed, first, rounds) in enumerate([(0, 0, 4), (1, 0, 2), (1, 2, 2), (2, 0, 4)]):
        change = {"ckpt_path": "version_1/last.ckpt", "weights_only": True} if first else {"ckpt_path": None}
        rows = rows_of([0.5] * rounds, 1, 1, first=first)
        configured(tmp_path / f"version_{number}", seed, rows, trainer__max_epochs=4, **change)
    assert grouped(tmp_path) == [["version_0", "version_2", "version_3"], ["version_1"]]


@pytest.mark.parametrize("config", [None, "a: [", "- 1", "model: x", "seed_everything: false", "seed_everything: true"])
def test_runs_without_a_known_seed_stand_alone(tmp_path, config):
    for number in (0, 1):
        folder = write_run(tmp_path / f"version_{number}", rows_of([0.5], 1, 1))
        if config is not None:
            (folder / "config.yaml").write_text(config)
    assert grouped(tmp_path) == [["version_0"], ["version_1"]]


def test_a_run_that_was_not_seeded_is_none_of_several_seeds(tmp_path):
    for number, seed in enumerate((False, 1, 2)):
        configured(tmp_path / f"version_{number}", seed, rows_of([0.5], 1, 1))
    assert grouped(tmp_path) == [["version_0"], ["version_1", "version_2"]]


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        ([["low/version_0", "low/version_1"]], ["low"]),
        ([["a/version_0", "a/version_1"], ["b/version_0", "b/version_1"]], ["a", "b"]),
        ([["a/version_9", "a/version_10"], ["a/version_3"]], ["clients=1", "clients=2"]),
        ([["a/version_0"], ["a/version_1"], ["b/version_2"]], ["a (clients=1)", "a (clients=2)", "b"]),
        ([["seed1/version_0", "seed11/version_0"], ["other/version_0"]], ["seed{1,11}", "other"]),
        ([["a/version_0", "b/version_3"], ["c/version_0"]], ["{a,b}", "c"]),
        ([["a", "a/version_0"], ["c"]], ["a", "c"]),
    ],
)
def test_names_of_several_seeds_are_as_a_shell_would_read_them(tmp_path, groups, names):
    for number, group in enumerate(groups):
        for seed, folder in enumerate(group):
            configured(tmp_path / "runs" / folder, seed, rows_of([0.5], 1, 1), federated__clients=number + 1)
    folders = [tmp_path / "runs" / folder for group in groups for folder in group]
    found = group_by_seed(find_runs(folders))
    assert short_names(found) == names


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["runs/quickstart/version_0"], ["quickstart"]),
        (["runs/a/version_0", "runs/b/version_0"], ["a", "b"]),
        (["runs/a/version_0", "runs/a/version_1"], ["a, run 1", "a, run 2"]),
        (["a/version_0", "a/version_1", "a, run 1"], ["a, run 2", "a, run 3", "a, run 1"]),
        (["runs/a/version_0", "runs/b/c/version_0"], ["a", "b/c"]),
        (["runs/a", "runs/a/version_0"], ["a, run 1", "a, run 2"]),
        (["x/one/version_0", "y/one/version_0"], ["x", "y"]),
    ],
)
def test_names_are_short_and_distinct(tmp_path, folders, names):
    for folder in folders:
        write_run(tmp_path / folder, rows_of([0.5], 1, 1))
    assert short_names([[run] for run in find_runs([tmp_path / folder for folder in folders])]) == names


def test_a_folder_of_links_names_them(tmp_path):
    run = write_run(tmp_path / "runs" / "a", rows_of([0.5], 1, 1))
    (tmp_path / "chosen").mkdir()
    link = tmp_path / "chosen" / "linked"
    link.symlink_to(run)
    write_run(tmp_path / "chosen" / "b", rows_of([0.5], 1, 1))
    with pytest.warns(UserWarning, match="linked"):
        assert len(find_runs([tmp_path / "chosen"])) == 1
    assert len(find_runs([tmp_path / "chosen" / "b", link])) == 2


def test_a_run_is_found_once_by_whatever_path(tmp_path, monkeypatch):
    run = write_run(tmp_path / "runs" / "a" / "version_0", rows_of([0.5], 1, 1))
    monkeypatch.chdir(tmp_path)
    assert [found.folder for found in find_runs([Path("runs"), Path("runs/a"), run])] == [run]


def test_runs_of_one_folder_are_named_by_what_differs(tmp_path):
    method = {"class_path": "lightning_lowrank.FedMUD", "init_args": {"reset_interval": 1}}
    for number, changes in enumerate(
        [
            {"federated__algorithm": method, "federated__sizes": [3, 4]},
            {"federated__algorithm": {"class_path": "lightning_lowrank.FedAvg"}, "lowrank": {"rank": 4}},
            {"federated__algorithm": method, "federated__sizes": [3, 5]},
        ]
    ):
        configured(tmp_path / f"version_{number}", 0, rows_of([0.5], 1, 1), **changes)
    write_run(tmp_path / "version_3", rows_of([0.5], 1, 1))
    groups = [[run] for run in find_runs([tmp_path])]
    assert short_names(groups[:3]) == ["FedMUD, sizes=[3, 4]", "FedAvg", "FedMUD, sizes=[3, 5]"]
    assert short_names(groups[2:]) == ["FedMUD", tmp_path.name]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        # A class is named before a number, what it is given where it is needed, and no more than that.
        ([{"lr": 0.1, "algorithm": "FedAvg"}, {"lr": 0.2, "algorithm": "FedMUD"}], ["FedAvg", "FedMUD"]),
        (
            [{"rank": 1, "algorithm": "FedAvg"}, {"rank": 2, "algorithm": "FedAvg"}, {"algorithm": "FedMUD"}],
            ["FedAvg, rank=1", "FedAvg, rank=2", "FedMUD"],
        ),
        ([{"uplink": "TopK"}, {}], ["TopK", "no uplink"]),
        ([{"factorization": "CP"}, {}], ["CP", "dense"]),
        # The numbers that tell most apart.
        (
            [{"lr": lr, "steps": steps, "size": size} for lr, steps, size in ((1, 1, 1), (1, 2, 2), (2, 2, 3))],
            ["size=1", "size=2", "size=3"],
        ),
        ([{"name": "x" * 50}, {"name": "y"}], [f"name={'x' * 39}…", "name=y"]),
    ],
)
def test_names_say_no_more_than_tells_apart(tmp_path, changes, names):
    for number, change in enumerate(changes):
        given = {"federated": {}, "lowrank": {}, "model": "MLP"}
        for name, value in change.items():
            section = "lowrank" if name == "factorization" else "federated"
            given[section][name] = {"class_path": f"some.where.{value}"} if str(value)[:1].isupper() else value
        (write_run(tmp_path / f"version_{number}", rows_of([0.5], 1, 1)) / "config.yaml").write_text(
            yaml.safe_dump(given)
        )
    assert short_names([[run] for run in find_runs([tmp_path])]) == names


def test_runs_that_no_setting_tells_apart_are_named_by_their_seed(tmp_path):
    for number, seed in enumerate((5, 6, 6)):
        configured(tmp_path / f"version_{number}", seed, rows_of([0.5], 1, 1))
    name = tmp_path.name
    assert short_names([[run] for run in find_runs([tmp_path])]) == [
        f"{name}, seed 5",
        f"{name}, seed 6, run 1",
        f"{name}, seed 6, run 2",
    ]


def test_runs_of_python_are_named_by_their_hyperparameters(tmp_path):
    for number in (0, 1):
        folder = write_run(tmp_path / f"version_{number}", rows_of([0.5], 1, 1))
        (folder / "hparams.yaml").write_text(f"lr: 0.{number + 1}\nwidth: 8\n")
    assert short_names([[run] for run in find_runs([tmp_path])]) == ["lr=0.1", "lr=0.2"]


@pytest.mark.parametrize(
    ("written", "rounds"),
    [
        (b"", {}),
        (b"epoch,val_acc\n", {}),
        (b"val_acc\n0.5\n", {}),
        (b"\x00\xff\xfe", {}),
        # The last number may lack digits.
        (b"epoch,val_acc\n0,0.5\n1,0.", {0: {"val_acc": 0.5}, 1: {}}),
        (b"epoch,val_acc\n0,0.5\n1", {0: {"val_acc": 0.5}}),
        (b"epoch,val_acc\r\n0,0.5\r\n1,0.25\r", {0: {"val_acc": 0.5}, 1: {"val_acc": 0.25}}),
        (
            b"epoch,val_acc\n0,0.5\nnan,0.6\nx,0.7\n1,0.8,9,9\n2,\xff\n",
            {0: {"val_acc": 0.5}, 1: {"val_acc": 0.8}, 2: {}},
        ),
    ],
)
def test_what_is_broken_of_a_run_is_left_out(tmp_path, written, rounds):
    (tmp_path / "metrics.csv").write_bytes(written)
    (tmp_path / "config.yaml").write_bytes(b"\xff\x00: [")
    (run,) = find_runs([tmp_path])
    assert rounds_of(run) == rounds
    assert group_by_seed([run]) == [[run]]
    assert monitors([run]) == []


def test_what_configurations_monitor(tmp_path):
    saves = {"class_path": "ModelCheckpoint", "init_args": {"monitor": "val_x", "mode": "max"}}
    callbacks = [saves, {"class_path": "Timer"}]
    configured(tmp_path / "run", 0, rows_of([0.5], 1, 1), trainer__callbacks=callbacks, federated__algorithm="FedAvg")
    (run,) = find_runs([tmp_path])
    assert monitors([run]) == [("ModelCheckpoint", "val_x", "max")]
    assert run_figures(run)["algorithm"] == "FedAvg"


def test_an_evaluation_after_the_fit_is_no_round_and_the_seconds_are_of_all_rounds(tmp_path):
    rows = [*rows_of([0.1, 0.2, 0.3], 1, 1), {"epoch": 3, "step": 30, "val_acc": 0.3, "test_acc": 0.4}]
    folder = write_run(tmp_path / "run", rows)
    for first, told in ((1, "2.5"), (3, None)):
        write_metadata(folder, {"first_round": first, "seconds": 2.5})
        (run,) = find_runs([tmp_path])
        figures = run_figures(run)
        assert (figures["rounds"], figures["test_acc"], figures.get("seconds")) == (3, 0.4, told)
    plain = [{"epoch": number, "step": number, "val_acc": 0.5} for number in range(4)]
    write_run(tmp_path / "plain", plain)
    assert [run.count for run in find_runs([tmp_path])] == [4, 3]


def test_an_evaluation_before_a_further_fit_is_of_the_round_before(tmp_path):
    def made(number, steps=4):
        return {"epoch": number, "step": steps * (number + 1), "federated/clients": 2}

    first = {"epoch": 0, "step": 0, "val_acc": 0.1, "test/acc": 0.1}
    rows = [first, made(0), {"epoch": 1, "step": 4, "val_acc": 0.2, "test/acc": 0.3}]
    # Rows of the next round: a step's figure, a value of a batch, a validation inside the round and its own.
    rows += [{"epoch": 1, "step": 4, "loss": 0.7, "valued": 0.1}, {"epoch": 1, "step": 4, "val_acc_step": 0.4}]
    rows += [{"epoch": 0, "step": 5, "val_acc": 0.5}, {"epoch": 1, "step": 7, "val_acc": 0.6}, made(1)]
    # Another checkpoint's value does not replace the round's own.
    rows += [{"epoch": 2, "step": 8, "personal/val_acc": 0.8}, {"epoch": 2, "step": 8, "val_acc": 0.9}, made(2)]
    run = read_run(write_run(tmp_path / "run", [*rows, {"epoch": 3, "step": 12, "test/acc": 0.2}]))
    assert (run.count, run.series("test/acc"), run.last("test/acc")) == (3, [(1, 0.3)], 0.3)
    assert run.series("val_acc") == [(1, 0.5), (2, 0.6)]
    assert (run.series("personal/val_acc"), run.series("loss"), run.series("val_acc_step")) == (
        [(2, 0.8)],
        [(2, 0.7)],
        [(2, 0.4)],
    )
    # The only validation of a round of one step has the same step.
    rows = [made(0, 1), {"epoch": 1, "step": 1, "val_acc": 0.2}, made(1, 1), {"epoch": 2, "step": 2, "val_acc": 0.3}]
    run = read_run(write_run(tmp_path / "single", [*rows, made(2, 1)]))
    assert run.series("val_acc") == [(2, 0.2), (3, 0.3)]


def test_an_evaluation_before_the_rounds_that_a_run_continues_is_of_none(tmp_path):
    rows = [{"epoch": 0, "step": 0, "val_acc": 0.9}, {"epoch": 5, "step": 30, "comm/up_bytes": 1, "val_acc": 0.4}]
    run = read_run(write_run(tmp_path / "run", rows))
    assert (run.made.tolist(), run.series("val_acc")) == ([5], [(6, 0.4)])


@pytest.mark.slow
def test_a_large_file_is_read_by_column(tmp_path, monkeypatch):
    def refuse(*arguments, **named):
        pytest.fail("a dictionary for each row")

    monkeypatch.setattr("csv.DictReader", refuse)
    rounds = 30_000
    text = "".join(f"{number},{10 * number},0.{number:05},\n{number},,,{number}\n" for number in range(rounds))
    (tmp_path / "metrics.csv").write_text(f"epoch,step,val_acc,comm/total_bytes\n{text}")
    tracemalloc.start()
    (run,) = find_runs([tmp_path])
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert run.count == rounds
    assert run.series("val_acc")[-1] == (rounds, 0.29999)
    assert run.at("comm/total_bytes", 17) == 16
    # A row of a dictionary alone has more than 200 bytes; two arrays have 16 bytes for each figure.
    assert held < 4 * 16 * rounds + 100_000
    assert most < 64e6


def test_a_file_that_is_too_large_is_named_and_why(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_lowrank.cli.runs._MOST_CELLS", 20)
    write_run(tmp_path / "whole", [{"epoch": 0, "val_acc": 0.5}])
    write_run(tmp_path / "large", [{"epoch": number, "val_acc": 0.5} for number in range(11)])
    with pytest.raises(MisconfigurationException, match=r"large/metrics\.csv.*20 figures"):
        make_report([tmp_path / "large"], tmp_path / "out")
    _, text = make_report([tmp_path], tmp_path / "out")
    assert re.search(r"large is left out.*20 figures", text)


@pytest.mark.parametrize(
    ("names", "count"),
    [
        (["val_acc train_loss", "val_acc train_loss_epoch", "val_acc test_acc"], 2),
        (["train_loss", "train_loss", "test_acc"], 2),
        (["val_acc train_loss", "val_acc train_loss", "val_acc train_loss"], 3),
        (["val_acc train_loss", "val_acc train_loss", "val_acc lr-SGD"], 3),
        (["val_acc train_loss", "val_acc train_loss", ""], 3),
        # Steps between two loggings may be more than an epoch's.
        (["val_acc train_loss", "val_acc", "val_acc"], 3),
        (["val_acc", "val_acc", "val_acc"], 3),
        (["val_acc train_loss federated/clients", "val_acc train_loss", "val_acc"], 1),
        (["val_acc"], 1),
    ],
)
def test_an_evaluation_after_a_fit_without_a_federation_is_no_round(tmp_path, names, count):
    rows = [{"epoch": number, "step": number, **dict.fromkeys(each.split(), 0.5)} for number, each in enumerate(names)]
    write_run(tmp_path / "run", rows)
    (run,) = find_runs([tmp_path])
    assert run.count == count


@pytest.mark.slow
def test_files_are_read_as_utf_8_whatever_the_locale(tmp_path):
    (tmp_path / "clients.csv").write_text("client,samples\nzürich,3\n", encoding="utf-8")
    (tmp_path / "config.yaml").write_text("note: zürich\n", encoding="utf-8")
    (tmp_path / "metrics.csv").write_text("epoch,step,val_acc\n0,1,0.5\n", encoding="utf-8")
    read = (
        "import pathlib, sys; from lightning_lowrank.cli import runs; folder = pathlib.Path(sys.argv[1]);"
        "print(ascii([runs.read_run(folder).clients[0]['client'], runs._load_config(folder / 'config.yaml')['note']]))"
    )
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", read, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **locale}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == r"['z\xfcrich', 'z\xfcrich']"
