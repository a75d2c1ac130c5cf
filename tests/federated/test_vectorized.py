"""Clients that step together end where clients that train one after another do."""

import itertools
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import TensorDataset

from lightning_lowrank import (
    CP,
    BlockKronecker,
    FedAvg,
    FederatedLoop,
    FedMUD,
    FromIndices,
    Hadamard,
    LowRank,
    MatrixProduct,
    ProjectedAdamW,
    ProjectedSGD,
)
from lightning_lowrank.federated import loop as loop_module
from lightning_lowrank.federated import vectorized
from lightning_lowrank.federated.optimizers import fresh_state
from lightning_lowrank.federated.vectorized import _ELEMENTWISE, try_both
from tests.helpers import Data, Module, blobs, fit, network, trainer, weights

UNEVEN = [list(range(5)), list(range(5, 47)), list(range(47, 69)), list(range(69, 102)), [102]]
FORMS = {
    "dense": None,
    "weight": partial(LowRank, MatrixProduct(), rank=2, role="weight", summary=False),
    "update": partial(LowRank, MatrixProduct(), rank=2, summary=False),
    "decoupled blocks": partial(LowRank, BlockKronecker(), ratio=0.4, decouple=True, skip=["last"], summary=False),
    "CP": partial(LowRank, CP(), rank=2, role="weight", summary=False),
    "Hadamard": partial(LowRank, Hadamard(), rank=2, allow_larger=True, summary=False),
}
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "Nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.003, momentum=0.5),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "ProjectedSGD": partial(ProjectedSGD, lr=0.1, rank=3, momentum=0.8, refresh_interval=3),
    "ProjectedAdamW": partial(ProjectedAdamW, lr=0.01, rank=3, subspace="gradient", refresh_interval=4),
}


class Double(Data):
    def __init__(self, **loader):
        inputs, targets = blobs().tensors
        super().__init__(TensorDataset(inputs.double(), targets), **loader)


def run(
    tmp_path,
    execution,
    form="dense",
    algorithm=FedAvg,
    data=None,
    module=None,
    callbacks=(),
    ckpt_path=None,
    dtype=torch.float64,
    **arguments,
):
    settings = {"max_epochs": 4, **arguments.pop("trainer", {})}
    low_rank = [] if FORMS[form] is None else [FORMS[form]()]
    loop = FederatedLoop(
        algorithm(), execution=execution, **{"partition": FromIndices(UNEVEN), "summary": False, **arguments}
    )
    module = (module or Module)().to(dtype)
    if data is None:
        data = Double() if dtype == torch.float64 else Data()
    fitted = trainer(tmp_path, *low_rank, loop, *callbacks, limit_val_batches=0, **settings)
    fit(fitted, module, data, ckpt_path=ckpt_path)
    return module, loop, fitted


def assert_close(first, second, tolerance=1e-10):
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=tolerance, atol=tolerance)


def both(tmp_path, tolerance=1e-10, **settings):
    ends = [run(tmp_path, execution, **settings) for execution in ("sequential", "vectorized")]
    assert_close(weights(ends[0][0]), weights(ends[1][0]), tolerance)
    first, second = (loop.ledger.state_dict() for _, loop, _ in ends)
    assert first == second
    for figure in ("federated/client_steps", "federated/samples", "comm/ratio"):
        assert ends[0][2].callback_metrics[figure] == ends[1][2].callback_metrics[figure]
    return ends


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("algorithm", [FedAvg, FedMUD])
def test_equals_sequential_for_every_form(tmp_path, form, algorithm):
    if algorithm is FedMUD and form in ("dense", "weight", "CP"):
        pytest.skip("FedMUD trains updates")
    both(tmp_path, form=form, algorithm=algorithm, local_epochs=2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("form", ["dense", "update"])
def test_equals_sequential_with_every_optimizer(tmp_path, optimizer, form):
    both(tmp_path, form=form, module=partial(Module, optimizer=OPTIMIZERS[optimizer]), local_epochs=2)


def test_every_elementwise_optimizer_is_tested():
    tested = {type(make([nn.Parameter(torch.ones(1))])) for make in OPTIMIZERS.values()}
    assert tested == set(_ELEMENTWISE)


@pytest.mark.parametrize(
    "clip", [{"gradient_clip_val": 0.3}, {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}]
)
def test_clips_each_client_on_its_own(tmp_path, clip):
    ends = both(tmp_path, trainer=clip)
    free, _, _ = run(tmp_path, "vectorized")
    assert not torch.allclose(weights(ends[1][0])["net.0.weight"], weights(free)["net.0.weight"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_clients_that_keep_their_moments(tmp_path, optimizer):
    settings = {
        "form": "update",
        "module": partial(Module, optimizer=OPTIMIZERS[optimizer]),
        "optimizer_state": "keep",
        "participants": [[0, 1, 2], [1, 2, 3], [0, 1, 2, 3, 4], [2, 3, 4]],
    }
    ends = both(tmp_path, **settings)
    for first, second in zip(ends[0][1].clients, ends[1][1].clients, strict=True):
        states, twins = (client.memory["optimizers"][0] for client in (first, second))
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


@pytest.mark.parametrize("as_function", [False, True])
def test_settings_of_single_clients(tmp_path, as_function):
    given = (lambda client: SETTINGS.get(client, {})) if as_function else SETTINGS
    decay = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    module = partial(Module, optimizer=OPTIMIZERS["momentum"], scheduler=decay)
    ends = both(tmp_path, module=module, client_settings=given)
    assert ends[0][2].callback_metrics["federated/client_steps"] == 4 * (1 + 3 * 6 + 3 + 5 + 5)
    assert ends[0][2].optimizers[0].param_groups[0]["lr"] == 0.05 / 4
    alone = both(tmp_path, module=module, client_settings=given, participants=[[1]] * 4)
    plain, _, _ = run(
        tmp_path,
        "sequential",
        participants=[[1]] * 4,
        module=partial(Module, optimizer=partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=1e-3)),
        local_epochs=3,
    )
    assert_close(weights(alone[0][0]), weights(plain))


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
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
        ({9: {"lr": 0.1}}, "names client 9"),
        ({1: {"rate": 0.1}}, "no option 'rate'"),
        ({1: {"local_epochs": 0}}, "local_epochs of client 1"),
    ],
)
def test_wrong_settings_of_single_clients(tmp_path, settings, message):
    with pytest.raises(MisconfigurationException, match=message):
        run(tmp_path, "sequential", client_settings=settings)


def test_a_clients_learning_rate_and_a_schedule_of_steps(tmp_path):
    decay = partial(torch.optim.lr_scheduler.StepLR, step_size=2)
    with pytest.raises(MisconfigurationException, match="scheduler that steps on each batch"):
        run(
            tmp_path,
            "sequential",
            client_settings=SETTINGS,
            module=partial(Module, scheduler=decay, interval="step"),
        )


@pytest.mark.parametrize("form", ["weight", "update", "decoupled blocks", "CP"])
def test_frobenius_decay(tmp_path, monkeypatch, form):
    made = FORMS[form]
    monkeypatch.setitem(FORMS, form, partial(made, frobenius_decay=0.05))
    decayed = both(tmp_path, form=form)
    monkeypatch.setitem(FORMS, form, made)
    plain, _, _ = run(tmp_path, "vectorized", form=form)
    assert any(not torch.allclose(value, weights(plain)[name]) for name, value in weights(decayed[1][0]).items())


class Anchored(FedAvg):
    """Uses all that an algorithm has around a step: gradients, what was received, several updates, its own numbers."""

    def begin(self, server, client, payload, model):
        super().begin(server, client, payload, model)
        client.workspace = {
            "received": server.parameters(payload.tensors),
            "own": {name: value.detach() * (1 + client.id) for name, value in server.parameters(model).items()},
            "strength": torch.tensor(0.1 * (1 + client.id), dtype=torch.float64),
            "steps": torch.zeros((), dtype=torch.float64),
        }

    def before_step(self, server, step):
        share = step.number / step.steps
        for name, value in step.parameters.items():
            strength = step.spread(step.workspace["strength"] * share, value)
            value.grad += strength * (value.detach() - step.workspace["received"][name])
            value.grad += 0.01 * step.workspace["own"][name]

    def local_update(self, server, step, update):
        update()
        update()
        step.workspace["steps"] += 1
        with torch.no_grad():
            for name, value in step.parameters.items():
                value.mul_(0.99)
                step.workspace["own"][name].lerp_(value, 0.5)

    def end(self, server, client, model):
        assert client.workspace["steps"] == client.steps
        client.memory["own"] = {name: value.clone() for name, value in client.workspace["own"].items()}
        return super().end(server, client, model)


@pytest.mark.parametrize("form", ["dense", "update"])
def test_what_an_algorithm_does_around_a_step(tmp_path, form):
    ends = both(tmp_path, form=form, algorithm=Anchored, local_epochs=2)
    for first, second in zip(ends[0][1].clients, ends[1][1].clients, strict=True):
        assert_close(first.memory["own"], second.memory["own"])
        assert first.workspace == second.workspace == {}
    module, _, _ = run(tmp_path, "vectorized", form=form, local_epochs=2)
    assert not torch.allclose(weights(module)["net.2.bias"], weights(ends[1][0])["net.2.bias"])
    for _, _, fitted in ends:
        assert "optimizer_step" not in vars(fitted.lightning_module)


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
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
        for client, twin in zip(loop.clients, again.clients, strict=True):
            assert_close(client.memory.get("own", {}), twin.memory.get("own", {}), tolerance=0)


class OwnRanks(FedAvg):
    """Client i trains the first 1 + i mod 3 columns of each factor; the others are zero."""

    def begin(self, server, client, payload, model):
        super().begin(server, client, payload, model)
        for name, value in model.items():
            if ".factors." in name:
                with torch.no_grad():
                    value[:, 1 + client.id % 3 :] = 0

    def end(self, server, client, model):
        for name, value in model.items():
            if ".factors." in name:
                assert not value[:, 1 + client.id % 3 :].any()
                assert value[:, : 1 + client.id % 3].any()
        return super().end(server, client, model)


@pytest.mark.parametrize("optimizer", ["momentum", "AdamW", "RMSprop", "Adagrad"])
def test_clients_of_different_rank_step_together(tmp_path, monkeypatch, optimizer):
    monkeypatch.setitem(FORMS, "weight", partial(LowRank, MatrixProduct(), rank=3, role="weight", summary=False))
    both(tmp_path, form="weight", algorithm=OwnRanks, module=partial(Module, optimizer=OPTIMIZERS[optimizer]))


def test_an_own_way_of_stepping_needs_lightnings(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"Anchored steps .*accumulate_grad_batches=1, not 2"):
        run(tmp_path, "sequential", algorithm=Anchored, trainer={"accumulate_grad_batches": 2})
    with pytest.raises(MisconfigurationException, match=r"Anchored steps .*automatic optimization"):
        run(tmp_path, "sequential", algorithm=Anchored, module=Manual)


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_schedulers(tmp_path, interval):
    decay = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    both(tmp_path, module=partial(Module, scheduler=decay, interval=interval))


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


@pytest.mark.parametrize("together", [1, 2, 3, 5, 100])
def test_the_number_that_steps_together_does_not_matter(tmp_path, together):
    expected, _, _ = run(tmp_path, "sequential")
    module, _, fitted = run(tmp_path, "vectorized", clients_together=together)
    assert_close(weights(expected), weights(module))
    chunks = [sorted((6, 5, 3, 1, 1), reverse=True)[start::1][:together] for start in range(0, 5, together)]
    assert fitted.global_step == 4 * sum(max(chunk) for chunk in chunks)


@pytest.mark.parametrize("buffers", ["average", "local", "reset"])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_buffers_and_norms(tmp_path, buffers, norm):
    both(
        tmp_path,
        module=lambda: Module(network(norm=norm)),
        data=Double(drop_last=True, batch_size=4),
        buffers=buffers,
        local_epochs=2,
    )


def test_sampling_weights_failures_and_local_steps(tmp_path):
    both(tmp_path, clients_per_round=3, client_dropout=0.3, local_steps=3, weighting="uniform")


def test_frozen_weights_are_not_stacked(tmp_path):
    sizes = []

    class Watching(Module):
        def on_train_batch_end(self, *_):
            (loop,) = (c for c in self.trainer.callbacks if isinstance(c, FederatedLoop))
            sizes.append(set(loop._stack.values) if loop._stack else None)

    run(tmp_path, "vectorized", "update", module=Watching)
    assert sizes
    assert not any("frozen_weight" in name for names in sizes if names for name in names)


def test_other_datasets_and_workers(tmp_path):
    class Listed(torch.utils.data.Dataset):
        def __init__(self):
            self.inputs, self.targets = Double().train.tensors

        def __len__(self):
            return len(self.targets)

        def __getitem__(self, index):
            return self.inputs[index] + 0.01 * torch.rand(()), self.targets[index]

    for workers in (0, 2):
        both(tmp_path, data=Data(Listed(), num_workers=workers), trainer={"max_epochs": 2})


def test_logged_values_are_the_same_means(tmp_path):
    losses = []
    for execution in ("sequential", "vectorized"):
        _, _, fitted = run(tmp_path, execution, trainer={"max_epochs": 2})
        losses.append(fitted.callback_metrics["train_loss"])
    torch.testing.assert_close(*losses)


def test_dropout_differs_between_clients_and_repeats(tmp_path):
    ends = [weights(run(tmp_path, "vectorized", module=lambda: Module(network(dropout=0.5)))[0]) for _ in range(2)]
    assert_close(*ends, tolerance=0)
    seen = []

    class Watching(Module):
        def on_train_batch_end(self, *_):
            (loop,) = (c for c in self.trainer.callbacks if isinstance(c, FederatedLoop))
            if loop._stack:
                seen.append(loop._stack.values["net.0.weight"].clone())

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


@pytest.mark.parametrize("form", ["dense", "update"])
@pytest.mark.parametrize("together", [2, None])
def test_resumes_exactly_from_every_step(tmp_path, form, together):
    momentum = partial(torch.optim.AdamW, lr=0.01)
    decay = partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.7)
    settings = {
        "form": form,
        "module": partial(Module, optimizer=momentum, scheduler=decay, interval="step"),
        "clients_together": together,
        "clients_per_round": 4,
        "trainer": {"max_epochs": 3},
    }
    every = ModelCheckpoint(tmp_path / "every", "{step}", save_top_k=-1, every_n_train_steps=1)
    whole, loop, fitted = run(tmp_path, "vectorized", callbacks=[every], **settings)
    files = sorted((tmp_path / "every").glob("*.ckpt"))
    assert len(files) == fitted.global_step
    for file in files[:: 2 if together else 1]:
        module, again, _ = run(tmp_path, "vectorized", ckpt_path=file, **settings)
        assert_close(weights(whole), weights(module), tolerance=0)
        assert again.ledger.state_dict() == loop.ledger.state_dict()


def test_checkpoints_inside_a_round_hold_the_last_global_model(tmp_path):
    class Start(Module):
        def on_train_epoch_start(self):
            self.start = weights(self)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx < 3:
                assert_close(weights(self), self.start, tolerance=0)

    _, _, fitted = run(tmp_path, "vectorized", module=Start)
    assert fitted.current_epoch == 4


@pytest.mark.parametrize("limits", [{"limit_train_batches": 2}, {"max_steps": 9}, {"fast_dev_run": 3}])
def test_rounds_that_are_cut_short(tmp_path, limits):
    if "limit_train_batches" in limits:
        both(tmp_path, trainer=limits)
        return
    module, loop, fitted = run(tmp_path, "vectorized", dtype=torch.float32, trainer=limits)
    assert not loop._round_open
    assert loop._stack is None
    held = {id(value) for group in fitted.optimizers[0].param_groups for value in group["params"]}
    assert held == {id(value) for value in module.parameters()}
    assert not {"training_step", "configure_gradient_clipping", "log"} & vars(module).keys()


def test_a_failing_step_leaves_the_module_as_it_was(tmp_path):
    class Failing(Module):
        def training_step(self, batch, batch_idx):
            if self.global_step == 3:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    module = Failing()
    with pytest.raises(KeyError, match="mine"):
        run(tmp_path, "vectorized", module=lambda: module)
    assert "training_step" not in vars(module)
    assert all(value.ndim <= 2 for value in module.state_dict().values())


class Item(Module):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss * (1 if loss.item() > 0 else 2)


class Branch(Module):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss if loss > 0 else 2 * loss


class Nothing(Module):
    def training_step(self, batch, batch_idx):
        return None


class Counting(Module):
    def __init__(self):
        super().__init__()
        from torchmetrics.classification import MulticlassAccuracy

        self.accuracy = MulticlassAccuracy(4)

    def training_step(self, batch, batch_idx):
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("train_acc", self.accuracy)
        return self.loss(batch)


class Kept(Module):
    """Takes a parameter from a list of its own, where clients that step together do not put theirs."""

    def __init__(self):
        super().__init__()
        self.penalized = [next(self.net.parameters())]

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + self.penalized[0].square().sum()


@pytest.mark.parametrize(
    ("module", "cause"),
    [
        (Kept, r"Take it from the module \(self.parameters\(\)"),
        (Item, "takes a number out of a tensor"),
        (Branch, "by a tensor's value|takes a number"),
        (Nothing, "in place of a loss"),
        (Counting, "metric|in place|takes a number"),
    ],
)
def test_what_cannot_be_mapped_is_refused_by_its_cause(tmp_path, module, cause):
    with pytest.raises(MisconfigurationException, match=cause):
        run(tmp_path, "vectorized", module=module)


class Manual(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Reader(Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pass


class Moves(Module):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"module": Manual}, "optimizes manually"),
        ({"module": Moves}, r"Moves\.on_after_batch_transfer"),
        ({"callbacks": [Reader()]}, r"Reader\.on_before_optimizer_step"),
        ({"callbacks": [LambdaCallback(on_after_backward=print)]}, r"LambdaCallback\.on_after_backward"),
        ({"trainer": {"accumulate_grad_batches": 2}}, "accumulate_grad_batches=2"),
        ({"module": partial(Module, optimizer=torch.optim.LBFGS)}, "LBFGS"),
    ],
)
def test_settings_that_rule_it_out_are_refused(tmp_path, settings, cause):
    with pytest.raises(MisconfigurationException, match=f"is not possible: .*{cause}"):
        run(tmp_path, "vectorized", **settings)


def test_a_checkpoint_of_the_other_execution_is_refused(tmp_path):
    last = ModelCheckpoint(tmp_path, "last", save_top_k=-1, every_n_epochs=1)
    run(tmp_path, "sequential", callbacks=[last], trainer={"max_epochs": 1})
    with pytest.raises(MisconfigurationException, match="execution"):
        run(tmp_path, "vectorized", ckpt_path=next(tmp_path.glob("last*.ckpt")))


@pytest.mark.parametrize(
    "arguments", [{"execution": "fast"}, {"clients_together": 2}, {"execution": "vectorized", "clients_together": 0}]
)
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(MisconfigurationException, match=r"execution|clients_together"):
        FederatedLoop(FedAvg(), clients=2, **arguments)


def test_a_torchvision_network(tmp_path):
    from torchvision.models import shufflenet_v2_x0_5

    class Vision(Module):
        def __init__(self):
            torch.manual_seed(0)
            super().__init__(shufflenet_v2_x0_5(num_classes=4), optimizer=partial(torch.optim.SGD, lr=0.01))

    images = TensorDataset(torch.randn(24, 3, 32, 32).double(), torch.arange(24) % 4)
    parts = FromIndices([list(range(start, start + 8)) for start in (0, 8, 16)])
    both(
        tmp_path,
        module=Vision,
        data=Data(images, batch_size=4),
        partition=parts,
        trainer={"max_epochs": 1},
        tolerance=1e-6,
    )


class Tied(Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.net[4].weight = self.net[2].weight
        self.again = self.net[2]

    def loss(self, batch):
        return nn.functional.cross_entropy(self.again(self.net(batch[0]))[:, :4], batch[1])


@pytest.mark.parametrize("form", ["dense", "weight", "update"])
def test_tied_weights(tmp_path, form):
    def tied():
        torch.manual_seed(5)
        return Tied()

    both(tmp_path, form=form, module=tied)


class Marked(FedAvg):
    """Shows in the module whose it is."""

    def configure(self, server, client):
        server.module.whose = "server" if client is None else "client"


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

    loop = FederatedLoop(Marked(), partition=FromIndices(UNEVEN), execution=execution, summary=False)
    module = Watching()
    fit(trainer(tmp_path, loop, max_epochs=2, val_check_interval=2), module, Data())
    assert module.validated > 5
    module.fails = True
    with pytest.raises(KeyError):
        fit(
            trainer(tmp_path, FederatedLoop(Marked(), partition=FromIndices(UNEVEN), execution=execution)),
            module,
            Data(),
        )
    assert module.whose == "server"


def normed():
    return Module(network(norm=nn.BatchNorm1d), optimizer=partial(torch.optim.Adam, lr=0.01))


def test_auto_says_what_it_chose_and_leaves_no_trace(tmp_path, capsys, monkeypatch):
    for faster, times in {"vectorized": (2.0, 1.0), "sequential": (1.0, 2.0)}.items():
        tried = []

        def trial(*arguments, tried=tried, times=times):
            tried.extend(try_both(*arguments))
            return times

        monkeypatch.setattr(loop_module, "try_both", trial)
        settings = {"module": normed, "data": Double(drop_last=True, batch_size=4)}
        module, loop, _ = run(tmp_path, "auto", **settings)
        assert len(tried) == 2
        assert min(tried) > 0
        printed = capsys.readouterr().out
        assert ("step together" if faster == "vectorized" else "one after another") in printed
        assert "ms alone and" in printed
        assert loop._vectorized is (faster == "vectorized")
        expected, _, _ = run(tmp_path, faster, **settings)
        assert_close(weights(expected), weights(module), tolerance=0)


@pytest.mark.parametrize(("module", "cause"), [(Item, "takes a number out of a tensor"), (Kept, "Take it from the")])
def test_auto_falls_back_and_says_why(tmp_path, capsys, module, cause):
    fallen, loop, _ = run(tmp_path, "auto", module=module)
    assert "one after another" in (printed := capsys.readouterr().out)
    assert cause in printed
    assert not loop._vectorized
    expected, _, _ = run(tmp_path, "sequential", module=module)
    assert_close(weights(expected), weights(fallen), tolerance=0)
    run(tmp_path, "auto", callbacks=[Reader()])
    assert "Reader.on_before_optimizer_step" in capsys.readouterr().out


def test_a_resumed_run_keeps_the_choice(tmp_path, monkeypatch):
    monkeypatch.setattr(loop_module, "try_both", lambda *a: (2.0, 1.0))
    every = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    whole, _, _ = run(tmp_path, "auto", callbacks=[every], trainer={"max_epochs": 2})
    monkeypatch.setattr(loop_module, "try_both", lambda *a: pytest.fail("tried again"))
    module, loop, _ = run(tmp_path, "auto", ckpt_path=tmp_path / "step=4.ckpt", trainer={"max_epochs": 2})
    assert loop._vectorized
    assert_close(weights(whole), weights(module), tolerance=0)


def test_a_graph_that_the_user_holds_on_to_does_no_harm(tmp_path):
    class Holding(Module):
        def training_step(self, batch, batch_idx):
            self.held = super().training_step(batch, batch_idx)
            return self.held

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.graphs = [*getattr(self, "graphs", []), self.held]

    both(tmp_path, module=Holding)


def test_a_training_step_without_an_index(tmp_path):
    class Plain(Module):
        def training_step(self, batch):
            return self.loss(batch)

    both(tmp_path, module=Plain)


def test_as_many_clients_as_memory_holds(monkeypatch):
    module = nn.Linear(100, 10)
    each = 6 * 4 * 1010
    for free, fitting in ((4 * each * 7, 7), (0, 1)):
        monkeypatch.setattr(vectorized, "_free_memory", lambda free=free: free)
        assert vectorized.clients_that_fit(module, torch.device("cpu")) == fitting


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_statistics_of_clients_whose_batches_are_of_one_size_but_not_neighbours(tmp_path, buffers):
    ends = [0, 10, 32, 46, 76, 88]
    parts = FromIndices([list(range(start, stop)) for start, stop in itertools.pairwise(ends)])
    norm = lambda: Module(network(norm=nn.BatchNorm1d))  # noqa: E731
    both(tmp_path, module=norm, partition=parts, local_epochs=2, buffers=buffers, data=Double(batch_size=8))


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
