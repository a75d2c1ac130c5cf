"""Partitions: rules that divide a training set among clients.

A `Partition` assigns samples to clients, and returns `ClientIndices`. `IID`, `Dirichlet` and `LabelCount` are
the synthetic splits of the federated learning literature, `ByKey` takes the clients that the data itself names
(writers, speakers, hospitals). All draws come from generators derived from the seed, never from the global ones.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import Dataset

from lightning_lowrank.arguments import Configured
from lightning_lowrank.configuration import check_number
from lightning_lowrank.federated.data.columns import (
    Column,
    call_on,
    client_column,
    describe,
    find_column,
    length_of,
    refuse_empty,
    to_column,
)
from lightning_lowrank.federated.data.indices import ClientIndices
from lightning_lowrank.federated.data.labels import check_labels, find_labels
from lightning_lowrank.federated.data.plain_files import owners_in_file
from lightning_lowrank.federated.data.rows import rows_of
from lightning_lowrank.internals.torch import standard_gamma
from lightning_lowrank.seeding import generator

_MAX_DRAWS = 1000
_JUDGED = (3, 10, 30, 100)
"""Number of draws after which a division with enough samples for each client is considered possible or not."""
_HOPELESS = 1e-9
_GROUP_ADVICE = "groups must return one integer or string for each sample of the dataset."
_KEY_ADVICE = "keys must be one integer or string for each sample; ByKey takes a function dataset -> keys."


def _check_count(name: str, value: int, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise MisconfigurationException(f"{name} must be an integer of {minimum} or more, got {value!r}.")
    return value


def check_client_count(clients: int | None, number: int, known: str) -> int:
    """``number``, which the partition implies; raises if the user gave another number, with ``known`` as the reason."""
    if clients is not None and clients != number:
        raise MisconfigurationException(f"clients={clients}, but {known}: set clients={number}, or leave it out.")
    return number


class Partition(Configured, ABC):
    """A rule that divides a training set among clients.

    A rule of your own overrides `assign`, and sets ``needs_labels``, on the class or an instance, if it reads them.

    Attributes:
        needs_labels: Whether `split` needs the samples' labels.

    Example:
        >>> class Blocks(Partition):
        ...     def assign(self, size, clients, seed, labels, keys):
        ...         return ClientIndices(torch.arange(size).tensor_split(clients), size)
        >>> Blocks().split(7, clients=2, seed=0)[0]
        tensor([0, 1, 2, 3])
    """

    needs_labels: bool = False

    def split(
        self,
        dataset: Dataset | int,
        clients: int | None,
        seed: int,
        labels: Tensor | None = None,
        keys: Sequence[Any] | Tensor | np.ndarray | None = None,
    ) -> ClientIndices:
        """Divide a training set.

        Args:
            dataset: The training set, or only its number of samples. From a dataset, labels and keys that are needed
                and not given are found with `find_labels` and `find_keys`.
            clients: Number of clients. ``None`` if the partition knows it (`ByKey`, `FromIndices`).
            seed: Seed of every draw. The global random number generators are neither read nor changed.
            labels: Label of each sample, integers of shape ``[size]``; only for partitions that need them.
            keys: Key of each sample; only for `ByKey`.

        Returns:
            The clients' samples; within a client in ascending order, so that the data's own order is kept if a
            loader does not shuffle (`FromIndices` keeps the order given).

        Raises:
            MisconfigurationException: If the number of clients is missing, below 1, or above the number of samples, if
                labels or keys are missing or do not fit, or if the partition cannot be made.
        """
        if isinstance(dataset, int):
            size = _check_count("size", dataset, 1)
        elif (found := self.divide_named(dataset, clients)) is not None:
            return found
        else:
            size = _check_count("the number of samples of dataset", length_of(dataset), 1)
            if self.needs_labels and labels is None:
                labels = find_labels(dataset)
            if keys is None:
                keys = self.find_keys(dataset)
        if self.needs_labels and labels is None:
            raise MisconfigurationException(
                f"{type(self).__name__} divides by label, so labels is needed: give"
                " labels=find_labels(dataset), or the dataset instead of its size."
            )
        key_array = None if keys is None else to_column(keys, "keys", _KEY_ADVICE)
        if key_array is not None and len(key_array) != size:
            raise MisconfigurationException(f"keys has {len(key_array)} entries for {size} samples: give one for each.")
        if clients is not None:
            _check_count("clients", clients, 1)
        clients = self.count_clients(clients, key_array)
        if clients > size:
            raise MisconfigurationException(
                f"there are more clients than samples: clients={clients}, and the training set has {size}."
            )
        labels = None if labels is None else check_labels(labels, size)
        return self.assign(size, clients, seed, labels, key_array)

    def divide_named(self, dataset: Dataset, clients: int | None) -> ClientIndices | None:
        """The partition, if the dataset itself names each sample's client; ``None`` to continue with `assign`."""
        return None

    def divide_evaluation(self, dataset: Dataset, clients: ClientIndices) -> list[Tensor]:
        """The evaluation samples of each client, int64; a client may have none.

        Args:
            dataset: The evaluation set.
            clients: The division of the training set, as `split` returned it.

        Raises:
            MisconfigurationException: If the partition does not say whose the samples of another data set are.
        """
        raise MisconfigurationException(
            "personal_test='by_client' needs a partition that also assigns the evaluation samples, and"
            f" {type(self).__name__} does not: use ByKey, FromIndices with 'test', or personal_test='matched_labels'."
        )

    def find_keys(self, dataset: Dataset) -> Sequence[Any] | Column | None:
        """The key of each sample; ``None`` for a partition without keys."""
        return None

    def count_clients(self, clients: int | None, keys: Column | None) -> int:
        """The number of clients, given the number that the user asked for.

        Raises:
            MisconfigurationException: If ``clients`` is missing, or contradicts the partition's own number.
        """
        if clients is None:
            raise MisconfigurationException(
                f"{type(self).__name__} needs the number of clients: give clients=10, for one."
            )
        return clients

    @abstractmethod
    def assign(self, size: int, clients: int, seed: int, labels: Tensor | None, keys: Column | None) -> ClientIndices:
        """Assign samples to clients; called by `split` with checked arguments.

        Args:
            size: Number of samples.
            clients: Number of clients, from 1 to ``size``.
            seed: Seed of every draw, for `lightning_lowrank.seeding.generator`.
            labels: Label of each sample, int64 of shape ``[size]``. Never ``None`` if ``needs_labels`` is true.
            keys: Key of each sample, where `find_keys` returned or the caller gave them.
        """


def _from_owners(owners: Tensor, clients: int, names: Sequence[str | int] | None = None) -> ClientIndices:
    """Build the partition from each sample's client, -1 for none."""
    order = torch.argsort(owners, stable=True)
    counts = torch.bincount(owners + 1, minlength=clients + 1)
    return ClientIndices(order[int(counts[0]) :], len(owners), names, sizes=counts[1:])


def deal(codes: Tensor, counts: Tensor, draws: torch.Generator) -> ClientIndices:
    """Give client j ``counts[k, j]`` random samples of class k, for codes 0 to classes - 1."""
    clients = torch.arange(counts.shape[1])
    owners = torch.full_like(codes, -1)
    members_of = codes.argsort(stable=True).split(torch.bincount(codes, minlength=len(counts)).tolist())
    for members, row in zip(members_of, counts, strict=True):
        shuffled = members[torch.randperm(len(members), generator=draws)]
        owners[shuffled[: int(row.sum())]] = torch.repeat_interleave(clients, row)
    return _from_owners(owners, counts.shape[1])


class IID(Partition):
    """Every client holds a uniformly random part of the training set; sizes differ by at most one.

    Example:
        >>> IID().split(10, clients=3, seed=0).sizes
        tensor([4, 3, 3])
    """

    def assign(self, size: int, clients: int, seed: int, labels: Tensor | None, keys: Column | None) -> ClientIndices:
        """See `Partition.assign`."""
        owners = torch.empty(size, dtype=torch.int64)
        owners[torch.randperm(size, generator=generator(seed, "partition", "samples"))] = torch.arange(size) % clients
        return _from_owners(owners, clients)


class _ByGroup(Partition):
    """Base of partitions by label, or by another group of each sample."""

    needs_labels = True

    def __init__(self, groups: Callable[[Any], Any] | None) -> None:
        if groups is not None and not callable(groups):
            raise MisconfigurationException(
                f"groups must be a function of the dataset, such as LengthGroups(), or None for labels, got {groups!r}."
            )
        self.groups = groups
        self.needs_labels = groups is None

    def find_keys(self, dataset: Dataset) -> Column | None:
        """The group of each sample from ``groups``; ``None`` if the partition is by label."""
        return None if self.groups is None else call_on(dataset, self.groups, "groups", _GROUP_ADVICE)

    def _sorted(self, labels: Tensor | None, keys: Column | None) -> tuple[list[Any], Tensor, Tensor]:
        """The sorted groups (or labels), each sample's group as a position among these, and the groups' sizes."""
        if self.groups is not None and keys is None:
            raise MisconfigurationException(
                f"{type(self).__name__}(groups=...) needs the group of each sample: give keys=, or the dataset instead"
                " of its size."
            )
        values = keys if self.groups is not None else None if labels is None else labels.numpy()
        assert values is not None
        names, codes, sizes = np.unique(values, return_inverse=True, return_counts=True)
        return names.tolist(), torch.from_numpy(codes.astype(np.int64)), torch.from_numpy(sizes.astype(np.int64))


class Dirichlet(_ByGroup):
    r"""Each label's samples are divided in shares that follow a symmetric Dirichlet distribution.

    For each label :math:`p \sim \mathrm{Dir}_C(\alpha)` is drawn over the :math:`C` clients, and client :math:`j` gets
    a share :math:`p_j` of the label's samples: the "distribution-based label imbalance" of `Li et al. 2022
    <https://arxiv.org/abs/2102.02079>`_ after `Yurochkin et al. 2019 <https://arxiv.org/abs/1905.12022>`_, and
    Non-IID-1 of FedMUD. Every sample is assigned. Shares are drawn in the logarithm, so that an arbitrarily small
    ``alpha`` works.

    Args:
        alpha: Concentration, above 0. Small: each label sits with few clients. Large: close to `IID` in labels.
        min_samples: Fewest samples of a client. The whole division is drawn again until every client has them, 1,000
            times at most; fewer if the first draws show that the chance of success is below 1e-9. With 0, some clients
            may have no samples.
        capped: Labels are visited in ascending order, and a client that already holds the mean number of samples
            (training set / clients) or more gets none of the next label: its share becomes zero and the others' are
            scaled up to sum to one. That keeps the sizes closer together, and is what most published code does.
            ``False``: the plain distribution.
        groups: Divides by other groups than labels: a function that takes the dataset and returns one integer or string
            for each sample, such as `lightning_lowrank.data.LengthGroups`. Labels are not looked for then.

    Raises:
        MisconfigurationException: If an argument is out of range, if the clients would need more than all samples, or
            if no draw gave each of them ``min_samples``.

    Example:
        >>> labels = torch.arange(1000) % 10
        >>> indices = Dirichlet(0.3, min_samples=10).split(1000, clients=20, seed=0, labels=labels)
        >>> bool(indices.sizes.min() >= 10), int(indices.sizes.sum())
        (True, 1000)
    """

    def __init__(
        self,
        alpha: float,
        min_samples: int = 0,
        capped: bool = True,
        groups: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(groups)
        check_number("alpha", alpha, above=0)
        self.alpha = float(alpha)
        self.min_samples = _check_count("min_samples", min_samples, 0)
        self.capped = capped

    def assign(self, size: int, clients: int, seed: int, labels: Tensor | None, keys: Column | None) -> ClientIndices:
        """See `Partition.assign`."""
        if self.min_samples * clients > size:
            raise MisconfigurationException(
                f"min_samples={self.min_samples} for each of clients={clients} makes"
                f" {self.min_samples * clients}, and the training set has {size} samples: lower one of them."
            )
        _, codes, class_sizes = self._sorted(labels, keys)
        draws = generator(seed, "partition", "shares")
        made = enough = 0
        while made < _MAX_DRAWS:
            counts = self._draw_counts(class_sizes.tolist(), clients, draws)
            fitting = int((counts.sum(0) >= self.min_samples).sum())
            if fitting == clients:
                return deal(codes, counts, generator(seed, "partition", "samples"))
            made, enough = made + 1, enough + fitting
            # Clients compete for samples, so success for all is at most as likely as if they were independent. Count
            # five more successes than seen, since few draws may underestimate the share.
            share = (enough + 5) / (made * clients + 5)
            if made in _JUDGED and _MAX_DRAWS * share**clients < _HOPELESS:
                break
        raise MisconfigurationException(
            f"none of {made:,} draws of Dirichlet(alpha={self.alpha}) over clients={clients} gave every"
            f" client min_samples={self.min_samples} of {size} samples, and {enough / (made * clients):.0%} of the"
            " clients had them: raise alpha, or lower min_samples or clients."
        )

    def _draw_counts(self, class_sizes: list[int], clients: int, draws: torch.Generator) -> Tensor:
        total = sum(class_sizes)
        # Dir(alpha) is Gamma(alpha) variables divided by their sum. For G ~ Gamma(alpha + 1) and E ~ Exp(1), G * exp(-E
        # / alpha) is Gamma(alpha), and its logarithm is finite where the variable itself underflows.
        ones = torch.ones(len(class_sizes), clients, dtype=torch.float64)
        log_gamma = standard_gamma(ones * (self.alpha + 1), draws).log()
        log_gamma -= ones.exponential_(generator=draws) / self.alpha
        held = torch.zeros(clients, dtype=torch.int64)
        rows = []
        for log_shares, class_size in zip(log_gamma, class_sizes, strict=True):
            if self.capped:
                # At least one client is not full: full clients alone would hold the whole training set, this label
                # included.
                log_shares = log_shares.masked_fill(held * clients >= total, -math.inf)
            cumulative = log_shares.softmax(0).cumsum(0)
            # Dividing by the last entry makes the last cut exact and the part of a zero share empty.
            cuts = (cumulative / cumulative[-1] * class_size).floor().long()
            rows.append(cuts.diff(prepend=cuts.new_zeros(1)))
            held += rows[-1]
        return torch.stack(rows)


class LabelCount(_ByGroup):
    """Each client holds a fixed number of labels, and a label's samples are split equally among its holders.

    This is the "quantity-based label imbalance" of `Li et al. 2022 <https://arxiv.org/abs/2102.02079>`_ and Non-IID-2
    of FedMUD. The shares of a label's holders differ by one sample at most, and who gets the odd ones is drawn.

    By default the labels are drawn, each label being as likely as any other for every client, under the condition that
    no label is left out: every label is first given to one random client (a client never has more than
    ``labels_per_client``), then each client draws the rest of its labels among those that it does not hold. Only if
    ``clients * labels_per_client`` is below the number of labels, some have no holder; their samples are unused, and a
    warning says so.

    Args:
        labels_per_client: Number of different labels of each client.
        balanced: Nothing is drawn about who holds which label: client after client takes the labels that have the
            fewest holders so far, the lower first. Numbers of holders differ by one at most (FedMUD's released code).
        groups: As for `Dirichlet`.

    Raises:
        MisconfigurationException: If ``labels_per_client`` is below 1 or above the number of labels.

    Example:
        >>> labels = torch.arange(40) % 4
        >>> LabelCount(2, balanced=True).split(40, clients=4, seed=0, labels=labels).label_counts(labels)
        tensor([[5, 5, 0, 0],
                [0, 0, 5, 5],
                [5, 5, 0, 0],
                [0, 0, 5, 5]])
    """

    def __init__(
        self, labels_per_client: int, balanced: bool = False, groups: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(groups)
        self.labels_per_client = _check_count("labels_per_client", labels_per_client, 1)
        self.balanced = balanced

    def assign(self, size: int, clients: int, seed: int, labels: Tensor | None, keys: Column | None) -> ClientIndices:
        """See `Partition.assign`."""
        names, codes, class_sizes = self._sorted(labels, keys)
        if self.labels_per_client > len(names):
            raise MisconfigurationException(
                f"labels_per_client={self.labels_per_client} is more than the {len(names)} different labels"
                " of the training set."
            )
        held = self._drawn_labels(clients, len(names), generator(seed, "partition", "labels of clients"))
        holders = held.sum(0)
        self._warn_about(names, class_sizes, holders)

        draws = generator(seed, "partition", "samples")
        counts = held.T * (class_sizes // holders.clamp(min=1))[:, None]
        for label, (class_size, number) in enumerate(zip(class_sizes.tolist(), holders.tolist(), strict=True)):
            if number:
                lucky = torch.randperm(number, generator=draws)[: class_size % number]
                counts[label, held[:, label].nonzero().flatten()[lucky]] += 1
        return deal(codes, counts, draws)

    def _drawn_labels(self, clients: int, classes: int, draws: torch.Generator) -> Tensor:
        """Which client holds which label: bool, shape ``[clients, classes]``."""
        held = torch.zeros(clients, classes, dtype=torch.bool)
        if self.balanced:
            holders = torch.zeros(classes, dtype=torch.int64)
            for client in range(clients):
                taken = holders.argsort(stable=True)[: self.labels_per_client]
                held[client, taken] = True
                holders[taken] += 1
            return held
        places = clients * self.labels_per_client
        first = min(places, classes)
        first_holders = torch.randperm(places, generator=draws)[:first] // self.labels_per_client
        scores = torch.rand(clients, classes, generator=draws, dtype=torch.float64)
        scores[first_holders, torch.randperm(classes, generator=draws)[:first]] = 2.0
        return held.scatter_(1, scores.topk(self.labels_per_client).indices, True)

    def _warn_about(self, names: list[Any], class_sizes: Tensor, holders: Tensor) -> None:
        unused = holders == 0
        if unused.any():
            rank_zero_warn(
                f"clients * labels_per_client is below the number of labels: {int(class_sizes[unused].sum())}"
                f" samples of the labels {_chosen(names, unused)} belong to no client."
            )
        scarce = holders > class_sizes
        if scarce.any():
            rank_zero_warn(
                f"the labels {_chosen(names, scarce)} have fewer samples than clients that should hold them: some"
                f" clients get fewer than labels_per_client={self.labels_per_client} labels."
            )


def _chosen(names: list[Any], mask: Tensor) -> list[Any]:
    return [name for name, chosen in zip(names, mask.tolist(), strict=True) if chosen]


class ByKey(Partition):
    """Natural clients: one per distinct key, such as a writer, speaker or hospital.

    Clients are numbered in ascending order of their keys, numbers in names by their value (``u2`` before ``u10``). The
    result keeps the keys as its ``names``. All samples are assigned and nothing is drawn.

    Args:
        key: Where the samples' keys are. A name: that attribute of the dataset if it holds one entry for each sample,
            or else that column of a `datasets.Dataset` or of a dataset of `lightning_lowrank.data` (both found through
            `torch.utils.data.Subset` and `torch.utils.data.ConcatDataset` as well; a ``ClassLabel`` gives the names of
            its classes), or else that field of the samples, which must be dictionaries (one pass over the dataset). Or
            a function that takes the dataset and returns one key for each sample. Keys are integers or strings.
        file: A CSV file that has the keys in its column ``key`` instead, a line for each row of the training data.
        index: Name of a column of ``file`` with the rows' numbers, from 0. ``None``: lines are in the rows' order.

    The clients of a `ClientDatasets` keep their order, and include clients without samples.

    Raises:
        MisconfigurationException: If the keys cannot be found, are of another type, or ``clients`` is given and is not
            their number.

    Example:
        >>> dataset = [{"x": 1.0, "writer": "ben"}, {"x": 2.0, "writer": "ada"}, {"x": 3.0, "writer": "ben"}]
        >>> indices = ByKey("writer").split(dataset, clients=None, seed=0)
        >>> indices.names, indices[1]
        (('ada', 'ben'), tensor([0, 2]))
    """

    def __init__(self, key: Callable[[Any], Any] | str, file: str | None = None, index: str | None = None) -> None:
        if not (callable(key) or isinstance(key, str)):
            raise MisconfigurationException(
                f"key must be a name or a function of the dataset, got {key!r} of type {type(key).__name__}."
            )
        if file is not None and not isinstance(key, str):
            raise MisconfigurationException(f"key must be the name of a column of file={file!r}, got {key!r}.")
        if index is not None and file is None:
            raise MisconfigurationException(f"index={index!r} is a column of a file: give file=.")
        self.key, self.file, self.index = key, file, index

    def divide_named(self, dataset: Dataset, clients: int | None) -> ClientIndices | None:
        """The partition by a column that lists all clients in order, if the dataset has one."""
        column = client_column(dataset, self.key) if isinstance(self.key, str) and self.file is None else None
        if column is None or not len(column):
            return None
        number = self._agreed_count(clients, len(column.names))
        return _from_owners(torch.from_numpy(column.places), number, column.names)

    def divide_evaluation(self, dataset: Dataset, clients: ClientIndices) -> list[Tensor]:
        """See `Partition.divide_evaluation`: a client's samples by key; those of unknown keys belong to no client."""
        if self.file is not None:
            raise MisconfigurationException(
                f"personal_test='by_client' needs the keys of the evaluation samples, and file={self.file!r} has only"
                " those of the training samples: store the keys in both data sets, or use FromIndices with 'train' and"
                " 'test'."
            )
        column = client_column(dataset, str(self.key))
        keys = np.asarray(self.find_keys(dataset) if column is None else column)
        names = np.asarray(clients.names)
        if len(keys) and (keys.dtype.kind == "U") != (names.dtype.kind == "U"):
            raise MisconfigurationException(
                f"key={self.key!r} is {names[0]!r} in the training set and {keys[0]!r} in the evaluation set: give both"
                " integers, or both strings."
            )
        places = {name: place for place, name in enumerate(names.tolist())}
        known, codes = np.unique(keys, return_inverse=True)
        owners = np.array([places.get(name, -1) for name in known.tolist()], np.int64)[codes.reshape(-1)]
        if (owners < 0).any():
            rank_zero_info(
                f"personal_test='by_client': {int((owners < 0).sum()):,} of the {len(owners):,} evaluation samples are"
                " of clients that do not train."
            )
        return list(_from_owners(torch.from_numpy(owners), len(names)))

    def find_keys(self, dataset: Dataset) -> Column:
        """The key of each sample: integers or strings."""
        if self.file is not None:
            return self._keys_in_file(dataset, Path(self.file))
        if callable(self.key):
            return call_on(dataset, self.key, "key", _KEY_ADVICE)
        pick = functools.partial(self._key_of, dataset)
        found = find_column(dataset, (self.key,), (self.key,), pick, self.key, _KEY_ADVICE, classes=True)
        refuse_empty(found, f"key={self.key!r}")
        return found

    def _keys_in_file(self, dataset: Dataset, path: Path) -> np.ndarray:
        """The key of each sample from ``file``, by the sample's row."""
        found, index = owners_in_file(path, "file", str(self.key), self.index)
        rows = rows_of(dataset)
        total = length_of(dataset) if rows is None else rows.total
        places = np.arange(len(found)) if index is None else index
        if len(found) != total or not np.array_equal(np.sort(places), np.arange(total)):
            raise MisconfigurationException(
                f"file={self.file!r} must have a line for each of the {total} rows of the training data, 0 to"
                f" {total - 1}, and has {len(found)} lines."
            )
        keys = np.empty(total, np.asarray(found).dtype)
        keys[places] = found
        return keys if rows is None else keys[rows.numbers.numpy()]

    def _key_of(self, dataset: Dataset, sample: Any) -> Any:
        if isinstance(sample, Mapping) and self.key in sample:
            return sample[self.key]
        known = [*getattr(dataset, "__dict__", ()), *(sample if isinstance(sample, Mapping) else ())]
        similar = difflib.get_close_matches(str(self.key), map(str, known), 1)
        raise MisconfigurationException(
            f"key={self.key!r} is neither an attribute of the dataset with one entry for each sample nor a"
            f" field of its samples ({describe(sample)}): give {(similar and repr(similar[0])) or 'another name'}, or a"
            " function dataset -> keys."
        )

    def count_clients(self, clients: int | None, keys: Column | None) -> int:
        """The number of distinct keys."""
        return self._agreed_count(clients, len(self._categories(keys)[0]))

    def _agreed_count(self, clients: int | None, number: int) -> int:
        return check_client_count(clients, number, f"key={self.key!r} has {number} different values, each a client")

    def _categories(self, keys: Column | None) -> tuple[np.ndarray, np.ndarray]:
        if keys is None:
            raise MisconfigurationException(
                "ByKey needs the key of each sample: give keys=, or the dataset instead of its size."
            )
        names, codes = np.unique(keys, return_inverse=True)
        if names.dtype.kind != "U":
            return names, codes
        order = np.array(sorted(range(len(names)), key=lambda place: natural_sort_key(names[place])), dtype=np.int64)
        return names[order], order.argsort()[codes]

    def assign(self, size: int, clients: int, seed: int, labels: Tensor | None, keys: Column | None) -> ClientIndices:
        """See `Partition.assign`."""
        names, codes = self._categories(keys)
        return _from_owners(torch.from_numpy(codes.astype(np.int64)), clients, names.tolist())


def natural_sort_key(name: Any) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """A sort key that compares numbers inside names by value.

    Example:
        >>> sorted(["u10", "u2", 3, "u1b", "u1"], key=natural_sort_key)
        [3, 'u1', 'u1b', 'u2', 'u10']
    """
    parts = re.split("([0-9]+)", str(name))
    found = tuple((0, int(part), "") if part.isascii() and part.isdigit() else (1, 0, part) for part in parts if part)
    # The name itself breaks ties: "007" and "7" are different.
    return found, str(name)
