"""The settings: declared once, refused where they are given, and visible to the command line."""

import dataclasses
import inspect
import re

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import LowRank, MatrixProduct
from lightning_lowrank.layers import LayerSettings, LowRankLinear, LowRankSettings, convert


def test_settings_are_refused_where_the_callback_is_made():
    with pytest.raises(MisconfigurationException, match="LowRank: exactly one of rank"):
        LowRank(MatrixProduct())
    with pytest.raises(MisconfigurationException, match=r"LowRank.*decouple=True.*half_frozen=True"):
        LowRank(MatrixProduct(), rank=1, decouple=True, half_frozen=True)


def test_an_unknown_setting_is_refused_by_name():
    with pytest.raises(TypeError, match="rnak"):
        convert(nn.Sequential(nn.Linear(4, 4)), MatrixProduct(), rnak=1)
    with pytest.raises(TypeError, match="include"):
        LowRankLinear.from_dense(nn.Linear(4, 4), MatrixProduct(), 1, include=["0"])
    with pytest.raises(MisconfigurationException, match="rnak"):
        LowRank(MatrixProduct(), rnak=1)


def test_lists_and_tuples_of_patterns_are_the_same_settings():
    lists = LowRankSettings(MatrixProduct(), rank=1, skip=["first"], include=["fc*"])
    assert lists == LowRankSettings(MatrixProduct(), rank=1, skip=("first",), include=("fc*",))
    assert lists != LowRankSettings(MatrixProduct(), rank=1, skip=["first"])


@pytest.mark.slow
def test_the_command_line_knows_each_setting_with_its_type_default_and_text():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(LowRank, "lowrank")
    arguments = {action.dest.removeprefix("lowrank."): action for action in parser._actions}
    for field in dataclasses.fields(LowRankSettings):
        assert arguments[field.name].help, field.name
        if field.default is not dataclasses.MISSING:
            assert parser.get_defaults()[f"lowrank.{field.name}"] == field.default
    base = ["--lowrank.factorization=MatrixProduct"]
    parsed = parser.parse_args([*base, "--lowrank.rank={fc: 2}", "--lowrank.skip=[first]", "--lowrank.half_frozen=V"])
    assert (parsed.lowrank.rank, parsed.lowrank.skip, parsed.lowrank.half_frozen) == ({"fc": 2}, ["first"], "V")
    assert parser.instantiate(parsed).lowrank.settings.rank == {"fc": 2}
    for wrong in ("--lowrank.role=both", "--lowrank.rank=2.5", "--lowrank.skip=[middle]", "--lowrank.unknown=1"):
        with pytest.raises(Exception, match=wrong.split("=")[0].removeprefix("--")):
            parser.parse_args([*base, wrong])


def test_every_setting_is_documented_where_it_is_declared():
    for kind in (LayerSettings, LowRankSettings):
        described = inspect.cleandoc(kind.__doc__).split("Args:")[1].split("Raises:")[0]
        assert re.findall(r"^ {4}(\w+):", described, re.MULTILINE) == list(vars(kind)["__annotations__"])
