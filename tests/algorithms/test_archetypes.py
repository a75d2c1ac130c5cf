"""Each registered method has an archetype, with which the tests of the loop are run in its place."""

from tests.algorithms.methods import ARCHETYPES, METHODS, hooks

HOOKS = {name: hooks(method.make()) for name, method in METHODS.items()}


def test_each_method_has_an_archetype():
    missing = {
        name: sorted(found)
        for name, found in HOOKS.items()
        if not any(found <= HOOKS[archetype] for archetype in ARCHETYPES)
    }
    assert not missing, "no method of ARCHETYPES overrides all of these hooks: add one that does"


def test_no_archetype_is_another_ones():
    for name in set(ARCHETYPES) - {"FedAvg", "FedMUD"}:
        assert not any(HOOKS[name] <= HOOKS[other] for other in ARCHETYPES if other != name), name
