"""Flower's grid within this process: every message goes through Flower's own serialisation, and no network."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity


class LocalGrid(Grid):
    """A grid of ClientApps in this process.

    ``tamper`` may change a node's reply, or return None for none at all. ``tamper_object`` may change what a node has
    written of an object of its reply, from which the server reads it.
    """

    def __init__(self) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self.nodes: dict[int, tuple[ClientApp, Context]] = {}
        self.replies: dict[str, tuple[str, dict[str, bytes]]] = {}
        self.tamper: Callable[[int, Message], Message | None] = lambda node, reply: reply
        self.tamper_object: Callable[[int, bytes], bytes] = lambda node, content: content
        self.before: Callable[[int, Message], None] = lambda node, message: None
        self.sent: list[tuple[int, str]] = []
        self._next = 100

    def start(self, app: ClientApp, run_id: int = 1, **node_config: object) -> int:
        """Connect a node, which gets a new id each time, as with Flower."""
        self._next += 1
        config = {name.replace("_", "-"): value for name, value in node_config.items()}
        self.nodes[self._next] = app, Context(run_id, self._next, config, RecordDict(), {})
        return self._next

    def set_run(self, run):
        pass

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *arguments, **keywords):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            number = f"{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = number
            node = message.metadata.dst_node_id
            self.sent.append((node, message.metadata.message_type))
            ids.append(number)
            self.before(node, message)
            if node not in self.nodes:
                continue
            app, context = self.nodes[node]
            try:
                reply = app(message_from_proto(message_to_proto(message)), context)
            except Exception as error:
                failure = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error)}:<'{error}'>")
                reply = Message(failure, reply_to=message)
            tampered = self.tamper(node, message_from_proto(message_to_proto(reply)))
            if tampered is not None:
                objects = get_all_nested_objects(tampered)
                written = {each: self.tamper_object(node, held.deflate()) for each, held in objects.items()}
                self.replies[number] = tampered.object_id, written
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [
            inflate_object_from_contents(*self.replies.pop(number)) for number in message_ids if number in self.replies
        ]
