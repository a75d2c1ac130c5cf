"""Clients that step together: their weights stacked, the user's own ``training_step`` mapped over them.

`FederatedLoop` uses it for ``execution="vectorized"``. The trained values of a cohort's clients stand in stacks
``[clients, …]``, which the optimizers hold in place of the module's own parameters; a step is
``vmap`` over ``training_step``, followed by the user's elementwise optimizer on the stacks. What is
frozen is not stacked, so that all clients share one product with it. The module itself keeps the global model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.func import vmap
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_lowrank.federated._lightning import overrides
from lightning_lowrank.federated.client import trained_tensors
from lightning_lowrank.federated.optimizers import fresh_state, is_shared
from lightning_lowrank.federated.rounds import Cohort, Places, RoundLoader
from lightning_lowrank.federated.stacked_products import StackedProducts
from lightning_lowrank.optim import ProjectedAdamW, ProjectedSGD

__all__ = ["ActsOnStacks", "ClientStack", "clients_that_fit", "try_both", "why_not_vectorized"]

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    ProjectedSGD,
    ProjectedAdamW,
)
_HOOKS = (
    "configure_gradient_clipping",
    "transfer_batch_to_device",
    "on_before_batch_transfer",
    "on_after_batch_transfer",
    "optimizer_step",
    "optimizer_zero_grad",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
_TRIED_STEPS = 5
_SHARE_OF_MEMORY = 0.25
_GUESSED_MEMORY = 4 * 2**30
_COPIES_OF_A_CLIENT = 6


@runtime_checkable
class ActsOnStacks(Protocol):
    """A callback that changes gradients before the optimizer steps, of clients that step together as well."""

    def on_before_cohort_step(self, module: pl.LightningModule, stacks: Mapping[str, Tensor]) -> None:
        """Change the gradients of stacks ``[clients, …]`` of trained parameters by name."""


def why_not_vectorized(trainer: Any, module: pl.LightningModule) -> str:
    """Say what in a run's settings keeps its clients from stepping together, or return an empty string.

    What ``training_step`` does is seen only when it is mapped: `ClientStack.training_step` refuses that by its cause.
    """
    if not module.automatic_optimization:
        return "the module optimizes manually"
    if trainer.accumulate_grad_batches != 1:
        return f"accumulate_grad_batches={trainer.accumulate_grad_batches} ends a group at each client's own last batch"
    for optimizer in trainer.optimizers:
        if type(optimizer) not in _ELEMENTWISE:
            return f"the optimizer {type(optimizer).__name__} is not known to act on each number alone"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "16-mixed precision scales the losses of all clients by one factor"
    for hook in _HOOKS:
        if overrides(module, hook):
            return f"{type(module).__name__}.{hook}() expects one client's batch or gradients"
    for callback in trainer.callbacks:
        for hook in ("on_before_optimizer_step", "on_after_backward"):
            acts = isinstance(callback, ActsOnStacks) or callback.state_key == "FederatedLoop"
            if overrides(callback, hook) and not acts:
                return f"the callback {type(callback).__name__}.{hook}() expects one client's gradients"
    return ""


def clients_that_fit(module: nn.Module, device: torch.device) -> int:
    """Return how many clients may step together by the memory that is free now."""
    each = sum(value.numel() * value.element_size() for value in module.parameters() if value.requires_grad)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_memory()
    return max(1, int(_SHARE_OF_MEMORY * free / (_COPIES_OF_A_CLIENT * max(each, 1))))


def _free_memory() -> int:
    """Return the bytes of main memory that are free, or a modest guess where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    except (OSError, StopIteration):
        return _GUESSED_MEMORY


def _homes(module: nn.Module, names: Mapping[Tensor, str]) -> list[tuple[dict[str, Any], str, str]]:
    """Return where a module's parts keep the named tensors, a tensor that several parts hold once for each of them.

    Args:
        module: The module.
        names: The tensors' names.

    Returns:
        The table that holds a tensor, its name there, and its name in ``names``.
    """
    return [
        (table, key, names[tensor])
        for part in module.modules()
        for table in (part._parameters, part._buffers)
        for key, tensor in table.items()
        if tensor is not None and tensor in names
    ]


def _refuse_gradient(gradient: Tensor) -> None:
    """Stand at the module's own parameters, which hold the global model while clients step together."""
    raise MisconfigurationException(
        "execution='vectorized' cannot map training_step over clients: its loss depends on a parameter that the step"
        " does not take from the module that holds it, but from a list or another object made before, where it is one"
        " for all clients. Take it from the module (self.parameters(), self.layer.weight) in each step, or use"
        " execution='sequential'."
    )


class ClientStack:
    """The values of clients that step together, and what of the trainer stands on them meanwhile.

    Args:
        trainer: The trainer, with its optimizers set up.
        module: The user's module. Its ``training_step`` and gradient clipping are replaced on the instance until
            `close`.
        live: The module's trained parameters and persistent buffers by name.
        count: Number of clients.
        private: Buffers that are each client's own and not trained, stacked.
    """

    def __init__(
        self,
        trainer: Any,
        module: pl.LightningModule,
        live: Mapping[str, Tensor],
        count: int,
        private: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._step = module.training_step
        self.device = module.device
        self._takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self.active = count
        self._private = dict(private or {})
        replaced = {**live, **{name: module.get_buffer(name) for name in self._private}}
        self._homes = _homes(module, {tensor: name for name, tensor in replaced.items()})
        self.values = {
            name: value.detach().unsqueeze(0).expand(count, *value.shape).clone() for name, value in live.items()
        }
        self.leaves = {
            name: self.values[name].detach().requires_grad_() for name, value in live.items() if value.requires_grad
        }
        leaf_of = {value: self.leaves[name] for name, value in live.items() if name in self.leaves}
        self._parameters: list[tuple[dict[str, Any], list[Tensor]]] = []
        for optimizer in trainer.optimizers:
            loaded = optimizer.state
            for group in optimizer.param_groups:
                self._parameters.append((group, group["params"]))
                group["params"] = [leaf_of.get(parameter, parameter) for parameter in group["params"]]
                if "stacked" in group:
                    group["stacked"] = True
            optimizer.state = fresh_state(optimizer)
            self._loaded = {leaf_of[parameter]: state for parameter, state in loaded.items() if parameter in leaf_of}
        self._watched = [value.register_hook(_refuse_gradient) for value in live.values() if value.requires_grad]
        vars(module)["training_step"] = self.training_step
        vars(module)["configure_gradient_clipping"] = self._clip

    def client(self, index: int) -> dict[str, Tensor]:
        """Return one client's values by name, as views into the stacks."""
        return {name: stack[index] for name, stack in self.values.items()}

    def resume(self, values: Mapping[str, Tensor], active: int) -> None:
        """Go on with values from a checkpoint, and with the optimizer states that the trainer has restored."""
        with torch.no_grad():
            for name, stack in self.values.items():
                stack.copy_(values[name])
        (optimizer,) = self._trainer.optimizers
        optimizer.state.update(self._loaded)
        self._narrow(active, of_state=False)

    def narrow(self, active: int) -> None:
        """Let the clients from ``active`` on leave the stack: they have made their last step."""
        if active < self.active:
            self._narrow(active, of_state=True)

    def _narrow(self, active: int, of_state: bool) -> None:
        # New leaves, for a graph that the user still holds goes on with the old ones and their sizes.
        renewed: dict[Tensor, Tensor] = {}
        for name, leaf in self.leaves.items():
            self.leaves[name] = renewed[leaf] = self.values[name][:active].detach().requires_grad_()
        for optimizer in self._trainer.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [renewed.get(parameter, parameter) for parameter in group["params"]]
            for old, new in renewed.items():
                if old in optimizer.state:
                    state = optimizer.state.pop(old)
                    if of_state:
                        for key, value in state.items():
                            if not is_shared(key, value):
                                state[key] = value[:active]
                    optimizer.state[new] = state
        self.active = active

    def close(self) -> None:
        """Give the optimizers their own parameters back, and the module its methods."""
        for group, parameters in self._parameters:
            group["params"] = parameters
            if "stacked" in group:
                group["stacked"] = False
        for optimizer in self._trainer.optimizers:
            optimizer.state = fresh_state(optimizer)
        for watch in self._watched:
            watch.remove()
        for name in ("training_step", "configure_gradient_clipping"):
            vars(self._module).pop(name, None)

    def training_step(self, parts: Sequence[tuple[Places, Any]], batch_idx: int = 0) -> Tensor:
        """Run the user's training step for all clients of a cohort's batch.

        Args:
            parts: For each batch size, the clients' places in the stack and their batches, stacked.
            batch_idx: Passed on.

        Returns:
            The sum of the clients' losses, so that each client's gradient is its own.

        Raises:
            MisconfigurationException: If the step does something that cannot be mapped over clients; the cause is
                named.
        """
        total: Tensor | None = None
        logged: dict[str, list[tuple[Tensor, int]]] = {}
        settings: dict[str, dict[str, Any]] = {}
        for places, batch in parts:
            losses, values = self._map(places, batch, batch_idx, settings)
            total = losses.sum() if total is None else total + losses.sum()
            for name, value in values.items():
                logged.setdefault(name, []).append((value, places.samples))
        for name, entries in logged.items():
            samples = sum(len(value) * size for value, size in entries)
            mean = sum((value.sum() * size for value, size in entries), torch.zeros(())) / samples
            self._module.log(name, mean, **{**settings[name], "batch_size": samples})
        assert total is not None
        return total

    def _map(
        self, places: Places, batch: Any, batch_idx: int, settings: dict[str, dict[str, Any]]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        numbers = places.numbers
        chosen = slice(numbers[0], numbers[-1] + 1)
        rows = None if places.contiguous else torch.tensor(numbers, device=self._module.device)

        def select(tensor: Tensor) -> Tensor:
            if rows is not None:
                return tensor.index_select(0, rows)
            return tensor if len(tensor) == len(numbers) else tensor[chosen]

        stacks = {**self.values, **self._private}
        named = {name: select(self.leaves.get(name, stack)) for name, stack in stacks.items()}

        def run(values: dict[str, Tensor], client_batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
            arguments = (client_batch, batch_idx) if self._takes_index else (client_batch,)
            # Inside the map, for its own checks of its arguments would all pass through the mode.
            with StackedProducts(), self._captured(settings) as captured, self._in_place(values):
                output = self._step(*arguments)
            loss = output["loss"] if isinstance(output, Mapping) else output
            if not isinstance(loss, Tensor):
                raise MisconfigurationException(
                    f"execution='vectorized': training_step gave {output!r} in place of a loss, and clients that step"
                    " together cannot leave a step out; use execution='sequential'."
                )
            return loss, captured

        try:
            losses, values = vmap(run, randomness="different")(named, batch)
        except MisconfigurationException:
            raise
        except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
            raise MisconfigurationException(
                f"execution='vectorized' cannot map training_step over clients: {_cause(error)}. Use"
                " execution='sequential', or 'auto', which falls back to it."
            ) from error
        if rows is not None:
            for name in self.values.keys() - self.leaves.keys():
                self.values[name].index_copy_(0, rows, named[name])
        return losses, values

    @contextmanager
    def _in_place(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the module hold other tensors; `torch.func.functional_call` takes longer for that than small products."""
        previous = [table[key] for table, key, _ in self._homes]
        try:
            for table, key, name in self._homes:
                table[key] = values[name]
            yield
        finally:
            for (table, key, _), tensor in zip(self._homes, previous, strict=True):
                table[key] = tensor

    @contextmanager
    def _captured(self, settings: dict[str, dict[str, Any]]) -> Iterator[dict[str, Tensor]]:
        """Collect what the step logs, for one client's values are not to be logged from inside the map."""
        captured: dict[str, Tensor] = {}

        def log(name: str, value: Any, *arguments: Any, **keywords: Any) -> None:
            if isinstance(value, Metric):
                raise MisconfigurationException(
                    f"execution='vectorized': training_step logs the metric {type(value).__name__} as {name!r}, whose"
                    " state is one for all clients; log its value, or use execution='sequential'."
                )
            captured[name] = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
            names = ("prog_bar", "logger", "on_step", "on_epoch")
            settings[name] = {**dict(zip(names, arguments, strict=False)), **keywords}

        attributes = vars(self._module)
        previous = attributes.get("log")
        attributes["log"] = log
        try:
            yield captured
        finally:
            if previous is None:
                del attributes["log"]
            else:
                attributes["log"] = previous

    @torch.no_grad()
    def _clip(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip each client's gradients as Lightning clips those of one."""
        if not gradient_clip_val:
            return
        gradients = [leaf.grad for leaf in self.leaves.values() if leaf.grad is not None]
        if str(gradient_clip_algorithm) in ("value", "GradClipAlgorithmType.VALUE"):
            torch._foreach_clamp_min_(gradients, -gradient_clip_val)
            torch._foreach_clamp_max_(gradients, gradient_clip_val)
            return
        norms = torch.stack([torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients])
        scale = (gradient_clip_val / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.view(-1, *(1 for _ in gradient.shape[1:])).to(gradient.dtype))


def try_both(trainer: Any, module: pl.LightningModule, cohort: Cohort, loader: RoundLoader) -> tuple[float, float]:
    """Time a client's step alone and in a cohort; values, optimizer states and logs are as they were afterwards.

    Returns:
        Seconds of a client's step: where clients train one after another, and where they step together.

    Raises:
        MisconfigurationException: If the training step cannot be mapped over clients.
    """
    together, alone = (
        [trainer.strategy.batch_to_device(batch, dataloader_idx=0) for batch in batches]
        for batches in loader.read(cohort, 0, _TRIED_STEPS)
    )
    live = trained_tensors(module)
    kept = {name: value.detach().clone() for name, value in live.items()}
    states = [(optimizer, optimizer.state) for optimizer in trainer.optimizers]
    vars(module)["log"] = lambda *arguments, **keywords: None
    try:
        stack = ClientStack(trainer, module, live, len(cohort.clients))
        try:
            in_cohort = _seconds(trainer, module, together, lambda step: stack.narrow(cohort.active(step)))
        finally:
            stack.close()
        one_by_one = _seconds(trainer, module, alone, lambda step: None)
    finally:
        del vars(module)["log"]
        with torch.no_grad():
            for name, value in kept.items():
                live[name].copy_(value)
        for optimizer, state in states:
            optimizer.state = state
            optimizer.zero_grad()
    clients = [cohort.active(step) for step in range(len(in_cohort))]
    return statistics.median(one_by_one), min(
        seconds / count for seconds, count in zip(in_cohort, clients, strict=True)
    )


def _seconds(
    trainer: Any, module: pl.LightningModule, batches: Sequence[Any], before: Callable[[int], None]
) -> list[float]:
    times = []
    # The first batch is run twice, for whatever is set up at first use.
    for index, batch in enumerate([batches[0], *batches]):
        before(max(0, index - 1))
        begin = time.perf_counter()
        with trainer.precision_plugin.train_step_context():
            output = module.training_step(batch, 0)
        loss = cast(Tensor, output["loss"] if isinstance(output, Mapping) else output)
        (optimizer,) = trainer.optimizers
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return times[1:]


_CAUSES: tuple[tuple[str, str], ...] = (
    (".item()", "it takes a number out of a tensor (.item(), float(), a comparison in an if)"),
    ("data-dependent control flow", "it decides by a tensor's value (an if on a tensor)"),
    ("in-place", "it changes a tensor in place that all clients share (a metric's state, a buffer)"),
    ("inplace", "it changes a tensor in place that all clients share (a metric's state, a buffer)"),
    ("vmap over", "an operation in it has no batched form"),
)


def _cause(error: Exception) -> str:
    said = str(error).strip().split("\n")[0]
    for sign, sentence in _CAUSES:
        if sign in str(error):
            return f"{sentence}; torch says: {said[:200]}"
    return f"{type(error).__name__}: {said[:300]}"
