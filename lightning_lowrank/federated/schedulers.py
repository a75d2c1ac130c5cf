"""What counts steps within a client: step-wise learning rate schedulers, and projected optimizers' refreshes.

`FederatedLoop` uses it so that a step-wise schedule runs for every client from where the round began, and not on
from one client to the next.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import lightning.pytorch as pl

from lightning_lowrank.federated.optimizers import counters

_OF_ONE_CLIENT = ("params", "stacked", "subspaces")
_COUNTS_OF_REFRESHES = ("refresh_number", "steps_since_refresh")


class SchedulersPerClient:
    """Winds step-wise schedulers back at each client's start; the round ends where its longest client ended.

    Schedulers that Lightning steps once an epoch are left alone. Under manual optimization, where the module steps
    them when it likes, all are wound back. So is a projected optimizer's count of steps to its next subspaces.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        manual = not trainer.lightning_module.automatic_optimization
        configs = [config for config in trainer.lr_scheduler_configs if manual or config.interval == "step"]
        self._schedulers = [config.scheduler for config in configs]
        self._optimizers = [
            optimizer for optimizer in trainer.optimizers if configs or "refresh_number" in optimizer.param_groups[0]
        ]
        # Without such a scheduler, the options of the groups are those of one that steps once an epoch.
        self._options_change = bool(configs)
        self._start: dict[str, Any] = {}
        self._furthest: dict[str, Any] = {}
        self._most_steps = 0
        self._all_optimizers = trainer.optimizers
        self._begun: list[list[dict[str, Any]]] = []

    def begin_round(self) -> None:
        """Remember where the round began."""
        self._start, self._furthest, self._most_steps = self._capture(), {}, 0
        self._begun = [
            [{name: value for name, value in group.items() if name not in _OF_ONE_CLIENT} for group in one.param_groups]
            for one in self._all_optimizers
        ]
        self._begun = copy.deepcopy(self._begun)

    def put_options_back(self) -> None:
        """Give optimizers the options back that they had when the round began: steps may set them by hand."""
        for optimizer, groups in zip(self._all_optimizers, self._begun, strict=False):
            for group, values in zip(optimizer.param_groups, groups, strict=False):
                group.update(values)
        # Copies, for steps may count in place.
        self._put_counters_back()

    def _put_counters_back(self) -> None:
        for optimizer, groups in zip(self._all_optimizers, self._begun, strict=False):
            for group, values, counted in zip(optimizer.param_groups, groups, counters(optimizer), strict=False):
                for name in counted:
                    if name in values:
                        group[name] = copy.deepcopy(values[name])
                    else:
                        del group[name]

    def begin_client(self) -> None:
        """Wind back to where the round began."""
        self._install(self._start)

    def end_client(self, steps: int) -> None:
        """Remember where the client with the most steps ended."""
        if steps > self._most_steps:
            self._furthest, self._most_steps = self._capture(), steps

    @property
    def end(self) -> tuple[int, dict[str, Any]]:
        """Where the client with the most steps ended: their number, and the state."""
        return self._most_steps, self._furthest

    def pool(self, ends: Iterable[tuple[int, dict[str, Any]]]) -> None:
        """Take over, of several processes' `end`, that of the client with the most steps."""
        self._most_steps, self._furthest = max(ends, key=lambda end: end[0])

    def end_round(self) -> None:
        """Go on from where the client with the most steps ended, but for what optimizers count."""
        self._put_counters_back()
        self._install(self._furthest)

    def _capture(self) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
                "groups": [
                    [
                        {
                            key: value
                            for key, value in group.items()
                            if key in _COUNTS_OF_REFRESHES
                            or (self._options_change and key not in _OF_ONE_CLIENT and key not in counted)
                        }
                        for group, counted in zip(optimizer.param_groups, counters(optimizer), strict=True)
                    ]
                    for optimizer in self._optimizers
                ],
            }
        )

    def _install(self, captured: Mapping[str, Any]) -> None:
        if not (self._schedulers or self._optimizers):
            return
        captured = copy.deepcopy(captured)
        for scheduler, state in zip(self._schedulers, captured.get("schedulers", ()), strict=False):
            scheduler.load_state_dict(state)
        for optimizer, groups in zip(self._optimizers, captured.get("groups", ()), strict=False):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)

    def state_dict(self) -> dict[str, Any]:
        """Return what a run resumed inside the round needs."""
        return {"start": self._start, "furthest": self._furthest, "most_steps": self._most_steps, "begun": self._begun}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s result."""
        self._start, self._furthest = state["start"], state["furthest"]
        self._most_steps, self._begun = state["most_steps"], state["begun"]
