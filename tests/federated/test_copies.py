"""Copies and pickles of what has made a fit, or makes one."""

import copy
import pickle
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_lowrank import DifferentialPrivacy, Ditto, FedAvg, FederatedLoop, TrainedCheckpoints
from lightning_lowrank.internals.lightning import overrides
from tests.algorithms.methods import LOW_RANK, METHODS, each_method
from tests.grids import nightly_except
from tests.helpers import Data, Module, assert_same, fit, trainer, weights


@nightly_except("FedAvg", "FedLoRA-CoLR", "FedMUD", "MOON", "TDPFed")
@pytest.mark.slow
@each_method("FedAvg", "FedHM", "FedLoRA-CoLR", "FedMUD", "FedSLoP", "SplitMix")
def test_a_loop_is_copied_and_pickled_after_a_fit(tmp_path, name):
    method = METHODS[name]
    low_rank = LOW_RANK[method.forms[0]]
    loop = FederatedLoop(method.make(), clients=4, seed=0, summary=False, **method.settings)
    callbacks = [*([] if low_rank is None else [low_rank()]), loop]
    module = Module(method.network(), optimizer=method.optimizer)
    fit(trainer(tmp_path, *callbacks, max_epochs=1, limit_val_batches=0), module, Data())
    for other in (pickle.loads(pickle.dumps(loop)), copy.deepcopy(loop)):
        assert repr(other) == repr(loop)
        assert other.ledger.figures() == loop.ledger.figures()
        with pytest.raises(RuntimeError, match="FederatedLoop"):
            _ = other.server
    again = copy.deepcopy(callbacks)
    repeated = Module(method.network(), optimizer=method.optimizer)
    fit(trainer(tmp_path, *again, max_epochs=1, limit_val_batches=0), repeated, Data())
    assert_same(weights(module), weights(repeated))


class Copies(Callback):
    """Copies and pickles the module inside a fit."""

    def __init__(self):
        self.made = []

    def copy(self, trainer, module, *_):
        self.made += [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]

    on_train_batch_end = on_validation_end = on_train_epoch_end = copy


@pytest.mark.parametrize(
    ("method", "settings", "callbacks"),
    [
        (FedAvg, {}, [TrainedCheckpoints]),
        pytest.param(FedAvg, {"execution": "vectorized"}, [], marks=pytest.mark.slow),
        (Ditto, {}, []),
        pytest.param(FedAvg, {}, [partial(DifferentialPrivacy, noise_multiplier=1.0)], marks=pytest.mark.slow),
    ],
)
def test_copies_of_a_module_inside_a_fit_have_its_own_methods(tmp_path, method, settings, callbacks):
    loop = FederatedLoop(method(), clients=2, summary=False, **settings)
    module, copies = Module(optimizer=partial(torch.optim.SGD, lr=0.1)), Copies()
    callbacks = [loop, *(make() for make in callbacks), copies]
    fit(trainer(tmp_path, *callbacks, max_epochs=1, limit_train_batches=1, limit_val_batches=1), module, Data())
    plain = Module()
    for each in copies.made:
        replaced = {name: value for name, value in vars(each).items() if callable(value) and hasattr(Module, name)}
        assert "on_load_checkpoint" in replaced
        assert all(value.__self__ is each for value in replaced.values())
        assert [overrides(each, hook) for hook in replaced] == [overrides(plain, hook) for hook in replaced]
        assert each.state_dict().keys() == plain.state_dict().keys()
