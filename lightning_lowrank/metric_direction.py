"""Whether a logged figure is better when higher, by its torchmetrics object, its monitors or its name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

_HIGHER = re.compile(
    "acc|accuracy|ap|auc|aucpr|auprc|auroc|bleu|dice|f1|fbeta|fscore|iou|jaccard|kappa|map|mcc|meteor|miou|mrr|ndcg"
    "|pearson|ppv|precision|psnr|r2|recall|reward|rouge|sensitivity|spearman|specificity|ssim|success|tnr|tpr"
)
_LOWER = re.compile(
    "bce|bpb|bpc|brier|ce|cer|cost|crps|crossentropy|ece|eer|err|error|fid|fnr|fpr|kid|kld|lpips|loss|mae|mape|mse|msle"
    "|nll|nmse|perplexity|ppl|regret|rmse|rmsle|smape|ter|wer"
)
_TURNING = re.compile(
    "decrease|delta|deviation|diff|difference|drop|gap|inverse|minus|neg|negative|num|number|std|var|variance"
)
_COMPOUND = re.compile(".*(loss|error|accuracy|acc|perplexity|ppl)")
USUAL = ("val_acc", "val_accuracy", "test_acc", "val_loss")
"""Metrics by which a run is judged if none is named or monitored: the first one that was logged.

``valid`` and ``validation`` serve in place of ``val``, and ``/`` in place of ``_``. Without any of these it is another
validation metric: the first by name whose direction is known, or else the first by name.
"""
_VALIDATION = re.compile(r"(?:val|valid|validation)[_/](.+?)(?:/dataloader_idx_\d+)?")
_PHRASES = (("cross_entropy", "crossentropy"), ("log_likelihood", "reward"))


class Monitor(NamedTuple):
    """A figure's name and mode, and the callback or scheduler that monitors it."""

    owner: str
    name: str
    mode: str


def monitors_of(trainer: Any) -> list[Monitor]:
    """The figures that a trainer's callbacks and schedulers monitor, with mode ``"min"`` or ``"max"``."""
    owners = [(each, each) for each in trainer.callbacks]
    owners += [(config, config.scheduler) for config in trainer.lr_scheduler_configs]
    found = [
        (type(owner).__name__, getattr(watching, "monitor", None), getattr(owner, "mode", None))
        for watching, owner in owners
    ]
    return [
        Monitor(owner, name, mode) for owner, name, mode in found if isinstance(name, str) and mode in ("min", "max")
    ]


def judged_by(logged: Iterable[str], wanted: str | None, monitors: Iterable[Monitor]) -> str | None:
    """The logged metric by which a run is judged: ``wanted`` if given, otherwise a monitored or a usual one."""
    known = set(logged)
    names = [wanted] if wanted else [each.name for each in monitors]
    found = next((name for name in names if name in known), None)
    return found if found or wanted else usual_metric(known)


def usual_metric(logged: Iterable[str]) -> str | None:
    """The first metric of `USUAL` that was logged, otherwise a validation metric; ``None`` if there is neither.

    Example:
        >>> usual_metric(["val_loss", "valid_acc"]), usual_metric(["validation/f1", "train_loss"])
        ('valid_acc', 'validation/f1')
        >>> usual_metric(["loss"]) is None
        True
    """
    known = sorted(logged)
    found = [(name, validated[1]) for name in known if (validated := _VALIDATION.fullmatch(name))]
    for metric in USUAL:
        if metric in known:
            return metric
        for name, of_validation in found:
            if f"val_{of_validation}" == metric:
                return name
    return next((name for name, _ in found if by_name(name) is not None), found[0][0] if found else None)


def by_name(name: str) -> bool | None:
    """Whether a figure is better when higher, by its name; ``None`` if the name does not say.

    Example:
        >>> by_name("val_top5_acc"), by_name("val/dice_loss"), by_name("val_score")
        (True, False, None)
    """
    for phrase, word in _PHRASES:
        name = name.lower().replace(phrase, word) if phrase in name.lower() else name
    words = [word for part in re.split(r"[^A-Za-z0-9]+", name) for word in _words(part)]
    if not words or any(map(_TURNING.fullmatch, words)):
        return None
    if words[-1] in ("loss", "error"):
        return False
    said = {higher for word in words for higher in (True, False) if (_HIGHER if higher else _LOWER).fullmatch(word)}
    return said.pop() if len(said) == 1 else None


def _words(part: str) -> Iterable[str]:
    """The words of a part of a name, in lower case, without numbers unless a metric's name has them (``f1``)."""
    known = _HIGHER.fullmatch(part.lower())
    for piece in [part] if known else re.findall(r"[A-Z]?[a-z]+\d*|[A-Z]+\d*", part):
        word = piece.lower() if _HIGHER.fullmatch(piece.lower()) else piece.lower().rstrip("0123456789")
        compound = _COMPOUND.fullmatch(word)
        yield compound[1] if compound else word


def direction(name: str, metric: bool | None = None, monitors: Iterable[Monitor] = ()) -> tuple[bool | None, str]:
    """Whether a figure is better when higher; if unknown, ``None`` and the reason.

    Args:
        name: The figure's name, without the prefix and suffix for clients' own models.
        metric: ``higher_is_better`` of the `torchmetrics.Metric` that was logged, if one was.
        monitors: Monitored figures, whose ``mode`` tells their direction.
    """
    if metric is not None:
        return metric, ""
    names = {name, *(f"{model}/{name}{part}" for model in ("personal", "global") for part in ("", "_worst10"))}
    said = {f"{each.owner}(mode={each.mode!r})": each.mode == "max" for each in monitors if each.name in names}
    named = by_name(name)
    if named is not None:
        said["its name"] = named
    if len(set(said.values())) == 1:
        return next(iter(said.values())), ""
    if said:
        sides = [f"{'higher' if higher else 'lower'} is better by {source}" for source, higher in said.items()]
        return None, " and ".join(sides)
    return None, "the name does not say; log a torchmetrics object, or let ModelCheckpoint(mode=...) monitor it"
