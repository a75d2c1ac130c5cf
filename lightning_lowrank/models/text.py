"""A LightningModule that fine-tunes a pretrained transformer to classify texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_lowrank.configuration import check_integer
from lightning_lowrank.interop.transformers import import_transformers
from lightning_lowrank.models.classifier import Classifier
from lightning_lowrank.seeding import default_seed, derive_seed


class TextClassifier(Classifier):
    """Trains a pretrained transformer of Hugging Face to classify texts, with cross-entropy.

    A batch is a dictionary of the model's inputs (``input_ids``, ``attention_mask``) and ``labels``, class indices, as
    `TextClassification` gives it. ``predict`` also takes inputs without ``labels``. What is logged is what `Classifier`
    logs: ``train_loss``; ``val_loss`` and ``val_acc``; ``test_loss`` and ``test_acc``.

    With transformers 5 clients cannot step together (``execution="vectorized"``): it chooses a kernel by the attention
    mask's values, which cannot be mapped. ``"auto"`` then trains them one after another.

    All weights are trained. `LowRank` adds LoRA (Hu et al. 2021), here on the queries and values, with the new
    classification head trained and everything else frozen:

    .. code-block:: python

        LowRank(MatrixProduct(), rank=8, alpha=16, init="lora", include=["query", "value"],
                freeze_rest=True, keep_trained=["classifier"])

    The transformer is the attribute ``network``: ``lightning-lowrank export --prefix network.`` writes weights that its
    own class loads.

    Arguments that are not named here are those of `Classifier`.

    Args:
        model: Name of a model on the Hugging Face hub, or a local folder that holds one.
        num_labels: Number of classes.
        seed: Seed of the weights that ``model`` does not hold: those of the classification head. ``None``: the seed
            given to Lightning's ``seed_everything``, or 0.
        optimizer: Makes the optimizer from the parameters that require a gradient. Default: AdamW with a learning rate
            of 2e-5 and a weight decay of 0.01 (Devlin et al. 2019, who try 2e-5 to 5e-5), for training all weights;
            LoRA needs about 1e-3.
        no_weight_decay: Patterns of parameters without weight decay, such as ``["bias", "LayerNorm"]``.

    Raises:
        MisconfigurationException: If the model cannot be loaded, transformers is not installed, or an argument is out
            of range.

    Example:
        >>> classifier = TextClassifier("sentence-transformers/all-MiniLM-L6-v2", num_labels=2)  # doctest: +SKIP
        >>> classifier({"input_ids": torch.tensor([[101, 2307, 102]])}).shape  # doctest: +SKIP
        torch.Size([1, 2])
    """

    def __init__(
        self,
        model: str = "sentence-transformers/all-MiniLM-L6-v2",
        num_labels: int = 2,
        seed: int | None = None,
        optimizer: OptimizerCallable = lambda parameters: torch.optim.AdamW(parameters, lr=2e-5, weight_decay=0.01),
        scheduler: LRSchedulerCallable | None = None,
        label_smoothing: float = 0.0,
        no_weight_decay: Sequence[str] = (),
    ) -> None:
        check_integer("num_labels", num_labels, least=2, hint="the number of classes")
        super().__init__(
            _pretrained(model, num_labels, default_seed() if seed is None else seed),
            num_labels,
            optimizer,
            scheduler,
            label_smoothing,
            no_weight_decay,
        )

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:  # type: ignore[override]
        """Return the logits, ``(batch, num_labels)``, of inputs by name, ``(batch, tokens)`` each."""
        return self.network(**inputs).logits

    def inputs_of(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's inputs of a batch with or without ``labels``."""
        return {name: value for name, value in batch.items() if name != "labels"}

    def split_batch(self, batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Return the model's inputs and the class indices of a batch."""
        if "labels" not in batch:
            raise MisconfigurationException(
                f"a batch to train on or evaluate must hold class indices as 'labels', and this one has {list(batch)}"
            )
        return self.inputs_of(batch), batch["labels"]


def _pretrained(name: str, num_labels: int, seed: int) -> nn.Module:
    library = import_transformers("TextClassifier")
    # transformers draws what a checkpoint lacks from torch's global generator.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, "classification head"))
        try:
            network = library.AutoModelForSequenceClassification.from_pretrained(name, num_labels=num_labels)
        except (OSError, ValueError, RuntimeError) as error:
            raise MisconfigurationException(
                f"model={name!r} cannot be loaded as a classifier of num_labels={num_labels}: give a name on the"
                f" Hugging Face hub or a local folder with a model. {error}"
            ) from error
    # transformers leaves a loaded model in evaluation mode, without dropout, and may load it in half precision.
    return network.float().train()
