"""`inspect_run`: a run's layers, bytes and problems, before any data is read.

``lightning-lowrank inspect`` prints it; Python users call `inspect_run` with a module and the two callbacks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from lightning_lowrank.arguments import printable
from lightning_lowrank.buffers import persistent_buffers
from lightning_lowrank.callbacks.lowrank import LowRank
from lightning_lowrank.compression import Packet
from lightning_lowrank.federated.checks import in_no_optimizer, notes
from lightning_lowrank.federated.client_states import ClientStates
from lightning_lowrank.federated.coordinator import Coordinator
from lightning_lowrank.federated.data.planner import RoundPlan
from lightning_lowrank.federated.exchange import Parts
from lightning_lowrank.federated.ledger import Ledger
from lightning_lowrank.federated.loop import FederatedLoop
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.protocols import UnequalClients
from lightning_lowrank.federated.state import trained_tensors
from lightning_lowrank.layers import LowRankLayer
from lightning_lowrank.layers.survey import RECURRENT, weight_shape
from lightning_lowrank.multiply_adds import COUNTED, multiply_adds
from lightning_lowrank.units import percent


def inspect_run(
    module: pl.LightningModule, lowrank: LowRank | None = None, loop: FederatedLoop | None = None
) -> dict[str, Any]:
    """A run's layers, bytes of the first round, and problems, as plain Python.

    The module is converted in place, and its optimizers make one step with zero gradients to size their state. Do not
    use the module for anything else afterwards.

    Args:
        module: The module as the user wrote it.
        lowrank: The `LowRank` callback of the run, if any.
        loop: The `FederatedLoop` of the run, if any.

    Returns:
        A dictionary that JSON can hold:

        - ``parameters``: numbers of the ``dense`` module, of the ``model`` as it is stored after the conversion (frozen
          weights included), and ``trainable``.
        - ``layers``: for each linear layer, convolution, embedding, and weight of an attention or recurrent layer
          ``name``, ``kind``, ``shape``, ``rank`` (None if not converted), ``parameters`` (of the dense weight),
          ``trainable`` (of the layer, without the bias), ``macs`` and ``left_alone`` (why `LowRank` did not convert it,
          or None). MACs are the multiply-adds of one sample's forward pass through the layer, as a low-rank layer
          computes it without gradients. Composing its weight, once a batch, is not included. They are counted on the
          module's ``example_input_array``. Without one, a linear layer counts a single position, and other layers have
          None. A layer that the example does not reach has None.
        - ``traffic``: ``up`` and ``down`` for client 0 in the first round. Each has ``numbers``, the sum of
          ``parameters`` and ``buffers``, and ``bytes`` of the encoding. A client of smaller size or rank has less.
          Later rounds may have more or less: a seed, changes of frozen weights that the server announces, other
          factors in turn. Empty without ``loop``.
        - ``optimizer_state_bytes``: bytes of the optimizers' state for the trained parameters; None if
          ``configure_optimizers`` cannot run without a trainer.
        - ``problems``: what would stop the run or leave something untrained.
        - ``notes``: what to know about the module in rounds, and what could not be checked.

    Raises:
        MisconfigurationException: If ``lowrank`` cannot convert the module, as with a budget below its floor, or if
            ``configure_model`` cannot run without a trainer.

    Example:
        >>> from lightning_lowrank import FedAvg, FederatedLoop, LowRank, MatrixProduct
        >>> from lightning_lowrank.models import MLP, Classifier
        >>> module = Classifier(MLP(in_features=64, hidden=[32], out_features=10))
        >>> figures = inspect_run(module, LowRank(MatrixProduct(), rank=2), FederatedLoop(FedAvg(), clients=10))
        >>> figures["parameters"]
        {'dense': 2410, 'model': 2686, 'trainable': 318}
    """
    make_layers(module)
    dense = sum(parameter.numel() for parameter in module.parameters())
    report = {} if lowrank is None else {layer.name: layer for layer in lowrank.convert(module).layers}
    problems: list[str] = []
    remarks = [] if loop is None else notes(module, loop.buffers)
    macs = _multiply_adds(module, problems)
    layers = []
    for name, layer in module.named_modules():
        if isinstance(layer, COUNTED):
            found, shape = report.get(name), weight_shape(layer) or (0,)
            layers.append(
                {
                    "name": name,
                    "kind": found.kind if found else type(layer).__name__,
                    "shape": list(shape),
                    "rank": layer.rank if isinstance(layer, LowRankLayer) else None,
                    "parameters": math.prod(shape),
                    "trainable": _trainable(value for part, value in layer.named_parameters() if part != "bias"),
                    "macs": macs.get(name),
                    "left_alone": found.reason if found and not found.converted else None,
                }
            )
        elif isinstance(layer, (*RECURRENT, nn.MultiheadAttention)):
            for part, weight in layer.named_parameters(prefix=name, recurse=False):
                # The biases of keys and values have three dimensions.
                if weight.ndim == 2:
                    part = part if isinstance(layer, RECURRENT) else part.removesuffix("_weight")
                    layers.append(
                        {
                            "name": part,
                            "kind": type(layer).__name__,
                            "shape": list(weight.shape),
                            "rank": None,
                            "parameters": weight.numel(),
                            "trainable": _trainable([weight]),
                            "macs": None,
                            "left_alone": report[part].reason if part in report else None,
                        }
                    )
    optimizers = _optimizers(module, problems, remarks)
    forgotten = in_no_optimizer(module, optimizers) if optimizers else []
    problems += [f"{name} is trainable and in no optimizer" for name in forgotten]
    try:
        traffic = {} if loop is None else _traffic(module, loop, optimizers or [])
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
        "optimizer_state_bytes": None if optimizers is None else sum(map(_state_bytes, optimizers)),
        "problems": problems,
        "notes": remarks,
    }


def make_layers(module: pl.LightningModule) -> None:
    """Call the module's ``configure_model``, if it has one, without a trainer.

    Raises:
        MisconfigurationException: If that fails.
    """
    if not is_overridden("configure_model", module):
        return
    try:
        module.configure_model()
    except Exception as error:
        name, problem = type(module).__name__, f"{type(error).__name__}: {error}".rstrip(".")
        raise MisconfigurationException(
            f"configure_model() of {name} does not run without a trainer and its data: {problem}."
            f" Let {name} make its layers from arguments of __init__(), such as num_classes, which a recipe can give."
        ) from error


def render(figures: dict[str, Any], console: Console) -> None:
    """Print `inspect_run`'s result as tables."""

    def line(text: str, style: str | None = None) -> None:
        console.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("layer", overflow="fold")
    for column in ("kind", "shape"):
        table.add_column(column, no_wrap=True)
    for column in ("rank", "weight", "trained", "MACs"):
        table.add_column(column, justify="right", no_wrap=True)
    for layer in figures["layers"]:
        table.add_row(
            Text(printable(layer["name"])),
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
            line(f"{layer['name']} stays dense: {layer['left_alone']}")
    numbers = figures["parameters"]
    share = numbers["trainable"] / numbers["dense"] if numbers["dense"] else 0.0
    line(
        f"parameters: {numbers['dense']:,} dense, {numbers['model']:,} stored, {numbers['trainable']:,} trained"
        f" ({percent(share)} of dense)"
    )
    for direction, way in figures["traffic"].items():
        line(
            f"{direction:>4}: {way['bytes']:,} bytes for client 0 in the first round ({way['parameters']:,} parameters,"
            f" {way['buffers']:,} buffer entries)"
        )
    if figures["optimizer_state_bytes"] is not None:
        line(f"optimizer state: {figures['optimizer_state_bytes']:,} bytes")
    for problem in figures["problems"]:
        line(f"would not work: {problem}", style="bold red")
    for note in figures["notes"]:
        line(f"note: {note}")


def _trainable(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


@torch.no_grad()
def _multiply_adds(module: pl.LightningModule, problems: list[str]) -> dict[str, int]:
    example = module.example_input_array
    if example is None:
        return {
            name: layer.multiply_adds(torch.empty(1, layer.in_features, device="meta"))
            if isinstance(layer, LowRankLayer)
            else math.prod(weight_shape(layer) or (0,))
            for name, layer in module.named_modules()
            if isinstance(layer, nn.Linear)
        }
    samples = _batch_size(example)
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with multiply_adds(module) as counts:
            if isinstance(example, dict):
                module(**example)
            elif isinstance(example, tuple):
                module(*example)
            else:
                module(example)
    except Exception as error:
        problems.append(f"the forward pass of example_input_array fails: {type(error).__name__}: {error}")
        return {}
    finally:
        for part, mode in training.items():
            part.training = mode
    return {name: made // samples for name, made in counts.items()}


def _batch_size(example: Any) -> int:
    """The batch size of an example input: the length of its first tensor."""
    if isinstance(example, Tensor):
        return len(example) if example.ndim else 1
    parts = example.values() if isinstance(example, dict) else example if isinstance(example, (list, tuple)) else ()
    return next((_batch_size(part) for part in parts if isinstance(part, (Tensor, dict, list, tuple))), 1)


def _optimizers(
    module: pl.LightningModule, problems: list[str], remarks: list[str]
) -> list[torch.optim.Optimizer] | None:
    try:
        configured = module.configure_optimizers()
    except Exception as error:
        remarks.append(
            "configure_optimizers() does not run without a trainer and its data, so the optimizers were not looked at:"
            f" {type(error).__name__}: {error}"
        )
        return None
    if configured is None:
        problems.append("configure_optimizers() gives no optimizer")
        return []
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
    return found


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


def _traffic(
    module: pl.LightningModule, loop: FederatedLoop, optimizers: list[torch.optim.Optimizer]
) -> dict[str, dict[str, int]]:
    """Numbers and bytes that client 0 sends and receives in the first round, without a local step."""
    buffered = persistent_buffers(module).keys()
    traffic = {}
    for direction, packet in _first_packets(module, loop, optimizers).items():
        elements = sum(value.numel() for value in packet.tensors.values())
        buffers = sum(value.numel() for name, value in packet.tensors.items() if name in buffered)
        traffic[direction] = {
            "numbers": elements,
            "parameters": elements - buffers,
            "buffers": buffers,
            "bytes": packet.nbytes,
        }
    return traffic


def _first_packets(
    module: pl.LightningModule, loop: FederatedLoop, optimizers: list[torch.optim.Optimizer]
) -> dict[str, Packet]:
    """What client 0 sends (``"up"``) and receives (``"down"``) in the first round if it makes no step.

    The method changes the module: use it for nothing else afterwards.
    """
    server = loop.make_server(module, optimizers, loop.clients or 1)
    coordinator = Coordinator(Parts(loop, server, [1] * server.clients, ClientStates(), Ledger(0)))
    coordinator.setup()
    live = trained_tensors(module)
    coordinator.begin_round(RoundPlan(0, (0,), (1,), (), ()), live, idle=0)
    info, client = coordinator.info(0), coordinator.context(0, live, steps=1)
    UnequalClients.of(loop.algorithm).configure(server.base, info)
    down = coordinator.broadcasts.packet(info)
    loop.algorithm.begin(client, Message(down.received))
    up = coordinator.wire.up(client, loop.algorithm.end(client), down.received)
    UnequalClients.of(loop.algorithm).configure(server.base, None)
    return {"up": up, "down": down}
