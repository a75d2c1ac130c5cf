r"""The mean around the median (template).

An aggregator is a class in ``lightning_lowrank/aggregation``. It says how the arrivals of a round become one value. The
base classes of robust rules keep the arrivals, count how many may be Byzantine, pool several processes and resume.
`CoordinateRule` treats every number on its own; `DistanceRule` gives weights of arrivals by their inner products;
`Aggregator` itself is for rules that do not keep arrivals, such as means.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_lowrank.aggregation import CoordinateRule


class MeanAroundMedian(CoordinateRule):
    r"""The mean of the values of each number that are nearest to their median (Xie et al., 2018, arXiv:1802.10116).

    Args:
        share: Share of the arrivals that are averaged, above 0 and at most 1.

    Raises:
        ValueError: If ``share`` is out of range.
    """

    def __init__(self, share: float = 0.5) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, but is {share}.")
        self.share = share
        # After the arguments: it removes all arrivals.
        super().__init__()

    def reduce(self, rows: Tensor, byzantine: int) -> Tensor:
        values = rows.double()
        distances = (values - values.quantile(0.5, dim=0)).abs()
        nearest = distances.topk(max(1, int(self.share * len(rows))), dim=0, largest=False).indices
        return torch.take_along_dim(values, nearest, dim=0).mean(dim=0)
