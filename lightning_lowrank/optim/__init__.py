"""Optimizers whose moments live in a low-dimensional subspace of each weight matrix."""

from lightning_lowrank.optim.adamw import ProjectedAdamW
from lightning_lowrank.optim.base import ProjectedOptimizer
from lightning_lowrank.optim.groups import projected_parameter_groups
from lightning_lowrank.optim.sgd import ProjectedSGD

__all__ = ["ProjectedAdamW", "ProjectedOptimizer", "ProjectedSGD", "projected_parameter_groups"]
