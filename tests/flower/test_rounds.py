"""The two halves of the bridge in one process: what a run across sites does is what its simulation does."""

import pytest
import torch

from lightning_lowrank import load_dense
from lightning_lowrank.flower.client import client_app
from lightning_lowrank.models import MLP, Classifier
from tests.flower.helpers import (
    LORA,
    MUD,
    NORMALISED,
    assert_equal_runs,
    method,
    run_on_sites,
    simulate,
    write_recipe,
)

METHODS = {
    "FedAvg": {"federated": {"algorithm": "FedAvg"}},
    "FedMUD, resets each round": {"federated": {"algorithm": "FedMUD"}, "lowrank": MUD},
    "FedMUD, resets every second round": {
        "federated": {"algorithm": method("FedMUD", reset_interval=2)},
        "lowrank": MUD,
    },
    "FedProx": {"federated": {"algorithm": method("FedProx", mu=0.1)}},
    "FedAvgM": {"federated": {"algorithm": method("FedAvgM", momentum=0.5)}},
    "FedAdam": {"federated": {"algorithm": method("FedAdam", lr=0.03)}},
    "FedYogi": {"federated": {"algorithm": method("FedYogi", lr=0.03)}},
    "FedNova": {"federated": {"algorithm": "FedNova"}},
    "SCAFFOLD": {"federated": {"algorithm": "SCAFFOLD"}},
    "EF21P": {"federated": {"algorithm": method("EF21P", share_down=0.2, share_up=0.2)}},
    "RandomCoordinates": {"federated": {"algorithm": method("RandomCoordinates", share_down=0.5, share_up=0.5)}},
    "FedPer": {"federated": {"algorithm": method("FedPer", patterns=["classifier"])}},
    "Ditto": {"federated": {"algorithm": "Ditto"}},
    "PFedMe": {"federated": {"algorithm": "PFedMe"}},
    "LocalTraining": {"federated": {"algorithm": "LocalTraining"}},
    "FedLoRA": {"federated": {"algorithm": method("FedLoRA", operator={"class_path": "SumProduct"})}, "lowrank": LORA},
}
EVERY_DAY = ["FedAvg", "FedMUD, resets each round"]


def rest(names):
    return [pytest.param(name, marks=() if name in EVERY_DAY else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", rest(METHODS))
def test_is_the_simulation(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, METHODS[name])
    served, _ = run_on_sites(recipe, tmp_path)
    assert_equal_runs(simulate(recipe), served)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedAvg", "FedMUD, resets each round", "EF21P", "SCAFFOLD", "RandomCoordinates"])
def test_each_message_may_find_a_new_process(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, METHODS[name])
    served, _ = run_on_sites(recipe, tmp_path, fresh=True)
    assert_equal_runs(simulate(recipe), served)


SETTINGS = {
    "batch normalisation, averaged": {"model": NORMALISED},
    "batch normalisation, local": {"model": NORMALISED, "federated": {"buffers": "local"}},
    "batch normalisation, reset": {"model": NORMALISED, "federated": {"buffers": "reset"}},
    "kept momentum": {
        "federated": {"optimizer_state": "keep"},
        "model": {"init_args": {"optimizer": method("torch.optim.SGD", lr=0.05, momentum=0.9)}},
    },
    "learning rate decays by round": {
        "optimizer": method("torch.optim.SGD", lr=0.2),
        "lr_scheduler": method("torch.optim.lr_scheduler.StepLR", step_size=1, gamma=0.5),
    },
    "settings of single clients": {"federated": {"client_settings": {1: {"lr": 0.02, "local_steps": 3}}}},
    "uniform weights, clients by chance": {
        "federated": {"weighting": "uniform", "sampling_weights": [1.0, 5.0, 5.0], "availability": [0.9, 0.9, 0.9]}
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [False, True], ids=["one process", "new processes"])
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_mean_what_they_mean_in_the_simulation(tmp_path, monkeypatch, name, fresh):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, SETTINGS[name])
    served, _ = run_on_sites(recipe, tmp_path, fresh=fresh)
    assert_equal_runs(simulate(recipe), served)


@pytest.mark.slow
def test_a_site_that_was_away_catches_up(tmp_path, monkeypatch):
    """Client 0 is drawn in rounds 0 and 4; its node is gone in rounds 1 to 3, and comes back as another node."""
    monkeypatch.chdir(tmp_path)
    changes = {
        **METHODS["FedMUD, resets each round"],
        "trainer": {"max_epochs": 5},
    }
    changes["federated"] = {
        **changes["federated"],
        "clients_per_round": None,
        "participants": [[0, 1], [1, 2], [2], [1, 2], [0, 2]],
    }
    recipe = write_recipe(tmp_path, changes)

    def prepare(grid):
        def before(node, message):
            trained = [kind for _, kind in grid.sent].count("train.round")
            if trained == 3 and 101 in grid.nodes:
                del grid.nodes[101]
            if trained == 6 and len(grid.nodes) == 2:
                grid.start(client_app(recipe), partition_id=0, state_dir=str(tmp_path / "state"))

        grid.before = before

    served, grid = run_on_sites(recipe, tmp_path, prepare=prepare)
    assert 104 in grid.nodes
    simulated = simulate(recipe)
    for name, value in simulated.lightning_module.state_dict().items():
        torch.testing.assert_close(served.lightning_module.state_dict()[name], value, rtol=1e-6, atol=1e-7)


def test_sites_with_data_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, {"federated": {"clients": 2, "clients_per_round": None}})
    served, _ = run_on_sites(recipe, tmp_path, clients=2, node_config=lambda client: {"own-data": True}, validate=False)
    # The recipe keeps 160 images, and each site has all of those for itself.
    assert served.callback_metrics["federated/samples"] == 2 * 160
    assert "val_acc" not in served.callback_metrics


@pytest.mark.slow
def test_the_checkpoint_is_a_global_model_that_loads_into_the_plain_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": "sites"}}
    keeper = {"class_path": "ModelCheckpoint", "init_args": {"filename": "last"}}
    changes = {"trainer": {"logger": logger, "enable_checkpointing": True, "callbacks": [keeper], "max_epochs": 2}}
    recipe = write_recipe(tmp_path, {**METHODS["FedMUD, resets each round"], **changes})
    served, _ = run_on_sites(recipe, tmp_path)
    checkpoint = tmp_path / "runs/sites/version_0/checkpoints/last.ckpt"
    plain = Classifier(MLP(in_features=64, hidden=[16, 16], out_features=10))
    load_dense(checkpoint, plain)
    inputs = torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(plain(inputs), served.lightning_module(inputs))
    assert (tmp_path / "runs/sites/version_0/config.yaml").exists()
