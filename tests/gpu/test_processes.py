"""``client_parallel`` on accelerators: one process with NCCL, and two, on two devices where there are."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.places import apart, experiment, run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, torch
from lightning_lowrank.federated import ClientParallelStrategy
from tests.gpu.places import experiment, run
place, backend, file = sys.argv[1:]
strategy = ClientParallelStrategy(process_group_backend=backend)
found = run(place, experiment("FedAvg"), trainer={"strategy": strategy, "num_nodes": 2})
torch.save({name: value.cpu() for name, value in found.weights.items()}, file)
"""


@pytest.fixture
def parallel(place):
    if place not in ("cuda", "cpu"):
        pytest.skip(f"torch's process groups know no {place}")
    return place


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_one_process_is_the_run_without_the_strategy(parallel, execution):
    of = experiment("FedAvg")
    plain = run(parallel, of, execution=execution)
    alone = run(parallel, of, execution=execution, trainer={"strategy": "client_parallel"})
    assert apart(plain.weights, alone.weights) == 0


def test_two_processes(parallel, tmp_path):
    several = parallel == "cuda" and torch.cuda.device_count() > 1
    # NCCL refuses two processes on one device.
    backend = "nccl" if several else "gloo"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    started = []
    for rank in (0, 1):
        environment = {
            **os.environ,
            **common,
            "NODE_RANK": str(rank),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        }
        if several:
            environment["CUDA_VISIBLE_DEVICES"] = str(rank)
        command = [sys.executable, "-c", SCRIPT, parallel, backend, str(tmp_path / f"{rank}.pt")]
        started.append(subprocess.Popen(command, env=environment, cwd=tmp_path))
    try:
        assert [each.wait(180) for each in started] == [0, 0]
    finally:
        for each in started:
            each.kill()
    expected = run(parallel, experiment("FedAvg")).weights
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert apart(first, second) == 0
    assert apart(first, expected) < 1e-4
