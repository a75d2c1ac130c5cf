"""A pytest plugin: trainers that would use the CPU use the strict device.

    python -m pytest -p tests.strict_device.plugin tests/federated/test_loop.py

A trainer that names a strategy, plugins or several devices stays as it is. ``torch.testing.assert_close`` compares
tensors of two devices. Tests of `CPU_ONLY` are skipped.
"""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from tests.strict_device import device

_COMPARES = "the test compares or computes on the CPU with tensors of the device"
_COMPILED = "inductor compiles for no such device"
_CELLS = "torch has the cells that it calls there for CUDA alone"
_FORMATS = "convolutions of the device don't hand on the format of their images"
_MOVED = "its part 'sites' goes on when a fit has moved the module"
CPU_ONLY = {
    "test_differential_privacy.py::test_recurrent_layers_train_in_a_federation[LSTM": _CELLS,
    "test_differential_privacy.py::test_recurrent_layers_train_in_a_federation[GRU": _CELLS,
    "test_ditto.py::test_statistics_of_the_two_models": _COMPARES,
    "test_fedhm.py::test_variants_are_the_best_approximations_of_each_level": _COMPARES,
    "test_fedlora.py::test_a_client_needs_nothing_but_its_messages": _COMPARES,
    "test_fedlora.py::test_fed_ex_is_exact_though_its_base_moves": _COMPARES,
    "test_fedlora.py::test_fed_sa_keeps_b_on_its_clients": _COMPARES,
    "test_fedmud.py::test_a_site_of_its_own_follows_the_server": _COMPARES,
    "test_fedmud.py::test_rounds_follow_the_paper": _COMPARES,
    "test_sixteen_bits.py::test_a_base_of_sixteen_bits_has_the_sum_of_all_changes": _COMPARES,
    "test_tdpfed.py::test_averaged_composed_tensors": _COMPARES,
    "test_tdpfed.py::test_weights_changed_from_outside_get_new_factors": _COMPARES,
    "test_split_mix.py::test_variants_are_smaller_ensembles": _COMPARES,
    "test_loop.py::test_norms_equal_plain_fedavg": "the loop that it is compared with runs on the CPU",
    "test_contract.py::test_keeps_the_contract[EF21P": _MOVED,
    "test_contract.py::test_keeps_the_contract[FedLoRA-CoLR": _MOVED,
    "test_auto.py::test_batches_of_unequal_form_are_those_of_sequential_clients[Boxes]": "its batches are not moved",
    "test_auto.py::test_channels_last_give": _FORMATS,
    "test_auto.py::test_a_step_that_takes_views": _FORMATS,
    "test_auto.py::test_a_later_step_that_takes_views": _FORMATS,
    "test_compile.py::test_steps_are_compiled_for_four_sizes_at_most": _COMPILED,
    "test_memory.py::test_activations_count_as_well_as_weights": "memory is measured there, and estimated on the CPU",
    "test_memory.py::test_weights_count_where_they_outweigh": "memory is measured there, and estimated on the CPU",
    "test_memory.py::test_of_a_large_model_shapes_tell": "memory is measured there, and estimated on the CPU",
    "test_projected.py::test_lightning_cli_builds_and_trains": "the device's accelerator has no name in YAML",
    "[TornApart-": "torch lets a mapped view() of such a device be written",
}
"""Parts of the names of tests that cannot run on another device, and why."""


def pytest_configure(config: pytest.Config) -> None:
    if device.unsupported_reason():
        raise pytest.UsageError(device.unsupported_reason())
    device.install()
    original = pl.Trainer.__init__

    @functools.wraps(original)
    def on_device(self: pl.Trainer, *arguments: Any, **keywords: Any) -> None:
        alone = keywords.get("strategy", "auto") == "auto" and keywords.get("devices", "auto") in ("auto", 1)
        usual = keywords.get("accelerator", "auto") in ("cpu", "auto") and keywords.get("plugins") is None
        if not arguments and alone and usual:
            keywords["accelerator"] = device.StrictAccelerator()
            keywords["strategy"] = SingleDeviceStrategy(device=torch.device(device.NAME, 0))
        original(self, *arguments, **keywords)

    pl.Trainer.__init__ = on_device  # type: ignore[method-assign]
    torch.testing.assert_close = functools.partial(torch.testing.assert_close, check_device=False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, reason in CPU_ONLY.items():
        if name in item.nodeid:
            pytest.skip(f"on the CPU only: {reason}")
