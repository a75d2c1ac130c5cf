"""Snapshots of a module and its optimizers."""

from types import SimpleNamespace

import torch

from lightning_lowrank.federated.execution.snapshot import Snapshot
from lightning_lowrank.layers import MatrixProduct, convert, low_rank_layers
from tests.helpers import Module


def test_an_equal_number_of_another_class_is_put_back():
    module = Module()
    module.flags, module.table, module.inner = [1, 0.0], {"one": 1}, SimpleNamespace(rate=1)
    snapshot = Snapshot(module)
    module.flags[:] = [True, -0.0]
    module.table["one"] = 1.0
    module.inner.rate = 1.0
    snapshot.restore()
    assert repr((module.flags, module.table, module.inner.rate)) == repr(([1, 0.0], {"one": 1}, 1))


def test_what_low_rank_layers_count_is_put_back():
    module = Module()
    convert(module, MatrixProduct(), rank=1)
    (_, layer), *_ = low_rank_layers(module)
    before = layer._watched_reads.copy()
    snapshot = Snapshot(module)
    _ = layer.weight
    assert layer._watched_reads != before
    snapshot.restore()
    assert layer._watched_reads == before


def test_a_shape_that_is_changed_in_place_is_put_back():
    module = Module()
    module.register_buffer("counts", torch.arange(4))
    snapshot = Snapshot(module)
    module.counts.resize_(2)
    snapshot.restore()
    assert module.counts.tolist() == [0, 1, 2, 3]
