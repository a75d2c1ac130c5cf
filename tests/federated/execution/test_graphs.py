"""Fits whose steps are replayed from graphs end bit for bit where those without graphs end."""

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import TensorDataset

from lightning_lowrank import MOON, SCAFFOLD, FedNTD, FromIndices
from lightning_lowrank.federated.execution import graphs
from lightning_lowrank.federated.execution.graphs import StepGraphs
from tests.federated.execution.runs import OPTIMIZERS, run
from tests.grids import nightly_except
from tests.helpers import Data, Module, blobs, network, weights


@pytest.fixture
def counted(monkeypatch):
    """Have each step traced at once; return what has been traced and replayed."""
    counts = {"traced": 0, "replayed": 0, "reasons": []}
    find, trace, give_up = StepGraphs.find, StepGraphs._trace, StepGraphs.give_up

    def found(self, *arguments):
        replay = find(self, *arguments)
        counts["replayed"] += replay is not None
        return replay

    def traced(self, *arguments):
        counts["traced"] += 1
        return trace(self, *arguments)

    def told(self, reason):
        counts["reasons"].append(reason)
        give_up(self, reason)

    monkeypatch.setattr(graphs, "_WORTH_TRACING", 0)
    monkeypatch.setattr(StepGraphs, "_is_worth_it", lambda self, key, first: True)
    monkeypatch.setattr(StepGraphs, "find", found)
    monkeypatch.setattr(StepGraphs, "_trace", traced)
    monkeypatch.setattr(StepGraphs, "give_up", told)
    return counts


def assert_same(one, two):
    """Compare nested containers bit for bit."""
    assert type(one) is type(two)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, two)
    elif isinstance(one, dict):
        assert one.keys() == two.keys()
        for key, value in one.items():
            assert_same(value, two[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two)
        for first, second in zip(one, two, strict=True):
            assert_same(first, second)
    else:
        assert one == two


class Logged(pl.Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        named = {name: value.item() for name, value in trainer.callback_metrics.items() if "seconds" not in name}
        self.values.append((outputs["loss"].item(), named.get("train_loss")))

    def on_train_epoch_end(self, trainer, pl_module):
        self.values.append(float(trainer.callback_metrics["train_loss"]))


def ends(tmp_path, **settings):
    logged = Logged()
    torch.manual_seed(1)
    settings = {"trainer": {"max_epochs": 2}, "dtype": torch.float32, **settings}
    callbacks = [logged, *settings.pop("callbacks", [])]
    module, _, fitted = run(tmp_path, "vectorized", callbacks=callbacks, **settings)
    return weights(module), logged.values, [each.state_dict() for each in fitted.optimizers], torch.get_rng_state()


def without(tmp_path, **settings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepGraphs, "find", lambda self, *arguments: None)
        return ends(tmp_path, **settings)


class Dropped(Module):
    def __init__(self, **arguments):
        super().__init__(network(dropout=0.3), **arguments)


class Short(Data):
    def __init__(self):
        inputs, targets = blobs().tensors
        super().__init__(TensorDataset(inputs.bfloat16(), targets))


CASES = {
    "plain": {},
    "momentum, clipped": {
        "module": partial(Module, optimizer=OPTIMIZERS["momentum"]),
        "trainer": {"max_epochs": 2, "gradient_clip_val": 0.3},
    },
    "Adam, kept": {"module": partial(Module, optimizer=OPTIMIZERS["Adam"]), "optimizer_state": "keep"},
    "ProjectedSGD": {"module": partial(Module, optimizer=OPTIMIZERS["ProjectedSGD"])},
    "BatchNorm": {"module": lambda: Module(network(norm=nn.BatchNorm1d)), "data_size": 6},
    "dropout": {"module": Dropped},
    "MOON": {"algorithm": partial(MOON, features="net.2")},
    "FedNTD": {"algorithm": partial(FedNTD, logits="net")},
    "SCAFFOLD": {"algorithm": SCAFFOLD},
    "bf16": {"dtype": torch.bfloat16, "data": Short()},
    "weight": {"form": "weight"},
    "update": {"form": "update"},
    "blocks": {"form": "decoupled blocks"},
}


@nightly_except("SCAFFOLD")
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=() if name in ("plain", "dropout") else pytest.mark.slow) for name in CASES],
)
@pytest.mark.nightly
def test_equals_a_fit_without_graphs(tmp_path, counted, case):
    settings = dict(CASES[case])
    if settings.pop("data_size", None):
        # None has a last batch of one sample, which BatchNorm refuses.
        settings["partition"] = FromIndices([list(range(6)), list(range(6, 48)), list(range(48, 70))])
    expected = without(tmp_path, **settings)
    assert counted["traced"] == 0
    assert_same(ends(tmp_path, **settings), expected)
    assert counted["reasons"] == []
    assert counted["replayed"] > 5


class Number(Module):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + batch_idx)


class Changing(Module):
    factor = 1.0

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.factor

    def on_train_batch_end(self, *arguments):
        type(self).factor = 1.0 + self.trainer.global_step / 8


class Twice(Changing):
    def on_train_batch_end(self, *arguments):
        type(self).factor = 1.0 + self.trainer.global_step % 2


class OutOfTensor(Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.frozen.item()


class Counting(Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.tensor(0.0), persistent=False)

    def training_step(self, batch, batch_idx):
        self.steps.add_(1)
        return super().training_step(batch, batch_idx) * self.steps.clone()


@nightly_except("Counting-writes into a tensor")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Number, "uses the number of the step"),
        # Some ten traces.
        pytest.param(Changing, "factor, which changes again and again", marks=pytest.mark.nightly),
        pytest.param(OutOfTensor, "out of a tensor", marks=pytest.mark.slow),
        pytest.param(Counting, "writes into a tensor", marks=pytest.mark.slow),
    ],
)
@pytest.mark.nightly
def test_steps_that_no_graph_can_make(tmp_path, counted, module, reason):
    results = []
    for fitted in (without, ends):
        module.factor = 1.0
        # Clients with batches of one form count alike.
        equal = {"partition": FromIndices([range(24), range(24, 48), range(48, 72)])} if module is Counting else {}
        results.append(fitted(tmp_path, module=module, trainer={"max_epochs": 3}, **equal))
    assert_same(*results)
    assert len(counted["reasons"]) == 1
    assert reason in counted["reasons"][0]
    # The first traces of each form of a batch are no changes.
    assert counted["traced"] <= 3 + graphs._MOST_CHANGES


@pytest.mark.nightly
def test_a_step_that_changes_to_and_fro_is_traced_for_each(tmp_path, counted):
    Twice.factor = 1.0
    expected = without(tmp_path, module=Twice)
    Twice.factor = 1.0
    assert_same(ends(tmp_path, module=Twice), expected)
    assert counted["reasons"] == []


@pytest.mark.nightly
def test_a_graph_that_gives_other_values_is_dropped(tmp_path, counted, monkeypatch, caplog):
    expected = without(tmp_path)
    original = graphs.tracing.Traced.replay
    monkeypatch.setattr(
        graphs.tracing.Traced,
        "replay",
        lambda self, sizes: lambda tensors: [value + 1 for value in original(self, sizes)(tensors)],
    )
    assert_same(ends(tmp_path), expected)
    assert counted["reasons"] == ["its graph gives other values than the step"]


@pytest.mark.parametrize("leaves_out", [False, True], ids=["every replay", "all but a round's first"])
@pytest.mark.nightly
def test_a_graph_that_gives_other_values_later_on_is_dropped(tmp_path, counted, monkeypatch, leaves_out):
    longer = {"trainer": {"max_epochs": 4}}
    expected = without(tmp_path, **longer)
    original = graphs.tracing.Traced.replay
    used: list[int] = []

    def replay(self, sizes):
        run = original(self, sizes)

        def spoiled(tensors):
            used.append(1)
            return [value + 1 if len(used) > 12 else value for value in run(tensors)]

        return spoiled

    find, begin, begun = StepGraphs.find, StepGraphs.begin_round, []

    def leaving_out(self, step):
        replay = find(self, step)
        # As where another part of the same step has no graph.
        if leaves_out and replay is not None and begun:
            begun.clear()
            return None
        return replay

    monkeypatch.setattr(StepGraphs, "begin_round", lambda *given: begun.append(True) or begin(*given))
    monkeypatch.setattr(StepGraphs, "find", leaving_out)
    monkeypatch.setattr(graphs.tracing.Traced, "replay", replay)
    with pytest.raises(AssertionError):
        assert_same(ends(tmp_path, **longer), expected)
    assert counted["reasons"] == ["its graph gives other values than the step"]


class Listener(pl.Callback):
    def on_before_backward(self, trainer, pl_module, loss):
        pass


def test_no_graph_where_somebody_listens_between(tmp_path, counted):
    ends(tmp_path, callbacks=[Listener()])
    assert counted["replayed"] == counted["traced"] == 0


@pytest.mark.slow
def test_no_graph_where_anomalies_are_looked_for(tmp_path, counted):
    ends(tmp_path, trainer={"max_epochs": 1, "detect_anomaly": True})
    assert counted["traced"] == 0
    assert "detect_anomaly" in counted["reasons"][0]


def test_a_short_run_traces_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(StepGraphs, "_trace", lambda *arguments: pytest.fail("traced"))
    ends(tmp_path)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.nightly
def test_resumes_in_the_middle_of_a_round_with_and_without_graphs(tmp_path, counted, first):
    every = ModelCheckpoint(tmp_path / "every", "{step}", save_top_k=-1, every_n_train_steps=1)
    settings = {"module": partial(Dropped, optimizer=OPTIMIZERS["Adam"])}
    whole = (ends if first else without)(tmp_path, callbacks=[every], **settings)
    for file in sorted((tmp_path / "every").glob("*.ckpt"))[1::3]:
        resumed = (without if first else ends)(tmp_path, ckpt_path=file, **settings)
        assert_same(resumed[0], whole[0])
        assert_same(resumed[2], whole[2])
