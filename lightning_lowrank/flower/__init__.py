"""The bridge to Flower: a recipe's federated run across sites that keep their data.

``lightning-lowrank flower --config recipe.yaml OUT/`` writes a small Flower project, which ``flwr run OUT/`` starts.
The recipe's `Algorithm` runs as a Flower ``ServerApp``, and each site trains the recipe's module with `FederatedLoop`
itself in a ``ClientApp``, so that a run in which all sites have the recipe's data set equals its simulation: in the
model, to rounding, and in the bytes that cross the wire. That holds for every method, because the two halves of an
`Algorithm` meet only in messages.

Settings that need another party's data, state or steps are refused:

- ``personal_test`` and `StaticBatchNorm`, because clients' models and samples stay on their sites;
- ``system``, because real sites take their own time;
- ``client_dropout``, because real sites fail by themselves, and ``attackers``, which are simulated;
- learning rate schedulers that step within clients, and projected optimizers with a ``refresh_interval``: in a
  simulation they continue from the round's longest client, and sites know nothing of each other's steps;
- ``ckpt_path``, ``max_steps``, ``fast_dev_run``, several ``devices`` and several ``seeds``.

The modules are:

- `remote_rounds`: the rounds, seen from the server. `server`: the ``ServerApp`` that runs them.
- `transport`: their messages on Flower's grid. `messages`: the messages' content.
- `members`: the sites of a run. `intake`: checks of their answers. `secure`: secure aggregation.
- `site`: one site. `client`: the ``ClientApp`` that hands messages to it.
- `policy`: a site's limits. `approval`: the recipes that a site has approved.
- `privacy_account`: a site's privacy account. `audit`: its audit log.
- `recipe`: the objects that a recipe describes. `project`: the project's files.

Torch and Flower are imported when one of the names below is first used: ``lightning-lowrank flower approve`` needs
neither.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_lowrank.extras import how_to_install

if TYPE_CHECKING:
    from lightning_lowrank.flower.client import client_app
    from lightning_lowrank.flower.project import write_project
    from lightning_lowrank.flower.recipe import resolve
    from lightning_lowrank.flower.remote_rounds import RemoteRounds
    from lightning_lowrank.flower.server import server_app
    from lightning_lowrank.flower.site import Site

__all__ = ["RemoteRounds", "Site", "client_app", "resolve", "server_app", "write_project"]

_HOMES = {
    "RemoteRounds": "remote_rounds",
    "Site": "site",
    "client_app": "client",
    "resolve": "recipe",
    "server_app": "server",
    "write_project": "project",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec("flwr") is None:
        raise ImportError(f"Flower is not installed: {how_to_install('flower')} (Python 3.11 or later).")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
