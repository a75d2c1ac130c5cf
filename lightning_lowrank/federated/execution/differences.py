"""Differences beyond rounding between a step and the same step computed in another way.

The comparison of clients together with clients alone uses it, and that of compiled steps with steps as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

StepResults = dict[tuple[str, str], Tensor]
"""Outputs of a step, by kind, such as `GRADIENT`, and name."""

GRADIENT = "the gradient of"
# Relative to the largest number of a kind, such as gradients. Products of stacks round differently.
TOLERANCE = 1e-3
"""In double precision as well, for language models compute their loss in single precision there."""
TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 1e-1}
_TOLERANCE_OF_GRADIENTS = 2e-2
"""Deep networks with BatchNorm amplify rounding: that of ResNet-18's first gradient reaches 7e-3."""
_MORE_FOR_GRADIENTS = 3
"""In 16 bits too, if the terms of a gradient cancel out: an MLP in bfloat16 reaches 0.11."""
_TIMES_THE_ROUNDING = 4
"""Rounding the values once is a smaller error than those of a whole step."""
_MOST_FOR_ROUNDING = 5
"""ResNeXt-50's first gradient, from float64: 2e-2 for clients together, and 1.4e-2 for a client alone."""


def first_difference(
    found: Mapping[tuple[str, str], Tensor],
    expected: Mapping[tuple[str, str], Tensor],
    tolerance: float,
    way: str,
    rounded: Mapping[tuple[str, str], Tensor] | None = None,
) -> str:
    """The first difference between results and expected results; empty if there is none.

    Args:
        found: The results.
        expected: The expected results.
        tolerance: Of the largest number of a kind; that of gradients is three times as large, and 2e-2 at least.
        way: How the expected ones were made, such as ``"for the client alone"``.
        rounded: The expected results from values that were changed by rounding errors. If rounding changes a kind much,
            its tolerance is up to five times as large.
    """
    largest = _largest(expected)
    rounded = rounded or {}
    noise = _largest({key: rounded[key].double() - value.double() for key, value in expected.items() if key in rounded})
    for kind, name in [*expected, *(found.keys() - expected.keys())]:
        if (kind, name) not in found or (kind, name) not in expected:
            only = "not " if (kind, name) in found else "only "
            return f"{kind} {name} exists {only}{way}".replace("  ", " ")
        value = expected[kind, name]
        share = max(_MORE_FOR_GRADIENTS * tolerance, _TOLERANCE_OF_GRADIENTS) if kind == GRADIENT else tolerance
        allowed = share * largest[kind]
        if kind in noise:
            allowed = min(max(allowed, _TIMES_THE_ROUNDING * noise[kind]), _MOST_FOR_ROUNDING * allowed)
        other = found[kind, name].detach().double().view_as(value)
        apart = (other - value.double()).abs()
        alike = (apart <= allowed) | (other == value) | (other.isnan() & value.isnan())
        if not bool(alike.all()):
            worst = int(torch.where(alike, 0, apart.nan_to_num(torch.inf)).argmax())
            one, two = other.flatten()[worst].item(), value.flatten()[worst].item()
            return f"{kind} {name} is {one:.4g}, and {two:.4g} {way}".replace("  ", " ")
    return ""


def _largest(results: Mapping[tuple[str, str], Tensor]) -> dict[str, float]:
    """The largest absolute number of each kind."""
    largest: dict[str, float] = {}
    for (kind, _), value in results.items():
        largest[kind] = max(largest.get(kind, 0.0), float(value.double().abs().max()) if value.numel() else 0.0)
    return largest
