import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowrank.lora import FedSVD, FLoRIST, LowRankPair, RaFLoRA, SumProduct
from tests.grids import pairwise

SHAPES = [(9, 6), (6, 9), (8, 8), (7, 1), (1, 7), (1, 1)]


def drawn(shape, ranks, dtype=torch.float64, seed=0):
    draws = torch.Generator().manual_seed(seed)
    return [
        LowRankPair(
            torch.randn(shape[0], rank, generator=draws, dtype=torch.float64).to(dtype),
            torch.randn(rank, shape[1], generator=draws, dtype=torch.float64).to(dtype),
            6 / rank,
        )
        for rank in ranks
    ]


def svd_of_mean(pairs, weights=None, rank=None, *, split="left", method="exact", scaling=1.0, seed=0):
    rank = max(pair.rank for pair in pairs) if rank is None else rank
    ranks, scalings = [rank] * len(pairs), [scaling] * len(pairs)
    operator = SumProduct(split, method)
    return operator.aggregate(pairs, weights, ranks=ranks, scalings=scalings, seed=seed).clients[0]


def dense_mean(pairs, weights):
    total = sum(w * p.scaling * p.B.double() @ p.A.double() for w, p in zip(weights, pairs, strict=True))
    return (total / sum(weights)).numpy()


def truncated(matrix, rank):
    left, values, right = np.linalg.svd(matrix)
    return torch.from_numpy(left[:, :rank] * values[:rank] @ right[:rank])


class Sizes(TorchDispatchMode):
    """Counts the tensors of as many numbers or more that are made."""

    def __init__(self, limit):
        super().__init__()
        self.limit, self.large = limit, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            self.large += isinstance(tensor, torch.Tensor) and tensor.numel() >= self.limit
        return out


@pairwise()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("clients", [1, 3, 12])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-5)], ids=str)
def test_exact_is_the_dense_svd_however_wide_the_stack(shape, clients, dtype, tolerance):
    ranks = [1 + client % min(shape[0], shape[1], 3) for client in range(clients)]
    pairs, weights = drawn(shape, ranks, dtype), list(range(1, clients + 1))
    mean = dense_mean(pairs, weights)
    for rank in {1, min(2, *shape), min(shape)}:
        found = svd_of_mean(pairs, weights, rank)
        assert found.B.dtype == dtype
        expected = truncated(mean, rank)
        scale = expected.norm().item()
        torch.testing.assert_close(found.product().double(), expected, atol=tolerance * scale, rtol=0)
        torch.testing.assert_close(found.A @ found.A.T, torch.eye(rank, dtype=dtype), atol=tolerance, rtol=0)
        values = torch.from_numpy(np.linalg.svd(mean)[1][:rank])
        torch.testing.assert_close(found.B.norm(dim=0).double(), values, atol=tolerance * scale, rtol=0)


@pytest.mark.parametrize("shape", [(40, 30), (30, 40)], ids=str)
def test_balanced_factors_share_the_singular_values(shape):
    pairs = drawn(shape, [2, 3])
    left, balanced = (svd_of_mean(pairs, rank=4, split=split, scaling=0.5) for split in ("left", "balanced"))
    torch.testing.assert_close(balanced.product(), left.product())
    gram = balanced.B.T @ balanced.B
    torch.testing.assert_close(gram, balanced.A @ balanced.A.T)
    torch.testing.assert_close(0.5 * gram.diagonal(), torch.linalg.svdvals(left.product())[:4])


@pytest.mark.parametrize("shape", [(60, 45), (45, 60)], ids=str)
@pytest.mark.parametrize("ranks", [[2, 3], [8] * 12], ids=["narrow", "wide"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)], ids=str)
def test_iterative_finds_the_same_where_the_spectrum_falls(shape, ranks, dtype, tolerance):
    pairs = drawn(shape, ranks)
    # One direction outweighs the next by a factor of 20, and so on.
    decay = 20.0 ** -torch.arange(max(ranks)).double()
    pairs = [LowRankPair((p.B * decay[: p.rank]).to(dtype), pairs[-1].A[: p.rank].to(dtype), p.scaling) for p in pairs]
    for rank in (1, 2):
        exact, found = (svd_of_mean(pairs, rank=rank, method=method) for method in ("exact", "iterative"))
        scale = exact.product().norm()
        assert (found.product() - exact.product()).norm() < tolerance * scale
        torch.testing.assert_close(found.A, exact.A, atol=10 * tolerance, rtol=0)


def test_iterative_is_near_the_best_on_a_flat_spectrum_and_depends_on_its_seed_alone():
    pairs, weights = drawn((120, 90), [8] * 30), [1] * 30
    mean = torch.from_numpy(dense_mean(pairs, weights))
    best = (mean - truncated(mean.numpy(), 8)).norm()
    found = svd_of_mean(pairs, rank=8, method="iterative")
    torch.manual_seed(5)
    again = svd_of_mean(pairs, rank=8, method="iterative")
    other = svd_of_mean(pairs, rank=8, method="iterative", seed=1)
    assert best <= (mean - found.product()).norm() < 1.002 * best
    assert torch.equal(again.B, found.B)
    assert not torch.equal(other.B, found.B)


@pytest.mark.parametrize("method", ["exact", "iterative"])
def test_ranks_beyond_that_of_the_mean_are_completed(method):
    pairs = drawn((9, 6), [1, 1])
    found = svd_of_mean(pairs, rank=5, method=method)
    torch.testing.assert_close(found.product(), torch.from_numpy(dense_mean(pairs, [1, 1])))
    torch.testing.assert_close(found.A @ found.A.T, torch.eye(5).double())
    assert found.B[:, 2:].abs().max() < 1e-12
    same = svd_of_mean([pairs[0]] * 4, rank=3, method=method)
    torch.testing.assert_close(same.product(), pairs[0].product())
    zero = LowRankPair(torch.zeros(4, 2), torch.zeros(2, 3))
    assert not svd_of_mean([zero, zero], rank=3, method=method).product().any()


def of_rank_two(dtype, clients):
    """Pairs of rank 4 whose mean has rank 2, but for rounding."""
    columns, A = drawn((9, 16), [4])[0].B[:, :2], drawn((9, 16), [4], dtype)[0].A
    return [LowRankPair((columns @ pair.A).to(dtype), A) for pair in drawn((2, 4), [2] * clients)]


@pytest.mark.parametrize("operator", [SumProduct(), SumProduct(method="iterative"), RaFLoRA(), FedSVD()], ids=repr)
@pytest.mark.parametrize("clients", [2, 6], ids=["narrow", "wide"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_directions_of_rounding_noise_are_drawn(operator, clients, dtype):
    pairs = of_rank_two(dtype, clients)
    nudged = [LowRankPair(torch.nextafter(pair.B, pair.B.new_tensor(9.0)), pair.A) for pair in pairs]
    same, other = operator.aggregate(nudged).server, operator.aggregate(pairs, seed=1).server
    found = operator.aggregate(pairs).server
    precision = {"rtol": 0, "atol": 100 * torch.finfo(dtype).eps}
    torch.testing.assert_close(found.A, same.A, **precision)
    torch.testing.assert_close(found.A @ found.A.T, torch.eye(4, dtype=dtype), **precision)
    torch.testing.assert_close(found.A[:2], other.A[:2], **precision)
    assert (found.A[2:] - other.A[2:]).norm() > 0.1
    assert not found.B[:, 2:].any()


def test_rounding_noise_does_not_add_to_florists_rank():
    assert FLoRIST(threshold=1.0).aggregate(of_rank_two(torch.float32, 6)).change.rank == 2


@pytest.mark.parametrize("method", ["exact", "iterative"])
@pytest.mark.parametrize("ranks", [[3, 2], [4] * 6], ids=["narrow", "wide"])
def test_signs_are_fixed(method, ranks):
    pairs = drawn((12, 9), ranks)
    found = svd_of_mean(pairs, rank=3, method=method)
    largest = found.A.gather(1, found.A.abs().argmax(dim=1, keepdim=True))
    assert (largest > 0).all()
    # The same mean from factors of other signs.
    flipped = [LowRankPair(-pair.B, -pair.A, pair.scaling) for pair in pairs]
    torch.testing.assert_close(svd_of_mean(flipped, rank=3, method=method).A, found.A)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_small_dtypes_are_computed_in_float32(dtype):
    pairs = drawn((20, 15), [2] * 3, dtype)
    found = svd_of_mean(pairs, rank=4)
    wide = svd_of_mean([LowRankPair(pair.B.float(), pair.A.float(), pair.scaling) for pair in pairs], rank=4)
    assert torch.equal(found.B, wide.B.to(dtype))
    assert torch.equal(found.A, wide.A.to(dtype))


def test_the_matrix_is_built_only_where_the_stack_is_wider_and_then_for_the_mean_alone():
    shape = (200, 150)
    narrow, wide = drawn(shape, [5] * 10), drawn(shape, [5] * 40)
    for dtype in (torch.float64, torch.float32):
        for pairs, method, count in ((narrow, "exact", 0), (narrow, "iterative", 0), (wide, "exact", 1)):
            cast = [LowRankPair(pair.B.to(dtype), pair.A.to(dtype), pair.scaling) for pair in pairs]
            with Sizes(shape[0] * shape[1]) as sizes:
                svd_of_mean(cast, rank=5, method=method)
            # For the wide stack, the two stacks are larger than the matrix, which is the reason to build it.
            assert (sizes.large > 0) == bool(count)
            assert sizes.large < 10


@pytest.mark.parametrize("shape", [(12, 300), (300, 12)], ids=str)
def test_a_wide_stack_costs_by_the_smaller_side(shape):
    pairs = drawn(shape, [4] * 5, torch.float32)
    with Sizes(300 * 300) as sizes:
        found = svd_of_mean(pairs, rank=12)
    assert not sizes.large
    torch.testing.assert_close(
        found.product().double(), torch.from_numpy(dense_mean(pairs, [1] * 5)), rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("clients", [2, 20])
def test_small_singular_values_of_float32_factors_are_not_lost(clients):
    """In float32, the eigenvalues of a Gram matrix are lost where singular values fall by more than 3e-4."""
    left, right = (torch.linalg.qr(factor).Q for factor in (drawn((30, 30), [4])[0].B, drawn((30, 30), [4])[0].A.T))
    values = torch.tensor([1.0, 1e-2, 1e-4, 1e-5]).double()
    pairs = [LowRankPair((left * values).float(), right.T.float())] * clients
    found = svd_of_mean(pairs, rank=4)
    torch.testing.assert_close(found.B.norm(dim=0).double(), values, rtol=0.02, atol=0)
    torch.testing.assert_close((found.A.double() @ right).abs(), torch.eye(4).double(), rtol=0, atol=0.02)


def test_a_large_mean_is_not_built():
    """A dense matrix of this size would hold 40 GB."""
    pair = LowRankPair(torch.ones(100_000, 1), torch.ones(1, 100_000), 2.0)
    found = svd_of_mean([pair, pair])
    assert found.B.norm().item() == pytest.approx(2 * 100_000, rel=1e-4)
    torch.testing.assert_close(found.A, torch.full((1, 100_000), 100_000**-0.5), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 7}, r"ranks\[0\].*7"),
        ({"rank": 0}, r"ranks\[0\].*0"),
        ({"method": "auto"}, r"'iterative'.*'auto'"),
        ({"split": "right"}, r"split.*'right'"),
        ({"scaling": -1.0}, r"scalings\[0\].*-1\.0"),
        ({"weights": [1, 2]}, "weights must be"),
    ],
)
def test_wrong_arguments_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        svd_of_mean(drawn((9, 6), [2, 2, 2]), **settings)
