"""Position of a federated run, saved in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Progress:
    """The position of a federated run: round, chunk, and number of steps.

    Args:
        round: Number of the round, from 0; -1 before the first.
        chunk: Number of the round's chunks that are done.
        round_open: Whether the round has begun and has not been aggregated.
        chunk_open: Whether a chunk of clients is training.
        client_steps: Number of batches that clients have been trained on in all rounds before this one, and in this
            one by this process.
        client_steps_before: Their number when the round began.
        processes: Number of processes that share the run.
    """

    round: int = -1
    chunk: int = 0
    round_open: bool = False
    chunk_open: bool = False
    client_steps: int = 0
    client_steps_before: int = 0
    processes: int = 1

    def begin(self, number: int) -> None:
        """Move to the start of a round."""
        self.round, self.chunk = number, 0

    def state_dict(self) -> dict[str, Any]:
        """The position as plain Python."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        vars(self).update(state)
