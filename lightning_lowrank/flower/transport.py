"""The messages between the server and its sites, on Flower's grid."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from lightning_lowrank.federated.failures import describe_error
from lightning_lowrank.flower.messages import printable
from lightning_lowrank.internals.flower import bounded_arrays, is_connection_error, is_temporary

__all__ = ["Silence", "Transport"]


@dataclass(frozen=True)
class Silence:
    """The reason for a node's missing answer, whether asking again may help, and whether its answer was bad."""

    reason: str
    passing: bool
    bad: bool = False


class Transport:
    """Sends messages to nodes and waits for their replies.

    Args:
        grid: Flower's way to the nodes.
        timeout: Seconds to wait for replies.
        poll: Seconds between two looks for replies.
    """

    def __init__(self, grid: Grid, timeout: float, poll: float) -> None:
        self._grid = grid
        self._timeout = timeout
        self._poll = poll

    def nodes(self) -> set[int]:
        """The nodes that are online."""
        return set(self._grid.get_node_ids())

    def exchange(self, requests: Mapping[int, tuple[str, RecordDict]], most: int) -> dict[int, Message | Silence]:
        """Send messages to nodes, and wait for each node's reply of at most ``most`` bytes or its `Silence`."""
        pending = self.push(requests)
        replies: dict[int, Message | Silence] = {
            node: Silence("Flower did not accept its message", passing=True)
            for node in requests.keys() - pending.values()
        }
        deadline = time.monotonic() + self._timeout
        while pending:
            late = time.monotonic() > deadline
            online = self.nodes()
            replies |= self.pull(pending, most)
            for number, node in list(pending.items()):
                if late or node not in online:
                    reason = f"it did not answer within {self._timeout:g} s" if late else "it has gone"
                    replies[node] = Silence(reason, passing=True)
                    del pending[number]
            if pending:
                time.sleep(self._poll)
        return replies

    def push(self, requests: Mapping[int, tuple[str, RecordDict]]) -> dict[str, int]:
        """Send messages to nodes; the result has the nodes by the ids of the messages that Flower accepted."""
        if not requests:
            return {}
        messages = [
            Message(content, dst_node_id=node, message_type=kind, ttl=self._timeout)
            for node, (kind, content) in requests.items()
        ]
        sent = zip(self._grid.push_messages(messages), requests, strict=True)
        return {number: node for number, node in sent if number}

    def pull(self, pending: dict[str, int], most: int) -> dict[int, Message | Silence]:
        """Fetch the replies to messages, by node, and remove them from ``pending``: a second answer is dropped.

        Each reply is fetched by itself, because a reply that Flower cannot read, or with arrays of more than ``most``
        bytes, raises an error for all replies that are fetched with it.
        """
        replies: dict[int, Message | Silence] = {}
        for number, node in list(pending.items()):
            try:
                with bounded_arrays(most):
                    found = list(self._grid.pull_messages([number]))
            except Exception as error:
                if is_connection_error(error):
                    raise
                del pending[number]
                reason = f"it sent a bad payload: {printable(describe_error(error))}"
                replies[node] = Silence(reason, passing=False, bad=True)
                continue
            for reply in found:
                # Flower itself answers for a node that has gone, with an error of its own.
                asked = reply.metadata.reply_to_message_id == number and number in pending
                if not asked or (not reply.has_error() and reply.metadata.src_node_id != node):
                    continue
                del pending[number]
                replies[node] = (
                    Silence(printable(reply.error.reason or "it failed"), passing=is_temporary(reply.error))
                    if reply.has_error()
                    else reply
                )
        return replies
