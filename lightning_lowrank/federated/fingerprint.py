"""Fingerprints: the settings that affect a run's result, as plain Python in checkpoints, and their comparison.

An argument is part of it unless its field says otherwise: ``field(metadata=SAME_RESULT)`` in a dataclass, or
`Configured.result_arguments`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any

import numpy as np
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_lowrank.arguments import SAME_RESULT, Configured, recorded_arguments
from lightning_lowrank.federated.settings import FederatedSettings
from lightning_lowrank.internals.peft import is_base_change
from lightning_lowrank.internals.replaced import replaced
from lightning_lowrank.internals.torch import named_tensors

_LONGEST_LIST = 32
_TENSOR = re.compile(r"tensor\([^()]*\)")
_NUMBER = re.compile(r"-?\b(\d+(\.\d*)?(e[+-]?\d+)?|nan|inf)\b")
_DEEPEST = 8
_SPEED_ONLY = ("foreach", "fused", "capturable", "differentiable")
_COUNT_OR_SHARE = ("clients_per_round", "limit_train_batches", "overfit_batches", "trainer.overfit_batches")
"""Settings of which an integer is a count and a float a share."""
_OF_THE_TRAINER = (
    "precision",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "overfit_batches",
    "fast_dev_run",
)


def describe(value: Any, depth: int = 0) -> Any:
    """A description in plain Python, equal for equal values in every process.

    Objects are dictionaries of their class's name and their arguments; tensors, arrays and long lists are digests, and
    functions their names.

    Example:
        >>> from lightning_lowrank import FedAvgM
        >>> describe({"algorithm": FedAvgM(), "ranks": (1, 2)})
        {'algorithm': {'class': 'FedAvgM', 'momentum': 0.9, 'lr': 1.0}, 'ranks': [1, 2]}
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Enum):
        value = value.value
    if value is None:
        return None
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value) if value == value else "nan"
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.tolist()
    if isinstance(value, (Tensor, np.ndarray)):
        return _describe_array(value)
    if isinstance(value, (bytes, os.PathLike, torch.dtype, torch.device, complex)):
        return str(value)
    if depth > _DEEPEST:
        return f"object {type(value).__qualname__}"
    within = functools.partial(describe, depth=depth + 1)
    if isinstance(value, Mapping):
        return {str(key): within(each) for key, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (list, tuple, range)):
        entries = [each if type(each) is int else within(each) for each in value]
        return entries if _entries(entries) <= _LONGEST_LIST else f"{len(entries)} entries, digest {digest(entries)}"
    if isinstance(value, functools.partial):
        return {"class": f"partial {within(value.func)}", "args": within(value.args), **within(value.keywords)}
    if isinstance(value, nn.Module):
        tensors = {**value.state_dict(), **dict(named_tensors(value))}
        return {"class": type(value).__qualname__, "values": digest(within(tensors))}
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return f"function {value.__qualname__}"
    return {"class": type(value).__qualname__, **within(_result_arguments(value))}


def _result_arguments(value: Any) -> dict[str, Any]:
    arguments = value.result_arguments() if isinstance(value, Configured) else recorded_arguments(value)
    for each in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        if each.metadata == SAME_RESULT:
            arguments.pop(each.name, None)
    return arguments


def _describe_array(value: Tensor | np.ndarray) -> Any:
    shape, dtype = list(value.shape), str(value.dtype).removeprefix("torch.")
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            return f"{dtype} {shape} {value.layout}"
        value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{dtype} {shape}, digest {hashlib.blake2b(value.tobytes(), digest_size=8).hexdigest()}"


def _entries(value: Any) -> int:
    return sum(map(_entries, value)) if isinstance(value, list) else 1


def digest(description: Any) -> str:
    """A short digest of a description."""
    return hashlib.blake2b(repr(description).encode(), digest_size=8).hexdigest()


def fingerprint(settings: FederatedSettings, trainer: Any, clients: int) -> dict[str, Any]:
    """The settings that affect a run's result, data left out.

    Args:
        settings: The experiment's settings.
        trainer: The trainer, with its optimizers set up.
        clients: Number of clients.
    """
    described = describe(settings)
    del described["class"]
    own = {client: settings.settings_of(client) for client in settings.clients_with_settings(clients)}
    described["client_settings"] = {str(client): describe(each) for client, each in own.items() if each}
    module = trainer.lightning_module
    of_trainer = {name: getattr(trainer, name) for name in _OF_THE_TRAINER}
    schedulers = [type(config.scheduler).__qualname__ for config in trainer.lr_scheduler_configs]
    return {
        **described,
        "callbacks": _callbacks(trainer),
        "trainer": describe(of_trainer),
        "optimizers": describe({number: _optimizer(each) for number, each in enumerate(trainer.optimizers)}),
        "schedulers": schedulers,
        "module": _module(module),
    }


def _callbacks(trainer: Any) -> dict[str, Any]:
    kinds = (Configured, GradientAccumulationScheduler)
    callbacks = [
        each for each in trainer.callbacks if isinstance(each, kinds) and not isinstance(each, FederatedSettings)
    ]
    return {type(each).__qualname__: describe(each) for each in callbacks}


def _module(module: Any) -> dict[str, Any]:
    trained = [name for name, value in module.named_parameters() if value.requires_grad]
    layers = {name: layer for name, layer in module.named_modules() if layer.extra_repr() or not list(layer.children())}
    return {
        "trained": f"{len(trained)} parameters, digest {digest(trained)}",
        "hparams": describe(module.hparams),
        "layers": {name: _layer(layer) for name, layer in layers.items()},
    }


def _layer(layer: nn.Module) -> str:
    text = layer.extra_repr()
    holds = next(itertools.chain(layer.parameters(), layer.buffers()), None) is not None
    if holds and not type(layer).extra_repr.__module__.startswith(("torch.nn.", "lightning_lowrank.")):
        # Training changes the numbers of a text that shows the layer's tensors, as those of observers do.
        text = _NUMBER.sub("", _TENSOR.sub("tensor", text))
    # Remove memory addresses, which differ in each run, from default representations.
    return re.sub(" at 0x[0-9a-f]+", "", f"{type(layer).__name__}({text})")


def _optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = {name: value for name, value in optimizer.defaults.items() if name not in _SPEED_ONLY}
    return {"class": type(optimizer).__qualname__, **options}


def flatten(description: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over a fingerprint's settings by dotted names; an object's own entry is its class.

    Example:
        >>> dict(flatten({"algorithm": {"class": "FedAvgM", "lr": 1.0}, "clients": 3}))
        {'algorithm': 'FedAvgM', 'algorithm.lr': 1.0, 'clients': 3}
    """
    for name, value in description.items():
        if isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
            yield prefix + name, [each["class"] if isinstance(each, Mapping) else each for each in value]
            value = {str(number): each for number, each in enumerate(value)}
        if not isinstance(value, Mapping):
            yield prefix + name, value
            continue
        if "class" in value:
            yield prefix + name, value["class"]
        inner = {key: each for key, each in value.items() if key != "class"}
        yield from flatten(inner, f"{prefix}{name}.")


def differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Differing settings by name, with both values. For objects of different classes, only the classes are listed."""
    before, now = dict(flatten(saved)), dict(flatten(present))
    found: dict[str, tuple[Any, Any]] = {}
    for name in [*before, *(name for name in now if name not in before)]:
        values = before.get(name, _NOTHING), now.get(name, _NOTHING)
        if (values[0] != values[1] or _is_other_kind(name, *values)) and not is_within(name, found):
            found[name] = values
    return found


def _is_other_kind(name: str, before: Any, now: Any) -> bool:
    """Whether equal numbers mean different things, such as 1.0 for all clients and 1 for one client."""
    if isinstance(before, bool) != isinstance(now, bool):
        return True
    return name in _COUNT_OR_SHARE and type(before) is not type(now)


def with_defaults(saved: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """An older release's fingerprint, completed: missing settings get their default, other entries today's value."""
    fields = {field.name: field for field in dataclasses.fields(FederatedSettings)}
    found = dict(saved)
    for name in present.keys() - saved.keys():
        field = fields.get(name)
        if field is None:
            found[name] = present[name]
        elif field.default_factory is not dataclasses.MISSING:
            found[name] = describe(field.default_factory())
        elif field.default is not dataclasses.MISSING:
            found[name] = describe(field.default)
    return found


def refuse_other_shapes(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Refuse a state dict with other shapes, and name the differing tensors; a pre-hook of `load_state_dict`.

    Raises:
        MisconfigurationException: If a tensor of the state dict has another shape than the module's own.
    """
    own = itertools.chain(module.named_parameters(), module.named_buffers())
    shapes = {name: tuple(value.shape) for name, value in own if not (is_lazy(value) or is_base_change(name))}
    found = {
        name: f"{tuple(value.shape)} in the checkpoint, {shapes[name]} now"
        for name, value in state.items()
        if isinstance(value, Tensor) and name in shapes and tuple(value.shape) != shapes[name]
    }
    if found:
        lines = [f"  {name}: {change}" for name, change in found.items()]
        more = [f"  and {len(lines) - 5} more"] if len(lines) > 5 else []
        raise MisconfigurationException(
            "the checkpoint is of another network: tensors have other shapes\n"
            + "\n".join([*lines[:5], *more])
            + "\nResume with the network, and the ranks, of the run that wrote it."
        )


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()


def is_within(name: str, names: Iterable[str]) -> bool:
    """Whether a setting is among those with the given names, or inside one of them."""
    return any(name == each or name.startswith(f"{each}.") for each in names)


def check_same_experiment(
    saved: Mapping[str, Any], present: Mapping[str, Any], allowed: Sequence[str], round_open: bool
) -> None:
    """Refuse to resume from a checkpoint whose fingerprint differs in settings that ``allowed`` does not list.

    Args:
        saved: The fingerprint in the checkpoint.
        present: That of the run that would continue from it.
        allowed: Names of settings that may differ, with all that is in them.
        round_open: Whether the checkpoint was saved inside a round.

    Raises:
        MisconfigurationException: If something differs that is not allowed to, or anything inside a round.
    """
    found = differences(with_defaults(saved, present), present)
    refused = [name for name in found if round_open or not is_within(name, allowed)]
    if refused:
        values = {name: [shorten(value) for value in found[name]] for name in refused}
        lines = [f"  {name}: {before} in the checkpoint, {now} now" for name, (before, now) in values.items()]
        way_out = f"allow changes by name, FederatedLoop(allow_changes={refused[:3]})"
        if round_open:
            way_out = "resume from one that was saved between rounds, where changes can be allowed by name"
        raise MisconfigurationException(
            "the checkpoint is of another experiment:\n" + "\n".join(lines) + f"\nResume with the same, or {way_out}."
        )
    by_name = [name for name, value in flatten(present) if isinstance(value, str) and _has_no_name_of_its_own(value)]
    if by_name:
        rank_zero_warn(
            f"{', '.join(by_name)}: it is unknown whether the checkpoint's run had the same function, because it is a"
            " lambda or was defined in a function."
        )


def prepare_loading(settings: FederatedSettings, trainer: Any) -> AbstractContextManager[None]:
    """A context in which Lightning's loading of a module's values is preceded by a check of the layers' settings.

    The arguments that decide about layers are compared then, for the values of other layers do not fit, or mean
    something else. Everything else is compared when the fit begins. With ``precision="64-true"`` the module becomes
    double, which Lightning does after loading: values would be rounded to 32 bits.
    """
    module = trainer.lightning_module
    on_load_checkpoint = module.on_load_checkpoint

    def check(checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get("callbacks", {}).get("FederatedLoop", {})
        if "fingerprint" in state:
            present = {**describe(settings), "callbacks": _callbacks(trainer)}
            known = [name for name in present if name not in ("class", "client_settings", "execution")]
            saved = with_defaults(state["fingerprint"], present)
            saved, present = ({name: each[name] for name in known} for each in (saved, present))
            fits = _shapes(checkpoint["state_dict"]) == _shapes(module.state_dict())
            if not fits or saved["callbacks"] != present["callbacks"]:
                check_same_experiment(saved, present, settings.allow_changes, state["progress"]["round_open"])
        if isinstance(trainer.precision_plugin, DoublePrecision):
            trainer.precision_plugin.convert_module(module)
        on_load_checkpoint(checkpoint)

    return replaced(module, on_load_checkpoint=check)


def _shapes(state: Mapping[str, Any]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in state.items() if isinstance(value, Tensor)}


def _has_no_name_of_its_own(described: str) -> bool:
    return described.startswith("function ") and "<" in described


def shorten(value: Any) -> str:
    """The representation of a value for an error, cut to 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
