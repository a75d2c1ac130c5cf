"""Rounds against a FedAvg written without this package, bit for bit, and what Lightning's settings mean in them."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_lowrank import (
    Dirichlet,
    FedAvg,
    FederatedLoop,
    FedProx,
    FromIndices,
    LowRank,
    MatrixProduct,
    ProjectedSGD,
)
from lightning_lowrank.seeding import generator
from tests.helpers import Data, Module, assert_same, blobs, fit, network, plain_fedavg, trainer, weights

UNEVEN = [list(range(5)), list(range(5, 47)), list(range(47, 69)), list(range(69, 103))]
PARTICIPANTS = [[0, 1, 3], [2], [3, 1]]


def loop(**arguments: Any) -> FederatedLoop:
    defaults = {"partition": FromIndices(UNEVEN), "participants": PARTICIPANTS, "summary": False}
    return FederatedLoop(FedAvg(), **{**defaults, **arguments})


def batches(
    data: TensorDataset, client: int, round_number: int, epochs: int = 1, shuffle: bool = True, size: int = 8
) -> list[tuple[Tensor, ...]]:
    indices = torch.tensor(UNEVEN[client])
    draws = generator(0, "order", round_number, client)
    found = []
    for _ in range(epochs):
        order = indices[torch.randperm(len(indices), generator=draws)] if shuffle else indices
        found += [data[chunk] for chunk in order.split(size)]
    return found


def rounds_of(**arguments: Any) -> list[dict[int, list[tuple[Tensor, ...]]]]:
    data = blobs()
    return [
        {client: batches(data, client, number, **arguments) for client in ids}
        for number, ids in enumerate(PARTICIPANTS)
    ]


SGD = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
STEP_LR = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
SIZES = [len(indices) for indices in UNEVEN]


@pytest.mark.parametrize(
    ("optimizer", "module_arguments", "trainer_arguments", "reference"),
    [
        (SGD, {}, {}, {}),
        (MOMENTUM, {}, {}, {}),
        (partial(torch.optim.AdamW, lr=0.01), {}, {}, {}),
        (SGD, {}, {"gradient_clip_val": 0.05}, {"clip": 0.05}),
        (MOMENTUM, {"scheduler": STEP_LR}, {}, {"scheduler": STEP_LR}),
        (SGD, {}, {"accumulate_grad_batches": 2}, {"accumulate": 2}),
        (MOMENTUM, {}, {"accumulate_grad_batches": 4}, {"accumulate": 4}),
        (
            SGD,
            {"scheduler": STEP_LR},
            {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
            {"accumulate": 3, "clip": 0.1, "scheduler": STEP_LR},
        ),
    ],
)
def test_equals_plain_fedavg(tmp_path, optimizer, module_arguments, trainer_arguments, reference):
    module = Module(optimizer=optimizer, **module_arguments)
    fit(trainer(tmp_path, loop(), **trainer_arguments), module, Data())
    assert_same(weights(module.net), plain_fedavg(network(), rounds_of(), optimizer, SIZES, **reference))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, partial(nn.GroupNorm, 4)])
def test_norms_equal_plain_fedavg(tmp_path, norm):
    module = Module(network(norm=norm))
    fit(trainer(tmp_path, loop()), module, Data())
    assert_same(weights(module.net), plain_fedavg(network(norm=norm), rounds_of(), SGD, SIZES))


class SavesTrained(Module):
    def state_dict(self):
        return {name.removeprefix("net."): value for name, value in self.net.named_parameters() if value.requires_grad}


def test_statistics_that_a_modules_checkpoints_lack_are_averaged(tmp_path):
    module = SavesTrained(network(norm=nn.BatchNorm1d))
    fit(trainer(tmp_path, loop()), module, Data())
    assert_same(weights(module.net), plain_fedavg(network(norm=nn.BatchNorm1d), rounds_of(), SGD, SIZES))


def test_local_epochs_without_shuffling(tmp_path):
    module = Module()
    fit(trainer(tmp_path, loop(local_epochs=2)), module, Data(shuffle=False))
    assert_same(weights(module.net), plain_fedavg(network(), rounds_of(epochs=2, shuffle=False), SGD, SIZES))


def test_local_steps_go_on_into_further_passes(tmp_path):
    module = Module()
    fit(trainer(tmp_path, loop(local_steps=7)), module, Data())
    rounds = [{client: found[:7] for client, found in each.items()} for each in rounds_of(epochs=7)]
    assert_same(weights(module.net), plain_fedavg(network(), rounds, SGD, SIZES))


@pytest.mark.parametrize(
    ("weighting", "sizes"), [("uniform", [1, 1, 1, 1]), (lambda client: client.samples**0.5, [s**0.5 for s in SIZES])]
)
def test_weighting(tmp_path, weighting, sizes):
    module = Module()
    fit(trainer(tmp_path, loop(weighting=weighting)), module, Data())
    assert_same(weights(module.net), plain_fedavg(network(), rounds_of(), SGD, sizes))


class ManualModule(Module):
    """Two optimizers with two parameter groups, stepped by hand in alternation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return alternating_optimizers(self.net)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


class ScheduledManually(ManualModule):
    def configure_optimizers(self):
        optimizers = super().configure_optimizers()
        return optimizers, [torch.optim.lr_scheduler.StepLR(each, 1) for each in optimizers]


@pytest.mark.slow
def test_only_schedulers_of_manual_optimization_are_warned_of(tmp_path, recwarn):
    for module, said in ((ManualModule(), 0), (ScheduledManually(), 1)):
        recwarn.clear()
        loop = FederatedLoop(FedAvg(), clients=2, summary=False)
        trainer(tmp_path, loop, max_epochs=1, limit_val_batches=0).fit(module, Data())
        assert sum("on_train_epoch_end, are kept" in str(each.message) for each in recwarn) == said


class OddSteps(Module):
    """Makes every second of its manual steps, with what Lightning gives for ``use_pl_optimizer``."""

    def __init__(self, use_pl_optimizer: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.use_pl_optimizer = use_pl_optimizer

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            optimizer = self.optimizers(use_pl_optimizer=self.use_pl_optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("callbacks", "acting"),
    [
        (lambda: [FederatedLoop(FedProx(0.1), clients=2, summary=False)], "FedProx"),
        (lambda: [LowRank(MatrixProduct(), rank=2, frobenius_decay=0.01, summary=False), loop()], "frobenius_decay"),
    ],
)
def test_manual_steps_that_nothing_sees_are_refused(tmp_path, callbacks, acting):
    fit(trainer(tmp_path, *callbacks(), max_epochs=1), OddSteps(use_pl_optimizer=True), Data())
    with pytest.raises(
        MisconfigurationException, match=rf"step\(\) of SGD itself.* {acting}.* optimizers that self\.optimizers"
    ):
        fit(trainer(tmp_path, *callbacks(), max_epochs=1), OddSteps(use_pl_optimizer=False), Data())
    # Averaging has no part in steps.
    fit(trainer(tmp_path, loop(), max_epochs=1), OddSteps(use_pl_optimizer=False), Data())


def alternating_optimizers(net: nn.Module) -> list[torch.optim.Optimizer]:
    first = torch.optim.SGD(
        [{"params": net[0].parameters(), "lr": 0.2}, {"params": net[2].parameters()}], lr=0.05, momentum=0.9
    )
    return [first, torch.optim.Adam(net[4].parameters(), lr=0.01)]


@pytest.mark.slow
def test_manual_optimization_with_several_optimizers(tmp_path):
    module = ManualModule()
    fit(trainer(tmp_path, loop()), module, Data())

    net = network()
    optimizers = alternating_optimizers(net)
    for clients in rounds_of():
        start = weights(net)
        sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in start.items()}
        for client in sorted(clients):
            net.load_state_dict(start)
            for optimizer in optimizers:
                optimizer.state.clear()
            for inputs, targets in clients[client]:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(net(inputs), targets).backward()
                    optimizer.step()
            for name, value in net.state_dict().items():
                sums[name] += SIZES[client] * value.double()
        total = sum(SIZES[client] for client in clients)
        net.load_state_dict({name: (value / total).float() for name, value in sums.items()})
    assert_same(weights(module.net), weights(net))


@pytest.mark.slow
def test_kept_optimizer_state_returns_to_its_client(tmp_path):
    module = Module(optimizer=MOMENTUM)
    kept = loop(optimizer_state="keep", participants=[[0, 1], [1], [0, 1]])
    fit(trainer(tmp_path, kept), module, Data(shuffle=False))
    data, net = blobs(), network()
    optimizers = {client: MOMENTUM(net.parameters()) for client in (0, 1)}
    for number, ids in enumerate([[0, 1], [1], [0, 1]]):
        start = weights(net)
        sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in start.items()}
        for client in ids:
            net.load_state_dict(start)
            for inputs, targets in batches(data, client, number, shuffle=False):
                optimizers[client].zero_grad()
                nn.functional.cross_entropy(net(inputs), targets).backward()
                optimizers[client].step()
            for name, value in net.state_dict().items():
                sums[name] += SIZES[client] * value.double()
        total = sum(SIZES[client] for client in ids)
        net.load_state_dict({name: (value / total).float() for name, value in sums.items()})
    assert_same(weights(module.net), weights(net))


def test_stepwise_schedulers_run_within_each_client(tmp_path):
    seen: list[tuple[int, float]] = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append((trainer.current_epoch, trainer.optimizers[0].param_groups[0]["lr"]))

    halving = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    module = Module(scheduler=halving, interval="step")
    fit(trainer(tmp_path, loop(participants=[[0, 2], [0]]), Watch(), max_epochs=2), module, Data())
    assert [rate for number, rate in seen if number == 0] == [0.1, 0.1, 0.05, 0.025]
    assert [rate for number, rate in seen if number == 1] == [pytest.approx(0.1 / 8)]


@pytest.mark.slow
def test_every_source_of_the_loader_gives_the_same_run(tmp_path):
    class WithLoader(Module):
        def train_dataloader(self) -> DataLoader:
            return Data().train_dataloader()

    results = []
    for module, data in ((Module(), Data()), (WithLoader(), None), (Module(), Data().train_dataloader())):
        fit(trainer(tmp_path, loop()), module, *([] if data is None else [data]))
        results.append(weights(module.net))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def test_clients_that_all_hold_less_than_a_batch_are_refused(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"drop_last=True.*batch_size=43.*holds"):
        fit(trainer(tmp_path, loop()), Module(), Data(batch_size=43, drop_last=True))


@pytest.mark.slow
def test_batch_size_collate_workers_and_drop_last_are_the_users(tmp_path):
    seen = []

    class Watching(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append((len(batch["targets"]), batch["marked"]))
            return super().training_step((batch["inputs"], batch["targets"]), batch_idx)

    def collate(items: list[Any]) -> dict[str, Any]:
        inputs, targets = zip(*items, strict=True)
        return {"inputs": torch.stack(inputs), "targets": torch.stack(targets), "marked": True}

    ends = []
    for workers in (0, 2):
        module = Watching()
        data = Data(batch_size=7, drop_last=True, collate_fn=collate, num_workers=workers)
        fit(trainer(tmp_path, loop(participants=[[1, 2]]), max_epochs=1), module, data)
        ends.append(weights(module))
    assert seen == [(7, True)] * (42 // 7 + 22 // 7) * 2
    assert_same(*ends)


class Noisy(TensorDataset):
    """Adds noise from torch's global generator to each sample, as augmentations do."""

    def __getitem__(self, index: int) -> Any:
        inputs, targets = super().__getitem__(index)
        return inputs + torch.randn(inputs.shape), targets


@pytest.mark.slow
def test_randomness_depends_on_round_client_and_step_alone(tmp_path):
    data = Noisy(*blobs().tensors)
    ends = []
    for workers, disturbance in ((0, 0), (2, 5), (0, 9)):
        torch.manual_seed(disturbance)
        module = Module(network(dropout=0.5))
        torch.manual_seed(disturbance)
        before = torch.get_rng_state()
        fit(trainer(tmp_path, loop(), max_epochs=2, limit_val_batches=0), module, Data(data, num_workers=workers))
        assert torch.equal(before, torch.get_rng_state())
        ends.append(weights(module.net))
    assert_same(ends[0], ends[1])
    assert_same(ends[0], ends[2])


def test_the_global_generator_is_given_back_between_clients(tmp_path):
    seen = []

    class Watch(pl.Callback):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            seen.append(torch.equal(before, torch.get_rng_state()))

    module = Module(network(dropout=0.5))
    before = torch.get_rng_state()
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    fit(trainer(tmp_path, loop(), Watch(), saving, max_epochs=1, limit_val_batches=0), module, Data())
    assert seen == [True] * len(PARTICIPANTS[0])


def test_what_others_change_between_rounds_is_what_the_next_round_starts_from(tmp_path):
    class Zero(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            with torch.no_grad():
                pl_module.net[0].weight.zero_()

    class Watch(FedAvg):
        def broadcast(self, server, client):
            message = super().broadcast(server, client)
            sent.append((server.round, message.tensors["net.0.weight"].abs().sum().item()))
            return message

    sent: list[tuple[int, float]] = []
    watched = FederatedLoop(Watch(), clients=2, summary=False)
    fit(trainer(tmp_path, watched, Zero(), max_epochs=2), Module(), Data())
    assert all((total == 0) is (number == 1) for number, total in sent)
    assert len(sent) == 4


@pytest.mark.slow
def test_client_sampling(tmp_path):
    drawn: dict[int, list[tuple[int, ...]]] = {}

    class Watch(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            drawn.setdefault(seed, []).append(trainer.callbacks[0].plan.clients)

    for seed in (0, 1):
        sampling = FederatedLoop(FedAvg(), clients=10, clients_per_round=0.3, seed=seed, summary=False)
        fit(trainer(tmp_path, sampling, Watch(), max_epochs=6), Module(), Data())
    assert all(len(ids) == 3 and list(ids) == sorted(ids) for ids in drawn[0] + drawn[1])
    assert len(set(drawn[0])) > 1
    assert drawn[0] != drawn[1]


@pytest.mark.slow
def test_sampling_weights_and_availability(tmp_path):
    sampling = FederatedLoop(
        FedAvg(),
        clients=6,
        clients_per_round=2,
        sampling_weights=[1, 1, 1, 1, 1, 0],
        availability=lambda client, number: client % 2 == number % 2,
        summary=False,
    )
    drawn = []

    class Watch(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            drawn.append(sampling.plan.clients)

    fit(trainer(tmp_path, sampling, Watch(), max_epochs=6), Module(), Data())
    assert all(client % 2 == number % 2 and client != 5 for number, ids in enumerate(drawn) for client in ids)
    assert all(len(ids) == 2 for ids in drawn)


@pytest.mark.slow
def test_failed_clients_receive_and_never_answer(tmp_path):
    failing = FederatedLoop(FedAvg(), clients=8, client_dropout=0.5, summary=False)
    counts = []

    class Watch(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            plan, ledger = failing.plan, failing.ledger
            counts.append(len(plan.failed))
            assert len(plan.clients) + len(plan.failed) == 8
            assert ledger.round_down == 8 * ledger.dense_bytes
            assert ledger.round_up == len(plan.clients) * ledger.dense_bytes

    fit(trainer(tmp_path, failing, Watch(), max_epochs=8), Module(), Data())
    assert 8 < sum(counts) < 56
    hopeless = FederatedLoop(FedAvg(), clients=3, client_dropout=0.999999, summary=False)
    fit(trainer(tmp_path, hopeless, max_epochs=2), Module(), Data())
    assert len(hopeless.plan.clients) == 1


def test_buffers_stay_with_their_client(tmp_path):
    local = loop(buffers="local", participants=[[0, 1], [0, 1]])
    module = Module(network(norm=nn.BatchNorm1d))
    fit(trainer(tmp_path, local, max_epochs=2), module, Data())
    kept = [local.coordinator.states[client]["buffers"]["net.1.running_mean"] for client in (0, 1)]
    assert not torch.equal(*kept)
    assert torch.equal(module.net[1].running_mean, torch.zeros(16))
    assert local.coordinator.states[1]["buffers"]["net.1.num_batches_tracked"] == 2 * 6


def test_buffers_reset_each_round(tmp_path):
    module = Module(network(norm=nn.BatchNorm1d))
    fit(trainer(tmp_path, loop(buffers="reset", participants=[[1], [1]]), max_epochs=2), module, Data())
    assert module.net[1].num_batches_tracked == 6


def test_empty_and_single_sample_clients(tmp_path):
    partition = FromIndices([[], list(range(40)), [77], []])
    few = FederatedLoop(FedAvg(), partition=partition, summary=False)
    module = Module(network(norm=partial(nn.GroupNorm, 4)))
    before = weights(module)
    fit(trainer(tmp_path, few), module, Data())
    assert few.plan.clients == (1, 2)
    assert not torch.equal(before["net.0.weight"], module.net[0].weight)


def test_bytes_are_those_of_the_encoding(tmp_path):
    import safetensors.torch

    module = Module(network(norm=nn.BatchNorm1d))
    counted = loop(participants=[[0, 1, 3], [2]])
    fitted = trainer(tmp_path, counted, max_epochs=2)
    fit(fitted, module, Data())
    size = len(safetensors.torch.save(module.state_dict()))
    assert counted.ledger.round_up == counted.ledger.round_down == size
    assert counted.ledger.total_up == counted.ledger.total_down == 4 * size
    assert fitted.callback_metrics["comm/total_bytes"] == 8 * size
    assert fitted.callback_metrics["comm/ratio"] == 1
    assert fitted.callback_metrics["federated/client_steps"] == 1 + 6 + 5 + 3


def test_says_what_the_rounds_came_to(tmp_path, capsys):
    told = loop(summary=True)
    fit(trainer(tmp_path, told), Module(), Data())
    printed = capsys.readouterr().out
    printed = " ".join(printed.split())
    assert "4 clients, 103 of 103 samples" in printed
    last = printed.split("after 3 rounds: ")[1]
    moved = f"{6 * told.ledger.dense_bytes / 1e3:.2f} kB"
    assert last.startswith("val_loss 0.")
    assert last.endswith(f"{moved} up, {moved} down, 100.00% of dense FedAvg")


def test_what_the_rounds_came_to_names_few_of_many_figures(tmp_path, capsys):
    class Validated(Module):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("val_loss", self.loss(batch))

    loaders = [DataLoader(blobs(8), batch_size=8) for _ in range(30)]
    run = trainer(tmp_path, loop(summary=True), max_epochs=1)
    fit(run, Validated(), DataLoader(blobs(), batch_size=8), loaders)
    printed = " ".join(capsys.readouterr().out.split()).split("after 1 round: ")[1]
    assert printed.count("val_loss") == 5
    assert " and 25 more, " in printed
    assert printed.endswith("100.00% of dense FedAvg")


def test_frozen_parameters_stay_and_are_not_sent(tmp_path):
    module = Module()
    module.net[0].requires_grad_(False)
    before = weights(module.net[0])
    fit(trainer(tmp_path, loop()), module, Data())
    assert_same(before, weights(module.net[0]))


@pytest.mark.slow
def test_a_second_fit_goes_on(tmp_path):
    twice, once = Module(optimizer=MOMENTUM), Module(optimizer=MOMENTUM)
    fitted = trainer(tmp_path, loop(optimizer_state="keep"), max_epochs=1)
    fit(fitted, twice, Data())
    fitted.fit_loop.max_epochs = 3
    fit(fitted, twice, Data())
    fit(trainer(tmp_path, loop(optimizer_state="keep")), once, Data())
    assert_same(weights(twice), weights(once))


class Fails(Module):
    """Fails in a hook of one epoch, until it is mended."""

    def __init__(self, hook, epoch):
        super().__init__(optimizer=MOMENTUM)
        self.fails = (hook, epoch)

    def fail(self, hook):
        if self.fails == (hook, self.current_epoch):
            raise LookupError("no luck")

    def training_step(self, batch, batch_idx):
        self.fail("training_step" if batch_idx else "")
        return super().training_step(batch, batch_idx)

    def on_validation_end(self):
        self.fail("on_validation_end")

    def on_train_epoch_end(self):
        self.fail("on_train_epoch_end")


def failed(tmp_path, module, **arguments):
    """A trainer whose fit of a module has failed; the module is mended."""
    arguments = {"max_epochs": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0, **arguments}
    fitted = trainer(tmp_path, loop(optimizer_state="keep", on_client_error="raise"), **arguments)
    with pytest.raises(LookupError):
        fit(fitted, module, Data())
    module.fails = ()
    return fitted


@pytest.mark.parametrize("hook", ["on_validation_end", "on_train_epoch_end"])
def test_a_fit_that_failed_after_the_first_round_goes_on(tmp_path, hook):
    module, whole = Fails(hook, 0), Module(optimizer=MOMENTUM)
    fitted = failed(tmp_path, module)
    fit(fitted, module, Data())
    once = trainer(tmp_path, loop(optimizer_state="keep"), max_epochs=2, limit_val_batches=0)
    fit(once, whole, Data())
    assert_same(weights(module), weights(whole))
    for name in ("comm/total_bytes", "federated/client_steps"):
        assert fitted.callback_metrics[name] == once.callback_metrics[name]


def test_a_fit_that_failed_inside_a_round_does_not_go_on(tmp_path):
    module = Fails("training_step", 1)
    fitted = failed(tmp_path, module, limit_val_batches=0)
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=r"round 1.*ckpt_path"):
        fit(fitted, module, Data())
    assert_same(weights(module), before)


def test_a_fit_that_failed_inside_the_first_round_begins_anew(tmp_path):
    module, whole = Fails("training_step", 0), Module(optimizer=MOMENTUM)
    fit(failed(tmp_path, module, limit_val_batches=0, max_epochs=1), module, Data())
    fit(trainer(tmp_path, loop(optimizer_state="keep"), max_epochs=1, limit_val_batches=0), whole, Data())
    assert_same(weights(module), weights(whole))


def test_a_trainer_resumes_from_a_checkpoint_of_its_own_fit(tmp_path):
    module, every = Module(optimizer=MOMENTUM), ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    fitted = trainer(tmp_path, loop(optimizer_state="keep"), every, limit_val_batches=0)
    whole = weights(fit(fitted, module, Data()))
    fit(fitted, module, Data(), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert_same(weights(module), whole)


class CountsRounds(FedAvg):
    """Keeps a number of rounds that `setup` begins with 0."""

    def __init__(self):
        self.called = 0

    def setup(self, base):
        self.called += 1
        self.seen = base.optimizers
        base.state["rounds"] = 0

    def aggregate(self, server):
        super().aggregate(server)
        server.base.state["rounds"] += 1


class Decaying(Module):
    def configure_optimizers(self):
        steps = self.trainer.estimated_stepping_batches
        self.make_scheduler = partial(torch.optim.lr_scheduler.LinearLR, total_iters=steps)
        return super().configure_optimizers()


def test_a_method_is_set_up_with_each_set_of_optimizers(tmp_path):
    def loop_of_rounds():
        # Its schedules are made again, for clients together make fewer steps.
        return FederatedLoop(CountsRounds(), clients=4, execution="vectorized", summary=False)

    federated, every = loop_of_rounds(), ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    fitted = trainer(tmp_path, federated, every, max_epochs=-1, max_steps=8)
    module, method = fit(fitted, Decaying(interval="step"), Data()), federated.algorithm
    assert method.called == 2
    assert method.seen is fitted.optimizers
    fitted.fit_loop.epoch_loop.max_steps = 16
    fit(fitted, module, Data())
    assert method.called == 3
    assert method.seen is fitted.optimizers
    assert federated.server.base.state["rounds"] == fitted.current_epoch
    resumed = loop_of_rounds()
    again = trainer(tmp_path, resumed, max_epochs=-1, max_steps=16)
    fit(again, Decaying(interval="step"), Data(), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert resumed.server.base.state["rounds"] == again.current_epoch > 1


def test_a_second_fit_of_other_data_is_noticed(tmp_path):
    module, fitted = Module(), trainer(tmp_path, FederatedLoop(FedAvg(), clients=3, summary=False), max_epochs=1)
    fit(fitted, module, Data())
    fitted.fit_loop.max_epochs = 2
    with pytest.raises(MisconfigurationException, match="103 samples"):
        fit(fitted, module, Data(blobs(50)))


@pytest.mark.slow
def test_the_loader_is_renewed_when_the_user_asks_for_it(tmp_path):
    class Counting(Data):
        made = 0

        def train_dataloader(self) -> DataLoader:
            self.made += 1
            return super().train_dataloader()

    for every, made in ((0, 1), (2, 2)):
        data = Counting()
        run = trainer(tmp_path, loop(), reload_dataloaders_every_n_epochs=every)
        fit(run, Module(), data)
        assert data.made == made
        assert run.reload_dataloaders_every_n_epochs == every


class OfLists(Dataset):
    """Samples that are read by lists of indices, several at a time."""

    def __init__(self):
        self.inputs, self.targets = blobs().tensors
        self.reads = []

    def __len__(self):
        return 103

    def __getitem__(self, indices):
        self.reads.append(len(indices))
        return [self.inputs[indices], self.targets[indices]]


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_batch_samplers_are_divided_as_batch_sizes_are(tmp_path, execution):
    ends, lists = [], OfLists()
    batches = BatchSampler(RandomSampler(lists), 8, drop_last=False)
    for given in (
        DataLoader(blobs(), batch_size=8, shuffle=True),
        DataLoader(blobs(), batch_sampler=batches),
        DataLoader(lists, batch_size=None, sampler=batches),
    ):
        loop = FederatedLoop(FedAvg(), clients=5, partition=Dirichlet(1.0), execution=execution, summary=False)
        module = Module()
        fit(trainer(tmp_path, loop, max_epochs=2, limit_val_batches=0), module, given)
        ends.append(weights(module))
    assert max(lists.reads) == 8
    for end in ends[1:]:
        for name, value in ends[0].items():
            assert torch.equal(value, end[name])


def by_weight(*weights):
    return DataLoader(blobs(), batch_size=8, sampler=WeightedRandomSampler(weights, 103))


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_clients_draw_by_weights(tmp_path, execution):
    """Where only one sample of each client has a weight, clients train on it alone, as often as they hold samples."""
    ones = [0.0] * 103
    for part in UNEVEN:
        ones[part[0]] = 0.5
    repeated = [[part[0]] * len(part) for part in UNEVEN]
    samples = TensorDataset(*(tensor[[each for part in repeated for each in part]] for tensor in blobs().tensors))
    ends = []
    for given in (by_weight(*ones), DataLoader(samples, batch_size=8)):
        settings = {"partition": FromIndices(UNEVEN), "execution": execution, "summary": False}
        module = Module()
        fit(trainer(tmp_path, FederatedLoop(FedAvg(), **settings), max_epochs=2), module, given)
        ends.append(weights(module))
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], rtol=1e-5, atol=1e-6)


def test_held_out_samples_of_a_weighted_loader_are_all_judged(tmp_path):
    loop = FederatedLoop(FedAvg(), partition=FromIndices(UNEVEN), personal_test=0.2, summary=False)
    run = trainer(tmp_path, loop, max_epochs=1)
    fit(run, Module(), by_weight(*[1.0] * 103), DataLoader(blobs(40), batch_size=40))
    assert "personal/val_acc" in run.callback_metrics


def test_clients_whose_weights_are_zero_are_named(tmp_path):
    zeros = [0.0 if 5 <= sample < 69 else 1.0 for sample in range(103)]
    with pytest.raises(MisconfigurationException, match=r"weight.*0.*2"):
        fit(trainer(tmp_path, FederatedLoop(FedAvg(), partition=FromIndices(UNEVEN))), Module(), by_weight(*zeros))


class Stream(IterableDataset):
    def __iter__(self):
        yield from blobs()


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: DataLoader(Stream(), batch_size=4), "IterableDataset"),
        (lambda: [DataLoader(blobs()), DataLoader(blobs())], "list"),
        (lambda: DataLoader(blobs(), batch_size=None), "batch_size=None"),
        (lambda: DataLoader(blobs(), sampler=SubsetRandomSampler(range(9))), "SubsetRandomSampler"),
        (lambda: DataLoader({"train": blobs(), "test": blobs()}), r"dict.*'train', 'test'.*dataset\['train'\]"),
    ],
)
def test_refuses_loaders_that_cannot_be_divided(tmp_path, loader, message):
    with pytest.raises(MisconfigurationException, match=message):
        fit(trainer(tmp_path, FederatedLoop(FedAvg(), clients=2)), Module(), loader())


def test_refuses_no_loader(tmp_path):
    with pytest.raises(MisconfigurationException, match="train_dataloader"):
        fit(trainer(tmp_path, FederatedLoop(FedAvg(), clients=2)), Module())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients": 0}, "clients"),
        ({"clients": 4, "clients_per_round": 5}, "clients_per_round=5"),
        ({"clients": 4, "clients_per_round": 1.5}, "clients_per_round"),
        ({"clients": 4, "clients_per_round": 0}, "clients_per_round"),
        ({"clients": 4, "local_epochs": 0}, "local_epochs"),
        ({"clients": 4, "local_epochs": 2, "local_steps": 3}, "local_steps=3"),
        ({"clients": 4, "seed": "first"}, "seed must be .*'first'"),
        ({"clients": 4, "weighting": "size"}, "weighting"),
        ({"clients": 4, "buffers": "keep"}, "buffers"),
        ({"clients": 4, "optimizer_state": "average"}, "optimizer_state"),
        ({"clients": 4, "client_dropout": 1.0}, "client_dropout"),
        ({"clients": 4, "participants": [[0, 0]]}, "twice"),
        ({"clients": 4, "participants": [[0]], "clients_per_round": 1}, "clients_per_round"),
        ({"clients": 4, "partition": "iid"}, r"partition.*'iid'.*IID\(\)"),
        ({"clients": 4, "partition": "user"}, r"partition.*'user'.*ByKey\('user'\)"),
        ({"partition": "parts.csv"}, r"partition.*FromIndices\('parts.csv'\).*ByKey\(column, file='parts.csv'\)"),
        ({"partition": {"a": [0, 1], "b": [2]}}, r"partition.*\{'a': \[0, 1\], 'b': \[2\]\}.*FromIndices"),
        ({"partition": np.zeros(3, int)}, r"partition.*FromIndices"),
        ({"partition": len}, r"partition.*ByKey\(function\)"),
        ({"partition": Dirichlet}, r"partition.*Dirichlet\(\.\.\.\), an object"),
        ({"clients": 4, "algorithm": "FedAvg"}, r"algorithm.*'FedAvg'"),
        ({"clients": 4, "sampling_weights": torch.tensor([1.0, -1.0])}, r"sampling_weights.*\[1\.0, -1\.0\]"),
        ({"clients": 4, "sampling_weights": np.ones((2, 2))}, "sampling_weights"),
        ({"clients": 4, "sampling_weights": lambda client: 1}, "sampling_weights"),
        ({"clients": 4, "availability": np.full(4, 90.0)}, r"\[0, 1\].*\[90\.0, 90\.0, 90\.0, 90\.0\]"),
        ({"clients": 4, "availability": {0: 1.5}}, r"availability.*1\.5"),
        ({"clients": 4, "availability": 0.5}, "availability must be a list with a number"),
    ],
)
def test_refuses_arguments(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        FederatedLoop(**{"algorithm": FedAvg(), **arguments})


@pytest.mark.parametrize("name", ["sampling_weights", "availability"])
def test_arrays_and_tensors_are_lists(name):
    for values in (np.array([0.5, 1, 0]), torch.tensor([0.5, 1, 0])):
        loop = FederatedLoop(FedAvg(), clients=4, **{name: values})
        assert getattr(loop, name) == [0.5, 1, 0]
        assert f"{name}=[0.5, 1.0, 0.0]" in repr(loop)
        with pytest.raises(MisconfigurationException, match=f"{name} has 3 entries for 4 clients"):
            loop.cohort_size(4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients": 104}, "104"),
        ({"clients": 4, "participants": [[4]]}, "participants"),
        ({"clients": 4, "participants": [[0]]}, "round 1"),
        ({"clients": 4, "sampling_weights": [1.0]}, "sampling_weights"),
        ({"clients": 4, "weighting": lambda client: -1.0}, "weighting gave -1.0"),
        ({"clients": 4, "availability": lambda client, number: False}, "available"),
    ],
)
def test_refuses_what_does_not_fit_the_data(tmp_path, arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        fit(trainer(tmp_path, FederatedLoop(FedAvg(), **arguments)), Module(), Data())


def test_refuses_a_parameter_in_no_optimizer(tmp_path):
    class Forgetful(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net[0].parameters(), lr=0.1)

    with pytest.raises(MisconfigurationException, match=r"net\.2\.weight"):
        fit(trainer(tmp_path, FederatedLoop(FedAvg(), clients=2)), Forgetful(), Data())


@pytest.mark.parametrize("kept", ["keep", "reset"])
def test_a_client_takes_its_moments_up_in_the_subspaces_they_were_left_in(tmp_path, kept):
    """The projected optimizer's counters go on over all clients, so another client's subspaces are newer ones."""
    seen = []

    class Recording(Module):
        def subspaces(self):
            return self.trainer.optimizers[0].param_groups[0]["subspaces"]

        def on_train_batch_start(self, batch, batch_idx):
            self.start = self.start if batch_idx else self.subspaces()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 4:
                seen.append((self.start, self.subspaces()))

    module = Recording(
        optimizer=lambda p: ProjectedSGD(p, lr=0.05, momentum=0.9, rank=3, refresh_interval=3, subspace="random")
    )
    rounds = FederatedLoop(
        FedAvg(),
        partition=FromIndices([list(range(40)), list(range(40, 80)), list(range(80, 103))]),
        participants=[[0], [1], [0]],
        optimizer_state=kept,
        summary=False,
    )
    fit(trainer(tmp_path, rounds, max_epochs=3), module, Data())
    (first, left), (second, other), (again, _) = seen
    assert set(first) == set(second) == {None}
    assert any(left)
    assert left != other
    assert again == (left if kept == "keep" else first)
