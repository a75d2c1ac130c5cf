"""What every federated method must keep, whatever it does inside a round: `check_algorithm`.

A method takes part by its entry in ``tests/algorithms/methods.py``.
"""

import itertools
from dataclasses import replace
from functools import partial

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank import FederatedLoop, FromIndices, algorithms
from lightning_lowrank.federated import Algorithm
from lightning_lowrank.testing import PARTS, check_algorithm
from tests.algorithms.methods import ARCHETYPES, FORMS, LOW_RANK, METHODS, each_method
from tests.helpers import Data, Module, fit, trainer, warmed_up


class ContractModule(Module):
    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        # Without logging, which would take a fifth of the time.
        return self.loss(batch)


def module(method, norm):
    if method.norm is None and norm is not nn.BatchNorm1d:
        norm = None
    return ContractModule(method.network(norm=norm), optimizer=method.optimizer)


# With weights of rank 2 alone and a client of one sample, these get to 0.57 and 0.6 in the rounds below.
SLOW_LEARNERS = {"FedAdam", "FedYogi", "SCAFFOLD"}


def expected(name, form):
    """What is expected of a method; weights of rank 2 alone take longer to learn."""
    found = METHODS[name].expected
    if form != "weight":
        return found
    rounds = 3 * found.learning.get("rounds", 8)
    accuracy = 0.5 if name in SLOW_LEARNERS else found.accuracy
    return replace(found, accuracy=accuracy, learning={"local_epochs": 4, **found.learning, "rounds": rounds})


def check(name, form, parts=None, **settings):
    method = METHODS[name]
    check_algorithm(
        method.make,
        expected(name, form),
        module=partial(module, method),
        lowrank=LOW_RANK[form],
        settings={**method.settings, **settings},
        parts=parts,
    )


DAILY = ("FedAvg", "FedHM", "FedLoRA-ProductSum", "FedMUD", "SCAFFOLD")
# The others take as long as all of these.
DAILY_PARTS = [part for part in PARTS if part not in ("learns", "seed", "resume")]
# What a form of layers changes is the loop's and the layers', not a method's.
EVERY_FORM = ("FedAvg", "FedMUD", "SCAFFOLD")


def cases():
    """Return each method with each form, and the parts of the contract by how often they are tried."""
    found = []
    for name, form in itertools.product(METHODS, LOW_RANK):
        if form not in METHODS[name].forms:
            continue
        # Operators have a contract of their own.
        first = form == METHODS[name].forms[0] and (not name.startswith("FedLoRA-") or name in ARCHETYPES)
        daily = DAILY_PARTS if first and name in DAILY else []
        if daily:
            found.append(pytest.param(name, form, daily, id=f"{name}-{form}-daily"))
        others = [part for part in PARTS if part not in daily]
        if (first and name not in {*ARCHETYPES, *DAILY}) or (not first and name in EVERY_FORM):
            # To learn takes as long as half of the other parts.
            others.remove("learns")
            found.append(pytest.param(name, form, ["learns"], id=f"{name}-{form}-learns", marks=pytest.mark.nightly))
        mark = pytest.mark.slow if first or name in EVERY_FORM else pytest.mark.nightly
        found.append(pytest.param(name, form, others, id=f"{name}-{form}", marks=mark))
    return found


@pytest.mark.parametrize(("name", "form", "parts"), cases())
def test_keeps_the_contract(name, form, parts):
    check(name, form, parts)


def unsuitable():
    """Return each method's unsuitable forms, all but one of them for the night."""
    found = []
    for number, (name, method) in enumerate(METHODS.items()):
        forms = [form for form in FORMS if form not in method.forms]
        for place, form in enumerate(forms):
            marks = () if place == number % len(forms) else pytest.mark.nightly
            found.append(pytest.param(name, form, id=f"{name}-{form}", marks=marks))
    return found


@pytest.mark.parametrize(("name", "form"), unsuitable())
def test_refuses_the_forms_that_do_not_suit_it(tmp_path, name, form):
    method = METHODS[name]
    low_rank = [] if LOW_RANK[form] is None else [LOW_RANK[form]()]
    loop = FederatedLoop(method.make(), partition=FromIndices([range(103)]), summary=False, **method.settings)
    with pytest.raises(MisconfigurationException, match=method.refusal):
        fit(trainer(tmp_path, *low_rank, loop), Module(method.network(), optimizer=method.optimizer), Data())


def test_every_method_takes_part():
    exported = {getattr(algorithms, name) for name in algorithms.__all__}
    taking_part = {type(method.make()) for method in METHODS.values()}
    assert exported == taking_part
    assert all(issubclass(method, Algorithm) for method in exported)


@each_method("SCAFFOLD", "FedNova")
def test_unused_parameters_and_a_warm_up_from_zero_leave_the_model_finite(tmp_path, name):
    method = METHODS[name]
    low_rank = LOW_RANK[method.forms[0]]
    callbacks = [] if low_rank is None else [low_rank()]
    settings = {"optimizer": method.optimizer, "net": method.network()}
    end, loop = warmed_up(tmp_path, method.make(), "auto", *callbacks, **settings)
    assert all(value.isfinite().all() for value in end.values())
    assert all(value.isfinite().all() for value in loop.server.model.values())
