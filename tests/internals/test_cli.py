"""Lightning's command line has the private methods that `SubcommandCLI` overrides, and jsonargparse its own."""

import collections.abc
import inspect
import json
import typing

import jsonargparse
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_lowrank
from lightning_lowrank.internals.cli import (
    SubcommandCLI,
    begin_other_classes_anew,
    finds_checkpoint,
    read_counts_as_counts,
    replace_lists_whole,
    write_names_as_names,
)
from tests.helpers import trainer


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


@pytest.mark.slow
def test_every_method_is_called():
    done = Telling(BoringModel, args=["fit", "--more=3"])
    assert done.told[-2:] == ["optimizers", "fit with more=3"]
    assert "more: 3" in done.parser_of("fit").dump(done.config["fit"])


ALL = ["arguments of fit", "arguments of validate", "arguments of test", "arguments of predict"]
ONE = {"subcommand": "fit", "fit": {"more": 3}}


@pytest.mark.parametrize(
    ("args", "keywords", "expected"),
    [
        (["fit", "--more=3"], {}, ALL[:1]),
        (None, {}, ALL[:1]),
        # These may say something of any subcommand.
        (ONE, {}, ALL),
        (["fit", "--more=3"], {"default_config_files": ["*.defaults"]}, ALL),
    ],
)
@pytest.mark.slow
def test_the_subcommand_that_is_run_alone_gets_arguments(monkeypatch, args, keywords, expected):
    monkeypatch.setattr("sys.argv", ["program"] if args is not None else ["program", "fit", "--more", "3"])
    done = Telling(BoringModel, args=args, parser_kwargs=keywords)
    assert [told for told in done.told if told in ALL] == expected
    assert done.told[-1] == "fit with more=3"


@pytest.mark.slow
def test_the_help_names_all_subcommands(capsys):
    for word in ("--help", "--no_such_option"):
        with pytest.raises(SystemExit):
            Telling(BoringModel, args=[word])
        said = capsys.readouterr()
        assert "{fit,validate,test,predict}" in said.out + said.err


@pytest.mark.parametrize("name", ["_parse_ckpt_path", "_prepare_subcommand_parser", "_run_subcommand"])
def test_another_command_line_is_refused(monkeypatch, name):
    monkeypatch.delattr(LightningCLI, name)
    with pytest.raises(MisconfigurationException, match=rf"has no {name}.*lightning 2\.6"):
        Telling(BoringModel, args=["fit"])


class Scaled(BoringModel):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()


@pytest.mark.parametrize(("subcommand", "scale"), [("fit", 3.0), ("test", 2.0)])
@pytest.mark.slow
def test_a_checkpoints_hyperparameters_are_for_evaluations_alone(tmp_path, recwarn, subcommand, scale):
    torch.save({"hyper_parameters": {"scale": 2.0}}, tmp_path / "a.ckpt")
    done = Telling(Scaled, args=[subcommand, "--model.scale=3", f"--ckpt_path={tmp_path / 'a.ckpt'}"])
    assert done.config[subcommand].model.scale == scale
    told = [str(each.message) for each in recwarn if "model.scale=2.0" in str(each.message)]
    assert [subcommand in each and "a.ckpt" in each for each in told] == ([] if subcommand == "fit" else [True])


@pytest.mark.parametrize("name", ["best", "last", "hpc"])
def test_whether_a_named_checkpoint_is_found(tmp_path, recwarn, name):
    kept = ModelCheckpoint(tmp_path)
    run = trainer(tmp_path, kept)
    assert not finds_checkpoint(run, "test", name)
    assert not recwarn
    for file in ("last.ckpt", "hpc_ckpt_1.ckpt"):
        (tmp_path / file).touch()
    kept.best_model_path = str(tmp_path / "last.ckpt")
    assert finds_checkpoint(run, "test", name)
    run._checkpoint_connector = None
    assert finds_checkpoint(run, "test", name)


class Counting:
    def __init__(self, own: int | float | None = None, cached: typing.Any = None, text: float | str = 0.5) -> None:
        self.values = own, cached, text


@pytest.mark.parametrize("words", [["10", "1", "3"], ["0.5", "1.0", "3.0"], ["null", "null", "one"]])
def test_a_count_is_read_as_a_count_whatever_union_was_made_first(monkeypatch, words):
    assert jsonargparse._typehints.sort_subtypes_for_union, "jsonargparse sorts the types of unions elsewhere"
    for forget in typing._cleanups:
        forget()
    # A library does the first before Lightning is imported, Lightning the second, and jsonargparse the third.
    first = typing.Optional[typing.Union[float, int]]  # noqa: UP007, UP045
    same = typing.Optional[typing.Union[int, float]]  # noqa: UP007, UP045
    typing.Optional[same]  # noqa: UP045
    assert typing.get_args(first) == (float, int, type(None))
    monkeypatch.setitem(Counting.__init__.__annotations__, "cached", same)
    read_counts_as_counts()
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Counting, "one")
    parser.add_argument("--other", type=Counting)
    names = [f"--one.{name}={word}" for name, word in zip(("own", "cached", "text"), words, strict=True)]
    others = [name.replace("--one", "--other") for name in names]
    config = parser.parse_args([*names, "--other", "Counting", *others])
    expected = {"10": (10, 1, 3.0), "0.5": (0.5, 1.0, 3.0), "null": (None, None, "one")}[words[0]]
    again = parser.parse_string(parser.dump(config))
    for each in (config, again):
        built = parser.instantiate(each)
        for values in (built.one.values, built.other.values):
            assert [(type(value), value) for value in values] == [(type(value), value) for value in expected]


def own_function(given):
    return given


FUNCTION_OR = {
    "availability": ["[0.5, 1.0]"],
    "client_settings": ["{1: {a: 2}}"],
    "key": ["site", "data.site"],
    "ranks": ["[1, 2]", "{1: 2}"],
    "weighting": ["samples"],
}


def arguments_that_take_functions():
    """Yield the name and the types of each argument that takes a function or something else."""
    for name in lightning_lowrank.__all__:
        made = getattr(lightning_lowrank, name)
        hints = typing.get_type_hints(made.__init__) if inspect.isclass(made) else {}
        for argument, hint in hints.items():
            kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
            if len(kinds) > 1 and collections.abc.Callable in map(typing.get_origin, kinds):
                yield pytest.param(argument, hint, id=f"{name}.{argument}")


@pytest.mark.parametrize(("argument", "hint"), [*arguments_that_take_functions()])
def test_a_printed_configuration_has_what_was_given_in_place_of_a_function(argument, hint, capsys):
    assert jsonargparse._typehints.serialize_as_import_path, "jsonargparse writes functions elsewhere"
    write_names_as_names()
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action=jsonargparse.ActionConfigFile)
    parser.add_argument(f"--{argument}", type=hint)
    for word in (*FUNCTION_OR[argument], f"{__name__}.own_function"):
        given = [f"--{argument}={word}"]
        with pytest.raises(SystemExit):
            parser.parse_args([*given, "--print_config"])
        printed = capsys.readouterr().out
        assert "Unable" not in printed
        values = [parsed[argument] for parsed in (parser.parse_args(given), parser.parse_string(printed))]
        assert values[0] == values[1]
        assert callable(values[0]) == word.endswith("own_function")


class Part:
    def __init__(self, size: int = 0, mode: str = "min") -> None:
        self.size, self.mode = size, mode


class OtherPart:
    def __init__(self, mode: str = "max") -> None:
        self.mode = mode


class Whole:
    def __init__(self, parts: typing.Sequence[Part | OtherPart] = ()) -> None:
        self.parts = parts


def spec(kind, **arguments):
    return {"class_path": f"{__name__}.{kind.__name__}", "init_args": arguments}


@pytest.mark.parametrize("in_file", [True, False])
def test_a_list_takes_the_place_of_the_one_before(tmp_path, in_file):
    replace_lists_whole()
    assert jsonargparse._typehints.adapt_typehints.__wrapped__, "jsonargparse adapts types elsewhere"
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--config", action=jsonargparse.ActionConfigFile)
    parser.add_class_arguments(Whole, "whole")
    files = []
    for number, parts in enumerate(
        ([spec(Part, size=3, mode="last"), spec(Part, size=4)], [spec(OtherPart), spec(Part, mode="any")])
    ):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps({"whole": {"parts": parts}}))
    second = [f"--config={files[1]}"] if in_file else [f"--whole.parts={json.dumps(parts)}"]
    made = parser.instantiate_classes(parser.parse_args([f"--config={files[0]}", *second])).whole.parts
    assert [vars(part) for part in made] == [{"mode": "max"}, {"size": 0, "mode": "any"}]
    for more in (spec(OtherPart), [spec(OtherPart)]):
        added = parser.parse_args([f"--config={files[0]}", f"--whole.parts+={json.dumps(more)}"])
        assert len(added.whole.parts) == 3
        assert added.whole.parts[0].init_args.size == 3
    changed = parser.parse_args([f"--config={files[0]}", "--whole.parts.size=9"])
    assert [part.init_args.size for part in changed.whole.parts] == [3, 9]


SamePart = Part


class Holder:
    def __init__(self, part: Part | OtherPart | None = None, logger: Logger | None = None) -> None:
        self.part, self.logger = part, logger


def path(name):
    return f"{__name__}.{name}"


FIRST = spec(Part, size=3, mode="any")
LOGGER = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "a", "name": "b"}}


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize(
    ("name", "first", "second", "expected"),
    [
        ("part", FIRST, spec(OtherPart), {"mode": "max"}),
        ("part", FIRST, path("OtherPart"), {"mode": "max"}),
        ("part", FIRST, spec(Part, size=4), {"size": 4, "mode": "any"}),
        ("part", FIRST, {"init_args": {"size": 4}}, {"size": 4, "mode": "any"}),
        ("part", FIRST, path("SamePart"), {"size": 3, "mode": "any"}),
        ("part", FIRST, None, None),
        ("logger", LOGGER, "lightning.pytorch.loggers.TensorBoardLogger", {"save_dir": "a", "name": "b"}),
    ],
)
def test_another_class_has_none_of_the_arguments_before(tmp_path, in_file, name, first, second, expected):
    begin_other_classes_anew()
    discard = jsonargparse._typehints.discard_init_args_on_class_path_change
    assert discard.__wrapped__, "jsonargparse drops arguments elsewhere"
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action=jsonargparse.ActionConfigFile)
    parser.add_argument("--holder", type=Holder)
    files = [tmp_path / "0.json", tmp_path / "1.json"]
    for file, given in zip(files, (first, second), strict=True):
        holder = {"class_path": path("Holder"), "init_args": {name: given}}
        file.write_text(json.dumps({"holder": holder}))
    word = second if isinstance(second, str) else json.dumps(second)
    later = f"--config={files[1]}" if in_file else f"--holder.{name}={word}"
    found = parser.parse_args([f"--config={files[0]}", later]).holder.init_args[name]
    assert (found and {key: found.init_args[key] for key in expected}) == expected
