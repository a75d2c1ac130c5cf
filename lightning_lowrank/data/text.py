"""Text classification: texts or pairs of texts with a class or a number each, from files or Hugging Face `datasets`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.data.classes import check_class_names, is_number
from lightning_lowrank.data.glue import COLA_COLUMNS, LABEL, glue_task
from lightning_lowrank.data.tables import Table, read_table, read_text
from lightning_lowrank.data.text_splits import TextSplits, names_of_parts
from lightning_lowrank.data.tokenized import PadTexts, TokenizedTexts
from lightning_lowrank.federated.data.columns import is_blank, is_missing

_HEADER_LABELS = ("label", "labels")
_TEXT = (("text", "sentence"),)


class TextClassification(TextSplits):
    """Texts or pairs of texts and their labels, for a pretrained transformer; such as SST-2 and the rest of GLUE.

    By default a line of a file is a text, a tab and its label, in UTF-8, after a first line of column names if
    ``header`` says so. With ``text`` or ``task``, files have named columns: ``.jsonl``, ``.json``, ``.csv``, or
    tab-separated columns. With ``dataset`` the splits are Hugging Face's (extra ``datasets``) or lists of dictionaries.

    A batch is a dictionary of ``input_ids``, ``attention_mask``, ``labels``, and for pairs ``token_type_ids`` if the
    tokenizer makes them, as the models of transformers take it, padded to its longest text. Clients that step together
    (``execution="vectorized"``) with batches of one size are padded to one length.

    The training set has its class indices in ``targets``, where `Dirichlet` and other partitions by label find them,
    the number of tokens of each text in ``lengths``, and the rows' columns, where ``ByKey("speaker")`` finds clients.
    A partition by label cannot divide numbers to predict: give it ``groups``, such as `LengthGroups`, or use a
    partition that reads no labels.

    Arguments that are not named here are those of `SplitsInMemory`.

    Args:
        root: Folder of the files; with ``dataset`` where downloads are kept.
        tokenizer: Name of a tokenizer on the Hugging Face hub, or a local folder that holds one: the model's own. Or
            the tokenizer itself.
        train: Name of the training file in ``root``, by default ``train.tsv``; with ``dataset`` of the split, by
            default ``train``.
        validation: The same to validate on: ``dev.tsv``; ``validation``, or the task's (``validation_matched``).
        test: The same that ``test`` and ``predict`` read: ``test.tsv``; ``test``, or the task's. It may lack labels.
        max_length: Tokens at which a text or pair is cut off, special tokens included; of a pair the longer text first.
        labels: The labels in the order of their class indices. Labels that are plain integers in the data are the
            indices themselves, unless one of these is a number. Default: those of the task; the names of a
            ``ClassLabel`` column, in its order; or those of the training set, sorted (as numbers if all are numbers).
        header: Whether files of two columns begin with a line of column names. Default no.
        dataset: Name of a data set on the Hugging Face hub or a local folder, or a list of the name and its
            configuration: ``["nyu-mll/glue", "mrpc"]``. Or its splits by name, each a `datasets.Dataset`, not streamed
            and without a transform, or a list of dictionaries.
        task: Name of a task of GLUE (``cola``, ``sst2``, ``mrpc``, ``qqp``, ``stsb``, ``mnli``, ``qnli``, ``rte``,
            ``wnli``), whose columns and labels are known, on the hub and in GLUE's own files.
        text: Column of the texts, or the two columns of pairs.
        label: Column of the labels.
        regression: Whether labels are numbers to predict. Default: only for ``stsb``.
        group_by_length: Whether texts of like length are in one batch, in training and validation, so that less of it
            is padding. The samples of a round are the same; which of them share a batch is not. Default no.
        pad_to_multiple_of: Pads each batch to a multiple of this number, which must divide ``max_length``. Only
            clients whose batches are of one length step together (``execution="vectorized"``), and steps of one length
            are compiled: ``max_length`` itself gives one length, 16 gives a few. Default: each batch is padded
            to its own longest text.

    Attributes:
        classes: The labels in the order of their class indices, once a stage is set up; none for a regression.

    Raises:
        MisconfigurationException: If an argument is out of range, a file, split or column is missing, a line is
            malformed or has an unknown label (the file and line are named), the tokenizer cannot be loaded or does not
            fit, or transformers or `datasets` is needed and not installed.

    Example:
        >>> data = TextClassification("data/SST2", tokenizer="sentence-transformers/all-MiniLM-L6-v2", batch_size=32)
        >>> data.max_length
        128
        >>> rows = [{"premise": "It rains.", "hypothesis": "It is wet.", "label": 0}]
        >>> pairs = TextClassification(
        ...     tokenizer="roberta-base", dataset={"train": rows, "validation": rows}, text=["premise", "hypothesis"]
        ... )
    """

    def __init__(
        self,
        root: str = "data",
        tokenizer: Any = None,
        train: str | None = None,
        validation: str | None = None,
        test: str | None = None,
        max_length: int = 128,
        batch_size: int = 32,
        eval_batch_size: int = 256,
        num_workers: int = 0,
        labels: list[str] | None = None,
        header: bool = False,
        dataset: Any = None,
        task: str | None = None,
        text: str | list[str] | None = None,
        label: str | None = None,
        regression: bool | None = None,
        group_by_length: bool = False,
        pad_to_multiple_of: int | None = None,
    ) -> None:
        found = None if task is None else glue_task(task)
        splits = ("train", "validation", "test") if found is None else ("train", found.validation, found.test)
        parts = names_of_parts((train, validation, test), dataset, ("train.tsv", "dev.tsv", "test.tsv"), splits)
        super().__init__(
            *(root, tokenizer, parts, max_length, batch_size, eval_batch_size, num_workers, dataset),
            group_by_length=group_by_length,
            pad_to_multiple_of=pad_to_multiple_of,
        )
        given = [text] if isinstance(text, str) else text
        if given is not None and len(given) not in (1, 2):
            raise MisconfigurationException(f"text must name one column, or the two of pairs, got {text!r}")
        self.regression = regression if regression is not None else found is not None and found.regression
        labels = check_class_names("labels", labels)
        if labels is not None and self.regression:
            raise MisconfigurationException(
                f"labels={labels!r} are classes, but regression=True predicts numbers: leave out one of them"
            )
        self.task = task
        self.labels = labels if labels is not None or found is None else list(found.labels) or None
        self.header = header
        self.classes: list[str] | None = None
        self._texts = tuple((name,) for name in given) if given else found.texts if found else _TEXT
        self._label = LABEL if label is None else (label,)
        self._two_columns = dataset is None and found is None and given is None

    def prepare(self, read: Mapping[str, Table]) -> None:
        """Find the classes in the labels, if they are neither given nor known."""
        if read and self.classes is None and not self.regression:
            self.classes = self.labels or self._classes_of(read["fit"] if "fit" in read else self.read("fit"))

    def collate(self) -> PadTexts:
        """Return `PadTexts` with the tokenizer's own padding."""
        return PadTexts(self.load_tokenizer().pad_token_id, self.pad_to_multiple_of)

    def read_file(self, path: Path, part: str) -> Table:
        """The rows of a file."""
        if self._two_columns:
            return self._read_two_columns(path)
        return read_table(path, COLA_COLUMNS if self.task == "cola" and part != "test" else None)

    def _read_two_columns(self, path: Path) -> Table:
        """The texts and labels of a file's lines, without the header."""
        lines = read_text(path).removesuffix("\n").split("\n")
        samples = []
        for number, line in enumerate(lines, start=1):
            parts = [part.strip() for part in line.split("\t")]
            if len(parts) != 2 or not all(parts):
                raise MisconfigurationException(
                    f"{path}, line {number}: a line must be a text, one tab and a label, got {line[:80]!r}; for other"
                    " columns name those of the texts (text=)"
                )
            samples.append((parts[0], parts[1]))
        if not self.header and self.labels is None and samples[0][1].lower() in _HEADER_LABELS:
            raise MisconfigurationException(
                f"{path} begins with column names, {lines[0]!r}: set header=True (or, if this line is a sample, name"
                " all labels)"
            )
        if self.header and len(samples) == 1:
            raise MisconfigurationException(f"{path} has no line after its header, {lines[0]!r}")
        texts, labels = zip(*samples[self.header :], strict=True)
        return Table({"text": texts, "label": labels}, str(path), first_line=1 + self.header)

    def _targets_of(self, table: Table, part: str) -> list[Any] | None:
        """The rows' labels as they were read; ``None`` for a test set without labels.

        Data sets on the hub put -1, or nothing, for a label that is kept back. Elsewhere -1 may be a class.
        """
        if part == "test" and not any(name in table.column_names for name in self._label):
            return None
        column = table.find(self._label, "label")
        # An empty cell of a .csv file is a label that is missing, as is NaN in the rows of a pandas table.
        values = [None if is_blank(value) or is_missing(value) else value for value in table[column]]
        kept_back = self.dataset is not None and (
            self.regression or column in table.classes or (self.classes is not None and "-1" not in self.classes)
        )
        missing = [value is None or (kept_back and value == -1) for value in values]
        if part == "test" and all(missing):
            return None
        lacking = [row for row, value in enumerate(values) if missing[row] and (value is None or not self.regression)]
        if lacking:
            found = table[column][lacking[0]]
            raise MisconfigurationException(
                f"{table.place(lacking[0])}: it has {found!r} in place of a label: leave the row out"
            )
        return values

    def _classes_of(self, table: Table) -> list[str]:
        values = self._targets_of(table, "fit") or ()
        named = table.classes.get(table.find(self._label, "label"))
        found = list(named) if named is not None else sorted({str(value) for value in values})
        if len(found) < 2:
            raise MisconfigurationException(
                f"{table.source} has only the label {found[0]!r}, but a classifier needs two; to predict numbers, set"
                " regression=True"
            )
        return sorted(found, key=float) if named is None and all(map(is_number, found)) else found

    def _indices_of(self, values: Sequence[Any], table: Table) -> list[int]:
        assert self.classes is not None
        index_of = {label: index for index, label in enumerate(self.classes)}
        named = table.classes.get(table.find(self._label, "label"))
        if self.labels is not None and named is not None and index_of.keys().isdisjoint(named):
            # For these tasks the hub has names where GLUE's own files have numbers.
            numbered = {name: index_of.get(str(number)) for number, name in enumerate(named)}
            index_of.update({name: index for name, index in numbered.items() if index is not None})
        elif self.labels is not None and all(map(_is_integer, values)) and not any(map(is_number, self.labels)):
            # For these tasks the hub has numbers where GLUE's own files have names.
            index_of.update({str(index): index for index in range(len(self.classes))})
        for row, value in enumerate(values):
            if str(value) not in index_of:
                source = f"of {self.parts['fit']}" if self.labels is None else "given"
                raise MisconfigurationException(
                    f"{table.place(row)}: unknown label {value!r}; the labels {source} are"
                    f" {', '.join(self.classes[:20])}"
                )
        return [index_of[str(value)] for value in values]

    def _numbers_of(self, values: Sequence[Any], table: Table) -> list[float]:
        numbers = []
        for row, value in enumerate(values):
            try:
                numbers.append(float(value))
            except (TypeError, ValueError):
                numbers.append(math.nan)
            if not math.isfinite(numbers[-1]):
                raise MisconfigurationException(f"{table.place(row)}: the label {value!r} is no finite number")
        return numbers

    def tokenize(self, part: str, table: Table) -> TokenizedTexts:
        """The samples of a split."""
        names = [table.find(names, "text") for names in self._texts]
        texts = [list(table[name]) for name in names]
        for name, column in zip(names, texts, strict=True):
            other = next((row for row, text in enumerate(column) if not isinstance(text, str)), None)
            if other is not None:
                raise MisconfigurationException(f"{table.place(other)}: {name} is no text, but {column[other]!r}")
        values = self._targets_of(table, part)
        read = self._numbers_of if self.regression else self._indices_of
        targets = None if values is None else read(values, table)
        encoded = self.load_tokenizer()(
            *texts, truncation=True, max_length=self.max_length, return_attention_mask=False
        )
        # Models assume zeros for a single text.
        types = encoded.get("token_type_ids") if len(texts) == 2 else None
        return TokenizedTexts(encoded["input_ids"], targets, types, table)

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raise if the tokenizer cannot truncate at ``max_length`` and pad."""
        if tokenizer.pad_token_id is None:
            raise MisconfigurationException(
                f"tokenizer={self.tokenizer!r} has no padding token, which a batch of texts needs: save one with it"
                " (tokenizer.pad_token = tokenizer.eos_token) and give its folder"
            )
        lowest = tokenizer.num_special_tokens_to_add(len(self._texts) == 2) + len(self._texts)
        highest = tokenizer.model_max_length
        if not lowest <= self.max_length <= highest:
            raise MisconfigurationException(
                f"max_length={self.max_length} does not fit tokenizer={self.tokenizer!r}, which takes {lowest}"
                f" (one token of each text in addition to the special ones) to {highest}"
            )


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
