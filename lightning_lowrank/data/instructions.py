"""`Instructions`: instructions with answers, conversations or plain texts, for training a language model."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_lowrank.data.tables import Table
from lightning_lowrank.data.text_splits import TextSplits, names_of_parts
from lightning_lowrank.data.tokenized import AnsweredTexts, PackTexts, PadTexts
from lightning_lowrank.data.vision import hold_out
from lightning_lowrank.federated.data.columns import is_missing

ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n### Response: "
)
"""The prompt of Stanford's Alpaca (Taori et al. 2023) for instructions without further input."""

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}


class Instructions(TextSplits):
    r"""Prompts and answers for training a language model; only the answers are predicted. For `CausalLM`.

    A row becomes a text in one of three ways. With ``prompt`` (the default) it is this template, filled with the row's
    columns, and then the column ``answer``. With ``messages`` it is a conversation, which the tokenizer's own chat
    template writes; the assistant's answers are predicted. With ``text`` it is one column, and all of it is predicted.
    The end token follows an answer or text, and is predicted as well.

    Texts are truncated at ``max_length``. Texts without a token to predict are dropped; a warning has their number.

    A batch is a dictionary of ``input_ids``, ``attention_mask`` and ``labels``, which are -100 where nothing is
    predicted, padded to its longest text; with ``packing`` see `PackTexts`. A tokenizer without a padding token pads
    with its end token, which the mask hides.

    ``ByKey("speaker")`` finds clients in the rows' columns. Files are ``.jsonl``, ``.json``, ``.csv``, or tab-separated
    columns. Arguments that are not named here are those of `SplitsInMemory`.

    Args:
        root: Folder of the files; with ``dataset`` where downloads are kept.
        tokenizer: Name of a tokenizer on the Hugging Face hub, or a local folder that holds one: the model's own. Or
            the tokenizer itself.
        train: Name of the training file in ``root``, by default ``train.jsonl``; with ``dataset`` of the split, by
            default ``train``.
        validation: The same to validate on: ``validation.jsonl``, or ``validation``. Or the share, between 0 and 1, of
            the training file's or split's rows that is held out, drawn by ``seed``.
        test: The same that ``test`` and ``predict`` read: ``test.jsonl``, or ``test``. Default: the validation set.
        max_length: Tokens at which a text is cut off.
        dataset: As for `TextClassification`.
        prompt: Template of the text before an answer, with names of columns in braces. A value that is missing, such
            as ``None`` or NaN, is an empty text. Default: Alpaca's, with the column ``instruction``.
        answer: Column of the answers.
        messages: Column of conversations: lists of dictionaries with ``role`` and ``content``, or with ``from`` and
            ``value``.
        text: Column of plain texts.
        packing: Whether training batches put several texts into a row of ``max_length``.
        group_by_length: As for `TextClassification`.
        pad_to_multiple_of: As for `TextClassification`; packed rows too.
        stratify: Column, such as the clients', of each of whose values the same share is held out. ``None``: all rows
            are drawn alike.
        seed: Seed of the held-out texts.

    Raises:
        MisconfigurationException: If an argument is out of range, a file, split or column is missing, a row is
            malformed (it is named), the tokenizer cannot be loaded or does not fit, or transformers or `datasets` is
            needed and not installed.

    Example:
        >>> rows = [{"instruction": "Name a colour.", "output": "Blue."}]
        >>> data = Instructions(tokenizer="openlm-research/open_llama_3b_v2", dataset={"train": rows}, validation=0.5)
        >>> data.parts["validate"]
        'train'
    """

    def __init__(
        self,
        root: str = "data",
        tokenizer: Any = None,
        train: str | None = None,
        validation: float | str | None = None,
        test: str | None = None,
        max_length: int = 512,
        batch_size: int = 16,
        eval_batch_size: int = 16,
        num_workers: int = 0,
        dataset: Any = None,
        prompt: str | None = None,
        answer: str = "output",
        messages: str | None = None,
        text: str | None = None,
        packing: bool = False,
        group_by_length: bool = False,
        pad_to_multiple_of: int | None = None,
        stratify: str | None = None,
        seed: int = 0,
    ) -> None:
        given = {"prompt": prompt, "messages": messages, "text": text}
        chosen = [f"{name}={value!r}" for name, value in given.items() if value is not None]
        if len(chosen) > 1:
            raise MisconfigurationException(f"{' and '.join(chosen)}: give one of prompt, messages and text")
        share = None if validation is None or isinstance(validation, str) else validation
        if share is not None and not 0 < share < 1:
            raise MisconfigurationException(f"validation must be a name, or a share above 0 and below 1, got {share}")
        files, splits = ("train.jsonl", "validation.jsonl", "test.jsonl"), ("train", "validation", "test")
        names = names_of_parts((train, None if share else validation, test), dataset, files, splits)  # type: ignore[arg-type]
        if share is not None:
            names[1] = names[0]
        if test is None:
            names[2] = names[1]
        if packing and group_by_length:
            raise MisconfigurationException(
                "packing=True and group_by_length=True exclude each other: packed rows have hardly any padding. Leave"
                " out one of them"
            )
        super().__init__(
            *(root, tokenizer, names, max_length, batch_size, eval_batch_size, num_workers, dataset),
            group_by_length=group_by_length,
            pad_to_multiple_of=pad_to_multiple_of,
        )
        if stratify is not None and share is None:
            raise MisconfigurationException(
                f"stratify={stratify!r} is for a held-out share, and validation={validation!r} is no share: give one"
                " such as validation=0.1, or leave out stratify"
            )
        self.share, self.stratify, self.seed = share, stratify, seed
        self._held_back = {"validate", *(() if test is not None else ("test",))} if share is not None else set()
        self.packing = packing
        self.messages = messages
        self.text = text
        self.answer = answer
        self.prompt = ALPACA if prompt is None else prompt
        try:
            fields = [field for _, field, _, _ in string.Formatter().parse(self.prompt) if field is not None]
        except ValueError as error:
            raise MisconfigurationException(f"prompt={prompt!r} is no template: {error}") from error
        if not all(field.isidentifier() for field in fields):
            raise MisconfigurationException(f"prompt={prompt!r} must have names of columns in its braces, got {fields}")
        self._fields = fields

    def collate(self) -> Callable[[Sequence[Any]], Any]:
        """Return `PadTexts` with the tokenizer's own padding."""
        return PadTexts(self._padding(), self.pad_to_multiple_of)

    def train_dataloader(self) -> DataLoader:
        """Shuffled batches of the training set, packed if ``packing`` is set."""
        loader = super().train_dataloader()
        if self.packing:
            loader.collate_fn = PackTexts(self._padding(), self.max_length, self.pad_to_multiple_of)
        return loader

    def decode(self, tokens: Tensor) -> list[str]:
        """The texts of rows of tokens, such as the answers that `CausalLM` predicts, without special tokens."""
        return [text.strip() for text in self.load_tokenizer().batch_decode(tokens, skip_special_tokens=True)]

    def read(self, part: str) -> Table:
        """The rows of ``fit``, ``validate`` or ``test``."""
        table = super().read(part)
        if self.share is None or not (part == "fit" or part in self._held_back):
            return table
        groups = torch.zeros(len(table), dtype=torch.int64)
        if self.stratify is not None:
            values = [str(value) for value in table[table.find((self.stratify,), "stratify")]]
            numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
            groups = torch.tensor([numbers[value] for value in values])
        kept, held_out = hold_out(groups, self.share, self.seed, "validation", f"rows of {table.source}")
        return table.select((kept if part == "fit" else held_out).tolist())

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raise if the tokenizer has no end token, or no chat template although conversations need one."""
        super().check_tokenizer(tokenizer)
        if self.messages is not None:
            if getattr(tokenizer, "chat_template", None) is None:
                raise MisconfigurationException(
                    f"tokenizer={self.tokenizer!r} has no chat template, which messages={self.messages!r} needs: take"
                    " that of the model's chat version, or set tokenizer.chat_template and save it"
                )
        elif tokenizer.eos_token_id is None:
            raise MisconfigurationException(
                f"tokenizer={self.tokenizer!r} has no end token, by which a model ends its answers: set"
                " tokenizer.eos_token and save it"
            )

    def tokenize(self, part: str, table: Table) -> AnsweredTexts:
        """The samples of a split."""
        tokenizer = self.load_tokenizer()
        if self.messages is not None:
            found = self._conversations(tokenizer, table, self.messages)
        else:
            found = self._answers(tokenizer, table)
        cut = [(ids[: self.max_length], answered[: self.max_length]) for ids, answered in found]
        # A text's first token is never predicted, so it does not count.
        kept = [row for row, (_, answered) in enumerate(cut) if any(answered[1:])]
        if not kept:
            raise MisconfigurationException(
                f"{table.source}: no text has a token to predict with max_length={self.max_length}: raise it"
            )
        if len(kept) < len(cut):
            rank_zero_warn(
                f"{table.source}: {len(cut) - len(kept)} of {len(cut)} texts have nothing to predict within"
                f" max_length={self.max_length} and are dropped."
            )
        return AnsweredTexts([cut[row][0] for row in kept], [cut[row][1] for row in kept], table.select(kept))

    def _padding(self) -> int:
        tokenizer = self.load_tokenizer()
        return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def _answers(self, tokenizer: Any, table: Table) -> list[tuple[list[int], list[bool]]]:
        if self.text is not None:
            answers, prompts = self._texts(table, self.text, "text"), [""] * len(table)
        else:
            answers = self._texts(table, self.answer, "answer")
            columns = {name: list(table[table.find((name,), "prompt")]) for name in self._fields}
            prompts = [
                self.prompt.format(**{name: _or_empty(column[row]) for name, column in columns.items()})
                for row in range(len(table))
            ]
        begin = tokenizer("")["input_ids"][:1]
        begin = begin if begin == [tokenizer.bos_token_id] else []
        # Tokenised separately, so that no token spans both.
        before, after = (
            tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
            for texts in (prompts, answers)
        )
        end = tokenizer.eos_token_id
        return [
            ([*begin, *prompt, *answer, end], [False] * (len(begin) + len(prompt)) + [True] * (len(answer) + 1))
            for prompt, answer in zip(before, after, strict=True)
        ]

    def _texts(self, table: Table, name: str, argument: str) -> list[str]:
        column = list(table[table.find((name,), argument)])
        other = next((row for row, text in enumerate(column) if not isinstance(text, str)), None)
        if other is not None:
            raise MisconfigurationException(f"{table.place(other)}: {name} is no text, but {column[other]!r}")
        return column

    def _conversations(self, tokenizer: Any, table: Table, name: str) -> list[tuple[list[int], list[bool]]]:
        found = []
        for row, turns in enumerate(table[table.find((name,), "messages")]):
            try:
                found.append(_conversation(tokenizer, turns))
            except _Malformed as error:
                raise MisconfigurationException(f"{table.place(row)}: {name} {error}") from error
        return found


class _Malformed(Exception):
    """A conversation that cannot be read."""


def _conversation(tokenizer: Any, turns: Any) -> tuple[list[int], list[bool]]:
    """The tokens of a conversation, and a mask of the assistant's tokens."""
    if (
        not isinstance(turns, Sequence)
        or isinstance(turns, str)
        or not all(isinstance(each, Mapping) for each in turns)
    ):
        raise _Malformed(f"must be a list of dictionaries, got {str(turns)[:80]!r}")
    messages = []
    for each in turns:
        role, content = each.get("role", each.get("from")), each.get("content", each.get("value"))
        if not (isinstance(role, str) and isinstance(content, str)):
            raise _Malformed(f"must have a role and a content in each message, got {dict(each)}")
        messages.append({"role": _ROLES.get(role, role), "content": content})

    def written(count: int, ask: bool) -> list[int]:
        try:
            text = tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=ask)
        except Exception as error:
            # Templates raise errors of jinja, which transformers does not wrap.
            raise _Malformed(f"does not fit the tokenizer's chat template: {error}") from error
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    ids = written(len(messages), False)
    answered = [False] * len(ids)
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start, end = written(place, True), written(place + 1, False)
        if end[: len(start)] != start or ids[: len(end)] != end:
            raise _Malformed(
                "is written differently by the tokenizer's chat template if further messages follow, so that the"
                " assistant's"
                " tokens cannot be identified: give conversations with a single answer, or another template"
            )
        answered[len(start) : len(end)] = [True] * (len(end) - len(start))
    return ids, answered


def _or_empty(value: Any) -> Any:
    return "" if is_missing(value) else value
