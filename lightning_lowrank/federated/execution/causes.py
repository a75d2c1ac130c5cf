"""Why a training step cannot be mapped over clients, in plain words."""

from __future__ import annotations

import re

from lightning.pytorch.utilities.exceptions import MisconfigurationException

_CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"\.item\(\)|data pointer of Tensor that|Can't detach views in-place",
        "it takes a number out of a tensor that differs between clients (.item(), float(), .tolist(), .numpy(), an"
        " index or a range)",
    ),
    (
        "data-dependent control flow",
        "it decides by a tensor's value that differs between clients (an if or assert on a tensor; transformers ask so"
        " whether an attention_mask masks anything)",
    ),
    (
        r"a tensor and its view\(\)",
        "it changes a tensor in place through view(), and uses both (take flatten(), or do not change it in place)",
    ),
    (
        r"inplace|in-place|in place|_\(self, \*extra_args\)|output with shape \S+ \S+ match the broadcast shape",
        "it changes a tensor in place that is one for all clients: a frozen weight, a buffer that is not persistent, or"
        " one made in the step by torch.zeros() and the like (make that by new_zeros() of one of the clients' tensors)",
    ),
    (
        "dynamic shape|num_classes|repeat_interleave|stack expects each tensor to be equal size",
        "the shape of a result in it depends on a tensor's values (indexing with a boolean mask, nonzero, unique,"
        " bincount)",
    ),
    ("setup_context|does not have vmap support", "it uses an autograd.Function that has no rule for torch.func.vmap"),
    ("saved tensors hooks", "it uses gradient checkpointing, which computes again outside of the map"),
    (r"aten::(lstm|gru|rnn)", "torch cannot map its recurrent layers (nn.LSTM, nn.GRU, nn.RNN)"),
    (
        r"requires_grad_\(\)|does not require grad and does not have a grad_fn|backward\(\) called inside",
        "it computes gradients itself (requires_grad_(), autograd.grad, backward)",
    ),
    ("accessing `data`|storage of Batched|escaped", "it takes a client's tensor apart (.data, copy.deepcopy)"),
    ("aten::", "it uses an operation that torch cannot map"),
)


def cause_of(error: Exception) -> str:
    """Say what in a training step an error of torch's tells of."""
    said = str(error).strip().split("\n")[0][:200]
    sentence = next((sentence for sign, sentence in _CAUSES if re.search(sign, said)), "")
    return f"{sentence}; torch says: {said}" if sentence else f"{type(error).__name__}: {said}"


def updates(metric: str) -> str:
    """Say that a training step updates a metric."""
    return f"it updates the metric {metric}, whose state is one for all clients; log its value instead"


def refusal(cause: str) -> MisconfigurationException:
    """Return the error that refuses a training step by its cause."""
    return MisconfigurationException(
        f"execution='vectorized' cannot map training_step over clients: {cause}. Or use execution='sequential', or"
        " 'auto', which falls back to it."
    )
