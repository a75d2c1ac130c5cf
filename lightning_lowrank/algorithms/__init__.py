"""Published federated methods, one file each."""

from lightning_lowrank.algorithms.ditto import Ditto
from lightning_lowrank.algorithms.ef21p import EF21P
from lightning_lowrank.algorithms.fedavg import FedAvg
from lightning_lowrank.algorithms.fedbat import FedBAT
from lightning_lowrank.algorithms.fedbn import FedBN, FedPer
from lightning_lowrank.algorithms.feddyn import FedDyn
from lightning_lowrank.algorithms.fedhm import FedHM
from lightning_lowrank.algorithms.fedmud import FedMUD
from lightning_lowrank.algorithms.fednova import FedNova
from lightning_lowrank.algorithms.fedntd import FedNTD
from lightning_lowrank.algorithms.fedprox import FedProx
from lightning_lowrank.algorithms.fedsb import FedSB
from lightning_lowrank.algorithms.fedslop import FedSLoP
from lightning_lowrank.algorithms.heterofl import HeteroFL
from lightning_lowrank.algorithms.local import LocalTraining
from lightning_lowrank.algorithms.moon import MOON
from lightning_lowrank.algorithms.pfedme import PFedMe
from lightning_lowrank.algorithms.random_coordinates import RandomCoordinates
from lightning_lowrank.algorithms.ravan import Ravan
from lightning_lowrank.algorithms.scaffold import SCAFFOLD
from lightning_lowrank.algorithms.server_optimizers import FedAdam, FedAvgM, FedYogi
from lightning_lowrank.algorithms.split_mix import SplitMix
from lightning_lowrank.algorithms.tdpfed import TDPFed
from lightning_lowrank.algorithms.upload_masks import GradientMask, RandomMask, SlidingWindowMask
from lightning_lowrank.lora.fedlora import FedLoRA

__all__ = [
    "EF21P",
    "MOON",
    "SCAFFOLD",
    "Ditto",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBAT",
    "FedBN",
    "FedDyn",
    "FedHM",
    "FedLoRA",
    "FedMUD",
    "FedNTD",
    "FedNova",
    "FedPer",
    "FedProx",
    "FedSB",
    "FedSLoP",
    "FedYogi",
    "GradientMask",
    "HeteroFL",
    "LocalTraining",
    "PFedMe",
    "RandomCoordinates",
    "RandomMask",
    "Ravan",
    "SlidingWindowMask",
    "SplitMix",
    "TDPFed",
]
