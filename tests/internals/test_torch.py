"""What `internals.torch` takes from torch is there, and the public ways beside it give the same."""

import functools

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import get_cosine_schedule_with_warmup

from lightning_lowrank.internals import torch as internals


def test_mapped_tensors_stand_for_stacks():
    seen = []

    def look(tensor):
        seen.append((internals.is_mapped(tensor), internals.map_level(), internals.stack_of(tensor)))
        return internals.mapped(internals.stack_of(tensor) + 1)

    stack = torch.arange(6.0).view(3, 2)
    assert torch.equal(vmap(look)(stack), stack + 1)
    assert torch.equal(vmap(look, in_dims=1)(stack.mT), stack + 1)
    for is_mapped, level, found in seen:
        assert is_mapped
        assert level == 1
        assert torch.equal(found, stack)
    assert not internals.is_mapped(stack)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_of_adam(monkeypatch, dtype):
    """Torch's own function for many tensors, its step on single ones, and its optimizer."""

    def stepped() -> list[torch.Tensor]:
        tensors = [value.to(dtype) for value in values(0)]
        moments = [[torch.zeros_like(value) for value in tensors] for _ in range(2)]
        count = torch.tensor(0.0)
        step = internals.adam_step(tensors, *moments, [count] * len(tensors), lr=0.01, eps=1e-3)
        for number in range(5):
            count += 1
            # Not contiguous, as a gradient may be.
            step(
                [value.to(dtype).mT.contiguous().mT if value.ndim == 2 else value.to(dtype) for value in values(number)]
            )
        return tensors

    fused = stepped()
    monkeypatch.setattr(internals, "_FUSED", ())
    single = stepped()
    expected = [value.to(dtype) for value in values(0)]
    optimizer = torch.optim.Adam(expected, lr=0.01, eps=1e-3)
    for number in range(5):
        for value, gradient in zip(expected, values(number), strict=True):
            value.grad = gradient.to(dtype)
        optimizer.step()
    torch.testing.assert_close(single, expected, rtol=0, atol=0)
    torch.testing.assert_close(fused, expected)


def values(seed: int) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draws, dtype=torch.float64) for shape in ((7,), (3, 5), ())]


def test_functions_of_many_tensors():
    """They give what each tensor's own method gives, also where tensors are on several devices."""
    elsewhere = torch.zeros(2, device="meta")
    for further in ([], [elsewhere]):
        added, copied = values(0), values(0)
        internals.add_each([*added, *further], [*values(1), *further], alpha=0.3)
        divided = internals.divide_each([*values(0), *further], 3.0)
        internals.copy_each(copied, values(1))
        for number, (one, other) in enumerate(zip(values(0), values(1), strict=True)):
            assert torch.equal(added[number], one.add(other, alpha=0.3))
            assert torch.equal(divided[number], one / 3.0)
            assert torch.equal(copied[number], other)


def test_the_tables_of_a_module():
    assert {*internals.TABLES} < vars(nn.Module()).keys()
    assert hasattr(nn.Module, internals.COMPILED)
    norm = nn.BatchNorm1d(3)
    norm.register_parameter("nothing", None)
    internals.own_parameters(norm)["weight"] = replaced = nn.Parameter(torch.ones(3))
    assert norm.weight is replaced
    assert [*internals.own_parameters(norm)] == ["weight", "bias", "nothing"]
    assert internals.own_buffers(norm).keys() == {"running_mean", "running_var", "num_batches_tracked"}
    norm.register_buffer("late", None, persistent=False)
    assert [internals.is_persistent(norm, key) for key in ("running_mean", "late")] == [True, False]
    child = nn.Linear(1, 1)
    assert [*internals.own_children(nn.Sequential(child, child))] == ["0", "1"]


def test_forward_hooks_are_removed_by_their_functions():
    calls = []

    def before(module, arguments, keywords):
        calls.append("before")

    def after(module, arguments, output):
        calls.append("after")

    layer = nn.Identity()
    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.register_forward_hook(after, always_call=True)
    kept = layer.register_forward_hook(lambda *_: calls.append("kept"))
    internals.remove_forward_hooks(layer, before, after)
    layer(torch.zeros(1))
    assert calls == ["kept"]
    kept.remove()
    tables = {name: value for name, value in vars(layer).items() if name.startswith("_forward")}
    assert len(tables) == 5
    assert not any(tables.values())


def test_the_leaves_of_a_graph():
    used, unused, inputs = (torch.ones(2, 3, requires_grad=each) for each in (True, True, False))
    losses = torch.func.vmap(lambda value, each: (value * each).sum())(used, inputs)
    assert internals.leaves_of(losses + (unused.detach() * losses.mean()).sum()) == {used}
    assert internals.leaves_of(inputs) == set()


def test_state_dicts_tell_versions():
    source, target = nn.BatchNorm1d(3).state_dict(), {}
    holder = type(source)(target)
    internals.copy_versions(source, holder)
    assert holder._metadata[""]["version"] == nn.BatchNorm1d._version
    internals.copy_versions({}, holder)


def test_a_tensor_that_was_written():
    tensor = torch.zeros(3)
    seen = [internals.memory_fingerprint(tensor)]
    tensor.add_(1)
    seen.append(internals.memory_fingerprint(tensor))
    tensor.data = torch.ones(3)
    seen.append(internals.memory_fingerprint(tensor))
    assert len(set(seen)) == 3
    assert seen[2] == internals.memory_fingerprint(tensor)
    with torch.inference_mode():
        internals.memory_fingerprint(torch.zeros(3))


PUBLIC = {
    "BATCH_NORMS": ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "LazyBatchNorm2d"),
    "INSTANCE_NORMS": ("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "LazyInstanceNorm2d"),
    "CONVOLUTIONS": ("Conv1d", "Conv2d", "Conv3d", "LazyConv2d", "ConvTranspose2d", "LazyConvTranspose2d"),
    "TRANSPOSED_CONVOLUTIONS": ("ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "LazyConvTranspose2d"),
}


@pytest.mark.parametrize("group", PUBLIC)
def test_base_classes_of_layers(group):
    classes = getattr(internals, group)
    assert all(kind.__name__.startswith("_") for kind in classes), f"torch has no base class of {group}"
    for name in PUBLIC[group]:
        assert issubclass(getattr(nn, name), classes), name
    assert not issubclass(nn.Linear, classes)


def test_a_mode_sees_operations():
    seen = []

    class Seeing(internals.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            seen.append(function)
            return function(*arguments, **(keywords or {}))

    with Seeing():
        torch.zeros(2) + 1
        torch.ones(2).data.mul_(2)
    assert torch.ops.aten.add.Tensor in seen
    assert [internals.writes(torch.ops.aten.add.Tensor), internals.writes(seen[-1])] == [False, True]
    assert internals.writes(None) is False


def test_lengths_of_schedules():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    schedules = torch.optim.lr_scheduler
    warmup = schedules.LinearLR(optimizer, total_iters=5)
    cosine = schedules.CosineAnnealingLR(optimizer, T_max=20)
    constant = schedules.StepLR(optimizer, step_size=7)
    known = {
        warmup: 5,
        cosine: 20,
        constant: None,
        schedules.OneCycleLR(optimizer, max_lr=0.1, total_steps=30): 30,
        schedules.SequentialLR(optimizer, [warmup, cosine], milestones=[5]): 25,
        schedules.SequentialLR(optimizer, [warmup, constant], milestones=[5]): None,
        schedules.ChainedScheduler([warmup, cosine]): 20,
        get_cosine_schedule_with_warmup(optimizer, 2, 40): 40,
        schedules.LambdaLR(optimizer, lambda step: 1 / (step + 1)): None,
        schedules.ReduceLROnPlateau(optimizer): None,
    }
    for schedule, length in known.items():
        assert internals.schedule_length(schedule) == length, type(schedule)


def test_loaders_read_by_a_function(monkeypatch):
    loader = torch.utils.data.DataLoader(range(5), batch_size=2)
    assert hasattr(loader, "_get_iterator")
    for name in ("_dataset_fetcher", "_pin_memory"):
        assert hasattr(iter(loader), name), "torch reads batches elsewhere: those of validation are read on the host"
    read = []
    restore = internals.read_batches_with(loader, lambda: lambda indices: read.append(indices) or len(indices))
    assert internals.read_batches_with(loader, lambda: pytest.fail("reads by a function already")) is None
    torch.manual_seed(0)
    assert list(loader) == [2, 2, 1]
    ours = torch.rand(())
    restore()
    torch.manual_seed(0)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    assert torch.equal(torch.rand(()), ours), "a loader draws one number each time that it is read"
    assert read == [[0, 1], [2, 3], [4]]
    pinning = torch.utils.data.DataLoader(range(5), batch_size=5)
    # As torch does with a GPU.
    pinning.pin_memory = True
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    for reads in (True, False):
        restore = internals.read_batches_with(pinning, lambda reads=reads: len if reads else None)
        assert vars(pinning._get_iterator())["_pin_memory"] is not reads
        restore()


def trained(kind=torch.optim.SGD, **options):
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 2.0)
    return parameter, kind([parameter], lr=0.5, **options)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_bare_step_is_the_optimizers_own(kind):
    parameter, optimizer = trained(kind)
    expected, reference = trained(kind)
    step = internals.bare_step(optimizer)
    assert step != optimizer.step, "torch wraps steps in another way: bare_step leaves everything around them"
    for _ in range(2):
        step(closure=lambda: None)
        reference.step()
    assert torch.equal(parameter, expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "dampening": 0.1},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"weight_decay": 0.01, "maximize": True},
        {"lr": torch.tensor(0.1), "momentum": 0.5},
        {"foreach": True, "momentum": 0.5},
        {"fused": True, "weight_decay": 0.01},
    ],
    ids=str,
)
def test_bare_steps_of_sgd_are_torchs_bit_for_bit(monkeypatch, options):
    """In two groups, one with a parameter that has no gradient; torch's own state comes with them."""
    taken = []

    def stepped(step_of):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(5, 7)) for _ in range(3)]
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.3}]
        optimizer = torch.optim.SGD(groups, **{"lr": 0.1, **options})
        losses = []
        for number in range(3):

            def closure(number=number):
                assert torch.is_grad_enabled()
                for parameter in parameters[number == 0 :]:
                    parameter.grad = torch.randn(5, 7)
                return number

            with torch.set_grad_enabled(number == 1):
                losses.append(step_of(optimizer)(closure))
                assert torch.is_grad_enabled() == (number == 1)
            if number == 1:
                optimizer.param_groups[0]["lr"] = 0.7
        return parameters, optimizer.state_dict()["state"], losses

    own = internals._sgd_step
    monkeypatch.setattr(internals, "_sgd_step", lambda *given: taken.append(1) or own(*given))
    bare, state, losses = stepped(internals.bare_step)
    assert taken == [1, 1, 1], "torch wraps steps in another way: bare_step leaves SGD to torch"
    torchs, expected, of_torch = stepped(lambda optimizer: optimizer.step)
    assert losses == of_torch
    assert all(map(torch.equal, bare, torchs))
    assert state.keys() == expected.keys()
    for index, entries in expected.items():
        assert state[index].keys() == entries.keys()
        assert all(torch.equal(state[index][name], value) for name, value in entries.items())


def test_what_is_added_to_sgd_by_a_class_of_its_own_is_kept():
    class Signed(torch.optim.SGD):
        def _init_group(self, group, parameters, gradients, buffers):
            found = super()._init_group(group, parameters, gradients, buffers)
            gradients[:] = [gradient.sign() for gradient in gradients]
            return found

    parameter, optimizer = trained(Signed)
    internals.bare_step(optimizer)()
    assert parameter[0] == 0.5


def with_a_hook(optimizer):
    optimizer.register_step_pre_hook(lambda *arguments: None)


def with_a_later_hook(optimizer):
    optimizer.register_step_post_hook(lambda *arguments: None)


def with_a_schedule(optimizer):
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.parametrize("listen", [with_a_hook, with_a_later_hook, with_a_schedule])
def test_a_step_that_somebody_listens_to_is_not_bare(listen):
    _, optimizer = trained()
    listen(optimizer)
    assert internals.bare_step(optimizer) == optimizer.step


def test_a_step_wrapped_by_its_class_is_not_bare():
    class Doubled(torch.optim.SGD):
        @functools.wraps(torch.optim.SGD.step)
        def step(self, closure=None):
            super().step(closure)
            return super().step()

    parameter, optimizer = trained(Doubled)
    internals.bare_step(optimizer)()
    assert parameter[0] == -1


def test_hooks_of_all_optimizers_are_heard():
    _, optimizer = trained()
    heard = []
    handle = register_optimizer_step_pre_hook(lambda *arguments: heard.append(1))
    try:
        internals.bare_step(optimizer)()
    finally:
        handle.remove()
    assert heard == [1]


def test_backward_passes_are_those_of_torch(monkeypatch):
    weight, ran = nn.Parameter(torch.arange(3.0)), []
    own = internals._engine_run_backward
    monkeypatch.setattr(internals, "_engine_run_backward", lambda *given, **named: ran.append(own(*given, **named)))
    internals.run_backward((weight**2).sum())
    assert torch.equal(weight.grad, 2 * weight.detach()), "gradients are left where an optimizer looks for them"
    internals.run_backward(weight.sum())
    assert torch.equal(weight.grad, 2 * weight.detach() + 1), "gradients are added to those that are there"
    assert len(ran) == 2, "torch runs backward passes in another way: run_backward leaves everything around them"
    with pytest.raises(RuntimeError, match=r"0.*grad_fn"):
        internals.run_backward(torch.zeros(()))
    with pytest.raises(RuntimeError, match="scalar outputs"):
        internals.run_backward(weight * 1)
    assert len(ran) == 2


@pytest.mark.parametrize("kind", ["own class", "replaced"])
def test_a_backward_pass_of_another_kind_is_called_as_it_is(monkeypatch, kind):
    class Loss(torch.Tensor):
        def backward(self, *arguments, **keywords):
            called.append(1)

    called, loss = [], torch.zeros((), requires_grad=True) * 1
    if kind == "own class":
        loss = loss.as_subclass(Loss)
    else:
        monkeypatch.setattr(torch.Tensor, "backward", lambda self: called.append(1))
    internals.run_backward(loss)
    assert called == [1]


def test_gradients_are_dropped_as_zero_grad_does(monkeypatch):
    parameter, optimizer = trained()
    monkeypatch.setattr(
        torch.autograd.profiler, "record_function", lambda name: pytest.fail("zero_grad has been called")
    )
    internals.drop_gradients(optimizer)
    assert parameter.grad is None


def test_an_own_zero_grad_is_called():
    class Zeroing(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            super().zero_grad(set_to_none=False)

    parameter, optimizer = trained(Zeroing)
    internals.drop_gradients(optimizer)
    assert torch.equal(parameter.grad, torch.zeros(3))


def test_a_profiler_sees_steps():
    _, optimizer = trained()
    with torch.profiler.profile() as profile:
        internals.drop_gradients(optimizer)
        internals.bare_step(optimizer)()
    names = {event.name for event in profile.events()}
    assert {"Optimizer.zero_grad#SGD.zero_grad", "Optimizer.step#SGD.step"} <= names


def test_views_share_their_storage():
    tensor = torch.zeros(4, 2)
    assert internals.storage_key(tensor[1:].T) == internals.storage_key(tensor)
    assert internals.storage_key(torch.zeros(4, 2)) != internals.storage_key(tensor)
    empty = torch.zeros(3, device="meta")
    assert internals.storage_key(empty) == internals.storage_key(empty[1:])
    assert internals.storage_key(empty) != internals.storage_key(torch.zeros(3, device="meta"))
