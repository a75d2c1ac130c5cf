"""TDPFed: every client has a personal model, and only the factors of the global model are sent.

It is pFedMe with a local copy of the global model in CP form, which is fitted to the personal model without data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Literal

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_lowrank.algorithms.pfedme import mix, pull, working_copy
from lightning_lowrank.configuration import check_choice, check_integer, check_number
from lightning_lowrank.federated.algorithm import LocalStep, detached
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.protocols import OwnSteps
from lightning_lowrank.federated.state import Base, ClientContext, ClientInfo, Server, copy_into
from lightning_lowrank.internals.torch import adam_step
from lightning_lowrank.layers import CP, low_rank_layers

Aggregation = Literal["AFM", "ACT"]
AdamReset = Literal["batch", "round", "never"]
Factors = dict[str, Tensor]

_CP = CP()
_SWEEPS = 30
_GAIN = 1e-4
_EPS = 1e-8


class TDPFed(OwnSteps):
    r"""Tensor decomposition based personalized federated learning (Wang et al., Algorithm 1, Eqs. 11-20).

    The live module stays dense and is a client's personal model :math:`\theta`, which begins each round at the global
    one. The global model, and each client's local copy of it, is a product of factors: every trained tensor of two or
    more dimensions is :math:`[\![A^{(1)}, \dots, A^{(N)}]\!]` in CP form (`CP`), with the rank
    :math:`\mathrm{round}(n / (c \sum_i I_i))` for ``n`` numbers and the compression rate :math:`c` (Eqs. 21-22), unless
    that would not make it smaller. The paper does not mention biases and norms: here a tensor of one dimension (and any
    that stays whole) is its own only factor, and the equations apply to it.

    On every batch, ``personal_steps`` steps of the module's own optimizer (the paper's is
    ``torch.optim.SGD(nesterov=True)``) on :math:`f(\theta) + \frac{\lambda}{2}\|\theta - [\![A]\!]\|^2` (Eq. 13), then
    ``factor_steps`` steps of Adam on :math:`\frac{\lambda}{2}\|\theta - [\![A]\!]\|^2`, with the gradient
    :math:`\lambda(-\theta_{(n)} K_n + A^{(n)} V_n)`, :math:`K_n` being the Khatri-Rao product of the other factors and
    :math:`V_n` the Hadamard product of their Gram matrices (Eqs. 23 and 24; Eq. 15 has lost a sign and a
    :math:`\lambda`). A step changes one factor after another, each with the new values of the factors before it. The
    paper does not say how long Adam's moments last: see ``adam_reset``.

    Messages hold the factors, the tensors that stay whole and the module's buffers. A client keeps its personal model,
    its last :math:`\theta` and its buffers, and is evaluated with it; a client that never took part is evaluated with
    the global model. The global model starts as `CP.decompose` of the module's own weights, also after a change of the
    weights from outside.

    Args:
        compression: Compression rate :math:`c` of each weight, 1 or more. Default 2.
        regularization: Pull :math:`\lambda` between the two models, above 0. Default 12.
        personal_steps: Steps on :math:`\theta` on each batch, 1 or more (the paper's :math:`s`). Default 5.
        factor_steps: Steps on the factors on each batch, 1 or more (the paper's :math:`s'`). Default 17.
        factor_learning_rate: Adam's, above 0 (the paper's :math:`\eta`; its :math:`\eta_p` is that of the module's
            optimizer). Default 8e-4.
        adam_reset: When a client's Adam starts again from zero moments: ``"batch"``, before the steps of each batch,
            ``"round"``, or ``"never"`` (default), which is the nearest to the paper's figures. With ``"never"`` a
            client keeps the moments from round to round, two more numbers for each number of its factors.
        joint: Whether all factors of a weight step at once instead of one after another. Off by default.
        aggregation: ``"AFM"`` (default) averages the factors, all clients with the same weight whatever the loop's
            ``weighting``, since Eq. 18 weighs by batch size. ``"ACT"`` averages the composed tensors with the loop's
            weights, by default the numbers of samples, and refits the old factors to the mean by alternating least
            squares; the paper does not specify this step.
        mixing: Share :math:`\beta` of the clients' mean in the new global model, above 0. Above 1, as in the paper's
            Table IV, the global model moves beyond the mean. Default 1.

    Raises:
        MisconfigurationException: If an argument is out of range, the module has low-rank layers or no weight that the
            factors make smaller, or a weight is zero or not finite.

    Example:
        >>> from lightning_lowrank import FederatedLoop, LabelCount, TDPFed
        >>> loop = FederatedLoop(TDPFed(compression=1.5), clients=20, partition=LabelCount(2), local_steps=23)
    """

    def __init__(
        self,
        compression: float = 2.0,
        regularization: float = 12.0,
        personal_steps: int = 5,
        factor_steps: int = 17,
        factor_learning_rate: float = 8e-4,
        adam_reset: AdamReset = "never",
        joint: bool = False,
        aggregation: Aggregation = "AFM",
        mixing: float = 1.0,
    ) -> None:
        check_number("compression", compression, least=1)
        check_number("regularization", regularization, above=0)
        check_integer("personal_steps", personal_steps)
        check_integer("factor_steps", factor_steps)
        check_number("factor_learning_rate", factor_learning_rate, above=0)
        check_choice("adam_reset", adam_reset, AdamReset)
        check_choice("aggregation", aggregation, Aggregation)
        check_number("mixing", mixing, above=0)
        self.compression = compression
        self.regularization = regularization
        self.personal_steps = personal_steps
        self.factor_steps = factor_steps
        self.factor_learning_rate = factor_learning_rate
        self.adam_reset = adam_reset
        self.joint = joint
        self.aggregation = aggregation
        self.mixing = mixing
        self._ranks: dict[str, int] = {}
        self._shapes: dict[str, torch.Size] = {}

    def setup(self, base: Base) -> None:
        """Choose the ranks of all weights."""
        if any(low_rank_layers(base.module)):
            raise MisconfigurationException(
                "TDPFed's personal models are dense, and the method makes factors of their weights itself: remove"
                " LowRank from `callbacks` and set TDPFed(compression=...)."
            )
        self._ranks, self._shapes = {}, {}
        for name, value in base.module.named_parameters():
            if value.requires_grad and value.ndim >= 2:
                rank = _CP.rank_for_ratio(value.shape, 1 / self.compression)
                if _CP.trained_numbers(value.shape, rank) < value.numel():
                    self._ranks[name], self._shapes[name] = rank, value.shape
        if not self._ranks:
            raise MisconfigurationException(
                "TDPFed needs a trained weight of two or more dimensions that CP factors make smaller at"
                f" compression={self.compression}, and the module has none."
            )

    @torch.no_grad()
    def begin_round(self, server: Server) -> None:
        """Decompose each weight that is not the product of the server's factors, such as the initial weights."""
        known: dict[str, Factors] = server.state.setdefault("factors", {})
        for name, rank in self._ranks.items():
            weight = server.model[name]
            if name in known:
                composed = _CP.compose(known[name], weight.shape)
                if torch.allclose(composed, weight, rtol=0, atol=0, equal_nan=True):
                    continue
            if not (weight.isfinite().all() and weight.any()):
                raise MisconfigurationException(
                    f"TDPFed: {name} is zero or not finite. Factors that are all zero never change, since their"
                    " gradient is zero: initialise it otherwise."
                )
            known[name] = _CP.decompose(weight, rank)
            server.model[name] = _CP.compose(known[name], weight.shape)

    def broadcast(self, server: Server, client: ClientInfo) -> Message:
        whole = {name: value for name, value in server.sent_down().items() if name not in self._ranks}
        return Message({**whole, **_named(server.state["factors"])})

    @torch.no_grad()
    def begin(self, client: ClientContext, message: Message) -> None:
        """Start the personal model and the local factors from the received factors."""
        factors = self._factors(message.tensors)
        whole = {name: value for name, value in message.tensors.items() if name in client.model}
        composed = self._composed(factors)
        copy_into(client.model, {**whole, **composed})
        # Copies, because each client changes its factors and whole tensors in place.
        each_of = {**factors, **{name: {"": value} for name, value in client.base.parameters(whole).items()}}
        own = {
            name: {key: working_copy(value).contiguous() for key, value in each.items()}
            for name, each in each_of.items()
        }
        if self.adam_reset == "never" and "adam" in client.state:
            adam = apply_to_collection(client.state["adam"], Tensor, torch.clone)
        else:
            adam = {kind: apply_to_collection(own, Tensor, torch.zeros_like) for kind in ("first", "second")}
            if self.adam_reset == "never":
                adam["taken"] = torch.zeros((), device=client.base.device)
        client.round_state.update({"factors": own, "composed": composed, "adam": adam})

    def before_step(self, step: LocalStep) -> None:
        whole = {name: each[""] for name, each in step.round_state["factors"].items() if "" in each}
        pull(step.parameters, {**whole, **step.round_state["composed"]}, self.regularization)

    def passes(self, client: ClientInfo) -> tuple[float, float]:
        return self.personal_steps, self.personal_steps

    def local_update(self, step: LocalStep, update: Callable[[], None]) -> None:
        for _ in range(self.personal_steps):
            update()
        with torch.no_grad():
            self._fit(step)
            for name, composed in step.round_state["composed"].items():
                compose = functools.partial(_CP.compose, shape=self._shapes[name])
                composed.copy_((torch.vmap(compose) if step.stacked else compose)(step.round_state["factors"][name]))

    def _fit(self, step: LocalStep) -> None:
        """Take the batch's steps on the factors: on the first factors of all weights together, then on the second.

        Instead of the gradient times the pull, Adam steps by the gradient, with ``eps`` divided by the pull: the same
        up to rounding. In single precision a round amplifies rounding errors, because Adam divides a gradient by its
        own size, however small. In double precision, a round differs by 2e-12 from one with torch's optimizer.
        """
        own, known = step.round_state["factors"], step.round_state["adam"]
        weights = [step.parameters[name].detach().to(next(iter(each.values())).dtype) for name, each in own.items()]
        before = 0 if self.adam_reset == "batch" else step.number * self.factor_steps
        taken = torch.full((), float(before), device=weights[0].device)
        if self.adam_reset == "batch":
            apply_to_collection(known, Tensor, Tensor.zero_)
        elif self.adam_reset == "never":
            taken = taken + known["taken"]
        # Clients that keep Adam's state may have taken different numbers of steps.
        apart = taken.ndim > 0
        kinds = [[list(each.values()) for each in kind.values()] for kind in (own, known["first"], known["second"])]
        places = [(place, number) for number, each in enumerate(own.values()) for place in range(len(each))]
        turns = [places] if self.joint else [list(turn) for _, turn in groupby(sorted(places), itemgetter(0))]
        gradients = [factor_gradients(weight, each) for weight, each in zip(weights, kinds[0], strict=True)]
        steps = []
        for turn in turns:
            values, first, second = (_each([kind[number][place] for place, number in turn], apart) for kind in kinds)
            counts = _each([taken] * len(turn), apart)
            adam = adam_step(
                values, first, second, counts, lr=self.factor_learning_rate, eps=_EPS / self.regularization
            )
            steps.append((adam, [gradients[number] for _, number in turn]))
        for _ in range(self.factor_steps):
            taken += 1
            for adam, sources in steps:
                adam(_each([next(source) for source in sources], apart))

    def end(self, client: ClientContext) -> Message:
        """Keep the personal model, and return the factors, the tensors that stay whole and the buffers."""
        client.state["personal"] = detached(client.model)
        if self.adam_reset == "never":
            adam = apply_to_collection(client.round_state["adam"], Tensor, torch.clone)
            client.state["adam"] = {**adam, "taken": adam["taken"] + client.steps * self.factor_steps}
        sent = client.base.sent_up(client.model)
        buffers = {name: value for name, value in sent.items() if name in client.base.initial_buffers}
        factors = {
            name: {key: value.to(client.model[name].dtype) for key, value in each.items()}
            for name, each in client.round_state["factors"].items()
        }
        return Message({**buffers, **_named(factors)})

    @torch.no_grad()
    def receive(self, server: Server, client: ClientInfo, message: Message, weight: float) -> None:
        if self.aggregation == "AFM":
            server.aggregator.add(message.tensors, 1.0)
            return
        whole = {name: value for name, value in message.tensors.items() if name in server.model}
        server.aggregator.add({**whole, **self._composed(self._factors(message.tensors))}, weight)

    @torch.no_grad()
    def aggregate(self, server: Server) -> None:
        """Mix the clients' mean into the global model and its factors."""
        mean = server.aggregator.result()
        known: dict[str, Factors] = server.state["factors"]
        whole = {name: value for name, value in mean.items() if name in server.model}
        mixed = mix(server.model, server.base.parameters(whole), self.mixing)
        if self.aggregation == "AFM":
            averaged = self._factors(mean)
            factors = {name: mix(known[name], averaged[name], self.mixing) for name in self._ranks}
        else:
            factors = {name: refit(mixed.pop(name), known[name]) for name in self._ranks}
        server.state["factors"] = factors
        server.model.update({**whole, **mixed, **self._composed(factors)})

    def _factors(self, tensors: Mapping[str, Tensor]) -> dict[str, Factors]:
        """Each weight's factors, from the tensors of a message."""
        return {
            name: {key: tensors[f"{name}.{key}"] for key in _CP.factor_names(self._shapes[name])}
            for name in self._ranks
        }

    def _composed(self, factors: Mapping[str, Factors]) -> dict[str, Tensor]:
        return {name: _CP.compose(each, self._shapes[name]) for name, each in factors.items()}


def _each(stacks: Sequence[Tensor], apart: bool) -> list[Tensor]:
    """The stacks, or with ``apart`` each client's part of them as a separate tensor."""
    return [part for stack in stacks for part in stack.unbind()] if apart else list(stacks)


def _named(factors: Mapping[str, Factors]) -> dict[str, Tensor]:
    """The factors of all weights by their names in messages; a tensor without factors keeps its name."""
    return {f"{name}.{key}" if key else name: value for name, each in factors.items() for key, value in each.items()}


def normal_equations(weight: Tensor, factors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    r"""Yield the terms of the least squares problem for each factor of a CP form in turn.

    These are ``W_(n) K_n``, ``[dimension, rank]``, and ``V_n``, ``[rank, rank]``. The gradient of
    :math:`\frac12\|W - [\![A]\!]\|^2` is ``A V_n - W_(n) K_n`` (TDPFed, Eq. 23), zero at the optimum. A factor
    may be changed in place before the next problem is requested, which then uses the new values. All tensors may have
    the clients as a first dimension.
    """
    first = weight.ndim - len(factors)
    matrix = weight.flatten(first + 1)
    sizes = weight.shape[first + 1 :]
    grams = {place: factor.mT @ factor for place, factor in enumerate(factors) if place}
    for place, factor in enumerate(factors):
        if place == 0:
            projected = matrix @ functools.reduce(_khatri_rao, factors[1:])
        else:
            if place == 1:
                # The costliest contraction, over the first dimension, is shared by all factors but the first.
                partial = (matrix.mT @ factors[0]).unflatten(first, sizes)
            projected = partial
            for other in reversed(range(1, len(factors))):
                if other != place:
                    spread = [1] * len(sizes)
                    spread[other - 1] = sizes[other - 1]
                    columns = factors[other].reshape(*weight.shape[:first], *spread, -1)
                    projected = (projected * columns).sum(first + other - 1, keepdim=True)
            projected = projected.reshape(factor.shape)
        others = [grams[other] for other in range(len(factors)) if other != place]
        yield projected, functools.reduce(torch.mul, others)
        grams[place] = factor.mT @ factor


def factor_gradients(weight: Tensor, factors: Sequence[Tensor]) -> Iterator[Tensor]:
    r"""Yield the gradient of :math:`\frac12\|W - [\![A]\!]\|^2` by one factor after another, in an endless cycle.

    A factor may be changed in place before the next gradient is requested, as in `normal_equations`. A single factor is
    the tensor.
    """
    if len(factors) == 1:
        while True:
            yield factors[0] - weight
    stacked = weight.ndim > len(factors)
    minus_product = torch.baddbmm if stacked else torch.addmm
    if len(factors) == 2:
        # The same as `normal_equations` in fewer calls: for a small weight, a call's overhead exceeds its product.
        product = torch.bmm if stacked else torch.mm
        left, right = factors
        turned, left_turned, right_turned = weight.mT, left.mT, right.mT
        while True:
            yield minus_product(product(weight, right), left, product(right_turned, right), beta=-1)
            yield minus_product(product(turned, left), right, product(left_turned, left), beta=-1)
    while True:
        for factor, (projected, gram) in zip(factors, normal_equations(weight, factors), strict=True):
            yield minus_product(projected, factor, gram, beta=-1)


def refit(weight: Tensor, factors: Mapping[str, Tensor]) -> Factors:
    """CP factors near to ``weight``, by alternating least squares from ``factors``.

    It makes at most 30 sweeps over the factors, until a sweep gains less than 0.01 % of the error. The length of each
    term is then split evenly over its factors, as in `CP.decompose`.
    """
    working = weight.to(torch.promote_types(weight.dtype, torch.float32))
    current = {key: factor.to(working.dtype, copy=True) for key, factor in factors.items()}
    before = float("inf")
    for _ in range(_SWEEPS):
        for factor, (projected, gram) in zip(
            current.values(), normal_equations(working, list(current.values())), strict=True
        ):
            # A proximal term to the last value makes the equations solvable and, unlike a ridge, never increases the
            # error.
            strength = 10 * torch.finfo(working.dtype).eps * gram.trace().clamp_min(1e-12)
            ridge = strength * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
            factor.copy_(torch.linalg.solve(gram + ridge, projected + strength * factor, left=False))
        error = (working - _CP.compose(current, working.shape)).square().sum().item()
        if not error < (1 - _GAIN) * before:
            break
        before = error
    lengths = torch.stack([factor.norm(dim=0) for factor in current.values()])
    tiny = torch.finfo(working.dtype).tiny
    common = lengths.log().mean(dim=0).exp()
    return {
        key: (factor * (common / length.clamp_min(tiny))).to(weight.dtype)
        for (key, factor), length in zip(current.items(), lengths, strict=True)
    }


def _khatri_rao(left: Tensor, right: Tensor) -> Tensor:
    return (left.unsqueeze(-2) * right.unsqueeze(-3)).flatten(-3, -2)
