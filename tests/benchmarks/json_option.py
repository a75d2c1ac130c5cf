"""The option `--json FILE` of every benchmark: the figures of the printed table, for a program to read."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")


def write_json(file: Path | None, figures: Any) -> None:
    """Write the figures, unless no file was given."""
    if file is not None:
        file.write_text(json.dumps(figures, indent=2) + "\n")
