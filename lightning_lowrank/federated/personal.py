"""What is evaluated beside the global model: each client's own model, and the method's further global models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_lowrank.direction import direction, monitors_of
from lightning_lowrank.federated.algorithm import inherits
from lightning_lowrank.federated.coordinator import Coordinator
from lightning_lowrank.federated.data.evaluation_samples import matched_labels
from lightning_lowrank.federated.data.labels import find_named_labels, numbered_alike
from lightning_lowrank.federated.data.loader import check_loader
from lightning_lowrank.federated.data.rounds import RoundData
from lightning_lowrank.federated.evaluation import ClientEvaluation, CompletesModels, figures
from lightning_lowrank.federated.execution.distributed import ClientParallelStrategy
from lightning_lowrank.federated.run_facts import write_client_table
from lightning_lowrank.federated.state import changed, trained_tensors
from lightning_lowrank.internals.lightning import log_figures, overrides
from lightning_lowrank.seeding import generator

NOT_JUDGED = (
    "the models of single clients and of further sizes are not judged, only the module's own weights. The fit logs"
    " their figures."
)
NO_VALIDATION = (
    "judges clients' own models where a validation comes at a round's end, and this fit has no such validation. Have a"
    " validation loader and a validation_step, limit_val_batches above 0, check_val_every_n_epoch up to max_epochs, and"
    " a val_check_interval that divides a round's batches. trainer.test() after the fit judges them as well."
)


def validates_rounds(trainer: pl.Trainer) -> bool:
    """Return whether a fit is set up to validate at the end of some round, as far as is known when it begins."""
    every, last = trainer.check_val_every_n_epoch or 1, trainer.max_epochs
    return trainer.enable_validation and (last in (None, -1) or last >= every)


def left_out(module: pl.LightningModule) -> list[str]:
    """Say which hooks of a module do not run for each client's own model, one sentence each."""
    kind = type(module).__name__
    return [
        f"{kind}.on_{stage}_end() runs once a {stage}, not for each of the models of single clients and of further"
        f" sizes, and neither does on_{stage}_start(). What they reset goes on from one model to the next: reset it in"
        f" on_{stage}_epoch_start(), which runs for each."
        for stage in ("validation", "test")
        if overrides(module, f"on_{stage}_end")
    ]


class FurtherModels:
    """Evaluates clients' own models (``FederatedLoop(personal_test=...)``) and `Algorithm.variants`.

    A server that has no training set evaluates no client's own model.
    """

    def __init__(self, data: RoundData | None, coordinator: Coordinator) -> None:
        self._data = data
        self._coordinator = coordinator
        self._settings = coordinator.settings
        self._evaluations: dict[str, tuple[Any, ClientEvaluation]] = {}
        self._of_no_direction: set[str] = set()
        self.judged = False
        """Whether clients' own models have been evaluated."""

    def check(self, trainer: pl.Trainer) -> None:
        """Refuse a validation loader that the first round's end could not use, if Lightning has loaded one by now.

        Raises:
            MisconfigurationException: If there is one.
        """
        loader = trainer.val_dataloaders
        if loader is None or not trainer.enable_validation:
            return
        if self._settings.personal_test is not None:
            self._of_clients(loader, "validate")
        elif not inherits(self._coordinator.algorithm, "variants"):
            check_loader(loader, training=False)

    def evaluate(self, trainer: Any, module: pl.LightningModule, stage: Literal["validate", "test"]) -> None:
        """Log how clients' own models do on their own test data, and further global models on all of it.

        Where a module was given other weights after the fit, there are no such models of these, and nothing is logged.
        """
        coordinator, algorithm = self._coordinator, self._coordinator.algorithm
        variants = algorithm.variants(coordinator.server)
        judged = variants or self._settings.personal_test is not None
        if judged and trainer.state.fn != "fit" and not self._has_last_round(module):
            rank_zero_warn(
                f"{type(module).__name__} holds other weights than the last round left, as with ckpt_path: {NOT_JUDGED}"
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
        coordinator.states.offload()

    def _judge_clients(
        self, trainer: Any, module: pl.LightningModule, stage: Literal["validate", "test"], loader: Any
    ) -> dict[str, float]:
        """Return the figures over clients of their own models, and of the global one where each has own test samples.

        The folders of `CSVLogger`s get a table of the clients.
        """
        coordinator, algorithm, server = self._coordinator, self._coordinator.algorithm, self._coordinator.server
        evaluation, live = self._of_clients(loader, stage), trained_tensors(module)
        shown = algorithm.global_model(server)
        own_models = False

        def personal(client: int) -> Mapping[str, Tensor]:
            nonlocal own_models
            context = coordinator.context(client, live)
            model = algorithm.personal_model(context, algorithm.model_for(server, coordinator.info(client)))
            own_models = own_models or model is not shown
            return model

        assert self._data is not None
        divided = self._data.divided()
        judged = {"personal": self._run(evaluation, trainer, module, stage, personal, divided.__getitem__)}
        if self._settings.personal_test == "by_client":
            # Not again where each client's own model was the global one, in any process.
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
                    rank_zero_warn(f"{model}/{name}_worst10 is not logged, for its worst values are not known: {why}.")
                logged.update(figures(values, name, higher, model))
        columns = {f"{model}/{name}": values for model, (found, _) in judged.items() for name, values in found.items()}
        write_client_table(trainer, stage, evaluation.samples, columns, divided.names)
        return logged

    def _has_last_round(self, module: pl.LightningModule) -> bool:
        """Return whether a module holds the parameters of the last round's global model."""
        server = self._coordinator.server
        if server.base.module is not module:
            return False
        live = server.base.parameters(trained_tensors(module))
        shown = self._coordinator.algorithm.global_model(server)
        return not changed(live, {name: shown[name].to(value.device) for name, value in live.items()})

    def _run(
        self,
        evaluation: ClientEvaluation,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        stage: Literal["validate", "test"],
        models: Callable[[int], Mapping[str, Tensor]],
        samples: Callable[[int], Tensor] | None = None,
    ) -> tuple[dict[str, dict[int, float]], dict[str, bool | None]]:
        """Run an evaluation, of which each process that takes part in rounds does a share.

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
        """Return the evaluation that was made for this loader, or make one."""
        if name not in self._evaluations or self._evaluations[name][0] is not loader:
            seed = self._coordinator.server.seed
            kept = None if self._data is None else self._data.device_data
            self._evaluations[name] = loader, ClientEvaluation(loader, indices(), seed, kept)
        return self._evaluations[name][1]

    def _of_clients(self, loader: Any, stage: str) -> ClientEvaluation:
        assert self._data is not None
        source = self._data.training_loader if isinstance(self._settings.personal_test, float) else loader
        return self._evaluation(f"clients {stage}", source, lambda: self._drawn(self._test_indices(loader)))

    def _drawn(self, samples: list[Tensor]) -> list[Tensor]:
        """Return the test samples of ``personal_clients`` clients, and none of the others."""
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
        labels = numbered_alike(labels, names, self._data.label_names)
        return matched_labels(self._data.indices, self._data.label_values, labels)
