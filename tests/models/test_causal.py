"""CausalLM: its loss, perplexity and answers, packed texts, and LoRA at natural clients."""

import copy
import sys
from functools import partial

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank import (
    ByKey,
    FedAvg,
    FederatedLoop,
    FedLoRA,
    FedSVD,
    FromIndices,
    LowRank,
    MatrixProduct,
    ProductSum,
    export_adapter,
)
from lightning_lowrank.data import AnsweredTexts, Instructions, PackTexts
from lightning_lowrank.models import CausalLM
from tests import texts
from tests.helpers import assert_same, fit, trainer, weights

transformers = pytest.importorskip("transformers")

ROWS = [
    {"instruction": text, "output": "good film" if label == "1" else "bad", "speaker": f"s{row % 3}"}
    for row, (text, label) in enumerate(texts.sentences(12, 0, longest=7))
]
INVERTING = "_prepare_4d_causal_attention_mask"
END = texts.WORDS.index("[SEP]")
SGD = partial(torch.optim.SGD, lr=0.5)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request, tmp_path_factory) -> str:
    return str(texts.save_language_model(tmp_path_factory.mktemp(request.param), request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> str:
    return str(texts.save_language_model(tmp_path_factory.mktemp("llama")))


def data_of(folder: str, **arguments) -> Instructions:
    given = {"prompt": "is {instruction} and ", "validation": "train", "batch_size": 4, "eval_batch_size": 5}
    data = Instructions(tokenizer=folder, dataset={"train": ROWS}, **{**given, **arguments})
    data.setup()
    return data


def test_the_loss_is_the_models_own(folder):
    module, batch = CausalLM(folder), next(iter(data_of(folder).val_dataloader()))
    module.log = lambda *arguments, **keywords: None
    torch.testing.assert_close(module.training_step(batch, 0), module.network(**batch).loss)
    assert module.network.training
    batch.pop("labels")
    with pytest.raises(MisconfigurationException, match="'labels'"):
        module.training_step(batch, 0)


def test_packed_texts_do_not_see_one_another(folder):
    module, data = CausalLM(folder), data_of(folder, max_length=40)
    module.log = lambda *arguments, **keywords: None
    samples = [data.train_set[index] for index in range(8)]
    gradients = []
    for collate in (data.collate(), PackTexts(texts.PADDING, 40)):
        batch = collate(samples)
        module.zero_grad()
        module.training_step(batch, 0).backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in module.named_parameters()})
    assert len(batch["input_ids"]) < 5
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], value, atol=1e-5, rtol=1e-4)


SIZES = {
    "vocab_size": len(texts.WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.4,
    "pad_token_id": texts.PADDING,
}
GEMMA = {
    "model_type": "gemma2",
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "head_dim": 8,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}


def packed(count=4):
    """Texts of nine tokens and fewer, and a batch in which they share a row."""
    draws = torch.Generator().manual_seed(0)
    ids = [torch.randint(4, len(texts.WORDS), (9 - row,), generator=draws).tolist() for row in range(count)]
    dataset = AnsweredTexts(ids, [[True] * len(text) for text in ids])
    return ids, PackTexts(texts.PADDING, 32)([dataset[row] for row in range(count)])


@pytest.mark.parametrize(
    "given",
    [
        {"model_type": "mistral", "num_key_value_heads": 2, "intermediate_size": 16, "sliding_window": 4},
        GEMMA,
        {"model_type": "mpt", "d_model": 16, "n_heads": 2, "n_layers": 2},
    ],
    ids=lambda given: given["model_type"],
)
def test_packed_texts_are_seen_through_the_models_window(given):
    module, (ids, batch) = CausalLM({**SIZES, **given}).eval(), packed()
    assert len(batch["input_ids"]) == 1
    if hasattr(sys.modules[type(module.network).__module__], INVERTING):
        with pytest.raises(MisconfigurationException, match="inverts masks"):
            module(batch)
        return
    with torch.no_grad():
        found = module(batch)[0, : sum(map(len, ids))]
        alone = torch.cat([module.network(torch.tensor([text])).logits[0] for text in ids])
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-4)


def test_a_model_that_inverts_masks_is_refused(monkeypatch):
    """MPT and XGLM of transformers 5.0: each text would see the others alone."""
    module = CausalLM({**SIZES, **GEMMA})
    monkeypatch.setattr(sys.modules[type(module.network).__module__], INVERTING, None, raising=False)
    with pytest.raises(MisconfigurationException, match=r"'gemma2' inverts masks.*leave out packing=True"):
        module(packed()[1])


@pytest.mark.slow
def test_clients_of_packed_texts_step_together(tmp_path, llama):
    ends = []
    for execution in ("sequential", "vectorized"):
        module = CausalLM({**SIZES, **GEMMA}, optimizer=partial(torch.optim.SGD, lr=0.1))
        partition = FromIndices([list(range(6)), list(range(6, 12))])
        loop = FederatedLoop(FedAvg(), partition=partition, execution=execution, summary=False)
        given = {"packing": True, "max_length": 64, "pad_to_multiple_of": 64}
        fit(trainer(tmp_path, loop, max_epochs=1), module, data_of(llama, **given))
        ends.append(weights(module))
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model_type": "bloom", "n_layer": 2, "n_head": 2}, "'bloom' makes ALiBi's biases of a mask of padding"),
        ({"model_type": "falcon", "alibi": True}, "'falcon' makes ALiBi's"),
        ({"model_type": "mamba", "state_size": 4}, "'mamba' has .* layers, which take no such mask"),
        ({"model_type": "rwkv", "attention_hidden_size": 16}, "'rwkv' has recurrent layers"),
        (
            {"model_type": "llama4_text", "intermediate_size": 16, "head_dim": 8, "attention_chunk_size": 8},
            "within chunks of 8 tokens, and rows have 30; make max_length no longer",
        ),
    ],
    ids=lambda given: given["model_type"] if isinstance(given, dict) else "",
)
def test_models_that_would_mix_packed_texts_are_refused(given, said):
    module = CausalLM({**SIZES, **given})
    with pytest.raises(MisconfigurationException, match=f"{said}.*leave out packing=True"):
        module(packed()[1])


def test_an_attention_without_masks_of_pairs_is_refused(llama):
    module = CausalLM(llama)
    module.network.config._attn_implementation = "flash_attention_2"
    with pytest.raises(MisconfigurationException, match="attn_implementation='flash_attention_2'"):
        module(packed()[1])


@pytest.mark.slow
def test_perplexity_counts_every_token_alike(tmp_path, llama):
    module, data = CausalLM(llama).eval(), data_of(llama)
    logged = trainer(tmp_path).validate(module, data, verbose=False)[0]
    losses, right = [], []
    for index in range(len(ROWS)):
        sample = data.train_set[index]
        with torch.no_grad():
            scores = module.network(sample["input_ids"][None]).logits[0, :-1].log_softmax(1)
        for place, label in enumerate(sample["labels"][1:].tolist()):
            if label != -100:
                losses.append(-scores[place, label].item())
                right.append(scores[place].argmax().item() == label)
    mean = sum(losses) / len(losses)
    assert logged["val_loss"] == pytest.approx(mean, rel=1e-5)
    assert logged["val_perplexity"] == pytest.approx(torch.tensor(mean).exp().item(), rel=1e-5)
    assert logged["val_acc"] == pytest.approx(sum(right) / len(right))


@pytest.mark.slow
def test_answers_are_those_of_each_prompt_alone(tmp_path, folder):
    module, data = CausalLM(folder, max_new_tokens=5), data_of(folder)
    found = [row for part in trainer(tmp_path).predict(module, data) for row in part["answers"]]
    assert len(found) == len(ROWS)
    answers = []
    for row, answer in zip(ROWS, found, strict=True):
        words = ["[CLS]", "is", *row["instruction"].split(), "and"]
        prompt = torch.tensor([[texts.WORDS.index(word) for word in words]])
        alone = module.network.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5)[
            0, len(words) :
        ]
        assert answer[: len(alone)].tolist() == alone.tolist()
        assert set(answer[len(alone) :].tolist()) <= {texts.PADDING}
        answers.append(tuple(alone.tolist()))
    assert len(set(answers)) > 1
    assert all(isinstance(text, str) and "[" not in text for text in data.decode(torch.stack(found[:5])))


@pytest.mark.slow
def test_exact_answers_are_counted(tmp_path, llama):
    module = CausalLM(llama, exact_match=True, max_new_tokens=5)
    data = data_of(llama)
    answers = [row for part in trainer(tmp_path).predict(module, data) for row in part["answers"]]
    # What the model says itself is right, up to its end; the others' answers stay wrong.
    written = [answer.tolist() for answer in answers]
    said = [answer[: answer.index(END) + 1] if END in answer else answer for answer in written]
    rows = [(row["instruction"], said[place]) for place, row in enumerate(ROWS)]
    parts = [[texts.WORDS.index(word) for word in ("[CLS]", "is", *text.split(), "and")] for text, _ in rows]
    kept = [place % 3 > 0 for place in range(len(rows))]
    ends = [
        answer if right else [*answer[:-1], (answer[-1] + 1) % 16]
        for (_, answer), right in zip(rows, kept, strict=True)
    ]
    dataset = AnsweredTexts(
        [prompt + end for prompt, end in zip(parts, ends, strict=True)],
        [[False] * len(prompt) + [True] * len(end) for prompt, end in zip(parts, ends, strict=True)],
    )
    loader = torch.utils.data.DataLoader(dataset, batch_size=5, collate_fn=data.collate())
    logged = trainer(tmp_path).validate(module, loader, verbose=False)[0]
    assert logged["val_exact"] == pytest.approx(sum(kept) / len(kept))


@pytest.mark.slow
def test_a_model_that_peft_wrapped_is_trained_in_rounds(tmp_path, llama):
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(llama)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    module = CausalLM(peft.get_peft_model(base, config), optimizer=partial(torch.optim.AdamW, lr=0.02))
    before = weights(module)
    loop = FederatedLoop(FedLoRA(FedSVD()), partition=ByKey("speaker"), local_steps=2, summary=False)
    fitted = trainer(tmp_path, loop, max_epochs=2)
    fit(fitted, module, data_of(llama, packing=True))
    changed = {name for name, value in weights(module).items() if not torch.equal(before[name], value)}
    assert changed == {name for name in before if "lora_" in name}
    for name, value in weights(module).items():
        if "lora_A" in name:
            torch.testing.assert_close(value @ value.T, torch.eye(2), atol=1e-5, rtol=0)
    fitted.save_checkpoint(tmp_path / "run.ckpt")
    again = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(llama), config)
    loaded = CausalLM.load_from_checkpoint(tmp_path / "run.ckpt", model=again)
    assert_same(weights(loaded), weights(module))


@pytest.mark.slow
def test_lora_at_natural_clients_learns_and_leaves_the_base_alone(tmp_path, llama):
    module = CausalLM(llama, optimizer=partial(torch.optim.AdamW, lr=0.02), gradient_checkpointing=True)
    before = weights(module)
    lora = LowRank(
        MatrixProduct(), rank=2, alpha=4, init="lora", include=["q_proj", "v_proj"], freeze_rest=True, summary=False
    )
    loop = FederatedLoop(FedAvg(), partition=ByKey("speaker"), local_steps=2, summary=False, personal_test=0.25)
    fitted = trainer(tmp_path, lora, loop, max_epochs=2)
    fit(fitted, module, data_of(llama, packing=True))
    logged = fitted.callback_metrics
    assert {"train_loss", "val_loss", "val_perplexity", "val_acc", "personal/val_perplexity"} <= set(logged)
    assert loop.indices.names == ("s0", "s1", "s2")
    after = weights(module)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 2 * 2
    assert all(after[name].any() for name in trained)
    assert all(
        torch.equal(
            after[name.replace(".weight", ".frozen_weight")] if "_proj" in name and name not in after else after[name],
            value,
        )
        for name, value in before.items()
    )
    assert logged["comm/ratio"] < 0.5


@pytest.mark.slow
def test_random_weights_come_from_the_seed_and_a_checkpoint_from_its_class(tmp_path, llama):
    config = transformers.AutoConfig.from_pretrained(llama)
    module = CausalLM(config, seed=3, optimizer=SGD, max_new_tokens=7)
    assert_same(weights(module), weights(CausalLM(config.to_dict(), seed=3)))
    fitted = trainer(tmp_path, max_epochs=1, limit_train_batches=1)
    fit(fitted, module, data_of(llama))
    fitted.save_checkpoint(tmp_path / "run.ckpt")
    loaded = CausalLM.load_from_checkpoint(tmp_path / "run.ckpt")
    assert_same(weights(loaded), weights(module))
    assert loaded.max_new_tokens == 7
    with pytest.raises(MisconfigurationException, match="cannot be loaded as a language model"):
        CausalLM(str(tmp_path))


class Recorded(FedLoRA):
    """Keeps what clients send."""

    def __init__(self):
        super().__init__(ProductSum())
        self.sent = []

    def end(self, client):
        message = super().end(client)
        self.sent.append({name: value.clone() for name, value in message.tensors.items()})
        return message


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
def test_adapters_beside_a_base_of_16_bits_are_of_32(tmp_path, llama, execution, precision):
    module = CausalLM(llama, optimizer=partial(torch.optim.AdamW, lr=1e-4), dtype="bfloat16")
    base = copy.deepcopy(module.network)
    lora = LowRank(
        MatrixProduct(), rank=2, alpha=4, init="lora", include=["q_proj", "v_proj"], freeze_rest=True, summary=False
    )
    algorithm = Recorded()
    partition = FromIndices([list(range(4)), list(range(4, 8))])
    loop = FederatedLoop(algorithm, partition=partition, local_steps=2, execution=execution, summary=False)
    fitted = trainer(tmp_path, lora, loop, max_epochs=1, precision=precision)
    fit(fitted, module, data_of(llama))
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert {parameter.dtype for name, parameter in module.named_parameters() if name in trained} == {torch.float32}
    frozen = {name: parameter for name, parameter in module.network.named_parameters() if not parameter.requires_grad}
    assert {parameter.dtype for parameter in frozen.values()} == {torch.bfloat16}
    for name, parameter in base.named_parameters():
        low_rank = name.replace(".weight", ".frozen_weight")
        assert torch.equal(frozen.get(low_rank, frozen.get(name)), parameter)

    first, second = algorithm.sent
    for name in trained:
        mean = (first[name].double() + second[name].double()) / 2
        found = module.get_parameter(name).detach().double()
        torch.testing.assert_close(found, mean, rtol=1e-6, atol=0)
        # Steps of 1e-4 are less than the spacing of 16 bits for most of the numbers that LoRA draws.
        assert (first[name] != second[name]).any()
        if not name.endswith("U"):
            assert (found.to(torch.bfloat16).double() != mean).any()

    export_adapter(module, tmp_path / "adapter")
    peft = pytest.importorskip("peft")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert {value.dtype for name, value in loaded.named_parameters() if "lora_" in name} == {torch.float32}
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, module.eval().network(tokens).logits, rtol=0.05, atol=0.05)
    wide = {name: value for name, value in loaded.named_parameters() if "lora_" in name}
    assert sorted(value.double().square().sum().item() for value in wide.values()) == pytest.approx(
        sorted(module.get_parameter(name).detach().double().square().sum().item() for name in trained), rel=1e-6
    )
