"""A page of the documentation, and a reader who follows it word for word in an empty folder.

Blocks are followed in their order. What stands between fences is, by its language:

- ``python``: run, with the names of the blocks before it; with a ``title``, written to the file of that name.
- ``yaml``: read; with a ``title``, written to the file of that name.
- ``bash``: run, command by command, as `Reader.run` says.
- ``text``: printed by the blocks before it: each line is among what they printed, or where it ends in ``…`` the
  beginning of one. Digits may differ, because another machine rounds otherwise.
- ``output``: printed by the commands right before it, where they were measured. Here they are shortened or only
  checked, so that it is not compared.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import types
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md"))
README = ROOT / "README.md"
# Commands for who works on the package itself, and those that make what was measured. They take from minutes to days.
NOT_FOLLOWED = {"CONTRIBUTING.md", "modules.md"}
LANGUAGES = ("python", "yaml", "bash", "text", "output")
ROUNDS = 2
"""Rounds that a fit of one of the repository's own recipes is shortened to; their own tests say what they learn."""

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)(?P<options>[^\n]*)\n(?P<text>.*?)^(?P=indent)```", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """A block between fences: its language, the file that it is, if any, its text, and the line where it begins."""

    language: str
    title: str | None
    text: str
    line: int


def blocks(path: Path) -> list[Block]:
    """Return a page's blocks."""
    page = path.read_text(encoding="utf-8")
    found = []
    for fence in _FENCE.finditer(page):
        title = re.search(r'title="([^"]+)"', fence["options"])
        text = re.sub(rf"^{fence['indent']}", "", fence["text"], flags=re.M)
        line = page.count("\n", 0, fence.start()) + 2
        found.append(Block(fence["language"], title and title[1], text, line))
    return found


FOLLOWED = [page for page in [*PAGES, README] if page.name not in NOT_FOLLOWED and blocks(page)]
CHECKED = [*(DOCS / name for name in sorted(NOT_FOLLOWED)), *sorted((ROOT / "recipes").rglob("RESULTS.md"))]


def commands(text: str) -> list[str]:
    """Return a shell block's commands, without comments, each in one line."""
    lines = text.replace("\\\n", " ").splitlines()
    found = [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]
    return [command for line in found if line for command in line.split(" && ")]


class Reader:
    """Who follows a page.

    Args:
        folder: Where, an empty folder. The repository's recipes and documentation are there as links.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.printed = ""
        self.module = types.ModuleType("page")
        for name in ("recipes", "docs", "tests"):
            (folder / name).symlink_to(ROOT / name)

    def follow(self, path: Path) -> None:
        """Follow all of a page's blocks."""
        last = ""
        for block in blocks(path):
            place = f"{path.relative_to(ROOT)}:{block.line}"
            assert block.language in LANGUAGES, f"{place}: a block has no language of {LANGUAGES}"
            try:
                getattr(self, block.language)(block, place)
            except Exception as error:
                raise AssertionError(f"{place}: {type(error).__name__}: {error}\n{self.printed[-2000:]}") from error
            assert block.language != "output" or last == "bash", f"{place}: an output has no command before it"
            last = block.language

    def output(self, block: Block, place: str) -> None:
        """Take what was measured elsewhere as it is."""

    def python(self, block: Block, place: str) -> None:
        """Run a block of Python, or write a file."""
        if block.title:
            (self.folder / block.title).write_text(block.text)
            return
        code = compile("\n" * (block.line - 1) + block.text, place, "exec")
        with self._listening():
            exec(code, vars(self.module))

    def yaml(self, block: Block, place: str) -> None:
        """Read a block of YAML, or write a file."""
        assert isinstance(yaml.safe_load(block.text), dict), f"{place} is no mapping"
        if block.title:
            (self.folder / block.title).write_text(block.text)

    def text(self, block: Block, place: str) -> None:
        """Compare with what was printed."""
        known = {_without_digits(line) for line in self.printed.splitlines()}
        for line in block.text.splitlines():
            begins = _without_digits(line.removesuffix("…"))
            found = begins in known or (line.endswith("…") and any(other.startswith(begins) for other in known))
            assert found, f"{line!r} was not printed"

    def bash(self, block: Block, place: str) -> None:
        """Run the commands of a block."""
        for command in commands(block.text):
            self.run(command)

    def run(self, command: str) -> None:
        """Run a command.

        Our own command runs in this process. A fit of the repository's recipes is `ROUNDS` rounds long, and as many
        more where it goes on from a checkpoint. A run on several devices or nodes, which are not here, and one whose
        data or model would be fetched, is parsed and checked, and does not begin. Of an installation, the names are
        compared with those in ``pyproject.toml``, and of Flower's commands and of benchmarks the options with those
        that they have. ``.ci/run`` makes an environment, installs the package and runs the tests. All else runs in a
        shell.
        """
        words = shlex.split(command)
        added = [words.pop(0) for _ in range(len(words)) if re.match(r"[A-Z_]+=", words[0])]
        if words[0] == "srun":
            words = words[words.index("lightning-lowrank") :]
        if words[0] == "lightning-lowrank":
            self._ours(words[1:], importable="PYTHONPATH=." in added)
        elif words[:3] == ["python3", "-m", "venv"] or words[0] in (".", "pytest"):
            assert words[-1] in (".venv", ".venv/bin/activate") or words == ["pytest", "-n", "2"], command
        elif words[:2] == ["pip", "install"]:
            for name in words[2:]:
                _check_installable(name)
        elif words[0] == "python" and words[1].startswith("tests/benchmarks/"):
            _check_script(Path(words[1]), words[2:])
        elif words[0] == "python":
            with self._listening(), _arguments(words[1:]):
                runpy.run_path(words[1], run_name="__main__")
        elif words[0].startswith(("flwr", "flower-")):
            _check_options(tuple(words))
        else:
            environment = {**os.environ, "HOME": str(self.folder)}
            done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            self.printed += done.stdout

    def _ours(self, words: list[str], importable: bool) -> None:
        from lightning_lowrank.cli import main

        elsewhere = ("--trainer.devices", "--trainer.num_nodes")
        fetched = any("recipes/finetuning" in word or "recipes/flowertune" in word for word in words)
        if words[0] == "fit":
            if fetched or any(word in elsewhere for word in words):
                words = [*words, "--print_config"]
            elif any(word.startswith("recipes/") for word in words):
                words = [*words, f"--trainer.max_epochs={ROUNDS * (2 if '--ckpt_path' in words else 1)}"]
        path = list(sys.path)
        words = [found for word in words for found in (sorted(glob.glob(word)) or [word])]
        with self._listening():
            try:
                sys.path[:] = [*([str(self.folder)] if importable else []), *(p for p in path if p != str(self.folder))]
                with mock.patch("builtins.input", return_value="y"):
                    main(words)
            except SystemExit as end:
                if end.code not in (0, None):
                    raise RuntimeError(f"lightning-lowrank {' '.join(words)}: {end.code}") from end
            finally:
                sys.path[:] = path

    @contextlib.contextmanager
    def _listening(self):
        said = io.StringIO()
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                warnings.simplefilter("ignore")
                yield
        finally:
            self.printed += said.getvalue()


@contextlib.contextmanager
def _arguments(words: list[str]):
    kept = sys.argv
    sys.argv = words
    try:
        yield
    finally:
        sys.argv = kept


def _without_digits(line: str) -> str:
    """Return a line without what differs between machines: digits, and the width that they take."""
    return re.sub(r"[\s─]+", " ", re.sub(r"[\d.,]+(e[-+]?\d+)?", "0", line)).strip()


def _check_installable(name: str) -> None:
    """Check that the extras in a requirement, or the required package itself, are in pyproject.toml."""
    if name.startswith("-"):
        return
    project = (ROOT / "pyproject.toml").read_text()
    extras = re.findall(r"^(\w+) = \[", project.split("[project.optional-dependencies]")[1].split("\n[")[0], flags=re.M)
    wanted = re.fullmatch(r"(?P<name>\.|[\w-]+)(\[(?P<extras>[\w,-]+)\])?", name)
    assert wanted, name
    if wanted["name"] == ".":
        unknown = set((wanted["extras"] or "").split(",")) - {"", *extras}
        assert not unknown, f"{name}: there is no extra {unknown}"
    else:
        assert wanted["name"] in OTHERS, f"{name} is none of {OTHERS}"


_STUBS = """
record() { printf '%s\\t' "$@" >> "$CALLS"; echo >> "$CALLS"; }
for name in lightning-lowrank pip pre-commit pytest ruff mypy mkdocs unzip; do
    eval "$name() { record $name \\"\\$@\\"; }"
done
python() { if [ "$1" = -c ]; then echo folder; else record python "$@"; fi; }
"""


def called(path: Path, folder: Path) -> list[list[str]]:
    """Return which commands a page's shell blocks call, with variables and loops resolved, without calling them."""
    log = folder / "calls"
    log.write_text("")
    text = "\n".join(block.text for block in blocks(path) if block.language == "bash")
    # Brackets stand around what may be left out.
    script = _STUBS + re.sub(r"\[(--[^\]]*)\]", r"\1", text)
    environment = {**os.environ, "CALLS": str(log)}
    done = subprocess.run(["bash", "-e"], input=script, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.rstrip("\t").split("\t") for line in log.read_text().splitlines()]


def check_call(words: list[str]) -> None:
    """Check that a command could be run: its files, its options and the recipe that they make are there."""
    if words[0] == "lightning-lowrank":
        if words[1] == "fit":
            _parse(words[1:])
    elif words[0] == "pip" and words[1] == "install":
        for name in words[2:]:
            _check_installable(name)
    elif words[0] == "python":
        is_module = words[1] == "-m"
        name, *others = words[1 + is_module :]
        if is_module and name in ("pytest", "pip"):
            missing = [word for word in others if word.startswith("tests/") and not (ROOT / word).exists()]
            assert not missing, f"there is no {missing}"
            return
        # What stands after these goes to each fit.
        end = min((others.index(word) for word in ("--", "--recipe-arguments") if word in others), default=len(others))
        options = [word for word in others[: end + 1] if word != "--"]
        _check_script(Path(name.replace(".", "/") + ".py" if is_module else name), options)
        if others[end + 1 :]:
            _parse(["fit", "--config", "recipes/finetuning/sst2.yaml", *others[end + 1 :]])


def _check_script(path: Path, words: list[str]) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    if "import add_json_option" in source:
        source += (ROOT / path).with_name("json_option.py").read_text(encoding="utf-8")
    for option in words:
        assert not option.startswith("--") or f'"{option}"' in source, f"{path} has no {option}"


def _parse(words: list[str]) -> None:
    from lightning_lowrank.cli import main

    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), _arguments(["lightning-lowrank"]):
            main([*words, "--print_config"])
    except SystemExit as end:
        if end.code not in (0, None):
            raise AssertionError(f"{' '.join(words)}: {end.code}") from end


OTHERS = ("wandb", "mlflow", "tensorboard", "optuna", "pre-commit")
"""Packages that pages install beside this one."""


@cache
def _check_options(words: tuple[str, ...]) -> None:
    """Check that a command of Flower has the options that it is given."""
    scripts = {script.name: script for script in importlib.metadata.entry_points(group="console_scripts")}
    options = [word for word in words if word.startswith("--")]
    command = (
        [word for word in words[:3] if not word.startswith("-") and "/" not in word]
        if words[0] == "flwr"
        else words[:1]
    )
    if words[0] == "flwr":
        command = ["flwr", *(["supernode", "register"] if words[1] == "supernode" else [words[1]])]
    module, _, function = scripts[words[0]].value.partition(":")
    call = f"import sys; from {module} import {function} as run; sys.argv = {[*command, '--help']!r}; run()"
    said = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, timeout=120).stdout
    for option in options:
        assert option in said, f"{' '.join(command)} has no {option}"
