"""FedNTD: clients distil the global model's logits of the classes other than each sample's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.configuration import check_number
from lightning_lowrank.federated.algorithm import Claims, LocalStep, detached
from lightning_lowrank.federated.data.columns import describe
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.objective import add_to_loss, part_of, recorded, tensor_of, with_weights
from lightning_lowrank.federated.protocols import OwnSteps
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo


class FedNTD(OwnSteps):
    r"""Federated not-true distillation (Lee et al., NeurIPS 2022, Eqs. 3 to 5, Algorithm 1).

    The loss is :math:`\ell + \beta\,\mathrm{KL}(\tilde q_\mathrm{received} \,\|\, \tilde q_\mathrm{client})`, averaged
    over the batch, where :math:`\tilde q` is the softmax at temperature :math:`\tau` over the classes other than each
    sample's own, of the received and of the client's model. No gradient flows through the received model. The messages
    are those of `FedAvg`. The authors' release multiplies the divergence by :math:`\tau^2`; at the paper's
    :math:`\tau = 1` that is the same.

    Args:
        logits: Name of the submodule whose output, ``[batch, classes]``, is the logits, called once in
            ``training_step``. Default ``"network"``.
        beta: Weight :math:`\beta` of the distillation, 0 or more. Default 1, the paper's.
        temperature: :math:`\tau`, above 0. Default 1, the paper's.
        targets: Where a batch has its classes: the index or key. Default 1.

    Raises:
        MisconfigurationException: If an argument is out of range, or the module has no such submodule. In a step: if
            the submodule is not called once, its output is no tensor, or the batch has no classes at ``targets``.

    Example:
        >>> from lightning_lowrank import FederatedLoop, FedNTD, LabelCount
        >>> loop = FederatedLoop(FedNTD(), clients=20, partition=LabelCount(2))
    """

    claims = Claims(trained_set_may_change=True)

    def __init__(
        self, logits: str = "network", beta: float = 1.0, temperature: float = 1.0, targets: int | str = 1
    ) -> None:
        check_number("beta", beta, least=0)
        check_number("temperature", temperature, above=0)
        self.logits, self.beta, self.temperature, self.targets = logits, beta, temperature, targets

    def setup(self, base: Base) -> None:
        part_of(base.module, self.logits)

    def begin(self, client: ClientContext, message: Message) -> None:
        super().begin(client, message)
        client.round_state["received"] = detached(client.model)

    def passes(self, client: ClientInfo) -> tuple[float, float]:
        """Two forward passes and one backward: the received model computes each batch as the teacher."""
        return 2, 1

    def loss(self, step: LocalStep, batch: Any, training_step: Callable[[], Any]) -> Any:
        with recorded(step.base.module, self.logits) as calls:
            output = training_step()
        if output is None:
            return None
        if len(calls) != 1:
            raise MisconfigurationException(
                f"FedNTD(logits={self.logits!r}) needs training_step to call {self.logits!r} once, and it called it"
                f" {len(calls)} times; name another submodule."
            )
        (call,) = calls
        logits = tensor_of(call.output, step.base.module, self.logits, f"FedNTD(logits={self.logits!r})")
        teacher = with_weights(step.base.module, self.logits, step.round_state["received"], call)
        targets = self._targets_of(batch, len(logits))
        own, known = (self._not_true(each, targets) for each in (logits, teacher))
        return add_to_loss(output, self.beta * F.kl_div(own, known, reduction="batchmean", log_target=True))

    def _targets_of(self, batch: Any, size: int) -> Tensor:
        """The class of each sample of a batch, ``[size]``."""
        try:
            targets = batch[self.targets]
        except (LookupError, TypeError, ValueError):
            targets = None
        if isinstance(targets, Tensor) and targets.shape == (size,):
            return targets
        places = (
            batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, Sequence) else ()
        )
        close = [
            f"targets={place!r}"
            for place, value in places
            if isinstance(value, Tensor) and value.shape == (size,) and not value.is_floating_point()
        ]
        raise MisconfigurationException(
            f"FedNTD(targets={self.targets!r}) needs the class of each sample there, a tensor of shape [{size}], and"
            f" batches are {describe(batch)}: give the index or key of the classes"
            f"{', ' if close else ''}{' or '.join(close)}."
        )

    def _not_true(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Log-probabilities of the classes other than each sample's own, ``[batch, classes - 1]``."""
        others = torch.arange(logits.shape[1] - 1, device=logits.device)
        # Indices from the sample's own class on are shifted by one, which leaves out this class.
        others = others + (others >= targets.unsqueeze(1)).long()
        return F.log_softmax(logits.gather(1, others) / self.temperature, dim=1)
