"""What is done to a configuration before anything is built, and where it is saved."""

import re
from pathlib import Path

import jsonargparse
import pytest
import yaml
from jsonargparse import Namespace
from lightning.pytorch.loggers import CSVLogger
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
def test_the_folder_of_each_csv_logger_gets_the_configuration(tmp_path, names):
    parser = RecipeParser()
    parser.add_argument("--seed_everything", type=int)
    config = parser.parse_args(["--seed_everything", "3"])
    loggers = [CSVLogger(tmp_path / "runs", name=name, version=0) for name in names]
    run = trainer(tmp_path, logger=loggers)
    _SaveRunConfig(parser, config).setup(run, Module(), "fit")
    for name in names:
        saved = tmp_path / "runs" / name / "version_0" / "config.yaml"
        assert yaml.safe_load(saved.read_text())["seed_everything"] == 3
    with pytest.raises(RuntimeError, match="NOT exist"):
        _SaveRunConfig(parser, config).setup(run, Module(), "fit")
    (tmp_path / "runs" / "a" / "version_0" / "config.yaml").unlink()
    with pytest.raises(ValueError, match="overwrit"):
        _SaveRunConfig(parser, config).setup(run, Module(), "fit")
    changed = parser.parse_args(["--seed_everything", "4"])
    _SaveRunConfig(parser, changed, overwrite=True).setup(run, Module(), "fit")
    assert all("seed_everything: 4" in file.read_text() for file in tmp_path.rglob("config.yaml"))


def test_other_processes_save_no_configuration(tmp_path, monkeypatch):
    parser = RecipeParser()
    run = trainer(tmp_path, logger=[CSVLogger(tmp_path / "runs", name=name) for name in "ab"])
    monkeypatch.setattr(type(run), "is_global_zero", False)
    _SaveRunConfig(parser, parser.parse_args([])).setup(run, Module(), "fit")
    assert not list(tmp_path.rglob("config.yaml"))


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
