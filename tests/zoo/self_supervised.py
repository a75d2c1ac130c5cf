"""Self-supervised methods, with the two views of a picture in the data set."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.bases import TOTAL, draws, images, tensors
from tests.zoo.registry import Gallery, Made

gallery = Gallery("Self-supervised methods")

FEATURES = 16


def encoder(norm: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8) if norm else nn.GroupNorm(2, 8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, FEATURES),
    )  # fmt: skip


def mlp(before: int = FEATURES, after: int = FEATURES, norm: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Linear(before, 32), nn.BatchNorm1d(32) if norm else nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, after)
    )


def views() -> Any:
    chance = draws()
    pictures = torch.randn(TOTAL, 3, 16, 16, generator=chance)
    return tensors(*(pictures + 0.3 * torch.randn(TOTAL, 3, 16, 16, generator=chance) for _ in range(2)))


class LitViews(pl.LightningModule):
    """The optimizer over all parameters that train, as most of these have it."""

    lr = 0.02

    def configure_optimizers(self) -> Any:
        parameters = [value for value in self.parameters() if value.requires_grad]
        return torch.optim.SGD(parameters, lr=self.lr, momentum=0.9, weight_decay=1e-4)


class LitSimCLR(LitViews):
    def __init__(self, temperature: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder, self.projector = encoder(), mlp()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = F.normalize(self.projector(self.encoder(torch.cat(batch))), dim=-1)
        similarity = z @ z.T / self.hparams.temperature
        itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
        similarity = similarity.masked_fill(itself, float("-inf"))
        positive = itself.roll(shifts=len(z) // 2, dims=0)
        loss = (torch.logsumexp(similarity, -1) - similarity.masked_fill(~positive, 0).sum(-1)).mean()
        self.log("train_loss", loss)
        return loss


@gallery.exhibit("SimCLR", "both views in one batch, negatives masked")
def simclr() -> Made:
    return LitSimCLR(), views()


class LitIndexedSimCLR(LitSimCLR):
    """Lightning's own tutorial, which indexes with boolean masks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self.projector(self.encoder(torch.cat(batch)))
        similarity = F.cosine_similarity(z[:, None, :], z[None, :, :], dim=-1)
        itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
        similarity.masked_fill_(itself, -9e15)
        positive = itself.roll(shifts=len(z) // 2, dims=0)
        similarity = similarity / self.hparams.temperature
        loss = (-similarity[positive] + torch.logsumexp(similarity, dim=-1)).mean()
        self.log("train_loss", loss)
        return loss


@gallery.exhibit("SimCLR of the tutorial", "indexing with a boolean mask, filling in place")
def indexed_simclr() -> Made:
    return LitIndexedSimCLR(), views()


class LitBYOL(LitViews):
    """The teacher is frozen by ``requires_grad_(False)`` and follows after each batch."""

    def __init__(self, momentum: float = 0.9) -> None:
        super().__init__()
        self.momentum = momentum
        self.online = nn.Sequential(encoder(), mlp())
        self.predictor = mlp()
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = batch
        loss = torch.zeros((), device=self.device)
        for student, teacher in ((first, second), (second, first)):
            with torch.no_grad():
                goal = self.target(teacher)
            loss = loss - F.cosine_similarity(self.predictor(self.online(student)), goal, dim=-1).mean()
        self.log("train_loss", loss)
        return loss

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for ours, theirs in zip(self.online.parameters(), self.target.parameters(), strict=True):
            theirs.data.mul_(self.momentum).add_(ours.data, alpha=1 - self.momentum)


@gallery.exhibit("BYOL", "a teacher that follows after each batch, in ema_parameters", ema=("target",))
def byol() -> Made:
    return LitBYOL(), views()


class LitMoCo(LitViews):
    """The queue of negatives and its pointer are buffers, the key encoder follows inside the step."""

    def __init__(self, size: int = 16, momentum: float = 0.9) -> None:
        super().__init__()
        self.momentum = momentum
        self.query = encoder()
        self.key = copy.deepcopy(self.query)
        for value in self.key.parameters():
            value.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(FEATURES, size), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def follow(self) -> None:
        for ours, theirs in zip(self.query.parameters(), self.key.parameters(), strict=True):
            theirs.data = theirs.data * self.momentum + ours.data * (1 - self.momentum)

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        pointer, size = int(self.pointer), self.queue.shape[1]
        places = (pointer + torch.arange(len(keys))) % size
        self.queue[:, places] = keys.T
        self.pointer[0] = (pointer + len(keys)) % size

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = batch
        q = F.normalize(self.query(first), dim=1)
        with torch.no_grad():
            self.follow()
            k = F.normalize(self.key(second), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=self.device))
        self.enqueue(k)
        self.log("train_loss", loss)
        return loss


@gallery.exhibit("MoCo", "a queue in buffers, the key encoder replaced in the step, in ema_parameters", ema=("key",))
def moco() -> Made:
    return LitMoCo(), views()


class LitDINO(LitViews):
    """A teacher in evaluation mode, its centre in a buffer, the last layer weight-normalised."""

    def __init__(self, classes: int = 8, momentum: float = 0.9) -> None:
        super().__init__()
        self.momentum = momentum
        head = nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, classes, bias=False))
        self.student = nn.Sequential(encoder(norm=False), mlp(norm=False), head)
        self.teacher = copy.deepcopy(self.student)
        self.teacher.requires_grad_(False)
        self.register_buffer("centre", torch.zeros(1, classes))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = batch
        with torch.no_grad():
            goals = [self.teacher(view) for view in (first, second)]
        sharp = [F.softmax((goal - self.centre) / 0.04, dim=-1) for goal in goals]
        loss = torch.zeros((), device=self.device)
        for view, goal in ((first, sharp[1]), (second, sharp[0])):
            loss = loss - (goal * F.log_softmax(self.student(view) / 0.1, dim=-1)).sum(-1).mean() / 2
        with torch.no_grad():
            self.centre = self.centre * 0.9 + torch.cat(goals).mean(0, keepdim=True) * 0.1
        self.log("train_loss", loss)
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            for ours, theirs in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                theirs.data.mul_(self.momentum).add_((1 - self.momentum) * ours.detach().data)


@gallery.exhibit(
    "DINO", "a centre in a buffer that is replaced, weight norm, a teacher in ema_parameters", ema=("teacher",)
)
def dino() -> Made:
    return LitDINO(), views()


class LitSimSiam(LitViews):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor = nn.Sequential(encoder(), mlp()), mlp()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = [self.encoder(view) for view in batch]
        p = [self.predictor(each) for each in z]
        loss = -0.5 * sum(F.cosine_similarity(a, b.detach(), dim=-1).mean() for a, b in ((p[0], z[1]), (p[1], z[0])))
        self.log("train_loss", loss)
        self.log("train_collapse", torch.std(F.normalize(z[0], dim=-1), dim=0).mean())
        return loss


@gallery.exhibit("SimSiam", "stopped gradients, two batch normalisations a step")
def simsiam() -> Made:
    return LitSimSiam(), views()


class LitBarlow(LitViews):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(encoder(), mlp())
        self.norm = nn.BatchNorm1d(FEATURES, affine=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = (self.norm(self.encoder(view)) for view in batch)
        correlation = first.T @ second / len(first)
        on = torch.diagonal(correlation).add(-1).pow(2).sum()
        off = correlation.flatten()[:-1].view(FEATURES - 1, FEATURES + 1)[:, 1:].flatten().pow(2).sum()
        loss = on + 5e-3 * off
        self.log("train_loss", loss)
        return loss


@gallery.exhibit("Barlow Twins", "a diagonal taken by views, normalisation without weights")
def barlow() -> Made:
    return LitBarlow(), views()


class LitVICReg(LitBarlow):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = (self.encoder(view) for view in batch)
        loss = 25 * F.mse_loss(first, second)
        for z in (first, second):
            loss = loss + 25 * F.relu(1 - torch.sqrt(z.var(0) + 1e-4)).mean()
            covariance = torch.cov(z.T)
            loss = loss + covariance.fill_diagonal_(0).pow(2).sum() / FEATURES
        self.log("train_loss", loss)
        return loss


@gallery.exhibit("VICReg", "covariances, a diagonal filled in place")
def vicreg() -> Made:
    return LitVICReg(), views()


class LitSwAV(LitViews):
    """Prototypes that are normalised before each batch, codes by three iterations of Sinkhorn and Knopp."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(encoder(), mlp())
        self.prototypes = nn.Linear(FEATURES, 6, bias=False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.prototypes.weight.copy_(F.normalize(self.prototypes.weight.data.clone(), dim=1))

    @torch.no_grad()
    def codes(self, scores: Tensor) -> Tensor:
        q = torch.exp(scores / 0.5).T
        q /= q.sum()
        for _ in range(3):
            q /= q.sum(1, keepdim=True) * q.shape[0]
            q /= q.sum(0, keepdim=True) * q.shape[1]
        return (q * q.shape[1]).T

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = [self.prototypes(F.normalize(self.encoder(view), dim=1)) for view in batch]
        goals = [self.codes(each.detach()) for each in scores]
        loss = -sum((goal * F.log_softmax(each / 0.1, 1)).sum(1).mean()
                    for goal, each in zip(goals, reversed(scores), strict=True)) / 2  # fmt: skip
        self.log("train_loss", loss)
        return loss


@gallery.exhibit("SwAV", "a weight normalised in place before each batch")
def swav() -> Made:
    return LitSwAV(), views()


class LitMAE(pl.LightningModule):
    """A masked autoencoder, the mask drawn for each picture."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(FEATURES, 2, 32, dropout=0.0, batch_first=True)
        self.embed, self.encoder = nn.Linear(3 * 16, FEATURES), nn.TransformerEncoder(layer, 1)
        self.rebuild = nn.Linear(FEATURES, 3 * 16)
        self.hidden = nn.Parameter(torch.zeros(1, 1, FEATURES))
        self.places = nn.Parameter(0.02 * torch.randn(1, 16, FEATURES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = F.unfold(batch[0], 4, stride=4).mT
        order = torch.rand(x.shape[:2], device=x.device).argsort(1)
        back, kept = order.argsort(1), order[:, :8]
        tokens = self.embed(x) + self.places
        tokens = self.encoder(tokens.gather(1, kept[..., None].expand(-1, -1, FEATURES)))
        tokens = torch.cat([tokens, self.hidden.expand(len(x), 8, -1)], 1)
        tokens = tokens.gather(1, back[..., None].expand(-1, -1, FEATURES))
        mask = (back >= 8).type_as(x)
        loss = ((self.rebuild(tokens + self.places) - x).square().mean(-1) * mask).sum() / mask.sum()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, betas=(0.9, 0.95))


@gallery.exhibit("MAE", "a mask drawn for each picture, nn.TransformerEncoder")
def mae() -> Made:
    return LitMAE(), images(16)
