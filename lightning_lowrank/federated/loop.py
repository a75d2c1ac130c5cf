"""`FederatedLoop`: a callback that turns ``trainer.fit`` into a federated experiment, one round per epoch.

It is an ordinary Lightning callback, and no more than its hooks. `Rounds` defines a round. Between rounds the
trainer's module is the global model, so that validation, checkpoints, loggers and every other callback work as usual.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from rich import get_console
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_lowrank.arguments import join_names
from lightning_lowrank.buffers import aliases, under_all_names
from lightning_lowrank.configuration import check_complete
from lightning_lowrank.federated.checks import (
    check_callbacks,
    check_local_update,
    check_manual_optimization,
    check_memory,
    check_optimizers,
    mark_incomplete,
    marking_incomplete,
    notes,
    refuse_default_device,
    refuse_lazy,
    refuse_own_reading,
    refuse_plateaus_of_steps,
    resume_notes,
    validation_interval_note,
    warn_of_changed_base,
    why_trained_set_is_fixed,
)
from lightning_lowrank.federated.client_evaluation import (
    NO_VALIDATION,
    NOT_JUDGED,
    skipped_hook_notes,
    validates_rounds,
)
from lightning_lowrank.federated.coordinator import Coordinator
from lightning_lowrank.federated.data.batches import read_on_device
from lightning_lowrank.federated.data.device import DeviceData
from lightning_lowrank.federated.data.indices import ClientIndices
from lightning_lowrank.federated.data.planner import RoundPlan
from lightning_lowrank.federated.data.sampling import NeedsPoissonBatches
from lightning_lowrank.federated.data.training_set import RoundData
from lightning_lowrank.federated.exchange import Exchange, Parts
from lightning_lowrank.federated.execution.channels_last import in_validation
from lightning_lowrank.federated.execution.processes import (
    ClientParallelStrategy,
    SharedCoordinator,
    check_processes,
    shared_by,
)
from lightning_lowrank.federated.fingerprint import (
    check_same_experiment,
    fingerprint,
    prepare_loading,
    refuse_other_shapes,
)
from lightning_lowrank.federated.ledger import Ledger
from lightning_lowrank.federated.logbook import Logbook
from lightning_lowrank.federated.progress import Progress
from lightning_lowrank.federated.protocols import inherits
from lightning_lowrank.federated.rounds import Rounds
from lightning_lowrank.federated.run_files import RunMetadata
from lightning_lowrank.federated.safe_files import name_full_disk, whole_checkpoints
from lightning_lowrank.federated.schedule_length import ScheduleLength
from lightning_lowrank.federated.settings import FederatedSettings
from lightning_lowrank.federated.state import Server, substituted_data, trained_tensors
from lightning_lowrank.internals.advance import ClientTurns
from lightning_lowrank.internals.lightning import (
    TrainLoaderSource,
    check_namespace,
    log_figures,
    pool_training_results,
    show_figures,
    stops_now,
    validation_logged_for,
)
from lightning_lowrank.internals.peft import keep_base_changes
from lightning_lowrank.internals.replaced import replaced
from lightning_lowrank.layers import unmerge
from lightning_lowrank.units import bytes_text, percent


class FederatedLoop(FederatedSettings, Callback):
    r"""Train the trainer's module as a federated experiment; one epoch is one round.

    Nothing else changes: module, datamodule, optimizers, loggers and other callbacks stay as they are. In each round
    some clients are drawn; each starts from the server's broadcast and trains on its own part of the training set
    with the module's own ``training_step`` and optimizers; the server folds the results into the global model, which is
    what validation, checkpoints and, after ``fit``, the module itself hold.

    With the trainer's ``strategy="client_parallel"`` and several devices, each trains other clients of the round: see
    `ClientParallelStrategy`.

    Put it before every callback that reads weights, and after `LowRank`. Each round logs ``comm/up_bytes``,
    ``comm/down_bytes``, their totals and ``comm/ratio`` (see `Ledger`), ``federated/clients`` (clients whose answers
    count), ``federated/failed`` (drawn clients without such an answer), ``federated/samples`` (the training samples of
    the clients whose answers count) and ``federated/client_steps`` (batches trained by clients in all rounds so far).
    Clients that a round cut short has not reached are in none of these.

    A turn of Lightning's loop is a client, or a chunk of clients that step together, and between turns the module is
    the global model. Lightning's settings mean here (the page "Lightning in a federation" has each):

    - ``limit_train_batches`` and ``overfit_batches`` count per client and round. ``val_check_interval`` is a share of
      the round's turns, or a number of turns; with a number, ``execution="auto"`` trains clients one by one. A
      validation inside a round sees the last global model. A later round of fewer turns than ``val_check_interval`` is
      validated at its end. ``fast_dev_run=n`` divides ``n`` batches among the round's clients.
    - ``global_step``, ``max_steps`` and ``log_every_n_steps`` count steps of optimizers, those of all clients. The fit
      ends after any step, also inside a client. A round cut short by ``max_steps``, ``max_time`` or early stopping is
      aggregated from the clients trained so far.
    - ``batch_idx``, ``trainer.is_last_batch``, ``trainer.num_training_batches`` and ``len(trainer.train_dataloader)``
      are the client's own while it trains. A warning names methods of the module that read other counts.
    - Hooks of the module and of callbacks are called on each of a client's batches. Checkpoints, progress bars and
      weight averaging act between clients. A checkpoint that a callback saves inside a client holds the client's start.
      Figures logged with ``on_step=True`` have one value a client.
    - ``accumulate_grad_batches`` groups batches within a client; a client's last, incomplete group is stepped as
      Lightning steps an epoch's last (its loss divided by the full group's size).
    - A batch that is ``None``, as from a collate function that leaves out all of its samples, is skipped with a
      warning. It counts in ``federated/client_steps``. Clients that step together cannot skip a batch.
    - Epoch-wise learning rate schedulers step per round. Step-wise ones step within each client, from where the round
      began; the next round continues from the client with the most steps, of several from the one with the lowest
      number. The same holds for learning rates and other options that the module or a callback changes in steps, also
      by schedulers of its own. A warning names a schedule of another length.
    - ``trainer.estimated_stepping_batches`` is the number of steps of the client with the most steps in all rounds. In
      ``configure_optimizers`` ``len(trainer.train_dataloader)`` and ``trainer.num_training_batches`` are its batches in
      a round, the mean rounded up. If ``configure_optimizers`` reads ``trainer.estimated_stepping_batches``, and
      ``max_steps`` counts steps of chunks, it is called twice.

    Its arguments, with their defaults, are those of `FederatedSettings`.

    Raises:
        MisconfigurationException: If an argument is out of range, the training loader cannot be divided among clients,
            a trained parameter is in no optimizer, or another callback would read a client's weights as the
            global model's. In a round, if other parameters are trained than before and the method cannot follow
            (`Claims.trained_set_may_change`), or if a persistent buffer is missing or has another shape. At the end, if
            no client has made a step.

    Example:
        >>> from lightning_lowrank import Dirichlet, FedAvg, FederatedLoop
        >>> loop = FederatedLoop(
        ...     FedAvg(), clients=100, clients_per_round=10, partition=Dirichlet(0.3, min_samples=10), local_epochs=3
        ... )
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ledger = Ledger(0)
        self.make_exchange: Callable[[Parts], Exchange] = Coordinator
        """Makes the exchange of a fit; real sites have one of their own."""
        self._restore, self._checkpoint_io = ExitStack(), ExitStack()
        self._for_samples = self._released = False
        self._forget()

    def _forget(self) -> None:
        """Reset all state of a fit."""
        self._progress = Progress()
        self._data: RoundData | None = None
        self._rounds: Rounds | None = None
        self._restored: dict[str, Any] | None = None
        self._fingerprint: dict[str, Any] = {}
        self._processes: ClientParallelStrategy | None = None
        self._length: ScheduleLength | None = None
        self._device_data: DeviceData | None = None
        self._run_metadata: RunMetadata | None = None
        self._turns: ClientTurns | None = None
        self._resumed_inside = False
        self._evaluation_log: Logbook | None = None
        self._validation = ExitStack()
        self._validated: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles: settings, ledger, and the record of private fits, without a fit's state."""
        fresh = type(self).__new__(type(self))
        fresh._forget()
        left_out = {"_restore", "_checkpoint_io", *vars(fresh)}
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the result of `__getstate__`."""
        vars(self).update(state)
        self._restore, self._checkpoint_io = ExitStack(), ExitStack()
        self._forget()

    @property
    def state_key(self) -> str:
        """Name of this callback's state in checkpoints."""
        return "FederatedLoop"

    @property
    def rounds(self) -> Rounds:
        """The rounds of this fit.

        Raises:
            RuntimeError: If no fit has begun.
        """
        if self._rounds is None:
            raise RuntimeError("FederatedLoop has no server and no rounds before a fit has begun.")
        return self._rounds

    @property
    def server(self) -> Server:
        """The server of this fit."""
        return self.exchange.server

    @property
    def exchange(self) -> Exchange:
        """The exchange of this fit's messages, with the states of its clients."""
        return self.rounds.exchange

    @property
    def coordinator(self) -> Coordinator:
        """The server's half of this fit's rounds.

        Raises:
            RuntimeError: At a real site, whose server is elsewhere.
        """
        if not isinstance(self.exchange, Coordinator):
            raise RuntimeError(f"{type(self.exchange).__name__} has no server half: the server is another process.")
        return self.exchange

    @property
    def indices(self) -> ClientIndices | None:
        """The partition of the training set; ``None`` before it has been divided."""
        return None if self._data is None else self._data.indices

    @property
    def data(self) -> RoundData:
        """The training set of this fit, divided among clients and read round by round.

        Raises:
            RuntimeError: If no fit has begun.
        """
        if self._data is None:
            raise RuntimeError("FederatedLoop has no data before a fit has begun.")
        return self._data

    @property
    def plan(self) -> RoundPlan | None:
        """The present round's plan; ``None`` before the first."""
        return None if self._data is None else self._data.plan

    @property
    def in_round(self) -> bool:
        """Whether a round is open, that is begun and not yet aggregated."""
        return self._progress.round_open

    @property
    def validated_round(self) -> int | None:
        """The round, counted from 1, of the model in the fit's last validation; 0 for the initial model.

        ``None`` before a validation. It is an earlier round than the running one if the validation was inside a round.
        """
        return self._validated

    # Begin and end of a fit

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Replace the training loader, and protect checkpoints from torn writes."""
        check_namespace(trainer, pl_module)
        self._restore.close()
        self._checkpoint_io.close()
        self._checkpoint_io.enter_context(whole_checkpoints(trainer))
        self._restore.callback(self._release)
        keep_base_changes(pl_module)
        if stage != "fit":
            if self.personal_test is not None and self._rounds is None and stage != "predict":
                rank_zero_warn(f"no round was made with this FederatedLoop: {NOT_JUDGED}")
            self._keep_samples(trainer)
            return
        processes = shared_by(trainer)
        refuse_default_device()
        refuse_own_reading(pl_module)
        check_callbacks(self, trainer, pl_module, why_trained_set_is_fixed(self))
        source = TrainLoaderSource(trainer)
        if not source.is_defined():
            raise MisconfigurationException(
                "there is no training loader to divide among clients: define train_dataloader() on the module or the"
                " datamodule, or pass one to trainer.fit(model, train_dataloaders)."
            )
        if self._rounds is None or not self._rounds.go_on(trainer, pl_module):
            self._released |= self._has_released()
            self._forget()
            self.renew_seed()
        self._processes = processes
        if processes is not None and self.privacy is not None:
            # All processes plan the same rounds.
            self.privacy.secret = processes.gather(self.privacy.secret)[0]
        limit = trainer.limit_train_batches
        if self._data is None:
            self._data = RoundData(self, self._progress, self._on_divided)
        self._data.attach(trainer, source.user_loader, limit)
        self._keep_samples(trainer)
        self._turns = self._turns_of(trainer)
        restore, enter = self._restore.callback, self._restore.enter_context
        enter(self._turns.installed())
        enter(marking_incomplete(pl_module, self.state_key, lambda: self.server.base.state if self._rounds else {}))
        if limit != 0:
            enter(replaced(trainer, limit_train_batches=1.0))
        self._length = ScheduleLength(trainer, self._data)
        restore(self._length.install())
        enter(prepare_loading(self, trainer))
        restore(pl_module.register_state_dict_post_hook(_StateHook(self._show_global_state)).remove)
        restore(pl_module.register_load_state_dict_pre_hook(refuse_other_shapes).remove)

    def _whole_fingerprint(self) -> dict[str, Any]:
        assert self._data is not None
        return {**self._fingerprint, "data": self._data.fingerprint()}

    def _turns_of(self, trainer: pl.Trainer) -> ClientTurns:
        """The `ClientTurns`, by which a turn of Lightning's loop is a client or a chunk of clients."""
        data = self._data
        assert data is not None
        return ClientTurns(
            trainer,
            self,
            count=lambda: data.present_plan().turns,
            done=lambda: self._progress.chunk,
            loader=lambda: data.training_loader,
            turn=lambda: self.rounds.turn(),
            resumes_inside=lambda: self._resumed_inside,
        )

    def _has_released(self) -> bool:
        """Whether the last fit has spent privacy budget, which a new fit would not count."""
        private = None if self._rounds is None else self.exchange.private
        return (private is not None and private.released > 0) or (self._for_samples and self._progress.client_steps > 0)

    def _keep_samples(self, trainer: pl.Trainer) -> None:
        if self._device_data is None or self._device_data.trainer is not trainer:
            self._device_data = DeviceData(trainer, self.data_on_device)
        self._restore.callback(self._device_data.forget)
        if self._data is not None:
            self._data.device_data = self._device_data

    def _read_validation(self, trainer: pl.Trainer) -> None:
        """Gather validation batches on the device, if the loaders exist and their samples are kept on it."""
        data = self._device_data
        assert data is not None

        def begin(loader: DataLoader) -> DataLoader:
            restore = read_on_device(loader, data)
            if restore is not None:
                self._restore.callback(restore)
            return loader

        apply_to_collection(trainer.val_dataloaders, DataLoader, begin)

    def _release(self) -> None:
        """Stop the workers that read the clients' own test samples."""
        if self._rounds is not None:
            self._rounds.further.release()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore the trainer."""
        self._restore.close()
        self._checkpoint_io.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Restore the last global model in the module, and the trainer, which may still save a checkpoint."""
        try:
            name_full_disk(exception, trainer)
            if self._data is not None:
                self._data.stop()
            if self._rounds is not None:
                self._rounds.abandon()
                warn_of_changed_base(self.algorithm, self.server.base)
        finally:
            self._restore.close()

    def _on_divided(self, indices: ClientIndices, labels: torch.Tensor | None) -> None:
        if self.summary and (self._processes is None or self._processes.is_global_zero):
            get_console().print(indices.summary(labels))

    def on_fit_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Check the optimizers, divide the training set, and make the rounds, which set up the method."""
        refuse_lazy(pl_module)
        unmerge(pl_module)
        check_optimizers(trainer, pl_module)
        refuse_plateaus_of_steps(trainer.lr_scheduler_configs)
        for note in notes(pl_module, self.buffers, trainer.lr_scheduler_configs):
            rank_zero_warn(note)
        if self.personal_test is not None or not inherits(self.algorithm, "variants"):
            for note in skipped_hook_notes(pl_module):
                rank_zero_warn(note)
        if self.personal_test is not None and not validates_rounds(trainer):
            rank_zero_warn(f"personal_test={self.personal_test!r} {NO_VALIDATION}")
        check_manual_optimization(self, pl_module)
        check_local_update(self.algorithm, trainer)
        check_memory(self, pl_module)
        assert self._data is not None
        self._fingerprint = fingerprint(self, trainer, len(self._data.divided()))
        self._for_samples = any(isinstance(each, NeedsPoissonBatches) for each in trainer.callbacks)
        private = self._for_samples or self.privacy is not None
        if self._restored is not None:
            # All of its state is the checkpoint's, also if the trainer has made a fit before.
            self._rounds = None
            self._resume(self._restored)
        elif self._progress.round_open:
            raise MisconfigurationException(
                f"the last fit with this trainer ended inside round {self._progress.round} by an error or interrupt,"
                " and the round's start is not kept: continue from a checkpoint, by trainer.fit(..., ckpt_path=...), or"
                " begin a new run from the module's weights with another Trainer."
                + (
                    " The callback OnExceptionCheckpoint saves a checkpoint in such a case."
                    if not self._processes
                    else ""
                )
            )
        # A real site may continue: it keeps its privacy accounting in a file.
        elif private and self._released and self._rounds is None and self.make_exchange is Coordinator:
            raise MisconfigurationException(
                "an earlier fit with this FederatedLoop was private, and a new one would repeat its noise and count ε"
                " from 0: continue with the same trainer or from a checkpoint, or make a FederatedLoop with another"
                " seed"
                " and add up both ε."
            )
        make = self.make_exchange
        if self._processes is not None:
            make = functools.partial(SharedCoordinator, self._processes, trainer)
        assert self._turns is not None
        self._rounds = Rounds(
            self, trainer, self._data, self._progress, self._processes, make, self._rounds, self._restored, self._turns
        )
        self.ledger = self._rounds.exchange.ledger
        if self._rounds.execution.validation_channels_last:
            self._restore.enter_context(in_validation(trainer, self._rounds.execution))
        self._fingerprint["execution"] = self._rounds.execution.name
        if self._processes is not None:
            per_round = self._data.planner.clients_per_round
            check_processes(self._processes, trainer, self._whole_fingerprint(), self.allow_changes, per_round)
        assert self._length is not None
        if self._length.outdated():
            trainer.strategy.setup_optimizers(trainer)
            self._rounds.replace_optimizers()
        self._length.settle()
        for note in self._length.notes() + self._rounds.exchange.notes(trainer):
            rank_zero_warn(note)
        data = self._data
        turns = None if self._restored is not None else lambda: data.present_plan().turns
        for note in validation_interval_note(trainer, turns, self._rounds.execution.stacked):
            rank_zero_warn(note)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Continue at the checkpoint's position, if the fit is resumed."""
        self._restore.callback(self.rounds.start())
        self.rounds.further.check(trainer)
        self._progress.processes = trainer.world_size
        if self._restored is not None:
            state, self._restored = self._restored, None
            self.rounds.resume(state)
            progress, epoch = self._progress, trainer.current_epoch
            for note in resume_notes(trainer, self.server.round, progress.round_open):
                rank_zero_warn(note)
            if progress.chunk and not progress.round_open:
                assert self._turns is not None
                self._turns.end_restored_epoch()
            if not progress.round_open:
                self.rounds.stop_if_spent(epoch)
        self._run_metadata = RunMetadata(trainer, self.indices)
        self._read_validation(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop planning rounds; warn if validations took place without an evaluation of personal models."""
        assert self._data is not None
        self._data.running = False
        if self.personal_test is not None and validates_rounds(trainer) and not self.rounds.further.judged:
            rank_zero_warn(f"personal_test={self.personal_test!r} {NO_VALIDATION}")
        warn_of_changed_base(self.algorithm, self.server.base)
        if self._run_metadata is not None:
            self._run_metadata.end()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print a summary line; raise if no step was made, unless the trainer's settings ask for none.

        Progress bars are closed by now, or of the same console, which puts the line above them.
        """
        is_intended = 0 in (trainer.max_epochs, trainer.max_steps, trainer.limit_train_batches) or trainer.should_stop
        if self._progress.client_steps == 0 and not is_intended:
            raise MisconfigurationException(
                f"the fit is over after {trainer.current_epoch} rounds, and no client has made a step: the module is"
                f" unchanged. The last round had {self.plan.steps() if self.plan else 0} batches; the module's"
                " on_train_batch_start() ends a round if it returns -1."
            )
        if self.summary and trainer.is_global_zero:
            validated = [
                f"{name} {value:.4f}" for name, value in trainer.callback_metrics.items() if name.startswith("val")
            ]
            of = ""
            if validated and self._validated not in (None, trainer.current_epoch):
                of = f" (of round {self._validated})" if self._validated else " (before the first round)"
            evaluated = join_names(validated) + of + ", " * bool(validated)
            traffic = self.ledger.figures()
            plural = "" if trainer.current_epoch == 1 else "s"
            get_console().print(
                f"after {trainer.current_epoch} round{plural}{self._cut()}: {evaluated}"
                f"{bytes_text(traffic['comm/total_up_bytes'], '.2f')} up,"
                f" {bytes_text(traffic['comm/total_down_bytes'], '.2f')} down,"
                f" {percent(traffic['comm/ratio'])} of dense FedAvg",
                highlight=False,
                soft_wrap=True,
            )

    def _cut(self) -> str:
        """A note on how many of the last round's clients trained, if the fit stopped before all had."""
        plan, answers = self.plan, self.rounds.exchange.answers
        drawn = 0 if plan is None else len(plan.clients)
        trained = len(answers.answered) + len(answers.failed)
        return f", the last one cut after {trained} of {drawn} clients" if trained < drawn else ""

    # Steps

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Call the method's `before_step` with the gradients."""
        self.rounds.execution.before_step(optimizer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Aggregate a round that was cut short, and log the round's figures."""
        self.rounds.pause()
        self.rounds.aggregate()
        self.rounds.end_epoch()
        if self._processes is not None:
            pool_training_results(trainer, self._processes.gather)
        log_figures(trainer, self.rounds.figures())
        if not 0 < (trainer.max_epochs or 0) <= trainer.current_epoch + 1:
            self.rounds.stop_if_spent(trainer.current_epoch + 1)

    # Evaluation

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the global model: the new one if the round is over, the previous one inside a round."""
        if self._rounds is None:
            return
        self._rounds.pause()
        if trainer.sanity_checking:
            return
        if trainer.state.fn == "fit":
            self._read_validation(trainer)
            # With several loaders, Lightning shows figures per loader; leave those to Lightning.
            self._evaluation_log = self._rounds.logbook if len(trainer.num_val_batches) == 1 else None
        if self._evaluation_log is not None:
            self._evaluation_log.begin_evaluation()
        if self._progress.round_open and stops_now(trainer):
            self._rounds.aggregate()
        if trainer.state.fn == "fit":
            if self._rounds.has_figures and not self._progress.round_open:
                # A ModelCheckpoint may save, or EarlyStopping stop, at the validation's end.
                show_figures(trainer, self._rounds.figures())
            self._validated = trainer.current_epoch + (not self._progress.round_open)
            if self._progress.round_open:
                # The figures belong to the previous round's model.
                self._validation.enter_context(validation_logged_for(trainer, trainer.current_epoch - 1))
                self._restore.callback(self._validation.close)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Set the batch whose size weights the logged values."""
        if self._evaluation_log is not None:
            self._evaluation_log.begin_step(batch)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Pass the logged validation values on to Lightning."""
        if self._evaluation_log is not None:
            self._evaluation_log.end_evaluation()
            self._evaluation_log = None

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Between rounds: evaluate clients' personal models and variants."""
        self._validation.close()
        if self._rounds is not None and not trainer.sanity_checking and not self._progress.round_open:
            self._rounds.further.evaluate(trainer, pl_module, "validate")

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After a fit: test clients' personal models and variants."""
        if self._rounds is not None:
            self._rounds.further.evaluate(trainer, pl_module, "test")

    # Checkpoints

    def _show_global_state(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        """Show the global model in a state dict that is taken inside a round (a hook of `torch.nn.Module`)."""
        if self._progress.round_open and self._rounds is not None and module is self.server.base.module:
            shown = under_all_names(self.server.model, aliases(module))
            for name, value in shown.items():
                if prefix + name in state_dict:
                    state_dict[prefix + name] = value

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run, as tensors and plain Python.

        Raises:
            MisconfigurationException: Inside a round that several processes share.
        """
        if self._rounds is None or self._data is None:
            return {}
        return {**self._rounds.state_dict(), "fingerprint": self._whole_fingerprint()}

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Inside a client's turn, save the client's start, from which a resumed run continues.

        After a fit, mark a checkpoint that lacks changed frozen weights; within it, `marking_incomplete` does.
        """
        if self._turns is not None:
            self._turns.wind_back(checkpoint)
        if self._rounds is not None and self._progress.round_open and _has_own_state_dict(pl_module):
            # An overriding state_dict() need not call the hook that shows the global model.
            with substituted_data(trained_tensors(pl_module), self.server.model):
                checkpoint["state_dict"] = trainer.strategy.lightning_module_state_dict()
        if self._rounds is not None and trainer.state.finished:
            mark_incomplete(pl_module, self.state_key, self.server.base.state, checkpoint)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse to resume from a fit without rounds.

        Raises:
            MisconfigurationException: If a fit would resume from a checkpoint of a fit without `FederatedLoop`.
        """
        if trainer.state.fn == "fit" and self.state_key not in checkpoint.get("callbacks", {}):
            raise MisconfigurationException(
                f"ckpt_path={str(trainer.ckpt_path)!r} is of a fit without FederatedLoop, of its epoch"
                f" {checkpoint.get('epoch', 0) + 1}: rounds would be counted from that epoch, and clients' states are"
                " missing. Load its weights into the module, as by"
                " module.load_state_dict(torch.load(path)['state_dict']), and fit without ckpt_path."
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the result of `state_dict`; it is restored when the fit begins.

        Raises:
            MisconfigurationException: If no run can resume from the checkpoint. The fit refuses one of another
                experiment when it begins.
        """
        if not state_dict:
            return
        check_complete(state_dict)
        if "fingerprint" not in state_dict:
            raise MisconfigurationException(
                "the checkpoint was saved by the server of real sites, whose clients' states it does not hold: no run"
                " can continue from it. Load its weights into the module and begin a new run."
            )
        processes = 1 if self._processes is None else self._processes.world_size
        if state_dict["progress"]["round_open"] and processes > 1:
            raise MisconfigurationException(
                f"the checkpoint was saved inside a round of a single process, and this run has {processes}: resume"
                " from one that was saved between rounds, or set devices=1."
            )
        self._restored = state_dict

    def _resume(self, state: dict[str, Any]) -> None:
        """Adopt a checkpoint's progress, after a check that it belongs to the same experiment."""
        assert self._data is not None
        saved = state["fingerprint"]
        execution = saved["execution"] if self.execution == "auto" else self.execution
        present = {**self._whole_fingerprint(), "execution": execution}
        check_same_experiment(saved, present, self.allow_changes, state["progress"]["round_open"])
        if state["progress"]["round_open"]:
            self._resumed_inside = state["inside"]
        self._progress.load_state_dict(state["progress"])
        # Discard a plan that was made before the checkpoint was loaded.
        self._data.plan, self._data.resumed_chunks = None, state["chunks"]


def _has_own_state_dict(module: nn.Module) -> bool:
    """Whether a part of a module overrides ``state_dict()``; metrics do, and hold no trained tensors."""
    kinds = {type(part) for part in module.modules() if not isinstance(part, Metric)}
    return any(kind.state_dict is not nn.Module.state_dict for kind in kinds)


class _StateHook:
    """A hook of a module's state dict. Copies and pickles of the module have one that does nothing."""

    def __init__(self, show: Callable[..., None]) -> None:
        self._show = show

    def __call__(self, *state: Any) -> None:
        """Show the global model in a state dict."""
        self._show(*state)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle as a hook without a callback, which is not copied."""
        return _StateHook, (_show_nothing,)


def _show_nothing(*state: Any) -> None:
    """Leave a state dict as it is."""
