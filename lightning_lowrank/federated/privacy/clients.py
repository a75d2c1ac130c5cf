"""The settings of client-level differential privacy."""

from __future__ import annotations

import secrets
from typing import Literal

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.arguments import Configured
from lightning_lowrank.configuration import check_choice, check_number
from lightning_lowrank.federated.privacy.accounting import Accountant, Sampling, check_budget

NoiseAt = Literal["server", "clients"]


class ClientPrivacy(Configured):
    r"""Client-level differential privacy (McMahan et al., ICLR 2018, Algorithm 1, with one clipping norm).

    In each round a client's update :math:`\Delta_i`, all floating-point tensors of its message minus the values that it
    began with, is scaled to a norm of at most :math:`C`, and the method gets

    .. math:: \bar\Delta = \frac{1}{m}\Big(\sum_{i \in S} \Delta_i \min\big(1, C / \lVert\Delta_i\rVert\big)
        + \mathcal{N}(0, (z C)^2)\Big)

    in place of each client's message. So the method's server spends no further privacy. The denominator :math:`m` is
    fixed: ``clients_per_round``, or all clients that can be drawn if these are fewer; Poisson sampling draws so many on
    average. All clients count alike. The guarantee is (ε, δ)-differential privacy of each client's whole data against
    everybody who sees the global models. It does not cover the server, which sees the updates, or the figures that
    training logs. See ``docs/privacy.md``.

    Each round logs ``privacy/epsilon`` and ``privacy/clip``. The fit ends before ``target_epsilon`` is passed, with a
    message and its last checkpoint. A checkpoint holds the number of rounds so far. A `FederatedLoop` makes one private
    run: a second fit from the beginning is refused. The fit of another loop has its own ε; add up both.

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
        noise_at: ``"server"`` (default): the server clips decoded updates, and adds the noise. So the guarantee
            does not depend on codecs and clients. ``"clients"``: each clips its update and adds noise of
            variance :math:`(zC)^2` over ``min_clients`` before it is encoded, so that the sum of ``min_clients`` has
            the noise that is accounted. A round with fewer answers ends the fit. It goes with ``sampling="fixed"``, a
            given ``noise_multiplier``, and messages that carry all of the noise: of 32 bits or more, without an
            ``uplink`` or a codec of the method's that is not `additive <Codec>`. It needs clients that follow the
            protocol.
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
            The first of several processes (``strategy="client_parallel"``) draws both for all of them. By default both
            come from the run's named generators, which repeat them, and which are not cryptographic: whoever knows the
            seed can take the noise away. Real sites know it, and need ``secure=True``.

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
                    " clients from which target_epsilon determines it."
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
        """The seed by which clients are drawn if ``secure``; checkpoints hold it."""

    def sampling_seed(self, seed: int) -> int:
        """The seed for drawing clients, given the experiment's seed."""
        return seed if self.secret is None else self.secret

    @property
    def poisson(self) -> bool:
        """Whether each client is drawn independently (Poisson sampling)."""
        return self.sampling == "poisson"
