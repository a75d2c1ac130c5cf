"""Robust rules on the products of FedLoRA's factors, against the same rules on dense products."""

from functools import partial

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank import (
    FFA,
    RBLA,
    CenteredClipping,
    CoLR,
    CoordinateMedian,
    FedEx,
    FedInc,
    FedLoRA,
    FedSA,
    FLoRA,
    GeometricMedian,
    InnerProduct,
    Krum,
    LowRank,
    MatrixProduct,
    MultiKrum,
    NearestNeighborMixing,
    NormBound,
    ProductSum,
    RoLoRA,
    SignFlip,
    SumProduct,
    TrimmedMean,
    ZeroPadding,
)
from lightning_lowrank.testing.experiment import Experiment, blobs, quiet
from tests.grids import nightly_except

PARTS = [range(7 * client, 7 * client + 7 - client % 3) for client in range(6)]
LORA = partial(LowRank, MatrixProduct(), rank=2, alpha=4, init="lora", freeze_rest=True, allow_larger=True)


def trained(method, epochs=2, execution="sequential", parts=PARTS, **settings):
    """Train, and return the outcome with the observed rounds."""
    seen = []
    method.observers.append(seen.append)
    experiment = Experiment(lambda: method, lowrank=LORA)
    with quiet():
        loop = experiment.loop(parts, execution=execution, **settings)
        return experiment.run(loop, data=blobs(42), max_epochs=epochs), seen


class Recorded(FedLoRA):
    """Keeps what a robust rule is told, and what it would be told by dense products."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self._of_factors, self._exchange.weights = self._exchange.weights, self._weights

    def _weights(self, server):
        arrivals, absorbing = server.state["arrivals"], self.operator.absorbing(server.round)
        pairs = [self._exchange.completed_pairs(server, client, arrival) for client, arrival in arrivals.items()]
        starts = [self._ranks.initial_pairs(server.model, each["level"], absorbing) for each in arrivals.values()]
        rest = [tensors for tensors, _ in server.aggregator.kept]
        rows = []
        for own, start, others in zip(pairs, starts, rest, strict=True):
            parts = [(own[layer].product().double() - start[layer].product().double()).flatten() for layer in own]
            parts += [
                (value.double() - server.model[name].double()).flatten()
                for name, value in others.items()
                if value.is_floating_point()
            ]
            rows.append(torch.cat(parts))
        found = self._of_factors(server)
        rule = server.aggregator.fresh()
        for row, (_, weight) in zip(rows, server.aggregator.kept, strict=True):
            rule.add({"all": row}, weight)
        expected = rule.client_weights()
        torch.testing.assert_close(torch.tensor(list(found.values())), expected.float(), rtol=1e-3, atol=1e-5)
        self.rounds = getattr(self, "rounds", 0) + 1
        return found


OPERATORS = [ProductSum, SumProduct, FFA, RoLoRA, FLoRA, FedEx, CoLR, ZeroPadding, RBLA]
RULES = [MultiKrum(1), GeometricMedian(), CenteredClipping(), NormBound(before=[NearestNeighborMixing(1)])]


@nightly_except(
    "CoLR-CenteredClipping()",
    "FFA-GeometricMedian()",
    "FLoRA-MultiKrum(byzantine=1)",
    "FedEx-NormBound(before=[NearestNeighborMixing(byzantine=1)])",
    "RBLA-CenteredClipping()",
    "RoLoRA-GeometricMedian()",
    "SumProduct-MultiKrum(byzantine=1)",
    "ZeroPadding-NormBound(before=[NearestNeighborMixing(byzantine=1)])",
)
@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(
    "operator", [pytest.param(each, marks=[] if each is SumProduct else pytest.mark.slow) for each in OPERATORS]
)
def test_weights_are_those_of_dense_products(operator, rule):
    method = Recorded(operator())
    trained(method, aggregator=rule, attackers=SignFlip([1]))
    assert method.rounds == 2


@pytest.mark.slow
def test_weights_are_those_of_dense_products_for_clients_of_different_rank():
    method = Recorded(SumProduct(), levels=[1.0, 0.5])
    trained(method, aggregator=GeometricMedian(), attackers=SignFlip([1]))
    assert method.rounds == 2


def test_the_rule_weighs_factors_and_all_else():
    # Krum takes one client: the model is that client's own.
    _, seen = trained(FedLoRA(ProductSum()), epochs=1, aggregator=Krum(1), attackers=InnerProduct([0]))
    ((pairs, weights),) = [(each.pairs, each.weights) for each in seen]
    assert weights == [1.0]
    for layer, result in seen[0].broadcasts.items():
        torch.testing.assert_close(result.server.product(), pairs[0][layer].product())


@pytest.mark.slow
def test_what_a_bound_cuts_off_stays_with_the_start():
    _, seen = trained(FedLoRA(ProductSum()), epochs=1, aggregator=NormBound(1e-4))
    (round,) = seen
    assert len(round.pairs) == len(PARTS) + 1
    assert sum(round.weights) == pytest.approx(1)
    assert round.weights[-1] > 0.9
    # The last is the pair that all started from, whose product is zero.
    assert all(not pair.product().any() for pair in round.pairs[-1].values())


@pytest.mark.slow
@pytest.mark.parametrize("operator", [ProductSum(), SumProduct()])
def test_executions_agree(operator):
    ends = [
        trained(FedLoRA(operator), 2, execution, aggregator=GeometricMedian(), attackers=SignFlip([2]))[0].weights
        for execution in ("sequential", "vectorized")
    ]
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("operator", "rule", "message"),
    [
        (ProductSum(), TrimmedMean(1), r"FedLoRA.*aggregator=TrimmedMean\(byzantine=1\)"),
        (SumProduct(), CoordinateMedian(), r"aggregator=CoordinateMedian\(\)"),
        (FedSA(), GeometricMedian(), r"with FedSA\(\) each client has a pair or a factor of its own"),
        (FedInc(), Krum(1), r"FedInc.*clusters=2"),
    ],
)
def test_what_does_not_go_together_is_refused(operator, rule, message):
    with pytest.raises(MisconfigurationException, match=message):
        trained(FedLoRA(operator), aggregator=rule)
