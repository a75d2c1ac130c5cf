import json
from functools import partial

import pytest
import torch
import torchvision
from torch import nn

from lightning_lowrank.cli import main
from lightning_lowrank.models import Classifier, Network, ResNet18, ResNet34

REFERENCE = {ResNet18: torchvision.models.resnet18, ResNet34: torchvision.models.resnet34}


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (partial(ResNet18, num_classes=10), 11_173_962),
        (partial(ResNet34, num_classes=100), 21_328_292),
        (partial(ResNet34, num_classes=200, image_size=64), 21_379_592),
    ],
)
def test_parameter_counts_are_those_fedhm_counts_from(make, parameters):
    with torch.device("meta"):
        network = make()
    assert isinstance(network, Network)
    assert count(network) == parameters


@pytest.mark.parametrize("network_class", REFERENCE)
def test_parameters_are_torchvisions_but_for_the_stem(network_class):
    with torch.device("meta"):
        ours = {name: tuple(value.shape) for name, value in network_class(num_classes=7).state_dict().items()}
        reference = REFERENCE[network_class](num_classes=7).state_dict()
    theirs = {name: tuple(value.shape) for name, value in reference.items()}
    assert theirs.pop("conv1.weight") == (64, 3, 7, 7)
    assert ours.pop("conv1.weight") == (64, 3, 3, 3)
    assert list(ours.items()) == list(theirs.items())


@pytest.mark.slow
@pytest.mark.parametrize("network_class", REFERENCE)
@pytest.mark.nightly
def test_forward_is_torchvisions_without_max_pooling_behind_the_same_stem(network_class):
    torch.manual_seed(0)
    ours = network_class(in_channels=2, num_classes=5, image_size=16).double()
    reference = REFERENCE[network_class](num_classes=5).double()
    reference.conv1 = nn.Conv2d(2, 64, 3, padding=1, bias=False, dtype=torch.double)
    reference.maxpool = nn.Identity()
    reference.load_state_dict(ours.state_dict())
    images = torch.randn(2, *ours.example_input_shape, dtype=torch.double)
    torch.testing.assert_close(ours(images), reference(images))


@pytest.mark.parametrize("network_class", REFERENCE)
@pytest.mark.parametrize("width", [4, 5])
def test_sizes_of_the_feature_maps(network_class, width):
    network = network_class(in_channels=1, num_classes=3, width=width, image_size=18)
    sizes = {}
    for name in ("conv1", "layer1", "layer2", "layer3", "layer4", "avgpool", "fc"):
        network.get_submodule(name).register_forward_hook(
            lambda module, inputs, output, name=name: sizes.update({name: tuple(output.shape)})
        )
    for batch in (2, 5):
        assert network(torch.randn(batch, *network.example_input_shape)).shape == (batch, network.num_classes)
        assert sizes == {
            "conv1": (batch, width, 18, 18),
            "layer1": (batch, width, 18, 18),
            "layer2": (batch, 2 * width, 9, 9),
            "layer3": (batch, 4 * width, 5, 5),
            "layer4": (batch, 8 * width, 3, 3),
            "avgpool": (batch, 8 * width, 1, 1),
            "fc": (batch, 3),
        }
    assert network(torch.randn(2, 1, 7, 30)).shape == (2, 3)


def test_convolutions_have_no_bias_and_start_as_torchvisions():
    torch.manual_seed(0)
    network = ResNet18(width=16)
    convolutions = [module for module in network.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 20
    for module in convolutions:
        assert module.bias is None
        samples = module.weight.numel()
        std = (2 / (module.out_channels * module.kernel_size[0] ** 2)) ** 0.5
        assert module.weight.detach().std() == pytest.approx(std, rel=5 / (2 * samples) ** 0.5)


@pytest.mark.parametrize("argument", ["in_channels", "num_classes", "width", "image_size"])
def test_arguments_must_be_positive(argument):
    with pytest.raises(ValueError, match=f"{argument}.* must be at least 1, but is 0"):
        ResNet18(**{argument: 0})


def test_classifier_takes_sizes_from_the_network():
    model = Classifier(ResNet18(num_classes=4, width=2, image_size=8))
    assert model.num_classes == 4
    assert model.example_input_array.shape == (1, 3, 8, 8)


@pytest.mark.slow
@pytest.mark.parametrize("network_class", REFERENCE)
def test_short_class_name_on_the_command_line(network_class, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    network = ["--model.network", network_class.__name__, "--model.network.width", "2"]
    main(["inspect", "--model", "Classifier", *network, "--trainer.logger", "false", "--json"])
    layers = [layer["name"] for layer in json.loads(capsys.readouterr().out)["layers"]]
    expected = [
        f"network.{name}"
        for name, module in network_class(width=2).named_modules()
        if isinstance(module, (nn.Conv2d, nn.Linear))
    ]
    assert layers == expected
