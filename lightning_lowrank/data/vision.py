"""Datamodules for the image data sets of federated learning's literature.

A federated round reads many small, differently shuffled pieces of one data set, so the cost of fetching a
batch is paid often. Every data set here is small enough to stay in memory as one ``uint8`` tensor; a batch is
one gather from it, and normalisation and augmentation are operations on the whole batch. Images that are
stored compressed are decoded once, for all runs.

:class:`VisionDataModule` holds what the data sets share. A new one needs its class attributes and
:meth:`VisionDataModule.load_images`.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
import torchvision.datasets
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from lightning_lowrank.data.splits import SplitsInMemory


class ImageBatch:
    """Samples that already lie in one tensor, readable as a sequence of ``(image, target)`` pairs.

    :meth:`TensorImages.__getitems__` returns it. :func:`collate_images` takes the tensors out at no cost; any
    other collate function, ``torch.utils.data.default_collate`` among them, finds the samples it expects.

    Args:
        images: Float images, ``(samples, channels, height, width)``.
        targets: Class indices, ``(samples,)``.

    Example:
        >>> batch = ImageBatch(torch.zeros(2, 1, 8, 8), torch.tensor([3, 5]))
        >>> [(image.shape, target) for image, target in batch]
        [(torch.Size([1, 8, 8]), 3), (torch.Size([1, 8, 8]), 5)]
    """

    def __init__(self, images: Tensor, targets: Tensor) -> None:
        self.images = images
        self.targets = targets

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.targets[index])

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return zip(self.images.unbind(), self.targets.tolist(), strict=True)


def collate_images(samples: Any) -> Any:
    """Collate function that passes an :class:`ImageBatch` through and collates anything else as PyTorch does.

    Args:
        samples: What the data set returned for one batch of indices: an :class:`ImageBatch` or a list of
            samples.

    Returns:
        ``[images, targets]``, as ``torch.utils.data.default_collate`` returns for such samples.

    Example:
        >>> images, targets = collate_images(ImageBatch(torch.zeros(2, 1, 8, 8), torch.tensor([3, 5])))
        >>> images.shape, targets
        (torch.Size([2, 1, 8, 8]), tensor([3, 5]))
        >>> collate_images([(torch.zeros(1, 8, 8), 3), (torch.zeros(1, 8, 8), 5)])[1]
        tensor([3, 5])
    """
    if isinstance(samples, ImageBatch):
        return [samples.images, samples.targets]
    return default_collate(samples)


collate_images.deterministic = True  # type: ignore[attr-defined]


class TensorImages(Dataset[tuple[Tensor, int]]):
    """Images and class indices in memory, normalised and optionally augmented when they are fetched.

    A sample is ``(image, target)``: ``(pixels / pixel_max - mean) / std`` as ``float32``, and an ``int``. It
    works with any ``DataLoader`` and inside any number of ``torch.utils.data.Subset``; with
    ``collate_fn=collate_images`` a batch is never taken apart.

    Augmentation pads the raw pixels with zeros (black), crops each image at a random place back to its size,
    and mirrors each with probability one half. All draws of a batch (first the offsets, then the flips) come
    from PyTorch's *global* generator when the batch is fetched: ``torch.manual_seed`` before the fetch fixes
    them (the federated loop seeds every batch that way), and ``DataLoader`` workers each have a seed of their
    own.

    Args:
        images: ``uint8`` pixels, ``(samples, channels, height, width)``.
        targets: Class indices, ``(samples,)``; kept as a ``LongTensor`` in the attribute of the same name.
        mean: Mean of each channel, of pixels scaled to [0, 1].
        std: Standard deviation of each channel, of pixels scaled to [0, 1].
        pixel_max: The pixel value that stands for full intensity.
        crop_padding: Zeros added at each side before the random crop, in pixels. Default 0: no crop.
        mirror: Whether an image is flipped left to right with probability one half. Default no.

    Raises:
        ValueError: If shapes, types or ranges do not fit each other.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> pixels = torch.arange(256, dtype=torch.uint8).view(4, 1, 8, 8)
        >>> dataset = TensorImages(pixels, torch.tensor([0, 1, 0, 1]), mean=[0.5], std=[0.25])
        >>> image, target = dataset[3]
        >>> image.max(), target
        (tensor(2.), 1)
        >>> [images.shape for images, targets in DataLoader(dataset, 3, collate_fn=collate_images)]
        [torch.Size([3, 1, 8, 8]), torch.Size([1, 1, 8, 8])]
    """

    def __init__(
        self,
        images: Tensor,
        targets: Tensor,
        mean: Sequence[float],
        std: Sequence[float],
        pixel_max: int = 255,
        crop_padding: int = 0,
        mirror: bool = False,
    ) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise ValueError(
                "images must be a uint8 tensor (samples, channels, height, width), "
                f"got {images.dtype} {tuple(images.shape)}"
            )
        if targets.shape != images.shape[:1]:
            raise ValueError(
                f"targets must hold one class index per image, shape ({len(images)},), got {tuple(targets.shape)}"
            )
        channels = images.shape[1]
        if len(mean) != channels or len(std) != channels:
            raise ValueError(f"mean and std must have {channels} values, one per channel, got {mean}, {std}")
        if min(std) <= 0 or pixel_max <= 0:
            raise ValueError(f"std and pixel_max must be positive, got std={std}, pixel_max={pixel_max}")
        if crop_padding < 0:
            raise ValueError(f"crop_padding must be a number of pixels >= 0, got {crop_padding}")
        self.images = images.contiguous()
        self.targets = targets.long()
        self.mean = torch.tensor(mean).view(-1, 1, 1)
        self.std = torch.tensor(std).view(-1, 1, 1)
        self.pixel_max = pixel_max
        self.crop_padding = crop_padding
        self.mirror = mirror

    @property
    def deterministic(self) -> bool:
        """Whether a sample is the same whenever it is fetched: without augmentation."""
        return not self.crop_padding and not self.mirror

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(self, indices: Sequence[int]) -> ImageBatch:
        """Fetch the samples at ``indices`` (non-negative) with one gather, normalised and augmented."""
        rows = torch.as_tensor(indices, dtype=torch.long)
        pixels = self._augment(self.images.index_select(0, rows))
        images = pixels.float().div_(self.pixel_max).sub_(self.mean).div_(self.std)
        return ImageBatch(images, self.targets.index_select(0, rows))

    def _augment(self, pixels: Tensor) -> Tensor:
        samples, _, height, width = pixels.shape
        if self.crop_padding:
            top, left = torch.randint(2 * self.crop_padding + 1, (2, samples))
            padded = F.pad(pixels, (self.crop_padding,) * 4)
            windows = padded.unfold(2, height, 1).unfold(3, width, 1)
            pixels = windows[torch.arange(samples), :, top, left]
        if self.mirror:
            flipped = torch.rand(samples) < 0.5
            pixels = torch.where(flipped.view(-1, 1, 1, 1), pixels.flip(-1), pixels)
        return pixels


def _stratified_split(targets: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Ascending indices of the samples that stay and of those held out, ``share`` of every class."""
    generator = torch.Generator().manual_seed(seed)
    held_out = torch.zeros(len(targets), dtype=torch.bool)
    for label in targets.unique():
        members = (targets == label).nonzero().squeeze(1)
        order = torch.randperm(len(members), generator=generator)
        held_out[members[order[: round(share * len(members))]]] = True
    return (~held_out).nonzero().squeeze(1), held_out.nonzero().squeeze(1)


class VisionDataModule(SplitsInMemory):
    """Base class of the image datamodules: splits, loaders, normalisation and augmentation.

    The papers this package reproduces report the best round *on the test set*, so where a data set comes with
    a test set, ``validation="test"`` is the default: ``val_dataloader`` serves the test images. A best round
    found that way is chosen by looking at the test set. A share, such as ``validation=0.1``, holds that part
    of the training images out instead, which leaves the test set untouched for a final ``test``.

    Class attributes of every data set: ``num_classes``, ``image_shape`` (channels, height, width), ``mean``
    and ``std`` (per channel, of pixels in [0, 1]), ``pixel_max``, ``crop_padding`` and ``mirror`` (what
    ``augment`` does).

    Args:
        batch_size: Images per training batch.
        eval_batch_size: Images per batch of the validation, test and predict loaders.
        num_workers: Worker processes per loader. Default 0: images are in memory, and a gather is usually
            quicker than its transfer between processes.
        augment: Augment training images: a random crop after padding by ``crop_padding`` pixels (4 for images
            of 28 and 32 pixels) and, where a mirrored image still shows its class (not for digits), a
            horizontal flip with probability one half. Drawn from PyTorch's global generator, see
            :class:`TensorImages`.
        validation: ``"test"``, or the share of the training images (0 < share < 1) that is held out for
            validation, from every class alike.
        limit_samples: Keep at most this many images, chosen at random, of each split; for quick runs.
            Default: all.
        seed: Seed of the hold-out and of ``limit_samples``. It is separate from ``seed_everything``, so that
            repeated runs with other seeds see the same split.
        normalize: Bring the data set's pixels to mean 0 and standard deviation 1; otherwise they are in [0, 1].

    Raises:
        MisconfigurationException: If an argument is out of range, or a split comes out empty.
    """

    num_classes: ClassVar[int]
    image_shape: ClassVar[tuple[int, int, int]]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    pixel_max: ClassVar[int] = 255
    crop_padding: ClassVar[int] = 4
    mirror: ClassVar[bool] = True

    def __init__(
        self,
        batch_size: int = 64,
        eval_batch_size: int = 1024,
        num_workers: int = 0,
        augment: bool = False,
        validation: Literal["test"] | float = "test",
        limit_samples: int | None = None,
        seed: int = 0,
        normalize: bool = True,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, num_workers)
        if limit_samples is not None and limit_samples < 1:
            raise MisconfigurationException(
                f"limit_samples must be at least 1, or None for all images, got {limit_samples!r}"
            )
        if validation != "test":
            _check_share("validation", validation, "'test' (validate on the test set) or ")
        self.augment = augment
        self.validation = validation
        self.limit_samples = limit_samples
        self.seed = seed
        self.normalize = normalize

    def load_images(self, train: bool) -> tuple[Tensor, Tensor]:
        """Read one of the two official splits.

        Args:
            train: The training images if true, else the test images.

        Returns:
            ``uint8`` pixels ``(samples, channels, height, width)`` and class indices ``(samples,)``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define load_images")

    def setup(self, stage: str | None = None) -> None:
        """Load what ``stage`` reads (``None``: everything), unless it is there already."""
        validates_on_test = self.validation == "test"
        if self.test_set is None and (stage in (None, "test", "predict") or validates_on_test):
            self.test_set = self._dataset(*self.load_images(train=False), augment=False)
        stages_with_training_images = (None, "fit") if validates_on_test else (None, "fit", "validate")
        if self.train_set is None and stage in stages_with_training_images:
            images, targets = self.load_images(train=True)
            if self.validation != "test":
                kept, held_out = _stratified_split(targets, self.validation, self.seed)
                if not len(kept) or not len(held_out):
                    raise MisconfigurationException(
                        f"validation={self.validation} of {len(targets)} training images, rounded class by "
                        f"class, leaves {len(kept)} for training and {len(held_out)} for validation; "
                        "use another share"
                    )
                self.validation_set = self._dataset(images[held_out], targets[held_out], augment=False)
                images, targets = images[kept], targets[kept]
            self.train_set = self._dataset(images, targets, augment=self.augment)
        if validates_on_test:
            self.validation_set = self.test_set

    def collate(self) -> Callable[[Sequence[Any]], Any]:
        """Return `collate_images`."""
        return collate_images

    def _dataset(self, images: Tensor, targets: Tensor, augment: bool) -> TensorImages:
        if self.limit_samples is not None and self.limit_samples < len(images):
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(self.seed))
            kept = order[: self.limit_samples].sort().values
            images, targets = images[kept], targets[kept]
        return TensorImages(
            images,
            targets,
            self.mean if self.normalize else [0.0] * len(self.mean),
            self.std if self.normalize else [1.0] * len(self.std),
            self.pixel_max,
            crop_padding=self.crop_padding if augment else 0,
            mirror=self.mirror and augment,
        )


def _check_share(name: str, value: float, alternative: str = "") -> None:
    if isinstance(value, (bool, str)) or math.isnan(value) or not 0 < value < 1:
        raise MisconfigurationException(f"{name} must be {alternative}a share between 0 and 1, got {value!r}")


class Digits(VisionDataModule):
    """The 1,797 handwritten digits that come with scikit-learn: real images of 8×8 pixels, no download.

    Training, validation and test images are disjoint and hold every class in the same proportion. Pixels
    (0 to 16) are scaled to [0, 1] and normalised.

    Args:
        batch_size: Images per training batch.
        eval_batch_size: Images per batch of the other loaders.
        num_workers: Worker processes per loader.
        augment: Random crop after padding by one pixel.
        validation: Share of the training images that is held out for validation, or ``"test"``.
        test_share: Share of all images that is held out for testing.
        limit_samples: Keep at most this many images of each split.
        seed: Seed of all three splits and of ``limit_samples``.
        normalize: Bring pixels to mean 0 and standard deviation 1; otherwise they are in [0, 1].

    Raises:
        MisconfigurationException: If an argument is out of range, or a split comes out empty.

    Example:
        >>> data = Digits()
        >>> data.setup()
        >>> len(data.train_set), len(data.validation_set), len(data.test_set)
        (1222, 216, 359)
        >>> images, targets = next(iter(data.train_dataloader()))
        >>> images.shape, targets.shape
        (torch.Size([64, 1, 8, 8]), torch.Size([64]))
    """

    num_classes = 10
    image_shape = (1, 8, 8)
    mean = (0.3053,)
    std = (0.3760,)
    pixel_max = 16
    crop_padding = 1
    mirror = False

    def __init__(
        self,
        batch_size: int = 64,
        eval_batch_size: int = 1024,
        num_workers: int = 0,
        augment: bool = False,
        validation: Literal["test"] | float = 0.15,
        test_share: float = 0.2,
        limit_samples: int | None = None,
        seed: int = 0,
        normalize: bool = True,
    ) -> None:
        super().__init__(
            batch_size,
            eval_batch_size,
            num_workers,
            augment,
            validation,
            limit_samples=limit_samples,
            seed=seed,
            normalize=normalize,
        )
        _check_share("test_share", test_share)
        self.test_share = test_share

    def load_images(self, train: bool) -> tuple[Tensor, Tensor]:
        """Return the images that are (``train``) or are not in the training share."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.from_numpy(digits.images).to(torch.uint8).unsqueeze(1)
        targets = torch.from_numpy(digits.target).long()
        kept, held_out = _stratified_split(targets, self.test_share, self.seed)
        rows = kept if train else held_out
        if not len(rows):
            raise MisconfigurationException(
                f"test_share={self.test_share} leaves no {'training' if train else 'test'} image"
            )
        return images[rows], targets[rows]


class TorchvisionDataModule(VisionDataModule):
    """Base class of the data sets that torchvision downloads and reads.

    Args:
        root: Folder that holds the data, in torchvision's layout.
        download: Let torchvision download what is missing. Files that are there are used as they are.
        **kwargs: Arguments of :class:`VisionDataModule`: ``batch_size``, ``eval_batch_size``,
            ``num_workers``, ``augment``, ``validation``, ``limit_samples``, ``seed``, ``normalize``.

    Raises:
        MisconfigurationException: If an argument is out of range, or the files can neither be found nor
            downloaded; torchvision's own message is part of the text.
    """

    files: ClassVar[str]

    def __init__(self, root: str = "data", download: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root
        self.download = download

    def open_dataset(self, train: bool, download: bool) -> Any:
        """Construct torchvision's data set object for one split."""
        raise NotImplementedError(f"{type(self).__name__} must define open_dataset")

    def prepare_data(self) -> None:
        """Download both splits if ``download`` is set and they are not there."""
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

    Args:
        root: Folder that holds the data (``MNIST/raw`` in it).
        download: Let torchvision download what is missing.
        **kwargs: Arguments of :class:`VisionDataModule`.

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
    files = "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte"

    def open_dataset(self, train: bool, download: bool) -> torchvision.datasets.MNIST:
        """Construct torchvision's data set object for one split."""
        return torchvision.datasets.MNIST(self.root, train=train, download=download)


class FashionMNIST(TorchvisionDataModule):
    """Fashion-MNIST: 60,000 training and 10,000 test images of clothing, 28×28 pixels, ten classes.

    Args:
        root: Folder that holds the data (``FashionMNIST/raw`` in it).
        download: Let torchvision download what is missing.
        **kwargs: Arguments of :class:`VisionDataModule`.

    Example:
        >>> data = FashionMNIST(root="data")
        >>> data.num_classes, data.image_shape
        (10, (1, 28, 28))
    """

    num_classes = 10
    image_shape = (1, 28, 28)
    mean = (0.2860,)
    std = (0.3530,)
    files = "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte"

    def open_dataset(self, train: bool, download: bool) -> torchvision.datasets.FashionMNIST:
        """Construct torchvision's data set object for one split."""
        return torchvision.datasets.FashionMNIST(self.root, train=train, download=download)


class CIFAR10(TorchvisionDataModule):
    """CIFAR-10: 50,000 training and 10,000 test photographs, 32×32 pixels in colour, ten classes.

    Args:
        root: Folder that holds the data (``cifar-10-batches-py`` in it).
        download: Let torchvision download what is missing.
        augment: Random crop (padding 4) and horizontal flip. On by default, as in the papers.
        **kwargs: Arguments of :class:`VisionDataModule`.

    Example:
        >>> data = CIFAR10(root="data", augment=False)
        >>> data.num_classes, data.image_shape
        (10, (3, 32, 32))
    """

    num_classes = 10
    image_shape = (3, 32, 32)
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)
    files = "cifar-10-batches-py"

    def __init__(self, root: str = "data", download: bool = True, augment: bool = True, **kwargs: Any) -> None:
        super().__init__(root, download, augment=augment, **kwargs)

    def open_dataset(self, train: bool, download: bool) -> torchvision.datasets.CIFAR10:
        """Construct torchvision's data set object for one split."""
        return torchvision.datasets.CIFAR10(self.root, train=train, download=download)


class CIFAR100(TorchvisionDataModule):
    """CIFAR-100: 50,000 training and 10,000 test photographs, 32×32 pixels in colour, a hundred classes.

    Args:
        root: Folder that holds the data (``cifar-100-python`` in it).
        download: Let torchvision download what is missing.
        augment: Random crop (padding 4) and horizontal flip. On by default, as in the papers.
        **kwargs: Arguments of :class:`VisionDataModule`.

    Example:
        >>> data = CIFAR100(root="data", augment=False)
        >>> data.num_classes, data.image_shape
        (100, (3, 32, 32))
    """

    num_classes = 100
    image_shape = (3, 32, 32)
    mean = (0.5071, 0.4867, 0.4408)
    std = (0.2675, 0.2565, 0.2761)
    files = "cifar-100-python"

    def __init__(self, root: str = "data", download: bool = True, augment: bool = True, **kwargs: Any) -> None:
        super().__init__(root, download, augment=augment, **kwargs)

    def open_dataset(self, train: bool, download: bool) -> torchvision.datasets.CIFAR100:
        """Construct torchvision's data set object for one split."""
        return torchvision.datasets.CIFAR100(self.root, train=train, download=download)


class SVHN(TorchvisionDataModule):
    """Street View House Numbers, cropped: 73,257 training and 26,032 test digits, 32×32 pixels in colour.

    The 531,131 additional images ("extra") are not used, as in the papers.

    Args:
        root: Folder that holds the data (``train_32x32.mat`` and ``test_32x32.mat``).
        download: Let torchvision download what is missing.
        **kwargs: Arguments of :class:`VisionDataModule`.

    Example:
        >>> data = SVHN(root="data")
        >>> data.num_classes, data.image_shape
        (10, (3, 32, 32))
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


class TinyImageNet(TorchvisionDataModule):
    """Tiny-ImageNet: 100,000 training and 10,000 validation photographs, 64×64 pixels in colour, 200 classes.

    The labels of its own test images were never published. As in the papers, the validation images stand for
    the test set here.

    The images are JPEG files, which the first run decodes; it keeps the pixels (1.35 GB) in
    ``tiny-imagenet-200.safetensors`` beside the folder, which later runs read. Delete that file where the
    folder has changed. Grey images (1.8 % of all) get three equal channels. Classes are numbered in the
    order of their sorted WordNet names.

    The archive is http://cs231n.stanford.edu/tiny-imagenet-200.zip (248 MB).

    Args:
        root: Folder that holds the data (``tiny-imagenet-200``, as the archive has it, in it).
        download: Download and unpack the archive if neither the folder nor the decoded images are there.
        augment: Random crop (padding 4) and horizontal flip. On by default.
        **kwargs: Arguments of :class:`VisionDataModule`.

    Raises:
        MisconfigurationException: If an argument is out of range, the folder is absent and cannot be
            downloaded, or is incomplete (what is missing is named), or there is no room for the decoded images.

    Example:
        >>> data = TinyImageNet(root="data", augment=False)
        >>> data.num_classes, data.image_shape
        (200, (3, 64, 64))
    """

    num_classes = 200
    image_shape = (3, 64, 64)
    mean = (0.4802, 0.4481, 0.3975)
    std = (0.2770, 0.2691, 0.2821)
    files = "tiny-imagenet-200/{wnids.txt,train,val}"
    url: ClassVar[str] = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
    md5: ClassVar[str] = "90528d7ca1a48142e341f4ef8d21d0de"

    def __init__(self, root: str = "data", download: bool = True, augment: bool = True, **kwargs: Any) -> None:
        super().__init__(root, download, augment=augment, **kwargs)

    @property
    def folder(self) -> Path:
        """The unpacked archive."""
        return Path(self.root).expanduser() / "tiny-imagenet-200"

    @property
    def decoded(self) -> Path:
        """The file of decoded images."""
        return self.folder.with_suffix(".safetensors")

    def prepare_data(self) -> None:
        """Download the archive if that is needed and ``download`` is set; decode its images if no run has."""
        if not self.decoded.is_file() and (self.download or self.folder.is_dir()):
            self._open(train=False, download=self.download)

    def open_dataset(self, train: bool, download: bool) -> SimpleNamespace:
        """Read the decoded images of one split, after what must come before."""
        if not self.decoded.is_file():
            if download and not self.folder.is_dir():
                self._unpack()
            self._decode()
        split = "train" if train else "val"
        try:
            with safe_open(self.decoded, framework="pt") as file:
                images, targets = (file.get_tensor(f"{split}.{name}") for name in ("images", "targets"))
        except SafetensorError as error:
            raise RuntimeError(f"{self.decoded} is damaged, delete it: {error}") from error
        return SimpleNamespace(data=images, targets=targets)

    def _unpack(self) -> None:
        """Download the archive and unpack it; the folder is there only when it is complete."""
        root = self.folder.parent
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as unpacked:
            torchvision.datasets.utils.download_and_extract_archive(self.url, str(root), unpacked, md5=self.md5)
            (Path(unpacked) / self.folder.name).rename(self.folder)

    def _decode(self) -> None:
        if not self.folder.is_dir():
            raise FileNotFoundError(f"{self.folder} not found. {self.url} is unpacked in {self.folder.parent}.")
        names = sorted((self.folder / "wnids.txt").read_text().split())
        if len(names) != self.num_classes:
            raise RuntimeError(f"{self.folder / 'wnids.txt'} names {len(names)} classes, and not {self.num_classes}")
        classes = {name: index for index, name in enumerate(names)}
        training = [
            (path, target)
            for name, target in classes.items()
            for path in self._images_of(self.folder / "train" / name / "images")
        ]
        validation = self._validation_images(classes)
        rank_zero_info(f"{type(self).__name__}: decoding {len(training) + len(validation):,} images, once for all runs")
        tensors: dict[str, Tensor] = {}
        for split, samples in (("train", training), ("val", validation)):
            images = np.empty((len(samples), *self.image_shape), dtype=np.uint8)
            for index, (path, _) in enumerate(samples):
                images[index] = self._pixels(path)
            tensors[f"{split}.images"] = torch.from_numpy(images)
            tensors[f"{split}.targets"] = torch.tensor([target for _, target in samples])
        with tempfile.TemporaryDirectory(dir=self.decoded.parent) as unfinished:
            save_file(tensors, Path(unfinished) / self.decoded.name)
            (Path(unfinished) / self.decoded.name).replace(self.decoded)

    def _images_of(self, folder: Path) -> list[Path]:
        found = sorted(folder.glob("*.JPEG"))
        if not found:
            raise FileNotFoundError(f"{folder} holds no image (*.JPEG): {self.folder} is not complete")
        return found

    def _validation_images(self, classes: dict[str, int]) -> list[tuple[Path, int]]:
        """Return the files and classes that the annotations name: lines of a file name, a class and a box."""
        annotations = self.folder / "val" / "val_annotations.txt"
        samples = []
        for number, line in enumerate(annotations.read_text().splitlines(), start=1):
            name, label = [*line.split("\t"), ""][:2]
            if label not in classes:
                raise RuntimeError(
                    f"{annotations}, line {number}: a file's name, a tab and a class of wnids.txt must come first,"
                    f" got {line!r}"
                )
            samples.append((self.folder / "val" / "images" / name, classes[label]))
        if not samples:
            raise RuntimeError(f"{annotations} names no image")
        return samples

    def _pixels(self, path: Path) -> np.ndarray:
        with Image.open(path) as image:
            try:
                pixels = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
            except OSError as error:
                raise OSError(f"{path}: {error}") from error
        if pixels.shape != self.image_shape:
            raise RuntimeError(f"{path} has {pixels.shape[2]}×{pixels.shape[1]} pixels, and not 64×64")
        return pixels
