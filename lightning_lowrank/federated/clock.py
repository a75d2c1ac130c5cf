"""Simulated time: how long rounds take on clients of given bandwidth, latency and speed.

``FederatedLoop(system=...)`` takes a `SystemModel`. The coordinator's `Clock` adds up the time of each client's
messages and steps, and refuses late answers.
"""

from __future__ import annotations

import copy
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from lightning_lowrank.arguments import Configured
from lightning_lowrank.configuration import check_number
from lightning_lowrank.federated.algorithm import Algorithm
from lightning_lowrank.federated.objective import loss_of
from lightning_lowrank.federated.protocols import OwnSteps, UnequalClients
from lightning_lowrank.federated.stages import RoundStage
from lightning_lowrank.federated.state import Base, ClientInfo, Server
from lightning_lowrank.multiply_adds import multiply_adds
from lightning_lowrank.seeding import generator

__all__ = ["DeviceClasses", "Distribution", "LogNormal", "SystemModel"]


class Distribution(Configured, ABC):
    """Draws a number for each client, such as its bandwidth."""

    @abstractmethod
    def draw(self, clients: int, generator: torch.Generator) -> Tensor:
        """A number for each client: float64, shape ``[clients]``."""

    def draw_named(self, clients: int, generator: torch.Generator, names: Sequence[str | int] | None) -> Tensor:
        """A number for each client, given the clients' names; by default that of `draw`."""
        return self.draw(clients, generator)


class LogNormal(Distribution):
    r"""Log-normal numbers: :math:`\text{median} \cdot e^{\sigma z}` with :math:`z \sim N(0, 1)`.

    Args:
        median: Half of the clients have less. Above 0.
        sigma: Deviation of the logarithm, 0 or more. At 1, a client in six has more than 2.7 times the median.

    Raises:
        MisconfigurationException: If an argument is out of range.

    Example:
        >>> LogNormal(1e6, sigma=0.0).draw(2, torch.Generator()).tolist()
        [1000000.0, 1000000.0]
    """

    def __init__(self, median: float, sigma: float = 1.0) -> None:
        check_number("median", median, above=0)
        check_number("sigma", sigma, least=0)
        self.median, self.sigma = median, sigma

    @override
    def draw(self, clients: int, generator: torch.Generator) -> Tensor:
        return self.median * (self.sigma * torch.randn(clients, generator=generator, dtype=torch.float64)).exp()


class DeviceClasses(Distribution):
    """Clients of a few classes, such as phones and servers, each with one value.

    Args:
        values: The value of a client of each class.
        shares: Relative number of clients of each class; equal by default. Each client's class is drawn.

    Raises:
        MisconfigurationException: If there are no values, a value is not above 0, or shares do not fit the values.

    Example:
        >>> sorted(set(DeviceClasses([1e6, 1e7]).draw(100, torch.Generator()).tolist()))
        [1000000.0, 10000000.0]
    """

    def __init__(self, values: list[float], shares: list[float] | None = None) -> None:
        if not values:
            raise MisconfigurationException("values must be one number or more, got []")
        for number, value in enumerate(values):
            check_number(f"values[{number}]", value, above=0)
        if shares is not None and (len(shares) != len(values) or min(shares) < 0 or not 0 < sum(shares) < math.inf):
            raise MisconfigurationException(
                f"shares must be {len(values)} finite numbers, as many as values, none below 0 and not all 0, got"
                f" {shares}"
            )
        self.values, self.shares = values, shares

    @override
    def draw(self, clients: int, generator: torch.Generator) -> Tensor:
        shares = torch.tensor(self.shares or [1.0] * len(self.values), dtype=torch.float64)
        kinds = torch.multinomial(shares, clients, replacement=True, generator=generator)
        return torch.tensor(self.values, dtype=torch.float64)[kinds]


Amount = float | list[float] | Distribution
"""One number for all clients, a number for each, or how they are drawn."""


class SystemModel(Configured):
    r"""A model of the time that clients' messages and steps take, which gives a simulation a clock.

    A client's time in a round is

    .. math:: \frac{\text{bytes down}}{\text{download}} + \frac{\text{samples} \cdot \text{operations}}{\text{speed}}
        + \frac{\text{bytes up}}{\text{bandwidth}} + 2 \cdot \text{latency}

    with the bytes that the `Ledger` counts. All clients of a round work at the same time, and the server takes no time:
    a round is as long as its slowest client, or as ``deadline``. Each round logs ``system/round_seconds``,
    ``system/seconds`` (all rounds so far) and ``system/late``. The simulation does not wait: seconds are computed.

    Operations are those of a sample's forward and backward pass, which torch counts once on a copy of the module
    without values: a multiply-add is two. So low-rank layers and parts of a network (`HeteroFL`, `FedHM`, `SplitMix`)
    take the time of their own computation, and methods with several passes a step that of all passes
    (`OwnSteps.passes`). An optimizer's own computation is not counted.

    Args:
        bandwidth: Bytes a second from a client to the server (10 Mbit/s are 1.25e6). A number, a list with one for each
            client, or a `Distribution`: `LogNormal`, `DeviceClasses`, `Trace`. ``None``: messages up take no time.
        download: Bytes a second from the server to a client. ``None``: as ``bandwidth``.
        latency: Seconds that a message takes in addition, in each direction.
        speed: Floating-point operations a second of a client's device (a phone has some 1e10). ``None``: steps take no
            time.
        operations: Of one sample's forward and backward pass. ``None``: they are counted.
        seconds_per_sample: Seconds that a client takes for one sample's forward and backward pass, given instead of
            ``speed`` and ``operations``: a measured time of one network, whatever the method and the rank.
        deadline: Seconds after which the server continues without the clients that have not answered. They are dropped,
            as ``on_client_error="drop"`` says, and count as ``federated/failed``; the round then takes the whole
            deadline, as it does if a client never answers (``client_dropout``). ``None``: the server waits for all
            answers.

    Raises:
        MisconfigurationException: If an argument is out of range, or neither messages nor steps take any time. When a
            fit begins: if a list has another length than there are clients, or operations cannot be counted.

    Example:
        >>> from lightning_lowrank import FedAvg, FederatedLoop
        >>> system = SystemModel(bandwidth=LogNormal(1.25e6, sigma=1.0), latency=0.05, speed=1e10, deadline=60.0)
        >>> loop = FederatedLoop(FedAvg(), clients=100, clients_per_round=10, system=system)
    """

    def __init__(
        self,
        bandwidth: Amount | None = None,
        download: Amount | None = None,
        latency: Amount = 0.0,
        speed: Amount | None = None,
        operations: float | None = None,
        deadline: float | None = None,
        seconds_per_sample: Amount | None = None,
    ) -> None:
        if seconds_per_sample is not None and (speed is not None or operations is not None):
            raise MisconfigurationException(
                f"seconds_per_sample={seconds_per_sample!r} is the time of a sample, which is also given by"
                f" speed={speed!r} and operations={operations!r}: give one of them."
            )
        amounts = {
            "bandwidth": bandwidth,
            "download": download,
            "latency": latency,
            "speed": speed,
            "seconds_per_sample": seconds_per_sample,
        }
        for name, amount in amounts.items():
            if amount is None or isinstance(amount, Distribution):
                continue
            bounds: dict[str, Any] = {"least": 0} if name == "latency" else {"above": 0}
            if isinstance(amount, (list, tuple)):
                for client, value in enumerate(amount):
                    check_number(f"{name}[{client}]", value, **bounds)
            else:
                check_number(name, amount, **bounds)
        if bandwidth is None and download is None and speed is None and seconds_per_sample is None and latency == 0:
            raise MisconfigurationException(
                "SystemModel() with nothing that takes time has no clock: give bandwidth=1.25e6 (bytes a second),"
                " latency=0.05 (seconds) or speed=1e10 (floating-point operations a second)."
            )
        if operations is not None:
            check_number("operations", operations, least=0)
        if deadline is not None:
            check_number("deadline", deadline, above=0)
        self.bandwidth, self.download, self.latency, self.speed = bandwidth, download, latency, speed
        self.operations, self.deadline, self.seconds_per_sample = operations, deadline, seconds_per_sample

    def draw(self, clients: int, seed: int, names: Sequence[str | int] | None = None) -> dict[str, list[float]]:
        """Each client's figures, by kind: ``"up"``, ``"down"``, ``"latency"``, ``"speed"`` and ``"sample"``.

        They depend on the seed alone, and on the clients' ``names`` if a `Trace` looks clients up by name. A part that
        takes no time is infinitely fast.

        Raises:
            MisconfigurationException: If a list has another length.
        """
        down = self.bandwidth if self.download is None else self.download
        wanted = {"up": self.bandwidth, "down": down, "latency": self.latency, "speed": self.speed}
        wanted["sample"] = 0.0 if self.seconds_per_sample is None else self.seconds_per_sample
        drawn = {}
        for name, amount in wanted.items():
            if isinstance(amount, Distribution):
                # If one distribution serves both directions, a client has the same draw for both.
                purpose = "up" if amount is self.bandwidth else name
                drawn[name] = amount.draw_named(clients, generator(seed, "system", purpose), names).tolist()
            elif isinstance(amount, (list, tuple)):
                if len(amount) != clients:
                    raise MisconfigurationException(
                        f"system: {self._argument(name)} has {len(amount)} numbers for {clients} clients"
                    )
                drawn[name] = [float(value) for value in amount]
            else:
                drawn[name] = [math.inf if amount is None else float(amount)] * clients
        return drawn

    def _argument(self, name: str) -> str:
        if name == "down":
            return "download" if self.download is not None else "bandwidth"
        return {"up": "bandwidth", "sample": "seconds_per_sample"}.get(name, name)


class LateError(Exception):
    """Raised if a client's answer would arrive after the deadline."""


@dataclass(frozen=True)
class _Client:
    """A client's figures in the units of `SystemModel`."""

    up: float
    down: float
    latency: float
    speed: float
    sample: float


class Clock(RoundStage):
    """Adds up the simulated seconds of rounds, and refuses late messages.

    Args:
        model: The model of the time of clients' messages and steps.
        clients: Number of clients.
        samples_read: Returns how many samples a client reads in so many steps of a round.
        seed: Seed of the experiment.
        names: Names of the clients, if they have any.
    """

    key: ClassVar[str] = "clock"

    def __init__(
        self,
        model: SystemModel,
        clients: int,
        samples_read: Callable[[int, int], int],
        seed: int,
        names: Sequence[str | int] | None = None,
    ) -> None:
        drawn = model.draw(clients, seed, names)
        columns = (drawn["up"], drawn["down"], drawn["latency"], drawn["speed"], drawn["sample"])
        self._clients = [_Client(*values) for values in zip(*columns, strict=True)]
        self._model = model
        self._samples_read = samples_read
        self.operations: Operations | None = None
        """Counts the operations of steps, if the model does not say them; to be set before the first answer."""
        self._sent: dict[int, int] = {}
        self.round_seconds = 0.0
        self.total = 0.0
        self.late = 0

    @property
    def counts_operations(self) -> bool:
        """Whether steps take time and `SystemModel` has no number of operations for them."""
        return self._model.speed is not None and self._model.operations is None

    @override
    def begin_round(self, server: Server) -> None:
        self._sent, self.round_seconds, self.late = {}, 0.0, 0
        if self.operations is not None:
            self.operations.begin_round()

    @override
    def down(self, client: ClientInfo, nbytes: int) -> None:
        self._sent[client.id] = nbytes

    @override
    def absent(self, client: int) -> None:
        # The server waits for an absent client until the deadline, if there is one.
        self.round_seconds = max(self.round_seconds, self._model.deadline or 0.0)

    @override
    def answered(self, client: ClientInfo, steps: int, nbytes: int) -> LateError | None:
        has, deadline = self._clients[client.id], self._model.deadline
        seconds = self._sent.get(client.id, 0) / has.down + nbytes / has.up + 2 * has.latency
        if has.sample:
            seconds += self._samples_read(client.id, steps) * has.sample
        elif self._model.speed is not None:
            seconds += self._samples_read(client.id, steps) * self._operations_of(client) / has.speed
        if deadline is not None and seconds > deadline:
            self.late += 1
            return LateError(f"its answer takes {seconds:.4g} s, and the deadline is {deadline:g} s")
        self.round_seconds = max(self.round_seconds, seconds)
        return None

    def _operations_of(self, client: ClientInfo) -> float:
        if self._model.operations is not None:
            return self._model.operations
        assert self.operations is not None
        return self.operations.of_sample(client)

    @override
    def end_round(self) -> None:
        self.total += self.round_seconds
        self._sent = {}

    @override
    def figures(self) -> dict[str, float]:
        return {
            "system/round_seconds": self.round_seconds,
            "system/seconds": self.total,
            "system/late": self.late,
        }

    @override
    def counted(self) -> tuple[float, int]:
        return self.round_seconds, self.late

    @override
    def pool(self, start: tuple[float, int], counts: Sequence[tuple[float, int]]) -> None:
        self.round_seconds = max(seconds for seconds, _ in counts)
        self.late = sum(late for _, late in counts)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "sent": dict(self._sent),
            "round_seconds": self.round_seconds,
            "total": self.total,
            "late": self.late,
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sent = dict(state["sent"])
        self.round_seconds, self.total, self.late = state["round_seconds"], state["total"], state["late"]


class Operations:
    """Counts the operations of training steps, on a copy of the module with tensors on the meta device.

    Args:
        algorithm: The method, which has looked at the module.
        base: The base whose module is the live one, before an execution puts its own step in the module's place.
        batch: A batch as ``training_step`` gets it.
        samples: Number of samples in it.

    Raises:
        MisconfigurationException: If ``training_step`` does not run by itself.
    """

    def __init__(self, algorithm: Algorithm, base: Base, batch: Any, samples: int) -> None:
        self._samples = samples
        self._live = base.module
        self._trained = _trained(base.module)
        self._known: dict[Hashable, _Counts] = {}
        first = ClientInfo(0, 1, 0, base.seed)
        try:
            self._copy(algorithm, base, batch, meta=True)
            self.of_sample(first)
            return
        except Exception:
            pass
        try:
            # The step may need tensors with values, which the meta device lacks.
            self._copy(algorithm, base, batch, meta=False)
            self.of_sample(first)
        except Exception as error:
            raise MisconfigurationException(
                f"system: {type(base.module).__name__}.training_step() does not run without a trainer, so that its"
                f" operations cannot be counted ({type(error).__name__}: {error}): give SystemModel(operations=...),"
                " those of one sample's forward and backward pass, or leave out speed."
            ) from error

    def _copy(self, algorithm: Algorithm, base: Base, batch: Any, meta: bool) -> None:
        known: dict[int, Any] = {}
        if meta:
            for tensor in (*base.module.parameters(), *base.module.buffers()):
                empty = torch.empty_like(tensor, device="meta")
                parameter = isinstance(tensor, nn.Parameter)
                known[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if parameter else empty
        for part in base.module.modules():
            for value in vars(part).values():
                # A computed weight of torch's older weight_norm, spectral_norm and pruning, which torch does not copy.
                if isinstance(value, Tensor) and not value.is_leaf:
                    known[id(value)] = value.detach().to("meta") if meta else value.detach().clone()
        copied = replace(base, optimizers=(), initial_buffers={}, state={})
        # One deepcopy of both, so that references from the method to parts of the module point into the copy.
        self._base, self._algorithm = copy.deepcopy((copied, algorithm), known)
        self._batch = apply_to_collection(batch, Tensor, lambda tensor: tensor.to("meta")) if meta else batch

    def begin_round(self) -> None:
        """Reset the counts if other parameters are trained than in the previous round."""
        trained = _trained(self._live)
        if trained != self._trained:
            self._trained, self._known = trained, {}
            for name, parameter in self._base.module.named_parameters(remove_duplicate=False):
                parameter.requires_grad_(name in trained)

    def of_sample(self, client: ClientInfo) -> float:
        """The operations that a client's step takes per sample."""
        key = UnequalClients.of(self._algorithm).group_key(client)
        if key not in self._known:
            self._known[key] = self._run(client)
        counts = self._known[key]
        forward, backward = OwnSteps.of(self._algorithm).passes(client)
        return (forward * counts.forward + backward * counts.backward) * self._share(counts.layers, client)

    def _run(self, client: ClientInfo) -> _Counts:
        UnequalClients.of(self._algorithm).configure(self._base, client)
        module: Any = self._base.module
        module.train()
        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        arguments = (self._batch, 0) if takes_index else (self._batch,)
        with isolate_rng(), warnings.catch_warnings(), _counter(module) as counter:
            warnings.simplefilter("ignore")
            with torch.enable_grad(), multiply_adds(module) as layers:
                output = module.training_step(*arguments)
            forward = counter.get_total_flops()
            loss = None if output is None else loss_of(output)
            if loss is not None and loss.requires_grad:
                loss.backward()
            backward = counter.get_total_flops() - forward
        module.zero_grad()
        return _Counts(forward / self._samples, backward / self._samples, layers)

    def _share(self, layers: Mapping[str, int], client: ClientInfo) -> float:
        """The share of the counted operations that a client with a part of the parameters carries out."""
        shares = UnequalClients.of(self._algorithm).computed(self._base, client)
        if not shares or not any(layers.values()):
            return 1.0
        done = 0.0
        for name, made in layers.items():
            layer = self._base.module.get_submodule(name)
            weights = ((f"{name}.{part}", value) for part, value in layer.named_parameters() if value.ndim > 1)
            sizes = {parameter: value.numel() for parameter, value in weights}
            part = sum(shares.get(parameter, 1.0) * size for parameter, size in sizes.items())
            done += made * part / max(sum(sizes.values()), 1)
        return done / sum(layers.values())


def _trained(module: nn.Module) -> frozenset[str]:
    parameters = module.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in parameters if parameter.requires_grad)


@contextmanager
def _counter(module: nn.Module) -> Iterator[FlopCounterMode]:
    counter = FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.convolution_backward: _of_convolutions_backward}
    )
    with ExitStack() as contexts:
        # torch counts no operations of these libraries' recurrent layers, and of the processor's fused attention.
        contexts.enter_context(torch.backends.mkldnn.flags(enabled=False))
        if any(parameter.is_cuda for parameter in module.parameters()):
            contexts.enter_context(torch.backends.cudnn.flags(enabled=False))
        contexts.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield contexts.enter_context(counter)


def _of_convolutions_backward(
    gradient: Sequence[int],
    inputs: Sequence[int],
    weight: Sequence[int],
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    wanted: Sequence[bool],
    **keywords: Any,
) -> int:
    """The operations of a convolution's backward pass; torch's own count ignores groups."""
    positions = math.prod((inputs if transposed else gradient)[2:])
    return 2 * inputs[0] * positions * math.prod(weight) * (wanted[0] + wanted[1])


@dataclass(frozen=True)
class _Counts:
    """Operations of a sample's forward and backward pass, and the forward pass's multiply-adds by layer."""

    forward: float
    backward: float
    layers: Mapping[str, int]
