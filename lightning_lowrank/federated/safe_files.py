"""Safe files: checkpoints that are never torn, and temporary files that a later run deletes.

A temporary file or folder has its process's `owner_mark` in its name.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.arguments import join_names
from lightning_lowrank.internals.replaced import replaced

_UNFINISHED = ".part"
_DAY = 24 * 60 * 60
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LEAST_FREE = 2**16
_IN_USE: set[Path] = set()


def process_scope() -> str:
    """The scope of process ids: the host and its container (PID namespace)."""
    try:
        namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        namespace = "0"
    return f"{socket.gethostname()}-{namespace}".replace("@", "-")


def owner_mark() -> str:
    """The owner's mark in names of temporary files: ``host-container@process``."""
    return f"{process_scope()}@{os.getpid()}"


def claim(path: Path) -> Path:
    """Protect a file or folder of this process from `delete_stale_files`."""
    _IN_USE.add(path)
    return path


def delete_stale_files(marked: Iterable[tuple[Path, str]]) -> None:
    """Delete temporary files of ended processes; warn of old ones from other hosts or containers.

    Args:
        marked: Files or folders, each with the mark in its name.
    """
    strange = []
    for path, text in marked:
        where, _, number = text.rpartition("@")
        if path in _IN_USE or not number.isdecimal():
            continue
        if where == process_scope():
            if int(number) == os.getpid() or not _runs(int(number)):
                _delete(path)
        elif _is_old(path):
            strange.append(str(path))
    if strange:
        rank_zero_warn(
            f"{', '.join(sorted(strange))}: left by runs on other hosts or in other containers and unchanged for a day."
            " Delete them if these runs have ended."
        )


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        # The process exists and belongs to another user.
        return True
    return True


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > _DAY
    except OSError:
        return False


class WholeCheckpoints(TorchCheckpointIO):
    """Lightning's default checkpoint writer, except that a killed run leaves no torn checkpoint.

    A checkpoint is written to a file next to its target, synced to the disk, and then renamed, on any file system.
    (Lightning writes into the temporary folder; if that is on another file system, its last move is a copy, which a
    kill can cut short.) Before one is loaded it is read as a whole and compared with its checksums.

    `FederatedLoop` gives it to a trainer that has Lightning's default, for as long as it runs. Use it in any other run,
    and for ``trainer.save_checkpoint`` after a fit, by ``Trainer(plugins=[WholeCheckpoints()])``. Checkpoints at a URL
    are left to Lightning.

    Example:
        >>> import lightning as L
        >>> from lightning_lowrank import WholeCheckpoints
        >>> trainer = L.Trainer(plugins=[WholeCheckpoints()], logger=False, accelerator="cpu")
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint to a temporary file next to ``path``, then rename it."""
        target = local_path(path)
        if storage_options is not None or target is None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = claim(target.with_name(f".{target.name}.{owner_mark()}{_UNFINISHED}"))
        delete_stale_files(
            (each, each.name.removesuffix(_UNFINISHED).rpartition(f"{target.suffix}.")[2])
            for each in target.parent.glob(f".*{target.suffix}.*{_UNFINISHED}")
        )
        try:
            # Others with write access to the folder may have placed a link of this name.
            unfinished.unlink(missing_ok=True)
            with unfinished.open("xb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(target)
        except (OSError, RuntimeError) as error:
            # torch reports a system error as text only.
            number = error.errno if isinstance(error, OSError) else _full(target.parent)
            if number not in _FULL:
                raise
            raise MisconfigurationException(
                f"the checkpoint {target} was not written, because its disk is full; an earlier one is unchanged: free"
                f" space in {target.parent}, or set ModelCheckpoint(dirpath=..., save_top_k=1, save_last=False)."
            ) from error
        finally:
            unfinished.unlink(missing_ok=True)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint after a check that it is complete.

        Raises:
            MisconfigurationException: If it is torn.
        """
        file = local_path(path)
        if file is not None and file.is_file():
            check_whole(file)
        return super().load_checkpoint(path, map_location, weights_only)


def _full(folder: Path) -> int | None:
    """The error number ENOSPC if the folder's disk is full, else ``None``."""
    return errno.ENOSPC if shutil.disk_usage(folder).free < _LEAST_FREE else None


def check_folders(trainer: Any) -> None:
    """Refuse a trainer whose loggers and checkpoints have a folder that can't be written.

    Raises:
        MisconfigurationException: If a folder can't be made, or no file can be written in it.
    """
    folders = _folders(trainer, lambda logger: logger.save_dir)
    logs = any(logger.save_dir for logger in trainer.loggers)
    if not logs and any(not getattr(each, "dirpath", None) for each in trainer.checkpoint_callbacks):
        folders.append(str(trainer.default_root_dir))
    for folder in filter(None, map(local_path, folders)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise MisconfigurationException(
                f"the folder {folder} for logs or checkpoints can't be written ({error.strerror}): set the logger's"
                " save_dir, ModelCheckpoint's dirpath or trainer.default_root_dir to one that can."
            ) from error


def of_full_disk(error: BaseException | None) -> OSError | None:
    """The first error of a full disk among an error and its causes, else ``None``."""
    seen: list[BaseException] = []
    # Errors may be each other's context.
    while error is not None and error not in seen:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error
        seen.append(error)
        error = error.__cause__ or error.__context__
    return None


def name_full_disk(error: BaseException, trainer: Any) -> None:
    """Have an error of a full disk, such as that of a logger, name the run's folders on it and what helps.

    Lightning finalizes the loggers next. An error of a logger on the same disk does not replace this one.
    """
    found = of_full_disk(error)
    # A checkpoint's error names its file.
    if found is None or isinstance(error, MisconfigurationException):
        return
    folders = _folders(trainer, lambda logger: logger.log_dir or logger.save_dir) or [str(trainer.default_root_dir)]
    full = [folder for folder in folders if (path := local_path(folder)) and _full(_existing(path))] or folders
    found.strerror = (
        f"{os.strerror(found.errno or errno.ENOSPC)}: the run writes into {join_names(full)}. Free space there,"
        " or give another one by Trainer(default_root_dir=...), the logger's save_dir or ModelCheckpoint(dirpath=...)"
    )
    if error is not found:
        # Lightning's TensorBoardLogger says that a figure is of an unsupported type.
        error.args = (str(found),)
    for logger in trainer.loggers:
        _finalize_without_space(logger)


def _folders(trainer: Any, of_logger: Callable[[Any], Any]) -> list[str]:
    """The folders that loggers and checkpoints have of their own, in alphabetical order."""
    loggers = {str(folder) for each in trainer.loggers if (folder := of_logger(each))}
    checkpoints = {str(each.dirpath) for each in trainer.checkpoint_callbacks if getattr(each, "dirpath", None)}
    return sorted(loggers | checkpoints)


def _existing(folder: Path) -> Path:
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())


def _finalize_without_space(logger: Any) -> None:
    """Make a logger's next ``finalize`` ignore a full disk."""
    finalize = logger.finalize

    def finalize_if_space(status: str) -> None:
        vars(logger).pop("finalize", None)
        try:
            finalize(status)
        except OSError as error:
            if error.errno not in _FULL:
                raise

    logger.finalize = finalize_if_space


def whole_checkpoints(trainer: Any) -> AbstractContextManager[None]:
    """A context in which a trainer uses `WholeCheckpoints` in place of Lightning's default."""
    if type(trainer.strategy.checkpoint_io) is not TorchCheckpointIO:
        return nullcontext()
    return replaced(trainer.strategy, checkpoint_io=WholeCheckpoints())


def is_whole(path: str | Path) -> bool:
    """Whether a checkpoint is complete, judged by the checksums that ``torch.save`` wrote."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except Exception:  # a damaged archive fails in any way
        return False


def check_whole(path: str | Path) -> None:
    """Raise if a checkpoint is torn; the message names the newest complete one in its folder.

    Raises:
        MisconfigurationException: If it is torn.
    """
    if is_whole(path) or _is_of_old_format(path):
        return
    others = [each for each in Path(path).parent.glob("*.ckpt") if each.is_file() and each.name != Path(path).name]
    others.sort(key=lambda each: each.stat().st_mtime, reverse=True)
    whole = next(filter(is_whole, others), None)
    way_out = "there is no complete one next to it, so begin a new run"
    if whole is not None:
        way_out = f"the newest complete one next to it is {whole}: resume with ckpt_path={str(whole)!r}"
    raise MisconfigurationException(
        f"{path} is torn: its {Path(path).stat().st_size} bytes are incomplete, as after a run that was killed while"
        f" it saved; {way_out}."
    )


def _is_of_old_format(path: str | Path) -> bool:
    """Whether a file was written by ``torch.save`` without a zip archive, which has no checksums."""
    with Path(path).open("rb") as file:
        return file.read(2) == b"\x80\x02"


def local_path(path: str | Path) -> Path | None:
    """The path on this machine, with ``~`` and ``file://`` resolved as loggers do; ``None`` for any other URL."""
    text = os.path.expanduser(str(path).removeprefix("file://"))
    return None if "://" in text else Path(text)
