"""Replays of steps captured on a device, so that the host asks for a step's operations by one call.

`StepGraphs` has the replays that it uses often captured. What a capture is on a device stands in a `Recorder`; here is
the rest: memory that stays in one place, what is copied into it and out of it, which replays are worth it, and how much
memory all of them may take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_lowrank.internals.torch import copy_each, written
from lightning_lowrank.internals.tracing import Compiled

Run = Callable[[Sequence[Tensor]], list[Tensor]]

_WORTH_CAPTURING = 4
"""Uses of a replay after which it is captured; what is used less is not worth the memory."""
_MOST = 64
_MOST_PLACES = 8
"""Captures of one replay, each for tensors in other places. More would be made again and again."""
_TOLERANCE = 1e-3
_SHARE_OF_MEMORY = 0.25


class Recorder(Protocol):
    """Records what a device is asked to do, and asks for it again."""

    def record(self, make: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        """Return what a function makes, and what makes it again into the same memory. Nothing is made yet.

        Raises:
            RuntimeError: If the device cannot be asked for what the function does.
        """

    def allocated(self) -> int:
        """Return the bytes that all records hold."""

    def limit(self) -> int:
        """Return the bytes that they may hold."""


class Update(Protocol):
    """The optimizer's step, from tensors alone. A captured or compiled step of the clients may end with it."""

    made: bool
    """Whether such a step has made it."""
    tensors: list[Tensor]
    """What it takes beside the clients' values and gradients; all of it in memory from `Captures.place`."""

    @property
    def key(self) -> Hashable:
        """What it depends on that is no tensor."""

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether a step takes the values that the optimizer steps, not copies."""

    def __call__(self, tensors: Sequence[Tensor], gradients: Mapping[str, Any], own: Sequence[Tensor]) -> None:
        """Step values in place, given what a step takes, its gradients by name, and such tensors as `tensors`.

        Compiled steps give gradients as a `Product` where they can.
        """


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory, for they are replayed one after another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._bytes = 0
        self._limit: int | None = None

    def record(self, make: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        """Return a CUDA graph's outputs, and its replay. Its random numbers are those of the generator at a replay."""
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads pin memory and send the next round's samples meanwhile.
        capture = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
        with torch.cuda.device(self._device), capture:
            outputs = make()
        self._bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return outputs, graph.replay

    def allocated(self) -> int:
        """Return the bytes by which the reserved memory grew."""
        return self._bytes

    def limit(self) -> int:
        """Return a quarter of the memory that was free at first."""
        if self._limit is None:
            self._limit = int(_SHARE_OF_MEMORY * torch.cuda.mem_get_info(self._device)[0])
        return self._limit


def recorder_for(device: torch.device) -> Recorder | None:
    """Return what records on a device; ``None`` where nothing does."""
    return CudaRecorder(device) if device.type == "cuda" else None


class Captures:
    """The captured replays of one fit, and the memory in which clients' values stay in one place.

    Args:
        recorder: Records; ``None``: nothing is captured.
        copies: Whether results are copied. Otherwise they are overwritten by the next use of any replay.

    Attributes:
        reason: Why no more is captured; empty if that is not so.
        captured: Number of captured replays.
        update: What the present step is to end with, if it is captured or compiled.
        no_update: Why captured steps do not end with it; empty if that is not so.
    """

    def __init__(self, recorder: Recorder | None, copies: bool = False) -> None:
        self.recorder = recorder
        self.copies = copies
        self.reason = ""
        self.captured = 0
        self.update: Update | None = None
        self.no_update = ""
        self._places: dict[str, Tensor] = {}
        self._lent: set[int] = set()

    def place(self, name: str, value: Tensor, count: int) -> Tensor:
        """Return ``count`` copies of a value, stacked, always in the same memory for that name.

        Only the latest may be in use, see `lends`.
        """
        expanded = value.detach().unsqueeze(0).expand(count, *value.shape)
        if self.recorder is None or self.reason:
            return expanded.clone()
        known = self._places.get(name)
        fits = known is not None and known.shape[1:] == value.shape and len(known) >= count
        if known is None or not fits or known.dtype != value.dtype or known.device != value.device:
            if known is not None:
                self._lent.discard(_storage(known))
            known = self._places[name] = value.new_empty(count, *value.shape)
            self._lent.add(_storage(known))
        return known[:count].copy_(expanded)

    def lends(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in memory from `place`."""
        return _storage(tensor) in self._lent

    def around(self, run: Run, kept: Sequence[int], gradients: Mapping[str, int]) -> Run:
        """Return what runs a replay, and has it captured when it has been used some times.

        Args:
            run: The replay.
            kept: Places of tensors that it does not write into, and that stay where they are from step to step.
            gradients: Places of values' gradients among its results, by the values' names.
        """
        if self.recorder is not None and not self.reason:
            return _Capturing(self, self.recorder, run, kept, gradients)
        return _Ending(self, run, gradients) if self.recorder is None and isinstance(run, Compiled) else run

    def products(self, gradients: Mapping[str, int]) -> list[int]:
        """Return the places of gradients that compiled steps may leave as products, for the optimizer to make."""
        return [] if self.recorder is not None else list(gradients.values())

    def give_up(self, reason: str) -> None:
        """Capture nothing more, and say why."""
        self.reason = reason
        rank_zero_info(f"no more steps are captured: {reason}.")


class _Ending:
    """A compiled step that ends with the optimizer's, which multiplies gradients right into the values."""

    def __init__(self, captures: Captures, run: Compiled, gradients: Mapping[str, int]) -> None:
        self._captures, self._run, self._gradients = captures, run, gradients

    def __call__(self, tensors: Sequence[Tensor]) -> list[Any]:
        update = self._captures.update
        if update is None or not update.is_of(tensors):
            return self._run(tensors)
        results = self._run.apart(tensors)
        update(tensors, {name: results[place] for name, place in self._gradients.items()}, update.tensors)
        update.made = True
        return results


class _Capturing:
    """A replay that is captured at one of its uses, once for each place in which tensors are that are not copied."""

    def __init__(
        self, captures: Captures, recorder: Recorder, run: Run, kept: Sequence[int], gradients: Mapping[str, int]
    ) -> None:
        self._captures, self._recorder, self._run, self._kept = captures, recorder, run, set(kept)
        self._gradients = gradients
        self._uses: Counter[Hashable] = Counter()
        self._found: dict[Hashable, _Capture] = {}

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        captures, update = self._captures, self._captures.update
        if update is not None and not captures.no_update and update.is_of(tensors):
            outputs = self._captured([*tensors, *update.tensors], self._updating(update, len(tensors)), update.key)
            if outputs is not None:
                update.made = True
                return outputs
            if not captures.no_update:
                return self._run(tensors)
        outputs = self._captured(tensors, self._run, None)
        return self._run(tensors) if outputs is None else outputs

    def _updating(self, update: Update, count: int) -> Run:
        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            outputs = self._run(tensors[:count])
            gradients = {name: outputs[place] for name, place in self._gradients.items()}
            update(tensors[:count], gradients, tensors[count:])
            return outputs

        return run

    def _captured(self, tensors: Sequence[Tensor], run: Run, ends_with: Hashable) -> list[Tensor] | None:
        """Return what a capture gives, ``None`` where there is none."""
        captures = self._captures
        fixed = {place for place, each in enumerate(tensors) if place in self._kept or captures.lends(each)}
        key = ends_with, *(each.data_ptr() if place in fixed else 0 for place, each in enumerate(tensors))
        found = self._found.get(key)
        if found is None and not captures.reason and len(self._found) < _MOST_PLACES:
            self._uses[key] += 1
            if self._uses[key] >= _WORTH_CAPTURING:
                found = self._capture(tensors, run, fixed, ends=ends_with is not None)
                if found is not None:
                    self._found[key] = found
        if found is None:
            return None
        outputs = found(tensors)
        return [output.clone() for output in outputs] if captures.copies else outputs

    def _capture(self, tensors: Sequence[Tensor], run: Run, fixed: set[int], ends: bool) -> _Capture | None:
        captures, recorder = self._captures, self._recorder
        if captures.captured >= _MOST or recorder.allocated() > recorder.limit():
            captures.give_up(f"the {captures.captured} that are hold {recorder.allocated():,} bytes")
            return None
        devices = sorted({tensor.device.index for tensor in tensors if tensor.device.type == "cuda"})
        try:
            with torch.no_grad():
                found = _Capture(recorder, run, tensors, fixed, lambda: torch.random.fork_rng(devices))
        except RuntimeError as error:
            first = str(error).strip().partition("\n")[0][:200]
            if ends:
                captures.no_update = first
                rank_zero_info(f"captured steps do not end with the optimizer's: {first}.")
            else:
                captures.give_up(f"a step of {len(tensors[0])} clients can't be ({first})")
            return None
        captures.captured += 1
        return found


class _Capture:
    """A captured replay: its inputs and outputs have one place each.

    Outputs are valid until the next replay of any capture, for captures share memory.

    Args:
        recorder: Records it.
        run: The replay.
        tensors: Its inputs. They are as they were afterwards.
        fixed: Places of inputs that are read and written where they are.
        same_randomness: Makes a context after which random numbers are drawn as before it.

    Raises:
        RuntimeError: If it can't be captured, or gives other values then.
    """

    def __init__(
        self,
        recorder: Recorder,
        run: Run,
        tensors: Sequence[Tensor],
        fixed: set[int],
        same_randomness: Callable[[], AbstractContextManager[None]],
    ) -> None:
        originals = [tensor.detach().clone() for tensor in tensors]
        trial = [tensor.clone() for tensor in originals]
        before = [written(tensor) for tensor in trial]
        with same_randomness():
            # Libraries set themselves up when they are first used, which can't be captured.
            expected = run(trial)
        changed = [tensor.clone() for tensor in trial]
        self._moving = [place for place in range(len(tensors)) if place not in fixed]
        # Some operations that write, batch normalisation for one, don't count it.
        self._written = [
            place
            for place in self._moving
            if written(trial[place]) != before[place] or not torch.equal(trial[place], tensors[place])
        ]
        self._inputs = [tensor.detach() if place in fixed else trial[place] for place, tensor in enumerate(tensors)]
        with same_randomness():
            self._outputs, self._replay = recorder.record(lambda: run(self._inputs))
        with same_randomness():
            found = self(tensors)
        agree = all(map(close, found, expected)) and all(map(close, tensors, changed))
        for tensor, original in zip(tensors, originals, strict=True):
            if not torch.equal(tensor, original):
                tensor.detach().copy_(original)
        if not agree:
            raise RuntimeError("it gives other values then")

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            self._copy(self._inputs, tensors, self._moving)
            self._replay()
            self._copy(tensors, self._inputs, self._written)
        return list(self._outputs)

    @staticmethod
    def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor], places: Sequence[int]) -> None:
        if places:
            copy_each([targets[place].detach() for place in places], [sources[place].detach() for place in places])


def close(one: Tensor, two: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding; integers are to be equal."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, two)
    largest = torch.linalg.vector_norm(two.flatten(), torch.inf)
    if largest.isfinite():
        # A difference that is not a number is not at most that.
        return bool(torch.linalg.vector_norm((one - two).flatten(), torch.inf) <= _TOLERANCE * largest)
    scale = float(two.abs().nan_to_num(0, 0, 0).max())
    return torch.allclose(one, two, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
