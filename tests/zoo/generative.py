"""Generative models: adversarial ones with two optimizers, autoencoders, diffusion, flows."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.bases import TOTAL, draws, images, tensors
from tests.zoo.registry import Gallery, Made

gallery = Gallery("Generative models")

LATENT = 6


def generator_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(LATENT, 8 * 4 * 4), nn.Unflatten(1, (8, 4, 4)),
        nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.ReLU(True),
        nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def discriminator_net(norm: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(8, 8, 4, 2, 1),
        nn.BatchNorm2d(8) if norm else nn.Identity(), nn.LeakyReLU(0.2, True), nn.Flatten(), nn.Linear(8 * 4 * 4, 1),
    )  # fmt: skip


class LitGAN(pl.LightningModule):
    """Lightning's own example: two optimizers, stepped by hand."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = generator_net(), discriminator_net(norm)

    def noise(self, images: Tensor) -> Tensor:
        return torch.randn(len(images), LATENT, device=self.device).type_as(images)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        real, fake = torch.ones(len(images), 1).type_as(images), torch.zeros(len(images), 1).type_as(images)
        z = self.noise(images)

        self.toggle_optimizer(optimizer_g)
        loss = F.binary_cross_entropy_with_logits(self.discriminator(self.generator(z)), real)
        self.log("g_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = F.binary_cross_entropy_with_logits(self.discriminator(images), real)
        fake_loss = F.binary_cross_entropy_with_logits(self.discriminator(self.generator(z).detach()), fake)
        loss = (real_loss + fake_loss) / 2
        self.log("d_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self) -> Any:
        optimizer_g = torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        optimizer_d = torch.optim.Adam(self.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        return [optimizer_g, optimizer_d], []


@gallery.exhibit("DCGAN", "two optimizers stepped by hand, noise drawn in the step")
def dcgan() -> Made:
    return LitGAN(), images(16)


class LitFixedGAN(LitGAN):
    """The same with noise that follows from the images, and schedulers stepped by hand."""

    def noise(self, images: Tensor) -> Tensor:
        return images.flatten(1)[:, :LATENT]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers, _ = super().configure_optimizers()
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]


@gallery.exhibit("GAN without draws", "two optimizers and two schedulers stepped by hand")
def fixed_gan() -> Made:
    return LitFixedGAN(norm=False), images(16)


class LitWGAN(LitGAN):
    """Gradient penalty, and the generator stepped every second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        fake = self.generator(images.flatten(1)[:, :LATENT])
        mix = (0.3 * images + 0.7 * fake.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(self.discriminator(mix).sum(), mix, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        loss = self.discriminator(fake.detach()).mean() - self.discriminator(images).mean() + 10 * penalty
        optimizer_d.zero_grad()
        self.manual_backward(loss)
        optimizer_d.step()
        if batch_idx % 2 == 0:
            optimizer_g.zero_grad()
            self.manual_backward(-self.discriminator(fake).mean())
            optimizer_g.step()
        self.log("critic", loss)


@gallery.exhibit("WGAN-GP", "gradient penalty, the generator stepped every second batch")
def wgan() -> Made:
    return LitWGAN(norm=False), images(16)


class LitAlternating(LitGAN):
    """A generator against a frozen discriminator, in automatic optimization."""

    def __init__(self) -> None:
        super().__init__(norm=False)
        self.automatic_optimization = True
        self.discriminator.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, _ = batch
        return -self.discriminator(self.generator(self.noise(images))).mean()

    def noise(self, images: Tensor) -> Tensor:
        return images.flatten(1)[:, :LATENT]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.generator.parameters(), lr=2e-3)


@gallery.exhibit("Generator before a frozen discriminator", "gradients through a frozen network")
def alternating() -> Made:
    return LitAlternating(), images(16)


class LitVAE(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, 32), nn.ReLU(), nn.Linear(32, 3 * 16 * 16))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        rebuilt = self.decoder(z).view_as(x)
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        loss = F.mse_loss(rebuilt, x, reduction="sum") / len(x) + kl
        self.log_dict({"train_kl": kl, "train_loss": loss}, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@gallery.exhibit("VAE", "noise drawn in the step")
def vae() -> Made:
    return LitVAE(), images(16)


class LitVQ(pl.LightningModule):
    """A codebook that follows by moving averages in buffers, straight-through gradients."""

    def __init__(self, codes: int = 8, width: int = 4, decay: float = 0.9) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(3, width, 4, 4)
        self.decoder = nn.ConvTranspose2d(width, 3, 4, 4)
        self.decay = decay
        self.register_buffer("codebook", torch.randn(codes, width))
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", self.codebook.clone())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        z = self.encoder(x).movedim(1, -1)
        flat = z.flatten(0, 2)
        chosen = torch.cdist(flat, self.codebook).argmin(1)
        one_hot = F.one_hot(chosen, len(self.codebook)).type_as(flat)
        with torch.no_grad():
            self.counts.mul_(self.decay).add_(one_hot.sum(0), alpha=1 - self.decay)
            self.sums.mul_(self.decay).add_(one_hot.T @ flat, alpha=1 - self.decay)
            self.codebook.copy_(self.sums / self.counts.clamp(min=1e-5)[:, None])
        quantised = self.codebook[chosen].view_as(z)
        commitment = F.mse_loss(z, quantised.detach())
        quantised = z + (quantised - z).detach()
        loss = F.mse_loss(self.decoder(quantised.movedim(-1, 1)), x) + 0.25 * commitment
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@gallery.exhibit("VQ-VAE", "a codebook in buffers, changed in place by moving averages")
def vq() -> Made:
    return LitVQ(), images(16)


class Denoiser(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.block = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        self.leave = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))
        self.width = width

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        rates = torch.exp(-math.log(1000) * torch.arange(self.width // 2, device=x.device) / (self.width // 2))
        angles = t[:, None] * rates
        step = self.time(torch.cat([angles.sin(), angles.cos()], 1).type_as(x))
        h = self.enter(x)
        return self.leave(h + self.block(h + step[:, :, None, None]))


class LitDiffusion(pl.LightningModule):
    def __init__(self, steps: int = 20) -> None:
        super().__init__()
        self.net = Denoiser()
        kept = torch.cumprod(1 - torch.linspace(1e-4, 0.2, steps), 0)
        self.register_buffer("kept", kept, persistent=False)

    def noise(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        x = batch[0]
        return x, torch.randint(len(self.kept), (len(x),), device=x.device), torch.randn_like(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, t, noise = self.noise(batch)
        share = self.kept[t][:, None, None, None]
        loss = F.mse_loss(self.net(share.sqrt() * x + (1 - share).sqrt() * noise, t), noise)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@gallery.exhibit("DDPM", "time steps and noise drawn in the step")
def ddpm() -> Made:
    return LitDiffusion(), images(16)


class LitFixedDiffusion(LitDiffusion):
    def noise(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        return batch


@gallery.exhibit("DDPM with noise from the data set", "GroupNorm, indexing a buffer by a batch")
def fixed_ddpm() -> Made:
    chance = draws()
    pictures, noise = (torch.randn(TOTAL, 3, 16, 16, generator=chance) for _ in range(2))
    return LitFixedDiffusion(), tensors(pictures, torch.randint(20, (TOTAL,), generator=chance), noise)


class Coupling(nn.Module):
    def __init__(self, features: int, flip: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features // 2, 16), nn.Tanh(), nn.Linear(16, features))
        self.flip = flip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x.chunk(2, 1)
        if self.flip:
            first, second = second, first
        scale, shift = self.net(first).chunk(2, 1)
        scale = scale.tanh()
        second = second * scale.exp() + shift
        return torch.cat([second, first] if self.flip else [first, second], 1), scale.sum(1)


class LitFlow(pl.LightningModule):
    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coupling(features, flip=bool(number % 2)) for number in range(4))
        self.prior = torch.distributions.Normal(0.0, 1.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        log_volume = 0.0
        for layer in self.layers:
            x, change = layer(x)
            log_volume = log_volume + change
        loss = -(self.prior.log_prob(x).sum(1) + log_volume).mean()
        self.log("train_nll", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@gallery.exhibit("RealNVP", "a flow, torch.distributions")
def flow() -> Made:
    return LitFlow(), tensors(torch.randn(TOTAL, 8, generator=draws()))
