"""Single samples: clipped gradients re-derived one by one, noise, batches, and what is refused."""

import itertools
import math
import warnings
from functools import partial

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from scipy import stats
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, WeightedRandomSampler
from torchmetrics.classification import MulticlassAccuracy

from lightning_lowrank import (
    CP,
    FFA,
    IID,
    MOON,
    SCAFFOLD,
    BlockKronecker,
    ClientPrivacy,
    DifferentialPrivacy,
    Ditto,
    FedAvg,
    FedDyn,
    FederatedLoop,
    FedLoRA,
    FedProx,
    FromIndices,
    Hadamard,
    HeteroFL,
    LowRank,
    MaskAbsentClasses,
    MatrixProduct,
    RoLoRA,
    SumProduct,
    convert,
)
from lightning_lowrank.federated.checks import check_factors_move
from lightning_lowrank.federated.execution.mapped_leaks import WATCHED_STEPS
from lightning_lowrank.federated.privacy import Mechanism
from lightning_lowrank.federated.privacy.noise import gaussian
from lightning_lowrank.federated.privacy.samples import SampleGradients
from lightning_lowrank.seeding import generator
from tests.helpers import Data, Module, assert_same, blobs, draw, fit, network, trainer, weights

SGD = partial(torch.optim.SGD, lr=0.1)


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(6, 4)


def private(**arguments) -> DifferentialPrivacy:
    return DifferentialPrivacy(**{"noise_multiplier": 1.0, **arguments})


# The gradients of single samples


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, inputs):
        return self.head(self.rnn(inputs)[0][:, -1])


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(7, 8), nn.LayerNorm(8)
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 4)

    def forward(self, inputs):
        values = self.norm(self.tokens(inputs))
        return self.head(self.attention(values, values, values)[0].mean(1))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.layer, self.unused = nn.Parameter(torch.tensor(1.5)), nn.Linear(6, 4), nn.Linear(0, 4)

    def forward(self, inputs):
        return self.scale * self.layer(inputs) + self.unused(inputs[:, :0])


def lowered(factorization, net, **settings):
    convert(net, factorization, **{"rank": 2, "allow_larger": True, "init": "uniform", **settings})
    return net


def convolutional():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.Flatten(), nn.Linear(16, 4)
    )


IMAGES = partial(draw, 5, 2, 5, 5)
NETWORKS = {
    "linear": (network, partial(draw, 5, 6)),
    "scalar and empty parameters": (Scaled, partial(draw, 5, 6)),
    "convolution": (convolutional, IMAGES),
    "attention": (Attending, lambda: torch.arange(15).view(5, 3) % 7),
    "sparse": (
        lambda: nn.Sequential(nn.Embedding(7, 8, sparse=True), nn.Flatten(), nn.Linear(24, 4)),
        lambda: torch.arange(15).view(5, 3) % 7,
    ),
    "recurrent": (Recurrent, partial(draw, 5, 4, 3)),
    "tied": (lambda: nn.Sequential(*[nn.Linear(6, 6)] * 2, nn.Linear(6, 4)), partial(draw, 5, 6)),
    "matrix product": (lambda: lowered(MatrixProduct(), network()), partial(draw, 5, 6)),
    "matrix product weight": (lambda: lowered(MatrixProduct(), network(), role="weight"), partial(draw, 5, 6)),
    "half frozen": (lambda: lowered(MatrixProduct(), network(), half_frozen=True), partial(draw, 5, 6)),
    "blocks": (lambda: lowered(BlockKronecker(), network(), decouple=True), partial(draw, 5, 6)),
    "hadamard": (lambda: lowered(Hadamard(), convolutional()), IMAGES),
    "cp": (lambda: lowered(CP(), convolutional()), IMAGES),
}


@pytest.mark.parametrize("at_once", [None, 2])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore:.*cannot be mapped over samples")
def test_clipped_gradients_are_those_of_one_sample_after_another(name, at_once):
    make, inputs = NETWORKS[name]
    torch.manual_seed(2)
    module, batch = Module(make()), (inputs(), torch.tensor([0, 1, 2, 3, 0]))
    names = [name for name, value in module.named_parameters() if value.requires_grad]
    rows = []
    for row in range(5):
        module.zero_grad()
        loss = module.loss([part[row : row + 1] for part in batch])
        loss.backward()
        rows.append((loss.item(), {each: module.get_parameter(each).grad.to_dense().clone() for each in names}))
    norms = [torch.cat([value.flatten() for value in of_row.values()]).norm().item() for _, of_row in rows]
    # It binds for some of the samples.
    clip, losses = sorted(norms)[2], [loss for loss, _ in rows]
    expected = {
        each: sum(of_row[each] * min(1.0, clip / norm) for (_, of_row), norm in zip(rows, norms, strict=True))
        for each in names
    }
    tensors = [*module.parameters(), *module.buffers()]
    loss, sums, logged, _ = SampleGradients(module, module.training_step, at_once).clipped(names, batch, 5, clip, (0,))
    assert all(now is then for now, then in zip([*module.parameters(), *module.buffers()], tensors, strict=True))
    assert loss.item() == pytest.approx(sum(losses) / 5, rel=1e-5)
    assert logged["train_loss"].item() == pytest.approx(sum(losses) / 5, rel=1e-5)
    for each, value in sums.items():
        assert torch.allclose(value, expected[each], rtol=1e-4, atol=1e-5), each


def test_a_sample_without_a_finite_gradient_counts_for_nothing():
    module = Module(linear())
    inputs = torch.cat([draw(2, 6), torch.full((1, 6), torch.inf)])
    gradients = SampleGradients(module, module.training_step)
    names = [name for name, _ in module.named_parameters()]
    labels = torch.tensor([0, 1, 2])
    found = gradients.clipped(names, (inputs, labels), 3, 1.0, (0,))[1]
    without = gradients.clipped(names, (inputs[:2], labels[:2]), 2, 1.0, (0,))[1]
    assert_same(found, without)


@pytest.mark.parametrize("at_once", [None, 16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_sample_moves_the_sum_by_no_more_than_the_clip(dtype, at_once):
    class Sum(Module):
        def training_step(self, batch, batch_idx):
            return (batch[0] * self.net).sum()

    module = Sum(nn.Parameter(torch.zeros(300, dtype=dtype)))
    gradients = SampleGradients(module, module.training_step, at_once)
    # Near 1/√300 · 130, a step of bfloat16's is half the clip over √300.
    samples = torch.full((131, 300), 3.0, dtype=dtype)
    each = [gradients.clipped(["net"], [samples[:size]], size, 1.0, (0,))[1]["net"] for size in range(126, 132)]
    for before, after in itertools.pairwise(each):
        assert (after.double() - before.double()).norm().item() == pytest.approx(1.0, abs=1e-3)
    draws = torch.randn(64, 300, generator=generator(0)).to(dtype)
    clipped = draws.double() * (0.5 / draws.double().norm(dim=1, keepdim=True))
    found = gradients.clipped(["net"], [draws], 64, 0.5, (0,))[1]["net"]
    assert torch.allclose(found.double(), clipped.sum(0), atol=1e-4)


@pytest.mark.slow
def test_steps_of_16_bits_have_sums_of_32(tmp_path):
    found = []
    for precision in ("bf16-true", "32-true"):
        module = Module(linear(), SGD)
        fit(trainer(tmp_path, private(clip=10.0, noise_multiplier=1e-6), precision=precision), module, Data(blobs(40)))
        found.append(weights(module))
    for name, value in found[0].items():
        assert value.dtype == torch.bfloat16
        assert torch.allclose(value.float(), found[1][name], atol=0.1), name


def test_batches_that_cannot_be_taken_apart():
    module = Module(linear())
    gradients = SampleGradients(module, module.training_step)
    with pytest.raises(MisconfigurationException, match=r"DifferentialPrivacy.*2"):
        gradients.clipped(["net.weight"], (torch.zeros(2, 6), torch.tensor(0.0)), 2, 1.0, (0,))


@pytest.mark.parametrize(
    ("collection", "read"),
    [(list, torch.as_tensor), (list, lambda entry: torch.stack([entry])), (tuple, len), (np.array, np.sum), (set, sum)],
)
def test_collections_of_all_samples_are_refused_if_a_step_reads_them(collection, read):
    module, names = Module(linear()), ["net.weight", "net.bias"]
    batch = {"pair": [draw(3, 6), torch.tensor([0, 1, 2])], "names": (torch.ones(3), collection([1.0, 2.0, 3.0]))}

    def reading(batch):
        read(batch["names"][1])
        return module.loss(batch["pair"])

    with pytest.raises(MisconfigurationException, match=r"reads batch\['names'\]\[1\]"):
        SampleGradients(module, reading).clipped(names, batch, 3, 1.0)
    found = SampleGradients(module, lambda batch: module.loss(batch["pair"])).clipped(names, batch, 3, 1.0)
    assert_same(found[1], SampleGradients(module, module.loss).clipped(names, batch["pair"], 3, 1.0)[1])


def nll(weight=None, reduction="mean"):
    return lambda outputs, targets: F.nll_loss(outputs.log_softmax(1), targets, weight, reduction=reduction)


RISING = torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize("make", [nn.CrossEntropyLoss, nll])
@pytest.mark.filterwarnings("error:.*cannot be mapped over samples")
def test_class_weights_that_a_mean_divides_by_are_refused(make):
    module, targets = Module(linear()), torch.tensor([0, 1, 2])
    losses = {"now": make()}
    gradients = SampleGradients(module, lambda batch: losses["now"](module.net(batch[0]), batch[1]).mean())
    clipped = partial(gradients.clipped, ["net.weight", "net.bias"], (draw(3, 6), targets), 3, 100.0)
    unweighted = clipped()[1]
    for _ in range(WATCHED_STEPS):
        clipped()
    # Weights may begin in a later epoch, before which a hook has steps looked at again.
    gradients.look_again()
    losses["now"] = make(weight=RISING)
    with pytest.raises(MisconfigurationException, match=r"weight=.*reduction='mean'"):
        clipped()
    losses["now"] = make(weight=torch.full((4,), 2.0))
    assert_same(clipped()[1], unweighted)
    gradients.look_again()
    losses["now"] = make(weight=RISING, reduction="none")
    assert not torch.allclose(clipped()[1]["net.bias"], unweighted["net.bias"], atol=0.01)


@pytest.mark.parametrize("targets", [torch.eye(4)[:3], torch.arange(6).view(3, 2) % 4])
def test_class_weights_of_several_classes_in_a_sample_are_not_refused(targets):
    module, inputs = Module(linear()), draw(3, 2, 6)
    loss = nn.CrossEntropyLoss(weight=RISING)

    def step(batch):
        outputs = module.net(batch[0])
        return loss(outputs[:, 0] if targets.is_floating_point() else outputs.mT, batch[1])

    expected = sum(step((inputs[row : row + 1], targets[row : row + 1])).item() for row in range(3)) / 3
    found = SampleGradients(module, step).clipped(["net.weight"], (inputs, targets), 3, 1.0)[0]
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_complex_numbers_get_no_noise():
    with pytest.raises(TypeError, match=r"'w'.*complex64.*torch\.view_as_real"):
        gaussian({"w": torch.zeros(2, dtype=torch.complex64)}, 1.0, 0, "noise")


# A fit


class Recorder(Module):
    """Keeps the gradients with which the optimizer steps, and the batches' sizes."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.gradients = []

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(torch.cat([value.grad.flatten().clone() for value in self.parameters()]).cpu())


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True])
def test_noise_of_steps(tmp_path, secure):
    module = Recorder(nn.Linear(6, 4), partial(torch.optim.SGD, lr=0.0))
    arguments = {"clip": 0.5, "noise_multiplier": 100.0, "secure": secure}
    fit(trainer(tmp_path, private(**arguments), max_epochs=5), module, Data(blobs(64)))
    # The gradients are small beside noise of z C over the batch size, 8.
    noise = torch.stack(module.gradients) / (100.0 * 0.5 / 8)
    assert noise.shape == (40, 28)
    assert stats.kstest(noise.flatten().numpy(), "norm").pvalue > 1e-4
    assert noise.var().item() == pytest.approx(1, abs=5 * math.sqrt(2 / noise.numel()))
    # In single precision two of a thousand may be one number by chance.
    assert len(noise.unique()) > noise.numel() - 10


def test_noise_has_the_seed_that_was_set_before_the_fit(tmp_path):
    callback = private()
    pl.seed_everything(2, verbose=False)
    fit(trainer(tmp_path, callback, max_epochs=1, max_steps=1, limit_val_batches=0), Module(linear()), Data())
    assert callback.seed == 2


@pytest.mark.slow
def test_a_step_is_dp_sgd(tmp_path):
    """The gradients of a fit, with Poisson batches drawn again, in plain PyTorch."""
    data = blobs(40)
    module = Recorder(linear(), partial(torch.optim.SGD, lr=0.0))
    callback = private(clip=0.3, noise_multiplier=1e-7, seed=4)
    fit(trainer(tmp_path, callback, max_epochs=2), module, Data(data))
    sizes = []
    for number, found in enumerate(module.gradients):
        chances = torch.rand(40, generator=generator(4, "poisson", number), dtype=torch.float64)
        drawn = (chances < 8 / 40).nonzero().flatten()
        sizes.append(len(drawn))
        expected = torch.zeros(28)
        for row in drawn.tolist():
            module.zero_grad()
            nn.functional.cross_entropy(module.net(data.tensors[0][row]), data.tensors[1][row]).backward()
            gradient = torch.cat([value.grad.flatten() for value in module.parameters()])
            expected += gradient * min(1.0, 0.3 / gradient.norm().item())
        assert torch.allclose(found, expected / 8, atol=1e-5)
    assert len(set(sizes)) > 2


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True])
def test_a_second_fit_goes_on_with_noise_and_batches_of_its_own(tmp_path, secure):
    module, callback = Recorder(linear(), partial(torch.optim.SGD, lr=0.0)), private(secure=secure)
    for _ in range(2):
        fit(trainer(tmp_path, callback, max_epochs=1), module, Data(blobs(40)))
    assert callback.steps_of() == 10
    assert callback.epsilon() == Mechanism(1.0, 8, 40).epsilon(10, 1e-5)
    assert len(torch.stack(module.gradients).unique()) == 10 * 28
    drawn = [callback._loader.drawn(number).tolist() for number in range(10)]
    assert drawn[:5] != drawn[5:]


@pytest.mark.slow
def test_an_empty_batch_is_a_step_of_noise(tmp_path):
    module = Recorder(linear(), partial(torch.optim.SGD, lr=0.0))
    callback = private(clip=100.0, noise_multiplier=1e-7)
    run = trainer(tmp_path, callback, max_epochs=3)
    fit(run, module, Data(blobs(12), batch_size=1))
    empty = [number for number in range(36) if not len(callback._loader.drawn(number))]
    assert 5 < len(empty) < 30
    for number, gradient in enumerate(module.gradients):
        assert (gradient.abs().max() < 1e-3) == (number in empty)
    assert callback.steps_of() == 36
    assert callback.epsilon() == Mechanism(1e-7, 1, 12).epsilon(36, 1e-5)


@pytest.mark.slow
def test_epsilon_is_logged_and_the_fit_ends_before_the_budget(tmp_path):
    class Prefixed(Module):
        def log(self, name, value, **settings):
            super().log(f"my/{name}", value, **settings)

    callback = private(target_epsilon=4.0)
    run = trainer(tmp_path, callback, max_epochs=50)
    fit(run, Prefixed(linear(), SGD), Data(blobs(64)))
    steps = callback.steps_of()
    one = Mechanism(1.0, 8, 64)
    assert one.epsilon(steps, 1e-5) <= 4.0 < one.epsilon(steps + 1, 1e-5)
    assert run.global_step == steps < 400
    assert run.callback_metrics["privacy/epsilon"].item() == callback.epsilon() == one.epsilon(steps, 1e-5)
    assert run.callback_metrics["my/train_loss"].isfinite()
    # A minimum of epochs does not go beyond it.
    with pytest.raises(
        MisconfigurationException, match=rf"{steps} steps have cost .* above target_epsilon=4: raise it"
    ):
        fit(
            trainer(tmp_path, private(target_epsilon=4.0), max_epochs=50, min_epochs=50),
            Module(linear(), SGD),
            Data(blobs(64)),
        )


@pytest.mark.slow
def test_noise_is_found_for_a_single_round(tmp_path):
    callback = DifferentialPrivacy(target_epsilon=3.0)
    loop = FederatedLoop(FedAvg(), clients=2, partition=IID(), summary=False)
    run = trainer(tmp_path, loop, callback, max_epochs=1)
    fit(run, Module(linear(), SGD), Data(blobs(64)))
    assert 2.99 < callback.epsilon(0) <= 3.0


@pytest.mark.nightly
def test_noise_is_found_for_the_steps(tmp_path):
    callback = DifferentialPrivacy(target_epsilon=3.0)
    run = trainer(tmp_path, callback, max_epochs=3)
    fit(run, Module(linear(), SGD), Data(blobs(64)))
    assert run.global_step == 24
    assert 2.99 < callback.epsilon() <= 3.0


@pytest.mark.slow
@pytest.mark.parametrize("federated", [False, True])
@pytest.mark.nightly
def test_resume_is_exact(tmp_path, federated):
    def made():
        loop = FederatedLoop(FedAvg(), clients=4, clients_per_round=2, local_epochs=2, summary=False)
        net = network(dropout=0.2)
        return [*([loop] if federated else []), DifferentialPrivacy(target_epsilon=8.0)], Module(net, SGD)

    callbacks, module = made()
    keep = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=3)
    fit(trainer(tmp_path, *callbacks, keep, max_epochs=3), module, Data(blobs(64)))
    files = sorted(tmp_path.glob("step*.ckpt"))
    assert len(files) > 5
    for file in files[:4]:
        again, other = made()
        fit(trainer(tmp_path, *again, max_epochs=3), other, Data(blobs(64)), ckpt_path=file)
        assert_same(weights(module), weights(other))
        assert again[-1].epsilons() == callbacks[-1].epsilons()
    changed, other = made()
    changed[-1] = DifferentialPrivacy(target_epsilon=8.0, clip=2.0)
    with pytest.raises(MisconfigurationException, match=r"clip"):
        fit(trainer(tmp_path, *changed, max_epochs=3), other, Data(blobs(64)), ckpt_path=files[0])


def test_a_fit_resumed_inside_a_round_is_private_with_a_method_that_adds_to_the_loss(tmp_path):
    """The step with the method's term is made anew in a resumed fit, and must not take the private one's place."""

    def made():
        loop = FederatedLoop(MOON("net"), clients=3, summary=False)
        return loop, private(), Module(linear(), SGD)

    loop, privacy, module = made()
    keep = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=3)
    fit(trainer(tmp_path, loop, privacy, keep, max_epochs=1), module, Data(blobs(64)))
    loop, again, other = made()
    fit(trainer(tmp_path, loop, again, max_epochs=1), other, Data(blobs(64)), ckpt_path=tmp_path / "step=3.ckpt")
    assert_same(weights(module), weights(other))
    assert again.epsilons() == privacy.epsilons()
    assert min(again.epsilons().values()) > 0


class Counting(Module):
    """Its steps read a counter that passes from client to client, which the loop tries on a client's first batch."""

    seen = 0

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return (1 + self.seen) * super().training_step(batch, batch_idx)


def test_a_step_that_is_tried_costs_no_privacy(tmp_path):
    callback = private()
    loop = FederatedLoop(FedAvg(), clients=3, local_steps=1, summary=False)
    run = trainer(tmp_path, loop, callback, max_epochs=2, limit_val_batches=0)
    with pytest.warns(UserWarning, match=r"attributes of the module: seen\."):
        run.fit(Counting(linear()), Data(blobs(64)))
    assert [callback.steps_of(client) for client in range(3)] == [2, 2, 2]


def test_validation_by_the_training_step_has_no_term_of_the_method(tmp_path):
    class Validates(Module):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.training_step(batch, batch_idx))
            self.log("expected", self.loss(batch))

    run = trainer(tmp_path, FederatedLoop(MOON("net"), clients=3, summary=False), private(), max_epochs=1)
    fit(run, Validates(linear()), Data(blobs(64)))
    assert run.callback_metrics["val_loss"] == run.callback_metrics["expected"]


@pytest.mark.slow
def test_the_trainer_and_the_module_are_given_back(tmp_path):
    module, data = Module(linear(), SGD), Data(blobs(40))
    run = trainer(tmp_path, private(), max_epochs=1)
    fit(run, module, data)
    assert "training_step" not in vars(module)
    # Without the callback the same trainer makes the loader's own batches.
    run.callbacks = []
    run.fit_loop.max_epochs = 2
    fit(run, module, data)
    assert type(run.train_dataloader) is DataLoader


# Clients


def federated(tmp_path, algorithm=None, callback=None, net=None, low_rank=None, **settings):
    loop = FederatedLoop(
        FedAvg() if algorithm is None else algorithm,
        **{"clients": 4, "clients_per_round": 2, "summary": False, **settings},
    )
    callback = private() if callback is None else callback
    module = Module(linear() if net is None else net, SGD)
    run = trainer(tmp_path, *([] if low_rank is None else [low_rank]), loop, callback, max_epochs=3)
    fit(run, module, Data(blobs(64)))
    return run, module, loop, callback


@pytest.mark.slow
def test_a_second_run_of_a_federation_is_refused(tmp_path):
    _, module, loop, callback = federated(tmp_path)
    spent = callback.epsilons()
    for _ in range(2):
        with pytest.raises(MisconfigurationException, match=r"FederatedLoop.*0.*FederatedLoop"):
            fit(trainer(tmp_path, loop, callback, max_epochs=1), module, Data(blobs(64)))
        # Without the callback nothing is private, and another loop has an account of its own.
        fit(trainer(tmp_path, loop, max_epochs=1), module, Data(blobs(64)))
    assert federated(tmp_path)[3].epsilons() == spent


class Sequences(nn.Module):
    def __init__(self, kind, packed):
        super().__init__()
        self.rnn, self.head, self.packed = kind(3, 5, batch_first=True), nn.Linear(5, 4), packed

    def forward(self, inputs):
        inputs = inputs.view(len(inputs), 2, 3)
        if self.packed:
            lengths = (inputs[:, 1, 0] > 0).long().cpu() + 1
            inputs = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        hidden = self.rnn(inputs)[1]
        return self.head((hidden[0] if isinstance(hidden, tuple) else hidden)[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "packed"), [(nn.LSTM, False), (nn.LSTM, True), (nn.GRU, False), (nn.GRU, True), (nn.RNN, False)]
)
def test_recurrent_layers_train_in_a_federation(tmp_path, kind, packed):
    net = Sequences(kind, packed)
    before = weights(net)
    module = Module(net, SGD)
    loop = FederatedLoop(FedAvg(), clients=2, summary=False, on_client_error="raise")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer(tmp_path, loop, private(), max_epochs=1).fit(module, Data(blobs(32)))
    assert not [each for each in told if "attributes of the module" in str(each.message)]
    assert all(not torch.equal(value, before[name]) for name, value in weights(net).items())
    assert all(one is two for one, two in zip(net.rnn._flat_weights, net.rnn.parameters(), strict=True))


class LeavesOutputs(Module):
    def training_step(self, batch, batch_idx):
        outputs = self.net(batch[0])
        self.outputs = outputs.detach()
        return nn.functional.cross_entropy(outputs, batch[1])


@pytest.mark.slow
def test_what_a_mapped_step_leaves_is_not_looked_at(tmp_path):
    loop = FederatedLoop(FedAvg(), clients=2, summary=False, on_client_error="raise")
    run = trainer(tmp_path, loop, private(), max_epochs=1)
    fit(run, LeavesOutputs(linear(), SGD), Data(blobs(32)))
    assert run.current_epoch == 1


@pytest.mark.slow
def test_every_client_has_its_own_epsilon(tmp_path):
    run, _, _, callback = federated(
        tmp_path, local_epochs=2, clients=2, partition=FromIndices([range(30), range(30, 64)])
    )
    expected = {}
    for client, samples in enumerate((30, 34)):
        steps = 3 * 2 * math.ceil(samples / 8)
        expected[client] = Mechanism(1.0, 8, samples).epsilon(steps, 1e-5)
        assert run.callback_metrics[f"privacy/epsilon/{client}"].item() == expected[client]
    assert callback.epsilons() == expected
    assert run.callback_metrics["privacy/epsilon"].item() == max(expected.values())


@pytest.mark.slow
def test_clients_and_samples_have_epsilons_of_their_own(tmp_path):
    clients = ClientPrivacy(noise_multiplier=1.0)
    run, _, loop, callback = federated(tmp_path, privacy=clients, weighting="uniform")
    logged = {name: value.item() for name, value in run.callback_metrics.items() if "epsilon" in name}
    expected = {f"privacy/samples/epsilon/{client}": value for client, value in callback.epsilons().items()}
    expected["privacy/samples/epsilon"] = max(expected.values())
    assert logged == {**expected, "privacy/epsilon": pytest.approx(loop.exchange.private.epsilon())}
    assert logged["privacy/epsilon"] != logged["privacy/samples/epsilon"]


@pytest.mark.slow
def test_a_client_trains_as_a_fit_of_its_own(tmp_path):
    """A federation of one client makes the steps of the callback alone, up to the draws' names."""
    _, module, loop, _ = federated(
        tmp_path, callback=private(noise_multiplier=1e-7, clip=100.0), clients=1, clients_per_round=1
    )
    data, net = blobs(64), linear()
    optimizer = SGD(net.parameters())
    for round_number in range(3):
        for step in range(8):
            rows = loop.data.loader.drawn(round_number, 0, step)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(data.tensors[0][rows]), data.tensors[1][rows], reduction="sum")
            (loss / 8).backward()
            optimizer.step()
    for name, value in net.state_dict().items():
        assert torch.allclose(weights(module)[f"net.{name}"], value, atol=1e-4)


@pytest.mark.slow
def test_the_budget_ends_rounds(tmp_path):
    loop = FederatedLoop(FedAvg(), clients=4, clients_per_round=2, summary=False)
    callback = private(target_epsilon=12.0)
    run = trainer(tmp_path, loop, callback, max_epochs=50)
    fit(run, Module(linear(), SGD), Data(blobs(64)))
    assert 1 < run.current_epoch < 50
    assert max(callback.epsilons().values()) <= 12.0
    plan = loop.data.planner.plan(run.current_epoch)
    assert any(callback.epsilon(client, more) > 12.0 for client, more in zip(plan.clients, plan.batches, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "factor"), [(FFA, {0: "B", 1: "B"}), (RoLoRA, {0: "B", 1: "A"})])
def test_a_factor_that_stands_still_takes_no_part_of_the_clip(tmp_path, algorithm, factor):
    class Seen(Module):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.seen = {}

        def on_after_backward(self):
            moved = {name for name, value in self.named_parameters() if value.grad is not None and value.grad.any()}
            self.seen.setdefault(self.current_epoch, set()).update(moved)

    module = Seen(network(), SGD)
    low_rank = LowRank(MatrixProduct(), rank=2, alpha=2, init="lora", freeze_rest=True, summary=False)
    loop = FederatedLoop(FedLoRA(algorithm()), clients=2, summary=False)
    fit(trainer(tmp_path, low_rank, loop, private(), max_epochs=2), module, Data(blobs(64)))
    names = {"B": "U", "A": "V"}
    for number, trained in factor.items():
        factors = {name.rsplit(".", 1)[-1] for name in module.seen[number] if ".factors." in name}
        assert factors == {names[trained]}


@pytest.mark.parametrize(
    "algorithm",
    [
        FedLoRA(SumProduct(), ranks=[2, 1]),
        pytest.param(FedLoRA(SumProduct(), levels=(1.0, 0.5), capacity="dynamic"), marks=pytest.mark.slow),
        HeteroFL((1.0, 0.5)),
    ],
    ids=["ranks", "levels", "channels"],
)
def test_noise_does_not_train_what_a_client_lacks(tmp_path, algorithm, monkeypatch):
    lacked, end = {}, type(algorithm).end

    def watched(self, client):
        message = end(self, client)
        for name, value in message.tensors.items():
            trained = client.model[name].detach().clone()
            if value.shape != trained.shape:
                trained[tuple(map(slice, value.shape))] = 0
                lacked[name] = max(trained.abs().max().item(), lacked.get(name, 0))
        return message

    monkeypatch.setattr(type(algorithm), "end", watched)
    low_rank = LowRank(MatrixProduct(), rank=2, alpha=2, init="lora", freeze_rest=True, summary=False)
    loop = FederatedLoop(algorithm, clients=2, summary=False, local_steps=2)
    module = Module(network(), partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1))
    callbacks = [loop, private()] if isinstance(algorithm, HeteroFL) else [low_rank, loop, private()]
    fit(trainer(tmp_path, *callbacks, max_epochs=2), module, Data(blobs(32)))
    assert lacked
    assert not any(lacked.values()), lacked


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        # Its terms are of the parameters that the step is called with.
        partial(FedDyn, alpha=2.0),
        partial(FedProx, mu=5.0),
        partial(MOON, "net"),
        SCAFFOLD,
    ],
)
def test_a_methods_own_terms_are_in_the_gradient(tmp_path, algorithm):
    """Without noise and clipping, and all samples in each batch, it is the method as it is without privacy."""
    data = Data(blobs(24), batch_size=24)
    found = []
    for callback in ([], [private(noise_multiplier=1e-9, clip=100.0)]):
        module = Module(network(), SGD)
        loop = FederatedLoop(algorithm(), clients=2, local_epochs=3, summary=False)
        fit(trainer(tmp_path, loop, *callback, max_epochs=2), module, data)
        found.append(weights(module))
    for name, value in found[0].items():
        assert torch.allclose(value, found[1][name], atol=2e-5), name


# Refusals


class Measured(Module):
    def __init__(self, log):
        super().__init__(linear(), SGD)
        self.accuracy, self.logs = MulticlassAccuracy(4), log

    def training_step(self, batch, batch_idx):
        self.accuracy(self.net(batch[0]), batch[1])
        if self.logs:
            self.log("acc", self.accuracy)
        return self.loss(batch)


class Running(Module):
    def __init__(self):
        super().__init__(linear(), SGD)
        self.register_buffer("mean", torch.zeros(6))

    def training_step(self, batch, batch_idx):
        self.mean = 0.9 * self.mean + 0.1 * batch[0].detach().mean(0)
        return self.loss(batch)


class Spectral(Module):
    def __init__(self):
        super().__init__(linear(), SGD)
        self.spectrum = nn.Parameter(torch.ones(3, dtype=torch.complex64))


class Manual(Module):
    def __init__(self):
        super().__init__(linear(), SGD)
        self.automatic_optimization = False


class Twice(torch.optim.SGD):
    def step(self, closure=None):
        closure()
        return super().step(closure)


class SamplerData(Data):
    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, sampler=WeightedRandomSampler([1.0] * 40, 40))


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (lambda: Module(network(norm=nn.BatchNorm1d), SGD), r"BatchNorm \(net\.1\)"),
        (Manual, "DifferentialPrivacy"),
        (lambda: Module(linear(), torch.optim.LBFGS), "LBFGS takes several"),
        (lambda: Module(linear(), partial(Twice, lr=0.1)), "DifferentialPrivacy"),
        (partial(Measured, True), r"MulticlassAccuracy.*'acc'"),
        (partial(Measured, False), "training_step"),
        (Running, "training_step"),
        (Spectral, r"spectrum: .*torch\.view_as_real"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*cannot be mapped over samples")
def test_modules_that_are_refused(tmp_path, module, said):
    with pytest.raises(MisconfigurationException, match=said):
        fit(trainer(tmp_path, private()), module(), Data(blobs(40)))


def changed_by(hook, change):
    """Return a module with a buffer of its own, one of whose hooks changes it or a parameter."""

    class Changing(Module):
        def __init__(self):
            super().__init__(network(), SGD)
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("count", torch.tensor(0))

    def changing(self, *given):
        inputs = next((each for each in given if isinstance(each, (list, tuple))), given)[0]
        with torch.no_grad():
            change(self, inputs.mean(0) if inputs.ndim else inputs.repeat(6))
        return getattr(pl.LightningModule, hook)(self, *given) if hook != "training_step" else self.loss(given[0])

    setattr(Changing, hook, changing)
    return Changing()


CHANGES = {
    "in place": lambda module, mean: module.mean.copy_(mean),
    "assigned": lambda module, mean: setattr(module, "mean", mean),
    "data": lambda module, mean: setattr(module.mean, "data", mean),
    "a parameter": lambda module, mean: module.net[0].weight[0].copy_(mean),
}
HOOKS = ("on_train_batch_start", "on_before_backward", "on_train_batch_end", "on_after_batch_transfer", "training_step")


@pytest.mark.parametrize(("hook", "change"), [*itertools.product(HOOKS, CHANGES)][:-1])
@pytest.mark.parametrize("loops", [[], [FederatedLoop(FedAvg(), clients=2, summary=False)]], ids=["plain", "federated"])
@pytest.mark.filterwarnings("ignore:.*cannot be mapped over samples")
def test_samples_that_reach_the_model_beside_the_gradients_are_refused(tmp_path, loops, hook, change):
    name = "net.0.weight" if change == "a parameter" else "mean"
    place = hook if hook == "training_step" else rf"Changing\.{hook}\(\)"
    loops = [FederatedLoop(FedAvg(), clients=2, summary=False)] if loops else []
    with pytest.raises(MisconfigurationException, match=rf"DifferentialPrivacy.*{place}.*changes {name}"):
        fit(trainer(tmp_path, *loops, private()), changed_by(hook, CHANGES[change]), Data(blobs(40)))


def test_a_callback_that_is_given_batches_changes_nothing(tmp_path):
    class Copies(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            pl_module.net.bias.data.copy_(batch[0].mean(0)[:4])

    with pytest.raises(MisconfigurationException, match=r"Copies\.on_train_batch_end\(\).*changes net\.bias"):
        fit(trainer(tmp_path, private(), Copies()), Module(linear(), SGD), Data(blobs(40)))


class Follows(Module):
    """A teacher that follows the trained network, by an assignment to its data as in MoCo's own code, or in place."""

    def __init__(self, hook, in_place=True):
        super().__init__(linear(), SGD)
        self.teacher, self.hook, self.in_place = linear().requires_grad_(False), hook, in_place
        self.register_buffer("count", torch.tensor(0))

    def follow(self, hook):
        if hook == self.hook:
            for own, value in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                if self.in_place:
                    own.data.mul_(0.9).add_(value.data, alpha=0.1)
                else:
                    own.data = 0.9 * own.data + 0.1 * value.data

    def training_step(self, batch, batch_idx):
        self.follow("training_step")
        return self.loss(batch)

    def on_before_zero_grad(self, optimizer):
        self.follow("on_before_zero_grad")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.count += 1
        self.follow("on_train_batch_end")


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("hook", ["training_step", "on_before_zero_grad", "on_train_batch_end"])
@pytest.mark.filterwarnings("ignore:.*cannot be mapped over samples")
def test_a_teacher_follows_once_a_batch_or_is_refused(tmp_path, hook, in_place):
    """In a training step it would follow once for each sample."""
    loop = FederatedLoop(FedAvg(), clients=1, ema_parameters=["teacher.*"], summary=False)
    module = Follows(hook, in_place)
    fitted = trainer(tmp_path, loop, private(), max_epochs=1, limit_train_batches=1)
    if hook == "training_step":
        with pytest.raises(MisconfigurationException, match=r"several times.*changes teacher\.weight"):
            fit(fitted, module, Data(blobs(40)))
        return
    fit(fitted, module, Data(blobs(40)))
    assert int(module.count) == 1
    followed = module.net if hook == "on_train_batch_end" else linear()
    for own, value, start in zip(
        module.teacher.parameters(), followed.parameters(), linear().parameters(), strict=True
    ):
        torch.testing.assert_close(own.data, 0.9 * start + 0.1 * value)


@pytest.mark.parametrize("samples", [1, 6])
@pytest.mark.filterwarnings("ignore:.*cannot be mapped over samples")
def test_a_trained_parameter_that_a_step_assigns_to_is_refused(samples):
    """The step has a copy of it, which the assignment would reach alone."""
    module = Module(linear())

    def step(batch):
        module.net.weight.data = 0.9 * module.net.weight.detach()
        return module.loss(batch)

    batch = [torch.randn(samples, 6), torch.zeros(samples, dtype=torch.long)]
    with pytest.raises(MisconfigurationException, match=r"changes net\.weight each time"):
        SampleGradients(module, step).clipped(["net.weight", "net.bias"], batch, samples, 1.0)


@pytest.mark.filterwarnings("ignore:.*cannot be mapped over samples")
def test_parameters_that_a_step_puts_into_other_memory_are_the_same():
    """As nn.LSTM.flatten_parameters() does on a GPU."""
    module = Module(linear())

    def step(batch):
        module.net.weight.data = module.net.weight.detach().clone()
        return module.loss(batch)

    batch, names = [torch.randn(6, 6), torch.zeros(6, dtype=torch.long)], ["net.weight", "net.bias"]
    expected = SampleGradients(module, module.loss).clipped(names, batch, 6, 1.0)
    found = SampleGradients(module, step).clipped(names, batch, 6, 1.0)
    torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize("at_once", [None, 3])
def test_what_a_step_does_once_for_each_call_is_refused_or_told(at_once):
    """By parts of a batch, or by single samples where the step cannot be mapped."""

    class Counting(Module):
        def training_step(self, batch, batch_idx):
            self.calls = getattr(self, "calls", 0) + 1
            return self.loss(batch) * (1 if at_once or (self.calls > 0 and float(batch[0].sum()) < 1e9) else 2)

    module, batch = Counting(linear()), [torch.randn(6, 6), torch.zeros(6, dtype=torch.long)]
    module.calls = 0
    gradients = SampleGradients(module, lambda batch: module.training_step(batch, 0), at_once)
    with pytest.warns(UserWarning, match=r"several times.*changes the number self\.calls"):
        gradients.clipped(["net.weight", "net.bias"], batch, 6, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients.clipped(["net.weight", "net.bias"], batch, 6, 1.0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"accumulate_grad_batches": 2}, "set accumulate_grad_batches=1"),
        ({"overfit_batches": 2}, "overfit_batches=2"),
        ({"reload_dataloaders_every_n_epochs": 1}, "DifferentialPrivacy"),
    ],
)
def test_trainers_that_are_refused(tmp_path, settings, said):
    with pytest.raises(MisconfigurationException, match=said):
        fit(trainer(tmp_path, private(), **settings), Module(linear(), SGD), Data(blobs(40)))


@pytest.mark.parametrize("loops", [[], [FederatedLoop(FedAvg(), clients=2, summary=False)]], ids=["plain", "federated"])
def test_batches_that_are_drawn_otherwise(tmp_path, loops):
    with pytest.raises(MisconfigurationException, match="draws with WeightedRandomSampler"):
        fit(trainer(tmp_path, *loops, private()), Module(linear(), SGD), SamplerData(blobs(40)))


@pytest.mark.parametrize("loops", [[], [FederatedLoop(FedAvg(), clients=2, summary=False)]], ids=["plain", "federated"])
def test_a_batch_that_is_none_is_refused(tmp_path, loops):
    data = Data(blobs(40), collate_fn=lambda samples: None)
    with pytest.raises(MisconfigurationException, match=r"DifferentialPrivacy.*None"):
        fit(trainer(tmp_path, *loops, private()), Module(linear(), SGD), data)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"algorithm": Ditto()}, r"OwnSteps\.local_update"),
        ({"execution": "vectorized"}, "DifferentialPrivacy"),
        ({"objective": MaskAbsentClasses("net", classes=4)}, r"DifferentialPrivacy.*DifferentialPrivacy"),
        ({"partition": FromIndices([range(40), range(39, 64)]), "clients": 2}, r"index.*39.*0"),
    ],
)
def test_federations_that_are_refused(tmp_path, arguments, said):
    with pytest.raises(MisconfigurationException, match=said):
        federated(tmp_path, **arguments)


@pytest.mark.slow
def test_factors_that_cannot_move():
    net = network()
    convert(net, MatrixProduct(), rank=2, alpha=2, init="lora")
    every = [name for name, value in net.named_parameters() if value.requires_grad]
    check_factors_move(net, every, "")
    check_factors_move(net, [name for name in every if not name.endswith(".V")], "")
    with pytest.raises(MisconfigurationException, match=r"DifferentialPrivacy.*0.*2"):
        check_factors_move(net, [name for name in every if not name.endswith(".U")], "DifferentialPrivacy")
    with torch.no_grad():
        net[0].factors.U.fill_(0.5)
    with pytest.raises(MisconfigurationException, match=r"factors of 2, 4 have"):
        check_factors_move(net, [name for name in every if not name.endswith(".U")], "")


@pytest.mark.slow
def test_factors_of_peft_that_cannot_move():
    peft = pytest.importorskip("peft")
    net = peft.get_peft_model(network(), peft.LoraConfig(r=2, target_modules=["0", "2"]))
    every = [name for name, value in net.named_parameters() if value.requires_grad]
    check_factors_move(net, every, "")
    with pytest.raises(MisconfigurationException, match=r"base_model\.model\.2"):
        check_factors_move(net, [name for name in every if "lora_A" in name], "")


@pytest.mark.slow
def test_products_are_trained_too(tmp_path):
    low_rank = LowRank(MatrixProduct(), rank=2, alpha=2, init="lora", freeze_rest=True, summary=False)
    run, *_ = federated(tmp_path, FedLoRA(SumProduct()), net=network(), low_rank=low_rank)
    assert run.callback_metrics["privacy/epsilon"] > 0
