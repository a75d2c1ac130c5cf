"""Stacked values of clients that step together, and the user's ``training_step`` mapped over them by vmap.

`Vectorized` uses it. The trained values of a chunk's clients are stacks ``[clients, …]``, which the optimizers hold in
place of the module's own parameters. A step is ``vmap`` over ``training_step``, followed by the user's elementwise
optimizer on the stacks. Frozen weights are not stacked, so that all clients share one product with them. The module
itself keeps the global model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import vmap
from torch.optim import Optimizer
from torch.random import fork_rng
from torchmetrics import Metric

from lightning_lowrank.arguments import join_names
from lightning_lowrank.federated.client_optimizers import fresh_state, is_shared
from lightning_lowrank.federated.data.batches import DiffersBetweenClients, OfEachClient, Places, batch_of
from lightning_lowrank.federated.execution.base import while_training
from lightning_lowrank.federated.execution.compiled import CompiledSteps, Inputs, Results, differ, tensors_in
from lightning_lowrank.federated.execution.mapped_layers import StackedProducts
from lightning_lowrank.federated.execution.mapped_leaks import MappedStepGuard, MappedTensors
from lightning_lowrank.federated.execution.why_not import SETS_FLAGS, CannotMap, cause_of, metric_update_reason
from lightning_lowrank.federated.leaks import OfTheRun, reachable
from lightning_lowrank.federated.logbook import Logbook
from lightning_lowrank.federated.objective import loss_of
from lightning_lowrank.federated.state import State
from lightning_lowrank.internals.lightning import logging_by, rows_of
from lightning_lowrank.internals.replaced import replaced
from lightning_lowrank.internals.torch import (
    as_rows,
    is_mapped,
    leaves_of,
    own_buffers,
    own_parameters,
    random_states,
    version_of,
)
from lightning_lowrank.internals.transformers import without_value_checks
from lightning_lowrank.optim import ProjectedOptimizer
from lightning_lowrank.optim.deferred import Deferred, DeferredSteps

Parts = Sequence[tuple[Places, Any]]
Stacks = tuple[dict[str, Tensor], dict[str, Tensor], State, Any]
Run = Callable[[dict[str, Tensor], dict[str, Tensor], State, Any], tuple[Tensor, dict[str, Tensor]]]

Objective = Callable[[Mapping[str, Tensor], State, Any, Callable[[], Any]], Any]
"""Runs one client's objective, given its values by name, its round state, its batch, and its training step."""

LOGGED_AGAIN = "\0"
"""Added to a name that a step has logged before."""


def _locations(module: nn.Module, names: Mapping[Tensor, str]) -> list[tuple[MutableMapping[str, Any], str, str]]:
    """For each tensor: the table of the submodule that contains it, its key in that table, and its full name."""
    return [
        (table, key, names[tensor])
        for part in module.modules()
        for table in (own_parameters(part), own_buffers(part))
        for key, tensor in table.items()
        if tensor is not None and tensor in names
    ]


def _refuse_gradient(gradient: Tensor) -> None:
    """A gradient hook on the module's own parameters, which hold the global model while clients step together."""
    raise MisconfigurationException(
        "execution='vectorized' cannot map training_step over clients: its loss depends on a parameter that the step"
        " reads from a list or another object instead of its module, so that all clients would share it. Read it from"
        " the module (self.parameters(), self.layer.weight) in each step, or use"
        " execution='sequential'."
    )


class ClientStack(OfTheRun):
    """The stacked values of clients that step together, installed in the trainer's optimizers and the module.

    The module's ``training_step`` and gradient clipping are replaced on the instance until `close`.

    Args:
        trainer: The trainer, with its optimizers set up.
        module: The user's module.
        live: The module's trained parameters and persistent buffers by name.
        count: Number of clients.
        objective: The objective in place of the training step's own loss. It gets ``round_state``.
        guard: Refuses changes of the module; by default one that begins here.
        falls_back: Whether clients make their steps one after another once these cannot be mapped.
        compiled: The fit's compiled steps, if there are any.
        defers: Whether nobody sees weights between steps, so that a projected optimizer may defer its own.
        logbook: Collects each client's logged values; ``None``: nobody does.
        start: First values of the clients, by name, in place of those of ``live``.
    """

    def __init__(
        self,
        trainer: Any,
        module: pl.LightningModule,
        live: Mapping[str, Tensor],
        count: int,
        objective: Objective | None = None,
        guard: MappedStepGuard | None = None,
        falls_back: bool = False,
        compiled: CompiledSteps | None = None,
        defers: bool = False,
        logbook: Logbook | None = None,
        start: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._trainer = trainer
        self._logbook = logbook
        self._compiled = compiled
        self._guard = MappedStepGuard(module) if guard is None else guard
        self._falls_back = falls_back
        self.measured = self._failed = False
        self.note: Callable[[Tensor, dict[str, Tensor]], None] | None = None
        """Called with the losses and logged values of the clients of each form of a batch."""
        self._module = module
        self._step = module.training_step
        self.device = module.device
        self._takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self.active = count
        self._objective = objective
        self.round_state: State = {}
        self._homes = _locations(module, {tensor: name for name, tensor in live.items()})
        self._deferrable = self._weights_of_linear_layers() if defers else []
        # The comparison tries a step of all optimizers.
        self._none_is_zero = self._guard.silent or (defers and all(map(_ignores_zeros, trainer.optimizers)))
        # Compiled steps come in few stack sizes, which may exceed the number of clients.
        rows = count if compiled is None else max(count, compiled.size_for(count))
        first = {**live, **(start or {})}
        self._rows = {
            name: first[name].detach().to(value).expand(rows, *value.shape).clone() for name, value in live.items()
        }
        self.values = {name: value[:count] for name, value in self._rows.items()}
        self.leaves = {
            name: self.values[name].detach().requires_grad_() for name, value in live.items() if value.requires_grad
        }
        self._mapped_tensors = MappedTensors(module)
        with ExitStack() as ends:
            self._step_leaves({value: self.leaves[name] for name, value in live.items() if name in self.leaves}, ends)
            for value in live.values():
                if value.requires_grad:
                    ends.callback(value.register_hook(_refuse_gradient).remove)
            step = while_training(trainer, self._step, self.training_step)
            ends.enter_context(replaced(module, training_step=step, configure_gradient_clipping=self._clip))
            self._ends = ends.pop_all()

    def _step_leaves(self, leaf_of: Mapping[Tensor, Tensor], ends: ExitStack) -> None:
        """Replace parameters in the optimizers by the stacks' leaves, with empty states, until `close`."""

        def forget_states() -> None:
            for optimizer in self._trainer.optimizers:
                optimizer.state = fresh_state(optimizer)

        ends.callback(forget_states)
        for optimizer in self._trainer.optimizers:
            for group in optimizer.param_groups:
                # A checkpoint written inside a chunk has groups with stacked=True.
                of_group = {"params": group["params"], **({"stacked": False} if "stacked" in group else {})}
                ends.callback(group.update, of_group)
                group["params"] = [leaf_of.get(parameter, parameter) for parameter in group["params"]]
                if "stacked" in group:
                    group["stacked"] = True
        forget_states()

    def client(self, index: int) -> dict[str, Tensor]:
        """One client's values by name, as views into the stacks."""
        return {name: stack[index] for name, stack in self.values.items()}

    def narrow(self, active: int) -> None:
        """Remove the clients from row ``active`` on from the stack, after their last step."""
        if active >= self.active:
            return
        # New leaves, because a graph that the user still refers to needs the old ones with their shapes.
        renewed: dict[Tensor, Tensor] = {}
        for name, leaf in self.leaves.items():
            self.leaves[name] = renewed[leaf] = self.values[name][:active].detach().requires_grad_()
        for optimizer in self._trainer.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [renewed.get(parameter, parameter) for parameter in group["params"]]
            for old, new in renewed.items():
                if old in optimizer.state:
                    state = optimizer.state.pop(old)
                    for key, value in state.items():
                        if not is_shared(key, value):
                            state[key] = value[:active]
                    optimizer.state[new] = state
        self.active = active

    def _weights_of_linear_layers(self) -> list[str]:
        """Names of the weights of torch's own linear layers that no other part of the module shares."""
        holders = Counter(name for _, _, name in self._homes)
        layers = [own_parameters(part) for part in self._module.modules() if type(part) is nn.Linear]
        found = (name for table, key, name in self._homes if key == "weight" and any(table is each for each in layers))
        return [name for name in found if holders[name] == 1]

    def deferred(self) -> dict[str, Deferred]:
        """Weights whose changes are deferred in the next step, by name."""
        if not self._deferrable:
            return {}
        names = {id(self.leaves[name]): name for name in self._deferrable if name in self.leaves}
        found: dict[str, Deferred] = {}
        for optimizer in self._trainer.optimizers:
            if isinstance(optimizer, ProjectedOptimizer):
                each = optimizer.defer(self.leaves[name] for name in names.values())
                found.update({names[id(leaf)]: deferred for leaf, deferred in each})
        return found

    def fold(self, first: int = 0) -> None:
        """Add the deferred changes to the weights of the clients from row ``first`` on."""
        for optimizer in self._trainer.optimizers if self._deferrable else ():
            if isinstance(optimizer, ProjectedOptimizer):
                optimizer.fold(first)

    def close(self) -> None:
        """Restore the optimizers' parameters and the module's methods."""
        self._ends.close()
        if not self._failed:
            self._guard.after_last_step()

    def training_step(self, parts: Parts, batch_idx: int = 0) -> Tensor:
        """The sum of the losses of all clients in a chunk's batch; its gradient gives each client that of its own loss.

        Args:
            parts: For each form of a batch, the clients' places in the stack, and one batch with theirs stacked in it.
            batch_idx: Passed on.

        Raises:
            MisconfigurationException: If the step does something that cannot be mapped over clients.
        """
        try:
            return self._made(parts, batch_idx)
        except Exception:
            self._failed = True
            self._mapped_tensors.remove()
            raise

    def _made(self, parts: Parts, batch_idx: int) -> Tensor:
        self._tell_of_unequal(parts)
        mapped = any(len(places.numbers) > 1 for places, _ in parts)
        # A step over several forms of batches is guarded like a mapped one, even if no form has two clients.
        together = mapped or len(parts) > 1
        if together:
            self._guard.before_step()
        total: Tensor | None = None
        of_parts: list[Tensor] = []
        logged, deferred = _Logged(self._logbook), self.deferred()
        for places, batch in parts:
            part = _Part(self, places, batch, batch_idx, logged.settings, deferred, apart=len(parts) > 1)
            losses, values = part.mapped()
            part.put_back()
            if self.note is not None:
                self.note(losses, values)
            if len(places.numbers) > 1:
                # Not for a single client, whose values in attributes are plain tensors that later steps may read.
                self._guard.after_part()
            total = losses.sum() if total is None else total + losses.sum()
            of_parts.append(losses)
            logged.add(values, places, batch)
        self._refuse_unequal_use(of_parts)
        if together:
            self._guard.after_step(mapped)
        logged.log()
        assert total is not None
        return total

    def gradients(self, parts: Parts, batch_idx: int = 0) -> Tensor | None:
        """Do `training_step`, ``zero_grad()`` and ``backward()``, compiled for the clients with a full batch.

        Returns:
            The sum of the losses; ``None`` if nothing is compiled. Nothing has been done then.
        """
        compiled = self._compiled
        if compiled is None or compiled.reason or not self._guard.settled or not self._guard.mapped:
            return None
        if self.deferred():
            compiled.give_up("the optimizer keeps its steps apart from the weights, which takes less time")
            return None
        full = next((part for part in parts if part[0].samples == compiled.samples and part[0].is_prefix), None)
        size = 0 if full is None else compiled.size_for(len(full[0].numbers))
        if full is None or not size:
            return None
        logged = _Logged(self._logbook)
        for leaf in self.leaves.values():
            leaf.grad = None
        total: Tensor | None = None
        used: list[Collection[str]] = []
        for places, batch in parts:
            part = _Part(self, places, batch, batch_idx, logged.settings, {}, apart=len(parts) > 1)
            found = self._compiled_part(compiled, size, part) if places is full[0] else None
            losses, values = part.backward() if found is None else found
            part.put_back()
            total = losses.sum() if total is None else total + losses.sum()
            used.append(part.used)
            logged.add(values, places, batch)
        self._refuse_unequal(used)
        logged.log()
        return total

    def _refuse_unequal_use(self, losses: Sequence[Tensor]) -> None:
        """Refuse a step in which some clients or parts use parameters that others do not."""
        if len(losses) > 1 and not self._none_is_zero:
            leaves = [leaves_of(loss) for loss in losses]
            self._refuse_unequal([{n for n, leaf in self.leaves.items() if leaf in found} for found in leaves])

    def _refuse_unequal(self, used: Sequence[Collection[str]]) -> None:
        if len(used) > 1 and not self._none_is_zero:
            unequal = [name for name in self.leaves if 0 < sum(name in names for names in used) < len(used)]
            if unequal:
                raise CannotMap(
                    f"some clients of a step do not use {join_names(unequal)}, which others use, and would get"
                    " gradients of zero in place of none",
                    self._falls_back,
                )

    def _compiled_part(
        self, compiled: CompiledSteps, size: int, part: _Part
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Run the compiled step for the first clients, in a stack of ``size`` rows; ``None`` if it is impossible."""
        devices = [] if self.device.type == "cpu" else [self.device]
        is_new, inputs = compiled.is_new(size), part.inputs(self._rows, size)
        if is_new:
            # Cloned, because a new step may change its inputs in place.
            inputs = Inputs(*apply_to_collection(tuple(inputs), Tensor, Tensor.clone))
        with fork_rng(devices, device_type=self.device.type) if is_new else nullcontext():
            results = compiled.step(self._step, self._takes_index, inputs, part.number)
        if results is None:
            return None
        results = part.rows_of(results)
        if not is_new:
            part.store(results, compiled.settings[size], compiled.used[size])
            return results.losses, results.logged
        # At first use the uncompiled step runs too, for comparison, and its results are used, because compiled steps
        # draw other random numbers.
        before, versions = random_states(self.device), part.versions()
        losses, logged = part.backward()
        draws = not all(map(torch.equal, before, random_states(self.device)))
        compiled.settings[size] = dict(part.settings)
        compiled.used[size] = part.used
        changed = next((name for name, version in part.versions().items() if version != versions[name]), "")
        expected = part.results(losses, logged)
        reason = f"it changes {changed} in place" if changed else differ(results, expected, values=not draws)
        if reason:
            compiled.give_up(reason)
        return losses, logged

    def _tell_of_unequal(self, parts: Parts) -> None:
        """Warn once that clients whose batches differ in more than size do not step together."""
        by_size = {places.samples: batch for places, batch in parts}
        if self._falls_back or self._guard.warned_of_batches or len(by_size) == len(parts):
            return
        self._guard.warned_of_batches = True
        places, batch = next((places, batch) for places, batch in parts if by_size[places.samples] is not batch)
        tensors = [
            [(name, tuple(item.shape[1:])) for name, item in reachable("batch", each) if isinstance(item, Tensor)]
            for each in (batch, by_size[places.samples])
        ]
        shapes = [f"{one[0]} of shapes {one[1]} and {two[1]}" for one, two in zip(*tensors, strict=False) if one != two]
        rank_zero_warn(
            f"execution='vectorized': clients' batches of {places.samples} samples differ in form"
            f" ({(*shapes, 'in entries that are no tensors')[0]}), and only those of one form step together: have the"
            " collate"
            " function pad them to one length (pad_to_multiple_of of TextClassification and Instructions), or leave"
            " out entries that are no tensors."
        )

    def run(
        self,
        values: Mapping[str, Tensor],
        deferred: Mapping[str, Deferred],
        state: State,
        batch: Any,
        batch_idx: int,
        settings: dict[str, dict[str, Any]],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run one client's training step with its values; return the loss and the logged values.

        Args:
            values: The client's values by name.
            deferred: Its weights' changes that are kept apart.
            state: Its round state.
            batch: Its batch.
            batch_idx: Passed on.
            settings: Takes by name with which settings values are logged.
        """
        arguments = (batch, batch_idx) if self._takes_index else (batch,)

        def own_step() -> Any:
            return self._step(*arguments)

        # Entered inside vmap, because vmap's own argument checks would all pass through the mode.
        changes = {id(values[name]): each for name, each in deferred.items()}
        products: AbstractContextManager[Any] = DeferredSteps(changes) if changes else nullcontext()
        if any(map(is_mapped, values.values())):
            products = StackedProducts(changes)
        captures = captured_logs(self._module, settings, _refuse_metric)
        with products, without_value_checks(), captures as captured, self._in_place(values):
            output = own_step() if self._objective is None else self._objective(values, state, batch, own_step)
        loss = loss_of(output)
        if not isinstance(loss, Tensor):
            raise MisconfigurationException(
                f"execution='vectorized': training_step gave {output!r} in place of a loss, and clients that step"
                " together cannot skip a step; use execution='sequential'."
            )
        if loss.numel() != 1:
            raise ValueError(f"training_step gave a loss of shape {tuple(loss.shape)} in place of one number")
        return loss, captured

    def mapped(self, run: Run, stacks: Stacks) -> tuple[Tensor, dict[str, Tensor]]:
        """Map a client's step over clients by vmap; return their losses and logged values."""
        named, changes, state, batch = stacks

        def of_one(
            values: dict[str, Tensor], changes: dict[str, Tensor], state: State, tensors: list[Tensor]
        ) -> tuple[Tensor, dict[str, Tensor]]:
            mapped = iter(tensors)
            return run(values, changes, state, apply_to_collection(batch, Tensor, lambda _: next(mapped)))

        # Saved-tensor hooks are disabled, because gradient checkpointing would recompute outside of vmap.
        with nullcontext() if self.measured else disable_saved_tensors_hooks("saved tensors hooks"):
            return vmap(of_one, randomness="different")(named, changes, state, tensors_in(batch))

    def over_clients(self, run: Run, stacks: Stacks) -> tuple[Tensor, dict[str, Tensor]]:
        """Map a client's step over clients, or run it for one client after another if it cannot be mapped.

        To map the step of a single client takes three times as long as to make it.
        """
        if _clients_in(stacks) == 1:
            return self.one_by_one(run, stacks)
        own = _of_each_client(stacks[3])
        if own and self._guard.reads_of_each:
            return self.one_by_one(run, stacks)
        if not self._guard.mapped:
            return self.one_by_one(run, stacks)
        written = [stack for name, stack in stacks[0].items() if name not in self.leaves]
        kept = [stack.clone() for stack in written] if self._falls_back or own else []
        try:
            return self.mapped(run, stacks)
        except MisconfigurationException:
            raise
        except DiffersBetweenClients as error:
            self._guard.reads_of_each = True
            self._mapped_tensors.remove()
            if not self._falls_back and not self._guard.silent:
                rank_zero_warn(
                    f"execution='vectorized': {error}, so that clients make their steps one after another: leave"
                    " it out of the step, or make it a tensor."
                )
        except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
            metric = self._guard.updated_metric()
            cause = metric_update_reason(metric) if metric else cause_of(error)
            if not self._falls_back:
                raise CannotMap(cause) from error
            self._guard.mapped = False
            rank_zero_warn(
                f"execution='auto': training_step can no longer be mapped over clients: {cause}. From here on clients"
                " make their steps one after another."
            )
        for stack, before in zip(written, kept, strict=True):
            stack.copy_(before)
        return self.one_by_one(run, stacks)

    def one_by_one(self, run: Run, stacks: Stacks) -> tuple[Tensor, dict[str, Tensor]]:
        """Run a step for one client after another; return their losses and logged values.

        A value that some of the clients do not log has an entry for each of the others.
        """
        try:
            each = [run(*_of_client(stacks, place)) for place in range(_clients_in(stacks))]
        except RuntimeError as error:
            if SETS_FLAGS in str(error):
                raise CannotMap(cause_of(error), self._falls_back) from error
            raise
        self._refuse_unequal_use([loss for loss, _ in each])
        names = dict.fromkeys(name for _, logged in each for name in logged)
        values = {name: torch.stack([logged[name] for _, logged in each if name in logged]) for name in names}
        return torch.stack([loss for loss, _ in each]), values

    @contextmanager
    def _in_place(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Swap tensors into the module; `torch.func.functional_call` would take longer than small products do."""
        previous = [table[key] for table, key, _ in self._homes]
        try:
            for table, key, name in self._homes:
                table[key] = values[name]
            yield
            for table, key, name in self._homes:
                if key not in table:
                    raise CannotMap(
                        f"it removes {name} from its module, as adding or removing a parametrization does",
                        self._falls_back,
                    )
                if table[key] is not values[name]:
                    # Some steps assign a new buffer instead of changing it in place.
                    with torch.no_grad():
                        values[name].copy_(table[key])
        finally:
            for (table, key, _), tensor in zip(self._homes, previous, strict=True):
                table[key] = tensor

    @torch.no_grad()
    def _clip(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip each client's gradients separately, as Lightning clips a single model's."""
        if not gradient_clip_val:
            return
        if str(gradient_clip_algorithm) in ("value", "GradClipAlgorithmType.VALUE"):
            nn.utils.clip_grad_value_(self.leaves.values(), gradient_clip_val)
            return
        gradients = [leaf.grad for leaf in self.leaves.values() if leaf.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(as_rows(gradient), dim=1) for gradient in gradients])
        scale = (gradient_clip_val / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.view(-1, *(1 for _ in gradient.shape[1:])).to(gradient.dtype))


@contextmanager
def captured_logs(
    module: pl.LightningModule,
    settings: dict[str, dict[str, Any]],
    refuse_metric: Callable[[str, Metric], Exception],
) -> Iterator[dict[str, Tensor]]:
    """Collect the values that a step logs, because values inside vmap cannot be logged directly.

    Args:
        module: The module whose step is mapped.
        settings: Takes by name with which settings values are logged.
        refuse_metric: Returns the error for a logged metric object, given its name.
    """
    captured: dict[str, Tensor] = {}

    def log(name: str, value: Any, *arguments: Any, **keywords: Any) -> None:
        if isinstance(value, Metric):
            raise refuse_metric(name, value)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"self.log({name!r}, ...) got a tensor of shape {tuple(value.shape)} in place of one number; log its"
                " mean, for instance"
            )
        while name in captured:
            name += LOGGED_AGAIN
        captured[name] = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
        names = (
            *("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group"),
            *("add_dataloader_idx", "batch_size"),
        )
        settings[name] = {**dict(zip(names, arguments, strict=False)), **keywords}

    with logging_by(module, log):
        yield captured


def _ignores_zeros(optimizer: Optimizer) -> bool:
    """Whether a gradient of zero is the same to an optimizer as none."""
    kept = ("momentum", "weight_decay")
    return type(optimizer) is torch.optim.SGD and not any(
        group[name] for group in optimizer.param_groups for name in kept
    )


def _refuse_metric(name: str, metric: Metric) -> MisconfigurationException:
    return MisconfigurationException(
        f"execution='vectorized': training_step logs the metric {type(metric).__name__} as {name!r}, whose state all"
        " clients would share; log its value, or use execution='sequential'."
    )


def _of_client(stacks: Stacks, place: int) -> Stacks:
    """One client's slice of the stacks. A single client's is squeezed, which autograd does without a copy."""
    alone = _clients_in(stacks) == 1

    def own(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.squeeze(0) if alone else value[place] for name, value in tensors.items()}

    values, changes, state, batch = stacks
    return own(values), own(changes), batch_of(state, place) if state else state, batch_of(batch, place)


def _of_each_client(batch: Any) -> list[OfEachClient]:
    found: list[OfEachClient] = []
    apply_to_collection(batch, OfEachClient, found.append)
    return found


def _clients_in(stacks: Stacks) -> int:
    return len(next(iter(stacks[0].values())))


def _size_of_one(batch: Any, samples: int) -> int:
    """The size of one client's batch as Lightning infers it, which is that of its first tensor's first dimension."""
    first = next(iter(batch.values())) if type(batch) is dict else batch[0] if type(batch) in (list, tuple) else batch
    if isinstance(first, Tensor) and first.ndim > 1 and first.shape[1] == samples:
        return samples
    own = batch_of(batch, 0)
    return rows_of(own) or extract_batch_size(own)


class _Logged:
    """The logged values of a step, one per client, weighted by batch sizes as Lightning infers them.

    Args:
        logbook: Takes it; ``None``: nobody does, as in a trial.
    """

    def __init__(self, logbook: Logbook | None) -> None:
        self._logbook = logbook
        self.settings: dict[str, dict[str, Any]] = {}
        self._values: list[tuple[str, Tensor, int, list[int]]] = []

    def add(self, values: Mapping[str, Tensor], places: Places, batch: Any) -> None:
        """Add the logged values of the clients at these places, whose batches are in ``batch``."""
        size = 0
        for key, value in values.items():
            settings = self.settings[key]
            weight = settings.get("batch_size")
            if weight is None and self._logbook is not None and settings.get("on_epoch"):
                weight = size = size or _size_of_one(batch, places.samples)
            # Values that are logged per step alone count alike, as Logbook.log has them.
            self._values.append((key, value.flatten(), 1 if weight is None else weight, places.numbers))

    def log(self) -> None:
        """Pass all values on to the logbook, after the step of all clients."""
        if self._logbook is None:
            return
        for key, values, size, places in self._values:
            settings = {name: value for name, value in self.settings[key].items() if name != "batch_size"}
            self._logbook.log_clients(key.rstrip(LOGGED_AGAIN), values, size, places, settings)


class _Part:
    """The clients of a step whose batches have equal shapes.

    Buffers and round states are copies if the part is ``apart``: autograd keeps some of them for the backward pass of
    all parts, and would take another part's writes to its own rows of a stack for changes of them.
    """

    def __init__(
        self,
        stack: ClientStack,
        places: Places,
        batch: Any,
        batch_idx: int,
        settings: dict[str, dict[str, Any]],
        deferred: Mapping[str, Deferred],
        apart: bool = False,
    ) -> None:
        if batch is None:
            raise CannotMap(
                "the batch of some clients is None, as from a collate function that leaves out all of its samples, and"
                " these clients would skip the step",
                stack._falls_back,
            )
        self.places = places
        self._stack, self._batch, self.number, self.settings = stack, batch, batch_idx, settings
        numbers = places.numbers
        self._chosen = slice(numbers[0], numbers[-1] + 1)
        rows_needed = apart or not places.contiguous
        self._rows = torch.tensor(numbers).to(stack.device, non_blocking=True) if rows_needed else None
        self._deferred = deferred
        self._named = {name: self._select(stack.leaves.get(name, value)) for name, value in stack.values.items()}
        self._changes = {name: self._select(each.change) for name, each in deferred.items()}
        self._state = apply_to_collection(stack.round_state, Tensor, self._select) if stack.round_state else {}
        self._gradients: dict[str, Tensor] = {}

    def _select(self, tensor: Tensor) -> Tensor:
        if self._rows is not None:
            return tensor.index_select(0, self._rows.to(tensor.device, non_blocking=True))
        return tensor if len(tensor) == len(self.places.numbers) else tensor[self._chosen]

    def _run(
        self, values: dict[str, Tensor], changes: dict[str, Tensor], state: State, batch: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        deferred = {name: Deferred(self._deferred[name].projection, change) for name, change in changes.items()}
        return self._stack.run(values, deferred, state, batch, self.number, self.settings)

    def mapped(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Map the step over the clients; return their losses and logged values."""
        return self._stack.over_clients(self._run, (self._named, self._changes, self._state, self._batch))

    def put_back(self) -> None:
        """Copy values and round states that the step changed from this part's copies back to the stacks."""
        if self._rows is not None:
            for name, value in self._named.items():
                # A parameter is copied only if changed in place, which is rare.
                if name not in self._stack.leaves or version_of(value):
                    self._stack.values[name].index_copy_(0, self._rows, value.detach())
            _put_back(self._stack.round_state, self._rows, self._state)

    def backward(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the step and its backward pass; return the losses and logged values."""
        losses, logged = self.mapped()
        trained = {name: self._named[name] for name in self._stack.leaves}
        gradients = torch.autograd.grad(losses.sum(), list(trained.values()), allow_unused=True)
        self._give({name: each for name, each in zip(trained, gradients, strict=True) if each is not None})
        return losses.detach(), logged

    @torch.no_grad()
    def _give(self, gradients: dict[str, Tensor]) -> None:
        """Write these clients' gradients into the leaves' gradients."""
        self._gradients = gradients
        everyone = len(self.places.numbers) == self._stack.active and self._rows is None
        for name, gradient in gradients.items():
            leaf = self._stack.leaves[name]
            if everyone:
                leaf.grad = gradient
                continue
            if leaf.grad is None:
                # Clients with batches of another form may not use this parameter.
                leaf.grad = torch.zeros_like(leaf)
            if self._rows is None:
                leaf.grad[self._chosen] = gradient
            else:
                leaf.grad.index_copy_(0, self._rows, gradient)

    # Compiled steps

    def inputs(self, rows: Mapping[str, Tensor], size: int) -> Inputs:
        """The inputs for a stack of ``size`` rows, cut from ``rows``; rows beyond these clients are ignored."""

        def padded(tensor: Tensor) -> Tensor:
            tensor = tensor[: len(self.places.numbers)].detach()
            if len(tensor) == size:
                return tensor
            if not tensor.stride(0):
                return tensor[:1].expand(size, *tensor.shape[1:])
            return torch.cat([tensor, tensor[:1].expand(size - len(tensor), *tensor.shape[1:])])

        values = {name: value[:size] for name, value in rows.items()}
        return Inputs(
            {name: values.pop(name) for name in self._stack.leaves},
            values,
            apply_to_collection(self._stack.round_state, Tensor, padded) if self._stack.round_state else {},
            apply_to_collection(self._batch, Tensor, padded),
        )

    def rows_of(self, results: Results) -> Results:
        """These clients' rows of a compiled step's outputs."""
        count = len(self.places.numbers)
        losses, *tables = results
        return Results(losses[:count], *({name: value[:count] for name, value in table.items()} for table in tables))

    @property
    def used(self) -> frozenset[str]:
        """Names of the parameters for which the step has gradients."""
        return frozenset(self._gradients)

    def store(self, results: Results, settings: Mapping[str, dict[str, Any]], used: Collection[str]) -> None:
        """Adopt a compiled step's gradients of ``used`` parameters, its buffers, and its settings of logged values."""
        self.settings.update(settings)
        # A compiled step returns zero gradients for unused parameters.
        self._give({name: gradient for name, gradient in results.gradients.items() if name in used})
        for name, value in results.buffers.items():
            self._named[name].copy_(value)

    def results(self, losses: Tensor, logged: dict[str, Tensor]) -> Results:
        """The outputs of the uncompiled step."""
        buffers = {name: value for name, value in self._named.items() if name not in self._stack.leaves}
        return Results(losses, self._gradients, logged, buffers)

    def versions(self) -> dict[str, int]:
        """The version counters of parameters and round states, which count changes in place."""
        values = [(name, value) for name, value in self._named.items() if name in self._stack.leaves]
        values += [(f"round state {number}", value) for number, value in enumerate(tensors_in(self._state))]
        return {name: version_of(value) for name, value in values}


def _put_back(stacks: State, rows: Tensor, selected: State) -> None:
    """Copy the selected clients' changed round states back to the stacks."""
    for name, stack in stacks.items():
        if isinstance(stack, dict):
            _put_back(stack, rows, selected[name])
        elif stack.stride(0):
            # A tensor that all clients share is expanded, with stride 0, and is not written to.
            stack.index_copy_(0, rows.to(stack.device, non_blocking=True), selected[name])
