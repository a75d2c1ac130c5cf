"""What a module and its optimizers keep beside parameters, buffers and the optimizers' state, and steps change."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection

from lightning_lowrank.federated.execution.traces import Unwritten, as_code, reachable
from lightning_lowrank.internals.torch import is_transformed

_PLAIN = (int, float, str)
# Metrics are totals of an epoch.
_LEFT = (Metric, MetricCollection, Optimizer)
_OF_OPTIMIZERS = ("state", "param_groups", "defaults")


class Kept:
    """What is kept at one moment, to tell later what has changed of it.

    Numbers, texts, tensors and containers count, in attributes of the objects and of those that they hold. Metrics,
    which are totals of an epoch, do not, nor what Lightning keeps on a module. A tensor with a graph is of its step
    alone.

    Args:
        trainer: The trainer, with its optimizers set up.
        with_module: Whether what the module keeps counts too.
    """

    def __init__(self, trainer: Any, with_module: bool) -> None:
        self._trainer, self._with_module = trainer, with_module
        self._plain: dict[str, Any] = {}
        self._containers: dict[str, list[Any]] = {}
        self._tensors: dict[str, Tensor] = {}
        module = trainer.lightning_module
        # Clients that train alone begin with what `Starts` has of the optimizers.
        optimizers = [
            each
            for each in trainer.optimizers
            if not with_module and not type(each).__module__.startswith("lightning_lowrank.")
        ]
        # Schedulers are brought back for each client.
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        apart = [*module.parameters(), *module.buffers(), *trainer.optimizers, *schedulers]
        self._left = {id(each) for each in apart}
        if with_module:
            own = {
                name: value
                for name, value in vars(module).items()
                if name not in _of_every_module() and not hasattr(pl.LightningModule, name)
            }
            self._look("module", own)
        for optimizer in optimizers:
            own = {name: value for name, value in vars(optimizer).items() if name not in _OF_OPTIMIZERS}
            self._look("optimizer", {type(optimizer).__name__: own})

    def _is_left(self, item: Any) -> bool:
        return id(item) in self._left or isinstance(item, _LEFT)

    def _look(self, kind: str, root: dict[str, Any]) -> None:
        for name, item in reachable(kind, root, self._is_left):
            if isinstance(item, Tensor):
                # What a mapped step has left means nothing outside of the map.
                if is_transformed(item):
                    continue
                if type(item) in (Tensor, nn.Parameter) and item.layout is torch.strided and item.grad_fn is None:
                    self._tensors[name] = item
            elif isinstance(item, dict):
                for key, value in item.items():
                    if isinstance(value, _PLAIN):
                        self._plain[f"{name}.{key}"] = value
                    elif isinstance(value, Optimizer) and self._keeps_its_state(value):
                        self._plain[f"{name}.{key}.state"] = len(value.state)
            elif isinstance(item, (list, tuple, set, deque)):
                self._containers[name] = [each for each in item if getattr(each, "grad_fn", None) is None]

    def _keeps_its_state(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer is none of the trainer's, whose state is begun for each client."""
        return id(optimizer) not in self._left and not isinstance(optimizer, LightningOptimizer)

    def watch(self) -> None:
        """Notice from now on what is written into tensors."""
        self._unwritten = Unwritten(self._tensors, sums=True)

    def changed(self) -> tuple[list[str], list[str]]:
        """Return the names of what has changed since `watch`, and stayed: the module's, and the optimizers'."""
        now = Kept(self._trainer, self._with_module)
        found = {name for name, value in self._plain.items() if _differs(value, now._plain.get(name, value))}
        found |= {name for name, items in self._containers.items() if _moved(items, now._containers.get(name, items))}
        written = set(self._unwritten.changed())
        for name, value in self._tensors.items():
            after = now._tensors.get(name)
            if after is not None and (name in written if after is value else _differs(value, after)):
                found.add(name)
        # Of a container, not its entries too.
        found = {name for name in found if not any(name.startswith(f"{other}.") for other in found)}
        told = [as_code(name).split(".", 1) for name in sorted(found)]
        return [name for root, name in told if root == "module"], [name for root, name in told if root == "optimizer"]


@functools.cache
def _of_every_module() -> frozenset[str]:
    """Return the attributes in which Lightning keeps something on a module."""
    return frozenset(vars(pl.LightningModule()).keys() - {"_modules"})


def _moved(before: Sequence[Any], now: Sequence[Any]) -> bool:
    return len(before) != len(now) or any(
        one is not two and not (isinstance(one, _PLAIN) and one == two) for one, two in zip(before, now, strict=True)
    )


def _differs(before: Any, now: Any) -> bool:
    if isinstance(before, Tensor):
        alike = (before.shape, before.dtype, before.device) == (now.shape, now.dtype, now.device)
        return not (alike and torch.equal(before, now))
    return type(before) is not type(now) or before != now
