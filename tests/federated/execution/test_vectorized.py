"""Clients that step together end where clients that train one after another do."""

import itertools
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from lightning_lowrank import (
    FedAvg,
    FederatedLoop,
    FedMUD,
    FedProx,
    FromIndices,
    LowRank,
    LowRankCodec,
    MatrixProduct,
)
from lightning_lowrank.compression import low_rank
from lightning_lowrank.federated.client_optimizers import _ELEMENTWISE
from lightning_lowrank.federated.execution.stack import ClientStack
from lightning_lowrank.federated.protocols import OwnSteps, UnequalClients
from lightning_lowrank.layers import low_rank_layers
from tests.federated.execution.runs import FORMS, OPTIMIZERS, UNEVEN, Double, Manual, assert_close, both, run
from tests.grids import in_turn, nightly_except
from tests.helpers import Data, Module, fit, network, trainer, weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "algorithm"), [*((form, FedAvg) for form in FORMS), ("update", FedMUD), ("decoupled blocks", FedMUD)]
)
def test_equals_sequential_for_every_form(tmp_path, form, algorithm):
    both(tmp_path, form=form, algorithm=algorithm, local_epochs=2)


class ReadsWeight(Module):
    """Reads the weights of layers and calls none, as `nn.MultiheadAttention` does with its output projection."""

    def loss(self, batch):
        outputs, targets = batch
        for layer in self.net:
            outputs = outputs @ layer.weight.T if isinstance(layer, nn.Linear) else layer(outputs)
        return nn.functional.cross_entropy(outputs, targets)


def test_weights_of_low_rank_layers_are_read(tmp_path):
    """The second step of the third client has a batch of one sample, and is not mapped."""
    parts, data = FromIndices([range(16), range(16, 32), range(32, 41)]), Double(batch_size=8)
    _, (module, *_) = both(tmp_path, form="update", module=ReadsWeight, partition=parts, data=data)
    assert [*low_rank_layers(module)]


DAILY = ("ProjectedSGD",)


@nightly_except("Adadelta-dense", "Adamax-dense", "ProjectedSGD-dense", "momentum-update")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "form"),
    [
        pytest.param(name, form, marks=() if name in DAILY else pytest.mark.slow)
        for name, form in in_turn(OPTIMIZERS, ["dense", "update"])
    ],
)
def test_equals_sequential_with_every_optimizer(tmp_path, optimizer, form):
    both(tmp_path, form=form, module=partial(Module, optimizer=OPTIMIZERS[optimizer]), local_epochs=2)


def test_every_elementwise_optimizer_is_tested():
    tested = {type(make([nn.Parameter(torch.ones(1))])) for make in OPTIMIZERS.values()}
    assert tested == set(_ELEMENTWISE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "clip", [{"gradient_clip_val": 0.3}, {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}]
)
def test_clips_each_client_on_its_own(tmp_path, clip):
    ends = both(tmp_path, trainer=clip)
    free, _, _ = run(tmp_path, "vectorized")
    assert not torch.allclose(weights(ends[1][0])["net.0.weight"], weights(free)["net.0.weight"])


class Scaled(Module):
    """A module with a parameter that has no dimensions."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def loss(self, batch):
        return self.scale * super().loss(batch)


@pytest.mark.slow
def test_clips_with_a_parameter_without_dimensions(tmp_path):
    both(tmp_path, module=Scaled, trainer={"max_epochs": 1, "gradient_clip_val": 0.3})


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", [pytest.param(name, marks=() if name == "ProjectedAdamW" else pytest.mark.slow) for name in OPTIMIZERS]
)
@pytest.mark.nightly
def test_clients_that_keep_their_moments(tmp_path, optimizer):
    settings = {
        "form": "update",
        "module": partial(Module, optimizer=OPTIMIZERS[optimizer]),
        "optimizer_state": "keep",
        "participants": [[0, 1, 2], [1, 2, 3], [0, 1, 2, 3, 4], [2, 3, 4]],
    }
    ends = both(tmp_path, **settings)
    for client in range(len(UNEVEN)):
        states, twins = (loop.coordinator.states[client]["optimizers"][0] for _, loop, _ in ends)
        assert states.keys() == twins.keys()
        for index, state in states.items():
            assert state.keys() == twins[index].keys()
            for name, value in state.items():
                if value is not None:
                    torch.testing.assert_close(value, twins[index][name], rtol=1e-9, atol=1e-9)
    fresh, _, _ = run(tmp_path, "vectorized", **{**settings, "optimizer_state": "reset"})
    kept = weights(ends[1][0])
    changed = any(
        not torch.allclose(value, kept[name], rtol=1e-12, atol=1e-12) for name, value in weights(fresh).items()
    )
    assert changed is (optimizer != "SGD")


SETTINGS = {1: {"lr": 0.02, "local_epochs": 3}, 3: {"lr": 0.02, "weight_decay": 0.1}, 4: {"local_steps": 5}}


@pytest.mark.slow
@pytest.mark.parametrize("as_function", [False, True])
def test_settings_of_single_clients(tmp_path, as_function):
    given = (lambda client: SETTINGS.get(client, {})) if as_function else SETTINGS
    decay = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    module = partial(Module, optimizer=OPTIMIZERS["momentum"], scheduler=decay)
    ends = both(tmp_path, module=module, client_settings=given)
    assert ends[0][2].callback_metrics["federated/client_steps"] == 4 * (1 + 3 * 6 + 3 + 5 + 5)
    assert ends[0][2].optimizers[0].param_groups[0]["lr"] == 0.05 / 4


@pytest.mark.slow
def test_settings_of_one_client_are_those_of_a_plain_module(tmp_path):
    decay = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    module = partial(Module, optimizer=OPTIMIZERS["momentum"], scheduler=decay)
    alone, _, _ = run(tmp_path, "sequential", module=module, client_settings=SETTINGS, participants=[[1]] * 4)
    plain, _, _ = run(
        tmp_path,
        "sequential",
        participants=[[1]] * 4,
        module=partial(Module, optimizer=partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=1e-3)),
        local_epochs=3,
    )
    assert_close(weights(alone), weights(plain))


@pytest.mark.parametrize("execution", [pytest.param("sequential", marks=pytest.mark.slow), "vectorized"])
@pytest.mark.nightly
def test_settings_of_single_clients_are_resumed(tmp_path, execution):
    every = ModelCheckpoint(tmp_path / "every", "{step}", save_top_k=-1, every_n_train_steps=1)
    settings = {"client_settings": SETTINGS, "trainer": {"max_epochs": 2}}
    whole, _, _ = run(tmp_path, execution, callbacks=[every], **settings)
    for file in sorted((tmp_path / "every").glob("*.ckpt"))[::3]:
        module, _, _ = run(tmp_path, execution, ckpt_path=file, **settings)
        assert_close(weights(whole), weights(module), tolerance=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({9: {"lr": 0.1}}, r"client_settings.*\[9\].*0"),
        ({"1": {"lr": 0.1}, 2: {}}, r"client_settings.*'1'"),
        ({1: {"local_epochs": 0}}, r"local_epochs.*1.*0"),
        ({1: {"local_epochs": 2, "local_steps": 2}}, r"1.*local_epochs.*local_steps"),
    ],
)
def test_wrong_settings_of_single_clients(tmp_path, settings, message):
    with pytest.raises(MisconfigurationException, match=message):
        run(tmp_path, "sequential", client_settings=settings)


def test_clients_without_settings_of_their_own_may_be_given_none():
    of_one = {1: {"lr": 0.1}, 2: None}
    for given in (of_one, of_one.get):
        loop = FederatedLoop(FedAvg(), clients=4, client_settings=given)
        assert [loop.settings_of(client) for client in range(4)] == [{}, {"lr": 0.1}, {}, {}]
        assert loop.batches_of(2, per_epoch=3) == 3


def test_a_clients_learning_rate_and_a_schedule_of_steps(tmp_path):
    decay = partial(torch.optim.lr_scheduler.StepLR, step_size=2)
    with pytest.raises(MisconfigurationException, match=r"lr=0\.02"):
        run(tmp_path, "sequential", client_settings=SETTINGS, module=partial(Module, scheduler=decay, interval="step"))


@pytest.mark.parametrize("form", ["update", "decoupled blocks", "CP"])
@pytest.mark.slow
@pytest.mark.nightly
def test_frobenius_decay(tmp_path, monkeypatch, form):
    made = FORMS[form]
    monkeypatch.setitem(FORMS, form, partial(made, frobenius_decay=0.05))
    decayed = both(tmp_path, form=form)
    monkeypatch.setitem(FORMS, form, made)
    plain, _, _ = run(tmp_path, "vectorized", form=form)
    assert any(not torch.allclose(value, weights(plain)[name]) for name, value in weights(decayed[1][0]).items())


class Anchored(OwnSteps):
    """Uses all that an algorithm has around a step: gradients, what was received, several updates, its own numbers."""

    def begin(self, client, message):
        super().begin(client, message)
        parameters = client.base.parameters(client.model)
        client.round_state.update(
            received=client.base.parameters(message.tensors),
            own={name: value.detach() * (1 + client.id) for name, value in parameters.items()},
            strength=torch.tensor(0.1 * (1 + client.id), dtype=torch.float64),
            steps=torch.zeros((), dtype=torch.float64),
        )

    def before_step(self, step):
        share = step.number / step.steps
        for name, value in step.parameters.items():
            strength = step.expand(step.round_state["strength"] * share, value)
            value.grad += strength * (value.detach() - step.round_state["received"][name])
            value.grad += 0.01 * step.round_state["own"][name]

    def local_update(self, step, update):
        update()
        update()
        step.round_state["steps"] += 1
        with torch.no_grad():
            for name, value in step.parameters.items():
                value.mul_(0.99)
                step.round_state["own"][name].lerp_(value, 0.5)

    def end(self, client):
        assert client.round_state["steps"] == client.steps
        client.state["own"] = {name: value.clone() for name, value in client.round_state["own"].items()}
        return super().end(client)


@pytest.mark.parametrize("form", ["dense", "update"])
@pytest.mark.slow
@pytest.mark.nightly
def test_what_an_algorithm_does_around_a_step(tmp_path, form):
    ends = both(tmp_path, form=form, algorithm=Anchored, local_epochs=2)
    for client in range(len(UNEVEN)):
        assert_close(*(loop.coordinator.states[client]["own"] for _, loop, _ in ends))
    assert all(loop.rounds.execution.round_state == {} and not loop.rounds.execution.clients for _, loop, _ in ends)
    module, _, _ = run(tmp_path, "vectorized", form=form, local_epochs=2)
    assert not torch.allclose(weights(module)["net.2.bias"], weights(ends[1][0])["net.2.bias"])
    for _, _, fitted in ends:
        assert "optimizer_step" not in vars(fitted.lightning_module)


@pytest.mark.parametrize("execution", [pytest.param("sequential", marks=pytest.mark.slow), "vectorized"])
@pytest.mark.nightly
def test_what_clients_keep_and_need_is_resumed(tmp_path, execution):
    settings = {
        "algorithm": Anchored,
        "module": partial(Module, optimizer=OPTIMIZERS["Adam"]),
        "optimizer_state": "keep",
        "participants": [[0, 1, 2], [1, 2, 3], [0, 1, 2, 3]],
        "trainer": {"max_epochs": 3},
    }
    every = ModelCheckpoint(tmp_path / "every", "{step}", save_top_k=-1, every_n_train_steps=1)
    whole, loop, _ = run(tmp_path, execution, callbacks=[every], **settings)
    for file in sorted((tmp_path / "every").glob("*.ckpt")):
        module, again, _ = run(tmp_path, execution, ckpt_path=file, **settings)
        assert_close(weights(whole), weights(module), tolerance=0)
        for client in range(len(UNEVEN)):
            kept, twin = (each.coordinator.states[client].get("own", {}) for each in (loop, again))
            assert_close(kept, twin, tolerance=0)


class OwnRanks(FedAvg):
    """Client i trains the first 1 + i mod 3 columns of each factor; the others are zero."""

    def begin(self, client, message):
        super().begin(client, message)
        for name, value in client.model.items():
            if ".factors." in name:
                with torch.no_grad():
                    value[:, 1 + client.id % 3 :] = 0

    def end(self, client):
        for name, value in client.model.items():
            if ".factors." in name:
                assert not value[:, 1 + client.id % 3 :].any()
                assert value[:, : 1 + client.id % 3].any()
        return super().end(client)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["momentum", "AdamW"])
def test_clients_of_different_rank_step_together(tmp_path, monkeypatch, optimizer):
    monkeypatch.setitem(FORMS, "weight", partial(LowRank, MatrixProduct(), rank=3, role="weight", summary=False))
    both(tmp_path, form="weight", algorithm=OwnRanks, module=partial(Module, optimizer=OPTIMIZERS[optimizer]))


def test_an_own_way_of_stepping_needs_lightnings(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"accumulate_grad_batches=1.*2"):
        run(tmp_path, "sequential", algorithm=Anchored, trainer={"accumulate_grad_batches": 2})
    with pytest.raises(MisconfigurationException, match="GradientAccumulationScheduler"):
        run(tmp_path, "sequential", callbacks=[GradientAccumulationScheduler({0: 1, 1: 4})], algorithm=Anchored)
    with pytest.raises(MisconfigurationException, match=r"Anchored steps .*automatic optimization"):
        run(tmp_path, "sequential", algorithm=Anchored, module=Manual)


@pytest.mark.slow
@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_schedulers(tmp_path, interval):
    decay = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    both(tmp_path, module=partial(Module, scheduler=decay, interval=interval))


@pytest.mark.nightly
def test_equals_sequential_in_single_precision_after_twenty_rounds(tmp_path):
    momentum = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    decay = partial(torch.optim.lr_scheduler.StepLR, step_size=5, gamma=0.8)
    for form in ("dense", "update"):
        both(
            tmp_path,
            tolerance=2e-5,
            form=form,
            dtype=torch.float32,
            module=partial(Module, optimizer=momentum, scheduler=decay),
            trainer={"max_epochs": 20, "gradient_clip_val": 1.0},
        )


@pytest.mark.slow
@pytest.mark.parametrize("together", [1, 2, 100])
def test_the_number_that_steps_together_does_not_matter(tmp_path, together):
    expected, _, _ = run(tmp_path, "sequential")
    module, _, fitted = run(tmp_path, "vectorized", chunk_size=together)
    assert_close(weights(expected), weights(module))
    chunks = [sorted((6, 5, 3, 1, 1), reverse=True)[start::1][:together] for start in range(0, 5, together)]
    assert fitted.global_step == 4 * sum(max(chunk) for chunk in chunks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "buffers"),
    [(nn.BatchNorm1d, "average"), (nn.BatchNorm1d, "local"), (nn.BatchNorm1d, "reset"), (nn.LayerNorm, "average")],
)
@pytest.mark.nightly
def test_buffers_and_norms(tmp_path, buffers, norm):
    both(
        tmp_path,
        module=lambda: Module(network(norm=norm)),
        data=Double(drop_last=True, batch_size=4),
        buffers=buffers,
        local_epochs=2,
    )


@pytest.mark.parametrize(
    ("algorithm", "form", "ways"), [(FedAvg, "dense", ["uplink", "downlink"]), (FedMUD, "update", ["uplink"])]
)
def test_messages_are_decomposed_together(tmp_path, monkeypatch, algorithm, form, ways):
    counts, iterated = set(), low_rank._iterated
    monkeypatch.setattr(low_rank, "_iterated", lambda *stacks: (counts.add(len(stacks[0])), iterated(*stacks))[1])
    codecs = {way: [LowRankCodec(1, error_feedback=True)] for way in ways}
    both(tmp_path, tolerance=1e-8, algorithm=algorithm, form=form, **codecs)
    assert max(counts) > 1


@pytest.mark.slow
def test_sampling_weights_failures_and_local_steps(tmp_path):
    both(tmp_path, clients_per_round=3, client_dropout=0.3, local_steps=3, weighting="uniform")


@nightly_except("0")
@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_other_datasets_and_workers(tmp_path, workers):
    class Listed(torch.utils.data.Dataset):
        def __init__(self):
            self.inputs, self.targets = Double().train.tensors

        def __len__(self):
            return len(self.targets)

        def __getitem__(self, index):
            return self.inputs[index] + 0.01 * torch.rand(()), self.targets[index]

    both(tmp_path, data=Data(Listed(), num_workers=workers), trainer={"max_epochs": 2})


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_what_is_no_number_is_not_logged(tmp_path, execution):
    class Several(Module):
        def training_step(self, batch, batch_idx):
            self.log("both", torch.ones(2))
            return super().training_step(batch, batch_idx)

    with pytest.raises(Exception, match=r"self.log.*(single element|of shape \(2,\) in place of one number)"):
        run(tmp_path, execution, module=Several)


class OwnLog(Module):
    """Logs under names of its own, and a batch's size by a callback's hook."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("number", batch_idx, on_step=False, on_epoch=True)

    def log(self, name, value, **settings):
        super().log(f"own/{name}", value, **settings)


def test_figures_of_modules_that_log_in_their_own_way(tmp_path):
    """Samples weight them, also those that a hook logs for all clients together."""
    first, second = (
        run(tmp_path / execution, execution, module=OwnLog, trainer={"max_epochs": 1})[-1].callback_metrics
        for execution in ("sequential", "vectorized")
    )
    for name in ("own/loss", "own/number"):
        torch.testing.assert_close(first[name], second[name])


@pytest.mark.slow
def test_dropout_differs_between_clients_and_repeats(tmp_path):
    ends = [weights(run(tmp_path, "vectorized", module=lambda: Module(network(dropout=0.5)))[0]) for _ in range(2)]
    assert_close(*ends, tolerance=0)
    seen = []

    class Watching(Module):
        def on_train_batch_end(self, *_):
            (loop,) = (c for c in self.trainer.callbacks if isinstance(c, FederatedLoop))
            if loop.rounds.execution._stack:
                seen.append(loop.rounds.execution._stack.values["net.0.weight"].clone())

    inputs, targets = Double().train.tensors
    twice = TensorDataset(inputs[:20].repeat(2, 1), targets[:20].repeat(2))
    for dropout in (0.5, 0.0):
        seen.clear()
        run(
            tmp_path,
            "vectorized",
            module=lambda dropout=dropout: Watching(network(dropout=dropout)),
            data=Data(twice, shuffle=False),
            partition=FromIndices([list(range(20)), list(range(20, 40))]),
        )
        assert torch.equal(seen[0][0], seen[0][1]) is (dropout == 0)


@pytest.mark.parametrize(
    ("form", "together", "optimizer"),
    [("dense", None, "AdamW"), ("update", 2, "AdamW"), ("dense", None, "ProjectedSGD")],
)
@pytest.mark.nightly
def test_resumes_exactly_from_every_turn(tmp_path, form, together, optimizer):
    decay = partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.7)
    settings = {
        "form": form,
        "module": partial(Module, optimizer=OPTIMIZERS[optimizer], scheduler=decay, interval="step"),
        "chunk_size": together,
        "clients_per_round": 4,
        "trainer": {"max_epochs": 3},
    }
    every = ModelCheckpoint(tmp_path / "every", "{step}", save_top_k=-1, every_n_train_steps=1)
    whole, loop, _ = run(tmp_path, "vectorized", callbacks=[every], **settings)
    files = sorted((tmp_path / "every").glob("*.ckpt"))
    # Clients that step together are one turn of Lightning's loop.
    assert len(files) == 3 * (1 if together is None else 4 // together)
    for file in files[:: 2 if together else 1]:
        module, again, _ = run(tmp_path, "vectorized", ckpt_path=file, **settings)
        assert_close(weights(whole), weights(module), tolerance=0)
        assert again.ledger.state_dict() == loop.ledger.state_dict()


@pytest.mark.slow
def test_checkpoints_inside_a_round_hold_the_last_global_model(tmp_path):
    class Start(Module):
        def on_train_epoch_start(self):
            self.start = weights(self)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx < 3:
                assert_close(weights(self), self.start, tolerance=0)

    _, _, fitted = run(tmp_path, "vectorized", module=Start)
    assert fitted.current_epoch == 4


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{"limit_train_batches": 2}, {"max_steps": 9}, {"fast_dev_run": 3}])
def test_rounds_that_are_cut_short(tmp_path, limits):
    if "limit_train_batches" in limits:
        both(tmp_path, trainer=limits)
        return
    module, loop, fitted = run(tmp_path, "vectorized", dtype=torch.float32, trainer=limits)
    assert not loop._progress.round_open
    assert loop.rounds.execution._stack is None
    held = {id(value) for group in fitted.optimizers[0].param_groups for value in group["params"]}
    assert held == {id(value) for value in module.parameters()}
    assert not {"training_step", "configure_gradient_clipping", "log"} & vars(module).keys()


class Marked(UnequalClients):
    """Shows in the module whose it is."""

    def configure(self, base, client):
        base.module.whose = "server" if client is None else "client"


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_the_global_model_is_configured_wherever_it_is_seen(tmp_path, execution):
    class Watching(Module):
        def training_step(self, batch, batch_idx):
            assert self.whose == "client"
            if getattr(self, "fails", False) and self.global_step == 7:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            assert getattr(self, "whose", "server") == "server"
            self.validated = getattr(self, "validated", 0) + 1

        def on_train_epoch_end(self):
            assert self.whose == "server"

    arguments = {"partition": FromIndices(UNEVEN), "execution": execution, "summary": False}
    arguments |= {"chunk_size": 2} if execution == "vectorized" else {}
    loop = FederatedLoop(Marked(), **arguments)
    module = Watching()
    fit(trainer(tmp_path, loop, max_epochs=2, val_check_interval=2), module, Data())
    assert module.validated > 5
    module.fails = True
    again = FederatedLoop(Marked(), on_client_error="raise", **arguments)
    with pytest.raises(KeyError):
        fit(trainer(tmp_path, again), module, Data())
    assert module.whose == "server"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "epochs", "buffers"),
    [
        # In the fourth step they have batches of 7, 8, 6 and 8 samples.
        ([0, 31, 53, 67, 75], 4, "average"),
        ([0, 10, 32, 46, 76, 88], 2, "average"),
        ([0, 10, 32, 46, 76, 88], 2, "local"),
    ],
)
def test_statistics_of_clients_whose_batches_are_of_one_size_but_not_neighbours(tmp_path, ends, epochs, buffers):
    parts = FromIndices([list(range(start, stop)) for start, stop in itertools.pairwise(ends)])
    norm = lambda: Module(network(norm=nn.BatchNorm1d))  # noqa: E731
    both(tmp_path, module=norm, partition=parts, local_epochs=epochs, buffers=buffers, data=Double(batch_size=8))


class Looking(Callback):
    def on_train_batch_end(self, *arguments):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "deferred"),
    [
        ({"optimizer_state": "keep"}, True),
        ({"trainer": {"max_epochs": 2, "gradient_clip_val": 0.3}}, False),
        ({"algorithm": partial(FedProx, 0.1)}, False),
        ({"callbacks": [Looking()]}, False),
        ({"module": partial(Module, optimizer=partial(OPTIMIZERS["ProjectedSGD"], weight_decay=0.1))}, False),
        ({"form": "weight"}, False),
    ],
)
def test_steps_in_a_subspace_are_deferred_where_nobody_looks(tmp_path, monkeypatch, settings, deferred):
    kept, own = [], ClientStack.deferred
    monkeypatch.setattr(ClientStack, "deferred", lambda stack: kept.append(own(stack)) or kept[-1])
    module = partial(Module, optimizer=OPTIMIZERS["ProjectedSGD"])
    both(tmp_path, **{"module": module, "trainer": {"max_epochs": 2}, **settings})
    assert any(kept) is deferred


class Summing(Module):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        epoch = {"on_step": False, "on_epoch": True}
        self.log("largest", loss, reduce_fx="max", **epoch)
        self.log("smallest", loss, reduce_fx=torch.min, **epoch)
        self.log_dict({"sum": loss, "count": 1}, reduce_fx="sum", **epoch)
        self.log("uneven", loss, batch_size=3, **epoch)
        for value in (loss, 2 * loss):
            self.log("twice", value, **epoch)
        return loss


def test_figures_are_reduced_as_of_clients_one_after_another(tmp_path):
    first, second = (fitted.callback_metrics for *_, fitted in both(tmp_path, module=Summing))
    for name in ("train_loss", "largest", "smallest", "sum", "count", "uneven", "twice"):
        torch.testing.assert_close(first[name], second[name])


class OfSteps(Module):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("of_steps", loss)
        return loss


def test_figures_of_steps_alone_count_alike(tmp_path):
    settings = {"module": OfSteps, "partition": FromIndices([range(19)]), "trainer": {"max_epochs": 1}}
    first, second = (fitted.callback_metrics["of_steps"] for *_, fitted in both(tmp_path, **settings))
    torch.testing.assert_close(first, second)


def none_of_the_last(samples):
    return None if len(samples) < 8 else default_collate(samples)


def test_a_batch_that_is_none_is_refused(tmp_path):
    data = Data(Double().train, collate_fn=none_of_the_last)
    settings = {"data": data, "partition": FromIndices([range(16), range(16, 29)]), "trainer": {"max_epochs": 1}}
    with pytest.raises(MisconfigurationException, match=r"None.*execution='sequential'"):
        run(tmp_path, "vectorized", **settings)
    _, loop, _ = run(tmp_path, "auto", **settings)
    assert loop.rounds.execution.name == "sequential"


def time_first(samples):
    """Inputs as ``[features, batch]``, whose size Lightning takes for the number of features."""
    inputs, targets = default_collate(samples)
    return inputs.T, targets


class TimeFirst(Module):
    def loss(self, batch):
        return super().loss((batch[0].T, batch[1]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_figures_are_weighted_by_the_size_that_lightning_infers(tmp_path):
    data = Data(Double().train, collate_fn=time_first)
    first, second = (fitted.callback_metrics for *_, fitted in both(tmp_path, data=data, module=TimeFirst))
    torch.testing.assert_close(first["train_loss"], second["train_loss"], rtol=1e-10, atol=0)


class OfTasks(Module):
    """Logs a figure for each task, which a batch names."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch[:2])
        self.log(f"loss of {batch[2]}", loss, on_step=False, on_epoch=True)
        return loss


class Tasks(TensorDataset):
    """Each client has one task."""

    def __getitem__(self, index):
        task = next(number for number, indices in enumerate(UNEVEN) if index in indices)
        return (*super().__getitem__(index), task)


def one_task(samples):
    return *default_collate([sample[:2] for sample in samples]), f"task {samples[0][2]}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:execution='vectorized'. it reads batch")
def test_figures_that_the_first_client_does_not_log(tmp_path):
    once = {"max_epochs": 1}
    data = Data(Tasks(*Double().train.tensors), collate_fn=one_task)
    first, second = (fitted.callback_metrics for *_, fitted in both(tmp_path, data=data, module=OfTasks, trainer=once))
    names = [f"loss of task {number}" for number in range(len(UNEVEN))]
    torch.testing.assert_close([first[name] for name in names], [second[name] for name in names])


class Heads(Module):
    """Has a head for each task, which a batch names."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.heads = nn.ModuleDict({f"task {number}": nn.Linear(4, 4) for number in range(len(UNEVEN))})

    def loss(self, batch):
        return nn.functional.cross_entropy(self.heads[batch[2]](self.net(batch[0])), batch[1])


class BySize(Module):
    """Uses a parameter in full batches alone, or in none."""

    size = 8

    def __init__(self, **settings):
        super().__init__(**settings)
        self.scale = nn.Parameter(torch.ones(()))

    def loss(self, batch):
        return super().loss(batch) * (self.scale if len(batch[0]) == self.size else 1)


class Never(BySize):
    size = None


MOMENTUM, DECAY = (partial(torch.optim.SGD, lr=0.1, **each) for each in ({"momentum": 0.9}, {"weight_decay": 0.1}))


def used_by_some(module, optimizer):
    settings = {"module": partial(module, **({} if optimizer is None else {"optimizer": optimizer}))}
    if module is Heads:
        # Clients whose batches are of one size.
        settings |= {"participants": [[1, 2, 3]], "local_steps": 2}
        settings["data"] = Data(Tasks(*Double().train.tensors), collate_fn=one_task)
    return {**settings, "trainer": {"max_epochs": 1}}


@pytest.mark.filterwarnings("ignore:execution='vectorized'. it reads batch")
@pytest.mark.parametrize(("module", "optimizer"), [(Heads, DECAY), (BySize, MOMENTUM), (BySize, DECAY)])
def test_parameters_that_some_of_the_clients_use_are_refused(tmp_path, module, optimizer):
    with pytest.raises(MisconfigurationException, match=r"some clients of a step do not use (heads\.task|scale)"):
        run(tmp_path, "vectorized", **used_by_some(module, optimizer))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:execution='vectorized'. it reads batch")
@pytest.mark.parametrize(("module", "optimizer"), [(Heads, None), (BySize, None), (Never, MOMENTUM)])
def test_parameters_that_no_optimizer_or_no_client_misses(tmp_path, module, optimizer):
    both(tmp_path, **used_by_some(module, optimizer))
