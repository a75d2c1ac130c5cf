"""Reasons, in words for the user, why clients cannot step together or a training step cannot be mapped."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ThroughputMonitor
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.federated.algorithm import Algorithm
from lightning_lowrank.federated.client_optimizers import acts_elementwise
from lightning_lowrank.federated.data.batches import DiffersBetweenClients
from lightning_lowrank.federated.data.sampling import NeedsPoissonBatches
from lightning_lowrank.federated.protocols import inherits
from lightning_lowrank.internals.lightning import overridden_transfer, overrides
from lightning_lowrank.internals.torch import backward_hooks, global_hooks, has_hooks, sharing_memory

_HOOKS = (
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
_OF_GRADIENTS = (
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "backward"),
    *("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"),
)
_AROUND_STEPS = ("on_train_batch_start", "on_train_batch_end")
_CALLED_AROUND = (*_AROUND_STEPS, "on_before_zero_grad", "on_before_backward")
_LONGEST = 200
_PACKAGES = ("lightning.pytorch.", "pytorch_lightning.", "lightning_lowrank.")
ALSO_TO_RESUME = ", with allow_changes=['execution'] if the fit is resumed from a checkpoint"
"""The end of a sentence that advises another execution in a later round."""
SETS_FLAGS = "can only change requires_grad flags"
"""Part of torch's error where a step sets ``requires_grad`` of a parameter in whose place is a slice of a stack."""
_CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"\.item\(\)|data pointer of Tensor that|Can't detach views in-place",
        "it takes a number out of a tensor that differs between clients (.item(), float(), .tolist(), .numpy(), an"
        " index or a range)",
    ),
    (
        "data-dependent control flow",
        "it decides by a tensor's value that differs between clients (an if or assert on a tensor)",
    ),
    (
        r"a tensor and its view\(\)",
        "it changes a tensor in place through view(), and uses both (take flatten(), or do not change it in place)",
    ),
    (
        r"inplace|in-place|in place|_\(self, \*extra_args\)|output with shape \S+ \S+ match the broadcast shape",
        "it changes a tensor in place that all clients share: a frozen weight, a buffer that is not persistent, or"
        " one made in the step by torch.zeros() and the like (make that by new_zeros() of one of the clients' tensors)",
    ),
    (
        "dynamic shape|num_classes|repeat_interleave|stack expects each tensor to be equal size",
        "the shape of a result in it depends on a tensor's values (indexing with a boolean mask, nonzero, unique,"
        " bincount)",
    ),
    (
        "a hook is registered",
        "it registers a hook on a tensor (Tensor.register_hook), which expects one client's gradient",
    ),
    ("saved tensors hooks|_NoopSaveInputs", "it uses gradient checkpointing, which computes again outside of the map"),
    ("setup_context|does not have vmap support", "it uses an autograd.Function that has no rule for torch.func.vmap"),
    (r"aten::(lstm|gru|rnn)", "torch cannot map its recurrent layers (nn.LSTM, nn.GRU, nn.RNN)"),
    (SETS_FLAGS, "it changes requires_grad of a client's parameter (requires_grad_(), toggle_optimizer())"),
    (
        r"requires_grad_\(\)|does not require grad and does not have a grad_fn|backward\(\) called inside",
        "it computes gradients itself (requires_grad_(), autograd.grad, backward)",
    ),
    (
        r"accessing `data`|with `\.data`|storage of Batched|escaped",
        "it takes a client's tensor apart (.data, copy.deepcopy)",
    ),
    ("aten::", "it uses an operation that torch cannot map"),
)


def cause_of(error: Exception) -> str:
    """The likely cause in the training step of an error that torch raised."""
    if isinstance(error, DiffersBetweenClients):
        return str(error)
    first = str(error).strip().split("\n")[0].rstrip(".")
    message = first if len(first) <= _LONGEST else f"{first[:_LONGEST]}..."
    sentence = next((sentence for sign, sentence in _CAUSES if re.search(sign, message)), "")
    return f"{sentence}; torch says: {message}" if sentence else f"{type(error).__name__}: {message}"


def metric_update_reason(metric: str) -> str:
    """A sentence on a metric that the training step updates."""
    return f"it updates the metric {metric}, whose state all clients would share; log its value instead"


class CannotMap(MisconfigurationException):
    """Raised for a training step that cannot be mapped over clients, with the cause.

    Args:
        cause: The cause.
        chosen: Whether ``execution='auto'`` chose that clients step together.

    Attributes:
        reason: The refusal and its reason, without an alternative to ``execution='vectorized'``.
    """

    def __init__(self, cause: str, chosen: bool = False) -> None:
        self.reason = f"execution='vectorized' cannot map training_step over clients: {cause}"
        other = ALSO_TO_RESUME if chosen else ", or 'auto', which falls back to it"
        super().__init__(f"{self.reason}. Use execution='sequential'{other}.")


@runtime_checkable
class ActsOnStacks(Protocol):
    """Protocol of callbacks that change gradients before the optimizer steps and can do so on stacks of clients.

    If one of this package has an attribute ``acts_on_gradients`` that is false, it does nothing in this run.
    """

    def on_before_stacked_step(self, module: pl.LightningModule, stacks: Mapping[str, Tensor]) -> None:
        """Change the gradients of stacked parameters ``[clients, …]``, given by name."""


def steps_are_observed(trainer: Any, algorithm: Algorithm) -> bool:
    """Whether anything besides the optimizer may read gradients in steps or weights between steps."""
    module = trainer.lightning_module
    if (
        not inherits(algorithm, "before_step")
        or not inherits(algorithm, "local_update")
        or not module.automatic_optimization
        or trainer.accumulate_grad_batches != 1
        or trainer.gradient_clip_val
        or type(trainer.precision_plugin) not in (Precision, DoublePrecision, HalfPrecision)
        or not (type(trainer.strategy) is SingleDeviceStrategy or getattr(trainer.strategy, "steps_alone", False))
        # Read from the class, because executions replace some of these methods on the instance.
        or any(getattr(type(module), hook) is not getattr(pl.LightningModule, hook) for hook in _OF_GRADIENTS)
        or any(overrides(module, hook) for hook in _AROUND_STEPS)
    ):
        return True
    for callback in trainer.callbacks:
        ours = type(callback).__module__.startswith(_PACKAGES)
        if ours and isinstance(callback, ActsOnStacks) and not getattr(callback, "acts_on_gradients", True):
            continue
        hooks = _OF_GRADIENTS[:4] if ours else _OF_GRADIENTS[:4] + _AROUND_STEPS
        if callback.state_key != "FederatedLoop" and any(overrides(callback, hook) for hook in hooks):
            return True
    return False


def hooks_around_steps(listener: pl.LightningModule | pl.Callback) -> list[str]:
    """The user's hooks around a step, which would see the global model and a stacked batch."""
    return users_hooks(listener, _CALLED_AROUND)


def users_hooks(listener: pl.LightningModule | pl.Callback, hooks: Collection[str]) -> list[str]:
    """The hooks among ``hooks`` that a module or callback overrides, without those of Lightning's and our callbacks."""
    overridden = [hook for hook in hooks if overrides(listener, hook)]
    if isinstance(listener, pl.LightningModule):
        return overridden
    places = {hook: str(getattr(getattr(listener, hook), "__module__", "")) for hook in overridden}
    return [hook for hook, place in places.items() if not place.startswith(_PACKAGES)]


def reason_of_hooks(module: pl.LightningModule) -> str:
    """The hook of torch that keeps clients from stepping together, in words; empty if there is none."""
    hooked = [name for name, value in module.named_parameters() if has_hooks(value)]
    if hooked:
        return f"the parameter {hooked[0]} has a hook (Tensor.register_hook), which expects one client's gradient"
    # Forward hooks are allowed here: the comparison with a single client detects their effect.
    hooked = [name or type(module).__name__ for name, part in module.named_modules() if backward_hooks(part)]
    if hooked:
        return f"the module {hooked[0]} has a backward hook, which expects one client's gradients"
    if global_hooks():
        return "torch has a hook of all modules, which expects one client's tensors"
    return ""


def reason_of_optimizers(trainer: Any) -> str:
    """The optimizer that keeps clients from stepping together, in words; empty if there is none."""
    for optimizer in trainer.optimizers:
        if not acts_elementwise(optimizer):
            return (
                f"the optimizer {type(optimizer).__name__} is not known to act on each number alone (if it does,"
                " declare it with lightning_lowrank.federated.register_elementwise)"
            )
    return ""


def unsupported_reason(trainer: Any, module: pl.LightningModule) -> str:
    """The setting that keeps clients from stepping together, in words; empty if there is none.

    Operations of ``training_step`` are seen only when it is mapped: `ClientStack.training_step` refuses them.
    """
    if not module.automatic_optimization:
        return "the module optimizes manually"
    if trainer.accumulate_grad_batches != 1:
        return f"accumulate_grad_batches={trainer.accumulate_grad_batches} ends a group at each client's own last batch"
    scheduled = next((each for each in trainer.callbacks if isinstance(each, GradientAccumulationScheduler)), None)
    if scheduled is not None and set(scheduled.scheduling.values()) != {1}:
        return f"{type(scheduled).__name__}({scheduled.scheduling}) ends a group at each client's own last batch"
    hooked = reason_of_hooks(module)
    if hooked:
        return hooked
    shared = sharing_memory(module.named_parameters())
    if shared:
        return f"the parameters {' and '.join(shared[0])} lie in the same memory, which stacks of clients' do not"
    unknown = reason_of_optimizers(trainer)
    if unknown:
        return unknown
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "16-mixed precision scales the losses of all clients by one factor"
    for hook in _HOOKS:
        if overrides(module, hook):
            return f"{type(module).__name__}.{hook}() expects one client's batch or gradients"
    own = overridden_transfer(trainer)
    if own:
        return f"{type(own[0]).__name__}.{own[1]}() expects one client's batch"
    for callback in trainer.callbacks:
        if isinstance(callback, NeedsPoissonBatches):
            return f"{type(callback).__name__} maps each step over the samples of one client's batch"
        if isinstance(callback, ThroughputMonitor):
            return f"{type(callback).__name__}(batch_size_fn) expects one client's batch"
        for hook in ("on_before_optimizer_step", "on_after_backward"):
            acts = isinstance(callback, ActsOnStacks) or callback.state_key == "FederatedLoop"
            if overrides(callback, hook) and not acts:
                return f"the callback {type(callback).__name__}.{hook}() expects one client's gradients"
    return ""
