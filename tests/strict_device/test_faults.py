"""What was found wrong, or might be, on a device that is no CPU. `tests/test_strict_device.py` runs it."""

from __future__ import annotations

import importlib
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

from lightning_lowrank import (
    SCAFFOLD,
    ClientPrivacy,
    DifferentialPrivacy,
    FedAvg,
    FedBAT,
    FederatedLoop,
    FedLoRA,
    FedProx,
    FromIndices,
    LowRank,
    MatrixProduct,
)
from lightning_lowrank.data import TensorImages, collate_images
from lightning_lowrank.federated import logbook
from lightning_lowrank.federated.data import batches
from lightning_lowrank.federated.data.device import DeviceData
from lightning_lowrank.federated.execution import auto, memory, why_not
from lightning_lowrank.federated.execution.processes import ClientParallelStrategy
from lightning_lowrank.federated.local import LocalTraining
from lightning_lowrank.federated.randomness import StepRandomness
from lightning_lowrank.lora import LoRAA2
from tests.algorithms.methods import LOW_RANK, METHODS, each_method
from tests.grids import nightly_except
from tests.helpers import Data, Module, assert_same, fit, lightnings_own, network, trainer, weights
from tests.strict_device import calls as calls_of
from tests.strict_device import device

EVEN = [list(range(begin, begin + 24)) for begin in range(0, 96, 24)]
UNEVEN = [list(range(24)), list(range(24, 42)), list(range(42, 62)), list(range(62, 70))]
# In two epochs there are steps in which clients that are no neighbours have batches of one size.
SCATTERED = [list(range(24)), list(range(24, 44)), list(range(44, 60)), list(range(60, 72))]


def loop_of(method: Any = None, partition: Any = EVEN, **settings: Any) -> FederatedLoop:
    settings = {"partition": FromIndices(partition), "summary": False, **settings}
    return FederatedLoop(FedAvg() if method is None else method, **settings)


def fitted(tmp_path: Any, loop: FederatedLoop, *callbacks: Any, module: Any = None, **arguments: Any) -> Module:
    module = Module() if module is None else module
    return fit(trainer(tmp_path, *callbacks, loop, limit_val_batches=0, **arguments), module, Data())


@pytest.fixture
def counted(monkeypatch):
    """Return the calls of each step of a fit, the last of which the test looks at."""
    found = []
    update = LocalTraining._update

    def counting(self, *arguments):
        with device.calls() as calls:
            output = update(self, *arguments)
        found.append(calls)
        return output

    monkeypatch.setattr(LocalTraining, "_update", counting)
    return found


def waits(calls: Any) -> list[str]:
    return [name for name in calls if name.startswith(device.SYNC)]


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_some_ranks_are_uploaded(tmp_path, execution):
    low_rank = LowRank(MatrixProduct(), rank=2, alpha=2, init="lora", summary=False)
    loop = loop_of(FedLoRA(LoRAA2(), upload_ranks=[1, 3]), execution=execution)
    fitted(tmp_path, loop, low_rank)
    assert not loop.coordinator.answers.failed


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_kept_moments_are_there_in_a_second_fit(tmp_path, execution):
    module = Module(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    loop = loop_of(optimizer_state="keep", execution=execution)
    made = trainer(tmp_path, loop, limit_val_batches=0, max_epochs=2)
    fit(made, module, Data())
    # With another trainer nothing would be kept.
    made.fit_loop.max_epochs = 3
    fit(made, module, Data())
    assert not loop.coordinator.answers.failed
    for _, kept in loop.coordinator.states.items():
        moments = kept["optimizers"][0]
        assert {float(each["step"]) for each in moments.values()} == {3 * 24 / 8}


# It composes in double precision on purpose, see `TDPFed`.
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
@each_method("FedAvg", "FedMUD", "FedHM", "FedLoRA-CoLR")
def test_every_method_does_without_float64(tmp_path, name, execution):
    method = METHODS[name]
    form = next(form for form in method.forms)
    low_rank = [] if LOW_RANK[form] is None else [LOW_RANK[form]()]
    module = Module(method.network(), optimizer=method.optimizer)
    loop = loop_of(method.make(), execution=execution, **method.settings)
    with device.without_float64():
        try:
            fitted(tmp_path, loop, *low_rank, module=module)
        except MisconfigurationException as error:
            if "execution='vectorized'" not in str(error):
                raise
            pytest.skip(str(error))
    assert not loop.coordinator.answers.failed
    assert all(value.isfinite().all() for value in weights(module).values())


def test_means_without_float64_are_those_with_it(tmp_path):
    first = weights(fitted(tmp_path, loop_of()))
    with device.without_float64():
        second = weights(fitted(tmp_path, loop_of()))
    assert_same(first, second)


@pytest.mark.parametrize("privacy", ["samples", "clients"])
def test_noise_without_float64_is_that_with_it(tmp_path, privacy):
    def private():
        if privacy == "clients":
            return fitted(tmp_path, loop_of(privacy=ClientPrivacy(noise_multiplier=1.0), weighting="uniform", seed=1))
        callbacks = loop_of(seed=1), DifferentialPrivacy(noise_multiplier=1.0)
        return fit(trainer(tmp_path, *callbacks, limit_val_batches=0), Module(), Data())

    first = weights(private())
    with device.without_float64():
        second = weights(private())
    assert_same(first, second)


def test_auto_waits_for_the_device_before_it_reads_the_clock(tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr(auto, "synchronize", lambda where: waited.append(where.type))
    fitted(tmp_path, loop_of(execution="auto"), max_epochs=1)
    assert set(waited) == {device.NAME}
    assert len(waited) % 2 == 0


def test_activations_are_counted(tmp_path, monkeypatch):
    sizes = []
    measure = memory._bytes_of_a_step
    monkeypatch.setattr(memory, "_bytes_of_a_step", lambda *each: sizes.append(measure(*each)) or sizes[-1])
    # What was allocated before is none of it.
    torch.empty(10**8, dtype=torch.uint8, device=device.NAME)
    for width in (64, 4096):
        # Weights of one size, activations of another.
        net = nn.Sequential(nn.Linear(6, 4), nn.Unflatten(1, (4, 1)), Wide(width), nn.Flatten(), nn.LazyLinear(4))
        net(torch.zeros(2, 6))
        fitted(tmp_path, loop_of(execution="vectorized"), module=Module(net), max_epochs=1)
    # Of a batch of 8: what the sine and the mean take at least, in bytes.
    assert sizes[1] - sizes[0] >= 8 * 4 * (4096 - 64) * 4
    assert sizes[1] < 10**8


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, inputs):
        return inputs.expand(-1, -1, self.width).sin().square().mean(-1, keepdim=True)


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_dropout_is_drawn_from_the_seed(tmp_path, execution):
    ends = []
    for number in range(2):
        module = Module(network(dropout=0.5))
        torch.manual_seed(number)
        fitted(tmp_path, loop_of(execution=execution, seed=5), module=module)
        ends.append(weights(module))
    assert_same(*ends)


def test_the_devices_generator_is_seeded_and_given_back():
    where, read, drawn, afterwards = torch.device(device.NAME, 0), [], [], []
    for number, of_dataset in enumerate((5, 5, None)):
        torch.manual_seed(number)
        randomness = StepRandomness(where)
        randomness.open(of_dataset)
        read.append(torch.rand(3, device=where).cpu())
        randomness.seed(6)
        drawn.append(torch.rand(3, device=where).cpu())
        randomness.release()
        afterwards.append(torch.rand(3, device=where).cpu())
    torch.manual_seed(2)
    assert torch.equal(read[0], read[1])
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(afterwards[2], torch.rand(3, device=where).cpu())


def test_the_devices_generator_is_given_back(tmp_path):
    module = Module(network(dropout=0.5))
    torch.manual_seed(9)
    before = device.install().get_state()
    fitted(tmp_path, loop_of(seed=5), module=module)
    assert torch.equal(before, device.install().get_state())


def test_no_generator_of_another_device_is_touched(tmp_path, monkeypatch):
    def refuse(*arguments: Any) -> None:
        raise AssertionError("a generator that is not in use")

    class WhileTraining(pl.Callback):
        # Lightning itself keeps all of them around its sanity check.
        def on_train_start(self, *arguments):
            for name in ("get_rng_state_all", "set_rng_state_all", "manual_seed_all"):
                monkeypatch.setattr(torch.cuda, name, refuse)
            monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    module, loop = Module(), loop_of()
    fit(trainer(tmp_path, loop, WhileTraining(), limit_val_batches=0), module, Data())


class Total(torchmetrics.Metric):
    """Has a new state after each update, as most metrics have."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, value):
        self.total = self.total + value

    def compute(self):
        return self.total


class Metered(Module):
    def __init__(self, metric: torchmetrics.Metric) -> None:
        super().__init__()
        self.metric = metric

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.metric.update(loss.detach())
        return loss


# One is written in place, one replaced, one appended to.
@pytest.mark.parametrize("kind", [torchmetrics.MeanMetric, Total, torchmetrics.CatMetric])
def test_a_metric_in_a_mapped_step_is_named(tmp_path, kind):
    module = Metered(kind())
    with pytest.raises(MisconfigurationException, match=f"updates the metric self.metric .{kind.__name__}."):
        fitted(tmp_path, loop_of(execution="vectorized"), module=module)
    # Nothing of the map is left in it.
    module.metric.update(torch.tensor(2.0))
    assert float(module.metric.compute()) == 2


@nightly_except("bf16-mixed-sequential", "16-mixed-sequential")
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_makes_the_steps_of_lightning(tmp_path, counted, precision, execution):
    if (precision, execution) == ("16-mixed", "vectorized"):
        pytest.skip("refused: one factor scales all clients' losses")
    ends = []
    for fast in (True, False):
        counted.clear()
        strategy = SingleDeviceStrategy(device=torch.device(device.NAME, 0))
        parts = {"accelerator": device.StrictAccelerator(), "strategy": strategy}
        parts["plugins"] = [MixedPrecision(precision, device.NAME)]
        loop = loop_of(execution=execution)
        with lightnings_own(not fast):
            module = fitted(tmp_path, loop, gradient_clip_val=0.5, **parts)
        ends.append(weights(module))
        # One by one, what scales losses is left to Lightning.
        assert bool(counted) == (fast and precision != "16-mixed")
    assert_same(*ends)


@pytest.fixture
def group():
    """Return the backends of a group of one process; the device's sends nothing."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    yield f"cpu:gloo,{device.NAME}:fake"
    torch.distributed.destroy_process_group()


@nightly_except("sequential")
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_one_process_of_client_parallel_makes_the_same_steps(tmp_path, counted, group, execution):
    ends = []
    for strategy in (ClientParallelStrategy(process_group_backend=group), SingleDeviceStrategy(f"{device.NAME}:0")):
        counted.clear()
        loop = loop_of(execution=execution)
        parts = {"accelerator": device.StrictAccelerator(), "devices": 1, "strategy": strategy}
        module = fitted(tmp_path, loop, max_epochs=6, **parts)
        ends.append(weights(module))
        steps = len(counted) // 6
        assert steps == (3 if execution == "vectorized" else 12)
        if execution == "vectorized":
            assert [waits(calls) for calls in counted[5 * steps :]] == [[]] * steps
        assert not why_not.steps_are_observed(module.trainer, loop.algorithm)
    assert_same(*ends)


class Attends(nn.Module):
    """Attention over a sample's features, of queries that are cast as autocast does and others that are not."""

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding, self.query = nn.Linear(1, 8), nn.Linear(8, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 4)
        self.mixed = mixed

    def forward(self, inputs):
        # Mean and difference are in single precision under autocast, products in half.
        values = self.embedding(inputs.unsqueeze(-1))
        if not self.mixed:
            return self.head(self.layer(values).mean(1))
        single = (values - values.mean(1, keepdim=True)).float()
        return self.head(nn.functional.scaled_dot_product_attention(self.query(values), single, single).mean(1))


@pytest.mark.parametrize("mixed", [False, True])
def test_attention_steps_together_under_autocast(tmp_path, mixed):
    ends, start = [], weights(Module(Attends(mixed)))
    for execution in ("sequential", "vectorized"):
        strategy = SingleDeviceStrategy(device=torch.device(device.NAME, 0))
        parts = {"accelerator": device.StrictAccelerator(), "strategy": strategy}
        parts["plugins"] = [MixedPrecision("bf16-mixed", device.NAME)]
        loop = loop_of(execution=execution)
        ends.append(weights(fitted(tmp_path, loop, module=Module(Attends(mixed)), **parts)))
        assert not loop.coordinator.answers.failed
    for name, value in ends[0].items():
        moved = (value - start[name]).norm()
        assert (ends[1][name] - value).norm() <= 0.1 * moved + 1e-4, name


@nightly_except("FedAvg-even", "SCAFFOLD-scattered")
@pytest.mark.parametrize("partition", [EVEN, SCATTERED], ids=["even", "scattered"])
@pytest.mark.parametrize("method", [FedAvg(), SCAFFOLD(), FedProx(0.1), FedBAT()], ids=lambda each: type(each).__name__)
def test_no_step_waits_for_the_device(tmp_path, counted, method, partition):
    loop = loop_of(method, partition, execution="vectorized", local_epochs=1 if partition is EVEN else 2)
    fitted(tmp_path, loop, max_epochs=6)
    steps = len(counted) // 6
    # What a step leaves is looked at in the first ones.
    assert [waits(calls) for calls in counted[5 * steps :]] == [[]] * steps


@nightly_except("MLP-23")
# Those that docs/devices.md lists.
@pytest.mark.parametrize(("name", "most"), [("MLP", 23), ("CNN4", 51)])
def test_a_step_is_few_calls(name, most):
    found = calls_of.count(name, clients=4)
    assert found["calls"] <= most
    assert not waits(found["by name"])


class OfRounds(pl.Callback):
    """Counts the calls of each round, from its first batch to its end."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_epoch_start(self, *arguments):
        self.counting = device.calls()
        self.found.append(self.counting.__enter__())

    def on_train_epoch_end(self, *arguments):
        self.counting.__exit__(None, None, None)


def test_a_round_waits_where_it_begins_and_ends(tmp_path, counted):
    loop, rounds = loop_of(execution="vectorized"), OfRounds()
    fit(trainer(tmp_path, loop, rounds, limit_val_batches=0, max_epochs=6), Module(), Data())
    found = {name: count for name, count in rounds.found[5].items() if name.startswith(device.SYNC)}
    # Whether the module is what it was shown; whether what clients sent is finite, and the new model.
    assert sum(found.values()) <= 4, found


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_images_are_read_on_the_device(tmp_path, monkeypatch, execution):
    draws = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (96, 3, 4, 4), dtype=torch.uint8, generator=draws)
    targets = torch.randint(4, (96,), generator=draws)
    images = TensorImages(pixels, targets, [0.5] * 3, [0.25] * 3, crop_padding=1, mirror=True)
    sent, send = [], batches.move_to_device

    def sending(tensor, where):
        # Clients together are tried with batches of the host.
        if where.type == device.NAME:
            sent.append((tensor.dtype, tensor.shape))
        return send(tensor, where)

    monkeypatch.setattr(batches, "move_to_device", sending)
    copies, copy_of = [], DeviceData.copy_of
    monkeypatch.setattr(DeviceData, "copy_of", lambda self, each: copies.append(each.dtype) or copy_of(self, each))
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 4))
    loop, rounds = loop_of(execution=execution, data_on_device="auto"), OfRounds()
    made = trainer(tmp_path, loop, rounds, limit_val_batches=0, max_epochs=4)
    made.fit(Module(net), DataLoader(images, 8, shuffle=True, collate_fn=collate_images))
    # A round's indices, and its draws: two offsets and whether it is mirrored.
    assert sent == 4 * [(torch.int64, (96,)), (torch.int64, (3, 96))]
    assert torch.uint8 in copies
    # Beside these, what clients begin with and the weights of what is logged.
    crossing = {name: count for name, count in rounds.found[3].items() if "copy to the device" in name}
    assert crossing.pop(f"{device.SYNC}copy to the device", 0) <= 1
    assert sum(crossing.values()) <= 3
    assert images.normalised._images is None


class Losses(pl.Callback):
    """Keeps the epoch's mean that training steps log."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.found.append(float(trainer.callback_metrics["train_loss"]))


@pytest.mark.parametrize("kept", [3, 10_000])
def test_means_over_the_epoch_are_added_up_on_the_device(tmp_path, monkeypatch, kept):
    monkeypatch.setattr(logbook, "_MOST_PENDING", kept)
    ends = []
    for execution in ("vectorized", "sequential"):
        losses, loop = Losses(), loop_of(FedAvg(), UNEVEN, execution=execution)
        fit(trainer(tmp_path, loop, losses, max_epochs=3, limit_val_batches=0), Module(), Data())
        ends.append(losses.found)
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)


class Shaped(Module):
    """Logs a loss of shape [1], a whole number and a number of Python's."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        shown = {"train_loss": loss.view(1), "whole": (batch[0][:, 0] > 0).sum(), "number": 2.5}
        for name, value in shown.items():
            self.log(name, value, on_step=False, on_epoch=True)
        return loss


class Means(pl.Callback):
    """Keeps the epoch's means of what `Shaped` logs."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.found += [float(trainer.callback_metrics[name]) for name in ("train_loss", "whole", "number")]


def test_means_of_any_form_are_added_up(tmp_path):
    ends = []
    for execution in ("vectorized", "sequential"):
        means, loop = Means(), loop_of(FedAvg(), UNEVEN, execution=execution)
        fit(trainer(tmp_path, loop, means, limit_val_batches=0, max_epochs=2), Shaped(), Data())
        ends.append(means.found)
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)
    assert ends[0][2] == pytest.approx(2.5)


def test_what_a_dropped_chunk_has_logged_does_not_count(tmp_path):
    class Failing(Module):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1 and self.current_epoch == 1 and batch[0].shape[-2] == 2:
                raise ValueError("a sample that cannot be used")
            self.log("one", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
            return super().training_step(batch, batch_idx)

    # Two chunks, of the first of which one client has a batch of two samples.
    parts = [list(range(24)), list(range(24, 34)), list(range(34, 58)), list(range(58, 74))]
    loop = loop_of(FedAvg(), parts, execution="vectorized", chunk_size=2)
    made = trainer(tmp_path, loop, limit_val_batches=0, max_epochs=2)
    fit(made, Failing(), Data())
    assert made.callback_metrics["federated/failed"] == 2
    # The clients of the other chunk have logged all their steps, and those of this one their first.
    assert made.callback_metrics["one"] == sum(
        -(-len(parts[client]) // 8) for client in loop.coordinator.answers.answered
    )
