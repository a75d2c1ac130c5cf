"""The base class of federated methods: nine hooks, and the declared properties of a method.

`FederatedLoop` calls the hooks. A published method overrides those in which it differs from federated averaging, in one
short file under ``lightning_lowrank/algorithms``. Hooks that few methods need are in
`lightning_lowrank.federated.protocols`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_lowrank.arguments import Configured
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server, State, copy_into


@dataclass(frozen=True)
class LocalStep:
    """The properties of a local step that a method may read; one client makes the step, or several together.

    If clients step together every tensor has them as its first dimension, ``[clients, …]``. A method that acts on
    each number alone, and uses `expand` for values with one number per client, works in both cases.

    Args:
        base: The copy of the module that steps, its optimizers, and the state that server and clients share.
        round: Number of the round, from 0.
        clients: Ids of the clients.
        parameters: The trained parameters by name. Their ``grad`` is set in `Algorithm.before_step`.
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
        """Append dimensions to ``values``, one per client, so that they broadcast against a stack such as ``over``."""
        return values.reshape(values.shape + (1,) * (over.ndim - values.ndim)) if self.stacked else values


class CompletesModels:
    """Base of callbacks that complete a model before its evaluation, such as by computing its BatchNorm statistics."""

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
            module: Its module, with a client's own model, or with one of `UnequalClients.variants`.
            shown: Parameters and buffers of the global model, by name.
            samples: Indices of the client's training samples; ``None`` for a variant, which is all clients'.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Claims:
    """A method's declared properties, which the loop and its checks read.

    Args:
        exact: Names of tensors in messages that no channel may change, in addition to buffers and to tensors that are
            not floating-point: numbers such as counts and norms, with which the server computes. `ClientPrivacy` is
            refused for clients that send any, for its noise would change them.
        sends_changes: Whether clients send changes of their parameters, under the parameters' names, and not values.
        needs_only_mean: Whether the server's half does the same with the clients' mean in place of each message.
            `ClientPrivacy` and secure aggregation give it nothing else. ``None``: if `Algorithm.receive` is inherited.
        needs_labels: Whether the client's half reads the labels of its training samples.
        local_part: The trained part that stays with the clients, so that the global model has its initial values. A fit
            without ``personal_test`` warns.
        unprotected: The part of a client's message that the aggregator does not see as values. Robust rules are refused
            then.
        not_single_numbers: Why the aggregator's rule must go by distances between messages. Robust rules of single
            numbers are refused then.
        without_reference: Why codecs get values of the clients, and not changes: the broadcast lacks the values from
            which clients start. Codecs of the uplink that leave numbers out are refused then.
        moving_numbers: Why the numbers at the same places of a client's tensor are of other parameters in different
            messages. Error feedback of the uplink is refused then.
        trained_set_may_change: Whether other parameters may be trained from some round on, as with Lightning's
            ``BaseFinetuning``. The method then keeps nothing that is of the first round's parameters alone.
        averages_over_rounds: Whether the module's tensors may be averaged over rounds, as with Lightning's
            ``WeightAveraging``. Not if factors that hold a change are redrawn in some rounds.
        new_basis: The factors that the server derives from a decomposition in each round or some, so that the residuals
            and moments that clients keep are of an earlier basis. A fit with error feedback of the uplink or
            ``optimizer_state="keep"`` warns.
        static_batch_norm: Whether the paper trains BatchNorm with static statistics, `StaticBatchNorm`. A fit without
            it warns.
        handles_shared_memory: Whether the method itself handles two tensors in one memory, as keeping one value of both
            or refusing them.
    """

    exact: frozenset[str] = frozenset()
    sends_changes: bool = False
    needs_only_mean: bool | None = None
    needs_labels: bool = False
    local_part: str = ""
    unprotected: str = ""
    not_single_numbers: str = ""
    without_reference: str = ""
    moving_numbers: str = ""
    trained_set_may_change: bool = False
    averages_over_rounds: bool = True
    new_basis: str = ""
    static_batch_norm: bool = False
    handles_shared_memory: bool = False


class Algorithm(Configured):
    """A federated method. The base class is plain federated averaging (FedAvg).

    A method has two halves that meet only in messages. The server's half gets the `Server`, a `ClientInfo` and a
    client's message, and never a client's state. The client's half gets a `ClientContext` and the message that was
    sent to it, and never the `Server`. So a method that runs in a simulation also runs between real sites.

    Before the first round `setup` is called on each copy of the module. The order in a round: on the server
    `begin_round`; for each client `broadcast` on the server, then on the client `begin`, its training steps (each with
    `loss`, the backward pass and `before_step`) and `end`, then `receive` on the server; after the last client
    `aggregate`. Between rounds the module holds ``server.model``.

    Values that last belong in ``server.state``, ``client.state`` and ``base.state``: tensors and plain Python, which
    checkpoints and sites save. The method's own attributes hold its settings, the layers or tensors that `setup` finds
    in the module, and caches: nothing that must survive a checkpoint or reach another process, where another object of
    the method continues.

    A method that needs more than the hooks is also one of the protocols that the loop looks for: `ChangesBase`,
    `UnequalClients`, `OwnCodec`, `Personal`, `OwnSteps`.
    """

    claims: Claims = Claims()
    """The method's declared properties; ``__init__`` or `setup` may set others on the object."""

    # # Hooks on the server and on clients

    def setup(self, base: Base) -> None:
        """Check that the module and its optimizers suit the method, and find the layers or tensors that it needs.

        Called before the first round of each fit, and again when the trainer makes other optimizers, as for schedules
        of another length. Entries that ``base.state`` already has, such as a checkpoint's, get their values back
        afterwards: check for one of them before changing the module.

        Raises:
            MisconfigurationException: If the method cannot work with this module or its optimizers.
        """

    # Hooks on the server

    def begin_round(self, server: Server) -> None:
        """Prepare the content of the round's broadcasts."""

    def broadcast(self, server: Server, client: ClientInfo) -> Message:
        """The message to ``client``."""
        return Message(server.sent_down())

    def receive(self, server: Server, client: ClientInfo, message: Message, weight: float) -> None:
        """Receive the message from ``client``; ``weight`` is its share before normalisation.

        Replace tensors in ``server.state``; do not change them in place. Between real sites an error here restores
        ``server.state``, and the client counts as failed.
        """
        server.aggregator.add(message.tensors, weight)

    def aggregate(self, server: Server) -> None:
        """Fold the round's messages into ``server.model``. Called once a round, after at least one message."""
        server.update_model(server.aggregated())

    # Hooks on clients

    def begin(self, client: ClientContext, message: Message) -> None:
        """Load the message into the client's live ``model``, in place.

        Tensors with names of the module's are in the module's order; at a real site, others may be in any order.
        """
        copy_into(client.model, message.tensors)

    def loss(self, step: LocalStep, batch: Any, training_step: Callable[[], Any]) -> Any:
        """The objective of a batch: a loss, or any other value that the module's ``training_step`` may return.

        Called in each step in place of ``training_step``, which it calls. If clients step together, it is mapped
        over them: it sees the tensors of one client, and may not decide by their values. A module that optimizes
        manually ignores the result, so that a method with a ``loss`` of its own is refused for it.

        Args:
            step: The step. Inside, ``parameters``, ``buffers`` and ``round_state`` are those of one client.
            batch: The client's batch.
            training_step: Runs the module's own ``training_step`` on the batch, and returns its result.
        """
        return training_step()

    def before_step(self, step: LocalStep) -> None:
        """Change the gradients, before gradient clipping and the optimizer step.

        Not called if the optimizer makes no step: if ``training_step`` returned ``None``, or the scaler of 16-bit
        precision found gradients that are not finite.

        The ``grad`` of a parameter that the loss does not depend on may be ``None``. If clients step together, the
        first dimension of every tensor is the clients.
        """

    def end(self, client: ClientContext) -> Message:
        """The client's message at the end of its training."""
        return Message(client.base.sent_up(client.model))


def zeros_like(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zero tensors with the names and shapes of ``tensors``."""
    return {name: torch.zeros_like(value, requires_grad=False) for name, value in tensors.items()}


@torch.no_grad()
def detached(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of ``tensors`` that share neither memory nor an autograd graph with the originals."""
    return {name: value.detach().clone() for name, value in tensors.items()}
