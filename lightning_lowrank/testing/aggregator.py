"""`check_aggregator`: the contract that every aggregator must keep."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_lowrank.aggregation import Aggregator
from lightning_lowrank.testing.require import generator_states, require, seed_generators

__all__ = ["check_aggregator"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)
_WILD = (1e3, -1e9, 1e30)

Tensors = dict[str, Tensor]


def check_aggregator(
    aggregator: Aggregator,
    *,
    byzantine: int = 0,
    arrivals: int = 11,
    weighted: bool = False,
    draws: bool = False,
    device: torch.device | str = "cpu",
) -> None:
    """Check that an aggregator keeps the contract of `Aggregator`.

    Arrivals are read when they are added, have common names, and come one by one, in stacks or as changes. The result
    has their types, shapes and device, does not depend on their order, is the same when it is asked for again, and
    leaves the global generators alone. Equal arrivals give that value, and one arrival gives exactly itself. Arrivals
    can be saved, restored, and pooled by several processes. `Aggregator.fresh` has the arguments without the arrivals.
    Up to ``byzantine`` arrivals of any size, or that are not finite, do not take the result out of bounds.

    Args:
        aggregator: The aggregator to check, without arrivals. One arrival has to be enough for it.
        byzantine: Number of arbitrary arrivals that it withstands. Default 0: their effect is not checked.
        arrivals: Number of arrivals in the check, 3 or more.
        weighted: Whether the arrivals' weights count. Otherwise they must make no difference.
        draws: Whether it draws, so that another seed gives another result. Otherwise every seed gives the same.
        device: Where the arrivals are. Default: the CPU.

    Raises:
        AssertionError: If the contract is broken. The message names the aggregator and what it did.

    Example:
        >>> from lightning_lowrank.aggregation import TrimmedMean, WeightedMean
        >>> check_aggregator(TrimmedMean(0.3), byzantine=3)
        >>> check_aggregator(WeightedMean(), weighted=True)
        >>> check_aggregator(WeightedMean(), weighted=True, byzantine=1)
        Traceback (most recent call last):
        AssertionError: WeightedMean() is carried away by 1 of 11 arrivals...
    """
    check = _Check(aggregator, byzantine, arrivals, torch.device(device))
    try:
        with isolate_rng():
            check.form()
        check.reading()
        check.order()
        check.equal_and_single()
        check.weights(weighted)
        check.seeds(draws)
        check.continuing()
        check.fresh()
        if byzantine:
            check.wild()
    except AssertionError as error:
        raise AssertionError(f"{aggregator!r} {error}.") from error


class _Peers:
    """Simulates two processes: this one, and one with other arrivals."""

    def __init__(self, device: torch.device, there: Callable[[_Peers], None]) -> None:
        self.root_device = device
        self._log: list[Any] = []
        self._recording = True
        # The other process runs first and alone, to record the values that it contributes.
        there(self)
        self._recording, self._answers = False, iter(self._log)

    def gather(self, value: Any) -> list[Any]:
        if self._recording:
            self._log.append(value)
            return [value]
        return [next(self._answers), value]

    def sum(self, tensor: Tensor) -> Tensor:
        if self._recording:
            self._log.append(tensor.clone())
            return tensor.clone()
        return tensor + next(self._answers)


class _Check:
    def __init__(self, aggregator: Aggregator, byzantine: int, arrivals: int, device: torch.device) -> None:
        self.aggregator, self.byzantine, self.device = aggregator, byzantine, device
        drawn = torch.Generator().manual_seed(3)
        self.weights_of = [float(1 + place % 4) for place in range(arrivals)]
        self.sent = [
            {
                "matrix": 1 + torch.randn(30, 20, generator=drawn).to(device),
                "number": torch.randn((), generator=drawn, dtype=torch.float64).to(device),
                "half": torch.randn(5, generator=drawn).bfloat16().to(device),
                "empty": torch.zeros(0, 4, device=device),
                "batches": torch.tensor(7 + place % 3, device=device),
            }
            for place in range(arrivals)
        ]

    def filled(self, sent: Sequence[Mapping[str, Tensor]], weights: Sequence[float] | None = None) -> Aggregator:
        rule = self.aggregator.fresh()
        for tensors, weight in zip(sent, weights or [1.0] * len(sent), strict=True):
            rule.add(tensors, weight)
        return rule

    def result(
        self, sent: Sequence[Mapping[str, Tensor]], weights: Sequence[float] | None = None, seed: int = 0
    ) -> Tensors:
        rule = self.filled(sent, weights)
        rule.prepare({}, seed)
        return rule.result()

    def form(self) -> None:
        states = seed_generators(0)
        copies = [{name: value.clone() for name, value in tensors.items()} for tensors in self.sent]
        rule = self.filled(self.sent)
        rule.prepare({}, 0)
        found = rule.result()
        require(list(found) == list(self.sent[0]), f"returns {list(found)} for tensors named {list(self.sent[0])}")
        for name, value in self.sent[0].items():
            form = [(each.dtype, each.shape, each.device.type) for each in (found[name], value)]
            require(form[0] == form[1], f"returns {name} as {form[0]} for arrivals of {form[1]}")
        require(_same(rule.result(), found), "returns another result when called again")
        for value in found.values():
            value.zero_()
        require(not _same(rule.result(), found), "returns tensors that its arrivals share")
        require(
            all(_same(sent, copy) for sent, copy in zip(self.sent, copies, strict=True)),
            "changes its arrivals",
        )
        require(generator_states() == states, "changes the global random number generators")
        require(rule.arrivals == len(self.sent), f"counts {rule.arrivals} arrivals of {len(self.sent)}")
        require(rule.weight == len(self.sent), f"counts a weight of {rule.weight} of {len(self.sent)}")

    def reading(self) -> None:
        expected = self.result(self.sent, self.weights_of)
        live = {name: value.clone() for name, value in self.sent[0].items()}
        rule = self.aggregator.fresh()
        for tensors, weight in zip(self.sent, self.weights_of, strict=True):
            for name, value in tensors.items():
                live[name].copy_(value)
            rule.add(live, weight)
        rule.prepare({}, 0)
        require(_same(rule.result(), expected), "does not read an arrival when it is added")
        stacks = {name: torch.stack([tensors[name] for tensors in self.sent]) for name in live}
        rule = self.aggregator.fresh()
        rule.add_stacks(stacks, self.weights_of)
        rule.prepare({}, 0)
        require(_close(rule.result(), expected), "gives another result for stacked arrivals")
        rule = self.aggregator.fresh()
        self.add_changes(rule, range(len(self.sent)))
        rule.prepare({}, 0)
        require(_close(rule.result(), expected), "gives another result for arrivals as changes")
        try:
            rule.add({"other": torch.zeros(1, device=self.device)}, 1.0)
        except KeyError:
            return
        require(False, "accepts arrivals of different names; it should raise KeyError")

    def add(self, rule: Aggregator, places: Iterable[int]) -> None:
        for place in places:
            rule.add(self.sent[place], self.weights_of[place])

    def add_changes(self, rule: Aggregator, places: Iterable[int]) -> None:
        """Add the arrivals at these places as changes, of several origins and none."""
        for place in places:
            tensors = self.sent[place]
            origin = {} if place % 5 == 1 else {"matrix": self.sent[place // 4]["matrix"]}
            change = {**tensors, **{name: tensors[name] - origin[name] for name in origin}}
            rule.add_change(change, origin, self.weights_of[place])

    def order(self) -> None:
        expected = self.result(self.sent, self.weights_of)
        for shift in (1, len(self.sent) // 2):
            turned = [*range(shift, len(self.sent)), *range(shift)][::-1]
            found = self.result([self.sent[each] for each in turned], [self.weights_of[each] for each in turned])
            require(_close(found, expected), "depends on the order of arrivals")

    def equal_and_single(self) -> None:
        same = self.result([self.sent[0]] * len(self.sent), self.weights_of)
        require(_close(same, self.sent[0]), "does not give back the value of equal arrivals")
        for dtype in _DTYPES:
            value = (10 * torch.randn(6, generator=torch.Generator().manual_seed(1))).to(dtype).to(self.device)
            found = self.result([{"w": value}], [0.1])["w"]
            same_type = found.dtype == dtype and torch.equal(found, value)
            require(same_type, f"does not give back a single arrival of {dtype} exactly")

    def weights(self, weighted: bool) -> None:
        equal, other = self.result(self.sent), self.result(self.sent, self.weights_of)
        if weighted:
            require(not _close(equal, other), "ignores the weights of arrivals, but weighted=True")
        else:
            require(_same(equal, other), "depends on the weights of arrivals, but weighted=False")

    def seeds(self, draws: bool) -> None:
        found = [self.result(self.sent, seed=seed) for seed in range(4)]
        if draws:
            same = all(_close(each, found[0]) for each in found)
            require(not same, "gives the same for the seeds 0 to 3, but draws=True")
        else:
            require(all(_same(each, found[0]) for each in found), "depends on the seed, but draws=False")

    def continuing(self) -> None:
        expected, cut = self.result(self.sent, self.weights_of), len(self.sent) // 2
        for kind, add in (("arrivals", self.add), ("arrivals as changes", self.add_changes)):
            rules = whole, part, resumed = [self.aggregator.fresh() for _ in range(3)]
            add(whole, range(len(self.sent)))
            add(part, range(cut))
            file = io.BytesIO()
            torch.save(part.state_dict(), file)
            file.seek(0)
            resumed.load_state_dict(torch.load(file, weights_only=True), self.device)
            require(resumed.arrivals == cut, f"has {resumed.arrivals} arrivals of {cut} after it is restored")
            for rule in (part, resumed):
                add(rule, range(cut, len(self.sent)))
            for rule in rules:
                rule.prepare({}, 0)
            after = f"gives another result for {kind} when its state is saved"
            require(_same(part.result(), whole.result()), after)
            require(_same(resumed.result(), whole.result()), f"{after} and restored")
            for here in (cut, 0):
                there, mine = self.aggregator.fresh(), self.aggregator.fresh()
                add(there, range(here))
                add(mine, range(here, len(self.sent)))
                mine.pool(_Peers(self.device, there.pool) if here else _Alone(self.device))
                mine.prepare({}, 0)
                require(mine.arrivals == len(self.sent), f"loses {kind} when processes pool them")
                require(_close(mine.result(), expected), f"gives another result when two processes pool {kind}")

    def fresh(self) -> None:
        rule = self.filled(self.sent)
        again = rule.fresh()
        require(type(again) is type(rule), f"makes a fresh {type(again).__name__}")
        require(again.arrivals == 0 and again.weight == 0, "has arrivals when it is fresh")
        require(rule.arrivals == len(self.sent), "loses its arrivals when a fresh one is made")
        require(repr(again) == repr(self.aggregator), f"loses arguments when it is fresh: {again!r}")

    def wild(self) -> None:
        honest = self.sent[: len(self.sent) - self.byzantine]
        for size in (*_WILD, torch.inf, torch.nan):
            for count in (1, self.byzantine):
                lost = [
                    {name: _filled(value, size) for name, value in tensors.items()} for tensors in self.sent[-count:]
                ]
                found = self.result([*lost, *self.sent[: len(self.sent) - count]])
                for name, value in found.items():
                    if not value.numel():
                        continue
                    values = torch.stack([tensors[name] for tensors in honest]).double()
                    bound = 4 * float(values.abs().max()) * len(values) ** 0.5
                    within = bool(value.double().isfinite().all()) and float(value.abs().max()) <= bound
                    require(within, f"is carried away by {count} of {len(self.sent)} arrivals of {size:g}, in {name!r}")


class _Alone:
    def __init__(self, device: torch.device) -> None:
        self.root_device = device

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


def _filled(value: Tensor, size: float) -> Tensor:
    if value.is_floating_point():
        return torch.full_like(value, size)
    return torch.full_like(value, 2**60 if size > 0 else -(2**60))


def _same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items())


def _close(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    def alike(value: Tensor, other: Tensor) -> bool:
        relative = 1e-2 if value.dtype.itemsize == 2 else 1e-5
        return torch.allclose(value.double(), other.double(), rtol=relative, atol=1e-6)

    return all(alike(value, second[name]) for name, value in first.items())
