"""Text classification from tab-separated files, tokenised once and padded batch by batch.

All texts of a file are tokenised in one call, and kept as one tensor of tokens with the place where each text begins. A
batch is padded only to its own longest text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from lightning_lowrank.configuration import check_integer
from lightning_lowrank.data.splits import SplitsInMemory
from lightning_lowrank.interop.transformers import import_transformers

_HEADER_LABELS = ("label", "labels")


class TokenizedTexts(Dataset[dict[str, Any]]):
    """Tokenised texts of different lengths and their class indices, in memory.

    A sample is ``{"input_ids": tokens, "labels": class}`` with an int64 tensor of the text's own length. `PadTexts`
    makes a batch of samples.

    Args:
        input_ids: Token indices of each text, special tokens included.
        targets: Class index of each text; kept as a ``LongTensor`` in the attribute of the same name.

    Raises:
        ValueError: If there is not one class index for each text, or a text has no tokens.

    Example:
        >>> dataset = TokenizedTexts([[101, 7, 102], [101, 8, 9, 102]], targets=[1, 0])
        >>> dataset[1]
        {'input_ids': tensor([101,   8,   9, 102]), 'labels': 0}
        >>> len(dataset), dataset.targets
        (2, tensor([1, 0]))
    """

    deterministic = True

    def __init__(self, input_ids: Sequence[Sequence[int]], targets: Sequence[int]) -> None:
        if len(targets) != len(input_ids):
            raise ValueError(
                f"targets must hold one class index for each of {len(input_ids)} texts, got {len(targets)}"
            )
        empty = next((index for index, tokens in enumerate(input_ids) if not len(tokens)), None)
        if empty is not None:
            raise ValueError(f"input_ids must hold at least one token for each text, and text {empty} has none")
        self.targets = torch.as_tensor(targets, dtype=torch.int64)
        self._tokens = torch.from_numpy(np.fromiter(chain.from_iterable(input_ids), dtype=np.int32))
        self._ends = list(accumulate(map(len, input_ids), initial=0))

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]
        tokens = self._tokens[self._ends[index] : self._ends[index + 1]]
        return {"input_ids": tokens.long(), "labels": int(self.targets[index])}


class PadTexts:
    """Collate function that pads samples of `TokenizedTexts` on the right, to the longest of them.

    Args:
        padding: The token to pad with, which the attention mask hides.

    Example:
        >>> dataset = TokenizedTexts([[101, 7, 102], [101, 8, 9, 102]], targets=[1, 0])
        >>> for name, tensor in PadTexts(padding=0)([dataset[0], dataset[1]]).items():
        ...     print(name, tensor.tolist())
        input_ids [[101, 7, 102, 0], [101, 8, 9, 102]]
        attention_mask [[1, 1, 1, 0], [1, 1, 1, 1]]
        labels [1, 0]
    """

    deterministic = True

    def __init__(self, padding: int) -> None:
        self.padding = padding

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``attention_mask``, ``(batch, longest)``, and ``labels``, ``(batch,)``; int64."""
        texts = [sample["input_ids"] for sample in samples]
        lengths = torch.tensor([len(text) for text in texts])
        input_ids = pad_sequence(texts, batch_first=True, padding_value=self.padding)
        return {
            "input_ids": input_ids,
            "attention_mask": (torch.arange(input_ids.shape[1]) < lengths.unsqueeze(1)).long(),
            "labels": torch.tensor([sample["labels"] for sample in samples]),
        }


class TextClassification(SplitsInMemory):
    """Sentences and their classes from three files, for a pretrained transformer; such as SST-2.

    A line of a file is a text, a tab and its label, in UTF-8. GLUE's SST-2 is stored in this way, with a first line of
    column names (``header``). A batch is a dictionary of ``input_ids``, ``attention_mask`` and ``labels``, as the
    models of transformers take it, padded to its longest text. Clients that step together
    (``execution="vectorized"``) with batches of one size are padded to one length.

    The training set has its class indices in ``targets``, where `Dirichlet` and other partitions by label find them.
    Arguments that are not named here are those of `SplitsInMemory`.

    Args:
        root: Folder of the files.
        tokenizer: Name of a tokenizer on the Hugging Face hub, or a local folder that holds one: the model's own.
        train_file: Name of the training file in ``root``.
        validation_file: Name of the validation file.
        test_file: Name of the file that ``test`` and ``predict`` read.
        max_length: Tokens at which a text is cut off, special tokens included.
        labels: The labels in the order of their class indices. Default: those of the training file, sorted (as numbers
            where all of them are).
        header: Whether the files begin with a line of column names. Default no.

    Attributes:
        classes: The labels in the order of their class indices, once a stage is set up.

    Raises:
        MisconfigurationException: If an argument is out of range, a file is missing, a line is malformed or has an
            unknown label (the file and line are named), the tokenizer cannot be loaded or does not fit, or transformers
            is not installed.

    Example:
        >>> data = TextClassification("data/SST2", tokenizer="sentence-transformers/all-MiniLM-L6-v2", batch_size=32)
        >>> data.max_length
        128
    """

    def __init__(
        self,
        root: str,
        tokenizer: str,
        train_file: str = "train.tsv",
        validation_file: str = "dev.tsv",
        test_file: str = "test.tsv",
        max_length: int = 128,
        batch_size: int = 32,
        eval_batch_size: int = 256,
        num_workers: int = 0,
        labels: list[str] | None = None,
        header: bool = False,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, num_workers)
        check_integer("max_length", max_length)
        if labels is not None and (len(labels) < 2 or len(set(labels)) < len(labels)):
            raise MisconfigurationException(
                f"labels must be two or more different ones, or None for those of {train_file}, got {labels!r}"
            )
        self.root = root
        self.tokenizer = tokenizer
        self.files = {"fit": train_file, "validate": validation_file, "test": test_file}
        self.max_length = max_length
        self.labels = labels
        self.header = header
        self.classes: list[str] | None = None
        self._loaded: Any = None

    def setup(self, stage: str | None = None) -> None:
        """Read and tokenise what ``stage`` needs (``None``: everything), unless it is loaded already."""
        wanted = {
            "fit": stage in (None, "fit") and self.train_set is None,
            "validate": stage in (None, "fit", "validate") and self.validation_set is None,
            "test": stage in (None, "test", "predict") and self.test_set is None,
        }
        read = {part: self._read(self.files[part]) for part, missing in wanted.items() if missing}
        if read and self.classes is None:
            self.classes = self.labels or self._labels_of(read.get("fit") or self._read(self.files["fit"]))
        sets = {part: self._tokenize(self.files[part], samples) for part, samples in read.items()}
        self.train_set = sets.get("fit", self.train_set)
        self.validation_set = sets.get("validate", self.validation_set)
        self.test_set = sets.get("test", self.test_set)

    def collate(self) -> PadTexts:
        """Return `PadTexts` with the tokenizer's own padding."""
        return PadTexts(self._tokenizer().pad_token_id)

    def _read(self, name: str) -> list[tuple[str, str]]:
        """Return the text and the label of each line of a file, except the header's."""
        path = Path(self.root, name)
        if not path.parent.is_dir():
            raise MisconfigurationException(f"root={self.root!r}: there is no folder {path.parent}")
        if not path.is_file():
            present = ", ".join(sorted(file.name for file in path.parent.iterdir())[:10]) or "nothing"
            raise MisconfigurationException(f"there is no file {path}; {path.parent} holds {present}")
        try:
            lines = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            raise MisconfigurationException(f"{path} is not UTF-8: {error}") from error
        samples = []
        for number, line in enumerate(lines, start=1):
            parts = [part.strip() for part in line.split("\t")]
            if len(parts) != 2 or not all(parts):
                raise MisconfigurationException(
                    f"{path}, line {number}: a line must be a text, one tab and a label, got {line[:80]!r}"
                )
            samples.append((parts[0], parts[1]))
        if not self.header and self.labels is None and samples[0][1].lower() in _HEADER_LABELS:
            raise MisconfigurationException(
                f"{path} begins with column names, {lines[0]!r}: set header=True (or, if it is a text, name all labels)"
            )
        if self.header and len(samples) == 1:
            raise MisconfigurationException(f"{path} holds no line but its header, {lines[0]!r}")
        return samples[1:] if self.header else samples

    def _labels_of(self, samples: Sequence[tuple[str, str]]) -> list[str]:
        found = sorted({label for _, label in samples})
        if len(found) < 2:
            raise MisconfigurationException(
                f"{Path(self.root, self.files['fit'])} has no label but {found[0]!r}, and a classifier needs two"
            )
        return sorted(found, key=int) if all(map(str.isdecimal, found)) else found

    def _tokenize(self, name: str, samples: Sequence[tuple[str, str]]) -> TokenizedTexts:
        assert self.classes is not None
        index_of = {label: index for index, label in enumerate(self.classes)}
        for number, (_, label) in enumerate(samples, start=2 if self.header else 1):
            if label not in index_of:
                source = f"of {self.files['fit']}" if self.labels is None else "given"
                raise MisconfigurationException(
                    f"{Path(self.root, name)}, line {number}: unknown label {label!r}; the labels {source} are"
                    f" {', '.join(self.classes[:20])}"
                )
        texts = [text for text, _ in samples]
        encoded = self._tokenizer()(texts, truncation=True, max_length=self.max_length, return_attention_mask=False)
        return TokenizedTexts(encoded["input_ids"], [index_of[label] for _, label in samples])

    def _tokenizer(self) -> Any:
        """Load the tokenizer once, and check that it can cut texts off at ``max_length`` and pad them."""
        if self._loaded is None:
            library = import_transformers(type(self).__name__)
            try:
                tokenizer = library.AutoTokenizer.from_pretrained(self.tokenizer)
            except (OSError, ValueError) as error:
                raise MisconfigurationException(
                    f"tokenizer={self.tokenizer!r} cannot be loaded: give a name on the Hugging Face hub or a local"
                    f" folder with a tokenizer. {error}"
                ) from error
            if tokenizer.pad_token_id is None:
                raise MisconfigurationException(
                    f"tokenizer={self.tokenizer!r} has no padding token, which a batch of texts needs: save one with it"
                    " (tokenizer.pad_token = tokenizer.eos_token) and give its folder"
                )
            lowest, highest = tokenizer.num_special_tokens_to_add() + 1, tokenizer.model_max_length
            if not lowest <= self.max_length <= highest:
                raise MisconfigurationException(
                    f"max_length={self.max_length} does not fit tokenizer={self.tokenizer!r}, which takes {lowest}"
                    f" (one token beside the special ones) to {highest}"
                )
            self._loaded = tokenizer
        return self._loaded
