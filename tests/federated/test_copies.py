"""Copies and pickles of what has made a fit."""

import copy
import pickle

import pytest

from lightning_lowrank import FederatedLoop
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
