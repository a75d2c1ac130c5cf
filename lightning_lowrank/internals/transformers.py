"""What of transformers is changed while a training step is mapped over clients or samples.

Where no token of a batch is padding, transformers leaves the attention mask out. For that it looks at the mask's
values, which may differ between clients, and from one step to the next. `ClientStack` and `SampleGradients` keep it
from that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from lightning_lowrank.internals.torch import is_transformed


@contextmanager
def masks_kept() -> Iterator[None]:
    """Let transformers make the masks of mapped tensors without a look at their values, as while it is traced.

    Where nothing is padding, results are the same up to rounding.
    """
    masks = sys.modules.get("transformers.masking_utils")
    is_tracing = getattr(masks, "is_tracing", None)
    if masks is None or is_tracing is None:
        yield
        return

    def is_traced(tensor: Tensor | None = None) -> bool:
        return (isinstance(tensor, Tensor) and is_transformed(tensor)) or is_tracing(tensor)

    masks.is_tracing = is_traced  # type: ignore[attr-defined]
    try:
        yield
    finally:
        masks.is_tracing = is_tracing  # type: ignore[attr-defined]
