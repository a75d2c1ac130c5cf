"""A server that is killed and started again, sites that are away for long, and rounds that wait for enough sites."""

from pathlib import Path
from threading import Timer

import pytest
import torch
from filelock import FileLock
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.federated import client_states
from lightning_lowrank.flower import remote_rounds, server
from lightning_lowrank.flower.client import client_app
from lightning_lowrank.flower.remote_rounds import RemoteRounds
from lightning_lowrank.flower.server import serve
from tests.flower.helpers import MUD, assert_equal_runs, merged, method, run_on_sites, simulate, write_recipe
from tests.flower.local_grid import LocalGrid

pytestmark = pytest.mark.slow

SMALL = {"data": {"init_args": {"limit_samples": 60}}, "trainer": {"max_epochs": 3}}
RECIPES = {
    "momentum": {"federated": {"algorithm": "FedAvgM"}},
    "SCAFFOLD": {"federated": {"algorithm": "SCAFFOLD"}},
    "FedMUD": {"federated": {"algorithm": "FedMUD"}, "lowrank": MUD},
    "held copy": {"federated": {"downlink": [method("TopK", share=0.5, error_feedback=True)]}},
}


@pytest.mark.nightly
def test_a_site_without_samples_does_not_count(tmp_path):
    """SCAFFOLD's and FedDyn's sums go over the clients that can be drawn."""
    partition = method("FromIndices", indices=[list(range(0, 1797, 12)), list(range(6, 1797, 12)), []])
    changes = {"federated": {"algorithm": "SCAFFOLD", "partition": partition}}
    recipe = write_recipe(tmp_path, merged(SMALL, changes))
    served, _ = run_on_sites(recipe, tmp_path)
    assert_equal_runs(simulate(recipe), served)
    assert rounds_of(served).coordinator.server.clients == 2


class Killed(BaseException):
    """Ends the server at a message."""


def killed_at(count: int):
    def prepare(grid):
        def before(node, message):
            if len(grid.sent) > count:
                raise Killed

        grid.before = before

    return prepare


def rounds_of(trainer) -> RemoteRounds:
    return next(each for each in trainer.callbacks if isinstance(each, RemoteRounds))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.nightly
def test_a_killed_server_goes_on_with_the_same_results(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, merged(SMALL, RECIPES[name]))
    whole, grid = run_on_sites(recipe, tmp_path / "whole")
    state = tmp_path / "server.ckpt"
    # Within the first round, the second, and the third, some of whose sites have made it by then.
    for count in (4, 6, 6):
        with pytest.raises(Killed):
            run_on_sites(recipe, tmp_path, prepare=killed_at(count), state=state)
    assert state.exists()
    served, again = run_on_sites(recipe, tmp_path, state=state)
    assert len(again.sent) < len(grid.sent)
    assert not state.exists()
    for tensor, value in whole.lightning_module.state_dict().items():
        assert torch.equal(served.lightning_module.state_dict()[tensor], value), tensor
    for figure in ("comm/total_up_bytes", "comm/total_down_bytes", "federated/client_steps", "val_acc"):
        assert served.callback_metrics[figure] == whole.callback_metrics[figure], figure


@pytest.mark.nightly
def test_a_server_that_comes_back_does_not_wait_for_sites_that_were_away(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, merged(SMALL, {"federated": {"clients_per_round": None}}))
    state = tmp_path / "server.ckpt"

    def prepare(grid):
        def before(node, message):
            trained = [kind for _, kind in grid.sent].count("train.round")
            if trained == 4:
                grid.nodes.pop(103, None)
            if trained == 7:
                raise Killed

        grid.before = before

    with pytest.raises(Killed):
        run_on_sites(recipe, tmp_path, prepare=prepare, state=state)
    warned: list[str] = []
    monkeypatch.setattr(remote_rounds, "rank_zero_warn", warned.append)
    served, _ = run_on_sites(recipe, tmp_path, clients=2, state=state, start_timeout=1.0)
    assert not any("continues without the sites of clients" in warning for warning in warned)
    assert served.callback_metrics["federated/clients"] == 2
    assert served.callback_metrics["federated/failed"] == 1


def test_a_study_runs_once_at_a_time(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path, SMALL)
    monkeypatch.setattr(server, "_WAIT_FOR_END", 0.1)
    with (
        FileLock(tmp_path / "server.ckpt.lock"),
        pytest.raises(MisconfigurationException, match="runs in another process"),
    ):
        serve(recipe, LocalGrid(), state=tmp_path / "server.ckpt")


def test_a_study_waits_for_the_end_of_the_server_before_it(tmp_path, monkeypatch):
    state = tmp_path / "server.ckpt"
    held = FileLock(f"{state}.lock", thread_local=False)
    monkeypatch.setattr(server, "_serve", lambda *arguments: held.is_locked)
    monkeypatch.setattr(server, "rank_zero_info", lambda told: Timer(0.2, held.release).start())
    held.acquire()
    assert serve("recipe.yaml", LocalGrid(), state=state) is False
    with held.acquire(timeout=0):
        """The lock is given back."""


@pytest.mark.nightly
def test_a_state_of_another_recipe_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = tmp_path / "server.ckpt"
    with pytest.raises(Killed):
        run_on_sites(write_recipe(tmp_path, SMALL), tmp_path, prepare=killed_at(6), state=state)
    other = write_recipe(tmp_path, merged(SMALL, {"seed_everything": 4}), "other.yaml")
    with pytest.raises(MisconfigurationException, match="not of a run of this recipe"):
        run_on_sites(other, tmp_path, state=state)


AWAY = {
    "federated": {
        "algorithm": "FedMUD",
        "clients_per_round": None,
        "participants": [[0, 1], [1, 2], [1], [1, 2], [0, 1]],
    },
    "lowrank": MUD,
    "trainer": {"max_epochs": 5},
}


def away(recipe: Path, folder: Path):
    """Let the site of client 0 be away in rounds 1 to 3."""

    def prepare(grid):
        def before(node, message):
            trained = [kind for _, kind in grid.sent].count("train.round")
            if trained == 3:
                grid.nodes.pop(101, None)
            if trained == 6 and len(grid.nodes) == 2:
                grid.start(client_app(recipe), partition_id=0, state_dir=str(folder / "state"))

        grid.before = before

    return prepare


@pytest.mark.parametrize(("keep", "failed"), [(100, 0), (4, 0), (2, 1)])
@pytest.mark.nightly
def test_broadcasts_are_kept_for_absent_sites_until_they_are_too_old(tmp_path, monkeypatch, keep, failed):
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    monkeypatch.setattr("lightning_lowrank.flower.remote_rounds.rank_zero_warn", told.append)
    recipe = write_recipe(tmp_path, merged(SMALL, AWAY))
    served, _ = run_on_sites(recipe, tmp_path, prepare=away(recipe, tmp_path), keep_broadcasts=keep)
    assert served.callback_metrics["federated/failed"] == failed
    assert any("have been deleted (keep-broadcasts=2)" in line for line in told) == bool(failed)
    # What has become too old in the last round would go in the next one.
    assert sorted(rounds_of(served)._broadcasts) == [number for number in range(1, 5) if number > 3 - keep]
    if not failed:
        simulated = simulate(recipe).lightning_module.state_dict()
        for name, value in served.lightning_module.state_dict().items():
            torch.testing.assert_close(value, simulated[name], rtol=1e-6, atol=1e-7)


@pytest.mark.nightly
def test_a_server_that_is_killed_before_it_saves_still_has_what_sites_missed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    participants = {"federated": {"participants": [[0, 1], [1, 2], [1, 2], [1, 2], [0, 1]]}}
    recipe = write_recipe(tmp_path, merged(merged(SMALL, AWAY), participants))
    state, save = tmp_path / "server.ckpt", server._KeepState.on_train_epoch_end

    def killed(keeper, trainer, module):
        if trainer.current_epoch == 3:
            raise Killed
        save(keeper, trainer, module)

    def prepare(grid):
        def before(node, message):
            if [kind for _, kind in grid.sent].count("train.round") == 3:
                grid.nodes.pop(101, None)

        grid.before = before

    with monkeypatch.context() as patched:
        patched.setattr(server._KeepState, "on_train_epoch_end", killed)
        with pytest.raises(Killed):
            run_on_sites(recipe, tmp_path, prepare=prepare, keep_broadcasts=2, state=state)
    # The site of client 0 is back, and has missed as many rounds as are kept.
    served, _ = run_on_sites(recipe, tmp_path, keep_broadcasts=2, state=state)
    assert served.callback_metrics["federated/failed"] == 0
    kept = (tmp_path / "state").glob("study_*_client_[01].safetensors")
    one, other = (client_states.load(file)["frozen"] for file in kept)
    assert one
    for name, value in one.items():
        assert torch.equal(other[name], value), name


def test_a_state_that_is_saved_within_an_epoch_has_its_round(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe, state = write_recipe(tmp_path, SMALL), tmp_path / "server.ckpt"
    whole, _ = run_on_sites(recipe, tmp_path / "whole")

    def killed(keeper, trainer, *_):
        trainer.save_checkpoint(state)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(server._KeepState, "on_train_batch_end", killed)
        with pytest.raises(Killed):
            run_on_sites(recipe, tmp_path, state=state)
    served, _ = run_on_sites(recipe, tmp_path, state=state)
    for name, value in whole.lightning_module.state_dict().items():
        assert torch.equal(served.lightning_module.state_dict()[name], value), name
    assert served.callback_metrics["comm/total_up_bytes"] == whole.callback_metrics["comm/total_up_bytes"]


@pytest.mark.nightly
def test_a_round_waits_for_enough_sites(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, merged(SMALL, {"federated": {"clients_per_round": None}}))
    whole, _ = run_on_sites(recipe, tmp_path / "whole")

    def prepare(grid):
        asked = []

        def before(node, message):
            asked.append((node, message.metadata.message_type))
            # In round 1 the site of client 1 goes as it is asked, and comes back after the others have answered.
            if asked.count((102, "train.round")) == 2 and 102 in grid.nodes:
                del grid.nodes[102]
            elif len(asked) >= 8 and len(grid.nodes) == 2:
                grid.start(client_app(recipe), partition_id=1, state_dir=str(tmp_path / "state"))

        grid.before = before
        look = grid.get_node_ids

        def get_node_ids():
            if 102 not in grid.nodes and len(grid.nodes) == 2:
                grid.start(client_app(recipe), partition_id=1, state_dir=str(tmp_path / "state"))
                return [101, 103]
            return look()

        grid.get_node_ids = get_node_ids

    served, grid = run_on_sites(recipe, tmp_path, prepare=prepare, min_sites=3, start_timeout=300.0)
    assert served.callback_metrics["federated/clients"] == 3
    # Only the one that had not answered was asked again.
    assert [kind for _, kind in grid.sent].count("train.round") == 3 * 3 + 1
    for tensor, value in whole.lightning_module.state_dict().items():
        torch.testing.assert_close(served.lightning_module.state_dict()[tensor], value)


@pytest.mark.nightly
def test_too_few_sites_end_the_run_and_it_goes_on_later(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, merged(SMALL, {"federated": {"clients_per_round": None}}))
    state = tmp_path / "server.ckpt"

    def prepare(grid):
        def before(node, message):
            if [kind for _, kind in grid.sent].count("train.round") == 5:
                grid.nodes.pop(102, None)

        grid.before = before

    with pytest.raises(MisconfigurationException, match=r"round 1 has answers of 2 of 3 sites and needs 3 \(min-sites"):
        run_on_sites(recipe, tmp_path, prepare=prepare, min_sites=3, start_timeout=0.1, state=state)
    served, _ = run_on_sites(recipe, tmp_path, min_sites=3, state=state)
    assert served.callback_metrics["federated/clients"] == 3
