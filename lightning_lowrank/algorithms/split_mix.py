"""Split-Mix: a wide network is split into narrow ones, and a client trains as many of those as it can afford."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_lowrank.algorithms._capacity import PartAveraging
from lightning_lowrank.configuration import check_integer
from lightning_lowrank.federated.algorithm import LocalStep
from lightning_lowrank.federated.capacities import Capacities, Capacity, refuse_kept_moments
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.protocols import OwnSteps, Personal
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server, copy_into
from lightning_lowrank.seeding import generator


class Ensemble(nn.Module):
    """Networks of one kind, each with weights of its own, whose logits are averaged.

    Trained alone, it minimizes the loss of the averaged logits; `SplitMix` trains its networks one by one.

    Args:
        base: Makes one of the networks, such as ``functools.partial(ResNet18, width=23)``; in YAML, a network's
            ``class_path`` and ``init_args``.
        bases: Number of networks.

    ``num_classes`` and ``example_input_shape``, which `Classifier` reads, are those of the first network.

    Attributes:
        bases: The networks.
        active: Index of the network that alone computes the logits; ``None``: all of them, weighted by ``members``.
        members: Weights of the networks in the average, a buffer ``[bases]``: ones, or zeros for those left out.

    Raises:
        MisconfigurationException: If ``bases`` is below 1.

    Example:
        >>> import torch
        >>> from functools import partial
        >>> from lightning_lowrank import Ensemble
        >>> from lightning_lowrank.models import MLP
        >>> network = Ensemble(partial(MLP, 4, hidden=(3,), out_features=2), bases=3)
        >>> network(torch.zeros(5, 4)).shape
        torch.Size([5, 2])
    """

    members: Tensor

    def __init__(self, base: Callable[[], nn.Module], bases: int) -> None:
        super().__init__()
        check_integer("bases", bases)
        self.bases = nn.ModuleList(base() for _ in range(bases))
        self.active: int | None = None
        self.register_buffer("members", torch.ones(bases))
        for name in ("example_input_shape", "num_classes"):
            if hasattr(self.bases[0], name):
                setattr(self, name, getattr(self.bases[0], name))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs to logits, those of the active network or the average."""
        if self.active is not None:
            return self.bases[self.active](inputs)
        logits = torch.stack([base(inputs) for base in self.bases], dim=-1)
        weights = self.members / self.members.sum()
        return logits @ weights.to(logits.dtype)


class SplitMix(PartAveraging, Personal, OwnSteps):
    """Federated learning of an ensemble of narrow networks (Hong et al., ICLR 2022, Algorithm 1).

    The module's network is an `Ensemble`. A client with a budget of b trains b of the bases in a round, drawn each time
    so that all are trained equally often, by clients of every capacity. A device predicts with as many bases as it can
    run. On every batch the client takes one step for each of its bases, on that base's own loss. (The paper trains a
    client's bases one after another over its whole data; bases share no weights, so only the order of batches differs.)

    Of the bases, only a client's own are sent, in both directions. A base becomes the mean over the clients that
    trained it, with the loop's ``weighting``, or does not change if no client did. The paper's customisable robustness
    (adversarial training, dual BatchNorm) is not included. FedHM's comparison trains the ensemble with static
    BatchNorm, which is `StaticBatchNorm`.

    Args:
        budgets: Numbers of bases that clients train. Those of FedHM's comparison (arXiv:2111.14655) by default.
        capacity: ``"fixed"``: a client always has the same budget; budgets are assigned in turns, in the order of ids.
            ``"dynamic"``: each client's budget is drawn in each round.
        shares: Relative number of clients of each budget, or its chance to be drawn; equal by default.

    Raises:
        MisconfigurationException: If an argument is out of range, or the module does not hold one `Ensemble` with at
            least as many bases as the largest budget; or if a client kept an optimizer's state, which is of other
            bases.

    Example:
        >>> from functools import partial
        >>> from lightning_lowrank import Dirichlet, Ensemble, FederatedLoop, SplitMix
        >>> from lightning_lowrank.models import Classifier, ResNet18
        >>> module = Classifier(Ensemble(partial(ResNet18, width=4), bases=3))
        >>> loop = FederatedLoop(SplitMix([3, 2, 1]), clients=20, clients_per_round=10, partition=Dirichlet(0.5))
    """

    claims = replace(PartAveraging.claims, static_batch_norm=True)

    def __init__(
        self,
        budgets: Sequence[int] = (9, 3, 2, 1),
        capacity: Capacity = "fixed",
        shares: Sequence[float] | None = None,
    ) -> None:
        self._capacities = Capacities("budgets", budgets, capacity, shares)
        for index, budget in enumerate(budgets):
            check_integer(f"budgets[{index}]", budget)
        self.budgets, self.capacity, self.shares = tuple(budgets), capacity, shares
        self._prefix = ""
        self._count = 0
        self._own: tuple[int, ...] = ()

    def setup(self, base: Base) -> None:
        ensemble = self._ensemble(base)
        self._count = len(ensemble.bases)
        if self._count < max(self.budgets):
            raise MisconfigurationException(
                f"a client of SplitMix trains {max(self.budgets)} bases, and the Ensemble has {self._count}:"
                " lower the largest of budgets, or give it more bases."
            )
        (self._prefix,) = (f"{name}." if name else "" for name, part in base.module.named_modules() if part is ensemble)
        self.configure(base, None)

    def group_key(self, client: ClientInfo) -> Hashable:
        return self._bases_of(client)

    def passes(self, client: ClientInfo) -> tuple[float, float]:
        """One forward and one backward pass for each of the client's bases."""
        bases = len(self._bases_of(client))
        return bases, bases

    def configure(self, base: Base, client: ClientInfo | None) -> None:
        """Activate all bases for the global model; for a client, one base at a time, switched by `local_update`."""
        self._own = () if client is None else self._bases_of(client)
        self._ensemble(base).active = None if client is None else self._own[0]

    def begin(self, client: ClientContext, message: Message) -> None:
        """Install the client's bases; the others are not used."""
        refuse_kept_moments(client, "a client of SplitMix trains other bases in each round")
        copy_into(client.model, message.tensors)

    def local_update(self, step: LocalStep, update: Callable[[], None]) -> None:
        ensemble = self._ensemble(step.base)
        for base in self._own:
            ensemble.active = base
            update()

    def variants(self, server: Server) -> dict[str, Mapping[str, Tensor]]:
        return {str(budget): self.variant(server, budget) for budget in self.budgets if budget < self._count}

    def personal_model(self, client: ClientContext, model: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        members = f"{self._prefix}members"
        return {**super().personal_model(client, model), members: model[members]}

    def variant(self, server: Server, level: float) -> Mapping[str, Tensor]:
        name = f"{self._prefix}members"
        members = torch.zeros_like(server.model[name])
        members[: int(level)] = 1
        return {**server.parameters(), name: members}

    @property
    def whole(self) -> float:
        """The number of bases."""
        return self._count

    def part(self, model: Mapping[str, Tensor], client: ClientInfo) -> dict[str, Tensor]:
        """A client's bases, and the tensors outside of the ensemble."""
        own = tuple(f"{self._prefix}bases.{base}." for base in self._bases_of(client))
        return {
            name: value
            for name, value in model.items()
            if name.startswith(own) or not name.startswith((f"{self._prefix}bases.", f"{self._prefix}members"))
        }

    def _bases_of(self, client: ClientInfo) -> tuple[int, ...]:
        budget = int(self._capacities.level(client))
        draws = generator(client.seed, "bases", client.round, client.id)
        return tuple(sorted(torch.randperm(self._count, generator=draws)[:budget].tolist()))

    @staticmethod
    def _ensemble(base: Base) -> Ensemble:
        found = [part for part in base.module.modules() if isinstance(part, Ensemble)]
        if len(found) != 1:
            raise MisconfigurationException(
                "SplitMix trains the bases of one lightning_lowrank.Ensemble, and the module holds"
                f" {len(found) or 'none'}: make its network an Ensemble(base=..., bases={{the largest budget}})."
            )
        return found[0]
