"""The course of a round: begin, clients' turns, aggregation.

`FederatedLoop` calls it from Lightning's hooks. An `Execution` has the clients' half of a round, and reaches the
server's by an `Exchange`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_lowrank.aggregation.aggregator import home_of
from lightning_lowrank.arguments import join_names
from lightning_lowrank.configuration import PARTIAL
from lightning_lowrank.federated.carried_values import CarriedValues
from lightning_lowrank.federated.checks import (
    check_optimizers,
    readers_in_steps,
    refuse_plateaus_of_steps,
    step_counter_note,
)
from lightning_lowrank.federated.client_evaluation import FurtherModels
from lightning_lowrank.federated.client_optimizers import ClientOptimizers
from lightning_lowrank.federated.client_states import ClientStates
from lightning_lowrank.federated.clock import Clock, LateError, Operations
from lightning_lowrank.federated.data.loader_checks import last_batch_is_single
from lightning_lowrank.federated.data.planner import Chunk
from lightning_lowrank.federated.data.training_set import RoundData
from lightning_lowrank.federated.exchange import Exchange, Parts
from lightning_lowrank.federated.execution.auto import choose_execution
from lightning_lowrank.federated.execution.base import Execution
from lightning_lowrank.federated.execution.processes import ClientParallelStrategy
from lightning_lowrank.federated.execution.why_not import ALSO_TO_RESUME, reason_of_optimizers
from lightning_lowrank.federated.failures import (
    ClientsFailed,
    DeferredSignals,
    client_names,
    describe_error,
    is_client_error,
    is_single_sample_error,
)
from lightning_lowrank.federated.leaks import Isolation, OfTheRun
from lightning_lowrank.federated.ledger import Ledger, dense_bytes
from lightning_lowrank.federated.local import LocalTraining
from lightning_lowrank.federated.logbook import Logbook
from lightning_lowrank.federated.privacy.mean import Drawing, PrivateMean
from lightning_lowrank.federated.progress import Progress
from lightning_lowrank.federated.protocols import UnequalClients, inherits
from lightning_lowrank.federated.randomness import OwnGenerators
from lightning_lowrank.federated.settings import FederatedSettings
from lightning_lowrank.federated.state import State
from lightning_lowrank.internals.advance import ClientTurns
from lightning_lowrank.internals.lightning import leave_step, refuse_unseen_steps


class Rounds(OfTheRun):
    """The rounds of one fit.

    Args:
        settings: The experiment's settings.
        trainer: The trainer, with its optimizers set up.
        data: The training set, which is divided here if it has not been.
        progress: The run's position.
        processes: Connects the processes that share rounds, if there are several.
        make: Makes the exchange of the clients' messages.
        before: The rounds of the fit that this one continues, if any.
        restored: `state_dict`'s result in the checkpoint that the fit is resumed from, if any.
        turns: Makes each turn of Lightning's loop a chunk of clients.
    """

    def __init__(
        self,
        settings: FederatedSettings,
        trainer: Any,
        data: RoundData,
        progress: Progress,
        processes: ClientParallelStrategy | None,
        make: Callable[[Parts], Exchange],
        before: Rounds | None,
        restored: Mapping[str, Any] | None,
        turns: ClientTurns,
    ) -> None:
        self._settings = settings
        self._algorithm = settings.algorithm
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._data = data
        self._progress = progress
        self._processes = processes
        self._to_device = functools.partial(_to_device, device=self._module.device)
        self._ended = self._reopened = False
        # Whether the server has received a part of a chunk's messages, or has aggregated in part.
        self._partial = False
        self._steps_before = 0
        # A checkpoint of an interrupted fit would have a client's message and not that it was received, for example.
        self._signals = DeferredSignals()
        self.has_figures = False
        """Whether a round has ended in this fit, or in the one that it continues, so that `figures` are of it."""
        samples = data.divided().sizes.tolist()
        # Must precede the trial steps, which change the optimizers' attributes.
        self._optimizers = ClientOptimizers(trainer, settings)
        self._optimizers.check(settings.clients_with_settings(len(samples)))
        if before is None:
            server, ledger = settings.make_server(self._module), Ledger(dense_bytes(self._module))
            kept = {} if restored is None else restored["server"]["clients"]
            states = ClientStates(kept, settings.client_memory_limit)
        else:
            server, ledger, states = (getattr(before.exchange, name) for name in ("server", "ledger", "states"))
            self._optimizers.follow(before._optimizers, states)
        planner = data.planner
        server.base.optimizers, server.clients = trainer.optimizers, planner.eligible
        least = min([planner.clients_per_round, *map(len, settings.participants or ())])
        rounds = None if trainer.max_epochs == -1 else trainer.max_epochs
        drawing = Drawing(planner.clients_per_round, least, planner.eligible, rounds)
        clock = None
        if settings.system is not None:
            names = data.divided().names
            clock = Clock(settings.system, len(samples), data.samples_read, settings.experiment_seed, names)
        parts = Parts(settings, server, samples, states, ledger, drawing, clock, data.labels_of)
        self.exchange: Exchange = make(parts)
        exchange = self.exchange
        if before is not None:
            for kind in (PrivateMean, Clock):
                stage, earlier = exchange.find(kind), before.exchange.find(kind)
                if stage is not None and earlier is not None:
                    stage.load_state_dict(earlier.state_dict())
        if restored is not None:
            exchange.load_state_dict(restored["server"], self._to_device)
            # With ``secure``, the restored secret draws another cohort than a plan made before.
            data.plan = data.plan if exchange.private is None else None
        self.further = FurtherModels(data, exchange)
        exchange.setup(continues=before is not None and before.exchange.algorithm is settings.algorithm)
        if clock is not None and clock.counts_operations:
            # Must precede the execution, which replaces the module's training step.
            clock.operations = Operations(settings.algorithm, server.base, *data.example())
        holder = int(np.argmax(data.planner.samples))
        if settings.algorithm.claims.needs_labels and data.labels_of(holder) is None:
            raise MisconfigurationException(
                f"{settings.algorithm!r} reads the labels of clients' samples, but no labels are found in the training"
                " data: give FederatedLoop(labels=...), a function of the dataset."
            )
        data.group_key = self._group_key
        previous = None if before is None else before.execution
        self.execution: Execution = choose_execution(trainer, exchange, data, processes, restored, previous)
        self.execution.optimizers = self._optimizers
        self._local = LocalTraining(trainer, turns, self.execution, data)
        self.execution.logbook = self._local.logbook
        self._before_client: dict[str, Any] = {}
        self._failed_alike: dict[str, list[int]] = {}
        self._lone_named = False
        self._readers: dict[str, list[str]] = {}
        self._carried: CarriedValues | None = None

    def _group_key(self, client: int, round_number: int) -> tuple[Any, ...]:
        """A key that is equal for clients that may step together: their method's key, moments, and options."""
        info = self.exchange.info(client, round_number)
        state = self.exchange.states[client]
        return UnequalClients.of(self._algorithm).group_key(info), self._optimizers.key(client, state, round_number)

    def go_on(self, trainer: Any, module: Any) -> bool:
        """Whether a further fit of ``module`` continues these rounds."""
        # After an error at the end of round 0 the trainer goes on with epoch 1, and its current_epoch is still 0.
        ended = trainer is self._trainer and self._progress.client_steps > 0 and not self._progress.round_open
        return module is self._module and (trainer.current_epoch > 0 or ended)

    def replace_optimizers(self) -> None:
        """Switch to optimizers and schedulers that the trainer has set up again.

        Raises:
            MisconfigurationException: If clients cannot train with them, or not go on from what they keep.
        """
        trainer, settings = self._trainer, self._settings
        check_optimizers(trainer, self._module)
        refuse_plateaus_of_steps(trainer.lr_scheduler_configs)
        reason = reason_of_optimizers(trainer) if self.execution.stacked else ""
        if reason:
            raise MisconfigurationException(
                f"execution={settings.execution!r}: clients step together, and from round {trainer.current_epoch} on"
                f" {reason}. Use execution='sequential'{ALSO_TO_RESUME}."
            )
        optimizers = ClientOptimizers(trainer, settings)
        optimizers.check(settings.clients_with_settings(len(self.exchange.samples)))
        optimizers.follow(self._optimizers, self.exchange.states)
        self.execution.optimizers = self._optimizers = optimizers
        self.exchange.server.base.optimizers = trainer.optimizers
        self.exchange.setup(continues=True)

    def _follow_optimizers(self) -> None:
        """Switch to the trainer's optimizers and schedulers, if a hook before the round has replaced them."""
        if not self._optimizers.are_present():
            self.replace_optimizers()
            self._refuse_unseen_steps()

    def _refuse_replaced(self) -> None:
        """Refuse optimizers or schedulers that were replaced inside the round."""
        if not self._optimizers.are_present():
            raise MisconfigurationException(
                f"the trainer's optimizers or schedulers were replaced inside round {self._progress.round}, whose"
                " clients begin and end with the same ones: replace them in on_train_epoch_start."
            )

    def _refuse_unseen_steps(self) -> None:
        self._unseen.close()
        if not inherits(self._algorithm, "before_step"):
            self._unseen.callback(refuse_unseen_steps(self._trainer, type(self._algorithm).__name__))

    def start(self) -> Callable[[], None]:
        """Prepare local training; return a function that undoes it."""
        self._isolation = Isolation(self._trainer, self.execution.stacked)
        readers = readers_in_steps(self._module)
        for counter, names in readers.items() if self.execution.stacked else ():
            rank_zero_warn(step_counter_note(self._module, counter, names))
        self._readers = readers
        self._carried = None
        self._local.look = None if self.execution.stacked else self._look
        ends = ExitStack()
        ends.callback(setattr, self._data.randomness, "own", None)
        self._unseen = ends.enter_context(ExitStack())
        self._refuse_unseen_steps()
        ends.callback(self._local.start())
        self.execution.start()
        ends.callback(self.execution.stop)
        return ends.close

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`, except for the exchange's part."""
        progress, execution = self._progress, self.execution
        # The plan has been made with these chunks.
        self._data.resumed_chunks = None
        self._optimizers.load_state_dict(state["optimizers"])
        if not progress.round_open:
            return
        # A checkpoint saved inside a client's turn has that client's options.
        self._optimizers.wind_back()
        # Lightning does not call on_train_epoch_start in the rest of the round, where callbacks freeze layers.
        for name, value in self._module.named_parameters():
            value.requires_grad_(name in state["server"]["trained"])
        clock = self.exchange.find(Clock)
        if clock is not None and clock.operations is not None:
            clock.operations.begin_round()
        execution.begin_round()
        self._isolation.begin_round()
        self.exchange.follow_buffers(execution.live)
        server = self.exchange.server
        server.sync_with_module(execution.live, shown=server.model)
        self._reopened = True

    def _begin_round(self) -> None:
        plan, progress = self._data.current_plan(), self._progress
        self._follow_optimizers()
        self.execution.begin_round()
        self._isolation.begin_round()
        progress.client_steps_before = progress.client_steps
        idle = self._data.planner.broadcast_receivers - len(plan.clients) - len(plan.failed)
        self.exchange.begin_round(plan, self.execution.live, idle)
        self.exchange.answers.check(len(plan.clients))
        progress.round_open, self._ended, self._failed_alike = True, False, {}
        self._optimizers.begin_round()
        self._local.begin_round()

    # Turns of clients

    def turn(self) -> bool:
        """Train the round's next client; after the last one, aggregate.

        Returns:
            Whether the module ended the round.
        """
        with self._signals:
            return self._turn()

    def _turn(self) -> bool:
        plan, progress = self._data.current_plan(), self._progress
        if not progress.round_open:
            self._begin_round()
        elif self._reopened:
            # Not in `resume`, after which callbacks such as DifferentialPrivacy replace the training step.
            self._follow_optimizers()
            self._local.begin_round()
        self._reopened = False
        number, ends_round = progress.chunk, False
        if number < len(plan.chunks) and not self._ended:
            ends_round = self._train(plan.chunks[number])
            if progress.chunk_open:
                return False
        progress.chunk = number + 1
        self._partial = False
        if ends_round and self._processes is not None:
            # Other processes continue; this one waits for them at the round's end.
            self._ended, ends_round = True, False
        if ends_round or progress.chunk >= plan.turns:
            self.aggregate()
            self.end_epoch()
        elif progress.round_open:
            self.exchange.show_global(self.execution.live)
        return ends_round

    @property
    def logbook(self) -> Logbook:
        """The logbook that collects logged values."""
        return self._local.logbook

    def end_epoch(self) -> None:
        """Pass the round's logged values on to Lightning, also if the round was cut short."""
        self._local.logbook.end_round()

    def _train(self, chunk: Chunk) -> bool:
        """Train a chunk: begin, local steps, messages. Return whether the module ended the round."""
        local, ends_round = self._local, False
        try:
            chunk = self._open(chunk)
            if not chunk.clients:
                return False
            with self._signals.delivered():
                ends_round = local.train(chunk)
            self._data.randomness.close()
            if not local.stopped:
                self._end_client()
        except ClientsFailed as failed:
            if self._settings.on_client_error == "raise":
                raise failed.error from failed.error.__cause__
            self._give_up(chunk.clients, failed.error)
        except Exception as error:
            if not (local.in_step and is_client_error(error)) or self._settings.on_client_error == "raise":
                raise
            self._give_up(chunk.clients, error)
        return ends_round

    def _end_client(self) -> None:
        """Send the messages of the open chunk, and count its steps."""
        self._local.end()
        self._progress.client_steps += self._local.client_steps
        self._end_chunk(self._local.made)

    def _give_up(self, clients: Sequence[int], error: Exception) -> None:
        """Drop the open clients after a failure."""
        self._let_go()
        self._drop(clients, error, self.execution.before)

    def _let_go(self) -> None:
        """Close a chunk whose clients send no message."""
        self._data.randomness.close()
        # Steps of a client that fails at its end have been counted already.
        self._progress.client_steps += self._local.client_steps if self._local.drop() else 0
        leave_step(self._trainer)
        self._abandon_chunk()
        self._optimizers.give_back()
        self._progress.chunk_open = False

    def _abandon_chunk(self) -> None:
        """Give the module what its clients have changed back: flags, buffers and the global model."""
        self.execution.flags.restore()
        self._isolation.abandon_client()
        self.execution.abandon()

    def _open(self, chunk: Chunk) -> Chunk:
        """Have a chunk's clients begin; return the chunk of the clients that did not fail."""
        self._refuse_replaced()
        self._optimizers.wind_back()
        # A hook between clients, as of validation, may have changed them.
        self.execution.flags.restore()
        self._before_client = self.exchange.state_of_transfers()
        self._steps_before = self._progress.client_steps
        self._opened = chunk
        failed = self.execution.open(chunk)
        if failed:
            chunk = chunk.without(failed)
            if not chunk.clients:
                self._let_go()
            else:
                number = self._progress.chunk
                self._data.plan = self._data.current_plan().with_chunk(number, chunk)
                self._local.forget_batches()
            for client, error in failed.items():
                self._drop([client], error, self.execution.before)
            if not chunk.clients:
                return chunk
        self._optimizers.apply_options(chunk.clients[0])
        randomness = self._data.randomness
        # Not looked up in `start`, because hooks of the fit's start may make generators.
        randomness.own = randomness.own or OwnGenerators.of_fit(self._trainer)
        if self._local.look is not None and self._carried is None:
            self._carried = CarriedValues(self._trainer, self.execution.substituted)
        self._isolation.begin_client()
        self._progress.chunk_open = True
        return chunk

    def _look(self, batch: Any) -> None:
        """Warn once of attributes that earlier clients changed, if they affect a later client's step on ``batch``."""
        isolation = self._isolation
        if not isolation.watched or self._carried is None:
            return
        for counter, readers in self._readers.items():
            if self._carried.counter_reaches(counter, batch):
                rank_zero_warn(step_counter_note(self._module, counter, readers))
        self._readers = {}
        if self._carried.warn_of(isolation.suspects, isolation.shadows, batch) or isolation.is_over:
            self._local.look = self._carried = None

    def _end_chunk(self, steps: int) -> None:
        """Send the messages of the chunk's clients; the longest made ``steps`` steps."""
        self._refuse_replaced()
        self.execution.end_steps()
        self._isolation.end_client()
        self._partial = True
        failed = self.execution.close()
        clients = self._data.current_plan().chunks[self._progress.chunk].clients
        if self._settings.on_client_error == "raise":
            for error in failed.values():
                if not isinstance(error, LateError):
                    # The chunk stays open, so that a checkpoint of the error repeats it if nothing was received.
                    self._partial = len(failed) < len(clients)
                    raise error
        if len(failed) < len(clients):
            self.logbook.count_clients([place for place, client in enumerate(clients) if client in failed])
        else:
            self.logbook.drop_client()
        self._optimizers.end_client(clients[0], steps)
        self._progress.chunk_open = False
        for client, error in failed.items():
            if isinstance(error, LateError):
                self.exchange.drop(client, self.execution.before[client], error)
                continue
            self._drop([client], error, self.execution.before)

    def _drop(self, clients: Sequence[int], error: Exception, before: Mapping[int, State]) -> None:
        """Continue without failed clients, whose states become those of ``before``."""
        reason = describe_error(error)
        if reason in self._failed_alike:
            self._failed_alike[reason] += clients
        elif not (is_single_sample_error(error) and self._said_lone(clients)):
            together = "" if len(clients) == 1 else ", which step together"
            self._warn_of(clients, f"{together}: {reason}")
            self._failed_alike[reason] = []
        for client in clients:
            self.exchange.drop(client, before[client], error)

    def _said_lone(self, clients: Sequence[int]) -> bool:
        """Warn once of clients whose last batch has one sample; return whether each of ``clients`` has such a batch."""
        loader, samples = self._data.training_loader, self._data.planner.samples
        assert loader is not None
        lone = [client for client in range(len(samples)) if last_batch_is_single(int(samples[client]), loader)]
        if not self._lone_named and not {*clients}.isdisjoint(lone):
            self._lone_named = True
            of = f"{len(lone)} of {len(samples)} clients" if len(lone) > 1 else "a client"
            warnings.warn(
                f"rounds continue without {of}, whose last batch has one sample: {join_names([*map(str, lone)])}."
                " BatchNorm"
                f" needs two in training. Set drop_last=True in the training loader, or another batch_size than"
                f" {loader.batch_size}.",
                stacklevel=2,
            )
        # One such client fails its whole chunk, so other clients of the chunk fail too.
        return {*clients} <= {*lone}

    def _warn_of(self, clients: Sequence[int], reason: str) -> None:
        warnings.warn(f"round {self._progress.round} continues without {client_names(clients)}{reason}", stacklevel=2)

    def aggregate(self) -> None:
        """End the round, if one is open, and load the new global model into the module."""
        with self._signals:
            if self._progress.round_open:
                self._partial = True
                self._aggregate()
                self._partial = False

    def _aggregate(self) -> None:
        progress = self._progress
        if progress.chunk_open:
            self._end_client()
        for reason, clients in self._failed_alike.items():
            if clients:
                self._warn_of(clients, f", which failed alike: {reason}")
        mine = progress.client_steps - progress.client_steps_before
        total = self.exchange.end_round(self._optimizers, mine)
        progress.client_steps = progress.client_steps_before + total
        if self._processes is not None:
            # Equal in all processes, also if the round is cut short.
            progress.chunk = self._data.current_plan().turns
        self.exchange.show_global(self.execution.live)
        self._isolation.put_back()
        self._optimizers.end_round()
        progress.round_open, self.has_figures = False, True
        self.exchange.states.offload()

    def stop_if_spent(self, number: int) -> None:
        """Stop the fit, with a message, if round ``number`` would exceed the budget of `ClientPrivacy`."""
        private = self.exchange.private
        # A checkpoint may lie between the end of a round and the end of its epoch.
        if private is not None and private.released <= number and private.exhausted:
            self._trainer.should_stop = True
            rank_zero_info(f"the fit ends here: {private.exhausted}")

    def pause(self) -> None:
        """Restore the process's random number generators."""
        self._data.randomness.release()

    def abandon(self) -> None:
        """After an error: restore the last global model and the optimizers' options."""
        self._optimizers.give_back()
        if self._progress.round_open and self.execution.live:
            self._abandon_chunk()

    def figures(self) -> dict[str, float]:
        """The round's logged figures."""
        plan, answers, samples = self._data.current_plan(), self.exchange.answers, self.exchange.samples
        return {
            **self.exchange.figures(),
            "federated/clients": len(answers.answered),
            "federated/failed": len(plan.failed) + len(answers.failed),
            "federated/samples": sum(samples[each] for each in answers.answered),
            "federated/client_steps": self._progress.client_steps,
        }

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run, as tensors and plain Python.

        Raises:
            MisconfigurationException: Inside a round that several processes share.
        """
        progress, execution = self._progress, self.execution
        if progress.round_open and self._processes is not None:
            raise MisconfigurationException(
                "a checkpoint inside a round would hold the client of one process only: save between rounds, as"
                " ModelCheckpoint does, or set devices=1."
            )
        plan = self._data.plan
        server = self.exchange.state_dict()
        saved = progress.state_dict()
        if progress.chunk_open:
            # A resumed run repeats the chunk from its start, with the clients that failed to begin.
            plan = plan and plan.with_chunk(progress.chunk, self._opened)
            before = self._before_client
            server = {
                **server,
                **before,
                "stages": {**server["stages"], **before["stages"]},
                "clients": {**server["clients"], **execution.before},
            }
            saved |= {"chunk_open": False, "client_steps": self._steps_before}
        return {
            **({PARTIAL: progress.round} if self._partial else {}),
            "algorithm": type(self._algorithm).__name__,
            "execution": execution.name,
            "channels_last": execution.channels_last,
            "validation_channels_last": execution.validation_channels_last,
            "chunk_size": self._data.chunk_size,
            "progress": saved,
            "server": server,
            "names": list(self._data.divided().names or ()),
            "chunks": [list(chunk.clients) for chunk in plan.chunks] if plan and progress.round_open else None,
            "optimizers": self._optimizers.state_dict(),
            # A resumed run repeats the open client.
            "inside": progress.round_open and progress.chunk_open,
        }


def _to_device(tree: Any, device: torch.device) -> Any:
    """Move a checkpoint's tensors to a device; float64 tensors stay on the CPU if the device lacks float64."""

    def moved(tensor: Tensor) -> Tensor:
        return move_data_to_device(tensor, home_of(tensor.dtype, device))

    return apply_to_collection(tree, Tensor, moved)
