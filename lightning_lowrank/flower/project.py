"""The Flower project of a recipe: four small files that ``flwr run`` sends to the server and to every site."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.extras import requirements
from lightning_lowrank.flower.recipe import resolve

_LONGEST_NAME = 32

_PROJECT = """\
# Written by `lightning-lowrank flower`. The package with its extra `flower`, and the recipe's other libraries, must be
# installed where the server and the sites run, from a checkout: the package is on no index, and Flower's apps carry no
# wheel. So started, they send nothing to anyone else, and fetch nothing:
#   export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
#   flower-superlink --disable-runtime-dependency-installation ...
#   flower-supernode --node-config 'partition-id=0' ...        (on each site, partition-id from 0 to clients - 1)
#   flwr run . <name of the SuperLink connection> --stream
[project]
name = "{name}"
version = "0.1.0"
description = "A federated run of lightning_lowrank"
dependencies = {dependencies}  # where the machine that wrote this file has the package from

[tool.flwr.app]
publisher = "lightning-lowrank"

[tool.flwr.app.components]
serverapp = "flower_app:server"
clientapp = "flower_app:client"

[tool.flwr.app.config]
start-timeout = 600.0      # seconds to wait for all sites at the start, and for min-sites answers in a round
round-timeout = 3600.0     # seconds to wait for the sites' answers in a round
min-sites = 0              # least number of sites that must answer in a round; 0: federated.min_clients
keep-broadcasts = 100      # rounds whose broadcasts are kept for sites that have not received them
study = "{name}"{padding}  # the server continues from the state of an unfinished study of this name and recipe
on-bad-payload = "skip"    # a site that sends something malformed: "skip" leaves it out, "stop" ends the run
norm-bound = 10.0          # a site whose answer changes the model by so many times the median site's norm is left out
count-bound = 10.0         # a site that claims so many times the median site's samples counts as the median site
nodes = ""                 # ids of the clients' nodes, "1234,5678,...", as `flwr supernode register` prints them
secure-aggregation = false # let the server see the sum of a round's answers alone (methods that need no more)
secure-range = 8.0         # with it, the largest number of a site's change
rounds = 0                 # number of rounds; 0: the recipe's trainer.max_epochs
cohort = 0                 # number of clients that a round draws; 0: the recipe's federated.clients_per_round
seed = -1                  # seed_everything; -1: the recipe's
validate = true            # evaluate the global model on the server's own data; false: the server reads no data
"""

_APP = '''\
"""The recipe next to this file as a Flower app."""

from pathlib import Path

from lightning_lowrank import alias_pytorch_lightning
from lightning_lowrank.flower import client_app, server_app

alias_pytorch_lightning()  # for libraries that import the older package
recipe = Path(__file__).parent / "recipe.yaml"
server = server_app(recipe)
client = client_app(recipe)
'''


def write_project(configs: Sequence[str | Path], output: str | Path) -> None:
    """Write the project that runs a recipe across sites.

    All objects of the recipe are built once, so that a recipe that cannot work is refused here. Sites approve the file
    ``recipe.yaml``; ``server.yaml`` has this machine's own values.

    Args:
        configs: YAML files as ``lightning-lowrank fit`` takes them, of which later ones change earlier ones.
        output: The folder; its own name becomes the project's.

    Raises:
        MisconfigurationException: If the recipe cannot run across sites, or a file does not exist.
    """
    missing = [str(config) for config in configs if not Path(config).is_file()]
    if missing:
        raise MisconfigurationException(f"{missing[0]} is not a recipe: there is no such file.")
    output = Path(output)
    text, author_values = resolve(configs)
    output.mkdir(parents=True, exist_ok=True)
    # Flower's names begin with a letter and hold letters, digits and hyphens.
    name = re.sub(r"[^A-Za-z0-9]+", "-", output.resolve().name).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}".rstrip("-")
    name = name[:_LONGEST_NAME].rstrip("-")
    dependencies = json.dumps(requirements("flower"))
    project = _PROJECT.format(name=name, padding=" " * max(1, 16 - len(name)), dependencies=dependencies)
    (output / "pyproject.toml").write_text(project, encoding="utf-8")
    (output / "flower_app.py").write_text(_APP, encoding="utf-8")
    (output / "recipe.yaml").write_text(text, encoding="utf-8")
    (output / "server.yaml").write_text(
        yaml.safe_dump(author_values, sort_keys=False, allow_unicode=True), encoding="utf-8"
    )
