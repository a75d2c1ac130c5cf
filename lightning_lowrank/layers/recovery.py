"""From low-rank layers back to dense ones: merging, recovering a model, and recovering a state dict alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lowrank.internals.torch import copy_versions, own_children, without_autocast
from lightning_lowrank.layers.attention import LowRankMultiheadAttention
from lightning_lowrank.layers.factorization import HalfFrozen, factorization_from_dict
from lightning_lowrank.layers.layer import LowRankLayer, combine, low_rank_layers
from lightning_lowrank.layers.precision import hand_over, narrow
from lightning_lowrank.layers.settings import Role


@dataclass(frozen=True)
class LayerSpec:
    """A low-rank layer's description in a checkpoint, from which its dense weight can be composed.

    ``role``, ``decouple`` and ``half_frozen`` are described in :class:`~lightning_lowrank.layers.LayerSettings`.

    Attributes:
        name: The layer's name in the converted model.
        shape: The dense weight's shape.
        factorization: :meth:`Factorization.to_dict` of the factorization.
        rank: The factors' rank.
        aliases: Further names of the same layer, if a model holds it more than once.
        scale: The factor that an update is multiplied by.
        suffix: The part after the layer's name in the dense weight's name: ``".weight"``, or ``"_weight"`` for the
            projections of ``nn.MultiheadAttention``.
    """

    name: str
    shape: tuple[int, ...]
    factorization: dict[str, Any]
    rank: int
    role: Role
    decouple: bool
    half_frozen: HalfFrozen
    aliases: tuple[str, ...] = ()
    scale: float = 1.0
    suffix: str = ".weight"

    def to_dict(self) -> dict[str, Any]:
        """The fields in plain Python (lists for tuples), for a checkpoint or JSON."""
        return {**asdict(self), "shape": list(self.shape), "aliases": list(self.aliases)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> LayerSpec:
        """Build the spec that :meth:`to_dict` described; a missing or unknown field is a ``TypeError``."""
        spec = cls(**fields)
        return cls(**{**asdict(spec), "shape": tuple(spec.shape), "aliases": tuple(spec.aliases)})


def merge(model: nn.Module) -> nn.Module:
    """Compose every low-rank layer's weight once and keep it, so that inference costs as much as with the dense model.

    Factors, frozen weights and the state dict stay as they are; :func:`unmerge`, ``model.train()``, loading
    a state dict, a change of the factors in place, and a fit with `LowRank` or `FederatedLoop` undo it, bit for bit.
    Code of `torch.compile` does not see that factors change: call :func:`unmerge` after that.

    Args:
        model: A converted model.

    Returns:
        The model.

    Example:
        >>> from lightning_lowrank.layers import MatrixProduct, convert, merge
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
        >>> _ = convert(model, MatrixProduct(), rank=1)
        >>> merge(model)[0].merged_weight.shape
        torch.Size([8, 8])
    """
    for _, layer in low_rank_layers(model):
        layer.merge()
    return model


def unmerge(model: nn.Module) -> nn.Module:
    """Undo :func:`merge`, and return the model."""
    for _, layer in low_rank_layers(model):
        layer.unmerge()
    return model


@torch.inference_mode(False)
def recover(model: nn.Module) -> nn.Module:
    """Turn every low-rank layer into the dense layer with the same weight, in place.

    The dense weights are new parameters, trainable if the weights were before the conversion; biases and hooks
    are the layers' own. Other parameters that ``freeze_rest`` froze stay frozen. Parameters that ``freeze_rest``
    trained in single precision in a model of 16 bits are rounded to 16 bits. Nothing of this package is left in the
    model, which ``torch.load`` reads without it.

    Args:
        model: A converted model. One without low-rank layers is returned unchanged.

    Returns:
        The model.

    Raises:
        TypeError: If ``model`` is itself a low-rank layer: use its ``to_dense``.

    Example:
        >>> from lightning_lowrank.layers import MatrixProduct, convert, recover
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        >>> _ = convert(model, MatrixProduct(), rank=1)
        >>> recover(model)
        Sequential(
          (0): Linear(in_features=8, out_features=8, bias=True)
          (1): ReLU()
        )
    """
    if isinstance(model, (LowRankLayer, LowRankMultiheadAttention)):
        raise TypeError(
            f"model is itself a {type(model).__name__}, which cannot be replaced in place; use model.to_dense()."
        )
    tied: dict[nn.Module, nn.Parameter] = {}
    attentions: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, LowRankMultiheadAttention):
            attentions[module] = dense = module.to_dense()
            for name in module.PROJECTIONS:
                projection = own_children(module).get(name)
                if isinstance(projection, LowRankLayer):
                    hand_over(projection.factors, dense)
                    weight = dense.get_parameter(f"{name}_weight")
                    setattr(dense, f"{name}_weight", tied.setdefault(projection.factors, weight))
    replace_modules(attentions)
    layers: dict[nn.Module, nn.Module] = {}
    for _, layer in low_rank_layers(model):
        layers[layer] = plain = layer.to_dense(hooks=True)
        hand_over(layer, plain)
        hand_over(layer.factors, plain)
        plain.weight = tied.setdefault(layer.factors, plain.get_parameter("weight"))
    replace_modules(layers)
    for part in model.modules():
        narrow(part)
        for name in ("frozen_for_factors", "buffers_before_training", "lowrank_conversion"):
            vars(part).pop(name, None)
    return model


@without_autocast()
def dense_state_dict(state_dict: Mapping[str, Tensor], specs: Sequence[LayerSpec]) -> dict[str, Tensor]:
    """Turn a converted model's state dict into one that loads into the unconverted model.

    Args:
        state_dict: Of the converted model; may be on any device.
        specs: :attr:`Conversion.specs`. The names must be relative to the same module as the state dict's.

    Returns:
        The state dict with a dense ``weight`` for each low-rank layer in place of its tensors; other entries
        are the same tensors as before.

    Raises:
        ValueError: If a tensor of a layer is missing.

    Example:
        >>> from lightning_lowrank.layers import MatrixProduct, convert, dense_state_dict
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        >>> conversion = convert(model, MatrixProduct(), rank=1)
        >>> list(dense_state_dict(model.state_dict(), conversion.specs))
        ['0.weight', '0.bias']
    """
    weights: dict[str, tuple[str, Tensor]] = {}
    absorbed: dict[str, str] = {}
    for spec in specs:
        keys = _tensor_keys(spec)
        for name in (spec.name, *spec.aliases):
            missing = [f"{name}.{key}" for key in keys if f"{name}.{key}" not in state_dict]
            if missing:
                raise ValueError(
                    f"state_dict lacks {missing} of the low-rank layer {name!r}; it must be the state dict "
                    "of the module whose conversion gave the specs."
                )
            tensors = {key: state_dict[f"{name}.{key}"].detach() for key in keys}
            weights[name] = (f"{name}{spec.suffix}", _dense_weight(spec, tensors))
            absorbed.update((f"{name}.{key}", name) for key in keys)
    dense: OrderedDict[str, Tensor] = OrderedDict()
    copy_versions(state_dict, dense)
    for key, value in state_dict.items():
        layer = absorbed.get(key, key.removesuffix(".bias"))
        if layer in weights:
            dense.setdefault(*weights[layer])
        if key not in absorbed:
            dense[key] = value
    return dense


def _tensor_keys(spec: LayerSpec) -> list[str]:
    factorization = factorization_from_dict(spec.factorization)
    keys = ["frozen_weight"] if spec.role == "update" else []
    keys += [f"factors.{factor}" for factor in factorization.trained_factors(spec.shape, spec.half_frozen)]
    fixed = factorization.fixed_factors(spec.shape, spec.decouple, spec.half_frozen)
    return keys + [f"fixed.{factor}" for factor in fixed]


def _dense_weight(spec: LayerSpec, tensors: Mapping[str, Tensor]) -> Tensor:
    factors = {key.removeprefix("factors."): t for key, t in tensors.items() if key.startswith("factors.")}
    fixed = {key.removeprefix("fixed."): t for key, t in tensors.items() if key.startswith("fixed.")}
    factorization = factorization_from_dict(spec.factorization)
    change = combine(factorization, spec.shape, factors, fixed, spec.decouple, spec.scale)
    if spec.role != "update":
        return change
    return (tensors["frozen_weight"] + change).to(tensors["frozen_weight"].dtype)


def replace_modules(replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Turn modules into others in place: references to the objects, such as in lists or bound methods, stay valid."""
    for module, other in replacements.items():
        object.__setattr__(module, "__dict__", vars(other))
        object.__setattr__(module, "__class__", type(other))
