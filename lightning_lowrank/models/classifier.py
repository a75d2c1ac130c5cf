"""A LightningModule for image classification, without federated code."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI, LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from lightning_lowrank.buffers import names_that_match
from lightning_lowrank.configuration import check_integer, check_number
from lightning_lowrank.models.networks import Network


class Classifier(LightningModule):
    """Trains a network to classify, with cross-entropy.

    A batch is ``(inputs, targets)`` with class indices as targets. ``predict`` also takes inputs alone. Logged once per
    epoch: ``train_loss``; ``val_loss`` and ``val_acc``; ``test_loss`` and ``test_acc``. Accuracies are the share of
    samples classified correctly.

    Checkpoints hold ``num_classes`` and ``label_smoothing`` as hyperparameters, but not the network or the optimizer:
    ``Classifier.load_from_checkpoint(path, network=...)``.

    Args:
        network: Maps inputs ``(batch, ...)`` to logits ``(batch, num_classes)``.
        num_classes: Number of classes. Default: the network's ``num_classes`` or ``out_features`` attribute,
            or else the outputs of its last ``nn.Linear``.
        optimizer: Makes the optimizer from the parameters that require a gradient. Default: SGD with a learning rate of
            0.1, without momentum and weight decay. The default is a lambda; a strategy that pickles the module
            (``ddp_spawn``) needs ``functools.partial(torch.optim.SGD, lr=0.1)``.
        scheduler: Makes the learning-rate scheduler from the optimizer; it steps once per epoch. Default: none.
        label_smoothing: Share of the training targets' weight that is spread over all classes, 0 to 1. The
            validation and test losses are not smoothed.
        no_weight_decay: Patterns of parameters without weight decay in the optimizer, matched against names and any run
            of a name's parts: ``["factors"]`` if `LowRank` decays their product.

    Raises:
        MisconfigurationException: If the number of classes is neither given nor found, or an argument is out of range.

    Example:
        >>> import torch
        >>> from functools import partial
        >>> from lightning_lowrank.models import MLP
        >>> model = Classifier(MLP(64, hidden=(32,)), optimizer=partial(torch.optim.SGD, lr=0.03))
        >>> model.num_classes, model.configure_optimizers().defaults["lr"]
        (10, 0.03)
        >>> model(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        network: Network | nn.Module,
        num_classes: int | None = None,
        optimizer: OptimizerCallable = lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        scheduler: LRSchedulerCallable | None = None,
        label_smoothing: float = 0.0,
        no_weight_decay: Sequence[str] = (),
    ) -> None:
        super().__init__()
        check_number("label_smoothing", label_smoothing, least=0, most=1)
        if num_classes is None:
            num_classes = _find_num_classes(network)
        check_integer("num_classes", num_classes, least=2, hint="the number of the network's logits")
        self.save_hyperparameters(ignore=["network", "optimizer", "scheduler", "no_weight_decay"])
        self.network = network
        self.num_classes = num_classes
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.label_smoothing = label_smoothing
        self.no_weight_decay = tuple(no_weight_decay)
        # No validation of arguments: cross-entropy has already refused targets out of range.
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro", validate_args=False)
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro", validate_args=False)
        example_input_shape: tuple[int, ...] | None = getattr(network, "example_input_shape", None)
        if example_input_shape is not None:
            self.example_input_array = torch.zeros(1, *example_input_shape)

    @property
    def example_input_array(self) -> Any:
        """Zeros of the network's input shape, in the module's type: Lightning's summary does not convert them."""
        example = super().example_input_array
        return example.to(self.dtype) if isinstance(example, Tensor) and example.is_floating_point() else example

    @example_input_array.setter
    def example_input_array(self, example: Any) -> None:
        LightningModule.example_input_array.fset(self, example)  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor) -> Tensor:
        """The network's logits, ``(batch, num_classes)``."""
        return self.network(inputs)

    def inputs_of(self, batch: Any) -> Any:
        """The network's inputs of a batch with or without targets."""
        return batch if isinstance(batch, Tensor) else batch[0]

    def split_batch(self, batch: Any) -> tuple[Any, Tensor]:
        """The network's inputs and the class indices of a batch."""
        inputs, targets = batch
        return inputs, targets

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return and log the batch's mean cross-entropy, smoothed by ``label_smoothing``."""
        inputs, targets = self.split_batch(batch)
        loss = self._loss(self(inputs), targets, self.label_smoothing)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=targets.shape[0])
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log ``val_loss`` and ``val_acc``."""
        self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log ``test_loss`` and ``test_acc``."""
        self._evaluate("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Return ``probabilities``, ``(batch, num_classes)``, and the likeliest ``classes``, ``(batch,)``."""
        probabilities = self(self.inputs_of(batch)).softmax(dim=1)
        return {"probabilities": probabilities, "classes": probabilities.argmax(dim=1)}

    def configure_optimizers(self) -> Any:
        """Make the optimizer, from the parameters that require a gradient, and the scheduler."""
        trained = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        left_alone = names_that_match(self, "no_weight_decay", self.no_weight_decay, trained, "trained parameter")
        decayed = [parameter for name, parameter in trained.items() if name not in left_alone]
        groups = [{"params": [trained[name] for name in left_alone], "weight_decay": 0.0}]
        optimizer = self.optimizer([{"params": decayed}, *groups] if left_alone else decayed)
        scheduler = None if self.scheduler is None else self.scheduler(optimizer)
        return LightningCLI.configure_optimizers(self, optimizer, scheduler)

    def _evaluate(self, stage: str, batch: Any) -> None:
        inputs, targets = self.split_batch(batch)
        outputs = self(inputs)
        self.log(f"{stage}_loss", self._loss(outputs, targets), batch_size=len(targets), prog_bar=True)
        for name, metric in self._metrics(stage).items():
            metric.update(self._predictions(outputs), targets)
            self.log(f"{stage}_{name}", metric, batch_size=len(targets), prog_bar=True)

    def _loss(self, outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        return F.cross_entropy(outputs, targets, label_smoothing=label_smoothing)

    def _predictions(self, outputs: Tensor) -> Tensor:
        """The metrics' predictions: logits, because a metric in the accuracy's place may need more than the class."""
        return outputs

    def _metrics(self, stage: str) -> dict[str, Metric]:
        return {"acc": getattr(self, f"{stage}_accuracy")}


def _find_num_classes(network: nn.Module) -> int:
    for name in ("num_classes", "out_features"):
        value = getattr(network, name, None)
        if isinstance(value, int):
            return value
    linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise MisconfigurationException(
            f"num_classes is not given, and {type(network).__name__} has neither a num_classes or "
            "out_features attribute nor an nn.Linear to take it from: pass the number of its logits"
        )
    return linear[-1].out_features
