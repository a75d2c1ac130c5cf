"""What the parties hold, and what of the module is a client's own."""

import dataclasses

import pytest
import torch
from torch import nn

from lightning_lowrank import FedLoRA, FedPer, MatrixProduct, ProductSum, convert
from lightning_lowrank.buffers import persistent_buffers, treat_as_buffers
from lightning_lowrank.federated.state import (
    Base,
    ClientContext,
    Server,
    copy_into,
    slice_tree,
    stack_trees,
    trained_tensors,
)
from lightning_lowrank.models import Classifier


def normed():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def test_trained_tensors():
    module = normed()
    module[0].weight.requires_grad_(False)
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert list(trained_tensors(module)) == [
        "0.bias",
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    assert list(persistent_buffers(module)) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5)
        self.head.weight = self.embedding.weight


def test_patterns_choose_a_tensor_by_each_of_its_names():
    module, both = Tied(), {"embedding.weight", "head.bias"}
    assert FedPer(["head"]).own_names(Base(module, seed=0)) == both
    convert(module, MatrixProduct(), rank=1, include=["body"], init="lora", freeze_rest=False)
    keeps = FedLoRA(ProductSum(), keep=["head"])
    keeps.setup(Base(module, seed=0))
    assert set(keeps._kept) == both
    module.requires_grad_(False)
    treat_as_buffers(module, ["head"])
    assert persistent_buffers(module).keys() == both
    decayed, alone = Classifier(Tied(), num_classes=5, no_weight_decay=["head"]).configure_optimizers().param_groups
    assert (len(decayed["params"]), len(alone["params"])) == (2, 2)


def test_copy_into_writes_in_place_and_leaves_the_rest():
    live = {"a": nn.Parameter(torch.zeros(2)), "b": torch.ones(3, dtype=torch.int64)}
    before = dict(live)
    copy_into(live, {"a": torch.tensor([1.0, 2.0])})
    copy_into(live, {})
    assert all(live[name] is before[name] for name in live)
    assert live["a"].tolist() == [1, 2]
    assert live["b"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("policy", "down", "up"), [("average", True, True), ("local", False, False), ("reset", False, True)]
)
def test_what_crosses_of_the_buffers(policy, down, up):
    module = normed()
    base = Base(module, seed=0, buffer_policy=policy)
    base.remember_buffers()
    live = trained_tensors(module)
    everything, parameters = list(live), ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(base.parameters(live)) == parameters
    assert list(base.sent_down(live)) == (everything if down else parameters)
    assert list(base.sent_up(live)) == (everything if up else parameters)


def test_initial_buffers_are_remembered_once():
    module = normed()
    base = Base(module, seed=0)
    base.remember_buffers()
    module[1].running_mean.add_(1)
    module.register_buffer("late", torch.ones(2))
    assert list(base.remember_buffers()) == ["late"]
    assert base.initial_buffers["1.running_mean"].tolist() == [0, 0, 0]
    assert "late" not in base.parameters(trained_tensors(module))


def test_the_server_adopts_what_others_have_changed():
    module = nn.Linear(2, 1)
    server, live = Server(Base(module, seed=3)), trained_tensors(module)
    assert server.seed == 3
    server.sync_with_module(live, shown={})
    held = dict(server.model)
    server.sync_with_module(live, shown=server.model)
    assert all(server.model[name] is held[name] for name in held)
    with torch.no_grad():
        module.bias.add_(1)
    server.sync_with_module(live, shown=server.model)
    assert server.model["weight"] is held["weight"]
    assert torch.equal(server.model["bias"], held["bias"] + 1)
    assert server.model["bias"] is not module.bias


def test_a_context_is_frozen_and_reads_labels_when_asked():
    asked = []
    context = ClientContext(
        3, 10, 0, 0, base=Base(nn.Linear(1, 1), 0), model={}, find_labels=lambda: asked.append(1) or torch.ones(2)
    )
    assert not asked
    assert context.labels.tolist() == [1, 1]
    with pytest.raises(dataclasses.FrozenInstanceError):
        context.state = {}


def test_trees_are_stacked_and_sliced():
    shared = torch.arange(3.0)
    trees = [{"shared": shared, "own": {"a": torch.tensor([float(client)])}} for client in range(4)]
    stacked = stack_trees(trees)
    assert stacked["own"]["a"].tolist() == [[0], [1], [2], [3]]
    assert stacked["shared"].shape == (4, 3)
    assert stacked["shared"].data_ptr() == shared.data_ptr()
    assert slice_tree(stacked, 2)["own"]["a"].tolist() == [2]
    assert slice_tree(stacked, slice(2))["own"]["a"].tolist() == [[0], [1]]
    slice_tree(stacked, 1)["own"]["a"].fill_(9)
    assert stacked["own"]["a"][1] == 9
    with pytest.raises(KeyError, match="different round states"):
        stack_trees([{"a": shared}, {"b": shared}])
