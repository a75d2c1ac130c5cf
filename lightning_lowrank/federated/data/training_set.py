"""The training set of a federated run: divided among clients once, then read in rounds."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SequentialSampler, Subset, TensorDataset

from lightning_lowrank.arguments import first_ten
from lightning_lowrank.federated.attacks import LabelPoison
from lightning_lowrank.federated.data.batches import BatchReader, Request
from lightning_lowrank.federated.data.device import DeviceData
from lightning_lowrank.federated.data.evaluation_samples import hold_out
from lightning_lowrank.federated.data.indices import ClientIndices
from lightning_lowrank.federated.data.labels import find_labels, find_named_labels
from lightning_lowrank.federated.data.loader_checks import batches_of, check_loader, lengths_of, weights_of
from lightning_lowrank.federated.data.planner import RoundPlan, RoundPlanner
from lightning_lowrank.federated.data.round_loader import RoundLoader
from lightning_lowrank.federated.data.sampling import NeedsPoissonBatches
from lightning_lowrank.federated.fingerprint import describe, digest
from lightning_lowrank.federated.progress import Progress
from lightning_lowrank.federated.randomness import StepRandomness
from lightning_lowrank.federated.settings import FederatedSettings
from lightning_lowrank.internals.lightning import batch_transfer
from lightning_lowrank.seeding import derive_seed, generator

_COMPARED_SAMPLES = 16
_MOST_STORED = 2**31


def _stored(dataset: Any) -> str | None:
    """A digest of the tensors and arrays in a `TensorDataset` or a dataset with an attribute ``deterministic``.

    ``None`` for other datasets, which may fill their tensors while they are read, so that a resumed run has other ones.
    """
    parts: list[Any] = []
    while isinstance(dataset, Subset):
        parts.append(np.asarray(dataset.indices))
        dataset = dataset.dataset
    if isinstance(dataset, TensorDataset):
        arrays: list[Any] = list(dataset.tensors)
    elif hasattr(dataset, "deterministic"):
        arrays = [value for value in vars(dataset).values() if isinstance(value, (Tensor, np.ndarray))]
    else:
        return None
    return digest([describe(each) for each in [*parts, *arrays] if each.nbytes <= _MOST_STORED])


class RoundData:
    """Divides the training set among clients, plans rounds, and reads the rounds' batches.

    It divides when the loader is asked for first, which Lightning does before or after the fit begins.

    Args:
        settings: The experiment's settings.
        progress: The run's position.
        on_divided: Called once with the division, and with the labels if the division needed them.

    Attributes:
        group_key: Returns a client's key in a round, equal for clients that may step together.
        resumed_chunks: Which clients step together in the round in which a checkpoint was saved.
    """

    def __init__(
        self,
        settings: FederatedSettings,
        progress: Progress,
        on_divided: Callable[[ClientIndices, Tensor | None], None],
    ) -> None:
        self.settings = settings
        self.chunk_size = 1
        self.stacked = False
        self.indices: ClientIndices | None = None
        self.label_values: Tensor | None = None
        self.label_names: tuple[str, ...] | None = None
        self.held_out: list[Tensor] = []
        self.training_loader: DataLoader | None = None
        self.planner: RoundPlanner
        self.plan: RoundPlan | None = None
        self.resumed_chunks: list[list[int]] | None = None
        self.group_key: Callable[[int, int], Hashable] = lambda client, round_number: None
        self.randomness = StepRandomness(torch.device("cpu"))
        self.device_data: DeviceData | None = None
        self.running = True
        self._fingerprint: dict[str, Any] = {}
        self._labels_of_division: str | None = None
        self._progress = progress
        self._on_divided = on_divided
        self._attackers: tuple[int, ...] = ()
        self._poisoned: LabelPoison | None = None
        self._loader: RoundLoader | None = None
        self._loader_epoch = 0

    def attach(self, trainer: Any, user_loader: Callable[[], Any], limit: int | float) -> None:
        """Attach to a fit: the first one, or a later one that continues with the same partition.

        ``limit`` is the ``limit_train_batches`` that the user gave the trainer.
        """
        self._trainer, self._user_loader, self._limit = trainer, user_loader, limit
        self._poisson = next((each for each in trainer.callbacks if isinstance(each, NeedsPoissonBatches)), None)
        self._every_n_epochs = trainer.reload_dataloaders_every_n_epochs
        self._loader, self.running = None, True
        self.randomness = StepRandomness(trainer.strategy.root_device)

    def use(self, stacked: bool, chunk_size: int) -> None:
        """Set whether clients step together, and the largest size of a chunk."""
        if (stacked, chunk_size) != (self.stacked, self.chunk_size):
            self.stacked, self.chunk_size = stacked, chunk_size
            self._loader, self.plan = None, None

    def release(self) -> None:
        """Stop persistent workers, as does `BatchReader.release`."""
        if self._loader is not None:
            self._loader.release()

    @property
    def loader(self) -> RoundLoader:
        """The round's loader; divides the training set at the first call."""
        return self.load()

    def load(self) -> RoundLoader:
        """The round's loader; divides the training set at the first call."""
        epoch = self._trainer.current_epoch
        renew = self.running and self._every_n_epochs and epoch - self._loader_epoch >= self._every_n_epochs
        if self._loader is not None and not renew:
            return self._loader
        loader = self.training_loader = check_loader(self._user_loader(), weighted=self._poisson is None)
        if self.indices is None:
            self.indices = self._divide(loader.dataset)
            self._on_divided(self.indices, self.label_values)
        size = len(loader.dataset)  # type: ignore[arg-type]
        if size != self.indices.size:
            raise MisconfigurationException(
                f"the training set had {self.indices.size} samples when it was divided among the clients and has {size}"
                " now: keep its length, or set reload_dataloaders_every_n_epochs=0."
            )
        self._check_weights(self.indices, loader)
        self.planner = self._make_planner(self.indices, loader)
        self._loader_epoch = epoch
        change = self._poison(loader.dataset, self.indices)
        self.release()
        self._loader = RoundLoader(
            loader,
            self.indices,
            seed=self.planner.seed,
            plan=lambda: self._plan_round(self._trainer.current_epoch),
            position=lambda: self.current_plan().steps(self._progress.chunk),
            randomness=self.randomness,
            shuffle=not isinstance(loader.sampler, SequentialSampler) and not self._trainer.overfit_batches,
            stacked=self.stacked,
            poisson=None if self._poisson is None else self._poisson_seed,
            change=change,
            device_data=None if change is not None else self.device_data,
        )
        return self._loader

    @staticmethod
    def _check_weights(indices: ClientIndices, loader: DataLoader) -> None:
        weights = weights_of(loader)
        if weights is None:
            return
        none = [client for client in range(len(indices)) if len(indices[client]) and not weights[indices[client]].any()]
        if none:
            raise MisconfigurationException(
                f"the WeightedRandomSampler of train_dataloader() gives weight 0 to all samples of {len(none)} clients:"
                f" {first_ten(none)}. Give them other weights, or leave these samples out of the dataset."
            )

    def _poisson_seed(self) -> int:
        assert self._poisson is not None
        return self._poisson.batch_seed(self.settings.experiment_seed)

    def _poison(self, dataset: Dataset, indices: ClientIndices) -> LabelPoison | None:
        """The replacement of attackers' labels; ``None`` if the attack poisons none."""
        attack = self.settings.attackers
        self._attackers, self._poisoned = (), None
        if attack is None or not attack.poisons_labels:
            return None
        self._attackers = attack.members(indices.sizes.tolist(), self.settings.experiment_seed)
        try:
            labels = find_labels(dataset, self.settings.labels)
        except MisconfigurationException:
            labels = None
        samples = torch.cat([indices[client] for client in self._attackers])
        self._poisoned = LabelPoison(attack, samples, indices.size, attack.number_of_classes(labels))
        return self._poisoned

    def divided(self) -> ClientIndices:
        """The partition of the training set; divides it at the first call."""
        if self.indices is None:
            self.load()
        assert self.indices is not None
        return self.indices

    def fingerprint(self) -> dict[str, Any]:
        """The properties of the data that affect a run's result, as plain Python."""
        indices, loader = self.divided(), self.training_loader
        assert loader is not None
        weights = weights_of(loader)
        if not self._fingerprint:
            self._fingerprint = {
                "samples": indices.size,
                "partition": f"{len(indices)} clients, digest {indices.digest()}",
                "labels": self._labels_of_division,
                "content": self._content(loader),
                "stored": _stored(loader.dataset),
            }
        return {
            **self._fingerprint,
            "batch_size": loader.batch_size,
            "drop_last": loader.drop_last,
            "shuffle": not isinstance(loader.sampler, SequentialSampler),
            "group_by_length": lengths_of(loader) is not None,
            **({} if weights is None else {"weights": describe(weights)}),
            "collate_fn": describe(loader.collate_fn),
            "limit_train_batches": self._limit,
        }

    def _content(self, loader: DataLoader) -> str | None:
        """A digest of some samples' batches; ``None`` if two readings differ."""
        seed = self.settings.experiment_seed
        size = len(loader.dataset)  # type: ignore[arg-type]
        drawn = torch.randperm(size, generator=generator(seed, "fingerprint"))[:_COMPARED_SAMPLES].numpy()
        parts = range(0, len(drawn), min(cast(int, loader.batch_size), _COMPARED_SAMPLES))
        read_seed = derive_seed(seed, "fingerprint")
        requests = [Request(drawn[start : start + parts.step], read_seed + start) for start in parts]
        found = [describe(batch) for batch in self._read(loader, requests + requests)]
        first, second = found[: len(requests)], found[len(requests) :]
        return digest(first) if first == second else None

    def _read(self, loader: DataLoader, requests: list[Request]) -> list[Any]:
        """Read some batches outside of rounds."""
        randomness = StepRandomness(self._trainer.strategy.root_device)
        randomness.open(requests[0].seed)
        try:
            # BatchReader uses the user's workers; some datasets can be read by worker processes only.
            return list(BatchReader(loader, lambda: requests).read())
        finally:
            randomness.release()

    def example(self) -> tuple[Any, int]:
        """A batch of the first samples, on the device, and its number of samples."""
        assert self.training_loader is not None
        loader = self.training_loader
        samples = min(cast(int, loader.batch_size), len(loader.dataset))  # type: ignore[arg-type]
        (batch,) = self._read(loader, [Request(np.arange(samples), derive_seed(self.planner.seed, "example"))])
        return batch_transfer(self._trainer)(batch), samples

    def samples_read(self, client: int, steps: int) -> int:
        """The number of samples that a client reads in ``steps`` steps of a round, on average if Poisson-sampled."""
        assert self.training_loader is not None
        loader, samples = self.training_loader, self.planner.samples[client]
        size, once = cast(int, loader.batch_size), int(batches_of(samples, loader))
        if self._poisson is not None:
            return steps * min(size, int(samples))
        passes, rest = divmod(steps, max(once, 1))
        of_one = once * size if loader.drop_last else int(samples)
        return passes * of_one + min(rest * size, of_one)

    def stop(self) -> None:
        """Stop planning rounds, and restore the process's random number generators."""
        self.running = False
        self.randomness.release()

    def present_plan(self) -> RoundPlan:
        """The plan of the trainer's current round, made if needed."""
        _ = self.loader
        return self._plan_round(self._trainer.current_epoch)

    def current_plan(self) -> RoundPlan:
        """The present plan, which must have been made."""
        assert self.plan is not None, "Lightning asks for the loader's length, which makes the plan, before any batch"
        return self.plan

    def labels_of(self, client: int) -> Tensor | None:
        """The labels of a client's training samples; ``None`` if the data has no labels."""
        assert self.indices is not None
        if self._poisson is not None:
            raise MisconfigurationException(
                "the method or objective reads the labels of a client's samples, which DifferentialPrivacy does not"
                " protect: use another one, or leave out DifferentialPrivacy."
            )
        if self.label_values is None and self.training_loader is not None:
            try:
                found = find_named_labels(self.training_loader.dataset, self.settings.labels)
                self.label_values, self.label_names = found
            except MisconfigurationException:
                return None
        if self.label_values is None:
            return None
        if self.label_names is not None:
            raise MisconfigurationException(
                "the method or objective compares labels with the model's outputs, and the labels are strings, such"
                f" as {self.label_names[0]!r}, whose positions in the outputs are unknown: give"
                " FederatedLoop(labels=...), a function dataset -> labels that returns the number of each sample's"
                " class."
            )
        labels = self.label_values[self.indices[client]]
        return self._poisoned.labels(labels) if self._poisoned and client in self._attackers else labels

    def _divide(self, dataset: Dataset) -> ClientIndices:
        settings = self.settings
        indices, self.label_values, self.label_names = settings.divide(dataset)
        settings.name_clients(indices.names, len(indices))
        self._labels_of_division = None if self.label_values is None else digest(describe(self.label_values))
        if isinstance(settings.personal_test, float):
            indices, self.held_out = hold_out(indices, settings.personal_test, settings.experiment_seed)
        return indices

    def _make_planner(self, indices: ClientIndices, loader: DataLoader) -> RoundPlanner:
        settings, trainer, limit = self.settings, self._trainer, self._limit
        truncate = int(trainer.fast_dev_run) or None
        samples = indices.sizes.numpy()
        clients_per_round = settings.cohort_size(len(samples))
        once = batches_of(samples, loader)
        batches = np.where(once > 0, settings.local_steps or settings.local_epochs * once, 0)
        for client in settings.clients_with_settings(len(samples)):
            batches[client] = settings.batches_of(client, int(once[client]))
        if truncate is None and isinstance(limit, int):
            batches = np.minimum(batches, limit)
        elif truncate is None:
            batches = np.where(batches > 0, np.maximum(1, (batches * limit).astype(np.int64)), 0)
        idle = np.flatnonzero((samples > 0) & (once == 0)).tolist()
        if idle and not once.any():
            raise MisconfigurationException(
                f"no client has a batch to train on: with drop_last=True each needs batch_size={loader.batch_size}"
                f" samples, and the largest holds {samples.max()}. Lower batch_size, set drop_last=False, or divide the"
                " training set among fewer clients."
            )
        if idle:
            rank_zero_warn(
                f"with drop_last=True and batch_size={loader.batch_size} some clients have no batch and are never"
                f" drawn: {first_ten(idle)}"
            )
        asked_idle = {client for ids in settings.participants or () for client in ids if not batches[client]}
        if asked_idle:
            raise MisconfigurationException(
                f"participants names clients that have nothing to train on: {sorted(asked_idle)}"
            )
        return RoundPlanner(
            **settings.drawing(),
            batches=batches,
            clients_per_round=clients_per_round,
            failure_probability=settings.client_dropout,
            truncate=truncate,
            chunk_size=self.chunk_size,
            samples=samples,
            group_key=lambda client, round_number: self.group_key(client, round_number),
            process=trainer.global_rank,
            processes=trainer.world_size,
        )

    def _plan_round(self, number: int) -> RoundPlan:
        # After the fit Lightning asks for the loader's length again; no further round must be planned then.
        if self.plan is None or (self.plan.round != number and self.running):
            self.plan = self.planner.plan(number, self.resumed_chunks)
            progress = self._progress
            if progress.round != number:
                progress.begin(number)
            elif progress.chunk and not progress.round_open and max(progress.processes, self.planner.processes) > 1:
                # The round is over; the processes that shared it may have had another number of turns.
                progress.chunk = self.plan.turns
        return self.plan
