"""`ImageFolder`: anyone's images, in a folder for each class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

from lightning_lowrank.arguments import listed
from lightning_lowrank.data.images import TensorImages
from lightning_lowrank.data.own_images import TEST_NAMES, OwnImages, Pictures


class ImageFolder(OwnImages):
    """Images of any classes: a folder with a folder for each class, in it the files of its images.

    ``root`` holds either the classes' folders, of which ``test_share`` is held out for testing, or the folders
    ``train`` and ``test`` (or ``val``) with the classes' folders in both. Classes are numbered in the order of their
    names. Files in folders below a class's count too.

    A split's dataset has an attribute ``files``, the images' paths below ``root``, of which `ByKey` makes natural
    clients: ``ByKey(lambda dataset: [name.split("_")[0] for name in dataset.files])``.

    Args:
        root: The folder.
        **kwargs: Arguments of `OwnImages`: ``size``, ``channels``, ``test_share``, ``mean``, ``std``, ``memory_limit``,
            ``mirror``; and of `VisionDataModule`: ``batch_size``, ``eval_batch_size``, ``num_workers``, ``augment``,
            ``validation``, ``limit_samples``, ``seed``, ``normalize``.

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

    def __init__(self, root: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root
        folder = Path(root).expanduser()
        self._train_folder = folder / "train" if (folder / "train").is_dir() else folder
        tests = [folder / name for name in TEST_NAMES if (folder / name).is_dir()]
        self._test_folder = tests[0] if tests and self._train_folder != folder else None
        try:
            self.classes = find_classes(self._train_folder)[0]
        except OSError as error:
            raise MisconfigurationException(
                f"root={root!r} must be a folder that holds a folder of images for each class, or train and test with"
                f" such folders: {error}"
            ) from error
        vars(self)["num_classes"] = len(self.classes)

    def find_splits(self) -> tuple[Pictures, Pictures | None, Pictures | None]:
        """List the files."""
        test = None if self._test_folder is None else self._listed(self._test_folder)
        return self._listed(self._train_folder), test, None

    def _listed(self, folder: Path) -> _Files:
        classes = find_classes(folder)[0]
        unknown = sorted(set(classes) - set(self.classes))
        if unknown:
            raise MisconfigurationException(
                f"{folder} has classes that {self._train_folder} does not have: {listed(unknown)}"
            )
        numbers = {name: number for number, name in enumerate(self.classes)}
        wanted = {name: numbers[name] for name in classes}
        found = make_dataset(folder, wanted, IMG_EXTENSIONS, allow_empty=True)
        if not found:
            raise MisconfigurationException(f"{folder} holds no image: {', '.join(IMG_EXTENSIONS)} are read")
        return _Files(found, Path(self.root).expanduser())


class _Files(Pictures):
    """Files, each with its class index."""

    def __init__(self, files: Sequence[tuple[str, int]], root: Path) -> None:
        self._files, self._root = files, root
        self.targets = torch.tensor([target for _, target in files])

    def open(self, row: int) -> Image.Image:
        return Image.open(self._files[row][0])

    def place(self, row: int) -> str:
        return self._files[row][0]

    def select(self, rows: Sequence[int]) -> _Files:
        return _Files([self._files[row] for row in rows], self._root)

    def describe(self, images: TensorImages) -> None:
        images.files = [Path(path).relative_to(self._root).as_posix() for path, _ in self._files]
