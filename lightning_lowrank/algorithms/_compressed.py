"""Shared parts of the methods that send some of the coordinates, or changes instead of values.

With error feedback from the server, every side holds a common copy of the model, as ``base.state["held"]``. The server
announces a compressed difference from its model to the copy, and every side adds that to the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lightning_lowrank.federated.algorithm import detached
from lightning_lowrank.federated.state import Base, Server, trained_tensors

Tensors = dict[str, Tensor]


def initial_parameters(base: Base) -> Tensors:
    """Return copies of the module's trained parameters by name."""
    return detached(base.parameters(trained_tensors(base.module)))


@torch.no_grad()
def missing(server: Server, compress: Callable[[Tensors], Tensors]) -> Tensors:
    """Return the compressed difference from the common copy to the global model."""
    return compress({name: server.model[name] - held for name, held in server.base.state["held"].items()})


@torch.no_grad()
def add_to_held(base: Base, difference: Mapping[str, Tensor]) -> None:
    """Add an announced difference to the common copy. Tensors of the copy never change in place."""
    base.state["held"] = {name: held + difference[name] for name, held in base.state["held"].items()}


@torch.no_grad()
def add_changes(server: Server, changed: Mapping[str, Tensor]) -> None:
    """Fold arrivals into the model: changes of the tensors that ``changed`` names, new values of all others."""
    arrived = server.aggregated()
    server.take({name: server.model[name] + value if name in changed else value for name, value in arrived.items()})
