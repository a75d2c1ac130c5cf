import sys
from functools import partial

import lightning as L
import pytest
import torch
import torchvision
from lightning.pytorch.cli import LightningCLI, ReduceLROnPlateau
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_lowrank.data import Digits
from lightning_lowrank.models import CNN4, CNN8, MLP, VGG8, Classifier, ConvBlock, Network


def trainer(**kwargs):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(**{"accelerator": "cpu", "enable_checkpointing": False, **quiet, **kwargs})


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def small_data(samples=50, batch_size=16):
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(samples, 1, 8, 8, generator=generator)
    targets = torch.randint(10, (samples,), generator=generator)
    return inputs, targets, DataLoader(TensorDataset(inputs, targets), batch_size)


NETWORKS = {
    "cnn4": (lambda: CNN4(), 390_880),
    "cnn4_svhn": (lambda: CNN4(in_channels=3, image_size=32), 390_880 + 2 * 32 * 9 + 10 * (1024 - 256)),
    "cnn8": (lambda: CNN8(), 4_719_328),
    "cnn8_cifar100": (lambda: CNN8(num_classes=100), 4_765_408),
    "mlp": (lambda: MLP(), 784 * 200 + 200 + 200 * 10 + 10),
    "mlp_abo": (lambda: MLP(hidden=(200, 200)), 784 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10),
    "mlp_tdpfed": (lambda: MLP(hidden=[100], bias=False), 784 * 100 + 100 * 10),
    "vgg8": (lambda: VGG8(), 27 * 32 + 9 * (32 * 64 + 64 * 128 + 128 * 256 + 256 * 256) + 2 * 256**2 + 2560 + 1258),
    "vgg8_large": (lambda: VGG8(image_size=70), 1_112_650 + 3 * 256 * 256),
    "linear": (lambda: MLP(in_features=64, hidden=(), out_features=3), 64 * 3 + 3),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_parameter_counts_and_shapes(name):
    make, parameters = NETWORKS[name]
    network = make()
    assert isinstance(network, Network)
    assert count(network) == parameters
    for batch in (2, 5):
        assert network(torch.randn(batch, *network.example_input_shape)).shape == (batch, network.num_classes)


@pytest.mark.parametrize(
    ("network", "channels", "pools_after"),
    [
        (CNN4(), [32, 64, 128, 256], [0, 1, 2, 3]),
        (CNN8(), [32, 32, 64, 64, 128, 128, 256, 256, 512, 512], [1, 3, 5, 7, 9]),
    ],
    ids=["CNN4", "CNN8"],
)
def test_layers_are_those_of_the_paper(network, channels, pools_after):
    convolutions = [module for module in network.modules() if isinstance(module, nn.Conv2d)]
    assert [module.out_channels for module in convolutions] == channels
    for module in convolutions:
        assert (module.kernel_size, module.padding, module.stride) == ((3, 3), (1, 1), (1, 1))
        assert module.bias is None
    assert network.classifier.bias is None
    pooled = [isinstance(block.pool, nn.MaxPool2d) for block in network.blocks]
    assert [index for index, pools in enumerate(pooled) if pools] == pools_after
    names = [name for name, _ in network.named_parameters()]
    assert names[:3] == ["blocks.0.conv.weight", "blocks.0.norm.weight", "blocks.0.norm.bias"]
    assert names[-1] == "classifier.weight"


def plain_forward(network, images):
    """The same network written out with functions, batch statistics computed by hand."""
    for block in network.blocks:
        images = nn.functional.conv2d(images, block.conv.weight, padding=1)
        mean = images.mean((0, 2, 3), keepdim=True)
        variance = images.var((0, 2, 3), correction=0, keepdim=True)
        images = ((images - mean) / (variance + 1e-5).sqrt()).clamp(min=0)
        if isinstance(block.pool, nn.MaxPool2d):
            height, width = (size // 2 * 2 for size in images.shape[2:])
            images = images[..., :height, :width].unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).amax((3, 5))
    return images.flatten(1) @ network.classifier.weight.T


@pytest.mark.parametrize("make", [CNN4, partial(CNN4, 3, 7, 35), partial(CNN8, 3, 5)])
def test_forward_against_written_out_network(make):
    torch.manual_seed(0)
    network = make().double()
    images = torch.randn(3, *network.example_input_shape, dtype=torch.double)
    torch.testing.assert_close(network(images), plain_forward(network, images))


@pytest.mark.parametrize("make", [VGG8, partial(VGG8, 1, 7, 67)])
def test_vgg8_against_written_out_network(make):
    torch.manual_seed(0)
    network = make().double()
    features = images = torch.randn(3, *network.example_input_shape, dtype=torch.double)
    parameters = list(network.parameters())
    for weight, bias in zip(parameters[:10:2], parameters[1:10:2], strict=True):
        features = nn.functional.conv2d(features, weight, bias, padding=1).clamp(min=0)
        height, width = (size // 2 * 2 for size in features.shape[2:])
        features = features[..., :height, :width].unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).amax((3, 5))
    features = features.reshape(3, -1)
    for weight, bias in zip(parameters[10:14:2], parameters[11:14:2], strict=True):
        features = (features @ weight.T + bias).clamp(min=0)
    torch.testing.assert_close(network(images), features @ parameters[14].T + parameters[15])


def test_vgg8_refuses_small_images_and_no_classes():
    assert VGG8(image_size=32)(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    with pytest.raises(ValueError, match=r"image_size.*VGG8.*31"):
        VGG8(image_size=31)
    with pytest.raises(ValueError, match=r"num_classes.*0"):
        VGG8(num_classes=0)
    with pytest.raises(ValueError, match=r"in_channels.*0"):
        VGG8(in_channels=0)


def test_mlp_flattens_and_applies_relu_between_layers():
    torch.manual_seed(0)
    network = MLP(12, hidden=(5, 4), out_features=3)
    inputs = torch.randn(6, 3, 2, 2)
    features = inputs.reshape(6, 12)
    for layer in network.hidden:
        features = (features @ layer.weight.T + layer.bias).clamp(min=0)
    expected = features @ network.classifier.weight.T + network.classifier.bias
    torch.testing.assert_close(network(inputs), expected)
    assert [name for name, _ in network.named_children()] == ["hidden", "classifier"]


@pytest.mark.parametrize("network_class", [CNN4, CNN8])
@pytest.mark.parametrize("std", [0.01, 0.2])
def test_initial_weights_are_normal_with_the_given_deviation(network_class, std):
    torch.manual_seed(0)
    network = network_class(init_std=std)
    for module in network.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            weight = module.weight.detach()
            samples = weight.numel()
            assert weight.mean().abs() < 5 * std / samples**0.5
            assert weight.std() == pytest.approx(std, rel=5 / (2 * samples) ** 0.5)
            within_one_deviation = (weight.abs() < std).float().mean()
            assert within_one_deviation == pytest.approx(0.6827, abs=5 * 0.466 / samples**0.5)
        if isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()


def test_default_deviation_is_the_papers_and_none_is_pytorchs():
    torch.manual_seed(0)
    assert CNN4().classifier.weight.detach().std() == pytest.approx(0.01, rel=0.1)
    weight = CNN4(init_std=None).classifier.weight.detach()
    bound = 256**-0.5
    assert weight.abs().max() <= bound
    assert weight.std() == pytest.approx(bound / 3**0.5, rel=0.1)


@pytest.mark.parametrize(("network_class", "smallest"), [(CNN4, 16), (CNN8, 32)])
def test_smallest_image(network_class, smallest):
    network = network_class(in_channels=2, image_size=smallest)
    assert network(torch.randn(2, 2, smallest, smallest)).shape == (2, 10)
    with pytest.raises(ValueError, match=f"at least {smallest}, but is {smallest - 1}"):
        network_class(image_size=smallest - 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(MLP, hidden=(10, 0)), "hidden"),
        (partial(MLP, in_features=0), "in_features"),
        (partial(CNN4, in_channels=0), "in_channels"),
        (partial(CNN8, num_classes=0), "num_classes"),
        (partial(CNN4, init_std=0.0), "init_std"),
    ],
)
def test_networks_refuse_arguments_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_conv_block_without_pooling_keeps_the_size():
    assert ConvBlock(2, 4, pool=False)(torch.randn(2, 2, 7, 5)).shape == (2, 4, 7, 5)


@pytest.mark.slow
def test_training_on_digits_with_a_plain_trainer():
    torch.manual_seed(0)
    data = Digits(batch_size=32)
    model = Classifier(MLP(64, hidden=(64,)))
    run = trainer(max_epochs=8)
    run.fit(model, data)
    assert run.callback_metrics["val_acc"] > 0.9
    assert run.callback_metrics["train_loss"] < 0.3
    tested = run.test(model, data, verbose=False)[0]
    assert tested["test_acc"] > 0.9

    predictions = run.predict(model, data)
    classes = torch.cat([batch["classes"] for batch in predictions])
    probabilities = torch.cat([batch["probabilities"] for batch in predictions])
    accuracy = (classes == data.test_set.targets).float().mean()
    assert accuracy.item() == pytest.approx(tested["test_acc"])
    assert torch.equal(probabilities.argmax(1), classes)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(len(classes)))


@pytest.mark.nightly
def test_convolutional_network_learns_digits():
    torch.manual_seed(0)

    class Enlarge(nn.Module):
        def forward(self, images):
            return images.repeat_interleave(2, 2).repeat_interleave(2, 3)

    model = Classifier(nn.Sequential(Enlarge(), CNN4(image_size=16)))
    run = trainer(max_epochs=4)
    run.fit(model, Digits(batch_size=16))
    assert run.callback_metrics["val_acc"] > 0.85


@pytest.mark.parametrize("stage", ["val", "test"])
def test_logged_metrics_are_means_over_samples(stage):
    inputs, targets, loader = small_data()
    torch.manual_seed(0)
    model = Classifier(MLP(64), label_smoothing=0.3)
    run = trainer()
    evaluate = run.validate if stage == "val" else run.test
    logged = evaluate(model, loader, verbose=False)[0]
    with torch.no_grad():
        log_probabilities = model(inputs).log_softmax(1)
    loss = -log_probabilities[torch.arange(len(targets)), targets].mean()
    accuracy = (log_probabilities.argmax(1) == targets).float().mean()
    assert set(logged) == {f"{stage}_loss", f"{stage}_acc"}
    assert logged[f"{stage}_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert logged[f"{stage}_acc"] == pytest.approx(accuracy.item())


def test_a_metric_in_the_accuracys_place_gets_the_logits():
    module = Classifier(MLP(in_features=6, hidden=[], out_features=4))
    module.val_accuracy = MulticlassAccuracy(4, top_k=2, average="micro")
    inputs, targets = torch.randn(40, 6), torch.arange(40) % 4
    (logged,) = trainer().validate(module, DataLoader(TensorDataset(inputs, targets), batch_size=16), verbose=False)
    best = module(inputs).topk(2).indices
    assert logged["val_acc"] == pytest.approx((best == targets[:, None]).any(1).float().mean().item())


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_training_loss_is_the_epochs_mean_smoothed_cross_entropy(smoothing):
    inputs, targets, loader = small_data()
    torch.manual_seed(0)
    model = Classifier(
        MLP(64), label_smoothing=smoothing, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0)
    )
    run = trainer(max_epochs=1)
    run.fit(model, loader)
    with torch.no_grad():
        log_probabilities = model(inputs).log_softmax(1)
    wanted = torch.full((len(targets), 10), smoothing / 10)
    wanted[torch.arange(len(targets)), targets] += 1 - smoothing
    loss = -(wanted * log_probabilities).sum(1).mean()
    assert run.logged_metrics["train_loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    assert set(run.callback_metrics) == {"train_loss"}


def test_predict_takes_inputs_without_targets():
    inputs, _, _ = small_data()
    outputs = trainer().predict(Classifier(MLP(64)), DataLoader(inputs, 20))
    assert [len(batch["classes"]) for batch in outputs] == [20, 20, 10]


def test_default_optimizer_is_plain_sgd_over_trainable_parameters():
    model = Classifier(MLP())
    model.network.hidden[0].weight.requires_grad_(False)
    optimizer = model.configure_optimizers()
    assert type(optimizer) is torch.optim.SGD
    assert {key: optimizer.defaults[key] for key in ("lr", "momentum", "weight_decay")} == {
        "lr": 0.1,
        "momentum": 0,
        "weight_decay": 0,
    }
    given = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    assert given == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert len(given) == 3


def test_scheduler_steps_once_per_epoch():
    _, _, loader = small_data()
    model = Classifier(MLP(64), scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    run = trainer(max_epochs=3)
    run.fit(model, loader)
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 2**3)


def test_plateau_scheduler_watches_its_metric():
    _, _, loader = small_data()
    model = Classifier(
        MLP(64),
        optimizer=partial(torch.optim.SGD, lr=0.0, weight_decay=0.1),
        scheduler=partial(ReduceLROnPlateau, monitor="val_acc", mode="max", patience=0),
    )
    run = trainer(max_epochs=2)
    run.fit(model, loader, loader)
    assert run.lr_scheduler_configs[0].monitor == "val_acc"
    assert run.lr_scheduler_configs[0].scheduler.num_bad_epochs == 0
    assert run.lr_scheduler_configs[0].scheduler.best == run.callback_metrics["val_acc"]


def with_attribute(network, name, value):
    setattr(network, name, value)
    return network


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (CNN8(num_classes=100), 100),
        (MLP(out_features=7), 7),
        (nn.Linear(5, 4), 4),
        (nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), 3),
        (with_attribute(nn.Sequential(nn.Conv2d(1, 6, 3), nn.Flatten()), "out_features", 6), 6),
    ],
)
def test_number_of_classes_is_found(network, expected):
    model = Classifier(network)
    assert model.num_classes == model.val_accuracy.num_classes == expected
    assert Classifier(network, num_classes=expected + 1).num_classes == expected + 1


def test_number_of_classes_must_be_known():
    with pytest.raises(MisconfigurationException, match="num_classes"):
        Classifier(nn.Sequential(nn.Conv2d(1, 6, 3), nn.Flatten()))
    with pytest.raises(MisconfigurationException, match=r"num_classes.*1"):
        Classifier(MLP(), num_classes=1)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_label_smoothing_must_be_a_share(value):
    with pytest.raises(MisconfigurationException, match=f"label_smoothing.*{value}"):
        Classifier(MLP(), label_smoothing=value)


def test_example_input_array_comes_from_the_network():
    assert Classifier(CNN8()).example_input_array.shape == (1, 3, 32, 32)
    assert Classifier(nn.Linear(5, 4)).example_input_array is None


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_a_summary_of_another_precision(tmp_path, precision):
    module = Classifier(MLP(64, hidden=(8,)))
    data = DataLoader(TensorDataset(torch.randn(8, 1, 8, 8), torch.arange(8)), batch_size=4)
    settings = {"precision": precision, "max_epochs": 1, "default_root_dir": tmp_path}
    trainer(**settings, enable_model_summary=True).fit(module, data)
    assert module.example_input_array.dtype == next(module.parameters()).dtype
    module.example_input_array = torch.arange(3)
    assert module.example_input_array.dtype == torch.int64


@pytest.mark.slow
def test_checkpoint_is_plain_data_and_loads_with_a_network(tmp_path):
    inputs, _, loader = small_data()
    model = Classifier(MLP(64, hidden=(20,)), label_smoothing=0.1)
    run = trainer(max_epochs=1)
    run.fit(model, loader)
    path = tmp_path / "model.ckpt"
    run.save_checkpoint(path)
    content = torch.load(path, weights_only=True)
    assert content["hyper_parameters"] == {"num_classes": 10, "label_smoothing": 0.1}
    assert set(content["state_dict"]) == {f"network.{name}" for name in model.network.state_dict()}
    loaded = Classifier.load_from_checkpoint(path, network=MLP(64, hidden=(20,)))
    assert loaded.label_smoothing == 0.1
    assert torch.equal(loaded(inputs), model(inputs))


def cli(monkeypatch, tmp_path, text, *args):
    config = tmp_path / "config.yaml"
    config.write_text(text)
    monkeypatch.setattr(sys, "argv", ["train"])
    return LightningCLI(
        L.LightningModule,
        L.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        run=False,
        args=["--config", str(config), *args],
        seed_everything_default=False,
        save_config_callback=None,
        trainer_defaults={
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(tmp_path),
        },
    )


@pytest.mark.slow
def test_yaml_with_short_class_names(monkeypatch, tmp_path):
    assert torchvision.ops.MLP.__name__ == "MLP", "another nn.Module of this short name is loaded"
    made = cli(
        monkeypatch,
        tmp_path,
        """
        model:
          class_path: Classifier
          init_args:
            network: {class_path: MLP, init_args: {in_features: 64, hidden: [128]}}
            optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.03}}
            scheduler: {class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: 2, gamma: 0.5}}
            label_smoothing: 0.1
        data: {class_path: Digits, init_args: {batch_size: 100, validation: 0.3}}
        trainer: {max_epochs: 2}
        """,
    )
    assert type(made.model.network) is MLP
    assert made.model.network.hidden[0].weight.shape == (128, 64)
    assert type(made.datamodule) is Digits
    assert made.datamodule.validation == 0.3
    made.trainer.fit(made.model, made.datamodule)
    assert made.trainer.optimizers[0].param_groups[0]["initial_lr"] == 0.03
    assert made.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.015)

    path = tmp_path / "model.ckpt"
    made.trainer.save_checkpoint(path)
    torch.load(path, weights_only=True)
    loaded = Classifier.load_from_checkpoint(path, network=MLP(64, hidden=(128,)))
    assert loaded.label_smoothing == 0.1
    assert torch.equal(loaded.network.classifier.weight, made.model.network.classifier.weight.cpu())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "name", "validation", "augment"),
    [
        ("{class_path: MNIST, init_args: {root: elsewhere, validation: test}}", "MNIST", "test", False),
        ("{class_path: FashionMNIST, init_args: {validation: 0.1, seed: 3}}", "FashionMNIST", 0.1, False),
        ("{class_path: CIFAR10, init_args: {batch_size: 20}}", "CIFAR10", "test", True),
        ("{class_path: CIFAR100, init_args: {augment: false}}", "CIFAR100", "test", False),
        ("SVHN", "SVHN", "test", False),
    ],
)
def test_yaml_network_and_data_by_name_alone(data, name, validation, augment, monkeypatch, tmp_path):
    made = cli(
        monkeypatch,
        tmp_path,
        f"""
        model: {{class_path: Classifier, init_args: {{network: CNN4}}}}
        data: {data}
        """,
    )
    assert type(made.model.network) is CNN4
    assert made.model.configure_optimizers().defaults["lr"] == 0.1
    assert type(made.datamodule).__name__ == name
    assert (made.datamodule.validation, made.datamodule.augment) == (validation, augment)


@pytest.mark.slow
def test_command_line_changes_parts_and_takes_any_module(monkeypatch, tmp_path):
    made = cli(
        monkeypatch,
        tmp_path,
        "{model: {class_path: Classifier, init_args: {network: CNN8}}, data: Digits}",
        "--model.optimizer.lr=0.5",
        "--model.network.num_classes=100",
    )
    assert made.model.configure_optimizers().defaults["lr"] == 0.5
    assert made.model.num_classes == 100
    made = cli(
        monkeypatch,
        tmp_path,
        """
        model:
          class_path: Classifier
          init_args:
            network: {class_path: torch.nn.Linear, init_args: {in_features: 4, out_features: 3}}
        data: Digits
        """,
    )
    assert type(made.model.network) is nn.Linear
    assert made.model.num_classes == 3


def test_weight_decay_leaves_named_parameters_alone():
    module = Classifier(
        nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)),
        optimizer=partial(torch.optim.SGD, lr=0.1, weight_decay=0.5),
        no_weight_decay=["1", "bias"],
    )
    optimizer = module.configure_optimizers()
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decays[id(p)] for name, p in module.network.named_parameters()} == {
        "0.weight": 0.5, "0.bias": 0, "1.weight": 0, "1.bias": 0, "2.weight": 0.5, "2.bias": 0
    }  # fmt: skip
    assert len(Classifier(nn.Linear(5, 4)).configure_optimizers().param_groups) == 1
    with pytest.raises(MisconfigurationException, match="no_weight_decay has 'factors'"):
        Classifier(nn.Linear(5, 4), no_weight_decay=["factors"]).configure_optimizers()
