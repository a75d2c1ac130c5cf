"""Checks that clients use plain SGD, for methods that need a client's change as a known sum of its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.federated.state import Base


def parameter_groups(base: Base, method: str, plain: bool = False) -> dict[str, int]:
    """Each trained parameter's group index in the one ``torch.optim.SGD``; other optimizers are refused."""
    used = [type(optimizer) for optimizer in base.optimizers]
    if used != [torch.optim.SGD]:
        raise MisconfigurationException(
            f"{method} needs a client's change to be a known sum of its gradients, which holds for torch.optim.SGD"
            f" only, but the module steps with {', '.join(kind.__name__ for kind in used) or 'no optimizer'}: return"
            " one torch.optim.SGD from configure_optimizers()."
        )
    for group in base.optimizers[0].param_groups if plain else ():
        check_plain(group, method)
    names = {parameter: name for name, parameter in base.module.named_parameters() if parameter.requires_grad}
    return {
        names[parameter]: number
        for number, group in enumerate(base.optimizers[0].param_groups)
        for parameter in group["params"]
        if parameter in names
    }


def check_plain(group: Mapping[str, Any], method: str) -> None:
    """Raise if a parameter group's steps are not the learning rate times the gradient."""
    for option in ("momentum", "maximize"):
        if group[option]:
            raise MisconfigurationException(
                f"{method} computes a client's mean gradient as its change divided by its learning rates, which is"
                f" wrong with {option}={group[option]}: use torch.optim.SGD without it."
            )
