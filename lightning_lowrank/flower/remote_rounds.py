"""Rounds across sites, at the server: the server's half of the recipe's method, and the sites' messages.

The server is a Lightning fit whose epochs train nothing: `RemoteRounds` replaces `FederatedLoop`, and has each epoch's
round run on the sites. Validation, checkpoints, loggers and early stopping are the recipe's own.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.aggregation.aggregator import equal_tensors
from lightning_lowrank.arguments import first_ten
from lightning_lowrank.compression import DecodingError, Packet
from lightning_lowrank.configuration import check_choice, check_complete
from lightning_lowrank.federated.checks import (
    check_callbacks,
    local_part_advice,
    marking_incomplete,
    new_basis_advice,
    notes,
    static_batch_norm_advice,
)
from lightning_lowrank.federated.checks import check_optimizers as check_all_are_trained
from lightning_lowrank.federated.client_evaluation import FurtherModels
from lightning_lowrank.federated.client_states import ClientStates
from lightning_lowrank.federated.coordinator import Coordinator
from lightning_lowrank.federated.data.planner import RoundPlan, RoundPlanner
from lightning_lowrank.federated.exchange import Parts
from lightning_lowrank.federated.ledger import Ledger, dense_bytes
from lightning_lowrank.federated.loop import FederatedLoop
from lightning_lowrank.federated.privacy.mean import Drawing
from lightning_lowrank.federated.protocols import Personal, UnequalClients, reference, state_rank
from lightning_lowrank.federated.safe_files import whole_checkpoints
from lightning_lowrank.federated.site import SEED_IS_KNOWN
from lightning_lowrank.federated.state import Server, trained_tensors
from lightning_lowrank.flower.intake import Expected, Intake, expect
from lightning_lowrank.flower.members import Admission, Members
from lightning_lowrank.flower.messages import (
    LISTEN,
    TRAIN,
    field_of,
    numbering,
    options_of,
    pack,
    signature,
    unpack,
)
from lightning_lowrank.flower.recipe import check_optimizers
from lightning_lowrank.flower.secure import (
    SecureRequest,
    check_secure,
    secure_mean,
    with_changes,
)
from lightning_lowrank.flower.transport import Silence, Transport
from lightning_lowrank.internals.lightning import TrainLoaderSource, count_steps, log_figures
from lightning_lowrank.internals.replaced import replaced

OnBadPayload = Literal["skip", "stop"]

_WITHOUT_STATISTICS = (
    "Across sites no party has the samples to recompute them with: use a norm without statistics, such as GroupNorm."
)
_ON_THEIR_SITES = (
    "The sites hold the clients' own models: evaluate them in a simulation, by FederatedLoop(personal_test=...)."
)
# Seconds that a round waits for the answers of new nodes.
_WAIT_FOR_NEW = 60.0
_NO_END = 2**31 - 1


@dataclass
class _Outcome:
    """The outcome of a round's messages: whose count, whose came, and failures by client."""

    arrivals: list[int] = field(default_factory=list)
    answered: set[int] = field(default_factory=set)
    failures: dict[int, str] = field(default_factory=dict)
    passing: bool = False


class RemoteRounds(Callback):
    """Replaces `FederatedLoop` on the server: a round's clients are sites.

    Clients are drawn as `FederatedLoop` draws them, so that a run and its simulation have the same ones. A drawn site
    that is not connected, fails, or sends something malformed counts as failed; the round consists of the other
    answers. With ``on_client_error="raise"`` an error of a site's fit ends the run. While fewer than ``min_sites`` have
    answered, the others are asked again until ``start_timeout`` has passed; then the run ends. A round that has too few
    answers only because of malformed answers or errors is skipped. The run ends if the failing sites of successive
    skipped rounds are half of all or leave fewer than ``min_sites`` others, or with ``federated.privacy``. An answer
    after ``round_timeout`` is dropped. A site that reconnects gets the broadcasts that it has missed, if the method
    needs them.

    Its state is part of the trainer's checkpoints. A fit that is resumed from one continues with the next round. It
    waits for the sites that were connected when the checkpoint was saved, except those that did not answer in its
    round. A site that has already made a round after the checkpoint repeats its answer.

    Logged are the ``comm/...`` figures of `Ledger`, here lengths of sent messages, and ``federated/clients``,
    ``federated/failed``, ``federated/samples`` and ``federated/client_steps``. ``global_step`` counts the steps
    of the sites' optimizers, with manual optimization their batches.

    Args:
        loop: The recipe's ``federated`` section.
        recipe: The recipe's bytes, which the sites must have too.
        grid: Flower's way to the sites.
        start_timeout: Seconds to wait for all sites at the start, and for ``min_sites`` answers in a round.
        round_timeout: Seconds to wait for the sites' answers in a round.
        min_sites: Least number of sites that must answer in a round. 0 (default): ``federated.min_clients``.
        keep_broadcasts: Number of rounds whose broadcasts are kept, if the method needs sites to receive all. A site
            that has missed more is left out.
        on_bad_payload: The consequence of a malformed payload: ``"skip"``: its site counts as failed; ``"stop"``: the
            run ends. In a secure sum only the form of an answer is checked: nobody can tell which masked number is bad.
        poll: Seconds between two looks for answers.
        norm_bound: The largest ratio of an answer's change to the median site's change; see `Intake`.
            ``math.inf``: no limit.
        count_bound: The largest ratio of a site's claimed samples to the median site's. A site that claims more counts
            as the median site does; see `Members`.
        secure_aggregation: Whether the server sees only the sum of a round's answers, by Flower's SecAgg+, for methods
            whose server needs no more; see `secure_mean`.
        secure_range: With it, the largest number of a site's change; a site with a larger one refuses to send it. Each
            number of the mean is rounded by up to this over 2²¹ for each site.
        nodes: Flower's ids of all clients' nodes, in the clients' order and with commas between, as
            ``flwr supernode register`` prints them. Default: the first node that joins as a client is its site.
        broadcasts: The mapping that keeps broadcasts, by round; in memory by default.
        seed: ``seed_everything`` of the study, which is sent to the sites; -1: the recipe's.

    Raises:
        MisconfigurationException: If an argument is out of range; if fewer than ``min_sites`` sites join at the start,
            or their data number classes or columns differently; if fewer than ``min_sites`` answer in a round that is
            not skipped. Nodes that run something else, or claim another site's client, are refused with a warning.
    """

    validated_round: int | None = None
    """``None``: a validation is always of the round that it ends, unlike `FederatedLoop.validated_round`."""

    def __init__(
        self,
        loop: FederatedLoop,
        recipe: bytes,
        grid: Grid,
        start_timeout: float = 600.0,
        round_timeout: float = 3600.0,
        min_sites: int = 0,
        keep_broadcasts: int = 100,
        on_bad_payload: OnBadPayload = "skip",
        poll: float = 0.5,
        norm_bound: float = 10.0,
        count_bound: float = 10.0,
        nodes: str = "",
        secure_aggregation: bool = False,
        secure_range: float = 8.0,
        broadcasts: MutableMapping[int, bytes] | None = None,
        seed: int = -1,
    ) -> None:
        check_choice("on-bad-payload", on_bad_payload, OnBadPayload)
        self._restore = ExitStack()
        seconds = (("start-timeout", start_timeout), ("round-timeout", round_timeout))
        for name, value in (*seconds, ("secure-range", secure_range)):
            if not value > 0:
                raise MisconfigurationException(f"{name} must be a number above 0, got {value!r}")
        for name, count, least in (("min-sites", min_sites, 0), ("keep-broadcasts", keep_broadcasts, 1)):
            if type(count) is not int or count < least:
                raise MisconfigurationException(f"{name} must be a whole number, {least} or more, got {count!r}")
        for name, value in (("norm-bound", norm_bound), ("count-bound", count_bound)):
            if not value >= 1:
                raise MisconfigurationException(f"{name} must be a number of at least 1, got {value!r}")
        self.loop = loop
        self.algorithm = loop.algorithm
        self.norm_bound = norm_bound
        self.count_bound = count_bound
        self.nodes = _node_ids(nodes)
        self.recipe = recipe
        self.seed = seed
        self._transport = Transport(grid, round_timeout, poll)
        self._rounds = 0
        self._round_is_due = False
        self.start_timeout = start_timeout
        self.round_timeout = round_timeout
        if 0 < min_sites < loop.least_answers:
            raise MisconfigurationException(
                f"min-sites={min_sites} is below the recipe's min_clients={loop.least_answers}: raise it, or leave it"
                " out."
            )
        self.min_sites = min_sites or loop.least_answers
        self.keep_broadcasts = keep_broadcasts
        self.secure_aggregation = secure_aggregation
        self.secure_range = secure_range
        if secure_aggregation:
            check_secure(loop, self.min_sites)
        self.on_bad_payload = on_bad_payload
        self.poll = poll
        self.ledger = Ledger(0)
        self.plan: RoundPlan | None = None
        self.coordinator: Coordinator
        self.study = secrets.token_hex(8)
        """Name of this study, under which sites keep their state. A continued run has the name of the first."""
        self._restored: dict[str, Any] | None = None
        self._planner: RoundPlanner
        self._further: FurtherModels
        self._signature: dict[str, Any] = {}
        self._rank_limit = 0
        self._intake: Intake
        self._members: Members | None = None
        self._admission: Admission
        # Clients whose sites have lost their state: the method is to be informed (_new_resets), then the site itself
        # (_unconfirmed_resets).
        self._new_resets: set[int] = set()
        self._unconfirmed_resets: set[int] = set()
        self._broadcasts = {} if broadcasts is None else broadcasts
        self._pruned = -1
        # Clients without whose answers the last rounds were skipped.
        self._spoilers: set[int] = set()
        self._figures: dict[str, float] = {}
        self._client_steps = 0

    @property
    def state_key(self) -> str:
        """Name of this callback's state in checkpoints: that of `FederatedLoop`, so that exports find it."""
        return "FederatedLoop"

    @property
    def members(self) -> Members:
        """The sites of this run."""
        if self._members is None:
            self._members = Members(self._signature, self.loop.clients, self.nodes, self.count_bound, self._rank_limit)
        return self._members

    @property
    def server(self) -> Server:
        """The server of this run."""
        return self.coordinator.server

    def state_dict(self) -> dict[str, Any]:
        """The state of the server and its record of the sites, as tensors and plain Python values."""
        if not self.members.begun:
            return {}
        return {
            "algorithm": type(self.algorithm).__name__,
            "seed": self.loop.experiment_seed,
            "execution": "sites",
            "server": self.coordinator.state_dict(),
            "sites": {
                "study": self.study,
                "signature": self._signature,
                "members": self.members.state_dict(),
                "connected": sorted(self.members.connected.keys() - self.coordinator.answers.failed.keys()),
                "lost": sorted(self._new_resets | self._unconfirmed_resets),
                "intake": self._intake.state_dict(),
                "pruned": self._pruned,
                "secure_aggregation": self.secure_aggregation,
                "client_steps": self._client_steps,
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check `state_dict`'s result, which is installed when the fit begins.

        Raises:
            MisconfigurationException: If it is of another recipe, of a run that was not across sites, or of one with
                another ``secure_aggregation``: sites repeat their answer to a round that they have made.
        """
        sites = state_dict.get("sites")
        recipe = hashlib.sha256(self.recipe).hexdigest()
        if sites is None or sites["signature"]["recipe"] != recipe:
            raise MisconfigurationException("the checkpoint is not of a run of this recipe across sites.")
        began = sites["secure_aggregation"]
        if began != self.secure_aggregation:
            raise MisconfigurationException(
                f"the study began with secure-aggregation={str(began).lower()}, and cannot continue with"
                f" secure-aggregation={str(self.secure_aggregation).lower()}: use its first setting, or begin another"
                " study (study)."
            )
        check_complete(state_dict)
        self._restored = state_dict

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Replace the training loader by a placeholder."""
        if stage == "fit":
            check_callbacks(self, trainer, pl_module, "sites that sit that round out would not know")
            enter = self._restore.enter_context
            enter(whole_checkpoints(trainer))
            enter(
                marking_incomplete(
                    pl_module, self.state_key, lambda: self.server.base.state if self.members.begun else {}
                )
            )
            enter(TrainLoaderSource(trainer).replaced_by(NoBatch(lambda: self._make_round(trainer, pl_module))))
            enter(replaced(trainer, reload_dataloaders_every_n_epochs=0, limit_train_batches=1.0, overfit_batches=0.0))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore the trainer."""
        self._restore.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Restore the trainer."""
        self._restore.close()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait for the sites, and set up the algorithm."""
        check_all_are_trained(trainer, pl_module)
        check_optimizers(trainer, pl_module)
        # Refuses options that cannot be sent, before the sites are waited for.
        options_of(trainer.optimizers)
        self._rounds = _NO_END if (trainer.max_epochs or -1) < 0 else int(trainer.max_epochs)  # type: ignore[arg-type]
        advice = static_batch_norm_advice(self.algorithm, trainer, pl_module, self.loop.buffers, _WITHOUT_STATISTICS)
        for note in notes(pl_module, self.loop.buffers, trainer.lr_scheduler_configs) + advice:
            rank_zero_warn(note)
        server = self.loop.make_server(pl_module, trainer.optimizers)
        # In a secure sum all clients' messages have the same shapes, so that no site states a rank.
        self._rank_limit = 0 if self.secure_aggregation else UnequalClients.of(self.algorithm).rank_limit(pl_module)
        self.ledger = Ledger(dense_bytes(pl_module))
        state, self._restored = self._restored, None
        if state is None:
            self._signature = {**signature(pl_module, self.recipe), **numbering(getattr(trainer, "datamodule", None))}
            self._begin_admission()
            self._meet_all()
        else:
            self._resume_sites(state["sites"])
        for client, rank in self.members.ranks().items():
            state_rank(self.algorithm, client, rank)
        # Clients have no names here: a data set in one place may name them, but sites do not know these names.
        self.loop.name_clients(None, len(self.members.samples))
        planner = self._planner = RoundPlanner(
            **self.loop.drawing(),
            batches=np.array(self.members.batches),
            clients_per_round=self.loop.cohort_size(len(self.members.samples)),
        )
        server.clients, drawn = planner.eligible, planner.clients_per_round
        if self.min_sites > drawn:
            raise MisconfigurationException(f"min-sites={self.min_sites} is more than a round's {drawn} clients.")
        privacy = self.loop.privacy
        if privacy is not None and not privacy.secure:
            raise MisconfigurationException(f"{privacy!r} {SEED_IS_KNOWN}")
        drawing = Drawing(drawn, drawn, planner.eligible, None if trainer.max_epochs == -1 else trainer.max_epochs)
        parts = Parts(self.loop, server, self.members.samples, ClientStates(), self.ledger, drawing)
        self.coordinator = Coordinator(parts)
        self._intake = Intake(self.coordinator, self.norm_bound)
        if state is not None:
            self._intake.load_state_dict(state["sites"]["intake"])
            self.coordinator.load_state_dict(state["server"], lambda kept: move_data_to_device(kept, pl_module.device))
        self._further = FurtherModels(None, self.coordinator)
        self.coordinator.setup()
        for note in local_part_advice(self.algorithm, _ON_THEIR_SITES) + new_basis_advice(self.loop):
            rank_zero_warn(note)

    def _begin_admission(self) -> None:
        self._admission = Admission(self.members, self._transport, lambda: self._pack({}), self.poll)

    def _resume_sites(self, sites: Mapping[str, Any]) -> None:
        """Restore the record of the sites, and wait for those that were connected."""
        self.study, self._signature = sites["study"], sites["signature"]
        self.members.load_state_dict(sites["members"])
        self._begin_admission()
        self._new_resets, self._pruned = set(sites["lost"]), sites["pruned"]
        self._client_steps = sites["client_steps"]
        deadline = time.monotonic() + self.start_timeout
        while True:
            self._new_resets |= self._admission.admit_all()
            missing = sorted(set(sites["connected"]) - self.members.connected.keys())
            if not missing:
                return
            if time.monotonic() > deadline:
                rank_zero_warn(
                    f"the study continues without the sites of clients {missing}, which did not rejoin within"
                    f" {self.start_timeout:g} s; they may join later."
                )
                return
            time.sleep(self.poll)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Have the epoch's only batch make a round, once all callbacks and the module have set the learning rates."""
        # Lightning does not call this hook in an epoch that is resumed after its round.
        self._round_is_due = True

    def _make_round(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the sites make a round, and aggregate their answers."""
        if not self._round_is_due:
            return
        self._round_is_due = False
        plan, live = self._planner.plan(trainer.current_epoch), trained_tensors(pl_module)
        self.plan = plan
        # Clients that sit the round out are counted later, when they are sent a broadcast.
        self.coordinator.begin_round(plan, live, idle=0)
        self._intake.begin_round()
        self._prune()
        outcome = self._collect_answers(plan, options_of(trainer.optimizers), live)
        # Old broadcasts are deleted in the next round, after a state with this number has been saved.
        self._pruned = max(
            [self._pruned, *(each for each in self._broadcasts if each <= plan.round - self.keep_broadcasts)]
        )
        self.coordinator.answers.failed = outcome.failures
        for client in outcome.failures:
            self.coordinator.note_absent(client)
        if len(outcome.arrivals) < self.min_sites:
            self._intake.skip_round()
            outcome.arrivals = []
        else:
            late = self._intake.aggregate(self.min_sites)
            self._refuse(outcome, late)
            for client in late:
                outcome.arrivals.remove(client)
                rank_zero_warn(f"round {plan.round} continues without the site of client {client}: {late[client]}")
        self.coordinator.show_global(live)
        batches = [self.members.batches[client] for client in outcome.answered]
        self._client_steps += sum(batches)
        # A client's last group of batches may be smaller. With manual optimization nobody here knows the steps.
        count_steps(trainer, sum(-(-each // trainer.accumulate_grad_batches) for each in batches))
        self._figures = {
            "federated/clients": len(outcome.arrivals),
            "federated/failed": len(outcome.failures),
            "federated/samples": sum(self.members.samples[client] for client in outcome.arrivals),
            "federated/client_steps": self._client_steps,
        }

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Evaluate the method's further global models, such as those of smaller size or rank."""
        if not trainer.sanity_checking:
            self._further.evaluate(trainer, pl_module, "validate")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the round's figures."""
        private = self.coordinator.private
        log_figures(trainer, {**self.coordinator.figures(), **self._figures})
        if private is not None and private.exhausted and not 0 < (trainer.max_epochs or 0) <= trainer.current_epoch + 1:
            trainer.should_stop = True
            rank_zero_info(f"the fit ends here: {private.exhausted}")

    def _meet_all(self) -> None:
        """Wait until the site of every client has joined."""
        deadline = time.monotonic() + self.start_timeout
        members, said = self.members, None
        while not members.complete():
            self._new_resets |= self._admission.admit_all()
            joined = sorted(members.connected)
            if not members.complete() and joined != said:
                rank_zero_info(
                    f"waiting for the sites of all clients, at most {self.start_timeout:g} s in all (start-timeout);"
                    f" joined so far: {first_ten(joined)}"
                )
                said = joined
            if not members.complete() and time.monotonic() > deadline:
                break
            time.sleep(self.poll)
        count = members.expected
        missing = [client for client in range(count) if client not in members.connected]
        wrong = self._admission.refused
        refused = f" Left out: a site cannot take part: {'; '.join(wrong[:10])}." if wrong else ""
        if not count or count - len(missing) < self.min_sites:
            raise MisconfigurationException(
                f"the recipe has {count or 'an unknown number of'} clients, and after {self.start_timeout:g} s the"
                f" sites of {len(members.connected)} have joined, of {self.min_sites} that are needed (min-sites);"
                f" missing are {first_ten(missing)}. Start one SuperNode for each with"
                f" --node-config 'partition-id=...', or wait longer with start-timeout.{refused}"
            )
        if missing:
            rank_zero_warn(
                f"the study begins without the sites of clients {first_ten(missing)}, which did not join within"
                f" {self.start_timeout:g} s, and take no part in it.{refused}"
            )
        members.check_numbering()
        members.begin(count, absent=missing)
        for client in members.implausible:
            samples, batches = members.claimed(client)
            rank_zero_warn(
                f"the site of client {client} claims {samples:,} samples and {batches:,} batches, more than"
                f" {self.count_bound:g} times the median site's: it counts as {members.samples[client]:,} samples and"
                f" {members.batches[client]:,} batches. If it is right, give a larger count-bound."
            )
        rank_zero_info(f"{count - len(missing)} sites have joined")

    def _collect_answers(self, plan: RoundPlan, options: str, live: Mapping[str, Tensor]) -> _Outcome:
        """Send the round's broadcasts and receive the answers; ask again while there are too few answers."""
        deadline = time.monotonic() + self.start_timeout
        outcome, needed = _Outcome(), self.min_sites
        if len(plan.clients) < needed:
            raise MisconfigurationException(
                f"round {plan.round} draws {len(plan.clients)} clients and needs {needed} (min-sites): lower"
                " min-sites, or raise clients_per_round."
            )
        while True:
            self._new_resets |= self._admission.admit_all(wait=min(self.round_timeout, _WAIT_FOR_NEW))
            self._ask(plan, options, live, outcome)
            for client, reason in sorted(outcome.failures.items()):
                rank_zero_warn(f"round {plan.round} continues without the site of client {client}: {reason}")
            if len(outcome.arrivals) >= needed:
                self._spoilers = set()
                return outcome
            if not outcome.passing or time.monotonic() > deadline:
                self._spoilers |= outcome.failures.keys()
                others = len(self.members.samples) - len(self._spoilers)
                few = len(self._spoilers) < others and others >= needed
                if few and not outcome.passing and self.coordinator.private is None:
                    rank_zero_warn(
                        f"round {plan.round} is skipped, and the global model is unchanged: of its"
                        f" {len(plan.clients)} sites, {len(outcome.arrivals)} sent a usable answer."
                    )
                    return outcome
                reasons = "; ".join(f"client {client}: {reason}" for client, reason in sorted(outcome.failures.items()))
                if not outcome.arrivals:
                    raise MisconfigurationException(f"no site made round {plan.round}: {reasons}")
                raise MisconfigurationException(
                    f"round {plan.round} has answers of {len(outcome.arrivals)} of {len(plan.clients)} sites and needs"
                    f" {needed} (min-sites, or min_clients of the recipe): {reasons}"
                )
            time.sleep(self.poll)

    def _ask(self, plan: RoundPlan, options: str, live: Mapping[str, Tensor], outcome: _Outcome) -> None:
        """Ask each client without an answer once, and send missed broadcasts to clients that sit the round out."""
        coordinator = self.coordinator
        outcome.failures, outcome.passing = {}, False
        for client in sorted(self._new_resets):
            Personal.of(self.algorithm).forget(coordinator.server, coordinator.info(client))
        self._unconfirmed_resets, self._new_resets = self._unconfirmed_resets | self._new_resets, set()
        requests: dict[int, tuple[str, RecordDict]] = {}
        secure: dict[int, SecureRequest] = {}
        packets: dict[int, Packet] = {}
        acknowledged: dict[int, int] = {}
        if coordinator.broadcasts.reach_all:
            self._broadcasts[plan.round] = coordinator.broadcasts.packet(coordinator.any_client).encode()
        for client in plan.clients:
            if client in outcome.arrivals:
                continue
            if client not in self.members.connected:
                outcome.failures[client] = "it is not connected"
                outcome.passing = True
                continue
            if self.members.last_broadcast[client] < self._pruned:
                outcome.failures[client] = self._too_late(client)
                continue
            packets[client] = coordinator.broadcasts.packet(coordinator.info(client))
            data = packets[client].encode()
            missed = self._missed(client, before=plan.round)
            payloads = {**missed, plan.round: data} if data else missed
            acknowledged[client] = plan.round
            fields = {
                "round": plan.round,
                "options": options,
                "last_broadcast": self.members.last_broadcast[client],
                "lost": client in self._unconfirmed_resets,
            }
            node = self.members.connected[client]
            if self.secure_aggregation:
                weight = int(self.loop.weight_of(coordinator.info(client)))
                secure[node] = SecureRequest(self._with_study(fields), payloads, weight)
            else:
                requests[node] = TRAIN, self._pack(fields, payloads)
            coordinator.note_sent(coordinator.info(client), len(data))
            self.ledger.add_idle(sum(map(len, missed.values())))
        for client, node in self.members.connected.items():
            missed = self._missed(client, before=plan.round + 1)
            idle = client not in plan.clients and self.members.batches[client]
            if missed and idle and self.members.last_broadcast[client] >= self._pruned:
                requests[node] = LISTEN, self._pack({"last_broadcast": self.members.last_broadcast[client]}, missed)
                acknowledged[client] = max(missed)
                self.ledger.add_idle(sum(map(len, missed.values())))
        expected = expect(coordinator, packets, live)
        sizes = [coordinator.wire.up_bytes(coordinator.server.base, e.schema, e.codec) for e in expected.values()]
        # Answers longer than twice an honest one are refused unread; a site that reports a lost state sends less.
        replies, answers = self._transport.exchange(requests, most=2 * max(sizes, default=0)), dict[int, Message]()
        for client, node in sorted(self.members.connected.items()):
            reply = replies.get(node)
            if isinstance(reply, Silence) and client in expected:
                self._note(client, reply, outcome)
            elif isinstance(reply, Message) and not self._reports_reset(client, reply, outcome):
                self.members.last_broadcast[client] = acknowledged[client]
                if client in expected:
                    self._unconfirmed_resets.discard(client)
                    answers[client] = reply
        if self.secure_aggregation:
            self._sum(secure, expected, outcome)
            return
        refused = self._intake.accept(answers, expected, self.members.batches)
        outcome.answered |= answers.keys()
        outcome.arrivals += [client for client in answers if client not in refused]
        self._refuse(outcome, refused)

    def _note(self, client: int, silence: Silence, outcome: _Outcome) -> None:
        """Count a site as failed, and end the run if ``on_bad_payload`` or ``on_client_error`` says so."""
        outcome.failures[client] = silence.reason
        outcome.passing |= silence.passing
        stops = self.on_bad_payload == "stop" if silence.bad else self.loop.on_client_error == "raise"
        if stops and not silence.passing:
            raise MisconfigurationException(
                f"round {self.server.round}: the site of client {client} failed: {silence.reason}"
            )

    def _reports_reset(self, client: int, reply: Message, outcome: _Outcome) -> bool:
        """Whether a site reports that it has lost its state; if so, record that."""
        try:
            fields, _ = unpack(reply)
            if fields.get("lost") is not True:
                return False
            last_broadcast = field_of(fields, "last_broadcast", int)
        except DecodingError:
            # A malformed reply is refused later, as an answer.
            return False
        assert self.plan is not None
        drawn = client in self.plan.clients
        if drawn:
            outcome.failures[client] = "it has lost its state of earlier rounds"
        if -1 <= last_broadcast < self.members.last_broadcast[client] and client not in self._unconfirmed_resets:
            self.members.last_broadcast[client] = last_broadcast
            self._new_resets.add(client)
            # A drawn site can answer a second request, so ask it once more.
            outcome.passing |= drawn
            if not drawn:
                rank_zero_warn(f"the site of client {client} has lost its state of earlier rounds.")
        return True

    def _query_resets(self, clients: Collection[int], outcome: _Outcome) -> set[int]:
        """Ask sites that failed in a secure sum, if they cannot report it, whether they have lost their state."""
        connected = {client: self.members.connected[client] for client in clients if client in self.members.connected}
        known = self.members.last_broadcast
        question = {node: (LISTEN, self._pack({"last_broadcast": known[each]})) for each, node in connected.items()}
        replies = self._transport.exchange(question, most=0)
        return {
            client
            for client, node in connected.items()
            if isinstance(reply := replies.get(node), Message) and self._reports_reset(client, reply, outcome)
        }

    def _sum(self, requests: Mapping[int, SecureRequest], expected: Mapping[int, Expected], outcome: _Outcome) -> None:
        """Pass the mean of the sites' answers to the method; the server sees no single answer."""
        coordinator, algorithm = self.coordinator, self.algorithm
        clients = {self.members.connected[client]: client for client in expected}
        outcome.passing = True
        if not expected:
            return
        base, schema = coordinator.server.base, expected[min(expected)].schema

        def reference_of(client: int) -> Mapping[str, Tensor]:
            return reference(algorithm, base, coordinator.info(client), expected[client].received)

        known = reference_of(min(expected))
        for client, each in expected.items():
            same = each.schema == schema and equal_tensors(reference_of(client), known)
            if not same or each.codec is not None or schema.flexible:
                raise MisconfigurationException(
                    "secure-aggregation sums changes of the same tensors in the same encoding, but"
                    f" {type(algorithm).__name__} sends or expects others of client {client}."
                )
        # No bytes of Flower's arrays are allowed, because masked numbers are sent as fields.
        exchange = functools.partial(self._transport.exchange, most=0)
        answer = secure_mean(requests, schema, self.min_sites, self.secure_range, coordinator.server.round, exchange)
        failed = {clients[node]: silence for node, silence in answer.failures.items()}
        for client in failed.keys() - self._query_resets(failed.keys(), outcome):
            self._note(client, failed[client], outcome)
        arrived = sorted(clients[node] for node in answer.nodes)
        for node, client in sorted(clients.items(), key=lambda each: each[1]):
            nbytes = answer.nbytes.get(node, 0)
            if client not in arrived:
                self.ledger.add_up(nbytes)
                continue
            reason = coordinator.refused(coordinator.info(client), self.members.batches[client], nbytes)
            if reason is not None:
                raise MisconfigurationException(
                    f"stages={self.loop.stages!r}: one of them refuses the answer of client {client}'s site"
                    f" ({reason}), but secure-aggregation only has the sum of all answers: leave it out."
                )
        for client in arrived:
            self.members.last_broadcast[client] = coordinator.server.round
            self._unconfirmed_resets.discard(client)
        if arrived:
            self._intake.accept_mean(arrived, with_changes(answer.mean, known, schema))
        outcome.answered |= {*arrived}
        outcome.arrivals += arrived

    def _refuse(self, outcome: _Outcome, refused: Mapping[int, str]) -> None:
        for client, reason in refused.items():
            outcome.failures[client] = f"it sent a bad payload: {reason}"
            if self.on_bad_payload == "stop":
                raise MisconfigurationException(
                    f"round {self.server.round}: the site of client {client} failed: {outcome.failures[client]}"
                )

    def _missed(self, client: int, before: int) -> dict[int, bytes]:
        return {
            number: self._broadcasts[number]
            for number in sorted(self._broadcasts)
            if self.members.last_broadcast[client] < number < before
        }

    def _too_late(self, client: int) -> str:
        last_broadcast = self.members.last_broadcast[client]
        return (
            f"it has received the broadcasts up to round {last_broadcast}, and those up to round {self._pruned} have"
            f" been deleted (keep-broadcasts={self.keep_broadcasts}): restore its state, or leave it out"
        )

    def _prune(self) -> None:
        """Delete the broadcasts that are too old."""
        for number in [each for each in self._broadcasts if each <= self._pruned]:
            del self._broadcasts[number]

    def _pack(self, fields: Mapping[str, Any], payloads: Mapping[int, bytes] | None = None) -> RecordDict:
        return pack(self._with_study(fields), payloads)

    def _with_study(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        count = len(self.members.samples) or self.loop.clients
        # Until it is known how many clients there are, `min_sites` alone bounds a round.
        cohort = self.loop.cohort_size(count) if count else _NO_END
        about = {"rounds": self._rounds, "cohort": cohort, "seed": self.seed}
        return {"study": self.study, "min_sites": self.min_sites, **about, **fields}


def _node_ids(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isascii() and word.isdigit() for word in words) or len(set(words)) < len(words):
        raise MisconfigurationException(f"nodes must be different ids with commas between, got {text!r}")
    return [int(word) for word in words]


class NoBatch:
    """A placeholder for the trainer's training loader, with one empty batch for each round.

    Args:
        make_round: Called for each batch.
    """

    def __init__(self, make_round: Callable[[], None] = lambda: None) -> None:
        self._make_round = make_round

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[None]:
        self._make_round()
        yield None
