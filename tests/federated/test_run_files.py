"""The metadata file in the folder of a fit's metrics."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_lowrank import FedAvg, FederatedLoop
from lightning_lowrank.federated import run_files, safe_files
from lightning_lowrank.run_metadata import read_metadata, write_metadata
from tests.helpers import Data, Module, fit, trainer


class Stops(pl.Callback):
    """Ends a fit with an error."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            raise RuntimeError("it stops")


@pytest.fixture
def begin(tmp_path, monkeypatch) -> Callable[..., pl.Trainer]:
    """Return what makes a trainer of two rounds. Each reading of the clock is a second later."""
    seconds = count()
    monkeypatch.setattr(run_files, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))

    def make(logger: CSVLogger, *callbacks: pl.Callback) -> pl.Trainer:
        loop = FederatedLoop(FedAvg(), clients=4, summary=False)
        return trainer(tmp_path, loop, *callbacks, logger=logger, max_epochs=2)

    return make


def of_rounds(logger: CSVLogger) -> tuple[list[float], list[float] | None]:
    found = read_metadata(Path(logger.log_dir))
    return found["first_round"], found.get("seconds")


@pytest.mark.slow
def test_a_fit_that_goes_on_counts_from_its_first_round(tmp_path, begin):
    logger = CSVLogger(tmp_path / "runs")
    run = begin(logger)
    fit(run, module := Module(), data := Data())
    first = of_rounds(logger)[1]
    assert first is not None
    assert of_rounds(logger)[0] == [1]
    run.fit_loop.max_epochs = 3
    fit(run, module, data)
    assert of_rounds(logger) == ([1], [2 * first[0]])
    # From the start again, with the same logger.
    fit(begin(logger), Module(), data)
    assert of_rounds(logger) == ([1], first)


@pytest.mark.slow
def test_the_seconds_of_a_fit_that_did_not_end_are_not_known(tmp_path, begin):
    logger = CSVLogger(tmp_path / "runs")
    run = begin(logger, stops := Stops())
    with pytest.raises(RuntimeError, match="it stops"):
        fit(run, module := Module(), data := Data())
    assert of_rounds(logger) == ([1], None)
    run.callbacks.remove(stops)
    run.fit_loop.max_epochs = 3
    fit(run, module, data)
    assert of_rounds(logger) == ([1], None)


@pytest.mark.slow
def test_a_run_that_goes_on_elsewhere_begins_where_it_does(tmp_path, begin):
    logger = CSVLogger(tmp_path / "runs", version=0)
    run = begin(logger)
    fit(run, Module(), data := Data())
    run.save_checkpoint(tmp_path / "run.ckpt")
    # Of another process the folder may hold metadata as well.
    for version in (0, 1):
        later = CSVLogger(tmp_path / "runs", version=version)
        write_metadata(Path(later.log_dir), {"first_round": 1, "seconds": 9})
        run = begin(later)
        run.fit_loop.max_epochs = 3
        fit(run, Module(), data, ckpt_path=tmp_path / "run.ckpt")
        first, seconds = of_rounds(later)
        assert first == [3]
        assert seconds is not None
        assert seconds[0] > 0


@pytest.mark.parametrize("begins", ["~", "file://{}"])
def test_all_files_of_a_run_are_in_one_folder(tmp_path, monkeypatch, begins):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    save_dir = f"{begins.format(tmp_path)}/runs"
    logger = CSVLogger(save_dir, version=0)
    logger.log_metrics({"a": 1.0}, step=0)
    run = trainer(tmp_path, logger=logger)
    run.strategy.connect(Module())
    safe_files.check_folders(run)
    run_files.RunMetadata(run, None)
    run_files.write_client_table(run, "validate", {0: 3}, {}, None)
    safe_files.WholeCheckpoints().save_checkpoint({}, f"{save_dir}/last.ckpt")
    logger.save()
    assert [each.name for each in tmp_path.iterdir() if each.name != "runs"] == ["here"]
    assert not list((tmp_path / "here").iterdir())
    found = {each.name for each in (tmp_path / "runs").rglob("*") if each.is_file()}
    assert found == {"run_metadata.json", "clients.csv", "last.ckpt", "metrics.csv"}


def test_tables_of_clients_of_another_run_in_the_folder_are_deleted(tmp_path):
    for number in range(2):
        run = trainer(tmp_path, logger=CSVLogger(tmp_path, name="", version=0))
        run.strategy.connect(Module())
        run_files.RunMetadata(run, None)
        tables = [each.name for each in (tmp_path / "version_0").glob("clients*.csv")]
        assert not tables
        if not number:
            run_files.write_client_table(run, "validate", {0: 3}, {}, None)


def test_a_folder_at_a_url_gets_no_local_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = trainer(tmp_path, logger=CSVLogger("memory://runs", version=0))
    run.strategy.connect(Module())
    run_files.RunMetadata(run, None).end()
    run_files.write_client_table(run, "validate", {0: 3}, {}, None)
    assert not list(tmp_path.iterdir())
