"""Low-rank form of torch's multi-head attention, which reads its projections' weights and never calls the layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from lightning_lowrank.internals.torch import is_persistent, own_buffers, own_children, own_parameters
from lightning_lowrank.layers.layer import LowRankLayer, take_over_attributes


class LowRankMultiheadAttention(nn.MultiheadAttention):
    """An ``nn.MultiheadAttention`` whose input projections are low-rank, as :func:`convert` makes it.

    The projections are children named after the weights that they replace: ``in_proj`` for ``in_proj_weight``,
    or ``q_proj``, ``k_proj`` and ``v_proj`` if keys and values have widths of their own. Torch's attention
    reads weights, so these children compose theirs (``compute="dense"``) and are not called.
    """

    PROJECTIONS: ClassVar[tuple[str, ...]] = ("in_proj", "q_proj", "k_proj", "v_proj")

    def __init__(self, *arguments: object, **keywords: object) -> None:
        raise TypeError("LowRankMultiheadAttention is built from a dense one: use its from_dense, or convert(...).")

    @classmethod
    def from_dense(cls, module: nn.Module, projections: Mapping[str, LowRankLayer]) -> LowRankMultiheadAttention:
        """Build a low-rank attention from a dense one.

        Args:
            module: The dense attention, which should not be used further: its parameters, buffers and children become
                those of the new layer.
            projections: The layers by name: ``"in_proj"``, ``"q_proj"``, ``"k_proj"`` or ``"v_proj"``.

        Raises:
            ValueError: If the attention has no such weight.
        """
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        take_over_attributes(layer, module, hooks=True)
        # Set up directly, because register_parameter refuses the name of a property of the class.
        own_parameters(layer).update(
            {
                name: value
                for name, value in own_parameters(module).items()
                if name.removesuffix("_weight") not in projections
            }
        )
        _copy_buffers(layer, module)
        for name, child in own_children(module).items():
            layer.add_module(name, child)
        for name, projection in projections.items():
            if own_parameters(module).get(f"{name}_weight") is None:
                raise ValueError(f"projections has {name!r}, but the attention has no parameter {name}_weight.")
            layer.add_module(name, projection)
        return layer

    def to_dense(self) -> nn.MultiheadAttention:
        """A plain attention with the effective weights as new Parameters, trainable if the dense ones were."""
        dense = nn.MultiheadAttention.__new__(nn.MultiheadAttention)
        nn.Module.__init__(dense)
        take_over_attributes(dense, self, hooks=True)
        for name in self.PROJECTIONS:
            weight, projection = own_parameters(self).get(f"{name}_weight"), own_children(self).get(name)
            if projection is not None:
                weight = projection.to_dense().get_parameter("weight")
            dense.register_parameter(f"{name}_weight", weight)
        for name, parameter in own_parameters(self).items():
            if name not in own_parameters(dense):
                dense.register_parameter(name, parameter)
        _copy_buffers(dense, self)
        for name, child in own_children(self).items():
            if name not in self.PROJECTIONS:
                dense.add_module(name, child)
        return dense

    def _weight(self, name: str) -> Any:
        projection = own_children(self).get(name.removesuffix("_weight"))
        return own_parameters(self).get(name) if projection is None else projection.weight

    # Attributes that torch's attention reads: one packed projection, or one each of queries, keys and values, or None.
    in_proj_weight: Any = property(lambda self: self._weight("in_proj_weight"))
    q_proj_weight: Any = property(lambda self: self._weight("q_proj_weight"))
    k_proj_weight: Any = property(lambda self: self._weight("k_proj_weight"))
    v_proj_weight: Any = property(lambda self: self._weight("v_proj_weight"))


def _copy_buffers(target: nn.Module, source: nn.Module) -> None:
    for name, buffer in own_buffers(source).items():
        target.register_buffer(name, buffer, persistent=is_persistent(source, name))
