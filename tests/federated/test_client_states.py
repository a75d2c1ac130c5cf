"""What clients keep is the same whether it lies in memory or on disk."""

import errno
import os
import signal
import tempfile
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank import FedAvg, FederatedLoop, FromIndices
from lightning_lowrank.federated import client_states
from lightning_lowrank.federated.client_states import ClientStates
from tests.helpers import Data, Module, assert_same, fit, trainer, weights

UNEVEN = [list(range(5)), list(range(5, 47)), list(range(47, 69)), list(range(69, 102)), [102]]


def test_comes_back_as_it_was(tmp_path):
    shared = torch.arange(3)
    kept = {
        "optimizers": {0: {3: {"step": torch.tensor(2.0), "none": None}}},
        "subspaces": {0: [((5, True), None)]},
        "half": torch.randn(2, 3).bfloat16(),
        "transposed": torch.randn(4, 2).T,
        "twice": [shared, shared[1:]],
        "plain": [1, 2.5, "text", False],
        "empty": {},
    }
    client_states.save(kept, tmp_path / "kept.safetensors")
    found = client_states.load(tmp_path / "kept.safetensors")
    assert found["subspaces"] == kept["subspaces"]
    assert found["plain"] == kept["plain"]
    assert found["empty"] == {}
    assert found["optimizers"][0][3]["none"] is None
    assert found["optimizers"][0][3]["step"] == 2
    for name in ("half", "transposed"):
        assert found[name].dtype == kept[name].dtype
        assert torch.equal(found[name], kept[name])
    assert found["twice"][1].tolist() == [1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["kept.safetensors"]


def test_refuses_what_no_checkpoint_could_hold(tmp_path):
    with pytest.raises(TypeError, match="of type object"):
        client_states.save({"a": object()}, tmp_path / "kept.safetensors")


def test_those_at_work_last_stay_in_memory():
    states = ClientStates(limit=100)
    for client in (3, 1, 4, 0):
        states[client]["model"] = torch.full((10,), float(client))
    assert states[2] == {}
    _ = states[3]
    states.offload()
    assert set(states._present) == {0, 3}
    assert states._on_disk == {1, 4}
    assert [client for client, _ in states.items()] == [0, 1, 3, 4]
    assert set(states._present) == {0, 3}
    assert states[4]["model"].tolist() == [4.0] * 10
    states[4]["model"] += 1
    states.offload()
    assert states[4]["model"].tolist() == [5.0] * 10
    states[4] = {"model": torch.zeros(3)}
    states.offload()
    assert states[4]["model"].tolist() == [0.0] * 3


def test_a_state_that_cannot_be_written_stays_in_memory(monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "full")

    states = ClientStates({3: {"model": torch.ones(10)}}, limit=0)
    monkeypatch.setattr(client_states, "save", full)
    with pytest.raises(OSError, match="full"):
        states.offload()
    assert [(client, state["model"].tolist()) for client, state in states.items()] == [(3, [1.0] * 10)]


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
@pytest.mark.parametrize("limit", [0, 2000])
@pytest.mark.nightly
def test_a_run_is_the_same_with_a_limit(tmp_path, execution, limit):
    def run(limit, ckpt_path=None, callbacks=()):
        loop = FederatedLoop(
            FedAvg(),
            partition=FromIndices(UNEVEN),
            clients_per_round=3,
            optimizer_state="keep",
            execution=execution,
            client_memory_limit=limit,
            summary=False,
        )
        module = Module(optimizer=partial(torch.optim.Adam, lr=0.01))
        fit(trainer(tmp_path, loop, *callbacks, max_epochs=5), module, Data(), ckpt_path=ckpt_path)
        return module, loop

    expected, _ = run(None)
    every = ModelCheckpoint(tmp_path / "every", "{step}", save_top_k=-1, every_n_train_steps=4)
    limited, loop = run(limit, callbacks=[every])
    assert_same(weights(expected), weights(limited))
    assert loop.coordinator.states._on_disk
    for file in (tmp_path / "every").glob("*.ckpt"):
        assert_same(weights(expected), weights(run(limit, ckpt_path=file)[0]))


def test_a_negative_limit_is_refused():
    with pytest.raises(MisconfigurationException, match=r"client_memory_limit.*-1"):
        FederatedLoop(FedAvg(), clients=2, client_memory_limit=-1)


def test_the_next_run_clears_what_a_killed_one_kept_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    child = os.fork()
    if not child:
        states = ClientStates(limit=0)
        states[0]["model"] = torch.ones(3)
        states.offload()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (left,) = tmp_path.iterdir()
    assert f"@{child}~" in left.name
    states = ClientStates(limit=0)
    states[1]["model"] = torch.ones(3)
    states.offload()
    assert not left.exists()
    others = ClientStates(limit=0)
    others[1]["model"] = torch.zeros(3)
    others.offload()
    assert states[1]["model"].tolist() == [1.0] * 3
    del states, others
    assert list(tmp_path.iterdir()) == []
