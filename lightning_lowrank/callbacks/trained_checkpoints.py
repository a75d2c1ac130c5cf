"""`TrainedCheckpoints`: checkpoints without the frozen weights of a pretrained model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_lowrank.arguments import Configured
from lightning_lowrank.internals.lightning import check_namespace
from lightning_lowrank.internals.peft import peft_parameters
from lightning_lowrank.internals.replaced import StandIn
from lightning_lowrank.internals.torch import digest_of, memory_fingerprint
from lightning_lowrank.interop.checkpoints import TRAINED_CHECKPOINTS, restore_frozen
from lightning_lowrank.layers import low_rank_layers

_SHARDED = (FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy)


class TrainedCheckpoints(Configured, Callback):
    """Leave frozen weights out of checkpoints: only trained tensors are saved.

    A checkpoint of a run that trains adapters of a large model holds the adapters, heads, buffers, optimizer states and
    other callbacks' states. In place of each parameter that is frozen and has its first values, it holds a digest
    (BLAKE2b, 16 bytes). A frozen parameter that the run has changed, as `FLoRA`, `FedEx` and `CoLR` do, is saved.

    A run resumes with ``ckpt_path`` as usual, in a module that was built from the same pretrained weights. A module
    with other ones is refused. ``ModelCheckpoint`` stays as it is, but ``save_weights_only=True``, for which Lightning
    calls no callback, saves everything. Factors and adapters that a method holds fixed are saved. `load_dense` and
    ``export --format peft`` read such checkpoints. ``load_from_checkpoint`` needs ``strict=False``, and compares no
    digest.

    It needs no `FederatedLoop`: it serves any run that freezes most of its weights. Writing into frozen weights
    through ``tensor.data`` during the run is not noticed.

    Raises:
        MisconfigurationException: If the strategy shards the model. When a checkpoint is loaded, if the module lacks a
            frozen weight that the checkpoint leaves out, or has other values of it.

    Example:
        >>> import lightning as L
        >>> from lightning.pytorch.callbacks import ModelCheckpoint
        >>> from lightning_lowrank import TrainedCheckpoints
        >>> trainer = L.Trainer(callbacks=[TrainedCheckpoints(), ModelCheckpoint()], logger=False, accelerator="cpu")
    """

    once_per_turn: ClassVar[bool] = True
    """With `FederatedLoop` its batch hooks are called once per turn of Lightning's loop, between clients."""

    def __init__(self) -> None:
        self._module: nn.Module | None = None
        self._base: dict[str, nn.Parameter] = {}
        self._changed: set[str] = set()
        self._marks: dict[str, Any] = {}
        self._digests: dict[str, str] = {}
        self._restore = ExitStack()

    @property
    def state_key(self) -> str:
        """Name of this callback's state in checkpoints."""
        return TRAINED_CHECKPOINTS

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Register the hook that completes checkpoints before the module loads them."""
        check_namespace(trainer, pl_module)
        if isinstance(trainer.strategy, _SHARDED):
            raise MisconfigurationException(
                f"TrainedCheckpoints needs the whole model in each process, which {type(trainer.strategy).__name__}"
                " shards: use another strategy, or checkpoints of the whole model."
            )
        if self._module is pl_module:
            self._note_changes()
        else:
            self._module, self._changed, self._digests, self._base = pl_module, set(), {}, {}
        self._restore.close()
        self._restore.callback(_before_loading(pl_module, self._complete))

    def _complete(self, checkpoint: dict[str, Any]) -> None:
        """Put the module's own frozen weights into a checkpoint that was saved without them."""
        assert self._module is not None
        self._look_for_frozen()
        state, own = checkpoint["state_dict"], dict(self._module.named_parameters(remove_duplicate=False))
        self._changed |= {
            name for name, value in self._base.items() if name in state and not _equal(value.detach(), state[name])
        }
        self._digests = restore_frozen(checkpoint, own, "the module that was given to the trainer")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remember which parameters are frozen."""
        self._look_for_frozen()
        self._mark()

    def _look_for_frozen(self) -> None:
        assert self._module is not None
        # Fixed factors and adapters were drawn at random: the pretrained model does not have them.
        _, drawn = peft_parameters(self._module)
        for _, layer in low_rank_layers(self._module):
            drawn.update((*layer.factors.values(), *layer.fixed.values()))
        named = self._module.named_parameters(remove_duplicate=False)
        self._base = {name: value for name, value in named if not value.requires_grad and value not in drawn}

    def _mark(self) -> None:
        self._marks = {name: memory_fingerprint(value) for name, value in self._base.items()}

    def _note_changes(self) -> None:
        self._note_trained()
        self._changed |= {
            name for name, value in self._base.items() if memory_fingerprint(value) != self._marks.get(name)
        }
        assert self._module is not None
        # PEFT replaces the parameters of nn.MultiheadAttention in each forward pass, with rounded values.
        for name, value in self._module.named_parameters(remove_duplicate=False):
            first = self._base.get(name, value)
            if value is not first and name not in self._changed and digest_of(value) != self._digest(name):
                self._changed.add(name)

    def _digest(self, name: str) -> str:
        if name not in self._digests:
            self._digests[name] = digest_of(self._base[name])
        return self._digests[name]

    def _note_trained(self) -> None:
        # Fused optimizers write without increasing a tensor's version.
        self._changed.update(name for name, value in self._base.items() if value.requires_grad)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record which frozen parameters were unfrozen."""
        self._note_trained()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record which tensors changed, before the strategy moves the module to another device."""
        self._note_changes()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Remove the hook from the module."""
        self._restore.close()
        self._mark()

    def _left_out(self) -> list[str]:
        self._note_changes()
        return [name for name in self._base if name not in self._changed]

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remove the frozen weights from the checkpoint."""
        state = checkpoint["state_dict"]
        for name in self._left_out():
            state.pop(name, None)
            # bitsandbytes adds these entries for a quantised weight; no module loads them.
            for further in [key for key in state if key.startswith(f"{name}.")]:
                del state[further]

    def state_dict(self) -> dict[str, Any]:
        """Digests and types of the weights that checkpoints leave out."""
        left_out = self._left_out()
        return {
            "base": {name: self._digest(name) for name in left_out},
            "types": {name: self._base[name].dtype for name in left_out},
        }


def _before_loading(module: Any, complete: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
    """Pass each checkpoint to ``complete`` before Lightning loads it; return a function that undoes this."""
    attributes, own = vars(module), module.on_load_checkpoint
    replaced: Mapping[str, Any] = {key: value for key, value in attributes.items() if key == "on_load_checkpoint"}

    def load(checkpoint: dict[str, Any]) -> None:
        complete(checkpoint)
        own(checkpoint)

    def restore() -> None:
        if attributes.get("on_load_checkpoint") is stand_in:
            del attributes["on_load_checkpoint"]
            attributes.update(replaced)

    stand_in = attributes["on_load_checkpoint"] = StandIn(module, "on_load_checkpoint", load)
    return restore


def _equal(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and one.dtype == two.dtype and torch.equal(one.cpu(), two.cpu())
