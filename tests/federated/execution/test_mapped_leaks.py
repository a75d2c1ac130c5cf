"""What a training step leaves in the module's attributes, by a step of clients together and of a batch's samples."""

import copy
import pickle
from collections import deque, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_lowrank import DifferentialPrivacy, FedAvg, FederatedLoop, FromIndices
from lightning_lowrank.federated.execution import auto
from lightning_lowrank.federated.execution.mapped_leaks import LeftTensors
from tests.federated.execution.runs import assert_close, run
from tests.grids import daily
from tests.helpers import Data, Module, blobs, fit, trainer, weights

Pair = namedtuple("Pair", "loss number")


@dataclass
class Outputs:
    loss: Tensor


GROWING = {
    "tensors": lambda self, loss: self.outputs.append(loss),
    "dictionaries": lambda self, loss: self.outputs.append({"loss": loss}),
    "tuples": lambda self, loss: self.outputs.append((loss, 1)),
    "objects": lambda self, loss: self.outputs.append(Outputs(loss)),
    "a new list": lambda self, loss: setattr(self, "outputs", [*self.outputs, loss]),
    "lists by name": lambda self, loss: self.named.setdefault("loss", []).append((loss,)),
    "an object's list": lambda self, loss: self.held.outputs.append({"loss": loss}),
    "a queue": lambda self, loss: self.queue.append({"loss": loss}),
    "a list of the class": lambda self, loss: self.shared.append({"loss": loss}),
}
"""Steps that add their loss to what earlier steps have left."""
LAST = {
    "a tensor": lambda self, loss: setattr(self, "last", loss),
    "a tuple": lambda self, loss: setattr(self, "last", (loss, 1)),
    "a named tuple": lambda self, loss: setattr(self, "last", Pair(loss, 1)),
    "a dictionary": lambda self, loss: setattr(self, "last", {"loss": loss}),
    "an object": lambda self, loss: setattr(self, "last", Outputs(loss)),
    "one inside the other": lambda self, loss: setattr(self, "last", {"all": ({"loss": loss},)}),
    "an object's attribute": lambda self, loss: setattr(self.held, "last", loss),
    "an entry": lambda self, loss: self.named.update(last=loss),
    "entries": lambda self, loss: self.named.update({len(self.named): loss}),
    "an entry beside others": lambda self, loss: self.cache.update(last=loss, scale=self.cache["scale"]),
}
"""Steps that leave their own loss."""


LATER = {
    f"later, {name}": lambda self, loss, leave=leave: leave(self, loss) if self.trainer.global_step >= 3 else None
    for name, leave in {**GROWING, **LAST}.items()
}
"""Steps that leave their loss from the fourth one on, when no step is watched."""


EVEN = FromIndices([range(24), range(24, 48)])
KEPT = ("outputs", "named", "queue", "last", "held", "cache")


def tensors_of(value):
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple, deque)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(each)
    elif hasattr(value, "__dict__"):
        yield from tensors_of(vars(value))


class Leaves(Module):
    shared: ClassVar[list] = []

    def __init__(self, leave):
        super().__init__()
        self.leave, self.cache = leave, {"scale": torch.ones(())}
        self.forget()

    def forget(self):
        self.outputs, self.named, self.queue, self.last = [], {}, deque(maxlen=5), None
        self.held = SimpleNamespace(outputs=[], last=None)
        self.shared.clear()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.leave(self, loss.detach() * self.cache["scale"])
        return loss


class Reads(Leaves):
    def on_train_epoch_end(self):
        kept = [self.outputs, self.named, self.queue, self.last, self.held, self.cache, self.shared]
        self.total = float(sum(map(torch.sum, tensors_of(kept))))
        self.forget()


@daily("tuples", "a dictionary")
@pytest.mark.parametrize("name", [*GROWING, *LAST])
def test_auto_trains_a_module_that_reads_what_steps_leave(tmp_path, capsys, name):
    """Also if steps of clients together would be faster."""
    leave = {**GROWING, **LAST}[name]
    (expected, _, _), (module, loop, _) = (
        run(tmp_path, execution, module=lambda: Reads(leave), trainer={"max_epochs": 2})
        for execution in ("sequential", "auto")
    )
    assert module.total == expected.total > 0
    assert_close(weights(module), weights(expected), tolerance=0)
    assert loop.rounds.execution.name == "sequential"
    said = capsys.readouterr().out
    assert ("Reads.on_train_epoch_end() may read" if name in LAST else "stores clients' values") in said


class Stores(Module):
    last = None

    def training_step(self, batch, batch_idx):
        self.last = self.loss(batch)
        return self.last


def plotted(module):
    return float(module.last)


class Plots(Stores):
    def on_train_end(self):
        self.plot = plotted(self)


class Listens(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        self.plot = float(pl_module.last)


@pytest.mark.parametrize(
    ("module", "callback", "said"), [(Plots, None, "Plots.on_train_end"), (Stores, Listens, "Listens.")]
)
def test_auto_finds_readers_in_functions_and_callbacks(tmp_path, capsys, module, callback, said):
    callbacks = [] if callback is None else [callback()]
    _, loop, _ = run(tmp_path, "auto", module=module, callbacks=callbacks, trainer={"max_epochs": 1})
    assert loop.rounds.execution.name == "sequential"
    assert said in capsys.readouterr().out


@daily("tuples", "a dictionary")
@pytest.mark.parametrize("name", [*GROWING, *LAST])
def test_clients_that_step_together_refuse_it(tmp_path, name):
    said = "stores clients' values" if name in GROWING else "read after it"
    settings = {"module": lambda: Reads({**GROWING, **LAST}[name]), "trainer": {"max_epochs": 1}}
    for chunk_size in (None, 2):
        # With 2, the fifth client trains without others.
        with pytest.raises(MisconfigurationException, match=said):
            run(tmp_path, "vectorized", chunk_size=chunk_size, **settings)


@daily("later, tuples-auto", "later, a dictionary-vectorized")
@pytest.mark.parametrize("execution", ["auto", "vectorized"])
@pytest.mark.parametrize("name", LATER)
def test_clients_that_step_together_refuse_to_read_what_a_later_step_leaves(tmp_path, monkeypatch, name, execution):
    monkeypatch.setattr(auto, "time_both", lambda *given: (2.0, 1.0))
    with pytest.raises(MisconfigurationException, match="read after it") as refused:
        run(tmp_path, execution, module=lambda: Reads(LATER[name]), partition=EVEN, local_epochs=2)
    assert ("'auto'" in str(refused.value)) == (execution == "vectorized")


@daily("a dictionary")
@pytest.mark.parametrize("name", LAST)
def test_what_nobody_reads_keeps_nobody_from_stepping_together(tmp_path, name):
    settings = {"module": lambda: Leaves(LAST[name]), "trainer": {"max_epochs": 2}}
    ends = [run(tmp_path, execution, **settings)[0] for execution in ("sequential", "vectorized")]
    assert_close(*map(weights, ends))
    copied = pickle.loads(pickle.dumps(copy.deepcopy([vars(ends[1])[name] for name in KEPT])))
    found = list(tensors_of(copied))
    assert any(type(each) is Tensor and each == 1 for each in found)
    with pytest.raises(MisconfigurationException, match="read after it"):
        torch.stack(found)


@daily("tuples-True", "a dictionary-False", "later, a tuple-False")
@pytest.mark.parametrize("federated", [True, False])
@pytest.mark.parametrize("name", [*GROWING, *LAST, *LATER])
def test_what_private_steps_leave_has_no_value(tmp_path, name, federated):
    """Also what is first left in a step that is not watched."""
    for kind in (Leaves, Reads):
        loops = [FederatedLoop(FedAvg(), clients=2, summary=False)] if federated else []
        private = DifferentialPrivacy(noise_multiplier=1.0)
        fitted = trainer(tmp_path, *loops, private, max_epochs=2, limit_val_batches=0)
        module = kind({**GROWING, **LAST, **LATER}[name])
        if kind is Leaves:
            fit(fitted, module, Data(blobs(32)))
            assert fitted.current_epoch == 2
        else:
            with pytest.raises(MisconfigurationException, match=r"DifferentialPrivacy.*self\..*is read after it"):
                fit(fitted, module, Data(blobs(32)))


def test_what_a_later_private_step_leaves_has_no_value_in_validation(tmp_path):
    class Validates(Leaves):
        def on_validation_epoch_end(self):
            self.total = float(sum(tensors_of(self.last)))

    fitted = trainer(tmp_path, DifferentialPrivacy(noise_multiplier=1.0), max_epochs=1)
    with pytest.raises(MisconfigurationException, match=r"DifferentialPrivacy.*self\.last, .*is read after it"):
        fit(fitted, Validates(LATER["later, a tuple"]), Data(blobs(32)))


def test_a_metric_that_a_private_step_updates_is_named(tmp_path):
    class Updates(Module):
        def __init__(self):
            super().__init__()
            self.accuracy = MulticlassAccuracy(4)

        def training_step(self, batch, batch_idx):
            self.accuracy.update(self.net(batch[0]), batch[1])
            return self.loss(batch)

    fitted = trainer(tmp_path, DifferentialPrivacy(noise_multiplier=1.0), max_epochs=1)
    with pytest.raises(MisconfigurationException, match=r"clips gradients.*changes accuracy"):
        fit(fitted, Updates(), Data(blobs(32)))


@pytest.mark.parametrize("item", [False, True])
def test_values_of_samples_that_a_later_step_reads_are_refused(tmp_path, item):
    """Also if a step that takes a number out of a tensor is made for one sample after another."""

    class Carries(Module):
        total = torch.zeros(())

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.total = self.total + loss.detach()
            return loss / self.total * (loss.item() if item else 1.0)

    fitted = trainer(tmp_path, DifferentialPrivacy(noise_multiplier=1.0), max_epochs=1)
    with pytest.raises(MisconfigurationException, match=r"DifferentialPrivacy.*self\.total"):
        fit(fitted, Carries(), Data(blobs(32)))


def test_placeholders_are_put_where_tensors_were_left():
    kept, module = torch.zeros(2), nn.Linear(2, 2)

    def step(one, other):
        module.plain, module.pair, module.listed, module.some = one, Pair(other, kept), [kept, (one, 5)], {one, kept}
        return one

    torch.func.vmap(step)(torch.ones(3, 2), torch.ones(3, 3))
    places = LeftTensors(module, lambda name: ValueError(f"not {name}"))
    found = {name: keys for name, _, keys in places.find()}
    assert found == {"self": ["plain", "pair", "listed", "some"], "self.listed": [], "self.some": []}
    assert places.names == ["self.plain", "self.pair", "self.listed", "self.some"]
    places.replace()
    assert module.pair.number is module.listed[0] is kept
    assert type(module.pair) is Pair
    assert module.listed[1][1] == 5
    assert kept in module.some
    assert len(module.some) == 2
    assert sorted(repr(each) for each in module.some) == ["<no value of self.some>", repr(kept)]
    for name, value in (("plain", module.plain), ("pair", module.pair.loss), ("listed", module.listed[1][0])):
        with pytest.raises(ValueError, match=rf"not self\.{name}"):
            torch.stack([kept, value])
    assert isinstance(module.weight, nn.Parameter)
    assert repr(module.listed) == f"[{kept}, (<no value of self.listed>, 5)]"
