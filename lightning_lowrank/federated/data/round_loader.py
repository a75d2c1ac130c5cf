"""The training loader of a fit in place of the user's loader: a round's batches.

`RoundData` makes one `RoundLoader` for each user's loader; executions iterate over it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_lowrank.federated.data.batches import BatchReader, Request, Requests
from lightning_lowrank.federated.data.device import DeviceData
from lightning_lowrank.federated.data.indices import ClientIndices
from lightning_lowrank.federated.data.lengths import group_by_length
from lightning_lowrank.federated.data.loader_checks import lengths_of, weights_of
from lightning_lowrank.federated.data.planner import Chunk, RoundPlan
from lightning_lowrank.federated.data.sampling import poisson_sample, rate_of
from lightning_lowrank.federated.randomness import StepRandomness, step_seed
from lightning_lowrank.seeding import derive_seed, generator


class RoundLoader:
    """The training loader of a federated experiment: a round's batches, client after client.

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
            `LengthGroupedSampler` the samples of a pass that the round reads are put into batches of similar length.
            With a `torch.utils.data.WeightedRandomSampler` as many are drawn with replacement, by their weights.
        stacked: Whether a batch is that of a whole chunk: for each batch size the clients' places in the chunk and
            their batches, stacked.
        poisson: Returns the seed by which each of a client's samples is in a batch on its own, so that batches have the
            loader's size on average. If none is drawn, the batch has the client's first sample in its place; see
            `drawn`. ``None``: batches are of one size.
        change: As for `SeededBatches`.
        device_data: Keeps samples on the device that trains; ``None``: batches are read on the host.
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
        self._loader, self._change = loader, change
        self._reader = BatchReader(loader, self.requests, change, device_data, training=True)
        self.batches = self._reader.batches

    def __iter__(self) -> Iterator[Any]:
        reading: list[Iterator[Any]] = []

        def read(seed: int) -> Any:
            # A seed of its own, so that reading and training draw different numbers.
            self._randomness.open(derive_seed(seed, "read") if self._randomness.has_device else None)
            if not reading:
                reading.append(self._reader.read())
            try:
                batch = next(reading[0])
            except Exception as error:
                reading.clear()
                if self._loader.num_workers:
                    # torch's frames and the error refer to each other, and would keep the iterator and its workers.
                    traceback.clear_frames(error.__traceback__)
                raise
            self._randomness.seed(seed)
            return batch

        # A map rather than a generator, which would end after an error in the dataset.
        return map(read, self._seeds())

    def release(self) -> None:
        """Stop persistent workers, as does `BatchReader.release`."""
        self._reader.release()

    def _seeds(self) -> Iterator[int]:
        """Iterate over the seeds of the round's remaining steps."""
        # A generator, because Lightning calls iter() more often than it iterates: nothing may start before the first
        # batch.
        plan = self._plan()
        for chunk, steps in self._remaining(plan):
            seed = derive_seed(self._seed, "training", plan.round, chunk.clients[0])
            for step in steps:
                yield step_seed(seed, step)

    def requests(self) -> Iterator[Request | Requests]:
        """Iterate over the requests of the round's batches from the current position on."""
        plan = self._plan()
        for chunk, steps in self._remaining(plan):
            if self.stacked:
                yield from islice(self._chunk_requests(plan.round, chunk), steps.start, None)
            else:
                (client,) = chunk.clients
                yield from islice(self._client_requests(plan.round, client, chunk.steps), steps.start, None)

    def read(self, chunk: Chunk, round_number: int, steps: int) -> tuple[list[Any], list[Any]]:
        """The first batches of clients that step together, and the first batch of each client alone.

        They are read outside any round. There are fewer than ``steps`` if the clients have fewer.
        """
        requests = list(islice(self._chunk_requests(round_number, chunk), steps))
        wanted: list[Request | Requests] = [*requests, *requests[0][:steps]]
        try:
            found = [self.batches.__getitems__(each) for each in wanted]
        except Exception:
            if not self._loader.num_workers:
                raise
            # Some datasets can be read by worker processes only.
            found = list(BatchReader(self._loader, lambda: wanted, self._change).read())
        return found[: len(requests)], found[len(requests) :]

    def _chunk_requests(self, round_number: int, chunk: Chunk) -> Iterator[Requests]:
        """Iterate over the steps of a chunk: the requests of the clients that are still active."""
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
        """The unfinished chunks, with their remaining steps."""
        position = self._position()
        return [
            (chunk, range(max(0, position - (end - chunk.steps)), chunk.steps))
            for chunk, end in zip(plan.chunks, plan.ends, strict=True)
            if position < end
        ]

    def drawn(self, round_number: int, client: int, step: int) -> np.ndarray:
        """The samples that Poisson sampling draws for a batch; there may be none."""
        assert self._poisson is not None
        samples = np.asarray(self._clients[client])
        rate = rate_of(len(samples), self.batch_size)
        return poisson_sample(samples, rate, self._poisson(), "poisson", round_number, client, step)

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
