"""Samples in the device's memory, from which batches are gathered, normalised and augmented there.

`RoundLoader`, `ClientEvaluation` and `WholeBatches` read by it where samples are rows of tensors. Batches are those
that the host would make, with the same draws.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from lightning_lowrank.federated.data.blocks import Request
from lightning_lowrank.internals.lightning import overridden_transfer
from lightning_lowrank.internals.torch import written

Where = Literal["device", "round", "host"]

_SHARE_OF_MEMORY = 0.25
_GUESSED_MEMORY = 4 * 2**30
# Rows whose indices are sent at once: a round's, unless it is a huge one.
_INDICES = 2**22
# Bytes of batches that are made at once, and the multiple at which a tensor of its own begins.
_BLOCK = {"cpu": (2**20, 64)}
_BLOCK_ON_DEVICES = (2**26, 512)
_BLOCKING = ("cpu", "mps")
_CONTROL_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device")


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device; a modest guess where the system does not say."""
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    module: Any = getattr(torch, device.type, None)
    if device.type != "cpu" and hasattr(module, "mem_get_info"):
        free = module.mem_get_info(device)[0]
        if hasattr(module, "memory_reserved"):
            # What torch has reserved and does not use is free as well.
            free += module.memory_reserved(device) - module.memory_allocated(device)
        return free
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    except (OSError, StopIteration):
        free = _GUESSED_MEMORY
    return min([free, *_free_in_containers(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))])


def _free_in_containers(root: Path, groups: Path) -> Iterator[int]:
    """Yield the bytes that are free in each control group of this process that has a limit, such as its container."""
    try:
        paths = [line.split(":", 2) for line in groups.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in paths:
        # Version 2 has no names of controllers. A container often sees its own group as the root.
        if controllers in ("", "memory"):
            base, names = root / controllers, _CONTROL_FILES[controllers]
            own = Path(path.lstrip("/"))
            for folder in dict.fromkeys(base / each for each in (own, *own.parents)):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    limit, used = (int((folder / name).read_text()) for name in names[:2])
                    stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    # Pages of files that are given back when memory is short.
                    yield max(0, limit - used + int(stats[names[2]]))


def is_plain(tensor: Tensor) -> bool:
    """Return whether a copy of a part of a tensor is what `torch.stack` makes of its samples."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


class Rows(Protocol):
    """How a dataset of tensors makes a batch of some rows, in three parts.

    A dataset says so by a method ``by_rows()``, which returns this, or ``None`` if it is read in another way.
    """

    @property
    def tensors(self) -> Sequence[Tensor]:
        """What samples are rows of."""

    @property
    def collates(self) -> Sequence[Callable[..., Any]]:
        """The collate functions with which a loader's batch is what `make` returns."""

    def draw(self, samples: int, generator: torch.Generator | None) -> Tensor | None:
        """Return what is drawn for a batch, int64 of shape ``[draws, samples]`` on the CPU; ``None``: nothing is."""

    def make(self, rows: Sequence[Tensor], draws: Tensor | None) -> list[Tensor]:
        """Return a batch of the gathered rows, on their device."""

    def made(self, samples: int) -> Sequence[Tensor] | None:
        """Return what `make` makes of all rows where nothing is drawn, if that is kept on the CPU.

        Args:
            samples: How many rows are about to be read.
        """


class _RowsOfTensors:
    """`Rows` of a `torch.utils.data.TensorDataset`."""

    collates = (default_collate,)

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def draw(self, samples: int, generator: torch.Generator | None) -> None:
        return None

    def make(self, rows: Sequence[Tensor], draws: Tensor | None) -> list[Tensor]:
        return list(rows)

    def made(self, samples: int) -> Sequence[Tensor]:
        return self.tensors


class Source(NamedTuple):
    """A dataset whose samples are rows of tensors.

    Args:
        rows: How batches are made of rows.
        chosen: Row of each sample, int64; ``None``: the sample's own number.
    """

    rows: Rows
    chosen: np.ndarray | None

    @property
    def draws(self) -> bool:
        """Whether something is drawn for a batch."""
        return self.rows.draw(1, torch.Generator()) is not None

    def rows_of(self, samples: np.ndarray) -> np.ndarray:
        """Return the rows of samples."""
        return samples if self.chosen is None else self.chosen[samples]


def source_of(dataset: Any, collate: Callable[..., Any]) -> Source | None:
    """Return how a dataset's batches are made of rows of tensors, through any number of `torch.utils.data.Subset`.

    Returns:
        ``None`` if its samples are not rows of tensors, or ``collate`` is not one that only puts them together.

    Example:
        >>> pairs = TensorDataset(torch.arange(4.0), torch.arange(4))
        >>> source_of(Subset(pairs, [3, 1]), default_collate).rows_of(np.array([0, 1]))
        array([3, 1])
        >>> source_of(pairs, list) is None
        True
    """
    chosen: np.ndarray | None = None
    while type(dataset) is Subset:
        outer = np.asarray(dataset.indices)
        if outer.ndim != 1 or (len(outer) and outer.dtype.kind not in "iu"):
            return None
        outer = outer.astype(np.int64)
        chosen = outer if chosen is None else outer[chosen]
        dataset = dataset.dataset
    rows: Rows | None = None
    if type(dataset) is TensorDataset:
        rows = _RowsOfTensors(dataset.tensors)
    elif hasattr(dataset, "by_rows"):
        rows = dataset.by_rows()
    if rows is None or collate not in rows.collates or not all(map(is_plain, rows.tensors)):
        return None
    if chosen is not None and len(chosen) and chosen.min() < 0:
        chosen = np.where(chosen < 0, chosen + len(rows.tensors[0]), chosen)
    return Source(rows, chosen)


class DeviceData:
    """Keeps samples on the device that trains.

    Args:
        trainer: The trainer, whose strategy has a root device.
        wanted: As ``data_on_device`` of `FederatedSettings`.
    """

    def __init__(self, trainer: Any, wanted: bool | str) -> None:
        self.trainer = trainer
        self._wanted = wanted
        self._copies: dict[int, tuple[Tensor, tuple[int, int], Tensor]] = {}

    @property
    def device(self) -> torch.device:
        """The device that trains."""
        return cast(torch.device, self.trainer.strategy.root_device)

    def forget(self) -> None:
        """Let go of all copies."""
        self._copies.clear()

    def where(self, source: Source | None) -> tuple[Where, str]:
        """Return where a dataset is kept, and why no nearer."""
        if self._wanted is False:
            return "host", "data_on_device=False"
        if source is None:
            return "host", (
                "its samples are not rows of tensors, as those of a torch.utils.data.TensorDataset with torch's own"
                " collate function and of this package's images are"
            )
        own = overridden_transfer(self.trainer, _TRANSFERS)
        if own:
            return "host", f"{own[1]}() is overridden, and takes batches to the device in its own way"
        if self._wanted is not True and self._wanted != "auto":
            return "round", "data_on_device='round'"
        if self._wanted is True:
            return "device", ""
        if self.device.type == "cpu":
            return "host", "it trains on the CPU"
        missing = sum(tensor.nbytes for tensor in source.rows.tensors if not self._is_there(tensor))
        free = free_memory(self.device) if missing else 0
        if missing <= _SHARE_OF_MEMORY * free:
            return "device", ""
        return "round", f"{missing} bytes are more than a quarter of the {free} that are free"

    def reader(
        self,
        loader: DataLoader,
        requests: Iterable[Any],
        host: Callable[[], Iterator[Any]],
        ahead: Callable[[], Sequence[np.ndarray] | None] | None = None,
    ) -> Callable[[], Iterator[Any]]:
        """Return a function that reads the batches requested by then.

        Where they are kept is decided at the first of them.

        Args:
            loader: Whose dataset and collate function are read.
            requests: What is read: a `Request` for a batch, or `Requests` for a stack of batches.
            host: Reads them on the host.
            ahead: For a training set: returns the samples of this round and those of the next, ``None`` where that is
                not known.

        Raises:
            MisconfigurationException: When it reads, if a training set is to be on the device and can't be.
        """
        found: list[_Batches | None] = []

        def read() -> Iterator[Any]:
            # The indices of a subset, or the tensors, may be others than before.
            source = source_of(loader.dataset, loader.collate_fn)
            if not found:
                where, why = self.where(source)
                if where == "host" and ahead is not None and self._wanted in (True, "round"):
                    raise MisconfigurationException(
                        f"data_on_device={self._wanted!r}: the training set {type(loader.dataset).__name__} can't be"
                        f" kept on {self.device}: {why}. Use data_on_device='auto'."
                    )
                if where == "round" and ahead is None:
                    where = "host"
                found.append(None)
                if where != "host" and source is not None:
                    pools = _Pools(source, self.device, ahead) if where == "round" and ahead is not None else None
                    found[0] = _Batches(self, source, pools)
            batches = found[0]
            if batches is None or source is None:
                return self._pinned(host())
            batches.follow(source)
            return batches.read(requests)

        return read

    def _pinned(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return batches in pinned memory where copies from it go on beside the host's work."""
        if self.device.type != "cuda":
            return batches
        return (apply_to_collection(batch, Tensor, _pinned) for batch in batches)

    def _is_there(self, tensor: Tensor) -> bool:
        known = self._copies.get(id(tensor))
        return tensor.device == self.device or (known is not None and known[1] == written(tensor))

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device: itself, or a copy that is made anew if the tensor has been written to."""
        if tensor.device == self.device:
            return tensor
        if not self._is_there(tensor):
            # The tensor is held, so that no other has its id.
            self._copies[id(tensor)] = tensor, written(tensor), tensor.to(self.device)
        return self._copies[id(tensor)][2]

    def slices(self, source: Source, part: slice) -> list[Tensor]:
        """Return a batch of samples that follow each other."""
        tensors = [self.copy_of(tensor) for tensor in source.rows.tensors]
        if source.chosen is None:
            return source.rows.make([tensor[part].clone() for tensor in tensors], None)
        index = sent(torch.from_numpy(source.chosen[part]), self.device)
        return source.rows.make([gather(tensor, index) for tensor in tensors], None)


class _Part(NamedTuple):
    """The batches of one size of a step: their clients' places in the stack, and the clients; or one batch alone."""

    places: Any
    clients: int
    samples: int


class _Batches:
    """Makes batches on the device. A round's indices and draws are sent at once, and several batches made at once."""

    def __init__(self, data: DeviceData, source: Source, pools: _Pools | None) -> None:
        self._data, self._source, self._pools = data, source, pools
        self._most, self._aligned = _BLOCK.get(data.device.type, _BLOCK_ON_DEVICES)
        # Bytes of a sample, and those of each part in which numbers are rounded; unknown before the first batch.
        self._sample = 0
        self._rounded: list[int] = []

    def follow(self, source: Source) -> None:
        """Read from what the dataset holds now."""
        known = self._source.rows.tensors, source.rows.tensors
        if len(known[0]) == len(known[1]) and all(one is two for one, two in zip(*known, strict=True)):
            # These hold what they have sent to the device themselves.
            source = source._replace(rows=self._source.rows)
        self._source = source
        if self._pools is not None:
            self._pools.source = source

    def read(self, requests: Iterable[Any]) -> Iterator[Any]:
        """Return an iterator over batches, all of which are requested in advance."""
        steps: list[Any] = []
        rows = 0
        for step in requests:
            steps.append(step)
            rows += _samples_of(step)
            if rows >= _INDICES:
                yield from self._read(steps)
                steps, rows = [], 0
        yield from self._read(steps)

    def _read(self, steps: Sequence[Any]) -> Iterator[Any]:
        if not steps:
            return
        parts: list[_Part] = []
        flat: list[Request] = []
        counts: list[int] = []
        for step in steps:
            divided = [(None, [step])] if isinstance(step, Request) else step.by_size()
            counts.append(len(divided))
            for places, alike in divided:
                parts.append(_Part(places, len(alike), len(alike[0].indices)))
                flat += alike
        rows = self._source.rows_of(np.concatenate([request.indices for request in flat]))
        tensors, rows = self._kept(rows)
        device = self._data.device
        index, draws = sent(torch.from_numpy(rows), device), self._draws(flat)
        made = self._made(parts, tensors, index, None if draws is None else sent(draws, device))
        for step, count in zip(steps, counts, strict=True):
            yield next(made)[1] if isinstance(step, Request) else [next(made) for _ in range(count)]

    def _kept(self, rows: np.ndarray) -> tuple[list[Tensor], np.ndarray]:
        """Return tensors on the device, and where the rows are in them."""
        if self._pools is not None:
            return self._pools.holding(rows)
        return [self._data.copy_of(tensor) for tensor in self._source.rows.tensors], rows

    def _draws(self, requests: Sequence[Request]) -> Tensor | None:
        draw, generator = self._source.rows.draw, torch.Generator()
        drawn = [draw(len(request.indices), generator.manual_seed(request.seed)) for request in requests]
        return None if drawn[0] is None else torch.cat(cast(list[Tensor], drawn), 1)

    def _made(
        self, parts: Sequence[_Part], tensors: Sequence[Tensor], index: Tensor, draws: Tensor | None
    ) -> Iterator[tuple[Any, list[Tensor]]]:
        starts = [0, *accumulate(part.clients * part.samples for part in parts)]
        first = 0
        while first < len(parts):
            after = self._end_of_block(starts, first)
            chosen = slice(starts[first], starts[after])
            gathered = [gather(tensor, index[chosen]) for tensor in tensors]
            whole = self._source.rows.make(gathered, None if draws is None else draws[:, chosen])
            sizes = [part.clients * part.samples for part in parts[first:after]]
            self._sample = sum(tensor.nbytes for tensor in whole) // sum(sizes)
            self._rounded = [tensor.nbytes // sum(sizes) for tensor in whole if tensor.dtype.is_floating_point]
            # Unlike other slices, these count what is written in place each for itself.
            cut = zip(*(tensor.unsafe_split_with_sizes(sizes) for tensor in whole), strict=True)
            for part, batch in zip(parts[first:after], [whole] if len(sizes) == 1 else cut, strict=True):
                stacked = part.places is not None
                form = (part.clients, part.samples)
                yield part.places, [tensor.unflatten(0, form) if stacked else tensor for tensor in batch]
            first = after

    def _end_of_block(self, starts: Sequence[int], first: int) -> int:
        """Return after which part a block ends whose parts begin where memory of their own would."""
        after = first + 1
        while self._sample and after < len(starts) - 1:
            begins = starts[after] - starts[first]
            large = (starts[after + 1] - starts[first]) * self._sample > self._most
            if large or any(begins * nbytes % self._aligned for nbytes in self._rounded):
                break
            after += 1
        return after


class _Pool(NamedTuple):
    rows: np.ndarray
    """Ascending."""
    of: list[tuple[int, int]]
    """What the tensors were that they are copies of."""
    tensors: list[Tensor]
    ready: Any
    """The event after which the copies are done, where they go on beside other work."""


class _Pools:
    """The rows of a round's clients on the device, of which the next round's are sent while a round goes on."""

    def __init__(self, source: Source, device: torch.device, ahead: Callable[[], Sequence[np.ndarray] | None]) -> None:
        self.source, self._device, self._ahead = source, device, ahead
        self._thread = ThreadPoolExecutor(1, "next round's samples")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._present: _Pool | None = None
        self._next: Future[_Pool] | None = None

    def holding(self, rows: np.ndarray) -> tuple[list[Tensor], np.ndarray]:
        """Return tensors that have these rows, and the rows' places in them."""
        rounds = self._ahead()
        if not self._has(self._present, rows):
            pool, self._next = None if self._next is None else self._next.result(), None
            if not self._has(pool, rows):
                known = rows if rounds is None else self.source.rows_of(rounds[0])
                pool = self._sent(np.unique(known if _all_in(rows, np.unique(known)) else rows))
            self._present = pool
        pool = cast(_Pool, self._present)
        if pool.ready is not None:
            present = torch.cuda.current_stream(self._device)
            present.wait_event(pool.ready)
            for tensor in pool.tensors:
                tensor.record_stream(present)
        if self._next is None and rounds is not None and len(rounds) > 1:
            self._next = self._thread.submit(self._sent, np.unique(self.source.rows_of(rounds[1])))
        return pool.tensors, np.searchsorted(pool.rows, rows)

    def _has(self, pool: _Pool | None, rows: np.ndarray) -> bool:
        return pool is not None and pool.of == self._written() and _all_in(rows, pool.rows)

    def _written(self) -> list[tuple[int, int]]:
        return [written(tensor) for tensor in self.source.rows.tensors]

    def _sent(self, rows: np.ndarray) -> _Pool:
        of = self._written()
        index = torch.from_numpy(rows)
        chosen = [tensor.index_select(0, index.to(tensor.device)) for tensor in self.source.rows.tensors]
        if self._stream is None:
            return _Pool(rows, of, [sent(tensor, self._device) for tensor in chosen], None)
        with torch.cuda.stream(self._stream):
            tensors = [sent(tensor, self._device) for tensor in chosen]
            return _Pool(rows, of, tensors, self._stream.record_event())


def _samples_of(step: Any) -> int:
    return len(step.indices) if isinstance(step, Request) else sum(len(request.indices) for request in step)


def _all_in(rows: np.ndarray, pool: np.ndarray) -> bool:
    """Return whether rows are in an ascending pool."""
    if not len(pool):
        return not len(rows)
    places = np.minimum(np.searchsorted(pool, rows), len(pool) - 1)
    return bool((pool[places] == rows).all())


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type != "cpu" or tensor.is_pinned() else tensor.pin_memory()


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; a copy from the host goes on beside the host's work, where the device can."""
    if device.type == "cuda":
        tensor = _pinned(tensor)
    return tensor.to(device, non_blocking=device.type not in _BLOCKING)


def gather(tensor: Tensor, rows: Tensor) -> Tensor:
    """Select rows; an embedding lookup, where possible, is several times faster than index_select."""
    if tensor.ndim > 1 and tensor.is_floating_point() and not tensor.requires_grad:
        return torch.nn.functional.embedding(rows, tensor.flatten(1)).unflatten(1, tensor.shape[1:])
    return tensor.index_select(0, rows)
