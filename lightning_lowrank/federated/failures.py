"""Clients that fail in a round: whose an error is, which updates are not numbers, and whether enough others answer."""

from __future__ import annotations

import cmath
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.federated.state import Server

# torch raises most of these as a RuntimeError.
_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
_PACKAGE = Path(__file__).parents[1]
_OF_THE_MACHINE = (*_OF_MEMORY, "CUDA error")


class ClientsFailed(Exception):
    """The clients of these ids failed, by ``error``."""

    def __init__(self, clients: Sequence[int], error: Exception) -> None:
        super().__init__(clients, error)
        self.clients = clients
        self.error = error


class NotFiniteError(ValueError):
    """A client's update holds numbers that are not finite."""


def is_of_a_client(error: Exception) -> bool:
    """Return whether an error is one client's, and not one of the settings, of memory or of the device."""
    return not isinstance(error, (MisconfigurationException, MemoryError, StopIteration)) and not any(
        sign in str(error) for sign in _OF_THE_MACHINE
    )


def is_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there is not enough memory."""
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in _OF_MEMORY)


def is_of_lone_sample(error: BaseException) -> bool:
    """Return whether an error is BatchNorm's, for a batch of one sample in training."""
    return isinstance(error, ValueError) and "more than 1 value per channel" in str(error)


@contextmanager
def turn_of(*clients: int) -> Iterator[None]:
    """Raise a `ClientsFailed` for an error of what is the clients' own."""
    try:
        yield
    except ClientsFailed:
        raise
    except Exception as error:
        if not is_of_a_client(error):
            raise
        raise ClientsFailed(clients, error) from error


def described(error: Exception) -> str:
    """Return an error's type, message and place in a line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, NotFiniteError) or not frames:
        return str(error)
    # The user's line says more than torch's below it.
    own = [each for each in frames if not Path(each.filename).is_relative_to(_PACKAGE) and not _is_installed(each)]
    frame = (own or frames)[-1]
    return f"{text[:300]} ({Path(frame.filename).name}:{frame.lineno})"


def _is_installed(frame: traceback.FrameSummary) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(frame.filename).parts)


def named(clients: Sequence[int]) -> str:
    """Return clients' ids in a few words.

    Example:
        >>> named([3]), named([1, 4])
        ('client 3', 'clients [1, 4]')
    """
    return f"client {clients[0]}" if len(clients) == 1 else f"clients {list(clients)}"


@torch.no_grad()
def not_finite(tensors: Mapping[str, Tensor], allowed: Collection[str] = ()) -> str | None:
    """Return the name of the first tensor, but for those of ``allowed``, that holds a number that is not finite.

    Where there is none, the device is synchronised once.

    Example:
        >>> not_finite({"w": torch.zeros(2), "v": torch.tensor([1.0, torch.inf])})
        'v'
    """
    checked = {name: value.detach() for name, value in tensors.items() if name not in allowed and _may_fail(value)}
    if not checked or _total_is_finite(map(_wide, checked.values())):
        return None
    return next((name for name, value in checked.items() if not bool(_wide(value).isfinite().all())), None)


@torch.no_grad()
def rows_not_finite(stacks: Mapping[str, Tensor], allowed: Collection[str] = ()) -> dict[int, str]:
    """Return those rows of ``[clients, …]`` stacks that `not_finite` would name, with the first tensor of each."""
    checked = {
        name: _wide(stack.detach()).reshape(len(stack), -1)
        for name, stack in stacks.items()
        if name not in allowed and _may_fail(stack)
    }
    if not checked or _total_is_finite(checked.values()):
        return {}
    found: dict[int, str] = {}
    for name, rows in checked.items():
        for place in (~rows.isfinite().all(1)).nonzero().flatten().tolist():
            found.setdefault(place, name)
    return found


def _may_fail(value: Tensor) -> bool:
    return value.numel() > 0 and (value.is_floating_point() or value.is_complex())


def _wide(value: Tensor) -> Tensor:
    # torch computes with no type of one byte.
    return value.float() if value.element_size() == 1 else value


def _total_is_finite(values: Iterable[Tensor]) -> bool:
    """Return whether the sum of all numbers is finite, and with it each of them; finite ones may overflow."""
    totals: dict[torch.device, Any] = {}
    for value in values:
        # On a CPU, numbers of Python's are added faster.
        total = value.sum().item() if value.is_cpu else value.sum()
        totals[value.device] = totals.get(value.device, 0) + total
    return all(cmath.isfinite(complex(total)) for total in totals.values())


class Answers:
    """Which clients of a round's cohort have answered, and why others have not.

    Args:
        server: The server, which has the round's number and cohort.
        least: Number of answers that a round needs.
    """

    def __init__(self, server: Server, least: int) -> None:
        self._server = server
        self._least = least
        self.answered: list[int] = []
        """Clients whose answers count, in the order of arrival."""
        self.failed: dict[int, str] = {}
        """Clients that failed while they trained, and why."""
        self._first_error: Exception | None = None
        self._diverged: set[int] = set()

    def begin_round(self) -> None:
        """Forget the last round's."""
        self.failed, self.answered, self._first_error, self._diverged = {}, [], None, set()

    def end_round(self) -> None:
        """Let go of the first error, whose traceback keeps the failed step alive."""
        self._first_error = None

    def fail(self, client: int, error: Exception) -> None:
        """Count a client as failed by ``error``."""
        self.failed[client] = described(error)
        self._first_error = self._first_error or error
        if isinstance(error, NotFiniteError):
            self._diverged.add(client)

    def check_rest(self) -> None:
        """Refuse a round whose clients that have not failed are too few.

        Raises:
            MisconfigurationException: As `check`.
        """
        self.check(len(self._server.cohort) - len(self.failed))

    def check(self, count: int) -> None:
        """Refuse a round of so many answers if it needs more.

        Raises:
            MisconfigurationException: If it does. Its cause is the first client's error.
        """
        if count < self._least:
            raise MisconfigurationException(
                f"round {self._server.round} has answers of {count} of {len(self._server.cohort)} clients and needs"
                f" min_clients={self._least}{self._reasons()}"
            ) from self._first_error

    def _reasons(self) -> str:
        """Why clients failed, each reason once."""
        alike: dict[str, list[int]] = {}
        for client, reason in self.failed.items():
            alike.setdefault(reason, []).append(client)
        if len(alike) == 1 and len(self.failed) == len(self._server.cohort):
            return f": all of them failed alike: {next(iter(alike))}{self._remedy()}"
        reasons = "".join(f"\n  {named(clients)}: {reason}" for reason, clients in alike.items())
        return f".{reasons}{self._remedy()}"

    def _remedy(self) -> str:
        """What helps clients that diverge, if all failures of the round are of numbers that are not finite."""
        if not self._diverged or len(self._diverged) < len(self.failed):
            return ""
        return (
            ". Training diverged: a smaller learning rate is the usual remedy, else fewer local epochs or"
            " Trainer(gradient_clip_val=1.0)."
        )
