"""One bar for all rounds: what it says, where it is drawn, and that it is gone when the fit is."""

import io
import re
import warnings

import lightning.pytorch as pl
import pytest
import rich
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank import FedAvg, FederatedLoop, FromIndices, RoundProgress
from tests.helpers import Data, Module, fit, trainer

CLIENTS = FromIndices([list(range(10)), list(range(10, 14)), list(range(14, 31))])


class Scored(Module):
    """Logs a given figure in each round."""

    def __init__(self, name, values):
        super().__init__()
        self.figure, self.values = name, values

    def validation_step(self, batch, batch_idx):
        self.log(self.figure, self.values[self.current_epoch])


def federated(**arguments):
    return FederatedLoop(FedAvg(), partition=CLIENTS, summary=False, **arguments)


def lines(capsys):
    said = capsys.readouterr()
    assert said.err == ""
    assert not re.search(r"[^\n -~]", said.out), "a control character"
    return said.out.splitlines()


def figures(said):
    """Return from each line what stands between the bytes and the time."""
    return [re.sub(r".*(bytes|kB), |, [\d:]+ (left|in all)$", "", line) for line in said]


def test_a_line_for_each_round_where_there_is_no_terminal(tmp_path, capsys):
    loop = federated()
    fit(trainer(tmp_path, loop, RoundProgress(), enable_progress_bar=True, num_sanity_val_steps=1), Module(), Data())
    said = lines(capsys)
    moved = loop.ledger.figures()["comm/total_bytes"] / 1000
    for number, line in enumerate(said, start=1):
        when = r"\d\d:\d\d " + ("in all" if number == 3 else "left")
        moved_by_now = f"{moved * number / 3:.1f} kB"
        assert re.fullmatch(
            rf"Round {number}/3: 3 clients, {moved_by_now}, val_acc 0\.\d{{4}} \(best 0\.\d{{4}} in round \d\), {when}",
            line,
        )
    assert len(said) == 3


@pytest.mark.parametrize(
    ("name", "best"),
    [("val_loss", ["2.0000 in round 1", "1.0000 in round 2", "1.0000 in round 2"]),
     ("val_f1", ["2.0000 in round 1", "2.0000 in round 1", "3.0000 in round 3"])],
)  # fmt: skip
def test_the_best_figure_by_its_name(tmp_path, capsys, name, best):
    progress = RoundProgress(monitor=name)
    fit(trainer(tmp_path, federated(), progress), Scored(name, [2.0, 1.0, 3.0]), Data())
    values = ["2.0000", "1.0000", "3.0000"]
    assert figures(lines(capsys)) == [f"{name} {value} (best {each})" for value, each in zip(values, best, strict=True)]


@pytest.mark.parametrize(("mode", "best"), [("min", 1.0), ("max", 3.0)])
def test_what_a_callback_monitors_counts(tmp_path, mode, best):
    progress = RoundProgress()
    stopping = EarlyStopping("score", mode=mode, patience=9)
    fit(trainer(tmp_path, federated(), progress, stopping), Scored("score", [2.0, 1.0, 3.0]), Data())
    assert progress.state_dict()["value"] == best


def test_a_figure_of_no_known_direction_has_no_best(tmp_path, capsys):
    run = trainer(tmp_path, federated(), RoundProgress(monitor="score"))
    fit(run, Scored("score", [2.0, float("nan"), 3.0]), Data())
    assert figures(lines(capsys)) == ["score 2.0000", "score nan", "score 3.0000"]


def test_nan_is_never_the_best(tmp_path, capsys):
    fit(trainer(tmp_path, federated(), RoundProgress()), Scored("val_loss", [float("nan"), 2.0, 3.0]), Data())
    assert figures(lines(capsys)) == [
        "val_loss nan",
        "val_loss 2.0000 (best 2.0000 in round 2)",
        "val_loss 3.0000 (best 2.0000 in round 2)",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("val_loss", ["val_loss 2.0000 (best 2.0000 in round 2)", "best val_loss 2.0000 in round 2"]),
        ("score", ["score 2.0000", ""]),
    ],
)
def test_a_round_without_validation_has_no_figure_of_its_own(tmp_path, capsys, name, said):
    loop, module = federated(), Scored(name, [0.0, 2.0, 0.0, 3.0])
    run = trainer(tmp_path, loop, RoundProgress(monitor=name), max_epochs=4, check_val_every_n_epoch=2)
    with warnings.catch_warnings():
        # The first round has logged none.
        warnings.simplefilter("ignore")
        run.fit(module, Data())
    _, second, third, fourth = lines(capsys)
    assert [*figures([second]), third.split(", ")[2] if said[1] else ""] == said
    assert third.count(", ") == (3 if said[1] else 2)
    assert f"{name} 3.0000" in fourth


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_validation_inside_a_round_is_of_the_last_rounds_model(tmp_path, capsys, checkpoints):
    class Judging(Scored):
        def validation_step(self, batch, batch_idx):
            self.log(self.figure, self.values[self.trainer.callbacks[0].validated_round])

    progress, module = RoundProgress(), Judging("val_acc", [9.0, 2.0, 1.0, 0.0])
    # After two of three clients.
    # A ModelCheckpoint reads the figures after the others.
    more = [ModelCheckpoint(tmp_path)] if checkpoints else []
    rounds = {"max_epochs": 3, "val_check_interval": 2, "num_sanity_val_steps": 0}
    run = trainer(tmp_path, federated(), progress, *more, **rounds)
    run.fit(module, Data())
    first, *others = lines(capsys)
    assert "val_acc" not in first
    assert figures(others) == ["best val_acc 2.0000 in round 1"] * 2


@pytest.mark.slow
def test_a_figure_of_training_is_of_each_round(tmp_path, capsys):
    constant = torch.tensor(1.0)

    class Constant(Module):
        def training_step(self, batch, batch_idx):
            self.log("train_acc", constant, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    loop, progress = federated(), RoundProgress(monitor="train_acc")
    fit(trainer(tmp_path, loop, progress, check_val_every_n_epoch=2), Constant(), Data())
    assert figures(lines(capsys)) == ["train_acc 1.0000 (best 1.0000 in round 1)"] * 3


def test_a_metric_that_nobody_logs_is_named_once(tmp_path, capsys):
    run = trainer(tmp_path, federated(), RoundProgress(monitor="val_ac"))
    with pytest.warns(
        UserWarning, match=r"monitor='val_ac'\) shows no figure: the rounds so far have logged .*"
    ) as said:
        run.fit(Module(), Data())
    assert sum("shows no figure" in str(each.message) for each in said) == 1
    assert [line.count(",") for line in capsys.readouterr().out.splitlines()] == [2, 2, 2]


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_round_and_its_best(tmp_path, capsys):
    values = [1.0, 2.0, 3.0, 0.5]
    kept = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    fit(trainer(tmp_path, federated(), RoundProgress(), kept, max_epochs=2), Scored("val_loss", values), Data())
    capsys.readouterr()
    inside_round_2 = tmp_path / "step=8.ckpt"
    progress = RoundProgress()
    resumed = trainer(tmp_path, federated(), progress, max_epochs=4)
    fit(resumed, Scored("val_loss", values), Data(), ckpt_path=inside_round_2)
    said = lines(capsys)
    assert [line.split(":")[0] for line in said] == ["Round 2/4", "Round 3/4", "Round 4/4"]
    assert figures(said) == [
        "val_loss 2.0000 (best 1.0000 in round 1)",
        "val_loss 3.0000 (best 1.0000 in round 1)",
        "val_loss 0.5000 (best 0.5000 in round 4)",
    ]
    # Two of its six steps were done.
    assert progress._from == pytest.approx(1 + 2 / 6)


@pytest.mark.slow
@pytest.mark.parametrize("before", [[], [RoundProgress(form="none")]], ids=["none", "mute"])
@pytest.mark.parametrize("after", [[], [RoundProgress(monitor="val_loss", form="lines")]], ids=["none", "shown"])
def test_a_run_is_resumed_whatever_is_shown(tmp_path, before, after):
    kept = ModelCheckpoint(tmp_path, "{epoch}")
    fit(trainer(tmp_path, federated(), *before, kept, max_epochs=1), Module(), Data())
    resumed = trainer(tmp_path, federated(), *after, max_epochs=2)
    fit(resumed, Module(), Data(), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert resumed.current_epoch == 2


@pytest.mark.slow
def test_another_fit_forgets_the_best(tmp_path):
    progress = RoundProgress()
    fit(trainer(tmp_path, federated(), progress), Scored("val_loss", [1.0, 2.0, 3.0]), Data())
    fit(trainer(tmp_path, federated(), progress), Scored("val_loss", [6.0, 5.0, 4.0]), Data())
    assert progress.state_dict()["value"] == 4.0


def test_rounds_without_an_end(tmp_path, capsys):
    fit(trainer(tmp_path, federated(), RoundProgress(), max_epochs=-1, max_steps=18), Module(), Data())
    said = lines(capsys)
    assert [line.split(":")[0] for line in said] == ["Round 1", "Round 2", "Round 3"]
    assert all(line.endswith(" so far") for line in said)


@pytest.mark.slow
def test_clients_that_failed_and_clients_that_step_together(tmp_path, capsys):
    loop = federated(execution="vectorized", client_dropout=0.5)
    fit(trainer(tmp_path, loop, RoundProgress(), max_epochs=4), Module(), Data())
    found = [re.search(r": (\d) clients?, (?:(\d) failed, )?", line).groups() for line in lines(capsys)]
    assert {int(clients) + int(failed or 0) for clients, failed in found} == {3}
    assert any(failed for _, failed in found)


# Bars


@pytest.fixture
def terminal():
    """A terminal that Rich writes to, and its standard console afterwards."""
    screen = io.StringIO()
    screen.isatty = lambda: True
    rich.reconfigure(file=screen, force_terminal=True, width=100)
    yield screen
    rich.reconfigure()


def drawn(screen, capsys):
    """Return the lines that either library has drawn."""
    text = re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue() + capsys.readouterr().out)
    return re.split(r"\x1b\[[\d;?]*[A-Za-z]|[\r\n]", text)


class Fails(Callback):
    def on_validation_end(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            raise RuntimeError("for a reason")


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("kind", [RichProgressBar, TQDMProgressBar])
@pytest.mark.parametrize("fails", [False, True])
def test_bars(tmp_path, capsys, terminal, kind, steps, fails):
    class Watches(Callback):
        def on_train_batch_end(self, *arguments):
            self.display = progress._display
            self.enabled = bar.is_enabled

    console = {"file": terminal, "force_terminal": True, "width": 100}
    bar = RichProgressBar(console_kwargs=console) if kind is RichProgressBar else TQDMProgressBar()
    progress, watches = RoundProgress(steps, form="bar"), Watches()
    parts = [federated(), progress, watches, *([Fails()] if fails else []), bar]
    run = trainer(tmp_path, *parts, enable_progress_bar=True)
    if fails:
        with pytest.raises(RuntimeError, match="for a reason"):
            fit(run, Module(), Data())
    else:
        fit(run, Module(), Data())
    said = drawn(terminal, capsys)
    # Rounds of milliseconds are drawn when they are over, and the one that fails never is.
    last = "Round 1/3" if fails else "Round 3/3"
    assert any(last in line and "3 clients, " in line and "best val_acc 0." in line for line in said)
    assert any("Epoch 1" in line for line in said) is steps
    assert watches.enabled is steps
    assert bar.is_enabled
    assert progress._display is None
    shown = watches.display
    assert shown._bar.disable if kind is TQDMProgressBar else not shown._progress.live.is_started


def test_a_bar_where_there_is_a_terminal_and_lines_in_a_log(tmp_path, terminal):
    progress = RoundProgress()
    run = trainer(tmp_path, federated(), progress, enable_progress_bar=True)
    assert progress._form_of(run.progress_bar_callback) == "bar"
    # Rich takes a log for a terminal then.
    terminal.isatty = lambda: False
    assert progress._form_of(run.progress_bar_callback) == "lines"


def test_another_kind_of_bar_stays(tmp_path, capsys, terminal):
    class Own(pl.callbacks.ProgressBar):
        pass

    run = trainer(tmp_path, federated(), RoundProgress(), Own(), enable_progress_bar=True)
    fit(run, Module(), Data())
    assert [line.split(":")[0] for line in lines(capsys)] == ["Round 1/3", "Round 2/3", "Round 3/3"]


def test_one_process_shows_it(tmp_path, capsys, monkeypatch):
    run = trainer(tmp_path, federated(), RoundProgress())
    monkeypatch.setattr(type(run), "is_global_zero", False)
    fit(run, Module(), Data())
    assert lines(capsys) == []


def test_evaluation_shows_nothing(tmp_path, capsys):
    run = trainer(tmp_path, RoundProgress())
    run.validate(Module(), Data(), verbose=False)
    assert capsys.readouterr().out == ""


def test_refused():
    with pytest.raises(MisconfigurationException, match=r"'bar'.*'lines'.*'none'"):
        RoundProgress(form="dots")


def test_refused_without_rounds_or_before_them(tmp_path):
    with pytest.raises(MisconfigurationException, match="FederatedLoop"):
        trainer(tmp_path, RoundProgress()).fit(Module(), Data())
    with pytest.raises(MisconfigurationException, match=r"RoundProgress.*FederatedLoop.*`callbacks`"):
        trainer(tmp_path, RoundProgress(), federated()).fit(Module(), Data())
