"""The table of the zoo in Markdown."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from itertools import groupby

from tests.zoo.compare import RANK_RATIO, TOLERANCE, WAYS, Outcome, Row
from tests.zoo.registry import SIZES

__all__ = ["markdown", "versions"]

COMMAND = 'pip install -e ".[zoo]" && OMP_NUM_THREADS=1 python -m tests.zoo.run --out docs/modules.md'
PACKAGES = (
    "lightning_lowrank", "torch", "lightning", "torchvision", "torchmetrics", "timm", "transformers", "peft",
    "torch-geometric",
)  # fmt: skip
HEADINGS = ("sequential", "vectorized", "auto", "layers", "sequential", "vectorized", "auto")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that the modules are made of."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


class Notes:
    """Sentences that are told once, and the marks that stand for them in the table."""

    def __init__(self, letter: str) -> None:
        self.letter = letter
        self.sentences: dict[str, str] = {}

    def mark(self, sentence: str) -> str:
        """Return the mark of a sentence."""
        return self.sentences.setdefault(sentence, f"{self.letter}{len(self.sentences) + 1}")

    def lines(self) -> list[str]:
        """Return a line for each sentence."""
        return [f"- **{mark}** `{sentence.replace('`', chr(39))}`" for sentence, mark in self.sentences.items()]


def _cell(outcome: Outcome, way: str, reasons: Notes, faults: Notes) -> str:
    took = {"vectorized": "together, ", "sequential": "alone, "}.get(outcome.taken, "") if way.endswith("auto") else ""
    if outcome.verdict == "equal":
        return f"{took}{outcome.difference:.0e}" if outcome.difference else f"{took}0"
    if outcome.verdict == "runs":
        return f"{took}runs"
    if outcome.verdict == "refused":
        return f"refused, {reasons.mark(outcome.said)}"
    if outcome.verdict == "warned":
        return f"{took}warned, {reasons.mark(outcome.said)}"
    size = "" if outcome.difference is None else f" {outcome.difference:.0e}"
    return f"{took}**{outcome.verdict}**{size}, {faults.mark(outcome.said)}"


def markdown(rows: Sequence[Row]) -> str:
    """Return the page: an introduction, a table for each kind, and what the marks stand for."""
    reasons, faults = Notes("R"), Notes("F")
    tables = []
    for kind, members in groupby(rows, key=lambda row: row.kind):
        tables += [
            f"## {kind}",
            "",
            "| module | what is particular | " + " | ".join(HEADINGS) + " |",
            "|---" * (2 + len(HEADINGS)) + "|",
        ]
        for row in members:
            cells = [_cell(row.outcomes[way], way, reasons, faults) for way in WAYS]
            cells.insert(3, str(row.converted))
            tables.append(f"| {row.name} | {row.about} | " + " | ".join(cells) + " |")
        tables.append("")
    page = [
        _introduction(rows),
        *tables,
        "## Why",
        "",
        "The first sentence of each error or warning:",
        "",
        *reasons.lines(),
    ]
    if faults.sentences:
        page += ["", "## Faults", "", *faults.lines()]
    return "\n".join(page) + "\n"


def _introduction(rows: Sequence[Row]) -> str:
    def count(way: str, *verdicts: str) -> int:
        return sum(row.outcomes[way].verdict in verdicts for row in rows)

    samples = ", ".join(str(size) for size in SIZES[:-1]) + f" and {SIZES[-1]}"
    return f"""# Which modules run

{len(rows)} LightningModules as people write them, each in one round of federated averaging with {len(SIZES)} clients of
{samples} samples, on the CPU in float64. {count("sequential", "equal")} of them end sequentially in the mean of
independent plain `Trainer.fit`s. {count("vectorized", "equal", "runs")} can step together, and for
{count("vectorized", "refused")} that is refused with a reason. {_faults(rows)}

- **sequential**: the largest difference from the mean of a plain `Trainer.fit` for each client on its samples alone,
  over the largest of a tensor's numbers. Buffers and frozen tensors are compared as well.
- **vectorized** and **auto**: the same difference from the sequential run. *together* and *alone* say what `auto` took:
  whichever is faster, which may change from run to run. *runs*: the step draws random numbers, and clients that step
  together, or get images with their channels last, draw others.
- **layers** and the columns after it: the same with low-rank layers,
  `LowRank(MatrixProduct(), rank_ratio={RANK_RATIO}, role="weight")`, and how many were converted. The reference is
  plain `Trainer.fit`s with `LowRank`. Frozen tensors must stay as they are, bit for bit.
- **refused** and **warned**: by an error or a warning, which is at the end of this page.

A difference up to {TOLERANCE_TEXT} counts as equal: Adam magnifies the rounding of
gradients that are zero. A module that differs, or ends in a traceback, is a fault and is printed **bold**.

```bash
{COMMAND}
```

{", ".join(f"{name} {version}" for name, version in versions().items())}.
"""


def _faults(rows: Sequence[Row]) -> str:
    faulty = sum(bool(row.faults) for row in rows)
    if faulty:
        return f"{faulty} modules have faults."
    return 'None differs without a warning, and `execution="auto"` raises nothing that a sequential run does not.'


TOLERANCE_TEXT = " or ".join(
    f"{value:.0e} in {str(dtype).removeprefix('torch.')}" for dtype, value in TOLERANCE.items()
)
