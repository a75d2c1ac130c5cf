"""The tasks of GLUE (Wang et al. 2019): their columns, labels and metrics."""

from __future__ import annotations

from typing import NamedTuple

from lightning.pytorch.utilities.exceptions import MisconfigurationException


class GlueTask(NamedTuple):
    """The columns, labels and metrics of a task of GLUE.

    A column has several names: that of the Hugging Face hub (``nyu-mll/glue``), and that of GLUE's own files.
    """

    texts: tuple[tuple[str, ...], ...]
    """One or two columns of texts."""
    labels: tuple[str, ...]
    """The labels in the order of their class indices; none for a regression."""
    metrics: tuple[str, ...]
    """GLUE's metrics, by the names under which `TextClassifier` logs them."""
    validation: str = "validation"
    """Split of the hub to validate on."""
    test: str = "test"

    @property
    def regression(self) -> bool:
        """Whether a task's labels are numbers to predict rather than classes."""
        return not self.labels


LABEL = ("label", "is_duplicate", "Quality", "gold_label", "score")
"""Names of the label's column, the hub's first."""
COLA_COLUMNS = ("source", "label", "star", "sentence")
"""The columns of CoLA's own files, which have no header."""

_SENTENCE = (("sentence",),)
_PAIR = (("sentence1", "#1 String"), ("sentence2", "#2 String"))
_QUESTIONS = (("question1",), ("question2",))
_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")

GLUE = {
    "cola": GlueTask(_SENTENCE, _BINARY, ("mcc",)),
    "sst2": GlueTask(_SENTENCE, _BINARY, ("acc",)),
    "mrpc": GlueTask(_PAIR, _BINARY, ("acc", "f1")),
    "qqp": GlueTask(_QUESTIONS, _BINARY, ("acc", "f1")),
    "stsb": GlueTask(_PAIR, (), ("pearson", "spearman")),
    "mnli": GlueTask(
        (("premise", "sentence1"), ("hypothesis", "sentence2")),
        ("entailment", "neutral", "contradiction"),
        ("acc",),
        "validation_matched",
        "test_matched",
    ),
    "qnli": GlueTask((("question",), ("sentence",)), _ENTAILMENT, ("acc",)),
    "rte": GlueTask(_PAIR, _ENTAILMENT, ("acc",)),
    "wnli": GlueTask(_PAIR, _BINARY, ("acc",)),
}
"""The tasks by name."""


def glue_task(name: str) -> GlueTask:
    """A task by name.

    Raises:
        MisconfigurationException: If there is none of this name.

    Example:
        >>> glue_task("mrpc").metrics
        ('acc', 'f1')
    """
    if name not in GLUE:
        raise MisconfigurationException(f"task must be one of GLUE's, {', '.join(GLUE)}, or None, got {name!r}")
    return GLUE[name]
