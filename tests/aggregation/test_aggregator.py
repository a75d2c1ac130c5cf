"""The interface of rules that aggregate: a user's own rule that keeps all arrivals."""

import pytest
import torch

from lightning_lowrank.aggregation import KeepsArrivals, WeightedMean

CPU = torch.device("cpu")


class TrimmedMedian(KeepsArrivals):
    """The coordinate-wise median of the arrivals of a weight of at least ``least``."""

    def __init__(self, least=0.0):
        super().__init__()
        self.least = least

    def result(self):
        kept = [number for number, (_, weight) in enumerate(self.kept) if weight >= self.least]
        return {
            name: torch.stack([values[number] for number in kept]).median(dim=0).values
            for name, values in self.values().items()
        }


class Peers:
    """Two processes: this one and one that holds what another aggregator holds."""

    root_device = CPU

    def __init__(self, other):
        self.other = [(dict(tensors), weight) for tensors, weight in other.kept]

    def gather(self, value):
        return [self.other, value]


def filled(values, weights, aggregator=None):
    aggregator = aggregator or TrimmedMedian(least=0.5)
    for value, weight in zip(values, weights, strict=True):
        aggregator.add({"w": value, "count": torch.tensor(3)}, weight)
    return aggregator


VALUES, WEIGHTS = torch.tensor([[1.0, 9.0], [2.0, 8.0], [90.0, -5.0], [7.0, 7.0]]), [1.0, 1.0, 2.0, 0.1]


def test_rule_that_keeps_arrivals():
    median = filled(VALUES, WEIGHTS)
    assert (median.arrivals, median.weight) == (4, 4.1)
    assert torch.equal(median.result()["w"], torch.tensor([2.0, 8.0]))
    assert torch.equal(median.result()["count"], torch.tensor(3))


def test_stacks_are_added_one_by_one():
    median = TrimmedMedian(least=0.5)
    stacks = {"w": VALUES.clone()}
    median.add_stacks(stacks, WEIGHTS)
    stacks["w"].zero_()
    assert (median.arrivals, median.weight) == (4, 4.1)
    assert torch.equal(median.result()["w"], torch.tensor([2.0, 8.0]))


def test_state_is_restored(tmp_path):
    torch.save(filled(VALUES[:2], WEIGHTS[:2]).state_dict(), tmp_path / "state")
    resumed = TrimmedMedian(least=0.5)
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True), CPU)
    assert (resumed.arrivals, resumed.weight) == (2, 2.0)
    assert torch.equal(filled(VALUES[2:], WEIGHTS[2:], resumed).result()["w"], torch.tensor([2.0, 8.0]))


@pytest.mark.parametrize("here", [0, 1, 4])
def test_processes_pool_their_arrivals(here):
    mine = filled(VALUES[here:], WEIGHTS[here:])
    mine.pool(Peers(filled(VALUES[:here], WEIGHTS[:here])))
    assert mine.arrivals == 4
    assert torch.equal(mine.result()["w"], torch.tensor([2.0, 8.0]))


@pytest.mark.parametrize("aggregator", [TrimmedMedian(least=0.5), WeightedMean()])
def test_fresh_keeps_arguments_and_leaves_arrivals(aggregator):
    fresh = filled(VALUES, WEIGHTS, aggregator).fresh()
    assert type(fresh) is type(aggregator)
    assert (fresh.arrivals, fresh.weight, aggregator.arrivals) == (0, 0.0, 4)
    assert getattr(fresh, "least", 0.5) == 0.5
    filled(VALUES[:1], WEIGHTS[:1], fresh)
    assert torch.equal(fresh.result()["w"], VALUES[0])
    assert aggregator.arrivals == 4


def test_arrivals_must_name_the_same_tensors():
    with pytest.raises(KeyError, match="'count'"):
        filled(VALUES, WEIGHTS).add({"w": VALUES[0]}, 1)
