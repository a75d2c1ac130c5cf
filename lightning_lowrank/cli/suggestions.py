"""Clearer messages for wrong values and misspelt names, made from those of jsonargparse.

A wrong value of an argument of this package's classes is described by the argument's type hint: what it may be, the
value, and the most similar allowed value. Other unknown names get the most similar known name.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lightning_lowrank.arguments import join_names

_SECTIONS = "ckpt_path data federated lowrank lr_scheduler model optimizer seed_everything seeds trainer"
_CLASSES_OF = ("lightning_lowrank", "lightning.pytorch", "torch.optim")
_PACKAGE = "lightning_lowrank"
_CLASS_PATH = re.compile(r"class_path[ =]'([\w.]+)'")
_SIMILAR = 0.65
_SHORTEST_PART = 3
_MOST_HOLDING = 3
_FILES = ".csv .json .jsonl .npy .npz .parquet .pkl .pt .pth .tsv .txt .yaml .yml"
_ROOTS = {
    "federated": "lightning_lowrank.FederatedLoop",
    "lowrank": "lightning_lowrank.LowRank",
    "trainer": "lightning.pytorch.Trainer",
}
_OF_LIGHTNING = tuple(f"lightning.pytorch.{name}" for name in ("callbacks", "loggers", "profilers", "strategies"))
_FIRST = {"federated": "--federated.algorithm FedAvg", "lowrank": "--lowrank.factorization MatrixProduct"}
_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "a dictionary",
    type(None): "null",
}
_OF_VALUES = (
    r"no class is known as (?P<class>.+?)(?: Expected a .+)?",
    r"Unexpected import path format: (?P<path>.+)",
    r"Not a valid subclass of \w+\. Got value: (?P<object>.+)",
    r"(?:Expected .*?)?Got value: (?P<value>.+)",
    r"(?:Expected .*)?(?:Type .* class: )?(?:Problem with given class_path '(?P<file>[^']+)': )?"
    r"(?:module .+|No module named .+)",
)
"""Ends of jsonargparse's messages about a value, and where the value is in them."""

_OF_A_CLASS = ("class_path", "init_args")
_MOST_NAMES = 12
_MOST_ARGUMENTS = 20
_CALLED = {
    "fp16 float16 bf16 bfloat16": "Half",
    "int8 int4 8bit 4bit": "Quantize",
    "powersgd svd": "LowRankCodec",
    "rfa geomed": "GeometricMedian",
    "lora": "MatrixProduct",
    "loha fedpara": "Hadamard",
    "lokr": "BlockKronecker",
    "equal": "uniform",
    "parallel vmap": "vectorized",
}
"""Words of other libraries, and the values that they mean here."""

_ELSEWHERE = {
    "federated": {
        "rounds num_rounds max_rounds n_rounds global_rounds comm_rounds": "--trainer.max_epochs: an epoch is a round",
        "epochs num_epochs": "--federated.local_epochs for a client's epochs, --trainer.max_epochs for rounds",
        "batch_size local_batch_size": "an argument of the data, such as --data.batch_size",
        "lr local_lr learning_rate client_lr": "an argument of the model's optimizer, such as --model.optimizer.lr",
        "num_clients n_clients total_clients": "--federated.clients",
        "fraction fraction_fit participation sample_rate": "--federated.clients_per_round, a share or a count",
        "strategy method aggregation": "--federated.algorithm",
        "codec codecs compression compressor": "--federated.uplink and --federated.downlink, lists of codecs",
    },
    "lowrank": {
        "r": "--lowrank.rank",
        "lora_alpha": "--lowrank.alpha",
        "lora_dropout": "--lowrank.dropout",
        "target_modules targets layers modules only": "--lowrank.include, a list of layers' names",
        "exclude_modules ignore": "--lowrank.exclude, a list of layers' names",
        "compression sparsity": "--lowrank.budget or --lowrank.ratio, the share of parameters that is left",
        "method type kind": "--lowrank.factorization",
    },
}
"""Words of other libraries, and the arguments that they mean here."""


def with_suggestions(message: str) -> str:
    """A parser's message as one clear sentence, or with the most similar known name after each unknown name.

    Example:
        >>> with_suggestions("Problem with given class_path 'torch.optim.SGD': Option 'momentun' is not accepted")
        "Problem with given class_path 'torch.optim.SGD': Option 'momentun' is not accepted (did you mean 'momentum'?)"
    """

    def suggested(match: re.Match[str], look_up: Callable[[re.Match[str]], tuple[str, Iterable[str]]]) -> str:
        word, known = look_up(match)
        # A valid name in the wrong place is no typo.
        meant = _most_similar(word, [name for name in known if name != word])
        if word in known:
            return match[0]
        arguments = [name for name in known if name not in _OF_A_CLASS] if look_up is _arguments else []
        few = 0 < len(arguments) <= _MOST_ARGUMENTS
        shown = f" (the arguments are {', '.join(arguments)})" if few else ""
        return match[0] + (f" (did you mean {meant!r}?)" if meant else shown)

    described = _described(message) or _placed_elsewhere(message)
    if described:
        return described
    word = re.fullmatch(r"unrecognized arguments: ([^-]\S*)", message)
    if word:
        return f"{message}: a recipe is given by --config {word[1]}"
    if message.startswith("Unexpected config:"):
        return f"a file of --config must hold sections, such as model and trainer: {message}"
    for pattern, look_up in _KINDS.items():
        message = re.sub(pattern, partial(suggested, look_up=look_up), message)
    absent = re.search(r"No module named '(\w+)'", message)
    if absent and any(path.exists() for path in (Path(f"{absent[1]}.py"), Path(absent[1], "__init__.py"))):
        message += f" ({absent[1]} is in this folder, where Python looks with PYTHONPATH=. before the command)"
    return message


def _most_similar(word: str, known: Iterable[str]) -> str:
    """The known name that a word misspells or is a part of; empty if there is none."""
    names = {name.lower(): name for name in known if not name.startswith("_")}
    plain = word.lower()
    similar = difflib.get_close_matches(plain, names, 1, _SIMILAR)
    return names[similar[0]] if similar else ""


def _described(message: str) -> str:
    """The sentence for a wrong value of an argument of this package's classes; empty for any other message."""
    keys = re.findall(r'Parser key "([\w.]+)": ', message)
    where = list(re.finditer(r'(?:given class_path \'([\w.]+)\': )?Parser key "([\w.]+)": ?', message))
    section, _, argument = keys[0].partition(".") if keys else ("", "", "")
    if section not in _ROOTS or (argument and (section != "trainer" or len(where) > 1)):
        return ""
    end = message[where[-1].end() :]
    found = next((match for pattern in _OF_VALUES if (match := re.fullmatch(pattern, end))), None)
    if found is None:
        # An argument of several types: the message has the error of each.
        found = re.fullmatch(r"Expected .+?(?:no class is known as|Unexpected import path format:) (?P<class>.+)", end)
    value = next((text for text in found.groupdict().values() if text), "") if found else ""
    failed_import = "No module named" in end or "has no attribute" in end
    # A failed import keeps its own message, except for a file's path, which was not meant to be imported.
    if not found or not value or (failed_import and not _is_file(value)):
        return ""
    if len(where) == 1 and not argument:
        return _whole_section(section, value) if section in _FIRST else ""
    owner = _ROOTS["trainer"] if argument else where[-1][1]
    if not owner or not (argument or owner.startswith(_PACKAGE)):
        return ""
    name = argument or where[-1][2]
    hint = _hints(owner).get(name)
    if hint is None:
        return ""
    place = ".".join([each[2] for each in where])
    remedy = _remedy(place, hint, value, owner)
    return f"{place} must be {_words(hint)}, got {value!r}{remedy and ': '}{remedy}"


def _is_file(value: str) -> bool:
    return "/" in value or "\\" in value or Path(value).suffix.lower() in _FILES.split()


def _whole_section(section: str, value: str) -> str:
    """The sentence for a value in the place of a whole section."""
    kind = _known_classes().get(value.rpartition(".")[2])
    option = _option_for(_ROOTS[section], kind)
    if option:
        return f"{section} must be the arguments of {_title(section)}, got {value!r}: give --{section}.{option} {value}"
    file = f": give a file of settings by --config {value}" if _is_file(value) else f", such as {_FIRST[section]}"
    return f"{section} must be the arguments of {_title(section)}, got {value!r}{file}"


def _title(section: str) -> str:
    return _ROOTS[section].rpartition(".")[2]


def _remedy(place: str, hint: Any, value: str, owner: str) -> str:
    """A value to give instead, if it can be guessed."""
    literals, parts = _literals(hint), _parts(hint)
    listing = any(get_origin(each) in (list, Sequence) for each in parts)
    number = _number(value) if float in parts else ""
    if number:
        return number
    word = value if _is_file(value) else value.rpartition(".")[2]
    names = [kind.__name__ for base in _bases(hint) for kind in _kinds(base)]
    if listing and re.fullmatch(r"\w+", value) and (word in (*names, *literals) or list[str] in parts):
        return f"give a list, such as [{word}]"
    known = _known_classes().get(word)
    if names and word not in names and known:
        return _accepting_setting(word, known)
    called = next((name for words, name in _CALLED.items() if word.lower() in words.split()), "")
    holding = _names_containing(word, names)
    if called in _known_classes() and called not in names and not holding:
        return f"{word} is {called}: {_accepting_setting(called, _known_classes()[called])}"
    similar = _most_similar(word, [*names, *literals])
    meant = [similar] if similar else holding or [called] * (called in (*names, *literals))
    if place == "federated.partition" and not meant:
        return _partition(value)
    if _is_file(value):
        return "a file of settings is given by --config" if value.endswith((".yaml", ".yml")) else ""
    shown = " or ".join(f"[{name}]" if listing else repr(name) for name in meant)
    return f"did you mean {shown}?" if meant else ""


def _accepting_setting(name: str, kind: type) -> str:
    """A sentence on the setting that accepts instances of ``kind``; empty if none is known."""
    for section, root in _ROOTS.items():
        option = _option_for(root, kind)
        if kind.__name__ == root.rpartition(".")[2]:
            return f"{name} is the section {section}"
        if option:
            return f"{name} is for {section}.{option}"
    callback = getattr(import_module("lightning.pytorch"), "Callback", None)
    return f"{name} is a callback, for trainer.callbacks" if callback and issubclass(kind, callback) else ""


def _partition(value: str) -> str:
    """The partition that a file's path, a column's name or indices were probably meant for."""
    if value.endswith((".yaml", ".yml")):
        return "a file of settings is given by --config"
    option = "--federated.partition"
    if _is_file(value):
        return (
            f"give {option} FromIndices {option}.indices {value} for a file of clients' indices, or {option} ByKey"
            f" {option}.key COLUMN {option}.file {value} for a column of keys"
        )
    if value[:1] in "[{":
        return f"give {option} FromIndices {option}.indices '{value}' for the indices of each client"
    if re.fullmatch(r"[A-Za-z]\w*", value):
        return (
            f"give {option} ByKey {option}.key {value} for the column, or field of the samples, that names each"
            " sample's client"
        )
    return ""


def _number(value: str) -> str:
    """A percentage or a fraction as a number."""
    percent = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", value)
    fraction = re.fullmatch(r"(\d+) ?/ ?([1-9]\d*)", value)
    if percent:
        return f"write {float(percent[1]) / 100:g}"
    return f"write {int(fraction[1]) / int(fraction[2]):g}" if fraction else ""


def _names_containing(word: str, names: Iterable[str]) -> list[str]:
    """The names that contain a word, such as CoordinateMedian for median; empty if there are many."""
    holding = sorted(name for name in names if word.lower() in name.lower())
    return holding if len(word) >= _SHORTEST_PART and len(holding) <= _MOST_HOLDING else []


def _option_for(owner: str, kind: type | None) -> str:
    """The argument of a class that accepts objects of this kind; empty if there is none."""
    if kind is None:
        return ""
    fitting = [name for name, hint in _hints(owner).items() if any(issubclass(kind, base) for base in _bases(hint))]
    return fitting[0] if fitting else ""


def _placed_elsewhere(message: str) -> str:
    """A message on an unknown argument of a section, with its right place added; empty for any other message."""
    match = re.fullmatch(
        r"Parser key \"(federated|lowrank)\": Problem with given class_path '([\w.]+)': "
        r"Option '(\w+)(?:\.[\w.]+)?' is not accepted",
        message,
    )
    if not match or match[2] != _ROOTS[match[1]]:
        return ""
    section, name = match[1], match[3]
    for words, place in _ELSEWHERE[section].items():
        if name in words.split():
            return f"{message}: give {place}"
    if _most_similar(name, _parameters(match[2])):
        return ""
    having = {
        f"--{section}.{option} {kind.__name__}"
        for option, hint in _hints(match[2]).items()
        for base in _bases(hint)
        for kind in _kinds(base)
        if name in _hints(f"{kind.__module__}.{kind.__name__}")
    }
    return f"{message}: it is an argument of {join_names(sorted(having))}" if having else ""


def _words(hint: Any) -> str:
    """A type hint in words."""
    parts = [part for part in _parts(hint) if part is not type(None)]
    literals = {str(each): each for part in parts if get_origin(part) is Literal for each in get_args(part)}
    parts = [part for part in parts if get_origin(part) is not Literal]
    parts += [Literal[tuple(literals.values())]] if literals else []
    described = list(dict.fromkeys(map(_word, parts)))
    if type(None) in _parts(hint):
        described.append("null")
    return " or ".join([", ".join(described[:-1]), described[-1]] if len(described) > 1 else described)


def _word(part: Any) -> str:
    origin = get_origin(part) or part
    if origin is Literal:
        return ("one of " if len(get_args(part)) > 1 else "") + ", ".join(map(repr, get_args(part)))
    if origin is list and _bases(part):
        return f"a list of {_names(_bases(part)[0], listing=True)}"
    if origin is list and get_args(part):
        return f"a list of {'lists' if get_origin(get_args(part)[0]) is list else _plural(get_args(part)[0])}"
    if origin in _WORDS:
        return _WORDS[origin]
    if isinstance(origin, type) and origin.__module__.startswith(_CLASSES_OF):
        return _names(origin)
    if origin is Callable or getattr(origin, "__name__", "") == "Callable":
        return "the import path of a function"
    if isinstance(origin, type) and issubclass(origin, Iterable) and get_args(part):
        inner = get_args(part)[0]
        return f"a list of {', '.join(map(repr, get_args(inner)))}" if get_origin(inner) is Literal else "a list"
    return str(getattr(origin, "__name__", origin))


def _plural(kind: Any) -> str:
    return {str: "texts", int: "integers", float: "numbers"}.get(kind, "values")


def _names(base: type, listing: bool = False) -> str:
    names = sorted(kind.__name__ for kind in _kinds(base))
    shown = ", ".join(names) if len(names) <= _MOST_NAMES else join_names(names)
    return (f"{base.__name__} objects" if listing else f"{_article(base.__name__)} {base.__name__}") + (
        f" ({shown})" if names not in ([], [base.__name__]) else ""
    )


def _article(word: str) -> str:
    return "an" if word[0] in "AEIOU" else "a"


def _parts(hint: Any) -> list[Any]:
    """The types of a union; the type itself if it is none."""
    return list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]


def _bases(hint: Any) -> list[type]:
    """This package's and Lightning's classes in a type hint."""
    inner = [each for part in _parts(hint) for each in ([part] if get_origin(part) is not list else get_args(part))]
    return [each for each in inner if isinstance(each, type) and each.__module__.startswith(_CLASSES_OF)]


def _literals(hint: Any) -> list[str]:
    parts = [inner for part in _parts(hint) for inner in (part, *get_args(part))]
    return [each for part in parts if get_origin(part) is Literal for each in map(str, get_args(part))]


def _kinds(base: type) -> Iterable[type]:
    """The classes of a kind that a recipe can name: those that this package exports."""
    kinds = [kind for kind in _known_classes().values() if issubclass(kind, base) and not inspect.isabstract(kind)]
    return [kind for kind in kinds if kind is not base] or kinds


@functools.cache
def _known_classes() -> Mapping[str, type]:
    """The classes that Lightning and this package export, by name."""
    modules = map(import_module, (*_OF_LIGHTNING, _PACKAGE))
    found = ((name, getattr(module, name, None)) for module in modules for name in dir(module))
    return {name: kind for name, kind in found if isinstance(kind, type)}


def _hints(path: str) -> Mapping[str, Any]:
    """The type hints of a class's arguments, by name."""
    module, _, name = path.rpartition(".")
    try:
        kind = getattr(import_module(module), name)
        hints = get_type_hints(kind.__init__)
        if path == _ROOTS["lowrank"]:
            hints = {**get_type_hints(import_module("lightning_lowrank.layers").LowRankSettings.__init__), **hints}
    except (ImportError, AttributeError, TypeError, NameError):
        return {}
    return {name: hint for name, hint in hints.items() if name not in ("return", "settings")}


def _arguments(match: re.Match[str]) -> tuple[str, Iterable[str]]:
    """The parameters of the class in whose section the match lies."""
    paths = _CLASS_PATH.findall(match.string[: match.start()])
    # For a class that is called later, the class path follows the match in the message.
    if "expects a function" in match.string[: match.start()]:
        paths += _CLASS_PATH.findall(match.string[match.end() :])[:1]
    known = _parameters(paths[-1]) if paths else ()
    return match[1].split(".")[0], [*_OF_A_CLASS, *known]


def _parameters(path: str) -> Iterable[str]:
    module, _, name = path.rpartition(".")
    if path in _ROOTS.values():
        return list(_hints(path))
    try:
        kind = getattr(import_module(module), name)
        found: dict[str, None] = {}
        for each in kind.__mro__ if isinstance(kind, type) else [kind]:
            parameters = inspect.signature(each).parameters.values()
            found |= {one.name: None for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
            # A class that passes keyword arguments on has its base's arguments too.
            if not any(one.kind is one.VAR_KEYWORD for one in parameters):
                break
    except (ImportError, AttributeError, TypeError, ValueError):
        return ()
    return list(found)


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
