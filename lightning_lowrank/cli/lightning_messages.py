"""Filters for Lightning's log messages and warnings in our commands."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_PACKAGES = ("lightning.pytorch", "lightning.fabric")
_LOGGERS = [logging.getLogger(f"{package}{part}") for package in _PACKAGES for part in ("", ".utilities.rank_zero")]
_TIP = "💡 Tip:"
# Warnings about Lightning's own code or our calls to it, which no user can act on.
_WARNINGS = (r"`isinstance\(treespec, LeafSpec\)` is deprecated", "LightningCLI's args parameter is intended")


@contextmanager
def without_tips() -> Iterator[None]:
    """A context without Lightning's tips and without warnings on its own code; restores log levels at the end."""
    levels = [logger.level for logger in _LOGGERS]
    for logger in _LOGGERS:
        logger.addFilter(_is_no_tip)
    try:
        with warnings.catch_warnings():
            for message in _WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        for logger, level in zip(_LOGGERS, levels, strict=True):
            logger.removeFilter(_is_no_tip)
            logger.setLevel(level)


def only_warnings() -> None:
    """Show only warnings and errors of Lightning."""
    for logger in _LOGGERS:
        logger.setLevel(logging.WARNING)


def _is_no_tip(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_TIP)
