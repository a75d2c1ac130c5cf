"""Every method with robust rules: what its arrivals differ from is known, and what a rule can't protect is refused."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import TensorDataset

from lightning_lowrank import FederatedLoop, FedLoRA, FromIndices, NormBound
from tests.algorithms.methods import LOW_RANK, METHODS, each_method
from tests.grids import nightly_except
from tests.helpers import Data, Module, blobs, fit, trainer

PARTS = [range(30), range(30, 60), range(60, 80), range(80, 103)]
INPUTS, TARGETS = blobs().tensors
INPUTS = INPUTS.double()


class Outputs(pl.Callback):
    """Keeps what the global model gives for some inputs, before each round."""

    def __init__(self):
        self.found = []

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.eval()
        with torch.no_grad():
            self.found.append(pl_module.net(INPUTS.to(pl_module.device)))
        pl_module.train()


def outputs(tmp_path, name, **settings):
    """Return what the global model gives for some inputs, before each of three rounds of a method."""
    method, kept = METHODS[name], Outputs()
    lowrank = LOW_RANK[method.forms[0]]
    callbacks = [] if lowrank is None else [lowrank()]
    settings = {**method.settings, "partition": FromIndices(PARTS), "summary": False, **settings}
    loop = FederatedLoop(method.make(), **settings)
    module = Module(method.network(norm=method.norm), optimizer=method.optimizer).double()
    run = trainer(tmp_path, *callbacks, loop, kept, max_epochs=3, limit_val_batches=0)
    fit(run, module, Data(TensorDataset(INPUTS, TARGETS)))
    return kept.found


def protected(algorithm):
    return not algorithm.claims.unprotected and not (
        isinstance(algorithm, FedLoRA) and algorithm.operator.broadcasts == "personal"
    )


PROTECTED = [name for name, method in METHODS.items() if protected(method.make())]


@nightly_except("FedAvg", "FedLoRA-CoLR", "FedMUD", "TDPFed")
@pytest.mark.slow
@each_method("FedMUD", "FedHM", "FedBAT", "FedLoRA-CoLR", among=PROTECTED)
def test_what_is_cut_off_leaves_the_model_where_it_was(tmp_path, name):
    # The first round of a method that trains another form of the model begins with that.
    _, before, after = outputs(tmp_path, name, aggregator=NormBound(1e-9))
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)
    # It is not zero, where a rule that knows of no start would leave it.
    assert before.std(dim=0).max() > 0.01


@nightly_except("FedAvg", "FedLoRA-CoLR", "FedMUD", "TDPFed")
@each_method(among=PROTECTED)
def test_a_bound_that_cuts_nothing_off_is_the_mean(tmp_path, name):
    bounded, mean = (outputs(tmp_path, name, aggregator=rule)[-1] for rule in (NormBound(1e9), None))
    torch.testing.assert_close(bounded, mean, rtol=1e-6, atol=1e-6)


@each_method(among=[name for name in METHODS if name not in PROTECTED])
def test_what_a_rule_cannot_protect_is_refused(tmp_path, name):
    with pytest.raises(MisconfigurationException, match=r"aggregator=NormBound\(\)"):
        outputs(tmp_path, name, aggregator=NormBound())


def test_most_methods_are_protected():
    refused = {name for name in METHODS if name not in PROTECTED}
    assert refused == {
        "FedLoRA-FedInc",
        "FedLoRA-FedSA",
        "FedNova",
        "GradientMask",
        "HeteroFL",
        "HeteroFL-holders",
        "RandomCoordinates",
        "SCAFFOLD",
        "SplitMix",
    }
