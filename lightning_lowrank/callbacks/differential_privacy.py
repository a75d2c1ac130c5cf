"""`DifferentialPrivacy`: protects single training samples, in a plain fit or at each client of a federation."""

from __future__ import annotations

import dataclasses
import functools
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.arguments import Configured, join_names
from lightning_lowrank.configuration import check_integer, check_number
from lightning_lowrank.federated.checks import check_factors_move, refuse_batch_norm
from lightning_lowrank.federated.data.loader_checks import check_loader
from lightning_lowrank.federated.data.poisson import PoissonLoader
from lightning_lowrank.federated.data.sampling import NeedsPoissonBatches
from lightning_lowrank.federated.execution.base import while_training
from lightning_lowrank.federated.execution.compiled import tensors_in
from lightning_lowrank.federated.execution.mapped_leaks import refuse_writes
from lightning_lowrank.federated.execution.why_not import users_hooks
from lightning_lowrank.federated.loop import FederatedLoop
from lightning_lowrank.federated.privacy.accounting import Accountant, Mechanism, check_budget, noise_for
from lightning_lowrank.federated.privacy.noise import gaussian
from lightning_lowrank.federated.privacy.samples import SampleGradients, with_gradients
from lightning_lowrank.federated.protocols import ChangesBase, inherits
from lightning_lowrank.federated.site import SEED_IS_KNOWN, SiteExchange
from lightning_lowrank.federated.state import PRIVACY_ACCOUNT, State
from lightning_lowrank.internals.lightning import TrainLoaderSource, lightnings_log, log_figures
from lightning_lowrank.internals.replaced import replaced
from lightning_lowrank.seeding import default_seed

_LOGGED_CLIENTS = 32
_OF_SAMPLES = ("on_train_batch_start", "on_train_batch_end", "on_before_backward")
"""Hooks that are given samples or their loss."""
_OF_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


@dataclasses.dataclass(frozen=True)
class _Place:
    """A step's coordinates: client (0 without a federation), round or epoch, and number within it."""

    client: int
    round: int
    step: int


class DifferentialPrivacy(NeedsPoissonBatches, Configured, Callback):
    r"""Train with differential privacy of each sample: DP-SGD (Abadi et al., CCS 2016, Algorithm 1).

    Each batch is drawn by Poisson sampling: every sample is in it on its own, with chance :math:`q`, the loader's batch
    size :math:`B` over the number of samples. With the gradients :math:`g_i` of single samples over all trained
    parameters, the optimizer, whichever it is, steps with

    .. math:: \bar g = \frac{1}{B}\Big(\sum_{i} g_i \min\big(1, C / \lVert g_i\rVert\big)
        + \mathcal{N}(0, (z C)^2)\Big).

    The module's own ``training_step`` is called with batches of one sample, mapped over the batch by `torch.func.vmap`,
    or one after another if it cannot be mapped. So a sample's loss must not depend on the other samples; a mean over
    the batch is fine. A mean that divides by class weights or by a number of targets divides by those of the sample
    alone: ``nn.CrossEntropyLoss(weight=...)`` with one target a sample loses its weights, and is refused; with
    ``ignore_index`` each sample counts alike, whatever its number of targets. The gradient of the whole loss is
    clipped, including a method's own terms (``Algorithm.loss``). Logged figures are not protected, nor is other code
    that reads samples: see ``docs/privacy.md``.

    Without `FederatedLoop` the training loader is replaced by one of Poisson-sampled batches. With it (put this
    callback after it), each client protects its samples against everybody else, the server included. Then each client
    has its own ε, and the run's ε is the largest of them, since clients share no sample. Steps count also if the
    client's answer is late or refused, since the server may have received it. Between real sites each site counts its
    own ε in its file, and refuses a round that would pass ``target_epsilon``.

    Each epoch or round logs ``privacy/epsilon`` and, if there are at most 32 clients, ``privacy/epsilon/<client>`` of
    each. In a loop with `ClientPrivacy` these are ``privacy/samples/epsilon`` and ``privacy/samples/epsilon/<client>``,
    because ``privacy/epsilon`` is that of clients there. The fit ends before ``target_epsilon`` is passed, with a
    message. Checkpoints hold the steps spent. Without a federation, a later fit with the same callback adds to the same
    ε, with new noise and new batches. `FederatedLoop` refuses a second private run from the beginning.

    Args:
        clip: Largest norm :math:`C` of a sample's gradient, over all trained parameters, above 0.
        noise_multiplier: Noise :math:`z`, above 0. ``None``: the smallest with which the steps of all epochs cost
            ``target_epsilon``, to 1e-4. In a simulated federation these are the planned steps of each client.
        target_epsilon: Largest ε. ``None``: no limit.
        delta: The δ of all ε. Use less than 1 over the number of samples. Default 1e-5.
        physical_batch_size: Largest number of samples whose gradients are in memory at once. ``None``: all of a batch.
            The result does not depend on it, to rounding.
        accountant: dp-accounting's ``"rdp"`` (default, fast) or ``"pld"``, which finds a smaller ε and takes about a
            second for each.
        secure: Draw noise from the operating system's entropy, and batches from a secret seed, which checkpoints hold.
            By default both come from the run's named generators, which repeat them, and which are not cryptographic:
            whoever knows the seed can remove the noise. The server of real sites knows it, so sites need
            ``secure=True``.
        seed: Seed of noise and batches in a fit without `FederatedLoop`. ``None``: the seed given to Lightning's
            ``seed_everything`` before the fit, or 0.

    Raises:
        MisconfigurationException: If an argument is out of range. When a fit begins, if the training cannot be
            private: BatchNorm, manual optimization, ``precision="16-mixed"``, accumulated or repeated batches, several
            processes or reloaded loaders without a federation, methods and optimizers that take several gradients of a
            batch, complex parameters, factors of which none can move. In a step, if the training step or a hook that is
            given the batch changes the model itself, or the step reads a list or an array in the batch or weights a
            mean by class.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(
        ...     max_epochs=5, callbacks=[DifferentialPrivacy(clip=1.0, target_epsilon=8.0, delta=1e-4)], logger=False
        ... )
    """

    def __init__(
        self,
        clip: float = 1.0,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        delta: float = 1e-5,
        physical_batch_size: int | None = None,
        accountant: Accountant = "rdp",
        secure: bool = False,
        seed: int | None = None,
    ) -> None:
        check_budget(noise_multiplier, target_epsilon, delta, accountant)
        check_number("clip", clip, above=0)
        if physical_batch_size is not None:
            check_integer("physical_batch_size", physical_batch_size)
        self.clip = clip
        self.noise_multiplier = noise_multiplier
        self.target_epsilon = target_epsilon
        self.delta = delta
        self.physical_batch_size = physical_batch_size
        self.accountant: Accountant = accountant
        self.secure = secure
        self.seed = default_seed() if seed is None else seed
        self._seed_is_default = seed is None
        self._noise: float | None = noise_multiplier
        self._own: State = {}
        self._secret = secrets.randbits(62) if secure else None
        self._restore, self._steps = ExitStack(), ExitStack()
        self._forget()

    def batch_seed(self, seed: int) -> int:
        """The seed of the sample draws; a secret one if ``secure``."""
        return seed if self._secret is None else self._secret

    def _forget(self) -> None:
        self._loop: FederatedLoop | None = None
        self._loader: PoissonLoader | None = None
        self._last: _Place | None = None
        self._gradients: SampleGradients | None = None
        self._trained: dict[int, list[str]] = {}

    # Beginning and end of a fit

    def setup(self, trainer: Any, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse configurations that cannot be private; without a `FederatedLoop`, replace the training loader."""
        if stage != "fit":
            return
        self._forget()
        if self._seed_is_default and trainer.current_epoch == 0:
            self.seed = default_seed()
        refuse_batch_norm(pl_module, "DifferentialPrivacy")
        self._check_settings(trainer, pl_module)
        standing = next((each for each in trainer.callbacks if each.state_key == "FederatedLoop"), None)
        if isinstance(standing, FederatedLoop):
            self._loop = standing
        elif standing is None:
            self._take_loader(trainer)

    def _check_settings(self, trainer: Any, module: pl.LightningModule) -> None:
        if sum(isinstance(each, DifferentialPrivacy) for each in trainer.callbacks) > 1:
            raise MisconfigurationException("there are two DifferentialPrivacy callbacks: keep one.")
        if not module.automatic_optimization:
            raise MisconfigurationException(
                "DifferentialPrivacy accounts for one gradient per batch, and the module optimizes manually: use"
                " automatic optimization."
            )
        if trainer.accumulate_grad_batches != 1 or any(
            isinstance(each, GradientAccumulationScheduler) for each in trainer.callbacks
        ):
            raise MisconfigurationException(
                "DifferentialPrivacy adds a whole step's noise to each batch, so that accumulated batches would add it"
                " several times: set accumulate_grad_batches=1, a larger batch_size, and physical_batch_size for what"
                " fits into memory."
            )
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise MisconfigurationException(
                "DifferentialPrivacy clips gradients before precision='16-mixed' takes its scale from them: use"
                " 'bf16-mixed' or '32-true'."
            )
        if trainer.overfit_batches:
            raise MisconfigurationException(
                f"overfit_batches={trainer.overfit_batches} repeats batches, and DifferentialPrivacy accounts for"
                " batches drawn independently in each step: leave it out."
            )

    def _take_loader(self, trainer: Any) -> None:
        if trainer.world_size > 1:
            raise MisconfigurationException(
                f"DifferentialPrivacy draws batches over the whole training set, and {trainer.world_size} processes"
                " have parts of it: set devices=1."
            )
        source = TrainLoaderSource(trainer)
        if not source.is_defined():
            raise MisconfigurationException(
                "there is no training loader: define train_dataloader() on the module or the datamodule, or pass one"
                " to trainer.fit(model, train_dataloaders)."
            )
        if trainer.reload_dataloaders_every_n_epochs:
            raise MisconfigurationException(
                "DifferentialPrivacy accounts for batches of one training set, but reload_dataloaders_every_n_epochs"
                " may"
                " change it: leave it out."
            )
        self._restore.enter_context(source.replaced_by(_Lazy(self, trainer, source)))

    def make_loader(self, trainer: Any, source: TrainLoaderSource) -> PoissonLoader:
        """The loader of Poisson-sampled batches; it is built when Lightning first asks for batches."""
        if self._loader is None:
            self._loader = PoissonLoader(
                check_loader(source.user_loader()),
                self.seed,
                poisson=lambda: self.batch_seed(self.seed),
                steps=self.steps_of,
                epoch=lambda: trainer.current_epoch,
                position=lambda: trainer.fit_loop.epoch_loop.batch_progress.current.ready,
                device=trainer.strategy.root_device,
            )
        return self._loader

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse optimizers and methods that use samples outside of the clipped gradients."""
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise MisconfigurationException(
                    "DifferentialPrivacy accounts for one gradient per batch, and LBFGS takes several: use another"
                    " optimizer."
                )
        if self._loop is None:
            return
        if not inherits(self._loop.algorithm, "local_update"):
            raise MisconfigurationException(
                "DifferentialPrivacy accounts for one gradient per batch, and"
                f" {type(self._loop.algorithm).__name__} takes others or several of them (OwnSteps.local_update): use"
                " a method that leaves the optimizer's step as it is, such as FedAvg()."
            )
        if isinstance(self._loop.exchange, SiteExchange) and not self.secure:
            raise MisconfigurationException(f"DifferentialPrivacy {SEED_IS_KNOWN}")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compute the noise multiplier, and wrap the training step."""
        if self._loop is None and self._loader is None:
            return
        if self._noise is None:
            self._noise = self._noise_of_run(trainer)
        first = self._loop.server.round if self._loop is not None else 0
        names = self._names(pl_module, first)
        check_factors_move(pl_module, names, "DifferentialPrivacy")
        imaginary = [name for name in names if pl_module.get_parameter(name).is_complex()]
        if imaginary:
            raise MisconfigurationException(
                f"{join_names(imaginary)}: DifferentialPrivacy adds noise to real numbers, and complex parameters have"
                " imaginary parts; keep them as torch.view_as_real."
            )
        own = step = pl_module.training_step
        if self._loop is not None:
            # The terms that the method adds to the loss read samples as well, so they are clipped too.
            step = self._loop.rounds.execution.step_of(own)
        gradients = self._gradients = SampleGradients(pl_module, step, self.physical_batch_size, self._round_state)

        def private_step(batch: Any, *arguments: Any) -> torch.Tensor:
            return self._step(trainer, pl_module, gradients, batch, arguments)

        listeners: list[pl.LightningModule | Callback] = [pl_module, *getattr(trainer, "callbacks", [])]
        for listener in listeners:
            hooks = _OF_SAMPLES + (_OF_TRANSFERS if listener is pl_module else ())
            for hook in users_hooks(listener, hooks):
                refuse = functools.partial(_refuse_write, f"{type(listener).__name__}.{hook}()")
                self._steps.enter_context(refuse_writes(listener, hook, lambda: _given_out(pl_module), refuse))
        standing = while_training(trainer, own, private_step)
        self._steps.enter_context(replaced(pl_module, training_step=standing))
        if self._loop is not None:
            self._loop.rounds.execution.substituted = own
        self._stop_if_spent(trainer)

    def _end_steps(self) -> None:
        """Restore the module's training step and the global random number generators."""
        self._steps.close()
        self._gradients = None
        if self._loader is not None:
            self._loader.close()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the module's training step."""
        self._end_steps()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Restore the module's training step and the trainer's training loader."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore the trainer's training loader, and stop the workers of its own."""
        self._end_steps()
        if self._loader is not None:
            self._loader.release()
        self._restore.close()

    # Steps

    def _round_state(self) -> Mapping[str, torch.Tensor]:
        kept = {} if self._loop is None else self._loop.rounds.execution.round_state
        return {f"round_state[{number}]": value for number, value in enumerate(tensors_in(kept))}

    def _names(self, module: pl.LightningModule, round_number: int) -> list[str]:
        """Names of the parameters that are stepped in a round."""
        still = frozenset() if self._loop is None else ChangesBase.of(self._loop.algorithm).fixed_in_round(round_number)
        return [name for name, value in module.named_parameters() if value.requires_grad and name not in still]

    def _place(self, trainer: Any) -> _Place:
        if self._loop is not None:
            execution = self._loop.rounds.execution
            return _Place(execution.clients[0].id, execution.clients[0].round, execution.number)
        return _Place(0, trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx)

    def _kept(self, client: int, store: bool = False) -> State:
        """A client's privacy account, the part of its state that this callback owns; ``store`` keeps a new one."""
        if self._loop is None:
            return self._own
        open_clients = self._loop.rounds.execution.clients
        state = next((each.state for each in open_clients if each.id == client), None)
        state = self._loop.exchange.states[client] if state is None else state
        return state.setdefault(PRIVACY_ACCOUNT, {}) if store else state.get(PRIVACY_ACCOUNT, {})

    def steps_of(self, client: int = 0) -> int:
        """Number of private steps that a client has made in all."""
        return self._kept(client).get("steps", 0)

    def mechanism(self, client: int = 0) -> Mechanism:
        """The mechanism of one of a client's steps: noise and sampling rate, for the accountant."""
        if self._loop is not None:
            loader = self._loop.data.loader
            assert self._loop.indices is not None
            samples = len(self._loop.indices[client])
            return Mechanism(self._noise or 1.0, min(loader.batch_size, samples), samples)
        assert self._loader is not None
        samples = len(self._loader.samples)
        return Mechanism(self._noise or 1.0, min(self._loader.batch_size, samples), samples)

    def epsilon(self, client: int = 0, more: int = 0) -> float:
        """ε of a client after its steps so far and ``more`` further steps."""
        return self.mechanism(client).epsilon(self.steps_of(client) + more, self.delta, self.accountant)

    def epsilons(self) -> dict[int, float]:
        """ε spent so far, by client; without a federation there is one client, 0."""
        if self._loop is None:
            return {0: self.epsilon()}
        sizes = self._loop.data.divided().sizes.tolist()
        return {client: self.epsilon(client) for client, size in enumerate(sizes) if size}

    def _step(
        self, trainer: Any, module: pl.LightningModule, gradients: SampleGradients, batch: Any, arguments: Any
    ) -> torch.Tensor:
        place = self._place(trainer)
        if place == self._last:
            raise MisconfigurationException(
                "DifferentialPrivacy accounts for one gradient per batch, and a second one of the same batch was asked"
                f" for: {', '.join(type(each).__name__ for each in trainer.optimizers)} or a callback calls the"
                " training step again. Use an optimizer that takes one gradient a step."
            )
        target = self.target_epsilon
        if target is not None and self.epsilon(place.client, 1) > target:
            raise MisconfigurationException(f"{self._spent(place.client, 1)}: raise it, or end the run here.")
        loader = self._loader if self._loop is None else None
        parts: tuple[int | str, ...]
        if loader is not None:
            # A later fit counts its epochs from 0 again, and must not repeat the draws of the first.
            number = self.steps_of()
            drawn, parts = loader.drawn(number), (self.seed, "privacy noise", number)
            batch_size = min(loader.batch_size, len(loader.samples))
        else:
            assert self._loop is not None
            of_round = self._loop.data.loader
            drawn = of_round.drawn(place.round, place.client, place.step)
            batch_size = min(of_round.batch_size, len(self._loop.data.divided()[place.client]))
            parts = (self._loop.experiment_seed, "privacy noise", place.round, place.client, place.step)
        names = self._names(module, place.round)
        with torch.no_grad():
            live = dict(module.named_parameters())
            loss, sums, logged, settings = gradients.clipped(names, batch, max(len(drawn), 1), self.clip, arguments)
            if not len(drawn):
                # An empty batch is represented by one placeholder sample, whose gradient is not counted.
                sums = {name: torch.zeros_like(value) for name, value in sums.items()}
            assert self._noise is not None
            noise = gaussian(sums, self._noise * self.clip, *parts, secure=self.secure)
            # Summed in a higher precision: 16 bits would lose much of the sum before it is divided.
            private = {
                name: ((sums[name].to(each.device) + each) / batch_size).to(live[name].dtype).to(live[name].device)
                for name, each in noise.items()
            }
        kept, mechanism = self._kept(place.client, store=True), self.mechanism(place.client)
        drawn_as = [mechanism.sampled, mechanism.population]
        if kept.setdefault("drawn", drawn_as) != drawn_as:
            raise MisconfigurationException(
                f"the steps so far drew {kept['drawn'][0]} of {kept['drawn'][1]} samples, and this one draws"
                f" {drawn_as[0]} of {drawn_as[1]}: ε is computed for equal steps, so continue with the same"
                " data and batch size."
            )
        kept["steps"] = kept.get("steps", 0) + 1
        self._last = place
        if len(drawn):
            for name, value in logged.items():
                lightnings_log(module)(name, value, **{**settings[name], "batch_size": len(drawn)})
        return with_gradients(loss, {name: live[name] for name in names}, private)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Restore the global random number generators, and end the fit if the budget is spent."""
        if self._loader is not None:
            self._loader.close()
            if not (trainer.is_last_batch and 0 < (trainer.max_epochs or 0) <= trainer.current_epoch + 1):
                self._stop_if_spent(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse reads of what steps have left in the module, before its hooks run."""
        if self._gradients is not None and not trainer.sanity_checking:
            self._gradients.look_again()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log ε, and end the fit if the budget is spent."""
        if self._loop is None and self._loader is None:
            return
        if self._gradients is not None:
            self._gradients.look_again()
        if self._loop is not None and isinstance(self._loop.exchange, SiteExchange):
            return
        spent = self.epsilons()
        # A loop with ClientPrivacy logs the ε of clients as privacy/epsilon.
        of_both = self._loop is not None and self._loop.exchange.private is not None
        name = "privacy/samples/epsilon" if of_both else "privacy/epsilon"
        figures = {name: max(spent.values())}
        if self._loop is not None and len(spent) <= _LOGGED_CLIENTS:
            figures |= {f"{name}/{client}": value for client, value in spent.items()}
        log_figures(trainer, figures)
        if not 0 < (trainer.max_epochs or 0) <= trainer.current_epoch + 1:
            self._stop_if_spent(trainer, trainer.current_epoch + 1)

    # The budget

    def _noise_of_run(self, trainer: Any) -> float:
        assert self.target_epsilon is not None
        if self._loop is not None and isinstance(self._loop.exchange, SiteExchange):
            raise MisconfigurationException(
                "target_epsilon alone determines the noise from the run's number of steps, but a site does not know in"
                " which rounds it will take part: give noise_multiplier too."
            )
        steps: dict[int, int] = {}
        epochs, most = trainer.max_epochs, trainer.max_steps
        if epochs == -1 and (most == -1 or self._loop is not None):
            raise MisconfigurationException(
                "target_epsilon alone determines the noise from the number of steps, which max_epochs=-1 does not"
                " bound: set"
                " max_epochs, or give noise_multiplier too."
            )
        if self._loop is None:
            of_all = epochs * trainer.num_training_batches if epochs != -1 else most
            steps[0] = of_all if most == -1 else min(of_all, most)
        else:
            for number in range(max(1, epochs)):
                plan = self._loop.data.planner.plan(number)
                for client, batches in zip(plan.clients, plan.batches, strict=True):
                    steps[client] = steps.get(client, 0) + batches
        runs = [(self.mechanism(client), count) for client, count in steps.items()]
        return noise_for(self.target_epsilon, self.delta, runs, self.accountant)

    def _spent(self, client: int, more: int) -> str:
        who = "" if self._loop is None else f" of client {client}"
        return (
            f"{self.steps_of(client)} steps{who} have cost ε = {self.epsilon(client):.4g} at δ = {self.delta:g}, and"
            f" {more} more would cost {self.epsilon(client, more):.4g}, above target_epsilon={self.target_epsilon:g}"
        )

    def _stop_if_spent(self, trainer: Any, round_number: int | None = None) -> None:
        """End the fit if the next step, or the next round of one of its clients, would exceed the budget."""
        if self.target_epsilon is None:
            return
        due = {0: 1}
        if self._loop is not None:
            if isinstance(self._loop.exchange, SiteExchange):
                return
            number = trainer.current_epoch if round_number is None else round_number
            if 0 < (trainer.max_epochs or 0) <= number:
                return
            plan = self._loop.data.planner.plan(number)
            # A checkpoint may have been written at the end of a round or inside it.
            begun = self._loop.server.round == number and any(map(self.steps_of, plan.clients))
            due = {} if begun else dict(zip(plan.clients, plan.batches, strict=True))
        for client, more in due.items():
            if self.epsilon(client, more) > self.target_epsilon:
                trainer.should_stop = True
                rank_zero_info(f"the fit ends here: {self._spent(client, more)}")
                return

    # Checkpoints

    @property
    def state_key(self) -> str:
        """Name of this callback's state in checkpoints."""
        return "DifferentialPrivacy"

    def state_dict(self) -> dict[str, Any]:
        """The steps spent so far in a plain fit; a client's are in the client's own state."""
        return {
            "noise_multiplier": self._noise,
            "own": dict(self._own),
            "secret": self._secret,
            "arguments": self._compared(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore `state_dict`'s result.

        Raises:
            MisconfigurationException: If the settings of privacy differ from those in the checkpoint.
        """
        before, now = state_dict["arguments"], self._compared()
        changed = [f"{name}={before[name]!r}, now {now[name]!r}" for name in now if before[name] != now[name]]
        if changed:
            raise MisconfigurationException(
                f"the checkpoint's run had DifferentialPrivacy with {'; '.join(changed)}: continue with the same"
                " settings."
            )
        self._noise, self._own = state_dict["noise_multiplier"], dict(state_dict["own"])
        self._secret = state_dict["secret"]

    def _compared(self) -> dict[str, Any]:
        names = ("clip", "noise_multiplier", "delta", "secure", "seed")
        return {name: getattr(self, name) for name in names}


def _given_out(module: pl.LightningModule) -> dict[str, torch.Tensor]:
    """The tensors of the trained model, without counters and without parameters that follow others."""
    trained = {name: value for name, value in module.named_parameters() if value.requires_grad}
    buffers = {name: value for name, value in module.named_buffers() if value.ndim or value.is_floating_point()}
    return {**trained, **buffers}


def _refuse_write(hook: str, name: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"DifferentialPrivacy protects what training_step makes of samples, and {hook}, which is given them or their"
        f" loss, changes {name} without clipping or noise: change it in another hook, such as on_before_zero_grad()."
    )


class _Lazy:
    """Placeholder for the training loader, which builds the private loader at the first request for batches."""

    def __init__(self, privacy: DifferentialPrivacy, trainer: Any, source: TrainLoaderSource) -> None:
        self._make = lambda: privacy.make_loader(trainer, source)

    def __len__(self) -> int:
        return len(self._make())

    def __iter__(self) -> Any:
        return iter(self._make())

    def state_dict(self) -> dict[str, Any]:
        """Tell Lightning that this loader can resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore the state: Lightning's own state has the position."""
