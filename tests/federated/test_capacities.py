import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.federated.capacities import Capacities
from lightning_lowrank.federated.state import ClientInfo


def client(number, round_number=0, seed=0):
    return ClientInfo(number, samples=1, round=round_number, seed=seed)


def test_fixed_levels_keep_the_shares_among_any_first_clients():
    shares = (0.5, 0.0, 2.0, 1.0)
    capacities = Capacities("levels", (1.0, 0.5, 0.25, 0.125), "fixed", shares)
    drawn = [capacities.level(client(number, round_number=number)) for number in range(70)]
    for count in range(1, 71):
        for level, share in zip(capacities.levels, shares, strict=True):
            assert abs(drawn[:count].count(level) - count * share / sum(shares)) < 1
    assert [capacities.fixed_level(client) for client in range(70)] == drawn
    assert Capacities("levels", (1.0, 0.5), "fixed").fixed_level(3) == 0.5
    equal = Capacities("levels", (1.0, 0.5, 0.25), "fixed")
    assert [equal.fixed_level(client) for client in range(300)] == [1.0, 0.5, 0.25] * 100


@pytest.mark.slow
def test_dynamic_levels_are_drawn_for_each_round_and_client():
    capacities = Capacities("levels", (1.0, 0.5, 0.25), "dynamic", (1, 0, 3))
    draws = torch.tensor(
        [[capacities.level(client(number, round_number)) for number in range(40)] for round_number in range(50)]
    )
    assert not (draws == 0.5).any()
    assert abs((draws == 1.0).double().mean() - 0.25) < 0.03
    for whole in (draws, draws.T):
        assert (whole == 1.0).any(0).all()
        assert (whole == 0.25).any(0).all()
    again = [capacities.level(client(number, 7)) for number in range(40)]
    assert again == draws[7].tolist()
    assert again != [capacities.level(client(number, 7, seed=1)) for number in range(40)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"levels": ()}, "levels must be different numbers"),
        ({"levels": (0.5, 0.5)}, "levels must be different numbers"),
        ({"capacity": "random"}, r"capacity.*'random'"),
        ({"shares": (1, 1, 1)}, r"shares.*2"),
        ({"shares": (1, -1)}, r"shares.*2"),
        ({"shares": (0, 0)}, r"shares.*2"),
        ({"shares": (1, float("inf"))}, r"shares.*2"),
        ({"shares": (1, float("nan"))}, r"shares.*2"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        Capacities(**{"name": "levels", "levels": (1.0, 0.5), "capacity": "fixed", **arguments})
