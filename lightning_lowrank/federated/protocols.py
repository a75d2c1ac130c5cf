"""Five protocols for methods that need more than the hooks of `Algorithm`.

A method inherits from them, ``class FedMUD(ChangesBase)``, and overrides some hooks; the defaults are those of
federated averaging. ``ChangesBase.of(algorithm)`` is the method itself, or a method of these defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import Self

from lightning_lowrank.compression import Codec
from lightning_lowrank.federated.algorithm import Algorithm, Claims, LocalStep
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server, State


class _Protocol(Algorithm):
    @classmethod
    def of(cls, algorithm: Algorithm) -> Self:
        """``algorithm`` itself if it implements this protocol; otherwise an object with the protocol's defaults."""
        return algorithm if isinstance(algorithm, cls) else cls()


class ChangesBase(_Protocol):
    """A method that changes frozen weights or ``base.state``, or that redraws the factors of its trained tensors.

    Frozen parameters and ``base.state`` are the same on the server and all clients. The server calls `announce`, and
    server and clients make the change in `update_base`, also clients outside the cohort.
    """

    @property
    def announces(self) -> bool:
        """Whether the server may call `announce`, in any round. By default if `update_base` is overridden."""
        return not inherits(self, "update_base")

    def announce(self, server: Server, update: Mapping[str, Tensor]) -> None:
        """Have `update_base` called with ``update`` everywhere: on the server now, at sites with the next broadcast.

        That broadcast carries the tensors to all clients, also to those outside the cohort. A lossy downlink encodes
        them once, and the server too uses the decoded tensors. Called at most once a round.
        """
        server.announcement = dict(server.transmit(update)) if update else {}
        if update:
            self.update_base(server.base, server.announcement)

    def update_base(self, base: Base, message: Mapping[str, Tensor]) -> None:
        """Change the frozen weights or ``base.state`` by an announcement.

        Called once for each announcement and each copy of the base: on the server by `announce`, on a real site with
        the tensors of each broadcast, in the order of rounds, also of rounds that it sits out.
        """

    def reference(self, base: Base, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Reference values that server and client know; codecs encode a client's message as a difference from them.

        They are the values from which a client's training starts: the received tensors, and redrawn factors in
        ``base.state``. Channels that lose something send differences from them.
        """
        return received

    def drawn_in(self, name: str, round_number: int) -> int:
        """The latest round for which the opposite factor of a message's tensor was redrawn; 0 if it never was.

        Error feedback forgets losses of this tensor in earlier rounds, and with ``optimizer_state="keep"`` a client
        forgets the moments of a parameter of this name: for the new factors or subspace those numbers have no meaning.

        Args:
            name: The tensor's name.
            round_number: The round of the message.
        """
        return 0

    def fixed_in_round(self, round_number: int) -> frozenset[str]:
        """Names of trained parameters that do not move in a round, because `before_step` drops their gradients."""
        return frozenset()


class UnequalClients(_Protocol):
    """A method whose clients train different parts of the model, or models of different rank or width."""

    def group_key(self, client: ClientInfo) -> Hashable:
        """A key that must be equal for clients that step together in the round ``client.round``."""
        return None

    def configure(self, base: Base, client: ClientInfo | None) -> None:
        """Configure the module's computation, apart from tensor values, for ``client``; ``None``: for the server.

        Called before `begin` (once for clients that step together, whose `group_key` is one), and whenever the module
        becomes the global model.
        """

    def in_own_form(self, client: ClientInfo, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The part of ``values`` that ``client`` has, in the form in which its training starts, such as its own rank.

        Called with the results of `ChangesBase.reference`, `OwnCodec.reference` and `OwnCodec.upload_origin`.
        """
        return values

    def model_for(self, server: Server, client: ClientInfo) -> Mapping[str, Tensor]:
        """The global model in the form in which ``client`` would receive it."""
        return server.model

    def has_full_model(self, server: Server, client: ClientInfo, state: State) -> bool:
        """Whether a client's personal model is the global model with some tensors replaced by the client's own.

        `load_dense` builds such models from a checkpoint, and refuses other clients. ``state`` is the client's state.
        """
        return inherits(self, "model_for", "personal_model")

    def variants(self, server: Server) -> Mapping[str, Mapping[str, Tensor]]:
        """Further global models for evaluation, by name, such as one for each size of client."""
        return {}

    def computed(self, base: Base, client: ClientInfo) -> Mapping[str, float]:
        """The share of each parameter that takes part in ``client``'s computation; 1 if not listed. For `SystemModel`.

        In a simulation a client that has a part of the network computes with all of it, the rest being zero.
        """
        return {}

    def rank_limit(self, module: nn.Module) -> int:
        """The largest rank that a site may choose for itself; 0 if sites may not choose."""
        return 0

    def set_rank(self, client: int, rank: int) -> None:
        """Set the rank that a client's site chose. Called before `setup`.

        Raises:
            MisconfigurationException: If clients cannot have ranks of their own.
        """
        raise _no_ranks(self, client, rank)


class OwnCodec(_Protocol):
    """A method with an encoding of its own: its messages have a `Message.codec`, and do not hold values of the model.

    Args:
        encodes_values: Whether clients send values, and not changes. These are not sent as differences, so that a codec
            of the uplink that leaves numbers out would set them to zero.
    """

    encodes_values: bool = False

    def downlink(self, base: Base) -> Codec | None:
        """The codec that decodes the method's broadcasts; ``None`` if they need none."""
        return None

    def reference(self, base: Base, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The reference values of a client's message; tensors that are changes themselves have none."""
        return received

    def upload_origin(
        self, base: Base, model: Mapping[str, Tensor], received: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """The values for which a client's message minus them is the client's change; by default `reference`.

        Attacks, robust rules, `ClientPrivacy` and a server of sites measure changes by them. Tensors that are changes
        themselves have none.

        Args:
            base: The copy of the module, and the state that server and clients share.
            model: The global model, as far as clients are sent it.
            received: What the client received.
        """
        return self.reference(base, {**model, **received})


class Personal(_Protocol):
    """A method whose clients have personal models, or states that the server relies on.

    Tensors that a client keeps as ``client.state["personal"]`` need no protocol: they take the places of the global
    model's of the same names when the client is evaluated.
    """

    def personal_model(self, client: ClientContext, model: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The client's personal model, given the server's model for the client."""
        own = {**client.state.get("buffers", {}), **client.state.get("personal", {})}
        return {**model, **own} if own else model

    def state_template(self, server: Server, client: ClientInfo) -> State:
        """A template of the ``state`` of a client at a real site, as far as `begin` and `end` need it.

        A server tries the client's half to learn the form of a client's message. Only names, shapes and types matter.
        By default that is the state of a client that has never trained. If a broadcast leaves out tensors that the
        client received earlier, the template contains these tensors.
        """
        return {}

    def note_answer(self, server: Server, client: ClientInfo) -> None:
        """Record in ``server.state`` that a client has received its broadcast and answered.

        Called for each answer, also if `Algorithm.receive` is later called with the mean alone, as by `ClientPrivacy`.
        A client that fails continues with its state from before the round, and is not recorded.
        """

    def forget(self, server: Server, client: ClientInfo) -> None:
        """Handle the loss of a site's ``state``: the client continues as a new one."""


class OwnSteps(_Protocol):
    """A method that makes its local steps itself, or whose steps need several forward and backward passes."""

    def local_update(self, step: LocalStep, update: Callable[[], None]) -> None:
        """Train on one batch; each call of ``update()`` is a step of the user's optimizer.

        `Algorithm.loss` and `Algorithm.before_step` are called in each ``update()``.
        """
        update()

    def passes(self, client: ClientInfo) -> tuple[float, float]:
        """The numbers of forward and backward passes per batch of ``client``. For `SystemModel`."""
        return 1, 1


PROTOCOLS: tuple[type[Algorithm], ...] = (ChangesBase, UnequalClients, OwnCodec, Personal, OwnSteps)


def inherits(algorithm: Algorithm, *methods: str) -> bool:
    """Whether an algorithm overrides none of these hooks."""

    def default(name: str) -> Any:
        return next(getattr(kind, name) for kind in (Algorithm, *PROTOCOLS) if hasattr(kind, name))

    return all(getattr(type(algorithm), name, default(name)) is default(name) for name in methods)


def check_protocols(algorithm: Algorithm) -> None:
    """Refuse a method with a protocol's hook but not the protocol, or with an attribute in place of a claim.

    Raises:
        MisconfigurationException: If the loop would never look at it.
    """
    kind = type(algorithm)
    for claim in fields(Claims):
        if hasattr(kind, claim.name):
            raise MisconfigurationException(
                f"{kind.__name__}.{claim.name} is a claim of a method: set claims = Claims({claim.name}=...)."
            )
    homes: dict[str, list[type[Algorithm]]] = {}
    for protocol in PROTOCOLS:
        for name in vars(protocol):
            if not name.startswith("_"):
                homes.setdefault(name, []).append(protocol)
    for name, protocols in homes.items():
        if hasattr(kind, name) and not isinstance(algorithm, tuple(protocols)):
            wanted = " or ".join(protocol.__name__ for protocol in protocols)
            raise MisconfigurationException(
                f"{kind.__name__}.{name} has the name of a hook of {wanted}, which {kind.__name__} is not: write class"
                f" {kind.__name__}({wanted}, ...), or give it another name."
            )


def needs_only_mean(algorithm: Algorithm) -> bool:
    """Whether a method's server half only needs the mean of the clients' messages."""
    claimed = algorithm.claims.needs_only_mean
    return inherits(algorithm, "receive") if claimed is None else claimed


def reference(
    algorithm: Algorithm, base: Base, client: ClientInfo, received: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """A client's reference values; codecs encode its message as a difference from them."""
    found = received
    if isinstance(algorithm, (ChangesBase, OwnCodec)):
        found = algorithm.reference(base, received)
    elif algorithm.claims.sends_changes:
        found = {name: value for name, value in received.items() if name in base.initial_buffers}
    return UnequalClients.of(algorithm).in_own_form(client, found)


def upload_origin(
    algorithm: Algorithm,
    base: Base,
    client: ClientInfo,
    model: Mapping[str, Tensor],
    received: Mapping[str, Tensor],
) -> Mapping[str, Tensor]:
    """The reference values for the change in a client's message; see `OwnCodec.upload_origin`."""
    if isinstance(algorithm, OwnCodec):
        return UnequalClients.of(algorithm).in_own_form(client, algorithm.upload_origin(base, model, received))
    return reference(algorithm, base, client, {**model, **received})


def state_rank(algorithm: Algorithm, client: int, rank: int) -> None:
    """Set the rank that a client's site chose.

    Raises:
        MisconfigurationException: If clients of the method cannot have ranks of their own.
    """
    if not isinstance(algorithm, UnequalClients):
        raise _no_ranks(algorithm, client, rank)
    algorithm.set_rank(client, rank)


def _no_ranks(algorithm: Algorithm, client: int, rank: int) -> MisconfigurationException:
    return MisconfigurationException(
        f"rank={rank} was stated for client {client}, and {type(algorithm).__name__} has no ranks of clients."
    )
