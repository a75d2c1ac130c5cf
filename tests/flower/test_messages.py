"""What a site may send, and everything that it may not."""

import json
import math
import random
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.supercore.task_identity import TaskIdentity
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.compression import (
    Channel,
    DecodingError,
    Dense,
    Half,
    LowRankCodec,
    Mask,
    RandomK,
    Schema,
    Sign,
    Split,
    TopK,
)
from lightning_lowrank.flower.messages import (
    apply_options,
    difference,
    field_of,
    numbering,
    options_of,
    pack,
    read_upload,
    signature,
    unpack,
)
from lightning_lowrank.models import MLP
from lightning_lowrank.optim import ProjectedSGD

TENSORS = {
    "weight": torch.randn(12, 7, generator=torch.Generator().manual_seed(1)),
    "bias": torch.arange(5.0),
    "count": torch.tensor(3),
    "flag": torch.tensor([True, False]),
}
MASK = {"weight": torch.rand(12, 7, generator=torch.Generator().manual_seed(2)) < 0.5}
CODECS = {
    "dense": Dense(),
    "half": Half(),
    "top share": TopK(share=0.2),
    "top count": TopK(count=5),
    "random": RandomK(0.3, seed=7),
    "sign": Sign(),
    "factors": LowRankCodec(2),
    "factors of an energy": LowRankCodec(energy=0.8),
    "mask": Mask(MASK),
    "mask known": Mask(MASK, known=True),
    "split": Split(["bias"], Dense(), TopK(share=0.2)),
}
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def receive(data, schema):
    return Channel().receive(data, schema=schema)


@pytest.fixture(autouse=True)
def identity():
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1


def sent(content: RecordDict) -> Message:
    message = Message(content, dst_node_id=2, message_type="train.round")
    return message_from_proto(message_to_proto(message))


def test_a_message_arrives_as_it_was_packed():
    fields = {"round": 3, "options": "[]", "frozen": [1.0, 2.5], "none": [], "flag": True}
    assert unpack(sent(pack(fields, {3: b"\x00\xff", 12: b"x"}))) == (fields, {3: b"\x00\xff", 12: b"x"})
    assert unpack(sent(pack({}))) == ({}, {})


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"other": ConfigRecord({"round": 1})}),
        RecordDict(
            {"fields": ConfigRecord(), "payloads": ArrayRecord({"x": Array("uint8", (1,), "lightning_lowrank", b"a")})}
        ),
        RecordDict(
            {"fields": ConfigRecord(), "payloads": ArrayRecord({"²": Array("uint8", (1,), "lightning_lowrank", b"a")})}
        ),
        RecordDict({"fields": ConfigRecord(), "payloads": ArrayRecord({"1": Array("uint8", (1,), "numpy", b"a")})}),
    ],
    ids=["empty", "no fields", "no round", "odd digit", "other encoding"],
)
def test_messages_of_another_form_are_refused(content):
    with pytest.raises(DecodingError):
        unpack(sent(content))


def test_fields_have_a_type():
    assert field_of({"round": 3}, "round", int) == 3
    for fields in ({}, {"round": "3"}, {"round": True}, {"round": 3.0}):
        with pytest.raises(DecodingError, match="round"):
            field_of(fields, "round", int)


@every_codec
def test_what_the_method_would_send_is_taken(codec):
    expected = {name: torch.zeros_like(value, device="meta") for name, value in TENSORS.items()}
    taken = read_upload(codec.encode(TENSORS), Schema.of(expected), codec.decode)
    assert list(taken) == list(TENSORS)
    for name, value in codec.transmit(TENSORS).items():
        assert torch.equal(taken[name], value)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({name: value for name, value in TENSORS.items() if name != "bias"}, "'bias'"),
        ({**TENSORS, "more": torch.zeros(2)}, "'more'"),
        ({**TENSORS, "weight": torch.zeros(7, 12)}, r"'weight'.*torch\.float32.*7"),
        ({**TENSORS, "bias": torch.zeros(5).double()}, r"'bias'.*torch\.float64"),
        ({**TENSORS, "bias": torch.tensor([0.0, 1.0, float("nan"), 0.0, 0.0])}, "'bias'"),
        ({**TENSORS, "weight": torch.full((12, 7), float("inf"))}, "'weight'"),
        ({**TENSORS, "more": torch.zeros(50_000)}, "bytes were received, but the expected message has at most"),
    ],
)
def test_other_tensors_are_refused_by_name(tensors, said):
    with pytest.raises(DecodingError, match=said):
        read_upload(Dense().encode(tensors), Schema.of(TENSORS), receive)


def test_nothing_is_taken_where_nothing_is_sent():
    assert read_upload(b"", Schema({}), receive) == {}
    with pytest.raises(DecodingError, match="sends nothing"):
        read_upload(b"x", Schema({}), receive)
    with pytest.raises(DecodingError, match="nothing was received"):
        read_upload(b"", Schema.of(TENSORS), receive)


def test_a_shape_of_the_sites_choice_has_a_limit():
    limits = {"weight": (12, 7), "slots": (7,)}

    def check(columns, **other):
        sent = {"weight": torch.ones(12, columns), "slots": torch.arange(columns), "bias": torch.ones(5), **other}
        return read_upload(Dense().encode(sent), Schema.of(expected, limits), receive)

    expected = {"weight": torch.zeros(12, 2), "slots": torch.zeros(2, dtype=torch.int64), "bias": torch.zeros(5)}
    for columns in (0, 2, 7):
        assert check(columns)["weight"].shape == (12, columns)
    for said, columns, other in (
        (r"'weight'.*torch\.float32.*12", 8, {}),
        ("'weight' was received", 2, {"weight": torch.ones(12)}),
        (r"'slots'.*torch\.int32", 2, {"slots": torch.arange(2, dtype=torch.int32)}),
        ("'bias' was received", 2, {"bias": torch.ones(4)}),
    ):
        with pytest.raises(DecodingError, match=said):
            check(columns, **other)


@pytest.mark.slow
@every_codec
def test_no_bytes_do_more_than_to_be_refused(codec):
    """Random bytes, truncations and changed bits end as DecodingError, or as tensors of the right form."""
    draws = random.Random(5)
    valid = codec.encode(TENSORS)
    attempts = [draws.randbytes(draws.randrange(200)) for _ in range(60)]
    attempts += [valid[:length] for length in range(0, len(valid), 7)] + [valid + b"\x00", valid * 2]
    for _ in range(250):
        changed = bytearray(valid)
        for _ in range(draws.choice([1, 1, 2, 8])):
            changed[draws.randrange(len(changed))] ^= 1 << draws.randrange(8)
        attempts.append(bytes(changed))
    header = int.from_bytes(valid[:8], "little")
    for _ in range(60):
        changed = bytearray(valid)
        changed[8 + draws.randrange(min(header, len(valid) - 8))] = draws.choice(b'0123456789"{}[],:-eE.')
        attempts.append(bytes(changed))
    refused = 0
    tracemalloc.start()
    try:
        for data in attempts:
            try:
                taken = read_upload(data, Schema.of(TENSORS), codec.decode)
            except DecodingError:
                refused += 1
            else:
                assert {name: (value.shape, value.dtype) for name, value in taken.items()} == {
                    name: (value.shape, value.dtype) for name, value in TENSORS.items()
                }
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    assert refused > len(attempts) / 4


def test_optimizers_take_over_the_rounds_options():
    weight = torch.nn.Parameter(torch.zeros(2))
    mine = torch.optim.AdamW([{"params": [weight], "lr": 0.3, "betas": (0.5, 0.6)}], weight_decay=0.25)
    theirs = torch.optim.AdamW([weight], lr=1.0)
    apply_options([theirs], options_of([mine]))
    group = theirs.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.3, (0.5, 0.6), 0.25)
    assert group["params"][0] is weight
    assert json.loads(options_of([mine]))[0][0].get("params") is None


def test_options_that_are_tensors_and_numpy_scalars_are_sent():
    weight, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    betas = (torch.tensor(0.5), np.float32(0.25))
    mine = torch.optim.SGD([weight], lr=torch.tensor([0.3]), momentum=np.float64(0.5))
    mine.param_groups[0] |= {"betas": betas, "limit": math.inf, "none": None, "label": "a", "parts": (1, "a")}
    theirs = torch.optim.SGD([weight], lr=torch.tensor(1.0))
    kept = {"lr": theirs.param_groups[0]["lr"], "betas": (torch.tensor(0.0), 0.0), "limit": 0.0, "none": 1.0}
    theirs.param_groups[0] |= {**kept, "label": "b", "parts": ()}
    apply_options([theirs], options_of([mine]))
    group = theirs.param_groups[0]
    assert group["lr"] is kept["lr"]
    assert torch.equal(group["lr"], torch.tensor(0.3))
    assert group["betas"][0] is kept["betas"][0]
    assert (*group["betas"], group["momentum"], group["limit"], group["none"]) == (0.5, 0.25, 0.5, math.inf, None)
    assert (group["label"], group["parts"]) == ("b", ())
    # Two groups with one tensor, in place of which the server has two numbers.
    mine, theirs = (torch.optim.SGD([{"params": [weight]}, {"params": [other]}], lr=torch.tensor(1.0)) for _ in "ab")
    for number, group in enumerate(mine.param_groups):
        group["lr"] = 0.25 * (1 + number)
    apply_options([theirs], options_of([mine]))
    assert [float(group["lr"]) for group in theirs.param_groups] == [0.25, 0.5]


@pytest.mark.parametrize("value", [torch.tensor([1.0, 2.0]), np.ones(3), 1j, torch.tensor(1j), (0.1, torch.zeros(0))])
def test_numbers_that_cannot_be_sent_are_refused(value):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    optimizer.param_groups[0]["rate"] = value
    with pytest.raises(MisconfigurationException, match=r"option rate=.*cannot be sent"):
        options_of([optimizer])


def test_what_every_side_draws_for_itself_is_not_told():
    weight = torch.nn.Parameter(torch.zeros(2, 4))
    mine, theirs = (ProjectedSGD([weight], lr=lr, rank=1, refresh_interval=None) for lr in (0.5, 1.0))
    mine.refresh(7)
    apply_options([theirs], options_of([mine]))
    assert theirs.param_groups[0]["lr"] == 0.5
    assert theirs.param_groups[0]["seed"] != 7


@pytest.mark.parametrize("text", ["", "[]", "[[]]", '[[{"rate": 1}]]', '[[{"params": []}]]', "[[3]]", "7"])
def test_options_of_other_optimizers_are_refused(text):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    with pytest.raises(DecodingError):
        apply_options([optimizer], text)


def test_signatures_tell_what_differs():
    def network(width=8, scale=1.0):
        torch.manual_seed(0)
        made = MLP(in_features=4, hidden=[width], out_features=2)
        for parameter in made.hidden.parameters():
            parameter.requires_grad_(False)
            parameter.data.mul_(scale)
        return made

    mine = signature(network(), b"a: 1")
    theirs = dict(unpack(sent(pack(signature(network(scale=1.0001), b"a: 1"))))[0])
    assert difference(mine, theirs) == ""
    assert difference(mine, signature(network(), b"a: 2")) == "it runs another recipe"
    assert "names, types or shapes" in difference(mine, signature(network(width=9), b"a: 1"))
    assert "other values" in difference(mine, signature(network(scale=1.1), b"a: 1"))
    wider = network()
    wider.register_buffer("center", torch.zeros(2))
    wider.register_state_dict_post_hook(lambda module, state, *_: state.pop("center"))
    assert "names, types or shapes" in difference(mine, signature(wider, b"a: 1"))
    thawed = network()
    thawed.requires_grad_(True)
    assert "names, types or shapes" in difference(mine, signature(thawed, b"a: 1"))
    assert difference(mine, {"recipe": mine["recipe"], "layout": mine["layout"]}) == "it freezes other parameters"
    assert difference(mine, {}) == "it runs another recipe"
    for name in ("classes", "features"):
        other = {**mine, "classes": "a", "features": "b", name: "c"}
        assert f"{name}=" in difference({**mine, "classes": "a", "features": "b"}, other)
        # A server without data has no names.
        assert difference({**mine, "classes": "", "features": ""}, other) == ""


def test_names_that_data_number():
    data = SimpleNamespace(classes=["cat", "dog"], feature_names=None)
    assert numbering(data) != numbering(SimpleNamespace(classes=["dog", "cat"]))
    assert numbering(data) == numbering(None, SimpleNamespace(classes=10), data)
    assert numbering(data, SimpleNamespace(feature_names=["a"])) == {
        **numbering(data),
        "features": numbering(SimpleNamespace(feature_names=("a",)))["features"],
    }
    assert numbering(SimpleNamespace(classes=[]), None) == {"classes": "", "features": ""}
