"""Deferred steps: changes within a subspace that stay factored, so that no dense gradient or step is built.

Within a subspace ``P`` a projected optimizer changes a weight ``W`` by ``C Pᵀ``. As long as steps stay in one
subspace, a layer can compute ``x Wᵀ + (x P) Cᵀ`` and train ``C`` in place of ``W``: the gradient of ``C`` is the
projected gradient of ``W``, the optimizer steps ``C``, and ``C Pᵀ`` is added to ``W`` once, at the end. For batches of
few rows this is a fraction of the work. Clients that step together are computed this way; see
`ProjectedOptimizer.defer`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_lowrank.internals.torch import storage_key

CHANGE = "change"
"""Under this name a parameter's state holds the coefficients of steps that are not added to it yet."""

_OF_ITS_FORM = {
    *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_cpu", "is_cuda", "is_sparse"),
    *("is_meta", "is_quantized", "is_nested", "itemsize", "nbytes", "names"),
    *("size", "dim", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex"),
    *("element_size", "__len__", "__hash__"),
}
_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_IN_PLACE = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "pow"))}


class Deferred(NamedTuple):
    """The deferred change of a weight: with it the weight is ``W + C Pᵀ``.

    Args:
        projection: ``P``, of shape ``[in, rank]``.
        change: ``C``, of shape ``[out, rank]`` after any dimension of clients. It requires a gradient.
    """

    projection: Tensor
    change: Tensor

    def value(self, weight: Tensor) -> Tensor:
        """The sum of the weight and its deferred change."""
        return weight.detach() + self.change @ self.projection.mT

    def is_cheaper_apart(self, input: Tensor, weight: Tensor) -> bool:
        """Whether ``x Wᵀ + (x P) Cᵀ`` takes fewer multiplications than building the weight and its gradient.

        Args:
            input: A client's input of the layer.
            weight: The client's weight.
        """
        # Not `numel`, which would fix the number of rows in a compiled graph.
        rows, (outputs, inputs), rank = math.prod(input.shape[:-1]), weight.shape, self.projection.shape[1]
        return bool(rows * rank * (2 * inputs + 3 * outputs) < outputs * inputs * (2 * rank + rows))


def changes_in_place(function: Any, keywords: Mapping[str, Any]) -> bool:
    """Whether a torch function, as a `TorchFunctionMode` sees it, writes into its first argument."""
    name = getattr(function, "__name__", "")
    # `torch.nn.functional` passes ``inplace`` to modes by name, also if the caller passed it by position.
    return bool(keywords.get("inplace")) or (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


class DeferredWeights:
    """The weights of a training step whose changes are deferred.

    ``F.linear`` uses weight and change separately; every other function gets their sum.

    Args:
        found: The changes by ``id`` of the weight.
    """

    def __init__(self, found: Mapping[int, Deferred]) -> None:
        self._found = found
        self._values: dict[int, Tensor] = {}

    def apart(self, input: Tensor, weight: Tensor) -> Deferred | None:
        """A weight's deferred change, if the layer should compute with it separately."""
        found = self._found.get(id(weight))
        return found if found is not None and input.ndim > 1 and found.is_cheaper_apart(input, weight) else None

    def changed(
        self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of a torch function, with each deferred weight replaced by its sum with the change.

        Raises:
            NotImplementedError: If the function writes into a deferred weight, or differentiates with respect to one.
        """
        if not self._found or _reads_metadata_only(function):
            return arguments, keywords
        into = [
            *(arguments[:1] if changes_in_place(function, keywords) else ()),
            *_flat(keywords.get("out")),
        ]
        storages = {storage_key(each) for each in self._values.values()} if into else set()
        if any(
            isinstance(each, Tensor) and (id(each) in self._found or storage_key(each) in storages) for each in into
        ):
            raise _refused(function)
        if not any(id(each) in self._found for each in _flat((arguments, keywords))):
            return arguments, keywords
        if function in _GRADIENTS:
            raise _refused(function)
        return self._replaced(arguments), self._replaced(keywords)

    def _replaced(self, item: Any) -> Any:
        if id(item) in self._found:
            return self.value(item)
        if isinstance(item, (list, tuple)):
            each = [self._replaced(part) for part in item]
            return type(item)(*each) if hasattr(item, "_fields") else type(item)(each)
        if isinstance(item, dict):
            return {key: self._replaced(part) for key, part in item.items()}
        return item

    def value(self, weight: Any) -> Any:
        """A weight plus its deferred change; any other value unchanged."""
        found = self._found.get(id(weight))
        if found is None:
            return weight
        if id(weight) not in self._values:
            self._values[id(weight)] = found.value(weight)
        return self._values[id(weight)]


def _refused(function: Any) -> NotImplementedError:
    return NotImplementedError(
        f"{getattr(function, '__name__', function)} is called with a weight whose steps are deferred while clients"
        " step together"
    )


def _reads_metadata_only(function: Any) -> bool:
    """Whether a torch function reads only a tensor's metadata, such as shape or dtype."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        name = getattr(getattr(function, "__self__", None), "__name__", "")
    return name in _OF_ITS_FORM


def _flat(item: Any) -> list[Any]:
    if isinstance(item, (list, tuple)):
        return [each for part in item for each in _flat(part)]
    if isinstance(item, dict):
        return [each for part in item.values() for each in _flat(part)]
    return [item]


class DeferredSteps(TorchFunctionMode):
    """Runs one client's training step with deferred changes of the weights.

    Args:
        found: The changes by ``id`` of the weight.
    """

    def __init__(self, found: Mapping[int, Deferred]) -> None:
        super().__init__()
        self._weights = DeferredWeights(found)

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        keywords = keywords or {}
        if function is F.linear:
            return self._linear(*arguments, **keywords)
        arguments, keywords = self._weights.changed(function, arguments, keywords)
        return function(*arguments, **keywords)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found = self._weights.apart(input, weight)
        if found is None:
            return F.linear(input, self._weights.value(weight), self._weights.value(bias))
        return F.linear(input, weight.detach(), bias) + F.linear(input @ found.projection, found.change)
