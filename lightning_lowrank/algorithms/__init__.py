"""Published federated methods, one file each."""

from lightning_lowrank.algorithms.fedavg import FedAvg
from lightning_lowrank.algorithms.fedmud import FedMUD

__all__ = ["FedAvg", "FedMUD"]
