"""A run that is resumed on an accelerator is the run that was not stopped, bit for bit with ``deterministic=True``."""

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_lowrank.testing.experiment import blobs, quiet
from tests.gpu.places import apart, convolutions, of_network, run

pytestmark = pytest.mark.slow

OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=1e-2),
}


@pytest.mark.parametrize("every", [1, 3], ids=["within a round", "at the end of rounds"])
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_runs_are_equal_bit_for_bit(place, tmp_path, name, execution, every):
    if place == "strict":
        pytest.skip("the pretend device's storages cannot be saved")
    of = of_network(convolutions, OPTIMIZERS[name])
    settings = {"execution": execution, "optimizer_state": "keep"}
    deterministic = {"deterministic": True, "max_epochs": 3}
    when = {"every_n_train_steps": 2} if every == 1 else {"every_n_epochs": 1}
    saved = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, **when)
    whole = run(place, of, saved, trainer=deterministic, **settings)
    again = run(place, of, trainer=deterministic, **settings)
    assert apart(whole.weights, again.weights) == 0
    checkpoints = sorted(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    chosen = checkpoints[len(checkpoints) // 2]
    resumed = run(place, of, checkpoint=chosen, trainer=deterministic, **settings)
    assert resumed.trainer.global_step == whole.trainer.global_step
    assert apart(whole.weights, resumed.weights) == 0
    # On another device it goes on too; dropout draws from another generator there.
    elsewhere = run("cpu", of, checkpoint=chosen, trainer={"max_epochs": 3}, **settings)
    assert elsewhere.trainer.global_step == whole.trainer.global_step


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_a_second_fit_goes_on(place, execution):
    """What clients keep is on the device, and the end of a fit moves the module away from it."""
    first = run(place, of_network(convolutions, OPTIMIZERS["adam"]), optimizer_state="keep", execution=execution)
    before, steps = first.weights, first.trainer.global_step
    first.trainer.fit_loop.max_epochs = 4
    with quiet():
        first.trainer.fit(first.module, DataLoader(blobs(28), batch_size=4, shuffle=True))
    assert first.trainer.global_step > steps
    assert apart(first.weights, before) > 0
