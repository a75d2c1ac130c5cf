"""What is replayed gives bit for bit what the function gives, and what cannot be traced is refused."""

import sys

import pytest
import torch
from torch import nn
from torch.func import vmap

from lightning_lowrank.internals import tracing
from lightning_lowrank.internals.tracing import Traced, Untraceable
from tests.grids import nightly_except
from tests.helpers import draw

TABLE = torch.arange(5.0)


def gradients(values, inputs):
    """The step of a small network, mapped over clients."""
    values = values.detach().requires_grad_()

    def of_one(value, given):
        return torch.relu(given @ value).log_softmax(1).mean()

    with torch.enable_grad():
        losses = vmap(of_one)(values, inputs)
        (gradient,) = torch.autograd.grad(losses.sum(), [values])
    return [losses.detach(), gradient]


def in_place(values, inputs):
    values.mul_(2).add_(inputs.mean(1))
    values[:, 0] = 3
    return [values.sum(0), values]


def with_constants(values, inputs):
    return [values + torch.tensor(0.5) + TABLE[:4] * torch.arange(4), torch.full_like(values, 2.5) * inputs.shape[1]]


def random_numbers(values, inputs):
    dropped = nn.functional.dropout(inputs, 0.4)
    mapped = vmap(lambda row: nn.functional.dropout(row, 0.3), randomness="different")(values)
    return [dropped, mapped, torch.randn_like(values), torch.rand(3)]


def views(values, inputs):
    turned = inputs.transpose(1, 2).transpose(-1, 1)
    flat = inputs.reshape(-1, inputs.shape[-1])
    first, second = values.chunk(2, dim=1)
    return [turned * 2, flat.t() @ flat, values.unsqueeze(0).expand(2, -1, -1).clone(), second - first, inputs[..., 1]]


def unused(values, inputs):
    values.exp().sum()
    return [values.detach(), inputs.alias() if hasattr(inputs, "alias") else inputs.detach()]


def integers(values, inputs):
    places = inputs.argmax(2)
    return [places, nn.functional.one_hot(places, 4), (places > 1).sum(), values.long() // 2]


FUNCTIONS = {
    "in place": in_place,
    "constants": with_constants,
    "random numbers": random_numbers,
    "views": views,
    "unused": unused,
    "integers": integers,
}
NAMES = [["clients", None], ["clients", "samples", None]]


def given(clients, samples, dtype=torch.float32):
    return [draw(clients, 4, seed=1).to(dtype), draw(clients, samples, 4, seed=2).to(dtype)]


def assert_replayed(traced, function, tensors, sizes):
    assert traced.holds(sizes)
    first, second = ([tensor.clone() for tensor in tensors] for _ in range(2))
    torch.manual_seed(5)
    expected = list(function(*first))
    state = torch.get_rng_state()
    torch.manual_seed(5)
    found = traced.replay(sizes)(second)
    assert len(found) == len(expected)
    for one, two in zip([*found, *second, torch.get_rng_state()], [*expected, *first, state], strict=True):
        assert one.dtype == two.dtype
        assert torch.equal(one, two)
        assert not one.requires_grad


@nightly_except()
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_replayed_for_several_sizes(name, dtype):
    traced = Traced(FUNCTIONS[name], given(3, 5, dtype), NAMES)
    for clients, samples in ((3, 5), (3, 6), (7, 2), (4, 4)):
        assert_replayed(
            traced, FUNCTIONS[name], given(clients, samples, dtype), {"clients": clients, "samples": samples}
        )


@nightly_except()
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_replayed_gradients(dtype):
    def tensors(clients, samples):
        return [draw(clients, 4, 6, seed=1).to(dtype), draw(clients, samples, 4, seed=2).to(dtype)]

    traced = Traced(gradients, tensors(3, 5), [["clients", None, None], ["clients", "samples", None]])
    for clients, samples in ((3, 5), (3, 6), (7, 2)):
        assert_replayed(traced, gradients, tensors(clients, samples), {"clients": clients, "samples": samples})


@pytest.mark.slow
def test_a_traced_size_of_one_is_fixed():
    traced = Traced(views, given(1, 5), NAMES)
    assert_replayed(traced, views, given(1, 7), {"clients": 1, "samples": 7})
    assert not traced.holds({"clients": 2, "samples": 5})


@pytest.mark.slow
def test_a_trace_of_more_does_not_hold_for_one():
    """Torch takes a size of 1 in another way: strides are others, and it is expanded."""
    assert not Traced(views, given(3, 5), NAMES).holds({"clients": 1, "samples": 5})


def test_sizes_that_decide():
    def function(values, inputs):
        return [inputs.sum(1) if inputs.shape[1] > 4 else inputs.mean(1)]

    traced = Traced(function, given(3, 6), NAMES)
    assert_replayed(traced, function, given(5, 9), {"clients": 5, "samples": 9})
    assert not traced.holds({"clients": 3, "samples": 3})


def test_a_size_that_becomes_a_number_is_fixed():
    def function(values, inputs):
        return [values * len([None for _ in range(inputs.shape[1])])]

    traced = Traced(function, given(3, 6), NAMES)
    assert_replayed(traced, function, given(5, 6), {"clients": 5, "samples": 6})
    assert not traced.holds({"clients": 3, "samples": 7})


def test_fixed_sizes():
    traced = Traced(in_place, given(3, 5), [[None, None], [None, None, None]])
    assert_replayed(traced, in_place, given(3, 5), {})


def test_integers_as_inputs():
    def function(values, places):
        return [values.gather(1, places.unsqueeze(1)).squeeze(1), places.add_(1), places.bool()]

    def tensors(clients):
        return [draw(clients, 4), torch.arange(clients) % 4]

    traced = Traced(function, tensors(3), [["clients", None], ["clients"]])
    for clients in (3, 5, 9):
        assert_replayed(traced, function, tensors(clients), {"clients": clients})


def test_constants_are_the_tensors_themselves():
    """What changes them later is seen by a replay, as by the function."""
    table = torch.ones(4)
    traced = Traced(lambda values: [values * table], given(3, 5)[:1], NAMES[:1])
    replay = traced.replay({"clients": 3})
    table.fill_(3)
    (values, _) = given(3, 5)
    assert torch.equal(replay([values])[0], values * 3)
    assert any(constant is table for constant in traced.constants)


@pytest.mark.slow
def test_tracing_leaves_arguments_and_random_numbers_alone():
    tensors = given(3, 5)
    before, state = [tensor.clone() for tensor in tensors], torch.get_rng_state()
    Traced(in_place, tensors, NAMES)
    Traced(random_numbers, tensors, NAMES)
    assert all(map(torch.equal, tensors, before))
    assert torch.equal(torch.get_rng_state(), state)


REFUSED = {
    "item": lambda values, inputs: [values * values.sum().item()],
    "condition": lambda values, inputs: [values if values.sum() > 0 else -values],
    "item of a constant": lambda values, inputs: [values * TABLE[1].item()],
    "list": lambda values, inputs: [values * TABLE.tolist()[1]],
    "array": lambda values, inputs: [values * float(TABLE.numpy()[1])],
    "equality of constants": lambda values, inputs: [values if torch.equal(TABLE, TABLE) else -values],
    "nearness of constants": lambda values, inputs: [values if torch.allclose(TABLE, TABLE) else -values],
    "writing into a constant": lambda values, inputs: [values * TABLE.add_(1)[0]],
    "writing into what is kept": lambda values, inputs: [inputs.add_(1)],
    "writing into a view of it": lambda values, inputs: [inputs[0].t().mul_(2)],
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    before = TABLE.clone()
    with pytest.raises(Untraceable, match="tensor"):
        Traced(REFUSED[case], given(3, 5), NAMES, kept=[1])
    assert torch.equal(TABLE, before)


def test_an_error_of_the_function_is_its_own():
    with pytest.raises(ZeroDivisionError):
        Traced(lambda values: [values / (1 // 0)], given(3, 5)[:1], NAMES[:1])


def test_torch_has_what_tracing_needs():
    assert tracing.unsupported_reason() == ""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    fake = mode.from_tensor(torch.ones(3, 4), symbolic_context=context)
    assert isinstance(fake.shape[0], torch.SymInt), "a dynamic size is no SymInt: sizes would be fixed"
    assert not isinstance(fake.shape[1], torch.SymInt)
    graph = make_fx(
        lambda tensor: tensor.view(-1) * tensor.shape[0], tracing_mode="symbolic", _allow_non_fake_inputs=True
    )(fake)
    assert {node.op for node in graph.graph.nodes} >= {"placeholder", "call_function", "output"}
    assert fake.shape[0].node.expr.xreplace({fake.shape[0].node.expr: 3}) == 3
    assert hasattr(shapes, "guards")
    assert fake.untyped_storage()._cdata == fake[0].untyped_storage()._cdata
    schema = torch.ops.aten.add_.Tensor._schema
    assert schema.name == "aten::add_"
    assert schema.is_mutable
    assert torch.Tag.data_dependent_output in torch.ops.aten._local_scalar_dense.default.tags


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch._subclasses.fake_tensor", "FakeTensorMode"),
        ("torch.fx.experimental.proxy_tensor", "make_fx"),
        ("torch.fx.experimental.symbolic_shapes", "ShapeEnv"),
        ("torch.fx.experimental.symbolic_shapes", "DimDynamic"),
        ("torch.fx.experimental.symbolic_shapes", "StatelessSymbolicContext"),
    ],
)
def test_a_torch_without_it(monkeypatch, module, name):
    monkeypatch.delattr(sys.modules[module], name)
    assert "has no tracing of this kind" in tracing.unsupported_reason()


def test_every_function_and_method_that_is_called_by_name_is_torch_s():
    missing = [name for name in tracing._FUNCTIONS if not hasattr(torch, name) and not hasattr(torch.ops.aten, name)]
    missing += [name for name in tracing._METHODS if not hasattr(torch.Tensor, name)]
    assert not missing


def test_inductor_is_where_it_is_looked_for():
    import torch._inductor as inductor

    assert callable(inductor.compile)
    assert tracing.can_compile(torch.device("meta")) == "inductor does not compile for meta"


def test_no_compiler(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "C++ compiler" in tracing.can_compile(torch.device("cpu"))


@pytest.mark.nightly
@pytest.mark.skipif(bool(tracing.can_compile(torch.device("cpu"))), reason="there is no compiler")
def test_compiled():
    def tensors(clients, samples):
        return [draw(clients, 4, 6, seed=1), draw(clients, samples, 4, seed=2)]

    compiled = Traced(gradients, tensors(3, 5), [["clients", None, None], ["clients", "samples", None]]).compile()
    for clients, samples in ((3, 5), (4, 7)):
        for one, two in zip(compiled(tensors(clients, samples)), gradients(*tensors(clients, samples)), strict=True):
            torch.testing.assert_close(one, two)
