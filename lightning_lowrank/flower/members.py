"""The nodes that are the clients' sites, and how nodes join.

A client belongs to the first node that joined as it. A second node is refused, unless it is the same site after a
restart, which has kept its secret.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from flwr.app import Message, RecordDict
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.arguments import first_ten
from lightning_lowrank.compression import DecodingError
from lightning_lowrank.federated.failures import describe_error
from lightning_lowrank.flower.intake import limit_claims
from lightning_lowrank.flower.messages import (
    JOIN,
    NUMBERED_OTHERWISE,
    Fields,
    JoinAnswer,
    difference,
    printable,
    unpack,
)
from lightning_lowrank.flower.transport import Silence, Transport

__all__ = ["Admission", "Members"]

# Seconds until a node that was refused is asked again.
_ASK_AGAIN = 60.0


@dataclass(frozen=True)
class _Owner:
    """A client's site: its node, the digest of its secret, and what it states when it joins; see `JoinAnswer`."""

    node: int
    secret: str
    clients: int
    samples: int
    batches: int
    rank: int
    classes: str
    features: str


class Members:
    """The sites of a run, by client.

    A node that authenticates itself has the same id after each restart, which identifies its site. Any other node gets
    a new id, and its site is identified by the secret in its state file.

    Args:
        signature: `signature` of the server's module and recipe.
        clients: Number of clients, if the recipe has it. Otherwise it is the number that more than half of the joined
            sites claim, once all of these clients have joined.
        nodes: Ids of the nodes of all clients, in their order; empty: the first node that joins as a client is its
            site.
        count_bound: A site that claims more than this factor times the upper median of all sites' samples, or batches,
            counts with that median; see `limit_claims`.
        rank_limit: The largest rank that a site may state for its client; 0: none.
    """

    def __init__(
        self,
        signature: Mapping[str, Any],
        clients: int | None = None,
        nodes: Sequence[int] = (),
        count_bound: float = 10.0,
        rank_limit: int = 0,
    ) -> None:
        self.connected: dict[int, int] = {}
        """The nodes of connected sites, by client."""
        self.last_broadcast: dict[int, int] = {}
        """The last round whose broadcast each client has."""
        self.samples: list[int] = []
        self.batches: list[int] = []
        self.implausible: list[int] = []
        """Clients with implausible claims, in place of which the median counts."""
        self._signature = signature
        self._clients = clients
        self._nodes = list(nodes)
        self._count_bound = count_bound
        self._rank_limit = rank_limit
        self._owners: dict[int, _Owner] = {}

    @property
    def begun(self) -> bool:
        """Whether `begin` was called: from then on clients stay with their sites."""
        return bool(self.samples)

    def leave(self, online: Collection[int]) -> None:
        """Forget connected nodes that are no longer online."""
        self.connected = {client: node for client, node in self.connected.items() if node in online}

    def admit(self, node: int, fields: Fields) -> int | None:
        """Admit a node as the site of its client.

        Returns:
            The client if its site has lost its state, as it has fewer broadcasts than before; otherwise ``None``.

        Raises:
            DecodingError: If the node cannot take part; the message has the reason.
        """
        differs = difference(self._signature, fields)
        answer = JoinAnswer.of(fields)
        client = answer.client
        if differs:
            raise DecodingError(f"client {client}: {differs}")
        clients = self._clients or len(self.samples) or answer.clients
        if answer.clients != clients:
            raise DecodingError(
                f"it is client {client} of {answer.clients}, and the recipe has {clients} clients, from 0"
            )
        if self._nodes and (client >= len(self._nodes) or self._nodes[client] != node):
            raise DecodingError(f"client {client}: `nodes` lists another node for it")
        if answer.rank > self._rank_limit:
            most = f"at most {self._rank_limit} here" if self._rank_limit else "none of its own in this study"
            raise DecodingError(f"client {client}: it states rank {answer.rank}, and a client has {most}")
        digest = hashlib.sha256(answer.secret.encode()).hexdigest()
        stated = answer.samples, answer.batches, answer.rank, answer.classes, answer.features
        owner = _Owner(node, digest, clients, *stated)
        self._check_owner(client, owner)
        if self.begun:
            first = self._owners[client]
            for what in ("samples", "rank"):
                before, now = getattr(first, what), getattr(owner, what)
                if before != now:
                    raise DecodingError(f"client {client}: it stated {what} {before} when the run began, and now {now}")
            for what, text in NUMBERED_OTHERWISE.items():
                if getattr(first, what) != getattr(owner, what):
                    raise DecodingError(f"client {client}: its data have changed since the run began: {text}")
        self._owners[client] = owner
        self.connected[client] = node
        before, self.last_broadcast[client] = self.last_broadcast.get(client, -1), answer.last_broadcast
        return client if answer.last_broadcast < before else None

    def _check_owner(self, client: int, new: _Owner) -> None:
        """Refuse a node whose client belongs to another node, or that is already another client's site."""
        if self.begun:
            if client not in self._owners:
                raise DecodingError(f"client {client}: the study has begun without it")
            other = next(
                (each for each, owner in self._owners.items() if owner.node == new.node and each != client), None
            )
            if other is not None:
                raise DecodingError(f"client {client}: this node is the site of client {other}")
        else:
            # Before the run begins, a site may restart as another client; its earlier claim is dropped.
            for each in [each for each, owner in self._owners.items() if owner.node == new.node and each != client]:
                del self._owners[each]
                self.connected.pop(each, None)
                self.last_broadcast.pop(each, None)
        owner = self._owners.get(client)
        if owner is None or owner.node == new.node:
            return
        if not self.begun:
            if client in self.connected:
                raise DecodingError(
                    f"client {client}: another site has joined as client {client}: each needs a partition-id of its own"
                )
        # Even if the client is connected: a restarted site may join before Flower notices that it had gone.
        elif owner.secret != new.secret:
            raise DecodingError(
                f"client {client}: its site is node {owner.node}, but this node does not have that node's secret. A"
                " site whose state file is gone is recognised only if its SuperNode authenticates itself"
            )

    @property
    def expected(self) -> int:
        """The number of clients, by the recipe or by most connected sites; 0 if no site is connected."""
        stated = [self._owners[client].clients for client in self.connected]
        return self._clients or max(set(stated), key=stated.count, default=0)

    def complete(self) -> bool:
        """Whether the sites of all clients are connected."""
        most, stated = self.expected, [self._owners[client].clients for client in self.connected]
        joined = sum(client < most and self._owners[client].clients == most for client in self.connected)
        return bool(most) and joined == most and (self._clients is not None or 2 * joined > len(stated))

    def check_numbering(self) -> None:
        """Refuse to begin with sites whose data number their classes or columns of inputs differently.

        Raises:
            MisconfigurationException: If there are any; the message has the clients.
        """
        for what, text in NUMBERED_OTHERWISE.items():
            alike: dict[str, list[int]] = {}
            for client in sorted(self.connected):
                alike.setdefault(getattr(self._owners[client], what), []).append(client)
            if len(alike) > 1:
                groups = " and ".join(f"of clients {first_ten(clients)}" for clients in alike.values())
                raise MisconfigurationException(f"the data {groups} differ: {text}.")

    def begin(self, count: int, absent: Collection[int] = ()) -> None:
        """Begin the run with ``count`` clients, and fix their numbers of samples and batches; absent clients have 0."""
        self.connected = {client: node for client, node in self.connected.items() if client < count}
        known = set(range(count)) - set(absent)
        self._owners = {client: owner for client, owner in sorted(self._owners.items()) if client in known}
        for name in ("samples", "batches"):
            claims = limit_claims([getattr(owner, name) for owner in self._owners.values()], self._count_bound)
            counts = dict(zip(self._owners, claims, strict=True))
            setattr(self, name, [counts.get(client, 0) for client in range(count)])
        self.implausible = [
            client
            for client, owner in self._owners.items()
            if (owner.samples, owner.batches) != (self.samples[client], self.batches[client])
        ]

    def ranks(self) -> dict[int, int]:
        """The ranks that sites have stated, by client."""
        return {client: owner.rank for client, owner in self._owners.items() if owner.rank}

    def claimed(self, client: int) -> tuple[int, int]:
        """The numbers of samples and of batches that a client's site claims."""
        return self._owners[client].samples, self._owners[client].batches

    def state_dict(self) -> dict[str, Any]:
        """The clients' sites, and the round of the last broadcast that each received, for a restarted server."""
        owners = {client: list(astuple(owner)) for client, owner in self._owners.items()}
        return {
            "owners": owners,
            "last_broadcast": dict(self.last_broadcast),
            "begun": len(self.samples),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`'s result; no site is connected afterwards."""
        self._owners = {int(client): _Owner(*owner) for client, owner in state["owners"].items()}
        self.last_broadcast = {int(client): number for client, number in state["last_broadcast"].items()}
        self.connected = {}
        if state["begun"]:
            self.begin(state["begun"])


class Admission:
    """Asks new nodes to join as sites.

    Args:
        members: The sites of the run.
        transport: Sends the question.
        question: Returns the question's content.
        poll: Seconds between two looks for answers.
    """

    def __init__(self, members: Members, transport: Transport, question: Callable[[], RecordDict], poll: float) -> None:
        self._members, self._transport, self._question, self._poll = members, transport, question, poll
        self._known: set[int] = set()
        self._joining: dict[str, int] = {}
        self._refused: dict[int, tuple[float, str]] = {}
        # Nodes that did not answer in time; no later round waits for them.
        self._slow: set[int] = set()

    @property
    def refused(self) -> list[str]:
        """The reasons why nodes were refused."""
        return [reason for _, reason in self._refused.values()]

    def admit_all(self, wait: float = 0.0) -> set[int]:
        """Ask new nodes to join, and wait up to ``wait`` seconds for answers; later calls admit later answers.

        A node that does not answer in that time is not waited for again, so that it cannot slow each round.

        Returns:
            Clients whose sites have lost their state of earlier rounds.
        """
        online, lost = self._transport.nodes(), set[int]()
        self._members.leave(online)
        again = {node for node, (since, _) in self._refused.items() if time.monotonic() > since + _ASK_AGAIN}
        self._known = (self._known & online) - again
        self._joining = {number: node for number, node in self._joining.items() if node in online}
        unknown = sorted(online - self._known - set(self._joining.values()))
        self._joining |= self._transport.push({node: (JOIN, self._question()) for node in unknown})
        self._known |= set(self._joining.values())
        deadline = time.monotonic() + wait
        while True:
            for node, reply in self._transport.pull(self._joining, most=0).items():
                lost |= self._admit(node, reply)
            if self._slow.issuperset(self._joining.values()):
                return lost
            if time.monotonic() > deadline:
                if wait:
                    self._slow.update(self._joining.values())
                return lost
            time.sleep(self._poll)

    def _admit(self, node: int, reply: Message | Silence) -> set[int]:
        """Admit a node that has answered, or record the reason for its refusal."""
        self._refused.pop(node, None)
        try:
            if isinstance(reply, Silence):
                if reply.passing:
                    self._known.discard(node)
                    return set()
                raise DecodingError(reply.reason)
            lost = self._members.admit(node, unpack(reply)[0])
        except Exception as error:  # whatever a node says, the others continue
            message = str(error) if isinstance(error, DecodingError) else describe_error(error)
            reason = f"node {node}: {printable(message)}"
            self._refused[node] = time.monotonic(), reason
            rank_zero_warn(f"a site that asked to join is refused: {reason}")
            return set()
        if lost is None:
            return set()
        rank_zero_warn(f"the site of client {lost} has lost its state of earlier rounds: it continues as a new one.")
        return {lost}
