"""Sums that Flower's SecAgg+ makes of what sites send, beside the same rounds in clear."""

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.compression import Dense, Schema
from lightning_lowrank.federated.client_states import load
from lightning_lowrank.federated.state import trained_tensors
from lightning_lowrank.flower import remote_rounds, server
from lightning_lowrank.flower.client import client_app
from lightning_lowrank.flower.messages import TRAIN, options_of
from lightning_lowrank.flower.secure import SECURE, changes_of, with_changes, write_answer
from lightning_lowrank.flower.site import Site
from lightning_lowrank.internals.flower import configuration_of
from tests.flower.helpers import (
    LORA,
    MUD,
    SMALL,
    approve,
    entries_of,
    merged,
    method,
    reasons,
    run_on_sites,
    write_recipe,
)
from tests.grids import nightly_except

pytestmark = pytest.mark.slow

RECIPES = {
    "FedAvg": {},
    "FedMUD": {"federated": {"algorithm": "FedMUD"}, "lowrank": MUD},
    "FFA": {"federated": {"algorithm": method("FedLoRA", operator="FFA")}, "lowrank": LORA},
    "FedSA": {"federated": {"algorithm": method("FedLoRA", operator="FedSA")}, "lowrank": LORA},
}


@nightly_except("FedMUD")
@pytest.mark.parametrize("name", RECIPES)
def test_a_secure_sum_is_the_mean_in_clear(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, merged(SMALL, RECIPES[name]))
    file = approve(tmp_path / "site", recipe, "secure_aggregation: true\nmin_clients: 2\n")
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
    entries = entries_of(tmp_path / "state" / "audit_client_0.jsonl")
    assert [entry["kind"] for entry in entries].count("train") == 2 * 2 * 4
    assert "train.round" not in [entry["kind"] for entry in entries]


@pytest.mark.parametrize(
    ("changes", "settings", "told"),
    [
        ({"algorithm": method("FedLoRA", operator="FedEx")}, {}, r"FedLoRA\(FedEx.* needs each site's own answer"),
        ({"uplink": [method("Half")]}, {}, r"uplink=\[Half\(dtype=torch\.float16\)\]"),
        ({}, {"min_sites": 1}, "sites=1"),
        ({"stages": [method("tests.flower.helpers.Counting")]}, {}, r"stages=\[Counting\(\)\].*client 2.*not today"),
    ],
)
def test_what_needs_single_answers_is_refused(tmp_path, monkeypatch, changes, settings, told):
    monkeypatch.chdir(tmp_path)
    lora = {"lowrank": LORA} if "algorithm" in changes else {}
    recipe = write_recipe(tmp_path, merged(SMALL, {"federated": changes, **lora}))
    with pytest.raises(MisconfigurationException, match=told):
        run_on_sites(recipe, tmp_path, **{"min_sites": 2, "secure_aggregation": True, **settings})


def spoilt_keys(node, reply):
    if node == 101 and reply.metadata.message_type == SECURE:
        said = configuration_of(reply.content)
        if "pk1" in said:
            said["pk1"] = b""
    return reply


@pytest.mark.parametrize(
    ("federated", "settings", "policy", "tamper", "told"),
    [
        ({"on_client_error": "raise"}, {}, "max_upload: 5000", None, "PolicyViolation: this site did not do it"),
        ({}, {"on_bad_payload": "stop"}, "min_clients: 2", spoilt_keys, "it sent a bad answer: its keys are invalid"),
    ],
    ids=["error", "bad answer"],
)
@pytest.mark.nightly
def test_a_failure_of_one_site_may_end_the_run(tmp_path, monkeypatch, federated, settings, policy, tamper, told):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, merged(SMALL, {"federated": federated}))
    file = approve(tmp_path / "site", recipe, policy)
    with pytest.raises(MisconfigurationException, match=f"round 0: the site of client 0 failed: .*{told}"):
        run_on_sites(
            recipe,
            tmp_path,
            prepare=lambda grid: None if tamper is None else setattr(grid, "tamper", tamper),
            node_config=lambda client: {"policy": str(file)} if client == 0 else {},
            min_sites=2,
            secure_aggregation=True,
            **settings,
        )


def no_reply(node, reply):
    return None if node == 101 and "setup" in stages_of(reply) else reply


def keys_of_no_curve(node, reply):
    if node == 101 and "setup" in stages_of(reply):
        configuration_of(reply.content)["pk1"] = b"-----BEGIN PUBLIC KEY-----"
    return reply


def the_same_key_twice(node, reply):
    if node == 101 and "setup" in stages_of(reply):
        said = configuration_of(reply.content)
        said["pk1"] = said["pk2"]
    return reply


def shares_of_nobody(node, reply):
    if node == 101 and "share_keys" in stages_of(reply):
        configuration_of(reply.content)["dsts"] = [7]
    return reply


def stages_of(reply):
    """Return the stage of a reply; none if it is of no secure sum."""
    if reply.has_error() or reply.metadata.message_type != SECURE:
        return set()
    said = configuration_of(reply.content)
    return {stage for stage, key in (("setup", "pk1"), ("share_keys", "dsts")) if key in said}


@nightly_except("no_reply")
@pytest.mark.parametrize(
    "tamper",
    [no_reply, spoilt_keys, keys_of_no_curve, the_same_key_twice, shares_of_nobody],
    ids=lambda each: each.__name__,
)
def test_the_others_go_on_without_a_site_that_fails_before_the_numbers(tmp_path, monkeypatch, tamper):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, merged(SMALL, {"trainer": {"max_epochs": 1}}))
    secure, _ = run_on_sites(
        recipe,
        tmp_path,
        prepare=lambda grid: setattr(grid, "tamper", tamper),
        min_sites=2,
        secure_aggregation=True,
        round_timeout=1.0,
    )
    assert secure.callback_metrics["federated/failed"] == 1
    assert secure.callback_metrics["federated/clients"] == 2

    def without_the_first(node, reply):
        return None if node == 101 and reply.metadata.message_type == TRAIN else reply

    clear, _ = run_on_sites(
        recipe,
        tmp_path / "clear",
        prepare=lambda grid: setattr(grid, "tamper", without_the_first),
        min_sites=2,
        round_timeout=1.0,
    )
    for name, value in clear.lightning_module.state_dict().items():
        torch.testing.assert_close(secure.lightning_module.state_dict()[name], value, rtol=0, atol=1e-4)


@pytest.mark.nightly
def test_a_site_that_has_lost_what_it_kept_hears_it_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(
        tmp_path,
        merged(SMALL, {**RECIPES["FedMUD"], "trainer": {"max_epochs": 4}, "lowrank": {**MUD, "decouple": False}}),
    )

    def prepare(grid):
        def before(node, message):
            file = next((tmp_path / "state").glob("*client_0.safetensors"), None)
            # The third round's first message.
            if node == 101 and file is not None and [each for each, _ in grid.sent].count(101) == 1 + 2 * 4 + 1:
                file.unlink()
                grid.nodes[101] = client_app(recipe), grid.nodes[101][1]

        grid.before = before

    told: list[str] = []
    monkeypatch.setattr(remote_rounds, "rank_zero_warn", told.append)
    run_on_sites(recipe, tmp_path, prepare=prepare, min_sites=2, secure_aggregation=True)
    assert told == ["round 2 continues without the site of client 0: it has lost its state of earlier rounds"]
    kept = {file.stem[-1]: load(file)["frozen"] for file in (tmp_path / "state").glob("study_*.safetensors")}
    assert any("frozen" in name for name in kept["1"])
    for name, value in kept["1"].items():
        torch.testing.assert_close(kept["0"][name], value, rtol=0, atol=0)


class Killed(BaseException):
    """Ends the server."""


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.nightly
def test_a_study_goes_on_as_it_began(tmp_path, monkeypatch, secure):
    monkeypatch.chdir(tmp_path)
    recipe, state = write_recipe(tmp_path, SMALL), tmp_path / "server.ckpt"
    save = server._KeepState.on_train_epoch_end

    def killed(keeper, trainer, module):
        save(keeper, trainer, module)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(server._KeepState, "on_train_epoch_end", killed)
        with pytest.raises(Killed):
            run_on_sites(recipe, tmp_path, min_sites=2, secure_aggregation=secure, state=state)
    began, other = (str(each).lower() for each in (secure, not secure))
    told = f"began with secure-aggregation={began}, and cannot continue with secure-aggregation={other}"
    with pytest.raises(MisconfigurationException, match=told):
        run_on_sites(recipe, tmp_path, min_sites=2, secure_aggregation=not secure, state=state)


def test_a_site_gives_its_last_answer_in_the_form_that_it_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    site = Site(write_recipe(tmp_path, SMALL), 0, tmp_path / "site.safetensors")
    site.join()
    assert site._built is not None
    sent = {0: Dense().encode({name: value.detach() for name, value in trained_tensors(site._built.module).items()})}
    options = options_of(site._built.trainer.optimizers)
    first = site.train(0, sent, options, secure=True)
    again = Site(tmp_path / "recipe.yaml", 0, tmp_path / "site.safetensors")
    assert again.train(0, sent, options, secure=True) == first
    with pytest.raises(MisconfigurationException, match=r"0.*0.*aggregation=true"):
        again.train(0, sent, options)


def test_a_site_refuses_to_answer_in_clear(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, SMALL)
    file = approve(tmp_path / "site", recipe, "secure_aggregation: true\n")
    with pytest.raises(MisconfigurationException, match=r"no site made round 0: .*PolicyViolation"):
        run_on_sites(recipe, tmp_path, node_config=lambda client: {"policy": file})
    assert "policy has secure_aggregation=true" in reasons(tmp_path)[-1]


def test_a_mask_of_infinite_numbers_is_summed():
    mask = {"mask": torch.tensor([0.0, -torch.inf]), "count": torch.tensor([3])}
    changes = changes_of({"mask": torch.tensor([0.5, -torch.inf]), "count": torch.tensor([4])}, mask)
    assert changes["mask"].tolist() == [0.5, 0.0]
    summed = with_changes(changes, mask, Schema.of(mask))
    assert summed["mask"].tolist() == [0.5, -torch.inf]
    assert summed["count"].tolist() == [4]


@pytest.mark.parametrize("order", [1, -1])
def test_a_change_that_is_not_a_number_is_not_summed(monkeypatch, order):
    """Whichever tensor has it: Python's max() of 1 and NaN is 1."""
    monkeypatch.setattr("lightning_lowrank.internals.flower.limits_of", lambda context: (8.0, 1))
    changes = {"a": torch.ones(2), "b": torch.tensor([0.0, torch.nan])}
    with pytest.raises(MisconfigurationException, match=r"is nan.*at most 8"):
        write_answer(None, None, dict(list(changes.items())[::order]), 1)
