"""How many clients are taken to fit into memory, and that finding out leaves no trace."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import TensorDataset

from lightning_lowrank import FedAvg, FederatedLoop, FromIndices, LowRank, MatrixProduct
from lightning_lowrank.federated.execution import auto, memory
from lightning_lowrank.federated.execution.stack import ClientStack
from tests.federated.execution.runs import assert_close, run
from tests.helpers import Data, Module, assert_same, fit, trainer, weights

IMAGES = TensorDataset(torch.randn(40, 1, 16, 16), torch.randint(4, (40,)))


def convolutions():
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh())]
    return nn.Sequential(nn.Conv2d(1, 4, 1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))


@pytest.mark.slow
def test_activations_count_as_well_as_weights(tmp_path, monkeypatch):
    module = Module(convolutions())
    batch, place = 20, 4 * 16 * 16 * 4
    trained = sum(value.numel() * 4 for value in module.parameters())
    # What each normalization takes and each tanh gives, and the first convolution's input and output.
    activations = int(9.25 * batch * place)
    assert activations > 100 * trained
    free = 4 * 7 * (activations + 6 * trained)
    monkeypatch.setattr(memory, "free_memory", lambda device: free)
    loop = FederatedLoop(FedAvg(), clients=2, execution="vectorized", summary=False)
    fitted = trainer(tmp_path, loop, limit_val_batches=0, max_epochs=1)
    fit(fitted, module, Data(IMAGES, batch_size=batch))
    # By weights alone it would be hundreds.
    assert loop.rounds._data.chunk_size in (6, 7)


@pytest.mark.slow
def test_weights_count_where_they_outweigh_activations(tmp_path, monkeypatch):
    module = Module(nn.Sequential(nn.Linear(6, 4000), nn.ReLU(), nn.Linear(4000, 4)))
    each = 6 * 4 * sum(value.numel() for value in module.parameters())
    monkeypatch.setattr(memory, "free_memory", lambda device: 4 * 5.5 * each)
    _, loop, _ = run(tmp_path, "vectorized", module=lambda: module, dtype=torch.float32, trainer={"max_epochs": 1})
    assert loop.rounds._data.chunk_size in (4, 5)
    monkeypatch.setattr(memory, "free_memory", lambda device: 0)
    _, loop, _ = run(tmp_path, "vectorized", trainer={"max_epochs": 1})
    assert loop.rounds._data.chunk_size == 1


@pytest.mark.slow
def test_a_frozen_base_is_one_for_all(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 10**7)
    sizes = []
    for callbacks in ([], [LowRank(MatrixProduct(), rank=1, freeze_rest=True, summary=False)]):
        module = Module(nn.Sequential(nn.Linear(6, 2000), nn.Linear(2000, 4)))
        loop = FederatedLoop(FedAvg(), clients=3, execution="vectorized", summary=False)
        fit(trainer(tmp_path, *callbacks, loop, limit_val_batches=0, max_epochs=1), module, Data())
        sizes.append(loop.rounds._data.chunk_size)
    assert sizes[1] > 1.5 * sizes[0]


@pytest.mark.slow
def test_measuring_leaves_no_trace(tmp_path):
    class Counting(Module):
        def __init__(self):
            super().__init__(convolutions())
            self.seen = []
            self.register_buffer("calls", torch.zeros(()), persistent=False)

        def training_step(self, batch, batch_idx):
            self.calls += 1
            self.seen.append(batch_idx)
            self.logger.experiment.add_scalar("step", 1)
            return super().training_step(batch, batch_idx)

    written = []

    class Writer(DummyLogger):
        experiment = SimpleNamespace(add_scalar=lambda *_: written.append(1))

    found = []
    for settings in ({}, {"chunk_size": 50}):
        torch.manual_seed(5)
        loop = FederatedLoop(FedAvg(), clients=2, execution="vectorized", summary=False, seed=0, **settings)
        module = Counting()
        written.clear()
        fitted = trainer(tmp_path, loop, limit_val_batches=0, max_epochs=1, logger=Writer())
        fit(fitted, module, Data(IMAGES, batch_size=10))
        found.append((module, float(torch.rand(()))))
        assert len(written) == len(module.seen) == fitted.global_step
    (one, drawn), (other, drawn_then) = found
    assert drawn == drawn_then
    assert (one.seen, one.calls) == (other.seen, other.calls)
    assert_same(weights(one), weights(other))


@pytest.mark.slow
def test_it_is_measured_once(tmp_path, monkeypatch):
    tried, measure = [], memory._bytes_of_a_step
    monkeypatch.setattr(memory, "_bytes_of_a_step", lambda *given: tried.append(1) or measure(*given))
    for execution, times in (("vectorized", 1), ("auto", 1), ("sequential", 0)):
        tried.clear()
        run(tmp_path, execution, trainer={"max_epochs": 1})
        assert len(tried) == times


def test_a_step_that_cannot_be_tried_fails_in_its_place(tmp_path):
    class Unlucky(Module):
        def training_step(self, batch, batch_idx):
            raise LookupError("no luck")

    with pytest.raises(Exception, match="answers of 0 of 5 clients"):
        run(tmp_path, "vectorized", module=Unlucky)


@pytest.fixture
def sizes(monkeypatch):
    """Notes how many clients step together, and has memory for three."""
    found, mapped = [], ClientStack.mapped

    def within(self, run, stacks):
        found.append(len(next(iter(stacks[0].values()))))
        if found[-1] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB")
        return mapped(self, run, stacks)

    monkeypatch.setattr(ClientStack, "mapped", within)
    return found


@pytest.mark.parametrize("execution", ["vectorized", "auto"])
def test_fewer_clients_step_together_where_a_step_needs_more_memory(tmp_path, monkeypatch, sizes, execution):
    monkeypatch.setattr(auto, "time_both", lambda *given: (2.0, 1.0))
    settings = {"partition": FromIndices([list(range(start, start + 8)) for start in range(0, 96, 8)])}
    module, loop, _ = run(tmp_path, execution, **settings, trainer={"max_epochs": 1})
    assert (loop.rounds.execution.name, loop.data.chunk_size) == ("vectorized", 3)
    assert sorted(set(sizes)) == [3, 6, 12]
    expected, *_ = run(tmp_path, "sequential", **settings, trainer={"max_epochs": 1})
    assert_close(weights(expected), weights(module))


def test_a_size_that_was_asked_for_is_refused_where_it_needs_more_memory(tmp_path, sizes):
    settings = {"partition": FromIndices([list(range(start, start + 8)) for start in range(0, 96, 8)]), "chunk_size": 4}
    with pytest.raises(MisconfigurationException, match=r"4 clients together.*out of memory"):
        run(tmp_path, "vectorized", **settings)
    _, loop, _ = run(tmp_path, "auto", **settings)
    assert loop.rounds.execution.name == "sequential"
