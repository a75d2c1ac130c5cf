"""Recipes that come with the package, by name: ``--config fedmud/fmnist`` works in any folder.

A wheel holds them as package data; a checkout has them in its top-level ``recipes``.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from pathlib import Path

from lightning_lowrank.configuration import misconfigured

_PACKAGE = Path(__file__).parents[1]
_PLACES = (_PACKAGE / "recipes", _PACKAGE.parent / "recipes")
# The form of a recipe's name or path. Other values, such as URLs or inline YAML, are left to jsonargparse.
_NAME = re.compile(r"[\w.~][\w./\\~ -]*|/[\w./~ -]+")
# Not a recipe: published figures, which recipes/results.py reads.
_NO_RECIPES = ("RESULTS",)
_SIMILAR = 0.6
_SHOWN = 3
_WIDTH = 100


def folder() -> Path:
    """The folder that holds the recipes.

    Raises:
        MisconfigurationException: If the package was installed without them.
    """
    for place in _PLACES:
        if (place / "quickstart.yaml").is_file():
            return place
    raise misconfigured(f"this installation has no recipes in {_PLACES[0]}: install the wheel again, or give a path.")


def names() -> list[str]:
    """The names of all recipes, sorted: their paths below `folder`, without ``.yaml``."""
    root = folder()
    found = sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml"))
    return [name for name in found if name not in _NO_RECIPES]


def find(value: str) -> str:
    """The file for a value of ``--config``: an existing file, or the recipe of that name.

    A file in the working directory comes before a recipe, with or without ``.yaml``. A name may be written as the
    path in the repository as well, ``recipes/quickstart.yaml``.

    Args:
        value: A path, a recipe's name, or anything else that jsonargparse reads, which is returned as it is.

    Raises:
        MisconfigurationException: If there is neither a file nor a recipe of that name. The message has the most
            similar names.

    Example:
        >>> from pathlib import Path
        >>> Path(find("fedmud/fmnist")).name
        'fmnist.yaml'
    """
    if not _NAME.fullmatch(value) or Path(value).is_file():
        return value
    if Path(f"{value}.yaml").is_file():
        return f"{value}.yaml"
    name = value.replace("\\", "/").removeprefix("./").removeprefix("recipes/").removesuffix(".yaml")
    known = names()
    if name in known:
        return str(folder() / f"{name}.yaml")
    raise misconfigured(
        f"--config {value}: there is no such file, and no recipe of that name. {_near(name, known)}"
        "`lightning-lowrank recipes` lists all."
    )


def _near(name: str, known: list[str]) -> str:
    """A sentence that suggests recipes whose whole name or last part is similar."""
    last = {each: each.rpartition("/")[2] for each in known}
    similar = [each for each in known if name in (last[each], each.partition("/")[0])]
    similar += difflib.get_close_matches(name, known, _SHOWN, _SIMILAR)
    for part in difflib.get_close_matches(name.rpartition("/")[2], sorted(set(last.values())), _SHOWN, _SIMILAR):
        similar += [each for each in known if last[each] == part]
    found = list(dict.fromkeys(similar))[:_SHOWN]
    return f"Did you mean {' or '.join(map(repr, found))}? " if found else ""


def summary(name: str) -> str:
    """The first sentence of a recipe's opening comment, shortened to a line."""
    lines = (folder() / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    opening: list[str] = []
    for line in lines:
        if not line.startswith("#") or line.startswith("#  "):
            break
        opening.append(line.removeprefix("#").strip())
    text = " ".join(opening)
    sentence = re.split(r"(?<=\.)\s+(?=[A-Z])", text, maxsplit=1)[0].rstrip(":")
    return textwrap.shorten(sentence, _WIDTH, placeholder=" …")


def listing(beginning: str = "") -> list[tuple[str, str]]:
    """Names and summaries of the recipes whose name begins with ``beginning``.

    Raises:
        MisconfigurationException: If there is none.
    """
    known = names()
    found = [(name, summary(name)) for name in known if name.startswith(beginning)]
    if not found:
        raise misconfigured(f"no recipe's name begins with {beginning!r}. {_near(beginning, known)}".rstrip())
    return found
