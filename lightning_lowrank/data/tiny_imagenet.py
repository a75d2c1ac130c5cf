"""`TinyImageNet`: downloaded as an archive, and decoded once for all runs."""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torchvision.datasets.folder import make_dataset
from torchvision.datasets.utils import download_and_extract_archive

from lightning_lowrank.data.torchvision import PhotographDataModule


class TinyImageNet(PhotographDataModule):
    """Tiny-ImageNet: 100,000 training and 10,000 validation photographs, 64×64 pixels in colour, 200 classes.

    The labels of the original test images were never published. As in the papers, the validation images are the test
    set here. Grey images (1.8 % of all) get three equal channels. Classes are numbered in the order of their sorted
    WordNet names.

    The images are JPEG files, which the first run decodes. It keeps the pixels (1.35 GB) in
    ``tiny-imagenet-200.safetensors`` next to the folder ``tiny-imagenet-200``, and later runs read that file. Delete it
    when the folder has changed.

    Arguments are those of `TorchvisionDataModule`; ``augment`` is on by default. ``download`` fetches and unpacks
    http://cs231n.stanford.edu/tiny-imagenet-200.zip (248 MB) in ``root`` if neither the folder nor the decoded images
    exist.

    Raises:
        MisconfigurationException: If an argument is out of range, the folder is absent and cannot be downloaded, or is
            incomplete (the message names the missing part), or the disk has no space for the decoded images.

    Example:
        >>> TinyImageNet(root="data", augment=False).image_shape
        (3, 64, 64)
    """

    num_classes = 200
    image_shape = (3, 64, 64)
    mean = (0.4802, 0.4481, 0.3975)
    std = (0.2770, 0.2691, 0.2821)
    files = "tiny-imagenet-200/{wnids.txt,train,val}"
    url: ClassVar[str] = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
    md5: ClassVar[str] = "90528d7ca1a48142e341f4ef8d21d0de"

    @property
    def folder(self) -> Path:
        """The folder of the unpacked archive."""
        return Path(self.root).expanduser() / "tiny-imagenet-200"

    @property
    def decoded(self) -> Path:
        """The path of the file with all decoded images."""
        return self.folder.with_suffix(".safetensors")

    def prepare_data(self) -> None:
        """Download the archive if needed and ``download`` is set, and decode its images if no run has done so."""
        if not self.decoded.is_file() and (self.download or self.folder.is_dir()):
            self._open(train=False, download=self.download)

    def open_dataset(self, train: bool, download: bool) -> SimpleNamespace:
        """Read the decoded images of one split; download and decode them first if needed."""
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
        """Download and unpack the archive; the folder only appears when it is complete."""
        root = self.folder.parent
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as unpacked:
            download_and_extract_archive(self.url, str(root), unpacked, md5=self.md5)
            (Path(unpacked) / self.folder.name).rename(self.folder)

    def _decode(self) -> None:
        if not self.folder.is_dir():
            raise FileNotFoundError(f"{self.folder} not found: {self.url} must be unpacked in {self.folder.parent}.")
        names = sorted((self.folder / "wnids.txt").read_text().split())
        if len(names) != self.num_classes:
            raise RuntimeError(f"{self.folder / 'wnids.txt'} names {len(names)} classes, not {self.num_classes}")
        classes = {name: index for index, name in enumerate(names)}
        training = make_dataset(self.folder / "train", classes, (".jpeg",))
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

    def _validation_images(self, classes: dict[str, int]) -> list[tuple[str, int]]:
        """The files and classes that the annotations name; a line is a file name, a class and a box."""
        annotations = self.folder / "val" / "val_annotations.txt"
        samples = []
        for number, line in enumerate(annotations.read_text().splitlines(), start=1):
            name, label = [*line.split("\t"), ""][:2]
            if label not in classes:
                raise RuntimeError(
                    f"{annotations}, line {number}: a file's name, a tab and a class of wnids.txt must come first,"
                    f" got {line!r}"
                )
            samples.append((str(self.folder / "val" / "images" / name), classes[label]))
        if not samples:
            raise RuntimeError(f"{annotations} names no image")
        return samples

    def _pixels(self, path: str) -> np.ndarray:
        with Image.open(path) as image:
            try:
                pixels = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
            except OSError as error:
                raise OSError(f"{path}: {error}") from error
        if pixels.shape != self.image_shape:
            raise RuntimeError(f"{path} has {pixels.shape[2]}×{pixels.shape[1]} pixels, not 64×64")
        return pixels
