import math
import re

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank import arguments, configuration


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        (-1, {"least": 0}, "x must be at least 0 and finite, but is -1."),
        (0, {"above": 0}, "x must be above 0 and finite, but is 0."),
        (1.0, {"least": 0, "below": 1}, "x must be at least 0 and below 1, but is 1.0."),
        (1.5, {"above": 0, "most": 1}, "x must be above 0 and at most 1, but is 1.5."),
        (math.inf, {}, "x must be finite, but is inf."),
        (math.nan, {"least": 0, "most": 1}, "x must be at least 0 and at most 1, but is nan."),
        (
            0,
            {"above": 0, "hint": "None for infinity"},
            "x must be above 0 and finite, but is 0; use None for infinity.",
        ),
    ],
)
def test_numbers_out_of_bounds(value, bounds, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        arguments.check_number("x", value, **bounds)
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
        configuration.check_number("x", value, **bounds)


def test_bounds_are_inclusive_where_they_say_so():
    arguments.check_number("x", 0, least=0, below=1)
    arguments.check_number("x", 1, above=0, most=1)
    arguments.check_number("x", -5.0)
    arguments.check_integer("x", 0, least=0)
    arguments.check_integer("x", -3, least=None)


@pytest.mark.parametrize("value", [True, "1", None, 1j])
def test_what_is_no_number(value):
    with pytest.raises(TypeError, match="x must be a number, but is "):
        arguments.check_number("x", value)
    with pytest.raises(TypeError, match="x must be an integer, but is "):
        arguments.check_integer("x", value)
    with pytest.raises(MisconfigurationException, match="x must be an integer, but is "):
        configuration.check_integer("x", value)
