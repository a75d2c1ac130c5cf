"""Recipes that come with the package: found by name in any folder, from a checkout and from a wheel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.cli import main, recipes
from lightning_lowrank.cli.recipes import find

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "value", ["fedmud/fmnist", "fedmud/fmnist.yaml", "recipes/fedmud/fmnist.yaml", "./recipes/fedmud/fmnist"]
)
def test_a_name_means_the_recipe_in_any_folder(value):
    assert Path(find(value)).samefile(RECIPES / "fedmud" / "fmnist.yaml")


@pytest.mark.parametrize("file", ["quickstart", "quickstart.yaml"])
def test_a_file_in_the_working_directory_comes_first(file):
    Path("quickstart").mkdir()
    assert Path(find("quickstart")).parent == RECIPES
    Path("quickstart").rmdir()
    Path(file).write_text("seed_everything: 7")
    assert find("quickstart") == file


@pytest.mark.parametrize("value", ["{}", "seed_everything: 1", "seed_everything: 1\ndata: null", "s3://a/b.yaml", "-"])
def test_what_is_no_name_is_left_to_the_parser(value):
    assert find(value) == value


@pytest.mark.parametrize(
    ("value", "near"),
    [
        ("quikstart", "'quickstart'"),
        ("fmnist", "'fedmud/fmnist'"),
        ("fedmud/fmnst.yaml", "'fedmud/fmnist'"),
        ("fedsa", "'fedsa/mnli'"),
        ("/nowhere/recipe_of_mine.yaml", None),
        ("RESULTS", None),
    ],
)
def test_a_wrong_name_is_refused_with_near_ones(value, near):
    with pytest.raises(MisconfigurationException) as refused:
        find(value)
    said = str(refused.value)
    assert f"--config {value}: there is no such file" in said
    assert near in said.partition("Did you mean")[2] if near else "Did you mean" not in said


def test_all_are_listed(capsys):
    main(["recipes"])
    lines = capsys.readouterr().out.splitlines()
    overlays = ["  Overlay" in line for line in lines]
    assert overlays == sorted(overlays)
    listed = [line.split()[0] for line in lines]
    files = [path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml")]
    assert sorted(listed) == sorted({*files} - {"RESULTS"})
    main(["recipes", "fedsa"])
    (line,) = capsys.readouterr().out.splitlines()
    name, said = line.split(maxsplit=1)
    assert name == "fedsa/mnli"
    assert f"# {said[:40]}" in (RECIPES / "fedsa" / "mnli.yaml").read_text()
    with pytest.raises(SystemExit, match="'nothing'"):
        main(["recipes", "nothing"])


def test_a_reader_that_closes_the_pipe_is_no_error():
    code = "from lightning_lowrank.cli import main; main(['recipes'])"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_package_without_recipes_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(recipes, "_PLACES", (tmp_path,))
    with pytest.raises(MisconfigurationException, match="this installation has no recipes"):
        find("quickstart")


@pytest.mark.nightly
def test_the_wheel_runs_its_recipes_in_any_folder(tmp_path):
    pytest.importorskip("hatchling")

    def python(*words, **variables):
        done = subprocess.run(
            [sys.executable, *map(str, words)], env={**os.environ, **variables}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    installed = tmp_path / "installed"
    options = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
    python("-m", "pip", "wheel", *options, "--no-build-isolation", "--wheel-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    python("-m", "pip", "install", *options, "--no-compile", "--target", installed, wheel)
    held = {path.relative_to(installed / "lightning_lowrank" / "recipes") for path in installed.rglob("*.yaml")}
    assert held >= {path.relative_to(RECIPES) for path in RECIPES.rglob("*.yaml")}
    code = (
        "import lightning_lowrank as l; print(l.__file__); from lightning_lowrank.cli import main\n"
        "main(['fit', '--config', 'quickstart', '--trainer.max_epochs', '1'])\n"
        "main(['inspect', '--config', 'fedmud/fmnist', '--config', 'fedmud/bkd_aad'])\n"
    )
    printed = python("-c", code, PYTHONPATH=str(installed), OMP_NUM_THREADS="1")
    assert printed.startswith(str(installed))
    assert "after 1 round:" in printed
    assert "bytes for client 0" in printed
