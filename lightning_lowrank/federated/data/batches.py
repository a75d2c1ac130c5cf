"""Seeded batches, read by their samples' indices, and stacked batches for clients that step together.

`RoundLoader`, `PoissonLoader` and `ClientEvaluation` read theirs by a `BatchReader`; validation on the device, by
`read_on_device`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_lowrank.federated.data.device import DeviceData, move_to_device
from lightning_lowrank.federated.data.loader_checks import loader_like
from lightning_lowrank.federated.data.tensor_rows import Source, source_of
from lightning_lowrank.federated.randomness import OwnGenerators, seed_process
from lightning_lowrank.internals.torch import read_batches_with

# Steps per transfer of indices and draws to a device, and steps per gather in main memory.
_STEPS_SENT = 1024
_STEPS_AT_ONCE = 32
_CPU = torch.device("cpu")


class Request(NamedTuple):
    """The sample indices of one batch, and the seed of the random draws while it is read."""

    indices: np.ndarray
    seed: int


class Places:
    """Positions of clients in their stack. Not a collection, so that Lightning does not search it for tensors.

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
        """The requests by batch size: for each size, the clients' positions in the stack and their requests."""
        places: dict[int, list[int]] = {}
        for place, request in enumerate(self):
            places.setdefault(len(request.indices), []).append(place)
        return [(Places(numbers, size), [self[place] for place in numbers]) for size, numbers in places.items()]


class SeededBatches(Dataset):
    """Reads and collates one whole batch at a time, with random draws seeded by the request.

    Collating here rather than in the loader puts a random ``collate_fn`` under the same seed, and makes the result
    independent of the number of workers.

    Samples that are rows of tensors, see `source_of`, are gathered, once for each tensor and size of a batch. If
    dataset and collate function say that they are ``deterministic``, the batches of all clients that step together are
    read as one, too.

    Args:
        dataset: The dataset.
        collate: Its collate function.
        change: Gets a batch and the indices of its samples, and returns the batch to deliver, sample by sample.
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
        """Look up the samples' tensors before a round or an evaluation: a subset's indices may have changed."""
        self.source = source_of(self.dataset, self.collate)
        self.draws = self.source is not None and self.source.rows.draw(1, torch.Generator()) is not None
        self._deterministic = getattr(self.dataset, "deterministic", False) and (
            self.collate is default_collate or getattr(self.collate, "deterministic", False)
        )
        if self.source is None and not self._deterministic and self._own is None:
            self._own = OwnGenerators(self.dataset, self.collate)

    def __getitems__(self, request: Request | Requests) -> Any:
        if self.source is not None:
            return next(self._gathered(self.source, [request]))
        return self._stacked(request) if isinstance(request, Requests) else self._read(request)

    def gathered(self, requests: Iterable[Request | Requests], data: DeviceData | None = None) -> Iterator[Any]:
        """Gather batches on the device, or in main memory; the indices and draws of many steps are sent at once."""
        assert self.source is not None
        following = iter(requests)
        while steps := list(islice(following, _STEPS_AT_ONCE if data is None else _STEPS_SENT)):
            yield from self._gathered(self.source, steps, data)

    def _gathered(
        self, source: Source, steps: Sequence[Request | Requests], data: DeviceData | None = None
    ) -> Iterator[Any]:
        parts = [step.by_size() if isinstance(step, Requests) else [(None, [step])] for step in steps]
        groups = [group for part in parts for _, group in part]
        sizes = [sum(len(request.indices) for request in group) for group in groups]
        requests = [request for group in groups for request in group]
        device = _CPU if data is None else data.device
        rows = _parts(move_to_device(torch.from_numpy(source.rows_of(_joined(requests).indices)), device), sizes)
        draws = _parts(move_to_device(self._drawn(source, requests), device), sizes) if self.draws else None
        kept = source.rows.cached(sum(sizes)) if device.type == "cpu" and draws is None else None
        tensors = source.rows.tensors if kept is None else kept
        if data is not None:
            tensors = [data.copy_of(tensor) for tensor in tensors]
        for step, part in zip(steps, parts, strict=True):
            found = []
            for places, group in part:
                numbers = next(rows)
                batch: Any = [tensor.index_select(0, numbers.to(tensor.device)) for tensor in tensors]
                if kept is None:
                    batch = source.rows.make(batch, None if draws is None else next(draws))
                if self._change is not None:
                    batch = self._change(batch, _joined(group).indices)
                if places is not None:
                    batch = [tensor.unflatten(0, (len(group), places.samples)) for tensor in batch]
                found.append((places, batch))
            yield found if isinstance(step, Requests) else found[0][1]

    @staticmethod
    def _drawn(source: Source, requests: Sequence[Request]) -> Tensor:
        """The random draws of several batches, concatenated; each batch draws from its own seed."""
        generator = torch.Generator()
        drawn = [source.rows.draw(len(each.indices), generator.manual_seed(each.seed)) for each in requests]
        return torch.cat([draws for draws in drawn if draws is not None], 1)

    def _read(self, request: Request) -> Any:
        if self._own is not None and not self._deterministic:
            seed_process(request.seed)
            self._own.seed(request.seed)
        indices = request.indices.tolist()
        fetch = getattr(self.dataset, "__getitems__", None)
        batch = self.collate(fetch(indices) if fetch else [self.dataset[index] for index in indices])
        return batch if self._change is None else self._change(batch, request.indices)

    def _stacked(self, requests: Requests) -> list[tuple[Places, Any]]:
        """Stacked batches by batch form: for each form, the clients' positions in the stack and their stacked batch."""
        parts: list[tuple[Places, Any]] = []
        for places, alike in requests.by_size():
            if self._deterministic:
                whole = self._read(_joined(alike))
                if _has_rows(whole, len(alike) * places.samples):
                    shape = len(alike), places.samples
                    parts.append((places, apply_to_collection(whole, Tensor, Tensor.unflatten, 0, shape)))
                    continue
            for same, batch in stack_batches([self._read(request) for request in alike]):
                parts.append((Places([places.numbers[each] for each in same], places.samples), batch))
        return parts


def _joined(requests: Sequence[Request]) -> Request:
    """One request for the samples of several batches, concatenated."""
    if len(requests) == 1:
        return requests[0]
    return Request(np.concatenate([request.indices for request in requests]), requests[0].seed)


def _parts(numbers: Tensor, sizes: list[int]) -> Iterator[Tensor]:
    """Split a tensor of all samples' numbers into groups along the last dimension."""
    return iter([numbers] if len(sizes) == 1 else numbers.split(sizes, -1))


def _has_rows(batch: Any, samples: int) -> bool:
    """Whether each part of a batch is a tensor with one row per sample."""
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else [batch]
    return all(isinstance(part, Tensor) and part.ndim and len(part) == samples for part in parts)


class BatchReader:
    """Reads the requested batches, any number of times.

    They are gathered on the device that trains if their samples are kept there, and else read with the workers and
    pinned memory of the user's loader.

    Args:
        loader: The user's loader.
        requests: Returns the requests to read: a `Request` for a batch, or `Requests` for a stack of batches.
        change: As for `SeededBatches`.
        device_data: Keeps samples on the device; ``None``: batches are read in main memory.
        training: Whether the dataset is the training set, which ``data_on_device=True`` requires on the device.
    """

    def __init__(
        self,
        loader: DataLoader,
        requests: Callable[[], Iterable[Request | Requests]],
        change: Callable[[Any, np.ndarray], Any] | None = None,
        device_data: DeviceData | None = None,
        training: bool = False,
    ) -> None:
        self.batches = SeededBatches(loader.dataset, loader.collate_fn, change)
        self._requests = requests
        self._device_data = device_data
        self._training = training
        self._on_device: bool | None = None
        self._loader: DataLoader | None = None
        # Without workers and pinned memory, torch's loader would only add overhead per batch.
        self._like = loader if loader.num_workers or loader.pin_memory else None

    def read(self) -> Iterator[Any]:
        """An iterator over the batches that ``requests`` lists now.

        Raises:
            MisconfigurationException: If a training set is to be on the device and can't be.
        """
        self.batches.begin()
        data, source = self._device_data, self.batches.source
        if data is not None and self._on_device is None:
            self._on_device = data.keeps(source, self.batches.dataset if self._training else None)
        if data is not None and source is not None and self._on_device:
            return self.batches.gathered(self._requests(), data)
        if self._like is not None:
            if self._loader is None:
                asked = _EachTime(self._requests)
                self._loader = loader_like(self._like, self.batches, batch_sampler=asked, collate_fn=_unchanged)
            found: Iterator[Any] = iter(self._loader)
        elif source is not None:
            found = self.batches.gathered(self._requests())
        else:
            found = map(self.batches.__getitems__, self._requests())
        return found if data is None else data.pinned(found)

    def release(self) -> None:
        """Stop persistent workers. `read` starts new ones.

        The garbage collector would wait five seconds for each worker, if the reader is in a cycle of references.
        """
        self._loader = None


class _EachTime:
    """An iterable that calls a function for new items at each iteration."""

    def __init__(self, items: Callable[[], Iterable[Any]]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items())


def _unchanged(batch: Any) -> Any:
    return batch


def read_on_device(loader: DataLoader, data: DeviceData) -> Callable[[], None] | None:
    """Have a loader without workers gather batches on the device, if its samples are kept there and nothing is random.

    Returns:
        A function that undoes it; ``None`` if nothing was changed.
    """

    def begin() -> Callable[[list[int]], Any] | None:
        batches = SeededBatches(loader.dataset, loader.collate_fn)
        if batches.source is None or batches.draws or not data.keeps(batches.source):
            return None
        return lambda indices: next(batches.gathered([Request(np.asarray(indices), 0)], data))

    if not data.wanted or loader.batch_sampler is None:
        return None
    return read_batches_with(loader, begin)


class DiffersBetweenClients(AttributeError, TypeError):
    """Raised if a step of several clients reads an entry of the batch that is no tensor and differs between clients."""

    # An AttributeError too, because code that moves batches probes their entries for methods.


class CannotStack(MisconfigurationException):
    """Raised for batches of clients that cannot be stacked."""


class OfEachClient:
    """An entry of a stacked batch that is no tensor and differs between the clients.

    Inside the map over clients it has no value, so that all use of it is refused.

    Args:
        name: Where batches have it.
        values: Each client's.
    """

    def __init__(self, name: str, values: Sequence[Any]) -> None:
        self.name, self.values = name, tuple(values)

    def _error(self) -> Exception:
        return DiffersBetweenClients(f"it reads {self.name}, which is no tensor and differs between the clients")

    def _refuse(self, *arguments: Any, **keywords: Any) -> Any:
        raise self._error()

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __bool__ = __str__ = __format__ = _refuse
    __len__ = __iter__ = __contains__ = __getitem__ = __int__ = __float__ = __index__ = __call__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __mod__ = __rmod__ = __pow__ = __rpow__ = __floordiv__ = __rfloordiv__ = __neg__ = __array__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Refuse torch's operations on this entry."""
        given: list[OfEachClient] = []
        apply_to_collection([*arguments, *(keywords or {}).values()], cls, given.append)
        given[0]._refuse()


def batch_of(stacked: Any, place: int) -> Any:
    """One client's batch out of a stacked batch; ``place`` is the client's row."""

    def chosen(entry: Any) -> Any:
        return entry.values[place] if isinstance(entry, OfEachClient) else entry[place]

    return apply_to_collection(stacked, (Tensor, OfEachClient), chosen)


def stack_batches(batches: Sequence[Any]) -> list[tuple[list[int], Any]]:
    """Stack the tensors of batches that are equal in structure and shapes.

    An entry that is no tensor and differs between them, such as a client's name, becomes an `OfEachClient`.

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
    """A key that is equal for batches that can be stacked: their structure, and each tensor's shape and type."""
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
    # Objects of other types, such as dataclasses, are compared by their own ``==``.
    return apply_to_collection(batch, Tensor, _form_of)


def _is_sequence(entry: Any) -> bool:
    return type(entry) in (list, tuple) or (isinstance(entry, tuple) and hasattr(entry, "_fields"))


def _is_plain_data(entry: Any) -> bool:
    """Whether an entry is a string, a number or an array, or a container of such entries only."""
    if isinstance(entry, Mapping):
        return all(map(_is_plain_data, entry.values()))
    if isinstance(entry, (list, tuple, set, frozenset)):
        return all(map(_is_plain_data, entry))
    return entry is None or isinstance(entry, (str, bytes, int, float, complex, np.ndarray, np.generic))


def _stacked(entries: Sequence[Any], name: str) -> Any:
    """Stack the corresponding entries of several batches of one form."""
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
        # Arrays, for example, compare elementwise and have no single truth value.
        return False
