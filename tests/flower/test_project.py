"""The files of a Flower project, as Flower reads them."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement

from lightning_lowrank.flower import project, write_project
from tests.flower.helpers import write_recipe

pytestmark = pytest.mark.slow


def built(folder):
    """Return what `flwr build` makes of a project."""
    flwr = Path(sys.executable).with_name("flwr")
    done = subprocess.run([flwr, "build", "--app", folder], cwd=folder.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (fab,) = folder.parent.glob("*.fab")
    with zipfile.ZipFile(fab) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_a_project_names_no_package_of_an_index(tmp_path):
    write_project([write_recipe(tmp_path, {})], tmp_path / "app")
    files = built(tmp_path / "app")
    assert {"flower_app.py", "recipe.yaml", "server.yaml", "pyproject.toml"} <= files.keys()
    (dependency,) = map(Requirement, tomllib.loads(files["pyproject.toml"])["project"]["dependencies"])
    assert dependency.name == "lightning_lowrank"
    assert dependency.extras == {"flower"}
    assert dependency.url == Path(__file__).parents[2].as_uri()


def test_a_project_requires_nothing_where_the_packages_place_is_not_known(tmp_path, monkeypatch):
    monkeypatch.setattr(project, "requirements", lambda extra: [])
    write_project([write_recipe(tmp_path, {})], tmp_path / "app")
    assert tomllib.loads(built(tmp_path / "app")["pyproject.toml"])["project"]["dependencies"] == []
