"""Private parts of LightningCLI and jsonargparse that the command line uses."""

from __future__ import annotations

import functools
import inspect
import pydoc
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jsonargparse
import lightning
import lightning.pytorch as pl
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

_NEEDED = (
    "_add_configure_optimizers_method_to_model",
    "_parse_ckpt_path",
    "_parser",
    "_prepare_subcommand_parser",
    "_run_subcommand",
)
_EVALUATIONS = ("validate", "test", "predict")


def read_counts_as_counts() -> None:
    """Patch jsonargparse to read ``clients_per_round: 10`` as a count and not as the share 10.0.

    jsonargparse tries the types of a union in order. It and Lightning make unions by `typing`, whose cache treats
    ``int | float`` and ``float | int`` as equal, and returns the one that some library has made first. So the order of
    the types says nothing, and a number without a point is read as an ``int`` wherever that is allowed. A jsonargparse
    with other private parts is left as it is.
    """

    def counts_first(as_jsonargparse: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        kinds = list(as_jsonargparse(*arguments, **keywords))
        if int in kinds and float in kinds[: kinds.index(int)]:
            kinds.remove(int)
            kinds.insert(kinds.index(float), int)
        return kinds

    _replace_in_typehints("sort_subtypes_for_union", counts_first)


def replace_lists_whole() -> None:
    """Patch jsonargparse so that a configuration's list replaces an earlier one as a whole.

    If both have the same length, jsonargparse gives each element the arguments of the earlier one at its place, even
    if that is of another class: an overlay's EarlyStopping would have the ``mode`` of the recipe's ModelCheckpoint. A
    jsonargparse with other private parts is left as it is.
    """

    def without_the_list_before(as_jsonargparse: Callable[..., Any], val: Any, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(val, list) and isinstance(keywords.get("prev_val"), list) and not keywords.get("append"):
            keywords["prev_val"] = None
        return as_jsonargparse(val, *arguments, **keywords)

    _replace_in_typehints("adapt_typehints", without_the_list_before)


def begin_other_classes_anew() -> None:
    """Patch jsonargparse so that a class has no arguments of another class that an earlier configuration names.

    jsonargparse keeps the arguments that both classes have: an overlay's FedAdam would have the ``lr`` of the recipe's
    FedAvgM. A logger keeps them, which say where a run writes. A jsonargparse with other private parts is left as it
    is.
    """

    def without_arguments(as_jsonargparse: Callable[..., Any], parser: Any, earlier: Any, later: Any) -> None:
        as_jsonargparse(parser, earlier, later)
        if not isinstance(earlier, jsonargparse.Namespace) or not earlier.get("class_path"):
            return
        paths = [earlier["class_path"], later["class_path"]]
        kinds = [pydoc.locate(path) for path in paths]
        # A short name, as in a recipe, cannot be imported.
        first, second = [path.rpartition(".")[2] for path in paths] if None in kinds else kinds
        if first != second and not all(inspect.isclass(kind) and issubclass(kind, Logger) for kind in kinds):
            earlier["init_args"] = jsonargparse.Namespace()
            earlier.pop("dict_kwargs", None)

    _replace_in_typehints("discard_init_args_on_class_path_change", without_arguments)


def write_names_as_names() -> None:
    """Patch jsonargparse to save a name as given, for arguments that also allow a function.

    jsonargparse reads ``key: writer`` as a text if no function has this name, and writes an argument that may be a
    function as an import path: it would save ``Unable to serialize instance writer``. Another order of the types would
    not help, because texts before functions would match functions' names too. A jsonargparse with other private parts
    is left as it is.
    """

    def functions_alone(as_jsonargparse: Callable[[Any], Any], val: Any) -> Any:
        if isinstance(val, str):
            raise ValueError(f"{val!r} is no function")
        return as_jsonargparse(val)

    _replace_in_typehints("serialize_as_import_path", functions_alone)


def _replace_in_typehints(name: str, replacement: Callable[..., Any]) -> None:
    """Wrap a private function of jsonargparse, once; ``replacement`` gets the original as its first argument."""
    hints = getattr(jsonargparse, "_typehints", None)
    as_jsonargparse = getattr(hints, name, None)
    if as_jsonargparse is None or hasattr(as_jsonargparse, "__wrapped__"):
        return

    @functools.wraps(as_jsonargparse)
    def replaced(*arguments: Any, **keywords: Any) -> Any:
        return replacement(as_jsonargparse, *arguments, **keywords)

    setattr(hints, name, replaced)


def finds_checkpoint(trainer: pl.Trainer, subcommand: str, name: str) -> bool:
    """Whether Lightning finds the checkpoint that a subcommand's ``ckpt_path`` names: ``best``, ``last`` or ``hpc``.

    A Lightning with other private parts is left to find it itself.
    """
    find = getattr(getattr(trainer, "_checkpoint_connector", None), "_parse_ckpt_path", None)
    if find is None:
        return True
    with warnings.catch_warnings():
        # It warns that it found none.
        warnings.simplefilter("ignore")
        try:
            return find(TrainerFn(subcommand), name, model_provided=True, model_connected=True) is not None
        except ValueError:
            return False


class SubcommandCLI(LightningCLI):
    """A LightningCLI with methods to override for a subcommand's arguments, optimizers and run.

    Lightning has no public way for any of them. If the command line begins with a subcommand, only that subcommand gets
    its arguments. Lightning adds the arguments of all, which takes longer than reading a recipe.

    Raises:
        MisconfigurationException: If Lightning's CLI has other private methods than those that are overridden here.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        missing = [name for name in _NEEDED if not hasattr(LightningCLI, name)]
        if missing:
            raise MisconfigurationException(
                f"the LightningCLI of lightning {lightning.__version__} has no {', '.join(missing)}, which the command"
                " line needs: use lightning 2.6, or build the trainer in Python."
            )
        read_counts_as_counts()
        replace_lists_whole()
        begin_other_classes_anew()
        write_names_as_names()
        self._only = self._first_word(keywords)
        super().__init__(*arguments, **keywords)

    def _first_word(self, keywords: dict[str, Any]) -> str | None:
        """The subcommand at the start of the command line; ``None`` if other subcommands' arguments may be needed."""
        words = keywords.get("args")
        words = sys.argv[1:] if words is None else words
        known = isinstance(words, list) and bool(words) and words[0] in self.subcommands()
        return words[0] if known and "default_config_files" not in (keywords.get("parser_kwargs") or {}) else None

    def add_arguments_of_subcommand(self, parser: LightningArgumentParser, subcommand: str) -> list[str]:
        """Add arguments to a subcommand's parser.

        Args:
            parser: The subcommand's parser.
            subcommand: Its name.

        Returns:
            The names of those that the trainer's method of this name is called with.
        """
        return []

    def install_optimizers(self) -> None:
        """Give the model a ``configure_optimizers`` from the configuration; by default as Lightning does."""
        super()._add_configure_optimizers_method_to_model(self.subcommand)

    def run_subcommand(self, subcommand: str) -> None:
        """Run a subcommand after everything is built; by default as Lightning does."""
        super()._run_subcommand(subcommand)

    def parser_of(self, subcommand: str) -> LightningArgumentParser:
        """A subcommand's parser."""
        return self._parser(subcommand)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        if self._only not in (None, subcommand):
            self._subcommand_method_arguments[subcommand] = []
            return self.init_parser(**kwargs)
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        self._subcommand_method_arguments[subcommand] += self.add_arguments_of_subcommand(parser, subcommand)
        return parser

    def _parse_ckpt_path(self) -> None:
        """Read a checkpoint's hyperparameters for an evaluation alone, with a warning of what they replace.

        For ``fit`` too, Lightning replaces the configuration's ``model`` section by them, so that a resumed run would
        silently lose changes.
        """
        subcommand = self.config.get("subcommand")
        if subcommand not in _EVALUATIONS:
            return
        given = dict(self.config[subcommand].model.items())
        super()._parse_ckpt_path()
        section = self.config[subcommand]
        replaced = [name for name, value in section.model.items() if given.get(name) != value]
        if replaced:
            rank_zero_warn(
                f"{subcommand} uses the values of ckpt_path={section.ckpt_path!r} in place of the configuration's for"
                f" {', '.join(f'model.{name}={section.model[name]!r}' for name in replaced)}."
            )

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        self.install_optimizers()

    def _run_subcommand(self, subcommand: str) -> None:
        self.run_subcommand(subcommand)
