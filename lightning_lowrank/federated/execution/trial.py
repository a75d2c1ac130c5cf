"""Which execution a run takes: how many clients may step together, and which way is faster."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_lowrank.federated.data.loader import RoundLoader
from lightning_lowrank.federated.data.planner import Chunk
from lightning_lowrank.federated.execution.stack import ClientStack
from lightning_lowrank.federated.state import copy_into, trained_tensors

_TRIED_STEPS = 5
_SHARE_OF_MEMORY = 0.25
_GUESSED_MEMORY = 4 * 2**30
_COPIES_OF_A_CLIENT = 6


def chunk_size_that_fits(module: nn.Module, device: torch.device) -> int:
    """Return how many clients may step together by the memory that is free now."""
    each = sum(value.numel() * value.element_size() for value in module.parameters() if value.requires_grad)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_memory()
    return max(1, int(_SHARE_OF_MEMORY * free / (_COPIES_OF_A_CLIENT * max(each, 1))))


def _free_memory() -> int:
    """Return the bytes of main memory that are free, or a modest guess where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    except (OSError, StopIteration):
        return _GUESSED_MEMORY


def time_both(trainer: Any, module: pl.LightningModule, chunk: Chunk, loader: RoundLoader) -> tuple[float, float]:
    """Time a client's step alone and in a chunk; values, optimizer states and logs are as they were afterwards.

    Returns:
        Seconds of a client's step: where clients train one after another, and where they step together.

    Raises:
        MisconfigurationException: If the training step cannot be mapped over clients.
    """
    together, alone = (
        [trainer.strategy.batch_to_device(batch, dataloader_idx=0) for batch in batches]
        for batches in loader.read(chunk, 0, _TRIED_STEPS)
    )
    live = trained_tensors(module)
    kept = {name: value.detach().clone() for name, value in live.items()}
    states = [(optimizer, optimizer.state) for optimizer in trainer.optimizers]
    vars(module)["log"] = lambda *arguments, **keywords: None
    try:
        stack = ClientStack(trainer, module, live, len(chunk.clients))
        try:
            in_chunk = _seconds(trainer, module, together, lambda step: stack.narrow(chunk.active(step)))
        finally:
            stack.close()
        one_by_one = _seconds(trainer, module, alone, lambda step: None)
    finally:
        del vars(module)["log"]
        copy_into(live, kept)
        for optimizer, state in states:
            optimizer.state = state
            optimizer.zero_grad()
    clients = [chunk.active(step) for step in range(len(in_chunk))]
    return statistics.median(one_by_one), min(seconds / count for seconds, count in zip(in_chunk, clients, strict=True))


def _seconds(
    trainer: Any, module: pl.LightningModule, batches: Sequence[Any], before: Callable[[int], None]
) -> list[float]:
    times = []
    # The first batch is run twice, for whatever is set up at first use.
    for index, batch in enumerate([batches[0], *batches]):
        before(max(0, index - 1))
        begin = time.perf_counter()
        with trainer.precision_plugin.train_step_context():
            output = module.training_step(batch, 0)
        loss = cast(Tensor, output["loss"] if isinstance(output, Mapping) else output)
        (optimizer,) = trainer.optimizers
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return times[1:]
