"""What of a module is averaged although no optimizer trains it: its buffers, and parameters that count as such."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from lightning_lowrank.configuration import check_patterns, misconfigured
from lightning_lowrank.patterns import matches

_EMA = "federated_ema_parameters"


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's buffers that are part of its state dict, by name, and what `treat_as_buffers` has added.

    What PEFT's adapters hold as buffers is left out: the random projections of VeRA and RandLoRA, which every side
    makes from its configuration, and the buffers of modules that copies stand in for. Training changes neither.
    """
    kept = module.state_dict(keep_vars=True).keys()
    fixed = set(_fixed_buffers(module))
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in kept and buffer not in fixed}
    added = vars(module).get(_EMA, ())
    return {**buffers, **{name: module.get_parameter(name) for name in added}}


def _fixed_buffers(module: nn.Module) -> Iterator[Tensor]:
    # PEFT's parts are told by their structure: PEFT need not be installed.
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
    names = [name for name, _ in module.named_parameters()]
    check_patterns("ema_parameters", patterns, names, "parameter")
    chosen = [name for name in names if any(matches(pattern, name) for pattern in patterns)]
    trained = [name for name in chosen if module.get_parameter(name).requires_grad]
    if trained:
        raise misconfigured(
            f"ema_parameters={list(patterns)} has {trained[0]}, which the optimizer trains, and trained parameters are"
            " averaged anyway: name frozen ones, or call requires_grad_(False) on them."
        )
    vars(module)[_EMA] = tuple(chosen)
