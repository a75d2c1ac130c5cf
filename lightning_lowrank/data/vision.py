"""`VisionDataModule`, the base class of the image datamodules, and `Digits`.

A new data set needs its class attributes and `VisionDataModule.load_images`.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.configuration import check_integer, check_number
from lightning_lowrank.data.images import TensorImages, collate_images
from lightning_lowrank.data.splits import SplitsInMemory
from lightning_lowrank.federated.data.rows import Rows


class VisionDataModule(SplitsInMemory):
    """Base class of the image datamodules: splits, loaders, normalisation and augmentation.

    The papers that this package reproduces report the best round *on the test set*. Therefore ``validation="test"`` is
    the default if a data set has a test set: ``val_dataloader`` serves the test images, and the best round is chosen
    by looking at the test set. A share, such as ``validation=0.1``, holds out that part of the training images instead,
    and leaves the test set for a final ``test``.

    Class attributes of every data set: ``num_classes``, ``image_shape`` (channels, height, width), ``mean`` and ``std``
    (per channel, of pixels in [0, 1]), ``pixel_max``, ``crop_padding`` and ``mirror`` (what ``augment`` does).

    Arguments that are not named here are those of `SplitsInMemory`.

    Args:
        augment: Augment training images: a random crop after padding by ``crop_padding`` pixels (4 by default) and,
            except for digits, a horizontal flip with probability one half. Drawn from PyTorch's global generator, see
            `TensorImages`.
        validation: ``"test"``, or the share of the training images (0 < share < 1) that is held out for validation,
            of every class.
        limit_samples: Keep at most this many images, chosen at random, of each split; for quick runs. Default: all.
        seed: Seed of the hold-out and of ``limit_samples``. Runs with different ``seed_everything`` see the same split.
        normalize: Scale the data set's pixels to mean 0 and standard deviation 1; otherwise they are in [0, 1].

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
        if limit_samples is not None:
            check_integer("limit_samples", limit_samples, hint="None for all images")
        if validation != "test":
            check_number("validation", validation, above=0, below=1, hint="'test' to validate on the test set")
        self.augment = augment
        self.validation: float | str = validation
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

    def load_split(self, train: bool) -> tuple[Tensor, Tensor, Rows]:
        """Read one of the two official splits, and the row of each image.

        By default it is `load_images`, whose images are all of the split's rows.
        """
        images, targets = self.load_images(train)
        return images, targets, Rows.all(len(images))

    def setup(self, stage: str | None = None) -> None:
        """Load the splits of ``stage`` (``None``: all), once."""
        validates_on_test = self.validation == "test"
        if self.test_set is None and (validates_on_test or stage in (None, "test", "predict")):
            self.test_set = self._dataset(*self.load_split(train=False), augment=False)
        trains = stage in (None, "fit") or (stage == "validate" and not validates_on_test)
        if trains and self.train_set is None:
            images, targets, rows = self.load_split(train=True)
            if not isinstance(self.validation, str):
                kept, held_out = hold_out(targets, self.validation, self.seed, "validation", "training images")
                apart = images[held_out], targets[held_out], rows.select(held_out)
                self.validation_set = self._dataset(*apart, augment=False)
                images, targets, rows = images[kept], targets[kept], rows.select(kept)
            self.train_set = self._dataset(images, targets, rows, augment=self.augment)
        if validates_on_test:
            self.validation_set = self.test_set

    def collate(self) -> Callable[[Sequence[Any]], Any]:
        """Return `collate_images`."""
        return collate_images

    def _within_limit(self, samples: int) -> Tensor | None:
        """Ascending indices of the samples that ``limit_samples`` keeps; ``None`` for all."""
        if self.limit_samples is None or self.limit_samples >= samples:
            return None
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(self.seed))
        return order[: self.limit_samples].sort().values

    def _dataset(self, images: Tensor, targets: Tensor, rows: Rows, augment: bool) -> TensorImages:
        kept = self._within_limit(len(images))
        if kept is not None:
            images, targets, rows = images[kept], targets[kept], rows.select(kept)
        dataset = TensorImages(
            images,
            targets,
            mean=self.mean if self.normalize else [0.0] * len(self.mean),
            std=self.std if self.normalize else [1.0] * len(self.std),
            pixel_max=self.pixel_max,
            crop_padding=self.crop_padding if augment else 0,
            mirror=self.mirror and augment,
        )
        dataset.rows = rows
        return dataset


class Digits(VisionDataModule):
    """The 1,797 handwritten digits that come with scikit-learn: real images of 8×8 pixels, no download.

    Training and test images are disjoint and hold every class in the same proportion, and so do validation images
    unless they are the test images. Pixels (0 to 16) are scaled to [0, 1] and normalised; augmentation is a random crop
    after padding by one pixel.

    Args:
        validation: Share of the training images that is held out for validation, or ``"test"``.
        test_share: Share of all images that is held out for testing.
        **kwargs: Other arguments of `VisionDataModule`; ``seed`` is that of all three splits.

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

    def __init__(self, *, validation: Literal["test"] | float = 0.15, test_share: float = 0.2, **kwargs: Any) -> None:
        super().__init__(validation=validation, **kwargs)
        check_number("test_share", test_share, above=0, below=1)
        self.test_share = test_share
        self._rows: dict[bool, Rows] = {}

    def load_images(self, train: bool) -> tuple[Tensor, Tensor]:
        """The images of the training part, or of the test part, and their class indices."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.from_numpy(digits.images).to(torch.uint8).unsqueeze(1)
        targets = torch.from_numpy(digits.target).long()
        kept, held_out = stratified_split(targets, self.test_share, self.seed)
        rows = kept if train else held_out
        if not len(rows):
            raise MisconfigurationException(
                f"test_share={self.test_share} leaves no {'training' if train else 'test'} image"
            )
        self._rows[train] = Rows(rows, len(images))
        return images[rows], targets[rows]

    def load_split(self, train: bool) -> tuple[Tensor, Tensor, Rows]:
        """The images of a split, and their rows among all 1,797."""
        images, targets = self.load_images(train)
        return images, targets, self._rows.get(train, Rows.all(len(images)))


def stratified_split(targets: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Ascending indices of the kept and the held-out samples; every class is held out in proportion.

    The classes' counts are rounded so that their sum is the rounded share of all samples.
    """
    generator = torch.Generator().manual_seed(seed)
    classes = targets.argsort(stable=True).split(targets.unique(return_counts=True)[1].tolist())
    orders = [torch.randperm(len(members), generator=generator) for members in classes]
    counts = [round(share * len(members)) for members in classes]
    lacking = round(share * len(targets)) - sum(counts)
    # Ties between classes are broken at random: with regression targets, the smallest would always be held out.
    drawn = torch.randperm(len(classes), generator=generator).tolist()
    lack = [share * len(members) - count for members, count in zip(classes, counts, strict=True)]
    step = 1 if lacking > 0 else -1
    for place in sorted(drawn, key=lambda place: -step * lack[place])[: abs(lacking)]:
        counts[place] += step
    held_out = torch.zeros(len(targets), dtype=torch.bool)
    for members, order, count in zip(classes, orders, counts, strict=True):
        held_out[members[order[:count]]] = True
    return (~held_out).nonzero().squeeze(1), held_out.nonzero().squeeze(1)


def hold_out(targets: Tensor, share: float, seed: int, argument: str, what: str) -> tuple[Tensor, Tensor]:
    """`stratified_split`'s indices; raise, naming ``argument``, if one part is empty."""
    kept, held_out = stratified_split(targets, share, seed)
    if not len(kept) or not len(held_out):
        purpose = "validation" if argument == "validation" else "testing"
        raise MisconfigurationException(
            f"{argument}={share} of {len(targets)} {what} leaves {len(kept)} for training and"
            f" {len(held_out)} for {purpose}; use another share"
        )
    return kept, held_out
