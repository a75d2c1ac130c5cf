"""Mutations of the package, and whether its tests notice them.

A check of the test suite, by hand: ``draw`` lists mutations that a seed draws; ``cover`` runs tests in a copy of the
checkout that notes which test reaches which place; ``run`` tries each mutation in a copy, against the tests that reach
its place, those of a change's check first and the nightly ones where it survives::

    python tests/benchmarks/mutations.py draw --seed 17c22be --count 60
    python tests/benchmarks/mutations.py cover --seed 17c22be --count 60 --reached reached.txt --pytest "-n 2"
    python tests/benchmarks/mutations.py run --seed 17c22be --count 60 --reached reached.txt --output fates.json

A place that no test reached is tried against the tests of the folder that mirrors its file's.

A mutation turns a comparison, drops a branch, changes a constant or deletes a statement within a function; each kind
is drawn equally often, its places uniformly over the package. It keeps the number of lines.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = "lightning_lowrank"
KINDS = ("comparison", "branch", "constant", "statement")
TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
DAILY = "not slow and not nightly"
CHECK = "slow and not nightly"
NIGHTLY = "nightly"


@dataclass(frozen=True, order=True)
class Mutation:
    """One change of one place.

    Args:
        file: The file, relative to the checkout.
        line: First line of the place, from 1.
        last_line: Its last line.
        column: Where it begins in the first line, in bytes of UTF-8.
        last_column: Where it ends in the last line.
        kind: One of `KINDS`.
        text: What stands there afterwards, with as many line breaks as before.
    """

    file: str
    line: int
    last_line: int
    column: int
    last_column: int
    kind: str
    text: str

    def apply(self, root: Path) -> None:
        """Change the file in the checkout ``root``."""
        lines = (root / self.file).read_bytes().splitlines(keepends=True)
        before = b"".join(lines[: self.line - 1]) + lines[self.line - 1][: self.column]
        after = lines[self.last_line - 1][self.last_column :] + b"".join(lines[self.last_line :])
        (root / self.file).write_bytes(before + self.text.encode() + after)

    def source(self) -> str:
        """The place as it is, in one line."""
        lines = (ROOT / self.file).read_bytes().splitlines()[self.line - 1 : self.last_line]
        lines[-1] = lines[-1][: self.last_column]
        lines[0] = lines[0][self.column :]
        return " ".join(line.decode().strip() for line in lines)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.kind}: {self.source()} -> {' '.join(self.text.split())}"


def places(file: Path) -> Iterator[Mutation]:
    """Each mutation of a file, within functions and without annotations, default values, docstrings and asserts."""
    name = str(file.relative_to(ROOT))

    def mutation(node: ast.AST, kind: str, text: str) -> Mutation:
        breaks = "\n" * (node.end_lineno - node.lineno)
        text = f"({text}{breaks})" if kind in ("comparison", "branch") else text + breaks
        return Mutation(name, node.lineno, node.end_lineno, node.col_offset, node.end_col_offset, kind, text)

    def within(node: ast.AST, in_function: bool) -> Iterator[Mutation]:
        if isinstance(node, (ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)):
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for each in node.body:
                yield from within(each, True)
            return
        if in_function:
            if isinstance(node, ast.Compare) and len(node.ops) == 1:
                turned = ast.Compare(node.left, [TURNED[type(node.ops[0])]()], node.comparators)
                yield mutation(node, "comparison", ast.unparse(turned))
            elif isinstance(node, ast.If):
                yield mutation(node.test, "branch", "False")
            elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
                value = not node.value if isinstance(node.value, bool) else node.value + 1
                yield mutation(node, "constant", repr(value))
            elif isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign, ast.Return, ast.Raise)) and not (
                isinstance(node, ast.Expr) and isinstance(node.value, (ast.Constant, ast.Yield, ast.YieldFrom))
            ):
                yield mutation(node, "statement", "pass")
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns", "decorator_list"):
                for each in value if isinstance(value, list) else [value]:
                    if isinstance(each, ast.AST):
                        yield from within(each, in_function)

    yield from within(ast.parse(file.read_text()), False)


def draw(seed: str, count: int) -> list[Mutation]:
    """``count`` mutations, equally many of each kind, in the order of files."""
    found: dict[str, list[Mutation]] = {kind: [] for kind in KINDS}
    for file in sorted((ROOT / PACKAGE).rglob("*.py")):
        for each in places(file):
            found[each.kind].append(each)
    draws = random.Random(seed)
    numbers = [count // len(KINDS) + (place < count % len(KINDS)) for place in range(len(KINDS))]
    chosen = [draws.sample(found[kind], number) for kind, number in zip(KINDS, numbers, strict=True)]
    return sorted(itertools.chain(*chosen))


def marked(text: str, mutations: dict[int, Mutation]) -> str:
    """A file's text with a line before the statement of each numbered mutation that notes its number."""
    bodies = [
        body
        for node in ast.walk(ast.parse(text))
        for field in ("body", "orelse", "finalbody")
        for body in [getattr(node, field, None)]
        if isinstance(body, list)
    ]
    lines = text.splitlines(keepends=True)
    before: dict[int, list[int]] = {}
    for number, mutation in mutations.items():
        # Of the statements around the place the innermost that begins a line: an `elif` has no line before it.
        around = [
            each
            for body in bodies
            for each in body
            if each.lineno <= mutation.line <= each.end_lineno
            and not lines[each.lineno - 1].lstrip().startswith("elif")
        ]
        inner = max(around, key=lambda each: each.lineno)
        first = min([inner.lineno, *(each.lineno for each in getattr(inner, "decorator_list", []))])
        before.setdefault(first - 1, []).append(number)
    for place, numbers in sorted(before.items(), reverse=True):
        indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
        lines.insert(place, f"{indent}__import__('{PACKAGE}._reached', fromlist=['note']).note({numbers})\n")
    return "".join(lines)


NOTES = """
import os

_SEEN = set()


def note(numbers):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    for number in numbers:
        if test and (number, test) not in _SEEN:
            _SEEN.add((number, test))
            with open({file!r}, "a") as stream:
                stream.write(f"{{number}} {{test}}\\n")
"""


def cover(mutations: Sequence[Mutation], reached: Path, options: Sequence[str]) -> int:
    """Run pytest where each place notes the tests that reach it, appended to the file ``reached``, for its status."""
    with tempfile.TemporaryDirectory() as folder:
        root = copied(Path(folder))
        (root / PACKAGE / "_reached.py").write_text(NOTES.format(file=str(reached.resolve())))
        for file in {each.file for each in mutations}:
            numbered = {number: each for number, each in enumerate(mutations) if each.file == file}
            (root / file).write_text(marked((root / file).read_text(), numbered))
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
        return subprocess.run(command, cwd=root, env=environment(root)).returncode


def copied(folder: Path) -> Path:
    """A copy of the checkout in a folder, with what the tests find beside it."""
    root = folder / "checkout"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".git", ".*_cache", "lightning_logs"))
    (folder / "shared").symlink_to(ROOT.parent / "shared")
    return root


def environment(root: Path) -> dict[str, str]:
    """The environment of a process that imports the package of the checkout ``root``, whatever is installed."""
    return {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}


def read(reached: Path | None) -> dict[int, set[str]]:
    """The ids of the tests that reach each mutation's place, by the mutation's number."""
    found: dict[int, set[str]] = {}
    for line in [] if reached is None else reached.read_text().splitlines():
        number, _, test = line.partition(" ")
        found.setdefault(int(number), set()).add(test)
    return found


def mirrored(mutation: Mutation, tests: set[str]) -> set[str]:
    """The ids, among ``tests``, of those in the folder that mirrors a mutation's."""
    mirror = f"tests/{Path(mutation.file).relative_to(PACKAGE).parent.as_posix()}/"
    return {name for name in tests if name.startswith(mirror)}


def collected(expression: str) -> set[str]:
    """The ids of the tests that ``-m expression`` selects."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", expression]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return {line for line in done.stdout.splitlines() if "::" in line}


def attempt(root: Path, tests: Sequence[str], limit: float) -> tuple[str, float]:
    """Run tests in a checkout until one fails, and return its id, "" where none does, and the seconds it took."""
    began = time.monotonic()
    listed = root / "tests.txt"
    listed.write_text("\n".join(tests))
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "slow or nightly or not slow"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, f"--basetemp={root / 'temporary'}", "@tests.txt"],
        cwd=root,
        env=environment(root),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return "(time limit)", time.monotonic() - began
    spent = time.monotonic() - began
    if process.returncode == 0:
        return "", spent
    failed = [line for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return (failed[0].split(" - ")[0] if failed else f"(pytest ended with {process.returncode}) {said[-500:]}"), spent


def fate(mutation: Mutation, tiers: dict[str, list[str]], limit: float) -> dict[str, Any]:
    """Try a mutation against the tests of each tier in turn, until one notices it."""
    result: dict[str, Any] = {**asdict(mutation), "said": str(mutation), "tests": {}, "caught": "", "by": ""}
    result["tests"] = {tier: len(tests) for tier, tests in tiers.items()}
    result["seconds"] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = copied(Path(folder))
        mutation.apply(root)
        left = limit
        for tier, tests in tiers.items():
            if tests and left > 0:
                failed, spent = attempt(root, tests, limit if tier == "daily" else left)
                result["seconds"][tier] = round(spent, 1)
                left -= spent if tier != "daily" else 0
                if failed and not (failed == "(time limit)" and tier != "daily"):
                    return {**result, "caught": tier, "by": failed}
                if failed:
                    result["by"] = failed
    return result


def main() -> None:
    """Draw, cover or try mutations."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=["draw", "cover", "run"])
    parser.add_argument("--seed", required=True, help="any text; the same text draws the same mutations of a commit")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--reached", type=Path, help="file of lines that `cover` appends to and `run` reads")
    parser.add_argument("--core-seconds", type=Path, help="JSON of core_seconds.py: quick tests are run first")
    parser.add_argument("--minutes", type=float, default=15.0, help="limit for a mutation's tests but the daily ones")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of mutations, from 0")
    parser.add_argument("--output", type=Path, help="JSON file of fates, written after each")
    parser.add_argument("--pytest", type=shlex.split, default=[], help="options of pytest for `cover`")
    arguments = parser.parse_args()
    mutations = draw(arguments.seed, arguments.count)
    if arguments.what == "draw":
        print(*(f"{number} {each}" for number, each in enumerate(mutations)), sep="\n")
        return
    if arguments.what == "cover":
        sys.exit(cover(mutations, arguments.reached, arguments.pytest))
    reached = read(arguments.reached)
    seconds = {} if arguments.core_seconds is None else json.loads(arguments.core_seconds.read_text())
    members = {"daily": collected(DAILY), "check": collected(CHECK), "nightly": collected(NIGHTLY)}
    fates: dict[int, dict[str, Any]] = {}
    if arguments.output is not None and arguments.output.exists():
        fates = {int(number): each for number, each in json.loads(arguments.output.read_text()).items()}

    def work(number: int) -> None:
        tests = set().union(*members.values())
        covers = reached.get(number, set()) & tests or mirrored(mutations[number], tests)
        tiers = {
            tier: sorted(covers & ids, key=lambda name: (seconds.get(name, 1.0), name)) for tier, ids in members.items()
        }
        fates[number] = fate(mutations[number], tiers, 60 * arguments.minutes)
        found = fates[number]
        print(f"{number} {found['caught'] or 'SURVIVES'} {found['said']}", flush=True)
        print(f"    {found['by']} {found['tests']} {found['seconds']}", flush=True)
        if arguments.output is not None:
            arguments.output.write_text(json.dumps(dict(sorted(fates.items())), indent=1))

    numbers = range(len(mutations)) if arguments.only is None else arguments.only
    with ThreadPoolExecutor(arguments.processes) as pool:
        list(pool.map(work, [number for number in numbers if number not in fates]))


if __name__ == "__main__":
    main()
