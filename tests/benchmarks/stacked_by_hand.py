"""Steps of a stack of clients written by hand: forward, backward and SGD of linear layers, each product in place.

The `stacked` contenders train with it. It shows what is left to gain over the library's traced and compiled steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor


class Layer(Protocol):
    """A linear layer of a stack of clients. It keeps what `backward` needs of the last `forward`."""

    def narrow(self, clients: int) -> None:
        """Leave the clients from that place on as they are."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Map ``[clients, samples, inputs]`` to ``[clients, samples, outputs]``."""

    def backward(self, gradient: Tensor, first: bool) -> Tensor:
        """Make an SGD step; return the gradient with respect to the inputs, which the first layer does not need."""


class Dense:
    """A dense weight and a bias of each client."""

    def __init__(self, weight: Tensor, bias: Tensor, clients: int, rate: float) -> None:
        self.weight, self.bias = stack(weight, clients), stack(bias, clients)
        self.rate = rate
        self.narrow(clients)

    def values(self) -> list[Tensor]:
        return [self.weight, self.bias]

    def narrow(self, clients: int) -> None:
        self._weight, self._bias = self.weight[:clients], self.bias[:clients]

    def forward(self, inputs: Tensor) -> Tensor:
        self._inputs = inputs
        return torch.baddbmm(self._bias.unsqueeze(1), inputs, self._weight.mT)

    def backward(self, gradient: Tensor, first: bool) -> Tensor:
        further = gradient if first else gradient @ self._weight
        self._weight.baddbmm_(gradient.mT, self._inputs, alpha=-self.rate)
        self._bias.sub_(gradient.sum(1), alpha=self.rate)
        return further


class LowRank:
    """A weight U Vᵀ of each client, beside a frozen one of all where there is one.

    Args:
        U: ``[outputs, rank]``.
        V: ``[inputs, rank]``.
        bias: ``[outputs]``.
        clients: Number of clients.
        rate: Learning rate.
        frozen: ``[outputs, inputs]``.
        momentum: Of SGD.
        trains_V: Whether V is trained; otherwise it is one for all clients.
    """

    def __init__(
        self,
        U: Tensor,
        V: Tensor,
        bias: Tensor,
        clients: int,
        rate: float,
        frozen: Tensor | None = None,
        momentum: float = 0.0,
        trains_V: bool = True,
    ) -> None:
        self.U, self.bias, self.frozen = stack(U, clients), stack(bias, clients), frozen
        self.V = stack(V, clients) if trains_V else V
        self.rate, self.momentum, self.trains_V = rate, momentum, trains_V
        self.velocities = [torch.zeros_like(value) for value in (self.U, self.bias)] if momentum else []
        self.narrow(clients)

    def values(self) -> list[Tensor]:
        return [self.bias, self.U, self.V]

    def narrow(self, clients: int) -> None:
        self._U, self._bias = self.U[:clients], self.bias[:clients]
        self._V = self.V[:clients] if self.trains_V else self.V
        self._velocities = [value[:clients] for value in self.velocities]

    def forward(self, inputs: Tensor) -> Tensor:
        self._inputs, self._inner = inputs, inputs @ self._V
        outputs = torch.baddbmm(self._bias.unsqueeze(1), self._inner, self._U.mT)
        return outputs if self.frozen is None else outputs.add_(inputs @ self.frozen.T)

    def backward(self, gradient: Tensor, first: bool) -> Tensor:
        inner = gradient @ self._U if self.trains_V or not first else gradient
        further = gradient
        if not first:
            further = inner @ self._V.mT
            if self.frozen is not None:
                further = further.add_(gradient @ self.frozen)
        of_bias = gradient.sum(1)
        if self._velocities:
            of_U, speed = self._velocities
            of_U.baddbmm_(gradient.mT, self._inner, beta=self.momentum)
            self._U.sub_(of_U, alpha=self.rate)
            self._bias.sub_(speed.mul_(self.momentum).add_(of_bias), alpha=self.rate)
        else:
            self._U.baddbmm_(gradient.mT, self._inner, alpha=-self.rate)
            self._bias.sub_(of_bias, alpha=self.rate)
        if self.trains_V:
            self._V.baddbmm_(self._inputs.mT, inner, alpha=-self.rate)
        return further


def stack(value: Tensor, clients: int) -> Tensor:
    return value.detach().expand(clients, *value.shape).clone()


@torch.no_grad()
def step(layers: Iterable[Layer], images: Tensor, classes: Tensor, weights: Tensor) -> Tensor:
    """Make a step of layers with ReLU between them; return each client's mean cross-entropy.

    Args:
        layers: The layers.
        images: ``[clients, samples, inputs]``.
        classes: ``[clients, samples]``.
        weights: ``[clients, samples, 1]``: one over a client's samples, and 0 for rows that fill up a smaller batch.
    """
    several = list(layers)
    active, value = [], images
    for number, layer in enumerate(several):
        value = layer.forward(value)
        if number < len(several) - 1:
            value.relu_()
            active.append(value)
    logs = torch.log_softmax(value, 2)
    picked = classes.unsqueeze(2)
    losses = -(logs.gather(2, picked) * weights).sum((1, 2))
    gradient = logs.exp_().scatter_add_(2, picked, torch.full_like(weights, -1.0)).mul_(weights)
    for number, layer in reversed(list(enumerate(several))):
        gradient = layer.backward(gradient, first=number == 0)
        if number:
            gradient.mul_(active[number - 1] > 0)
    return losses
