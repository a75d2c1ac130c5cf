"""Evaluation of models other than the global one: clients' personal models, and the variants of a method.

`FurtherModels` runs a `ClientEvaluation` each time validation or a test ends, with the state that the algorithm gives
each client as its own, and logs `figures` over clients of the values that the module's own ``validation_step`` or
``test_step`` logged.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, Literal, cast

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, MetricTracker

from lightning_lowrank.federated.algorithm import CompletesModels, detached
from lightning_lowrank.federated.data.batches import BatchReader, Request
from lightning_lowrank.federated.data.device import DeviceData
from lightning_lowrank.federated.data.evaluation_samples import matched_labels
from lightning_lowrank.federated.data.labels import find_named_labels, renumber_like
from lightning_lowrank.federated.data.loader_checks import check_loader
from lightning_lowrank.federated.data.training_set import RoundData
from lightning_lowrank.federated.exchange import Exchange
from lightning_lowrank.federated.execution.processes import ClientParallelStrategy
from lightning_lowrank.federated.logbook import Logbook
from lightning_lowrank.federated.protocols import Personal, UnequalClients
from lightning_lowrank.federated.randomness import StepRandomness, step_seed
from lightning_lowrank.federated.run_files import write_client_table
from lightning_lowrank.federated.state import changed_names, copy_into, trained_tensors
from lightning_lowrank.internals.lightning import HOOK, batch_transfer, log_figures, overrides
from lightning_lowrank.layers import low_rank_layers, unmerge
from lightning_lowrank.metric_direction import direction, monitors_of
from lightning_lowrank.seeding import derive_seed, generator

NOT_JUDGED = (
    "clients' own models and models of further sizes are not evaluated, only the module's own weights. The fit logs"
    " their figures."
)
NO_VALIDATION = (
    "evaluates clients' own models if a validation is due at a round's end, but this fit has no such validation. Have a"
    " validation loader and a validation_step, limit_val_batches above 0, check_val_every_n_epoch up to max_epochs, and"
    " a val_check_interval that divides a round's clients. trainer.test() after the fit evaluates them as well."
)
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_WORST_OF = 10


def validates_rounds(trainer: pl.Trainer) -> bool:
    """Whether a fit will validate at the end of a round, judged by the trainer's settings."""
    every, last = trainer.check_val_every_n_epoch or 1, trainer.max_epochs
    return trainer.enable_validation and (last in (None, -1) or last >= every)


def skipped_hook_notes(module: pl.LightningModule) -> list[str]:
    """Sentences on the module's hooks that do not run for each client's own model."""
    kind = type(module).__name__
    return [
        f"{kind}.on_{stage}_end() runs once a {stage}, not for each of the models of single clients and of further"
        f" sizes, and neither does on_{stage}_start(). State that these hooks reset would pass from one model to the"
        f" next: reset it in on_{stage}_epoch_start(), which runs for each."
        for stage in ("validation", "test")
        if overrides(module, f"on_{stage}_end")
    ]


def figures(
    values: Mapping[int, float], name: str, higher_is_better: bool | None, model: str = "personal"
) -> dict[str, float]:
    """Statistics over clients: the mean, the mean of the worst tenth, and the sample standard deviation (n − 1).

    A single client has no deviation. Each client has the same weight, whatever its number of samples. The worst tenth
    is rounded down to at least one client, and left out if it is not known whether ``higher_is_better``. A value
    that is not a number is worse than any number. ``model`` says whose figures they are.

    Example:
        >>> figures({0: 0.5, 3: 1.0, 4: 0.75}, "val_acc", higher_is_better=True)
        {'personal/val_acc': 0.75, 'personal/val_acc_worst10': 0.5, 'personal/val_acc_std': 0.25}
    """
    numbers = np.fromiter(values.values(), np.float64, len(values))
    with np.errstate(invalid="ignore"):
        found = {f"{model}/{name}": float(numbers.mean())}
        if higher_is_better is not None:
            # NumPy sorts NaN last, so NaN counts among the worst for either sign.
            sign = -1 if higher_is_better else 1
            worst = sign * np.sort(sign * numbers)[-max(1, len(numbers) // _WORST_OF) :]
            found[f"{model}/{name}_worst10"] = float(worst.mean())
        return found if len(numbers) < 2 else {**found, f"{model}/{name}_std": float(numbers.std(ddof=1))}


class ClientEvaluation:
    """Runs a module's validation or test on each client's samples with the client's own model.

    A client's values are those that Lightning would log in an epoch over its samples. The module's hooks from
    ``on_validation_epoch_start`` to ``on_validation_epoch_end`` run for each client; hooks of callbacks do not.
    ``on_validation_start``, which may empty a list, runs for each client too, unless the module has
    ``on_validation_end``: the two may be a pair that exchanges weights. Logged values are reduced as Lightning reduces
    them, and returned instead of logged. All draws of the loader's dataset and of the step are a function of (seed,
    client, batch), the same in every run.

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
        """Ids of the clients that have test samples, ascending."""
        self.higher_is_better: dict[str, bool] = {}
        """Whether higher is better, as the last run's logged metric objects state it, by logged name."""
        self._requests: list[Request] = []
        self._reader = BatchReader(plain, lambda: self._requests, device_data=device_data)

    @property
    def samples(self) -> dict[int, int]:
        """Number of test samples of each client in `clients`."""
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
        """Evaluate every client that has test samples; restore the module and all generators.

        The trainer's ``limit_val_batches`` or ``limit_test_batches`` counts for each client: that many batches, or
        that share of its batches and at least one.

        Args:
            trainer: The trainer, in the stage.
            module: Its module. Values of trained parameters and persistent buffers, training modes, metrics and
                their trackers, and attributes that are numbers, strings or lists, dictionaries and sets of these are
                restored, also if the step raises.
            stage: Whether ``validation_step`` or ``test_step`` runs.
            states: Gives a client's own values by name, asked in ascending order of the clients. A missing name keeps
                the module's value. The same mapping object as for the previous client is not copied again.
            clients: Those of `clients` to evaluate; all by default.
            complete: Called with a client, and the module's own values, once the client's are in the module.

        Returns:
            For each name that was logged, the value of each client by its number: the mean over the client's batches,
            weighted by their sizes (or another ``reduce_fx``), and the results of metric objects on the client's
            samples alone. A `torchmetrics.MetricTracker` tracks this evaluation only. Values logged with
            ``on_epoch=False`` are left out.

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
            with _worked_on_copies(module) as (metrics, trackers), ExitStack() as contexts:
                step.hook("model_eval")
                log = Logbook(trainer)
                contexts.enter_context(log.installed())
                batches = self._read(counts)
                for client, count in counts.items():
                    state = states(client)
                    if state is not installed:
                        copy_into(live, {name: state.get(name, value) for name, value in kept.items()})
                        installed = state
                        if complete is not None:
                            complete(client, kept)
                    for metric in metrics:
                        metric.reset()
                    log.begin_model()
                    seed = derive_seed(self.seed, "evaluation step", client)
                    if step.starts_clients:
                        step.hook("start")
                    step.hook("epoch_start")
                    for tracker in trackers:
                        _keep_last_step(tracker)
                    for number in range(count):
                        batch = next(batches)
                        randomness.seed(step_seed(seed, number))
                        batch = step.transfer(batch)
                        log.begin_step(batch)
                        step(batch, number)
                    log.begin_step(None)
                    step.hook("epoch_end")
                    for name, (reached, higher) in log.end_model().items():
                        results.setdefault(name, {})[client] = reached
                        if higher is not None:
                            self.higher_is_better[name] = higher
        finally:
            copy_into(live, kept)
            for layer in merged:
                layer.merge()
            randomness.release()
        return results

    def _count_batches(self, limit: int | float) -> dict[int, int]:
        """The number of batches of each client."""
        counts = {}
        for client, samples in self._indices.items():
            count = -(-len(samples) // self._batch_size)
            counts[client] = min(count, limit) if isinstance(limit, int) else max(1, int(count * limit))
        return counts if limit else {}

    def _batch_of(self, client: int, number: int) -> np.ndarray:
        return self._indices[client][number * self._batch_size : (number + 1) * self._batch_size]

    def release(self) -> None:
        """Stop persistent workers, as does `BatchReader.release`."""
        self._reader.release()

    def _read(self, counts: Mapping[int, int]) -> Iterator[Any]:
        """Read all clients' batches, client after client."""
        self._requests.clear()
        for client, count in counts.items():
            seed = derive_seed(self.seed, "evaluation data", client)
            self._requests.extend(
                Request(self._batch_of(client, number), step_seed(seed, number)) for number in range(count)
            )
        return self._reader.read()


class _Step:
    """The evaluation step and hooks of a module, called as in Lightning's evaluation loop."""

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
        self._module, self._kind = module, kind
        # Writing to __dict__ is faster than nn.Module.__setattr__.
        self._attributes = vars(module)
        self.starts_clients = overrides(module, f"on_{kind}_start") and not overrides(module, f"on_{kind}_end")
        self._run = getattr(trainer.strategy, name)
        self.transfer = batch_transfer(trainer)

    def __call__(self, batch: Any, number: int) -> None:
        indices = (number, 0) if self._takes_loader else (number,) if self._takes_index else ()
        self.hook("batch_start", batch, number)
        self._attributes[HOOK] = f"{self._kind}_step"
        output = self._run(batch, *indices)
        self.hook("batch_end", output, batch, number)

    def hook(self, moment: str, *arguments: Any) -> None:
        name = f"on_{self._kind}_{moment}"
        self._attributes[HOOK] = name
        getattr(self._module, name)(*arguments)


@contextmanager
def _worked_on_copies(
    module: pl.LightningModule,
) -> Iterator[tuple[list[Metric | MetricCollection], list[MetricTracker]]]:
    """A context with copies of a module's buffers and metrics; restores the originals.

    The metric objects stay the same, because a module may refer to them in other ways than by its attributes, and
    because a metric's ``clone()`` fails if its state has a gradient.

    Yields:
        The module's metrics and metric collections, and its trackers of metrics.
    """
    metrics = [part for part in module.modules() if isinstance(part, (Metric, MetricCollection))]
    trackers = [part for part in module.modules() if isinstance(part, MetricTracker)]
    modes = [(part, part.training) for part in module.modules()]
    changing: list[nn.Module] = [module, *metrics, *trackers]
    originals = [(part, dict(vars(part))) for part in changing]
    copies: dict[int, Any] = {id(value): value for value in chain(module.parameters(), module.buffers())}
    try:
        for part, attributes in originals:
            for name, value in attributes.items():
                vars(part)[name] = _copy(value, copies, with_tensors=part is not module)
        yield metrics, trackers
    finally:
        for part, attributes in originals:
            vars(part).clear()
            vars(part).update(attributes)
        for part, training in modes:
            part.training = training


def _keep_last_step(tracker: MetricTracker) -> None:
    """Remove all steps of a tracker but the last; its first entry is the metric of which each step is a copy."""
    steps = len(tracker) - 1
    if steps > 1:
        # Slices of a ModuleList rename the first entry, by whose name the tracker finds it.
        setattr(tracker, "1", tracker[steps])
        for step in range(2, steps + 1):
            delattr(tracker, str(step))


def _copy(value: Any, copies: dict[int, Any], with_tensors: bool) -> Any:
    """A copy of a container or, ``with_tensors``, of a tensor, made once for each; any other value itself."""
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


class FurtherModels:
    """Evaluates clients' personal models (``FederatedLoop(personal_test=...)``) and `UnequalClients.variants`.

    A server that has no training set evaluates no client's own model.
    """

    def __init__(self, data: RoundData | None, exchange: Exchange) -> None:
        self._data = data
        self._exchange = exchange
        self._settings = exchange.settings
        self._evaluations: dict[str, tuple[Any, ClientEvaluation]] = {}
        self._of_no_direction: set[str] = set()
        self.judged = False
        """Whether clients' own models have been evaluated."""

    def check(self, trainer: pl.Trainer) -> None:
        """Refuse a validation loader, if one is loaded already, that the evaluation of further models cannot read.

        Raises:
            MisconfigurationException: If there is one.
        """
        loader = trainer.val_dataloaders
        if loader is None or not trainer.enable_validation:
            return
        if self._settings.personal_test is not None:
            self._of_clients(loader, "validate")
            return
        try:
            check_loader(loader, training=False)
        except MisconfigurationException:
            # Many methods evaluate no variants, some only with certain settings; Lightning alone reads the loaders
            # then.
            if UnequalClients.of(self._exchange.algorithm).variants(self._exchange.server):
                raise

    def evaluate(self, trainer: Any, module: pl.LightningModule, stage: Literal["validate", "test"]) -> None:
        """Log figures of clients' personal models on the clients' test data, and of variants on all test data.

        If the module holds other weights than the last round's, nothing is logged, and a warning says so.
        """
        exchange, algorithm = self._exchange, self._exchange.algorithm
        variants = UnequalClients.of(algorithm).variants(exchange.server)
        judged = variants or self._settings.personal_test is not None
        if judged and trainer.state.fn != "fit" and not self._has_last_round(module):
            rank_zero_warn(
                f"{type(module).__name__} does not hold the weights of the last round, as after loading ckpt_path:"
                f" {NOT_JUDGED}"
            )
            return
        loader = trainer.val_dataloaders if stage == "validate" else trainer.test_dataloaders
        logged: dict[str, float] = {}
        if self._settings.personal_test is not None:
            self.judged = True
            logged.update(self._judge_clients(trainer, module, stage, loader))
        if variants:
            names, models = list(variants), list(variants.values())
            dataset: Any = check_loader(loader, training=False).dataset
            everything = [torch.arange(len(dataset))] * len(names)
            evaluation = self._evaluation(f"variants {stage}", loader, lambda: everything)
            for name, values in self._run(evaluation, trainer, module, stage, models.__getitem__)[0].items():
                logged.update({f"{name}/{names[number]}": value for number, value in values.items()})
        if logged:
            log_figures(trainer, logged)
        exchange.states.offload()

    def release(self) -> None:
        """Stop the persistent workers of all evaluations."""
        for _, evaluation in self._evaluations.values():
            evaluation.release()

    def _judge_clients(
        self, trainer: Any, module: pl.LightningModule, stage: Literal["validate", "test"], loader: Any
    ) -> dict[str, float]:
        """Figures over clients of their personal models; with ``personal_test="by_client"`` also of the global model.

        The folders of `CSVLogger`s get a table of the clients.
        """
        exchange, algorithm, server = self._exchange, self._exchange.algorithm, self._exchange.server
        evaluation, live = self._of_clients(loader, stage), trained_tensors(module)
        shown: Mapping[str, Tensor] = server.model
        own_models = False

        def personal(client: int) -> Mapping[str, Tensor]:
            nonlocal own_models
            context = exchange.context(client, live)
            given = UnequalClients.of(algorithm).model_for(server, exchange.info(client))
            model = Personal.of(algorithm).personal_model(context, given)
            own_models = own_models or model is not shown
            return model

        assert self._data is not None
        divided = self._data.divided()
        judged = {"personal": self._run(evaluation, trainer, module, stage, personal, divided.__getitem__)}
        if self._settings.personal_test == "by_client":
            # Skip the second evaluation if all personal models were the global one, in every process.
            again = own_models or isinstance(trainer.strategy, ClientParallelStrategy)
            judged["global"] = (
                self._run(evaluation, trainer, module, stage, lambda client: shown, divided.__getitem__)
                if again
                else judged["personal"]
            )
        logged: dict[str, float] = {}
        monitors = monitors_of(trainer)
        for model, (found, of_metrics) in judged.items():
            for name, values in found.items():
                higher, why = direction(name, of_metrics.get(name), monitors)
                if higher is None and name not in self._of_no_direction:
                    self._of_no_direction.add(name)
                    rank_zero_warn(
                        f"{model}/{name}_worst10 is not logged, because its worst values are unknown: {why}."
                    )
                logged.update(figures(values, name, higher, model))
        columns = {f"{model}/{name}": values for model, (found, _) in judged.items() for name, values in found.items()}
        write_client_table(trainer, stage, evaluation.samples, columns, divided.names)
        return logged

    def _has_last_round(self, module: pl.LightningModule) -> bool:
        """Whether the module holds the parameters of the last round's global model."""
        server = self._exchange.server
        if server.base.module is not module:
            return False
        live = server.base.parameters(trained_tensors(module))
        shown = server.model
        return not changed_names(live, {name: shown[name].to(value.device) for name, value in live.items()})

    def _run(
        self,
        evaluation: ClientEvaluation,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        stage: Literal["validate", "test"],
        models: Callable[[int], Mapping[str, Tensor]],
        samples: Callable[[int], Tensor] | None = None,
    ) -> tuple[dict[str, dict[int, float]], dict[str, bool]]:
        """Run an evaluation; several processes share its clients.

        Returns:
            For each name that was logged, the value of each client; and for metric objects whether higher is better.
        """
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        completing = next((each for each in callbacks if isinstance(each, CompletesModels)), None)

        def complete(client: int, shown: Mapping[str, Tensor]) -> None:
            if completing is not None:
                completing.complete(trainer, module, shown, None if samples is None else samples(client))

        processes = trainer.strategy
        if not isinstance(processes, ClientParallelStrategy):
            return evaluation.run(trainer, module, stage, models, complete=complete), evaluation.higher_is_better
        share = set(evaluation.clients[processes.global_rank :: processes.world_size])
        found = evaluation.run(trainer, module, stage, models, share, complete)
        gathered = processes.gather((found, evaluation.higher_is_better))
        parts = [part for part, _ in gathered]
        names = {name: None for part in parts for name in part}
        values = {name: dict(sorted(entry for part in parts for entry in part.get(name, {}).items())) for name in names}
        return values, {name: higher for _, of_metrics in gathered for name, higher in of_metrics.items()}

    def _evaluation(self, name: str, loader: Any, indices: Callable[[], list[Tensor]]) -> ClientEvaluation:
        """The cached evaluation of this loader, created if needed."""
        if name not in self._evaluations or self._evaluations[name][0] is not loader:
            if name in self._evaluations:
                self._evaluations[name][1].release()
            seed = self._exchange.server.seed
            kept = None if self._data is None else self._data.device_data
            self._evaluations[name] = loader, ClientEvaluation(loader, indices(), seed, kept)
        return self._evaluations[name][1]

    def _of_clients(self, loader: Any, stage: str) -> ClientEvaluation:
        assert self._data is not None
        source = self._data.training_loader if isinstance(self._settings.personal_test, float) else loader
        return self._evaluation(f"clients {stage}", source, lambda: self._drawn(self._test_indices(loader)))

    def _drawn(self, samples: list[Tensor]) -> list[Tensor]:
        """The test samples of ``personal_clients`` drawn clients; other clients get none."""
        having = [client for client, part in enumerate(samples) if len(part)]
        count = self._settings.personal_clients
        if count is None or count >= len(having):
            return samples
        draws = generator(self._settings.experiment_seed, "personal clients")
        kept = {having[place] for place in torch.randperm(len(having), generator=draws)[:count].tolist()}
        return [part if client in kept else part[:0] for client, part in enumerate(samples)]

    def _test_indices(self, loader: Any) -> list[Tensor]:
        assert self._data is not None
        if isinstance(self._settings.personal_test, float):
            return self._data.held_out
        assert self._data.indices is not None
        dataset: Any = check_loader(loader, training=False).dataset
        if self._settings.personal_test == "by_client":
            assert self._settings.partition is not None
            return self._settings.partition.divide_evaluation(dataset, self._data.indices)
        assert self._data.label_values is not None
        labels, names = find_named_labels(dataset, self._settings.labels)
        labels = renumber_like(labels, names, self._data.label_names)
        return matched_labels(self._data.indices, self._data.label_values, labels)
