"""Names that a recipe misspells are told with the most similar ones."""

import pytest

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
    'Parser key "federated": no class is known as FedMud': "FedMUD",
    "no class is known as ModelCheckpointt": "ModelCheckpoint",
    "module 'torch.optim' has no attribute 'SDG'": "SGD",
    "Subcommand 'fit' does not accept option 'modle.class_path'": "model",
    "Subcommand 'fit' does not accept option 'trainer.max_epohcs'": "max_epochs",
    "Subcommand 'validate' does not accept option 'seeds'": None,
    "no class is known as Qqqqqq": None,
    FEDERATED + "Option 'zzz' is not accepted": None,
}


@pytest.mark.parametrize(
    ("section", "given", "option"),
    [
        ("federated", "FedAvg", "--federated.algorithm FedAvg"),
        ("federated", "lightning_lowrank.FedMUD", "--federated.algorithm FedMUD"),
        ("lowrank", "BlockKronecker", "--lowrank.factorization BlockKronecker"),
        ("lowrank", "FedAvg", ""),
    ],
)
def test_a_class_in_place_of_its_section_is_told_its_option(section, given, option):
    message = f'Parser key "{section}": no class is known as {given}'
    said = with_suggestions(message)
    assert said == message if not option else said.endswith(option)


@pytest.mark.parametrize("message", CASES)
def test_the_most_similar_name_is_told(message):
    said = with_suggestions(message)
    if CASES[message] is None:
        assert said == message
    else:
        assert said.count("did you mean") == 1
        assert f"(did you mean '{CASES[message]}'?)" in said
