"""Rounds on one GPU, beside a bare loop, what the card could do, and published simulators.

    python tests/benchmarks/gpu.py [--device cuda] [--only rates pfl flute] [--nets mlp cnn4 resnet18]
                                   [--clients 10 50 100] [--tf32] [--rounds N] [--quick] [--json FILE]

`--device cpu --quick` runs all of it with tiny sizes. Nothing else may run on the card.

- rates: clients' steps in a second of an MLP of 784-128-10 (batches of 32), CNN4 and ResNet-18 (batches of 64), dense,
  with SGD and images kept as uint8. The bare loop is plain PyTorch on one batch that stays on the device. The bound is
  the lesser of what the card's memory and its arithmetic allow. A step moves at least six times its parameters (they
  are read forward, backward and by the update, which writes them; gradients are written and read), its batch, and four
  times what its layers put out (written and read, the same for gradients). Its operations are those that torch's
  counter counts.
- pfl: CIFAR-10's shape as in pfl-research's benchmark: 1,000 users of 50 samples, 50 a round, batches of 10, one epoch
  with SGD of learning rate 0.1, 1,500 rounds, a network of two convolutions, evaluation of 10,000 images every ten
  rounds; with pfl 0.6.0 on the same device where it is installed (`--pfl-rounds`: how many of its rounds are timed).
  Images are generated, and alike for both.
- flute: FEMNIST's shape as in FLUTE's benchmark: 3,400 clients of about 197 samples, 62 classes, 10 a round, batches of
  20, 1,500 rounds. FLUTE reports 8 min 22 s, FedML 5 h 50 min, on other hardware.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from json_option import add_json_option, write_json
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lightning_lowrank import IID, FedAvg, FederatedLoop
from lightning_lowrank.data import TensorImages, collate_images
from lightning_lowrank.models import CNN4, MLP, ResNet18


class Card(NamedTuple):
    """What a card can do, by its maker: bytes and operations in a second, float32 and TF32 without sparsity."""

    memory: float
    float32: float
    tf32: float


CARDS = {
    "H200": Card(4.8e12, 67e12, 494e12),
    "H100 PCIe": Card(2.0e12, 51e12, 378e12),
    "H100 NVL": Card(3.9e12, 60e12, 418e12),
    "H100": Card(3.35e12, 67e12, 494e12),
    "A100-SXM4-80GB": Card(2.04e12, 19.5e12, 156e12),
    "A100": Card(1.56e12, 19.5e12, 156e12),
    "L40S": Card(0.864e12, 91.6e12, 183e12),
    "RTX 4090": Card(1.01e12, 82.6e12, 82.6e12),
    "RTX 3090": Card(0.936e12, 35.6e12, 35.6e12),
    "L4": Card(0.3e12, 30.3e12, 60e12),
    "V100": Card(0.9e12, 15.7e12, 15.7e12),
    "T4": Card(0.32e12, 8.1e12, 8.1e12),
}
"""By a part of the device's name; the first that is in it."""


class Setting(NamedTuple):
    """A network, the shape of its images, and the batch size."""

    make: Callable[[], nn.Module]
    shape: tuple[int, int, int]
    batch: int


NETS = {
    "mlp": Setting(partial(MLP, 784, [128], 10), (1, 28, 28), 32),
    "cnn4": Setting(CNN4, (1, 28, 28), 64),
    "resnet18": Setting(ResNet18, (3, 32, 32), 64),
}
QUICK = {
    "mlp": Setting(partial(MLP, 64, [16], 10), (1, 8, 8), 4),
    "cnn4": Setting(partial(CNN4, image_size=16), (1, 16, 16), 4),
    "resnet18": Setting(partial(ResNet18, width=4), (3, 16, 16), 4),
}


class Module(pl.LightningModule):
    def __init__(self, network: nn.Module, lr: float) -> None:
        super().__init__()
        self.network, self.lr = network, lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_acc", (self.network(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Clock(pl.Callback):
    """Notes when rounds begin and end, with the device's work done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: list[float] = []
        self._begin = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        wait(self._device)
        self._begin = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        wait(self._device)
        self.seconds.append(time.perf_counter() - self._begin)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def images(count: int, shape: tuple[int, ...], classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return generated images, each its class's pattern with noise, and their classes."""
    draws = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (count,), generator=draws)
    patterns = torch.randint(128, (classes, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    noise = torch.randint(128, (count, *shape), dtype=torch.uint8, generator=draws)
    return noise.add_(patterns[targets]), targets


def dataset(pixels: Tensor, targets: Tensor) -> TensorImages:
    channels = pixels.shape[1]
    return TensorImages(pixels, targets, [0.5] * channels, [0.25] * channels)


def fit(
    options: argparse.Namespace,
    network: nn.Module,
    data: TensorImages,
    batch: int,
    rounds: int,
    lr: float,
    validation: TensorImages | None = None,
    every: int = 10,
    **federated: Any,
) -> tuple[list[float], pl.Trainer, Any]:
    """Run rounds; return their seconds, the trainer, and the loop."""
    clock, loop = Clock(options.on), FederatedLoop(FedAvg(), summary=False, **federated)
    trainer = pl.Trainer(
        max_epochs=rounds,
        accelerator="gpu" if options.on.type == "cuda" else options.on.type,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0 if validation is None else 1.0,
        check_val_every_n_epoch=every,
        callbacks=[loop, clock],
    )
    train = DataLoader(data, batch, shuffle=True, collate_fn=collate_images)
    evaluation = None if validation is None else DataLoader(validation, 2500, collate_fn=collate_images)
    trainer.fit(Module(network, lr), train, evaluation)
    return clock.seconds, trainer, loop


# Rates


def bare(setting: Setting, options: argparse.Namespace) -> float:
    """Return the steps in a second of a loop without anything."""
    device = options.on
    network = setting.make().to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    batch = torch.randn(setting.batch, *setting.shape, device=device)
    targets = torch.randint(10, (setting.batch,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(network(batch), targets).backward()
        optimizer.step()

    for _ in range(3):
        step()
    wait(device)
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < options.seconds:
        for _ in range(10):
            step()
        count += 10
        wait(device)
    return count / (time.perf_counter() - begin)


def bounds(setting: Setting) -> tuple[float, float]:
    """Return the bytes and the operations of a client's step, at least."""
    network = setting.make()
    put_out: list[int] = []

    def note(module: nn.Module, given: Any, output: Any) -> None:
        put_out.append(output.nbytes)

    for module in network.modules():
        if not any(module.children()) and not isinstance(module, (nn.Identity, nn.Flatten)):
            module.register_forward_hook(note)
    batch, targets = torch.randn(setting.batch, *setting.shape), torch.zeros(setting.batch, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(network(batch), targets).backward()
    parameters = sum(value.nbytes for value in network.parameters())
    return 6 * parameters + batch.nbytes + 4 * sum(put_out), counter.get_total_flops()


WAYS: dict[str, dict[str, Any]] = {
    "one after another, data on the host": {"execution": "sequential", "data_on_device": False},
    "one after another": {"execution": "sequential"},
    "together, data on the host": {"execution": "vectorized", "data_on_device": False},
    "together": {"execution": "vectorized"},
    "together, compiled": {"execution": "vectorized", "compile": True},
}


def rates(options: argparse.Namespace) -> list[dict[str, Any]]:
    name = torch.cuda.get_device_name(options.on) if options.on.type == "cuda" else ""
    card = next((card for part, card in CARDS.items() if part in name), None)
    if card is None:
        print(f"no bound is known for {name or options.on}")
    rows = []
    for net in options.nets:
        setting = (QUICK if options.quick else NETS)[net]
        nbytes, operations = bounds(setting)
        limit = None
        if card is not None:
            limit = min(card.memory / nbytes, (card.tf32 if options.tf32 else card.float32) / operations)
        reference = bare(setting, options)
        print(
            f"\n{net}, batches of {setting.batch}: {nbytes / 1e6:.2f} MB and {operations / 1e9:.3f} GFLOP a step; "
            f"the bare loop makes {reference:,.0f} a second" + (f", the bound is {limit:,.0f}" if limit else "")
        )
        for clients in options.clients:
            steps = 4 if options.quick else 40 if net == "mlp" else 20
            pixels, targets = images(clients * setting.batch * steps, setting.shape, 10)
            for way, arguments in WAYS.items():
                # Clients that train one after another need no more of them to be timed.
                count = min(clients, 10) if arguments["execution"] == "sequential" else clients
                chosen = count * setting.batch * steps
                together = {} if count < clients or arguments["execution"] == "sequential" else {"chunk_size": count}
                torch.manual_seed(0)
                try:
                    seconds, _, loop = fit(
                        options,
                        setting.make(),
                        dataset(pixels[:chosen], targets[:chosen]),
                        setting.batch,
                        rounds=2 if options.quick else 12 if net == "mlp" else 5,
                        lr=0.01,
                        clients=count,
                        partition=IID(),
                        **arguments,
                        **together,
                    )
                except Exception as error:
                    print(f"  {clients:4d} clients  {way:<38}{type(error).__name__}: {str(error)[:120]}", flush=True)
                    continue
                rate = count * steps / min(seconds[1:])
                made = getattr(loop.rounds.execution, "compiled_steps", None)
                why = "" if made is None else made.reason
                share = f"{rate / limit:7.1%} of the bound" if limit else ""
                print(
                    f"  {clients:4d} clients  {way:<38}{rate:12,.0f}/s{rate / reference:8.2f} times bare  {share}"
                    f"{f'  ({why})' if why else ''}",
                    flush=True,
                )
                rows.append(
                    {"net": net, "clients": clients, "way": way, "steps_per_second": rate, "bare": reference}
                    | {"bound": limit, "reason": why}
                )
    return rows


# Whole experiments


def two_convolutions(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Return the network of both benchmarks: two convolutions of 3×3, pooling, dropout and two linear layers."""
    side = (shape[1] - 4) // 2
    network = nn.Sequential(
        nn.Conv2d(shape[0], 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * side * side, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, classes),
    )
    for module in network:
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.xavier_uniform_(module.weight)
    return network


class Experiment(NamedTuple):
    """A published benchmark's shape."""

    clients: int
    samples: int
    cohort: int
    batch: int
    rounds: int
    shape: tuple[int, int, int]
    classes: int
    evaluated: int


PFL = Experiment(1000, 50, 50, 10, 1500, (3, 32, 32), 10, 10_000)
FLUTE = Experiment(3400, 197, 10, 20, 1500, (1, 28, 28), 62, 10_000)


def sized(of: Experiment, options: argparse.Namespace) -> Experiment:
    if options.quick:
        shape = (of.shape[0], 12, 12)
        of = of._replace(clients=20, samples=2 * of.batch, cohort=5, rounds=4, shape=shape, evaluated=100)
    return of._replace(rounds=options.rounds or of.rounds)


def ours(of: Experiment, options: argparse.Namespace, name: str) -> dict[str, Any]:
    train = images(of.clients * of.samples, of.shape, of.classes)
    test = images(of.evaluated, of.shape, of.classes, seed=2)
    torch.manual_seed(0)
    begin = time.perf_counter()
    seconds, trainer, _ = fit(
        options,
        two_convolutions(of.shape, of.classes),
        dataset(*train),
        of.batch,
        of.rounds,
        lr=0.1,
        validation=dataset(*test),
        every=2 if options.quick else 10,
        clients=of.clients,
        clients_per_round=of.cohort,
        partition=IID(),
        execution="vectorized",
    )
    whole = time.perf_counter() - begin
    accuracy = float(trainer.callback_metrics["val_acc"])
    last = seconds[-max(1, len(seconds) // 4) :]
    print(
        f"{name}: {of.rounds:,} rounds in {whole:.1f} s, start included (the last quarter at"
        f" {1000 * sum(last) / len(last):.1f} ms a round), accuracy {accuracy:.3f}",
        flush=True,
    )
    return {"seconds": whole, "rounds": of.rounds, "accuracy": accuracy}


def pfl_itself(of: Experiment, options: argparse.Namespace) -> dict[str, Any] | None:
    """Run pfl, or some of its rounds; its data lie on the device as float32 images, as its benchmark has them."""
    try:
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.aggregate.weighting import WeightByDatapoints
        from pfl.algorithm.base import NNAlgorithmParams
        from pfl.algorithm.federated_averaging import FederatedAveraging
        from pfl.callback.base import TrainingProcessCallback
        from pfl.callback.central_evaluation import CentralEvaluationCallback
        from pfl.data.dataset import Dataset
        from pfl.data.federated_dataset import FederatedDataset
        from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
        from pfl.metrics import Metrics, Weighted
        from pfl.model.pytorch import PyTorchModel
    except ImportError as error:
        print(f"pfl: not run ({error}); pip install 'pfl[pytorch]==0.6.0'")
        return None
    device = options.on

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = two_convolutions(of.shape, of.classes)

        def loss(self, inputs: Tensor, targets: Tensor, eval: bool = False) -> Tensor:
            self.train(not eval)
            return F.cross_entropy(self.network(inputs), targets)

        @torch.no_grad()
        def metrics(self, inputs: Tensor, targets: Tensor, eval: bool = True) -> dict[str, Any]:
            self.train(not eval)
            logits = self.network(inputs)
            loss = F.cross_entropy(logits, targets, reduction="sum").item()
            right = (logits.argmax(1) == targets).sum().item()
            return {"loss": Weighted(loss, len(targets)), "accuracy": Weighted(right, len(targets))}

    def tensors(count: int, seed: int) -> list[Tensor]:
        pixels, targets = images(count, of.shape, of.classes, seed)
        return [((pixels.float() / 255 - 0.5) / 0.25).to(device), targets.to(device)]

    seconds: list[float] = []
    found: dict[str, float] = {}

    class Report(TrainingProcessCallback):
        def on_train_begin(self, *, model: Any) -> Metrics:
            wait(device)
            self.mark = time.perf_counter()
            return Metrics()

        def after_central_iteration(self, metrics: Metrics, *_: Any, **__: Any) -> tuple[bool, Metrics]:
            found.update(metrics.to_simple_dict())
            wait(device)
            now = time.perf_counter()
            seconds.append(now - self.mark)
            self.mark = now
            return False, Metrics()

    rounds = min(of.rounds, options.pfl_rounds)
    inputs, targets = tensors(of.clients * of.samples, 0)
    draws = torch.Generator().manual_seed(0)
    parts = torch.randperm(len(inputs), generator=draws).view(of.clients, -1).to(device)
    cohorts = iter(
        [int(each) for _ in range(rounds) for each in torch.randperm(of.clients, generator=draws)[: of.cohort]]
    )
    data = FederatedDataset(
        lambda user: Dataset([inputs[parts[user]], targets[parts[user]]], user_id=str(user)), lambda: next(cohorts)
    )
    torch.manual_seed(0)
    network = Network().to(device)
    evaluation = NNEvalHyperParams(local_batch_size=2500)
    begin = time.perf_counter()
    # It prints each round's metrics.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        FederatedAveraging().run(
            NNAlgorithmParams(
                central_num_iterations=rounds,
                evaluation_frequency=2 if options.quick else 10,
                train_cohort_size=of.cohort,
                val_cohort_size=0,
            ),
            SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
            PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0)),
            NNTrainHyperParams(local_batch_size=of.batch, local_num_epochs=1, local_learning_rate=0.1),
            evaluation,
            callbacks=[
                CentralEvaluationCallback(Dataset(tensors(of.evaluated, 2)), evaluation, 2 if options.quick else 10),
                Report(),
            ],
        )
    whole = time.perf_counter() - begin
    accuracy = next((value for name, value in found.items() if "accuracy" in name), float("nan"))
    scaled = "" if rounds == of.rounds else f", so {whole / rounds * of.rounds:.0f} s for {of.rounds:,}"
    print(f"pfl 0.6.0: {rounds:,} rounds in {whole:.1f} s{scaled}, accuracy {accuracy:.3f}", flush=True)
    return {"seconds": whole, "rounds": rounds, "accuracy": accuracy}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "mps", "cpu"])
    parser.add_argument("--only", nargs="+", default=["rates", "pfl", "flute"], choices=["rates", "pfl", "flute"])
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS))
    parser.add_argument("--clients", nargs="+", type=int, default=[10, 50, 100])
    parser.add_argument(
        "--ways", nargs="+", default=[], help="parts of the names of ways that are timed; all by default"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="how long the bare loop is timed")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of the whole experiments; theirs by default")
    parser.add_argument("--pfl-rounds", type=int, default=150, help="rounds of pfl that are timed at most")
    parser.add_argument("--tf32", action="store_true", help="let products and convolutions use TF32")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    add_json_option(parser)
    options = parser.parse_args()
    options.on = torch.device(options.device, 0) if options.device != "cpu" else torch.device("cpu")
    if options.quick:
        options.seconds = min(options.seconds, 0.1)
    for name in [name for name in WAYS if options.ways and not any(part in name for part in options.ways)]:
        del WAYS[name]
    warnings.simplefilter("ignore")
    for noisy in ("lightning.pytorch", "pfl"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.tf32
    where = torch.cuda.get_device_name(options.on) if options.on.type == "cuda" else str(options.on)
    print(f"torch {torch.__version__}, {where}, {'TF32' if options.tf32 else 'float32'}", flush=True)
    found: dict[str, Any] = {"torch": torch.__version__, "device": where, "tf32": options.tf32}
    if "rates" in options.only:
        found["rates"] = rates(options)
    if "pfl" in options.only:
        of = sized(PFL, options)
        print("\nCIFAR-10's shape, as pfl-research has it")
        found["pfl"] = {"ours": ours(of, options, "lightning_lowrank"), "pfl": pfl_itself(of, options)}
    if "flute" in options.only:
        print("\nFEMNIST's shape, as FLUTE has it (FLUTE reports 502 s, FedML 21,000 s, on other hardware)")
        found["flute"] = {"ours": ours(sized(FLUTE, options), options, "lightning_lowrank")}
    write_json(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
