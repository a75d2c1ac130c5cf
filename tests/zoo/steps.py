"""What people do in steps, hooks and optimizers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn

from tests.zoo.bases import CLASSES, FEATURES, LitClassifier, mlp, rows
from tests.zoo.registry import Gallery, Made

gallery = Gallery("Steps, hooks and optimizers")


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


@gallery.exhibit("Penalty on every second batch", "the step looks at batch_idx", own_loss="penalises the factors")
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


@gallery.exhibit(
    "Weight annealed by a counter",
    "a number on the module, counted in the step",
    warned="steps",
    own_loss="counts on",
)
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


@gallery.exhibit(
    "Running mean in an attribute",
    "a tensor on the module, replaced in the step",
    warned="attributes of the module",
    own_loss="goes on with its mean",
)
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


@gallery.exhibit(
    "L-BFGS", "an optimizer that calls its closure several times", own_loss="is that after several steps of the factors"
)
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
