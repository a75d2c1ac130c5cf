"""Lightning callbacks that change what is trained."""

from lightning_lowrank.callbacks.lowrank import LowRank

__all__ = ["LowRank"]
