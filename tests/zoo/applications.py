"""Tables, recommendations, images beside a frozen network, sequences, physics and imitation."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_sequence

from tests.zoo.bases import CLASSES, FEATURES, TOTAL, Listed, LitClassifier, draws, images, loader, mlp, rows, tensors
from tests.zoo.registry import Gallery, Made

gallery = Gallery("Applications")


class LitTable(LitClassifier):
    """Embeddings of categories beside numbers, batch normalisation, a batch in a dictionary."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES)))
        self.embeddings = nn.ModuleList(nn.Embedding(size, 4) for size in (5, 7))
        self.norm = nn.BatchNorm1d(4)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        parts = [embed(batch["categories"][:, number]) for number, embed in enumerate(self.embeddings)]
        logits = self(torch.cat([*parts, self.norm(batch["numbers"])], 1))
        loss = F.cross_entropy(logits, batch["target"], label_smoothing=0.1)
        self.log("train_loss", loss)
        return {"loss": loss, "logits": logits.detach()}


@gallery.exhibit("Tabular network", "embeddings, BatchNorm1d, dictionaries in and out")
def table() -> Made:
    chance = draws()
    samples = [
        {
            "categories": torch.randint(5, (2,), generator=chance),
            "numbers": torch.randn(4, generator=chance),
            "target": torch.randint(CLASSES, (), generator=chance),
        }
        for _ in range(TOTAL)
    ]
    return LitTable(), loader(Listed(samples))


class LitFactors(pl.LightningModule):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(9, 8, sparse=sparse), nn.Embedding(11, 8, sparse=sparse)
        self.bias = nn.Embedding(11, 1, sparse=sparse)
        self.sparse = sparse

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        user, item, rating = batch
        score = (self.users(user) * self.items(item)).sum(1) + self.bias(item)[:, 0]
        loss = F.binary_cross_entropy_with_logits(score, rating)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return (torch.optim.SparseAdam if self.sparse else torch.optim.Adagrad)(list(self.parameters()), lr=0.05)


def ratings() -> Any:
    chance = draws()
    user, item = torch.randint(9, (TOTAL,), generator=chance), torch.randint(11, (TOTAL,), generator=chance)
    return tensors(user, item, (user + item).remainder(2).to(torch.get_default_dtype()))


@gallery.exhibit("Matrix factorisation", "embeddings alone, Adagrad")
def factors() -> Made:
    return LitFactors(), ratings()


@gallery.exhibit("Matrix factorisation, sparse", "sparse gradients, SparseAdam")
def sparse_factors() -> Made:
    return LitFactors(sparse=True), ratings()


class LitTriplets(pl.LightningModule):
    """Hard positives and negatives chosen within the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(after=8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        z = F.normalize(self.net(x), dim=1)
        distance = torch.cdist(z, z)
        same = y[:, None] == y[None]
        farthest = (distance * same).max(1).values
        nearest = distance.masked_fill(same, float("inf")).min(1).values
        valid = torch.isfinite(nearest)
        loss = F.relu(farthest - nearest.masked_fill(~valid, 0) + 0.2).mul(valid).sum() / valid.sum().clamp(min=1)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@gallery.exhibit("Triplet loss", "distances within the batch, hard pairs by masks")
def triplets() -> Made:
    return LitTriplets(), rows(2)


# Images beside a frozen network


class LitPerceptual(pl.LightningModule):
    """The distance of features in a frozen network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU())
        self.features.eval().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        out = self.net(x + 0.1)
        loss = F.l1_loss(out, x) + F.mse_loss(self.features(out), self.features(x))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=1e-3)


@gallery.exhibit("Perceptual loss", "a frozen network in the loss, not in the optimizer")
def perceptual() -> Made:
    return LitPerceptual(), images(16)


class LitPerceptualAll(LitPerceptual):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@gallery.exhibit("Perceptual loss, all in the optimizer", "a frozen network in the loss and in the optimizer")
def perceptual_all() -> Made:
    return LitPerceptualAll(), images(16)


# Sequences


class LitSpeech(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(8, 16, 5, stride=2, padding=2)
        self.rnn = nn.GRU(16, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        spectra, words, spectra_lengths, word_lengths = batch
        out, _ = self.rnn(F.relu(self.convolution(spectra)).mT)
        chances = self.head(out).log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(chances, words, spectra_lengths // 2, word_lengths, zero_infinity=True)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@gallery.exhibit("CTC speech recognition", "CTC loss, a bidirectional GRU, one-cycle rates by a fixed number of steps")
def speech() -> Made:
    chance = draws()
    lengths = 16 + 2 * torch.randint(5, (TOTAL,), generator=chance)
    return LitSpeech(), tensors(
        torch.randn(TOTAL, 8, 24, generator=chance), torch.randint(1, 6, (TOTAL, 4), generator=chance), lengths,
        torch.randint(2, 5, (TOTAL,), generator=chance),
    )  # fmt: skip


def words() -> list[tuple[Tensor, Tensor]]:
    chance = draws()
    return [
        (torch.randint(1, 20, (3 + number % 5,), generator=chance), torch.randint(CLASSES, (), generator=chance))
        for number in range(TOTAL)
    ]


def collate_padded(samples: list[Any]) -> tuple[Tensor, Tensor]:
    sequences, labels = zip(*samples, strict=True)
    return pad_sequence(list(sequences), batch_first=True), torch.stack(labels)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x != 0).unsqueeze(-1)
        return self.head((self.embed(x) * mask).sum(1) / mask.sum(1))


@gallery.exhibit("Padded sequences", "batches of unlike lengths, an embedding with a padding index")
def padded() -> Made:
    return LitClassifier(Bag()), loader(Listed(words()), collate_fn=collate_padded)


class LitPacked(LitClassifier):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, CLASSES))
        self.embed, self.rnn = nn.Embedding(20, 8), nn.LSTM(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        sequences, labels = batch
        packed = pack_sequence([self.embed(each) for each in sequences], enforce_sorted=False)
        _, (state, _) = self.rnn(packed)
        return F.cross_entropy(self.net(state[-1]), labels)


def collate_lists(samples: list[Any]) -> tuple[list[Tensor], Tensor]:
    sequences, labels = zip(*samples, strict=True)
    return list(sequences), torch.stack(labels)


@gallery.exhibit("Packed sequences", "lists of unlike tensors, a packed LSTM")
def packed() -> Made:
    return LitPacked(), loader(Listed(words()), collate_fn=collate_lists)


class LitBags(LitClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        flat, offsets, labels = batch
        return F.cross_entropy(self.net[1](self.net[0](flat, offsets)), labels)


def collate_offsets(samples: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    sequences, labels = zip(*samples, strict=True)
    ends = torch.tensor([0, *(len(each) for each in sequences[:-1])]).cumsum(0)
    return torch.cat(sequences), ends, torch.stack(labels)


@gallery.exhibit("EmbeddingBag", "texts joined, with their offsets")
def bags() -> Made:
    net = nn.Sequential(nn.EmbeddingBag(20, 8), nn.Linear(8, CLASSES))
    return LitBags(net), loader(Listed(words()), collate_fn=collate_offsets)


class LitNamed(LitClassifier):
    """Batches that carry the files' names."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch["image"]), batch["label"])
        self.log("train_loss", loss, batch_size=len(batch["path"]))
        return loss


@gallery.exhibit("Batches with file names", "strings and numbers beside tensors")
def named() -> Made:
    chance = draws()
    samples = [
        {"image": torch.randn(FEATURES, generator=chance), "label": number % CLASSES, "path": f"images/{number:04}.png"}
        for number in range(TOTAL)
    ]
    return LitNamed(mlp()), loader(Listed(samples))


# Physics and control


class LitPINN(pl.LightningModule):
    """The heat equation at sampled points, by derivatives of the network's output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        self.rate = nn.Parameter(torch.tensor(0.1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        points, values = batch
        points = points.clone().requires_grad_(True)
        u = self.net(points)
        first = torch.autograd.grad(u.sum(), points, create_graph=True)[0]
        second = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)[0][:, 0]
        loss = F.mse_loss(u[:, 0], values) + (first[:, 1] - self.rate * second).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@gallery.exhibit("Physics-informed network", "derivatives by torch.autograd.grad within the step")
def pinn() -> Made:
    points = torch.rand(TOTAL, 2, generator=draws())
    return LitPINN(), tensors(points, torch.sin(3 * points[:, 0]))


class LitFunctionalPINN(LitPINN):
    """The same by torch.func."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        points, values = batch

        def value(point: Tensor) -> Tensor:
            return self.net(point)[0]

        first = torch.func.vmap(torch.func.grad(value))(points)
        second = torch.func.vmap(torch.func.hessian(value))(points)[:, 0, 0]
        loss = F.mse_loss(self.net(points)[:, 0], values) + (first[:, 1] - self.rate * second).square().mean()
        self.log("train_loss", loss)
        return loss


@gallery.exhibit("Physics-informed network by torch.func", "grad and hessian mapped within the step")
def functional_pinn() -> Made:
    _, data = pinn()
    return LitFunctionalPINN(), data


class Spectral(nn.Module):
    """A Fourier layer with complex weights."""

    def __init__(self, width: int = 8, modes: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.complex128) / width)
        self.local, self.modes = nn.Conv1d(width, width, 1), modes

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        out = torch.zeros_like(spectrum)
        out[..., : self.modes] = torch.einsum("bix,iox->box", spectrum[..., : self.modes], self.weight)
        return F.gelu(torch.fft.irfft(out, n=x.shape[-1]) + self.local(x))


class LitOperator(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, 8, 1), Spectral(), Spectral(), nn.Conv1d(8, 1, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@gallery.exhibit("Fourier neural operator", "complex weights, Fourier transforms")
def operator() -> Made:
    x = torch.randn(TOTAL, 1, 16, generator=draws())
    return LitOperator(), tensors(x, x.cumsum(-1) / 4)


class LitCloning(pl.LightningModule):
    """Behaviour cloning with a learned deviation."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_deviation = mlp(after=2), nn.Parameter(torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        observation, action = batch
        policy = torch.distributions.Normal(self.mean(observation), self.log_deviation.exp())
        loss = -policy.log_prob(action).sum(-1).mean() - 1e-2 * policy.entropy().sum(-1).mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@gallery.exhibit("Behaviour cloning", "a policy of torch.distributions, which checks its arguments")
def cloning() -> Made:
    chance = draws()
    return LitCloning(), tensors(
        torch.randn(TOTAL, FEATURES, generator=chance), torch.randn(TOTAL, 2, generator=chance)
    )
