"""Multiply-adds of a module's layers, counted while the module runs, for `inspect_run` and `SystemModel`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_lowrank.internals.torch import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS
from lightning_lowrank.layers import LowRankLayer
from lightning_lowrank.layers.survey import weight_shape

COUNTED = (nn.Linear, *CONVOLUTIONS, nn.Embedding, LowRankLayer)
"""Layers whose multiply-adds are counted."""


@contextmanager
def multiply_adds(module: nn.Module) -> Iterator[dict[str, int]]:
    """Yield a dictionary that counts each layer's multiply-adds, by name, while ``module`` runs forward passes.

    Composing the weight of a low-rank layer, once a batch, is not included. An embedding has none.
    """
    counts: dict[str, int] = {}

    def count(name: str) -> Any:
        def hook(layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            input = next((value for value in (*inputs, *named.values()) if isinstance(value, Tensor)), None)
            if isinstance(layer, LowRankLayer):
                assert input is not None
                made = layer.multiply_adds(input)
            elif isinstance(layer, nn.Embedding):
                made = 0
            else:
                positions, shape = input if isinstance(layer, TRANSPOSED_CONVOLUTIONS) else output, weight_shape(layer)
                # A subclass may have no weight, or return something else than a tensor.
                if shape is None or not isinstance(positions, Tensor):
                    return
                made = positions.numel() * math.prod(shape[1:])
            counts[name] = counts.get(name, 0) + made

        return hook

    with ExitStack() as hooks:
        for name, layer in module.named_modules():
            if isinstance(layer, COUNTED):
                hooks.callback(layer.register_forward_hook(count(name), with_kwargs=True).remove)
        yield counts
