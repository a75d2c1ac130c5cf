"""Which modules run: trains each module of the zoo in every way, and writes the table of `docs/modules.md`.

    python -m tests.zoo.run [--only WORD ...] [--out docs/modules.md] [--json FILE]

Each module trains for one round of federated averaging, sequentially, vectorized and with execution="auto", as it is
and with low-rank layers. The weights are compared with the mean of independent plain Trainer.fits, and with each other.
It takes a few minutes on one core, and needs the extra: pip install -e ".[zoo]".

The exit status is 1 if a module differs or ends in a traceback.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path

import torch

from tests.zoo.compare import Row, examine
from tests.zoo.registry import MissingExtra, load_all
from tests.zoo.table import markdown, versions


def line(row: Row, seconds: float) -> str:
    """Return what is printed of a module while the others are still to come."""
    parts = []
    for way, outcome in row.outcomes.items():
        size = "" if outcome.difference is None else f" {outcome.difference:.0e}"
        said = f": {outcome.said}" if outcome.is_fault else ""
        parts.append(f"    {way:22} {outcome.verdict}{size}{said[:300]}")
    head = f"{row.name} ({row.parameters:,} parameters, {row.converted} layers converted, {seconds:.1f} s)"
    return "\n".join([head, *parts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="modules whose name or kind has one of these words")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table to this file, as Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all outcomes to this file")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.only and options.out:
        parser.error("--out writes the table of all modules: leave out --only")
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    try:
        exhibits = load_all()
    except MissingExtra as error:
        sys.exit(str(error))
    words = [word.lower() for word in options.only or [""]]
    chosen = [each for each in exhibits if any(word in f"{each.kind} {each.name}".lower() for word in words)]
    if not chosen:
        parser.error(f"--only {' '.join(options.only)} names no module")
    rows = []
    for exhibit in chosen:
        begin = time.perf_counter()
        rows.append(examine(exhibit))
        print(line(rows[-1], time.perf_counter() - begin), flush=True)
    if options.out:
        options.out.write_text(markdown(rows))
    if options.json:
        options.json.write_text(
            json.dumps({"versions": versions(), "rows": [row.to_dict() for row in rows]}, indent=2) + "\n"
        )
    faulty = [row.name for row in rows if row.faults]
    print(f"{len(rows)} modules, {len(faulty)} with faults{': ' if faulty else ''}{', '.join(faulty)}")
    sys.exit(1 if faulty else 0)


if __name__ == "__main__":
    main()
