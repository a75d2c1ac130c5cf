"""FedLoRA's rounds: what crosses the wire, and the effective weights against the operators' formulas with matrices."""

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import (
    FFA,
    RBLA,
    CoLR,
    FedAvg,
    FederatedLoop,
    FedEx,
    FedInc,
    FedLoRA,
    FedSA,
    FedSVD,
    FLoRA,
    FromIndices,
    LabelFlip,
    LoRAA2,
    LowRank,
    MatrixProduct,
    ProductSum,
    RaFLoRA,
    RoLoRA,
    SignFlip,
    SumProduct,
    TopK,
    ZeroPadding,
    load_dense,
)
from lightning_lowrank.federated import Base, ClientContext, ClientInfo, Message, Server
from lightning_lowrank.federated.algorithm import detached
from lightning_lowrank.federated.state import trained_tensors
from lightning_lowrank.layers import low_rank_layers
from lightning_lowrank.lora import LowRankPair, Operator, find_adapters, requirements
from lightning_lowrank.registry import subclasses_by_name
from lightning_lowrank.testing import check_algorithm
from tests.algorithms.written_out import own_model
from tests.grids import in_turn, nightly_except
from tests.helpers import Data, Module, assert_same, blobs, fit, network, trainer, weights

CLIENTS = [list(range(40)), list(range(40, 60)), list(range(60, 103))]
SIZES = torch.tensor([len(indices) for indices in CLIENTS], dtype=torch.float64)
DOUBLE = {"precision": "64-true", "limit_val_batches": 0}
LORA = {"alpha": 4.0, "init": "lora", "summary": False, "allow_larger": True}


class Wire(Callback):
    """Records what crosses the wire and what clients trained, by round and client, and the weights by round."""

    def __init__(self, loop):
        self.down, self.up, self.trained, self.effective, self.started = {}, {}, {}, [], {}
        algorithm = loop.algorithm
        begin, end = algorithm.begin, algorithm.end

        def watched_begin(client, message):
            self.down[client.round, client.id] = detached(message.tensors)
            begin(client, message)
            self.started[client.round, client.id] = {
                name: adapter.pair(detached(client.model), adapter.rank, adapter.scaling)
                for name, adapter in find_adapters(client.base.module).items()
            }

        def watched_end(client):
            message = end(client)
            self.up[client.round, client.id] = detached(message.tensors)
            self.trained[client.round, client.id] = detached(client.model)
            return message

        algorithm.begin, algorithm.end = watched_begin, watched_end

    def on_train_start(self, trainer, pl_module):
        self.effective.append(effective(pl_module))

    def on_train_epoch_end(self, trainer, pl_module):
        self.effective.append(effective(pl_module))


def effective(module):
    return {name: layer.weight.detach().double().clone() for name, layer in low_rank_layers(module)}


def federate(tmp_path, algorithm, lowrank=None, rank=3, data=None, rounds=3, optimizer=None, **arguments):
    double = torch.utils.data.TensorDataset(blobs().tensors[0].double(), blobs().tensors[1])
    loop = FederatedLoop(algorithm, partition=FromIndices(CLIENTS), summary=False, **arguments)
    wire = Wire(loop)
    seen = []
    if isinstance(algorithm, FedLoRA):
        algorithm.observers.append(seen.append)
    module = Module(network(), **({} if optimizer is None else {"optimizer": optimizer}))
    low_rank = LowRank(MatrixProduct(), rank=rank, **{**LORA, **(lowrank or {})})
    fit(trainer(tmp_path, low_rank, loop, wire, max_epochs=rounds, **DOUBLE), module, Data(double))
    return module, loop, wire, seen


@pytest.mark.slow
def test_product_sum_is_federated_averaging_of_factors(tmp_path):
    ours, loop, _, _ = federate(tmp_path, FedLoRA(ProductSum()))
    plain, twin, _, _ = federate(tmp_path, FedAvg())
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(ours)[name], value, rtol=1e-12, atol=1e-12)
    assert loop.ledger.state_dict() == twin.ledger.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("operator", [FLoRA, SumProduct, CoLR, FFA, RoLoRA])
def test_global_update_is_the_mean_of_the_clients_updates(tmp_path, operator):
    # At full rank SumProduct's truncation loses nothing.
    rank = {"net.0": 6, "net.2": 16, "net.4": 4} if operator is SumProduct else 3
    _, _, wire, seen = federate(tmp_path, FedLoRA(operator()), rank=rank)
    assert len(seen) == 3
    for before, after, aggregated in zip(wire.effective, wire.effective[1:], seen, strict=False):
        for layer in before:
            # Where pairs carry on, all that has been learned so far is in them.
            base = before[layer] if operator().redraws else wire.effective[0][layer]
            mean = mean_update(aggregated, layer)
            torch.testing.assert_close(after[layer], base + mean, rtol=1e-9, atol=1e-9)
            assert (after[layer] - before[layer]).abs().max() > 1e-6


def mean_update(aggregated, layer):
    pairs = [pairs[layer] for pairs in aggregated.pairs]
    products = [pair.scaling * pair.B.double() @ pair.A.double() for pair in pairs]
    return sum(size * product for size, product in zip(SIZES / SIZES.sum(), products, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("operator", [CoLR(), CoLR("A"), FLoRA()], ids=repr)
def test_the_base_moves_by_the_mean_of_what_clients_of_different_rank_trained(tmp_path, operator):
    # In the second round no client has the layers' rank.
    cohorts, ranks = [[0, 1, 2], [1, 2], [0, 2]], [4, 2, 1]
    _, _, wire, _ = federate(tmp_path, FedLoRA(operator, ranks=ranks), rank=4, participants=cohorts)
    for number, (before, after) in enumerate(pairwise(wire.effective)):
        cohort = cohorts[number]
        for layer, value in before.items():
            for client in cohort:
                trained, rank = wire.trained[number, client], ranks[client]
                left, right = (trained[f"{layer}.factors.{name}"] for name in "UV")
                value = value + SIZES[client] / SIZES[cohort].sum() * LORA["alpha"] / rank * left @ right.T
                assert not left[:, rank:].any()
                if operator.trained(number) == {"A"}:
                    torch.testing.assert_close(left.T @ left, torch.diag((torch.arange(4) < rank).double()))
            torch.testing.assert_close(after[layer], value, rtol=1e-9, atol=1e-9)
            assert (after[layer] - before[layer]).abs().max() > 1e-6


@pytest.mark.slow
def test_fed_ex_is_exact_though_its_base_moves(tmp_path):
    module, _, wire, seen = federate(tmp_path, FedLoRA(FedEx()))
    for name, layer in low_rank_layers(module):
        change = seen[-1].broadcasts[name].change
        base = layer.frozen_weight.detach() - change.scaling * change.B @ change.A
        assert change.rank == 6
        torch.testing.assert_close(wire.effective[-1][name], base + mean_update(seen[-1], name), rtol=1e-9, atol=1e-9)
        assert (change.B @ change.A).abs().max() > 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("operator", [ProductSum, FFA, RoLoRA, FedSA, FLoRA, FedEx, CoLR])
def test_only_what_moves_is_sent(tmp_path, operator):
    factors = {f"net.{layer}.factors.{name}" for layer in (0, 2, 4) for name in "UV"}
    left, right = ({name for name in factors if name.endswith(letter)} for letter in "UV")
    rest = {f"net.{layer}.bias" for layer in (0, 2, 4)}
    left_changes = {f"net.{layer}.change.B" for layer in (0, 2, 4)}
    # Nine slots have more numbers than any of the layers, and six more than the first and the last.
    dense_changes = {f"net.{layer}.change.product" for layer in (0, 2, 4)}
    mixed_changes = {"net.0.change.product", "net.2.change.A", "net.2.change.B", "net.4.change.product"}
    expected = {
        ProductSum: ([factors] * 3, [factors] * 3),
        FFA: ([left] * 3, [left] * 3),
        RoLoRA: ([left, left, right], [left, right, left]),
        FedSA: ([right] * 3, [right] * 3),
        FLoRA: ([set(), dense_changes, dense_changes], [factors] * 3),
        FedEx: ([factors, factors | mixed_changes, factors | mixed_changes], [factors] * 3),
        CoLR: ([set(), left_changes, left_changes], [left] * 3),
    }
    down, up = expected[operator]
    _, loop, wire, _ = federate(tmp_path, FedLoRA(operator()))
    for number in range(3):
        for client in range(3):
            assert wire.down[number, client].keys() == down[number] | rest, number
            assert wire.up[number, client].keys() == up[number] | rest, number
    assert not loop.ledger.figures().get("comm/total_idle_down_bytes")


@pytest.mark.slow
def test_clients_that_sat_out_get_what_they_missed(tmp_path):
    rounds = [[0, 1], [0, 1], [0, 2], [1, 2], [0, 1]]
    module, _, wire, _ = federate(tmp_path, FedLoRA(RoLoRA()), participants=rounds, rounds=5)
    letters = {key: {name[-1] for name in sent if "factors" in name} for key, sent in wire.down.items()}
    # U moves in rounds 0, 2, 4 and V in 1, 3; before its first change each side has V from the seed.
    assert letters[0, 0] == {"U"}
    assert letters[1, 0] == {"U"}
    assert letters[2, 0] == {"V"}
    assert letters[2, 2] == {"U", "V"}
    assert letters[3, 1] == {"U", "V"}
    assert letters[3, 2] == {"U"}
    assert letters[4, 0] == {"U", "V"}
    assert letters[4, 1] == {"V"}
    everyone, _, _, _ = federate(tmp_path, FedLoRA(RoLoRA()), participants=rounds, rounds=5, execution="vectorized")
    for name, value in weights(module).items():
        torch.testing.assert_close(weights(everyone)[name], value, rtol=1e-9, atol=1e-9)


@nightly_except(
    "CoLR(trained_factor='A'), {}",
    "FLoRA(), {}",
    "LoRAA2(), {'upload_ranks': 4}",
    "SumProduct(split='left', method='exact'), {'levels': (1.0, 0.5)}",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        partial(FedLoRA, ProductSum(), keep=["5.bias"]),
        partial(FedLoRA, SumProduct(), levels=(1.0, 0.5)),
        *(partial(FedLoRA, operator()) for operator in (FLoRA, FFA, RoLoRA, FedSA, FedEx, FedInc, CoLR)),
        partial(FedLoRA, CoLR(trained_factor="A")),
        partial(FedLoRA, RoLoRA(), levels=(1.0, 0.5, 0.25), capacity="dynamic"),
        partial(FedLoRA, FLoRA(), levels=(1.0, 0.5), capacity="dynamic"),
        partial(FedLoRA, LoRAA2(), upload_ranks=4),
    ],
    ids=lambda make: f"{make.args[0]!r}, {make.keywords}",
)
def test_a_client_needs_nothing_but_its_messages(make):
    check_algorithm(make, lowrank=partial(LowRank, MatrixProduct(), rank=4, **LORA), parts=["sites"])


OPERATORS = [kind for kind in subclasses_by_name(Operator).values() if kind.__module__.startswith("lightning_lowrank")]
STARTS = [
    *(kind() for kind in OPERATORS),
    *(FedSVD(2), FedSVD(3), CoLR("A")),
    *(kind(split="balanced") for kind in (SumProduct, RaFLoRA)),
]


@nightly_except(
    *("equal-FedSVD(period=2)", "equal-FedSVD(period=3)", "equal-RoLoRA()", "equal-FedSA()"),
    *("mixed-FedSVD(period=3)", "mixed-SumProduct(split='balanced', method='exact')", "mixed-CoLR(trained_factor='A')"),
)
@pytest.mark.slow
@pytest.mark.parametrize("operator", STARTS, ids=repr)
@pytest.mark.parametrize("ranks", [[4, 4, 4], [4, 2, 1]], ids=["equal", "mixed"])
def test_a_client_starts_from_what_the_operator_says(tmp_path, operator, ranks):
    """From its own pair after a round that it took part in, else from the server's at its rank and scaling."""
    mixed = len(set(ranks)) > 1
    if mixed and not operator.mixed_ranks:
        pytest.skip("it takes clients of one rank")
    cohorts = [[0, 1], [1], [0, 2], [1, 2], [2], [0, 1], [0, 1, 2], [2]]
    algorithm = FedLoRA(operator, **({"ranks": ranks} if mixed else {}))
    _, _, wire, seen = federate(
        tmp_path, algorithm, rank=4, rounds=8, participants=cohorts, seed=0, optimizer=small_steps
    )
    own, compared = {}, 0
    for aggregated, cohort, following in zip(seen, cohorts, cohorts[1:], strict=False):
        for layer, result in aggregated.broadcasts.items():
            for client, pair in zip(cohort, result.clients, strict=True):
                if operator.broadcasts == "personal" and "B" not in operator.sent_up(0):
                    # The server does not know it.
                    trained = wire.trained[aggregated.round, client][f"{layer}.factors.U"]
                    pair = LowRankPair(trained[:, : pair.rank], pair.A, pair.scaling)
                own[client, layer] = pair
            for client in following:
                start = wire.started[aggregated.round + 1, client][layer]
                rank = own[client, layer].rank if (client, layer) in own else min(ranks[client], start.rank)
                shared = result.server.resized(rank, start.scaling, operator.absorbing(aggregated.round))
                expected = shared if client not in cohort else own[client, layer]
                if operator.broadcasts == "personal" and client not in cohort:
                    if (client, layer) not in own:
                        continue
                    alone = "B" not in operator.sent_up(0)
                    expected = LowRankPair(own[client, layer].B, (shared if alone else own[client, layer]).A, 1.0)
                for name in ("B", "A"):
                    value = getattr(expected.resized(start.rank, expected.scaling), name)
                    torch.testing.assert_close(getattr(start, name), value, rtol=1e-9, atol=1e-9)
                compared += 1
    assert compared >= 3 * 7


@pytest.mark.slow
def test_idle_clients_hear_of_a_changed_base(tmp_path):
    # The third client would take part in a fourth round.
    participants = [*[[0, 1]] * 3, [2]]
    _, loop, wire, _ = federate(tmp_path, FedLoRA(FLoRA()), participants=participants)
    _, alike, _, _ = federate(tmp_path, FedLoRA(SumProduct()), participants=participants)
    assert loop.ledger.figures()["comm/total_idle_down_bytes"] > 0
    assert not alike.ledger.figures().get("comm/total_idle_down_bytes")
    sent = wire.down[1, 0]
    assert sent["net.2.change.B"].shape == (16, 6)
    assert sent["net.2.change.A"].shape == (6, 16)
    # Where two clients' factors have more numbers than the matrix, it travels.
    assert sent["net.0.change.product"].shape == (16, 6)
    assert sent["net.4.change.product"].shape == (4, 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operator", "execution"), in_turn([RBLA, ZeroPadding, SumProduct, FLoRA, FedEx], ["sequential", "vectorized"])
)
def test_ranks_of_clients(tmp_path, operator, execution):
    levels = (1.0, 0.5, 0.25)
    _, loop, wire, seen = federate(
        tmp_path, FedLoRA(operator(), levels=levels), rank=4, execution=execution, optimizer=small_steps
    )
    ranks = [4, 2, 1]
    for client, rank in enumerate(ranks):
        for number in range(3):
            up = wire.up[number, client]
            assert up["net.0.factors.U"].shape == (16, rank)
            assert up["net.0.factors.V"].shape == (6, rank)
            pair = seen[number].pairs[client]["net.0"]
            assert (pair.rank, pair.scaling) == (rank, 4 / rank)
    personal = own_model(loop, 2)
    assert personal["net.0.factors.U"][:, 1:].abs().max() == 0
    assert set(loop.algorithm.variants(loop.server)) == {"0.5", "0.25"}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"uplink": [TopK(0.3)]}, {"attackers": SignFlip([0, 1, 2], scale=1.0)}], ids=str)
@pytest.mark.parametrize(("operator", "alpha"), [(FLoRA(), None), (SumProduct("balanced"), 4.0)], ids=repr)
def test_codecs_and_attackers_know_the_changes_of_clients_of_different_rank(tmp_path, operator, alpha, settings):
    settings = {"rounds": 2, "local_steps": 2, "optimizer": small_steps, **settings}
    _, _, wire, seen = federate(tmp_path, FedLoRA(operator, ranks=[4, 2, 1]), {"alpha": alpha}, 4, **settings)
    total = sent = 0
    for client, rank in enumerate([4, 2, 1]):
        for layer, found in seen[1].pairs[client].items():
            began = wire.started[1, client][layer].resized(rank)
            ended = (wire.trained[1, client][f"{layer}.factors.{name}"][:, :rank] for name in "UV")
            for one, start, end in zip((found.B, found.A.T), (began.B, began.A.T), ended, strict=True):
                if "attackers" in settings:
                    torch.testing.assert_close(one, 2 * start - end, rtol=0, atol=1e-12)
                    continue
                is_end, is_start = (torch.isclose(one, each, rtol=0, atol=1e-12) for each in (end, start))
                assert (is_end | is_start).all()
                total, sent = total + one.numel(), sent + is_end.sum().item()
    assert "attackers" in settings or 0.2 * total < sent < 0.4 * total


@pytest.mark.slow
def test_an_attacker_whose_slots_have_no_known_change_is_refused(tmp_path):
    settings = {"rounds": 1, "optimizer": small_steps}
    federate(tmp_path, FedLoRA(LoRAA2(), upload_ranks=4), attackers=LabelFlip([1]), **settings)
    with pytest.raises(MisconfigurationException, match=r"SignFlip.*client 1.*net\.\d\.factors"):
        federate(tmp_path, FedLoRA(LoRAA2(), upload_ranks=4), attackers=SignFlip([1]), **settings)


@pytest.mark.slow
def test_ranks_by_a_list_a_dictionary_or_a_function_are_those_of_levels(tmp_path):
    def run(**given):
        algorithm = FedLoRA(SumProduct(), **given)
        module, loop, *_ = federate(tmp_path, algorithm, rank=4, rounds=2, optimizer=small_steps)
        return weights(module), loop

    expected, by_levels = run(levels=(1.0, 0.5, 0.25))
    for ranks in ([4, 2, 1], {1: 2, 2: 1}, lambda client: 4 >> client):
        found, loop = run(ranks=ranks)
        assert_same(found, expected)
        assert loop.ledger.state_dict() == by_levels.ledger.state_dict()
        assert set(loop.algorithm.variants(loop.server)) == {"rank_2", "rank_1"}


def test_a_layer_of_smaller_rank_than_the_client_keeps_its_own(tmp_path):
    _, _, wire, _ = federate(
        tmp_path, FedLoRA(RBLA(), ranks=[6, 3, 1]), rank={"net.0": 2, "net.2": 6, "net.4": 3}, rounds=1
    )
    for client, ranks in enumerate([(2, 6, 3), (2, 3, 3), (1, 1, 1)]):
        up = wire.up[0, client]
        assert tuple(up[f"net.{layer}.factors.U"].shape[1] for layer in (0, 2, 4)) == ranks


@pytest.mark.parametrize(
    ("ranks", "said"),
    [([4, 5], r"1.*rank.*5"), ({0: 2, 3: 1}, r"ranks.*3.*3"), (lambda client: 2.0 * client, r"0.*rank.*0\.0")],
)
def test_ranks_that_do_not_suit_layers_or_clients_are_refused_before_the_first_round(tmp_path, ranks, said):
    with pytest.raises(MisconfigurationException, match=said):
        federate(tmp_path, FedLoRA(SumProduct(), ranks=ranks), rank=4)


small_steps = partial(torch.optim.SGD, lr=0.01)


def test_a_client_of_lower_rank_trains_as_if_it_were_alone_with_its_rank(tmp_path):
    """Its scaling is α / r of its own rank, and slots beyond it do nothing."""
    _, _, wire, _ = federate(
        tmp_path, FedLoRA(ZeroPadding(), levels=(1.0, 0.5)), rank=4, participants=[[1]], rounds=1, optimizer=small_steps
    )

    class Start(Callback):
        """Gives the smaller adapters the first slots of the larger ones."""

        def on_fit_start(self, trainer, pl_module):
            values = wire.down[0, 1]
            with torch.no_grad():
                for name, parameter in pl_module.named_parameters():
                    if "factors" in name:
                        parameter.copy_(values[name])

    alone = Module(network(), optimizer=small_steps)
    double = torch.utils.data.TensorDataset(blobs().tensors[0].double(), blobs().tensors[1])
    low_rank = LowRank(MatrixProduct(), rank=2, **LORA)
    loop = FederatedLoop(FedAvg(), partition=FromIndices(CLIENTS), summary=False, participants=[[1]])
    fit(trainer(tmp_path, low_rank, Start(), loop, max_epochs=1, **DOUBLE), alone, Data(double))
    for name, value in wire.up[0, 1].items():
        torch.testing.assert_close(weights(alone)[name], value, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_fed_sa_keeps_b_on_its_clients(tmp_path):
    module, loop, wire, _ = federate(tmp_path, FedLoRA(FedSA()))
    for name, layer in low_rank_layers(module):
        assert layer.factors["U"].abs().max() == 0
        for client in range(3):
            state, left = own_model(loop, client), f"{name}.factors.U"
            assert torch.equal(state[left], wire.trained[2, client][left])
            assert torch.equal(state[f"{name}.factors.V"], layer.factors["V"])
    owned = [loop.coordinator.states[client]["personal"]["net.0.factors.U"] for client in range(3)]
    assert not torch.equal(owned[0], owned[1])


@pytest.mark.slow
def test_kept_parameters_stay_with_their_clients(tmp_path):
    module, loop, wire, _ = federate(tmp_path, FedLoRA(ProductSum(), keep=["4.bias"]))
    assert all("net.4.bias" not in sent for sent in (*wire.down.values(), *wire.up.values()))
    torch.testing.assert_close(weights(module)["net.4.bias"], Module(network()).net[4].bias.detach().double())
    own = [own_model(loop, client)["net.4.bias"] for client in range(3)]
    assert not torch.equal(own[0], own[1])


@pytest.mark.slow
def test_most_important_ranks_are_uploaded(tmp_path):
    _, _, wire, seen = federate(tmp_path, FedLoRA(LoRAA2(), upload_ranks=[2, 5, 9]), rounds=2)
    for number in range(2):
        for client, budget in enumerate((2, 5, 9)):
            up = wire.up[number, client]
            slots = {name: value for name, value in up.items() if name.endswith("slots")}
            assert sum(len(value) for value in slots.values()) == budget
            letter = "UV"[number]
            for layer, value in slots.items():
                name = layer.removesuffix("slots") + f"factors.{letter}"
                assert up[name].shape[1] == len(value)
    # Slots that a client did not upload are those it received.
    before = wire.down[1, 0]["net.2.factors.U"]
    pair = seen[1].pairs[0]["net.2"]
    assert torch.equal(pair.B, before)
    whole, _, _, _ = federate(tmp_path, FedLoRA(LoRAA2(), upload_ranks=9), rounds=2)
    alternating, _, _, _ = federate(tmp_path, FedLoRA(RoLoRA()), rounds=2)
    for name, value in weights(alternating).items():
        torch.testing.assert_close(weights(whole)[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("slots", [[0, 0], [1, 0], [-1, 0], [0, 3], [0], []])
def test_refuses_slots_that_a_client_cannot_have_chosen(slots):
    module = Module(network())
    LowRank(MatrixProduct(), rank=3, **LORA).convert(module)
    server, algorithm = Server(Base(module, seed=0)), FedLoRA(LoRAA2(), upload_ranks=2)
    algorithm.setup(server.base)
    sent = {"net.0.slots": torch.tensor(slots, dtype=torch.int32), "net.0.factors.U": torch.zeros(16, 2)}
    info = ClientInfo(1, 5, 0, 0)
    with pytest.raises(ValueError, match=r"1.*sent.*2"):
        algorithm.receive(server, info, Message(sent), 1.0)
    assert not server.state
    client = ClientContext(**vars(info), base=server.base, model=trained_tensors(module), steps=1)
    algorithm.begin(client, Message(dict(client.model)))
    limits = algorithm.end(client).limits
    assert (limits["net.0.slots"], limits["net.0.factors.U"]) == ((3,), (16, 3))
    algorithm.receive(server, info, Message({**sent, "net.0.slots": torch.tensor([0, 2])}), 1.0)


@pytest.mark.slow
def test_clusters_receive_their_own_means(tmp_path):
    _, loop, wire, seen = federate(tmp_path, FedLoRA(FedInc(clusters=2)), rounds=2)
    received = [wire.down[1, client]["net.0.factors.U"] for client in range(3)]
    assert len({tuple(value.flatten().tolist()) for value in received}) == 2
    for client in range(3):
        torch.testing.assert_close(received[client], seen[0].broadcasts["net.0"].clients[client].B, rtol=0, atol=0)
        state = own_model(loop, client)
        torch.testing.assert_close(state["net.0.factors.U"], seen[1].broadcasts["net.0"].clients[client].B)


@pytest.mark.slow
@pytest.mark.parametrize("operator", [FedSA(), FedInc(clusters=2)], ids=repr)
def test_own_slots_beyond_a_drawn_rank_stay(tmp_path, operator):
    algorithm = FedLoRA(operator, levels=(1.0, 1 / 3), capacity="dynamic")
    _, _, wire, seen = federate(tmp_path, algorithm, rounds=6)
    returned = 0
    for client in range(3):
        own, last = {}, 3
        for number in range(6):
            start = wire.started[number, client]["net.0"]
            rank = int((start.A.norm(dim=1) > 0).sum())
            common = seen[number - 1].broadcasts["net.0"].server if number else start
            for slot in range(rank):
                wanted = own.get(slot, common.scaling * common.B[:, slot])
                torch.testing.assert_close(start.scaling * start.B[:, slot], wanted, rtol=1e-12, atol=1e-12)
            returned += len(own.keys() & set(range(last, rank)))
            trained = start.scaling * wire.trained[number, client]["net.0.factors.U"]
            mean = seen[number].broadcasts["net.0"].clients[client]
            after = trained if isinstance(operator, FedSA) else mean.scaling * mean.B
            own |= {slot: after[:, slot] for slot in range(rank)}
            last = rank
    assert returned > 0


@pytest.mark.slow
def test_a_clients_own_model_is_in_the_checkpoint(tmp_path):
    loop = FederatedLoop(FedLoRA(FedInc(clusters=2)), partition=FromIndices(CLIENTS), summary=False)
    module = Module(network())
    fitted = trainer(tmp_path, LowRank(MatrixProduct(), rank=3, **LORA), loop, max_epochs=2)
    fit(fitted, module, Data())
    fitted.save_checkpoint(tmp_path / "last.ckpt")
    for client in range(3):
        module.load_state_dict({**weights(module), **own_model(loop, client)})
        dense = load_dense(tmp_path / "last.ckpt", Module(network()), client=client)
        for name, layer in low_rank_layers(module):
            torch.testing.assert_close(weights(dense)[f"{name}.weight"], layer.weight.detach())


@pytest.mark.slow
def test_refuses_operators_that_change_a_base_weight_that_cannot_take_it(tmp_path, monkeypatch):
    def found(module, adapter):
        adapters = find_adapters(module, adapter)
        adapters["net.2"].unfoldable = "its weight is that of another module too"
        return adapters

    monkeypatch.setattr(requirements, "find_adapters", found)
    with pytest.raises(MisconfigurationException, match=r"'net\.2'.*weight"):
        federate(tmp_path, FedLoRA(FLoRA()), rounds=1)
    federate(tmp_path, FedLoRA(SumProduct()), rounds=1)


@pytest.mark.slow
def test_what_was_learned_before_survives_a_first_draw(tmp_path):
    """An adapter that is not zero goes into the base before factors are drawn."""

    class Learned(Callback):
        def on_fit_start(self, trainer, pl_module):
            with torch.no_grad():
                for _, layer in low_rank_layers(pl_module):
                    layer.factors["U"].fill_(0.01)
            self.before = effective(pl_module)

    learned = Learned()
    loop = FederatedLoop(FedLoRA(FLoRA()), partition=FromIndices(CLIENTS), summary=False)
    module = Module(network(), optimizer=partial(torch.optim.SGD, lr=0.0))
    low_rank = LowRank(MatrixProduct(), rank=2, **LORA)
    fit(trainer(tmp_path, low_rank, learned, loop, max_epochs=2), module, Data())
    for name, value in effective(module).items():
        torch.testing.assert_close(value, learned.before[name], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_transposed_and_channel_layers(tmp_path):
    """Convolutions and embeddings give pairs of outputs by inputs, whichever way they store them."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(5, 8)
            self.conv = nn.Conv1d(8, 6, 3, padding=1)
            self.head = nn.Linear(6, 4)

        def forward(self, inputs):
            tokens = (inputs * 2).long().clamp(0, 4)
            return self.head(self.conv(self.embed(tokens).movedim(1, 2)).relu().mean(-1))

    for layout in ("permuted", "channel"):
        module = Module(Net())
        loop = FederatedLoop(FedLoRA(FLoRA()), partition=FromIndices(CLIENTS), summary=False)
        wire = Wire(loop)
        seen = []
        loop.algorithm.observers.append(seen.append)
        low_rank = LowRank(MatrixProduct(layout), rank=2, **LORA)
        fit(trainer(tmp_path, low_rank, loop, wire, max_epochs=2), module, Data())
        for name, layer in low_rank_layers(module):
            for round_number in (0, 1):
                changes = []
                for pairs in seen[round_number].pairs:
                    pair = pairs[name]
                    factors = {"U": pair.B, "V": pair.A.T}
                    if layer.first_is_input:
                        factors = {"U": pair.A.T, "V": pair.B}
                    changes.append(pair.scaling * layer.factorization.compose(factors, layer.weight_shape).double())
                mean = sum(size * change for size, change in zip(SIZES / SIZES.sum(), changes, strict=True))
                moved = wire.effective[round_number + 1][name] - wire.effective[round_number][name]
                torch.testing.assert_close(moved, mean, rtol=1e-4, atol=1e-6)


def test_refuses_what_diverged_and_leaves_the_server_as_it_was(tmp_path):
    loop = FederatedLoop(FedLoRA(SumProduct()), partition=FromIndices(CLIENTS), summary=False)
    module = Module(network(), optimizer=partial(torch.optim.SGD, lr=1e6))
    states = []

    class Keep(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if not states:
                states.append(copy.deepcopy(loop.server.model))

    low_rank = LowRank(MatrixProduct(), rank=2, **LORA)
    with pytest.raises(MisconfigurationException, match=r"0.*net\.0"):
        fit(trainer(tmp_path, low_rank, loop, Keep(), max_epochs=3), module, Data())
    assert_same(states[0], loop.server.model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"operator": "SumProduct"}, r"operator.*'SumProduct'"),
        ({"operator": ProductSum(), "levels": (1.0, 0.5)}, r"levels=\[1\.0, 0\.5\]"),
        ({"operator": RBLA(), "levels": (0.5,)}, "largest 1"),
        ({"operator": RBLA(), "levels": (1.0, 1.5)}, r"levels.*\[1\.0, 1\.5\]"),
        ({"operator": ProductSum(), "ranks": [4, 2]}, r"ranks=\[4, 2\]"),
        ({"operator": RBLA(), "ranks": []}, "list of whole numbers"),
        ({"operator": RBLA(), "ranks": {0: 0}}, "list of whole numbers"),
        ({"operator": RBLA(), "ranks": "8"}, "list of whole numbers"),
        ({"operator": RBLA(), "ranks": [4], "levels": (1.0, 0.5)}, "leave them out"),
        ({"operator": ProductSum(), "upload_ranks": 3}, "LoRAA2"),
        ({"operator": LoRAA2(), "upload_ranks": [0]}, "upload_ranks"),
        ({"operator": LoRAA2(), "upload_ranks": []}, "upload_ranks"),
        ({"operator": ProductSum(), "keep": "head"}, r"keep.*'head'"),
    ],
)
def test_refuses_arguments(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        FedLoRA(**arguments)


@pytest.mark.parametrize(
    ("algorithm", "lowrank", "message"),
    [
        (FedLoRA(FFA()), {"init": "auto", "alpha": None}, "nothing would change"),
        (FedLoRA(ProductSum(), keep=["nose"]), {}, "keep has 'nose'"),
        (FedLoRA(ProductSum()), {"role": "weight", "init": "auto", "alpha": None}, r"LoRA.*'weight'"),
        (FedLoRA(ProductSum()), {"half_frozen": "V"}, "half frozen"),
        (FedLoRA(ProductSum(), adapter="french"), {}, r"FedLoRA.*'french'"),
    ],
)
def test_refuses_modules(tmp_path, algorithm, lowrank, message):
    with pytest.raises(MisconfigurationException, match=message):
        federate(tmp_path, algorithm, lowrank)


@pytest.mark.slow
def test_refuses_kept_moments_of_other_slots(tmp_path):
    with pytest.raises(MisconfigurationException, match="optimizer_state='keep'"):
        federate(tmp_path, FedLoRA(RBLA(), levels=(1.0, 0.5), capacity="dynamic"), optimizer_state="keep")
    federate(tmp_path, FedLoRA(RBLA(), levels=(1.0, 0.5)), optimizer_state="keep")


class Tokens(nn.Module):
    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(3)
        self.table, self.out = nn.Embedding(9, 6, padding_idx=0), nn.Linear(6, 9)
        if tied:
            self.out.weight = self.table.weight

    def forward(self, tokens):
        return self.out(self.table(tokens).mean(dim=1))


def trained_on_tokens(tmp_path, operator, tied=False):
    draws = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(9, (60, 5), generator=draws), torch.randint(9, (60,), generator=draws)
    # Client 0's pair has a smaller rank than the server's, so that decompositions find directions of their own.
    ranks = [1, 4] if operator.mixed_ranks else None
    loop = FederatedLoop(
        FedLoRA(operator, ranks=ranks), clients=2, local_steps=2, participants=[[0], [1], [0, 1]], summary=False
    )
    wire, module = Wire(loop), Module(Tokens(tied), optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    low_rank = LowRank(MatrixProduct(), rank=4, include=["net.table", *(["net.out"] if tied else [])], **LORA)
    data = Data(torch.utils.data.TensorDataset(tokens, labels))
    fit(trainer(tmp_path, low_rank, loop, wire, max_epochs=3, limit_val_batches=0), module, data)
    return module, loop, wire


# Other test files define operators too.
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda kind: kind.__name__)
def test_the_padding_of_an_embedding_stays(tmp_path, operator):
    module, loop, wire = trained_on_tokens(tmp_path, operator())
    assert not module.net.table.weight[0].any()
    models = [loop.server.model, *wire.trained.values(), *loop.server.state.get("pairs", {}).values()]
    assert not any(values["net.table.factors.U"][0].any() for values in models)
    assert all(values["net.table.factors.V"].any() for values in wire.trained.values())


@pytest.mark.parametrize("operator", [SumProduct(), FLoRA()], ids=repr)
def test_a_tied_output_trains_the_row_of_the_padding(tmp_path, operator):
    _, _, wire = trained_on_tokens(tmp_path, operator, tied=True)
    rows = [weights["net.table"][0] for weights in wire.effective]
    assert all((after - before).abs().max() > 1e-3 for before, after in pairwise(rows))
