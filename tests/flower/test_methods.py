"""Every method runs between sites as it does in a simulation: the same weights to rounding, the same bytes exactly."""

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from flwr.app import Array, ArrayRecord
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import ConvergenceMonitor, FederatedLoop, FromIndices, algorithms, export_adapter
from lightning_lowrank.compression import Dense, Half, LowRankCodec, Quantize, RandomK, TopK
from lightning_lowrank.federated import client_states
from lightning_lowrank.flower.recipe import Recipe
from lightning_lowrank.flower.remote_rounds import RemoteRounds
from lightning_lowrank.interop.checkpoints import adapter_checkpoint
from lightning_lowrank.lora import FedEx, FLoRA, LoRAA2
from tests.algorithms.methods import LOW_RANK, METHODS, MOMENTUM, Method, each_method
from tests.flower.helpers import run_on_sites
from tests.grids import nightly_except
from tests.helpers import Data, Module, fit, trainer

UNEVEN = [list(range(5)), list(range(5, 47)), list(range(47, 103))]
# Client 0 sits out the round in which it should hear most, and goes on from there.
PARTICIPANTS = [[0, 1, 2], [1, 2], [0, 2]]
TOGETHER = {"participants": PARTICIPANTS, "partition": FromIndices(UNEVEN)}


def recipe(
    tmp_path: Path, method: Method, form: str, limits=None, norm=None, data=None, callbacks=lambda: (), **settings
) -> Recipe:
    low_rank = [] if LOW_RANK[form] is None else [LOW_RANK[form]()]
    loop = FederatedLoop(method.make(), summary=False, **{**TOGETHER, **method.settings, **settings})
    module = Module(method.network(norm=norm), optimizer=method.optimizer)
    fitted = trainer(tmp_path, *low_rank, loop, *callbacks(), num_sanity_val_steps=0, **(limits or {}))
    return Recipe({}, module, Data() if data is None else data(), fitted, loop)


def on_sites(tmp_path, monkeypatch, method: Method, form: str, **settings):
    """Run a method between sites."""
    grid_settings = {name: settings.pop(name) for name in ("fresh", "prepare", "round_timeout") if name in settings}

    def build(content):
        torch.manual_seed(5)
        limits = {name: content["trainer"][name] for name in ("limit_val_batches",) if name in content["trainer"]}
        return recipe(tmp_path, method, form, limits, **settings)

    for module in ("site", "server"):
        monkeypatch.setattr(f"lightning_lowrank.flower.{module}.build", build)
    text = tmp_path / "recipe.yaml"
    text.write_text("in: Python")
    served, _ = run_on_sites(text, tmp_path, **grid_settings)
    return served


def both(tmp_path, monkeypatch, method: Method, form: str, fresh=False, **settings):
    """Run a method in a simulation and between sites, and compare them."""
    torch.manual_seed(5)
    simulated = recipe(tmp_path, method, form, **settings)
    fit(simulated.trainer, simulated.module, simulated.datamodule)
    served = on_sites(tmp_path, monkeypatch, method, form, fresh=fresh, **settings)
    one, other = simulated.module.state_dict(), served.lightning_module.state_dict()
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6, msg=lambda told, name=name: name + told)
    for name, value in simulated.trainer.callback_metrics.items():
        exact = {"rtol": 0, "atol": 0} if name.startswith("comm/") else {"rtol": 1e-4, "atol": 1e-5}
        if not name.startswith("train"):
            torch.testing.assert_close(served.callback_metrics[name].double(), value.double(), **exact)
    rounds = next(each for each in served.callbacks if isinstance(each, RemoteRounds))
    assert rounds.ledger.state_dict() == simulated.loop.ledger.state_dict()


KEEPS = {
    "FedAvg": ("dense", {}),
    "RandomCoordinates": ("dense", {"client": {"model"}}),
    "SCAFFOLD": ("dense", {"client": {"control"}}),
    "EF21P": ("dense", {"base": {"shared"}}),
    "FedMUD": ("update", {"base": {"factors", "folded"}, "frozen": True}),
    "FedLoRA-SumProduct": ("lora", {}),
    "FedLoRA-FedEx": ("lora", {"base": {"folded", "initial"}, "frozen": True}),
    "FedLoRA-RoLoRA": ("lora", {"client": {"received"}}),
}


# Those of KEEPS are compared by a test of their own.
CASES = [
    (name, form)
    for name, form in itertools.product(METHODS, LOW_RANK)
    if form in METHODS[name].forms and KEEPS.get(name, (None,))[0] != form
]


@pytest.mark.slow
@nightly_except("FedLoRA-RBLA-lora", "FedPer-dense", "HeteroFL-dense")
@pytest.mark.parametrize(("name", "form"), CASES)
def test_is_the_simulation(tmp_path, monkeypatch, name, form):
    method = METHODS[name]
    if name.startswith("FedLoRA") and form == "update":
        # The contract's learning rate is for factors that begin at zero.
        method = replace(method, optimizer=MOMENTUM)
    both(tmp_path, monkeypatch, method, form)


@nightly_except("FedBAT", "FedSB", "TDPFed")
@each_method(but=[*KEEPS, "FedLoRA-RBLA"])
def test_each_message_may_find_a_new_process(tmp_path, monkeypatch, name):
    both(tmp_path, monkeypatch, METHODS[name], METHODS[name].forms[0], fresh=True)


@pytest.mark.slow
@nightly_except("FedAvg")
@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.norm is not None])
def test_buffers_are_those_of_the_simulation(tmp_path, monkeypatch, name):
    form = METHODS[name].forms[0]
    both(tmp_path, monkeypatch, METHODS[name], form, norm=nn.BatchNorm1d, data=partial(Data, drop_last=True), **FULL)


FULL = {"partition": FromIndices([range(8), range(8, 47), range(47, 103)])}
SETTINGS = {
    "error feedback both ways": (
        "FedAvg",
        {"uplink": [TopK(0.2, error_feedback=True), Half()], "downlink": [TopK(0.3, error_feedback=True), Half()]},
    ),
    "random codecs": ("FedAvgM", {"uplink": [RandomK(0.5), Quantize(8)], "downlink": [Quantize(8)]}),
    "factors both ways": (
        "FedAvg",
        {
            "uplink": [LowRankCodec(2, error_feedback=True), Quantize(4)],
            "downlink": [LowRankCodec(energy=0.9, error_feedback=True), Half()],
        },
    ),
    "warm factors down": ("SCAFFOLD", {"downlink": [LowRankCodec(2, error_feedback=True)]}),
    "changes of a reset model": ("FedMUD", {"uplink": [Quantize(8, error_feedback=True)]}),
    "a method's own codec first": ("EF21P", {"uplink": [Half()]}),
    "control variates": ("SCAFFOLD", {"uplink": [Quantize(8)], "downlink": [Half()]}),
    "frozen weights both ways": ("FedMUD", {"uplink": [Quantize(8)], "downlink": [Quantize(8)]}),
    "a residual of frozen weights": ("FedLoRA-FedEx", {"downlink": [Half()]}),
    "stacked factors both ways": ("FedLoRA-FLoRA", {"uplink": [Quantize(8)], "downlink": [Quantize(8)]}),
    "one factor's change both ways": ("FedLoRA-CoLR", {"uplink": [Quantize(8)], "downlink": [Quantize(8)]}),
    "drawn factors": ("FedLoRA-FLoRA", {"uplink": [TopK(0.5, error_feedback=True)]}),
}


@pytest.mark.slow
@nightly_except("error feedback both ways", "frozen weights both ways")
@pytest.mark.parametrize("name", SETTINGS)
def test_channels_send_the_simulations_bytes(tmp_path, monkeypatch, name):
    method, settings = SETTINGS[name]
    both(tmp_path, monkeypatch, METHODS[method], METHODS[method].forms[0], fresh=True, **settings)


MORE = {
    "FedBAT, both ways": (Method(partial(algorithms.FedBAT, magnitudes=(5e-4, 1.0), compress_down=True)), "dense"),
    "FedMUD, resets every second round": (Method(partial(algorithms.FedMUD, reset_interval=2)), "update"),
    "FedLoRA, slots of the client's choice": (
        Method(lambda: algorithms.FedLoRA(LoRAA2(), upload_ranks=[1, 3])),
        "lora",
    ),
    "FedLoRA, parts that stay": (Method(lambda: algorithms.FedLoRA(LoRAA2(), keep=["net.4.bias"])), "lora"),
    "FedLoRA, ranks of two sizes behind a lossy downlink": (
        Method(
            lambda: algorithms.FedLoRA(FedEx(), levels=(1.0, 0.5)),
            settings={"uplink": [Quantize(8)], "downlink": [Quantize(8)]},
        ),
        "lora",
    ),
    "FedLoRA, drawn factors of two ranks through a sparse codec": (
        Method(lambda: algorithms.FedLoRA(FLoRA(), levels=(1.0, 0.5)), settings={"uplink": [TopK(0.5)]}),
        "lora",
    ),
    "FedAvg, kept momentum": (
        Method(algorithms.FedAvg, optimizer=MOMENTUM, settings={"optimizer_state": "keep"}),
        "dense",
    ),
    "FedSLoP, kept momentum": (
        Method(algorithms.FedSLoP, optimizer=METHODS["FedSLoP"].optimizer, settings={"optimizer_state": "keep"}),
        "dense",
    ),
}


@pytest.mark.slow
@nightly_except("FedAvg, kept momentum")
@pytest.mark.parametrize("name", MORE)
def test_other_forms_of_a_method(tmp_path, monkeypatch, name):
    both(tmp_path, monkeypatch, *MORE[name], fresh=True)


@pytest.mark.slow
@nightly_except("FedAvg", "FedMUD", "SCAFFOLD", "RandomCoordinates")
@pytest.mark.parametrize("name", KEEPS)
def test_a_site_keeps_what_it_needs(tmp_path, monkeypatch, name):
    form, keeps = KEEPS[name]
    both(tmp_path, monkeypatch, METHODS[name], form)
    kept = client_states.load(next((tmp_path / "state").glob("*client_2.safetensors")))
    assert kept["followed"] == 2
    assert not kept["pending"]
    for part in ("client", "base"):
        assert set(kept[part]) == keeps.get(part, set())
    assert bool(kept["frozen"]) == keeps.get("frozen", False)


@pytest.mark.slow
def test_slots_that_a_client_cannot_have_chosen_are_refused(tmp_path, monkeypatch):
    def tamper(node, reply):
        if node == 103 and reply.metadata.message_type == "train.round":
            ((number, array),) = reply.content.array_records["payloads"].items()
            tensors = Dense().decode(array.data)
            slots = next(name for name, value in tensors.items() if name.endswith(".slots") and len(value))
            data = Dense().encode({**tensors, slots: tensors[slots] + 50})
            reply.content["payloads"] = ArrayRecord({number: Array("uint8", (len(data),), array.stype, data)})
        return reply

    method, form = MORE["FedLoRA, slots of the client's choice"]
    served = on_sites(tmp_path, monkeypatch, method, form, prepare=lambda grid: setattr(grid, "tamper", tamper))
    assert served.callback_metrics["federated/failed"] == 1
    assert served.callback_metrics["federated/clients"] == 1


@pytest.mark.slow
@nightly_except("FedMUD")
@pytest.mark.parametrize("name", ["FedMUD", "FedLoRA-RoLoRA", "FedLoRA-FLoRA", "EF21P"])
def test_a_site_whose_answer_is_lost_goes_on(tmp_path, monkeypatch, name):
    """Client 0 trains in round 1, and nobody knows: it goes on in round 2 as if it had been there."""

    def prepare(grid):
        answered = []

        def tamper(node, reply):
            if node == 101 and reply.metadata.message_type == "train.round":
                answered.append(node)
                return None if len(answered) == 2 else reply
            return reply

        grid.tamper = tamper

    settings = {"participants": [[0, 1, 2]] * 4, "partition": FromIndices(UNEVEN)}
    form = METHODS[name].forms[0]
    served = on_sites(tmp_path, monkeypatch, METHODS[name], form, prepare=prepare, round_timeout=0.3, **settings)
    assert served.callback_metrics["federated/clients"] == 3
    assert all(value.isfinite().all() for value in served.lightning_module.state_dict().values())


@pytest.mark.nightly
def test_the_server_measures_convergence_as_the_simulation_does(tmp_path, monkeypatch):
    both(tmp_path, monkeypatch, METHODS["FedLoRA-RBLA"], "lora", callbacks=lambda: [ConvergenceMonitor()])


@pytest.mark.slow
def test_a_checkpoint_says_that_frozen_weights_were_changed(tmp_path, monkeypatch):
    method = METHODS["FedLoRA-FedEx"]
    saver = partial(ModelCheckpoint, tmp_path / "saved", "last")
    served = on_sites(tmp_path, monkeypatch, method, "lora", callbacks=lambda: [saver()])
    with pytest.raises(MisconfigurationException, match=r"FedLoRA .* folds updates into the frozen weights"):
        adapter_checkpoint(tmp_path / "saved" / "last.ckpt", tmp_path / "adapter")
    with pytest.raises(MisconfigurationException, match=r"FedLoRA .* folds updates into the frozen weights"):
        export_adapter(served.lightning_module, tmp_path / "adapter")
