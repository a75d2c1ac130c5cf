"""What a run's folder says besides its metrics and its configuration."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from lightning_lowrank import run_metadata


def git(folder: Path, *words: str) -> str:
    """Run git as a user without settings."""
    who = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a folder that could be a package, in a repository that doesn't keep it yet."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    git(tmp_path, "init", "--quiet")
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    return folder


def test_the_commit_is_that_of_the_packages_files(package):
    git(package, "add", ".")
    git(package, "commit", "--quiet", "-m", "first")
    commit = git(package, "rev-parse", "HEAD")
    (package.parent / "notes.txt").write_text("not of the package")
    assert run_metadata._commit_of_checkout(package) == commit
    (package / "__init__.py").write_text("changed = True")
    assert run_metadata._commit_of_checkout(package) == f"{commit} with changes"
    git(package, "checkout", "--", ".")
    (package / "added.py").write_text("")
    assert run_metadata._commit_of_checkout(package) == f"{commit} with changes"


def test_a_repository_around_the_package_is_not_its_checkout(package):
    (package.parent / "other.txt").write_text("")
    git(package, "add", "../other.txt")
    git(package, "commit", "--quiet", "-m", "not the package")
    assert run_metadata._commit_of_checkout(package) is None
    (package.parent / ".gitignore").write_text("package\n")
    assert run_metadata._commit_of_checkout(package) is None


def test_the_repository_of_a_hook_is_not_asked(package, tmp_path_factory, monkeypatch):
    git(package, "add", ".")
    git(package, "commit", "--quiet", "-m", "first")
    commit = git(package, "rev-parse", "HEAD")
    other = tmp_path_factory.mktemp("other")
    git(other, "init", "--quiet")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert run_metadata._commit_of_checkout(package) == commit


def test_the_index_is_left_as_it_is(package):
    git(package, "add", ".")
    git(package, "commit", "--quiet", "-m", "first")
    index = package.parent / ".git" / "index"
    # The file's times differ from the index's now, so that a status that may write would.
    os.utime(package / "__init__.py", (1, 1))
    before = index.read_bytes()
    assert run_metadata._commit_of_checkout(package) == git(package, "rev-parse", "HEAD")
    assert index.read_bytes() == before


def test_a_repository_without_a_commit_has_none(package, tmp_path):
    git(package, "add", ".")
    assert run_metadata._commit_of_checkout(package) is None
    assert run_metadata._commit_of_checkout(tmp_path / "absent") is None


def test_without_git_there_is_no_commit(package, monkeypatch):
    git(package, "add", ".")
    git(package, "commit", "--quiet", "-m", "first")
    monkeypatch.setenv("PATH", str(package))
    assert run_metadata._commit_of_checkout(package) is None


@pytest.mark.parametrize(
    ("told", "commit"),
    [
        ({"url": "https://example.org/it", "vcs_info": {"vcs": "git", "commit_id": "ab12"}}, "ab12"),
        ({"url": "file:///somewhere", "dir_info": {"editable": True}}, None),
        ([], None),
        (None, None),
    ],
)
def test_an_installation_by_address_has_its_commit(monkeypatch, told, commit):
    class Distribution:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if told is None else json.dumps(told)

    monkeypatch.setattr(run_metadata.metadata, "distribution", lambda name: Distribution())
    assert run_metadata._commit_of_installation() == commit


def test_versions_come_back_as_they_were_written(tmp_path):
    software = run_metadata.software()
    assert software["torch"] == torch.__version__.partition("+")[0] or software["torch"] == torch.__version__
    assert {"python", "lightning", "lightning_lowrank"} <= software.keys()
    run_metadata.write_metadata(tmp_path, {"seconds": 1.5, "software": {**software, "commit": "ab12 with changes"}})
    assert run_metadata.read_software(tmp_path) == {**software, "commit": "ab12 with changes"}
    assert run_metadata.read_metadata(tmp_path) == {"seconds": [1.5]}
