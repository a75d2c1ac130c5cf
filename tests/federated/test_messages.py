"""The ledger, and what a message weighs."""

import torch
from torch import nn

from lightning_lowrank.federated import Ledger, Message
from lightning_lowrank.federated.messages import dense_bytes
from lightning_lowrank.federated.state import trained_tensors


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
        ledger.down(10)
        ledger.down(10)
        ledger.up(5)
        ledger.idle(30)
    figures = ledger.metrics()
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
    assert resumed.metrics() == figures


def test_ledger_before_anything_crossed():
    assert Ledger(0).metrics()["comm/ratio"] == 0


def test_message_counts_elements_of_every_type():
    assert Message({"w": torch.zeros(3, 5), "seed": torch.tensor(7)}).elements == 16
