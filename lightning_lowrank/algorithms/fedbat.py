"""FedBAT: clients learn updates of one bit per weight, instead of rounding them after training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_lowrank.algorithms._compressed import (
    add_changes,
    add_to_shared,
    difference_to_shared,
    initial_parameters,
)
from lightning_lowrank.compression import Codec, Dense, Sign, Split
from lightning_lowrank.configuration import check_number
from lightning_lowrank.federated.algorithm import LocalStep
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.protocols import ChangesBase, OwnCodec, OwnSteps
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server, copy_into
from lightning_lowrank.internals.torch import BATCH_NORMS, INSTANCE_NORMS
from lightning_lowrank.seeding import generator

_NORMS = (*BATCH_NORMS, *INSTANCE_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class FedBAT(ChangesBase, OwnCodec, OwnSteps):
    r"""Federated binarization-aware training (Li et al., ICML 2024, Section 3 and Algorithm 1).

    After some steps, a client's forward pass uses its initial weights plus or minus one learned number per tensor: the
    value that the server would get if the client stopped at this step. Its first :math:`\lceil\phi\tau\rceil` of
    :math:`\tau` steps are plain ones (the release rounds down, so that a client's only step would binarise an update of
    zero). In the others, the update :math:`x = w - w_\text{start}` of every tensor is binarised before each forward
    pass,

    .. math::
        \hat x = +\alpha \text{ with probability } \operatorname{clip}\big((x/\alpha + 1)/2,\ 0,\ 1\big),
        \text{ else } -\alpha, \qquad \alpha = \operatorname{clip}(\alpha_0 e^{\rho a},\ \alpha_\min,\ \alpha_\max),

    and the gradient :math:`g` at :math:`w_\text{start} + \hat x` trains :math:`w` where :math:`|x| \le \alpha`
    (straight through; elsewhere it is zero), and :math:`a` by gradient descent from 0. :math:`\alpha_0` is the mean of
    :math:`|x|` when binarisation begins. The derivative with respect to :math:`\alpha` is that of the *sampled* value
    :math:`\alpha\, s(x/\alpha)`, with :math:`s = \pm 1` passed straight through as above, as in the authors'
    release:

    .. math::
        \frac{\partial \hat x}{\partial \alpha} = s - \frac{x}{\alpha}\,[\,|x| \le \alpha\,], \qquad
        \frac{\partial L}{\partial a} = \rho\,\alpha \sum_j g_j \frac{\partial \hat x_j}{\partial \alpha_{}}
        \quad\text{(0 where } \alpha \text{ is clipped)}.

    Its expectation over the draws is the derivative of :math:`\operatorname{E}\hat x = \operatorname{clip}(x, -\alpha,
    \alpha)`. That is zero within :math:`\pm\alpha`, where all noise is; the sampled derivative depends on the noise.

    A client sends the signs of a last draw, a bit each, and :math:`\alpha` of each tensor: 52,600 bytes for CNN4 and
    the names of its tensors. As in the release, normalisation layers' parameters are trained and sent in full
    precision; so are buffers. The server sends the model in full precision. With ``compress_down`` it sends the
    difference between the model and the common copy, in the same code and with the same draws, where :math:`\alpha` is
    the difference's mean magnitude; server and clients add it to the copy (error feedback, as in `EF21P`), so clients
    outside the cohort need it too. FedMUD's authors compress the broadcast "with its quantizer", without further
    detail.

    Weight decay and gradient clipping act as set in the optimizer and trainer, on :math:`w` and on its masked gradient.

    Args:
        full_precision_share: Share :math:`\phi` of a client's steps before binarisation, above 0 and at most 1. At 1,
            the update is binarised only to be sent.
        rho: How fast the magnitude follows its gradient, :math:`\rho`, 0 or more; at 0 it stays :math:`\alpha_0`.
        learning_rate: Learning rate of :math:`a`. ``None``, as in the release: that of the tensor's group in the
            optimizer.
        magnitudes: Smallest and largest :math:`\alpha`. The default, the release's, suits weights; raise it for larger
            updates, such as those of low-rank factors.
        compress_down: Whether the broadcast is binarised too.

    Raises:
        MisconfigurationException: If an argument is out of its range.

    Example:
        >>> from lightning_lowrank import Dirichlet, FedBAT, FederatedLoop
        >>> loop = FederatedLoop(FedBAT(compress_down=True), clients=100, partition=Dirichlet(0.3), local_epochs=3)
    """

    def __init__(
        self,
        full_precision_share: float = 0.5,
        rho: float = 6.0,
        learning_rate: float | None = None,
        magnitudes: tuple[float, float] = (5e-4, 5e-2),
        compress_down: bool = False,
    ) -> None:
        check_number("full_precision_share", full_precision_share, above=0, most=1)
        check_number("rho", rho, least=0)
        if learning_rate is not None:
            check_number("learning_rate", learning_rate, least=0)
        check_number("magnitudes[0]", magnitudes[0], above=0)
        check_number("magnitudes[1]", magnitudes[1], least=magnitudes[0])
        self.full_precision_share = full_precision_share
        self.rho = rho
        self.learning_rate = learning_rate
        self.magnitudes = magnitudes
        self.compress_down = compress_down
        self._exact: frozenset[str] = frozenset()
        self._pending: dict[str, _Binarised] = {}

    def setup(self, base: Base) -> None:
        """Find the parameters of normalisation layers, which stay in full precision, and create the shared copy."""
        self._exact = frozenset(
            f"{layer_name}.{name}" if layer_name else name
            for layer_name, layer in base.module.named_modules()
            if isinstance(layer, _NORMS)
            for name, _ in layer.named_parameters()
        )
        if self.compress_down and "shared" not in base.state:
            base.state["shared"] = self._binarised(base, initial_parameters(base))

    @property
    def announces(self) -> bool:
        return self.compress_down

    def update_base(self, base: Base, message: Mapping[str, Tensor]) -> None:
        if self.compress_down:
            add_to_shared(base, message)

    def downlink(self, base: Base) -> Codec | None:
        return self._codec(base) if self.compress_down else None

    def reference(self, base: Base, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The reference of an upload: the received tensors, except those of which clients send changes."""
        changes = self._binarised(base, received)
        return {name: value for name, value in received.items() if name not in changes}

    def begin_round(self, server: Server) -> None:
        if not self.compress_down:
            return
        draws = generator(server.seed, "binarise", server.round, "down", device=server.base.device)

        def compress(difference: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: _binarise(x, x.abs().mean(), _uniform(x, draws)) for name, x in difference.items()}

        self.announce(server, difference_to_shared(server, compress))

    def broadcast(self, server: Server, client: ClientInfo) -> Message:
        """The model; with ``compress_down``, a codec sends the announced difference in place of the parameters."""
        message = super().broadcast(server, client)
        return Message(message.tensors, self.downlink(server.base))

    def aggregate(self, server: Server) -> None:
        """Add the mean of the binarised updates to the model; average the rest."""
        add_changes(server, self._binarised(server.base, server.model))

    def begin(self, client: ClientContext, message: Message) -> None:
        """Install the received model; a magnitude is unknown (-1) before binarisation begins."""
        base = client.base
        start = base.state["shared"] if self.compress_down else self._binarised(base, message.tensors)
        copy_into(client.model, {**message.tensors, **start})
        zeros = {name: torch.zeros((), dtype=_precise(x), device=x.device) for name, x in start.items()}
        unknown = {name: zero - 1 for name, zero in zeros.items()}
        client.round_state.update(start=start, first_magnitude=unknown, exponent=zeros)

    def local_update(self, step: LocalStep, update: Callable[[], None]) -> None:
        """After a client's first steps in full precision, step on the loss at the binarised update."""
        # Subtract a small number, because of rounding errors: 0.28 * 25 is just above 7.
        binarises = step.number >= self.full_precision_share * step.steps - 1e-9
        if binarises.any():
            self._put_binarised(step, binarises)
        try:
            update()
        finally:
            # Without a step, such as one that 16-bit loss scaling skips, `before_step` has not restored the weights.
            self._restore(step)

    @torch.no_grad()
    def _restore(self, step: LocalStep) -> dict[str, _Binarised]:
        """Restore the weights that are binarised now, and return their entries of ``_pending``, which is cleared."""
        pending, self._pending = self._pending, {}
        for name, each in pending.items():
            step.parameters[name].copy_(each.weights)
        return pending

    @torch.no_grad()
    def _put_binarised(self, step: LocalStep, binarises: Tensor) -> None:
        """Draw binarised weights for the forward pass, for the clients that binarise in this step."""
        device = step.base.device
        draws = [
            generator(step.base.seed, "binarise", step.round, client, step.number, device=device)
            for client in step.clients
        ]
        for name, start in step.round_state["start"].items():
            weights = step.parameters[name]
            x = (weights - start).to(_precise(weights))
            on = binarises.to(x.device, non_blocking=True)
            first = step.round_state["first_magnitude"][name]
            mean = x.abs().reshape(*first.shape, -1).mean(-1)
            first.copy_(torch.where(on & (first < 0), mean, first))
            magnitude = first * torch.exp(self.rho * step.round_state["exponent"][name])
            alpha = step.expand(magnitude.clamp(*self.magnitudes), x)
            if step.stacked:
                uniform = torch.stack([_uniform(part, draw) for part, draw in zip(x, draws, strict=True)])
            else:
                uniform = _uniform(x, draws[0])
            binary = _binarise(x, alpha, uniform)
            on, inside = step.expand(on, x), x.abs() <= alpha
            slope = binary - torch.where(inside, x, 0)
            # A client that does not binarise yet has a negative magnitude, which is out of bounds.
            free = (magnitude >= self.magnitudes[0]) & (magnitude <= self.magnitudes[1])
            self._pending[name] = _Binarised(weights.detach().clone(), inside | ~on, slope, free)
            weights.copy_(torch.where(on, start + binary, weights))

    @torch.no_grad()
    def before_step(self, step: LocalStep) -> None:
        """Restore the weights, mask the gradients of the binarised ones, and step the magnitudes."""
        rates = {
            id(parameter): group["lr"]
            for optimizer in step.base.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for name, pending in self._restore(step).items():
            parameter, exponent = step.parameters[name], step.round_state["exponent"][name]
            if parameter.grad is None:
                continue
            gradient = self.rho * (parameter.grad * pending.slope).reshape(*exponent.shape, -1).sum(-1) * pending.free
            rate = rates[id(parameter)] if self.learning_rate is None else self.learning_rate
            # Zeros for NaN and infinity, because a later hook, such as of clipping, may replace them in the gradient.
            exponent.sub_(rate * gradient.nan_to_num(0.0, 0.0, 0.0))
            parameter.grad.mul_(pending.passes)

    @torch.no_grad()
    def end(self, client: ClientContext) -> Message:
        draws = generator(client.seed, "binarise", client.round, client.id, "up", device=client.base.device)
        sent = client.base.sent_up(client.model)
        for name, start in client.round_state["start"].items():
            x = client.model[name] - start
            first = client.round_state["first_magnitude"][name]
            first = torch.where(first < 0, x.abs().mean(dtype=first.dtype), first)
            magnitude = first * torch.exp(self.rho * client.round_state["exponent"][name])
            sent[name] = _binarise(x, magnitude.clamp(*self.magnitudes), _uniform(x, draws))
        return Message(sent, self._codec(client.base))

    def _binarised(self, base: Base, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The ``tensors`` whose updates are binarised."""
        return {name: value for name, value in base.parameters(tensors).items() if name not in self._exact}

    def _codec(self, base: Base) -> Codec:
        return Split(self._exact | base.initial_buffers.keys(), Dense(), Sign())


class _Binarised(NamedTuple):
    """A tensor's weights and derivatives for `FedBAT.before_step`, after the backward pass at binarised weights.

    ``passes`` masks the gradients that go straight through to the weights, ``slope`` the derivative of the update with
    respect to the logarithm of the magnitude, ``free`` whether the magnitude is within its bounds.
    """

    weights: Tensor
    passes: Tensor
    slope: Tensor
    free: Tensor


def _precise(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _uniform(like: Tensor, draws: torch.Generator) -> Tensor:
    return torch.rand(like.shape, generator=draws, device=draws.device)


def _binarise(update: Tensor, alpha: Tensor, uniform: Tensor) -> Tensor:
    """Plus or minus ``alpha``: plus with probability (update / alpha + 1) / 2, clipped to [0, 1]."""
    x = update.to(_precise(update))
    plus = uniform < (x / alpha + 1) / 2
    # The last term propagates NaN and infinity, which a sign would hide.
    return (torch.where(plus, alpha, -alpha) + 0 * x).to(update.dtype)
