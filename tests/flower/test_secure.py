"""Sums that Flower's SecAgg+ makes of what sites send, beside the same rounds in clear."""

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.cli.audit import read_audit
from tests.flower.helpers import LORA, MUD, merged, method, run_on_sites, write_recipe

pytestmark = pytest.mark.slow

SMALL = {
    "federated": {"clients_per_round": None, "local_epochs": 1},
    "data": {"init_args": {"limit_samples": 60}},
    "trainer": {"max_epochs": 2, "limit_val_batches": 0},
}
RECIPES = {
    "FedAvg": {},
    "FedMUD": {"federated": {"algorithm": "FedMUD"}, "lowrank": MUD},
    "FFA": {"federated": {"algorithm": method("FedLoRA", operator="FFA")}, "lowrank": LORA},
    "FedSA": {"federated": {"algorithm": method("FedLoRA", operator="FedSA")}, "lowrank": LORA},
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_secure_sum_is_the_mean_in_clear(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "policy.yaml"
    file.write_text("secure_aggregation: true\nmin_clients: 2\n")
    recipe = write_recipe(tmp_path, merged(SMALL, RECIPES[name]))
    clear, _ = run_on_sites(recipe, tmp_path / "clear")
    secure, _ = run_on_sites(
        recipe,
        tmp_path,
        node_config=lambda client: {"policy": str(file)},
        min_sites=2,
        secure_aggregation=True,
        secure_range=2.0,
    )
    assert secure.callback_metrics["federated/clients"] == 3
    changed = False
    for tensor, value in clear.lightning_module.state_dict().items():
        other = secure.lightning_module.state_dict()[tensor]
        torch.testing.assert_close(other, value, rtol=0, atol=2e-5)
        changed |= not torch.equal(other, value)
    assert changed
    entries = read_audit(tmp_path / "state" / "audit_client_0.jsonl").entries
    assert [entry["kind"] for entry in entries].count("train") == 2 * 2 * 4
    assert "train.round" not in [entry["kind"] for entry in entries]


@pytest.mark.parametrize(
    ("changes", "settings", "told"),
    [
        ({"algorithm": method("FedLoRA", operator="FedEx")}, {}, r"FedLoRA\(FedEx.* needs what each site sent"),
        ({"uplink": [method("Half")]}, {}, "encodes single answers"),
        ({}, {"min_sites": 1}, "min-sites=1 would let the server see"),
    ],
)
def test_what_needs_single_answers_is_refused(tmp_path, monkeypatch, changes, settings, told):
    monkeypatch.chdir(tmp_path)
    lora = {"lowrank": LORA} if "algorithm" in changes else {}
    recipe = write_recipe(tmp_path, merged(SMALL, {"federated": changes, **lora}))
    with pytest.raises(MisconfigurationException, match=told):
        run_on_sites(recipe, tmp_path, **{"min_sites": 2, "secure_aggregation": True, **settings})


def test_a_site_refuses_to_answer_in_clear(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "policy.yaml"
    file.write_text("secure_aggregation: true\n")
    recipe = write_recipe(tmp_path, SMALL)
    with pytest.raises(MisconfigurationException, match="policy has secure_aggregation=true"):
        run_on_sites(recipe, tmp_path, node_config=lambda client: {"policy": str(file)})
