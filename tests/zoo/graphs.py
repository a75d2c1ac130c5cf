"""Graph networks of torch_geometric, on graphs of unlike sizes."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINConv,
    NNConv,
    SAGEConv,
    global_add_pool,
    global_mean_pool,
)

from tests.zoo.bases import BATCH, CLASSES, TOTAL, draws, loader
from tests.zoo.registry import Gallery, Made

gallery = Gallery("Graphs: torch_geometric")


def graphs(same: bool = False, node_labels: bool = False) -> list[Data]:
    chance = draws()
    found = []
    for number in range(TOTAL):
        nodes = 6 if same else 4 + number % 4
        edges = torch.randint(nodes, (2, 12 if same else 2 * nodes), generator=chance)
        count = (nodes,) if node_labels else (1,)
        found.append(
            Data(
                x=torch.randn(nodes, 5, generator=chance),
                edge_index=edges,
                edge_attr=torch.randn(edges.shape[1], 3, generator=chance),
                y=torch.randint(CLASSES, count, generator=chance),
            )
        )
    return found


class LitGraph(pl.LightningModule):
    def __init__(self, first: nn.Module, second: nn.Module, pool: Any = global_mean_pool, width: int = 16) -> None:
        super().__init__()
        self.first, self.second, self.pool = first, second, pool
        self.head = nn.Linear(width, CLASSES)

    def forward(self, data: Any) -> Tensor:
        x = self.first(data.x, data.edge_index).relu()
        x = self.second(x, data.edge_index).relu()
        return self.head(self.pool(x, data.batch) if self.pool else x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch), batch.y)
        self.log("train_loss", loss, batch_size=batch.num_graphs)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01, weight_decay=5e-4)


def graph_loader(**arguments: bool) -> DataLoader:
    return DataLoader(graphs(**arguments), batch_size=BATCH)


@gallery.exhibit("GCN", "graphs of unlike sizes in one batch object")
def gcn() -> Made:
    return LitGraph(GCNConv(5, 16), GCNConv(16, 16)), graph_loader()


@gallery.exhibit("GCN for nodes", "graphs of one size, a label for each node")
def gcn_nodes() -> Made:
    return LitGraph(GCNConv(5, 16), GCNConv(16, 16), pool=None), graph_loader(same=True, node_labels=True)


@gallery.exhibit("GIN", "sums over neighbours, batch normalisation over nodes")
def gin() -> Made:
    def mlp(features: int) -> nn.Module:
        return nn.Sequential(nn.Linear(features, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))

    return LitGraph(GINConv(mlp(5), train_eps=True), GINConv(mlp(16)), global_add_pool), graph_loader()


@gallery.exhibit("GAT", "attention over neighbours")
def gat() -> Made:
    return LitGraph(GATConv(5, 4, heads=4), GATConv(16, 16)), graph_loader()


@gallery.exhibit("GraphSAGE", "mean of neighbours")
def sage() -> Made:
    return LitGraph(SAGEConv(5, 16), SAGEConv(16, 16)), graph_loader()


class LitEdges(LitGraph):
    """Message passing by a network of the edges' features, for regression."""

    def __init__(self) -> None:
        edges = [nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, size * 8)) for size in (5, 8)]
        super().__init__(NNConv(5, 8, edges[0]), NNConv(8, 8, edges[1]), global_add_pool, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.first(batch.x, batch.edge_index, batch.edge_attr).relu()
        x = self.second(x, batch.edge_index, batch.edge_attr).relu()
        loss = F.mse_loss(self.head(self.pool(x, batch.batch))[:, 0], batch.y.to(x.dtype))
        self.log("train_loss", loss, batch_size=batch.num_graphs)
        return loss


@gallery.exhibit("Edge-conditioned network", "weights made from the edges' features")
def edge_conditioned() -> Made:
    return LitEdges(), graph_loader()


class LitDense(pl.LightningModule):
    """Graph convolutions over dense adjacency matrices, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, adjacency, y = batch
        degrees = adjacency.sum(-1).rsqrt()
        adjacency = degrees[..., None] * adjacency * degrees[..., None, :]
        x = F.relu(adjacency @ self.first(x))
        x = F.relu(adjacency @ self.second(x))
        return F.cross_entropy(self.head(x.mean(1)), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


@gallery.exhibit("GCN over dense matrices", "written by hand, tensors alone")
def dense() -> Made:
    chance = draws()
    samples = []
    for _ in range(TOTAL):
        adjacency = (torch.rand(6, 6, generator=chance) < 0.4).to(torch.get_default_dtype())
        samples.append(
            (
                torch.randn(6, 5, generator=chance),
                (adjacency + adjacency.T + torch.eye(6)).clamp(max=1),
                torch.randint(CLASSES, (), generator=chance),
            )
        )
    return LitDense(), loader(samples)
