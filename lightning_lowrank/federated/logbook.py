"""A collector for logged values: of local steps for Lightning, and of personal models for figures over clients.

`LocalTraining` opens a book for each client, `ClientEvaluation` for each model. A call of ``self.log`` costs Lightning
as much as a small model's step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from lightning_lowrank.internals.lightning import (
    HOOK,
    empty_results,
    lightnings_log,
    logging_as,
    logging_by,
    logging_into,
    rows_of,
)
from lightning_lowrank.internals.replaced import replaced

_DEFAULTS: dict[str, Any] = {
    "prog_bar": False,
    "logger": None,
    "on_step": None,
    "on_epoch": None,
    "reduce_fx": "mean",
    "enable_graph": False,
    "sync_dist": False,
    "sync_dist_group": None,
    "add_dataloader_idx": True,
    "metric_attribute": None,
    "rank_zero_only": False,
}
_SETTINGS = tuple(_DEFAULTS)
_MOST_PENDING = 4096
"""Values that are kept on an accelerator before they are reduced together."""
_NUMBERS = (float, int, bool)
# NaN is kept, as torch.maximum does: Python's max(1.0, nan) is 1.0.
_PICK: dict[str, Callable[[Any, Any], Any]] = {
    "max": lambda a, b: torch.maximum(a, b) if isinstance(a, Tensor) else a if a > b or a != a else b,
    "min": lambda a, b: torch.minimum(a, b) if isinstance(a, Tensor) else a if a < b or a != a else b,
}


class Logbook:
    """Collects the values that the module and callbacks log while a client trains or a personal model is evaluated.

    Values are reduced by their ``reduce_fx``; means are weighted by batch sizes. So ``callback_metrics``, loggers and
    progress bars see the epoch's figures as they would from a call in each step. With ``on_step=True`` they see one
    value a client. Epoch values are passed on at the round's end, when Lightning would show them as well. A
    `torchmetrics.Metric` is handed over as it is. Values of clients that are left out do not count, except those in a
    metric's state. The first call of each kind goes through Lightning's checks at once.
    Between `begin_evaluation` and `end_evaluation` the logbook collects the evaluation's values only. Between
    `begin_model` and `end_model` nothing is handed over: `end_model` returns each value, reduced bit for bit as
    Lightning reduces it in an epoch. Values logged elsewhere go to Lightning directly.

    Args:
        trainer: The trainer, with its module connected.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._original = lightnings_log(self._module)
        self._open = False
        self._batch: Any = None
        self._size: int | None = None
        self._evaluates = self._of_model = False
        self._of_client: dict[tuple[str, str], _Entry] = {}
        self._trained: dict[tuple[str, str], _Entry] = {}
        self._of_round: dict[tuple[str, str], _Entry] = {}
        self._calls: dict[str, tuple[Any, ...]] = {}
        self._checked = empty_results(trainer)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """A context in which values that the module or a callback logs go into this book."""
        log, lightnings = _Log(self), MethodType(pl.LightningModule.log, self._module)
        with ExitStack() as ends:
            ends.enter_context(logging_by(self._module, log))
            for callback in self._trainer.callbacks:
                # Lightning gives callbacks the module's own, before the fit.
                if vars(callback).get("log") == lightnings:
                    ends.enter_context(replaced(callback, log=log))
            yield

    def begin_client(self) -> None:
        """Begin to collect a client's values."""
        self._of_client.clear()
        self._open = not self._trainer.barebones

    def begin_step(self, batch: Any, size: int | None = None) -> None:
        """Set the batch whose size weights the step's values; ``None``: the size is as Lightning infers it."""
        self._batch, self._size = batch, size

    def end_client(self) -> None:
        """End the collection of a client's values, for `count_clients` or `drop_client`."""
        self._trained = dict(self._of_client)
        self._close()

    def drop_client(self) -> None:
        """Forget the values of the last client, or of the last clients that stepped together."""
        self._trained.clear()
        self._close()

    def count_clients(self, left_out: Collection[int] = ()) -> None:
        """Pass on the last client's values that are logged per client; keep those that are logged per round.

        Args:
            left_out: Places of clients whose values do not count, such as late ones, among those that stepped together.
        """
        trained, self._trained = self._trained, {}
        shown: dict[tuple[str, str], _Entry] = {}
        for place, entry in trained.items():
            if not entry.settle(left_out):
                continue
            if entry.on_step:
                shown[place] = entry
            elif place in self._of_round:
                self._of_round[place].merge(entry)
            else:
                self._of_round[place] = entry
        self._hand_over(shown)

    def end_round(self) -> None:
        """Pass on the values that are logged per round; those of a client that the fit stopped inside, too."""
        self.count_clients()
        entries = dict(self._of_round)
        self._of_round.clear()
        self._hand_over(entries)

    def begin_evaluation(self) -> None:
        """Begin to collect an evaluation's values; `begin_step` marks its steps."""
        self.begin_client()
        self._evaluates = True

    def end_evaluation(self) -> None:
        """Pass on the evaluation's values."""
        entries = dict(self._of_client)
        self._close()
        self._hand_over(entries)

    def begin_model(self) -> None:
        """Begin to collect one model's values, in their own types."""
        self.begin_client()
        self._of_model = True

    def end_model(self) -> dict[str, tuple[float, bool | None]]:
        """The model's epoch values by name; for a metric object also whether higher is better."""
        entries = dict(self._of_client)
        self._close()
        return {name: entry.of_epoch() for (_, name), entry in entries.items() if entry.on_epoch}

    def _close(self) -> None:
        self._open = self._evaluates = self._of_model = False
        self._batch = None
        self._of_client.clear()

    def _hand_over(self, entries: Mapping[tuple[str, str], _Entry]) -> None:
        for (hook, name), entry in entries.items():
            value, batch_size = entry.result()
            with logging_as(self._trainer, hook):
                self._original(name, value, batch_size=batch_size, **entry.settings)

    def log(self, name: str, value: Any, batch_size: int | None, settings: tuple[Any, ...]) -> None:
        """Replace ``LightningModule.log``: while a client trains, collect the value; else log it directly."""
        hook = vars(self._module)[HOOK]
        if not self._open or hook is None:
            self._original(name, value, batch_size=batch_size, **dict(zip(_SETTINGS, settings, strict=True)))
            return
        entry = self._of_client.get((hook, name))
        is_metric = isinstance(value, Metric)
        usual = is_metric or type(value) in _NUMBERS or (isinstance(value, Tensor) and value.numel() == 1)
        if entry is None or entry.call != settings or not usual:
            entry = self._checked_entry(hook, name, value, batch_size, settings)
        if self._evaluates and entry.on_step:
            del self._of_client[hook, name]
            self._original(name, value, batch_size=batch_size, **entry.settings)
            return
        if is_metric:
            entry.metric = value
            return
        if batch_size is None:
            batch_size = self._batch_size() if entry.is_weighted else 1
        if isinstance(value, Tensor) and not value.is_cpu:
            # A copy, because the step may overwrite the value.
            value = value.detach().flatten().clone()
        entry.add(value, batch_size)

    def log_clients(
        self, name: str, values: Tensor, batch_size: int, places: Sequence[int], settings: Mapping[str, Any]
    ) -> None:
        """Log one value per client, as ``log`` would in the step of one client after another.

        Args:
            name: As for ``LightningModule.log``.
            values: Each client's value, ``[clients]``, which nobody overwrites.
            batch_size: Number of samples in each client's batch.
            places: The clients' places among those that step together.
            settings: The other arguments of ``log`` that were given.
        """
        hook = vars(self._module)[HOOK]
        if not self._open or hook is None:
            for value in values:
                self._original(name, value, batch_size=batch_size, **settings)
            return
        given = tuple(settings.get(each, default) for each, default in _DEFAULTS.items())
        entry = self._of_client.get((hook, name))
        if entry is None or entry.call != given:
            entry = self._checked_entry(hook, name, values[0], batch_size, given)
        entry.add_clients(values, batch_size, places)

    def _checked_entry(
        self, hook: str, name: str, value: Any, batch_size: int | None, settings: tuple[Any, ...]
    ) -> _Entry:
        """The entry that collects a call's values; Lightning has checked the call's arguments."""
        key = f"{hook}.{name}"
        known = self._calls.get(key)
        number = type(value) in _NUMBERS or (isinstance(value, Tensor) and value.numel() == 1)
        if known != settings or not (number or isinstance(value, Metric)):
            with logging_into(self._trainer, self._checked, self._batch):
                self._original(name, value, batch_size=batch_size, **dict(zip(_SETTINGS, settings, strict=True)))
            self._calls[key] = settings
        return self._of_client.setdefault((hook, name), _Entry(self._checked[key].meta, settings, self._of_model))

    def _batch_size(self) -> int:
        if self._size is None:
            # Values logged before an evaluation's first batch have weight 1.
            self._size = 1 if self._batch is None else rows_of(self._batch) or extract_batch_size(self._batch)
        return self._size


class _Entry:
    """The running reduction of the values of one name and hook."""

    __slots__ = (
        "_as_tensors",
        "_of_clients",
        "_pending",
        "_reduction",
        "_total",
        "_type",
        "_weight",
        "call",
        "is_weighted",
        "metric",
        "on_epoch",
        "on_step",
    )

    def __init__(self, meta: Any, call: tuple[Any, ...], as_tensors: bool = False) -> None:
        self._as_tensors = as_tensors
        self._reduction: str = meta.reduce_fx.__name__
        self.call = call
        self.on_step: bool = meta.on_step
        self.on_epoch: bool = meta.on_epoch
        self.is_weighted: bool = meta.on_epoch and self._reduction == "mean"
        self.metric: Metric | None = None
        self._total: Any = None
        self._weight: Any = 0
        self._type: torch.dtype | None = None
        self._pending: list[tuple[Tensor, Any]] = []
        self._of_clients: list[tuple[Tensor, Any, Sequence[int]]] = []

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of ``log`` except for name, value and batch size."""
        return dict(zip(_SETTINGS, self.call, strict=True))

    def add_clients(self, values: Tensor, weight: Any, places: Sequence[int]) -> None:
        """Add a step's value of each of the clients at these places; they count once they are settled."""
        self._of_clients.append((values, weight, places))

    def settle(self, left_out: Collection[int]) -> bool:
        """Add the values of clients together, but for those left out; return whether there are any values."""
        found, self._of_clients = self._of_clients, []
        for values, weight, places in found:
            kept = [number for number, place in enumerate(places) if place not in left_out]
            if kept:
                self.add(values[kept] if left_out else values, weight)
        return self.metric is not None or self._total is not None or bool(self._pending)

    def add(self, value: Any, weight: Any) -> None:
        """Add a step's value, or one value for each of several clients; ``weight`` is the batch size."""
        if self._as_tensors:
            # Adding zero reproduces Lightning's rounding, whose sums start at zero.
            value = _to_float(value) + torch.zeros(()) if self._reduction in ("mean", "sum") else _to_float(value)
            self._reduce(value * weight if self._reduction == "mean" else value, weight)
            return
        if not isinstance(value, Tensor):
            self._reduce(value * weight if self._reduction == "mean" else value, weight)
            return
        if value.dtype is torch.float64:
            self._type = value.dtype
        # On the CPU, Python numbers are faster.
        if value.is_cpu:
            for each in value.flatten().tolist():
                self._reduce(each * weight if self._reduction == "mean" else each, weight)
            return
        # On an accelerator, keep the tensor, so that nothing waits for the device.
        self._pending.append((value, weight))
        if len(self._pending) >= _MOST_PENDING:
            self._reduce_pending()

    def _reduce_pending(self) -> None:
        """Reduce the values that are still on an accelerator."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        values = torch.cat([value for value, _ in pending])
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        weights = [weight for value, weight in pending for _ in range(len(value))]
        if self._reduction == "mean":
            values = values * torch.tensor(weights, dtype=values.dtype).to(values.device, non_blocking=True)
        reduced = getattr(values, f"a{self._reduction}")() if self._reduction in _PICK else values.sum()
        self._reduce(reduced, sum(weights))

    def merge(self, other: _Entry) -> None:
        """Add another client's values."""
        self._pending += other._pending
        if len(self._pending) >= _MOST_PENDING:
            self._reduce_pending()
        self.metric, self._type = other.metric, other._type or self._type
        if other._total is not None:
            self._reduce(other._total, other._weight)

    def _reduce(self, value: Any, weight: Any) -> None:
        if self._total is None:
            self._total = value
        elif self._reduction in ("mean", "sum"):
            self._total = self._total + value
        else:
            self._total = _PICK[self._reduction](self._total, value)
        self._weight = self._weight + weight

    def result(self) -> tuple[Any, Any]:
        """The value to log in Lightning, and its weight; for a metric object, the object and ``None``."""
        if self.metric is not None:
            return self.metric, None
        self._reduce_pending()
        value = self._total / self._weight if self._reduction == "mean" and self._weight else self._total
        if self._type is not None and not isinstance(value, Tensor):
            value = torch.tensor(value, dtype=self._type)
        return value, self._weight

    def of_epoch(self) -> tuple[float, bool | None]:
        """The epoch's value; for a metric object also whether higher is better."""
        if self.metric is not None:
            return float(self.metric.compute()), self.metric.higher_is_better
        return float(self.result()[0]), None


def _to_float(value: Any) -> Tensor:
    """A copy of a value as a tensor of at least float32, as Lightning keeps it."""
    default = torch.promote_types(torch.get_default_dtype(), torch.float32)
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=default)
    number = value.detach().clone()
    return number if number.dtype in (torch.float32, torch.float64) else number.to(default)


class _Log:
    """A replacement of a module's ``log``.

    It has no table of attributes, so that a walk over a module's attributes does not reach the trainer through it.
    """

    __slots__ = ("_book",)

    def __init__(self, book: Logbook) -> None:
        self._book = book

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle as the module's own ``log``."""
        return getattr, (self._book._module, "log")

    def __call__(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Any], Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        settings = (prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist, sync_dist_group)
        others = (add_dataloader_idx, metric_attribute, rank_zero_only)
        self._book.log(name, value, batch_size, settings + others)
