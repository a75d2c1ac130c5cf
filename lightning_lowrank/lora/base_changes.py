"""Changes of base weights by operators: their announcement, and their application on server and clients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from lightning_lowrank.aggregation.aggregator import working_dtype
from lightning_lowrank.federated.algorithm import detached
from lightning_lowrank.federated.state import Base, copy_into
from lightning_lowrank.lora.adapters import FACTORS, Adapters
from lightning_lowrank.lora.inputs import Broadcast
from lightning_lowrank.lora.operator import Operator
from lightning_lowrank.lora.pairs import LowRankPair
from lightning_lowrank.seeding import derive_seed

# Key in messages of a change's dense matrix, which is sent if it takes fewer bytes than its two factors.
_PRODUCT = "product"


class BaseChanges:
    """An operator's changes of frozen weights, and its redrawn factors.

    ``base.state`` keeps the drawn factors as ``"factors"``, the number of the draw as ``"draw"``, and the changes of
    quantised weights as ``"separate_changes"``.

    Args:
        operator: The operator.
    """

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self.adapters = Adapters({})

    def begin(self, base: Base, trained: Mapping[str, Tensor]) -> None:
        """Adopt earlier changes of quantised weights; if factors are drawn, fold the trained ones and draw others."""
        layers = self.adapters.layers
        earlier = {layer: adapter.separate_change for layer, adapter in layers.items() if adapter.separate_change}
        if earlier:
            base.state["separate_changes"] = earlier
        if self._operator.redraws:
            for layer, adapter in layers.items():
                own = adapter.pair(detached(trained), adapter.rank, self.adapters.scalings[layer])
                if own.product().any():
                    self._change(base, layer, own)
            self._draw(base, 0)
            copy_into(trained, base.state["factors"])

    def configure(self, base: Base) -> None:
        """Set the change of each quantised layer; in a resumed run, mark the layers whose base weights have changed."""
        changes = base.state.get("separate_changes", {})
        for layer, adapter in self.adapters.layers.items():
            if adapter.quantised:
                adapter.separate_change = changes.get(layer, {})
            elif base.state.get("folded"):
                adapter.mark_folded()

    def announcement(self, found: Mapping[str, Broadcast], round_number: int) -> dict[str, Tensor]:
        """The tensors that announce a round's changes to all clients."""
        announced: dict[str, Tensor] = {}
        names = self._operator.sent_down_of_change(round_number)
        for layer, result in found.items():
            if result.change is None:
                continue
            change = result.change.resized(
                result.change.rank, self.adapters.scalings[layer], self._operator.absorbing(round_number)
            )
            # The concatenated factors of many clients can take more bytes than their product, which is in single
            # precision if the factors have 16 bits.
            dense = math.prod(change.shape) * working_dtype(change.B.dtype).itemsize
            if len(names) == 2 and change.rank * sum(change.shape) * change.B.dtype.itemsize > dense:
                announced[f"{layer}.change.{_PRODUCT}"] = change.in_working_dtype().product()
            else:
                # As a site decodes them: some processors round the product by the strides of its factors.
                announced |= {f"{layer}.change.{name}": getattr(change, name).contiguous() for name in sorted(names)}
        return announced

    def apply(self, base: Base, announced: Mapping[str, Tensor]) -> None:
        """Fold announced changes into the base weights; if factors are drawn, draw those of the next round."""
        keys = (*FACTORS, _PRODUCT)
        changes = {
            layer: {key: announced[name] for key in keys if (name := f"{layer}.change.{key}") in announced}
            for layer in self.adapters.layers
        }
        if not any(changes.values()):
            return
        for layer, factors in changes.items():
            adapter, scaling = self.adapters.layers[layer], self.adapters.scalings[layer]
            if _PRODUCT in factors:
                self._change(base, layer, factors[_PRODUCT])
                continue
            if len(factors) < 2:
                # Server and clients have drawn the other factor already.
                ((name, value),) = factors.items()
                rank = value.shape[1 if name == "B" else 0]
                drawn = adapter.pair(base.state["factors"], rank, scaling)
                factors = {"B": drawn.B, "A": drawn.A, **factors}
            self._change(base, layer, LowRankPair(factors["B"], factors["A"], scaling))
        if self._operator.redraws:
            self._draw(base, base.state["draw"] + 1)

    def _change(self, base: Base, layer: str, change: LowRankPair | Tensor) -> None:
        """Fold a change into a base weight; for a quantised weight, add it to the layer's separate change."""
        adapter = self.adapters.layers[layer]
        if not adapter.quantised:
            adapter.fold(change, partial(base.fold, layer))
            return
        changes = base.state.setdefault("separate_changes", {})
        changes[layer] = adapter.separate_change = adapter.summed_change(changes.get(layer, {}), change)

    def _draw(self, base: Base, number: int) -> None:
        """Draw the initial factors of round ``number``, the same on the server and all clients."""
        drawn: dict[str, Tensor] = {}
        parameters = dict(base.module.named_parameters())
        for layer, adapter in self.adapters.layers.items():
            like, scaling = parameters[adapter.parameters["B"]], self.adapters.scalings[layer]
            pair = self._operator.fresh(
                adapter.shape,
                adapter.rank,
                scaling=scaling,
                round=number,
                seed=derive_seed(derive_seed(base.seed, "adapters"), layer),
                dtype=like.dtype,
                device=like.device,
            )
            drawn |= adapter.tensors(pair, scaling, self._operator.absorbing(number))
        base.state.update({"factors": drawn, "draw": number})
