"""The console command ``lightning-lowrank``: a LightningCLI with the two callbacks as sections of the YAML.

``fit``, ``validate``, ``test`` and ``predict`` are Lightning's own. ``inspect`` tells what a run would cost before any
data is read; ``export`` and ``report`` read what runs left behind and need no model section.
"""

from __future__ import annotations

import argparse
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
    SaveConfigCallback,
    instantiate_class,
)
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.console import Console

import lightning_lowrank.data
import lightning_lowrank.models
from lightning_lowrank.callbacks.lowrank import LowRank, dense_checkpoint
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
            self.exit(2, f"lightning-lowrank: {said}\n")
        super().error(message, ex)


class LowRankCLI(LightningCLI):
    """LightningCLI with ``federated:`` and ``lowrank:`` sections and an ``inspect`` subcommand.

    An ``optimizer:`` section is built inside ``configure_optimizers``, when `LowRank` has made the factors; Lightning's
    own would hold the parameters from before.
    """

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Name the subcommands and the arguments that the command line does not set."""
        return {**LightningCLI.subcommands(), "inspect": {"model", "datamodule", "json"}}

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "inspect":
            parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
            self._subcommand_method_arguments[subcommand].append("json")
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the two sections; a recipe may leave out either."""
        parser.add_argument("--lowrank", type=LowRank | None, default=None, help="arguments of LowRank")
        parser.add_argument("--federated", type=FederatedLoop | None, default=None, help="arguments of FederatedLoop")

    def before_instantiate_classes(self) -> None:
        """Refuse a checkpoint that is not there before anything is built."""
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
    else:
        LowRankCLI(
            trainer_class=_Trainer,
            trainer_defaults={"logger": _RUN_LOGGER},
            seed_everything_default=0,
            parser_class=_Parser,
            parser_kwargs={"prog": "lightning-lowrank", "epilog": "also: lightning-lowrank export, report"},
            save_config_callback=_SaveRunConfig,
            save_config_kwargs={"overwrite": True},
            args=args,
        )


def _export(args: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lightning-lowrank export",
        description="Turn a checkpoint into dense weights that load into the unconverted module.",
    )
    parser.add_argument("checkpoint", type=Path, help="a .ckpt file of a run, with or without LowRank")
    parser.add_argument("output", type=Path, help="the .safetensors file to write")
    parser.add_argument(
        "--prefix", default="", help="keep the names that begin so and cut this off: `network.` exports that attribute"
    )
    options = parser.parse_args(args)
    import safetensors.torch

    if not options.checkpoint.is_file():
        raise MisconfigurationException(f"{options.checkpoint} is not a checkpoint: there is no such file.")
    found = dense_checkpoint(options.checkpoint)
    # safetensors refuses tensors that share memory, as tied weights do.
    weights = {
        name.removeprefix(options.prefix): value.clone(memory_format=torch.contiguous_format)
        for name, value in found.items()
        if name.startswith(options.prefix)
    }
    if not weights:
        raise MisconfigurationException(f"no tensor's name begins with --prefix {options.prefix!r}: {sorted(found)}")
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
    options = parser.parse_args(args)
    report(options.runs, metric=options.metric, output=options.output, console=Console())


__all__ = ["LowRankCLI", "lightning_lowrank", "main"]
