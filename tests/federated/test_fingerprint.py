"""A changed argument is refused at resume and named, or changes no weight."""

import dataclasses
import inspect
import math
import typing
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import TensorDataset, WeightedRandomSampler, default_collate

from lightning_lowrank import (
    ALIE,
    Bucketing,
    CenteredClipping,
    ClientPrivacy,
    Dirichlet,
    FedAvg,
    FedAvgM,
    FederatedLoop,
    FedLoRA,
    FromIndices,
    GaussianNoise,
    GeometricMedian,
    InnerProduct,
    LabelCount,
    LabelFlip,
    LowRank,
    MaskAbsentClasses,
    MatrixProduct,
    MultiKrum,
    NormBound,
    RoundStage,
    Scaled,
    SignFlip,
    StaticBatchNorm,
    SystemModel,
    TrimmedMean,
    lora,
)
from lightning_lowrank.aggregation import KeepsArrivals
from lightning_lowrank.arguments import recorded_arguments
from lightning_lowrank.compression import Half, LowRankCodec, Quantize, RandomK, Sign, TopK
from lightning_lowrank.federated import Algorithm
from lightning_lowrank.federated.fingerprint import _layer, describe, differences, flatten
from lightning_lowrank.federated.settings import FederatedSettings
from lightning_lowrank.layers import LowRankSettings
from tests.algorithms.methods import LOW_RANK, METHODS, each_method
from tests.grids import daily, nightly_except
from tests.helpers import Data, Module, assert_same, blobs, fit, network, trainer, weights

COMMON: dict[str, Any] = {"clients": 4, "clients_per_round": 2, "summary": False}
SGD = partial(torch.optim.SGD, lr=0.1)


class Median(KeepsArrivals):
    def __init__(self, low: bool = True) -> None:
        self._lower = low
        super().__init__()

    def result(self):
        return {name: torch.stack(values).median(0).values for name, values in self.values().items()}


class OtherOperator(lora.ZeroPadding):
    pass


class Renamed(FedAvg):
    """Keeps its argument under another name, and is no dataclass."""

    def __init__(self, step: float = 1.0) -> None:
        self._rate = step

    def aggregate(self, server) -> None:
        before = dict(server.model)
        super().aggregate(server)
        server.model.update({name: torch.lerp(before[name], server.model[name], self._rate) for name in before})


def run(folder, settings, callbacks=(), module=None, data=None, checkpoint=None, **arguments):
    """Make two rounds, or the second one from a checkpoint of the first, and return the weights."""
    loop = FederatedLoop(**{"algorithm": FedAvg(), **COMMON, **settings})
    module = Module(optimizer=SGD) if module is None else module
    kept = [] if checkpoint else [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)]
    fit(
        trainer(folder, *callbacks, loop, *kept, **{"max_epochs": 2, **arguments}),
        module,
        Data() if data is None else data,
        ckpt_path=checkpoint,
    )
    return weights(module)


def check_change(name: str, expected: dict[str, torch.Tensor], resumed: Callable[[], dict[str, torch.Tensor]]) -> str:
    """Require that a resumed run with a change is refused and names it, or ends with the expected weights."""
    try:
        found = resumed()
    except MisconfigurationException as error:
        if f"\n  {name}" not in str(error):
            raise
        return "refused"
    assert_same(expected, found)
    return "no effect"


def other_value(kind: type, name: str, value: Any) -> Any:
    """Return another value that an argument of a class may have."""
    given = OTHERS.get((kind.__name__, name), OTHERS.get(name))
    if given is not None:
        return given
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return 0.9 * value
    if isinstance(value, (tuple, list)) and value and isinstance(value[0], (int, float)):
        return [*value[:-1], 0.9 * value[-1]]
    hints = typing.get_type_hints(kind.__init__)
    choices = [each for each in typing.get_args(hints.get(name)) if isinstance(each, str) and each != value]
    assert choices, f"give another value of {kind.__name__}.{name}={value!r} in OTHERS"
    return choices[0]


OTHERS: dict[Any, Any] = {
    "capacity": "dynamic",
    "shares": [2.0, 1.0],
    ("FedHM", "shares"): [3.0, 2.0, 1.0],
    ("FedHM", "capacity"): "dynamic",
    ("FedHM", "temperature"): 3.0,
    ("FedHM", "server_model"): None,
    ("SplitMix", "budgets"): (3, 2),
    ("FedLoRA", "keep"): ["last*"],
    ("FedLoRA", "levels"): (1.0, 0.6),
    ("FedLoRA", "adapter"): "other",
    ("FedLoRA", "ranks"): [2, 1],
    ("FedRPCA", "sparsity"): 0.3,
    ("FedPer", "patterns"): ["net.2.bias"],
    ("FedNTD", "logits"): "net.0",
    ("MOON", "features"): "net.0",
    ("FedNTD", "targets"): 0,
    ("FedBAT", "learning_rate"): 0.1,
    ("TDPFed", "compression"): 1.5,
    ("Dirichlet", "min_samples"): 3,
    "groups": lambda dataset: dataset.tensors[1] % 2,
    ("TopK", "count"): 3,
    ("MaskAbsentClasses", "layer"): "net.4",
    ("MaskAbsentClasses", "classes"): 5,
    ("MaskAbsentClasses", "masking"): "zero",
    ("Half", "dtype"): "bfloat16",
    ("Quantize", "bits"): 4,
    ("LowRankCodec", "method"): "svd",
    ("LowRankCodec", "budget"): 0.5,
    ("LowRankCodec", "energy"): 0.5,
    ("MatrixProduct", "layout"): "raw",
    "before": [Bucketing(1)],
    "selected": 1,
    "radius": 0.5,
    "bound": 0.5,
    "relative_weight": 1.5,
    "deviations": 1.5,
    ("LabelFlip", "classes"): 5,
    ("Scaled", "classes"): 5,
    ("Scaled", "scale"): 5.0,
    "weighted": True,
    ("FedLoRA", "operator"): OtherOperator(),
    ("FedLoRA", "upload_ranks"): 3,
}


def changes(part: Any) -> list[tuple[str, Callable[[], Any]]]:
    """Return how to make an object with one argument changed, by the argument's name."""
    kind, given = type(part), vars(part).get("_given_arguments", recorded_arguments(part))
    found = []
    for name, value in given.items():
        parameter = inspect.signature(kind).parameters.get(name)
        if parameter is None or parameter.kind is parameter.VAR_POSITIONAL:
            continue
        found.append((name, partial(kind, **{**given, name: other_value(kind, name, value)})))
    return found


# Arguments of the loop

BASE: dict[str, Any] = {"algorithm": FedAvgM(), "partition": Dirichlet(0.5, min_samples=5)}
CHANGED: dict[str, Any] = {
    "algorithm": FedAvgM(lr=0.5),
    "clients": 5,
    "clients_per_round": 3,
    "partition": Dirichlet(0.7, min_samples=5),
    "local_epochs": 2,
    "local_steps": 3,
    "uplink": [Half()],
    "downlink": [Half()],
    "aggregator": Median(),
    "attackers": SignFlip(1),
    "objective": MaskAbsentClasses("net"),
    "privacy": ClientPrivacy(noise_multiplier=1.0),
    "system": SystemModel(latency=0.1),
    "stages": [RoundStage()],
    "weighting": "uniform",
    "buffers": "local",
    "ema_parameters": ["net.0.weight"],
    "on_client_error": "raise",
    "min_clients": 2,
    "optimizer_state": "keep",
    "client_dropout": 0.5,
    "sampling_weights": [1.0, 2.0, 3.0, 4.0],
    "participants": [[0, 1], [2, 3]],
    "availability": [0.5, 0.5, 0.9, 0.9],
    "labels": lambda dataset: dataset.tensors[1] % 2,
    "seed": 5,
    "summary": True,
    "execution": "vectorized",
    "chunk_size": 2,
    "compile": True,
    "data_on_device": True,
    "client_settings": lambda client: {"lr": 0.01} if client else {},
    "client_memory_limit": 0,
    "personal_test": 0.2,
    "personal_clients": 2,
    "allow_changes": ["trainer"],
}
NEEDS = {
    "chunk_size": {"execution": "vectorized"},
    "compile": {"execution": "vectorized"},
    "participants": {"clients_per_round": None},
    "personal_clients": {"personal_test": "matched_labels", "allow_changes": ["personal_test"]},
    "privacy": {"weighting": "uniform"},
}
WITHOUT_EFFECT = {*("summary", "data_on_device", "client_memory_limit", "allow_changes"), "personal_clients"}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    folder = tmp_path_factory.mktemp("begun")
    return run(folder, BASE), folder / "epoch=0.ckpt"


def test_every_setting_is_asked_for():
    assert set(CHANGED) == {each.name for each in dataclasses.fields(FederatedSettings)}


@daily("clients_per_round", "local_epochs", "weighting", "optimizer_state", "client_settings", "buffers", "summary")
@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_setting(tmp_path, begun, name):
    expected, checkpoint = begun
    settings = {**BASE, **NEEDS.get(name, {}), name: CHANGED[name]}
    found = check_change(name, expected, lambda: run(tmp_path, settings, checkpoint=checkpoint))
    assert found == ("no effect" if name in WITHOUT_EFFECT else "refused")


def test_a_checkpoint_of_an_older_release_has_the_defaults_of_newer_settings(tmp_path, begun):
    expected, checkpoint = begun
    saved = torch.load(checkpoint, weights_only=False)
    for name in ("min_clients", "client_dropout", "objective"):
        del saved["callbacks"]["FederatedLoop"]["fingerprint"][name]
    older = tmp_path / "older.ckpt"
    torch.save(saved, older)
    assert_same(expected, run(tmp_path, BASE, checkpoint=older))
    with pytest.raises(MisconfigurationException, match=r"client_dropout: 0\.0 in the checkpoint, 0\.5 now"):
        run(tmp_path, {**BASE, "client_dropout": 0.5}, checkpoint=older)
    # Layers of other shapes are refused before their values are loaded.
    with pytest.raises(MisconfigurationException, match=r"callbacks"):
        run(tmp_path, BASE, [low_rank()], checkpoint=older)


PARTS: dict[str, Any] = {
    "partition": [Dirichlet(0.5, min_samples=5), LabelCount(2)],
    "uplink": [TopK(0.5), RandomK(0.5), Quantize(), Sign(), Half(), LowRankCodec(1)],
    "aggregator": [Median(), TrimmedMean(), MultiKrum(), GeometricMedian(), CenteredClipping(), NormBound()],
    "attackers": [SignFlip(), GaussianNoise(), InnerProduct(), ALIE(), LabelFlip(), Scaled()],
    "objective": [MaskAbsentClasses("net", classes=4)],
    "algorithm": [Renamed()],
}


@nightly_except(
    "ALIE", "GaussianNoise", "InnerProduct", "MaskAbsentClasses", "MultiKrum", "RandomK", "Sign", "TrimmedMean"
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "part"), [pytest.param(name, part, id=type(part).__name__) for name, all in PARTS.items() for part in all]
)
def test_changed_arguments_of_a_part(tmp_path, name, part):
    settings = (lambda each: {name: [each]}) if name == "uplink" else (lambda each: {name: each})
    shown = f"{name}.0" if name == "uplink" else name
    expected = run(tmp_path, settings(part))
    for argument, make in changes(part):
        if (type(part).__name__, argument) in (
            ("TopK", "count"),
            ("LowRankCodec", "budget"),
            ("LowRankCodec", "energy"),
        ):
            continue
        changed = settings(make())
        resumed = partial(run, tmp_path, changed, checkpoint=tmp_path / "epoch=0.ckpt")
        assert check_change(f"{shown}.{argument}", expected, resumed) == "refused"


def test_an_argument_that_no_attribute_has(tmp_path):
    run(tmp_path, {"algorithm": Renamed()}, max_epochs=1)
    with pytest.raises(MisconfigurationException, match=r"algorithm\.step.*1\.0.*0\.5"):
        run(tmp_path, {"algorithm": Renamed(0.5)}, checkpoint=tmp_path / "epoch=0.ckpt")


@nightly_except("FedAvg", "FedLoRA-CoLR", "FedMUD", "MOON", "TDPFed")
@each_method()
def test_changed_arguments_of_a_method(tmp_path, name):
    entry = METHODS[name]
    low_rank = LOW_RANK[entry.forms[0]]

    def again(algorithm: Algorithm, checkpoint=None):
        callbacks = [] if low_rank is None else [low_rank()]
        module = Module(entry.network(), optimizer=entry.optimizer)
        settings = {**entry.settings, "algorithm": algorithm}
        return run(tmp_path, settings, callbacks, module, checkpoint=checkpoint)

    expected = again(entry.make())
    for argument, make in changes(entry.make()):
        try:
            changed = make()
        except (MisconfigurationException, ValueError):
            # The value goes with another argument only.
            continue
        resumed = partial(again, changed, checkpoint=tmp_path / "epoch=0.ckpt")
        assert check_change(f"algorithm.{argument}", expected, resumed) == "refused"
    operator = getattr(entry.make(), "operator", None)
    for argument, make in [] if operator is None else changes(operator):
        resumed = partial(again, FedLoRA(make()), checkpoint=tmp_path / "epoch=0.ckpt")
        assert check_change(f"algorithm.operator.{argument}", expected, resumed) == "refused"


# LowRank

LOW: dict[str, Any] = {"factorization": MatrixProduct(), "rank": 2, "alpha": 2.0, "dropout": 0.2}
CHANGED_LOW: dict[str, Any] = {
    "factorization": MatrixProduct("raw"),
    "role": {"role": "weight", "alpha": None, "dropout": 0.0},
    "decouple": True,
    "half_frozen": True,
    "init": "uniform",
    "init_scale": 0.1,
    "alpha": 3.0,
    "rank_stabilized": True,
    "dropout": 0.3,
    "compute": "dense",
    "train_base": {"train_base": True, "alpha": None, "dropout": 0.0},
    "budget": {"budget": 0.5, "rank": None},
    "ratio": {"ratio": 0.3, "rank": None},
    "rank": 1,
    "rank_ratio": {"rank_ratio": 0.25, "rank": None},
    "budget_unit": {"budget": 200, "rank": None, "budget_unit": "parameters"},
    "budget_rule": {"budget": 0.5, "rank": None, "budget_rule": "authors"},
    "allocation": {"budget": 0.5, "rank": None, "allocation": "singular_values"},
    "include": ["net.0"],
    "exclude": ["net.0"],
    "skip": ["last"],
    "allow_larger": True,
    "freeze_rest": True,
    "keep_trained": {"freeze_rest": True, "keep_trained": ["net.4"]},
    "frobenius_decay": 0.1,
    "seed": 7,
    "summary": True,
    "convert_frozen": True,
}


def low_rank(name: str | None = None) -> LowRank:
    changed = {} if name is None else CHANGED_LOW[name]
    return LowRank(**{**LOW, "summary": False, **(changed if isinstance(changed, dict) else {name: changed})})


@pytest.fixture(scope="module")
def begun_low(tmp_path_factory):
    folder = tmp_path_factory.mktemp("low")
    return run(folder, {}, [low_rank()]), folder / "epoch=0.ckpt"


def test_every_argument_of_lowrank_is_asked_for():
    own = {"factorization", "frobenius_decay", "seed", "summary"}
    assert set(CHANGED_LOW) == own | {each.name for each in dataclasses.fields(LowRankSettings)}


@daily("rank", "alpha", "frobenius_decay", "summary")
@pytest.mark.parametrize("name", CHANGED_LOW)
def test_a_changed_argument_of_lowrank(tmp_path, begun_low, name):
    expected, checkpoint = begun_low
    shown = f"callbacks.LowRank.{name}"
    found = check_change(shown, expected, lambda: run(tmp_path, {}, [low_rank(name)], checkpoint=checkpoint))
    assert found == ("no effect" if name == "summary" else "refused")


# Data, trainer and optimizers


def shifted(batch):
    inputs, targets = default_collate(batch)
    return inputs + 1, targets


OUTSIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "batch size": ("data.batch_size", {"data": Data(batch_size=4)}),
    "drop_last": ("data.drop_last", {"data": Data(drop_last=True)}),
    "order": ("data.shuffle", {"data": Data(shuffle=False)}),
    "weights": (
        "data.weights: nothing in the checkpoint",
        {"data": Data(shuffle=False, sampler=WeightedRandomSampler([1.0] * 103, 103))},
    ),
    "collate": ("data.collate_fn", {"data": Data(collate_fn=shifted)}),
    "other data of the same size": ("data.content", {"data": Data(blobs(seed=8))}),
    "other labels": ("data.content", {"data": Data(TensorDataset(blobs().tensors[0], 3 - blobs().tensors[1]))}),
    "another size": ("data.samples", {"data": Data(blobs(90))}),
    "limit_train_batches": ("data.limit_train_batches", {"limit_train_batches": 2}),
    "overfit_batches": ("trainer.overfit_batches", {"overfit_batches": 2}),
    "accumulate_grad_batches": ("trainer.accumulate_grad_batches", {"accumulate_grad_batches": 2}),
    "clipping": ("trainer.gradient_clip_val", {"gradient_clip_val": 0.1}),
    "clipping algorithm": (
        "trainer.gradient_clip_algorithm",
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    ),
    "accumulation schedule": (
        "callbacks.GradientAccumulationScheduler",
        {"callbacks": [GradientAccumulationScheduler({0: 2})]},
    ),
    "precision": ("trainer.precision", {"precision": "bf16-mixed"}),
    "optimizer": ("optimizers.0", {"module": lambda: Module(optimizer=partial(torch.optim.Adam, lr=0.1))}),
    "learning rate": ("optimizers.0.lr", {"module": lambda: Module(optimizer=partial(torch.optim.SGD, lr=0.2))}),
    "scheduler": (
        "schedulers",
        {"module": lambda: Module(optimizer=SGD, scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1))},
    ),
    "layers": ("module.layers.net.1: 'ReLU()' in the checkpoint, 'Tanh()' now", {"module": lambda: with_tanh()}),
    "hyperparameters": ("module.hparams.smoothing", {"module": lambda: with_hyperparameters(smoothing=0.2)}),
    "frozen": ("module.trained", {"module": lambda: frozen(Module(optimizer=SGD))}),
}


def with_tanh():
    module = Module(optimizer=SGD)
    module.net[1] = nn.Tanh()
    return module


def with_hyperparameters(**given):
    module = Module(optimizer=SGD)
    module.save_hyperparameters(given)
    return module


def frozen(module):
    module.net[0].bias.requires_grad_(False)
    return module


@pytest.fixture(scope="module")
def begun_outside(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outside")
    return run(folder, {"partition": FromIndices([range(20), range(20, 50), range(50, 70), range(70, 90)])}), folder


@daily("batch size", "other data of the same size", "learning rate")
@pytest.mark.parametrize("case", OUTSIDE)
def test_a_change_outside_of_the_loop(tmp_path, begun_outside, case):
    expected, folder = begun_outside
    name, given = OUTSIDE[case]
    given = {key: value() if callable(value) else value for key, value in given.items()}
    settings = {"partition": FromIndices([range(20), range(20, 50), range(50, 70), range(70, 90)])}
    resumed = partial(run, tmp_path, settings, checkpoint=folder / "epoch=0.ckpt", **given)
    assert check_change(name, expected, resumed) == "refused"


class Temperature(nn.Module):
    """Shows its values, as torch's observers do."""

    def __init__(self, kind="soft"):
        super().__init__()
        self.kind = kind
        self.t = nn.Parameter(torch.ones(()))
        self.register_buffer("range", torch.tensor([-math.inf, 1.0]))

    def extra_repr(self):
        return f"kind={self.kind}, t={self.t.item():.4f}, small={1e-8 * self.t.item()}, range={self.range}"


def test_values_that_a_layer_shows_are_no_part_of_its_description():
    layer = Temperature()
    before = _layer(layer)
    layer.t.data.fill_(-2.5)
    layer.range = torch.tensor([math.nan, 1e-9, 3.0])
    assert _layer(layer) == before
    assert _layer(Temperature("hard")) != before
    assert _layer(nn.Linear(3, 4)) != _layer(nn.Linear(3, 5))
    assert _layer(nn.Dropout(0.1)) != _layer(nn.Dropout(0.2))


@pytest.mark.slow
def test_a_callback_that_changes_training(tmp_path):
    class Normed(Module):
        def forward(self, inputs):
            return self.net(inputs)

    def normed():
        return Normed(network(norm=nn.BatchNorm1d), optimizer=SGD)

    run(tmp_path, {}, module=normed(), data=Data(drop_last=True))
    again = trainer(tmp_path, FederatedLoop(FedAvg(), **COMMON), StaticBatchNorm())
    with pytest.raises(MisconfigurationException, match=r"callbacks\.StaticBatchNorm.*'StaticBatchNorm'"):
        fit(again, normed(), Data(drop_last=True), ckpt_path=tmp_path / "epoch=0.ckpt")


# What is allowed, and what is said


@pytest.mark.slow
def test_one_error_names_all_changes_and_each_may_be_allowed(tmp_path):
    run(tmp_path, BASE)
    other = {**BASE, "clients_per_round": 3, "algorithm": FedAvgM(lr=0.5), "local_steps": 2}
    with pytest.raises(MisconfigurationException) as error:
        run(tmp_path, other, checkpoint=tmp_path / "epoch=0.ckpt")
    lines = str(error.value).splitlines()
    assert "  algorithm.lr: 1.0 in the checkpoint, 0.5 now" in lines
    assert "  clients_per_round: 2 in the checkpoint, 3 now" in lines
    assert "  local_steps: None in the checkpoint, 2 now" in lines
    assert len(lines) == 5
    assert "allow_changes=['algorithm.lr', 'clients_per_round', 'local_steps']" in lines[-1]
    some = {**other, "allow_changes": ["algorithm", "clients_per_round"]}
    with pytest.raises(MisconfigurationException, match="local_steps") as error:
        run(tmp_path, some, checkpoint=tmp_path / "epoch=0.ckpt")
    assert "algorithm.lr" not in str(error.value)
    allowed = ["algorithm", "clients_per_round", "local_steps"]
    run(tmp_path, {**other, "allow_changes": allowed}, checkpoint=tmp_path / "epoch=0.ckpt")


def test_inside_a_round_nothing_may_change(tmp_path):
    every = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    fit(trainer(tmp_path, FederatedLoop(FedAvg(), **COMMON), every, max_epochs=1), Module(), Data())
    inside = min(tmp_path.glob("step=*.ckpt"), key=lambda file: int(file.stem.split("=")[1]))
    changed = {"local_steps": 2, "allow_changes": ["local_steps"]}
    with pytest.raises(MisconfigurationException, match="saved between rounds"):
        run(tmp_path, changed, module=Module(), checkpoint=inside)


@pytest.mark.slow
def test_what_cannot_be_told_apart_is_said(tmp_path):
    run(tmp_path, {"weighting": lambda client: 1.0})
    loop = FederatedLoop(FedAvg(), weighting=lambda client: 2.0, **COMMON)
    again = trainer(tmp_path, loop, max_epochs=2)
    with pytest.warns(UserWarning, match="weighting: it is unknown whether the checkpoint's run had the same function"):
        again.fit(Module(optimizer=SGD), Data(), ckpt_path=tmp_path / "epoch=0.ckpt")


@pytest.mark.slow
def test_functions_of_the_client_are_compared_by_what_they_give(tmp_path):
    run(tmp_path, {"client_settings": {0: {"lr": 0.1}, 1: {"lr": 0.1}, 2: {"lr": 0.1}, 3: {"lr": 0.1}}})
    run(tmp_path, {"client_settings": lambda client: {"lr": 0.1}}, checkpoint=tmp_path / "epoch=0.ckpt")
    with pytest.raises(MisconfigurationException, match=r"client_settings\.0.*0\.1.*0\.2"):
        run(tmp_path, {"client_settings": lambda client: {"lr": 0.2}}, checkpoint=tmp_path / "epoch=0.ckpt")


def test_checkpoints_hold_plain_python(tmp_path):
    run(tmp_path, {}, max_epochs=1, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
    saved = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)["callbacks"]["FederatedLoop"]["fingerprint"]
    assert saved["trainer"]["gradient_clip_algorithm"] == "norm"


@pytest.mark.slow
def test_a_random_reading_is_no_difference(tmp_path):
    class Noisy(TensorDataset):
        draws = torch.Generator()

        def __getitem__(self, index):
            inputs, target = super().__getitem__(index)
            return inputs + torch.randn(inputs.shape, generator=self.draws), target

    run(tmp_path, {}, data=Data(Noisy(*blobs().tensors)), max_epochs=1)
    torch.rand(1, generator=Noisy.draws)
    run(tmp_path, {}, data=Data(Noisy(*blobs().tensors)), checkpoint=tmp_path / "epoch=0.ckpt")


@pytest.mark.slow
def test_the_process_draws_as_without_a_checkpoint(tmp_path):
    torch.manual_seed(3)
    run(tmp_path, {}, max_epochs=1)
    drawn = torch.rand(3)
    torch.manual_seed(3)
    fit(trainer(tmp_path, FederatedLoop(FedAvg(), **COMMON), max_epochs=1), Module(optimizer=SGD), Data())
    assert torch.equal(drawn, torch.rand(3))


def test_descriptions_are_the_same_in_every_process():
    described = describe({"a": {3, 1}, "b": torch.arange(3), "c": [range(100)], "d": partial(max, default=1)})
    assert described == {
        "a": ["1", "3"],
        "b": "int64 [3], digest cf5ddb2411b6887b",
        "c": described["c"],
        "d": {"class": "partial function max", "args": [], "default": 1},
    }
    assert dict(flatten({"uplink": [{"class": "TopK", "share": 0.5}]})) == {
        "uplink": ["TopK"],
        "uplink.0": "TopK",
        "uplink.0.share": 0.5,
    }
    assert describe([np.float32(0.5), math.nan, np.array(["a"], dtype=object), TrainerFn.FITTING]) == [
        0.5,
        "nan",
        ["a"],
        "fit",
    ]
    assert differences({"a": {"class": "A", "x": 1}, "b": 1}, {"a": {"class": "B"}, "c": 2}).keys() == {"a", "b", "c"}


def test_values_that_a_state_dict_leaves_out_are_described():
    teacher = nn.Sequential(nn.BatchNorm1d(3))
    described = describe(teacher)
    teacher.register_state_dict_post_hook(lambda module, state, *_: state.clear())
    assert describe(teacher) == described
    teacher[0].running_mean += 1
    assert describe(teacher) != described


def test_the_checkpoint_of_a_server_of_sites_is_refused():
    saved = {"algorithm": "FedAvg", "seed": 0, "execution": "sites", "server": {}}
    with pytest.raises(MisconfigurationException, match="saved by the server of real sites"):
        FederatedLoop(FedAvg(), clients=2).load_state_dict(saved)
