"""A pretend accelerator over main memory, as strict about devices and generators as CUDA, with counts of its calls.

`install` builds it once (a C++ compiler, ninja and torch's headers; under a minute) and registers it as the device
``strict``, with ``torch.strict`` beside it. Tests on it find CPU tensors that meet the device's, generators of the
wrong device, synchronisations (`calls`), and float64 where a device has none (`without_float64`). They find nothing of
speed, rounding, races, NCCL.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from torch import nn
from torch.utils import cpp_extension

from lightning_lowrank.internals.torch import has_float64

NAME = "strict"
SYNC = "SYNC "
"""With which the names of calls begin after which the host waits for the device."""


def unsupported_reason() -> str:
    """Say why it cannot be built here, or return an empty string."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        return "there is no C++ compiler (g++ or clang++) to build the strict device"
    if not cpp_extension.is_ninja_available():
        return "there is no ninja to build the strict device (pip install ninja)"
    return ""


@functools.cache
def install() -> Any:
    """Build the device, register it, and return what is built."""
    text = Path(__file__).with_name("strict_device.cpp").read_bytes()
    # Of its own for each text, and with a copy of it: checkouts that differ would replace each other's, in use or not.
    version = f"{torch.__version__}_{hashlib.sha256(text).hexdigest()[:12]}"
    folder = Path(tempfile.gettempdir()) / f"strict_device_{version}"
    folder.mkdir(exist_ok=True)
    source = folder / "strict_device.cpp"
    if not source.exists():
        unfinished = source.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(text)
        unfinished.replace(source)
    flags = ["-O1", "-g0", "-w"]
    built = cpp_extension.load(
        "strict_device", [str(source)], extra_cflags=flags, build_directory=str(folder), with_cuda=False
    )
    torch.utils.rename_privateuse1_backend(NAME)
    built.register_hooks()
    torch._register_device_module(NAME, _module(built))
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    nn.Module._apply = _keeping_parameters(nn.Module._apply)  # type: ignore[method-assign]
    for name in ("cpu", "clone", "to"):
        setattr(torch.storage._StorageBase, name, _of_storage(name))
    return built


def _keeping_parameters(apply: Any) -> Any:
    """Let parameters stay the same objects when a module moves, as they do between the CPU and CUDA."""

    @functools.wraps(apply)
    def applied(self: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
        swapping = torch.__future__.get_swap_module_params_on_conversion()
        before = {parameter.device for parameter in self.parameters(recurse)}
        after = {function(torch.empty(0, device=device)).device for device in before}
        if swapping or before == after:
            return apply(self, function, recurse)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return apply(self, function, recurse)
        except RuntimeError as error:
            if "Couldn't swap" not in str(error):
                raise
            # Somebody holds a graph of them, as the traceback of an error does.
            torch.__future__.set_swap_module_params_on_conversion(False)
            return apply(self, function, recurse)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swapping)

    return applied


def _module(built: Any) -> types.ModuleType:
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.current_device = lambda: 0
    module.device_count = lambda: 1
    module.set_device = lambda device: None
    module.device = lambda device: contextlib.nullcontext()
    module.synchronize = lambda device=None: built.count(f"{SYNC}synchronize")
    module.default_generators = ()
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.memory_allocated = lambda device=None: built.memory_allocated()
    module.max_memory_allocated = lambda device=None: built.max_memory_allocated()
    module.reset_peak_memory_stats = lambda device=None: built.reset_peak()

    def manual_seed(seed: int) -> None:
        built.count("manual_seed")
        built.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)

    def get_rng_state(device: Any = None) -> torch.Tensor:
        built.count("get_rng_state")
        return built.get_state()

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        built.count("set_rng_state")
        built.set_state(state)

    module.manual_seed = module.manual_seed_all = manual_seed
    module.get_rng_state, module.set_rng_state = get_rng_state, set_rng_state
    module.get_rng_state_all = lambda: [get_rng_state()]
    module.set_rng_state_all = lambda states: [set_rng_state(state) for state in states]
    return module


def _of_storage(name: str) -> Any:
    """Return a storage's method that knows the device; torch gives such devices none."""
    original = getattr(torch.storage._StorageBase, name)

    def method(self: Any, **keywords: Any) -> Any:
        there = torch.device(keywords.get("device", self.device)).type
        if NAME not in (self.device.type, there):
            return original(self, **keywords)
        tensor = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self, 0, (self.size(),))
        return getattr(tensor, name)(**keywords).untyped_storage()

    return method


@contextlib.contextmanager
def without_float64() -> Iterator[None]:
    """Let the device have no float64, as Apple's have none."""
    built = install()
    built.set_float64(False)
    has_float64.cache_clear()
    try:
        yield
    finally:
        built.set_float64(True)
        has_float64.cache_clear()


@contextlib.contextmanager
def calls() -> Iterator[Counter[str]]:
    """Count the device's calls by name; what makes the host wait begins with `SYNC`."""
    built, found = install(), Counter[str]()
    before = Counter(built.counts())
    try:
        yield found
    finally:
        found.update(Counter(built.counts()) - before)


class StrictAccelerator(Accelerator):
    """The device, as Lightning sees it."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return [0]

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(NAME, 0)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def get_device() -> str:
        return NAME

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME
