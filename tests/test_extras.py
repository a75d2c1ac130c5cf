"""What installs optional dependencies, and the package itself: never a name on an index."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank import extras
from lightning_lowrank.extras import import_extra, requirements


def test_a_missing_library_is_named_with_what_installs_it_from_the_checkout():
    with pytest.raises(MisconfigurationException, match=r"Mine .*no_such_library\.part.*\.\[no_such_library\]") as said:
        import_extra("no_such_library.part", "Mine")
    assert "lightning_lowrank[" not in str(said.value)
    with pytest.raises(MisconfigurationException, match=r"\.\[privacy\]"):
        import_extra("no_such_library", "Mine", "privacy")


def test_the_package_is_required_from_where_it_is():
    root = Path(__file__).parents[1]
    assert requirements("flower") == [f"lightning_lowrank[flower] @ {root.as_uri()}"]


@pytest.mark.parametrize(
    ("origin", "place"),
    [
        ({"url": "file:///wheels/lightning_lowrank-0.1.0-py3-none-any.whl", "archive_info": {}}, None),
        (
            {"url": "https://git.example/x.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
            "git+https://git.example/x.git@ab12",
        ),
        # As an index leaves it.
        (None, ""),
    ],
    ids=["wheel", "git", "index"],
)
def test_an_installed_package_is_required_from_where_it_came(monkeypatch, tmp_path, origin, place):
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "lightning_lowrank" / "extras.py"))
    text = None if origin is None else json.dumps(origin)
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    place = origin["url"] if place is None else place
    assert requirements("flower") == ([f"lightning_lowrank[flower] @ {place}"] if place else [])


@pytest.mark.nightly
def test_pip_takes_the_requirement(tmp_path):
    (wanted,) = requirements("peft")
    options = ["--dry-run", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(tmp_path)]
    command = [sys.executable, "-m", "pip", "install", *options, wanted]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Would install lightning_lowrank" in done.stdout
