"""HeteroFL: clients of different capacity train networks of different width, cut from one global network.

The channels that a client lacks are zeros in the live module, which computes the narrower network's output, as long as
only the sliced layers mix channels.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_lowrank.algorithms._capacity import PartAveraging, copy_blocks_into, leading
from lightning_lowrank.arguments import join_names
from lightning_lowrank.configuration import check_choice, check_number
from lightning_lowrank.federated.algorithm import LocalStep, detached
from lightning_lowrank.federated.capacities import Capacities, Capacity, refuse_kept_moments
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.objective import present_classes
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server
from lightning_lowrank.internals.torch import BATCH_NORMS, INSTANCE_NORMS, own_parameters
from lightning_lowrank.layers.factorization.base import ceil

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS: tuple[type[nn.Module], ...] = (*BATCH_NORMS, *INSTANCE_NORMS)
_ACROSS_CHANNELS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d)
_PRESENT = "heterofl.held"
_Extent = tuple[int, int] | None
"""Number of channels of a sliced dimension, and of numbers for each channel; ``None`` for other dimensions."""


class HeteroFL(PartAveraging):
    r"""Federated learning of networks of heterogeneous width (Diao et al., ICLR 2021, Algorithm 1).

    A client of rate p has the first ⌈p·c⌉ of the c channels of every hidden layer. All hidden dimensions of
    convolutions and linear layers are sliced, with the BatchNorm and InstanceNorm layers on them; the input of the
    first layer and the output of the last are not ("first" and "last" as in ``LowRank(skip=...)``: in registration
    order). The linear layer after a convolution may read its flattened output. During training a *scaler* divides the
    output of every convolution and linear layer but the last by the rate (Section 3), so that activations are as large
    as those of the whole network.

    Only the slices are sent, in both directions. A number of the global network becomes the mean over the clients that
    trained it, with the loop's ``weighting`` (the paper's is ``"uniform"``), or keeps its value if no client did. The
    global network has the width of the largest rate, so a single rate, ``HeteroFL([0.5], scaler=False)``, is federated
    averaging of a narrower network. (`ResNet18` and `ResNet34` also have a ``width``.)

    The paper's static BatchNorm is `StaticBatchNorm`, its masked cross-entropy `MaskAbsentClasses`, whose
    ``masking="zero"`` is that of the released code. That code also averages a row of the last layer over the clients
    alone that hold its label, which ``last_layer="holders"`` does.

    Channels must keep their order: a network that concatenates, splits or shuffles them is sliced wrongly. This is
    refused if the layers' sizes show it.

    Args:
        rates: Shares of the channels, in (0, 1]. The paper's by default; FedHM's comparison (arXiv:2111.14655) has
            others.
        capacity: ``"fixed"``: a client always has the same rate; rates are assigned in turns, in the order of ids.
            ``"dynamic"``: each client's rate is drawn in each round.
        shares: Relative number of clients of each rate, or its chance to be drawn; equal by default.
        scaler: Whether outputs are divided by the rate in training.
        last_layer: How the last layer's rows, one for each class, are averaged. ``"mean"`` (default): like all others.
            ``"holders"``: over those clients that have samples of the class, as the released code does. Clients then
            send which labels they hold, a byte for each class.

    Raises:
        MisconfigurationException: If an argument is out of range, or the module has layers that cannot be sliced:
            low-rank ones, normalisation across channels, embeddings, attention, grouped convolutions that are not
            depthwise, frozen ones; or, in the dynamic setting, if a client kept an optimizer's state, which is of other
            channels.

    Example:
        >>> from lightning_lowrank import Dirichlet, FederatedLoop, HeteroFL
        >>> loop = FederatedLoop(
        ...     HeteroFL([1.0, 0.5, 0.25]), clients=20, clients_per_round=10, partition=Dirichlet(0.5),
        ...     weighting="uniform",
        ... )
    """

    claims = replace(PartAveraging.claims, static_batch_norm=True)

    def __init__(
        self,
        rates: Sequence[float] = (1.0, 0.5, 0.25, 0.125, 0.0625),
        capacity: Capacity = "fixed",
        shares: Sequence[float] | None = None,
        scaler: bool = True,
        last_layer: Literal["mean", "holders"] = "mean",
    ) -> None:
        self._capacities = Capacities("rates", rates, capacity, shares)
        for index, rate in enumerate(rates):
            check_number(f"rates[{index}]", rate, above=0, most=1)
        self.rates, self.capacity, self.shares = tuple(rates), capacity, shares
        check_choice("last_layer", last_layer, Literal["mean", "holders"])
        self.scaler = scaler
        self.last_layer = last_layer
        self.claims = replace(self.claims, needs_labels=last_layer == "holders")
        self._extents: dict[str, tuple[_Extent, ...]] = {}
        self._scaled: list[nn.Module] = []
        self._last: dict[str, int] = {}
        self._hooks: list[RemovableHandle] = []
        self._rate = 1.0

    def setup(self, base: Base) -> None:
        """Find the sliced dimensions, and zero the channels beyond the largest rate, which no client trains."""
        self._extents, products = _survey(base.module)
        self._scaled = products[:-1]
        last = {id(value) for value in products[-1].parameters()}
        self._last = {name: len(value) for name, value in base.module.named_parameters() if id(value) in last}
        parameters: dict[str, Tensor] = dict(base.module.named_parameters())
        copy_blocks_into(parameters, detached(self._slice(parameters, max(self.rates))))

    def group_key(self, client: ClientInfo) -> Hashable:
        """Clients of one rate step together: their outputs are divided by the same number."""
        return self._capacities.level(client)

    def configure(self, base: Base, client: ClientInfo | None) -> None:
        """Register the scalers of the client's rate; the global network has none."""
        while self._hooks:
            self._hooks.pop().remove()
        self._rate = 1.0 if client is None else self._capacities.level(client)
        if client is not None and self.scaler and self._rate < 1:
            scale = partial(_scale_output, self._rate)
            self._hooks = [layer.register_forward_hook(scale) for layer in self._scaled]

    @property
    def whole(self) -> float:
        """The largest rate; channels beyond it are zero."""
        return max(self.rates)

    def part(self, model: Mapping[str, Tensor], client: ClientInfo) -> dict[str, Tensor]:
        return self._slice(model, self._capacities.level(client))

    def begin(self, client: ClientContext, message: Message) -> None:
        if self._capacities.capacity == "dynamic":
            refuse_kept_moments(client, "with capacity='dynamic' a client trains other channels in each round")
        copy_blocks_into(client.model, message.tensors)

    def before_step(self, step: LocalStep) -> None:
        """Zero the gradients of channels that the client does not have."""
        if self._rate == 1:
            return
        for name, parameter in step.parameters.items():
            if parameter.grad is None:
                continue
            whole = parameter.shape[1:] if step.stacked else parameter.shape
            for dimension, size in enumerate(self._shape(name, whole, self._rate), start=-len(whole)):
                parameter.grad.narrow(dimension, size, whole[dimension] - size).zero_()

    def end(self, client: ClientContext) -> Message:
        message = super().end(client)
        if self._capacities.capacity == "dynamic" and client.base.buffer_policy == "local":
            # Channels that the client does not have are zero, which moved their statistics.
            for name, earlier in client.state.get("buffers", client.base.initial_buffers).items():
                trained = client.model[name].clone()
                block = leading(self._shape(name, trained.shape, self._capacities.level(client)))
                client.model[name].copy_(earlier)
                client.model[name][block] = trained[block]
        if self.last_layer == "mean":
            return message
        rows = next(iter(self._last.values()))
        labels = client.labels
        if labels is None:
            # The server calls this only to find the message's names and shapes, and has no labels.
            present = torch.ones(rows, dtype=torch.bool)
        else:
            needed = f"last_layer='holders' needs labels from 0 to {rows - 1}, the last layer's rows, and client"
            present = present_classes(labels, rows, f"{needed} {client.id} has others", "Use last_layer='mean'.")
        return Message({**message.tensors, _PRESENT: present.to(client.base.device)})

    def receive(self, server: Server, client: ClientInfo, message: Message, weight: float) -> None:
        tensors = dict(message.tensors)
        present = tensors.pop(_PRESENT, None)
        self._add(server, tensors, weight, None if present is None else dict.fromkeys(self._last, present))

    def variants(self, server: Server) -> dict[str, Mapping[str, Tensor]]:
        """For each rate below the largest, the network of this rate, cut from the global one.

        These networks have no BatchNorm statistics of their own: `StaticBatchNorm` computes them, and without it those
        of the global network are used.
        """
        return {f"{rate:g}": self.variant(server, rate) for rate in self.rates if rate < max(self.rates)}

    def variant(self, server: Server, level: float) -> Mapping[str, Tensor]:
        parameters = server.parameters()
        cut = {name: torch.zeros_like(value) for name, value in parameters.items()}
        copy_blocks_into(cut, self._slice(parameters, level))
        return cut

    def _slice(self, model: Mapping[str, Tensor], rate: float) -> dict[str, Tensor]:
        return {name: value[leading(self._shape(name, value.shape, rate))] for name, value in model.items()}

    def _shape(self, name: str, whole: Sequence[int], rate: float) -> tuple[int, ...]:
        """The shape of a tensor's slice at a rate; ``whole`` is the shape of the tensor."""
        extents = self._extents.get(name, (None,) * len(whole))
        return tuple(
            size if extent is None else ceil(rate * extent[0]) * extent[1]
            for size, extent in zip(whole, extents, strict=True)
        )


def _scale_output(rate: float, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
    return output / rate if layer.training else None


def _survey(module: nn.Module) -> tuple[dict[str, tuple[_Extent, ...]], list[nn.Module]]:
    """The sliced dimensions of the module's tensors by name, and its convolutions and linear layers."""
    layers = [(name, layer) for name, layer in module.named_modules() if _own_tensors(layer)]
    for name, layer in layers:
        _check_layer(name, layer)
    products = [layer for _, layer in layers if not isinstance(layer, _NORMS)]
    if len(products) < 2:
        raise MisconfigurationException(
            "HeteroFL slices the channels between a first and a last convolution or linear layer, but the module has"
            f" {len(products)} such layers."
        )
    first, last = products[0], products[-1]
    extents: dict[str, tuple[_Extent, ...]] = {}
    hidden: dict[int, None] = {}
    previous: nn.Module | None = None
    for name, layer in layers:
        if isinstance(layer, _NORMS):
            channels = cast(int, layer.num_features)
            sliced = (channels, 1) if previous is not None and previous is not last else None
            if sliced is not None and channels not in hidden:
                _refuse(name, layer, f"normalises {channels} channels, which no layer before it puts out")
            for tensor, value in (*layer.named_parameters(), *layer.named_buffers()):
                extents[_join(name, tensor)] = (sliced,) * value.ndim
            continue
        weight = layer.get_parameter("weight")
        output = None if layer is last else (weight.shape[0], 1)
        inputs = None if layer is first else _inputs(name, layer, previous, hidden)
        extents[_join(name, "weight")] = (output, inputs, *(None,) * (weight.ndim - 2))
        extents[_join(name, "bias")] = (output,)
        if layer is not last:
            hidden[weight.shape[0]] = None
        previous = layer
    return extents, products


def _inputs(name: str, layer: nn.Module, previous: nn.Module | None, hidden: Mapping[int, None]) -> _Extent:
    """The channels of a layer's input and the entries for each; ``None`` if the input is not sliced."""
    if getattr(layer, "groups", 1) > 1:
        if layer.groups != layer.in_channels:
            _refuse(name, layer, f"has groups={layer.groups}: a slice of the channels is not a slice of the groups")
        return None
    size = layer.get_parameter("weight").shape[1]
    assert previous is not None
    channels = previous.get_parameter("weight").shape[0]
    if isinstance(layer, nn.Linear) and isinstance(previous, _CONVOLUTIONS) and size % channels == 0:
        return channels, size // channels
    if size not in hidden:
        _refuse(name, layer, f"reads {size} channels, which no layer before it puts out")
    return size, 1


def _check_layer(name: str, layer: nn.Module) -> None:
    if isinstance(layer, _ACROSS_CHANNELS):
        _refuse(name, layer, "normalises across channels, where channels that a client lacks would count as zeros")
    sliceable = type(layer) in (nn.Linear, *_CONVOLUTIONS) or isinstance(layer, _NORMS)
    if not sliceable or not {"weight", "bias"} >= own_parameters(layer).keys():
        own = join_names([key for key, value in own_parameters(layer).items() if value is not None])
        _refuse(
            name,
            layer,
            "is none of the layers that can be sliced (convolutions, linear layers, BatchNorm, InstanceNorm), and holds"
            f" {own}",
        )
    if not all(parameter.requires_grad for parameter in layer.parameters(recurse=False)):
        _refuse(name, layer, "is frozen, so that every client has all of it")


def _refuse(name: str, layer: nn.Module, reason: str) -> None:
    part = repr(name) if name else "the module itself"
    raise MisconfigurationException(f"HeteroFL cannot slice this module: {part} ({type(layer).__name__}) {reason}.")


def _own_tensors(layer: nn.Module) -> bool:
    found = any(value is not None for value in own_parameters(layer).values())
    return found or isinstance(layer, (*_NORMS, *_ACROSS_CHANNELS))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
