"""Batches with images in channels-last format, which may make convolutions faster."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_lowrank.federated.execution.base import Execution
from lightning_lowrank.internals.replaced import replaced

_FORMATS: dict[int, tuple[tuple[type[nn.Module], ...], torch.memory_format]] = {
    4: ((nn.Conv2d, nn.ConvTranspose2d), torch.channels_last),
    5: ((nn.Conv3d, nn.ConvTranspose3d), torch.channels_last_3d),
}
_FAILED_VIEW = "view size is not compatible"


class ChannelsLast:
    """Converts the images of batches to channels-last format, if a module has convolutions for their dimensions.

    Images are floating tensors of four dimensions, and of five for convolutions of three, the second of which are the
    channels, anywhere in lists, tuples, dictionaries and dataclasses. Convolutions keep the format in their outputs.
    Values stay as they are.

    Args:
        module: The module. Its calls of `torch.nn.functional` are not detected.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        parts = list(module.modules())
        self._formats = {
            dimensions: memory_format
            for dimensions, (kinds, memory_format) in _FORMATS.items()
            if any(isinstance(part, kinds) for part in parts)
        }

    @property
    def applies(self) -> bool:
        """Whether the module has convolutions."""
        return bool(self._formats)

    def changes(self, batch: Any) -> bool:
        """Whether a batch has images in another memory format."""
        found: list[bool] = []
        apply_to_collection(batch, Tensor, lambda tensor: found.append(self._image(tensor) is not tensor))
        return any(found)

    def batch(self, batch: Any) -> Any:
        """A batch with its images in channels-last format."""
        return apply_to_collection(batch, Tensor, self._image)

    def _image(self, tensor: Tensor) -> Tensor:
        memory_format = self._formats.get(tensor.dim())
        if memory_format is None or not tensor.is_floating_point():
            return tensor
        # Not contiguous(), which leaves images of one channel as they are, and convolutions then treat them as
        # channels-first.
        return tensor.to(memory_format=memory_format)

    def step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A step that runs ``step`` on batches in channels-last format."""

        def with_channels_last(batch: Any, *arguments: Any, **keywords: Any) -> Any:
            return step(self.batch(batch), *arguments, **keywords)

        return with_channels_last

    def explained_step(self, step: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Like `step`, with a clearer error if the memory format may have caused one.

        Args:
            step: The step.
            name: The name of the module's hook that it runs.
        """
        changed = self.step(step)

        def with_explanation(*arguments: Any, **keywords: Any) -> Any:
            try:
                return changed(*arguments, **keywords)
            except RuntimeError as error:
                if _FAILED_VIEW not in str(error):
                    raise
                raise MisconfigurationException(
                    f"{type(self._module).__name__}.{name}() calls view() on a tensor whose values are in another order"
                    " in memory: execution='auto' converts images to torch.channels_last, because its trial steps were"
                    " faster with that. Use reshape() in place of view(), or execution='sequential', which leaves"
                    f" batches as they are. torch says: {str(error).strip()}"
                ) from error

        return with_explanation


def in_validation(trainer: Any, execution: Execution) -> AbstractContextManager[None]:
    """A context in which validation steps see images in channels-last format.

    If a step fails with them in the sanity check, they keep their format from then on, in resumed runs too, which may
    have no sanity check.
    """
    own = trainer.strategy.validation_step
    changed = ChannelsLast(trainer.lightning_module).explained_step(own, "validation_step")

    def validation_step(*arguments: Any) -> Any:
        if execution.validation_channels_last and trainer.sanity_checking:
            try:
                return changed(*arguments)
            except MisconfigurationException:
                execution.validation_channels_last = False
        return (changed if execution.validation_channels_last else own)(*arguments)

    return replaced(trainer.strategy, validation_step=validation_step)
