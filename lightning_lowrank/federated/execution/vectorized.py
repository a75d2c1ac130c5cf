"""The execution in which clients step together: their values are stacked, and one mapped step serves all."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_lowrank.arguments import join_names
from lightning_lowrank.compression import Packet
from lightning_lowrank.federated.algorithm import LocalStep
from lightning_lowrank.federated.checks import check_factor_gradients
from lightning_lowrank.federated.coordinator import Coordinator
from lightning_lowrank.federated.data.planner import Chunk
from lightning_lowrank.federated.execution.base import Execution
from lightning_lowrank.federated.execution.compiled import CompiledSteps
from lightning_lowrank.federated.execution.mapped_leaks import MappedStepGuard, refuse_writes
from lightning_lowrank.federated.execution.stack import ClientStack
from lightning_lowrank.federated.execution.why_not import (
    ALSO_TO_RESUME,
    ActsOnStacks,
    hooks_around_steps,
    reason_of_hooks,
    steps_are_observed,
)
from lightning_lowrank.federated.failures import ClientsFailed, errors_of
from lightning_lowrank.federated.leaks import refuse_resized
from lightning_lowrank.federated.protocols import UnequalClients, inherits
from lightning_lowrank.federated.state import ClientContext, State, slice_tree, stack_trees
from lightning_lowrank.internals.peft import is_base_change

_NUMBERS_AT_ONCE = 2**20
"""The most numbers that are encoded together, because of memory and caches."""


def structure_of(module: nn.Module) -> Hashable:
    """A key of the module's structure: two rounds with equal keys compute steps in the same way."""
    # Changes of quantised base weights are left out: they grow with the rounds, and all clients share them.
    buffers = [(name, value) for name, value in module.named_buffers() if not is_base_change(name)]
    tensors = [*module.named_parameters(), *buffers]
    return (
        tuple((name, value.shape, value.dtype, value.requires_grad) for name, value in tensors),
        tuple((type(part), part.training) for part in module.modules()),
    )


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _refuse_write(hook: str, name: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"execution='vectorized' is not possible: {hook} changes {name} in the module, which holds the global model"
        " while clients step together. Use execution='sequential'."
    )


class Vectorized(Execution):
    """Trains a chunk's clients together, on stacks that replace the module's parameters in the optimizers."""

    name = "vectorized"
    stacked = True
    _stack: ClientStack | None = None
    _mapped: LocalStep | None = None
    _guard: MappedStepGuard | None = None
    _has_trained = False

    exchange: Coordinator
    """Stacks of clients need the server's half in their process."""

    def __init__(self, trainer: Any, exchange: Coordinator) -> None:
        super().__init__(trainer, exchange)
        self._guards = ExitStack()
        self.compare: Callable[[], str] = lambda: ""
        """Returns why a step of clients together is not that of a client alone, if it is not."""
        self._compared = structure_of(self.module)
        self.compiled_steps: CompiledSteps | None = None

    def compile(self, clients: int, samples: int) -> None:
        """Compile steps, for at most ``clients`` clients with full batches of ``samples`` samples."""
        run = self._run_objective if self.changes_objective else None
        self.compiled_steps = CompiledSteps(self.module, clients, samples, run)

    def start(self) -> None:
        """Forbid hooks around steps to change the module's tensors, which hold the global model."""
        module = self.module
        for hook in hooks_around_steps(module):
            refuse = functools.partial(_refuse_write, f"{type(module).__name__}.{hook}()")
            self._guards.enter_context(refuse_writes(module, hook, lambda: _tensors_of(module), refuse))

    def stop(self) -> None:
        """Restore the module's hooks."""
        self._guards.close()

    def begin_round(self) -> None:
        """Look up the tensors that are trained in this round, and the callbacks that change gradients."""
        super().begin_round()
        hooked = reason_of_hooks(self.module)
        if hooked:
            raise MisconfigurationException(
                f"execution={self.settings.execution!r}: clients step together, and in this round {hooked}: register it"
                f" before the fit, or use execution='sequential'{ALSO_TO_RESUME}."
            )
        self._compare_again()
        self._acting = [callback for callback in self.trainer.callbacks if isinstance(callback, ActsOnStacks)]

    def _compare_again(self) -> None:
        """Compare a step together with steps alone again, if the module's structure has changed."""
        form, before = structure_of(self.module), self._compared
        self._compared = form
        if form == before or (self._guard is not None and not self._guard.mapped):
            return
        differs = self.compare()
        if differs:
            raise MisconfigurationException(
                f"execution={self.settings.execution!r}: clients step together, which is not possible from round"
                f" {self.trainer.current_epoch} on: {differs}. Use execution='sequential'{ALSO_TO_RESUME}."
            )

    def open(self, chunk: Chunk) -> dict[int, Exception]:
        """Stack the chunk's clients, and have each begin."""
        self.chunk = chunk
        stack = self._stack = self._new_stack(len(chunk.clients))
        self.clients = self._contexts(chunk, stack.client)
        failed = self._begin_clients()
        if len(failed) == len(chunk.clients):
            return failed
        if failed:
            self._leave_out(failed)
        self.round_state = stack_trees([client.round_state for client in self.clients])
        self.optimizers.begin([client.state for client in self.clients], stacked=True)
        return failed

    def _begin_clients(self) -> dict[int, Exception]:
        """Have each client begin; return the errors of clients that fail."""
        failed: dict[int, Exception] = {}
        # Configuring for the first client is enough: clients that step together have the same configuration.
        waiting, configure = list(self.clients), UnequalClients.of(self.algorithm).configure
        while waiting:
            first = waiting[0]
            if self._succeeds(first, failed, functools.partial(configure, self.base, first)):
                break
            waiting.pop(0)
        infos = [self.exchange.info(client.id) for client in waiting]
        if self.exchange.sends_global_model and inherits(self.algorithm, "begin"):
            if infos:
                self.exchange.send_global_model(infos)
            for client in waiting if self.settings.buffers != "average" or self.settings.objective else ():
                self._succeeds(client, failed, functools.partial(self._begin_extras, client))
            return failed
        has_begun = bool(self.exchange.common_start)
        for client, info in zip(waiting, infos, strict=True):
            sent = self.exchange.send(info)
            message = None if has_begun else sent
            self._succeeds(client, failed, functools.partial(self._begin_client, client, message))
        return failed

    def _succeeds(self, client: ClientContext, failed: dict[int, Exception], act: Callable[[], None]) -> bool:
        """Run ``act`` for a client and record an error in ``failed``; return whether it succeeded."""
        try:
            with errors_of(client.id):
                act()
        except ClientsFailed as error:
            if self.settings.on_client_error == "raise":
                raise
            failed[client.id] = error.error
        return client.id not in failed

    def _leave_out(self, failed: Collection[int]) -> None:
        """Stack the clients again without those that failed to begin."""
        assert self._stack is not None
        before, self._stack = self._stack, None
        before.close()
        places = [place for place, client in enumerate(self.clients) if client.id not in failed]
        stack = self._stack = self._new_stack(len(places))
        for name, value in stack.values.items():
            value.copy_(before.values[name][places])
        self.clients = [
            dataclasses.replace(self.clients[place], model=stack.client(number)) for number, place in enumerate(places)
        ]
        self.chunk = self.chunk.without(failed)

    def _new_stack(self, count: int) -> ClientStack:
        run = self._run_objective if self.changes_objective else None
        self._guard = self._guard or MappedStepGuard(self.module, chosen=self.settings.execution == "auto")
        return ClientStack(
            self.trainer,
            self.module,
            self.live,
            count,
            run,
            self._guard,
            self.settings.execution == "auto",
            self.compiled_steps,
            defers=not steps_are_observed(self.trainer, self.algorithm),
            logbook=self.logbook,
            start=self.exchange.common_start,
        )

    def before_batch(self, number: int) -> None:
        """Remove the clients that have made their last step from the stack."""
        super().before_batch(number)
        assert self._stack is not None
        active = self.chunk.active(number)
        if active < self._stack.active:
            self._stack.fold(active)
            self._keep_moments(active)
            self._stack.narrow(active)
        if self.changes_objective:
            self._stack.round_state = slice_tree(self.round_state, slice(active))

    def _keep_moments(self, active: int) -> None:
        """Save the optimizer states of the clients from row ``active`` on, which have made their last step."""
        assert self._stack is not None
        for place in range(active, self._stack.active):
            self.optimizers.keep(self.clients[place].state, place)

    def step(self) -> LocalStep:
        """The present step as the method sees it; inside the map over clients, that of a single client."""
        if self._mapped is not None:
            return self._mapped
        assert self._stack is not None
        active = self._stack.active
        return LocalStep(
            self.base,
            self.clients[0].round,
            self.chunk.clients[:active],
            self._stack.leaves,
            {name: self._stack.values[name][:active] for name in self.base.initial_buffers},
            slice_tree(self.round_state, slice(active)),
            self.number,
            torch.tensor(self.chunk.batches[:active], dtype=torch.float64),
            stacked=True,
        )

    def _run_objective(
        self, values: Mapping[str, Tensor], round_state: State, batch: Any, training_step: Callable[[], Any]
    ) -> Any:
        """Run one client's objective, inside the map over clients."""
        self._mapped = self._step_of_one(values, round_state)
        try:
            return self.loss(batch, training_step)
        finally:
            self._mapped = None

    def gradients(self, batch: Any) -> Tensor | None:
        """Run the clients' step compiled, if steps are compiled."""
        assert self._stack is not None
        return self._stack.gradients(batch, self.number)

    def end_steps(self) -> None:
        """Refuse steps that have changed ``requires_grad`` of the module's parameters, which the stacks replace."""
        changed = self.flags.changed()
        if changed:
            raise MisconfigurationException(
                f"execution={self.settings.execution!r}: clients step together, and a step changes requires_grad of"
                f" {join_names([*changed])} in the module, which their stacks do not follow. Use"
                f" execution='sequential'{ALSO_TO_RESUME}."
            )

    def before_step(self, optimizer: Optimizer) -> None:
        """Pass the gradients to callbacks that act on stacks, and to the method."""
        assert self._stack is not None
        self.end_steps()
        if not self._has_trained:
            self._has_trained = True
            leaves = self._stack.leaves
            check_factor_gradients(self.module, lambda name, factor: leaves[name].grad if name in leaves else None)
        for callback in self._acting:
            callback.on_before_stacked_step(self.module, self._stack.leaves)
        super().before_step(optimizer)

    def close(self) -> dict[int, Exception]:
        """Send the clients' messages, and keep their moments."""
        assert self._stack is not None
        for name in self.base.initial_buffers:
            if self._stack.values[name].shape[1:] != self.live[name].shape:
                refuse_resized(name, self.live[name].shape, self._stack.values[name].shape[1:])
        self._count_steps()
        self._stack.fold()
        self._keep_moments(0)
        if self.exchange.averages_models:
            message = self.algorithm.end(self.clients[0])
            stacks = {name: self._stack.values[name] for name in message.tensors}
            failed = self.exchange.receive_stacks(self.clients, stacks, message)
            for client in self.clients:
                self._keep_buffers(client)
        else:
            # A few clients at once.
            places = sorted(range(len(self.clients)), key=lambda place: self.clients[place].id)
            numbers = sum(value.numel() for value in self.clients[0].model.values())
            at_once = max(1, _NUMBERS_AT_ONCE // max(1, numbers))
            failed = {}
            for first in range(0, len(places), at_once):
                failed |= self._end_together(places[first : first + at_once])
        self._forget()
        return failed

    def _end_together(self, places: Sequence[int]) -> dict[int, Exception]:
        """Send the messages of the clients at these places; return the errors of clients that fail or are refused."""
        found: dict[int, Exception | None] = {}
        answers = []
        for client, place in ((self.clients[place], place) for place in places):
            client.round_state.clear()
            client.round_state.update(slice_tree(self.round_state, place))
            try:
                with errors_of(client.id):
                    answers.append(self.exchange.answer(client, self.algorithm.end(client)))
            except ClientsFailed as failed:
                found[client.id] = failed.error
        packets: list[Packet] = []
        # If that fails, they are sent one by one, and only the client whose message cannot be sent fails.
        with suppress(ClientsFailed), errors_of(*(client.id for client, *_ in answers)):
            packets = self.exchange.wire.up_together(answers)

        def packed(place: int) -> Packet:
            packet = packets[place] if packets else self.exchange.wire.up(*answers[place])
            return self.exchange.checked(answers[place][1], packet)

        for place, (client, *_) in enumerate(answers):
            found[client.id] = self._deliver(client, functools.partial(packed, place))
        return {client: error for client, error in found.items() if error is not None}

    def _forget(self) -> None:
        assert self._stack is not None
        self._stack.close()
        self._stack, self.clients, self.round_state = None, [], {}

    def abandon(self) -> None:
        """Restore the module and the optimizers; the module still holds the global model."""
        if self._stack is not None:
            self._forget()
        UnequalClients.of(self.algorithm).configure(self.base, None)
