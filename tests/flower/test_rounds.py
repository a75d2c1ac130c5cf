"""The two halves of the bridge in one process: what a run across sites does is what its simulation does."""

import re

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import load_dense
from lightning_lowrank.lora.adapters import find_adapters
from lightning_lowrank.models import MLP, Classifier
from tests.flower.helpers import (
    BASE,
    LORA,
    MUD,
    NORMALISED,
    SMALL,
    assert_equal_runs,
    merged,
    method,
    reasons,
    run_on_sites,
    simulate,
    write_recipe,
)
from tests.grids import in_turn, nightly_except
from tests.interop.helpers import peft
from tests.interop.test_quantised import StandIn

RESETS = {"federated": {"algorithm": "FedMUD"}, "lowrank": MUD}


@pytest.mark.slow
def test_stages_see_what_they_see_in_the_simulation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes = {
        "stages": [method("tests.flower.helpers.Counting")],
        "uplink": [method("Half")],
        "clients_per_round": None,
    }
    recipe = write_recipe(tmp_path, {"federated": changes, "trainer": {"max_epochs": 3}})
    simulated, (served, _) = simulate(recipe), run_on_sites(recipe, tmp_path)
    for name, value in simulated.lightning_module.state_dict().items():
        torch.testing.assert_close(served.lightning_module.state_dict()[name], value, rtol=1e-6, atol=1e-7)
    for name in simulated.callback_metrics.keys() - {"train_loss", "train_acc"}:
        assert float(served.callback_metrics[name]) == pytest.approx(float(simulated.callback_metrics[name])), name
    assert (served.callback_metrics["passed"], served.callback_metrics["absent"]) == (2, 1)


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
    "learning rate by the module's hook": {
        "model": {**BASE["model"], "class_path": "tests.flower.helpers.Decaying"},
        "trainer": {"max_epochs": 3},
    },
    "settings of single clients": {"federated": {"client_settings": {1: {"lr": 0.02, "local_steps": 3}}}},
    "uniform weights, clients by chance": {
        "federated": {"weighting": "uniform", "sampling_weights": [1.0, 5.0, 5.0], "availability": [0.9, 0.9, 0.9]}
    },
    "a robust rule behind a lossy downlink": {
        "federated": {"aggregator": method("NormBound"), "downlink": [method("Quantize", bits=4)]}
    },
    "class weights by the module's hook": {
        "model": {**BASE["model"], "class_path": "tests.flower.helpers.Weighted"},
        "federated": {"downlink": [method("Quantize", bits=4)]},
    },
}


@nightly_except(
    "batch normalisation, averaged-False",
    "learning rate by the module's hook-True",
    "class weights by the module's hook-True",
)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "fresh"), in_turn(SETTINGS, [False, True]))
def test_settings_mean_what_they_mean_in_the_simulation(tmp_path, monkeypatch, name, fresh):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, SETTINGS[name])
    served, _ = run_on_sites(recipe, tmp_path, fresh=fresh)
    assert_equal_runs(simulate(recipe), served)


@pytest.mark.slow
def test_the_servers_steps_are_those_of_optimizers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes = {"federated": {"local_epochs": 2}, "trainer": {"accumulate_grad_batches": 3}}
    recipe = write_recipe(tmp_path, merged(SMALL, changes))
    simulated, (served, _) = simulate(recipe), run_on_sites(recipe, tmp_path)
    assert served.global_step == simulated.global_step
    assert served.callback_metrics["federated/client_steps"] > served.global_step


@pytest.mark.nightly
def test_sites_with_data_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, {"federated": {"clients": 2, "clients_per_round": None}})
    served, _ = run_on_sites(recipe, tmp_path, clients=2, node_config=lambda client: {"own-data": True}, validate=False)
    # The recipe keeps 160 images, and each site has all of those for itself.
    assert served.callback_metrics["federated/samples"] == 2 * 160
    assert "val_acc" not in served.callback_metrics


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.slow
def test_sites_that_lack_a_class_number_the_others_alike(tmp_path, monkeypatch, named):
    """Each site numbers the names of its own data, unless the recipe lists them."""
    monkeypatch.chdir(tmp_path)
    for client, classes in enumerate((["benign", "carcinoma", "melanoma"], ["carcinoma", "melanoma"])):
        (tmp_path / f"{client}").mkdir()
        rows = [f"p{row % 5},{row},{row % 7},{classes[row % len(classes)]}\n" for row in range(60)]
        (tmp_path / f"{client}" / "patients.csv").write_text("client,age,size,label\n" + "".join(rows))
    arguments = {"train": {"site": "train", "default": "patients.csv"}, "batch_size": 16}
    if named:
        arguments["classes"] = ["benign", "carcinoma", "melanoma"]
    network = {"class_path": "MLP", "init_args": {"in_features": 2, "hidden": [4], "out_features": 3}}
    changes = {
        "federated": {"clients": 2, "clients_per_round": None, "partition": "IID"},
        "data": {"class_path": "ClientTable", "init_args": arguments},
        "model": {"init_args": {"network": network}},
        "trainer": {"max_epochs": 1},
    }
    recipe = write_recipe(tmp_path, changes)

    def run():
        config = {"own_data": True}
        return run_on_sites(
            recipe,
            tmp_path,
            clients=2,
            node_config=lambda client: {**config, "data_root": str(tmp_path / f"{client}")},
            validate=False,
        )

    if named:
        assert run()[0].callback_metrics["federated/clients"] == 2
        return
    with pytest.raises(MisconfigurationException, match=r"\[0\].*\[1\].*classes="):
        run()


@pytest.mark.nightly
def test_the_checkpoint_is_a_global_model_that_loads_into_the_plain_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": "sites"}}
    keeper = {"class_path": "ModelCheckpoint", "init_args": {"filename": "last"}}
    changes = {"trainer": {"logger": logger, "enable_checkpointing": True, "callbacks": [keeper], "max_epochs": 2}}
    recipe = write_recipe(tmp_path, {**RESETS, **changes})
    served, _ = run_on_sites(recipe, tmp_path)
    checkpoint = tmp_path / "runs/sites/version_0/checkpoints/last.ckpt"
    plain = Classifier(MLP(in_features=64, hidden=[16, 16], out_features=10))
    load_dense(checkpoint, plain)
    inputs = torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(plain(inputs), served.lightning_module(inputs))
    assert (tmp_path / "runs/sites/version_0/config.yaml").exists()


def rank_of(client: int) -> int:
    return [2, 1, 1][client]


RANKS = {
    "federated": {
        "algorithm": method("FedLoRA", operator="SumProduct", ranks="tests.flower.test_rounds.rank_of"),
        "clients_per_round": None,
    },
    "lowrank": LORA,
    "trainer": {"max_epochs": 2},
}


def with_rank(folder, rank, clients):
    """Return what SuperNodes are told, of which some clients' have a file that states a rank."""
    file = folder / "site.yaml"
    file.write_text(f"rank: {rank}\n")
    return lambda client: {"site": str(file)} if client in clients else {}


@pytest.mark.nightly
def test_a_site_states_its_own_rank(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    simulated = simulate(write_recipe(tmp_path, RANKS))
    by_recipe, _ = run_on_sites(write_recipe(tmp_path, RANKS, "same.yaml"), tmp_path)
    assert_equal_runs(simulated, by_recipe)
    # The recipe knows of none; the sites' own give the same.
    plain = {**RANKS, "federated": {**RANKS["federated"], "algorithm": method("FedLoRA", operator="SumProduct")}}
    recipe = write_recipe(tmp_path, plain, "plain.yaml")
    stated, _ = run_on_sites(recipe, tmp_path, node_config=with_rank(tmp_path, 1, [1, 2]))
    assert_equal_runs(simulated, stated)


@nightly_except()
@pytest.mark.slow
@pytest.mark.parametrize(
    ("operator", "rank", "said"),
    [
        ("SumProduct", 3, r"1.*rank.*3"),
        ("SumProduct", 0, r"rank of .*got 0"),
        ("ProductSum", 1, r"rank=1.*1.*ProductSum\(\)"),
    ],
)
def test_a_rank_that_a_site_cannot_have_leaves_it_out(tmp_path, monkeypatch, operator, rank, said):
    monkeypatch.chdir(tmp_path)
    algorithm = {"federated": {**RANKS["federated"], "algorithm": method("FedLoRA", operator=operator)}}
    recipe = write_recipe(tmp_path, {**RANKS, **algorithm})
    with pytest.raises(MisconfigurationException) as told:
        run_on_sites(recipe, tmp_path, node_config=with_rank(tmp_path, rank, [1]), min_sites=3)
    assert re.search(said, "; ".join([str(told.value), *reasons(tmp_path)]))


class Wrapped(Classifier):
    """A network that PEFT wrapped, with one quantised layer."""

    def __init__(self):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))
        net[3] = StandIn(net[3])
        config = peft().LoraConfig(r=2, lora_alpha=4, target_modules=["1", "3"], modules_to_save=["5"])
        super().__init__(peft().get_peft_model(net, config), num_classes=10)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("operator", ["FLoRA", "FedEx", "FedSVD"])
@pytest.mark.nightly
def test_sites_with_a_module_that_peft_wrapped(tmp_path, monkeypatch, operator):
    monkeypatch.chdir(tmp_path)
    algorithm = method("FedLoRA", operator=operator)
    changes = {"federated": {"algorithm": algorithm}, "model": {"class_path": "tests.flower.test_rounds.Wrapped"}}
    recipe = write_recipe(tmp_path, changes)
    simulated = simulate(recipe)
    served, _ = run_on_sites(recipe, tmp_path, fresh=True)
    assert_equal_runs(simulated, served)
    one, other = (find_adapters(run.lightning_module) for run in (simulated, served))
    assert any(found.separate_change for found in one.values()) == (operator != "FedSVD")
    for name, found in one.items():
        assert found.separate_change.keys() == other[name].separate_change.keys()
        for part, value in found.separate_change.items():
            torch.testing.assert_close(other[name].separate_change[part], value, rtol=1e-5, atol=1e-6)
