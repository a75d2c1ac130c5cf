"""The console command ``lightning-lowrank``.

- `parser`: the objects that a recipe describes.
- `recipes`: those that come with the package, by name.
- `suggestions`: what a misspelt name of a recipe was to be.
- `commands`: what the command's words do. `overview`: the help that tells them.
- `inspection`: what a run would cost.
- `runs`: what runs left behind, read from their folders.
- `report`: their table. `plots`: their curves.
"""

from lightning_lowrank.cli.commands import main

__all__ = ["main"]
