"""The weighted mean of arrivals."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lightning_lowrank.aggregation import WeightedMean
from lightning_lowrank.aggregation import mean as mean_module


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


def test_means_may_stay_as_precise_as_they_are():
    mean = WeightedMean()
    for arrivals in (1, 2):
        mean.add({"half": torch.tensor([float(arrivals)]).half(), "count": torch.tensor(arrivals)}, weight=2 / arrivals)
        found = mean.result(least=torch.float32)
        assert (found["half"].dtype, found["count"].dtype) == (torch.float32, torch.int64)
    assert found["half"].item() == torch.tensor(4 / 3).item()


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


@pytest.mark.parametrize("at_once", [2**20, 7])
@pytest.mark.parametrize("parties", [1, 5])
def test_stacks_arrive_as_their_parties_would(monkeypatch, at_once, parties):
    monkeypatch.setattr(mean_module, "_NUMBERS_AT_ONCE", at_once)
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


def test_sums_are_on_the_cpu_where_the_device_has_no_float64():
    with FakeTensorMode():
        value, stack = torch.empty(3, device="mps"), torch.empty(4, 3, device="mps", dtype=torch.float16)
        each, stacked = WeightedMean(), WeightedMean()
        for _ in range(2):
            each.add({"w": value}, 2)
            stacked.add_stacks({"w": stack}, [1, 2, 3, 4])
        for mean, like in ((each, value), (stacked, stack)):
            sums, result = mean.state_dict()["sums"]["w"], mean.result()["w"]
            assert (sums.dtype, sums.device.type) == (torch.float64, "cpu")
            assert (result.dtype, result.device) == (like.dtype, like.device)
            resumed = WeightedMean()
            resumed.load_state_dict(mean.state_dict(), value.device)
            assert resumed.result()["w"].device == value.device
            assert resumed.state_dict()["sums"]["w"].device.type == "cpu"
