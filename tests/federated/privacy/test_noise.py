"""Noise is drawn and added in float64, on every device."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lightning_lowrank.federated.privacy import noise


@pytest.mark.parametrize("device", ["cpu", "mps", "xpu"])
def test_noise_is_in_float64_on_the_cpu_where_a_device_has_none(monkeypatch, device):
    # As some of Intel's.
    monkeypatch.setattr("lightning_lowrank.aggregation.aggregator.has_float64", lambda kind: kind == "cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = noise.gaussian({"w": torch.empty(3, device=device, dtype=torch.bfloat16)}, 2.0, 0, "noise")["w"]
        assert (found.dtype, found.device.type, found.shape) == (torch.float64, "cpu", (3,))
