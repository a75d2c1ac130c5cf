"""Loading of transformers' models, by name, folder or configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_lowrank.extras import import_extra
from lightning_lowrank.seeding import derive_seed


def load_pretrained(
    auto_class: str, model: Any, user: str, purpose: str, seed: int, dtype: str = "auto", **arguments: Any
) -> nn.Module:
    """A model of transformers in training mode.

    Args:
        auto_class: Name of the class of transformers that loads it, such as ``AutoModelForCausalLM``.
        model: Name on the hub, local folder, or a configuration: transformers' own, or a dictionary with
            ``model_type``. A configuration gives random weights. A module is returned as it is.
        user: The class that needs the model, for messages.
        purpose: The model's purpose, for messages.
        seed: Seed of the weights that ``model`` does not hold.
        dtype: Type of the weights: ``"auto"`` for the one that they are stored in (float32 for random weights, unless
            the configuration says another), or a name of torch's, such as ``"bfloat16"``.
        arguments: Further ones of transformers' ``from_pretrained`` or ``from_config``.

    Raises:
        MisconfigurationException: If it cannot be loaded, or transformers is not installed.
    """
    if isinstance(model, nn.Module):
        return model
    library = import_extra("transformers", user)
    numbers = getattr(torch, dtype, None)
    if dtype != "auto" and not (isinstance(numbers, torch.dtype) and numbers.is_floating_point):
        raise MisconfigurationException(
            f"dtype must be 'auto' or a floating point type of torch, such as 'bfloat16', got {dtype!r}"
        )
    loader = getattr(library, auto_class)
    # Versions before 4.56 only accept the longer name.
    version = tuple(int(part) for part in library.__version__.split(".")[:2])
    type_argument = "dtype" if version >= (4, 56) else "torch_dtype"
    # transformers initialises weights that a checkpoint lacks from torch's global generator.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            if isinstance(model, str):
                given = {type_argument: "auto" if numbers is None else numbers}
                network = loader.from_pretrained(model, **given, **arguments)
            else:
                config = library.AutoConfig.for_model(**model) if isinstance(model, Mapping) else model
                stored = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or torch.float32
                network = loader.from_config(config, **{type_argument: numbers or stored}, **arguments)
        except (OSError, ValueError, RuntimeError, TypeError, ImportError, AttributeError) as error:
            raise MisconfigurationException(
                f"model={model!r} cannot be loaded as {purpose}: give a name on the Hugging Face hub, a local folder"
                f" with a model, or a configuration with model_type. {error}"
            ) from error
    # transformers leaves a loaded model in evaluation mode, without dropout.
    return network.train()


def head_seed(seed: int) -> int:
    """Seed of the weights that are not pretrained, such as a new head."""
    return derive_seed(seed, "classification head")
