"""What rounds add up in modules of 16 bits is not lost to rounding."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_lowrank import (
    SCAFFOLD,
    BlockKronecker,
    CoLR,
    FedAvg,
    FedAvgM,
    FederatedLoop,
    FedEx,
    FedLoRA,
    FedMUD,
    FLoRA,
    FromIndices,
    LowRank,
    MatrixProduct,
    PFedMe,
)
from lightning_lowrank.federated import Message
from lightning_lowrank.federated.state import Base, ClientInfo, Server, trained_tensors
from lightning_lowrank.layers import low_rank_layers
from lightning_lowrank.testing import check_algorithm
from tests.helpers import Module, blobs, fit, network, trainer

CLIENTS = [list(range(40)), list(range(40, 60)), list(range(60, 103))]
ROUNDS = 6
METHODS = {
    "FLoRA": lambda: FedLoRA(FLoRA()),
    "FedEx": lambda: FedLoRA(FedEx()),
    "CoLR": lambda: FedLoRA(CoLR()),
    "FedMUD": FedMUD,
}


class Casting(Module):
    """Takes inputs of the parameters' type, whatever the data's is."""

    def loss(self, batch):
        inputs, targets = batch
        return nn.functional.cross_entropy(self.net(inputs.to(next(self.parameters()).dtype)).float(), targets)


def federate(folder, make, dtype, wrapped=False, blocks=False, data=None, rounds=ROUNDS, checkpoint=None, **settings):
    """Run a method on a module of ``dtype``, and return the module and the dense changes that it folded, in float64."""
    net = network()
    with torch.no_grad():
        for parameter in net.parameters():
            # Weights of a few units have a spacing of some hundredths, and change by less.
            parameter.add_(2)
    net.to(dtype)
    callbacks = []
    if wrapped:
        peft = pytest.importorskip("peft", reason="PEFT is not installed")
        torch.manual_seed(1)
        net = peft.get_peft_model(net, peft.LoraConfig(r=2, lora_alpha=2, target_modules=["0", "2"]))
    else:
        factorization, form = (BlockKronecker(), {"decouple": True}) if blocks else (MatrixProduct(), {"init": "lora"})
        how = {"rank": 2, "include": ["net.0", "net.2"], "allow_larger": True, **form}
        callbacks.append(LowRank(factorization, summary=False, freeze_rest=True, **how))
    module = Casting(net, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.003))
    algorithm, folded = make(), {}
    loop = FederatedLoop(algorithm, partition=FromIndices(CLIENTS), summary=False, **settings)
    fold = Base.fold

    def watched(base, name, weight, change):
        folded[name] = folded.get(name, 0) + change.double()
        fold(base, name, weight, change)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Base, "fold", watched)
        run = trainer(folder, *callbacks, loop, max_epochs=rounds, limit_val_batches=0)
        fit(run, module, DataLoader(data or blobs(), batch_size=8), ckpt_path=checkpoint)
    return run, module, loop, folded


def bases(module):
    ours = {name: layer.frozen_weight.detach() for name, layer in low_rank_layers(module)}
    theirs = {
        name: layer.get_base_layer().weight.detach()
        for name, layer in module.named_modules()
        if hasattr(layer, "get_base_layer") and hasattr(layer, "lora_A")
    }
    return {**ours, **theirs}


CASES = [
    ("FLoRA", torch.bfloat16, {}),
    ("FedEx", torch.float16, {}),
    ("CoLR", torch.bfloat16, {}),
    ("FedMUD", torch.bfloat16, {"blocks": True}),
    ("FLoRA", torch.bfloat16, {"wrapped": True}),
    ("CoLR", torch.float16, {"wrapped": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "dtype", "form"), CASES)
def test_a_base_of_sixteen_bits_has_the_sum_of_all_changes(tmp_path, method, dtype, form):
    _, module, _, folded = federate(tmp_path, METHODS[method], dtype, **form)
    start = (network()[0].weight.detach() + 2).to(dtype), (network()[2].weight.detach() + 2).to(dtype)
    for before, (name, weight) in zip(start, bases(module).items(), strict=True):
        exact = before.double() + folded[name]
        assert weight.dtype == dtype
        assert (exact - before.double()).abs().max() > 0
        # Nothing but one rounding; the sum itself is one of single precision.
        assert torch.equal(weight, exact.float().to(dtype)) or torch.allclose(
            weight.double(), exact, rtol=torch.finfo(dtype).eps / 2 * 1.001, atol=1e-6
        )


def test_a_change_that_travels_as_a_matrix_is_not_rounded_to_sixteen_bits():
    draws = torch.Generator().manual_seed(0)
    module = Casting(network()).to(torch.bfloat16)
    LowRank(MatrixProduct(), rank=4, init="lora", freeze_rest=True, allow_larger=True, summary=False).convert(module)
    algorithm, base = FedLoRA(FLoRA()), Base(module, seed=0)
    algorithm.setup(base)
    server = Server(base, clients=9, model=trained_tensors(module))
    pairs = [(torch.randn(16, 4, generator=draws), torch.randn(16, 4, generator=draws)) for _ in range(9)]
    for client, (left, right) in enumerate(pairs):
        sent = {name: server.model[name].clone() for name in algorithm._ranks.adapters.factors}
        sent |= {"net.2.factors.U": left.bfloat16(), "net.2.factors.V": right.bfloat16()}
        algorithm.receive(server, ClientInfo(client, samples=1, round=0, seed=0), Message(sent), 1.0)
    before = module.net[2].frozen_weight.double()
    algorithm.aggregate(server)
    change = server.announcement["net.2.change.product"]
    assert change.dtype == torch.float32
    # What it differs by is the rounding of each factor's share alone, not that of their sum.
    exact = sum((left.bfloat16() / 9).bfloat16().double() @ right.bfloat16().double().T for left, right in pairs)
    torch.testing.assert_close(change.double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(module.net[2].frozen_weight, (before + exact).bfloat16())


class Sixteen(Casting):
    """Stays in 16 bits whatever it is told."""

    def to(self, *arguments, **keywords):
        return super().to(*arguments, **keywords).to_sixteen()

    def to_sixteen(self):
        return super().to(torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["FLoRA", "FedMUD"])
@pytest.mark.nightly
def test_sites_and_resumed_runs_have_the_same_sum(method):
    """The sum is part of what every side holds, so that all round alike."""
    form = {"rank": 2, "init": "lora", "freeze_rest": True, "allow_larger": True, "summary": False}
    check_algorithm(
        METHODS[method],
        module=lambda norm: Sixteen(network(norm=norm)),
        lowrank=lambda: LowRank(MatrixProduct(), **form),
        parts=["sites", "resume"],
    )


@pytest.mark.parametrize(
    ("algorithm", "share"),
    [(FedAvg(), 1), (FedAvgM(momentum=0, lr=0.5), 0.5), (PFedMe(mixing=0.5), 0.5), (SCAFFOLD(lr_server=0.5), 0.5)],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_changes_below_the_spacing_add_up(algorithm, share, dtype):
    """A quarter of the clients moves a weight by its spacing, in each of 40 rounds."""
    module = nn.Linear(1, 1, bias=False).to(dtype)
    server = Server(Base(module, seed=0), clients=100, model={"weight": torch.ones(1, 1, dtype=dtype)})
    spacing = torch.finfo(dtype).eps
    for _ in range(40):
        algorithm.begin_round(server)
        for client, weight in enumerate((3.0, 1.0)):
            sent = {"weight": server.model["weight"] + client * spacing}
            if isinstance(algorithm, SCAFFOLD):
                sent["scaf.own.weight"] = torch.full_like(sent["weight"], 0.01)
            algorithm.receive(server, ClientInfo(client, 1, 0, 0), Message(sent), weight)
        algorithm.aggregate(server)
        server.aggregator = server.aggregator.fresh()
    assert server.model["weight"].dtype == dtype
    assert abs(server.model["weight"].double().item() - (1 + 10 * share * spacing)) <= spacing / 2
    if isinstance(algorithm, SCAFFOLD):
        control = server.state["control"]["weight"].double().item()
        assert control == pytest.approx(40 * 2 * 0.01 / 100, rel=5e-3)
        assert algorithm.broadcast(server, ClientInfo(0, 1, 0, 0)).tensors["scaf.all.weight"].dtype == dtype
