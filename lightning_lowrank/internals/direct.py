"""What the ways past Lightning's calls have in common: when they may be taken, and how hooks are told.

`DirectSteps`, `DirectEvaluation` and `DirectLog` do what Lightning does, and are made for releases of it that they were
compared with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_lowrank.internals.lightning import overridden_transfer, overrides

_RELEASES = ((2, 6),)

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def is_compared_release() -> bool:
    """Return whether this Lightning is of a release that was compared with."""
    return tuple(int(part) for part in lightning.__version__.split(".")[:2]) in _RELEASES


def calls_fit(calls: Iterable[Call]) -> bool:
    """Return whether functions take the arguments and keywords that stand beside them.

    Example:
        >>> calls_fit([(round, (1.5,), {"ndigits": 1})]), calls_fit([(round, (1.5,), {"digits": 1})])
        (True, False)
    """
    try:
        for function, arguments, keywords in calls:
            inspect.signature(function).bind(*arguments, **keywords)
    except TypeError:
        return False
    return True


def has_usual_parts(trainer: Any) -> bool:
    """Return whether strategy, precision and profiler are Lightning's plainest, and batches moved by its own hooks.

    A strategy counts that makes steps as `SingleDeviceStrategy` does, and does not wrap the module; a precision that is
    single, or mixed by `torch.autocast`.
    """
    strategy = trainer.strategy
    return (
        (type(strategy) is SingleDeviceStrategy or getattr(strategy, "steps_alone", False))
        and strategy.model is trainer.lightning_module
        and type(trainer.precision_plugin) in (Precision, MixedPrecision)
        and type(trainer.profiler) is PassThroughProfiler
        and overridden_transfer(trainer) is None
    )


def in_context(precision: Precision, kind: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes the context of a ``"train"``, ``"val"`` or ``"test"`` step.

    That of single precision, which does nothing, is left out.
    """
    return nullcontext if type(precision) is Precision else getattr(precision, f"{kind}_step_context")


class Hooks:
    """Tells hooks to those callbacks that override them, and to the module if it does.

    Left out is what a `ModelCheckpoint` looks at after each step where it saves none in between.

    Args:
        trainer: The trainer.
        names: Names of the hooks. Who overrides them is looked up now.

    Attributes:
        heard: Those that somebody overrides.
    """

    def __init__(self, trainer: Any, names: Iterable[str]) -> None:
        self._trainer = trainer
        self._module = module = trainer.lightning_module
        self._callbacks = {
            name: [getattr(each, name) for each in trainer.callbacks if _hears(each, name)] for name in names
        }
        self._own = {name: getattr(module, name) for name in self._callbacks if overrides(module, name)}
        self.heard = {name for name, callbacks in self._callbacks.items() if callbacks or name in self._own}

    def tell(self, name: str, *arguments: Any) -> Any:
        """Call what overrides a hook, and return what the module answers."""
        if name not in self.heard:
            return None
        # By this `LightningModule.log` knows where it is called from.
        attributes = vars(self._module)
        before, attributes["_current_fx_name"] = attributes["_current_fx_name"], name
        for callback in self._callbacks[name]:
            callback(self._trainer, self._module, *arguments)
        answer = self._own[name](*arguments) if name in self._own else None
        attributes["_current_fx_name"] = before
        return answer


def _hears(callback: Any, hook: str) -> bool:
    """Return whether a callback overrides a hook, other than a `ModelCheckpoint` that saves by epochs alone."""
    if hook in vars(callback) or getattr(type(callback), hook, None) is not ModelCheckpoint.on_train_batch_end:
        return overrides(callback, hook)
    saves_by_steps = getattr(callback, "_every_n_train_steps", 1) > 0
    return saves_by_steps or getattr(callback, "_train_time_interval", 0) is not None
