"""The contract of operators accepts a user's own and refuses broken ones."""

import random

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_lowrank.lora import Broadcast, LowRankPair, Operator, ProductSum
from lightning_lowrank.testing import check_operator


class Average(Operator):
    """A user's own: the mean of both factors."""

    mixed_ranks = False

    def combine(self, inputs):
        lefts, rights = inputs.factors()
        weights = inputs.weights.tolist()
        return tuple(sum(w * f for w, f in zip(weights, factors, strict=True)) for factors in (lefts, rights))

    def _aggregate(self, inputs):
        return inputs.broadcast(*self.combine(inputs))


class MeanOfB(Average):
    """A user's own that trains one factor, and is exact for it."""

    def trained(self, round):
        return frozenset("B")

    def combine(self, inputs):
        return super().combine(inputs)[0], inputs.factors()[1][0]


class Dictator(Average):
    def combine(self, inputs):
        lefts, rights = inputs.factors()
        return lefts[0], rights[0]


class Unweighted(Average):
    def combine(self, inputs):
        lefts, rights = inputs.factors()
        return torch.stack(lefts).mean(dim=0), torch.stack(rights).mean(dim=0)


class WeightsAsTheyCome(Average):
    def aggregate(self, pairs, weights=None, **settings):
        found = super().aggregate(pairs, weights, **settings)
        if weights is None or isinstance(weights, torch.Tensor) or sum(weights) >= 1.5:
            return found
        return super().aggregate(pairs, [weight**2 for weight in weights], **settings)


class OrderMatters(Average):
    broadcasts = "personal"

    def _aggregate(self, inputs):
        found = inputs.broadcast(*self.combine(inputs))
        last = inputs.pairs[-1].resized(*inputs.targets[-1])
        return Broadcast((*found.clients[:-1], last), found.server)


class Dense(Average):
    def combine(self, inputs):
        B, A = super().combine(inputs)
        B @ A
        return B, A


class DrawsGlobally(Average):
    def combine(self, inputs):
        torch.rand(1)
        return super().combine(inputs)


class DependsOnTheGlobalSeed(Average):
    def combine(self, inputs):
        B, A = super().combine(inputs)
        return B * (1 + 1e-12 * (torch.initial_seed() % 1000)), A


class Casts(Average):
    def _aggregate(self, inputs):
        found = inputs.broadcast(*self.combine(inputs))
        clients = tuple(LowRankPair(pair.B.double(), pair.A.double(), pair.scaling) for pair in found.clients)
        return Broadcast(clients, found.server)


class Shares(Average):
    broadcasts = "personal"

    def _aggregate(self, inputs):
        wanted = zip(inputs.pairs, inputs.targets, strict=True)
        clients = tuple(
            pair if (pair.rank, pair.scaling) == target else pair.resized(*target) for pair, target in wanted
        )
        return Broadcast(clients, inputs.broadcast(*self.combine(inputs)).server)


class Spoils(Average):
    def combine(self, inputs):
        found = super().combine(inputs)
        for pair in inputs.pairs:
            pair.A.mul_(1 + 1e-9)
        return found


class AcceptsAllRanks(Average):
    def _check(self, inputs):
        pass

    def _aggregate(self, inputs):
        return inputs.averaged(owned=False)


class OneRankForAll(Average):
    mixed_ranks = True

    def _aggregate(self, inputs):
        inputs.ranks = [inputs.largest] * len(inputs.ranks)
        return inputs.averaged(owned=False)


class RefusesAllRanks(Average):
    mixed_ranks = True

    def _aggregate(self, inputs):
        return inputs.broadcast(*self.combine(inputs))


class NoChange(Average):
    changes_base = True


class Personal(Average):
    def _aggregate(self, inputs):
        return Broadcast(tuple(pair.resized(pair.rank) for pair in inputs.pairs), inputs.averaged(owned=False).server)


class TrainsOneChangesBoth(Average):
    def trained(self, round):
        return frozenset("B")

    def combine(self, inputs):
        B, A = super().combine(inputs)
        return B / 2, 2 * A


class TrainsNothing(Average):
    def trained(self, round):
        return frozenset()


class NotDrawn(Average):
    redraws = True

    def sent_down(self, round):
        return frozenset()


class DrawsAlike(Average):
    def fresh(self, shape, rank, *, seed=0, **settings):
        return super().fresh(shape, rank, **settings)


class LayersDiffer(Average):
    def aggregate_model(self, clients, weights=None, **settings):
        return super().aggregate_model(clients, None, **settings)


class GoesOnInNaN(Average):
    def combine(self, inputs):
        B, A = super().combine(inputs)
        return (B * torch.nan if inputs.round else B), A


class LosesSlots(Average):
    mixed_ranks = True

    def _aggregate(self, inputs):
        inputs.previous = None
        return inputs.averaged(owned=False)


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "exact"), [(Average(), False), (MeanOfB(), True)], ids=repr)
def test_users_own_operator_passes(operator, exact):
    check_operator(operator, exact=exact)


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        (Dictator(), "not the product of the client that has all the weight"),
        (Unweighted(), "not the product of the client that has all the weight"),
        (WeightsAsTheyCome(), "the scale of the weights matters"),
        (OrderMatters(), "the order of the clients matters"),
        (Dense(), "it builds a tensor of 60000 numbers"),
        (DrawsGlobally(), "changes the global random number generators"),
        (DependsOnTheGlobalSeed(), "a repeated run gives other numbers"),
        (Casts(), "factors of torch.float32 become torch.float64"),
        (Shares(), "shares memory with a client"),
        (Spoils(), "changes its inputs"),
        (AcceptsAllRanks(), "mixed_ranks is false, and it accepts clients of different ranks"),
        (OneRankForAll(), "clients receive"),
        (RefusesAllRanks(), "refuses clients of ranks"),
        (NoChange(), "changes_base is True"),
        (Personal(), "clients of one rank receive different pairs"),
        (TrainsOneChangesBoth(), "A is not sent down, and a client's A changes"),
        (TrainsNothing(), "trained is set()"),
        (NotDrawn(), "clients do not receive what fresh draws"),
        (DrawsAlike(), "fresh draws the same from another seed"),
        (LayersDiffer(), "is not aggregated as one in aggregate"),
        (GoesOnInNaN(), "the next round is not finite"),
        (LosesSlots(), "the server's rank shrinks from 4 to 2"),
    ],
    ids=lambda value: repr(value) if isinstance(value, Operator) else "",
)
def test_broken_operators_fail(operator, message):
    with pytest.raises(AssertionError, match=message.replace("(", r"\(").replace(")", r"\)")) as error:
        check_operator(operator, rounds=[0])
    assert str(error.value).startswith(f"{operator!r} in round 0: ")


@pytest.mark.parametrize("seed_globally", [torch.manual_seed, np.random.seed, random.seed])
def test_a_global_generator_seeded_as_it_was_is_noticed(seed_globally):
    class Seeds(Average):
        def combine(self, inputs):
            seed_globally(1)
            return super().combine(inputs)

    with isolate_rng():
        seed_globally(1)
        with pytest.raises(AssertionError, match="changes the global random number generators"):
            check_operator(Seeds(), rounds=[0])


def test_exactness_is_checked_where_it_is_claimed():
    with pytest.raises(AssertionError, match="not the mean of the products"):
        check_operator(ProductSum(), exact=True)
