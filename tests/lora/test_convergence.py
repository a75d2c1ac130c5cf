import math

import pytest
import torch

from lightning_lowrank.lora import (
    RBLA,
    Broadcast,
    FedEx,
    FedInc,
    FedSA,
    FLoRA,
    LoRAFair,
    LowRankPair,
    ProductSum,
    SumProduct,
    ZeroPadding,
    convergence_constants,
)
from tests.grids import pairwise

OPERATORS = [ProductSum(), RBLA(), ZeroPadding(), SumProduct(), FedEx(), FLoRA(), LoRAFair(), FedSA(), FedInc()]
WEIGHTS = [3, 1, 0, 4]


def drawn(ranks, alpha=None, dtype=torch.float64, seed=0, shape=(7, 5)):
    draws = torch.Generator().manual_seed(seed)
    return [
        LowRankPair(
            torch.randn(shape[0], rank, generator=draws, dtype=torch.float64).to(dtype),
            torch.randn(rank, shape[1], generator=draws, dtype=torch.float64).to(dtype),
            0.5 if alpha is None else alpha / rank,
        )
        for rank in ranks
    ]


def dense(pair):
    return pair.scaling * pair.B.double() @ pair.A.double()


def mean(values, weights=WEIGHTS):
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def by_hand(pairs, broadcast):
    """Every constant by its definition, from dense matrices; factors are padded to five slots."""
    change = 0 if broadcast.change is None else dense(broadcast.change)
    products = [dense(pair) for pair in pairs]
    ideal = mean(products)
    received = [dense(pair) + change for pair in broadcast.clients]
    scaling = max(pairs, key=lambda pair: pair.rank).scaling

    def fill(factor):
        return torch.nn.functional.pad(factor, (0, 5 - factor.shape[1]))

    values = torch.linalg.svdvals(dense(broadcast.server) + change)
    values = values[values > 1e-12]
    shares = values / values.sum()
    found = {
        "effective_rank": (-(shares * shares.log()).sum()).exp(),
        "energy_beyond": values[min(p.rank for p in pairs) :].square().sum() / values.square().sum(),
        "weak": mean([(e - p).square().sum() for e, p in zip(received, products, strict=True)]),
        "weak_gap": mean([(e - p).square().sum() for e, p in zip(received, products, strict=True)])
        - mean([(ideal - p).square().sum() for p in products]),
        "aggregation_error": (dense(broadcast.server) + change - ideal).norm(),
        "broadcast_error": mean([(e - ideal).square().sum() for e in received]).sqrt(),
    }
    for name in ("B", "A"):

        def slots(pair, name=name):
            return fill(pair.B * pair.scaling / scaling if name == "B" else pair.A.T)

        own, theirs = [slots(pair) for pair in pairs], [slots(pair) for pair in broadcast.clients]
        found[f"strong_{name}"] = mean([(p - o).square().sum() for p, o in zip(theirs, own, strict=True)])
        # The least that a common factor can reach, one slot after another.
        least = 0.0
        for slot in range(5):
            having = [(w, o[:, slot]) for w, o, p in zip(WEIGHTS, own, broadcast.clients, strict=True) if p.rank > slot]
            total = sum(w for w, _ in having)
            best = sum(w * o for w, o in having) / total if total else 0.0
            for w, o, p in zip(WEIGHTS, own, broadcast.clients, strict=True):
                least += w * (o[:, slot] - (best if p.rank > slot else 0.0)).square().sum() / sum(WEIGHTS)
        found[f"strong_{name}_gap"] = found[f"strong_{name}"] - least
    return {name: float(value) for name, value in found.items()}


@pairwise()
@pytest.mark.parametrize("operator", OPERATORS, ids=str)
@pytest.mark.parametrize("alpha", [None, 6.0], ids=["constant", "alpha/r"])
@pytest.mark.parametrize("ranks", [[2] * 4, [1, 5, 3, 5]], ids=str)
def test_all_constants_are_those_of_dense_matrices(operator, ranks, alpha):
    if len(set(ranks)) > 1 and not operator.mixed_ranks:
        pytest.skip("for one rank only")
    pairs = drawn(ranks, alpha)
    broadcast = operator.aggregate(pairs, WEIGHTS)
    found = convergence_constants(pairs, broadcast, WEIGHTS)
    expected = by_hand(pairs, broadcast)
    assert set(vars(found)) == set(expected)
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-9, abs=1e-5 if "error" in name else 1e-9), name


def test_received_ranks_may_differ_from_the_clients_own():
    pairs = drawn([1, 5, 3, 5])
    broadcast = RBLA().aggregate(pairs, WEIGHTS, ranks=[2, 1, 4, 5], scalings=[1.0, 2.0, 0.5, 0.25])
    found = convergence_constants(pairs, broadcast, WEIGHTS)
    for name, value in by_hand(pairs, broadcast).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-9, abs=1e-9), name


def test_the_paper_s_optima():
    """Sum-Product at full rank reaches the optimum of the weak condition, Product-Sum that of the strong one."""
    pairs = drawn([5] * 4)
    full = convergence_constants(pairs, SumProduct().aggregate(pairs))
    assert full.weak_gap == pytest.approx(0, abs=1e-10)
    assert full.aggregation_error == pytest.approx(0, abs=1e-6)
    assert full.strong_B_gap > 0.1
    sums = convergence_constants(pairs, ProductSum().aggregate(pairs))
    assert sums.strong_B_gap == pytest.approx(0, abs=1e-12)
    assert sums.strong_A_gap == pytest.approx(0, abs=1e-12)
    assert sums.weak_gap > 0.1
    for operator in (FedEx(), FLoRA()):
        assert convergence_constants(pairs, operator.aggregate(pairs)).weak_gap == pytest.approx(0, abs=1e-10)
    mixed = drawn([1, 5, 3, 5])
    owned = convergence_constants(mixed, RBLA().aggregate(mixed, WEIGHTS), WEIGHTS)
    assert owned.strong_B_gap == pytest.approx(0, abs=1e-12)
    assert owned.strong_A_gap == pytest.approx(0, abs=1e-12)


def test_no_common_pair_is_below_the_optima():
    pairs = drawn([3] * 4)
    for seed in range(20):
        other = drawn([3], seed=100 + seed)[0]
        around = RBLA().aggregate([*pairs, other], [1, 1, 1, 1, 0.05 * seed]).server
        found = convergence_constants(pairs, Broadcast((around,) * 4, around))
        assert found.weak_gap > 0
        assert found.strong_B_gap > -1e-12
        assert found.strong_A_gap > -1e-12


def test_personal_pairs_can_be_below_the_common_optimum():
    pairs = drawn([2] * 4)
    found = convergence_constants(pairs, Broadcast(tuple(pairs), pairs[0]))
    assert found.weak == pytest.approx(0, abs=1e-12)
    assert found.weak_gap < -0.1
    assert (found.strong_B, found.strong_A) == (0, 0)


def test_small_differences_of_float32_factors_do_not_cancel():
    base = drawn([4], dtype=torch.float32)[0]
    pairs = [
        LowRankPair(base.B + 1e-4 * other.B.float(), base.A + 1e-4 * other.A.float(), 0.5)
        for other in drawn([4] * 4, seed=1)
    ]
    broadcast = ProductSum().aggregate(pairs, WEIGHTS)
    found, expected = convergence_constants(pairs, broadcast, WEIGHTS), by_hand(pairs, broadcast)
    assert found.weak == pytest.approx(expected["weak"], rel=1e-6)
    assert found.strong_B == pytest.approx(expected["strong_B"], rel=1e-9)


def test_large_products_are_not_built():
    """A dense matrix of this size would hold 20 GB in float64."""
    pairs = [LowRankPair(torch.full((50_000, 1), b), torch.ones(1, 50_000)) for b in (1.0, 3.0)]
    found = convergence_constants(pairs, ProductSum().aggregate(pairs))
    assert found.weak == pytest.approx(50_000**2)
    assert found.strong_B == pytest.approx(50_000)
    assert (found.strong_A, found.weak_gap) == (0, pytest.approx(0))


def test_what_does_not_fit_is_refused():
    pairs = drawn([2] * 3)
    broadcast = ProductSum().aggregate(pairs)
    with pytest.raises(ValueError, match="broadcast must be made of pairs, but is for 3 clients"):
        convergence_constants(pairs[:2], broadcast)
    with pytest.raises(ValueError, match="weights must be"):
        convergence_constants(pairs, broadcast, [1, math.nan, 1])
    with pytest.raises(ValueError, match="broadcast must be made of pairs"):
        convergence_constants(drawn([2] * 3, shape=(4, 4)), broadcast)
