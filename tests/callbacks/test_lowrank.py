"""LowRank as a callback: with and without federation, twice, on other people's modules."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import (
    CP,
    BlockKronecker,
    FedAvg,
    FederatedLoop,
    FedMUD,
    Hadamard,
    LowRank,
    MatrixProduct,
    load_dense,
    merge,
    recover,
    unmerge,
)
from lightning_lowrank.federated.ledger import dense_bytes
from lightning_lowrank.layers import LowRankLayer, LowRankLinear, low_rank_layers
from lightning_lowrank.models import CNN4, Classifier
from tests.grids import nightly_except
from tests.helpers import Data, Module, assert_same, fit, network, trainer, weights


@pytest.mark.slow
def test_trains_without_federation(tmp_path):
    module = Module()
    fitted = trainer(tmp_path, LowRank(MatrixProduct(), rank=2, role="weight", summary=False), max_epochs=20)
    fit(fitted, module, Data())
    assert type(module.net[0]) is LowRankLinear
    assert fitted.callback_metrics["val_acc"] > 0.85


def test_prints_its_table(tmp_path, capsys):
    fit(trainer(tmp_path, LowRank(MatrixProduct(), rank=2, skip=["last"]), max_epochs=1), Module(), Data())
    printed = capsys.readouterr().out
    assert "net.0" in printed
    assert "last layer" in printed
    assert "parameters are trained" in printed


@pytest.mark.slow
def test_weights_that_are_not_converted_stay_trained_or_freeze(tmp_path):
    for freeze in (False, True):
        module = Module(network(norm=nn.BatchNorm1d))
        before = weights(module)
        low_rank = LowRank(MatrixProduct(), rank=2, skip=["last"], freeze_rest=freeze, summary=False)
        fit(trainer(tmp_path, low_rank, max_epochs=1), module, Data())
        after = weights(module)
        for name in ("net.1.weight", "net.5.weight"):
            assert torch.equal(before[name], after[name]) is freeze
        assert torch.equal(before["net.0.weight"], after["net.0.frozen_weight"])
        assert after["net.0.factors.V"].abs().sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("with_callback", [True, False], ids=["LowRank", "FederatedLoop"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_merged_module_is_trained_as_one_that_is_not(tmp_path, with_callback, training):
    def fitted(prepare):
        module, low_rank = Module(), LowRank(MatrixProduct(), rank=2, summary=False)
        low_rank.convert(module)
        prepare(module.train(training))
        callbacks = [low_rank] if with_callback else [FederatedLoop(FedAvg(), clients=3, summary=False)]
        return fit(trainer(tmp_path, *callbacks, max_epochs=1), module, Data(shuffle=False))

    merged = fitted(merge)
    assert_same(weights(merged), weights(fitted(unmerge)))
    assert merged.net[0].factors["V"].any()


def test_a_new_head_is_trained_beside_the_factors_of_a_frozen_rest(tmp_path):
    module = Module(network(norm=nn.BatchNorm1d))
    before = weights(module)
    low_rank = LowRank(
        MatrixProduct(), rank=2, skip=["last"], freeze_rest=True, keep_trained=["net.5"], seed=0, summary=False
    )
    fit(trainer(tmp_path, low_rank, FederatedLoop(FedAvg(), clients=3, summary=False), max_epochs=1), module, Data())
    after = weights(module)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    head = {"net.5.weight", "net.5.bias"}
    assert trained == head | {f"net.{layer}.factors.{factor}" for layer in (0, 3) for factor in "UV"}
    assert {name for name in before.keys() & trained if not torch.equal(before[name], after[name])} == head
    assert torch.equal(before["net.1.weight"], after["net.1.weight"])


def test_dense_traffic_is_that_of_the_module_before(tmp_path):
    sizes = set()
    for low_rank in (None, LowRank(MatrixProduct(), rank=1), LowRank(BlockKronecker(), rank=1, freeze_rest=True)):
        module = Module(network(norm=nn.BatchNorm1d))
        if low_rank is not None:
            low_rank.convert(module)
        sizes.add(dense_bytes(module))
    assert len(sizes) == 1


@pytest.mark.slow
def test_the_same_callback_serves_a_second_run(tmp_path):
    module = Module()
    low_rank = LowRank(MatrixProduct(), rank=2, summary=False)
    fit(trainer(tmp_path, low_rank, max_epochs=1), module, Data())
    after = weights(module)
    trainer(tmp_path, low_rank).test(module, Data(), verbose=False)
    trainer(tmp_path, LowRank(MatrixProduct(), rank=2, summary=False)).validate(module, Data(), verbose=False)
    assert_same(after, weights(module))
    with pytest.raises(MisconfigurationException, match=r"LowRank.*lightning_lowrank\.recover"):
        trainer(tmp_path, LowRank(MatrixProduct(), rank=3, summary=False)).validate(module, Data(), verbose=False)
    recover(module)
    assert not hasattr(module, "lowrank_conversion")
    fit(trainer(tmp_path, LowRank(MatrixProduct(), rank=3, summary=False), max_epochs=1), module, Data())
    assert module.net[0].rank == 3


def test_another_seed_of_a_converted_module_is_refused():
    module = Module(network())
    LowRank(MatrixProduct(), rank=2, seed=3).convert(module)
    LowRank(MatrixProduct(), rank=2, seed=3).convert(module)
    LowRank(MatrixProduct(), rank=2).convert(module)
    with pytest.raises(MisconfigurationException, match=r"seed=3.*LowRank.*seed=4"):
        LowRank(MatrixProduct(), rank=2, seed=4).convert(module)


@pytest.mark.slow
def test_layers_made_in_configure_model(tmp_path):
    class Late(Module):
        def __init__(self):
            super().__init__()
            self.net = None

        def configure_model(self):
            if self.net is None:
                self.net = network()

    module = Late()
    low_rank = LowRank(MatrixProduct(), rank=2, summary=False)
    fit(trainer(tmp_path, low_rank, FederatedLoop(FedMUD(), clients=3, summary=False)), module, Data())
    assert len(dict(low_rank_layers(module))) == 3


def test_layers_made_in_setup_are_refused(tmp_path):
    class Later(Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Identity()

        def setup(self, stage):
            self.net = network()

    with pytest.raises(MisconfigurationException, match="configure_model"):
        fit(trainer(tmp_path, LowRank(MatrixProduct(), rank=2, summary=False)), Later(), Data())


def test_the_table_of_layers_is_printed_once_for_each_module(tmp_path, capsys):
    run = trainer(tmp_path, LowRank(MatrixProduct(), rank=2), max_epochs=1, limit_train_batches=1)
    module, data = Module(), Data()
    fit(run, module, data)
    for stage in (run.validate, run.test):
        stage(module, data, verbose=False)
    assert capsys.readouterr().out.count("parameters are trained") == 1
    trainer(tmp_path, LowRank(MatrixProduct(), rank=2)).validate(module, data, verbose=False)
    assert not capsys.readouterr().out.count("parameters are trained")
    run.validate(Module(), data, verbose=False)
    assert capsys.readouterr().out.count("parameters are trained") == 1


class Rebuilt(Module):
    """Makes its network again in ``configure_model`` or ``setup``, as one does who has not read of their order."""

    def __init__(self, hook):
        super().__init__()
        self.hook = hook

    def configure_model(self):
        if self.hook == "configure_model":
            self.net = network()

    def setup(self, stage):
        if self.hook == "setup":
            self.net = network()


@pytest.mark.parametrize("hook", ["configure_model", "setup"])
@pytest.mark.parametrize("federated", [False, True], ids=["plain", "federated"])
def test_layers_that_are_made_again_after_the_conversion_are_refused(tmp_path, hook, federated):
    callbacks = [LowRank(MatrixProduct(), rank=2, summary=False)]
    callbacks += [FederatedLoop(FedAvg(), clients=3, summary=False)] if federated else []
    with pytest.raises(MisconfigurationException, match=r"Rebuilt has made net\.0, net\.2, net\.4 after"):
        fit(trainer(tmp_path, *callbacks), Rebuilt(hook), Data())


def test_layers_that_are_made_later_are_refused_unless_include_leaves_them(tmp_path):
    class Later(Module):
        def setup(self, stage):
            self.head = nn.Linear(4, 4)

    with pytest.raises(MisconfigurationException, match=r"Later has made head after"):
        fit(trainer(tmp_path, LowRank(MatrixProduct(), rank=1, summary=False)), Later(), Data())
    low_rank = LowRank(MatrixProduct(), rank=1, include=["net"], summary=False)
    fit(trainer(tmp_path, low_rank, max_epochs=1, limit_train_batches=1, limit_val_batches=0), Later(), Data())


def test_a_look_for_layers_that_are_made_later_composes_no_weight(tmp_path, monkeypatch):
    """Each composed weight costs time, and the first ones are copied to find writes through their data."""
    composed, own = [], LowRankLayer._composed
    monkeypatch.setattr(LowRankLayer, "_composed", lambda layer: [composed.append(layer), own(layer)][1])
    low_rank = LowRank(MatrixProduct(), rank=2, summary=False)
    fit(trainer(tmp_path, low_rank, max_epochs=1, limit_train_batches=0, limit_val_batches=0), Module(), Data())
    assert composed == []


def test_a_layer_that_was_replaced_between_two_fits_is_refused(tmp_path):
    module = Module()
    LowRank(MatrixProduct(), rank=2, summary=False).convert(module)
    module.net[2] = nn.Linear(16, 16)
    with pytest.raises(MisconfigurationException, match=r"net\.2 has been replaced by another layer"):
        LowRank(MatrixProduct(), rank=2, summary=False).convert(module)
    LowRank(MatrixProduct(), rank=2, summary=False).convert(recover(module))
    assert len(dict(low_rank_layers(module))) == 3


def test_a_layer_that_was_added_between_two_fits_is_named(tmp_path):
    module = Module()
    LowRank(MatrixProduct(), rank=2, summary=False).convert(module)
    module.head = nn.Linear(16, 16)
    with pytest.warns(UserWarning, match="head was added to Module after"):
        LowRank(MatrixProduct(), rank=2, summary=False).setup(trainer(tmp_path), module, "fit")


def test_a_module_with_setup_whose_layers_are_all_converted_is_fitted_again(tmp_path):
    module = Rebuilt("none")
    for _ in range(2):
        low_rank = LowRank(MatrixProduct(), rank=2, summary=False)
        fit(trainer(tmp_path, low_rank, max_epochs=1, limit_train_batches=1, limit_val_batches=0), module, Data())
    assert len(dict(low_rank_layers(module))) == 3


@pytest.mark.nightly
def test_layers_inside_a_compiled_module_are_found_again(tmp_path):
    class Compiled(Module):
        def setup(self, stage):
            self.net = torch.compile(self.net, backend="eager")

    low_rank = LowRank(MatrixProduct(), rank=2, skip=["last"], summary=False)
    fit(trainer(tmp_path, low_rank, max_epochs=1, limit_train_batches=0), Compiled(), Data())


def test_factors_that_no_optimizer_holds_are_refused(tmp_path):
    class Early(Module):
        """Builds its optimizer before LowRank makes the factors, as LightningCLI's own optimizer section does."""

        def __init__(self):
            super().__init__()
            self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

        def configure_optimizers(self):
            return self.optimizer

    with pytest.raises(MisconfigurationException, match=r"factors\.U"):
        fit(trainer(tmp_path, LowRank(MatrixProduct(), rank=2, summary=False)), Early(), Data())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "rank"),
        ({"rank": 1, "ratio": 0.5}, "rank"),
        ({"ratio": 0.0}, "ratio"),
        ({"ratio": 1.5}, "ratio"),
        ({"budget": 1e-4}, "freeze_rest=True"),
        ({"rank": 1, "include": ["encoder"]}, "encoder"),
        ({"rank": 1, "exclude": ["nowhere"]}, "nowhere"),
        ({"rank": 1, "keep_trained": ["net.4"]}, "freeze_rest"),
        ({"rank": 1, "decouple": True, "half_frozen": True}, "half_frozen"),
    ],
)
def test_refusals_are_configuration_errors(tmp_path, arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        fit(trainer(tmp_path, LowRank(MatrixProduct(), **arguments, summary=False)), Module(), Data())


@pytest.mark.parametrize("federated", [False, True])
@pytest.mark.parametrize(
    ("before", "said"), [({}, "load its weights into the module before"), ({"rank": 3}, "factors")]
)
def test_a_checkpoint_of_other_layers_is_refused_with_the_way_out(tmp_path, before, said, federated):
    callbacks = [LowRank(MatrixProduct(), **before, summary=False)] if before else []
    checkpoint = pl.callbacks.ModelCheckpoint(tmp_path, "last")
    fit(trainer(tmp_path, *callbacks, checkpoint, max_epochs=1), Module(), Data())
    loops = [FederatedLoop(FedAvg(), clients=2, summary=False)] if federated else []
    converted = LowRank(MatrixProduct(), rank=2, summary=False)
    with pytest.raises(MisconfigurationException, match=said):
        fit(trainer(tmp_path, converted, *loops), Module(), Data(), ckpt_path=tmp_path / "last.ckpt")


def test_cnn4_at_one_thirty_second():
    module = Classifier(CNN4())
    low_rank = LowRank(BlockKronecker(), budget=1 / 32, budget_rule="authors", decouple=True, skip=["first", "last"])
    conversion = low_rank.convert(module)
    assert (conversion.trainable_parameters, conversion.dense_parameters) == (12_008, 390_880)


def test_seed_everything_seeds_the_factors():
    draws = {}
    for seed in (1, 2, 1):
        pl.seed_everything(seed, verbose=False)
        module = Module()
        LowRank(MatrixProduct(), rank=2).convert(module)
        again = draws.setdefault(seed, module.net[0].factors["U"].detach().clone())
        assert torch.equal(again, module.net[0].factors["U"])
    assert not torch.equal(draws[1], draws[2])


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, 7])
def test_callbacks_take_the_seed_that_was_set_before_the_fit(tmp_path, given):
    seeds = []
    for seed in (1, 2):
        # Made before the seed is set, as in a loop over seeds.
        low_rank = LowRank(MatrixProduct(), rank=2, seed=given, summary=False)
        loop = FederatedLoop(FedAvg(), clients=3, seed=given, summary=False)
        pl.seed_everything(seed, verbose=False)
        module, few = Module(), {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 0}
        fit(trainer(tmp_path, low_rank, loop, **few), module, Data())
        seeds.append((low_rank.seed, loop.server.seed, module.lowrank_conversion.seed))
    pl.seed_everything(3, verbose=False)
    again = LowRank(MatrixProduct(), rank=2, summary=False)
    again.convert(module)
    assert again.seed == module.lowrank_conversion.seed == seeds[1][0]
    assert seeds == ([(1, 1, 1), (2, 2, 2)] if given is None else [(7, 7, 7)] * 2)


@nightly_except(
    "CP()-{'ratio': 0.6, 'role': 'weight'}",
    "MatrixProduct(layout='permuted')-{'rank_ratio': 0.2, 'role': 'weight', 'compute': 'dense', 'frobenius_decay':"
    " 0.001}",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("factorization", "arguments"),
    [
        (MatrixProduct("channel"), {"rank": 2, "alpha": 4, "init": "lora", "dropout": 0.2, "rank_stabilized": True}),
        (MatrixProduct(), {"rank": 2, "half_frozen": "V", "init": "lora", "compute": "contracted"}),
        (MatrixProduct(), {"budget": 200, "budget_unit": "parameters", "allocation": "singular_values"}),
        (MatrixProduct(), {"rank_ratio": 0.2, "role": "weight", "compute": "dense", "frobenius_decay": 1e-3}),
        (CP(), {"ratio": 0.6, "role": "weight"}),
        (Hadamard(), {"rank": 2, "allow_larger": True}),
    ],
    ids=str,
)
def test_every_setting_reaches_the_layers_and_learns_in_rounds(tmp_path, factorization, arguments):
    module = Module()
    low_rank = LowRank(factorization, **arguments, summary=False)
    loop = FederatedLoop(FedAvg(), clients=3, local_epochs=3, summary=False)
    checkpoint = pl.callbacks.ModelCheckpoint(tmp_path, "last")
    fitted = trainer(tmp_path, low_rank, loop, checkpoint, max_epochs=10)
    fit(fitted, module, Data())
    assert fitted.callback_metrics["val_acc"] > 0.7
    for _, layer in low_rank_layers(module):
        assert layer.factorization == factorization
        for name in ("dropout", "half_frozen", "compute", "role"):
            assert getattr(layer, name) == arguments.get(name, getattr(layer, name))
        assert layer.scale == (4 / 2**0.5 if "alpha" in arguments else 1)
    dense = load_dense(tmp_path / "last.ckpt", Module())
    batch = torch.randn(5, 6)
    torch.testing.assert_close(dense.net(batch), module.eval().net(batch))


@pytest.mark.slow
def test_frobenius_decay_is_that_of_the_loss(tmp_path):
    class Decayed(Module):
        def loss(self, batch):
            return super().loss(batch) + 0.05 * sum(
                layer.weight.square().sum() / 2 for _, layer in low_rank_layers(self)
            )

    ends = []
    for kind, decay in ((Module, 0.05), (Decayed, 0.0), (Module, 0.0)):
        module = kind()
        low_rank = LowRank(MatrixProduct(), rank=2, role="weight", frobenius_decay=decay, summary=False)
        fit(trainer(tmp_path, low_rank, max_epochs=2, gradient_clip_val=0.5), module, Data(shuffle=False))
        ends.append(weights(module))
    for name in ends[0]:
        torch.testing.assert_close(ends[0][name], ends[1][name])
    assert not torch.allclose(ends[0]["net.0.factors.U"], ends[2]["net.0.factors.U"])


@pytest.mark.parametrize("federated", [True, False])
def test_a_step_without_gradients_decays_no_factors(tmp_path, federated):
    class FirstAlone(Module):
        def training_step(self, batch, batch_idx):
            return None if batch_idx else super().training_step(batch, batch_idx)

    ends = []
    for steps in ({"limit_train_batches": 1}, {}):
        low_rank = LowRank(MatrixProduct(), rank=2, role="weight", frobenius_decay=0.5, summary=False)
        loop = [FederatedLoop(FedAvg(), clients=1, local_steps=1 if steps else 5, summary=False)] if federated else []
        module = FirstAlone()
        settings = {"max_epochs": 1, "limit_val_batches": 0, **({} if federated else steps)}
        fit(trainer(tmp_path, low_rank, *loop, **settings), module, Data(shuffle=False))
        ends.append(weights(module))
    assert_same(*ends)


@pytest.mark.parametrize("decay", [-0.1, float("nan")])
def test_a_wrong_frobenius_decay_is_refused(decay):
    with pytest.raises(MisconfigurationException, match="frobenius_decay"):
        LowRank(MatrixProduct(), rank=1, frobenius_decay=decay)


class Reading(Module):
    """Computes with weights that it read before they were converted."""

    def __init__(self, some):
        super().__init__(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)))
        self.read = [layer.weight for layer in (self.net[0], self.net[2])][: 1 if some else 2]

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        hidden = torch.relu(nn.functional.linear(inputs, self.read[0]))
        outputs = nn.functional.linear(hidden, self.read[1]) if len(self.read) > 1 else self.net[2](hidden)
        return nn.functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize("execution", [None, "sequential", "vectorized"])
@pytest.mark.parametrize("some", [False, True])
def test_factors_without_a_gradient_are_named(tmp_path, some, execution):
    """In a fit without a federation too, and where clients step together."""
    low_rank = LowRank(MatrixProduct(), rank=2, role="weight", allow_larger=True, summary=False)
    loops = [FederatedLoop(FedAvg(), clients=2, execution=execution, summary=False)] if execution else []
    made = trainer(tmp_path, low_rank, *loops, max_epochs=1, limit_val_batches=0)
    if some:
        with pytest.warns(UserWarning, match=r"factors of net\.0.*exclude=\['net\.0'\]"):
            made.fit(Reading(some), Data())
        return
    with pytest.raises(MisconfigurationException, match=r"factors of net\.0 and net\.2|factors of net\.0, net\.2"):
        fit(made, Reading(some), Data())


class TwoOptimizers(Module):
    """Trains its layers in turn, each by an optimizer of its own."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)))
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[2])]


def test_each_optimizers_own_factors_are_looked_at(tmp_path):
    low_rank = LowRank(MatrixProduct(), rank=2, role="weight", allow_larger=True, summary=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*(workers|log_every_n_steps|isinstance|tips|logger).*")
        trainer(tmp_path, low_rank, max_epochs=1, limit_val_batches=0).fit(TwoOptimizers(), Data())
