"""The console command ``lightning-lowrank``.

- `parser`: the objects that a recipe describes.
- `recipes`: those that come with the package, by name.
- `suggestions`: corrections of misspelt names in a recipe.
- `commands`: the commands. `overview`: their help.
- `inspection`: a run's layers, bytes and problems.
- `runs`: the folders of runs.
- `report`: their table. `plots`: their curves.
"""

from lightning_lowrank.cli.commands import main

__all__ = ["main"]
