"""The report of a conversion, as data and as a table."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_lowrank.layers.recovery import LayerSpec
from lightning_lowrank.units import percent


@dataclass(frozen=True)
class LayerReport:
    """The outcome of a conversion for one layer that has a weight.

    Attributes:
        name: The layer's name in the model.
        kind: The dense layer's class name.
        shape: The dense weight's shape.
        rank: The factors' rank, ``None`` if the layer stays dense.
        parameters: Numbers in the dense weight.
        trainable: Trained numbers of this weight: the factors', or the weight's own if the layer stays dense; 0 if
            frozen. The bias is not counted.
        converted: Whether the layer is low-rank now.
        reason: Why the layer stays dense or has another rank than the settings say, or a note that its factors have
            no fewer numbers than the weight or are another layer's; empty otherwise.
        error: The relative error ‖W − f‖ / ‖W‖ (Frobenius norms) of a weight that started from the dense one's
            decomposition, else ``None``.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    rank: int | None
    parameters: int
    trainable: int
    converted: bool
    reason: str = ""
    error: float | None = None


@dataclass(frozen=True)
class Conversion:
    """The outcome of :func:`convert`; printing it gives a table.

    Attributes:
        layers: A report for each layer of the model that has a weight, in registration order.
        specs: Descriptions from which the converted layers' dense weights can be composed, in the same order.
        dense_parameters: Numbers in all parameters of the model before conversion, without those that were frozen
            unless ``convert_frozen`` is set.
        trainable_parameters: Numbers in all trainable parameters of the model after it.
    """

    layers: list[LayerReport] = field(default_factory=list)
    specs: list[LayerSpec] = field(default_factory=list)
    dense_parameters: int = 0
    trainable_parameters: int = 0

    @property
    def ratio(self) -> float:
        """``trainable_parameters`` divided by ``dense_parameters``."""
        return self.trainable_parameters / self.dense_parameters

    def __str__(self) -> str:
        columns: dict[str, list[str]] = {
            "layer": [layer.name for layer in self.layers],
            "kind": [layer.kind for layer in self.layers],
            "shape": ["×".join(map(str, layer.shape)) for layer in self.layers],
            "rank": ["" if layer.rank is None else str(layer.rank) for layer in self.layers],
            "parameters": [f"{layer.parameters:,}" for layer in self.layers],
            "trainable": [f"{layer.trainable:,}" for layer in self.layers],
        }
        if any(layer.error is not None for layer in self.layers):
            columns["error"] = ["" if layer.error is None else f"{layer.error:.4f}" for layer in self.layers]
        columns[""] = [layer.reason for layer in self.layers]
        left = ("layer", "kind", "shape", "")
        padded = []
        for header, cells in columns.items():
            width = max(map(len, (header, *cells)))
            padded.append([f"{cell:{'<' if header in left else '>'}{width}}" for cell in (header, *cells)])
        lines = ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]
        lines.append(
            f"{self.trainable_parameters:,} of {self.dense_parameters:,} parameters are trained "
            f"({percent(self.ratio)}), other parameters of the model included."
        )
        return "\n".join(lines)
