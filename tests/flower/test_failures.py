"""Sites that send nonsense, fail, or are not what they should be; recipes that cannot run across sites."""

import random
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank import FederatedLoop, algorithms
from lightning_lowrank.cli import main
from lightning_lowrank.compression import Dense
from lightning_lowrank.federated import loop
from lightning_lowrank.flower import remote_rounds
from lightning_lowrank.flower.approval import fill_placeholders, read_plain
from lightning_lowrank.flower.client import client_app
from lightning_lowrank.flower.recipe import build, check_optimizers
from lightning_lowrank.flower.remote_rounds import RemoteRounds
from lightning_lowrank.flower.server import serve
from lightning_lowrank.models import Classifier
from tests.flower.helpers import (
    MUD,
    NORMALISED,
    assert_equal_runs,
    merged,
    method,
    reasons,
    run_on_sites,
    simulate,
    write_recipe,
)
from tests.flower.local_grid import LocalGrid
from tests.grids import nightly_except

FAST = {
    "federated": {"clients_per_round": None, "local_epochs": 1},
    "data": {"class_path": "Digits", "init_args": {"batch_size": 16, "limit_samples": 60}},
    "trainer": {"max_epochs": 1, "limit_val_batches": 0},
}


def fast(folder, changes=None, name="recipe.yaml"):
    return write_recipe(folder, merged(FAST, changes or {}), name)


def spoil(data: bytes) -> dict[str, bytes]:
    tensors = Dense().decode(data)
    first = next(iter(tensors))
    return {
        "cut": data[: len(data) // 2],
        "noise": random.Random(0).randbytes(len(data)),
        "too much": data + bytes(len(data) * 3 + 100_000),
        "shape": Dense().encode({**tensors, first: torch.zeros(3)}),
        "not finite": Dense().encode({**tensors, first: tensors[first] / 0}),
        "absent": b"",
    }


KINDS = ["cut", "noise", "too much", "shape", "not finite", "absent"]


def tamper_with(client_node, kinds):
    """Spoil what one node sends, in each round in another way."""

    def tamper(node, reply):
        if node == client_node and reply.metadata.message_type == "train.round":
            ((number, array),) = reply.content.array_records["payloads"].items()
            data = spoil(array.data)[kinds[int(number) % len(kinds)]]
            record = ArrayRecord({number: Array("uint8", (len(data),), array.stype, data)} if data else {})
            reply.content["payloads"] = record
        return reply

    return tamper


@pytest.mark.slow
@pytest.mark.nightly
def test_bad_payloads_are_refused_and_the_rounds_go_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = fast(tmp_path, {"trainer": {"max_epochs": len(KINDS)}})
    told = []
    monkeypatch.setattr("lightning_lowrank.flower.remote_rounds.rank_zero_warn", told.append)

    def prepare(grid):
        grid.tamper = tamper_with(102, KINDS)

    served, _ = run_on_sites(recipe, tmp_path, prepare=prepare)
    assert served.callback_metrics["federated/clients"] == 2
    assert served.callback_metrics["federated/failed"] == 1
    refused = [line for line in told if "without the site of client 1: it sent a bad payload" in line]
    for said, line in zip(
        ("safetensors", "safetensors", "at most", "shape", "not finite", "nothing was received"), refused, strict=True
    ):
        assert said in line
    assert all(value.isfinite().all() for value in served.lightning_module.state_dict().values())


@pytest.mark.slow
@pytest.mark.nightly
def test_a_bad_payload_may_stop_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = fast(tmp_path)

    def prepare(grid):
        grid.tamper = tamper_with(103, ["shape"])

    with pytest.raises(MisconfigurationException, match="round 0: the site of client 2 failed: it sent a bad payload"):
        run_on_sites(recipe, tmp_path, prepare=prepare, on_bad_payload="stop")


@pytest.mark.nightly
def test_a_round_that_every_site_fails_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = fast(tmp_path)

    def prepare(grid):
        def tamper(node, reply):
            return tamper_with(node, ["cut"])(node, reply)

        grid.tamper = tamper

    with pytest.raises(MisconfigurationException, match="no site made round 0: client 0: it sent a bad payload"):
        run_on_sites(recipe, tmp_path, prepare=prepare)


@pytest.mark.nightly
def test_a_site_that_does_not_answer_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = fast(tmp_path)

    def prepare(grid):
        grid.tamper = lambda node, reply: None if (node, reply.metadata.message_type) == (101, "train.round") else reply

    served, _ = run_on_sites(recipe, tmp_path, prepare=prepare, round_timeout=0.2)
    assert served.callback_metrics["federated/failed"] == 1


@pytest.mark.nightly
def test_a_round_that_nobody_answers_is_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = fast(tmp_path, {"federated": {"algorithm": "SCAFFOLD"}, "trainer": {"max_epochs": 2}})

    def prepare(grid):
        lost = iter([101, 102, 103])

        def tamper(node, reply):
            return None if reply.metadata.message_type == "train.round" and next(lost, None) else reply

        grid.tamper = tamper

    served, grid = run_on_sites(recipe, tmp_path, prepare=prepare, round_timeout=0.2, start_timeout=300.0)
    # The sites had made the round, and send the same again: what they keep of it is kept once.
    assert_equal_runs(simulate(recipe), served, ledger=False)
    assert served.callback_metrics["federated/clients"] == 3
    assert [kind for _, kind in grid.sent].count("train.round") == 9


@nightly_except()
@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, None),
        ({"min_clients": 2}, None),
        ({"min_clients": 3}, "round 0 has answers of 2 of 3 sites and needs 3 .min-sites.*client 1: "),
        ({"on_client_error": "raise"}, "round 0: the site of client 1 failed: "),
    ],
)
def test_a_site_whose_update_is_not_finite_is_left_out(tmp_path, monkeypatch, settings, told):
    monkeypatch.chdir(tmp_path)
    recipe = fast(tmp_path, {"federated": {"algorithm": "SCAFFOLD", **settings}})
    own = Classifier.training_step

    def training_step(self, batch, batch_idx):
        (loop,) = (each for each in self.trainer.callbacks if isinstance(each, FederatedLoop))
        return own(self, batch, batch_idx) * (float("nan") if loop.participants == [[1]] else 1)

    monkeypatch.setattr(Classifier, "training_step", training_step)
    if told is not None:
        with pytest.raises(MisconfigurationException, match=f"(?s){told}"):
            run_on_sites(recipe, tmp_path)
        assert "not finite" in reasons(tmp_path)[-1]
        return
    served, _ = run_on_sites(recipe, tmp_path)
    assert served.callback_metrics["federated/failed"] == 1
    assert all(value.isfinite().all() for value in served.lightning_module.state_dict().values())


@pytest.mark.slow
def test_missing_sites_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    monkeypatch.setattr(remote_rounds, "rank_zero_info", said.append)
    with pytest.raises(MisconfigurationException, match=r"has 3 clients, and after 0.1 s .* missing are \[2\]"):
        run_on_sites(fast(tmp_path), tmp_path, clients=2, start_timeout=0.1, min_sites=3)
    assert any("start-timeout" in each and "0.1 s" in each and "[0, 1]" in each for each in said)


@pytest.mark.slow
def test_a_study_begins_with_the_sites_that_are_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = fast(tmp_path, {"federated": {"clients_per_round": None}})

    def hostile(grid):
        """Client 1 raises an error at each message."""
        grid.nodes[102] = ClientApp(mods=[lambda message, context, answer: 1 / 0]), grid.nodes[102][1]

    served, _ = run_on_sites(recipe, tmp_path, prepare=hostile, start_timeout=0.1, min_sites=2)
    assert served.callback_metrics["federated/clients"] == 2
    assert served.callback_metrics["federated/failed"] == 0
    alone = simulate(
        fast(tmp_path, {"federated": {"clients_per_round": None, "participants": [[0, 2]] * 2}}, "two.yaml")
    )
    for name, value in alone.lightning_module.state_dict().items():
        torch.testing.assert_close(served.lightning_module.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    # One that comes when it has begun is told so.
    members = next(each for each in served.callbacks if isinstance(each, RemoteRounds)).members
    assert members.samples[1] == 0


@pytest.mark.nightly
def test_sites_that_are_something_else_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = fast(tmp_path)
    other = fast(tmp_path, {"seed_everything": 4}, "other.yaml")
    cases = [
        ({"partition_id": 0}, other, "client 0: it runs another recipe"),
        ({}, recipe, "has no client number"),
        ({"partition_id": 3}, recipe, "partition-id=3, and the recipe has 3 clients"),
        ({"partition_id": 0, "num_partitions": 5}, recipe, "num-partitions=5 .* has 3 clients"),
        ({"partition_id": 0, "own_data": "false"}, recipe, "like own-data=true, got 'false'"),
        ({"partition_id": 0, "num_partitions": "3"}, recipe, "like num-partitions=3, got '3'"),
    ]
    for number, (config, theirs, said) in enumerate(cases):
        grid, folder = LocalGrid(), tmp_path / f"state{number}"
        grid.start(client_app(theirs), state_dir=str(folder), **config)
        with pytest.raises(MisconfigurationException, match="a site cannot take part: node 101") as told:
            serve(recipe, grid, start_timeout=0.1, poll=0.001)
        assert re.search(said, "; ".join([str(told.value), *reasons(folder)]))
    grid = LocalGrid()
    for _ in range(2):
        grid.start(client_app(recipe), partition_id=1)
    with pytest.raises(MisconfigurationException, match=r"node.*1"):
        serve(recipe, grid, start_timeout=0.1, poll=0.001, min_sites=2)


@pytest.mark.slow
def test_fewer_sites_than_the_recipe_needs_are_refused(tmp_path):
    recipe = write_recipe(tmp_path, {"federated": {"min_clients": 2}})
    with pytest.raises(MisconfigurationException, match=r"sites=1.*min_clients=2"):
        serve(recipe, LocalGrid(), min_sites=1)


def test_settings_are_checked():
    for settings in (
        *({"on_bad_payload": "ignore"}, {"round_timeout": 0.0}, {"start_timeout": -1.0}),
        *({"min_sites": -1}, {"min_sites": 1.5}, {"keep_broadcasts": 0}),
    ):
        with pytest.raises(MisconfigurationException, match=next(iter(settings)).replace("_", "-")):
            RemoteRounds(None, b"", LocalGrid(), **settings)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"federated": {"personal_test": "matched_labels"}}, r"federated\.personal_test"),
        ({"federated": {"client_dropout": 0.5}}, r"federated\.client_dropout"),
        ({"federated": None}, "no `federated` section"),
        ({"trainer": {"max_steps": 10}}, r"trainer\.max_steps"),
        ({"trainer": {"fast_dev_run": True}}, r"trainer\.fast_dev_run"),
        ({"seeds": [0, 1]}, "seed_everything"),
        ({"trainer": {"callbacks": [{"class_path": "StaticBatchNorm"}]}}, "StaticBatchNorm"),
        (
            {
                "federated": {
                    "algorithm": "FedMUD",
                    "downlink": [{"class_path": "Half", "init_args": {"error_feedback": True}}],
                }
            },
            "FedMUD announces changes of frozen weights",
        ),
    ],
)
def test_recipes_that_cannot_run_across_sites(tmp_path, changes, said):
    with pytest.raises(MisconfigurationException, match=said):
        build([fast(tmp_path, changes)])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["HeteroFL", "FedAvg"])
@pytest.mark.nightly
def test_a_method_that_needs_static_batch_norm_says_what_sites_can_have(tmp_path, monkeypatch, algorithm):
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    for part in (remote_rounds, loop):
        monkeypatch.setattr(part, "rank_zero_warn", said.append)
    changes = {"federated": {"algorithm": algorithm}, "model": NORMALISED, "trainer": {"max_epochs": 1}}
    run_on_sites(fast(tmp_path, changes), tmp_path)
    advice = [each for each in said if "static BatchNorm" in each]
    assert len(advice) == (algorithm == "HeteroFL")
    assert all("GroupNorm" in each and "StaticBatchNorm()" not in each for each in advice)


@pytest.mark.slow
def test_schedules_that_count_steps_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    projected = {"model": {"init_args": {"optimizer": method("ProjectedSGD", lr=0.1, rank=2)}}}
    with pytest.raises(MisconfigurationException, match=r"ProjectedSGD.*refresh_interval=200"):
        run_on_sites(fast(tmp_path, projected), tmp_path)
    config = SimpleNamespace(interval="step", scheduler=torch.optim.lr_scheduler.ConstantLR)
    trainer = SimpleNamespace(optimizers=[], lr_scheduler_configs=[config])
    with pytest.raises(MisconfigurationException, match="interval='epoch'"):
        check_optimizers(trainer, SimpleNamespace(automatic_optimization=True))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_count_stays_a_count(tmp_path):
    """With Flower imported before Lightning, jsonargparse would read the counts as the shares 1.0."""
    recipe = fast(tmp_path, {"federated": {"clients_per_round": 1}, "trainer": {"limit_train_batches": 1}})
    built = build([recipe])
    assert type(built.loop.clients_per_round) is int
    assert type(built.trainer.limit_train_batches) is int


@pytest.mark.slow
def test_the_command_line_is_not_written_to_the_log(tmp_path, monkeypatch):
    recipe = fast(tmp_path)
    monkeypatch.setattr(sys, "argv", ["flwr-clientapp", "--token", "secret"])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        build([recipe])
    assert not any("secret" in str(each.message) for each in told)
    assert sys.argv[2] == "secret"


@pytest.mark.slow
def test_the_command_writes_a_project(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base = fast(tmp_path, {"lowrank": MUD, "federated": {"algorithm": "FedMUD"}})
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("trainer: {max_epochs: 7}\n")
    main(["flower", "--config", str(base), "--config", str(overlay), "my_run 2"])
    folder = tmp_path / "my_run 2"
    assert "flwr run" in capsys.readouterr().out
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate

    config, _ = load_and_validate(folder / "pyproject.toml")
    assert config["project"]["name"] == "my-run-2"
    assert build_fab_from_disk(folder)
    content = read_plain((folder / "recipe.yaml").read_bytes(), "it")
    own = read_plain((folder / "server.yaml").read_bytes(), "it")
    built = build(fill_placeholders(content, own["site"]))
    assert built.trainer.max_epochs == 7
    assert type(built.loop.algorithm) is algorithms.FedMUD
    # The whole recipe, written out, is the same recipe.
    assert built.content["federated"] == content["federated"]
    main(["flower", "resolve", str(base), str(overlay), "--output", "resolved.yaml"])
    assert Path("resolved.yaml").read_bytes() == (folder / "recipe.yaml").read_bytes()


@pytest.mark.slow
def test_the_command_refuses_before_it_writes(tmp_path):
    with pytest.raises(SystemExit, match="no such file"):
        main(["flower", "--config", str(tmp_path / "none.yaml"), str(tmp_path / "out")])
    dropping = fast(tmp_path, {"federated": {"client_dropout": 0.5}})
    with pytest.raises(SystemExit, match=r"federated\.client_dropout"):
        main(["flower", "--config", str(dropping), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_without_flower_the_command_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_lowrank.flower.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"\.\[flower\]"):
        main(["flower", "--config", str(fast(tmp_path)), str(tmp_path / "out")])
