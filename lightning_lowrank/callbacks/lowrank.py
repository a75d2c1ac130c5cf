"""`LowRank`: converts a module's layers to low-rank ones before Lightning builds optimizers or loads checkpoints.

It is the Lightning face of `lightning_lowrank.layers.convert`. Users put it in ``callbacks``, before `FederatedLoop` or
without it; `load_dense` brings what was trained back into the module they had.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.console import Console
from torch import Tensor

from lightning_lowrank.callbacks.peft_format import Outline, outline, refuse_changed_base, write_adapter
from lightning_lowrank.federated.checks import check_optimizers
from lightning_lowrank.layers import (
    Conversion,
    Factorization,
    LayerSpec,
    add_frobenius_decay,
    convert,
    dense_state_dict,
    low_rank_class,
    low_rank_layers,
)
from lightning_lowrank.seeding import default_seed


@dataclass
class _Converted:
    """Kept on a converted module: a second trainer finds it, and the ledger reads what dense FedAvg would send."""

    conversion: Conversion
    form: dict[str, Any]
    dense_tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]


class LowRank(Callback):
    r"""Replace a module's layers by low-rank ones, in place, when a run begins.

    Linear layers, convolutions (transposed ones too), embeddings, the projections of ``nn.MultiheadAttention`` and
    transformers' ``Conv1D`` can be converted; see `lightning_lowrank.layers.convert`.

    In role ``"update"`` the factors are a change to a frozen weight, :math:`W + f(U, V)`; in role ``"weight"`` they are
    the weight, :math:`f(U, V)`. Parameters of other layers stay trained. After ``fit`` the module keeps its low-rank
    layers; `lightning_lowrank.recover` makes them dense again and `load_dense` does so from a checkpoint. A class whose
    layers are converted here cannot be read by ``load_from_checkpoint``, which knows nothing of callbacks: use
    ``load_dense(path, MyModule(...))``.

    Args:
        factorization: How a weight is factorised: `MatrixProduct`, `BlockKronecker`, `CP` or `Hadamard`.
        budget: Share of the whole model, in (0, 1]: all trained parameters after the conversion over all parameters
            before. The layers get one common ratio, the largest that fits. Give one of ``budget``, ``ratio``,
            ``rank``, ``rank_ratio``.
        ratio: Share of each weight, in (0, 1], or a dictionary from name patterns to shares.
        rank: Rank of each weight (number of blocks for `BlockKronecker`), or a dictionary from name patterns to ranks.
        rank_ratio: Rank as a share of each weight's output channels, or a dictionary from name patterns to shares.
        budget_unit: ``"share"``, or ``budget`` is a number of ``"parameters"`` or ``"bytes"``.
        allocation: ``"uniform"``: one ratio for all layers. ``"singular_values"``: ranks of a `MatrixProduct` go to
            the layers whose weights need them most, under the same budget.
        role: ``"update"`` or ``"weight"``.
        decouple: Aggregation-aware decomposition, :math:`f(U, \tilde V) + f(\tilde U, V)` with fixed random
            :math:`\tilde U, \tilde V` (FedMUD, Eq. 8), which makes the mean of recovered weights the recovered mean.
        half_frozen: Train :math:`V` alone, :math:`f(\tilde U, V)`, at the same number of trained parameters;
            ``"V"`` freezes :math:`V` instead.
        alpha: LoRA's :math:`\alpha`: an update is multiplied by :math:`\alpha / \text{rank}`. ``None``: by 1.
        rank_stabilized: Multiply by :math:`\alpha / \sqrt{\text{rank}}` instead.
        dropout: Probability with which numbers of a layer's input are left out of its update in training.
        compute: ``"auto"``: compose the weight or apply the factors one after another, whichever needs fewer
            multiply-adds. ``"dense"`` or ``"contracted"``: always the one.
        skip: ``"first"`` and/or ``"last"``: leave the module's first or last convertible layer alone.
        include: Patterns of layer names to convert; all by default.
        exclude: Patterns of layer names to leave alone.
        init: ``"auto"``: an update starts at zero, a weight at the best approximation of the one it replaces
            (``"spectral"``). ``"uniform"``: random factors. ``"lora"``: an update whose factor on the input's side is
            drawn as a linear layer's weight is, the other zero.
        init_scale: Bound :math:`a` of the uniform draws :math:`U(-a, a)`; by default one that makes the first step
            of an update as large as the dense step, in expectation.
        budget_rule: ``"largest"``, or ``"authors"``: lower the ratio in steps of 0.001 until the model's share is at
            most ``budget + 0.001``, as FedMUD's authors do.
        allow_larger: Convert layers whose factors are no fewer numbers than their weight as well.
        freeze_rest: Freeze the parameters of all other layers.
        keep_trained: Patterns of parameter names that ``freeze_rest`` spares: ``["classifier"]`` for the new head of a
            pretrained model.
        frobenius_decay: :math:`\lambda` of :math:`\frac{\lambda}{2} \sum \lVert f \rVert_F^2` over the layers'
            products, whose gradient is added before each optimizer step. Give the factors no weight decay besides.
        train_base: Train the weight beside the update, in role ``"update"``: what `FedHM` needs, some of whose
            clients train the weight and others factors.
        seed: Seed of the factors' draws. ``None``: the seed given to Lightning's ``seed_everything``, or 0.
        summary: Print the table of layers.

    Raises:
        MisconfigurationException: If the module was converted before with other arguments, or the arguments do not
            suit it; it names the argument or the floor of the budget.

    Example:
        >>> import lightning as L
        >>> from lightning_lowrank import LowRank, MatrixProduct
        >>> trainer = L.Trainer(callbacks=[LowRank(MatrixProduct(), ratio=0.25, role="weight")], logger=False)
    """

    def __init__(
        self,
        factorization: Factorization,
        budget: float | None = None,
        ratio: float | dict[str, float] | None = None,
        rank: int | dict[str, int] | None = None,
        role: Literal["update", "weight"] = "update",
        decouple: bool = False,
        half_frozen: bool | Literal["U", "V"] = False,
        skip: list[Literal["first", "last"]] | None = None,
        include: list[str] | None = None,
        exclude: list[str] | None = None,
        init: Literal["auto", "uniform", "lora", "spectral"] = "auto",
        init_scale: float | None = None,
        budget_rule: Literal["largest", "authors"] = "largest",
        freeze_rest: bool = False,
        seed: int | None = None,
        summary: bool = True,
        rank_ratio: float | dict[str, float] | None = None,
        budget_unit: Literal["share", "parameters", "bytes"] = "share",
        allocation: Literal["uniform", "singular_values"] = "uniform",
        alpha: float | None = None,
        rank_stabilized: bool = False,
        dropout: float = 0.0,
        compute: Literal["auto", "dense", "contracted"] = "auto",
        allow_larger: bool = False,
        frobenius_decay: float = 0.0,
        train_base: bool = False,
        keep_trained: list[str] | None = None,
    ) -> None:
        if not (frobenius_decay >= 0 and math.isfinite(frobenius_decay)):
            raise MisconfigurationException(
                f"frobenius_decay must be a finite number of at least 0, but is {frobenius_decay!r}."
            )
        self.frobenius_decay = frobenius_decay
        self.factorization = factorization
        self.arguments: dict[str, Any] = {
            "budget": budget,
            "ratio": ratio,
            "rank": rank,
            "rank_ratio": rank_ratio,
            "budget_unit": budget_unit,
            "allocation": allocation,
            "role": role,
            "decouple": decouple,
            "half_frozen": half_frozen,
            "skip": tuple(skip or ()),
            "include": include,
            "exclude": exclude,
            "init": init,
            "init_scale": init_scale,
            "budget_rule": budget_rule,
            "alpha": alpha,
            "rank_stabilized": rank_stabilized,
            "dropout": dropout,
            "compute": compute,
            "allow_larger": allow_larger,
            "train_base": train_base,
            "freeze_rest": freeze_rest,
            "keep_trained": keep_trained,
            "seed": default_seed() if seed is None else seed,
        }
        self.summary = summary
        self.conversion: Conversion | None = None
        self._outline: Outline | None = None

    @property
    def state_key(self) -> str:
        """Name of this callback's state in checkpoints."""
        return "LowRank"

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Convert the module, unless an earlier run has."""
        if is_overridden("configure_model", pl_module):
            pl_module.configure_model()
        if is_overridden("setup", pl_module) and not any(
            low_rank_class(layer) is not None for layer in pl_module.modules()
        ):
            raise MisconfigurationException(
                f"LowRank: {type(pl_module).__name__} has no layer to convert yet. Lightning calls"
                " setup() of modules after that of callbacks: make the layers in __init__() or configure_model()."
            )
        conversion = self.convert(pl_module)
        if self.summary:
            self._print(conversion)

    def convert(self, module: torch.nn.Module) -> Conversion:
        """Convert ``module`` in place and return what was done, layer by layer."""
        arguments = {"factorization": self.factorization, **self.arguments}
        form = {name: value for name, value in arguments.items() if name != "seed"}
        if any(low_rank_layers(module)):
            done: _Converted | None = getattr(module, "lowrank_conversion", None)
            if done is None or done.form != form:
                raise MisconfigurationException(
                    "this module was already converted with other LowRank arguments: call"
                    " lightning_lowrank.recover(module) first, or start from a new module."
                )
        else:
            dense_tensors = {
                name: (tuple(value.shape), value.dtype)
                for name, value in module.named_parameters()
                if value.requires_grad
            }
            try:
                conversion = convert(module, **arguments)
            except (ValueError, TypeError) as error:
                raise MisconfigurationException(f"LowRank: {error}") from error
            done = _Converted(conversion, form, dense_tensors)
            module.lowrank_conversion = done  # type: ignore[assignment]
        self.conversion = done.conversion
        return done.conversion

    @staticmethod
    @rank_zero_only
    def _print(conversion: Conversion) -> None:
        Console().print(str(conversion), markup=False, highlight=False, soft_wrap=True)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse factors that no optimizer would train, and look at what the module trains beside them."""
        check_optimizers(trainer, pl_module)
        self._outline = outline(pl_module)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Add the Frobenius decay to the gradients."""
        if self.frobenius_decay:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            add_frobenius_decay(pl_module, self.frobenius_decay, parameters)

    def on_before_cohort_step(self, module: pl.LightningModule, stacks: Mapping[str, Tensor]) -> None:
        """Add the Frobenius decay to the gradients of clients that step together."""
        if self.frobenius_decay:
            add_frobenius_decay(module, self.frobenius_decay, stacks=stacks)

    def state_dict(self) -> dict[str, Any]:
        """Return how layers were converted, for `load_dense`, and what `adapter_checkpoint` must know of the module."""
        return {
            "layers": [] if self.conversion is None else [spec.to_dict() for spec in self.conversion.specs],
            "outline": None if self._outline is None else self._outline.to_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse a checkpoint whose layers were converted in another way."""
        if state_dict["layers"] != self.state_dict()["layers"]:
            raise MisconfigurationException(
                "the checkpoint's layers were converted with other LowRank arguments: use the same ones, or load the"
                " dense module with lightning_lowrank.load_dense(path, module)."
            )


def dense_checkpoint(path: str | Path, client: int | None = None) -> dict[str, Tensor]:
    """Return the unconverted module's state dict from a checkpoint of a converted one.

    Args:
        path: A checkpoint that a trainer with `LowRank` wrote; one without `LowRank` gives its state dict as it is.
        client: Id of a client whose own model is wanted, in place of the global one.

    Raises:
        MisconfigurationException: If the checkpoint does not say how its layers were made, or ``client`` keeps no
            model of its own in it.
    """
    checkpoint = _read(path, client)
    layers = checkpoint.get("callbacks", {}).get("LowRank", {}).get("layers", [])
    if not layers and any(".factors." in name for name in checkpoint["state_dict"]):
        raise MisconfigurationException(
            f"{path} holds low-rank layers and does not say how they were made, because it was saved with"
            " save_weights_only=True: convert a new module with LowRank(...).convert(module), load the state dict into"
            " that, and call lightning_lowrank.recover(module)."
        )
    return dense_state_dict(checkpoint["state_dict"], [LayerSpec.from_dict(layer) for layer in layers])


def adapter_checkpoint(
    path: str | Path, folder: str | Path, client: int | None = None, prefix: str | None = None
) -> Path:
    """Write the low-rank layers of a checkpoint as a PEFT adapter folder; see `export_adapter`.

    Args:
        path: A checkpoint that a trainer with `LowRank` wrote.
        folder: Where to write ``adapter_config.json`` and ``adapter_model.safetensors``; made if needed.
        client: Id of a client whose own model is wanted, in place of the global one.
        prefix: Name of the pretrained network in the LightningModule; by default the attribute that holds all low-rank
            layers.

    Returns:
        The folder.

    Raises:
        MisconfigurationException: If the checkpoint does not say what its layers are, ``client`` keeps no model of its
            own in it, or something trained cannot be expressed.
    """
    checkpoint = _read(path, client)
    described = checkpoint.get("callbacks", {}).get("LowRank", {}).get("outline")
    if described is None and any(".lora_" in name for name in checkpoint["state_dict"]):
        raise MisconfigurationException(
            f"{path} is of a module that PEFT wrapped: load its state dict into such a module, and call save_pretrained"
            " of the model that PEFT wrapped."
        )
    if described is None:
        raise MisconfigurationException(
            f"{path} does not describe the layers of its module, as checkpoints of runs with LowRank do unless they"
            " were saved with save_weights_only=True: convert a new module with LowRank(...).convert(module), load the"
            " state dict into that, and call lightning_lowrank.export_adapter(module, folder)."
        )
    loop = checkpoint.get("callbacks", {}).get("FederatedLoop", {})
    if loop:
        refuse_changed_base(loop["algorithm"], loop["server"]["memory"])
    return write_adapter(Outline.from_dict(described), checkpoint["state_dict"], folder, prefix)


def _read(path: str | Path, client: int | None) -> dict[str, Any]:
    """Return a checkpoint, with a client's own values in the place of the global ones where there is a client."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    if client is not None:
        loop = checkpoint.get("callbacks", {}).get("FederatedLoop", {})
        kept = loop.get("clients", {})
        # Of FedLoRA's operators, some give each client a pair of its own, which the server keeps.
        given = loop.get("server", {}).get("memory", {}).get("pairs", {})
        own = {
            number: {**memory.get("buffers", {}), **given.get(number, {}), **memory.get("personal", {})}
            for number in kept.keys() | given.keys()
            for memory in (kept.get(number, {}),)
        }
        with_own = sorted(number for number, tensors in own.items() if tensors)
        if client not in with_own:
            raise MisconfigurationException(
                f"client {client} keeps no model of its own in {path}: "
                + (f"clients {with_own[:10]} do." if with_own else "its method keeps none on clients.")
            )
        checkpoint["state_dict"].update(own[client])
    return checkpoint


def load_dense(path: str | Path, module: torch.nn.Module, client: int | None = None) -> torch.nn.Module:
    """Load a checkpoint of a converted module into the plain one, and return it.

    Args:
        path: A checkpoint that a trainer with `LowRank` wrote.
        module: A new, unconverted module of the same class.
        client: Id of a client whose own model is wanted, in place of the global one.

    Raises:
        MisconfigurationException: If ``client`` keeps no model of its own in the checkpoint.
        RuntimeError: If the checkpoint is of another architecture; torch names the tensors that do not fit.
    """
    module.load_state_dict(dense_checkpoint(path, client))
    return module
