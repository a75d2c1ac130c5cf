"""Files in the folder of a fit's metrics: the run's metadata, and a table of evaluated clients."""

from __future__ import annotations

import csv
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal
from weakref import WeakSet

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger

from lightning_lowrank.arguments import escape_formula, printable
from lightning_lowrank.federated.data.indices import ClientIndices
from lightning_lowrank.federated.safe_files import local_path
from lightning_lowrank.layers.layer import low_rank_layers
from lightning_lowrank.run_metadata import read_metadata, replaces, software, write_metadata

CLIENT_TABLES = {"validate": "clients.csv", "test": "clients_test.csv"}
"""Names of the tables of clients of the last validation and the last test."""

# Loggers whose folders have metadata written by this process; a folder may also hold those of an earlier run.
_WRITTEN: WeakSet[CSVLogger] = WeakSet()


def metrics_folders(trainer: pl.Trainer) -> dict[CSVLogger, Path]:
    """The folder of each `CSVLogger` on this machine; none in processes that do not write."""
    loggers = [each for each in trainer.loggers if isinstance(each, CSVLogger)] if trainer.is_global_zero else []
    return {logger: folder for logger in loggers if (folder := local_path(logger.log_dir)) is not None}


def go_on_with_metadata(logger: CSVLogger) -> None:
    """Have the next fit with a logger count from the first round of the metadata in its folder."""
    _WRITTEN.add(logger)


class RunMetadata:
    """Writes the metadata of a fit into the folder of each `CSVLogger`, unless that is a URL.

    A fit that continues with the same logger, whose metrics then hold the rounds before, counts from their first one.

    Args:
        trainer: The trainer, about to make its first round, or the first one since it was resumed.
        indices: The clients' samples, if they are known.
    """

    def __init__(self, trainer: pl.Trainer, indices: ClientIndices | None) -> None:
        folders = metrics_folders(trainer)
        self._folders = list(folders.values())
        self._earlier = {
            folder: earlier
            for logger, folder in folders.items()
            if logger in _WRITTEN
            and (earlier := read_metadata(folder)).get("first_round", [math.inf])[0] <= trainer.current_epoch
        }
        for folder in self._folders:
            if folder not in self._earlier:
                # Tables of an earlier run in this folder, whose metrics the logger deletes.
                for name in CLIENT_TABLES.values():
                    (folder / name).unlink(missing_ok=True)
        _WRITTEN.update(folders)
        self._began = time.perf_counter()
        parameters = list(trainer.lightning_module.parameters())
        self._metadata: dict[str, float | list[float] | dict[str, str]] = {
            "first_round": trainer.current_epoch + 1,
            "parameters": sum(each.numel() for each in parameters),
            "trained": sum(each.numel() for each in parameters if each.requires_grad),
        }
        if self._folders:
            self._metadata["software"] = software()
        ranks = [layer.rank for _, layer in low_rank_layers(trainer.lightning_module)]
        if ranks:
            self._metadata["ranks"] = [min(ranks), max(ranks)]
        if indices is not None:
            sizes = indices.sizes.tolist()
            self._metadata["samples"] = [min(sizes), statistics.median(sizes), max(sizes)]
        self._write()

    def _write(self, seconds: float | None = None) -> None:
        for folder in self._folders:
            values, passed = dict(self._metadata), seconds
            if folder in self._earlier:
                earlier = self._earlier[folder]
                values["first_round"] = earlier["first_round"][0]
                # The duration of a fit that did not end is unknown.
                passed = seconds + earlier["seconds"][0] if seconds is not None and "seconds" in earlier else None
            if passed is not None:
                values["seconds"] = round(passed, 3)
            write_metadata(folder, values)

    def end(self) -> None:
        """Write the elapsed seconds at the end of the fit."""
        self._write(time.perf_counter() - self._began)


def write_client_table(
    trainer: pl.Trainer,
    stage: Literal["validate", "test"],
    samples: Mapping[int, int],
    columns: Mapping[str, Mapping[int, float]],
    names: Sequence[str | int] | None,
) -> None:
    """Write a table of the evaluated clients, one row each, into the folder of each `CSVLogger`, unless that is a URL.

    Args:
        trainer: The trainer.
        stage: The evaluation, ``validate`` or ``test``.
        samples: Number of test samples of each client.
        columns: Each client's figures, by name.
        names: The clients' names.
    """
    folders = metrics_folders(trainer)
    if not folders:
        return
    rows = [
        [
            client if names is None else escape_formula(printable(str(names[client]).replace("\n", " "))),
            count,
            *(values.get(client, "") for values in columns.values()),
        ]
        for client, count in samples.items()
    ]
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
        name = CLIENT_TABLES[stage]
        with (
            replaces(folder / f"{name}.part", folder / name) as part,
            open(part, "w", newline="", encoding="utf-8") as file,
        ):
            csv.writer(file).writerows([["client", "samples", *columns], *rows])
