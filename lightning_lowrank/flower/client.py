"""One site: the recipe's module trained on the site's own data, one client and one round at a time.

The site runs `FederatedLoop` itself, with the partition reduced to its client and the algorithm's server-side hooks
replaced by the wire. Batches, augmentation and dropout are therefore those of the simulation.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import (
    Callback,
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    Timer,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.federated import spill
from lightning_lowrank.federated.algorithm import Algorithm, install
from lightning_lowrank.federated.client import Client, Server, trained_tensors
from lightning_lowrank.federated.partition import ClientIndices, Partition
from lightning_lowrank.federated.payload import Payload
from lightning_lowrank.flower.messages import JOIN, LISTEN, TRAIN, field_of, pack, signature, take_options, unpack
from lightning_lowrank.flower.recipe import Recipe, build, check_optimizers
from lightning_lowrank.flower.replica import replica_of

_QUIET = (
    "--trainer.logger=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.limit_val_batches=0",
)
# What watches a whole run has nothing to see in one client's round.
_ONLY_OF_WHOLE_RUNS = (
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    Timer,
)


class Site:
    """One site of a federation: trains its client in the rounds that ask for it, and keeps up with the others.

    Module, datamodule and trainer are built once and used for every round that this object sees. What a later process
    needs is in one file, which never leaves the site: what the client keeps (`Client.memory`), its last answer,
    broadcasts that it heard and has not needed yet, and, for methods that build on what was before, the site's copy of
    the server's values.

    Args:
        recipe: The recipe.
        client: Number of this site's client, from 0.
        state: The file; it need not be there yet.
        clients: Number of clients of the federation; ``None``: the recipe says.
        own_data: The recipe's data, read here, is this site's alone. Otherwise all sites hold the recipe's whole data,
            and this one takes its part by the recipe's partition.
        data_root: What the datamodule's argument ``root`` is here; ``None``: what the recipe says.

    Raises:
        MisconfigurationException: If the recipe cannot run across sites, or there is no such client.
    """

    def __init__(
        self,
        recipe: str | Path,
        client: int,
        state: str | Path,
        clients: int | None = None,
        own_data: bool = False,
        data_root: str | None = None,
    ) -> None:
        self.client = client
        self._recipe = recipe
        self._clients = clients
        self._own_data = own_data
        self._data_root = data_root
        self._file = Path(state)
        self._built: Recipe | None = None
        self._load()

    @property
    def heard(self) -> int:
        """The last round whose broadcast this site has; -1 before the first."""
        return max(self._known["followed"], *self._known["pending"], -1)

    def join(self) -> dict[str, Any]:
        """Build everything, read the data, and return what the server wants to know of this site.

        Raises:
            MisconfigurationException: If something would not work in a round.
        """
        self._built = None
        recipe = self._ready()
        self._fit(recipe, 0)
        indices = recipe.loop.indices
        assert indices is not None
        if self._clients not in (None, len(indices.sizes)):
            raise MisconfigurationException(
                f"num-partitions={self._clients} was given to this site, and the recipe has {len(indices.sizes)}"
                " clients."
            )
        told = {
            "client": self.client,
            "clients": len(indices.sizes),
            "samples": int(indices.sizes[self.client]),
            "batches": int(recipe.loop._planner.batches[self.client]),
            "heard": self.heard,
            **self._signature,
        }
        # The loop has planned a round of all clients.
        recipe.loop.plan = None
        return told

    def listen(self, broadcasts: Mapping[int, bytes]) -> None:
        """Keep broadcasts of rounds that this site sits out, until it trains again."""
        for number, data in broadcasts.items():
            if number > self._known["followed"]:
                self._known["pending"][number] = _tensor(data)
        self._save()

    def train(self, number: int, broadcasts: Mapping[int, bytes], options: str) -> bytes:
        """Train the client for one round; a round that it has just made is answered as before.

        Args:
            number: The round, from 0.
            broadcasts: What the server sent, encoded: this round's broadcast, if the method has any, and those of
                earlier rounds that the site should have heard.
            options: The optimizers' options in this round, as `options_of` writes them.

        Returns:
            The encoded payload; empty where the method sends nothing.

        Raises:
            DecodingError: If a broadcast cannot be decoded.
            MisconfigurationException: If the client cannot train, or has made a later round.
        """
        if number < self._known["followed"]:
            raise MisconfigurationException(
                f"round {number} was asked of client {self.client}, which has made round {self._known['followed']}."
            )
        if number == self._known["followed"]:
            return _bytes(self._known["upload"])
        recipe = self._ready()
        try:
            kept = {early: _bytes(data) for early, data in self._known["pending"].items()}
            self._round = _Round(number, {**kept, **broadcasts}, options)
            recipe.loop.participants = [[self.client]] * (number + 1)
            self._fit(recipe, number + 1)
        except BaseException:
            # What this round has changed already goes with it.
            self._built = None
            self._load()
            raise
        self._known["followed"] = number
        self._known["pending"] = {}
        self._known["upload"] = _tensor(self._round.upload)
        self._known["client"] = recipe.loop.clients[self.client].memory
        if self._replica.lasting:
            self._known["server"] = self._lasting(recipe.loop.server)
        self._save()
        return self._round.upload

    def _ready(self) -> Recipe:
        if self._built is not None:
            return self._built
        options = list(_QUIET)
        if self._data_root is not None:
            options.append(f"--data.init_args.root={self._data_root}")
        recipe = build([self._recipe], options)
        loop = recipe.loop
        if self._own_data:
            if loop.number_of_clients is None:
                raise MisconfigurationException("sites with data of their own need federated.clients in the recipe.")
            loop.partition = _OneClient(self.client)
        if loop.number_of_clients is not None and not 0 <= self.client < loop.number_of_clients:
            raise MisconfigurationException(
                f"partition-id={self.client}, and the recipe has {loop.number_of_clients} clients, from 0."
            )
        self._replica = replica_of(loop.algorithm)
        self._plain, loop.algorithm = loop.algorithm, _on_site(loop.algorithm, self)
        loop.execution, loop.clients_together, loop.summary = "sequential", None, False
        loop.clients_per_round = loop.sampling_weights = loop.availability = loop.participants = None
        kept = [callback for callback in recipe.trainer.callbacks if not isinstance(callback, _ONLY_OF_WHOLE_RUNS)]
        recipe.trainer.callbacks = [_ConstantSchedules(), *kept]
        self._text = Path(self._recipe).read_text(encoding="utf-8")
        self._server: Server | None = None
        self._round = _Round(-1, {}, "")
        self._built = recipe
        return recipe

    def _fit(self, recipe: Recipe, rounds: int) -> None:
        """Make the last one of so many rounds."""
        fit_loop = recipe.trainer.fit_loop
        done = fit_loop.epoch_progress.current
        done.ready = done.started = done.processed = done.completed = max(rounds - 1, 0)
        fit_loop.max_epochs = rounds
        # Lightning would keep the last round's loader where the number of the round has not grown.
        fit_loop._combined_loader = None
        recipe.trainer.fit(recipe.module, datamodule=recipe.datamodule)

    def _restore(self, server: Server) -> None:
        """Give a server object that is new what this site has followed before."""
        if server is self._server:
            return
        self._server = server
        self._signature = signature(server.module, self._text)
        kept = self._known["server"]
        if kept:
            kept = move_data_to_device(kept, server.device)
            server.state, server.memory = kept["state"], kept["memory"]
            server.initial_buffers = kept["initial_buffers"]
            install({**server.state, **kept["frozen"]}, server.module.state_dict(keep_vars=True))

    def _follow(self, server: Server) -> None:
        """Bring the site's server up to date, and lay ready what this round's broadcast holds."""
        round_, plain = self._round, self._plain
        take_options(server.optimizers, round_.options)
        for number, data in sorted(round_.broadcasts.items()):
            server.round = number
            codec = self._replica.codec(plain, server, Client(self.client, 0))
            tensors = move_data_to_device(codec.decode(data), server.device)
            if number > self._known["followed"]:
                self._replica.follow(plain, server, tensors)
            if number == round_.number:
                round_.received = Payload(tensors, codec)
        server.round = round_.number

    def _lasting(self, server: Server) -> dict[str, Any]:
        trained = trained_tensors(server.module)
        return {
            "state": dict(server.state),
            "memory": server.memory,
            "initial_buffers": server.initial_buffers,
            "frozen": {name: value for name, value in server.module.state_dict().items() if name not in trained},
        }

    def _load(self) -> None:
        self._known: dict[str, Any] = {"followed": -1, "pending": {}, "client": {}, "server": {}}
        if self._file.exists():
            self._known = spill.load(self._file)

    def _save(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        spill.save(self._known, self._file)


@dataclass
class _Round:
    """One round on a site: what came, and what goes."""

    number: int
    broadcasts: dict[int, bytes]
    options: str
    received: Payload = field(default_factory=lambda: Payload({}))
    upload: bytes = b""


class _OnSite(Algorithm):
    """Stands before a method's class: its hooks on a client as they are, those on the server replaced by the wire."""

    _site: Site

    def setup(self, server: Server) -> None:
        super().setup(server)
        self._site._restore(server)

    def begin_round(self, server: Server) -> None:
        self._site._follow(server)

    def broadcast(self, server: Server, client: Client) -> Payload:
        return self._site._round.received

    def every_client_listens(self, server: Server) -> bool:
        return False

    def begin(self, server: Server, client: Client, payload: Payload, model: Mapping[str, Tensor]) -> None:
        client.memory.update(self._site._known["client"])
        super().begin(server, client, payload, model)

    def end(self, server: Server, client: Client, model: Mapping[str, Tensor]) -> Payload:
        payload = super().end(server, client, model)
        self._site._round.upload = payload.encode()
        return payload

    def receive(self, server: Server, client: Client, payload: Payload, weight: float) -> None:
        pass

    def aggregate(self, server: Server) -> None:
        pass

    def global_state(self, server: Server) -> Mapping[str, Tensor]:
        return server.state


def _on_site(algorithm: Algorithm, site: Site) -> Algorithm:
    """Return a method as it runs on a site; it shares all attributes with ``algorithm``."""
    method: Any = type(algorithm)
    twin: Any = object.__new__(_class_on_site(method))
    twin.__dict__ = vars(algorithm)
    twin._site = site
    return twin


@cache
def _class_on_site(method: Any) -> type[Algorithm]:
    # FederatedLoop looks at which hooks of steps a class overrides, so those of the method must be the twin's. Recipes
    # name methods by their classes' names, so the twin's must be another.
    return type(f"_{method.__name__}OnSite", (_OnSite, method), {})


class _OneClient(Partition):
    """The whole training set is one client's; the others' is elsewhere."""

    def __init__(self, client: int) -> None:
        self._client = client

    def split(self, dataset: Any, clients: int | None, *arguments: Any, **keywords: Any) -> ClientIndices:
        size = len(dataset)
        assert clients is not None
        return ClientIndices([range(size) if number == self._client else [] for number in range(clients)], size)

    def assign(self, size: int, clients: int, seed: int, labels: Any, keys: Any) -> ClientIndices:
        raise NotImplementedError


class _ConstantSchedules(Callback):
    """The server tells each round's learning rates; schedulers of the site's own would make other ones."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_optimizers(trainer, pl_module)
        trainer.strategy.lr_scheduler_configs = []


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _bytes(data: Tensor) -> bytes:
    return data.numpy().tobytes()


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
      ``$FLWR_HOME/lightning_lowrank``. It holds a file for each run and client, which a site that was restarted needs.

    Args:
        recipe: The recipe's file.
    """
    app = ClientApp()
    sites: dict[tuple[int, int], Site] = {}

    def site_of(context: Context) -> Site:
        config = context.node_config
        client = config.get("partition-id")
        if type(client) is not int:
            raise MisconfigurationException(
                "this site does not say which client it is: start its SuperNode with --node-config 'partition-id=0' or"
                f" the like, got {dict(config)}."
            )
        key = context.run_id, client
        if key not in sites:
            home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
            folder = Path(str(config.get("state-dir", home / "lightning_lowrank")))
            clients, root = config.get("num-partitions"), config.get("data-root")
            sites[key] = Site(
                recipe,
                client,
                folder / f"run_{context.run_id}_client_{client}.safetensors",
                clients=None if clients is None else int(clients),
                own_data=bool(config.get("own-data", False)),
                data_root=None if root is None else str(root),
            )
        return sites[key]

    @app.query(JOIN.split(".")[1])
    def join(message: Message, context: Context) -> Message:
        return Message(pack(site_of(context).join()), reply_to=message)

    @app.query(LISTEN.split(".")[1])
    def listen(message: Message, context: Context) -> Message:
        _, broadcasts = unpack(message)
        site_of(context).listen(broadcasts)
        return Message(pack({}), reply_to=message)

    @app.train(TRAIN.split(".")[1])
    def train(message: Message, context: Context) -> Message:
        fields, broadcasts = unpack(message)
        number, options = field_of(fields, "round", int), field_of(fields, "options", str)
        upload = site_of(context).train(number, broadcasts, options)
        return Message(pack({"round": number}, {number: upload} if upload else None), reply_to=message)

    return app
