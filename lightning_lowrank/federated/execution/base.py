"""The interface of executions, which run the clients of a round for `FederatedLoop`."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_lowrank.compression import Packet
from lightning_lowrank.federated.algorithm import LocalStep
from lightning_lowrank.federated.client_optimizers import ClientOptimizers
from lightning_lowrank.federated.data.planner import Chunk
from lightning_lowrank.federated.exchange import Exchange
from lightning_lowrank.federated.failures import ClientsFailed, errors_of
from lightning_lowrank.federated.leaks import OfTheRun, TrainedFlags
from lightning_lowrank.federated.logbook import Logbook
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.protocols import inherits
from lightning_lowrank.federated.state import ClientContext, State, copied_state, copy_into, trained_tensors
from lightning_lowrank.internals.lightning import is_training, makes_step
from lightning_lowrank.layers import keep_frozen


def while_training(trainer: Any, own: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement of a module's ``training_step``: ``step`` while the trainer trains, else the module's ``own``.

    A ``validation_step`` may call ``training_step`` too.
    """

    @functools.wraps(own)
    def training_step(*arguments: Any, **keywords: Any) -> Any:
        return (step if is_training(trainer) else own)(*arguments, **keywords)

    return training_step


class Execution(OfTheRun, ABC):
    """Runs the clients' half of rounds in one process, a chunk of clients at a time.

    A chunk is one client, or several that step together. `open` makes its clients begin with their broadcasts;
    `LocalTraining` makes their steps, and calls `before_batch`, `step_of`, `before_step` and the method's
    ``local_update`` in each; `close` sends the clients' messages.
    """

    name: ClassVar[str]
    """Its name among the values of ``FederatedLoop(execution=...)``."""
    stacked: ClassVar[bool] = False
    """Whether clients step together, so that batches are those of a chunk."""
    substituted: Callable[..., Any] | None = None
    """The module's training step, if another replaces it that runs it with other tensors (`DifferentialPrivacy`)."""
    optimizers: ClientOptimizers
    """The optimizers that clients take turns with."""
    logbook: Logbook | None = None
    """The collector for logged values of clients that step together, if any."""
    channels_last: bool = False
    """Whether steps of single clients see images with their channels last in memory."""
    validation_channels_last: bool = False
    """Whether validation steps do; `in_validation` ends it where the sanity check cannot."""

    def __init__(self, trainer: Any, exchange: Exchange) -> None:
        self.trainer = trainer
        self.module: pl.LightningModule = trainer.lightning_module
        self.exchange = exchange
        self.settings = exchange.settings
        self.algorithm = exchange.algorithm
        self.base = exchange.server.base
        self.live: dict[str, Tensor] = {}
        self.flags: TrainedFlags
        """``requires_grad`` of the parameters in this round; set with ``live``."""
        self.chunk: Chunk
        self.clients: list[ClientContext] = []
        self.number = 0
        self.round_state: State = {}
        self.before: dict[int, State] = {}
        """The open clients' states before the round."""
        self.changes_objective = not inherits(self.algorithm, "loss") or self.settings.objective is not None
        """Whether the method or the settings change the objective."""
        self._own_gradients = not inherits(self.algorithm, "before_step")

    def start(self) -> None:
        """Begin a fit."""

    def step_of(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        """The function that runs as a client's step in place of ``training_step``; by default the same function."""
        return training_step

    def stop(self) -> None:
        """End a fit, and undo the changes that `start` made to the module."""

    def begin_round(self) -> None:
        """Look up the tensors that are trained in this round."""
        keep_frozen(self.module)
        self.flags = TrainedFlags(self.module)
        self.live = trained_tensors(self.module)

    @abstractmethod
    def open(self, chunk: Chunk) -> dict[int, Exception]:
        """Have a chunk's clients begin the round.

        Returns:
            For clients that failed to begin, the reason. `chunk` is then of the others.

        Raises:
            ClientsFailed: If the chunk's only client fails, or one does with ``on_client_error="raise"``.
        """

    def before_batch(self, number: int) -> None:
        """Prepare step ``number`` of the open chunk."""
        self.number = number

    @abstractmethod
    def step(self) -> LocalStep:
        """The present step as the method sees it."""

    def _step_of_one(self, values: Mapping[str, Tensor], round_state: State) -> LocalStep:
        """The present step as that of one client with these values."""
        return LocalStep(
            self.base,
            self.clients[0].round,
            self.chunk.clients,
            self.base.parameters(values),
            {name: values[name] for name in self.base.initial_buffers},
            round_state,
            self.number,
            torch.tensor(self.chunk.steps, dtype=torch.float64),
            stacked=False,
        )

    def loss(self, batch: Any, training_step: Callable[[], Any]) -> Any:
        """The objective of a batch; ``training_step`` runs the module's own step on it."""
        step, own = self.step(), training_step
        if self.settings.objective is not None:
            objective = self.settings.objective

            def own() -> Any:
                return objective.loss(step, batch, training_step)

        return self.algorithm.loss(step, batch, own)

    def gradients(self, batch: Any) -> Tensor | None:
        """Run the training step, ``zero_grad()`` and ``backward()`` in one call, if the execution can.

        Returns:
            The loss; ``None`` if there is none. Nothing has been done then.
        """
        return None

    def before_step(self, optimizer: Optimizer) -> None:
        """Call the method's `before_step` with the gradients, if the optimizer is about to make a step."""
        if self._own_gradients and makes_step(self.trainer, optimizer):
            self.algorithm.before_step(self.step())

    def end_steps(self) -> None:
        """Restore the parameters' ``requires_grad`` after the last step of the open clients."""
        self.flags.restore()

    @abstractmethod
    def close(self) -> dict[int, Exception]:
        """Send the messages of the open chunk's clients, and close the chunk.

        Returns:
            For clients that failed to answer, the reason.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Close the open chunk without messages, and restore the global model in the module."""

    def _contexts(self, chunk: Chunk, model: Callable[[int], Mapping[str, Tensor]]) -> list[ClientContext]:
        contexts = [
            self.exchange.context(client, model(place), steps)
            for place, (client, steps) in enumerate(zip(chunk.clients, chunk.batches, strict=True))
        ]
        self.before = {client.id: copied_state(client.state) for client in contexts}
        for client in contexts:
            self.optimizers.forget(client.state, client.round)
        return contexts

    def _count_steps(self) -> None:
        """Record the steps made so far by the open clients, in a round that is cut short."""
        made = self.number + 1
        self.clients = [dataclasses.replace(each, steps=min(each.steps, made)) for each in self.clients]

    def _begin_client(self, client: ClientContext, message: Message | None) -> None:
        """Have a client begin; without a message if its model has the broadcast's values already."""
        with errors_of(client.id):
            if message is not None:
                self.algorithm.begin(client, message)
            self._begin_extras(client)
            self.exchange.note_begun(client)

    def _begin_extras(self, client: ClientContext) -> None:
        """Apply the settings for buffers and the objective, after the method's `begin`."""
        if self.settings.buffers == "reset":
            copy_into(client.model, self.base.initial_buffers)
        elif self.settings.buffers == "local":
            copy_into(client.model, client.state.get("buffers", self.base.initial_buffers))
        if self.settings.objective is not None:
            self.settings.objective.begin(client)

    def _end_client(self, client: ClientContext) -> Exception | None:
        """Send the client's message; if that fails, return the error."""
        return self._deliver(client, lambda: self.exchange.pack(client, self.algorithm.end(client)))

    def _deliver(self, client: ClientContext, pack: Callable[[], Packet]) -> Exception | None:
        """Have the server receive the client's packet, the result of ``pack``; if that fails, return the error."""
        try:
            with errors_of(client.id):
                packet = pack()
        except ClientsFailed as failed:
            return failed.error
        refused = self.exchange.receive(client, packet)
        if refused is None:
            self._keep_buffers(client)
        return refused

    def _keep_buffers(self, client: ClientContext) -> None:
        if self.settings.buffers == "local":
            client.state["buffers"] = {name: client.model[name].clone() for name in self.base.initial_buffers}
