"""Which clients' own models can be taken from a checkpoint."""

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import (
    RBLA,
    Ditto,
    Ensemble,
    FedAvg,
    FederatedLoop,
    FedHM,
    FedInc,
    FedLoRA,
    FedPer,
    FedSA,
    FromIndices,
    HeteroFL,
    LowRank,
    MatrixProduct,
    SplitMix,
    StaticBatchNorm,
    TrainedCheckpoints,
    load_dense,
)
from lightning_lowrank.cli import main
from lightning_lowrank.federated.protocols import Personal, UnequalClients
from lightning_lowrank.federated.state import copy_into, trained_tensors
from tests.grids import daily, each_of
from tests.helpers import Data, Module, blobs, fit, network, trainer, weights
from tests.interop.helpers import LORA

CLIENTS = [list(range(40)), list(range(40, 60)), list(range(60, 103))]
ADAPTERS = {**LORA, "summary": False, "exclude": ["net.5"]}
BIAS = ["net.5.bias"]


class WithForward(Module):
    def forward(self, inputs):
        return self.net(inputs)


def normalized():
    return network(norm=nn.BatchNorm1d)


def shared_layer():
    first, activation, second, _, last = network()
    return nn.Sequential(first, activation, second, activation, second, last)


def ensemble(bases=2):
    return Ensemble(normalized, bases=bases)


def run(tmp_path, method, *callbacks, make=normalized, rank=None, buffers="local"):
    module = WithForward(make())
    loop = FederatedLoop(method, partition=FromIndices(CLIENTS), buffers=buffers, summary=False)
    lowrank = [] if rank is None else [LowRank(MatrixProduct(), rank=rank, **ADAPTERS)]
    if isinstance(method, FedHM):
        lowrank = [LowRank(MatrixProduct(), rank_ratio=0.5, train_base=True, summary=False)]
    run = trainer(tmp_path, *lowrank, loop, *callbacks, max_epochs=2)
    fit(run, module, Data())
    run.save_checkpoint(tmp_path / "run.ckpt")
    return loop, module


def own_outputs(loop, module, client):
    """Return what the client's own model gives, as ``personal_test`` evaluates it."""
    coordinator, live = loop.coordinator, trained_tensors(module)
    model = UnequalClients.of(loop.algorithm).model_for(loop.server, coordinator.info(client))
    copy_into(live, Personal.of(loop.algorithm).personal_model(coordinator.context(client, live), model))
    return outputs(module)


def outputs(module):
    with torch.no_grad():
        return module.eval().net(blobs(40, seed=8).tensors[0])


@pytest.mark.slow
@each_of(4)
@pytest.mark.parametrize(
    ("method", "settings", "whole"),
    [
        (HeteroFL([1.0, 0.5, 0.25]), {}, [0]),
        (HeteroFL([0.5]), {}, [0, 1, 2]),
        (HeteroFL([1.0, 0.5], capacity="dynamic"), {}, []),
        (FedHM([1.0, 0.5]), {}, [0, 2]),
        (FedHM([0.5]), {}, []),
        (SplitMix([2, 1]), {"make": ensemble}, [0, 2]),
        (SplitMix([2, 1]), {"make": partial(ensemble, bases=3)}, []),
        (FedLoRA(RBLA(), levels=[1.0, 0.5], keep=BIAS), {"rank": 4}, [0, 2]),
        (FedLoRA(RBLA(), ranks=[2, 4], keep=BIAS), {"rank": 4}, [1]),
        (FedLoRA(RBLA(), ranks={1: 2}, keep=BIAS), {"rank": 4}, [0, 2]),
        (FedLoRA(RBLA(), ranks=lambda client: 4, keep=BIAS), {"rank": 4}, [0, 1, 2]),
        (FedLoRA(RBLA(), levels=[1.0, 0.5], capacity="dynamic", keep=BIAS), {"rank": 4}, []),
        (FedLoRA(RBLA(), keep=BIAS), {"rank": 4}, [0, 1, 2]),
        # Factors of a client's own have its rank.
        (FedLoRA(FedSA(), levels=[1.0, 0.5]), {"rank": 4}, [0, 1, 2]),
        (FedLoRA(FedInc(), levels=[1.0, 0.5]), {"rank": 4}, [0, 1, 2]),
        (FedLoRA(FedInc(clusters=1), ranks=[2, 4, 1]), {"rank": 4}, [0, 1, 2]),
        # Clients that keep nothing; the server keeps pairs for them.
        (FedLoRA(FedInc(), levels=[1.0, 0.5], capacity="dynamic"), {"rank": 4, "buffers": "average"}, []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_clients_own_model_is_the_judged_one_or_refused(tmp_path, method, settings, whole):
    loop, module = run(tmp_path, method, **settings)
    make = settings.get("make", normalized)
    for client in range(len(CLIENTS)):
        if client in whole:
            plain = load_dense(tmp_path / "run.ckpt", Module(make()), client=client)
            torch.testing.assert_close(outputs(plain), own_outputs(loop, module, client))
            continue
        ways_out = f"or a client that has all of it: {', '.join(map(str, whole))}" if whole else "without a client"
        said = rf"client {client}'s own model .*{type(method).__name__} it is a part.*{ways_out}\.$"
        with pytest.raises(MisconfigurationException, match=said):
            load_dense(tmp_path / "run.ckpt", Module(make()), client=client)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "rank"), [(Ditto(), None), (FedLoRA(FedSA()), 4)], ids=["Ditto", "FedSA"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_clients_own_layer_has_its_values_under_every_name(tmp_path, method, rank, apart):
    loop, module = run(tmp_path, method, make=shared_layer, rank=rank)
    if apart:
        # As Lightning's AsyncCheckpointIO saves them.
        saved = torch.load(tmp_path / "run.ckpt", weights_only=True)
        saved["state_dict"] = {name: value.clone() for name, value in saved["state_dict"].items()}
        torch.save(saved, tmp_path / "run.ckpt")
    plain = load_dense(tmp_path / "run.ckpt", Module(shared_layer()), client=1)
    torch.testing.assert_close(outputs(plain), own_outputs(loop, module, 1))


@pytest.mark.slow
@pytest.mark.parametrize("buffers", ["local", "average"])
def test_a_model_whose_statistics_are_computed_when_it_is_judged_is_refused(tmp_path, buffers):
    run(tmp_path, FedPer(BIAS), StaticBatchNorm(), buffers=buffers)
    with pytest.raises(SystemExit, match=r"1.*run\.ckpt.*StaticBatchNorm"):
        main(["export", str(tmp_path / "run.ckpt"), str(tmp_path / "own.safetensors"), "--client", "1"])
    assert not (tmp_path / "own.safetensors").exists()
    load_dense(tmp_path / "run.ckpt", Module(normalized()))


def test_a_model_that_was_judged_before_statistics_are_static_is_given(tmp_path):
    loop, module = run(tmp_path, FedPer(BIAS), StaticBatchNorm(from_round=2))
    plain = load_dense(tmp_path / "run.ckpt", Module(normalized()), client=1)
    torch.testing.assert_close(outputs(plain), own_outputs(loop, module, 1))
    assert not torch.equal(weights(plain)["net.1.running_mean"], torch.zeros(16))


class Without(nn.Module):
    """A network without ``len()``, which torch's wrapper of a compiled network has."""

    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, inputs):
        return self.layers(inputs)


@daily("plain-True")
@pytest.mark.parametrize("left_out", [False, True])
@pytest.mark.parametrize("compiled", ["run", "plain", "both"])
def test_a_compiled_modules_run_loads_into_a_plain_one(tmp_path, compiled, left_out):
    def module(compiles):
        torch.manual_seed(0)
        net = Without()
        return Module(torch.compile(net, backend="eager") if compiles else net)

    trained = module(compiled != "plain")
    loop = FederatedLoop(FedAvg(), clients=2, summary=False, execution="sequential")
    low_rank = LowRank(MatrixProduct(), rank=2, freeze_rest=True, summary=False, **LORA)
    savers = [ModelCheckpoint(tmp_path, "run"), *([TrainedCheckpoints()] if left_out else [])]
    fit(trainer(tmp_path, low_rank, loop, *savers, max_epochs=1, limit_val_batches=0), trained, Data())
    plain = load_dense(tmp_path / "run.ckpt", module(compiled != "run"))
    inputs = blobs().tensors[0]
    torch.testing.assert_close(plain.net(inputs), trained.net(inputs), rtol=1e-5, atol=1e-5)


def test_a_module_that_is_not_strict_may_keep_tensors_out_of_its_checkpoints(tmp_path):
    class Teacher(Module):
        def __init__(self, strict_loading):
            super().__init__()
            self.teacher = nn.Linear(6, 2).requires_grad_(False)
            self.strict_loading = strict_loading

        def state_dict(self, *arguments, **keywords):
            state = super().state_dict(*arguments, **keywords)
            return {name: value for name, value in state.items() if "teacher" not in name}

    low_rank = LowRank(MatrixProduct(), rank=2, summary=False)
    trained = Teacher(False)
    run = trainer(tmp_path, low_rank, max_epochs=0)
    fit(run, trained, Data())
    run.save_checkpoint(tmp_path / "run.ckpt")
    inputs = blobs().tensors[0]
    torch.testing.assert_close(load_dense(tmp_path / "run.ckpt", Teacher(False)).net(inputs), trained.net(inputs))
    with pytest.raises(RuntimeError, match=r"teacher\.weight"):
        load_dense(tmp_path / "run.ckpt", Teacher(True))
