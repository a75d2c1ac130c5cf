"""Private parts of torch that this package uses."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active
from torch._C._functorch import (
    _add_batch_dim,
    current_level,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    maybe_get_bdim,
)
from torch.autograd import _profiler_enabled
from torch.autograd.graph import _engine_run_backward
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Optimizer
from torch.optim.adam import adam
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_lowrank.internals.replaced import replaced

# Tensors inside torch.func.vmap

is_mapped = is_batchedtensor
is_transformed = is_functorch_wrapped_tensor
map_level = current_level
values_of = get_unwrapped
"""Returns the tensor behind a mapped tensor, in the order of dimensions that it has."""


def stack_of(tensor: Tensor) -> Tensor:
    """The stack behind a mapped tensor, with the mapped dimension first."""
    stack, dimension = get_unwrapped(tensor), maybe_get_bdim(tensor)
    return stack if dimension == 0 else stack.movedim(dimension, 0)


def mapped(stack: Tensor, dimension: int = 0) -> Tensor:
    """A mapped tensor for a stack, for use inside a single vmap; ``dimension`` is the mapped one."""
    return _add_batch_dim(stack, dimension, 1)


@contextmanager
def no_assignments_to_data() -> Iterator[None]:
    """A context in which an assignment of a mapped tensor to ``tensor.data`` is an error, as torch has it within vmap.

    Within ``vmap(grad(...))`` torch lets it pass, and the next use of the tensor ends the process.
    """
    own: Any = Tensor.data

    def assign(tensor: Tensor, value: Tensor) -> None:
        if is_transformed(value):
            raise RuntimeError("mutating directly with `.data` under vmap transform is not allowed.")
        own.__set__(tensor, value)

    Tensor.data = property(own.__get__, assign)  # type: ignore[assignment]
    try:
        yield
    finally:
        del Tensor.data


# Accelerators


def device_module(device: torch.device) -> Any:
    """The torch module of an accelerator, such as ``torch.cuda``; ``None`` for the CPU or if torch has none.

    Example:
        >>> device_module(torch.device("cpu")) is None
        True
    """
    return None if device.type == "cpu" else getattr(torch, device.type, None)


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished its queued operations, if it supports that."""
    module = device_module(device)
    if hasattr(module, "synchronize"):
        module.synchronize()


@contextmanager
def without_autocast() -> Iterator[None]:
    """A context, and decorator, in which autocast is off, so that products are as precise as their tensors.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16), without_autocast():
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.float32
    """
    accelerator = torch.accelerator.current_accelerator()
    with ExitStack() as stack:
        for kind in ("cpu",) if accelerator is None else ("cpu", accelerator.type):
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@functools.cache
def has_float64(kind: str) -> bool:
    """Whether a kind of device supports float64; Apple's and some of Intel's do not.

    Example:
        >>> has_float64("cpu"), has_float64("mps")
        (True, False)
    """
    if kind in ("cpu", "cuda", "mps"):
        return kind != "mps"
    try:
        torch.zeros(1, dtype=torch.float64, device=kind)
    except (RuntimeError, TypeError):
        return False
    return True


# Learning rate schedulers


def schedule_length(scheduler: Any) -> int | None:
    """The number of steps after which a schedule ends; ``None`` if unknown.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> schedule_length(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50))
        50
    """
    parts = getattr(scheduler, "_schedulers", None)
    if parts:
        begins = getattr(scheduler, "_milestones", [0])[-1]
        lengths = [schedule_length(part) for part in (parts[-1:] if begins else parts)]
        known = [length for length in lengths if length is not None]
        return begins + max(known) if known else None
    # Schedules of transformers are functools.partial functions with the number of steps as an argument.
    functions = [getattr(function, "keywords", {}) for function in getattr(scheduler, "lr_lambdas", ())]
    found = [getattr(scheduler, name, None) for name in ("total_steps", "T_max", "total_iters")]
    found += [arguments.get("num_training_steps") for arguments in functions]
    return max((int(length) for length in found if length is not None), default=None)


# Functions of many tensors at once


def as_rows(stack: Tensor) -> Tensor:
    """Flatten each tensor of a stack to a row; scalars become rows of one number.

    Example:
        >>> as_rows(torch.zeros(5, 2, 3)).shape, as_rows(torch.zeros(5)).shape
        (torch.Size([5, 6]), torch.Size([5, 1]))
    """
    return stack.unsqueeze(-1).flatten(1)


def add_each(tensors: Sequence[Tensor], others: Sequence[Tensor], alpha: float = 1) -> None:
    """In place: ``tensor += alpha * other`` for each pair."""
    if len({tensor.device for tensor in tensors}) == 1:
        torch._foreach_add_(list(tensors), list(others), alpha=alpha)
        return
    for tensor, other in zip(tensors, others, strict=True):
        tensor.add_(other, alpha=alpha)


def divide_each(tensors: Sequence[Tensor], divisor: float) -> Sequence[Tensor]:
    """The quotients of tensors and a number."""
    if len({tensor.device for tensor in tensors}) == 1:
        return torch._foreach_div(list(tensors), divisor)
    return [tensor / divisor for tensor in tensors]


def copy_each(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """In place: copy each value into the tensor at the same position."""
    torch._foreach_copy_(list(tensors), list(values))


# Backward passes without torch's overhead

_BACKWARDS = Tensor.backward, torch.autograd.backward


def run_backward(loss: Tensor) -> None:
    """The same as ``loss.backward()``, faster for plain scalars because torch's checks are skipped.

    For a small model that is a twentieth of a client's step.
    """
    if (
        type(loss) is not Tensor
        or loss.dim()
        or not loss.requires_grad
        or loss.is_complex()
        or (Tensor.backward, torch.autograd.backward) != _BACKWARDS
        or has_torch_function((loss,))
        or _are_functorch_transforms_active()
    ):
        loss.backward()
        return
    ones = torch.ones_like(loss, memory_format=torch.preserve_format)
    _engine_run_backward((loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)


# Optimizers without torch's overhead for profilers

_ZERO_GRAD = Optimizer.zero_grad
_SGD_STEP = inspect.unwrap(SGD.step)
# Each optimizer class's `step` is wrapped by a function with this code, which runs hooks and reports to the profiler.
_AROUND_STEP = Optimizer.profile_hook_step(lambda optimizer: None).__code__


def drop_gradients(optimizer: Optimizer) -> None:
    """The same as ``optimizer.zero_grad()``, without a report to the profiler if none is active.

    The report takes longer than dropping the gradients of a small model.
    """
    own = type(optimizer).zero_grad is not _ZERO_GRAD or "zero_grad" in vars(optimizer)
    if own or _profiler_enabled():
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def has_observers(optimizer: Optimizer) -> bool:
    """Whether hooks or replaced methods may observe an optimizer's steps.

    The counter of steps that a learning rate scheduler installs is not an observer.
    """
    return bool(
        getattr(type(optimizer).step, "__code__", None) is not _AROUND_STEP
        or ("step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"))
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


def is_on(device: torch.device, batch: Any) -> bool:
    """Whether a batch is known to be on a device entirely; ``False`` for unknown types."""
    kind = type(batch)
    if kind is Tensor:
        return bool(batch.device == device)
    if kind is list or kind is tuple:
        return all(is_on(device, part) for part in batch)
    return getattr(kind, "holds_no_tensors", False)


def bare_step(optimizer: Optimizer) -> Callable[..., Any]:
    """``optimizer.step``, without torch's wrapper for hooks and profilers if none is active."""
    step = type(optimizer).step
    if "step" in vars(optimizer) or has_observers(optimizer) or _profiler_enabled():
        return optimizer.step
    if type(optimizer) is SGD and getattr(step.__wrapped__, "__wrapped__", None) is _SGD_STEP:  # type: ignore[attr-defined]
        return functools.partial(_sgd_step, optimizer)
    return functools.partial(step.__wrapped__, optimizer)  # type: ignore[attr-defined]


def _sgd_step(optimizer: SGD, closure: Callable[[], Any] | None = None) -> Any:
    """The same as ``SGD.step``, on the CPU without torch's lists for other kinds of steps.

    For a small model they take a third of its time. The operations are the same, one parameter after another.
    """
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    if not all(map(steps_singly, optimizer.param_groups)):
        SGD.step.__wrapped__(optimizer)  # type: ignore[attr-defined]
        return loss
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    sgd_update(optimizer, group, parameter, parameter, parameter.grad, group["weight_decay"])
    return loss


def steps_singly(group: Mapping[str, Any]) -> bool:
    """Whether `sgd_update` does the same as torch's SGD for a parameter group."""
    if group["maximize"] or group["foreach"] or group.get("fused") or group.get("differentiable"):
        return False
    for name in ("lr", "weight_decay", "momentum", "dampening"):
        if type(group[name]) not in (float, int):
            return False
    return all(parameter.is_cpu for parameter in group["params"])


def sgd_update(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameter: Tensor,
    target: Tensor,
    gradient: Tensor,
    weight_decay: float,
) -> None:
    """Update one tensor with the operations of torch's SGD on a CPU.

    Args:
        optimizer: The optimizer, which has the state.
        group: The parameter's group, for which `steps_singly` holds.
        parameter: The parameter under which the optimizer keeps the momentum.
        target: The tensor to update.
        gradient: Its gradient, which is left as it is.
        weight_decay: The weight decay, in place of the group's.
    """
    momentum = group["momentum"]
    if weight_decay:
        gradient = gradient.add(target, alpha=weight_decay)
    if momentum:
        state = optimizer.state[parameter]
        buffer = state.get("momentum_buffer")
        if buffer is None:
            buffer = state["momentum_buffer"] = gradient.detach().clone()
        else:
            buffer.mul_(momentum).add_(gradient, alpha=1 - group["dampening"])
        gradient = gradient.add(buffer, alpha=momentum) if group["nesterov"] else buffer
    target.add_(gradient, alpha=-group["lr"])


_FUSED = ("cpu", "cuda")
"""The kinds of devices on which torch has one function for steps of Adam on many tensors."""


def adam_step(
    values: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    counts: Sequence[Tensor],
    lr: float,
    eps: float,
) -> Callable[[Sequence[Tensor]], None]:
    """A function that makes steps of Adam (betas 0.9 and 0.999) on contiguous tensors, in place, given gradients.

    On another device than a CPU or CUDA, the steps are those of ``torch.optim.adam.adam``.

    Args:
        values: The tensors.
        first: Their first moments.
        second: Their second moments.
        counts: Number of each tensor's step, from 1, to be counted by the caller: floating-point scalars on the
            tensors' device. Several tensors may share one.
        lr: Learning rate.
        eps: Number that is added to the root of the second moment.
    """
    options: dict[str, Any] = {"amsgrad": False, "beta1": 0.9, "beta2": 0.999, "lr": lr, "eps": eps}
    options |= {"weight_decay": 0.0, "maximize": False}
    tensors = list(values), list(first), list(second)
    numbers = list(counts)
    if values[0].device.type in _FUSED:

        def fused(gradients: Sequence[Tensor]) -> None:
            dense = [gradient.contiguous() for gradient in gradients]
            torch._fused_adam_(tensors[0], dense, *tensors[1:], [], numbers, **options)

        return fused

    def single(gradients: Sequence[Tensor]) -> None:
        adam(tensors[0], list(gradients), *tensors[1:], [], [number - 1 for number in numbers], **options)

    return single


# Tables of a module's own parameters, buffers and children

TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")
"""The attributes in which a module registers parameters, buffers and children."""

COMPILED = "_compiled_call_impl"
"""The attribute in which ``Module.compile`` keeps its result, which is bound to the module."""


def own_parameters(module: nn.Module) -> MutableMapping[str, Any]:
    """A module's own table of parameters, without those of submodules, for reading and writing.

    There is no public way: ``named_parameters`` leaves out entries that are ``None``, and ``register_parameter``
    refuses the name of a property.
    """
    return module._parameters


def own_buffers(module: nn.Module) -> MutableMapping[str, Any]:
    """A module's own table of buffers, for reading and writing; see `own_parameters`."""
    return module._buffers


def remove_forward_hooks(module: nn.Module, *functions: Callable[..., Any]) -> None:
    """Remove a module's forward hooks and pre-hooks that are one of these functions.

    There is no public way without their handles, which copies of the module do not share.
    """
    for kind in ("_forward_pre_hooks", "_forward_hooks"):
        hooks = getattr(module, kind)
        for key in [key for key, hook in hooks.items() if hook in functions]:
            for table in (kind, f"{kind}_with_kwargs", f"{kind}_always_called"):
                getattr(module, table, {}).pop(key, None)


def is_persistent(module: nn.Module, key: str) -> bool:
    """Whether a module's own buffer of this name is in the state dict, once it is not ``None``."""
    return key not in module._non_persistent_buffers_set


def named_persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """``named_buffers()`` without buffers that were registered with ``persistent=False``."""
    for name, buffer in module.named_buffers():
        part, _, key = name.rpartition(".")
        if is_persistent(module.get_submodule(part), key):
            yield name, buffer


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module's state dict by their names in the module, whether or not ``state_dict()`` has them."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from named_persistent_buffers(module)


def standard_gamma(alpha: Tensor, draws: torch.Generator) -> Tensor:
    """Draw from Gamma(alpha, 1) with a given CPU generator, which `torch.distributions` does not accept."""
    return torch._standard_gamma(alpha, generator=draws).clamp_(min=torch.finfo(alpha.dtype).tiny)


def leaves_of(tensor: Tensor) -> set[Tensor]:
    """The leaves that a tensor's gradient reaches in its graph."""
    found: set[Tensor] = set()
    seen: set[Any] = set()
    queue: list[Any] = [tensor.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.add(leaf)
        queue += [following for following, _ in node.next_functions]
    return found


def has_hooks(tensor: Tensor) -> bool:
    """Whether a tensor has gradient hooks, as from `Tensor.register_hook`."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def backward_hooks(module: nn.Module) -> bool:
    """Whether a module has backward hooks."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def global_hooks() -> bool:
    """Whether torch has global module hooks."""
    tables = ("forward", "forward_pre", "backward", "backward_pre")
    return any(getattr(torch.nn.modules.module, f"_global_{table}_hooks", None) for table in tables)


def sharing_memory(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, str]]:
    """Pairs of names of different tensors that overlap in memory."""
    places: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in named:
        if tensor.layout is torch.strided and not tensor.is_meta and not is_lazy(tensor) and tensor.numel():
            begin = int(tensor.storage_offset())
            end = begin + sum(
                int(size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            try:
                storage = tensor.untyped_storage().data_ptr()
            except (RuntimeError, NotImplementedError):
                # A tensor subclass, or a tensor without storage.
                continue
            places.setdefault(storage, []).append((begin * tensor.itemsize, end * tensor.itemsize, name))
    found = []
    for spans in places.values():
        spans.sort()
        found += [(before[2], after[2]) for before, after in itertools.pairwise(spans) if after[0] <= before[1]]
    return found


def version_of(tensor: Tensor) -> int:
    """A tensor's version counter, which counts changes in place; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def is_unchanged(before: Tensor, version: int, now: Tensor) -> bool:
    """Whether ``now`` shares all memory of ``before``, as after ``detach``, and nothing was written since ``version``.

    Example:
        >>> value = torch.zeros(2)
        >>> is_unchanged(value, version_of(value), value.detach()), is_unchanged(value, version_of(value), value + 0)
        (True, False)
    """
    if before.is_inference() or now.is_inference() or not before.layout is now.layout is torch.strided:
        return False
    form = before.dtype, before.shape, before.stride()
    same = before is now or (before.data_ptr() == now.data_ptr() != 0 and form == (now.dtype, now.shape, now.stride()))
    return same and now._version == version


def own_children(module: nn.Module) -> MutableMapping[str, Any]:
    """A module's own table of submodules.

    There is no public way: ``named_children`` names a child that is registered twice only once.
    """
    return module._modules


def places_of(module: nn.Module, names: Mapping[Tensor, str]) -> dict[str, str]:
    """The name of each place of a module that holds a named tensor, once, with that tensor's name.

    The names are for `torch.func.functional_call` with ``tie_weights=False``. With another name of the same submodule,
    it would swap that place twice, and then restore what the first swap has put there.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> places_of(nn.Sequential(layer, layer), {layer.weight: "shared"})
        {'0.weight': 'shared'}
    """
    return {
        f"{path}.{key}" if path else key: names[tensor]
        for path, part in module.named_modules()
        for table in (own_parameters(part), own_buffers(part))
        for key, tensor in table.items()
        if tensor is not None and tensor in names
    }


@contextmanager
def recurrent_weights_kept(module: nn.Module) -> Iterator[None]:
    """A context that restores recurrent layers' internal lists of weights.

    A layer that is called with other weights by `torch.func.functional_call` keeps these in lists until its next call.
    There is no public way to refresh them, and tensors inside a transform mean nothing outside of it.
    """
    layers = [vars(part) for part in module.modules() if isinstance(part, nn.RNNBase)]
    kept = ("_flat_weights", "_flat_weight_refs")
    before: list[dict[str, Any]] = [{name: own[name] for name in kept if name in own} for own in layers]
    try:
        yield
    finally:
        for own, lists in zip(layers, before, strict=True):
            own.update(lists)


def memory_fingerprint(tensor: Tensor) -> tuple[int, int]:
    """A fingerprint of a tensor's memory: it changes with writes in place and with new data.

    Weights of 4 bits of bitsandbytes count as never written: for evaluation on some CPUs it packs them again.
    """
    if quantised_to_4_bits(tensor):
        return 0, 0
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


def digest_of(tensor: Tensor) -> str:
    """A digest of a tensor's type, shape and numbers, equal on all devices."""
    found = hashlib.blake2b(f"{tensor.dtype} {list(tensor.shape)}".encode(), digest_size=16)
    tensor = tensor.detach()
    flatten = getattr(tensor, "__tensor_flatten__", None)
    # A quantised tensor subclass consists of several plain tensors.
    for part in [tensor] if flatten is None else [getattr(tensor, name) for name in flatten()[0]]:
        flat = part.cpu().contiguous().flatten()
        found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()


def quantised_to_4_bits(tensor: Tensor) -> bool:
    """Whether a weight is a packed 4-bit tensor of bitsandbytes, which only that library can write."""
    return getattr(tensor, "quant_state", None) is not None


def copy_versions(source: Any, target: Any) -> None:
    """Copy the module versions in one state dict's metadata to another.

    Some modules of torch load a state dict without them as one of their first version. If state dicts have no
    versions, nothing is copied.
    """
    if hasattr(source, "_metadata"):
        target._metadata = source._metadata


# Loaders


def read_batches_with(
    loader: DataLoader, begin: Callable[[], Callable[[list[int]], Any] | None]
) -> Callable[[], None] | None:
    """Have a loader without workers read batches by a function; everything else stays, except for pinning.

    There is no public way: another dataset or collate function would be seen in the loader's attributes, and another
    loader in the trainer. Under a torch without these parts the loader reads as before.

    Args:
        loader: The loader.
        begin: Returns at each iteration the function, which gets the indices of a batch's samples; ``None``: the loader
            reads as before.

    Returns:
        A function that undoes it; ``None`` if nothing was changed, as when the loader reads by a function already.

    Example:
        >>> loader = DataLoader([10, 20, 30], batch_size=2)
        >>> restore = read_batches_with(loader, lambda: sum)
        >>> list(loader)
        [1, 2]
        >>> restore()
        >>> list(loader)
        [tensor([10, 20]), tensor([30])]
    """
    if not hasattr(loader, "_get_iterator") or "_get_iterator" in vars(loader):
        return None
    make_iterator = loader._get_iterator

    def make_reading() -> Any:
        iterator, read = make_iterator(), begin()
        fetcher: Any = getattr(iterator, "_dataset_fetcher", None)
        if read is not None and hasattr(fetcher, "fetch") and hasattr(iterator, "_pin_memory"):
            # torch refuses to pin tensors that are on a device.
            iterator._pin_memory = False
            fetcher.fetch = read
        return iterator

    ends = ExitStack()
    ends.enter_context(replaced(loader, _get_iterator=make_reading))
    return ends.close


# Common private base classes of layers


BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
"""The classes of batch normalisation, for ``isinstance``."""

INSTANCE_NORMS = (nn.modules.instancenorm._InstanceNorm,)
"""The classes of instance normalisation, for ``isinstance``."""

TRANSPOSED_CONVOLUTIONS = (nn.modules.conv._ConvTransposeNd,)
"""The classes of transposed convolutions, for ``isinstance``. Lazy ones are among them."""

CONVOLUTIONS = (nn.modules.conv._ConvNd,)
"""The classes of all convolutions, transposed ones too, for ``isinstance``. Lazy ones are among them."""


# Dispatch modes


def writes(operation: Any) -> bool:
    """Whether an operation seen by a dispatch mode changes its first argument; ``False`` if unknown."""
    return bool(getattr(getattr(operation, "_schema", None), "is_mutable", False))


def own_shape(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor in another shape that torch does not consider a view; the original must not be used again."""
    return torch.ops.aten._unsafe_view(tensor, shape)


def storage_key(tensor: Tensor) -> int:
    """An identifier of a tensor's storage, which its views share, inside vmap as well."""
    # Not data_ptr(), which meta tensors do not have.
    return (values_of(tensor) if is_mapped(tensor) else tensor).untyped_storage()._cdata


def random_states(*devices: torch.device) -> list[Tensor]:
    """The states of torch's generators of the CPU and of ``devices``."""
    modules = [(device_module(device), device) for device in devices if device.type != "cpu"]
    return [torch.get_rng_state(), *(it.get_rng_state(on) for it, on in modules if hasattr(it, "get_rng_state"))]
