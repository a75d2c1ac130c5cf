"""Image classification data, held in memory and handed out a whole batch at a time."""

from lightning_lowrank.data.vision import (
    CIFAR10,
    CIFAR100,
    MNIST,
    SVHN,
    Digits,
    FashionMNIST,
    ImageBatch,
    TensorImages,
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
    "TensorImages",
    "TorchvisionDataModule",
    "VisionDataModule",
    "collate_images",
]
