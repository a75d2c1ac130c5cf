"""`ImageFolder`: anyone's images, in a folder for each class."""

from __future__ import annotations

import math
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset
from torchvision.transforms.functional import pil_to_tensor

from lightning_lowrank.arguments import listed
from lightning_lowrank.configuration import check_integer, check_number
from lightning_lowrank.data.images import TensorImages
from lightning_lowrank.data.vision import VisionDataModule, hold_out

_TEST_FOLDERS = ("test", "val", "valid", "validation")
_ANNOUNCED = 10_000
_AT_ONCE = 1024


class ImageFolder(VisionDataModule):
    """Images of any classes: a folder with a folder for each class, in it the files of its images.

    ``root`` holds either the classes' folders, of which ``test_share`` is held out for testing, or the folders
    ``train`` and ``test`` (or ``val``) with the classes' folders in both. Classes are numbered in the order of their
    names. Files in folders below a class's count too. Each split is decoded once and held as one ``uint8`` tensor: in
    memory, or beyond ``memory_limit`` in a temporary file, of which the operating system keeps in memory what there is
    room for.

    A split's dataset has an attribute ``files``, the images' paths below ``root``, of which `ByKey` makes natural
    clients: ``ByKey(lambda dataset: [name.split("_")[0] for name in dataset.files])``.

    Args:
        root: The folder.
        size: Height and width of the images, or one number for both. Images of another shape are cut at the sides to
            its proportions, and scaled. ``None``: all have one size, and it stays.
        channels: 3 for colour, 1 for grey; images are converted.
        test_share: Share of each class that is held out for testing, where ``root`` has no folder of test images.
        mean: Mean of each channel, of pixels in [0, 1]. ``None``: that of the training images.
        std: Standard deviation of each channel. ``None``: that of the training images.
        memory_limit: Bytes of a split's pixels that are held in memory.
        mirror: Whether ``augment`` also flips images.
        **kwargs: Other arguments of `VisionDataModule`: ``batch_size``, ``eval_batch_size``, ``num_workers``,
            ``augment``, ``validation``, ``limit_samples``, ``seed``, ``normalize``.

    Raises:
        MisconfigurationException: If an argument is out of range; if ``root`` is no such folder, the test images have
            classes that the training images do not have, a split comes out empty; and, when images are read, if one
            cannot be, or they differ in size and ``size`` is not given.

    Example:
        >>> import pathlib, tempfile
        >>> root = pathlib.Path(tempfile.mkdtemp())
        >>> for number, name in enumerate(["cat", "dog"] * 5):
        ...     (root / name).mkdir(exist_ok=True)
        ...     Image.new("RGB", (40, 30), (20 * number, 0, 0)).save(root / name / f"{number}.png")
        >>> data = ImageFolder(str(root), size=16)
        >>> data.setup()
        >>> data.classes, data.image_shape, len(data.train_set), len(data.test_set)
        (['cat', 'dog'], (3, 16, 16), 8, 2)
    """

    def __init__(
        self,
        root: str,
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
        self.root, self.channels, self.test_share, self.memory_limit = root, channels, test_share, memory_limit
        self._given = mean, std
        folder = Path(root).expanduser()
        self._train_folder = folder / "train" if (folder / "train").is_dir() else folder
        tests = [folder / name for name in _TEST_FOLDERS if (folder / name).is_dir()]
        self._test_folder = tests[0] if tests and self._train_folder != folder else None
        try:
            self.classes = find_classes(self._train_folder)[0]
        except OSError as error:
            raise MisconfigurationException(
                f"root={root!r} must be a folder that holds a folder of images for each class, or train and test with"
                f" such folders: {error}"
            ) from error
        # Of this folder, where other data sets have them as class attributes.
        vars(self).update(num_classes=len(self.classes), mirror=mirror)
        self._files: dict[str, list[tuple[str, int]]] = {}

    def setup(self, stage: str | None = None) -> None:
        """Decode what ``stage`` reads (``None``: everything), unless it is decoded already."""
        on_test = self.validation == "test"
        if not self._files:
            self._files = self._divided()
        trains = stage in (None, "fit") or None in self._given
        if trains and self.train_set is None:
            pixels = self._decode(self._files["train"])
            mean, std = _moments(pixels) if None in self._given else ([], [])
            vars(self).update(mean=self._given[0] or mean, std=self._given[1] or std)
            self.train_set = self._images("train", pixels, self.augment)
        elif None not in self._given:
            vars(self).update(mean=self._given[0], std=self._given[1])
        if self.test_set is None and (on_test or stage in (None, "test", "predict")):
            self.test_set = self._images("test", self._decode(self._files["test"]), False)
        if on_test:
            self.validation_set = self.test_set
        elif self.validation_set is None and stage in (None, "fit", "validate"):
            self.validation_set = self._images("validation", self._decode(self._files["validation"]), False)

    def _divided(self) -> dict[str, list[tuple[str, int]]]:
        """Return each split's files and classes."""
        train = self._listed(self._train_folder)
        if self._test_folder is None:
            train, test = self._held_out(train, self.test_share, "test_share")
        else:
            test = self._listed(self._test_folder)
        found = {"train": train, "test": test}
        if self.validation != "test":
            found["train"], found["validation"] = self._held_out(train, self.validation, "validation")
        for split, files in found.items():
            kept = self._within_limit(len(files))
            if kept is not None:
                found[split] = [files[row] for row in kept.tolist()]
        return found

    def _listed(self, folder: Path) -> list[tuple[str, int]]:
        classes = find_classes(folder)[0]
        unknown = sorted(set(classes) - set(self.classes))
        if unknown:
            raise MisconfigurationException(
                f"{folder} has classes that {self._train_folder} does not have: {listed(unknown)}"
            )
        numbers = {name: number for number, name in enumerate(self.classes)}
        return make_dataset(folder, {name: numbers[name] for name in classes}, IMG_EXTENSIONS, allow_empty=True)

    def _held_out(
        self, files: list[tuple[str, int]], share: float, argument: str
    ) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        rows = hold_out(torch.tensor([target for _, target in files]), share, self.seed, argument, "images")
        kept, held_out = ([files[row] for row in part.tolist()] for part in rows)
        return kept, held_out

    def _images(self, split: str, pixels: Tensor, augment: bool) -> TensorImages:
        images = TensorImages(
            pixels,
            torch.tensor([target for _, target in self._files[split]]),
            mean=self.mean if self.normalize else [0.0] * self.channels,
            std=self.std if self.normalize else [1.0] * self.channels,
            crop_padding=self.crop_padding if augment else 0,
            mirror=self.mirror and augment,
        )
        root = Path(self.root).expanduser()
        images.files = [Path(path).relative_to(root).as_posix() for path, _ in self._files[split]]
        return images

    def _decode(self, files: Sequence[tuple[str, int]]) -> Tensor:
        if not files:
            raise MisconfigurationException(f"root={self.root!r} holds no image: {', '.join(IMG_EXTENSIONS)} are read")
        if self.size is None:
            height, width = self._pixels(files[0][0]).shape[1:]
        else:
            height, width = self.size
        vars(self)["image_shape"] = (self.channels, height, width)
        pixels = self._empty(len(files), height, width)
        if len(files) >= _ANNOUNCED:
            rank_zero_info(f"{type(self).__name__}: decoding {len(files):,} images of {self.root}")

        def put(row: int) -> None:
            found = self._pixels(files[row][0])
            if found.shape != pixels.shape[1:]:
                raise MisconfigurationException(
                    f"{files[row][0]} has {found.shape[2]}×{found.shape[1]} pixels and {files[0][0]} has"
                    f" {width}×{height}: give size={min(height, width)} or the like, to which all are scaled"
                )
            pixels[row] = found

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for _ in pool.map(put, range(len(files))):
                pass
        return pixels

    def _pixels(self, path: str) -> Tensor:
        try:
            with Image.open(path) as image:
                converted = image.convert("RGB" if self.channels == 3 else "L")
        except OSError as error:
            raise MisconfigurationException(f"{path} is no image that can be read: {error}") from error
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


def _moments(pixels: Tensor) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each channel, of pixels in [0, 1]; at least one step of a pixel."""
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
