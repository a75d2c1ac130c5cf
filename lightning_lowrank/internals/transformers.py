"""A patch of transformers for training steps that are mapped over clients or samples.

transformers reads the values of masks, to leave out masks that hide nothing, and of tokens, to warn of padding. Values
may differ between clients, and from one step to the next. `ClientStack` and `SampleGradients` prevent these reads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from lightning_lowrank.internals.replaced import replaced
from lightning_lowrank.internals.torch import is_transformed

# Modules that call is_tracing() before they read values.
_MODULES = ("transformers.masking_utils", "transformers.modeling_utils")


@contextmanager
def without_value_checks() -> Iterator[None]:
    """A context in which transformers does not read values of mapped tensors, as if it were traced.

    If a mask hides nothing, results are the same up to rounding.
    """
    with ExitStack() as ends:
        for module in map(sys.modules.get, _MODULES):
            if module is not None and hasattr(module, "is_tracing"):
                ends.enter_context(replaced(module, is_tracing=_or_mapped(module.is_tracing)))
        yield


def _or_mapped(is_tracing: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def is_mapped_or_traced(value: Any = None) -> bool:
        return (isinstance(value, Tensor) and is_transformed(value)) or is_tracing(value)

    return is_mapped_or_traced
