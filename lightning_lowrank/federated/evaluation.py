"""Every client's own model on its own test data, and figures over clients.

`FederatedLoop` runs a `ClientEvaluation` each time validation or a test ends, with the state that the algorithm gives
each client as its own, and logs the `figures` of what the module's own ``validation_step`` or ``test_step`` logged.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal, cast

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_lowrank.federated.algorithm import detached
from lightning_lowrank.federated.data.device import DeviceData
from lightning_lowrank.federated.data.loader import Request, SeededBatches, batch_reader, check_loader
from lightning_lowrank.federated.randomness import StepRandomness, step_seed
from lightning_lowrank.federated.state import copy_into, trained_tensors
from lightning_lowrank.internals.lightning import batch_transfer, overrides
from lightning_lowrank.layers import low_rank_layers, unmerge
from lightning_lowrank.seeding import derive_seed

_LOG_PARAMETERS = list(inspect.signature(pl.LightningModule.log).parameters)[1:]
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_WORST_OF = 10


def figures(
    values: Mapping[int, float], name: str, higher_is_better: bool | None, model: str = "personal"
) -> dict[str, float]:
    """Summarize clients' values: the mean, the worst tenth, and the spread.

    Each client has the same weight, whatever its number of samples. The worst tenth is rounded down to at least one
    client, and left out where it is not known whether ``higher_is_better``. A value that is not a number is worse than
    any number. ``model`` says whose figures they are.

    Example:
        >>> figures({0: 0.5, 3: 1.0}, "val_acc", higher_is_better=True)
        {'personal/val_acc': 0.75, 'personal/val_acc_worst10': 0.5, 'personal/val_acc_std': 0.25}
    """
    numbers = np.fromiter(values.values(), np.float64, len(values))
    with np.errstate(invalid="ignore"):
        found = {f"{model}/{name}": float(numbers.mean())}
        if higher_is_better is not None:
            # NumPy sorts NaN last, so that it is among the worst for either sign.
            sign = -1 if higher_is_better else 1
            worst = sign * np.sort(sign * numbers)[-max(1, len(numbers) // _WORST_OF) :]
            found[f"{model}/{name}_worst10"] = float(worst.mean())
        return {**found, f"{model}/{name}_std": float(numbers.std())}


class CompletesModels:
    """Base of callbacks that complete a model, such as by its BatchNorm statistics, before it is evaluated."""

    def complete(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        shown: Mapping[str, Tensor],
        samples: Tensor | None,
    ) -> None:
        """Complete the model whose weights are in the module.

        Args:
            trainer: The trainer, in validation or test.
            module: Its module, with a client's own model, or with one of `Algorithm.variants`.
            shown: Parameters and buffers of the global model, by name.
            samples: Indices of the client's training samples; ``None`` for a variant, which is all clients'.
        """
        raise NotImplementedError


class ClientEvaluation:
    """Runs a module's own validation or test on each client's samples, with each client's own state.

    A client's values are those that Lightning would log in an epoch over its samples. The module's hooks from
    ``on_validation_epoch_start`` to ``on_validation_epoch_end`` run for each client; those of callbacks do not. So does
    ``on_validation_start``, which may empty a list, where the module has no ``on_validation_end``. With both they may
    be a pair, as for weights that are exchanged, and the one that Lightning has called is not to be called again. What
    the module logs is reduced as Lightning reduces it, and returned instead of logged. All that the loader's dataset
    and the step draw is a function of (seed, client, batch), the same in every run.

    Args:
        loader: The user's loader, whose dataset, batch size, collate function, workers and pinned memory are used, not
            its order or ``drop_last``; or a list with just one.
        indices: For each client the samples of the loader's dataset that it is tested on, in order; may be empty.
        seed: Seed of the experiment.
        device_data: Keeps samples on the device that trains; ``None``: batches are read on the host.

    Raises:
        MisconfigurationException: If there are several loaders, if the loader is not a plain
            `torch.utils.data.DataLoader` over a map-style dataset, or if no client has a test sample.

    Example:
        >>> class Distance(pl.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.place = torch.nn.Parameter(torch.zeros(()))
        ...     def validation_step(self, batch):
        ...         self.log("val_error", (batch[0] - self.place).abs().mean())
        >>> class Personal(pl.Callback):
        ...     def on_validation_end(self, trainer, pl_module):
        ...         evaluation = ClientEvaluation(trainer.val_dataloaders, [[0, 1], [2]])
        ...         print(evaluation.run(trainer, pl_module, "validate", lambda client: {"place": torch.tensor(2.0)}))
        >>> quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
        >>> samples = torch.utils.data.TensorDataset(torch.tensor([1.0, 2.0, 5.0]))
        >>> data = torch.utils.data.DataLoader(samples, batch_size=2)
        >>> _ = pl.Trainer(callbacks=Personal(), **quiet).validate(Distance(), data, verbose=False)
        {'val_error': {0: 0.5, 1: 3.0}}
    """

    def __init__(
        self,
        loader: Any,
        indices: Sequence[Tensor | Sequence[int]],
        seed: int = 0,
        device_data: DeviceData | None = None,
    ) -> None:
        plain = check_loader(loader, training=False, weighted=True)
        self.seed = seed
        self._batch_size = cast(int, plain.batch_size)
        parts = {client: np.asarray(part, np.int64) for client, part in enumerate(indices)}
        self._indices = {client: samples for client, samples in parts.items() if len(samples)}
        if not self._indices:
            raise MisconfigurationException(
                "no client has a test sample: give other labels to match, or a larger share to hold out."
            )
        self.clients = tuple(self._indices)
        """Those that have test samples, ascending."""
        self.higher_is_better: dict[str, bool | None] = {}
        """What the metric objects that the last run logged say of themselves, by the names they were logged under."""
        self._requests: list[Request] = []
        self._read_requests = batch_reader(plain, SeededBatches(plain.dataset, plain.collate_fn), self._requests)
        if device_data is not None:
            self._read_requests = device_data.reader(plain, self._requests, self._read_requests)

    @property
    def samples(self) -> dict[int, int]:
        """Number of test samples of each of `clients`."""
        return {client: len(part) for client, part in self._indices.items()}

    @torch.no_grad()
    def run(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        stage: Literal["validate", "test"],
        states: Callable[[int], Mapping[str, Tensor]],
        clients: Collection[int] | None = None,
        complete: Callable[[int, Mapping[str, Tensor]], None] | None = None,
    ) -> dict[str, dict[int, float]]:
        """Evaluate every client that has test samples, and leave the module and all generators as they were.

        The trainer's ``limit_val_batches`` or ``limit_test_batches`` counts for each client: that many batches, or
        that share of its batches and at least one.

        Args:
            trainer: The trainer, in the stage.
            module: Its module. Values of trained parameters and persistent buffers, training modes, metrics, and
                attributes that are numbers, strings or lists, dictionaries and sets of these are restored, also where
                the step raises.
            stage: Whether ``validation_step`` or ``test_step`` runs.
            states: Gives a client's own values by name, asked in ascending order of the clients. A missing name keeps
                the module's value. The same mapping object as for the previous client is not copied again.
            clients: Those of `clients` to evaluate; all by default.
            complete: Called with a client, and the module's own values, once the client's are in the module.

        Returns:
            For each name that was logged, the value of each client by its number: the mean over the client's batches,
            weighted by their sizes (or another ``reduce_fx``), and what metric objects computed on the client's
            samples alone. What is logged with ``on_epoch=False`` is left out.

        Raises:
            MisconfigurationException: If the module has no such step, or one that takes ``dataloader_iter``, or logs a
                metric that is not one of its attributes.
        """
        step = _Step(trainer, module, stage)
        live = trained_tensors(module)
        kept = detached(live)
        merged = [layer for _, layer in low_rank_layers(module) if layer.merged_weight is not None]
        limit = trainer.limit_val_batches if stage == "validate" else trainer.limit_test_batches
        counts = self._count_batches(limit)
        if clients is not None:
            counts = {client: count for client, count in counts.items() if client in clients}
        results: dict[str, dict[int, float]] = {}
        self.higher_is_better = {}
        installed: Mapping[str, Tensor] | None = None
        randomness = StepRandomness(module.device)
        randomness.open()
        unmerge(module)
        try:
            with _worked_on_copies(module) as metrics:
                step.hook("model_eval")
                log = _ClientLog(metrics)
                vars(module)["log"] = log
                batches = self._read(counts)
                for client, count in counts.items():
                    state = states(client)
                    if state is not installed:
                        copy_into(live, {name: state.get(name, value) for name, value in kept.items()})
                        installed = state
                        if complete is not None:
                            complete(client, kept)
                    log.begin()
                    seed = derive_seed(self.seed, "evaluation step", client)
                    if step.starts_clients:
                        step.hook("start")
                    step.hook("epoch_start")
                    for number in range(count):
                        batch = next(batches)
                        randomness.seed(step_seed(seed, number))
                        log.samples = self._batch_of(client, number).size
                        step(batch, number)
                    log.samples = 1
                    step.hook("epoch_end")
                    for name, reached in log.result().items():
                        results.setdefault(name, {})[client] = reached
                    self.higher_is_better |= log.higher_is_better()
        finally:
            copy_into(live, kept)
            for layer in merged:
                layer.merge()
            randomness.release()
        return results

    def _count_batches(self, limit: int | float) -> dict[int, int]:
        """Return the number of batches of each client that is evaluated."""
        counts = {}
        for client, samples in self._indices.items():
            count = -(-len(samples) // self._batch_size)
            counts[client] = min(count, limit) if isinstance(limit, int) else max(1, int(count * limit))
        return counts if limit else {}

    def _batch_of(self, client: int, number: int) -> np.ndarray:
        return self._indices[client][number * self._batch_size : (number + 1) * self._batch_size]

    def _read(self, counts: Mapping[int, int]) -> Iterator[Any]:
        """Read the batches of one client after another."""
        self._requests.clear()
        for client, count in counts.items():
            seed = derive_seed(self.seed, "evaluation data", client)
            self._requests.extend(
                Request(self._batch_of(client, number), step_seed(seed, number)) for number in range(count)
            )
        return self._read_requests()


class _Step:
    """A module's validation or test, as Lightning's evaluation loop calls it."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, stage: Literal["validate", "test"]) -> None:
        kind = {"validate": "validation", "test": "test"}[stage]
        name = f"{kind}_step"
        if not is_overridden(name, module):
            raise MisconfigurationException(
                f"{type(module).__name__} has no {name}(), which evaluates clients' own models on their own test data:"
                " define it, or leave that evaluation out."
            )
        own = getattr(module, name)
        if is_param_in_hook_signature(own, "dataloader_iter", explicit=True):
            raise MisconfigurationException(
                f"{type(module).__name__}.{name}(dataloader_iter) draws batches itself, so that it cannot be run on one"
                " client's: take (batch, batch_idx)."
            )
        self._takes_index = is_param_in_hook_signature(own, "batch_idx", min_args=2)
        self._takes_loader = is_param_in_hook_signature(own, "dataloader_idx", explicit=True)
        self._module = module
        self._kind = kind
        self.starts_clients = overrides(module, f"on_{kind}_start") and not overrides(module, f"on_{kind}_end")
        self._run = getattr(trainer.strategy, name)
        self._transfer = batch_transfer(trainer)

    def __call__(self, batch: Any, number: int) -> None:
        batch = self._transfer(batch)
        indices = (number, 0) if self._takes_loader else (number,) if self._takes_index else ()
        self.hook("batch_start", batch, number)
        output = self._run(batch, *indices)
        self.hook("batch_end", output, batch, number)

    def hook(self, moment: str, *arguments: Any) -> None:
        getattr(self._module, f"on_{self._kind}_{moment}")(*arguments)


class _ClientLog:
    """Replaces a module's ``log``: keeps what is logged on one client's samples, and reduces it as Lightning does."""

    def __init__(self, metrics: Sequence[Metric | MetricCollection]) -> None:
        self.samples = 0
        self._metrics = metrics
        self._known = {id(metric) for metric in metrics}
        self._values: dict[str, list[tuple[Tensor, int]]] = {}
        self._reductions: dict[str, str] = {}
        self._logged_metrics: dict[str, Metric] = {}

    def begin(self) -> None:
        self._values.clear()
        self._logged_metrics.clear()
        for metric in self._metrics:
            metric.reset()

    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        given = {**dict(zip(_LOG_PARAMETERS, arguments, strict=False)), **keywords}
        name, value = given["name"], given["value"]
        if given.get("on_epoch") is False:
            return
        if isinstance(value, Metric):
            if id(value) not in self._known:
                raise MisconfigurationException(
                    f"the {type(value).__name__} logged as {name!r} is not part of the module, so that it cannot be"
                    " kept apart for each client: make it an attribute of the module."
                )
            self._logged_metrics[name] = value
            return
        reduction = given.get("reduce_fx", "mean")
        reduction = reduction if isinstance(reduction, str) else reduction.__name__
        self._reductions[name] = reduction
        entry = _to_float(value), given.get("batch_size") or self.samples
        self._values.setdefault(name, []).append(entry)

    def result(self) -> dict[str, float]:
        reduced = {name: float(_reduce(values, self._reductions[name])) for name, values in self._values.items()}
        return {**reduced, **{name: float(metric.compute()) for name, metric in self._logged_metrics.items()}}

    def higher_is_better(self) -> dict[str, bool | None]:
        return {name: metric.higher_is_better for name, metric in self._logged_metrics.items()}


def _to_float(value: Any) -> Tensor:
    """Return a copy of a value in float32 or more, as Lightning keeps it."""
    default = torch.promote_types(torch.get_default_dtype(), torch.float32)
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=default)
    number = value.detach().clone()
    return number if number.dtype in (torch.float32, torch.float64) else number.to(default)


def _reduce(entries: Sequence[tuple[Tensor, int]], reduction: str) -> Tensor:
    """Reduce values and their batch sizes."""
    if reduction in ("mean", "avg"):
        # One after another, as Lightning adds them, so that the sum is equal bit for bit.
        return sum((value * size for value, size in entries), torch.zeros(())) / sum(size for _, size in entries)
    values = [value for value, _ in entries]
    if reduction == "sum":
        return sum(values, torch.zeros(()))
    if reduction in ("min", "max"):
        return getattr(torch.stack(values), reduction)()
    raise MisconfigurationException(f"reduce_fx={reduction!r} is not one of 'mean', 'sum', 'min' and 'max'.")


@contextmanager
def _worked_on_copies(module: pl.LightningModule) -> Iterator[list[Metric | MetricCollection]]:
    """Let a module and its metrics work on copies of what they keep, and restore the originals.

    The metric objects stay the same, because a module may refer to them in other ways than by its attributes, and
    because a metric's ``clone()`` fails where its state has a gradient.

    Yields:
        The module's metrics and metric collections.
    """
    metrics = [part for part in module.modules() if isinstance(part, (Metric, MetricCollection))]
    modes = [(part, part.training) for part in module.modules()]
    originals: list[tuple[nn.Module, dict[str, Any]]] = [(part, dict(vars(part))) for part in [module, *metrics]]
    copies: dict[int, Any] = {id(value): value for value in chain(module.parameters(), module.buffers())}
    try:
        for part, attributes in originals:
            for name, value in attributes.items():
                vars(part)[name] = _copy(value, copies, with_tensors=part is not module)
        yield metrics
    finally:
        for part, attributes in originals:
            vars(part).clear()
            vars(part).update(attributes)
        for part, training in modes:
            part.training = training


def _copy(value: Any, copies: dict[int, Any], with_tensors: bool) -> Any:
    """Copy containers, and tensors if wanted, once each; anything else is returned as it is."""
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, Tensor) and with_tensors:
        copies[id(value)] = result = value.detach().clone()
        return result
    if type(value) not in _CONTAINERS:
        return value
    result = copies[id(value)] = value.copy()
    if isinstance(value, dict):
        result.update({key: _copy(item, copies, with_tensors) for key, item in value.items()})
    elif isinstance(value, (list, deque)):
        for place, item in enumerate(value):
            result[place] = _copy(item, copies, with_tensors)
    return result
