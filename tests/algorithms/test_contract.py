"""What every federated method must keep, whatever it does inside a round.

A method takes part by its entry in ``tests/algorithms/methods.py``.
"""

import itertools
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import FederatedLoop, FromIndices, algorithms
from lightning_lowrank.federated import Algorithm
from lightning_lowrank.federated.algorithm import install
from lightning_lowrank.federated.client import trained_tensors
from lightning_lowrank.federated.payload import dense_payload
from lightning_lowrank.inspection import inspect_run
from tests.algorithms.methods import FORMS, LOW_RANK, METHODS
from tests.helpers import Data, Module, assert_same, blobs, fit, trainer, weights

# Every day, all that the contract asks of some methods in the first form that they work with, and of the others that
# they learn, are plain training for one client, and count the bytes of the wire; CI runs the rest as well.
OFTEN = {"FedAvg", "FedMUD", "FedHM", "FedSLoP", "FedLoRA-SumProduct"}


def cases(often: set[str]) -> list:
    """Return all methods in all forms that they work with, slow but for the first form of some methods."""
    return [
        pytest.param(
            name,
            form,
            id=f"{name}-{form}",
            marks=() if name in often and form == METHODS[name].forms[0] else pytest.mark.slow,
        )
        for name, form in itertools.product(METHODS, LOW_RANK)
        if form in METHODS[name].forms
    ]


CASES = cases(OFTEN)
CASES_OF_ALL = cases(OFTEN | {name for name in METHODS if not name.startswith("FedLoRA")})
UNEVEN = [list(range(5)), list(range(5, 47)), list(range(47, 69)), list(range(69, 102)), [102]]


def run(
    tmp_path, name, form, partition=None, norm=None, data=None, ckpt_path=None, callbacks=(), make=None, **arguments
):
    method = METHODS[name]
    trainer_arguments = arguments.pop("trainer", {})
    low_rank = [] if LOW_RANK[form] is None else [LOW_RANK[form]()]
    partition = FromIndices(UNEVEN) if partition is None else partition
    loop = FederatedLoop(
        (make or method.make)(), partition=partition, summary=False, **{**method.settings, **arguments}
    )
    module = Module(method.network(norm=norm), optimizer=method.optimizer)
    fitted = trainer(tmp_path, *low_rank, loop, *callbacks, **trainer_arguments)
    fit(fitted, module, Data() if data is None else data, ckpt_path=ckpt_path)
    return module, loop, fitted


@pytest.mark.parametrize(("name", "form"), CASES_OF_ALL)
def test_learns(tmp_path, name, form):
    settings = {"local_epochs": 4, **METHODS[name].learns}
    epochs = settings.pop("max_epochs", 12)
    module, loop, fitted = run(tmp_path, name, form, **settings, trainer={"max_epochs": epochs})
    if METHODS[name].trains_global:
        assert fitted.callback_metrics["val_acc"] > 0.7
        return
    install(loop.algorithm.personal_state(loop.server, loop.clients[1]), trained_tensors(module))
    inputs, targets = (tensor[UNEVEN[1]] for tensor in blobs().tensors)
    assert (module.net(inputs).argmax(1) == targets).float().mean() > 0.7


@pytest.mark.parametrize(("name", "form"), CASES_OF_ALL)
def test_one_client_is_plain_training(tmp_path, name, form):
    method = METHODS[name]
    everything = [list(range(103))]
    module, _, _ = run(
        tmp_path, name, form, FromIndices(everything), data=Data(shuffle=False), trainer={"max_epochs": 1}
    )
    plain = Module(method.network(), optimizer=method.optimizer)
    low_rank = [] if LOW_RANK[form] is None else [LOW_RANK[form]()]
    fit(trainer(tmp_path, *low_rank, max_epochs=1), plain, Data(shuffle=False))
    inputs = blobs().tensors[0]
    close = partial(torch.testing.assert_close, module.net(inputs), plain.net(inputs), rtol=1e-4)
    if method.plain is not None:
        close(atol=method.plain)
    else:
        assert method.not_so
        with pytest.raises(AssertionError, match="not close"):
            close(atol=1e-5)


@pytest.mark.parametrize(("name", "form"), CASES)
def test_identical_clients_are_one_client(tmp_path, name, form):
    tolerance = METHODS[name].identical
    inputs, targets = blobs(40).tensors
    twice = Data(torch.utils.data.TensorDataset(inputs.repeat(2, 1), targets.repeat(2)), shuffle=False)
    both, _, _ = run(tmp_path, name, form, FromIndices([list(range(40)), list(range(40, 80))]), data=twice)
    one, _, _ = run(tmp_path, name, form, FromIndices([list(range(40))]), data=twice)
    if tolerance is None:
        assert METHODS[name].not_so
        return
    for key, value in weights(both).items():
        torch.testing.assert_close(value, weights(one)[key], rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize(("name", "form"), CASES)
def test_order_of_clients_changes_nothing(tmp_path, name, form):
    first, loop, _ = run(tmp_path, name, form, participants=[[0, 1, 3]] * 3)
    second, twin, _ = run(tmp_path, name, form, participants=[[3, 0, 1]] * 3)
    assert_same(weights(first), weights(second))
    assert loop.ledger.state_dict() == twin.ledger.state_dict()


@pytest.mark.parametrize(("name", "form"), CASES)
def test_same_seed_same_result(tmp_path, name, form):
    first, _, _ = run(tmp_path, name, form, clients_per_round=3, seed=4)
    torch.manual_seed(99)
    second, _, _ = run(tmp_path, name, form, clients_per_round=3, seed=4)
    other, _, _ = run(tmp_path, name, form, clients_per_round=3, seed=5)
    assert_same(weights(first), weights(second))
    if METHODS[name].trains_global:
        assert any(not torch.equal(value, weights(other)[key]) for key, value in weights(first).items())


@pytest.mark.parametrize(("name", "form"), CASES)
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_resumes_exactly_inside_a_round(tmp_path, name, form, execution):
    if execution == "vectorized" and not METHODS[name].vectorizes:
        pytest.skip("its clients do not step together")
    settings = {"norm": METHODS[name].norm, "execution": execution}
    kept = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=5)
    whole, loop, _ = run(tmp_path, name, form, callbacks=[kept], **settings)
    files = list(tmp_path.glob("*.ckpt"))
    assert files
    for file in files:
        again, twin, _ = run(tmp_path, name, form, ckpt_path=file, **settings)
        assert_same(weights(whole), weights(again))
        assert loop.ledger.state_dict() == twin.ledger.state_dict()


@pytest.mark.parametrize(("name", "form"), CASES)
def test_clients_that_step_together_end_where_single_ones_do(tmp_path, name, form):
    inputs, targets = blobs().tensors
    double = partial(Data, torch.utils.data.TensorDataset(inputs.double(), targets))
    settings = {"clients_per_round": 4, "local_epochs": 2, "trainer": {"precision": "64-true", "limit_val_batches": 0}}
    if not METHODS[name].vectorizes:
        with pytest.raises(MisconfigurationException, match="vectorized"):
            run(tmp_path, name, form, data=double(), execution="vectorized", **settings)
        return
    one, loop, _ = run(tmp_path, name, form, data=double(), **settings)
    together, twin, _ = run(tmp_path, name, form, data=double(), execution="vectorized", **settings)
    for key, value in weights(one).items():
        torch.testing.assert_close(value, weights(together)[key], rtol=1e-9, atol=1e-9)
    assert loop.ledger.state_dict() == twin.ledger.state_dict()


@pytest.mark.parametrize(("name", "form"), CASES_OF_ALL)
def test_ledger_counts_the_bytes_that_the_other_side_decodes(tmp_path, name, form):
    method = METHODS[name]
    crossed = {"down": 0, "up": 0}

    def cross(direction, payload):
        encoded = payload.codec.encode(payload.tensors)
        assert_same(payload.codec.decode(encoded), payload.delivered().tensors)
        crossed[direction] += len(encoded) if payload.tensors else 0

    class Watching(type(method.make())):
        def broadcast(self, server, client):
            self.sent = super().broadcast(server, client)
            return self.sent

        def begin(self, server, client, payload, model):
            cross("down", self.sent)
            super().begin(server, client, payload, model)

        def end(self, server, client, model):
            sent = super().end(server, client, model)
            cross("up", sent)
            return sent

    def make():
        watched = method.make()
        watched.__class__ = Watching
        return watched

    _, loop, _ = run(tmp_path, name, form, norm=nn.BatchNorm1d, data=Data(drop_last=True), make=make)
    assert (loop.ledger.total_down, loop.ledger.total_up) == (crossed["down"], crossed["up"])


@pytest.mark.parametrize(("name", "form"), CASES)
def test_bf16_and_batch_norm(tmp_path, name, form):
    module, _, fitted = run(
        tmp_path, name, form, norm=nn.BatchNorm1d, data=Data(drop_last=True), trainer={"precision": "bf16-mixed"}
    )
    assert fitted.callback_metrics["val_loss"].isfinite()
    norm = next(layer for layer in module.modules() if isinstance(layer, nn.BatchNorm1d))
    method = METHODS[name]
    averages = method.trains_global if method.averages_buffers is None else method.averages_buffers
    assert bool(norm.num_batches_tracked > 0) is averages


@pytest.mark.parametrize(("name", "form"), CASES)
def test_clients_that_drop_out(tmp_path, name, form):
    _module, _loop, fitted = run(tmp_path, name, form, client_dropout=0.5, trainer={"max_epochs": 6})
    assert fitted.callback_metrics["federated/failed"] < 5
    assert fitted.callback_metrics["val_loss"].isfinite()


@pytest.mark.parametrize(("name", "form"), CASES)
def test_bytes_against_dense_federated_averaging(tmp_path, name, form):
    module, loop, _ = run(tmp_path, name, form)
    assert loop.ledger.dense_bytes == dense_payload(Module(METHODS[name].network())).nbytes
    ratio = loop.ledger.metrics()["comm/ratio"]
    if METHODS[name].traffic:
        assert ratio == 1 if form == "dense" else ratio < 1
    frozen = {key for key, value in module.named_parameters() if not value.requires_grad}
    assert not frozen & trained_tensors(module).keys()


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name, form in itertools.product(METHODS, FORMS) if form not in METHODS[name].forms],
)
def test_refuses_the_forms_that_do_not_suit_it(tmp_path, name, form):
    with pytest.raises(MisconfigurationException, match=METHODS[name].refusal):
        run(tmp_path, name, form)


@pytest.mark.parametrize(("name", "form"), CASES)
def test_bytes_are_known_before_the_run(tmp_path, name, form):
    method = METHODS[name]
    settings = {"partition": FromIndices(UNEVEN), "clients": 5, "seed": 0, "summary": False, **method.settings}
    low_rank = None if LOW_RANK[form] is None else LOW_RANK[form]()
    module = Module(method.network(), optimizer=method.optimizer)
    told = inspect_run(module, low_rank, FederatedLoop(method.make(), **settings))
    assert not told["problems"]
    _, loop, _ = run(tmp_path, name, form, participants=[[0]], trainer={"max_epochs": 1})
    assert told["traffic"]["down"]["bytes"] == loop.ledger.total_down
    assert told["traffic"]["up"]["bytes"] == loop.ledger.total_up


def test_every_method_takes_part():
    exported = {getattr(algorithms, name) for name in algorithms.__all__}
    taking_part = {type(method.make()) for method in METHODS.values()}
    assert exported == taking_part
    assert all(issubclass(method, Algorithm) for method in exported)
