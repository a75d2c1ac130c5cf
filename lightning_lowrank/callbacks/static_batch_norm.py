"""`StaticBatchNorm`: BatchNorm statistics that are recomputed before evaluation, not tracked in training."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from lightning_lowrank.arguments import Configured, join_names
from lightning_lowrank.configuration import check_integer
from lightning_lowrank.federated import FederatedLoop
from lightning_lowrank.federated.algorithm import CompletesModels
from lightning_lowrank.federated.data.columns import describe
from lightning_lowrank.federated.data.loader_checks import loader_like
from lightning_lowrank.federated.protocols import UnequalClients
from lightning_lowrank.federated.randomness import OwnGenerators, StepRandomness
from lightning_lowrank.internals.lightning import batch_transfer, check_namespace, modes_in_steps
from lightning_lowrank.internals.torch import BATCH_NORMS
from lightning_lowrank.seeding import derive_seed, generator

_LEAST_SAMPLES = 2
"""One sample has no variance."""


class StaticBatchNorm(Configured, Callback, CompletesModels):
    """Static BatchNorm (Diao et al., HeteroFL, ICLR 2021, Section 3): statistics are recomputed, not tracked.

    In training, BatchNorm layers normalise by their batch and track nothing. Before each validation of a fit, before a
    checkpoint of weights that were not validated, and at the fit's end, their running statistics become the mean over
    the batches of the training set, with the current weights: a pass over the training data with the module's
    ``forward``, in training mode, without gradients. Module and checkpoints have the statistics of their weights, for a
    later test or export; a checkpoint saved inside a round has the statistics of the last pass.

    A layer that training steps leave in evaluation mode, such as that of a frozen backbone or teacher, keeps its
    statistics, by which it normalises in the pass too. So does a layer that ``forward`` does not use, with a warning.

    With `FederatedLoop`, which must come before it in ``callbacks``, the pass is over all clients' training samples
    (not those held out to test them) with the global model. It takes at most as many batches as the round has trained
    on, so that it is shorter than the round. Clients then need no statistics: set ``buffers="local"``, and none are
    sent. (With ``"average"``, which the rounds before ``from_round`` need, they are sent to clients, which neither use
    nor change them.)

    Each further model that the loop evaluates has statistics of its own. Those of a size or rank (`HeteroFL`, `FedHM`,
    `FedLoRA`) are recomputed over all clients' samples, and share the round's number of batches with the global model.
    Those of a client's own model (``personal_test``) are recomputed over its own training samples, with at most as many
    batches as a client trains on in a round. A model whose weights are the global ones has the global
    statistics; so do `SplitMix`'s sizes, whose bases each have statistics of their own.

    Args:
        batches: Number of batches of a pass, for each model. ``None`` (default): all of them, but with `FederatedLoop`
            no more than the round has trained on. Their order is random, the same each time.
        from_round: First epoch, from 0, with static statistics; BatchNorm is as usual before. In FedHM
            (arXiv:2111.14655, Appendix C.2) it is the first milestone of the learning rate.

    Raises:
        MisconfigurationException: If an argument is out of range, the module has no BatchNorm with running statistics
            or no ``forward`` that takes a batch's inputs, or there are several training loaders. If the loop has
            `ClientPrivacy`, or a callback averages weights over time, whose statistics would be those of other weights.

    Example:
        >>> from lightning_lowrank import FedAvg, FederatedLoop, StaticBatchNorm
        >>> callbacks = [FederatedLoop(FedAvg(), clients=10, buffers="local"), StaticBatchNorm()]
    """

    def __init__(self, batches: int | None = None, from_round: int = 0) -> None:
        if batches is not None:
            check_integer("batches", batches, hint="None for all")
        check_integer("from_round", from_round, least=0)
        self.batches = batches
        self.from_round = from_round
        self._layers: list[Any] = []
        self._active: list[Any] = []
        self._unused: set[Any] = set()
        self._static = False
        self._loader: tuple[Any, DataLoader] | None = None
        self._fresh_at: tuple[int, bool] | None = None
        self._models: int | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the BatchNorm layers."""
        check_namespace(trainer, pl_module)
        if stage != "fit":
            return
        loop = _loop_of(trainer)
        if loop is not None and loop.privacy is not None:
            raise MisconfigurationException(
                f"StaticBatchNorm computes statistics of all clients' samples, and {loop.privacy!r} adds no noise to"
                " them: replace BatchNorm by GroupNorm, or leave out one of the two."
            )
        self._layers = [
            layer for layer in pl_module.modules() if isinstance(layer, BATCH_NORMS) and layer.track_running_stats
        ]
        if not self._layers:
            raise MisconfigurationException(
                f"StaticBatchNorm: {type(pl_module).__name__} has no BatchNorm layer with running statistics."
            )
        if not is_overridden("forward", pl_module):
            raise MisconfigurationException(
                f"StaticBatchNorm recomputes statistics with the module's forward(inputs), and"
                f" {type(pl_module).__name__} has none."
            )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
                raise MisconfigurationException(
                    f"StaticBatchNorm recomputes the statistics of the weights that are trained, and"
                    f" {type(callback).__name__} validates and ends with averaged weights: leave out one of the two"
                    " callbacks."
                )
        self._loader = self._fresh_at = self._models = None
        self._active, self._unused = [layer for layer in self._layers if layer.training], set()
        self._begin(0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set tracking for the epoch at which the fit starts or resumes, and check that ``forward`` works."""
        self._try_forward(trainer, pl_module)
        self._begin(trainer.current_epoch)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop tracking from the first static epoch."""
        self._begin(trainer.current_epoch)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Recompute the statistics."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._recompute(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Recompute the statistics for callbacks that save weights by themselves, such as averaging callbacks."""
        if any(getattr(callback, "save_weights_only", False) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            self._recompute(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Replace the statistics in the checkpoint by those of its weights."""
        loop = _loop_of(trainer)
        if trainer.state.fn != "fit" or (loop is not None and loop.in_round):
            return
        self._recompute(trainer, pl_module)
        saved = checkpoint["state_dict"]
        for name, value in self._statistics(pl_module):
            if name in saved:
                saved[name] = value.detach()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Recompute the statistics of the last weights."""
        self._recompute(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Let the layers track statistics again."""
        self._static = False
        self._track(True)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let the layers track statistics again."""
        self._track(True)
        self._loader = None

    def _try_forward(self, trainer: Any, module: pl.LightningModule) -> None:
        """Refuse a ``forward`` that fails on the inputs of a pass or needs more arguments."""
        loop = _loop_of(trainer)
        loader = trainer.train_dataloader if loop is None else loop.data.training_loader
        if type(loader) is not DataLoader or loader.batch_size is None or isinstance(loader.dataset, IterableDataset):
            return
        randomness = StepRandomness(module.device)
        randomness.open()
        modes = [(part, part.training) for part in module.modules()]
        batch: Any = None
        try:
            randomness.seed(derive_seed(0, "static batch norm"))
            batch = batch_transfer(trainer)(loader.collate_fn([loader.dataset[0]]))
            if batch is None:
                return
            inputs = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
            # bind() raises a TypeError if forward needs several arguments.
            inspect.signature(module.forward).bind(inputs)
            if isinstance(inputs, Tensor):
                return
            module.eval()
            with torch.no_grad(), trainer.precision_plugin.forward_context():
                module(inputs)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise MisconfigurationException(
                "StaticBatchNorm recomputes statistics by forward(inputs), where inputs is the batch or, if that is a"
                f" tuple or list, its first entry, but {type(module).__name__}.forward() fails on them"
                f" ({type(error).__name__}: {error}). Batches are {describe(batch)}: write a forward(batch) that"
                " accepts them, or have the dataset return (inputs, targets)."
            ) from error
        finally:
            randomness.release()
            for part, training in modes:
                part.training = training

    def _begin(self, epoch: int) -> None:
        self._static = epoch >= self.from_round
        self._track(not self._static)

    def _track(self, tracked: bool) -> None:
        # Even without track_running_stats, a layer uses its existing statistics in evaluation.
        for layer in self._layers:
            layer.track_running_stats = tracked

    def complete(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        shown: Mapping[str, Tensor],
        samples: Tensor | None,
    ) -> None:
        """Recompute the statistics for the model that the module holds: see `CompletesModels`."""
        if not self._static:
            return
        few = samples is not None and len(samples) < _LEAST_SAMPLES
        if few or all(torch.equal(value, shown[name]) for name, value in module.named_parameters() if name in shown):
            for name, value in self._statistics(module):
                value.copy_(shown.get(name, value))
        elif samples is None:
            self._pass_over_all(trainer, module)
        else:
            loop = _loop_of(trainer)
            assert loop is not None
            plan = loop.plan
            each = None if plan is None else -(-sum(plan.batches) // max(1, len(plan.clients)))
            self._pass(trainer, module, _of_samples(loop, samples), self._given(trainer) or each)

    def _statistics(self, module: pl.LightningModule) -> Iterator[tuple[str, Tensor]]:
        own = {id(layer) for layer in self._layers}
        for name, layer in module.named_modules():
            if id(layer) in own:
                yield from layer.named_buffers(prefix=name, recurse=False)

    def _recompute(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        loop, modes = _loop_of(trainer), modes_in_steps(trainer)
        own, known = set(self._layers), set(self._active)
        named = [(name, layer) for name, layer in module.named_modules() if layer in own]
        # Before the first evaluation, modes are known in training alone.
        self._active = [layer for name, layer in named if modes.get(name, layer in known)]
        # The step alone does not tell, because a round that is cut short ends without a further step.
        now = (trainer.global_step, loop is not None and loop.in_round)
        if not self._static or self._fresh_at == now:
            return
        self._pass_over_all(trainer, module)
        self._fresh_at = now

    def _pass_over_all(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        loop = _loop_of(trainer)
        count = self._given(trainer)
        if not count and loop is not None and loop.plan is not None:
            if self._models is None:
                self._models = 1 + len(UnequalClients.of(loop.algorithm).variants(loop.server))
            count = max(1, sum(loop.plan.batches) // self._models)
        self._pass(trainer, module, self._training_loader(trainer), count)

    def _pass(self, trainer: pl.Trainer, module: pl.LightningModule, loader: Any, count: int | None) -> None:
        """Recompute the statistics of the layers that steps train, with the module's current weights."""
        if not self._active:
            return
        modes = [(part, part.training) for part in module.modules()]
        options = [(layer, layer.track_running_stats, layer.momentum) for layer in self._layers]
        before = {layer: [value.clone() for value in layer.buffers()] for layer in self._active}
        randomness = StepRandomness(module.device)
        randomness.open()
        randomness.seed(derive_seed(0, "static batch norm"))
        if _loop_of(trainer) is not None:
            # The data set's own generators, which each batch of a round reseeds.
            OwnGenerators(loader.dataset, loader.collate_fn).seed(derive_seed(0, "static batch norm"))
        made = 0
        try:
            module.train()
            self._track(True)
            for layer in self._layers:
                layer.training = layer in before
            for layer in self._active:
                layer.reset_running_stats()
                # The mean over all batches.
                layer.momentum = None
            with torch.no_grad(), trainer.precision_plugin.forward_context():
                for batch in self._inputs(trainer, loader, count):
                    module(batch[0] if isinstance(batch, (list, tuple)) else batch)
                    made += 1
        finally:
            unused = [layer for layer in self._active if not layer.num_batches_tracked]
            for layer in unused:
                for value, old in zip(layer.buffers(), before[layer], strict=True):
                    value.copy_(old)
            for layer, was, momentum in options:
                layer.track_running_stats, layer.momentum = was, momentum
            randomness.release()
            for part, training in modes:
                part.training = training
        if made:
            self._warn_of(unused, module)

    def _warn_of(self, unused: Sequence[Any], module: pl.LightningModule) -> None:
        """Warn once of layers that ``forward`` does not use."""
        new = set(unused) - self._unused
        self._unused |= new
        if new:
            names = join_names([name for name, layer in module.named_modules() if layer in new])
            rank_zero_warn(
                f"StaticBatchNorm: {type(module).__name__}.forward() does not use the BatchNorm layers {names}, whose"
                " statistics stay as they were: have forward() use them, or call eval() on those that are not trained."
            )

    def _given(self, trainer: pl.Trainer) -> int | None:
        """Upper limit on the batches of a pass, as the user set it."""
        return int(trainer.fast_dev_run) or self.batches  # type: ignore[attr-defined]

    def _training_loader(self, trainer: Any) -> Any:
        """The trainer's loader, or with a `FederatedLoop` a loader of all clients' training samples."""
        loop = _loop_of(trainer)
        if loop is None:
            if isinstance(trainer.train_dataloader, (list, tuple, dict)):
                raise MisconfigurationException(
                    "StaticBatchNorm recomputes statistics over one training loader, and there are"
                    f" {len(trainer.train_dataloader)}."
                )
            return trainer.train_dataloader
        divided, source = loop.data.divided(), loop.data.training_loader
        # reload_dataloaders_every_n_epochs may have replaced the loader.
        if self._loader is None or self._loader[0] is not source:
            self._loader = source, _of_samples(loop, torch.cat(list(divided)).sort().values)
        return self._loader[1]

    @staticmethod
    def _inputs(trainer: pl.Trainer, loader: Any, count: int | None) -> Iterator[Any]:
        batches = map(batch_transfer(trainer), islice(_in_one_order(loader), count))
        # Training skips a batch that is None.
        yield from (batch for batch in batches if batch is not None)


def _loop_of(trainer: Any) -> FederatedLoop | None:
    return next((callback for callback in trainer.callbacks if isinstance(callback, FederatedLoop)), None)


def _of_samples(loop: FederatedLoop, samples: Tensor) -> DataLoader:
    """A loader of a part of the training samples that `FederatedLoop` divided."""
    loader = loop.data.training_loader
    assert loader is not None
    return _shuffled_alike(loader, Subset(loader.dataset, samples.tolist()))


def _in_one_order(loader: Any) -> Any:
    """A copy of a plain loader with a fixed shuffled order; any other loader unchanged."""
    plain = type(loader) is DataLoader and isinstance(loader.sampler, (SequentialSampler, RandomSampler))
    if not plain or loader.batch_size is None:
        return loader
    return _shuffled_alike(loader, loader.dataset)


def _shuffled_alike(loader: DataLoader, dataset: Any) -> DataLoader:
    """A copy of a loader for ``dataset``, with a fixed shuffled order."""
    size = cast(int, loader.batch_size)
    # A batch of one sample has no variance, and torch refuses it after a linear layer.
    one_left = len(dataset) > 1 and len(dataset) % size == 1
    sampler = RandomSampler(dataset, generator=generator(0, "static batch norm"))
    drop_last = one_left or (loader.drop_last and len(dataset) >= size)
    return loader_like(loader, dataset, batch_size=size, sampler=sampler, drop_last=drop_last)
