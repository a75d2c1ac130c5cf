"""Attackers in a simulation: clients that send forged messages or train on poisoned data.

``FederatedLoop(attackers=...)`` takes an `Attack`, which says which clients attack, and how. The server does not know
which clients attack; a robust aggregator should withstand them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_lowrank.aggregation.aggregator import float64_device
from lightning_lowrank.arguments import Configured
from lightning_lowrank.configuration import check_integer, check_number
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.protocols import OwnCodec
from lightning_lowrank.federated.stages import Arrival, RoundStage, Way
from lightning_lowrank.federated.state import ClientInfo, Server, difference
from lightning_lowrank.seeding import derive_seed, generator

__all__ = [
    "ALIE",
    "Attack",
    "GaussianNoise",
    "InnerProduct",
    "LabelFlip",
    "LabelPoison",
    "Scaled",
    "SignFlip",
]

_LABEL_NAMES = ("label", "labels", "target")


@dataclass(frozen=True)
class Attempt:
    """The information from which an attacker forges one tensor of its message.

    Args:
        original: The change that it would have sent, had it been honest; float64.
        honest: The changes of the cohort's honest clients, ``[clients, …]``, float64. If there are none, the
            attackers' own.
        attackers: Number of attackers in the cohort.
        arrivals: Number of clients in the cohort that answer.
        share: The attackers' share of the weights of all that answer.
        draws: Generator of the attacker's draws, with a seed for each round, client and tensor.
    """

    original: Tensor
    honest: Tensor
    attackers: int
    arrivals: int
    share: float
    draws: torch.Generator


class Attack(Configured, ABC):
    r"""Base of attacks, in which some clients of a simulation send forged messages.

    Attackers train as the others do, and then know their own change and those of all honest clients of the cohort. They
    replace every floating-point tensor of their message, buffers included, by the result of `forge`, which works on
    changes: the value minus the value from which the client started (`OwnCodec.upload_origin`). Messages are replaced
    on the server after decoding, so that codecs do not restrict an attacker. Forged messages have the expected names,
    shapes and types, and finite numbers.

    Args:
        clients: Who attacks: a number of clients or, as a float in (0, 1], a share of all that have samples, which are
            drawn from the experiment's seed; or a list of ids.

    Raises:
        MisconfigurationException: If an argument is out of range; when a fit begins, if there are not as many clients;
            in a round, if an attacker's change is not known, as with ``FedLoRA(LoRAA2(), upload_ranks=4)``.
    """

    poisons_labels = False
    """Whether attackers train on other labels; see `poisoned`."""

    def __init__(self, clients: int | float | list[int] = 0.2) -> None:
        given: Any = clients.tolist() if hasattr(clients, "tolist") else clients
        if isinstance(given, Integral) and not isinstance(given, bool):
            check_integer("clients", given := int(given))
        elif isinstance(given, Real) and not isinstance(given, bool):
            check_number("clients", given := float(given), above=0, most=1, hint="an integer for a count")
        else:
            ids = list(given) if isinstance(given, Iterable) and not isinstance(given, (str, bytes, Mapping)) else []
            if not ids or len({*ids}) < len(ids) or not all(isinstance(each, Integral) for each in ids):
                raise MisconfigurationException(
                    f"clients must be a number or share of clients, or a list of different ids, got {clients!r}."
                )
            given = [int(each) for each in ids]
        self.clients = given

    def members(self, sizes: Sequence[int], seed: int) -> tuple[int, ...]:
        """The attackers' ids, ascending. ``sizes`` are clients' numbers of samples; clients without any are not drawn.

        Raises:
            MisconfigurationException: If there are not as many clients, or no such ids.
        """
        given, clients = self.clients, len(sizes)
        if isinstance(given, list):
            unknown = sorted(each for each in given if not 0 <= each < clients)
            if unknown:
                raise MisconfigurationException(
                    f"attackers: {type(self).__name__} names {unknown}, but client ids are 0 to {clients - 1}."
                )
            return tuple(sorted(given))
        trained = [client for client, size in enumerate(sizes) if size]
        count = max(1, round(given * len(trained))) if isinstance(given, float) else given
        if count > len(trained):
            raise MisconfigurationException(
                f"attackers: {count} attackers are more than the {len(trained)} clients that have samples."
            )
        drawn = torch.randperm(len(trained), generator=generator(seed, "attackers"))
        return tuple(sorted(trained[place] for place in drawn[:count].tolist()))

    @abstractmethod
    def forge(self, attempt: Attempt) -> Tensor:
        """The forged change that an attacker sends in place of ``attempt.original``, of the same shape."""

    def poisoned(self, labels: Tensor, classes: int) -> Tensor:
        """The labels on which attackers train in place of the true ``labels``; integers from 0 to ``classes - 1``."""
        return labels

    def number_of_classes(self, labels: Tensor | None) -> int:
        """The number of classes, given all labels of the training set; ``labels`` is ``None`` if the data has none."""
        raise NotImplementedError

    @torch.no_grad()
    def forge_all(
        self,
        arrivals: Sequence[Arrival],
        members: Sequence[int],
        origins: Mapping[int, Mapping[str, Tensor]],
        seed: int,
    ) -> list[Arrival]:
        """A round's arrivals with the attackers' messages replaced by forged ones.

        Args:
            arrivals: The messages that the round's clients would send.
            members: Ids of the attackers.
            origins: For each client that answers, the reference values of its change, by name.
            seed: Seed of the round's draws.
        """
        attackers = [arrival for arrival in arrivals if arrival.client.id in members]
        honest = [arrival for arrival in arrivals if arrival.client.id not in members]
        total = sum(arrival.weight for arrival in arrivals)
        share = sum(arrival.weight for arrival in attackers) / total if total else 0.0

        def change(arrival: Arrival, name: str) -> Tensor:
            value = arrival.message.tensors[name]
            value = value.to(float64_device(value.device)).double()
            origin = origins[arrival.client.id].get(name)
            return value if origin is None or origin.shape != value.shape else difference(value, origin.to(value))

        def forged(arrival: Arrival) -> Arrival:
            tensors = dict(arrival.message.tensors)
            for name, value in tensors.items():
                if not value.is_floating_point() or not value.numel():
                    continue
                own = change(arrival, name)
                # Clients with smaller models may lack this tensor, or have it in another shape.
                seen = [change(each, name) for each in honest if _has(each, name, value)]
                others = seen or [change(each, name) for each in attackers if _has(each, name, value)]
                attempt = Attempt(
                    own,
                    torch.stack(others),
                    len(attackers),
                    len(arrivals),
                    share,
                    generator(seed, arrival.client.id, name),
                )
                sent = self.forge(attempt)
                if sent is own:
                    continue
                began = origins[arrival.client.id].get(name)
                if began is not None and began.shape != value.shape:
                    shapes = f"{tuple(value.shape)}, and the server's has {tuple(began.shape)}"
                    raise MisconfigurationException(
                        f"attackers: {type(self).__name__} forges changes, and client {arrival.client.id} sends"
                        f" {name!r}, whose change is not known: it has the shape {shapes}. Use LabelFlip(), or a method"
                        " that sends whole tensors."
                    )
                wide = value.to(own)
                # An infinite number, as in a mask, stays: a change would make it finite.
                finite = (own.isfinite() & wide.isfinite()).to(value.device)
                tensors[name] = torch.where(finite, _typed(wide - own + sent, value), value)
            return replace(arrival, message=Message(tensors, arrival.message.codec))

        return [forged(arrival) if arrival.client.id in members else arrival for arrival in arrivals]


def _has(arrival: Arrival, name: str, like: Tensor) -> bool:
    value = arrival.message.tensors.get(name)
    return value is not None and value.shape == like.shape


def _typed(value: Tensor, like: Tensor) -> Tensor:
    """A value in the type and on the device of ``like``, clamped to the range of that type."""
    limits = torch.finfo(like.dtype)
    return value.nan_to_num(0.0, limits.max, limits.min).clamp(limits.min, limits.max).to(like.dtype).to(like.device)


class SignFlip(Attack):
    r"""Send the change with the opposite sign, :math:`-\sigma x_i` (Li et al., RSA, AAAI 2019, arXiv:1811.03761).

    Args:
        clients: Who attacks, see `Attack`.
        scale: :math:`\sigma`, above 0. The paper's 4 by default, with which 20 % of attackers cancel the mean.

    Raises:
        MisconfigurationException: If an argument is out of range.

    Example:
        >>> from lightning_lowrank import FedAvg, FederatedLoop, GeometricMedian, SignFlip
        >>> loop = FederatedLoop(FedAvg(), clients=20, aggregator=GeometricMedian(), attackers=SignFlip(0.2))
    """

    def __init__(self, clients: int | float | list[int] = 0.2, scale: float = 4.0) -> None:
        check_number("scale", scale, above=0)
        self.scale = scale
        super().__init__(clients)

    @override
    def forge(self, attempt: Attempt) -> Tensor:
        return -self.scale * attempt.original


class GaussianNoise(Attack):
    r"""Send noise: each number of the change is drawn from :math:`N(0, \sigma^2)` (Blanchard et al., NeurIPS 2017).

    Args:
        clients: Who attacks, see `Attack`.
        std: :math:`\sigma`, above 0. Default 1; the paper's, of gradients, is 200.

    Raises:
        MisconfigurationException: If an argument is out of range.
    """

    def __init__(self, clients: int | float | list[int] = 0.2, std: float = 1.0) -> None:
        check_number("std", std, above=0)
        self.std = std
        super().__init__(clients)

    @override
    def forge(self, attempt: Attempt) -> Tensor:
        noise = torch.randn(attempt.original.shape, generator=attempt.draws, dtype=torch.float64)
        return self.std * noise.to(attempt.original.device)


class InnerProduct(Attack):
    r"""Inner-product manipulation: send :math:`-\epsilon` times the honest clients' mean (Xie et al., UAI 2019).

    All attackers send the same change (arXiv:1903.03936, Section 4). With a small :math:`\epsilon` it resembles the
    honest changes; with one above (honest / attackers) it reverses the mean of all.

    Args:
        clients: Who attacks, see `Attack`.
        scale: :math:`\epsilon`, above 0. Default 10.

    Raises:
        MisconfigurationException: If an argument is out of range.
    """

    def __init__(self, clients: int | float | list[int] = 0.2, scale: float = 10.0) -> None:
        check_number("scale", scale, above=0)
        self.scale = scale
        super().__init__(clients)

    @override
    def forge(self, attempt: Attempt) -> Tensor:
        return -self.scale * attempt.honest.mean(dim=0)


class ALIE(Attack):
    r"""A little is enough: send the honest mean minus :math:`z` standard deviations (Baruch et al., NeurIPS 2019).

    :math:`\mu_k - z \sigma_k` for each number, the same from all attackers (arXiv:1902.06156, Algorithm 3). The change
    lies within the spread of the honest ones. The standard deviation is that of the honest clients' population.

    Args:
        clients: Who attacks, see `Attack`.
        deviations: :math:`z`, above 0. ``None``: the paper's, at which as many honest clients are farther from the
            mean as the attackers need for a majority:
            :math:`z = \Phi^{-1}\left(\frac{n - m - s}{n - m}\right)`, :math:`s = \lfloor n/2 + 1 \rfloor - m` for
            :math:`m` attackers of :math:`n`, and at least 0. It is small if there are few attackers.

    Raises:
        MisconfigurationException: If an argument is out of range.
    """

    def __init__(self, clients: int | float | list[int] = 0.2, deviations: float | None = None) -> None:
        if deviations is not None:
            check_number("deviations", deviations, above=0)
        self.deviations = deviations
        super().__init__(clients)

    @override
    def forge(self, attempt: Attempt) -> Tensor:
        honest = attempt.honest
        z = hidden_deviations(attempt.arrivals, attempt.attackers) if self.deviations is None else self.deviations
        return honest.mean(dim=0) - z * honest.std(dim=0, correction=0)


def hidden_deviations(arrivals: int, attackers: int) -> float:
    """The largest deviation, in standard deviations, that leaves enough honest clients farther from the mean.

    Example:
        >>> round(hidden_deviations(50, 24), 3), hidden_deviations(10, 1)
        (1.426, 0.0)
    """
    honest = arrivals - attackers
    supporters = arrivals // 2 + 1 - attackers
    share = (honest - supporters) / max(honest, 1)
    # Attackers that have a majority, or are alone, need no supporters: use the deviation at which one honest client is
    # farther.
    share = min(share, (honest - 0.5) / max(honest, 1))
    return max(0.0, NormalDist().inv_cdf(share)) if share > 0 else 0.0


class LabelFlip(Attack):
    r"""Train on flipped labels, :math:`y \to C - 1 - y`, and send the resulting change (Fang et al., USENIX 2020).

    It needs integer labels in batches: the second part of a tuple or list, or ``label``, ``labels`` or ``target`` of a
    dictionary. Validation, tests and clients' own evaluations keep the true labels.

    Args:
        clients: Who attacks, see `Attack`.
        classes: Number of classes :math:`C`. ``None``: the largest label of the training set plus 1.

    Raises:
        MisconfigurationException: If an argument is out of range; when a fit begins, if the number of classes is not
            known; in a round, if batches have no such labels, or one is out of range.
    """

    poisons_labels = True

    def __init__(self, clients: int | float | list[int] = 0.2, classes: int | None = None) -> None:
        if classes is not None:
            check_integer("classes", classes, least=2)
        self.classes = classes
        super().__init__(clients)

    @override
    def forge(self, attempt: Attempt) -> Tensor:
        return attempt.original

    @override
    def poisoned(self, labels: Tensor, classes: int) -> Tensor:
        return classes - 1 - labels

    @override
    def number_of_classes(self, labels: Tensor | None) -> int:
        if self.classes is None and labels is None:
            raise MisconfigurationException(
                f"{type(self).__name__} needs the number of classes, and no labels are found in the training set: give"
                " classes=10 or the like."
            )
        return self.classes or int(labels.max()) + 1  # type: ignore[union-attr]


class Scaled(LabelFlip):
    r"""Model replacement: train on flipped labels and scale the change up (Bagdasaryan et al., AISTATS 2020).

    :math:`\gamma (L - G)` for the model :math:`L` that it has trained from the global model :math:`G`
    (arXiv:1807.00459, Eq. 3), so that the mean of all becomes :math:`L`.

    Args:
        clients: Who attacks, see `Attack`.
        scale: :math:`\gamma`, above 0. ``None``: the weights of all clients that answer over those of the attackers.
        classes: As for `LabelFlip`.

    Raises:
        MisconfigurationException: As for `LabelFlip`.
    """

    def __init__(
        self, clients: int | float | list[int] = 0.2, scale: float | None = None, classes: int | None = None
    ) -> None:
        if scale is not None:
            check_number("scale", scale, above=0)
        self.scale = scale
        super().__init__(clients, classes)

    @override
    def forge(self, attempt: Attempt) -> Tensor:
        return (self.scale or 1 / attempt.share) * attempt.original


class LabelPoison:
    """Replaces the labels of attackers' samples when batches are read.

    Args:
        attack: Returns the new labels.
        samples: Indices of the attackers' samples.
        size: Number of samples of the training set.
        classes: Number of classes.
    """

    def __init__(self, attack: Attack, samples: Tensor, size: int, classes: int) -> None:
        self._attack = attack
        self._classes = classes
        self._poisoned = np.zeros(size, dtype=bool)
        self._poisoned[samples.numpy()] = True

    def __call__(self, batch: Any, indices: np.ndarray) -> Any:
        """A batch with the labels of attackers' samples replaced; ``indices`` are the batch's samples."""
        rows = torch.from_numpy(self._poisoned[indices])
        if not rows.any():
            return batch
        key = _label_key(batch)
        labels = None if key is None else batch[key]
        if not isinstance(labels, Tensor) or labels.is_floating_point() or not labels.ndim or len(labels) != len(rows):
            raise MisconfigurationException(
                f"{type(self._attack).__name__} replaces integer labels, and finds none in a batch: it should be a"
                f" tuple (inputs, labels, ...) or a dictionary with one of {', '.join(_LABEL_NAMES)}."
            )
        changed = labels.clone()
        changed[rows.to(labels.device)] = self.labels(labels[rows.to(labels.device)])
        if isinstance(batch, Mapping):
            return {**batch, key: changed}
        parts = [changed if place == key else part for place, part in enumerate(batch)]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)

    def labels(self, labels: Tensor) -> Tensor:
        """The poisoned labels of attackers' samples.

        Raises:
            MisconfigurationException: If one is out of range.
        """
        outside = labels[(labels < 0) | (labels >= self._classes)]
        if len(outside):
            raise MisconfigurationException(
                f"{type(self._attack).__name__} flips labels from 0 to {self._classes - 1}, and one is"
                f" {outside.flatten()[0].item()}: set classes= to the number of classes."
            )
        return self._attack.poisoned(labels, self._classes)


def _label_key(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return next((name for name in _LABEL_NAMES if name in batch), None)
    return 1 if isinstance(batch, (list, tuple)) and len(batch) > 1 else None


class Attackers(RoundStage):
    """Delays all messages of a round until its end, then forges the attackers' messages from those of all clients.

    Args:
        attack: Who attacks, and how.
        samples: Number of training samples of each client.
        seed: Seed of the experiment.
    """

    key: ClassVar[str] = "attackers"

    def __init__(self, attack: Attack, samples: Sequence[int], seed: int) -> None:
        self._attack, self._seed = attack, seed
        self.members = frozenset(attack.members(samples, seed))
        """Ids of the clients that attack."""
        self._arrivals: list[Arrival] = []
        self._round = 0

    @override
    def setup(self, way: Way) -> None:
        self._way = way

    @override
    def begin_round(self, server: Server) -> None:
        self._round = server.round

    @override
    def arrived(self, arrival: Arrival) -> None:
        self._arrivals.append(arrival.copy())

    @override
    def release(self) -> list[Arrival]:
        arrivals, self._arrivals = sorted(self._arrivals, key=lambda arrival: arrival.client.id), []
        if not arrivals:
            return []
        origins = {arrival.client.id: self._origin_of(arrival) for arrival in arrivals}
        seed = derive_seed(self._seed, "attack", self._round)
        return self._attack.forge_all(arrivals, sorted(self.members), origins, seed)

    def _origin_of(self, arrival: Arrival) -> Mapping[str, Tensor]:
        origin = arrival.find_origin(arrival.client)
        if not OwnCodec.of(self._way.algorithm).encodes_values:
            return origin
        # Coordinates that the method's codec did not send are zero in the message; count them as unchanged.
        tensors = arrival.message.tensors
        return {
            name: torch.where(tensors[name] == 0, 0, value)
            for name, value in origin.items()
            if name in tensors and tensors[name].shape == value.shape
        }

    @override
    def checkpoint(self) -> Callable[[], None]:
        arrivals = list(self._arrivals)

        def undo() -> None:
            self._arrivals = arrivals

        return undo

    @override
    def state_dict(self) -> dict[str, Any]:
        arrivals = [
            {"client": vars(each.client), "tensors": dict(each.message.tensors), "weight": each.weight}
            for each in self._arrivals
        ]
        return {"arrivals": arrivals, "round": self._round}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._round = state["round"]
        self._arrivals = [
            Arrival(ClientInfo(**each["client"]), Message(each["tensors"]), each["weight"], self._way.origin_of)
            for each in state["arrivals"]
        ]
