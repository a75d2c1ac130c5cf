"""Captured replays, with a recorder that records on the CPU as CUDA does: fixed memory, and nothing made meanwhile."""

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_lowrank import SCAFFOLD, FedAvg, FederatedLoop, FedProx, FromIndices
from lightning_lowrank.aggregation import KeepsArrivals
from lightning_lowrank.federated.execution import captures, graphs, updates, vectorized
from lightning_lowrank.federated.execution.captures import Captures
from lightning_lowrank.federated.execution.stack import ClientStack
from tests.helpers import Data, Module, assert_same, blobs, fit, network, trainer, weights
from tests.recorder import OnTheCPU

PARTS = FromIndices([range(29), range(29, 53), range(53, 77), range(77, 103)])


def step(tensors):
    """Reads a weight and a batch, and counts in a buffer."""
    values, batch, count, frozen = tensors
    count.add_(1)
    return [values * batch + frozen * count, torch.rand(2) * values]


def test_a_capture_reads_and_writes_what_it_is_given():
    recorder = OnTheCPU()
    captured, frozen = Captures(recorder).around(step, [3], {}), torch.full((2,), 10.0)
    torch.manual_seed(0)
    expected, given = [], [torch.zeros(2), torch.zeros(2), torch.zeros(2), frozen]
    for number in range(10):
        given[:2] = torch.full((2,), float(number)), torch.full((2,), 3.0 * number)
        expected.append([*map(torch.clone, step(given)), given[2].clone()])
    torch.manual_seed(0)
    count, found = torch.zeros(2), []
    for number in range(10):
        given = [torch.full((2,), float(number)), torch.full((2,), 3.0 * number), count, frozen]
        found.append([*map(torch.clone, captured(given)), count.clone()])
    # One of them to see that it gives the step's values.
    assert (recorder.records, recorder.replays) == (1, 8)
    for one, two in zip(found, expected, strict=True):
        assert all(map(torch.equal, one, two))


def test_lent_memory_is_not_copied_and_never_overwritten():
    lending = Captures(OnTheCPU())
    stack = lending.place("weight", torch.tensor(1.0), 4)
    assert lending.lends(stack[2:])
    assert not lending.lends(stack.clone())
    captured = lending.around(step, [3], {})
    frozen = torch.zeros(2)
    for number in range(8):
        for rows in (slice(2), slice(2, 4)):
            # Another part of the stack is captured apart.
            values = stack[rows]
            before = stack.clone()
            result = captured([values, torch.full((2,), 2.0), torch.zeros(2), frozen])[0]
            assert torch.equal(result, 2 * before[rows])
            assert torch.equal(stack, before)
            stack[rows] += number
    assert lending.captured == 2
    assert lending.place("weight", torch.tensor(5.0), 3).data_ptr() == stack.data_ptr()
    assert lending.place("weight", torch.tensor(5.0), 5).data_ptr() != stack.data_ptr()


def test_another_frozen_weight_is_captured_again():
    recorder = OnTheCPU()
    captured = Captures(recorder).around(step, [3], {})
    kept = []
    for value in (1.0, 2.0):
        kept.append(torch.full((2,), value))
        for _ in range(6):
            result = captured([torch.zeros(2), torch.zeros(2), torch.zeros(2), kept[-1]])[0]
            assert torch.equal(result, torch.full((2,), value))
    assert recorder.records == 2


def test_a_weight_that_moves_again_and_again_is_not_captured_each_time():
    recorder = OnTheCPU()
    captured, kept = Captures(recorder).around(step, [3], {}), []
    for value in range(20):
        kept.append(torch.full((2,), float(value)))
        for _ in range(6):
            assert torch.equal(captured([torch.zeros(2), torch.zeros(2), torch.zeros(2), kept[-1]])[0], kept[-1])
    assert recorder.records == captures._MOST_PLACES


def test_results_are_copied_where_somebody_may_keep_them():
    for copies in (False, True):
        captured = Captures(OnTheCPU(), copies).around(step, [3], {})
        frozen = torch.full((2,), 10.0)
        found = [
            captured([torch.full((2,), float(number)), torch.ones(2), torch.zeros(2), frozen])[0] for number in range(8)
        ]
        assert torch.equal(found[-2], torch.full((2,), 16.0)) is copies


def refuse(make):
    make()
    raise RuntimeError("not on a stream that records\nCompile with TORCH_USE_CUDA_DSA")


@pytest.mark.parametrize("why", ["memory", "error"])
def test_what_cannot_be_captured_is_replayed(why, monkeypatch):
    recorder = OnTheCPU(most=0)
    if why == "error":
        monkeypatch.setattr(recorder, "record", refuse)
    lending = Captures(recorder)
    first, second = (lending.around(step, [3], {}) for _ in range(2))
    frozen = torch.zeros(2)
    for _ in range(6):
        given = [torch.ones(2), torch.ones(2), torch.zeros(2), frozen]
        assert torch.equal(first(given)[0], torch.ones(2))
    for _ in range(6):
        assert torch.equal(second([torch.ones(2), torch.ones(2), torch.zeros(2), frozen])[0], torch.ones(2))
    assert ("not on a stream" if why == "error" else "hold 1 bytes") in lending.reason
    assert lending.captured == (why == "memory")


@pytest.fixture
def recorder(monkeypatch):
    """Have steps traced at once, and captured on the CPU when they are used again."""
    monkeypatch.setattr(graphs, "_WORTH_TRACING", 0)
    monkeypatch.setattr(graphs.StepGraphs, "_is_worth_it", lambda self, key, first: True)
    monkeypatch.setattr(captures, "_WORTH_CAPTURING", 1)
    found = OnTheCPU()
    monkeypatch.setattr(vectorized, "recorder_for", lambda device: found)
    return found


class Median(KeepsArrivals):
    """Keeps what it is given until the round ends, and no copy."""

    def add(self, tensors, weight):
        super().add(tensors, weight)
        self.kept[-1] = tensors, weight

    def result(self):
        return {name: torch.stack(values).median(0).values for name, values in self.values().items()}


class Batches(nn.BatchNorm1d):
    """Has running statistics, which a step writes into."""


NETWORKS = {
    "plain": network,
    "statistics": lambda: network(norm=Batches),
    "dropout": lambda: network(dropout=0.3),
}


def run(tmp_path, algorithm, net, **settings):
    loop = FederatedLoop(
        algorithm(),
        partition=PARTS,
        execution="vectorized",
        local_epochs=3,
        summary=False,
        on_client_error="raise",
        **settings,
    )
    module = fit(trainer(tmp_path, loop, max_epochs=3), Module(NETWORKS[net]()), Data(blobs(), drop_last=True))
    return weights(module), loop


@pytest.mark.parametrize("chunk_size", [4, 3, 2])
@pytest.mark.parametrize(
    ("algorithm", "net", "more"),
    [
        (FedAvg, "statistics", {}),
        (SCAFFOLD, "plain", {}),
        (partial(FedProx, 0.1), "dropout", {}),
        (FedAvg, "plain", {"aggregator": Median()}),
    ],
)
@pytest.mark.nightly
def test_fits_are_equal_bit_for_bit(tmp_path, recorder, algorithm, net, more, chunk_size):
    expected, _ = run(tmp_path, algorithm, net, chunk_size=chunk_size, cuda_graphs=False, **more)
    assert recorder.records == 0
    found, loop = run(tmp_path, algorithm, net, chunk_size=chunk_size, **more)
    assert recorder.replays > recorder.records > 0
    assert loop.rounds.execution.graphs.captures.reason == ""
    assert_same(found, expected)


@pytest.mark.parametrize("what", ["results", "buffers"])
@pytest.mark.nightly
def test_a_capture_with_other_values_is_not_used(tmp_path, recorder, monkeypatch, what):
    expected, _ = run(tmp_path, FedAvg, "statistics", cuda_graphs=False)
    record = recorder.record

    def wrong(make):
        outputs, replay = record(make)
        buffer = next(each for each in make.__closure__[1].cell_contents._inputs if not each.is_floating_point())
        return outputs, lambda: (replay(), (outputs[-1] if what == "results" else buffer).add_(1))

    monkeypatch.setattr(recorder, "record", wrong)
    found, loop = run(tmp_path, FedAvg, "statistics")
    made = loop.rounds.execution.graphs
    assert (made.reason, made.captures.captured) == ("", 0)
    assert "it gives other values then" in made.captures.reason
    assert_same(found, expected)


def assert_close(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


OPTIMIZERS = {
    "plain": {},
    "momentum": {"momentum": 0.9, "weight_decay": 0.01},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "maximize": {"lr": 1e-3, "maximize": True},
    "Adam": {"kind": torch.optim.Adam, "lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1},
    "AdamW": {"kind": torch.optim.AdamW, "lr": 0.01, "eps": 1e-5, "weight_decay": 0.1},
}
if "decoupled_weight_decay" in torch.optim.Adam([torch.zeros(1)]).defaults:
    OPTIMIZERS["decoupled"] = {**OPTIMIZERS["Adam"], "decoupled_weight_decay": True}


def of_optimizer(tmp_path, options, scheduler=None, interval="epoch", callbacks=(), **settings):
    settings = {"execution": "vectorized", "local_epochs": 3, "summary": False, **settings}
    loop = FederatedLoop(FedAvg(), partition=PARTS, on_client_error="raise", **settings)
    options = {"lr": 0.05, **options}
    kind = options.pop("kind", torch.optim.SGD)
    module = Module(optimizer=lambda each: kind(each, **options), scheduler=scheduler, interval=interval)
    made = trainer(tmp_path, loop, *callbacks, max_epochs=4, limit_val_batches=0)
    return weights(fit(made, module, Data(blobs(), drop_last=True))), loop.rounds.execution.graphs.captures


@pytest.fixture
def updated(monkeypatch):
    """Return for each step of clients whether a capture has stepped the optimizer too."""
    found, gradients = [], ClientStack.gradients

    def watching(self, *arguments):
        total = gradients(self, *arguments)
        if total is not None:
            found.append(self._update is not None and self._update.made)
            used = [leaf for name, leaf in self.leaves.items() if name != "spare"]
            assert all((leaf.grad is None) is found[-1] for leaf in used)
        return total

    monkeypatch.setattr(ClientStack, "gradients", watching)
    return found


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ("momentum", "keep"),
        pytest.param("Adam", "keep", marks=pytest.mark.slow),
        pytest.param("AdamW", "keep", marks=pytest.mark.slow),
        *(pytest.param(options, "reset", marks=pytest.mark.slow) for options in OPTIMIZERS),
    ],
)
@pytest.mark.nightly
def test_captures_end_with_the_optimizers_step(tmp_path, recorder, updated, options, kept):
    options, settings = OPTIMIZERS[options], {"optimizer_state": kept, "chunk_size": 2}
    expected, _ = of_optimizer(tmp_path, options, cuda_graphs=False, **settings)
    assert not any(updated)
    found, made = of_optimizer(tmp_path, options, **settings)
    assert (made.reason, made.no_update) == ("", "")
    assert updated.count(True) > 20
    assert_close(found, expected)


class WithASpare(Module):
    """Has a parameter that no loss reads."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.spare = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("kind", [partial(torch.optim.SGD, momentum=0.9), torch.optim.Adam])
@pytest.mark.nightly
def test_a_parameter_without_a_gradient_gets_no_moments(tmp_path, recorder, updated, kind):
    found = []
    for captured in (False, True):
        loop = FederatedLoop(
            FedAvg(),
            partition=PARTS,
            execution="vectorized",
            optimizer_state="keep",
            local_epochs=3,
            on_client_error="raise",
            summary=False,
            cuda_graphs=captured,
        )
        made = trainer(tmp_path, loop, max_epochs=4, limit_val_batches=0)
        module = fit(made, WithASpare(optimizer=partial(kind, lr=0.05)), Data(blobs(), drop_last=True))
        states = [loop.rounds.coordinator.states[client]["optimizers"][0] for client in range(4)]
        found.append([{index: {*kept} for index, kept in state.items() if kept} for state in states])
        assert torch.equal(module.spare, torch.ones(3))
    assert updated.count(True) > 20
    assert found[0] == found[1]
    assert all(found[0])


@pytest.mark.parametrize(("interval", "factor"), [("epoch", 0.5), ("step", 0.95)])
@pytest.mark.nightly
def test_one_capture_serves_a_schedule(tmp_path, recorder, updated, interval, factor):
    records, ends = [], []
    for gamma in (1.0, factor):
        before = recorder.records
        schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=gamma), interval
        ends.append(of_optimizer(tmp_path, {}, *schedule)[0])
        records.append(recorder.records - before)
        assert updated.count(True) > 20
        assert_close(ends[-1], of_optimizer(tmp_path, {}, *schedule, cuda_graphs=False)[0])
    assert records[0] == records[1] > 0
    assert not all(map(torch.equal, ends[0].values(), ends[1].values()))


class Sees(pl.Callback):
    def on_train_batch_end(self, *arguments):
        """Might look at gradients."""


def with_a_hook(optimizer):
    optimizer.register_step_pre_hook(lambda *arguments: None)
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 1.0)


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, {"callbacks": [Sees()]}),
        ({"lr": torch.tensor(0.05)}, {}),
        ({"momentum": 0.9, "dampening": 0.1}, {}),
        ({"kind": torch.optim.Adam, "amsgrad": True}, {}),
        ({}, {"scheduler": with_a_hook}),
    ],
    ids=["callback", "tensor", "dampening", "amsgrad", "hook"],
)
@pytest.mark.nightly
def test_what_is_seen_is_not_in_the_capture(tmp_path, recorder, updated, options, more):
    found, _ = of_optimizer(tmp_path, options, **more)
    assert recorder.replays > 0
    assert not any(updated)
    assert_same(found, of_optimizer(tmp_path, options, cuda_graphs=False, **more)[0])


@pytest.mark.nightly
def test_an_update_that_cannot_be_captured_is_made_by_the_optimizer(tmp_path, recorder, updated, monkeypatch):
    monkeypatch.setattr(updates, "fused_sgd", lambda *given, **options: refuse(lambda: None))
    found, made = of_optimizer(tmp_path, {})
    assert "not on a stream" in made.no_update
    assert (made.reason, any(updated)) == ("", False)
    assert recorder.replays > 0
    assert_same(found, of_optimizer(tmp_path, {}, cuda_graphs=False)[0])
