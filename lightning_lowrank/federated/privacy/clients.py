"""Differential privacy of whole clients: clipped updates, noise on their sum, and what it costs."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.aggregation.aggregator import float64_device
from lightning_lowrank.arguments import Configured, listed
from lightning_lowrank.configuration import check_choice, check_number
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.privacy.accounting import Accountant, Mechanism, Sampling, check_budget, noise_for
from lightning_lowrank.federated.privacy.noise import gaussian

NoiseAt = Literal["server", "clients"]


class ClientPrivacy(Configured):
    r"""Differential privacy of whole clients (McMahan et al., ICLR 2018, Algorithm 1, with one clipping norm).

    In each round a client's update :math:`\Delta_i`, all floating-point tensors of its message less the values that it
    began with, is scaled to a norm of at most :math:`C`, and the method is handed

    .. math:: \bar\Delta = \frac{1}{m}\Big(\sum_{i \in S} \Delta_i \min\big(1, C / \lVert\Delta_i\rVert\big)
        + \mathcal{N}(0, (z C)^2)\Big)

    in place of each client's message. So whatever the method's server does with it costs nothing more. The denominator
    :math:`m` is fixed: ``clients_per_round``, or all clients that have samples where these are fewer, which Poisson
    sampling draws on average. All clients count alike. The guarantee is (ε, δ)-differential privacy of each client's
    whole data against everybody who sees the global models. The server, who sees updates, is trusted, and so are the
    figures that the training logs. See ``docs/privacy.md``.

    Each round logs ``privacy/epsilon`` and ``privacy/clip``. The fit ends before ``target_epsilon`` is passed, with a
    message and its last checkpoint. A checkpoint holds what has been spent. A `FederatedLoop` makes one private run: a
    second fit from the beginning is refused, and that of another loop has an ε of its own, which adds up.

    Args:
        clip: Clipping norm :math:`C` of an update, above 0; with ``quantile`` that of the first round.
        noise_multiplier: Noise :math:`z`, above 0. ``None``: the smallest with which ``max_epochs`` rounds cost
            ``target_epsilon``, to 1e-4.
        target_epsilon: The ε that is not passed. ``None``: no limit.
        delta: The δ of all ε. Use less than 1 over the number of clients. Default 1e-5.
        sampling: ``"poisson"`` (default): each client is drawn on its own with chance ``clients_per_round`` over the
            number of clients. Cohorts vary, and one may be empty; neighbours differ by a client that is added or
            removed. ``"fixed"``: just ``clients_per_round`` are drawn; neighbours differ by a client whose data is
            replaced, for which the same noise is half as much.
        noise_at: ``"server"`` (default): the server clips what arrives, after its decoding, and adds the noise. So the
            guarantee needs nothing of codecs and clients. ``"clients"``: each clips its update and adds noise of
            variance :math:`(zC)^2` over ``min_clients`` before it is encoded, so that the sum of ``min_clients`` has
            the noise that is accounted. A round with fewer answers ends the fit. It goes with ``sampling="fixed"``, a
            given ``noise_multiplier``, and messages that carry all of the noise: of 32 bits or more, without an
            ``uplink`` or a codec of the method's that is not `additive <Codec>`. It needs clients that do as they are
            told.
        quantile: Share of updates, in (0, 1), that is not to be clipped: :math:`C` follows it (Andrew et al., NeurIPS
            2021, Algorithm 1), :math:`C \leftarrow C \exp(-\eta(\tilde b - \gamma))` with the noised share
            :math:`\tilde b`. ``None`` (default): :math:`C` is fixed.
        clip_lr: Rate :math:`\eta` of that. Default 0.2, the paper's.
        count_noise: Noise :math:`\sigma_b` on the number of updates that are not clipped. ``None``: the paper's
            ``clients_per_round / 20``, at least :math:`1.5 z`. The updates get
            :math:`(z^{-2} - (2\sigma_b)^{-2})^{-1/2}` for :math:`z`, so that both together cost what :math:`z` does
            (Theorem 1).
        accountant: dp-accounting's ``"rdp"`` (default, fast) or ``"pld"``, which finds a smaller ε in about a second
            each; for Poisson sampling.
        secure: Draw noise from the operating system's entropy, and cohorts from a secret seed, which checkpoints hold.
            By default both come from the run's named generators, which repeat them, and which are not cryptographic:
            whoever knows the seed can take the noise away. Real sites know it, and need ``secure=True``.

    Raises:
        MisconfigurationException: If an argument is out of range, or they do not go together.

    Example:
        >>> from lightning_lowrank import FedAvg, FederatedLoop
        >>> loop = FederatedLoop(
        ...     FedAvg(), clients=100, clients_per_round=10, weighting="uniform",
        ...     privacy=ClientPrivacy(clip=0.5, target_epsilon=8.0, delta=1e-3),
        ... )
    """

    def __init__(
        self,
        clip: float = 1.0,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        delta: float = 1e-5,
        sampling: Sampling = "poisson",
        noise_at: NoiseAt = "server",
        quantile: float | None = None,
        clip_lr: float = 0.2,
        count_noise: float | None = None,
        accountant: Accountant = "rdp",
        secure: bool = False,
    ) -> None:
        check_budget(noise_multiplier, target_epsilon, delta, accountant)
        check_number("clip", clip, above=0)
        check_choice("sampling", sampling, Sampling)
        check_choice("noise_at", noise_at, NoiseAt)
        if quantile is not None:
            check_number("quantile", quantile, above=0, below=1)
            check_number("clip_lr", clip_lr, above=0)
        if count_noise is not None:
            check_number("count_noise", count_noise, above=0)
        if sampling == "fixed" and accountant == "pld":
            raise MisconfigurationException(
                "accountant='pld' has no bound for sampling='fixed': use accountant='rdp', or sampling='poisson'."
            )
        if noise_at == "clients":
            if sampling != "fixed":
                raise MisconfigurationException(
                    f"noise_at='clients' needs cohorts of one size, and sampling={sampling!r} may draw too few clients"
                    " for the noise: use sampling='fixed', or noise_at='server'."
                )
            if quantile is not None:
                raise MisconfigurationException(
                    f"quantile={quantile} counts unclipped updates on the server, which with noise_at='clients' sees"
                    " none: leave it out, or use noise_at='server'."
                )
            if noise_multiplier is None:
                raise MisconfigurationException(
                    "noise_at='clients' needs noise_multiplier: a client does not know the numbers of rounds and"
                    " clients from which target_epsilon would give it."
                )
        self.clip = clip
        self.noise_multiplier = noise_multiplier
        self.target_epsilon = target_epsilon
        self.delta = delta
        self.sampling: Sampling = sampling
        self.noise_at: NoiseAt = noise_at
        self.quantile = quantile
        self.clip_lr = clip_lr
        self.count_noise = count_noise
        self.accountant: Accountant = accountant
        self.secure = secure
        self.secret = secrets.randbits(62) if secure else None
        """The seed by which clients are drawn where ``secure``; checkpoints hold it."""

    def sampling_seed(self, seed: int) -> int:
        """Return the seed by which clients are drawn, given the experiment's."""
        return seed if self.secret is None else self.secret

    @property
    def poisson(self) -> bool:
        """Whether clients are drawn each on its own."""
        return self.sampling == "poisson"


class PrivateMean:
    """The private mean of a run's rounds: their arrivals, their noise, and what has been spent.

    Args:
        privacy: The settings.
        seed: Seed of the experiment.
        sampled: Number of clients that a round draws, on average or exactly.
        population: Number of clients that can be drawn.
        rounds: Number of rounds of the run; ``None`` where it has no end.
        shares: With ``noise_at="clients"``, how many clients' noise makes up that of a round.

    Raises:
        MisconfigurationException: If noise cannot be found for the budget.
    """

    def __init__(
        self, privacy: ClientPrivacy, seed: int, sampled: int, population: int, rounds: int | None, shares: int
    ) -> None:
        self.privacy = privacy
        self._seed = seed
        self._shares = shares
        self.released = 0
        """Number of rounds whose mean has been released."""
        self.clip = float(privacy.clip)
        noise = privacy.noise_multiplier
        self._mechanism = Mechanism(noise or 1.0, sampled, population, privacy.sampling)
        if noise is None:
            assert privacy.target_epsilon is not None
            if rounds is None:
                raise MisconfigurationException(
                    "target_epsilon alone finds the noise for the run's number of rounds, and max_epochs=-1 has no"
                    " end: set max_epochs, or give noise_multiplier too."
                )
            noise = noise_for(
                privacy.target_epsilon, privacy.delta, [(self._mechanism, max(1, rounds))], privacy.accountant
            )
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
        """Number of clients by which a round's sum is divided."""
        return self._mechanism.sampled

    @property
    def noise_multiplier(self) -> float:
        """Noise of a round over the clipping norm, that of the count included."""
        return self._mechanism.noise_multiplier

    @property
    def _count_noise(self) -> float:
        given = self.privacy.count_noise
        return max(self._mechanism.sampled / 20, 1.5 * self.noise_multiplier) if given is None else given

    @property
    def noise_of_updates(self) -> float:
        """Noise on the sum of updates over the clipping norm (Andrew et al., 2021, Theorem 1)."""
        if self.privacy.quantile is None:
            return self.noise_multiplier
        return (self.noise_multiplier**-2 - (2 * self._count_noise) ** -2) ** -0.5

    def epsilon(self, more: int = 0) -> float:
        """Return the ε of the rounds so far, and of so many ``more``."""
        privacy = self.privacy
        return self._mechanism.epsilon(self.released + more, privacy.delta, privacy.accountant)

    @property
    def exhausted(self) -> str:
        """Why no further round may be made; an empty string where one may."""
        target = self.privacy.target_epsilon
        if target is None or self.epsilon(1) <= target:
            return ""
        return (
            f"{self.released} rounds have cost ε = {self.epsilon():.4g} at δ = {self.privacy.delta:g}, and one more"
            f" would cost {self.epsilon(1):.4g}, above target_epsilon={target:g}"
        )

    def figures(self) -> dict[str, float]:
        """Return what is logged after a round."""
        return {"privacy/epsilon": self.epsilon(), "privacy/clip": self.clip}

    # A client's update

    @torch.no_grad()
    def protected(
        self, message: Mapping[str, Tensor], center: Mapping[str, Tensor], round_number: int, client: int
    ) -> dict[str, Tensor]:
        """Return a client's message, clipped and with the client's share of the noise, at ``noise_at="clients"``."""
        update, _ = self._clipped(message, center)
        std = self.noise_multiplier * self.clip / math.sqrt(self._shares)
        noise = gaussian(update, std, self._seed, "privacy noise", round_number, client, secure=self.privacy.secure)
        private = _plus(update, noise)
        changed = {name: _wide(center[name]) + value if name in center else value for name, value in private.items()}
        return {name: changed[name].to(value.dtype) if name in changed else value for name, value in message.items()}

    @torch.no_grad()
    def add(self, message: Mapping[str, Tensor], center: Mapping[str, Tensor]) -> None:
        """Add a client's message, less what it began with.

        Raises:
            MisconfigurationException: If it holds changed integers, which no norm bounds.
        """
        for name, value in message.items():
            if not value.is_floating_point() and not (name in center and torch.equal(center[name].to(value), value)):
                raise MisconfigurationException(
                    f"ClientPrivacy bounds a client's update by its norm, and clients send {name!r} of"
                    f" {str(value.dtype).removeprefix('torch.')}, which training changes: leave the buffer out, keep it"
                    " with its client (buffers='local'), or use a method that sends floating-point numbers alone."
                )
        if self.privacy.noise_at == "server":
            update, inside = self._clipped(message, center)
            # A count of ±1/2 is moved by 1/2 where a client is added, and by 1 where one is replaced.
            self._unclipped += 0.5 if inside else -0.5
        else:
            update = _update(message, center)
        if self._sums and self._sums.keys() != update.keys():
            raise KeyError(f"clients send different tensors: {sorted(self._sums.keys() ^ update.keys())}")
        self._sums = _plus(self._sums, update) if self._sums else update

    def checkpoint(self) -> Callable[[], None]:
        """Return what takes back the arrivals that are added from now on."""
        sums, unclipped = self._sums, self._unclipped

        def undo() -> None:
            self._sums, self._unclipped = sums, unclipped

        return undo

    def _clipped(self, message: Mapping[str, Tensor], center: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
        update = _update(message, center)
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(value) for value in update.values()]))
        scale = (self.clip / norm.clamp(min=1e-300)).clamp(max=1.0)
        return {name: value * scale for name, value in update.items()}, bool(norm <= self.clip)

    # The round's end

    @torch.no_grad()
    def release(self, form: Mapping[str, Tensor], center: Mapping[str, Tensor], round_number: int) -> dict[str, Tensor]:
        """Return the round's private mean as a client's message, and forget the arrivals.

        Args:
            form: What a client sends, of which only shapes and types matter.
            center: What changes are added to, by name.
            round_number: Number of the round.
        """
        privacy, sampled = self.privacy, self._mechanism.sampled
        floating = {name: value for name, value in form.items() if value.is_floating_point()}
        sums = self._sums or {name: torch.zeros_like(_wide(value)) for name, value in floating.items()}
        if privacy.noise_at == "server":
            std = self.noise_of_updates * self.clip
            noise = gaussian(sums, std, self._seed, "privacy noise", round_number, secure=privacy.secure)
            sums = _plus(sums, noise)
        found = {}
        for name, value in form.items():
            if name not in sums:
                found[name] = center[name]
                continue
            total = sums[name] / sampled + (_wide(center[name]) if name in center else 0)
            found[name] = total.to(torch.promote_types(value.dtype, torch.float32)).to(value.device)
        self._follow_quantile(round_number)
        self.released += 1
        self._forget()
        return found

    def _follow_quantile(self, round_number: int) -> None:
        privacy = self.privacy
        if privacy.quantile is None:
            return
        zero = {"count": torch.zeros((), dtype=torch.float64)}
        parts = (self._seed, "privacy count", round_number)
        noise = gaussian(zero, self._count_noise, *parts, secure=privacy.secure)["count"].item()
        share = (self._unclipped + noise) / self._mechanism.sampled + 0.5
        self.clip *= math.exp(-privacy.clip_lr * (share - privacy.quantile))

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as tensors and plain Python."""
        return {
            "released": self.released,
            "clip": self.clip,
            "noise_multiplier": self.noise_multiplier,
            "drawn": [self._mechanism.sampled, self._mechanism.population],
            "secret": self.privacy.secret,
            "sums": dict(self._sums),
            "unclipped": self._unclipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s result, with the noise that the run began with.

        Raises:
            MisconfigurationException: If later rounds would have another noise or chance than those that are counted.
        """
        given, noise = self.privacy.noise_multiplier, state["noise_multiplier"]
        drawn = [self._mechanism.sampled, self._mechanism.population]
        if given not in (None, noise) or drawn != state["drawn"]:
            raise MisconfigurationException(
                f"the rounds so far drew {state['drawn'][0]} of {state['drawn'][1]} clients with"
                f" noise_multiplier={noise:g}, and later ones would draw {drawn[0]} of {drawn[1]} with"
                f" {given or noise:g}: ε counts equal rounds, so go on with the same."
            )
        self.released, self.clip = state["released"], state["clip"]
        self.privacy.secret = state["secret"]
        self._mechanism = dataclasses.replace(self._mechanism, noise_multiplier=state["noise_multiplier"])
        self._sums, self._unclipped = dict(state["sums"]), state["unclipped"]


def check_carries_noise(message: Message, sender: str) -> None:
    """Refuse a client's message that would lose some of the noise that the client adds to it.

    The server's sum has all of the noise where it is that of exact messages, or a part of its numbers alone. Where
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
            f"{needs} {sender} sends {listed(narrow)} in 16 bits, which round a part of it away: train in 32 bits, as"
            " precision='bf16-mixed' does, or use noise_at='server'."
        )


def _wide(value: Tensor) -> Tensor:
    return value.detach().to(float64_device(value.device)).double()


def _update(message: Mapping[str, Tensor], center: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: _wide(value) - _wide(center[name]) if name in center else _wide(value)
        for name, value in message.items()
        if value.is_floating_point()
    }


def _plus(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value + second[name] for name, value in first.items()}
