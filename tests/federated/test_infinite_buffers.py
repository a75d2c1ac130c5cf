"""Buffers that hold infinite numbers, such as a causal mask."""

import math

import pytest
import torch
from torch import nn

from lightning_lowrank import (
    ClientPrivacy,
    CoordinateMedian,
    FedAvg,
    FedAvgM,
    FederatedLoop,
    FromIndices,
    Half,
    Krum,
    Quantize,
)
from lightning_lowrank.federated.failures import first_non_finite, non_finite_rows
from lightning_lowrank.federated.state import difference
from tests.helpers import Data, Module, assert_same, fit, trainer, weights

PARTS = FromIndices([range(first, 60, 6) for first in range(6)])
PRIVATE = {"clip": 0.1, "noise_multiplier": 0.5, "delta": 1e-3, "sampling": "fixed"}
SETTINGS = {
    "mean": {},
    "together": {"execution": "vectorized"},
    "codecs": {"uplink": [Half()], "downlink": [Quantize(8)]},
    "median": {"aggregator": CoordinateMedian()},
    "Krum": {"aggregator": Krum(1), "execution": "vectorized"},
    "momentum": {"algorithm": FedAvgM(0.5)},
    "privacy": {"privacy": ClientPrivacy(**PRIVATE), "weighting": "uniform"},
    "privacy at clients": {"privacy": ClientPrivacy(**PRIVATE, noise_at="clients"), "weighting": "uniform"},
}


class Masked(Module):
    def __init__(self, lowest=-math.inf):
        super().__init__()
        self.register_buffer("mask", torch.full((6, 6), lowest).triu(1))
        self.register_buffer("largest", torch.tensor(-math.inf))

    def loss(self, batch):
        inputs, targets = batch
        attention = (torch.ones_like(self.mask) + self.mask).softmax(1)
        return nn.functional.cross_entropy(self.net(inputs @ attention), targets)


def run(tmp_path, module, **settings):
    loop = FederatedLoop(**{"algorithm": FedAvg(), "partition": PARTS, "seed": 0, "summary": False, **settings})
    fitted = trainer(tmp_path, loop, max_epochs=1, limit_val_batches=0)
    fit(fitted, module, Data())
    return module, int(fitted.callback_metrics["federated/failed"])


@pytest.mark.parametrize("name", SETTINGS)
def test_they_change_nothing_else(tmp_path, name):
    module, failed = run(tmp_path, Masked(), **SETTINGS[name])
    finite, _ = run(tmp_path, Masked(-1e4), **SETTINGS[name])
    assert torch.equal(module.mask.isinf(), Masked().mask.isinf())
    assert failed == 0
    del module.mask, finite.mask
    assert_same(weights(module), weights(finite))


def test_what_begins_as_an_infinite_number_may_become_a_finite_one(tmp_path):
    class Tracks(Masked):
        def training_step(self, batch, batch_idx):
            self.largest.fill_(max(float(self.largest), float(batch[0].max())))
            return super().training_step(batch, batch_idx)

    module, failed = run(tmp_path, Tracks())
    assert module.largest.isfinite()
    assert failed == 0
    with pytest.raises(Exception, match=r"'largest' is not finite.*buffers='local'"):
        run(tmp_path, Tracks(), **SETTINGS["privacy"])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_other_numbers_that_are_not_finite_are_refused(tmp_path, value):
    class Spoils(Masked):
        def training_step(self, batch, batch_idx):
            if self.trainer.global_step == 0:
                self.mask[0, 1] = value
            return super().training_step(batch, batch_idx)

    module, failed = run(tmp_path, Spoils())
    assert failed == 1
    assert torch.equal(module.mask, Masked().mask)


def test_infinite_numbers_are_allowed_where_they_were():
    mask = torch.tensor([0.0, -math.inf, math.nan])
    for value, allowed in (
        (mask, True),
        (torch.zeros(3), True),
        (mask.double(), True),
        (mask.half(), True),
        (mask.flip(0), False),
        (-mask, False),
        (torch.tensor([0.0, math.nan, math.nan]), False),
    ):
        assert (first_non_finite({"mask": value}, {"mask": mask}) is None) is allowed
        rows = non_finite_rows({"mask": torch.stack([mask.to(value), value])}, {"mask": mask})
        assert rows == ({} if allowed else {1: "mask"})
    # A part of the buffer, as of a narrower client.
    assert first_non_finite({"mask": mask[1:]}, {"mask": mask}) is None
    assert first_non_finite({"mask": mask}) == "mask"
    assert_same({"": difference(mask[:2], mask[:2])}, {"": torch.zeros(2)})
    assert difference(torch.zeros(1), mask[1:2]) == math.inf
