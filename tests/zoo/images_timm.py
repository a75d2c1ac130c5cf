"""Image classifiers of timm, one of each family."""

from __future__ import annotations

from typing import Any

import timm
import torch
from timm.models.mlp_mixer import MlpMixer
from timm.models.swin_transformer import SwinTransformer

from tests.zoo.bases import CLASSES, LitClassifier, images
from tests.zoo.registry import Gallery, Made

gallery = Gallery("Images: timm")


def _timm(name: str, size: int = 32, lr: float = 0.01, **arguments: Any) -> Made:
    return LitClassifier(timm.create_model(name, num_classes=CLASSES, **arguments), lr=lr), images(size)


@gallery.exhibit("ResNet", "batch normalisation, in-place ReLU")
def resnet() -> Made:
    return _timm("test_resnet")


@gallery.exhibit("ResNet, grayscale", "one input channel, AdamW")
def resnet_gray() -> Made:
    net = timm.create_model("test_resnet", num_classes=CLASSES, in_chans=1)
    return LitClassifier(net, lr=1e-3, optimizer=torch.optim.AdamW), images(32, channels=1)


@gallery.exhibit("EfficientNet", "depthwise convolutions, squeeze and excitation, in-place SiLU")
def efficientnet() -> Made:
    return _timm("test_efficientnet")


@gallery.exhibit("EfficientNet with GroupNorm", "no buffers")
def efficientnet_gn() -> Made:
    return _timm("test_efficientnet_gn")


@gallery.exhibit("EfficientNet with EvoNorm", "normalisation and activation in one")
def efficientnet_evos() -> Made:
    return _timm("test_efficientnet_evos")


@gallery.exhibit("MobileNetV3", "in-place hard-swish")
def mobilenet() -> Made:
    return _timm("mobilenetv3_small_050")


@gallery.exhibit("LCNet", "depthwise convolutions with BatchNorm")
def lcnet() -> Made:
    return _timm("lcnet_035")


@gallery.exhibit("RegNetX", "grouped convolutions, in-place ReLU")
def regnet() -> Made:
    return _timm("regnetx_002")


@gallery.exhibit("RepVGG-like ByobNet", "branches by configuration")
def byobnet() -> Made:
    return _timm("test_byobnet")


@gallery.exhibit("NFNet", "weight-standardised convolutions, no normalisation")
def nfnet() -> Made:
    return _timm("test_nfnet")


@gallery.exhibit("ConvNeXt", "LayerNorm over channels, layer scale")
def convnext() -> Made:
    return _timm("test_convnext")


@gallery.exhibit("StarNet", "products of branches, ReLU6")
def starnet() -> Made:
    return _timm("starnet_s050")


@gallery.exhibit("ViT", "class token, fused attention")
def vit() -> Made:
    return _timm("test_vit", size=32, img_size=32)


@gallery.exhibit("ViT with relative positions", "attention with a learned bias")
def vit_relpos() -> Made:
    module, data = _timm("test_vit_relpos", size=32, img_size=32)
    for layer in module.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    return module, data


@gallery.exhibit("ViT, linear probe", "everything but the head frozen")
def linear_probe() -> Made:
    net = timm.create_model("test_vit", num_classes=CLASSES, img_size=32)
    net.requires_grad_(False)
    net.get_classifier().requires_grad_(True)
    return LitClassifier(net, lr=0.1), images(32)


@gallery.exhibit("Swin", "shifted windows, masks in buffers")
def swin() -> Made:
    net = SwinTransformer(
        img_size=32, patch_size=2, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4, num_classes=CLASSES,
        drop_path_rate=0.0,
    )  # fmt: skip
    return LitClassifier(net, lr=0.01), images(32)


@gallery.exhibit("MLP-Mixer", "products over tokens")
def mixer() -> Made:
    net = MlpMixer(num_classes=CLASSES, img_size=32, patch_size=8, num_blocks=2, embed_dim=32)
    return LitClassifier(net, lr=0.01), images(32)


@gallery.exhibit("CoAtNet", "convolution and attention")
def coatnet() -> Made:
    return _timm("test_coatnet", size=64, img_size=64)


@gallery.exhibit("MambaOut", "gated convolutions")
def mambaout() -> Made:
    return _timm("test_mambaout")


@gallery.exhibit("ViT with drop path", "stochastic depth and dropout")
def vit_drop() -> Made:
    return _timm("test_vit", size=32, img_size=32, drop_path_rate=0.2, drop_rate=0.1)
