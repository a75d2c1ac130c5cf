"""Runs that `test_processes` makes in one process and in several, which this script is then run in.

    python tests/federated/execution/parallel_runs.py FOLDER PROCESSES RUN ...

Every process writes what each run came to into the folder.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAUROC

REPOSITORY = Path(__file__).resolve().parents[3]
if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))

from lightning_lowrank import (  # noqa: E402
    ALIE,
    Arrival,
    BlockKronecker,
    Bucketing,
    CenteredClipping,
    ClientPrivacy,
    DifferentialPrivacy,
    FedAvg,
    FederatedLoop,
    FedMUD,
    FromIndices,
    Half,
    LogNormal,
    LowRank,
    LowRankCodec,
    MaskAbsentClasses,
    RoundStage,
    SystemModel,
    TopK,
)
from lightning_lowrank.aggregation import KeepsArrivals  # noqa: E402
from tests.algorithms.methods import LOW_RANK, METHODS  # noqa: E402
from tests.federated.execution.runs import Manual  # noqa: E402
from tests.federated.test_stage_pairs import PARTITION, POSSIBLE, settings_of  # noqa: E402
from tests.helpers import Data, Module, network, trainer, weights  # noqa: E402

UNEVEN = FromIndices([list(range(5)), list(range(5, 47)), list(range(47, 69)), list(range(69, 102)), [102]])
# BatchNorm cannot train on a batch of one.
OF_TWO_OR_MORE = [list(range(5)), list(range(5, 47)), list(range(47, 69)), list(range(69, 100)), [100, 101]]
WITHOUT_ONES = FromIndices(OF_TWO_OR_MORE)
OWN_TESTS = FromIndices({"train": OF_TWO_OR_MORE, "test": [[0, 1, 2], [3, 4], [], [10, 11, 12, 13], [30]]})
SGD = torch.optim.SGD
MOMENTUM = partial(SGD, lr=0.05, momentum=0.9)
HALVED = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)


class Norms(RoundStage):
    """Holds all messages back to the round's end, and logs the norm of each client's update."""

    def __init__(self) -> None:
        self._held: list[Arrival] = []
        self._norms: dict[str, float] = {}

    def arrived(self, arrival: Arrival) -> None:
        self._held.append(arrival.copy())

    def release(self) -> list[Arrival]:
        held, self._held = sorted(self._held, key=lambda arrival: arrival.client.id), []
        self._norms = {
            f"norm/{each.client.id}": sum(float(value.norm()) for value in each.update().values()) for each in held
        }
        return held

    def figures(self) -> dict[str, float]:
        return self._norms


class Rounds(pl.Callback):
    """Keeps what was logged after each round, and what of a round is seen in between."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.steps: list[int] = []
        self.batches = 0
        self.validated: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int):
        assert batch is not None
        self.batches += 1

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int):
        assert batch is not None

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule):
        if not trainer.sanity_checking:
            self.validated.append(float(trainer.callback_metrics["val_loss"]))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule):
        # What is logged on a step is the first process's.
        shared = {name: value for name, value in trainer.callback_metrics.items() if not name.endswith("_step")}
        self.logged.append({name: float(value) for name, value in shared.items()})
        self.steps.append(trainer.global_step)


class WhenValidated(ModelCheckpoint):
    """Of two callbacks of one class, Lightning would keep one's state."""


class Metrics(Module):
    """Logs metric objects and numbers of every reduction, to be synchronised or not."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.evaluated, self.seen = MeanMetric(), SumMetric(), SumMetric()
        # Its states are lists.
        self.ranked = MulticlassAUROC(4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.trained.update(loss.detach(), len(batch[0]))
        self.log("trained", self.trained, on_step=False, on_epoch=True)
        self.ranked.update(self.net(batch[0]).detach().softmax(1), batch[1])
        self.log("ranked", self.ranked, on_step=False, on_epoch=True)
        self.log("samples", float(len(batch[0])), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        self.log("largest", loss.detach(), reduce_fx="max", on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_start(self) -> None:
        self.log("once", 1.0, reduce_fx="sum")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.evaluated.update(len(batch[0]))
        self.seen.update(len(batch[0]))
        self.log("evaluated", self.evaluated)
        self.log("val_samples", float(len(batch[0])), reduce_fx="sum", sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("seen", self.seen.compute())
        self.seen.reset()


class Failing(Module):
    """Fails in the second round, where one process trains."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_rank == int(os.environ["FAILING_RANK"]) and self.current_epoch == 1:
            raise RuntimeError("out of luck")
        return super().training_step(batch, batch_idx)


class Unlucky(Module):
    """Has a client that fails in the second round, and one whose update is no number in the third."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loop = next(each for each in self.trainer.callbacks if isinstance(each, FederatedLoop))
        (client,), step = loop.rounds.execution.clients, loop.rounds.execution.number
        if (self.current_epoch, client.id, step) == (1, 2, 1):
            raise RuntimeError("out of luck")
        return super().training_step(batch, batch_idx) * (math.nan if (self.current_epoch, client.id) == (2, 1) else 1)


class Stopping(pl.Callback):
    """Ends the fit in mid-round, in every process after the same number of its clients' batches."""

    def __init__(self) -> None:
        self.left = 12

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int):
        self.left -= 1
        trainer.should_stop = self.left <= 0


def _method(name: str, form: str = "dense", **arguments: Any) -> dict[str, Any]:
    method = METHODS[name]
    make = LOW_RANK[form]
    net = method.network(norm=method.norm) if method.norm else method.network()
    return {
        "module": Module(net, optimizer=method.optimizer),
        "algorithm": method.make(),
        "callbacks": [] if make is None else [make()],
        **method.settings,
        **arguments,
    }


def _fedavg(**arguments: Any) -> dict[str, Any]:
    module = Module(network(norm=nn.BatchNorm1d, dropout=0.3), optimizer=MOMENTUM, scheduler=HALVED)
    return {"module": module, "clients_per_round": 4, "partition": WITHOUT_ONES, "client_dropout": 0.2, **arguments}


def _fedmud(**arguments: Any) -> dict[str, Any]:
    low_rank = LowRank(BlockKronecker(), ratio=0.4, decouple=True, skip=["last"], summary=False)
    return {"module": Module(optimizer=MOMENTUM), "algorithm": FedMUD(), "callbacks": [low_rank], **arguments}


def _parts(names: tuple[str, ...]) -> dict[str, Any]:
    settings = settings_of(*names) or {}
    renamed = {"module": settings.pop("module", Module)(), "callbacks": settings.pop("before", [])}
    return {"partition": PARTITION, "callbacks_after": settings.pop("after", []), **settings, **renamed}


class Median(KeepsArrivals):
    """The coordinate-wise median of what clients send."""

    def result(self) -> dict[str, torch.Tensor]:
        return {name: torch.stack(values).median(dim=0).values for name, values in self.values().items()}


RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    "fedavg": _fedavg,
    "fedmud": _fedmud,
    "scaffold": partial(_method, "SCAFFOLD", personal_test="matched_labels"),
    "tdpfed": partial(_method, "TDPFed", personal_test="matched_labels", client_memory_limit=2000),
    "own tests": partial(_fedavg, buffers="local", partition=OWN_TESTS, personal_test="by_client"),
    "stages": lambda: {"stages": [Norms()]},
    "mask": partial(_method, "GradientMask"),
    "coordinates": partial(_method, "RandomCoordinates", clients_per_round=3),
    "channels": partial(
        _method,
        "SCAFFOLD",
        uplink=[TopK(0.2, error_feedback=True), Half()],
        downlink=[TopK(0.5, error_feedback=True)],
        clients_per_round=3,
    ),
    "factors": lambda: {
        "uplink": [LowRankCodec(2, error_feedback=True), Half()],
        "downlink": [LowRankCodec(energy=0.9, error_feedback=True)],
        "clients_per_round": 3,
    },
    "median": lambda: {"aggregator": Median(), "objective": MaskAbsentClasses("net", 4), "uplink": [Half()]},
    "attacked": lambda: {
        "aggregator": CenteredClipping(before=[Bucketing(2)]),
        "attackers": ALIE([0], 1.5),
        "uplink": [Half()],
    },
    "late": lambda: {
        "system": SystemModel([1e4, 1e5, 2e3, 1e4, 3e3], latency=LogNormal(0.1), speed=LogNormal(1e6), deadline=1.5)
    },
    "capacities": partial(_method, "HeteroFL"),
    "vectorized": partial(_fedmud, execution="vectorized"),
    # How many clients step together decides how they are rounded, and control variates are changes over small rates.
    "together": partial(
        _method, "SCAFFOLD", execution="vectorized", chunk_size=2, clients_per_round=4, trainer={"precision": "64-true"}
    ),
    "kept": partial(_fedavg, optimizer_state="keep", buffers="local"),
    "stepwise": lambda: {
        "module": Module(
            optimizer=MOMENTUM,
            scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.9),
            interval="step",
        ),
        "trainer": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    },
    "unlucky": lambda: _method("SCAFFOLD", module=Unlucky(), uplink=[TopK(0.2, error_feedback=True)]),
    "idle": lambda: {
        "module": Module(optimizer=MOMENTUM),
        "clients_per_round": 1,
        "trainer": {"max_time": {"minutes": 5}},
    },
    # The second process has its first client in the second round.
    "joining": lambda: {"participants": [[0], [0, 1, 2], [1]]},
    "metrics": lambda: {"module": Metrics(), "clients_per_round": 2, "trainer": {"num_sanity_val_steps": 1}},
    "private clients": lambda: {
        "privacy": ClientPrivacy(noise_multiplier=1.0, quantile=0.5),
        "weighting": "uniform",
        "clients_per_round": 2,
    },
    "secret clients": lambda: {
        "privacy": ClientPrivacy(noise_multiplier=1.0, quantile=0.5, secure=True),
        "weighting": "uniform",
        "clients_per_round": 2,
    },
    "private samples": lambda: {"callbacks_after": [DifferentialPrivacy(noise_multiplier=1.0)]},
    "inside": lambda: {"trainer": {"val_check_interval": 0.5, "limit_train_batches": 6}, "save": False},
    "failing": lambda: {"module": Failing(), "on_client_error": "raise", "save": False},
    "twice": partial(_method, "SCAFFOLD", save=False, again=5),
    "manual": lambda: {"module": Manual(), "save": False},
    "development": lambda: {"trainer": {"fast_dev_run": 3}, "save": False},
    "stopped": lambda: {"callbacks_after": [Stopping()], "trainer": {"max_epochs": 5}, "save": False},
    "early": lambda: {
        "callbacks_after": [EarlyStopping("train_loss", patience=0, divergence_threshold=0.5)],
        "trainer": {"max_epochs": 9},
    },
    **{" and ".join(names): partial(_parts, names) for names in POSSIBLE},
    **{f"method {name}": partial(_method, name, METHODS[name].forms[0]) for name in METHODS},
}


def run(name: str, processes: int, folder: Path, resume: Path | None = None, max_epochs: int = 3) -> dict[str, Any]:
    """Make a run, and return what it came to in this process."""
    given = RUNS[name]()
    settings = {"partition": UNEVEN, **given}
    module = settings.pop("module", None) or Module()
    before, after = settings.pop("callbacks", []), settings.pop("callbacks_after", [])
    arguments, save, again = settings.pop("trainer", {}), settings.pop("save", True), settings.pop("again", 0)
    algorithm = settings.pop("algorithm", None) or FedAvg()
    rounds, loop = Rounds(), FederatedLoop(algorithm, summary=False, **settings)
    folder.mkdir(parents=True, exist_ok=True)
    every = {"filename": "{epoch}-{step}", "save_top_k": -1}
    saved = [
        ModelCheckpoint(folder / "ended", save_on_train_epoch_end=True, **every),
        WhenValidated(folder / "validated", save_on_train_epoch_end=False, **every),
    ]
    if processes > 1:
        arguments = {"strategy": "client_parallel", "devices": processes, **arguments}
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # As of a script that does not seed its weights.
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(1)
    logger = CSVLogger(folder, name="log", version=0) if save else False
    fitted = trainer(
        folder,
        *before,
        loop,
        rounds,
        *after,
        *(saved if save else ()),
        **{"max_epochs": max_epochs, "logger": logger, "num_sanity_val_steps": 0, "log_every_n_steps": 1, **arguments},
    )
    fitted.fit(module, Data(), ckpt_path=resume, weights_only=True if resume else None)
    if again:
        fitted.fit_loop.max_epochs = again
        fitted.fit(module, Data())
    tested = fitted.test(module, Data(), verbose=False) if save else []
    return {
        "weights": weights(module),
        "ledger": loop.ledger.state_dict(),
        "state": loop.state_dict(),
        "logged": rounds.logged,
        "steps": rounds.steps,
        "batches": rounds.batches,
        "validated": rounds.validated,
        "tested": tested,
        "global step": fitted.global_step,
        "lr": [group["lr"] for group in fitted.optimizers[0].param_groups],
        "checkpoints": sorted(str(path.relative_to(folder)) for path in folder.glob("*/*.ckpt")),
    }


def main() -> None:
    folder, processes, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    warnings.simplefilter("ignore")
    for given in names:
        name, _, resume = given.partition("@")
        out = folder / (f"{name} resumed" if resume else name)
        found = run(name, processes, out, Path(resume) if resume else None)
        torch.save(found, out / f"{os.environ.get('LOCAL_RANK', 0)}.pt")


if __name__ == "__main__":
    main()
