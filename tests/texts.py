"""A tiny transformer of random weights with a tokenizer of a few words, and files of sentences made of these words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

GOOD, BAD = ("good", "fine", "funny", "warm"), ("bad", "dull", "flat", "cold")
OTHERS = ("a", "film", "and", "story", "with", "actors", "is", "the")
WORDS = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", *GOOD, *BAD, *OTHERS)
PADDING = WORDS.index("[PAD]")


def save_tokenizer(folder: Path, **settings: Any) -> Path:
    """Save a tokenizer of `WORDS`, with [CLS] before a text or pair, [SEP] after each text, and token 3 to pad."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", WORDS.index("[CLS]")), ("[SEP]", WORDS.index("[SEP]"))],
    )
    given = {"unk_token": "[UNK]", "pad_token": "[PAD]", "model_max_length": 160, **settings}
    PreTrainedTokenizerFast(tokenizer_object=words, **given).save_pretrained(folder)
    return folder


def save_model(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """Save a BERT of two layers, without a classification head; most of its numbers are embeddings."""
    from transformers import BertConfig, BertModel

    given = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.2, **settings}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        config = BertConfig(
            vocab_size=4000,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=160,
            pad_token_id=PADDING,
            **given,
        )
        BertModel(config).to(dtype).save_pretrained(folder)
    return folder


def save_roberta(folder: Path) -> Path:
    """Save a RoBERTa of two layers, without a classification head."""
    from transformers import RobertaConfig, RobertaModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        config = RobertaConfig(
            vocab_size=len(WORDS), max_position_embeddings=170, type_vocab_size=1, pad_token_id=PADDING, **sizes
        )
        RobertaModel(config).save_pretrained(folder)
    return folder


def sentences(count: int, seed: int, longest: int = 12) -> list[tuple[str, str]]:
    """Return texts of two to ``longest`` words and their labels; one is a good or a bad word, as the label says."""
    draws = torch.Generator().manual_seed(seed)

    def draw(words: tuple[str, ...]) -> str:
        return words[int(torch.randint(len(words), (), generator=draws))]

    samples = []
    for index in range(count):
        words = [draw(OTHERS) for _ in range(int(torch.randint(1, longest, (), generator=draws)))]
        place = int(torch.randint(len(words) + 1, (), generator=draws))
        words.insert(place, draw(GOOD if index % 2 else BAD))
        samples.append((" ".join(words), str(index % 2)))
    return samples


def write(path: Path, samples: list[tuple[str, str]], header: str = "") -> None:
    lines = ([header] if header else []) + [f"{text}\t{label}" for text, label in samples]
    path.write_text("".join(f"{line}\n" for line in lines))


def save_files(folder: Path, train: int = 60, others: int = 20) -> Path:
    """Write train.tsv, dev.tsv and test.tsv."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, count) in enumerate({"train": train, "dev": others, "test": others}.items()):
        write(folder / f"{name}.tsv", sentences(count, seed))
    return folder


def save_language_model(folder: Path, kind: str = "llama", **settings: Any) -> Path:
    """Save a language model of two layers, which knows `WORDS`, with its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    if kind == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    else:
        sizes["num_key_value_heads"] = 1
    ends = {"bos_token_id": WORDS.index("[CLS]"), "eos_token_id": WORDS.index("[SEP]"), "pad_token_id": PADDING}
    given = {"vocab_size": len(WORDS), "initializer_range": 0.4, **sizes, **ends, **settings}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **given)).save_pretrained(folder)
    return save_tokenizer(folder, bos_token="[CLS]", eos_token="[SEP]", model_max_length=512, chat_template=CHAT)


CHAT = (
    "[CLS] {% for message in messages %}{{ 'is ' if message['role'] == 'user' else 'and ' }}{{ message['content'] }}"
    " [SEP] {% endfor %}{% if add_generation_prompt %}and {% endif %}"
)
"""A chat template of `WORDS`: "is" begins what the user says, "and" what the assistant says, and [SEP] ends both."""
