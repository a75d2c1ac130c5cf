"""Clients' optimizers: fresh or kept moments, options per client, and schedules that count each client's steps."""

from __future__ import annotations

import copy
import inspect
import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_lowrank.arguments import join_names
from lightning_lowrank.federated.client_states import ClientStates, flatten_state
from lightning_lowrank.federated.leaks import schedulers_of, walk
from lightning_lowrank.federated.protocols import ChangesBase
from lightning_lowrank.federated.settings import FederatedSettings
from lightning_lowrank.federated.state import State
from lightning_lowrank.optim import ProjectedAdamW, ProjectedSGD
from lightning_lowrank.optim.deferred import CHANGE

_CURRENT_IN = "moments.current"
_OF_ONE_CLIENT = ("params", "stacked", "subspaces")
_COUNTS_OF_REFRESHES = ("refresh_number", "steps_since_refresh")
_SHARED = ("step", "mu_product")
_OF_EVERY_OPTIMIZER = vars(Optimizer([nn.Parameter(torch.empty(0))], {})).keys() | {"step", "_opt_called"}
"""Attributes that torch and its schedulers set on each optimizer."""
_OWN = "lightning_lowrank.of_optimizer: "
_NOBODY = (0, 1)
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
    """Declare an optimizer elementwise, so that clients that use it may step together.

    Its state must consist of tensors shaped as their parameter, of scalar tensors named ``step``, and of plain Python.
    Subclasses that inherit ``step`` count as well, also those of torch's own elementwise optimizers.

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
    """Whether an optimizer is known to be elementwise."""
    step = inspect.unwrap(type(optimizer).step)
    return any(isinstance(optimizer, kind) and step is inspect.unwrap(kind.step) for kind in _ELEMENTWISE)


def counters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Entries of an optimizer's parameter groups that its steps may change, as in schedule-free optimizers and Prodigy.

    These are all but the options that schedules set, and a projected optimizer's refreshes. An optimizer that
    `acts_elementwise` has none.
    """
    if acts_elementwise(optimizer):
        return [{} for _ in optimizer.param_groups]
    others = ("params", *_SCHEDULED, *_COUNTS_OF_REFRESHES)
    return [{name: value for name, value in group.items() if name not in others} for group in optimizer.param_groups]


def is_shared(name: str, value: Any) -> bool:
    """Whether an entry of a parameter's state has one value for all clients that step together."""
    return name in _SHARED or not isinstance(value, Tensor)


def fresh_state(optimizer: Optimizer) -> defaultdict[Tensor, Any]:
    """An optimizer's initial state, which is not empty for Adagrad."""
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    if isinstance(optimizer, torch.optim.Adagrad):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                start = torch.full_like(parameter, group["initial_accumulator_value"], requires_grad=False)
                state[parameter] = {"step": torch.tensor(0.0), "sum": start}
    return state


class ClientOptimizers:
    """The optimizers and schedulers of a fit, which all clients use in turn.

    A client begins with fresh optimizers, or with the moments that it keeps between rounds; with the options of its
    own; and with all other options, and step-wise schedules, in their state at the round's start. The next round
    continues from the client with the most steps; of several, from that with the lowest number. Schedulers that
    Lightning steps once an epoch are left alone. Under manual optimization, where the module may step them at any time,
    each client begins with all of them in their state at the round's start, and so it does with schedulers that the
    module or a callback holds itself. The same holds for a projected optimizer's count of steps to its next subspaces.
    Between clients the optimizers are as before a client, so that evaluations and checkpoints have no client's moments.

    `Rounds` calls `wind_back`, `apply_options`, `end_client` and `end_round`, executions `begin` and `keep`.

    Args:
        trainer: The trainer, with its optimizers set up, before a step.
        settings: The experiment's settings.

    Raises:
        MisconfigurationException: If an attribute of an optimizer cannot be copied, or not be kept.
    """

    def __init__(self, trainer: Any, settings: FederatedSettings) -> None:
        module = trainer.lightning_module
        self._trainer = trainer
        # Copies of the trainer's lists, which may be changed in place.
        self._optimizers: Sequence[Optimizer] = [*trainer.optimizers]
        self._known = _set_up(trainer)
        manual = not module.automatic_optimization
        self._by_round = [] if manual else [each for each in trainer.lr_scheduler_configs if each.interval != "step"]
        self._schedulers: list[Any] = []
        self._stepwise = any(config.interval == "step" for config in trainer.lr_scheduler_configs)
        self._options_of = settings.options_of
        self._attributes = _Attributes(self._optimizers, settings.optimizer_state == "keep")
        self._drawn_in = ChangesBase.of(settings.algorithm).drawn_in
        names: dict[Tensor, list[str]] = defaultdict(list)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names[parameter].append(name)
        self._names = [[names[parameter] for parameter in _parameters_of(each)] for each in self._optimizers]
        self._keeps = settings.optimizer_state == "keep"
        self._own: Mapping[str, Any] = {}
        # The state at the round's start, and at the end of its client with the most steps.
        self._begun: dict[str, Any] = {}
        self._furthest: dict[str, Any] = {}
        # Its number of steps, and its own number, negative so that the lowest is the greatest.
        self._most = _NOBODY

    def check(self, clients: Iterable[int]) -> None:
        """Refuse unknown options of clients, and clients' learning rates that a step-wise scheduler would change."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for client in clients:
            options = self._options_of(client)
            for name in options:
                if any(name not in group for group in groups):
                    raise MisconfigurationException(
                        f"client_settings of client {client}: the optimizer has no option {name!r}, only"
                        f" {sorted(set(groups[0]) - {'params'})}"
                    )
            if "lr" in options and self._stepwise:
                raise _changed_in_steps(client, "lr", options["lr"])

    def are_present(self) -> bool:
        """Whether the trainer has no other optimizers and schedulers than these."""
        present = _set_up(self._trainer)
        return len(present) == len(self._known) and all(map(operator.is_, present, self._known))

    def follow(self, before: ClientOptimizers, states: ClientStates) -> None:
        """Adopt the round of the optimizers ``before`` these.

        Raises:
            MisconfigurationException: If clients keep moments of other optimizers or parameters.
        """
        kinds, others = (list(map(type, each._optimizers)) for each in (self, before))
        if (kinds, self._names) != (others, before._names) and any("optimizers" in kept for _, kept in states.items()):
            raise MisconfigurationException(
                f"optimizer_state='keep': clients keep the moments of {join_names([each.__name__ for each in others])},"
                f" and the trainer's optimizers are now {join_names([each.__name__ for each in kinds])}, or for other"
                " parameters: use the same in all rounds, or optimizer_state='reset'."
            )
        self._find_schedulers()
        self._begun, self._furthest, self._most = before._begun, before._furthest, before._most

    def key(self, client: int, state: State, round_number: int) -> tuple[Any, ...]:
        """A key, equal for clients that may step together: their kept moments, the moments' ages, and their options."""
        current = self._current(state, round_number)
        shared = tuple(
            (number, index, *((name, float(value)) for name, value in kept.items() if _is_counted(name, value)))
            for number, parameters in current.get("optimizers", {}).items()
            for index, kept in parameters.items()
        )
        return shared, repr(current.get("subspaces")), tuple(sorted(self._options_of(client).items()))

    # Rounds

    def begin_round(self) -> None:
        """Capture the state of groups and schedulers at the round's start."""
        groups = [
            [{name: group[name] for name in group if name not in _OF_ONE_CLIENT} for group in each.param_groups]
            for each in self._optimizers
        ]
        self._find_schedulers()
        self._begun, self._furthest, self._most = self._captured(groups), {}, _NOBODY

    def _find_schedulers(self) -> None:
        """Find the schedulers that may step within clients. The module may have made some since the fit's start."""
        by_round = {id(config.scheduler) for config in self._by_round}
        self._schedulers = [each for each in schedulers_of(self._trainer) if id(each) not in by_round]

    def wind_back(self) -> None:
        """Restore the state of the round's start, before a client begins."""
        for group, values, counted in self._groups():
            for name in counted.keys() - values.keys():
                del group[name]
            # Copies, because steps may change the values in place.
            group.update(copy.deepcopy(values))
        self._wind_schedulers(self._begun)

    def apply_options(self, client: int) -> None:
        """Apply a client's own options to the optimizers."""
        self._own = self._options_of(client)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group.update(copy.deepcopy(self._own))

    def end_client(self, client: int, steps: int) -> None:
        """Restore the common options, drop the moments, and capture the state if the client has the most steps so far.

        Raises:
            MisconfigurationException: If the client's steps have changed an option of its own.
        """
        for name, value in self._own.items():
            if any(group[name] != value for optimizer in self._optimizers for group in optimizer.param_groups):
                raise _changed_in_steps(client, name, value)
        self.give_back()
        if (steps, -client) > self._most:
            groups = [
                list(map(self._scheduled, optimizer.param_groups, counters(optimizer)))
                for optimizer in self._optimizers
            ]
            self._furthest, self._most = self._captured(groups), (steps, -client)

    def give_back(self) -> None:
        """Restore the common options in place of the open client's, and drop its moments."""
        for group, values, _ in self._groups() if self._own else ():
            group.update({name: values[name] for name in self._own})
        self._own = {}
        self.begin([{}], stacked=False)

    @property
    def end(self) -> tuple[tuple[int, int], dict[str, Any]]:
        """The place of the round's client with the most steps, and the state at its end."""
        return self._most, self._furthest

    def pool(self, ends: Iterable[tuple[tuple[int, int], dict[str, Any]]]) -> None:
        """Adopt the `end` value of the client with the most steps, out of those of several processes."""
        self._most, self._furthest = max(ends, key=lambda end: end[0])

    def end_round(self) -> None:
        """Load the end state of the client with the most steps; optimizers' counters are those of the round's start."""
        for group, values, counted in self._groups():
            for name in counted:
                if name in values:
                    group[name] = copy.deepcopy(values[name])
                else:
                    del group[name]
        for optimizer, groups in zip(self._optimizers, self._furthest.get("groups", ()), strict=False):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(copy.deepcopy(values))
        self._wind_schedulers(self._furthest)

    def _groups(self) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
        """For each group: the group, its entries at the round's start, and its present counters."""
        for optimizer, groups in zip(self._optimizers, self._begun.get("groups", ()), strict=False):
            yield from zip(optimizer.param_groups, groups, counters(optimizer), strict=False)

    def _scheduled(self, group: Mapping[str, Any], counted: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of a group that schedulers, the module and subspace refreshes change."""
        return {name: value for name, value in group.items() if name not in _OF_ONE_CLIENT and name not in counted}

    def _captured(self, groups: list[list[dict[str, Any]]]) -> dict[str, Any]:
        schedulers = [scheduler.state_dict() for scheduler in self._schedulers]
        return self._copied({"schedulers": schedulers, "groups": groups})

    def _copied(self, value: Any) -> Any:
        """A deep copy that shares the optimizers, to which a scheduler inside another one refers."""
        return copy.deepcopy(value, {id(optimizer): optimizer for optimizer in self._optimizers})

    def _wind_schedulers(self, captured: Mapping[str, Any]) -> None:
        for scheduler, state in zip(self._schedulers, captured.get("schedulers", ()), strict=False):
            scheduler.load_state_dict(self._copied(state))

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run: that of the round, and schedulers, of which Lightning saves its own alone."""
        schedulers = [each.state_dict() for each in self._schedulers]
        return {"begun": self._begun, "furthest": self._furthest, "most": self._most, "schedulers": schedulers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._find_schedulers()
        self._begun, self._furthest, self._most = state["begun"], state["furthest"], tuple(state["most"])
        self._wind_schedulers(state)

    # Clients' moments

    def forget(self, state: State, round_number: int) -> None:
        """Drop moments of factors or subspaces that the method has redrawn since (`ChangesBase.drawn_in`)."""
        if self._keeps:
            state.update(self._current(state, round_number), **{_CURRENT_IN: round_number})

    def _current(self, state: State, round_number: int) -> State:
        """The kept moments whose parameters the method has not redrawn since."""
        last = state.get(_CURRENT_IN, -1)
        gone = [
            {
                index
                for index, names in enumerate(each)
                if any(self._drawn_in(name, round_number) > last for name in names)
            }
            for each in self._names
        ]
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

    def begin(self, states: Sequence[State], stacked: bool) -> None:
        """Load clients' initial moments into the optimizers: fresh ones, or those that `keep` saved in ``states``.

        Clients that are ``stacked`` have one `key`; another client begins with the optimizers' own attributes too.
        """
        for optimizer in self._optimizers:
            optimizer.state = fresh_state(optimizer)
        if not stacked:
            self._attributes.begin(states[0].get("attributes"))
        for number, optimizer in enumerate(self._optimizers):
            kept = [state.get("optimizers", {}).get(number, {}) for state in states]
            parameters = _parameters_of(optimizer)
            for index in kept[0]:
                each = [of_client[index] for of_client in kept]
                # Copies, so that a client that fails keeps its previous moments.
                optimizer.state[parameters[index]] = _stack(each) if stacked else _part(each[0])
            counted = states[0].get("counters", {}).get(number, ())
            for group, values in zip(optimizer.param_groups, counted, strict=False):
                group.update(_with_objects(copy.deepcopy(values), {}, group))
            # A projected optimizer's group lists the subspaces that its moments belong to.
            subspaces = states[0].get("subspaces", {}).get(number)
            for position, group in enumerate(optimizer.param_groups):
                if "subspaces" in group:
                    group["subspaces"] = subspaces[position] if subspaces else (None,) * len(group["params"])

    def keep(self, state: State, place: int | None = None) -> None:
        """Save a client's final moments in its ``state``; ``place`` is its row in stacks, ``None`` if it is alone."""
        if not self._keeps:
            return
        if place is None and any(attributes := self._attributes.kept()):
            state["attributes"] = attributes
        state["optimizers"] = {
            number: {
                # A copy, because Lightning moves the optimizer's own tensors to the CPU at the end of a fit.
                index: dict(optimizer.state[parameter]) if place is None else _part(optimizer.state[parameter], place)
                for index, parameter in enumerate(_parameters_of(optimizer))
                if parameter.requires_grad and optimizer.state.get(parameter, {CHANGE: None}).keys() != {CHANGE}
            }
            for number, optimizer in enumerate(self._optimizers)
        }
        counted = {number: counters(optimizer) for number, optimizer in enumerate(self._optimizers)}
        if any(any(groups) for groups in counted.values()):
            state["counters"] = copy.deepcopy(counted)
        projected = {
            number: [group["subspaces"] for group in optimizer.param_groups]
            for number, optimizer in enumerate(self._optimizers)
            if "subspaces" in optimizer.param_groups[0]
        }
        if projected:
            state["subspaces"] = projected


def _changed_in_steps(client: int, name: str, value: Any) -> MisconfigurationException:
    return MisconfigurationException(
        f"client_settings of client {client} sets {name}={value}, which a scheduler or the module changes in steps:"
        " leave out one of the two."
    )


class _Attributes:
    """Attributes and state of the optimizers as `configure_optimizers` made them, from which each client begins.

    Attributes are counters, slow weights or an optimizer inside. Modules are shared, and random generators continue
    from client to client. Attributes that clients keep have names in place of the optimizer's own parameters and
    groups, because a checkpoint or a file would restore copies of these.
    """

    def __init__(self, optimizers: Sequence[Optimizer], keeps: bool) -> None:
        self._optimizers = optimizers
        # This package's optimizers keep no attribute that belongs to a client.
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
        self._initial = [
            self._copied(optimizer, self._present(optimizer, names))
            for optimizer, names in zip(optimizers, self._names, strict=True)
        ]

    def _check(self, optimizer: Optimizer, name: str, keeps: bool) -> None:
        value = vars(optimizer)[name]
        where = f"{type(optimizer).__name__}.{name}"
        try:
            self._copied(optimizer, value)
            if keeps:
                flatten_state(self._copied(optimizer, value, {id(item): name for name, item in _own(optimizer)}))
        except (TypeError, RuntimeError, ValueError, AttributeError, NotImplementedError) as error:
            what = "each client begins with a copy of what the optimizer holds"
            if keeps:
                what = (
                    "with optimizer_state='keep' each client keeps what the optimizer holds, tensors and plain Python"
                )
            raise MisconfigurationException(
                f"{what}, and {where} is {value!r}: {error} Keep it in the optimizer's state or param_groups."
            ) from error

    def _copied(self, optimizer: Optimizer, value: Any, replaced: Mapping[int, Any] | None = None) -> Any:
        """A deep copy that shares parameters, groups, modules and generators with the original.

        ``replaced`` has what the copy has in place of some objects, by their ``id``.
        """
        same = [item for _, item in _own(optimizer)]
        lasting = (torch.Generator, nn.Module)
        items = [
            item for _, item in walk("", value, lambda kind: False, is_whole=lambda item: isinstance(item, lasting))
        ]
        same += [item for item in items if isinstance(item, lasting)]
        memo: dict[int, Any] = {**{id(item): item for item in same}, **(replaced or {})}
        # Slow weights that were cloned without no_grad() have a graph, and deepcopy() refuses these.
        graphs = [item for item in items if isinstance(item, Tensor) and item.grad_fn is not None]
        memo |= {id(item): item.detach().clone() for item in graphs}
        # copy.deepcopy() copies an optimizer by its state and groups only, so copy the attributes of inner optimizers
        # here.
        inside = [item for item in items if isinstance(item, Optimizer) and item is not optimizer]
        memo |= {id(item): type(item).__new__(type(item)) for item in inside}
        for item in inside:
            vars(memo[id(item)]).update(copy.deepcopy(vars(item), memo))
        return copy.deepcopy(value, memo)

    def _present(self, optimizer: Optimizer, names: Collection[str]) -> dict[str, Any]:
        return {name: vars(optimizer)[name] for name in names if name in vars(optimizer)}

    def kept(self) -> list[dict[str, Any]]:
        """Copies of the optimizers' attributes beyond those that torch defines, for a client to keep."""
        return [
            self._copied(optimizer, self._present(optimizer, names), {id(item): name for name, item in _own(optimizer)})
            for optimizer, names in zip(self._optimizers, self._names, strict=True)
        ]

    def begin(self, kept: Sequence[Mapping[str, Any]] | None) -> None:
        """Load copies of a client's kept attributes, or of the initial ones, and the initial state."""
        given = self._initial if kept is None else kept
        for optimizer, names, own, first, state in zip(
            self._optimizers, self._names, given, self._initial, self._states, strict=True
        ):
            if names:
                own = own if kept is None else _with_objects(own, dict(_own(optimizer)), first)
                # Copied, because an inner optimizer may share the outer one's groups.
                copied = self._copied(optimizer, dict(own))
                for name in vars(optimizer).keys() - _OF_EVERY_OPTIMIZER - copied.keys():
                    del vars(optimizer)[name]
                vars(optimizer).update(copied)
            if state:
                optimizer.state.update(self._copied(optimizer, state))


def _set_up(trainer: Any) -> list[Any]:
    """The trainer's optimizers and schedulers."""
    return [*trainer.optimizers, *(config.scheduler for config in trainer.lr_scheduler_configs)]


def _own(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """The optimizer, its groups and its parameters, each with a name that stands for it in a kept attribute."""
    yield from ((f"{_OWN}optimizer", optimizer), (f"{_OWN}groups", optimizer.param_groups))
    yield from ((f"{_OWN}group {number}", group) for number, group in enumerate(optimizer.param_groups))
    yield from ((f"{_OWN}parameter {number}", value) for number, value in enumerate(_parameters_of(optimizer)))


def _with_objects(value: Any, named: Mapping[str, Any], first: Any = None) -> Any:
    """A kept attribute with the objects of `_own` in place of their names, in containers as in the initial ``first``.

    Files and other processes have a dict, list or tuple in place of a container of a derived type.
    """
    if not isinstance(value, (Mapping, list, tuple)):
        return named.get(value, value) if isinstance(value, str) else value
    fits = isinstance(first, type(value)) and len(getattr(first, "_fields", value)) == len(value)
    like: Any = first if fits else value
    if isinstance(value, Mapping):
        entries = {_with_objects(key, named): entry for key, entry in value.items()}
        # A copy of the container, because a defaultdict has a factory.
        made = copy.copy(like)
        made.clear()
        firsts = first if isinstance(first, Mapping) else {}
        made.update({key: _with_objects(entry, named, firsts.get(key)) for key, entry in entries.items()})
        return made
    each_first = itertools.chain(first if isinstance(first, (list, tuple)) else (), itertools.repeat(None))
    found = [_with_objects(entry, named, each) for entry, each in zip(value, each_first, strict=False)]
    return getattr(type(like), "_make", type(like))(found)


def _is_counted(name: str, value: Any) -> bool:
    return is_shared(name, value) and value is not None


def _without(groups: Sequence[Sequence[Any]], gone: Collection[int]) -> list[tuple[Any, ...]]:
    """A projected optimizer's subspaces, with ``None`` for the parameters whose numbers are ``gone``."""
    places = itertools.count()
    return [tuple(None if next(places) in gone else entry for entry in group) for group in groups]


def _stack(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return _copied(states[0], lambda name: torch.stack([state[name] for state in states]))


def _part(state: Mapping[str, Any], place: int | None = None) -> dict[str, Any]:
    # Deferred changes have been added to the weights of a client that is done.
    state = {name: value for name, value in state.items() if name != CHANGE}
    return _copied(state, lambda name: (state[name] if place is None else state[name][place]).clone())


def _copied(state: Mapping[str, Any], own: Callable[[str], Tensor]) -> dict[str, Any]:
    """Copy a parameter's state: shared entries as they are, a client's own entries by ``own(name)``."""

    def copied(name: str, value: Any) -> Any:
        if not is_shared(name, value):
            return own(name)
        return value.clone() if isinstance(value, Tensor) else value

    return {name: copied(name, value) for name, value in state.items()}


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
