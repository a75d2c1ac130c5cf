"""Plans of rounds: the cohort, each client's number of batches, and the chunks of clients that step together."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.seeding import generator


@dataclass(frozen=True)
class Chunk:
    """Clients that step together; a single client if clients train one after another.

    Args:
        clients: Their ids, those with most batches first.
        batches: Number of batches of each.
    """

    clients: tuple[int, ...]
    batches: tuple[int, ...]

    @property
    def steps(self) -> int:
        """The largest number of steps among the clients."""
        return self.batches[0]

    def active(self, step: int) -> int:
        """The number of clients, from the first on, that still train at step number ``step``."""
        ascending = self._ascending
        return len(ascending) - bisect_right(ascending, step)

    def without(self, clients: Collection[int]) -> Chunk:
        """The chunk without some ``clients``."""
        kept = [pair for pair in zip(self.clients, self.batches, strict=True) if pair[0] not in clients]
        return Chunk(tuple(client for client, _ in kept), tuple(steps for _, steps in kept))

    @cached_property
    def _ascending(self) -> tuple[int, ...]:
        return self.batches[::-1]


@dataclass(frozen=True)
class RoundPlan:
    """The plan of a round: its cohort, each client's number of batches, and the chunks of clients that step together.

    Args:
        round: Number of the round, from 0.
        clients: Ids of the clients that train, ascending.
        batches: Number of batches of each.
        failed: Ids of the clients that are sent the model and never answer.
        chunks: The same clients in the order in which they train; if several processes share the round, those of
            this process.
        turns: Number of chunks of the process that has the most, one at least.
    """

    round: int
    clients: tuple[int, ...]
    batches: tuple[int, ...]
    failed: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    turns: int = 1

    def with_chunk(self, number: int, chunk: Chunk) -> RoundPlan:
        """The plan with chunk ``number`` replaced, after some of its clients failed."""
        return replace(self, chunks=(*self.chunks[:number], chunk, *self.chunks[number + 1 :]))

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The round's number of steps at the end of each chunk."""
        return tuple(accumulate(chunk.steps for chunk in self.chunks))

    def steps(self, turns: int | None = None) -> int:
        """The number of this process's steps in the first ``turns`` turns of the round; ``None``: in all turns."""
        return sum(chunk.steps for chunk in self.chunks[:turns])


def divide(batches: Mapping[int, int], processes: int) -> list[list[int]]:
    """Distribute clients over processes by load: the clients with most batches first, each to the least loaded process.

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
    """Draws the cohorts of rounds and counts their batches; a cohort depends on the round's number alone.

    Args:
        seed: Seed of the experiment.
        batches: Batches of each client of the partition in a round, an array; a client with none is never drawn.
        clients_per_round: Clients to draw, a count; at most those that can be drawn.
        sampling_weights: As for `FederatedSettings`, like `participants` and `availability`.
        failure_probability: Chance that a drawn client never answers.
        poisson: Whether each client is drawn on its own, so that a round has ``clients_per_round`` clients on average.
            A round that nobody trains in has one turn without a client.
        sampling_seed: Returns the seed by which clients are drawn, given ``seed``; by default that.
        truncate: Largest number of batches in a round (Lightning's ``fast_dev_run``).
        chunk_size: Largest number of clients that step together; 1 for one after another.
        samples: Number of samples of each client, by which clients that step together are sorted.
        group_key: Returns a client's key in a round, equal for clients that may step together; by default all may.
        process: Number of this process, from 0, among those that share a round.
        processes: Number of processes that share a round.

    Example:
        >>> plan = RoundPlanner(seed=0, batches=np.array([2, 0, 3]), clients_per_round=2).plan(0)
        >>> plan.clients, plan.batches, plan.turns
        ((0, 2), (2, 3), 2)
    """

    seed: int
    batches: np.ndarray
    clients_per_round: int
    sampling_weights: Sequence[float] | None = None
    participants: Sequence[Sequence[int]] | None = None
    availability: Sequence[float] | Callable[[int, int], float] | None = None
    failure_probability: float = 0.0
    poisson: bool = False
    sampling_seed: Callable[[int], int] | None = None
    truncate: int | None = None
    chunk_size: int = 1
    samples: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    group_key: Callable[[int, int], Hashable] = lambda client, round_number: None
    process: int = 0
    processes: int = 1

    def __post_init__(self) -> None:
        """Limit ``clients_per_round`` to the number of eligible clients."""
        object.__setattr__(self, "clients_per_round", min(self.clients_per_round, self.eligible))

    def plan(self, round_number: int, chunks: Sequence[Sequence[int]] | None = None) -> RoundPlan:
        """The plan of one round.

        ``chunks`` of a checkpoint say which clients step together: the state by which they are grouped changes
        during a round.
        """
        answering, batches, failed = self.cohort(round_number)
        count = dict(zip(answering, batches, strict=True))
        parts = []
        for clients in divide(count, self.processes):
            grouped = chunks or self._grouped(round_number, {client: count[client] for client in clients})
            parts.append([Chunk(tuple(ids), tuple(count[client] for client in ids)) for ids in grouped])
        return RoundPlan(
            round_number,
            tuple(answering),
            tuple(batches),
            tuple(failed),
            tuple(parts[self.process]),
            turns=max(1, *map(len, parts)),
        )

    def trial_chunks(self, chunk_size: int | None = None) -> tuple[Chunk, ...]:
        """Chunks for trial steps before the first round.

        They are the chunks of the first round, of all processes. If Poisson sampling draws fewer clients than a chunk
        needs, they are made of the largest clients, as many as a round has on average.

        Args:
            chunk_size: Largest number of clients of a chunk; by default that of the rounds.
        """
        size = self.chunk_size if chunk_size is None else chunk_size
        planner = replace(self, chunk_size=size, process=0, processes=1)
        plan = planner.plan(0)
        if not self.poisson or len(plan.clients) >= min(size, self.clients_per_round):
            return plan.chunks
        ids = np.flatnonzero(self._can_be_drawn())
        largest = ids[np.lexsort((ids, -self.samples[ids], -self.batches[ids]))][: self.clients_per_round]
        count = {client: int(self.batches[client]) for client in largest.tolist()}
        return tuple(
            Chunk(tuple(clients), tuple(count[client] for client in clients)) for clients in planner._grouped(0, count)
        )

    def client_steps(self, rounds: Iterable[int], group_of: Callable[[int], int], limit: int | None = None) -> int:
        """The number of optimizer steps in some rounds, counting in each the client with the most steps.

        Args:
            rounds: Their numbers; may be infinite if there is a ``limit``.
            group_of: Returns how many batches make a step in a round.
            limit: Number of steps of all chunks after which the last round is cut short.
        """
        steps, left = 0, limit
        for number in rounds:
            group = group_of(number)
            if left is None:
                steps += -(-max(self.cohort(number)[1], default=0) // group)
                continue
            made = []
            for chunk in self.plan(number).chunks:
                made.append(min(-(-chunk.steps // group), left))
                left -= made[-1]
            steps += max(made, default=0)
            if left <= 0:
                break
        return steps

    def cohort(self, round_number: int) -> tuple[list[int], list[int], list[int]]:
        """A round's training clients, their numbers of batches, and the clients that never answer."""
        drawn = self._drawn(round_number)
        answering, failed = self._answering(round_number, drawn)
        batches = self.batches[answering].tolist()
        if self.truncate is not None and answering:
            share = -(-self.truncate // len(answering))
            left, kept = self.truncate, []
            for count in batches:
                kept.append(min(count, share, left))
                left -= kept[-1]
            answering = [client for client, count in zip(answering, kept, strict=True) if count]
            batches = [count for count in kept if count]
        return answering, batches, failed

    @property
    def eligible(self) -> int:
        """Number of eligible clients: with batches, a sampling weight above 0, and a chance to be available.

        ``participants`` are the draws of some rounds: clients that they do not name count too.
        """
        return int(np.count_nonzero(self._can_be_drawn()))

    @property
    def broadcast_receivers(self) -> int:
        """Number of clients that receive broadcasts to all: the eligible ones, or those that ``participants`` names."""
        if self.participants is None:
            return self.eligible
        return len({client for clients in self.participants for client in clients})

    def _grouped(self, round_number: int, batches: Mapping[int, int]) -> list[list[int]]:
        """Group clients with equal keys and similar numbers of batches into chunks; the longest come first."""
        if self.chunk_size == 1:
            return [[client] for client in sorted(batches)]
        kinds: dict[Any, list[int]] = {}
        for client in sorted(batches, key=lambda client: (-batches[client], -self.samples[client], client)):
            kinds.setdefault(self.group_key(client, round_number), []).append(client)
        return [
            clients[start : start + self.chunk_size]
            for clients in kinds.values()
            for start in range(0, len(clients), self.chunk_size)
        ]

    def _drawn(self, round_number: int) -> list[int]:
        if self.participants is not None:
            if round_number >= len(self.participants):
                raise MisconfigurationException(
                    f"participants names the clients of {len(self.participants)} rounds, and round {round_number}"
                    " (from 0) was asked for: give more, or lower max_epochs."
                )
            return sorted(self.participants[round_number])
        eligible = self._drawable()
        if self.availability is not None:
            luck = _chances(len(self.batches), self.seed, "availability", round_number)
            eligible &= luck < self._availability_in(round_number)
        ids = np.flatnonzero(eligible)
        if not len(ids):
            raise MisconfigurationException(
                f"no client is available in round {round_number}: raise `availability` or `sampling_weights`."
            )
        seed = self.seed if self.sampling_seed is None else self.sampling_seed(self.seed)
        if self.poisson:
            chances = _chances(len(self.batches), seed, "sampling", round_number)
            return ids[chances[ids] < min(1.0, self.clients_per_round / len(ids))].tolist()
        count = min(self.clients_per_round, len(ids))
        weights = np.ones(len(ids)) if self.sampling_weights is None else np.asarray(self.sampling_weights)[ids]
        draws = generator(seed, "sampling", round_number)
        chosen = torch.multinomial(torch.from_numpy(weights.astype(np.float64)), count, generator=draws)
        return sorted(ids[chosen.numpy()].tolist())

    def _can_be_drawn(self) -> np.ndarray:
        """For each client, whether any round can draw it."""
        possible = self._drawable()
        if self.availability is not None and not callable(self.availability):
            possible &= np.asarray(self.availability) > 0
        return possible

    def _drawable(self) -> np.ndarray:
        """For each client, whether a round in which it is available can draw it."""
        drawable = self.batches > 0
        return drawable if self.sampling_weights is None else drawable & (np.asarray(self.sampling_weights) > 0)

    def _availability_in(self, round_number: int) -> Sequence[float]:
        """Each client's probability of being available in a round."""
        assert self.availability is not None
        if not callable(self.availability):
            return self.availability
        chances = []
        for client in range(len(self.batches)):
            value = self.availability(client, round_number)
            try:
                chances.append(float(value))
            except (TypeError, ValueError, RuntimeError):
                chances.append(math.nan)
            if not 0 <= chances[-1] <= 1:
                raise MisconfigurationException(
                    f"availability gave {value!r} for client {client} in round {round_number}: a function must return"
                    " a chance from 0 to 1, or True or False."
                )
        return chances

    def _answering(self, round_number: int, drawn: list[int]) -> tuple[list[int], list[int]]:
        if not self.failure_probability:
            return drawn, []
        luck = _chances(len(self.batches), self.seed, "failure", round_number)
        failed = [client for client in drawn if luck[client] < self.failure_probability]
        if len(failed) == len(drawn) and not self.poisson:
            failed.remove(max(drawn, key=luck.__getitem__))
        return [client for client in drawn if client not in failed], failed


def _chances(count: int, *parts: int | str) -> np.ndarray:
    return torch.rand(count, generator=generator(*parts), dtype=torch.float64).numpy()
