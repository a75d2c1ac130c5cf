"""The papers' networks, and LightningModules that train classifiers of images or texts, and language models."""

from lightning_lowrank.models.causal import CausalLM
from lightning_lowrank.models.classifier import Classifier
from lightning_lowrank.models.networks import CNN4, CNN8, MLP, VGG8, ConvBlock, ImageNetwork, Network
from lightning_lowrank.models.resnet import ResNet18, ResNet34
from lightning_lowrank.models.text import TextClassifier

__all__ = [
    "CNN4",
    "CNN8",
    "MLP",
    "VGG8",
    "CausalLM",
    "Classifier",
    "ConvBlock",
    "ImageNetwork",
    "Network",
    "ResNet18",
    "ResNet34",
    "TextClassifier",
]
