"""One site: the recipe's module trained on the site's own data, one client and one round at a time.

The site runs `FederatedLoop` itself, with the partition reduced to its client, and with a `SiteExchange`. Batches,
augmentation and dropout are therefore those of the simulation.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_lowrank.buffers import aliases, under_all_names
from lightning_lowrank.callbacks import DifferentialPrivacy
from lightning_lowrank.compression import Dense, Packet
from lightning_lowrank.federated import client_states
from lightning_lowrank.federated.data.indices import ClientIndices
from lightning_lowrank.federated.data.partitions import Partition
from lightning_lowrank.federated.data.planner import RoundPlan
from lightning_lowrank.federated.exchange import Exchange, Parts
from lightning_lowrank.federated.failures import describe_error
from lightning_lowrank.federated.loop import FederatedLoop
from lightning_lowrank.federated.messages import Message
from lightning_lowrank.federated.protocols import ChangesBase, reference, state_rank
from lightning_lowrank.federated.site import SiteExchange
from lightning_lowrank.federated.state import Base, ClientContext, State, copy_into, trained_tensors
from lightning_lowrank.files import private_folder, without_link
from lightning_lowrank.flower.approval import check_reads_nothing, fill_placeholders, read_plain
from lightning_lowrank.flower.messages import apply_options, numbering, signature
from lightning_lowrank.flower.policy import Policy
from lightning_lowrank.flower.privacy_account import PrivacyAccount
from lightning_lowrank.flower.recipe import ONLY_OF_WHOLE_RUNS, OWN_OF_TRAINER, Recipe, build, check_optimizers
from lightning_lowrank.flower.secure import changes_of
from lightning_lowrank.internals.lightning import make_one_epoch

__all__ = ["Site"]

_QUIET = {
    **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False),
    **dict.fromkeys(("num_sanity_val_steps", "limit_val_batches"), 0),
}


@dataclass
class _Kept:
    """A site's state between rounds, in a file that never leaves the site.

    Args:
        followed: The last round that the site has trained in, -1 before the first. Its broadcast and those before it
            have been applied.
        pending: Encoded broadcasts of later rounds, by round.
        upload: The encoded answer of the round ``followed``.
        secure: Whether that answer is a change, for a secure sum.
        client: `ClientContext.state`.
        base: `Base.state`, if broadcasts change it.
        frozen: The frozen parameters, if changes have been folded into them.
        secret: A secret by which the server recognises this site after a restart.
        seed: The study's seed.
    """

    followed: int = -1
    pending: dict[int, Tensor] = field(default_factory=dict)
    upload: Tensor = field(default_factory=lambda: _tensor(b""))
    secure: bool = False
    client: State = field(default_factory=dict)
    base: State = field(default_factory=dict)
    frozen: dict[str, Tensor] = field(default_factory=dict)
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    seed: int = -1


@dataclass
class _Round:
    """One round on a site.

    Args:
        broadcasts: Encoded broadcasts that have not been applied yet.
        options: `options_of`.
        secure: Whether the answer is a change in double precision, for a secure sum.
        upload: The encoded answer.
    """

    broadcasts: list[bytes]
    options: str
    secure: bool = False
    upload: bytes = b""


class Site:
    """One site of a federation: trains its client in the rounds that draw it, and applies other rounds' broadcasts.

    Module, datamodule and trainer are built once and used for every round that this object sees. The state for a later
    process is in one file, which never leaves the site: the client's state, its last answer, broadcasts that are not
    applied yet, and changes by earlier broadcasts of the weights and state that server and sites share.

    With a policy from a file, the site builds only its own copies of recipes that it has approved.

    Args:
        recipe: The recipe that the server sent.
        client: Number of this site's client, from 0.
        state: The file, ``*.safetensors``; it need not exist yet.
        clients: Number of clients of the federation; ``None``: the recipe says.
        own_data: Whether the recipe's data set, as read here, is this site's alone. Otherwise all sites have the whole
            data set, and this one uses its client's part of the recipe's partition.
        data_root: Folder of the files that the recipe leaves to sites, such as the datamodule's ``root``.
        policy: The site's policy; by default everything is permitted.
        site_values: This site's values: those of the names that the recipe leaves to sites, entries of `OWN_OF_TRAINER`
            for the trainer, and ``rank``, the rank of this site's client, for methods of clients of different rank.
        seed: ``seed_everything`` of the study; ``None``: the recipe's.
        rounds: Number of the study's rounds.

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
        policy: Policy | None = None,
        site_values: Mapping[str, Any] | None = None,
        seed: int | None = None,
        rounds: int = 2**31 - 1,
    ) -> None:
        self.client = client
        self.round: _Round
        self.epsilon: float | None = None
        """ε of the site's samples over all studies, after the last private round of this process."""
        self.policy = Policy() if policy is None else policy
        self._recipe = Path(recipe).read_bytes()
        self._clients = clients
        self._own_data = own_data
        self._data_root = data_root
        self._site_values = dict(site_values or {})
        self._rank: int | None = self._site_values.get("rank")
        self.seed, self.rounds = seed, rounds
        self._file = without_link(Path(state))
        if self._file.suffix != ".safetensors":
            raise MisconfigurationException(
                f"state={str(state)!r} must be named *.safetensors, because it would replace any other file."
            )
        self._privacy_account = PrivacyAccount(self._file.parent / f"privacy_client_{client}.json")
        self._built: Recipe | None = None
        # The policy that permitted the built recipe; the site's policy may have changed since.
        self._checked_by = self.policy
        self._base: Base | None = None
        self._signature: dict[str, Any] = {}
        self._load()

    @property
    def last_broadcast(self) -> int:
        """The last round whose broadcast this site has; -1 before the first."""
        return max(self._kept.followed, *self._kept.pending, -1)

    def join(self) -> dict[str, Any]:
        """Build the recipe, read the data, and return this site's claims and signature for the server.

        Raises:
            MisconfigurationException: If something would not work in a round.
            PolicyViolation: If the site's policy does not permit the recipe.
        """
        self._built = None
        loop = self._fit(-1)
        assert self._built is not None
        indices, plan = loop.indices, loop.plan
        assert indices is not None
        assert plan is not None, "the loader's length, for which Lightning asks, is that of a round of all clients"
        if self._clients not in (None, len(indices.sizes)):
            raise MisconfigurationException(
                f"num-partitions={self._clients} was given to this site, and the recipe has {len(indices.sizes)}"
                " clients."
            )
        # Saved now, so that a site that restarts before its first round keeps its secret.
        self._save()
        return {
            "client": self.client,
            "clients": len(indices.sizes),
            "samples": int(indices.sizes[self.client]),
            "batches": dict(zip(plan.clients, plan.batches, strict=True)).get(self.client, 0),
            "last_broadcast": self.last_broadcast,
            "rank": self._rank or 0,
            "secret": self._kept.secret,
            **self._signature,
            **numbering(self._built.datamodule, *_datasets(loop)),
        }

    def listen(self, broadcasts: Mapping[int, bytes]) -> None:
        """Store broadcasts of rounds that this site sits out, until it trains again.

        Raises:
            PolicyViolation: If the site has not approved the recipe.
        """
        self.policy.approved(self._recipe)
        for number, data in broadcasts.items():
            if number > self._kept.followed:
                self._kept.pending[number] = _tensor(data)
        self._save()

    def train(self, number: int, broadcasts: Mapping[int, bytes], options: str, secure: bool = False) -> bytes:
        """Train the client for one round; a repeated request for the last round gets the same answer.

        Args:
            number: The round, from 0.
            broadcasts: Encoded broadcasts: this round's, if the method has any, and those of
                earlier rounds that the site has missed.
            options: The optimizers' options in this round, as `options_of` writes them.
            secure: Whether the answer is for a secure sum.

        Returns:
            The encoded message; empty if the method sends nothing. For a secure sum, the change from the values that
            server and client both know, in double precision.

        Raises:
            DecodingError: If a broadcast cannot be decoded.
            MisconfigurationException: If the client cannot train, or has made a later round.
            PolicyViolation: If the site's policy does not permit the request of the server or the recipe.
        """
        self._check_again()
        if not 0 <= number < self.rounds:
            raise MisconfigurationException(f"round {number} was requested in a study of {self.rounds} rounds, from 0.")
        kept = self._kept
        if number < kept.followed:
            raise MisconfigurationException(
                f"round {number} was requested of client {self.client}, which has made round {kept.followed}."
            )
        if number == kept.followed:
            if secure != kept.secure:
                forms = {True: "as a change for a secure sum", False: "in clear"}
                raise MisconfigurationException(
                    f"round {number} was requested of client {self.client} {forms[secure]}, and it has answered that"
                    " round"
                    f" {forms[kept.secure]}: give the server the setting secure-aggregation={str(kept.secure).lower()}"
                    " with which it began the round."
                )
            return _bytes(kept.upload)
        packets = {number: b"", **{early: _bytes(data) for early, data in kept.pending.items()}, **broadcasts}
        self.round = _Round(
            [packets[each] for each in sorted(packets) if kept.followed < each <= number], options, secure
        )
        try:
            loop = self._fit(number)
        except BaseException:
            # The failed round's changes are discarded; its privacy cost stays counted.
            self._built = None
            self._load()
            raise
        kept.followed = number
        kept.pending = {later: data for later, data in kept.pending.items() if later > number}
        kept.upload, kept.secure = _tensor(self.round.upload), secure
        kept.client = loop.exchange.states[self.client]
        self._keep_base(loop.exchange)
        self._save()
        return self.round.upload

    def _build(self) -> Recipe:
        content = read_plain(self.policy.approved(self._recipe), "the recipe")
        if self.policy.source:
            # Also a recipe that an earlier release approved, and files that exist in this process's working folder.
            check_reads_nothing(content)
        content = fill_placeholders(content, self._site_values, self._data_root)
        given = {name: self._site_values[name] for name in OWN_OF_TRAINER if name in self._site_values}
        content["trainer"] = {**(content.get("trainer") or {}), **_QUIET, **given}
        content["seed_everything"] = content.get("seed_everything") if self.seed is None else self.seed
        recipe = build(content)
        if _private(recipe) is not None and self.policy.source:
            self._privacy_account.check()
        loop = recipe.loop
        self.policy.check_privacy(loop.privacy, _private(recipe))
        if self._own_data:
            if loop.clients is None:
                raise MisconfigurationException("sites with data of their own need federated.clients in the recipe.")
            loop.partition = _OneClient(self.client)
        if loop.clients is not None and not 0 <= self.client < loop.clients:
            raise MisconfigurationException(
                f"partition-id={self.client}, and the recipe has {loop.clients} clients, from 0."
            )
        if self._rank is not None:
            state_rank(loop.algorithm, self.client, self._rank)
        loop.make_exchange = functools.partial(_FlowerExchange, self)
        loop.execution, loop.chunk_size, loop.summary = "sequential", None, False
        # An error ends the fit here, and the server continues without this site.
        loop.on_client_error, loop.min_clients = "raise", 1
        loop.clients_per_round = loop.sampling_weights = loop.availability = loop.client_memory_limit = None
        kept = [callback for callback in recipe.trainer.callbacks if not isinstance(callback, ONLY_OF_WHOLE_RUNS)]
        recipe.trainer.callbacks = [_ConstantSchedules(), *kept]
        return recipe

    def _check_again(self) -> None:
        """Check the built recipe against the present policy and approvals."""
        self.policy.approved(self._recipe)
        if self._built is not None and self.policy != self._checked_by:
            self.policy.check_privacy(self._built.loop.privacy, _private(self._built))
            self._checked_by = self.policy

    def _fit(self, number: int) -> FederatedLoop:
        """Run the fit for one round; for -1, only set it up."""
        if self._built is None:
            self._built, self._base, self._checked_by = self._build(), None, self.policy
        recipe = self._built
        recipe.loop.participants = [[self.client]] * (number + 1) or None
        make_one_epoch(recipe.trainer, number)
        recipe.trainer.fit(recipe.module, datamodule=recipe.datamodule)
        return recipe.loop

    def charge(self, steps: int) -> None:
        """Charge a round's steps to the privacy account, before the round is trained.

        Raises:
            PolicyViolation: If the round would cost more privacy than the site's policy permits.
        """
        assert self._built is not None
        private = _private(self._built)
        if private is None or not steps:
            return
        mechanism = private.mechanism(self.client)
        with self._privacy_account.locked():
            epsilon = self._privacy_account.epsilon(private.delta, private.accountant, (mechanism, steps))
            self.policy.check_cost(epsilon, private.delta, steps)
            self._privacy_account.charge(mechanism, steps)
        self.epsilon = epsilon

    def restore(self, exchange: Exchange) -> None:
        """Restore the state after earlier broadcasts in a newly built base."""
        base = exchange.server.base
        if base is self._base:
            return
        self._base = base
        self.policy.check_trained(under_all_names(trained_tensors(base.module), aliases(base.module)))
        self._signature = signature(base.module, self._recipe)
        base.state = dict(self._kept.base)
        copy_into(dict(base.module.named_parameters()), self._kept.frozen)
        exchange.states[self.client] = self._kept.client

    def _keep_base(self, exchange: Exchange) -> None:
        """Store the parts of the base that broadcasts have changed; each process builds the rest from the recipe."""
        base = exchange.server.base
        if exchange.wire.shares_copy or ChangesBase.of(exchange.algorithm).announces:
            self._kept.base = base.state
        if base.state.get("folded"):
            self._kept.frozen = {
                name: value for name, value in base.module.named_parameters() if not value.requires_grad
            }

    def _load(self) -> None:
        self._kept = _Kept(seed=-1 if self.seed is None else self.seed)
        for part in self._file.parent.glob(f"{self._file.stem}.*.part"):
            part.unlink()
        if not self._file.exists():
            return
        try:
            kept = _Kept(**client_states.load(self._file))
            wrong = [name for name, value in vars(kept).items() if type(value) is not type(getattr(self._kept, name))]
            if wrong:
                raise ValueError(f"{wrong[0]} is a {type(getattr(kept, wrong[0])).__name__}")
        except Exception as error:  # a file that was cut or changed fails in any way
            damaged = self._file.with_suffix(".damaged")
            self._file.replace(damaged)
            rank_zero_warn(
                f"{self._file}, the state of client {self.client} between rounds, cannot be read"
                f" ({describe_error(error)}). It was renamed to {damaged.name}, and the site continues as a new client,"
                " without its state of earlier rounds."
            )
            return
        if kept.seed != self._kept.seed:
            raise MisconfigurationException(
                f"the study began with seed={kept.seed}, but would continue with {self.seed}."
            )
        self._kept = kept

    def _save(self) -> None:
        private_folder(self._file.parent)
        client_states.save(vars(self._kept), self._file, self._file.with_suffix(f".{secrets.token_hex(8)}.part"))


class _FlowerExchange(SiteExchange):
    """Reads broadcasts from the site's `_Round`, and writes the client's upload to it."""

    def __init__(self, site: Site, parts: Parts) -> None:
        super().__init__(parts)
        self._site = site

    def setup(self, continues: bool = False) -> None:
        """Set up the method and the wire, with the module in the state after earlier broadcasts."""
        self._site.restore(self)
        super().setup(continues)

    def broadcasts(self, round_number: int) -> Iterable[bytes]:
        """Set the optimizers' options of the round, and return its broadcasts."""
        apply_options(self.server.base.optimizers, self._site.round.options)
        return self._site.round.broadcasts

    def check_received(self, received: Mapping[str, Tensor]) -> None:
        """Refuse a broadcast with tensors that the site's policy does not permit, also one of an earlier round."""
        self._site.policy.check_tensors(received, "the server's message")

    def begin_round(self, plan: RoundPlan, live: Mapping[str, Tensor], idle: int) -> None:
        """Apply the broadcasts, and refuse to train parameters or steps that the site's policy does not permit."""
        super().begin_round(plan, live, idle)
        self._site.policy.check_trained(under_all_names(live, aliases(self.server.base.module)))
        self._site.policy.check_reference(type(self.algorithm).__name__, self.algorithm.claims.without_reference)
        self._site.charge(sum(plan.batches))

    def pack(self, client: ClientContext, message: Message) -> Packet:
        """Pack a client's message, within the limits of the site's policy."""
        policy, exact = self._site.policy, self.algorithm.claims.exact
        policy.check_tensors(message.tensors, "the answer")
        known = {**reference(self.algorithm, client.base, client, self.received), **client.base.fresh_buffers}
        packet = super().pack(client, policy.clipped(message, known, exact, client.base.initial_buffers))
        if self.private is None:
            policy.check_change(packet.received, known, exact)
        return packet

    def receive(self, client: ClientContext, packet: Packet) -> None:
        """Encode the client's message."""
        if self._site.round.secure:
            known = reference(self.algorithm, client.base, client, self.received)
            self._site.round.upload = Dense().encode(changes_of(packet.received, known))
        else:
            self._site.round.upload = packet.encode()


def _datasets(loop: FederatedLoop) -> Iterator[Any]:
    """The training set, and the datasets that it is a subset of."""
    dataset = getattr(loop.data.training_loader, "dataset", None)
    while dataset is not None:
        yield dataset
        dataset = getattr(dataset, "dataset", None)


def _private(recipe: Recipe) -> DifferentialPrivacy | None:
    callbacks = recipe.trainer.callbacks
    return next((callback for callback in callbacks if isinstance(callback, DifferentialPrivacy)), None)


class _OneClient(Partition):
    """A partition in which the whole training set is one client's; the other clients' samples are on other sites."""

    def __init__(self, client: int) -> None:
        self._client = client

    def split(self, dataset: Any, clients: int | None, *arguments: Any, **keywords: Any) -> ClientIndices:
        size = len(dataset)
        assert clients is not None
        return ClientIndices([range(size) if number == self._client else [] for number in range(clients)], size)

    def assign(self, size: int, clients: int, seed: int, labels: Any, keys: Any) -> ClientIndices:
        raise NotImplementedError


class _ConstantSchedules(Callback):
    """Removes the learning rate schedulers, because the server sends each round's learning rates."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_optimizers(trainer, pl_module)
        # A site's rounds run without schedulers.
        trainer.strategy.lr_scheduler_configs = []


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _bytes(data: Tensor) -> bytes:
    return data.numpy().tobytes()
