"""`RoundProgress` shows one bar for all rounds of a fit."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from typing import Any, ClassVar, Literal, Protocol, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich import get_console
from rich.progress import BarColumn, Progress, TextColumn

from lightning_lowrank.arguments import join_names
from lightning_lowrank.configuration import check_choice
from lightning_lowrank.internals.lightning import NewFigures, ValidationFigures, check_namespace
from lightning_lowrank.metric_direction import direction, judged_by, monitors_of
from lightning_lowrank.units import bytes_text

_Form = Literal["auto", "bar", "lines", "none"]
_SECONDS = 0.25
"""Least time between two updates of the bar within a round."""


class RoundProgress(Callback):
    """Show one bar for the whole fit: the round, its clients, bytes so far, the best figure and the time left.

    In a terminal and in notebooks it is a bar of the library that Lightning's own bar is of, Rich or tqdm. Elsewhere
    each round is one line of text without control characters.

    ``lightning-lowrank fit`` adds it to a federated run; with ``--quiet`` or ``trainer.enable_progress_bar=false`` it
    shows nothing. Bytes are those of all rounds, up and down. Time left is estimated from the mean time of the rounds
    of this fit. A resumed run continues at its round and with its best figure. If several processes share a run, the
    first one shows the bar.

    Put it after `FederatedLoop` in the trainer's callbacks.

    Args:
        steps: Show Lightning's bars too: the steps of the round, and validation. Rich shows them above this one.
            Between the two bars tqdm leaves a line for validation. In text they are never shown.
        monitor: Name of the logged metric whose best value is shown. By default the figure that a callback such as
            ``ModelCheckpoint`` or a scheduler monitors, else the first of ``val_acc``, ``val_accuracy``, ``test_acc``
            and ``val_loss`` that is logged (or with ``valid`` or ``validation``), else another metric of validation.
            Its name, or the callback or scheduler that monitors it, says whether higher is better. If neither does, the
            last value is shown.
        form: ``"bar"``, ``"lines"``, ``"none"`` (this callback shows nothing and Lightning's bar stays), or ``"auto"``:
            a bar if one can be drawn, else lines. A progress bar that is neither Rich's nor tqdm's stays; ``"auto"``
            then prints lines.

    Raises:
        MisconfigurationException: If ``form`` is not one of these. When a fit begins, if there is no `FederatedLoop`
            before it in the trainer's callbacks.

    Example:
        >>> from lightning_lowrank import FedAvg, FederatedLoop, RoundProgress
        >>> callbacks = [FederatedLoop(FedAvg(), clients=10), RoundProgress(monitor="val_loss")]
    """

    once_per_turn: ClassVar[bool] = True
    """With `FederatedLoop` its batch hooks are called once per turn of Lightning's loop, between clients."""

    def __init__(self, steps: bool = False, monitor: str | None = None, form: _Form = "auto") -> None:
        check_choice("form", form, _Form)
        self.steps = steps
        self.monitor = monitor
        self.form = form
        self._display: _Display | None = None
        self._disabled: RichProgressBar | TQDMProgressBar | None = None
        self._best: dict[str, Any] = {}
        self._figures = NewFigures()
        self._validated = ValidationFigures()
        self._observed = False
        self._warned = False

    # A fit

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the loop, and disable Lightning's bar if this one replaces it."""
        check_namespace(trainer, pl_module)
        if stage != "fit":
            return
        self._loop: Any = self._loop_of(trainer)
        if trainer.current_epoch == 0:
            self._best = {}
        bar = trainer.progress_bar_callback
        form = self._form_of(bar) if trainer.is_global_zero else "none"
        self._shown = form
        shows_steps = self.steps and form == "bar"
        takes_its_place = form != "none" and not shows_steps
        if takes_its_place and isinstance(bar, (RichProgressBar, TQDMProgressBar)) and bar.is_enabled:
            self._disabled = bar
            bar.disable()

    def _loop_of(self, trainer: pl.Trainer) -> Any:
        names = [callback.state_key for callback in trainer.callbacks]  # type: ignore[attr-defined]
        if "FederatedLoop" not in names:
            raise MisconfigurationException(
                "RoundProgress shows the rounds of a federated fit, and the trainer's callbacks have no FederatedLoop:"
                " add one before it, or leave RoundProgress out."
            )
        place = names.index("FederatedLoop")
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if place > callbacks.index(self):
            raise MisconfigurationException(
                "RoundProgress comes before FederatedLoop in `callbacks`, and would show a round before it is"
                " aggregated: put it after FederatedLoop."
            )
        return callbacks[place]

    def _form_of(self, bar: Callback | None) -> str:
        if self.form != "auto":
            return self.form
        console = get_console()
        if console.is_jupyter:
            drawn = importlib.util.find_spec("ipywidgets") is not None
        else:
            # With variables such as FORCE_COLOR, Rich treats a log as a terminal.
            drawn = console.is_interactive and console.file.isatty()
        known = bar is None or isinstance(bar, (RichProgressBar, TQDMProgressBar))
        return "bar" if drawn and known else "lines"

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._rounds = None if trainer.max_epochs in (None, -1) else trainer.max_epochs
        self._began = time.monotonic()
        self._from: float | None = None
        self._next = math.inf
        if self._shown == "lines":
            self._display = _Lines()
        elif self._shown == "bar":
            bar = trainer.progress_bar_callback
            kind = _TqdmBar if isinstance(bar, TQDMProgressBar) else _RichBar
            self._display = kind(self._rounds, trainer.current_epoch, bar if self.steps else None)
            self._next = 0.0
            if not self.steps:
                self._show(trainer, trainer.current_epoch)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the bar within a round, at intervals."""
        if self._from is not None and time.monotonic() < self._next:
            return
        steps, batches = trainer.num_training_batches, trainer.fit_loop.epoch_loop.batch_progress
        share = cast("Any", batches.current).processed / steps
        if self._from is None:
            # A run resumed inside a round starts at that turn.
            self._from = trainer.current_epoch + share - 1 / steps
        if self._display is not None and time.monotonic() >= self._next:
            self._show(trainer, trainer.current_epoch + min(share, 1.0))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the figures that were logged before the validation."""
        self._validated.begin(trainer.callback_metrics)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the figures that the validation logged; inside a round they are of the last round's model."""
        self._validated.end(trainer.callback_metrics)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the round's figures."""
        if self._from is None:
            self._from = trainer.current_epoch
        self._observe(trainer)
        if self._display is not None:
            self._show(trainer, trainer.current_epoch + 1, ended=True)
        if trainer.current_epoch + 1 == self._rounds:
            # Closed now, because Lightning prints a line next.
            self._end_display()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the bar, and keep its last state on the screen."""
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Close the bar, and keep its last state on the screen."""
        self._close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore Lightning's bar."""
        self._close()

    def _end_display(self) -> None:
        display, self._display = self._display, None
        if display is not None:
            display.close()

    def _close(self) -> None:
        self._end_display()
        disabled, self._disabled = self._disabled, None
        if disabled is not None:
            disabled.enable()

    # Texts

    def _observe(self, trainer: pl.Trainer) -> None:
        """Record the round's value of the monitored metric."""
        logged, monitors = trainer.callback_metrics, monitors_of(trainer)
        name = judged_by(logged, self.monitor, monitors)
        self._observed = name in self._figures.find(logged)
        if name is None:
            if self.monitor and not self._warned:
                self._warned = True
                rank_zero_warn(
                    f"RoundProgress(monitor={self.monitor!r}) shows no figure: the rounds so far have logged"
                    f" {join_names(sorted(logged))}."
                )
            return
        if not self._observed:
            return
        of_validation = self._loop.validated_round is not None and self._validated.has(name, logged[name])
        number = self._loop.validated_round if of_validation else trainer.current_epoch + 1
        self._observed = number == trainer.current_epoch + 1
        if not number:
            return
        value, higher = float(logged[name]), direction(name, monitors=monitors)[0]
        if self._best.get("name") != name:
            self._best = {"name": name}
        self._best["last"] = value
        if higher is not None and not math.isnan(value):
            best = self._best.get("value")
            if best is None or (value > best if higher else value < best):
                self._best.update(value=value, round=number)

    def _show(self, trainer: pl.Trainer, done: float, ended: bool = False) -> None:
        assert self._display is not None
        if self._next < math.inf:
            self._next = time.monotonic() + _SECONDS
        number = trainer.current_epoch + 1
        title = f"Round {number}" if self._rounds is None else f"Round {number}/{self._rounds}"
        # A longer text does not fit next to the bar.
        figure = self._figure(in_full=self._shown == "lines")
        parts = [*self._clients(trainer, ended), self._bytes(), *figure, *self._time(done)]
        self._display.show(done, title, ", ".join(parts), ended)

    def _clients(self, trainer: pl.Trainer, ended: bool) -> list[str]:
        logged = trainer.callback_metrics
        if ended and "federated/clients" in logged:
            failed = int(logged["federated/failed"])
            return [_count(int(logged["federated/clients"]), "client"), *([f"{failed} failed"] if failed else [])]
        plan = self._loop.plan
        return [] if plan is None else [_count(len(plan.clients) + len(plan.failed), "client")]

    def _bytes(self) -> str:
        return bytes_text(self._loop.ledger.figures()["comm/total_bytes"], ".1f")

    def _figure(self, in_full: bool) -> list[str]:
        if "value" not in self._best:
            if in_full and not self._observed:
                return []
            return [f"{self._best['name']} {self._best['last']:.4f}"] if self._best else []
        name, best, last = (self._best[key] for key in ("name", "value", "last"))
        if in_full and not self._observed:
            return [f"best {name} {best:.4f} in round {self._best['round']}"]
        if in_full:
            return [f"{name} {last:.4f} (best {best:.4f} in round {self._best['round']})"]
        return [f"best {name} {best:.4f}"]

    def _time(self, done: float) -> list[str]:
        """Time left; the time taken if the fit has no known end or has ended."""
        passed = time.monotonic() - self._began
        if self._rounds is None:
            return [f"{_clock(passed)} so far"]
        if done >= self._rounds:
            return [f"{_clock(passed)} in all"]
        if self._from is None or done <= self._from:
            return []
        return [f"{_clock(passed / (done - self._from) * (self._rounds - done))} left"]

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The best figure so far, for a resumed run."""
        return dict(self._best)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore `state_dict`'s result."""
        self._best = dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles, without the bar on the screen."""
        return {**vars(self), "_display": None, "_disabled": None, "_loop": None}


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _clock(seconds: float) -> str:
    return Tqdm.format_interval(round(seconds))


class _Display(Protocol):
    def show(self, done: float, title: str, text: str, ended: bool) -> None: ...

    def close(self) -> None: ...


class _Lines:
    """A line for each round that has ended."""

    def show(self, done: float, title: str, text: str, ended: bool) -> None:
        if ended:
            print(f"{title}: {text}", flush=True)

    def close(self) -> None:
        pass


class _RichBar:
    """A bar of Rich, below Lightning's bar if ``inside`` is given.

    Rich draws several displays together if the first one stays until the others have ended. Lightning's bar may be
    started again between rounds, so a bar below it is shown only within rounds, and its last state at the end.
    """

    def __init__(self, rounds: int | None, done: int, inside: Callback | None) -> None:
        self._below = inside is not None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}"),
            console=get_console(),
            auto_refresh=False,
            transient=self._below,
            expand=True,
        )
        self._task = self._progress.add_task("", total=rounds, completed=done, text="")

    def show(self, done: float, title: str, text: str, ended: bool) -> None:
        if self._below and ended:
            self._progress.stop()
        else:
            self._progress.start()
        self._progress.update(self._task, completed=done, description=title, text=text, refresh=True)

    def close(self) -> None:
        self._progress.stop()
        if self._below:
            self._progress.console.print(self._progress)


class _TqdmBar:
    """A bar of tqdm, below Lightning's bars, or above them if ``process_position`` leaves room."""

    def __init__(self, rounds: int | None, done: int, inside: Callback | None) -> None:
        below = isinstance(inside, TQDMProgressBar) and inside.process_position == 0
        self._bar = Tqdm(
            total=rounds,
            initial=done,
            position=2 if below else 0,
            leave=True,
            dynamic_ncols=True,
            file=sys.stdout,
            bar_format="{desc} |{bar}| {unit}",
        )

    def show(self, done: float, title: str, text: str, ended: bool) -> None:
        self._bar.n, self._bar.unit = done, text
        self._bar.set_description_str(title)

    def close(self) -> None:
        self._bar.close()
