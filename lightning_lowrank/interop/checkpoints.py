"""Weights from a run's checkpoint, as dense weights of the unconverted module or as a PEFT adapter folder."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lowrank.arguments import first_ten, join_names
from lightning_lowrank.buffers import under_all_names
from lightning_lowrank.configuration import check_complete, misconfigured
from lightning_lowrank.extras import import_extra
from lightning_lowrank.internals.peft import keep_base_changes
from lightning_lowrank.internals.torch import digest_of
from lightning_lowrank.interop.peft_export import (
    export_wrapped,
    refuse_changed_base,
    refuse_inexpressible,
    root_of,
    wrapped_tensors,
    write_adapter,
)
from lightning_lowrank.interop.peft_layout import Outline, check_folder, check_path_and_module, uncompiled
from lightning_lowrank.layers import LayerSpec, dense_state_dict

TRAINED_CHECKPOINTS = "TrainedCheckpoints"
"""Key of `TrainedCheckpoints`' state in a checkpoint: digests of the weights that it leaves out."""

# Names of parameters that PEFT's methods add to or wrap around a layer.
_ADAPTER = re.compile(r"\.(base_layer|modules_to_save|lora_\w+|ia3_l|vera_lambda_\w|prompt_encoder)\b")


def dense_checkpoint(
    path: str | Path, client: int | str | None = None, module: nn.Module | None = None
) -> dict[str, Tensor]:
    """The unconverted module's state dict, from a checkpoint of a converted module; see `load_dense`.

    The state dict of a run without `LowRank` is returned unchanged. The weights that a checkpoint of
    `TrainedCheckpoints` leaves out come from ``module``, unconverted and with the weights with which the run began.
    """
    checkpoint = _read(path, client)
    callbacks = checkpoint["callbacks"]
    with _as_written(path, "LowRank"):
        layers = [LayerSpec.from_dict(layer) for layer in callbacks["LowRank"].get("layers", [])]
    if module is None and callbacks[TRAINED_CHECKPOINTS].get("base"):
        raise misconfigured(
            f"{path} holds only trained tensors: use lightning_lowrank.load_dense(path, module) with a module that has"
            " the weights with which the run began or, on the command line, give the run's --config; or write an"
            " adapter"
            " folder with --format peft."
        )
    if module is not None:
        _put_back_frozen(checkpoint, layers, module)
    if not layers and any(".factors." in name for name in checkpoint["state_dict"]):
        raise misconfigured(
            f"{path} has low-rank layers but no description of them: it was saved with save_weights_only=True, or its"
            " module was converted without LowRank. Convert a new module as the run did, with"
            " LowRank(...).convert(module) or lightning_lowrank.convert(module, ...), load the state dict into that,"
            " and call lightning_lowrank.recover(module)."
        )
    return dense_state_dict(checkpoint["state_dict"], layers)


def restore_frozen(checkpoint: dict[str, Any], own: Mapping[str, Tensor | None], where: str) -> dict[str, str]:
    """Restore frozen weights that `TrainedCheckpoints` left out of a checkpoint, and return their digests by name.

    They are converted to the type that they had in the run: a trainer with ``precision="bf16-true"`` converts the
    module after it has loaded the checkpoint.

    Args:
        checkpoint: The checkpoint, which is changed.
        own: Tensors by the names that the checkpoint has.
        where: Whose tensors these are, for messages.

    Raises:
        MisconfigurationException: If one that was left out is not among them, or has other values.
    """
    kept = checkpoint.get("callbacks", {}).get(TRAINED_CHECKPOINTS, {})
    digests: dict[str, str] = kept.get("base", {})
    lacking = sorted(name for name in digests if own.get(name) is None)
    if lacking:
        raise misconfigured(
            f"the checkpoint leaves out {len(lacking)} frozen weights that {where} does not have:"
            f" {join_names(lacking)}."
            " Build the module from the same pretrained model."
        )
    types = kept.get("types", {})
    values = {name: _of_type(value, types.get(name)) for name, value in own.items() if name in digests}
    other = sorted(name for name, digest in digests.items() if digest_of(values[name]) != digest)
    if other:
        raise misconfigured(
            f"the checkpoint belongs to other frozen weights than {where} has: {len(other)} of {len(digests)} differ,"
            f" {join_names(other)}. Build the module from the pretrained weights that the run began with."
        )
    checkpoint["state_dict"].update(values)
    return dict(digests)


def _of_type(value: Tensor | None, dtype: Any) -> Tensor:
    """A tensor with numbers of a type, if both types are floating-point ones."""
    assert value is not None
    both = value.is_floating_point() and isinstance(dtype, torch.dtype) and dtype.is_floating_point
    return value.detach().to(dtype) if both else value.detach()


def adapter_checkpoint(
    path: str | Path,
    folder: str | Path,
    client: int | str | None = None,
    prefix: str | None = None,
    module: nn.Module | None = None,
) -> Path:
    """Write a checkpoint's adapter as a PEFT adapter folder; see `export_adapter` and `load_dense`.

    ``module`` is a new one of the run's class with the weights that the run began with: unconverted, or wrapped by
    PEFT. It is needed, and is changed, if PEFT wrapped the module. It is needed as well if the run has changed
    frozen weights: the changes become part of the adapter.
    """
    import_extra("peft", "a PEFT adapter folder")
    check_folder(Path(folder))
    checkpoint = _read(path, client)
    callbacks = checkpoint["callbacks"]
    described = callbacks["LowRank"].get("outline")
    loop = callbacks["FederatedLoop"]
    with _as_written(path, "FederatedLoop"):
        state: Mapping[str, Any] = loop["server"]["base"] if loop else {}
    if described is None and module is not None and any(hasattr(part, "peft_config") for part in module.modules()):
        return _wrapped_adapter(checkpoint, state, Path(folder), module)
    if described is None and any(_ADAPTER.search(name) for name in checkpoint["state_dict"]):
        raise misconfigured(
            f"{path} is of a module that PEFT wrapped, which a checkpoint does not describe: give"
            " `lightning-lowrank export` the run's --config, which builds the module; or load the state dict into"
            " such a module, and call lightning_lowrank.export_adapter(module, folder, base=pretrained_network)."
        )
    if described is None:
        raise misconfigured(
            f"{path} does not describe the layers of its module, as checkpoints of runs with LowRank do unless they"
            " were saved with save_weights_only=True. Convert a new module as the run did, with"
            " LowRank(...).convert(module) or lightning_lowrank.convert(module, ...), load the state dict into that,"
            " and call lightning_lowrank.export_adapter(module, folder, base=pretrained_network)."
        )
    with _as_written(path, "LowRank"):
        outline = Outline.from_dict(described)
        layers = [LayerSpec.from_dict(layer) for layer in callbacks["LowRank"]["layers"]]
    refuse_inexpressible(outline)
    if module is None:
        if loop:
            refuse_changed_base(loop.get("algorithm", "the method"), state)
        return write_adapter(outline, checkpoint["state_dict"], folder, prefix)
    _put_back_frozen(checkpoint, layers, module)
    base = module.get_submodule(root_of(outline, prefix).removesuffix("."))
    return write_adapter(outline, checkpoint["state_dict"], folder, prefix, base, state.get("sums", {}))


def _wrapped_adapter(checkpoint: dict[str, Any], state: Mapping[str, Any], folder: Path, module: nn.Module) -> Path:
    """Write the adapter of a checkpoint whose module PEFT wrapped."""
    restore_frozen(checkpoint, dict(module.named_parameters(remove_duplicate=False)), "the module")
    base = wrapped_tensors(module)
    keep_base_changes(module)
    try:
        module.load_state_dict(checkpoint["state_dict"], strict=_is_strict(module))
    except RuntimeError as error:
        said = " ".join(str(error).split())
        raise misconfigured(f"the checkpoint is of another module than the one that was given: {said}") from error
    return export_wrapped(module, folder, base=base, sums=state.get("sums", {}))


def _put_back_frozen(checkpoint: dict[str, Any], layers: Sequence[LayerSpec], module: nn.Module) -> None:
    """Restore frozen weights in the checkpoint of a converted module, from the unconverted ``module``."""
    named = {uncompiled(name): value for name, value in module.named_parameters(remove_duplicate=False)}
    digests = checkpoint["callbacks"][TRAINED_CHECKPOINTS].get("base", {})
    own: dict[str, Tensor | None] = {name: named.get(uncompiled(name)) for name in digests}
    for spec in layers:
        for name in (spec.name, *spec.aliases):
            own[f"{name}.frozen_weight"] = named.get(uncompiled(f"{name}{spec.suffix}"))
    restore_frozen(checkpoint, own, "the module")


def check_is_file(path: str | Path) -> None:
    """Raise if a path is not that of a file.

    Raises:
        MisconfigurationException: If there is nothing, or a folder.
    """
    path = Path(path)
    if path.is_dir():
        inside = sorted(str(each) for each in path.rglob("*.ckpt") if each.is_file())
        remedy = f"give one of {join_names(inside)}" if inside else "give the .ckpt file of a run"
        raise misconfigured(f"{path} is not a checkpoint, but a folder: {remedy}.")
    if not path.is_file():
        raise misconfigured(f"{path} is not a checkpoint: there is no such file.")


@contextmanager
def _as_written(path: str | Path, callback: str) -> Iterator[None]:
    """A context in which an unreadable state of ``callback`` in a checkpoint raises an error with advice."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise misconfigured(
            f"{path} is not read: its state of {callback} is not as this version writes it ({type(error).__name__}:"
            f" {error}). Use the version of the package that wrote the checkpoint."
        ) from error


def _checked(path: str | Path, checkpoint: Any) -> dict[str, Any]:
    """Check a checkpoint's structure, and give each callback that is read a state, empty if it has none."""
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        tensors = isinstance(checkpoint, Mapping) and any(isinstance(value, Tensor) for value in checkpoint.values())
        plain = ", but a state dict: load it by module.load_state_dict(torch.load(path))" if tensors else ""
        raise misconfigured(f"{path} is no checkpoint of a Lightning trainer (no state_dict){plain}.")
    state, callbacks = checkpoint["state_dict"], checkpoint.get("callbacks") or {}
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise misconfigured(f"{path} is no checkpoint of a Lightning trainer: its state_dict holds no tensors by name.")
    if not any(isinstance(value, Tensor) for value in state.values()):
        held = f"only {join_names([f'{name}={value!r:.40}' for name, value in state.items()])}" if state else "nothing"
        raise misconfigured(f"{path} holds no weights: its state_dict holds {held}. Use another checkpoint of the run.")
    if not isinstance(callbacks, Mapping):
        raise misconfigured(f"{path} is no checkpoint of a Lightning trainer: its callbacks have no states by name.")
    states = {name: callbacks.get(name) or {} for name in ("LowRank", "FederatedLoop", TRAINED_CHECKPOINTS)}
    for name, value in states.items():
        with _as_written(path, name):
            if not isinstance(value, Mapping) or not isinstance(value.get("base", {}), Mapping):
                raise TypeError(f"{value!r:.99}")
    return {**checkpoint, "callbacks": {**callbacks, **states}}


def _read(path: str | Path, client: int | str | None) -> dict[str, Any]:
    """Read a checkpoint; with ``client``, that client's own tensors replace the global ones."""
    check_is_file(path)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    # A damaged file can make torch raise any error.
    except Exception as error:
        objects = _objects_in(path) if isinstance(error, pickle.UnpicklingError) else []
        if objects:
            raise misconfigured(
                f"{path} is not read, because it holds objects other than tensors and plain Python:"
                f" {join_names(objects)}."
                " They are often hyperparameters, which are then in all checkpoints of the run: call"
                " save_hyperparameters(ignore=[...]). If you trust the file, read it inside"
                " torch.serialization.safe_globals([...]) with these classes and functions."
            ) from error
        with open(path, "rb") as file:
            start = file.read(2)
        if start != b"PK" and not start.startswith(b"\x80"):
            what = "torch.save has not written it" if start else "it is empty"
            raise misconfigured(f"{path} is no checkpoint: {what}. Use the .ckpt file of a run.") from error
        # torch's message first explains how to read the file unsafely, and then states the cause.
        lines = str(error).rpartition("WeightsUnpickler error: ")[2].strip().splitlines()
        said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        raise misconfigured(
            f"{path} cannot be read: it is cut short or damaged, or no checkpoint ({said}). Use another checkpoint of"
            " the run."
        ) from error
    checkpoint = _checked(path, checkpoint)
    check_complete(checkpoint["callbacks"]["FederatedLoop"])
    if client is not None:
        loop = checkpoint["callbacks"]["FederatedLoop"]
        with _as_written(path, "FederatedLoop"):
            client = _id_of(client, loop.get("names", ()), path)
            server = loop.get("server", {})
            kept = server.get("clients", {})
            # Some operators of FedLoRA make a pair for each client, which the server stores.
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
        _refuse_incomplete_model(path, client, checkpoint, own)
        saved, everywhere = checkpoint["state_dict"], under_all_names(own[client], server["aliases"])
        saved.update({name: value for name, value in everywhere.items() if name in saved})
    return checkpoint


def _id_of(client: int | str, names: Sequence[str | int], path: str | Path) -> int:
    """The id of a client, given its id or name; a name that is a number takes precedence over an id."""
    ids = {str(name): number for number, name in enumerate(names)}
    if isinstance(client, str) and client in ids:
        return ids[client]
    if isinstance(client, str) and not client.isdecimal():
        known = f"its clients are {first_ten(list(ids))}" if ids else "its clients have no names: give an id"
        raise misconfigured(f"client={client!r} is not in {path}: {known}.")
    return int(client)


def _objects_in(path: str | Path) -> list[str]:
    """Names of the classes and functions in a file that torch refuses to load, as far as torch reports them."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:
        return []


def writable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies of tensors without shared memory, as safetensors needs them.

    Raises:
        MisconfigurationException: If one is of a kind that a ``.safetensors`` file does not hold.
    """
    other = {
        name: kind
        for name, value in tensors.items()
        for kind, found in (
            ("sparse or nested", value.layout is not torch.strided or value.is_nested),
            ("quantised", value.is_quantized),
            ("without data", value.is_meta),
        )
        if found
    }
    if other:
        raise misconfigured(
            f"a .safetensors file holds dense tensors alone, and these are others:"
            f" {join_names([f'{name} ({kind})' for name, kind in other.items()])}. Make them dense before the run is"
            " saved."
        )
    return {name: value.clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}


def _refuse_incomplete_model(
    path: str | Path, client: int, checkpoint: Mapping[str, Any], own: Mapping[int, Mapping[str, Tensor]]
) -> None:
    """Raise if a checkpoint lacks a part of a client's personal model, as ``personal_test`` evaluates it.

    Args:
        path: The checkpoint's file, for messages.
        client: Id of the client.
        checkpoint: The checkpoint.
        own: The tensors that each client has of its own.

    Raises:
        MisconfigurationException: If the model has other BatchNorm statistics, or is a part of the global one.
    """
    loop = checkpoint["callbacks"]["FederatedLoop"]
    # A server of real sites saves no fingerprint; it has no client's state and evaluates no personal model.
    fingerprint = loop.get("fingerprint")
    if fingerprint is None:
        return
    static = fingerprint["callbacks"].get("StaticBatchNorm")
    if static is not None and loop["server"]["round"] >= static["from_round"]:
        raise misconfigured(
            f"client {client}'s own model cannot be taken from {path}: StaticBatchNorm computes its BatchNorm"
            " statistics from the client's training samples when it is evaluated, and the checkpoint does not hold"
            " them. Take the global model, without a client; or train without StaticBatchNorm and with"
            " buffers='local', where clients keep the statistics that they track."
        )
    unlike = loop["server"]["unlike"]
    if client not in unlike:
        return
    whole = [number for number in sorted(own) if own[number] and number not in unlike]
    raise misconfigured(
        f"client {client}'s own model cannot be taken from {path}: with these settings of"
        f" {fingerprint['algorithm']['class']} it is a part of the global model, of smaller width or rank, and the"
        " checkpoint does not hold that part. Take the global model, without a client"
        + (f"; or a client that has all of it: {join_names([str(number) for number in whole])}." if whole else ".")
    )


def load_dense(path: str | Path, module: nn.Module, client: int | str | None = None) -> nn.Module:
    """Load a checkpoint of a converted module into an unconverted one, and return the latter.

    Args:
        path: A checkpoint that a trainer with `LowRank` wrote.
        module: A new, unconverted module of the same class, compiled or not. For a checkpoint of `TrainedCheckpoints`,
            with the frozen weights that the run began with. If its ``strict_loading`` is false, tensors that the
            checkpoint lacks stay as they are.
        client: Id, or name, of a client whose own model, as ``personal_test`` evaluates it, is used instead of the
            global one. The checkpoint must hold all of it: no statistics of `StaticBatchNorm`, nor a part of the global
            model for a client of smaller width or rank.

    Raises:
        MisconfigurationException: If the file cannot be read, the checkpoint does not describe its layers, it leaves
            out frozen weights that ``module`` does not have, or ``client`` has no model of its own in it or only a part
            of one.
        RuntimeError: If the checkpoint is of another architecture; torch names the tensors that do not fit.
    """
    check_path_and_module("load_dense(path, module)", path, module)
    state = dense_checkpoint(path, client, module)
    own = {uncompiled(name): name for name in module.state_dict()}
    renamed = {own.get(uncompiled(name), name): value for name, value in state.items()}
    # load_state_dict() also reads the layers' versions from the original dictionary.
    module.load_state_dict(state if renamed.keys() == state.keys() else renamed, strict=_is_strict(module))
    return module


def _is_strict(module: nn.Module) -> bool:
    """Whether a state dict must have all of a module's tensors: ``strict_loading`` of a LightningModule."""
    return bool(getattr(module, "strict_loading", True))
