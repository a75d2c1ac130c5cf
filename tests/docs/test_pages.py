"""Readers who follow the pages word for word get where the pages say."""

import functools
import importlib
import inspect
import json
import sys
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from tests.docs.federated_files import write_files
from tests.docs.page import CHECKED, DOCS, FOLLOWED, ROOT, Reader, blocks, called, check_call
from tests.grids import nightly_except


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def stand_in(monkeypatch, name):
    """Have a logger of Lightning, whose package or server is not here, take its arguments and write a table."""
    from lightning.pytorch import loggers

    # It looks for loggers of the class itself.
    import lightning_lowrank.callbacks.round_pictures  # noqa: F401

    signature = inspect.signature(getattr(loggers, name))

    def make(**arguments):
        signature.bind(**arguments)
        return loggers.CSVLogger("logged", name=name)

    monkeypatch.setattr(loggers, name, make)


def stand_in_for_downloads(monkeypatch):
    """Have no weights and made-up images where they would be fetched, and two batches of such a fit."""
    import lightning as L
    import torchvision

    from lightning_lowrank.data import CIFAR10

    draws = torch.Generator().manual_seed(0)
    images = torch.randint(256, (400, 3, 32, 32), dtype=torch.uint8, generator=draws)
    monkeypatch.setattr(CIFAR10, "prepare_data", lambda self: None)
    monkeypatch.setattr(CIFAR10, "load_images", lambda self, train: (images, torch.arange(400) % 10))
    network, fit = torchvision.models.resnet18, L.Trainer.fit
    monkeypatch.setattr(torchvision.models, "resnet18", lambda weights: network())

    @functools.wraps(fit)
    def two_batches(self, *given, **named):
        if any(isinstance(each, CIFAR10) for each in (*given, *named.values())):
            self.fit_loop.max_epochs = 1
            self.limit_train_batches = self.limit_val_batches = 2
        return fit(self, *given, **named)

    monkeypatch.setattr(L.Trainer, "fit", two_batches)


def check_readme(names):
    assert names["trainer"].callback_metrics["val_acc"] > 0.7
    assert names["trainer"].callback_metrics["comm/ratio"] < 1 / 8


def check_compress(names):
    trained, factorised, tuned = (names[name] for name in ("trained", "factorised", "tuned"))
    assert trained > 0.97
    assert factorised > 0.9
    assert tuned > trained - 0.015
    assert type(names["module"].network.classifier) is nn.Linear
    module = names["MyModule"](names["MLP"](in_features=64, hidden=[32], out_features=10))
    trainer = names["L"].Trainer(fast_dev_run=2)
    trainer.fit(module, names["data"])
    state = trainer.optimizers[0].state
    assert state[module.network.hidden[0].weight]["exp_avg"].shape == (32, 16)
    assert state[module.network.classifier.weight]["exp_avg"].shape == (10, 32)


def check_lora(names):
    assert names["network"].fc.weight.requires_grad
    assert not names["network"].conv1.frozen_weight.requires_grad
    assert names["trainer"].callback_metrics["comm/ratio"] < 0.1


def check_notebook(names):
    dense, small = names["dense"], names["small"]
    assert len(dense.accuracy) == len(small.accuracy) == 10
    assert small.megabytes[-1] < dense.megabytes[-1] / 10
    assert min(small.accuracy[-1], dense.accuracy[-1]) > 0.8
    assert len(names["axes"].lines) == 2


AFTERWARDS = {
    "README.md": check_readme,
    "docs/howto/compress.md": check_compress,
    "docs/howto/lora.md": check_lora,
    "docs/tutorials/notebook.md": check_notebook,
}
"""What the names of a page's Python must hold at its end, beyond what the page prints."""
LONG = (
    "docs/index.md",
    "docs/simulated_time.md",
    *(f"docs/howto/{name}.md" for name in ("checkpoints", "compare", "compress", "deploy", "gpu")),
    *(f"docs/howto/{name}.md" for name in ("loggers", "lora", "parts", "scale", "sweeps")),
    *(f"docs/tutorials/{name}.md" for name in ("compress", "feddyn", "pretrained", "report", "ten_minutes")),
)
"""Pages that take as long as all others together. They are followed nightly."""


def each_page() -> list[Any]:
    cases = []
    for page in FOLLOWED:
        name = str(page.relative_to(ROOT))
        cases.append(pytest.param(page, id=name, marks=pytest.mark.nightly if name in LONG else pytest.mark.slow))
    return cases


@pytest.mark.parametrize("page", each_page())
def test_follow(page, folder, monkeypatch):
    if any("flower" in block.text for block in blocks(page) if block.language == "bash"):
        pytest.importorskip("flwr", reason="Flower needs Python 3.11")
    if any("import optuna" in block.text for block in blocks(page)):
        pytest.importorskip("optuna", reason="Optuna is not installed")
    if any("import onnxruntime" in block.text for block in blocks(page)):
        pytest.importorskip("onnxscript", reason="onnxscript is not installed")
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    if page.name == "files.md":
        for library in ("h5py", "ijson", "pyarrow", "transformers"):
            pytest.importorskip(library)
        write_files()
    reader = Reader(folder)
    monkeypatch.setitem(sys.modules, "page", reader.module)
    for name in ("WandbLogger", "MLFlowLogger"):
        stand_in(monkeypatch, name)
    stand_in_for_downloads(monkeypatch)
    reader.follow(page)
    AFTERWARDS.get(str(page.relative_to(ROOT)), lambda names: None)(vars(reader.module))


@nightly_except("docs/CONTRIBUTING.md")
@pytest.mark.slow
@pytest.mark.parametrize("page", CHECKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_take_long_could_be_run(page, folder):
    """Their recipes are read, and their files and options looked up."""
    Reader(folder)
    found = called(page, folder)
    assert found
    for call in found:
        check_call(call)


METHODS = yaml.safe_load((DOCS / "methods.yaml").read_text())


@nightly_except("FedMUD")
@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_measured_again(folder, monkeypatch, name):
    """As it was when the page's curve was made, but for another release's or machine's rounding."""
    monkeypatch.syspath_prepend(DOCS)
    gallery = importlib.import_module("gallery")
    found = gallery.measure(name, rounds=3)
    known = json.loads((DOCS / "curves.json").read_text())["methods"][name]
    assert found["bytes"] == known["bytes"][:3]
    for metric in ("val_acc", "personal/val_acc"):
        assert found[metric] == pytest.approx(known[metric][:3], abs=0.1)
