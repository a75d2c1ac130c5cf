"""Classification, detection and segmentation with torchvision's models."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision.models.detection import FCOS, FasterRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.models.segmentation import LRASPP

from tests.zoo.bases import CLASSES, TOTAL, Listed, LitClassifier, draws, images, loader, tensors
from tests.zoo.registry import Gallery, Made

gallery = Gallery("Images: torchvision")


@gallery.exhibit("SqueezeNet", "fire modules, in-place ReLU, no normalisation")
def squeezenet() -> Made:
    net = torchvision.models.squeezenet1_1(num_classes=CLASSES, dropout=0.0)
    return LitClassifier(net, lr=0.01), images(32)


@gallery.exhibit("MobileNetV2 with FrozenBatchNorm", "norms that are buffers alone, stem frozen")
def frozen_norm() -> Made:
    norm = torchvision.ops.FrozenBatchNorm2d
    net = torchvision.models.mobilenet_v2(num_classes=CLASSES, width_mult=0.25, norm_layer=norm, dropout=0.0)
    net.features[:4].requires_grad_(False)
    return LitClassifier(net, lr=1e-3), images(32)


@gallery.exhibit("Swin v2", "attention that reads the layers' weights", double=False)
def swin_v2() -> Made:
    net = torchvision.models.SwinTransformer(
        patch_size=[4, 4], embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=[4, 4], num_classes=CLASSES,
        stochastic_depth_prob=0.0, block=torchvision.models.swin_transformer.SwinTransformerBlockV2,
        downsample_layer=torchvision.models.swin_transformer.PatchMergingV2,
    )  # fmt: skip
    return LitClassifier(net, lr=0.01), images(32)


@gallery.exhibit("ShuffleNet", "channels split and shuffled in place")
def shufflenet() -> Made:
    net = torchvision.models.ShuffleNetV2([1, 2, 1], [8, 16, 32, 64, 64], num_classes=CLASSES)
    return LitClassifier(net, lr=0.01), images(32)


class LitDetector(pl.LightningModule):
    """The loop of torchvision's detection tutorial."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pictures, targets = batch
        losses = self.net(list(pictures), list(targets))
        loss = sum(losses.values())
        self.log_dict({f"train_{name}": value for name, value in losses.items()}, batch_size=len(pictures))
        self.log("train_loss", loss, batch_size=len(pictures))
        return loss

    def configure_optimizers(self) -> Any:
        parameters = [value for value in self.parameters() if value.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=5e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)]


def collate_detection(samples: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*samples, strict=True))


def boxes(sizes: bool = True) -> Any:
    """Pictures of unlike sizes with one to three boxes each."""
    samples = []
    chance = draws()
    for number in range(TOTAL):
        height = 48 + 8 * (number % 3) if sizes else 64
        count = 1 + number % 3
        corner = 20 * torch.rand(count, 2, generator=chance)
        target = {
            "boxes": torch.cat([corner, corner + 8 + 16 * torch.rand(count, 2, generator=chance)], 1),
            "labels": torch.randint(1, 3, (count,), generator=chance),
            "image_id": torch.tensor([number]),
        }
        samples.append((torch.rand(3, height, 64, generator=chance), target))
    return loader(Listed(samples), collate_fn=collate_detection)


def backbone(width: int = 16) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 8), (8, 16), (16, width)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(True)]
    net = nn.Sequential(*layers)
    net.out_channels = width
    return net


SIZES = {"min_size": 64, "max_size": 96}


@gallery.exhibit("Faster R-CNN", "targets in dictionaries, pictures of unlike sizes, sampled proposals")
def faster_rcnn() -> Made:
    anchors = AnchorGenerator(sizes=((8, 16, 32),), aspect_ratios=((0.5, 1.0, 2.0),))
    pool = torchvision.ops.MultiScaleRoIAlign(featmap_names=["0"], output_size=3, sampling_ratio=2)
    net = FasterRCNN(
        backbone(), rpn_anchor_generator=anchors, box_roi_pool=pool,
        box_head=torchvision.models.detection.faster_rcnn.TwoMLPHead(16 * 9, 32),
        box_predictor=torchvision.models.detection.faster_rcnn.FastRCNNPredictor(32, 3),
        rpn_pre_nms_top_n_train=50, rpn_post_nms_top_n_train=20, **SIZES,
    )  # fmt: skip
    return LitDetector(net), boxes()


@gallery.exhibit("RetinaNet", "focal loss over anchors, targets in dictionaries")
def retinanet() -> Made:
    anchors = AnchorGenerator(sizes=((8, 16, 32),), aspect_ratios=((0.5, 1.0, 2.0),))
    return LitDetector(RetinaNet(backbone(), num_classes=3, anchor_generator=anchors, **SIZES)), boxes()


@gallery.exhibit("FCOS", "no anchors, pictures of one size")
def fcos() -> Made:
    anchors = AnchorGenerator(sizes=((8,),), aspect_ratios=((1.0,),))
    return LitDetector(FCOS(backbone(32), num_classes=3, anchor_generator=anchors, **SIZES)), boxes(sizes=False)


class LitSegmenter(pl.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.criterion = nn.CrossEntropyLoss(ignore_index=255)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        out = out["out"] if isinstance(out, dict) else out
        loss = self.criterion(out, y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def masks(size: int = 32) -> Any:
    chance = draws()
    pictures = torch.randn(TOTAL, 3, size, size, generator=chance)
    labels = torch.randint(3, (TOTAL, size, size), generator=chance)
    labels[:, :2] = 255
    return tensors(pictures, labels)


@gallery.exhibit("LR-ASPP MobileNetV3", "segmentation, in-place activations, ignored pixels")
def lraspp() -> Made:
    features = torchvision.models.mobilenet_v3_small(width_mult=0.5)
    features = create_feature_extractor(features, {"features.3": "low", "features.11": "high"})
    low, high = (value.shape[1] for value in features(torch.zeros(2, 3, 32, 32)).values())
    return LitSegmenter(LRASPP(features, low, high, num_classes=3, inter_channels=16)), masks()


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = self.block(3, width), self.block(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge = self.block(2 * width, width)
        self.head = nn.Conv2d(width, 3, 1)

    def block(self, before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.InstanceNorm2d(after, affine=True), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        return self.head(self.merge(torch.cat([self.up(second), first], 1)))


@gallery.exhibit("U-Net", "transposed convolution, skip connections, InstanceNorm")
def unet() -> Made:
    return LitSegmenter(UNet()), masks()


class LitDice(LitSegmenter):
    """Dice loss over the pixels that a boolean mask leaves."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        chances = self.net(x).softmax(1).movedim(1, -1)
        valid = y != 255
        truth = F.one_hot(y[valid], 3).to(chances.dtype)
        overlap = (chances[valid] * truth).sum(0)
        return 1 - (2 * overlap / (chances[valid] + truth).sum(0)).mean()


@gallery.exhibit("U-Net with Dice loss", "indexing with a boolean mask")
def dice() -> Made:
    return LitDice(UNet()), masks()


@gallery.exhibit("R(2+1)D-like video network", "3-D convolutions, BatchNorm3d")
def video() -> Made:
    net = nn.Sequential(
        nn.Conv3d(3, 8, (1, 3, 3), padding=(0, 1, 1), bias=False), nn.BatchNorm3d(8), nn.ReLU(inplace=True),
        nn.Conv3d(8, 8, (3, 1, 1), padding=(1, 0, 0), bias=False), nn.BatchNorm3d(8), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, CLASSES),
    )  # fmt: skip
    clips = torch.randn(TOTAL, 3, 4, 12, 12, generator=draws())
    return LitClassifier(net), tensors(clips, torch.randint(CLASSES, (TOTAL,), generator=draws(12)))
