"""How named tensors become bytes on the wire, and back: codecs, chains of codecs, and channels."""

from lightning_lowrank.compression.base import Codec, FloatingCodec, RandomCodec
from lightning_lowrank.compression.chain import Chain
from lightning_lowrank.compression.channel import Channel, Packet
from lightning_lowrank.compression.dense import Dense
from lightning_lowrank.compression.half import Half
from lightning_lowrank.compression.low_rank import LowRankCodec
from lightning_lowrank.compression.quantize import Quantize
from lightning_lowrank.compression.sign import Sign
from lightning_lowrank.compression.sparse import Mask, RandomK, TopK
from lightning_lowrank.compression.split import Split
from lightning_lowrank.compression.wire import DecodingError, Schema

__all__ = [
    "Chain",
    "Channel",
    "Codec",
    "DecodingError",
    "Dense",
    "FloatingCodec",
    "Half",
    "LowRankCodec",
    "Mask",
    "Packet",
    "Quantize",
    "RandomCodec",
    "RandomK",
    "Schema",
    "Sign",
    "Split",
    "TopK",
]
