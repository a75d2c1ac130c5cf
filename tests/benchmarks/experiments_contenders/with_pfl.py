"""Apple's pfl-research, simulated in one process, with its own evaluation, metrics file and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.benchmarks.contending import Rounds, contend
from tests.benchmarks.experiments_contenders.trial import ROWS_OF_EVALUATION, Trial, mlp


class Classifier(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, images: Tensor, classes: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.network(images), classes)

    @torch.no_grad()
    def metrics(self, images: Tensor, classes: Tensor) -> dict[str, Any]:
        from pfl.metrics import Weighted

        logits = self.network(images)
        loss = nn.functional.cross_entropy(logits, classes, reduction="sum")
        right = (logits.argmax(1) == classes).sum()
        return {"loss": Weighted(loss.item(), len(classes)), "accuracy": Weighted(right.item(), len(classes))}


def run(trial: Trial, rounds: Rounds) -> dict[str, Any]:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints, WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.aggregate_metrics_to_disk import AggregateMetricsToDisk
    from pfl.callback.base import TrainingProcessCallback
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.callback.checkpoint import ModelCheckpointingCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    plan, recipe = trial.plan(), trial.recipe
    images, classes = trial.images(train=True)
    accuracies: list[float] = []

    class EvaluateEveryRound(CentralEvaluationCallback):
        """Evaluates after the first round too, and not before it."""

        def on_train_begin(self, *, model: Any) -> Metrics:
            return Metrics()

        def after_central_iteration(self, metrics: Metrics, model: Any, **_: Any) -> tuple[bool, Metrics]:
            return self._eval(model)

    class Report(TrainingProcessCallback):
        def on_train_begin(self, *, model: Any) -> Metrics:
            rounds.begin()
            return Metrics()

        def after_central_iteration(self, metrics: Metrics, *_: Any, **__: Any) -> tuple[bool, Metrics]:
            accuracies.append(metrics.to_simple_dict()["Central val | accuracy"])
            rounds.end()
            return False, Metrics()

    drawn = iter([order for cohort in plan.rounds for _, (order,) in cohort])
    data = FederatedDataset(lambda order: Dataset([images[order], classes[order]]), lambda: next(drawn))
    network = mlp(plan)
    classifier = Classifier(network)
    central = torch.optim.SGD(network.parameters(), lr=1.0, momentum=recipe.momentum)
    evaluation = NNEvalHyperParams(local_batch_size=ROWS_OF_EVALUATION)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=trial.rounds,
            evaluation_frequency=trial.rounds,
            train_cohort_size=len(plan.rounds[0]),
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data, postprocessors=[WeightByUser() if recipe.uniform else WeightByDatapoints()]),
        PyTorchModel(classifier, torch.optim.SGD, central),
        NNTrainHyperParams(
            local_batch_size=recipe.batch_size, local_num_epochs=1, local_learning_rate=recipe.learning_rate
        ),
        evaluation,
        callbacks=[
            EvaluateEveryRound(Dataset(list(trial.images(train=False))), evaluation),
            AggregateMetricsToDisk(str(Path(trial.folder) / "metrics.csv")),
            ModelCheckpointingCallback(str(Path(trial.folder) / "last"), checkpoint_frequency=1),
            Report(),
        ],
    )
    return trial.finish(accuracies, list(network.state_dict().values()))


if __name__ == "__main__":
    contend(Trial, run)
