"""The loader that delivers a round's batches, each read by its samples' indices under a seed of its own.

`FederatedLoop` hands Lightning one `RoundLoader` in place of the user's training loader. Clients' own evaluations read
their batches with the same `SeededBatches`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
    default_collate,
)

from lightning_lowrank.federated.data.blocks import BlockReader, Request
from lightning_lowrank.federated.data.device import DeviceData, gather, source_of
from lightning_lowrank.federated.data.indices import ClientIndices
from lightning_lowrank.federated.data.lengths import LengthGroupedSampler, group_by_length
from lightning_lowrank.federated.data.planner import Chunk, RoundPlan
from lightning_lowrank.federated.data.sampling import drawn_by_poisson, rate_of
from lightning_lowrank.federated.randomness import OwnGenerators, StepRandomness, seed_process, step_seed
from lightning_lowrank.seeding import derive_seed, generator


class Places:
    """Places of clients in their stack. Not a collection, so that Lightning does not search it for tensors.

    Args:
        numbers: The places, ascending.
        samples: Number of samples in the batch of each of these clients.
    """

    holds_no_tensors = True

    def __init__(self, numbers: list[int], samples: int) -> None:
        self.numbers = numbers
        self.samples = samples
        self.contiguous = numbers[-1] - numbers[0] + 1 == len(numbers)
        self.is_prefix = numbers[-1] + 1 == len(numbers)


class Requests(list[Request]):
    """The batches of clients that step together, in the order of their stack."""

    def by_size(self) -> list[tuple[Places, list[Request]]]:
        """Return, for each size of a batch, the clients' places in the stack, and their requests."""
        places: dict[int, list[int]] = {}
        for place, request in enumerate(self):
            places.setdefault(len(request.indices), []).append(place)
        return [(Places(numbers, size), [self[place] for place in numbers]) for size, numbers in places.items()]


class SeededBatches(Dataset):
    """Reads and collates a whole batch at a time, its random draws seeded by the request.

    ``change``, if given, makes of each batch, and its samples' indices, what is delivered, sample by sample.

    Collating here rather than in the loader puts a random ``collate_fn`` under the same seed, and makes the result
    independent of the number of workers.

    Samples that are rows of tensors in memory, see `source_of`, are gathered. Where nothing is drawn, by these or by a
    dataset and collate function that say they are ``deterministic``, the batches of all clients that step together are
    read as one. Where the collate function also works ``sample_by_sample``, so are some that follow each other.
    """

    def __init__(
        self,
        dataset: Dataset,
        collate: Callable[[list[Any]], Any],
        change: Callable[[Any, np.ndarray], Any] | None = None,
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self._change = change
        self._own: OwnGenerators | None = None
        self.begin()

    def begin(self) -> None:
        """Look where the samples lie, as a round begins: the indices of a subset may have changed."""
        self._source = source_of(self.dataset, self.collate)
        gathered = self._source is not None and not self._source.draws
        self._deterministic = gathered or (
            getattr(self.dataset, "deterministic", False)
            and (self.collate is default_collate or getattr(self.collate, "deterministic", False))
        )
        if not self._deterministic and self._own is None:
            self._own = OwnGenerators(self.dataset, self.collate)
        self._in_blocks = gathered or (self._deterministic and getattr(self.collate, "sample_by_sample", False))

    def __getitems__(self, request: Request | Requests) -> Any:
        return self._stacked(request) if isinstance(request, Requests) else self._read(request)

    def read(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Return an iterator over batches, some of them requested in advance where that is faster."""
        return BlockReader(self._read)(requests) if self._in_blocks else map(self._read, requests)

    def _read(self, request: Request) -> Any:
        batch = self._as_it_is(request)
        return batch if self._change is None else self._change(batch, request.indices)

    def _as_it_is(self, request: Request) -> Any:
        if self._own is not None and not self._deterministic:
            seed_process(request.seed)
            self._own.seed(request.seed)
        if self._source is not None:
            rows, numbers = self._source.rows, torch.from_numpy(self._source.rows_of(request.indices))
            draws = rows.draw(len(numbers), None)
            made = rows.made(len(numbers)) if draws is None else None
            if made is not None:
                return [gather(tensor, numbers.to(tensor.device)) for tensor in made]
            return rows.make([gather(tensor, numbers.to(tensor.device)) for tensor in rows.tensors], draws)
        indices = request.indices.tolist()
        fetch = getattr(self.dataset, "__getitems__", None)
        return self.collate(fetch(indices) if fetch else [self.dataset[index] for index in indices])

    def read_stacked(self, requests: Iterable[Requests]) -> Iterator[list[tuple[Places, Any]]]:
        """Return an iterator over the batches of clients that step together, some of them requested in advance."""
        return self._stacked_in_blocks(requests) if self._in_blocks else map(self._stacked, requests)

    def _stacked_in_blocks(self, requests: Iterable[Requests]) -> Iterator[list[tuple[Places, Any]]]:
        requested: deque[tuple[Places, list[Request], bool]] = deque()

        def joined() -> Iterator[Request]:
            for step in requests:
                groups = step.by_size()
                for number, (places, group) in enumerate(groups, start=1):
                    requested.append((places, group, number == len(groups)))
                    yield _joined(group)

        parts: list[tuple[Places, Any]] = []
        for whole in BlockReader(self._read)(joined()):
            places, group, last = requested.popleft()
            parts += self._parts(places, group, whole)
            if last:
                yield parts
                parts = []

    def _stacked(self, requests: Requests) -> list[tuple[Places, Any]]:
        """Return, for each form of a batch, the clients' places in the stack and their batches, stacked."""
        parts = []
        for places, alike in requests.by_size():
            parts += self._parts(places, alike, self._read(_joined(alike)) if self._deterministic else None)
        return parts

    def _parts(self, places: Places, requests: list[Request], whole: Any) -> list[tuple[Places, Any]]:
        """Stack the clients' batches of one size, which ``whole`` holds end to end where it has rows of samples."""
        size, numbers = places.samples, places.numbers
        parts = whole.values() if isinstance(whole, Mapping) else whole if isinstance(whole, (list, tuple)) else [whole]
        rows = len(requests) * size
        if all(isinstance(part, Tensor) and part.ndim and len(part) == rows for part in parts):
            shape = (len(requests), size)
            return [(places, apply_to_collection(whole, Tensor, lambda part: part.unflatten(0, shape)))]
        stacks = stack_batches([self._read(request) for request in requests])
        return [(Places([numbers[each] for each in same], size), batch) for same, batch in stacks]


def _joined(requests: list[Request]) -> Request:
    """Return the request of several batches end to end."""
    return Request(np.concatenate([request.indices for request in requests]), requests[0].seed)


class DiffersBetweenClients(AttributeError, TypeError):
    """Refuses a step of clients together that reads what is no tensor and differs between them."""

    # An AttributeError, for code that moves batches asks what methods their entries have.


class CannotStack(MisconfigurationException):
    """Refuses batches of clients that step together."""


class OfEachClient:
    """An entry of the batches of clients that step together: no tensor, and not the same for all of them.

    Inside the map over clients it has no value, so that all use of it is refused.

    Args:
        name: Where batches have it.
        values: Each client's.
    """

    def __init__(self, name: str, values: Sequence[Any]) -> None:
        self.name, self.values = name, tuple(values)

    def _refuse(self, *arguments: Any, **keywords: Any) -> Any:
        raise DiffersBetweenClients(f"it reads {self.name}, which is no tensor and differs between the clients")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __bool__ = __str__ = __format__ = _refuse
    __len__ = __iter__ = __contains__ = __getitem__ = __int__ = __float__ = __index__ = __call__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __mod__ = __rmod__ = __pow__ = __rpow__ = __floordiv__ = __rfloordiv__ = __neg__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Refuse operations of torch's."""
        given = [*arguments, *(keywords or {}).values()]
        next(each for each in given if isinstance(each, cls))._refuse()


def batch_of(stacked: Any, place: int) -> Any:
    """Return the batch of the client of a place, given those of several clients stacked."""

    def chosen(entry: Any) -> Any:
        return entry.values[place] if isinstance(entry, OfEachClient) else entry[place]

    return apply_to_collection(stacked, (Tensor, OfEachClient), chosen)


def stack_batches(batches: Sequence[Any]) -> list[tuple[list[int], Any]]:
    """Stack the tensors of batches that are equal in structure and shapes.

    What is no tensor and differs between them, such as the name of a client, is an `OfEachClient`.

    Returns:
        For each kind of batch, which ones are of it, and one batch with their tensors stacked.
    """
    kinds: list[tuple[Any, list[int]]] = []
    for index, batch in enumerate(batches):
        form = _form_of(batch)
        kind = next((kind for kind in kinds if _equal(kind[0], form)), None)
        if kind is None:
            kinds.append((form, [index]))
        else:
            kind[1].append(index)
    return [(indices, _stacked([batches[index] for index in indices], "batch")) for _, indices in kinds]


def _form_of(batch: Any) -> Any:
    """Return what batches have in common that can be stacked: their structure, and the form of each tensor."""
    if isinstance(batch, Tensor):
        if batch.is_nested or batch.layout is not torch.strided:
            kind = "nested" if batch.is_nested else "sparse"
            raise CannotStack(f"batches hold {kind} tensors, which cannot be stacked")
        return batch.shape, batch.dtype
    if isinstance(batch, PackedSequence):
        raise CannotStack("batches hold packed sequences, which cannot be stacked")
    if _is_plain_data(batch):
        return type(batch)
    if isinstance(batch, Mapping):
        return type(batch), {key: _form_of(value) for key, value in batch.items()}
    if _is_sequence(batch):
        return type(batch), [_form_of(value) for value in batch]
    # Others, and their fields, are compared as they are.
    return apply_to_collection(batch, Tensor, _form_of)


def _is_sequence(entry: Any) -> bool:
    return type(entry) in (list, tuple) or (isinstance(entry, tuple) and hasattr(entry, "_fields"))


def _is_plain_data(entry: Any) -> bool:
    """Return whether an entry is a text, a number or an array, or a list or dictionary of such entries."""
    if isinstance(entry, Mapping):
        return all(map(_is_plain_data, entry.values()))
    if isinstance(entry, (list, tuple, set, frozenset)):
        return all(map(_is_plain_data, entry))
    return entry is None or isinstance(entry, (str, bytes, int, float, complex, np.ndarray, np.generic))


def _stacked(entries: Sequence[Any], name: str) -> Any:
    """Return the entries of one place of batches that have one form as the entry of the stacked batch."""
    first = entries[0]
    if isinstance(first, Tensor):
        return torch.stack(list(entries))
    if _is_plain_data(first):
        return first if all(_equal(first, each) for each in entries[1:]) else OfEachClient(name, entries)
    if isinstance(first, Mapping):
        parts = {key: _stacked([each[key] for each in entries], f"{name}[{key!r}]") for key in first}
        if type(first) is dict:
            return parts
        copied: Any = copy.copy(first)
        copied.update(parts)
        return copied
    if _is_sequence(first):
        items = [_stacked(each, f"{name}[{place}]") for place, each in enumerate(zip(*entries, strict=True))]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    each_of = [[] for _ in entries]  # type: list[list[Tensor]]
    for entry, tensors in zip(entries, each_of, strict=True):
        apply_to_collection(entry, Tensor, tensors.append)
    stacks = iter([torch.stack(values) for values in zip(*each_of, strict=True)])
    return apply_to_collection(first, Tensor, lambda _: next(stacks))


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, np.ndarray):
        return isinstance(second, np.ndarray) and np.array_equal(first, second)
    try:
        return bool(first == second)
    except (RuntimeError, TypeError, ValueError):
        # Arrays, for one, have no single answer.
        return False


def batch_reader(
    loader: DataLoader, batches: SeededBatches, requests: Iterable[Request | Requests], stacked: bool = False
) -> Callable[[], Iterator[Any]]:
    """Return a function that reads the batches requested by then with a loader's workers and pinned memory.

    Those of clients that step together are ``stacked``.
    """
    workers = loader.num_workers
    if not (workers or loader.pin_memory):
        # torch's loader would only add its own time to each batch.
        if stacked:
            return lambda: batches.read_stacked(cast(Iterable[Requests], requests))
        return lambda: batches.read(cast(Iterable[Request], requests))
    with_workers = DataLoader(
        batches,
        batch_sampler=cast(Any, requests),
        collate_fn=_unchanged,
        num_workers=workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context if workers else None,
        prefetch_factor=loader.prefetch_factor if workers else None,
        persistent_workers=loader.persistent_workers,
        generator=torch.Generator(),
    )
    return lambda: iter(with_workers)


def _unchanged(batch: Any) -> Any:
    return batch


class RoundLoader:
    """The training loader of a federated experiment: a round's batches, one client after another.

    It keeps the batch size, collate function, workers, pinned memory and ``drop_last`` of the user's loader. Everything
    it draws comes from generators of (seed, round, client). Iteration starts at ``position()``, so that a resumed run
    continues where it stopped.

    Args:
        loader: The user's training loader, checked by `check_loader`.
        clients: Sample indices of each client.
        seed: Seed of the experiment.
        plan: Returns the current round's plan.
        position: Returns the number of batches of the round that are done.
        randomness: Opened before a batch is read, left open for the training step.
        shuffle: Whether a client's samples are permuted, again for each of its local epochs. With a
            `LengthGroupedSampler` those that the round reads of a pass are put into batches of like length. With a
            `torch.utils.data.WeightedRandomSampler` as many are drawn with replacement, by their weights.
        stacked: Whether a batch is that of a whole chunk: for each batch size the clients' places in the chunk and
            their batches, stacked.
        poisson: Returns the seed by which each of a client's samples is in a batch on its own, so that batches have the
            loader's size on average. Where none is drawn, the client's first sample stands for the batch; see `drawn`.
            ``None``: batches are of one size.
        change: As for `SeededBatches`.
        device_data: Keeps samples on the device that trains; ``None``: batches are read on the host.
        next_cohort: Returns the clients of the next round, none where they are not known.
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
        stacked: bool = False,
        poisson: Callable[[], int] | None = None,
        change: Callable[[Any, np.ndarray], Any] | None = None,
        device_data: DeviceData | None = None,
        next_cohort: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        self.shuffle = shuffle
        self._lengths = lengths_of(loader) if shuffle else None
        self._weights = weights_of(loader) if shuffle else None
        self._poisson = poisson
        self.stacked = stacked
        self.batch_size = cast(int, loader.batch_size)
        self.drop_last = loader.drop_last
        self._clients = clients
        self._seed = seed
        self._plan = plan
        self._position = position
        self._randomness = randomness
        self.batches = SeededBatches(loader.dataset, loader.collate_fn, change)
        self._next_cohort = next_cohort
        requests = _RequestsOf(self)
        self._read_requests = batch_reader(loader, self.batches, requests, stacked)
        if device_data is not None:
            self._read_requests = device_data.reader(loader, requests, self._read_requests, self._samples_ahead)

    def __iter__(self) -> Iterator[Any]:
        reading: list[Iterator[Any]] = []

        def read(seed: int) -> Any:
            # Other draws than those of the step.
            self._randomness.open(derive_seed(seed, "read") if self._randomness.has_device else None)
            if not reading:
                self.batches.begin()
                reading.append(self._read_requests())
            try:
                batch = next(reading[0])
            except Exception:
                reading.clear()
                raise
            self._randomness.seed(seed)
            return batch

        # Unlike a generator, it goes on after an error in the dataset.
        return map(read, self._seeds())

    def _seeds(self) -> Iterator[int]:
        """Yield the seed of each of the round's remaining steps."""
        # Lightning calls iter() more often than it iterates: nothing may start before the first batch is requested.
        plan = self._plan()
        for chunk, steps in self._remaining(plan):
            seed = derive_seed(self._seed, "training", plan.round, chunk.clients[0])
            for step in steps:
                yield step_seed(seed, step)

    def requests(self) -> Iterator[Request | Requests]:
        """Yield the indices of the round's batches from the current position on."""
        plan = self._plan()
        for chunk, steps in self._remaining(plan):
            if self.stacked:
                yield from islice(self._chunk_requests(plan.round, chunk), steps.start, None)
            else:
                (client,) = chunk.clients
                yield from islice(self._client_requests(plan.round, client, chunk.steps), steps.start, None)

    def read(self, chunk: Chunk, round_number: int, steps: int) -> tuple[list[Any], list[Any]]:
        """Return the first batches of clients that step together, and the first of each client on its own.

        They are read outside any round. There are fewer than ``steps`` where the clients have fewer.
        """
        requests = list(islice(self._chunk_requests(round_number, chunk), steps))
        read = self.batches.__getitems__
        return [read(each) for each in requests], [read(each) for each in requests[0][:steps]]

    def _samples_ahead(self) -> list[np.ndarray]:
        """Return the samples of the round's clients, and those of the next round's where these are known."""
        cohorts = [[client for chunk in self._plan().chunks for client in chunk.clients], self._next_cohort()]
        return [np.concatenate([self._clients[client].numpy() for client in cohort]) for cohort in cohorts if cohort]

    def _chunk_requests(self, round_number: int, chunk: Chunk) -> Iterator[Requests]:
        """Yield what the clients that are still active read, step by step."""
        streams = [
            self._client_requests(round_number, client, count)
            for client, count in zip(chunk.clients, chunk.batches, strict=True)
        ]
        for step in range(chunk.steps):
            yield Requests(next(stream) for stream in streams[: chunk.active(step)])

    def _client_requests(self, round_number: int, client: int, count: int) -> Iterator[Request]:
        seed = derive_seed(self._seed, "data", round_number, client)
        for step, indices in enumerate(self._client_batches(round_number, client, count)):
            yield Request(indices, step_seed(seed, step))

    def _remaining(self, plan: RoundPlan) -> list[tuple[Chunk, range]]:
        """Return the chunks that are not done, with the steps that each has left."""
        position = self._position()
        return [
            (chunk, range(max(0, position - (end - chunk.steps)), chunk.steps))
            for chunk, end in zip(plan.chunks, plan.ends, strict=True)
            if position < end
        ]

    def drawn(self, round_number: int, client: int, step: int) -> np.ndarray:
        """Return the samples that Poisson sampling draws for a batch; there may be none."""
        assert self._poisson is not None
        samples = np.asarray(self._clients[client])
        rate = rate_of(len(samples), self.batch_size)
        return drawn_by_poisson(samples, rate, self._poisson(), "poisson", round_number, client, step)

    def _client_batches(self, round_number: int, client: int, count: int) -> Iterator[np.ndarray]:
        if self._poisson is not None:
            for step in range(count):
                drawn = self.drawn(round_number, client, step)
                yield drawn if len(drawn) else np.asarray(self._clients[client])[:1]
            return
        indices = self._clients[client]
        draws = generator(self._seed, "order", round_number, client) if self.shuffle else None
        while True:
            if self._weights is not None:
                order = indices[torch.multinomial(self._weights[indices], len(indices), True, generator=draws)]
            else:
                order = indices if draws is None else indices[torch.randperm(len(indices), generator=draws)]
            if self._lengths is not None and draws is not None:
                read = min(len(order), count * self.batch_size)
                grouped = group_by_length(order[:read], self._lengths, self.batch_size, draws)
                order = torch.cat([grouped, order[read:]])
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

    def __iter__(self) -> Iterator[Request | Requests]:
        return self._loader.requests()


def lengths_of(loader: DataLoader) -> Tensor | None:
    """Return the samples' lengths, where the loader puts those of like length into one batch."""
    return loader.sampler.lengths if isinstance(loader.sampler, LengthGroupedSampler) else None


def weights_of(loader: DataLoader) -> Tensor | None:
    """Return the samples' weights, where the loader draws samples by them."""
    return loader.sampler.weights if isinstance(loader.sampler, WeightedRandomSampler) else None


def check_loader(loader: Any, training: bool = True, weighted: bool = False) -> DataLoader:
    """Return a loader whose dataset can be read by the samples' indices.

    It is the given one, or where a `torch.utils.data.BatchSampler` makes its batches, one with a ``batch_size`` that
    has the same batches.

    Args:
        loader: What the user's hook returned.
        training: Whether batches are drawn as the loader's sampler draws them. Otherwise only its dataset is read, and
            a list with just one loader will do.
        weighted: Whether a `torch.utils.data.WeightedRandomSampler` may draw, with replacement.

    Raises:
        MisconfigurationException: If it is anything but a plain `torch.utils.data.DataLoader` over a map-style
            dataset, all of it in order or shuffled.

    Example:
        >>> data = torch.arange(10.0, 15.0)
        >>> sampler = BatchSampler(SequentialSampler(data), 2, drop_last=False)
        >>> plain = check_loader(DataLoader(data, batch_size=None, sampler=sampler))
        >>> plain.batch_size, [batch.tolist() for batch in plain]
        (2, [[10.0, 11.0], [12.0, 13.0], [14.0]])
    """
    hook = "train_dataloader()" if training else "val_dataloader() and test_dataloader()"
    if not training and isinstance(loader, (list, tuple)) and len(loader) == 1:
        (loader,) = loader
    needed = f"{hook} must return one plain torch.utils.data.DataLoader, whose dataset is read by the samples' indices;"
    if not isinstance(loader, DataLoader):
        several = f" of {len(loader)} loaders" if isinstance(loader, (list, tuple, dict)) else ""
        raise MisconfigurationException(f"{needed} got {type(loader).__name__}{several}.")
    if isinstance(loader.dataset, IterableDataset):
        raise MisconfigurationException(
            f"{needed} got one of {type(loader.dataset).__name__}, an IterableDataset without indices: give a map-style"
            " dataset (with __getitem__ and __len__)."
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise MisconfigurationException(
            f"{needed} {type(loader).__name__} iterates in its own way, which would be replaced: put what it does into"
            " the dataset or collate_fn."
        )
    if loader.batch_size is None:
        sized = _with_batch_size(loader)
        if sized is None:
            raise MisconfigurationException(
                f"{needed} got one with a batch_sampler or batch_size=None, whose batches cannot be cut client by"
                " client: give it batch_size and shuffle, or a plain torch.utils.data.BatchSampler."
            )
        loader = sized
    sampler: Any = loader.sampler
    if weighted and type(sampler) is WeightedRandomSampler:
        _check_weights(sampler, len(loader.dataset), needed)
        return loader
    # Not a subclass, which may draw in its own way.
    plain = type(sampler) in (SequentialSampler, RandomSampler, LengthGroupedSampler)
    part = ""
    if plain and sampler.data_source is not loader.dataset:
        drawn, size = len(sampler.data_source), len(loader.dataset)
        part = f" over {drawn} of {size} samples" if drawn != size else ""
    if plain and training and isinstance(sampler, RandomSampler):
        plain = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    if not plain or part:
        raise MisconfigurationException(
            f"{needed} got one that draws with {type(sampler).__name__}{part}, which cannot be done client by client:"
            " use shuffle=True or shuffle=False without a sampler, and choose samples with torch.utils.data.Subset."
        )
    return loader


def _check_weights(sampler: WeightedRandomSampler, samples: int, needed: str) -> None:
    weights = sampler.weights
    if not (len(weights) == sampler.num_samples == samples and sampler.replacement):
        raise MisconfigurationException(
            f"{needed} got one whose WeightedRandomSampler draws {sampler.num_samples} of {samples} samples by"
            f" {len(weights)} weights with replacement={sampler.replacement}: each client draws as many as it holds, so"
            " give each sample a weight, num_samples=len(dataset), and replacement=True."
        )
    if not (weights.isfinite() & (weights >= 0)).all():
        wrong = weights[~(weights.isfinite() & (weights >= 0))]
        raise MisconfigurationException(
            f"{needed} got one whose WeightedRandomSampler has the weight {float(wrong[0])}: weights must be 0 or more,"
            " and finite."
        )


class _ReadByLists(Subset):
    """A whole dataset whose ``__getitem__`` returns the batch of a list of indices."""

    stands_in = True

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset, range(len(dataset)))  # type: ignore[arg-type]

    def __getitems__(self, indices: list[int]) -> Any:
        return self.dataset[indices]


def _with_batch_size(loader: DataLoader) -> DataLoader | None:
    """Return a loader with the batches that a plain `torch.utils.data.BatchSampler` makes of a loader's dataset."""
    dataset: Dataset = loader.dataset
    batches: Any = loader.batch_sampler
    if batches is None:
        batches, dataset = loader.sampler, _ReadByLists(dataset)
    if type(batches) is not BatchSampler:
        return None
    return loader_like(loader, dataset, batches.batch_size, batches.sampler, batches.drop_last)


def loader_like(loader: DataLoader, dataset: Dataset, batch_size: int, sampler: Any, drop_last: bool) -> DataLoader:
    """Return a loader of other batches that collates them as a loader does, with as many workers."""
    of_workers = ("multiprocessing_context", "prefetch_factor", "persistent_workers") if loader.num_workers else ()
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=torch.Generator(),
        **{name: getattr(loader, name) for name in of_workers},
    )


def batches_of(samples: np.ndarray, loader: DataLoader) -> np.ndarray:
    """Return how many batches one pass over these numbers of samples gives."""
    size = cast(int, loader.batch_size)
    return samples // size if loader.drop_last else -(-samples // size)
