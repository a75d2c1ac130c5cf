"""Frobenius decay: weight decay for the product of factors, without building the product.

Decaying ``U`` and ``V`` on their own is not what decaying the weight ``U Vᵀ`` is. These functions decay the product of
the factors (Khodak et al., 2021; FedHM, Yao et al. 2021), as a term of the loss or directly in the gradients. ``‖U
Vᵀ‖²`` comes from Gram matrices, ``Σ (UᵀU)∘(VᵀV)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from lightning_lowrank.arguments import check_number
from lightning_lowrank.internals.torch import without_autocast
from lightning_lowrank.layers.layer import LowRankLayer, low_rank_layers, terms


@without_autocast()
def frobenius_norm_squared(layer: LowRankLayer, factors: Mapping[str, Tensor] | None = None) -> Tensor:
    """The squared Frobenius norm of the tensor that a layer's factors compose: its update or its weight.

    Args:
        layer: A low-rank layer; in role ``"update"`` the frozen weight does not count.
        factors: Values for trained factors, by name, in place of the layer's own. None by default.

    Returns:
        A scalar through which gradients flow to the factors.

    Example:
        >>> from lightning_lowrank.layers import LowRankLinear, MatrixProduct, frobenius_norm_squared
        >>> layer = LowRankLinear.from_dense(nn.Linear(6, 4), MatrixProduct(), rank=2, role="weight")
        >>> torch.allclose(frobenius_norm_squared(layer), layer.weight.square().sum())
        True
    """
    parts = terms({**dict(layer.factors), **(factors or {})}, layer.fixed, layer.decouple)
    inner, shape = layer.factorization.inner, layer.weight_shape
    total = inner(parts[0], parts[0], shape)
    if layer.decouple:
        total = total + 2 * inner(parts[0], parts[1], shape) + inner(parts[1], parts[1], shape)
    return total * layer.scale**2


def _decaying_layers(model: nn.Module, weight_decay: float) -> dict[str, LowRankLayer]:
    check_number("weight_decay", weight_decay, least=0)
    layers = dict(low_rank_layers(model, tied=False))
    if not layers:
        raise ValueError("model has no low-rank layers, whose products could decay; convert it first.")
    return layers


def frobenius_penalty(model: nn.Module, weight_decay: float) -> Tensor:
    """λ/2 · Σ ‖f‖² over the low-rank layers of a model, a term for the loss.

    Args:
        model: A converted model. Layers that share their factors count once.
        weight_decay: λ, at least 0.

    Returns:
        A scalar.

    Raises:
        ValueError: If ``weight_decay`` is negative or not finite, or the model has no low-rank layers.

    Example:
        >>> from lightning_lowrank.layers import MatrixProduct, convert, frobenius_penalty
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> _ = convert(model, MatrixProduct(), rank=2, role="weight")
        >>> (torch.zeros(()) + frobenius_penalty(model, weight_decay=1e-4)).backward()
    """
    norms = [frobenius_norm_squared(layer) for layer in _decaying_layers(model, weight_decay).values()]
    return weight_decay / 2 * torch.stack([norm.to(norms[0].device) for norm in norms]).sum()


@torch.no_grad()
@without_autocast()
def add_frobenius_decay(
    model: nn.Module,
    weight_decay: float,
    parameters: Iterable[nn.Parameter] | None = None,
    stacks: Mapping[str, Tensor] | None = None,
) -> None:
    """Add the gradients of :func:`frobenius_penalty` to those of the factors, as weight decay does.

    Call it between ``backward`` and the optimizer's step. Factors without a gradient get one.

    Args:
        model: A converted model.
        weight_decay: λ, at least 0.
        parameters: Add only to the gradients of these, such as one optimizer's. By default to those of all
            trainable factors.
        stacks: Stacks ``[clients, …]`` of parameters by their names in the model. Their gradients are changed
            instead of the model's, for each client by its own factors.

    Raises:
        ValueError: If ``weight_decay`` is negative or not finite, or the model has no low-rank layers.

    Example:
        >>> from lightning_lowrank.layers import MatrixProduct, add_frobenius_decay, convert
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        >>> _ = convert(model, MatrixProduct(), rank=2, role="weight")
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> add_frobenius_decay(model, weight_decay=1e-4)
    """
    among = None if parameters is None else set(parameters)
    for prefix, layer in _decaying_layers(model, weight_decay).items():
        own = dict(layer.factors)
        values = own if stacks is None else {name: stacks.get(f"{prefix}.factors.{name}", own[name]) for name in own}
        decayed = {
            name: factor
            for name, factor in values.items()
            if factor.requires_grad
            and (among is None or factor in among)
            and (stacks is None or factor is not own[name])
        }
        if not decayed:
            continue
        gradient_of = grad(partial(frobenius_norm_squared, layer))
        if stacks is not None:
            gradient_of = vmap(gradient_of)
        gradients = gradient_of({name: factor.detach() for name, factor in decayed.items()})
        for name, factor in decayed.items():
            gradient = gradients[name] * (weight_decay / 2)
            factor.grad = gradient if factor.grad is None else factor.grad.add_(gradient)
