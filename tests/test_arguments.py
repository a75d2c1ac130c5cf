import copy
import inspect
import math
import re

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank import FedHM, arguments, configuration


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


def test_what_constructors_were_given():
    class Base(arguments.RecordsArguments):
        def __init__(self, kept, renamed=2, **rest):
            self.kept, self._renamed = kept, renamed

    class Own(Base):
        def __init__(self, more, *others):
            super().__init__(more + 1, renamed=7)

    class Plain:
        def __init__(self, x, y=3):
            self.x, self.hidden = x, y

    base = Base(1, z=5)
    assert arguments.recorded_arguments(base) == {"kept": 1, "renamed": 2, "z": 5}
    assert arguments.recorded_arguments(copy.deepcopy(base)) == {"kept": 1, "renamed": 2, "z": 5}
    base.kept = 4
    assert arguments.recorded_arguments(base)["kept"] == 4
    assert arguments.recorded_arguments(Own(1, 8, 9)) == {"more": 1, "others": (8, 9)}
    assert arguments.recorded_arguments(Plain(1)) == {"x": 1}
    recorded = arguments.recorded_arguments(FedHM(levels=[1, 0.5], shares=[2, 1]))
    assert (recorded["levels"], recorded["shares"], recorded["capacity"]) == ((1, 0.5), [2, 1], "fixed")
    with pytest.raises(TypeError, match="unexpected keyword argument 'no'"):
        FedHM(no=1)
    assert list(inspect.signature(FedHM).parameters)[:3] == ["levels", "capacity", "shares"]
