"""Tokenised texts in memory, and collate functions that pad or pack them.

All texts of a file are tokenised in one call, and kept as one tensor of tokens with the place where each text begins. A
batch is padded only to its own longest text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, overload

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from lightning_lowrank.data.tables import HasColumns, Table
from lightning_lowrank.extras import import_extra

IGNORED = -100
"""The label of a token that is not predicted, as in `torch.nn.functional.cross_entropy`."""


class TokenizedTexts(HasColumns, Dataset[dict[str, Any]]):
    """Tokenised texts of different lengths and their targets, in memory.

    A sample is ``{"input_ids": tokens, "labels": target}`` with an int64 tensor of the text's own length, and
    ``token_type_ids`` if given. `PadTexts` makes a batch of samples.

    Args:
        input_ids: Token indices of each text, special tokens included.
        targets: Class index of each text, kept as a ``LongTensor`` in the attribute of the same name; or the number
            to predict for each, a ``FloatTensor``. ``None``: samples have no ``labels``.
        token_types: For each text which of its tokens are of the first text of a pair (0) and of the second (1).
        columns: Further columns of the texts. ``dataset["speaker"]`` is the column of that name, and
            ``ByKey("speaker")`` finds it.

    Attributes:
        lengths: Number of tokens of each text, int64.

    Raises:
        ValueError: If there is not one target for each text, or a text has no tokens.

    Example:
        >>> dataset = TokenizedTexts([[101, 7, 102], [101, 8, 9, 102]], targets=[1, 0])
        >>> dataset[1]
        {'input_ids': tensor([101,   8,   9, 102]), 'labels': 0}
        >>> len(dataset), dataset.targets, dataset.lengths
        (2, tensor([1, 0]), tensor([3, 4]))
    """

    deterministic = True

    def __init__(
        self,
        input_ids: Sequence[Sequence[int]],
        targets: Sequence[int] | Sequence[float] | None = None,
        token_types: Sequence[Sequence[int]] | None = None,
        columns: Table | None = None,
    ) -> None:
        self.targets: Tensor | None = None
        if targets is not None:
            if len(targets) != len(input_ids):
                raise ValueError(f"targets must hold one target for each of {len(input_ids)} texts, got {len(targets)}")
            self.targets = torch.as_tensor(targets)
            self.targets = self.targets.float() if self.targets.is_floating_point() else self.targets.long()
        empty = next((index for index, tokens in enumerate(input_ids) if not len(tokens)), None)
        if empty is not None:
            raise ValueError(f"input_ids must hold at least one token for each text, and text {empty} has none")
        self._tokens = torch.from_numpy(np.fromiter(chain.from_iterable(input_ids), dtype=np.int32))
        self._ends = list(accumulate(map(len, input_ids), initial=0))
        self._types = None if token_types is None else _flat(token_types, np.int8)
        self.columns = columns
        self.rows = None if columns is None else columns.rows
        self.lengths = torch.tensor(self._ends).diff()

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: str) -> Sequence[Any]: ...

    def __getitem__(self, index: int | str) -> Any:
        if isinstance(index, str):
            return self.column(index)
        return self._sample(range(len(self))[index])

    def _sample(self, index: int) -> dict[str, Any]:
        place = self._place(index)
        sample: dict[str, Any] = {"input_ids": self._tokens[place].long()}
        if self._types is not None:
            sample["token_type_ids"] = self._types[place].long()
        if self.targets is not None:
            sample["labels"] = self.targets[index].item()
        return sample

    def _place(self, index: int) -> slice:
        return slice(self._ends[index], self._ends[index + 1])


class AnsweredTexts(TokenizedTexts):
    """Tokenised texts with labels for some of their tokens, such as those of answers to prompts.

    A sample is ``{"input_ids": tokens, "labels": labels}``, both of the text's own length. Labels are the tokens
    themselves where they are to be predicted, and -100 elsewhere. A model of transformers shifts them by one itself.

    Args:
        input_ids: Token indices of each text.
        answered: For each token whether it is to be predicted.
        columns: As for `TokenizedTexts`.

    Example:
        >>> AnsweredTexts([[5, 6, 7, 2]], [[False, False, True, True]])[0]
        {'input_ids': tensor([5, 6, 7, 2]), 'labels': tensor([-100, -100,    7,    2])}
    """

    def __init__(
        self, input_ids: Sequence[Sequence[int]], answered: Sequence[Sequence[bool]], columns: Table | None = None
    ) -> None:
        super().__init__(input_ids, columns=columns)
        self._answered = _flat(answered, np.bool_)
        if len(self._answered) != len(self._tokens):
            raise ValueError("answered must hold True or False for each token of input_ids")

    def _sample(self, index: int) -> dict[str, Any]:
        sample, answered = super()._sample(index), self._answered[self._place(index)]
        sample["labels"] = sample["input_ids"].masked_fill(~answered, IGNORED)
        return sample


class PadTexts:
    """Collate function that pads samples on the right, to the longest or to a multiple.

    Samples are dictionaries of ``input_ids`` and, if all have them, ``token_type_ids`` (padded with 0) and
    ``labels``: numbers, or a label for each token (padded with -100).

    Args:
        padding: The token to pad with, which the attention mask hides.
        multiple_of: The length of a batch is a multiple of it. Default: the length of its longest text.

    Example:
        >>> dataset = TokenizedTexts([[101, 7, 102], [101, 8, 9, 102]], targets=[1, 0])
        >>> for name, tensor in PadTexts(padding=0)([dataset[0], dataset[1]]).items():
        ...     print(name, tensor.tolist())
        input_ids [[101, 7, 102, 0], [101, 8, 9, 102]]
        attention_mask [[1, 1, 1, 0], [1, 1, 1, 1]]
        labels [1, 0]
    """

    deterministic = True

    def __init__(self, padding: int, multiple_of: int | None = None) -> None:
        self.padding = padding
        self.multiple_of = multiple_of

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``attention_mask``, ``(batch, length)``, and the rest; int64 or float32."""
        texts = [torch.as_tensor(sample["input_ids"]) for sample in samples]
        lengths = torch.tensor([len(text) for text in texts])
        input_ids = _padded(texts, self.padding, self.multiple_of)
        batch = {
            "input_ids": input_ids,
            "attention_mask": (torch.arange(input_ids.shape[1]) < lengths.unsqueeze(1)).long(),
        }
        if "token_type_ids" in samples[0]:
            batch["token_type_ids"] = _padded([sample["token_type_ids"] for sample in samples], 0, self.multiple_of)
        if "labels" in samples[0]:
            labels = [sample["labels"] for sample in samples]
            by_token = isinstance(labels[0], (Sequence, Tensor)) and torch.as_tensor(labels[0]).ndim
            batch["labels"] = _padded(labels, IGNORED, self.multiple_of) if by_token else torch.tensor(labels)
        return batch


class PackTexts:
    """Collate function that packs several texts into one row, to reduce padding.

    Each text goes into the first row that has room, or begins a new row. ``segments`` numbers the texts of a row from
    1, with 0 for padding, and ``position_ids`` begin at 0 in each text. `CausalLM` makes an attention mask of
    ``segments`` that keeps texts apart, so that the results are those of padded texts, and refuses models that would
    not keep them apart. Only texts of one batch, and so of one client, are packed together.

    Args:
        padding: The token to pad with.
        max_length: Tokens of a row at most. A longer text is refused.
        multiple_of: As for `PadTexts`.

    Example:
        >>> pack = PackTexts(padding=0, max_length=6)
        >>> texts = AnsweredTexts([[5, 6, 7], [8, 9, 5, 2], [7, 2]], [[False, True, True], [True] * 4, [True, True]])
        >>> for name, tensor in pack([texts[0], texts[1], texts[2]]).items():
        ...     print(name, tensor.tolist())
        input_ids [[5, 6, 7, 7, 2], [8, 9, 5, 2, 0]]
        segments [[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]]
        position_ids [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
        labels [[-100, 6, 7, -100, 2], [-100, 9, 5, 2, -100]]
    """

    deterministic = True

    def __init__(self, padding: int, max_length: int, multiple_of: int | None = None) -> None:
        self.padding = padding
        self.max_length = max_length
        self.multiple_of = multiple_of

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return ``input_ids``, ``segments``, ``position_ids`` and ``labels``, ``(rows, length)`` each; int64."""
        rows: list[list[int]] = []
        filled: list[int] = []
        lengths = [len(sample["input_ids"]) for sample in samples]
        for index, length in enumerate(lengths):
            if length > self.max_length:
                raise ValueError(f"a text of {length} tokens does not fit into rows of max_length={self.max_length}")
            row = next((row for row, used in enumerate(filled) if used + length <= self.max_length), len(rows))
            if row == len(rows):
                rows.append([])
                filled.append(0)
            rows[row].append(index)
            filled[row] += length

        def joined(part: Any, padding: int) -> Tensor:
            texts = [torch.cat([part(number, index) for number, index in enumerate(row)]) for row in rows]
            return _padded(texts, padding, self.multiple_of)

        def labels_of(number: int, index: int) -> Tensor:
            # The token before a text's first token belongs to another text.
            labels = torch.as_tensor(samples[index]["labels"]).clone()
            labels[0] = IGNORED
            return labels

        return {
            "input_ids": joined(lambda _, index: torch.as_tensor(samples[index]["input_ids"]), self.padding),
            "segments": joined(lambda number, index: torch.full((lengths[index],), number + 1), 0),
            "position_ids": joined(lambda _, index: torch.arange(lengths[index]), 0),
            "labels": joined(labels_of, IGNORED),
        }


def load_tokenizer(tokenizer: Any, user: str) -> Any:
    """Load a tokenizer by its name on the Hugging Face hub or from a local folder; another object is returned as it is.

    Raises:
        MisconfigurationException: If it cannot be loaded, or transformers is not installed.
    """
    if tokenizer is None:
        raise MisconfigurationException(f"{user} needs tokenizer=, the model's own: its name, folder or object")
    if not isinstance(tokenizer, str):
        return tokenizer
    library = import_extra("transformers", user)
    try:
        return library.AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise MisconfigurationException(
            f"tokenizer={tokenizer!r} cannot be loaded: give a name on the Hugging Face hub or a local folder with a"
            f" tokenizer. {error}"
        ) from error


def _flat(parts: Sequence[Sequence[Any]], dtype: Any) -> Tensor:
    return torch.from_numpy(np.fromiter(chain.from_iterable(parts), dtype=dtype))


def _padded(parts: Sequence[Any], padding: int, multiple_of: int | None) -> Tensor:
    rows = pad_sequence([torch.as_tensor(part) for part in parts], batch_first=True, padding_value=padding)
    further = -rows.shape[1] % (multiple_of or 1)
    return F.pad(rows, (0, further), value=padding) if further else rows
