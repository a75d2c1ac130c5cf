"""Who was in the training set cannot be told from the loss any better than ε allows."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_lowrank import DifferentialPrivacy, LowRank, MatrixProduct
from tests.helpers import Data, Module, fit, trainer

SAMPLES, FEATURES = 100, 40


def drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples whose labels have nothing to do with them: what is learnt of them is of them alone."""
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(SAMPLES, FEATURES, generator=draws), torch.randint(4, (SAMPLES,), generator=draws)


def attacked(folder, epsilon: float | None, seed: int, *callbacks) -> tuple[float, float]:
    """Train on some samples, and return how well losses tell them from others: area under the curve, and advantage."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 4))
    module = Module(net, partial(torch.optim.SGD, lr=0.5))
    privacy = [] if epsilon is None else [DifferentialPrivacy(clip=1.0, target_epsilon=epsilon, delta=1e-3, seed=seed)]
    members, others = drawn(seed), drawn(seed + 1000)
    run = trainer(folder, *callbacks, *privacy, max_epochs=30, limit_val_batches=0)
    fit(run, module, Data(TensorDataset(*members), batch_size=20))
    with torch.no_grad():
        inside, outside = (
            nn.functional.cross_entropy(module.net(inputs), labels, reduction="none").numpy()
            for inputs, labels in (members, others)
        )
    area = (inside[:, None] < outside[None, :]).mean()
    thresholds = np.concatenate([inside, outside])
    advantage = max((inside <= each).mean() - (outside <= each).mean() for each in thresholds)
    return float(area), float(advantage)


@pytest.mark.nightly
@pytest.mark.parametrize("low_rank", [False, True])
def test_membership_inference_falls_to_chance(tmp_path, low_rank):
    layers = [LowRank(MatrixProduct(), rank=4, role="weight", summary=False)] if low_rank else []
    found = {}
    for epsilon in (None, 30.0, 3.0, 0.3):
        runs = [attacked(tmp_path, epsilon, seed, *layers) for seed in range(3)]
        found[epsilon] = np.mean(runs, axis=0)
    areas = [found[epsilon][0] for epsilon in (None, 30.0, 3.0, 0.3)]
    assert areas[0] > (0.8 if low_rank else 0.9)
    assert sorted(areas, reverse=True) == areas
    # Of 100 samples each, the area has a standard deviation of 0.04 by chance, the mean of three 0.025.
    assert areas[-1] == pytest.approx(0.5, abs=0.06)
    for epsilon in (3.0, 0.3):
        # What differential privacy allows (Humphries et al., 2023, Theorem 1), and what is best of all by chance.
        allowed = (math.exp(epsilon) - 1 + 2e-3) / (math.exp(epsilon) + 1)
        assert found[epsilon][1] <= allowed + 0.2
