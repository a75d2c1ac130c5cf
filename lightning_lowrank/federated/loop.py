"""`FederatedLoop`: turns ``trainer.fit`` into a federated experiment, one epoch a round.

It is an ordinary Lightning callback. The module that the user passes to the trainer is every client in turn: at a
client's first batch it takes that client's weights, at its last they are collected, and between rounds it is the
global model, so that validation, checkpoints, loggers and every other callback see what they always see.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_lowrank.federated._lightning import (
    AccumulationPerClient,
    DirectSteps,
    PaddedEpochs,
    StepCounts,
    TrainLoaderSource,
    forget_batches,
    log_figures,
    pool_training_results,
    stops_now,
)
from lightning_lowrank.federated.algorithm import Algorithm, LocalStep, install, leaves_alone, show_global
from lightning_lowrank.federated.checks import check_callbacks, check_optimizers, notes
from lightning_lowrank.federated.client import (
    BufferPolicy,
    Client,
    Clients,
    Server,
    WeightedMean,
    Workspace,
    part_of,
    stack_workspaces,
    trained_tensors,
)
from lightning_lowrank.federated.client_parallel import ClientParallelStrategy, SharedRound, shared_by
from lightning_lowrank.federated.evaluation import ClientEvaluation, figures, hold_out, matched_labels
from lightning_lowrank.federated.optimizers import age
from lightning_lowrank.federated.optimizers import begin as begin_optimizers
from lightning_lowrank.federated.optimizers import keep as keep_optimizers
from lightning_lowrank.federated.partition import IID, ClientIndices, Partition, find_labels
from lightning_lowrank.federated.payload import Ledger, dense_payload
from lightning_lowrank.federated.rounds import (
    Cohort,
    RoundLoader,
    RoundPlan,
    RoundPlanner,
    StepRandomness,
    batches_of,
    check_loader,
    shuffles,
)
from lightning_lowrank.federated.schedulers import SchedulersPerClient
from lightning_lowrank.federated.vectorized import (
    ActsOnStacks,
    ClientStack,
    clients_that_fit,
    try_both,
    why_not_vectorized,
)
from lightning_lowrank.seeding import default_seed


class FederatedLoop(Callback):
    r"""Train the trainer's module as a federated experiment; one epoch is one round.

    Nothing else changes: module, datamodule, optimizers, loggers and other callbacks stay as they are. In each round
    some clients are drawn; each starts from what the server sends it and trains on its own part of the training set
    with the module's own ``training_step`` and optimizers; the server folds the results into the global model, which is
    what validation, checkpoints and, after ``fit``, the module itself hold.

    With the trainer's ``strategy="client_parallel"`` and several devices, each trains other clients of the round: see
    `ClientParallelStrategy`.

    Put it before every callback that reads weights, and after `LowRank`. Each round logs ``comm/up_bytes``,
    ``comm/down_bytes``, their totals and ``comm/ratio`` (see `Ledger`), ``federated/clients``, ``federated/failed``,
    ``federated/samples`` and ``federated/client_steps`` (batches trained by clients, in all).

    What Lightning's own settings mean here:

    - ``limit_train_batches`` and ``overfit_batches`` count per client and round; ``val_check_interval`` and
      ``max_steps`` count the round's batches. A validation inside a round sees the last global model. A round cut
      short by ``max_steps``, ``max_time`` or early stopping is aggregated from what has been trained by then.
      ``fast_dev_run=n`` gives ``n`` clients a batch each.
    - ``accumulate_grad_batches`` groups batches within a client; a client's last, incomplete group is stepped as
      Lightning steps an epoch's last (its loss divided by the full group's size).
    - Epoch-wise learning rate schedulers step per round. Step-wise ones step within each client, from where the round
      began; the next round goes on from the client with the most steps.

    Args:
        algorithm: The federated method.
        clients: Number of clients. May be left out where the partition knows it (`ByKey`, `FromIndices`).
        clients_per_round: Clients drawn in each round: a count, or a share of all clients in (0, 1] as a float.
            ``None``: all of them. Clients without samples are never drawn.
        partition: How the training set is divided; `IID` by default.
        local_epochs: Passes of a client over its own samples in a round.
        local_steps: Number of batches of a client in a round, instead of ``local_epochs``.
        weighting: A client's weight in the mean: its number of ``"samples"``, ``"uniform"``, or a function of the
            `Client`.
        buffers: Persistent buffers such as BatchNorm's statistics. ``"average"``: sent, trained and averaged like
            weights (integer ones rounded). ``"local"``: each client keeps its own, nothing is sent, and the global
            model keeps those it began with. ``"reset"``: every client starts each round from the initial ones, and
            only the results are sent and averaged.
        optimizer_state: ``"reset"``: momentum and the like start anew with each client and round. ``"keep"``: each
            client takes its own up again when it is next drawn.
        client_dropout: Chance in [0, 1) that a drawn client fails: it is sent the model and never answers. At least
            one client of a round always answers.
        sampling_weights: Relative chance of each client to be drawn; uniform by default.
        participants: Ids of the clients of each round, given instead of drawn.
        availability: For each client the chance that it is there in a round, or a function of client id and round.
        labels: Function from the training dataset to its labels, for partitions by label. By default they are found
            from ``targets``, ``labels`` or ``tensors``, or in one pass over the dataset.
        seed: Seed of partition, sampling, data order and clients' randomness. ``None``: the seed given to Lightning's
            ``seed_everything``, or 0.
        execution: ``"sequential"`` (default): clients train one after another. ``"vectorized"``: a round's clients step
            together, as one batch of models. The results are equal to rounding (but for dropout and augmentation in
            ``training_step``, whose draws differ); a frozen weight is one product for all clients, so that low-rank
            clients gain most. ``training_step`` is mapped with `torch.func.vmap`: it may not branch on a tensor's
            value, call ``.item()`` or update a metric, and optimizers must act on each number alone.
            ``global_step``, ``max_steps``, step-wise schedulers, ``val_check_interval`` and checkpoints every n steps
            then count steps of a cohort; ``federated/client_steps`` counts clients' batches in both. ``"auto"``: a few
            steps are tried both ways when the fit begins, the faster is taken, and a line says which and why; a resumed
            run keeps the choice.
        clients_together: Largest number of clients that step together. ``None``: as many as a quarter of the free
            memory holds. The result does not depend on it, to rounding.
        personal_test: What each client's own model (`Algorithm.personal_state`; for most methods the global model) is
            tested on, each time validation runs between rounds: ``"matched_labels"``: the validation samples of the
            labels that it has in its training samples; a share in (0, 1): that share of its own samples, drawn at
            random and not trained on. Logged are the mean over clients, the mean of the worst tenth and the standard
            deviation of each figure that ``validation_step`` logs: ``personal/val_acc``, ``personal/val_acc_worst10``,
            ``personal/val_acc_std``. ``trainer.test`` after the fit does the same with the test loader. ``None``: not
            at all.
        client_settings: What is otherwise for single clients, by their ids or as a function of the id:
            ``local_epochs`` or ``local_steps``, and options of the optimizers such as ``lr`` or ``weight_decay``.
            Clients that step together have the same options.
        client_memory_limit: Bytes of tensors that all clients together keep in memory from round to round (their own
            models, moments, error feedback). What is beyond is put into a temporary folder as safetensors, that of the
            clients first which have not been drawn for longest. ``None``: no limit. Checkpoints hold all of it.
        summary: Print the partition's table when the fit begins, and a line with metrics and bytes when it ends.

    Raises:
        MisconfigurationException: If an argument is out of range, the training loader cannot be divided among clients,
            a trained parameter is in no optimizer, or another callback would read a client's weights as the
            global model's.

    Example:
        >>> from lightning_lowrank import Dirichlet, FedAvg, FederatedLoop
        >>> loop = FederatedLoop(
        ...     FedAvg(), clients=100, clients_per_round=10, partition=Dirichlet(0.3, min_samples=10), local_epochs=3
        ... )
    """

    def __init__(
        self,
        algorithm: Algorithm,
        clients: int | None = None,
        clients_per_round: int | float | None = None,
        partition: Partition | None = None,
        local_epochs: int = 1,
        local_steps: int | None = None,
        weighting: Literal["samples", "uniform"] | Callable[[Client], float] = "samples",
        buffers: BufferPolicy = "average",
        optimizer_state: Literal["reset", "keep"] = "reset",
        client_dropout: float = 0.0,
        sampling_weights: list[float] | None = None,
        participants: list[list[int]] | None = None,
        availability: list[float] | Callable[[int, int], bool] | None = None,
        labels: Callable[[Dataset], Sequence[Any]] | None = None,
        seed: int | None = None,
        summary: bool = True,
        execution: Literal["sequential", "vectorized", "auto"] = "sequential",
        clients_together: int | None = None,
        client_settings: dict[int, dict[str, Any]] | Callable[[int], Mapping[str, Any]] | None = None,
        client_memory_limit: int | None = None,
        personal_test: Literal["matched_labels"] | float | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.partition = IID() if partition is None else partition
        self.number_of_clients = clients
        self.clients_per_round = clients_per_round
        self.local_epochs = local_epochs
        self.local_steps = local_steps
        self.weighting = weighting
        self.buffers = buffers
        self.optimizer_state = optimizer_state
        self.client_dropout = client_dropout
        self.sampling_weights = sampling_weights
        self.participants = participants
        self.availability = availability
        self.labels = labels
        self.seed = default_seed() if seed is None else seed
        self.summary = summary
        self.execution = execution
        self.clients_together = clients_together
        self.client_settings = client_settings
        self.client_memory_limit = client_memory_limit
        self.personal_test = personal_test
        self._check_arguments()

        self.clients = Clients(())
        self.ledger = Ledger(0)

        self._processes: ClientParallelStrategy | None = None
        self._running = False
        self._restorers: list[Callable[[], None]] = []
        self._randomness = StepRandomness()
        self._forget()

    def _forget(self) -> None:
        self.indices: ClientIndices | None = None
        self.plan: RoundPlan | None = None
        self._planner: RoundPlanner
        self._loader: RoundLoader | None = None
        self._loader_epoch = 0
        self._server: Server | None = None
        self._schedulers: SchedulersPerClient
        self._restored: dict[str, Any] | None = None
        self._live: dict[str, Tensor] = {}
        self._trained: dict[str, Tensor] = {}
        self._workspace: Workspace = {}
        self._private: dict[str, Tensor] = {}
        self._common_options: list[list[dict[str, Any]]] = []
        self._labels: Tensor | None = None
        self._training_loader: DataLoader | None = None
        self._held_out: list[Tensor] = []
        self._evaluations: dict[str, tuple[Any, ClientEvaluation]] = {}
        self._stack: ClientStack | None = None
        self._acting: list[ActsOnStacks] = []
        self._vectorized = False
        self._together = 1
        self._shared: SharedRound | None = None
        self._hidden: dict[str, Tensor] | None = None
        self._round = -1
        self._position = 0
        self._slot = 0
        self._round_open = False
        self._client_open = False
        self._group_begins = True
        self._group_ends = True
        self._client_steps = 0
        self._processes_before = 1

    @property
    def state_key(self) -> str:
        """Name of this callback's state in checkpoints."""
        return "FederatedLoop"

    @property
    def server(self) -> Server:
        """The server of this fit.

        Raises:
            RuntimeError: If no fit has begun.
        """
        if self._server is None:
            raise RuntimeError("FederatedLoop has no server before a fit has begun.")
        return self._server

    def _check_arguments(self) -> None:
        def check(holds: bool, message: str) -> None:
            if not holds:
                raise MisconfigurationException(message)

        check(
            isinstance(self.algorithm, Algorithm),
            f"algorithm must be an Algorithm such as FedAvg(), got {self.algorithm!r}",
        )
        check(
            isinstance(self.partition, Partition),
            f"partition must be a Partition such as IID() or Dirichlet(0.3), got {self.partition!r}",
        )
        check(
            self.number_of_clients is None or self.number_of_clients >= 1,
            f"clients must be 1 or more, got {self.number_of_clients}",
        )
        share = self.clients_per_round
        if isinstance(share, float):
            check(
                0 < share <= 1,
                f"clients_per_round as a share must be in (0, 1], got {share}; give a count as an int",
            )
        elif share is not None:
            check(share >= 1, f"clients_per_round must be 1 or more, got {share}")
            check(
                self.number_of_clients is None or share <= self.number_of_clients,
                f"clients_per_round={share} is more than clients={self.number_of_clients}",
            )
        check(self.local_epochs >= 1, f"local_epochs must be 1 or more, got {self.local_epochs}")
        check(
            self.local_steps is None or self.local_steps >= 1,
            f"local_steps must be 1 or more, or None for local_epochs, got {self.local_steps}",
        )
        check(
            self.local_steps is None or self.local_epochs == 1,
            f"give local_epochs={self.local_epochs} or local_steps={self.local_steps}, not both",
        )
        check(
            callable(self.weighting) or self.weighting in ("samples", "uniform"),
            f"weighting must be 'samples', 'uniform' or a function of the client, got {self.weighting!r}",
        )
        check(
            self.buffers in ("average", "local", "reset"),
            f"buffers must be 'average', 'local' or 'reset', got {self.buffers!r}",
        )
        check(
            self.optimizer_state in ("reset", "keep"),
            f"optimizer_state must be 'reset' or 'keep', got {self.optimizer_state!r}",
        )
        check(
            self.execution in ("sequential", "vectorized", "auto"),
            f"execution must be 'sequential', 'vectorized' or 'auto', got {self.execution!r}",
        )
        check(
            self.clients_together is None or (self.clients_together >= 1 and self.execution != "sequential"),
            "clients_together must be 1 or more and goes with execution='vectorized' or 'auto', got"
            f" {self.clients_together} with execution={self.execution!r}",
        )
        check(
            self.personal_test in (None, "matched_labels")
            or (isinstance(self.personal_test, float) and 0 < self.personal_test < 1),
            f"personal_test must be 'matched_labels' or a share above 0 and below 1, got {self.personal_test!r}",
        )
        check(
            self.client_memory_limit is None or self.client_memory_limit >= 0,
            f"client_memory_limit must be a number of bytes, 0 or more, got {self.client_memory_limit}",
        )
        check(0 <= self.client_dropout < 1, f"client_dropout must be in [0, 1), got {self.client_dropout}")
        if self.sampling_weights is not None:
            check(
                all(math.isfinite(weight) and weight >= 0 for weight in self.sampling_weights),
                f"sampling_weights must be finite and not negative, got {self.sampling_weights}",
            )
        if isinstance(self.availability, Sequence):
            check(
                all(0 <= chance <= 1 for chance in self.availability),
                f"availability must be chances in [0, 1], got {self.availability}",
            )
        if self.participants is not None:
            drawing = {
                "clients_per_round": self.clients_per_round,
                "sampling_weights": self.sampling_weights,
                "availability": self.availability,
            }
            given = [name for name, value in drawing.items() if value is not None]
            check(not given, f"participants names every round's clients, so leave out {', '.join(given)}")
            for number, ids in enumerate(self.participants):
                check(len(ids) > 0, f"participants[{number}] is empty: every round needs at least one client")
                check(len(set(ids)) == len(ids), f"participants[{number}] names a client twice: {ids}")

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the training loader's place."""
        if stage != "fit":
            return
        self._processes = shared_by(trainer)
        check_callbacks(self, trainer, pl_module)
        self._restore_trainer()
        source = TrainLoaderSource(trainer)
        if not source.is_defined():
            raise MisconfigurationException(
                "there is no training loader to divide among clients: define train_dataloader() on the module or the"
                " datamodule, or pass one to trainer.fit(model, train_dataloaders)."
            )
        going_on = trainer.current_epoch > 0 and self._server is not None and self._server.module is pl_module
        if not going_on:
            self._forget()
        self._loader = None
        self._running = True

        settings: Any = trainer
        every_n_epochs, limit = settings.reload_dataloaders_every_n_epochs, trainer.limit_train_batches
        prepare = functools.partial(self._prepare, trainer, source, every_n_epochs, limit)
        self._prepared = prepare
        source.replace(_Rounds(prepare))
        if limit != 0:
            settings.limit_train_batches = 1.0

        def restore_trainer() -> None:
            source.restore()
            settings.limit_train_batches = limit

        accumulation = AccumulationPerClient(trainer, lambda: self._group_begins, lambda: self._group_ends)
        # A plain function: torch marks the hook, and a deepcopy of the module must not copy this callback.
        state_dict_hook = pl_module.register_state_dict_post_hook(lambda *state: self._show_global_state(*state))
        self._restorers = [restore_trainer, accumulation.restore, state_dict_hook.remove]
        if self._processes is None:
            steps: DirectSteps | PaddedEpochs = DirectSteps(trainer)
        else:
            end_step = functools.partial(self._end_step_without_batch, trainer)
            steps = PaddedEpochs(trainer, self._without_batch, end_step)
        self._restorers.append(steps.restore)

    def _restore_trainer(self) -> None:
        while self._restorers:
            self._restorers.pop()()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the trainer back as it was."""
        self._restore_trainer()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave the last global model in the module, and the trainer as it was."""
        self._running = False
        self._randomness.release()
        self._give_options_back(trainer)
        if self._stack is not None:
            self._close_stack()
            self.algorithm.configure(self.server, None)
        elif self._round_open and self._live and self._hidden is None:
            self._hide_client()
        self._restore_trainer()

    def _prepare(self, trainer: Any, source: TrainLoaderSource, every_n_epochs: int, limit: int | float) -> RoundLoader:
        """Return the round loader, dividing the training set when that has not been done."""
        renew = every_n_epochs and trainer.current_epoch - self._loader_epoch >= every_n_epochs
        if self._loader is not None and not renew:
            return self._loader
        loader = self._training_loader = check_loader(source.user_loader())
        if self.indices is None:
            self.indices = self._divide(loader.dataset)
        size = len(loader.dataset)  # type: ignore[arg-type]
        if size != self.indices.size:
            raise MisconfigurationException(
                f"the training set had {self.indices.size} samples when it was divided among the clients and has {size}"
                " now: keep its length, or set reload_dataloaders_every_n_epochs=0."
            )
        self._planner = self._make_planner(trainer, loader, limit)
        self._loader_epoch = trainer.current_epoch
        self._loader = RoundLoader(
            loader,
            self.indices,
            seed=self.seed,
            plan=lambda: self._plan_round(trainer.current_epoch),
            position=lambda: self._position,
            randomness=self._randomness,
            shuffle=shuffles(loader) and not trainer.overfit_batches,
            together=self._vectorized,
        )
        return self._loader

    def _divide(self, dataset: Dataset) -> ClientIndices:
        needed = self.partition.needs_labels or bool(self._private) or self.personal_test == "matched_labels"
        self._labels = labels = find_labels(dataset, self.labels) if needed else None
        indices = self.partition.split(dataset, self.number_of_clients, self.seed, labels)
        if isinstance(self.personal_test, float):
            indices, self._held_out = hold_out(indices, self.personal_test, self.seed)
        memories = {} if self._restored is None else self._restored["clients"]
        self.clients = Clients(cast(Sequence[int], indices.sizes), memories, self.client_memory_limit)
        if self._restored is not None and self._restored["partition"] != indices.digest():
            raise MisconfigurationException(
                f"the checkpoint's run divided the training set into {self._restored['number_of_clients']} clients in"
                f" another way than this one with its {len(self.clients)}: resume with the same partition, clients and"
                " seed."
            )
        if self.summary and (self._processes is None or self._processes.is_global_zero):
            Console().print(indices.summary(labels))
        return indices

    def _make_planner(self, trainer: Any, loader: DataLoader, limit: int | float) -> RoundPlanner:
        per_round = self.clients_in_round(len(self.clients))
        if self._vectorized and self._together == 1:
            fitting = clients_that_fit(trainer.lightning_module, trainer.strategy.root_device)
            restored = None if self._restored is None else self._restored["together"]
            fitting = min([fitting] if self._processes is None else self._processes.gather(fitting))
            self._together = self.clients_together or restored or fitting
        assert self.indices is not None
        truncate = int(trainer.fast_dev_run) or None
        samples = self.indices.sizes.numpy()
        once = batches_of(samples, loader)
        batches = np.where(once > 0, self.local_steps or self.local_epochs * once, 0)
        for client in self._clients_with_settings():
            own = self._settings_of(client)
            if "local_steps" in own or "local_epochs" in own:
                batches[client] = bool(once[client]) * (
                    own.get("local_steps") or own.get("local_epochs", 1) * once[client]
                )
        if truncate is None and isinstance(limit, int):
            batches = np.minimum(batches, limit)
        elif truncate is None:
            batches = np.where(batches > 0, np.maximum(1, (batches * limit).astype(np.int64)), 0)
        idle = np.flatnonzero((samples > 0) & (batches == 0)).tolist()
        if idle:
            rank_zero_warn(
                f"{len(idle)} clients hold fewer samples than batch_size={loader.batch_size} and drop_last=True leaves"
                f" them nothing to train on, so they are never drawn: {idle[:10]}{' ...' if len(idle) > 10 else ''}"
            )
        asked_idle = {client for ids in self.participants or () for client in ids if not batches[client]}
        if asked_idle:
            raise MisconfigurationException(
                f"participants names clients that have nothing to train on: {sorted(asked_idle)}"
            )
        return RoundPlanner(
            seed=self.seed,
            batches=batches,
            per_round=per_round,
            sampling_weights=self.sampling_weights,
            participants=self.participants,
            availability=self.availability,
            failure_probability=self.client_dropout,
            truncate=truncate,
            together=self._together,
            samples=samples,
            kind=self._kind,
            process=trainer.global_rank,
            processes=trainer.world_size,
        )

    def clients_in_round(self, count: int) -> int:
        """Return how many of so many clients a round draws.

        Raises:
            MisconfigurationException: If an argument names more clients than there are, or is a list of another length.
        """
        for name, values in (("sampling_weights", self.sampling_weights), ("availability", self.availability)):
            if isinstance(values, Sequence) and len(values) != count:
                raise MisconfigurationException(f"{name} has {len(values)} entries for {count} clients")
        unknown = {client for ids in self.participants or () for client in ids if not 0 <= client < count}
        if unknown:
            raise MisconfigurationException(
                f"participants names {sorted(unknown)}, and clients go from 0 to {count - 1}"
            )
        share = self.clients_per_round
        if share is None:
            return count
        if isinstance(share, float):
            return max(1, round(share * count))
        if share > count:
            raise MisconfigurationException(f"clients_per_round={share} is more than the partition's {count} clients")
        return share

    def _clients_with_settings(self) -> Sequence[int]:
        if callable(self.client_settings):
            return range(len(self.clients))
        unknown = [client for client in self.client_settings or () if not 0 <= client < len(self.clients)]
        if unknown:
            raise MisconfigurationException(
                f"client_settings names client {unknown[0]}, and clients go from 0 to {len(self.clients) - 1}"
            )
        return sorted(self.client_settings or ())

    def _settings_of(self, client: int) -> dict[str, Any]:
        given = self.client_settings
        settings = dict(given(client) if callable(given) else (given or {}).get(client, {}))
        for name in ("local_epochs", "local_steps"):
            if name in settings and not (isinstance(settings[name], int) and settings[name] >= 1):
                raise MisconfigurationException(
                    f"client_settings: {name} of client {client} must be 1 or more, got {settings[name]!r}"
                )
        return settings

    def _options_of(self, client: int) -> dict[str, Any]:
        """Return the optimizers' options that are a client's own."""
        return {
            name: value
            for name, value in self._settings_of(client).items()
            if name not in ("local_epochs", "local_steps")
        }

    def _take_options(self, trainer: pl.Trainer, client: int) -> None:
        options = self._options_of(client)
        if not options:
            return
        for name in options:
            if any(name not in group for optimizer in trainer.optimizers for group in optimizer.param_groups):
                known = sorted(set(trainer.optimizers[0].param_groups[0]) - {"params"})
                raise MisconfigurationException(
                    f"client_settings of client {client}: the optimizer has no option {name!r}, but {known}"
                )
        if "lr" in options and any(config.interval == "step" for config in trainer.lr_scheduler_configs):
            raise MisconfigurationException(
                f"client_settings of client {client} sets lr={options['lr']}, which a scheduler that steps on each"
                " batch would change: leave out the one or the other."
            )
        self._common_options = [
            [{name: group[name] for name in options} for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ]
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group.update(options)

    def _give_options_back(self, trainer: pl.Trainer) -> None:
        for optimizer, groups in zip(trainer.optimizers, self._common_options, strict=False):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)
        self._common_options = []

    def _kind(self, client: int, round_number: int) -> tuple[Any, ...]:
        """Return what clients that step together have in common: their method's kind, their kept moments' age."""
        party = self.clients[client]
        options = tuple(sorted(self._options_of(client).items()))
        return self.algorithm.kind(self.server, party, round_number), age(party.memory), options

    def _current_plan(self) -> RoundPlan:
        assert self.plan is not None, "Lightning asks for the loader's length, which makes the plan, before any batch"
        return self.plan

    def _plan_round(self, number: int) -> RoundPlan:
        # Lightning asks for the length once more when the fit is over, and there is no next round to plan then.
        if self.plan is None or (self.plan.round != number and self._running):
            restored = None if self._restored is None else self._restored["cohorts"]
            self.plan = self._planner.plan(number, restored)
            if self._round != number:
                self._round, self._position, self._slot = number, 0, 0
            elif self._position and not self._round_open and max(self._processes_before, self._planner.processes) > 1:
                # The round is over, and other processes may have had other steps in it.
                self._position, self._slot = self.plan.total, len(self.plan.cohorts)
        return self.plan

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the optimizers, divide the training set, and let the algorithm look at the module."""
        check_optimizers(trainer, pl_module)
        for note in notes(pl_module, self.buffers):
            rank_zero_warn(note)
        self._private = {
            name: buffer for name, buffer in pl_module.named_buffers() if name.split(".")[-1] == "present_classes"
        }
        self._check_local_update(trainer, pl_module)
        if self._server is None:
            self._server = Server(pl_module, self.seed, self.buffers)
            self.ledger = Ledger(dense_payload(pl_module).nbytes)
        self._server.optimizers = trainer.optimizers
        self._acting = [callback for callback in cast(Any, trainer).callbacks if isinstance(callback, ActsOnStacks)]
        self._choose_execution(trainer, pl_module)
        self._prepared()
        if self._restored is not None:
            self.ledger.load_state_dict(self._restored["ledger"])
        self._check_processes(trainer)
        self._server.clients = len(self.clients)
        self._schedulers = SchedulersPerClient(trainer)
        self.algorithm.setup(self._server)

    def _check_processes(self, trainer: pl.Trainer) -> None:
        """Refuse processes that would not do the same, and say when there are too many."""
        if self._processes is None:
            return
        assert self.indices is not None
        mine = {"seed": self.seed, "method": repr(type(self.algorithm)), "partition": self.indices.digest()}
        for rank, theirs in enumerate(self._processes.gather(mine)):
            for name, value in theirs.items():
                if value != mine[name]:
                    raise MisconfigurationException(
                        f"the {name} of process {rank} is another than that of process {trainer.global_rank}: give all"
                        " processes the same data and arguments, with a seed for whatever is drawn."
                    )
        idle = trainer.world_size - self._planner.per_round
        if idle > 0 and trainer.is_global_zero:
            Console().print(
                f"client_parallel: {trainer.world_size} processes share rounds of {self._planner.per_round} clients, so"
                f" that {idle} of them have nothing to train",
                highlight=False,
                soft_wrap=True,
            )

    def _check_local_update(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if leaves_alone(self.algorithm, "local_update"):
            return
        method = type(self.algorithm).__name__
        if not module.automatic_optimization:
            raise MisconfigurationException(
                f"{method} steps the optimizer in its own way, which a module that optimizes manually does not let it:"
                " use automatic optimization."
            )
        if trainer.accumulate_grad_batches != 1:
            raise MisconfigurationException(
                f"{method} steps the optimizer in its own way on each batch:"
                f" set accumulate_grad_batches=1, not {trainer.accumulate_grad_batches}."
            )

    def _choose_execution(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        reason = "" if self.execution == "sequential" else why_not_vectorized(trainer, module)
        if self.execution == "vectorized" and reason:
            raise MisconfigurationException(
                f"execution='vectorized' is not possible: {reason}. Use execution='sequential'."
            )
        if self.execution != "auto":
            self._vectorized = self.execution == "vectorized"
        elif self._restored is not None:
            self._vectorized = self._restored["execution"] == "vectorized"
        elif not self._vectorized:
            self._prepared()
            if not reason:
                self._vectorized, reason = self._try_both(trainer, module)
            if self._processes is not None:
                self._vectorized, reason = self._processes.broadcast((self._vectorized, reason))
            if trainer.is_global_zero:
                way = "clients step together" if self._vectorized else "clients train one after another"
                Console().print(f"execution='auto': {way}; {reason}", highlight=False, soft_wrap=True)
        if self._vectorized:
            self._loader = None

    def _try_both(self, trainer: Any, module: pl.LightningModule) -> tuple[bool, str]:
        """Return whether clients are faster together, by some steps of the first round that leave no trace."""
        together = self.clients_together or clients_that_fit(module, trainer.strategy.root_device)
        plan = dataclasses.replace(self._planner, together=max(2, together), process=0, processes=1).plan(0)
        assert self._loader is not None
        self._randomness.open()
        try:
            seconds = try_both(trainer, module, plan.cohorts[0], self._loader)
        except MisconfigurationException as error:
            return False, str(error)
        finally:
            self._randomness.release()
        milliseconds = [f"{1000 * value:.3g} ms" for value in seconds]
        return seconds[1] < seconds[0], f"a client's step takes {milliseconds[0]} alone and {milliseconds[1]} together"

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on where the checkpoint was taken."""
        self._take_over_updates(pl_module)
        if self._restored is None:
            return
        state, self._restored = self._restored, None
        on_device = functools.partial(move_data_to_device, device=pl_module.device)
        server = state["server"]
        self.server.round = server["round"]
        self.server.state = on_device(server["state"])
        self.server.initial_buffers = on_device(server["initial_buffers"])
        self.server.memory = on_device(server["memory"])
        self.server.mean.load_state_dict(server["mean"], pl_module.device)
        for client in self.clients.keeping():
            client.memory.update(on_device(client.memory))
        self._workspace = on_device(state["workspace"])
        self._schedulers.load_state_dict(state["schedulers"])
        if self._client_open:
            cohort = self._current_plan().cohorts[self._slot]
            clients = self._open_clients(cohort)
            self.algorithm.configure(self.server, clients[0])
            if not self._vectorized:
                clients[0].workspace = self._workspace
                install(self._present_classes(clients[0]), self._private)
        if self._round_open and self._vectorized:
            self._adopt_live_values()
            if self._client_open:
                self._stack = self._make_stack(trainer, clients)
                self._stack.resume(state["client_values"], cohort.active(max(0, self._step_in_cohort() - 1)))
        elif self._round_open:
            self._adopt_live_values()
            install(state["client_values"], self._live)
        elif self._position:
            forget_batches(trainer)

    def _take_over_updates(self, module: pl.LightningModule) -> None:
        """Let the algorithm train on a batch in its own way, where it has one."""
        if leaves_alone(self.algorithm, "local_update"):
            return
        step = module.optimizer_step

        def optimizer_step(*arguments: Any, **keywords: Any) -> None:
            update = functools.partial(step, *arguments, **keywords)
            self.algorithm.local_update(self.server, self._local_step(), update)

        vars(module)["optimizer_step"] = optimizer_step
        self._restorers.append(functools.partial(vars(module).pop, "optimizer_step"))

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Show the gradients to the algorithm."""
        if self._stack is not None:
            for callback in self._acting:
                callback.on_before_cohort_step(pl_module, self._stack.leaves)
        if not leaves_alone(self.algorithm, "before_step"):
            self.algorithm.before_step(self.server, self._local_step())

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """At a client's first batch, make the module that client."""
        plan = self._current_plan()
        if not self._round_open:
            self._begin_round(trainer, plan)
        cohort, step = plan.cohorts[self._slot], self._step_in_cohort()
        if step == 0:
            self._begin_cohort(trainer, cohort)
        if self._stack is not None:
            active = cohort.active(step)
            self._keep_moments(trainer, cohort, self._stack, active)
            self._stack.narrow(active)
        group = trainer.accumulate_grad_batches
        self._group_begins = step % group == 0
        self._group_ends = (step + 1) % group == 0 or step + 1 == cohort.steps

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At a client's last batch, collect it; at the round's last, aggregate."""
        self._randomness.close()
        plan = self._current_plan()
        active = plan.cohorts[self._slot].active(self._step_in_cohort())
        if self._shared is None:
            self._client_steps += active
        else:
            self._shared.client_steps += active
            self._shared.logged_steps += self._group_ends
            if self._position == 0:
                self._shared.end_first_step(plan.leader)
        self._position += 1
        if self._position == plan.ends[self._slot]:
            self._end_cohort(trainer)
            self._slot += 1
        if self._position == plan.total:
            self._aggregate(trainer)

    def _without_batch(self) -> bool:
        """Return whether this process has trained its part of the round, which others have not."""
        plan = self._current_plan()
        return plan.trained <= self._position < plan.total

    def _end_step_without_batch(self, trainer: pl.Trainer) -> None:
        """Do in a step without a batch what processes do together."""
        plan = self._current_plan()
        if not self._round_open:
            self._begin_round(trainer, plan)
        assert self._shared is not None
        if self._position == 0:
            self._shared.end_first_step(plan.leader)
        self._position += 1
        if self._position == plan.total:
            self._aggregate(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the global model: the new one if the round is over, the last one inside a round."""
        self._randomness.release()
        if not self._round_open or trainer.sanity_checking:
            return
        if stops_now(trainer):
            self._aggregate(trainer)
        elif self._vectorized:
            self.algorithm.configure(self.server, None)
        else:
            self._hide_client()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on with the client that was interrupted, or evaluate clients' own models."""
        if self._server is None or trainer.sanity_checking:
            return
        if self._client_open:
            open_client = self.clients[self._current_plan().cohorts[self._slot].clients[0]]
            self.algorithm.configure(self.server, open_client)
        if self._hidden is not None:
            install(self._hidden, {**self._live, **self._private})
            self._hidden = None
        elif not self._round_open:
            self._evaluate(trainer, pl_module, "validate")

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Test each client's own model, after a fit with the same callback."""
        if self._server is not None and self._server.module is pl_module:
            self._evaluate(trainer, pl_module, "test")

    def _evaluate(self, trainer: Any, module: pl.LightningModule, stage: Literal["validate", "test"]) -> None:
        """Log how clients' own models do on their own test data, and further global models on all of it."""
        loader = trainer.val_dataloaders if stage == "validate" else trainer.test_dataloaders
        logged: dict[str, float] = {}
        if self.personal_test is not None:
            source = loader if self.personal_test == "matched_labels" else self._training_loader
            evaluation = self._evaluation(f"clients {stage}", source, lambda: self._test_indices(loader))

            def personal(client: int) -> Mapping[str, Tensor]:
                return self.algorithm.personal_state(self.server, self.clients[client])

            for name, values in self._run(evaluation, trainer, module, stage, personal).items():
                logged.update(figures(values, name))
        variants = self.algorithm.variants(self.server)
        if variants:
            names, states = list(variants), list(variants.values())
            (one,) = loader if isinstance(loader, (list, tuple)) else (loader,)
            everything = [torch.arange(len(one.dataset))] * len(names)
            evaluation = self._evaluation(f"variants {stage}", loader, lambda: everything)
            for name, values in self._run(evaluation, trainer, module, stage, states.__getitem__).items():
                logged.update({f"{name}/{names[number]}": value for number, value in values.items()})
        if logged:
            log_figures(trainer, logged)
        self.clients.forget_idle()

    def _run(
        self,
        evaluation: ClientEvaluation,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        stage: Literal["validate", "test"],
        states: Callable[[int], Mapping[str, Tensor]],
    ) -> dict[str, dict[int, float]]:
        """Run an evaluation, of which each process that takes part in rounds does a share."""
        processes = trainer.strategy
        if not isinstance(processes, ClientParallelStrategy):
            return evaluation.run(trainer, module, stage, states)
        share = set(evaluation.clients[processes.global_rank :: processes.world_size])
        parts = processes.gather(evaluation.run(trainer, module, stage, states, share))
        names = {name: None for part in parts for name in part}
        return {name: dict(sorted(entry for part in parts for entry in part.get(name, {}).items())) for name in names}

    def _evaluation(self, name: str, loader: Any, indices: Callable[[], list[Tensor]]) -> ClientEvaluation:
        """Return the evaluation that was made for this loader, or make one."""
        if name not in self._evaluations or self._evaluations[name][0] is not loader:
            self._evaluations[name] = loader, ClientEvaluation(loader, indices(), seed=self.seed)
        return self._evaluations[name][1]

    def _test_indices(self, loader: Any) -> list[Tensor]:
        if self.personal_test != "matched_labels":
            return self._held_out
        (one,) = loader if isinstance(loader, (list, tuple)) else (loader,)
        assert self.indices is not None
        assert self._labels is not None
        return matched_labels(self.indices, self._labels, find_labels(one.dataset, self.labels))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Aggregate a round that was cut short, and log the round's figures."""
        self._randomness.release()
        self._aggregate(trainer, between_steps=True)
        if self._processes is not None:
            pool_training_results(trainer, self._processes)
        plan = self._current_plan()
        logged = {
            **self.ledger.metrics(),
            "federated/clients": len(plan.clients),
            "federated/failed": len(plan.failed),
            "federated/samples": int(self._planner.samples[list(plan.clients)].sum()),
            "federated/client_steps": self._client_steps,
        }
        log_figures(trainer, logged)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Plan no further round, and say in a line what the rounds came to."""
        self._running = False
        if self.summary and trainer.is_global_zero:
            validated = [
                f"{name} {value:.4f}" for name, value in trainer.callback_metrics.items() if name.startswith("val")
            ]
            traffic = self.ledger.metrics()
            Console().print(
                f"after {trainer.current_epoch} rounds: {', '.join([*validated, ''])}"
                f"{traffic['comm/total_up_bytes'] / 1e6:.2f} MB up, {traffic['comm/total_down_bytes'] / 1e6:.2f} MB"
                f" down, {traffic['comm/ratio']:.2%} of dense FedAvg",
                highlight=False,
                soft_wrap=True,
            )

    def _begin_round(self, trainer: pl.Trainer, plan: RoundPlan) -> None:
        self.server.round = plan.round
        self._adopt_live_values()
        self._round_open = True
        self.ledger.begin_round()
        self.algorithm.begin_round(self.server)
        self._schedulers.begin_round()
        for client in plan.failed:
            self.ledger.down(self.algorithm.broadcast(self.server, self.clients[client]).nbytes)
        if self.algorithm.every_client_listens(self.server):
            idle = np.count_nonzero(self._planner.batches) - len(plan.clients) - len(plan.failed)
            broadcast = self.algorithm.broadcast(self.server, self.clients[plan.clients[0]])
            self.ledger.idle(int(idle) * broadcast.nbytes)
        if self._processes is not None:
            counts = StepCounts(trainer)
            self._shared = SharedRound(self._processes, self.algorithm, self.server, self.ledger, counts)

    def _adopt_live_values(self) -> None:
        self._live = trained_tensors(self.server.module)
        self._trained = {name: value for name, value in self._live.items() if value.requires_grad}
        self.server.adopt(self._live, shown=self.algorithm.global_state(self.server))

    def _step_in_cohort(self) -> int:
        plan = self._current_plan()
        return self._position - (plan.ends[self._slot] - plan.cohorts[self._slot].steps)

    def _begin_cohort(self, trainer: pl.Trainer, cohort: Cohort) -> None:
        clients = self._open_clients(cohort)
        self.algorithm.configure(self.server, clients[0])
        if self._vectorized:
            self._stack = self._make_stack(trainer, clients)
            self._begin_together(clients, self._stack)
            self._workspace = stack_workspaces([client.workspace for client in clients])
        else:
            self._begin_client(clients[0], self._live)
            install(self._present_classes(clients[0]), self._private)
            self._workspace = clients[0].workspace
        begin_optimizers(trainer.optimizers, [client.memory for client in clients], self._vectorized)
        self._schedulers.begin_client()
        self._take_options(trainer, cohort.clients[0])
        self._client_open = True

    def _make_stack(self, trainer: pl.Trainer, clients: Sequence[Client]) -> ClientStack:
        present = [self._present_classes(client) for client in clients]
        private = {name: torch.stack([each[name] for each in present]) for name in self._private}
        return ClientStack(trainer, trainer.lightning_module, self._live, len(clients), private)

    def _present_classes(self, client: Client) -> dict[str, Tensor]:
        """Return, for the module's ``present_classes``, which classes the client has samples of."""
        if not self._private:
            return {}
        assert self._labels is not None
        assert self.indices is not None
        own = self._labels[self.indices[client.id]].unique()
        return {
            name: torch.zeros(len(buffer), dtype=torch.bool).index_fill_(0, own, True).to(buffer.device)
            for name, buffer in self._private.items()
        }

    def _open_clients(self, cohort: Cohort) -> list[Client]:
        clients = [self.clients[number] for number in cohort.clients]
        for client, steps in zip(clients, cohort.batches, strict=True):
            client.steps, client.workspace = steps, {}
        return clients

    def _keep_moments(self, trainer: pl.Trainer, cohort: Cohort, stack: ClientStack, active: int) -> None:
        """Keep the optimizers' states of clients from ``active`` on, which have made their last step."""
        if self.optimizer_state == "keep":
            for place in range(active, stack.active):
                keep_optimizers(trainer.optimizers, self.clients[cohort.clients[place]].memory, place)

    def _local_step(self) -> LocalStep:
        """Return what the algorithm sees of the current step."""
        cohort, number = self._current_plan().cohorts[self._slot], self._step_in_cohort()
        if self._stack is None:
            steps = torch.tensor(cohort.steps, dtype=torch.float64)
            buffers = {name: self._live[name] for name in self.server.initial_buffers}
            return LocalStep(self._trained, buffers, self._workspace, number, steps, together=False)
        active = cohort.active(number)
        device = self._stack.device
        steps = torch.tensor(cohort.batches[:active], dtype=torch.float64, device=device)
        buffers = {name: self._stack.values[name][:active] for name in self.server.initial_buffers}
        workspace = part_of(self._workspace, slice(active))
        return LocalStep(self._stack.leaves, buffers, workspace, number, steps, together=True)

    def _begin_together(self, clients: Sequence[Client], stack: ClientStack) -> None:
        if not leaves_alone(self.algorithm, "broadcast", "begin", "global_state"):
            for place, client in enumerate(clients):
                self._begin_client(client, stack.client(place))
            return
        # All are sent the global model, from whose values the stack was made.
        self.ledger.down(self.algorithm.broadcast(self.server, clients[0]).nbytes, len(clients))
        if self.buffers != "average":
            for place, client in enumerate(clients):
                self._begin_buffers(client, stack.client(place))

    def _begin_client(self, client: Client, model: Mapping[str, Tensor]) -> None:
        payload = self.algorithm.broadcast(self.server, client)
        self.ledger.down(payload.nbytes)
        self.algorithm.begin(self.server, client, payload.delivered(), model)
        self._begin_buffers(client, model)

    def _begin_buffers(self, client: Client, model: Mapping[str, Tensor]) -> None:
        if self.buffers == "reset":
            install(self.server.initial_buffers, model)
        elif self.buffers == "local":
            install(client.memory.get("buffers", self.server.initial_buffers), model)

    def _end_cohort(self, trainer: pl.Trainer) -> None:
        cohort = self._current_plan().cohorts[self._slot]
        if self._stack is not None:
            self._keep_moments(trainer, cohort, self._stack, 0)
            self._end_together([self.clients[number] for number in cohort.clients], self._stack)
            self._close_stack()
        else:
            client = self.clients[cohort.clients[0]]
            self._end_client(client, self._live)
            if self.optimizer_state == "keep":
                keep_optimizers(trainer.optimizers, client.memory)
        self._workspace = {}
        self._give_options_back(trainer)
        self._schedulers.end_client(cohort.steps)
        self._client_open = False

    def _close_stack(self) -> None:
        assert self._stack is not None
        self._stack.close()
        self._stack = None

    def _end_together(self, clients: Sequence[Client], stack: ClientStack) -> None:
        if self._shared is not None or not leaves_alone(self.algorithm, "end", "receive"):
            for place in sorted(range(len(clients)), key=lambda place: clients[place].id):
                clients[place].workspace = part_of(self._workspace, place)
                self._end_client(clients[place], stack.client(place))
            return
        payload = self.algorithm.end(self.server, clients[0], stack.client(0))
        self.ledger.up(payload.nbytes, len(clients))
        arrived = {name: stack.values[name] for name in payload.tensors}
        self.server.mean.add_stacks(arrived, [self._weight(client) for client in clients])
        for place, client in enumerate(clients):
            if self.buffers == "local":
                self._keep_buffers(client, stack.client(place))
            client.workspace = {}

    def _end_client(self, client: Client, model: Mapping[str, Tensor]) -> None:
        payload = self.algorithm.end(self.server, client, model)
        self.ledger.up(payload.nbytes)
        receive = (
            functools.partial(self.algorithm.receive, self.server) if self._shared is None else self._shared.collect
        )
        receive(client, payload.delivered(), self._weight(client))
        if self.buffers == "local":
            self._keep_buffers(client, model)
        client.workspace = {}

    def _keep_buffers(self, client: Client, model: Mapping[str, Tensor]) -> None:
        client.memory["buffers"] = {name: model[name].clone() for name in self.server.initial_buffers}

    def _weight(self, client: Client) -> float:
        if self.weighting == "samples":
            return client.samples
        if self.weighting == "uniform":
            return 1.0
        assert callable(self.weighting)
        weight = self.weighting(client)
        if not (math.isfinite(weight) and weight > 0):
            raise MisconfigurationException(
                f"weighting gave {weight} for client {client.id}: a weight must be finite and more than 0."
            )
        return float(weight)

    def _aggregate(self, trainer: pl.Trainer, between_steps: bool = False) -> None:
        if not self._round_open:
            return
        if self._client_open:
            self._end_cohort(trainer)
        if self._shared is not None:
            self._shared.end(self.clients, self._schedulers, between_steps)
            self._client_steps += self._shared.client_steps
            self._shared = None
        self.algorithm.aggregate(self.server)
        self.server.mean = WeightedMean()
        self._show_global()
        self._schedulers.end_round()
        self._round_open = False
        self.clients.forget_idle()

    def _hide_client(self) -> None:
        self._hidden = {name: tensor.detach().clone() for name, tensor in {**self._live, **self._private}.items()}
        self._show_global()

    def _show_global(self) -> None:
        show_global(self.algorithm, self.server, self._live)
        for buffer in self._private.values():
            buffer.fill_(True)

    def _show_global_state(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        """Put the global model into a state dict that is taken inside a round (a hook of `torch.nn.Module`)."""
        if self._round_open and self._server is not None and module is self._server.module:
            for name, value in self.algorithm.global_state(self.server).items():
                if prefix + name in state_dict:
                    state_dict[prefix + name] = value

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs, as tensors and plain Python."""
        if self._server is None or self.indices is None:
            return {}
        if self._shared is not None:
            raise MisconfigurationException(
                "a checkpoint inside a round would hold the client of one process only: save between rounds, as"
                " ModelCheckpoint does, or set devices=1."
            )
        server = self.server
        shown = self.algorithm.global_state(server)
        interrupted = self._live if self._hidden is None else self._hidden
        if self._stack is not None:
            interrupted = self._stack.values
        return {
            "execution": "vectorized" if self._vectorized else "sequential",
            "together": self._together,
            "algorithm": type(self.algorithm).__name__,
            "seed": self.seed,
            "number_of_clients": len(self.clients),
            "partition": self.indices.digest(),
            "round": self._round,
            "processes": 1 if self._processes is None else self._processes.world_size,
            "position": self._position,
            "slot": self._slot,
            "round_open": self._round_open,
            "client_open": self._client_open,
            "client_steps": self._client_steps,
            "group_ends": self._group_ends,
            "client_values": {name: interrupted[name].detach().clone() for name in self._live}
            if self._round_open
            else {},
            "server": {
                "round": server.round,
                "state": {name: value for name, value in server.state.items() if shown.get(name) is not value},
                "initial_buffers": server.initial_buffers,
                "memory": server.memory,
                "mean": server.mean.state_dict(),
            },
            "cohorts": [list(cohort.clients) for cohort in self.plan.cohorts]
            if self.plan and self._round_open
            else None,
            "common_options": self._common_options,
            "workspace": self._workspace if self._client_open else {},
            "clients": {client.id: client.memory for client in self.clients.keeping()},
            "ledger": self.ledger.state_dict(),
            "schedulers": self._schedulers.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take `state_dict`'s result, to be installed when the fit begins."""
        if not state_dict:
            return
        execution = state_dict["execution"] if self.execution == "auto" else self.execution
        for name, mine in (
            ("algorithm", type(self.algorithm).__name__),
            ("seed", self.seed),
            ("execution", execution),
        ):
            if state_dict[name] != mine:
                raise MisconfigurationException(
                    f"the checkpoint's run had {name}={state_dict[name]!r} and this one has {mine!r}: resume with the"
                    " same."
                )
        processes = 1 if self._processes is None else self._processes.world_size
        if state_dict["round_open"] and processes > 1:
            raise MisconfigurationException(
                f"the checkpoint was saved inside a round of a single process, and this run has {processes}: resume"
                " from one that was saved between rounds, or set devices=1."
            )
        self._restored = state_dict
        self._processes_before = state_dict.get("processes", 1)
        self._round = state_dict["round"]
        self._position = state_dict["position"]
        self._slot = state_dict["slot"]
        self._round_open = state_dict["round_open"]
        self._client_open = state_dict["client_open"]
        self._client_steps = state_dict["client_steps"]
        self._common_options = state_dict["common_options"]
        self._group_ends = state_dict["group_ends"]


class _Rounds:
    """Stands in the trainer for the training loader, which can't be asked for before the fit begins."""

    def __init__(self, loader: Callable[[], RoundLoader]) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader())

    def state_dict(self) -> dict[str, Any]:
        """Tell Lightning that this loader can resume; the position is part of `FederatedLoop`'s own state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing: see `state_dict`."""
