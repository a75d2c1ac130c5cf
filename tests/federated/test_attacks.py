"""Attackers: what they send is what their papers say, in every execution, and what cannot be attacked is refused."""

from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import TensorDataset

from lightning_lowrank import (
    ALIE,
    EF21P,
    SCAFFOLD,
    CoordinateMedian,
    FedAvg,
    FederatedLoop,
    FromIndices,
    GaussianNoise,
    GradientMask,
    Half,
    HeteroFL,
    InnerProduct,
    Krum,
    LabelFlip,
    MaskAbsentClasses,
    NormBound,
    RandomCoordinates,
    Scaled,
    SignFlip,
    TrimmedMean,
)
from lightning_lowrank.federated.attacks import Attackers, LabelPoison, hidden_deviations
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.stages import Arrival
from lightning_lowrank.federated.state import ClientInfo
from tests.algorithms.written_out import (
    CLIENTS,
    EXECUTIONS,
    ROUNDS,
    SIZES,
    assert_close,
    batches,
    federated,
    initial,
    mean,
    resumed_ends,
    sgd,
)
from tests.grids import nightly_except
from tests.helpers import Data, Module, fit, trainer, weights

CLASSES = 4


def flipped(client):
    return [(inputs, CLASSES - 1 - targets) for inputs, targets in batches(client)]


def by_hand(attackers, forge, poisoned=False):
    """Federated averaging, in which ``forge(own, honest, share)`` is what an attacker sends as its change."""
    values = initial()
    for ids in ROUNDS:
        change = {}
        for client in ids:
            end = sgd(values, flipped(client) if poisoned and client in attackers else batches(client))
            change[client] = {name: end[name] - values[name] for name in values}
        honest = [change[client] for client in ids if client not in attackers]
        seen = honest or [change[client] for client in ids]
        share = sum(SIZES[client] for client in ids if client in attackers) / sum(SIZES[client] for client in ids)
        present = [client for client in ids if client in attackers]
        for client in present:
            change[client] = {
                name: forge(own, torch.stack([each[name] for each in seen]), share, len(ids), len(present))
                for name, own in change[client].items()
            }
        total = mean([change[client] for client in ids], [SIZES[client] for client in ids])
        values = {name: value + total[name] for name, value in values.items()}
    return values


def alie(own, honest, share, arrivals, attackers, z=None):
    z = hidden_deviations(arrivals, attackers) if z is None else z
    return honest.mean(0) - z * ((honest - honest.mean(0)) ** 2).mean(0).sqrt()


ATTACKS = {
    "sign flip": (SignFlip([1], 2.0), lambda own, *_: -2 * own, False),
    "inner product": (InnerProduct([1], 3.0), lambda own, honest, *_: -3 * honest.mean(0), False),
    "ALIE": (ALIE([1, 2], 0.7), partial(alie, z=0.7), False),
    "ALIE by its formula": (ALIE([1]), alie, False),
    "label flip": (LabelFlip([1, 3]), lambda own, *_: own, True),
    "label flip of so many": (LabelFlip([1], classes=CLASSES), lambda own, *_: own, True),
    "scaled": (Scaled([1], 5.0), lambda own, *_: 5 * own, True),
    "model replacement": (Scaled([1, 2]), lambda own, honest, share, *_: own / share, True),
}


@nightly_except(
    "ALIE by its formula-sequential",
    "ALIE-vectorized",
    "label flip of so many-sequential",
    "label flip-vectorized",
    "scaled-sequential",
    "sign flip-vectorized",
)
@pytest.mark.slow
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize(("attack", "forge", "poisoned"), ATTACKS.values(), ids=ATTACKS)
def test_attack_is_what_is_written_out(tmp_path, attack, forge, poisoned, execution):
    ended, loop = federated(tmp_path, FedAvg(), execution, attackers=attack)
    assert_close(ended, by_hand(attack.clients, forge, poisoned), tolerance=1e-7)
    assert loop.coordinator.find(Attackers).members == {*attack.clients}


@pytest.mark.slow
def test_noise_has_its_spread_and_its_own_draws(tmp_path):
    kept = []

    class Kept(GaussianNoise):
        def forge(self, attempt):
            kept.append(super().forge(attempt))
            return kept[-1]

    rounds = [[0, 1, 2], [0, 1, 2]]
    attack = Kept([1, 2], 0.5)
    ends = [federated(tmp_path, FedAvg(), each, rounds=rounds, attackers=attack) for each in EXECUTIONS]
    assert_close(ends[0][0], ends[1][0], tolerance=1e-7)
    half = len(kept) // 2
    assert all(torch.equal(*pair) for pair in zip(kept[:half], kept[half:], strict=True))
    drawn = torch.cat([each.flatten() for each in kept[:half]])
    assert len(drawn.unique()) == len(drawn) > 1500
    assert drawn.mean().abs() < 0.05
    assert drawn.std().item() == pytest.approx(0.5, rel=0.1)


@pytest.mark.slow
def test_a_robust_rule_takes_away_what_attackers_do(tmp_path):
    rounds = [[0, 1, 2, 3]] * 2
    honest, _ = federated(tmp_path, FedAvg(), rounds=rounds)
    attacks = {"attackers": InnerProduct([3], 50.0), "rounds": rounds}
    plain, _ = federated(tmp_path, FedAvg(), **attacks)
    robust, _ = federated(tmp_path, FedAvg(), aggregator=TrimmedMean(1), **attacks)

    def distance(ended):
        return sum(float((ended[name] - honest[name]).square().sum()) for name in honest) ** 0.5

    assert distance(robust) < distance(plain) / 5


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.nightly
def test_a_round_is_resumed_with_what_is_held_back(tmp_path, execution):
    resumed_ends(tmp_path, FedAvg, execution, aggregator=NormBound(), attackers=ALIE([1], 1.0), uplink=[Half()])


@pytest.mark.slow
def test_rules_see_changes_of_what_clients_started_from(tmp_path):
    # Far from zero a bound on values would be another.
    bound = NormBound(0.01)
    values, _ = federated(tmp_path, FedAvg(), aggregator=bound, rounds=[[0, 1]])
    moved = torch.cat([(value - initial()[name]).flatten() for name, value in values.items()]).norm()
    assert 0.001 < moved <= 0.01
    # EF21P sends changes, which have no origin.
    unbound, _ = federated(tmp_path, EF21P(0.5, 0.5), aggregator=NormBound(1e6), rounds=[[0, 1]])
    plain, _ = federated(tmp_path, EF21P(0.5, 0.5), rounds=[[0, 1]])
    assert_close(unbound, plain)


@pytest.mark.parametrize(
    ("clients", "count", "expected"),
    [(3, 10, 3), (0.2, 20, 4), (0.01, 20, 1), ([4, 1], 5, (1, 4)), (1.0, 3, (0, 1, 2))],
)
def test_who_attacks(clients, count, expected):
    found = SignFlip(clients).members([1] * count, seed=1)
    assert found == expected if isinstance(expected, tuple) else len(set(found)) == expected
    assert found == LabelFlip(clients).members([1] * count, seed=1) == tuple(sorted(found))


def test_other_seeds_draw_other_attackers():
    assert len({SignFlip(0.2).members([1] * 20, seed) for seed in range(5)}) > 1


def test_clients_without_samples_are_not_drawn():
    sizes = [0, 3, 0, 5, 1, 0]
    assert SignFlip(3).members(sizes, 0) == SignFlip(1.0).members(sizes, 1) == (1, 3, 4)
    assert SignFlip([0, 1]).members(sizes, 0) == (0, 1)
    with pytest.raises(MisconfigurationException, match=r"4.*attackers.*3"):
        SignFlip(4).members(sizes, 0)


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        (np.int64(1), 1),
        (np.float32(0.5), 0.5),
        (np.array([0, 2]), [0, 2]),
        (torch.tensor([2, 0]), [2, 0]),
        ({1}, [1]),
        (range(2), [0, 1]),
    ],
)
def test_numbers_and_ids_of_other_types(given, ids):
    assert SignFlip(given).clients == ids
    assert SignFlip(given).members([1] * 4, 0) == SignFlip(ids).members([1] * 4, 0)


@pytest.mark.parametrize("given", [True, "12", {0: 1}, [0, 0], [], [0.5], None])
def test_what_names_no_clients_is_refused(given):
    with pytest.raises(MisconfigurationException, match="clients must be"):
        SignFlip(given)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SignFlip(0), "clients must be at least 1"),
        (lambda: SignFlip(1.5), "clients must be above 0 and at most 1"),
        (lambda: SignFlip([]), "clients must be a number or share of clients, or a list"),
        (lambda: SignFlip([1, 1]), r"\[1, 1\]"),
        (lambda: SignFlip(scale=0), r"scale.*0"),
        (lambda: GaussianNoise(std=-1), r"std.*-1"),
        (lambda: ALIE(deviations=0), r"deviations.*0"),
        (lambda: LabelFlip(classes=1), r"classes.*1"),
        (lambda: SignFlip([7]).members([1] * 5, 0), r"SignFlip.*\[7\].*0"),
        (lambda: SignFlip(6).members([1] * 5, 0), r"6.*attackers.*5"),
        (lambda: FederatedLoop(FedAvg(), clients=4, attackers="flip"), r"attackers.*'flip'"),
    ],
)
def test_arguments_are_checked(make, message):
    with pytest.raises(MisconfigurationException, match=message):
        make()


@pytest.mark.parametrize("attack", [SignFlip([1]), GaussianNoise([1]), InnerProduct([1]), ALIE([1]), Scaled([1])])
def test_an_attack_keeps_infinite_numbers(attack):
    mask, filled = torch.tensor([1.0, -torch.inf, -torch.inf]), torch.tensor([2.0, 0.0, -torch.inf])
    sent = [mask, filled, mask + 1]
    arrivals = [Arrival(ClientInfo(id, 4, 0, 0), Message({"mask": each}), 1.0, dict) for id, each in enumerate(sent)]
    forged = attack.forge_all(arrivals, [1], [{"mask": mask}] * 3, 0)[1].message.tensors["mask"]
    assert torch.equal(forged[1:], filled[1:])
    assert forged[0].isfinite()
    assert forged[0] != filled[0]


def test_an_attack_that_overflows_is_finite(tmp_path):
    ended, _ = federated(tmp_path, FedAvg(), attackers=SignFlip([1], 1e308), aggregator=Krum(0), rounds=[[0, 1, 2]])
    assert all(value.isfinite().all() for value in ended.values())


# Labels


def test_labels_are_replaced_in_every_form_of_batch():
    poison = LabelPoison(LabelFlip(), torch.tensor([1, 3]), size=5, classes=3)
    labels, rows = torch.tensor([0, 2, 1]), torch.tensor([1, 2, 3]).numpy()
    expected = [2, 2, 1]
    inputs = torch.zeros(3, 2)
    assert poison([inputs, labels], rows)[1].tolist() == expected
    assert poison((inputs, labels, 5), rows)[1].tolist() == expected
    assert poison({"x": inputs, "label": labels}, rows)["label"].tolist() == expected
    assert labels.tolist() == [0, 2, 1]
    honest = [inputs, labels]
    assert poison(honest, torch.tensor([0, 2, 4]).numpy()) is honest
    for batch in (inputs, [inputs, labels.float()], {"x": inputs}, [inputs, torch.tensor(1)]):
        with pytest.raises(MisconfigurationException, match="LabelFlip"):
            poison(batch, rows)
    with pytest.raises(MisconfigurationException, match=r"LabelFlip.*0.*7"):
        poison([inputs, torch.tensor([7, 0, 0])], rows)


def test_methods_and_objectives_see_flipped_labels(tmp_path):
    attack = LabelFlip([0], classes=CLASSES)
    objective = MaskAbsentClasses("net", CLASSES)
    targets = torch.arange(24) % 2
    data = TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(0)), targets)
    loop = FederatedLoop(
        FedAvg(),
        partition=FromIndices([range(12), range(12, 24)]),
        attackers=attack,
        objective=objective,
        on_client_error="raise",
        personal_test="matched_labels",
        summary=False,
    )
    module = Module()
    fit(trainer(tmp_path, loop, max_epochs=1), module, Data(data))
    assert {*loop.coordinator.context(0, {}).labels.tolist()} == {2, 3}
    assert {*loop.coordinator.context(1, {}).labels.tolist()} == {0, 1}
    assert all(value.isfinite().all() for value in weights(module).values())


def test_attackers_know_the_labels_that_the_users_function_finds(tmp_path):
    targets = torch.arange(24) % 3
    # Of the last tensor nobody would say that it has the labels.
    data = TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(0)), targets, torch.rand(24))

    class Weighted(Module):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[:2], batch_idx)

    def run(**arguments):
        loop = FederatedLoop(FedAvg(), clients=2, attackers=LabelFlip([0]), summary=False, **arguments)
        fit(trainer(tmp_path, loop, max_epochs=1, limit_val_batches=0), Weighted(), Data(data))
        return loop

    # Three classes: c becomes 2 - c.
    loop = run(labels=lambda dataset: dataset.tensors[1])
    flipped = 2 - targets[loop.indices[0]]
    assert torch.equal(loop.data.labels_of(0), flipped)
    with pytest.raises(MisconfigurationException, match="LabelFlip"):
        run()


def test_unlabelled_data_are_refused(tmp_path):
    class Reconstructs(Module):
        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).square().mean()

    data = TensorDataset(torch.randn(12, 6))
    loop = FederatedLoop(FedAvg(), clients=2, attackers=LabelFlip(1), summary=False)
    with pytest.raises(MisconfigurationException, match="LabelFlip"):
        fit(trainer(tmp_path, loop, limit_val_batches=0), Reconstructs(), Data(data))


# What does not go together


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (SCAFFOLD, r"SCAFFOLD.*aggregator=CoordinateMedian\(\)"),
        (partial(GradientMask, 0.5), r"GradientMask.*aggregator=CoordinateMedian\(\)"),
        (partial(RandomCoordinates, 0.5, 0.5), r"RandomCoordinates.*aggregator=CoordinateMedian\(\).*numbers"),
        (partial(HeteroFL, [1.0]), r"HeteroFL.*aggregator=CoordinateMedian\(\).*numbers"),
    ],
)
def test_methods_whose_messages_a_rule_does_not_see_are_refused(tmp_path, method, message):
    with pytest.raises(MisconfigurationException, match=message):
        federated(tmp_path, method(), aggregator=CoordinateMedian())


def test_cohorts_that_are_too_small_are_refused_before_the_first_step(tmp_path):
    steps = []

    class Counted(Module):
        def training_step(self, *arguments):
            steps.append(0)
            return super().training_step(*arguments)

    with pytest.raises(MisconfigurationException, match=r"byzantine=1.*there.*2"):
        federated(tmp_path, FedAvg(), aggregator=Krum(1), make_module=Counted)
    assert not steps


def test_a_cohort_that_shrinks_too_far_is_refused(tmp_path):
    class Fails(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * torch.nan if len(batch[1]) == 6 else loss

    settings = {"rounds": [[1, 2, 3]], "make_module": Fails}
    with pytest.raises(MisconfigurationException, match=r"byzantine=1.*there.*2"):
        federated(tmp_path, FedAvg(), aggregator=TrimmedMean(1), **settings)
    # A share of two is none.
    _, loop = federated(tmp_path, FedAvg(), aggregator=TrimmedMean(0.34), **settings)
    assert list(loop.coordinator.answers.failed) == [3]


@pytest.mark.slow
def test_batch_statistics_are_aggregated_too(tmp_path):
    settings = {"norm": nn.BatchNorm1d, "attackers": SignFlip([2]), "aggregator": CoordinateMedian()}
    ends = [federated(tmp_path, FedAvg(), execution, rounds=[[0, 1, 2]], **settings)[0] for execution in EXECUTIONS]
    assert_close(*ends, tolerance=1e-7)
    assert len(CLIENTS) == 4
