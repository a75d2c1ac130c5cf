"""Datamodules of the image datasets that torchvision downloads and reads."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torchvision.datasets
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.data.vision import VisionDataModule


class TorchvisionDataModule(VisionDataModule):
    """Base class of datamodules for datasets that torchvision downloads and reads.

    Class attributes besides those of `VisionDataModule`: ``files``, the files in ``root`` that messages name, and
    ``dataset_class``, torchvision's class; a subclass may override `open_dataset` instead.

    Args:
        root: Folder that holds the data, in torchvision's layout.
        download: Let torchvision download missing files. Existing files are used as they are.
        **kwargs: Arguments of `VisionDataModule`: ``batch_size``, ``eval_batch_size``, ``num_workers``, ``augment``,
            ``validation``, ``limit_samples``, ``seed``, ``normalize``.

    Raises:
        MisconfigurationException: If an argument is out of range, or the files can neither be found nor
            downloaded; torchvision's own message is part of the text.
    """

    dataset_class: ClassVar[Callable[..., Any]]
    files: ClassVar[str]

    def __init__(self, root: str = "data", download: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root
        self.download = download

    def open_dataset(self, train: bool, download: bool) -> Any:
        """Construct torchvision's data set object for one split."""
        return type(self).dataset_class(self.root, train=train, download=download)

    def prepare_data(self) -> None:
        """Download both splits if ``download`` is set and they are missing."""
        if self.download:
            for train in (True, False):
                self._open(train, download=True)

    def load_images(self, train: bool) -> tuple[Tensor, Tensor]:
        """Read one of torchvision's two splits into memory."""
        dataset = self._open(train, download=False)
        images = torch.as_tensor(dataset.data)
        if images.ndim == 3:
            images = images.unsqueeze(1)
        elif tuple(images.shape[1:]) != self.image_shape:
            images = images.permute(0, 3, 1, 2)
        targets = dataset.targets if hasattr(dataset, "targets") else dataset.labels
        return images.contiguous(), torch.as_tensor(targets)

    def _open(self, train: bool, download: bool) -> Any:
        try:
            return self.open_dataset(train, download)
        except (RuntimeError, OSError) as error:
            hint = (
                "Check the network connection, or put the files there by hand."
                if self.download
                else "Put the files there, point root to them, or set download=True."
            )
            raise MisconfigurationException(
                f"torchvision cannot read {type(self).__name__}: {error}\n"
                f"It was looking for {self.files} under root={self.root!r}. {hint}"
            ) from error


class MNIST(TorchvisionDataModule):
    """MNIST: 60,000 training and 10,000 test images of handwritten digits, 28×28 pixels, ten classes.

    Arguments are those of `TorchvisionDataModule`.

    Example:
        >>> data = MNIST(root="data", batch_size=20, validation=0.1)
        >>> data.num_classes, data.image_shape
        (10, (1, 28, 28))
    """

    num_classes = 10
    image_shape = (1, 28, 28)
    mean = (0.1307,)
    std = (0.3081,)
    mirror = False
    dataset_class = torchvision.datasets.MNIST
    files = "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte"


class FashionMNIST(TorchvisionDataModule):
    """Fashion-MNIST: 60,000 training and 10,000 test images of clothing, 28×28 pixels, ten classes.

    Arguments are those of `TorchvisionDataModule`.

    Example:
        >>> FashionMNIST(root="data").image_shape
        (1, 28, 28)
    """

    num_classes = 10
    image_shape = (1, 28, 28)
    mean = (0.2860,)
    std = (0.3530,)
    dataset_class = torchvision.datasets.FashionMNIST
    files = "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte"


class PhotographDataModule(TorchvisionDataModule):
    """Base class of the data sets of photographs, which are augmented by default, as in the papers.

    Args:
        augment: Random crop (padding 4) and horizontal flip. On by default.
    """

    def __init__(self, root: str = "data", download: bool = True, augment: bool = True, **kwargs: Any) -> None:
        super().__init__(root, download, augment=augment, **kwargs)


class CIFAR10(PhotographDataModule):
    """CIFAR-10: 50,000 training and 10,000 test photographs, 32×32 pixels in colour, ten classes.

    Arguments are those of `TorchvisionDataModule`; ``augment`` is on by default.

    Example:
        >>> CIFAR10(root="data", augment=False).image_shape
        (3, 32, 32)
    """

    num_classes = 10
    image_shape = (3, 32, 32)
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)
    dataset_class = torchvision.datasets.CIFAR10
    files = "cifar-10-batches-py"


class CIFAR100(PhotographDataModule):
    """CIFAR-100: 50,000 training and 10,000 test photographs, 32×32 pixels in colour, a hundred classes.

    Arguments are those of `TorchvisionDataModule`; ``augment`` is on by default.

    Example:
        >>> CIFAR100(root="data", augment=False).num_classes
        100
    """

    num_classes = 100
    image_shape = (3, 32, 32)
    mean = (0.5071, 0.4867, 0.4408)
    std = (0.2675, 0.2565, 0.2761)
    dataset_class = torchvision.datasets.CIFAR100
    files = "cifar-100-python"


class SVHN(TorchvisionDataModule):
    """Street View House Numbers, cropped: 73,257 training and 26,032 test digits, 32×32 pixels in colour.

    The 531,131 additional images ("extra") are not used, as in the papers. Arguments are those of
    `TorchvisionDataModule`.

    Example:
        >>> SVHN(root="data").image_shape
        (3, 32, 32)
    """

    num_classes = 10
    image_shape = (3, 32, 32)
    mean = (0.4377, 0.4438, 0.4728)
    std = (0.1980, 0.2010, 0.1970)
    mirror = False
    files = "train_32x32.mat and test_32x32.mat"

    def open_dataset(self, train: bool, download: bool) -> torchvision.datasets.SVHN:
        """Construct torchvision's data set object for one split."""
        return torchvision.datasets.SVHN(self.root, split="train" if train else "test", download=download)
