"""Low-rank layers outside of Python: exported, in ONNX, and compiled, for batches of every size."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from lightning_lowrank.layers import (
    CP,
    BlockKronecker,
    Hadamard,
    LowRankLayer,
    MatrixProduct,
    convert,
    low_rank_class,
    recover,
)
from tests.grids import nightly_except
from tests.helpers import draw

DENSE = {
    "linear": (lambda: nn.Linear(24, 16), lambda size: torch.randn(size, 24)),
    "sequence": (lambda: nn.Linear(24, 16), lambda size: torch.randn(size, 3, 24)),
    "convolution": (lambda: nn.Conv2d(8, 12, 3, stride=2, padding=1), lambda size: torch.randn(size, 8, 9, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(8, 12, 3, stride=2), lambda size: torch.randn(size, 8, 5, 5)),
    "embedding": (lambda: nn.Embedding(30, 16), lambda size: torch.arange(size * 4).reshape(size, 4) % 30),
}
FACTORIZATIONS = [MatrixProduct(), BlockKronecker(), CP()]
SIZES = (1, 2, 9, 64)
CASES = [(dense, form, role) for dense in DENSE for form in FACTORIZATIONS for role in ("weight", "update")]


def layer_of(dense: str, form, role: str, **settings) -> tuple[LowRankLayer, list[torch.Tensor]]:
    torch.manual_seed(0)
    make, draw = DENSE[dense]
    module = make()
    layer = low_rank_class(module).from_dense(module, form, 2, role=role, **settings).eval()
    with torch.no_grad():
        for factor in layer.factors.values():
            factor.normal_(0, 0.3)
    return layer, [draw(size) for size in SIZES]


def names(case) -> str:
    return getattr(type(case), "__name__", str(case)) if not isinstance(case, str) else case


@nightly_except(
    "linear-MatrixProduct-update-True", "convolution-CP-weight-False", "embedding-BlockKronecker-update-False"
)
@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("dense", "form", "role"), CASES, ids=names)
def test_an_exported_layer_takes_batches_of_every_size(dense, form, role, strict):
    layer, inputs = layer_of(dense, form, role)
    batch = torch.export.Dim("batch")
    program = torch.export.export(layer, (inputs[2],), dynamic_shapes=({0: batch},), strict=strict).module()
    for each in inputs:
        torch.testing.assert_close(program(each), layer(each), rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(("dense", "form", "role"), CASES, ids=names)
def test_a_layer_in_onnx_takes_batches_of_every_size(tmp_path, dense, form, role):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    layer, inputs = layer_of(dense, form, role)
    file = str(tmp_path / "layer.onnx")
    shapes = ({0: torch.export.Dim("batch")},)
    torch.onnx.export(layer, (inputs[2],), file, dynamo=True, dynamic_shapes=shapes, input_names=["x"], verbose=False)
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for each in inputs:
        (found,) = session.run(None, {"x": each.numpy()})
        torch.testing.assert_close(torch.tensor(found), layer(each), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("dense", "form", "role"), CASES, ids=names)
@pytest.mark.nightly
def test_a_compiled_layer_has_few_graphs(dense, form, role):
    layer, _ = layer_of(dense, form, role)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, backend=backend)
    for size in (*range(1, 30), 64):
        inputs = DENSE[dense][1](size)
        torch.testing.assert_close(compiled(inputs), layer(inputs), rtol=1e-5, atol=1e-5)
    assert len(graphs) <= 3


@pytest.mark.parametrize("compute", ["auto", "dense"])
def test_a_hadamard_layer_is_exported_dense(compute):
    layer, inputs = layer_of("linear", Hadamard(), "weight", compute=compute)
    program = torch.export.export(layer, (inputs[2],), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    for each in inputs:
        torch.testing.assert_close(program(each), layer(each), rtol=1e-5, atol=1e-5)


def converted():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    convert(model, MatrixProduct(), rank=2)
    return model.eval()


OTHER_FORMS = {
    "quantize_dynamic": lambda model: torch.ao.quantization.quantize_dynamic(model, {nn.Linear}),
    "prune": lambda model: prune.l1_unstructured(model[0], "weight", 0.5),
    "prune of all": lambda model: prune.global_unstructured([(model[0], "weight")], prune.L1Unstructured, amount=0.5),
    "jit.script": torch.jit.script,
    "fx": torch.fx.symbolic_trace,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", OTHER_FORMS)
def test_what_would_pass_over_the_factors_is_refused_and_works_once_recovered(form):
    """A quantized model was the same as before, without a word."""
    model = converted()
    inputs = draw(3, 8)
    before = model(inputs)
    with pytest.raises(RuntimeError, match=r"LowRankLinear.*recover\(model\)"):
        OTHER_FORMS[form](model)
    assert torch.equal(model(inputs), before)
    OTHER_FORMS[form](recover(model))


@pytest.mark.filterwarnings("ignore")
def test_a_pickled_copied_or_traced_model_is_equal(tmp_path):
    model = converted()
    torch.save(model, tmp_path / "model.pt")
    inputs = draw(3, 8)
    assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=False)(inputs), model(inputs))
    assert torch.equal(copy.deepcopy(model)(inputs), model(inputs))
    assert torch.equal(torch.jit.trace(model, inputs)(inputs), model(inputs))
