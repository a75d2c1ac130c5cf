"""What a federated method is: what it does on the server, and what it does on a client.

`FederatedLoop` calls these methods. A published method overrides the points where it differs from federated averaging,
in one short file under ``lightning_lowrank/algorithms``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_lowrank.aggregation import Aggregator, RobustRule
from lightning_lowrank.arguments import Configured
from lightning_lowrank.compression import Codec
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server, State, copy_into


@dataclass(frozen=True)
class LocalStep:
    """What a method sees of a step that one client makes, or several together.

    Where clients step together every tensor has them as its first dimension, ``[clients, …]``. A method that acts on
    each number alone, and uses `expand` for what is one number per client, serves both.

    Args:
        base: The copy of the module that steps, its optimizers, and what every side holds.
        round: Number of the round, from 0.
        clients: Ids of the clients.
        parameters: The trained parameters by name. Their ``grad`` is there in `Algorithm.before_step`.
        buffers: The persistent buffers by name; may be changed in place.
        round_state: The clients' `ClientContext.round_state`; tensors in it may be changed in place.
        number: Number of the step, from 0 in each round.
        steps: How many steps each client makes in this round: a float64 tensor on the CPU, a scalar or
            ``[clients]``.
        stacked: Whether clients step together.
    """

    base: Base
    round: int
    clients: tuple[int, ...]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    round_state: State
    number: int
    steps: Tensor
    stacked: bool

    def expand(self, values: Tensor, over: Tensor) -> Tensor:
        """Give ``values``, one for each client, the dimensions that they need beside a stack such as ``over``."""
        return values.reshape(values.shape + (1,) * (over.ndim - values.ndim)) if self.stacked else values


class CompletesModels:
    """Base of callbacks that complete a model, such as by its BatchNorm statistics, before it is evaluated."""

    def complete(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        shown: Mapping[str, Tensor],
        samples: Tensor | None,
    ) -> None:
        """Complete the model whose weights are in the module.

        Args:
            trainer: The trainer, in validation or test.
            module: Its module, with a client's own model, or with one of `Algorithm.variants`.
            shown: Parameters and buffers of the global model, by name.
            samples: Indices of the client's training samples; ``None`` for a variant, which is all clients'.
        """
        raise NotImplementedError


class Algorithm(Configured):
    """One federated method. The base class is federated averaging in its plainest form.

    A method has two halves that meet only in messages. The server's half gets the `Server`, a `ClientInfo` and a
    client's message, and never what a client keeps. The client's half gets a `ClientContext` and the message that was
    sent to it, and never the `Server`. So a method that runs in a simulation also runs between real sites.

    The order of calls in a round: on the server `begin_round`; for each client `broadcast` on the server, then on the
    client `begin`, its training steps (each a `local_update`, with `loss` and `before_step` in it) and `end`, then
    `receive` on the server; after the last client `aggregate`. Between rounds the module holds `global_model`.

    Frozen parameters (``requires_grad=False``) and ``base.state`` are the same on every side. A method that changes
    them calls `announce` on the server, and does the change in `update_base`, which every side calls with what was
    announced.
    """

    exact: frozenset[str] = frozenset()
    """Names of tensors in messages that no channel may change, beside buffers and whatever is not floating-point.

    They are numbers such as counts and norms, with which the server computes. `ClientPrivacy` is refused for clients
    that send any, since its noise would change them.
    """

    follows_trained: bool = False
    """Whether other parameters may be trained from some round on, as Lightning's ``BaseFinetuning`` makes it.

    That is so where nothing that the method keeps, or finds in `setup`, is of the first round's parameters alone.
    """

    needs_labels: bool = False
    """Whether the client's half reads the labels of its training samples."""

    handles_shared_memory: bool = False
    """Whether the method itself keeps or refuses two tensors that lie in one memory; see `checks.check_memory`."""

    static_batch_norm: bool = False
    """Whether the paper trains BatchNorm with static statistics, `StaticBatchNorm`; a fit without it warns."""

    encodes_values: bool = False
    """Whether clients send values, and not changes, in a codec of the method's own.

    No differences are taken of these, so that a codec of the uplink that leaves numbers out would set them to zero.
    """

    local_part: str = ""
    """What is trained and stays with the clients, so that the global model has it as it began; `setup` may set it."""

    unprotected: str = ""
    """What of a client's message does not pass the aggregator as values; robust rules are refused then."""

    @property
    def averages_over_rounds(self) -> bool:
        """Whether the module's tensors may be averaged over rounds, as Lightning's ``WeightAveraging`` does it.

        They may not where factors that hold a change are drawn anew from round to round.
        """
        return True

    @property
    def needs_only_mean(self) -> bool:
        """Whether the server's half does the same if it gets the clients' mean in place of each of their messages.

        Then single messages may stay unknown to it, as with `ClientPrivacy`. By default that is so where `receive` only
        adds messages to the aggregator.
        """
        return inherits(self, "receive")

    def unstepped(self, round_number: int) -> frozenset[str]:
        """Return names of trained parameters that do not move in a round, since `before_step` drops their gradients."""
        return frozenset()

    # Every side

    def setup(self, base: Base) -> None:
        """Check that the module suits the method, and find what it needs there.

        Called once, before the first round; in a process that resumes from a checkpoint, before its first round.
        ``base.state`` is then the checkpoint's, of which every entry keeps its value.

        Raises:
            MisconfigurationException: If the method cannot work on this module.
        """

    def setup_optimizers(self, base: Base) -> None:
        """Check that the module's optimizers suit the method, and find what it needs there.

        Called after `setup`, and again when the trainer sets up other ones: for a further fit, or for schedules of
        another length.

        Raises:
            MisconfigurationException: If the method cannot work with these optimizers.
        """

    def check_clients(self, clients: int) -> None:
        """Check what was given by clients' ids, as there are so many clients. Called after `setup`.

        Raises:
            MisconfigurationException: If it does not suit them.
        """

    def rank_limit(self, module: nn.Module) -> int:
        """Return the largest rank that a client may have in this module; 0 if clients cannot have their own."""
        return 0

    def set_rank(self, client: int, rank: int) -> None:
        """Give a client the rank that its site states. Called before `setup`.

        Raises:
            MisconfigurationException: If clients cannot have ranks of their own.
        """
        raise MisconfigurationException(
            f"rank={rank} was stated for client {client}, and {type(self).__name__} has no ranks of clients."
        )

    def group_key(self, client: ClientInfo) -> Hashable:
        """Return what must be equal for clients that step together in the round ``client.round``."""
        return None

    def configure(self, base: Base, client: ClientInfo | None) -> None:
        """Make what the module computes, apart from its tensors' values, that of ``client``; of the server for None.

        Called before `begin` (once for clients that step together, whose `group_key` is one), and whenever the module
        becomes the global model.
        """

    def update_base(self, base: Base, message: Mapping[str, Tensor]) -> None:
        """Change what every side holds, the frozen weights or ``base.state``, by what the server announced.

        Called once for each announcement and each copy of the base: on the server by `announce`, on a real site with
        the tensors of each broadcast that it hears, in the order of rounds, those of rounds that it sits out included.
        """

    @property
    def announces(self) -> bool:
        """Whether the server may announce changes of what every side holds, in any round."""
        return type(self).update_base is not Algorithm.update_base

    def downlink(self, base: Base) -> Codec | None:
        """Return a codec that decodes the method's broadcasts, where these come with one of its own."""
        return None

    def reference(self, base: Base, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return values that server and client both know and from which the client's message differs little.

        Channels that lose something send differences from them. By default they are what the client received.
        """
        return received

    def upload_origin(
        self, base: Base, model: Mapping[str, Tensor], received: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Return the values from which a client's message differs by what the client has changed.

        Attacks, robust rules, `ClientPrivacy` and a server of sites measure changes by them. Tensors that are changes
        themselves have none. By default they are `reference`.

        Args:
            base: What every side holds.
            model: The global model, as far as clients are sent it.
            received: What the client received.
        """
        return self.reference(base, {**model, **received})

    def drawn_in(self, name: str, round_number: int) -> int:
        """Return the round before which what a message's tensor multiplies was drawn or found anew; 0: never.

        Error feedback forgets what of this tensor was lost in earlier rounds, and with ``optimizer_state="keep"`` a
        client forgets the moments of a parameter of this name: in the new factors or subspace those numbers would mean
        something else.

        Args:
            name: The tensor's name.
            round_number: The round of the message.
        """
        return 0

    # The server's half

    def check_aggregator(self, rule: Aggregator) -> None:
        """Check that a rule can aggregate what clients send. Called after `setup`.

        Raises:
            MisconfigurationException: If it can't, or would not protect all of it.
        """
        if self.unprotected and isinstance(rule, RobustRule):
            raise MisconfigurationException(
                f"{type(self).__name__} and aggregator={rule!r} do not go together: {self.unprotected}, which a robust"
                " rule cannot protect. Use a method that averages what clients send, such as FedAvg or FedMUD, or leave"
                " out aggregator."
            )

    def origin(self, server: Server, client: ClientInfo) -> Mapping[str, Tensor]:
        """Return the values from which what is added to the aggregator differs little, by its names.

        Tensors that are changes themselves have none. By default it is `upload_origin` of ``client``, one of the
        cohort, as if the broadcast had arrived exactly.
        """
        received = {**self.broadcast(server, client).tensors, **server.announcement}
        return self.upload_origin(server.base, server.sent_down(), received)

    def begin_round(self, server: Server) -> None:
        """Prepare what all of the round's clients are sent."""

    def announce(self, server: Server, update: Mapping[str, Tensor]) -> None:
        """Have every side call `update_base` with ``update``: the server now, sites with the next broadcast.

        The tensors travel with that broadcast to all clients, also to those that sit the round out. A lossy downlink
        encodes them once, and the server too takes them as they are decoded. Called at most once a round.
        """
        server.announcement = dict(server.transmit(update)) if update else {}
        if update:
            self.update_base(server.base, server.announcement)

    def broadcast(self, server: Server, client: ClientInfo) -> Message:
        """Return what ``client`` is sent, apart from the server's announcement, which the loop adds."""
        return Message(server.sent_down())

    def receive(self, server: Server, client: ClientInfo, message: Message, weight: float) -> None:
        """Take in what ``client`` sent; ``weight`` is its share before normalisation.

        Tensors in ``server.state`` are replaced, not changed in place: where this raises an error, between real sites,
        ``server.state`` becomes what it was, and the client counts as failed.
        """
        server.aggregator.add(message.tensors, weight)

    def aggregate(self, server: Server) -> None:
        """Fold the round's arrivals into ``server.model``. Called once a round, after at least one arrival."""
        server.take(server.aggregated())

    def global_model(self, server: Server) -> Mapping[str, Tensor]:
        """Return what validation, checkpoints and export see."""
        return server.model

    def model_for(self, server: Server, client: ClientInfo) -> Mapping[str, Tensor]:
        """Return the global model as ``client`` would be given it, by default `global_model`."""
        return self.global_model(server)

    def has_whole_model(self, server: Server, client: ClientInfo, state: State) -> bool:
        """Return whether a client's own model is the global one with the client's own tensors in their places.

        Checkpoints hold these and no other model of a client: `load_dense` refuses other clients. By default it is so
        where neither `model_for` nor `personal_model` is overridden. ``state`` is what the client keeps.
        """
        return inherits(self, "model_for", "personal_model")

    def variants(self, server: Server) -> Mapping[str, Mapping[str, Tensor]]:
        """Return further global models by name, such as one for each size of client, to be evaluated beside it."""
        return {}

    def stand_in(self, server: Server, client: ClientInfo) -> State:
        """Return what `begin` and `end` need of the ``state`` of a client that is elsewhere.

        A server tries the client's half to learn the form of the message that ``client`` is to send. Only names, shapes
        and types matter. By default that is the state of a client that has never taken part. Where a broadcast leaves
        out what the client has received earlier, it is that.
        """
        return {}

    def forget(self, server: Server, client: ClientInfo) -> None:
        """Take note that a client, which is elsewhere, has lost its ``state`` and goes on as one that is new.

        A method whose server relies on what clients keep lets go of it here. By default there is nothing to do.
        """

    def upload_limits(self, base: Base, client: ClientInfo) -> Mapping[str, tuple[int, ...]]:
        """Return the largest shapes of those tensors that ``client`` sends in shapes of its own choice, by name.

        A server refuses what has another shape than `end` would give it. Of the tensors that are named here, no
        dimension may be larger; `receive` has to check the rest, and raises `ValueError` for what it cannot take.
        """
        return {}

    # What a client's steps cost, for `SystemModel`

    def passes(self, client: ClientInfo) -> tuple[float, float]:
        """Return how many forward and backward passes a training step of ``client`` takes; by default one of each."""
        return 1, 1

    def computed(self, base: Base, client: ClientInfo) -> Mapping[str, float]:
        """Return with what share of each parameter ``client`` computes; with all of those that are not named.

        In a simulation a client that has a part of the network computes with all of it, the rest being zero.
        """
        return {}

    # The client's half

    def begin(self, client: ClientContext, message: Message) -> None:
        """Install what the client received into its live ``model``, in place.

        The message has the names of the module's tensors in the module's order. A real site gets others in any order.
        """
        copy_into(client.model, message.tensors)

    def loss(self, step: LocalStep, batch: Any, training_step: Callable[[], Any]) -> Any:
        """Return the objective of a batch: a loss, or what the module's ``training_step`` may return.

        Called in each step in place of ``training_step``, which it calls. Where clients step together, it is mapped
        over them: it sees the tensors of one client, and may not decide by their values. A module that optimizes
        manually ignores what is returned, so that a method with a ``loss`` of its own is refused there.

        Args:
            step: The step. Inside, ``parameters``, ``buffers`` and ``round_state`` are those of one client.
            batch: The client's batch.
            training_step: Runs the module's own ``training_step`` on the batch, and returns what it returns.
        """
        return training_step()

    def before_step(self, step: LocalStep) -> None:
        """Change the gradients, which are there, before they are clipped and the optimizer steps."""

    def local_update(self, step: LocalStep, update: Callable[[], None]) -> None:
        """Train on one batch; ``update()``, which may be called several times, is a step of the user's optimizer."""
        update()

    def end(self, client: ClientContext) -> Message:
        """Return what the client sends when its training is over."""
        return Message(client.base.sent_up(client.model))

    def personal_model(self, client: ClientContext, model: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the model that the client itself would use, given the server's `model_for` it.

        By default that is ``model``, but for what the client keeps by name as ``state["personal"]``, and for its own
        buffers where these are local.
        """
        own = {**client.state.get("buffers", {}), **client.state.get("personal", {})}
        return {**model, **own} if own else model


def inherits(algorithm: Algorithm, *methods: str) -> bool:
    """Return whether an algorithm has all of these methods as federated averaging has them."""
    return all(getattr(type(algorithm), name) is getattr(Algorithm, name) for name in methods)


@torch.no_grad()
def detached(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors that share neither memory nor a graph with them."""
    return {name: value.detach().clone() for name, value in tensors.items()}
