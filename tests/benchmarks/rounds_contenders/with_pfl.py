"""Apple's pfl-research, simulated in one process."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from tests.benchmarks.contending import Rounds, contend
from tests.benchmarks.rounds_contenders.experiment import Setting


class TimedModule(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, images: Tensor, classes: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(images), classes)

    def metrics(self, images: Tensor, classes: Tensor) -> dict[str, Any]:
        from pfl.metrics import Weighted

        return {"loss": Weighted(self.loss(images, classes).item(), 1)}


def run(setting: Setting, rounds: Rounds) -> dict[str, Any]:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Report(TrainingProcessCallback):
        def on_train_begin(self, *, model: Any) -> Metrics:
            rounds.begin()
            return Metrics()

        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
            rounds.end()
            return False, Metrics()

    images, classes = setting.mnist(train=True)
    users = {client: [images[indices], classes[indices]] for client, indices in enumerate(setting.client_indices())}
    drawn = chain.from_iterable(setting.cohorts())
    data = FederatedDataset.from_slices(users, lambda: next(drawn))
    network = TimedModule(setting.module()["net"])
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=setting.rounds,
            evaluation_frequency=setting.rounds,
            train_cohort_size=setting.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(
            local_batch_size=setting.batch_size, local_num_epochs=1, local_learning_rate=setting.learning_rate
        ),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[Report()],
    )
    return {"accuracy": setting.accuracy(network.net)}


if __name__ == "__main__":
    contend(Setting, run)
