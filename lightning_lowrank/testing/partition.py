"""`check_partition`: the contract that every partition must keep."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import Dataset

from lightning_lowrank.federated.data import ClientIndices, Partition, find_labels
from lightning_lowrank.testing.require import generator_states, require, seed_generators

__all__ = ["check_partition"]

_SAMPLES = 503
_LABELS = 10


class _Targets(Dataset):
    """A data set with labels, whose samples cannot be read."""

    targets = torch.arange(_SAMPLES) % _LABELS

    def __len__(self) -> int:
        return _SAMPLES


def check_partition(
    partition: Partition,
    dataset: Dataset | None = None,
    clients: int | None = 7,
    *,
    complete: bool = True,
    draws: bool = True,
    ascending: bool = True,
) -> None:
    """Check that a partition keeps the contract of `Partition`.

    It returns a `ClientIndices` for the number of clients asked for. No sample occurs twice. The seed alone decides:
    the global generators are neither read nor changed, nothing is remembered from an earlier call, and arguments are
    left as they are. Labels matter only if ``needs_labels`` is true. A data set that cannot be divided is refused with
    `lightning.pytorch.utilities.exceptions.MisconfigurationException`.

    Args:
        partition: The partition to check.
        dataset: Training set to divide. Default: 503 samples with ten labels in ``targets``.
        clients: Number of clients; ``None`` if the partition has it.
        complete: Whether every sample has a client. Otherwise some may have none.
        draws: Whether another seed gives another division. Otherwise every seed gives the same.
        ascending: Whether each client's samples are in ascending order.

    Raises:
        AssertionError: If the contract is broken. The message names the partition and what it did.

    Example:
        >>> class Blocks(Partition):
        ...     def assign(self, size, clients, seed, labels, keys):
        ...         return ClientIndices(torch.arange(size).tensor_split(clients), size)
        >>> check_partition(Blocks(), draws=False)
        >>> check_partition(Blocks())
        Traceback (most recent call last):
        AssertionError: Blocks gives the same division for the seeds 0, 1 and 2, but draws=True.
    """
    with isolate_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _Check(partition, _Targets() if dataset is None else dataset, clients, ascending).run(complete, draws)
        except AssertionError as error:
            raise AssertionError(f"{type(partition).__name__} {error}.") from error


class _Check:
    def __init__(self, partition: Partition, dataset: Any, clients: int | None, ascending: bool) -> None:
        self.partition = partition
        self.dataset = dataset
        self.size = len(dataset)
        self.clients = clients
        self.ascending = ascending
        self.labels = find_labels(dataset) if partition.needs_labels else torch.arange(self.size) % _LABELS
        self.keys = partition.find_keys(dataset)

    def run(self, complete: bool, draws: bool) -> None:
        states = seed_generators(0)
        first = self._split(self.dataset)
        require(generator_states() == states, "changes the global random number generators")
        self._check_division(first, self.clients)
        if complete:
            assigned = int(first.sizes.sum())
            require(assigned == self.size, f"assigns {assigned} of {self.size} samples, but complete=True")

        seed_generators(1)
        seeds = {self._split(self.dataset, seed=seed).digest() for seed in (0, 1, 2)}
        if draws:
            require(len(seeds) > 1, "gives the same division for the seeds 0, 1 and 2, but draws=True")
        else:
            require(len(seeds) == 1, "gives other divisions for other seeds, but draws=False")
        require(
            self._split(self.dataset).digest() == first.digest(),
            "divides otherwise when called again with the same seed: draw from lightning_lowrank.seeding.generator, and"
            " keep nothing between calls",
        )
        self._check_labels(first)
        self._check_numbers_of_clients()

    def _check_division(self, indices: Any, clients: int | None) -> None:
        kind = type(indices).__name__
        require(isinstance(indices, ClientIndices), f"returns a {kind} in place of a ClientIndices")
        asked = len(indices) if clients is None else clients
        require(len(indices) == asked, f"returns {len(indices)} clients where {asked} are asked for")
        require(indices.size == self.size, f"returns indices for {indices.size} samples where there are {self.size}")
        parts = list(indices)
        assigned = torch.cat(parts)
        require(assigned.dtype == torch.int64, f"returns indices of type {assigned.dtype} in place of int64")
        outside = assigned[(assigned < 0) | (assigned >= self.size)].tolist()
        require(not outside, f"returns the indices {outside[:5]} for samples 0 to {self.size - 1}")
        repeated = (torch.bincount(assigned, minlength=self.size) > 1).nonzero().flatten().tolist()
        require(not repeated, f"assigns the samples {repeated[:5]} more than once")
        if self.ascending:
            unsorted = [client for client, part in enumerate(parts) if not part.equal(part.sort().values)]
            require(not unsorted, f"gives the clients {unsorted[:5]} samples that do not ascend")
        same = ClientIndices(parts, self.size).digest() == indices.digest()
        require(same, "returns indices whose digest is not that of its clients' samples")

    def _check_labels(self, first: ClientIndices) -> None:
        given = self.labels.clone()
        explicit = self._split(self.size, labels=given, keys=self.keys)
        require(torch.equal(given, self.labels), "changes the labels that it is given")
        if self.partition.needs_labels:
            same = explicit.digest() == first.digest()
            require(same, "divides otherwise where it is given the labels than where it finds them")
            self._check_refused("missing labels", self.size, keys=self.keys)
            self._check_refused("a label too few", self.size, labels=given[1:], keys=self.keys)
        else:
            without = self._split(self.size, keys=self.keys)
            same = first.digest() == without.digest() == explicit.digest()
            require(same, "divides otherwise where it is given labels, but needs_labels is false")

    def _check_numbers_of_clients(self) -> None:
        for number in (-1, 0, self.size + 1):
            self._check_refused(f"clients={number} for {self.size} samples", self.dataset, clients=number)
        for number in (1, self.size) if self.clients is not None else ():
            try:
                indices = self._split(self.dataset, clients=number)
            except MisconfigurationException:
                continue
            self._check_division(indices, number)

    def _split(self, dataset: Any, seed: int = 0, **arguments: Any) -> ClientIndices:
        try:
            return self.partition.split(dataset, **{"clients": self.clients, "seed": seed, **arguments})
        except MisconfigurationException:
            raise
        except Exception as error:
            given = [name for name in ("labels", "keys") if arguments.get(name) is not None]
            raise AssertionError(
                f"fails with {error!r} (given: {', '.join(given) or 'neither labels nor keys'}). Labels are given only"
                " if needs_labels is true"
            ) from error

    def _check_refused(self, what: str, dataset: Any, **arguments: Any) -> None:
        try:
            self.partition.split(dataset, **{"clients": self.clients, "seed": 0, **arguments})
        except MisconfigurationException:
            return
        except Exception as error:
            raise AssertionError(f"refuses {what} with {error!r} in place of a MisconfigurationException") from error
        raise AssertionError(f"accepts {what}; it should raise MisconfigurationException")
