"""FedDyn against Algorithm 1 of the paper, written out."""

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank import FedDyn
from tests.algorithms.written_out import (
    CLIENTS,
    EXECUTIONS,
    ROUNDS,
    SIZES,
    assert_close,
    bare,
    batches,
    federated,
    gradient,
    initial,
    kept_by,
    mean,
)


@pytest.mark.slow
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_rounds_follow_the_paper(tmp_path, execution, weighting):
    ended, loop = federated(tmp_path, FedDyn(alpha=0.3), execution, local_epochs=2, weighting=weighting)
    values = initial()
    zeros = {name: torch.zeros_like(value) for name, value in values.items()}
    linear, h = dict.fromkeys(range(len(CLIENTS)), zeros), zeros
    for ids in ROUNDS:
        ends = []
        for client in ids:
            own = values
            for batch in 2 * batches(client):
                slope = gradient(own, batch)
                # The gradient of loss - <g, w> + alpha / 2 |w - w_t|^2.
                own = {
                    name: own[name] - 0.1 * (slope[name] - linear[client][name] + 0.3 * (own[name] - values[name]))
                    for name in own
                }
            linear[client] = {name: linear[client][name] - 0.3 * (own[name] - values[name]) for name in own}
            ends.append(own)
        average = mean(ends, [1.0 if weighting == "uniform" else SIZES[client] for client in ids])
        share = len(ids) / len(CLIENTS)
        h = {name: h[name] - 0.3 * share * (average[name] - values[name]) for name in h}
        values = {name: average[name] - h[name] / 0.3 for name in h}
    assert_close(ended, values)
    for client in range(len(CLIENTS)):
        assert_close(bare(kept_by(loop, client)["linear"]), linear[client])


def test_refuses_strengths():
    for alpha in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(MisconfigurationException, match=f"alpha must be above 0 and finite, but is {alpha}"):
            FedDyn(alpha)
