"""Choosing which of a model's parameters are projected."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from lightning_lowrank.arguments import check_integer
from lightning_lowrank.internals.torch import BATCH_NORMS, INSTANCE_NORMS
from lightning_lowrank.layers.linear import LowRankEmbedding
from lightning_lowrank.optim.adamw import ProjectedAdamW
from lightning_lowrank.optim.sgd import ProjectedSGD
from lightning_lowrank.patterns import check_patterns, matches

_NOT_PROJECTED = (nn.Embedding, nn.EmbeddingBag, *BATCH_NORMS, *INSTANCE_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def projected_parameter_groups(
    model: nn.Module,
    rank: int,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    no_decay: bool = False,
    **options: Any,
) -> list[dict[str, Any]]:
    """Sort a model's trainable parameters into a group to project and the rest.

    Parameters of two or more dimensions are projected (weights of linear layers and of convolutions, also
    transposed ones, as ``weight.flatten(1)``), except those of embeddings and of torch's normalisation
    layers. Frozen parameters are left out. A shared parameter appears once.

    A pattern, as in :mod:`lightning_lowrank.patterns`, is matched against a parameter's whole name and every run of
    its parts between dots: ``"encoder"`` means all of that module, ``"fc*"`` also ``encoder.0.fc1.weight``.

    Args:
        model: The model.
        rank: Rank of the projected group, at least 1.
        include: Patterns of the parameters to project. All that can be, by default.
        exclude: Patterns of parameters not to project. None by default.
        no_decay: Whether to set ``weight_decay`` to 0 for the parameters with fewer than two dimensions, in a
            group of their own. Off by default.
        **options: Options of :class:`ProjectedSGD` or :class:`ProjectedAdamW` for the projected group.

    Returns:
        The projected group, then one of the other parameters with ``rank=None``, then that without weight
        decay; groups without parameters are left out.

    Raises:
        TypeError: If an argument is of a wrong kind or no optimizer has the option.
        ValueError: If ``rank`` is out of range, a pattern matches nothing, a parameter is uninitialised, or
            there is nothing to project.

    Example:
        >>> from lightning_lowrank.optim import ProjectedAdamW, projected_parameter_groups
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 10))
        >>> groups = projected_parameter_groups(model, rank=8, exclude=["2"], refresh_interval=50)
        >>> [(len(group["params"]), group["rank"]) for group in groups]
        [(1, 8), (5, None)]
        >>> optimizer = ProjectedAdamW(groups, lr=0.01, rank=None)
    """
    check_integer("rank", rank, hint="a group with rank=None for no projection")
    for argument, patterns in (("include", include), ("exclude", exclude)):
        if isinstance(patterns, str):
            raise TypeError(f"{argument} must be a list of strings, such as [{patterns!r}], but is {patterns!r}.")
    known = sorted({name for kind in (ProjectedSGD, ProjectedAdamW) for name in inspect.signature(kind).parameters})
    for option in options:
        if option not in known or option == "params":
            close = ", ".join(difflib.get_close_matches(option, known)) or ", ".join(known)
            raise TypeError(f"{option!r} is not an option of a projected optimizer's group; close to it: {close}.")

    names: dict[Tensor, list[str]] = {}
    unsuitable: set[Tensor] = set()
    for module_name, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(module_name, recurse=False, remove_duplicate=False):
            if is_lazy(parameter):
                raise ValueError(f"parameter {name!r} is uninitialised; run the model once on a batch before this.")
            if parameter.requires_grad:
                names.setdefault(parameter, []).append(name)
            if parameter.ndim < 2 or isinstance(module, _NOT_PROJECTED):
                unsuitable.add(parameter)
        if isinstance(module, LowRankEmbedding):
            unsuitable.update(module.factors.parameters())
        if isinstance(module, _NOT_PROJECTED) and is_parametrized(module):
            unsuitable.update(module.get_submodule("parametrizations").parameters())
    suitable = {parameter: own for parameter, own in names.items() if parameter not in unsuitable}
    for argument, patterns in (("include", include), ("exclude", exclude)):
        suited = [name for own in suitable.values() for name in own]
        modules = [name.rpartition(".")[0] for name in suited]
        check_patterns(argument, patterns or (), suited, "parameter that can be projected", also=modules)

    def means(patterns: Sequence[str], own: list[str]) -> bool:
        return any(matches(pattern, name) for pattern in patterns for name in own)

    def chosen(own: list[str]) -> bool:
        return (include is None or means(include, own)) and not means(exclude or (), own)

    projected = [parameter for parameter, own in suitable.items() if chosen(own)]
    if not projected:
        raise ValueError(
            "no parameter can be projected: the model needs a trainable parameter of at least two dimensions, outside"
            " embeddings and normalisation layers, that include and exclude select."
        )
    rest = [parameter for parameter in names if parameter not in set(projected)]
    undecayed = [parameter for parameter in rest if no_decay and parameter.ndim < 2]
    decayed = [parameter for parameter in rest if not no_decay or parameter.ndim >= 2]
    groups: list[dict[str, Any]] = [
        {"params": projected, "rank": rank, **options},
        {"params": decayed, "rank": None},
        {"params": undecayed, "rank": None, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
