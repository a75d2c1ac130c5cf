"""`ClientDatasets`: a data set for each client, joined into one with the column ``client``.

The readers of `client_files` are thin subclasses, each for one form of files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from lightning_lowrank.data.arrays import to_tensor
from lightning_lowrank.data.splits import SplitsInMemory, check_shares
from lightning_lowrank.federated.data import ClientIndices
from lightning_lowrank.federated.data.columns import ClientColumn
from lightning_lowrank.federated.data.evaluation_samples import hold_out
from lightning_lowrank.federated.data.rows import Rows
from lightning_lowrank.seeding import derive_seed

Split: TypeAlias = Literal["train", "test"]


class ClientDatasets(SplitsInMemory):
    """Datamodule of one data set for each client, by name.

    The splits' datasets have a column ``client``, by which ``ByKey("client")`` divides them and
    ``personal_test="by_client"`` evaluates each client on its own test samples. Clients keep the order in which they
    are given, including clients without samples.

    Args:
        train: Each client's training data, by its name, a string or an integer: a map-style
            `torch.utils.data.Dataset`; a function without arguments that returns one, called once, when the data are
            needed; or a tuple (inputs, targets) of arrays.
        test: Each client's test data. ``None``: ``test_share`` of its training samples is held out, drawn at random; a
            client with samples keeps at least one for training.
        test_share: Share of each client's training samples for testing, if ``test`` is not given.
        validation: ``"test"``: validation on the test data. Or the share of each client's training samples that is held
            out.
        batch_size: Samples per training batch.
        eval_batch_size: Samples per batch of the other loaders.
        num_workers: Worker processes per loader.
        seed: Seed of the held-out samples.
        collate_fn: The function that makes a batch of samples. ``None``: torch's own.

    Raises:
        MisconfigurationException: If an argument is out of range; and when data are needed, if those of a client are of
            another kind, such as an `torch.utils.data.IterableDataset`, or a split comes out empty.

    Example:
        >>> inputs = torch.arange(6.0).reshape(6, 1)
        >>> wards = {"west": (inputs[:4], torch.zeros(4)), "east": (inputs[4:], torch.ones(2)), "north": ([], [])}
        >>> data = ClientDatasets(wards, test_share=0.5)
        >>> data.setup()
        >>> data.train_set.client.names, np.bincount(data.train_set.client.places, minlength=3).tolist()
        (('west', 'east', 'north'), [2, 1, 0])
    """

    def __init__(
        self,
        train: Mapping[str, Any] | Mapping[int, Any],
        test: Mapping[str, Any] | Mapping[int, Any] | None = None,
        test_share: float = 0.2,
        validation: Literal["test"] | float = "test",
        batch_size: int = 64,
        eval_batch_size: int = 1024,
        num_workers: int = 0,
        seed: int = 0,
        collate_fn: Callable[[Sequence[Any]], Any] | None = None,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, num_workers)
        check_shares(test_share, validation)
        for name, given in (("train", train), ("test", test)):
            if given is not None and not (isinstance(given, Mapping) and given):
                raise MisconfigurationException(
                    f"{name} must be a dictionary from the clients' names to their data, got {str(given)[:100]}"
                )
            other = next((each for each in given or () if not isinstance(each, (str, int))), "")
            if other != "":
                raise MisconfigurationException(
                    f"{name}: the clients' names must be strings or integers, got {other!r} of type"
                    f" {type(other).__name__}"
                )
            twice = [each for each in given or () if isinstance(each, int) and str(each) in (given or ())]
            if twice:
                raise MisconfigurationException(
                    f"{name} has the client {twice[0]} twice, as an integer and as a string: give it one name"
                )
        self.test_share, self.validation, self.seed = test_share, validation, seed
        self._given, self._collate = {"train": train, "test": test}, collate_fn

    def setup(self, stage: str | None = None) -> None:
        """Join the clients' data and hold samples out, once."""
        if self.train_set is not None:
            return
        train = self.read("train")
        assert train is not None
        test = self.read("test")
        if test is None:
            train, test = self._held_out(train, self.test_share, "test_share")
        self.validation_set = self.test_set = test
        if self.validation != "test":
            train, self.validation_set = self._held_out(train, self.validation, "validation")
        for split, dataset in (("train", train), ("test", test)):
            if not len(dataset):
                raise MisconfigurationException(f"{type(self).__name__}: no client has a sample in {split!r}")
        self.train_set = train

    def collate(self) -> Callable[[Sequence[Any]], Any]:
        """``collate_fn``, or torch's default."""
        return self._collate or cast(Callable[[Sequence[Any]], Any], default_collate)

    def read(self, split: Split) -> Any:
        """The joined dataset of a split, with its column ``client``; ``None`` if there are no test data."""
        given = self._given[split]
        if given is None:
            return None
        parts = {name: value() if _opens(value) else value for name, value in given.items()}
        if all(_is_pair(part) for part in parts.values()):
            return join_arrays(((name, *part) for name, part in parts.items()), list(parts))
        datasets = [_dataset(name, part) for name, part in parts.items()]
        sizes = [len(each) for each in datasets]
        return _known(ConcatDataset(datasets), list(parts), np.repeat(np.arange(len(sizes)), sizes))

    def _held_out(self, dataset: Any, share: float, argument: str) -> tuple[Subset, Subset]:
        """Hold out a share of each client's samples."""
        column: ClientColumn = dataset.client
        order = torch.from_numpy(np.argsort(column.places, kind="stable"))
        sizes = torch.from_numpy(np.bincount(column.places, minlength=len(column.names)))
        clients = ClientIndices(order, len(column), column.names, sizes=sizes)
        kept, held_out = hold_out(clients, share, derive_seed(self.seed, argument))
        parts = kept.indices.sort().values, torch.cat([*held_out, torch.zeros(0, dtype=torch.int64)]).sort().values
        if not len(parts[1]):
            raise MisconfigurationException(
                f"{argument}={share} holds out no sample of any client: the largest client has {int(sizes.max())}"
            )
        return _subset(dataset, parts[0]), _subset(dataset, parts[1])


def join_arrays(parts: Iterable[tuple[Any, Any, Any]], names: Sequence[Any] | None = None) -> TensorDataset:
    """Clients' inputs and targets as one dataset with a column ``client``; memory peaks little above its size.

    Args:
        parts: Name, inputs and targets of one client after another.
        names: All clients in their order; ``None``: those of ``parts``.

    Raises:
        MisconfigurationException: If a client comes twice, its inputs and targets differ in number, or inputs or
            targets differ in shape from those of the clients before.
    """
    inputs, targets, sizes = _Growing(), _Growing(), dict.fromkeys(names or (), 0)
    found: list[tuple[Any, int]] = []
    for name, *pair in parts:
        x, y = (to_tensor(part, f"client {name!r}").numpy() for part in pair)
        if len(x) != len(y):
            raise MisconfigurationException(f"client {name!r} has {len(x)} inputs and {len(y)} targets")
        if sizes.get(name):
            raise MisconfigurationException(f"client {name!r} occurs twice")
        sizes[name] = len(x)
        found.append((name, len(x)))
        if len(x):
            inputs.add(x, f"inputs of client {name!r}")
            targets.add(y, f"targets of client {name!r}")
    place_of = {name: place for place, name in enumerate(sizes)}
    places = np.repeat(np.array([place_of[name] for name, _ in found], np.int64), [size for _, size in found])
    labels = targets.tensor()
    whole = labels.ndim == 1 and not labels.is_floating_point()
    return cast(
        TensorDataset, _known(TensorDataset(inputs.tensor(), labels.long() if whole else labels), list(sizes), places)
    )


class _Growing:
    """An array that grows in place at its end, without a second copy in memory."""

    def __init__(self) -> None:
        self._array, self._rows = np.zeros(0, np.float32), 0

    def add(self, part: np.ndarray, what: str) -> None:
        if not self._rows:
            self._array = np.empty((len(part), *part.shape[1:]), part.dtype)
        if part.shape[1:] != self._array.shape[1:]:
            raise MisconfigurationException(
                f"{what} have the shape {list(part.shape[1:])}, and those before {list(self._array.shape[1:])}: give"
                " all the same"
            )
        kind = np.promote_types(self._array.dtype, part.dtype)
        if kind != self._array.dtype:
            self._array = self._array.astype(kind)
        rows = self._rows + len(part)
        if rows > len(self._array):
            self._resize(max(rows, len(self._array) * 9 // 8))
        self._array[self._rows : rows] = part
        self._rows = rows

    def tensor(self) -> Tensor:
        self._resize(self._rows)
        found = torch.from_numpy(self._array)
        # NumPy's common type of integers and float32.
        return found.float() if found.dtype == torch.float64 else found

    def _resize(self, rows: int) -> None:
        self._array.resize((rows, *self._array.shape[1:]), refcheck=False)


def _known(dataset: Any, names: Sequence[Any], places: np.ndarray) -> Any:
    """Set the column ``client`` of a dataset: the client of each sample."""
    vars(dataset).update(client=ClientColumn(names, places), rows=Rows.all(len(places)))
    return dataset


def _subset(dataset: Any, samples: Tensor) -> Subset:
    subset = Subset(dataset, samples.tolist())
    vars(subset)["client"] = dataset.client[samples.numpy()]
    return subset


def _opens(value: Any) -> bool:
    return callable(value) and not isinstance(value, Dataset) and not hasattr(value, "__getitem__")


def _is_pair(part: Any) -> bool:
    return isinstance(part, tuple) and len(part) == 2 and all(hasattr(each, "__len__") for each in part)


def _dataset(name: Any, part: Any) -> Any:
    if _is_pair(part):
        return TensorDataset(*(to_tensor(each, f"client {name!r}") for each in part))
    if isinstance(part, IterableDataset) or not (hasattr(part, "__len__") and hasattr(part, "__getitem__")):
        raise MisconfigurationException(
            f"the data of client {name!r} must be a map-style dataset, with __getitem__ and __len__, got"
            f" {type(part).__name__}: list(dataset) makes one of an iterable dataset"
        )
    return part
