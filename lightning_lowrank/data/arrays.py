"""`Arrays`: anyone's inputs and targets, as NumPy arrays or tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast
from zipfile import BadZipFile

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from lightning_lowrank.configuration import check_number
from lightning_lowrank.data.splits import SplitsInMemory
from lightning_lowrank.data.vision import hold_out

Pair = tuple[Any, Any]


class Arrays(SplitsInMemory):
    """Inputs and targets in memory: NumPy arrays or tensors, or ``.npz`` files with the arrays ``x`` and ``y``.

    What NumPy makes an array of, such as a data frame, is one. The first dimension is that of the samples.
    Floating-point numbers of 64 bits become 32, as modules have them, and integer or boolean targets of one dimension
    64, as losses take class indices; other types stay. Where targets are integers, splits have every class as nearly in
    the same proportion as can be.

    Args:
        train: Training inputs and targets, or the path of an ``.npz`` file. The file has two arrays: ``x`` and ``y``.
        test: Those of the test set. ``None``: ``test_share`` of the training samples is held out.
        test_share: Share of the training samples for testing, where ``test`` is not given.
        validation: ``"test"``: validation on the test set. A share: so much of the training samples is held out.
        batch_size: Samples per training batch.
        eval_batch_size: Samples per batch of the other loaders.
        num_workers: Worker processes per loader.
        seed: Seed of what is held out.

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
        train: str | Pair,
        test: str | Pair | None = None,
        test_share: float = 0.2,
        validation: Literal["test"] | float = "test",
        batch_size: int = 64,
        eval_batch_size: int = 1024,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, num_workers)
        check_number("test_share", test_share, above=0, below=1)
        if validation != "test":
            check_number("validation", validation, above=0, below=1, hint="'test' to validate on the test set")
        self.test_share, self.validation, self.seed = test_share, validation, seed
        self._train, self._test = train, test

    def setup(self, stage: str | None = None) -> None:
        """Divide the samples, unless that has been done."""
        if self.train_set is not None:
            return
        train = _pair(self._train, "train")
        if self._test is None:
            train, test = self._held_out(train, self.test_share, "test_share")
        else:
            test = _pair(self._test, "test")
        self.validation_set = self.test_set = TensorDataset(*test)
        if self.validation != "test":
            train, validation = self._held_out(train, self.validation, "validation")
            self.validation_set = TensorDataset(*validation)
        self.train_set = TensorDataset(*train)

    def collate(self) -> Callable[[Sequence[Any]], Any]:
        """Return torch's own."""
        return cast(Callable[[Sequence[Any]], Any], default_collate)

    def _held_out(
        self, pair: tuple[Tensor, Tensor], share: float, argument: str
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        inputs, targets = pair
        classes = targets.ndim == 1 and not targets.is_floating_point()
        groups = targets if classes else torch.zeros(len(targets))
        kept, held_out = hold_out(groups, share, self.seed, argument, "samples")
        return (inputs[kept], targets[kept]), (inputs[held_out], targets[held_out])


def _pair(given: str | Pair, argument: str) -> tuple[Tensor, Tensor]:
    if isinstance(given, (str, Path)):
        try:
            # Without pickles, which could run anything.
            file = np.load(given, allow_pickle=False)
            if isinstance(file, np.ndarray):
                raise ValueError("it holds one array without a name")
            with file:
                given = file["x"], file["y"]
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise MisconfigurationException(
                f"{argument}={str(given)!r} must be an .npz file with the arrays x and y: {error}"
            ) from error
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise MisconfigurationException(
            f"{argument} must be (inputs, targets) or the path of an .npz file, got {type(given).__name__}"
        )
    inputs, targets = (_tensor(each, argument) for each in given)
    if inputs.ndim < 1 or targets.ndim < 1 or len(inputs) != len(targets):
        raise MisconfigurationException(
            f"{argument} must have a target for each input, got {tuple(inputs.shape)} and {tuple(targets.shape)}"
        )
    if not len(inputs):
        raise MisconfigurationException(f"{argument} holds no sample: its inputs have the shape {tuple(inputs.shape)}")
    classes = targets.ndim == 1 and not (targets.is_floating_point() or targets.is_complex())
    return inputs, targets.long() if classes else targets


def _tensor(given: Any, argument: str) -> Tensor:
    try:
        if not isinstance(given, Tensor):
            array = np.asarray(given)
            # torch takes no other byte order and no negative strides, and warns of what cannot be written to.
            given = np.require(array, array.dtype.newbyteorder("="), ["C", "W"])
        found = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MisconfigurationException(f"{argument} must hold arrays of numbers: {error}") from error
    return found.float() if found.dtype == torch.float64 else found
