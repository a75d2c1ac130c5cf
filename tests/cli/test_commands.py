"""``lightning-lowrank``: the whole road from a YAML file to files on disk, in this process."""

import logging
import shutil
import sys
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import safetensors.torch
import torch
import yaml
from torch import Tensor, nn

from lightning_lowrank import FederatedLoop, LowRank, RoundProgress, load_dense
from lightning_lowrank.cli import main, parser
from lightning_lowrank.cli.parser import LowRankCLI
from lightning_lowrank.cli.runs import read_run
from lightning_lowrank.data import Digits
from lightning_lowrank.federated.protocols import Personal, UnequalClients
from lightning_lowrank.federated.state import copy_into, trained_tensors
from lightning_lowrank.layers import low_rank_layers
from lightning_lowrank.models import MLP, Classifier
from tests.cli.run_folders import draw_nothing, rounds_of
from tests.grids import each_of, nightly_except
from tests.helpers import assert_same, weights

# Each makes runs, as from a command line.
pytestmark = pytest.mark.slow

BASE = """
seed_everything: 3
federated:
  algorithm: FedMUD
  clients: 6
  clients_per_round: 3
  partition: {class_path: Dirichlet, init_args: {alpha: 0.5, min_samples: 2}}
lowrank: {factorization: MatrixProduct, rank: 2, decouple: true, skip: [last]}
model:
  class_path: Classifier
  init_args:
    network: {class_path: MLP, init_args: {in_features: 64, hidden: [16, 16], out_features: 10}}
    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
data: {class_path: Digits, init_args: {limit_samples: 200, batch_size: 16}}
trainer: {max_epochs: 2, enable_progress_bar: false, enable_model_summary: false}
"""

USER_CODE = """
import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn


class Bare(pl.LightningModule):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch, batch_idx):
        images, targets = batch
        return nn.functional.cross_entropy(self.net(images), targets)

    def validation_step(self, batch, batch_idx):
        images, targets = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(images), targets))


class Broken(Bare):
    def __init__(self) -> None:
        raise ValueError("my own mistake")


class Watcher(pl.Callback):
    pass


class StopsOneSeed(pl.Callback):
    def __init__(self, error: str) -> None:
        self.error = error

    def on_train_epoch_end(self, trainer, pl_module):
        if os.environ["PL_GLOBAL_SEED"] == "1":
            raise {"ours": MisconfigurationException, "theirs": KeyError}[self.error]("this seed is unlucky")


def by_size(client) -> float:
    return client.samples**0.5
"""

Run = Callable[..., LowRankCLI]


@pytest.fixture
def made() -> list[LowRankCLI]:
    """Hold what the last command made, one for each run."""
    return []


@pytest.fixture
def run(tmp_path, monkeypatch, made) -> Run:
    """Run a command in a folder of its own that holds ``base.yaml`` and the module ``users_code``."""

    class Recorded(LowRankCLI):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            made.append(self)
            super().__init__(*arguments, **keywords)

    monkeypatch.setattr(parser, "LowRankCLI", Recorded)
    monkeypatch.setattr(sys, "argv", ["lightning-lowrank"])
    # seed_everything sets it for the whole process, where FederatedLoop in other tests would find it.
    monkeypatch.setenv("PL_GLOBAL_SEED", "99")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.delitem(sys.modules, "users_code", raising=False)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "users_code.py").write_text(USER_CODE)
    (tmp_path / "base.yaml").write_text(BASE)

    def execute(*words: object) -> LowRankCLI:
        made.clear()
        main([str(word) for word in words])
        return made[0]

    return execute


def loop_of(done: LowRankCLI) -> FederatedLoop:
    (loop,) = (callback for callback in done.trainer.callbacks if isinstance(callback, FederatedLoop))
    return loop


def metrics(folder: str) -> dict[int, dict[str, float]]:
    return rounds_of(read_run(Path(folder)))


def plain_module() -> Classifier:
    return Classifier(MLP(64, [16, 16], 10), optimizer=lambda values: torch.optim.SGD(values, lr=0.1))


def test_fit_with_both_sections_by_short_names(run):
    done = run("fit", "--config", "base.yaml")
    assert [type(callback) for callback in done.trainer.callbacks[:2]] == [LowRank, FederatedLoop]
    assert [name for name, _ in low_rank_layers(done.model)] == ["network.hidden.0", "network.hidden.1"]
    assert type(loop_of(done).algorithm).__name__ == "FedMUD"
    rounds = metrics("runs/version_0")
    assert sorted(rounds) == [0, 1]
    for figures in rounds.values():
        assert figures["federated/clients"] == 3
        assert 0 < figures["comm/ratio"] < 1
        assert {"val_acc", "val_loss", "train_loss", "comm/up_bytes", "comm/down_bytes"} <= set(figures)


def test_a_recipe_without_lowrank_is_dense(run):
    done = run("fit", "--config", "base.yaml", "--lowrank", "null", "--federated.algorithm", "FedAvg")
    assert not any(low_rank_layers(done.model))
    assert not any(isinstance(callback, LowRank) for callback in done.trainer.callbacks)
    assert metrics("runs/version_0")[1]["comm/ratio"] == 1


def test_a_recipe_without_either_section_is_plain_training(run):
    done = run("fit", "--config", "base.yaml", "--lowrank", "null", "--federated", "null")
    assert not any(isinstance(callback, (LowRank, FederatedLoop)) for callback in done.trainer.callbacks)
    assert not any(name.startswith(("comm/", "federated/")) for name in metrics("runs/version_0")[0])

    pl.seed_everything(3, workers=True)
    module = plain_module()
    trainer = pl.Trainer(max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(module, Digits(limit_samples=200, batch_size=16))
    assert_same(weights(done.model), weights(module))


def test_lowrank_without_federated_is_low_rank_training(run):
    done = run("fit", "--config", "base.yaml", "--federated", "null")
    assert not any(isinstance(callback, FederatedLoop) for callback in done.trainer.callbacks)
    layers = dict(low_rank_layers(done.model))
    assert all(factor.abs().sum() > 0 for layer in layers.values() for factor in layer.factors.values())


def test_validate_test_and_predict_with_a_runs_checkpoint(run, recwarn):
    fitted = run("fit", "--config", "base.yaml")
    (checkpoint,) = Path("runs/version_0/checkpoints").glob("*.ckpt")
    at_the_end = {name: float(value) for name, value in fitted.trainer.callback_metrics.items()}

    validated = run("validate", "--config", "base.yaml", "--ckpt_path", checkpoint, "--quiet")
    assert "quiet" not in yaml.safe_load(Path("runs/version_1/config.yaml").read_text())
    assert not [each for each in recwarn if "in place of the configuration" in str(each.message)]
    assert float(validated.trainer.callback_metrics["val_loss"]) == at_the_end["val_loss"]
    assert float(validated.trainer.callback_metrics["val_acc"]) == at_the_end["val_acc"]

    data = Digits(limit_samples=200)
    data.setup()
    images, targets = next(iter(data.test_dataloader()))
    dense = load_dense(checkpoint, plain_module()).eval()
    with torch.no_grad():
        probabilities = dense(images).softmax(1)
    tested = run("test", "--config", "base.yaml", "--ckpt_path", checkpoint)
    accuracy = float(tested.trainer.callback_metrics["test_acc"])
    assert accuracy == pytest.approx((probabilities.argmax(1) == targets).float().mean().item())

    with pytest.warns(UserWarning, match=r"data\.init_args\.seed=9 \(the checkpoint's run had 0\)"):
        run("test", "--config", "base.yaml", "--ckpt_path", checkpoint, "--data.init_args.seed", "9")
    assert not [each for each in recwarn if "the checkpoint's run had" in str(each.message)]

    predicted = run("predict", "--config", "base.yaml", "--ckpt_path", checkpoint)
    (batch,) = predicted.trainer.predict_loop.predictions
    torch.testing.assert_close(batch["probabilities"], probabilities)


def test_later_configs_change_what_they_name_and_nothing_else(run):
    Path("overlay.yaml").write_text(
        yaml.safe_dump(
            {
                "federated": {"clients": 5, "partition": "IID"},
                "lowrank": {"rank": None, "ratio": 0.5},
                "model": {"init_args": {"optimizer": {"init_args": {"lr": 0.02}}}},
                "trainer": {"max_epochs": 1},
            }
        )
    )
    done = run(
        "fit", "--config", "base.yaml", "--config", "overlay.yaml", "--federated.clients", "4", "--data.batch_size", "8"
    )
    loop = loop_of(done)
    assert (loop.clients, loop.clients_per_round, type(loop.partition).__name__) == (4, 3, "IID")
    lowrank = next(callback for callback in done.trainer.callbacks if isinstance(callback, LowRank))
    assert lowrank.settings.ratio == 0.5
    assert lowrank.settings.rank is None
    assert (lowrank.settings.decouple, lowrank.settings.skip) == (True, ["last"])
    assert done.trainer.optimizers[0].param_groups[0]["lr"] == 0.02
    assert done.model.network.hidden[0].out_features == 16
    assert (done.datamodule.batch_size, done.datamodule.limit_samples) == (8, 200)
    assert done.trainer.current_epoch == 1


BARE = ("fit", "--config", "base.yaml", "--model", "users_code.Bare", "--optimizer", "SGD", "--optimizer.lr", "0.2")


def test_a_top_level_optimizer_trains_the_factors(run):
    before = run(*BARE, "--trainer.limit_train_batches", "0")
    done = run(*BARE, "--federated.algorithm", "FedAvg")
    assert type(done.model).__name__ == "Bare"
    (layer,) = (layer for _, layer in low_rank_layers(done.model))
    held = {id(value) for group in done.trainer.optimizers[0].param_groups for value in group["params"]}
    assert all(id(factor) in held for factor in layer.factors.values())
    start = dict(low_rank_layers(before.model))["net.1"]
    for name in ("U", "V"):
        assert not torch.equal(layer.factors[name], start.factors[name])
        assert torch.equal(layer.fixed[name], start.fixed[name])
    assert torch.equal(layer.frozen_weight, start.frozen_weight)


@pytest.mark.parametrize("kept", ["keep", "reset"])
@pytest.mark.parametrize("name", ["ProjectedSGD", "ProjectedAdamW"])
@pytest.mark.nightly
def test_projected_optimizers_are_known_by_name_and_resume_bit_for_bit(run, name, kept):
    projected = (*BARE[:4], "users_code.Bare", "--optimizer", name, "--optimizer.lr", "0.02", "--optimizer.rank", "5")
    projected += ("--optimizer.refresh_interval", "7", "--lowrank", "null")
    projected += ("--federated.algorithm", "FedAvg", "--federated.optimizer_state", kept)
    whole = run("fit", *projected[1:], "--trainer.max_epochs", "3")
    assert type(whole.trainer.optimizers[0]).__name__ == name
    half = run("fit", *projected[1:], "--trainer.max_epochs", "2")
    checkpoint = half.trainer.checkpoint_callback.best_model_path
    resumed = run("fit", *projected[1:], "--trainer.max_epochs", "3", "--ckpt_path", checkpoint)
    assert_same(weights(whole.model), weights(resumed.model))


@pytest.mark.nightly
def test_a_top_level_scheduler_acts(run):
    done = run(*BARE, "--lr_scheduler", "StepLR", "--lr_scheduler.step_size", "1", "--lr_scheduler.gamma", "0.5")
    assert done.trainer.optimizers[0].param_groups[0]["lr"] == 0.2 * 0.5**2
    Path("plateau.yaml").write_text(
        "lr_scheduler: {class_path: ReduceLROnPlateau,"
        " init_args: {monitor: val_loss, mode: max, patience: 0, factor: 0.1}}"
    )
    done = run(*BARE, "--config", "plateau.yaml", "--trainer.max_epochs", "3")
    assert done.trainer.optimizers[0].param_groups[0]["lr"] < 0.2


@pytest.mark.nightly
def test_a_top_level_optimizer_takes_a_modules_own_place_with_a_warning(run):
    with pytest.warns(UserWarning, match=r"replaces Classifier\.configure_optimizers"):
        done = run("fit", "--config", "base.yaml", "--optimizer", "Adam", "--optimizer.lr", "0.001")
    assert isinstance(done.trainer.optimizers[0], torch.optim.Adam)


@nightly_except("list")
@pytest.mark.parametrize("form", ["list", "single"])
def test_both_callbacks_come_before_the_users(run, form):
    callback = {"class_path": "users_code.Watcher"}
    Path("mine.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [callback] if form == "list" else callback}}))
    done = run("fit", "--config", "base.yaml", "--config", "mine.yaml", "--trainer.fast_dev_run", "1")
    names = [type(callback).__name__ for callback in done.trainer.callbacks]
    assert names[:3] == ["LowRank", "FederatedLoop", "Watcher"]


def test_functions_are_given_by_their_path(run):
    done = run("fit", "--config", "base.yaml", "--federated.weighting", "users_code.by_size")
    weighting: Any = loop_of(done).weighting
    assert weighting.__name__ == "by_size"


def test_the_saved_config_makes_the_run_again_bit_for_bit(run):
    first = run("fit", "--config", "base.yaml", "--federated.clients", "5", "--model.optimizer.lr", "0.05")
    shutil.copy("runs/version_0/config.yaml", "saved.yaml")
    again = run("fit", "--config", "saved.yaml")
    other = run("fit", "--config", "saved.yaml", "--seed_everything", "4")
    assert_same(weights(first.model), weights(again.model))
    assert Path("runs/version_0/metrics.csv").read_text() == Path("runs/version_1/metrics.csv").read_text()
    assert Path("runs/version_0/config.yaml").read_text() == Path("runs/version_1/config.yaml").read_text()
    assert Path("runs/version_0/metrics.csv").read_text() != Path("runs/version_2/metrics.csv").read_text()
    assert loop_of(other).seed == 4


def test_a_run_without_a_logger_leaves_the_working_folders_config_alone(run):
    Path("config.yaml").write_text(BASE)
    run("fit", "--config", "config.yaml", "--trainer.logger", "false", "--trainer.enable_checkpointing", "false")
    assert Path("config.yaml").read_text() == BASE
    assert not Path("runs").exists()


@pytest.mark.nightly
def test_seed_everything_is_the_federated_seed_unless_that_is_given(run):
    quick = ("fit", "--config", "base.yaml", "--trainer.fast_dev_run", "1")
    assert loop_of(run(*quick)).seed == 3
    Path("unseeded.yaml").write_text(BASE.replace("seed_everything: 3", ""))
    assert loop_of(run("fit", "--config", "unseeded.yaml", *quick[3:])).seed == 0
    assert loop_of(run(*quick, "--seed_everything", "11")).seed == 11
    assert loop_of(run(*quick, "--seed_everything", "11", "--federated.seed", "5")).seed == 5


def test_seeds_are_runs_of_their_own_one_after_another(run, made):
    run("fit", "--config", "base.yaml", "--seeds", "4", "0")
    several = list(made)
    assert [loop_of(done).seed for done in several] == [4, 0]
    lowrank = [callback for done in several for callback in done.trainer.callbacks if isinstance(callback, LowRank)]
    assert [callback.seed for callback in lowrank] == [4, 0]
    for number, seed in enumerate((4, 0)):
        alone = run("fit", "--config", "base.yaml", "--seed_everything", seed)
        assert_same(weights(alone.model), weights(several[number].model))
        for file in ("metrics.csv", "config.yaml"):
            path = Path(f"runs/version_{number}/{file}")
            assert path.read_text() == Path(f"runs/version_{number + 2}/{file}").read_text()
        assert len(list(Path(f"runs/version_{number}/checkpoints").glob("*.ckpt"))) == 1
    assert Path("runs/version_0/metrics.csv").read_text() != Path("runs/version_1/metrics.csv").read_text()


@pytest.mark.nightly
def test_each_seeds_folder_is_told(run, caplog):
    with caplog.at_level("INFO"):
        run("fit", "--config", "base.yaml", "--seeds", "4", "0", "--trainer.max_epochs", "1")
    assert [line for line in caplog.messages if line.startswith("seed ")] == [
        "seed 4: runs/version_0",
        "seed 0: runs/version_1",
    ]


@pytest.mark.nightly
def test_a_command_line_seed_takes_the_place_of_a_files_seeds(run, made):
    Path("seeds.yaml").write_text("seeds: [4, 5]\n")
    words = ("fit", "--config", "base.yaml", "--config", "seeds.yaml", "--trainer.max_epochs", "1")
    run(*words)
    assert [loop_of(done).seed for done in made] == [4, 5]
    run(*words, "--seeds", "9")
    assert [loop_of(done).seed for done in made] == [9]


@pytest.mark.nightly
def test_a_seed_that_is_given_to_the_loop_stays(run, made):
    run("fit", "--config", "base.yaml", "--seeds", "1", "2", "--federated.seed", "5", "--trainer.max_epochs", "1")
    assert [loop_of(done).seed for done in made] == [5, 5]
    folders = [Path(f"runs/version_{number}") for number in (0, 1)]
    assert [yaml.safe_load((folder / "config.yaml").read_text())["seed_everything"] for folder in folders] == [1, 2]


@pytest.mark.nightly
def test_one_seeds_model_is_freed_before_the_next_is_made(run, monkeypatch):
    models: list[weakref.ref] = []
    alive: list[int] = []

    class Watched(LowRankCLI):
        def instantiate_classes(self) -> None:
            alive.append(sum(model() is not None for model in models))
            super().instantiate_classes()
            models.append(weakref.ref(self.model))

    monkeypatch.setattr(parser, "LowRankCLI", Watched)
    main(["fit", "--config", "base.yaml", "--seeds", "0", "1", "2", "--trainer.max_epochs", "1"])
    assert alive == [0, 0, 0]


@pytest.mark.parametrize("error", ["ours", "theirs"])
@pytest.mark.nightly
def test_a_seed_that_fails_is_named_and_the_earlier_ones_stay(run, made, capsys, error):
    callback = {"class_path": "users_code.StopsOneSeed", "init_args": {"error": error}}
    Path("mine.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [callback]}}))
    words = ("fit", "--config", "base.yaml", "--config", "mine.yaml")
    named = "lightning-lowrank: the run with seed 1 failed (whole: 0 3, not begun: 2)"
    if error == "ours":
        with pytest.raises(SystemExit) as end:
            run(*words, "--seeds", "0", "3", "1", "2")
        assert end.value.code == f"{named}: this seed is unlucky"
    else:
        with pytest.raises(KeyError, match="'this seed is unlucky'"):
            run(*words, "--seeds", "0", "3", "1", "2")
        assert capsys.readouterr().err.splitlines()[-1] == named
    assert len(made) == 3
    assert sorted(metrics("runs/version_0")) == sorted(metrics("runs/version_1")) == [0, 1]
    assert len(list(Path("runs/version_1/checkpoints").glob("*.ckpt"))) == 1
    assert not Path("runs/version_3").exists()


def test_a_single_seed_that_fails_ends_as_any_run_does(run, capsys):
    with pytest.raises(SystemExit) as end:
        run("fit", "--config", "base.yaml", "--seeds", "1", "--federated.clients", "0")
    assert "clients must be at least 1" in str(end.value.code)
    assert "seed 1" not in str(end.value.code)


def test_every_command_takes_a_whole_recipe_of_fit(run, made, capsys):
    with pytest.raises(SystemExit):
        run("fit", "--config", "base.yaml", "--seeds", "4", "5", "--quiet", "--print_config")
    Path("whole.yaml").write_text(capsys.readouterr().out)
    for command in ("validate", "test", "predict"):
        with pytest.warns(UserWarning, match=rf"{command}.*seeds=\[4, 5\]"):
            assert loop_of(run(command, "--config", "whole.yaml", "--ckpt_path", "null")).seed == 4
        assert len(made) == 1
    assert loop_of(run("test", "--config", "whole.yaml", "--seed_everything", "5")).seed == 5
    with pytest.raises(SystemExit, match=r"--seeds=\[1\].*test"):
        run("test", "--config", "whole.yaml", "--seeds", "1")
    capsys.readouterr()
    run("inspect", "--config", "whole.yaml", "--json")
    assert '"optimizer_state_bytes"' in capsys.readouterr().out


@pytest.mark.nightly
def test_every_command_takes_the_configuration_of_a_seeds_run(run, made, capsys):
    Path("seeds.yaml").write_text(BASE + "seeds: [4, 5]\n")
    run("fit", "--config", "seeds.yaml", "--trainer.max_epochs", "1")
    run("validate", "--config", "runs/version_0/config.yaml")
    assert loop_of(made[0]).seed == 4
    capsys.readouterr()
    run("inspect", "--config", "runs/version_0/config.yaml", "--json")
    assert '"optimizer_state_bytes"' in capsys.readouterr().out


@pytest.mark.nightly
def test_seeds_do_not_share_a_checkpoint(run):
    with pytest.raises(SystemExit, match=r"ckpt_path='last'.*2.*seeds=\[0, 1\]"):
        run("fit", "--config", "base.yaml", "--seeds", "0", "1", "--ckpt_path", "last")
    run("inspect", "--config", "base.yaml", "--seeds", "0", "1", "--json")


@pytest.mark.parametrize(
    ("command", "name"), [("test", "last"), ("validate", "best"), ("predict", "hpc"), ("fit", "best")]
)
def test_a_checkpoints_name_is_refused_if_there_is_none(run, command, name):
    with pytest.raises(SystemExit, match=rf"ckpt_path='{name}'.*{command}"):
        run(command, "--config", "base.yaml", "--ckpt_path", name)
    assert not Path("runs").exists()


def test_the_last_checkpoint_of_a_folder_is_found_by_name(run):
    kept = {"class_path": "ModelCheckpoint", "init_args": {"dirpath": "kept", "save_last": True}}
    Path("kept.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [kept]}}))
    words = ("--config", "base.yaml", "--config", "kept.yaml", "--ckpt_path", "last")
    fitted = run("fit", *words)
    validated = run("validate", *words)
    assert validated.trainer.callback_metrics["val_loss"] == fitted.trainer.callback_metrics["val_loss"]


def test_a_run_goes_on_in_its_own_folder(run):
    lines: dict[str, Any] = {"class_path": "LearningRateMonitor", "init_args": {"logging_interval": "step"}}
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": "", "version": "mine"}}
    trained = {
        "logger": logger,
        "callbacks": [lines, {"class_path": "ModelCheckpoint", "init_args": {"save_last": True, "save_top_k": -1}}],
    }
    Path("mine.yaml").write_text(yaml.safe_dump({"trainer": {**trained, "log_every_n_steps": 1}}))
    words = ("--config", "base.yaml", "--config", "mine.yaml")
    folder, files = Path("runs/mine"), ("config.yaml", "metrics.csv", "run_metadata.json")
    run("fit", *words, "--trainer.max_epochs", "3")
    whole = (folder / "metrics.csv").read_text()
    run("fit", *words)
    assert (folder / "metrics.csv").read_text() == whole[: whole.index("\n", whole.rindex(",1,"))] + "\n"

    assert "max_epochs: 2" in (folder / "config.yaml").read_text()

    kept = {name: (folder / name).read_text() for name in files}
    with pytest.raises(SystemExit, match="clients_per_round: 3 in the checkpoint, 2 now"):
        run("fit", *words, "--ckpt_path", "last", "--federated.clients_per_round", "2")
    run("test", *words, "--ckpt_path", "last")
    assert {name: (folder / name).read_text() for name in files} == kept
    assert "test_acc" in (folder / "metrics_test.csv").read_text()

    run("fit", *words, "--ckpt_path", "last", "--trainer.max_epochs", "3")
    assert (folder / "metrics.csv").read_text() == whole
    assert read_run(folder).metadata["first_round"] == [1]
    assert "max_epochs: 3" in (folder / "config.yaml").read_text()

    # Rounds after the checkpoint are made again.
    first = min((folder / "checkpoints").glob("epoch=0*.ckpt"))
    run("fit", *words, "--ckpt_path", first, "--trainer.max_epochs", "3")
    assert (folder / "metrics.csv").read_text() == whole


@nightly_except("list")
@pytest.mark.parametrize("folder", ["single", "list"])
def test_seeds_do_not_share_a_folder(run, folder):
    logger: Any = {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "version": "mine"}}
    Path("mine.yaml").write_text(yaml.safe_dump({"trainer": {"logger": [logger] if folder == "list" else logger}}))
    words = ("fit", "--config", "base.yaml", "--config", "mine.yaml", "--trainer.max_epochs", "1")
    with pytest.raises(SystemExit, match=r"version='mine'.*2"):
        run(*words, "--seeds", "0", "1")
    assert not Path("runs").exists()
    assert loop_of(run(*words, "--seeds", "6")).seed == 6


@pytest.mark.nightly
def test_seeds_without_a_logger(run, made):
    run("fit", "--config", "base.yaml", "--seeds", "0", "1", "--trainer.logger", "false", "--trainer.max_epochs", "1")
    assert [loop_of(done).seed for done in made] == [0, 1]


@pytest.mark.nightly
def test_fit_goes_on_from_a_checkpoint(run):
    whole = run("fit", "--config", "base.yaml", "--trainer.max_epochs", "4")
    half = run("fit", "--config", "base.yaml", "--trainer.max_epochs", "2")
    (checkpoint,) = Path("runs/version_1/checkpoints").glob("*.ckpt")
    resumed = run("fit", "--config", "base.yaml", "--trainer.max_epochs", "4", "--ckpt_path", checkpoint)
    assert_same(weights(whole.model), weights(resumed.model))
    assert not torch.equal(half.model.network.classifier.weight, resumed.model.network.classifier.weight)
    assert loop_of(whole).ledger.figures() == loop_of(resumed).ledger.figures()
    assert sorted(metrics("runs/version_2")) == [2, 3]
    assert metrics("runs/version_2")[3] == metrics("runs/version_0")[3]
    with pytest.raises(SystemExit, match=r"label_smoothing: 0\.0 in the checkpoint, 0\.3 now"):
        run("fit", "--config", "base.yaml", "--ckpt_path", checkpoint, "--model.label_smoothing", "0.3")


@pytest.mark.nightly
def test_quiet_says_nothing_and_changes_nothing(run, capsys, caplog):
    Path("loud.yaml").write_text("trainer: {enable_progress_bar: true, callbacks: [class_path: RichProgressBar]}")
    words = ("fit", "--config", "base.yaml", "--config", "loud.yaml")
    before = logging.getLogger("lightning.pytorch").level
    run(*words)
    said = capsys.readouterr()
    assert "samples" in said.out
    assert "Tip" not in caplog.text
    assert any("GPU available" in record.getMessage() for record in caplog.records)
    caplog.clear()
    run(*words, "--quiet")
    assert capsys.readouterr().out == ""
    assert not caplog.records
    first, second = (Path(f"runs/version_{number}") for number in range(2))
    assert (first / "config.yaml").read_text() == (second / "config.yaml").read_text()
    assert logging.getLogger("lightning.pytorch").level == before


def test_commands_called_from_python_do_not_warn_of_it(run, monkeypatch, recwarn):
    monkeypatch.setattr(sys, "argv", ["script.py", "--rounds", "1"])
    run("fit", "--config", "base.yaml", "--trainer.max_epochs", "1")
    assert not [each for each in recwarn if "args parameter" in str(each.message)]


@pytest.mark.nightly
def test_one_bar_for_the_rounds(run, capsys):
    words = ("fit", "--config", "base.yaml", "--trainer.max_epochs", "1")
    shown = ("--trainer.enable_progress_bar", "true")
    own = ("--trainer.callbacks+=RoundProgress", "--trainer.callbacks.monitor=val_loss")
    said = {"shown": [*shown], "not shown": [], "quiet": [*shown, *own, "--quiet"], "own": [*shown, *own]}
    for name, options in said.items():
        done = run(*words, *options)
        assert sum(isinstance(each, RoundProgress) for each in done.trainer.callbacks) == 1
        said[name] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Round")]
    assert said["not shown"] == said["quiet"] == []
    assert [len(said[name]) for name in ("shown", "own")] == [1, 1]
    assert said["shown"][0].startswith("Round 1/1: 3 clients, ")
    assert ", val_acc 0." in said["shown"][0]
    assert ", val_loss " in said["own"][0]
    run(*words, *shown, "--federated", "null", "--lowrank", "null")
    assert "Round 1/1" not in capsys.readouterr().out


@nightly_except("False")
@pytest.mark.parametrize("dense", [False, True])
def test_export_loads_into_the_unconverted_network(run, capsys, dense):
    section = ("--lowrank", "null", "--federated.algorithm", "FedAvg") if dense else ()
    fitted = run("fit", "--config", "base.yaml", *section)
    (checkpoint,) = Path("runs/version_0/checkpoints").glob("*.ckpt")
    images = torch.randn(7, 1, 8, 8)
    with torch.no_grad():
        expected = fitted.model.eval()(images)

    def outputs(module: nn.Module, file: str) -> Tensor:
        module.load_state_dict(safetensors.torch.load_file(file), strict=True)
        with torch.no_grad():
            return module.eval()(images)

    main(["export", str(checkpoint), "exported/module.safetensors"])
    assert "wrote 6 tensors, 1,482 numbers: exported/module.safetensors" in capsys.readouterr().out
    torch.testing.assert_close(outputs(plain_module(), "exported/module.safetensors"), expected)
    main(["export", str(checkpoint), "network.safetensors", "--prefix", "network."])
    torch.testing.assert_close(outputs(MLP(64, [16, 16], 10), "network.safetensors"), expected)
    with pytest.raises(SystemExit, match=r"--prefix.*'nothing'"):
        main(["export", str(checkpoint), "nothing.safetensors", "--prefix", "nothing"])
    assert not Path("nothing.safetensors").exists()


@nightly_except("False")
@pytest.mark.parametrize("dense", [False, True])
def test_export_of_a_clients_own_model(run, dense):
    section = ("--lowrank", "null") if dense else ()
    fitted = run("fit", "--config", "base.yaml", *section, "--federated.algorithm", "LocalTraining")
    (checkpoint,) = Path("runs/version_0/checkpoints").glob("*.ckpt")
    loop = loop_of(fitted)
    own = loop.coordinator.info(next(client for client, _ in loop.coordinator.states.items()))
    main(["export", str(checkpoint), "own.safetensors", "--client", str(own.id)])
    main(["export", str(checkpoint), "global.safetensors"])
    module, images = fitted.model.eval(), torch.randn(7, 1, 8, 8)
    model = UnequalClients.of(loop.algorithm).model_for(loop.server, own)
    copy_into(
        trained_tensors(module), Personal.of(loop.algorithm).personal_model(loop.coordinator.context(own.id, {}), model)
    )
    exported, unlike = plain_module(), plain_module()
    exported.load_state_dict(safetensors.torch.load_file("own.safetensors"))
    unlike.load_state_dict(safetensors.torch.load_file("global.safetensors"))
    with torch.no_grad():
        torch.testing.assert_close(exported.eval()(images), module(images))
        assert not torch.allclose(unlike.eval()(images), module(images))
    with pytest.raises(SystemExit, match="client 77 keeps no model of its own"):
        main(["export", str(checkpoint), "own.safetensors", "--client", "77"])


def test_export_of_tied_weights(run):
    shared = torch.arange(6.0).reshape(2, 3)
    torch.save({"state_dict": {"first": shared, "second": shared, "turned": shared.T}}, "tied.ckpt")
    main(["export", "tied.ckpt", "tied.safetensors"])
    loaded = safetensors.torch.load_file("tied.safetensors")
    assert torch.equal(loaded["first"], shared)
    assert torch.equal(loaded["second"], shared)
    assert torch.equal(loaded["turned"], shared.T)


@pytest.mark.nightly
def test_report_is_dispatched_without_a_model(run, capsys, monkeypatch):
    run("fit", "--config", "base.yaml")
    capsys.readouterr()
    monkeypatch.setenv("HOME", str(Path.cwd()))
    main(["report", "runs", "--output=~/out"])
    printed = capsys.readouterr().out
    assert "runs " in printed
    assert f"{metrics('runs/version_0')[1]['val_acc']:.4f}" in printed
    assert sorted(path.name for path in Path("out").iterdir()) == [
        ".report",
        "bytes.png",
        *(f"report.{kind}" for kind in ("csv", "html", "md", "tex")),
        "rounds.png",
    ]


@pytest.mark.nightly
def test_report_puts_seeds_into_one_row_and_each_shows_them(run, capsys, monkeypatch):
    draw_nothing(monkeypatch)
    run("fit", "--config", "base.yaml", "--seeds", "0", "1", "--trainer.max_epochs", "1")
    run("fit", "--config", "base.yaml", "--lowrank.rank", "3", "--trainer.max_epochs", "1")
    capsys.readouterr()
    main(["report", "runs"])
    rows = capsys.readouterr().out.splitlines()[5:7]
    assert [row.split()[:2] for row in rows] == [["rank=2", "2"], ["rank=3", "1"]]
    losses = [metrics(f"runs/version_{number}")[0]["val_acc"] for number in (0, 1)]
    assert f"{sum(losses) / 2:.4f} ± {abs(losses[0] - losses[1]) / 2**0.5:.4f}" in rows[0]
    main(["report", "runs", "--each", "--target", "0.0", "--budget", "1GB"])
    rows = capsys.readouterr().out.splitlines()[5:8]
    assert [row[: row.index("  ")] for row in rows] == ["rank=2, seed 0", "rank=2, seed 1", "rank=3"]
    titles = (Path("report") / "report.md").read_text()
    assert "| rounds to 0 | MB to 0 | in 1 GB (round) val_acc |" in titles


def test_help_names_every_command(run, capsys):
    with pytest.raises(SystemExit) as end:
        run("--help")
    assert end.value.code == 0
    printed = capsys.readouterr().out
    for command in ("fit", "validate", "test", "predict", "inspect", "export:", "report:", "flower:"):
        assert command in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no command is given. The commands are fit, "),
        (("exprt", "a.ckpt", "b"), "there is no command 'exprt'. Did you mean 'export'? The commands are fit, "),
    ],
)
def test_what_is_no_command_is_told_all_of_them(run, capsys, words, said):
    with pytest.raises(SystemExit) as end:
        main(list(words))
    assert end.value.code == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert "inspect, export, " in printed


FLOOR = ("--lowrank.rank", "null", "--lowrank.budget", "0.001")


@each_of(4)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (FLOOR, ["budget=0.001", "at least 0.2"]),
        (("--lowrank", "null"), ["FedMUD", "put LowRank(..., role='update') before FederatedLoop"]),
        (("--lowrank.include", "[nothing]"), ["include has 'nothing'"]),
        (("--lowrank.budget", "25%"), ["lowrank.budget", "'25%'", "0.25"]),
        (("--federated.clients", "0"), ["clients must be at least 1, but is 0"]),
        (("--federated.local_epochs", "null"), ["local_epochs must be an integer, but is None"]),
        (("--federated.clients", "1000"), ["more clients than samples"]),
        (("--federated.partition.alpha", "-1"), ["alpha must be above 0 and finite, but is -1.0"]),
        (("--model.network.hidden", "[0]"), ["hidden[0] must be at least 1"]),
        (("--federated.algorithm", "FedNope"), ["federated.algorithm", "FedNope"]),
        (("--model", "Nope"), ["no class is known as Nope"]),
        (("--federated.cliens", "3"), ["Option 'cliens' is not accepted (did you mean 'clients'?)"]),
        (("--federated.algorithm", "FedMud"), ["'FedMud'", "did you mean 'FedMUD'?"]),
        (("--lowrank.role", "sideways"), ["'update', 'weight'", "sideways"]),
        (("--trainer.max_epochs", "0.5"), ["trainer.max_epochs", "int"]),
        (("--trainer.accelerator", "abacus"), ["trainer.accelerator='abacus'", "cpu"]),
        (("--trainer.accelerator", "tpu"), ["trainer.accelerator='tpu'", "torch_xla"]),
        (("--trainer.strategy", "abacus"), ["trainer.strategy='abacus'", "client_parallel"]),
        (("--trainer.devices", "abacus"), ["trainer.devices='abacus'"]),
        (("--config", "nowhere.yaml"), ["nowhere.yaml"]),
        (("--ckpt_path", "nowhere.ckpt"), ["ckpt_path='nowhere.ckpt' does not exist"]),
        (("--ckpt_path=~/nowhere.ckpt",), [f"ckpt_path='{Path.home()}/nowhere.ckpt' does not exist"]),
        (("--seeds", "1", "2", "--seed_everything", "3"), ["--seed_everything is given in addition to seeds=[1, 2]"]),
        (("--seed_everything=3", "--seeds", "1", "2"), ["--seed_everything is given in addition to seeds=[1, 2]"]),
        (("--seeds", "1", "--seed_every", "3"), ["--seed_everything is given in addition to seeds=[1]"]),
        (("--seeds", "1", "2", "1"), ["distinct", "[1, 2, 1]"]),
        (("--seeds", "1", "-1"), ["from 0 to 4294967295", "[1, -1]"]),
        (("--seeds", "4294967296"), ["from 0 to 4294967295"]),
        (("--seeds", "1", "x"), ["seeds", "element 2", "x"]),
        (("--config", "scalar.yaml"), ["seeds must be a list such as [0, 1, 2]"]),
        (("--config", "none.yaml"), ["seeds must be one or more", "got []"]),
        (
            ("--seeds", "8", "6", "--federated.clients", "0"),
            ["seed 8 failed (not begun: 6): clients must be at least 1"],
        ),
        (("--lr_scheduler", "StepLR", "--lr_scheduler.step_size", "1"), ["lr_scheduler is given and optimizer is not"]),
        (
            ("--data", "FashionMNIST", "--data.root", "nowhere", "--data.download", "false"),
            ["torchvision cannot read FashionMNIST", "root='nowhere'"],
        ),
        (("--trainer.default_root_dir", "scalar.yaml/runs"), ["the folder scalar.yaml/runs", "Not a directory"]),
        (
            ("--trainer.logger", "false", "--trainer.default_root_dir", "none.yaml"),
            ["the folder none.yaml for logs", "File exists"],
        ),
    ],
)
def test_errors_end_in_one_line(run, capsys, words, said):
    Path("scalar.yaml").write_text("seeds: 3")
    Path("none.yaml").write_text("seeds: []")
    with pytest.raises(SystemExit) as end:
        run("fit", "--config", "base.yaml", *words)
    printed = capsys.readouterr().err
    assert end.value.code not in (0, None)
    message = end.value.code if isinstance(end.value.code, str) else printed
    assert message.startswith("lightning-lowrank: ")
    assert len(message.strip().splitlines()) == 1
    assert "Traceback" not in printed
    for words_said in said:
        assert words_said in message


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("export", "nowhere.ckpt", "out.safetensors"), "nowhere.ckpt is not a checkpoint"),
        (("report", "nowhere"), "nowhere holds no run"),
    ],
)
def test_export_and_report_end_in_one_line_as_well(run, words, said):
    with pytest.raises(SystemExit, match=f"^lightning-lowrank: {said}"):
        main(list(words))


def test_a_users_own_mistake_keeps_its_traceback(run):
    with pytest.raises(ValueError, match="my own mistake") as failure:
        run("fit", "--config", "base.yaml", "--model", "users_code.Broken", "--optimizer", "SGD")
    assert "users_code.py" in "".join(traceback.format_exception(failure.value))


@pytest.mark.nightly
def test_a_root_folder_moves_logs_and_checkpoints(run):
    run("fit", "--config", "base.yaml", "--trainer.default_root_dir", "there")
    assert {path.name for path in Path("there/runs/version_0").iterdir()} >= {
        "metrics.csv",
        "checkpoints",
        "config.yaml",
    }
    assert not Path("runs").exists()
    run("fit", "--config", "there/runs/version_0/config.yaml", "--trainer.max_epochs", "3")
    assert Path("there/runs/version_1/metrics.csv").exists()
