"""Conversion on whole models: torchvision's classifiers, torch's and Hugging Face's transformers, and the
machinery that users put around models."""

import copy
import datetime
import functools
import pickle
import re
import time
from collections import OrderedDict

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torchvision import models
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.maxvit import MaxVit
from torchvision.models.regnet import BlockParams, RegNet
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

from lightning_lowrank.layers import (
    CP,
    BlockKronecker,
    Hadamard,
    LowRankLayer,
    MatrixProduct,
    convert,
    dense_state_dict,
    low_rank_layers,
    merge,
    recover,
    unmerge,
)
from tests.grids import all_pairs, in_turn, nightly_except

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:`torch.jit.trace:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean"),
    pytest.mark.filterwarnings("ignore:`torch.jit.trace_method"),
]

PRODUCT, KRONECKER, PARALLEL, HADAMARD = MatrixProduct(), BlockKronecker(), CP(), Hadamard()
REASONS = (
    r"rank \d+ would train [\d,]+ numbers, not fewer than the weight has",
    r"rank \d+ is more than the largest of such a weight, \d+",
)


# torchvision's classifiers


def with_a_small_head(model, channels):
    """Shrink the head, which holds nearly all of the parameters of AlexNet and VGG."""
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier = nn.Sequential(nn.Linear(channels, 256), nn.ReLU(), nn.Dropout(), nn.Linear(256, 10))
    return model


def alexnet():
    return with_a_small_head(models.alexnet(num_classes=10), 256)


def vgg():
    features = models.vgg.make_layers([32, "M", 64, "M", 96, 96, "M", 128, 128, "M"])
    return with_a_small_head(models.VGG(features, num_classes=10, init_weights=False), 128)


def resnet(block, **groups):
    return models.ResNet(block, [1, 1, 1, 1], num_classes=10, **groups)


def inception():
    # Its auxiliary head, which GoogLeNet has too, takes images of 299 pixels alone.
    return models.inception_v3(num_classes=10, init_weights=False, aux_logits=False)


def regnet(se_ratio):
    widths = BlockParams.from_init_params(depth=4, w_0=16, w_a=16.0, w_m=2.0, group_width=8, se_ratio=se_ratio)
    return RegNet(widths, num_classes=10)


def vision_transformer():
    model = models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, dropout=0.1, num_classes=10
    )
    # Torchvision starts the head at zero, which has no scale of its own for role="weight".
    nn.init.normal_(model.heads.head.weight, std=0.1)
    return model


def swin(**version):
    return SwinTransformer(
        [2, 2], 16, [2, 2], [2, 4], [2, 2], dropout=0.1, stochastic_depth_prob=0.1, num_classes=10, **version
    )


BASIC, BOTTLENECK = models.resnet.BasicBlock, models.resnet.Bottleneck
# Families of torchvision with several forms. Of small networks one runs daily.
SMALL = {
    "convnext": (
        lambda: ConvNeXt([CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)], 0.1, num_classes=10),
        32,
        PARALLEL,
        HADAMARD,
    ),
    "densenet": (lambda: models.DenseNet(8, (2, 2), 16, num_classes=10), 32, KRONECKER, PARALLEL),
    "maxvit": (lambda: MaxVit((32, 32), 8, 2, [8, 16], [1, 1], 4, 0.1, num_classes=10), 32, HADAMARD, PARALLEL),
    "mobilenet_v3": (lambda: models.mobilenet_v3_small(num_classes=10, width_mult=0.5), 64, HADAMARD, PARALLEL),
    "regnet_x": (lambda: regnet(None), 64, KRONECKER, HADAMARD),
    "regnet_y": (lambda: regnet(0.25), 64, PARALLEL, KRONECKER),
    "resnet": (lambda: resnet(BASIC), 32, PARALLEL, KRONECKER),
    "shufflenet_v2": (
        lambda: models.ShuffleNetV2([2, 2, 2], [24, 48, 96, 192, 64], num_classes=10),
        64,
        HADAMARD,
        PARALLEL,
    ),
    "squeezenet": (lambda: models.squeezenet1_0(num_classes=10), 32, KRONECKER),
    "swin": (swin, 32, HADAMARD, PARALLEL),
    "swin_v2": (lambda: swin(block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2), 32, KRONECKER),
    "vit": (vision_transformer, 32, KRONECKER),
}
LARGE = {
    "alexnet": (alexnet, 64, PRODUCT, PARALLEL),
    "efficientnet_b0": (lambda: models.efficientnet_b0(num_classes=10), 64, PRODUCT, KRONECKER, PARALLEL),
    "efficientnet_v2_s": (lambda: models.efficientnet_v2_s(num_classes=10), 64, PRODUCT),
    "googlenet": (lambda: models.googlenet(num_classes=10, init_weights=False), 64, PRODUCT, HADAMARD),
    "inception_v3": (inception, 96, PRODUCT, KRONECKER),
    "mnasnet0_5": (lambda: models.mnasnet0_5(num_classes=10), 64, PRODUCT, PARALLEL),
    "mobilenet_v2": (lambda: models.mobilenet_v2(num_classes=10), 64, PRODUCT, KRONECKER),
    "bottlenecks": (lambda: resnet(BOTTLENECK), 64, PARALLEL),
    "resnext": (lambda: resnet(BOTTLENECK, groups=32, width_per_group=4), 64, PARALLEL),
    "vgg": (vgg, 32, PRODUCT, HADAMARD),
    "wide_resnet": (lambda: resnet(BOTTLENECK, width_per_group=128), 64, PRODUCT),
}
ZOO = [
    pytest.param(make, size, form, role, id=f"{name}-{type(form).__name__}-{role}", marks=marks)
    for position, (name, (make, size, *others)) in enumerate(SMALL.items())
    for place, (form, marks) in enumerate([(PRODUCT, ()), *((other, pytest.mark.slow) for other in others)])
    for role in [("update", "weight")[(position + place) % 2]]
] + [
    pytest.param(make, size, form, role, id=f"{name}-{type(form).__name__}-{role}", marks=pytest.mark.slow)
    for position, (name, (make, size, *forms)) in enumerate(LARGE.items())
    for place, form in enumerate(forms)
    for role in [("update", "weight")[(position + place) % 2]]
]


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def tokens(count, *shape, seed=0):
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(seed))


def seeded(make, seed=0):
    torch.manual_seed(seed)
    return make().double()


def classification_loss(model, images):
    """Add up the cross-entropies of all outputs, of which GoogLeNet and Inception have more than one."""
    output = model(images)
    labels = torch.arange(len(images)) % 10
    return sum(F.cross_entropy(logits, labels) for logits in ([output] if isinstance(output, torch.Tensor) else output))


def trainable(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def step(model):
    nn.utils.clip_grad_norm_(trainable(model), 1.0)
    torch.optim.SGD(trainable(model), lr=1e-2).step()


def scramble(model, size=0.1):
    with torch.no_grad():
        for index, (_, layer) in enumerate(low_rank_layers(model, tied=False)):
            for name, factor in layer.factors.items():
                factor.add_(size * random(*factor.shape, seed=index + len(name)).to(factor))


def assert_near(actual, expected, tolerance=1e-8, floor=1e-6):
    """Compare up to a share of the largest number, or of the floor where all numbers are below it."""
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    size = expected.detach().abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * max(size, floor))


def assert_gradients_follow_from_the_dense_model(model, conversion, loss, tolerance=1e-6):
    """Compare every factor's gradient with the chain rule on the gradient of the recovered model's weight."""
    dense = recover(copy.deepcopy(model))
    losses = []
    for each in (model, dense):
        torch.manual_seed(1)
        losses.append(loss(each))
        losses[-1].backward()
    assert_near(losses[0], losses[1])
    suffixes = {spec.name: spec.suffix for spec in conversion.specs}
    # A bias before a batch norm has a gradient of zero, computed as a sum of large numbers.
    floor = 1e-6 * max(p.grad.abs().max().item() for p in dense.parameters() if p.grad is not None)
    for name, layer in low_rank_layers(model, tied=False):
        dense_gradient = dense.get_parameter(name + suffixes[name]).grad
        factors = dict(layer.factors.items())
        assert dense_gradient is not None, name
        expected = torch.autograd.grad(layer.weight, list(factors.values()), dense_gradient)
        for (factor_name, factor), value in zip(factors.items(), expected, strict=True):
            assert_near(factor.grad, value, tolerance, floor)
            if dense_gradient.any() and (layer.role == "weight" or factor_name in layer.zero_factors):
                assert factor.grad.any(), f"{name}.factors.{factor_name}"
    # dense is a copy whose biases are not shared with the model's, so these were computed twice as well.
    for name, parameter in dense.named_parameters():
        if name in dict(model.named_parameters()) and parameter.grad is not None:
            assert_near(model.get_parameter(name).grad, parameter.grad, tolerance, floor)


def reload(model, path, state):
    """Write tensors with safetensors and load them; it leaves out versions, which MNASNet asks for."""
    safetensors.torch.save_file(state, path)
    read = OrderedDict(safetensors.torch.load_file(path))
    read._metadata = model.state_dict()._metadata
    model.load_state_dict(read, strict=True)
    return model.eval()


def assert_merging_is_undone(model, run):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    output = run(model)
    merge(model)
    assert all(layer.merged_weight is not None for _, layer in low_rank_layers(model))
    merged = run(model)
    assert_near(merged, output)
    factors = [factor for _, layer in low_rank_layers(model, tied=False) for factor in layer.factors.values()]
    with torch.no_grad():
        torch._foreach_mul_(factors, 2)
        assert not torch.equal(run(model), merged)
        # GoogLeNet calls its classifiers on the way in training alone.
        assert any(layer.merged_weight is None for _, layer in low_rank_layers(model))
        torch._foreach_mul_(factors, 0.5)
        merge(model)
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    unmerge(model)
    assert torch.equal(run(model), output)


@pytest.mark.slow
@nightly_except("vit-MatrixProduct-weight", "swin-MatrixProduct-weight", "convnext-MatrixProduct-update")
@pytest.mark.parametrize(("make", "size", "form", "role"), ZOO)
def test_classifiers_train_recover_and_export(make, size, form, role, tmp_path):
    model = seeded(make)
    names = [name for name, _ in model.named_parameters()]
    settings = {"ratio": 0.25, "role": role, "init": "uniform"}
    conversion = convert(model, form, **settings)
    left = {layer.reason for layer in conversion.layers if not layer.converted}
    assert all(any(re.fullmatch(reason, text) for reason in REASONS) for text in left), left
    assert conversion.trainable_parameters == sum(p.numel() for p in trainable(model))
    images = random(2, 3, size, size)

    model.train()
    assert_gradients_follow_from_the_dense_model(model, conversion, lambda m: classification_loss(m, images))
    step(model)

    @torch.no_grad()
    def run(each):
        return each(images)

    model.eval()
    output = run(model)
    assert_merging_is_undone(model, run)

    again = seeded(make, seed=1)
    convert(again, form, **settings, seed=1)
    assert torch.equal(run(reload(again, tmp_path / "converted.safetensors", model.state_dict())), output)

    state = dense_state_dict(model.state_dict(), conversion.specs)
    exported = reload(seeded(make, seed=2), tmp_path / "dense.safetensors", state)
    recover(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert_near(run(model), output)
    assert_near(run(exported), run(model))


def test_every_way_to_a_dense_weight_gives_the_same_bits():
    model = nn.Sequential(nn.Conv2d(16, 24, 3))
    conversion = convert(model, HADAMARD, ratio=0.5, role="weight", init="uniform")
    exported = dense_state_dict(model.state_dict(), conversion.specs)["0.weight"]
    assert torch.equal(merge(model)[0].merged_weight, exported)


@pytest.mark.slow
def test_a_dense_state_dict_keeps_the_versions_of_modules():
    model = models.mnasnet0_5(num_classes=10)
    conversion = convert(model, PRODUCT, ratio=0.25)
    models.mnasnet0_5(num_classes=10).load_state_dict(dense_state_dict(model.state_dict(), conversion.specs))


@pytest.mark.parametrize("role", ["update", "weight"])
def test_the_padding_of_an_embedding_stays_as_it_is_in_training(role):
    model = nn.Sequential(nn.Embedding(20, 8, padding_idx=3), nn.Linear(8, 4))
    convert(model, PRODUCT, rank=2, role=role, init="uniform", include=["0"])
    before = model[0].weight[3].clone()
    model(torch.tensor([[1, 2, 3]])).square().sum().backward()
    torch.optim.SGD(trainable(model), lr=0.1).step()
    assert torch.equal(model[0].weight[3], before)


@pytest.mark.parametrize(
    "change", [lambda layer: layer.reset_factors(5), lambda layer: layer.fold()], ids=["reset", "fold"]
)
def test_changing_the_factors_of_a_merged_layer_changes_its_weight(change):
    model = nn.Sequential(nn.Linear(8, 8))
    convert(model, PRODUCT, rank=2)
    scramble(model)
    merge(model)
    change(model[0])
    weight = model[0].weight
    assert torch.equal(unmerge(model)[0].weight, weight)


def test_an_error_about_a_ratio_names_the_layer():
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv2d(8, 8, 3))
    with pytest.raises(ValueError, match="layer '1'"):
        convert(model, PARALLEL, ratio=0.5, half_frozen=True)


@pytest.mark.parametrize("name", ["in_proj_weight", "q_proj_weight"])
def test_attentions_that_share_a_weight_stay_tied(name):
    settings = {"kdim": 8} if name == "q_proj_weight" else {}
    model = nn.ModuleList([nn.MultiheadAttention(16, 2, **settings) for _ in range(2)])
    setattr(model[1], name, getattr(model[0], name))
    convert(model, PRODUCT, rank=2)
    assert (
        getattr(model[0], name.removesuffix("_weight")).factors
        is getattr(model[1], name.removesuffix("_weight")).factors
    )
    recover(model)
    assert getattr(model[0], name) is getattr(model[1], name)


# torch's transformers


def encoder(**settings):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, **settings)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not settings.get("norm_first", False))


@pytest.mark.parametrize(
    ("form", "role", "norm_first"),
    all_pairs([PRODUCT, KRONECKER, PARALLEL, HADAMARD], ["update", "weight"], [False, True]),
    ids=str,
)
def test_transformer_encoders(norm_first, role, form, monkeypatch):
    model = seeded(functools.partial(encoder, norm_first=norm_first))
    conversion = convert(model, form, ratio=0.4, role=role, init="uniform")
    assert [spec.suffix for spec in conversion.specs[:2]] == ["_weight", ".weight"]
    batch, padding = random(3, 5, 16), torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 0, 1, 1, 1]]).bool()

    def loss(each):
        return each(batch, src_key_padding_mask=padding)[~padding].square().sum()

    model.train()
    assert_gradients_follow_from_the_dense_model(model, conversion, loss)
    step(model)
    scramble(model)
    model.eval()
    slow = model(batch, src_key_padding_mask=padding)
    calls = []
    fast_path = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *given: (calls.append(1), fast_path(*given))[1])

    @torch.no_grad()
    def run(each):
        return each(batch, src_key_padding_mask=padding)[~padding]

    output = run(model)
    assert len(calls) == 2
    assert_near(output, slow[~padding])
    assert_merging_is_undone(model, run)
    fresh = seeded(functools.partial(encoder, norm_first=norm_first), seed=1).eval()
    fresh.load_state_dict(dense_state_dict(model.state_dict(), conversion.specs))
    assert_near(run(fresh), output)
    assert_near(run(recover(model)), output)


@pytest.mark.parametrize("role", ["update", "weight"])
def test_an_encoder_and_decoder(role):
    model = seeded(lambda: nn.Transformer(16, 2, 1, 1, 32, dropout=0.1, batch_first=True))
    conversion = convert(model, PRODUCT, rank=3, role=role, init="uniform")
    assert {"encoder.layers.0.self_attn.in_proj", "decoder.layers.0.multihead_attn.in_proj"} <= {
        spec.name for spec in conversion.specs
    }
    source, target = random(2, 5, 16), random(2, 4, 16, seed=1)
    mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)

    def run(each):
        return each(source, target, tgt_mask=mask, tgt_is_causal=True)

    model.train()
    assert_gradients_follow_from_the_dense_model(model, conversion, lambda each: run(each).square().sum())
    step(model)
    model.eval()
    with torch.no_grad():
        output = run(model)
        assert_merging_is_undone(model, run)
        assert_near(run(recover(model)), output)


class Attention(nn.Module):
    """An attention of two inputs, within another module as conversion in place needs it."""

    def __init__(self, **settings):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, **settings)

    def forward(self, query, key, value, **settings):
        return self.attention(query, key, value, **settings)


@pytest.mark.parametrize(
    ("settings", "projections", "role"),
    [
        ({}, ["in_proj"], "update"),
        ({"batch_first": True, "dropout": 0.2}, ["in_proj"], "weight"),
        ({"kdim": 12, "vdim": 20}, ["q_proj", "k_proj", "v_proj"], "weight"),
        ({"kdim": 12, "vdim": 20, "add_bias_kv": True, "batch_first": True}, ["q_proj", "k_proj", "v_proj"], "update"),
        ({"add_bias_kv": True, "add_zero_attn": True, "bias": False}, ["in_proj"], "weight"),
    ],
    ids=str,
)
def test_attentions_of_every_kind(settings, projections, role):
    model = seeded(lambda: Attention(**settings))
    original = copy.deepcopy(model)
    conversion = convert(model, PRODUCT, rank=3, role=role, init="uniform")
    assert [spec.name for spec in conversion.specs] == [f"attention.{n}" for n in (*projections, "out_proj")]
    query, key, value = random(5, 3, 16), random(5, 3, 12), random(5, 3, 20)
    inputs = (query, key, value) if "kdim" in settings else (query, query, query)

    def run(each, **given):
        output, weights = each(*inputs, **given)
        return output if weights is None else torch.cat([output.flatten(), weights.flatten()])

    assert role == "weight" or torch.equal(run(model.eval()), run(original.eval()))
    model.train()
    assert_gradients_follow_from_the_dense_model(model, conversion, lambda each: run(each).square().sum())
    step(model)
    scramble(model)
    model.eval()
    fresh = seeded(lambda: Attention(**settings), seed=1).eval()
    fresh.load_state_dict(dense_state_dict(model.state_dict(), conversion.specs))
    dense = recover(copy.deepcopy(model))
    assert type(dense.attention) is nn.MultiheadAttention
    assert repr(dense) == repr(original)
    assert list(dense.state_dict()) == list(original.state_dict())
    assert all(parameter.requires_grad for parameter in dense.parameters())
    for given in ({}, {"need_weights": False}, {"average_attn_weights": False}):
        with torch.no_grad():
            output = run(model, **given)
            assert_near(run(dense, **given), output)
            assert_near(run(fresh, **given), output)
        assert_near(run(model, **given), output)


# Hugging Face's transformers


@pytest.fixture
def hugging_face():
    return pytest.importorskip("transformers")


def gpt2(library, seed=0, **settings):
    torch.manual_seed(seed)
    config = library.GPT2Config(
        vocab_size=40, n_positions=12, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1, **settings
    )
    return library.GPT2LMHeadModel(config).double()


def bert(library):
    config = library.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=12,
    )
    return library.BertModel(config)


def distilbert(library):
    config = library.DistilBertConfig(
        vocab_size=40, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=12
    )
    return library.DistilBertModel(config)


def assert_same_tensors(first, second):
    one, other = first.state_dict(), second.state_dict()
    assert list(one) == list(other)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def hidden(each, ids):
    output = each(input_ids=ids)
    pooled = getattr(output, "pooler_output", None)
    states = output.last_hidden_state
    return states if pooled is None else torch.cat([states, pooled.unsqueeze(1)], dim=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "feed_forward", "everything", "role"),
    [
        pytest.param(*made, everything, role, id=f"{made[1]}-{everything}-{role}")
        for made, everything, role in all_pairs(
            [(bert, "intermediate"), (distilbert, "ffn")], [False, True], ["update", "weight"]
        )
    ],
)
def test_encoders_of_hugging_face(hugging_face, make, feed_forward, everything, role, tmp_path):
    model = seeded(lambda: make(hugging_face))
    conversion = convert(
        model,
        PRODUCT,
        **({"ratio": 0.5} if everything else {"rank": 3}),
        role=role,
        init="uniform",
        include=None if everything else ["attention", feed_forward],
    )
    converted = {layer.name for layer in conversion.layers if layer.converted}
    assert ("embeddings.word_embeddings" in converted) == everything
    assert {layer.reason for layer in conversion.layers if not layer.converted} <= {"not in include"}
    assert any("attention" in name for name in converted)
    assert any(feed_forward in name for name in converted)
    ids = tokens(40, 2, 7)
    model.train()
    assert_gradients_follow_from_the_dense_model(model, conversion, lambda each: hidden(each, ids).square().sum())
    step(model)
    model.eval()
    with torch.no_grad():
        output = hidden(model, ids)
        assert_merging_is_undone(model, lambda each: hidden(each, ids))
        assert_near(hidden(recover(model), ids), output)
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        assert_same_tensors(loaded, model)
        assert_near(hidden(loaded, ids), output)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "role"), in_turn([PRODUCT, KRONECKER, PARALLEL, HADAMARD], ["update", "weight"]), ids=str
)
def test_gpt2_stays_tied(hugging_face, form, role, tmp_path):
    model = gpt2(hugging_face)
    conversion = convert(model, form, ratio=0.4, role=role, init="uniform")
    assert {layer.kind for layer in conversion.layers if layer.converted} == {"Embedding", "Conv1D", "Linear"}
    embedding, head = model.transformer.wte, model.lm_head
    ids = tokens(40, 2, 7)

    def loss(each):
        return each(ids, labels=ids).loss

    def tied():
        return head.factors is embedding.factors and torch.equal(head.weight, embedding.weight)

    assert tied()
    model.train()
    assert_gradients_follow_from_the_dense_model(model, conversion, loss)
    step(model)
    assert tied()
    model.eval()
    with torch.no_grad():
        output = model(ids).logits
        assert_merging_is_undone(model, lambda each: each(ids).logits)
        fresh = gpt2(hugging_face, seed=1).eval()
        fresh.load_state_dict(dense_state_dict(model.state_dict(), conversion.specs))
        assert_near(fresh(ids).logits, output)
        recover(model)
        assert model.lm_head.weight is model.transformer.wte.weight
        assert_near(model(ids).logits, output)
        model.save_pretrained(tmp_path)
        loaded = hugging_face.GPT2LMHeadModel.from_pretrained(tmp_path)
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
        assert_same_tensors(loaded, model)
        assert_near(loaded(ids).logits, output)


def test_tied_factors_are_saved_with_save_model(hugging_face, tmp_path):
    first, second = gpt2(hugging_face).eval(), gpt2(hugging_face, seed=1).eval()
    for seed, model in enumerate((first, second)):
        convert(model, PRODUCT, rank=3, seed=seed)
        scramble(model, 0.1 + seed)
    path = str(tmp_path / "converted.safetensors")
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.torch.save_file(first.state_dict(), path)
    safetensors.torch.save_model(first, path)
    safetensors.torch.load_model(second, path)
    ids = tokens(40, 2, 7)
    assert torch.equal(first(ids).logits, second(ids).logits)
    assert second.lm_head.factors is second.transformer.wte.factors


def test_gpt2_generates_after_conversion(hugging_face):
    model = gpt2(hugging_face).eval()
    convert(model, PRODUCT, rank=3, role="weight", init="uniform")
    ids = tokens(40, 1, 3)
    settings = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 1}
    generated = model.generate(ids, **settings)
    assert torch.equal(recover(model).generate(ids, **settings), generated)


# What users put around models


class ConvolutionalNetwork(nn.Module):
    """Plain, grouped and transposed convolutions and a linear layer, without statistics of the batch."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Conv2d(8, 16, (3, 5), stride=2, padding=(1, 2), groups=2),
            nn.Tanh(),
            nn.ConvTranspose2d(16, 8, 3, stride=2, groups=2),
        )
        self.head = nn.Linear(8, 10)

    def forward(self, images):
        return self.head(self.body(images).mean(dim=(2, 3)))


FORMS_AND_ROLES = in_turn([PRODUCT, KRONECKER, PARALLEL, HADAMARD], ["update", "weight"])
FORMS = pytest.mark.parametrize("form", [PRODUCT, KRONECKER, PARALLEL, HADAMARD], ids=lambda form: type(form).__name__)


@pytest.mark.parametrize(("form", "role"), FORMS_AND_ROLES, ids=str)
def test_channels_last(form, role):
    model = seeded(ConvolutionalNetwork).to(memory_format=torch.channels_last)
    conversion = convert(model, form, ratio=0.5, role=role, init="uniform")
    images = random(2, 3, 9, 9).contiguous(memory_format=torch.channels_last)
    assert_gradients_follow_from_the_dense_model(model, conversion, lambda m: classification_loss(m, images))
    step(model)
    output = model(images)
    # Convolutions with the dense weight keep the format, as the unconverted model's do.
    merge(model)
    assert model.body[:2](images).is_contiguous(memory_format=torch.channels_last)
    unmerge(model)
    model.to(memory_format=torch.channels_last)
    assert_near(model(images), output)
    model.to(memory_format=torch.contiguous_format)
    assert_near(model(images.contiguous()), output)
    assert_near(recover(model)(images), output)


def converted_network(seed=0):
    model = seeded(ConvolutionalNetwork, seed)
    convert(model, PRODUCT, ratio=0.5, decouple=True)
    return model


def two_steps(model, images, labels):
    optimizer = torch.optim.SGD(trainable(model), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


def train_on_one_rank(rank, folder, images, labels):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    # A seed of its own: DDP must bring the first process's parameters to the second.
    model = converted_network(seed=rank)
    two_steps(DistributedDataParallel(model), images[rank::2], labels[rank::2])
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.requires_grad}
    torch.save({**model.state_dict(), **gradients}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.nightly
def test_two_processes_train_as_one_does(tmp_path):
    images, labels = random(8, 3, 9, 9), torch.arange(8)
    context = torch.multiprocessing.spawn(train_on_one_rank, args=(str(tmp_path), images, labels), nprocs=2, join=False)
    deadline = time.monotonic() + 120
    while not context.join(timeout=5):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail("the two processes did not end in two minutes")
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    model = converted_network()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    two_steps(model, images, labels)
    assert any(name.startswith("gradient of") for name in first)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        whole = name.removeprefix("gradient of ")
        assert_near(value, model.state_dict()[name] if whole == name else model.get_parameter(whole).grad)
    moved = {name for name, value in start.items() if not torch.equal(value, first[name])}
    assert moved == {name for name, p in model.named_parameters() if p.requires_grad}


def assert_compiles(model, batches, dynamic=None):
    """Compare with the plain model, in training: outputs and gradients, over several batch sizes."""
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for batch in batches:
        outcomes = []
        for each in (model, compiled):
            model.zero_grad()
            state = {name: buffer.clone() for name, buffer in model.named_buffers()}
            output = each(batch)
            output.square().mean().backward()
            outcomes.append([output, *(p.grad for p in trainable(model))])
            for name, buffer in model.named_buffers():
                buffer.copy_(state[name])
        for expected, actual in zip(*outcomes, strict=True):
            assert_near(actual, expected, 1e-7)
    torch.compiler.reset()


@pytest.mark.parametrize(("role", "dynamic"), [("update", None), ("weight", True)])
@pytest.mark.nightly
def test_a_transformer_compiles_as_one_graph(role, dynamic):
    model = seeded(lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)).train()
    holder = nn.Sequential(model)
    convert(holder, PRODUCT, rank=3, role=role, init="uniform")
    scramble(holder)
    assert_compiles(holder, [random(batch, 5, 16) for batch in (2, 3, 7)], dynamic)


def small_transformer():
    return nn.Sequential(nn.Embedding(20, 16), encoder(), nn.Linear(16, 20))


@pytest.mark.parametrize(
    ("form", "made", "clone", "merged"),
    all_pairs(
        [PRODUCT, KRONECKER, PARALLEL, HADAMARD],
        [(ConvolutionalNetwork, random(2, 3, 9, 9)), (small_transformer, tokens(20, 2, 5))],
        [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
        [False, True],
    ),
)
def test_copies_of_whole_models(form, made, clone, merged):
    make, batch = made
    model = seeded(make).eval()
    convert(model, form, ratio=0.5, role="weight", init="uniform")
    if merged:
        merge(model)
    output = model(batch)
    twin = clone(model)
    scramble(unmerge(model))
    assert torch.equal(twin(batch), output)
    assert not torch.equal(model(batch), output)
    assert_near(recover(twin)(batch), output)


def test_copies_of_a_tied_model_stay_tied(hugging_face):
    model = gpt2(hugging_face)
    convert(model, PRODUCT, rank=3)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.lm_head.factors is twin.transformer.wte.factors
        assert twin.lm_head.frozen_weight is twin.transformer.wte.frozen_weight
        assert twin.lm_head.factors is not model.lm_head.factors


@pytest.mark.parametrize(("form", "role"), FORMS_AND_ROLES, ids=str)
@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (ConvolutionalNetwork, random(2, 3, 9, 9)),
        (lambda: nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)), random(2, 5, 16)),
    ],
    ids=["convolutions", "transformer"],
)
def test_mapping_over_clients_equals_a_loop(make, batch, role, form):
    model = seeded(make).train()
    convert(model, form, ratio=0.5, role=role, init="uniform")
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    factors = {name: p.detach() for name, p in model.named_parameters() if ".factors." in name}
    clients = [{n: f + 0.1 * random(*f.shape, seed=seed) for n, f in factors.items()} for seed in range(3)]
    stacked = {name: torch.stack([client[name] for client in clients]) for name in factors}
    batches = torch.stack([batch + seed for seed in range(3)])

    def loss(factors, batch):
        return functional_call(model, {**parameters, **factors}, (batch,)).square().mean()

    mapped = vmap(grad(loss))(stacked, batches)
    for index, client in enumerate(clients):
        for name, value in grad(loss)(client, batches[index]).items():
            assert value.any()
            assert_near(mapped[name][index], value)


@pytest.mark.parametrize(
    ("form", "use_reentrant"), in_turn([PRODUCT, KRONECKER, PARALLEL, HADAMARD], [False, True]), ids=str
)
def test_checkpointing_gives_the_same_gradients(form, use_reentrant):
    model = seeded(ConvolutionalNetwork).train()
    convert(model, form, ratio=0.5, dropout=0.2)
    scramble(model)
    images = random(2, 3, 9, 9).requires_grad_()

    def gradients(body):
        model.zero_grad()
        torch.manual_seed(1)
        model.head(body(images).mean(dim=(2, 3))).square().sum().backward()
        return [p.grad for p in trainable(model)]

    plain = gradients(model.body)
    recomputed = gradients(lambda batch: checkpoint(model.body, batch, use_reentrant=use_reentrant))
    for actual, expected in zip(recomputed, plain, strict=True):
        assert_near(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True])
def test_export(merged):
    model = seeded(ConvolutionalNetwork).eval()
    convert(model, PRODUCT, ratio=0.5)
    scramble(model)
    if merged:
        merge(model)
    images = random(2, 3, 9, 9)
    exported = torch.export.export(model, (images,)).module()
    assert_near(exported(images), model(images))
    assert_near(exported(images + 1), model(images + 1))


@pytest.mark.slow
@FORMS
def test_tracing(form):
    model = seeded(ConvolutionalNetwork).eval()
    convert(model, form, ratio=0.5)
    scramble(model)
    images = random(2, 3, 9, 9)
    with torch.no_grad():
        traced = torch.jit.trace(model, images)
        assert_near(traced(images + 1), model(images + 1))


def test_every_layer_of_the_models_is_reached():
    model = nn.ModuleList([ConvolutionalNetwork(), small_transformer()])
    convert(model, KRONECKER, ratio=0.5)
    kinds = {type(layer).__name__ for _, layer in low_rank_layers(model)}
    assert kinds == {"LowRankConv2d", "LowRankConvTranspose2d", "LowRankLinear", "LowRankEmbedding"}
    assert all(isinstance(layer, LowRankLayer) for _, layer in low_rank_layers(model))
