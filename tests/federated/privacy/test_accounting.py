"""ε is dp-accounting's, whatever way it is asked for there."""

import dp_accounting
import pytest
from dp_accounting import dp_event_builder
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from scipy.optimize import brentq
from scipy.stats import norm

from lightning_lowrank import ClientPrivacy, DifferentialPrivacy
from lightning_lowrank.federated.privacy import Mechanism
from lightning_lowrank.federated.privacy.accounting import _renyi, noise_for, total_epsilon

SETTINGS = [
    (Mechanism(1.1, 10, 1000), 100, 1e-5),
    (Mechanism(0.8, 64, 60000), 2000, 1e-5),
    (Mechanism(1.0, 1, 6), 40, 1e-3),
    (Mechanism(4.0, 100, 100), 30, 1e-6),
    (Mechanism(2.0, 50, 100), 1, 1e-5),
    (Mechanism(1.5, 3, 20), 7, 1e-2),
    (Mechanism(6.0, 1000, 3000), 5000, 1e-7),
    (Mechanism(2.0, 10, 1000, "fixed"), 50, 1e-5),
    (Mechanism(3.0, 20, 20, "fixed"), 12, 1e-5),
    (Mechanism(5.0, 7, 30, "fixed"), 200, 1e-4),
]


def of_the_library(mechanism: Mechanism, steps: int, delta: float, kind: type) -> float:
    """Return ε as one who knows dp-accounting alone would find it: step by step, by a ledger."""
    fixed = mechanism.sampling == "fixed"
    relations = dp_accounting.NeighboringRelation
    accountant = kind(neighboring_relation=relations.REPLACE_ONE if fixed else relations.ADD_OR_REMOVE_ONE)
    # Of z over what one neighbour changes: the clipping norm, or twice that.
    release = dp_accounting.GaussianDpEvent(mechanism.noise_multiplier / (2 if fixed else 1))
    if mechanism.sampled < mechanism.population:
        release = (
            dp_accounting.SampledWithoutReplacementDpEvent(mechanism.population, mechanism.sampled, release)
            if fixed
            else dp_accounting.PoissonSampledDpEvent(mechanism.sampled / mechanism.population, release)
        )
    builder = dp_event_builder.DpEventBuilder()
    for _ in range(steps):
        builder.compose(release)
    accountant.compose(builder.build())
    return accountant.get_epsilon(delta)


# The library takes longest for sampling without replacement.
@pytest.mark.parametrize(
    ("mechanism", "steps", "delta"),
    [
        pytest.param(*each, marks=pytest.mark.slow if number in (4, 7, 9) else ())
        for number, each in enumerate(SETTINGS)
    ],
)
def test_epsilon_is_the_librarys(mechanism, steps, delta):
    found = mechanism.epsilon(steps, delta)
    assert found == pytest.approx(of_the_library(mechanism, steps, delta, RdpAccountant), abs=1e-6)
    assert 0 < found < 1000


@pytest.mark.slow
@pytest.mark.parametrize(("mechanism", "steps", "delta"), SETTINGS[:7])
@pytest.mark.nightly
def test_epsilon_by_loss_distributions_is_the_librarys(mechanism, steps, delta):
    found = mechanism.epsilon(steps, delta, "pld")
    assert found == pytest.approx(of_the_library(mechanism, steps, delta, PLDAccountant), abs=1e-6)
    assert found <= mechanism.epsilon(steps, delta) + 1e-6


@pytest.mark.parametrize(
    "kind", [pytest.param("rdp", marks=pytest.mark.slow), pytest.param("pld", marks=pytest.mark.slow)]
)
@pytest.mark.nightly
def test_epsilon_of_several_mechanisms_is_the_librarys(kind):
    releases = [(Mechanism(1.1, 10, 1000), 100), (Mechanism(2.0, 20, 1000), 50), (Mechanism(1.0, 40, 40), 1)]
    accountant = {"rdp": RdpAccountant, "pld": PLDAccountant}[kind]()
    for mechanism, steps in releases:
        release = dp_accounting.GaussianDpEvent(mechanism.noise_multiplier)
        if mechanism.sampled < mechanism.population:
            release = dp_accounting.PoissonSampledDpEvent(mechanism.sampled / mechanism.population, release)
        accountant.compose(release, steps)
    found = total_epsilon(releases, 1e-5, kind)
    assert found == pytest.approx(accountant.get_epsilon(1e-5), abs=1e-6)
    costs = [mechanism.epsilon(steps, 1e-5, kind) for mechanism, steps in releases]
    assert max(costs) < found < sum(costs)


def exact(sensitivity_over_noise: float, delta: float) -> float:
    """Return the exact ε of a Gaussian mechanism (Balle and Wang, ICML 2018, Theorem 8)."""
    ratio = sensitivity_over_noise

    def excess(epsilon):
        first = norm.cdf(ratio / 2 - epsilon / ratio)
        return first - norm.cdf(-ratio / 2 - epsilon / ratio) * 2.718281828459045**epsilon - delta

    return brentq(excess, 0, 500)


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_what_a_neighbour_changes(sampling):
    # All take part: adding one moves the sum by the clipping norm, replacing one by twice that.
    moved = 2 if sampling == "fixed" else 1
    found = Mechanism(3.0, 20, 20, sampling).epsilon(1, 1e-5)
    bound = exact(moved / 3.0, 1e-5)
    assert bound <= found < 1.35 * bound


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
@pytest.mark.nightly
def test_noise_is_the_least_that_will_do(sampling):
    runs = [(Mechanism(1.0, 5, 100, sampling), 20), (Mechanism(1.0, 5, 50, sampling), 30)]
    noise = noise_for(3.0, 1e-4, runs)

    def cost(noise):
        return max(Mechanism(noise, each.sampled, each.population, sampling).epsilon(n, 1e-4) for each, n in runs)

    assert cost(noise) <= 3.0 < cost(noise - 3e-4)


def test_nothing_costs_nothing():
    assert SETTINGS[0][0].epsilon(0, 1e-5) == 0


@pytest.mark.parametrize("kind", [ClientPrivacy, DifferentialPrivacy])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "give noise_multiplier"),
        ({"noise_multiplier": 0.0}, r"noise_multiplier.*0\.0"),
        ({"target_epsilon": -1.0}, r"target_epsilon.*-1\.0"),
        ({"noise_multiplier": 1.0, "delta": 1.0}, r"delta.*1\.0"),
        ({"noise_multiplier": 1.0, "clip": 0.0}, r"clip.*0\.0"),
        ({"noise_multiplier": 1.0, "accountant": "prv"}, r"accountant.*'pld'.*'prv'"),
    ],
)
def test_budgets_that_are_none(kind, arguments, said):
    with pytest.raises(MisconfigurationException, match=said):
        kind(**arguments)


def test_a_budget_that_no_noise_keeps():
    with pytest.raises(MisconfigurationException, match=r"10.*target_epsilon=1e-09"):
        noise_for(1e-9, 1e-9, [(Mechanism(1.0, 10, 10), 10)])


def test_without_the_library(monkeypatch):
    import sys

    from lightning_lowrank.federated.privacy import accounting

    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    accounting.library.cache_clear()
    with pytest.raises(MisconfigurationException, match=r"privacy.*\.\[privacy\]"):
        ClientPrivacy(noise_multiplier=1.0)
    monkeypatch.undo()
    accounting.library.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(("mechanism", "steps", "delta"), SETTINGS[:4])
def test_opacus_finds_the_same(mechanism, steps, delta):
    accountants = pytest.importorskip("opacus.accountants")
    accountant = accountants.RDPAccountant()
    accountant.history = [(mechanism.noise_multiplier, mechanism.sampled / mechanism.population, steps)]
    orders = _renyi(mechanism)[0]
    assert mechanism.epsilon(steps, delta) == pytest.approx(
        accountant.get_epsilon(delta, alphas=list(orders)), rel=1e-2
    )
