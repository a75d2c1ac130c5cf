"""Quickstart and daily tests with other releases of Python and of what the package depends on.

For who changes a bound in ``pyproject.toml`` or prepares a release; CI does not call it, because each combination
downloads up to 3 GB. It writes the table of ``docs/versions.md``.

    pip install uv
    python tests/benchmarks/versions.py --pythons ~/.pyenv/versions/*/bin/python
    python tests/benchmarks/versions.py --only lowest newest-3.13 --tests tests/federated    # a part of the tests

For each combination it makes an environment, builds the wheel, and installs it with the extra ``test``:

- ``lowest``: the lowest Python at hand, and of each dependency the lowest release that ``pyproject.toml`` admits.
- ``newest-3.11`` and so on: one Python, and the newest releases of all else.

The wheel's command then trains the quickstart in an empty folder, where only the recipe in the wheel can be found. The
tests are those of this checkout. Environments are deleted afterwards; logs stay in ``build/versions``.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "versions.md"
PYTHONS = ((3, 10), (3, 11), (3, 12), (3, 13), (3, 14))
SHOWN = ("torch", "lightning", "numpy")
_COLUMNS = ("combination", "Python", *SHOWN, "quickstart", "tests", "of", "date")
HEAD = f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}\n"


def interpreters(paths: list[Path]) -> dict[tuple[int, int], Path]:
    """Return the interpreters of the releases in question, each by its release; the first of a release counts."""
    found: dict[tuple[int, int], Path] = {}
    for path in paths:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
        release = re.match(r"Python (\d+)\.(\d+)", said.stdout + said.stderr)
        assert release is not None, f"{path} is no Python"
        version = (int(release[1]), int(release[2]))
        if version in PYTHONS:
            found.setdefault(version, path)
    return found


def combinations(found: dict[tuple[int, int], Path]) -> dict[str, tuple[Path, str]]:
    """Return name, interpreter and uv's way to choose releases of each combination."""
    lowest = min(found)
    return {
        "lowest": (found[lowest], "lowest-direct"),
        **{f"newest-{a}.{b}": (found[a, b], "highest") for a, b in sorted(found)},
    }


def outcome(log: str) -> str:
    """Return what pytest's summary says of a run.

    Libraries may print more when the interpreter ends.

    >>> outcome("...\\n= 2 failed, 5 passed, 1 skipped, 9 deselected, 3 warnings in 4.00s =\\nnanobind: leaked!")
    '2 failed, 5 passed, 1 skipped'
    >>> outcome("ImportError while loading conftest")
    'ended: ImportError while loading conftest'
    """
    lines = log.strip().splitlines() or [""]
    counted = r"\d+ (?:failed|passed|skipped|errors?|xfailed)\b"
    said = next((line for line in reversed(lines) if re.search(rf"{counted}.* in [\d.]+s", line)), None)
    return f"ended: {lines[-1][:60]}" if said is None else ", ".join(re.findall(counted, said))


def with_row(page: str, row: str) -> str:
    """Return the page with a row added to its table, or in the place of the one of the same combination and tests.

    >>> page = with_row("# Versions\\n\\n" + HEAD, "| a | 3.10 | 2 | 2 | 1 | 0.9 | 3 passed | all | then |")
    >>> page = with_row(page, "| a | 3.10 | 2 | 2 | 1 | 0.9 | 4 passed | all | now |")
    >>> print(page.removeprefix("# Versions\\n\\n" + HEAD).strip())
    | a | 3.10 | 2 | 2 | 1 | 0.9 | 4 passed | all | now |
    """

    def key(line: str) -> tuple[str, str]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        return cells[0], cells[-2]

    before, head, rest = page.partition(HEAD)
    assert head, f"{PAGE} has no table with the head {HEAD}"
    rest_lines = rest.splitlines()
    count = next((index for index, line in enumerate(rest_lines) if not line.startswith("|")), len(rest_lines))
    rows = {key(line): line for line in [*rest_lines[:count], row]}
    return before + head + "\n".join([*(rows[each] for each in sorted(rows)), *rest_lines[count:]]) + "\n"


def run(name: str, python: Path, resolution: str, tests: list[str], work: Path, logs: Path) -> str:
    """Try a combination, and return its row."""
    environment, empty = work / name, work / f"{name}-empty"
    empty.mkdir()
    log = logs / f"{name}.log"
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    variables["OMP_NUM_THREADS"] = "1"

    def call(*words: str | Path, folder: Path = ROOT, check: bool = True) -> str:
        done = subprocess.run(
            [str(word) for word in words],
            cwd=folder,
            env=variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        with log.open("a", encoding="utf-8") as file:
            file.write(f"$ {' '.join(map(str, words))}\n{done.stdout}\n")
        if check and done.returncode:
            raise RuntimeError(f"{name}: {words[0]} ended with {done.returncode}; see {log}")
        return done.stdout

    log.unlink(missing_ok=True)
    inside = environment / "bin" / "python"
    call("uv", "venv", "--python", python, environment)
    call("uv", "build", "--wheel", "--python", python, "--out-dir", work / f"{name}-wheel", ROOT)
    (wheel,) = (work / f"{name}-wheel").glob("*.whl")
    # Of a wheel that is installed by its path, uv takes the newest dependencies whatever the resolution.
    pins = work / f"{name}.txt"
    choose = ("--extra", "test", "--resolution", resolution, "--python", inside, "--output-file", pins)
    call("uv", "pip", "compile", ROOT / "pyproject.toml", *choose)
    call("uv", "pip", "install", "--python", inside, "--requirements", pins, wheel)
    where = "import lightning_lowrank, sys; assert lightning_lowrank.__file__.startswith(sys.prefix)"
    call(inside, "-c", where, folder=empty)
    trained = call(
        environment / "bin" / "lightning-lowrank", "fit", "--config", "quickstart", folder=empty, check=False
    )
    accuracy = re.search(r"after 30 rounds: .*val_acc ([\d.]+)", trained)
    told = "import importlib.metadata as m, platform; print(platform.python_version(), *map(m.version, {!r}))"
    releases = call(inside, "-c", told.format(SHOWN)).split()
    tested = call(inside, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *tests, check=False)
    cells = [
        name,
        *releases,
        accuracy[1] if accuracy else "fails",
        outcome(tested),
        " ".join(tests) or "all daily",
        datetime.date.today().isoformat(),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Try the combinations that are asked for, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="+", type=Path, default=[Path(sys.executable)], help="interpreters")
    parser.add_argument("--only", nargs="+", help="names of combinations; without, all")
    parser.add_argument("--tests", nargs="+", default=[], help="pytest's arguments; without, all daily tests")
    parser.add_argument("--dry-run", action="store_true", help="only say which combinations there are")
    given = parser.parse_args()
    there = combinations(interpreters(given.pythons))
    missing = [f"{a}.{b}" for a, b in PYTHONS if f"newest-{a}.{b}" not in there]
    if missing:
        print(f"no interpreter is given of Python {', '.join(missing)}")
    names = given.only or list(there)
    if unknown := set(names) - set(there):
        parser.error(f"--only {' '.join(sorted(unknown))}: there are {', '.join(there)}")
    logs = ROOT / "build" / "versions"
    logs.mkdir(parents=True, exist_ok=True)
    for name in names:
        python, resolution = there[name]
        print(f"{name}: {python}, {resolution} releases", flush=True)
        if given.dry_run:
            continue
        with tempfile.TemporaryDirectory(dir=logs) as work:
            row = run(name, python, resolution, given.tests, Path(work), logs)
        PAGE.write_text(with_row(PAGE.read_text(encoding="utf-8"), row), encoding="utf-8")
        print(row, flush=True)


if __name__ == "__main__":
    main()
