"""The bridge to Flower: a recipe's federated run across sites that keep their data.

``lightning-lowrank flower --config recipe.yaml OUT/`` writes a small Flower project, which ``flwr run OUT/`` starts.
The recipe's `Algorithm` runs as a Flower ``ServerApp``, and each site trains the recipe's module with `FederatedLoop`
itself in a ``ClientApp``, so that a run in which all sites have the recipe's data set equals its simulation.

- `server`: the rounds, seen from the server.
- `client`: one site.
- `replica`: what of the server's state a site must follow, and which methods a site can follow.
- `messages`: what crosses the wire.
- `recipe`: the objects that a recipe describes.
- `project`: the project's files.
"""

from importlib.util import find_spec

if find_spec("flwr") is None:
    raise ImportError('Flower is not installed: pip install "lightning_lowrank[flower]" (Python 3.11 or later).')

from lightning_lowrank.flower.client import Site, client_app
from lightning_lowrank.flower.project import write_project
from lightning_lowrank.flower.server import RemoteRounds, server_app

__all__ = ["RemoteRounds", "Site", "client_app", "server_app", "write_project"]
