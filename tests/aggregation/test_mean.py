"""The weighted mean of arrivals."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lightning_lowrank.aggregation import WeightedMean
from lightning_lowrank.aggregation import mean as mean_module
from tests.helpers import draw


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


def test_the_mean_of_many_changes_is_as_precise_as_one():
    draws, mean, origin = torch.Generator().manual_seed(0), WeightedMean(), {"w": torch.zeros(50)}
    changes = 0.01 + torch.rand(3000, 50, generator=draws)
    for change in changes:
        mean.add_change({"w": change}, origin, 613)
    torch.testing.assert_close(mean.result()["w"], changes.double().mean(0).float(), rtol=3e-7, atol=0)


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


LARGE = torch.tensor([2**53 + 1, -(2**62) + 3, 7])
SHARES = [0.1, 0.7, 3.0, 0.0, 1.3]


@pytest.mark.parametrize("stacked", [(), (2,), (3,), (2, 3), (1, 2, 2), (5,)])
def test_large_integers_that_all_have_alike_are_kept(tmp_path, stacked):
    parties = [{"alike": LARGE.clone(), "count": torch.tensor([party])} for party in range(5)]
    mean, done = WeightedMean(), 0
    for size in stacked:
        part = slice(done, done + size)
        stacks = {name: torch.stack([party[name] for party in parties[part]]) for name in parties[0]}
        mean.add_stacks(stacks, SHARES[part])
        done += size
    torch.save(mean.state_dict(), tmp_path / "state")
    resumed = WeightedMean()
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True), torch.device("cpu"))
    for party, weight in zip(parties[done:], SHARES[done:], strict=True):
        resumed.add(party, weight)
    result = resumed.result()
    assert torch.equal(result["alike"], LARGE)
    # The mean is 11.9 / 5.1.
    assert torch.equal(result["count"], torch.tensor([2]))


@pytest.mark.parametrize("bits", [31, 40, 50, 52])
def test_integers_that_sums_would_round_are_kept(bits):
    draws = torch.Generator().manual_seed(0)
    for more in range(20):
        value, mean = torch.tensor([2**bits + 1 + more]), WeightedMean()
        for weight in torch.rand(50, generator=draws).tolist():
            mean.add({"w": value}, weight)
        assert torch.equal(mean.result()["w"], value)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("weights", [[0, 2, 1], [2, 0, 1], [0, 3, 0]])
def test_an_arrival_without_weight_changes_nothing(weights, stacked):
    values = torch.tensor([[1.0, -torch.inf], [2.0, -torch.inf], [4.0, -torch.inf]])
    values[weights.index(0)] = torch.nan
    mean, others = WeightedMean(), WeightedMean()
    if stacked:
        mean.add_stacks({"w": values}, weights)
    for value, weight in zip(values, weights, strict=True):
        if not stacked:
            mean.add({"w": value}, weight)
        if weight:
            others.add({"w": value}, weight)
    assert mean.arrivals == 3
    torch.testing.assert_close(mean.result(), others.result())


def test_large_integers_that_differ_late_are_averaged():
    each, stacked = WeightedMean(), WeightedMean()
    last = LARGE + torch.tensor([0, 0, 9])
    for value in (LARGE, LARGE, last):
        each.add({"w": value}, 1)
    stacked.add({"w": LARGE}, 1)
    stacked.add_stacks({"w": torch.stack([LARGE, last])}, [1, 1])
    for mean in (each, stacked):
        assert mean.result()["w"][2] == 10


class Peers:
    """This process and one that holds what another mean holds."""

    root_device = torch.device("cpu")

    def __init__(self, other):
        self.state, self.dtypes = other.state_dict(), other._dtypes

    def gather(self, value):
        shapes = {name: total.shape for name, total in self.state["sums"].items()}
        return [value, (self.state["arrivals"], self.state["weight"], shapes, self.dtypes, self.state["alike"])]

    def sum(self, tensor):
        theirs = self.state["only"] or self.state["sums"]
        return tensor + torch.cat([value.double().flatten() for value in theirs.values()]) if theirs else tensor


@pytest.mark.parametrize(("here", "there"), [(2, 2), (3, 2), (0, 2), (2, 0), (1, 0), (0, 1)])
@pytest.mark.parametrize("difference", [0, 10])
def test_processes_pool_large_integers(here, there, difference):
    mine, others = WeightedMean(), WeightedMean()
    for mean, count, value in ((mine, here, LARGE), (others, there, LARGE + difference)):
        for _ in range(count):
            mean.add({"w": value, "float": torch.ones(2)}, 0.7)
    mine.pool(Peers(others))
    found = mine.result()["w"]
    assert mine.arrivals == here + there
    if difference and here and there:
        assert found[2] == 7 + round(10 * there / (here + there))
    else:
        assert torch.equal(found, LARGE + difference * bool(there))


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


def test_complex_numbers_are_refused():
    values = torch.tensor([1 + 2j, 3 + 4j])
    with pytest.raises(TypeError, match=r"torch\.complex64.*torch\.view_as_real"):
        WeightedMean().add({"w": values}, 1.0)
    with pytest.raises(TypeError, match=r"torch\.complex64.*torch\.view_as_real"):
        WeightedMean().add_stacks({"w": values}, [1.0, 1.0])


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
    with pytest.raises(KeyError, match=r"\['batches', 'empty', 'half'\]"):
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_numbers_of_every_width_are_added_in_float64(dtype):
    mean, weights = WeightedMean(), [3.0, 0.7, 1 / 3]
    values = [draw(5, 4, seed=number).to(dtype) for number in range(3)]
    for value, weight in zip(values, weights, strict=True):
        mean.add({"w": value}, weight)
    total = sum(weight * value.double() for value, weight in zip(values, weights, strict=True))
    expected = (total / sum(weights)).to(dtype)
    torch.testing.assert_close(mean.result()["w"].double(), expected.double(), rtol=1e-7, atol=1e-7)
