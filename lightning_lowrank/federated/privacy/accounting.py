"""Privacy accounting of subsampled Gaussian mechanisms, by dp-accounting."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.configuration import check_choice, check_number
from lightning_lowrank.extras import import_extra

Sampling = Literal["poisson", "fixed"]
Accountant = Literal["rdp", "pld"]

_TOLERANCE = 1e-4


@functools.cache
def library() -> Any:
    """The package dp-accounting, imported at first use because its import is slow.

    Raises:
        MisconfigurationException: If it is not installed.
    """
    found = import_extra("dp_accounting", "differential privacy", "privacy")
    for module in ("dp_accounting.pld", "dp_accounting.rdp.rdp_privacy_accountant"):
        import_extra(module, "differential privacy", "privacy")
    return found


@dataclass(frozen=True)
class Mechanism:
    """One release of a sum of clipped contributions with Gaussian noise.

    Args:
        noise_multiplier: Standard deviation of the sum's noise over the clipping norm, above 0.
        sampled: How many contribute: on average (Poisson sampling), or exactly (fixed size).
        population: From how many they are drawn.
        sampling: ``"poisson"``: each contributes on its own, with chance ``sampled / population``. Neighbours differ by
            one that is added or removed. ``"fixed"``: just ``sampled`` are drawn without replacement. Neighbours differ
            by one that is replaced, which moves the sum by twice the clipping norm.

    Example:
        >>> mechanism = Mechanism(noise_multiplier=1.1, sampled=10, population=1000)
        >>> round(mechanism.epsilon(steps=100, delta=1e-5), 3)
        0.956
    """

    noise_multiplier: float
    sampled: int
    population: int
    sampling: Sampling = "poisson"

    @property
    def event(self) -> Any:
        """One release as an event of dp-accounting."""
        dp_accounting = library()
        if self.sampling == "fixed":
            # dp-accounting's noise multiplier is relative to the sensitivity, which is 2 clip if a contribution is
            # replaced.
            gaussian = dp_accounting.GaussianDpEvent(self.noise_multiplier / 2)
            if self.sampled >= self.population:
                return gaussian
            return dp_accounting.SampledWithoutReplacementDpEvent(self.population, self.sampled, gaussian)
        gaussian = dp_accounting.GaussianDpEvent(self.noise_multiplier)
        if self.sampled >= self.population:
            return gaussian
        return dp_accounting.PoissonSampledDpEvent(self.sampled / self.population, gaussian)

    def accountant(self, kind: Accountant) -> Any:
        """An empty accountant of dp-accounting for this mechanism."""
        dp_accounting = library()
        relations = dp_accounting.NeighboringRelation
        relation = relations.REPLACE_ONE if self.sampling == "fixed" else relations.ADD_OR_REMOVE_ONE
        kinds = {"rdp": dp_accounting.rdp.RdpAccountant, "pld": dp_accounting.pld.PLDAccountant}
        return kinds[kind](neighboring_relation=relation)

    def epsilon(self, steps: int, delta: float, accountant: Accountant = "rdp") -> float:
        """The ε of ``steps`` releases at a given δ."""
        return total_epsilon([(self, steps)], delta, accountant)


def total_epsilon(releases: Iterable[tuple[Mechanism, int]], delta: float, accountant: Accountant = "rdp") -> float:
    """The total ε at a given δ of several mechanisms on the same samples, which must share one sampling.

    Args:
        releases: Mechanisms, each with its number of releases.
        delta: The δ.
        accountant: Which accountant.

    Example:
        >>> one, other = Mechanism(1.1, 10, 1000), Mechanism(2.0, 20, 1000)
        >>> round(total_epsilon([(one, 100), (other, 50)], delta=1e-5), 3)
        0.988
    """
    counted = tuple((mechanism, steps) for mechanism, steps in releases if steps > 0)
    if not counted:
        return 0.0
    if accountant == "pld":
        return _composed(counted, delta)
    orders, _ = _renyi(counted[0][0])
    divergences = sum(steps * _renyi(mechanism)[1] for mechanism, steps in counted)
    return float(library().rdp.rdp_privacy_accountant.compute_epsilon(orders, divergences, delta)[0])


@functools.lru_cache(maxsize=4096)
def _renyi(mechanism: Mechanism) -> tuple[Any, Any]:
    """The Rényi divergences of one release, cached: they add up over releases and are slow to compute."""
    accountant = mechanism.accountant("rdp")
    with _quiet():
        accountant.compose(mechanism.event)
    return accountant.orders, accountant.rdp


@functools.lru_cache(maxsize=4096)
def _composed(releases: tuple[tuple[Mechanism, int], ...], delta: float) -> float:
    accountant = releases[0][0].accountant("pld")
    for mechanism, steps in releases:
        accountant.compose(library().SelfComposedDpEvent(mechanism.event, steps))
    return float(accountant.get_epsilon(delta))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence dp-accounting's warnings about skipped Rényi orders; skipping never makes ε smaller than it is."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def noise_for(
    target: float, delta: float, runs: Iterable[tuple[Mechanism, int]], accountant: Accountant = "rdp"
) -> float:
    """The smallest noise multiplier, to 1e-4, with which no run costs more than ``target``.

    Args:
        target: The ε that none may exceed.
        delta: Its δ.
        runs: Mechanisms, whose own noise multiplier does not count, each with its number of releases.
        accountant: Which accountant.

    Raises:
        MisconfigurationException: If no noise is enough.
    """
    distinct = {(dataclasses.replace(mechanism, noise_multiplier=1.0), steps) for mechanism, steps in runs if steps}
    noise = 0.0
    while distinct:
        costs = {run: run[0].epsilon(run[1], delta, accountant) for run in distinct} if not noise else {}
        worst, steps = max(costs, key=costs.__getitem__) if costs else next(iter(distinct))
        noise = max(noise, _calibrated(worst, steps, target, delta, accountant))
        distinct = {
            (mechanism, steps)
            for mechanism, steps in distinct
            if dataclasses.replace(mechanism, noise_multiplier=noise).epsilon(steps, delta, accountant) > target
        }
    return noise


def _calibrated(mechanism: Mechanism, steps: int, target: float, delta: float, accountant: Accountant) -> float:
    dp_accounting = library()

    def event(noise: float) -> Any:
        # Brent's method begins at 0, which is no valid noise multiplier.
        if noise <= 0:
            return dp_accounting.NonPrivateDpEvent()
        of_one = dataclasses.replace(mechanism, noise_multiplier=noise).event
        return dp_accounting.SelfComposedDpEvent(of_one, steps)

    try:
        with _quiet():
            noise = dp_accounting.calibrate_dp_mechanism(
                lambda: mechanism.accountant(accountant),
                event,
                target,
                delta,
                dp_accounting.LowerEndpointAndGuess(0.05, 1.0),
                tol=_TOLERANCE,
            )
    except dp_accounting.mechanism_calibration.NoBracketIntervalFoundError as error:
        raise MisconfigurationException(
            f"no noise keeps {steps} releases within target_epsilon={target:g} at delta={delta:g}: raise one of them."
        ) from error
    while dataclasses.replace(mechanism, noise_multiplier=noise).epsilon(steps, delta, accountant) > target:
        noise += _TOLERANCE
    return float(noise)


def check_budget(
    noise_multiplier: float | None, target_epsilon: float | None, delta: float, accountant: Accountant
) -> None:
    """Check the arguments of a privacy budget.

    Raises:
        MisconfigurationException: If neither noise nor ε is given, or a number is out of range.
    """
    library()
    check_choice("accountant", accountant, Accountant)
    check_number("delta", delta, above=0, below=1)
    if noise_multiplier is None and target_epsilon is None:
        raise MisconfigurationException(
            "give noise_multiplier (the noise over the clipping norm), target_epsilon (which determines the noise), or"
            " both: then the noise is as given, and the run ends before target_epsilon is exceeded."
        )
    if noise_multiplier is not None:
        check_number("noise_multiplier", noise_multiplier, above=0)
    if target_epsilon is not None:
        check_number("target_epsilon", target_epsilon, above=0)
