"""The zoo compares what it says it compares, and none of its modules is trained otherwise than by a plain fit."""

import pytest
import torch
from torch import nn

from tests.grids import nightly_except
from tests.zoo import registry
from tests.zoo.bases import LitClassifier, tensors
from tests.zoo.compare import WAYS, Outcome, Row, _compare, examine, first_sentence, mean
from tests.zoo.registry import GALLERIES, Exhibit, MissingExtra, load
from tests.zoo.table import markdown

# One with padded batches, one that optimizes by hand, and two that keep something between steps.
CHOSEN = [
    ("language", "BERT with padded batches"),
    ("generative", "GAN without draws"),
    ("steps", "Metric computed at the epoch's end"),
    ("steps", "Penalty on every second batch"),
]


def gallery(name):
    try:
        return load(name)
    except MissingExtra as missing:
        pytest.skip(str(missing))


@nightly_except("BERT with padded batches")
@pytest.mark.slow
@pytest.mark.parametrize(("file", "name"), CHOSEN, ids=[name for _, name in CHOSEN])
def test_module_has_no_fault(file, name):
    (exhibit,) = (each for each in gallery(file) if each.name == name)
    row = examine(exhibit)
    assert set(row.outcomes) == set(WAYS)
    assert not row.faults, {way: row.outcomes[way].said + row.outcomes[way].trace for way in row.faults}


@pytest.mark.nightly
@pytest.mark.parametrize("file", GALLERIES)
def test_no_module_has_a_fault(file):
    faulty = {row.name: row.faults for row in map(examine, gallery(file)) if row.faults}
    assert not faulty


class Drifts(LitClassifier):
    """Trains otherwise in a round than on its own, whatever the package does."""

    def on_train_epoch_start(self):
        if any(type(callback).__name__ == "FederatedLoop" for callback in self.trainer.callbacks):
            with torch.no_grad():
                next(self.parameters()).mul_(1.001)


def drifting():
    return Drifts(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))), tensors(
        torch.randn(23, 4), torch.randint(2, (23,))
    )


@pytest.mark.slow
def test_a_difference_is_found():
    row = examine(Exhibit("Drifts", "Tests", "drifts", drifting))
    assert row.outcomes["sequential"].verdict == "differs"
    assert row.outcomes["sequential"].difference > 1e-4
    assert "sequential" in row.faults
    assert "| **differs** " in markdown([row])


class Stale(LitClassifier):
    """Computes with the weight that its first layer had before it was converted."""

    def __init__(self, network):
        super().__init__(network)
        self.kept = [network[0].weight]

    def forward(self, inputs):
        return self.net[1:](nn.functional.linear(inputs, self.kept[0]))


@pytest.mark.slow
def test_a_layer_that_nothing_computes_with_is_found():
    def make():
        network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        return Stale(network), tensors(torch.randn(23, 4), torch.randint(2, (23,)))

    row = examine(Exhibit("Stale", "Tests", "stale", make))
    assert "recovered weights" in row.outcomes["low-rank sequential"].said


def test_a_module_that_fails_on_its_own_is_no_fault_of_the_package():
    def make():
        module, loader = drifting()
        module.training_step = None
        return module, loader

    with pytest.raises(RuntimeError, match=r"Trainer\.fit"):
        examine(Exhibit("Fails", "Tests", "fails", make))


def test_comparison_sees_each_tensor():
    first = {"weight": torch.ones(3, dtype=torch.float64), "steps": torch.tensor(4)}
    assert _compare(first, first, first).verdict == "equal"
    other = {**first, "steps": torch.tensor(5)}
    assert _compare(other, first, first).worst == "steps"
    assert _compare({**first, "more": torch.ones(1)}, first, first).verdict == "differs"
    assert _compare({**first, "weight": torch.full((3,), torch.nan)}, first, first).verdict == "differs"


def test_mean_weighs_by_samples_and_rounds_integers():
    ends = [{"a": torch.tensor(1.0), "n": torch.tensor(3)}, {"a": torch.tensor(4.0), "n": torch.tensor(2)}]
    assert mean(ends, [2, 1]) == {"a": torch.tensor(2.0), "n": torch.tensor(3)}


def test_a_missing_package_is_named(monkeypatch):
    def fail(name):
        raise ModuleNotFoundError("No module named 'timm'", name="timm")

    monkeypatch.setattr(registry.importlib, "import_module", fail)
    with pytest.raises(MissingExtra, match=r"images_timm\.py.*'timm'.*'\.\[zoo\]'"):
        load("images_timm")


def test_first_sentence():
    assert first_sentence("one thing.\n Another: two. three") == "one thing."
    assert first_sentence("a.b.c is missing") == "a.b.c is missing"


def test_reasons_are_told_once():
    refused = Outcome("refused", said="it cannot be mapped.")
    rows = [Row(name, "Tests", "about", outcomes=dict.fromkeys(WAYS, refused)) for name in ("First", "Second")]
    assert markdown(rows).count("it cannot be mapped.") == 1
