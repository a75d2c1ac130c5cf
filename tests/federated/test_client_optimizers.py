"""Which optimizers clients may step together with, and the states in which these start."""

import contextlib
from collections import OrderedDict, defaultdict
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import TensorDataset

from lightning_lowrank import (
    CoLR,
    CoreProduct,
    FedAvg,
    FederatedLoop,
    FedLoRA,
    FedMUD,
    FedProx,
    FedSB,
    FLoRA,
    FromIndices,
    LowRank,
    MatrixProduct,
)
from lightning_lowrank.federated import client_optimizers, register_elementwise
from lightning_lowrank.federated.client_optimizers import ClientOptimizers, acts_elementwise, fresh_state
from lightning_lowrank.federated.protocols import ChangesBase
from lightning_lowrank.layers import low_rank_layers
from tests.federated.execution.runs import OPTIMIZERS, assert_close, both, run
from tests.grids import nightly_except
from tests.helpers import Data, Module, SaveEachStep, assert_same, blobs, fit, network, trainer, weights


class Lion(torch.optim.Optimizer):
    """Steps by the sign of a mixture of momentum and gradient."""

    def __init__(self, parameters, lr=0.01, betas=(0.9, 0.99)):
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["momentum"] = torch.zeros_like(parameter)
                state["step"] += 1
                parameter.sub_(group["lr"] * state["momentum"].lerp(parameter.grad, 1 - first).sign())
                state["momentum"].lerp_(parameter.grad, 1 - second)
        return loss


class Doubled(torch.optim.SGD):
    """A user's own variant of one of torch's."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(0.99)
        return loss


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(client_optimizers, "_ELEMENTWISE", list(client_optimizers._ELEMENTWISE))


@pytest.mark.slow
def test_a_registered_optimizer_steps_clients_together(tmp_path, registry):
    with pytest.raises(MisconfigurationException, match=r"lightning_lowrank\.federated\.register_elementwise"):
        run(tmp_path, "vectorized", module=partial(Module, optimizer=Lion))
    assert register_elementwise(Lion) is Lion
    ends = both(tmp_path, module=partial(Module, optimizer=Lion), optimizer_state="keep")
    assert ends[1][1].execution == "vectorized"


class Plain(torch.optim.SGD):
    """A variant of one of torch's that steps as it does."""


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["reset", "keep"])
def test_subclasses_of_known_optimizers_step_clients_together(tmp_path, kept, registry):
    made = partial(Plain, lr=0.05, momentum=0.9)
    both(tmp_path, module=partial(Module, optimizer=made), optimizer_state=kept)
    doubled = partial(Module, optimizer=partial(Doubled, lr=0.05, momentum=0.9))
    with pytest.raises(MisconfigurationException, match=r"Doubled.*register_elementwise"):
        run(tmp_path, "vectorized", module=doubled)
    register_elementwise(Doubled)
    both(tmp_path, module=doubled, optimizer_state=kept)


@pytest.mark.slow
def test_an_unknown_optimizer_makes_auto_train_one_after_another(tmp_path, capsys):
    _, loop, _ = run(tmp_path, "auto", module=partial(Module, optimizer=Lion))
    assert loop.rounds.execution.name == "sequential"
    assert "Lion is not known to act on each number alone" in " ".join(capsys.readouterr().out.split())


class Counted(torch.optim.SGD):
    """Steps less and less, by a counter of its own."""

    def __init__(self, parameters, lr=0.1, momentum=0.0):
        super().__init__(parameters, lr, momentum)
        self.steps, self.seen = 0, []

    def step(self, closure=None):
        self.steps += 1
        self.seen.append(self.steps)
        for group in self.param_groups:
            group["lr"] = 0.1 / len(self.seen)
        return super().step(closure)


class Lookahead(torch.optim.Optimizer):
    """Slow weights beside an optimizer inside (Zhang et al., 2019)."""

    def __init__(self, parameters, lr=0.1):
        # With what it holds itself.
        self.inner = Counted(parameters, lr)
        super().__init__([{"params": group["params"]} for group in self.inner.param_groups], {"lr": lr})
        self.slow = {value: value.detach().clone() for group in self.param_groups for value in group["params"]}
        self.number = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.inner.step(closure)
        self.number += 1
        if self.number % 3 == 0:
            for value, slow in self.slow.items():
                value.copy_(slow.lerp_(value, 0.5))
        return loss


class Prepared(torch.optim.Optimizer):
    """Makes its state when it is made, some of it with a graph."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        for group in self.param_groups:
            for value in group["params"]:
                self.state[value] = {"momentum": torch.zeros_like(value), "number": 0, "start": value.clone()}

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for value in group["params"]:
                state = self.state[value]
                state["number"] += 1
                state["momentum"].mul_(0.9).add_(value.grad)
                value.sub_(group["lr"] / state["number"] * state["momentum"]).lerp_(state["start"], 0.01)
        return loss


def of_torch():
    own = {"LBFGS": {"lr": 0.1, "max_iter": 2}, "SGD": {"lr": 0.1, "momentum": 0.9}, "Rprop": {"lr": 1e-3}}
    # Muon takes matrices alone, and SparseAdam sparse gradients.
    left = {"Optimizer", "SparseAdam", "Muon"}
    kinds = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    return {
        name: partial(kind, **own.get(name, {"lr": 0.01}))
        for name, kind in sorted(kinds.items())
        if issubclass(kind, torch.optim.Optimizer) and name not in left
    }


def of_others():
    found = {}
    with contextlib.suppress(ImportError):
        from transformers.optimization import Adafactor

        found["transformers.Adafactor"] = partial(Adafactor, lr=0.01, relative_step=False, scale_parameter=False)
    try:
        import pytorch_optimizer as others
    except ImportError:
        return found
    names = ("Lion", "Ranger", "AdaBelief", "Prodigy", "ScheduleFreeAdamW")
    return found | {
        "pytorch_optimizer.Lookahead": lambda p: others.Lookahead(torch.optim.AdamW(p, lr=0.01)),
        **{f"pytorch_optimizer.{name}": partial(getattr(others, name), lr=0.01) for name in names},
    }


ALONE = {**of_torch(), "Counted": Counted, "Lookahead": Lookahead, "Prepared": Prepared, **of_others()}


@pytest.mark.parametrize("name", ALONE)
def test_each_client_begins_with_the_optimizer_as_it_was_made(tmp_path, name):
    """Two clients after each other are two plain fits."""
    parts, ends = [range(40), range(40, 70)], []
    for part in parts:
        torch.manual_seed(0)
        module = Module(network(), optimizer=ALONE[name])
        data = Data(torch.utils.data.Subset(blobs(), part), shuffle=False)
        fit(trainer(tmp_path, max_epochs=2, limit_val_batches=0), module, data)
        ends.append(weights(module))
    ended = []

    class Watched(FedAvg):
        def end(self, client):
            ended.append({name: value.detach().clone() for name, value in client.model.items()})
            return super().end(client)

    torch.manual_seed(0)
    module = Module(network(), optimizer=ALONE[name])
    loop = FederatedLoop(Watched(), partition=FromIndices(parts), local_epochs=2, summary=False)
    fit(trainer(tmp_path, loop, max_epochs=1, limit_val_batches=0), module, Data(shuffle=False))
    for found, expected in zip(ended, ends, strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("kind", [Counted, Lookahead])
def test_what_an_optimizer_holds_is_kept_or_refused(tmp_path, kind):
    """With ``optimizer_state="keep"`` one client's rounds are one fit; an optimizer inside is not to be kept."""
    loop = FederatedLoop(FedAvg(), clients=1, optimizer_state="keep", summary=False)
    rounds, plain = (Module(network(), optimizer=kind) for _ in range(2))
    plain.load_state_dict(rounds.state_dict())
    made = trainer(tmp_path, loop, max_epochs=3, limit_val_batches=0)
    if kind is Lookahead:
        with pytest.raises(MisconfigurationException, match=r"optimizer_state='keep'.*Lookahead\.inner"):
            fit(made, rounds, Data(shuffle=False))
        return
    fit(made, rounds, Data(shuffle=False))
    fit(trainer(tmp_path, max_epochs=3, limit_val_batches=0), plain, Data(shuffle=False))
    assert_close(weights(rounds), weights(plain))


@pytest.mark.parametrize("kind", [Counted, Lookahead])
def test_a_client_begins_again_with_what_the_optimizer_held(tmp_path, kind):
    def run(*callbacks, **options):
        torch.manual_seed(0)
        loop = FederatedLoop(FedAvg(), clients=2, summary=False, seed=0)
        module = Module(network(), optimizer=kind)
        made = trainer(tmp_path, loop, *callbacks, max_epochs=1, limit_val_batches=0)
        return weights(fit(made, module, Data(), **options))

    whole = run(SaveEachStep(tmp_path))
    for step in (3, 8):
        assert_same(run(ckpt_path=tmp_path / f"step={step}.ckpt"), whole)


class Count(NamedTuple):
    steps: int
    name: str


class Holding(torch.optim.SGD):
    """Holds its own parameters and groups in its attributes, as keys and as values, in containers of several types."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr)
        self.param_groups[0]["count"] = Count(0, "group")
        values = [value for group in self.param_groups for value in group["params"]]
        self.slow = {value: value.detach().clone() for value in values}
        self.pairs = defaultdict(list, {"groups": self.param_groups, "first": (values[0], self.param_groups[0])})
        self.counts, self.orders = {values[0]: Count(0, "first")}, [OrderedDict(one=1, two=2)]

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for value, slow in self.slow.items():
            value.lerp_(slow, 0.5)
            slow.copy_(value)
        self.pairs["first"][0].sub_(0.01)
        self.pairs["first"][1]["lr"] *= 0.9
        self.pairs["groups"][0]["weight_decay"] += 0.01
        self.pairs[f"step {len(self.pairs)}"].append(1)
        self.orders[0].move_to_end("one")
        for table, key in ((self.counts, self.pairs["first"][0]), (self.param_groups[0], "count")):
            table[key] = table[key]._replace(steps=table[key].steps + 1)
            self.pairs["first"][0].sub_(0.01 / table[key].steps)
        return loss


@pytest.mark.parametrize("kind", [Holding, partial(torch.optim.LBFGS, lr=0.1, max_iter=2)], ids=["Holding", "LBFGS"])
def test_a_kept_attribute_still_holds_the_optimizers_own_parameters(tmp_path, kind):
    """Also after it was written to a file, and after a checkpoint."""

    def run(*callbacks, ckpt_path=None, **settings):
        torch.manual_seed(0)
        loop = FederatedLoop(FedAvg(), clients=2, optimizer_state="keep", summary=False, seed=0, **settings)
        module = Module(network(), optimizer=kind)
        made = trainer(tmp_path, loop, *callbacks, max_epochs=2, limit_val_batches=0)
        return weights(fit(made, module, Data(blobs(24), shuffle=False), ckpt_path=ckpt_path, weights_only=False))

    whole = run(ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1))
    assert_same(run(client_memory_limit=1), whole)
    assert_same(run(ckpt_path=tmp_path / "epoch=0.ckpt"), whole)


class LooksBetweenClients(Callback):
    """Collects the optimizer's state and counter where the module is the global model."""

    def __init__(self):
        self.found = []

    def on_validation_start(self, trainer, module):
        (optimizer,) = trainer.optimizers
        self.found.append((len(optimizer.state), optimizer.steps))


@pytest.mark.parametrize("policy", ["reset", "keep"])
def test_no_moments_of_a_client_are_left_between_clients(tmp_path, policy):
    """They would reach the global model by optimizers that change it in a validation, and checkpoints."""
    look, saved = LooksBetweenClients(), ModelCheckpoint(tmp_path)
    loop = FederatedLoop(FedAvg(), clients=2, optimizer_state=policy, summary=False)
    often = {"val_check_interval": 1, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    run = trainer(tmp_path, loop, look, saved, max_epochs=2, **often)
    fit(run, Module(network(), optimizer=partial(Counted, momentum=0.9)), Data(blobs(24)))
    assert look.found == [(0, 0)] * 4
    assert run.optimizers[0].state == {}
    assert torch.load(saved.best_model_path)["optimizer_states"][0]["state"] == {}


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)


class Switching(Module):
    """Has another optimizer from the second round on, or after the first step."""

    def __init__(self, other, way="setup", inside=False):
        super().__init__(network(), optimizer=SGD)
        self.other, self.way, self.inside, self.ages = other, way, inside, []

    def switch(self):
        self.make_optimizer = self.other
        if self.way == "setup":
            self.trainer.strategy.setup_optimizers(self.trainer)
        elif self.way == "list":
            self.trainer.optimizers = [self.other(self.parameters())]
        else:
            self.trainer.optimizers[0] = self.other(self.parameters())

    def on_train_epoch_start(self):
        if self.current_epoch == 1 and not self.inside:
            self.switch()

    def training_step(self, batch, batch_idx):
        state = self.trainer.optimizers[0].state
        self.ages += [len(state)] if batch_idx == 0 else []
        return super().training_step(batch, batch_idx)


class SwitchesInside(Switching):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.switch()


def switched(tmp_path, module, rounds=2, **settings):
    torch.manual_seed(0)
    loop = FederatedLoop(FedAvg(), clients=2, summary=False, seed=0, **settings)
    run = trainer(tmp_path, loop, max_epochs=rounds, limit_val_batches=0)
    fit(run, module(), Data(blobs(24), shuffle=False))
    return run


@pytest.mark.parametrize("way", ["setup", "list", "entry"])
def test_no_moments_pass_between_clients_after_the_optimizer_was_replaced(tmp_path, way):
    run = switched(tmp_path, partial(Switching, ADAM, way), rounds=3)
    assert isinstance(run.optimizers[0], torch.optim.Adam)
    assert run.lightning_module.ages == [0] * 6


class SetsUpAtStart(Module):
    """Replaces its optimizer as the fit starts, after the loop has looked at it."""

    def on_train_start(self):
        self.trainer.strategy.setup_optimizers(self.trainer)


def test_a_replaced_optimizer_goes_on_inside_a_resumed_round(tmp_path):
    def run(*callbacks, **resumed):
        torch.manual_seed(0)
        loop = FederatedLoop(FedAvg(), clients=2, summary=False, seed=0)
        made = trainer(tmp_path, loop, *callbacks, max_epochs=2, limit_val_batches=0)
        return weights(fit(made, SetsUpAtStart(network(), optimizer=ADAM), Data(blobs(24), shuffle=False), **resumed))

    whole = run(SaveEachStep(tmp_path))
    assert_same(run(ckpt_path=tmp_path / "step=3.ckpt"), whole)


def test_kept_moments_go_on_in_another_optimizer_of_their_kind_alone(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"optimizer_state='keep'.* SGD.* Adam"):
        switched(tmp_path, partial(Switching, ADAM), optimizer_state="keep")
    again, plain = (
        switched(tmp_path, module, optimizer_state="keep").lightning_module
        for module in (partial(Switching, SGD), lambda: Module(network(), optimizer=SGD))
    )
    assert again.ages == [0, 0, 6, 6]
    assert_same(weights(again), weights(plain))


def test_a_second_fit_does_not_take_moments_of_another_optimizer_up(tmp_path):
    module = Module(network(), optimizer=SGD)
    loop = FederatedLoop(FedAvg(), clients=2, optimizer_state="keep", summary=False)
    run = trainer(tmp_path, loop, max_epochs=1, limit_val_batches=0)
    fit(run, module, Data(blobs(24)))
    run.fit_loop.max_epochs, module.make_optimizer = 2, ADAM
    with pytest.raises(MisconfigurationException, match=r"optimizer_state='keep'.* SGD.* Adam"):
        fit(run, module, Data(blobs(24)))


def test_an_optimizer_that_is_replaced_where_it_cannot_be_is_refused(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"optimizers.*inside round 0"):
        switched(tmp_path, partial(SwitchesInside, ADAM, inside=True))
    with pytest.raises(MisconfigurationException, match=r"'vectorized'.*round 1.*Lion"):
        switched(tmp_path, partial(Switching, Lion), execution="vectorized")


class StepsItself(Switching):
    """Steps its second optimizer without Lightning's hooks."""

    def __init__(self):
        super().__init__(ADAM)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=self.current_epoch == 0)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def test_steps_of_a_replaced_optimizer_that_a_method_does_not_see_are_refused(tmp_path):
    loop = FederatedLoop(FedProx(0.1), clients=2, summary=False)
    with pytest.raises(MisconfigurationException, match=r"step\(\) of Adam itself"):
        fit(trainer(tmp_path, loop, max_epochs=2, limit_val_batches=0), StepsItself(), Data(blobs(24)))


CLIENTS = [list(range(first, 40, 4)) for first in range(4)]
PARTICIPANTS = [[0, 1, 2, 3], [0, 1], [1, 2, 3], [0, 1, 2, 3]]
LORA = partial(LowRank, MatrixProduct(), rank=2, init="lora", freeze_rest=True, allow_larger=True, summary=False)
CORES = partial(LowRank, CoreProduct(), rank=2, freeze_rest=True, allow_larger=True, summary=False)
FACTORS = partial(LowRank, MatrixProduct(), rank=2, role="update", allow_larger=True, summary=False)
DRAWN = {
    "FedMUD": (FedMUD, FACTORS),
    "FedMUD of two rounds": (partial(FedMUD, reset_interval=2), FACTORS),
    "FLoRA": (lambda: FedLoRA(FLoRA()), LORA),
    "CoLR": (lambda: FedLoRA(CoLR()), LORA),
    "FedSB": (partial(FedSB, subspace_rounds=3), CORES),
}


class Once(Module):
    """Has gradients in the first round alone."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss if self.trainer.current_epoch == 0 else 0.0 * loss


def kept_run(tmp_path, name, module=Module, rounds=4, ckpt_path=None, callbacks=(), **settings):
    make, low_rank = DRAWN[name]
    given = {"partition": FromIndices(CLIENTS), "participants": PARTICIPANTS, "optimizer_state": "keep", **settings}
    loop = FederatedLoop(make(), summary=False, **given)
    fitted = module(network().double(), OPTIMIZERS["momentum"])
    run = trainer(tmp_path, low_rank(), loop, *callbacks, max_epochs=rounds, limit_val_batches=0)
    data = blobs(40)
    data = TensorDataset(data.tensors[0].double(), data.tensors[1])
    fit(run, fitted, Data(data, shuffle=False), ckpt_path=ckpt_path)
    return fitted, loop


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
@pytest.mark.parametrize("name", ["FedMUD", "FLoRA", "CoLR"])
def test_moments_of_old_factors_do_not_move_new_ones(tmp_path, name, execution):
    """A round without a gradient leaves the layers as they are."""
    ends = []
    for rounds in (1, 2):
        module, _ = kept_run(tmp_path, name, Once, rounds, execution=execution)
        ends.append({each: layer.weight.detach().clone() for each, layer in low_rank_layers(module)})
    assert ends[0]
    for each, weight in ends[0].items():
        assert torch.allclose(weight, ends[1][each], atol=1e-9), each


@nightly_except("CoLR", "FedSB")
@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_moments_of_old_factors_are_forgotten_in_every_execution_and_after_resuming(tmp_path, name):
    keep = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    whole, loop = kept_run(tmp_path, name, callbacks=[keep])
    together, _ = kept_run(tmp_path, name, execution="vectorized")
    for each, value in weights(whole).items():
        assert torch.allclose(value, weights(together)[each], atol=1e-9), each
    again, _ = kept_run(tmp_path, name, ckpt_path=tmp_path / "epoch=1.ckpt")
    assert_same(weights(whole), weights(again))
    assert any(loop.coordinator.states[0]["optimizers"][0])


def moments_of(module, optimizer, drawn):
    """The client optimizers of a method that draws parameters in these rounds."""

    class Draws(ChangesBase):
        def drawn_in(self, name, round_number):
            return drawn[name]

    module.automatic_optimization = True
    own = SimpleNamespace(lightning_module=module, optimizers=[optimizer], lr_scheduler_configs=[], callbacks=[])
    return ClientOptimizers(own, FederatedLoop(Draws(), clients=1, optimizer_state="keep"))


def test_moments_are_kept_until_their_parameter_is_drawn_anew():
    module = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(module.parameters())
    drawn = {"weight": 0, "bias": 0}
    moments = moments_of(module, optimizer, drawn)
    state, fresh = {}, {}
    moments.forget(state, 0)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    moments.keep(state)
    kept = state["optimizers"][0]
    moments.forget(state, 3)
    assert state["optimizers"][0] == kept
    assert moments.key(0, state, 4) != moments.key(0, fresh, 4)
    drawn["bias"] = 5
    # What it will be is known beforehand, and nothing is dropped by asking.
    key = moments.key(0, state, 5)
    assert state["optimizers"][0].keys() == {0, 1}
    moments.forget(state, 5)
    assert state["optimizers"][0].keys() == {0}
    assert moments.key(0, state, 5) == key
    drawn["weight"] = 6
    assert moments.key(0, state, 6) == moments.key(0, fresh, 6)


def test_subspaces_go_with_their_moments():
    module = nn.Linear(3, 2)
    drawn = {"weight": 2, "bias": 0}
    moments = moments_of(module, torch.optim.SGD(module.parameters()), drawn)
    state = {"optimizers": {0: {0: {}, 1: {}}}, "subspaces": {0: [((5, 1, True), (6, 1, True))]}, "moments.current": 1}
    moments.forget(state, 3)
    assert state["optimizers"] == {0: {1: {}}}
    assert state["subspaces"] == {0: [(None, (6, 1, True))]}


def test_what_is_registered_must_be_a_class_of_optimizers(registry):
    for wrong in (Lion([nn.Parameter(torch.zeros(1))]), nn.Linear, "Lion"):
        with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
            register_elementwise(wrong)


def test_what_acts_on_each_number_alone():
    parameters = [nn.Parameter(torch.ones(2, 3))]
    assert all(acts_elementwise(make(parameters)) for make in OPTIMIZERS.values())
    assert acts_elementwise(Plain(parameters, lr=0.1))
    assert not acts_elementwise(Doubled(parameters, lr=0.1))
    assert not acts_elementwise(torch.optim.LBFGS(parameters))
    assert not acts_elementwise(torch.optim.Adafactor(parameters))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_fresh_state_is_that_of_a_new_optimizer(optimizer):
    parameters = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4))]
    new, used = (OPTIMIZERS[optimizer](parameters) for _ in range(2))
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    used.step()
    fresh = fresh_state(used)
    assert fresh.keys() == new.state.keys()
    for parameter, state in new.state.items():
        assert_close(state, fresh[parameter], tolerance=0)


def test_an_option_that_no_optimizer_has_is_named(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"1.*optimizer.*'rate'"):
        run(
            tmp_path,
            "sequential",
            module=partial(Module, optimizer=Lion),
            client_settings={1: {"rate": 0.1}},
            participants=[[0]],
        )
    assert FederatedLoop(FedAvg(), clients=2, client_settings={1: {"rate": 0.1}}).options_of(1) == {"rate": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_yaml_lists_are_the_tuples_that_optimizers_have(tmp_path, execution):
    adam = partial(Module, optimizer=partial(torch.optim.AdamW, lr=0.01))
    as_list, as_tuple = (
        run(tmp_path, execution, module=adam, client_settings={1: {"betas": betas}})[0]
        for betas in ([0.5, 0.9], (0.5, 0.9))
    )
    assert_close(weights(as_list), weights(as_tuple), tolerance=0)
