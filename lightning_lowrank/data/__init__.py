"""Data for image and text classification, held in memory."""

from lightning_lowrank.data.text import PadTexts, TextClassification, TokenizedTexts
from lightning_lowrank.data.vision import (
    CIFAR10,
    CIFAR100,
    MNIST,
    SVHN,
    Digits,
    FashionMNIST,
    ImageBatch,
    TensorImages,
    TinyImageNet,
    TorchvisionDataModule,
    VisionDataModule,
    collate_images,
)

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MNIST",
    "SVHN",
    "Digits",
    "FashionMNIST",
    "ImageBatch",
    "PadTexts",
    "TensorImages",
    "TextClassification",
    "TinyImageNet",
    "TokenizedTexts",
    "TorchvisionDataModule",
    "VisionDataModule",
    "collate_images",
]
