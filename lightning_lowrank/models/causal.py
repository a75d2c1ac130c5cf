"""A LightningModule that fine-tunes a pretrained language model on prompts and answers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI, LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_lowrank.arguments import join_names
from lightning_lowrank.configuration import check_integer
from lightning_lowrank.data.tokenized import IGNORED
from lightning_lowrank.models.pretrained import head_seed, load_pretrained
from lightning_lowrank.seeding import default_seed

_INVERTING = "_prepare_4d_causal_attention_mask"
"""The function of transformers that inverts a mask of each pair of tokens, which later releases do not call."""


class CausalLM(LightningModule):
    """Trains any language model of transformers' ``AutoModelForCausalLM`` to predict the answers to prompts.

    A batch is a dictionary of ``input_ids``, ``attention_mask`` and ``labels``, ``(batch, tokens)`` each, as
    `Instructions` gives it. Labels are tokens, or -100 where nothing is to be predicted. Packed batches have
    ``segments`` and ``position_ids`` in place of the mask (`PackTexts`): a token attends to those before it in its own
    text, within the model's window if it has one. A model that would not keep packed texts apart is refused: one with
    recurrent, convolutional or other layers that take no mask of each pair of tokens, with ALiBi's biases, or with an
    attention other than transformers' ``eager`` and ``sdpa``.

    The loss is the mean cross-entropy of the predicted tokens. Logged once per epoch: ``train_loss``; ``val_loss``,
    ``val_perplexity`` and ``val_acc``; ``test_loss``, ``test_perplexity`` and ``test_acc``. Figures of validation and
    test give each token the same weight: the perplexity is the exponential of the mean loss of all tokens, and the
    accuracy the share of tokens to which the model gives the highest probability, given the true tokens before.

    With ``exact_match`` the model also generates an answer to each prompt in validation and test, always by the
    likeliest token, and ``val_exact`` and ``test_exact`` are logged: the share of texts whose first answer it writes
    token for token, end included. With the loop's ``personal_test``, each client's own model answers the client's own
    prompts.

    ``predict`` returns ``answers``, ``(batch, new tokens)``, which the model generates after each row's prompt by its
    generation configuration; `Instructions.decode` writes them as texts.

    Args:
        model: Name of a model on the Hugging Face hub, or a local folder that holds one. Or a configuration, as a
            dictionary with ``model_type`` or transformers' own, for random weights; or the model itself, such as one
            that PEFT wrapped or that is quantised, which ``load_from_checkpoint`` must be given again.
        seed: Seed of random weights. ``None``: the seed given to Lightning's ``seed_everything``, or 0.
        optimizer: Makes the optimizer from the parameters that require a gradient. Default: AdamW with a learning rate
            of 2e-5 and no weight decay.
        scheduler: Makes the learning-rate scheduler from the optimizer; it steps once per epoch. Default: none.
        dtype: Type of the weights, as for `TextClassifier`.
        max_new_tokens: Tokens of a generated answer at most.
        gradient_checkpointing: Whether activations are computed again in the backward pass rather than kept.
        exact_match: Whether validation and test generate answers. An answer longer than ``max_new_tokens`` counts as
            wrong.

    Raises:
        MisconfigurationException: If the model cannot be loaded, transformers is not installed, an argument is out
            of range, or a batch is packed that the model would not keep apart.

    Example:
        >>> model = CausalLM("mistralai/Mistral-7B-v0.3")  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        seed: int | None = None,
        optimizer: OptimizerCallable = lambda parameters: torch.optim.AdamW(parameters, lr=2e-5, weight_decay=0.0),
        scheduler: LRSchedulerCallable | None = None,
        dtype: str = "auto",
        max_new_tokens: int = 128,
        gradient_checkpointing: bool = False,
        exact_match: bool = False,
    ) -> None:
        super().__init__()
        check_integer("max_new_tokens", max_new_tokens)
        network: Any = load_pretrained(
            "AutoModelForCausalLM",
            model,
            "CausalLM",
            "a language model",
            head_seed(default_seed() if seed is None else seed),
            dtype,
        )
        if not isinstance(model, (str, Mapping)):
            # save_hyperparameters() reads this local variable.
            model = None if isinstance(model, nn.Module) else model.to_dict()
        self.save_hyperparameters(ignore=["optimizer", "scheduler"])
        if gradient_checkpointing:
            network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.network = network
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.max_new_tokens = max_new_tokens
        self.exact_match = exact_match
        for stage in ("val", "test"):
            setattr(self, f"{stage}_perplexity", _Perplexity())

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The logits, ``(batch, tokens, vocabulary)``, of a batch's inputs; ``labels`` are ignored."""
        given: dict[str, Any] = {name: value for name, value in inputs.items() if name not in ("labels", "segments")}
        if "segments" in inputs:
            given["attention_mask"] = self._mask_of(inputs["segments"])
        return self.network(**given, use_cache=False).logits

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Return and log the mean cross-entropy of the batch's predicted tokens."""
        logits, targets = self._predicted(batch)
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORED)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(batch["labels"]))
        return loss

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Log ``val_loss``, ``val_perplexity`` and ``val_acc``; with ``exact_match`` also ``val_exact``."""
        self._evaluate("val", batch)

    def test_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Log ``test_loss``, ``test_perplexity`` and ``test_acc``; with ``exact_match`` also ``test_exact``."""
        self._evaluate("test", batch)

    def predict_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """``answers``: the tokens that the model generates after each row's prompt, ``(batch, new tokens)``."""
        return {"answers": self._answers(batch)}

    def configure_optimizers(self) -> Any:
        """Make the optimizer, from the parameters that require a gradient, and the scheduler."""
        optimizer = self.optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])
        scheduler = None if self.scheduler is None else self.scheduler(optimizer)
        return LightningCLI.configure_optimizers(self, optimizer, scheduler)

    def _answers(self, batch: Mapping[str, Tensor], **settings: Any) -> Tensor:
        prompts = _prompts_of(batch)
        longest = max(map(len, prompts))
        # Pad on the left, so that generation continues at the same position in all rows.
        padding = self._padding()
        ids = torch.stack([F.pad(prompt, (longest - len(prompt), 0), value=padding) for prompt in prompts])
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=ids.device)
        mask = (torch.arange(longest, device=ids.device) >= longest - lengths[:, None]).long()
        written = self.network.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=self.max_new_tokens, pad_token_id=padding, **settings
        )
        return written[:, longest:]

    def _predicted(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits that predict each token but the first, in float32, and these tokens' labels."""
        if "labels" not in batch:
            raise MisconfigurationException(
                f"a batch to train on or evaluate must hold a label for each token as 'labels', and this one has"
                f" {list(batch)}"
            )
        logits = self(batch)[:, :-1]
        return logits.flatten(0, 1).float(), batch["labels"][:, 1:].flatten()

    def _evaluate(self, stage: str, batch: Mapping[str, Tensor]) -> None:
        logits, targets = self._predicted(batch)
        found = targets != IGNORED
        tokens = int(found.sum())
        if not tokens:
            return
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORED)
        right = (logits.argmax(1) == targets)[found].float().mean()
        perplexity = getattr(self, f"{stage}_perplexity")
        perplexity.update(loss, tokens)
        self.log(f"{stage}_loss", loss, batch_size=tokens, prog_bar=True)
        self.log(f"{stage}_acc", right, batch_size=tokens, prog_bar=True)
        self.log(f"{stage}_perplexity", perplexity, batch_size=tokens, prog_bar=True)
        if self.exact_match:
            answers = self._answers(batch, do_sample=False, num_beams=1)
            exact = sum(map(_begins_with, answers, map(_first_answer, batch["labels"]))) / len(answers)
            self.log(f"{stage}_exact", exact, batch_size=len(answers), prog_bar=True)

    def _mask_of(self, segments: Tensor) -> Tensor | dict[str, Tensor]:
        """The additive attention mask that keeps packed texts apart, ``(rows, 1, tokens, tokens)``.

        A dictionary of masks by kind of layer if only some layers have an attention window.
        """
        tokens = segments.shape[1]
        windows = _windows(self.network, tokens)
        places = torch.arange(tokens, device=segments.device)
        distance = places[:, None] - places[None, :]
        own = (segments[:, :, None] == segments[:, None, :]) & (distance >= 0)
        dtype = self.network.dtype
        masks = {}
        for kind, window in windows.items():
            seen = own if window is None else own & (distance < window)
            masks[kind] = seen.new_zeros((), dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min).unsqueeze(1)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _padding(self) -> int:
        own = getattr(self.network, "generation_config", None) or self.network.config
        for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
            value = getattr(own, name, None)
            if value is not None:
                return value[0] if isinstance(value, Sequence) else value
        return 0


def _windows(network: Any, tokens: int) -> dict[str, int | None]:
    """Size of the attention window in tokens, by kind of layer; ``None`` for full attention.

    Raises:
        MisconfigurationException: If the model would not keep packed texts apart.
    """
    config = network.config.get_text_config()
    attention = getattr(config, "_attn_implementation", None)
    if attention not in (None, "eager", "sdpa"):
        raise _not_packed(
            f"its attn_implementation={attention!r} takes no mask of each pair of tokens; load it with 'sdpa'"
        )
    if any(hasattr(sys.modules[type(part).__module__], _INVERTING) for part in network.modules()):
        raise _not_packed(f"{config.model_type!r} inverts masks of each pair of tokens in this release of transformers")
    if config.model_type == "bloom" or getattr(config, "alibi", False):
        raise _not_packed(f"{config.model_type!r} makes ALiBi's biases of a mask of padding")
    sizes = {
        "full_attention": None,
        "attention": None,
        "sliding_attention": getattr(config, "sliding_window", None),
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if kinds is None:
        kinds = [kind for kind, size in sizes.items() if size is not None] or ["full_attention"]
    other = sorted(set(kinds) - sizes.keys())
    if other or getattr(network, "_is_stateful", False):
        raise _not_packed(
            f"{config.model_type!r} has {join_names(other) or 'recurrent'} layers, which take no such mask"
        )
    windows = {
        kind: size if size is not None and size < tokens else None for kind, size in sizes.items() if kind in kinds
    }
    if windows.get("chunked_attention") is not None:
        raise _not_packed(
            f"{config.model_type!r} attends within chunks of {windows['chunked_attention']} tokens, and rows have"
            f" {tokens}; make max_length no longer"
        )
    # Some models do not accept a mask by kind of layer.
    return windows if len(set(windows.values())) > 1 else {"all": next(iter(windows.values()))}


def _not_packed(why: str) -> MisconfigurationException:
    return MisconfigurationException(f"this model would not keep packed texts apart: {why}. Or leave out packing=True")


def _prompts_of(batch: Mapping[str, Tensor]) -> list[Tensor]:
    """Each row's prompt: the tokens before the first label; without labels, all tokens but padding."""
    if "segments" in batch:
        raise MisconfigurationException("answers are generated for padded batches, and this one is packed")
    prompts = []
    for row, ids in enumerate(batch["input_ids"]):
        length = int(batch["attention_mask"][row].sum()) if "attention_mask" in batch else len(ids)
        if "labels" in batch:
            answered = (batch["labels"][row, :length] != IGNORED).nonzero()
            # A plain text is one answer; its first token serves as the prompt.
            length = max(int(answered[0]), 1) if len(answered) else length
        prompts.append(ids[:length])
    return prompts


def _first_answer(labels: Tensor) -> Tensor:
    """The first contiguous run of labels; the first token of a row is never part of it."""
    places = (labels[1:] != IGNORED).nonzero().flatten() + 1
    if not len(places):
        return places
    ends = (labels[places[0] :] == IGNORED).nonzero()
    return labels[places[0] :][: int(ends[0]) if len(ends) else None]


def _begins_with(written: Tensor, answer: Tensor) -> bool:
    return torch.equal(written[: len(answer)], answer)


class _Perplexity(MeanMetric):
    higher_is_better = False  # type: ignore[assignment]

    def compute(self) -> Tensor:
        """The exponential of the mean loss."""
        return super().compute().exp()
