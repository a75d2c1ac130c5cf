"""Shared parts of methods that send some of the coordinates, or changes instead of values.

With error feedback from the server, server and clients have a common copy of the model in ``base.state["shared"]``. The
server announces the compressed difference between its model and the copy, and all of them add it to the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lightning_lowrank.federated.algorithm import detached
from lightning_lowrank.federated.state import Base, Server, trained_tensors

Tensors = dict[str, Tensor]


def initial_parameters(base: Base) -> Tensors:
    """Copies of the module's trained parameters, by name."""
    return detached(base.parameters(trained_tensors(base.module)))


@torch.no_grad()
def difference_to_shared(server: Server, compress: Callable[[Tensors], Tensors]) -> Tensors:
    """The compressed difference between the global model and the copy that all parties share."""
    return compress({name: server.model[name] - value for name, value in server.base.state["shared"].items()})


@torch.no_grad()
def add_to_shared(base: Base, difference: Mapping[str, Tensor]) -> None:
    """Add the server's announced difference to the shared copy; its tensors are replaced, not changed in place."""
    base.state["shared"] = {name: value + difference[name] for name, value in base.state["shared"].items()}


@torch.no_grad()
def add_changes(server: Server, changed: Mapping[str, Tensor]) -> None:
    """Update the model by the aggregate: add the tensors named in ``changed``, and take over all others."""
    arrived = server.aggregated()
    server.update_model(
        {name: server.model[name] + value if name in changed else value for name, value in arrived.items()}
    )
