"""Batches whose images have their channels last in memory, with which torch's convolutions may be faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

_FORMATS: dict[int, tuple[tuple[type[nn.Module], ...], torch.memory_format]] = {
    4: ((nn.Conv2d, nn.ConvTranspose2d), torch.channels_last),
    5: ((nn.Conv3d, nn.ConvTranspose3d), torch.channels_last_3d),
}
_FAILED_VIEW = "view size is not compatible"


class ChannelsLast:
    """Lays the images of batches out with their channels last, where a module has convolutions for them.

    Images are floating tensors of four dimensions, and of five for convolutions of three, the second of which are the
    channels, anywhere in lists, tuples, dictionaries and dataclasses. Convolutions hand the format on to what follows
    them. Values stay as they are.

    Args:
        module: The module. What it calls from `torch.nn.functional` is not seen.
    """

    def __init__(self, module: nn.Module) -> None:
        parts = list(module.modules())
        self._formats = {
            dimensions: memory_format
            for dimensions, (kinds, memory_format) in _FORMATS.items()
            if any(isinstance(part, kinds) for part in parts)
        }

    @property
    def applies(self) -> bool:
        """Whether the module has such convolutions."""
        return bool(self._formats)

    def changes(self, batch: Any) -> bool:
        """Return whether a batch has images that are laid out in another way."""
        found: list[bool] = []
        apply_to_collection(batch, Tensor, lambda tensor: found.append(self._image(tensor) is not tensor))
        return any(found)

    def batch(self, batch: Any) -> Any:
        """Return a batch with the channels of its images last in memory."""
        return apply_to_collection(batch, Tensor, self._image)

    def _image(self, tensor: Tensor) -> Tensor:
        memory_format = self._formats.get(tensor.dim())
        if memory_format is None or not tensor.is_floating_point():
            return tensor
        # contiguous() leaves an image of one channel as it is, and convolutions then take it for channels first.
        return tensor.to(memory_format=memory_format)

    def step(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a training step that runs ``training_step`` on such batches."""

        def with_channels_last(batch: Any, *arguments: Any, **keywords: Any) -> Any:
            return training_step(self.batch(batch), *arguments, **keywords)

        return with_channels_last


def explained(error: RuntimeError, module: nn.Module) -> Exception:
    """Return what a step raises in place of an error that may come of the format; most errors stand for themselves."""
    if _FAILED_VIEW not in str(error):
        return error
    return MisconfigurationException(
        f"{type(module).__name__}.training_step() calls view() on a tensor whose values are in another order in memory:"
        " execution='auto' gives images with their channels last (torch.channels_last), because the steps that it tried"
        " were faster so. Use reshape() in place of view(), or execution='sequential', which leaves batches as they"
        f" are. torch says: {str(error).strip()}"
    )
