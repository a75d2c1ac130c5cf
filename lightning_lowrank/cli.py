"""The console command ``lightning-lowrank``: a LightningCLI with the two callbacks as sections of the YAML.

``fit``, ``validate``, ``test`` and ``predict`` are Lightning's own; ``fit --seeds 0 1 2`` makes one run for each seed.
``inspect`` tells what a run would cost before any data is read; ``export`` and ``report`` read what runs left behind
and need no model section; ``flower`` writes the project that runs a recipe across sites.
"""

from __future__ import annotations

import argparse
import gc
import json as json_module
import os
import sys
import traceback
from functools import partial, update_wrapper
from pathlib import Path
from types import MethodType
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    Namespace,
    SaveConfigCallback,
    instantiate_class,
)
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.console import Console

import lightning_lowrank.data
import lightning_lowrank.models
from lightning_lowrank.callbacks.lowrank import LowRank, adapter_checkpoint, dense_checkpoint
from lightning_lowrank.federated.checks import check_callbacks
from lightning_lowrank.federated.loop import FederatedLoop
from lightning_lowrank.inspection import inspect_run, render
from lightning_lowrank.report import report

_RUN_LOGGER = {
    "class_path": "lightning.pytorch.loggers.CSVLogger",
    "init_args": {"save_dir": "runs", "name": None},
}

_PARSER_NOISE = (
    "Does not validate against any",
    "Subtypes:",
    "Errors:",
    "Expected a <class 'NoneType'>",
    "Expected a path but",
    "Given value",
)
_CHECKPOINT_NAMES = ("best", "last", "hpc")
# inspect takes seeds so that a recipe that names them can be inspected; what a run costs does not depend on its seed.
_SEEDED = ("fit", "inspect")
_LARGEST_SEED = 2**32 - 1


class _Trainer(pl.Trainer):
    def inspect(self, model: pl.LightningModule, datamodule: Any = None, json: bool = False) -> None:
        """Tell what a run would cost and whether the module would work, without touching data.

        Args:
            model: The module.
            datamodule: Not used; LightningCLI passes it to every subcommand.
            json: Print JSON instead of tables.
        """
        callbacks: list[pl.Callback] = vars(self)["callbacks"]
        lowrank = next((callback for callback in callbacks if isinstance(callback, LowRank)), None)
        loop = next((callback for callback in callbacks if isinstance(callback, FederatedLoop)), None)
        figures = inspect_run(model, lowrank, loop)
        if loop is not None:
            try:
                check_callbacks(loop, self, model)
            except MisconfigurationException as error:
                figures["problems"].append(str(error))
        if json:
            print(json_module.dumps(figures, indent=2))
        else:
            render(figures, Console())


class _SaveRunConfig(SaveConfigCallback):
    """Saves ``config.yaml`` into the run's folder; a run without a logger has none but the working directory."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.loggers:
            super().setup(trainer, pl_module, stage)


class _Parser(LightningArgumentParser):
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End with one line, where jsonargparse prints every option and every type that was tried."""
        if self.exit_on_error and "JSONARGPARSE_DEBUG" not in os.environ:
            lines = (line.strip().removeprefix("- ") for line in message.splitlines())
            said = " ".join(line for line in lines if line and not line.startswith(_PARSER_NOISE))
            said = said.replace("Expected a dot import path string:", "no class is known as")
            # `seeds` is the only option of several words, and jsonargparse does not say which it could not iterate.
            said = said.replace("'int' object is not iterable", "seeds must be a list such as [0, 1, 2]")
            self.exit(2, f"lightning-lowrank: {said}\n")
        super().error(message, ex)


class LowRankCLI(LightningCLI):
    """LightningCLI with ``federated:`` and ``lowrank:`` sections, ``seeds`` and an ``inspect`` subcommand.

    An ``optimizer:`` section is built inside ``configure_optimizers``, when `LowRank` has made the factors; Lightning's
    own would hold the parameters from before.

    One object is one run. Where ``seeds`` are given it is the run of one of them, as if ``seed_everything`` had been
    that and ``seeds`` had not been given: the saved ``config.yaml`` says just so. `main` makes the others.

    Args:
        *arguments: As for LightningCLI.
        seed: Which of ``seeds`` this run is for; by default the first.
        **keywords: As for LightningCLI.

    Attributes:
        seeds: All seeds that were asked for; empty where ``seeds`` is not given.
        seed: The one that this run is for; ``None`` where ``seeds`` is not given.

    Raises:
        MisconfigurationException: If ``seeds`` are not distinct integers from 0 to 2³² − 1, stand beside a
            ``--seed_everything`` on the command line, or would share one run folder. Also if the run of one of several
            seeds is refused: the message then begins with the seed.
    """

    def __init__(self, *arguments: Any, seed: int | None = None, **keywords: Any) -> None:
        self.seeds: list[int] = []
        self.seed = seed
        try:
            super().__init__(*arguments, **keywords)
        except MisconfigurationException as error:
            if self._among_several():
                raise MisconfigurationException(f"{self._failure()}: {error}") from error
            raise
        except BaseException:
            if self._among_several():
                print(f"lightning-lowrank: {self._failure()}", file=sys.stderr)
            raise

    def _among_several(self) -> bool:
        return self.seed is not None and len(self.seeds) > 1

    def _failure(self) -> str:
        assert self.seed is not None
        place = self.seeds.index(self.seed)
        told = [
            f"{what} {' '.join(map(str, seeds))}"
            for what, seeds in (("whole:", self.seeds[:place]), ("not begun:", self.seeds[place + 1 :]))
            if seeds
        ]
        return f"the run with seed {self.seed} failed ({', '.join(told)})"

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Name the subcommands and the arguments that the command line does not set."""
        return {**LightningCLI.subcommands(), "inspect": {"model", "datamodule", "json"}}

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand in _SEEDED:
            parser.add_argument(
                "--seeds",
                type=int,
                nargs="+",
                default=None,
                help="make one run after another, one for each of these values of seed_everything",
            )
        if subcommand == "inspect":
            parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
            self._subcommand_method_arguments[subcommand].append("json")
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the two sections; a recipe may leave out either."""
        parser.add_argument("--lowrank", type=LowRank | None, default=None, help="arguments of LowRank")
        parser.add_argument("--federated", type=FederatedLoop | None, default=None, help="arguments of FederatedLoop")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Read the command line and files; of several ``seeds``, this run's becomes ``seed_everything``."""
        super().parse_arguments(parser, args)
        section = self.config.get(str(self.config.get("subcommand")), self.config)
        seeds = section.get("seeds")
        if seeds is None:
            return
        words = sys.argv[1:] if args is None else args
        options = [word.split("=")[0] for word in words] if isinstance(words, list) else []
        # argparse also takes what an option begins with for the option.
        if any(option.startswith("--seed_") and "--seed_everything".startswith(option) for option in options):
            raise MisconfigurationException(
                f"--seed_everything stands beside seeds={seeds}, which give seed_everything its values: leave out one,"
                " or give `--seeds` with a single value for a single run."
            )
        wrong = [seed for seed in seeds if not 0 <= seed <= _LARGEST_SEED]
        if wrong or not seeds or len(set(seeds)) < len(seeds):
            raise MisconfigurationException(
                f"seeds must be one or more distinct integers from 0 to {_LARGEST_SEED}; got {seeds}."
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
        """Refuse a checkpoint that is not there before anything is built, and free what the run before left."""
        if self._among_several():
            # A trainer and its module refer to each other, and jsonargparse to the last parser and so to both until
            # another has parsed: without this, here, the memory of the run before and of this one would add up.
            gc.collect()
        # The saved config is that of one run, and other subcommands read it too, which have no `seeds`.
        self.config.get(str(self.subcommand), self.config).pop("seeds", None)
        path = self._get(self.config, "ckpt_path")
        if path and path not in _CHECKPOINT_NAMES and "://" not in path and not Path(path).exists():
            raise MisconfigurationException(f"ckpt_path={path!r} is not there.")

    def instantiate_classes(self) -> None:
        """Build model, data, callbacks and trainer; what our own classes refuse ends as their sentence."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            # jsonargparse wraps what a constructor raises once for every union of types around it.
            cause: BaseException | None = error
            while cause is not None:
                *_, (frame, _line) = traceback.walk_tb(cause.__traceback__)
                ours = frame.f_globals.get("__name__", "").startswith("lightning_lowrank.")
                if ours and isinstance(cause, (ValueError, MisconfigurationException)):
                    raise MisconfigurationException(str(cause)) from error
                cause = cause.__cause__
            raise

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Put the two callbacks before all others, which may read weights."""
        ours = [self._get(self.config_init, section) for section in ("lowrank", "federated")]
        others = self._get(self.config_init, "trainer").get("callbacks") or []
        others = others if isinstance(others, list) else [others]
        callbacks = [callback for callback in ours if callback is not None] + others
        return super().instantiate_trainer(callbacks=callbacks, **kwargs)

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        optimizer_init = self._get(self.config_init, "optimizer")
        scheduler_init = self._get(self.config_init, "lr_scheduler")
        if not optimizer_init:
            if scheduler_init:
                raise MisconfigurationException(
                    "lr_scheduler is given and optimizer is not: add an `optimizer:` section, or give the module's own"
                    " scheduler among its init_args."
                )
            return
        if is_overridden("configure_optimizers", self.model):
            rank_zero_warn(
                f"the `optimizer:` section takes the place of {type(self.model).__name__}.configure_optimizers()."
            )

        def build(module: pl.LightningModule) -> Any:
            optimizer = instantiate_class(module.parameters(), optimizer_init)
            scheduler = instantiate_class(optimizer, scheduler_init) if scheduler_init else None
            return self.configure_optimizers(module, optimizer, scheduler)

        self.model.configure_optimizers = MethodType(update_wrapper(partial(build), build), self.model)


CLI_SETTINGS: dict[str, Any] = {
    "trainer_class": _Trainer,
    "trainer_defaults": {"logger": _RUN_LOGGER},
    "seed_everything_default": 0,
    "parser_class": _Parser,
    "parser_kwargs": {"prog": "lightning-lowrank", "epilog": "also: lightning-lowrank export, flower, report"},
    "save_config_callback": _SaveRunConfig,
    "save_config_kwargs": {"overwrite": True},
}


def main(args: ArgsType = None) -> None:
    """Run ``lightning-lowrank``.

    Args:
        args: Command line, without the program's name; ``sys.argv`` by default.
    """
    try:
        _dispatch(args)
    except MisconfigurationException as error:
        sys.exit(f"lightning-lowrank: {' '.join(str(error).splitlines())}")


def _dispatch(args: ArgsType) -> None:
    words = sys.argv[1:] if args is None else args
    if isinstance(words, list) and words[:1] == ["export"]:
        _export(words[1:])
    elif isinstance(words, list) and words[:1] == ["report"]:
        _report(words[1:])
    elif isinstance(words, list) and words[:1] == ["flower"]:
        _flower(words[1:])
    else:
        seeds = _run(args)
        for seed in seeds[1:]:
            _run(args, seed)


def _run(args: ArgsType, seed: int | None = None) -> list[int]:
    """Make one run, and return the seeds of all that were asked for."""
    done = LowRankCLI(**CLI_SETTINGS, args=args, seed=seed)
    if done.subcommand != "fit":
        return []
    for logger in done.trainer.loggers if done.seeds else []:
        folder = getattr(logger, "log_dir", None)
        if isinstance(folder, str):
            rank_zero_info(f"seed {done.seed}: {folder}")
    return done.seeds


def _export(args: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lightning-lowrank export",
        description="Turn a checkpoint into dense weights that load into the unconverted module, or a PEFT adapter.",
    )
    parser.add_argument("checkpoint", type=Path, help="a .ckpt file of a run, with or without LowRank")
    parser.add_argument("output", type=Path, help="the .safetensors file to write, or the adapter's folder")
    parser.add_argument(
        "--format",
        choices=("safetensors", "peft"),
        default="safetensors",
        help="dense weights, or a folder that PEFT's PeftModel.from_pretrained loads",
    )
    parser.add_argument(
        "--prefix",
        default=None,
        help="keep the names that begin so and cut this off: `network.` exports that attribute; for PEFT by default the"
        " attribute that holds all low-rank layers",
    )
    parser.add_argument("--client", type=int, default=None, help="id of a client whose own model is exported")
    options = parser.parse_args(args)
    import safetensors.torch

    if not options.checkpoint.is_file():
        raise MisconfigurationException(f"{options.checkpoint} is not a checkpoint: there is no such file.")
    if options.format == "peft":
        adapter_checkpoint(options.checkpoint, options.output, options.client, options.prefix)
        print(f"wrote {options.output}: PeftModel.from_pretrained(base_model, {str(options.output)!r}) loads it")
        return
    found = dense_checkpoint(options.checkpoint, options.client)
    prefix = options.prefix or ""
    # safetensors refuses tensors that share memory, as tied weights do.
    weights = {
        name.removeprefix(prefix): value.clone(memory_format=torch.contiguous_format)
        for name, value in found.items()
        if name.startswith(prefix)
    }
    if not weights:
        raise MisconfigurationException(f"no tensor's name begins with --prefix {prefix!r}: {sorted(found)}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(weights, options.output)
    print(
        f"wrote {len(weights)} tensors, {sum(value.numel() for value in weights.values()):,} numbers: {options.output}"
    )


def _report(args: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lightning-lowrank report",
        description="Compare runs: one table, and accuracy against rounds and bytes.",
    )
    parser.add_argument("runs", type=Path, nargs="+", help="run folders, or folders that hold some")
    parser.add_argument("--metric", default=None, help="logged metric to compare; by default val_acc or the like")
    parser.add_argument("--output", type=Path, default=Path("report"), help="folder for the table and the plots")
    parser.add_argument(
        "--each",
        action="store_true",
        help="show runs that differ only in their seed one by one, not as mean ± deviation",
    )
    options = parser.parse_args(args)
    report(options.runs, metric=options.metric, output=options.output, each=options.each, console=Console())


def _flower(args: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lightning-lowrank flower",
        description="Write the Flower project of a recipe: `flwr run OUTPUT` then runs it across sites.",
    )
    parser.add_argument(
        "--config", type=Path, action="append", required=True, help="a recipe; a later one changes an earlier one"
    )
    parser.add_argument("output", type=Path, help="the folder to write")
    options = parser.parse_args(args)
    try:
        from lightning_lowrank.flower import write_project
    except ImportError as error:
        raise MisconfigurationException(str(error)) from error
    write_project(options.config, options.output)
    print(f"wrote {options.output}: start it with `flwr run {options.output}`")


__all__ = ["CLI_SETTINGS", "LowRankCLI", "lightning_lowrank", "main"]
