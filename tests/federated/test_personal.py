"""Clients' own models are judged on their own test data each time validation runs between rounds."""

import csv
import warnings
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanSquaredError

from lightning_lowrank import (
    FedAvg,
    FedBN,
    FederatedLoop,
    FedLoRA,
    FedPer,
    FedSA,
    FromIndices,
    HeteroFL,
    LabelCount,
    LocalTraining,
    LowRank,
    MatrixProduct,
    ProductSum,
    RoLoRA,
    merge,
)
from lightning_lowrank.cli.runs import find_runs
from lightning_lowrank.federated.protocols import Personal, UnequalClients
from lightning_lowrank.federated.state import copy_into, trained_tensors
from tests.grids import daily
from tests.helpers import Data, Module, blobs, fit, network, trainer


def accuracies(module, loop, dataset, parts):
    inputs, targets = dataset.tensors
    live = trained_tensors(module)
    kept = {name: value.detach().clone() for name, value in live.items()}
    found = []
    for client, part in enumerate(parts):
        model = UnequalClients.of(loop.algorithm).model_for(loop.server, loop.coordinator.info(client))
        copy_into(live, Personal.of(loop.algorithm).personal_model(loop.coordinator.context(client, live), model))
        found.append((module.net(inputs[part]).argmax(1) == targets[part]).double().mean())
    copy_into(live, kept)
    return torch.stack(found)


def run(tmp_path, algorithm, personal_test, execution="sequential", callbacks=(), **arguments):
    loop = FederatedLoop(
        algorithm, personal_test=personal_test, summary=False, execution=execution, seed=1,
        **{"clients": 12, "partition": LabelCount(2), "local_epochs": 2, **arguments},
    )  # fmt: skip
    module = Module()
    fitted = trainer(tmp_path, loop, *callbacks, max_epochs=3)
    fit(fitted, module, Data())
    return module, loop, fitted


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
@pytest.mark.parametrize("algorithm", [FedAvg, LocalTraining])
def test_on_the_validation_samples_of_its_labels(tmp_path, execution, algorithm):
    module, loop, fitted = run(tmp_path, algorithm(), "matched_labels", execution)
    validation, training = blobs(40, seed=8), blobs()
    parts = [
        torch.nonzero(torch.isin(validation.tensors[1], training.tensors[1][loop.indices[client]])).flatten()
        for client in range(12)
    ]
    expected = accuracies(module, loop, validation, parts)
    found = {name: value for name, value in fitted.callback_metrics.items() if name.startswith("personal/val_acc")}
    assert found["personal/val_acc"] == pytest.approx(float(expected.mean()))
    assert found["personal/val_acc_worst10"] == pytest.approx(float(expected.min()))
    assert found["personal/val_acc_std"] == pytest.approx(float(expected.std(correction=1)))
    if algorithm is LocalTraining:
        assert found["personal/val_acc"] > fitted.callback_metrics["val_acc"] + 0.1
    tested = fitted.test(module, Data(), verbose=False)
    assert "personal/test_loss" in fitted.callback_metrics
    assert tested


@pytest.mark.slow
def test_a_merged_module_shows_clients_own_models(tmp_path):
    low_rank = LowRank(MatrixProduct(), rank=2, freeze_rest=True, summary=False)
    loop = FederatedLoop(LocalTraining(), clients=2, personal_test="matched_labels", summary=False)
    fitted, module = trainer(tmp_path, low_rank, loop, max_epochs=1), Module()
    fit(fitted, module, Data())
    fitted.test(module, Data(), verbose=False)
    expected = dict(fitted.callback_metrics)
    weight = merge(module).net[0].merged_weight
    fitted.test(module, Data(), verbose=False)
    torch.testing.assert_close(dict(fitted.callback_metrics), expected)
    assert expected["personal/test_loss_std"] > 1e-3
    assert torch.equal(module.net[0].merged_weight, weight)


@pytest.mark.slow
def test_on_what_it_holds_out(tmp_path):
    parts = [list(range(40)), list(range(40, 103))]
    module, loop, fitted = run(
        tmp_path, FedAvg(), 0.25, clients=None, partition=FromIndices(parts), participants=[[0, 1]] * 3
    )
    assert loop.indices.sizes.tolist() == [30, 47]
    held = [sorted(set(part) - set(loop.indices[client].tolist())) for client, part in enumerate(parts)]
    expected = accuracies(module, loop, blobs(), held)
    assert fitted.callback_metrics["personal/val_acc"] == pytest.approx(float(expected.mean()))
    assert fitted.callback_metrics["federated/samples"] == 77


OWN_PARTS = {f"ward {client}": list(range(8 * client, 8 * client + 8)) for client in range(12)}
# Ward 3 has no test sample, and nobody trains for the last five.
OWN_TESTS = {f"ward {client}": [] if client == 3 else list(range(3 * client, 3 * client + 3)) for client in range(12)}


@daily("LocalTraining", "FedAvg")
@pytest.mark.parametrize("algorithm", [FedAvg, LocalTraining])
def test_on_its_own_test_samples(tmp_path, algorithm):
    """Each client's own model and the global one, on what is said to be its own, and in a table."""
    logger = CSVLogger(tmp_path, name="", version="")
    loop = FederatedLoop(
        algorithm(), partition=FromIndices({"train": OWN_PARTS, "test": OWN_TESTS}), personal_test="by_client",
        local_epochs=2, summary=False, seed=1,
    )  # fmt: skip
    fitted, module = trainer(tmp_path, loop, logger=logger), Module()
    fit(fitted, module, Data())
    validation = blobs(40, seed=8)
    names = [name for name, part in OWN_TESTS.items() if part]
    clients = [loop.indices.names.index(name) for name in names]
    every = accuracies(module, loop, validation, [OWN_TESTS[name] for name in loop.indices.names])
    own = every[clients]
    shared = torch.stack(
        [
            (module.net(validation.tensors[0][part]).argmax(1) == validation.tensors[1][part]).double().mean()
            for part in OWN_TESTS.values()
            if part
        ]
    )
    logged = fitted.callback_metrics
    for prefix, expected in (("personal", own), ("global", shared)):
        assert logged[f"{prefix}/val_acc"] == pytest.approx(float(expected.mean()))
        assert logged[f"{prefix}/val_acc_worst10"] == pytest.approx(float(expected.min()))
        assert logged[f"{prefix}/val_acc_std"] == pytest.approx(float(expected.std(correction=1)))
    assert own.equal(shared) == (algorithm is FedAvg)
    with open(tmp_path / "clients.csv", newline="") as file:
        table = {row["client"]: row for row in csv.DictReader(file)}
    assert set(table) == set(names)
    assert {row["samples"] for row in table.values()} == {"3"}
    for place, name in enumerate(names):
        assert float(table[name]["global/val_acc"]) == pytest.approx(float(shared[place]))
        assert float(table[name]["personal/val_acc"]) == pytest.approx(float(own[place]))
    assert not (tmp_path / "clients_test.csv").exists()
    fitted.test(module, Data(), verbose=False)
    assert "global/test_loss" in fitted.callback_metrics
    assert (tmp_path / "clients_test.csv").is_file()


def test_the_table_of_clients_holds_no_formula(tmp_path):
    names = ["=1+1", "'=1+1", "'ada", "＝1+1", "-3", "\x1b[31mred", "two\nlines"]
    parts = {name: list(range(place * 4, place * 4 + 4)) for place, name in enumerate(names)}
    loop = FederatedLoop(
        FedAvg(), partition=FromIndices({"train": parts, "test": parts}), personal_test="by_client", summary=False
    )
    fit(trainer(tmp_path, loop, max_epochs=1, logger=CSVLogger(tmp_path, name="", version="")), Module(), Data())
    with open(tmp_path / "clients.csv", newline="", encoding="utf-8") as file:
        written = {row["client"] for row in csv.DictReader(file)}
    assert written == {"'=1+1", "''=1+1", "'ada", "'＝1+1", "-3", "\\x1b[31mred", "two lines"}
    (run,) = find_runs([tmp_path])
    assert {row["client"] for row in run.clients} >= {"=1+1", "'=1+1", "'ada", "＝1+1", "-3"}


@pytest.mark.slow
def test_a_drawn_part_of_the_clients_is_judged(tmp_path):
    found = []
    for count in (None, 4, 4, 11, 50):
        loop = FederatedLoop(
            FedAvg(), partition=FromIndices({"train": OWN_PARTS, "test": OWN_TESTS}), personal_test="by_client",
            personal_clients=count, summary=False, seed=1,
        )  # fmt: skip
        fit(trainer(tmp_path, loop, max_epochs=2, logger=CSVLogger(tmp_path, name="", version="")), Module(), Data())
        found.append([row.split(",")[0] for row in (tmp_path / "clients.csv").read_text().splitlines()[1:]])
    assert [len(names) for names in found] == [11, 4, 4, 11, 11]
    assert found[1] == found[2] != found[0][:4]
    with pytest.raises(MisconfigurationException, match="personal_clients=4"):
        FederatedLoop(FedAvg(), clients=2, personal_clients=4)
    with pytest.raises(MisconfigurationException, match="personal_clients"):
        FederatedLoop(FedAvg(), clients=2, personal_test=0.5, personal_clients=0)


def test_partitions_that_do_not_know_the_test_samples_are_refused_before_the_first_step(tmp_path):
    loop = FederatedLoop(FedAvg(), clients=2, personal_test="by_client", summary=False)
    fitted = trainer(tmp_path, loop)
    with pytest.raises(MisconfigurationException, match=r"personal_test='by_client'.*IID"):
        fit(fitted, Module(), Data())
    assert fitted.global_step == 0


@pytest.mark.slow
def test_a_checkpoint_may_be_chosen_by_it(tmp_path):
    best = ModelCheckpoint(tmp_path / "best", monitor="personal/val_acc", mode="max")
    run(tmp_path, FedAvg(), "matched_labels", callbacks=[best])
    assert best.best_model_score > 0.3


class Named(TensorDataset):
    """Has names for its labels."""

    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.labels = ["abcde"[label] for label in tensors[1].tolist()]


def test_labels_are_matched_by_their_names(tmp_path):
    """The validation samples lack the first class, have one that no client trains on, and so number names otherwise."""
    judged = []

    class Watched(Module):
        def validation_step(self, batch, batch_idx):
            judged.append(set(batch[1].tolist()))
            self.log("val_loss", batch[0].mean())

    train = Named(blobs(40).tensors[0], torch.arange(40) % 4)
    validation = Named(blobs(20).tensors[0], 1 + torch.arange(20) % 4)
    parts = [[client, client + 4] for client in range(4)]
    loop = FederatedLoop(FedAvg(), partition=FromIndices(parts), personal_test="matched_labels", summary=False)
    fitted = trainer(tmp_path, loop, max_epochs=1, num_sanity_val_steps=0)
    fit(fitted, Watched(), DataLoader(train, batch_size=8), DataLoader(validation, batch_size=20))
    assert judged == [{1, 2, 3, 4}, {1}, {2}, {3}]


@pytest.mark.slow
def test_training_is_the_same_with_and_without(tmp_path):
    first, _, _ = run(tmp_path, FedAvg(), None)
    second, _, _ = run(tmp_path, FedAvg(), "matched_labels")
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])


class Two(UnequalClients):
    def variants(self, server):
        return {"zero": {name: torch.zeros_like(value) for name, value in server.model.items()}, "same": server.model}


@pytest.mark.slow
def test_further_global_models(tmp_path):
    _, _, fitted = run(tmp_path, Two(), None)
    figures = fitted.callback_metrics
    assert figures["val_loss/zero"] == pytest.approx(float(torch.tensor(4.0).log()))
    assert figures["val_acc/same"] == pytest.approx(float(figures["val_acc"]))


@pytest.mark.parametrize("wrong", ["labels", 0.0, 1.0, 2])
def test_wrong_arguments(wrong):
    with pytest.raises(MisconfigurationException, match=r"personal_test.*'matched_labels'"):
        FederatedLoop(FedAvg(), clients=2, personal_test=wrong)


@pytest.mark.parametrize(
    ("algorithm", "personal_test", "shift", "loaders", "said"),
    [
        (FedAvg(), "matched_labels", 10, 1, "no client has a test sample"),
        (FedAvg(), "matched_labels", 0, 2, "one loader|several|loaders"),
        (HeteroFL([1.0, 0.5]), None, 0, 2, "one loader|several|loaders"),
    ],
)
def test_validation_data_that_cannot_be_judged_on_is_refused_before_the_first_step(
    tmp_path, algorithm, personal_test, shift, loaders, said
):
    class Counting(Module):
        steps = 0

        def training_step(self, *arguments):
            self.steps += 1
            return super().training_step(*arguments)

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            pass

    inputs, targets = blobs(40, seed=8).tensors
    validation = [DataLoader(TensorDataset(inputs, targets + shift), batch_size=8) for _ in range(loaders)]
    loop = FederatedLoop(algorithm, clients=12, partition=LabelCount(2), personal_test=personal_test, summary=False)
    module, fitted = Counting(), trainer(tmp_path, loop, max_epochs=1, num_sanity_val_steps=0)
    with pytest.raises(MisconfigurationException, match=said):
        fitted.fit(module, DataLoader(blobs(), batch_size=8), validation[0] if loaders == 1 else validation)
    assert module.steps == 0


class Numbered(IterableDataset):
    def __iter__(self):
        return iter(zip(*blobs(40, seed=8).tensors, strict=True))


@pytest.mark.parametrize("validation", ["several", "iterable"])
@pytest.mark.parametrize("algorithm", [FedLoRA(ProductSum()), HeteroFL([1.0])], ids=["FedLoRA", "HeteroFL"])
def test_lightning_reads_the_validation_data_of_a_method_without_further_models(tmp_path, algorithm, validation):
    class Validated(Module):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("val_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    rank = [LowRank(MatrixProduct(), rank=2, init="lora", freeze_rest=True, allow_larger=True, summary=False)]
    loop = FederatedLoop(algorithm, clients=3, summary=False)
    fitted = trainer(tmp_path, *(rank if isinstance(algorithm, FedLoRA) else []), loop, max_epochs=1)
    dataset = Numbered() if validation == "iterable" else blobs(40, seed=8)
    loaders = [DataLoader(dataset, batch_size=8) for _ in range(2 if validation == "several" else 1)]
    fit(fitted, Validated(), DataLoader(blobs(), batch_size=8), loaders)
    assert {name for name in fitted.callback_metrics if name.startswith("val_loss")} == (
        {"val_loss"} if validation == "iterable" else {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"}
    )


class Judged(Module):
    """A module that logs metric objects and figures whose names say more or less of their direction."""

    def __init__(self):
        super().__init__()
        self.spread = MeanSquaredError()

    def validation_step(self, batch, batch_idx):
        outputs = self.net(batch[0])
        loss = torch.nn.functional.cross_entropy(outputs, batch[1])
        self.spread.update(outputs.argmax(1).float(), batch[1].float())
        self.log("val_score", self.spread)
        self.log("val_ppl", loss.exp())
        self.log("val_merit", -loss)
        self.log("val_watched", loss)
        self.log("val_acc", -loss)


@pytest.mark.slow
def test_the_worst_tenth_goes_by_what_is_better(tmp_path):
    saves = [ModelCheckpoint(tmp_path, monitor=f"personal/{name}", mode="min") for name in ("val_watched", "val_acc")]
    loop = FederatedLoop(
        LocalTraining(), clients=12, partition=LabelCount(2), personal_test="matched_labels", summary=False, seed=1
    )
    fitted = trainer(tmp_path, loop, *saves, max_epochs=2)
    with pytest.warns(UserWarning, match="val_merit_worst10 is not logged.*let ModelCheckpoint") as told:
        fitted.fit(Judged(), Data())
    figures = fitted.callback_metrics
    for name in ("val_score", "val_ppl", "val_watched"):
        assert figures[f"personal/{name}_worst10"] > figures[f"personal/{name}"], name
    assert not {"personal/val_merit_worst10", "personal/val_acc_worst10"} & figures.keys()
    said = [str(warning.message) for warning in told if "worst" in str(warning.message)]
    assert len(said) == 2
    assert "lower is better by ModelCheckpoint(mode='min') and higher is better by its name" in said[1]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "share"), [(FedAvg, 0.2), (partial(HeteroFL, [1.0, 0.5]), None)])
def test_there_are_no_figures_of_weights_that_the_last_round_did_not_leave(tmp_path, algorithm, share):
    saved = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    module, _, fitted = run(tmp_path, algorithm(), share, callbacks=[saved])
    figure = "personal/test_loss" if share else "test_loss/0.5"
    last, early = (str(tmp_path / f"epoch={epoch}.ckpt") for epoch in (2, 0))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*are not evaluated")
        fitted.test(module, Data(), verbose=False)
        assert figure in fitted.callback_metrics
        fitted.test(module, Data(), verbose=False, ckpt_path=last)
        assert figure in fitted.callback_metrics
    of_another_kind = Module(torch.nn.Sequential(torch.nn.Flatten(), network()))
    for other, path in ((module, early), (Module(), None), (of_another_kind, None)):
        with pytest.warns(UserWarning, match=r"Module does not hold the weights of the last round.* are not evaluated"):
            fitted.test(other, Data(), verbose=False, ckpt_path=path)
        assert figure not in fitted.callback_metrics
        with pytest.warns(UserWarning, match="are not evaluated"):
            fitted.validate(other, Data(), verbose=False)
    if share:
        loop = FederatedLoop(algorithm(), personal_test=share, clients=2, summary=False)
        with pytest.warns(UserWarning, match=r"no round was made with this FederatedLoop.* are not evaluated"):
            trainer(tmp_path, loop).test(Module(), Data(), verbose=False)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, 0),
        ({"limit_val_batches": 0}, 1),
        ({"check_val_every_n_epoch": 3}, 1),
        # A validation in the midst of each round.
        ({"val_check_interval": 2}, 1),
    ],
)
def test_a_fit_that_judges_no_client_says_so_once(tmp_path, settings, said):
    loop = FederatedLoop(FedAvg(), personal_test=0.2, clients=3, summary=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer(tmp_path, loop, max_epochs=2, **settings).fit(Module(), Data())
    assert sum("personal_test=0.2 evaluates clients' own models if" in str(each.message) for each in told) == said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "init", "part"),
    [
        (FedBN, None, "net.1.bias"),
        (partial(FedPer, ["net.0"]), None, "net.0.bias, net.0.weight with"),
        (LocalTraining, None, "the whole model with"),
        (partial(FedLoRA, FedSA()), "lora", "the factor B of each adapter with"),
        (partial(FedLoRA, FedSA(), keep=["net.5.bias"]), "lora", "the factor B of each adapter and net.5.bias with"),
        (partial(FedLoRA, ProductSum(), keep=["net.5.bias"]), "lora", "keeps net.5.bias with"),
        (partial(FedLoRA, RoLoRA()), "lora", None),
        (FedAvg, None, None),
    ],
)
@pytest.mark.parametrize("personal_test", [None, 0.2])
def test_figures_of_a_global_model_with_a_part_that_stays_with_clients(tmp_path, algorithm, init, part, personal_test):
    loop = FederatedLoop(algorithm(), personal_test=personal_test, clients=2, summary=False)
    low_rank = [LowRank(MatrixProduct(), rank=2, init=init, summary=False)] if init else []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer(tmp_path, *low_rank, loop).fit(Module(network(norm=nn.BatchNorm1d)), Data())
    said = [str(each.message) for each in told if "the global model is validated with" in str(each.message)]
    if part is None or personal_test is not None:
        assert said == []
        return
    (only,) = said
    assert part in only
    assert only.endswith(
        'FederatedLoop(personal_test=...), and monitor their figures, such as monitor="personal/val_acc".'
    )


@pytest.mark.slow
def test_nothing_is_said_of_other_weights_where_only_the_global_model_is_judged(tmp_path):
    saved = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    module, _, fitted = run(tmp_path, FedAvg(), None, callbacks=[saved])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*are not evaluated")
        fitted.test(module, Data(), verbose=False, ckpt_path=str(tmp_path / "epoch=0.ckpt"))


class Listing(Module):
    """Logs a figure of all that a validation has seen."""

    def on_validation_start(self):
        self.seen = []

    def validation_step(self, batch, batch_idx):
        self.seen.append(len(batch[0]))

    def on_validation_epoch_end(self):
        self.log("count", float(sum(self.seen)))


@pytest.mark.slow
def test_what_a_validations_start_resets_is_each_clients_own(tmp_path):
    class Paired(Listing):
        def on_validation_end(self):
            """Stand for one that undoes what the start does."""

    def count(module):
        loop = FederatedLoop(FedAvg(), partition=FromIndices([list(range(20)), list(range(20, 60))]), personal_test=0.5)
        run = trainer(tmp_path, loop, max_epochs=1)
        run.fit(module, Data())
        return run.callback_metrics["personal/count"]

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs once a validation")
        assert count(Listing()) == (10 + 20) / 2
    with pytest.warns(UserWarning, match=r"Paired\.on_validation_end\(\) runs once .* on_validation_epoch_start"):
        count(Paired())
