"""What each of Lightning's settings and callbacks means inside rounds."""

import csv
import re
import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LambdaCallback,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank import FedAvg, FederatedLoop, FedMUD, FromIndices, LowRank, MatrixProduct
from lightning_lowrank.seeding import generator
from tests.helpers import Data, Module, assert_same, blobs, fit, network, plain_fedavg, trainer, weights

UNEVEN = [list(range(5)), list(range(5, 47)), list(range(47, 69)), list(range(69, 103))]
SIZES = [len(indices) for indices in UNEVEN]


def loop(**arguments: Any) -> FederatedLoop:
    return FederatedLoop(FedAvg(), **{"partition": FromIndices(UNEVEN), "summary": False, **arguments})


def first_batches(counts: dict[int, int], round_number: int = 0, shuffle: bool = True) -> dict[int, list[Any]]:
    found = {}
    for client, count in counts.items():
        indices = torch.tensor(UNEVEN[client])
        order = torch.randperm(len(indices), generator=generator(0, "order", round_number, client))
        found[client] = [blobs()[chunk] for chunk in (indices[order] if shuffle else indices).split(8)[:count]]
    return found


def reference(*rounds: dict[int, list[Any]]) -> dict[str, torch.Tensor]:
    return plain_fedavg(network(), list(rounds), lambda p: torch.optim.SGD(p, lr=0.1), SIZES)


class Seen(pl.Callback):
    """Keeps the weights at the points where other callbacks read them."""

    def __init__(self):
        self.validated, self.ended = [], []

    def on_validation_epoch_start(self, trainer, pl_module):
        self.validated.append(weights(pl_module.net))

    def on_train_epoch_end(self, trainer, pl_module):
        self.ended.append(weights(pl_module.net))


@pytest.mark.parametrize(
    ("limit", "counts"),
    [(2, {0: 1, 1: 2, 2: 2, 3: 2}), (0.5, {0: 1, 1: 3, 2: 1, 3: 2}), (1.0, {0: 1, 1: 6, 2: 3, 3: 5})],
)
def test_limit_train_batches_counts_per_client(tmp_path, limit, counts):
    module = Module()
    fit(trainer(tmp_path, loop(), max_epochs=1, limit_train_batches=limit), module, Data())
    assert_same(weights(module.net), reference(first_batches(counts)))


def test_overfit_batches_takes_each_clients_first_in_order(tmp_path):
    module = Module()
    fit(trainer(tmp_path, loop(), max_epochs=1, overfit_batches=1), module, Data())
    assert_same(weights(module.net), reference(first_batches({0: 1, 1: 1, 2: 1, 3: 1}, shuffle=False)))


@pytest.mark.parametrize(("runs", "counts"), [(True, {0: 1}), (3, {0: 1, 1: 1, 2: 1}), (6, {0: 1, 1: 2, 2: 2, 3: 1})])
def test_fast_dev_run(tmp_path, runs, counts):
    module, seen = Module(), Seen()
    fit(trainer(tmp_path, loop(), seen, fast_dev_run=runs), module, Data())
    expected = reference(first_batches(counts))
    assert_same(weights(module.net), expected)
    assert_same(seen.validated[-1], expected)


def test_max_steps_cuts_a_round_that_is_still_aggregated(tmp_path):
    module, seen = Module(), Seen()
    run = trainer(tmp_path, loop(), seen, max_epochs=-1, max_steps=9)
    fit(run, module, Data())
    expected = reference(first_batches({0: 1, 1: 6, 2: 2}))
    assert_same(weights(module.net), expected)
    assert_same(seen.ended[-1], expected)
    # The fourth client has not begun.
    figures = {name: run.callback_metrics[f"federated/{name}"] for name in ("clients", "failed", "samples")}
    assert figures == {"clients": 3, "failed": 0, "samples": sum(SIZES[:3])}


def test_stopping_inside_a_round_validates_the_aggregate(tmp_path):
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = batch_idx == 2

    module, seen = Module(), Seen()
    fit(trainer(tmp_path, loop(), Stop(), seen, num_sanity_val_steps=0), module, Data())
    # A client's batches are numbered from 0.
    expected = reference(first_batches({0: 1, 1: 3}))
    assert_same(weights(module.net), expected)
    assert_same(seen.validated[-1], expected)


def test_a_module_that_skips_the_rest_of_the_epoch(tmp_path):
    class Skipping(Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 1 else None

    module = Skipping()
    fit(trainer(tmp_path, loop(), max_epochs=1), module, Data())
    assert_same(weights(module.net), reference(first_batches({0: 1, 1: 1})))


def test_early_stopping_and_best_checkpoint(tmp_path):
    best = ModelCheckpoint(tmp_path, monitor="val_acc", mode="max")
    by_bytes = EarlyStopping("comm/total_bytes", mode="min", patience=2)
    run = trainer(tmp_path, loop(), best, by_bytes, max_epochs=20)
    fit(run, Module(), Data())
    assert run.current_epoch == 3
    assert best.best_model_score == max(run.callback_metrics["val_acc"], best.best_model_score)


def test_the_clock_of_time_based_validation_goes_on_from_round_to_round(tmp_path, monkeypatch):
    now = 0.0

    class Slow(Module):
        def training_step(self, *arguments):
            nonlocal now
            now += 1.0
            return super().training_step(*arguments)

    monkeypatch.setattr(time, "monotonic", lambda: now)
    seen = Seen()
    settings = {"val_check_interval": timedelta(seconds=5), "num_sanity_val_steps": 0, "max_epochs": 6}
    rounds = [[2], [0]] * 3
    fit(trainer(tmp_path, loop(participants=rounds), seen, **settings), Slow(), Data())
    steps = sum(-(-SIZES[client] // 8) for (client,) in rounds)
    assert len(seen.validated) == steps // 5 == 2


@pytest.mark.slow
def test_validation_inside_a_round_sees_the_last_global_model(tmp_path):
    module, seen, plain = Module(), Seen(), Module()
    before = weights(module.net)
    run = trainer(tmp_path, loop(), seen, max_epochs=2, val_check_interval=0.25, num_sanity_val_steps=0)
    fit(run, module, Data())
    fit(trainer(tmp_path, loop(), max_epochs=2), plain, Data())
    assert_same(weights(module), weights(plain))
    # After each of four clients, the last of which ends the round.
    assert len(seen.validated) == 2 * 4
    for inside in seen.validated[:3]:
        assert_same(inside, before)
    for inside in seen.validated[4:7]:
        assert_same(inside, seen.ended[0])


def test_figures_of_a_validation_are_of_the_round_whose_model_it_judged(tmp_path, capsys):
    class Rounds(pl.Callback):
        def __init__(self):
            self.judged = []

        def on_validation_end(self, trainer, pl_module):
            self.judged.append(trainer.callbacks[0].validated_round)

    logger, seen = CSVLogger(tmp_path, "run", version=0), Rounds()
    settings = {"val_check_interval": 2, "max_epochs": 2, "num_sanity_val_steps": 0, "logger": logger}
    run = trainer(tmp_path, loop(participants=[[0, 1, 2], [3, 1, 2]], summary=True), seen, **settings)
    fit(run, Module(), Data())
    # After two of three clients.
    assert seen.judged == [0, 1]
    with open(tmp_path / "run/version_0/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) + 1 for row in rows if row["val_loss"]] == seen.judged
    assert "epoch" not in run.logged_metrics
    assert re.search(r"after 2 rounds: val_loss .* \(of round 1\), \d", " ".join(capsys.readouterr().out.split()))


def test_the_last_line_names_the_round_of_its_figures_and_a_round_that_was_cut(tmp_path, capsys):
    run = trainer(tmp_path, loop(participants=[[0, 1], [1, 2, 3]], summary=True), max_epochs=2, max_steps=8)
    fit(run, Module(), Data())
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"after 2 rounds, the last one cut after 1 of 3 clients: val_loss .* \(of round 1\), \d", said)


def test_a_round_shorter_than_the_interval_is_validated_at_its_end(tmp_path):
    class Places(Seen):
        def __init__(self):
            super().__init__()
            self.places = []

        def on_validation_start(self, trainer, pl_module):
            super().on_validation_start(trainer, pl_module)
            self.places.append((trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_progress.current.ready))

    rounds = [[0, 1, 2, 3], [2], [1, 3]]
    seen, interval = Places(), 3
    settings = {"val_check_interval": interval, "num_sanity_val_steps": 0, "max_epochs": len(rounds)}
    run = trainer(tmp_path, loop(participants=rounds), seen, **settings)
    fit(run, Module(), Data())
    # It counts clients.
    assert seen.places == [(number, min(interval, len(clients))) for number, clients in enumerate(rounds)]
    assert run.val_check_interval == interval


def test_figures_at_a_validations_end_are_the_rounds(tmp_path):
    seen = []
    note = LambdaCallback(
        on_validation_end=lambda fitted, _: seen.append(float(fitted.callback_metrics.get("comm/total_bytes", 0)))
    )
    run = trainer(tmp_path, note, loop(), max_epochs=4, check_val_every_n_epoch=2, num_sanity_val_steps=0)
    fit(run, Module(), Data())
    total = float(run.callback_metrics["comm/total_bytes"])
    assert seen == [total / 2, total]


def test_csv_logger_gets_every_rounds_figures(tmp_path):
    counted = loop()
    fit(trainer(tmp_path, counted, logger=CSVLogger(tmp_path, name="", version=0)), Module(), Data())
    with open(tmp_path / "version_0" / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["comm/total_bytes"]]
    size = counted.ledger.dense_bytes
    assert [float(row["comm/total_bytes"]) for row in rows] == [8 * size, 16 * size, 24 * size]
    assert [float(row["federated/clients"]) for row in rows] == [4, 4, 4]


def test_large_byte_counts_are_logged_exactly(tmp_path):
    counted = loop()
    counted.ledger.total_up = 0

    class Grow(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            counted.ledger.total_up += 2**40 + 1

    run = trainer(tmp_path, counted, Grow(), max_epochs=1)
    fit(run, Module(), Data())
    assert int(run.callback_metrics["comm/total_up_bytes"]) == 2**40 + 1 + 4 * counted.ledger.dense_bytes


class RoundAveraging(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


@pytest.mark.parametrize("averaging", [RoundAveraging(), StochasticWeightAveraging(0.1)])
def test_factors_that_are_drawn_anew_while_they_hold_a_change_are_not_averaged(tmp_path, averaging):
    def run(interval):
        layers = LowRank(MatrixProduct(), rank=2, role="update", summary=False)
        rounds = FederatedLoop(FedMUD(interval), clients=2, summary=False)
        fit(trainer(tmp_path, layers, rounds, averaging, max_epochs=1), Module(), Data())

    run(1)
    with pytest.raises(MisconfigurationException, match=f"{type(averaging).__name__} averages factors .*FedMUD draws"):
        run(2)


@pytest.mark.parametrize(
    "reader", [RoundAveraging(), StochasticWeightAveraging(0.1), Seen(), LambdaCallback(on_train_epoch_end=print)]
)
def test_refuses_readers_of_weights_before_the_loop(tmp_path, reader):
    with pytest.raises(MisconfigurationException, match=f"{type(reader).__name__} comes before FederatedLoop"):
        fit(trainer(tmp_path, reader, loop()), Module(), Data())


def test_refuses_lowrank_after_the_loop(tmp_path):
    with pytest.raises(MisconfigurationException, match="LowRank before FederatedLoop"):
        fit(trainer(tmp_path, loop(), LowRank(MatrixProduct(), rank=1)), Module(), Data())


def test_an_exception_leaves_the_last_global_model(tmp_path):
    class Failing(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.current_epoch == 1 and batch_idx == 2:
                raise RuntimeError("out of luck")
            return super().training_step(batch, batch_idx)

    module, seen = Failing(), Seen()
    run = trainer(tmp_path, loop(on_client_error="raise"), seen, limit_train_batches=3)
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(run, module, Data())
    assert_same(weights(module.net), seen.ended[0])
    assert run.limit_train_batches == 3
    assert not module._state_dict_hooks


class EndEpochs(Module):
    def on_train_batch_start(self, batch, batch_idx):
        return -1


def test_a_fit_without_a_client_step_is_an_error(tmp_path):
    module = EndEpochs()
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=r"over after . rounds, and no client has made a step"):
        fit(trainer(tmp_path, loop()), module, Data())
    assert_same(before, weights(module))


class Stop(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        trainer.should_stop = True


@pytest.mark.parametrize(
    ("callbacks", "settings"),
    [([], {"max_epochs": 0}), ([], {"max_steps": 0}), ([], {"limit_train_batches": 0}), ([Stop()], {})],
    ids=["no epochs", "no steps", "no batches", "stopped"],
)
def test_a_fit_that_was_told_to_make_no_step_is_none(tmp_path, callbacks, settings):
    fit(trainer(tmp_path, loop(), *callbacks, **settings), Module(), Data())


def test_a_resumed_run_that_is_over_is_no_error(tmp_path):
    keep = ModelCheckpoint(tmp_path, filename="last")
    fit(trainer(tmp_path, loop(), keep, max_epochs=1), Module(), Data())
    fit(trainer(tmp_path, loop(), max_epochs=1), Module(), Data(), ckpt_path=tmp_path / "last.ckpt")
