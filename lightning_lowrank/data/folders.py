"""`ImageFolder`: a datamodule for images in one folder per class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from lightning_lowrank.arguments import join_names
from lightning_lowrank.data.classes import check_class_names
from lightning_lowrank.data.images import TensorImages
from lightning_lowrank.data.own_images import OwnImages, Pictures, choose_splits
from lightning_lowrank.data.tables import Table

_TRAIN_NAMES = ("train", "training")


class ImageFolder(OwnImages):
    """Images of any classes: a folder with a folder for each class, in it the files of its images.

    ``root`` has either the classes' folders, or a folder ``train`` (or ``training``) of such folders and optionally
    ``test`` (or ``testing``) and ``val`` (or ``valid``, ``validation``), in capitals or not. Without test images the
    images of ``val`` are the test images; without either, ``test_share`` of the training images is held out. Classes
    are numbered in the order of their names, or of ``classes``. Hidden files and folders and ``__MACOSX`` are ignored.

    With ``clients=True`` there is a folder for each client, and in it the classes' folders: ``client/class/image``.
    ``ByKey("client")`` makes natural clients of these folders.

    A split's dataset has an attribute ``files``, the images' paths below ``root``, from which `ByKey` makes natural
    clients too: ``ByKey(lambda dataset: [name.split("_")[0] for name in dataset.files])``.

    Args:
        root: The folder.
        clients: Whether the classes' folders lie in a folder for each client.
        validation: ``"test"``: validation on the test images. Or the share of the training images that is held out, or
            the name of a folder in ``root``. ``None``: ``val`` if there is ``test`` too, or else ``"test"``.
        classes: Names of the classes in the order of their numbers, such as those of all sites; folders of some of them
            may be missing or empty. ``None``: the folders of the images to train on, sorted.
        **kwargs: Arguments of `OwnImages`: ``size``, ``channels``, ``test_share``, ``mean``, ``std``, ``memory_limit``,
            ``mirror``; and of `VisionDataModule`: ``batch_size``, ``eval_batch_size``, ``num_workers``, ``augment``,
            ``limit_samples``, ``seed``, ``normalize``.

    Raises:
        MisconfigurationException: If an argument is out of range; if ``root`` is no such folder, or images lie in
            folders of the classes' folders; if a folder is not one of ``classes``; without them, if a class has no
            training image, or other images have classes that these do not have; if a split comes out empty;
            and, when images are read, if one cannot be, or they differ in size and ``size`` is not given.

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
        validation: float | str | None = None,
        clients: bool = False,
        classes: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        named = validation is None or isinstance(validation, str)
        super().__init__(validation="test" if named else validation, **kwargs)
        self.root, self.clients = root, clients
        self._given_classes = check_class_names("classes", classes)
        folder = Path(root).expanduser()
        try:
            subfolders = _folders(folder)
            trains = [name for name in subfolders if name.lower() in _TRAIN_NAMES and _folders(folder / name)]
            if len(trains) > 1:
                raise MisconfigurationException(
                    f"root={root!r} must hold one folder to train on, not {join_names(trains)}"
                )
            self._train_folder = folder / trains[0] if trains else folder
            found = self._class_names(self._train_folder)
        except OSError as error:
            raise MisconfigurationException(f"{_wanted(root)}: {error}") from error
        if not found:
            raise MisconfigurationException(f"{_wanted(root)}, and it holds no folder")
        self.classes = self._given_classes or found
        self._check_known(self._train_folder, found)
        vars(self)["num_classes"] = len(self.classes)
        others = [name for name in subfolders if name not in trains] if trains else []
        test, apart = choose_splits(others, validation)
        self.validation = (apart or "test") if validation is None else validation
        if apart is not None and apart not in others:
            raise MisconfigurationException(
                f"validation={apart!r} must be 'test', a share, or a folder next to the training folder, but {folder}"
                " holds"
                f" {join_names(subfolders)}"
            )
        self._validation_folder = None if apart is None else folder / apart
        self._test_folder = None if test is None else folder / test

    def _class_names(self, folder: Path) -> list[str]:
        """The names of the classes' folders in a split's folder."""
        if not self.clients:
            return _folders(folder)
        return sorted({name for client in _folders(folder) for name in _folders(folder / client)})

    def find_splits(self) -> tuple[Pictures, Pictures | None, Pictures | None]:
        """Find the files of each split."""
        others = self._test_folder, self._validation_folder
        test, validation = (None if folder is None else self._files_in(folder) for folder in others)
        return self._files_in(self._train_folder), test, validation

    def _files_in(self, folder: Path) -> _Files:
        classes = self._class_names(folder)
        self._check_known(folder, classes)
        numbers = {name: number for number, name in enumerate(self.classes)}
        found = []
        for parent in (folder / client for client in _folders(folder)) if self.clients else (folder,):
            wanted = {name: numbers[name] for name in _folders(parent)}
            for file, target in make_dataset(parent, wanted, IMG_EXTENSIONS, allow_empty=True) if wanted else ():
                parts = Path(file).relative_to(parent).parts
                if not any(map(_is_hidden, parts)):
                    self._check_depth(folder, file, len(parts))
                    found.append((file, target))
        if not found:
            raise MisconfigurationException(f"{folder} holds no image: {', '.join(IMG_EXTENSIONS)} are read")
        empty = sorted(set(classes) - {self.classes[target] for _, target in found})
        if empty and folder == self._train_folder and self._given_classes is None:
            raise MisconfigurationException(
                f"{folder} has folders without an image, which would be classes: {join_names(empty)}; remove them"
                f" ({', '.join(IMG_EXTENSIONS)} are read)"
            )
        clients = [Path(file).relative_to(folder).parts[0] for file, _ in found] if self.clients else None
        return _Files(found, Path(self.root).expanduser(), clients)

    def _check_known(self, folder: Path, classes: Sequence[str]) -> None:
        """Raise if a split's folder has a class that is not in ``classes``."""
        unknown = sorted(set(classes) - set(self.classes))
        if unknown:
            known = f"classes={self.classes}" if self._given_classes else self._train_folder
            raise MisconfigurationException(f"{folder} has classes that {known} does not have: {join_names(unknown)}")

    def _check_depth(self, folder: Path, file: str, depth: int) -> None:
        """Raise if an image lies too deep in the folders, as when ``clients`` is set wrongly."""
        if depth > 2:
            form, remedy = "class/image", "for folders of clients, client/class/image, set clients=True"
            if self.clients:
                form, remedy = "client/class/image", "move its folders' images up"
            raise MisconfigurationException(
                f"{folder} must hold {form}, with clients={self.clients}, and holds"
                f" {Path(file).relative_to(folder)}: {remedy}"
            )


def _folders(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted, without hidden ones."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not _is_hidden(entry.name))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _wanted(root: str) -> str:
    return f"root={root!r} must be a folder that holds a folder of images for each class, or train and test with such"


class _Files(Pictures):
    """Image files, each with its class index and, if folders name clients, its client."""

    def __init__(self, files: Sequence[tuple[str, int]], root: Path, clients: Sequence[str] | None = None) -> None:
        self._files, self._root, self._clients = files, root, clients
        self.targets = torch.tensor([target for _, target in files])

    def open(self, row: int) -> Image.Image:
        return Image.open(self._files[row][0])

    def place(self, row: int) -> str:
        return self._files[row][0]

    def select(self, rows: Sequence[int]) -> _Files:
        clients = None if self._clients is None else [self._clients[row] for row in rows]
        return _Files([self._files[row] for row in rows], self._root, clients)

    def describe(self, images: TensorImages) -> None:
        if self._clients is not None:
            images.columns = Table({"client": self._clients}, str(self._root))
        images.files = [Path(path).relative_to(self._root).as_posix() for path, _ in self._files]
