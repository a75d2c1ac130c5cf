"""Names that a recipe misspells are told with the most similar ones."""

import pytest
from lightning.pytorch import Trainer

from lightning_lowrank import FederatedLoop, LowRank
from lightning_lowrank.cli.parser import RecipeParser
from lightning_lowrank.cli.suggestions import with_suggestions

FEDERATED = "Problem with given class_path 'lightning_lowrank.FederatedLoop': "
CASES = {
    FEDERATED + "Option 'local_epoch' is not accepted": "local_epochs",
    FEDERATED
    + "Parser key \"algorithm\": Problem with given class_path 'lightning_lowrank.FedMUD': Option 'clas_path' is not"
    " accepted": "class_path",
    FEDERATED + "Option 'init_arg.clients' is not accepted": "init_args",
    "Type Callable expects a function: Option 'momentun' is not accepted. Got value:"
    " Namespace(class_path='torch.optim.SGD')": "momentum",
    'Parser key "model": no class is known as FedMud': "FedMUD",
    "no class is known as ModelCheckpointt": "ModelCheckpoint",
    "module 'torch.optim' has no attribute 'SDG'": "SGD",
    "Subcommand 'fit' does not accept option 'modle.class_path'": "model",
    "Subcommand 'fit' does not accept option 'trainer.max_epohcs'": "max_epochs",
    "Subcommand 'validate' does not accept option 'json'": None,
    "no class is known as Qqqqqq": None,
    FEDERATED + "Option 'zzz' is not accepted": None,
}


@pytest.mark.parametrize(
    ("section", "given", "remedy"),
    [
        ("federated", "FedAvg", "--federated.algorithm FedAvg"),
        ("federated", "lightning_lowrank.FedMUD", "--federated.algorithm lightning_lowrank.FedMUD"),
        ("lowrank", "BlockKronecker", "--lowrank.factorization BlockKronecker"),
        ("lowrank", "8", "--lowrank.factorization MatrixProduct"),
    ],
)
def test_a_value_in_place_of_a_section_is_told_an_option(section, given, remedy):
    said = with_suggestions(f'Parser key "{section}": no class is known as {given}')
    assert said.startswith(section)
    assert repr(given) in said
    assert said.endswith(remedy)


class _Refused(Exception):
    """A parser's message."""


@pytest.fixture(scope="module")
def said():
    """What the parser says of words."""
    parser = RecipeParser()
    parser.add_argument("--lowrank", type=LowRank | None)
    parser.add_argument("--federated", type=FederatedLoop | None)
    parser.add_lightning_class_args(Trainer, "trainer")

    def refuse(status=0, message=None):
        raise _Refused(message)

    parser.exit = refuse

    def of(*words):
        with pytest.raises(_Refused) as error:
            parser.parse_args(list(words))
        return str(error.value).removeprefix("lightning-lowrank: ").strip()

    return of


@pytest.mark.parametrize(
    ("option", "value", "meant"),
    [
        ("federated.partition", "user", ["ByKey", "--federated.partition.key user"]),
        ("federated.partition", "users.csv", ["FromIndices", "--federated.partition.file users.csv"]),
        ("federated.partition", "data/users", ["FromIndices", "ByKey"]),
        ("federated.partition", "[[0, 1], [2]]", ["--federated.partition.indices '[[0, 1], [2]]'"]),
        ("federated.partition", "own.yaml", ["--config"]),
        ("federated.partition", "iid", ["did you mean 'IID'"]),
        ("federated.partition", "0.5", ["ByKey, Dirichlet"]),
        ("federated.partition", "FedAvg", ["federated.algorithm"]),
        ("federated.algorithm", "Krum", ["federated.aggregator"]),
        ("federated.algorithm", "DifferentialPrivacy", ["trainer.callbacks"]),
        ("federated.algorithm", "LowRank", ["section lowrank"]),
        ("federated.algorithm", "FedPara", ["Hadamard", "lowrank.factorization"]),
        ("federated.algorithm", "3", ["FedAvg"]),
        ("federated.aggregator", "median", ["'CoordinateMedian' or 'GeometricMedian'"]),
        ("federated.uplink", "TopK", ["[TopK]"]),
        ("federated.uplink", "fp16", ["[Half]"]),
        ("federated.uplink", "8", ["Half, LowRankCodec"]),
        ("federated.weighting", "Samples", ["did you mean 'samples'"]),
        ("federated.weighting", "loss", ["'uniform'", "function"]),
        ("federated.availability", "users.csv", ["a list of numbers, a dictionary"]),
        ("federated.data_on_device", "cuda", ["true or false or 'auto'"]),
        ("federated.clients_per_round", "50%", ["an integer", "a number", "null", "write 0.5"]),
        ("federated.client_dropout", "1/4", ["write 0.25"]),
        ("federated.allow_changes", "counter", ["[counter]"]),
        ("lowrank.factorization", "Tucker", ["CP, CoreProduct"]),
        ("lowrank.factorization", "kronecker", ["did you mean 'BlockKronecker'"]),
        ("lowrank.skip", "last", ["[last]"]),
        ("lowrank.rank", "eight", ["an integer, a dictionary or null"]),
        ("trainer.precision", "13", ["'32'", "'bf16-mixed'"]),
        ("trainer.precision", "bf16-mix", ["did you mean 'bf16-mixed'"]),
        ("trainer.logger", "tensorboard", ["CSVLogger", "did you mean 'TensorBoardLogger'"]),
        ("trainer.max_epochs", "ten", ["an integer or null"]),
        ("federated.algorithm", "CSVLogger", ["trainer.logger"]),
    ],
)
def test_a_wrong_value_is_told_what_the_argument_may_be(said, option, value, meant):
    message = said(f"--{option}", value)
    assert message.startswith(f"{option} must be ")
    assert f"got {value!r}" in message
    # Classes of another kind, such as Lightning's Tuner for user, are never suggested.
    assert "Tuner" not in message
    assert "FedInc" not in message
    for words in meant:
        assert words in message


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("federated.num_clients", "--federated.clients"),
        ("federated.rounds", "--trainer.max_epochs"),
        ("federated.mu", "FedProx"),
        ("federated.batch_size", "--data.batch_size"),
        ("lowrank.target_modules", "--lowrank.include"),
        ("lowrank.buget", "'budget'"),
        ("lowrank.qqqqqq", "not accepted"),
    ],
)
def test_an_unknown_argument_is_told_where_it_belongs(said, option, meant):
    message = said(f"--{option}", "1")
    assert f"Option {option.partition('.')[2]!r} is not accepted" in message
    assert meant in message


@pytest.mark.parametrize(
    ("message", "meant"),
    [("unrecognized arguments: quickstart", "--config quickstart"), ("Unexpected config: - 1", "sections")],
)
def test_what_is_no_configuration_is_told_how_one_is_given(message, meant):
    assert message in with_suggestions(message)
    assert meant in with_suggestions(message)


def test_an_import_that_fails_keeps_its_cause(said):
    assert "No module named 'nowhere'" in said("--federated.partition", "nowhere.Mine")
    assert "No module named 'nowhere'" in said("--federated.availability", "nowhere.mine")


@pytest.mark.parametrize("message", CASES)
def test_the_most_similar_name_is_told(message):
    said = with_suggestions(message)
    if CASES[message] is None:
        assert said == message
    else:
        assert said.count("did you mean") == 1
        assert f"(did you mean '{CASES[message]}'?)" in said


TABLE = "Problem with given class_path 'lightning_lowrank.data.ClientTable': Option "


def test_arguments_that_a_base_has_are_known_too():
    assert "(did you mean 'batch_size'?)" in with_suggestions(f"{TABLE}'btch_size' is not accepted")


def test_a_name_like_no_argument_is_answered_with_the_arguments():
    assert "(the arguments are train, client, target, " in with_suggestions(f"{TABLE}'path' is not accepted")


def test_a_module_in_the_current_folder_is_found_by_pythonpath(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = "Problem with given class_path 'mine.Module': No module named 'mine'"
    assert with_suggestions(message) == message
    (tmp_path / "mine.py").touch()
    assert "PYTHONPATH=." in with_suggestions(message)
