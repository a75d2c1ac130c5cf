"""Weights by a robust aggregation rule for clients that send factors; it compares the changes of their products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lightning_lowrank.aggregation import DistanceRule
from lightning_lowrank.lora.pairs import LowRankPair, inner_products


def robust_weights(
    rule: DistanceRule,
    pairs: Sequence[Mapping[str, LowRankPair]],
    levels: Sequence[float],
    starts: Mapping[float, Mapping[str, LowRankPair]],
) -> list[float]:
    """Clients' weights by the rule; if their sum is below 1, the rest is the weight of the server's own model.

    A client is one vector of the changes of all layers' products and of the tensors that the rule has been given. The
    inner products come from the factors, and no product is built.

    Args:
        rule: The rule, which has been given the rest of the clients' messages.
        pairs: The clients' pairs by layer, in the same order.
        levels: The clients' levels.
        starts: The pairs with which clients of a level started, by layer.
    """
    places = [list(starts).index(level) for level in levels]
    total = torch.zeros(len(pairs), len(pairs), dtype=torch.float64)
    for layer in pairs[0]:
        inner = inner_products([*(each[layer] for each in pairs), *(start[layer] for start in starts.values())]).cpu()
        end, start = slice(len(pairs)), [len(pairs) + place for place in places]
        crossed = inner[end][:, start]
        total += inner[end, end] - crossed - crossed.T + inner[start][:, start]
    rule.extend(total)
    return rule.client_weights().tolist()
