"""Lightning callbacks that change what is trained, or what is kept of it."""

from lightning_lowrank.callbacks.convergence_monitor import ConvergenceMonitor
from lightning_lowrank.callbacks.differential_privacy import DifferentialPrivacy
from lightning_lowrank.callbacks.lowrank import LowRank
from lightning_lowrank.callbacks.static_batch_norm import StaticBatchNorm
from lightning_lowrank.callbacks.trained_checkpoints import TrainedCheckpoints

__all__ = ["ConvergenceMonitor", "DifferentialPrivacy", "LowRank", "StaticBatchNorm", "TrainedCheckpoints"]
