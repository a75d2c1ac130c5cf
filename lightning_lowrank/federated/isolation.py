"""What a client's steps change on the module beside what clients send: put back for the next client, or named.

`Rounds` calls it around each client, so that clients that train one after another in one module start alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_lowrank.aggregation.adapters import is_base_change
from lightning_lowrank.arguments import listed
from lightning_lowrank.federated.execution.traces import Unwritten
from lightning_lowrank.federated.kept import Kept
from lightning_lowrank.federated.state import trained_tensors
from lightning_lowrank.internals.torch import own_buffers, written

_WATCHED_CLIENTS = 2
"""What a step stores once, such as a size, is new in the first client alone."""


class Isolation:
    """Keeps what one client's steps leave on the module from the next client.

    - Buffers that are not part of the state dict are put back to their values at the start of the fit.
    - A buffer that is replaced by assignment is filled in place instead, so that what is sent and loaded reaches it.
    - Frozen parameters that change are refused, unless ``FederatedLoop(ema_parameters=...)`` has them averaged.
    - Attributes that change, also of what the module holds, cannot be told from running totals of an epoch. A warning
      names those that the first two clients change, and what they change of the optimizers beside their state.
    - Gradients that a module left in manual optimization are dropped.

    Args:
        trainer: The trainer, with its optimizers set up.
        stacked: Whether clients step together. Their steps reach neither buffers nor attributes of the module.
    """

    def __init__(self, trainer: Any, stacked: bool) -> None:
        self._trainer = trainer
        self._module: pl.LightningModule = trainer.lightning_module
        module = self._module
        self._stacked = stacked
        live = trained_tensors(module)
        sent = {id(value) for value in live.values()}
        buffers = list(_buffers(module))
        self._homes = [home for home in buffers if id(home.buffer) in sent and not stacked]
        self._unsaved = [(home, home.buffer.detach().clone()) for home in buffers if id(home.buffer) not in sent]
        self._marks_of_unsaved = {home.name: written(home.buffer) for home, _ in self._unsaved}
        self._frozen: dict[str, Tensor] = {}
        self._unwritten = Unwritten({})
        self._kept: Kept | None = None
        self._named: set[str] = set()
        self._rewritten: set[str] = set()
        self._to_watch = _WATCHED_CLIENTS

    def begin_round(self, live: Mapping[str, Tensor]) -> None:
        """Look which parameters are frozen in this round, given what clients send."""
        # Quantised weights of a tensor class of their own cannot be added up, and no step writes into them.
        frozen = ((name, value) for name, value in self._module.named_parameters() if name not in live)
        self._frozen = {name: value for name, value in frozen if type(value.data) is Tensor}

    def begin_client(self) -> None:
        """Prepare for a client's first step, after the method has begun the client."""
        self.put_back()
        for home in self._homes:
            # A client that failed may have left another one there.
            home.table[home.key] = home.buffer
        if not self._module.automatic_optimization:
            self._module.zero_grad()
        self.watch()

    def watch(self) -> None:
        """Remember what the open client must not change."""
        self._rewritten |= self._unwritten.rewritten
        self._unwritten = Unwritten(self._frozen, self._to_watch == _WATCHED_CLIENTS, self._rewritten)
        self._kept = Kept(self._trainer, with_module=not self._stacked) if self._to_watch else None
        if self._kept is not None:
            self._kept.watch()

    def end_step(self) -> None:
        """Take assigned buffers over, and look whether the first step has changed frozen parameters."""
        for home in self._homes:
            if home.table.get(home.key) is not home.buffer:
                self._take_over(home)
        if self._unwritten.has_sums:
            self._unwritten.check()

    @torch.no_grad()
    def _take_over(self, home: _Home) -> None:
        assigned = home.table.get(home.key)
        if not isinstance(assigned, Tensor) or assigned.shape != home.buffer.shape:
            found = "None" if assigned is None else str(list(assigned.shape))
            raise MisconfigurationException(
                f"training changes the buffer {home.name} from {list(home.buffer.shape)} to {found}, and clients"
                " are averaged: keep its shape, or register it with persistent=False."
            )
        home.table[home.key] = home.buffer.copy_(assigned)

    def end_client(self) -> None:
        """Refuse or name what the client has changed."""
        self._unwritten.check()
        if self._kept is not None:
            self._tell(*self._kept.changed())
            self._to_watch -= 1
        self._kept = None

    def _tell(self, of_module: Sequence[str], of_optimizers: Sequence[str]) -> None:
        """Name what a client has changed, where it has not been named."""
        of_module, of_optimizers = (
            [each for each in of if each not in self._named] for of in (of_module, of_optimizers)
        )
        self._named.update(of_module, of_optimizers)
        if of_module:
            rank_zero_warn(
                f"training changes attributes of the module: {listed(of_module)}. They go on from one client"
                " to the next and are not averaged. Register what belongs to the model as a buffer, so that each"
                " client starts from the global value; totals of an epoch count the steps of all clients."
            )
        if of_optimizers:
            rank_zero_warn(
                f"steps change what an optimizer holds beside its state: {listed(of_optimizers)}. It goes on from one"
                " client to the next, whatever optimizer_state says: keep it in the optimizer's state or param_groups."
            )

    @torch.no_grad()
    def put_back(self) -> None:
        """Give unsaved buffers the values that they had when the fit began."""
        for home, value in self._changed():
            home.table[home.key] = home.buffer.copy_(value)
            self._marks_of_unsaved[home.name] = written(home.buffer)

    def _changed(self) -> Iterator[tuple[_Home, Tensor]]:
        for home, value in self._unsaved:
            now = home.table.get(home.key)
            if now is not home.buffer or written(home.buffer) != self._marks_of_unsaved[home.name]:
                yield home, value


@dataclass
class _Home:
    """Where a part of a module keeps a buffer."""

    name: str
    table: MutableMapping[str, Any]
    key: str
    buffer: Tensor


def _buffers(module: nn.Module) -> Iterator[_Home]:
    """Yield where a module keeps its buffers, but for those of metrics and changes of quantised base weights."""
    for prefix, part in _parts(module):
        table = own_buffers(part)
        for key, buffer in table.items():
            if buffer is not None and not is_base_change(key):
                yield _Home(f"{prefix}.{key}" if prefix else key, table, key, buffer)


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts of a module by name, but for metrics and their parts."""
    metrics = tuple(name + "." for name, part in module.named_modules() if isinstance(part, Metric))
    return ((name, part) for name, part in module.named_modules() if not f"{name}.".startswith(metrics))
