"""Studies of three sites of which one is hostile, or has lost its file: the others' result is what comes out."""

import json
from pathlib import Path

import pytest
import torch
from flwr.app import Array, ArrayRecord

from lightning_lowrank import algorithms
from lightning_lowrank.compression import Dense
from lightning_lowrank.federated import client_states
from lightning_lowrank.federated.protocols import Personal
from lightning_lowrank.flower.client import client_app
from lightning_lowrank.flower.remote_rounds import RemoteRounds
from lightning_lowrank.flower.site import Site
from tests.flower.helpers import MUD, merged, run_on_sites, write_recipe
from tests.flower.hostile_sites import with_body
from tests.grids import nightly_except

SMALL = {
    "federated": {"clients_per_round": None, "local_epochs": 1},
    "data": {"init_args": {"limit_samples": 90}},
    "trainer": {"max_epochs": 3, "limit_val_batches": 0},
}


def model_of(trainer):
    return trainer.lightning_module.state_dict()


def assert_same(one, other):
    for name, value in model_of(one).items():
        assert torch.equal(model_of(other)[name], value), name


def answering(hostile, change):
    """Change the bytes of what one node sends in a round."""

    def tamper(node, reply):
        if node == hostile and reply.metadata.message_type == "train.round" and not reply.has_error():
            ((number, array),) = reply.content.array_records["payloads"].items()
            data = change(int(number), array.data)
            reply.content["payloads"] = ArrayRecord({number: Array("uint8", (len(data),), array.stype, data)})
        return reply

    return tamper


def scaled(by):
    return lambda data: Dense().encode({name: value * by for name, value in Dense().decode(data).items()})


POISON = [scaled(-100), scaled(1e30), scaled(1e25), lambda data: data[:100], lambda data: b"\xff" * 500]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightning_lowrank.flower.remote_rounds._WAIT_FOR_NEW", 0.05)


def test_a_torn_file_is_put_aside_and_told(tmp_path):
    file = tmp_path / "state.safetensors"
    Path("recipe.yaml").touch()
    site = Site("recipe.yaml", 0, file)
    site.listen({0: b"first", 1: b"second"})
    whole, secret = file.read_bytes(), site._kept.secret
    assert Site("recipe.yaml", 0, file).last_broadcast == 1
    assert Site("recipe.yaml", 0, file)._kept.secret == secret
    for torn in (b"", whole[:50], whole[:-1], b"\xff" * len(whole), whole.replace(b"followed", b"fallowed")):
        file.write_bytes(torn)
        with pytest.warns(UserWarning, match="cannot be read .* continues as a new client"):
            new = Site("recipe.yaml", 0, file)
        assert (new.last_broadcast, file.exists()) == (-1, False)
        assert file.with_suffix(".damaged").read_bytes() == torn


@nightly_except("FedMUD")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedAvg", "SCAFFOLD", "FedMUD"])
def test_a_hostile_site_decides_nothing(tmp_path, name):
    changes = {"federated": {"algorithm": name}, "lowrank": MUD if name == "FedMUD" else None}
    recipe = write_recipe(tmp_path, merged(SMALL, {**changes, "trainer": {"max_epochs": 5}}))

    def run(folder, change):
        def prepare(grid):
            grid.tamper = answering(102, change)

        return run_on_sites(recipe, tmp_path / folder, prepare=prepare)[0]

    silent = run("silent", lambda number, data: b"x")
    hostile = run("hostile", lambda number, data: POISON[number % len(POISON)](data))
    assert hostile.callback_metrics["federated/failed"] == 1
    assert_same(silent, hostile)


@pytest.mark.nightly
def test_rounds_of_a_hostile_site_alone_are_passed_over(tmp_path):
    rounds = {"federated": {"participants": [[0], [1], [2]]}}
    recipe = write_recipe(tmp_path, merged(SMALL, rounds))
    fewer = {"federated": {"participants": [[0], [2]]}, "trainer": {"max_epochs": 2}}
    without = write_recipe(tmp_path, merged(SMALL, fewer), "two.yaml")

    def prepare(grid):
        grid.tamper = answering(102, lambda number, data: b"x" * 30)

    served, _ = run_on_sites(recipe, tmp_path / "one", prepare=prepare)
    assert served.callback_metrics["federated/clients"] == 1
    assert served.current_epoch == 3
    # Other rounds draw other batches, so that the two are near each other, not the same.
    other, _ = run_on_sites(without, tmp_path / "two")
    for name, value in model_of(other).items():
        torch.testing.assert_close(model_of(served)[name], value, rtol=0.5, atol=0.1)


@pytest.mark.slow
def test_a_second_node_does_not_take_a_clients_place(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path, SMALL)
    told = []
    monkeypatch.setattr("lightning_lowrank.flower.members.rank_zero_warn", told.append)

    def prepare(grid):
        def before(node, message):
            # In the second round, and again in the third.
            if len(grid.sent) in (7, 10):
                grid.start(client_app(recipe), partition_id=1, state_dir=str(tmp_path / f"intruder{len(grid.sent)}"))

        grid.before = before

    served, grid = run_on_sites(recipe, tmp_path, prepare=prepare)
    assert [line for line in told if "its site is node 102" in line]
    assert {node for node, kind in grid.sent if kind == "train.round"} == {101, 102, 103}
    assert served.callback_metrics["federated/clients"] == 3


@pytest.mark.parametrize("harm", ["unreadable", "bomb", "forged"])
@pytest.mark.nightly
def test_what_flower_makes_of_a_message_is_its_sites_alone(tmp_path, monkeypatch, harm):
    recipe = write_recipe(tmp_path, merged(SMALL, {"trainer": {"max_epochs": 1}}))
    told = []
    monkeypatch.setattr("lightning_lowrank.flower.remote_rounds.rank_zero_warn", told.append)

    def silent(grid):
        grid.tamper = answering(102, lambda number, data: b"x")

    def prepare(grid):
        asked, own = {}, grid.pull_messages
        grid.before = lambda node, message: asked.setdefault(node, []).append(message.metadata.message_id)

        def forge(node, reply):
            # What a message says of itself is in what its site has written.
            if (node, harm) == (102, "forged") and reply.metadata.message_type == "train.round":
                reply.metadata.__dict__.update(_src_node_id=101, _reply_to_message_id=asked[101][-1])
            return reply

        def change(node, content):
            if node != 102 or not content.startswith(b"Array "):
                return content
            many = {**json.loads(content.partition(b"\x00")[2]), "arraychunk_ids": [0] * 1000}
            return {"bomb": with_body(content, json.dumps(many).encode()), "unreadable": content[:-5]}.get(
                harm, content
            )

        grid.tamper, grid.tamper_object = forge, change
        # The last comes first.
        grid.pull_messages = lambda numbers: list(own(list(numbers)[::-1]))

    served, _ = run_on_sites(recipe, tmp_path, prepare=prepare, round_timeout=0.2)
    left_out, _ = run_on_sites(recipe, tmp_path / "silent", prepare=silent)
    assert served.callback_metrics["federated/failed"] == 1
    assert_same(left_out, served)
    if harm == "bomb":
        assert any("client 1: it sent a bad payload: ValueError: its arrays have" in line for line in told)


@pytest.mark.nightly
def test_a_connection_that_breaks_is_no_sites_fault(tmp_path):
    def prepare(grid):
        def pull(numbers):
            raise ConnectionResetError("the SuperLink has gone")

        grid.pull_messages = pull

    with pytest.raises(ConnectionResetError):
        run_on_sites(write_recipe(tmp_path, SMALL), tmp_path, prepare=prepare)


class Clock:
    """Stands in for the module time: only waiting takes time."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.nightly
def test_a_node_that_never_joins_is_waited_for_once(tmp_path, monkeypatch):
    clock = Clock()
    for module in ("members", "remote_rounds", "transport"):
        monkeypatch.setattr(f"lightning_lowrank.flower.{module}.time", clock)
    monkeypatch.setattr("lightning_lowrank.flower.remote_rounds._WAIT_FOR_NEW", 60.0)

    def prepare(grid):
        silent = grid.start(client_app(recipe), partition_id=0, state_dir=str(tmp_path / "silent"))
        grid.tamper = lambda node, reply: None if node == silent else reply

    recipe = write_recipe(tmp_path, merged(SMALL, {"trainer": {"max_epochs": 2}}))
    served, _ = run_on_sites(recipe, tmp_path, prepare=prepare, poll=1.0)
    assert served.callback_metrics["federated/clients"] == 3
    assert 60 < clock.now < 70


@pytest.mark.nightly
def test_nodes_that_say_nonsense_or_nothing_hold_nobody_up(tmp_path):
    recipe = write_recipe(tmp_path, SMALL)

    def prepare(grid):
        odd = [
            grid.start(client_app(recipe), partition_id=number, state_dir=str(tmp_path / f"odd{number}"))
            for number in range(3)
        ]

        def tamper(node, reply):
            if node == odd[0]:
                return None
            if node == odd[1]:
                reply.content["fields"]["frozen"] = ["one", "two"]
                reply.content["fields"]["clients"] = 2**33
            if node == odd[2]:
                del reply.content["fields"]
            return reply

        grid.tamper = tamper

    served, _ = run_on_sites(recipe, tmp_path, prepare=prepare)
    plain, _ = run_on_sites(recipe, tmp_path / "plain")
    assert_same(plain, served)


@pytest.mark.nightly
def test_double_answers_are_dropped(tmp_path):
    recipe = write_recipe(tmp_path, SMALL)

    def prepare(grid):
        own = grid.pull_messages

        def pull(numbers):
            found = list(own(numbers))
            return [*found, *found]

        grid.pull_messages = pull

    served, _ = run_on_sites(recipe, tmp_path, prepare=prepare)
    plain, _ = run_on_sites(recipe, tmp_path / "plain")
    assert_same(plain, served)


@pytest.mark.parametrize("harm", [Path.unlink, lambda file: file.write_bytes(b"torn")], ids=["gone", "torn"])
@pytest.mark.parametrize("name", ["SCAFFOLD", "FedMUD"])
@pytest.mark.nightly
def test_a_site_without_its_file_goes_on_as_a_new_one(tmp_path, monkeypatch, name, harm):
    recipe = write_recipe(
        tmp_path, merged(SMALL, {"federated": {"algorithm": name}, "lowrank": MUD if name == "FedMUD" else None})
    )
    told, forgotten = [], []
    monkeypatch.setattr("lightning_lowrank.flower.client.rank_zero_warn", told.append)
    for module in ("members", "remote_rounds"):
        monkeypatch.setattr(f"lightning_lowrank.flower.{module}.rank_zero_warn", told.append)
    kind = getattr(algorithms, name) if issubclass(getattr(algorithms, name), Personal) else Personal
    own = kind.forget

    def forget(self, server, client):
        forgotten.append((server.round, client.id))
        own(self, server, client)

    monkeypatch.setattr(kind, "forget", forget)

    def prepare(grid):
        restart = grid.before

        def before(node, message):
            restart(node, message)
            if len(grid.sent) == 8:
                (file,) = (tmp_path / "state").glob("*_client_1.safetensors")
                harm(file)

        grid.before = before

    served, _ = run_on_sites(recipe, tmp_path, fresh=True, prepare=prepare)
    assert any("lost its state" in line and "client 1" in line for line in told)
    # It misses the round in which it says so, and takes part in the next one.
    assert forgotten == [(2, 1)]
    assert served.callback_metrics["federated/clients"] == 3
    assert all(value.isfinite().all() for value in model_of(served).values())


@pytest.mark.slow
def test_a_site_that_was_not_drawn_does_not_fail_the_round(tmp_path, monkeypatch):
    """It says that it has lost its state when it is told of a round that it sits out."""
    federated = {"algorithm": "FedMUD", "clients_per_round": 2}
    recipe = write_recipe(
        tmp_path, merged(SMALL, {"federated": federated, "lowrank": MUD, "trainer": {"max_epochs": 5}})
    )
    told, figures, lost = [], [], []
    monkeypatch.setattr("lightning_lowrank.flower.remote_rounds.rank_zero_warn", told.append)
    own = RemoteRounds.on_train_epoch_end

    def note(self, trainer, module):
        own(self, trainer, module)
        figures.append((self.plan.clients, int(trainer.callback_metrics["federated/failed"])))

    monkeypatch.setattr(RemoteRounds, "on_train_epoch_end", note)

    def prepare(grid):
        def before(node, message):
            client = node - 101
            file = next((tmp_path / "state").glob(f"*_client_{client}.safetensors"), None)
            has_state = file is not None and client_states.load(file)["followed"] >= 0
            if message.metadata.message_type == "query.listen" and has_state and not lost:
                lost.append(client)
                file.unlink()
                grid.nodes[node] = client_app(recipe), grid.nodes[node][1]

        grid.before = before

    run_on_sites(recipe, tmp_path, prepare=prepare)
    (absent,) = lost
    assert {failed for clients, failed in figures if absent not in clients} == {0}
    assert [line for line in told if "lost its state" in line and f"client {absent}" in line]
