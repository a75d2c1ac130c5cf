"""The monitor's figures against the definitions, with matrices."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank import (
    ConvergenceMonitor,
    FedAvg,
    FederatedLoop,
    FedLoRA,
    FedSA,
    FromIndices,
    LowRank,
    MatrixProduct,
    ProductSum,
    RoLoRA,
    SumProduct,
)
from tests.helpers import Data, Module, fit, network, trainer

CLIENTS = [list(range(40)), list(range(40, 60)), list(range(60, 103))]
RATE = 0.05


class Logged(Callback):
    def __init__(self):
        self.rounds = []

    def on_train_epoch_end(self, trainer, pl_module):
        figures = {name: float(value) for name, value in trainer.callback_metrics.items() if "convergence" in name}
        self.rounds.append(figures)


def monitored(tmp_path, operator, monitor=None, **arguments):
    loop = FederatedLoop(FedLoRA(operator), partition=FromIndices(CLIENTS), summary=False, **arguments)
    seen, logged = [], Logged()
    loop.algorithm.observers.append(seen.append)
    callbacks = [
        LowRank(MatrixProduct(), rank=3, alpha=6, init="lora", summary=False),
        loop,
        ConvergenceMonitor() if monitor is None else monitor,
        logged,
    ]
    module = Module(network(), optimizer=partial(torch.optim.SGD, lr=RATE))
    fit(trainer(tmp_path, *callbacks, max_epochs=2), module, Data())
    return seen, logged.rounds, loop


def test_nothing_observes_after_an_error(tmp_path):
    class Ends(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            raise RuntimeError("it ends here")

    loop = FederatedLoop(FedLoRA(ProductSum()), partition=FromIndices(CLIENTS), summary=False)
    low_rank = LowRank(MatrixProduct(), rank=3, init="lora", summary=False)
    run = trainer(tmp_path, low_rank, loop, ConvergenceMonitor(), Ends(), max_epochs=1)
    with pytest.raises(RuntimeError, match="it ends here"):
        fit(run, Module(network()), Data())
    assert loop.algorithm.observers == []


@pytest.mark.slow
@pytest.mark.parametrize("operator", [ProductSum, SumProduct, RoLoRA])
def test_constants_are_the_smallest_that_satisfy_the_conditions(tmp_path, operator):
    seen, logged, _ = monitored(tmp_path, operator())
    for aggregated, figures in zip(seen, logged, strict=True):
        shares = torch.tensor(aggregated.weights, dtype=torch.float64)
        shares /= shares.sum()
        totals = dict.fromkeys("RPQ", 0.0)
        least = dict.fromkeys("RPQ", 0.0)
        aggregation = 0.0
        for layer, broadcast in aggregated.broadcasts.items():
            own = {"R": [], "P": [], "Q": []}
            received = {"R": [], "P": [], "Q": []}
            for pairs, got in zip(aggregated.pairs, broadcast.clients, strict=True):
                for kept, pair in ((own, pairs[layer]), (received, got)):
                    kept["R"].append(pair.scaling * pair.B.double() @ pair.A.double())
                    kept["P"].append(pair.B.double())
                    kept["Q"].append(pair.A.double())
            for name in "RPQ":
                mean = sum(share * value for share, value in zip(shares, own[name], strict=True))
                for share, mine, theirs in zip(shares, own[name], received[name], strict=True):
                    totals[name] += share * (mine - theirs).square().sum()
                    least[name] += share * (mine - mean).square().sum()
                if name == "R":
                    server = broadcast.server.scaling * broadcast.server.B.double() @ broadcast.server.A.double()
                    aggregation += (server - mean).square().sum()
        for name in "RPQ":
            assert figures[f"convergence/{name}"] == pytest.approx(math.sqrt(totals[name]) / RATE, rel=1e-5)
            gap = (math.sqrt(totals[name]) - math.sqrt(least[name])) / RATE
            assert figures[f"convergence/{name}_gap"] == pytest.approx(gap, rel=1e-4, abs=1e-4)
        assert figures["convergence/aggregation_error"] == pytest.approx(math.sqrt(aggregation), rel=1e-4, abs=1e-6)
        parts = [figures[f"convergence/R/net.{layer}"] ** 2 for layer in (0, 2, 4)]
        assert math.sqrt(sum(parts)) == pytest.approx(figures["convergence/R"], rel=1e-6)


@pytest.mark.slow
def test_layers_can_be_left_out_and_nobody_watches_afterwards(tmp_path):
    _, logged, loop = monitored(tmp_path, SumProduct(), ConvergenceMonitor(per_layer=False))
    assert {name.count("/") for name in logged[0]} == {1}
    assert len(loop.algorithm.observers) == 1


@pytest.mark.slow
def test_a_factor_that_stays_with_its_client_is_not_measured(tmp_path):
    with pytest.warns(UserWarning, match="ConvergenceMonitor logs nothing: with FedSA"):
        ConvergenceMonitor().on_fit_start(SimpleNamespace(callbacks=[FederatedLoop(FedLoRA(FedSA()), clients=3)]), None)
    _, logged, loop = monitored(tmp_path, FedSA())
    assert logged == [{}, {}]
    assert len(loop.algorithm.observers) == 1


def test_needs_fedlora(tmp_path):
    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), summary=False)
    with pytest.raises(MisconfigurationException, match="FedLoRA"):
        fit(trainer(tmp_path, loop, ConvergenceMonitor()), Module(network()), Data())
