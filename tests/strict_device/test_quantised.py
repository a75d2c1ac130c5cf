"""What a quantised base has learnt moves with the module. `tests/test_strict_device.py` runs it."""

from __future__ import annotations

import pytest
import torch

from lightning_lowrank import FedEx, FLoRA
from lightning_lowrank.lora import keep_base_changes
from tests.helpers import Module
from tests.interop import test_quantised as on_cpu
from tests.strict_device import device

INPUTS = on_cpu.INPUTS


@pytest.mark.slow
@pytest.mark.parametrize("operator", [FLoRA(), FedEx()], ids=repr)
def test_the_change_of_a_quantised_base_survives_a_fit_on_the_device(tmp_path, operator):
    run, module, loop = on_cpu.federate(tmp_path, on_cpu.quantised("stand-in"), operator, rounds=2)
    (parts,) = loop.server.base.state["separate_changes"].values()
    assert {value.device.type for value in parts.values()} == {device.NAME}
    # Lightning has moved the module to the CPU.
    change = {name: value for name, value in module.state_dict().items() if "lowrank_change" in name}
    assert len(change) == len(parts)
    assert {value.device.type for value in change.values()} == {"cpu"}
    with torch.no_grad():
        outputs = module.net.eval()(INPUTS)
        there = module.to(device.NAME).net(INPUTS.to(device.NAME))
        torch.testing.assert_close(there, outputs)
    module.cpu()

    run.save_checkpoint(tmp_path / "two.ckpt")
    new = Module(on_cpu.wrap(on_cpu.quantised("stand-in")))
    keep_base_changes(new)
    new.load_state_dict(torch.load(tmp_path / "two.ckpt", weights_only=True, map_location="cpu")["state_dict"])
    with torch.no_grad():
        torch.testing.assert_close(new.net.eval()(INPUTS), outputs)

    # A resumed run and another fit go on from it.
    _, resumed, _ = on_cpu.federate(
        tmp_path, on_cpu.quantised("stand-in"), operator, rounds=3, checkpoint=tmp_path / "two.ckpt"
    )
    _, whole, _ = on_cpu.federate(tmp_path, on_cpu.quantised("stand-in"), operator, rounds=3)
    _, same, _ = on_cpu.federate(tmp_path, None, operator, rounds=0, module=module)
    with torch.no_grad():
        torch.testing.assert_close(resumed.net.eval()(INPUTS), whole.net.eval()(INPUTS), rtol=0, atol=0)
        torch.testing.assert_close(same.net.eval()(INPUTS), outputs)
