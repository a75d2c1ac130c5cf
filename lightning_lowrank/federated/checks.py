"""Checks before the fit: refuse configurations that would silently train the wrong thing.

A refusal is a MisconfigurationException.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.func import jvp
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_lowrank.aggregation import Aggregator, DistanceRule, RobustRule
from lightning_lowrank.arguments import join_names
from lightning_lowrank.configuration import LACKING, check_integer
from lightning_lowrank.federated.algorithm import Algorithm, CompletesModels
from lightning_lowrank.federated.leaks import is_of_library
from lightning_lowrank.federated.protocols import inherits
from lightning_lowrank.federated.settings import FederatedSettings
from lightning_lowrank.federated.state import Base, BufferPolicy, State, trained_tensors
from lightning_lowrank.internals.lightning import overrides
from lightning_lowrank.internals.peft import factor_names, peft_layers
from lightning_lowrank.internals.replaced import replaced
from lightning_lowrank.internals.torch import BATCH_NORMS, sharing_memory
from lightning_lowrank.layers import low_rank_layers

_READING_HOOKS = (
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_save_checkpoint",
    "on_train_end",
)
_SAMPLED_STEPS = sorted({*range(1000), *range(1000, 10**6, 1000), *(2**power for power in range(10, 40))})
_OUTSIDE_OF_STEPS = (
    *("configure_optimizers", "lr_scheduler_step", "on_train_epoch_start"),
    *("optimizer_step", "optimizer_zero_grad", "on_before_optimizer_step", "configure_gradient_clipping"),
)
_BETWEEN_CLIENTS = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_end", "on_fit_end"),
    *("on_save_checkpoint", "on_load_checkpoint"),
)
STEP_COUNTERS = {
    "global_step": "which counts the optimizer steps of all clients one after another",
    "total_batch_idx": "which counts clients instead of batches",
}
"""Counters of the trainer that differ from those of a client alone."""
_COUNT_CLIENTS = {
    "trainer.num_training_batches": "which is the number of the round's clients there: read it in a local step, where"
    " it is the number of the client's batches, or trainer.estimated_stepping_batches",
    "trainer.train_dataloader": "whose length is the number of the round's clients there: read it in a local step,"
    " where it is the number of the client's batches",
}
_IN_STEPS = ("training_step", "forward", "__init__", "reset_parameters")
_EVALUATION = ("validation_", "test_", "predict_", "on_validation_", "on_test_", "on_predict_")


def in_no_optimizer(module: nn.Module, optimizers: Iterable[Optimizer]) -> list[str]:
    """Names of the trainable parameters that are in none of the ``optimizers``."""
    held = {id(value) for optimizer in optimizers for group in optimizer.param_groups for value in group["params"]}
    return [name for name, value in module.named_parameters() if value.requires_grad and id(value) not in held]


def check_optimizers(trainer: pl.Trainer, module: nn.Module) -> None:
    """Refuse parameters in no optimizer, optimized ones from elsewhere, and schedulers that count across clients."""
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step" and config.frequency != 1:
            raise MisconfigurationException(
                f"{type(config.scheduler).__name__} has interval='step' and frequency={config.frequency}, which counts"
                " the batches of a round from one client to the next: set frequency=1, and make the schedule that much"
                " longer."
            )
    check_integer("accumulate_grad_batches", trainer.accumulate_grad_batches, least=1)
    trained = sum(value.requires_grad for value in module.parameters())
    # If configure_optimizers() returns None, Lightning uses an optimizer without parameters.
    if not trainer.optimizers or 0 < trained == len(in_no_optimizer(module, trainer.optimizers)):
        raise MisconfigurationException(
            f"no optimizer has a parameter of {type(module).__name__}, and nothing would be trained: return one from"
            " configure_optimizers(), built from self.parameters(), even if the module optimizes manually."
        )
    check_trained(module, trainer.optimizers)
    own = {id(value) for value in module.parameters()}
    held = [value for each in trainer.optimizers for group in each.param_groups for value in group["params"]]
    foreign = [value for value in held if value.requires_grad and id(value) not in own]
    if foreign:
        raise MisconfigurationException(
            f"an optimizer holds {len(foreign)} parameters, such as one of shape {list(foreign[0].shape)}, that are no"
            f" part of {type(module).__name__}, so that their values would pass from client to client: assign their"
            " module to an attribute, as in self.loss_fn = ArcFace(), and several in an nn.ModuleList or"
            " nn.ModuleDict, not in a list or dictionary."
        )


def refuse_plateaus_of_steps(schedulers: Sequence[Any]) -> None:
    """Refuse schedulers that monitor a figure of each step: figures are logged once a client."""
    for config in schedulers:
        if config.interval == "step" and config.reduce_on_plateau:
            raise MisconfigurationException(
                f"{type(config.scheduler).__name__} with interval='step' monitors {config.monitor!r} after each step,"
                " but a client's figures are known only at its end: set interval='epoch', which counts rounds."
            )


def validation_interval_note(trainer: Any, turns: Callable[[], int] | None, stacked: bool) -> list[str]:
    """A sentence on ``val_check_interval``, if it is a number: it counts turns of the loop, not batches.

    Args:
        trainer: The trainer, in whose loop a turn is a client of each process, or clients that step together.
        turns: Returns the number of turns in the first round; ``None`` in a fit that resumes from a checkpoint.
        stacked: Whether clients step together.

    Raises:
        MisconfigurationException: If the first round has fewer turns.
    """
    # Lightning sets no such attribute if ``val_check_interval`` is a duration.
    every = getattr(trainer, "val_check_interval", None)
    if not isinstance(every, int) or not trainer.enable_validation or trainer.limit_train_batches == 0:
        return []
    counted, meaning = "chunks of clients that step together" if stacked else "clients", ""
    if trainer.world_size > 1:
        meaning = f"; in a turn each of the {trainer.world_size} processes trains one of its {counted}"
        counted = "turns"
    counts = f"val_check_interval={every} counts {counted}, not batches"
    if trainer.check_val_every_n_epoch is None:
        return [f"{counts}, across rounds{meaning}."]
    first = None if turns is None else turns()
    if first is not None and every > first:
        raise MisconfigurationException(
            f"{counts}, and the first round has {first}{meaning}: set a share of a round, such as"
            " val_check_interval=0.5, or check_val_every_n_epoch=None, which counts across rounds."
        )
    return [f"{counts}, of each round{meaning}."]


def refuse_own_reading(module: pl.LightningModule) -> None:
    """Refuse a `training_step` that takes the loader's iterator: its batches have no known client."""
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise MisconfigurationException(
            f"{type(module).__name__}.training_step(dataloader_iter) reads batches itself, and FederatedLoop gives each"
            " client its own: take (batch, batch_idx)."
        )


def refuse_default_device() -> None:
    """Refuse a fit under a default device other than the CPU, on which the rounds are planned and drawn."""
    if (device := torch.get_default_device()).type != "cpu":
        raise MisconfigurationException(
            f"torch's default device is {device}, but FederatedLoop needs the CPU: leave out"
            " torch.set_default_device and torch.device around the fit, and choose the device by"
            " Trainer(accelerator=...)."
        )


def check_trained(module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Refuse trainable parameters that no optimizer holds."""
    forgotten = in_no_optimizer(module, optimizers)
    if forgotten:
        raise MisconfigurationException(
            f"{len(forgotten)} trainable parameters are in no optimizer and would never be trained:"
            f" {join_names(forgotten)}. Build the optimizer in"
            " configure_optimizers() from self.parameters() (which holds the factors by then), or freeze them with"
            " requires_grad_(False)."
        )


def check_followed(
    settings: FederatedSettings,
    base: Base,
    number: int,
    trained: Mapping[str, Tensor],
    before: Mapping[str, Tensor] | None,
) -> None:
    """Refuse a change of the trained parameters in a round, if the method or the optimizers cannot follow it.

    Args:
        settings: The experiment's settings.
        base: The server's base.
        number: Number of the round.
        trained: The parameters that the round trains, by name.
        before: Those of the rounds before; ``None`` in a fit's first round.

    Raises:
        MisconfigurationException: If nothing is trained, a parameter was removed, a parameter is in no optimizer, or
            the method, error feedback or moments continue from other parameters.
    """
    if not trained:
        raise MisconfigurationException(f"in round {number} no parameter of the module is trained: all are frozen.")
    if base.optimizers:
        check_trained(base.module, base.optimizers)
    if before is None:
        return
    gone = sorted(before.keys() - dict(base.module.named_parameters(remove_duplicate=False)).keys())
    if gone:
        raise MisconfigurationException(
            f"the rounds before round {number} trained {join_names(gone)}, which the module no longer has: something"
            " has"
            " replaced parameters, as pruning and parametrizations do. Do that before or after the fit."
        )
    changed = join_names(sorted(trained.keys() ^ before.keys()))
    reason = why_trained_set_is_fixed(settings)
    if changed and reason:
        raise MisconfigurationException(
            f"from round {number} on other parameters are trained than before ({changed}), and {reason}: train the"
            " same parameters in all rounds."
        )


def check_buffers(base: Base, number: int, live: Mapping[str, Tensor]) -> None:
    """Refuse a round whose module lacks a persistent buffer of earlier rounds, or has it in another shape.

    Args:
        base: The base, with the buffers of earlier rounds.
        number: Number of the round.
        live: The live trained parameters and persistent buffers.

    Raises:
        MisconfigurationException: If there is such a buffer.
    """
    for name, before in base.initial_buffers.items():
        now = list(live[name].shape) if name in live else None
        if now != list(before.shape):
            raise MisconfigurationException(
                f"the buffer {name} had shape {list(before.shape)} in earlier rounds, and"
                f" {'is missing' if now is None else f'has shape {now}'} in round {number}: register it in __init__ or"
                " setup() and keep its shape, or register it with persistent=False."
            )


def check_factor_gradients(
    module: nn.Module, gradient_of: Callable[[str, Tensor], Tensor | None], among: Iterable[Tensor] | None = None
) -> None:
    """Raise if no low-rank layer has a gradient in the first step; name those without one.

    Args:
        module: The module, after the first backward pass.
        gradient_of: Returns the gradient of a factor, given its name and the factor.
        among: The factors that the step trains; ``None``: all that are trained.
    """
    wanted = None if among is None else {id(each) for each in among}
    unseen, trained = [], 0
    for name, layer in low_rank_layers(module, tied=False):
        named = layer.factors.named_parameters(f"{name}.factors" if name else "factors")
        factors = [each for each in named if each[1].requires_grad and (wanted is None or id(each[1]) in wanted)]
        if factors and layer.active != "base":
            trained += 1
            unseen += [name] if all(gradient_of(*each) is None for each in factors) else []
    if not unseen:
        return
    problem = (
        f"the first step gives no gradient to the factors of {join_names(unseen)}: the step does not use these layers,"
        " or"
        " uses a weight that the module read before LowRank converted them. Leave such layers out:"
        f" LowRank(exclude={unseen[:3]})."
    )
    if len(unseen) == trained:
        raise MisconfigurationException(problem)
    rank_zero_warn(f"{problem} Layers that only some batches use get their gradients later.")


def check_memory(loop: Any, module: nn.Module) -> None:
    """Refuse tensors that share memory if the method or a codec may give them two values."""
    alike = inherits(loop.algorithm, "begin", "end", "receive", "personal_model") and loop.buffers == "average"
    if loop.algorithm.claims.handles_shared_memory or (alike and not (loop.uplink or loop.downlink)):
        return
    shared = sharing_memory(trained_tensors(module).items())
    if shared:
        raise MisconfigurationException(
            f"{' and '.join(shared[0])} lie in the same memory, as two tensors, and {loop.algorithm!r} with"
            f" uplink={loop.uplink!r}, downlink={loop.downlink!r} and buffers={loop.buffers!r} may give them different"
            " values: use one Parameter under both names, as for tied weights, or use FedAvg without codecs."
        )


def check_rule(algorithm: Algorithm, rule: Aggregator) -> None:
    """Refuse a robust aggregator if it would not see all values that the method's clients send."""
    if not isinstance(rule, RobustRule):
        return
    claims, method = algorithm.claims, repr(algorithm)
    if claims.unprotected:
        raise MisconfigurationException(
            f"{method} and aggregator={rule!r} do not go together: {claims.unprotected}, which a robust rule cannot"
            " protect. Use a method that averages clients' messages, such as FedAvg or FedMUD, or leave out aggregator."
        )
    if claims.not_single_numbers and not isinstance(rule, DistanceRule):
        raise MisconfigurationException(
            f"{method} and aggregator={rule!r} do not go together: {claims.not_single_numbers}. Use a rule based on"
            " distances, such as GeometricMedian() or MultiKrum(); or FedAvg, which averages factors as any parameters."
        )


def why_trained_set_is_fixed(settings: FederatedSettings) -> str:
    """Why the trained parameters must stay the same in all rounds; an empty string if they may change."""
    if not settings.algorithm.claims.trained_set_may_change:
        return f"{type(settings.algorithm).__name__} keeps values of the earlier parameters, as FedAvg does not"
    if any(codec.error_feedback for codec in (*settings.uplink, *settings.downlink)):
        return "error feedback keeps residuals of the earlier parameters"
    return "optimizer_state='keep' keeps their earlier moments" if settings.optimizer_state == "keep" else ""


def check_callbacks(loop: Any, trainer: Any, module: nn.Module, fixed_because: str) -> None:
    """Refuse callbacks, or an order of callbacks, that would mistake a client's weights for the global model.

    ``fixed_because`` is the reason if the same parameters must be trained in all rounds, else empty.
    """
    callbacks = trainer.callbacks
    if sum(type(callback) is type(loop) for callback in callbacks) > 1:
        raise MisconfigurationException("there are two FederatedLoop callbacks: keep one.")
    place = callbacks.index(loop)
    for callback in callbacks[:place]:
        if _reads_weights(callback):
            raise MisconfigurationException(
                f"{type(callback).__name__} comes before FederatedLoop in `callbacks` and would read a client's weights"
                " as the global model's: put FederatedLoop before it."
            )
    if any(type(callback).__name__ == "LowRank" for callback in callbacks[place:]):
        raise MisconfigurationException("put LowRank before FederatedLoop in `callbacks`.")
    for callback in callbacks:
        problem = (
            _why_no_trials(callback)
            or _why_no_finetuning(callback, fixed_because)
            or _why_no_pruning(callback)
            or _why_no_averages_over_rounds(callback, loop.algorithm)
            or _why_no_averages_of_steps(callback)
            or _why_no_pass_over_all_samples(callback, module)
        )
        if problem:
            raise MisconfigurationException(f"{type(callback).__name__}{problem}")


def _why_no_trials(callback: Callback) -> str:
    if not isinstance(callback, (BatchSizeFinder, LearningRateFinder)):
        return ""
    return (
        " makes trial fits, which would be rounds of the experiment: tune without FederatedLoop first, and set the"
        " values that are found."
    )


def _why_no_finetuning(callback: Callback, fixed_because: str) -> str:
    if not isinstance(callback, BaseFinetuning) or not fixed_because:
        return ""
    return (
        f" lets other parameters be trained from some round on, and {fixed_because}: leave it out, and freeze what is"
        " never trained with requires_grad_(False)."
    )


def _why_no_pruning(callback: Callback) -> str:
    if not isinstance(callback, ModelPruning):
        return ""
    return (
        " replaces parameters by masked ones, which clients would not be sent: prune before the fit and make it"
        " permanent, or after the fit."
    )


def _why_no_averages_over_rounds(callback: Callback, algorithm: Algorithm) -> str:
    averages = isinstance(callback, (WeightAveraging, StochasticWeightAveraging))
    if not averages or algorithm.claims.averages_over_rounds:
        return ""
    return (
        f" averages factors over rounds, and {type(algorithm).__name__} draws them again while they contain a change:"
        " leave it out, or set reset_interval=1."
    )


def _why_no_averages_of_steps(callback: Callback) -> str:
    if not isinstance(callback, WeightAveraging):
        return ""
    arguments, remedy = "", "override its should_update() to return True for epoch_idx only"
    found: int | None = None
    if type(callback).should_update is EMAWeightAveraging.should_update:
        every = callback.update_every_n_steps  # type: ignore[attr-defined]
        arguments = f"(update_every_n_steps={every})"
        remedy = "set update_every_n_steps=0 and update_starting_at_epoch=0"
        found = callback.update_starting_at_step or 0 if every > 0 else None  # type: ignore[attr-defined]
    else:
        found = next((step for step in _SAMPLED_STEPS if callback.should_update(step_idx=step)), None)
    if found is None:
        return ""
    return (
        f"{arguments} averages after optimizer steps, such as step {found}, which are steps of single clients:"
        f" {remedy}, so that it averages global models."
    )


def _why_no_pass_over_all_samples(callback: Callback, module: nn.Module) -> str:
    normalised = any(isinstance(layer, BATCH_NORMS) for layer in module.modules())
    if not isinstance(callback, StochasticWeightAveraging) or not normalised:
        return ""
    return (
        " ends with a pass over the training set that recomputes BatchNorm statistics, and a federated round has no"
        " such pass: leave it out, or use normalisation without statistics."
    )


def check_manual_optimization(settings: FederatedSettings, module: pl.LightningModule) -> None:
    """Refuse a method or objective that changes the loss or the steps of a module with manual optimization."""
    if module.automatic_optimization:
        return
    algorithm, objective = settings.algorithm, settings.objective
    if not inherits(algorithm, "local_update"):
        acting = f"{type(algorithm).__name__} steps the optimizer in its own way"
    elif not inherits(algorithm, "loss"):
        acting = f"{type(algorithm).__name__} changes the loss that training_step returns"
    elif objective is not None and objective.changes_result:
        acting = f"objective={objective!r} changes the loss that training_step returns"
    else:
        return
    raise MisconfigurationException(
        f"{acting}, which is not possible in a module that optimizes manually: use automatic optimization."
    )


def refuse_lazy(module: nn.Module) -> None:
    """Refuse a module with uninitialized (lazy) parameters or buffers.

    Raises:
        MisconfigurationException: If it has.
    """
    lazy = [name for name, value in chain(module.named_parameters(), module.named_buffers()) if is_lazy(value)]
    if lazy:
        raise MisconfigurationException(
            f"{join_names(lazy)} {'have' if len(lazy) > 1 else 'has'} no shape yet, as lazy layers have none before"
            " their"
            " first batch: call the module once, module(example), before the fit."
        )


def check_local_update(algorithm: Algorithm, trainer: pl.Trainer) -> None:
    """For a method with its own `local_update`: refuse gradient accumulation."""
    if inherits(algorithm, "local_update"):
        return
    method = type(algorithm).__name__
    if trainer.accumulate_grad_batches != 1:
        raise MisconfigurationException(
            f"{method} steps the optimizer in its own way on each batch:"
            f" set accumulate_grad_batches=1, not {trainer.accumulate_grad_batches}."
        )
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        raise MisconfigurationException(
            f"{method} steps the optimizer in its own way on each batch: leave out GradientAccumulationScheduler."
        )


def refuse_batch_norm(module: nn.Module, asking: str, way_out: str = "") -> None:
    """Refuse BatchNorm layers, whose statistics mix samples; ``asking`` names the setting that excludes them."""
    found = [name for name, layer in module.named_modules() if isinstance(layer, BATCH_NORMS)]
    if found:
        raise MisconfigurationException(
            f"{asking} cannot bound the influence of single samples on the statistics of BatchNorm"
            f" ({join_names(found)}),"
            f" nor keep variances positive under noise: {way_out}use GroupNorm or LayerNorm."
        )


def check_factors_move(module: nn.Module, trained: Iterable[str], asking: str) -> None:
    """Refuse layers whose weight depends on no trained factor.

    That is so for LoRA's ``A`` alone while ``B`` is zero. A run would then spend its budget on noise. A weight's
    dependence is its derivative by all trained factors, along a random direction.

    Args:
        module: The module.
        trained: Names of the parameters that are trained.
        asking: The setting that refuses, for the message.
    """
    names = set(trained)
    still = []
    held = {name: value.detach() for name, value in module.named_parameters(remove_duplicate=False)}
    draws = torch.Generator().manual_seed(0)

    def direction(value: Tensor) -> Tensor:
        return torch.randn(value.shape, generator=draws).to(value)

    for layer_name, layer in low_rank_layers(module, tied=False):
        prefix = f"{layer_name}.factors." if layer_name else "factors."
        factors = {name: value.detach() for name, value in layer.factors.items()}
        moving = {name: value for name, value in factors.items() if prefix + name in names}
        if moving:

            def composed(values: dict[str, Tensor], layer: Any = layer, factors: Any = factors) -> Tensor:
                return layer.update({**factors, **values})

            tangents = {name: direction(value) for name, value in moving.items()}
            if not jvp(composed, (moving,), (tangents,))[1].any():
                still.append(layer_name)
    for layer_name, B, A in factor_names(module):
        moves = [held[other].any() for name, other in ((B, A), (A, B)) if name in names]
        if moves and not any(moves):
            still.append(layer_name)
    if still:
        raise MisconfigurationException(
            f"{asking}: the trained factors of {join_names(still)} have zero gradients, because each is multiplied by a"
            " factor that is zero, so that their steps would be noise alone: train the other factor too (LoRA's B, not"
            " A"
            " alone), or initialise it to other values than zero."
        )


_OF_STATISTICS: dict[BufferPolicy, str] = {
    "average": "are averaged over clients and may fit no model",
    "reset": "start again at each client, are averaged, and may fit no model",
    "local": "stay with their clients, while the global model keeps its initial ones",
}


def static_batch_norm_advice(
    algorithm: Algorithm,
    trainer: Any,
    module: pl.LightningModule,
    buffers: BufferPolicy,
    remedy: str = "Put StaticBatchNorm() after FederatedLoop.",
) -> list[str]:
    """A sentence of advice, if BatchNorm statistics are tracked and the method's paper trains with static BatchNorm."""
    layers = _layers_that_track(module)
    completed = any(isinstance(callback, CompletesModels) for callback in trainer.callbacks)
    if not algorithm.claims.static_batch_norm or not layers or completed:
        return []
    return [
        f"the paper of {type(algorithm).__name__} trains with static BatchNorm, and the module has"
        f" {layers} BatchNorm layers whose statistics {_OF_STATISTICS[buffers]}, so that validation may be at chance."
        f" {remedy}"
    ]


def notes(module: pl.LightningModule, buffers: BufferPolicy, schedulers: Sequence[Any] = ()) -> list[str]:
    """Notes for the user on this module's behaviour in rounds, one sentence each.

    Args:
        module: The module.
        buffers: The setting ``buffers``.
        schedulers: The trainer's, if it has set them up.
    """
    found = []
    layers = _layers_that_track(module)
    if layers and buffers == "local":
        found.append(
            f"buffers='local' keeps the statistics of {layers} BatchNorm layers with their clients: the global model"
            " is validated with its initial statistics."
        )
    for counter in STEP_COUNTERS:
        outside = [name for name in _readers_of(module, counter) if name in _OUTSIDE_OF_STEPS]
        if outside:
            found.append(step_counter_note(module, counter, outside))
    for attribute, meaning in _COUNT_CLIENTS.items():
        readers = [name for name in _readers_of(module, attribute) if name in _BETWEEN_CLIENTS]
        if readers:
            found.append(f"{', '.join(readers)} of {type(module).__name__} reads {attribute}, {meaning}.")
    bypassed = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, nn.TransformerEncoderLayer)
        and any(hasattr(part, "get_base_layer") for part in layer.modules())
    ]
    if bypassed and torch.backends.mha.get_fastpath_enabled():
        found.append(
            f"PEFT wrapped parts of {join_names(bypassed)}, and torch evaluates an nn.TransformerEncoderLayer by the"
            " base"
            " weights, without the adapters: call torch.backends.mha.set_fastpath_enabled(False) before the fit, or"
            " validation and test evaluate the model without its adapters."
        )
    if schedulers and not module.automatic_optimization:
        found.append(
            "manual optimization: every client begins with the learning rate schedulers as they were at the round's"
            " start, and the next round begins with those of the client with the most steps. Steps of schedulers"
            " between rounds, as in on_train_epoch_end, are kept."
        )
    return found


def step_counter_note(module: pl.LightningModule, counter: str, readers: Sequence[str]) -> str:
    """A sentence on ``readers``, the module's methods that read a counter of `STEP_COUNTERS`."""
    return (
        f"{', '.join(readers)} of {type(module).__name__} reads {counter}, {STEP_COUNTERS[counter]}: use batch_idx,"
        " which counts a client's own batches, or current_epoch, which counts rounds."
    )


def readers_in_steps(module: pl.LightningModule) -> dict[str, list[str]]:
    """Names of the methods that read a counter of `STEP_COUNTERS` and may run inside a training step, by counter."""
    others = (*_OUTSIDE_OF_STEPS, *_BETWEEN_CLIENTS)
    found = {each: [name for name in _readers_of(module, each) if name not in others] for each in STEP_COUNTERS}
    return {counter: readers for counter, readers in found.items() if readers}


def resume_notes(trainer: Any, last_round: int, is_open: bool) -> list[str]:
    """Notes for the user on a resumed fit.

    Args:
        trainer: The trainer.
        last_round: The last round that has begun.
        is_open: Whether clients of it are still to be trained.
    """
    found: list[str] = []
    by_step, epoch = trainer.fit_loop.restarted_mid_epoch, trainer.current_epoch
    if trainer.max_steps != -1 and trainer.max_epochs != -1 and epoch == last_round and not by_step:
        found.append(
            f"Lightning counts an epoch again when a fit with max_steps={trainer.max_steps} is resumed from a"
            " checkpoint that was saved at the epoch's end, so that"
            f" max_epochs={trainer.max_epochs} ends the fit one round early: leave"
            " out one of the two limits."
        )
    plateaus = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    if any(config.interval == "epoch" for config in plateaus):
        found.append(
            "Lightning leaves out a step of ReduceLROnPlateau in the epoch in which a fit is resumed, so that the"
            " learning rate may fall later than in a fit that was not stopped."
        )
    listeners = (trainer.lightning_module, *trainer.callbacks)
    ours = "lightning_lowrank."
    # A checkpoint inside a round has what BaseFinetuning did as the round began.
    theirs = (StochasticWeightAveraging,) if is_open else (StochasticWeightAveraging, BaseFinetuning)
    own = (
        each
        for each in listeners
        if isinstance(each, theirs) or not (_of_lightning(each) or type(each).__module__.startswith(ours))
    )
    hearing = [type(each).__name__ for each in own if overrides(each, "on_train_epoch_start")]
    trains = is_open or last_round < epoch != trainer.max_epochs
    if by_step and trains and hearing:
        found.append(
            f"Lightning does not call on_train_epoch_start (of {join_names(hearing)}) in round {epoch},"
            " because the checkpoint was saved after an optimizer step: what it sets is not set in this round. Set it"
            " in on_train_start as well, or resume from a checkpoint that was saved at a round's end"
            " (ModelCheckpoint without every_n_train_steps)."
        )
    return found


_BY_PERSONAL_TEST = (
    "Evaluate the clients' own models by FederatedLoop(personal_test=...), and monitor their figures, such as"
    ' monitor="personal/val_acc".'
)


def local_part_advice(algorithm: Algorithm, remedy: str = _BY_PERSONAL_TEST) -> list[str]:
    """A warning, if a part of the global model is never trained: its figures are of that part's initial values."""
    if not algorithm.claims.local_part:
        return []
    return [
        f"{type(algorithm).__name__} keeps {algorithm.claims.local_part} with the clients: the global model is"
        f" validated with the initial values of this part, and figures such as val_acc are of that model. {remedy}"
    ]


def new_basis_advice(settings: FederatedSettings) -> list[str]:
    """A warning, if clients keep residuals or moments of factors that the server writes in a new basis."""
    claims, feedback = settings.algorithm.claims, any(codec.error_feedback for codec in settings.uplink)
    given = {
        "error_feedback=True of the uplink": feedback,
        "optimizer_state='keep'": settings.optimizer_state == "keep",
    }
    kept = [setting for setting, used in given.items() if used]
    if not claims.new_basis or not kept:
        return []
    return [
        f"{type(settings.algorithm).__name__} writes {claims.new_basis} in the basis of a new decomposition, and what"
        f" clients keep by {join_names(kept)} is of the basis before: it is used as it is, and is in error where"
        " singular vectors have turned, or changed their signs or order. It may help nevertheless: compare with a fit"
        " without it."
    ]


def warn_of_changed_base(algorithm: Algorithm, base: Base) -> None:
    """Warn that PEFT's ``save_pretrained()`` omits the method's changes of frozen weights."""
    wrapped = any(peft_layers(base.module))
    if wrapped and (base.state.get("folded") or base.state.get("separate_changes")):
        rank_zero_warn(
            f"{type(algorithm).__name__} changed base weights of the model that PEFT wrapped, and its"
            " save_pretrained() writes the adapter without them: lightning_lowrank.export_adapter(module, folder,"
            " base=pretrained_network) writes a complete adapter. For weights that are not quantised,"
            " merge_and_unload() returns the whole model, and `lightning-lowrank export` writes base and adapter."
        )


def marking_incomplete(
    module: pl.LightningModule, state_key: str, state: Callable[[], State]
) -> AbstractContextManager[None]:
    """A context in which checkpoints are marked after the module's ``on_save_checkpoint()``; see `mark_incomplete`."""
    own = module.on_save_checkpoint

    def save(checkpoint: dict[str, Any]) -> None:
        own(checkpoint)
        mark_incomplete(module, state_key, state(), checkpoint)

    return replaced(module, on_save_checkpoint=save)


def mark_incomplete(
    module: pl.LightningModule, state_key: str, state: Mapping[str, Any], checkpoint: Mapping[str, Any]
) -> None:
    """Mark a checkpoint that lacks frozen weights that rounds have changed, and warn.

    A module's ``state_dict()`` or ``on_save_checkpoint()`` may leave frozen weights out.

    Args:
        module: The module.
        state_key: The callback's key, whose state in the checkpoint takes the mark.
        state: The state of the server's `Base`.
        checkpoint: The checkpoint.
    """
    weights, saved = dict(module.named_parameters()), checkpoint["state_dict"]
    changed = sorted({*state.get("folded", {}).values()} & weights.keys())
    lacking = [name for name in changed if name not in saved and not _holds(saved, weights[name])]
    if not lacking:
        return
    if state_key in checkpoint.get("callbacks", {}):
        checkpoint["callbacks"][state_key][LACKING] = lacking
    rank_zero_warn(
        f"the checkpoint lacks {len(lacking)} frozen weights that the rounds have changed, {join_names(lacking)},"
        f" because {type(module).__name__}'s state_dict() or on_save_checkpoint() leaves them out. It cannot be resumed"
        " or exported. Put TrainedCheckpoints() in `callbacks` in place of that code: it leaves out unchanged weights"
        " alone."
    )


def _holds(saved: Mapping[str, Any], weight: Tensor) -> bool:
    """Whether a state dict has a weight's numbers, under whatever name."""
    alike = (each for each in saved.values() if isinstance(each, Tensor) and each.shape == weight.shape)
    return any(torch.equal(each.to(weight), weight) for each in alike)


def _layers_that_track(module: nn.Module) -> int:
    """The number of BatchNorm layers that track statistics."""
    return sum(isinstance(layer, BATCH_NORMS) and bool(layer.track_running_stats) for layer in module.modules())


def _of_lightning(listener: Any) -> bool:
    """Whether a module or callback is Lightning's own, and calls no function of the user's."""
    known = type(listener).__module__.startswith(("lightning.pytorch.", "pytorch_lightning."))
    return known and not isinstance(listener, LambdaCallback)


def _reads_weights(callback: Callback) -> bool:
    if _of_lightning(callback):
        return isinstance(callback, (WeightAveraging, StochasticWeightAveraging))
    return any(overrides(callback, hook) for hook in _READING_HOOKS)


def _readers_of(module: pl.LightningModule, attribute: str) -> list[str]:
    """Names of a module's methods whose code reads an attribute, evaluation hooks left out."""
    found, names = [], set(attribute.split("."))
    for kind in type(module).__mro__:
        if issubclass(pl.LightningModule, kind):
            continue
        for name, function in _methods(kind):
            # In configure_optimizers(), attributes of the trainer have the values of one client; see `ScheduleLength`.
            if name == "configure_optimizers" and attribute != "global_step":
                continue
            if not name.startswith(_EVALUATION) and names <= _mentioned(function.__code__):
                found.append(name)
    return found


def readers_after_steps(trainer: Any, attribute: str) -> list[str]:
    """The methods of the user's modules and callbacks that name an attribute, and may run outside of training steps."""
    objects = (*trainer.lightning_module.modules(), *trainer.callbacks)
    kinds = dict.fromkeys(kind for each in objects for kind in type(each).__mro__)
    return [
        f"{kind.__name__}.{name}"
        for kind in kinds
        if not is_of_library(kind)
        for name, function in _methods(kind)
        if name not in _IN_STEPS and any(attribute in _mentioned(each.__code__) for each in _with_helpers(function))
    ]


def _with_helpers(function: types.FunctionType) -> list[types.FunctionType]:
    """A function, and the functions of its module that its code names."""
    named = map(function.__globals__.get, _mentioned(function.__code__))
    return [function, *(each for each in named if isinstance(each, types.FunctionType) and not is_of_library(each))]


def _methods(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    """The functions of a class's own methods and properties, by name."""
    for name, member in vars(kind).items():
        function = inspect.unwrap(getattr(member, "__func__", None) or getattr(member, "fget", None) or member)
        if isinstance(function, types.FunctionType):
            yield name, function


def _mentioned(code: types.CodeType) -> set[str]:
    inner = [_mentioned(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*inner)
