"""The rounds, seen from the server: the server's half of the recipe's method, and the sites' messages.

The server is a Lightning fit whose epochs train nothing: `RemoteRounds` stands in for `FederatedLoop`, and lets each
epoch's round happen on the sites. Validation, checkpoints, loggers and early stopping are the recipe's own.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.compression import DecodingError, Packet
from lightning_lowrank.configuration import check_choice
from lightning_lowrank.federated.checks import check_callbacks, notes
from lightning_lowrank.federated.checks import check_optimizers as check_all_are_trained
from lightning_lowrank.federated.coordinator import Coordinator
from lightning_lowrank.federated.data.planner import RoundPlan, RoundPlanner
from lightning_lowrank.federated.loop import FederatedLoop
from lightning_lowrank.federated.messages import Ledger, dense_bytes
from lightning_lowrank.federated.messages import Message as TensorMessage
from lightning_lowrank.federated.offload import ClientStates
from lightning_lowrank.federated.personal import FurtherModels
from lightning_lowrank.federated.state import ClientContext, Server, trained_tensors
from lightning_lowrank.flower.messages import (
    JOIN,
    LISTEN,
    TRAIN,
    check_upload,
    difference,
    field_of,
    options_of,
    pack,
    signature,
    unpack,
)
from lightning_lowrank.flower.recipe import build, check_optimizers
from lightning_lowrank.internals.flower import is_passing
from lightning_lowrank.internals.lightning import TrainLoaderSource, count_steps, log_figures

OnBadPayload = Literal["skip", "stop"]


@dataclass
class _Connected:
    """A site as the server knows it."""

    node: int
    clients: int
    heard: int
    samples: int
    batches: int


@dataclass(frozen=True)
class _Silence:
    """Why there is no answer from a node, and whether one may come if it is asked again."""

    reason: str
    passing: bool


@dataclass(frozen=True)
class _Expected:
    """What a client is to send: meta tensors, `Algorithm.upload_limits`, and what the message is decoded with."""

    form: TensorMessage
    limits: Mapping[str, tuple[int, ...]]
    received: Mapping[str, Tensor]


@dataclass
class _Outcome:
    """What came of a round's messages, by client."""

    arrivals: list[int] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    passing: bool = False


class RemoteRounds(Callback):
    """Stands in for `FederatedLoop` on the server: a round's clients are sites.

    Clients are drawn as `FederatedLoop` draws them, so that a run and its simulation have the same ones. A drawn site
    that is not there, fails, or sends something malformed counts as failed; the round is made of those that answer,
    which must be ``min_clients``. With ``on_client_error="raise"`` an error of a site's fit ends the run. A round that
    nobody answers is asked for again until ``start_timeout`` has passed. A site that comes back gets the broadcasts
    that it has missed, where the method needs them.

    Logged are the ``comm/...`` figures of `Ledger`, here lengths of what was sent, and ``federated/clients``,
    ``federated/failed``, ``federated/samples`` and ``federated/client_steps``.

    Args:
        loop: The recipe's ``federated`` section.
        recipe: The recipe's text, which the sites must have too.
        grid: Flower's way to the sites.
        start_timeout: Seconds to wait for all sites at the start, and for an answer at all in a round.
        round_timeout: Seconds to wait for the sites' answers in a round.
        on_bad_payload: What a malformed payload does: ``"skip"``: its site counts as failed; ``"stop"``: the run ends.
        poll: Seconds between two looks for answers.

    Raises:
        MisconfigurationException: If sites are missing at the start, run something else, or claim the same client; if
            nobody answers in a round.
    """

    def __init__(
        self,
        loop: FederatedLoop,
        recipe: str,
        grid: Grid,
        start_timeout: float = 600.0,
        round_timeout: float = 3600.0,
        on_bad_payload: OnBadPayload = "skip",
        poll: float = 0.5,
    ) -> None:
        check_choice("on-bad-payload", on_bad_payload, OnBadPayload)
        for name, value in (("start-timeout", start_timeout), ("round-timeout", round_timeout)):
            if not value > 0:
                raise MisconfigurationException(f"{name} must be a number of seconds above 0, got {value!r}")
        self.loop = loop
        self.algorithm = loop.algorithm
        self.recipe = recipe
        self.grid = grid
        self.start_timeout = start_timeout
        self.round_timeout = round_timeout
        self.on_bad_payload = on_bad_payload
        self.poll = poll
        self.ledger = Ledger(0)
        self.coordinator: Coordinator
        self._samples: list[int] = []
        self._planner: RoundPlanner
        self._further: FurtherModels
        self._signature: dict[str, Any] = {}
        self._connected: dict[int, _Connected] = {}
        self._known_nodes: set[int] = set()
        self._broadcasts: dict[int, bytes] = {}
        self._figures: dict[str, float] = {}
        self._client_steps = 0

    @property
    def state_key(self) -> str:
        """Name of this callback's state in checkpoints: that of `FederatedLoop`, for whoever exports them."""
        return "FederatedLoop"

    @property
    def server(self) -> Server:
        """The server of this run."""
        return self.coordinator.server

    def state_dict(self) -> dict[str, Any]:
        """Return what the server holds; no run goes on from it."""
        if not self._samples:
            return {}
        state = {"algorithm": type(self.algorithm).__name__, "seed": self.loop.experiment_seed, "execution": "sites"}
        return {**state, "server": self.coordinator.state_dict()}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the training loader's place."""
        if stage == "fit":
            check_callbacks(self, trainer, pl_module, "sites that sit that round out would not know")
            settings: Any = trainer
            TrainLoaderSource(settings).replace(_NoBatch())
            settings.reload_dataloaders_every_n_epochs = 0
            settings.limit_train_batches, settings.overfit_batches = 1.0, 0.0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait for the sites, and let the algorithm look at the module."""
        check_all_are_trained(trainer, pl_module)
        check_optimizers(trainer, pl_module)
        for note in notes(pl_module, self.loop.buffers):
            rank_zero_warn(note)
        server = self.loop.make_server(pl_module, trainer.optimizers)
        self.ledger = Ledger(dense_bytes(pl_module))
        self._signature = signature(pl_module, self.recipe)
        self._meet_all()
        self._samples = [self._connected[client].samples for client in range(len(self._connected))]
        server.clients = len(self._samples)
        self._planner = RoundPlanner(
            seed=self.loop.experiment_seed,
            batches=np.array([self._connected[client].batches for client in range(server.clients)]),
            per_round=self.loop.cohort_size(server.clients),
            sampling_weights=self.loop.sampling_weights,
            participants=self.loop.participants,
            availability=self.loop.availability,
        )
        self.coordinator = Coordinator(self.loop, server, self._samples, ClientStates(), self.ledger)
        self.coordinator.check_cohort(self.loop.cohort_size(server.clients))
        self._further = FurtherModels(None, self.coordinator)
        self.coordinator.setup()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the sites make a round, and fold in what they send."""
        plan, live = self._planner.plan(trainer.current_epoch), trained_tensors(pl_module)
        # Clients that sit the round out are counted as they hear of it.
        self.coordinator.begin_round(plan, live, idle=0)
        outcome = self._hear(plan, options_of(trainer.optimizers), live)
        self.coordinator.failed = outcome.failures
        self.coordinator.aggregate()
        self.coordinator.show_global(live)
        steps = sum(self._connected[client].batches for client in outcome.arrivals)
        self._client_steps += steps
        count_steps(trainer, steps)
        self._figures = {
            "federated/clients": len(outcome.arrivals),
            "federated/failed": len(outcome.failures),
            "federated/samples": sum(self._samples[client] for client in outcome.arrivals),
            "federated/client_steps": self._client_steps,
        }

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Evaluate the method's further global models."""
        if not trainer.sanity_checking:
            self._further.evaluate(trainer, pl_module, "validate")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the round's figures."""
        log_figures(trainer, {**self.ledger.metrics(), **self._figures})

    def _meet_all(self) -> None:
        """Wait until the site of every client has joined."""
        deadline = time.monotonic() + self.start_timeout
        count = self.loop.clients
        while True:
            wrong = self._meet()
            if wrong:
                raise MisconfigurationException(f"a site cannot take part: {'; '.join(wrong)}.")
            count = count or next((site.clients for site in self._connected.values()), None)
            missing = [client for client in range(count or 1) if client not in self._connected]
            if count is not None and not missing:
                break
            if time.monotonic() > deadline:
                raise MisconfigurationException(
                    f"the recipe has {count if count is not None else 'an unknown number of'} clients, and after"
                    f" {self.start_timeout:g} s the sites of {len(self._connected)} have joined; missing are"
                    f" {missing[:10]}{' ...' if len(missing) > 10 else ''}. Start one SuperNode for each with"
                    " --node-config 'partition-id=...', or wait longer with start-timeout."
                )
            time.sleep(self.poll)
        rank_zero_info(f"{count} sites have joined")

    def _meet(self) -> list[str]:
        """Let the sites join that are new, and return what is wrong with those that are refused."""
        online = set(self.grid.get_node_ids())
        for client, site in list(self._connected.items()):
            if site.node not in online:
                del self._connected[client]
        unknown = sorted(online - self._known_nodes)
        self._known_nodes = online
        wrong = []
        for node, reply in self._exchange({node: (JOIN, pack({})) for node in unknown}).items():
            if isinstance(reply, _Silence):
                if reply.passing:
                    self._known_nodes.discard(node)
                else:
                    wrong.append(f"node {node}: {reply.reason}")
                continue
            try:
                fields, _ = unpack(reply)
                reason = self._objection(fields)
                if reason:
                    raise DecodingError(f"client {fields.get('client')}: {reason}")
                known = {name: field_of(fields, name, int) for name in ("clients", "heard", "samples", "batches")}
                self._connected[field_of(fields, "client", int)] = _Connected(node, **known)
            except DecodingError as error:
                wrong.append(f"node {node}, {error}")
        return wrong

    def _objection(self, fields: Mapping[str, Any]) -> str:
        """Return why a site cannot take part; an empty string where it can."""
        differs = difference(self._signature, fields)
        if differs:
            return differs
        client, clients = field_of(fields, "client", int), field_of(fields, "clients", int)
        begun = bool(self._samples)
        expected = self.loop.clients or len(self._samples) or clients
        if clients != expected or not 0 <= client < clients:
            return f"it is client {client} of {clients}, and the recipe has {expected} clients, from 0"
        # Later, a site that was restarted may be back before Flower knows that it had gone.
        if client in self._connected and not begun:
            return f"another site has joined as client {client}: each needs a partition-id of its own"
        if field_of(fields, "samples", int) < 0 or field_of(fields, "batches", int) < 0:
            return "it tells of negative numbers of samples"
        if begun and fields["samples"] != self._samples[client]:
            return f"it had {self._samples[client]} samples when the run began, and now has {fields['samples']}"
        return ""

    def _hear(self, plan: RoundPlan, options: str, live: Mapping[str, Tensor]) -> _Outcome:
        """Send the round's broadcasts, and take in what comes back; ask again while nobody answers."""
        deadline = time.monotonic() + self.start_timeout
        while True:
            for reason in self._meet():
                rank_zero_warn(f"round {plan.round}: a site that came is left out: {reason}")
            outcome = self._ask(plan, options, live)
            for client, reason in sorted(outcome.failures.items()):
                rank_zero_warn(f"round {plan.round} goes on without the site of client {client}: {reason}")
            if outcome.arrivals:
                return outcome
            if not outcome.passing or time.monotonic() > deadline:
                told = "; ".join(f"client {client}: {reason}" for client, reason in sorted(outcome.failures.items()))
                raise MisconfigurationException(f"no site made round {plan.round}: {told}")
            time.sleep(self.poll)

    def _ask(self, plan: RoundPlan, options: str, live: Mapping[str, Tensor]) -> _Outcome:
        coordinator, outcome = self.coordinator, _Outcome()
        requests: dict[int, tuple[str, RecordDict]] = {}
        packets: dict[int, Packet] = {}
        if coordinator.broadcasts_to_all:
            self._broadcasts[plan.round] = coordinator.broadcast(coordinator.info(plan.clients[0])).encode()
        for client in plan.clients:
            if client not in self._connected:
                outcome.failures[client] = "it is not connected"
                outcome.passing = True
                continue
            site = self._connected[client]
            packets[client] = coordinator.broadcast(coordinator.info(client))
            data = packets[client].encode()
            missed = self._missed(site, before=plan.round)
            payloads = {**missed, plan.round: data} if data else missed
            requests[site.node] = TRAIN, pack({"round": plan.round, "options": options}, payloads)
            self.ledger.down(len(data))
            self.ledger.idle(sum(map(len, missed.values())))
        for client, site in self._connected.items():
            missed = self._missed(site, before=plan.round + 1)
            if missed and client not in plan.clients and site.batches:
                requests[site.node] = LISTEN, pack({}, missed)
                self.ledger.idle(sum(map(len, missed.values())))
        expected = self._expect(packets, live)
        replies = self._exchange(requests)
        for client, site in sorted(self._connected.items()):
            reply = replies.get(site.node)
            if isinstance(reply, _Silence) and client in expected:
                outcome.failures[client] = reply.reason
                outcome.passing |= reply.passing
                if self.loop.on_client_error == "raise" and not reply.passing:
                    raise MisconfigurationException(
                        f"round {plan.round}: the site of client {client} failed: {reply.reason}"
                    )
            elif isinstance(reply, Message):
                site.heard = plan.round
                if client in expected:
                    self._take(client, reply, expected[client], outcome)
        return outcome

    def _take(self, client: int, reply: Message, expected: _Expected, outcome: _Outcome) -> None:
        """Let the method take in what a site sent, or note why it cannot."""
        coordinator = self.coordinator
        info, base = coordinator.info(client), coordinator.server.base

        def decode(data: bytes) -> Mapping[str, Tensor]:
            return coordinator.wire.decode_up(base, data, expected.received, expected.form.codec)

        try:
            fields, payloads = unpack(reply)
            if field_of(fields, "round", int) != info.round or payloads.keys() - {info.round}:
                raise DecodingError(f"it answers for another round: {fields.get('round')}.")
            data = payloads.get(info.round, b"")
            self.ledger.up(len(data))
            tensors = check_upload(data, expected.form.tensors, decode, expected.limits, coordinator.infinite)
            coordinator.take(info, move_data_to_device(tensors, base.device))
        except ValueError as error:
            outcome.failures[client] = f"it sent a bad payload: {error}"
            if self.on_bad_payload == "stop":
                raise MisconfigurationException(
                    f"round {info.round}: the site of client {client} failed: {outcome.failures[client]}"
                ) from error
        else:
            outcome.arrivals.append(client)

    def _missed(self, site: _Connected, before: int) -> dict[int, bytes]:
        return {number: data for number, data in self._broadcasts.items() if site.heard < number < before}

    def _expect(self, packets: Mapping[int, Packet], live: Mapping[str, Tensor]) -> dict[int, _Expected]:
        """Return what clients are to send, by doing here what they do there, but for their steps."""
        coordinator, algorithm = self.coordinator, self.algorithm
        base = coordinator.server.base
        expected = {}
        try:
            for client, packet in packets.items():
                info = coordinator.info(client)
                # What the client's half leaves behind goes with the copies.
                copied = dataclasses.replace(base, state=dict(base.state))
                state = algorithm.stand_in(coordinator.server, info)
                context = ClientContext(**vars(info), base=copied, model=live, state=state, steps=1)
                algorithm.configure(base, info)
                algorithm.begin(context, TensorMessage(packet.received))
                sent = algorithm.end(context)
                form = {name: value.detach().to("meta") for name, value in sent.tensors.items()}
                received = packet.received if coordinator.wire.uplink.codecs else {}
                limits = algorithm.upload_limits(base, info)
                expected[client] = _Expected(TensorMessage(form, sent.codec), limits, received)
        finally:
            coordinator.show_global(live)
        return expected

    def _exchange(self, requests: Mapping[int, tuple[str, RecordDict]]) -> dict[int, Message | _Silence]:
        """Send messages to nodes, and return each one's reply, or why there is none."""
        if not requests:
            return {}
        messages = [
            Message(content, dst_node_id=node, message_type=kind, ttl=self.round_timeout)
            for node, (kind, content) in requests.items()
        ]
        sent = dict(zip(self.grid.push_messages(messages), requests, strict=True))
        pending = {number: node for number, node in sent.items() if number}
        replies: dict[int, Message | _Silence] = {
            node: _Silence("Flower did not take its message", passing=True)
            for node in requests
            if node not in pending.values()
        }
        deadline = time.monotonic() + self.round_timeout
        while pending:
            late = time.monotonic() > deadline
            online = set(self.grid.get_node_ids())
            for reply in self.grid.pull_messages(list(pending)):
                node = pending.pop(reply.metadata.reply_to_message_id)
                # Flower itself answers for a node that has gone, with an error of its own.
                replies[node] = (
                    _Silence(reply.error.reason or "it failed", passing=is_passing(reply.error))
                    if reply.has_error()
                    else reply
                )
            for number, node in list(pending.items()):
                if late or node not in online:
                    reason = f"it did not answer within {self.round_timeout:g} s" if late else "it has gone"
                    replies[node] = _Silence(reason, passing=True)
                    del pending[number]
            if pending:
                time.sleep(self.poll)
        return replies


class _NoBatch:
    """Stands in the trainer for a training loader: one batch of nothing for each round."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[None]:
        yield None


def serve(recipe: str | Path, grid: Grid, validate: bool = True, **settings: Any) -> pl.Trainer:
    """Run a recipe across the sites that a grid reaches, and return the trainer, whose module is the global model.

    ``settings`` are further arguments of `RemoteRounds`. Unless ``validate`` the server reads no data.
    """
    built = build([recipe], () if validate else ("--trainer.limit_val_batches=0",))
    rounds = RemoteRounds(built.loop, Path(recipe).read_text(encoding="utf-8"), grid, **settings)
    callbacks = built.trainer.callbacks
    callbacks[callbacks.index(built.loop)] = rounds
    with warnings.catch_warnings():
        for told in ("train_dataloader yielded None", "Detected call of `lr_scheduler.step\\(\\)` before"):
            warnings.filterwarnings("ignore", f".*{told}.*")
        if validate:
            built.trainer.fit(built.module, datamodule=built.datamodule)
        else:
            built.trainer.fit(built.module, train_dataloaders=_NoBatch())
    return built.trainer


def server_app(recipe: str | Path) -> ServerApp:
    """Return the ``ServerApp`` of a recipe.

    It reads ``start-timeout``, ``round-timeout``, ``on-bad-payload`` and ``validate`` from the run's configuration
    (``flwr run --run-config 'round-timeout=60.0'``); see `RemoteRounds`.

    Args:
        recipe: The recipe's file.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        known = ("start-timeout", "round-timeout", "on-bad-payload", "validate")
        settings: dict[str, Any] = {
            name.replace("-", "_"): context.run_config[name] for name in known if name in context.run_config
        }
        serve(recipe, grid, **settings)

    return app
