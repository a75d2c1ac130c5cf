"""registered: classes found again by their names."""

from abc import ABC, abstractmethod

from lightning_lowrank.registry import subclasses_by_name


def test_concrete_subclasses_at_any_depth_are_found_and_the_last_of_a_name_counts():
    class Base(ABC):
        @abstractmethod
        def work(self): ...

    class Middle(Base): ...

    class Leaf(Middle):
        def work(self): ...

    assert subclasses_by_name(Base) == {"Leaf": Leaf}
    first = Leaf

    class Leaf(Middle):
        def work(self): ...

    assert subclasses_by_name(Base) == {"Leaf": Leaf}
    assert subclasses_by_name(Base)["Leaf"] is not first
    assert subclasses_by_name(Leaf) == {}
