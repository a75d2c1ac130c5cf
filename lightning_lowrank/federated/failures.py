"""Client failures and interrupts in a round: whose an error is, non-finite updates, and the required answers."""

from __future__ import annotations

import cmath
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.federated.state import Server

# Phrases in messages: torch raises most of these as a plain RuntimeError.
_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
_PACKAGE = Path(__file__).parents[1]
_OF_THE_MACHINE = (*_OF_MEMORY, "CUDA error")


class ClientsFailed(Exception):
    """Raised if clients failed; has their ids and the original ``error``."""

    def __init__(self, clients: Sequence[int], error: Exception) -> None:
        super().__init__(clients, error)
        self.clients = clients
        self.error = error


class NotFiniteError(ValueError):
    """Raised if a client's update has non-finite numbers."""


def is_client_error(error: Exception) -> bool:
    """Whether an error belongs to one client, and not to the settings, memory or the device."""
    return not isinstance(error, (MisconfigurationException, MemoryError, StopIteration)) and not any(
        sign in str(error) for sign in _OF_THE_MACHINE
    )


def is_memory_error(error: BaseException) -> bool:
    """Whether an error reports a lack of memory."""
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in _OF_MEMORY)


def is_single_sample_error(error: BaseException) -> bool:
    """Whether an error is BatchNorm's complaint about a training batch with a single sample."""
    return isinstance(error, ValueError) and "more than 1 value per channel" in str(error)


@contextmanager
def errors_of(*clients: int) -> Iterator[None]:
    """Convert an error in the code of ``clients`` to `ClientsFailed`."""
    try:
        yield
    except ClientsFailed:
        raise
    except Exception as error:
        if not is_client_error(error):
            raise
        raise ClientsFailed(clients, error) from error


def describe_error(error: Exception) -> str:
    """An error's type, message and code position, in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, NotFiniteError) or not frames:
        return str(error)
    # The user's line of code tells more than torch's lines below it.
    own = [each for each in frames if not Path(each.filename).is_relative_to(_PACKAGE) and not _is_installed(each)]
    frame = (own or frames)[-1]
    return f"{text[:300]} ({Path(frame.filename).name}:{frame.lineno})"


def _is_installed(frame: traceback.FrameSummary) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(frame.filename).parts)


def client_names(clients: Sequence[int]) -> str:
    """Clients' ids in words.

    Example:
        >>> client_names([3]), client_names([1, 4])
        ('client 3', 'clients [1, 4]')
    """
    return f"client {clients[0]}" if len(clients) == 1 else f"clients {list(clients)}"


@torch.no_grad()
def first_non_finite(tensors: Mapping[str, Tensor], allowed: Mapping[str, Tensor] | None = None) -> str | None:
    """The name of the first tensor with a non-finite number that is not allowed; ``None`` if there is none.

    If there is none, the device is synchronised once.

    Args:
        tensors: The tensors.
        allowed: Values with allowed non-finite numbers, by name, such as a mask of -inf. A number that is the same
            there, in the last dimensions, is allowed; in a tensor of another shape each is.

    Example:
        >>> first_non_finite({"w": torch.zeros(2), "v": torch.tensor([1.0, torch.inf])})
        'v'
    """
    start = allowed or {}
    checked = {name: _but_for(value.detach(), start.get(name)) for name, value in tensors.items() if _may_fail(value)}
    if not checked or _total_is_finite(map(_wide, checked.values())):
        return None
    return next((name for name, value in checked.items() if not bool(_wide(value).isfinite().all())), None)


@torch.no_grad()
def non_finite_rows(stacks: Mapping[str, Tensor], allowed: Mapping[str, Tensor] | None = None) -> dict[int, str]:
    """Rows of ``[clients, …]`` stacks with non-finite numbers, each with the name of the first such tensor.

    ``allowed`` is that of `first_non_finite`.
    """
    start = allowed or {}
    checked = {
        name: _wide(_but_for(stack.detach(), start.get(name))).reshape(len(stack), -1)
        for name, stack in stacks.items()
        if _may_fail(stack)
    }
    if not checked or _total_is_finite(checked.values()):
        return {}
    found: dict[int, str] = {}
    for name, rows in checked.items():
        for place in (~rows.isfinite().all(1)).nonzero().flatten().tolist():
            found.setdefault(place, name)
    return found


def _but_for(value: Tensor, allowed: Tensor | None) -> Tensor:
    """A value with zeros in place of its allowed non-finite numbers."""
    if allowed is None:
        return value
    value = _wide(value)
    if value.shape[value.ndim - allowed.ndim :] != allowed.shape:
        return value.nan_to_num(0, 0, 0)
    allowed = allowed.to(value)
    return value.masked_fill((value == allowed) | (value.isnan() & allowed.isnan()), 0)


def _may_fail(value: Tensor) -> bool:
    return value.numel() > 0 and (value.is_floating_point() or value.is_complex())


def _wide(value: Tensor) -> Tensor:
    # torch has no arithmetic for types of one byte.
    return value.float() if value.element_size() == 1 else value


def _total_is_finite(values: Iterable[Tensor]) -> bool:
    """Whether the sum of all numbers is finite; if so, each number is. A sum of finite numbers may overflow."""
    totals: dict[torch.device, Any] = {}
    for value in values:
        # On the CPU, adding Python numbers is faster.
        total = value.sum().item() if value.is_cpu else value.sum()
        totals[value.device] = totals.get(value.device, 0) + total
    return all(cmath.isfinite(complex(total)) for total in totals.values())


class Answers:
    """The answers and failures of a round's cohort.

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
        """Clear the previous round's answers and failures."""
        self.failed, self.answered, self._first_error, self._diverged = {}, [], None, set()

    def end_round(self) -> None:
        """Drop the first error, whose traceback keeps the failed step's tensors alive."""
        self._first_error = None

    def fail(self, client: int, error: Exception) -> None:
        """Record a client's failure."""
        self.failed[client] = describe_error(error)
        self._first_error = self._first_error or error
        if isinstance(error, NotFiniteError):
            self._diverged.add(client)

    def check_rest(self) -> None:
        """Raise if the clients that have not failed are too few for the round.

        Raises:
            MisconfigurationException: As `check`.
        """
        self.check(len(self._server.cohort) - len(self.failed))

    def check(self, count: int) -> None:
        """Raise if ``count`` answers are too few for the round.

        Raises:
            MisconfigurationException: If it does. Its cause is the first client's error.
        """
        if count < self._least:
            raise MisconfigurationException(
                f"round {self._server.round} has answers of {count} of {len(self._server.cohort)} clients and needs"
                f" min_clients={self._least}{self._reasons()}"
            ) from self._first_error

    def _reasons(self) -> str:
        """The reasons of failures, each listed once with its clients."""
        alike: dict[str, list[int]] = {}
        for client, reason in self.failed.items():
            alike.setdefault(reason, []).append(client)
        if len(alike) == 1 and len(self.failed) == len(self._server.cohort):
            return f": all of them failed alike: {next(iter(alike))}{self._remedy()}"
        reasons = "".join(f"\n  {client_names(clients)}: {reason}" for reason, clients in alike.items())
        return f".{reasons}{self._remedy()}"

    def _remedy(self) -> str:
        """Advice for diverged training, if all failures of the round are non-finite updates."""
        if not self._diverged or len(self._diverged) < len(self.failed):
            return ""
        return (
            ". Training diverged: a smaller learning rate is the usual remedy, else fewer local epochs or"
            " Trainer(gradient_clip_val=1.0)."
        )


class DeferredSignals:
    """A context that ends before an interrupt (Ctrl+C) or Slurm's signal is delivered; it may be entered again inside.

    A second signal of the kind is delivered at once. In other threads than the main one, nothing is deferred.
    """

    _KINDS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGUSR1") if hasattr(signal, name))

    def __init__(self) -> None:
        self._depth = 0
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._received: list[int] = []

    def __enter__(self) -> None:
        """Defer signals from here on."""
        self._depth += 1
        if self._depth == 1:
            self._defer()

    def __exit__(self, *error: object) -> None:
        """Deliver what was received, in the outermost context."""
        self._depth -= 1
        if self._depth == 0:
            self._deliver()

    @contextmanager
    def delivered(self) -> Iterator[None]:
        """A context inside of this one in which signals are delivered."""
        self._deliver()
        try:
            yield
        finally:
            self._defer()

    def _defer(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for kind in self._KINDS:
            handler = signal.getsignal(kind)
            if callable(handler):
                self._handlers[kind] = handler
                signal.signal(kind, self._receive)

    def _receive(self, kind: int, frame: FrameType | None) -> None:
        if kind in self._received:
            self._handlers[kind](kind, frame)
        self._received.append(kind)

    def _deliver(self) -> None:
        # Before the record is taken, because a signal may arrive meanwhile.
        for kind, handler in self._handlers.items():
            signal.signal(kind, handler)
        handlers, self._handlers = self._handlers, {}
        received, self._received = self._received, []
        for kind in dict.fromkeys(received):
            handlers[kind](kind, None)
