"""The papers' small networks, and a LightningModule that trains any classifier."""

from lightning_lowrank.models.classifier import Classifier
from lightning_lowrank.models.networks import CNN4, CNN8, MLP, ConvBlock, Network

__all__ = ["CNN4", "CNN8", "MLP", "Classifier", "ConvBlock", "Network"]
