"""Low-rank layers whose weight is one matrix: linear layers and embeddings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from typing_extensions import override

from lightning_lowrank.layers.factorization import Factorization
from lightning_lowrank.layers.layer import LowRankLayer


class LowRankProjection(LowRankLayer):
    """Base of layers that multiply the last dimension by a matrix."""

    def _can_contract(self) -> bool:
        return self.factorization.multiply_adds(self.weight_shape, self.rank) is not None

    def _multiply_adds(self, input: Tensor, *geometry: Any) -> tuple[int, int, int]:
        positions = math.prod(input.shape[:-1])
        each = self.factorization.multiply_adds(self.weight_shape, self.rank) or 0
        stages = self.factorization.stage_shapes(self.weight_shape, self.rank)
        first = math.prod(stages[-1 if self.first_is_input else 0].kernel) if stages else 0
        return positions * math.prod(self.weight_shape), positions * first, positions * (each - first)

    def _apply_dense(self, input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
        return F.linear(input, weight.mT if self.first_is_input else weight, bias)

    def _apply_factors(
        self, input: Tensor, factors: Mapping[str, Tensor], bias: Tensor | None, *geometry: Any
    ) -> Tensor:
        return self.factorization.multiply(input, factors, self.weight_shape, self.first_is_input, bias)


class LowRankLinear(LowRankProjection, nn.Linear):  # type: ignore[misc, override]
    """An ``nn.Linear`` whose weight is composed from factors; see :class:`LowRankLayer`.

    Example:
        >>> from lightning_lowrank.layers import LowRankLinear, MatrixProduct
        >>> LowRankLinear.from_dense(nn.Linear(6, 4), MatrixProduct(), rank=2, role="weight").weight.shape
        torch.Size([4, 6])
    """

    dense_classes = (nn.Linear, NonDynamicallyQuantizableLinear)


class LowRankEmbedding(LowRankLayer, nn.Embedding):  # type: ignore[override]
    """An ``nn.Embedding`` whose table is composed from factors; see :class:`LowRankLayer`.

    The contracted way looks up rows of ``U`` and multiplies only these. ``U`` belongs to the rows. Its row for
    ``padding_idx`` is zero and stays so: an update leaves the padding as it is, and a weight has zeros there. Only a
    layer of the same factors without a padding, such as a tied output, trains it.

    Example:
        >>> from lightning_lowrank.layers import LowRankEmbedding, MatrixProduct
        >>> table = LowRankEmbedding.from_dense(nn.Embedding(1000, 16), MatrixProduct(), rank=4)
        >>> table(torch.tensor([[1, 2, 999]])).shape
        torch.Size([1, 3, 16])
    """

    dense_classes = (nn.Embedding,)
    first_is_input = True

    @classmethod
    def why_not(cls, module: nn.Module, factorization: Factorization) -> str:
        """The base class's reason, or an option of the embedding that factors cannot express."""
        reason = super().why_not(module, factorization)
        if reason:
            return reason
        assert isinstance(module, nn.Embedding)
        if module.max_norm is not None:
            return "max_norm changes its weight in the forward pass"
        if module.sparse or module.scale_grad_by_freq:
            return "its gradient is of a special kind (sparse or scale_grad_by_freq)"
        if module.padding_idx is not None and factorization.stage_shapes(tuple(module.weight.shape), 1) is None:
            return f"{factorization!r} has no factor with a row for padding_idx={module.padding_idx}"
        return ""

    @override
    def _decompose(self, weight: Tensor) -> dict[str, Tensor]:
        return self._all_without_padding(super()._decompose(weight))

    @override
    def draw_factors(self, seed: int) -> dict[str, Tensor]:
        return self._all_without_padding(super().draw_factors(seed))

    def _all_without_padding(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.without_padding(name.split(".")[1], value) for name, value in values.items()}

    @override
    def without_padding(self, factor: str, value: Tensor) -> Tensor:
        """Zero the padding's row of ``U`` (or ``U1`` and ``U2``), which has no gradient."""
        if self.padding_idx is None or not factor.startswith("U"):
            return value
        return value.index_fill(0, torch.tensor(self.padding_idx, device=value.device), 0)

    def _multiply_adds(self, input: Tensor, *geometry: Any) -> tuple[int, int, int]:
        stages = self.factorization.stage_shapes(self.weight_shape, self.rank) or ()
        return 0, 0, input.numel() * sum(math.prod(stage.kernel) for stage in stages[:-1])

    def _apply_dense(self, input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
        # Autocast composes in half precision, but a dense embedding returns its table's dtype.
        return F.embedding(input, weight, self.padding_idx).to(self.weight_dtype)

    def _apply_factors(
        self, input: Tensor, factors: Mapping[str, Tensor], bias: Tensor | None, *geometry: Any
    ) -> Tensor:
        *others, rows = self.factorization.stages(factors, self.weight_shape)
        output = F.embedding(input, rows)
        for kernel in reversed(others):
            output = output @ kernel
        if self.padding_idx is not None:
            output = torch.where((input == self.padding_idx).unsqueeze(-1), output.detach(), output)
        return output.to(self.weight_dtype)
