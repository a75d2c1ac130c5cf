"""Clustered aggregation: averages within clusters of clients with similar updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_lowrank.arguments import check_integer
from lightning_lowrank.lora.inputs import Broadcast, LayerInputs
from lightning_lowrank.lora.operator import Operator
from lightning_lowrank.lora.pairs import inner_products

__all__ = ["FedInc"]


class FedInc(Operator):
    """Clusters clients by their factors, and averages the factors inside each cluster.

    The ABO paper describes FedInc (Qin and Li, ICANN 2024) only as clustering-based; the rest is our reading. The
    distance of two clients is that of their effective updates in the Frobenius norm, over all layers in
    :meth:`aggregate_model`, and is computed from the factors. The clusters are those of agglomerative clustering with
    average linkage, with equal weights. Inside a cluster it is Product-Sum, for clients of different rank as in
    :class:`RBLA`. The server's pair is the same mean over all clients.

    Args:
        clusters: The number of clusters, at least 1; fewer clients are a cluster each. Default: 2.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is below 1.

    Example:
        >>> from lightning_lowrank.lora import LowRankPair
        >>> pairs = [LowRankPair(torch.full((3, 1), b), torch.ones(1, 2)) for b in (1.0, 9.0, 2.0)]
        >>> [client.B[0].item() for client in FedInc().aggregate(pairs).clients]
        [1.5, 9.0, 1.5]
    """

    broadcasts: ClassVar[Literal["common", "personal"]] = "personal"

    def __init__(self, clusters: int = 2) -> None:
        check_integer("clusters", clusters)
        self.clusters = clusters

    @override
    def _aggregate_layers(self, by_layer: Mapping[str, LayerInputs]) -> dict[str, Broadcast]:
        if not by_layer:
            return {}
        squared = torch.stack([_squared_distances(inputs) for inputs in by_layer.values()]).sum(dim=0)
        members = agglomerate(squared.sqrt(), self.clusters)
        return {name: self._in_clusters(inputs, members) for name, inputs in by_layer.items()}

    @override
    def _aggregate(self, inputs: LayerInputs) -> Broadcast:
        return self._aggregate_layers({"": inputs})[""]

    def _in_clusters(self, inputs: LayerInputs, members: Sequence[Sequence[int]]) -> Broadcast:
        whole = inputs.averaged(owned=True)
        clients = list(whole.clients)
        for cluster in members:
            weights = inputs.weights[list(cluster)]
            inside = LayerInputs(
                [inputs.pairs[client] for client in cluster],
                # A cluster whose clients all have weight zero is averaged with equal weights.
                weights if weights.sum() > 0 else None,
                [inputs.ranks[client] for client in cluster],
                [inputs.scalings[client] for client in cluster],
                inputs.round,
                inputs.seed,
                inputs.previous,
            )
            for client, pair in zip(cluster, inside.averaged(owned=True).clients, strict=True):
                clients[client] = pair
        return Broadcast(tuple(clients), whole.server)


def agglomerate(distances: Tensor, clusters: int) -> list[list[int]]:
    """Agglomerative clustering by average linkage, down to ``clusters`` clusters.

    Members ascend, and clusters by their first one.
    """
    # Imported here because scipy takes a fifth of a second to load and few runs cluster.
    from scipy.cluster.hierarchy import cut_tree, linkage
    from scipy.spatial.distance import squareform

    if clusters >= len(distances):
        return [[client] for client in range(len(distances))]
    tree = linkage(squareform(distances.double().cpu().numpy(), checks=False), "average")
    labels = cut_tree(tree, n_clusters=clusters)[:, 0].tolist()
    return [[client for client, own in enumerate(labels) if own == label] for label in dict.fromkeys(labels)]


def _squared_distances(inputs: LayerInputs) -> Tensor:
    products = inner_products(inputs.pairs)
    norms = products.diagonal()
    return (norms[:, None] + norms - 2 * products).clamp(min=0)
