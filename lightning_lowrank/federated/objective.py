"""Client objectives that extend or replace the module's own loss.

A method changes the objective by `Algorithm.loss`. An `Objective` does so with any method:
``FederatedLoop(objective=...)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.func import functional_call

from lightning_lowrank.arguments import Configured
from lightning_lowrank.configuration import check_choice
from lightning_lowrank.federated.algorithm import LocalStep
from lightning_lowrank.federated.state import ClientContext
from lightning_lowrank.internals.torch import places_of


class Objective(Configured, ABC):
    """Changes the objective of clients' batches, in combination with any method."""

    changes_result: ClassVar[bool] = True
    """Whether `loss` returns something else than ``training_step`` does. A module that optimizes manually ignores that,
    so that the fit is refused. It is false if `loss` acts only while ``training_step`` runs, as by a hook."""

    def begin(self, client: ClientContext) -> None:
        """Prepare `loss` by entries in ``client.round_state``. Called after the method's own `begin`."""

    @abstractmethod
    def loss(self, step: LocalStep, batch: Any, training_step: Callable[[], Any]) -> Any:
        """The objective of a batch; see `Algorithm.loss`."""


class MaskAbsentClasses(Objective):
    r"""Masked cross-entropy: leave classes without a sample at the client out of the client's loss.

    While a client trains, the logits of these classes are replaced, and no gradient flows through them. Validation sees
    all classes. FedHM (arXiv:2111.14655, Section 4.1) and HeteroFL (arXiv:2010.01264, Section 3) train so.

    Args:
        layer: Name of the submodule whose output, ``[batch, classes, …]``, holds the logits. Default ``"network"``.
        classes: Number of classes. ``None``: the ``num_classes`` of that submodule or of the module.
        masking: ``"exclude"`` (default): the logits become :math:`-\infty`, and the probability of these classes 0, as
            the papers say. ``"zero"``: they become 0, so that each of them adds 1 to the sum that the softmax divides
            by, as the code released with both papers has it.

    Raises:
        MisconfigurationException: If ``masking`` is neither. When a client begins, if there is no such submodule, the
            number of classes is not known, the training data has no labels, the client has others than from 0 to
            ``classes`` - 1, or the module has a ``label_smoothing``. In a step, if the submodule's output is no tensor.

    Example:
        >>> from lightning_lowrank import FedAvg, FederatedLoop, LabelCount, MaskAbsentClasses
        >>> loop = FederatedLoop(FedAvg(), clients=20, partition=LabelCount(2), objective=MaskAbsentClasses())
    """

    changes_result = False
    _KEY = "objective.present"

    def __init__(
        self, layer: str = "network", classes: int | None = None, masking: Literal["exclude", "zero"] = "exclude"
    ) -> None:
        check_choice("masking", masking, Literal["exclude", "zero"])
        self.layer = layer
        self.classes = classes
        self.masking = masking

    def begin(self, client: ClientContext) -> None:
        """Store a mask of the classes that the client's samples have."""
        module = client.base.module
        owners = (part_of(module, self.layer), module)
        classes = self.classes or next((each.num_classes for each in owners if hasattr(each, "num_classes")), None)
        if not isinstance(classes, int):
            raise MisconfigurationException(
                f"MaskAbsentClasses needs the number of classes, and neither {self.layer!r} nor the module has"
                " num_classes: give classes=10 or the like."
            )
        labels = client.labels
        if labels is None:
            raise MisconfigurationException("MaskAbsentClasses needs labels, and the training data has none.")
        smoothing = getattr(module, "label_smoothing", 0)
        if smoothing:
            raise MisconfigurationException(
                f"label_smoothing={smoothing} spreads over all classes, and MaskAbsentClasses leaves some out: use one"
                " of them."
            )
        present = present_classes(
            labels,
            classes,
            f"MaskAbsentClasses needs integer labels from 0 to {classes - 1}, for classes={classes}, and client"
            f" {client.id} has others",
            "Give the number of classes that the labels have, or count labels from 0.",
        )
        client.round_state[self._KEY] = present.to(client.base.device)

    def loss(self, step: LocalStep, batch: Any, training_step: Callable[[], Any]) -> Any:
        """Run the training step with masked logits."""
        present, module = step.round_state[self._KEY], step.base.module
        absent = float("-inf") if self.masking == "exclude" else 0.0

        def mask(layer: nn.Module, inputs: Any, output: Any) -> Tensor:
            logits = tensor_of(output, module, self.layer, f"MaskAbsentClasses(layer={self.layer!r})")
            shape = (1, len(present), *(1,) * (logits.ndim - 2))
            return logits.masked_fill(~present.view(shape), absent)

        handle = part_of(module, self.layer).register_forward_hook(mask)
        try:
            return training_step()
        finally:
            handle.remove()


def part_of(module: nn.Module, name: str) -> nn.Module:
    """The submodule of a given name.

    Raises:
        MisconfigurationException: If there is none.
    """
    try:
        return module.get_submodule(name)
    except AttributeError as error:
        raise MisconfigurationException(
            f"the module has no submodule {name!r}; it has {[each for each, _ in module.named_children()]}."
        ) from error


def tensor_of(output: Any, module: nn.Module, name: str, owner: str) -> Tensor:
    """The output of a submodule, which must be a tensor.

    Args:
        output: What the submodule returned.
        module: The module.
        name: Name of the submodule.
        owner: For the message: the method or objective with the argument that names the submodule.

    Raises:
        MisconfigurationException: If the output is something else, such as the ``ModelOutput`` of transformers.
    """
    if isinstance(output, Tensor):
        return output
    inside = [f"{name}.{each}" if name else each for each, _ in part_of(module, name).named_children()]
    raise MisconfigurationException(
        f"{owner} needs a layer whose output is a tensor, and that of {name!r} is of type {type(output).__name__}: name"
        f" another layer{f', such as one of {inside}' if inside else ''}."
    )


@dataclass
class Call:
    """One recorded call of a submodule: arguments and output."""

    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Any


def present_classes(labels: Tensor, classes: int, needed: str, advice: str) -> Tensor:
    """Which classes occur in a client's labels: a boolean tensor of shape ``[classes]``.

    Args:
        labels: The labels of the client's samples.
        classes: Number of classes.
        needed: For the message: the requirement, and the owner of other labels.
        advice: For the message, what would work.

    Raises:
        MisconfigurationException: If a label is no integer from 0 to ``classes`` - 1.
    """
    found = labels.unique()
    others = found if found.is_floating_point() else found[(found < 0) | (found >= classes)]
    if len(others):
        raise MisconfigurationException(f"{needed}: {others[:5].tolist()}. {advice}")
    return torch.zeros(classes, dtype=torch.bool).index_fill_(0, found, True)


@contextmanager
def recorded(module: nn.Module, name: str) -> Iterator[list[Call]]:
    """Record the calls of a submodule, for losses that need its features or logits."""
    calls: list[Call] = []
    handle = part_of(module, name).register_forward_hook(
        lambda layer, inputs, keywords, output: calls.append(Call(inputs, keywords, output)), with_kwargs=True
    )
    try:
        yield calls
    finally:
        handle.remove()


@torch.no_grad()
def with_weights(module: nn.Module, name: str, model: Mapping[str, Tensor], call: Call) -> Any:
    """The output of a submodule with other weights, for the arguments of a recorded call; without gradients.

    Args:
        module: The module.
        name: Name of the submodule.
        model: Values of the module's parameters and buffers by name; those that it does not name stay.
        call: The submodule's recorded call, whose arguments are used.
    """
    part = part_of(module, name)
    buffers = dict(module.named_buffers())
    # A tensor that submodules share has the name of its first place, which may be outside of this submodule.
    places = places_of(part, {tensor: key for key, tensor in (*buffers.items(), *module.named_parameters())})
    values = {**buffers, **model}
    # Copies, because a layer in training mode writes to its buffers.
    copies = {key: values[key].clone() for key in {*places.values()} & values.keys()}
    own = {place: copies[key] for place, key in places.items() if key in copies}
    return functional_call(part, own, call.inputs, call.keywords, tie_weights=False)


def loss_of(output: Any) -> Tensor:
    """The loss in the output of a training step."""
    return output["loss"] if isinstance(output, Mapping) else output


def add_to_loss(output: Any, term: Tensor) -> Any:
    """The output of a training step, with ``term`` added to its loss; ``None``, which has no loss, stays."""
    if output is None:
        return None
    if isinstance(output, Mapping):
        return {**output, "loss": output["loss"] + term}
    return output + term
