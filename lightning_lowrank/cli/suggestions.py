"""Suggestions for misspelt keys and class names, added to the parser's message."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module

_SECTIONS = "ckpt_path data federated lowrank lr_scheduler model optimizer seed_everything seeds trainer"
_CLASSES_OF = ("lightning_lowrank", "lightning.pytorch", "torch.optim")
_CLASS_PATH = re.compile(r"class_path[ =]'([\w.]+)'")
_SIMILAR = 0.65


def with_suggestions(message: str) -> str:
    """A parser's message with the most similar known name after each unknown name.

    Example:
        >>> with_suggestions("Problem with given class_path 'torch.optim.SGD': Option 'momentun' is not accepted")
        "Problem with given class_path 'torch.optim.SGD': Option 'momentun' is not accepted (did you mean 'momentum'?)"
    """

    def suggested(match: re.Match[str], look_up: Callable[[re.Match[str]], tuple[str, Iterable[str]]]) -> str:
        word, known = look_up(match)
        names = {name.lower(): name for name in known if not name.startswith("_")}
        similar = difflib.get_close_matches(word.lower(), names, 1, _SIMILAR)
        # A valid name at the wrong place is no typo.
        meant = similar and names[similar[0]] != word
        return match[0] + (f" (did you mean {names[similar[0]]!r}?)" if meant else "")

    misplaced = re.fullmatch(r'Parser key "(federated|lowrank)": no class is known as (.+)', message)
    advice = _placed(misplaced[1], misplaced[2]) if misplaced else ""
    if advice:
        return f"{message}: {advice}"
    for pattern, look_up in _KINDS.items():
        message = re.sub(pattern, partial(suggested, look_up=look_up), message)
    return message


def _placed(section: str, given: str) -> str:
    """Where a class belongs that is given as a whole section, and what a partition of no class may mean."""
    package = import_module("lightning_lowrank")
    kind = getattr(package, given.rpartition(".")[2], None)
    places = {"federated": (package.Algorithm, "algorithm"), "lowrank": (package.Factorization, "factorization")}
    if section in places and isinstance(kind, type) and issubclass(kind, places[section][0]):
        return f"it is the section's {places[section][1]}: --{section}.{places[section][1]} {kind.__name__}"
    return ""


def _arguments(match: re.Match[str]) -> tuple[str, Iterable[str]]:
    """Arguments of the class whose section contains the match."""
    paths = _CLASS_PATH.findall(match.string[: match.start()])
    # For a class that is called later, the message has the class path after the match.
    if "expects a function" in match.string[: match.start()]:
        paths += _CLASS_PATH.findall(match.string[match.end() :])[:1]
    known = _parameters(paths[-1]) if paths else ()
    return match[1].split(".")[0], ["class_path", "init_args", *known]


def _parameters(path: str) -> Iterable[str]:
    module, _, name = path.rpartition(".")
    try:
        return inspect.signature(getattr(import_module(module), name)).parameters
    except (ImportError, AttributeError, TypeError, ValueError):
        return ()


def _classes(match: re.Match[str]) -> tuple[str, Iterable[str]]:
    """The public names of classes that a recipe may mean."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(_CLASSES_OF)]
    return match[1], {name for module in modules for name, value in vars(module).items() if isinstance(value, type)}


def _members(match: re.Match[str]) -> tuple[str, Iterable[str]]:
    return match[2], dir(import_module(match[1]))


def _options(match: re.Match[str]) -> tuple[str, Iterable[str]]:
    section, *rest = match[1].split(".")
    return (
        (rest[0], _parameters("lightning.pytorch.Trainer"))
        if section == "trainer" and rest
        else (section, _SECTIONS.split())
    )


_KINDS: dict[str, Callable[[re.Match[str]], tuple[str, Iterable[str]]]] = {
    r"Option '([\w.]+)' is not accepted": _arguments,
    r"no class is known as ([\w.]+)": _classes,
    r"module '([\w.]+)' has no attribute '(\w+)'": _members,
    r"does not accept option '([\w.]+)'": _options,
}
