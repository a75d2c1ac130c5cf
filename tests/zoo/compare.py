"""A module of the zoo in a round of federated averaging, and the mean of plain ``Trainer.fit``s that it must equal."""

from __future__ import annotations

import contextlib
import io
import logging
import random
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from lightning_lowrank import FedAvg, FederatedLoop, FromIndices, LowRank, MatrixProduct, recover
from lightning_lowrank.federated.randomness import seed_process, step_seed
from lightning_lowrank.layers import low_rank_layers
from lightning_lowrank.seeding import derive_seed
from tests.zoo.registry import Exhibit

__all__ = ["WAYS", "Outcome", "Row", "examine"]

RANK_RATIO = 0.25
TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-3}
SMALLEST = 1e-3
"""Tensors whose numbers are all smaller are compared as if their largest were this."""

Verdict = Literal["equal", "runs", "warned", "differs", "refused", "crashed"]
Values = dict[str, Tensor]
Execution = Literal["sequential", "vectorized", "auto"]

WAYS = ("sequential", "vectorized", "auto", "low-rank sequential", "low-rank vectorized", "low-rank auto")
"""What is tried with each module. The last three are with `LowRank`."""

FAULTS = ("differs", "crashed")


@dataclass
class Outcome:
    """What became of one way to train a module.

    Args:
        verdict: ``"equal"``: the weights are those of the reference. ``"runs"``: it runs, and its random draws are
            others than the reference's. ``"warned"``: the weights are others, as a warning has said. ``"refused"``: by
            an error that says why. ``"differs"`` and ``"crashed"`` are faults.
        difference: The largest difference of a tensor's numbers from the reference's, over the largest of the
            reference's numbers.
        worst: Name of that tensor.
        said: The first sentence of a refusal, or what is wrong.
        trace: The traceback of a crash.
        taken: What ``execution="auto"`` took.
    """

    verdict: Verdict
    difference: float | None = None
    worst: str = ""
    said: str = ""
    trace: str = ""
    taken: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether something is wrong with the package."""
        return self.verdict in FAULTS


@dataclass
class Row:
    """All outcomes of one module.

    Args:
        name: The exhibit's name.
        kind: The exhibit's kind.
        about: What is particular about it.
        parameters: Number of its parameters.
        frozen: Number of its tensors that are not trained.
        converted: Number of layers that `LowRank` converted, of all.
        outcomes: What became of each of `WAYS`.
    """

    name: str
    kind: str
    about: str
    parameters: int = 0
    frozen: int = 0
    converted: int = 0
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        """The ways in which something is wrong."""
        return [way for way, outcome in self.outcomes.items() if outcome.is_fault]

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain Python."""
        return asdict(self)


class SameDraws(pl.Callback):
    """Seeds a plain fit's steps as `FederatedLoop` seeds a client's, so that dropout and noise are the same.

    Attributes:
        drew: Whether a step has drawn random numbers.
    """

    def __init__(self, client: int) -> None:
        self.seed = derive_seed(0, "training", 0, client)
        self.drew = False

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        seed_process(step_seed(self.seed, batch_idx))
        self._states = _random_states()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.drew = self.drew or _random_states() != self._states


def _random_states() -> tuple[Any, ...]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), str(np.random.get_state())


@contextlib.contextmanager
def _quiet(dtype: torch.dtype) -> Iterator[None]:
    """Make and train modules of a number type, without the messages of other packages."""
    default = torch.get_default_dtype()
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    torch.set_default_dtype(dtype)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(default)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _made(exhibit: Exhibit) -> tuple[pl.LightningModule, DataLoader]:
    torch.manual_seed(0)
    return exhibit.make()


def _parts(exhibit: Exhibit) -> list[list[int]]:
    """Return the samples of each client, of which none are neighbours."""
    total = sum(exhibit.sizes)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(5)).tolist()
    ends = [sum(exhibit.sizes[: client + 1]) for client in range(len(exhibit.sizes))]
    return [sorted(order[end - size : end]) for end, size in zip(ends, exhibit.sizes, strict=True)]


def _values(module: nn.Module) -> Values:
    return {name: value.detach().clone() for name, value in module.state_dict().items() if isinstance(value, Tensor)}


def _fit(module: pl.LightningModule, loader: DataLoader, callbacks: Sequence[pl.Callback], folder: str) -> None:
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        limit_val_batches=0,
        callbacks=list(callbacks),
    )
    trainer.fit(module, loader)


def low_rank() -> LowRank:
    return LowRank(MatrixProduct(), rank_ratio=RANK_RATIO, role="weight", seed=0, summary=False)


def plain_fits(exhibit: Exhibit, converted: bool, folder: str) -> tuple[list[Values], bool]:
    """Return where a plain fit of an untouched module ends for each client, and whether random numbers were drawn."""
    ends, drew = [], False
    for client, part in enumerate(_parts(exhibit)):
        module, loader = _made(exhibit)
        own = type(loader)(Subset(loader.dataset, part), batch_size=loader.batch_size, collate_fn=loader.collate_fn)
        callbacks = [low_rank()] if converted else []
        draws = SameDraws(client)
        _fit(module, own, [*callbacks, draws], folder)
        ends.append(_values(module))
        drew = drew or draws.drew
    return ends, drew


def mean(ends: Sequence[Values], sizes: Sequence[int]) -> Values:
    """Return the mean by the clients' numbers of samples; integers are rounded."""
    means = {}
    for name, first in ends[0].items():
        wide = torch.complex128 if first.is_complex() else torch.float64
        parts = [size / sum(sizes) * end[name].to(wide) for size, end in zip(sizes, ends, strict=True)]
        value = torch.stack(parts).sum(0)
        means[name] = (value if first.is_floating_point() or first.is_complex() else value.round()).to(first.dtype)
    return means


def federated(
    exhibit: Exhibit, execution: Execution, converted: bool, folder: str
) -> tuple[pl.LightningModule, FederatedLoop, list[str]]:
    """Train an untouched module in one round of federated averaging, and return what it warned of as well."""
    module, loader = _made(exhibit)
    settings = {"partition": FromIndices(_parts(exhibit)), "ema_parameters": list(exhibit.ema), "seed": 0}
    loop = FederatedLoop(FedAvg(), execution=execution, summary=False, **settings)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        _fit(module, loader, [*([low_rank()] if converted else []), loop], folder)
    return module, loop, [str(each.message) for each in given]


class FirstLoss(pl.Callback):
    """Takes the loss of a fit's first step, ``None`` where the step returns none."""

    value: float | None = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self.value is None and isinstance(loss, Tensor) and loss.numel() == 1:
            self.value = float(loss)


def _check_recovered(exhibit: Exhibit, module: pl.LightningModule, folder: str) -> str:
    """Say how a trained low-rank module and an untouched one that has its recovered weights differ; empty if nowhere.

    They would where the module goes on to compute with the layers that it had before.
    """
    dense, loader = _made(exhibit)
    trained, tolerance = _values(module), max(TOLERANCE.get(value.dtype, 1e-1) for value in module.parameters())

    def first_loss(of: pl.LightningModule) -> float | None:
        first = FirstLoss()
        _fit(of, loader, [SameDraws(0), first], folder)
        return first.value

    low_rank_loss = first_loss(module)
    module.load_state_dict(trained)
    dense.load_state_dict(recover(module).state_dict())
    dense_loss = first_loss(dense)
    if low_rank_loss is None or dense_loss is None:
        return ""
    if abs(low_rank_loss - dense_loss) <= tolerance * max(1.0, abs(dense_loss)):
        return ""
    return f"its loss is {low_rank_loss:g}, and {dense_loss:g} of a dense module with its recovered weights"


def _compare(found: Values, reference: Values, start: Values) -> Outcome:
    """Compare all tensors of two state dicts."""
    if found.keys() != reference.keys():
        names = sorted(found.keys() ^ reference.keys())
        return Outcome("differs", said=f"tensors that only one of the two has: {', '.join(names[:4])}")
    largest, worst = 0.0, ""
    for name, value in reference.items():
        other = found[name]
        if other.shape != value.shape:
            return Outcome("differs", worst=name, said=f"{name} has another shape")
        if not value.numel():
            continue
        if not torch.isfinite(value.abs()).all() or not torch.isfinite(other.abs()).all():
            if torch.equal(value, other):
                continue
            return Outcome("differs", worst=name, said=f"{name} is not finite")
        wide = torch.complex128 if value.is_complex() else torch.float64
        distance = float((other.to(wide) - value.to(wide)).abs().max())
        relative = distance / max(float(value.abs().max()), SMALLEST)
        if relative > largest:
            largest, worst = relative, name
    floating = {value.dtype for value in reference.values() if value.is_floating_point()}
    tolerance = max(TOLERANCE.get(dtype, 1e-1) for dtype in floating)
    if torch.float64 in floating and floating != {torch.float64}:
        tolerance = TOLERANCE[torch.float32]
    if largest <= tolerance:
        return Outcome("equal", largest, worst)
    stayed = worst in start and torch.equal(found[worst], start[worst])
    return Outcome("differs", largest, worst, said=f"{worst} {'did not change' if stayed else 'is another'}")


def _check_frozen(module: nn.Module, frozen: Mapping[str, Tensor]) -> str:
    """Say which of the tensors that no plain fit changes were changed or converted; empty where none was."""
    values = module.state_dict()
    replaced = [name for name in frozen if name not in values]
    if replaced:
        return f"{len(replaced)} of {len(frozen)} frozen tensors were converted: {', '.join(replaced[:3])}"
    thawed = [name for name, value in module.named_parameters() if name in frozen and value.requires_grad]
    if thawed:
        return f"{len(thawed)} of {len(frozen)} frozen tensors were thawed: {', '.join(thawed[:3])}"
    changed = [name for name, value in frozen.items() if not torch.equal(values[name], value)]
    return f"{len(changed)} of {len(frozen)} frozen tensors changed: {', '.join(changed[:3])}" if changed else ""


def first_sentence(message: str) -> str:
    """Return the first sentence of a message, on one line."""
    text = " ".join(message.split())
    end = text.find(". ")
    return text if end < 0 else text[: end + 1]


def _attempt(train: Callable[[], Outcome], may_refuse: bool = True) -> Outcome:
    try:
        return train()
    except MisconfigurationException as error:
        if may_refuse:
            return Outcome("refused", said=first_sentence(str(error)), trace=traceback.format_exc())
        said = f"raises where the sequential run does not: {first_sentence(str(error))}"
        return Outcome("crashed", said=said, trace=traceback.format_exc())
    except Exception as error:
        said = f"{type(error).__name__}: {first_sentence(str(error))}"
        return Outcome("crashed", said=said, trace=traceback.format_exc())


def _tries(exhibit: Exhibit, converted: bool, start: Values, frozen: Values, row: Row, folder: str) -> None:
    prefix = "low-rank " if converted else ""
    reference: Values = {}
    sequential: Values = {}
    drew = False

    def train(execution: Execution) -> Outcome:
        module, loop, warned = federated(exhibit, execution, converted, folder)
        if converted and execution == "sequential":
            row.converted = sum(1 for _ in low_rank_layers(module))
        taken = loop.rounds.execution.name
        found = _values(module)
        if execution == "sequential":
            sequential.update(found)
        wrong = _check_frozen(module, frozen)
        if converted and execution == "sequential" and not (wrong or exhibit.own_loss):
            wrong = _check_recovered(exhibit, module, folder)
        if wrong:
            return Outcome("differs", said=wrong, taken=taken)
        if drew and (taken == "vectorized" or loop.rounds.execution.channels_last):
            finite = all(torch.isfinite(value.abs()).all() for value in found.values())
            moved = any(name in start and not torch.equal(value, start[name]) for name, value in found.items())
            if not (finite and moved):
                return Outcome("differs", said="values are not finite, or none has changed", taken=taken)
            return Outcome("runs", taken=taken)
        outcome = _compare(found, reference if execution == "sequential" or not sequential else sequential, start)
        outcome.taken = taken
        sign = next((text for text in warned if exhibit.warned and exhibit.warned in text), "")
        if outcome.verdict == "differs" and sign:
            outcome.verdict, outcome.said = "warned", first_sentence(sign)
        return outcome

    try:
        ends, drew = plain_fits(exhibit, converted, folder)
        reference = mean(ends, exhibit.sizes)
    except Exception as error:
        # A low-rank layer does not know Lightning's exceptions.
        refused = isinstance(error, MisconfigurationException) or "changed in place" in str(error)
        if not (converted or refused):
            raise
        said = first_sentence(str(error))
        if not refused:
            said = f"plain Trainer.fit with LowRank: {type(error).__name__}: {said}"
        row.outcomes |= {
            f"{prefix}{way}": Outcome("refused" if refused else "crashed", said=said, trace=traceback.format_exc())
            for way in ("sequential", "vectorized", "auto")
        }
        return
    first = row.outcomes[f"{prefix}sequential"] = _attempt(lambda: train("sequential"))
    row.outcomes[f"{prefix}vectorized"] = _attempt(lambda: train("vectorized"))
    ran = first.verdict not in ("refused", "crashed")
    row.outcomes[f"{prefix}auto"] = _attempt(lambda: train("auto"), may_refuse=not ran)


def examine(exhibit: Exhibit) -> Row:
    """Train one module in every way of `WAYS`.

    Raises:
        RuntimeError: If the exhibit itself is at fault: a plain ``Trainer.fit`` of it fails, or changes nothing.
    """
    row = Row(exhibit.name, exhibit.kind, exhibit.about)
    dtype = torch.float64 if exhibit.double else torch.float32
    with _quiet(dtype), tempfile.TemporaryDirectory() as folder:
        module, _ = _made(exhibit)
        start = _values(module)
        row.parameters = sum(value.numel() for value in module.parameters())
        held_fast = {name for name, value in module.named_parameters() if not value.requires_grad}
        row.frozen = len(held_fast)
        try:
            ends, _ = plain_fits(exhibit, False, folder)
        except Exception as error:
            raise RuntimeError(f"{exhibit.name}: a plain Trainer.fit fails") from error
        changed = {name for end in ends for name, value in end.items() if not torch.equal(value, start[name])}
        if not changed:
            raise RuntimeError(f"{exhibit.name}: a plain Trainer.fit changes nothing")
        # A teacher that follows by a moving average is not trained either, and is to change.
        frozen = {name: value for name, value in start.items() if name in held_fast - changed}
        for converted in (False, True):
            _tries(exhibit, converted, start, frozen, row, folder)
    return row
