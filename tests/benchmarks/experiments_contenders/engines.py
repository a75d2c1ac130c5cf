"""Turns single engines of the loop off, so that `experiments.py` can measure what each is worth.

A contender ``default-steps`` is this library one client after another without the engine ``steps``.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_lowrank.federated import local


def _torchs_own() -> None:
    local.run_backward = lambda loss: loss.backward()
    local.bare_step = lambda optimizer: optimizer.step
    local.drop_gradients = lambda optimizer: optimizer.zero_grad()


ENGINES: dict[str, Callable[[], None]] = {
    "steps": lambda: setattr(local.LocalTraining, "_is_plain", lambda self: False),
    "torch": _torchs_own,
}
"""What is turned off, by name: plain steps, bare kernels."""
