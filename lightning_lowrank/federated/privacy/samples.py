"""Clipped gradients of single samples, by the user's ``training_step`` mapped over a batch's samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric

from lightning_lowrank.arguments import join_names
from lightning_lowrank.federated.data.batches import OfEachClient
from lightning_lowrank.federated.execution.compiled import tensors_in
from lightning_lowrank.federated.execution.mapped_leaks import (
    WATCHED_STEPS,
    LeftTensors,
    MappedTensors,
    changed_number,
    numbers_of,
)
from lightning_lowrank.federated.execution.stack import LOGGED_AGAIN, captured_logs
from lightning_lowrank.federated.execution.why_not import cause_of
from lightning_lowrank.federated.leaks import ChangedTensors
from lightning_lowrank.federated.objective import loss_of
from lightning_lowrank.internals.torch import as_rows, no_assignments_to_data, places_of, recurrent_weights_kept
from lightning_lowrank.internals.transformers import without_value_checks

Logged = dict[str, Tensor]
_COLLECTIONS = (list, tuple, set, frozenset, np.ndarray)


class CannotSplit(MisconfigurationException, AttributeError):
    """Raised if a training step reads an entry of the batch that is not split into samples."""


class _OfSamples(OfEachClient):
    """A collection in a batch that holds no tensors. It is not split into samples, so that all use of it is refused."""

    def _error(self) -> Exception:
        return CannotSplit(
            f"DifferentialPrivacy splits the tensors of a batch into samples, and training_step reads {self.name} of"
            f" type {type(self.values[0]).__name__}, which holds no tensors: have the collate function make a tensor"
            " of it, or keep what is the same for all samples in the module."
        )


def _only_tensors(entry: Any, name: str = "batch") -> Any:
    """A batch whose collections without tensors are replaced by placeholders."""
    if type(entry) is dict:
        return {key: _only_tensors(value, f"{name}[{key!r}]") for key, value in entry.items()}
    if not isinstance(entry, _COLLECTIONS):
        return apply_to_collection(entry, _COLLECTIONS, _only_tensors, name)
    if isinstance(entry, np.ndarray) and not entry.ndim:
        return entry
    if not tensors_in(entry):
        return _OfSamples(name, [entry])
    parts = [_only_tensors(value, f"{name}[{place}]") for place, value in enumerate(entry)]
    return type(entry)(*parts) if hasattr(entry, "_fields") else type(entry)(parts)


class _Step(nn.Module):
    """A training step as the ``forward`` of a module, so that it can be called with other parameters."""

    def __init__(self, module: pl.LightningModule, step: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.step = step

    def forward(self, *arguments: Any) -> Any:
        return self.step(*arguments)


_WEIGHTED = [getattr(F, name) for name in ("cross_entropy", "nll_loss", "linear_cross_entropy") if hasattr(F, name)]


class _NoClassWeights(TorchFunctionMode):
    """Refuses a mean over one target with class weights, which divides by the weight of the target's class."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        keywords = keywords or {}
        if function in _WEIGHTED:
            given = inspect.signature(function).bind(*arguments, **keywords).arguments
            weight, target, reduction = given.get("weight"), given["target"], given.get("reduction", "mean")
            one = target.numel() == 1 and not target.is_floating_point()
            if weight is not None and reduction == "mean" and one and bool((weight != weight[0]).any()):
                raise MisconfigurationException(
                    f"DifferentialPrivacy calls training_step for single samples, and {function.__name__}(weight=...,"
                    " reduction='mean') divides a sample's loss by the weight of its class, which then has no effect:"
                    " use reduction='none', and the loss's .mean()."
                )
        return function(*arguments, **keywords)


class SampleGradients:
    """Computes sums of clipped per-sample gradients.

    ``training_step`` is called with batches of one sample, mapped by `torch.func.vmap`. A step that cannot be mapped is
    made for one sample after another, with the same result, and a warning.

    Args:
        module: The module.
        step: Its training step.
        at_once: Largest number of samples that are mapped at once; ``None``: all of a batch.
        further: Returns further tensors by name that the step may not change.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        step: Callable[..., Any],
        at_once: int | None = None,
        further: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        self._module = module
        self._call = _Step(module, step)
        self._at_once = at_once
        self._further = further
        self._mapped, self._warned = True, False
        self._mapped_steps = 0
        self._watched = False
        self._mapped_tensors = MappedTensors(module)
        self._left = LeftTensors(module, _refuse_reading)

    def clipped(
        self, names: Iterable[str], batch: Any, size: int, clip: float, arguments: Sequence[Any] = ()
    ) -> tuple[Tensor, dict[str, Tensor], Logged, dict[str, dict[str, Any]]]:
        """The batch's mean loss, sums of clipped gradients, means of logged values, and the settings of these logs.

        Norms and sums have the gradients' precision, but at least float32.

        Args:
            names: Names of the parameters that are trained.
            batch: The batch.
            size: Number of its samples, the first dimension of all its tensors.
            clip: Largest norm of a sample's gradient, over all these parameters.
            arguments: Further arguments of the training step.

        Raises:
            MisconfigurationException: If the batch holds a tensor of something else than its samples, or the step
                reads a collection in it that holds no tensors, changes a buffer or a metric, gives no loss or a mean
                weighted by class, logs anything but means, or is called several times and changes a parameter.
        """
        tensors = tensors_in(batch)
        wrong = [tuple(tensor.shape) for tensor in tensors if not tensor.ndim or len(tensor) != size]
        if wrong or not tensors:
            raise MisconfigurationException(
                f"DifferentialPrivacy splits a batch into its {size} samples, which must be the first dimension of"
                f" every tensor in it; got {f'one of shape {wrong[0]}' if wrong else type(batch).__name__}: have the"
                " collate function stack samples in a first dimension."
            )
        batch = _only_tensors(batch)
        all_parameters = dict(self._module.named_parameters())
        parameters = {name: all_parameters[name].detach() for name in names}
        # In 16 bits, rounding would move a sum by more than one sample's clipped gradient.
        sums = {name: torch.zeros_like(value, dtype=_precise(value)) for name, value in parameters.items()}
        settings: dict[str, dict[str, Any]] = {}
        losses: list[Tensor] = []
        logged: dict[str, list[Tensor]] = {}
        guarded, updates = self._guarded(), self._updates()
        tensors_before = ChangedTensors(guarded, guarded)
        starts = range(0, size, self._at_once or size)
        before = self._values() if len(starts) > 1 else None
        for start in starts:
            part = [tensor[start : start + (self._at_once or size)] for tensor in tensors]
            with recurrent_weights_kept(self._module):
                gradients, of_each, values = self._gradients(parameters, batch, part, arguments, settings)
            rows_of = {name: as_rows(value) for name, value in gradients.items()}
            widest = max((each.dtype for each in sums.values()), key=lambda dtype: dtype.itemsize)
            each_norm = [torch.linalg.vector_norm(rows, dim=1, dtype=widest) for rows in rows_of.values()]
            norms = torch.stack(each_norm).norm(dim=0)
            # Samples with a non-finite gradient count as zero.
            finite = norms.isfinite()
            scale = torch.where(finite, (clip / (norms + 1e-6)).clamp(max=1.0), 0.0)
            for name, rows in rows_of.items():
                if not bool(finite.all()):
                    rows = torch.where(finite.unsqueeze(1), rows, 0.0)
                precise = sums[name].dtype
                sums[name] += (scale.to(precise) @ rows.to(precise)).view_as(sums[name])
            losses.append(of_each)
            for name, each in values.items():
                logged.setdefault(name, []).append(each)
        self._refuse_changes(tensors_before, updates)
        if before is not None:
            self._refuse_further_calls(before)
        for name, given in settings.items():
            if given.get("reduce_fx", "mean") not in ("mean", "avg", torch.mean) or LOGGED_AGAIN in name:
                again = "twice" if LOGGED_AGAIN in name else f"with reduce_fx={given['reduce_fx']!r}"
                raise MisconfigurationException(
                    f"DifferentialPrivacy: training_step logs {name.rstrip(LOGGED_AGAIN)!r} {again}, but a value is"
                    " logged once per batch, as the mean over the samples: log it so."
                )
        means = {name: torch.cat(each).float().mean(0) for name, each in logged.items()}
        return torch.cat(losses).mean(), sums, means, settings

    def _gradients(
        self,
        parameters: Mapping[str, Tensor],
        batch: Any,
        tensors: Sequence[Tensor],
        arguments: Sequence[Any],
        settings: dict[str, dict[str, Any]],
    ) -> tuple[dict[str, Tensor], Tensor, Logged]:
        live = self._module.named_parameters()
        trained: dict[Tensor, str] = {tensor: name for name, tensor in live if name in parameters}
        places = places_of(self._call, trained)

        def of_one(values: dict[str, Tensor], sample: list[Tensor]) -> tuple[Tensor, tuple[Tensor, Logged]]:
            given = iter(sample)
            one = apply_to_collection(batch, Tensor, lambda _: next(given).unsqueeze(0))
            named = {place: values[name] for place, name in places.items()}
            # A mode makes small steps several times as slow.
            watch = nullcontext() if self._watched else _NoClassWeights()
            with without_value_checks(), captured_logs(self._module, settings, _refuse_metric) as logged, watch:
                loss = loss_of(functional_call(self._call, named, (one, *arguments), tie_weights=False))
            self._watched = True
            if not isinstance(loss, Tensor):
                raise MisconfigurationException(
                    f"DifferentialPrivacy: training_step gave {loss!r} in place of a loss, and a step cannot be"
                    " skipped: its noise would be missing."
                )
            return loss.sum(), (loss.sum().detach(), dict(logged))

        if self._mapped:
            try:
                with no_assignments_to_data():
                    gradients, (losses, logged) = vmap(
                        grad(of_one, has_aux=True), in_dims=(None, 0), randomness="different"
                    )(dict(parameters), list(tensors))
                self._hide_left()
                return gradients, losses, logged
            except MisconfigurationException:
                self._mapped_tensors.remove()
                raise
            except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
                self._mapped_tensors.remove()
                self._hide_left()
                self._mapped = False
                rank_zero_warn(
                    f"DifferentialPrivacy: training_step cannot be mapped over samples: {cause_of(error)}. It is called"
                    " for one sample after another, which takes longer."
                )

        before, moved = self._values(), set[str]()

        def each(sample: list[Tensor]) -> tuple[dict[str, Tensor], tuple[Tensor, Logged]]:
            # By plain autograd, which supports inputs that torch.func.grad does not, such as packed sequences.
            with torch.enable_grad():
                values = {name: value.detach().requires_grad_() for name, value in parameters.items()}
                loss, logged_values = of_one(values, sample)
                found = torch.autograd.grad(loss, list(values.values()), materialize_grads=True)
                gradients = [each.to_dense() for each in found]
            # An assignment to a parameter's data reaches the copy alone.
            elsewhere = (name for name, value in values.items() if value.data_ptr() != parameters[name].data_ptr())
            # nn.LSTM.flatten_parameters() puts equal numbers into other memory.
            moved.update(name for name in elsewhere if not torch.equal(values[name], parameters[name]))
            return dict(zip(values, gradients, strict=True)), logged_values

        found = [each([tensor[row] for tensor in tensors]) for row in range(len(tensors[0]))]
        if moved or len(found) > 1:
            self._refuse_further_calls(before, sorted(moved))
        stacked = {name: torch.stack([of_sample[name] for of_sample, _ in found]) for name in parameters}
        names = found[0][1][1]
        logged = {name: torch.stack([values[name] for _, (_, values) in found if name in values]) for name in names}
        return stacked, torch.stack([loss for _, (loss, _) in found]), logged

    def _hide_left(self) -> None:
        """Replace the tensors that a mapped step has left in the module; they have no values outside of it."""
        if self._mapped_steps < WATCHED_STEPS:
            self._mapped_steps += 1
            self.look_again()
        else:
            self._left.replace()

    def look_again(self) -> None:
        """Replace also the tensors that a later step was the first to leave, and have the next step's loss checked."""
        self._left.find_and_replace()
        self._watched = False

    def _values(self) -> tuple[ChangedTensors, dict[str, Any]]:
        """The parameters, and the numbers in attributes until the user was warned of one that changes."""
        parameters = dict(self._module.named_parameters())
        return ChangedTensors(parameters, parameters), {} if self._warned else numbers_of(self._module)

    def _refuse_further_calls(self, before: tuple[ChangedTensors, dict[str, Any]], further: Sequence[str] = ()) -> None:
        """Refuse changed parameters, and warn of a changed number, if a batch takes several calls of the step."""
        parameters, numbers = before
        changed = [*parameters.changed(), *further]
        several = (
            "DifferentialPrivacy calls training_step several times for a batch, for single samples or for"
            " physical_batch_size of them"
        )
        if changed:
            raise MisconfigurationException(
                f"{several}, and it changes {join_names(changed)} each time: change parameters after the step, as in"
                " on_before_zero_grad() or, for a moving average, on_train_batch_end()."
            )
        if numbers and (name := changed_number(numbers, numbers_of(self._module))):
            self._warned = True
            rank_zero_warn(f"{several}, and it changes the number {name} each time.")

    def _guarded(self) -> dict[str, Tensor]:
        return {**dict(self._module.named_buffers()), **self._further()}

    def _updates(self) -> dict[str, int]:
        return {name: part.update_count for name, part in self._module.named_modules() if isinstance(part, Metric)}

    def _refuse_changes(self, tensors: ChangedTensors, updates: Mapping[str, int]) -> None:
        # A tensor that was assigned inside vmap has no values outside of it.
        changed = tensors.changed(self._guarded())
        changed += [name for name, count in self._updates().items() if count != updates.get(name, count)]
        if changed:
            self._mapped_tensors.remove()
            raise MisconfigurationException(
                f"DifferentialPrivacy clips gradients, and training_step also changes {join_names(changed)}, which uses"
                " values of samples without clipping: leave such buffers and metrics out of the training step."
            )


def _refuse_reading(name: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"DifferentialPrivacy maps training_step over the samples of a batch, and {name}, which it sets, is read after"
        " it, where it has no value: log the value in the step by self.log(), or do not read it."
    )


def _precise(value: Tensor) -> torch.dtype:
    return torch.promote_types(value.dtype, torch.float32)


def _refuse_metric(name: str, metric: Metric) -> MisconfigurationException:
    return MisconfigurationException(
        f"DifferentialPrivacy: training_step logs the metric {type(metric).__name__} as {name!r}, whose state holds"
        " several samples; log its value."
    )


class _WithGradients(torch.autograd.Function):
    """A function whose backward pass returns given gradients."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Any, ...]:
        return None, None, *(factor.to(gradient.dtype) * gradient for gradient in ctx.gradients)


def with_gradients(loss: Tensor, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Tensor:
    """A loss of the same value whose ``backward()`` gives the parameters these gradients.

    Example:
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> with_gradients(torch.tensor(3.0), {"w": weight}, {"w": torch.tensor([1.0, 2.0])}).backward()
        >>> weight.grad
        tensor([1., 2.])
    """
    return _WithGradients.apply(loss, [gradients[name] for name in parameters], *parameters.values())
