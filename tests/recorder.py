"""A recorder that records on the CPU as CUDA does: fixed memory, and nothing made meanwhile."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lightning_lowrank.internals.torch import writes


def tensors_of(tree):
    return [each for each in tree_flatten(tree)[0] if isinstance(each, torch.Tensor)]


class Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations, self.before = [], []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        # Batch normalisation writes without saying so.
        if writes(function) or "batch_norm" in str(function):
            self.before += [(each, each.clone()) for each in tensors_of(arguments)]
        made = function(*arguments, **(keywords or {}))
        self.operations.append((function, arguments, keywords or {}, made))
        return made


class OnTheCPU:
    """Records operations, and makes them again into the memory in which their results were."""

    def __init__(self, most=2**40):
        self.most, self.records, self.replays = most, 0, 0

    def record(self, make):
        with Recording() as recording:
            outputs = make()
        for tensor, value in reversed(recording.before):
            tensor.copy_(value)
        self.records += 1

        def replay():
            self.replays += 1
            for function, arguments, keywords, made in recording.operations:
                for old, new in zip(tensors_of(made), tensors_of(function(*arguments, **keywords)), strict=True):
                    if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                        old.copy_(new)

        return outputs, replay

    def allocated(self):
        return self.records

    def limit(self):
        return self.most
