"""Quantised bases: no operator touches their weights, and what it changes is kept beside them.

The stand-in keeps integers and a scale, as bitsandbytes' layers do. Those of bitsandbytes and torchao are tested where
they are installed.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import (
    CoLR,
    FederatedLoop,
    FedEx,
    FedLoRA,
    FLoRA,
    FromIndices,
    ProductSum,
    SumProduct,
    TrainedCheckpoints,
    export_adapter,
)
from lightning_lowrank.interop.checkpoints import adapter_checkpoint
from lightning_lowrank.lora import keep_base_changes
from tests.grids import nightly_except
from tests.helpers import Data, Module, fit, trainer
from tests.interop.helpers import peft

CLIENTS = [list(range(40)), list(range(40, 60)), list(range(60, 103))]
KINDS = ["stand-in", "packing", "4bit", "8bit", "torchao"]


class StandIn(nn.Linear):
    """A linear layer whose weight is of 8 bits, with one scale."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features)
        scale = linear.weight.detach().abs().max() / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.bias = nn.Parameter(linear.bias.detach().clone())
        self.scale = float(scale)

    def dense(self):
        return self.weight.float() * self.scale

    def forward(self, inputs):
        return F.linear(inputs, self.dense(), self.bias)


class Packing(StandIn):
    """As bitsandbytes does on some CPUs: the weight is packed in another order once the layer is evaluated."""

    def __init__(self, linear):
        super().__init__(linear)
        self.weight.quant_state = {"packed": False}

    def dense(self):
        weight = super().dense()
        return weight.flip(0) if self.weight.quant_state["packed"] else weight

    def pack(self, packed):
        if self.weight.quant_state["packed"] != packed:
            self.weight.data = self.weight.data.flip(0)
            self.weight.quant_state["packed"] = packed

    def forward(self, inputs):
        if not self.training:
            self.pack(True)
        return super().forward(inputs)

    def _save_to_state_dict(self, *arguments):
        self.pack(False)
        super()._save_to_state_dict(*arguments)


def network():
    # Sides that bitsandbytes' kernels for processors take.
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def quantised(kind):
    """Return a network whose middle layer is quantised."""
    torch.manual_seed(0)
    net = network()
    if kind == "torchao":
        torchao = pytest.importorskip("torchao.quantization")
        torchao.quantize_(net, torchao.Int8WeightOnlyConfig(), filter_fn=lambda layer, name: name == "2")
        return net
    old = net[2]
    if kind in ("stand-in", "packing"):
        net[2] = (StandIn if kind == "stand-in" else Packing)(old)
        return net
    bnb = pytest.importorskip("bitsandbytes")
    sides = old.in_features, old.out_features
    if kind == "4bit":
        net[2] = bnb.nn.Linear4bit(*sides, compute_dtype=torch.float32, quant_type="nf4")
    else:
        net[2] = bnb.nn.Linear8bitLt(*sides, has_fp16_weights=False)
    net[2].load_state_dict(old.state_dict())
    # As transformers says of the models that it loads.
    setattr(net, f"is_loaded_in_{kind}", True)
    return net.to("cpu")


def dequantised(kind):
    """Return the dense network of the same function."""
    net, plain = quantised(kind), network()
    with torch.no_grad():
        for place, layer in enumerate(net):
            if not isinstance(layer, nn.Linear):
                continue
            plain[place].bias.copy_(layer.bias)
            if isinstance(layer, StandIn):
                plain[place].weight.copy_(layer.dense())
            else:
                columns = layer(torch.eye(layer.in_features)) - layer.bias
                plain[place].weight.copy_(columns.T)
    return plain


def wrap(net, **settings):
    torch.manual_seed(1)
    given = {"r": 2, "lora_alpha": 4, "target_modules": ["0", "2"], "modules_to_save": ["4"], **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft().get_peft_model(net, peft().LoraConfig(**given))


def federate(folder, net, operator, rounds=3, checkpoint=None, callbacks=(), module=None, validated=False, **settings):
    module = Module(wrap(net)) if module is None else module
    loop = FederatedLoop(FedLoRA(operator), partition=FromIndices(CLIENTS), summary=False, **settings)
    run = trainer(folder, loop, *callbacks, max_epochs=rounds, limit_val_batches=1.0 if validated else 0)
    fit(run, module, Data(), ckpt_path=checkpoint)
    return run, module, loop


def stored(net):
    """Return the quantised weight's numbers."""
    # That undoes what evaluation has packed.
    net.state_dict()
    weight = next(
        part.get_base_layer().weight for part in net.modules() if hasattr(part, "lora_A") and part.in_features == 64
    )
    return weight.dequantize() if weight.is_floating_point() else weight


INPUTS = torch.randn(9, 6, generator=torch.Generator().manual_seed(2))


@nightly_except(
    "CoLR(trained_factor='B')-4bit",
    "FLoRA()-4bit",
    "FedEx()-4bit",
    "FedEx()-torchao",
    "ProductSum()-torchao",
    "SumProduct(split='left', method='exact')-torchao",
)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operator", [ProductSum(), SumProduct(), FLoRA(), FedEx(), CoLR()], ids=repr)
def test_a_quantised_base_trains_as_the_dense_one_of_the_same_function(tmp_path, operator, kind):
    net = quantised(kind)
    _, module, loop = federate(tmp_path, net, operator)
    _, dense, plain = federate(tmp_path, dequantised(kind), operator)
    assert torch.equal(stored(module), stored(wrap(quantised(kind))))
    assert bool(loop.server.base.state.get("separate_changes")) == operator.changes_base
    # On processors, bitsandbytes rounds what goes into the layer too: to 8 bits, or to bfloat16 in evaluation.
    near = {"rtol": 0, "atol": {"8bit": 0.1, "4bit": 0.02}.get(kind, 1e-4)}
    with torch.no_grad():
        outputs = module.net.eval()(INPUTS)
        torch.testing.assert_close(outputs, dense.net.eval()(INPUTS), **near)
        assert (outputs - dequantised(kind)(INPUTS)).abs().max() > 0.3
    assert loop.ledger.state_dict()["total_up"] == plain.ledger.state_dict()["total_up"]

    # The adapter is whole on a base that is quantised alike.
    export_adapter(module, tmp_path / "adapter", base=quantised(kind))
    loaded = peft().PeftModel.from_pretrained(quantised(kind), tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(INPUTS), outputs, rtol=1e-4, atol=1e-4 if kind != "8bit" else 1e-2)


@nightly_except("FLoRA()-4bit", "FedEx()-packing", "ProductSum()-torchao")
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operator", [FLoRA(), FedEx(), ProductSum()], ids=repr)
def test_a_run_on_a_quantised_base_resumes_exactly(tmp_path, operator, kind):
    once, module, _ = federate(tmp_path, quantised(kind), operator, callbacks=[TrainedCheckpoints()], validated=True)
    first, _, _ = federate(
        tmp_path, quantised(kind), operator, rounds=2, callbacks=[TrainedCheckpoints()], validated=True
    )
    first.save_checkpoint(tmp_path / "two.ckpt")
    held = torch.load(tmp_path / "two.ckpt", weights_only=True)["state_dict"]
    assert "net.base_model.model.2.base_layer.weight" not in held
    settings = {"callbacks": [TrainedCheckpoints()], "validated": True}
    _, resumed, _ = federate(tmp_path, quantised(kind), operator, checkpoint=tmp_path / "two.ckpt", **settings)
    with torch.no_grad():
        assert torch.equal(resumed.net.eval()(INPUTS), module.net.eval()(INPUTS))
    assert once.current_epoch == 3
    # A checkpoint without the base has what is kept beside it.
    once.save_checkpoint(tmp_path / "three.ckpt")
    held = torch.load(tmp_path / "three.ckpt", weights_only=True)["state_dict"]
    assert "net.base_model.model.2.base_layer.weight" not in held
    new = Module(wrap(quantised(kind)))
    folder = adapter_checkpoint(tmp_path / "three.ckpt", tmp_path / "adapter", module=new)
    loaded = peft().PeftModel.from_pretrained(quantised(kind), folder).eval()
    with torch.no_grad():
        near = {"rtol": 1e-4, "atol": 1e-4 if kind != "8bit" else 1e-2}
        torch.testing.assert_close(loaded(INPUTS), module.net.eval()(INPUTS), **near)


@pytest.mark.slow
def test_the_change_becomes_a_matrix_once_that_has_fewer_numbers(tmp_path):
    for rounds, slots in ((1, 6), (5, 30), (6, None)):
        _, _, loop = federate(tmp_path, quantised("stand-in"), FLoRA(), rounds=rounds)
        (parts,) = loop.server.base.state["separate_changes"].values()
        shapes = {name: tuple(value.shape) for name, value in parts.items()}
        assert shapes == ({"product": (64, 64)} if slots is None else {"B": (64, slots), "A": (slots, 64)})


@pytest.mark.slow
def test_another_fit_goes_on_from_what_an_earlier_one_kept_beside(tmp_path):
    _, module, _ = federate(tmp_path, quantised("stand-in"), FLoRA(), rounds=2)
    with torch.no_grad():
        before = module.net.eval()(INPUTS)
    copied = copy.deepcopy(module)
    federate(tmp_path, None, FLoRA(), rounds=0, module=module)
    with torch.no_grad():
        torch.testing.assert_close(module.net.eval()(INPUTS), before)
        torch.testing.assert_close(copied.net.eval()(INPUTS), before)


@pytest.mark.parametrize(("rounds", "parts"), [(1, {"B", "A"}), (6, {"product"})])
def test_the_change_is_in_buffers_of_its_layer(tmp_path, rounds, parts):
    _, module, loop = federate(tmp_path, quantised("stand-in"), FLoRA(), rounds=rounds)
    prefix = "net.base_model.model.2.base_layer.lowrank_change_"
    state = module.state_dict()
    assert {name.removeprefix(prefix) for name in state if "change" in name} == parts
    (kept,) = loop.server.base.state["separate_changes"].values()
    assert all(torch.equal(state[prefix + part], value) for part, value in kept.items())
    with torch.no_grad():
        outputs = module.net.eval()(INPUTS)

    # They move with the module.
    twice = copy.deepcopy(module).double()
    assert all(twice.get_buffer(prefix + part).dtype == torch.float64 for part in parts)
    assert all(copy.deepcopy(module).to("meta").get_buffer(prefix + part).is_meta for part in parts)

    new = Module(wrap(quantised("stand-in")))
    plain = copy.deepcopy(new.state_dict())
    with pytest.raises(RuntimeError, match="lowrank_change_"):
        new.load_state_dict(state)
    keep_base_changes(new)
    for _ in range(2):
        new.load_state_dict(state)
        with torch.no_grad():
            assert torch.equal(new.net.eval()(INPUTS), outputs)
    # A state dict of before the change takes it away.
    new.load_state_dict(plain)
    with torch.no_grad():
        assert torch.equal(new.net.eval()(INPUTS), wrap(quantised("stand-in")).eval()(INPUTS))


def test_clients_neither_send_nor_reset_the_change(tmp_path):
    _, module, first = federate(tmp_path, quantised("stand-in"), FLoRA(), rounds=2)
    _, _, second = federate(tmp_path, None, FLoRA(), rounds=2, module=module)
    assert second.ledger.state_dict() == first.ledger.state_dict()
    assert not any("change" in name for name in second.server.model)
    one, two = (loop.server.base.state["separate_changes"]["net.base_model.model.2"]["B"] for loop in (first, second))
    assert torch.equal(two[:, : one.shape[1]], one)
    assert two.shape[1] == 2 * one.shape[1]


def test_what_cannot_keep_a_change_is_refused_before_the_first_round(tmp_path):
    for settings, said in (({"use_dora": True}, "DoRA's norms would leave out its separate change"),):
        module = Module(wrap(quantised("stand-in"), **settings))
        with pytest.raises(MisconfigurationException, match=rf"FLoRA\(\) changes base weights, and layer .*{said}"):
            federate(tmp_path, None, FLoRA(), module=module)


@pytest.mark.slow
@pytest.mark.parametrize("operator", [FLoRA(), FedEx()], ids=repr)
@pytest.mark.nightly
def test_clients_that_step_together_have_what_is_kept_beside(tmp_path, operator):
    """What a traced step reads of it is that of its round."""
    _, module, _ = federate(tmp_path, quantised("stand-in"), operator, rounds=4)
    _, together, loop = federate(tmp_path, quantised("stand-in"), operator, rounds=4, execution="vectorized")
    assert loop.state_dict()["execution"] == "vectorized"
    with torch.no_grad():
        torch.testing.assert_close(together.net.eval()(INPUTS), module.net.eval()(INPUTS), rtol=1e-4, atol=1e-5)
