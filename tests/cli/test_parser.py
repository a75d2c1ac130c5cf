"""What is done to a configuration before anything is built, and where it is saved."""

import re
from pathlib import Path

import jsonargparse
import pytest
import yaml
from jsonargparse import Namespace
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lightning_lowrank.cli.parser import (
    CLI_SETTINGS,
    JSONARGPARSE,
    BuiltCLI,
    LowRankCLI,
    RecipeParser,
    _SaveRunConfig,
    _write_below_root,
)
from tests.helpers import Module, trainer


@pytest.mark.parametrize(
    ("root", "folder", "written"),
    [
        (None, "runs", "runs"),
        ("there", "runs", "there/runs"),
        ("/there", "runs", "/there/runs"),
        ("there", "there/runs", "there/runs"),
        ("there", "/else/runs", "/else/runs"),
        ("there", "s3://runs", "s3://runs"),
        ("there", None, None),
        ("there", "~/runs", "/home/me/runs"),
        (None, "~/runs", "/home/me/runs"),
        ("~/there", "runs", "/home/me/there/runs"),
        ("there", "file:///else/runs", "/else/runs"),
        ("file:///there", "runs", "/there/runs"),
        ("s3://there/", "runs", "s3://there/runs"),
    ],
)
def test_a_root_folder_holds_the_relative_folders(monkeypatch, root, folder, written):
    monkeypatch.setenv("HOME", "/home/me")

    def writing(argument, folder):
        return Namespace(class_path="Any", init_args=Namespace({argument: folder}))

    for several in (False, True):
        logger = writing("save_dir", folder)
        trainer = Namespace(
            default_root_dir=root,
            logger=[logger] if several else logger,
            callbacks=[Namespace(class_path="Bare"), writing("dirpath", folder)],
        )
        _write_below_root(trainer)
        assert logger.init_args.save_dir == written
        assert trainer.callbacks[1].init_args.dirpath == written
        assert root is None or "~" not in trainer.default_root_dir
    for without in (True, None):
        _write_below_root(Namespace(default_root_dir="there", logger=without, callbacks=without and None))


@pytest.mark.parametrize("names", [("a", "b", "c"), ("a", "b", "b"), ("a", "a", "b")])
@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_the_folder_of_each_logger_gets_the_configuration(tmp_path, names, kind):
    parser = RecipeParser()
    parser.add_argument("--seed_everything", type=int)
    config = parser.parse_args(["--seed_everything", "3"])
    loggers = [kind(tmp_path / "runs", name=name, version=0) for name in names]
    run = trainer(tmp_path, logger=loggers)
    _SaveRunConfig(parser, config, save_to_log_dir=False).setup(run, Module(), "fit")
    for name in names:
        saved = tmp_path / "runs" / name / "version_0" / "config.yaml"
        assert yaml.safe_load(saved.read_text())["seed_everything"] == 3
    changed = parser.parse_args(["--seed_everything", "4"])
    callback = _SaveRunConfig(parser, changed, **CLI_SETTINGS["save_config_kwargs"])
    # A run that is refused before training starts leaves that of an earlier run.
    for moment, seed in ("setup", 3), ("on_train_start", 4):
        getattr(callback, moment)(run, Module(), *(["fit"] if moment == "setup" else []))
        assert all(f"seed_everything: {seed}" in file.read_text() for file in tmp_path.rglob("config.yaml"))


def test_other_processes_save_no_configuration(tmp_path, monkeypatch):
    parser = RecipeParser()
    run = trainer(tmp_path, logger=[CSVLogger(tmp_path / "runs", name=name) for name in "ab"])
    monkeypatch.setattr(type(run), "is_global_zero", False)
    _SaveRunConfig(parser, parser.parse_args([]), save_to_log_dir=False).setup(run, Module(), "fit")
    assert not list(tmp_path.rglob("config.yaml"))


class Elsewhere(Logger):
    """A logger such as that of a service, which has no ``log_dir``."""

    name = version = None

    def log_metrics(self, *arguments, **keywords):
        pass

    log_hyperparams = log_metrics


@pytest.mark.parametrize(
    ("properties", "folder"),
    [
        ({"save_dir": "logs", "name": "n", "version": "v"}, "logs/n/v"),
        ({"save_dir": None, "name": "n", "version": 3}, "n/version_3"),
        ({"save_dir": ".", "name": "", "version": "v"}, "v"),
        ({"save_dir": ".", "name": "", "version": ""}, None),
        ({"save_dir": ".", "name": "n", "version": None}, None),
        ({"save_dir": ".", "name": None, "version": "v"}, None),
    ],
)
def test_a_configuration_is_saved_beside_the_checkpoints_if_no_logger_has_a_folder(
    tmp_path, monkeypatch, properties, folder
):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("own")
    parser = RecipeParser()
    run = trainer(tmp_path, logger=type("Own", (Elsewhere,), properties)())
    _SaveRunConfig(parser, parser.parse_args([]), **CLI_SETTINGS["save_config_kwargs"]).setup(run, Module(), "fit")
    assert Path("config.yaml").read_text() == "own"
    saved = [str(each.parent.relative_to(tmp_path)) for each in tmp_path.rglob("config.yaml")]
    assert sorted(saved) == sorted([".", folder] if folder else ["."])


@pytest.mark.slow
def test_a_configuration_is_written_as_if_it_was_validated_again():
    words = ["fit", "--config", "quickstart", "--trainer.logger", "false"]
    cli = BuiltCLI(**CLI_SETTINGS, args=words)
    parser, config = cli.parser_of("fit"), cli.config["fit"]
    wrong = config.clone()
    wrong["trainer.max_epochs"] = "many"
    with pytest.raises(TypeError, match="max_epochs"):
        parser.dump(wrong, skip_validation=False)
    assert "max_epochs: many" in parser.dump(wrong)
    assert parser.dump(config) == parser.dump(config, skip_validation=False)
    assert parser.dump(config, skip_none=False) == parser.dump(config, skip_none=False, skip_validation=False)


@pytest.mark.parametrize("installed", ["4.51.0", "5.0.0"])
def test_another_jsonargparse_is_refused(monkeypatch, installed):
    monkeypatch.setattr(jsonargparse, "__version__", installed)
    with pytest.raises(MisconfigurationException, match=rf"{re.escape(installed)} is installed.*\[cli\]"):
        LowRankCLI(args=["fit"], **CLI_SETTINGS)


def test_the_bound_of_jsonargparse_is_that_of_the_extras():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    requirements = [Requirement(each) for each in re.findall(r'"(jsonargparse[^"]*)"', project)]
    assert [each.specifier for each in requirements] == [SpecifierSet(), JSONARGPARSE, JSONARGPARSE]
