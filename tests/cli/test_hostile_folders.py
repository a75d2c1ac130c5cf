"""Run folders that come from anyone: they are read without an error of Python's own, and without much memory."""

import json
import math
import os
import random
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import yaml
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.cli import main
from lightning_lowrank.cli.runs import find_runs, group_by_seed, monitors, short_names
from lightning_lowrank.plots import draw
from lightning_lowrank.run_metadata import read_metadata, read_software
from tests.cli.run_folders import configured, draw_nothing, make_report, rounds_of, rows_of, write_run

ROWS = rows_of([0.1, 0.9], up=4, down=1)
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{one}: &{one} [{', '.join([f'*{other}'] * 9)}]\n" for other, one in zip("abcdefghi", "bcdefghij", strict=True)
)
MERGED = "a: &a {x: 1}\n" + "".join(
    f"{one}: &{one} {{<<: [{', '.join([f'*{other}'] * 9)}]}}\n"
    for other, one in zip("abcdefghi", "bcdefghij", strict=True)
)
CONFIGS = {
    "laughs": LAUGHS,
    "merges": MERGED,
    "itself": "seed_everything: 1\na: &a [*a]\n",
    "own key": "? &a [*a]\n: 1\n",
    "deep": "a: " + "[" * 5000,
    "deep lists": "- " * 20_000,
    "long texts": f"a: &a {'x' * 20_000}\nb: [{', '.join(['*a'] * 500)}]\n",
    "number": f"seed_everything: {'9' * 5000}\n",
    "hexadecimal": f"seed_everything: 1\nfederated: 0x{'f' * 5000}\n",
    "date": "seed_everything: 2001-99-99\n",
    "empty number": "seed_everything: !!int ''\n",
    "binary": "seed_everything: !!binary ü\n",
    "object": "seed_everything: !!python/object/apply:os.system ['false']\n",
    "large": "a: " + "x" * 2**21,
    "not text": b"\xff\xfe\x00",
    "control": "a: \x00\n",
    "list": "- 1\n",
    "words": "seed_everything: one\n",
    "odd": "seed_everything: 1\ntrainer: {callbacks: [1, {init_args: {monitor: [1], mode: min}}]}\n",
}


def measured(run):
    """Return the largest memory in bytes that a call takes."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", CONFIGS)
def test_configurations_that_are_bombs_are_left_out(tmp_path, kind):
    text = CONFIGS[kind]
    (write_run(tmp_path / "run", ROWS) / "config.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    configured(tmp_path / "other", 0, ROWS)

    def read():
        runs = find_runs([tmp_path])
        monitors(runs)
        short_names(group_by_seed(runs))

    assert measured(read) < 30e6


def test_a_configuration_with_aliases_is_read(tmp_path):
    shared = {"lr": 0.1}
    for seed in (0, 1):
        folder = write_run(tmp_path / f"run{seed}", ROWS)
        text = yaml.safe_dump({"seed_everything": seed, "first": shared, "second": shared})
        assert "*id001" in text
        (folder / "config.yaml").write_text(text)
    assert len(group_by_seed(find_runs([tmp_path]))) == 1


FILES = {
    "long line": b"epoch,a\n0," + b"1" * 2**22,
    "long header": b"a," * 2**21,
    "many columns": b"epoch" + b",m" * 20_000 + b"\n0" + b",1" * 20_000,
    "nul": b"epoch,val_acc\n0,\x00\n\x00,1\n",
    "more columns": b"epoch,val_acc\n0,1,2,3\n",
    "epochs": b"epoch,val_acc\n1e300,1\n-1,1\nnan,2\ninf,3\n" + b"9" * 400 + b",1\n",
    "nothing": b"",
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.nightly
def test_files_that_no_logger_wrote_have_no_round(tmp_path, kind):
    folder = write_run(tmp_path / "run", ROWS)
    (folder / "metrics.csv").write_bytes(FILES[kind])
    runs = []
    assert measured(lambda: runs.extend(find_runs([tmp_path]))) < 400e6
    # Odd columns of a row are not read.
    assert [rounds_of(run) for run in runs] in ([{}], [{0: {"val_acc": 1.0}}], [{0: {}}])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 10_000,
        '{"seconds": "x", "ranks": [[1]], "samples": [], "a": true, "b": null, "c": {}}',
        '{"seconds": NaN, "ranks": [Infinity], "a": [1e400, 1]}',
        '{"seconds": [1, "x"]}',
        f'{{"seconds": 1{"0" * 5000}}}',
        f'{{"seconds": 1{"0" * 2000}}}',
        f'{{"seconds": 1, "a": "{"x" * 2**17}"}}',
        b"\xff\xfe",
        '{"software": ["torch"]}',
        '{"software": {"torch": 2, "python": "<b>3</b>", "a\\u001b": "1", "commit": "%s", "lightning": ["1"]}}'
        % ("1" * 99),
        json.dumps({"software": {f"package_{number}": "1.0" for number in range(2_000)}}),
    ],
)
def test_invalid_metadata_is_left_out(tmp_path, text):
    (tmp_path / "run_metadata.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert read_metadata(tmp_path) == {}
    assert read_software(tmp_path) == {}


def test_pipes_and_devices_are_not_read(tmp_path):
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "metrics.csv")
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "metrics.csv").symlink_to("/dev/zero")
    with pytest.raises(MisconfigurationException, match="holds no run"):
        find_runs([tmp_path])
    folder = write_run(tmp_path / "run", ROWS)
    os.mkfifo(folder / "config.yaml")
    os.mkfifo(folder / "run_metadata.json")
    (run,) = find_runs([tmp_path])
    assert group_by_seed([run]) == [[run]]
    assert run.metadata == {}


def test_names_are_no_commands_of_a_terminal(tmp_path, capsys, monkeypatch):
    draw_nothing(monkeypatch)
    for name in ("\x1b]0;title\x07", "$\\frac"):
        write_run(tmp_path / "runs" / name, ROWS)
    main(["report", str(tmp_path / "runs"), "--output", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "$\\frac" in printed


@pytest.mark.nightly
def test_names_and_figures_that_no_plot_can_show(tmp_path):
    huge = np.array([(1, 0.5, 0), (2, 1e308, 0), (3, math.nan, 0), (4, math.inf, 1e308)])
    curves = {"$\\frac{": huge, "$$": np.array([(-1, 0.5, 0.1)]), "$_$": huge, "_": huge}
    constants = dict.fromkeys(curves, np.array([(1, -1e308, 0), (2, -0.5, 0)]))
    pictures = draw(
        lambda metric, _: constants if metric.startswith("convergence") else curves,
        "$\\bad{metric",
        True,
        1e305,
        math.nan,
    )
    assert pictures.keys() == {
        *("bytes", "bytes_each", "rounds", "rounds_each", "seconds", "seconds_each"),
        "convergence",
    }


@pytest.mark.slow
@pytest.mark.nightly
def test_changed_bytes_of_a_folder_never_raise_more_than_a_message(tmp_path, monkeypatch):
    draw_nothing(monkeypatch)
    draws = random.Random(0)
    folder = configured(tmp_path / "runs" / "run", 0, ROWS)
    configured(tmp_path / "runs" / "other", 1, ROWS)
    whole = {name: (folder / name).read_bytes() for name in ("metrics.csv", "config.yaml")}
    for _ in range(400):
        for name, data in whole.items():
            changed = bytearray(data)
            for _ in range(draws.choice((0, 1, 2, 20))):
                place = draws.randrange(len(changed))
                changed[place] = (
                    draws.choice(b'0123456789"{}[],:-eE.&*!?|>\n \x00\xff$\x1b') if draws.random() < 0.7 else 0
                )
            (folder / name).write_bytes(changed[: draws.randrange(len(changed))] if draws.random() < 0.2 else changed)
        with suppress(MisconfigurationException):
            make_report([tmp_path / "runs"], tmp_path / "out")
