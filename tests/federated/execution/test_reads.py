"""Whatever a step reads of Python is noticed once it changes, or keeps the step from being traced."""

import argparse
import contextlib
import itertools
import math
import random
import sys
import types
from collections import deque
from dataclasses import dataclass
from functools import partial

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn

from lightning_lowrank.federated.execution.reads import Observed, Reads, unobserved
from lightning_lowrank.internals.tracing import Traced, Untraceable
from tests.helpers import Module, trainer

PATCHES: list[pytest.MonkeyPatch] = []


def monkey(owner, name, value):
    patch = PATCHES[-1]
    (patch.setitem if isinstance(owner, dict) else patch.setattr)(owner, name, value)


FACTOR = 2.0
SETTINGS = {"factor": 2.0}
DRAWS = torch.Generator()
ARRAY = np.ones(2)
CONFIG = types.SimpleNamespace(factor=2.0)
SPACE = types.ModuleType("space")
SPACE.factor = 2.0


class Globals:
    factor = 2.0


def imported():
    import space_of_settings

    return space_of_settings.factor


def scaled(value):
    return value * FACTOR


@dataclass(slots=True)
class Slots:
    factor: float = 2.0


class Helper:
    scale = 2.0

    def __init__(self):
        self.factor = 2.0

    def __call__(self):
        return self.factor * self.scale * FACTOR


class Own(Module):
    """Its step is what a test gives it."""

    alpha = 2.0
    of_class = (2.0,)
    listed = [2.0]  # noqa: RUF012

    def __init__(self, step=lambda self: 1.0):
        super().__init__()
        self.save_hyperparameters({"factor": 2.0, "nested": {"factor": 2.0}})
        self.step = step
        self.number = 2.0
        self.names = ["a", "b"]
        self.table = {"factor": 2.0, "inner": [1, {"deep": 3}]}
        self.recent = deque([1.0])
        self.chosen = {1}
        self.helper = Helper()
        self.slots = Slots()
        self.net.extra = 2.0
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.bound = partial(pow, 2.0)
        self.args = argparse.Namespace(factor=2.0)
        self.constant = torch.ones(2)

    @property
    def doubled(self):
        return self.number * FACTOR

    @staticmethod
    def fixed():
        return FACTOR

    def method(self):
        return self.number


def watched(step, module=None, roots=()):
    """Watch a step as the stack makes it: the function's own name is known to no module."""
    module = module or Own()
    # The attribute is read by the step, as any method of a module is.
    module.step = types.MethodType(step, module)
    reads = Reads(module, roots)
    with reads.watching():
        module.step()
    return module, reads


def set_to(path, value):
    """Return what sets an attribute or entry of a module by its path."""

    def change(module):
        *way, last = path.split(".")
        item = module
        for name in way:
            item = item[name] if isinstance(item, dict) else getattr(item, name)
        if isinstance(item, dict):
            item[last] = value
        else:
            setattr(item, last, value)

    return change


CHANGES = {
    "a number": (lambda self: self.number, set_to("number", 3.0)),
    "the same number as an int": (lambda self: self.number, set_to("number", 2)),
    "a number of a part": (lambda self: self.net.extra, set_to("net.extra", 3.0)),
    "a method": (lambda self: self.method(), set_to("number", 3.0)),
    "another method": (lambda self: self.method(), lambda module: setattr(module, "method", lambda: 1.0)),
    "a property": (lambda self: self.doubled, set_to("number", 3.0)),
    "a number of the class": (lambda self: self.alpha, set_to("alpha", 3.0)),
    "a tuple of the class": (lambda self: self.of_class[0], set_to("of_class", (3.0,))),
    "a list of the class": (lambda self: self.listed[0], lambda module: module.listed.append(1.0)),
    "what was not there": (lambda self: getattr(self, "missing", 1.0), set_to("missing", 3.0)),
    "what a part has not": (lambda self: hasattr(self.net, "missing"), set_to("net.missing", 3.0)),
    "a list": (lambda self: self.names[0], lambda module: module.names.append("c")),
    "an entry of a list": (lambda self: self.names[0], lambda module: module.names.__setitem__(0, "d")),
    "a table": (lambda self: self.table["factor"], set_to("table.factor", 3.0)),
    "the type in a table": (lambda self: self.table["factor"], set_to("table.factor", 2)),
    "a table in a list": (lambda self: self.table, lambda module: module.table["inner"][1].update(deep=4)),
    "a deque": (lambda self: self.recent[0], lambda module: module.recent.append(2.0)),
    "a set": (lambda self: 1 in self.chosen, lambda module: module.chosen.add(2)),
    "an object's attribute": (lambda self: self.helper.factor, set_to("helper.factor", 3.0)),
    "an object's class": (lambda self: self.helper(), lambda module: monkey(Helper, "scale", 3.0)),
    "the command line's words": (lambda self: self.args.factor, set_to("args.factor", 3.0)),
    "a slot": (lambda self: self.slots.factor, set_to("slots.factor", 3.0)),
    "another object": (lambda self: self.helper.factor, lambda module: setattr(module, "helper", Helper())),
    "hparams": (lambda self: self.hparams.factor, set_to("hparams.factor", 3.0)),
    "hparams within": (lambda self: self.hparams["nested"], lambda module: module.hparams.nested.update(factor=3.0)),
    "training": (lambda self: self.training, lambda module: module.train(not module.training)),
    "training of a part": (lambda self: self.drop(torch.ones(2)), lambda module: module.drop.eval()),
    "dropout": (lambda self: self.drop(torch.ones(2)), set_to("drop.p", 0.1)),
    "a part": (lambda self: self.net(torch.ones(6)), lambda module: module.net.__setitem__(0, nn.Linear(6, 16))),
    "the parts": (lambda self: self.net(torch.ones(6)), lambda module: module.net.append(nn.ReLU())),
    "a part's forward": (lambda self: self.net(torch.ones(6)), lambda module: setattr(module.net[0], "forward", abs)),
    "a hook": (lambda self: self.net(torch.ones(6)), lambda module: module.net[0].register_forward_hook(print)),
    "a frozen value": (lambda self: self.frozen, lambda module: setattr(module, "frozen", nn.Parameter(torch.ones(2)))),
    "a tensor": (lambda self: self.constant, lambda module: setattr(module, "constant", torch.ones(2))),
    "arguments of a partial": (lambda self: self.bound(2), lambda module: setattr(module, "bound", partial(pow, 3.0))),
    "a global number": (lambda self: FACTOR, lambda module: monkey(globals(), "FACTOR", 3.0)),
    "a global of a function": (lambda self: scaled(1.0), lambda module: monkey(globals(), "FACTOR", 3.0)),
    "a global of a static method": (lambda self: self.fixed(), lambda module: monkey(globals(), "FACTOR", 3.0)),
    "a global of a property": (lambda self: self.doubled, lambda module: monkey(globals(), "FACTOR", 3.0)),
    "a global of an object's call": (lambda self: self.helper(), lambda module: monkey(globals(), "FACTOR", 3.0)),
    "a global function": (lambda self: scaled(1.0), lambda module: monkey(globals(), "scaled", abs)),
    "a global table": (lambda self: SETTINGS["factor"], lambda module: monkey(SETTINGS, "factor", 3.0)),
    "a global object": (lambda self: CONFIG.factor, lambda module: monkey(CONFIG, "factor", 3.0)),
    "a global class": (lambda self: Globals.factor, lambda module: monkey(Globals, "factor", 3.0)),
    "a module of settings": (lambda self: SPACE.factor, lambda module: monkey(SPACE, "factor", 3.0)),
    "a module imported in the step": (lambda self: imported(), lambda module: monkey(SPACE, "factor", 3.0)),
}


@pytest.fixture(autouse=True)
def undo():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "space_of_settings", SPACE)
        PATCHES.append(patch)
        yield
        PATCHES.pop()


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_is_noticed(case):
    step, change = CHANGES[case]
    module, reads = watched(step)
    assert reads.changed() == ""
    module.unread = 3
    assert reads.changed() == ""
    change(module)
    assert reads.changed() != ""
    # A class keeps what it has been given.
    Own.listed[:] = [2.0]


def test_a_global_named_like_an_attribute_is_not_read(monkeypatch):
    values = [1.0]
    monkeypatch.setitem(globals(), "factor", values)
    _, reads = watched(lambda self: CONFIG.factor)
    values.append(2.0)
    assert reads.changed() == ""


def test_what_is_set_back_is_as_it_was():
    module, reads = watched(lambda self: (self.number, self.table["factor"]))
    module.number, module.table["factor"] = 3.0, 4.0
    assert reads.changed()
    module.number, module.table["factor"] = 4.0 / 2, 4.0 / 2
    assert reads.changed() == ""


def test_closures():
    factor, entries = 2.0, [1.0]

    def step(self):
        return factor * entries[0]

    _, reads = watched(step)
    assert reads.changed() == ""
    factor = 3.0
    assert reads.changed() == "Own.step"
    factor = 2.0
    assert reads.changed() == ""
    entries.append(2.0)
    assert reads.changed() != ""


def test_training_step_itself_and_those_that_it_goes_on_to(monkeypatch):
    class Base(Own):
        def training_step(self, batch, batch_idx):
            return FACTOR

    class Further(Base):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx)

    module = Further()
    reads = Reads(module)
    with reads.watching():
        module.training_step(None, 0)
    assert reads.changed() == ""
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert reads.changed() == "FACTOR"


def test_other_roots():
    helper = Helper()
    _, reads = watched(lambda self: None, roots=[helper])
    assert reads.changed() == ""
    helper.factor = 3.0
    assert reads.changed() != ""


REFUSED = {
    "random": (lambda self: random.random(), "draws from random or numpy"),
    "numpy": (lambda self: np.random.rand(), "draws from random or numpy"),
    "a generator": (lambda self: self.held, "draw from", torch.Generator),
    "a generator of numpy": (lambda self: self.held, "can read", lambda: np.random.default_rng(1)),
    "a generator of random": (lambda self: self.held, "can read", lambda: random.Random(1)),
    "an array": (lambda self: self.held, "can read", lambda: np.ones(2)),
    "an iterator": (lambda self: next(self.held), r"self\.held", lambda: itertools.count()),
    "bytes that may change": (lambda self: self.held[0], "can read", lambda: bytearray(b"a")),
    "a list too long to compare": (lambda self: self.held[0], "more than", lambda: list(range(20_000))),
    "a generator in a table": (lambda self: self.held, "draw from", lambda: {"draws": torch.Generator()}),
    "a global generator": (lambda self: DRAWS, "draw from"),
    "a global array": (lambda self: ARRAY[0], "can read"),
    "vars": (lambda self: vars(self)["number"], "vars"),
    "__dict__": (lambda self: self.__dict__["number"], "__dict__"),
    "setting a number": (lambda self: setattr(self, "number", self.number + 1), "changes self.number"),
    "setting a tensor": (lambda self: setattr(self, "constant", torch.zeros(1)), "changes self.constant"),
    "setting what is new": (lambda self: setattr(self, "new", torch.zeros(1)), r"self\.new"),
    "setting in a part": (lambda self: setattr(self.net, "extra", 5.0), r"self\._modules.*net\.extra"),
    "setting in an object": (lambda self: setattr(self.helper, "factor", 5.0), "changes self.helper.factor"),
    "appending": (lambda self: self.names.append("c"), "changes self.names"),
    "counting in a table": (lambda self: self.table.update(factor=3.0), "changes self.table.factor"),
    "printing": (lambda self: print("a step"), "prints"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_put_back(case, capsys):
    step, message, *make = REFUSED[case]
    module = Own()
    if make:
        module.held = make[0]()
    before = module.number, dict(module.table), list(module.names), module.constant, set(vars(module)) | {"step"}
    states = random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2]
    with pytest.raises(Untraceable, match=message):
        watched(step, module)
    assert (module.number, module.table, module.names, module.constant) == before[:4]
    assert set(vars(module)) == before[4]
    assert (random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2]) == states
    if case == "an iterator":
        assert next(module.held) == 0
    assert capsys.readouterr().out == ""


def test_what_is_given_back_after_a_step_that_fails():
    def step(self):
        self.names.append("c")
        random.random()
        raise ValueError("no")

    module, state = Own(), random.getstate()
    with pytest.raises(ValueError, match="no"):
        watched(step, module)
    assert module.names == ["a", "b"]
    assert random.getstate() == state
    assert "__getattribute__" not in vars(nn.Module)


def test_hooks_and_ways_of_ones_own_to_attributes_are_refused():
    module = Own()
    module.net[0].register_forward_hook(lambda *arguments: None)
    with pytest.raises(Untraceable, match="Linear has hooks"):
        watched(lambda self: self.net(torch.ones(6)), module)

    class Peculiar(nn.Linear):
        def __getattribute__(self, name):
            return super().__getattribute__(name)

    module = Own()
    module.net[0] = Peculiar(6, 16)
    with pytest.raises(Untraceable, match="__getattribute__"):
        watched(lambda self: self.net(torch.ones(6)), module)


def of_a_trainer(tmp_path):
    module = Own()
    module.trainer = trainer(tmp_path)
    return module


@pytest.mark.parametrize("step", [lambda self: self.trainer.current_epoch, lambda self: self.current_epoch])
def test_the_trainer_s_epoch(tmp_path, step):
    module, reads = watched(step, of_a_trainer(tmp_path))
    assert isinstance(module.trainer, pl.Trainer)
    assert reads.changed() == ""
    module.trainer.fit_loop.epoch_progress.current.completed += 1
    module.trainer.fit_loop.epoch_progress.current.processed += 1
    assert reads.changed() == "trainer.current_epoch"


@pytest.mark.parametrize("step", [lambda self: self.trainer.global_step, lambda self: self.global_step])
def test_the_trainer_s_step(tmp_path, step):
    module, reads = watched(step, of_a_trainer(tmp_path))
    assert reads.changed() == ""
    module.trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed += 1
    assert reads.changed() == "trainer.global_step"


@pytest.mark.parametrize(
    "step",
    [
        lambda self: self.trainer.callback_metrics,
        lambda self: self.trainer.optimizers,
        lambda self: self.optimizers(),
        lambda self: self.lr_schedulers(),
        lambda self: self.trainer.fit_loop.epoch_loop,
        lambda self: self.trainer.logger.name,
        lambda self: self.trainer.is_last_batch,
        lambda self: setattr(self.trainer, "should_stop", True),
    ],
)
def test_what_else_a_trainer_holds_is_refused(tmp_path, step):
    module = of_a_trainer(tmp_path)
    module.trainer.loggers = [pl.loggers.CSVLogger(tmp_path)]
    with pytest.raises(Untraceable, match="trainer"):
        watched(step, module)
    assert not module.trainer.should_stop
    assert isinstance(module.trainer, pl.Trainer)


def test_a_refusal_is_not_caught(tmp_path):
    def step(self):
        with contextlib.suppress(Exception):
            self.trainer.callback_metrics["loss"]

    with pytest.raises(Untraceable):
        watched(step, of_a_trainer(tmp_path))


USES = {
    "sum": lambda number: number + 1,
    "product with a tensor": lambda number: torch.ones(2) * number,
    "index": lambda number: [1, 2, 3, 4][number],
    "full": lambda number: torch.full((1,), number),
    "comparison": lambda number: number > 1,
    "equality": lambda number: number == 1,
    "truth": bool,
    "remainder": lambda number: number % 2,
    "shift": lambda number: number << 1,
    "bits": lambda number: number & 1,
    "range": lambda number: list(range(number)),
    "text": str,
    "format": lambda number: f"{number}",
    "key": lambda number: {0: 1}.get(number),
    "largest": lambda number: max(number, 1),
    "root": math.sqrt,
    "round": round,
    "float": float,
    "attribute": lambda number: number.bit_length(),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_of_the_step_s_number_is_refused(use):
    # torch before 2.9 refuses there itself what is no number.
    refused = (Untraceable, TypeError) if use == "full" else Untraceable
    with pytest.raises(refused, match=r"the number of the step|must be Number, not Observed"):
        USES[use](Observed(3))


def test_a_tensor_of_the_step_s_number_cannot_be_made():
    with pytest.raises((Untraceable, RuntimeError, TypeError)):
        torch.tensor(Observed(3))
    with pytest.raises((Untraceable, RuntimeError, TypeError)):
        Traced(lambda given: [given + torch.tensor([Observed(3)])], [torch.ones(2)], [[None]])


def test_the_step_s_number_may_be_passed_on():
    assert isinstance(Observed(3), int)
    assert unobserved(Observed(3)) == unobserved(3) == 3
    assert (lambda *arguments, **keywords: len(arguments))(Observed(3), index=Observed(3)) == 1
