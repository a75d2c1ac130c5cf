"""Multi-device simulation: processes that train different clients of the same round.

Every process holds the same server and plans the same round. Each trains its share of the round's clients. At a round's
end the processes exchange the clients' messages, so that every process has the same server again. `FederatedLoop` uses
a `SharedCoordinator` if the trainer's strategy is `ClientParallelStrategy`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint, SpikeDetection
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console
from torch import Tensor
from torch.nn.parameter import is_lazy
from torchmetrics import Metric
from typing_extensions import override

from lightning_lowrank.federated.client_optimizers import ClientOptimizers
from lightning_lowrank.federated.client_states import flatten_state, unflatten_state
from lightning_lowrank.federated.coordinator import Coordinator
from lightning_lowrank.federated.data.planner import RoundPlan
from lightning_lowrank.federated.exchange import Parts
from lightning_lowrank.federated.fingerprint import differences, is_within, shorten
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.protocols import inherits
from lightning_lowrank.federated.stages import Arrival
from lightning_lowrank.federated.state import PRIVACY_ACCOUNT, ClientInfo
from lightning_lowrank.internals.lightning import (
    StepCounts,
    checkpoint_schedule,
    evaluating_everything,
    synchronizes_layers,
    validation_seconds,
)
from lightning_lowrank.internals.replaced import replaced

_ALIGNMENT = 16


class ClientParallelStrategy(DDPStrategy):
    """Trains the clients of each round on several devices, with `FederatedLoop`.

    Each process has one device, and processes are started as by Lightning's own ``DDPStrategy``: by the trainer, by
    ``torchrun`` or by SLURM, on one or several machines. Clients are divided by their numbers of batches, the longest
    first, each to the process with the least to do. No gradients are averaged. A run's weights equal those of a single
    process to rounding, the ledger exactly; so do checkpoints, from which a run with another number of processes can
    continue.

    - Weights are those of the first process when the fit begins, as they were before and after ``setup``.
    - Processes make equally many turns in a round, for Lightning synchronises them once a turn: a process that has
      trained its clients takes turns in which nobody trains. The module's and callbacks' hooks around batches, and
      ``training_step``, may not communicate. A callback that sets ``should_stop`` inside a round must do so in every
      process in the same turn, as Lightning's own callbacks do.
    - When a round has ended, ``global_step`` and the loggers' step are those of a single process. Inside a round they
      are the process's own. If clients step together, each process stacks its own clients, and counts the steps of
      these chunks.
    - ``max_steps``, ``min_steps``, a ``val_check_interval`` in time, checkpoints inside a round, also of a fit that
      fails, and `SpikeDetection` are refused.
    - Figures of an epoch, `torchmetrics.Metric` objects included, are those of all processes' clients; figures of a
      step are those of the first process. ``sync_dist`` has no effect.
    - Validation, test and prediction loaders are not divided: every process evaluates all samples, and has the same
      figures. Loggers and checkpoints are written by the first process.

    Args:
        accelerator: As the trainer sets it.
        parallel_devices: As the trainer sets them.
        cluster_environment: As the trainer finds it.
        checkpoint_io: How checkpoints are written; Lightning's own by default.
        precision_plugin: As the trainer sets it.
        process_group_backend: Backend of `torch.distributed`: by default ``"nccl"`` on CUDA, ``"gloo"`` elsewhere.
        timeout: How long a process waits for the others: longer than any client, or chunk of clients, trains. By
            default 12 hours.

    Raises:
        MisconfigurationException: In ``fit`` without `FederatedLoop`, or with the trainer's ``sync_batchnorm``.

    Example:
        >>> import lightning.pytorch as pl
        >>> import lightning_lowrank
        >>> trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="client_parallel", logger=False)
        >>> type(trainer.strategy).__name__
        'ClientParallelStrategy'
    """

    steps_alone = True
    """Says to `LocalTraining` that a step is made as in a single process."""

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(hours=12),
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._restore, self._evaluation = ExitStack(), ExitStack()

    def setup_environment(self) -> None:
        """Connect the processes, and broadcast the first one's weights, so that `LowRank` converts equal weights."""
        super().setup_environment()
        self._send_weights()

    def setup(self, trainer: pl.Trainer) -> None:
        """Check the trainer's task, and set up the module and the optimizers."""
        self._restore.close()
        self._restore.enter_context(evaluating_everything(trainer))
        self._restore.enter_context(warnings.catch_warnings())
        # ``sync_dist`` has no effect with this strategy.
        warnings.filterwarnings("ignore", message=r"It is recommended to use `self.log\(.*sync_dist=True")
        if trainer.state.fn == TrainerFn.FITTING:
            if all(callback.state_key != "FederatedLoop" for callback in vars(trainer)["callbacks"]):
                raise MisconfigurationException(
                    "ClientParallelStrategy divides a FederatedLoop's clients among processes, and averages no"
                    " gradients: put a FederatedLoop into `callbacks`, or use strategy='ddp'."
                )
            if synchronizes_layers(self):
                raise MisconfigurationException(
                    "sync_batchnorm=True would mix the statistics of different clients, which ClientParallelStrategy"
                    " trains at the same time: set sync_batchnorm=False."
                )
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Broadcast the first process's weights; nothing is wrapped in DDP, because gradients are not exchanged."""
        self._send_weights()

    @torch.no_grad()
    def _send_weights(self) -> None:
        if self.world_size == 1 or self.lightning_module is None:
            return
        module = self.lightning_module
        for tensor in chain(module.parameters(), module.buffers()):
            if not (is_lazy(tensor) or tensor.is_meta):
                sent = tensor.detach().to(self.root_device).contiguous()
                torch.distributed.broadcast(sent, src=0)
                tensor.copy_(sent)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Return ``tensor`` unchanged: `FederatedLoop` combines logs, and evaluations are equal in all processes."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all processes decided ``True``; with ``all=False``, whether any did."""
        votes = int(self.sum(torch.tensor(int(decision), device=self.root_device)))
        return votes == self.world_size if all else votes > 0

    def gather(self, value: Any) -> list[Any]:
        """The picklable ``value`` of every process, in order of rank."""
        found: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            torch.distributed.all_gather_object(found, value)
        return found

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of ``tensor`` over all processes, bitwise equal in all of them."""
        total = tensor.clone()
        if self.world_size > 1 and total.numel():
            torch.distributed.all_reduce(total)
        return total

    def send(self, tensors: Sequence[Tensor], layout: Layout, source: int) -> list[Tensor]:
        """Broadcast tensors from the process of rank ``source``; ``layout`` is their layout, known to all."""
        if not layout:
            return []
        ends, size = [], 0
        for shape, dtype, _ in layout:
            ends.append((size, size + shape.numel() * dtype.itemsize))
            size = -(-ends[-1][1] // _ALIGNMENT) * _ALIGNMENT
        buffer = torch.zeros(max(size, 1), dtype=torch.uint8, device=self.root_device)
        if source == self.global_rank:
            for tensor, (begin, end) in zip(tensors, ends, strict=True):
                buffer[begin:end].copy_(tensor.detach().contiguous().flatten().view(torch.uint8))
        torch.distributed.broadcast(buffer, src=source)
        if source == self.global_rank:
            return list(tensors)
        return [
            buffer[begin:end].clone().view(dtype).view(shape).to("cpu" if on_cpu else self.root_device)
            for (shape, dtype, on_cpu), (begin, end) in zip(layout, ends, strict=True)
        ]

    def on_validation_start(self) -> None:
        """Disable the synchronisation of metrics: all processes evaluate the same samples."""
        assert self.lightning_module is not None
        self._evaluation.close()
        for part in self.lightning_module.modules():
            if isinstance(part, Metric):
                self._evaluation.enter_context(replaced(part, distributed_available_fn=_never))

    def on_validation_end(self) -> None:
        """Enable the synchronisation of metrics again."""
        self._evaluation.close()

    on_test_start = on_validation_start
    on_test_end = on_validation_end

    def teardown(self) -> None:
        """Restore metrics, the trainer and warning filters."""
        self._evaluation.close()
        self._restore.close()
        super().teardown()


def _never() -> bool:
    return False


Layout = list[tuple[torch.Size, torch.dtype, bool]]
"""Of each tensor its shape, its type, and whether it stays on the CPU whatever the processes' device is."""


def _layout_of(tensors: Sequence[Tensor]) -> Layout:
    return [(tensor.shape, tensor.dtype, tensor.device.type == "cpu") for tensor in tensors]


def shared_by(trainer: Any) -> ClientParallelStrategy | None:
    """The strategy by which a trainer's processes share rounds; ``None`` for a single process.

    Refused are processes that divide something else than clients, and settings that count steps inside a round, of
    which each process has its own.
    """
    if trainer.world_size == 1:
        return None
    strategy = trainer.strategy
    if not isinstance(strategy, ClientParallelStrategy):
        raise MisconfigurationException(
            f"{type(strategy).__name__} divides batches or weights among the trainer's {trainer.world_size} processes,"
            " and FederatedLoop's batches are those of single clients: set strategy='client_parallel', with which"
            " processes train different clients, or devices=1."
        )
    for callback in trainer.callbacks:
        if isinstance(callback, SpikeDetection):
            raise MisconfigurationException(
                f"{type(callback).__name__} compares the processes' losses after each batch, and the"
                f" {trainer.world_size} processes train clients with different numbers of batches: leave it out, or set"
                " devices=1."
            )
        if isinstance(callback, OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False):
            given = "" if isinstance(callback, OnExceptionCheckpoint) else "(save_on_exception=True)"
            raise MisconfigurationException(
                f"{type(callback).__name__}{given} saves where a fit fails, inside a round, when the"
                f" {trainer.world_size} processes train different clients: save after rounds, by"
                " ModelCheckpoint(every_n_epochs=1), or set devices=1."
            )
        if not isinstance(callback, ModelCheckpoint):
            continue
        steps, interval, after_epoch = checkpoint_schedule(callback)
        if steps or interval:
            raise MisconfigurationException(
                "ModelCheckpoint(every_n_train_steps=...) or (train_time_interval=...) saves inside a round, when the"
                f" {trainer.world_size} processes train different clients: set every_n_epochs=1 or more, which counts"
                " rounds, or devices=1."
            )
        share = getattr(trainer, "val_check_interval", 1.0)
        if share != 1.0 and not after_epoch:
            raise MisconfigurationException(
                f"ModelCheckpoint saves at the end of a validation, which val_check_interval={share} puts inside a"
                f" round, when the {trainer.world_size} processes train different clients: give it"
                " save_on_train_epoch_end=True, or set devices=1."
            )
    for name in ("max_steps", "min_steps"):
        if getattr(trainer, name) not in (-1, None) and not trainer.fast_dev_run:
            raise MisconfigurationException(
                f"{name}={getattr(trainer, name)} counts batches one after another, and {trainer.world_size} processes"
                f" train at the same time: set {name.replace('steps', 'epochs')}, which counts rounds, or devices=1."
            )
    seconds = validation_seconds(trainer)
    if seconds is not None:
        raise MisconfigurationException(
            f"val_check_interval, here {seconds:g} seconds, is measured by each process's own clock, but validation"
            f" needs all {trainer.world_size} of them: give a number of turns, in each of which every process trains a"
            " client, or a share of a round, or leave it out."
        )
    environment = strategy.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        rank_zero_warn(
            "SLURMEnvironment(auto_requeue=True), the default, saves a checkpoint at Slurm's signal before a job's end,"
            f" inside a round, when the {trainer.world_size} processes train different clients: such a signal ends the"
            " fit with an error. Give the trainer plugins=[SLURMEnvironment(auto_requeue=False)], and continue a"
            " requeued job from the last round's checkpoint, by ckpt_path (--ckpt_path)."
        )
    return strategy


def check_processes(
    strategy: ClientParallelStrategy,
    trainer: Any,
    fingerprint: Mapping[str, Any],
    allowed: Sequence[str],
    per_round: int,
) -> None:
    """Refuse processes with different data or settings; report more processes than clients.

    Args:
        strategy: Connects the processes.
        trainer: The trainer.
        fingerprint: The settings and the data of this process.
        allowed: Names of settings that may differ.
        per_round: Number of clients in a round.
    """
    first, *others = strategy.gather(fingerprint)
    for rank, theirs in enumerate(others, 1):
        lines = [
            f"  {name}: {shorten(values[0])} in process 0, {shorten(values[1])} in process {rank}"
            for name, values in differences(first, theirs).items()
            # None is the content of samples that differ at each reading.
            if not (is_within(name, allowed) or (name == "data.content" and None in values))
        ]
        if lines:
            raise MisconfigurationException(
                "the processes have different data or settings:\n"
                + "\n".join(lines)
                + "\nGive all processes the same data and arguments, with a seed for whatever is drawn. A difference"
                " without effect, such as a path, is allowed by its name: FederatedLoop(allow_changes=[...])."
            )
    if trainer.world_size > per_round and trainer.is_global_zero:
        Console().print(
            f"client_parallel: {trainer.world_size} processes share rounds of {per_round} clients, so that"
            f" {trainer.world_size - per_round} of them have nothing to train",
            highlight=False,
            soft_wrap=True,
        )


@dataclass(frozen=True)
class _Announced:
    """The description of one client's answer, which all processes receive before its tensors."""

    client: ClientInfo
    weight: float
    names: list[str] | None
    """The names of the message's tensors; ``None`` if the message was added up in the process that received it."""
    state: list[Any]
    """The client's state, as `flatten_state` describes it."""
    layout: Layout
    """Of the message's tensors, and of those that the client keeps."""


@dataclass(frozen=True)
class _Share:
    """One process's results of a round.

    Args:
        counts: Numbers of steps, by name, which add up.
        arrivals: The clients that answered.
        end: The schedulers' position after the longest client.
        failed: Clients that failed, and why.
        accounts: The failed clients' privacy accounts.
        stages: The result of `RoundStage.counted` of each stage.
    """

    counts: dict[str, int]
    arrivals: list[_Announced]
    end: Any
    failed: dict[int, str]
    accounts: dict[int, Any]
    stages: list[Any]


class SharedCoordinator(Coordinator):
    """The server's half of rounds in each of several processes, which exchange their arrivals at a round's end.

    Every process holds the same server and plans the same round. Arrivals wait until all processes have trained their
    clients, so that the stages and the method see the same as in a single process.

    Args:
        strategy: Connects the processes.
        trainer: The trainer, whose counts of steps become those of one process.
        parts: The objects that it connects.
    """

    averages_models = False
    has_all_answers = False

    def __init__(self, strategy: ClientParallelStrategy, trainer: Any, parts: Parts) -> None:
        super().__init__(parts)
        self._strategy = strategy
        self._trainer = trainer
        self._arrivals: list[Arrival] = []
        if self.private is not None:
            self.private.share_noise = self._of_first_process

    def _of_first_process(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        values = list(tensors.values())
        return dict(zip(tensors, self._strategy.send(values, _layout_of(values), 0), strict=True))

    @override
    def begin_round(self, plan: RoundPlan, live: Mapping[str, Tensor], idle: int) -> None:
        super().begin_round(plan, live, idle)
        self._streams = inherits(self.algorithm, "receive", "note_answer") and not self._sees_messages
        self._at_start = [stage.counted() for stage in self.stages]
        self._counts = StepCounts(self._trainer)

    @override
    def _receive_arrival(self, arrival: Arrival) -> None:
        message = arrival.message
        if self._streams:
            self._pass_on(arrival)
            message = Message({})
        kept = {name: tensor.clone() for name, tensor in message.tensors.items()}
        self._arrivals.append(dataclasses.replace(arrival, message=Message(kept)))

    @override
    def end_round(self, optimizers: ClientOptimizers, steps: int) -> int:
        total = self._pool(optimizers, steps)
        self.aggregate()
        return total

    def _pool(self, optimizers: ClientOptimizers, client_steps: int) -> int:
        """Share the arrivals, failures and counts of every process with all of them."""
        counts = {
            "client_steps": client_steps,
            "logged_steps": self._counts.logged_steps(),
            "optimizer_steps": self._counts.optimizer_steps(),
        }
        mine: dict[int, list[Tensor]] = {}
        arrivals = []
        for each in self._arrivals:
            state, kept = flatten_state(self.states[each.client.id])
            tensors = mine[each.client.id] = [*each.message.tensors.values(), *kept]
            names = None if self._streams else list(each.message.tensors)
            arrivals.append(_Announced(each.client, each.weight, names, state, _layout_of(tensors)))
        self._arrivals = []
        failed = self.answers.failed
        # A failed client has the state of before the round, but for this.
        accounts = {client: self.states[client].get(PRIVACY_ACCOUNT) for client in failed}
        share = _Share(counts, arrivals, optimizers.end, failed, accounts, [stage.counted() for stage in self.stages])
        shares: list[_Share] = self._strategy.gather(share)
        for number, account in (entry for each in shares for entry in each.accounts.items() if entry[1]):
            self.states[number][PRIVACY_ACCOUNT] = account
        self.answers.failed = dict(sorted(entry for each in shares for entry in each.failed.items()))
        self.answers.answered = [arrival.client.id for each in shares for arrival in each.arrivals]
        self.answers.check(len(self.answers.answered))
        optimizers.pool(each.end for each in shares)
        for place, (stage, start) in enumerate(zip(self.stages, self._at_start, strict=True)):
            stage.pool(start, [each.stages[place] for each in shares])
        total = {name: sum(each.counts[name] for each in shares) for name in counts}
        self._counts.set(total["optimizer_steps"], total["logged_steps"])
        everyone = [(arrival, rank) for rank, each in enumerate(shares) for arrival in each.arrivals]
        for arrival, rank in sorted(everyone, key=lambda each: each[0].client.id):
            client = arrival.client
            tensors = self._strategy.send(mine.pop(client.id, ()), arrival.layout, rank)
            names = arrival.names or []
            sent, kept = tensors[: len(names)], tensors[len(names) :]
            if rank != self._strategy.global_rank:
                self.states[client.id] = unflatten_state(arrival.state, kept)
            if arrival.names is not None:
                message = Message(dict(zip(names, sent, strict=True)))
                self._pass_on(Arrival(client, message, arrival.weight, self.origin_of))
        if self._streams:
            self.server.aggregator.pool(self._strategy)
        return total["client_steps"]


StrategyRegistry.register(
    "client_parallel",
    ClientParallelStrategy,
    description="Processes train different clients of a FederatedLoop",
    override=True,
)
