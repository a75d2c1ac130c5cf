"""Which clients a round trains, in which order their batches come, and the loader that delivers them.

`FederatedLoop` asks `RoundPlanner` for each round's plan and hands Lightning one `RoundLoader` in place of the user's
training loader.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from lightning_lowrank.federated.partition import ClientIndices
from lightning_lowrank.seeding import derive_seed, generator


@dataclass(frozen=True)
class Cohort:
    """Clients that step together; one alone where clients train one after another.

    Args:
        clients: Their ids, those with most batches first.
        batches: Number of batches of each.
    """

    clients: tuple[int, ...]
    batches: tuple[int, ...]

    @property
    def steps(self) -> int:
        """Number of steps of the client with most."""
        return self.batches[0]

    def active(self, step: int) -> int:
        """Return how many clients, from the first on, make a step of this number."""
        return sum(count > step for count in self.batches)


@dataclass(frozen=True)
class RoundPlan:
    """One round: its clients in ascending id, how many batches each trains on, and which of them step together.

    Args:
        round: Number of the round, from 0.
        clients: Ids of the clients that train, ascending.
        batches: Number of batches of each.
        failed: Ids of the clients that are sent the model and never answer.
        cohorts: The same clients in the order in which they train; where several processes share the round, those that
            this one trains.
        padding: Number of steps in which this process trains nothing, and waits for one that has more to train.
        leader: The process that trains the first client of all.
    """

    round: int
    clients: tuple[int, ...]
    batches: tuple[int, ...]
    failed: tuple[int, ...]
    cohorts: tuple[Cohort, ...]
    padding: int = 0
    leader: int = 0

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Number of steps of the round when each cohort has finished."""
        return tuple(accumulate(cohort.steps for cohort in self.cohorts))

    @property
    def trained(self) -> int:
        """Number of steps in which this process trains."""
        return self.ends[-1] if self.ends else 0

    @property
    def total(self) -> int:
        """Number of steps of the round."""
        return self.trained + self.padding


def divide(batches: Mapping[int, int], processes: int) -> list[list[int]]:
    """Divide clients among processes so that these have about as many batches: the longest to the least loaded.

    Args:
        batches: Number of batches of each client, by its id.
        processes: How many processes there are; those that are left over have no clients.

    Returns:
        For each process its clients, ascending.

    Example:
        >>> divide({0: 5, 3: 9, 4: 2, 7: 2}, processes=2)
        [[3], [0, 4, 7]]
    """
    parts: list[list[int]] = [[] for _ in range(processes)]
    load = [0] * processes
    for client in sorted(batches, key=lambda client: (-batches[client], client)):
        least = load.index(min(load))
        parts[least].append(client)
        load[least] += batches[client]
    return [sorted(part) for part in parts]


@dataclass(frozen=True)
class RoundPlanner:
    """Draws a round's clients and counts their batches; a pure function of the round.

    Args:
        seed: Seed of the experiment.
        batches: Batches of each client of the partition in a round, an array; a client with none is never drawn.
        per_round: Clients to draw, a count.
        sampling_weights: Relative chance of each client to be drawn; uniform by default.
        participants: Clients of each round, given instead of drawn.
        availability: Chance that each client is there in a round, or a function of client and round.
        failure_probability: Chance that a drawn client never answers.
        truncate: Largest number of batches in a round (Lightning's ``fast_dev_run``).
        together: Largest number of clients that step together; 1 for one after another.
        samples: Number of samples of each client, by which those that step together are sorted.
        kind: Of a client and a round, what must be the same for those that step together; by default all may.
        process: Number of this process, from 0, among those that share a round.
        processes: How many those are.
    """

    seed: int
    batches: np.ndarray
    per_round: int
    sampling_weights: Sequence[float] | None = None
    participants: Sequence[Sequence[int]] | None = None
    availability: Sequence[float] | Callable[[int, int], bool] | None = None
    failure_probability: float = 0.0
    truncate: int | None = None
    together: int = 1
    samples: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    kind: Callable[[int, int], Any] | None = None
    process: int = 0
    processes: int = 1

    def plan(self, round_number: int, cohorts: Sequence[Sequence[int]] | None = None) -> RoundPlan:
        """Return the plan of one round.

        Args:
            round_number: The round, from 0.
            cohorts: Which clients step together, where that is known from a checkpoint: what clients keep, by which
                they are put together, changes during a round.

        Raises:
            MisconfigurationException: If ``participants`` has no entry for the round, or no client is available.
        """
        drawn = self._drawn(round_number)
        answering, failed = self._answering(round_number, drawn)
        batches = self.batches[answering].tolist()
        if self.truncate is not None:
            share = -(-self.truncate // len(answering))
            left, kept = self.truncate, []
            for count in batches:
                kept.append(min(count, share, left))
                left -= kept[-1]
            answering = [client for client, count in zip(answering, kept, strict=True) if count]
            batches = [count for count in kept if count]
        count = dict(zip(answering, batches, strict=True))
        parts = []
        for clients in divide(count, self.processes):
            together = cohorts or self._together(round_number, {client: count[client] for client in clients})
            parts.append([Cohort(tuple(ids), tuple(count[client] for client in ids)) for ids in together])
        steps = [sum(cohort.steps for cohort in part) for part in parts]
        first = [min(part[0].clients) if part else max(answering) + 1 for part in parts]
        return RoundPlan(
            round_number,
            tuple(answering),
            tuple(batches),
            tuple(failed),
            tuple(parts[self.process]),
            padding=max(steps) - steps[self.process],
            leader=first.index(min(first)),
        )

    def _together(self, round_number: int, batches: Mapping[int, int]) -> list[list[int]]:
        """Put clients of a kind with about as many batches together, of which the longest come first."""
        if self.together == 1:
            return [[client] for client in sorted(batches)]
        kinds: dict[Any, list[int]] = {}
        for client in sorted(batches, key=lambda client: (-batches[client], -self.samples[client], client)):
            kinds.setdefault(None if self.kind is None else self.kind(client, round_number), []).append(client)
        return [
            clients[start : start + self.together]
            for clients in kinds.values()
            for start in range(0, len(clients), self.together)
        ]

    def _drawn(self, round_number: int) -> list[int]:
        if self.participants is not None:
            if round_number >= len(self.participants):
                raise MisconfigurationException(
                    f"participants names the clients of {len(self.participants)} rounds, and round {round_number}"
                    " (from 0) was asked for: give more, or lower max_epochs."
                )
            return sorted(self.participants[round_number])
        eligible = self.batches > 0
        if self.sampling_weights is not None:
            eligible &= np.asarray(self.sampling_weights) > 0
        if callable(self.availability):
            eligible &= [bool(self.availability(client, round_number)) for client in range(len(self.batches))]
        elif self.availability is not None:
            eligible &= _chances(len(self.batches), self.seed, "availability", round_number) < self.availability
        ids = np.flatnonzero(eligible)
        if not len(ids):
            raise MisconfigurationException(
                f"no client is available in round {round_number}: raise `availability` or `sampling_weights`."
            )
        count = min(self.per_round, len(ids))
        weights = np.ones(len(ids)) if self.sampling_weights is None else np.asarray(self.sampling_weights)[ids]
        draws = generator(self.seed, "sampling", round_number)
        chosen = torch.multinomial(torch.from_numpy(weights.astype(np.float64)), count, generator=draws)
        return sorted(ids[chosen.numpy()].tolist())

    def _answering(self, round_number: int, drawn: list[int]) -> tuple[list[int], list[int]]:
        if not self.failure_probability:
            return drawn, []
        luck = _chances(len(self.batches), self.seed, "failure", round_number)
        failed = [client for client in drawn if luck[client] < self.failure_probability]
        if len(failed) == len(drawn):
            failed.remove(max(drawn, key=luck.__getitem__))
        return [client for client in drawn if client not in failed], failed


def _chances(count: int, *parts: int | str) -> np.ndarray:
    return torch.rand(count, generator=generator(*parts), dtype=torch.float64).numpy()


class StepRandomness:
    """Puts the process's random number generators at a named point for each step, and gives them back.

    PyTorch's dropout and most augmentations draw from the global generators. Between `open` and `close` those (torch
    on every device in use, ``random``, NumPy) are a function of (seed, round, client, step) alone. torch's are given
    back after every step; reading NumPy's state costs as much as a small step, so ``random``'s and NumPy's are given
    back when the round pauses or ends, by `release`.
    """

    def __init__(self) -> None:
        self._torch: tuple[Tensor, list[Tensor]] | None = None
        self._others: tuple[Any, Any] | None = None

    def open(self) -> None:
        """Keep the generators' state, unless that has been done already."""
        if self._torch is None:
            cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
            self._torch = torch.get_rng_state(), cuda
        if self._others is None:
            self._others = random.getstate(), np.random.get_state()

    def close(self) -> None:
        """Give torch's generators back as `open` found them; does nothing where it was not called."""
        if self._torch is not None:
            cpu, cuda = self._torch
            torch.set_rng_state(cpu)
            if cuda:
                torch.cuda.set_rng_state_all(cuda)
            self._torch = None

    def release(self) -> None:
        """Give all generators back."""
        self.close()
        if self._others is not None:
            random.setstate(self._others[0])
            np.random.set_state(self._others[1])
            self._others = None


def seed_process(seed: int) -> None:
    """Seed torch's generators on the devices in use, ``random`` and NumPy's global one."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # torch.manual_seed formats a stack trace for every device that is not in use, which costs more than a small step.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def _step_seed(client_seed: int, step: int) -> int:
    return (client_seed + step) & 0x7FFFFFFFFFFFFFFF


class _Request(NamedTuple):
    """The sample indices of one batch, and the seed of whatever is drawn while they are read."""

    indices: np.ndarray
    seed: int


class _Requests(list[_Request]):
    """The batches of clients that step together, in the order of their stack."""


class Places:
    """Places of clients in their stack; not a collection, so that Lightning does not look into it for tensors.

    Args:
        numbers: The places, ascending.
        samples: Number of samples in the batch of each of these clients.
    """

    def __init__(self, numbers: list[int], samples: int) -> None:
        self.numbers = numbers
        self.samples = samples
        self.contiguous = numbers[-1] - numbers[0] + 1 == len(numbers)


class _SeededBatches(Dataset):
    """Reads and collates a whole batch at a time, its random draws seeded by the request.

    Collating here rather than in the loader puts a random ``collate_fn`` under the same seed, and makes the result
    independent of the number of workers.

    Where nothing is drawn (tensors in memory, or a dataset and collate function that say they are ``deterministic``),
    the batches of all clients that step together are one gather.
    """

    def __init__(self, dataset: Dataset, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate
        self._tensors = dataset.tensors if type(dataset) is TensorDataset and collate is default_collate else None
        self._deterministic = self._tensors is not None or (
            getattr(dataset, "deterministic", False)
            and (collate is default_collate or getattr(collate, "deterministic", False))
        )

    def __getitem__(self, request: _Request | _Requests) -> Any:
        return self.__getitems__(request)

    def __getitems__(self, request: _Request | _Requests) -> Any:
        return self._together(request) if isinstance(request, _Requests) else self._read(request)

    def _read(self, request: _Request) -> Any:
        if self._tensors is not None:
            rows = torch.from_numpy(request.indices)
            return [_gather(tensor, rows.to(tensor.device)) for tensor in self._tensors]
        seed_process(request.seed)
        indices = request.indices.tolist()
        fetch = getattr(self.dataset, "__getitems__", None)
        return self.collate(fetch(indices) if fetch else [self.dataset[index] for index in indices])

    def _together(self, requests: _Requests) -> list[tuple[Places, Any]]:
        """Return, for each batch size, the clients' places in the stack and their batches, stacked."""
        by_size: dict[int, list[int]] = {}
        for place, request in enumerate(requests):
            by_size.setdefault(len(request.indices), []).append(place)
        parts = []
        for size, places in by_size.items():
            if self._deterministic:
                rows = np.concatenate([requests[place].indices for place in places])
                whole = self._read(_Request(rows, requests[places[0]].seed))
                shape = (len(places), size)
                batch = apply_to_collection(whole, Tensor, lambda t, shape=shape: t.unflatten(0, shape))
            else:
                batch = default_collate([self._read(requests[place]) for place in places])
            parts.append((Places(places, size), batch))
        return parts


def _gather(tensor: Tensor, rows: Tensor) -> Tensor:
    """Select rows; as a lookup where that is possible, for torch's runs several times faster than its index_select."""
    if tensor.ndim > 1 and tensor.is_floating_point() and not tensor.requires_grad:
        return torch.nn.functional.embedding(rows, tensor.flatten(1)).unflatten(1, tensor.shape[1:])
    return tensor.index_select(0, rows)


def _as_it_is(batch: Any) -> Any:
    return batch


class RoundLoader:
    """The training loader of a federated experiment: a round's batches, one client after another.

    It keeps the user's loader's batch size, collate function, workers, pinned memory and ``drop_last``. All it draws
    comes from generators of (seed, round, client). Iterating starts at ``position()``, so that a resumed run goes on
    where it was. Where the plan has padding, that many ``None`` come at the end.

    Args:
        loader: The user's training loader, as `check_loader` lets it pass.
        clients: Sample indices of each client.
        seed: Seed of the experiment.
        plan: Returns the current round's plan.
        position: Returns the number of batches of the round that are done.
        randomness: Opened before a batch is read, left open for the training step.
        shuffle: Whether a client's samples are permuted, anew for each of its local epochs.
        together: Whether clients step together, so that a batch is that of a cohort: for each batch size the clients'
            places in the cohort and their batches, stacked.
    """

    def __init__(
        self,
        loader: DataLoader,
        clients: ClientIndices,
        seed: int,
        plan: Callable[[], RoundPlan],
        position: Callable[[], int],
        randomness: StepRandomness,
        shuffle: bool,
        together: bool = False,
    ) -> None:
        self.shuffle = shuffle
        self.together = together
        self.batch_size = cast(int, loader.batch_size)
        self.drop_last = loader.drop_last
        self._clients = clients
        self._seed = seed
        self._plan = plan
        self._position = position
        self._randomness = randomness
        self._batches = _SeededBatches(loader.dataset, loader.collate_fn)
        workers = loader.num_workers
        # Without workers, torch's loader would only add its own time to each batch.
        self._loader: DataLoader | None = None
        if workers or loader.pin_memory:
            self._loader = DataLoader(
                self._batches,
                batch_sampler=cast(Any, _RequestsOf(self)),
                collate_fn=_as_it_is,
                num_workers=workers,
                pin_memory=loader.pin_memory,
                timeout=loader.timeout,
                worker_init_fn=loader.worker_init_fn,
                multiprocessing_context=loader.multiprocessing_context if workers else None,
                prefetch_factor=loader.prefetch_factor if workers else None,
                persistent_workers=loader.persistent_workers,
                generator=torch.Generator(),
            )

    def __len__(self) -> int:
        return self._plan().total

    def __iter__(self) -> Iterator[Any]:
        # Lightning calls iter() more often than it iterates: nothing may start before the first batch is asked for.
        plan = self._plan()
        padding = plan.total - max(self._position(), plan.trained)
        batches: Iterator[Any] | None = None
        for cohort, steps in self._remaining(plan):
            seed = derive_seed(self._seed, "training", plan.round, cohort.clients[0])
            for step in steps:
                self._randomness.open()
                if batches is None:
                    reader = self._batches.__getitems__
                    batches = map(reader, self.requests()) if self._loader is None else iter(self._loader)
                batch = next(batches)
                seed_process(_step_seed(seed, step))
                yield batch
        for _ in range(padding):
            yield None

    def requests(self) -> Iterator[_Request | _Requests]:
        """Yield the indices of the round's batches from the current position on."""
        plan = self._plan()
        for cohort, steps in self._remaining(plan):
            for requests in islice(self._cohort_requests(plan.round, cohort), steps.start, None):
                yield requests if self.together else requests[0]

    def read(self, cohort: Cohort, round_number: int, steps: int) -> tuple[list[Any], list[Any]]:
        """Read the first batches of clients that step together, outside any round.

        Args:
            cohort: The clients.
            round_number: The round whose batches they are.
            steps: Number of steps to read; less where the clients have fewer.

        Returns:
            The cohort's batches step by step, and the first batch of each client on its own.
        """
        requests = list(islice(self._cohort_requests(round_number, cohort), steps))
        return [self._batches[each] for each in requests], [self._batches[each] for each in requests[0][:steps]]

    def _cohort_requests(self, round_number: int, cohort: Cohort) -> Iterator[_Requests]:
        """Yield what the clients that are still active read, step by step."""
        streams = [
            self._client_requests(round_number, client, count)
            for client, count in zip(cohort.clients, cohort.batches, strict=True)
        ]
        for step in range(cohort.steps):
            yield _Requests(next(stream) for stream in streams[: cohort.active(step)])

    def _client_requests(self, round_number: int, client: int, count: int) -> Iterator[_Request]:
        seed = derive_seed(self._seed, "data", round_number, client)
        for step, indices in enumerate(self._client_batches(round_number, client, count)):
            yield _Request(indices, _step_seed(seed, step))

    def _remaining(self, plan: RoundPlan) -> list[tuple[Cohort, range]]:
        """Return the cohorts that are not done, with the steps that each has left."""
        position = self._position()
        return [
            (cohort, range(max(0, position - (end - cohort.steps)), cohort.steps))
            for cohort, end in zip(plan.cohorts, plan.ends, strict=True)
            if position < end
        ]

    def _client_batches(self, round_number: int, client: int, count: int) -> Iterator[np.ndarray]:
        indices = self._clients[client]
        draws = generator(self._seed, "order", round_number, client)
        while True:
            order = indices[torch.randperm(len(indices), generator=draws)] if self.shuffle else indices
            samples = np.asarray(order)
            stop = len(samples) - self.batch_size + 1 if self.drop_last else len(samples)
            for start in range(0, stop, self.batch_size):
                yield samples[start : start + self.batch_size]
                count -= 1
                if not count:
                    return


class _RequestsOf:
    def __init__(self, loader: RoundLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[_Request | _Requests]:
        return self._loader.requests()


def shuffles(loader: DataLoader) -> bool:
    """Return whether a plain training loader shuffles its samples."""
    return isinstance(loader.sampler, RandomSampler)


def check_loader(loader: Any) -> DataLoader:
    """Return ``loader`` if rounds can be drawn from it.

    Raises:
        MisconfigurationException: If it is anything but a plain `torch.utils.data.DataLoader` over a map-style
            dataset, in order or shuffled.
    """
    if not isinstance(loader, DataLoader):
        raise MisconfigurationException(
            f"the training loader is a {type(loader).__name__}: FederatedLoop divides the dataset of one"
            " torch.utils.data.DataLoader among the clients; return that from train_dataloader()."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise MisconfigurationException(
            f"the training dataset {type(loader.dataset).__name__} is an IterableDataset, which has no indices to"
            " divide among clients: give a map-style dataset (with __getitem__ and __len__)."
        )
    if loader.batch_size is None:
        raise MisconfigurationException(
            "the training loader has a batch_sampler of its own or batch_size=None, so that its batches cannot be cut"
            " client by client: give it batch_size and shuffle instead."
        )
    sampler = loader.sampler
    plain = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )
    if not plain:
        raise MisconfigurationException(
            f"the training loader draws samples with {type(sampler).__name__}, which FederatedLoop cannot do client by"
            " client: use shuffle=True or shuffle=False without a sampler."
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise MisconfigurationException(
            f"{type(loader).__name__} iterates in its own way, which FederatedLoop would replace: put what it does into"
            " the dataset or collate_fn of a plain torch.utils.data.DataLoader."
        )
    return loader


def batches_of(samples: np.ndarray, loader: DataLoader) -> np.ndarray:
    """Return how many batches one pass over these numbers of samples gives."""
    size = cast(int, loader.batch_size)
    return samples // size if loader.drop_last else -(-samples // size)
