"""Compiled steps of clients together, by `torch.compile`: full batches only, in at most four stack sizes.

`ClientStack` asks for the gradients of the clients that have a full batch. If nothing can be compiled, their step is
made as it is.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from lightning_lowrank.federated.data.batches import OfEachClient
from lightning_lowrank.federated.execution.differences import GRADIENT, TOLERANCE, StepResults, first_difference
from lightning_lowrank.federated.leaks import OfTheRun
from lightning_lowrank.federated.state import State
from lightning_lowrank.internals.lightning import logging_by
from lightning_lowrank.internals.torch import places_of


def stack_sizes(clients: int) -> tuple[int, ...]:
    """The stack sizes to compile, if at most ``clients`` clients step together.

    Example:
        >>> stack_sizes(10)
        (1, 2, 5, 10)
    """
    return tuple(sorted({1, -(-clients // 5), -(-clients // 2), clients}))


class Inputs(NamedTuple):
    """The inputs of a step of clients: the first rows of stacks, as many as the compiled stack has.

    Args:
        trained: Values of which gradients are wanted, by name.
        buffers: Other values, by name.
        state: The clients' round states.
        batch: Their batches.
    """

    trained: dict[str, Tensor]
    buffers: dict[str, Tensor]
    state: State
    batch: Any


class Results(NamedTuple):
    """The outputs of a step, each ``[clients, …]``: losses, gradients by name, logged values, and buffers."""

    losses: Tensor
    gradients: dict[str, Tensor]
    logged: dict[str, Tensor]
    buffers: dict[str, Tensor]


class CompiledSteps(OfTheRun):
    """The compiled steps of a fit.

    Each size of a stack is compiled at its first use, and its results are compared with those of the step as it is,
    if it draws no random numbers. A batch of another form is left to the step as it is. If a step reads another
    number later, such as its own, no further steps are compiled.

    Args:
        module: The user's module.
        clients: How many clients step together at most.
        samples: Number of samples in a full batch.
        objective: As for `ClientStack`.
        silent: Whether steps that cannot be compiled cause no warning, as in a trial.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        clients: int,
        samples: int,
        objective: Callable[..., Any] | None,
        silent: bool = False,
    ) -> None:
        self._silent = silent
        self.sizes = stack_sizes(clients)
        self.samples = samples
        self.reason = ""
        """The reason why steps are not compiled; empty if they are."""
        self.number = 0
        """Number of the step."""
        self.settings: dict[int, dict[str, dict[str, Any]]] = {}
        """With which settings values are logged, by the stack's size and the value's name."""
        self.used: dict[int, frozenset[str]] = {}
        """The names of the values of which the step has gradients, by the stack's size."""
        self._module, self._objective = module, objective
        self._on_cuda = next(module.parameters()).is_cuda
        self._logged: list[tuple[str, Tensor]] = []
        self._steps: dict[int, tuple[Hashable, Callable[..., Any]]] = {}
        # A single function for all steps: torch recompiles if it changes.
        self._logging = logging_by(module, self._collecting())

    def _collecting(self) -> Callable[..., None]:
        logged = self._logged

        def log(name: str, value: Any, *arguments: Any, **keywords: Any) -> None:
            logged.append((name, value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))))

        return log

    def size_for(self, clients: int) -> int:
        """The stack size for a step of ``clients`` clients, 0 if there is none."""
        return next((size for size in self.sizes if size >= clients), 0)

    def step(self, training_step: Callable[..., Any], takes_index: bool, inputs: Inputs, number: int) -> Results | None:
        """Run a compiled step; return ``None`` if the caller must run it uncompiled.

        Args:
            training_step: The user's.
            takes_index: Whether it takes the number of the step.
            inputs: The step's inputs, which are not changed.
            number: The step's number.
        """
        form, size = form_of(inputs), len(next(iter(inputs.trained.values())))
        if form is None:
            self.give_up("its batches hold more than tensors, texts and numbers in lists and dictionaries")
        known = self._steps.get(size)
        if self.reason or (known is not None and known[0] != form):
            return None
        self.number = number
        tensors = tensors_in(inputs.batch)
        try:
            if known is None:
                made = self._compile(training_step, takes_index, inputs.batch)
                results = self._run(made, inputs, tensors)
                self._steps[size] = form, made
                return results
            with torch.compiler.set_stance("fail_on_recompile"):
                return self._run(known[1], inputs, tensors)
        except Exception as error:
            self.give_up(_first_line(error))
            return None
        finally:
            self._logged.clear()

    def is_new(self, clients: int) -> bool:
        """Whether the step for stacks of ``clients`` rows has not been compiled yet."""
        return clients not in self._steps

    def give_up(self, reason: str) -> None:
        """Run all further steps uncompiled."""
        self.reason = reason
        if not self._silent:
            rank_zero_warn(f"compile=True: steps are not compiled from here on: {reason}")

    def _run(self, step: Callable[..., Any], inputs: Inputs, tensors: Sequence[Tensor]) -> Results:
        with self._logging:
            gradients, (losses, (logged, buffers)) = step(inputs.trained, inputs.buffers, inputs.state, list(tensors))
        if self._on_cuda:
            # Copies, because the next step of a captured graph overwrites the logged values.
            logged = {name: value.clone() for name, value in logged.items()}
        return Results(losses, gradients, logged, buffers)

    def _compile(self, training_step: Callable[..., Any], takes_index: bool, batch: Any) -> Callable[..., Any]:
        logged, objective, steps = self._logged, self._objective, self
        client = _Client(self._module, training_step, takes_index)
        skeleton = apply_to_collection(batch, Tensor, lambda _: _Slot())
        named = (*self._module.named_buffers(), *self._module.named_parameters())
        places = places_of(client, {tensor: name for name, tensor in named})

        def of_one(
            trained: dict[str, Tensor], buffers: dict[str, Tensor], state: State, tensors: list[Tensor]
        ) -> tuple[Tensor, tuple[dict[str, Tensor], dict[str, Tensor]]]:
            given = iter(tensors)
            one = apply_to_collection(skeleton, _Slot, lambda _: next(given))
            # Copies, because a step changes buffers in place.
            values = {**trained, **{name: value.clone() for name, value in buffers.items()}}
            own = {place: values[name] for place, name in places.items() if name in values}
            arguments = (one, steps.number, objective, values, state, list(buffers))
            loss, left = functional_call(client, own, arguments, tie_weights=False)
            found = dict(logged)
            logged.clear()
            return loss, (found, left)

        mapped = vmap(grad_and_value(of_one, has_aux=True), randomness="different")

        def step(*arguments: Any) -> Any:
            return mapped(*arguments)

        # torch caches compiled code per code object and limits its number, so give each step a code object of its own.
        own = types.FunctionType(step.__code__.replace(), step.__globals__, "step", None, step.__closure__)
        options: dict[str, Any] = {"fallback_random": True}
        if self._on_cuda:
            options["triton.cudagraphs"] = True
        return torch.compile(own, fullgraph=True, dynamic=False, options=options)


class _Slot:
    """A placeholder for a tensor of a batch."""


class _Client(nn.Module):
    """A client's step as a module's ``forward``, so that `torch.func.functional_call` can swap its values in."""

    def __init__(self, module: nn.Module, training_step: Callable[..., Any], takes_index: bool) -> None:
        super().__init__()
        self.module = module
        self._step, self._takes_index = training_step, takes_index

    def forward(
        self,
        batch: Any,
        number: int,
        objective: Callable[..., Any] | None,
        values: dict[str, Tensor],
        state: State,
        buffers: list[str],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        def own() -> Any:
            return self._step(batch, number) if self._takes_index else self._step(batch)

        output = own() if objective is None else objective(values, state, batch, own)
        loss = output if isinstance(output, Tensor) else output["loss"]
        left = {name: self.module.get_buffer(name) for name in buffers}
        return loss.reshape(()), left


def differ(found: Results, expected: Results, values: bool = True) -> str:
    """The first difference beyond rounding between a compiled and an uncompiled step; empty if there is none.

    Without ``values`` only their names are compared, for steps that draw random numbers.
    """
    # A compiled step returns zero gradients for unused values.
    used = {name: value for name, value in found.gradients.items() if name in expected.gradients or bool(value.any())}
    one, other = _by_kind(found._replace(gradients=used)), _by_kind(expected)
    if not values:
        one = {key: other.get(key, value) for key, value in one.items()}
    difference = first_difference(one, other, TOLERANCE, "for the step as it is")
    return f"its losses, its gradients, logs or buffers differ: {difference}" if difference else ""


def _by_kind(results: Results) -> StepResults:
    return {
        ("the losses", ""): results.losses,
        **{(GRADIENT, name): value for name, value in results.gradients.items()},
        **{("what it logs as", name): value for name, value in results.logged.items()},
        **{("the buffer", name): value for name, value in results.buffers.items()},
    }


def form_of(inputs: Inputs) -> Hashable | None:
    """A key, equal for steps that one compiled function can run; ``None`` for batches that cannot be compared."""
    try:
        batch = _form(inputs.batch)
    except TypeError:
        return None
    return batch, tuple(inputs.trained)


def _form(entry: Any) -> Hashable:
    if isinstance(entry, Tensor):
        return entry.shape, entry.dtype
    if type(entry) in (list, tuple):
        return type(entry), *map(_form, entry)
    if isinstance(entry, Mapping):
        return type(entry), *((key, _form(value)) for key, value in entry.items())
    if isinstance(entry, OfEachClient):
        return OfEachClient
    if entry is None or isinstance(entry, (str, bytes, int, float)):
        return type(entry), entry
    raise TypeError(type(entry))


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested containers, in order."""
    if type(tree) is list and all(type(each) is Tensor for each in tree):
        return list(tree)
    found: list[Tensor] = []
    apply_to_collection(tree, Tensor, found.append)
    return found


def _first_line(error: Exception) -> str:
    text = re.split(r" Explanation| Hint| Set TORCH", " ".join(str(error).split()))[0]
    return f"{type(error).__name__}: {text[:300]}"
