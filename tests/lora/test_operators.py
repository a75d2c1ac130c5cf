"""One contract for every registered operator, then what is particular to each."""

import itertools
import math
from abc import ABCMeta

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from lightning_lowrank import lora
from lightning_lowrank.lora import (
    FFA,
    RBLA,
    CoLR,
    FedEx,
    FedInc,
    FedRPCA,
    FedSA,
    FedSVD,
    FLoRA,
    FLoRIST,
    LoRAA2,
    LoRAFair,
    LowRankPair,
    Operator,
    ProductSum,
    RaFLoRA,
    RoLoRA,
    SumProduct,
    ZeroPadding,
    convergence_constants,
)
from lightning_lowrank.lora.operators.clustering import agglomerate
from lightning_lowrank.lora.operators.robust_pca import principal_component_pursuit
from lightning_lowrank.lora.pairs import inner_products, normalised_weights
from lightning_lowrank.registry import subclasses_by_name
from lightning_lowrank.seeding import derive_seed
from lightning_lowrank.testing import check_operator
from tests.grids import pairwise

VARIANTS = {
    "SumProduct": [{"split": split, "method": method} for split in ("left", "balanced") for method in ("exact",)],
    "LoRAFair": [{"correction": "ridge"}, {"correction": "cosine", "steps": 20}],
    "CoLR": [{"trained_factor": "B"}, {"trained_factor": "A"}],
    "FedInc": [{"clusters": 1}, {"clusters": 2}],
    "FedSVD": [{}, {"period": 2}],
    # These keep what they are given; others have tests of their own.
    "FLoRIST": [{"threshold": 1.0}],
    "FedRPCA": [{"scale": 1.0}],
}
OPERATORS = {
    name: kind for name, kind in subclasses_by_name(Operator).items() if kind.__module__.startswith("lightning_lowrank")
}
CASES = [
    pytest.param(kind(**arguments), round, id="-".join(map(str, (name, *arguments.values(), f"round{round}"))))
    for name, kind in OPERATORS.items()
    for arguments in VARIANTS.get(name, [{}])
    for round in ((0, 1) if name in ("RoLoRA", "LoRAA2") else (0,))
]
every_operator = pytest.mark.parametrize(("operator", "round"), CASES)
M, N = 7, 5
WEIGHTS = [3, 1, 0, 4]
EQUAL, MIXED = [2, 2, 2, 2], [1, 5, 3, 5]
EXACT = (FLoRA, FLoRIST, FFA, RoLoRA, LoRAA2, CoLR, FedEx)


def clients_of(operator, ranks, round=0, *, shape=(M, N), alpha=None, seed=0, dtype=torch.float64):
    """Clients after a round's training, with what they may not train in common; scalings are alpha / rank or 0.5."""
    draws = torch.Generator().manual_seed(seed)
    largest = max(ranks)
    common_B = torch.randn(shape[0], largest, generator=draws, dtype=torch.float64)
    common_A = torch.randn(largest, shape[1], generator=draws, dtype=torch.float64)
    if isinstance(operator, CoLR):
        start = operator.fresh(shape, largest, round=round, seed=seed, dtype=torch.float64)
        common_B, common_A = start.B, start.A
    pairs = []
    for rank in ranks:
        scaling = 0.5 if alpha is None else alpha / rank
        B = torch.randn(shape[0], rank, generator=draws, dtype=torch.float64)
        A = torch.randn(rank, shape[1], generator=draws, dtype=torch.float64)
        if "A" not in operator.trained(round):
            A = common_A[:rank].clone()
        if "B" not in operator.trained(round):
            B = common_B[:, :rank].clone()
            if alpha is not None and not isinstance(operator, CoLR):
                # What an earlier round sent down has the difference of the scalings in B.
                B *= (alpha / largest) / scaling
        pairs.append(LowRankPair(B.to(dtype), A.to(dtype), scaling))
    return pairs


def ranks_for(operator, ranks):
    return ranks if operator.mixed_ranks else [3] * len(ranks)


def run(operator, pairs, round=0, weights=WEIGHTS, **settings):
    return operator.aggregate(pairs, None if weights is None else weights[: len(pairs)], round=round, **settings)


def dense(pair):
    """The product by its definition, number by number."""
    B, A = pair.B.double().numpy(), pair.A.double().numpy()
    return torch.from_numpy(pair.scaling * np.einsum("ij,jk->ik", B, A))


def effective(result, pair):
    """What is added to the base weight of before the round."""
    return dense(pair) + (0 if result.change is None else dense(result.change))


def mean_of_products(pairs, weights=WEIGHTS):
    return sum(weight * dense(pair) for weight, pair in zip(weights, pairs, strict=True)) / sum(weights)


def slots(pairs, weights, owned):
    """The mean of each slot's column and row, slot by slot, with scalings folded into the columns."""
    found = []
    for slot in range(max(pair.rank for pair in pairs)):
        owners = [(w, p) for w, p in zip(weights, pairs, strict=True) if p.rank > slot]
        total = sum(w for w, _ in owners) if owned else sum(weights)
        column = sum(w * p.scaling * p.B[:, slot] for w, p in owners) / total
        found.append((column, sum(w * p.A[slot] for w, p in owners) / total))
    return found


def slot_product(pairs, weights, owned):
    return sum(torch.outer(column, row) for column, row in slots(pairs, weights, owned))


def mean_by_parts(pairs, weights):
    """raFLoRA's Eq. 8 from dense matrices: the part between two ranks, averaged over the clients that have it."""
    bounds = [0, *sorted({pair.rank for pair in pairs})]
    total = torch.zeros(pairs[0].shape, dtype=torch.float64)
    for low, high in itertools.pairwise(bounds):
        owners = [(w, p) for w, p in zip(weights, pairs, strict=True) if p.rank >= high]
        parts = [w * p.scaling * p.B[:, low:high] @ p.A[low:high] for w, p in owners]
        total += sum(parts) / sum(w for w, _ in owners)
    return total


def ridge(pairs, weights, penalty=0.01):
    columns, rows = zip(*slots(pairs, weights, owned=False), strict=True)
    # The client of largest rank's scaling is the one that the correction is penalised at.
    scaling = max(pairs, key=lambda pair: pair.rank).scaling
    B, A = torch.stack(columns, dim=1) / scaling, torch.stack(rows)
    target = mean_of_products(pairs, weights) / scaling - B @ A
    # Least squares with the penalty as further rows: [Aᵀ; √λ I] ΔBᵀ = [targetᵀ; 0].
    tall = torch.cat([A.T, math.sqrt(penalty) * torch.eye(len(A))])
    wanted = torch.cat([target.T, torch.zeros(len(A), len(B))])
    return scaling * (B + torch.linalg.lstsq(tall, wanted).solution.T) @ A


def server_expected(operator, pairs, weights):
    """The server's effective update, from dense matrices."""
    if isinstance(operator, EXACT):
        return mean_of_products(pairs, weights)
    if isinstance(operator, SumProduct):
        rank = max(pair.rank for pair in pairs)
        by_parts = isinstance(operator, RaFLoRA)
        mean = mean_by_parts(pairs, weights) if by_parts else mean_of_products(pairs, weights)
        left, values, right = np.linalg.svd(mean.numpy())
        return torch.from_numpy(left[:, :rank] * values[:rank] @ right[:rank])
    if isinstance(operator, LoRAFair):
        return ridge(pairs, weights)
    return slot_product(pairs, weights, owned=isinstance(operator, (RBLA, FedSA, FedInc)))


def test_every_exported_operator_is_under_contract():
    exported = {name for name in lora.__all__ if isinstance(getattr(lora, name), ABCMeta)}
    exported = {name for name in exported if issubclass(getattr(lora, name), Operator)} - {"Operator"}
    assert exported == set(OPERATORS)
    assert len(exported) == 17


@every_operator
def test_contract(operator, round):
    check_operator(operator, exact=isinstance(operator, EXACT), rounds=[round])


def test_contract_of_the_iterative_svd():
    check_operator(SumProduct(method="iterative"), rounds=[0])


@pairwise(strength=1)
@every_operator
@pytest.mark.parametrize("rank", [1, 3, 5])
def test_one_clients_factors_come_back_exactly(operator, round, rank):
    (pair,) = clients_of(operator, [rank], round, dtype=torch.float32)
    result = run(operator, [pair], round)
    factorises = isinstance(operator, FedSVD) and operator.period == 1
    if not factorises and not isinstance(operator, (SumProduct, FLoRA, CoLR, FedRPCA)):
        assert torch.equal(result.clients[0].B, pair.B)
        assert torch.equal(result.clients[0].A, pair.A)


@pairwise(strength=1)
@every_operator
@pytest.mark.parametrize("alpha", [None, 6.0], ids=["constant", "alpha/r"])
@pytest.mark.parametrize("ranks", [[1] * 4, EQUAL, [5] * 4, MIXED], ids=str)
def test_the_server_has_what_dense_matrices_give(operator, round, ranks, alpha):
    if ranks == MIXED and not operator.mixed_ranks:
        pytest.skip("for one rank only")
    if isinstance(operator, LoRAFair) and operator.correction == "cosine":
        pytest.skip("has a test of its own")
    pairs = clients_of(operator, ranks, round, alpha=alpha)
    result = run(operator, pairs, round)
    torch.testing.assert_close(effective(result, result.server), server_expected(operator, pairs, WEIGHTS))


@every_operator
def test_layers_are_aggregated_one_by_one(operator, round):
    shapes = {"first": (6, 4), "second": (3, 8)}
    layers = {
        name: clients_of(operator, [2, 2, 2], round, shape=shape, seed=number)
        for number, (name, shape) in enumerate(shapes.items())
    }
    clients = [{name: layers[name][client] for name in shapes} for client in range(3)]
    together = operator.aggregate_model(clients, [1, 2, 3], round=round, seed=4)
    assert list(together) == list(shapes)
    for name in shapes:
        alone = operator.aggregate(layers[name], [1, 2, 3], round=round, seed=derive_seed(4, name))
        assert torch.equal(together[name].server.B, alone.server.B)
        assert torch.equal(together[name].server.A, alone.server.A)


def nan_factor(pairs):
    pairs[1].A[0, 0] = math.nan


def infinite_factor(pairs):
    pairs[1].B[0, 0] = -math.inf


def replace(client, **changes):
    def change(pairs):
        pair = pairs[client]
        pairs[client] = LowRankPair(**{"B": pair.B, "A": pair.A, "scaling": pair.scaling, **changes})

    return change


def missing(pairs):
    pairs[1] = None


def other_dtype(pairs):
    pairs[1] = LowRankPair(pairs[1].B.float(), pairs[1].A.float(), 0.5)


@pairwise(strength=1)
@every_operator
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (nan_factor, "client 1's A must be finite"),
        (infinite_factor, "client 1's B must be finite"),
        (missing, "client 1 has no factors"),
        (replace(2, scaling=0.7), "all clients must have one alpha"),
        (replace(1, B=torch.ones(M, 6).double(), A=torch.ones(6, N).double()), "client 1's rank must be at most 5"),
        (replace(1, B=torch.ones(M + 1, 2).double()), "pairs must be of one weight"),
        (replace(1, B=torch.ones(M, 0).double(), A=torch.ones(0, N).double()), "client 1's rank must be at least 1"),
        (other_dtype, "pairs must have one dtype"),
        (list.clear, "pairs must hold at least one"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_pairs_are_refused(operator, round, spoil, message):
    pairs = clients_of(operator, EQUAL, round)
    spoil(pairs)
    with pytest.raises(ValueError, match=message):
        operator.aggregate(pairs, round=round)
    if pairs:
        layers = [{"same": clients_of(operator, [2], round)[0], "other": pair} for pair in pairs]
        with pytest.raises(ValueError, match=f"layer 'other': {message}"):
            operator.aggregate_model(layers, round=round)


@pairwise(strength=1)
@every_operator
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": [1, 2, 3]}, "one number for each of 4"),
        ({"weights": [1, 2, -1, 3]}, "client 2's is -1"),
        ({"weights": [1, 2, math.nan, 3]}, "client 2's is nan"),
        ({"weights": [1, math.inf, 1, 3]}, "client 1's is inf"),
        ({"weights": [0, 0, 0, 0]}, "all are zero"),
        ({"ranks": [2, 2, 2]}, "ranks must be one for each of 4"),
        ({"ranks": [2, 2, 2, 6]}, r"ranks\[3\] must be at most 5"),
        ({"ranks": [2, 2, 0, 2]}, r"ranks\[2\] must be at least 1"),
        ({"scalings": [1, 1, 1]}, "scalings must be one for each of 4"),
        ({"scalings": [1, 1, 1, 0]}, r"scalings\[3\] must be above 0"),
        ({"round": -1}, "round must be"),
        ({"previous": LowRankPair(torch.ones(3, 1), torch.ones(1, 3))}, "previous must be of the clients'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_settings_are_refused(operator, round, settings, message):
    pairs = clients_of(operator, EQUAL, round)
    with pytest.raises(ValueError, match=message):
        operator.aggregate(pairs, **{"round": round, **settings})


@every_operator
def test_a_client_without_a_layer_is_named(operator, round):
    pair = LowRankPair(torch.ones(4, 2), torch.ones(2, 4))
    full, less = {"a": pair, "b": pair}, {"a": pair}
    for clients, client in (([full, less], 1), ([less, full], 0)):
        with pytest.raises(ValueError, match=f"client {client} lacks 'b'"):
            operator.aggregate_model(clients, round=round)
    with pytest.raises(ValueError, match="at least one client"):
        operator.aggregate_model([])
    assert operator.aggregate_model([{}, {}]) == {}


@pytest.mark.parametrize("rule", [lambda rank: 1.0, lambda rank: 6 / rank, lambda rank: 6 / math.sqrt(rank)])
def test_one_alpha_is_accepted_by_any_rule(rule):
    pairs = [LowRankPair(pair.B, pair.A, rule(pair.rank)) for pair in clients_of(SumProduct(), [1, 3, 5, 2])]
    result = SumProduct().aggregate(pairs, WEIGHTS)
    torch.testing.assert_close(dense(result.server), mean_of_products(pairs))


@pytest.mark.parametrize(
    ("operator", "round", "factor"),
    [
        (FFA(), 0, "A"),
        (FedSVD(), 0, "A"),
        (RoLoRA(), 0, "A"),
        (RoLoRA(), 1, "B"),
        (LoRAA2(), 2, "A"),
        (CoLR(), 0, "A"),
        (CoLR("A"), 3, "B"),
    ],
    ids=str,
)
def test_a_factor_that_was_not_trained_must_be_common(operator, round, factor):
    pairs = clients_of(operator, MIXED, round)
    getattr(pairs[2], factor)[0, 0] += 1e-12
    with pytest.raises(ValueError, match=f"{factor} is not trained in round {round}.*client 2's differs"):
        operator.aggregate(pairs, round=round)


def test_the_schedules_of_alternating_operators():
    """RoLoRA's odd rounds, counted from 1, and LoRA-A²'s even rounds, counted from 0, train B: the first one does."""
    for operator in (RoLoRA(), LoRAA2()):
        assert [operator.trained(round) for round in range(4)] == [{"B"}, {"A"}, {"B"}, {"A"}]


@pytest.mark.parametrize(
    ("operator", "round", "trained", "up", "down", "change"),
    [
        (ProductSum(), 0, "AB", "AB", "AB", ""),
        (SumProduct(), 1, "AB", "AB", "AB", ""),
        (RBLA(), 0, "AB", "AB", "AB", ""),
        (RaFLoRA(), 0, "AB", "AB", "AB", ""),
        (ZeroPadding(), 0, "AB", "AB", "AB", ""),
        (FedInc(), 0, "AB", "AB", "AB", ""),
        (LoRAFair(), 0, "AB", "AB", "AB", ""),
        (FLoRA(), 0, "AB", "AB", "", "AB"),
        (FLoRIST(), 0, "AB", "AB", "", "AB"),
        (FedRPCA(), 0, "AB", "AB", "AB", ""),
        (FedEx(), 0, "AB", "AB", "AB", "AB"),
        (FedSA(), 0, "AB", "A", "A", ""),
        (FFA(), 1, "B", "B", "B", ""),
        (FedSVD(), 0, "B", "B", "AB", ""),
        (FedSVD(period=2), 2, "B", "B", "B", ""),
        (RoLoRA(), 1, "A", "A", "A", ""),
        (LoRAA2(), 2, "B", "B", "B", ""),
        (CoLR(), 1, "B", "B", "", "B"),
        (CoLR("A"), 0, "A", "A", "", "A"),
    ],
    ids=str,
)
def test_what_crosses_the_wire(operator, round, trained, up, down, change):
    assert operator.trained(round) == set(trained)
    assert operator.sent_up(round) == set(up)
    assert operator.sent_down(round) == set(down)
    assert operator.sent_down_of_change(round) == set(change)


def test_identities_between_operators():
    pairs = clients_of(ProductSum(), EQUAL)
    sums = run(ProductSum(), pairs).server
    for operator in (RBLA(), ZeroPadding(), FedInc(clusters=1), FedSA(), FedEx()):
        other = run(operator, pairs).server
        torch.testing.assert_close(other.B, sums.B)
        torch.testing.assert_close(other.A, sums.A)
    shared = clients_of(FFA(), EQUAL)
    torch.testing.assert_close(dense(run(FFA(), shared).server), dense(run(SumProduct(), shared).server))
    torch.testing.assert_close(dense(run(FFA(), shared).server), dense(run(ProductSum(), shared).server))


def test_product_sum_needs_one_rank():
    with pytest.raises(ValueError, match=r"ProductSum needs clients of one rank.*\[1, 5, 3, 5\].*RBLA"):
        run(ProductSum(), clients_of(ProductSum(), MIXED))
    with pytest.raises(ValueError, match="ProductSum needs clients of one rank"):
        run(ProductSum(), clients_of(ProductSum(), EQUAL), ranks=[2, 2, 2, 1])


@pytest.mark.parametrize("split", ["left", "balanced"])
def test_sum_product_truncates_to_each_clients_rank(split):
    pairs = clients_of(SumProduct(), MIXED, alpha=6.0)
    left, values, right = np.linalg.svd(mean_of_products(pairs).numpy())
    for pair in run(SumProduct(split), pairs).clients:
        rank = pair.rank
        best = torch.from_numpy(left[:, :rank] * values[:rank] @ right[:rank])
        torch.testing.assert_close(dense(pair), best)
        wanted = torch.from_numpy(values[:rank] / pair.scaling)
        if split == "left":
            torch.testing.assert_close(pair.A @ pair.A.T, torch.eye(rank).double())
            torch.testing.assert_close(pair.B.T @ pair.B, wanted.square().diag())
        else:
            torch.testing.assert_close(pair.A @ pair.A.T, wanted.diag())
            torch.testing.assert_close(pair.B.T @ pair.B, wanted.diag())


def test_fedsvd_factorises_the_mean_as_the_paper_does():
    """With one rank: U Σ and Vᵀ of the SVD of mean(B) A, up to the sign of each singular pair."""
    pairs = clients_of(FedSVD(), EQUAL)
    mean = sum(weight / 8 * pair.B for pair, weight in zip(pairs, WEIGHTS, strict=True)) @ pairs[0].A
    left, values, right = np.linalg.svd(mean.numpy())
    for round, pair in ((0, run(FedSVD(), pairs).server), (1, run(FedSVD(2), pairs, round=1).clients[2])):
        signs = torch.from_numpy(right[:2] * pair.A.numpy()).sum(1).sign()
        torch.testing.assert_close(pair.A, signs[:, None] * torch.from_numpy(right[:2]), msg=str(round))
        torch.testing.assert_close(pair.B, signs * torch.from_numpy(left[:, :2] * values[:2]))
    kept = run(FedSVD(2), pairs, round=2).server
    assert torch.equal(kept.A, pairs[0].A)
    zero = run(FedSVD(), [LowRankPair(torch.zeros_like(pair.B), pair.A, 0.5) for pair in pairs]).server
    torch.testing.assert_close(zero.A @ zero.A.T, torch.eye(2).double())
    assert not zero.B.any()


def test_flora_stacks_with_the_weights_folded_into_b():
    pairs = clients_of(FLoRA(), EQUAL)
    change = run(FLoRA(), pairs).change
    torch.testing.assert_close(change.B, torch.cat([pair.B * w / 8 for pair, w in zip(pairs, WEIGHTS, strict=True)], 1))
    torch.testing.assert_close(change.A, torch.cat([pair.A for pair in pairs]))
    assert change.scaling == 0.5


def test_fedsa_leaves_b_with_its_client():
    pairs = clients_of(FedSA(), MIXED, alpha=6.0)
    result = run(FedSA(), pairs)
    rows = torch.stack([row for _, row in slots(pairs, WEIGHTS, owned=True)])
    for pair, received in zip(pairs, result.clients, strict=True):
        assert torch.equal(received.B, pair.B)
        torch.testing.assert_close(received.A, rows[: pair.rank])


@pytest.mark.parametrize("operator", [FLoRA(), CoLR()], ids=repr)
def test_a_default_device_changes_no_draw(operator):
    expected = operator.fresh((4, 3), 2)
    with torch.device("meta"):
        drawn = operator.fresh((4, 3), 2)
    assert torch.equal(drawn.B, expected.B)
    assert torch.equal(drawn.A, expected.A)


def test_clients_of_smaller_rank_lack_only_their_slots_of_fedex():
    pairs = clients_of(FedEx(), MIXED)
    result = run(FedEx(), pairs)
    exact = mean_of_products(pairs)
    torch.testing.assert_close(effective(result, result.clients[1]), exact)
    lost = LowRankPair(result.server.B[:, 1:], result.server.A[1:], 0.5)
    torch.testing.assert_close(effective(result, result.clients[0]) + dense(lost), exact)


def test_the_residual_of_fedex_is_as_small_as_the_clients_disagreement():
    pairs = clients_of(FFA(), EQUAL)
    change = run(FedEx(), pairs).change
    assert change.A.abs().max() < 1e-14
    assert change.B.abs().max() > 0.1


@pytest.mark.parametrize(
    ("ranks", "rank"), [(EQUAL, 2 * (len(EQUAL) - 1)), (MIXED, sum(MIXED) - min(MIXED)), ([3], 1), ([1, 3, 3], 6)]
)
def test_the_residual_of_fedex_has_no_slot_that_it_does_not_need(ranks, rank):
    pairs = clients_of(FedEx(), ranks)
    result = run(FedEx(), pairs)
    assert result.change.rank == rank
    torch.testing.assert_close(effective(result, result.server), mean_of_products(pairs, WEIGHTS[: len(ranks)]))


def test_the_residual_of_fedex_leaves_out_clients_of_no_weight():
    pairs = clients_of(FedEx(), EQUAL)
    result = run(FedEx(), pairs, weights=[0.0] * (len(EQUAL) - 1) + [2.0])
    assert dense(result.change).abs().max() == 0
    torch.testing.assert_close(dense(result.server), dense(pairs[-1]))


def cosine_by_autograd(pairs, weights, operator):
    """The same descent with torch's own SGD on the dense matrices, in units that make the curvature about one."""
    columns, rows = zip(*slots(pairs, weights, owned=False), strict=True)
    scaling = max(pairs, key=lambda pair: pair.rank).scaling
    B, A = torch.stack(columns, dim=1) / scaling, torch.stack(rows)
    target = mean_of_products(pairs, weights).flatten()
    unit = (1 / B.square().sum() + 2 * operator.regularization) ** -0.5
    scaled = torch.zeros_like(B, requires_grad=True)
    optimizer = torch.optim.SGD([scaled], lr=operator.learning_rate)
    found = []
    for _ in range(operator.steps + 1):
        optimizer.zero_grad()
        similarity = torch.nn.functional.cosine_similarity(target, ((B + unit * scaled) @ A).flatten(), dim=0)
        loss = 1 - similarity + operator.regularization * (unit * scaled).square().sum()
        found.append((loss.item(), scaling * (B + unit * scaled.detach()) @ A))
        loss.backward()
        optimizer.step()
    return min(found, key=lambda entry: entry[0])[1], [loss for loss, _ in found]


@pytest.mark.parametrize("ranks", [EQUAL, MIXED], ids=str)
@pytest.mark.parametrize("settings", [{}, {"learning_rate": 1.5, "steps": 7, "regularization": 0.2}], ids=str)
def test_lora_fair_by_cosine_descends_as_autograd_does(ranks, settings):
    operator = LoRAFair("cosine", **settings)
    pairs = clients_of(operator, ranks, alpha=6.0)
    expected, losses = cosine_by_autograd(pairs, WEIGHTS, operator)
    assert min(losses) < losses[0]
    torch.testing.assert_close(dense(run(operator, pairs).server), expected)


def test_lora_fair_gets_nearer_to_the_mean_of_products():
    pairs = clients_of(LoRAFair(), EQUAL)
    exact = mean_of_products(pairs)
    away = [
        (dense(run(operator, pairs).server) - exact).norm()
        for operator in (LoRAFair(regularization=1e-6), LoRAFair(), LoRAFair(regularization=100), ProductSum())
    ]
    assert away == sorted(away)
    assert away[0] < 0.95 * away[3]
    for operator in (LoRAFair(), LoRAFair("cosine")):
        zero = [LowRankPair(torch.zeros(4, 2), torch.ones(2, 3))] * 2
        assert not run(operator, zero).server.product().any()


@pytest.mark.parametrize(
    ("value", "norm"),
    [
        (1e18, r"2\.4e\+18"),
        # A processor's rounding decides whether the pivot of one of these is positive.
        (0.9e18, r"2\.2e\+18"),
        (1.1e18, r"2\.7e\+18"),
        (1.3e12, r"3\.2e\+12"),
    ],
)
def test_lora_fair_says_that_factors_are_too_large(value, norm):
    pairs = [LowRankPair(torch.zeros(4, 2), torch.full((2, 3), value))] * 2
    with pytest.raises(ValueError, match=rf"factors A has the norm {norm}, too large for regularization=0\.01"):
        run(LoRAFair(), pairs)


def test_lora_fair_takes_large_factors_that_are_independent_or_padded():
    large = LowRankPair(torch.ones(4, 2), 1e6 * torch.eye(2, 3))
    smaller = LowRankPair(torch.ones(4, 1), 1e6 * torch.eye(1, 3))
    torch.testing.assert_close(run(LoRAFair(), [large, large]).server.product(), large.product())
    # The second row of the mean is zero.
    padded = LowRankPair(torch.cat([smaller.B, torch.zeros(4, 1)], 1), torch.cat([smaller.A, torch.zeros(1, 3)]))
    torch.testing.assert_close(run(LoRAFair(), [smaller, padded]).server.product(), smaller.product())


def test_colr_draws_an_orthonormal_factor_each_round():
    for trained, frozen, length in (("B", "A", N), ("A", "B", M)):
        operator = CoLR(trained)
        pair = operator.fresh((M, N), 5, round=2, seed=1, dtype=torch.float64)
        basis = getattr(pair, frozen).reshape(5, length) if frozen == "A" else pair.B.T
        torch.testing.assert_close(basis @ basis.T, torch.eye(5).double())
        assert not getattr(pair, trained).any()
        small = operator.fresh((M, N), 2, round=2, seed=1, dtype=torch.float64)
        torch.testing.assert_close(small.A if frozen == "A" else small.B.T, basis[:2])
        for other in ({"round": 3, "seed": 1}, {"round": 2, "seed": 2}):
            again = operator.fresh((M, N), 5, dtype=torch.float64, **other)
            assert not torch.allclose(getattr(again, frozen), getattr(pair, frozen))
        # A Householder QR's first column would have a first entry of one sign only.
        firsts = [getattr(operator.fresh((M, N), 1, seed=seed), frozen).flatten()[0] for seed in range(20)]
        assert min(firsts) < 0 < max(firsts)


def test_fresh_pairs_are_loras():
    pair = FLoRA().fresh((40, 100), 8, scaling=2.0, round=1, seed=3)
    assert not pair.B.any()
    assert 0.09 < pair.A.abs().max() <= 0.1
    assert abs(pair.A.mean()) < 0.01
    small = FLoRA().fresh((40, 100), 3, round=1, seed=3, dtype=torch.bfloat16)
    assert torch.equal(small.A, pair.A[:3].bfloat16())
    assert not torch.equal(FLoRA().fresh((40, 100), 8, round=2, seed=3).A, pair.A)
    for operator in (FLoRA(), CoLR()):
        with pytest.raises(ValueError, match="rank must be at most 4"):
            operator.fresh((4, 9), 5)


@pytest.mark.parametrize("round", [0, 1])
def test_lora_a2_uploads_the_most_important_ranks_of_the_whole_model(round):
    operator = LoRAA2()
    (trained,) = operator.trained(round)
    received, pairs, scores = {}, {}, {}
    for number, name in enumerate(("x", "y")):
        (received[name],) = clients_of(RBLA(), [4], seed=number)
        pairs[name] = clients_of(RBLA(), [4], seed=10 + number)[0]
        frozen = ({"B", "A"} - {trained}).pop()
        getattr(pairs[name], frozen).copy_(getattr(received[name], frozen))
        change = pairs[name].scaling * (
            torch.einsum("ij,jk->jik", pairs[name].B, pairs[name].A)
            - torch.einsum("ij,jk->jik", received[name].B, received[name].A)
        )
        scores[name] = change.flatten(1).norm(dim=1)
        torch.testing.assert_close(operator.importance(pairs[name], received[name], round), scores[name])
    threshold = torch.cat(list(scores.values())).sort(descending=True).values[2]
    selected = operator.select_ranks(pairs, received, budget=3, round=round)
    assert {name: s.tolist() for name, s in selected.items()} == {
        name: (score >= threshold).nonzero().flatten().tolist() for name, score in scores.items()
    }
    assert sum(map(len, operator.select_ranks(pairs, received, budget=99, round=round).values())) == 8
    with pytest.raises(ValueError, match="budget must be"):
        operator.select_ranks(pairs, received, budget=0, round=round)
    with pytest.raises(ValueError, match="received must have all layers of pairs, but lacks 'y'"):
        operator.select_ranks(pairs, {"x": received["x"]}, budget=1, round=round)
    with pytest.raises(ValueError, match="received must be of the pair's shape"):
        operator.importance(pairs["x"], received["x"].resized(2), round)


def test_lora_a2_adds_the_mean_of_the_uploaded_changes():
    operator = LoRAA2()
    received = clients_of(RBLA(), [3])[0]
    pairs, uploads = [], []
    for seed, chosen in ((1, [0]), (2, [0, 2])):
        trained = LowRankPair(clients_of(RBLA(), [3], seed=seed)[0].B, received.A, received.scaling)
        change = torch.zeros(M, 3).double()
        change[:, chosen] = (trained.B - received.B)[:, chosen]
        uploads.append(change)
        pairs.append(LowRankPair(received.B + change, received.A, received.scaling))
    result = operator.aggregate(pairs, [1, 3])
    torch.testing.assert_close(result.server.B, received.B + uploads[0] / 4 + uploads[1] * 3 / 4)
    assert torch.equal(result.server.A, received.A)


@pytest.mark.parametrize("clusters", [1, 2, 3, 6, 15])
@pytest.mark.parametrize("seed", range(4))
def test_fedinc_clusters_as_scipy_does_on_dense_products(clusters, seed):
    pairs = clients_of(FedInc(), [1, 3, 2, 5, 2, 4, 1, 1, 2, 3, 4, 5], alpha=3.0, seed=seed)
    weights = list(range(1, 13))
    products = torch.stack([dense(pair) for pair in pairs]).flatten(1).numpy()
    distances = np.linalg.norm(products[:, None] - products, axis=-1)
    # SciPy 1.13 makes fewer clusters than clients, however many are asked for.
    tree = linkage(squareform(distances), "average")
    labels = fcluster(tree, clusters, "maxclust") if clusters < 12 else np.arange(12)
    assert len(set(labels)) == min(clusters, 12)
    result = FedInc(clusters).aggregate(pairs, weights)
    for client, received in enumerate(result.clients):
        among = [other for other in range(12) if labels[other] == labels[client]]
        expected = RBLA().aggregate([pairs[i] for i in among], [weights[i] for i in among])
        torch.testing.assert_close(dense(received), dense(expected.server.resized(received.rank)))


@pytest.mark.parametrize("clusters", range(1, 9))
@pytest.mark.parametrize("alike", [[], [4], [7], [2, 2, 2], [3, 4]], ids=str)
def test_agglomeration_makes_as_many_clusters_of_equal_clients_too(alike, clusters):
    """Equal clients, as of a round in which nothing was learnt, are all equally near."""
    points = torch.arange(7.0)
    first = 0
    for count in alike:
        points[first : first + count] = first
        first += count
    found = agglomerate((points[:, None] - points).abs(), clusters)
    assert len(found) == min(clusters, 7)
    assert sorted(client for members in found for client in members) == list(range(7))
    assert found == sorted(map(sorted, found))


def test_agglomeration_goes_by_the_mean_distance():
    """Of 0 and 3 together, 6.2 has distances of 3.2 and 6.2, which are 4.7 in the mean."""
    for last, expected in ((24.0, [[0, 1], [2], [3, 4]]), (25.2, [[0, 1, 2], [3], [4]])):
        points = torch.tensor([0.0, 3.0, 6.2, 20.0, last])
        assert agglomerate((points[:, None] - points).abs(), 3) == expected


def test_fedinc_has_one_clustering_for_the_whole_model():
    def pair(value):
        return LowRankPair(torch.full((3, 1), float(value)), torch.ones(1, 2))

    clients = [{"small": pair(s), "large": pair(v)} for s, v in ((0, 0), (5, 1), (0, 30), (5, 31))]
    result = FedInc().aggregate_model(clients)
    assert [received.B[0].item() for received in result["small"].clients] == [2.5] * 4
    assert [received.B[0].item() for received in result["large"].clients] == [0.5, 0.5, 30.5, 30.5]
    alone = FedInc().aggregate([client["small"] for client in clients])
    assert [received.B[0].item() for received in alone.clients] == [0, 5, 0, 5]


def test_fedinc_clusters_by_distances_not_by_their_squares():
    """6 is 4 away from the mean member of 1, 2, 3, and 4.05 from 10.05; by squares it is 16.7 and 16.4."""
    pairs = [LowRankPair(torch.full((1, 1), value), torch.ones(1, 1)) for value in (1.0, 2.0, 3.0, 10.05, 6.0)]
    received = [pair.B.item() for pair in FedInc().aggregate(pairs).clients]
    assert received == pytest.approx([3.0, 3.0, 3.0, 10.05, 3.0])


def test_fedinc_averages_a_cluster_without_weight():
    pairs = [LowRankPair(torch.full((2, 1), value), torch.ones(1, 2)) for value in (1.0, 10.0, 12.0)]
    result = FedInc().aggregate(pairs, [1, 0, 0])
    assert [received.B[0].item() for received in result.clients] == [1, 11, 11]
    assert result.server.B[0].item() == 1


def test_a_slot_of_clients_without_weight_is_their_mean():
    pairs = clients_of(RBLA(), [1, 2, 2])
    server = RBLA().aggregate(pairs, [1, 0, 0]).server
    torch.testing.assert_close(server.B[:, 0], pairs[0].B[:, 0])
    torch.testing.assert_close(server.B[:, 1], (pairs[1].B[:, 1] + pairs[2].B[:, 1]) / 2)


@pytest.mark.parametrize(
    ("operator", "round", "kept"),
    [
        (RBLA(), 0, "BA"),
        (FedSA(), 0, "BA"),
        (FedInc(), 0, "BA"),
        (ZeroPadding(), 0, "A"),
        (FedEx(), 0, "A"),
        (LoRAFair(), 0, "A"),
        (FFA(), 0, "A"),
        (RoLoRA(), 0, "A"),
        (RoLoRA(), 1, "B"),
        (LoRAA2(), 1, "B"),
    ],
    ids=str,
)
def test_slots_that_no_client_of_the_round_has_are_not_lost(operator, round, kept):
    pairs = clients_of(operator, [1, 2], round)
    (previous,) = clients_of(RBLA(), [4], seed=9)
    previous = previous.resized(4, scaling=0.25)
    server = operator.aggregate(pairs, round=round, previous=previous).server
    assert server.rank == 4
    expected_B = previous.B[:, 2:] * (previous.scaling / server.scaling) if "B" in kept else torch.zeros(M, 2).double()
    expected_A = previous.A[2:] if "A" in kept else torch.zeros(2, N).double()
    torch.testing.assert_close(server.B[:, 2:], expected_B)
    torch.testing.assert_close(server.A[2:], expected_A)
    without = operator.aggregate(pairs, round=round).server
    assert without.rank == 2
    assert torch.equal(server.B[:, :2], without.B)


def test_raflora_keeps_the_part_that_no_client_of_the_round_has():
    pairs, previous = clients_of(RaFLoRA(), [1, 2]), clients_of(RBLA(), [4], seed=9)[0]
    found = RaFLoRA().aggregate(pairs, previous=previous.resized(4, scaling=0.25)).server
    kept = LowRankPair(previous.B[:, 2:], previous.A[2:], previous.scaling)
    left, values, right = np.linalg.svd((mean_by_parts(pairs, [1, 1]) + dense(kept)).numpy())
    torch.testing.assert_close(dense(found), torch.from_numpy(left[:, :4] * values[:4] @ right[:4]))
    assert [pair.rank for pair in RaFLoRA().aggregate(pairs, previous=previous).clients] == [1, 2]


def test_ranks_collapse_with_sum_product_and_not_with_raflora():
    """Wu et al., Theorem 1: what one of four clients has alone falls by a factor of four a round."""
    beyond = {}
    for operator in (SumProduct(), RaFLoRA()):
        server = LowRankPair(torch.eye(4).double() * torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.eye(4, 6).double())
        beyond[type(operator)] = []
        for _ in range(3):
            # Nobody trains.
            pairs = [server.resized(rank) for rank in (2, 2, 2, 4)]
            result = operator.aggregate(pairs)
            constants = convergence_constants(pairs, result)
            beyond[type(operator)].append(constants.energy_beyond)
            server = result.server
    expected = [(scale * 5) / (25 + scale * 5) for scale in (1 / 16, 1 / 256, 1 / 4096)]
    assert beyond[SumProduct] == pytest.approx(expected)
    assert beyond[RaFLoRA] == pytest.approx([5 / 30] * 3)


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.95])
def test_florist_sends_the_fewest_singular_values_that_hold_the_energy(threshold):
    pairs = clients_of(FLoRIST(), MIXED, alpha=6.0)
    left, values, right = np.linalg.svd(mean_of_products(pairs).numpy())
    share = np.cumsum(values**2) / np.sum(values**2)
    rank = next(rank for rank in range(1, 6) if share[rank - 1] >= threshold)
    change = run(FLoRIST(threshold), pairs).change
    assert change.rank == rank
    torch.testing.assert_close(dense(change), torch.from_numpy(left[:, :rank] * values[:rank] @ right[:rank]))
    torch.testing.assert_close(change.A @ change.A.T, torch.eye(rank).double())


def test_florist_of_clients_that_learnt_nothing_changes_nothing():
    pairs = [LowRankPair(torch.zeros(M, 2), torch.ones(2, N)) for _ in range(2)]
    change = FLoRIST().aggregate(pairs).change
    assert change.rank == 1
    assert not dense(change).any()


def test_fedrpca_finds_what_is_common_and_what_is_particular():
    """A matrix of rank one and a few large numbers are told apart exactly (Candès et al., Theorem 1.1)."""
    draws = torch.Generator().manual_seed(1)
    common = torch.outer(torch.randn(80, generator=draws), 1 + torch.rand(20, generator=draws)).double()
    particular = torch.zeros_like(common)
    chosen = torch.randperm(common.numel(), generator=draws)[:40]
    particular.view(-1)[chosen] = 10 * torch.randn(40, generator=draws).double()
    found = principal_component_pursuit(common + particular)
    torch.testing.assert_close(found, common, rtol=1e-5, atol=1e-5)

    before = LowRankPair(torch.randn(80, 1, generator=draws).double(), torch.ones(1, 3).double(), 0.5)
    columns = (common + particular).split(1, dim=1)
    pairs = [LowRankPair(before.B + column, before.A.clone(), 0.5) for column in columns]
    weights = torch.arange(1.0, 21.0).double()
    server = FedRPCA(scale=3.0).aggregate(pairs, weights, previous=before).server
    expected = before.B + ((common + 3 * particular) @ (weights / weights.sum()))[:, None]
    torch.testing.assert_close(server.B, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(server.A, before.A)


@pytest.mark.slow
def test_fedrpca_knows_neither_the_order_of_clients_nor_those_without_weight():
    pairs = clients_of(FedRPCA(), EQUAL)
    found = run(FedRPCA(), pairs).server
    assert (found.B - run(ProductSum(), pairs).server.B).abs().max() > 1e-3
    order = [3, 0, 1]
    other = FedRPCA().aggregate([pairs[client] for client in order], [8.0, 6.0, 2.0]).server
    torch.testing.assert_close(other.B, found.B, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(other.A, found.A, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_fedrpca_minimises_what_it_says():
    """No other division has a smaller ‖L‖_* + λ‖S‖_1."""
    matrix = torch.randn(12, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    weight = 12**-0.5
    low = principal_component_pursuit(matrix)
    sparse = matrix - low
    sparse = sparse * (sparse.abs() > 1e-6)

    def objective(part):
        return torch.linalg.matrix_norm(part, "nuc") + weight * (matrix - part).abs().sum()

    least, draws = objective(low) * (1 - 1e-4), torch.Generator().manual_seed(5)
    for size in (1e-3, 1e-2, 1e-1, 1.0):
        for _ in range(50):
            away = torch.outer(torch.randn(12, generator=draws), torch.randn(5, generator=draws)).double()
            assert objective(low + size * away) >= least
            assert objective(low - size * sparse) >= least
    assert 0 < torch.linalg.matrix_rank(low, atol=1e-6) < 5


@pytest.mark.parametrize("operator", [SumProduct(), FLoRA(), CoLR(), FedSVD()], ids=str)
def test_the_servers_rank_does_not_shrink(operator):
    pairs = clients_of(operator, [1, 2])
    previous = clients_of(RBLA(), [4])[0]
    result = operator.aggregate(pairs, previous=previous)
    assert result.server.rank == 4
    assert [pair.rank for pair in result.clients] == [1, 2]
    torch.testing.assert_close(effective(result, result.server), mean_of_products(pairs, [1, 1]))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SumProduct(split="right"), "split must be one of 'left', 'balanced'"),
        (lambda: SumProduct(method="auto"), "method must be one of"),
        (lambda: LoRAFair("euclidean"), "correction must be one of"),
        (lambda: LoRAFair(regularization=0), "regularization must be above 0"),
        (lambda: LoRAFair(learning_rate=math.nan), "learning_rate must be above 0"),
        (lambda: LoRAFair(steps=0), "steps must be at least 1"),
        (lambda: CoLR("C"), "trained_factor must be one of"),
        (lambda: FedInc(0), "clusters must be at least 1"),
        (lambda: FedSVD(0), "period must be at least 1"),
        (lambda: FLoRIST(0.0), "threshold must be above 0"),
        (lambda: FLoRIST(1.1), "threshold must be above 0 and at most 1"),
        (lambda: FedRPCA(-1.0), "scale must be at least 0"),
        (lambda: FedRPCA(sparsity=0.0), "sparsity must be above 0"),
        (lambda: FedRPCA(iterations=0), "iterations must be at least 1"),
        (lambda: LowRankPair(torch.ones(3, 2), torch.ones(3, 2)), "B must have as many columns as A has rows"),
        (lambda: LowRankPair(torch.ones(3), torch.ones(3, 2)), "B must be a matrix"),
        (lambda: LowRankPair(torch.ones(3, 1), torch.ones(1, 2).double()), "one dtype and device"),
        (lambda: LowRankPair(torch.ones(3, 1), torch.ones(1, 2), 0.0), "scaling must be above 0"),
        (lambda: LowRankPair(torch.ones(3, 1), torch.ones(1, 2)).resized(0), "rank must be at least 1"),
        (lambda: LowRankPair(torch.ones(3, 1), torch.ones(1, 2)).resized(1, math.inf), "scaling must be above 0"),
    ],
)
def test_wrong_arguments_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    "build",
    [
        lambda: LowRankPair([[1.0]], torch.ones(1, 1)),
        lambda: LowRankPair(torch.ones(1, 1).long(), torch.ones(1, 1).long()),
        lambda: LowRankPair(torch.ones(1, 1), torch.ones(1, 1), "1"),
        lambda: FedInc(2.0),
        lambda: ProductSum().aggregate([torch.ones(2, 2)]),
        lambda: ProductSum().aggregate([LowRankPair(torch.ones(1, 1), torch.ones(1, 1))], ranks=[1.0]),
    ],
)
def test_wrong_kinds_are_refused(build):
    with pytest.raises(TypeError):
        build()


def test_resized_pairs():
    pair = LowRankPair(torch.ones(2, 2).bfloat16(), torch.ones(2, 3).bfloat16(), 0.5)
    large = pair.resized(3, scaling=0.25)
    assert large.B.dtype == torch.bfloat16
    assert large.B.tolist() == [[2, 2, 0]] * 2
    assert large.A.tolist() == [[1] * 3, [1] * 3, [0] * 3]
    torch.testing.assert_close(large.product(), pair.product())


def test_inner_products_are_those_of_dense_products():
    pairs = clients_of(RBLA(), MIXED, alpha=2.0)
    products = torch.stack([dense(pair) for pair in pairs]).flatten(1)
    torch.testing.assert_close(inner_products(pairs), products @ products.T)


def test_weights_are_normalised():
    assert normalised_weights(None, 4).tolist() == [0.25] * 4
    assert normalised_weights(torch.tensor([1, 3]), 2).tolist() == [0.25, 0.75]
    assert normalised_weights([1e308, 1e308], 2).tolist() == [0.5, 0.5]
    assert normalised_weights([5e-324, 0.0], 2).tolist() == [1.0, 0.0]
