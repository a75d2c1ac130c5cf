"""The commands of ``lightning-lowrank``, one function each, which parses the command's arguments.

``fit --seeds 0 1 2`` makes one run for each seed. ``export``, ``flower``, ``push``, ``recipes`` and
``report`` need no model section.

Each function imports what its command uses, after it has parsed the arguments: Lightning takes seconds to import, torch
a second or two, and matplotlib half a second.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lightning_lowrank.pytorch_lightning_alias import alias_pytorch_lightning

if TYPE_CHECKING:
    from lightning.pytorch.cli import ArgsType

_HELP = (["-h"], ["--help"])
_FLOWER = "lightning_lowrank.flower"
"""The bridge imports `lightning_lowrank.cli.parser`, and needs Flower, so it is imported by name when it is used."""


def main(args: ArgsType = None) -> None:
    """Run ``lightning-lowrank``.

    Args:
        args: Command line, without the program's name; ``sys.argv`` by default.
    """
    words = sys.argv[1:] if args is None else args
    command = words[0] if isinstance(words, list) and words else None
    try:
        if args is None:
            # Only in the command's own process, because this changes sys.modules.
            alias_pytorch_lightning()
        if isinstance(words, list) and command in _WITHOUT_MODEL:
            run, summary = _WITHOUT_MODEL[command]
            run(_Parser(prog=f"lightning-lowrank {command}", description=summary), words[1:])
        elif words in _HELP:
            from lightning_lowrank.cli.overview import print_overview

            print_overview(_epilog())
        elif isinstance(words, list) and (command is None or not _is_known(command)):
            _end_without_command(command)
        else:
            for seed in _run(args)[1:]:
                _run(args, seed)
    except Exception as error:
        from lightning.pytorch.utilities.exceptions import MisconfigurationException

        from lightning_lowrank.federated.safe_files import of_full_disk

        if not isinstance(error, MisconfigurationException) and of_full_disk(error) is None:
            raise
        from lightning_lowrank.arguments import printable

        sys.exit(f"lightning-lowrank: {printable(' '.join(str(error).splitlines()))}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        from lightning_lowrank.arguments import printable

        super().error(printable(message))


def _is_known(command: str) -> bool:
    """Whether a word is a subcommand or option of LightningCLI's parser."""
    from lightning_lowrank.cli.overview import SUBCOMMANDS

    return command in SUBCOMMANDS or command.startswith("-")


def _end_without_command(command: str | None) -> NoReturn:
    """Exit with a message that lists all commands, because LightningCLI's parser knows only its own."""
    from lightning_lowrank.cli.overview import SUBCOMMANDS

    names = [*SUBCOMMANDS, *_WITHOUT_MODEL]
    similar = difflib.get_close_matches(command or "", names, 1)
    meant = f" Did you mean {similar[0]!r}?" if similar else ""
    problem = "no command is given." if command is None else f"there is no command {command!r}.{meant}"
    print(f"lightning-lowrank: {problem} The commands are {', '.join(names)}; --help says more.", file=sys.stderr)
    sys.exit(2)


def _epilog() -> str:
    others = " ".join(f"{name}: {summary}" for name, (_, summary) in _WITHOUT_MODEL.items())
    return f"Commands that need no model section: {others}"


def _run(args: ArgsType, seed: int | None = None) -> list[int]:
    """Run one of LightningCLI's subcommands once; return the seeds of all requested runs."""
    from lightning.pytorch.utilities import rank_zero_info

    from lightning_lowrank.cli.lightning_messages import without_tips
    from lightning_lowrank.cli.parser import CLI_SETTINGS, LowRankCLI

    parser_kwargs = {**CLI_SETTINGS["parser_kwargs"], "epilog": _epilog()}
    with without_tips():
        done = LowRankCLI(**{**CLI_SETTINGS, "parser_kwargs": parser_kwargs}, args=args, seed=seed)
    if done.subcommand != "fit":
        return []
    for logger in done.trainer.loggers if done.seeds else []:
        folder = getattr(logger, "log_dir", None)
        if isinstance(folder, str):
            rank_zero_info(f"seed {done.seed}: {folder}")
    return done.seeds


def _path(text: str) -> Path:
    # The shell leaves the ~ of --option=~/folder as it is.
    return Path(text).expanduser()


def _export(parser: argparse.ArgumentParser, words: list[str]) -> None:
    parser.add_argument("checkpoint", type=_path, help="a .ckpt file of a run, with or without LowRank")
    parser.add_argument("output", type=_path, help="the .safetensors file to write, or the adapter's folder")
    parser.add_argument(
        "--format",
        choices=("safetensors", "peft"),
        default="safetensors",
        help="dense weights, or a folder that PEFT's PeftModel.from_pretrained loads",
    )
    parser.add_argument(
        "--prefix",
        default=None,
        help="export this attribute alone, with names relative to it: `network`; for PEFT by default the attribute"
        " that holds all low-rank layers",
    )
    parser.add_argument("--client", default=None, help="name or id of a client whose own model is exported")
    parser.add_argument(
        "--config",
        action="append",
        help="the run's config.yaml, or its recipe's path or name, which builds the module that the run began with: for"
        " adapters of runs that changed frozen weights or that PEFT wrapped, and for weights that TrainedCheckpoints"
        " leaves out",
    )
    options = parser.parse_args(words)
    import torch
    from safetensors.torch import save_file

    from lightning_lowrank.arguments import join_names
    from lightning_lowrank.configuration import misconfigured
    from lightning_lowrank.extras import import_extra
    from lightning_lowrank.files import replacing
    from lightning_lowrank.interop.checkpoints import adapter_checkpoint, check_is_file, dense_checkpoint, writable

    check_is_file(options.checkpoint)
    if options.format == "peft":
        import_extra("peft", "--format peft")
    module = None
    if options.config:
        from lightning_lowrank.cli.lightning_messages import without_tips
        from lightning_lowrank.cli.parser import build_module

        with without_tips():
            module = build_module(options.config)
    if options.format == "peft":
        adapter_checkpoint(options.checkpoint, options.output, options.client, options.prefix, module)
        print(f"wrote {options.output}: PeftModel.from_pretrained(base_model, {str(options.output)!r}) loads it")
        return
    found = dense_checkpoint(options.checkpoint, options.client, module)
    prefix = f"{options.prefix.removesuffix('.')}." if options.prefix else ""
    weights = writable(
        {
            name.removeprefix(prefix): value
            for name, value in found.items()
            if name.startswith(prefix) and isinstance(value, torch.Tensor)
        }
    )
    if not weights:
        names = sorted(name for name, value in found.items() if isinstance(value, torch.Tensor))
        raise misconfigured(f"no tensor's name begins with --prefix {options.prefix!r}: they are {join_names(names)}.")
    if options.output.exists() and options.output.samefile(options.checkpoint):
        raise misconfigured(f"{options.output} is the checkpoint itself: give another path to write to.")
    with replacing(options.output) as part:
        save_file(weights, part)
    numbers = sum(value.numel() for value in weights.values())
    print(f"wrote {len(weights)} tensors, {numbers:,} numbers: {options.output}")
    objects = [name for name, value in found.items() if name.startswith(prefix) and not isinstance(value, torch.Tensor)]
    if objects:
        print(f"left out, because a .safetensors file holds tensors alone: {join_names(objects)}")


def _push(parser: argparse.ArgumentParser, words: list[str]) -> None:
    parser.add_argument("adapter", type=_path, help="an adapter folder, as `export --format peft` writes it")
    parser.add_argument("repository", help="its name on the Hugging Face hub: USER/NAME; made if needed")
    parser.add_argument("--run", type=_path, default=None, help="the run's folder, whose figures the model card shows")
    parser.add_argument("--private", action="store_true", default=None, help="make a private repository")
    parser.add_argument("--revision", default=None, help="the branch to commit to")
    parser.add_argument("--endpoint", default=None, help="the server's address, if it is not the hub's")
    options = parser.parse_args(words)
    from lightning_lowrank.cli.runs import find_runs, run_figures
    from lightning_lowrank.configuration import misconfigured
    from lightning_lowrank.interop.hub import push_adapter

    figures = {}
    if options.run is not None:
        runs = find_runs([options.run])
        if len(runs) != 1:
            raise misconfigured(f"{options.run} holds {len(runs)} runs: give the folder of one.")
        figures = run_figures(runs[0])
    print(
        push_adapter(
            options.adapter,
            options.repository,
            figures=figures,
            private=options.private,
            revision=options.revision,
            endpoint=options.endpoint,
        )
    )


def _report(parser: argparse.ArgumentParser, words: list[str]) -> None:
    parser.add_argument("runs", type=_path, nargs="+", help="run folders, or folders that hold some")
    parser.add_argument("--metric", default=None, help="logged metric to compare; by default val_acc or the like")
    parser.add_argument(
        "--output", type=_path, default=Path("report"), help="folder for the page, the tables and the plots"
    )
    parser.add_argument(
        "--target", type=float, default=None, help="value of the metric: show rounds and bytes until it is reached"
    )
    parser.add_argument(
        "--budget", default=None, help="bytes up and down, such as 100MB: show the best value reached within them"
    )
    parser.add_argument("--rounds", type=int, default=None, help="compare only so many first rounds of each run")
    parser.add_argument(
        "--each",
        action="store_true",
        help="show runs that differ only in their seed one by one, not as mean ± deviation",
    )
    options = parser.parse_args(words)
    from rich.console import Console

    from lightning_lowrank.cli.report import parse_bytes, report

    report(
        options.runs,
        metric=options.metric,
        output=options.output,
        each=options.each,
        target=options.target,
        budget=None if options.budget is None else parse_bytes(options.budget),
        rounds=options.rounds,
        console=Console(),
    )


def _of_bridge(name: str) -> Any:
    """A function of the Flower bridge by name; raises if Flower is not installed."""
    from lightning_lowrank.configuration import misconfigured

    try:
        return getattr(import_module(_FLOWER), name)
    except ImportError as error:
        raise misconfigured(str(error)) from error


def _resolve(parser: argparse.ArgumentParser, words: list[str]) -> None:
    parser.add_argument("recipes", nargs="+", help="a recipe's path or name; a later one changes an earlier one")
    parser.add_argument("--output", type=_path, default=Path("resolved.yaml"), help="the file to write")
    options = parser.parse_args(words)
    from lightning_lowrank.cli.recipes import find
    from lightning_lowrank.files import replacing

    text, _ = _of_bridge("resolve")([Path(find(each)) for each in options.recipes])
    with replacing(options.output) as part:
        part.write_text(text, encoding="utf-8")
    print(f"wrote {options.output}: each site approves it by `lightning-lowrank flower approve {options.output}`")


def _approve(parser: argparse.ArgumentParser, words: list[str]) -> None:
    parser.add_argument("recipe", type=_path, help="a file that `flower resolve` or `flower` has written")
    parser.add_argument(
        "--policy", type=_path, required=True, help="the site's policy; the folder `approved` is made next to it"
    )
    parser.add_argument("--client", type=int, default=0, help="the site's partition-id")
    parser.add_argument("--state-dir", type=_path, default=None, help="the folder given to the SuperNode as state-dir")
    parser.add_argument("--new-account", action="store_true", help="the samples are others than in all earlier studies")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    options = parser.parse_args(words)
    from lightning_lowrank.configuration import misconfigured

    approval = import_module(f"{_FLOWER}.approval")
    for file in (options.recipe, options.policy):
        if not file.is_file():
            raise misconfigured(f"{file}: there is no such file.")
    data = options.recipe.read_bytes()
    content = approval.read_plain(data, str(options.recipe))
    approval.check_reads_nothing(content)
    print(*approval.sentences(content), sep="\n")
    try:
        yes = options.yes or input("Approve? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        raise misconfigured(
            "nothing was approved, because no answer can be read from standard input: give --yes to approve without a"
            " question."
        ) from None
    if not yes:
        raise misconfigured("nothing was approved.")
    approvals = approval.Approvals(options.policy.parent / "approved")
    folder = approval.state_folder({} if options.state_dir is None else {"state-dir": options.state_dir})
    approvals.begin_account(folder / f"privacy_client_{options.client}.json", options.new_account)
    print(f"approved: {approvals.keep(data)}")


def _flower(parser: argparse.ArgumentParser, words: list[str]) -> None:
    step = {"resolve": _resolve, "approve": _approve}.get(words[0] if words else "")
    if step is not None:
        step(_Parser(prog=f"{parser.prog} {words[0]}"), words[1:])
        return
    parser.epilog = (
        "`flower resolve RECIPE` writes only the file that sites approve; `flower approve FILE --policy POLICY` shows"
        " it at a site, and keeps it."
    )
    parser.add_argument(
        "--config",
        action="append",
        required=True,
        help="a recipe's path or name; a later one changes an earlier one",
    )
    parser.add_argument("output", type=_path, help="the folder to write")
    options = parser.parse_args(words)
    from lightning_lowrank.cli.recipes import find

    _of_bridge("write_project")([Path(find(each)) for each in options.config], options.output)
    print(f"wrote {options.output}: start it with `flwr run {options.output}`")


def _recipes(parser: argparse.ArgumentParser, words: list[str]) -> None:
    parser.add_argument("beginning", nargs="?", default="", help="list only names that begin with this, such as fedmud")
    options = parser.parse_args(words)
    from lightning_lowrank.cli.recipes import listing

    found = listing(options.beginning)
    width = max(len(name) for name, _ in found)
    # Recipes that run alone come first.
    found.sort(key=lambda each: each[1].startswith("Overlay"))
    try:
        print("\n".join(f"{name:{width}}  {summary}".rstrip() for name, summary in found), flush=True)
    except BrokenPipeError:
        # As by `| head`. Python flushes the stream once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_WITHOUT_MODEL: dict[str, tuple[Callable[[argparse.ArgumentParser, list[str]], None], str]] = {
    "export": (
        _export,
        "Turn a checkpoint into dense weights that load into the unconverted module, or a PEFT adapter.",
    ),
    "push": (_push, "Upload an adapter folder to the Hugging Face hub, with a model card of the run's figures."),
    "report": (_report, "Compare runs: tables, and accuracy against rounds and bytes, on one page."),
    "recipes": (
        _recipes,
        "List the recipes that come with the package: `fit --config NAME` runs one, a later `--config` an overlay.",
    ),
    "flower": (
        _flower,
        "Write the Flower project of a recipe: `flwr run OUTPUT` then runs it across sites, which have approved it by"
        " `flower approve`.",
    ),
}
"""The commands that need no model section: the function of each, and a summary for the help."""
