"""`TextSplits`, the base class of the datamodules of texts: reading of splits, and the tokenizer.

A subclass says how a `Table` becomes samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_lowrank.configuration import check_integer
from lightning_lowrank.data.splits import SplitsInMemory
from lightning_lowrank.data.tables import Table, find_file, load_splits, read_table, split_of, table_of
from lightning_lowrank.data.tokenized import TokenizedTexts, load_tokenizer
from lightning_lowrank.federated.data.lengths import LengthGroupedSampler

_ARGUMENTS = {"fit": "train", "validate": "validation", "test": "test"}


class TextSplits(SplitsInMemory):
    """Base class of the datamodules of texts. A subclass defines ``tokenize`` and ``collate``.

    Args:
        root: Folder of the files; with ``dataset`` where downloads are kept.
        tokenizer: Name of a tokenizer on the Hugging Face hub, a local folder that holds one, or the tokenizer itself.
        parts: Names of the files or splits to train on, to validate on and to test on.
        max_length: Tokens of a text at most.
        dataset: Name of a data set, a list of the name and its configuration, or the splits themselves.
        group_by_length: Whether texts of like length are in one batch, in training and validation.
        pad_to_multiple_of: Batches are padded to a multiple of this length.
    """

    def __init__(
        self,
        root: str,
        tokenizer: Any,
        parts: Sequence[str],
        max_length: int,
        batch_size: int,
        eval_batch_size: int,
        num_workers: int,
        dataset: Any,
        group_by_length: bool = False,
        pad_to_multiple_of: int | None = None,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, num_workers)
        check_integer("max_length", max_length)
        if pad_to_multiple_of is not None:
            check_integer("pad_to_multiple_of", pad_to_multiple_of)
            if max_length % pad_to_multiple_of:
                raise MisconfigurationException(
                    f"max_length={max_length} must be a multiple of pad_to_multiple_of={pad_to_multiple_of}, as batches"
                    " of the longest texts are"
                )
        self.root = root
        self.tokenizer = tokenizer
        self.dataset = dataset
        self.parts = dict(zip(_ARGUMENTS, parts, strict=True))
        self.max_length = max_length
        self.group_by_length = group_by_length
        self.pad_to_multiple_of = pad_to_multiple_of
        self._loaded: Any = None

    def setup(self, stage: str | None = None) -> None:
        """Read and tokenise what ``stage`` needs (``None``: everything), unless it is loaded already."""
        wanted = {
            "fit": stage in (None, "fit") and self.train_set is None,
            "validate": stage in (None, "fit", "validate") and self.validation_set is None,
            "test": stage in (None, "test", "predict") and self.test_set is None,
        }
        read = {part: self.read(part) for part, missing in wanted.items() if missing}
        self.prepare(read)
        sets = {part: self.tokenize(part, table) for part, table in read.items()}
        self.train_set = sets.get("fit", self.train_set)
        self.validation_set = sets.get("validate", self.validation_set)
        self.test_set = sets.get("test", self.test_set)

    def train_dataloader(self) -> DataLoader:
        """Shuffled batches of the training set; the last, smaller batch is kept."""
        loader = super().train_dataloader()
        if not self.group_by_length:
            return loader
        assert isinstance(self.train_set, TokenizedTexts)
        return self._loader(
            self.train_set,
            "fit",
            self.batch_size,
            sampler=LengthGroupedSampler(self.train_set, self.train_set.lengths, self.batch_size),
        )

    def val_dataloader(self) -> DataLoader:
        """Batches of the validation set."""
        loader = super().val_dataloader()
        if not self.group_by_length:
            return loader
        assert isinstance(self.validation_set, TokenizedTexts)
        ordered = self.validation_set.lengths.argsort(stable=True).tolist()
        return self._loader(Subset(self.validation_set, ordered), "validate", self.eval_batch_size)

    def read(self, part: str) -> Table:
        """The rows of ``fit``, ``validate`` or ``test``."""
        name = self.parts[part]
        if self.dataset is None:
            return self.read_file(find_file(self.root, name), part)
        if not isinstance(self.dataset, Mapping):
            self.dataset = load_splits(self.dataset, self.root, type(self).__name__)
        return table_of(split_of(self.dataset, name, _ARGUMENTS[part]), f"dataset[{name!r}]")

    def read_file(self, path: Path, part: str) -> Table:
        """The rows of a file."""
        return read_table(path)

    def prepare(self, read: Mapping[str, Table]) -> None:
        """Compute what all splits share, such as the classes, from the splits read; called before `tokenize`."""

    def tokenize(self, part: str, table: Table) -> Dataset:
        """The samples of a split."""
        raise NotImplementedError(f"{type(self).__name__} must define tokenize")

    def load_tokenizer(self) -> Any:
        """The tokenizer, loaded and checked once."""
        if self._loaded is None:
            tokenizer = load_tokenizer(self.tokenizer, type(self).__name__)
            self.check_tokenizer(tokenizer)
            self._loaded = tokenizer
        return self._loaded

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raise if the tokenizer does not support ``max_length``."""
        if not self.max_length <= tokenizer.model_max_length:
            raise MisconfigurationException(
                f"max_length={self.max_length} does not fit tokenizer={self.tokenizer!r}, which takes"
                f" {tokenizer.model_max_length}"
            )


def names_of_parts(given: Sequence[str | None], dataset: Any, files: Sequence[str], splits: Sequence[str]) -> list[str]:
    """Names of the three splits: the given ones, completed by defaults for files or for datasets."""
    defaults = files if dataset is None else splits
    return [name or default for name, default in zip(given, defaults, strict=True)]
