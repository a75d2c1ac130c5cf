"""Exchange of weights with Hugging Face's PEFT and transformers, and support for pytorch_lightning libraries."""

from lightning_lowrank.interop.checkpoints import load_dense
from lightning_lowrank.interop.hub import pull_adapter, push_adapter
from lightning_lowrank.interop.peft_export import export_adapter
from lightning_lowrank.interop.peft_import import import_adapter
from lightning_lowrank.pytorch_lightning_alias import alias_pytorch_lightning

__all__ = [
    "alias_pytorch_lightning",
    "export_adapter",
    "import_adapter",
    "load_dense",
    "pull_adapter",
    "push_adapter",
]
