"""Detection and removal of values that mapped steps leave in a module that all clients, or all samples, share.

A value there would be one for all clients, and a tensor inside `torch.func.vmap` means nothing outside. `ClientStack`
has it refused, and `SampleGradients` cleans the module after a step that cannot be mapped.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_lowrank.federated.execution.why_not import CannotMap, metric_update_reason
from lightning_lowrank.federated.leaks import as_code, plain_entries, reachable
from lightning_lowrank.internals.replaced import replaced
from lightning_lowrank.internals.torch import TorchDispatchMode, is_transformed, own_buffers, writes

_SIMPLE = (Tensor, str, int, float, type(None))
_TABLES = ("_modules", "_parameters", "_buffers")
WATCHED_STEPS = 2
"""A number that a step stores once, such as a size, changes in the first one at most."""
_WATCHED_CHUNKS = 2


class MappedTensors:
    """Removes the tensors that a failed mapped step left in a module's buffers; they could be neither moved nor read.

    Args:
        module: The module, before the step.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers = [(table, dict(table)) for table in map(own_buffers, module.modules())]

    def remove(self) -> None:
        """Restore buffers that mapped tensors replaced, and reset metrics with mapped tensors in their state."""
        for table, before in self._buffers:
            left = (key for key, value in table.items() if _is_of_map(value) or isinstance(value, _Placeholder))
            table.update({key: before[key] for key in left if key in before})
        for part in self._module.modules():
            if isinstance(part, Metric) and any(_is_of_map(each) for _, each in _inside("", vars(part))):
                part.reset()


def _is_of_map(value: Any) -> bool:
    """Whether a value is a tensor inside `torch.func.vmap`, such as those of clients or samples in one step."""
    return isinstance(value, Tensor) and is_transformed(value)


class MappedStepGuard:
    """Refuses changes that clients' first common steps make to the shared module.

    Refused are updates of metrics, values of clients in lists and sets, assigned buffers outside of the state dict, and
    numbers that each step changes. A client's value in an attribute is refused when it is read after the step.

    Args:
        module: The user's module, before the first step.
        silent: Whether nothing is said of batches that differ.
        chosen: Whether ``execution='auto'`` chose that clients step together.

    Attributes:
        mapped: Whether steps can be mapped over clients, as far as is known.
        reads_of_each: Whether steps read values that differ between clients and are no tensors.
        warned_of_batches: Whether the user was warned of batches that cannot be stacked.
    """

    def __init__(self, module: nn.Module, silent: bool = False, chosen: bool = False) -> None:
        self.silent, self.mapped, self.warned_of_batches = silent, True, silent
        self.reads_of_each = False
        self._module = module
        self._mapped_steps, self._compared, self._ended = 0, 0, 0
        self._chosen = chosen
        self._left = LeftTensors(module, functools.partial(_refuse_reading, chosen=chosen))
        self._updates = {id(metric): metric.update_count for _, metric in self._metrics()}
        self._numbers: dict[str, Any] = {}

    @property
    def settled(self) -> bool:
        """Whether enough steps have been watched."""
        return self._mapped_steps >= WATCHED_STEPS

    @property
    def left(self) -> list[str]:
        """The names of the attributes in which steps have left clients' values."""
        return self._left.names

    def updated_metric(self) -> str:
        """The name and class of a metric that steps have updated; empty if there is none."""
        updated = [pair for pair in self._metrics() if pair[1].update_count != self._updates.get(id(pair[1]), 0)]
        return "".join(f"{as_code(name)} ({type(metric).__name__})" for name, metric in updated[:1])

    def _metrics(self) -> list[tuple[str, Metric]]:
        return [(name, item) for name, item in reachable("self", self._module) if isinstance(item, Metric)]

    def before_step(self) -> None:
        """Record the module's numbers before a step; the method may have set some for this step."""
        if self._compared < WATCHED_STEPS:
            self._numbers = numbers_of(self._module)

    def after_part(self) -> None:
        """Refuse changes made by the steps of one group of clients, whose batches have one form."""
        if not self.settled:
            self._refuse_changes()
        self._left.replace()

    def after_last_step(self) -> None:
        """Replace all that a chunk's clients have left, also what was first left after the watched steps."""
        if self._ended < _WATCHED_CHUNKS:
            self._ended += 1
            self._left.find_and_replace()
        self._left.replace(of_one=True)

    def after_step(self, mapped: bool = True) -> None:
        """Refuse numbers of the module that change in each step; ``mapped`` says whether the step ran in vmap."""
        if self._compared < WATCHED_STEPS:
            changed = changed_number(self._numbers, numbers_of(self._module))
            if changed and self._compared:
                raise CannotMap(reason_of_number(changed), self._chosen)
            self._compared += 1
        self._mapped_steps += mapped

    def _refuse_changes(self) -> None:
        metric = self.updated_metric()
        if metric:
            raise CannotMap(metric_update_reason(metric), self._chosen)
        for name, item, keys in self._left.find():
            if not isinstance(item, dict):
                raise CannotMap(
                    f"it stores clients' values in {as_code(name)}, where they have no meaning after the step; log"
                    " them, or clear it at the end of the step",
                    self._chosen,
                )
            if name.endswith("._buffers"):
                raise CannotMap(
                    f"it replaces the buffer {as_code(f'{name}.{keys[0]}')}, which is not persistent and"
                    " therefore shared by all clients; register it with persistent=True",
                    self._chosen,
                )


def numbers_of(module: nn.Module) -> dict[str, Any]:
    """The numbers in attributes of a module and of all objects reachable from it, by name."""
    numbers = plain_entries(reachable("self", module), (int, float))
    return {name: value for name, value in numbers if not isinstance(value, bool)}


def changed_number(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The name of a number of the module that a step changed; empty if none changed."""
    return next((as_code(name) for name, value in now.items() if value != before.get(name, value)), "")


def reason_of_number(name: str) -> str:
    """The reason why clients cannot step together, for the name of a number that a step changed."""
    return f"it changes the number {name}, which all clients share, so that it would count their steps together"


def _refuse_reading(name: str, chosen: bool) -> CannotMap:
    return CannotMap(f"{name} is set in a step and read after it, but all clients share it", chosen)


class LeftTensors:
    """Finds the tensors that mapped steps leave in a module, and replaces them by placeholders that refuse to be read.

    Args:
        module: The module.
        refuse: Returns the error for a read, given the name of the attribute.
    """

    def __init__(self, module: nn.Module, refuse: Callable[[str], Exception]) -> None:
        self._module, self._refuse = module, refuse
        self._entries: list[tuple[dict[Any, Any], Any, str]] = []
        self._containers: list[tuple[Any, str]] = []
        self._places: set[str] = set()

    @property
    def names(self) -> list[str]:
        """The names of the attributes and entries in which such tensors were found."""
        return [as_code(name) for _, _, name in self._entries]

    def find(self) -> Iterator[tuple[str, Any, list[Any]]]:
        """Look through the module; yield the name of each container, the container, and the keys of a dictionary.

        Lists and sets may grow with each step. A dictionary's entry, such as an attribute, is found as a whole.
        """
        parts: set[int] = set()
        # Metrics hold totals of an epoch, and are looked at apart.
        for name, item in reachable("self", self._module, lambda item: isinstance(item, Metric)):
            if isinstance(item, (list, set, deque)) and any(self._found(name, each) for each in item):
                yield name, item, []
                if id(item) not in parts:
                    # No dictionary has it, but a class, or a function.
                    self._containers.append((item, name))
            if isinstance(item, dict) and id(item) not in parts:
                found = {key: self._found(f"{name}.{key}", value) for key, value in item.items() if key not in _TABLES}
                keys = [key for key, names in found.items() if names]
                if keys:
                    yield name, item, keys
                self._entries += [(item, key, f"{name}.{key}") for key in keys]
                self._places.update(*found.values())
                # The next step may replace the entry with all that is inside of it.
                parts |= {id(each) for key in keys for _, each in _inside("", item[key])}

    def _found(self, name: str, value: Any) -> list[str]:
        """The names of such tensors in a value."""
        if isinstance(value, _SIMPLE):
            return [name] if _is_of_map(value) else []
        if isinstance(value, (dict, set)) and not value:
            # As most tables of hooks are.
            return []
        return [place for place, each in _inside(name, value) if _is_of_map(each)]

    def find_and_replace(self) -> None:
        """Look through the module, and put placeholders into what was found now or before."""
        deque(self.find(), maxlen=0)
        self.replace()

    def replace(self, of_one: bool = False) -> None:
        """Put placeholders into the entries that `find` has found.

        Args:
            of_one: Also for other tensors in the places where such tensors were found.
        """
        for table, key, name in self._entries:
            if key in table:
                make = functools.partial(_placeholder, as_code(name), self._refuse)
                table[key] = self._replaced(name, table[key], make, self._places if of_one else set())
        for item, name in self._containers:
            self._replaced(name, item, functools.partial(_placeholder, as_code(name), self._refuse), ())

    def _replaced(self, name: str, value: Any, make: Callable[[], Tensor], places: Collection[str]) -> Any:
        """The value with placeholders in it; containers except for tuples are changed in place."""
        value = self._rebuilt(name, value, make, places)
        for place, item in [] if isinstance(value, _SIMPLE) else list(_inside(name, value)):
            pairs: Iterable[tuple[Any, Any]] = ()
            if isinstance(item, dict):
                pairs = list(item.items())
            elif isinstance(item, (list, deque)):
                pairs = enumerate(item)
            elif isinstance(item, set) and any(map(_is_of_map, item)):
                left = set(filter(_is_of_map, item))
                item -= left
                item |= {make() for _ in left}
            for key, each in pairs:
                changed = self._rebuilt(f"{place}.{key}", each, make, places)
                if changed is not each:
                    item[key] = changed
        return value

    def _rebuilt(self, name: str, value: Any, make: Callable[[], Tensor], places: Collection[str]) -> Any:
        """A placeholder for a tensor, a tuple with placeholders, or the value itself."""
        if isinstance(value, Tensor):
            is_left = _is_of_map(value) or (name in places and not isinstance(value, (_Placeholder, nn.Parameter)))
            return make() if is_left else value
        if not isinstance(value, tuple):
            return value
        entries = [self._rebuilt(f"{name}.{place}", each, make, places) for place, each in enumerate(value)]
        if all(one is other for one, other in zip(entries, value, strict=True)):
            return value
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A value and all that it holds, with names, except for modules."""
    return reachable(name, value, lambda item: isinstance(item, nn.Module))


class _Placeholder(Tensor):
    """A placeholder for a tensor that a step left in an attribute; any use raises an error."""

    error: functools.partial[Exception]
    # `Isolation` asks each tensor for it.
    grad_fn = None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<no value of {self.error.args[0]}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse = functools.partial(self.error.func, **self.error.keywords)
        return _placeholder, (*self.error.args, refuse)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        read = next(item for _, item in _inside("", (arguments, keywords)) if isinstance(item, _Placeholder))
        raise read.error()


def _placeholder(name: str, refuse: Callable[[str], Exception]) -> Tensor:
    tensor = torch.empty(0).as_subclass(_Placeholder)
    tensor.error = functools.partial(refuse, name)
    return tensor


@contextmanager
def refuse_writes(
    listener: pl.LightningModule | pl.Callback,
    hook: str,
    tensors: Callable[[], Mapping[str, Tensor]],
    refuse: Callable[[str], Exception],
) -> Iterator[None]:
    """A context that refuses writes by a hook to tensors of the module.

    Args:
        listener: The hook's module or callback.
        hook: The hook's name.
        tensors: Returns the module's tensors, by name.
        refuse: Returns the error for a write, given the name of the tensor.
    """
    original = getattr(listener, hook)

    @functools.wraps(original)
    def guarded(*arguments: Any, **keywords: Any) -> Any:
        before = _storages(tensors())
        with _Writes() as noted:
            result = original(*arguments, **keywords)
        changed = [before[storage] for storage in noted.storages if storage in before]
        changed += [name for storage, name in _storages(tensors()).items() if storage not in before]
        if changed:
            raise refuse(changed[0])
        return result

    with replaced(listener, **{hook: guarded}):
        yield


def _storages(tensors: Mapping[str, Tensor]) -> dict[int, str]:
    """The names of tensors, by storage."""
    return {storage: name for name, value in tensors.items() if (storage := _storage(value))}


def _storage(value: Any) -> int:
    """The address of a tensor's storage; 0 for a tensor without numbers and for other objects."""
    has_one = isinstance(value, Tensor) and value.layout is torch.strided and value.numel() > 0
    return value.untyped_storage().data_ptr() if has_one else 0


class _Writes(TorchDispatchMode):
    """Records the storages that operations write to, even if the values stay equal, as in a new moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[int] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        if writes(function):
            self.storages += map(_storage, arguments[0] if isinstance(arguments[0], (list, tuple)) else arguments[:1])
        return function(*arguments, **(keywords or {}))
