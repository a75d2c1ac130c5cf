"""`Arrays`: a datamodule for inputs and targets as NumPy arrays or tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from lightning_lowrank.data.splits import SplitsInMemory, check_shares
from lightning_lowrank.data.vision import hold_out
from lightning_lowrank.federated.data.columns import Column, to_column
from lightning_lowrank.federated.data.rows import Rows

Pair = tuple[Any, Any]
_TAKEN = ("tensors", "rows", "targets", "labels")


class Arrays(SplitsInMemory):
    """Inputs and targets in memory: NumPy arrays or tensors, or ``.npz`` files with the arrays ``x`` and ``y``.

    Anything that NumPy converts to an array, such as a data frame, is accepted. The first dimension is that of the
    samples. Further arrays of a file or dictionary are columns of integers or strings with one entry for each sample,
    which are divided as the samples are: ``ByKey("client")`` makes natural clients of a column ``client``. Each is an
    attribute of the splits' datasets.

    float64 becomes float32, as modules have it, and one-dimensional integer or boolean targets become int64, as losses
    take class indices; other types stay. With such targets, all splits have each class in the same proportion, as
    nearly as possible.

    Args:
        train: Training inputs and targets; or a dictionary with the arrays ``x``, ``y`` and columns; or the path of an
            ``.npz`` file with such arrays.
        test: Inputs and targets of the test set. ``None``: ``test_share`` of the training samples is held out.
        test_share: Share of the training samples for testing, if ``test`` is not given.
        validation: ``"test"``: validation on the test set. Or the share of the training samples that is held out.
        batch_size: Samples per training batch.
        eval_batch_size: Samples per batch of the other loaders.
        num_workers: Worker processes per loader.
        seed: Seed of the held-out samples.

    Raises:
        MisconfigurationException: If an argument is out of range, arrays cannot be read, differ in length or hold no
            sample, or a split comes out empty.

    Example:
        >>> inputs, targets = np.random.rand(100, 3), np.arange(100) % 4
        >>> data = Arrays((inputs, targets), test_share=0.2, validation=0.1)
        >>> data.setup()
        >>> len(data.train_set), len(data.validation_set), len(data.test_set)
        (72, 8, 20)
        >>> data.train_set[0][0].dtype
        torch.float32
    """

    def __init__(
        self,
        train: str | Pair | Mapping[str, Any],
        test: str | Pair | Mapping[str, Any] | None = None,
        test_share: float = 0.2,
        validation: Literal["test"] | float = "test",
        batch_size: int = 64,
        eval_batch_size: int = 1024,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, num_workers)
        check_shares(test_share, validation)
        self.test_share, self.validation, self.seed = test_share, validation, seed
        self._train, self._test = train, test

    def setup(self, stage: str | None = None) -> None:
        """Split the samples into training, validation and test, once."""
        if self.train_set is not None:
            return
        train = _samples(self._train, "train")
        if self._test is None:
            train, test = self._held_out(train, self.test_share, "test_share")
        else:
            test = _samples(self._test, "test")
        self.validation_set = self.test_set = test
        if self.validation != "test":
            train, self.validation_set = self._held_out(train, self.validation, "validation")
        self.train_set = train

    def collate(self) -> Callable[[Sequence[Any]], Any]:
        """Torch's default collate function."""
        return cast(Callable[[Sequence[Any]], Any], default_collate)

    def _held_out(self, samples: TensorDataset, share: float, argument: str) -> tuple[TensorDataset, TensorDataset]:
        targets = samples.tensors[1]
        classes = targets.ndim == 1 and not targets.is_floating_point()
        groups = targets if classes else torch.zeros(len(targets))
        kept, held_out = hold_out(groups, share, self.seed, argument, "samples")
        return _selected(samples, kept), _selected(samples, held_out)


def _dataset(tensors: Sequence[Tensor], rows: Rows, columns: Mapping[str, Column]) -> TensorDataset:
    """A `TensorDataset` with further columns as attributes."""
    dataset = TensorDataset(*tensors)
    vars(dataset).update(columns, rows=rows)
    return dataset


def _selected(dataset: TensorDataset, kept: Tensor) -> TensorDataset:
    columns = {name: value[kept.numpy()] for name, value in vars(dataset).items() if isinstance(value, np.ndarray)}
    return _dataset([tensor[kept] for tensor in dataset.tensors], vars(dataset)["rows"].select(kept), columns)


def _samples(given: str | Pair | Mapping[str, Any], argument: str) -> TensorDataset:
    source = argument
    if isinstance(given, (str, Path)):
        try:
            # allow_pickle=False: a pickle could run any code.
            file = np.load(given, allow_pickle=False)
            if isinstance(file, np.ndarray):
                raise ValueError("it holds one array without a name")
            source = f"{argument}={str(given)!r}"
            with file:
                given = dict(file)
        except Exception as error:  # a damaged file fails in any way
            raise MisconfigurationException(
                f"{argument}={str(given)!r} must be an .npz file with the arrays x and y: {error}"
            ) from error
    columns: dict[str, Any] = {}
    if isinstance(given, Mapping):
        lacking = [name for name in ("x", "y") if name not in given]
        if lacking:
            form = "a dictionary" if source == argument else "an .npz file"
            raise MisconfigurationException(
                f"{source} must be {form} with the arrays x and y: it has {sorted(map(str, given))}"
            )
        columns = {name: value for name, value in given.items() if name not in ("x", "y")}
        given = given["x"], given["y"]
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise MisconfigurationException(
            f"{argument} must be (inputs, targets), a dictionary with x and y, or the path of an .npz file, got"
            f" {type(given).__name__}"
        )
    inputs, targets = (to_tensor(each, argument) for each in given)
    if inputs.ndim < 1 or targets.ndim < 1 or len(inputs) != len(targets):
        raise MisconfigurationException(
            f"{argument} must have a target for each input, got {tuple(inputs.shape)} and {tuple(targets.shape)}"
        )
    if not len(inputs):
        raise MisconfigurationException(f"{argument} holds no sample: its inputs have the shape {tuple(inputs.shape)}")
    classes = targets.ndim == 1 and not (targets.is_floating_point() or targets.is_complex())
    attributes = {name: _column(value, name, source, len(inputs)) for name, value in columns.items()}
    return _dataset([inputs, targets.long() if classes else targets], Rows.all(len(inputs)), attributes)


def _column(given: Any, name: str, source: str, samples: int) -> Column:
    """Check a column, and convert it to one integer or string per sample."""
    if name in _TAKEN or not name.isidentifier() or hasattr(TensorDataset, name):
        raise MisconfigurationException(f"{source}: no column can have the name {name!r}: give it another one")
    column = to_column(given, f"{source}: {name}", "give one integer or string for each sample")
    if len(column) != samples:
        raise MisconfigurationException(f"{source}: {name} has {len(column)} entries for {samples} samples")
    return column


def to_tensor(given: Any, argument: str) -> Tensor:
    """Convert numbers to a tensor, float64 to float32; ``argument`` names them in error messages."""
    try:
        if not isinstance(given, Tensor):
            array = np.asarray(given)
            # torch refuses other byte orders and negative strides, and warns of read-only arrays.
            given = np.require(array, array.dtype.newbyteorder("="), ["C", "W"])
        found = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MisconfigurationException(f"{argument} must hold arrays of numbers: {error}") from error
    return found.float() if found.dtype == torch.float64 else found
