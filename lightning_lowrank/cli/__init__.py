"""The console command ``lightning-lowrank``.

- `parser`: the objects that a recipe describes.
- `recipes`: the recipes that come with the package, by name.
- `suggestions`: corrections of misspelt names in a recipe.
- `commands`: the commands. `overview`: their help.
- `inspection`: a run's layers, bytes and problems.
- `runs`: the folders of runs.
- `report`: the comparison of runs. `pages`: its tables and its page.
- `lightning_messages`: filters for Lightning's messages.
"""

from lightning_lowrank.cli.commands import main

__all__ = ["main"]
