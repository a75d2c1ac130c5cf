"""The settings of a federated experiment, declared and checked once.

`FederatedLoop` has them as its arguments, the command line as its ``federated:`` section. Real sites read them too.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from os import PathLike
from typing import Any, Literal, get_args

import numpy as np
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from lightning_lowrank.aggregation import Aggregator, WeightedMean
from lightning_lowrank.arguments import SAME_RESULT, Configured, first_ten, join_names, to_plain
from lightning_lowrank.buffers import treat_as_buffers
from lightning_lowrank.compression import Codec
from lightning_lowrank.configuration import check_choice, check_integer, check_number
from lightning_lowrank.federated.algorithm import Algorithm
from lightning_lowrank.federated.attacks import Attack
from lightning_lowrank.federated.clock import SystemModel
from lightning_lowrank.federated.data.indices import ClientIndices
from lightning_lowrank.federated.data.labels import find_named_labels
from lightning_lowrank.federated.data.partitions import IID, Partition
from lightning_lowrank.federated.objective import Objective
from lightning_lowrank.federated.privacy import ClientPrivacy
from lightning_lowrank.federated.protocols import check_protocols
from lightning_lowrank.federated.stages import RoundStage, sees_messages
from lightning_lowrank.federated.state import Base, BufferPolicy, ClientInfo, Server, trained_tensors
from lightning_lowrank.seeding import default_seed

Weighting = Literal["samples", "uniform"]
OptimizerState = Literal["reset", "keep"]
OnClientError = Literal["drop", "raise"]
ExecutionName = Literal["sequential", "vectorized", "auto"]
PersonalTest = Literal["matched_labels", "by_client"]

_CHOICES = {
    "execution": ExecutionName,
    "compile": Literal[False, True],
    "data_on_device": Literal[False, True, "auto"],
    "buffers": BufferPolicy,
    "optimizer_state": OptimizerState,
    "on_client_error": OnClientError,
}
_PARTS: dict[str, tuple[type, str]] = {
    "algorithm": (Algorithm, "FedAvg()"),
    "partition": (Partition, "IID() or Dirichlet(0.3)"),
    "aggregator": (Aggregator, "WeightedMean()"),
    "attackers": (Attack, "SignFlip(0.2)"),
    "objective": (Objective, "MaskAbsentClasses()"),
    "privacy": (ClientPrivacy, "ClientPrivacy(noise_multiplier=1.0)"),
    "system": (SystemModel, "SystemModel(bandwidth=1.25e6, speed=1e10)"),
}
_LISTS: tuple[tuple[str, type, str], ...] = (
    ("uplink", Codec, "codecs such as [TopK(0.1), Half()]"),
    ("downlink", Codec, "codecs such as [TopK(0.1), Half()]"),
    ("stages", RoundStage, "RoundStage objects"),
    ("allow_changes", str, "names such as ['clients_per_round']"),
)
_LONGEST = 200
_SETTINGS_OF_LENGTH = ("local_epochs", "local_steps")


def _meant(given: Any) -> str:
    """A suggestion for a wrong ``partition`` argument: the partition that was probably meant."""
    if isinstance(given, type):
        return f"{given.__name__}(...), an object"
    if isinstance(given, (str, PathLike)):
        text = str(given)
        if text.lower() in ("iid", "dirichlet"):
            return "IID() or Dirichlet(0.3), an object"
        if "." in text or os.sep in text:
            return f"FromIndices({text!r}) for a file of clients' indices, ByKey(column, file={text!r}) for one of keys"
        return f"ByKey({text!r}) for the column, or field of the samples, that names each sample's client"
    if callable(given):
        return "ByKey(function) for a function of the dataset that returns each sample's key"
    if isinstance(given, (Mapping, Sequence, np.ndarray, Tensor)):
        return "FromIndices(...) for the indices of each client, or the client of each sample"
    return ""


@dataclass(eq=False, repr=False)
class FederatedSettings(Configured):
    """The settings of `FederatedLoop`.

    Args:
        algorithm: The federated method.
        clients: Number of clients. May be left out if the partition knows it (`ByKey`, `FromIndices`).
        clients_per_round: Clients drawn in each round: a count, or a share of all clients in (0, 1] as a float.
            ``None``: all of them. Clients without a batch are never drawn.
        partition: How the training set is divided; `IID` by default.
        local_epochs: Passes of a client over its own samples in a round.
        local_steps: Number of batches of a client in a round, instead of ``local_epochs``.
        uplink: Codecs that every message from a client passes, such as ``[TopK(0.1, error_feedback=True), Half()]``.
            They get the difference from `ChangesBase.reference`, by default from the received tensors. Buffers and
            integers are sent exactly. Empty (default): every number is sent as it is.
        downlink: Codecs that every message to a client passes. With error feedback they get the difference from a copy
            of the broadcast that all clients hold, and the server adds clients' changes to its own model (EF21-P).
            Clients outside the cohort receive the broadcast too. Without error feedback they get the values.
        aggregator: The rule that aggregates a round's messages, for methods that average; `WeightedMean` by default.
            Robust rules, such as ``TrimmedMean(0.3)`` or ``Krum(2)``, withstand clients that send anything.
        attackers: Clients that attack, such as ``SignFlip(0.2)``, to test robust rules; none by default.
        objective: A change of the clients' objective, such as ``MaskAbsentClasses()``.
        privacy: Differential privacy of whole clients, such as ``ClientPrivacy(clip=1.0, target_epsilon=8.0)``; see
            there. It goes with ``weighting="uniform"`` and methods whose server needs only the clients' mean. ``None``
            (default): none. (Single samples are protected by the callback `DifferentialPrivacy`.)
        weighting: A client's weight in the mean: its number of ``"samples"``, ``"uniform"``, or a function of the
            `ClientInfo`.
        buffers: Persistent buffers such as BatchNorm's statistics. ``"average"``: sent, trained and averaged like
            weights (integer ones rounded). ``"local"``: each client keeps its own, nothing is sent, and the global
            model keeps those it began with. ``"reset"``: every client starts each round from the initial ones, and
            only the results are sent and averaged.
        ema_parameters: Patterns of frozen parameters that training itself changes, such as ``["teacher.*"]`` for a
            teacher that follows by an exponential moving average. They are sent, trained and averaged as ``buffers``
            says. Frozen parameters that change without being named here are refused. Writes through ``tensor.data`` are
            looked for in the steps of a fit's first client, beyond 16.8 million frozen numbers in a sample of them.
        optimizer_state: ``"reset"``: momentum and the like start from zero with each client and round. ``"keep"``: each
            client continues with its own when it is next drawn, except for moments of factors that a method such as
            `FedMUD` has redrawn since.
        client_dropout: Chance in [0, 1) that a drawn client fails: it is sent the model and never answers. At least
            one client of a round is kept, except with ``ClientPrivacy(sampling="poisson")``.
        on_client_error: What happens if a client fails: if reading its batches, its steps (hooks before the optimizer's
            step included) or its half of the method raise an error, or its update holds a number that is not finite.
            ``"drop"`` (default): a warning names it, the round continues without it, and its state is that of before
            the round. Clients that step together fail together if the step raises. ``"raise"``: the fit ends. Errors of
            settings, memory or CUDA always end it.
        min_clients: Least number of clients that must answer in a round; fewer are an error. Default 1.
        sampling_weights: Relative chance of each client to be drawn: a list, or a dictionary by the clients' names;
            uniform by default.
        participants: Clients of each round, by their ids or, as strings, their names (of `ByKey`, `FromIndices` and the
            like); given instead of drawn.
        availability: For each client the probability, from 0 to 1, that it is available in a round: a list, a
            dictionary by the clients' names, or a function of client id and round that returns it, or True or False.
        system: How long clients' messages and steps would take, such as ``SystemModel(bandwidth=1.25e6, speed=1e10)``,
            and the deadline after which the server continues without late clients. ``None`` (default): rounds have no
            time.
        stages: Further stages of each round, such as one that logs each client's update; see `RoundStage`. They see
            messages after ``attackers``. Stages that see messages are refused with ``privacy``, which would not protect
            their figures.
        labels: Function from the training dataset to its labels, for partitions by label. By default they are found
            from ``targets``, ``labels`` or ``tensors``, or in one pass over the dataset.
        seed: Seed of partition, sampling, data order and clients' randomness. ``None``: the seed given to Lightning's
            ``seed_everything`` before the fit, or 0.
        execution: ``"sequential"`` (default): clients train one after another. ``"vectorized"``: a round's clients step
            together, as one batch of models. The results are equal to rounding (but for dropout and augmentation in
            ``training_step``, whose draws differ); a frozen weight is one product for all clients, so that low-rank
            clients gain most. ``training_step`` is mapped with `torch.func.vmap`: it may not branch on a number or call
            ``.item()`` if clients differ, update a metric, or keep values for later steps, and optimizers must act
            on each number alone (see `register_elementwise`). Clients step together whose batches have tensors of the
            same shapes. Before the first round a step is compared with the same step of a client alone, and refused if
            it differs. ``global_step``, ``max_steps`` and step-wise schedulers then count steps of a chunk, and an
            integer ``val_check_interval`` chunks; ``federated/client_steps`` counts clients' batches in both.
            ``"auto"``: a few steps are tried both ways when the fit begins, the faster way is used, and a line says
            which and why; a resumed run keeps the choice. The trial restores module, optimizers and dataset. If clients
            cannot step together in the trial, they train one after another; a later step that cannot be mapped is made
            for one client after another. Other differences that are found later end the fit with an error. If the
            module has convolutions, a third way is tried: one after another, with the channels of images last in memory
            (`torch.channels_last`), for validation too. A later step that fails in this format raises an error that
            says what to change.
        chunk_size: Largest number of clients that step together. ``None``: as many as a quarter of the free memory
            holds, by the memory of a step on the first round's batches, halved while that step needs more than is free.
            The result does not depend on it, to rounding.
        compile: Whether the steps of clients that step together are compiled by `torch.compile`, which needs a C++
            compiler on a CPU and Triton on a GPU. Compiled are full batches, in stacks of at most four sizes, each of
            which takes some seconds at its first use. Results are the same to rounding. A step that cannot be compiled
            runs uncompiled, and a warning says why. Default ``False``.
        data_on_device: Where samples that are rows of tensors are kept: of a `torch.utils.data.TensorDataset` with
            torch's own collate function, of this package's images, and of a `torch.utils.data.Subset` of them.
            Batches are gathered, normalised and augmented there, without a loader's workers, with the same draws and
            results. ``True``: in the memory of the device that trains. ``False``: in main memory; batches are
            copied from pinned memory if the device is a CUDA GPU. ``"auto"`` (default): on other devices than the
            CPU as ``True`` if the samples take at most a quarter of the memory that is free at the first batch, and
            else as ``False``; also as ``False`` for other data, and if the module or datamodule overrides
            ``on_before_batch_transfer`` or ``transfer_batch_to_device``. Evaluation batches are made on the device if
            all samples are on it; validation batches also need a loader without workers, and samples without draws.
        personal_test: The test samples of each client's own model (`Personal.personal_model`; for most methods the
            global model), evaluated each time validation runs between rounds: ``"matched_labels"``: the validation
            samples of the labels that it has in its training samples; a share in (0, 1): that share of its own samples,
            drawn at random and not trained on; ``"by_client"``: its own validation samples, which ``partition`` finds:
            by the same key as `ByKey`, or by what `FromIndices` has under ``"test"``. Logged are the mean over clients,
            the mean of the worst tenth and the standard deviation of each figure that ``validation_step`` logs:
            ``personal/val_acc``, ``personal/val_acc_worst10``, ``personal/val_acc_std``; with ``"by_client"`` also
            those of the global model on the same samples, ``global/val_acc`` and so on. The folder of a `CSVLogger`
            gets ``clients.csv``, a line for each client with its name, samples and figures. Which values are worst,
            ``higher_is_better`` of a logged metric object says, else the ``mode`` of a callback that monitors the
            figure and its name; if none does, a warning says so, and no worst tenth is logged. ``trainer.test``
            after the fit does the same with the test loader, unless the module was given other weights, as by
            ``ckpt_path``, of which there are no clients' models: a warning says so. ``None``: not at all.
        personal_clients: Number of clients that ``personal_test`` evaluates, drawn once for the whole experiment among
            those that have test samples. ``None`` (default): all.
        client_settings: Settings of single clients, by their ids or, as strings, their names; or as a function of the
            id: ``local_epochs`` or ``local_steps``, and options of the optimizers such as ``lr`` or ``weight_decay``.
            A function may return ``None`` for nothing. Clients that step together have the same options.
        client_memory_limit: Bytes of tensors that all clients together keep in memory from round to round (their own
            models, moments, error feedback). States beyond this are written to a temporary folder as safetensors, the
            least recently drawn clients' first. ``None``: no limit. Checkpoints hold all of it.
        summary: Print the partition's table when the fit begins, and a line with metrics and bytes when it ends.
        allow_changes: Names of settings that may differ from the run whose checkpoint is resumed, such as
            ``["clients_per_round", "algorithm.lr"]``; a name includes everything below it. By default a run that
            differs in anything that changes its result is refused, by these names. They may also differ between the
            processes of one run.

    Raises:
        MisconfigurationException: If a setting is out of range, or two of them do not go together.
    """

    algorithm: Algorithm
    clients: int | None = None
    clients_per_round: int | float | None = None
    partition: Partition | None = None
    local_epochs: int = 1
    local_steps: int | None = None
    uplink: list[Codec] = field(default_factory=list)
    downlink: list[Codec] = field(default_factory=list)
    aggregator: Aggregator | None = None
    attackers: Attack | None = None
    objective: Objective | None = None
    privacy: ClientPrivacy | None = None
    weighting: Weighting | Callable[[ClientInfo], float] = "samples"
    buffers: BufferPolicy = "average"
    ema_parameters: list[str] = field(default_factory=list)
    optimizer_state: OptimizerState = "reset"
    client_dropout: float = 0.0
    on_client_error: OnClientError = "drop"
    min_clients: int = 1
    sampling_weights: list[float] | dict[int | str, float] | None = None
    participants: list[list[int | str]] | None = None
    availability: list[float] | dict[int | str, float] | Callable[[int, int], float] | None = None
    system: SystemModel | None = None
    stages: list[RoundStage] = field(default_factory=list)
    labels: Callable[[Dataset], Sequence[Any]] | None = None
    seed: int | None = None
    summary: bool = field(default=True, metadata=SAME_RESULT)
    execution: ExecutionName = "sequential"
    chunk_size: int | None = None
    compile: bool = False
    data_on_device: bool | Literal["auto"] = field(default="auto", metadata=SAME_RESULT)
    client_settings: dict[int | str, dict[str, Any]] | Callable[[int], Mapping[str, Any] | None] | None = None
    client_memory_limit: int | None = field(default=None, metadata=SAME_RESULT)
    personal_test: PersonalTest | float | None = None
    personal_clients: int | None = field(default=None, metadata=SAME_RESULT)
    allow_changes: list[str] = field(default_factory=list, metadata=SAME_RESULT)

    def __post_init__(self) -> None:
        self._seed_is_default = self.seed is None
        self.renew_seed()
        self.partition = IID() if self.partition is None else self.partition
        self.aggregator = WeightedMean() if self.aggregator is None else self.aggregator
        # Per setting: the value as given, and the value with ids in place of names. A later fit may have other clients.
        self._named: dict[str, tuple[Any, Any]] = {}
        # A site sets min_clients to 1 for its own rounds, so keep the original value.
        self.noise_shares = self.min_clients
        self._check_parts()
        self._check_stages()
        self._check_choices()
        self._check_chances()
        self._check_counts()
        self._check_execution()
        self._check_participants()
        self._check_privacy()

    def _check_parts(self) -> None:
        for name, (kind, example) in _PARTS.items():
            part = getattr(self, name)
            article = "an" if kind.__name__[0] in "AO" else "a"
            wanted = f"{article} {kind.__name__} such as {example}{'' if name == 'algorithm' else ', or None'}"
            allowed = isinstance(part, kind) or (part is None and name != "algorithm")
            meant = _meant(part) if name == "partition" and not allowed else ""
            found = repr(part)
            found = found if len(found) <= _LONGEST else f"{found[:_LONGEST]}..."
            _check(allowed, f"{name} must be {wanted}, got {found}{meant and ': give '}{meant}")
        for name, of, example in _LISTS:
            parts = getattr(self, name)
            of_kind = isinstance(parts, (list, tuple)) and all(isinstance(part, of) for part in parts)
            _check(of_kind, f"{name} must be a list of {example}, got {parts!r}")

        check_protocols(self.algorithm)

    def _check_stages(self) -> None:
        names = [stage.state_key for stage in self.stages]
        taken = ("ledger", "clock", "attackers", "privacy")
        twice = sorted(name for name in {*names} if [*names, *taken].count(name) > 1)
        _check(
            not twice,
            f"stages={self.stages!r} share the key {join_names(twice)} with another stage: give each a key of its own,"
            f" and none of {join_names(taken)}",
        )
        _check(
            self.privacy is None or not any(map(sees_messages, self.stages)),
            f"stages={self.stages!r} see each client's message, which privacy={self.privacy!r} does not protect from"
            " them: leave out one of the two",
        )

    def _check_choices(self) -> None:
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        _check(
            callable(self.weighting) or self.weighting in get_args(Weighting),
            f"weighting must be one of {get_args(Weighting)} or a function of the client, got {self.weighting!r}",
        )
        test = self.personal_test
        _check(
            test is None or test in get_args(PersonalTest) or (isinstance(test, float) and 0 < test < 1),
            f"personal_test must be one of {get_args(PersonalTest)} or a share above 0 and below 1, got {test!r}",
        )
        poisons = self.attackers is not None and self.attackers.poisons_labels
        _check(
            not poisons or self.data_on_device in (False, "auto"),
            f"data_on_device={self.data_on_device!r} does not go with attackers={self.attackers!r}, whose samples get"
            " other labels in main memory: use data_on_device='auto'",
        )

    def _check_chances(self) -> None:
        """Convert arrays and tensors to lists, and refuse values that are no chances or weights."""
        for name, other in (("sampling_weights", ""), ("availability", ", or a function of client id and round")):
            values = getattr(self, name)
            if isinstance(values, (np.ndarray, Tensor)) and values.ndim == 1:
                values = values.tolist()
                setattr(self, name, values)
            if values is None or (other and callable(values)):
                continue
            _check(
                isinstance(values, (Sequence, Mapping)) and not isinstance(values, str),
                f"{name} must be a list with a number for each client, or a dictionary by their names{other}, got"
                f" {values!r}",
            )
            numbers = values.values() if isinstance(values, Mapping) else values
            if name == "availability":
                _check(all(0 <= each <= 1 for each in numbers), f"{name} must be chances in [0, 1], got {values}")
            else:
                allowed = all(math.isfinite(each) and each >= 0 for each in numbers)
                _check(allowed, f"{name} must be finite and not negative, got {values}")

    def _check_counts(self) -> None:
        for name in ("clients", "min_clients", "local_epochs", "local_steps", "chunk_size", "personal_clients"):
            count = getattr(self, name)
            if count is not None or name in ("min_clients", "local_epochs"):
                check_integer(name, count)
        if self.seed is not None:
            check_integer("seed", self.seed, least=None)
        check_number("client_dropout", self.client_dropout, least=0, below=1)
        if self.client_memory_limit is not None:
            check_number("client_memory_limit", self.client_memory_limit, least=0)
        share = self.clients_per_round
        if isinstance(share, float):
            check_number("clients_per_round as a share", share, above=0, most=1, hint="an int for a count")
        elif share is not None:
            check_integer("clients_per_round", share)
            _check(
                self.clients is None or share <= self.clients,
                f"clients_per_round={share} is more than clients={self.clients}",
            )

        _check(
            self.personal_clients is None or self.personal_test is not None,
            f"personal_clients={self.personal_clients} limits the clients that personal_test evaluates: set"
            " personal_test too",
        )
        _check(
            self.local_steps is None or self.local_epochs == 1,
            f"give local_epochs={self.local_epochs} or local_steps={self.local_steps}, not both",
        )

    def _check_execution(self) -> None:
        for name in ("chunk_size", "compile") if self.execution == "sequential" else ():
            value = getattr(self, name)
            _check(
                value in (None, False),
                f"{name}={value!r} goes with execution='vectorized' or 'auto', and with execution='sequential' clients"
                " train one after another, by the module's own steps",
            )

    def _check_participants(self) -> None:
        if self.participants is None:
            return
        drawing = ("clients_per_round", "sampling_weights", "availability")
        given = [name for name in drawing if getattr(self, name) is not None]
        _check(not given, f"participants names every round's clients, so leave out {', '.join(given)}")
        for number, ids in enumerate(self.participants):
            _check(len(ids) > 0, f"participants[{number}] is empty: every round needs at least one client")
            _check(len(set(ids)) == len(ids), f"participants[{number}] names a client twice: {ids}")

    def _check_privacy(self) -> None:
        privacy = self.privacy
        if privacy is None:
            return
        _check(
            self.weighting == "uniform",
            f"privacy bounds what one client changes, and weighting={self.weighting!r} weighs clients by what may be"
            " private: set weighting='uniform'.",
        )
        _check(
            type(self.aggregator) is WeightedMean,
            f"privacy adds its noise to a mean, and aggregator={self.aggregator!r} is another rule: leave it out.",
        )
        for name in ("sampling_weights", "participants", "availability"):
            _check(
                getattr(self, name) is None,
                f"privacy accounts clients that all have the same chance to be drawn, and {name} changes that: leave"
                " it out.",
            )
        _check(
            not privacy.poisson or self.min_clients == 1,
            f"min_clients={self.min_clients} ends a fit by the size of a cohort, which"
            " ClientPrivacy(sampling='poisson') lets vary, down to none: leave it out, or use sampling='fixed'.",
        )
        _check(
            privacy.noise_at == "server" or all(codec.additive for codec in self.uplink),
            f"uplink={self.uplink!r} drops or rounds a part of the noise that each client adds before it encodes its"
            " message, and the noise of the sum would be below that which ClientPrivacy(noise_at='clients') accounts"
            " for: leave it out, or use noise_at='server'.",
        )

    @property
    def least_answers(self) -> int:
        """The number of answers that a round needs; 0 with Poisson sampling, which may draw nobody."""
        return 0 if self.privacy is not None and self.privacy.poisson else self.min_clients

    def renew_seed(self) -> None:
        """Read the current seed of ``seed_everything``, if the experiment has no seed of its own."""
        if self._seed_is_default:
            self.seed = default_seed()

    @property
    def experiment_seed(self) -> int:
        """The experiment's seed."""
        assert self.seed is not None
        return self.seed

    def make_server(self, module: nn.Module, optimizers: Sequence[Optimizer] = (), clients: int = 0) -> Server:
        """A new server with its copy of the module."""
        assert self.aggregator is not None
        treat_as_buffers(module, self.ema_parameters)
        unsent = [name for name, value in trained_tensors(module).items() if value.is_complex()]
        _check(not unsent, f"{join_names(unsent)}: complex tensors cannot be sent; keep them as torch.view_as_real")
        base = Base(module, self.experiment_seed, self.buffers, optimizers)
        base.remember_buffers()
        return Server(base, clients=clients, aggregator=self.aggregator.fresh())

    def divide(self, dataset: Dataset) -> tuple[ClientIndices, Tensor | None, tuple[str, ...] | None]:
        """The partition of a dataset; also its labels and their names, if the settings need labels."""
        assert self.partition is not None
        needed = self.partition.needs_labels or self.personal_test == "matched_labels"
        labels, names = find_named_labels(dataset, self.labels) if needed else (None, None)
        return self.partition.split(dataset, self.clients, self.experiment_seed, labels), labels, names

    def name_clients(self, names: Sequence[str | int] | None, count: int) -> None:
        """Replace clients' names by ids in the settings, once the partition is known.

        Args:
            names: Names of the clients; ``None``: they have none.
            count: Number of clients.

        Raises:
            MisconfigurationException: If a setting names a client that there is not, or one twice, or lacks one.
        """
        shown = list(range(count) if names is None else names)
        ids = {} if names is None else {str(name): client for client, name in enumerate(names)}

        def id_of(client: Any, setting: str) -> int:
            if isinstance(client, str):
                known = f"they have ids, integers from 0 to {count - 1}, and no names"
                known = f"the clients are {first_ten(list(ids))}" if ids else known
                near = difflib.get_close_matches(client, ids, 1)
                meant = f" Did you mean {near[0]!r}?" if near else ""
                _check(client in ids, f"{setting} names the client {client!r}, and {known}.{meant}")
                return ids[client]
            return client

        def by_id(given: Mapping[Any, Any], setting: str) -> dict[int, Any]:
            found = {id_of(client, setting): value for client, value in given.items()}
            _check(len(found) == len(given), f"{setting} names a client twice, by its id and its name: {list(given)}")
            return found

        def of_each(given: Mapping[Any, Any], setting: str) -> list[Any]:
            found = by_id(given, setting)
            unknown = [client for client in found if client not in range(count)]
            _check(not unknown, f"{setting} names {unknown}, but client ids are 0 to {count - 1}")
            lacking = [name for client, name in enumerate(shown) if client not in found]
            _check(not lacking, f"{setting} lacks {len(lacking)} of {count} clients: {first_ten(lacking)}")
            return [found[client] for client in range(count)]

        def of_rounds(given: Sequence[Sequence[Any]], setting: str) -> list[list[int]]:
            found = [[id_of(client, setting) for client in clients] for clients in given]
            for number, clients in enumerate(found):
                _check(len(set(clients)) == len(clients), f"{setting}[{number}] names a client twice: {given[number]}")
            return found

        ways: dict[str, tuple[type, Callable[..., Any]]] = {
            "sampling_weights": (Mapping, of_each),
            "availability": (Mapping, of_each),
            "participants": (Sequence, of_rounds),
            "client_settings": (Mapping, by_id),
        }
        for setting, (kind, way) in ways.items():
            given, found = self._named.get(setting, (None, None))
            if found is None or getattr(self, setting) is not found:
                given = getattr(self, setting)
            if isinstance(given, kind):
                self._named[setting] = given, way(given, setting)
                setattr(self, setting, self._named[setting][1])

    def drawing(self) -> dict[str, Any]:
        """The arguments of `RoundPlanner` on the drawing of clients; call `name_clients` first."""
        privacy = self.privacy
        return {
            "seed": self.experiment_seed,
            "sampling_weights": self.sampling_weights,
            "participants": self.participants,
            "availability": self.availability,
            "poisson": privacy is not None and privacy.poisson,
            "sampling_seed": None if privacy is None else privacy.sampling_seed,
        }

    def cohort_size(self, count: int) -> int:
        """The number of clients that a round draws out of ``count`` clients.

        Raises:
            MisconfigurationException: If a setting names more clients than there are, or is a list of another length.
        """
        for name in ("sampling_weights", "availability"):
            values = getattr(self, name)
            if isinstance(values, Sequence):
                _check(len(values) == count, f"{name} has {len(values)} entries for {count} clients")
        named = [client for each in self.participants or () for client in each]
        unknown = {client for client in named if not isinstance(client, str) and not 0 <= client < count}
        _check(not unknown, f"participants names {sorted(unknown)}, but client ids are 0 to {count - 1}")
        share = self.clients_per_round
        drawn = count if share is None else max(1, round(share * count)) if isinstance(share, float) else share
        _check(drawn <= count, f"clients_per_round={share} is more than the partition's {count} clients")
        fewest = min([drawn] if self.participants is None else map(len, self.participants))
        _check(self.min_clients <= fewest, f"min_clients={self.min_clients} is more than a round's {fewest} clients")
        return drawn

    def clients_with_settings(self, count: int) -> Sequence[int]:
        """The ids of the clients, out of ``count``, that may have settings of their own."""
        if callable(self.client_settings):
            return range(count)
        named = [client for client in self.client_settings or () if not isinstance(client, str)]
        wrong = [client for client in named if not isinstance(client, Integral) or isinstance(client, bool)]
        _check(
            not wrong,
            f"client_settings names {wrong}, and clients' ids are integers, such as 0, and their names strings.",
        )
        unknown = [client for client in named if not 0 <= client < count]
        _check(not unknown, f"client_settings names {unknown}, but client ids are 0 to {count - 1}")
        return sorted(named)

    def settings_of(self, client: int) -> dict[str, Any]:
        """One client's own settings."""
        given = self.client_settings
        if not given:
            return {}
        settings = to_plain(dict((given(client) if callable(given) else (given or {}).get(client)) or {}))
        for name in _SETTINGS_OF_LENGTH:
            if name in settings:
                check_integer(f"client_settings: {name} of client {client}", settings[name])
        _check(
            not all(name in settings for name in _SETTINGS_OF_LENGTH),
            f"client_settings of client {client} has {' and '.join(_SETTINGS_OF_LENGTH)}: give one of them",
        )
        return settings

    def options_of(self, client: int) -> dict[str, Any]:
        """One client's own optimizer options."""
        return {
            # YAML has no tuples, which options such as betas need.
            name: tuple(value) if isinstance(value, list) else value
            for name, value in self.settings_of(client).items()
            if name not in _SETTINGS_OF_LENGTH
        }

    def batches_of(self, client: int, per_epoch: int) -> int:
        """The number of batches that a client trains on in a round; ``per_epoch`` is the number in one pass."""
        if not per_epoch:
            return 0
        own = self.settings_of(client)
        if "local_steps" in own:
            return own["local_steps"]
        if "local_epochs" in own:
            return own["local_epochs"] * per_epoch
        return self.local_steps or self.local_epochs * per_epoch

    def weight_of(self, client: ClientInfo) -> float:
        """A client's weight in the mean.

        Raises:
            MisconfigurationException: If a function of the user's gives none that is finite and above 0.
        """
        if self.weighting == "samples":
            return client.samples
        if self.weighting == "uniform":
            return 1.0
        assert callable(self.weighting)
        weight = self.weighting(client)
        _check(
            math.isfinite(weight) and weight > 0,
            f"weighting gave {weight} for client {client.id}: a weight must be finite and more than 0.",
        )
        return float(weight)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise MisconfigurationException(message)
