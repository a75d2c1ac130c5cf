"""The weighted mean, the ledger, and what a payload weighs."""

import pytest
import torch
from torch import nn

from lightning_lowrank.federated import Ledger, Payload
from lightning_lowrank.federated import client as client_module
from lightning_lowrank.federated.client import WeightedMean, persistent_buffers, trained_tensors
from lightning_lowrank.federated.payload import dense_payload


def arrivals(dtype, count=7):
    draws = torch.Generator().manual_seed(2)
    return [torch.randn(50, generator=draws).to(dtype) for _ in range(count)], [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.6][
        :count
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_mean_is_that_of_float64_cast_once(dtype):
    values, shares = arrivals(dtype)
    mean = WeightedMean()
    for value, share in zip(values, shares, strict=True):
        mean.add({"w": value}, share)
    sums = sum(value.double() * share for value, share in zip(values, shares, strict=True))
    # In float64 itself a sum may be fused with the product before it.
    tolerance = 1e-14 if dtype == torch.float64 else 0
    torch.testing.assert_close(mean.result()["w"], (sums / sum(shares)).to(dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_one_arrival_comes_back_exactly(dtype):
    value = (torch.randn(50, generator=torch.Generator().manual_seed(1)) * 10).to(dtype)
    mean = WeightedMean()
    mean.add({"w": value}, 0.1)
    assert mean.result()["w"].dtype == dtype
    assert torch.equal(mean.result()["w"], value)


def test_arrivals_are_read_at_once():
    value, mean = torch.ones(2), WeightedMean()
    mean.add({"w": value}, 1)
    value.zero_()
    assert torch.equal(mean.result()["w"], torch.ones(2))
    mean.add({"w": value}, 1)
    assert torch.equal(mean.result()["w"], torch.full((2,), 0.5))


@pytest.mark.parametrize(
    ("counts", "flags", "expected"),
    [((1, 2, 4), (True, True, False), (2, True)), ((1, 2, 5), (True, False, False), (3, False))],
)
def test_integers_and_booleans_round(counts, flags, expected):
    mean = WeightedMean()
    for count, flag in zip(counts, flags, strict=True):
        mean.add({"count": torch.tensor(count), "flag": torch.tensor(flag)}, 1)
    result = mean.result()
    assert (result["count"], result["flag"]) == tuple(torch.tensor(value) for value in expected)


def test_mean_goes_on_from_its_state(tmp_path):
    values, shares = arrivals(torch.float32)
    whole = WeightedMean()
    for number, (value, share) in enumerate(zip(values, shares, strict=True)):
        torch.save(whole.state_dict(), tmp_path / "state")
        resumed = WeightedMean()
        resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True), torch.device("cpu"))
        for party in (whole, resumed):
            party.add({"w": value}, share)
        assert torch.equal(whole.result()["w"], resumed.result()["w"]), number


def test_arrivals_must_name_the_same_tensors():
    mean = WeightedMean()
    mean.add({"w": torch.ones(1)}, 1)
    with pytest.raises(KeyError, match="'v', 'w'"):
        mean.add({"v": torch.ones(1)}, 1)


def test_trained_tensors():
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
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


def test_tied_weights_are_sent_once():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    assert dense_payload(module).numbers == 16 + 4 + 4
    assert list(trained_tensors(module)) == ["0.weight", "0.bias", "1.bias"]


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


def test_payload_counts_numbers_of_every_type():
    payload = Payload({"w": torch.zeros(3, 5), "seed": torch.tensor(7)})
    assert payload.numbers == 16


@pytest.mark.parametrize("at_once", [2**20, 7])
@pytest.mark.parametrize("parties", [1, 5])
def test_stacks_arrive_as_their_parties_would(monkeypatch, at_once, parties):
    monkeypatch.setattr(client_module, "_NUMBERS_AT_ONCE", at_once)
    draws = torch.Generator().manual_seed(1)
    stacks = {
        "weight": torch.randn(parties, 3, 2, generator=draws),
        "half": torch.randn(parties, 4, generator=draws).bfloat16(),
        "batches": torch.randint(0, 9, (parties,), generator=draws),
        "empty": torch.zeros(parties, 0),
    }
    weights = [1.0, 0.5, 3.0, 0.0, 2.0][:parties]
    together, each = WeightedMean(), WeightedMean()
    for _ in range(2):
        together.add_stacks(stacks, weights)
        for party, weight in enumerate(weights):
            each.add({name: stack[party] for name, stack in stacks.items()}, weight)
        assert (together.weight, together.arrivals) == (each.weight, each.arrivals)
        found, expected = together.result(), each.result()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)
            assert found[name].dtype == stacks[name].dtype
    with pytest.raises(KeyError, match="different tensors"):
        together.add_stacks({"weight": stacks["weight"]}, weights)
