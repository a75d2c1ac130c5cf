import copy
import inspect
import json
import math
import re

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import (
    ConvergenceMonitor,
    Dirichlet,
    FedAdam,
    FedAvg,
    FederatedLoop,
    FedHM,
    FedLoRA,
    FedMUD,
    FedProx,
    LabelCount,
    LoRAA2,
    LowRank,
    MatrixProduct,
    ProjectedSGD,
    Quantize,
    StaticBatchNorm,
    TopK,
    arguments,
    configuration,
)
from lightning_lowrank.layers import LowRankLinear, convert
from tests.algorithms.methods import METHODS
from tests.helpers import Data, Module, assert_same, fit, trainer, weights


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        (-1, {"least": 0}, "x must be at least 0 and finite, but is -1."),
        (0, {"above": 0}, "x must be above 0 and finite, but is 0."),
        (1.0, {"least": 0, "below": 1}, "x must be at least 0 and below 1, but is 1.0."),
        (1.5, {"above": 0, "most": 1}, "x must be above 0 and at most 1, but is 1.5."),
        (math.inf, {}, "x must be finite, but is inf."),
        (math.nan, {"least": 0, "most": 1}, "x must be at least 0 and at most 1, but is nan."),
        (
            0,
            {"above": 0, "hint": "None for infinity"},
            "x must be above 0 and finite, but is 0; use None for infinity.",
        ),
    ],
)
def test_numbers_out_of_bounds(value, bounds, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        arguments.check_number("x", value, **bounds)
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
        configuration.check_number("x", value, **bounds)


def test_bounds_are_inclusive_where_they_say_so():
    arguments.check_number("x", 0, least=0, below=1)
    arguments.check_number("x", 1, above=0, most=1)
    arguments.check_number("x", -5.0)
    arguments.check_integer("x", 0, least=0)
    arguments.check_integer("x", -3, least=None)


@pytest.mark.parametrize("value", [True, "1", None, 1j])
def test_what_is_no_number(value):
    with pytest.raises(TypeError, match="x must be a number, but is "):
        arguments.check_number("x", value)
    with pytest.raises(TypeError, match="x must be an integer, but is "):
        arguments.check_integer("x", value)
    with pytest.raises(MisconfigurationException, match="x must be an integer, but is "):
        configuration.check_integer("x", value)


NUMPY = {"rank": np.int64(2), "alpha": np.float32(4), "dropout": np.float16(0.5)}


def test_numbers_of_numpy_are_pythons_where_they_are_kept():
    low_rank = LowRank(MatrixProduct(), **NUMPY, seed=np.int32(3), summary=False)
    conversion = low_rank.convert(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    assert json.loads(json.dumps(conversion.specs[0].to_dict()))["rank"] == 2
    assert type(low_rank.seed) is int
    assert (low_rank.settings.alpha, low_rank.settings.dropout) == (4, 0.5)
    convert(nn.Sequential(nn.Linear(6, 6)), MatrixProduct(), rank={"0": np.int64(1)}, seed=np.int64(3))
    layer = LowRankLinear.from_dense(nn.Linear(6, 6), MatrixProduct(), rank=np.int64(2), seed=np.uint8(3))
    assert type(layer.rank) is int
    optimizer = ProjectedSGD(nn.Linear(6, 6).parameters(), lr=np.float64(0.1), rank=np.int64(2))
    assert type(optimizer.param_groups[0]["rank"]) is int


@pytest.mark.parametrize(
    "make",
    [
        lambda number, share: FedMUD(number),
        lambda number, share: FedProx(share),
        lambda number, share: FedAdam(share, betas=(share, share)),
        lambda number, share: FedLoRA(LoRAA2(), upload_ranks=number, levels=[share, share * 2]),
        lambda number, share: Quantize(number * 4, seed=number),
        lambda number, share: TopK(share),
        lambda number, share: Dirichlet(share, min_samples=number),
        lambda number, share: LabelCount(number),
        lambda number, share: StaticBatchNorm(number, from_round=number),
        lambda number, share: FederatedLoop(
            FedAvg(),
            clients=number * 4,
            clients_per_round=share,
            local_steps=number,
            seed=number,
            personal_test=share,
            client_dropout=share,
            sampling_weights=[share] * 4,
            chunk_size=number,
            execution="vectorized",
            client_memory_limit=number,
        ),
    ],
)
def test_numbers_of_numpy_work_wherever_a_number_does(make):
    plain, numpy = make(1, 0.5), make(np.int64(1), np.float32(0.5))
    assert repr(numpy) == repr(plain)
    assert "np." not in str(vars(numpy))


@pytest.mark.slow
def test_a_run_with_numbers_of_numpy_is_the_same(tmp_path):
    ends = []
    for number, share in ((2, 0.5), (np.int64(2), np.float64(0.5))):
        settings = {1: {"local_steps": number, "lr": share / 10}}
        loop = FederatedLoop(
            FedAvg(), clients=number * 2, clients_per_round=share, seed=number, summary=False, client_settings=settings
        )
        module, keep = Module(), ModelCheckpoint(tmp_path, "last")
        fit(trainer(tmp_path, LowRank(MatrixProduct(), rank=number, summary=False), loop, keep), module, Data())
        torch.load(tmp_path / "last.ckpt", weights_only=True)
        (tmp_path / "last.ckpt").unlink()
        ends.append(weights(module))
    assert_same(*ends)


def test_methods_show_their_arguments():
    for entry in METHODS.values():
        method = entry.make()
        shown = repr(method)
        assert shown.startswith(f"{type(method).__name__}(")
        assert " at 0x" not in shown
        for argument in inspect.signature(type(method)).parameters:
            assert hasattr(method, argument), (shown, argument)


def test_callbacks_show_their_arguments():
    assert repr(LowRank(MatrixProduct(), rank=3, decouple=True, seed=1)) == (
        "LowRank(factorization=MatrixProduct(layout='permuted'), decouple=True, rank=3, seed=1)"
    )
    loop = FederatedLoop(FedProx(0.1), clients=3, uplink=[TopK(0.1)], partition=Dirichlet(0.3), seed=2)
    assert repr(loop) == (
        "FederatedLoop(algorithm=FedProx(mu=0.1), clients=3, partition=Dirichlet(alpha=0.3),"
        " uplink=[TopK(share=0.1)], aggregator=WeightedMean(), seed=2)"
    )
    assert repr(StaticBatchNorm(from_round=2)) == "StaticBatchNorm(from_round=2)"
    assert repr(ConvergenceMonitor()) == "ConvergenceMonitor()"


def test_arguments_that_are_arrays_are_shown():
    class Own(arguments.Configured):
        def __init__(self, given=None, others=()):
            self.given, self.others = given, list(others)

    assert arguments.arguments_of(Own(np.ones(3))).keys() == {"given"}
    assert arguments.arguments_of(Own(torch.ones(3), [1])).keys() == {"given", "others"}
    assert arguments.arguments_of(Own()) == {}


def test_what_constructors_were_given():
    class Base(arguments.Configured):
        def __init__(self, kept, renamed=2, **rest):
            self.kept, self._renamed = kept, renamed

    class Own(Base):
        def __init__(self, more, *others):
            super().__init__(more + 1, renamed=7)

    class Plain:
        def __init__(self, x, y=3):
            self.x, self.hidden = x, y

    base = Base(1, z=5)
    assert arguments.recorded_arguments(base) == {"kept": 1, "renamed": 2, "z": 5}
    assert arguments.recorded_arguments(copy.deepcopy(base)) == {"kept": 1, "renamed": 2, "z": 5}
    base.kept = 4
    assert arguments.recorded_arguments(base)["kept"] == 4
    assert arguments.recorded_arguments(Own(1, 8, 9)) == {"more": 1, "others": (8, 9)}
    assert arguments.recorded_arguments(Plain(1)) == {"x": 1}
    recorded = arguments.recorded_arguments(FedHM(levels=[1, 0.5], shares=[2, 1]))
    assert (recorded["levels"], recorded["shares"], recorded["capacity"]) == ((1, 0.5), [2, 1], "fixed")
    with pytest.raises(TypeError, match=r"FedHM\.__init__\(\).*'no'"):
        FedHM(no=1)
    assert list(inspect.signature(FedHM).parameters)[:3] == ["levels", "capacity", "shares"]
