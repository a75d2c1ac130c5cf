"""Channels between the halves of a method: what they lose, what error feedback brings back, and what it all weighs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_lowrank import (
    EF21P,
    RBLA,
    SCAFFOLD,
    FedAvg,
    FedAvgM,
    FederatedLoop,
    FedEx,
    FedHM,
    FedLoRA,
    FedMUD,
    FedSB,
    FedSVD,
    FLoRA,
    FromIndices,
    Half,
    LoRAA2,
    LowRank,
    LowRankCodec,
    MatrixProduct,
    Quantize,
    RaFLoRA,
    RandomCoordinates,
    RandomMask,
    RoLoRA,
    Sign,
    SumProduct,
    TDPFed,
    TopK,
)
from lightning_lowrank.compression import Chain, Channel, Dense, Split
from lightning_lowrank.compression.wire import DecodingError
from lightning_lowrank.federated import ChangesBase, wire
from lightning_lowrank.federated import loop as federated_loop
from lightning_lowrank.federated.checks import new_basis_advice
from lightning_lowrank.federated.wire import Wire
from lightning_lowrank.layers import low_rank_layers
from lightning_lowrank.seeding import derive_seed
from lightning_lowrank.testing import check_algorithm
from tests.algorithms import plain
from tests.algorithms.methods import LOW_RANK, METHODS
from tests.algorithms.plain import CLIENTS, PARTICIPANTS, double
from tests.grids import in_turn, nightly_except
from tests.helpers import Data, Module, assert_same, fit, network, trainer, weights

CHANNELS: dict[str, dict[str, Any]] = {
    "sparse changes in half precision up": {"uplink": [TopK(0.1, error_feedback=True), Half()]},
    "eight bits up": {"uplink": [Quantize(8)]},
    "signs up": {"uplink": [Sign(error_feedback=True)]},
    "half precision down": {"downlink": [Half()]},
    "eight bits down": {"downlink": [Quantize(8)]},
    "sparse changes down": {"downlink": [TopK(0.3, error_feedback=True)]},
    "both ways": {"uplink": [TopK(0.2, error_feedback=True)], "downlink": [TopK(0.3, error_feedback=True), Half()]},
    "factors both ways": {
        "uplink": [LowRankCodec(1, error_feedback=True), Half()],
        "downlink": [LowRankCodec(energy=0.8, error_feedback=True)],
    },
    "warm factors down": {"downlink": [LowRankCodec(1, error_feedback=True), Half()]},
}


def run(tmp_path, algorithm=FedAvg, module=Module, data=None, callbacks=(), ckpt_path=None, **arguments):
    settings = {"partition": FromIndices(CLIENTS), "participants": PARTICIPANTS, "summary": False, **arguments}
    loop = FederatedLoop(algorithm(), **settings)
    made = module().double()
    fitted = trainer(tmp_path, loop, *callbacks, max_epochs=len(PARTICIPANTS), limit_val_batches=0)
    fit(fitted, made, Data(double(), shuffle=False) if data is None else data, ckpt_path=ckpt_path)
    return made, loop


def normed():
    return Module(network(norm=nn.BatchNorm1d))


def as_tensors(net: nn.Module, vector: Tensor) -> dict[str, Tensor]:
    names = [f"net.{name}" for name, _ in net.named_parameters()]
    sizes = [value.numel() for value in net.parameters()]
    parts = zip(names, vector.split(sizes), net.parameters(), strict=True)
    return {name: part.view_as(value).clone() for name, part, value in parts}


def as_vector(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.reshape(-1) for value in tensors.values()])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [[TopK(0.1, error_feedback=True), Half()], [Quantize(8)], [Sign(error_feedback=True)]])
def test_an_uplink_carries_changes_with_each_clients_own_residual(tmp_path, kind):
    module, loop = run(tmp_path, uplink=kind)
    net, channel, nbytes = plain.initial(), Channel(kind), 0
    residuals = {client: torch.zeros(plain.flat(net).numel(), dtype=torch.float64) for client in range(4)}
    for number, clients in enumerate(PARTICIPANTS):
        start, ends = plain.flat(net), {}
        for client in clients:
            plain.load(net, start)
            wanted = plain.train(net, client) - start + residuals[client]
            seeded = channel._codec.seeded(derive_seed(0, "uplink", number, client))
            data = seeded.encode(as_tensors(net, wanted))
            arrived = as_vector(channel._codec.decode(data))
            residuals[client] = wanted - arrived if channel.error_feedback else residuals[client]
            ends[client] = start + arrived
            nbytes += len(data)
        plain.load(net, plain.mean(ends))
    plain.close(module.net, net)
    assert loop.ledger.total_up == nbytes
    sent = as_tensors(net, plain.flat(net))
    assert loop.ledger.total_down == len(Dense().encode(sent)) * sum(map(len, PARTICIPANTS))
    kept = [loop.coordinator.states[client].get("wire.residual") for client in range(4)]
    assert all((residual is not None) is channel.error_feedback for residual in kept)


# Of which tensors the numbers lost are forgotten, and in which rounds, given that of the client's last message.
DRAWN: dict[str, tuple[Any, str, Any]] = {
    "FedMUD": (FedMUD, ".factors.", lambda last, now: True),
    "FedMUD of two rounds": (partial(FedMUD, 2), ".factors.", lambda last, now: now // 2 > last // 2),
    "FedSLoP": (METHODS["FedSLoP"].make, "coefficients.", lambda last, now: True),
    "FedLoRA-FLoRA": (METHODS["FedLoRA-FLoRA"].make, ".factors.", lambda last, now: True),
    "FedLoRA-SumProduct": (lambda: FedLoRA(SumProduct()), ".factors.", lambda last, now: False),
    "FedHM": (METHODS["FedHM"].make, ".factors.", lambda last, now: False),
    "FedSB": (partial(FedSB, 3), ".factors.", lambda last, now: last < min(now, 3)),
}


def drawn_run(tmp_path, name, ckpt_path=None, callbacks=(), **settings):
    method = METHODS[name.split()[0]]
    low_rank = LOW_RANK[method.forms[0]]
    loop = FederatedLoop(
        DRAWN[name][0](),
        **{"partition": FromIndices(CLIENTS), "participants": PARTICIPANTS, "summary": False, **settings},
        uplink=[TopK(0.3, error_feedback=True)],
    )
    module = Module(method.network(), optimizer=method.optimizer).double()
    callbacks = [*([] if low_rank is None else [low_rank()]), loop, *callbacks]
    run = trainer(tmp_path, *callbacks, max_epochs=len(PARTICIPANTS), limit_val_batches=0)
    fit(run, module, Data(double(), shuffle=False), ckpt_path=ckpt_path)
    return module, loop


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_what_belongs_to_old_factors_is_forgotten(tmp_path, monkeypatch, name):
    """Not the residual of what stays, nor a later one; also where a client sat rounds out."""
    last, added, forgotten = {}, [], 0
    up, send = Wire.up, Channel.send_together

    def sent(channel, messages, **arguments):
        added.append(messages[0].residual or {})
        return send(channel, messages, **arguments)

    def upload(wire, client, message, received):
        nonlocal forgotten
        kept = dict(client.state.get("wire.residual", {}))
        packet = up(wire, client, message, received)
        _, prefix, forgets = DRAWN[name]
        old = {each for each in kept if prefix in each and forgets(last[client.id], client.round)}
        assert added[-1].keys() == kept.keys() - old
        forgotten += len(old)
        last[client.id] = client.round
        return packet

    monkeypatch.setattr(Channel, "send_together", sent)
    monkeypatch.setattr(Wire, "up", upload)
    drawn_run(tmp_path, name)
    assert sorted(last) == [0, 1, 2, 3]
    assert (forgotten > 0) == (name not in ("FedLoRA-SumProduct", "FedHM"))


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_error_feedback_without_effect_is_told_once(tmp_path, monkeypatch, name):
    said = []
    monkeypatch.setattr(wire, "rank_zero_warn", said.append)
    drawn_run(tmp_path, name)
    assert len(said) == (name in ("FedMUD", "FedSLoP", "FedLoRA-FLoRA"))
    assert all("has no effect on" in each and DRAWN[name][1] in each for each in said)


@pytest.mark.parametrize(
    ("algorithm", "told"),
    [(FedHM(), True), (FedAvg(), False)]
    + [(FedLoRA(kind()), kind in (SumProduct, RaFLoRA, FedSVD)) for kind in (SumProduct, RaFLoRA, FedSVD, RBLA, FLoRA)],
    ids=repr,
)
def test_numbers_of_an_old_basis_are_told(algorithm, told):
    loop = FederatedLoop(algorithm, clients=2, uplink=[TopK(0.3, error_feedback=True)], optimizer_state="keep")
    operator = repr(getattr(algorithm, "operator", ""))
    notes = new_basis_advice(loop)
    assert len(notes) == told
    assert all(each in note for note in notes for each in ("error_feedback=True", "optimizer_state='keep'"))
    assert all(operator in note for note in notes if isinstance(algorithm, FedLoRA))
    assert not new_basis_advice(FederatedLoop(algorithm, clients=2, uplink=[TopK(0.3)]))


@pytest.mark.slow
def test_a_fit_tells_of_an_old_basis(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(federated_loop, "rank_zero_warn", said.append)
    drawn_run(tmp_path, "FedLoRA-SumProduct")
    assert len([each for each in said if "SumProduct" in each and "error_feedback=True" in each]) == 1


@pytest.mark.slow
def test_old_factors_are_forgotten_in_every_execution_and_after_resuming(tmp_path):
    name = "FedMUD of two rounds"
    keep = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    whole, _ = drawn_run(tmp_path, name, callbacks=[keep])
    together, _ = drawn_run(tmp_path, name, execution="vectorized")
    plain.close(whole, together, tolerance=1e-9)
    # In the round after the checkpoint clients 0 and 2 forget, and in the next one 3 does not.
    again, _ = drawn_run(tmp_path, name, ckpt_path=tmp_path / "epoch=1.ckpt")
    assert_same(weights(whole), weights(again))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_a_downlink_with_error_feedback_is_that_of_ef21p(tmp_path, share):
    sparse = {"downlink": [TopK(share, error_feedback=True)]}
    module, loop = run(tmp_path, **sparse)
    expected, twin = run(tmp_path, partial(EF21P, share, 1.0))
    plain.close(module.net, expected.net)
    for name, value in twin.server.base.state["shared"].items():
        torch.testing.assert_close(loop.server.base.state["wire.copy"][name], value, rtol=1e-10, atol=1e-10)
    size = len(sparse["downlink"][0].encode(dict(loop.server.model)))
    assert loop.ledger.total_down == size * sum(map(len, PARTICIPANTS))
    assert loop.ledger.total_idle == size * sum(4 - len(clients) for clients in PARTICIPANTS)
    # A share of 1 loses nothing.
    whole, _ = run(tmp_path, downlink=[TopK(1.0, error_feedback=True)])
    free, _ = run(tmp_path)
    plain.close(whole.net, free.net)
    assert not torch.allclose(module.net[0].weight, free.net[0].weight)


@pytest.mark.parametrize(
    "codec", [LowRankCodec(10**6, error_feedback=True), LowRankCodec(energy=1.0, error_feedback=True)]
)
def test_factors_of_full_rank_both_ways_lose_nothing(tmp_path, codec):
    full, _ = run(tmp_path, uplink=[codec], downlink=[codec])
    free, _ = run(tmp_path)
    plain.close(full.net, free.net)


def test_factors_are_warm_on_both_sides_and_kept_where_they_were_left(tmp_path):
    """Each message begins with the sender's last vectors: of the same round's clients no two have the same."""
    codec = LowRankCodec(1, error_feedback=True)
    _, loop = run(tmp_path, uplink=[codec], downlink=[codec])
    shape = (1, loop.server.model["net.0.weight"].shape[1])
    kept = [loop.coordinator.states[client]["wire.memory"]["net.0.weight"] for client in range(4)]
    kept.append(loop.server.base.state["wire.memory"]["net.0.weight"])
    assert [value.shape for value in kept] == [shape] * 5
    assert len({tuple(value.flatten().tolist()) for value in kept}) == 5
    _, other = run(tmp_path, uplink=[LowRankCodec(1, method="svd", error_feedback=True)])
    assert "wire.memory" not in other.coordinator.states[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [[Half()], [Quantize(8)]])
def test_a_downlink_without_error_feedback_rounds_the_values(tmp_path, kind):
    module, loop = run(tmp_path, downlink=kind)
    net, channel, nbytes = plain.initial(), Channel(kind), 0
    for number, clients in enumerate(PARTICIPANTS):
        model, ends = as_tensors(net, plain.flat(net)), {}
        for client in clients:
            data = channel._codec.seeded(derive_seed(0, "downlink", number, client)).encode(model)
            plain.load(net, as_vector(channel._codec.decode(data)))
            ends[client] = plain.train(net, client)
            nbytes += len(data)
        plain.load(net, plain.mean(ends))
    plain.close(module.net, net)
    assert loop.ledger.total_down == nbytes
    assert loop.ledger.total_idle == 0


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("kind", [[Half()], [Quantize(8)]])
def test_a_lossy_downlink_folds_in_what_it_sends(tmp_path, kind, interval):
    """The server's own weights too: all copies take up one encoding of the averaged factors."""
    announced, expected = [], {}

    class Watching(FedMUD):
        def announce(self, server, update):
            layers = dict(low_rank_layers(server.base.module, tied=False))
            channel, exact = Channel(kind), server.base.initial_buffers
            data = channel.send(update, exact=exact, seed=derive_seed(0, "announcement", server.round)).encode()
            sent = channel.receive(data, exact=exact)
            for name, layer in layers.items():
                factors = {factor: sent[f"{name}.factors.{factor}"] for factor in layer.factors}
                expected[name] = expected.get(name, layer.frozen_weight.clone()) + layer.update(factors)
            super().announce(server, update)
            announced.append(server.announcement)

    loop = FederatedLoop(Watching(interval), partition=FromIndices(CLIENTS), downlink=kind, seed=0, summary=False)
    lowrank, module = LowRank(MatrixProduct(), rank=2, role="update", summary=False), Module()
    fit(trainer(tmp_path, lowrank, loop, max_epochs=4, limit_val_batches=0), module, Data(batch_size=4))
    assert len(announced) == 4 // interval
    for name, value in expected.items():
        torch.testing.assert_close(module.get_submodule(name).frozen_weight, value, rtol=1e-6, atol=1e-6)
    # All clients hear the broadcast, so that none is idle; half of the bytes, or a quarter.
    plain_run = FederatedLoop(FedMUD(interval), partition=FromIndices(CLIENTS), seed=0, summary=False)
    fit(trainer(tmp_path, lowrank, plain_run, max_epochs=4, limit_val_batches=0), Module(), Data(batch_size=4))
    assert loop.ledger.total_down < plain_run.ledger.total_down


BASE_CHANGES = ("FedMUD", "FedSB", "FedLoRA-FLoRA", "FedLoRA-FedEx", "FedLoRA-CoLR", "FedLoRA-FLoRIST")


@nightly_except("FedMUD-8 bits", "FedLoRA-FedEx-8 bits", "FedSB-half", "FedLoRA-FLoRA-half")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("codecs", "parts"),
    [([Quantize(8)], ["sites", "bytes", "seed", "resume", "dropout"]), ([Half()], ["vectorized", "sites"])],
    ids=["8 bits", "half"],
)
@pytest.mark.parametrize("name", BASE_CHANGES)
def test_methods_that_change_the_base_keep_their_contract_with_a_lossy_downlink(name, codecs, parts):
    method = METHODS[name]
    settings = {**method.settings, "downlink": codecs, "uplink": codecs}
    lowrank = LOW_RANK[method.forms[0]]
    check_algorithm(method.make, method.expected, lowrank=lowrank, settings=settings, parts=parts)


@pytest.mark.slow
def test_unequal_ranks_with_a_lossy_downlink(tmp_path):
    """The announced change is one for all ranks, and each client's factors have an encoding of their own."""
    settings = {"init": "lora", "freeze_rest": True, "allow_larger": True}
    lowrank = partial(LowRank, MatrixProduct(), rank=4, role="update", summary=False, **settings)
    make = partial(FedLoRA, FedEx(), levels=(1.0, 0.5))
    parts = ["sites", "resume", "dropout"]
    check_algorithm(make, lowrank=lowrank, settings={"downlink": [Quantize(8)]}, parts=parts)


@pytest.mark.parametrize("data", [b"1234567", b"\xff" * 8, (9).to_bytes(8, "little") + b"12345678"])
def test_bytes_that_are_no_broadcast_of_two_parts(data):
    with pytest.raises(DecodingError, match=r"\d"):
        wire.SplitPacket.parts(data)


@nightly_except("both ways-case6", "half precision down-SCAFFOLD", "sparse changes in half precision up-FedAvg")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "algorithm"), in_turn(CHANNELS, [FedAvg, SCAFFOLD, partial(FedAvgM, momentum=0.5)])
)
def test_both_executions_agree(tmp_path, channels, algorithm):
    ends = []
    # Rounding differs between the executions, and may tip the choice of a coordinate or a level where two are close.
    for execution in ("sequential", "vectorized"):
        module, loop = run(tmp_path, algorithm, execution=execution, **CHANNELS[channels])
        ends.append((module, loop))
    plain.close(ends[0][0], ends[1][0], tolerance=1e-9)
    assert ends[0][1].ledger.state_dict() == ends[1][1].ledger.state_dict()
    for client in range(4):
        states = [loop.coordinator.states[client].get("wire.residual", {}) for _, loop in ends]
        for name, value in states[0].items():
            torch.testing.assert_close(value, states[1][name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("channels", "execution"), in_turn(CHANNELS, ["sequential", "vectorized"]))
@pytest.mark.nightly
def test_a_round_is_resumed_from_each_of_its_steps(tmp_path, channels, execution):
    settings = {"execution": execution, **CHANNELS[channels]}
    if execution == "vectorized":
        settings["chunk_size"] = 2
    module = partial(Module, optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9))
    every = ModelCheckpoint(tmp_path / "every", "{step}", save_top_k=-1, every_n_train_steps=1)
    whole, loop = run(tmp_path, module=module, callbacks=[every], **settings)
    files = sorted((tmp_path / "every").glob("*.ckpt"), key=lambda file: int(file.stem.split("=")[1]))
    for file in files[3:30:2]:
        again, resumed = run(tmp_path, module=module, ckpt_path=file, **settings)
        assert_same(weights(whole), weights(again))
        assert resumed.ledger.state_dict() == loop.ledger.state_dict()
        for client in range(4):
            kept, twin = (each.coordinator.states[client].get("wire.residual", {}) for each in (loop, resumed))
            assert_same(kept, twin)


@pytest.mark.slow
@pytest.mark.parametrize("buffers", ["average", "local", "reset"])
def test_buffers_travel_exactly(tmp_path, buffers):
    seen = []

    class Watching(FedAvg):
        def receive(self, server, client, message, weight):
            seen.append({name: value.clone() for name, value in message.tensors.items()})
            super().receive(server, client, message, weight)

        def end(self, client):
            ended.append({name: value.detach().clone() for name, value in client.model.items()})
            return super().end(client)

    ended: list[dict[str, Tensor]] = []
    channels = {"uplink": [TopK(0.1, error_feedback=True)], "downlink": [TopK(0.1, error_feedback=True)]}
    run(tmp_path, Watching, normed, Data(double(), batch_size=4, drop_last=True), buffers=buffers, **channels)
    for arrived, sent in zip(seen, ended, strict=True):
        names = [name for name in arrived if "running" in name or "tracked" in name]
        assert len(names) == (0 if buffers == "local" else 3)
        assert all(torch.equal(arrived[name], sent[name]) for name in names)
        assert arrived["net.0.weight"].dtype == sent["net.0.weight"].dtype


class Unequal(FedAvg):
    """Sends each client other values."""

    def broadcast(self, server, client):
        message = super().broadcast(server, client)
        message.tensors = {name: value * (1 + client.id) for name, value in message.tensors.items()}
        return message


class OtherShapes(ChangesBase):
    def reference(self, base, received):
        return {name: value[:1] for name, value in received.items()}


@pytest.mark.parametrize(
    ("algorithm", "channels", "message"),
    [
        (FedAvg, {"uplink": TopK(0.1)}, r"uplink.*TopK.*share=0\.1"),
        (FedAvg, {"downlink": [0.1]}, r"downlink.*\[0\.1\]"),
        (FedAvg, {"uplink": [Half(), TopK(0.1, error_feedback=True)]}, "error_feedback=True"),
        (FedAvg, {"uplink": [Dense(), Half()]}, "leaves no floating-point values"),
        (FedAvg, {"downlink": [TopK(0.1)]}, "error_feedback=True"),
        (FedAvg, {"downlink": [Half(), TopK(0.1)]}, "TopK would set the numbers"),
        (FedAvg, {"downlink": [Chain([Half(), TopK(0.1)])]}, "Chain would set the numbers"),
        (FedAvg, {"downlink": [Split(["net.0.bias"], Dense(), TopK(0.1))]}, "Split would set the numbers"),
        (FedMUD, {"downlink": [Half(error_feedback=True)]}, "FedMUD .*error_feedback"),
        (FedMUD, {"downlink": [TopK(0.1)]}, "TopK"),
        (FedAvg, {"downlink": [LowRankCodec(2)]}, "LowRankCodec would set the numbers"),
        (TDPFed, {"downlink": [TopK(0.1, error_feedback=True)]}, r"TDPFed .*net\.0\.weight\.U.*TopK"),
        (FedAvg, {"downlink": [Sign()]}, "Sign .*one magnitude.*error_feedback=True"),
        (FedAvg, {"downlink": [Chain([Half(), Sign()])]}, "Chain .*one magnitude"),
        (FedAvg, {"downlink": [Split(["net.0.bias"], Half(), Sign())]}, "Split .*one magnitude"),
        (RandomMask, {"uplink": [Chain([Half(), Sign()])]}, "RandomMask.*after Chain"),
        (RandomMask, {"uplink": [LowRankCodec(2)]}, r"RandomMask.*LowRankCodec"),
        (partial(EF21P, 0.1, 0.1), {"downlink": [Half()]}, "EF21P .* leave out downlink"),
        (Unequal, {"downlink": [Half(error_feedback=True)]}, "error_feedback"),
        (OtherShapes, {"uplink": [TopK(0.5)]}, r"OtherShapes.*'net\.0\.bias'.*\(16,\).*\(1,\).*TopK"),
        (partial(RandomCoordinates, 0.5, 0.5), {"uplink": [Half(error_feedback=True)]}, "RandomCoordinates"),
        (partial(RandomCoordinates, 0.5, 0.5), {"uplink": [TopK(0.5)]}, r"RandomCoordinates.*TopK"),
        (RandomMask, {"uplink": [Half(), Sign()]}, r"RandomMask.*uplink=\[Half\(\)\].*\[Quantize\(\)\]"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, algorithm, channels, message):
    with pytest.raises(MisconfigurationException, match=message):
        run(tmp_path, algorithm, **channels)


def fit_adapters(tmp_path, algorithm, codec):
    lowrank = LowRank(MatrixProduct(), rank=2, alpha=2, init="lora", summary=False)
    loop = FederatedLoop(algorithm, clients=3, uplink=[codec], summary=False, seed=0)
    fit(trainer(tmp_path, lowrank, loop, max_epochs=2, limit_val_batches=0), Module(), Data())


def test_error_feedback_is_refused_for_slots_that_differ_between_rounds(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"error_feedback=True.*FedLoRA.*upload_ranks=3"):
        fit_adapters(tmp_path, FedLoRA(LoRAA2(), upload_ranks=3), Quantize(error_feedback=True))


@pytest.mark.parametrize("codec", [TopK(0.1, error_feedback=True), LowRankCodec(1), Sign()])
def test_a_sparse_codec_is_refused_for_factors_that_are_sent_as_values(tmp_path, codec):
    with pytest.raises(MisconfigurationException, match=rf"RoLoRA.*{type(codec).__name__}.*Half"):
        fit_adapters(tmp_path, FedLoRA(RoLoRA()), codec)


@pytest.mark.parametrize(
    ("make", "codec"),
    [
        (lambda: FedLoRA(RoLoRA()), Quantize(error_feedback=True)),
        (lambda: FedLoRA(FedSVD(2)), TopK(0.1, error_feedback=True)),
        (lambda: FedLoRA(RBLA(), levels=(1.0, 0.5)), TopK(0.1, error_feedback=True)),
        (lambda: FedLoRA(RBLA(), ranks={1: 1}), LowRankCodec(1)),
    ],
)
def test_codecs_that_go_with_factors(tmp_path, make, codec):
    fit_adapters(tmp_path, make(), codec)


class Masked(Module):
    """Has a mask of -inf above the diagonal as a buffer that is saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))


@pytest.mark.parametrize("execution", ["sequential", "vectorized"])
@pytest.mark.parametrize("codecs", [[], [Half()], [Quantize(8)], [TopK(0.5), Quantize(4)]], ids=repr)
def test_a_mask_of_minus_infinity_drops_no_client(tmp_path, codecs, execution):
    loop = FederatedLoop(FedAvg(), clients=3, uplink=codecs, execution=execution, summary=False, seed=0)
    module = Masked()
    fit(trainer(tmp_path, loop, max_epochs=2, limit_val_batches=0), module, Data())
    assert not loop.coordinator.answers.failed
    assert torch.equal(module.mask, torch.full((3, 3), -torch.inf).triu(1))
