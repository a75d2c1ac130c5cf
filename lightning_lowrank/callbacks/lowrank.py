"""`LowRank`: converts a module's layers to low-rank ones before Lightning builds optimizers or loads checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.console import Console
from torch import Tensor

from lightning_lowrank.arguments import Configured, arguments_of, check_number, join_names
from lightning_lowrank.federated.checks import check_factor_gradients, check_optimizers
from lightning_lowrank.internals.lightning import check_namespace, makes_step, refuse_unseen_steps
from lightning_lowrank.interop.peft_layout import Outline, outline
from lightning_lowrank.layers import (
    Conversion,
    Factorization,
    LowRankLayer,
    LowRankSettings,
    add_frobenius_decay,
    convert,
    keep_frozen,
    low_rank_class,
    low_rank_layers,
    unmerge,
)
from lightning_lowrank.layers.survey import still_convertible
from lightning_lowrank.seeding import default_seed


@dataclass
class _Converted:
    """Record of a conversion, stored on the converted module for later trainers."""

    conversion: Conversion
    settings: LowRankSettings
    seed: int
    # Names of the parameters that were trainable at some time since the conversion.
    trained: set[str] = field(default_factory=set)
    printed: bool = False


class LowRank(Configured, Callback):
    r"""Replace a module's layers by low-rank ones, in place, when a run begins. Put it before `FederatedLoop`.

    Linear layers, convolutions (transposed ones too), embeddings, the projections of ``nn.MultiheadAttention`` and
    transformers' ``Conv1D`` can be converted; see `lightning_lowrank.layers.convert`.

    In role ``"update"`` the factors are a change to a frozen weight, :math:`W + f(U, V)`; in role ``"weight"`` they are
    the weight, :math:`f(U, V)`. Parameters of other layers stay trained. Frozen layers (``requires_grad=False``), such
    as those of a teacher, stay dense; set ``convert_frozen`` for LoRA on a base that you froze yourself.

    After ``fit`` the module keeps its low-rank layers; `lightning_lowrank.recover` makes them dense again and
    `load_dense` does so from a checkpoint. ``load_from_checkpoint`` cannot read the checkpoint of a converted module,
    because it ignores callbacks: use ``load_dense(path, MyModule(...))``.

    Args:
        factorization: How a weight is factorized: `MatrixProduct`, `CoreProduct`, `BlockKronecker`, `CP`, `Hadamard` or
            a class of your own.
        frobenius_decay: :math:`\lambda` of :math:`\frac{\lambda}{2} \sum \lVert f \rVert_F^2` over the layers'
            products. Its gradient is added before each optimizer step. Give the factors no other weight decay.
        seed: Seed of the factors' draws. ``None``: the seed given to Lightning's ``seed_everything`` before the
            conversion, or 0.
        summary: Print the table of layers, once for each module.
        **settings: One of ``budget``, ``ratio``, ``rank`` and ``rank_ratio``, and the other settings of
            `lightning_lowrank.layers.LowRankSettings`.

    Attributes:
        settings: The settings as one object.
        conversion: The conversion's report, layer by layer; ``None`` before the conversion.

    Raises:
        MisconfigurationException: If an argument is out of range or excludes another. In ``setup``, if the arguments do
            not suit the module, or it was converted before with other ones.

    Example:
        >>> import lightning as L
        >>> from lightning_lowrank import LowRank, MatrixProduct
        >>> trainer = L.Trainer(callbacks=[LowRank(MatrixProduct(), ratio=0.25, role="weight")], logger=False)
    """

    once_per_turn: ClassVar[bool] = True
    """With `FederatedLoop` its batch hooks are called once per turn of Lightning's loop, between clients."""

    def __init__(
        self,
        factorization: Factorization,
        *,
        frobenius_decay: float = 0.0,
        seed: int | None = None,
        summary: bool = True,
        **settings: Any,
    ) -> None:
        try:
            self.settings = LowRankSettings(factorization, **settings)
            check_number("frobenius_decay", frobenius_decay, least=0)
        except (ValueError, TypeError) as error:
            raise MisconfigurationException(f"LowRank: {error}") from error
        self.frobenius_decay = frobenius_decay
        self.seed = default_seed() if seed is None else seed
        self._given_seed = seed
        self.summary = summary
        self.conversion: Conversion | None = None
        self._module: torch.nn.Module | None = None
        self._trained: set[str] = set()
        self._unseen: set[int] = set()
        self._restore = ExitStack()
        self._frozen: list[tuple[str, torch.nn.Parameter]] = []
        self._added: list[str] = []

    def __repr__(self) -> str:
        given = {**arguments_of(self.settings), **arguments_of(self)}
        return f"LowRank({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    @property
    def state_key(self) -> str:
        """Name of this callback's state in checkpoints."""
        return "LowRank"

    def result_arguments(self) -> dict[str, Any]:
        """The arguments that change a run's result, by name."""
        return {**vars(self.settings), "frobenius_decay": self.frobenius_decay, "seed": self.seed}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Convert the module, unless an earlier run has converted it."""
        check_namespace(trainer, pl_module)
        if is_overridden("configure_model", pl_module):
            pl_module.configure_model()
        if is_overridden("setup", pl_module) and not any(
            isinstance(layer, LowRankLayer) or low_rank_class(layer) is not None for layer in pl_module.modules()
        ):
            raise MisconfigurationException(
                f"LowRank: {type(pl_module).__name__} has no layer to convert yet. Lightning calls"
                " setup() of modules after that of callbacks: make the layers in __init__() or configure_model()."
            )
        conversion = self.convert(pl_module)
        self._restore.callback(pl_module.register_load_state_dict_pre_hook(_refuse_other_layers).remove)
        self._added = self._made_later(pl_module)
        if self._added:
            rank_zero_warn(
                f"LowRank: {join_names(self._added)} was added to {type(pl_module).__name__} after its layers were"
                " converted, and is not converted. To convert it as well, call lightning_lowrank.recover(module)"
                " before fit()."
            )
        done: _Converted = pl_module.lowrank_conversion  # type: ignore[assignment]
        if self.summary and not done.printed:
            done.printed = True
            self._print(conversion)

    def _made_later(self, module: torch.nn.Module) -> list[str]:
        """Layers that were created after the conversion and would have been converted."""
        assert self.conversion is not None
        known = {_unwrapped(layer.name) for layer in self.conversion.layers}
        return [name for name in still_convertible(module, self.settings) if _unwrapped(name) not in known]

    def convert(self, module: torch.nn.Module) -> Conversion:
        """Convert ``module`` in place, and return the conversion's report."""
        if any(low_rank_layers(module)):
            done: _Converted | None = getattr(module, "lowrank_conversion", None)
            if done is None or done.settings != self.settings:
                raise MisconfigurationException(
                    "this module was already converted with other LowRank arguments: call"
                    " lightning_lowrank.recover(module) first, or start from a new module."
                )
            gone = _gone(module, done.conversion)
            if gone:
                raise MisconfigurationException(
                    f"this module was already converted, and {join_names(gone)} has been replaced by another layer"
                    " since:"
                    " call lightning_lowrank.recover(module) first, so that all layers are converted again."
                )
            if self._given_seed not in (None, done.seed):
                raise MisconfigurationException(
                    f"this module was already converted with seed={done.seed}, and LowRank has"
                    f" seed={self._given_seed}, which would have no effect: leave it out, or call"
                    " lightning_lowrank.recover(module) first."
                )
        else:
            self.seed = default_seed() if self._given_seed is None else self._given_seed
            try:
                conversion = convert(module, seed=self.seed, **vars(self.settings))
            except (ValueError, TypeError) as error:
                raise MisconfigurationException(f"LowRank: {error}") from error
            done = _Converted(conversion, self.settings, self.seed)
            module.lowrank_conversion = done  # type: ignore[assignment]
        self.seed = done.seed
        self.conversion, self._trained, self._module = done.conversion, done.trained, module
        return done.conversion

    @staticmethod
    @rank_zero_only
    def _print(conversion: Conversion) -> None:
        Console().print(str(conversion), markup=False, highlight=False, soft_wrap=True)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Unmerge layers; refuse layers created since the conversion, and factors that are in no optimizer."""
        self._refuse_dense(pl_module)
        unmerge(pl_module)
        check_optimizers(trainer, pl_module)
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
        # FederatedLoop makes this check itself, on its clients' first step.
        federated = any(callback.state_key == "FederatedLoop" for callback in callbacks)
        self._unseen = set() if federated else set(map(id, trainer.optimizers))

    def _refuse_dense(self, module: pl.LightningModule) -> None:
        """Refuse a module that has created layers since the conversion."""
        assert self.conversion is not None
        gone = _gone(module, self.conversion)
        late = [name for name in self._made_later(module) if name not in self._added]
        if gone or late:
            raise MisconfigurationException(
                f"LowRank: {type(module).__name__} has made {join_names(gone or late)} after its layers were converted,"
                " so that it would be trained dense. Lightning calls configure_model() again after LowRank has, and"
                " setup() of modules after that of callbacks: make the layers in __init__(), or in configure_model()"
                " if they do not exist yet"
                + ("." if gone else "; or list the layers to convert in include, to keep these dense.")
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse manual steps that bypass this callback's Frobenius decay."""
        if self.frobenius_decay:
            self._restore.callback(refuse_unseen_steps(trainer, f"frobenius_decay={self.frobenius_decay}"))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Remove the hooks from the module and the optimizers."""
        self._restore.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Remove the hooks from the module and the optimizers."""
        self._restore.close()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Freeze the fixed factors again if a callback unfroze them, and record which parameters are trained."""
        if batch_idx == 0:
            keep_frozen(pl_module)
            named = pl_module.named_parameters(remove_duplicate=False)
            self._frozen = [(name, value) for name, value in named if name not in self._trained]
        self._trained.update(name for name, value in self._frozen if value.requires_grad)

    @property
    def acts_on_gradients(self) -> bool:
        """Whether this callback changes gradients before the optimizer's step."""
        return bool(self.frobenius_decay)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Add the Frobenius decay to the gradients; in the first step, refuse layers without a gradient."""
        first = id(optimizer) in self._unseen
        if not (first or self.frobenius_decay):
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if first:
            self._unseen.remove(id(optimizer))
            check_factor_gradients(pl_module, lambda name, factor: factor.grad, parameters)
        if self.frobenius_decay and makes_step(trainer, optimizer):
            add_frobenius_decay(pl_module, self.frobenius_decay, parameters)

    def on_before_stacked_step(self, module: pl.LightningModule, stacks: Mapping[str, Tensor]) -> None:
        """Add the Frobenius decay to the gradients of clients that step together."""
        if self.frobenius_decay:
            add_frobenius_decay(module, self.frobenius_decay, stacks=stacks)

    def state_dict(self) -> dict[str, Any]:
        """The conversion, for `load_dense`, and the module's outline, for `adapter_checkpoint`."""
        return {
            "layers": [] if self.conversion is None else [spec.to_dict() for spec in self.conversion.specs],
            "outline": None if self._module is None else outline(self._module).to_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse a checkpoint whose layers were converted in another way."""
        if state_dict["layers"] != self.state_dict()["layers"]:
            raise MisconfigurationException(
                "the checkpoint's layers were converted with other LowRank arguments: use the same ones, or load the"
                " dense module with lightning_lowrank.load_dense(path, module)."
            )
        if state_dict.get("outline") is not None and self._module is not None:
            saved = Outline.from_dict(state_dict["outline"])
            self._trained.update(name for name, trained in saved.parameters.items() if trained)
            folded = {layer.name for layer in saved.layers if layer.folded}
            for name, layer in low_rank_layers(self._module):
                layer.folded |= name in folded


def _gone(module: torch.nn.Module, conversion: Conversion) -> list[str]:
    """Names of converted layers that are no longer low-rank."""
    there = {_unwrapped(name) for name, _ in low_rank_layers(module)}
    return [spec.name for spec in conversion.specs if _unwrapped(spec.name) not in there]


def _refuse_other_layers(module: torch.nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Refuse a checkpoint whose layers are dense or have other factors; a pre-hook of ``load_state_dict``.

    A plain function, because a deepcopy of the module must not copy the callback.
    """
    layers = dict(low_rank_layers(module))
    dense = [name for name in layers if f"{name}.weight" in state and not _has_factors(name, state)]
    if layers and len(dense) == len(layers):
        raise MisconfigurationException(
            f"the checkpoint's layers are dense, and LowRank has converted {join_names(dense)}: load its weights into"
            " the"
            " module before the fit, by module.load_state_dict(torch.load(path)['state_dict']), and leave out"
            " ckpt_path, so that LowRank converts them."
        )
    for name, layer in layers.items():
        for key, value in layer.factors.state_dict(prefix=f"{name}.factors.").items():
            if key in state and state[key].shape != value.shape:
                raise MisconfigurationException(
                    f"the checkpoint's layers were converted with other LowRank arguments: {key} is"
                    f" {list(state[key].shape)} in it and {list(value.shape)} now. Use the same ones, or load the dense"
                    " module with lightning_lowrank.load_dense(path, module)."
                )


def _has_factors(layer: str, state: Mapping[str, Any]) -> bool:
    return any(name.startswith(f"{layer}.factors.") for name in state)


def _unwrapped(name: str) -> str:
    """A layer's name without the prefixes of torch.compile, FSDP and activation checkpointing."""
    return re.sub(r"\b_(orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.", "", name)
