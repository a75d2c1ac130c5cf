"""Ditto: every client trains the global model and a personal model that is regularized towards it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_lowrank.algorithms.pfedme import pull
from lightning_lowrank.configuration import check_number
from lightning_lowrank.federated.algorithm import LocalStep, detached
from lightning_lowrank.federated.client_optimizers import fresh_state, is_shared
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.protocols import OwnSteps
from lightning_lowrank.federated.state import ClientContext, ClientInfo
from lightning_lowrank.internals.torch import copy_each

_PREFIX = "personal."


class Ditto(OwnSteps):
    r"""Fair and robust federated learning through personalization (Li et al., ICML 2021, Algorithm 1).

    On every batch a client makes a step of the module's own optimizer on the global model's copy, as in `FedAvg`, and
    then one on its personal model :math:`v_k`, which minimizes :math:`F_k(v_k) + \frac{\lambda}{2}\|v_k - w^t\|^2` with
    the model :math:`w^t` that it was sent. Each of the two has its own optimizer state and its own buffers, and the
    global model does not depend on the personal ones. Logged values are the mean over both.

    The messages are those of `FedAvg`. A client keeps its personal model, which starts as the first model that it
    receives, and is evaluated with it; a client that never took part is evaluated with the global model.

    Args:
        regularization: Strength :math:`\lambda` of the pull towards the global model, 0 or more. At 0 the personal
            models are trained alone. Default 0.1.

    Raises:
        MisconfigurationException: If ``regularization`` is out of range.

    Example:
        >>> from lightning_lowrank import Ditto, FederatedLoop, LabelCount
        >>> loop = FederatedLoop(Ditto(regularization=0.5), clients=20, partition=LabelCount(2), local_epochs=2)
    """

    def __init__(self, regularization: float = 0.1) -> None:
        check_number("regularization", regularization, least=0)
        self.regularization = regularization
        self._personal = False

    def begin(self, client: ClientContext, message: Message) -> None:
        super().begin(client, message)
        own = client.state.get("personal", {**client.base.initial_buffers, **message.tensors})
        client.round_state.update(
            {
                "received": client.base.parameters(message.tensors),
                "personal": {name: own[name].clone() for name in client.model},
            }
        )

    def before_step(self, step: LocalStep) -> None:
        if self._personal and self.regularization:
            pull(step.parameters, step.round_state["received"], self.regularization)

    def passes(self, client: ClientInfo) -> tuple[float, float]:
        """Two forward and two backward passes: the global model's copy and the personal model take a step each."""
        return 2, 2

    def local_update(self, step: LocalStep, update: Callable[[], None]) -> None:
        """Train the global model's copy, and then the personal model, on one batch.

        Between steps the personal model's moments are entries of the optimizer's own state, under prefixed names. So
        they are unstacked, saved and kept with it.
        """
        self._personal = False
        (optimizer,) = step.base.optimizers
        moments, options = _personal_moments(optimizer), [dict(group) for group in optimizer.param_groups]
        live = {**step.parameters, **step.buffers}
        personal = [step.round_state["personal"][name] for name in live]
        update()
        state = optimizer.state
        optimizer.state = fresh_state(optimizer)
        optimizer.state.update(moments)
        for group, values in zip(optimizer.param_groups, options, strict=True):
            group.update(values)
        _exchange(list(live.values()), personal)
        self._personal = True
        update()
        _exchange(list(live.values()), personal)
        for parameter, own in optimizer.state.items():
            state[parameter].update(
                {_PREFIX + name: value for name, value in own.items() if not is_shared(name, value)}
            )
        optimizer.state = state

    def end(self, client: ClientContext) -> Message:
        client.state["personal"] = detached(client.round_state["personal"])
        return super().end(client)


@torch.no_grad()
def _exchange(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    """Swap the values of two lists of tensors, in place."""
    kept = [value.clone() for value in first]
    copy_each(first, second)
    copy_each(second, kept)


def _personal_moments(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """Remove the personal model's moments from an optimizer's state, and return them without their prefix."""
    moments = {}
    for parameter, state in optimizer.state.items():
        own = {name.removeprefix(_PREFIX): state.pop(name) for name in list(state) if name.startswith(_PREFIX)}
        if own:
            # The count of steps is the same for both models, and is stored once.
            shared = {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in state.items()
                if is_shared(name, value)
            }
            moments[parameter] = {**shared, **own}
    return moments
