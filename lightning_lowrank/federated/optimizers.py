"""The optimizers' states from client to client: fresh ones, or those that each client keeps.

Executions call `begin` and `keep` around a client's steps, and around those of clients that step together, whose
states are stacked as their parameters are.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_lowrank.federated.objects import walk
from lightning_lowrank.federated.offload import flatten_state
from lightning_lowrank.federated.state import State
from lightning_lowrank.optim import ProjectedAdamW, ProjectedSGD
from lightning_lowrank.optim.deferred import CHANGE

_CURRENT_IN = "moments.current"
_SHARED = ("step", "mu_product")
_OF_EVERY_OPTIMIZER = vars(Optimizer([nn.Parameter(torch.empty(0))], {})).keys() | {"step", "_opt_called"}
"""What torch and its schedulers keep on each optimizer."""
_SCHEDULED = ("lr", "initial_lr", "momentum", "betas", "weight_decay")
_ELEMENTWISE: list[type[Optimizer]] = [
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    ProjectedSGD,
    ProjectedAdamW,
]


def register_elementwise(kind: type[Optimizer]) -> type[Optimizer]:
    """Declare that an optimizer acts on each number alone, so that clients may step together with it.

    Its state must consist of tensors shaped as their parameter, of scalar tensors named ``step``, and of plain Python.
    Subclasses count as well, as do those of torch's own elementwise optimizers, but for those with a ``step`` of their
    own.

    Args:
        kind: The class of the optimizer.

    Returns:
        The class, so that this serves as a decorator.

    Raises:
        TypeError: If it is no class of optimizers.

    Example:
        >>> @register_elementwise
        ... class SignSGD(torch.optim.Optimizer):
        ...     @torch.no_grad()
        ...     def step(self, closure=None):
        ...         loss = None if closure is None else closure()
        ...         for group in self.param_groups:
        ...             for parameter in group["params"]:
        ...                 parameter.sub_(group["lr"] * parameter.grad.sign())
        ...         return loss
        >>> acts_elementwise(SignSGD([torch.nn.Parameter(torch.zeros(2))], {"lr": 0.1}))
        True
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(f"kind must be a class of torch.optim.Optimizer, got {kind!r}")
    _ELEMENTWISE.append(kind)
    return kind


def acts_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to act on each number alone."""
    step = inspect.unwrap(type(optimizer).step)
    return any(isinstance(optimizer, kind) and step is inspect.unwrap(kind.step) for kind in _ELEMENTWISE)


def counters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return what an optimizer's steps may change in its groups, as those of schedule-free ones and of Prodigy do.

    It is all but the options that schedules set. Steps of torch's own optimizers change none.
    """
    groups: list[dict[str, Any]] = [{} for _ in optimizer.param_groups]
    if not acts_elementwise(optimizer):
        for counted, group in zip(groups, optimizer.param_groups, strict=True):
            counted.update({name: group[name] for name in group if name != "params" and name not in _SCHEDULED})
    return groups


def is_shared(name: str, value: Any) -> bool:
    """Return whether an entry of a parameter's state is one for all clients that step together."""
    return name in _SHARED or not isinstance(value, Tensor)


def fresh_state(optimizer: Optimizer) -> defaultdict[Tensor, Any]:
    """Return the state in which an optimizer starts; Adagrad's is not empty."""
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    if isinstance(optimizer, torch.optim.Adagrad):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                start = torch.full_like(parameter, group["initial_accumulator_value"], requires_grad=False)
                state[parameter] = {"step": torch.tensor(0.0), "sum": start}
    return state


class Starts:
    """What optimizers hold as `configure_optimizers` made them, beside their groups, for each client to begin with.

    It is their state, and attributes such as counters, slow weights or an optimizer inside. Modules are shared, and
    generators of random numbers go on.

    Args:
        optimizers: The trainer's optimizers, before a step.
        keeps: Whether each client keeps what it ends with.

    Raises:
        MisconfigurationException: If an attribute cannot be copied, or not be kept.
    """

    def __init__(self, optimizers: Sequence[Optimizer], keeps: bool) -> None:
        self._optimizers = optimizers
        # Those of this package hold nothing of a client's.
        self._names = [
            set()
            if isinstance(optimizer, (ProjectedSGD, ProjectedAdamW))
            else vars(optimizer).keys() - _OF_EVERY_OPTIMIZER
            for optimizer in optimizers
        ]
        for optimizer, names in zip(optimizers, self._names, strict=True):
            for name in sorted(names):
                self._check(optimizer, name, keeps)
        self._states = [self._copied(optimizer, dict(optimizer.state)) for optimizer in optimizers]
        self._attributes = self.attributes()

    def _check(self, optimizer: Optimizer, name: str, keeps: bool) -> None:
        value = vars(optimizer)[name]
        where = f"{type(optimizer).__name__}.{name}"
        try:
            self._copied(optimizer, value)
            if keeps:
                flatten_state(value)
        except (TypeError, RuntimeError, ValueError, AttributeError, NotImplementedError) as error:
            what = "each client begins with a copy of what the optimizer holds"
            if keeps:
                what = (
                    "with optimizer_state='keep' each client keeps what the optimizer holds, tensors and plain Python"
                )
            raise MisconfigurationException(
                f"{what}, and {where} is {value!r}: {error} Keep it in the optimizer's state or param_groups."
            ) from error

    def _copied(self, optimizer: Optimizer, value: Any) -> Any:
        """Return a copy that holds the same parameters, groups and generators."""
        same = [optimizer, optimizer.param_groups, *optimizer.param_groups, *_parameters_of(optimizer)]
        lasting = (torch.Generator, nn.Module)
        held = [
            item for _, item in walk("", value, lambda kind: False, is_whole=lambda item: isinstance(item, lasting))
        ]
        same += [item for item in held if isinstance(item, lasting)]
        memo: dict[int, Any] = {id(item): item for item in same}
        # What torch copies of an optimizer is its state and groups alone.
        inside = [item for item in held if isinstance(item, Optimizer) and item is not optimizer]
        memo |= {id(item): type(item).__new__(type(item)) for item in inside}
        for item in inside:
            vars(memo[id(item)]).update(copy.deepcopy(vars(item), memo))
        return copy.deepcopy(value, memo)

    def attributes(self) -> list[dict[str, Any]]:
        """Return copies of the optimizers' own attributes."""
        return [
            self._copied(optimizer, {name: vars(optimizer)[name] for name in names if name in vars(optimizer)})
            for optimizer, names in zip(self._optimizers, self._names, strict=True)
        ]

    def begin(self) -> None:
        """Give the optimizers back what they held."""
        self.give(self._attributes)
        for optimizer, state in zip(self._optimizers, self._states, strict=True):
            if state:
                optimizer.state.update(self._copied(optimizer, state))

    def give(self, attributes: Sequence[Mapping[str, Any]]) -> None:
        """Give the optimizers copies of attributes."""
        for optimizer, names, own in zip(self._optimizers, self._names, attributes, strict=True):
            if names:
                # Its groups may be those of an optimizer inside.
                copied = self._copied(optimizer, dict(own))
                for name in vars(optimizer).keys() - _OF_EVERY_OPTIMIZER - copied.keys():
                    del vars(optimizer)[name]
                vars(optimizer).update(copied)

    def state_dict(self) -> list[dict[str, Any]] | None:
        """Return the optimizers' own attributes, or ``None`` where there are others than tensors and plain Python."""
        found = self.attributes()
        try:
            flatten_state(found)
        except TypeError:
            return None
        return found

    def load_state_dict(self, state: list[dict[str, Any]] | None) -> None:
        """Give the optimizers what `state_dict` returned.

        Raises:
            MisconfigurationException: If it returned ``None``.
        """
        if state is None:
            raise MisconfigurationException(
                "the checkpoint was saved inside a client's steps, and does not have what"
                f" {' and '.join(type(each).__name__ for each in self._optimizers)} holds beside tensors and plain"
                " Python: resume from one that was saved between clients."
            )
        self.give(state)


class KeptMoments:
    """Which moments of those that clients keep are still of the parameters' present meaning.

    Moments of factors, or in a subspace, that the method has drawn anew since (`Algorithm.drawn_in`) are forgotten.

    Args:
        module: The module.
        optimizers: Its optimizers, with the module's own parameters.
        drawn_in: The method's.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer], drawn_in: Callable[[str, int], int]) -> None:
        self._drawn_in = drawn_in
        names: dict[Tensor, list[str]] = defaultdict(list)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names[parameter].append(name)
        self._names = {
            number: [names[parameter] for parameter in _parameters_of(optimizer)]
            for number, optimizer in enumerate(optimizers)
        }

    def key(self, state: State, round_number: int) -> tuple[Any, ...]:
        """Return what must be equal for clients whose kept states are stacked: what is kept, and its age."""
        current = self._current(state, round_number)
        shared = tuple(
            (number, index, *((name, float(value)) for name, value in kept.items() if _is_counted(name, value)))
            for number, parameters in current.get("optimizers", {}).items()
            for index, kept in parameters.items()
        )
        return (shared, repr(current.get("subspaces")))

    def forget(self, state: State, round_number: int) -> None:
        """Drop what a client keeps of parameters that have been drawn anew since its last round."""
        state.update(self._current(state, round_number), **{_CURRENT_IN: round_number})

    def _current(self, state: State, round_number: int) -> State:
        last = state.get(_CURRENT_IN, -1)
        gone = {
            number: {
                index
                for index, names in enumerate(each)
                if any(self._drawn_in(name, round_number) > last for name in names)
            }
            for number, each in self._names.items()
        }
        current: State = {}
        if "optimizers" in state:
            current["optimizers"] = {
                number: {index: kept for index, kept in parameters.items() if index not in gone[number]}
                for number, parameters in state["optimizers"].items()
            }
        if "subspaces" in state:
            current["subspaces"] = {
                number: _without(groups, gone[number]) for number, groups in state["subspaces"].items()
            }
        return current


def _is_counted(name: str, value: Any) -> bool:
    return is_shared(name, value) and value is not None


def _without(groups: Sequence[Sequence[Any]], gone: Collection[int]) -> list[tuple[Any, ...]]:
    """Return the subspaces of a projected optimizer's groups, none for the parameters of these numbers."""
    places = itertools.count()
    return [tuple(None if next(places) in gone else entry for entry in group) for group in groups]


def begin(
    optimizers: Sequence[Optimizer], states: Sequence[State], stacked: bool, starts: Starts | None = None
) -> None:
    """Give optimizers the states with which clients start, fresh or as `keep` has put them into the clients' states.

    Clients whose states are ``stacked`` have one `KeptMoments.key`; others begin with what optimizers held at their
    ``starts``.
    """
    for optimizer in optimizers:
        optimizer.state = fresh_state(optimizer)
    if starts is not None:
        starts.begin()
        if "attributes" in states[0]:
            starts.give(states[0]["attributes"])
    for number, optimizer in enumerate(optimizers):
        kept = [state.get("optimizers", {}).get(number, {}) for state in states]
        parameters = _parameters_of(optimizer)
        for index in kept[0]:
            each = [of_client[index] for of_client in kept]
            # Copies, because a client that fails keeps what it had.
            optimizer.state[parameters[index]] = _stack(each) if stacked else _part(each[0])
        for group, counted in zip(optimizer.param_groups, states[0].get("counters", {}).get(number, ()), strict=False):
            group.update(copy.deepcopy(counted))
        # A projected optimizer's groups say in which subspaces the kept moments are.
        subspaces = states[0].get("subspaces", {}).get(number)
        for position, group in enumerate(optimizer.param_groups):
            if "subspaces" in group:
                group["subspaces"] = subspaces[position] if subspaces else (None,) * len(group["params"])


def keep(optimizers: Sequence[Optimizer], state: State, place: int | None = None, starts: Starts | None = None) -> None:
    """Put the optimizer states with which a client ends into what it keeps, given its ``place`` in stacks if any."""
    if starts is not None:
        attributes = starts.attributes()
        if any(attributes):
            state["attributes"] = attributes
    state["optimizers"] = {
        number: {
            # Not the optimizer's own dictionary, whose tensors Lightning moves to the CPU at the end of a fit.
            index: dict(optimizer.state[parameter]) if place is None else _part(optimizer.state[parameter], place)
            for index, parameter in enumerate(_parameters_of(optimizer))
            if parameter.requires_grad and optimizer.state.get(parameter, {CHANGE: None}).keys() != {CHANGE}
        }
        for number, optimizer in enumerate(optimizers)
    }
    counted = {number: counters(optimizer) for number, optimizer in enumerate(optimizers)}
    if any(any(groups) for groups in counted.values()):
        state["counters"] = copy.deepcopy(counted)
    projected = {
        number: [group["subspaces"] for group in optimizer.param_groups]
        for number, optimizer in enumerate(optimizers)
        if "subspaces" in optimizer.param_groups[0]
    }
    if projected:
        state["subspaces"] = projected


def _stack(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return _copied(states[0], lambda name: torch.stack([state[name] for state in states]))


def _part(state: Mapping[str, Any], place: int | None = None) -> dict[str, Any]:
    # Weights of a client that is done have their changes.
    state = {name: value for name, value in state.items() if name != CHANGE}
    return _copied(state, lambda name: (state[name] if place is None else state[name][place]).clone())


def _copied(state: Mapping[str, Any], own: Callable[[str], Tensor]) -> dict[str, Any]:
    """Copy a parameter's state, with what ``own`` returns by name for that which is a client's own."""

    def copied(name: str, value: Any) -> Any:
        if not is_shared(name, value):
            return own(name)
        return value.clone() if isinstance(value, Tensor) else value

    return {name: copied(name, value) for name, value in state.items()}


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class ClientOptions:
    """Gives the trainer's optimizers those options that are one client's own, and takes them back."""

    def __init__(self, trainer: Any, options_of: Callable[[int], Mapping[str, Any]]) -> None:
        self._trainer = trainer
        self._options_of = options_of
        self.common: list[list[dict[str, Any]]] = []
        """The options that a client's own stand in place of, for each optimizer's groups."""

    def key(self, client: int) -> tuple[Any, ...]:
        """Return what must be equal for clients that step together."""
        return tuple(sorted(self._options_of(client).items()))

    def check(self, clients: Iterable[int]) -> None:
        """Refuse an option of some clients that is unknown, or a learning rate that a scheduler changes in steps."""
        groups = [group for optimizer in self._trainer.optimizers for group in optimizer.param_groups]
        stepwise = any(config.interval == "step" for config in self._trainer.lr_scheduler_configs)
        for client in clients:
            options = self._options_of(client)
            for name in options:
                if any(name not in group for group in groups):
                    raise MisconfigurationException(
                        f"client_settings of client {client}: the optimizer has no option {name!r}, but"
                        f" {sorted(set(groups[0]) - {'params'})}"
                    )
            if "lr" in options and stepwise:
                raise _changed_in_steps(client, "lr", options["lr"])

    def check_unchanged(self, client: int) -> None:
        """Refuse an option of a client's own that its steps have changed."""
        for name, value in self._options_of(client).items():
            if any(group[name] != value for optimizer in self._trainer.optimizers for group in optimizer.param_groups):
                raise _changed_in_steps(client, name, value)

    def take(self, client: int) -> None:
        """Give the optimizers a client's own options."""
        options, optimizers = self._options_of(client), self._trainer.optimizers
        if not options:
            return
        self.common = [
            [{name: group[name] for name in options} for group in optimizer.param_groups] for optimizer in optimizers
        ]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group.update(options)

    def give_back(self) -> None:
        """Give the optimizers the common options back."""
        for optimizer, groups in zip(self._trainer.optimizers, self.common, strict=False):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)
        self.common = []


def _changed_in_steps(client: int, name: str, value: Any) -> MisconfigurationException:
    return MisconfigurationException(
        f"client_settings of client {client} sets {name}={value}, which a scheduler or the module changes in steps:"
        " leave out the one or the other."
    )
