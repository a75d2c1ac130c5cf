"""Fed-SB and Ravan, from their papers' formulas in dense matrices."""

from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import TensorDataset

from lightning_lowrank import CoreProduct, FederatedLoop, FedSB, FromIndices, LowRank, Ravan
from lightning_lowrank.compression import Dense
from lightning_lowrank.layers import low_rank_layers
from tests.helpers import Data, Module, fit, trainer

RATE = 0.2


def samples(number=6, features=9, classes=7):
    draws = torch.Generator().manual_seed(5)
    inputs = torch.randn(number, features, generator=draws, dtype=torch.float64)
    return TensorDataset(inputs, torch.arange(number) % classes)


def linear():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(9, 7, bias=False))


def run(tmp_path, algorithm, factorization, rank, rounds, parts, **settings):
    module = Module(linear(), optimizer=partial(torch.optim.SGD, lr=RATE)).double()
    low_rank = LowRank(factorization, rank=rank, alpha=rank * 2.0, allow_larger=True, summary=False)
    loop = FederatedLoop(algorithm, partition=FromIndices(parts), summary=False, seed=1, **settings)
    # Each client's samples are one batch, so that each round is one step.
    fitted = trainer(tmp_path, low_rank, loop, max_epochs=rounds, limit_val_batches=0)
    fit(fitted, module, Data(samples(), batch_size=6))
    return module, loop


def gradient(weight, part):
    weight = weight.detach().clone().requires_grad_()
    inputs, targets = samples()[part]
    nn.functional.cross_entropy(inputs @ weight.T, targets).backward()
    return weight.grad


@pytest.mark.parametrize("rounds", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_fedsb_starts_from_the_svd_of_the_first_steps_mean_update(tmp_path, rounds):
    """Six samples make a gradient of rank 6, which the subspaces of two rounds hold exactly."""
    parts = [[0, 1], [2, 3, 4, 5]]
    module, _ = run(tmp_path, FedSB(rounds), CoreProduct(), 6, rounds, parts)
    start = linear().double()[0].weight
    mean = sum(len(part) / 6 * gradient(start, part) for part in parts)
    layer = module.net[0]
    left, values, right = np.linalg.svd(mean.numpy())
    # The scale is alpha / rank = 2, in U's step and in V's.
    torch.testing.assert_close(layer.update(), -RATE * 4 * mean)
    torch.testing.assert_close(layer.factors["H"].diagonal(), RATE * 2 * torch.from_numpy(values[:6].copy()))
    assert not (layer.factors["H"] - layer.factors["H"].diagonal().diag()).any()
    for side, vectors in (("U", left[:, :6]), ("V", right[:6].T)):
        agreement = torch.from_numpy(vectors.copy()).T @ layer.factors[side]
        torch.testing.assert_close(agreement.abs()[:5, :5], torch.eye(5, dtype=torch.float64))
        gram = layer.factors[side].T @ layer.factors[side]
        torch.testing.assert_close(gram, torch.eye(6, dtype=torch.float64))


def test_fedsb_then_trains_the_core_alone_and_its_mean_is_exact(tmp_path):
    parts = [[0, 1], [2, 3, 4, 5]]
    before, _ = run(tmp_path, FedSB(), CoreProduct(), 3, 2, parts)
    after, _ = run(tmp_path, FedSB(), CoreProduct(), 3, 3, parts)
    one, other = (module.net[0] for module in (before, after))
    for side in ("U", "V"):
        assert torch.equal(one.factors[side], other.factors[side])
    left, right = one.factors["U"], one.factors["V"]
    # A client's step: R - η s Uᵀ G V. Then the mean of B R A, in dense matrices.
    steps = [one.factors["H"] - RATE * 2 * left.T @ gradient(one.weight, part) @ right for part in parts]
    mean = sum(len(part) / 6 * 2 * left @ step @ right.T for part, step in zip(parts, steps, strict=True))
    torch.testing.assert_close(other.update(), mean)


@pytest.mark.parametrize("rounds", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_fedsb_draws_the_directions_beyond_the_rank_of_the_mean(tmp_path, rounds):
    """Gradients of seven classes have rank 6; rounding noise would be the seventh direction."""
    parts = [[0, 1, 2], [3, 4, 5]]
    one, other = (
        run(tmp_path, FedSB(rounds), CoreProduct(), 7, rounds + 1, parts, execution=execution)[0].net[0].factors
        for execution in ("sequential", "vectorized")
    )
    for name in "UHV":
        torch.testing.assert_close(one[name], other[name])
    for side in "UV":
        torch.testing.assert_close(one[side].T @ one[side], torch.eye(7, dtype=torch.float64))


def test_ravan_averages_the_products_of_scales_and_cores(tmp_path):
    updates = {}

    class Recording(Ravan):
        def end(self, client):
            ((_, layer),) = low_rank_layers(client.base.module)
            assert client.round == 0 or (client.model["net.0.factors.S"] != 1).any()
            factors = {name: client.model[f"net.0.factors.{name}"].detach() for name in "USHV"}
            heads = zip(factors["U"].split(2, 1), factors["H"], factors["V"].split(2, 1), factors["S"], strict=True)
            updates[client.round, client.id] = layer.scale * sum(s * u @ h @ v.T for u, h, v, s in heads)
            return super().end(client)

    parts = [[0, 1], [2, 3, 4, 5]]
    module, _ = run(tmp_path, Recording(), CoreProduct(heads=3), 2, 3, parts)
    layer = module.net[0]
    torch.testing.assert_close(layer.update(), updates[2, 0] / 3 + updates[2, 1] * 2 / 3)
    assert torch.equal(layer.factors["S"], torch.ones(3).double())
    for side in ("U", "V"):
        gram = layer.factors[side].T @ layer.factors[side]
        torch.testing.assert_close(gram, torch.eye(6, dtype=torch.float64))
    assert torch.linalg.matrix_rank(layer.update()) > 2


@pytest.mark.parametrize(
    ("algorithm", "factorization", "up", "down", "idle"),
    [
        # One factor while the subspaces are found, whose basis all clients are sent; then cores alone.
        (FedSB, CoreProduct(), ["U", "V", "H", "H"], ["", "U", "UHV", "H"], ["", "U", "UHV", ""]),
        (Ravan, CoreProduct(heads=2), ["H"] * 4, ["H"] * 4, [""] * 4),
    ],
    ids=["FedSB", "Ravan"],
)
def test_the_bytes_are_those_of_the_cores(tmp_path, algorithm, factorization, up, down, idle):
    parts = [[0, 1], [2, 3], [4, 5]]
    # The third client would take part in a fifth round.
    _, loop = run(tmp_path, algorithm(), factorization, 3, 4, parts, participants=[[0, 1]] * 4 + [[2]])
    metrics = loop.ledger.figures()
    shapes = factorization.factor_shapes((7, 9), 3)

    def encoded(rounds):
        messages = [{f"net.0.factors.{name}": torch.zeros(shapes[name]).double() for name in sent} for sent in rounds]
        return sum(Dense().nbytes(message) for message in messages if message)

    # Two clients in the cohort and one beside it, in four rounds.
    assert metrics["comm/total_up_bytes"] == 2 * encoded(up)
    assert metrics["comm/total_down_bytes"] == 2 * encoded(down)
    assert metrics.get("comm/total_idle_down_bytes", 0) == encoded(idle)


@pytest.mark.slow
def test_wide_heads_are_orthonormal_one_by_one(tmp_path):
    module, _ = run(tmp_path, Ravan(), CoreProduct(heads=4), 2, 1, [[0, 1], [2, 3, 4, 5]])
    for head in module.net[0].factors["U"].split(2, dim=1):
        torch.testing.assert_close(head.T @ head, torch.eye(2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("algorithm", "factorization", "settings", "message"),
    [
        (FedSB, CoreProduct(heads=2), {}, r"CoreProduct\(\).*'net\.0'.*'update'"),
        (Ravan, CoreProduct(), {}, r"CoreProduct.*heads=4.*'net\.0'"),
        (FedSB, CoreProduct(), {"role": "weight"}, r"CoreProduct\(\).*'weight'"),
        (FedSB, CoreProduct(), {"train_base": True}, "train_base"),
    ],
)
def test_other_layers_are_refused(tmp_path, algorithm, factorization, settings, message):
    low_rank = LowRank(factorization, rank=2, allow_larger=True, summary=False, **settings)
    loop = FederatedLoop(algorithm(), partition=FromIndices([range(6)]), summary=False)
    with pytest.raises(MisconfigurationException, match=message):
        fit(trainer(tmp_path, low_rank, loop), Module(linear()).double(), Data(samples(), batch_size=6))
    with pytest.raises(MisconfigurationException, match=r"subspace_rounds.*1"):
        FedSB(1)
