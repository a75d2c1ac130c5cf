"""The ``ClientApp`` of a recipe: Flower's messages, handed to the `Site` that they are for."""

from __future__ import annotations

import re
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.compression import DecodingError
from lightning_lowrank.flower.messages import JOIN, LISTEN, TRAIN, Fields, field_of, pack, unpack
from lightning_lowrank.flower.site import Site
from lightning_lowrank.internals.flower import state_folder

__all__ = ["client_app"]


def client_app(recipe: str | Path) -> ClientApp:
    """Return the ``ClientApp`` of a recipe.

    What is the site's own is said where its SuperNode is started, as in
    ``flower-supernode --node-config 'partition-id=0 own-data=true data-root="/data"'``:

    - ``partition-id`` (needed): number of the site's client, from 0.
    - ``num-partitions``: number of clients, which is then compared with the recipe's.
    - ``own-data``: whether the data that the recipe names are here this site's alone. Default false: every site holds
      the whole of them and takes its part by the recipe's partition.
    - ``data-root``: the datamodule's argument ``root`` here.
    - ``state-dir``: folder for what the site keeps from round to round, by default
      ``$FLWR_HOME/lightning_lowrank``. It holds a file for each study and client, which a site that was restarted
      needs, and which a study that goes on in another run of Flower finds again. A site whose file is gone or damaged
      goes on as a new client, and both sides say so.

    Args:
        recipe: The recipe's file.
    """
    app = ClientApp()
    sites: dict[tuple[str, int], Site] = {}

    def site_of(fields: Fields, context: Context) -> Site:
        config = context.node_config
        client = config.get("partition-id")
        if type(client) is not int:
            raise MisconfigurationException(
                "this site does not say which client it is: start its SuperNode with --node-config 'partition-id=0' or"
                f" the like, got {dict(config)}."
            )
        study = field_of(fields, "study", str)
        if not re.fullmatch("[0-9a-f]{16}", study):
            raise DecodingError(f"the study's name is {study[:40]!r}, and should be 16 hexadecimal digits.")
        key = study, client
        if key not in sites:
            clients, root = config.get("num-partitions"), config.get("data-root")
            sites[key] = Site(
                recipe,
                client,
                state_folder(config) / f"study_{study}_client_{client}.safetensors",
                clients=None if clients is None else int(clients),
                own_data=bool(config.get("own-data", False)),
                data_root=None if root is None else str(root),
            )
        return sites[key]

    @app.query(JOIN.split(".")[1])
    def join(message: Message, context: Context) -> Message:
        fields, _ = unpack(message)
        return Message(pack(site_of(fields, context).join()), reply_to=message)

    @app.query(LISTEN.split(".")[1])
    def listen(message: Message, context: Context) -> Message:
        fields, broadcasts = unpack(message)
        site_of(fields, context).listen(broadcasts)
        return Message(pack({}), reply_to=message)

    @app.train(TRAIN.split(".")[1])
    def train(message: Message, context: Context) -> Message:
        fields, broadcasts = unpack(message)
        number, options = field_of(fields, "round", int), field_of(fields, "options", str)
        site = site_of(fields, context)
        if field_of(fields, "lost", bool):
            rank_zero_warn(f"the server says that client {site.client} has lost what it kept: it goes on as a new one.")
        upload = site.train(number, broadcasts, options)
        return Message(pack({"round": number}, {number: upload} if upload else None), reply_to=message)

    return app
