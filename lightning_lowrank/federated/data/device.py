"""Copies of samples in the training device's memory.

`BatchReader` and `read_on_device` ask `DeviceData` whether samples are kept there, and make batches of the copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_lowrank.federated.data.tensor_rows import Source
from lightning_lowrank.federated.free_memory import free_memory
from lightning_lowrank.internals.lightning import overridden_transfer
from lightning_lowrank.internals.torch import memory_fingerprint

_SHARE_OF_MEMORY = 0.25
_BLOCKING = ("cpu", "mps")
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device")


class DeviceData:
    """Keeps copies of samples on the training device.

    Args:
        trainer: The trainer, whose strategy has a root device.
        setting: As ``data_on_device`` of `FederatedSettings`.
    """

    def __init__(self, trainer: Any, setting: bool | str) -> None:
        self.trainer = trainer
        self._setting = setting
        self._copies: dict[int, tuple[Tensor, tuple[int, int], Tensor]] = {}

    @property
    def device(self) -> torch.device:
        """The training device."""
        return cast(torch.device, self.trainer.strategy.root_device)

    @property
    def wanted(self) -> bool:
        """Whether the user's setting asks for copies on the device."""
        return self._setting is True or (self._setting == "auto" and self.device.type != "cpu")

    def forget(self) -> None:
        """Drop all copies."""
        self._copies.clear()

    def keeps(self, source: Source | None, training_set: Any = None) -> bool:
        """Whether copies of a source's samples are kept on the device.

        Args:
            source: The source; ``None`` for samples that are not rows of tensors.
            training_set: The dataset, if it is the training set.

        Raises:
            MisconfigurationException: If ``data_on_device=True`` and a training set cannot be kept there.
        """
        if not self.wanted:
            return False
        own = overridden_transfer(self.trainer, _TRANSFERS)
        if source is None:
            why = (
                "its samples are not rows of tensors, as those of a torch.utils.data.TensorDataset with torch's own"
                " collate function and of this package's images are"
            )
        elif own:
            why = f"{own[1]}() is overridden, and takes batches to the device in its own way"
        elif self._setting is True:
            return True
        else:
            missing = sum(tensor.nbytes for tensor in source.rows.tensors if not self._has(tensor))
            return missing <= _SHARE_OF_MEMORY * free_memory(self.device)
        if self._setting is True and training_set is not None:
            raise MisconfigurationException(
                f"data_on_device=True: the training set {type(training_set).__name__} can't be kept on {self.device}:"
                f" {why}. Use data_on_device='auto'."
            )
        return False

    def _has(self, tensor: Tensor) -> bool:
        known = self._copies.get(id(tensor))
        return tensor.device == self.device or (known is not None and known[1] == memory_fingerprint(tensor))

    def copy_of(self, tensor: Tensor) -> Tensor:
        """The tensor on the training device: itself if already there, else a cached copy, renewed after changes."""
        if tensor.device == self.device:
            return tensor
        if not self._has(tensor):
            # Keep a reference to the tensor, so that no new tensor gets the same id.
            self._copies[id(tensor)] = tensor, memory_fingerprint(tensor), tensor.to(self.device)
        return self._copies[id(tensor)][2]

    def pinned(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, moved to pinned memory if the device is a CUDA one."""
        if self.device.type != "cuda":
            return batches
        return (apply_to_collection(batch, Tensor, _pinned) for batch in batches)


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type != "cpu" or tensor.is_pinned() else tensor.pin_memory()


def move_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor moved to a device, asynchronously if the device supports that."""
    if device.type == "cuda":
        tensor = _pinned(tensor)
    return tensor.to(device, non_blocking=device.type not in _BLOCKING)
