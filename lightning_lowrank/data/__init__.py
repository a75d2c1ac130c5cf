"""Datamodules for images, texts, language models and clients' own files.

Samples are held in memory, except images beyond `OwnImages`' ``memory_limit`` and data sets given to `ClientDatasets`.
"""

from lightning_lowrank.data.arrays import Arrays
from lightning_lowrank.data.client_datasets import ClientDatasets
from lightning_lowrank.data.client_files import LEAF, ClientFiles, ClientTable, FederatedHDF5
from lightning_lowrank.data.flower_partition import FlowerPartition
from lightning_lowrank.data.folders import ImageFolder
from lightning_lowrank.data.groups import EmbeddingGroups, LengthGroups
from lightning_lowrank.data.hugging_face import HuggingFaceImages
from lightning_lowrank.data.images import ImageBatch, TensorImages, collate_images
from lightning_lowrank.data.instructions import Instructions
from lightning_lowrank.data.own_images import OwnImages
from lightning_lowrank.data.text import TextClassification
from lightning_lowrank.data.tiny_imagenet import TinyImageNet
from lightning_lowrank.data.tokenized import AnsweredTexts, PackTexts, PadTexts, TokenizedTexts
from lightning_lowrank.data.torchvision import (
    CIFAR10,
    CIFAR100,
    MNIST,
    SVHN,
    FashionMNIST,
    TorchvisionDataModule,
)
from lightning_lowrank.data.vision import Digits, VisionDataModule

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "LEAF",
    "MNIST",
    "SVHN",
    "AnsweredTexts",
    "Arrays",
    "ClientDatasets",
    "ClientFiles",
    "ClientTable",
    "Digits",
    "EmbeddingGroups",
    "FashionMNIST",
    "FederatedHDF5",
    "FlowerPartition",
    "HuggingFaceImages",
    "ImageBatch",
    "ImageFolder",
    "Instructions",
    "LengthGroups",
    "OwnImages",
    "PackTexts",
    "PadTexts",
    "TensorImages",
    "TextClassification",
    "TinyImageNet",
    "TokenizedTexts",
    "TorchvisionDataModule",
    "VisionDataModule",
    "collate_images",
]
