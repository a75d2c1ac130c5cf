"""`SplitsInMemory`, the base class of the datamodules: their sizes and loaders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_lowrank.configuration import check_integer, check_number


class SplitsInMemory(LightningDataModule):
    """Base class of the datamodules: a subclass's ``setup`` fills ``train_set``, ``validation_set`` and ``test_set``.

    Args:
        batch_size: Samples per training batch.
        eval_batch_size: Samples per batch of the other loaders.
        num_workers: Worker processes per loader. Default 0: fetching from memory is usually quicker than a transfer
            between processes.

    Raises:
        MisconfigurationException: If an argument is out of range.
    """

    def __init__(self, batch_size: int, eval_batch_size: int, num_workers: int) -> None:
        super().__init__()
        check_integer("batch_size", batch_size)
        check_integer("eval_batch_size", eval_batch_size)
        check_integer("num_workers", num_workers, least=0, hint="0 to load in the main process")
        self.batch_size = int(batch_size)
        self.eval_batch_size = int(eval_batch_size)
        self.num_workers = int(num_workers)
        self.train_set: Dataset | None = None
        self.validation_set: Dataset | None = None
        self.test_set: Dataset | None = None

    def collate(self) -> Callable[[Sequence[Any]], Any]:
        """The loaders' collate function."""
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

    def _loader(
        self,
        dataset: Dataset | None,
        stage: str,
        batch_size: int,
        shuffle: bool = False,
        sampler: Sampler[int] | None = None,
    ) -> DataLoader:
        if dataset is None:
            raise MisconfigurationException(
                f"{type(self).__name__} has no data for this loader yet: call setup({stage!r}) first"
            )
        return DataLoader(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            num_workers=self.num_workers,
            collate_fn=self.collate(),
            persistent_workers=self.num_workers > 0,
        )


def check_shares(test_share: float, validation: str | float) -> None:
    """Raise if a held-out share is out of range; ``validation`` may be ``"test"``."""
    check_number("test_share", test_share, above=0, below=1)
    if validation != "test":
        check_number("validation", validation, above=0, below=1, hint="'test' to validate on the test set")
