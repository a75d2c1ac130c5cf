"""What of the server a site must know, and how it keeps up with that from broadcasts alone.

In a simulation the hooks of an `Algorithm` that run on a client read the one `Server` that there is. A site has a
server object of its own. It begins as the server's does, because the recipe and its seed are the same on every side,
and `Replica.follow` brings it up to date with what each broadcast holds: the same deterministic function that the
server applied. A method whose clients read what no broadcast tells them cannot run on sites, and is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank import algorithms
from lightning_lowrank.compression import Codec, DenseCodec
from lightning_lowrank.federated.algorithm import Algorithm
from lightning_lowrank.federated.client import Client, Server

Tensors = Mapping[str, Tensor]


def _sent_densely(algorithm: Algorithm, server: Server, client: Client) -> Codec:
    return DenseCodec()


@dataclass(frozen=True)
class Replica:
    """How sites follow one method's server.

    Args:
        follow: Brings a site's server up to date with the tensors of one broadcast. It is called once for each
            broadcast that the site hears, in the order of rounds, before `Algorithm.begin`; ``server.state`` holds the
            module's values by then.
        codec: Returns the codec with which a broadcast to ``client`` in round ``server.round`` is decoded; by default
            a `DenseCodec`.
        lasting: Whether what ``follow`` makes builds on what it made before, so that a site must keep it from round to
            round, the frozen weights included.
        objection: Returns why an algorithm of this class, with its arguments, cannot run on sites all the same; an
            empty string where it can.
    """

    follow: Callable[[Any, Server, Tensors], None]
    codec: Callable[[Any, Server, Client], Codec] = _sent_densely
    lasting: bool = False
    objection: Callable[[Any], str] = lambda algorithm: ""


_REPLICAS: dict[type[Algorithm], Replica] = {}


def register(method: type[Algorithm], replica: Replica) -> None:
    """Let a method of your own run on sites.

    Methods are looked up by their very class: a subclass may send something else, and is registered for itself.

    Args:
        method: The class of the method.
        replica: How sites follow it. `take_state` is enough for methods whose hooks on clients (`Algorithm.begin`,
            `Algorithm.end` and those of steps) read nothing of the server but its seed and round.

    Example:
        >>> from lightning_lowrank import FedAvg
        >>> class FedAvgOnThursdays(FedAvg): ...
        >>> register(FedAvgOnThursdays, Replica(take_state))
        >>> replica_of(FedAvgOnThursdays()).lasting
        False
    """
    _REPLICAS[method] = replica


def replica_of(algorithm: Algorithm) -> Replica:
    """Return how sites follow ``algorithm``.

    Raises:
        MisconfigurationException: If they cannot.
    """
    name = type(algorithm).__name__
    replica = _REPLICAS.get(type(algorithm))
    if replica is None:
        known = ", ".join(sorted(method.__name__ for method in _REPLICAS))
        raise MisconfigurationException(
            f"{name} cannot run across sites: its clients read what only the server knows, or nobody has said how a"
            f" site follows its broadcasts. These can: {known}. For a method of your own, call"
            " lightning_lowrank.flower.replica.register(), in a module that the recipe names."
        )
    objection = replica.objection(algorithm)
    if objection:
        raise MisconfigurationException(f"this {name} cannot run across sites: {objection}")
    return replica


@torch.no_grad()
def take_state(algorithm: Algorithm, server: Server, sent: Tensors) -> None:
    """Take over the global values that a broadcast holds whole."""
    for name, value in sent.items():
        if name in server.state and server.state[name].shape == value.shape:
            server.state[name] = value.clone()


def _take_state_and_reset(algorithm: algorithms.FedMUD, server: Server, sent: Tensors) -> None:
    take_state(algorithm, server, sent)
    server.memory.pop("reset", None)
    if "seed" in sent:
        algorithm.reset(server, sent)


@torch.no_grad()
def _add_difference(algorithm: algorithms.EF21P, server: Server, sent: Tensors) -> None:
    parameters = server.parameters(server.state)
    held = server.memory.get("held") or {name: value.clone() for name, value in parameters.items()}
    server.memory["held"] = {name: value + sent[name] for name, value in held.items()}


def _top_of_difference(algorithm: algorithms.EF21P, server: Server, client: Client) -> Codec:
    server.memory.setdefault("difference", {})
    return algorithm.broadcast(server, client).codec


def _of_fedlora(algorithm: algorithms.FedLoRA) -> str:
    operator = algorithm.operator
    if operator.changes_base or operator.redraws:
        return f"{operator!r} changes the base weight, which a site does not follow yet."
    if operator.trained(0) != operator.trained(1):
        return f"what {operator!r} sends depends on when a site last heard, which the server of a real run is not told."
    if algorithm.upload_ranks:
        return "with upload_ranks the shape of what a site sends is the site's choice, and could not be checked."
    return ""


def _remember_initial(algorithm: algorithms.RandomCoordinates, server: Server, sent: Tensors) -> None:
    algorithm.begin_round(server)


def _random_coordinates(algorithm: algorithms.RandomCoordinates, server: Server, client: Client) -> Codec:
    return algorithm.broadcast(server, client).codec


for _method in (
    algorithms.FedAvg,
    algorithms.FedAvgM,
    algorithms.FedAdam,
    algorithms.FedYogi,
    algorithms.FedProx,
    algorithms.FedNova,
    algorithms.SCAFFOLD,
    algorithms.FedBN,
    algorithms.FedPer,
    algorithms.Ditto,
    algorithms.PFedMe,
    algorithms.LocalTraining,
):
    register(_method, Replica(take_state))
register(algorithms.FedMUD, Replica(_take_state_and_reset, lasting=True))
register(algorithms.EF21P, Replica(_add_difference, _top_of_difference, lasting=True))
register(algorithms.RandomCoordinates, Replica(_remember_initial, _random_coordinates))
register(algorithms.FedLoRA, Replica(take_state, objection=_of_fedlora))
