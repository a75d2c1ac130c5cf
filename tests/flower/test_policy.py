"""What a site permits: refused by name, before anything is built, trained or sent; and its audit log."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.compression import Dense, Sign
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.privacy import ClientPrivacy
from lightning_lowrank.federated.state import trained_tensors
from lightning_lowrank.flower import site
from lightning_lowrank.flower.approval import Approvals
from lightning_lowrank.flower.messages import options_of
from lightning_lowrank.flower.policy import Policy, PolicyViolation
from lightning_lowrank.flower.privacy_account import PrivacyAccount
from lightning_lowrank.flower.recipe import build
from lightning_lowrank.flower.remote_rounds import RemoteRounds
from lightning_lowrank.flower.site import Site
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


@pytest.mark.parametrize("suffix", [".yaml", ".toml"])
def test_files(tmp_path, suffix):
    file = tmp_path / f"policy{suffix}"
    text = {
        ".yaml": "min_clients: 3\nclip: 1.5\nmodules: [network]\ntensors: {'network.*': [16, 64]}\n",
        ".toml": 'min_clients = 3\nclip = 1.5\nmodules = ["network"]\n[tensors]\n"network.*" = [16, 64]\n',
    }
    file.write_text(text[suffix])
    assert Policy.load(file) == Policy(min_clients=3, clip=1.5, modules=["network"], tensors={"network.*": [16, 64]})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max_uplaod: 5", r"the entries min_clients, .*; it has \['max_uplaod'\]"),
        ("", "it has None"),
        ("- 1", r"it has \[1\]"),
        ("a: [", "cannot be read"),
        ("max_epsilon: 2024-13-45", "cannot be read"),
        ("[" * 2000, "cannot be read"),
        ("!!python/object/apply:os.system ['true']", "cannot be read"),
        ("min_clients: 0", "min_clients must be a whole number, 1 or more, got 0"),
        ("max_upload: 1.5", "max_upload must be"),
        ("max_download: true", "max_download must be"),
        ("clip: 0", "clip must be a number above 0"),
        ("clip: .nan", "clip must be a number above 0"),
        ("clip: big", "clip must be"),
        ("max_epsilon: -1", "max_epsilon must be a number above 0"),
        ("max_delta: 1", "max_delta must be below 1"),
        ("modules: network", "modules must be a list of patterns"),
        ("tensors: {a: 5}", "tensors must be patterns"),
        ("clip: 1.0\nclip: 100.0", "'clip' occurs twice"),
    ],
)
def test_files_that_are_none(tmp_path, text, told):
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    with pytest.raises(MisconfigurationException, match=f"policy.yaml.*{told}"):
        Policy.load(file)


@pytest.mark.parametrize("number", ["Infinity", "null", '"a"', "[]"])
def test_a_damaged_account_is_refused_by_name(number, tmp_path):
    account = tmp_path / "privacy_client_0.json"
    account.write_text(f'[{{"noise_multiplier": 1.0, "sampled": 1, "population": {number}, "steps": 1}}]')
    with pytest.raises(MisconfigurationException, match="privacy_client_0"):
        PrivacyAccount(account).check()


def test_a_file_that_is_not_there_is_no_permission(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"policy\.yaml"):
        Policy.load(tmp_path / "policy.yaml")


def test_names_and_shapes():
    policy = Policy(tensors={"network.*": [16, 64], "*.bias": [8], "step": []})
    good = {"network.0.weight": torch.zeros(16, 64), "network.0": torch.zeros(64), "step": torch.tensor(1)}
    policy.check_tensors(good, "it")
    for name, shape in (
        ("network.0", (17, 64)),
        ("network.0", (1, 16, 64)),
        ("b.bias", (9,)),
        ("x", ()),
        ("step", (1,)),
    ):
        with pytest.raises(PolicyViolation, match=f"policy has tensors=.*and it has '{name}'"):
            policy.check_tensors({name: torch.zeros(shape)}, "it")


def test_changes_are_clipped_over_all_tensors():
    policy = Policy(clip=1.0)
    reference = {"a": torch.full((3,), 2.0), "b": torch.zeros(2, 2)}
    sent = {
        "a": torch.full((3,), 5.0),
        "b": torch.full((2, 2), -4.0),
        "own": torch.tensor([8.0]),
        "count": torch.tensor(7),
        "seed": torch.tensor([1e6]),
    }
    clipped = policy.clipped(Message(sent), reference, ["seed"]).tensors
    norm = (27 + 64 + 64) ** 0.5
    torch.testing.assert_close(clipped["a"], 2 + 3 / norm * torch.ones(3))
    torch.testing.assert_close(clipped["b"], -4 / norm * torch.ones(2, 2))
    torch.testing.assert_close(clipped["own"], torch.tensor([8 / norm]))
    assert clipped["count"] is sent["count"]
    assert clipped["seed"] is sent["seed"]
    small = Message({"a": reference["a"] + 0.1})
    assert policy.clipped(small, reference, []) is small
    assert Policy().clipped(Message(sent), reference, []).tensors is sent
    with pytest.raises(PolicyViolation, match=r"clip=1\.0.*06"):
        policy.clipped(Message(sent, Sign()), reference, [])
    with pytest.raises(PolicyViolation, match=r"clip=1\.0.*3"):
        policy.check_change({"a": torch.tensor([3.0])}, {"a": torch.zeros(1)}, [])


def test_changed_integers_are_not_sent_beside_a_clipped_change():
    policy, counts = Policy(clip=1.0), torch.tensor([3, 4])
    reference = {"counts": counts, "batches": torch.tensor(5)}
    same = Message({"counts": counts.clone(), "batches": torch.tensor(9)})
    assert policy.clipped(same, reference, []) is same
    own = Message({"rows of the method": torch.tensor([1, 2])})
    assert policy.clipped(own, reference, []) is own
    for changed in (torch.tensor([3, 5]), torch.tensor([3, 4, 0]), torch.tensor([True, False])):
        with pytest.raises(PolicyViolation, match=r"clip=1\.0.*integers of 'counts'"):
            policy.clipped(Message({"counts": changed}), reference, [])
    assert Policy().clipped(Message({"counts": counts + 1}), reference, []).tensors["counts"].tolist() == [4, 5]
    # The server may leave the buffer out of what it sends.
    assert policy.clipped(same, {}, [], reference) is same
    with pytest.raises(PolicyViolation, match=r"clip=1\.0.*integers of 'counts'"):
        policy.clipped(Message({"counts": counts + 1}), {}, [], reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_16_bits_does_not_enlarge_a_clipped_change(dtype):
    draws = torch.Generator().manual_seed(0)
    reference = {"a": torch.randn(1000, generator=draws).to(dtype)}
    sent = Message({"a": reference["a"] + torch.randn(1000, generator=draws).to(dtype)})
    for clip in (10.0, 0.1, 1e-3):
        policy = Policy(clip=clip)
        clipped = policy.clipped(sent, reference, []).tensors
        assert clipped["a"].dtype == dtype
        assert (clipped["a"].double() - reference["a"].double()).norm() <= clip
        policy.check_change(clipped, reference, [])


def test_secure_aggregation_unmasks_no_single_answer():
    sums = Policy(secure_aggregation=True)
    three = Policy(secure_aggregation=True, min_clients=3)
    unmask = {"stage": "unmask", "active_nids": [1, 2, 3], "dead_nids": [4]}
    for policy in (Policy(), sums, three):
        policy.check_protocol(unmask)
        for active, dead in (([1, 1, 1], []), ([1, 2, 3], [2]), ([1, 2, 3], [4, 4])):
            with pytest.raises(PolicyViolation, match="twice"):
                policy.check_protocol({"stage": "unmask", "active_nids": active, "dead_nids": dead})
    for policy, least, entry in ((sums, 2, "secure_aggregation=true"), (three, 3, "min_clients=3")):
        for stage in (
            {"stage": "setup", "threshold": least - 1},
            {"stage": "share_keys", **{str(node): b"" for node in range(least - 1)}},
            {"stage": "unmask", "active_nids": list(range(least - 1)), "dead_nids": []},
        ):
            with pytest.raises(PolicyViolation, match=f"{entry}.*{least - 1} sites"):
                policy.check_protocol(stage)
            Policy().check_protocol(stage)


def test_infinite_numbers_lift_no_clip():
    """The difference of two infinite numbers is NaN, which compares as false with every clip."""
    policy, mask = Policy(clip=1.0), torch.tensor([0.0, -torch.inf])
    reference = {"a": torch.zeros(2), "mask": mask}
    clipped = policy.clipped(Message({"a": torch.full((2,), 5.0), "mask": mask}), reference, [])
    torch.testing.assert_close(clipped.tensors, {"a": torch.full((2,), 0.5**0.5), "mask": mask})
    policy.check_change(clipped.tensors, reference, [])
    for other in (torch.nan, torch.inf, 0.0):
        sent = {"a": torch.full((2,), 5.0), "mask": torch.tensor([0.0, other])}
        with pytest.raises(PolicyViolation, match=r"clip=1\.0.*'mask' is not finite"):
            policy.clipped(Message(sent), reference, [])
        with pytest.raises(PolicyViolation, match=r"clip=1\.0"):
            policy.check_change(sent, reference, [])


VIOLATIONS = {
    "min_clients": ({"min_clients": 2}, {}, "query.join"),
    "max_download": ({"max_download": 1000}, {}, "train.round"),
    "max_upload": ({"max_upload": 1000}, {}, "train.round"),
    "tensors": ({"tensors": {"network.net.0.*": [16, 64]}}, {}, "train.round"),
    "modules": ({"modules": ["network.*.left"]}, {}, "query.join"),
    "max_rounds": ({"max_rounds": 1}, {}, "query.join"),
    "clip": ({"clip": 1e-3}, {"federated": {"uplink": [method("RandomK", share=0.1, unbiased=True)]}}, "train.round"),
}


@nightly_except("max_rounds", "max_upload")
@pytest.mark.slow
@pytest.mark.parametrize("name", VIOLATIONS)
def test_violations_are_refused_by_name_at_the_site(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    policy, changes, kind = VIOLATIONS[name]
    recipe = write_recipe(tmp_path, merged(SMALL, changes))
    file = approve(tmp_path / "site", recipe, yaml.safe_dump(policy))
    with pytest.raises(MisconfigurationException) as told:
        run_on_sites(recipe, tmp_path, node_config=lambda client: {"policy": file})
    assert "PolicyViolation: this site did not do it" in str(told.value)
    assert name not in str(told.value)
    refused, sent = entries_of(tmp_path / "state" / "audit_client_0.jsonl")[-2:]
    assert (refused["direction"], refused["kind"], sent["direction"]) == ("refused", kind, "sent")
    assert f"policy has {name}=" in refused["reason"]
    assert f"entry {refused['entry']} of its log" in str(told.value)
    assert 0 < sent["bytes"] < 300


@pytest.mark.slow
def test_one_sites_policy_is_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, SMALL)
    file = approve(tmp_path / "site", recipe, "max_upload: 1000\n")
    served, _ = run_on_sites(recipe, tmp_path, node_config=lambda client: {"policy": file} if client == 1 else {})
    assert served.callback_metrics["federated/clients"] == 2
    kinds = [entry["direction"] for entry in entries_of(tmp_path / "state" / "audit_client_1.jsonl")]
    assert kinds == ["received", "sent", *["received", "refused", "sent"] * 2]


def joined(folder, changes):
    """Return a site that has joined, what the server would send it in a round, and the optimizers' options."""
    site = Site(write_recipe(folder, merged(SMALL, changes)), 0, folder / "site.safetensors")
    site.join()
    assert site._built is not None
    sent = {name: value.detach().clone() for name, value in trained_tensors(site._built.module).items()}
    return site, sent, options_of(site._built.trainer.optimizers)


@pytest.mark.slow
def test_every_broadcast_is_held_against_the_policy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    site, sent, options = joined(tmp_path, {"federated": {"algorithm": "FedMUD"}, "lowrank": MUD})
    sent["seed"] = torch.tensor(1)
    site.policy = Policy(tensors={name: list(value.shape) for name, value in sent.items()})
    fine, forbidden = Dense().encode(sent), Dense().encode({**sent, "forbidden": torch.zeros(4)})
    told = r"policy.*'forbidden'"
    with pytest.raises(PolicyViolation, match=told):
        site.train(1, {0: forbidden, 1: fine}, options)
    site.listen({0: forbidden})
    with pytest.raises(PolicyViolation, match=told):
        site.train(1, {1: fine}, options)
    assert site.train(1, {0: fine, 1: fine}, options)


@pytest.mark.slow
def test_a_tensor_of_two_layers_is_trained_if_both_are_permitted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    site, sent, options = joined(tmp_path, {})
    assert site._built is not None
    site._built.module.other = site._built.module.network
    data = Dense().encode(sent)
    site.policy = Policy(modules=["network"])
    with pytest.raises(PolicyViolation, match=r"modules=\['network'\].*'other\."):
        site.train(0, {0: data}, options)
    site.policy = Policy(modules=["network", "other"])
    assert site.train(0, {0: data}, options)


@pytest.mark.slow
def test_a_policy_that_is_tightened_holds_from_the_next_message(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    site, sent, options = joined(tmp_path, {})
    data = Dense().encode(sent)
    first = site.train(0, {0: data}, options)
    file = approve(tmp_path / "site", tmp_path / "recipe.yaml")
    unapproved = Policy(source=str(tmp_path / "elsewhere" / "policy.yaml"))
    for policy, told in ((Policy(max_epsilon=8.0), "policy has max_epsilon="), (unapproved, "nothing is approved")):
        site.policy = policy
        for number in (0, 1):
            with pytest.raises(PolicyViolation, match=told):
                site.train(number, {number: data}, options)
    site.policy = Policy.load(file)
    assert site.train(0, {0: data}, options) == first
    site.policy = Policy(max_upload=10**9)
    assert site.train(0, {0: data}, options) == first
    assert site.train(1, {1: data}, options)


@nightly_except("FedAvg")
@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"algorithm": "SCAFFOLD", "uplink": [method("Half")]}], ids=["FedAvg", "Half"])
def test_what_leaves_a_site_is_clipped(tmp_path, monkeypatch, changes):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, merged(SMALL, {"federated": changes, "trainer": {"max_epochs": 1}}))
    file = approve(tmp_path / "site", recipe, "clip: 0.01\nmin_clients: 3\nmodules: [network]\n")
    initial = dict(build([recipe]).module.state_dict())

    def change(served):
        after = served.lightning_module.state_dict()
        return torch.stack([(after[name] - value).norm() for name, value in initial.items()]).norm().item()

    served, _ = run_on_sites(recipe, tmp_path, min_sites=3, node_config=lambda client: {"policy": str(file)})
    assert served.callback_metrics["federated/failed"] == 0
    assert 0.001 < change(served) < 0.0101
    free, _ = run_on_sites(recipe, tmp_path / "free")
    assert change(free) > 0.05


@nightly_except("True")
@pytest.mark.slow
@pytest.mark.parametrize("secure", [True, False])
def test_what_leaves_a_site_with_a_mask_of_infinite_numbers_is_clipped(tmp_path, monkeypatch, secure):
    monkeypatch.chdir(tmp_path)
    model = {"init_args": {"network": {"class_path": "tests.flower.helpers.Masked"}}}
    recipe = write_recipe(tmp_path, merged(SMALL, {"model": model, "trainer": {"max_epochs": 1}}))
    file = approve(tmp_path / "site", recipe, "clip: 0.01\nmin_clients: 3\n")
    initial = dict(build([recipe]).module.state_dict())
    settings = {"secure_aggregation": True, "secure_range": 2.0} if secure else {}
    node_config = {"policy": str(file)}
    served, _ = run_on_sites(recipe, tmp_path, min_sites=3, node_config=lambda client: node_config, **settings)
    assert served.callback_metrics["federated/failed"] == 0
    after = served.lightning_module.state_dict()
    assert torch.equal(after["network.mask"], initial.pop("network.mask"))
    assert 0.001 < torch.stack([(after[name] - value).norm() for name, value in initial.items()]).norm() < 0.0101


@pytest.mark.slow
def test_values_of_which_the_change_is_not_known_are_not_clipped(tmp_path, monkeypatch):
    """In its second round RoLoRA sends a factor that the broadcast leaves out."""
    monkeypatch.chdir(tmp_path)
    algorithm = {"class_path": "FedLoRA", "init_args": {"operator": {"class_path": "RoLoRA"}}}
    site, sent, options = joined(tmp_path, {"federated": {"algorithm": algorithm}, "lowrank": LORA})
    data = Dense().encode(sent)
    assert site.train(0, {0: data}, options)
    site.policy = Policy(clip=0.5)
    with pytest.raises(PolicyViolation, match=r"clip=0\.5.*RoLoRA"):
        site.train(1, {1: data}, options)


@pytest.mark.slow
def test_the_audit_log_has_every_message(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, SMALL)
    log = tmp_path / "elsewhere" / "log.jsonl"
    run_on_sites(recipe, tmp_path, node_config=lambda client: {"audit_log": str(log)} if client == 0 else {})
    entries = entries_of(log)
    assert [(entry["direction"], entry["kind"], entry["round"]) for entry in entries] == [
        ("received", "query.join", None),
        ("sent", "query.join", None),
        *((direction, "train.round", number) for number in range(2) for direction in ("received", "sent")),
    ]
    parameters = 64 * 16 + 16 + 16 * 16 + 16 + 16 * 10 + 10
    assert all(entry["bytes"] > 4 * parameters for entry in entries[2:])
    assert len({entry["digest"] for entry in entries}) == len(entries)


def test_the_audit_logs_digest_is_of_every_value():
    flwr = pytest.importorskip("flwr.app", reason="Flower needs Python 3.11")
    from lightning_lowrank.flower.client import _measured

    def digest(values, name="a"):
        record = flwr.ArrayRecord({name: flwr.Array(np.array(values, dtype=np.float32))})
        return _measured(SimpleNamespace(content=flwr.RecordDict({"tensors": record})))[1]["digest"]

    assert digest([1.0, 2.0]) == digest([1.0, 2.0])
    assert len({digest([1.0, 2.0]), digest([1.0, 2.5]), digest([2.0, 1.0]), digest([1.0, 2.0], "b")}) == 4


@pytest.mark.slow
def test_a_round_that_costs_too_much_privacy_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("dp_accounting")
    monkeypatch.chdir(tmp_path)
    private = method("DifferentialPrivacy", noise_multiplier=1.0, delta=1e-6, secure=True)
    recipe = write_recipe(tmp_path, merged(SMALL, {"trainer": {"callbacks": [private]}}))
    run_on_sites(recipe, tmp_path)
    entries = entries_of(tmp_path / "state" / "audit_client_0.jsonl")
    _, first, second = (entry["epsilon"] for entry in entries if entry["direction"] == "sent")
    assert 0 < first < second

    def run(policy, name):
        file = approve(tmp_path / name / "site", recipe, policy)
        for client in range(3):
            Approvals(tmp_path / "none").begin_account(
                tmp_path / name / "state" / f"privacy_client_{client}.json", new_account=False
            )
        config = {"policy": file}
        return run_on_sites(recipe, tmp_path / name, node_config=lambda client: config if client == 0 else {})

    served, _ = run(f"max_epsilon: {(first + second) / 2}", "some")
    assert served.callback_metrics["federated/failed"] == 1
    entries = entries_of(tmp_path / "some" / "state" / "audit_client_0.jsonl")
    assert [entry["direction"] for entry in entries] == [*["received", "sent"] * 2, "received", "refused", "sent"]
    assert "policy has max_epsilon=" in entries[-2]["reason"]
    served, _ = run("{max_epsilon: 1000.0, max_delta: 1.0e-7}", "delta")
    assert served.callback_metrics["federated/clients"] == 2
    assert "max_delta=1e-07" in reasons(tmp_path / "delta")[0]


@pytest.mark.nightly
def test_what_samples_have_cost_counts_over_studies_and_lost_files(tmp_path, monkeypatch):
    pytest.importorskip("dp_accounting")
    monkeypatch.chdir(tmp_path)
    private = method("DifferentialPrivacy", noise_multiplier=1.0, delta=1e-6, secure=True)
    changes = {"trainer": {"callbacks": [private], "max_epochs": 1}}
    recipe, state = write_recipe(tmp_path, merged(SMALL, changes)), tmp_path / "state"
    account, config = state / "privacy_client_0.json", {"policy": str(tmp_path / "site" / "policy.yaml")}
    Approvals(tmp_path / "none").begin_account(account, new_account=False)

    def run(policy, failed):
        approve(tmp_path / "site", recipe, policy)
        served, _ = run_on_sites(recipe, tmp_path, node_config=lambda client: config if client == 0 else {})
        assert served.callback_metrics["federated/failed"] == (failed if 0 in joined_clients(served) else 0)
        return served

    def joined_clients(served):
        members = next(each for each in served.callbacks if isinstance(each, RemoteRounds)).members
        return [client for client, samples in enumerate(members.samples) if samples]

    def epsilons():
        entries = entries_of(state / "audit_client_0.jsonl")
        return [
            entry["epsilon"]
            for entry in entries
            if (entry["direction"], entry["kind"]) == ("sent", "train.round") and entry.get("epsilon")
        ]

    run("max_epsilon: 1000.0", 0)
    for kept in state.glob("study_*.safetensors"):
        kept.unlink()
    run("max_epsilon: 1000.0", 0)
    first, second = epsilons()
    spending = PrivacyAccount(account)
    assert first < second == spending.epsilon(1e-6)
    run(f"max_epsilon: {second + (second - first) / 2}", 1)
    assert epsilons() == [first, second]
    assert spending.epsilon(1e-6) == second
    # A round that fails when it has been paid for stays counted: a server could have rounds fail without end.
    upload = site._FlowerExchange.receive

    def fails(exchange, client, packet):
        if exchange._site.client == 0:
            raise RuntimeError("the disk is full")
        upload(exchange, client, packet)

    with monkeypatch.context() as patched:
        patched.setattr(site._FlowerExchange, "receive", fails)
        run("max_epsilon: 1000.0", 1)
    assert spending.epsilon(1e-6) > second
    # Without the account, or with a damaged one, no study begins here.
    for damage in (lambda: account.write_text("[{]"), account.unlink, lambda: account.symlink_to(tmp_path / "other")):
        damage()
        assert 0 not in joined_clients(run("max_epsilon: 1000.0", 0))
        assert str(account) in reasons(state)[-1]
    account.unlink()
    with pytest.raises(MisconfigurationException, match="--new-account"):
        Approvals(tmp_path / "site" / "approved").begin_account(account, new_account=False)
    Approvals(tmp_path / "site" / "approved").begin_account(account, new_account=True)
    assert 0 in joined_clients(run("max_epsilon: 1000.0", 0))


def test_privacy_that_is_less_than_asked_for():
    with pytest.raises(PolicyViolation, match=r"policy.*clip=0\.5.*federated\.privacy"):
        Policy(clip=0.5).check_privacy(ClientPrivacy(clip=1.0, noise_multiplier=1.0), None)
    Policy(clip=1.0).check_privacy(ClientPrivacy(clip=1.0, noise_multiplier=1.0), None)
    with pytest.raises(PolicyViolation, match=r"policy.*max_epsilon=8.*DifferentialPrivacy"):
        Policy(max_epsilon=8).check_privacy(None, None)
