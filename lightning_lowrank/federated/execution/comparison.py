"""Comparison of a step of clients together with the same step of two of them alone.

`choose_execution` makes the comparison before the first round of clients that are to step together.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_lowrank.federated.data.batches import CannotStack, OfEachClient, Places, batch_of
from lightning_lowrank.federated.data.planner import Chunk
from lightning_lowrank.federated.data.round_loader import RoundLoader
from lightning_lowrank.federated.execution.differences import (
    GRADIENT,
    TOLERANCE,
    TOLERANCES,
    StepResults,
    first_difference,
)
from lightning_lowrank.federated.execution.mapped_leaks import (
    MappedStepGuard,
    changed_number,
    numbers_of,
    reason_of_number,
)
from lightning_lowrank.federated.execution.snapshot import Snapshot, trial
from lightning_lowrank.federated.execution.stack import ClientStack, captured_logs
from lightning_lowrank.federated.failures import is_memory_error
from lightning_lowrank.federated.objective import loss_of
from lightning_lowrank.federated.randomness import OwnGenerators, StepRandomness
from lightning_lowrank.federated.state import trained_tensors
from lightning_lowrank.internals.torch import TorchDispatchMode, random_states

_SEED = 2**20 + 7

_Part = tuple[Places, Any]


def difference(trainer: Any, module: pl.LightningModule, chunk: Chunk, loader: RoundLoader) -> str:
    """Describe how a client's step together with others differs from its step alone, beyond rounding; all is restored.

    Losses, gradients, parameters, buffers and logged figures are compared, of the chunk's first client and of one whose
    first batch has another form, or of the second. Both ways are given the same draws of torch's generators. Those of
    ``random`` and NumPy are a client's own alone, and one for all together.

    Args:
        trainer: The trainer, with its optimizers set up.
        module: Its module.
        chunk: The clients.
        loader: Reads their batches.

    Returns:
        A sentence; an empty string if nothing differs, or the step cannot be tried, as rounds will say.

    Raises:
        Exception: If there is not enough memory, and for no other reason.
    """
    try:
        with trial(trainer, loader, chunk, 1) as ((parts, *_), _):
            found = _Comparison(trainer, module, parts).difference()
    except CannotStack as error:
        return str(error)
    except Exception as error:
        if is_memory_error(error):
            raise
        return ""
    return f"a client's step changes when clients step together: {found}" if found else ""


class _BackwardFails(Exception):
    """Raised with a description if the backward pass of clients together fails."""


class _Comparison:
    def __init__(self, trainer: Any, module: pl.LightningModule, parts: Sequence[_Part]) -> None:
        self._trainer, self._module, self._parts = trainer, module, parts
        self._live = trained_tensors(module)
        self._snapshot = Snapshot(module, trainer.optimizers)
        self._randomness = StepRandomness(module.device)
        self._own = self._randomness.own = OwnGenerators.of_fit(trainer)
        self._cause = ""
        self._logged_by_some: set[str] = set()
        types = {value.dtype for value in self._live.values()}
        if self._is_mixed():
            types.add(torch.get_autocast_dtype(module.device.type))
        self._tolerance = max(TOLERANCES.get(each, TOLERANCE) for each in types)
        self._rounding = max((torch.finfo(each).eps for each in types if each.is_floating_point), default=0.0)
        if module.device.type != "cpu":
            # Accelerators may round products of single precision to ten bits.
            self._rounding = max(self._rounding, 2**-11)

    def _is_mixed(self) -> bool:
        with self._trainer.precision_plugin.train_step_context():
            return torch.is_autocast_enabled(self._module.device.type)

    def difference(self) -> str:
        """A description of the first difference; empty if there is none."""
        several = sum(len(places.numbers) for places, _ in self._parts) > 1
        # A single client left in a chunk is computed differently from several clients, so compare both cases.
        for parts in ([_first_of(self._parts)], *([self._parts] if several else [])):
            chosen = _two_clients(parts)
            try:
                together = self._together(parts, chosen)
            except _BackwardFails as error:
                return str(error)
            for number, client in enumerate(chosen):
                differs = self._differs(together[number], parts, client, _SEED + number)
                if differs:
                    return self._cause or differs
        return ""

    def _together(self, parts: Sequence[_Part], chosen: Sequence[tuple[int, int]]) -> list[StepResults]:
        """Run the step of all clients together; return the results of each chosen client."""
        count = sum(len(places.numbers) for places, _ in parts)
        self._randomness.seed(_SEED)
        self._draws = _Draws()
        # Silent, because the round itself will warn of batches that differ.
        guard = MappedStepGuard(self._module, silent=True)
        stack = ClientStack(self._trainer, self._module, self._live, count, guard=guard)
        noted: list[tuple[Tensor, dict[str, Tensor]]] = []

        def note(losses: Tensor, logged: dict[str, Tensor]) -> None:
            # A value that only some of the clients log has no row for each, and is not compared.
            self._logged_by_some |= {name for name, value in logged.items() if len(value) != len(losses)}
            noted.append((losses.detach(), logged))
            self._draws.end_part()

        stack.note = note
        try:
            with self._draws.recorded(), self._trainer.precision_plugin.train_step_context():
                total = stack.training_step(parts)
            try:
                total.backward()
            except RuntimeError as error:
                raise _BackwardFails(
                    f"its backward pass fails when clients step together: {str(error).splitlines()[0]}"
                ) from error
            tables = [(losses, self._logged(logged)) for losses, logged in noted]
            return [_results(stack, parts[part][0].numbers[place], place, *tables[part]) for part, place in chosen]
        finally:
            stack.close()
            self._snapshot.restore()

    def _logged(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The logged values that are compared."""
        return {name: value for name, value in values.items() if name not in self._logged_by_some}

    def _differs(self, found: StepResults, parts: Sequence[_Part], client: tuple[int, int], seed: int) -> str:
        part, place = client
        places, batch = parts[part]
        own, row = batch_of(batch, place), place if len(places.numbers) > 1 else None
        with self._draws.replayed(part, row) as are_same:
            expected = self._alone(own, seed)
        way = "for the client alone"
        # A comparison is meaningful only with the same random draws.
        if not are_same() or not first_difference(found, expected, self._tolerance, way):
            return ""
        # The gradients of some deep networks are mostly rounding, in both ways.
        with self._draws.replayed(part, row):
            rounded = self._alone(own, seed, self._rounding)
        return first_difference(found, expected, self._tolerance, way, rounded)

    def _alone(self, batch: Any, seed: int, rounding: float = 0.0) -> StepResults:
        """Run a client's step in the module itself; return its results.

        Args:
            batch: The client's batch.
            seed: Seed of the global generators.
            rounding: The share by which each trained value is first increased or decreased at random.
        """
        module = self._module
        if rounding:
            draws = torch.Generator().manual_seed(_SEED)
            for value in (each for each in self._live.values() if each.requires_grad and each.is_floating_point()):
                signs = 2 * torch.randint(2, value.shape, generator=draws) - 1
                value.data.mul_(1 + rounding * signs.to(value))
        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        numbers = numbers_of(module)
        self._randomness.seed(seed)
        drawn_from, own = repr((random.getstate(), np.random.get_state())), self._own.describe()
        try:
            logs = captured_logs(module, {}, lambda name, metric: ValueError(name))
            with logs as logged, self._trainer.precision_plugin.train_step_context():
                output = module.training_step(batch, 0) if takes_index else module.training_step(batch)
            loss = loss_of(output)
            for value in self._live.values():
                value.grad = None
            loss.backward()
            # A step may assign new tensors to buffers, so look them up again.
            left = trained_tensors(module)
            changed = changed_number(numbers, numbers_of(module))
            self._cause = reason_of_number(changed) if changed else ""
            if repr((random.getstate(), np.random.get_state())) != drawn_from:
                self._cause = "it draws from random or NumPy, which gives one number to all clients"
            if self._own.describe() != own:
                self._cause = "it draws from a generator that the module holds, which gives one number to all clients"
            return {
                ("its loss", ""): loss.detach(),
                **{("what it logs as", name): value for name, value in self._logged(logged).items()},
                **{
                    (GRADIENT, name): torch.zeros_like(value) if value.grad is None else value.grad
                    for name, value in self._live.items()
                    if value.requires_grad
                },
                **{("what it leaves in", name): value.detach().clone() for name, value in left.items()},
            }
        finally:
            self._snapshot.restore()


def _first_of(parts: Sequence[_Part]) -> _Part:
    """The first client's part and batch, as a stack of one."""
    places, batch = parts[0]

    def first(entry: Any) -> Any:
        return entry.values[0] if isinstance(entry, OfEachClient) else entry[:1]

    return Places([0], places.samples), apply_to_collection(batch, (Tensor, OfEachClient), first)


def _two_clients(parts: Sequence[_Part]) -> list[tuple[int, int]]:
    """Two clients, as pairs of a part and a position in it; from two parts if there are two."""
    if len(parts) > 1:
        return [(0, 0), (1, 0)]
    return [(0, place) for place in range(min(2, len(parts[0][0].numbers)))]


def _results(stack: ClientStack, number: int, place: int, losses: Tensor, logged: Mapping[str, Tensor]) -> StepResults:
    """One client's results of a step together; ``number`` is its row in the stack, ``place`` its row in its part."""
    gradients = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in stack.leaves.items()
    }
    return {
        ("its loss", ""): losses[place],
        **{("what it logs as", name): value[place] for name, value in logged.items()},
        **{(GRADIENT, name): value[number] for name, value in gradients.items()},
        **{("what it leaves in", name): value[number].clone() for name, value in stack.values.items()},
    }


class _Draws:
    """Records the draws from torch's global generators in a step together, and replays them for a client alone."""

    def __init__(self) -> None:
        self._parts: list[list[tuple[Any, Tensor]]] = [[]]
        self._unknown = False

    def end_part(self) -> None:
        """Begin a new record, for the next clients, whose batches have another form."""
        self._parts.append([])

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """A context in which draws are recorded."""

        def note(func: Any, drawn: Tensor) -> Tensor:
            self._parts[-1].append((func, drawn.clone()))
            return drawn

        with _Drawing(note) as drawing:
            yield
        self._unknown |= drawing.unknown

    @contextmanager
    def replayed(self, part: int, place: int | None) -> Iterator[Any]:
        """A context that replays a client's draws; yields a function that says whether the step made the same calls."""
        recorded, same = iter(self._parts[part]), [True]

        def give(func: Any, drawn: Tensor) -> Tensor:
            known, stack = next(recorded, (None, drawn))
            given = stack[place] if place is not None and stack.ndim and len(stack) > place else stack
            if known is not func or given.shape != drawn.shape:
                same[0] = False
                return drawn
            return given

        with _Drawing(give) as drawing:
            yield lambda: not (self._unknown or drawing.unknown) and same[0] and next(recorded, None) is None


class _Drawing(TorchDispatchMode):
    """A mode that passes each draw from torch's global generators through a function, which may replace it."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self._change = change
        self.unknown = False
        """Whether something has been drawn that cannot be changed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draws = torch.Tag.nondeterministic_seeded in func.tags
        before = _states(args) if draws else []
        result = func(*args, **(kwargs or {}))
        if not draws or any(isinstance(each, torch.Generator) for each in (*args, *(kwargs or {}).values())):
            return result
        if func is torch.ops.aten.native_dropout.default:
            mask = self._change(func, result[1])
            return args[0] * mask / max(1 - args[1], 1e-12), mask
        if not isinstance(result, Tensor):
            # Fused attention, for example, draws if it has dropout.
            self.unknown |= not all(map(torch.equal, before, _states(args)))
            return result
        changed = self._change(func, result)
        return result.copy_(changed) if args and result is args[0] else changed.clone()


def _states(arguments: Sequence[Any]) -> list[Tensor]:
    """The states of the CPU's generator and of the generators of the tensors' devices."""
    return random_states(*{each.device for each in arguments if isinstance(each, Tensor)})
