"""Hugging Face encoders, decoders and sequence-to-sequence models from small configurations, and PEFT's wrappers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from peft import IA3Config, LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tests.zoo.bases import CLASSES, TOTAL, Listed, draws, loader
from tests.zoo.registry import Gallery, Made

gallery = Gallery("Language: Hugging Face")

WORDS, LENGTH = 64, 12
ENCODER = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "num_labels": CLASSES,
}  # fmt: skip
DECODER = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 32, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class LitTransformer(pl.LightningModule):
    """Hands the batch to the model, which returns its loss."""

    def __init__(self, net: nn.Module, lr: float = 1e-3) -> None:
        super().__init__()
        self.net = net
        self.lr = lr

    def forward(self, **batch: Tensor) -> Any:
        return self.net(**batch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self(**batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        decayed = [value for value in self.parameters() if value.requires_grad and value.ndim > 1]
        others = [value for value in self.parameters() if value.requires_grad and value.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=self.lr)
        scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 1, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def sentences(length: int | None = LENGTH) -> list[Tensor]:
    chance = draws()
    return [
        torch.randint(3, WORDS, (4 + int(torch.randint(8, (), generator=chance)) if length is None else length,),
                      generator=chance)
        for _ in range(TOTAL)
    ]  # fmt: skip


def labelled(length: int | None = LENGTH) -> list[dict[str, Tensor]]:
    return [
        {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words[0] % CLASSES}
        for words in sentences(length)
    ]


def pad(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad to the longest of the batch, as Hugging Face's collators do."""
    batch = {
        name: pad_sequence([sample[name] for sample in samples], batch_first=True)
        for name in ("input_ids", "attention_mask")
    }
    return {**batch, "labels": torch.stack([sample["labels"] for sample in samples])}


def half_masked() -> Any:
    samples = labelled()
    for number, sample in enumerate(samples):
        sample["attention_mask"] = (torch.arange(LENGTH) < LENGTH - number % 5).long()
    return loader(Listed(samples))


def texts(**more: bool) -> Any:
    """Samples for language models, whose labels are the words themselves."""
    samples = [{"input_ids": words, "labels": words.clone()} for words in sentences()]
    for number, sample in enumerate(samples):
        if more.get("masked"):
            chosen = torch.rand(LENGTH, generator=draws(number)) < 0.4
            chosen[number % LENGTH] = True
            sample["labels"] = torch.where(chosen, sample["labels"], -100)
            sample["input_ids"] = torch.where(chosen, 2, sample["input_ids"])
        if more.get("mask"):
            sample["attention_mask"] = torch.ones_like(sample["input_ids"])
    return loader(Listed(samples))


@gallery.exhibit("BERT classifier", "attention mask, AdamW in two groups, linear warm-up")
def bert() -> Made:
    return LitTransformer(transformers.BertForSequenceClassification(transformers.BertConfig(**ENCODER))), half_masked()


@gallery.exhibit("BERT with eager attention", "masks added to the scores")
def bert_eager() -> Made:
    config = transformers.BertConfig(**ENCODER, attn_implementation="eager")
    return LitTransformer(transformers.BertForSequenceClassification(config)), half_masked()


@gallery.exhibit("BERT with padded batches", "batches of unlike lengths")
def bert_padded() -> Made:
    net = transformers.BertForSequenceClassification(transformers.BertConfig(**ENCODER))
    return LitTransformer(net), loader(Listed(labelled(None)), collate_fn=pad)


@gallery.exhibit("BERT with dropout", "dropout 0.1, as by default")
def bert_dropout() -> Made:
    config = {**ENCODER, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return LitTransformer(transformers.BertForSequenceClassification(transformers.BertConfig(**config))), half_masked()


@gallery.exhibit("RoBERTa masked language model", "output tied to the embedding")
def roberta() -> Made:
    net = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**ENCODER))
    return LitTransformer(net), texts(masked=True, mask=True)


@gallery.exhibit("DistilBERT, frozen encoder", "only the head trained")
def distilbert() -> Made:
    config = transformers.DistilBertConfig(
        vocab_size=WORDS, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=32, dropout=0.0,
        attention_dropout=0.0, seq_classif_dropout=0.0, num_labels=CLASSES,
    )  # fmt: skip
    net = transformers.DistilBertForSequenceClassification(config)
    net.distilbert.requires_grad_(False)
    return LitTransformer(net, lr=1e-2), half_masked()


@gallery.exhibit("ALBERT", "one layer used several times")
def albert() -> Made:
    config = transformers.AlbertConfig(**ENCODER, embedding_size=16, classifier_dropout_prob=0.0)
    return LitTransformer(transformers.AlbertForSequenceClassification(config)), half_masked()


@gallery.exhibit("ModernBERT", "rotary positions, local attention")
def modernbert() -> Made:
    kept = {name: value for name, value in ENCODER.items() if not name.endswith("_prob")}
    config = transformers.ModernBertConfig(**kept, pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1,
                                           eos_token_id=2, local_attention=8)  # fmt: skip
    return LitTransformer(transformers.ModernBertForSequenceClassification(config)), half_masked()


@gallery.exhibit("GPT-2", "Conv1D layers, output tied to the embedding")
def gpt2() -> Made:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LitTransformer(transformers.GPT2LMHeadModel(config)), texts()


@gallery.exhibit("Llama", "rotary positions, grouped queries, RMSNorm")
def llama() -> Made:
    return LitTransformer(transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))), texts(mask=True)


@gallery.exhibit("Qwen2", "tied output, biases in the queries")
def qwen2() -> Made:
    config = transformers.Qwen2Config(**DECODER, tie_word_embeddings=True)
    return LitTransformer(transformers.Qwen2ForCausalLM(config)), texts()


@gallery.exhibit("OPT", "learned positions, offset by two")
def opt() -> Made:
    config = transformers.OPTConfig(
        vocab_size=WORDS, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, dropout=0.0,
        max_position_embeddings=32, word_embed_proj_dim=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LitTransformer(transformers.OPTForCausalLM(config)), texts(mask=True)


@gallery.exhibit("Mixtral", "tokens sent to experts by their scores", double=False)
def mixtral() -> Made:
    config = transformers.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2)
    return LitTransformer(transformers.MixtralForCausalLM(config)), texts()


@gallery.exhibit("Mamba", "a state space scanned step by step")
def mamba() -> Made:
    config = transformers.MambaConfig(
        vocab_size=WORDS, hidden_size=32, state_size=4, num_hidden_layers=2, time_step_rank=4, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LitTransformer(transformers.MambaForCausalLM(config)), texts()


@gallery.exhibit("T5", "encoder and decoder, relative positions, tied embeddings")
def t5() -> Made:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return LitTransformer(transformers.T5ForConditionalGeneration(config)), texts(mask=True)


@gallery.exhibit("BART", "encoder and decoder, final bias in a buffer")
def bart() -> Made:
    config = transformers.BartConfig(
        vocab_size=WORDS, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=32, dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    return LitTransformer(transformers.BartForConditionalGeneration(config)), texts(mask=True)


@gallery.exhibit("Wav2Vec2 CTC", "convolutions over waveforms, CTC loss, weight norm", double=False)
def wav2vec2() -> Made:
    config = transformers.Wav2Vec2Config(
        vocab_size=16, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
        layerdrop=0.0, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 4), num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, mask_time_prob=0.0, mask_feature_prob=0.0, ctc_loss_reduction="mean",
        ctc_zero_infinity=True, num_feat_extract_layers=2,
    )  # fmt: skip
    chance = draws()
    samples = [
        {"input_values": torch.randn(800, generator=chance), "labels": torch.randint(1, 16, (5,), generator=chance)}
        for _ in range(TOTAL)
    ]
    net = transformers.Wav2Vec2ForCTC(config)
    net.freeze_feature_encoder()
    return LitTransformer(net), loader(Listed(samples))


@gallery.exhibit("CLIP", "two towers, a learned temperature")
def clip() -> Made:
    text = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "eos_token_id": 2,
            "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1}  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
              "image_size": 16, "patch_size": 8}  # fmt: skip
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    chance = draws()
    samples = [
        {"input_ids": torch.cat([words, torch.tensor([2])]), "pixel_values": torch.randn(3, 16, 16, generator=chance)}
        for words in sentences()
    ]
    return LitClip(transformers.CLIPModel(config)), loader(Listed(samples))


class LitClip(LitTransformer):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self(**batch, return_loss=True).loss
        self.log("train_loss", loss)
        return loss


@gallery.exhibit("GPT-2 with PEFT LoRA", "a frozen base wrapped by PEFT")
def peft_gpt2() -> Made:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    return LitTransformer(get_peft_model(transformers.GPT2LMHeadModel(config), lora), lr=1e-2), texts()


@gallery.exhibit("BERT with PEFT LoRA and a trained head", "modules_to_save beside the adapters")
def peft_bert() -> Made:
    net = transformers.BertForSequenceClassification(transformers.BertConfig(**ENCODER))
    lora = LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS", modules_to_save=["classifier"])
    return LitTransformer(get_peft_model(net, lora), lr=1e-2), half_masked()


@gallery.exhibit("Llama with PEFT IA3", "activations rescaled by learned vectors")
def peft_ia3() -> Made:
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))
    config = IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"],
                       task_type="CAUSAL_LM")  # fmt: skip
    return LitTransformer(get_peft_model(net, config), lr=1e-2), texts(mask=True)


class LitDistillation(pl.LightningModule):
    """A small model learns a frozen large one's distribution."""

    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher.eval().requires_grad_(False), student

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.teacher(input_ids=batch["input_ids"]).logits
        out = self.student(**batch)
        divergence = nn.functional.kl_div(
            out.logits.log_softmax(-1).flatten(0, 1), target.softmax(-1).flatten(0, 1), reduction="batchmean"
        )
        loss = 0.5 * out.loss + 0.5 * divergence
        self.log_dict({"train_loss": loss, "train_kl": divergence})
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.student.parameters(), lr=1e-3)


@gallery.exhibit("Llama distilled from a frozen Llama", "a frozen teacher in the module")
def distilled() -> Made:
    teacher = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))
    student = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**DECODER, "num_hidden_layers": 1}))
    return LitDistillation(teacher, student), texts(mask=True)
