"""Clients' plain SGD, for methods that need the weight of each gradient in the change of a client's model."""

from __future__ import annotations

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.federated.state import Base


def parameter_groups(base: Base, method: str) -> dict[str, int]:
    """Return the index of each trained parameter's group in the one ``torch.optim.SGD``; refuse other optimizers."""
    used = [type(optimizer) for optimizer in base.optimizers]
    if used != [torch.optim.SGD]:
        raise MisconfigurationException(
            f"{method} needs a client's change to be a known sum of its gradients, which holds for torch.optim.SGD"
            f" only, but the module steps with {', '.join(kind.__name__ for kind in used) or 'no optimizer'}: return"
            " one torch.optim.SGD from configure_optimizers()."
        )
    names = {parameter: name for name, parameter in base.module.named_parameters() if parameter.requires_grad}
    return {
        names[parameter]: number
        for number, group in enumerate(base.optimizers[0].param_groups)
        for parameter in group["params"]
        if parameter in names
    }
