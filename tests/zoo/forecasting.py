"""Forecasts of time series."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tests.zoo.bases import TOTAL, draws, tensors
from tests.zoo.registry import Gallery, Made

gallery = Gallery("Forecasting")

PAST, AHEAD, SERIES = 16, 4, 3


def windows() -> Any:
    chance = draws()
    phase = 6 * torch.rand(TOTAL, 1, SERIES, generator=chance)
    time = torch.arange(PAST + AHEAD)[None, :, None]
    values = torch.sin(0.5 * time + phase) + 0.1 * torch.randn(TOTAL, PAST + AHEAD, SERIES, generator=chance)
    return tensors(values[:, :PAST], values[:, PAST:])


class LitForecaster(pl.LightningModule):
    def __init__(self, net: nn.Module, lr: float = 1e-2) -> None:
        super().__init__()
        self.net, self.lr = net, lr
        self.loss = nn.HuberLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        past, future = batch
        loss = self.loss(self.net(past), future)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **arguments: Any) -> None:
        super().__init__()
        self.rnn = kind(SERIES, 8, batch_first=True, **arguments)
        self.head = nn.Linear(8, AHEAD * SERIES)

    def forward(self, past: Tensor) -> Tensor:
        outputs, _ = self.rnn(past)
        return self.head(outputs[:, -1]).view(-1, AHEAD, SERIES)


@gallery.exhibit("LSTM", "two recurrent layers of torch")
def lstm() -> Made:
    return LitForecaster(Recurrent(nn.LSTM, num_layers=2)), windows()


@gallery.exhibit("GRU", "a recurrent layer of torch, clipped gradients inside")
def gru() -> Made:
    return LitForecaster(Recurrent(nn.GRU)), windows()


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(SERIES, 8), nn.Linear(8, SERIES)

    def forward(self, past: Tensor) -> Tensor:
        h = c = past.new_zeros(len(past), 8)
        for step in past.unbind(1):
            h, c = self.cell(step, (h, c))
        outputs = []
        for _ in range(AHEAD):
            outputs.append(self.head(h))
            h, c = self.cell(outputs[-1], (h, c))
        return torch.stack(outputs, 1)


@gallery.exhibit("LSTM cells", "a loop over time, each forecast fed back")
def cells() -> Made:
    return LitForecaster(Cells()), windows()


class Causal(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            weight_norm(nn.Conv1d(SERIES if not number else width, width, 3, dilation=2**number)) for number in range(3)
        )
        self.head = nn.Linear(width, AHEAD * SERIES)

    def forward(self, past: Tensor) -> Tensor:
        x = past.mT
        for number, convolution in enumerate(self.convolutions):
            x = F.relu(convolution(F.pad(x, (2 * 2**number, 0))), inplace=True)
        return self.head(x[..., -1]).view(-1, AHEAD, SERIES)


@gallery.exhibit("TCN", "dilated convolutions under weight norm, in-place ReLU")
def tcn() -> Made:
    return LitForecaster(Causal()), windows()


class Attends(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(SERIES, width)
        self.places = nn.Embedding(PAST, width)
        self.transformer = nn.Transformer(width, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        self.queries = nn.Parameter(torch.randn(1, AHEAD, width))
        self.head = nn.Linear(width, SERIES)

    def forward(self, past: Tensor) -> Tensor:
        x = self.embed(past) + self.places(torch.arange(PAST, device=past.device))
        mask = nn.Transformer.generate_square_subsequent_mask(AHEAD, device=past.device)
        out = self.transformer(x, self.queries.expand(len(x), -1, -1), tgt_mask=mask, tgt_is_causal=True)
        return self.head(out)


@gallery.exhibit("Transformer", "nn.Transformer with a causal mask")
def transformer() -> Made:
    return LitForecaster(Attends(), lr=1e-3), windows()


class Blocks(nn.Module):
    def __init__(self, blocks: int = 3, width: int = 16) -> None:
        super().__init__()
        size = PAST + AHEAD
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(PAST, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, size))
            for _ in range(blocks)
        )

    def forward(self, past: Tensor) -> Tensor:
        rest = past.mT
        forecast = rest.new_zeros(*rest.shape[:-1], AHEAD)
        for block in self.blocks:
            backcast, ahead = block(rest).split([PAST, AHEAD], -1)
            rest, forecast = rest - backcast, forecast + ahead
        return forecast.mT


@gallery.exhibit("N-BEATS", "blocks that explain what the others leave")
def nbeats() -> Made:
    return LitForecaster(Blocks()), windows()


class Normalised(nn.Module):
    """A linear forecast of what is normalised over each window (RevIN, DLinear)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(SERIES)), nn.Parameter(torch.zeros(SERIES))
        self.seasonal, self.trend = nn.Linear(PAST, AHEAD), nn.Linear(PAST, AHEAD)

    def forward(self, past: Tensor) -> Tensor:
        mean, deviation = past.mean(1, keepdim=True), past.std(1, keepdim=True) + 1e-5
        x = ((past - mean) / deviation * self.scale + self.shift).mT
        trend = F.avg_pool1d(F.pad(x, (2, 2), mode="replicate"), 5, stride=1)
        out = (self.seasonal(x - trend) + self.trend(trend)).mT
        return (out - self.shift) / self.scale * deviation + mean


@gallery.exhibit("DLinear with reversible normalisation", "moving averages, windows normalised and back")
def dlinear() -> Made:
    return LitForecaster(Normalised()), windows()


class LitDeepAR(pl.LightningModule):
    """A recurrent network that gives a distribution, trained for its likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(SERIES, 8, batch_first=True), nn.Linear(8, 2 * SERIES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        series = torch.cat(batch, 1)
        out, _ = self.rnn(series[:, :-1])
        mean, scale = self.head(out).chunk(2, -1)
        loss = -torch.distributions.StudentT(5.0, mean, F.softplus(scale) + 1e-3).log_prob(series[:, 1:]).mean()
        self.log("train_nll", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.RMSprop(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "train_nll"}}


@gallery.exhibit("DeepAR", "a likelihood of torch.distributions, a scheduler that watches the loss")
def deepar() -> Made:
    return LitDeepAR(), windows()
