"""`inspect`: the figures of a run before it runs."""

import copy
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from lightning_lowrank import BlockKronecker, FedAvg, FederatedLoop, FedMUD, LowRank, MatrixProduct, convert
from lightning_lowrank.cli import main
from lightning_lowrank.cli.inspection import inspect_run, render
from lightning_lowrank.cli.runs import read_run
from lightning_lowrank.models import CNN4, MLP, Classifier
from tests.cli.run_folders import rounds_of
from tests.grids import each_of, nightly_except
from tests.helpers import Data, Module, fit, network, trainer

RECIPES = Path(__file__).parents[2] / "recipes"
Inspect = Callable[..., dict[str, Any]]


@pytest.fixture
def inspect(monkeypatch, tmp_path, capsys) -> Inspect:
    """Run ``lightning-lowrank inspect --json``, from a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-lowrank"])
    # seed_everything sets it for the whole process, where FederatedLoop in other tests would find it.
    monkeypatch.setenv("PL_GLOBAL_SEED", "99")

    def run(*arguments: object) -> dict[str, Any]:
        capsys.readouterr()
        main(["inspect", "--json", *map(str, arguments)])
        return json.loads(capsys.readouterr().out)

    return run


def recipe(*names: str) -> list[str]:
    return [word for name in names for word in ("--config", str(RECIPES / f"{name}.yaml"))]


@pytest.mark.slow
def test_the_json_has_the_documented_form(inspect, tmp_path):
    figures = inspect(*recipe("quickstart"))
    assert set(figures) == {"parameters", "layers", "traffic", "optimizer_state_bytes", "problems", "notes"}
    assert set(figures["parameters"]) == {"dense", "model", "trainable"}
    assert figures["parameters"]["dense"] == 64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10
    assert [layer["name"] for layer in figures["layers"]] == [
        "network.hidden.0",
        "network.hidden.1",
        "network.classifier",
    ]
    for layer in figures["layers"]:
        assert {"name", "kind", "shape", "rank", "parameters", "macs"} <= set(layer)
        assert layer["kind"] == "Linear"
    assert [layer["shape"] for layer in figures["layers"]] == [[256, 64], [256, 256], [10, 256]]
    assert [layer["parameters"] for layer in figures["layers"]] == [256 * 64, 256 * 256, 2560]
    assert [layer["rank"] is None for layer in figures["layers"]] == [False, False, True]
    biases = 256 + 256 + 10
    assert sum(layer["trainable"] for layer in figures["layers"]) + biases == figures["parameters"]["trainable"]
    assert set(figures["traffic"]) == {"up", "down"}
    for way in figures["traffic"].values():
        assert way["numbers"] == figures["parameters"]["trainable"]
        assert way["bytes"] > 4 * way["numbers"]
    assert figures["problems"] == figures["notes"] == []
    assert list(tmp_path.iterdir()) == []


@each_of(4)
@pytest.mark.parametrize(
    ("recipes", "more", "trainable"),
    [
        (["fmnist"], [], 390_880),
        (["fmnist", "mud"], [], 11_872),
        (["fmnist", "aad"], [], 11_872),
        (["fmnist", "bkd"], [], 12_008),
        (["fmnist", "bkd_aad"], [], 12_008),
        (["fmnist", "frozen"], [], 12_544),
        (["fmnist", "bkd_frozen"], [], 12_481),
        (["fmnist", "mud"], ["--lowrank.budget_rule", "largest"], 11_872),
        (["fmnist", "bkd"], ["--lowrank.budget_rule", "largest"], 12_208),
        (["cifar10"], [], 4_719_328),
        (["cifar10", "mud"], [], 151_840),
        (["cifar10", "bkd_aad"], [], 152_026),
        (["cifar100"], [], 4_765_408),
        (["cifar100", "aad"], [], 149_536),
        (["cifar100", "bkd"], [], 153_232),
    ],
)
@pytest.mark.slow
def test_fedmuds_recipes_have_the_papers_exact_figures(inspect, recipes, more, trainable):
    figures = inspect(*recipe(*(f"fedmud/{name}" for name in recipes)), *more)
    assert figures["parameters"]["trainable"] == trainable
    assert figures["traffic"]["up"]["parameters"] == trainable
    assert figures["problems"] == []


@pytest.mark.slow
def test_fedmuds_ranks_on_fmnist(inspect):
    ranks = [layer["rank"] for layer in inspect(*recipe("fedmud/fmnist", "fedmud/mud"))["layers"]]
    assert ranks == [None, 2, 3, 5, None]


@pytest.mark.slow
@pytest.mark.nightly
def test_svhn_has_a_floor_that_is_named(inspect, capsys):
    with pytest.raises(SystemExit) as exit_of:
        inspect(*recipe("fedmud/svhn", "fedmud/mud"))
    assert "budget" in str(exit_of.value)
    figures = inspect(*recipe("fedmud/svhn", "fedmud/mud", "fedmud/svhn_floor"))
    share = figures["parameters"]["trainable"] / figures["parameters"]["dense"]
    assert f"{share:.2%}" == "3.53%"
    assert f"{share:.4f}" in str(exit_of.value) or f"{share:.2%}" in str(exit_of.value)
    assert [layer["rank"] for layer in figures["layers"]] == [None, 1, 1, 1, None]


def real_encoding(module: nn.Module) -> int:
    tensors = {name: value.detach() for name, value in module.named_parameters() if value.requires_grad}
    return len(safetensors.torch.save({**tensors, **dict(module.named_buffers())}))


@nightly_except("None")
@pytest.mark.parametrize("overlay", [None, "mud", "bkd_aad", "frozen"])
@pytest.mark.slow
def test_traffic_is_the_length_of_the_real_encoding(inspect, overlay):
    figures = inspect(*recipe("fedmud/fmnist", *([f"fedmud/{overlay}"] if overlay else [])))
    module = Classifier(CNN4())
    factorization = BlockKronecker() if overlay == "bkd_aad" else MatrixProduct(layout="raw")
    if overlay is not None:
        convert(
            module,
            factorization,
            budget=1 / 32,
            budget_rule="authors",
            decouple=overlay == "bkd_aad",
            half_frozen=overlay == "frozen",
            skip=["first", "last"],
        )
    for way in figures["traffic"].values():
        assert way["bytes"] == real_encoding(module)
        assert way["buffers"] == 2 * (32 + 64 + 128 + 256) + 4
        assert way["numbers"] == way["parameters"] + way["buffers"]


@pytest.mark.slow
def test_traffic_is_what_the_ledger_of_a_real_fit_says(inspect, tmp_path):
    figures = inspect(*recipe("quickstart"))
    main(["fit", *recipe("quickstart"), "--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false"])
    logged = rounds_of(read_run(tmp_path / "runs" / "quickstart" / "version_0"))[0]
    assert logged["federated/clients"] == 10
    assert logged["comm/up_bytes"] == 10 * figures["traffic"]["up"]["bytes"]
    assert logged["comm/down_bytes"] == 10 * figures["traffic"]["down"]["bytes"]


@pytest.mark.parametrize("buffers", ["average", "local", "reset"])
def test_traffic_follows_the_buffer_policy(tmp_path, buffers):
    def loop() -> FederatedLoop:
        return FederatedLoop(FedAvg(), clients=5, buffers=buffers, summary=False)

    figures = inspect_run(Module(network(norm=nn.BatchNorm1d)), loop=loop())
    logger = CSVLogger(tmp_path, name="run")
    fit(trainer(tmp_path, loop(), max_epochs=1, logger=logger), Module(network(norm=nn.BatchNorm1d)), Data())
    logged = rounds_of(read_run(Path(logger.log_dir)))[0]
    for direction, way in figures["traffic"].items():
        assert logged[f"comm/{direction}_bytes"] == 5 * way["bytes"]
        held_back = buffers == "local" or (buffers == "reset" and direction == "down")
        assert way["buffers"] == (0 if held_back else 16 + 16 + 1)


@pytest.mark.parametrize("lowrank", [False, True])
@pytest.mark.nightly
def test_optimizer_state(inspect, lowrank):
    arguments = recipe("quickstart") if lowrank else recipe("quickstart", "quickstart_dense")
    figures = inspect(*arguments)
    trainable = figures["parameters"]["trainable"]
    trained_tensors = 2 + 2 + 3 + 1 if lowrank else 6
    assert figures["optimizer_state_bytes"] == 0
    momentum = inspect(*arguments, "--model.init_args.optimizer.init_args.momentum", "0.9")
    assert momentum["optimizer_state_bytes"] == 4 * trainable
    adam = inspect(*arguments, "--optimizer", "AdamW")
    assert adam["optimizer_state_bytes"] == 8 * trainable + 4 * trained_tensors


@pytest.mark.nightly
def test_projected_momentum_is_rank_over_in_of_dense_momentum(inspect):
    """The biases' momentum is dense; the weights' are out × rank, also of convolutions."""
    arguments = [
        *recipe("quickstart", "quickstart_dense"),
        "--optimizer",
        "ProjectedSGD",
        "--optimizer.momentum",
        "0.9",
    ]
    figures = inspect(*arguments, "--optimizer.rank", "8")
    shapes = [layer["shape"] for layer in figures["layers"]]
    assert figures["optimizer_state_bytes"] == 4 * sum(rows * 8 + rows for rows, _ in shapes)
    full = inspect(*arguments, "--optimizer.rank", "256")
    assert full["optimizer_state_bytes"] == 4 * figures["parameters"]["trainable"]
    figures = inspect(
        *recipe("fedmud/fmnist"), "--lowrank", "null", "--optimizer", "ProjectedAdamW", "--optimizer.rank", "4"
    )
    (first, *others) = (layer["shape"] for layer in figures["layers"])
    norms = 2 * 2 * (32 + 64 + 128 + 256) * 4 + 4 * 2 * 4
    assert first == [32, 1, 3, 3]
    assert figures["optimizer_state_bytes"] == norms + 4 * 5 + 2 * 4 * 4 * (32 + sum(rows for rows, *_ in others))


@pytest.mark.slow
def test_macs_of_cnn4_by_hand(inspect):
    layers = inspect(*recipe("fedmud/fmnist", "fedmud/bkd"))["layers"]
    assert [layer["kind"] for layer in layers] == ["Conv2d"] * 4 + ["Linear"]
    assert [layer["macs"] for layer in layers] == [
        28 * 28 * 32 * 1 * 9,
        14 * 14 * 64 * 32 * 9,
        7 * 7 * 128 * 64 * 9,
        3 * 3 * 256 * 128 * 9,
        256 * 10,
    ]


class Mixed(Module):
    """Every kind of layer that is counted, called as the tests below need it."""

    def __init__(self, example: Any = None) -> None:
        super().__init__(nn.Identity())
        self.grouped = nn.Conv2d(4, 8, kernel_size=(3, 1), stride=2, groups=2)
        self.transposed = nn.ConvTranspose2d(8, 6, kernel_size=2, stride=2)
        self.line = nn.Conv1d(3, 5, kernel_size=4)
        self.token = nn.Linear(7, 9)
        self.unused = nn.Linear(2, 3)
        self.unused_image = nn.Conv2d(1, 1, 1)
        if example is not None:
            self.example_input_array = example

    def forward(self, image: Tensor, line: Tensor, tokens: dict[str, Tensor]) -> None:
        assert not self.training
        self.transposed(self.grouped(image))
        self.line(line)
        self.token(self.token(tokens["values"])[..., :7])


def test_macs_of_other_layers_by_hand_whatever_the_examples_form():
    image, line, tokens = torch.zeros(5, 4, 9, 6), torch.zeros(5, 3, 12), {"values": torch.zeros(5, 11, 7)}
    expected = {
        # 4×3 positions, each of 8 outputs sees 2 channels × 3 × 1; then 4×3 positions spread 8 channels on 6×2×2.
        "grouped": 4 * 3 * 8 * (2 * 3),
        "transposed": 4 * 3 * 8 * (6 * 2 * 2),
        "line": 9 * 5 * (3 * 4),
        "token": 2 * 11 * 7 * 9,
        "unused": None,
        "unused_image": None,
    }
    for example in ((image, line, tokens), {"line": line, "tokens": tokens, "image": image}):
        module = Mixed(example)
        figures = inspect_run(module)
        assert {layer["name"]: layer["macs"] for layer in figures["layers"]} == expected
        assert module.training
        assert figures["problems"] == []
        assert not any(layer._forward_hooks for layer in module.modules())


class Weightless(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 4)
        self.weight = None
        self.table = nn.Parameter(torch.zeros(4, 6))

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.table)


class Computed(Module):
    """Layers whose weights are computed from other tensors, and one that has no weight."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 6)), Weightless()))
        self.line = parametrizations.weight_norm(nn.Conv1d(2, 4, 3, groups=2))
        self.transposed = parametrizations.weight_norm(nn.ConvTranspose2d(4, 6, 2, groups=2))
        self.pruned = prune.l1_unstructured(nn.Linear(4, 3), "weight", 0.5)

    def forward(self, x: Tensor) -> Tensor:
        image = self.line(x[:, None].repeat(1, 2, 1))[..., None]
        return self.pruned(self.net(x)) + self.transposed(input=image).sum()


def test_macs_of_layers_whose_weight_is_computed():
    module = Computed()
    module.example_input_array = torch.zeros(5, 6)
    before = copy.deepcopy(module.state_dict())
    figures = inspect_run(module)
    assert figures["problems"] == []
    assert {layer["name"]: (layer["shape"], layer["macs"]) for layer in figures["layers"]} == {
        "net.0": ([6, 6], 36),
        "net.1": ([0], None),
        "line": ([4, 1, 3], 4 * 4 * 1 * 3),
        "transposed": ([4, 3, 2, 2], 4 * 4 * 3 * 2 * 2),
        "pruned": ([3, 4], 12),
    }
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_macs_without_an_example():
    figures = inspect_run(Mixed())
    macs = {layer["name"]: layer["macs"] for layer in figures["layers"]}
    assert macs == {"grouped": None, "transposed": None, "line": None, "token": 63, "unused": 6, "unused_image": None}
    assert figures["problems"] == []


def test_an_example_that_does_not_fit_is_a_problem():
    module = Module()
    module.example_input_array = torch.zeros(2, 999)
    module.forward = module.net.forward
    figures = inspect_run(module)
    (problem,) = figures["problems"]
    assert problem.startswith("the forward pass of example_input_array fails: RuntimeError: ")
    assert [layer["macs"] for layer in figures["layers"]] == [None] * 3


class Forgetful(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.net[0].parameters(), *self.net[4].parameters()], lr=0.1)


def test_parameters_that_no_optimizer_would_train_are_problems():
    assert inspect_run(Forgetful())["problems"] == [
        "net.2.weight is trainable and in no optimizer",
        "net.2.bias is trainable and in no optimizer",
    ]
    module = Module()
    early = torch.optim.SGD(module.parameters(), lr=0.1)
    module.configure_optimizers = lambda: {"optimizer": early}
    assert inspect_run(module, LowRank(MatrixProduct(), rank=1, include=["net.2"]))["problems"] == [
        "net.2.factors.U is trainable and in no optimizer",
        "net.2.factors.V is trainable and in no optimizer",
    ]


def test_no_optimizer_at_all_is_a_problem():
    module = Module()
    module.configure_optimizers = lambda: None
    figures = inspect_run(module)
    assert figures["problems"] == ["configure_optimizers() gives no optimizer"]
    assert figures["optimizer_state_bytes"] == 0


def test_optimizers_that_need_a_trainer_are_noted_and_no_problem():
    module = Module(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, module.trainer.max_epochs))
    figures = inspect_run(module)
    assert figures["problems"] == []
    assert figures["optimizer_state_bytes"] is None
    (note,) = figures["notes"]
    assert "does not run without a trainer" in note
    assert "not attached to a `Trainer`" in note


def test_several_optimizers_in_every_form_lightning_takes():
    def configure(module: Module) -> Any:
        first = torch.optim.SGD(module.net[0].parameters(), lr=0.1, momentum=0.9)
        rest = [*module.net[2].parameters(), *module.net[4].parameters()]
        second = torch.optim.Adagrad(rest, lr=0.1)
        scheduler = {"scheduler": torch.optim.lr_scheduler.StepLR(second, 1), "interval": "epoch"}
        return {
            "dictionaries": [{"optimizer": first}, {"optimizer": second, "lr_scheduler": scheduler}],
            "lists": ([first, second], [scheduler]),
            "tuple": (first, second),
        }

    expected = 4 * (6 * 16 + 16) + 4 * (16 * 16 + 16 + 16 * 4 + 4) + 4 * 4
    for form in ("dictionaries", "lists", "tuple"):
        module = Module()
        module.configure_optimizers = lambda module=module, form=form: configure(module)[form]
        figures = inspect_run(module)
        assert figures["problems"] == []
        assert figures["optimizer_state_bytes"] == expected


def test_fedmud_without_low_rank_layers_is_a_problem():
    figures = inspect_run(Module(), loop=FederatedLoop(FedMUD(), clients=3))
    (problem,) = figures["problems"]
    assert "FedMUD trains low-rank changes to frozen weights" in problem
    assert figures["traffic"] == {}
    assert figures["parameters"]["trainable"] == figures["parameters"]["dense"]


@pytest.mark.slow
def test_callbacks_that_rule_out_rounds_are_problems(inspect):
    figures = inspect(
        *recipe("fedmud/fmnist"),
        "--trainer.callbacks",
        StochasticWeightAveraging.__name__,
        "--trainer.callbacks.swa_lrs",
        "0.1",
    )
    (problem,) = figures["problems"]
    assert "StochasticWeightAveraging ends with a pass over the training set" in problem


@pytest.mark.nightly
def test_a_method_that_needs_static_batch_norm_says_so_before_the_run(inspect):
    recipes = recipe("fedhm/cifar10", "fedhm/heterofl")
    assert inspect(*recipes)["notes"] == []
    (note,) = inspect(*recipes, "--trainer.callbacks", "ModelCheckpoint")["notes"]
    assert "Put StaticBatchNorm() after FederatedLoop" in note


def test_what_to_know_of_the_module_is_noted():
    loop = FederatedLoop(FedAvg(), clients=3, buffers="local")
    figures = inspect_run(Module(network(norm=nn.BatchNorm1d)), loop=loop)
    assert figures["problems"] == []
    (note,) = figures["notes"]
    assert "statistics of 1 BatchNorm layer" in note


def test_layers_left_alone_say_why():
    layers = inspect_run(Module(), LowRank(MatrixProduct(), rank=1, skip=["first", "last"]))["layers"]
    first, between, last = (layer["left_alone"] for layer in layers)
    assert "first layer" in first
    assert between is None
    assert "last layer" in last
    mixed = inspect_run(Mixed(), LowRank(MatrixProduct(), rank=1))["layers"]
    assert "not fewer than the weight has" in {layer["name"]: layer["left_alone"] for layer in mixed}["unused_image"]


UNTOUCHABLE = """
import lightning.pytorch as pl


class Untouchable(pl.LightningDataModule):
    def prepare_data(self): raise AssertionError("prepare_data")
    def setup(self, stage): raise AssertionError("setup")
    def teardown(self, stage): raise AssertionError("teardown")
    def state_dict(self): raise AssertionError("state_dict")
    def train_dataloader(self): raise AssertionError("train_dataloader")
    def val_dataloader(self): raise AssertionError("val_dataloader")
    def test_dataloader(self): raise AssertionError("test_dataloader")
    def predict_dataloader(self): raise AssertionError("predict_dataloader")
"""


@pytest.mark.slow
def test_no_data_is_touched(inspect, tmp_path, monkeypatch):
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "untouchable_data.py").write_text(UNTOUCHABLE)
    monkeypatch.syspath_prepend(modules)
    arguments = [*recipe("fedmud/fmnist", "fedmud/bkd_aad"), "--data", "untouchable_data.Untouchable"]
    figures = inspect(*arguments)
    assert figures["parameters"]["trainable"] == 12_008
    assert figures["problems"] == []
    with pytest.raises(AssertionError, match="prepare_data"):
        main(["fit", *arguments, "--trainer.enable_progress_bar", "false"])


def test_a_module_that_builds_itself_in_configure_model():
    class Late(Module):
        def configure_model(self) -> None:
            if isinstance(self.net, nn.Identity):
                self.net = network()

    figures = inspect_run(Late(nn.Identity()), LowRank(MatrixProduct(), rank=1, skip=["first"]))
    assert figures["parameters"]["dense"] == 6 * 16 + 16 + 16 * 16 + 16 + 16 * 4 + 4
    assert [layer["rank"] for layer in figures["layers"]] == [None, 1, 1]


def test_layers_that_need_a_trainer_are_refused():
    class Late(Module):
        def configure_model(self) -> None:
            self.head = nn.Linear(4, self.trainer.datamodule.num_classes)

    with pytest.raises(MisconfigurationException, match=r"configure_model\(\) of Late .*not attached .*__init__"):
        inspect_run(Late())


def test_an_impossible_conversion_is_refused():
    with pytest.raises(MisconfigurationException, match="budget"):
        inspect_run(Classifier(MLP(64, [32], 10)), LowRank(MatrixProduct(), budget=0.001))


@pytest.mark.slow
def test_the_printed_tables_hold_every_figure_in_eighty_columns(inspect, capsys):
    main(["inspect", *recipe("fedmud/cifar10", "fedmud/bkd_aad")])
    printed = capsys.readouterr().out
    figures = inspect(*recipe("fedmud/cifar10", "fedmud/bkd_aad"))
    lines = printed.splitlines()
    for layer in figures["layers"]:
        (line,) = (line for line in lines if line.split()[:1] == [layer["name"]] and layer["kind"] in line)
        assert len(line) <= 80
        for key in ("rank", "parameters", "trainable", "macs"):
            assert layer[key] is None or f"{layer[key]:,}" in line
        assert "×".join(map(str, layer["shape"])) in line
    assert "network.classifier stays dense: last layer" in printed
    assert "4,719,328 dense" in printed
    assert "152,026 trained (3.22% of dense)" in printed
    assert f"  up: {figures['traffic']['up']['bytes']:,} bytes for client 0 in the first round" in printed


def test_problems_are_printed_as_they_are():
    figures = inspect_run(Forgetful(), loop=FederatedLoop(FedMUD(), clients=3, buffers="local"))
    figures["problems"].append("[red] is no markup")
    figures["notes"].append("a note")
    text = io.StringIO()
    render(figures, Console(file=text, width=80))
    printed = text.getvalue()
    for problem in figures["problems"]:
        assert f"would not work: {problem}\n" in printed
    assert "note: a note\n" in printed
    assert len(figures["problems"]) == 4


class Recurrent(Module):
    def __init__(self):
        super().__init__(nn.Linear(5, 4))
        self.rnn = nn.GRU(6, 5, batch_first=True)

    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(self.rnn(batch[0].unsqueeze(1))[1][0]), batch[1])


@pytest.mark.parametrize("low_rank", [None, LowRank(MatrixProduct(), rank=1, summary=False)])
def test_recurrent_layers_are_listed(low_rank):
    figures = inspect_run(Recurrent(), low_rank, None)
    found = {layer["name"]: layer for layer in figures["layers"] if layer["kind"] == "GRU"}
    assert {name: layer["shape"] for name, layer in found.items()} == {
        "rnn.weight_ih_l0": [15, 6],
        "rnn.weight_hh_l0": [15, 5],
    }
    assert all(layer["trainable"] == layer["parameters"] for layer in found.values())
    reason = low_rank and "weights of recurrent layers are not converted"
    assert {layer["left_alone"] for layer in found.values()} == {reason}
    said = io.StringIO()
    render(figures, Console(file=said, width=120))
    assert ("rnn.weight_ih_l0 stays dense: weights of recurrent" in said.getvalue()) == bool(low_rank)


class Attention(Module):
    def __init__(self):
        super().__init__(nn.Linear(8, 4))
        self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=8, add_bias_kv=True)
        self.joint = nn.MultiheadAttention(8, 2)


def test_projections_of_attention_are_listed():
    shapes = {"q_proj": [8, 8], "k_proj": [8, 6], "v_proj": [8, 8], "out_proj": [8, 8]}
    shapes = {f"attention.{name}": shape for name, shape in shapes.items()}
    shapes |= {"joint.in_proj": [24, 8], "joint.out_proj": [8, 8], "net": [4, 8]}
    dense, converted, excluded = (
        {layer["name"]: layer for layer in inspect_run(Attention(), lowrank, None)["layers"]}
        for lowrank in (
            None,
            LowRank(MatrixProduct(), rank=1, summary=False),
            LowRank(MatrixProduct(), rank=1, summary=False, exclude=["*.in_proj"]),
        )
    )
    for found in (dense, converted, excluded):
        assert {name: layer["shape"] for name, layer in found.items()} == shapes
    assert excluded["joint.in_proj"]["left_alone"] == "in exclude"
    assert dense["joint.in_proj"]["trainable"] == 24 * 8
    assert converted["joint.in_proj"]["trainable"] == 24 + 8
