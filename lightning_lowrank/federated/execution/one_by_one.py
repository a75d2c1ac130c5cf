"""The execution that trains clients one after another in the live module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer

from lightning_lowrank.arguments import join_names
from lightning_lowrank.federated.algorithm import LocalStep
from lightning_lowrank.federated.checks import check_factor_gradients
from lightning_lowrank.federated.data.planner import Chunk
from lightning_lowrank.federated.execution.base import Execution
from lightning_lowrank.federated.execution.channels_last import ChannelsLast
from lightning_lowrank.federated.failures import errors_of
from lightning_lowrank.federated.protocols import UnequalClients
from lightning_lowrank.federated.state import ClientContext


class Sequential(Execution):
    """Trains one client at a time in the live module."""

    name = "sequential"

    _has_trained = False

    def step_of(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        """A step with the method's objective, and with images in channels-last format if chosen."""
        step = self._with_objective(training_step) if self.changes_objective else training_step
        return self._with_channels_last(step) if self.channels_last else step

    def _with_objective(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        def with_objective(batch: Any, *arguments: Any, **keywords: Any) -> Any:
            return self.loss(batch, functools.partial(training_step, batch, *arguments, **keywords))

        return with_objective

    def _with_channels_last(self, step: Callable[..., Any]) -> Callable[..., Any]:
        changed = ChannelsLast(self.module).explained_step(step, "training_step")

        def with_channels_last(*arguments: Any, **keywords: Any) -> Any:
            # Inside DifferentialPrivacy's map, the batches are single samples without a batch dimension.
            return (step if self.substituted else changed)(*arguments, **keywords)

        return with_channels_last

    def open(self, chunk: Chunk) -> dict[int, Exception]:
        """Load the chunk's only client into the module."""
        client = self._install(chunk)
        self._begin_client(client, self.exchange.send(self.exchange.info(client.id)))
        self.optimizers.begin([client.state], stacked=False)
        return {}

    def _install(self, chunk: Chunk) -> ClientContext:
        self.chunk = chunk
        (client,) = self.clients = self._contexts(chunk, lambda place: self.live)
        with errors_of(client.id):
            UnequalClients.of(self.algorithm).configure(self.base, client)
        self.round_state = client.round_state
        return client

    def step(self) -> LocalStep:
        """The present step as the method sees it."""
        return self._step_of_one(self._present() if self.substituted else self.live, self.round_state)

    def _present(self) -> Mapping[str, Tensor]:
        """The module's present tensors under the names of the live ones."""
        tensors = {**dict(self.module.named_parameters(remove_duplicate=False)), **dict(self.module.named_buffers())}
        return {name: tensors.get(name, value) for name, value in self.live.items()}

    def before_step(self, optimizer: Optimizer) -> None:
        """Call the method's `before_step`; first refuse gradients of parameters that were frozen at the start."""
        thawed = self.flags.thawed()
        if thawed:
            groups = [group for each in self.base.optimizers for group in each.param_groups]
            stepped = {value for group in groups for value in group["params"] if value.grad is not None}
            late = [name for name, value in thawed.items() if value in stepped]
            if late:
                raise MisconfigurationException(
                    f"{join_names(late)} is trained in a step but was frozen when the round began, so that it would not"
                    " be sent, and its value would pass from client to client: set requires_grad=True in"
                    " on_train_epoch_start, and False in the steps that leave it out."
                )
        if self.number == 0:
            if not self._has_trained and self.module.automatic_optimization:
                check_factor_gradients(self.module, lambda name, factor: factor.grad)
            self._has_trained = True
        super().before_step(optimizer)

    def close(self) -> dict[int, Exception]:
        """Send the client's message, and keep its moments."""
        self._count_steps()
        (client,) = self.clients
        error = self._end_client(client)
        if error is not None:
            self.abandon()
            return {client.id: error}
        self.optimizers.keep(client.state)
        self.clients, self.round_state = [], {}
        return {}

    def abandon(self) -> None:
        """Drop the client, and restore the global model in the module."""
        self.exchange.show_global(self.live)
        self.clients, self.round_state = [], {}
