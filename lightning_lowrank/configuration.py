"""Checks of arguments, patterns and checkpoints, with Lightning's ``MisconfigurationException`` as their error.

The modules behind ``lightning-lowrank export`` and ``report`` do without Lightning, whose import takes seconds:
it is imported only when a check fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec

from lightning_lowrank import arguments, patterns

if TYPE_CHECKING:
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

P = ParamSpec("P")

LACKING = "lacking"
"""Entry of `FederatedLoop`'s state in a checkpoint: the changed frozen weights that the checkpoint does not hold."""
PARTIAL = "partial"
"""Entry of `FederatedLoop`'s state in a checkpoint: the round of which it holds a part."""


def misconfigured(message: str) -> MisconfigurationException:
    """A ``MisconfigurationException`` with this message, to be raised."""
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    return MisconfigurationException(message)


def _configured(check: Callable[P, None]) -> Callable[P, None]:
    @functools.wraps(check)
    def configured(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            check(*args, **kwargs)
        except (TypeError, ValueError) as error:
            raise misconfigured(str(error)) from error

    return configured


check_choice = _configured(arguments.check_choice)
check_integer = _configured(arguments.check_integer)
check_number = _configured(arguments.check_number)
check_patterns = _configured(patterns.check_patterns)


def check_complete(state: Mapping[str, Any]) -> None:
    """Refuse a checkpoint without changed frozen weights, or with a part of a round, as its marks tell."""
    if PARTIAL in state:
        raise misconfigured(
            f"the checkpoint was saved when an error ended round {state[PARTIAL]}, while the server received or"
            " aggregated messages, and it holds a part of that: use an earlier checkpoint."
        )
    if lacking := state.get(LACKING):
        raise misconfigured(
            f"the checkpoint lacks {len(lacking)} frozen weights that the rounds had changed,"
            f" {arguments.join_names(lacking)}: the module that saved it left them out of the state dict, and what was"
            " learnt is lost without them. Begin a new run whose checkpoints hold them, as those of"
            " TrainedCheckpoints() in `callbacks` do."
        )
