"""What stands on stacks of clients, and what cannot be mapped over them."""

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import FederatedLoop
from tests.federated.execution.runs import Item, Kept, Manual, Reader, both, run
from tests.helpers import Module


def test_frozen_weights_are_not_stacked(tmp_path):
    sizes = []

    class Watching(Module):
        def on_train_batch_end(self, *_):
            (loop,) = (c for c in self.trainer.callbacks if isinstance(c, FederatedLoop))
            sizes.append(set(loop.rounds.execution._stack.values) if loop.rounds.execution._stack else None)

    run(tmp_path, "vectorized", "update", module=Watching)
    assert sizes
    assert not any("frozen_weight" in name for names in sizes if names for name in names)


def test_a_failing_step_leaves_the_module_as_it_was(tmp_path):
    class Failing(Module):
        def training_step(self, batch, batch_idx):
            if self.global_step == 3:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    module = Failing()
    with pytest.raises(KeyError, match="mine"):
        run(tmp_path, "vectorized", module=lambda: module, on_client_error="raise")
    assert "training_step" not in vars(module)
    assert all(value.ndim <= 2 for value in module.state_dict().values())


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


@pytest.mark.parametrize(
    ("module", "cause"),
    [
        (Kept, r"Take it from the module \(self.parameters\(\)"),
        (Item, "takes a number out of a tensor"),
        (Branch, "by a tensor's value|takes a number"),
        (Nothing, "in place of a loss"),
        (Counting, "metric|in place|takes a number|boolean mask"),
    ],
)
def test_what_cannot_be_mapped_is_refused_by_its_cause(tmp_path, module, cause):
    with pytest.raises(MisconfigurationException, match=cause):
        run(tmp_path, "vectorized", module=module)


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


class Tied(Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.net[4].weight = self.net[2].weight
        self.again = self.net[2]

    def loss(self, batch):
        return nn.functional.cross_entropy(self.again(self.net(batch[0]))[:, :4], batch[1])


@pytest.mark.parametrize("form", ["dense", "update", pytest.param("weight", marks=pytest.mark.slow)])
def test_tied_weights(tmp_path, form):
    def tied():
        torch.manual_seed(5)
        return Tied()

    both(tmp_path, form=form, module=tied)


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
