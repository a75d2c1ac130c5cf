"""Payload codecs: how named tensors become bytes on the wire, and back."""

from lightning_lowrank.compression.dense import DenseCodec

__all__ = ["DenseCodec"]
