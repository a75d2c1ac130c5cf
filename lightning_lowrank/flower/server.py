"""The ``ServerApp`` of a recipe: a Lightning fit whose rounds run on sites, and its state for a restart."""

from __future__ import annotations

import functools
import hashlib
import re
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from filelock import FileLock, Timeout
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.files import private_files, private_folder, replacing
from lightning_lowrank.flower.approval import fill_placeholders, read_plain, section_of, state_folder
from lightning_lowrank.flower.recipe import build
from lightning_lowrank.flower.remote_rounds import NoBatch, RemoteRounds

# Seconds that a server waits for its study's earlier process to end, which may notice a killed SuperLink late.
_WAIT_FOR_END = 60.0


class _Kept(MutableMapping[int, bytes]):
    """Broadcasts by round, in a folder with a file for each, which is written atomically.

    Args:
        folder: The folder.
        begin: Whether it begins empty, whatever an earlier study left there.
    """

    def __init__(self, folder: Path, begin: bool) -> None:
        self._folder = folder
        if begin:
            self.clear()

    def _file(self, number: int) -> Path:
        return self._folder / f"round_{number}.bin"

    def __getitem__(self, number: int) -> bytes:
        return self._file(number).read_bytes()

    def __setitem__(self, number: int, data: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with replacing(self._file(number)) as part:
            part.write_bytes(data)

    def __delitem__(self, number: int) -> None:
        self._file(number).unlink()

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(int(file.stem.removeprefix("round_")) for file in self._folder.glob("round_*.bin")))

    def __len__(self) -> int:
        return len(list(iter(self)))


class _KeepState(Checkpoint):
    """Saves the trainer's state atomically after each round, as the last of all callbacks."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self._file)


def serve(
    recipe: str | Path,
    grid: Grid,
    validate: bool = True,
    state: Path | None = None,
    rounds: int = 0,
    cohort: int = 0,
    seed: int = -1,
    **settings: Any,
) -> Any:
    """Run a recipe across the sites that a grid reaches, and return the trainer, whose module is the global model.

    Args:
        recipe: The recipe's file. This machine's values for the names that the recipe leaves to each party, and for its
            trainer, come from ``server.yaml`` next to it, if that exists.
        grid: Flower's way to the sites.
        validate: Whether the server evaluates the global model; otherwise it reads no data.
        state: File to save the server's state in after each round. If it exists, the run continues from it. It is
            deleted when the run has ended normally. ``None``: nothing is saved.
        rounds: Number of rounds; 0: the recipe's ``trainer.max_epochs``.
        cohort: Number of clients that a round draws; 0: the recipe's ``federated.clients_per_round``.
        seed: ``seed_everything``; -1: the recipe's.
        settings: Further arguments of `RemoteRounds`.

    Raises:
        MisconfigurationException: If ``rounds``, ``cohort`` or ``seed`` is out of range, or the state belongs to a run
            that has not ended after a minute.
    """
    for name, count, least in (("rounds", rounds, 0), ("cohort", cohort, 0), ("seed", seed, -1)):
        if type(count) is not int or count < least:
            raise MisconfigurationException(f"{name} must be a whole number, {least} or more, got {count!r}")
    overrides = {"rounds": rounds, "cohort": cohort, "seed": seed, "validate": validate}
    run = functools.partial(_serve, Path(recipe), grid, state, overrides, settings)
    with private_files():
        if state is None:
            return run()
        private_folder(state.parent)
        lock = FileLock(f"{state}.lock", mode=0o600)
        try:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                rank_zero_info(f"waiting for the end of another process, which saves this study's state in {state}")
                lock.acquire(timeout=_WAIT_FOR_END)
        except Timeout:
            raise MisconfigurationException(
                f"this study runs in another process, which saves its state in {state}: wait for its end, or"
                " give this run another study name (study)."
            ) from None
        try:
            return run()
        finally:
            lock.release()


def _content(recipe: Path, rounds: int, cohort: int, seed: int, validate: bool) -> dict[str, Any]:
    """A recipe's content, with this machine's own values filled in and this run's settings in place of the recipe's."""
    file = recipe.with_name("server.yaml")
    values = read_plain(file.read_bytes(), str(file)) if file.is_file() else {}
    content: dict[str, Any] = fill_placeholders(read_plain(recipe.read_bytes(), str(recipe)), values.get("site", {}))
    trainer = {**(content.get("trainer") or {}), **values.get("trainer", {})}
    trainer["callbacks"] = [*(trainer.get("callbacks") or []), *values.get("callbacks", [])]
    for section, name, value, given in (
        (trainer, "max_epochs", rounds, rounds),
        (trainer, "limit_val_batches", 0, not validate),
        (section_of(content, "federated"), "clients_per_round", cohort, cohort),
        (content, "seed_everything", seed, seed >= 0),
    ):
        if given:
            section[name] = value
    return {**content, "trainer": trainer}


def _serve(
    recipe: Path, grid: Grid, state: Path | None, overrides: Mapping[str, Any], settings: Mapping[str, Any]
) -> Any:
    built, validate = build(_content(recipe, **overrides)), overrides["validate"]
    recipe_seed = built.content.get("seed_everything")
    kept = None if state is None else _Kept(state.with_suffix(".broadcasts"), begin=not state.exists())
    seed = recipe_seed if type(recipe_seed) is int else -1
    rounds = RemoteRounds(built.loop, recipe.read_bytes(), grid, broadcasts=kept, seed=seed, **settings)
    callbacks = built.trainer.callbacks
    callbacks[callbacks.index(built.loop)] = rounds
    fit: dict[str, Any] = {"datamodule": built.datamodule} if validate else {"train_dataloaders": NoBatch()}
    if state is not None:
        callbacks.append(_KeepState(state))
        if state.exists():
            rank_zero_info(f"the study continues from {state}; to start again, delete that file")
            fit["ckpt_path"] = state
    with warnings.catch_warnings():
        for warning in ("train_dataloader yielded None", "Detected call of `lr_scheduler.step\\(\\)` before"):
            warnings.filterwarnings("ignore", f".*{warning}.*")
        built.trainer.fit(built.module, **fit)
    if state is not None and kept is not None and built.trainer.state.finished:
        state.unlink(missing_ok=True)
        kept.clear()
    return built.trainer


_SETTINGS = (
    "start-timeout",
    "round-timeout",
    "min-sites",
    "keep-broadcasts",
    "on-bad-payload",
    "norm-bound",
    "count-bound",
    "nodes",
    "secure-aggregation",
    "secure-range",
    "validate",
    "rounds",
    "cohort",
    "seed",
)


def server_app(recipe: str | Path) -> ServerApp:
    """Build the ``ServerApp`` of a recipe.

    It reads from the run's configuration (``flwr run --run-config 'round-timeout=60.0'``) the arguments of
    `RemoteRounds` that `write_project` writes into the project, ``validate``, ``rounds``, ``cohort`` and ``seed``.
    After each round it saves its state in the folder ``state-dir``, by default ``$FLWR_HOME/lightning_lowrank``, in a
    file that is named by ``study`` and the recipe's digest. A restarted run continues from that file.

    Args:
        recipe: The recipe's file.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config = context.run_config
        settings: dict[str, Any] = {name.replace("-", "_"): config[name] for name in _SETTINGS if name in config}
        serve(recipe, grid, state=_state_file(Path(recipe), config), **settings)

    return app


def _state_file(recipe: Path, config: Mapping[str, Any]) -> Path:
    study = str(config.get("study", "study"))
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", study):
        raise MisconfigurationException(f"study must be letters, digits, dots and hyphens, got {study!r}")
    digest = hashlib.sha256(recipe.read_bytes()).hexdigest()
    return state_folder(config) / f"server_{study}_{digest[:16]}.ckpt"
