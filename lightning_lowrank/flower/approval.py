"""A site's approved recipes: comparison, approval and filling in the site's own values.

A site's administrator approves a recipe with ``lightning-lowrank flower approve FILE``. It is read as plain YAML, and
nothing that it names is imported. The site's app asks `Approvals` for the recipe that a server sent, and runs the
site's copy.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_lowrank.configuration import misconfigured
from lightning_lowrank.files import not_shared, private_files, private_folder, replacing, without_link

_LARGEST = 2**20
_DEEPEST = 50
_SHOWN_LINES = 12
_LONGEST_LINE = 160
_COMPARED_LINES = 2000
# Arguments of any class that name files or folders on a site's disk, or how to read them.
_OWN = ("root", "train", "validation", "test", "indices", "model", "tokenizer", "dataset", "num_workers")
# These may also be names of splits, which are not files and stay in the recipe.
_SPLITS = ("train", "validation", "test")
_PLAIN_NAME = re.compile(r"\w[\w.-]*")
# Python's identifiers also have characters that are no letters for `re`, such as combining accents.
_DOTTED = re.compile(
    r"[A-Za-z_\u0080-\U0010ffff][\w\u0080-\U0010ffff]*(?:\.[A-Za-z_\u0080-\U0010ffff][\w\u0080-\U0010ffff]*)+"
)
_FILE_OR_ADDRESS = re.compile(r"(\w+(://|::.*://)|[/~\\]|\.{1,2}[/\\]|\w:\\).*", re.DOTALL)
# jsonargparse's keys of a class.
_OF_CLASS = ("class_path", "init_args", "dict_kwargs")
# The tag of a text that is read as bytes, in which nobody sees a path.
_BINARY = "tag:yaml.org,2002:binary"
# jsonargparse has the same preference.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Arguments that are paths below data-root, even if the file does not exist yet.
_OPENED = ("root", "model", "tokenizer", "indices")


def state_folder(config: Mapping[str, Any]) -> Path:
    """Folder of a party's state: ``state-dir`` of its configuration, by default below Flower's home."""
    home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
    return Path(str(config.get("state-dir", home / "lightning_lowrank"))).expanduser()


class EachOnce(yaml.SafeLoader):
    """YAML loader that refuses a key that occurs twice in a mapping; by default the last value would count."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping, unless a key occurs twice."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for number, key in enumerate(keys) if key in keys[:number]]
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]!r} occurs twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_plain(data: bytes, what: str) -> dict[str, Any]:
    """The mapping in YAML bytes; aliases and tags, which hide content from a reader, are refused.

    Args:
        data: The bytes.
        what: Their name, for errors.

    Raises:
        MisconfigurationException: If they are no YAML of text in UTF-8, have a tag, an anchor, an alias or a key twice,
            are no mapping, are nested more than 50 levels deep, or are longer than 1 MiB.

    Example:
        >>> read_plain(b"a: {b: [1, 2.5, text]}", "the recipe")
        {'a': {'b': [1, 2.5, 'text']}}
    """
    try:
        if len(data) > _LARGEST:
            raise ValueError(f"it has {len(data):,} bytes, and at most {_LARGEST:,} are read")
        text, depth = data.decode(), 0
        for event in yaml.parse(text, yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                # The parser takes long for nested brackets.
                raise ValueError(f"it is nested more than {_DEEPEST} levels deep")
            found = [getattr(event, name, None) for name in ("anchor", "tag")]
            if isinstance(event, yaml.AliasEvent) or any(found):
                raise ValueError(f"it has the tag, anchor or alias {next(filter(None, found))!r}")
        content = yaml.load(text, EachOnce)
        if not isinstance(content, dict):
            raise ValueError(f"it is a {type(content).__name__}, and not a mapping")
    except (ValueError, TypeError, yaml.YAMLError, RecursionError) as error:
        raise misconfigured(f"{what} cannot be read as plain YAML: {escaped(str(error), 300)}") from error
    return content


def escaped(text: str, longest: int = _LONGEST_LINE) -> str:
    """A line as plain text of bounded length, without control characters for a terminal or log."""
    line = text[: longest + 1].encode("unicode_escape").decode()
    return line if len(line) <= longest else f"{line[:longest]} ..."


class Approvals:
    """The folder ``approved`` next to a site's policy, with a file for each recipe, named by its SHA-256.

    Args:
        folder: The folder; it need not exist yet.

    Example:
        >>> import tempfile
        >>> approvals = Approvals(Path(tempfile.mkdtemp()) / "approved")
        >>> file = approvals.keep(b"trainer: {max_epochs: 3}")
        >>> approvals.own_copy(b"trainer: {max_epochs: 3}")
        b'trainer: {max_epochs: 3}'
        >>> approvals.own_copy(b"trainer: {max_epochs: 4}") is None
        True
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, data: bytes) -> Path:
        """Approve a recipe: write its bytes to a file, and return the file."""
        private_folder(self.folder)
        file = self._file(data)
        with replacing(without_link(file)) as part, private_files():
            part.write_bytes(data)
        return file

    def begin_account(self, file: Path, new_account: bool) -> None:
        """Write an empty privacy account before a site's first approval.

        Args:
            file: The account.
            new_account: Whether to start an empty account even if one exists, for samples that no study has used.

        Raises:
            MisconfigurationException: If the account is missing although recipes are approved, and so was lost.
        """
        if file.exists() and not new_account:
            return
        if not new_account and any(self.folder.glob("*.yaml")):
            raise misconfigured(
                f"{file}, by which this site counts what its samples have cost, does not exist, although recipes are"
                " approved: restore it from a backup. --new-account begins one for samples that no study has used."
            )
        private_folder(file.parent)
        with replacing(without_link(file)) as part, private_files():
            part.write_text("[]", encoding="utf-8")

    def own_copy(self, data: bytes) -> bytes | None:
        """The site's copy of a recipe, ``None`` if it has not approved it.

        Raises:
            MisconfigurationException: If others may write to the folder, and so could approve recipes.
        """
        file = self._file(data)
        if not file.is_file():
            return None
        not_shared(self.folder)
        copy = file.read_bytes()
        # A file changed after the approval approves nothing.
        return copy if copy == data else None

    def difference(self, data: bytes) -> str:
        """The difference from the most similar approved recipe: a few escaped lines for the site."""
        lines = _lines(data)
        files = sorted(self.folder.glob("*.yaml"))
        if not files:
            return "nothing is approved"
        near = max(files, key=lambda file: len(set(lines) & set(_lines(file.read_bytes()))))
        changed = list(difflib.unified_diff(_lines(near.read_bytes()), lines, lineterm="", n=0))[2:]
        shown = [escaped(line) for line in changed if not line.startswith("@@")]
        more = f"; and {len(shown) - _SHOWN_LINES:,} more" if len(shown) > _SHOWN_LINES else ""
        return f"compared with {near.name[:16]}: " + "; ".join(shown[:_SHOWN_LINES]) + more

    def _file(self, data: bytes) -> Path:
        return self.folder / f"{hashlib.sha256(data).hexdigest()}.yaml"


def _lines(data: bytes) -> list[str]:
    return [
        line[: 10 * _LONGEST_LINE] for line in data[:_LARGEST].decode(errors="replace").splitlines()[:_COMPARED_LINES]
    ]


def read_site_values(file: str | None) -> dict[str, Any]:
    """The site's own values, by name, from its file.

    Raises:
        MisconfigurationException: If the file cannot be read, or its rank is not a whole number of 1 or more.
    """
    values = {} if file is None else read_plain(Path(file).expanduser().read_bytes(), f"the site's file {file}")
    rank = values.get("rank")
    if rank is not None and not (type(rank) is int and rank >= 1):
        raise misconfigured(f"rank of {file} must be a whole number, 1 or more, got {rank!r}.")
    return values


def fill_placeholders(content: Any, values: Mapping[str, Any], data_root: str | None = None) -> Any:
    """A recipe's content with the site's values for each ``{site: NAME, default: VALUE}``.

    Args:
        content: The content.
        values: The values, by name.
        data_root: A folder in which files and folders that are the site's own must be, once links are followed.
            ``None``: they may be anywhere.

    Raises:
        MisconfigurationException: If a name has neither a value nor a default, or its value leaves ``data_root``.

    Example:
        >>> fill_placeholders({"lr": 0.1, "num_workers": {"site": "num_workers", "default": 0}}, {"num_workers": 4})
        {'lr': 0.1, 'num_workers': 4}
    """
    if isinstance(content, list):
        return [fill_placeholders(each, values, data_root) for each in content]
    if not isinstance(content, dict):
        return content
    if not _is_placeholder(content):
        return {key: fill_placeholders(value, values, data_root) for key, value in content.items()}
    name = content["site"]
    if name not in values and "default" not in content and not (name == "root" and data_root is not None):
        raise misconfigured(f"the recipe leaves {name!r} to each site: give it in the site's file of own values (site)")
    value = values.get(name, content.get("default", "."))
    if data_root is None or not isinstance(value, str):
        return value
    folder = Path(data_root).expanduser().resolve()
    place = (folder / value).resolve()
    if not place.is_relative_to(folder):
        raise misconfigured(f"{name}={value!r} of this site is {str(place)!r}, outside of data-root={data_root!r}")
    if name in _OPENED or _is_data(name, place):
        return str(place)
    # The name of a split or data set stays, but a file that is missing is not read from the working folder instead.
    if _is_data(name, Path(value)):
        place = Path(value).resolve()
        raise misconfigured(f"{name}={value!r} of this site is {str(place)!r}, outside of data-root={data_root!r}")
    return value


def _is_data(name: str, path: Path) -> bool:
    """Whether a site's value for ``name`` is a file, or a folder if the value can't be the name of a split."""
    try:
        return path.is_file() or (name not in _SPLITS and path.exists())
    except (OSError, ValueError):
        return False


def insert_placeholders(content: Any, values: dict[str, Any]) -> Any:
    """A recipe's content with placeholders for the site's own values; `fill_placeholders` is the inverse.

    Args:
        content: The content.
        values: The values go here, by name.

    Raises:
        MisconfigurationException: If one name has two values.

    Example:
        >>> values = {}
        >>> content = {"data": {"root": "/data", "train": "a.csv", "num_workers": 2}}
        >>> insert_placeholders(content, values)["data"]["train"]
        {'site': 'train', 'default': 'a.csv'}
        >>> values
        {'root': '/data', 'train': 'a.csv', 'num_workers': 2}
    """
    if isinstance(content, list):
        return [insert_placeholders(each, values) for each in content]
    if not isinstance(content, dict):
        return content
    if _is_placeholder(content):
        raise misconfigured(f"the recipe has {content!r}, a placeholder for a site's own value: give the value")
    left = {}
    for name, value in content.items():
        is_split = name in _SPLITS and isinstance(value, str) and not set("./\\") & set(value)
        if name not in _OWN or is_split or not (isinstance(value, str) or name == "num_workers"):
            left[name] = insert_placeholders(value, values)
            continue
        if values.setdefault(name, value) != value:
            raise misconfigured(
                f"{name} is {values[name]!r} in one place of the recipe and {value!r} in another, and a site has one"
                " value for it: make them equal."
            )
        # A file on this machine is no default for others.
        shared = not isinstance(value, str) or (_PLAIN_NAME.fullmatch(value) and not _is_file(value))
        shared = shared and name != "root"
        left[name] = {"site": name, **({"default": value} if shared else {})}
    return left


def check_reads_nothing(content: Any) -> None:
    """Refuse a recipe that names a file on this machine, a path or an address, or that hides a class or an argument.

    jsonargparse reads texts as YAML where an argument is of another type. A text is therefore checked with all texts
    that YAML finds in it. A placeholder's default may be the name of a file in the working folder, which is the site's
    own. An argument with a dot, such as ``trainer.max_epochs``, would replace another one that `sentences` shows.

    Raises:
        MisconfigurationException: If the recipe does; the message has the place.
    """
    for place, name in _dotted_arguments(content):
        raise misconfigured(
            f"{place or 'the recipe'} has the argument {name[:_LONGEST_LINE]!r}: write"
            f" {name.partition('.')[0][:_LONGEST_LINE]!r} as a mapping, without dots in names."
        )
    is_default = follows = False
    for place, value in places_of(content):
        is_default, follows = follows, _is_placeholder(value) and isinstance(value.get("default"), str)
        first, *further = _texts_in(value) if isinstance(value, str) else [""]
        is_part = "." not in place or place.rpartition(".")[2] in _OF_CLASS
        hides = any(text == _BINARY or text.rpartition(".")[2] in _OF_CLASS for text in further)
        if further and (is_part or hides):
            raise misconfigured(
                f"{place}={first[:_LONGEST_LINE]!r} is a text that would be read as a part of the recipe: write it as"
                " YAML, not as text."
            )
        for text in (first, *further):
            own = is_default and _PLAIN_NAME.fullmatch(text)
            if _FILE_OR_ADDRESS.fullmatch(text) or (_is_file(text) and not own):
                where = f" in {first[:_LONGEST_LINE]!r}" if text != first else ""
                raise misconfigured(
                    f"{place}={text!r}{where} is a file or an address, which a recipe for approval must not read: leave"
                    f" it out, or give it as one of {', '.join(_OWN)}, which each site fills in."
                )


def _dotted_arguments(content: Any, path: str = "", section: bool = True) -> Iterator[tuple[str, str]]:
    """Yield the place and name of each argument with a dot; other keys, such as names of layers, may have dots."""
    below = f"{path}." if path else ""
    if isinstance(content, list):
        for number, each in enumerate(content):
            yield from _dotted_arguments(each, f"{below}{number}", False)
    elif isinstance(content, dict):
        are_arguments = section or "class_path" in content or path.rpartition(".")[2] in _OF_CLASS
        for key, each in content.items():
            if are_arguments and isinstance(key, str) and "." in key:
                yield path, key
            yield from _dotted_arguments(each, f"{below}{key}", not path)


def _texts_in(text: str) -> list[str]:
    """A text, and all texts and tags that YAML finds in it, in these texts, and so on."""
    found, left = dict[str, None](), [text]
    while left:
        each = left.pop()
        if each in found:
            continue
        found[each] = None
        try:
            for event in yaml.parse(each, _LOADER):
                left += filter(None, (getattr(event, name, None) for name in ("value", "tag")))
        except (ValueError, yaml.YAMLError):
            """The rest is no YAML, as in many regular expressions."""
    return list(found)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _is_placeholder(content: Any) -> bool:
    """Whether a part of a recipe is a placeholder for a site's own value."""
    return isinstance(content, dict) and "site" in content and content.keys() <= {"site", "default"}


def places_of(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each leaf of a recipe; placeholders for a site's own values are leaves.

    A default of the site's own has a place as well, and a key with a dot has that of its mapping.

    Example:
        >>> list(places_of({"a": [{"b": 1}, {"site": "root"}]}))
        [('a.0.b', 1), ('a.1', {'site': 'root'})]
    """
    below = f"{path}." if path else ""
    if isinstance(content, list):
        for number, each in enumerate(content):
            yield from places_of(each, f"{below}{number}")
    elif isinstance(content, dict) and not _is_placeholder(content):
        for key, each in content.items():
            if isinstance(key, str) and "." in key:
                yield path, key
            yield from places_of(each, f"{below}{key}")
    else:
        yield path, content
        if _is_placeholder(content) and "default" in content:
            yield from places_of(content["default"], f"{below}default")


def sentences(content: Mapping[str, Any]) -> list[str]:
    """Sentences that describe a recipe to the person who approves it, each a line of printable text.

    Each name that could be imported has a line of its own, also one inside a longer text; none is left out.
    """
    federated, trainer = section_of(content, "federated"), section_of(content, "trainer")
    callbacks = trainer.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    private = [each for each in callbacks if isinstance(each, dict) and "Privacy" in str(each.get("class_path"))]
    places = list(places_of(content))
    left = [
        f"{value.get('site')} ({path}" + (f", else {value['default']!r})" if "default" in value else ")")
        for path, value in places
        if _is_placeholder(value)
    ]
    code = sorted({name for path, value in places for name in _code_of(path, value)})
    lines = [
        f"Data: {_as_call(content.get('data'))}, divided by"
        f" {_as_call(federated.get('partition') or {'class_path': 'IID'})}.",
        f"Model: {_as_call(content.get('model'))}.",
        f"Low rank: {_as_call(content.get('lowrank'))}.",
        f"Method: {_as_call(federated.get('algorithm'))}; {federated.get('clients') or 'any number of'} clients, of"
        f" which {federated.get('clients_per_round') or 'all'} a round, {trainer.get('max_epochs')} rounds of"
        f" {federated.get('local_epochs')} local epochs, and no round of fewer than"
        f" {federated.get('min_clients') or 1} clients.",
        f"Callbacks: {'; '.join(map(_as_call, callbacks)) or 'none'}.",
        "Sent in each round: the method's message of the trained tensors, through"
        f" {_as_call(federated.get('uplink')) if federated.get('uplink') else 'no codec'}; at the start the numbers of"
        " samples and steps.",
        f"Privacy: {_as_call(federated['privacy']) if federated.get('privacy') else 'no noise on messages'};"
        f" {_as_call(private[0]) if private else 'no privacy accounting of the samples'}.",
        f"This site fills in: {', '.join(left) or 'nothing'}.",
    ]
    title = "Code that may be imported and run, and texts of the same form, such as names of files:"
    named = [title, *(f"  {each}" for each in code)]
    # A long sentence may be cut, but never a name that could be imported.
    return [*(escaped(each, 2000) for each in lines), *(escaped(each, 10 * len(each) + 10) for each in named)]


def _code_of(path: str, value: Any) -> list[str]:
    """Names in a part of a recipe that could be imported."""
    if path.rpartition(".")[2] == "class_path":
        return [str(value)]
    return [name for text in _texts_in(value) for name in _DOTTED.findall(text)] if isinstance(value, str) else []


def section_of(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The arguments of a section of a recipe, with or without ``class_path``; empty if it is missing."""
    found = content.get(name)
    found = found.get("init_args", found) if isinstance(found, dict) else {}
    return found if isinstance(found, dict) else {}


def _as_call(value: Any) -> str:
    """A part of a recipe as a Python call, without arguments that are ``None``."""
    if isinstance(value, list):
        return f"[{', '.join(map(_as_call, value))}]"
    if not isinstance(value, dict):
        return str(value)
    if _is_placeholder(value):
        return f"this site's {value['site']}"
    arguments = value.get("init_args") if "class_path" in value else None
    others = {name: each for name, each in value.items() if name not in ("class_path", "init_args")}
    given = {**(arguments if isinstance(arguments, dict) else {}), **others}
    inside = ", ".join(f"{name}={_as_call(each)}" for name, each in given.items() if each is not None)
    return f"{str(value.get('class_path', '')).rpartition('.')[2]}({inside})"
