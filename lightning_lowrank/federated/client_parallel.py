"""Many devices, one simulation: processes that train different clients of the same round.

Every process holds the same server and plans the same round. It trains its share of the round's clients, and when all
have ended, what they sent is put together so that every process has the same server again: an algorithm sees what it
would see in a single process. `FederatedLoop` uses a `SharedRound` for it where the trainer's strategy is
`ClientParallelStrategy`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_lowrank.compression import Codec
from lightning_lowrank.federated._lightning import StepCounts, evaluate_everything, stop_gathering
from lightning_lowrank.federated.algorithm import Algorithm, leaves_alone
from lightning_lowrank.federated.client import Client, Clients, Server
from lightning_lowrank.federated.payload import Ledger, Payload
from lightning_lowrank.federated.schedulers import SchedulersPerClient
from lightning_lowrank.federated.spill import put_together, take_apart

__all__ = ["ClientParallelStrategy", "SharedRound", "shared_by"]

_ALIGNMENT = 16


class ClientParallelStrategy(DDPStrategy):
    """Train the clients of each round on several devices, with `FederatedLoop`.

    Each process has one device, and processes are started as by Lightning's own ``DDPStrategy``: by the trainer, by
    ``torchrun`` or by SLURM, on one or several machines. Clients are divided by their numbers of batches, the longest
    first, each to the process with the least to do. No gradients are averaged. What a run ends with is equal to that of
    a single process to rounding, the ledger exactly; so are checkpoints, from which a run with another number of
    processes goes on.

    - Weights are those of the first process when the fit begins, as they were before and after ``setup``.
    - Processes make equally many steps in a round, for Lightning has them meet once a step: where one has trained its
      clients, it waits in steps without a batch. A callback that communicates in each step itself does not expect
      those; ``training_step`` may not communicate at all. What sets ``should_stop`` inside a round does so in every
      process in the same step, as Lightning's own callbacks do.
    - When a round has ended, ``global_step`` and the loggers' step are what a single process would have counted. Inside
      a round they are the process's own. Where clients step together, each process stacks its own, and counts the steps
      of these cohorts.
    - ``max_steps``, ``min_steps`` and checkpoints inside a round are refused.
    - What is logged over an epoch, `torchmetrics.Metric` objects included, is that of all processes' clients; what is
      logged on a step is that of the first process. ``sync_dist`` has no effect.
    - Validation, test and prediction loaders are not divided: every process evaluates all samples, and has the same
      figures. Loggers and checkpoints are written by the first process.

    Args:
        accelerator: As the trainer sets it.
        parallel_devices: As the trainer sets them.
        cluster_environment: As the trainer finds it.
        checkpoint_io: How checkpoints are written; Lightning's own by default.
        precision_plugin: As the trainer sets it.
        process_group_backend: Backend of `torch.distributed`: by default ``"nccl"`` on CUDA, ``"gloo"`` elsewhere.
        timeout: How long a process waits for the others, as when one has failed. Default 30 minutes.

    Raises:
        MisconfigurationException: In ``fit`` without `FederatedLoop`, or with the trainer's ``sync_batchnorm``.

    Example:
        >>> import lightning.pytorch as pl
        >>> import lightning_lowrank
        >>> trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="client_parallel", logger=False)
        >>> type(trainer.strategy).__name__
        'ClientParallelStrategy'
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
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
        self._gathering: list[tuple[Metric, Any]] = []

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Make the strategy known by its name."""
        description = "Processes train different clients of a FederatedLoop"
        strategy_registry.register("client_parallel", cls, description=description, override=True)

    def setup_environment(self) -> None:
        """Connect the processes, and give all of them the first one's weights, from which `LowRank` may convert."""
        super().setup_environment()
        self._send_weights()

    def setup(self, trainer: pl.Trainer) -> None:
        """Check what the trainer is to do, and set the module and the optimizers up."""
        evaluate_everything(trainer)
        # It has no effect here.
        warnings.filterwarnings("ignore", message=r"It is recommended to use `self.log\(.*sync_dist=True")
        if trainer.state.fn == TrainerFn.FITTING:
            if all(callback.state_key != "FederatedLoop" for callback in vars(trainer)["callbacks"]):
                raise MisconfigurationException(
                    "ClientParallelStrategy divides a FederatedLoop's clients among processes, and averages no"
                    " gradients: put a FederatedLoop into `callbacks`, or use strategy='ddp'."
                )
            if self._layer_sync:
                raise MisconfigurationException(
                    "sync_batchnorm=True would mix the statistics of different clients, which ClientParallelStrategy"
                    " trains at the same time: set sync_batchnorm=False."
                )
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Give all processes the first one's weights; nothing is wrapped, for gradients stay where they are."""
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
        """Return ``tensor`` as it is: `FederatedLoop` puts together what processes log, and all evaluate the same."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether every process has decided so, or any if not ``all``."""
        votes = int(self.sum(torch.tensor(int(decision), device=self.root_device)))
        return votes == self.world_size if all else votes > 0

    def gather(self, value: Any) -> list[Any]:
        """Return every process's ``value``, which can be pickled, in the order of their ranks."""
        found: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            torch.distributed.all_gather_object(found, value)
        return found

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of every process's ``tensor``, the same bits in all."""
        total = tensor.clone()
        if self.world_size > 1 and total.numel():
            torch.distributed.all_reduce(total)
        return total

    def send(self, tensors: Sequence[Tensor], layout: Layout, source: int) -> list[Tensor]:
        """Return in every process what ``source`` gives.

        Args:
            tensors: The tensors; only looked at in ``source``.
            layout: Their shapes and types, which all processes know.
            source: Rank of the process that sends.
        """
        ends, size = [], 0
        for shape, dtype, _ in layout:
            ends.append((size, size + shape.numel() * dtype.itemsize))
            size = -(-ends[-1][1] // _ALIGNMENT) * _ALIGNMENT
        if not layout:
            return []
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
        """Keep metrics from adding up what all processes have."""
        assert self.lightning_module is not None
        self._gather_again()
        self._gathering = stop_gathering(self.lightning_module)

    def on_validation_end(self) -> None:
        """Let metrics gather again."""
        self._gather_again()

    on_test_start = on_validation_start
    on_test_end = on_validation_end

    def _gather_again(self) -> None:
        for metric, available in self._gathering:
            metric.distributed_available_fn = available
        self._gathering = []

    def teardown(self) -> None:
        """Leave metrics and module as they were."""
        self._gather_again()
        super().teardown()


Layout = list[tuple[torch.Size, torch.dtype, bool]]
"""Of each tensor its shape, its type, and whether it stays on the CPU whatever the processes' device is."""


def _layout_of(tensors: Sequence[Tensor]) -> Layout:
    return [(tensor.shape, tensor.dtype, tensor.device.type == "cpu") for tensor in tensors]


def shared_by(trainer: Any) -> ClientParallelStrategy | None:
    """Return the strategy by which a trainer's processes share rounds; ``None`` for a single process.

    Raises:
        MisconfigurationException: If processes are to divide something else than clients, or a setting counts steps
            inside a round, of which each process has its own.
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
        if not isinstance(callback, ModelCheckpoint):
            continue
        if callback._every_n_train_steps or callback._train_time_interval:
            raise MisconfigurationException(
                "ModelCheckpoint(every_n_train_steps=...) or (train_time_interval=...) saves inside a round, when the"
                f" {trainer.world_size} processes are at different clients: set every_n_epochs=1 or more, which counts"
                " rounds, or devices=1."
            )
        interval = getattr(trainer, "val_check_interval", 1.0)
        if interval != 1.0 and not callback._save_on_train_epoch_end:
            raise MisconfigurationException(
                f"ModelCheckpoint saves when validation ends, which val_check_interval={interval} has inside a round,"
                f" when the {trainer.world_size} processes are at different clients: give it"
                " save_on_train_epoch_end=True, or set devices=1."
            )
    for name in ("max_steps", "min_steps"):
        if getattr(trainer, name) not in (-1, None) and not trainer.fast_dev_run:
            raise MisconfigurationException(
                f"{name}={getattr(trainer, name)} counts batches one after another, and {trainer.world_size} processes"
                f" train at the same time: set {name.replace('steps', 'epochs')}, which counts rounds, or devices=1."
            )
    if trainer._val_check_time_interval is not None:
        raise MisconfigurationException(
            f"val_check_interval, here {trainer._val_check_time_interval:g} seconds, goes by each process's own clock,"
            f" and validation needs all {trainer.world_size} of them: give it in batches or as a share of a round, or"
            " leave it out."
        )
    return strategy


@dataclass(frozen=True)
class _Arrival:
    """What all processes know of a client that one of them has trained, before its tensors are sent.

    Args:
        client: The client's id.
        steps: Number of steps that it was to make.
        weight: Its weight in the mean.
        codec: The codec of what it sent.
        names: The names of the tensors that it sent.
        memory: What it keeps, as `take_apart` describes it.
        layout: Of the tensors that it sent, and of those that it keeps.
    """

    client: int
    steps: int
    weight: float
    codec: Codec | None
    names: list[str]
    memory: list[Any]
    layout: Layout


class SharedRound:
    """One process's part of a round, from the moment when all processes have begun it alike.

    Args:
        strategy: Connects the processes.
        algorithm: The method.
        server: The same in every process.
        ledger: What has been entered by now has been so in every process.
        counts: What Lightning counts.

    Attributes:
        client_steps: Number of batches that clients have been trained on here.
        logged_steps: Number of steps that loggers have seen here.
    """

    def __init__(
        self,
        strategy: ClientParallelStrategy,
        algorithm: Algorithm,
        server: Server,
        ledger: Ledger,
        counts: StepCounts,
    ) -> None:
        self._strategy = strategy
        self._algorithm = algorithm
        self._server = server
        self._ledger = ledger
        self._entered = ledger.state_dict()
        self._counts = counts
        self._streams = leaves_alone(algorithm, "receive")
        self._arrivals: list[tuple[Client, Payload, float]] = []
        self._memory = _snapshot(server.memory)
        self.client_steps = 0
        self.logged_steps = 0

    def end_first_step(self, leader: int) -> None:
        """Have what the round's first client left with the server in its first step be there in every process.

        Args:
            leader: Rank of the process that trains that client.
        """
        memory, before = self._server.memory, self._memory
        changed = _changed(before, memory)
        description, tensors = take_apart({name: memory[name] for name in changed if name in memory})
        gone = [name for name in changed if name not in memory]
        description, layout, gone = self._strategy.broadcast((description, _layout_of(tensors), gone), leader)
        received = put_together(description, self._strategy.send(tensors, layout, leader))
        memory.update({name: before[name].value for name in changed if name in before})
        for name in {*changed, *gone} - before.keys() | set(gone):
            memory.pop(name, None)
        memory.update(received)
        self._memory = _snapshot(memory)

    def collect(self, client: Client, payload: Payload, weight: float) -> None:
        """Take in what a client sent, for the server to receive when the round ends.

        Raises:
            MisconfigurationException: If the method has changed what the server keeps while the client trained.
        """
        changed = _changed(self._memory, self._server.memory)
        if changed:
            raise MisconfigurationException(
                f"{type(self._algorithm).__name__} changes the server's {changed[0]!r} while clients train, which those"
                " of other processes do not see: set devices=1."
            )
        if self._streams:
            self._algorithm.receive(self._server, client, payload, weight)
            payload = Payload({}, payload.codec)
        kept = {name: tensor.clone() for name, tensor in payload.tensors.items()}
        self._arrivals.append((client, Payload(kept, payload.codec), weight))

    def end(self, clients: Clients, schedulers: SchedulersPerClient, between_steps: bool) -> None:
        """Have every process hold what all of them have come to.

        Args:
            clients: All clients, of whom those that another process has trained get what they keep.
            schedulers: They go on from the client with the most steps of all.
            between_steps: As for `StepCounts.set`.
        """
        now = self._ledger.state_dict()
        counted = {name: now[name] - value for name, value in self._entered.items()}
        counted |= {
            "client_steps": self.client_steps,
            "logged_steps": self.logged_steps,
            "optimizer_steps": self._counts.optimizer_steps(),
        }
        mine: dict[int, list[Tensor]] = {}
        arrivals = []
        for client, payload, weight in self._arrivals:
            memory, kept = take_apart(client.memory)
            tensors = mine[client.id] = [*payload.tensors.values(), *kept]
            codec = None if self._streams else payload.codec
            names, layout = list(payload.tensors), _layout_of(tensors)
            arrivals.append(_Arrival(client.id, client.steps, weight, codec, names, memory, layout))
        self._arrivals = []
        gathered = self._strategy.gather((counted, arrivals, schedulers.end))
        schedulers.pool(end for _, _, end in gathered)
        total = {name: sum(counts[name] for counts, _, _ in gathered) for name in counted}
        self._ledger.load_state_dict({name: value + total[name] for name, value in self._entered.items()})
        self.client_steps = total["client_steps"]
        self._counts.set(total["optimizer_steps"], total["logged_steps"], between_steps)
        everyone = [(arrival, rank) for rank, (_, arrivals, _) in enumerate(gathered) for arrival in arrivals]
        for arrival, rank in sorted(everyone, key=lambda each: each[0].client):
            tensors = self._strategy.send(mine.pop(arrival.client, ()), arrival.layout, rank)
            sent, kept = tensors[: len(arrival.names)], tensors[len(arrival.names) :]
            client = clients[arrival.client]
            if rank != self._strategy.global_rank:
                client.memory, client.steps = put_together(arrival.memory, kept), arrival.steps
            if arrival.codec is not None:
                payload = Payload(dict(zip(arrival.names, sent, strict=True)), arrival.codec)
                self._algorithm.receive(self._server, client, payload, arrival.weight)
        if self._streams:
            self._server.mean.pool(self._strategy)


class _Kept(NamedTuple):
    value: Any
    mark: Any


def _snapshot(memory: Mapping[str, Any]) -> dict[str, _Kept]:
    """Return what is kept, with a mark of each that is another when the value is replaced or written to."""
    kept = {}
    for name, value in memory.items():
        description, tensors = take_apart(value)
        # The value keeps its storage in use, so that no other tensor comes to lie there.
        kept[name] = _Kept(value, (description, [(tensor.data_ptr(), tensor._version) for tensor in tensors]))
    return kept


def _changed(before: Mapping[str, _Kept], memory: Mapping[str, Any]) -> list[str]:
    """Return the names of what is new, gone, replaced or written to since."""
    now = _snapshot(memory)
    return [
        name
        for name in {**before, **now}
        if name not in now or name not in before or before[name].mark != now[name].mark
    ]


ClientParallelStrategy.register_strategies(StrategyRegistry)
