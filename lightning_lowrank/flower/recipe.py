"""Builds the objects of a recipe from its YAML, as ``lightning-lowrank fit`` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc import locate
from typing import Any, NoReturn

import lightning.pytorch as pl
import yaml
from lightning.pytorch.callbacks import (
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    Timer,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.callbacks import RoundProgress, StaticBatchNorm
from lightning_lowrank.callbacks.round_pictures import RoundPictures
from lightning_lowrank.cli.parser import CLI_SETTINGS, BuiltCLI, LowRankCLI, RecipeParser
from lightning_lowrank.federated.loop import FederatedLoop
from lightning_lowrank.federated.wire import Wire
from lightning_lowrank.flower.approval import check_reads_nothing, insert_placeholders

# Callbacks that observe a whole run, which are left out of one client's round.
ONLY_OF_WHOLE_RUNS = (
    *(Checkpoint, DeviceStatsMonitor, EarlyStopping, LearningRateMonitor, ModelSummary, ProgressBar, Timer),
    *(RoundPictures, RoundProgress),
)
# Arguments of the trainer that each party sets for itself; the first four have a default in the recipe.
OWN_OF_TRAINER = (
    *("accelerator", "devices", "precision", "limit_train_batches"),
    *("strategy", "num_nodes", "logger", "profiler", "plugins", "default_root_dir"),
)
_WITH_DEFAULT = OWN_OF_TRAINER[:4]
_NOT_OF_A_STUDY = ("ckpt_path", "weights_only", "seeds", "config")


@dataclass
class Recipe:
    """The built objects of a recipe, its whole content, defaults included, and its ``federated`` section."""

    content: dict[str, Any]
    module: pl.LightningModule
    datamodule: pl.LightningDataModule | None
    trainer: Any
    loop: FederatedLoop


class _RaisingParser(RecipeParser):
    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        # An error instead of an exit: the server would wait for the answer of a Flower process that has ended.
        raise MisconfigurationException((message or "").strip().removeprefix("lightning-lowrank: "))


def build(given: Mapping[str, Any] | Sequence[str | Path]) -> Recipe:
    """Build the objects of a recipe, given as content or as YAML files, for a run across sites.

    Raises:
        MisconfigurationException: If the recipe cannot be built, or cannot run across sites; the message has the
            reason.
    """
    if isinstance(given, Mapping):
        args: Any = {"subcommand": "fit", "fit": dict(given)}
    else:
        args = ["fit", *(word for config in given for word in ("--config", str(config)))]
    cli = BuiltCLI(**{**CLI_SETTINGS, "parser_class": _RaisingParser}, args=args)
    trainer: Any = cli.trainer
    loop = next((callback for callback in trainer.callbacks if isinstance(callback, FederatedLoop)), None)
    if loop is None:
        raise MisconfigurationException(
            "the recipe has no `federated` section, so that there is nothing to run on sites: add one."
        )
    _check(cli, loop)
    # Refuses a method and codecs that do not go together, before any data are read.
    Wire(loop.algorithm, loop.uplink, loop.downlink)
    content = yaml.safe_load(cli.parser_of("fit").dump(cli.config["fit"], skip_none=False))
    return Recipe(content, cli.model, cli.datamodule, trainer, loop)


def resolve(configs: Sequence[str | Path]) -> tuple[str, dict[str, Any]]:
    """A recipe's text for the sites' approval, and the own values of its author's machine.

    The text has all defaults and refers to no other file. A site's own values are placeholders ``{site: NAME}``, with a
    ``default`` if another site can have the same value; see `lightning_lowrank.flower.approval`.

    Args:
        configs: YAML files, of which later ones change earlier ones.

    Returns:
        The text, and the author's own values: ``site``, ``trainer`` and ``callbacks`` that watch a whole run.

    Raises:
        MisconfigurationException: If the recipe cannot run across sites, or names a file or an address elsewhere.
    """
    content = build(configs).content
    for name in _NOT_OF_A_STUDY:
        content.pop(name, None)
    trainer, site = content["trainer"], dict[str, Any]()
    values = {"site": site, "trainer": {name: trainer.pop(name) for name in OWN_OF_TRAINER if name in trainer}}
    given = trainer["callbacks"] or []
    callbacks = given if isinstance(given, list) else [given]
    whole = [each for each in callbacks if issubclass(locate(each["class_path"]), ONLY_OF_WHOLE_RUNS)]  # type: ignore[arg-type]
    trainer["callbacks"] = [each for each in callbacks if each not in whole]
    content = insert_placeholders(content, site)
    content["trainer"] |= {name: {"site": name, "default": values["trainer"][name]} for name in _WITH_DEFAULT}
    check_reads_nothing(content)
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True), {**values, "callbacks": whole}


def check_optimizers(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse optimizers and schedulers whose step counts continue from one client to the next.

    In a simulation they continue from the client that made the most steps in a round. Sites know nothing of each
    other's steps, and no message carries a scheduler's state.

    Raises:
        MisconfigurationException: If there is one.
    """
    for optimizer in trainer.optimizers:
        intervals = [group.get("refresh_interval") for group in optimizer.param_groups]
        interval = next((each for each in intervals if each is not None), None)
        if interval is not None:
            raise MisconfigurationException(
                f"{type(optimizer).__name__}(refresh_interval={interval}) continues its count of steps from client to"
                " client, but sites do not know each other's steps: set refresh_interval=None, with which a method"
                " such as"
                " FedSLoP renews the subspaces."
            )
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step" or not module.automatic_optimization:
            raise MisconfigurationException(
                f"{type(config.scheduler).__name__} steps within clients, but sites do not know each other's steps:"
                " use interval='epoch', which is once a round, and automatic optimization."
            )


def _check(cli: LowRankCLI, loop: FederatedLoop) -> None:
    trainer: Any = cli.trainer
    refused = {
        "federated.personal_test": (loop.personal_test is not None, "clients' own models stay on their sites"),
        "federated.client_dropout": (loop.client_dropout > 0, "real sites fail by themselves"),
        "federated.system": (loop.system is not None, "real sites take their own time"),
        "federated.attackers": (loop.attackers is not None, "attacks are simulated"),
        "trainer.fast_dev_run": (bool(trainer.fast_dev_run), "set trainer.max_epochs and trainer.limit_train_batches"),
        "trainer.max_steps": (trainer.max_steps != -1, "rounds are counted by trainer.max_epochs"),
        "trainer.devices": (trainer.world_size > 1, "each site trains its one client on one device"),
        "ckpt_path": (bool(cli.config["fit"].get("ckpt_path")), "a run across sites starts from the recipe's model"),
        "StaticBatchNorm": (
            any(isinstance(callback, StaticBatchNorm) for callback in trainer.callbacks),
            "it goes over all clients' samples, which no party has; federated.buffers='average' sends statistics, and a"
            " norm such as GroupNorm has none",
        ),
        "seeds": (len(cli.seeds) > 1, "give seed_everything, and start a run for each"),
    }
    for name, (wrong, advice) in refused.items():
        if wrong:
            raise MisconfigurationException(f"{name} has no meaning across sites: leave it out; {advice}.")
