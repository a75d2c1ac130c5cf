"""Lightning's command line has the private methods that `SubcommandCLI` overrides."""

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.internals.cli import SubcommandCLI


class Telling(SubcommandCLI):
    told: list[str]

    def __init__(self, *arguments, **keywords):
        self.told = []
        super().__init__(*arguments, **keywords)

    def add_arguments_of_subcommand(self, parser, subcommand):
        parser.add_argument("--more", type=int, default=1)
        self.told.append(f"arguments of {subcommand}")
        return []

    def install_optimizers(self):
        self.told.append("optimizers")

    def run_subcommand(self, subcommand):
        self.told.append(f"{subcommand} with more={self.config[subcommand].more}")


def test_every_method_is_called():
    done = Telling(BoringModel, args=["fit", "--more=3"])
    assert done.told[-2:] == ["optimizers", "fit with more=3"]
    assert "arguments of fit" in done.told
    assert "more: 3" in done.parser_of("fit").dump(done.config["fit"])


@pytest.mark.parametrize("name", ["_prepare_subcommand_parser", "_run_subcommand"])
def test_another_command_line_is_refused(monkeypatch, name):
    monkeypatch.delattr(LightningCLI, name)
    with pytest.raises(MisconfigurationException, match=rf"has no {name}.*lightning 2\.6"):
        Telling(BoringModel, args=["fit"])
