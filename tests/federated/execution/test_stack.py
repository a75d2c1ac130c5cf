"""What stands on stacks of clients, and what cannot be mapped over them."""

import copy
from functools import partial
from operator import is_ as operator_is

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, default_collate
from torchmetrics import MeanMetric

from lightning_lowrank import FederatedLoop, FromIndices
from lightning_lowrank.federated.execution import stack
from lightning_lowrank.federated.execution.stack import ClientStack
from tests.federated.execution.runs import Double, Item, Kept, Manual, Reader, assert_close, both, run
from tests.helpers import Data, Module, blobs, weights


@pytest.mark.slow
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


@pytest.mark.parametrize("fails", ["the optimizers' state", "a hook"])
def test_a_stack_that_cannot_be_made_leaves_nothing(tmp_path, monkeypatch, fails):
    module, made = Module(optimizer=torch.optim.Adagrad), []

    def fails_once(*arguments):
        made.append(arguments)
        raise MemoryError("no luck")

    def begins(trainer, pl_module):
        if fails == "a hook":
            monkeypatch.setattr(Tensor, "register_hook", fails_once)
        else:
            own = stack.fresh_state
            monkeypatch.setattr(stack, "fresh_state", lambda optimizer: own(optimizer) if made else fails_once())

    with pytest.raises(MemoryError, match="no luck"):
        run(tmp_path, "vectorized", module=lambda: module, callbacks=[LambdaCallback(on_train_epoch_start=begins)])
    assert made
    assert not {"training_step", "configure_gradient_clipping"} & vars(module).keys()
    held = [value for group in module.trainer.optimizers[0].param_groups for value in group["params"]]
    assert all(map(operator_is, held, module.parameters()))
    assert not any(value._backward_hooks for value in module.parameters())


class Branch(Module):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss if batch[0][0, 0] > 0 else 2 * loss


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
        (Kept, r"self\.parameters\(\).*execution='sequential'"),
        (Item, "training_step"),
        (Branch, "training_step"),
        (Nothing, "training_step"),
        (Counting, "training_step"),
    ],
)
def test_what_cannot_be_mapped_is_refused_by_its_cause(tmp_path, module, cause):
    with pytest.raises(MisconfigurationException, match=cause):
        run(tmp_path, "vectorized", module=module)


class Moves(Module):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


class Augments(Data):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        # What is no batch would be let through without a word.
        return [2 * batch[0], batch[1]] if len(batch) == 2 else batch


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"module": Manual}, "optimizes manually"),
        ({"module": Moves}, r"Moves\.on_after_batch_transfer"),
        ({"data": Augments()}, r"Augments\.on_after_batch_transfer"),
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


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dense", "update", "weight"])
def test_tied_weights(tmp_path, form):
    def tied():
        torch.manual_seed(5)
        return Tied()

    both(tmp_path, form=form, module=tied)


@pytest.mark.slow
def test_a_graph_that_the_user_holds_on_to_does_no_harm(tmp_path):
    class Holding(Module):
        def training_step(self, batch, batch_idx):
            self.held = super().training_step(batch, batch_idx)
            return self.held

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.graphs = [*getattr(self, "graphs", []), self.held]

    both(tmp_path, module=Holding)


@pytest.mark.slow
def test_a_training_step_without_an_index(tmp_path):
    class Plain(Module):
        def training_step(self, batch):
            return self.loss(batch)

    both(tmp_path, module=Plain)


class Updating(Module):
    def __init__(self):
        super().__init__()
        self.metric = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.metric.update(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("mean", self.metric.compute())
        self.metric.reset()


class Appending(Module):
    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("mean", torch.stack(self.losses).mean())
        self.losses.clear()


class Smoothing(Module):
    mean = 0.0

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss + 0 * self.mean


class Numbering(Module):
    def __init__(self):
        super().__init__()
        self.stats = {"steps": 0}

    def training_step(self, batch, batch_idx):
        self.stats["steps"] += 1
        return self.loss(batch) / self.stats["steps"]


class Unsaved(Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def training_step(self, batch, batch_idx):
        self.mean = 0.9 * self.mean + 0.1 * batch[0].mean(0)
        return self.loss(batch)


class Checkpointed(Module):
    def loss(self, batch):
        outputs = checkpoint(self.net, batch[0], use_reentrant=False)
        return nn.functional.cross_entropy(outputs, batch[1])


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        ctx.save_for_backward(inputs)
        return inputs.square()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


class Custom(Module):
    def loss(self, batch):
        return super().loss((Square.apply(batch[0]), batch[1]))


class Penalized(Module):
    def loss(self, batch):
        inputs = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(super().loss((inputs, batch[1])), inputs, create_graph=True)
        return gradient.square().sum()


class Recurrent(Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(6, 6)

    def loss(self, batch):
        return super().loss((self.recurrent(batch[0])[0], batch[1]))


class Filling(Module):
    def loss(self, batch):
        filled = torch.zeros(len(batch[0]), 6, dtype=batch[0].dtype)
        filled[:] = batch[0]
        return super().loss((filled, batch[1]))


class Clamping(Module):
    def on_train_batch_end(self, *_):
        with torch.no_grad():
            self.net[0].weight.clamp_(-0.1, 0.1)


class Teaching(Module):
    """Moves a teacher towards the weights, of which it is a copy yet."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def on_before_zero_grad(self, optimizer):
        for old, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            old.data.mul_(0.9).add_(new.data, alpha=0.1)


class Replacing(Module):
    def on_train_batch_start(self, *_):
        self.net[0].weight.data = nn.functional.normalize(self.net[0].weight.data)


class Freezing(Module):
    """Freezes a layer in its second batch."""

    def __init__(self, where="training_step"):
        super().__init__()
        self.where = where

    def freeze(self, batch_idx, where):
        if batch_idx == 1 and self.where == where:
            self.net[0].requires_grad_(False)

    def training_step(self, batch, batch_idx):
        self.freeze(batch_idx, "training_step")
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch, batch_idx):
        self.freeze(batch_idx, "on_train_batch_start")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.freeze(batch_idx, "on_train_batch_end")


class Many(Module):
    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")


class Centred(Module):
    """Assigns a buffer, as DINO does with its centre."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(6))

    def training_step(self, batch, batch_idx):
        self.centre = 0.9 * self.centre + 0.1 * batch[0].mean(0)
        return self.loss((batch[0] - self.centre, batch[1]))


@pytest.mark.slow
def test_a_buffer_that_the_step_assigns(tmp_path):
    module, _, _ = run(
        tmp_path, "vectorized", module=Centred, participants=[[0]], local_steps=3, trainer={"max_epochs": 1}
    )
    mean = Double().train.tensors[0][:5].mean(0)
    torch.testing.assert_close(module.centre, (1 - 0.9**3) * mean)


class Deciding(Module):
    """Asks for numbers that are the same for all clients."""

    def training_step(self, batch, batch_idx):
        mask = torch.ones_like(batch[0])
        masked = batch[0] if bool(mask.all()) else batch[0] * mask
        return self.loss((masked, batch[1])) / mask.sum(1).max().item()


class Inplace(Module):
    """Changes what convolutions return in place."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(
            nn.Sequential(
                nn.Unflatten(1, (1, 2, 3)),
                *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 1), nn.SiLU(inplace=True)),
                nn.Flatten(),
                nn.Linear(24, 4),
            )
        )


class Joined(Inplace):
    """Changes one of an output and its view, as flat images lie otherwise for one client than for many."""

    whole = False

    def loss(self, batch):
        images = self.net[:4](batch[0])
        flat = images.view(len(images), -1)
        if self.whole:
            return images.sum() + flat.mul_(2).sum()
        images = None
        flat = nn.functional.relu(flat, inplace=True)
        return nn.functional.cross_entropy(self.net[-1](flat), batch[1])


class TornApart(Joined):
    whole = True


class Biased(Module):
    """Trains a bias of attention."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(6, 6))

    def loss(self, batch):
        inputs = batch[0].unsqueeze(-1)
        mixed = nn.functional.scaled_dot_product_attention(inputs, inputs, inputs, self.bias)
        return super().loss((mixed.squeeze(-1), batch[1]))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dense", "update"])
@pytest.mark.parametrize("module", [Deciding, Inplace, Joined, Biased])
def test_what_torch_alone_would_not_map(tmp_path, module, form):
    both(tmp_path, form=form, module=module, trainer={"max_epochs": 1})


@pytest.mark.parametrize(
    ("module", "cause"),
    [
        (Updating, r"self\.metric.*MeanMetric"),
        (Appending, r"self\.losses"),
        (Smoothing, r"self\.mean"),
        (Numbering, r"self\.stats\.steps"),
        (Unsaved, r"self\.mean"),
        (Checkpointed, "gradient checkpointing"),
        (Custom, r"autograd\.Function"),
        (Penalized, "training_step"),
        (Recurrent, r"recurrent layers \(nn\.LSTM"),
        (Filling, r"torch\.zeros\(\)"),
        (Clamping, r"Clamping\.on_train_batch_end\(\) .* net\.0\.weight"),
        (Teaching, r"Teaching\.on_before_zero_grad\(\).*teacher\.0"),
        (Replacing, r"Replacing\.on_train_batch_start\(\).*net\.0"),
        (Many, r"self\.log"),
        (TornApart, r"in place through view\(\), and uses both"),
    ],
)
def test_what_a_step_does_beside_its_loss_is_refused_by_its_cause(tmp_path, module, cause):
    steps = []
    count = LambdaCallback(on_train_batch_end=lambda *_: steps.append(1))
    with pytest.raises(MisconfigurationException, match=cause):
        run(tmp_path, "vectorized", module=module, callbacks=[count], trainer={"max_epochs": 1})
    assert not steps or module is Clamping


@pytest.mark.parametrize("where", ["on_train_batch_start", "on_train_batch_end", "callback"])
def test_a_hook_that_freezes_layers_is_refused(tmp_path, where):
    """In the last of two batches, of three clients."""
    freeze = LambdaCallback(on_train_batch_start=lambda run, module, batch, number: module.freeze(number, "callback"))
    parts = [range(16), range(16, 32), range(32, 48)]
    settings = {"partition": FromIndices(parts), "trainer": {"max_epochs": 1}, "callbacks": [freeze]}
    module = Freezing(where)
    with pytest.raises(MisconfigurationException, match=r"together.* requires_grad of net\.0\.weight, net\.0\.bias"):
        run(tmp_path, "vectorized", module=lambda: module, **settings)
    assert module.net[0].weight.requires_grad


@pytest.mark.parametrize("clients", [[0, 1], [0]])
def test_a_step_that_freezes_layers_is_refused(tmp_path, clients):
    settings = {"partition": FromIndices([range(16), range(16, 32)]), "participants": [clients]}
    with pytest.raises(MisconfigurationException, match=r"cannot map training_step.*requires_grad_\(\)"):
        run(tmp_path, "vectorized", module=Freezing, trainer={"max_epochs": 1}, **settings)


@pytest.mark.parametrize(("sizes", "rounds"), [((10, 11, 12), 1), ((2, 3, 4), 2)])
def test_a_number_that_counts_steps_is_refused_where_no_two_batches_have_one_form(tmp_path, sizes, rounds):
    """In the second step of clients of two batches each, or in the first round's and the second round's steps."""
    ends = [sum(sizes[: client + 1]) for client in range(3)]
    partition = FromIndices([range(end - size, end) for end, size in zip(ends, sizes, strict=True)])
    with pytest.raises(MisconfigurationException, match=r"self\.stats\.steps"):
        run(tmp_path, "vectorized", module=Numbering, partition=partition, trainer={"max_epochs": rounds})


class Entries(Dataset):
    """Samples with entries of their own beside their tensors."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index):
        inputs, targets = blobs().tensors
        return {"x": inputs[index].double(), "y": targets[index], "writer": f"w{index // 10}", "unit": "cm"}


class Dictionaries(Module):
    reads = ""

    def __init__(self):
        torch.manual_seed(0)
        # The step changes statistics before it reads what cannot be mapped.
        super().__init__(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))

    def training_step(self, batch, batch_idx):
        loss = self.loss((batch["x"], batch["y"]))
        return loss * len(batch[self.reads][0]) if self.reads else loss


class ReadsAll(Dictionaries):
    reads = "unit"


class ReadsClients(Dictionaries):
    reads = "writer"


OF_TENS = FromIndices([list(range(start, start + 10)) for start in range(0, 100, 10)])


@pytest.mark.parametrize("module", [Dictionaries, ReadsAll])
def test_what_is_no_tensor_and_is_not_read_keeps_nobody_from_stepping_together(tmp_path, module, monkeypatch):
    sizes, mapped = [], ClientStack.mapped

    def counted(self, run, stacks):
        sizes.append(len(next(iter(stacks[0].values()))))
        return mapped(self, run, stacks)

    monkeypatch.setattr(ClientStack, "mapped", counted)
    both(tmp_path, module=module, data=Data(Entries()), partition=OF_TENS, trainer={"max_epochs": 1})
    assert set(sizes) == {10}


def test_where_it_is_read_and_differs_clients_make_their_steps_one_after_another(tmp_path, monkeypatch):
    warned = []
    monkeypatch.setattr(stack, "rank_zero_warn", warned.append)
    settings = {"data": Data(Entries()), "partition": OF_TENS, "trainer": {"max_epochs": 2}}
    both(tmp_path, module=ReadsClients, **settings)
    (warning,) = warned
    assert "batch['writer']" in warning
    for module in (Dictionaries, ReadsClients):
        ends = [weights(run(tmp_path, way, module=module, **settings)[0]) for way in ("sequential", "auto")]
        assert_close(*ends)


UNSTACKED = {
    "sparse": Tensor.to_sparse,
    "nested": lambda rows: torch.nested.nested_tensor(list(rows)),
    "packed": lambda rows: nn.utils.rnn.pack_sequence(list(rows.unsqueeze(-1))),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize("kind", UNSTACKED)
def test_batches_that_cannot_be_stacked(tmp_path, capsys, kind):
    def collate(samples):
        inputs, targets = default_collate(samples)
        return UNSTACKED[kind](inputs), targets

    settings = {"data": Double(collate_fn=collate), "module": Sums, "trainer": {"max_epochs": 1}}
    with pytest.raises(MisconfigurationException, match=f"vectorized.*{kind}"):
        run(tmp_path, "vectorized", **settings)
    module, loop, _ = run(tmp_path, "auto", **settings)
    assert loop.rounds.execution.name == "sequential"
    assert kind in capsys.readouterr().out
    assert_close(weights(run(tmp_path, "sequential", **settings)[0]), weights(module), tolerance=0)


class Sums(Module):
    def training_step(self, batch, batch_idx):
        inputs = batch[0].data if isinstance(batch[0], nn.utils.rnn.PackedSequence) else batch[0]
        total = (
            inputs.to_dense().sum() if inputs.is_sparse else inputs.values().sum() if inputs.is_nested else inputs.sum()
        )
        return total * sum(value.sum() for value in self.parameters())
