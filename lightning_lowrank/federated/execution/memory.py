"""The number of clients that fit into memory together, measured by a trial step of the first round."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_lowrank.federated.client_states import size as bytes_of
from lightning_lowrank.federated.data.training_set import RoundData
from lightning_lowrank.federated.execution.snapshot import trial
from lightning_lowrank.federated.execution.stack import ClientStack
from lightning_lowrank.federated.free_memory import free_memory
from lightning_lowrank.federated.state import trained_tensors
from lightning_lowrank.internals.torch import device_module, storage_key

_SHARE_OF_MEMORY = 0.25
_COPIES_OF_A_CLIENT = 6


def chunk_size_that_fits(trainer: Any, data: RoundData) -> int:
    """The number of clients that may step together in the memory that is free now."""
    module, device = trainer.lightning_module, trainer.strategy.root_device
    # A client's values, gradients, moments and message.
    each = _COPIES_OF_A_CLIENT * bytes_of([value for value in module.parameters() if value.requires_grad])
    each += _bytes_of_a_step(trainer, data)
    return max(1, int(_SHARE_OF_MEMORY * free_memory(device) / max(each, 1)))


def _bytes_of_a_step(trainer: Any, data: RoundData) -> int:
    """The bytes that a client's step needs in addition to the client's values; 0 if no trial step is possible."""
    module, device = trainer.lightning_module, trainer.strategy.root_device
    loader = data.loader
    longest = max(data.planner.trial_chunks(), key=lambda chunk: data.planner.samples[chunk.clients[0]])
    measure = _peak if hasattr(device_module(device), "reset_peak_memory_stats") else _saved
    data.randomness.open()
    try:
        # A step that writes to frozen parameters fails here, and is refused by the first round.
        with trial(trainer, loader, longest, 1) as ((batch, *_), _):
            stack = ClientStack(trainer, module, trained_tensors(module), len(longest.clients))
            try:
                return measure(trainer, stack, batch) // len(longest.clients)
            finally:
                stack.close()
    except Exception:
        return 0
    finally:
        data.randomness.release()


def _saved(trainer: Any, stack: ClientStack, batch: Any) -> int:
    """The bytes that the forward pass saves for the backward pass, parameters and buffers left out."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        # An operation that saved its own output would keep itself, and the step, alive.
        return tensor.detach()

    stack.measured = True
    with saved_tensors_hooks(pack, lambda tensor: tensor), trainer.precision_plugin.train_step_context():
        # Keep the result alive: it holds the saved tensors, so no freed memory is reused and counted twice.
        result = stack.training_step(batch)
    module = trainer.lightning_module
    for tensor in (*module.parameters(), *module.buffers(), *stack.values.values()):
        kept.pop(storage_key(tensor), None)
    del result
    return sum(kept.values())


def _peak(trainer: Any, stack: ClientStack, batch: Any) -> int:
    """The peak of allocated bytes during the forward and backward passes, minus the bytes allocated before."""
    device = trainer.strategy.root_device
    tells = device_module(device)
    before = tells.memory_allocated(device)
    tells.reset_peak_memory_stats(device)
    with trainer.precision_plugin.train_step_context():
        result = stack.training_step(batch)
    result.backward()
    return tells.max_memory_allocated(device) - before
