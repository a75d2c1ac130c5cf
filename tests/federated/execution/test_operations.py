"""Every operation of torch that has gradients, mapped over clients as a training step is, by torch's own examples."""

import traceback

import pytest
import torch
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_lowrank.federated.execution.mapped_layers import StackedProducts

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]
CLIENTS = 3
EXAMPLES = 2
RANDOM = ("normal", "bernoulli", "multinomial", "lowrank", "dropout", "fractional_max_pool", "multi_head_attention")
# Rolls, and fills of, a single number for each client, which torch maps over all clients' numbers.
WRONG_IN_TORCH = {("roll", 0), ("index_fill", 0)}


def is_floating(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def number_of(outputs):
    """Return a number that depends on each of the outputs' numbers in its own way."""
    outputs = [output for output in tree_flatten(outputs)[0] if is_floating(output)]
    weights = (torch.arange(output.numel(), dtype=torch.float64).cos().reshape(output.shape) for output in outputs)
    return sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True))


def alone(function, stacks, client):
    values = [stack[client].clone().requires_grad_() for stack in stacks]
    loss = function(*values)
    gradients = torch.autograd.grad(loss, values, allow_unused=True, materialize_grads=True)
    return [loss.detach(), *gradients]


def together(function, stacks):
    stacks = [stack.clone().requires_grad_() for stack in stacks]
    with StackedProducts():
        losses = vmap(function, randomness="different")(*stacks)
    gradients = torch.autograd.grad(losses.sum(), stacks, allow_unused=True, materialize_grads=True)
    return [losses.detach(), *gradients]


def differs(operation, example):
    """Return whether clients together end elsewhere than alone; ``None`` if they can't be compared, or are refused."""
    if example.kwargs.get("dropout_p"):
        return None
    leaves, form = tree_flatten((example.input, example.args, example.kwargs))
    trained = [place for place, leaf in enumerate(leaves) if is_floating(leaf) and leaf.requires_grad]
    if not trained or any(leaf.layout != torch.strided for leaf in leaves if is_floating(leaf)):
        return None
    if (operation.name, leaves[0].ndim if isinstance(leaves[0], torch.Tensor) else None) in WRONG_IN_TORCH:
        return None
    stacks = [
        torch.stack([leaves[place].detach() * (1 + 0.01 * client) for client in range(CLIENTS)]) for place in trained
    ]

    def function(*values):
        given = list(leaves)
        for place, value in zip(trained, values, strict=True):
            given[place] = value
        first, others, named = tree_unflatten(given, form)
        return number_of(operation.op(first, *others, **named))

    try:
        ends = [alone(function, stacks, client) for client in range(CLIENTS)]
    except (RuntimeError, TypeError, AttributeError):
        return None
    if not all(end[0].isfinite() for end in ends):
        return None
    try:
        found = together(function, stacks)
    except Exception:
        # It is refused, which a user is told.
        return None
    expected = [torch.stack(parts) for parts in zip(*ends, strict=True)]
    pairs = zip(found, expected, strict=True)
    return not all(torch.allclose(*pair, rtol=1e-6, atol=1e-6, equal_nan=True) for pair in pairs)


def test_clients_together_have_the_gradients_of_clients_alone(monkeypatch):
    # Their import takes a second, which each collection of tests would take.
    pytest.importorskip("expecttest", reason="torch's examples of its operations need expecttest")
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

    # torch's examples look for their test in the stack, and format it each time that they seed a device not in use.
    monkeypatch.setattr(traceback, "format_stack", lambda *_, **__: [])
    for module in (common_utils, core):
        monkeypatch.setattr(module, "extract_test_fn", lambda: None)
    compared, wrong = set(), []
    for operation in op_db:
        if not operation.supports_autograd or torch.float64 not in operation.supported_dtypes("cpu"):
            continue
        if any(name in operation.name for name in RANDOM):
            continue
        torch.manual_seed(0)
        examples = list(operation.sample_inputs("cpu", torch.float64, requires_grad=True))
        for example in examples[:: max(1, len(examples) // EXAMPLES)]:
            answer = differs(operation, example)
            if answer is not None:
                compared.add(operation.name)
            if answer:
                wrong.append(f"{operation.formatted_name}: {example.summary()}")
    assert not wrong
    assert len(compared) > 400
