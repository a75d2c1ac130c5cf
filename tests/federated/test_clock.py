"""Simulated time: a round's seconds are those computed by hand, and clients that are late are left out."""

import json
import math
import pickle
import re

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import (
    AvailabilityTrace,
    DeviceClasses,
    Ditto,
    Ensemble,
    FedAvg,
    FederatedLoop,
    FedHM,
    FedLoRA,
    FromIndices,
    HeteroFL,
    LogNormal,
    LowRank,
    MatrixProduct,
    SplitMix,
    SystemModel,
    TopK,
    Trace,
    ZeroPadding,
)
from lightning_lowrank.federated.clock import Clock
from lightning_lowrank.federated.protocols import OwnSteps
from tests.algorithms.methods import LOW_RANK, METHODS, each_method
from tests.algorithms.written_out import assert_close
from tests.grids import nightly_except
from tests.helpers import Data, Module, Thaw, assert_same, blobs, fit, network, trainer, weights

PARTS = [range(40), range(40, 56), range(56, 61)]
# network(): 6 -> 16 -> 16 -> 4.
LAYERS = [(6, 16), (16, 16), (16, 4)]
FORWARD = 2 * sum(inputs * outputs for inputs, outputs in LAYERS)
# A linear layer's backward pass is two products of the forward pass's size; the first needs no gradient of its input.
BACKWARD = 2 * FORWARD - 2 * math.prod(LAYERS[0])


def run(tmp_path, algorithm=None, system=None, module=None, callbacks=(), rounds=2, parts=PARTS, **settings):
    loop = FederatedLoop(
        algorithm or FedAvg(), partition=FromIndices(parts), system=system, summary=False, seed=1, **settings
    )
    fitted = trainer(tmp_path, *callbacks, loop, max_epochs=rounds)
    module = fit(fitted, module or Module(), Data(blobs(61), shuffle=False))
    return {name: float(value) for name, value in fitted.callback_metrics.items()}, loop, module


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_seconds_are_those_by_hand(tmp_path, execution):
    system = SystemModel([1e3, 2e3, 4e3], download=1e4, latency=0.25, speed=[1e6, 1e5, 1e4])
    logged, loop, _module = run(tmp_path, system=system, execution=execution, local_epochs=2)
    nbytes = loop.ledger.round_up / 3
    of_each = [
        nbytes / up + nbytes / 1e4 + 0.5 + 2 * len(part) * (FORWARD + BACKWARD) / speed
        for part, up, speed in zip(PARTS, (1e3, 2e3, 4e3), (1e6, 1e5, 1e4), strict=True)
    ]
    assert logged["system/round_seconds"] == pytest.approx(max(of_each))
    assert logged["system/seconds"] == pytest.approx(2 * max(of_each))
    assert logged["system/late"] == 0


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("settings", "samples"),
    [
        # Passes have 5, 2 and 1 batches of 8, the last one of 8, 8 and 5 samples.
        ({"local_steps": 3}, [24, 24, 15]),
        ({"local_steps": 6}, [48, 48, 30]),
        ({"local_steps": 6, "max_steps": 4}, [32, 32, 20]),
    ],
    ids=["part of a pass", "passes", "cut short"],
)
def test_samples_are_those_that_are_read(tmp_path, execution, settings, samples):
    of_trainer = {name: settings[name] for name in ("max_steps",) if name in settings}
    loop = FederatedLoop(
        FedAvg(),
        partition=FromIndices(PARTS),
        system=SystemModel(speed=1e3, operations=10.0),
        summary=False,
        execution=execution,
        chunk_size=3 if execution == "vectorized" else None,
        local_steps=settings["local_steps"],
    )
    told: dict[int, float] = {}
    answer = Clock.answered

    def answered(clock, client, steps, nbytes):
        clock.round_seconds = 0.0
        late = answer(clock, client, steps, nbytes)
        told[client.id] = clock.round_seconds
        return late

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Clock, "answered", answered)
        fit(trainer(tmp_path, loop, max_epochs=1, **of_trainer), Module(), Data(blobs(61), shuffle=False))
    expected = {client: count * 10 / 1e3 for client, count in enumerate(samples)}
    if of_trainer and execution == "sequential":
        # One client after another: the others have not begun.
        expected = {client: expected[client] for client in list(told)[:1]}
    assert told == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
@pytest.mark.parametrize("uplink", [[], [TopK(0.5)]])
def test_who_is_late_is_left_out(tmp_path, execution, uplink):
    system = SystemModel(bandwidth=[1e6, 1.0, 1e6], deadline=30.0)
    logged, loop, module = run(tmp_path, system=system, execution=execution, uplink=uplink)
    assert logged["system/late"] == logged["federated/failed"] == 1
    assert logged["system/round_seconds"] == 30
    assert logged["federated/clients"] == 2
    expected = run(tmp_path, participants=[[0, 2]] * 2, execution=execution, uplink=uplink)
    # A stack of another size rounds otherwise.
    assert_close(weights(module), weights(expected[2]), tolerance=0 if execution == "sequential" else 1e-5)
    assert loop.ledger.total_up == expected[1].ledger.total_up


def test_a_late_client_keeps_what_it_kept(tmp_path):
    system = SystemModel(bandwidth=[1e6, 1.0, 1e6], deadline=30.0)
    _, loop, _ = run(tmp_path, Ditto(), system)
    assert "personal" not in loop.coordinator.states[1]
    assert "personal" in loop.coordinator.states[0]


def test_lateness_is_no_error(tmp_path):
    system = SystemModel(bandwidth=[1e6, 1.0, 1e6], deadline=30.0)
    logged, _, _ = run(tmp_path, system=system, on_client_error="raise")
    assert logged["system/late"] == 1
    with pytest.raises(MisconfigurationException, match=r"1.*4464.*deadline"):
        run(tmp_path, system=system, min_clients=3)


def test_clients_that_never_answer_take_the_deadline(tmp_path):
    system = SystemModel(latency=1.0)
    logged, _, _ = run(tmp_path, system=system, client_dropout=0.9)
    assert logged["federated/failed"] > 0
    assert logged["system/round_seconds"] == 2
    logged, _, _ = run(tmp_path, system=SystemModel(latency=1.0, deadline=7.0), client_dropout=0.9)
    assert logged["system/round_seconds"] == 7


def count(tmp_path, algorithm, module=None, callbacks=(), clients=4, client=0, **settings):
    parts = [range(start, start + 8) for start in range(0, 8 * clients, 8)]
    system = SystemModel(speed=1.0)
    _, loop, _ = run(tmp_path, algorithm, system, module, callbacks, rounds=1, parts=parts, **settings)
    return loop.coordinator.find(Clock).operations.of_sample(loop.coordinator.info(client))


@pytest.mark.slow
def test_low_rank_layers_take_less(tmp_path):
    class Wide(Module):
        def __init__(self):
            super().__init__(nn.Sequential(nn.Linear(6, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 4)))

    lowrank = LowRank(MatrixProduct(), rank=2, role="weight", summary=False, skip=["first", "last"])
    kept = 2 * (3 * 96 * 4 + 2 * 96 * 6)
    assert count(tmp_path, FedAvg(), Wide()) == kept + 2 * 3 * 96 * 96
    assert count(tmp_path, FedAvg(), Wide(), [lowrank]) <= kept + 2 * 3 * 2 * (96 + 96)


@pytest.mark.slow
def test_clients_with_a_part_of_the_network_take_its_operations(tmp_path):
    # Half of the hidden units.
    half = [(6, 8), (8, 8), (8, 4)]
    by_hand = 2 * sum(3 * inputs * outputs for inputs, outputs in half) - 2 * 6 * 8
    whole, small = (count(tmp_path, HeteroFL([1.0, 0.5]), client=client) for client in (0, 1))
    assert whole == FORWARD + BACKWARD
    # Forward and backward pass are scaled alike.
    forward = 2 * sum(inputs * outputs for inputs, outputs in half)
    assert small == pytest.approx(whole * forward / FORWARD)
    assert small == pytest.approx(by_hand, rel=0.1)


@pytest.mark.slow
def test_bases_have_a_step_each(tmp_path):
    module = Module(Ensemble(network, bases=3))
    three, one = (count(tmp_path, SplitMix([3, 1]), module, client=client) for client in (0, 1))
    assert three == 3 * one == 3 * (FORWARD + BACKWARD)


@pytest.mark.slow
def test_factors_of_smaller_ranks_take_less(tmp_path):
    lowrank = LowRank(MatrixProduct(), rank_ratio=0.5, train_base=True, summary=False, skip=["first"])
    dense, half, eighth = (count(tmp_path, FedHM([1.0, 0.5, 0.125]), None, [lowrank], client=each) for each in range(3))
    assert dense == FORWARD + BACKWARD
    assert eighth < half < dense
    adapters = LowRank(MatrixProduct(), rank=4, alpha=4, init="lora", summary=False)
    four, two = (
        count(tmp_path, FedLoRA(ZeroPadding(), levels=[1.0, 0.5]), None, [adapters], client=each) for each in range(2)
    )
    assert 0.5 < two / four < 1


def test_methods_with_several_passes_take_several(tmp_path):
    assert count(tmp_path, Ditto()) == 2 * count(tmp_path, FedAvg())


@pytest.mark.slow
@pytest.mark.parametrize("layer", [nn.Conv2d(4, 8, 3, stride=2), nn.ConvTranspose2d(4, 8, 3, stride=2)])
def test_groups_of_convolutions_share_the_work(tmp_path, layer):
    def of(groups):
        first = type(layer)(4, 8, 3, stride=2, groups=groups)
        net = nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 1), nn.Upsample(9), first, nn.Flatten(1))
        return count(tmp_path, FedAvg(), Module(net))

    others = 2 * 6 * 4 * 2
    whole, half = of(1) - others, of(2) - others
    assert whole == 2 * half > 0


@pytest.mark.slow
def test_parts_that_thaw_are_counted_from_then_on(tmp_path):
    def operations(rounds):
        trained = lambda values: torch.optim.SGD([each for each in values if each.requires_grad], lr=0.1)  # noqa: E731
        module, system = Module(optimizer=trained), SystemModel(speed=1.0)
        _, loop, _ = run(tmp_path, system=system, module=module, callbacks=[Thaw()], rounds=rounds)
        return loop.coordinator.find(Clock).operations.of_sample(loop.coordinator.info(0))

    # Without its weight's gradient, and that of the second layer's input.
    assert operations(1) == FORWARD + BACKWARD - 2 * math.prod(LAYERS[0]) - 2 * math.prod(LAYERS[1])
    assert operations(2) == FORWARD + BACKWARD


def test_steps_that_need_values_are_counted(tmp_path):
    class Branches(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if loss.item() < 1e9 else 2 * loss

    assert count(tmp_path, FedAvg(), Branches()) == FORWARD + BACKWARD


class Fused(nn.Module):
    """A recurrent layer, or attention, over the features, for which torch has fused operations."""

    def __init__(self, kind):
        super().__init__()
        self.recurrent = kind(1, 5, batch_first=True) if kind else None
        self.heads, self.out = nn.Linear(1, 5), nn.Linear(5, 4)

    def forward(self, inputs):
        sequence = inputs.unsqueeze(-1)
        if self.recurrent is not None:
            return self.out(self.recurrent(sequence)[0][:, -1])
        heads = self.heads(sequence)[:, None]
        return self.out(nn.functional.scaled_dot_product_attention(heads, heads, heads)[:, 0, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, None])
def test_fused_operations_are_counted_where_a_step_needs_values(tmp_path, kind, monkeypatch):
    # As torch's own test utilities leave it, which other libraries import.
    monkeypatch.setattr(torch.backends, "__allow_nonbracketed_mutation_flag", False)

    class Branches(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if loss.item() < 1e9 else 2 * loss

    assert count(tmp_path, FedAvg(), Branches(Fused(kind))) == count(tmp_path, FedAvg(), Module(Fused(kind))) > 500


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("way", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm, nn.utils.spectral_norm])
def test_layers_whose_weight_is_computed_are_counted(tmp_path, way):
    module = Module()
    way(module.net[2])
    assert count(tmp_path, FedAvg(), module) >= FORWARD + BACKWARD


def test_a_module_that_cannot_be_copied_is_refused(tmp_path):
    module = Module()
    module.held = [torch.ones(2, requires_grad=True) * 2]
    with pytest.raises(MisconfigurationException, match=r"SystemModel\(operations=\.\.\.\)"):
        count(tmp_path, FedAvg(), module)


def test_steps_are_counted_on_what_reaches_them(tmp_path):
    """In the trainer's precision, and as the module's hook before the transfer gives it."""

    class Twice(Module):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return [torch.cat([batch[0], batch[0]], dim=1), batch[1]]

    loop = FederatedLoop(FedAvg(), clients=2, system=SystemModel(speed=1e6), summary=False)
    fit(trainer(tmp_path, loop, max_epochs=1, precision="64-true"), Twice(network(12)), Data())
    counted = loop.coordinator.find(Clock).operations.of_sample(loop.coordinator.info(0))
    # The first layer's forward pass and its weight's gradient are of twice the size.
    assert counted == FORWARD + BACKWARD + 4 * math.prod(LAYERS[0])


def test_steps_that_need_the_trainer_are_refused(tmp_path):
    class Asks(Module):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (1 + self.trainer.current_epoch)

    with pytest.raises(MisconfigurationException, match=r"Asks\.training_step\(\)"):
        count(tmp_path, FedAvg(), Asks())
    logged, _, _ = run(tmp_path, system=SystemModel(speed=1e3, operations=10.0), module=Asks())
    assert logged["system/round_seconds"] == pytest.approx(40 * 10 / 1e3)


@pytest.mark.slow
def test_counting_changes_nothing(tmp_path):
    module = Module(network(norm=nn.BatchNorm1d, dropout=0.3))
    fresh = Module(network(norm=nn.BatchNorm1d, dropout=0.3))
    _, _, timed = run(tmp_path, system=SystemModel(speed=1e6), module=module, parts=PARTS[:2])
    _, _, untimed = run(tmp_path, module=fresh, parts=PARTS[:2])
    assert_same(weights(timed), weights(untimed))


@nightly_except("FedAvg", "FedHM", "FedLoRA-ProductSum", "FedSLoP", "RandomCoordinates", "TDPFed")
@each_method()
def test_every_method_can_be_timed(tmp_path, name):
    method = METHODS[name]
    form = LOW_RANK[method.forms[0]]

    def ends(system):
        module = Module(method.network(), optimizer=method.optimizer)
        callbacks = [] if form is None else [form()]
        settings = {"parts": [range(16), range(16, 40)], "rounds": 1, **method.settings}
        return run(tmp_path, method.make(), system, module, callbacks, **settings)

    logged, loop, timed = ends(SystemModel(speed=1e3))
    _, _, untimed = ends(None)
    assert_same(weights(timed), weights(untimed))
    passes = sum(OwnSteps.of(loop.algorithm).passes(loop.coordinator.info(1)))
    # The larger client's, with the least of the layers.
    assert logged["system/seconds"] > 24 * passes * FORWARD / 1e3 / 20


@nightly_except("sequential")
@pytest.mark.slow
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_a_resumed_run_has_the_same_times(tmp_path, execution):
    system = SystemModel([4e3, 1e3, 2e2], latency=LogNormal(0.1), speed=LogNormal(1e6), deadline=4.0)
    every = ModelCheckpoint(tmp_path / "every", "{step}", save_top_k=-1, every_n_train_steps=3)

    def times(*callbacks, **arguments):
        loop = FederatedLoop(
            FedAvg(), partition=FromIndices(PARTS), system=system, summary=False, seed=1, execution=execution
        )
        fitted = trainer(tmp_path, *callbacks, loop, max_epochs=2)
        fit(fitted, Module(), Data(blobs(61)), **arguments)
        return loop.coordinator.find(Clock).state_dict(), loop.ledger.state_dict()

    whole = times(every)
    assert 0 < whole[0]["late"] < 3
    files = sorted((tmp_path / "every").glob("*.ckpt"))
    assert len(files) > (1 if execution == "vectorized" else 2)
    for file in files:
        assert times(ckpt_path=file) == whole


def test_distributions():
    draws = torch.Generator().manual_seed(0)
    logs = LogNormal(5.0, sigma=0.5).draw(20_000, draws).log()
    assert logs.mean().exp() == pytest.approx(5.0, rel=0.02)
    assert logs.std() == pytest.approx(0.5, rel=0.02)
    kinds = DeviceClasses([1.0, 2.0], shares=[3, 1]).draw(20_000, draws)
    assert (kinds == 1.0).double().mean() == pytest.approx(0.75, rel=0.02)


@pytest.mark.parametrize("shares", [[1.0], [1.0, 1.0, 1.0], [-1.0, 2.0], [0.0, 0.0], [1.0, math.inf]])
def test_shares_that_are_none_are_refused(shares):
    with pytest.raises(MisconfigurationException, match=rf"shares.*{re.escape(str(shares))}"):
        DeviceClasses([1e6, 1e7], shares)


def test_devices_depend_on_the_seed_alone():
    system = SystemModel(LogNormal(1e6), speed=LogNormal(1e9))
    drawn = system.draw(20, seed=3)
    assert drawn == system.draw(20, seed=3) != system.draw(20, seed=4)
    assert drawn["up"] == drawn["down"]
    assert drawn["speed"] != [1e3 * each for each in drawn["up"]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, r"SystemModel\(\)"),
        ({"bandwidth": 0.0}, r"bandwidth.*0\.0"),
        ({"latency": -1.0}, r"latency.*-1\.0"),
        ({"speed": [1.0, -1.0]}, r"speed\[1\].*-1\.0"),
        ({"bandwidth": 1.0, "deadline": 0.0}, r"deadline.*0\.0"),
        ({"bandwidth": 1.0, "operations": math.inf}, "operations must be"),
    ],
)
def test_arguments_are_checked(arguments, said):
    with pytest.raises(MisconfigurationException, match=said):
        SystemModel(**arguments)


def test_lists_are_of_all_clients(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"bandwidth.*2.*3"):
        run(tmp_path, system=SystemModel(bandwidth=[1.0, 2.0]))


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "no CSV file"), ("a,b\n1,2\n", r"csv.*'up'"), ("up\n1\nfast\n", "row 1.*fast"), ("up\n-1\n", "row 0.*-1")],
)
def test_traces_are_checked(tmp_path, text, said):
    file = tmp_path / "trace.csv"
    if text is not None:
        file.write_text(text)
    with pytest.raises(MisconfigurationException, match=said):
        Trace(str(file), "up")


# FedScale's files

CAPACITY = {"a": {"computation": 40.0, "communication": 8000.0}, 7: {"computation": 100, "communication": 500.5}}
BEHAVIOUR = {
    "a": {"duration": 1, "inactive": [10, 90], "finish_time": 100, "active": [0, 50], "model": "phone"},
    "b": {"inactive": [30], "active": [20], "finish_time": 40},
}


def pickled(path, content):
    path.write_bytes(pickle.dumps(content, 2))
    return str(path)


def test_capacities_of_devices_are_read(tmp_path):
    file = pickled(tmp_path / "client_device_capacity", CAPACITY)
    assert Trace(file, "communication", scale=125).draw(3, torch.Generator()).tolist() == [1e6, 62562.5, 1e6]
    seconds = Trace(file, "computation", scale=0.003)
    assert seconds.draw(2, torch.Generator()).tolist() == [40 * 0.003, 100 * 0.003]
    named = Trace(file, "computation", client="device")
    assert named.draw_named(2, torch.Generator(), [7, "a"]).tolist() == [100.0, 40.0]
    with pytest.raises(MisconfigurationException, match=r"'speed'.*communication"):
        Trace(file, "speed")
    with pytest.raises(MisconfigurationException, match="scale"):
        Trace(file, "computation", scale=0)
    for content in ([1, 2], {}, {"a": 1}):
        with pytest.raises(MisconfigurationException, match="dictionary from devices"):
            Trace(pickled(tmp_path / "other", content), "computation")
    with pytest.raises(MisconfigurationException, match=r"row 1.*None"):
        Trace(pickled(tmp_path / "other", {"a": {"x": 1}, "b": {}}), "x")


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_seconds_of_a_sample_are_taken_as_they_are(tmp_path, execution):
    system = SystemModel(bandwidth=1e4, seconds_per_sample=[0.5, 2.0, 10.0])
    logged, loop, _module = run(tmp_path, system=system, execution=execution, local_epochs=2)
    of_each = [2 * len(part) * each for part, each in zip(PARTS, (0.5, 2.0, 10.0), strict=True)]
    assert logged["system/round_seconds"] == pytest.approx(max(of_each) + 2 * loop.ledger.round_up / 3 / 1e4)
    for wrong in ({"speed": 1e9}, {"operations": 5.0, "bandwidth": 1.0}):
        with pytest.raises(MisconfigurationException, match=r"seconds_per_sample=0\.5"):
            SystemModel(seconds_per_sample=0.5, **wrong)
    with pytest.raises(MisconfigurationException, match="seconds_per_sample"):
        SystemModel(seconds_per_sample=0.0)
    assert SystemModel(seconds_per_sample=0.5).draw(2, 0)["sample"] == [0.5, 0.5]


def test_availability_is_that_of_the_devices(tmp_path):
    file = pickled(tmp_path / "client_behave_trace", BEHAVIOUR)
    there = AvailabilityTrace(file, round_seconds=10)
    assert [there(0, number) for number in range(11)] == [*[True] * 2, *[False] * 3, *[True] * 5, True]
    assert [there(1, number) for number in range(5)] == [False, False, True, True, False]
    assert [there(3, number) for number in range(5)] == [there(1, number) for number in range(5)]
    overlapping = {"a": {"active": [0, 10, 70], "inactive": [50, 20, 90], "finish_time": 100}}
    there = AvailabilityTrace(pickled(tmp_path / "overlapping", overlapping), round_seconds=30)
    assert [there(0, number) for number in range(4)] == [True, True, False, True]
    for wrong in (
        {},
        {"a": {}},
        {"a": {**BEHAVIOUR["b"], "active": [1, 2]}},
        {"a": {**BEHAVIOUR["b"], "active": [35]}},
    ):
        with pytest.raises(MisconfigurationException, match=r"path=.*other"):
            AvailabilityTrace(pickled(tmp_path / "other", wrong), 10)


def test_only_clients_that_are_there_train(tmp_path):
    traces = {
        str(client): {"active": [10 * client], "inactive": [10 * client + 15], "finish_time": 100}
        for client in range(3)
    }
    (tmp_path / "devices.json").write_text(json.dumps(traces))
    trained = []

    class Watched(OwnSteps):
        def local_update(self, step, update):
            trained.append((step.round, *step.clients))
            update()

    run(tmp_path, Watched(), availability=AvailabilityTrace(str(tmp_path / "devices.json"), 10), rounds=3)
    assert set(trained) == {(0, 0), (1, 0), (1, 1), (2, 1), (2, 2)}
