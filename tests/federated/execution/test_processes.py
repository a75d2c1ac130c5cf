"""What several processes come to together is what one comes to alone."""

from __future__ import annotations

import csv
import math
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from filelock import FileLock
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint, SpikeDetection
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank import ClientParallelStrategy, FedAvg, FederatedLoop
from lightning_lowrank.federated.checks import validation_interval_note
from lightning_lowrank.federated.coordinator import Coordinator
from lightning_lowrank.federated.data.planner import divide
from lightning_lowrank.federated.execution.processes import shared_by
from tests.algorithms.methods import ARCHETYPES, METHODS
from tests.federated.execution import parallel_runs
from tests.federated.execution.parallel_runs import RUNS, UNEVEN, run
from tests.federated.test_stage_pairs import POSSIBLE
from tests.helpers import Data, Module, trainer

QUICK = [
    "fedavg",
    "own tests",
    "scaffold",
    "tdpfed",
    "vectorized",
    "idle",
    "joining",
    "metrics",
    "channels",
    "unlucky",
    "attacked",
    "stages",
]
RESUMED = [("fedavg", "ended"), ("tdpfed", "validated"), ("idle", "ended"), ("channels", "ended")]
OTHERS = [
    "late",
    "fedmud", "mask", "stepwise", "median", "coordinates", "capacities", "together", "kept", "twice", "manual",
    "development", "early", "private clients", "private samples",
]  # fmt: skip
# What a process counts of its own part of a round.
OWN = ("chunk", "processes", "logged_steps")


def launch(
    folder: Path, processes: int, *names: str, timeout: float = 600, launcher: Sequence[str] = (), **environment: str
) -> None:
    """Make runs in several processes, started as a user's script starts them."""
    script = Path(parallel_runs.__file__)
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    for name in ("PL_GLOBAL_SEED", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
        settings.pop(name, None)
    command = [sys.executable, *launcher, str(script), str(folder), str(processes), *names]
    # A session of its own, so that a timeout ends the processes that this one has started as well.
    with subprocess.Popen(
        command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as started:
        try:
            _, said = started.communicate(timeout=timeout)
        except BaseException:
            os.killpg(started.pid, signal.SIGKILL)
            raise
    assert started.returncode == 0, said[-20000:]


def found(folder: Path, name: str, processes: int) -> list[dict[str, Any]]:
    return [torch.load(folder / name / f"{rank}.pt", weights_only=True) for rank in range(processes)]


def differences(first: Any, second: Any, tolerance: float, path: str = "") -> list[str]:
    """Return where two nested values differ: whole numbers and text at all, others by more than the tolerance."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        if first.keys() != second.keys():
            return [f"{path}: {sorted(map(str, first.keys() ^ second.keys()))}"]
        return [found for key in first for found in differences(first[key], second[key], tolerance, f"{path}/{key}")]
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        if len(first) != len(second):
            return [f"{path}: {len(first)} and {len(second)} entries"]
        pairs = enumerate(zip(first, second, strict=True))
        return [found for number, pair in pairs for found in differences(*pair, tolerance, f"{path}/{number}")]
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.dtype != second.dtype or first.shape != second.shape:
            return [f"{path}: {first.dtype} {tuple(first.shape)} and {second.dtype} {tuple(second.shape)}"]
        if not torch.allclose(first.double(), second.double(), rtol=tolerance, atol=tolerance, equal_nan=True):
            return [f"{path}: {(first.double() - second.double()).abs().max()}"]
        return []
    if isinstance(first, float) and isinstance(second, float):
        same = math.isclose(first, second, rel_tol=tolerance, abs_tol=tolerance) or (
            first != first and second != second
        )
        return [] if same else [f"{path}: {first} and {second}"]
    return [] if first == second else [f"{path}: {first!r} and {second!r}"]


def state(result: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in result["state"].items() if name != "chunk_size"}
    return {**found, "progress": {name: value for name, value in found["progress"].items() if name not in OWN}}


def assert_as_one(alone: Mapping[str, Any], together: list[dict[str, Any]], tolerance: float = 1e-6) -> None:
    for result in together:
        assert result["ledger"] == alone["ledger"]
        assert result["steps"] == alone["steps"]
        assert result["global step"] == alone["global step"]
        assert result["checkpoints"] == alone["checkpoints"]
        assert not differences(result["validated"], alone["validated"], 10 * tolerance)
        for name in ("weights", "tested", "lr"):
            assert not differences(result[name], alone[name], tolerance), name
        assert not differences(result["logged"], alone["logged"], 10 * tolerance)
        assert not differences(state(result), state(alone), tolerance)
        # One process's server is bit for bit that of the other.
        for name in ("weights", "logged", "validated"):
            assert not differences(result[name], together[0][name], 0.0), name
        assert not differences(state(result), state(together[0]), 0.0)


def assert_resumed(alone: Mapping[str, Any], together: list[dict[str, Any]]) -> None:
    for result in together:
        assert result["ledger"] == alone["ledger"]
        assert result["steps"] == alone["steps"][-len(result["steps"]) :]
        assert not differences(result["weights"], alone["weights"], 1e-6)
        assert not differences(state(result), state(alone), 1e-6)
        assert not differences(result["logged"][-1], alone["logged"][-1], 1e-5)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of one process and of two, made by the first of the test session's processes."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "runs"
    with FileLock(f"{folder}.lock"):
        if not (folder / "whole").exists():
            names = (*QUICK, "inside")
            torch.save({name: run(name, 1, folder / "alone" / name) for name in names}, folder / "alone.pt")
            resumed = [f"{name}@{checkpoint(folder / 'alone', name, 0, when)}" for name, when in RESUMED]
            launch(folder / "two", 2, *QUICK, *resumed, "inside", "stopped", "secret clients")
            (folder / "whole").touch()
    return folder


@pytest.fixture(scope="module")
def alone(made: Path) -> dict[str, Any]:
    return {"folder": made / "alone", **torch.load(made / "alone.pt", weights_only=False)}


@pytest.fixture(scope="module")
def two(made: Path) -> Path:
    return made / "two"


def checkpoint(folder: Path, name: str, epoch: int, when: str) -> Path:
    (path,) = (folder / name / when).glob(f"epoch={epoch}-*.ckpt")
    return path


@pytest.mark.parametrize("name", [name for name in QUICK if name != "vectorized"])
@pytest.mark.slow
def test_two_processes_are_one(two, alone, name):
    assert_as_one(alone[name], found(two, name, 2))


@pytest.mark.slow
def test_two_processes_are_one_where_clients_step_together(two, alone):
    one, both = alone["vectorized"], found(two, "vectorized", 2)
    for result in both:
        # Cohorts are other ones, and so are the numbers of their steps.
        assert result["ledger"] == one["ledger"]
        assert not differences(result["weights"], one["weights"], 1e-6)
        assert not differences(result["logged"], one["logged"], 1e-5)
    assert not differences(both[0]["weights"], both[1]["weights"], 0.0)
    assert all(0 < result["batches"] < one["logged"][-1]["federated/client_steps"] for result in both)


@pytest.mark.slow
def test_every_process_trains_its_part(two):
    # Of 1, 6, 3, 5 and 1 batches, 6 and two times 1 are one process's, 5 and 3 the other's.
    assert [result["batches"] for result in found(two, "scaffold", 2)] == [3 * 8, 3 * 8]
    # One client a round.
    assert [result["batches"] for result in found(two, "idle", 2)] == [found(two, "idle", 2)[0]["steps"][-1], 0]


@pytest.mark.slow
def test_a_single_arrival_is_its_own_mean(two, alone):
    for result in found(two, "idle", 2):
        assert not differences(result["weights"], alone["idle"]["weights"], 0.0)


@pytest.mark.slow
def test_metrics_are_those_of_all_clients_and_of_each_sample_once(two):
    for result in found(two, "metrics", 2):
        for number, logged in enumerate(result["logged"]):
            assert logged["val_samples"] == logged["evaluated"] == 40
            assert logged["seen"] == 40
            assert logged["once"] == 1
            assert logged["samples"] == logged["federated/samples"], number
        assert result["tested"][0].keys() == {"test_loss"}


@pytest.mark.slow
def test_processes_draw_the_same_clients_and_noise_in_secret(two):
    first, second = found(two, "secret clients", 2)
    assert first["state"]["server"]["stages"]["privacy"]["secret"] is not None
    for name in ("weights", "logged"):
        assert not differences(first[name], second[name], 0.0), name
    assert not differences(state(first), state(second), 0.0)


@pytest.mark.parametrize("name", ["fedavg", "metrics"])
@pytest.mark.slow
def test_the_log_is_that_of_one_process(two, alone, name):
    logs = []
    for folder in (two, alone["folder"]):
        with (folder / name / "log" / "version_0" / "metrics.csv").open() as file:
            rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
        # Each process logs the steps of its own clients.
        logs.append([row for row in rows if not any(key.endswith("_step") for key in row)])
    assert len(logs[0]) > 3
    assert not differences(*logs, 1e-5)


@pytest.mark.slow
def test_checkpoints_are_those_of_one_process(two, alone):
    for name in ("fedavg", "tdpfed"):
        first, second = (
            torch.load(checkpoint(folder, name, 1, "ended"), weights_only=True) for folder in (two, alone["folder"])
        )
        assert not differences(first["state_dict"], second["state_dict"], 1e-6)
        assert (first["epoch"], first["global_step"]) == (second["epoch"], second["global_step"])
        assert not differences(first["lr_schedulers"], second["lr_schedulers"], 1e-6)
        loops = [state({"state": saved["callbacks"]["FederatedLoop"]}) for saved in (first, second)]
        assert not differences(*loops, 1e-6)


@pytest.mark.parametrize(("name", "when"), RESUMED)
@pytest.mark.slow
def test_one_process_goes_on_from_two(tmp_path, two, alone, name, when):
    resumed = run(name, 1, tmp_path, checkpoint(two, name, 0, when))
    assert resumed["batches"] < alone[name]["batches"]
    assert_resumed(alone[name], [resumed])


@pytest.mark.parametrize(("name", "when"), RESUMED)
@pytest.mark.slow
def test_two_processes_go_on_from_one(two, alone, name, when):
    resumed = found(two, f"{name} resumed", 2)
    assert resumed[0]["batches"] + resumed[1]["batches"] < alone[name]["batches"]
    assert_resumed(alone[name], resumed)


@pytest.mark.slow
def test_validation_inside_a_round_sees_the_last_global_model(two, alone):
    # With one process a round is validated after two and four of its five clients, and sees the last round's model.
    last = alone["inside"]["validated"]
    assert last[::2] == last[1::2]
    for result in found(two, "inside", 2):
        # Of five clients, two processes have three turns, each of which is validated.
        assert len(result["validated"]) == 9
        assert result["validated"][::3] == result["validated"][1::3]
        assert result["validated"][2:-1:3] == result["validated"][3::3]
        assert not differences(result["validated"][::3], last[::2], 1e-6)
        assert not differences(result["weights"], alone["inside"]["weights"], 1e-6)


@pytest.mark.slow
def test_a_round_that_is_cut_short_is_aggregated_from_what_was_trained(two):
    first, second = found(two, "stopped", 2)
    assert first["batches"] == second["batches"] == 12
    assert first["logged"][-1]["federated/client_steps"] == first["global step"] == 24
    for name in ("weights", "ledger", "logged", "state"):
        assert not differences(first[name], second[name], 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "ddp"}, r"DDPStrategy.*2.*FederatedLoop"),
        ({"strategy": "fsdp"}, r"FSDPStrategy.*2.*FederatedLoop"),
        ({"max_steps": 7}, r"max_steps=7.*2.*max_epochs"),
        ({"min_steps": 7}, r"min_steps=7.*2.*min_epochs"),
        ({"val_check_interval": timedelta(minutes=1)}, r"val_check_interval.*60"),
        ({"callbacks": [ModelCheckpoint(every_n_train_steps=2)]}, r"every_n_train_steps.*train_time_interval.*2"),
        ({"callbacks": [ModelCheckpoint()], "val_check_interval": 0.5}, r"val_check_interval=0\.5"),
        ({"callbacks": [ModelCheckpoint(train_time_interval=timedelta(hours=1))]}, "train_time_interval=.* inside"),
        ({"callbacks": [SpikeDetection()]}, r"SpikeDetection.*each batch.* 2 processes"),
        ({"callbacks": [OnExceptionCheckpoint("folder")]}, r"OnExceptionCheckpoint saves.* 2 processes"),
        ({"callbacks": [ModelCheckpoint(save_on_exception=True)]}, r"ModelCheckpoint\(save_on_exception=True\).* 2"),
    ],
)
def test_refuses_what_goes_by_steps_of_one_process(tmp_path, arguments, message):
    loop = FederatedLoop(FedAvg(), partition=UNEVEN, summary=False)
    arguments = {"strategy": "client_parallel", **arguments}
    callbacks = [loop, *arguments.pop("callbacks", [])]
    if arguments["strategy"] == "fsdp":
        # Lightning itself refuses to make one on the CPU.
        run = SimpleNamespace(world_size=2, strategy=FSDPStrategy(), callbacks=callbacks, datamodule=None)
    else:
        run = trainer(tmp_path, *callbacks, devices=2, **arguments)
    with pytest.raises(MisconfigurationException, match=message):
        loop.setup(run, Module(), "fit")


@pytest.mark.parametrize(
    ("callbacks", "arguments", "message"),
    [
        ([], {}, r"FederatedLoop.*`callbacks`"),
        ([FederatedLoop(FedAvg(), partition=UNEVEN)], {"sync_batchnorm": True}, "set sync_batchnorm=False"),
    ],
)
def test_refuses_what_it_is_not_for(tmp_path, callbacks, arguments, message):
    run = trainer(tmp_path, *callbacks, strategy="client_parallel", devices=2, **arguments)
    run.state.fn = TrainerFn.FITTING
    with pytest.raises(MisconfigurationException, match=message):
        run.strategy.setup(run)


def test_takes_back_what_it_sets(tmp_path):
    """The fit is refused, after trainer and warnings have been set."""
    loop = FederatedLoop(FedAvg(), partition=UNEVEN)
    run = trainer(tmp_path, loop, strategy="client_parallel", devices=2, sync_batchnorm=True)
    run.state.fn = TrainerFn.FITTING
    before = [*warnings.filters]
    with pytest.raises(MisconfigurationException, match="sync_batchnorm"):
        run.strategy.setup(run)
    assert run._accelerator_connector.use_distributed_sampler is False
    assert [*warnings.filters] != before
    run.strategy.teardown()
    assert run._accelerator_connector.use_distributed_sampler is True
    assert [*warnings.filters] == before


@pytest.mark.parametrize(
    ("allowed", "differing"),
    [([], ["data.content", "participants"]), (["data"], ["participants"]), (["data", "participants"], [])],
)
def test_different_data_and_settings_are_refused(tmp_path, monkeypatch, allowed, differing):
    def gather(mine):
        if "participants" not in mine:
            return [mine]
        other = {**mine, "participants": [[0]], "data": {**mine["data"], "content": "other"}}
        return [mine, mine, other]

    monkeypatch.setattr("lightning_lowrank.federated.loop.shared_by", lambda _: SimpleNamespace(gather=gather))
    monkeypatch.setattr("lightning_lowrank.federated.loop.SharedCoordinator", lambda _, __, parts: Coordinator(parts))
    loop = FederatedLoop(FedAvg(), partition=UNEVEN, participants=[[1]], allow_changes=allowed, summary=False)
    run = trainer(tmp_path, loop, max_epochs=1)
    with pytest.raises(MisconfigurationException) if differing else nullcontext() as refused:
        run.fit(Module(), Data())
    if differing:
        lines = [line.split(":")[0].strip() for line in str(refused.value).splitlines() if line.startswith("  ")]
        assert sorted(lines) == differing
        assert "in process 0, [[0]] in process 2" in str(refused.value)


@pytest.mark.parametrize("requeues", [True, False])
def test_a_warning_names_the_requeue_of_slurm(tmp_path, monkeypatch, requeues):
    run = trainer(tmp_path, strategy="client_parallel", devices=2)
    for name, value in {"NTASKS": "2", "NTASKS_PER_NODE": "2", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    run.strategy.cluster_environment = SLURMEnvironment(auto_requeue=requeues)
    expected = pytest.warns(UserWarning, match=r"auto_requeue=True.* 2 processes.*\(auto_requeue=False\).*ckpt_path")
    with expected if requeues else warnings.catch_warnings():
        if not requeues:
            warnings.simplefilter("error")
        assert shared_by(run) is run.strategy


@pytest.mark.parametrize(("stacked", "of"), [(False, "clients"), (True, "chunks of clients")])
def test_an_integer_val_check_interval_counts_turns(stacked, of):
    settings = {"val_check_interval": 3, "check_val_every_n_epoch": 1, "enable_validation": True}
    run = SimpleNamespace(world_size=2, limit_train_batches=1.0, **settings)
    of_two = f"; in a turn each of the 2 processes trains one of its {of}"
    (note,) = validation_interval_note(run, lambda: 3, stacked)
    assert re.match(f"val_check_interval=3 counts turns.*of each round{of_two}", note)
    with pytest.raises(MisconfigurationException, match=f"counts turns.*first round has 2{of_two}"):
        validation_interval_note(run, lambda: 2, stacked)


def test_is_known_by_its_name(tmp_path):
    run = trainer(tmp_path, strategy="client_parallel", devices=2)
    assert type(run.strategy) is ClientParallelStrategy
    assert run.world_size == 2


def test_divides_the_longest_first_and_ties_by_id():
    assert divide({4: 3, 2: 3, 9: 3, 0: 1}, 2) == [[2, 9], [0, 4]]
    assert divide({1: 1}, 3) == [[1], [], []]
    uneven = {client: 1 + client * client % 37 for client in range(100)}
    loads = [sum(uneven[client] for client in part) for part in divide(uneven, 7)]
    assert sum(loads) == sum(uneven.values())
    assert max(loads) - min(loads) <= max(uneven.values())


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [pytest.param("0", marks=pytest.mark.nightly), "1"])
def test_an_error_in_one_process_ends_the_others(tmp_path, rank):
    with pytest.raises(AssertionError, match=r'RuntimeError.*"out of luck"'):
        launch(tmp_path, 2, "failing", timeout=400, FAILING_RANK=rank)


@pytest.mark.nightly
def test_processes_may_be_started_by_torchrun(tmp_path, alone):
    launch(tmp_path, 2, "fedavg", launcher=["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"])
    assert_as_one(alone["fedavg"], found(tmp_path, "fedavg", 2))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("processes", "names"),
    [pytest.param(2, OTHERS, id="two"), pytest.param(3, [*QUICK, *OTHERS], id="three", marks=pytest.mark.nightly)],
)
def test_every_run_in_several_processes_is_that_of_one(tmp_path, processes, names):
    launch(tmp_path, processes, *names, timeout=1200)
    for name in names:
        one, all_of_them = run(name, 1, tmp_path / "alone" / name), found(tmp_path, name, processes)
        if RUNS[name]().get("execution") == "vectorized":
            one = {**one, **{key: all_of_them[0][key] for key in ("steps", "global step", "checkpoints")}}
        assert_as_one(one, all_of_them)


@pytest.mark.parametrize(
    "methods",
    [
        pytest.param(ARCHETYPES, marks=pytest.mark.slow, id="archetypes"),
        pytest.param([name for name in METHODS if name not in ARCHETYPES], marks=pytest.mark.nightly, id="others"),
    ],
)
@pytest.mark.nightly
def test_every_method_in_three_processes_is_that_of_one(tmp_path, methods):
    names = [f"method {name}" for name in methods]
    launch(tmp_path, 3, *names, timeout=1800)
    for name in names:
        assert_as_one(run(name, 1, tmp_path / "alone" / name), found(tmp_path, name, 3), tolerance=1e-5)


@pytest.mark.nightly
def test_every_stage_in_two_processes_is_that_of_one(tmp_path):
    """Each part of a round alone, and each pair with a stage of one's own or a late client."""
    own = {"norms", "held", "halved", "refused", "late"}
    names = [
        " and ".join(parts) for parts in POSSIBLE if "not finite" not in parts and (len(parts) == 1 or own & {*parts})
    ]
    launch(tmp_path, 2, *names, timeout=1200)
    for name in names:
        assert_as_one(run(name, 1, tmp_path / "alone" / name), found(tmp_path, name, 2))
