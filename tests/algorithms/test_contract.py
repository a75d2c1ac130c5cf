"""What every federated method must keep, whatever it does inside a round.

A method takes part by being exported from ``lightning_lowrank.algorithms``.
"""

import itertools
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_lowrank import BlockKronecker, FederatedLoop, FromIndices, LowRank, MatrixProduct, algorithms
from lightning_lowrank.federated import Algorithm
from lightning_lowrank.federated.client import trained_tensors
from lightning_lowrank.federated.payload import dense_payload
from tests.helpers import Data, Module, assert_same, blobs, fit, network, trainer, weights

METHODS = [getattr(algorithms, name) for name in algorithms.__all__]
NEEDS_LOW_RANK = {algorithms.FedMUD}
LOW_RANK = {
    "dense": None,
    "weight": partial(LowRank, MatrixProduct(), rank=2, role="weight", summary=False),
    "update": partial(LowRank, MatrixProduct(), rank=2, summary=False),
    "decoupled blocks": partial(LowRank, BlockKronecker(), ratio=0.4, decouple=True, skip=["last"], summary=False),
    "half-frozen": partial(LowRank, MatrixProduct(), rank=2, half_frozen=True, summary=False),
}
CASES = [
    pytest.param(method, form, id=f"{method.__name__}-{form}")
    for method, form in itertools.product(METHODS, LOW_RANK)
    if method not in NEEDS_LOW_RANK or form not in ("dense", "weight")
]
UNEVEN = [list(range(5)), list(range(5, 47)), list(range(47, 69)), list(range(69, 102)), [102]]


def run(tmp_path, method, form, partition=None, norm=None, data=None, ckpt_path=None, callbacks=(), **arguments):
    trainer_arguments = arguments.pop("trainer", {})
    low_rank = [] if LOW_RANK[form] is None else [LOW_RANK[form]()]
    partition = FromIndices(UNEVEN) if partition is None else partition
    loop = FederatedLoop(method(), partition=partition, summary=False, **arguments)
    module = Module(network(norm=norm))
    fitted = trainer(tmp_path, *low_rank, loop, *callbacks, **trainer_arguments)
    fit(fitted, module, Data() if data is None else data, ckpt_path=ckpt_path)
    return module, loop, fitted


@pytest.mark.parametrize(("method", "form"), CASES)
def test_learns(tmp_path, method, form):
    _, _, fitted = run(tmp_path, method, form, local_epochs=4, trainer={"max_epochs": 12})
    assert fitted.callback_metrics["val_acc"] > 0.7


@pytest.mark.parametrize(("method", "form"), CASES)
def test_one_client_is_plain_training(tmp_path, method, form):
    everything = [list(range(103))]
    module, _, _ = run(
        tmp_path, method, form, FromIndices(everything), data=Data(shuffle=False), trainer={"max_epochs": 1}
    )
    plain = Module()
    low_rank = [] if LOW_RANK[form] is None else [LOW_RANK[form]()]
    fit(trainer(tmp_path, *low_rank, max_epochs=1), plain, Data(shuffle=False))
    inputs = blobs().tensors[0]
    torch.testing.assert_close(module.net(inputs), plain.net(inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("method", "form"), CASES)
def test_identical_clients_are_one_client(tmp_path, method, form):
    inputs, targets = blobs(40).tensors
    twice = Data(torch.utils.data.TensorDataset(inputs.repeat(2, 1), targets.repeat(2)), shuffle=False)
    both, _, _ = run(tmp_path, method, form, FromIndices([list(range(40)), list(range(40, 80))]), data=twice)
    one, _, _ = run(tmp_path, method, form, FromIndices([list(range(40))]), data=twice)
    for name, value in weights(both).items():
        torch.testing.assert_close(value, weights(one)[name])


@pytest.mark.parametrize(("method", "form"), CASES)
def test_order_of_clients_changes_nothing(tmp_path, method, form):
    first, loop, _ = run(tmp_path, method, form, participants=[[0, 1, 3]] * 3)
    second, twin, _ = run(tmp_path, method, form, participants=[[3, 0, 1]] * 3)
    assert_same(weights(first), weights(second))
    assert loop.ledger.state_dict() == twin.ledger.state_dict()


@pytest.mark.parametrize(("method", "form"), CASES)
def test_same_seed_same_result(tmp_path, method, form):
    first, _, _ = run(tmp_path, method, form, clients_per_round=3, seed=4)
    torch.manual_seed(99)
    second, _, _ = run(tmp_path, method, form, clients_per_round=3, seed=4)
    other, _, _ = run(tmp_path, method, form, clients_per_round=3, seed=5)
    assert_same(weights(first), weights(second))
    assert any(not torch.equal(value, weights(other)[name]) for name, value in weights(first).items())


@pytest.mark.parametrize(("method", "form"), CASES)
def test_resumes_exactly_inside_a_round(tmp_path, method, form):
    kept = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=5)
    whole, loop, _ = run(tmp_path, method, form, norm=partial(nn.GroupNorm, 4), callbacks=[kept])
    for file in tmp_path.glob("*.ckpt"):
        again, twin, _ = run(tmp_path, method, form, norm=partial(nn.GroupNorm, 4), ckpt_path=file)
        assert_same(weights(whole), weights(again))
        assert loop.ledger.state_dict() == twin.ledger.state_dict()


@pytest.mark.parametrize(("method", "form"), CASES)
def test_ledger_counts_the_bytes_that_the_other_side_decodes(tmp_path, method, form):
    crossed = {"down": 0, "up": 0}

    def cross(direction, payload):
        encoded = payload.codec.encode(payload.tensors)
        assert_same(payload.codec.decode(encoded), {name: value.detach() for name, value in payload.tensors.items()})
        crossed[direction] += len(encoded)

    class Watching(method):
        def begin(self, server, client, payload, model):
            cross("down", payload)
            super().begin(server, client, payload, model)

        def receive(self, server, client, payload, weight):
            cross("up", payload)
            super().receive(server, client, payload, weight)

    _, loop, _ = run(tmp_path, Watching, form, norm=nn.BatchNorm1d, data=Data(drop_last=True))
    assert (loop.ledger.total_down, loop.ledger.total_up) == (crossed["down"], crossed["up"])


@pytest.mark.parametrize(("method", "form"), CASES)
def test_bf16_and_batch_norm(tmp_path, method, form):
    module, _, fitted = run(
        tmp_path, method, form, norm=nn.BatchNorm1d, data=Data(drop_last=True), trainer={"precision": "bf16-mixed"}
    )
    assert fitted.callback_metrics["val_loss"].isfinite()
    assert module.net[1].num_batches_tracked > 0


@pytest.mark.parametrize(("method", "form"), CASES)
def test_clients_that_drop_out(tmp_path, method, form):
    _module, loop, fitted = run(tmp_path, method, form, client_dropout=0.5, trainer={"max_epochs": 6})
    assert loop.ledger.total_down > loop.ledger.total_up
    assert fitted.callback_metrics["val_loss"].isfinite()


@pytest.mark.parametrize(("method", "form"), CASES)
def test_low_rank_costs_less_than_dense(tmp_path, method, form):
    module, loop, _ = run(tmp_path, method, form)
    assert loop.ledger.dense_bytes == dense_payload(Module()).nbytes
    ratio = loop.ledger.metrics()["comm/ratio"]
    assert ratio == 1 if form == "dense" else ratio < 1
    frozen = {name for name, value in module.named_parameters() if not value.requires_grad}
    assert not frozen & trained_tensors(module).keys()


def test_every_method_is_an_algorithm():
    assert all(issubclass(method, Algorithm) for method in METHODS)
