"""`alias_pytorch_lightning`, for libraries that import the older package ``pytorch_lightning``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType

_ALIASES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


def alias_pytorch_lightning() -> None:
    """Make ``import pytorch_lightning`` give ``lightning.pytorch``, whose classes this package works with.

    Both packages define the same classes separately. Modules and callbacks of a library that imports the older package
    work in federated rounds after this call, which must come before the library's import. ``lightning_fabric`` becomes
    ``lightning.fabric``. Neither older package has to be installed. The command ``lightning-lowrank`` and the apps that
    ``lightning-lowrank flower`` writes begin with this call.

    Raises:
        MisconfigurationException: If one of the older packages has been imported already.

    Example:
        >>> alias_pytorch_lightning()
        >>> import pytorch_lightning.callbacks
        >>> pytorch_lightning.callbacks.ModelCheckpoint
        <class 'lightning.pytorch.callbacks.model_checkpoint.ModelCheckpoint'>
    """
    if any(isinstance(finder, _Aliases) for finder in sys.meta_path):
        return
    imported = [name for name in _ALIASES if name in sys.modules]
    if imported:
        # Imported here, because the command line imports this module first, and its help must come without delay.
        from lightning_lowrank.configuration import misconfigured

        raise misconfigured(
            f"{imported[0]} has been imported already: call alias_pytorch_lightning() before it and before the"
            " libraries that use it."
        )
    sys.meta_path.insert(0, _Aliases())


class _Aliases(MetaPathFinder, Loader):
    """Import hook: each module of an older package is the newer package's own module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, dot, rest = fullname.partition(".")
        if package not in _ALIASES:
            return None
        found = find_spec(_ALIASES[package] + dot + rest)
        return None if found is None else spec_from_loader(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        package, dot, rest = spec.name.partition(".")
        module = import_module(_ALIASES[package] + dot + rest)
        # The import system overwrites the module's spec; `exec_module` restores it.
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
