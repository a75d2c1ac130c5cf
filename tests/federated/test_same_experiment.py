"""What a resumed run is refused for, where two values are equal in Python and not in what they mean."""

import ast
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import Subset, TensorDataset

from lightning_lowrank import FedAvg, FederatedLoop
from lightning_lowrank.federated import client_states
from lightning_lowrank.federated.fingerprint import differences, with_defaults
from tests.helpers import Data, Module, blobs, fit, trainer

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["clients_per_round", "limit_train_batches"])
@pytest.mark.parametrize("pair", [(1.0, 1), (1, 1.0), (True, 1)])
def test_all_is_not_one(name, pair):
    before, now = pair
    assert differences({name: before}, {name: now}) == {name: (before, now)}
    assert not differences({name: before}, {name: before})


def test_a_rate_may_be_written_as_a_whole_number():
    assert not differences({"algorithm": {"class": "FedAvgM", "lr": 1}}, {"algorithm": {"class": "FedAvgM", "lr": 1.0}})


def test_a_setting_that_an_older_release_did_not_know_has_its_default():
    present = {"min_clients": 1, "uplink": [], "stored": "a digest", "clients": 3}
    assert with_defaults({"clients": 3}, present) == present
    older = with_defaults({"clients": 3}, {**present, "min_clients": 2})
    assert differences(older, {**present, "min_clients": 2}) == {"min_clients": (1, 2)}


def run(tmp_path, data, checkpoint=None, **settings):
    loop = FederatedLoop(FedAvg(), **{"clients": 4, "seed": 0, "summary": False, **settings})
    kept = [] if checkpoint else [ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)]
    made = trainer(tmp_path, loop, *kept, max_epochs=2, limit_val_batches=0)
    fit(made, Module(), Data(data), ckpt_path=checkpoint)


@pytest.mark.parametrize(
    "wrap", [lambda data: data, lambda data: Subset(data, range(len(data)))], ids=["all", "subset"]
)
def test_a_few_other_samples_are_noticed(tmp_path, wrap):
    run(tmp_path, wrap(blobs(400)))
    inputs, targets = (tensor.clone() for tensor in blobs(400).tensors)
    inputs[100:103] += 1
    with pytest.raises(MisconfigurationException, match="stored"):
        run(tmp_path, wrap(TensorDataset(inputs, targets)), checkpoint=tmp_path / "epoch=0.ckpt")
    run(tmp_path, wrap(blobs(400)), checkpoint=tmp_path / "epoch=0.ckpt")


def test_one_client_in_place_of_all_is_noticed(tmp_path):
    run(tmp_path, blobs(40), clients_per_round=1.0)
    with pytest.raises(MisconfigurationException, match=r"clients_per_round.*1\.0.*1"):
        run(tmp_path, blobs(40), checkpoint=tmp_path / "epoch=0.ckpt", clients_per_round=1)


@pytest.mark.slow
def test_asserts_do_nothing():
    """`python -O` leaves them out, and with them what they do: no assignment and no call but of these."""
    said = []
    for file in (ROOT / "lightning_lowrank").rglob("*.py"):
        for place in (each for each in ast.walk(ast.parse(file.read_text())) if isinstance(each, ast.Assert)):
            for part in ast.walk(place.test):
                calls = isinstance(part, ast.Call) and ast.unparse(part.func) not in ("isinstance", "callable")
                if calls or isinstance(part, ast.NamedExpr):
                    said.append(f"{file.name}:{part.lineno}: {ast.unparse(part)}")
    assert not said


@pytest.mark.nightly
def test_a_fit_without_asserts_is_the_same(tmp_path):
    script = (
        "import torch\n"
        "from lightning_lowrank import FedAvg, FederatedLoop\n"
        "from tests.helpers import Data, Module, fit, trainer\n"
        "loop = FederatedLoop(FedAvg(), clients=3, seed=0, summary=False)\n"
        "module = Module()\n"
        "fit(trainer('.', loop, max_epochs=2), module, Data())\n"
        "print(loop.indices.digest(), [value.sum().item() for value in module.state_dict().values()])\n"
    )
    printed = []
    for options in ((), ("-O",)):
        done = subprocess.run(
            [sys.executable, *options, "-c", script],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append(done.stdout.splitlines()[-1])
    assert printed[0] == printed[1]


class Caching(TensorDataset):
    """Keeps what was read of it in an array of its own."""

    def __getitem__(self, index):
        self.read = getattr(self, "read", torch.zeros(len(self)))
        self.read[index] = 1
        return super().__getitem__(index)


def test_a_dataset_that_fills_a_cache_is_resumed(tmp_path):
    run(tmp_path, Caching(*blobs(40).tensors))
    run(tmp_path, Caching(*blobs(40).tensors), checkpoint=tmp_path / "epoch=0.ckpt")


def plain_fit(tmp_path, module, *callbacks, **options):
    made = trainer(tmp_path, *callbacks, max_epochs=4, limit_val_batches=0)
    fit(made, module, Data(blobs(40)), **options)


def test_a_wider_network_is_refused_by_name(tmp_path):
    run(tmp_path, blobs(40))
    wider = Module(nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3)))
    loop = FederatedLoop(FedAvg(), clients=4, seed=0, summary=False)
    with pytest.raises(MisconfigurationException, match=r"(?s)net\.0\.weight.*\(16, 6\).*\(9, 4\).*net\.2\.weight"):
        plain_fit(tmp_path, wider, loop, ckpt_path=tmp_path / "epoch=0.ckpt")


@pytest.mark.parametrize("rounds", [1, 4])
def test_a_fit_without_rounds_is_not_gone_on_with(tmp_path, rounds):
    made = trainer(tmp_path, ModelCheckpoint(tmp_path, "plain"), max_epochs=rounds, limit_val_batches=0)
    fit(made, Module(), Data(blobs(40)))
    loop = FederatedLoop(FedAvg(), clients=4, seed=0, summary=False)
    with pytest.raises(MisconfigurationException, match=rf"(?s)ckpt_path.*plain\.ckpt.*{rounds}"):
        plain_fit(tmp_path, Module(), loop, ckpt_path=tmp_path / "plain.ckpt")
    # Its weights may be judged.
    trainer(tmp_path, FederatedLoop(FedAvg(), clients=4, summary=False)).validate(
        Module(), Data(blobs(40)), ckpt_path=tmp_path / "plain.ckpt", verbose=False
    )


def test_a_process_that_is_killed_leaves_no_file_of_a_random_name(tmp_path):
    """It is killed by the limit of a file's size, in the middle of a client's second state."""
    path = tmp_path / "client.safetensors"
    client_states.save({"values": torch.zeros(10)}, path)
    # Made here: a parallel operation never ends in a forked process whose parent has made one.
    many = torch.zeros(1_000_000)

    def save_more():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        client_states.save({"values": many}, path)

    child = multiprocessing.get_context("fork").Process(target=save_more)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGXFSZ
    assert sorted(each.name for each in tmp_path.iterdir()) == ["client.part", "client.safetensors"]
    assert torch.equal(client_states.load(path)["values"], torch.zeros(10))
    client_states.save({"values": torch.ones(10)}, path)
    assert [each.name for each in tmp_path.iterdir()] == ["client.safetensors"]
