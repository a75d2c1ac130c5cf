"""``lightning-lowrank --help``: the list of commands.

The text is that of LightningCLI's parser, without the seconds that it takes to import Lightning.
"""

from __future__ import annotations

from typing import NoReturn

from jsonargparse import ActionConfigFile, ArgumentParser

_DESCRIPTION = "Lightning Trainer command line tool"
_CONFIG = "Path to a configuration file in json or yaml format."
SUBCOMMANDS = {
    "fit": "Runs the full optimization routine.",
    "validate": "Perform one evaluation epoch over the validation set.",
    "test": "Perform one evaluation epoch over the test set. It's separated from fit to make sure you never run"
    " on your",
    "predict": "Run inference on your data. This will call the model forward function to compute predictions."
    " Useful to",
    "inspect": "Print what a run would cost and whether the module would work; data is not read.",
}
"""Beginnings of the docstrings of the trainer's methods, as LightningCLI shows them."""


def print_overview(epilog: str) -> NoReturn:
    """Print the help of ``lightning-lowrank`` and end with status 0.

    Args:
        epilog: Text below the list of subcommands.
    """
    parser = ArgumentParser(prog="lightning-lowrank", description=_DESCRIPTION, epilog=epilog)
    parser.add_argument("-c", "--config", action=ActionConfigFile, help=_CONFIG)
    commands = parser.add_subcommands()
    for name, summary in SUBCOMMANDS.items():
        commands.add_subcommand(name, ArgumentParser(), help=summary)
    parser.print_help()
    parser.exit()
