"""Clients' steps from graphs of tensor operations, traced once and replayed without vmap and autograd.

`ClientStack` asks `StepGraphs` for each step. A graph serves all numbers of clients and of samples that its tracing was
not decided by. It makes the same operations in the same order, so that its results are bit for bit those of the step.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_lowrank.federated.data.loader import OfEachClient
from lightning_lowrank.federated.execution.captures import Captures, close
from lightning_lowrank.federated.execution.reads import Observed, Reads
from lightning_lowrank.federated.execution.traces import Untraced
from lightning_lowrank.internals import tracing
from lightning_lowrank.internals.torch import device_module, synchronize
from lightning_lowrank.internals.tracing import Untraceable

Results = tuple[list[Tensor], Any]
"""Tensors, and what else a step gives, which does not depend on tensors."""

_WORTH_TRACING = 2000
"""Steps that a run must have left for the first trace, which takes as long as half of them gain by it."""
WORTH_COMPILING = 30_000
"""Steps that a run must have left for ``compile="auto"``: some 0.3 ms of each make up for ten seconds."""
_MOST_CHANGES = 10
_FORMS_AT_ONCE = 8
"""Forms of batches that are traced at once. More, such as one for each length of a text, have to repay it first."""


class Step(NamedTuple):
    """A step of clients that is to be made.

    Args:
        form: What must be equal for steps of one graph, but for the sizes.
        sizes: Sizes by name.
        named: Returns for each tensor the name of each dimension's size, and ``None`` for one that ``form`` fixes.
            ``None`` stands for a tensor that all clients share, and that the step does not write into.
        tensors: What the step takes. It may write into them.
        make: Makes the step itself, given such tensors.
        gradients: Returns the places of values' gradients among the results by the values' names, given what else the
            step gives.
    """

    form: Hashable
    sizes: Mapping[str, int]
    named: Callable[[], Sequence[Sequence[str | None] | None]]
    tensors: Sequence[Tensor]
    make: Callable[[Sequence[Tensor]], Results]
    gradients: Callable[[Any], Mapping[str, int]] = lambda note: {}

    @property
    def key(self) -> Hashable:
        """What is equal for steps of one replay."""
        return self.form, *self.sizes.values()


@dataclass
class _Graph:
    traced: tracing.Traced
    reads: Reads
    note: Any
    compiled: tracing.Compiled | None = None
    unfit: set[Hashable] = field(default_factory=set)
    """Forms and sizes that it is known not to serve."""
    rounds: int = 0
    """Number of rounds in which it was used."""
    last: int = -1

    def is_due(self, round_number: int) -> bool:
        """Return whether its results are still to be compared in a round: the first, second, fourth … that uses it."""
        return self.last != round_number and self.rounds & (self.rounds + 1) == 0

    def count(self, round_number: int) -> None:
        """Count a round in which it is used."""
        if self.last != round_number:
            self.last, self.rounds = round_number, self.rounds + 1


@dataclass
class _Replay:
    graph: _Graph
    run: Callable[[Sequence[Tensor]], list[Tensor]]
    of_own_sizes: bool
    """Whether the graph was traced for these sizes."""
    exact: bool = True
    """Whether it gives the step's results bit for bit."""
    compared: bool = False
    """Whether its results have been compared with a step's."""


class StepGraphs(Untraced):
    """The graphs of one fit's steps.

    A step is traced as soon as it has been made twice, if the rest of the run is worth it; one of other sizes, where
    the first graph does not serve them, once it would have gained by then as much time as tracing takes. What the step
    has read of Python meanwhile is compared before each replay; a step that reads something else is traced again, at
    most ten times. Its first results for each number of clients and of samples are compared with the step's own, and so
    are the first of the second, fourth, eighth … round that uses it. A step that cannot be traced, or whose graph gives
    other values, is made as it is.

    Args:
        module: The user's module.
        roots: Other objects whose attributes a step may read.
        steps_left: Returns how many steps the run has left, at most.
        captures: Captures replays on the device, where there is a way.

    Attributes:
        reason: Why steps are made without graphs; empty if that is not so.
        numbered: Objects whose attribute ``number`` is the number of the step.
        compiles: Whether graphs are compiled.
    """

    def __init__(
        self,
        module: nn.Module,
        roots: Sequence[Any],
        steps_left: Callable[[], float],
        captures: Captures | None = None,
    ) -> None:
        self.reason = ""
        self.captures = Captures(None) if captures is None else captures
        self.numbered: list[Any] = []
        self.compiles = False
        self._module, self._roots, self._steps_left = module, roots, steps_left
        self._forms: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, list[_Graph]] = {}
        self._replays: dict[Hashable, list[_Replay]] = {}
        self._changes = self._round = 0
        self._uses: Counter[Hashable] = Counter()
        self._seconds, self._gain = 0.0, 0.0

    def number_of(self, form: Hashable) -> int:
        """Return a number that stands for a form, which may be long to hash."""
        return self._forms.setdefault(form, len(self._forms))

    def begin_round(self, compiled: bool = False) -> None:
        """Have graphs compared once again where this round is due, and ``compiled`` from here on."""
        self._round += 1
        self.compiles = compiled

    def find(self, step: Step) -> Callable[[], Results] | None:
        """Return a function that makes a step by its graph and returns what the step returns.

        It is ``None`` if the step is to be made without a graph.
        """
        if self.reason:
            return None
        key = step.key
        replays = self._replays.get(key)
        if replays is None:
            replays = self._replays[key] = []
        found = next((each for each in replays if not each.graph.reads.changed()), None)
        if found is None:
            found = self._make(step)
            if found is None:
                return None
            replays.append(found)
        replay = found
        if replay.graph.is_due(self._round) or not replay.compared:
            return lambda: self._compared(replay, step)
        replay.graph.count(self._round)
        return lambda: (replay.run(step.tensors), replay.graph.note)

    def _make(self, step: Step) -> _Replay | None:
        key = step.key
        graphs = self._graphs.setdefault(step.form, [])
        changed = ""
        for graph in graphs:
            if key in graph.unfit:
                continue
            if not graph.traced.holds(step.sizes):
                graph.unfit.add(key)
                continue
            changed = graph.reads.changed()
            if not changed:
                return self._replay(graph, step, of_own_sizes=False)
        if changed:
            self._changes += 1
            if self._changes > _MOST_CHANGES:
                self.give_up(f"it reads {changed}, which changes again and again")
                return None
        elif not self._is_worth_it(key, first=not graphs and len(self._graphs) <= _FORMS_AT_ONCE):
            return None
        reason = tracing.unsupported_reason()
        if torch.is_anomaly_enabled():
            reason = "detect_anomaly looks at each operation of its backward pass"
        if reason:
            self.give_up(reason)
            return None
        begin = time.perf_counter()
        try:
            graph = self._trace(step)
            replay = self._replay(graph, step, of_own_sizes=True)
        except (Exception, Untraceable) as error:
            self.give_up(str(error) if isinstance(error, Untraceable) else f"torch says: {_first_line(error)}")
            return None
        graphs.append(graph)
        self._seconds = time.perf_counter() - begin
        rank_zero_info(f"traced a step of clients in {self._seconds:.1f} s")
        return replay

    def _replay(self, graph: _Graph, step: Step, of_own_sizes: bool) -> _Replay:
        sizes, exact = step.sizes, _is_exact(step.tensors[0].device)
        gradients = step.gradients(graph.note)
        kept = [place for place, names in enumerate(step.named()) if names is None]
        if self.compiles and graph.traced.varies_to(sizes):
            try:
                if graph.compiled is None:
                    begin = time.perf_counter()
                    graph.compiled = graph.traced.compile(self.captures.products(gradients))
                    rank_zero_info(f"compiled a step of clients in {time.perf_counter() - begin:.1f} s")
                # Compiling may have decided by the sizes as well.
                if graph.traced.holds(sizes):
                    compiled = self.captures.around(graph.compiled, kept, gradients)
                    return _Replay(graph, compiled, of_own_sizes, exact=False)
            except Exception as error:
                self.compiles = False
                rank_zero_warn(f"steps are not compiled, but replayed: {_first_line(error)}")
        run = graph.traced.replay(sizes)
        return _Replay(graph, self.captures.around(run, kept, gradients), of_own_sizes, exact)

    def _is_worth_it(self, key: Hashable, first: bool) -> bool:
        if first:
            return self._steps_left() >= _WORTH_TRACING
        self._uses[key] += 1
        return self._uses[key] * self._gain >= self._seconds

    def _trace(self, step: Step) -> _Graph:
        notes: list[Any] = []

        def function(*arguments: Tensor) -> list[Tensor]:
            results, note = step.make(arguments)
            notes.append(note)
            return results

        reads = Reads(self._module, self._roots)
        before = [each.number for each in self.numbered]
        with _same_randomness(step.tensors):
            try:
                for each in self.numbered:
                    each.number = Observed(each.number)
                with reads.watching():
                    traced = _traced(function, step.tensors, step.named())
            finally:
                for each, number in zip(self.numbered, before, strict=True):
                    each.number = number
        return _Graph(traced, reads, notes[-1])

    def _compared(self, replay: _Replay, step: Step) -> Results:
        """Make the step itself, and compare its results with the graph's."""
        if self.reason:
            # Given up for another part of the same step.
            return step.make(step.tensors)
        tensors, named = step.tensors, step.named()
        copies = [tensor if names is None else tensor.clone() for tensor, names in zip(tensors, named, strict=True)]
        device = tensors[0].device
        synchronize(device)
        begin = time.perf_counter()
        drawn: list[Tensor] = []
        try:
            with _same_randomness(tensors):
                replayed = replay.run(copies)
                drawn = _randomness(tensors)
        except (RuntimeError, TypeError, ValueError, IndexError):
            # A size that tracing has taken for fixed.
            replayed = []
        synchronize(device)
        middle = time.perf_counter()
        results, note = step.make(tensors)
        synchronize(device)
        replay.graph.count(self._round)
        was_equal, replay.compared = replay.compared, True
        self._gain = max(self._gain, time.perf_counter() - middle - (middle - begin))
        pairs = [*zip(replayed, results, strict=False), *zip(copies, tensors, strict=True)]
        pairs += zip(drawn, _randomness(tensors), strict=False)
        if (
            note != replay.graph.note
            or len(replayed) != len(results)
            or not all((_equal if replay.exact else close)(one, two) for one, two in pairs)
        ):
            self._replays[step.key].remove(replay)
            replay.graph.unfit.add(step.key)
            if replay.of_own_sizes or was_equal:
                self.give_up("its graph gives other values than the step")
        return results, note

    def give_up(self, reason: str) -> None:
        """Make steps without graphs from here on, and say why."""
        self.reason = reason
        self._graphs, self._replays = {}, {}
        rank_zero_info(f"training_step is run in each step, not traced once: {reason}.")


def _traced(
    function: tracing.Function, tensors: Sequence[Tensor], named: Sequence[Sequence[str | None] | None]
) -> tracing.Traced:
    """Trace for all sizes, or for the present ones alone where an operation needs to know them."""
    fixed = [[None] * tensor.ndim for tensor in tensors]
    sizes = [names or fixed[place] for place, names in enumerate(named)]
    kept = [place for place, names in enumerate(named) if names is None]
    try:
        return tracing.Traced(function, tensors, sizes, kept)
    except RuntimeError:
        return tracing.Traced(function, tensors, fixed, kept)


@contextlib.contextmanager
def _same_randomness(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Give torch's random number generators back as they were."""
    kind, devices = _generators(tensors)
    with torch.random.fork_rng(devices, device_type=kind):
        yield


def steps_left(trainer: Any, steps: float) -> float:
    """Return how many steps a run has left, at most, given those of a round."""
    rounds = float("inf") if trainer.max_epochs in (None, -1) else trainer.max_epochs - trainer.current_epoch
    most = float("inf") if trainer.max_steps == -1 else trainer.max_steps - trainer.global_step
    return min(rounds * steps, most)


def _is_exact(device: torch.device) -> bool:
    """Return whether the same operations on the same numbers give the same results bit for bit."""
    return device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


def _generators(tensors: Sequence[Tensor]) -> tuple[str, list[int]]:
    """Return the kind and the numbers of the accelerators of some tensors that have a generator."""
    found = {tensor.device for tensor in tensors if hasattr(device_module(tensor.device), "get_rng_state")}
    kind = next((device.type for device in found), "cuda")
    return kind, sorted({device.index or 0 for device in found})


def _randomness(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the states of torch's random number generators, which a graph has to leave where the step does."""
    kind, devices = _generators(tensors)
    return [torch.get_rng_state(), *(getattr(torch, kind).get_rng_state(device) for device in devices)]


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors that nested containers hold, in their order."""
    if type(tree) is list and all(type(each) is Tensor for each in tree):
        return list(tree)
    found: list[Tensor] = []
    apply_to_collection(tree, Tensor, found.append)
    return found


def form_of(batch: Any, samples: int) -> Hashable:
    """Return what batches must have in common for steps of one graph, but for their number of samples.

    Raises:
        Untraceable: If a batch holds more than tensors, texts and numbers in plain containers.
    """
    if isinstance(batch, Tensor):
        varies = batch.ndim > 1 and batch.shape[1] == samples
        return varies, batch.shape[2 if varies else 1 :], batch.dtype, batch.is_contiguous() or batch.stride()
    if type(batch) in (list, tuple):
        return type(batch), *(form_of(part, samples) for part in batch)
    if type(batch) is dict:
        return dict, *((key, form_of(part, samples)) for key, part in batch.items())
    if isinstance(batch, (str, int, float, type(None))):
        return type(batch), batch
    if isinstance(batch, OfEachClient):
        return OfEachClient
    raise Untraceable(f"its batch holds a {type(batch).__name__}")


def _equal(one: Tensor, two: Tensor) -> bool:
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return torch.equal(one, two) or bool(((one == two) | (one.isnan() & two.isnan())).all())


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
