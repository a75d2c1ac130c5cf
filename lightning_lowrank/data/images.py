"""Images in memory as one ``uint8`` tensor, from which batches are gathered.

Normalisation and augmentation are operations on the whole batch, because a federated round reads many small,
differently shuffled pieces of one data set and pays the cost of fetching a batch often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info

from lightning_lowrank.data.tables import HasColumns
from lightning_lowrank.internals.torch import memory_fingerprint

_MOST_KEPT = 2**28


class ImageBatch:
    """A batch of images in one tensor, also readable as a sequence of ``(image, target)`` pairs.

    `TensorImages` returns it for a batch of indices. `collate_images` takes the tensors out at no cost; other collate
    functions, such as ``torch.utils.data.default_collate``, read it as a sequence of samples.

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
    """Collate function that passes an `ImageBatch` through and collates anything else as PyTorch does.

    Args:
        samples: The data set's result for a batch of indices: an `ImageBatch` or a list of samples.

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


class TensorImages(HasColumns, Dataset[tuple[Tensor, int]]):
    """Images and class indices in memory, normalised and optionally augmented when they are fetched.

    A sample is ``(image, target)``: ``(pixels / pixel_max - mean) / std`` as ``float32``, and an ``int``. It works with
    any ``DataLoader`` and inside any number of ``torch.utils.data.Subset``; with ``collate_fn=collate_images`` a batch
    is never split into samples. If `columns` are set, ``dataset["writer"]`` is the column of that name.

    Augmentation pads the raw pixels with zeros (black), crops each image at a random place back to its size, and
    mirrors each with probability one half. All draws of a batch (first the offsets, then the flips) come from PyTorch's
    *global* generator when the batch is fetched: ``torch.manual_seed`` before the fetch fixes them (the federated loop
    seeds every batch that way), and each ``DataLoader`` worker has its own seed.

    Without augmentation, rounds on a CPU keep up to 256 MiB of normalised images in memory, once they have read as many
    samples as there are.

    Args:
        images: ``uint8`` pixels, ``(samples, channels, height, width)``.
        targets: Class indices, ``(samples,)``; kept as a ``LongTensor`` in the attribute of the same name.
        mean: Mean of each channel, of pixels scaled to [0, 1].
        std: Standard deviation of each channel, of pixels scaled to [0, 1].
        pixel_max: The pixel value of full intensity.
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
        self.normalised = _Normalised()
        self.files: list[str] | None = None
        """Where each image came from, if that is known."""

    @property
    def deterministic(self) -> bool:
        """Whether fetching a sample twice gives the same values: true without augmentation."""
        return not self.crop_padding and not self.mirror

    def __len__(self) -> int:
        return len(self.images)

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, int]: ...

    @overload
    def __getitem__(self, index: str) -> Sequence[Any]: ...

    def __getitem__(self, index: int | str) -> Any:
        if isinstance(index, str):
            return self.column(index)
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(self, indices: Sequence[int]) -> ImageBatch:
        """Fetch the samples at ``indices`` (non-negative) with one gather, normalised and augmented."""
        rows = torch.as_tensor(indices, dtype=torch.long)
        reader = _RowsOfImages(self)
        kept = reader.cached(len(rows)) if self.deterministic else None
        if kept is not None:
            return ImageBatch(*(tensor.index_select(0, rows) for tensor in kept))
        made = reader.make([tensor.index_select(0, rows) for tensor in reader.tensors], reader.draw(len(rows), None))
        return ImageBatch(*made)

    def by_rows(self) -> _RowsOfImages | None:
        """The reader of batches on any device; ``None`` for a subclass, which may fetch samples differently."""
        return _RowsOfImages(self) if type(self) is TensorImages else None


class _Normalised:
    """Cache of normalised images (four times the memory) and of the normalisation's constants by device."""

    def __init__(self) -> None:
        self._of: tuple[Any, ...] = ()
        self._read = 0
        self._images: Tensor | None = None
        self._constants: tuple[Tensor, ...] = ()
        self._constants_of: tuple[Any, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        # Copies and other processes start with an empty cache.
        return vars(_Normalised())

    def of(self, images: TensorImages, samples: int) -> Tensor | None:
        """All images, normalised; ``None`` while the cache is not worth its memory.

        That is so for more than 256 MiB, in a loader's worker, and until more samples were read than there are.
        """
        if 4 * images.images.numel() > _MOST_KEPT or get_worker_info() is not None:
            return None
        parts = images.images, images.mean, images.std
        # References keep the tensors alive, so that their ids stay unique.
        of = images.pixel_max, *map(id, parts), *map(memory_fingerprint, parts), parts
        if self._of[:-1] != of[:-1]:
            self._of, self._read, self._images = of, 0, None
        self._read += samples
        if self._images is None and self._read > len(images):
            self._images, _ = _RowsOfImages(images).make((images.images, images.targets), None)
        return self._images

    def constants(self, images: TensorImages, device: torch.device) -> tuple[Tensor, ...]:
        """The greatest pixel value, the means and the standard deviations on a device, copied once."""
        parts = images.mean, images.std
        # References keep the tensors alive, so that their ids stay unique.
        of = images.pixel_max, device, *map(memory_fingerprint, parts), parts
        if self._constants_of[:-1] != of[:-1]:
            self._constants_of = of
            values = (images.pixel_max, *parts)
            self._constants = tuple(torch.as_tensor(each, dtype=torch.float32).to(device) for each in values)
        return self._constants


class _RowsOfImages:
    """The `lightning_lowrank.federated.data.tensor_rows.TensorRows` of `TensorImages`, on any device."""

    collates = (default_collate, collate_images)

    def __init__(self, images: TensorImages) -> None:
        self._images = images

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Pixels and targets."""
        return self._images.images, self._images.targets

    def draw(self, samples: int, generator: torch.Generator | None) -> Tensor | None:
        """Augmentation of each sample: crop offsets and mirroring, as rows of an int64 tensor."""
        found = []
        if self._images.crop_padding:
            found.append(torch.randint(2 * self._images.crop_padding + 1, (2, samples), generator=generator))
        if self._images.mirror:
            found.append((torch.rand(1, samples, generator=generator) < 0.5).long())
        return torch.cat(found) if len(found) > 1 else found[0] if found else None

    def cached(self, samples: int) -> list[Tensor] | None:
        """Normalised images and targets from the cache; ``None`` without a cache."""
        images = self._images.normalised.of(self._images, samples)
        return None if images is None else [images, self._images.targets]

    def make(self, rows: Sequence[Tensor], draws: Tensor | None) -> list[Tensor]:
        """Normalised and augmented images, and their targets."""
        pixels, targets = rows
        if draws is not None:
            pixels = self._augment(pixels, draws)
        images = self._images
        of: tuple[Any, ...] = images.pixel_max, images.mean, images.std
        if pixels.device.type != "cpu":
            # A GPU divides by a Python number as a product with its reciprocal, which rounds differently.
            of = images.normalised.constants(images, pixels.device)
        return [pixels.float().div_(of[0]).sub_(of[1]).div_(of[2]), targets]

    def _augment(self, pixels: Tensor, draws: Tensor) -> Tensor:
        samples, _, height, width = pixels.shape
        padding = self._images.crop_padding
        if padding:
            windows = F.pad(pixels, (padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)
            pixels = windows[torch.arange(samples, device=pixels.device), :, draws[0], draws[1]]
        if self._images.mirror:
            pixels = torch.where(draws[-1].bool().view(-1, 1, 1, 1), pixels.flip(-1), pixels)
        return pixels
