"""Where the time of a client's step goes, to the hundredth of a millisecond, beside a loop of plain PyTorch.

    python tests/benchmarks/steps.py [--whole] [--threads N] [--rounds N] [--data FOLDER] [--json FILE]

The experiment is FedAvg-M's on MNIST (`recipes/fedslop`): 10 of 50 clients under Dirichlet 0.1, batches of 32, an MLP
of 784-128-10, clients one after another. Nothing is logged, validated or saved, except with `--whole`: then each step
logs its loss, and each round ends with an evaluation on the 10,000 test images, a line of a CSV file and a checkpoint.
After each round a loop of plain PyTorch trains the same clients on as many batches from tensors in memory; with
`--whole` it evaluates and saves too. Ratios are medians over pairs of rounds.

A third of the rounds run under a clock that is put around the parts of a round. The table has the time that each part
takes of its own, without the parts inside it, as microseconds a step, times it is called in a step, and milliseconds a
round; what the clock itself takes is estimated, and taken away. "plain" is what the loop spends on the same part.
"elsewhere" is what is left of the clocked rounds. The last lines have whole rounds without the clock. Without `--whole`
the exit status is 1 if a round takes more than 1.25 times that of the loop. The machine must have nothing else to do.
"""

from __future__ import annotations

import argparse
import functools
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from json_option import add_json_option, write_json
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from lightning_lowrank import Dirichlet, FedAvgM, FederatedLoop  # noqa: E402
from lightning_lowrank.data import MNIST  # noqa: E402
from lightning_lowrank.federated import loop as loops  # noqa: E402
from lightning_lowrank.federated.coordinator import Coordinator  # noqa: E402
from lightning_lowrank.federated.data.loader import SeededBatches  # noqa: E402
from lightning_lowrank.federated.data.planner import RoundPlanner  # noqa: E402
from lightning_lowrank.federated.execution.sequential import Sequential  # noqa: E402
from lightning_lowrank.federated.isolation import ClientSteps, Isolation  # noqa: E402
from lightning_lowrank.federated.randomness import StepRandomness  # noqa: E402
from lightning_lowrank.federated.rounds import Rounds  # noqa: E402
from lightning_lowrank.internals import direct_steps  # noqa: E402
from lightning_lowrank.models import MLP  # noqa: E402

LIMIT = 1.25
STEP = "compute: optimizer.step"
LOG, VALIDATION, SAVE = "log: the loss of a step", "round: validation", "round: checkpoint"
ROWS_OF_EVALUATION = 1024
RATE, MOMENTUM, BATCH, CLIENTS = 0.018, 0.8, 32, 50


class Module(pl.LightningModule):
    def __init__(self, logs: bool) -> None:
        super().__init__()
        self.network = MLP(784, hidden=(128,), out_features=10)
        self.val_accuracy = MulticlassAccuracy(10, average="micro", validate_args=False)
        self.logs = logs

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.logs:
            self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(batch[1]))
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        logits = self.network(batch[0])
        self.val_accuracy.update(logits, batch[1])
        self.log("val_loss", cross_entropy(logits, batch[1]), batch_size=len(batch[1]))
        self.log("val_acc", self.val_accuracy, batch_size=len(batch[1]))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


class Clock:
    """Adds up the time of parts, without that of the parts inside them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._stack: list[list[float]] = []
        self.of_a_call = 0.0
        self.of_a_call = self._estimate()

    def _estimate(self) -> float:
        probe = Clock.__new__(Clock)
        probe.seconds, probe.calls, probe._stack, probe.of_a_call = {}, {}, [], 0.0
        timed = probe.around("probe", lambda: None)
        begin = time.perf_counter()
        for _ in range(20_000):
            timed()
        return (time.perf_counter() - begin) / 20_000

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        clock, stack = time.perf_counter, self._stack
        self.seconds.setdefault(part, 0.0)
        self.calls.setdefault(part, 0)

        @functools.wraps(function)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            frame = [0.0]
            stack.append(frame)
            begin = clock()
            try:
                return function(*arguments, **keywords)
            finally:
                took = clock() - begin
                stack.pop()
                self.seconds[part] += took - frame[0]
                self.calls[part] += 1
                if stack:
                    stack[-1][0] += took + self.of_a_call

        return timed


def parts_of(trainer: pl.Trainer, module: Module) -> list[tuple[str, Any, str]]:
    """Return the parts: what they are called, and where their functions are found."""
    loop: Any = trainer.fit_loop.epoch_loop
    logger, whole = trainer.logger, int(module.logs)
    connector: Any = trainer._logger_connector
    steps = direct_steps.DirectSteps
    return [
        ("Lightning: run, done, on_advance_end", loop, "run"),
        ("Lightning: what is logged", connector, "on_batch_start"),
        ("Lightning: what is logged", connector, "on_batch_end"),
        ("Lightning: what is logged", connector, "update_train_step_metrics"),
        ("steps: padding of rounds", loop, "advance"),
        ("steps: step", steps, "_step"),
        ("steps: update", steps, "_update"),
        ("steps: to the device", steps, "_on_device"),
        ("batch: requested, seed derived", steps, "_next_batch"),
        ("batch: read", SeededBatches, "_read"),
        ("randomness: opened", StepRandomness, "open"),
        ("randomness: seeded", StepRandomness, "seed"),
        ("randomness: closed", StepRandomness, "close"),
        ("compute: forward", Module, "loss"),
        ("compute: zero_grad", direct_steps, "drop_gradients"),
        ("compute: backward", direct_steps, "run_backward"),
        (STEP, direct_steps, "bare_step"),
        ("hooks: before_batch", Rounds, "before_batch"),
        ("hooks: around training_step", module, "training_step"),
        ("hooks: before_step", Sequential, "before_step"),
        ("hooks: after_batch", Rounds, "after_batch"),
        ("hooks: ClientSteps.end_batch", ClientSteps, "end_batch"),
        ("hooks: Isolation.end_step", Isolation, "end_step"),
        ("client: begins", Sequential, "open"),
        ("client: is sent", Coordinator, "send"),
        ("client: isolated", Isolation, "begin_client"),
        ("client: isolated", Isolation, "end_client"),
        ("client: ends", Rounds, "_end_chunk"),
        ("client: ends", Sequential, "close"),
        ("client: packed", Coordinator, "pack"),
        ("client: received", Coordinator, "receive"),
        ("round: planned", RoundPlanner, "plan"),
        ("round: begins", Rounds, "_begin_round"),
        ("round: aggregated", Rounds, "aggregate"),
        ("round: figures", loops, "log_figures"),
        *([(LOG, module, "log"), (VALIDATION, loop.val_loop, "run"), (SAVE, trainer, "save_checkpoint")] * whole),
        *[("round: written by the logger", logger, name) for name in ("log_metrics", "save") if logger is not None],
    ]


@contextmanager
def clocked(clock: Clock, parts: list[tuple[str, Any, str]]) -> Iterator[None]:
    with ExitStack() as stack:
        for part, owner, name in parts:
            before, function = vars(owner).get(name), getattr(owner, name)
            around = clock.around(part, function)
            if part == STEP:
                # What it returns is the step, another function each time.
                around = lambda optimizer, make=function: clock.around(STEP, make(optimizer))  # noqa: E731
            setattr(owner, name, around)
            if before is None:
                stack.callback(delattr, owner, name)
            else:
                stack.callback(setattr, owner, name, before)
        yield


class PlainLoop:
    """The same round in plain PyTorch, with the tensors normalised and in memory."""

    def __init__(self, data: MNIST, folder: Path | None) -> None:
        def in_memory(images: Any) -> tuple[Tensor, Tensor]:
            everything = images.__getitems__(range(len(images)))
            return everything.images.flatten(1), everything.targets

        self.images, self.targets = in_memory(data.train_set)
        self.folder, self.losses = folder, list[Tensor]()
        if folder is not None:
            parts = [part.split(ROWS_OF_EVALUATION) for part in in_memory(data.test_set)]
            self.tests = list(zip(*parts, strict=True))
        self.network = MLP(784, hidden=(128,), out_features=10)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=RATE)
        self.live = list(self.network.parameters())
        self.weights = [value.detach().clone() for value in self.live]
        self.velocity = [torch.zeros_like(value) for value in self.weights]

    def round(self, clients: list[Tensor], clock: Clock | None = None) -> None:
        def gather(batch: Tensor) -> tuple[Tensor, Tensor]:
            return self.images[batch], self.targets[batch]

        def forward(images: Tensor, targets: Tensor) -> Tensor:
            return cross_entropy(self.network(images), targets)

        zero, step, backward = self.optimizer.zero_grad, self.optimizer.step, Tensor.backward
        evaluate, save = self.evaluate, self.save
        if clock is not None:
            evaluate, save = clock.around(VALIDATION, evaluate), clock.around(SAVE, save)
            gather, forward = clock.around("batch: read", gather), clock.around("compute: forward", forward)
            zero, step = clock.around("compute: zero_grad", zero), clock.around(STEP, step)
            backward = clock.around("compute: backward", backward)
        mean = [torch.zeros_like(value) for value in self.weights]
        for indices in clients:
            with torch.no_grad():
                torch._foreach_copy_(self.live, self.weights)
            for batch in indices[torch.randperm(len(indices))].split(BATCH):
                images, targets = gather(batch)
                zero()
                loss = forward(images, targets)
                backward(loss)
                step()
                if self.folder is not None:
                    self.losses.append(loss.detach())
            torch._foreach_add_(mean, [value.detach() for value in self.live], alpha=1 / len(clients))
        with torch.no_grad():
            for speed, value, average in zip(self.velocity, self.weights, mean, strict=True):
                speed.mul_(MOMENTUM).add_(average - value)
                value.add_(speed)
            torch._foreach_copy_(self.live, self.weights)
        if self.folder is not None:
            evaluate()
            save(self.folder / "plain.pt")
            self.losses.clear()

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        loss, right = torch.zeros(()), torch.zeros((), dtype=torch.long)
        for images, targets in self.tests:
            logits = self.network(images)
            loss += cross_entropy(logits, targets, reduction="sum")
            right += (logits.argmax(1) == targets).sum()
        return loss.item(), right.item()

    def save(self, path: Path) -> None:
        torch.save({"model": self.weights, "velocity": self.velocity}, path)


class Measure(pl.Callback):
    """Times each round and its plain counterpart; every third round is under the clock."""

    def __init__(self, loop: FederatedLoop, plain: PlainLoop) -> None:
        self.loop, self.plain = loop, plain
        self.clock, self.plain_clock = Clock(), Clock()
        self.rounds: list[dict[str, float]] = []
        self.clocked_steps = self.clocked_rounds = 0
        self.clocked_seconds = 0.0
        self._stack = ExitStack()
        self._begun = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begun = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        now = time.perf_counter()
        self._stack.close()
        assert self.loop.plan is not None
        assert self.loop.indices is not None
        indices, steps = self.loop.indices, self.loop.plan.total
        clients = [indices[client] for client in self.loop.plan.clients]
        number, on = len(self.rounds), len(self.rounds) % 3 == 0
        begin = time.perf_counter()
        self.plain.round(clients, self.plain_clock if on and number else None)
        plain = time.perf_counter() - begin
        if on and number:
            self.clocked_steps += steps
            self.clocked_rounds += 1
            self.clocked_seconds += now - self._begun
        self.rounds.append({"round": now - self._begun, "plain": plain, "steps": steps, "clocked": float(on)})
        if (number + 1) % 3 == 0:
            self._stack.enter_context(clocked(self.clock, parts_of(trainer, pl_module)))  # type: ignore[arg-type]
        self._begun = time.perf_counter()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=REPOSITORY.parent / "shared" / "data", help="folder with MNIST")
    parser.add_argument("--whole", action="store_true", help="log, evaluate and save as the recipe does")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    data = MNIST(root=str(options.data), download=False, batch_size=BATCH)
    data.setup("fit")
    loop = FederatedLoop(
        FedAvgM(momentum=MOMENTUM, lr=1.0),
        clients=CLIENTS,
        clients_per_round=0.2,
        partition=Dirichlet(0.1, capped=False),
        weighting="uniform",
        summary=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder)
        measure = Measure(loop, PlainLoop(data, own if options.whole else None))
        trainer = pl.Trainer(
            max_epochs=options.rounds + 1,
            accelerator="cpu",
            logger=CSVLogger(own) if options.whole else False,
            enable_checkpointing=options.whole,
            default_root_dir=own,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            limit_val_batches=1.0 if options.whole else 0,
            callbacks=[loop, measure],
        )
        trainer.fit(Module(logs=options.whole), datamodule=data)
    return report(measure, options)


def report(measure: Measure, options: argparse.Namespace) -> int:
    free = [each for each in measure.rounds[1:] if not each["clocked"]]
    whole = {way: statistics.median(1e6 * each[way] / each["steps"] for each in free) for way in ("round", "plain")}
    ratio = statistics.median(each["round"] / each["plain"] for each in free)
    steps = measure.clocked_steps
    ours, plain = (
        {part: 1e6 * seconds / steps for part, seconds in clock.seconds.items()}
        for clock in (measure.clock, measure.plain_clock)
    )
    clock = measure.clock
    calls = {part: number / steps for part, number in clock.calls.items()}
    # What the clock takes inside the parts is in their time already.
    of_clock = 1e6 * clock.of_a_call * sum(clock.calls.values()) / steps
    ours["elsewhere"] = 1e6 * measure.clocked_seconds / steps - sum(ours.values()) - of_clock
    rows = {part: (taken, plain.get(part, 0.0), calls.get(part, 0.0)) for part, taken in ours.items()}
    rows["all"] = (sum(ours.values()), sum(plain.values()), 0.0)
    to_round = steps / measure.clocked_rounds / 1000
    print(f"{'µs a step, under the clock':<40}{'ours':>8}{'plain':>8}{'more':>8}{'calls':>8}{'ms a round':>12}")
    for part, (taken, of_plain, often) in rows.items():
        told = f"{often:>8.2f}" if often else f"{'':>8}"
        print(f"{part:<40}{taken:>8.1f}{of_plain:>8.1f}{taken - of_plain:>8.1f}{told}{taken * to_round:>12.2f}")
    met = options.whole or ratio <= LIMIT
    limit = f" (limit {LIMIT}: {'met' if met else 'NOT met'})"
    print(f"without the clock, a round's time by its steps: {whole['round']:.1f} µs, plain {whole['plain']:.1f} µs")
    print(
        f"median ratio of {len(free)} pairs of rounds, {options.threads} threads: {ratio:.3f}"
        f"{'' if options.whole else limit}"
    )
    parts = {part: {"ours": taken, "plain": of_plain} for part, (taken, of_plain, _) in rows.items()}
    write_json(options.json, {"us_per_step": parts, "whole": whole, "ratio": ratio, "limit": LIMIT, "met": met})
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
