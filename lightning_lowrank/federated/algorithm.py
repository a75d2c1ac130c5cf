"""What a federated method is: what it does at each point of a round.

`FederatedLoop` calls these methods; a published method overrides the points where it differs from federated
averaging, in one short file under ``lightning_lowrank/algorithms``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_lowrank.federated.client import Client, Server, Workspace
from lightning_lowrank.federated.payload import Payload


@dataclass(frozen=True)
class LocalStep:
    """What a method sees of a step that one client makes, or several together.

    Where clients step together every tensor has them as its first dimension, ``[clients, …]``: a method that acts on
    each number alone, and uses `spread` for what is one number per client, serves both.

    Args:
        parameters: The trained parameters by name; their ``grad`` is there in `Algorithm.before_step`.
        buffers: The persistent buffers by name; may be changed in place.
        workspace: The clients' workspaces; tensors in it may be changed in place.
        number: Number of the step, from 0 in each round.
        steps: How many steps each client makes in this round: a float64 tensor, a scalar or ``[clients]``.
        together: Whether clients step together.
    """

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    workspace: Workspace
    number: int
    steps: Tensor
    together: bool

    def spread(self, values: Tensor, over: Tensor) -> Tensor:
        """Give ``values``, one for each client, the dimensions that they need beside a stack such as ``over``."""
        return values.reshape(values.shape + (1,) * (over.ndim - values.ndim)) if self.together else values


class Algorithm:
    """One federated method. The base class is federated averaging in its plainest reading.

    The order of calls in a round: `begin_round` once; for each client `broadcast`, `begin`, the client's own training
    steps (each a `local_update`, with `before_step` in it), `end`, `receive`; then `aggregate`. Between rounds the
    module holds `global_state`.

    What the server keeps changes in `begin_round`, `receive` and `aggregate` alone, but for what the round's first
    client leaves there in its first step: several processes may train clients at the same time (see
    `ClientParallelStrategy`), and every one then makes these calls.

    A client's live values come as ``model``: the module's trained parameters and persistent buffers by name, which
    `begin` writes in place. Frozen parameters (``requires_grad=False``) are the same on every side and never sent.
    What a client needs during its steps, `begin` puts into ``client.workspace``; what it keeps for later rounds goes
    into ``client.memory``.
    """

    def setup(self, server: Server) -> None:
        """Check that the module suits the method, and draw what it needs. Called once, before the first round.

        Raises:
            MisconfigurationException: If the method cannot work on this module.
        """

    def begin_round(self, server: Server) -> None:
        """Prepare what all of the round's clients share."""

    def kind(self, server: Server, client: Client, round_number: int) -> Hashable:
        """Return what must be the same of clients that step together in a round, which is still to begin."""
        return None

    def configure(self, server: Server, client: Client | None) -> None:
        """Make what the module computes, apart from its tensors' values, that of ``client``; of the server for None.

        Called before `begin` (once for clients that step together, which are of one `kind`), and whenever the module
        becomes the global model.
        """

    def broadcast(self, server: Server, client: Client) -> Payload:
        """Return what ``client`` is sent."""
        return Payload(server.sent_down())

    def every_client_listens(self, server: Server) -> bool:
        """Return whether clients that sit this round out must hear its broadcast all the same.

        They must where it changes what every side holds. The ledger enters those bytes as ``comm/idle_down_bytes``.
        """
        return False

    def begin(self, server: Server, client: Client, payload: Payload, model: Mapping[str, Tensor]) -> None:
        """Install what ``client`` received into its live ``model``, in place."""
        install(payload.tensors, model)

    def before_step(self, server: Server, step: LocalStep) -> None:
        """Change the gradients, which are there, before they are clipped and the optimizer steps."""

    def local_update(self, server: Server, step: LocalStep, update: Callable[[], None]) -> None:
        """Train on one batch; ``update()``, which may be called several times, is a step of the user's optimizer."""
        update()

    def end(self, server: Server, client: Client, model: Mapping[str, Tensor]) -> Payload:
        """Return what ``client`` sends when its training is over."""
        return Payload(server.sent_up(model))

    def receive(self, server: Server, client: Client, payload: Payload, weight: float) -> None:
        """Take in what ``client`` sent; ``weight`` is its share before normalisation.

        Another process may have trained the client: its ``memory`` is there, its ``workspace`` is not.
        """
        server.mean.add(payload.tensors, weight)

    def aggregate(self, server: Server) -> None:
        """Fold the round's arrivals into ``server.state``. Called once a round, after at least one arrival."""
        server.state.update(server.mean.result())

    def global_state(self, server: Server) -> Mapping[str, Tensor]:
        """Return what validation, checkpoints and export see."""
        return server.state

    def personal_state(self, server: Server, client: Client) -> Mapping[str, Tensor]:
        """Return the model that ``client`` itself would use: what is evaluated on its own test data.

        That is the global model, but for what the client keeps by name as ``memory["personal"]``, and for its own
        buffers where these are local.
        """
        own = {**client.memory.get("buffers", {}), **client.memory.get("personal", {})}
        return {**self.global_state(server), **own} if own else self.global_state(server)

    def variants(self, server: Server) -> Mapping[str, Mapping[str, Tensor]]:
        """Return further global models by name, such as one for each size of client, to be evaluated beside it."""
        return {}


def leaves_alone(algorithm: Algorithm, *methods: str) -> bool:
    """Return whether an algorithm has these methods as federated averaging has them."""
    return all(getattr(type(algorithm), name) is getattr(Algorithm, name) for name in methods)


@torch.no_grad()
def install(values: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> None:
    """Copy ``values`` into the live tensors of the same names."""
    if values:
        torch._foreach_copy_([model[name] for name in values], list(values.values()))


def show_global(algorithm: Algorithm, server: Server, live: Mapping[str, Tensor]) -> None:
    """Put the global model into the live tensors."""
    algorithm.configure(server, None)
    state = algorithm.global_state(server)
    install({name: state[name] for name in live}, live)
