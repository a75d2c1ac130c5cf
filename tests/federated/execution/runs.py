"""Runs in either execution, how their ends are compared, and modules and callbacks that rule one out."""

from functools import partial

import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import TensorDataset

from lightning_lowrank import (
    CP,
    BlockKronecker,
    FedAvg,
    FederatedLoop,
    FromIndices,
    Hadamard,
    LowRank,
    MatrixProduct,
    ProjectedAdamW,
    ProjectedSGD,
)
from tests.helpers import Data, Module, blobs, fit, trainer, weights

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


class Item(Module):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss * (1 if loss.item() > 0 else 2)


class Kept(Module):
    """Takes a parameter from a list of its own, where clients that step together do not put theirs."""

    def __init__(self):
        super().__init__()
        self.penalized = [next(self.net.parameters())]

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + self.penalized[0].square().sum()


class Manual(Module):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Reader(Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pass
