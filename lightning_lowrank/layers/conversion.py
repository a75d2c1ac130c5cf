"""Converting a model's layers to low-rank ones, in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_lowrank.arguments import join_names
from lightning_lowrank.internals.torch import digest_of, named_persistent_buffers, own_children, without_autocast
from lightning_lowrank.layers.attention import LowRankMultiheadAttention
from lightning_lowrank.layers.budget import assign_ranks
from lightning_lowrank.layers.conversion_report import Conversion, LayerReport
from lightning_lowrank.layers.factorization import Factorization
from lightning_lowrank.layers.layer import LowRankLayer, low_rank_layers
from lightning_lowrank.layers.linear import LowRankLinear
from lightning_lowrank.layers.precision import widen, widen_factors
from lightning_lowrank.layers.recovery import LayerSpec, replace_modules
from lightning_lowrank.layers.settings import LayerSettings, LowRankSettings, update_scale
from lightning_lowrank.layers.survey import Candidate, keep_ties, low_rank_class, refuse_halves_of_ties, select, survey
from lightning_lowrank.patterns import check_patterns, matches
from lightning_lowrank.seeding import derive_seed


@torch.inference_mode(False)
@without_autocast()
def convert(model: nn.Module, factorization: Factorization, *, seed: int = 0, **settings: Any) -> Conversion:
    """Replace a model's layers by low-rank ones, in place.

    A layer can be converted if it is exactly an ``nn.Linear``, ``nn.Conv1d`` to ``3d``, ``nn.ConvTranspose1d``
    to ``3d``, ``nn.Embedding`` or transformers' ``Conv1D`` with a plain floating-point weight; so can the
    projections of an ``nn.MultiheadAttention``, each under its weight's name without ``_weight``
    (``attention.in_proj``). A subclass is not converted, because it may use its weight in another way. Layers that
    share one weight share the factors afterwards; either all of them are converted or none.

    Other layers stay dense, and the report says why. So do layers with a frozen weight, unless ``convert_frozen`` is
    set; layers with a frozen copy, such as a momentum teacher, unless ``convert_frozen`` is set or ``include`` names
    them; layers whose trained factors would not have fewer numbers than the weight, unless ``allow_larger`` is set or
    ``freeze_rest`` would freeze it; and, in role ``"weight"``, layers from whose weight factors cannot start: a weight
    of zeros, or with ``init="uniform"`` and no ``init_scale`` any constant one.

    Args:
        model: The model. Nothing in it is changed if an error is raised.
        factorization: How a weight is factorized.
        seed: Seed of the factors' draws; each layer's is derived from it and its name. 0 by default.
        **settings: ``rank``, ``role``, ``skip`` and the other settings of :class:`LowRankSettings`, which checks
            them.

    Returns:
        A report of each layer's outcome, with the model's totals.

    Raises:
        TypeError: If ``model`` is itself a layer to convert, or an argument of a wrong kind.
        ValueError: If an argument is out of range, a pattern matches nothing, the model has low-rank or
            uninitialised layers, the budget is below the cost of the smallest ranks, or there is nothing to
            convert.

    Example:
        >>> from lightning_lowrank.layers import MatrixProduct, convert
        >>> model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4))
        >>> print(convert(model, MatrixProduct(), rank=4, skip=["first", "last"]))
        layer  kind    shape  rank  parameters  trainable
        0      Linear  32×16               512        512  first layer that can be converted (skip)
        1      Linear  32×32     4       1,024        256
        2      Linear  4×32                128        128  last layer that can be converted (skip)
        964 of 1,732 parameters are trained (55.66%), other parameters of the model included.
    """
    if not isinstance(factorization, Factorization):
        raise TypeError(f"factorization must be a Factorization such as MatrixProduct(), got {factorization!r}.")
    how = LowRankSettings(factorization, **settings)
    layers = survey(model, factorization)
    select(layers, how)
    dense = {name: p for name, p in model.named_parameters() if p.requires_grad or how.convert_frozen}
    dense_parameters = sum(parameter.numel() for parameter in dense.values())
    spared = {
        parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and any(matches(pattern, name) for pattern in how.keep_trained or ())
    }
    assign_ranks(model, [layer for layer in layers if not layer.reason and layer.tied_to is None], how, spared)
    keep_ties(layers)
    refuse_halves_of_ties(layers, how)
    chosen = [layer for layer in layers if not layer.reason]
    if not chosen:
        raise ValueError(f"no layer of the model can be converted ({_reasons(layers)}).")
    _refuse_for_attention(chosen, how)
    replaced = {layer.weight for layer in chosen}
    if how.keep_trained:
        named = model.named_parameters(remove_duplicate=False)
        left = [name for name, p in named if p.requires_grad and p not in replaced]
        check_patterns("keep_trained", how.keep_trained, left, "trained parameter that is not converted")
        spared -= replaced
    note_buffers(model)
    _make_low_rank(model, chosen, how, seed)
    if how.freeze_rest:
        for _, low_rank in low_rank_layers(model):
            spared.update(low_rank.factors.parameters())
            if how.train_base and low_rank.frozen_weight.requires_grad:
                spared.add(low_rank.frozen_weight)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter in spared)
        if not how.train_base:
            for _, low_rank in low_rank_layers(model):
                widen_factors(low_rank.factors)
            widen(model, spared)
    frozen = (name for name, p in dense.items() if not p.requires_grad and p not in replaced)
    model.frozen_for_factors = frozenset(frozen)  # type: ignore[assignment]

    return Conversion(
        layers=[_report(layer, how) for layer in layers],
        specs=[_spec(layer, how) for layer in chosen],
        dense_parameters=dense_parameters,
        trainable_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
    )


def note_buffers(model: nn.Module) -> None:
    """Store digests of the buffers of modules with children, so that an export can tell which have changed."""
    model.buffers_before_training = {  # type: ignore[assignment]
        name: digest_of(buffer)
        for name, buffer in named_persistent_buffers(model)
        if not buffer.is_meta and own_children(model.get_submodule(name.rpartition(".")[0]))
    }


def _make_low_rank(model: nn.Module, chosen: Sequence[Candidate], settings: LayerSettings, seed: int) -> None:
    """Replace the chosen layers in the model; after an error the model is unchanged."""
    trained = [(layer.weight, layer.weight.requires_grad) for layer in chosen]
    built: dict[str, LowRankLayer] = {}
    try:
        for layer in chosen:
            built[layer.name] = _build(layer, settings, derive_seed(seed, layer.name), built)
    except ValueError as error:
        for weight, requires_grad in trained:
            weight.requires_grad_(requires_grad)
        raise ValueError(f"layer {layer.name!r}: {error}") from None
    replace_modules({layer.module: built[layer.name] for layer in chosen if not layer.projection})
    attentions: dict[nn.Module, dict[str, LowRankLayer]] = {}
    for layer in chosen:
        if layer.projection:
            attentions.setdefault(layer.module, {})[layer.projection] = built[layer.name]
    replace_modules({dense: LowRankMultiheadAttention.from_dense(dense, attentions[dense]) for dense in attentions})


def _build(layer: Candidate, settings: LayerSettings, seed: int, built: Mapping[str, LowRankLayer]) -> LowRankLayer:
    """Build the low-rank layer; a tied layer shares the factors of the first."""
    module, kind = layer.module, low_rank_class(layer.module)
    if layer.projection:
        module, kind = _as_linear(layer.weight, module.training), LowRankLinear
        settings = replace(settings, compute="dense")
    assert kind is not None
    if layer.tied_to is not None:
        settings = replace(settings, init="uniform")
    low_rank = kind.from_settings(module, settings, layer.chosen_rank, seed)
    if layer.tied_to is not None:
        first = built[layer.tied_to.name]
        low_rank.factors, low_rank.fixed = first.factors, first.fixed
        low_rank.init_scale, low_rank.zero_factors = first.init_scale, first.zero_factors
    elif settings.decomposes:
        with torch.no_grad():
            layer.error = ((low_rank.weight - layer.weight).norm() / layer.weight.norm()).item()
    return low_rank


def _as_linear(weight: nn.Parameter, training: bool) -> nn.Linear:
    """A linear layer around a weight of an attention, without drawing a new weight."""
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias=False, device="meta").train(training)
    linear.weight = weight
    return linear


def _refuse_for_attention(chosen: Sequence[Candidate], settings: LayerSettings) -> None:
    """Refuse settings that act in a layer's call: an attention reads its layers' weights and never calls them."""
    read = [layer.name for layer in chosen if layer.projection or layer.kind == "NonDynamicallyQuantizableLinear"]
    if read and (settings.dropout or settings.compute == "contracted"):
        setting = f"dropout={settings.dropout}" if settings.dropout else 'compute="contracted"'
        raise ValueError(
            f"{setting} has no effect on {', '.join(read)}: nn.MultiheadAttention reads their weights and does not "
            "call them. Exclude them, or leave the setting out."
        )


def _spec(layer: Candidate, settings: LayerSettings) -> LayerSpec:
    return LayerSpec(
        name=layer.name,
        shape=layer.shape,
        factorization=settings.factorization.to_dict(),
        rank=layer.chosen_rank,
        role=settings.role,
        decouple=settings.decouple,
        half_frozen=settings.half_frozen,
        aliases=layer.aliases,
        scale=update_scale(layer.chosen_rank, settings.alpha, settings.rank_stabilized),
        suffix=layer.suffix,
    )


def _report(layer: Candidate, settings: LowRankSettings) -> LayerReport:
    reason, rank = layer.reason or layer.note, None if layer.reason else layer.chosen_rank
    if rank is None:
        trainable = sum(source.numel() for source in layer.sources if source.requires_grad)
    elif layer.tied_to is not None:
        trainable, reason = 0, f"shares the factors of {layer.tied_to.name}"
    else:
        trainable = settings.factorization.trained_numbers(layer.shape, rank, settings.half_frozen)
        trainable += layer.numbers if settings.train_base and layer.trainable else 0
    return LayerReport(
        name=layer.name,
        kind=layer.kind,
        shape=layer.shape,
        rank=rank,
        parameters=layer.numbers,
        trainable=trainable,
        converted=rank is not None,
        reason=reason,
        error=layer.error,
    )


def _reasons(layers: Sequence[Candidate]) -> str:
    """The reasons as text, each with the names of at most the first few layers."""
    names: dict[str, list[str]] = {}
    for layer in layers:
        names.setdefault(layer.reason, []).append(layer.name)
    return "; ".join(f"{join_names(found)}: {reason}" for reason, found in names.items()) or "it has no such layers"
