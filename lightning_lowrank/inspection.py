"""What a run would cost, and whether a module would work, before any data is read.

``lightning-lowrank inspect`` prints it; Python users call `inspect_run` with a module and the two callbacks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_lowrank.callbacks.lowrank import LowRank
from lightning_lowrank.federated.checks import notes
from lightning_lowrank.federated.client import Client, Server, trained_tensors
from lightning_lowrank.federated.loop import FederatedLoop
from lightning_lowrank.federated.payload import Payload


def inspect_run(
    module: pl.LightningModule, lowrank: LowRank | None = None, loop: FederatedLoop | None = None
) -> dict[str, Any]:
    """Return what a run of ``module`` would cost.

    The module is converted in place, and its optimizers make one step with zero gradients to size their state: use it
    for nothing else afterwards.

    Args:
        module: The module as the user wrote it.
        lowrank: The `LowRank` callback of the run, if any.
        loop: The `FederatedLoop` of the run, if any.

    Returns:
        ``parameters``: numbers of the ``dense`` module, of the ``model`` as it is stored after the conversion (frozen
        weights included), and ``trainable``; ``layers``: for each linear and convolutional layer name, kind, shape,
        rank (None if not converted), parameters (of the dense weight), trainable, macs (multiply-adds of one sample's
        forward pass; None where no ``example_input_array`` tells the size) and, where it was left alone, the reason;
        ``traffic``: ``up`` and ``down`` for one client and round, each with ``numbers``, of which ``parameters`` and
        ``buffers``, and ``bytes`` of the encoding; ``optimizer_state_bytes``; ``problems``: what would stop the run;
        ``notes``: what to know about the module in rounds.

    Example:
        >>> from lightning_lowrank import FedAvg, FederatedLoop, LowRank, MatrixProduct
        >>> from lightning_lowrank.models import MLP, Classifier
        >>> module = Classifier(MLP(in_features=64, hidden=[32], out_features=10))
        >>> figures = inspect_run(module, LowRank(MatrixProduct(), rank=2), FederatedLoop(FedAvg(), clients=10))
        >>> figures["parameters"]
        {'dense': 2410, 'model': 2686, 'trainable': 318}
    """
    if is_overridden("configure_model", module):
        module.configure_model()
    dense = sum(parameter.numel() for parameter in module.parameters())
    report = {} if lowrank is None else {layer.name: layer for layer in lowrank.convert(module).layers}
    macs = _multiply_adds(module)
    layers = []
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            found = report.get(name)
            layers.append(
                {
                    "name": name,
                    "kind": "Conv2d" if isinstance(layer, nn.Conv2d) else "Linear",
                    "shape": list(layer.weight.shape),
                    "rank": found.rank if found else None,
                    "parameters": layer.weight.numel(),
                    "trainable": _trainable(layer.parameters()),
                    "macs": macs.get(name),
                    "left_alone": found.reason if found and not found.converted else None,
                }
            )
    optimizers, problems = _optimizers(module)
    problems += _untrained(module, optimizers)
    try:
        traffic = _traffic(module, loop)
    except MisconfigurationException as error:
        traffic = {}
        problems.append(str(error))
    return {
        "parameters": {
            "dense": dense,
            "model": sum(parameter.numel() for parameter in module.parameters()),
            "trainable": _trainable(module.parameters()),
        },
        "layers": layers,
        "traffic": traffic,
        "optimizer_state_bytes": sum(map(_state_bytes, optimizers)),
        "problems": problems,
        "notes": [] if loop is None else notes(module, loop.buffers),
    }


def render(figures: dict[str, Any], console: Console) -> None:
    """Print `inspect_run`'s result as tables."""
    table = Table("layer", "kind", "shape", title="layers")
    for column in ("rank", "weight", "trained", "multiply-adds"):
        table.add_column(column, justify="right")
    for layer in figures["layers"]:
        table.add_row(
            layer["name"],
            layer["kind"],
            "×".join(map(str, layer["shape"])),
            "" if layer["rank"] is None else str(layer["rank"]),
            f"{layer['parameters']:,}",
            f"{layer['trainable']:,}",
            "" if layer["macs"] is None else f"{layer['macs']:,}",
        )
    console.print(table)
    for layer in figures["layers"]:
        if layer["left_alone"]:
            console.print(f"{layer['name']} is left alone: {layer['left_alone']}", highlight=False)
    numbers = figures["parameters"]
    share = numbers["trainable"] / numbers["dense"] if numbers["dense"] else 0.0
    console.print(
        f"parameters: {numbers['dense']:,} dense, {numbers['model']:,} stored, {numbers['trainable']:,} trained"
        f" ({share:.2%} of dense)"
    )
    for direction, way in figures["traffic"].items():
        console.print(
            f"{direction:>4}: {way['bytes']:,} bytes per client and round ({way['parameters']:,} parameters,"
            f" {way['buffers']:,} buffer entries)"
        )
    console.print(f"optimizer state: {figures['optimizer_state_bytes']:,} bytes")
    for problem in figures["problems"]:
        console.print(f"[bold red]would not work:[/] {problem}")
    for note in figures["notes"]:
        console.print(f"note: {note}", highlight=False)


def _trainable(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


def _multiply_adds(module: pl.LightningModule) -> dict[str, int]:
    """Count by one forward pass of the example input; linear layers that it does not reach count one position."""
    counts = {name: layer.weight.numel() for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    example = module.example_input_array
    if example is None:
        return counts
    batch = example.shape[0] if isinstance(example, Tensor) else 1
    seen: dict[str, int] = {}

    def count(name: str) -> Any:
        def hook(layer: nn.Linear | nn.Conv2d, _: Any, output: Tensor) -> None:
            per_output = layer.weight.numel() // layer.weight.shape[0]
            seen[name] = seen.get(name, 0) + output.numel() * per_output // batch

        return hook

    handles = [
        layer.register_forward_hook(count(name))
        for name, layer in module.named_modules()
        if isinstance(layer, (nn.Linear, nn.Conv2d))
    ]
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            if isinstance(example, dict):
                module(**example)
            elif isinstance(example, tuple):
                module(*example)
            else:
                module(example)
    finally:
        module.train(training)
        for handle in handles:
            handle.remove()
    return {**counts, **seen}


def _optimizers(module: pl.LightningModule) -> tuple[list[torch.optim.Optimizer], list[str]]:
    try:
        configured = module.configure_optimizers()
    except Exception as error:
        return [], [f"configure_optimizers() needs more than the module: {type(error).__name__}: {error}"]
    if configured is None:
        return [], ["configure_optimizers() gives no optimizer"]
    found: list[torch.optim.Optimizer] = []

    def walk(entry: Any) -> None:
        if isinstance(entry, torch.optim.Optimizer):
            found.append(entry)
        elif isinstance(entry, dict):
            walk(entry.get("optimizer"))
        elif isinstance(entry, (list, tuple)):
            for part in entry:
                walk(part)

    walk(configured)
    return found, []


def _untrained(module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> list[str]:
    held = {id(value) for optimizer in optimizers for group in optimizer.param_groups for value in group["params"]}
    return [
        f"{name} is trainable and in no optimizer"
        for name, value in module.named_parameters()
        if optimizers and value.requires_grad and id(value) not in held
    ]


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step(lambda: torch.zeros(()))  # type: ignore[arg-type, return-value]
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


def _traffic(module: pl.LightningModule, loop: FederatedLoop | None) -> dict[str, dict[str, int]]:
    if loop is None:
        return {}
    server = Server(module, loop.seed, loop.buffers)
    model = trained_tensors(module)
    server.state = {name: value.detach().clone() for name, value in model.items()}
    server.initial_buffers = {name: value for name, value in server.state.items() if not model[name].requires_grad}
    loop.algorithm.setup(server)
    client = Client(0, 1)
    return {
        "up": _size(loop.algorithm.end(server, client, model), server),
        "down": _size(loop.algorithm.broadcast(server, client), server),
    }


def _size(payload: Payload, server: Server) -> dict[str, int]:
    buffers = sum(value.numel() for name, value in payload.tensors.items() if name in server.initial_buffers)
    return {
        "numbers": payload.numbers,
        "parameters": payload.numbers - buffers,
        "buffers": buffers,
        "bytes": payload.nbytes,
    }
