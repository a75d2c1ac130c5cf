"""What people do to layers: norms of weights, pruning, sharing, checkpointing, functions of their own."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.zoo.bases import CLASSES, FEATURES, LitClassifier, images, mlp, rows
from tests.zoo.registry import Gallery, Made

gallery = Gallery("Layers")


class StandardConv(nn.Conv2d):
    """A convolution whose weights are standardised."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = weight / (weight.flatten(1).std(1).view(-1, 1, 1, 1) + 1e-5)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


@gallery.exhibit("Weight standardisation", "a subclass of Conv2d that standardises its weights")
def standardised() -> Made:
    net = nn.Sequential(
        StandardConv(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), StandardConv(8, 8, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES),
    )  # fmt: skip
    return LitClassifier(net), images(12)


@gallery.exhibit("In-place activations", "each convolution's output changed in place")
def in_place() -> Made:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.SiLU(inplace=True), nn.Flatten(),
        nn.Linear(8 * 64, 16), nn.Hardswish(inplace=True), nn.Linear(16, CLASSES),
    )  # fmt: skip
    return LitClassifier(net, lr=0.01), images(12)


@gallery.exhibit("Spectral norm", "power iteration in buffers at each step")
def spectral() -> Made:
    net = mlp()
    for layer in (net[0], net[2]):
        parametrizations.spectral_norm(layer)
    return LitClassifier(net), rows()


@gallery.exhibit("Spectral norm by hooks", "torch's older spectral_norm")
def old_spectral() -> Made:
    net = mlp()
    for layer in (net[0], net[2]):
        nn.utils.spectral_norm(layer)
    return LitClassifier(net), rows()


@gallery.exhibit("Orthogonal weights", "a parametrization of the weight")
def orthogonal() -> Made:
    net = mlp()
    parametrizations.orthogonal(net[2])
    return LitClassifier(net), rows()


@gallery.exhibit("Weight norm by hooks", "torch's older weight_norm")
def old_weight_norm() -> Made:
    net = mlp()
    nn.utils.weight_norm(net[2])
    return LitClassifier(net), rows()


@gallery.exhibit("Pruned layers", "masks of torch.nn.utils.prune in buffers")
def pruned() -> Made:
    net = mlp()
    nn.utils.prune.l1_unstructured(net[2], "weight", amount=0.5)
    return LitClassifier(net), rows()


class LitTied(pl.LightningModule):
    """An autoencoder whose decoder is the encoder transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(FEATURES, 4)
        self.bias = nn.Parameter(torch.zeros(FEATURES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        loss = F.mse_loss(F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.T, self.bias), x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


@gallery.exhibit("Autoencoder with tied weights", "a layer's weight read and transposed elsewhere")
def tied() -> Made:
    return LitTied(), rows()


@gallery.exhibit("Shared layer", "one layer under two names")
def shared() -> Made:
    layer = nn.Linear(16, 16)
    return LitClassifier(
        nn.Sequential(nn.Linear(FEATURES, 16), layer, nn.ReLU(), layer, nn.Linear(16, CLASSES))
    ), rows()


@gallery.exhibit("Dropout", "dropout 0.3, Dropout2d")
def dropout() -> Made:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(8 * 100, 16), nn.ReLU(),
        nn.Dropout(0.3), nn.Linear(16, CLASSES),
    )  # fmt: skip
    return LitClassifier(net), images(12)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.enter, self.leave = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.leave(x)


@gallery.exhibit("Gradient checkpointing", "torch.utils.checkpoint")
def checkpointed() -> Made:
    return LitClassifier(Checkpointed()), rows()


class Rounded(torch.autograd.Function):
    """A straight-through estimator as people write it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Binary(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Rounded.apply(self.weight), self.bias)


@gallery.exhibit("Binary weights", "a torch.autograd.Function of the user's own")
def binary() -> Made:
    return LitClassifier(nn.Sequential(Binary(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))), rows()


class Experts(nn.Module):
    """Sends each sample to its best expert, in a loop over experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, 3)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chances, chosen = self.gate(x).softmax(1).max(1)
        out = x.new_zeros(len(x), CLASSES)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out[rows] = chances[rows, None] * expert(x[rows])
        return out


@gallery.exhibit("Mixture of experts", "samples chosen by nonzero(), experts without samples left out")
def experts() -> Made:
    return LitClassifier(Experts()), rows()
