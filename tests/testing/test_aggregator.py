"""The contract of aggregators: one written here passes it, broken ones do not."""

import random

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_lowrank.aggregation import KeepsArrivals, WeightedMean
from lightning_lowrank.testing import check_aggregator


class Mean(KeepsArrivals):
    """A user's own: the plain mean of what arrives."""

    def result(self):
        kept = {name: torch.stack(values) for name, values in self.values().items()}
        return {name: self.of(values.double()).to(values.dtype) for name, values in kept.items()}

    def of(self, values):
        return values[:1].expand_as(values).mean(0) if (values == values[0]).all() else values.mean(0)


class First(Mean):
    def of(self, values):
        return values[0]


class Double(Mean):
    def of(self, values):
        return 2 * values.mean(0)


class Widens(Mean):
    def result(self):
        return {name: value.double() for name, value in super().result().items()}


class Loses(Mean):
    def result(self):
        result = super().result()
        del result["empty"]
        return result


class Shares(Mean):
    def add(self, tensors, weight):
        super().add(tensors, weight)
        self.kept[-1] = (dict(tensors), weight)


class Moves(Mean):
    """Answers otherwise when it is asked again."""

    def clear(self):
        super().clear()
        self.asked = 0

    def of(self, values):
        self.asked += 1
        return super().of(values) + self.asked


class Draws(Mean):
    def prepare(self, origin, seed):
        self.seed = seed

    def result(self):
        place = torch.randint(len(self.kept), (), generator=torch.Generator().manual_seed(self.seed))
        return {name: value.clone() for name, value in self.kept[int(place)][0].items()}


class StacksAsSums(Mean):
    def add_stacks(self, stacks, weights):
        self.add({name: stack.sum(0).to(stack.dtype) for name, stack in stacks.items()}, sum(weights))


class AnyNames(Mean):
    def add(self, tensors, weight):
        self.kept.append(({name: value.clone() for name, value in tensors.items()}, weight))
        self.arrivals, self.weight = len(self.kept), self.weight + weight


class ForgetsWhenSaved(Mean):
    def state_dict(self):
        return {"kept": super().state_dict()["kept"][1:]}


class Alone(Mean):
    def pool(self, peers):
        pass


class LosesItsArgument(Mean):
    def __init__(self, share=0.5):
        super().__init__()
        self.share = share

    def fresh(self):
        return type(self)()


def seeding(seed_globally):
    class Seeds(Mean):
        def result(self):
            seed_globally(0)
            return super().result()

    return Seeds()


def test_a_rule_of_ones_own_keeps_it():
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    check_aggregator(Mean())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), str(np.random.get_state()))


@pytest.mark.parametrize(
    ("rule", "arguments", "message"),
    [
        (First(), {}, "depends on the order of arrivals"),
        (Double(), {}, "does not give back the value of equal arrivals"),
        (Widens(), {}, "returns matrix as .*float64.* for arrivals of .*float32"),
        (Loses(), {}, r"returns \['matrix', 'number', 'half', 'batches'\] for tensors named"),
        (Shares(), {}, "does not read an arrival when it is added"),
        (Moves(), {}, "returns another result when called again"),
        (Draws(), {}, "depends on the order of arrivals"),
        (StacksAsSums(), {}, "gives another result for stacked arrivals"),
        (AnyNames(), {}, "accepts arrivals of different names"),
        (ForgetsWhenSaved(), {}, "has 4 arrivals of 5 after it is restored"),
        (Alone(), {}, "loses arrivals when processes pool them"),
        (LosesItsArgument(0.2), {}, "loses arguments when it is fresh"),
        (Mean(), {"weighted": True}, "ignores the weights of arrivals, but weighted=True"),
        (WeightedMean(), {}, "depends on the weights of arrivals, but weighted=False"),
        (Mean(), {"draws": True}, "gives the same for the seeds 0 to 3, but draws=True"),
        (Mean(), {"byzantine": 2}, "is carried away by 1 of 11 arrivals of"),
    ],
)
def test_broken_rules_do_not(rule, arguments, message):
    with pytest.raises(AssertionError, match=message):
        check_aggregator(rule, **arguments)


@pytest.mark.parametrize("seed_globally", [torch.manual_seed, np.random.seed, random.seed])
def test_a_global_generator_seeded_as_it_was_is_noticed(seed_globally):
    with isolate_rng():
        seed_globally(0)
        with pytest.raises(AssertionError, match="changes the global random number generators"):
            check_aggregator(seeding(seed_globally))
