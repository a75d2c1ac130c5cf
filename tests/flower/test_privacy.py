"""Privacy between real sites: clients are protected by the server or by themselves, samples by their site."""

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.federated import client_states
from lightning_lowrank.federated.privacy import Mechanism
from tests.flower.helpers import COUNTING, reasons, run_on_sites, write_recipe

pytestmark = pytest.mark.slow
UNIFORM = {"weighting": "uniform"}


def of_clients(**arguments):
    return {"federated": {**UNIFORM, "privacy": {"noise_multiplier": 2.0, "secure": True, **arguments}}}


def of_samples(**arguments):
    given = {"noise_multiplier": 1.5, "secure": True, **arguments}
    return {"trainer": {"callbacks": [{"class_path": "DifferentialPrivacy", "init_args": given}]}}


@pytest.mark.nightly
def test_the_server_protects_clients(tmp_path):
    # Poisson sampling may draw none of three sites in a round.
    served, _ = run_on_sites(write_recipe(tmp_path, of_clients()), tmp_path)
    assert served.current_epoch == 4
    expected = Mechanism(2.0, 2, 3).epsilon(4, 1e-5)
    assert served.callback_metrics["privacy/epsilon"].item() == expected


@pytest.mark.nightly
def test_the_budget_ends_the_run(tmp_path):
    served, _ = run_on_sites(write_recipe(tmp_path, of_clients(target_epsilon=3.1)), tmp_path)
    rounds = served.current_epoch
    one = Mechanism(2.0, 2, 3)
    assert rounds == 3
    assert one.epsilon(rounds, 1e-5) <= 3.1 < one.epsilon(rounds + 1, 1e-5)


def test_sites_add_noise(tmp_path):
    settings = of_clients(sampling="fixed", noise_at="clients", noise_multiplier=20.0, clip=0.5)
    settings["federated"] |= {"min_clients": 2, "algorithm": {"class_path": "FedAvgM"}}
    served, _ = run_on_sites(write_recipe(tmp_path, settings), tmp_path)
    assert served.callback_metrics["federated/clients"] == 2
    # Noise of z C over the cohort's size is most of what the model has become.
    found = served.lightning_module.state_dict()["network.hidden.0.weight"].std().item()
    assert found > 20.0 * 0.5 / 2


def test_changed_integers_do_not_leave_a_site_that_adds_noise(tmp_path):
    """No norm bounds them, and the noise is of other numbers."""
    settings = of_clients(sampling="fixed", noise_at="clients", clip=0.5)
    settings["federated"] |= {"min_clients": 2}
    with pytest.raises(MisconfigurationException, match="no site made round 0"):
        run_on_sites(write_recipe(tmp_path, {**settings, "model": COUNTING}), tmp_path)
    assert "'network.usage' of int64" in reasons(tmp_path)[0]


@pytest.mark.parametrize(
    "settings",
    [
        of_clients(secure=False),
        of_clients(secure=False, sampling="fixed", noise_at="clients"),
        of_samples(secure=False),
    ],
)
@pytest.mark.nightly
def test_noise_that_others_know_is_refused(tmp_path, settings):
    with pytest.raises(MisconfigurationException) as told:
        run_on_sites(write_recipe(tmp_path, settings), tmp_path)
    assert "secure=True" in "; ".join([str(told.value), *reasons(tmp_path)])


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.nightly
def test_each_site_counts_its_own(tmp_path, fresh):
    served, _ = run_on_sites(write_recipe(tmp_path, of_samples()), tmp_path, fresh=fresh)
    assert served.current_epoch == 4
    steps = []
    for file in sorted((tmp_path / "state").glob("*.safetensors")):
        kept = client_states.load(file)
        steps.append(kept["client"].get("privacy", {}).get("steps", 0))
    assert len(steps) == 3
    assert sum(steps) == served.callback_metrics["federated/client_steps"]


def test_a_site_refuses_a_round_beyond_its_budget(tmp_path):
    served, _ = run_on_sites(write_recipe(tmp_path, of_samples(noise_multiplier=3.0)), tmp_path / "free")
    steps = [
        client_states.load(file)["client"].get("privacy", {}).get("steps", 0)
        for file in sorted((tmp_path / "free" / "state").glob("*.safetensors"))
    ]
    assert served.current_epoch == 4
    assert max(steps) > 0
    with pytest.raises(MisconfigurationException, match="no site made round"):
        run_on_sites(write_recipe(tmp_path, of_samples(noise_multiplier=3.0, target_epsilon=0.2)), tmp_path / "limited")
    assert "have cost" in reasons(tmp_path / "limited")[-1]


@pytest.mark.nightly
def test_a_site_cannot_find_the_noise(tmp_path):
    with pytest.raises(MisconfigurationException) as told:
        run_on_sites(write_recipe(tmp_path, of_samples(noise_multiplier=None, target_epsilon=5.0)), tmp_path)
    assert "target_epsilon" in "; ".join([str(told.value), *reasons(tmp_path)])
