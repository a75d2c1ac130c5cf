"""The objects that a recipe describes: a LightningCLI with the two callbacks as sections of the YAML.

``fit``, ``validate``, ``test`` and ``predict`` are Lightning's own; ``inspect`` takes the same sections.
"""

from __future__ import annotations

import gc
import json as json_module
import os
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from functools import partial, update_wrapper
from pathlib import Path
from types import MethodType
from typing import Any, NoReturn

import jsonargparse
import lightning.pytorch as pl
from jsonargparse import ActionConfigFile
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import ModelSummary, ProgressBar
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    Namespace,
    SaveConfigCallback,
    instantiate_class,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from packaging.specifiers import SpecifierSet
from rich.console import Console

# Imported here so that jsonargparse finds these classes by their short names.
import lightning_lowrank.aggregation
import lightning_lowrank.algorithms
import lightning_lowrank.callbacks
import lightning_lowrank.compression
import lightning_lowrank.data
import lightning_lowrank.layers
import lightning_lowrank.lora
import lightning_lowrank.models
import lightning_lowrank.optim  # noqa: F401
from lightning_lowrank.arguments import join_names, printable
from lightning_lowrank.callbacks.lowrank import LowRank
from lightning_lowrank.callbacks.round_pictures import RoundPictures, shows_pictures
from lightning_lowrank.callbacks.round_progress import RoundProgress
from lightning_lowrank.cli import recipes
from lightning_lowrank.cli.earlier_metrics import EarlierMetrics, take_earlier_metrics
from lightning_lowrank.cli.inspection import inspect_run, make_layers, render
from lightning_lowrank.cli.lightning_messages import only_warnings
from lightning_lowrank.cli.suggestions import with_suggestions
from lightning_lowrank.extras import how_to_install
from lightning_lowrank.federated.checks import check_callbacks, static_batch_norm_advice, why_trained_set_is_fixed
from lightning_lowrank.federated.loop import FederatedLoop
from lightning_lowrank.federated.safe_files import WholeCheckpoints, check_folders, check_whole, local_path
from lightning_lowrank.internals.cli import SubcommandCLI, finds_checkpoint

JSONARGPARSE = SpecifierSet(">=4.52,<5")
"""The bound of the extra ``cli``. The rest of the package works with any release of jsonargparse installed."""
_RUN_LOGGER = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "runs", "name": None}}

_PARSER_NOISE = (
    "Does not validate against any",
    "Subtypes:",
    "Errors:",
    "Expected a <class 'NoneType'>",
    "Expected a path but",
    "Given value",
    "Not a valid subclass",
    "Subclass types expect one of",
    "a class path (str)",
    "a dict with",
)
_LONGEST_VALUE = 40
_OF_DEVICES = ("accelerator", "devices", "strategy", "precision")
"""Arguments of the trainer that Lightning's errors do not always name."""
_CHECKPOINT_NAMES = ("best", "last", "hpc")
_LARGEST_SEED = 2**32 - 1


class _Trainer(pl.Trainer):
    def inspect(self, model: pl.LightningModule, datamodule: Any = None, json: bool = False) -> None:
        """Print what a run would cost and whether the module would work; data is not read.

        Args:
            model: The module.
            datamodule: Not used; LightningCLI passes it to every subcommand.
            json: Print JSON instead of tables.
        """
        callbacks: list[pl.Callback] = vars(self)["callbacks"]
        lowrank = next((each for each in callbacks if isinstance(each, LowRank)), None)
        loop = next((each for each in callbacks if isinstance(each, FederatedLoop)), None)
        figures = inspect_run(model, lowrank, loop)
        if loop is not None:
            try:
                check_callbacks(loop, self, model, why_trained_set_is_fixed(loop))
            except MisconfigurationException as error:
                figures["problems"].append(str(error))
            figures["notes"] += static_batch_norm_advice(loop.algorithm, self, model, loop.buffers)
        if json:
            print(json_module.dumps(figures, indent=2))
        else:
            render(figures, Console())


_DATA = "data_arguments"
"""Entry of a checkpoint with the arguments of the data."""
_SAME_SAMPLES = frozenset({"root", "batch_size", "num_workers", "persistent_workers", "pin_memory", "prefetch_factor"})


def _data_arguments(config: Namespace) -> dict[str, Any]:
    """The data's arguments by dotted name, as plain Python, without those that do not change which samples it has."""
    data = config.get("data") or Namespace()
    chosen = {name: value for name, value in data.items() if name.rpartition(".")[2] not in _SAME_SAMPLES}
    return json_module.loads(json_module.dumps(chosen, default=str))


class _SaveRunConfig(SaveConfigCallback):
    """Saves ``config.yaml`` into each folder that holds this run alone.

    These are the folders of `CSVLogger`, where ``report`` reads it, and `TensorBoardLogger`. If the run has other
    loggers alone, the folder is the one in which ModelCheckpoint by default makes ``checkpoints``. A run without a
    logger, or whose logger has no name or version, has no such folder, and saves nothing.

    In a folder with the configuration of an earlier run, a fit saves its own when training starts, unless it is refused
    before, and an evaluation saves none. The same holds for the logger's metrics.
    """

    _waiting: Sequence[str] = ()
    _earlier: Sequence[EarlierMetrics] = ()

    # The trainer does not know its rank before a command begins.
    @rank_zero_only
    def take_earlier(self, trainer: pl.Trainer, command: str) -> None:
        """Keep the metrics of earlier runs in the folders of the trainer's loggers."""
        self._earlier = take_earlier_metrics(trainer, command)

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Each folder once, because loggers may share one.
        folders = _run_folders(trainer)
        self._waiting = [each for each in folders if get_filesystem(each).exists(self._file_in(each))]
        self._save_in(folders - {*self._waiting})

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find out which earlier runs the fit continues."""
        for each in self._earlier:
            each.begin_fit(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save a fit's configuration in place of an earlier run's, and drop the metrics of rounds that come again."""
        self._save_in(self._waiting)
        for each in self._earlier:
            each.begin_training(trainer)
        self._waiting = self._earlier = ()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the data's arguments, with which an evaluation compares its own."""
        checkpoint[_DATA] = _data_arguments(self.config)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Warn of an evaluation whose data is not that of the checkpoint's run, which may have trained on it."""
        now, then = _data_arguments(self.config), checkpoint.get(_DATA, {})
        changed = [name for name in sorted(now.keys() | then.keys()) if now.get(name) != then.get(name)]
        command = "" if trainer.state.fn is None else trainer.state.fn.value
        if then and changed and command in ("validate", "test"):
            named = [f"data.{name}={now.get(name)!r} (the checkpoint's run had {then.get(name)!r})" for name in changed]
            rank_zero_warn(
                f"{command} has {join_names(named)}, and may read samples that the run has trained on: give the run's"
                " values, which are in its config.yaml."
            )

    def _file_in(self, folder: str) -> str:
        return os.path.join(folder, self.config_filename)

    def _save_in(self, folders: Iterable[str]) -> None:
        for folder in folders:
            get_filesystem(folder).makedirs(folder, exist_ok=True)
            self.parser.save(
                self.config,
                self._file_in(folder),
                skip_none=False,
                overwrite=self.overwrite,
                multifile=self.multifile,
            )


def _run_folders(trainer: pl.Trainer) -> set[str]:
    """The folders that no other run writes into."""
    own = {each.log_dir for each in trainer.loggers if isinstance(each, (CSVLogger, TensorBoardLogger))}
    if own or not trainer.loggers:
        return own
    first = trainer.loggers[0]
    version = first.version if isinstance(first.version, str | None) else f"version_{first.version}"
    # Without a version, the folder would be that of all runs.
    if not version or first.name is None:
        return set()
    return {os.path.join(first.save_dir or trainer.default_root_dir, first.name, version)}


def _section(config: Namespace) -> Namespace:
    """The configuration of the chosen subcommand."""
    return config.get(str(config.get("subcommand")), config)


def _resolved(path: str | Path) -> str:
    """A path without ``~`` and ``file://``, which Lightning's loggers, checkpoints and trainer read differently."""
    return str(local_path(path) or path)


def _write_below_root(trainer: Namespace) -> None:
    """Put the relative folders of loggers and callbacks below ``default_root_dir``, if given, and resolve ``~``."""
    root = trainer.get("default_root_dir")
    if root:
        root = trainer["default_root_dir"] = _resolved(root)
    for part, argument in (("logger", "save_dir"), ("callbacks", "dirpath")):
        given = trainer.get(part)
        for each in given if isinstance(given, list) else [given]:
            folder = each.get(f"init_args.{argument}") if isinstance(each, Namespace) else None
            if not folder:
                continue
            folder = _resolved(folder)
            # In a saved configuration the folder already begins with the root.
            if root and "://" not in folder and not Path(folder).is_relative_to(root):
                folder = os.path.join(root, folder)
            each[f"init_args.{argument}"] = folder


class _RecipeFile(ActionConfigFile):
    """``--config``: a file, or the name of a recipe that comes with the package."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        super().__call__(parser, cfg, recipes.find(values), option_string)


class RecipeParser(LightningArgumentParser):
    """Parser whose ``--config`` knows recipes by name, and whose errors are one line."""

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        """Add an argument; one that reads a configuration file reads recipes by name as well."""
        if kwargs.get("action") is ActionConfigFile:
            kwargs["action"] = _RecipeFile
        return super().add_argument(*args, **kwargs)

    def dump(self, *arguments: Any, skip_validation: bool = True, **keywords: Any) -> str:
        """Serialise a configuration as YAML text.

        It was validated when it was read. Validating it again would take a third of the time of building a run.
        """
        text: str = super().dump(*arguments, skip_validation=skip_validation, **keywords)
        return text

    def save(self, *arguments: Any, skip_validation: bool = True, **keywords: Any) -> None:
        """Save a configuration without validating it again."""
        super().save(*arguments, skip_validation=skip_validation, **keywords)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Exit with one line in place of jsonargparse's list of every option and every type it tried."""
        if self.exit_on_error and "JSONARGPARSE_DEBUG" not in os.environ:
            said = " ".join(_useful_lines(message))
            said = said.replace("Expected a dot import path string:", "no class is known as")
            # Only `seeds` takes several words, and jsonargparse's message does not name the option.
            said = said.replace("'int' object is not iterable", "seeds must be a list such as [0, 1, 2]")
            self.exit(2, f"lightning-lowrank: {printable(with_suggestions(said))}\n")
        super().error(message, ex)


def _useful_lines(message: str) -> list[str]:
    """The useful lines of jsonargparse's message, with the value that was given."""
    useful: list[str] = []
    # The innermost value comes first; the outer ones are whole sections.
    said = False
    for line in (line.strip().removeprefix("- ") for line in message.splitlines()):
        given = line.removeprefix("Given value: ")
        if given != line:
            shown = given if len(given) <= _LONGEST_VALUE else f"{given[:_LONGEST_VALUE]}..."
            if (
                not said
                and useful
                and useful[-1].startswith(("Expected a <", "Expected a typing", "Parser key", "Type "))
            ):
                useful[-1] += ("" if useful[-1].endswith(":") else ".") + f" Got value: {shown}"
            said = True
        elif line and not line.startswith(_PARSER_NOISE):
            said = said or "Got value" in line
            useful.append(line)
    return useful


def _of_trainer(error: Exception, given: Namespace) -> str:
    """Lightning's message about the trainer's arguments, after their names and values."""
    message = str(error)
    named = [name for name in vars(given) if re.search(rf"\b{name}\b", message)]
    values = [f"trainer.{name}={given[name]!r}" for name in named or _OF_DEVICES]
    known = " A federation takes auto, or client_parallel for several devices." if "invalid strategy" in message else ""
    return f"{', '.join(values)}: {message}{known}"


class LowRankCLI(SubcommandCLI):
    """LightningCLI with ``federated:`` and ``lowrank:`` sections, ``seeds`` and an ``inspect`` subcommand.

    An ``optimizer:`` section is built inside ``configure_optimizers``, after `LowRank` has made the factors. Lightning
    would build it before, with the dense parameters.

    One object is one run. If ``seeds`` are given, it is the run of one of them: ``seed_everything`` has that value, and
    the saved ``config.yaml`` has no ``seeds``. `main` makes the other runs.

    Args:
        *arguments: As for LightningCLI.
        seed: Which of ``seeds`` this run is for; by default the first. ``None`` if ``seeds`` is not given.
        **keywords: As for LightningCLI.

    Attributes:
        seeds: All seeds that ``fit`` was given; empty for other subcommands, which take the first one.

    Raises:
        MisconfigurationException: If ``seeds`` are not distinct integers from 0 to 2³² − 1, are given to ``fit``
            together with ``--seed_everything`` on the command line, would share one run folder or continue one
            checkpoint, or are given on the command line of an evaluation. Also if the run of one of several seeds is
            refused; the message then begins with the seed. Also if there is no checkpoint of the name ``best``,
            ``last`` or ``hpc``, or jsonargparse is of a release that reads recipes otherwise.
    """

    def __init__(self, *arguments: Any, seed: int | None = None, **keywords: Any) -> None:
        if not JSONARGPARSE.contains(jsonargparse.__version__, prereleases=True):
            raise MisconfigurationException(
                f"the command line reads recipes by jsonargparse{JSONARGPARSE}, and {jsonargparse.__version__} is"
                f" installed: {how_to_install('cli')}"
            )
        self.seeds: list[int] = []
        self.seed = seed
        self.quiet = False
        try:
            super().__init__(*arguments, **keywords)
        except MisconfigurationException as error:
            if len(self.seeds) > 1:
                raise MisconfigurationException(f"{self._failure()}: {error}") from error
            raise
        except BaseException:
            if len(self.seeds) > 1:
                print(f"lightning-lowrank: {self._failure()}", file=sys.stderr)
            raise

    def _failure(self) -> str:
        assert self.seed is not None
        place = self.seeds.index(self.seed)
        parts = [
            f"{what} {' '.join(map(str, seeds))}"
            for what, seeds in (("whole:", self.seeds[:place]), ("not begun:", self.seeds[place + 1 :]))
            if seeds
        ]
        return f"the run with seed {self.seed} failed ({', '.join(parts)})"

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The subcommands, each with the arguments that the command line does not set."""
        return {**LightningCLI.subcommands(), "inspect": {"model", "datamodule", "json"}}

    def add_arguments_of_subcommand(self, parser: LightningArgumentParser, subcommand: str) -> list[str]:
        """Add ``--seeds``, ``--quiet``, and the arguments of ``inspect``.

        All subcommands have all arguments that a recipe for ``fit`` may have.
        """
        alone = "" if subcommand == "fit" else f"; {subcommand} takes the first of a recipe's"
        parser.add_argument(
            "--seeds",
            type=int,
            nargs="+",
            default=None,
            help=f"make one run after another, one for each of these values of seed_everything{alone}",
        )
        quiet = "show no bars, tables and notes" if subcommand != "inspect" else "not used; a recipe may have it"
        parser.add_argument("--quiet", action="store_true", help=quiet)
        if subcommand != "inspect":
            return []
        parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
        for name in ("ckpt_path", "weights_only"):
            parser.add_argument(f"--{name}", type=Any, default=None, help="not used; the config.yaml of a run has it")
        return ["json"]

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the sections ``lowrank`` and ``federated``; a recipe may leave out either."""
        parser.add_argument("--lowrank", type=LowRank | None, default=None, help="arguments of LowRank")
        parser.add_argument("--federated", type=FederatedLoop | None, default=None, help="arguments of FederatedLoop")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Read the command line and files; this run's seed of ``seeds`` becomes ``seed_everything``."""
        super().parse_arguments(parser, args)
        section = _section(self.config)
        # Left out of the saved configuration: it does not change the run.
        self.quiet = section.pop("quiet", False)
        if self.quiet:
            only_warnings()
        # Check the file now, because Lightning next reads the hyperparameters in it.
        if section.get("ckpt_path"):
            section["ckpt_path"] = _resolved(section["ckpt_path"])
            if Path(section["ckpt_path"]).is_file():
                check_whole(section["ckpt_path"])
        seeds = section.get("seeds")
        if seeds is None:
            return
        subcommand = self.config.get("subcommand")
        words = sys.argv[1:] if args is None else args
        options = [word.split("=")[0] for word in words] if isinstance(words, list) else []
        # argparse accepts abbreviated options.
        given = any(option.startswith("--seed_") and "--seed_everything".startswith(option) for option in options)
        if given and subcommand == "fit":
            raise MisconfigurationException(
                f"--seed_everything is given in addition to seeds={seeds}, which set it: leave out one,"
                " or give `--seeds` with a single value for a single run."
            )
        wrong = [seed for seed in seeds if not 0 <= seed <= _LARGEST_SEED]
        if wrong or not seeds or len(set(seeds)) < len(seeds):
            raise MisconfigurationException(
                f"seeds must be one or more distinct integers from 0 to {_LARGEST_SEED}; got {seeds}."
            )
        if subcommand != "fit":
            # What a run costs does not depend on its seed.
            evaluates = subcommand != "inspect"
            if evaluates and "--seeds" in options:
                raise MisconfigurationException(
                    f"--seeds={seeds} is for fit, and {subcommand} is a single run: give --seed_everything."
                )
            if not given:
                section["seed_everything"] = seeds[0]
            if evaluates and not given and len(seeds) > 1:
                rank_zero_warn(
                    f"{subcommand} is a single run, with the first of seeds={seeds}: for a checkpoint of another seed,"
                    " give --seed_everything."
                )
            return
        if len(seeds) > 1 and section.get("ckpt_path"):
            raise MisconfigurationException(
                f"ckpt_path={section['ckpt_path']!r} is the state of one run, from which the {len(seeds)} runs of"
                f" seeds={seeds} would all continue: leave it out, or give `--seeds` with that run's value alone."
            )
        logger = section.get("trainer.logger")
        for one in logger if isinstance(logger, list) else [logger]:
            version = one.get("init_args.version") if isinstance(one, Namespace) else None
            if len(seeds) > 1 and version is not None:
                raise MisconfigurationException(
                    f"the logger's version={version!r} is one run folder, which the {len(seeds)} runs of seeds={seeds}"
                    " would share: leave it out, and each gets its own."
                )
        self.seeds = seeds
        self.seed = seeds[0] if self.seed is None else self.seed
        section["seed_everything"] = self.seed

    def before_instantiate_classes(self) -> None:
        """Refuse a missing checkpoint early, and free the memory of the previous run."""
        if len(self.seeds) > 1:
            # A trainer and its module refer to each other. jsonargparse keeps its last parser, and so both of them,
            # until another parser has run. Without this, the previous run's memory would add to this one's.
            gc.collect()
        # Without `seeds`, because the saved configuration describes one run.
        section = _section(self.config)
        section.pop("seeds", None)
        # Lightning has put the default back if it has read a checkpoint's hyperparameters.
        section.pop("quiet", None)
        _write_below_root(section["trainer"])
        path = section.get("ckpt_path")
        if path and path not in _CHECKPOINT_NAMES and "://" not in path and not Path(path).exists():
            raise MisconfigurationException(f"ckpt_path={path!r} does not exist.")

    def instantiate_classes(self) -> None:
        """Build model, data, callbacks and trainer; an error that our classes raise keeps only its own message."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            # jsonargparse wraps a constructor's error once for every union of types around it, so look for the
            # original.
            cause: BaseException | None = error
            while cause is not None:
                *_, (frame, _line) = traceback.walk_tb(cause.__traceback__)
                ours = frame.f_globals.get("__name__", "").startswith("lightning_lowrank.")
                if ours and isinstance(cause, (ValueError, MisconfigurationException)):
                    raise MisconfigurationException(str(cause)) from error
                cause = cause.__cause__
            raise

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Put the two callbacks before all others, which may read weights, and have checkpoints written whole.

        A federated run gets `RoundProgress`, which keeps the best figure in checkpoints even if it is not shown. If one
        of its loggers shows images, the run gets `RoundPictures`.
        """
        section = _section(self.config_init)
        others = section["trainer"].get("callbacks") or []
        others = others if isinstance(others, list) else [others]
        own = [each for each in (section.get("lowrank"), section.get("federated")) if each is not None]
        if self.quiet:
            for each in own:
                each.summary = False
            others = [each for each in others if not isinstance(each, (ProgressBar, RoundProgress, ModelSummary))]
            kwargs = {**kwargs, "enable_progress_bar": False, "enable_model_summary": False}
        if section.get("federated") is not None and not any(isinstance(each, RoundProgress) for each in others):
            shown = not self.quiet and section["trainer"].get("enable_progress_bar") is not False
            others = [*others, RoundProgress(form="auto" if shown else "none")]
        logger = kwargs.get("logger", section["trainer"].get("logger"))
        draws = any(isinstance(each, RoundPictures) for each in others)
        if section.get("federated") is not None and shows_pictures(logger) and not draws:
            others = [*others, RoundPictures()]
        try:
            trainer = super().instantiate_trainer(callbacks=[*own, *others], **kwargs)
        except (ImportError, RuntimeError, TypeError, ValueError, MisconfigurationException) as error:
            raise MisconfigurationException(_of_trainer(error, section["trainer"])) from error
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = WholeCheckpoints()
        return trainer

    def run_subcommand(self, subcommand: str) -> None:
        """Refuse a name for which there is no checkpoint, keep the metrics of earlier runs, and run.

        ``fit`` takes ``last`` in any case, as Lightning does: the first fit has none.
        """
        name = _section(self.config).get("ckpt_path")
        named = name in _CHECKPOINT_NAMES and subcommand != "inspect" and (subcommand, name) != ("fit", "last")
        if named and not finds_checkpoint(self.trainer, subcommand, name):
            raise MisconfigurationException(
                f"ckpt_path={name!r}: {subcommand} finds no such checkpoint of this configuration, as each run has a"
                " folder of its own: give the file, as in --ckpt_path runs/version_0/checkpoints/last.ckpt."
            )
        if subcommand == "fit":
            # Before anything is trained.
            check_folders(self.trainer)
        if subcommand != "inspect":
            trainer: Any = self.trainer
            for each in trainer.callbacks:
                if isinstance(each, _SaveRunConfig):
                    each.take_earlier(trainer, subcommand)
        super().run_subcommand(subcommand)

    def install_optimizers(self) -> None:
        """Have ``configure_optimizers`` build the configured optimizers, so that they get the factors."""
        section = _section(self.config_init)
        optimizer_init, scheduler_init = section.get("optimizer"), section.get("lr_scheduler")
        if not optimizer_init:
            if scheduler_init:
                raise MisconfigurationException(
                    "lr_scheduler is given and optimizer is not: add an `optimizer:` section, or give the module's own"
                    " scheduler among its init_args."
                )
            return
        if is_overridden("configure_optimizers", self.model):
            rank_zero_warn(f"the `optimizer:` section replaces {type(self.model).__name__}.configure_optimizers().")

        def build(module: pl.LightningModule) -> Any:
            optimizer = instantiate_class(module.parameters(), optimizer_init)
            scheduler = instantiate_class(optimizer, scheduler_init) if scheduler_init else None
            return self.configure_optimizers(module, optimizer, scheduler)

        self.model.configure_optimizers = MethodType(update_wrapper(partial(build), build), self.model)


class BuiltCLI(LowRankCLI):
    """The objects of a recipe, built but not run, independent of the process's command line."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        # Lightning would write the command line to the log, in which Flower's task token can be.
        words, sys.argv = sys.argv, sys.argv[:1]
        try:
            super().__init__(*arguments, **keywords)
        finally:
            sys.argv = words

    def run_subcommand(self, subcommand: str) -> None:
        """Do nothing."""


CLI_SETTINGS: dict[str, Any] = {
    "trainer_class": _Trainer,
    "trainer_defaults": {"logger": _RUN_LOGGER},
    "seed_everything_default": 0,
    "parser_class": RecipeParser,
    "parser_kwargs": {"prog": "lightning-lowrank"},
    "save_config_callback": _SaveRunConfig,
    # Lightning would save it into the bare save_dir of most loggers.
    "save_config_kwargs": {"overwrite": True, "save_to_log_dir": False},
}


def build_module(configs: Sequence[str]) -> pl.LightningModule:
    """Build the module that a run of these configurations began with, with the same seed, on the CPU."""
    here = ("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=auto", "--trainer.logger=false")
    words = [word for config in configs for word in ("--config", config)]
    module = BuiltCLI(**CLI_SETTINGS, args=["fit", *words, *here, "--ckpt_path=null", "--quiet"]).model
    make_layers(module)
    return module
