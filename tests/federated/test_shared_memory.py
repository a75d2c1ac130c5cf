"""Two tensors in one memory are kept one value, or refused by name."""

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import SCAFFOLD, FedAvg, FederatedLoop, FedPer, FromIndices, TopK
from tests.helpers import Data, Module, blobs, fit, trainer, weights


class Transposed(nn.Module):
    """Uses one memory as two Parameters, as an encoder and its decoder."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 4)
        self.second = nn.Linear(4, 6)
        self.second.weight = nn.Parameter(self.first.weight.data.T)

    def forward(self, inputs):
        return self.first(self.second(torch.relu(self.first(inputs))))


PARTS = [range(40), range(40, 61)]


def run(tmp_path, algorithm, **settings):
    loop = FederatedLoop(algorithm, partition=FromIndices(PARTS), summary=False, **settings)
    made = trainer(tmp_path, loop, max_epochs=1, limit_val_batches=0)
    module = Module(Transposed(), optimizer=lambda p: torch.optim.SGD(p, lr=0.05))
    return fit(made, module, Data(blobs(61), shuffle=False))


def test_a_mean_keeps_them_one_value(tmp_path):
    module = run(tmp_path, FedAvg())
    assert module.net.second.weight.equal(module.net.first.weight.T)
    ends = []
    for part in PARTS:
        plain = Module(Transposed(), optimizer=lambda p: torch.optim.SGD(p, lr=0.05))
        data = Data(torch.utils.data.Subset(blobs(61), part), shuffle=False)
        ends.append(weights(fit(trainer(tmp_path, max_epochs=1, limit_val_batches=0), plain, data)))
    mean = {name: (40 * ends[0][name] + 21 * ends[1][name]) / 61 for name in ends[0]}
    torch.testing.assert_close(weights(module), mean)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (FedPer(["net.first.weight"]), {}),
        (SCAFFOLD(), {}),
        (FedAvg(), {"uplink": [TopK(0.5)]}),
        (FedAvg(), {"downlink": [TopK(0.5)]}),
    ],
    ids=["FedPer", "SCAFFOLD", "uplink", "downlink"],
)
def test_what_may_make_two_values_of_them_is_refused(tmp_path, algorithm, settings):
    with pytest.raises(MisconfigurationException, match=r"net\.first\.weight and net\.second\.weight"):
        run(tmp_path, algorithm, **settings)


def test_neighbours_in_one_memory_are_none(tmp_path):
    module = Module(nn.Linear(6, 4))
    memory = torch.randn(28)
    module.net.weight = nn.Parameter(memory[:24].view(4, 6))
    module.net.bias = nn.Parameter(memory[24:])
    loop = FederatedLoop(FedPer(["net.bias"]), clients=2, summary=False)
    fit(trainer(tmp_path, loop, max_epochs=1, limit_val_batches=0), module, Data(blobs(61)))


class Hooked(Module):
    """Doubles the gradient of an activation, by a hook that a step sets."""

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        hidden = self.net[0](inputs)
        hidden.register_hook(lambda gradient: 2 * gradient)
        return nn.functional.cross_entropy(self.net[1:](hidden), targets)


def test_hooks_that_a_step_sets_are_refused_where_clients_step_together(tmp_path, capsys):
    for execution in ("vectorized", "auto"):
        loop = FederatedLoop(FedAvg(), clients=4, execution=execution, summary=False)
        made = trainer(tmp_path, loop, max_epochs=1, limit_val_batches=0)
        module = Hooked(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)))
        if execution == "vectorized":
            with pytest.raises(MisconfigurationException, match=r"register_hook"):
                fit(made, module, Data())
        else:
            fit(made, module, Data())
            assert loop.rounds.execution.name == "sequential"
