"""Tensors that are averaged but not trained (buffers, chosen frozen parameters), and aliases of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from lightning_lowrank.configuration import check_patterns, misconfigured
from lightning_lowrank.internals.peft import is_base_change
from lightning_lowrank.internals.torch import named_persistent_buffers
from lightning_lowrank.patterns import matches

_EMA = "federated_ema_parameters"


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """A module's persistent buffers, by name, and the parameters that `treat_as_buffers` has added.

    A ``state_dict()`` of the user's own, which may leave entries out, does not decide: it is for checkpoints.

    Buffers of PEFT's adapters are left out: the random projections of VeRA and RandLoRA, which server and clients draw
    from the configuration, and the buffers of modules that PEFT replaces by copies. Training changes neither. Changes
    of quantised base weights are left out too: server and clients compute them from the round's message.
    """
    fixed = set(_fixed_buffers(module))
    buffers = {name: buffer for name, buffer in named_persistent_buffers(module) if buffer not in fixed}
    buffers = {name: buffer for name, buffer in buffers.items() if not is_base_change(name)}
    added = vars(module).get(_EMA, ())
    return {**buffers, **{name: module.get_parameter(name) for name in added}}


def _fixed_buffers(module: nn.Module) -> Iterator[Tensor]:
    # PEFT's modules are recognised by their attributes, because PEFT need not be installed.
    for part in module.modules():
        if hasattr(part, "get_base_layer"):
            base = set(part.get_base_layer().buffers())  # type: ignore[operator]
            yield from (buffer for buffer in part.buffers() if buffer not in base)
        if isinstance(getattr(part, "modules_to_save", None), nn.ModuleDict) and len(part.modules_to_save):  # type: ignore[arg-type]
            original = getattr(part, "original_module", None)
            if isinstance(original, nn.Module):
                yield from original.buffers()


def treat_as_buffers(module: nn.Module, patterns: Sequence[str]) -> None:
    """Treat the frozen parameters that match patterns as persistent buffers: they are sent and averaged.

    Raises:
        MisconfigurationException: If a pattern matches no parameter, or a trained one.
    """
    vars(module).pop(_EMA, None)
    if not patterns:
        return
    names = (name for name, _ in module.named_parameters())
    chosen = names_that_match(module, "ema_parameters", patterns, names, "parameter")
    trained = [name for name in chosen if module.get_parameter(name).requires_grad]
    if trained:
        raise misconfigured(
            f"ema_parameters={list(patterns)} has {trained[0]}, which the optimizer trains, and trained parameters are"
            " averaged anyway: name frozen ones, or call requires_grad_(False) on them."
        )
    vars(module)[_EMA] = tuple(chosen)


def aliases(module: nn.Module) -> dict[str, list[str]]:
    """The aliases of each parameter and buffer with several names, by its first name.

    The first name is the one that ``named_parameters()`` and ``named_buffers()`` give.
    """
    found: dict[str, list[str]] = {}
    for named in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        firsts: dict[Tensor, str] = {}
        for name, value in named:
            first = firsts.setdefault(value, name)
            if first != name:
                found.setdefault(first, []).append(name)
    return found


def names_that_match(
    module: nn.Module, argument: str, patterns: Sequence[str], names: Iterable[str], what: str
) -> list[str]:
    """The names of tensors that patterns match; a tensor with several names is matched by each of them.

    Args:
        module: The module that has the tensors.
        argument: Name of the argument with the patterns, for the message.
        patterns: The patterns.
        names: The first names of the tensors to choose from.
        what: For the message, a description of a thing that has such a name.

    Raises:
        MisconfigurationException: If a pattern matches no tensor.
    """
    known = aliases(module)
    own = {name: [name, *known.get(name, ())] for name in names}
    check_patterns(argument, patterns, [each for names in own.values() for each in names], what)
    return [name for name in own if any(matches(pattern, each) for pattern in patterns for each in own[name])]


def under_all_names(values: Mapping[str, Tensor], aliases: Mapping[str, Iterable[str]]) -> dict[str, Tensor]:
    """Repeat each value under the aliases of its name."""
    return {each: value for name, value in values.items() for each in (name, *aliases.get(name, ()))}
