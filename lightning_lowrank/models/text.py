"""A LightningModule that fine-tunes a pretrained transformer to classify texts, or to predict a number for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torchmetrics import Metric, PearsonCorrCoef, SpearmanCorrCoef
from torchmetrics.classification import BinaryF1Score, MulticlassMatthewsCorrCoef

from lightning_lowrank.configuration import check_integer
from lightning_lowrank.data.glue import glue_task
from lightning_lowrank.models.classifier import Classifier
from lightning_lowrank.models.pretrained import head_seed, load_pretrained
from lightning_lowrank.seeding import default_seed


class TextClassifier(Classifier):
    """Trains a pretrained transformer of Hugging Face to classify texts, or pairs of texts, with cross-entropy.

    A batch is a dictionary of the model's inputs (``input_ids``, ``attention_mask``, for pairs ``token_type_ids``) and
    ``labels``, class indices, as `TextClassification` gives it. ``predict`` also takes inputs without ``labels``. The
    logged figures are those of `Classifier`: ``train_loss``; ``val_loss`` and ``val_acc``; ``test_loss`` and
    ``test_acc``. A ``task`` of GLUE adds its own metrics, each under ``val_`` and ``test_``: ``f1`` (class 1 of MRPC
    and QQP), and ``mcc`` (Matthews' correlation, CoLA).

    With ``num_labels=1`` it predicts a number for each text. Then the loss is the mean squared error, ``pearson`` and
    ``spearman`` are logged in place of ``acc``, and ``predict`` returns ``values``.

    All weights are trained. `LowRank` adds LoRA (Hu et al. 2021), here on the queries and values, with the new
    classification head trained and everything else frozen:

    .. code-block:: python

        LowRank(MatrixProduct(), rank=8, alpha=16, init="lora", include=["query", "value"],
                freeze_rest=True, keep_trained=["classifier"])

    The transformer is the attribute ``network``: ``lightning-lowrank export --prefix network.`` writes weights that its
    own class loads.

    Arguments that are not named here are those of `Classifier`.

    Args:
        model: Name of a model on the Hugging Face hub, or a local folder that holds one. Or a configuration, as a
            dictionary with ``model_type`` or transformers' own, for random weights; or the model itself, such as one
            that PEFT wrapped, which ``load_from_checkpoint`` must be given again.
        num_labels: Number of classes, or 1 to predict a number. Default: the task's, or 2.
        seed: Seed of weights that ``model`` lacks, such as the classification head. ``None``: the seed
            given to Lightning's ``seed_everything``, or 0.
        optimizer: Makes the optimizer from the parameters that require a gradient. Default: AdamW with a learning rate
            of 2e-5 and a weight decay of 0.01 (Devlin et al. 2019, who try 2e-5 to 5e-5), for training all weights;
            LoRA needs about 1e-3.
        no_weight_decay: Patterns of parameters without weight decay, such as ``["bias", "LayerNorm"]``.
        task: Name of a task of GLUE, as for `TextClassification`.
        dtype: Type of the weights: ``"auto"`` for the one that the model is stored in, or a name of torch's. Weights of
            16 bits do not change by steps smaller than their rounding. Train adapters, which are float32
            (with ``"bf16-mixed"``; ``"bf16-true"`` makes them 16 bits too), or give ``"float32"``.

    Raises:
        MisconfigurationException: If the model cannot be loaded, transformers is not installed, or an argument is out
            of range or contradicts the task.

    Example:
        >>> classifier = TextClassifier("sentence-transformers/all-MiniLM-L6-v2", num_labels=2)  # doctest: +SKIP
        >>> classifier({"input_ids": torch.tensor([[101, 2307, 102]])}).shape  # doctest: +SKIP
        torch.Size([1, 2])
    """

    def __init__(
        self,
        model: Any = "sentence-transformers/all-MiniLM-L6-v2",
        num_labels: int | None = None,
        seed: int | None = None,
        optimizer: OptimizerCallable = lambda parameters: torch.optim.AdamW(parameters, lr=2e-5, weight_decay=0.01),
        scheduler: LRSchedulerCallable | None = None,
        label_smoothing: float = 0.0,
        no_weight_decay: Sequence[str] = (),
        task: str | None = None,
        dtype: str = "auto",
    ) -> None:
        found = None if task is None else glue_task(task)
        if num_labels is None:
            num_labels = 2 if found is None else max(len(found.labels), 1)
        check_integer("num_labels", num_labels, hint="1 to predict a number")
        if found is not None and num_labels != max(len(found.labels), 1):
            raise MisconfigurationException(
                f"num_labels={num_labels}, but task={task!r} has {max(len(found.labels), 1)}: leave num_labels out"
            )
        regression = num_labels == 1
        if regression and label_smoothing:
            raise MisconfigurationException(
                f"label_smoothing={label_smoothing} is for classes, and num_labels=1 predicts a number"
            )
        network = load_pretrained(
            "AutoModelForSequenceClassification",
            model,
            "TextClassifier",
            f"a classifier of num_labels={num_labels}",
            head_seed(default_seed() if seed is None else seed),
            dtype,
            **({"num_labels": num_labels} if isinstance(model, str) else {}),
        )
        if not isinstance(model, (str, Mapping)):
            # save_hyperparameters() reads this local variable.
            model = None if isinstance(model, nn.Module) else model.to_dict()
        own = getattr(getattr(network, "config", None), "num_labels", num_labels)
        if own != num_labels:
            raise MisconfigurationException(
                f"num_labels={num_labels}, but the model that was given has {own}: give num_labels to it"
            )
        # Classifier's metric is an accuracy, which needs two classes; a regression deletes it below.
        super().__init__(network, max(num_labels, 2), optimizer, scheduler, label_smoothing, no_weight_decay)
        self.num_classes = num_labels
        if regression:
            del self.val_accuracy, self.test_accuracy
        names = found.metrics if found is not None else ("pearson", "spearman") if regression else ("acc",)
        for stage in ("val", "test"):
            further = {name: _metric(name, num_labels) for name in names if name != "acc"}
            setattr(self, f"{stage}_metrics", nn.ModuleDict(further))

    @property
    def regression(self) -> bool:
        """Whether a number is predicted for each text, not a class."""
        return self.num_classes == 1

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:  # type: ignore[override]
        """The logits, ``(batch, num_labels)``, of inputs by name, ``(batch, tokens)`` each."""
        return self.network(**inputs).logits

    def inputs_of(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's inputs of a batch with or without ``labels``."""
        return {name: value for name, value in batch.items() if name != "labels"}

    def split_batch(self, batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """The model's inputs and the targets of a batch."""
        if "labels" not in batch:
            raise MisconfigurationException(
                f"a batch to train on or evaluate must hold class indices as 'labels', and this one has {list(batch)}"
            )
        return self.inputs_of(batch), batch["labels"].float() if self.regression else batch["labels"]

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Return ``probabilities``, ``(batch, num_labels)``, and the likeliest ``classes``; or ``values`` alone."""
        if self.regression:
            return {"values": self._predictions(self(self.inputs_of(batch)))}
        return super().predict_step(batch, batch_idx)

    def _loss(self, outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        if self.regression:
            return F.mse_loss(self._predictions(outputs), targets)
        return super()._loss(outputs if self.training else outputs.float(), targets, label_smoothing)

    def _predictions(self, outputs: Tensor) -> Tensor:
        return outputs.squeeze(1).float() if self.regression else outputs.argmax(dim=1)

    def _metrics(self, stage: str) -> dict[str, Metric]:
        further: Any = getattr(self, f"{stage}_metrics").items()
        return {**({} if self.regression else super()._metrics(stage)), **dict(further)}


class _Pearson(PearsonCorrCoef):
    # torchmetrics leaves higher_is_better at None.
    higher_is_better = True


class _Matthews(MulticlassMatthewsCorrCoef):
    def compute(self) -> Tensor:
        """Matthews correlation; 0 if all targets or all predictions are one class, as in GLUE's metric."""
        undefined = any(int((self.confmat.sum(dim) > 0).sum()) < 2 for dim in (0, 1))
        return self.confmat.new_zeros((), dtype=torch.float32) if undefined else super().compute()


def _metric(name: str, num_labels: int) -> Metric:
    if name == "f1":
        return BinaryF1Score(validate_args=False)
    if name == "mcc":
        return _Matthews(num_labels, validate_args=False)
    return _Pearson() if name == "pearson" else SpearmanCorrCoef()
