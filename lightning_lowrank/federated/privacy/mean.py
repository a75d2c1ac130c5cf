"""Private mean of clients' updates: clipping, noise on the sum, and accounting.

`ClientPrivacy` has the settings. The mean is a stage of the server's half of rounds, and at a site that adds its own
noise a stage of the client's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_lowrank.aggregation.aggregator import float64_device, working_dtype
from lightning_lowrank.arguments import join_names
from lightning_lowrank.federated.algorithm import Algorithm, detached
from lightning_lowrank.federated.checks import check_factors_move, refuse_batch_norm
from lightning_lowrank.federated.failures import NotFiniteError, first_non_finite
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.privacy.accounting import Mechanism, noise_for
from lightning_lowrank.federated.privacy.clients import ClientPrivacy
from lightning_lowrank.federated.privacy.noise import gaussian
from lightning_lowrank.federated.protocols import ChangesBase, needs_only_mean, reference
from lightning_lowrank.federated.settings import FederatedSettings
from lightning_lowrank.federated.stages import Arrival, RoundStage, Way
from lightning_lowrank.federated.state import (
    ClientContext,
    ClientInfo,
    Server,
    changed_integers,
    difference,
    trained_tensors,
)

_BEGAN = "privacy.began"


@dataclass(frozen=True)
class Drawing:
    """The numbers of clients that a run's rounds draw.

    Args:
        clients_per_round: Number of clients in a round, on average or exactly.
        least: Number of clients in the smallest cohort.
        population: Number of clients that can be drawn.
        rounds: Number of rounds of the run; ``None`` if it has no end.
    """

    clients_per_round: int
    least: int
    population: int
    rounds: int | None


class PrivateMean(RoundStage):
    """A stage that replaces a round's messages by their private mean, and accounts for its cost.

    Args:
        privacy: The settings.
        algorithm: The method.
        seed: Seed of the experiment.
        drawing: How many clients rounds draw.
        shares: With ``noise_at="clients"``, how many clients' noise makes up that of a round.

    Raises:
        MisconfigurationException: If noise cannot be found for the budget.
    """

    key: ClassVar[str] = "privacy"

    def __init__(self, privacy: ClientPrivacy, algorithm: Algorithm, seed: int, drawing: Drawing, shares: int) -> None:
        self.privacy = privacy
        self._algorithm = algorithm
        self._seed = seed
        self._shares = shares
        self.released = 0
        """Number of rounds whose mean has been released."""
        self.clip = float(privacy.clip)
        self.share_noise: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda drawn: drawn
        """Returns the noise that all processes add, given that which this one drew; called if ``secure``."""
        noise = privacy.noise_multiplier
        self._mechanism = Mechanism(noise or 1.0, drawing.clients_per_round, drawing.population, privacy.sampling)
        if noise is None:
            assert privacy.target_epsilon is not None
            if drawing.rounds is None:
                raise MisconfigurationException(
                    "target_epsilon alone determines the noise from the number of rounds, which max_epochs=-1 does not"
                    " bound: set max_epochs, or give noise_multiplier too."
                )
            runs = [(self._mechanism, max(1, drawing.rounds))]
            noise = noise_for(privacy.target_epsilon, privacy.delta, runs, privacy.accountant)
            self._mechanism = dataclasses.replace(self._mechanism, noise_multiplier=noise)
        self._check_counts()
        self._forget()

    def _forget(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._unclipped = 0.0
        self._unchanged: dict[str, Tensor] = {}

    def _check_counts(self) -> None:
        if self.privacy.quantile is not None and 2 * self._count_noise <= self.noise_multiplier:
            raise MisconfigurationException(
                f"count_noise={self._count_noise:g} leaves nothing of noise_multiplier={self.noise_multiplier:.3g} to"
                f" the updates: it must be more than {self.noise_multiplier / 2:.3g}."
            )

    @property
    def sampled(self) -> int:
        """The number of clients that a round's sum is divided by."""
        return self._mechanism.sampled

    @property
    def noise_multiplier(self) -> float:
        """A round's total noise over the clipping norm; covers the updates and the count of unclipped ones."""
        return self._mechanism.noise_multiplier

    @property
    def _count_noise(self) -> float:
        given = self.privacy.count_noise
        return max(self._mechanism.sampled / 20, 1.5 * self.noise_multiplier) if given is None else given

    @property
    def noise_of_updates(self) -> float:
        """The updates' part of the noise over the clipping norm (Andrew et al., 2021, Theorem 1)."""
        if self.privacy.quantile is None:
            return self.noise_multiplier
        return (self.noise_multiplier**-2 - (2 * self._count_noise) ** -2) ** -0.5

    def epsilon(self, more: int = 0) -> float:
        """The ε of all rounds so far, plus that of ``more`` rounds."""
        privacy = self.privacy
        return self._mechanism.epsilon(self.released + more, privacy.delta, privacy.accountant)

    @property
    def exhausted(self) -> str:
        """The reason why no further round is possible; empty if one is."""
        target = self.privacy.target_epsilon
        if target is None or self.epsilon(1) <= target:
            return ""
        return (
            f"{self.released} rounds have cost ε = {self.epsilon():.4g} at δ = {self.privacy.delta:g}, and one more"
            f" would cost {self.epsilon(1):.4g}, above target_epsilon={target:g}"
        )

    @override
    def figures(self) -> dict[str, float]:
        return {"privacy/epsilon": self.epsilon(), "privacy/clip": self.clip}

    # Round

    @override
    def setup(self, way: Way) -> None:
        self._way = way

    @override
    def begin_round(self, server: Server) -> None:
        if self.exhausted:
            raise MisconfigurationException(f"{self.exhausted}: raise it, or end the run here.")
        if self.released:
            return
        module, algorithm = server.base.module, self._algorithm
        trained = server.base.parameters(trained_tensors(module))
        check_factors_move(
            module, trained.keys() - ChangesBase.of(algorithm).fixed_in_round(server.round), "ClientPrivacy"
        )
        if self.noise_at_clients:
            check_carries_noise(self._way.form_of(self._way.any_client), type(algorithm).__name__)

    @property
    def noise_at_clients(self) -> bool:
        """Whether each client clips its update and adds its share of the noise."""
        return self.privacy.noise_at == "clients"

    @override
    def began(self, client: ClientContext) -> None:
        if self.noise_at_clients:
            client.round_state[_BEGAN] = detached(client.model)

    @override
    def up(self, client: ClientContext, message: Message) -> Message:
        if not self.noise_at_clients:
            return message
        algorithm = self._algorithm
        center = reference(algorithm, client.base, client, client.round_state.pop(_BEGAN))
        _check_integers(message.tensors, center)
        protected = Message(self.protected(message.tensors, center, client.round, client.id), message.codec)
        check_carries_noise(protected, type(algorithm).__name__)
        return protected

    @override
    def arrived(self, arrival: Arrival) -> None:
        self.add(arrival.message.tensors, arrival.find_origin(arrival.client))

    @override
    def release(self) -> list[Arrival]:
        server = self._way.server
        info = ClientInfo(-1, 0, server.round, server.seed)
        with torch.no_grad():
            center = self._way.exact_origin_of(info)
            mean = Message(self.noised_mean(self._way.form_of(info).tensors, center, server.round))
        # The method expects messages of all sampled clients: pass one copy of the mean for each.
        return [Arrival(info, mean, 1.0, self._way.origin_of)] * self.sampled

    # Updates of clients

    @torch.no_grad()
    def protected(
        self, message: Mapping[str, Tensor], center: Mapping[str, Tensor], round_number: int, client: int
    ) -> dict[str, Tensor]:
        """For ``noise_at="clients"``: a client's message after clipping, with the client's share of the noise."""
        update, _ = self._clipped(message, center)
        std = self.noise_multiplier * self.clip / math.sqrt(self._shares)
        noise = gaussian(update, std, self._seed, "privacy noise", round_number, client, secure=self.privacy.secure)
        private = _plus(update, noise)
        changed = {name: _wide(center[name]) + value if name in center else value for name, value in private.items()}
        return {name: changed[name].to(value.dtype) if name in changed else value for name, value in message.items()}

    @torch.no_grad()
    def add(self, message: Mapping[str, Tensor], center: Mapping[str, Tensor]) -> None:
        """Add a client's update: its message minus ``center``.

        Raises:
            MisconfigurationException: If it holds changed integers, which no norm bounds.
        """
        _check_integers(message, center)
        if self.privacy.noise_at == "server":
            update, inside = self._clipped(message, center)
            # The count is centred at ±1/2, so that adding a client moves it by 1/2 and replacing one by 1.
            self._unclipped += 0.5 if inside else -0.5
        else:
            update = _update(message, center)
        if self._sums and self._sums.keys() != update.keys():
            raise KeyError(f"clients send different tensors: {sorted(self._sums.keys() ^ update.keys())}")
        self._sums = _plus(self._sums, update) if self._sums else update

    @override
    def checkpoint(self) -> Callable[[], None]:
        sums, unclipped = self._sums, self._unclipped

        def undo() -> None:
            self._sums, self._unclipped = sums, unclipped

        return undo

    def _clipped(self, message: Mapping[str, Tensor], center: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
        update = _update(message, center)
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(value) for value in update.values()]))
        if not norm.isfinite():
            raise NotFiniteError(
                f"ClientPrivacy bounds a client's update by its norm, and that of {first_non_finite(update)!r} is not"
                " finite: if it is a buffer, keep it with its client (buffers='local')"
            )
        scale = (self.clip / norm.clamp(min=1e-300)).clamp(max=1.0)
        return {name: value * scale for name, value in update.items()}, bool(norm <= self.clip)

    # End of a round

    @torch.no_grad()
    def noised_mean(
        self, form: Mapping[str, Tensor], center: Mapping[str, Tensor], round_number: int
    ) -> dict[str, Tensor]:
        """The round's private mean in the form of a client's message; clears the arrivals.

        Args:
            form: A client's message, of which only shapes and types matter.
            center: What changes are added to, by name.
            round_number: Number of the round.
        """
        privacy, sampled = self.privacy, self._mechanism.sampled
        floating = {name: value for name, value in form.items() if value.is_floating_point()}
        sums = self._sums or {name: torch.zeros_like(_wide(value)) for name, value in floating.items()}
        if privacy.noise_at == "server":
            std = self.noise_of_updates * self.clip
            sums = _plus(sums, self._noise_like(sums, std, "privacy noise", round_number))
        found = {}
        for name, value in form.items():
            if name not in sums:
                found[name] = center[name]
                continue
            total = sums[name] / sampled + (_wide(center[name]) if name in center else 0)
            found[name] = total.to(working_dtype(value.dtype)).to(value.device)
        self._follow_quantile(round_number)
        self.released += 1
        self._forget()
        return found

    def _noise_like(self, like: Mapping[str, Tensor], std: float, purpose: str, round_number: int) -> dict[str, Tensor]:
        secure = self.privacy.secure
        noise = gaussian(like, std, self._seed, purpose, round_number, secure=secure)
        return self.share_noise(noise) if secure else noise

    def _follow_quantile(self, round_number: int) -> None:
        privacy = self.privacy
        if privacy.quantile is None:
            return
        zero = {"count": torch.zeros((), dtype=torch.float64)}
        noise = self._noise_like(zero, self._count_noise, "privacy count", round_number)["count"].item()
        share = (self._unclipped + noise) / self._mechanism.sampled + 0.5
        self.clip *= math.exp(-privacy.clip_lr * (share - privacy.quantile))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "released": self.released,
            "clip": self.clip,
            "noise_multiplier": self.noise_multiplier,
            "drawn": [self._mechanism.sampled, self._mechanism.population],
            "sampling": self._mechanism.sampling,
            "secret": self.privacy.secret,
            "sums": dict(self._sums),
            "unclipped": self._unclipped,
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`, with the noise multiplier of the run's first rounds.

        Raises:
            MisconfigurationException: If later rounds would have another noise, chance or sampling than those that are
                counted.
        """
        given, noise = self.privacy.noise_multiplier, state["noise_multiplier"]
        drawn, sampling = [self._mechanism.sampled, self._mechanism.population], self._mechanism.sampling
        if given not in (None, noise) or drawn != state["drawn"] or sampling != state["sampling"]:
            raise MisconfigurationException(
                f"the rounds so far drew {state['drawn'][0]} of {state['drawn'][1]} clients with"
                f" sampling={state['sampling']!r} and noise_multiplier={noise:g}, and later ones would draw {drawn[0]}"
                f" of {drawn[1]} with {sampling!r} and {given or noise:g}: ε counts equal rounds, so continue with the"
                " same values."
            )
        self.released, self.clip = state["released"], state["clip"]
        if self.privacy.secure and state["secret"] is not None:
            self.privacy.secret = state["secret"]
        self._mechanism = dataclasses.replace(self._mechanism, noise_multiplier=state["noise_multiplier"])
        self._sums, self._unclipped = dict(state["sums"]), state["unclipped"]


def check_carries_noise(message: Message, sender: str) -> None:
    """Refuse a message whose codec or types would lose part of a client's noise.

    The server's sum has all of the noise if it is that of exact messages, or a part of its numbers alone. If
    each message is rounded or cut by itself, no bound on the noise of the sum is known.

    Args:
        message: A client's message.
        sender: The method's name.

    Raises:
        MisconfigurationException: If its codec or its tensors' types drop or round numbers.
    """
    needs = "noise_at='clients' needs the sum of clients' messages to have all of their noise, and"
    if message.codec is not None and not message.codec.additive:
        raise MisconfigurationException(
            f"{needs} {sender} encodes each message with {type(message.codec).__name__}, which drops or rounds a part"
            " of it: use noise_at='server', or another method, such as FedAvg()."
        )
    narrow = [name for name, value in message.tensors.items() if value.is_floating_point() and value.itemsize < 4]
    if narrow:
        raise MisconfigurationException(
            f"{needs} {sender} sends {join_names(narrow)} in 16 bits or fewer, which round a part of it away: train in"
            " 32 bits, as precision='bf16-mixed' does, or use noise_at='server'."
        )


def _wide(value: Tensor) -> Tensor:
    return value.detach().to(float64_device(value.device)).double()


def _check_integers(message: Mapping[str, Tensor], center: Mapping[str, Tensor]) -> None:
    """Raise if a message holds changed integers, which no norm bounds."""
    changed = changed_integers(message, center)
    if changed:
        kind = str(message[changed[0]].dtype).removeprefix("torch.")
        raise MisconfigurationException(
            f"ClientPrivacy bounds a client's update by its norm, and clients send {changed[0]!r} of {kind}, which"
            " training changes: leave the buffer out, keep it with its client (buffers='local'), or use a method"
            " that sends floating-point numbers alone."
        )


def _update(message: Mapping[str, Tensor], center: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: difference(_wide(value), _wide(center[name])) if name in center else _wide(value)
        for name, value in message.items()
        if value.is_floating_point()
    }


def _plus(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value + second[name] for name, value in first.items()}


def private_mean(settings: FederatedSettings, server: Server, drawing: Drawing) -> PrivateMean:
    """Make the stage for ``settings.privacy``.

    Args:
        settings: The experiment's settings.
        server: The server.
        drawing: How many clients rounds draw.

    Raises:
        MisconfigurationException: If the method needs more than the mean, or exact numbers; for BatchNorm.
    """
    privacy, algorithm = settings.privacy, settings.algorithm
    assert privacy is not None
    name = type(algorithm).__name__
    if not needs_only_mean(algorithm):
        operator = getattr(algorithm, "operator", None)
        raise MisconfigurationException(
            f"ClientPrivacy gives the server only the mean of the clients' messages, but {name}"
            f"{'' if operator is None else f'({operator!r})'} needs each client's own message: use a method that"
            " averages, such as FedAvg(), or FedLoRA() with ProductSum(), FFA() or RoLoRA()."
        )
    if algorithm.claims.exact:
        raise MisconfigurationException(
            f"ClientPrivacy adds noise to all numbers that clients send, and {name} sends"
            f" {', '.join(sorted(algorithm.claims.exact))}, which must be exact: use another method, such as FedAvg()"
            " or SCAFFOLD()."
        )
    if settings.buffers != "local":
        refuse_batch_norm(server.base.module, "ClientPrivacy", "keep them with clients (buffers='local'), or ")
    shares = settings.noise_shares
    mean = PrivateMean(privacy, algorithm, server.seed, drawing, shares)
    if mean.noise_at_clients and shares < 2:
        rank_zero_warn(
            "noise_at='clients' with min_clients=1 has every client add a whole round's noise: set min_clients to"
            " the number of clients that always answer."
        )
    return mean
