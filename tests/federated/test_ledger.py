"""The ledger, and what a message weighs."""

import copy

import pytest
import torch
from torch import nn

from lightning_lowrank.federated import Ledger, Message
from lightning_lowrank.federated.ledger import dense_bytes
from lightning_lowrank.federated.state import trained_tensors
from lightning_lowrank.layers import MatrixProduct, convert
from tests.helpers import network


def test_tied_weights_are_sent_once():
    import safetensors.torch

    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    sent = trained_tensors(module)
    assert list(sent) == ["0.weight", "0.bias", "1.bias"]
    assert dense_bytes(module) == len(safetensors.torch.save(sent))


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
