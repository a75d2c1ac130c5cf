"""What is released of clients: bounded, noised as accounted, and nothing else."""

import math
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

from lightning_lowrank import (
    EF21P,
    FFA,
    SCAFFOLD,
    ClientPrivacy,
    FedAvg,
    FedAvgM,
    FedBAT,
    FederatedLoop,
    FedLoRA,
    FedNova,
    FromIndices,
    Half,
    LowRank,
    LowRankCodec,
    MatrixProduct,
    Quantize,
    RandomK,
    RandomMask,
    Sign,
    StaticBatchNorm,
    SumProduct,
    TopK,
)
from lightning_lowrank.aggregation import KeepsArrivals
from lightning_lowrank.compression import Dense, Mask
from lightning_lowrank.federated.privacy.mean import Drawing, PrivateMean
from lightning_lowrank.federated.protocols import needs_only_mean
from tests.algorithms.methods import LOW_RANK, METHODS, each_method
from tests.helpers import Data, Module, assert_same, blobs, fit, network, trainer, weights

SGD = partial(torch.optim.SGD, lr=0.1)
CLIENTS = 5
AT_CLIENTS = {"sampling": "fixed", "noise_at": "clients"}
PARTS = [list(range(first, 40, CLIENTS)) for first in range(CLIENTS)]


def loop_of(algorithm=None, privacy=None, **settings) -> FederatedLoop:
    given = {"noise_multiplier": 1.0, **(privacy or {})}
    return FederatedLoop(
        FedAvg() if algorithm is None else algorithm,
        **{
            "partition": FromIndices(PARTS),
            "weighting": "uniform",
            "privacy": ClientPrivacy(**given),
            "summary": False,
            **settings,
        },
    )


def small() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(6, 4)


def mean_of(private: dict, **arguments) -> PrivateMean:
    given = {"clients_per_round": 4, "population": 8, "rounds": 3, "shares": 2, **arguments}
    shares = given.pop("shares")
    drawing = Drawing(least=given["clients_per_round"], **given)
    return PrivateMean(ClientPrivacy(**{"noise_multiplier": 2.0, **private}), FedAvg(), 0, drawing, shares)


def draws(mean: PrivateMean, count: int = 6, size: int = 4000) -> torch.Tensor:
    """Release rounds of nothing, and return their noise over what it should be."""
    zero = {"w": torch.zeros(size // 2), "v": torch.zeros(2, size // 4)}
    found = [mean.noised_mean(zero, zero, number) for number in range(count)]
    return torch.stack([torch.cat([each["w"], each["v"].flatten()]) for each in found])


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize(("clip", "sampling"), [(0.5, "poisson"), (3.0, "fixed")])
def test_noise_is_that_which_is_accounted(secure, clip, sampling):
    mean = mean_of({"clip": clip, "secure": secure, "sampling": sampling})
    # z C on the sum, which is divided by the cohort's size.
    found = draws(mean) / (2.0 * clip / 4)
    assert stats.kstest(found.flatten().numpy(), "norm").pvalue > 1e-4
    assert found.var().item() == pytest.approx(1, abs=5 * math.sqrt(2 / found.numel()))
    correlations = torch.corrcoef(found) - torch.eye(len(found))
    assert correlations.abs().max().item() < 6 / math.sqrt(found.shape[1])
    assert torch.equal(draws(mean_of({"clip": clip, "sampling": sampling})), draws(mean)) == (not secure)


def test_noise_of_clients_adds_up():
    privacy = {"clip": 0.7, "sampling": "fixed", "noise_at": "clients"}
    update = {"w": torch.full((3000,), 1.0)}
    center = {"w": torch.zeros(3000)}
    mean = mean_of(privacy, shares=4)
    for client in range(4):
        mean.add(mean.protected(update, center, 0, client), center)
    found = mean.noised_mean(update, center, 0)["w"]
    clipped = 0.7 / math.sqrt(3000)
    assert stats.kstest(((found - clipped) / (2.0 * 0.7 / 4)).numpy(), "norm").pvalue > 1e-4


def test_buffers_of_one_byte_are_noised_in_float32():
    mean, center = mean_of({}), {"scale": torch.ones(3).to(torch.float8_e4m3fn)}
    mean.add(center, center)
    assert mean.noised_mean(center, center, 0)["scale"].dtype == torch.float32


def test_an_update_is_clipped_as_a_whole():
    mean = mean_of({"clip": 1.0})
    center = {"w": torch.tensor([1.0, 1.0]), "b": torch.tensor(5.0)}
    far = {"w": torch.tensor([1.0, 5.0]), "b": torch.tensor(2.0)}
    near = {"w": torch.tensor([1.0, 1.5]), "b": torch.tensor(5.0)}
    for message in (far, near):
        mean.add(message, center)
    noise = mean_of({"clip": 1.0}).noised_mean(center, {}, 0)
    found = mean.noised_mean(center, center, 0)
    # (0, 4) and -3 have the norm 5.
    assert torch.allclose(found["w"] - noise["w"], torch.tensor([1.0, 1.0 + (0.8 + 0.5) / 4]), atol=1e-6)
    assert torch.allclose(found["b"] - noise["b"], torch.tensor(5.0 - 0.6 / 4), atol=1e-6)


@pytest.mark.slow
def test_the_clip_follows_a_quantile():
    private = {"clip": 8.0, "quantile": 0.75, "count_noise": 1.01, "clip_lr": 0.3}
    mean = mean_of(private, clients_per_round=100, population=200)
    norms = torch.linspace(0.0, 4.0, 100)
    center = {"w": torch.zeros(1)}
    for number in range(20):
        for value in norms:
            mean.add({"w": value.view(1)}, center)
        mean.noised_mean(center, center, number)
    assert mean.clip == pytest.approx(3.0, abs=0.2)
    # The two releases of a round together have the accounted noise (Andrew et al., Theorem 1).
    assert mean.noise_of_updates**-2 + (2 * 1.01) ** -2 == pytest.approx(2.0**-2)
    assert mean.epsilon() == mean_of({}, clients_per_round=100, population=200)._mechanism.epsilon(20, 1e-5)


class Exploding(Module):
    """Trains as usual, but for the samples above 100."""

    def loss(self, batch):
        inputs, _ = batch
        return super().loss(batch) * (1 + 1e4 * (inputs.abs().amax() > 100))


def released(folder, name, form, poisoned, entry, **settings):
    """Make two rounds, and return what the method's server gets in each."""
    data = blobs(40)
    inputs, labels = data.tensors[0].clone(), data.tensors[1].clone()
    if poisoned:
        inputs[PARTS[1]] *= 1000
        labels[PARTS[1]] = (labels[PARTS[1]] + 1) % 4
    algorithm, seen = entry.make(), []
    receive = algorithm.receive

    def received(server, client, message, weight):
        seen.append((server.round, {key: value.clone() for key, value in message.tensors.items()}, client.id, weight))
        receive(server, client, message, weight)

    algorithm.receive = received
    callbacks = [] if LOW_RANK[form] is None else [LOW_RANK[form]()]
    given = {**entry.settings, "local_epochs": 2, **settings}
    loop = loop_of(algorithm, {"clip": 0.05}, clients_per_round=4, **given)
    module = Exploding(entry.network(), optimizer=entry.optimizer)
    fit(trainer(folder, *callbacks, loop, max_epochs=2), module, Data(TensorDataset(inputs, labels)))
    return seen, loop


AVERAGING = [
    name
    for name, entry in METHODS.items()
    if needs_only_mean(entry.make())
    and not entry.make().claims.exact
    and name not in ("FedLoRA-ZeroPadding", "FedLoRA-LoRAA2")
]


@pytest.mark.slow
@each_method("FedAvg", among=AVERAGING)
def test_one_client_changes_no_more_than_the_clip(tmp_path, name):
    """A client's data is replaced by samples that throw it far off; the seed, and with it the noise, is the same."""
    entry = METHODS[name]
    first, loop = released(tmp_path, name, entry.forms[0], False, entry)
    second, _ = released(tmp_path, name, entry.forms[0], True, entry)
    # The same messages, as many, from nobody: their number is no more than what is drawn on average.
    assert [each[0] for each in first] == [each[0] for each in second] == [0] * 4 + [1] * 4
    assert {each[2:] for each in first + second} == {(-1, 1.0)}
    drawn = loop.data.planner.plan(0).clients
    if 1 not in drawn:
        pytest.skip("the client whose data differs is not drawn in the first round")
    moved = torch.cat([(second[0][1][key] - value).flatten() for key, value in first[0][1].items()]).norm()
    # What the client sends is bounded by the clip, before and after: 2 clip over the denominator.
    assert 0 < moved.item() <= 2 * 0.05 / 4 * 1.001


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"uplink": [TopK(0.2, error_feedback=True)]}, {"execution": "vectorized"}])
def test_neither_codecs_nor_the_execution_lift_the_bound(tmp_path, settings):
    entry = METHODS["FedAvg"]
    first, loop = released(tmp_path, "FedAvg", "dense", False, entry, **settings)
    second, _ = released(tmp_path, "FedAvg", "dense", True, entry, **settings)
    assert 1 in loop.data.planner.plan(0).clients
    moved = torch.cat([(second[0][1][key] - value).flatten() for key, value in first[0][1].items()]).norm()
    assert 0 < moved.item() <= 2 * 0.05 / 4 * 1.001


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["SCAFFOLD", "FedDyn", "FedLoRA-FFA", "FedLoRA-CoLR", "FedLoRA-RoLoRA", "FedMUD", "FedAdam", "FedAvgM"],
)
def test_methods_make_of_the_mean_what_they_make_of_messages(tmp_path, name):
    entry = METHODS[name]
    found, sent = [], []
    for privacy in (None, ClientPrivacy(noise_multiplier=1e-9, clip=1e3, sampling="fixed")):
        low_rank = LOW_RANK[entry.forms[0]]
        module = Module(entry.network(), entry.optimizer)
        loop = FederatedLoop(
            entry.make(),
            partition=FromIndices(PARTS),
            clients_per_round=3,
            weighting="uniform",
            privacy=privacy,
            summary=False,
            **entry.settings,
        )
        run = trainer(tmp_path, *([] if low_rank is None else [low_rank()]), loop, max_epochs=4)
        fit(run, module, Data(blobs(40)))
        found.append(weights(module))
        sent.append(loop.ledger.state_dict())
    for key, value in found[0].items():
        assert torch.allclose(value, found[1][key], atol=2e-4), key
    assert sent[0] == sent[1]


class Spent(pl.Callback):
    def __init__(self):
        self.epsilons = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.epsilons.append(trainer.callback_metrics["privacy/epsilon"].item())


@pytest.mark.slow
def test_cohorts_vary_and_the_fit_ends_before_the_budget(tmp_path, capsys):
    spent = Spent()
    loop = loop_of(privacy={"target_epsilon": 5.0, "delta": 1e-3}, clients_per_round=1)
    run = trainer(tmp_path, loop, spent, ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1), max_epochs=50)
    fit(run, Module(small(), SGD), Data(blobs(40)))
    private = loop.coordinator.private
    assert 1 < private.released == len(spent.epsilons) < 50
    assert spent.epsilons[-1] == private.epsilon() <= 5.0 < private.epsilon(1)
    assert (tmp_path / f"epoch={private.released - 1}.ckpt").exists()
    sizes = [len(loop.data.planner.plan(number).clients) for number in range(private.released)]
    assert 0 in sizes
    assert max(sizes) > 1
    again = loop_of(privacy={"target_epsilon": 5.0, "delta": 1e-3}, clients_per_round=1)
    run = trainer(tmp_path, again, max_epochs=50)
    fit(run, Module(small(), SGD), Data(blobs(40)), ckpt_path=tmp_path / f"epoch={private.released - 1}.ckpt")
    assert again.coordinator.private.released == private.released
    forced = loop_of(privacy={"target_epsilon": 5.0, "delta": 1e-3}, clients_per_round=1)
    with pytest.raises(MisconfigurationException, match=r"5\.1.*target_epsilon=5"):
        fit(trainer(tmp_path, forced, max_epochs=50, min_epochs=50), Module(small(), SGD), Data(blobs(40)))


@pytest.mark.slow
def test_a_fit_that_goes_on_spends_on(tmp_path):
    loop, module, data = loop_of(), Module(small(), SGD), Data(blobs(40))
    run = trainer(tmp_path, loop, max_epochs=2)
    fit(run, module, data)
    run.fit_loop.max_epochs = 5
    fit(run, module, data)
    assert loop.coordinator.private.released == 5


@pytest.mark.slow
def test_a_second_run_is_refused_and_a_checkpoint_goes_on(tmp_path):
    loop, module, data = loop_of(), Module(small(), SGD), Data(blobs(40))
    fit(trainer(tmp_path, loop, ModelCheckpoint(tmp_path, "first"), max_epochs=1), module, data)
    for _ in range(2):
        with pytest.raises(MisconfigurationException, match=r"FederatedLoop.*0"):
            fit(trainer(tmp_path, loop, max_epochs=1), module, data)
    fit(trainer(tmp_path, loop, max_epochs=2), module, data, ckpt_path=tmp_path / "first.ckpt")
    assert loop.coordinator.private.released == 2


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.nightly
def test_resume_goes_on_with_budget_clip_and_cohorts(tmp_path, secure):
    def made():
        settings = {"quantile": 0.5, "secure": secure, "target_epsilon": 20.0, "noise_multiplier": None}
        return loop_of(FedAvgM(), settings, clients_per_round=2), Module(small(), SGD)

    loop, module = made()
    keep = ModelCheckpoint(tmp_path, "{step}-{epoch}", save_top_k=-1, every_n_train_steps=1)
    fit(trainer(tmp_path, loop, keep, max_epochs=4), module, Data(blobs(40), batch_size=4))
    for file in sorted(tmp_path.glob("step*.ckpt"))[2:5]:
        again, other = made()
        fit(trainer(tmp_path, again, max_epochs=4), other, Data(blobs(40), batch_size=4), ckpt_path=file)
        for name in ("released", "noise_multiplier"):
            assert getattr(again.coordinator.private, name) == getattr(loop.coordinator.private, name)
        plans = [[each.data.planner.plan(number).clients for number in range(4)] for each in (loop, again)]
        assert plans[0] == plans[1]
        if not secure:
            assert again.coordinator.private.clip == loop.coordinator.private.clip
            assert_same(weights(module), weights(other))


@pytest.mark.slow
def test_resume_before_a_round_in_which_nobody_was_drawn(tmp_path):
    def made():
        return loop_of(FedAvgM(), clients_per_round=2, seed=24), Module(small(), SGD)

    loop, module = made()
    keep = ModelCheckpoint(tmp_path, "{epoch}-{step}", save_top_k=-1, every_n_train_steps=1)
    fit(trainer(tmp_path, loop, keep, max_epochs=4), module, Data(blobs(40), batch_size=4))
    cohorts = [len(loop.data.planner.plan(number).clients) for number in range(4)]
    assert cohorts[2] == 0 < min(cohorts[1], cohorts[3])
    files = sorted(tmp_path.glob("epoch=1-*.ckpt"))
    # One of each client; the last file is of the round's end.
    assert len(files) == cohorts[1]
    for file in files:
        again, other = made()
        fit(trainer(tmp_path, again, max_epochs=4), other, Data(blobs(40), batch_size=4), ckpt_path=file)
        assert_same(weights(module), weights(other))
        assert again.coordinator.private.released == loop.coordinator.private.released


@pytest.mark.slow
def test_clients_noise_in_rounds(tmp_path):
    settings = {"sampling": "fixed", "noise_at": "clients", "clip": 0.01, "noise_multiplier": 50.0}
    found = []
    for seed in range(8):
        loop = loop_of(FedAvg(), settings, min_clients=4, clients_per_round=4, seed=seed)
        module = Module(network(), SGD)
        before = weights(module)
        fit(trainer(tmp_path, loop, max_epochs=1), module, Data(blobs(40)))
        found.append(torch.cat([(value - before[name]).flatten() for name, value in weights(module).items()]))
    noise = torch.cat(found) / (50.0 * 0.01 / 4)
    # What clients send is small beside it.
    assert noise.std().item() == pytest.approx(1.0, abs=0.03)
    assert stats.kstest(noise.numpy(), "norm").pvalue > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@pytest.mark.parametrize("algorithm", [FedAvg, SCAFFOLD])
def test_clients_without_samples_take_no_share_of_the_mean(tmp_path, sampling, algorithm):
    found = []
    for empty in (0, 7):
        loop = loop_of(
            algorithm(),
            {"sampling": sampling, "noise_multiplier": 1e-9, "clip": 1e3},
            partition=FromIndices([*PARTS, *[[]] * empty]),
        )
        found.append(weights(fit(trainer(tmp_path, loop), Module(small(), SGD), Data(blobs(40)))))
    for name, value in found[0].items():
        assert torch.allclose(value, found[1][name], atol=1e-5), name


@pytest.mark.parametrize(
    "uplink",
    [
        [TopK(0.5)],
        [RandomK(0.5, unbiased=True)],
        [Sign()],
        [Quantize(bits=8)],
        [Half()],
        [Mask(), Half()],
        [Mask()],
        [LowRankCodec(2)],
    ],
)
def test_clients_noise_does_not_go_through_codecs(uplink):
    said = r"ClientPrivacy.*noise_at='clients'.*noise_at='server'"
    with pytest.raises(MisconfigurationException, match=said):
        loop_of(privacy=AT_CLIENTS, uplink=uplink)
    for exact in (Dense(), Mask(known=True)):
        loop_of(privacy=AT_CLIENTS, uplink=[exact], downlink=[Half()])
    loop_of(uplink=uplink)


@pytest.mark.parametrize(
    ("algorithm", "precision", "said"),
    [
        (EF21P(share_down=0.5, share_up=0.5), "32-true", "EF21P encodes each message with Split, which drops"),
        (FedBAT(), "32-true", "FedBAT encodes each message with Split, which drops"),
        (FedAvg(), "bf16-true", r"FedAvg.*net\.weight.*net\.bias"),
    ],
)
def test_clients_noise_is_not_lost_in_messages(tmp_path, algorithm, precision, said):
    run = trainer(tmp_path, loop_of(algorithm, AT_CLIENTS), precision=precision)
    with pytest.raises(MisconfigurationException, match=said):
        fit(run, Module(small(), SGD), Data(blobs(40)))
    assert run.global_step == 0


def test_clients_noise_goes_through_masks_of_all(tmp_path):
    settings = {**AT_CLIENTS, "clip": 1e-3, "noise_multiplier": 1e3}
    module = Module(nn.Linear(6, 400), SGD)
    before = module.net.weight.detach().clone()
    fit(trainer(tmp_path, loop_of(RandomMask(0.5), settings, min_clients=5), max_epochs=1), module, Data(blobs(40)))
    noise = (module.net.weight.detach() - before).flatten() * CLIENTS
    sent = noise[noise != 0]
    assert len(sent) == pytest.approx(1200, rel=0.1)
    assert sent.std().item() == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("changed", [{"clients_per_round": 5}, {"population": 9}])
def test_other_rounds_are_not_counted_as_equal_ones(changed):
    with pytest.raises(MisconfigurationException, match=r"4.*8.*noise_multiplier=2"):
        mean_of({}, **changed).load_state_dict(mean_of({}).state_dict())
    with pytest.raises(MisconfigurationException, match=r"noise_multiplier=2.*4.*8"):
        mean_of({"noise_multiplier": 3.0}).load_state_dict(mean_of({}).state_dict())
    with pytest.raises(MisconfigurationException, match=r"sampling='poisson'.*'fixed'"):
        mean_of({"sampling": "fixed"}).load_state_dict(mean_of({}).state_dict())


def test_a_checkpoints_secret_is_that_of_secure_runs_alone():
    plain, first, later = mean_of({}), mean_of({"secure": True}), mean_of({"secure": True})
    own = later.privacy.secret
    later.load_state_dict(plain.state_dict())
    assert later.privacy.secret == own
    later.load_state_dict(first.state_dict())
    plain.load_state_dict(first.state_dict())
    assert later.privacy.secret == first.privacy.secret != own
    assert plain.privacy.secret is None


@pytest.mark.slow
def test_no_round_beyond_the_budget():
    mean = mean_of({"target_epsilon": 5.0})
    assert not mean.exhausted
    mean.released = next(count for count in range(100) if mean._mechanism.epsilon(count + 1, 1e-5) > 5.0)
    assert mean.released > 1
    assert mean.exhausted.startswith(f"{mean.released} rounds have cost ε = ")
    mean.released -= 1
    assert not mean.exhausted


class Median(KeepsArrivals):
    def result(self):
        return {}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weighting": "samples"}, "set weighting='uniform'"),
        ({"aggregator": Median()}, r"privacy.*aggregator=Median\(\)"),
        ({"availability": [1.0] * CLIENTS}, "availability changes that"),
        ({"sampling_weights": [1.0] * CLIENTS}, "sampling_weights"),
        ({"participants": [[0]]}, "participants changes that"),
        ({"min_clients": 2}, "min_clients=2"),
        ({"privacy": 3}, r"privacy.*ClientPrivacy.*3"),
    ],
)
def test_settings_that_would_break_the_guarantee(settings, said):
    with pytest.raises(MisconfigurationException, match=said):
        FederatedLoop(FedAvg(), **{"weighting": "uniform", "privacy": ClientPrivacy(noise_multiplier=1.0), **settings})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"noise_at": "clients"}, "sampling='poisson'"),
        ({"noise_at": "clients", "sampling": "fixed", "quantile": 0.5}, "noise_at='clients'"),
        (
            {"noise_at": "clients", "sampling": "fixed", "noise_multiplier": None, "target_epsilon": 1.0},
            "needs noise_multiplier",
        ),
        ({"sampling": "fixed", "accountant": "pld"}, "sampling='fixed'"),
        ({"sampling": "uniform"}, r"sampling.*'fixed'.*'uniform'"),
        ({"quantile": 1.5}, r"quantile.*1\.5"),
    ],
)
def test_arguments_that_do_not_go_together(arguments, said):
    with pytest.raises(MisconfigurationException, match=said):
        ClientPrivacy(**{"noise_multiplier": 1.0, **arguments})


def lora(**settings):
    return LowRank(MatrixProduct(), rank=2, alpha=2, init="lora", summary=False, **settings)


@pytest.mark.parametrize(
    ("loop", "module", "callbacks", "said"),
    [
        (partial(loop_of, FedLoRA(SumProduct())), network, [lora], r"FedLoRA.*SumProduct.*split='left'"),
        (partial(loop_of, METHODS["HeteroFL"].make()), network, [], "HeteroFL"),
        (partial(loop_of, FedNova()), network, [], r"FedNova.*fednova\.norms"),
        (loop_of, partial(network, norm=nn.BatchNorm1d), [], r"BatchNorm \(net\.1\).*buffers='local'.*GroupNorm"),
        (
            partial(loop_of, privacy={"quantile": 0.5, "count_noise": 0.4}),
            network,
            [],
            r"count_noise=0\.4.*noise_multiplier=1",
        ),
    ],
)
def test_what_a_fit_refuses(tmp_path, loop, module, callbacks, said):
    with pytest.raises(MisconfigurationException, match=said):
        fit(trainer(tmp_path, *[make() for make in callbacks], loop()), Module(module(), SGD), Data(blobs(40)))


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(6, 4)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, inputs):
        if self.training:
            self.calls += 1
        return super().forward(inputs)


def test_counts_are_not_sent(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"ClientPrivacy.*'net\.calls'"):
        fit(trainer(tmp_path, loop_of()), Module(Counting(), SGD), Data(blobs(40)))


def test_a_budget_without_an_end(tmp_path):
    loop = loop_of(privacy={"noise_multiplier": None, "target_epsilon": 1.0})
    with pytest.raises(MisconfigurationException, match="max_epochs=-1"):
        fit(trainer(tmp_path, loop, max_epochs=-1, max_steps=5), Module(small(), SGD), Data(blobs(40)))


def test_an_arrival_that_is_taken_back_leaves_nothing():
    zero, two = {"w": torch.zeros(3)}, {"w": torch.full((3,), 2.0)}
    mean, other = (mean_of({"clip": 10.0, "quantile": 0.5, "count_noise": 4.0}) for _ in range(2))
    for each in (mean, other):
        each.add(two, zero)
    undo = mean.checkpoint()
    mean.add({"w": torch.full((3,), 50.0)}, zero)
    undo()
    for each in (mean, other):
        each.add(zero, zero)
    assert torch.equal(mean.noised_mean(zero, zero, 0)["w"], other.noised_mean(zero, zero, 0)["w"])
    assert mean.clip == other.clip


class Normalised(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), norm(8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, inputs):
        return self.layers(inputs)


@pytest.mark.parametrize(
    ("net", "low_rank", "algorithm", "settings"),
    [
        (network, None, FedAvg, {}),
        (partial(Normalised, nn.BatchNorm1d), None, FedAvg, {"buffers": "local"}),
        (partial(Normalised, partial(nn.GroupNorm, 2)), None, SCAFFOLD, {}),
        (network, LOW_RANK["lora"], partial(FedLoRA, FFA()), {}),
        (network, None, FedAvgM, {"uplink": [Quantize(8)]}),
    ],
    ids=["plain", "local statistics", "control variates", "LoRA", "quantised"],
)
def test_what_is_released_does_not_depend_on_one_clients_data(tmp_path, net, low_rank, algorithm, settings):
    """At a noise of 10,000 clips all else is lost: what of one client's data is left is of the size of its clip."""
    given = {"noise_multiplier": 1e4, "clip": 1.0}
    ends = []
    for data in (blobs(40), blobs(40)):
        if ends:
            data.tensors[0][PARTS[0]] = 50 * torch.randn(len(PARTS[0]), 6)
        torch.manual_seed(0)
        module = Module(net())
        loop = loop_of(algorithm(), {**given}, seed=0, **settings)
        made = [] if low_rank is None else [low_rank()]
        fit(trainer(tmp_path, *made, loop, max_epochs=2, limit_val_batches=0), module, Data(data))
        ends.append({name: value.double() for name, value in module.state_dict().items()})
    first, second = ends
    moved = max((value - second[name]).abs().max().item() for name, value in first.items())
    assert max(value.abs().max().item() for value in first.values()) > 100
    assert moved < 1e-4 * max(value.abs().max().item() for value in first.values())


def test_statistics_of_all_clients_samples_are_not_released(tmp_path):
    module = Module(Normalised(nn.BatchNorm1d))
    callbacks = [loop_of(buffers="local"), StaticBatchNorm()]
    with pytest.raises(MisconfigurationException, match=r"StaticBatchNorm.*ClientPrivacy"):
        fit(trainer(tmp_path, *callbacks, max_epochs=1), module, Data())
