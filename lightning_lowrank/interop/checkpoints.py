"""Weights from a run's checkpoint: dense ones for the unconverted module, or a PEFT adapter folder."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_lowrank.arguments import listed
from lightning_lowrank.configuration import misconfigured
from lightning_lowrank.interop.peft_export import refuse_changed_base, write_adapter
from lightning_lowrank.interop.peft_layout import Outline
from lightning_lowrank.layers import LayerSpec, dense_state_dict

TRAINED_CHECKPOINTS = "TrainedCheckpoints"
"""Key of `TrainedCheckpoints`' state in a checkpoint: digests of what it leaves out."""


def dense_checkpoint(
    path: str | Path, client: int | None = None, module: torch.nn.Module | None = None
) -> dict[str, Tensor]:
    """Return the unconverted module's state dict from a checkpoint of a converted one; see `load_dense`.

    The state dict of a run without `LowRank` is returned unchanged. What a checkpoint of `TrainedCheckpoints` leaves
    out is taken from ``module``, unconverted and with the weights that the run began with.
    """
    checkpoint = _read(path, client)
    callbacks = checkpoint.get("callbacks", {})
    layers = [LayerSpec.from_dict(layer) for layer in callbacks.get("LowRank", {}).get("layers", [])]
    if module is None and callbacks.get(TRAINED_CHECKPOINTS, {}).get("base"):
        raise misconfigured(
            f"{path} holds only what was trained: use lightning_lowrank.load_dense(path, module), where the module has"
            " the weights that the run began with, or write an adapter folder with --format peft."
        )
    if module is not None:
        own: dict[str, Tensor | None] = dict(module.named_parameters(remove_duplicate=False))
        for spec in layers:
            for name in (spec.name, *spec.aliases):
                own[f"{name}.frozen_weight"] = own.get(f"{name}{spec.suffix}")
        put_back(checkpoint, own, "the module")
    if not layers and any(".factors." in name for name in checkpoint["state_dict"]):
        raise misconfigured(
            f"{path} has low-rank layers but no description of them, because it was saved with save_weights_only=True:"
            " convert a new module with LowRank(...).convert(module), load the state dict into that, and"
            " call lightning_lowrank.recover(module)."
        )
    return dense_state_dict(checkpoint["state_dict"], layers)


def digest_of(tensor: Tensor) -> str:
    """Return a digest of a tensor's type, shape and numbers, the same on all devices."""
    found = hashlib.blake2b(f"{tensor.dtype} {list(tensor.shape)}".encode(), digest_size=16)
    tensor = tensor.detach()
    flatten = getattr(tensor, "__tensor_flatten__", None)
    # A quantised tensor of a class of its own is several plain ones.
    for part in [tensor] if flatten is None else [getattr(tensor, name) for name in flatten()[0]]:
        flat = part.cpu().contiguous().flatten()
        found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()


def put_back(checkpoint: dict[str, Any], own: Mapping[str, Tensor | None], where: str) -> dict[str, str]:
    """Put what `TrainedCheckpoints` left out into a checkpoint, and return its digests by name.

    Args:
        checkpoint: The checkpoint, which is changed.
        own: Tensors by the names that the checkpoint has.
        where: Whose tensors these are, for messages.

    Raises:
        MisconfigurationException: If one that was left out is not among them, or has other values.
    """
    digests: dict[str, str] = checkpoint.get("callbacks", {}).get(TRAINED_CHECKPOINTS, {}).get("base", {})
    lacking = sorted(name for name in digests if own.get(name) is None)
    if lacking:
        raise misconfigured(
            f"the checkpoint leaves out {len(lacking)} frozen weights that {where} does not have: {listed(lacking)}."
            " Build the module from the same pretrained model."
        )
    found = {name: digest_of(value) for name, value in own.items() if name in digests and value is not None}
    other = sorted(name for name, digest in digests.items() if found[name] != digest)
    if other:
        raise misconfigured(
            f"the checkpoint goes on from other frozen weights than {where} has: {len(other)} of {len(digests)} differ,"
            f" {listed(other)}. Build the module from the pretrained weights that the run began with."
        )
    checkpoint["state_dict"].update({name: own[name].detach() for name in digests})  # type: ignore[union-attr]
    return dict(digests)


def adapter_checkpoint(
    path: str | Path, folder: str | Path, client: int | None = None, prefix: str | None = None
) -> Path:
    """Write the low-rank layers of a checkpoint as a PEFT adapter folder; see `export_adapter` and `load_dense`."""
    checkpoint = _read(path, client)
    described = checkpoint.get("callbacks", {}).get("LowRank", {}).get("outline")
    if described is None and any(".lora_" in name for name in checkpoint["state_dict"]):
        raise misconfigured(
            f"{path} is of a module that PEFT wrapped: load its state dict into such a module, and call"
            " lightning_lowrank.export_adapter(module, folder, base=pretrained_network)."
        )
    if described is None:
        raise misconfigured(
            f"{path} does not describe the layers of its module, as checkpoints of runs with LowRank do unless they"
            " were saved with save_weights_only=True: convert a new module with LowRank(...).convert(module), load the"
            " state dict into that, and call lightning_lowrank.export_adapter(module, folder, base=pretrained_network)."
        )
    loop = checkpoint.get("callbacks", {}).get("FederatedLoop", {})
    if loop:
        refuse_changed_base(loop["algorithm"], loop["server"]["base"])
    return write_adapter(Outline.from_dict(described), checkpoint["state_dict"], folder, prefix)


def _read(path: str | Path, client: int | None) -> dict[str, Any]:
    """Return a checkpoint; with ``client``, its own values replace the global ones."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        told = (str(error).splitlines() or [type(error).__name__])[0]
        raise misconfigured(
            f"{path} cannot be read: it is cut short or damaged, no checkpoint, or holds objects beside tensors and"
            f" plain Python ({told}). Use another checkpoint of the run."
        ) from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise misconfigured(f"{path} is no checkpoint of a Lightning trainer: it has no state_dict.")
    if client is not None:
        loop = checkpoint.get("callbacks", {}).get("FederatedLoop", {})
        server = loop.get("server", {})
        kept = server.get("clients", {})
        # Some operators of FedLoRA make a pair for each client, which the server keeps.
        given = server.get("state", {}).get("pairs", {})
        own = {
            number: {**state.get("buffers", {}), **given.get(number, {}), **state.get("personal", {})}
            for number in kept.keys() | given.keys()
            for state in (kept.get(number, {}),)
        }
        with_own = sorted(number for number, tensors in own.items() if tensors)
        if client not in with_own:
            raise misconfigured(
                f"client {client} keeps no model of its own in {path}: "
                + (f"clients {with_own[:10]} do." if with_own else "its method keeps none on clients.")
            )
        checkpoint["state_dict"].update(own[client])
    return checkpoint


def load_dense(path: str | Path, module: torch.nn.Module, client: int | None = None) -> torch.nn.Module:
    """Load a checkpoint of a converted module into the plain one, and return it.

    Args:
        path: A checkpoint that a trainer with `LowRank` wrote.
        module: A new, unconverted module of the same class. For a checkpoint of `TrainedCheckpoints`, with the frozen
            weights that the run began with.
        client: Id of a client whose own model is used instead of the global one.

    Raises:
        MisconfigurationException: If the file cannot be read, the checkpoint does not describe its layers, it leaves
            out frozen weights that ``module`` does not have, or ``client`` keeps no model of its own in it.
        RuntimeError: If the checkpoint is of another architecture; torch names the tensors that do not fit.
    """
    module.load_state_dict(dense_checkpoint(path, client, module))
    return module
