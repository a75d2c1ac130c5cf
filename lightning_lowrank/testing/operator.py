"""`check_operator`: the contract that every aggregation-broadcast operator must keep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_lowrank.internals.torch import TorchDispatchMode
from lightning_lowrank.lora import Broadcast, LowRankPair, Operator
from lightning_lowrank.seeding import derive_seed
from lightning_lowrank.testing.require import generator_states, require, seed_generators

__all__ = ["check_operator"]

_SEED = 5
_NAMES: tuple[Literal["B", "A"], ...] = ("B", "A")
_WEIGHTS = (3, 1, 0, 4)
_EQUAL, _MIXED = (2, 2, 2, 2), (1, 5, 3, 5)
_SHAPE = (7, 5)
_WIDE = (300, 200)
_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


def check_operator(
    operator: Operator, *, exact: bool = False, rounds: Iterable[int] = (0, 1), device: torch.device | str = "cpu"
) -> None:
    """Check that an operator keeps the contract of `Operator`.

    Clients receive pairs of the ranks and scalings that are asked for, in their dtype and on their device. One client
    gets its own product back, and so does a client that has all the weight. Only the proportions of the weights
    matter, and the order of the clients does not. The draws depend on the seed alone: runs repeat bit for bit, and
    the global generators are left alone. Inputs are neither changed nor shared. No matrix of the weight's size is built
    if the factors are narrow. The operator's declarations are true: which factors are trained and cross the wire,
    whether the base weight changes, whether pairs are common or drawn again. Different ranks are aggregated if
    ``mixed_ranks`` is true and refused if it is false. One round can follow another.

    Args:
        operator: The operator to check.
        exact: Whether the server's effective update is the weighted mean of the clients' products. Default: not
            checked.
        rounds: The rounds to check. By default the first two, for operators that alternate.
        device: Where the clients' factors are. Default: the CPU.

    Raises:
        AssertionError: If the contract is broken. The message names the operator and what it did.

    Example:
        >>> from lightning_lowrank.lora import FLoRA, ProductSum
        >>> check_operator(ProductSum())
        >>> check_operator(FLoRA(), exact=True)
        >>> check_operator(ProductSum(), exact=True)
        Traceback (most recent call last):
        AssertionError: ProductSum() in round 0: the server's effective update is not the mean of the products...
    """
    for round in rounds:
        check = _Check(operator, round, exact, torch.device(device))
        try:
            check.what_it_says()
            check.inputs()
            check.what_is_received()
            check.fresh_pairs()
            check.one_client()
            check.weights_and_order()
            check.repetition()
            check.size()
            check.ranks()
            check.layers()
            check.next_round()
        except AssertionError as error:
            raise AssertionError(f"{operator!r} in round {round}: {error}.") from error


class _Check:
    def __init__(self, operator: Operator, round: int, exact: bool, device: torch.device) -> None:
        self.operator, self.round, self.exact, self.device = operator, round, exact, device
        self.mixed = _MIXED if operator.mixed_ranks else _EQUAL

    def clients(
        self,
        ranks: Sequence[int],
        *,
        alpha: float | None = None,
        shape: tuple[int, int] = _SHAPE,
        dtype: torch.dtype = torch.float64,
    ) -> list[LowRankPair]:
        """Clients' pairs after a round's training; a factor that is not trained is the same in all of them."""
        draws = torch.Generator().manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=draws, dtype=torch.float64)

        largest, trained = max(ranks), self.operator.trained(self.round)
        common = LowRankPair(normal(shape[0], largest), normal(largest, shape[1]))
        if self.operator.redraws:
            common = self.operator.fresh(shape, largest, round=self.round, seed=_SEED, dtype=torch.float64)
        pairs = []
        for rank in ranks:
            scaling = 0.5 if alpha is None else alpha / rank
            B, A = normal(shape[0], rank), normal(rank, shape[1])
            if "B" not in trained:
                # After an earlier round's broadcast, B contains the ratio of the scalings.
                ratio = 1.0 if alpha is None or self.operator.redraws else (alpha / largest) / scaling
                B = common.B[:, :rank] * ratio
            if "A" not in trained:
                A = common.A[:rank].clone()
            pairs.append(LowRankPair(B.to(dtype).to(self.device), A.to(dtype).to(self.device), scaling))
        return pairs

    def run(self, pairs: Sequence[LowRankPair], weights: Any = _WEIGHTS, **settings: Any) -> Broadcast:
        try:
            return self.operator.aggregate(pairs, weights, **{"round": self.round, "seed": _SEED, **settings})
        except Exception as error:
            ranks, further = [pair.rank for pair in pairs], "".join(f", {key}={settings[key]}" for key in settings)
            raise AssertionError(
                f"it refuses clients of ranks {ranks} (mixed_ranks is {self.operator.mixed_ranks}){further}: {error!r}"
            ) from error

    def what_it_says(self) -> None:
        operator, names = self.operator, set(_NAMES)
        trained, up = operator.trained(self.round), operator.sent_up(self.round)
        down, of_change = operator.sent_down(self.round), operator.sent_down_of_change(self.round)
        require(bool(trained) and trained <= names, f"trained is {set(trained)}, not B, A or both")
        require(bool(up) and up <= trained, f"sent_up is {set(up)}, and clients train {set(trained)}")
        require(down <= names, f"sent_down is {set(down)}, not some of B and A")
        require(
            bool(of_change) == operator.changes_base and of_change <= names,
            f"sent_down_of_change is {set(of_change)}, and changes_base is {operator.changes_base}",
        )
        require(not (operator.redraws and down), f"redraws is true, and sent_down is {set(down)}")

        pairs = self.clients([3] * 4)
        result = self.run(pairs)
        change = result.change
        require(
            (change is not None) == operator.changes_base,
            f"changes_base is {operator.changes_base}, and change is {change}",
        )
        if operator.redraws:
            expected = self.fresh(3, round=self.round + 1, scaling=0.5)
            require(
                all(_same(pair, expected) for pair in result.clients),
                "redraws is true, and clients do not receive what fresh draws for the next round",
            )
        else:
            for name in names - down:
                both = zip(result.clients, pairs, strict=True)
                kept = all(torch.equal(getattr(received, name), getattr(own, name)) for received, own in both)
                require(kept, f"{name} is not sent down, and a client's {name} changes")
        if change is not None:
            for name in names - of_change:
                require(
                    torch.equal(getattr(change, name), getattr(pairs[0], name)),
                    f"{name} of the change is not sent down, and is not what the clients have",
                )
        if operator.broadcasts == "common":
            require(
                all(_same(pair, result.clients[0]) for pair in result.clients),
                "broadcasts is 'common', and clients of one rank receive different pairs",
            )

    def what_is_received(self) -> None:
        for alpha in (None, 6.0):
            for ranks in ((1,) * 4, _EQUAL, (5,) * 4, self.mixed):
                pairs = self.clients(ranks, alpha=alpha)
                result = self.run(pairs)
                self.received(result, ranks, [pair.scaling for pair in pairs])
                self.exactness(result, pairs)
            result = self.run(self.clients(self.mixed), ranks=self.mixed[::-1], scalings=[0.5, 0.25, 2.0, 1.0])
            self.received(result, self.mixed[::-1], [0.5, 0.25, 2.0, 1.0])
        for shape in ((6, 1), (1, 6), (1, 1), (4, 9)):
            pairs = self.clients([min(shape)] * 4, shape=shape)
            result = self.run(pairs)
            require(result.server.shape == shape, f"the server's pair is of a {result.server.shape} weight")
            self.exactness(result, pairs)

    def received(self, result: Broadcast, ranks: Sequence[int], scalings: Sequence[float]) -> None:
        found = [(pair.rank, pair.scaling, pair.shape) for pair in result.clients]
        wanted = [(rank, scaling, _SHAPE) for rank, scaling in zip(ranks, scalings, strict=True)]
        require(found == wanted, f"clients receive (rank, scaling, shape) {found}, and should receive {wanted}")
        require(result.server.shape == _SHAPE, f"the server's pair is of a {result.server.shape} weight")
        if self.operator.broadcasts == "common":
            for pair in result.clients:
                own = result.server.resized(pair.rank, pair.scaling, self.operator.absorbing(self.round))
                problem = "broadcasts is 'common', and a client does not get the server's"
                _require_close(_dense(pair), _dense(own), problem)
                for name in ("B", "A"):
                    problem = f"a client's {name} is not the server's at its scaling: absorbing() says what differs"
                    _require_close(getattr(pair, name).double(), getattr(own, name).double(), problem)

    def exactness(self, result: Broadcast, pairs: Sequence[LowRankPair]) -> None:
        if self.exact:
            mean = sum((w * _dense(p) for w, p in zip(_WEIGHTS, pairs, strict=True)), torch.zeros(())) / sum(_WEIGHTS)
            own = _effective(result, result.server)
            _require_close(own, mean, "the server's effective update is not the mean of the products")

    def fresh(self, rank: int, **settings: Any) -> LowRankPair:
        settings = {"round": self.round, "seed": _SEED, "dtype": torch.float64, "device": self.device, **settings}
        return self.operator.fresh(_SHAPE, rank, **settings)

    def fresh_pairs(self) -> None:
        pair, small = self.fresh(4, scaling=0.5), self.fresh(2, scaling=0.5)
        require((pair.rank, pair.shape, pair.scaling) == (4, _SHAPE, 0.5), "fresh ignores rank, shape or scaling")
        require(not _dense(pair).any(), "the product of a fresh pair is not zero")
        _require_close(small.B, pair.B[:, :2], "B of a smaller fresh pair is not the first columns of a larger one's")
        _require_close(small.A, pair.A[:2], "A of a smaller fresh pair is not the first rows of a larger one's")
        half = self.fresh(2, dtype=torch.bfloat16)
        require(half.B.dtype == half.A.dtype == torch.bfloat16, "fresh ignores dtype")
        require(not _same(pair, self.fresh(4, scaling=0.5, seed=_SEED + 1)), "fresh draws the same from another seed")

    def one_client(self) -> None:
        for dtype, tolerance in _TOLERANCES.items():
            for rank in (1, 3, 5):
                (pair,) = self.clients([rank], dtype=dtype)
                for clients in ([pair], [pair] * 3):
                    self.own_product(self.run(clients, None), pair, tolerance)
        pairs = self.clients([3] * 4)
        for client in range(4):
            result = self.run(pairs, [float(client == other) for other in range(4)])
            _require_close(
                _effective(result, result.server),
                _dense(pairs[client]),
                "the server's update is not the product of the client that has all the weight",
            )

    def own_product(self, result: Broadcast, pair: LowRankPair, tolerance: float) -> None:
        for after in (result.server, *result.clients):
            require(
                after.B.dtype == after.A.dtype == pair.B.dtype and after.B.device == after.A.device == pair.B.device,
                f"factors of {pair.B.dtype} on {pair.B.device} become {after.B.dtype} on {after.B.device}",
            )
            otherwise = f"one client or several equal ones of {pair.B.dtype} lose their product"
            _require_close(_effective(result, after), _dense(pair), otherwise, tolerance)

    def weights_and_order(self) -> None:
        pairs = self.clients(self.mixed)
        result = self.run(pairs)
        huge = torch.tensor([3e307, 1e307, 0.0, 4e307], dtype=torch.float64)
        for weights in ([0.375, 0.125, 0.0, 0.5], huge):
            self.equivalent(self.run(pairs, weights), result, range(4), "the scale of the weights matters")
        self.equivalent(self.run(pairs, None), self.run(pairs, [1] * 4), range(4), "no weights are not equal weights")
        order = [2, 0, 3, 1]
        other = self.run([pairs[client] for client in order], [_WEIGHTS[client] for client in order])
        self.equivalent(other, result, order, "the order of the clients matters")

    @staticmethod
    def equivalent(found: Broadcast, expected: Broadcast, order: Iterable[int], otherwise: str) -> None:
        _require_close(_effective(found, found.server), _effective(expected, expected.server), otherwise)
        for position, client in enumerate(order):
            own = _effective(expected, expected.clients[client])
            _require_close(_effective(found, found.clients[position]), own, otherwise)

    def repetition(self) -> None:
        pairs = self.clients(self.mixed)
        with isolate_rng():
            states = seed_generators(1)
            first = self.run(pairs)
            require(generator_states() == states, "it changes the global random number generators")
            seed_generators(2)
            again = self.run(pairs)
        _require_same(again, first, "a repeated run gives other numbers")

    def inputs(self) -> None:
        for dtype in (torch.float64, torch.float32):
            pairs = self.clients(self.mixed, dtype=dtype)
            for pair in pairs:
                pair.B.requires_grad_()
            before, weights = [(pair.B.detach().clone(), pair.A.clone()) for pair in pairs], torch.tensor(_WEIGHTS)
            result = self.run(pairs, weights)
            given = {tensor.untyped_storage().data_ptr() for pair in pairs for tensor in (pair.B, pair.A)}
            for pair in _pairs(result):
                for tensor in (pair.B, pair.A):
                    require(tensor.dtype == dtype, f"factors of {dtype} become {tensor.dtype}")
                    require(tensor.device == self.device, f"factors on {self.device} go to {tensor.device}")
                    require(tensor.untyped_storage().data_ptr() not in given, "a result shares memory with a client")
                    require(not tensor.requires_grad, "a result requires a gradient")
            unchanged = all(
                torch.equal(pair.B, B) and torch.equal(pair.A, A) for pair, (B, A) in zip(pairs, before, strict=True)
            )
            require(unchanged and weights.tolist() == list(_WEIGHTS), "it changes its inputs")

    def size(self) -> None:
        pairs = self.clients([2] * 4, shape=_WIDE)
        with _Largest() as largest:
            self.run(pairs)
        require(
            largest.numbers < min(_WIDE) ** 2,
            f"it builds a tensor of {largest.numbers} numbers for 4 clients of rank 2 and a {_WIDE} weight",
        )

    def ranks(self) -> None:
        if self.operator.mixed_ranks:
            B, A = torch.ones(7, 4, dtype=torch.float64), torch.ones(4, 5, dtype=torch.float64)
            previous = LowRankPair(B.to(self.device), A.to(self.device), 0.5)
            pairs = self.clients([1, 2])
            rank = self.run(pairs, None, previous=previous).server.rank
            require(rank == 4, f"the server's rank shrinks from 4 to {rank} where a round's clients have less")
            return
        self.refused("clients of different ranks", self.clients(_MIXED))
        self.refused("clients that are to receive different ranks", self.clients(_EQUAL), ranks=[2, 2, 2, 1])

    def refused(self, what: str, pairs: Sequence[LowRankPair], **settings: Any) -> None:
        try:
            self.operator.aggregate(pairs, round=self.round, seed=_SEED, **settings)
        except ValueError:
            return
        raise AssertionError(f"mixed_ranks is false, and it accepts {what}; it should raise ValueError")

    def layers(self) -> None:
        pairs = self.clients(self.mixed)
        (found,) = self.operator.aggregate_model(
            [{"layer": pair} for pair in pairs], _WEIGHTS, round=self.round, seed=_SEED
        ).values()
        expected = self.run(pairs, seed=derive_seed(_SEED, "layer"))
        _require_same(found, expected, "a layer in aggregate_model is not aggregated as one in aggregate")

    def next_round(self) -> None:
        result = self.run(self.clients(self.mixed, alpha=6.0))
        draws = torch.Generator().manual_seed(1)
        trained = []
        for pair in result.clients:
            factors = {"B": pair.B.clone(), "A": pair.A.clone()}
            for name in sorted(self.operator.trained(self.round + 1)):
                noise = torch.randn(factors[name].shape, generator=draws, dtype=torch.float64)
                factors[name] += noise.to(self.device)
            trained.append(LowRankPair(factors["B"], factors["A"], pair.scaling))
        after = self.run(trained, round=self.round + 1)
        require(bool(_effective(after, after.server).isfinite().all()), "the next round is not finite")
        self.exactness(after, trained)


class _Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that is created."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [
            tensor.numel()
            for tensor in (out if isinstance(out, (tuple, list)) else [out])
            if isinstance(tensor, Tensor)
        ]
        self.numbers = max([self.numbers, *made])
        return out


def _require_close(found: Tensor, expected: Tensor, otherwise: str, tolerance: float = 1e-7) -> None:
    away = (found - expected).abs().max().item()
    allowed = tolerance * (1 + expected.abs().max().item())
    require(away <= allowed, f"{otherwise}: the largest difference is {away:.3g}")


def _require_same(found: Broadcast, expected: Broadcast, otherwise: str) -> None:
    both = zip(_pairs(found), _pairs(expected), strict=True)
    require(all(_same(one, other) for one, other in both), otherwise)


def _pairs(result: Broadcast) -> list[LowRankPair]:
    return [*result.clients, result.server, *([] if result.change is None else [result.change])]


def _same(one: LowRankPair, other: LowRankPair) -> bool:
    return torch.equal(one.B, other.B) and torch.equal(one.A, other.A) and one.scaling == other.scaling


def _dense(pair: LowRankPair) -> Tensor:
    """A pair's scaled product, in float64 on the CPU."""
    return pair.scaling * (pair.B.detach().cpu().double() @ pair.A.detach().cpu().double())


def _effective(result: Broadcast, pair: LowRankPair) -> Tensor:
    """A pair's update of the base weight as it was before the round, the change of the base included."""
    return _dense(pair) if result.change is None else _dense(pair) + _dense(result.change)
