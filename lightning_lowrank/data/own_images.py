"""`OwnImages`, the base class of datamodules for users' images: splits, decoding and memory."""

from __future__ import annotations

import math
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from lightning_lowrank.configuration import check_integer, check_number
from lightning_lowrank.data.images import TensorImages
from lightning_lowrank.data.vision import VisionDataModule, hold_out
from lightning_lowrank.federated.data.rows import Rows

_VALIDATION_NAMES = ("val", "valid", "validation")
_TEST_NAMES = ("test", "testing", *_VALIDATION_NAMES)
_ANNOUNCED = 10_000
_AT_ONCE = 1024


class Pictures:
    """Undecoded images and their class indices."""

    targets: Tensor
    rows: Rows | None = None
    """Rows of these images among all that were found; ``None``: all of them."""

    def open(self, row: int) -> Image.Image:
        """Open an image of a row; any exception says that it cannot be read."""
        raise NotImplementedError

    def place(self, row: int) -> str:
        """Where an image comes from, for error messages."""
        raise NotImplementedError

    def select(self: PicturesT, rows: Sequence[int]) -> PicturesT:
        """The images at ``rows``, in this order."""
        raise NotImplementedError

    def describe(self, images: TensorImages) -> None:
        """Set further columns, such as clients, as attributes of the decoded images."""


PicturesT = TypeVar("PicturesT", bound=Pictures)


class OwnImages(VisionDataModule):
    """Base class of datamodules for users' images. A subclass finds them in ``find_splits``.

    Each split is decoded once and held as one ``uint8`` tensor: in memory, or beyond ``memory_limit`` in a temporary
    file, which the operating system caches in free memory. Images have 8 bits in each channel.

    Args:
        size: Height and width of the images, or one number for both. Images of another shape are cropped to its
            proportions and scaled. ``None``: all images have one size, which stays.
        channels: 3 for colour, 1 for grey; images are converted.
        test_share: Share of each class that is held out for testing if there are no test images.
        mean: Mean of each channel, of pixels in [0, 1]. ``None``: that of the training images.
        std: Standard deviation of each channel. ``None``: that of the training images.
        memory_limit: Bytes of a split's pixels that are held in memory.
        mirror: Whether ``augment`` also flips images.
        **kwargs: Other arguments of `VisionDataModule`: ``batch_size``, ``eval_batch_size``, ``num_workers``,
            ``augment``, ``validation``, ``limit_samples``, ``seed``, ``normalize``.

    Attributes:
        classes: Names of the classes in the order of their indices.

    Raises:
        MisconfigurationException: If an argument is out of range; the test images have classes that the training
            images do not have; a split comes out empty; and, when images are read, if one cannot be, or they differ in
            size and ``size`` is not given.
    """

    classes: list[str]

    def __init__(
        self,
        size: int | list[int] | None = None,
        channels: Literal[1, 3] = 3,
        test_share: float = 0.2,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        memory_limit: int = 4 * 2**30,
        mirror: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.size = None if size is None else [size, size] if isinstance(size, int) else list(size)
        for side in self.size or ():
            check_integer("size", side)
        if self.size is not None and len(self.size) != 2:
            raise MisconfigurationException(f"size must be one number or [height, width], got {size}")
        if channels not in (1, 3):
            raise MisconfigurationException(f"channels must be 3 for colour or 1 for grey, got {channels!r}")
        check_number("test_share", test_share, above=0, below=1)
        check_integer("memory_limit", memory_limit, least=0)
        for name, values in (("mean", mean), ("std", std)):
            if values is not None and len(values) != channels:
                raise MisconfigurationException(f"{name} must have {channels} values, one per channel, got {values}")
        self.channels, self.test_share, self.memory_limit = channels, test_share, memory_limit
        self._given = mean, std
        # Set on the instance; other datasets have ``mirror`` on the class.
        vars(self)["mirror"] = mirror
        self._pictures: dict[str, Pictures] = {}

    def find_splits(self) -> tuple[Pictures, Pictures | None, Pictures | None]:
        """The images for training, test and validation.

        Without test images, a share of the training images is held out; without validation images, ``validation``
        decides. The method sets ``classes`` unless the constructor has.
        """
        raise NotImplementedError(f"{type(self).__name__} must define find_splits")

    def setup(self, stage: str | None = None) -> None:
        """Decode what ``stage`` reads (``None``: everything), unless it is decoded already."""
        if not self._pictures:
            self._pictures = self._divided()
            vars(self)["num_classes"] = len(self.classes)
        on_test = self.validation == "test"
        trains = stage in (None, "fit") or None in self._given
        if trains and self.train_set is None:
            pixels = self._decode(self._pictures["train"])
            mean, std = _moments(pixels) if None in self._given else ([], [])
            vars(self).update(mean=self._given[0] or mean, std=self._given[1] or std)
            self.train_set = self._images("train", pixels, self.augment)
        elif None not in self._given:
            vars(self).update(mean=self._given[0], std=self._given[1])
        if self.test_set is None and (on_test or stage in (None, "test", "predict")):
            self.test_set = self._images("test", self._decode(self._pictures["test"]), False)
        if on_test:
            self.validation_set = self.test_set
        elif self.validation_set is None and stage in (None, "fit", "validate"):
            self.validation_set = self._images("validation", self._decode(self._pictures["validation"]), False)

    def _divided(self) -> dict[str, Pictures]:
        """Each split's images."""
        train, test, validation = self.find_splits()
        if test is None:
            train, test = self._held_out(train, self.test_share, "test_share")
        found = {"train": train, "test": test}
        if validation is not None:
            found["validation"] = validation
        elif not isinstance(self.validation, str):
            found["train"], found["validation"] = self._held_out(train, self.validation, "validation")
        for split, pictures in found.items():
            kept = self._within_limit(len(pictures.targets))
            if kept is not None:
                found[split] = _selected(pictures, kept)
        return found

    def _held_out(self, pictures: PicturesT, share: float, argument: str) -> tuple[PicturesT, PicturesT]:
        kept, held_out = hold_out(pictures.targets, share, self.seed, argument, "images")
        return _selected(pictures, kept), _selected(pictures, held_out)

    def _images(self, split: str, pixels: Tensor, augment: bool) -> TensorImages:
        pictures = self._pictures[split]
        images = self._dataset(pixels, pictures.targets, _rows(pictures), augment)
        pictures.describe(images)
        return images

    def _decode(self, pictures: Pictures) -> Tensor:
        samples = len(pictures.targets)
        height, width = self._pixels(pictures, 0).shape[1:] if self.size is None else self.size
        vars(self)["image_shape"] = (self.channels, height, width)
        pixels = self._empty(samples, height, width)
        if samples >= _ANNOUNCED:
            rank_zero_info(f"{type(self).__name__}: decoding {samples:,} images")

        def put(row: int) -> None:
            found = self._pixels(pictures, row)
            if found.shape != pixels.shape[1:]:
                raise MisconfigurationException(
                    f"{pictures.place(row)} has {found.shape[2]}×{found.shape[1]} pixels and {pictures.place(0)} has"
                    f" {width}×{height}: give size={min(height, width)}, for example, to scale all images to one size"
                )
            pixels[row] = found

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for _ in pool.map(put, range(samples)):
                pass
        return pixels

    def _pixels(self, pictures: Pictures, row: int) -> Tensor:
        try:
            with pictures.open(row) as image:
                # Pillow would cut off values above 255.
                if image.mode == "F" or image.mode.startswith("I"):
                    raise MisconfigurationException(
                        f"{pictures.place(row)} has pixels of mode {image.mode!r}, but only images of 8 bits in each"
                        " channel can be read: scale the pixels to 0 to 255 and save them so"
                    )
                converted = image.convert("RGB" if self.channels == 3 else "L")
        except (MisconfigurationException, MemoryError):
            raise
        except Exception as error:  # a damaged image fails in any way
            raise MisconfigurationException(f"{pictures.place(row)} is no image that can be read: {error}") from error
        if self.size is not None and (converted.height, converted.width) != tuple(self.size):
            converted = ImageOps.fit(converted, (self.size[1], self.size[0]), Image.Resampling.BILINEAR)
        return pil_to_tensor(converted)

    def _empty(self, samples: int, height: int, width: int) -> Tensor:
        shape = (samples, self.channels, height, width)
        if math.prod(shape) <= self.memory_limit:
            return torch.empty(shape, dtype=torch.uint8)
        folder = tempfile.mkdtemp(prefix="lightning_lowrank_")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        file = str(Path(folder) / "pixels")
        return torch.from_file(file, shared=True, size=math.prod(shape), dtype=torch.uint8).view(shape)


def _rows(pictures: Pictures) -> Rows:
    return Rows.all(len(pictures.targets)) if pictures.rows is None else pictures.rows


def _selected(pictures: PicturesT, kept: Tensor) -> PicturesT:
    selected = pictures.select(kept.tolist())
    selected.rows = _rows(pictures).select(kept)
    return selected


def choose_splits(
    splits: Sequence[str], validation: float | str | None, test: str | None = None
) -> tuple[str | None, str | None]:
    """Names of the splits for test and validation; ``None`` for no such split.

    Args:
        splits: Names, in capitals or not.
        validation: As for `VisionDataModule`, or a split's name. ``None``: the first split with a name of validation
            images that is not tested on.
        test: The split to test on. ``None``: the first with a name of test images, or else of validation images.

    Example:
        >>> choose_splits(["test", "val"], None), choose_splits(["val"], None), choose_splits(["test", "val"], 0.1)
        (('test', 'val'), ('val', None), ('test', None))
    """

    def first(names: Sequence[str], taken: str | None) -> str | None:
        return next((each for name in names for each in splits if each.lower() == name and each != taken), None)

    if validation is None:
        apart = first(_VALIDATION_NAMES, test or first(_TEST_NAMES, None))
    else:
        # The string "test" means the test images, any other string a split's name.
        apart = validation if isinstance(validation, str) and validation != "test" else None
    return test or first(_TEST_NAMES, apart), apart


def _moments(pixels: Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel for pixels in [0, 1]; the deviation is at least 1/255."""
    total = torch.zeros(pixels.shape[1], dtype=torch.float64)
    squares = torch.zeros_like(total)
    for part in pixels.split(_AT_ONCE):
        values = part.double() / 255
        total += values.sum((0, 2, 3))
        squares += values.square().sum((0, 2, 3))
    count = pixels[:, 0].numel()
    mean = total / count
    deviation = (squares / count - mean.square()).clamp_min(0).sqrt().clamp_min(1 / 255)
    return mean.tolist(), deviation.tolist()
