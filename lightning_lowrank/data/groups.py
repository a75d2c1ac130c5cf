"""Groups of texts by length or topic, for partitions of texts without labels.

They are given to partitions: ``Dirichlet(0.5, groups=LengthGroups(5))``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.arguments import Configured
from lightning_lowrank.configuration import check_integer
from lightning_lowrank.data.tokenized import PadTexts
from lightning_lowrank.extras import import_extra
from lightning_lowrank.federated.data.columns import describe, find_column
from lightning_lowrank.seeding import derive_seed

_ADVICE = "lengths must be one integer for each sample."


class LengthGroups(Configured):
    """Groups samples by length, into groups of about equal size; the shortest are group 0.

    Samples of equal length are in one group.

    Args:
        groups: Number of groups.
        field: Field of a sample whose length counts, if the dataset has no ``lengths``.

    Raises:
        MisconfigurationException: If ``groups`` is out of range, or samples have no such field.

    Example:
        >>> from lightning_lowrank import Dirichlet
        >>> texts = [{"input_ids": [7] * length} for length in (5, 1, 9, 2, 5, 8)]
        >>> LengthGroups(3)(texts).tolist()
        [1, 0, 2, 0, 1, 2]
        >>> partition = Dirichlet(0.5, groups=LengthGroups(3))
    """

    def __init__(self, groups: int = 10, field: str = "input_ids") -> None:
        check_integer("groups", groups, least=2)
        self.groups = groups
        self.field = field

    def __call__(self, dataset: Any) -> np.ndarray:
        """The group of each sample, int64, shape ``(samples,)``."""
        lengths = find_column(dataset, ("lengths",), ("lengths",), self._length_of, "lengths", _ADVICE)
        return np.searchsorted(np.sort(lengths), lengths, side="left") * self.groups // max(len(lengths), 1)

    def _length_of(self, sample: Any) -> int:
        return len(_field(sample, self.field))


class EmbeddingGroups(Configured):
    """Groups texts by topic: k-means of a pretrained encoder's embeddings.

    A text's embedding is the mean of its tokens' last hidden states, scaled to length 1, as sentence encoders such as
    MiniLM are used. The whole dataset is read and encoded once whenever a run begins, also one that is resumed. Groups
    are numbered by their first texts.

    Args:
        model: Name of an encoder on the Hugging Face hub, or a local folder that holds one. Texts must have been
            tokenised by its own tokenizer.
        groups: Number of groups.
        seed: Seed of k-means' first centres.
        batch_size: Texts that are encoded at once.
        device: Where they are encoded. Devices may assign a text between two groups differently.

    Raises:
        MisconfigurationException: If an argument is out of range, there are fewer texts than groups, the model cannot
            be loaded, or transformers is not installed.

    Example:
        >>> groups = EmbeddingGroups("sentence-transformers/all-MiniLM-L6-v2", groups=8)
        >>> groups.groups
        8
    """

    def __init__(self, model: str, groups: int = 10, seed: int = 0, batch_size: int = 64, device: str = "cpu") -> None:
        check_integer("groups", groups, least=2)
        check_integer("batch_size", batch_size)
        self.model = model
        self.groups = groups
        self.seed = seed
        self.batch_size = batch_size
        self.device = device

    def __call__(self, dataset: Any) -> np.ndarray:
        """The group of each sample, int64, shape ``(samples,)``."""
        from sklearn.cluster import KMeans

        if len(dataset) < self.groups:
            raise MisconfigurationException(
                f"groups={self.groups} needs at least as many texts, but there are {len(dataset)}"
            )
        found = KMeans(self.groups, n_init=1, random_state=derive_seed(self.seed, "embedding groups") % 2**32)
        groups = found.fit_predict(self.embed(dataset).double().numpy())
        first = np.unique(groups, return_index=True)[1]
        return np.argsort(np.argsort(first))[groups]

    @torch.inference_mode()
    def embed(self, dataset: Any) -> Tensor:
        """The texts' embeddings, float32, ``(samples, width)``, on the CPU."""
        library = import_extra("transformers", type(self).__name__)
        try:
            # Weights that the checkpoint lacks, such as a pooler's, are drawn from torch's global generator.
            with torch.random.fork_rng(devices=[]):
                encoder = library.AutoModel.from_pretrained(self.model).to(self.device).eval()
        except (OSError, ValueError, RuntimeError) as error:
            raise MisconfigurationException(
                f"model={self.model!r} cannot be loaded as an encoder: give a name on the Hugging Face hub or a local"
                f" folder with a model. {error}"
            ) from error
        pad = PadTexts(0)
        parts = []
        for start in range(0, len(dataset), self.batch_size):
            indices = range(start, min(start + self.batch_size, len(dataset)))
            batch = pad([{"input_ids": torch.as_tensor(_field(dataset[index], "input_ids"))} for index in indices])
            given = {name: value.to(self.device) for name, value in batch.items()}
            states = encoder(**given).last_hidden_state.float()
            mask = given["attention_mask"].unsqueeze(2)
            parts.append(torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1)).cpu())
        return torch.cat(parts)


def _field(sample: Any, name: str) -> Any:
    if isinstance(sample, Mapping) and name in sample:
        return sample[name]
    raise MisconfigurationException(f"samples must be dictionaries with {name!r}, and these are {describe(sample)}")
