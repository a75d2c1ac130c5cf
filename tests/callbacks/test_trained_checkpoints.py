"""Checkpoints without frozen weights resume as whole ones do, in a module with the same frozen weights alone."""

import copy
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import (
    FFA,
    FederatedLoop,
    FedLoRA,
    FedMUD,
    FLoRA,
    FromIndices,
    LowRank,
    MatrixProduct,
    ProductSum,
    TrainedCheckpoints,
    cli,
    load_dense,
)
from lightning_lowrank.internals.torch import digest_of
from lightning_lowrank.interop.checkpoints import adapter_checkpoint, dense_checkpoint
from tests.grids import nightly_except
from tests.helpers import Data, Module, Thaw, assert_same, draw, fit, network, trainer, weights
from tests.interop.helpers import LORA, peft

CLIENTS = [list(range(40)), list(range(40, 60)), list(range(60, 103))]


def partly_frozen():
    module = Module(network(norm=nn.BatchNorm1d))
    module.net[0].requires_grad_(False)
    return module


def wrapped():
    config = peft().LoraConfig(r=2, target_modules=["0", "2"])
    torch.manual_seed(1)
    return Module(peft().get_peft_model(network(), config))


def lowrank():
    return LowRank(MatrixProduct(), rank=2, alpha=4, summary=False, **{**LORA, "freeze_rest": True})


def federated(method):
    return FederatedLoop(method, partition=FromIndices(CLIENTS), summary=False)


# A module, callbacks, and which frozen weights are not saved.
RUNS = {
    "a plain run": (partly_frozen, list, ["net.0.weight", "net.0.bias"]),
    "a plain run with LowRank": (Module, lambda: [lowrank()], ["net.0.frozen_weight", "net.0.bias"]),
    "thawed in the end": (Module, lambda: [Thaw(2, train_bn=False)], ["net.0.weight"]),
    "Product-Sum": (Module, lambda: [lowrank(), federated(FedLoRA(ProductSum()))], ["net.0.frozen_weight"]),
    "FFA": (Module, lambda: [lowrank(), federated(FedLoRA(FFA()))], ["net.0.frozen_weight"]),
    "FLoRA": (Module, lambda: [lowrank(), federated(FedLoRA(FLoRA()))], ["net.0.bias"]),
    "FedMUD": (
        Module,
        lambda: [LowRank(MatrixProduct(), rank=2, summary=False, exclude=["net.4"]), federated(FedMUD())],
        [],
    ),
    "PEFT": (
        wrapped,
        lambda: [federated(FedLoRA(ProductSum()))],
        ["net.base_model.model.0.base_layer.weight", "net.base_model.model.4.weight"],
    ),
}


def run(folder: Path, name: str, *more, **arguments):
    make, own, _ = RUNS[name]
    callbacks = own()
    # Lightning begins an epoch again that was left inside. Rounds go on.
    when = {"every_n_train_steps": 5} if any(isinstance(each, FederatedLoop) for each in callbacks) else {}
    saved = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, save_last=True, **when)
    return fit(trainer(folder, *callbacks, *more, saved), make(), Data(shuffle=False), **arguments)


@nightly_except("FFA")
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_resumes_as_a_whole_checkpoint_does(tmp_path, name):
    left_out = RUNS[name][2]
    whole = run(tmp_path / "whole", name)
    module = run(tmp_path / "trained", name, TrainedCheckpoints())
    assert_same(weights(module), weights(whole))
    files = sorted((tmp_path / "trained").glob("step=*.ckpt"))
    assert len(files) > 2
    for file in files[::2]:
        checkpoint = torch.load(file, weights_only=True)
        everything = torch.load(tmp_path / "whole" / file.name, weights_only=True)
        expected = everything["state_dict"].keys() - checkpoint["callbacks"]["TrainedCheckpoints"]["base"].keys()
        assert checkpoint["state_dict"].keys() == expected
        if name != "thawed in the end" or checkpoint["epoch"] < 2:
            assert set(left_out) <= everything["state_dict"].keys() - checkpoint["state_dict"].keys()
        resumed = run(tmp_path / "resumed", name, TrainedCheckpoints(), ckpt_path=file)
        assert_same(weights(resumed), weights(module))


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_frozen_weights_that_the_trainer_converts(tmp_path, precision):
    """The trainer converts the module after it has loaded a checkpoint of converted weights."""

    def fitted(**arguments):
        callbacks = [lowrank(), federated(FedLoRA(ProductSum())), TrainedCheckpoints()]
        run = trainer(tmp_path, *callbacks, max_epochs=2, precision=precision, limit_val_batches=0)
        return run, fit(run, Module(), Data(shuffle=False), **arguments)

    run, module = fitted()
    run.save_checkpoint(tmp_path / "end.ckpt")
    run, resumed = fitted(ckpt_path=tmp_path / "end.ckpt")
    assert_same(weights(resumed), weights(module))
    run.save_checkpoint(tmp_path / "again.ckpt")
    first, again = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("end", "again"))
    assert again["callbacks"]["TrainedCheckpoints"] == first["callbacks"]["TrainedCheckpoints"]
    assert again["state_dict"].keys() == first["state_dict"].keys()
    dense = load_dense(tmp_path / "end.ckpt", Module())
    inputs = draw(5, 6).to(module.dtype)
    close = {"rtol": 0.05, "atol": 0.05} if precision == "bf16-true" else {}
    torch.testing.assert_close(dense.to(module.dtype).net(inputs), module.net(inputs), **close)


@pytest.mark.slow
def test_what_a_method_changes_or_holds_fixed_is_saved(tmp_path):
    run(tmp_path / "FLoRA", "FLoRA", TrainedCheckpoints())
    run(tmp_path / "FFA", "FFA", TrainedCheckpoints())
    changed, fixed = (
        torch.load(tmp_path / name / "last.ckpt", weights_only=True)["state_dict"].keys() for name in ("FLoRA", "FFA")
    )
    assert "net.0.frozen_weight" in changed
    assert {"net.0.factors.U", "net.0.factors.V"} < fixed


@pytest.mark.slow
def test_other_frozen_weights_are_refused(tmp_path):
    run(tmp_path, "a plain run", TrainedCheckpoints())
    module = partly_frozen()
    with torch.no_grad():
        module.net[0].weight[0, 0] += 1e-6
    for start in ("fit", "validate"):
        with pytest.raises(MisconfigurationException, match=r"1.*2.*net\.0"):
            getattr(trainer(tmp_path, TrainedCheckpoints()), start)(module, Data(), ckpt_path=tmp_path / "last.ckpt")
    module = Module(network())
    with pytest.raises(RuntimeError, match=r'state_dict.*"net\.0\.weight"'):
        trainer(tmp_path).validate(module, Data(), ckpt_path=tmp_path / "last.ckpt")


@pytest.mark.slow
def test_evaluation_from_a_checkpoint(tmp_path):
    module = run(tmp_path, "a plain run", TrainedCheckpoints())
    (expected,) = trainer(tmp_path).validate(module, Data(), verbose=False)
    new = partly_frozen()
    (found,) = trainer(tmp_path, TrainedCheckpoints()).validate(
        new, Data(), ckpt_path=tmp_path / "last.ckpt", verbose=False
    )
    assert found == expected
    assert "on_load_checkpoint" not in vars(new)


@pytest.mark.slow
def test_a_checkpoint_after_the_fit_and_after_another(tmp_path):
    callback, module = TrainedCheckpoints(), partly_frozen()
    for number in range(2):
        runs = trainer(tmp_path, callback, max_epochs=1)
        fit(runs, module, Data())
        runs.save_checkpoint(tmp_path / f"{number}.ckpt")
        saved = torch.load(tmp_path / f"{number}.ckpt", weights_only=True)
        assert saved["callbacks"]["TrainedCheckpoints"]["base"]["net.0.weight"] == digest_of(network()[0].weight)
    with torch.no_grad():
        module.net[0].weight.mul_(2)
    fit(trainer(tmp_path, callback, ModelCheckpoint(tmp_path, filename="changed"), max_epochs=1), module, Data())
    saved = torch.load(tmp_path / "changed.ckpt", weights_only=True)
    assert list(saved["callbacks"]["TrainedCheckpoints"]["base"]) == ["net.0.bias"]
    assert torch.equal(saved["state_dict"]["net.0.weight"].cpu(), module.net[0].weight)


class Middle(Callback):
    """Thaws the first layer for the second epoch alone."""

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.net[0].requires_grad_(trainer.current_epoch == 1)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_what_was_frozen_again_is_saved(tmp_path, fused):
    module = partly_frozen()
    module.make_optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=fused)
    runs = trainer(tmp_path, Middle(), TrainedCheckpoints(), limit_train_batches=1, limit_val_batches=0)
    fit(runs, module, Data())
    runs.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)["state_dict"]
    assert not torch.equal(saved["net.0.weight"].cpu(), partly_frozen().net[0].weight)
    fit(trainer(tmp_path, TrainedCheckpoints(), max_epochs=4), partly_frozen(), Data(), ckpt_path=tmp_path / "run.ckpt")


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_frozen_parameter_that_is_replaced_by_other_values_is_saved(tmp_path, factor):
    class Replacing(Module):
        def training_step(self, batch, batch_idx):
            self.net[0].weight = nn.Parameter(self.net[0].weight.detach() * factor, requires_grad=False)
            return super().training_step(batch, batch_idx)

    module = Replacing(network())
    module.net[0].requires_grad_(False)
    runs = trainer(tmp_path, TrainedCheckpoints(), max_epochs=1, limit_train_batches=2, limit_val_batches=0)
    fit(runs, module, Data())
    runs.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert list(saved["callbacks"]["TrainedCheckpoints"]["base"]) == ["net.0.weight", "net.0.bias"][factor == 2 :]
    if factor == 2:
        assert torch.equal(saved["state_dict"]["net.0.weight"].cpu(), 4 * network()[0].weight)


@pytest.mark.slow
def test_a_changed_base_stays_saved_after_a_resume(tmp_path):
    run(tmp_path / "first", "FLoRA", TrainedCheckpoints())
    file = min((tmp_path / "first").glob("step=*.ckpt"), key=lambda each: int(each.stem.split("=")[1]))
    module = run(tmp_path / "second", "FLoRA", TrainedCheckpoints(), ckpt_path=file)
    again = run(tmp_path / "third", "FLoRA", TrainedCheckpoints(), ckpt_path=tmp_path / "second" / "last.ckpt")
    assert_same(weights(again), weights(module))


@pytest.mark.slow
class SavesTrained(Module):
    strict_loading = False

    def state_dict(self, *arguments, **settings):
        frozen = {name for name, value in self.named_parameters() if not value.requires_grad}
        saved = super().state_dict(*arguments, **settings)
        return {name: value for name, value in saved.items() if name not in frozen}


class DropsFrozen(Module):
    strict_loading = False

    def on_save_checkpoint(self, checkpoint):
        for name, value in self.named_parameters():
            if not value.requires_grad:
                del checkpoint["state_dict"][name]


@pytest.mark.parametrize("kind", [SavesTrained, DropsFrozen])
def test_a_modules_own_checkpoints_without_what_rounds_have_changed_are_refused(tmp_path, kind):
    def run_of(*more):
        return trainer(tmp_path, lowrank(), federated(FedLoRA(FLoRA())), *more, max_epochs=1, limit_val_batches=0)

    with pytest.warns(UserWarning, match=rf"lacks 3 .*net\.0\.frozen_weight.*{kind.__name__}.*TrainedCheckpoints"):
        run_of(ModelCheckpoint(tmp_path, save_last=True)).fit(kind(), Data())
    file = tmp_path / "last.ckpt"
    for read in (
        lambda: run_of().fit(kind(), Data(), ckpt_path=file),
        lambda: load_dense(file, Module()),
        lambda: adapter_checkpoint(file, tmp_path / "adapter", module=Module()),
    ):
        with pytest.raises(MisconfigurationException, match=r"lacks 3 .*net\.0\.frozen_weight.*TrainedCheckpoints"):
            read()


def test_a_checkpoint_after_the_fit_without_what_rounds_have_changed_is_refused(tmp_path):
    used = trainer(tmp_path, lowrank(), federated(FedLoRA(FLoRA())), max_epochs=1, limit_val_batches=0)
    used.fit(SavesTrained(), Data())
    with pytest.warns(UserWarning, match=r"lacks 3 .*net\.0\.frozen_weight.*SavesTrained"):
        used.save_checkpoint(tmp_path / "after.ckpt")
    with pytest.raises(MisconfigurationException, match=r"lacks 3 .*net\.0\.frozen_weight"):
        load_dense(tmp_path / "after.ckpt", Module())


def test_dense_weights_and_adapters(tmp_path):
    module = run(tmp_path, "Product-Sum", TrainedCheckpoints(), ModelCheckpoint(tmp_path, filename="end"))
    file = tmp_path / "end.ckpt"
    dense = load_dense(file, Module())
    inputs = torch.randn(5, 6)
    torch.testing.assert_close(dense.net(inputs), module.net(inputs))
    other = Module()
    nn.init.zeros_(other.net[0].weight)
    with pytest.raises(MisconfigurationException, match=r"net.0.frozen_weight"):
        load_dense(file, other)
    with pytest.raises(MisconfigurationException, match=r"end\.ckpt"):
        dense_checkpoint(file)
    with pytest.raises(SystemExit, match="load_dense"):
        cli.main(["export", str(file), str(tmp_path / "dense.safetensors")])
    adapter_checkpoint(file, tmp_path / "adapter", prefix="net.")
    loaded = peft().PeftModel.from_pretrained(copy.deepcopy(network()), tmp_path / "adapter")
    torch.testing.assert_close(loaded(inputs), module.net(inputs))


def test_sharded_models_are_refused(tmp_path):
    runs = trainer(tmp_path, TrainedCheckpoints())
    runs.strategy.__class__ = type("Sharded", (type(runs.strategy), FSDPStrategy), {})
    with pytest.raises(MisconfigurationException, match="shards"):
        TrainedCheckpoints().setup(runs, Module(), "fit")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_digests_tell_types_shapes_and_numbers_apart(dtype):
    values = torch.tensor([[1, 0, 3], [4, 5, 0]]).to(dtype)
    same = values.t().contiguous().t()
    assert digest_of(values) == digest_of(same)
    others = [values.flatten(), values.t(), torch.zeros_like(values), values.to(torch.float64)]
    assert len({digest_of(each) for each in [values, *others]}) == 5
    assert len(digest_of(torch.zeros(()))) == len(digest_of(torch.zeros(0))) == 32
