"""Lightning callbacks that change what is trained."""

from lightning_lowrank.callbacks.convergence_monitor import ConvergenceMonitor
from lightning_lowrank.callbacks.differential_privacy import DifferentialPrivacy
from lightning_lowrank.callbacks.lowrank import LowRank
from lightning_lowrank.callbacks.static_batch_norm import StaticBatchNorm

__all__ = ["ConvergenceMonitor", "DifferentialPrivacy", "LowRank", "StaticBatchNorm"]
