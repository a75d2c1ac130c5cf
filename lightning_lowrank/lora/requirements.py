"""Requirements of `FedLoRA` and its operators on a module: LoRA adapters that can learn."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_lowrank.internals.peft import peft_layers
from lightning_lowrank.internals.torch import sharing_memory
from lightning_lowrank.lora.adapters import FACTORS, Adapters, find_adapters
from lightning_lowrank.lora.operator import Operator


def adapters_of(module: nn.Module, adapter: str | None, operator: Operator) -> Adapters:
    """A module's adapters, checked for the operator.

    Raises:
        MisconfigurationException: If there are none, or the operator does not suit them.
    """
    try:
        found = Adapters(find_adapters(module, adapter))
    except ValueError as error:
        raise MisconfigurationException(f"FedLoRA: {error}") from error
    if not found.layers:
        raise MisconfigurationException(
            "FedLoRA trains LoRA adapters, and the module has none: put LowRank(MatrixProduct(), rank=8,"
            " init='lora') before FederatedLoop in `callbacks`, or wrap its model with PEFT."
        )
    trained = {name: value for name, value in module.named_parameters() if value.requires_grad}
    frozen = sorted(found.factors.keys() - trained.keys())
    if frozen:
        raise MisconfigurationException(
            f"FedLoRA: {frozen[0]} does not require a gradient: leave both factors trainable; the operator chooses"
            " which are trained."
        )
    _check_other_adapters(module, adapter)
    _check_memory(found, trained, operator)
    _check_layers(found, trained, operator)
    return found


def _check_other_adapters(module: nn.Module, adapter: str | None) -> None:
    for name, layer in peft_layers(module):
        chosen = layer.active_adapters if adapter is None else [adapter]
        inactive = [each for each in chosen if each not in layer.active_adapters]
        if inactive:
            raise MisconfigurationException(
                f"FedLoRA(adapter={adapter!r}): of {name} the adapter {layer.active_adapters} is active, so that"
                f" {adapter!r} would get no gradient: call set_adapter({adapter!r}) of the model that PEFT wrapped."
            )
        for inside, value in layer.named_parameters():
            kind, _, rest = inside.partition(".")
            other = rest.partition(".")[0]
            if kind.startswith("lora_") and other not in chosen and value.requires_grad:
                raise MisconfigurationException(
                    f"FedLoRA trains PEFT's adapter {', '.join(map(repr, chosen))}, and {name}.{inside} of the adapter"
                    f" {other!r} requires a gradient too: it would be trained, and its factors averaged one by one."
                    f" Call set_adapter({chosen[0]!r}) of the model that PEFT wrapped, which freezes other adapters, or"
                    f" freeze {other!r} by requires_grad_(False)."
                )


def _check_memory(found: Adapters, trained: Mapping[str, Tensor], operator: Operator) -> None:
    shared = sharing_memory((name, trained[name]) for name in found.factors)
    ways = (operator.trained, operator.sent_up, operator.sent_down)
    if shared and any(len(way(number)) < 2 for way in ways for number in (0, 1)):
        one, other = shared[0]
        raise MisconfigurationException(
            f"{operator!r} treats A and B differently, and {one} and {other}, one an A and the other a B, share memory:"
            " use ProductSum() or SumProduct(), or leave one of the layers out."
        )


def _check_layers(found: Adapters, trained: Mapping[str, Tensor], operator: Operator) -> None:
    for adapter in found.layers.values():
        if adapter.rank > min(adapter.shape):
            raise MisconfigurationException(
                f"FedLoRA: the adapter of layer {adapter.name!r} has rank {adapter.rank}, above the smaller side of"
                f" its {adapter.shape[0]}×{adapter.shape[1]} weight: leave it out (LowRank's exclude, PEFT's"
                " exclude_modules), train it whole (also keep_trained, or PEFT's modules_to_save), or with PEFT give it"
                " a rank of its own (rank_pattern)."
            )
        if operator.changes_base and adapter.unfoldable:
            raise MisconfigurationException(
                f"{operator!r} changes base weights, and layer {adapter.name!r} cannot take such a change:"
                f" {adapter.unfoldable}. Leave the layer out, or use an operator such as SumProduct()."
            )
        for name in FACTORS:
            still = name not in operator.trained(0) and not operator.redraws
            if still and not trained[adapter.parameters[name]].any():
                raise MisconfigurationException(
                    f"{operator!r} trains only one factor in the first round, and the other one of layer"
                    f" {adapter.name!r}, {name}, is zero, so that nothing would change: LowRank(init='lora')"
                    " starts B at zero and A at random."
                )
