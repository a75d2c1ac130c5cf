"""What is trained changes from round to round: parameters that hooks thaw, freeze or replace, and buffers."""

import math
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint, ModelPruning
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import (
    SCAFFOLD,
    BlockKronecker,
    ClientPrivacy,
    FedAvg,
    FederatedLoop,
    FedMUD,
    FedProx,
    LowRank,
    MatrixProduct,
    RandomMask,
    Sign,
    TopK,
)
from lightning_lowrank.federated.state import trained_tensors
from tests.helpers import Data, Module, Thaw, assert_same, fit, network, trainer, weights


class Heads(Module):
    def configure_optimizers(self):
        return torch.optim.SGD([value for value in self.parameters() if value.requires_grad], lr=0.1)


def loop(algorithm=None, **settings):
    return FederatedLoop(FedAvg() if algorithm is None else algorithm, clients=4, seed=0, summary=False, **settings)


class Seen(Callback):
    """Records in each round what is trained and the ratio of traffic."""

    def __init__(self):
        self.trained, self.ratios = [], []

    def on_train_epoch_end(self, trainer, pl_module):
        self.trained.append({name for name, value in pl_module.named_parameters() if value.requires_grad})
        self.ratios.append(float(trainer.callback_metrics["comm/ratio"]))


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_thawed_parameters_are_trained_sent_and_counted(tmp_path, execution):
    module, seen = Heads(), Seen()
    before = weights(module)
    rounds = loop(execution=execution)
    fit(trainer(tmp_path, Thaw(lr=0.1), rounds, seen), module, Data())
    assert seen.ratios == [1, 1, 1]
    assert seen.trained[0] < seen.trained[1] == {name for name, _ in module.named_parameters()}
    assert set(rounds.server.model) == set(before)
    assert not torch.equal(before["net.0.weight"], module.net[0].weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (FedMUD, {"factorization": MatrixProduct(), "rank": 2}),
        (FedMUD, {"factorization": BlockKronecker(), "ratio": 0.4, "decouple": True}),
        (FedAvg, {"factorization": MatrixProduct(), "rank": 2}),
    ],
    ids=["FedMUD", "FedMUD, decoupled", "FedAvg"],
)
def test_what_low_rank_layers_hold_fixed_is_never_thawed(tmp_path, algorithm, settings):
    module, seen = Heads(), Seen()
    rounds = loop(algorithm())
    fit(trainer(tmp_path, LowRank(**settings, summary=False), Thaw(lr=0.1), rounds, seen), module, Data())
    assert not any("frozen_weight" in name or "fixed" in name for names in seen.trained for name in names)
    assert "net.0.factors.U" in seen.trained[1] - seen.trained[0]
    assert not {name for name in rounds.server.model if "frozen_weight" in name}
    assert max(seen.ratios) < 1


@pytest.mark.slow
def test_without_rounds_low_rank_layers_hold_it_fixed_as_well(tmp_path):
    module = Heads()
    low_rank = LowRank(BlockKronecker(), ratio=0.4, decouple=True, role="weight", summary=False)
    fit(trainer(tmp_path, low_rank, Thaw(lr=0.1)), module, Data())
    assert not any(value.requires_grad for value in module.net[0].fixed.parameters())
    assert module.net[0].factors["U"].requires_grad


@pytest.mark.slow
def test_a_base_that_may_be_trained_is_thawed(tmp_path):
    module = Heads()
    low_rank = LowRank(MatrixProduct(), rank=2, train_base=True, summary=False)
    fit(trainer(tmp_path, low_rank, Thaw(lr=0.1), loop()), module, Data())
    assert module.net[0].frozen_weight.requires_grad


@pytest.mark.slow
def test_a_run_resumed_after_the_thaw_is_the_same(tmp_path):
    whole = Heads()
    keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    fit(trainer(tmp_path, Thaw(lr=0.1), loop(), keep, max_epochs=4), whole, Data())
    resumed = Heads()
    fit(
        trainer(tmp_path, Thaw(lr=0.1), loop(), max_epochs=4), resumed, Data(), ckpt_path=str(tmp_path / "epoch=2.ckpt")
    )
    assert_same(weights(whole), weights(resumed))


class Freeze(Callback):
    """Freezes the first layer in the second round."""

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.net[0].requires_grad_(trainer.current_epoch != 1)


def test_parameters_that_are_frozen_meanwhile_stay_as_they_are(tmp_path):
    seen, kept = Seen(), []

    class Keep(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            kept.append(weights(pl_module.net[0]))

    fit(trainer(tmp_path, Freeze(), loop(), Keep(), seen), Module(), Data())
    assert_same(kept[0], kept[1])
    assert not torch.equal(kept[1]["weight"], kept[2]["weight"])
    assert set(seen.ratios) == {1}


@pytest.mark.parametrize("frozen", [1, 2])
def test_a_fit_resumed_inside_a_round_has_the_same_layers_frozen(tmp_path, frozen):
    class Freeze(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            pl_module.net[0].requires_grad_(trainer.current_epoch != frozen)

    def run(*callbacks, **arguments):
        made = trainer(tmp_path, Freeze(), loop(), *callbacks)
        return made, fit(made, Module(), Data(), **arguments)

    saved = ModelCheckpoint(tmp_path, "{epoch}-{step}", save_top_k=-1, every_n_train_steps=1)
    _, whole = run(saved)
    files = sorted(tmp_path.glob("*.ckpt"))
    for number in range(3):
        inside = [file for file in files if f"epoch={number}-" in file.name]
        made, resumed = run(ckpt_path=min(inside, key=lambda file: int(file.stem.rpartition("=")[2])))
        assert_same(weights(resumed), weights(whole))
        assert made.current_epoch == 3


def test_a_further_fit_may_freeze_layers(tmp_path):
    module, made = Module(), trainer(tmp_path, loop(), max_epochs=1)
    fit(made, module, Data())
    before = weights(module.net[0])
    module.net[0].requires_grad_(False)
    made.fit_loop.max_epochs = 2
    fit(made, module, Data())
    assert_same(weights(module.net[0]), before)
    assert made.current_epoch == 2


def test_a_resumed_fit_refuses_other_parameters_too(tmp_path):
    def made():
        return loop(algorithm=SCAFFOLD())

    saved = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    fit(trainer(tmp_path, made(), saved, max_epochs=1), Module(), Data())
    with pytest.raises(
        MisconfigurationException, match=r"from round 1 on .*\(net.0.bias, net.0.weight\), and SCAFFOLD"
    ):
        fit(trainer(tmp_path, Freeze(), made()), Module(), Data(), ckpt_path=tmp_path / "epoch=0.ckpt")


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"algorithm": SCAFFOLD()}, "SCAFFOLD"),
        ({"algorithm": RandomMask(0.5)}, "RandomMask"),
        ({"uplink": [TopK(0.5, error_feedback=True)]}, "error feedback"),
        ({"optimizer_state": "keep"}, "optimizer_state='keep'"),
    ],
    ids=["SCAFFOLD", "RandomMask", "error feedback", "moments"],
)
def test_state_of_earlier_parameters_refuses_others(tmp_path, settings, cause):
    with pytest.raises(MisconfigurationException, match=f"Thaw lets other parameters be trained .* and {cause}"):
        fit(trainer(tmp_path, Thaw(lr=0.1), loop(**settings)), Heads(), Data())
    module = Module()
    with pytest.raises(
        MisconfigurationException, match=rf"from round 1 on .*\(net.0.bias, net.0.weight\), and {cause}"
    ):
        fit(trainer(tmp_path, Freeze(), loop(**settings)), module, Data())


@pytest.mark.parametrize("when", [0, 1])
def test_thawed_parameters_in_no_optimizer_are_refused(tmp_path, when):
    class Forget(Thaw):
        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == when:
                self.make_trainable(pl_module.net[0])

    with pytest.raises(MisconfigurationException, match=r"2.*net\.0"):
        fit(trainer(tmp_path, Forget(), loop()), Heads(), Data())


def test_replaced_parameters_are_refused(tmp_path):
    class Prune(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                nn.utils.prune.l1_unstructured(pl_module.net[0], "weight", amount=0.5)

    with pytest.raises(MisconfigurationException, match=r"trained net.0.weight, which the module no longer has"):
        fit(trainer(tmp_path, Prune(), loop()), Module(), Data())
    pruning = ModelPruning("l1_unstructured", amount=0.5)
    with pytest.raises(MisconfigurationException, match="ModelPruning"):
        fit(trainer(tmp_path, pruning, loop()), Module(), Data())


def test_a_module_in_which_nothing_is_trained_is_refused(tmp_path):
    module = Module()
    module.requires_grad_(False)
    with pytest.raises(MisconfigurationException, match="no parameter of the module is trained: all are frozen"):
        fit(trainer(tmp_path, loop()), module, Data())
    assert not any(value.requires_grad for value in trained_tensors(module).values())


@pytest.mark.parametrize(("automatic", "returned"), [(True, None), (False, None), (True, []), (False, [])])
def test_a_module_without_an_optimizer_is_refused(tmp_path, automatic, returned):
    class Without(Module):
        def configure_optimizers(self):
            return returned

    module = Without()
    module.automatic_optimization = automatic
    with pytest.raises(MisconfigurationException, match="no optimizer has a parameter of Without"):
        fit(trainer(tmp_path, loop()), module, Data())


@pytest.mark.parametrize("given", [0, None, 1.5])
def test_batches_cannot_be_accumulated_in_groups_of_no_count(tmp_path, given):
    with pytest.raises(MisconfigurationException, match=f"accumulate_grad_batches must be .*{given}"):
        fit(trainer(tmp_path, loop(), accumulate_grad_batches=given), Module(), Data())


class InSteps(Module):
    """Trains the first layer only in a client's first batch, or, if ``late``, only in its later ones."""

    def __init__(self, late=False):
        super().__init__()
        self.late, self.begun = late, []

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 0:
            self.begun.append(self.net[0].weight.requires_grad)
        self.net[0].requires_grad_((batch_idx > 0) == self.late)


@pytest.mark.parametrize("settings", [{}, {"optimizer_state": "keep"}, {"algorithm": FedProx(0.1)}])
@pytest.mark.parametrize("late", [False, True])
def test_what_a_client_freezes_in_its_steps_is_trained_by_the_next_one_and_sent(tmp_path, late, settings):
    module, seen = InSteps(late), Seen()
    fit(trainer(tmp_path, loop(**settings), seen, max_epochs=2), module, Data())
    assert module.begun == [True] * 8
    assert seen.ratios == [1, 1]
    assert seen.trained == [{name for name, _ in module.named_parameters()}] * 2


@pytest.mark.parametrize("on_client_error", ["drop", "raise"])
def test_what_a_failed_client_has_frozen_is_thawed(tmp_path, on_client_error):
    class Failing(InSteps):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.fails = batch_idx == 0 and len(self.begun) == 4

        def training_step(self, batch, batch_idx):
            if batch_idx and self.fails:
                raise ValueError("mine")
            return super().training_step(batch, batch_idx)

    module, seen = Failing(), Seen()
    rounds = loop(on_client_error=on_client_error)
    with pytest.raises(ValueError, match="mine") if on_client_error == "raise" else nullcontext():
        fit(trainer(tmp_path, rounds, seen, max_epochs=1), module, Data())
    assert all(value.requires_grad for value in module.parameters())
    assert len(seen.trained) == (on_client_error == "drop")


def test_what_a_validation_between_clients_freezes_is_trained(tmp_path):
    class Validated(InSteps):
        def on_validation_end(self):
            self.net[0].requires_grad_(False)

    module = Validated()
    fit(trainer(tmp_path, loop(), max_epochs=1, val_check_interval=2, num_sanity_val_steps=0), module, Data())
    assert module.begun == [True] * 4


@pytest.mark.parametrize("batch_of_thaw", [0, 1])
def test_what_is_thawed_within_a_round_is_refused(tmp_path, batch_of_thaw):
    class Late(Module):
        def training_step(self, batch, batch_idx):
            self.net[0].requires_grad_(batch_idx == batch_of_thaw)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.net[0].requires_grad_(False)

    module = Late()
    module.net[0].requires_grad_(False)
    with pytest.raises(
        MisconfigurationException, match=r"net.0.weight, net.0.bias is trained in a step but was frozen when"
    ):
        fit(trainer(tmp_path, loop()), module, Data())


class Late(Module):
    """Has class weights and a mask in buffers, which ``hook`` registers; ``None``: ``__init__`` does."""

    strict_loading = False

    def __init__(self, hook=None):
        super().__init__()
        if hook is None:
            self.register()
        else:
            setattr(self, hook, self.register)

    def register(self):
        if not hasattr(self, "rates"):
            self.register_buffer("rates", torch.arange(1.0, 5.0))
            self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, -math.inf]))

    def loss(self, batch):
        inputs, targets = batch
        return nn.functional.cross_entropy(self.net(inputs) + self.mask.exp(), targets, weight=self.rates)


@pytest.mark.parametrize(
    ("hook", "settings"),
    [
        ("on_fit_start", {}),
        ("on_train_epoch_start", {"buffers": "local"}),
        pytest.param("on_train_start", {"execution": "vectorized", "buffers": "reset"}, marks=pytest.mark.slow),
        pytest.param("on_fit_start", {"uplink": [Sign()]}, marks=pytest.mark.slow),
        ("on_fit_start", {"weighting": "uniform", "privacy": ClientPrivacy(clip=1.0, noise_multiplier=1.0)}),
    ],
)
def test_buffers_that_a_hook_registers_are_buffers(tmp_path, hook, settings):
    runs = []
    for module in (Late(), Late(hook)):
        rounds = loop(**settings)
        fit(trainer(tmp_path, rounds, max_epochs=2), module, Data())
        runs.append((weights(module), rounds.ledger.state_dict()))
    assert_same(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


def test_a_buffer_of_a_later_round_is_counted(tmp_path):
    class Later(Late):
        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                self.register_buffer("more", torch.ones(500))

    seen, rounds = Seen(), loop()
    fit(trainer(tmp_path, rounds, seen), Later(), Data())
    assert seen.ratios == [1, 1, 1]
    assert rounds.server.base.initial_buffers["more"].tolist() == [1] * 500


@pytest.mark.slow
@pytest.mark.parametrize("buffers", ["average", "local"])
def test_a_resumed_fit_registers_buffers_again(tmp_path, buffers):
    whole = Late("on_fit_start")
    saved = ModelCheckpoint(tmp_path, "{epoch}-{step}", save_top_k=-1, every_n_train_steps=5)
    fit(trainer(tmp_path, loop(buffers=buffers), saved, max_epochs=2), whole, Data())
    for file in tmp_path.glob("*.ckpt"):
        resumed = Late("on_fit_start")
        fit(trainer(tmp_path, loop(buffers=buffers), max_epochs=2), resumed, Data(), ckpt_path=file)
        torch.testing.assert_close(resumed.state_dict(), whole.state_dict())


def test_a_teacher_that_each_round_copies_may_have_buffers(tmp_path):
    class Taught(Module):
        def on_train_epoch_start(self):
            self.teacher = deepcopy(self.net).eval().requires_grad_(False)

        def loss(self, batch):
            return super().loss(batch) + (self.net(batch[0]) - self.teacher(batch[0])).square().mean()

    module = Taught(network(norm=nn.BatchNorm1d))
    copies = []
    keep = LambdaCallback(on_train_epoch_start=lambda run, _: copies.append(weights(module.net)))
    fit(trainer(tmp_path, loop(), keep), module, Data(drop_last=True))
    assert_same(weights(module.teacher), copies[-1])
    assert not torch.equal(copies[-1]["1.running_mean"], copies[0]["1.running_mean"])


@pytest.mark.parametrize(("now", "said"), [(None, "is missing"), (torch.ones(5), r"has shape \[5\]")])
def test_a_buffer_that_a_hook_takes_or_resizes_is_refused(tmp_path, now, said):
    class Resized(Late):
        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                self.rates = now

    with pytest.raises(MisconfigurationException, match=rf"the buffer rates had shape \[4\] .*{said} in round 1"):
        fit(trainer(tmp_path, loop()), Resized(), Data())
