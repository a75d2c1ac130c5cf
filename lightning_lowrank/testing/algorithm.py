"""`check_algorithm`: the contract that every federated method must keep."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_lowrank.callbacks.lowrank import LowRank
from lightning_lowrank.cli.inspection import inspect_run
from lightning_lowrank.compression import Dense
from lightning_lowrank.federated import Algorithm
from lightning_lowrank.federated.protocols import Personal, UnequalClients
from lightning_lowrank.federated.state import copy_into, trained_tensors
from lightning_lowrank.testing.experiment import Experiment, Norm, Outcome, blobs, quiet, small_module
from lightning_lowrank.testing.require import require
from lightning_lowrank.testing.sites import Tape, replay_client, replay_server

__all__ = ["PARTS", "Expected", "check_algorithm"]

# Clients of the recorded run's rounds: client 0 sits out the second, client 3 joins in it, the third has all.
_ROUNDS = [[0, 1, 2], [1, 2, 3], [0, 1, 2, 3]]
# Batches after which checkpoints are saved: inside a client's steps, and between two clients of the next round.
_SAVED_SEQUENTIAL = (4, 13)
_SAVED_VECTORIZED = (6,)


@dataclass(frozen=True)
class Expected:
    """A method's promises in addition to the contract of every method; by default those of federated averaging.

    Args:
        plain: Tolerance within which a round of one client that has all samples equals an epoch of plain training.
            ``None``: it does not.
        identical: Tolerance within which two clients with the same samples end where one does. ``None``: they don't.
        same_bytes: Whether each message has the bytes of all trained tensors and persistent buffers.
        vectorizes: Whether clients can step together; otherwise ``execution="vectorized"`` has to be refused.
        trains_global: Whether there is a global model that learns; otherwise clients' own models have to.
        averages_buffers: Whether the global model has the clients' statistics. ``None``: if ``trains_global``.
        accuracy: Accuracy that the model exceeds on four classes. Default 0.7.
        learning: Settings of the run that reaches it: ``rounds`` (default 8), and arguments of `FederatedLoop`, by
            default ``local_epochs=2``.
    """

    plain: float | None = 1e-5
    identical: float | None = 1e-5
    same_bytes: bool = True
    vectorizes: bool = True
    trains_global: bool = True
    averages_buffers: bool | None = None
    accuracy: float = 0.7
    learning: Mapping[str, Any] = field(default_factory=dict)


def check_algorithm(
    make: Callable[[], Algorithm],
    expected: Expected | None = None,
    *,
    module: Callable[[Norm], pl.LightningModule] = small_module,
    lowrank: Callable[[], LowRank] | None = None,
    settings: Mapping[str, Any] | None = None,
    parts: Sequence[str] | None = None,
) -> None:
    """Raise an `AssertionError` if a method breaks the contract of `Algorithm`, or is not as expected.

    The method is tried in small runs, most of them on four clients of which one has a single sample. The contract's
    parts:

    - ``"learns"``: the global model learns, or clients' own models do.
    - ``"plain"``: with one client that has all samples, a round is an epoch of plain training, if that is expected.
      If not, the two must differ.
    - ``"identical"``: two clients with the same samples end where one does, if that is expected.
    - ``"seed"``: the seed decides all draws. The process's own generators and the order in which clients are named
      change nothing, and another seed gives other weights.
    - ``"sites"``: each client sends the same bytes when it runs on its own, with nothing but the encoded messages that
      it was sent, a copy of the module and another object of the method in each round. So does the server, with nothing
      but the clients' encoded messages. Both decode the tensors that the simulation gave them.
    - ``"bytes"``: the ledger has the lengths of the encodings, `inspect_run` knows them before the run, and they are
      those of federated averaging, if that is expected.
    - ``"resume"``: a run that is resumed inside a round or between two clients, with another object of the method, ends
      with the same weights and ledger, bit for bit, in both executions. So no value in the method's attributes may
      need to survive a checkpoint.
    - ``"vectorized"``: clients that step together end where single ones do, to rounding in float64, or are refused.
    - ``"precision"``: it runs with bfloat16 and batch normalization, and the global model has the clients' statistics,
      if that is expected.
    - ``"dropout"``: rounds in which clients fail are aggregated.

    Args:
        make: Makes the method: a class, or a function without arguments. Called for each run.
        expected: Further promises of the method. Default: all that federated averaging does.
        module: Makes the module, given the layer of normalization to use: ``nn.BatchNorm1d`` in the part
            ``"precision"``, elsewhere one without statistics. It classifies batches of inputs ``[batch, 6]`` and
            labels below 4; its ``forward`` returns the logits, its ``validation_step`` logs ``"val_acc"`` and
            ``"val_loss"``. Default: `small_module`, whose network and optimizer can be chosen.
        lowrank: Makes the `LowRank` callback with which the method is used. Default: none.
        settings: Further arguments of `FederatedLoop`, such as ``{"uplink": [Half()]}``.
        parts: Names of the parts to check. Default: all, see `PARTS`.

    Raises:
        AssertionError: If the method breaks the contract. The message names the method, the part, and the fault.
        MisconfigurationException: If the method refuses the module.
        ValueError: If ``parts`` names none of `PARTS`.

    Example:
        >>> from lightning_lowrank import FedAvg
        >>> check_algorithm(FedAvg, parts=["plain", "sites"])
    """
    chosen = PARTS if parts is None else tuple(parts)
    unknown = [part for part in chosen if part not in PARTS]
    if unknown:
        raise ValueError(f"parts must be of {', '.join(PARTS)}, got {unknown}")
    experiment = Experiment(make, module, lowrank, settings or {})
    with quiet(), tempfile.TemporaryDirectory(prefix="check_algorithm_") as folder:
        check = _Check(experiment, Expected() if expected is None else expected, Path(folder))
        for part in chosen:
            try:
                _PARTS[part](check)
            except AssertionError as error:
                raise AssertionError(f"{type(make()).__name__} breaks the part {part!r}: {error}.") from error


class _SaveAt(Checkpoint):
    """Saves checkpoints after the batches with these numbers, counted from 1 over the whole run."""

    def __init__(self, folder: Path, batches: Sequence[int]) -> None:
        self.files = {number: folder / f"{number}.ckpt" for number in batches}
        self._batches = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        self._batches += 1
        if self._batches in self.files:
            trainer.save_checkpoint(self.files[self._batches])


class _Check:
    """The parts of the contract, and the runs that several parts share."""

    def __init__(self, experiment: Experiment, expected: Expected, folder: Path) -> None:
        self.experiment = experiment
        self.expected = expected
        self.folder = folder
        self.data = blobs(28, dtype=torch.float64)

    def run(
        self, *callbacks: Callback, tape: Tape | None = None, checkpoint: Path | None = None, **settings: Any
    ) -> Outcome:
        """Make the recorded run's rounds in float64, with further settings of the loop."""
        loop = self.experiment.loop(**{"participants": _ROUNDS, **settings})
        if tape is not None:
            tape.attach(loop)
        return self.experiment.run(loop, *callbacks, data=self.data, checkpoint=checkpoint)

    @cached_property
    def recorded(self) -> tuple[Outcome, Tape, dict[int, Path]]:
        """A sequential run, the tape of its messages, and the checkpoints that it saved."""
        tape, saver = Tape(), _SaveAt(self.folder / "sequential", _SAVED_SEQUENTIAL)
        return self.run(saver, tape=tape), tape, saver.files

    @cached_property
    def vectorized(self) -> tuple[Outcome, dict[int, Path]]:
        """The recorded run with clients that step together, and the checkpoints that it saved."""
        saver = _SaveAt(self.folder / "vectorized", _SAVED_VECTORIZED)
        return self.run(saver, execution="vectorized"), saver.files

    def learns(self) -> None:
        parts = [range(5), range(5, 47), range(47, 69), range(69, 102), [102]]
        settings = {"local_epochs": 2, **self.expected.learning}
        rounds = settings.pop("rounds", 8)
        loop = self.experiment.loop(settings.pop("parts", parts), **settings)
        outcome = self.experiment.run(
            loop,
            data=blobs(103),
            batch_size=8,
            max_epochs=rounds,
            limit_val_batches=1.0,
            check_val_every_n_epoch=rounds,
        )
        if self.expected.trains_global:
            accuracy = float(outcome.trainer.callback_metrics["val_acc"])
        else:
            accuracy = _own_accuracy(outcome, 1, [tensor[list(parts[1])] for tensor in blobs(103).tensors])
        require(
            accuracy > self.expected.accuracy,
            f"after {rounds} rounds the accuracy is {accuracy:.2f}, and {self.expected.accuracy} is expected (chance is"
            " 0.25); Expected(learning=...) has the number of rounds",
        )

    def plain(self) -> None:
        run = partial(self.experiment.run, shuffle=False, max_epochs=1)
        federated, alone = run(self.experiment.loop([range(28)])), run(None)
        inputs = blobs(28).tensors[0]
        outputs, expected = (outcome.module(inputs) for outcome in (federated, alone))
        difference = float((outputs - expected).abs().max())
        if self.expected.plain is None:
            require(difference > 1e-5, "one client is plain training, and that is not expected: set plain=1e-5")
        else:
            require(
                torch.allclose(outputs, expected, rtol=1e-4, atol=self.expected.plain),
                f"after a round of one client the module's outputs differ by {difference:.2g} from those of plain"
                " training; Expected(plain=None) if that is meant",
            )

    def identical(self) -> None:
        if self.expected.identical is None:
            return
        inputs, targets = blobs(16).tensors
        twice = TensorDataset(inputs.repeat(2, 1), targets.repeat(2))
        run = partial(self.experiment.run, data=twice, shuffle=False, max_epochs=2)
        both = run(self.experiment.loop([range(16), range(16, 32)])).weights
        one = run(self.experiment.loop([range(16)])).weights
        for name, value in one.items():
            require(
                torch.allclose(value, both[name], rtol=1e-4, atol=self.expected.identical),
                f"with two clients of the same samples {name} ends where it does not with one of them;"
                " Expected(identical=None) if that is meant",
            )

    def seed(self) -> None:
        torch.manual_seed(99)
        first = self.recorded[0]
        torch.manual_seed(100)
        second = self.run(participants=[rounds[::-1] for rounds in _ROUNDS])
        _require_same(
            second, first, "a run of the same seed, with other states of the global generators, ends with other"
        )
        if self.expected.trains_global:
            other = self.run(seed=5).weights
            require(
                any(not torch.equal(value, other[name]) for name, value in first.weights.items()),
                "another seed gives the same weights",
            )

    def sites(self) -> None:
        outcome, tape, _ = self.recorded
        for client in range(len(tape.plans[-1][0].clients)):
            replay_client(self.experiment, tape, client, self.data)
        replay_server(self.experiment, tape, self.data, outcome.weights)

    def bytes(self) -> None:
        outcome, tape, _ = self.recorded
        module = self.experiment.module(dtype=torch.float64)
        lowrank = None if self.experiment.lowrank is None else self.experiment.lowrank()
        inspected = inspect_run(module, lowrank, self.experiment.loop(clients=4))
        require(not inspected["problems"], f"inspect_run finds problems: {'; '.join(inspected['problems'])}")
        for direction, transfers in (("down", tape.down), ("up", tape.up)):
            counted = outcome.traffic[f"total_{direction}"]
            crossed = sum(len(transfer.data) for transfer in transfers.values())
            require(
                counted == crossed,
                f"the ledger counts {counted} bytes {direction}, and the encodings have {crossed}: the codec's nbytes"
                " is not the length of its encoding",
            )
            known, crossed = inspected["traffic"][direction]["bytes"], len(transfers[0, 0].data)
            require(
                known == crossed,
                f"inspect_run tells {known} bytes {direction} for client 0's first round, which had {crossed}",
            )
        if self.expected.same_bytes:
            model = Dense().nbytes(trained_tensors(outcome.module))
            other = {len(transfer.data) for transfer in (*tape.down.values(), *tape.up.values())} - {model}
            require(
                not other,
                f"messages have {sorted(other)} bytes, where federated averaging's have {model};"
                " Expected(same_bytes=False) if that is meant",
            )

    def resume(self) -> None:
        outcome, _, files = self.recorded
        self._resumes(outcome, files, "sequential")
        if self.expected.vectorizes:
            self._resumes(*self.vectorized, "vectorized")

    def _resumes(self, whole: Outcome, files: Mapping[int, Path], execution: str) -> None:
        for batches, file in files.items():
            again = self.run(execution=execution, checkpoint=file)
            when = f"resumed after {batches} batches with execution={execution!r} and another object of the method"
            _require_same(again, whole, f"{when}, it ends with other")

    def steps_together(self) -> None:
        if not self.expected.vectorizes:
            try:
                self.run(execution="vectorized")
            except MisconfigurationException:
                return
            raise AssertionError("execution='vectorized' is not refused; Expected(vectorizes=True) if it works")
        one, together = self.recorded[0], self.vectorized[0]
        weights = together.weights
        for name, value in one.weights.items():
            require(
                torch.allclose(value, weights[name], rtol=1e-9, atol=1e-9),
                f"{name} is another where clients step together: hooks that see a LocalStep get tensors [clients, …]"
                " and may mix no clients",
            )
        require(one.traffic == together.traffic, "the ledger is another where clients step together")

    def precision(self) -> None:
        outcome = self.experiment.run(
            self.experiment.loop(),
            norm=nn.BatchNorm1d,
            drop_last=True,
            max_epochs=2,
            precision="bf16-mixed",
            limit_val_batches=1.0,
        )
        _require_finite_loss(outcome, "with bfloat16 and batch normalization")
        averages = self.expected.averages_buffers
        averages = self.expected.trains_global if averages is None else averages
        for norm in (layer for layer in outcome.module.modules() if isinstance(layer, nn.BatchNorm1d)):
            moved = bool(norm.num_batches_tracked)
            require(
                moved is averages,
                f"the global model has {'the' if moved else 'none of the'} clients' statistics;"
                f" Expected(averages_buffers={moved}) if that is meant",
            )

    def dropout(self) -> None:
        loop = self.experiment.loop(client_dropout=0.5)
        outcome = self.experiment.run(loop, max_epochs=4, limit_val_batches=1.0, check_val_every_n_epoch=4)
        _require_finite_loss(outcome, "where clients fail")


_PARTS: dict[str, Callable[[_Check], None]] = {
    "learns": _Check.learns,
    "plain": _Check.plain,
    "identical": _Check.identical,
    "seed": _Check.seed,
    "sites": _Check.sites,
    "bytes": _Check.bytes,
    "resume": _Check.resume,
    "vectorized": _Check.steps_together,
    "precision": _Check.precision,
    "dropout": _Check.dropout,
}

PARTS = tuple(_PARTS)
"""Names of the contract's parts, see `check_algorithm`."""


@torch.no_grad()
def _own_accuracy(outcome: Outcome, client: int, samples: Sequence[Tensor]) -> float:
    """The accuracy of a client's own model on its samples."""
    assert outcome.loop is not None
    coordinator, live = outcome.loop.coordinator, trained_tensors(outcome.module)
    given = UnequalClients.of(coordinator.algorithm).model_for(coordinator.server, coordinator.info(client))
    own = Personal.of(coordinator.algorithm).personal_model(coordinator.context(client, live), given)
    copy_into(live, own)
    inputs, targets = samples
    outputs = outcome.module.eval()(inputs)
    return float((outputs.argmax(1) == targets).float().mean())


def _require_same(second: Outcome, first: Outcome, what: str) -> None:
    expected, found = first.weights, second.weights
    other = [name for name, value in expected.items() if not torch.equal(value, found[name])]
    require(not other, f"{what} weights: {', '.join(other[:4])}")
    require(first.traffic == second.traffic, f"{what} bytes in the ledger: {second.traffic}, not {first.traffic}")


def _require_finite_loss(outcome: Outcome, when: str) -> None:
    loss = float(outcome.trainer.callback_metrics["val_loss"])
    require(math.isfinite(loss), f"{when} the loss is {loss}")
