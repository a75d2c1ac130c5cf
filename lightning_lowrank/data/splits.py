"""What datamodules that hold their three splits in memory share: the checks of their sizes, and the loaders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, Dataset


class SplitsInMemory(LightningDataModule):
    """Base class of the datamodules: a subclass's ``setup`` fills ``train_set``, ``validation_set`` and ``test_set``.

    Args:
        batch_size: Samples per training batch.
        eval_batch_size: Samples per batch of the other loaders.
        num_workers: Worker processes per loader.

    Raises:
        MisconfigurationException: If an argument is out of range.
    """

    def __init__(self, batch_size: int, eval_batch_size: int, num_workers: int) -> None:
        super().__init__()
        for name, value in (("batch_size", batch_size), ("eval_batch_size", eval_batch_size)):
            if value < 1:
                raise MisconfigurationException(f"{name} must be at least 1, got {value!r}")
        if num_workers < 0:
            raise MisconfigurationException(
                f"num_workers must be 0 (load in the main process) or more, got {num_workers}"
            )
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.train_set: Dataset | None = None
        self.validation_set: Dataset | None = None
        self.test_set: Dataset | None = None

    def collate(self) -> Callable[[Sequence[Any]], Any]:
        """Return what makes a batch of samples."""
        raise NotImplementedError(f"{type(self).__name__} must define collate")

    def train_dataloader(self) -> DataLoader:
        """Shuffled batches of the training set; the last, smaller batch is kept."""
        return self._loader(self.train_set, "fit", self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Batches of the validation set."""
        return self._loader(self.validation_set, "validate", self.eval_batch_size)

    def test_dataloader(self) -> DataLoader:
        """Batches of the test set."""
        return self._loader(self.test_set, "test", self.eval_batch_size)

    def predict_dataloader(self) -> DataLoader:
        """Batches of the test set."""
        return self._loader(self.test_set, "predict", self.eval_batch_size)

    def _loader(self, dataset: Dataset | None, stage: str, batch_size: int, shuffle: bool = False) -> DataLoader:
        if dataset is None:
            raise MisconfigurationException(
                f"{type(self).__name__} has no data for this loader yet: call setup({stage!r}) first"
            )
        return DataLoader(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            collate_fn=self.collate(),
            persistent_workers=self.num_workers > 0,
        )
