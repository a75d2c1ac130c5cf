"""The ledger, and what a message weighs."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_lowrank import FedAvg, FederatedLoop, FedMUD, FromIndices, Half, LowRank, MatrixProduct
from lightning_lowrank.federated import Ledger, Message
from lightning_lowrank.federated.ledger import dense_bytes
from lightning_lowrank.federated.state import trained_tensors
from lightning_lowrank.layers import convert
from tests.helpers import Data, Module, blobs, fit, network, trainer


def test_tied_weights_are_sent_once():
    import safetensors.torch

    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    sent = trained_tensors(module)
    assert list(sent) == ["0.weight", "0.bias", "1.bias"]
    assert dense_bytes(module) == len(safetensors.torch.save(sent))


class Figures(pl.Callback):
    def __init__(self):
        self.rounds = []

    def on_train_epoch_end(self, trainer, pl_module):
        figures = {name: value.item() for name, value in trainer.callback_metrics.items() if "/" in name}
        self.rounds.append([int(figures[name]) for name in _FIGURES])


_FIGURES = ("federated/clients", "federated/failed", "comm/down_bytes", "comm/idle_down_bytes")
TAKE_PART = {
    # Of eight clients two hold nothing. One of weight 0, one that is never there:
    "by chance": {"sampling_weights": [1, 1, 1, 1, 1, 0, 1, 1], "availability": [0, 1, 1, 1, 0.5, 1, 1, 1]},
    # One that no round names, and one that waits:
    "by name": {"participants": [[0, 1, 2], [2, 3, 4], [1, 2, 3], [0, 1, 2]]},
}


@pytest.mark.parametrize("who", TAKE_PART)
@pytest.mark.parametrize("method", ["FedMUD", "downlink"])
def test_clients_that_never_take_part_hear_nothing(tmp_path, method, who):
    class Fails(Module):
        def training_step(self, batch, batch_idx):
            (client,) = loop.rounds.execution.clients
            if (client.round, client.id) in ((1, 2), (2, 3)):
                raise LookupError("no luck")
            return super().training_step(batch, batch_idx)

    settings = {"partition": FromIndices([*([5 * n + k for k in range(5)] for n in range(6)), [], []]), "seed": 1}
    if who == "by chance":
        settings |= {"clients_per_round": 3, "client_dropout": 0.3}
    if method == "FedMUD":
        low_rank, algorithm = [LowRank(MatrixProduct(), rank=2, summary=False)], FedMUD()
    else:
        low_rank, algorithm = [], FedAvg()
        settings["downlink"] = [Half(error_feedback=True)]
    loop, figures = FederatedLoop(algorithm, summary=False, **settings, **TAKE_PART[who]), Figures()
    fitted = trainer(tmp_path, *low_rank, loop, figures, limit_val_batches=0, max_epochs=4)
    fit(fitted, Fails(), Data(blobs(30)))
    heard_by = {"by chance": 4, "by name": 5}[who]
    for number, (clients, failed, down, idle) in enumerate(figures.rounds):
        sent = down / (clients + failed)
        assert clients + failed == 3
        assert idle == (0 if method == "FedMUD" and number == 0 else (heard_by - 3) * sent)
    assert sum(failed for _, failed, _, _ in figures.rounds) > 0


def test_ledger():
    ledger = Ledger(dense_bytes=100)
    for _ in range(2):
        ledger.begin_round()
        ledger.add_down(10)
        ledger.add_down(10)
        ledger.add_up(5)
        ledger.add_idle(30)
    figures = ledger.figures()
    assert figures == {
        "comm/up_bytes": 5,
        "comm/down_bytes": 20,
        "comm/idle_down_bytes": 30,
        "comm/total_up_bytes": 10,
        "comm/total_down_bytes": 40,
        "comm/total_idle_down_bytes": 60,
        "comm/total_bytes": 50,
        "comm/ratio": 50 / 600,
    }
    resumed = Ledger(0)
    resumed.load_state_dict(ledger.state_dict())
    assert resumed.figures() == figures


def test_ledger_before_anything_crossed():
    assert Ledger(0).figures()["comm/ratio"] == 0


def test_message_counts_elements_of_every_type():
    assert Message({"w": torch.zeros(3, 5), "seed": torch.tensor(7)}).elements == 16


def student_and_teacher():
    # Not a copy of the student, which would be left alone as what a moving average follows.
    teacher = network()
    with torch.no_grad():
        for value in teacher.parameters():
            value.mul_(2)
    module = nn.ModuleDict({"student": network(), "teacher": teacher})
    module["teacher"].requires_grad_(False)
    return module


def test_dense_fedavg_would_send_what_is_trained():
    both = student_and_teacher()
    alone = nn.ModuleDict({"student": both["student"]})
    assert dense_bytes(both) == dense_bytes(alone)
    both["teacher"].requires_grad_(True)
    assert dense_bytes(both) > 1.9 * dense_bytes(alone)


@pytest.mark.parametrize(
    "settings",
    [
        {"rank": 2},
        {"rank": 2, "role": "weight"},
        {"rank": 2, "freeze_rest": True},
        {"rank": 2, "freeze_rest": True, "keep_trained": ["student.4"], "exclude": ["4"]},
        {"rank": 1, "half_frozen": True, "include": ["2"]},
        {"rank_ratio": 0.1, "train_base": True},
    ],
    ids=str,
)
def test_dense_fedavg_sends_the_same_whatever_is_low_rank(settings):
    module = student_and_teacher()
    dense = dense_bytes(module)
    convert(module, MatrixProduct(), **settings)
    assert dense_bytes(module) == dense
    in_half = copy.deepcopy(module).bfloat16()
    assert dense_bytes(in_half) == dense_bytes(student_and_teacher().bfloat16())
    of_half = student_and_teacher().bfloat16()
    convert(of_half, MatrixProduct(), **settings)
    assert dense_bytes(of_half) == dense_bytes(in_half)
    # A callback may freeze factors for some rounds, in which dense FedAvg would not send the weight either.
    for layer in (module["student"][2], module["teacher"]):
        layer.requires_grad_(False)
    assert dense_bytes(module) < dense or settings.get("freeze_rest")


def test_a_frozen_base_counts_where_it_is_converted():
    module = network()
    dense = dense_bytes(module)
    module.requires_grad_(False)
    convert(module, MatrixProduct(), rank=2, init="lora", convert_frozen=True)
    assert dense_bytes(module) == dense


@pytest.mark.parametrize("settings", [{}, {"modules_to_save": ["4"]}, {"bias": "all"}], ids=str)
def test_a_model_that_peft_wrapped_has_the_size_of_the_dense_one(settings):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], **settings)
    wrapped = nn.ModuleDict({"student": peft.get_peft_model(network(), config)})
    dense = dense_bytes(nn.ModuleDict({"student": network()}))
    assert dense_bytes(wrapped) == dense
    wrapped["teacher"] = network().requires_grad_(False)
    assert dense_bytes(wrapped) == dense
    injected = peft.inject_adapter_in_model(config, network())
    assert dense_bytes(injected) == dense_bytes(network())
    assert dense_bytes(injected.requires_grad_(False)) < dense
