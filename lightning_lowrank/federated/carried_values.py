"""Detects attributes of the module that one client's steps change and the next client's steps depend on.

`Isolation` asks before it warns: most attributes that change are totals, caches and counters that nothing trains by.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection

from lightning_lowrank.arguments import join_names
from lightning_lowrank.federated.execution.snapshot import Snapshot
from lightning_lowrank.federated.leaks import as_code, names_of_lightning, reachable, set_for_clients
from lightning_lowrank.federated.state import trained_tensors
from lightning_lowrank.internals.advance import loss_of
from lightning_lowrank.internals.lightning import overrides, with_counter
from lightning_lowrank.internals.replaced import replaced
from lightning_lowrank.internals.torch import version_of

_MOST_COPIED = 2**22
"""Most numbers of a tensor of which a copy is kept."""
_OF_OPTIMIZERS = ("on_before_optimizer_step", "on_before_zero_grad")
"""Hooks that are given an optimizer, in which modules keep gradients or momentum of their own."""
_MANY_STEPS = 1000
"""Factor by which counters are advanced, so that a step tells of a warm-up that no client has reached yet."""


class CarriedValues:
    """A snapshot of the module's attributes before the first client, for a comparison at a later client's step.

    Args:
        trainer: The trainer, before the first client's first step.
        step: The training step that is tried. ``None`` (default): the module's.
    """

    def __init__(self, trainer: Any, step: Callable[..., Any] | None = None) -> None:
        self._trainer, self._module, self._own_step = trainer, trainer.lightning_module, step
        self._root = vars(self._module)
        module = self._module
        apart = set(map(id, set_for_clients(trainer)))
        kinds = (Metric, MetricCollection, Optimizer)
        items = reachable("self", module, lambda item: id(item) in apart or isinstance(item, kinds))
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._large: list[tuple[Tensor, int]] = []
        for _, item in items:
            if isinstance(item, (dict, list, set, deque)):
                self._containers.append((item, item.copy()))
            elif isinstance(item, Tensor) and item.numel() > _MOST_COPIED:
                self._large.append((item, version_of(item)))
            elif isinstance(item, Tensor) and item.layout is torch.strided:
                self._tensors.append((item, item.detach().clone()))

    def warn_of(self, names: Sequence[str], shadows: Sequence[str], batch: Any) -> bool:
        """Warn of the attributes whose changes alter the next client's step on ``batch``; return whether there are any.

        A moving average that no step reads is named, too: a validation or a checkpoint may.
        """
        named = names if names and self._reach(batch) else self._kept(shadows, batch)
        if named:
            rank_zero_warn(
                f"training changes attributes of the module: {join_names(named)}. Their values pass from one client to"
                " the next and are not averaged. Register values that belong to the model as buffers, so that each"
                " client starts from the global value, and set values of a client again where batch_idx is 0."
            )
        return bool(named)

    def _reach(self, batch: Any) -> bool:
        """Whether a step on ``batch`` differs between the present and the initial values of the attributes.

        Counters are tried with much larger numbers as well. Everything is restored. A step that cannot be tried counts
        as another one, and so does one after a change of a tensor that is too large to be copied.
        """
        if any(version_of(tensor) != version for tensor, version in self._large):
            return True
        far = self._far_numbers()

        def begin_with_far() -> None:
            # On the present values, of which a number may tell, such as the length of a table that was made once.
            for container, key, value in far:
                container[key] = value

        return self._differ(batch, [self._put_back, lambda: None, *([begin_with_far] if far else [])])

    def _kept(self, names: Sequence[str], batch: Any) -> Sequence[str]:
        """The tensors among attributes whose values after a client's first step depend on those before it.

        A copy of parameters or gradients does not. A step that cannot be tried counts as dependent.
        """
        ends: list[dict[str, Tensor]] = []

        def end() -> None:
            module = self._module
            if overrides(module, "on_after_backward"):
                module.on_after_backward()
            for optimizer in self._trainer.optimizers:
                for hook in (each for each in _OF_OPTIMIZERS if overrides(module, each)):
                    getattr(module, hook)(optimizer)
            found = {as_code(name).split(".", 1)[-1]: item for name, item in reachable("self", module)}
            ends.append({name: found[name].clone() for name in names})

        if names:
            self._differ(batch, [self._put_back, lambda: None], end)
        if len(ends) < 2:
            return names
        return [name for name, value in ends[0].items() if not torch.equal(value, ends[1][name])]

    def counter_reaches(self, counter: str, batch: Any) -> bool:
        """Whether a step on ``batch`` depends on ``global_step`` or ``total_batch_idx``; larger ones are tried too."""
        with with_counter(self._trainer, counter) as (now, set_to):
            tried = (0, now, _MANY_STEPS * now + 1)
            return self._differ(batch, [lambda number=number: set_to(number) for number in tried])

    def _differ(self, batch: Any, ways: list[Any], end: Callable[[], None] = lambda: None) -> bool:
        """Whether steps on ``batch`` differ after one of ``ways`` to begin; ``end`` is called after each step."""
        gradients = [(value, value.grad) for value in self._module.parameters()]
        try:
            schedulers = [config.scheduler for config in self._trainer.lr_scheduler_configs]
            snapshot = Snapshot(self._module, (*self._trainer.optimizers, *schedulers))
        except Exception:
            return True
        try:
            first = None
            for begin in ways:
                begin()
                with self._unseen(), isolate_rng():
                    found = self._step(batch)
                    end()
                snapshot.restore()
                if first is not None and _differ(first, found):
                    return True
                first = found if first is None else first
            return False
        except Exception:
            return True
        finally:
            snapshot.restore()
            for value, gradient in gradients:
                value.grad = gradient

    def _step(self, batch: Any) -> list[Tensor]:
        """The trained tensors, loss and gradients after one step."""
        module: pl.LightningModule = self._module
        for value in module.parameters():
            value.grad = None
        training_step = self._own_step or module.training_step
        takes_index = is_param_in_hook_signature(training_step, "batch_idx", min_args=2)
        if overrides(module, "on_train_batch_start"):
            module.on_train_batch_start(batch, 0)
        with self._trainer.precision_plugin.train_step_context():
            output = training_step(batch, 0) if takes_index else training_step(batch)
        loss = loss_of(output) if module.automatic_optimization else None
        if loss is not None:
            loss.backward()
        if overrides(module, "on_train_batch_end"):
            module.on_train_batch_end(output, batch, 0)
        found = [value.detach().clone() for value in trained_tensors(module).values()]
        if module.automatic_optimization:
            found += [] if loss is None else [loss.detach().clone()]
            found += [torch.zeros(()) if value.grad is None else value.grad.clone() for value in module.parameters()]
        return found

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        silent = replaced(self._trainer, loggers=[DummyLogger() for _ in self._trainer.loggers])
        with silent, replaced(self._module, log=lambda *arguments, **keywords: None):
            yield

    @torch.no_grad()
    def _put_back(self) -> None:
        for container, before in self._containers:
            if isinstance(container, dict):
                kept = names_of_lightning() if container is self._root else ()
                for key in [key for key in container if key not in before and key not in kept]:
                    del container[key]
                container.update({key: value for key, value in before.items() if key not in kept})
            else:
                container.clear()
                (container.update if isinstance(container, set) else container.extend)(before)
        for tensor, before in self._tensors:
            tensor.data.copy_(before)

    def _far_numbers(self) -> list[tuple[Any, Any, Any]]:
        """Changed numbers, extrapolated by `_MANY_STEPS` changes, with their containers and keys."""
        found = []
        for container, before in self._containers:
            kept = names_of_lightning() if container is self._root else ()
            for key, value in before.items() if isinstance(before, dict) else ():
                now = container.get(key)
                if key in kept or type(value) not in (int, float) or type(now) is not type(value) or now == value:
                    continue
                # An odd multiple, so that a counter's parity changes too.
                far = value + _MANY_STEPS * (now - value) + (type(value) is int)
                found += [(container, key, far)] if math.isfinite(far) else []
        return found


def _differ(one: list[Tensor], other: list[Tensor]) -> bool:
    if len(one) != len(other):
        return True
    pairs = zip(one, other, strict=True)
    return any(a.shape != b.shape or not torch.allclose(a, b, rtol=1e-5, equal_nan=True) for a, b in pairs)
