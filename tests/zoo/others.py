"""Tables, recommendations, speech, physics, imitation, and what people do to layers, steps and optimizers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint

from tests.zoo.bases import CLASSES, TOTAL, Listed, LitClassifier, draws, images, loader, tensors
from tests.zoo.registry import Gallery, Made

gallery = Gallery("Others")

FEATURES = 6


def rows(classes: int = CLASSES) -> Any:
    chance = draws()
    return tensors(torch.randn(TOTAL, FEATURES, generator=chance), torch.randint(classes, (TOTAL,), generator=chance))


def mlp(width: int = 16, after: int = CLASSES) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, after)
    )


# Tables and recommendations


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


# What people do to layers


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


# What people do in steps


class LitMetric(LitClassifier):
    """A metric object updated and logged in the step."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("train_acc", self.accuracy, on_step=True, on_epoch=True)
        return F.cross_entropy(logits, y)


@gallery.exhibit("Metric logged in the step", "torchmetrics, logged as an object")
def metric() -> Made:
    return LitMetric(mlp()), rows()


class LitMetricAtEnd(LitMetric):
    """Metrics updated in the step, computed at the epoch's end."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.accuracy.update(logits, y)
        return F.cross_entropy(logits, y)

    def on_train_epoch_end(self) -> None:
        self.log("train_acc", self.accuracy.compute())
        self.accuracy.reset()


@gallery.exhibit("Metric computed at the epoch's end", "torchmetrics, updated in the step")
def metric_at_end() -> Made:
    return LitMetricAtEnd(mlp()), rows()


class LitOutputs(LitClassifier):
    """Keeps the steps' outputs for the epoch's end."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("train_mean", torch.stack(self.outputs).mean())
        self.outputs.clear()


@gallery.exhibit("Outputs kept in a list", "losses collected for the epoch's end")
def outputs() -> Made:
    return LitOutputs(mlp()), rows()


class LitItem(LitClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if loss.item() > 10:
            return loss / 2
        return loss


@gallery.exhibit("Branch on the loss", ".item() in the step")
def item() -> Made:
    return LitItem(mlp()), rows()


class LitSkips(LitClassifier):
    """Leaves out every other batch by returning None."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


@gallery.exhibit("Steps left out", "training_step returns None for some batches")
def skips() -> Made:
    return LitSkips(mlp()), rows()


class LitByIndex(LitClassifier):
    """A penalty on every second batch of an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2 == 0:
            loss = loss + 0.1 * sum(value.square().sum() for value in self.parameters())
        return loss


@gallery.exhibit("Penalty on every second batch", "the step looks at batch_idx")
def by_index() -> Made:
    return LitByIndex(mlp()), rows()


class LitAnnealed(LitClassifier):
    """A weight that grows with the trainer's steps, as of a VAE's divergence."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        share = min(1.0, self.global_step / 10)
        return loss + share * sum(value.square().sum() for value in self.parameters())


@gallery.exhibit("Weight annealed by global_step", "the step looks at self.global_step", warned="global_step")
def annealed() -> Made:
    return LitAnnealed(mlp()), rows()


class LitCounts(LitClassifier):
    """The same by a number of its own, and a buffer that is not saved."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        loss = super().training_step(batch, batch_idx)
        return loss + min(1.0, self.steps / 10) * sum(value.square().sum() for value in self.parameters())


@gallery.exhibit("Weight annealed by a counter", "a number on the module, counted in the step", warned="steps")
def counts() -> Made:
    return LitCounts(mlp()), rows()


class LitRunning(LitClassifier):
    """Divides by a running mean in a buffer that is not saved."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.register_buffer("running", torch.ones(FEATURES), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.no_grad():
            self.running.mul_(0.9).add_(x.abs().mean(0), alpha=0.1)
        return F.cross_entropy(self(x / self.running), y)


@gallery.exhibit("Running mean, not saved", "a non-persistent buffer changed in the step")
def running() -> Made:
    return LitRunning(mlp()), rows()


class LitAttribute(LitClassifier):
    """A running mean in a plain attribute."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.seen = torch.ones(FEATURES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.seen = 0.9 * self.seen.to(x) + 0.1 * x.abs().mean(0).detach()
        return F.cross_entropy(self(x / self.seen), y)


@gallery.exhibit("Running mean in an attribute", "a tensor on the module, replaced in the step")
def attribute() -> Made:
    return LitAttribute(mlp()), rows()


class LitUncertain(pl.LightningModule):
    """Two tasks, weighted by learned uncertainties."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = mlp(after=8), nn.ModuleList([nn.Linear(8, CLASSES), nn.Linear(8, 1)])
        self.log_variances = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        z = F.relu(self.body(x))
        losses = [F.cross_entropy(self.heads[0](z), y), F.mse_loss(self.heads[1](z)[:, 0], x.sum(1))]
        total = sum(loss * (-s).exp() + s for loss, s in zip(losses, self.log_variances, strict=True))
        self.log_dict({f"task{number}": loss for number, loss in enumerate(losses)})
        return total

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [*self.body.parameters(), *self.heads.parameters()]},
            {"params": self.log_variances, "lr": 1e-3},
        ]
        return torch.optim.Adam(groups, lr=1e-2)


@gallery.exhibit("Two tasks with learned weights", "scalar parameters in a ParameterList, two groups")
def uncertain() -> Made:
    return LitUncertain(), rows()


class LitMixup(LitClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        share = torch.distributions.Beta(0.4, 0.4).sample().item()
        order = torch.randperm(len(x), device=x.device)
        logits = self(share * x + (1 - share) * x[order])
        return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])


@gallery.exhibit("Mixup", "a share drawn in the step, samples permuted")
def mixup() -> Made:
    return LitMixup(mlp()), rows()


# Optimizers and hooks


class LitOneCycle(LitClassifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@gallery.exhibit(
    "One-cycle rates",
    "trainer.estimated_stepping_batches, clients of equally many batches",
    sizes=(8, 7, 6),
    warned="estimated_stepping_batches",
)
def one_cycle() -> Made:
    return LitOneCycle(mlp()), rows()


class LitLBFGS(LitClassifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@gallery.exhibit("L-BFGS", "an optimizer that calls its closure several times")
def lbfgs() -> Made:
    return LitLBFGS(mlp()), rows()


class LitClipped(LitClassifier):
    def configure_gradient_clipping(self, optimizer: Any, *arguments: Any, **keywords: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


@gallery.exhibit("Own gradient clipping", "configure_gradient_clipping overridden")
def clipped() -> Made:
    return LitClipped(mlp()), rows()


class LitWarmup(LitClassifier):
    """A warm-up in optimizer_step, as in Lightning's documentation."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self.trainer.global_step < 4:
            for group in optimizer.param_groups:
                group["lr"] = (self.trainer.global_step + 1) / 4 * self.hparams.lr


@gallery.exhibit("Warm-up in optimizer_step", "rates set by trainer.global_step", warned="global_step")
def warmup() -> Made:
    return LitWarmup(mlp()), rows()


class LitLimited(LitClassifier):
    """Weights clamped after each batch."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        with torch.no_grad():
            for value in self.parameters():
                value.clamp_(-0.2, 0.2)


@gallery.exhibit("Weights clamped after each batch", "parameters changed in on_train_batch_end")
def limited() -> Made:
    return LitLimited(mlp()), rows()


class LitAccumulates(LitClassifier):
    """Gradients accumulated by hand."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx) / 2
        self.manual_backward(loss)
        if (batch_idx + 1) % 2 == 0 or self.trainer.is_last_batch:
            optimizer.step()
            optimizer.zero_grad()


@gallery.exhibit("Accumulation by hand", "manual steps on every second and on the last batch")
def accumulates() -> Made:
    return LitAccumulates(mlp()), rows()


class LitGroups(LitClassifier):
    """A frozen first layer, and other rates and decay for the others."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.net[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.net[2].parameters(), "lr": 0.01, "weight_decay": 0.1},
            {"params": self.net[4].parameters()},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4), "interval": "step"}
        ]


@gallery.exhibit("Groups with rates of their own", "a frozen first layer, not in the optimizer, a schedule by steps")
def groups() -> Made:
    return LitGroups(mlp()), rows()


class LitFineTuned(LitClassifier):
    """A backbone that Lightning's callback freezes, and thaws when the first epoch begins."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.backbone, self.net = mlp(after=8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.backbone(x).relu())

    def configure_callbacks(self) -> Any:
        return [BackboneFinetuning(unfreeze_backbone_at_epoch=0, backbone_initial_ratio_lr=0.5, verbose=False)]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([value for value in self.parameters() if value.requires_grad], lr=0.1)


@gallery.exhibit("Backbone thawed by a callback", "BackboneFinetuning adds a group to the optimizer")
def fine_tuned() -> Made:
    return LitFineTuned(), rows()
