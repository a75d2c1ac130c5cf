"""`ConvergenceMonitor` logs the quantities in the convergence theory of aggregation-broadcast operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowrank.arguments import Configured
from lightning_lowrank.internals.lightning import check_namespace, log_figures
from lightning_lowrank.lora import ConvergenceConstants, convergence_constants
from lightning_lowrank.lora.fedlora import FedLoRA
from lightning_lowrank.lora.inputs import AggregatedRound


class ConvergenceMonitor(Configured, Callback):
    r"""Log, in each round of `FedLoRA`, how far its operator is from the conditions under which it converges.

    Chen et al. (ABO, Definitions 2 and 3) prove convergence if the distance between the factors that clients receive
    and the factors that they trained stays within a constant times the squared learning rate: the weak condition
    :math:`\operatorname{mean}_i \lVert P Q - B_i A_i \rVert_F^2 \le R^2 \eta^2`, or the strong one,
    :math:`\operatorname{mean}_i \lVert P - B_i \rVert_F^2 \le P^2 \eta^2` and
    :math:`\operatorname{mean}_i \lVert Q - A_i \rVert_F^2 \le Q^2 \eta^2`. Logged in each round:

    - ``convergence/R``, ``convergence/P``, ``convergence/Q``: the smallest constants for which they hold;
    - ``convergence/R_gap``, ``convergence/P_gap``, ``convergence/Q_gap``: the excess over the smallest constants that
      any common factors reach (the mean of products; the means of factors). Negative if clients receive factors that
      are nearer to their own than any common ones;
    - ``convergence/aggregation_error``: :math:`\lVert E - \operatorname{mean}_i s B_i A_i \rVert_F` of the server's
      effective update :math:`E`, and ``convergence/broadcast_error``: the same of the clients' received update, as
      a root mean square;
    - ``convergence/effective_rank``: of :math:`E`, from the entropy of its singular values (Roy and Vetterli, 2007),
      and ``convergence/energy_beyond``: the share of its energy beyond the smallest client's rank, which tends to zero
      if ranks collapse (Wu et al., 2026). Both are means over layers.

    If clients keep a trained factor (``FedSA``), the server cannot measure it, and nothing is logged.

    Clients are weighted as in the aggregation. Squares are summed over layers. :math:`\eta` is the largest learning
    rate of the optimizers' groups that have trained parameters, as the round's last client leaves it: with schedulers
    that step inside clients it is that client's last rate, and ``client_settings`` of others do not count. The cost is
    one pass over the factors; the effective updates are never built. ``lightning-lowrank report`` plots the constants.

    Args:
        per_layer: Log each layer's constants too, as ``convergence/R/<layer>`` and so on.

    Raises:
        MisconfigurationException: If there is no `FederatedLoop` with `FedLoRA` in the trainer's callbacks.

    Example:
        >>> from lightning_lowrank import ConvergenceMonitor, FederatedLoop, FedLoRA, LowRank, MatrixProduct, ProductSum
        >>> callbacks = [
        ...     LowRank(MatrixProduct(), rank=8, init="lora"),
        ...     FederatedLoop(FedLoRA(ProductSum()), clients=10),
        ...     ConvergenceMonitor(),
        ... ]
    """

    def __init__(self, per_layer: bool = True) -> None:
        self.per_layer = per_layer
        self._trainer: pl.Trainer | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raise if the trainer is of the older package ``pytorch_lightning``."""
        check_namespace(trainer, pl_module)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Observe the algorithm's aggregations."""
        algorithm = self._algorithm(trainer)
        operator = algorithm.operator
        if operator.sent_up(0) != operator.trained(0):
            rank_zero_warn(
                f"ConvergenceMonitor logs nothing: with {operator!r} clients keep a factor that they train, which"
                " the server does not have."
            )
            return
        self._trainer = trainer
        if self._observe not in algorithm.observers:
            algorithm.observers.append(self._observe)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stop observing."""
        if self._trainer is not None:
            self._algorithm(trainer).observers.remove(self._observe)
            self._trainer = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop observing; Lightning does not call `teardown` after an error."""
        self.teardown(trainer, pl_module, "fit")

    @staticmethod
    def _algorithm(trainer: pl.Trainer) -> FedLoRA:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if callback.state_key == "FederatedLoop" and isinstance(callback.algorithm, FedLoRA):
                return callback.algorithm
        raise MisconfigurationException(
            "ConvergenceMonitor measures FedLoRA's aggregations, and the trainer's callbacks have no"
            " FederatedLoop(FedLoRA(...))."
        )

    def _observe(self, aggregated: AggregatedRound) -> None:
        assert self._trainer is not None
        found = {
            layer: convergence_constants([pairs[layer] for pairs in aggregated.pairs], broadcast, aggregated.weights)
            for layer, broadcast in aggregated.broadcasts.items()
        }
        rate = max(
            group["lr"]
            for optimizer in self._trainer.optimizers
            for group in optimizer.param_groups
            if any(parameter.requires_grad for parameter in group["params"])
        )
        logged = {f"convergence/{name}": value for name, value in _figures(list(found.values()), float(rate)).items()}
        if self.per_layer:
            for layer, constants in found.items():
                own = _figures([constants], float(rate))
                logged.update({f"convergence/{name}/{layer}": value for name, value in own.items()})
        log_figures(self._trainer, logged)


def _figures(layers: Sequence[ConvergenceConstants], rate: float) -> dict[str, float]:
    """The logged figures, computed over the given layers."""

    def norm(name: str, minus: str | None = None) -> float:
        total = sum(getattr(each, name) - (getattr(each, minus) if minus else 0) for each in layers)
        return math.sqrt(max(total, 0.0))

    figures = {}
    for constant, name in (("R", "weak"), ("P", "strong_B"), ("Q", "strong_A")):
        distance = norm(name)
        # A schedule may end at a learning rate of zero, where the constants are undefined.
        figures[constant] = distance / rate if rate else math.nan
        figures[f"{constant}_gap"] = (distance - norm(name, f"{name}_gap")) / rate if rate else math.nan
    for name in ("aggregation_error", "broadcast_error"):
        figures[name] = math.sqrt(sum(getattr(each, name) ** 2 for each in layers))
    for name in ("effective_rank", "energy_beyond"):
        figures[name] = sum(getattr(each, name) for each in layers) / len(layers)
    return figures
