"""Lightning callbacks: conversion to low-rank layers, privacy, checkpoints, progress bars, pictures and monitors."""

from lightning_lowrank.callbacks.convergence_monitor import ConvergenceMonitor
from lightning_lowrank.callbacks.differential_privacy import DifferentialPrivacy
from lightning_lowrank.callbacks.lowrank import LowRank
from lightning_lowrank.callbacks.round_pictures import RoundPictures
from lightning_lowrank.callbacks.round_progress import RoundProgress
from lightning_lowrank.callbacks.static_batch_norm import StaticBatchNorm
from lightning_lowrank.callbacks.trained_checkpoints import TrainedCheckpoints

__all__ = [
    "ConvergenceMonitor",
    "DifferentialPrivacy",
    "LowRank",
    "RoundPictures",
    "RoundProgress",
    "StaticBatchNorm",
    "TrainedCheckpoints",
]
