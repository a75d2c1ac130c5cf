"""Robust rules: the contract, each rule against one written with NumPy, and what they refuse."""

import itertools

import numpy as np
import pytest
import torch

from lightning_lowrank import aggregation
from lightning_lowrank.aggregation import (
    Aggregator,
    Bucketing,
    CenteredClipping,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    MultiKrum,
    NearestNeighborMixing,
    NormBound,
    TrimmedMean,
    WeightedMean,
)
from lightning_lowrank.registry import subclasses_by_name
from lightning_lowrank.testing import check_aggregator

NNM = NearestNeighborMixing
CASES = [
    (WeightedMean(), {"weighted": True}),
    (CoordinateMedian(), {"byzantine": 5}),
    (TrimmedMean(0.3), {"byzantine": 3}),
    (Krum(0.3), {"byzantine": 3}),
    (MultiKrum(0.3), {"byzantine": 3}),
    (GeometricMedian(), {"byzantine": 5}),
    (GeometricMedian(weighted=True), {"byzantine": 3, "weighted": True}),
    (CenteredClipping(), {"byzantine": 3}),
    (NormBound(), {"byzantine": 3, "weighted": True}),
    (NormBound(50.0, relative_weight=1.5), {"byzantine": 3, "weighted": True}),
    (TrimmedMean(0.3, [NNM(0.3)]), {"byzantine": 3}),
    (Krum(0.3, before=[NNM(0.3)]), {"byzantine": 3}),
    (CoordinateMedian([Bucketing(2)]), {"byzantine": 2, "draws": True}),
    (GeometricMedian(before=[Bucketing(2), NNM(0.2)]), {"byzantine": 2, "draws": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "arguments"), CASES, ids=[repr(rule) for rule, _ in CASES])
def test_contract(rule, arguments):
    check_aggregator(rule, **arguments)


def test_every_rule_is_checked():
    found = {
        name
        for name, kind in subclasses_by_name(Aggregator).items()
        if kind.__module__.startswith("lightning_lowrank.a")
    }
    assert found == {type(rule).__name__ for rule, _ in CASES}
    assert found <= set(aggregation.__all__)


# Each rule against one written with NumPy, on vectors of which some are far off

DRAWS = np.random.default_rng(5)
X = DRAWS.normal(size=(11, 20))
X[[2, 5, 9]] = 4 * X[[2, 5, 9]] - 3
WEIGHTS = DRAWS.uniform(0.5, 3, size=11)
ORIGIN = DRAWS.normal(size=20)


def of(rule, vectors=X, weights=None, origin=None, seed=0):
    """Aggregate vectors, each sent as two tensors."""
    weights = np.ones(len(vectors)) if weights is None else weights
    start = np.zeros(vectors.shape[1]) if origin is None else origin
    for vector, weight in zip(vectors + start, weights, strict=True):
        rule.add(halves(vector), float(weight))
    rule.prepare({} if origin is None else halves(origin), seed)
    found = rule.result()
    return torch.cat([found["a"].flatten(), found["b"]]).numpy() - start


def halves(vector):
    return {"a": torch.from_numpy(vector[:6]).view(3, 2), "b": torch.from_numpy(vector[6:])}


def scores(x, f):
    distances = ((x[:, None] - x) ** 2).sum(-1)
    return np.array([np.sort(np.delete(row, place))[: len(x) - f - 2].sum() for place, row in enumerate(distances)])


def geometric_median(x, alphas):
    z = np.median(x, axis=0)
    for _ in range(20_000):
        betas = alphas / np.maximum(np.linalg.norm(x - z, axis=1), 1e-6)
        z = betas @ x / betas.sum()
    return z


def centred(x, radius, iterations):
    v = np.zeros(x.shape[1])
    for _ in range(iterations):
        distances = np.linalg.norm(x - v, axis=1)
        tau = np.median(distances) if radius is None else radius
        v = v + ((x - v) * np.minimum(1, tau / distances)[:, None]).mean(axis=0)
    return v


def bounded(x, bound, weights):
    norms = np.linalg.norm(x, axis=1)
    return np.average(x * np.minimum(1, bound / norms)[:, None], axis=0, weights=weights)


def mixed(x, f):
    distances = ((x[:, None] - x) ** 2).sum(-1)
    return np.stack([x[np.argsort(row)[: len(x) - f]].mean(axis=0) for row in distances])


WRITTEN_OUT = {
    "median": (CoordinateMedian(), lambda: np.median(X, axis=0)),
    "trimmed mean": (TrimmedMean(3), lambda: np.sort(X, axis=0)[3:-3].mean(axis=0)),
    "Krum": (Krum(3), lambda: X[scores(X, 3).argmin()]),
    "Multi-Krum": (MultiKrum(3), lambda: X[np.argsort(scores(X, 3))[:8]].mean(axis=0)),
    "Multi-Krum of 4": (MultiKrum(2, 4), lambda: X[np.argsort(scores(X, 2))[:4]].mean(axis=0)),
    "geometric median": (GeometricMedian(iterations=5000), lambda: geometric_median(X, np.ones(11))),
    "weighted": (GeometricMedian(True, iterations=5000), lambda: geometric_median(X, WEIGHTS)),
    "centred clipping": (CenteredClipping(2.0, 3), lambda: centred(X, 2.0, 3)),
    "centred at the median": (CenteredClipping(), lambda: centred(X, None, 5)),
    "norm bound": (NormBound(3.0), lambda: bounded(X, 3.0, WEIGHTS)),
    "relative bounds": (
        NormBound(relative=1.5, relative_weight=1.2),
        lambda: bounded(X, 1.5 * np.median(np.linalg.norm(X, axis=1)), np.minimum(WEIGHTS, 1.2 * np.median(WEIGHTS))),
    ),
    "NNM, trimmed mean": (TrimmedMean(3, [NNM(3)]), lambda: np.sort(mixed(X, 3), axis=0)[3:-3].mean(axis=0)),
    "NNM, Krum": (Krum(3, [NNM(3)]), lambda: mixed(X, 3)[scores(mixed(X, 3), 3).argmin()]),
    "NNM of others, Multi-Krum": (
        MultiKrum(1, before=[NNM(3)]),
        lambda: mixed(X, 3)[np.argsort(scores(mixed(X, 3), 1))[:10]].mean(axis=0),
    ),
    "NNM twice, Krum": (
        Krum(3, [NNM(2), NNM(1)]),
        lambda: mixed(mixed(X, 2), 1)[scores(mixed(mixed(X, 2), 1), 3).argmin()],
    ),
    "NNM, geometric median": (
        GeometricMedian(iterations=5000, before=[NNM(3)]),
        lambda: geometric_median(mixed(X, 3), np.ones(11)),
    ),
}


@pytest.mark.parametrize("origin", [None, ORIGIN], ids=["changes", "values"])
@pytest.mark.parametrize(("rule", "expected"), WRITTEN_OUT.values(), ids=WRITTEN_OUT)
def test_rule_is_what_is_written_out(rule, expected, origin):
    np.testing.assert_allclose(of(rule.fresh(), X, WEIGHTS, origin), expected(), rtol=1e-6, atol=1e-7)


def test_buckets_are_means_of_a_partition():
    values = 2.0 ** np.arange(5)[:, None]
    sums = {sum(values[list(pair)].ravel()) for pair in itertools.combinations(range(5), 2)}
    for seed in range(8):
        matrix = Bucketing(2).matrix(torch.eye(5, dtype=torch.float64), 0, torch.Generator().manual_seed(seed))
        assert (matrix > 0).sum(0).tolist() == [1] * 5
        means = (matrix.numpy() @ values).ravel()
        assert set(means[:2] * 2) <= sums
        assert np.isclose(means[:2].sum() * 2 + means[2], values.sum())
    # One wild arrival reaches one bucket of two, and the median of five is a bucket's.
    wild = np.vstack([np.ones((9, 1)), [[1e9]]])
    assert of(CoordinateMedian([Bucketing(2)]), np.hstack([wild] * 20))[0] == 1


def test_byzfl_agrees():
    pytest.importorskip("byzfl", reason="ByzFL is part of the extra bench")
    from byzfl.aggregators import aggregators as theirs
    from byzfl.aggregators import preaggregators

    x = torch.from_numpy(X)
    pairs = [
        (CoordinateMedian(), theirs.Median()),
        (TrimmedMean(3), theirs.TrMean(3)),
        # Its neighbours are n - f - 1 others in place of the paper's n - f - 2.
        (Krum(3), theirs.Krum(4)),
        (MultiKrum(3, 7), theirs.MultiKrum(4)),
        (GeometricMedian(iterations=5000), theirs.GeometricMedian(nu=1e-6, T=5000)),
        (CenteredClipping(2.0, 3), theirs.CenteredClipping(L=3, tau=2.0)),
    ]
    for rule, other in pairs:
        np.testing.assert_allclose(of(rule), np.asarray(other(x)), rtol=1e-5, atol=1e-5)
        if rule.before == [] and not isinstance(rule, CenteredClipping):
            rule = rule.fresh()
            rule.before = [NNM(3)]
            np.testing.assert_allclose(of(rule), np.asarray(other(preaggregators.NNM(3)(x))), rtol=1e-5, atol=1e-5)


# The vector is all of a message


def test_distances_are_those_of_whole_messages():
    near = {"a": torch.zeros(2), "b": torch.zeros(2)}
    # Each differs in one tensor only, by more than the others differ in both.
    sent = [near, {**near, "a": torch.full((2,), 9.0)}, {**near, "b": torch.full((2,), 9.0)}]
    sent += [{"a": torch.full((2,), 0.1 * place), "b": torch.full((2,), 0.1 * place)} for place in range(4)]
    rule = MultiKrum(2, selected=5)
    for tensors in sent:
        rule.add(tensors, 1)
    weights = rule.client_weights()
    assert weights.tolist() == pytest.approx([0.2, 0, 0, 0.2, 0.2, 0.2, 0.2])


def test_results_are_the_same_bit_for_bit_in_any_order():
    for rule in (GeometricMedian(before=[Bucketing(2)]), CenteredClipping(before=[NNM(3)]), TrimmedMean(2, [NNM(2)])):
        first = of(rule.fresh(), X)
        for order in (np.arange(11)[::-1], DRAWS.permutation(11)):
            assert np.array_equal(of(rule.fresh(), X[order]), first)


def test_ties_of_norm_and_sum_do_not_go_by_the_order():
    tied = np.tile([[1.0, -1, -1], [-1, -1, 1], [1, -1, -1], [-1, -1, 1], [1, 1, 1]], 2)
    for rule in (Krum(1), MultiKrum(1, selected=2), GeometricMedian(), CenteredClipping(before=[NNM(1)])):
        first = of(rule.fresh(), tied)
        for order in ([4, 3, 2, 1, 0], [1, 0, 2, 4, 3], [3, 4, 0, 1, 2]):
            assert np.array_equal(of(rule.fresh(), tied[order]), first)


def test_equal_arrivals_of_other_weights_do_not_go_by_the_order():
    results = []
    for weights in ((1, 5, 2, 4), (5, 1, 2, 4)):
        rule = NormBound(before=[Bucketing(2)])
        for value, weight in zip((1.0, 1.0, 3.0, -2.0), weights, strict=True):
            rule.add({"w": torch.tensor([value])}, weight)
        rule.prepare({}, seed=0)
        results.append(rule.result()["w"])
    assert torch.equal(*results)


def test_integers_are_medians_whatever_the_rule():
    rule = NormBound()
    for count, flag in ((5, True), (2**60, False), (7, True)):
        rule.add({"w": torch.ones(2), "count": torch.tensor(count), "flag": torch.tensor(flag)}, 1)
    assert {name: each.tolist() for name, each in rule.result().items()} == {"w": [1, 1], "count": 7, "flag": True}


def test_a_mask_of_infinities_is_kept():
    mask = torch.tensor([0.0, -torch.inf])
    rule = Krum(1)
    for place in range(5):
        rule.add({"mask": mask, "w": torch.tensor([float(place)])}, 1)
    assert torch.equal(rule.result()["mask"], mask)


@pytest.mark.parametrize("rule", [CoordinateMedian(), TrimmedMean(1), Krum(1), GeometricMedian(), NormBound()])
def test_one_client_that_fills_a_mask_changes_nothing(rule):
    mask = torch.tensor([0.0, -torch.inf])
    found = []
    for last in (mask, torch.zeros(2)):
        for place in range(6):
            rule.add({"mask": mask if place < 5 else last, "w": torch.tensor([float(place)])}, 1)
        rule.prepare({"mask": mask, "w": torch.zeros(1)}, 0)
        found.append(rule.result())
        rule.clear()
    assert torch.equal(found[1]["mask"], mask)
    assert found[0]["w"] == found[1]["w"] != 0


def test_what_is_not_finite_counts_as_byzantine():
    rule = TrimmedMean(2)
    for value in (1.0, torch.nan, 2.0, 3.0, 1e200, 90.0):
        rule.add({"w": torch.tensor([value], dtype=torch.float64)}, 1)
    # NaN, and what float64 cannot square, are the two.
    assert rule.result()["w"].item() == pytest.approx(24.0)
    rule = TrimmedMean(0)
    rule.add({"w": torch.tensor([torch.nan])}, 1)
    rule.add({"w": torch.tensor([torch.nan])}, 1)
    rule.add({"w": torch.tensor([1.0])}, 1)
    assert rule.result()["w"].item() == 1


def test_sixteen_bits_may_stay_as_precise_as_they_are():
    rule = TrimmedMean(0)
    for value in (1.0, 1.0, 2.0):
        rule.add({"w": torch.tensor([value], dtype=torch.bfloat16)}, 1)
    assert rule.result(least=torch.float32)["w"].item() == torch.tensor(4 / 3).item()
    assert rule.result()["w"].dtype == torch.bfloat16


@pytest.mark.parametrize("rule", [WeightedMean(), CoordinateMedian(), Krum(0)])
def test_floats_of_one_byte_become_as_precise_as_is_asked(rule):
    for value in (1.0, 1.0, 1.0):
        rule.add({"w": torch.full((2,), value).to(torch.float8_e4m3fn), "no": torch.empty(0).to(torch.float8_e5m2)}, 1)
    found = rule.result(least=torch.float32)
    assert {each.dtype for each in found.values()} == {torch.float32}
    assert found["w"].tolist() == [1, 1]
    assert rule.result()["w"].dtype == torch.float8_e4m3fn


# Too few arrivals

REFUSED = [
    (TrimmedMean(2), 4, r"TrimmedMean.*byzantine=2.*there"),
    (Krum(3), 8, r"byzantine=3.*there.*8"),
    (Krum(0.4), 10, "byzantine=4"),
    (MultiKrum(0, 3), 2, r"MultiKrum.*byzantine=0.*there"),
    (CoordinateMedian([NNM(2)]), 4, r"NearestNeighborMixing.*byzantine=2"),
    (TrimmedMean(2, [Bucketing(2)]), 8, r"TrimmedMean.*byzantine=2.*there"),
]


@pytest.mark.parametrize(("rule", "arrivals", "message"), REFUSED)
def test_too_few_arrivals_are_refused(rule, arrivals, message):
    with pytest.raises(ValueError, match=message):
        rule.check_arrivals(arrivals)
    for place in range(arrivals):
        rule.add({"w": torch.tensor([float(place)])}, 1)
    with pytest.raises(ValueError, match=message):
        rule.result()


def test_a_share_shrinks_with_the_cohort():
    rule = TrimmedMean(0.3)
    assert [rule.allowed(arrivals) for arrivals in (1, 3, 4, 9, 10)] == [0, 0, 1, 2, 3]
    for arrivals in range(1, 20):
        rule.check_arrivals(arrivals)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrimmedMean(0.5), r"byzantine.*0\.5"),
        (lambda: Krum(-1), r"byzantine.*-1"),
        (lambda: NNM(True), "byzantine must be an integer, but is True"),
        (lambda: Bucketing(0), r"size.*0"),
        (lambda: GeometricMedian(smoothing=0), r"smoothing.*0"),
        (lambda: CenteredClipping(radius=-1), r"radius.*-1"),
        (lambda: NormBound(relative=0), r"relative.*0"),
        (lambda: CoordinateMedian(NNM(1)), r"before.*NearestNeighborMixing"),
        (lambda: CoordinateMedian([Krum(1)]), r"before.*NearestNeighborMixing"),
    ],
)
def test_arguments_are_checked(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_the_median_weight_is_of_those_that_weigh():
    rule = NormBound(10.0, relative_weight=1.0)
    for value, weight in ((1.0, 10), (2.0, 0), (3.0, 0), (4.0, 0)):
        rule.add({"w": torch.tensor([value])}, weight)
    assert rule.result()["w"].item() == 1.0


def test_arrivals_without_weight_are_refused_where_weights_count():
    rule = NormBound()
    rule.add({"w": torch.ones(1)}, 0.0)
    with pytest.raises(ValueError, match=r"1.*arrivals.*0"):
        rule.result()


def test_a_default_device_changes_no_draw():
    gram = torch.eye(5)
    expected = Bucketing(2).matrix(gram, 0, torch.Generator().manual_seed(0))
    with torch.device("meta"):
        assert torch.equal(Bucketing(2).matrix(gram, 0, torch.Generator().manual_seed(0)), expected)
