"""Whether a logged figure is better when higher: by its metric, by what monitors it, or by its name."""

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
"""Metrics by which a run is judged where nothing says which one counts, the first that was logged.

``valid`` and ``validation`` serve in place of ``val``, and ``/`` in place of ``_``. Without any of these it is another
metric of validation, the first by name of which it is known whether higher is better.
"""
_VALIDATION = re.compile(r"(?:val|valid|validation)[_/](.+?)(?:/dataloader_idx_\d+)?")
_PHRASES = (("cross_entropy", "crossentropy"), ("log_likelihood", "reward"))


class Monitor(NamedTuple):
    """What a callback or scheduler says of a figure."""

    owner: str
    name: str
    mode: str


def monitors_of(trainer: Any) -> list[Monitor]:
    """Return what a trainer's callbacks and schedulers monitor, and whether they take the minimum or the maximum."""
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
    """Return which of the logged metrics a run is judged by: the one that is wanted, or monitored, or a usual one."""
    known = set(logged)
    names = [wanted] if wanted else [each.name for each in monitors]
    found = next((name for name in names if name in known), None)
    return found if found or wanted else usual(known)


def usual(logged: Iterable[str]) -> str | None:
    """The metric of `USUAL`, or of validation, by which a run that logged these is judged.

    Example:
        >>> usual(["val_loss", "valid_acc"]), usual(["validation/f1", "train_loss"]), usual(["loss"])
        ('valid_acc', 'validation/f1', None)
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
    """Return whether a figure of this name is known to be better when higher; ``None`` where the name does not say.

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
    """Return the words of a name's part in lower case, with numbers only where they are part of a metric's name."""
    known = _HIGHER.fullmatch(part.lower())
    for piece in [part] if known else re.findall(r"[A-Z]?[a-z]+\d*|[A-Z]+\d*", part):
        word = piece.lower() if _HIGHER.fullmatch(piece.lower()) else piece.lower().rstrip("0123456789")
        compound = _COMPOUND.fullmatch(word)
        yield compound[1] if compound else word


def direction(name: str, metric: bool | None = None, monitors: Iterable[Monitor] = ()) -> tuple[bool | None, str]:
    """Return whether a figure is better when higher, ``None`` where that is not known, and then why not.

    Args:
        name: Its name, without what is put before and after it for clients' own models.
        metric: ``higher_is_better`` of the `torchmetrics.Metric` that was logged, if one was.
        monitors: What says so of figures by ``mode``.
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
        told = [f"{'higher' if higher else 'lower'} is better by {source}" for source, higher in said.items()]
        return None, " and ".join(told)
    return None, "the name does not say; log a torchmetrics object, or let ModelCheckpoint(mode=...) monitor it"
