import types
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from lightning_lowrank import FedAvg, FederatedLoop, FromIndices, HeteroFL, LocalTraining, StaticBatchNorm
from tests.helpers import Data, Module, blobs, fit, network, trainer, weights

CLIENTS = [list(range(40)), list(range(40, 64)), list(range(64, 102))]


class Callable(Module):
    """Has a forward, which is what the statistics are recomputed with."""

    def __init__(self, **arguments):
        super().__init__(network(norm=nn.BatchNorm1d), **arguments)

    def forward(self, inputs):
        return self.net(inputs)


class Several(Callable):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch[0], batch_idx)


class Watch(pl.Callback):
    """Keeps the statistics at each validation, and whether layers track while they train."""

    def __init__(self):
        self.validated, self.tracked, self.trained = [], [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.tracked.append((trainer.current_epoch, pl_module.net[1].track_running_stats))
        self.trained.append(pl_module.net[1].running_mean.clone())

    def on_validation_epoch_start(self, trainer, pl_module):
        assert not pl_module.training
        assert not any(part.training for part in pl_module.modules())
        if not trainer.sanity_checking:
            norm = pl_module.net[1]
            self.validated.append((weights(pl_module.net), norm.running_mean.clone(), norm.running_var.clone()))


def statistics(state, batches):
    """Mean over batches of the batch's mean and unbiased variance of what the first layer puts out."""
    weight, bias = state["0.weight"].cpu(), state["0.bias"].cpu()
    outputs = [nn.functional.linear(batch, weight, bias) for batch in batches]
    return sum(o.mean(0) for o in outputs) / len(outputs), sum(o.var(0) for o in outputs) / len(outputs)


def check(watched, batches):
    for state, mean, variance in watched:
        expected_mean, expected_variance = statistics(state, batches)
        torch.testing.assert_close(mean, expected_mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(variance, expected_variance, rtol=1e-4, atol=1e-5)


def test_statistics_are_those_of_the_weights_at_each_validation(tmp_path):
    """One batch holds the training set, so that its order does not matter."""
    inputs, targets = blobs(96).tensors
    watch, module = Watch(), Callable()
    data = Data(TensorDataset(inputs, targets), batch_size=96)
    fit(trainer(tmp_path, StaticBatchNorm(), watch, max_epochs=3), module, data)
    assert len(watch.validated) == 3
    check(watch.validated, [inputs])
    assert not any(tracked for _, tracked in watch.tracked)
    assert module.net[1].track_running_stats
    assert module.net[1].momentum == 0.1
    assert module.net[1].num_batches_tracked == 1


@pytest.mark.slow
def test_training_does_not_see_it(tmp_path):
    ends = []
    for callbacks in ([], [StaticBatchNorm()]):
        module = Callable()
        torch.manual_seed(0)
        fit(trainer(tmp_path, *callbacks), module, Data())
        ends.append((weights(module), torch.rand(3)))
    assert torch.equal(ends[0][1], ends[1][1])
    statistic = ("net.1.running_mean", "net.1.running_var", "net.1.num_batches_tracked")
    for name, value in ends[0][0].items():
        assert torch.equal(value, ends[1][0][name]) is (name not in statistic)


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_rounds_validate_the_global_model_with_its_own_statistics(tmp_path, execution):
    inputs, targets = blobs(102).tensors
    watch, module = Watch(), Callable()
    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), buffers="local", summary=False, execution=execution)
    data = Data(TensorDataset(inputs, targets), batch_size=102, drop_last=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(tmp_path, loop, StaticBatchNorm(), watch, max_epochs=3).fit(module, data)
    assert not [warning for warning in caught if "buffers='local'" in str(warning.message)]
    assert len(watch.validated) == 3
    check(watch.validated, [inputs])
    check([(weights(module.net), module.net[1].running_mean, module.net[1].running_var)], [inputs])
    plain = Callable()
    averaging = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), buffers="local", summary=False)
    fit(trainer(tmp_path, averaging, max_epochs=3), plain, data)
    torch.testing.assert_close(weights(module)["net.0.weight"], weights(plain)["net.0.weight"], rtol=1e-5, atol=1e-6)
    assert loop.ledger.total_up == averaging.ledger.total_up
    assert not torch.allclose(weights(module)["net.1.running_mean"], weights(plain)["net.1.running_mean"])


def test_statistics_that_travel_are_not_changed_by_clients(tmp_path):
    inputs, targets = blobs(102).tensors
    watch, module = Watch(), Callable()
    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), summary=False)
    data = Data(TensorDataset(inputs, targets), batch_size=102)
    fit(trainer(tmp_path, loop, StaticBatchNorm(), watch, max_epochs=3), module, data)
    check(watch.validated, [inputs])
    # Three clients, a step each: what they are sent in a round are the statistics of the last validation.
    for number in (1, 2):
        for seen in watch.trained[3 * number : 3 * number + 2]:
            assert torch.equal(seen, watch.validated[number - 1][1])


@pytest.mark.slow
def test_it_begins_with_a_round(tmp_path):
    inputs, targets = blobs(96).tensors
    watch, module = Watch(), Callable()
    loop = FederatedLoop(FedAvg(), clients=2, summary=False)
    data = Data(TensorDataset(inputs, targets), batch_size=96)
    fit(trainer(tmp_path, loop, StaticBatchNorm(from_round=2), watch, max_epochs=4), module, data)
    assert watch.tracked == [(epoch, epoch < 2) for epoch in range(4) for _ in range(2)]
    check(watch.validated[2:], [inputs])
    for early in watch.validated[:2]:
        with pytest.raises(AssertionError):
            check([early], [inputs])
    module = Callable()
    fit(trainer(tmp_path, StaticBatchNorm(from_round=4), watch, max_epochs=4), module, data)
    assert module.net[1].num_batches_tracked == 4


@pytest.mark.slow
def test_batches_are_in_one_random_order_and_may_be_limited(tmp_path):
    inputs, targets = blobs(97).tensors
    order = torch.argsort(targets, stable=True)
    data = Data(TensorDataset(inputs[order], targets[order]), batch_size=16, shuffle=False)
    ends = []
    for batches in (None, 1, 2):
        watch, module = Watch(), Callable()
        fit(trainer(tmp_path, StaticBatchNorm(batches), watch, max_epochs=1, limit_train_batches=3), module, data)
        ends.append(module.net[1])
        # The last sample alone would have no variance.
        assert module.net[1].num_batches_tracked == (batches or 6)
    assert not torch.allclose(ends[0].running_mean, ends[1].running_mean)
    state = weights(module.net)
    sorted_mean, _ = statistics(state, [inputs[order][:16]])
    assert not torch.allclose(ends[1].running_mean, sorted_mean, atol=1e-2)
    whole, _ = statistics(state, [inputs])
    torch.testing.assert_close(ends[0].running_mean, whole, rtol=0.1, atol=0.1)
    again = Callable()
    limits = {"limit_val_batches": 0, "limit_train_batches": 3}
    fit(trainer(tmp_path, StaticBatchNorm(), max_epochs=1, **limits), again, data)
    assert torch.equal(again.net[1].running_mean, ends[0].running_mean)


def test_loaders_of_any_source(tmp_path):
    inputs, targets = blobs(96).tensors
    expected = None
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=96)
    batched = DataLoader(TensorDataset(inputs, targets), batch_sampler=[list(range(96))])

    class Own(Callable):
        def train_dataloader(self):
            return loader

    for module, data in ((Callable(), [loader]), (Callable(), [batched]), (Own(), [])):
        fit(trainer(tmp_path, StaticBatchNorm(), max_epochs=2, limit_val_batches=0), module, *data)
        expected = module.net[1].running_var if expected is None else expected
        torch.testing.assert_close(module.net[1].running_var, expected)
        check([(weights(module.net), module.net[1].running_mean, module.net[1].running_var)], [inputs])


def test_rounds_read_a_loader_that_was_passed_to_fit(tmp_path):
    inputs, targets = blobs(102).tensors
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=102, shuffle=True)
    module = Callable()
    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), buffers="local", summary=False)
    fit(trainer(tmp_path, loop, StaticBatchNorm(), max_epochs=2, limit_val_batches=0), module, loader)
    check([(weights(module.net), module.net[1].running_mean, module.net[1].running_var)], [inputs])


class Judged(Callable):
    """Keeps what its weights and statistics are each time that it is evaluated."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        # Evaluations of clients put lists of the module back as they were.
        self.kept = types.SimpleNamespace(seen=[])

    @property
    def seen(self):
        return [each for each in self.kept.seen if each[1].any()]

    def on_validation_epoch_start(self):
        self.kept.seen.append((weights(self.net), self.net[1].running_mean.clone(), self.net[1].running_var.clone()))

    on_test_epoch_start = on_validation_epoch_start


@pytest.mark.slow
@pytest.mark.parametrize("batches", [None, 1])
def test_every_size_has_statistics_of_its_own(tmp_path, batches):
    inputs, targets = blobs(102).tensors
    module = Judged()
    algorithm = HeteroFL([1.0, 0.5, 0.25])
    loop = FederatedLoop(algorithm, partition=FromIndices(CLIENTS), buffers="local", summary=False)
    data = Data(TensorDataset(inputs, targets), batch_size=102)
    run = trainer(tmp_path, loop, StaticBatchNorm(batches), max_epochs=2)
    run.fit(module, data)
    run.test(module, data, verbose=False)
    # The whole network, then the two smaller ones: in two rounds, and the test.
    seen = module.seen
    assert len(seen) == 3 * 3
    check(seen, [inputs])
    for whole, half, quarter in zip(seen[::3], seen[1::3], seen[2::3], strict=True):
        assert not torch.allclose(whole[1], half[1])
        assert not torch.allclose(half[1], quarter[1])
    assert torch.equal(module.net[1].running_mean.cpu(), seen[-3][1].cpu())


@pytest.mark.slow
def test_clients_models_have_statistics_of_their_own_samples(tmp_path):
    inputs, targets = blobs(102).tensors
    data = Data(TensorDataset(inputs, targets), batch_size=102)
    shared = {
        "partition": FromIndices(CLIENTS),
        "buffers": "local",
        "summary": False,
        "personal_test": "matched_labels",
    }
    module = Judged()
    fit(trainer(tmp_path, FederatedLoop(LocalTraining(), **shared), StaticBatchNorm(), max_epochs=1), module, data)
    *_, first, second, third = module.seen
    for each, samples in zip((first, second, third), CLIENTS, strict=True):
        check([each], [inputs[samples]])
    # Clients that use the global model itself have its statistics.
    module = Judged()
    fit(trainer(tmp_path, FederatedLoop(FedAvg(), **shared), StaticBatchNorm(), max_epochs=1), module, data)
    assert len(module.seen) == 4
    check(module.seen, [inputs])


def test_a_client_of_one_sample_has_the_global_statistics(tmp_path):
    inputs, targets = blobs(102).tensors
    data = Data(TensorDataset(inputs, targets), batch_size=102)
    loop = FederatedLoop(
        HeteroFL([1.0, 0.5]),
        partition=FromIndices([list(range(101)), [101]]),
        participants=[[0]],
        personal_test="matched_labels",
    )
    module = Judged()
    fit(trainer(tmp_path, loop, StaticBatchNorm(), max_epochs=1), module, data)
    whole, _, one, half = module.seen
    assert torch.equal(one[0]["0.weight"], half[0]["0.weight"])
    assert torch.equal(one[1], whole[1])
    assert not torch.equal(half[1], whole[1])


def test_a_pass_over_a_clients_samples_is_shorter_than_its_training(tmp_path):
    class Counted(Callable):
        passes = types.SimpleNamespace(batches=[])

        def on_validation_epoch_start(self):
            self.passes.batches.append(int(self.net[1].num_batches_tracked))

    loop = FederatedLoop(LocalTraining(), clients=2, local_steps=2, buffers="local", personal_test="matched_labels")
    module = Counted()
    fit(trainer(tmp_path, loop, StaticBatchNorm(), max_epochs=1), module, Data(blobs(104), batch_size=8))
    assert module.passes.batches[-3:] == [4, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "models"), [(FedAvg(), 1), (HeteroFL([1.0, 0.5, 0.25]), 3)])
def test_passes_are_shorter_than_the_round(tmp_path, algorithm, models):
    module = Callable()
    loop = FederatedLoop(algorithm, clients=4, clients_per_round=3, local_steps=2, buffers="local", summary=False)
    fit(trainer(tmp_path, loop, StaticBatchNorm(), max_epochs=2), module, Data(blobs(104), batch_size=8))
    assert module.net[1].num_batches_tracked == 3 * 2 // models


@pytest.mark.parametrize(
    ("buffers", "said"),
    [("average", "averaged over clients"), ("local", "stay with their clients"), ("reset", "start again")],
)
def test_the_advice_says_what_becomes_of_the_statistics(tmp_path, buffers, said):
    loop = FederatedLoop(HeteroFL([1.0, 0.5]), clients=2, buffers=buffers, summary=False)
    with pytest.warns(UserWarning, match=f"static BatchNorm, and the module has 1 BatchNorm.*{said}"):
        trainer(tmp_path, loop, max_epochs=1).fit(Callable(), Data())


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [HeteroFL([1.0, 0.5]), FedAvg()])
def test_methods_whose_paper_has_it_ask_for_it(tmp_path, algorithm):
    said = []
    for further in ([], [StaticBatchNorm()], [StaticBatchNorm(from_round=1)]):
        loop = FederatedLoop(algorithm, clients=2, summary=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer(tmp_path, loop, *further, max_epochs=1).fit(Callable(), Data())
        said.append(any("static BatchNorm" in str(warning.message) for warning in caught))
    assert said == [isinstance(algorithm, HeteroFL), False, False]


def test_samples_that_are_held_out_or_given_to_no_client_have_no_part(tmp_path):
    inputs, targets = blobs(110).tensors
    data = Data(TensorDataset(inputs, targets), batch_size=110)
    module = Callable()
    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), summary=False, personal_test=0.25)
    fit(trainer(tmp_path, loop, StaticBatchNorm(), max_epochs=1), module, data)
    trained = torch.cat(list(loop.indices))
    assert len(trained) == 76
    check([(weights(module.net), module.net[1].running_mean, module.net[1].running_var)], [inputs[trained]])


@pytest.mark.parametrize("owner", ["module", "datamodule"])
@pytest.mark.parametrize("federated", [False, True])
def test_inputs_are_those_that_the_hook_before_the_transfer_gives(tmp_path, federated, owner):
    def scaled(self, batch, dataloader_idx):
        return [3 * batch[0], batch[1]]

    kinds = {"module": Callable, "datamodule": Data}
    kinds[owner] = type("Scaled", (kinds[owner],), {"on_before_batch_transfer": scaled})
    inputs, targets = blobs(102).tensors
    module, data = kinds["module"](), kinds["datamodule"](TensorDataset(inputs, targets), batch_size=102)
    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), buffers="local", summary=False)
    settings = {"max_epochs": 1, "limit_val_batches": 0}
    fit(trainer(tmp_path, *([loop] if federated else []), StaticBatchNorm(), **settings), module, data)
    check([(weights(module.net), module.net[1].running_mean, module.net[1].running_var)], [3 * inputs])


@pytest.mark.parametrize("federated", [False, True])
def test_statistics_are_those_of_a_reloaded_training_set(tmp_path, federated):
    sets = [TensorDataset(scale * blobs(102).tensors[0], blobs(102).tensors[1]) for scale in (1.0, 3.0)]

    class Reloaded(Data):
        def train_dataloader(self):
            return DataLoader(sets[min(self.trainer.current_epoch, 1)], batch_size=102, shuffle=True)

    module, watch, data = Callable(), Watch(), Reloaded()
    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), buffers="local", summary=False)
    settings = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    fit(trainer(tmp_path, *([loop] if federated else []), StaticBatchNorm(), watch, **settings), module, data)
    for seen, dataset in zip(watch.validated, sets, strict=True):
        check([seen], [dataset.tensors[0]])


def test_validations_inside_an_epoch(tmp_path, monkeypatch):
    passes = []
    own = StaticBatchNorm._pass
    monkeypatch.setattr(StaticBatchNorm, "_pass", lambda *arguments: passes.append(1) or own(*arguments))
    inputs, targets = blobs(96).tensors
    watch = Watch()
    data = Data(TensorDataset(inputs, targets), batch_size=32)
    settings = {"val_check_interval": 1, "max_epochs": 2}
    fit(trainer(tmp_path, StaticBatchNorm(), watch, **settings), Callable(), data)
    assert len(watch.validated) == len(passes) == 6
    assert not any(tracked for _, tracked in watch.tracked)
    for (_, mean, _), seen in zip(watch.validated[:-1], watch.trained[1:], strict=True):
        assert torch.equal(mean, seen)


@pytest.mark.parametrize("unreadable", [0, 30])
def test_batches_that_are_none_have_no_part(tmp_path, unreadable):
    inputs = blobs(32).tensors[0]

    def readable(samples):
        return None if any(torch.equal(each, inputs[unreadable]) for each, _ in samples) else default_collate(samples)

    module = Callable()
    fit(trainer(tmp_path, StaticBatchNorm(), max_epochs=1), module, Data(blobs(32), collate_fn=readable))
    assert module.net[1].num_batches_tracked == 3


def test_a_trial_run_takes_a_batch(tmp_path):
    module = Callable()
    fit(trainer(tmp_path, StaticBatchNorm(), fast_dev_run=2), module, Data())
    assert module.net[1].num_batches_tracked == 2


@pytest.mark.slow
def test_a_resumed_run_is_the_same(tmp_path):
    def run(ckpt_path=None):
        module = Callable()
        loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), buffers="local", summary=False)
        kept = ModelCheckpoint(tmp_path / "kept", "{step}", save_top_k=-1, every_n_train_steps=11)
        callbacks = [loop, StaticBatchNorm(from_round=1)] + ([] if ckpt_path else [kept])
        fit(trainer(tmp_path, *callbacks), module, Data(blobs(102)), ckpt_path=ckpt_path)
        return weights(module)

    whole = run()
    files = list((tmp_path / "kept").glob("*.ckpt"))
    assert len(files) > 2
    for file in files:
        again = run(file)
        assert all(torch.equal(value, again[name]) for name, value in whole.items())


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("federated", [False, True])
def test_checkpoints_of_rounds_without_validation_have_the_statistics_of_their_weights(
    tmp_path, federated, weights_only
):
    saved = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_weights_only=weights_only)
    loop = FederatedLoop(FedAvg(), clients=2, buffers="local", summary=False)
    module = Callable()
    callbacks = [*([loop] if federated else []), StaticBatchNorm(), saved]
    fit(trainer(tmp_path, *callbacks, max_epochs=2, limit_val_batches=0), module, Data(drop_last=True))
    files = sorted(tmp_path.glob("*.ckpt"))
    states = [torch.load(file, weights_only=True)["state_dict"] for file in files]
    assert len(states) == 2
    assert not torch.equal(states[0]["net.1.running_mean"], states[1]["net.1.running_mean"])
    for name, value in module.state_dict().items():
        torch.testing.assert_close(states[1][name], value, rtol=0, atol=0)
    assert states[0]["net.1.running_mean"].any()


def test_a_checkpoint_of_copies_has_the_statistics_of_its_weights(tmp_path):
    """Such as FSDP's, which gathers the parts of tensors; others hold the module's own tensors."""

    class Copies(Callable):
        def state_dict(self, *arguments, **keywords):
            return {name: value.clone() for name, value in super().state_dict(*arguments, **keywords).items()}

    module, saved = Copies(), ModelCheckpoint(tmp_path)
    fit(trainer(tmp_path, StaticBatchNorm(), saved, limit_val_batches=0), module, Data(drop_last=True))
    state = torch.load(saved.best_model_path, weights_only=True)["state_dict"]
    for name, value in module.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)


def test_a_round_that_is_cut_short_at_a_validation_ends_with_its_own_statistics(tmp_path, monkeypatch):
    class Stops(pl.Callback):
        def on_validation_end(self, trainer, pl_module):
            trainer.should_stop = not trainer.sanity_checking

    passed, own = [], StaticBatchNorm._pass

    def recorded(callback, trainer, module, *arguments):
        passed.append(weights(module))
        own(callback, trainer, module, *arguments)

    monkeypatch.setattr(StaticBatchNorm, "_pass", recorded)
    module = Callable()
    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), buffers="local", summary=False)
    settings = {"max_epochs": 1, "val_check_interval": 1}
    fit(trainer(tmp_path, loop, StaticBatchNorm(), Stops(), **settings), module, Data(drop_last=True))
    assert len(passed) == 2
    ended = module.net[0].weight.to(passed[-1]["net.0.weight"].device)
    assert torch.equal(passed[-1]["net.0.weight"], ended)
    assert not torch.equal(passed[0]["net.0.weight"], ended)


@pytest.mark.parametrize("averaging", [WeightAveraging(), StochasticWeightAveraging(0.1)])
def test_averaged_weights_have_other_statistics(tmp_path, averaging):
    with pytest.raises(MisconfigurationException, match=f"{type(averaging).__name__} validates and ends with averaged"):
        fit(trainer(tmp_path, StaticBatchNorm(), averaging), Callable(), Data(drop_last=True))


def test_precision_and_modes(tmp_path):
    """Parts that the user keeps in evaluation mode are so afterwards, and half precision is the trainer's."""

    class Partly(Callable):
        def on_train_epoch_start(self):
            self.net[2].eval()

    module = Partly()
    settings = {"max_epochs": 1, "precision": "bf16-mixed", "limit_val_batches": 0}
    fit(trainer(tmp_path, StaticBatchNorm(), **settings), module, Data(drop_last=True))
    assert module.net[1].running_mean.dtype == torch.float32
    assert module.net[1].running_mean.isfinite().all()
    assert not module.net[2].training
    assert module.net[3].training


class Distilled(Callable):
    """Learns from a teacher that is kept in evaluation mode from one of its hooks on, or by ``train()``."""

    def __init__(self, where):
        super().__init__()
        self.teacher, self.where = network(norm=nn.BatchNorm1d).requires_grad_(False), where
        self.teacher[1].running_mean.fill_(4.0)
        self.freeze("__init__")

    def freeze(self, where):
        if where == self.where:
            self.teacher.eval()

    def train(self, mode=True):
        super().train(mode)
        self.freeze("train")
        return self

    def on_train_epoch_start(self):
        self.freeze("on_train_epoch_start")

    def training_step(self, batch, batch_idx):
        self.freeze("training_step")
        return super().training_step(batch, batch_idx)

    def forward(self, inputs):
        return self.net(inputs) + self.teacher(inputs)


@pytest.mark.parametrize("federated", [False, True])
@pytest.mark.parametrize("where", ["__init__", "train", "on_train_epoch_start", "training_step"])
@pytest.mark.parametrize("validates", [False, True])
def test_layers_in_evaluation_mode_keep_their_statistics(tmp_path, where, federated, validates):
    module = Distilled(where)
    if where == "train":
        module.train()
    callbacks = [FederatedLoop(FedAvg(), clients=2, buffers="local", summary=False)] * federated
    settings = {"max_epochs": 1, **({} if validates else {"limit_val_batches": 0})}
    data = Data(blobs(32), batch_size=16)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="StaticBatchNorm")
        fit(trainer(tmp_path, *callbacks, StaticBatchNorm(), **settings), module, data)
    assert module.net[1].num_batches_tracked == 2
    assert module.teacher[1].num_batches_tracked == 0
    assert module.teacher[1].running_mean.unique().tolist() == [4.0]
    assert not module.teacher[1].training


def test_layers_that_forward_does_not_use_keep_their_statistics(tmp_path):
    class Projecting(Callable):
        def __init__(self):
            super().__init__()
            self.projector = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
            self.projector[1].running_mean.fill_(4.0)

        def loss(self, batch):
            return super().loss(batch) + self.projector(self(batch[0])).square().mean()

    module = Projecting()
    with pytest.warns(UserWarning, match=r"forward\(\) does not use .*projector\.1") as caught:
        trainer(tmp_path, StaticBatchNorm(), max_epochs=2).fit(module, Data(blobs(32)))
    assert sum("StaticBatchNorm" in str(each.message) for each in caught) == 1
    assert module.net[1].num_batches_tracked == 4
    assert module.projector[1].running_mean.unique().tolist() == [4.0]


def test_layers_are_given_back_after_an_error(tmp_path):
    class Failing(Callable):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("enough")
            return super().training_step(batch, batch_idx)

    module = Failing()
    with pytest.raises(RuntimeError, match="enough"):
        fit(trainer(tmp_path, StaticBatchNorm()), module, Data(drop_last=True))
    assert module.net[1].track_running_stats


class OfDictionaries(Callable):
    def loss(self, batch):
        return nn.functional.cross_entropy(self(batch["x"]), batch["y"])


class TakesDictionaries(OfDictionaries):
    def forward(self, batch):
        return self.net(batch["x"])

    def loss(self, batch):
        return nn.functional.cross_entropy(self(batch), batch["y"])


class TakesLengths(Callable):
    def forward(self, inputs, lengths):
        return self.net(inputs * (lengths > 0).float()[:, None])

    def loss(self, batch):
        return nn.functional.cross_entropy(self(batch[0], batch[1] + 1), batch[1])


@pytest.mark.parametrize("federated", [False, True])
def test_a_forward_that_takes_more_than_a_batch_has_first_is_refused_before_the_first_step(tmp_path, federated):
    callbacks = [FederatedLoop(FedAvg(), clients=2, summary=False)] * federated
    refused = TakesLengths()
    before = weights(refused)
    with pytest.raises(MisconfigurationException, match=r"TakesLengths\.forward\(\).*TypeError.*'lengths'"):
        fit(trainer(tmp_path, *callbacks, StaticBatchNorm(), max_epochs=1), refused, Data())
    assert all(torch.equal(value, before[name]) for name, value in weights(refused).items())


@pytest.mark.parametrize("federated", [False, True])
def test_a_forward_that_takes_no_batch_is_refused_before_the_first_step(tmp_path, federated):
    samples = Data([{"x": inputs, "y": label} for inputs, label in blobs(32)], drop_last=True)
    callbacks = [FederatedLoop(FedAvg(), clients=2, summary=False)] * federated

    def run():
        return trainer(tmp_path, *callbacks, StaticBatchNorm(), max_epochs=1, limit_val_batches=0)

    fit(run(), TakesDictionaries(), samples)
    refused = OfDictionaries()
    before = weights(refused)
    with pytest.raises(MisconfigurationException, match=r"OfDictionaries\.forward\(\).*TypeError.*linear\(\)"):
        fit(run(), refused, samples)
    assert all(torch.equal(value, before[name]) for name, value in weights(refused).items())


def test_refuses(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"batches.*0"):
        StaticBatchNorm(batches=0)
    with pytest.raises(MisconfigurationException, match=r"from_round.*-1"):
        StaticBatchNorm(from_round=-1)
    with pytest.raises(MisconfigurationException, match="BatchNorm"):
        fit(trainer(tmp_path, StaticBatchNorm()), Module(), Data())
    with pytest.raises(MisconfigurationException, match="StaticBatchNorm"):
        fit(trainer(tmp_path, StaticBatchNorm()), Module(network(norm=nn.BatchNorm1d)), Data())
    loop = FederatedLoop(FedAvg(), clients=2, summary=False)
    with pytest.raises(MisconfigurationException, match=r"StaticBatchNorm.*FederatedLoop.*`callbacks`"):
        fit(trainer(tmp_path, StaticBatchNorm(), loop), Callable(), Data())
    loader = DataLoader(blobs(96), batch_size=8)
    with pytest.raises(MisconfigurationException, match=r"there.*2"):
        fit(trainer(tmp_path, StaticBatchNorm(), limit_val_batches=0), Several(), [loader, loader])
